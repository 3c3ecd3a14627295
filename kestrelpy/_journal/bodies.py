"""The body of a frame: one item, or a batch of items. Bytes only: no file, no lock, no clock."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from kestrelpy._journal.format import KIND_BATCH, KIND_EXPIRES, KIND_FOOTER, pack_crc
from kestrelpy._journal.packing import join_batch

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Body(NamedTuple):
    """A frame's body: ``items`` items of ``size`` bytes together. Its bytes do not depend on where it is stored."""

    kind: int
    items: int
    size: int
    data: bytes


def pack_body(items: Sequence[bytes], expires_ms: int | None) -> Body:
    """Encode these items as a body. A single item is not encoded as a batch."""
    kind, head, sizes = 0, b"", list(map(len, items))
    if expires_ms is not None:
        kind, head = KIND_EXPIRES, _U64.pack(expires_ms)
    if len(items) == 1:
        return Body(kind, 1, sizes[0], head + items[0])
    return Body(kind | KIND_BATCH, len(items), sum(sizes), join_batch(head, items, sizes))


def body_lengths(kind: int, data: bytes) -> tuple[int, ...] | None:
    """The lengths of the items in the body of a frame; ``None`` if the body is not valid."""
    start = _U64.size if kind & KIND_EXPIRES else 0
    if kind >= KIND_FOOTER or kind & ~(KIND_EXPIRES | KIND_BATCH) or len(data) < start:
        return None
    if not kind & KIND_BATCH:
        return (len(data) - start,)
    if len(data) < start + _U32.size:
        return None
    (count,) = _U32.unpack_from(data, start)
    table_end = start + _U32.size * (count + 1)
    if not count or table_end > len(data):
        return None
    lengths = struct.unpack_from(f"<{count}I", data, start + _U32.size)
    return lengths if table_end + sum(lengths) == len(data) else None


def cut_body(kind: int, data: bytes, lengths: Sequence[int], skip: int, most: int) -> Iterator[Body]:
    """Cut a body, without its first ``skip`` items, into few pieces: each of at most ``most`` bytes, or of one item."""
    if not skip and len(data) <= most:
        yield Body(kind, len(lengths), sum(lengths), data)
        return
    start = _U64.size if kind & KIND_EXPIRES else 0
    head = data[:start]
    if not kind & KIND_BATCH:
        yield Body(kind, 1, lengths[0], data)
        return
    table = memoryview(data)[start + _U32.size : start + _U32.size * (len(lengths) + 1)]
    ends = list(accumulate(lengths, initial=start + len(table) + _U32.size))
    first = skip
    while first < len(lengths):
        last = first + 1
        while last < len(lengths) and start + _U32.size * (last + 2 - first) + ends[last + 1] - ends[first] <= most:
            last += 1
        size = ends[last] - ends[first]
        lengths_of = table[_U32.size * first : _U32.size * last]
        cut = b"".join((head, pack_crc(last - first), lengths_of, data[ends[first] : ends[last]]))
        yield Body(kind, last - first, size, cut)
        first = last
