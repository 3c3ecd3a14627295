"""Journals of every kind for the tests of reading, and the rows that they must show."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from kestrelpy import JournaledQueue, Record, scan
from kestrelpy._journal.file_names import lasting_name
from kestrelpy.spark.read.columns import ARROW_SCHEMA
from kestrelpy.spark.read.part import PartReader, SegmentPart
from kestrelpy.spark.read.store_part import StorePart
from tests.support.patience import PATIENCE

ROW = tuple[Any, ...]
Shipped = Callable[..., JournaledQueue]


def fill(queue: JournaledQueue, rnd: random.Random, count: int, *, largest: int = 300) -> None:
    """Plain items, empty ones, some that expire, batches of both kinds."""
    for _ in range(count):
        kind = rnd.random()
        size = rnd.choice([0, rnd.randrange(40), rnd.randrange(1, largest)])
        if kind < 0.05:
            items = [rnd.randbytes(rnd.randrange(30)) for _ in range(rnd.randrange(1, 40))]
            queue.put_many(items, expires_in=rnd.choice([None, 60.0]))
        elif kind < 0.15:
            queue.put(rnd.randbytes(size), expires_in=rnd.randrange(1, 100))
        else:
            queue.put(rnd.randbytes(size))


def row_of(record: Record) -> ROW:
    """A record of ``scan`` as the row that Spark shows, instants in microseconds."""
    expires = None if record.expires_ms is None else record.expires_ms * 1000
    return (record.id, record.added_ms * 1000, expires, record.error_count, record.data, lasting_name(record.segment))


def scanned(folder: Path, queue: str = "jobs", **options: Any) -> list[ROW]:
    """What ``scan`` shows."""
    return [row_of(record) for record in scan(folder, queue, **options)]


def rows_of(batches: Iterable[pa.RecordBatch]) -> list[ROW]:
    """Rows of batches as ``row_of`` has them; each batch is valid and has the columns that Spark expects."""
    rows: list[ROW] = []
    for batch in batches:
        assert batch.schema.equals(ARROW_SCHEMA)
        assert batch.num_rows
        batch.validate(full=True)
        assert set(batch["queue"].to_pylist()) == {"jobs"}
        columns = [
            batch["id"],
            batch["added"].cast(pa.int64()),
            batch["expires"].cast(pa.int64()),
            *(batch[name] for name in ("error_count", "data", "segment")),
        ]
        rows += zip(*(column.to_pylist() for column in columns), strict=True)
    return rows


def read_part(part: InputPartition, **options: Any) -> tuple[list[ROW], int]:
    """The rows of a part, and how many bytes of segments it took."""
    assert isinstance(part, SegmentPart)
    reader = PartReader(part, **options)
    return rows_of(reader.batches()), reader.bytes_read


def executed(parts: Sequence[InputPartition]) -> list[ROW]:
    """The rows of parts of a store, as executors have them from the parts' bytes alone."""
    rows: list[ROW] = []
    for part in pickle.loads(pickle.dumps(parts)):
        assert isinstance(part, StorePart)
        rows += rows_of(part.batches())
    return rows


def flush(queue: JournaledQueue) -> None:
    """Return when all that was put is in the store."""
    assert queue.shipping is not None
    queue.shipping.flush(PATIENCE)
