"""``AckLog``: which items were acknowledged since the readers' last checkpoints, in one journal for all queues.

A get or a confirm that was answered must hold after the death of the server. A checkpoint of each reader in each turn
would do that, but a checkpoint first syncs the journal that it names ids of (R4). Here a turn writes one record, and
the kernel keeps it, with no sync: that is enough against a kill. Where replies mean "on disk", one sync of this log
does for all readers of the turn.

Rules:
1. A record says which ids of which reader are done. It is appended before the turn's replies are sent.
2. From time to time the readers' own checkpoints are saved, durably; the records before that are not needed any more.
3. At the start the records are applied to the readers, before any item is put. Ids that a power cut took from the
   queue's journal are not there then, and are ignored. So no record can touch an item that is put later with such an
   id.
4. Where ids begin again, because a queue is deleted, a record says so, and is on disk before the queue goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from kestrelpy import JournaledQueue

if TYPE_CHECKING:
    from os import PathLike

    from kestrelpy import Clock
    from kestrelpy._disk.interface import Disk

__all__ = ["AckLog", "Acks"]

NAME = "x--acks"
"""The name of the log's queue: no queue of a client is called so, because ``acks`` is not hexadecimal."""

Acks = dict[tuple[str, str], set[int]]
"""Ids that are done, by the library's names of a queue and a reader."""


def pack(acks: dict[tuple[str, str], list[int]]) -> bytes:
    """A record: a line for each reader, with its name and the queue's name, then ids and spans of ids."""
    lines = []
    for (queue, reader), ids in acks.items():
        lines.append(" ".join([queue, reader or "-", *_spans(sorted(ids))]))
    return "\n".join(lines).encode("ascii")


def _spans(ids: list[int]) -> Iterator[str]:
    breaks = [index for index, (one, two) in enumerate(pairwise(ids), start=1) if two != one + 1]
    for start, end in pairwise([0, *breaks, len(ids)]):
        first, last = ids[start], ids[end - 1]
        yield f"{first}-{last}" if last > first else str(first)


def unpack(record: bytes, acks: Acks) -> None:
    """Add what a record says to ``acks``, or take away what it says is gone."""
    for line in record.decode("ascii").splitlines():
        queue, reader, *spans = line.split(" ")
        if not spans:  # the reader is gone: what was said about its items is void
            for key in [key for key in acks if key[0] == queue and reader in ("*", key[1] or "-")]:
                del acks[key]
            continue
        done = acks.setdefault((queue, "" if reader == "-" else reader), set())
        for span in spans:
            first, _, last = span.partition("-")
            done.update(range(int(first), int(last or first) + 1))


class AckLog:
    """The log of one server, in its folder. Raises ``OSError`` and ``QueueDiskFull`` as a queue does."""

    def __init__(self, directory: str | PathLike[str], clock: Clock, disk: Disk | None = None) -> None:
        self._queue = JournaledQueue(
            directory,
            NAME,
            sync="never",
            segment_bytes=4 << 20,
            inbox_interval=None,
            checkpoint_interval=60.0,
            clock=clock,
            disk=disk,
        )
        self._reader = self._queue.reader()

    def read(self) -> Acks:
        """What the records say. Called at the start, once."""
        acks: Acks = {}
        while self._reader.items:
            for item in self._reader.get_many(1000, timeout=0):
                unpack(item.data, acks)
                item.commit()
        return acks

    @property
    def last(self) -> int:
        """The number of the last record."""
        return self._queue.stats().tail_id

    def append(self, acks: dict[tuple[str, str], list[int]]) -> int:
        """Write a record; returns its number."""
        return self._queue.put(pack(acks))

    def note_drop(self, queue: str, reader: str | None) -> None:
        """That reader (``None``: the whole queue) is about to be deleted. On disk when this returns."""
        self._queue.put(f"{queue} {'*' if reader is None else reader or '-'}".encode("ascii"))
        self._queue.sync()

    def sync(self) -> None:
        self._queue.sync()

    def drop_through(self, record: int) -> None:
        """The records up to this one are not needed any more."""
        self._reader.seek(record + 1)
        self._queue.checkpoint(durable=True)

    def close(self) -> None:
        self._queue.close()
