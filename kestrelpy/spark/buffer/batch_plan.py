"""The plan of a driver buffer's batch: which items batch n is made of. One small file beside the queue's.

Its name is that of the reader's checkpoint with ``batch`` for ``checkpoint``: ``jobs+audit.batch``. Integers are
little-endian and unsigned:

    | KSTRLBAT | version 2 | 0 (2) | spans 4 | queue_id 16 | batch_id 8 | spans x (first 8, last 8) | crc 4 | mark 4 |

The crc is CRC-32 of what is before it. The mark is the crc with all bits turned over: it is there when the batch is
finished.

Rules:
1. A plan replaces the one before as a whole, and is on disk when ``save`` returns.
2. The mark is written behind it, and no sync is waited for: what is lost with it, the reader's checkpoint says too.
   No mark of another plan is taken for this one's: their crcs differ.
3. What is not whole is damage: a plan is never written in place.
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
    """Batch ``batch_id`` is these ids, as runs, rising and apart."""

    queue_id: bytes
    batch_id: int
    spans: tuple[tuple[int, int], ...]
    finished: bool = False

    def ids(self) -> Iterable[int]:
        return (item_id for first, last in self.spans for item_id in range(first, last + 1))


def spans_of(ids: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Rising ids as runs."""
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
    """Raises ``CorruptJournal`` and ``UnsupportedFormat``."""
    if len(data) < _HEAD.size + _CRC.size or not data.startswith(_MAGIC):
        raise CorruptJournal(path, 0, "this is no whole plan of a batch")
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
    """The file of one reader's plans. NOTE ON LOCKING: none of its own; one thread at a time uses it."""

    def __init__(self, directory: Directory, queue: str, reader: str) -> None:
        self._directory = directory
        self.name = plan_name(queue, reader)

    @property
    def path(self) -> str:
        return f"{self._directory.path}/{self.name}"

    def load(self) -> BatchPlan | None:
        """The last plan that was saved, ``None`` if there never was one.

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
        """Durable when this returns. Raises ``OSError``; then the file holds this plan or the one before."""
        replace_file(self._directory, self.name, encode_plan(plan))

    def finish(self, plan: BatchPlan) -> BatchPlan:
        """Leave the mark behind ``plan``, which was the last one saved; if that can't be done, it is not there."""
        finished = plan._replace(finished=True)
        data = encode_plan(finished)
        with contextlib.suppress(OSError):
            file = self._directory.open(self.name, write=True)
            try:
                file.write(len(data) - _CRC.size, data[-_CRC.size :])
            finally:
                file.close()
        return finished
