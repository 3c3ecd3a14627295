"""The load report of a lake, an archive or a folder of queues. ``load.py`` has the figures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kestrelpy.arrow.columns import SCHEMA
from kestrelpy.errors import KestrelError
from kestrelpy.spark.lake.archived import Archived, segments_of
from kestrelpy.spark.lake.conversion import LAKE_SCHEMA
from kestrelpy.spark.lake.store import FileStore
from kestrelpy.spark.locations import local_folder, slots
from kestrelpy.spark.report.charts import DARK, LIGHT, draw
from kestrelpy.spark.report.load import Tables
from kestrelpy.spark.report.page import page

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["LoadReport", "NothingToReport", "load_report"]

PAGE = "index.html"
_TASKS = 4
"""Tasks for each of the session's slots."""


class NothingToReport(KestrelError, LookupError):
    """``source`` has no item."""

    def __init__(self, source: str) -> None:
        super().__init__(f"there are no items in {source}")
        self.source = source


@dataclass(frozen=True)
class LoadReport:
    """The totals, the names of the queues, and the written files, as names in ``out_dir``.

    ``queues`` has the at most 50 queues with the most data, those with the most data first.
    """

    items: int
    data_bytes: int
    queues: tuple[str, ...]
    page: str
    plots: tuple[str, ...]
    tables: tuple[str, ...]


def load_report(
    spark: SparkSession, source: str | os.PathLike[str], out_dir: str | os.PathLike[str], *, filesystem: Any = None
) -> LoadReport:
    """Write a report of the load that the items in ``source`` show.

    For each queue: items and bytes per minute, sizes, burstiness (peak to mean, Fano factor per minute, times between
    items), expiry, error counts.

    ``source``: a lake (``archive_to_parquet``), an archive, or a folder of queues, by path or URI. ``filesystem``: as
    for ``archive_to_parquet``, for an archive only. ``out_dir`` gets ``index.html``, which needs no other file, its
    charts as PNG, and the tables as Parquet: ``tables/queues``, ``minutes``, ``sizes``, ``gaps``, ``lifetimes``,
    ``errors``. Existing files of these names are replaced.

    Only the figures of the page come to the driver. Spark computes and writes the tables. It reads the source once, and
    keeps about 40 bytes an item meanwhile. Raises ``NothingToReport``, ``OSError``. A failure in a task (a damaged
    segment, say) is raised as Spark raises it.
    """
    store, out = FileStore(source, filesystem), FileStore(out_dir)
    tables = Tables(_items(spark, store, os.fspath(source)))
    try:
        load = tables.load()
        if load is None:
            raise NothingToReport(store.name)
        for name, table in tables.all.items():
            table.write.mode("overwrite").parquet(_place(out_dir, f"tables/{name}"))
    finally:
        tables.close()
    light, dark = draw(load, LIGHT), draw(load, DARK)
    for name, picture in light.items():
        out.put(f"{name}.png", picture)
    out.put(PAGE, page(store.name, load, light, dark).encode())
    return LoadReport(
        items=load.items,
        data_bytes=load.data_bytes,
        queues=tuple(row["queue"] for row in load.queues),
        page=PAGE,
        plots=tuple(f"{name}.png" for name in light),
        tables=tuple(f"tables/{name}" for name in tables.all),
    )


def _place(folder: str | os.PathLike[str], name: str) -> str:
    """The URI by which Spark finds ``name`` in ``folder``."""
    place = os.fspath(folder)
    return f"{place.rstrip('/')}/{name}" if "://" in place else f"file://{local_folder(place)}/{name}"


def _items(spark: SparkSession, store: FileStore, source: str) -> DataFrame:
    """The items of a lake, an archive or a folder of queues. Raises ``NothingToReport``, ``OSError``."""
    names = store.names()
    if any(name.startswith("queue=") for name in store.folders()):
        return spark.read.schema(LAKE_SCHEMA).parquet(_place(source, ""))
    if any(name.endswith((".lock", ".checkpoint", ".mark")) for name in names):
        return spark.read.format("kestrel").load(source)
    segments = segments_of(names, store.name)
    if not segments:
        raise NothingToReport(store.name)
    slices = min(len(segments), _TASKS * slots(spark))
    numbers = spark.range(0, len(segments), 1, slices)
    return numbers.mapInArrow(partial(_read, store, segments), SCHEMA)


def _read(store: FileStore, names: list[str], numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """One task: read the archived segments with these numbers, which are indices into ``names``."""
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            name = names[number]
            with store.open(name) as file:
                yield from Archived(file, f"{store.name}/{name}", name).batches()
