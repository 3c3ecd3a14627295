"""``load_report``: its figures are those of a plain computation, its charts are pictures, its page stands alone."""

from __future__ import annotations

import math
import random
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, pvariance
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kestrelpy import JournaledQueue
from kestrelpy.spark import NothingToReport, archive_to_parquet, load_report
from kestrelpy.spark.lake import conversion
from kestrelpy.spark.lake.store import FileStore
from kestrelpy.spark.report import load_report as reporting
from kestrelpy.spark.report.charts import DARK, LIGHT, draw
from kestrelpy.spark.report.load import Load, Tables
from kestrelpy.spark.report.page import page
from kestrelpy.testing import ManualClock
from tests.spark.archives import Row, make_archive
from tests.spark.sessions import slow_spark, spark  # noqa: F401
from tests.support.budget import takes_long

PNG = b"\x89PNG\r\n\x1a\n"
HOSTILE = '<script>alert("$x$")</script> & "quoted"'
CHARTS = ["items", "bytes", "curve", "sizes", "gaps", "lifetimes", "errors"]
START_MS = 1_767_225_000_000


class Item:
    """One item of a made-up load."""

    def __init__(self, queue: str, item_id: int, added_ms: int, draw: random.Random) -> None:
        self.queue, self.id, self.added_ms = queue, item_id, added_ms
        self.data = draw.randbytes(draw.choice((0, 1, 2, 7, 8, 100, 5000)))
        self.lifetime_ms = draw.choice((None, 500, 3_600_000))
        self.error_count = draw.choice((0, 0, 0, 1, 3))


def made_up(queue: str, count: int, mean_gap_ms: float, seed: int) -> list[Item]:
    draw, at, items = random.Random(seed), START_MS, []
    for item_id in range(1, count + 1):
        items.append(Item(queue, item_id, at, draw))
        at += 0 if draw.random() < 0.4 else int(draw.expovariate(1 / mean_gap_ms))
    return items


def frame_of(spark: Any, items: list[Item]) -> Any:  # noqa: F811
    moment = pa.timestamp("us", tz="UTC")
    return spark.createDataFrame(
        pa.table(
            {
                "queue": [item.queue for item in items],
                "id": pa.array([item.id for item in items], pa.int64()),
                "added": pa.array([item.added_ms * 1000 for item in items], moment),
                "expires": pa.array(
                    [None if item.lifetime_ms is None else (item.added_ms + item.lifetime_ms) * 1000 for item in items],
                    moment,
                ),
                "error_count": pa.array([item.error_count for item in items], pa.int32()),
                "data": pa.array([item.data for item in items], pa.binary()),
            }
        )
    )


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return made_up("busy", 900, 900, 1) + made_up(HOSTILE, 60, 200_000, 2) + made_up("single", 1, 1, 3)


@pytest.fixture(scope="module")
def tables(spark: Any, items: list[Item]) -> Any:  # noqa: F811
    made = Tables(frame_of(spark, items))
    yield made
    made.close()


@pytest.fixture(scope="module")
def load(tables: Tables) -> Load:
    found = tables.load()
    assert found is not None
    return found


def near(found: float, expected: float) -> bool:
    return math.isclose(found, expected, rel_tol=1e-9)


