"""Rows of an Arrow stream as ``tests.support.journals.row_of`` has those of ``scan``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

import kestrelpy.arrow
from kestrelpy.arrow.columns import ARROW_SCHEMA
from tests.support.journals import ROW

NAMES = ("id", "added", "expires", "error_count", "data", "segment")


def rows_of(batches: Iterable[pa.RecordBatch], queue: str = "jobs") -> list[ROW]:
    """The rows; each batch is valid, and has the columns that Spark shows."""
    rows: list[ROW] = []
    every = list(batches)
    for batch in every:
        assert batch.schema.equals(ARROW_SCHEMA)
        assert batch.num_rows or len(every) == 1, "only a queue without rows has a batch without rows"
        batch.validate(full=True)
        assert set(batch["queue"].to_pylist()) <= {queue}
        chosen = [batch[name].cast(pa.int64()) if name in ("added", "expires") else batch[name] for name in NAMES]
        rows += zip(*(column.to_pylist() for column in chosen), strict=True)
    return rows


def read_rows(folder: Path | str, queue: str = "jobs", **options: Any) -> list[ROW]:
    """What ``kestrelpy.arrow.read`` shows."""
    return rows_of(kestrelpy.arrow.read(folder, queue, **options), queue)


def until_error(batches: Iterable[pa.RecordBatch]) -> tuple[list[ROW], Exception | None]:
    """The rows that come, and the error that ends them."""
    rows: list[ROW] = []
    try:
        for batch in batches:
            rows += rows_of([batch])
    except Exception as error:
        return rows, error
    return rows, None
