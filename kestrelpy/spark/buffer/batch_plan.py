"""The plan of a driver buffer's batch: it says which items are in the batch. One small file beside the queue's files.

The file has the name of the reader's checkpoint, with ``batch`` for ``checkpoint``: ``jobs+audit.batch``. Integers are
little-endian and unsigned:

    | KSTRLBAT [8] | version u16 | 0 [2] | spans u32 | queue_id [16] | batch_id u64 |
    | spans x (first u64, last u64) | crc u32 | mark u32 |

The crc is the CRC-32 of everything before it. The mark is the crc with all bits inverted. It is there when the batch is
finished.

Rules:
1. A plan replaces the plan before as a whole, and is on disk when ``save`` returns.
2. The mark is written after the plan, without a sync. If the mark is lost, the reader's checkpoint says the same. A
   mark cannot belong to another plan, because the crcs of two plans differ.
3. A plan that is not whole is damage, because a plan is never written in place.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable
from typing import NamedTuple
from zlib import crc32

from kestrelpy._disk.interface import Directory
from kestrelpy._journal.checkpoint import replace_file
from kestrelpy._journal.file_names import plan_name
from kestrelpy.errors import CorruptJournal, UnsupportedFormat

VERSION = 1
_MAGIC = b"KSTRLBAT"
_HEAD = struct.Struct("<8sHHI16sQ")
_SPAN = struct.Struct("<QQ")
_CRC = struct.Struct("<I")


class BatchPlan(NamedTuple):
    """Batch ``batch_id`` and its ids. ``spans``: runs of ids, rising, with a gap between any two."""

    queue_id: bytes
    batch_id: int
    spans: tuple[tuple[int, int], ...]
    finished: bool = False

    def ids(self) -> Iterable[int]:
        return (item_id for first, last in self.spans for item_id in range(first, last + 1))


def spans_of(ids: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Combine rising ids into runs."""
    spans: list[tuple[int, int]] = []
    for item_id in ids:
        if spans and item_id == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], item_id)
        else:
            spans.append((item_id, item_id))
    return tuple(spans)


def encode_plan(plan: BatchPlan) -> bytes:
    head = _HEAD.pack(_MAGIC, VERSION, 0, len(plan.spans), plan.queue_id, plan.batch_id)
    body = head + b"".join(_SPAN.pack(*span) for span in plan.spans)
    crc = crc32(body)
    return body + _CRC.pack(crc) + (_CRC.pack(~crc & 0xFFFFFFFF) if plan.finished else b"")


def decode_plan(data: bytes, path: str) -> BatchPlan:
    """The plan in ``data``. Raises ``CorruptJournal``, ``UnsupportedFormat``."""
    if len(data) < _HEAD.size + _CRC.size or not data.startswith(_MAGIC):
        raise CorruptJournal(path, 0, "this is not a whole plan of a batch")
    _, version, _, count, queue_id, batch_id = _HEAD.unpack_from(data)
    if version > VERSION:
        raise UnsupportedFormat(path, version, VERSION)
    end = _HEAD.size + count * _SPAN.size
    if len(data) < end + _CRC.size or _CRC.unpack_from(data, end)[0] != (crc := crc32(data[:end])):
        raise CorruptJournal(path, 0, "the plan of a batch is not intact")
    spans = tuple(_SPAN.iter_unpack(data[_HEAD.size : end]))
    mark = data[end + _CRC.size :][: _CRC.size]
    return BatchPlan(queue_id, batch_id, spans, mark == _CRC.pack(~crc & 0xFFFFFFFF))


class PlanFile:
    """The file of one reader's plan. NOTE ON LOCKING: none of its own; one thread at a time uses it."""

    def __init__(self, directory: Directory, queue: str, reader: str) -> None:
        self._directory = directory
        self.name = plan_name(queue, reader)

    @property
    def path(self) -> str:
        return f"{self._directory.path}/{self.name}"

    def load(self) -> BatchPlan | None:
        """The last plan that was saved; ``None`` if there never was one.

        Raises ``CorruptJournal``, ``UnsupportedFormat``, ``OSError``.
        """
        try:
            file = self._directory.open(self.name)
        except FileNotFoundError:
            return None
        try:
            return decode_plan(file.read(0, file.size()), self.path)
        finally:
            file.close()

    def save(self, plan: BatchPlan) -> None:
        """Save a plan, durably. Raises ``OSError``; then the file has this plan or the plan before."""
        replace_file(self._directory, self.name, encode_plan(plan))

    def finish(self, plan: BatchPlan) -> BatchPlan:
        """Write the mark after ``plan``, which must be the last saved plan. An ``OSError`` leaves the mark out."""
        finished = plan._replace(finished=True)
        data = encode_plan(finished)
        with contextlib.suppress(OSError):
            file = self._directory.open(self.name, write=True)
            try:
                file.write(len(data) - _CRC.size, data[-_CRC.size :])
            finally:
                file.close()
        return finished
