"""The proof: compares the results of the pipeline with the input, which plain Python counts.

There are three separate results: the words per file in Parquet, the alerts in the consumer's ledger, and all items in
the lake and the remaining segments. Each check returns a list of complaints. The list should be empty.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kestrelpy.codecs import JSON
from kestrelpy.demo.pipeline._plan import LINES, PipelineRun, is_alert, words_in

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SHOWN = 3


@dataclass
class Account:
    """The totals of the input."""

    lines: Counter[str] = field(default_factory=Counter)
    words: Counter[str] = field(default_factory=Counter)
    alerts: dict[int, str] = field(default_factory=dict)
    checksums: int = 0

    @property
    def total(self) -> int:
        return sum(self.lines.values())


def account(items: Iterable[dict[str, Any]]) -> Account:
    """Count the input. The sum of the items' CRC-32s shows whether any byte differs."""
    mine = Account()
    for item_id, item in enumerate(items, 1):
        mine.lines[item["file"]] += 1
        mine.words[item["file"]] += words_in(item["text"])
        mine.checksums += zlib.crc32(JSON.encode(item))
        if is_alert(item["text"]):
            mine.alerts[item_id] = item["text"]
    return mine


def check_words(rows: Iterable[tuple[str, int, int]], wanted: Account) -> list[str]:
    """Check the query's totals. ``rows``: file, lines, words."""
    complaints = []
    lines: Counter[str] = Counter()
    words: Counter[str] = Counter()
    for name, count, sum_of_words in rows:
        lines[name] += count
        words[name] += sum_of_words
    for what, got, due in (("lines", lines, wanted.lines), ("words", words, wanted.words)):
        wrong = sorted(name for name in got.keys() | due.keys() if got[name] != due[name])
        complaints += [f"{name}: {got[name]:,} {what}, not {due[name]:,}" for name in wrong[:_SHOWN]]
        if len(wrong) > _SHOWN:
            complaints.append(f"and the {what} of {len(wrong) - _SHOWN} more files")
    return complaints


def check_alerts(ledger: Iterable[str], wanted: Account) -> list[str]:
    """Check the alerts. ``ledger``: the lines of the consumer's ledger."""
    seen = [json.loads(line) for line in ledger]
    times = Counter(each["id"] for each in seen)
    complaints = [f"alert {item_id} came {count} times" for item_id, count in times.items() if count > 1][:_SHOWN]
    missing, extra = wanted.alerts.keys() - times.keys(), times.keys() - wanted.alerts.keys()
    complaints += [f"alert {item_id} is missing" for item_id in sorted(missing)[:_SHOWN]]
    complaints += [f"alert {item_id} is not in the input" for item_id in sorted(extra)[:_SHOWN]]
    complaints += [
        f"alert {each['id']} has another text" for each in seen if wanted.alerts.get(each["id"]) != each["text"]
    ][:_SHOWN]
    return complaints


def check_lake(count: int, ids: int, checksums: int, wanted: Account) -> list[str]:
    """Check the items in the lake and in the remaining segments: their number, their different ids, their checksums."""
    complaints = []
    if (count, ids) != (wanted.total, wanted.total):
        complaints.append(f"{count:,} items with {ids:,} ids, not {wanted.total:,}")
    if checksums != wanted.checksums:
        complaints.append("the bytes of the items differ from the input")
    return complaints


def lake_figures(spark: SparkSession, plan: PipelineRun, lake: str) -> tuple[int, int, int]:
    """The number of items, of different ids, and the sum of the CRC-32s: archived items are read from the lake, all
    others from the queue.
    """
    from pyspark.sql import functions as f

    archived = spark.read.parquet(lake).where(f.col("queue") == LINES).select("id", "data")
    last_id = archived.agg(f.max("id")).first()
    after = last_id[0] if last_id is not None and last_id[0] is not None else 0
    rest = spark.read.format("kestrel").option("queue", LINES).load(plan.queues).where(f.col("id") > after)
    every = archived.union(rest.select("id", "data"))
    row = every.agg(f.count("*"), f.count_distinct("id"), f.sum(f.crc32("data"))).first()
    assert row is not None
    return int(row[0]), int(row[1]), int(row[2] or 0)