def test_the_figures_of_each_queue(load: Load, items: list[Item]) -> None:
    assert sorted(row["queue"] for row in load.queues) == sorted({item.queue for item in items})
    assert (load.items, load.data_bytes) == (len(items), sum(len(item.data) for item in items))
    assert load.more_queues == 0
    for row in load.queues:
        mine = [item for item in items if item.queue == row["queue"]]
        sizes = sorted(len(item.data) for item in mine)
        assert (row["items"], row["bytes"]) == (len(mine), sum(sizes))
        assert (row["smallest_bytes"], row["largest_bytes"]) == (sizes[0], sizes[-1])
        assert near(row["mean_bytes"], fmean(sizes))
        assert row["p50_bytes"] == sizes[(len(sizes) + 1) // 2 - 1]
        assert row["p99_bytes"] == sizes[math.ceil(0.99 * len(sizes)) - 1]
        assert row["expiring_items"] == sum(item.lifetime_ms is not None for item in mine)
        assert row["failed_items"] == sum(item.error_count > 0 for item in mine)
        assert row["most_errors"] == max(item.error_count for item in mine)
        _check_rates(row, [item.added_ms for item in mine])


def _check_rates(row: dict[str, Any], added: list[int]) -> None:
    numbers = Counter(each // 60_000 for each in added)
    counts = [numbers[number] for number in range(min(numbers), max(numbers) + 1)]
    assert (row["minutes"], row["busy_minutes"]) == (len(counts), len(numbers))
    assert row["peak_items_per_minute"] == max(counts)
    assert near(row["mean_items_per_minute"], fmean(counts))
    assert near(row["peak_to_mean"], max(counts) / fmean(counts))
    assert math.isclose(row["fano_factor"], pvariance(counts) / fmean(counts), abs_tol=1e-9)
    gaps = [later - earlier for earlier, later in pairwise(added)]
    if not gaps:
        assert row["median_gap_ms"] is row["gap_variation"] is None
        return
    assert row["longest_gap_ms"] == max(gaps)
    assert near(row["mean_gap_ms"], fmean(gaps))
    assert near(row["median_gap_ms"], median(gaps))
    assert near(row["gap_variation"], pvariance(gaps) / fmean(gaps) ** 2)


def test_distributions_have_every_item(load: Load, items: list[Item]) -> None:
    for queue in {item.queue for item in items}:
        mine = [item for item in items if item.queue == queue]
        sizes = Counter(len(item.data).bit_length() for item in mine)
        found = {row["from_bytes"].bit_length(): row["items"] for row in load.sizes if row["queue"] == queue}
        assert found == sizes
        gaps = Counter((b.added_ms - a.added_ms).bit_length() for a, b in pairwise(mine))
        assert {row["from_ms"].bit_length(): row["count"] for row in load.gaps if row["queue"] == queue} == gaps
        seconds = Counter((item.lifetime_ms // 1000).bit_length() for item in mine if item.lifetime_ms is not None)
        assert {row["from_s"].bit_length(): row["items"] for row in load.lifetimes if row["queue"] == queue} == seconds
        errors = Counter(item.error_count for item in mine if item.error_count)
        assert {row["error_count"]: row["items"] for row in load.errors if row["queue"] == queue} == errors
    assert all(row["to_bytes"] == max(1, 2 * row["from_bytes"]) for row in load.sizes)


def test_slots_and_curves(load: Load, items: list[Item]) -> None:
    assert sum(row["items"] for row in load.slots) == len(items)
    assert load.slot_minutes == 1
    curve = load.curves["busy"]
    counts = Counter(item.added_ms // 60_000 for item in items if item.queue == "busy")
    assert curve[0] == max(counts.values())
    assert curve == sorted(curve, reverse=True)
    assert load.curves[HOSTILE][-1] == 0  # most of its minutes have none


class Reading(HTMLParser):
    """The tags of a page, what they refer to, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.sources: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.sources += [value or "" for name, value in attrs if name in ("src", "srcset", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


@takes_long
def test_the_page_stands_alone_and_escapes_what_it_is_told(load: Load) -> None:
    light, dark = draw(load, LIGHT), draw(load, DARK)
    assert list(light) == list(dark) == CHARTS
    assert all(picture.startswith(PNG) for picture in (*light.values(), *dark.values()))
    assert all(light[name] != dark[name] for name in CHARTS)
    reading = Reading()
    text = page("/data/<lake>", load, light, dark)
    reading.feed(text)
    assert reading.tags["script"] == reading.tags["link"] == 0
    assert reading.tags["img"] == len(CHARTS)
    assert all(source.startswith("data:image/png;base64,") for source in reading.sources)
    assert "http:" not in text
    assert "https:" not in text
    assert HOSTILE in reading.text
    assert "Load of /data/<lake>" in reading.text
    assert "prefers-color-scheme: dark" in text


@slow_spark
def test_a_report_of_an_archive(tmp_path: Path, spark: Any) -> None:  # noqa: F811
    rows = make_archive(tmp_path, "jobs", items=200, days=3) + make_archive(tmp_path, "mail", items=50, days=2)
    made = load_report(spark, tmp_path / "archive", tmp_path / "out")
    assert (made.items, made.data_bytes) == (len(rows), sum(len(row.data) for row in rows))
    assert sorted(made.queues) == ["jobs", "mail"]
    assert made.plots == tuple(f"{name}.png" for name in CHARTS if name != "errors")  # an archive has none
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"tables", made.page, *made.plots}
    minutes = pq.read_table(str(tmp_path / "out" / "tables" / "minutes")).to_pylist()
    expected = Counter((row.queue, row.added_ms // 60_000) for row in rows)
    told = {(row["queue"], int(row["minute"].timestamp()) // 60): row["items"] for row in minutes}
    assert told == expected
    assert (tmp_path / "out" / "index.html").read_text("utf-8").count("<img") == len(made.plots)


def test_a_lake_has_the_same_items_as_its_archive(tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    rows = make_archive(tmp_path, "007", items=100)
    monkeypatch.setattr(conversion, "_run", lambda _, job, names: [job.found(name) for name in names])
    archive_to_parquet(spark, tmp_path / "archive", tmp_path / "lake")
    found = set()
    for place in (str(tmp_path / "archive"), str(tmp_path / "lake"), (tmp_path / "lake").as_uri()):
        items = reporting._items(spark, FileStore(place), place)
        told = items.selectExpr("queue", "id", "unix_millis(added)", "unix_millis(expires)", "data").collect()
        found.add(frozenset(Row(row[0], row[1], row[2], row[3], bytes(row[4])) for row in told))
    assert found == {frozenset(rows)}


def test_error_counts_come_from_the_folder_of_a_queue(tmp_path: Path, spark: Any) -> None:  # noqa: F811
    clock = ManualClock(START_MS)
    with JournaledQueue(tmp_path / "queues", "jobs", clock=clock) as queue:
        queue.put_many([b"x"] * 5)
        for _ in range(2):
            queue.get().abort()
    folder = str(tmp_path / "queues")
    told = reporting._items(spark, FileStore(folder), folder).select("id", "error_count").collect()
    assert [tuple(row) for row in told] == [(1, 2), (2, 0), (3, 0), (4, 0), (5, 0)]


def test_nothing_to_report(tmp_path: Path, spark: Any) -> None:  # noqa: F811
    with pytest.raises(FileNotFoundError):
        load_report(spark, tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NothingToReport, match="no items in"):
        load_report(spark, tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists()
