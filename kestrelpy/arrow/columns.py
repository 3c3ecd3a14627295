"""Turns items into Arrow record batches. Spark's format ``"kestrel"`` has the same columns.

Rules:
1. A batch has at most ``MOST_ROWS`` rows and about ``MOST_BYTES`` of data, unless one item has more.
2. A column that is the same in every row is made once and shared by all batches.
3. A column that is not wanted is not made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kestrelpy.arrow.decode import NEVER, Data, Numbers, Run

SCHEMA = "queue string, id bigint, added timestamp, expires timestamp, error_count int, data binary, segment string"
ARROW_SCHEMA = pa.schema(
    [
        ("queue", pa.string()),
        ("id", pa.int64()),
        ("added", pa.timestamp("us", tz="UTC")),
        ("expires", pa.timestamp("us", tz="UTC")),
        ("error_count", pa.int32()),
        ("data", pa.binary()),
        ("segment", pa.string()),
    ]
)
COLUMNS = tuple(ARROW_SCHEMA.names)
MOST_ROWS = 64 << 10
MOST_BYTES = 16 << 20
LAST_MS = 253_402_300_799_999
"""The end of the year 9999, in milliseconds since 1970: Spark has no later timestamp. A later expiry is shown as this.
"""
LARGEST_ITEM = (1 << 31) - (64 << 10)
"""The largest item that is read, in bytes: a cell of a DataFrame holds less than 2 GiB."""
_MOST_ERRORS = (1 << 31) - 1


def schema_of(names: Sequence[str]) -> pa.Schema:
    """The schema of batches with these columns, in this order."""
    return pa.schema([ARROW_SCHEMA.field(name) for name in names])


class _Rows(NamedTuple):
    """The rows of one batch, as arrays. ``starts`` are offsets in ``data``."""

    data: Data
    ids: Numbers
    added_ms: Numbers
    expires_ms: npt.NDArray[np.uint64] | None
    starts: Numbers
    sizes: Numbers


class Columns:
    """Makes the batches of one segment's items. ``error_counts``: the error count by id, where it is not 0.

    ``names``: the columns that are wanted.
    """

    def __init__(
        self, queue: str, segment: str, error_counts: Mapping[int, int], names: Sequence[str] = COLUMNS
    ) -> None:
        self._schema = schema_of(names)
        self._queue = _Constant(pa.scalar(queue, pa.string()))
        self._segment = _Constant(pa.scalar(segment, pa.string()))
        self._zeros = _Constant(pa.scalar(0, pa.int32()))
        self._nulls = _Constant(pa.scalar(None, pa.timestamp("us", tz="UTC")))
        self._error_ids = np.array(sorted(error_counts), np.int64)
        counts = [min(error_counts[item_id], _MOST_ERRORS) for item_id in sorted(error_counts)]
        self._errors = np.array(counts, np.int32)

    def batches(self, run: Run, data: Data, rows: slice | npt.NDArray[np.intp]) -> Iterator[pa.RecordBatch]:
        """Yield the chosen ``rows`` of a run over ``data`` as batches. ``rows`` is a slice, or rising indices.

        Raises ``ValueError`` for an item that is too large for a cell.
        """
        starts, sizes, added = run.starts[rows], run.sizes[rows], run.added_ms[rows]
        if isinstance(rows, slice):
            first, last, _ = rows.indices(len(run.starts))
            ids = np.arange(run.first_id + first, run.first_id + max(first, last), dtype=np.int64)
        else:
            ids = rows.astype(np.int64) + run.first_id
        expires = None if run.expires_ms is None else run.expires_ms[rows]
        for some in _cut(sizes):
            expiring = None if expires is None else expires[some]
            chosen = _Rows(data, ids[some], added[some], expiring, starts[some], sizes[some])
            columns = [self._column(name, chosen) for name in self._schema.names]
            yield pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _column(self, name: str, rows: _Rows) -> pa.Array:
        count = len(rows.ids)
        match name:
            case "queue":
                return self._queue.repeated(count)
            case "id":
                return pa.array(rows.ids)
            case "added":
                return _instants(rows.added_ms)
            case "expires":
                return self._nulls.repeated(count) if rows.expires_ms is None else _expiries(rows.expires_ms)
            case "error_count":
                return self._error_counts(rows.ids)
            case "data":
                return _bytes(rows.data, rows.starts, rows.sizes, rows.ids)
            case _:
                return self._segment.repeated(count)

    def _error_counts(self, ids: Numbers) -> pa.Array:
        at = np.searchsorted(self._error_ids, (ids[0], ids[-1] + 1))
        if at[0] == at[1]:
            return self._zeros.repeated(len(ids))
        known = slice(*at)
        counts = np.zeros(len(ids), np.int32)
        _, mine, theirs = np.intersect1d(ids, self._error_ids[known], assume_unique=True, return_indices=True)
        counts[mine] = self._errors[known][theirs]
        return pa.array(counts)


class _Constant:
    """A column in which every row is the same."""

    def __init__(self, value: pa.Scalar) -> None:
        self._value = value
        self._rows = pa.repeat(value, 0)

    def repeated(self, count: int) -> pa.Array:
        if len(self._rows) < count:
            self._rows = pa.repeat(self._value, max(count, min(MOST_ROWS, 4 * len(self._rows))))
        return self._rows.slice(0, count)


def _cut(sizes: Numbers) -> Iterator[slice]:
    """The rows of each batch, as slices."""
    if len(sizes) <= MOST_ROWS and int(sizes.sum()) <= MOST_BYTES:
        if len(sizes):
            yield slice(0, len(sizes))
        return
    ends, at = np.cumsum(sizes), 0
    while at < len(sizes):
        before = int(ends[at - 1]) if at else 0
        stop = int(np.searchsorted(ends, before + MOST_BYTES, "right"))
        stop = min(max(stop, at + 1), at + MOST_ROWS)
        yield slice(at, stop)
        at = stop


def _instants(milliseconds: Numbers) -> pa.Array:
    return pa.array(milliseconds * 1000).view(pa.timestamp("us", tz="UTC"))


def _expiries(expires_ms: npt.NDArray[np.uint64]) -> pa.Array:
    known = np.minimum(expires_ms, np.uint64(LAST_MS)).astype(np.int64) * 1000
    return pa.array(known, mask=expires_ms == NEVER).view(pa.timestamp("us", tz="UTC"))


def _bytes(data: Data, starts: Numbers, sizes: Numbers, ids: Numbers) -> pa.Array:
    """The column of the items' data. In ``data`` there are other bytes between the items: the copy leaves them out."""
    if int(sizes.max()) > LARGEST_ITEM:
        item_id, size = int(ids[sizes.argmax()]), int(sizes.max())
        raise ValueError(f"item {item_id} has {size:,} bytes: a cell of a DataFrame holds less than 2 GiB")
    count, size, begin = len(starts), int(sizes[0]), int(starts[0])
    if size and count > 1:
        stride = int(starts[1]) - begin
        if (sizes == size).all() and (starts[1:] - starts[:-1] == stride).all():
            packed = np.ascontiguousarray(np.ndarray(count, f"V{size}", data, begin, (stride,)))
            offsets = np.arange(0, (count + 1) * size, size, dtype=np.int32)
            return pa.BinaryArray.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(packed)])
    end = int(starts[-1] + sizes[-1])
    view: Any = memoryview(data)[begin:end]
    offsets = np.empty(2 * count, np.int32 if end - begin <= LARGEST_ITEM else np.int64)
    offsets[::2] = starts - begin
    offsets[1::2] = starts + sizes - begin
    kind = pa.binary() if offsets.dtype == np.int32 else pa.large_binary()
    array = pa.Array.from_buffers(kind, 2 * count - 1, [None, pa.py_buffer(offsets), pa.py_buffer(view)])
    return array.take(pa.array(np.arange(0, 2 * count, 2))).cast(pa.binary())
