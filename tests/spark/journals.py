"""Journals of every kind for the tests of reading, and the rows that they must show."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from kestrelpy import JournaledQueue
from kestrelpy.arrow.columns import ARROW_SCHEMA
from kestrelpy.arrow.pieces import PieceReader
from kestrelpy.spark.read.part import SegmentPart
from kestrelpy.spark.read.store_part import StorePart
from tests.support.journals import ROW
from tests.support.patience import PATIENCE

Shipped = Callable[..., JournaledQueue]


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
    reader = PieceReader(part.folders, part.pieces, **options)
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
