"""One segment as Parquet files, one file for each day, and a digest that is the same for the rows and for the file.

A file has the columns of ``COLUMNS``. The queue and the day are in its path, in the form that Spark and other tools
read: ``queue=jobs/day=2026-01-31/NAME.parquet``.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

COLUMNS = ("id", "added", "expires", "error_count", "data", "segment")
ROWS = 128 << 10
"""The most rows of a row group. A reader of the file has one row group in memory at a time."""
_DAY_US = 86_400_000_000
_EPOCH = datetime.date(1970, 1, 1)
_LAST_DAY = (datetime.date.max - _EPOCH).days
_NEVER = -(1 << 63)


class DayFile(NamedTuple):
    """The counts and the digest of a segment's rows of one day."""

    day: str
    items: int
    data_bytes: int
    digest: str


class Digest:
    """A digest of the ids, times and data of rows, in their order. It does not depend on the cut into batches."""

    def __init__(self) -> None:
        self.items = 0
        self.data_bytes = 0
        self._parts = [hashlib.blake2b(digest_size=32) for _ in range(5)]

    def add(self, batch: pa.RecordBatch) -> None:
        data = batch.column("data")
        offsets = np.frombuffer(data.buffers()[1], np.int32, len(data) + 1, 4 * data.offset)
        sizes = np.diff(offsets).astype(np.int64)
        payload = data.buffers()[2]
        expires = pc.fill_null(batch.column("expires").cast(pa.int64()), _NEVER)
        columns = [
            batch.column("id"),
            batch.column("added").cast(pa.int64()),
            expires,
            pa.array(sizes),
        ]
        for part, column in zip(self._parts, columns, strict=False):
            part.update(np.ascontiguousarray(column.to_numpy()).data)
        if payload is not None:
            self._parts[-1].update(memoryview(payload)[int(offsets[0]) : int(offsets[-1])])
        self.items += len(data)
        self.data_bytes += int(sizes.sum())

    def hexdigest(self) -> str:
        return hashlib.blake2b(b"".join(part.digest() for part in self._parts), digest_size=32).hexdigest()


class DayWriter:
    """Writes the Parquet file of one day, in memory. So it can be stored as a whole, by one upload or one rename."""

    def __init__(self, schema: pa.Schema) -> None:
        self._sink = pa.BufferOutputStream()
        self._digest = Digest()
        self._rows: list[pa.RecordBatch] = []
        self._count = 0
        self._writer = pq.ParquetWriter(
            self._sink,
            schema,
            compression="zstd",
            use_dictionary=["segment"],
            write_statistics=["id", "added", "expires", "error_count"],
        )

    def add(self, batch: pa.RecordBatch) -> None:
        self._digest.add(batch)
        self._rows.append(batch)
        self._count += len(batch)
        if self._count >= ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_batches(self._rows), ROWS)
            self._rows, self._count = [], 0

    def finish(self, day: str) -> tuple[DayFile, pa.Buffer]:
        self._flush()
        self._writer.close()
        digest = self._digest
        return DayFile(day, digest.items, digest.data_bytes, digest.hexdigest()), self._sink.getvalue()


def by_day(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Split batches by the day on which the rows were added, UTC. The rows of a day stay in order."""
    for batch in batches:
        days = np.asarray(batch.column("added").cast(pa.int64())) // _DAY_US
        rows = batch.select(COLUMNS)
        for day in np.unique(days).tolist():
            name = (_EPOCH + datetime.timedelta(min(day, _LAST_DAY))).isoformat()
            yield name, rows if len(rows) and (days == day).all() else rows.filter(pa.array(days == day))


def to_day_files(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[DayFile, pa.Buffer]]:
    """Yield a whole Parquet file for each day, in the order of days."""
    writers: dict[str, DayWriter] = {}
    for day, rows in by_day(batches):
        writer = writers.get(day)
        if writer is None:
            writer = writers[day] = DayWriter(rows.schema)
        writer.add(rows)
    for day in sorted(writers):
        yield writers[day].finish(day)


def read_back(file: Any, day: str) -> DayFile:
    """The counts and the digest of all rows of a Parquet file. Raises ``pyarrow.ArrowException``, ``OSError``."""
    digest = Digest()
    for batch in pq.ParquetFile(file).iter_batches(ROWS, columns=list(COLUMNS)):
        digest.add(batch)
    return DayFile(day, digest.items, digest.data_bytes, digest.hexdigest())
