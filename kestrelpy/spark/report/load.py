"""The figures of a load, computed by Spark from the items: tables for further analysis, and the figures of one page.

Rules:
1. The data of an item is read once, for its length. For everything else, six values of each item are kept.
2. The driver gets a bounded amount: ``MOST_QUEUES`` queues, ``MOST_SLOTS`` slots of time, buckets of powers of two.
3. Rates count every minute from a queue's first item to its last, minutes without an item too.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - the usual name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MOST_QUEUES = 50
"""The most queues on the page: those with the most bytes."""
MOST_DRAWN = 6
"""The most queues in a chart."""
MOST_SLOTS = 600
"""The most points along a time axis. If there are more minutes, a slot is several minutes."""
MINUTE_MS = 60_000
CURVE = 100
"""The steps of a load curve."""
_PERCENTILES = (0.5, 0.9, 0.99, 0.999)
_ACCURACY = 2000

Row = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """The figures of a page. ``queues``: a row for each queue, those with the most bytes first.

    ``more_queues``: the number of queues that ``queues`` leaves out. The other lists have rows of the first
    ``MOST_DRAWN`` queues only.
    """

    items: int
    data_bytes: int
    first_added: datetime.datetime
    last_added: datetime.datetime
    queues: list[Row]
    more_queues: int
    slot_minutes: int
    slots: list[Row]
    sizes: list[Row]
    gaps: list[Row]
    lifetimes: list[Row]
    errors: list[Row]
    curves: dict[str, list[float]] = field(default_factory=dict)

    @property
    def drawn(self) -> list[str]:
        return [row["queue"] for row in self.queues[:MOST_DRAWN]]


class Tables:
    """The tables of a load, as DataFrames. ``close()`` frees the data that Spark caches for them."""

    def __init__(self, items: DataFrame) -> None:
        """``items`` has the columns of the format, or of the lake."""
        self._facts = items.select(
            "queue",
            "id",
            F.unix_millis("added").alias("added_ms"),
            F.octet_length("data").cast("bigint").alias("size"),
            (F.unix_millis("expires") - F.unix_millis("added")).alias("lifetime_ms"),
            "error_count",
        ).persist()
        minute = F.floor(F.col("added_ms") / MINUTE_MS)
        by_minute = self._facts.groupBy("queue", minute.alias("number"))
        self._minutes = by_minute.agg(
            F.count("*").alias("items"),
            F.sum("size").alias("bytes"),
            F.min("added_ms").alias("first_ms"),
            F.max("added_ms").alias("last_ms"),
        ).persist()
        self._gaps = self._gap_counts().persist()
        minute = F.timestamp_millis(F.col("number") * MINUTE_MS).alias("minute")
        self.all: dict[str, DataFrame] = {
            "queues": self._queues().persist(),
            "minutes": self._minutes.select("queue", minute, "items", "bytes"),
            "sizes": self._sizes().persist(),
            "gaps": self._gap_sizes().persist(),
            "lifetimes": self._lifetimes().persist(),
            "errors": self._errors().persist(),
        }
        """The tables that are written, by their names."""

    def close(self) -> None:
        for table in (*self.all.values(), self._gaps, self._minutes, self._facts):
            table.unpersist()

    # -- one row a queue ---------------------------------------------------------------------------------------------

    def _queues(self) -> DataFrame:
        """One row for each queue: totals, sizes, burstiness, expiry and errors."""
        facts = self._facts.groupBy("queue").agg(
            F.count("*").alias("items"),
            F.sum("size").alias("bytes"),
            F.timestamp_millis(F.min("added_ms")).alias("first_added"),
            F.timestamp_millis(F.max("added_ms")).alias("last_added"),
            F.min("size").alias("smallest_bytes"),
            F.avg("size").alias("mean_bytes"),
            F.percentile_approx("size", list(_PERCENTILES), _ACCURACY).alias("size_percentiles"),
            F.max("size").alias("largest_bytes"),
            F.count("lifetime_ms").alias("expiring_items"),
            F.percentile_approx("lifetime_ms", 0.5, _ACCURACY).alias("median_lifetime_ms"),
            F.sum((F.col("error_count") > 0).cast("bigint")).alias("failed_items"),
            F.max("error_count").alias("most_errors"),
        )
        named = facts.select(
            "*", *(F.col("size_percentiles")[at].alias(f"p{_digits(p)}_bytes") for at, p in enumerate(_PERCENTILES))
        ).drop("size_percentiles")
        return named.join(self._rates(), "queue").join(self._gap_figures(), "queue", "left").orderBy("queue")

    def _rates(self) -> DataFrame:
        minutes = self._minutes.groupBy("queue").agg(
            (F.max("number") - F.min("number") + 1).alias("minutes"),
            F.count("*").alias("busy_minutes"),
            F.sum("items").alias("_items"),
            F.sum(F.col("items").cast("double") * F.col("items")).alias("_squares"),
            F.max("items").alias("peak_items_per_minute"),
            F.max("bytes").alias("peak_bytes_per_minute"),
            F.timestamp_millis(F.max_by("number", "items") * MINUTE_MS).alias("peak_minute"),
        )
        mean = F.col("_items") / F.col("minutes")
        variance = F.col("_squares") / F.col("minutes") - mean * mean
        return minutes.select(
            "queue",
            "minutes",
            "busy_minutes",
            mean.alias("mean_items_per_minute"),
            "peak_items_per_minute",
            "peak_bytes_per_minute",
            "peak_minute",
            (F.col("peak_items_per_minute") / mean).alias("peak_to_mean"),
            (F.greatest(variance, F.lit(0.0)) / mean).alias("fano_factor"),
        )

    def _gap_figures(self) -> DataFrame:
        count, gap = F.sum("count"), F.col("gap_ms")
        mean = F.sum(gap * F.col("count")) / count
        square = F.sum(gap.cast("double") * gap * F.col("count")) / count
        return self._gaps.groupBy("queue").agg(
            mean.alias("mean_gap_ms"),
            F.percentile("gap_ms", F.lit(0.5), F.col("count")).alias("median_gap_ms"),
            F.percentile("gap_ms", F.lit(0.99), F.col("count")).alias("p99_gap_ms"),
            F.max("gap_ms").alias("longest_gap_ms"),
            F.when(mean > 0, F.greatest(square - mean * mean, F.lit(0.0)) / (mean * mean)).alias("gap_variation"),
        )

    # -- distributions -----------------------------------------------------------------------------------------------

    def _gap_counts(self) -> DataFrame:
        """How often each gap, the time from one item to the next, occurs.

        Gaps within a minute and gaps from one minute to the next are computed separately, so that no task has to sort a
        whole queue.
        """
        within = Window.partitionBy("queue", "number").orderBy("added_ms", "id")
        inside = self._facts.withColumn("number", F.floor(F.col("added_ms") / MINUTE_MS)).select(
            "queue", (F.col("added_ms") - F.lag("added_ms").over(within)).alias("gap_ms")
        )
        following = Window.partitionBy("queue").orderBy("number")
        between = self._minutes.select("queue", (F.col("first_ms") - F.lag("last_ms").over(following)).alias("gap_ms"))
        return inside.unionAll(between).dropna().groupBy("queue", "gap_ms").agg(F.count("*").alias("count"))

    def _sizes(self) -> DataFrame:
        """Items by size, from ``from_bytes`` up to ``to_bytes``, exclusive."""
        buckets = self._facts.groupBy("queue", _bucket("size").alias("bucket"))
        return _bounds(buckets.agg(F.count("*").alias("items"), F.sum("size").alias("bytes")), "bytes")

    def _gap_sizes(self) -> DataFrame:
        """Gaps by length, from ``from_ms`` up to ``to_ms``, exclusive."""
        buckets = self._gaps.groupBy("queue", _bucket("gap_ms").alias("bucket"))
        return _bounds(buckets.agg(F.sum("count").alias("count")), "ms")

    def _lifetimes(self) -> DataFrame:
        """Items with an expiry by the seconds from put to expiry, from ``from_s`` up to ``to_s``, exclusive."""
        expiring = self._facts.where("lifetime_ms is not null")
        seconds = expiring.withColumn("lifetime_s", F.greatest(F.floor(F.col("lifetime_ms") / 1000), F.lit(0)))
        buckets = seconds.groupBy("queue", _bucket("lifetime_s").alias("bucket"))
        return _bounds(buckets.agg(F.count("*").alias("items")), "s")

    def _errors(self) -> DataFrame:
        """Items that were aborted, by how often."""
        failed = self._facts.where("error_count > 0")
        return failed.groupBy("queue", "error_count").agg(F.count("*").alias("items")).orderBy("queue", "error_count")

    # -- the figures of a page ---------------------------------------------------------------------------------------

    def load(self) -> Load | None:
        """The figures of the page; ``None`` if there is no item."""
        tables = self.all
        totals = tables["queues"].agg(
            F.count("*"), F.sum("items"), F.sum("bytes"), F.min("first_added"), F.max("last_added")
        )
        count, items, data_bytes, first_added, last_added = totals.collect()[0]
        if not count:
            return None
        queues = _rows(tables["queues"].orderBy(F.desc("bytes"), "queue").limit(MOST_QUEUES))
        drawn = [row["queue"] for row in queues[:MOST_DRAWN]]
        mine = F.col("queue").isin(drawn)
        first, last = self._minutes.where(mine).agg(F.min("number"), F.max("number")).collect()[0]
        width = -(-(last - first + 1) // MOST_SLOTS)
        histograms = {
            name: _rows(tables[name].where(mine).orderBy("queue", order))
            for name, order in {"sizes": "from_bytes", "gaps": "from_ms", "lifetimes": "from_s"}.items()
        }
        return Load(
            items=items,
            data_bytes=data_bytes,
            first_added=first_added,
            last_added=last_added,
            queues=queues,
            more_queues=count - len(queues),
            slot_minutes=width,
            slots=self._slots(mine, width),
            errors=_rows(tables["errors"].where(mine).orderBy("queue", "error_count").limit(32 * MOST_DRAWN)),
            curves=self._curves(mine, {row["queue"]: row for row in queues}),
            **histograms,
        )

    def _slots(self, mine: Column, width: int) -> list[Row]:
        slot = (F.floor(F.col("number") / width) * width).alias("number")
        slots = self._minutes.where(mine).groupBy("queue", slot)
        sums = slots.agg(F.sum("items").alias("items"), F.sum("bytes").alias("bytes"), F.max("items").alias("peak"))
        return _rows(sums.orderBy("queue", "number"))

    def _curves(self, mine: Column, queues: Mapping[str, Row]) -> dict[str, list[float]]:
        """For each queue: the items per minute that the busiest 0, 1, ... 100% of its minutes reach at least."""
        shares = [at / CURVE for at in range(CURVE, -1, -1)]
        counts = self._minutes.where(mine).groupBy("queue")
        found = counts.agg(F.percentile_approx("items", shares, _ACCURACY).alias("busy")).collect()
        curves = {}
        for row in found:
            busy_share = queues[row.queue]["busy_minutes"] / queues[row.queue]["minutes"]
            at = (step / CURVE / busy_share for step in range(CURVE + 1))
            curves[row.queue] = [float(row.busy[round(each * CURVE)]) if each <= 1 else 0.0 for each in at]
        return curves


def _digits(share: float) -> str:
    """``0.999``: ``999``; ``0.5``: ``50``."""
    return f"{share * 100:g}".replace(".", "")


def _bucket(name: str) -> Column:
    """The number of binary digits of a value: 0 for 0, and n + 1 from the n-th power of two on."""
    return F.when(F.col(name) <= 0, 0).otherwise(F.length(F.bin(name)))


def _bounds(buckets: DataFrame, unit: str) -> DataFrame:
    bucket = F.col("bucket")
    low = F.when(bucket == 0, 0).otherwise(F.pow(F.lit(2), bucket - 1)).cast("bigint").alias(f"from_{unit}")
    high = F.pow(F.lit(2), bucket).cast("bigint").alias(f"to_{unit}")
    rest = [name for name in buckets.columns if name not in ("queue", "bucket")]
    return buckets.select("queue", low, high, *rest).orderBy("queue", low)


def _rows(table: DataFrame) -> list[Row]:
    return [row.asDict() for row in table.collect()]
