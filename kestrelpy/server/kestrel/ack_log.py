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
4. Where ids begin again, because a queue or a reader is deleted, a record says so, and is on disk before it goes. So a
   deletion that a crash has interrupted is finished at the start. Before it is made again, another record says that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from kestrelpy import JournaledQueue

if TYPE_CHECKING:
    from os import PathLike

    from kestrelpy import Clock
    from kestrelpy._disk.interface import Disk

__all__ = ["ALL", "NAME", "AckLog", "Acks", "Dropped"]

NAME = "x--acks"
"""The name of the log's queue: no queue of a client is called so, because ``acks`` is not hexadecimal."""

Acks = dict[tuple[str, str], set[int]]
"""Ids that are done, by the library's names of a queue and a reader."""
Dropped = dict[tuple[str, str], None]
"""What was deleted, and not made again: a queue and a reader, or a queue and ``ALL``."""
ALL = "*"


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


def unpack(record: bytes, acks: Acks, dropped: Dropped) -> None:
    """Add what a record says to ``acks`` and ``dropped``."""
    for line in record.decode("ascii").splitlines():
        queue, reader, *spans = line.split(" ")
        reader = "" if reader == "-" else reader
        if spans == ["dropped"]:
            _take_out(acks, queue, reader)
            dropped[queue, reader] = None
        elif spans == ["made"]:
            _take_out(dropped, queue, reader)
        else:
            done = acks.setdefault((queue, reader), set())
            for span in spans:
                first, _, last = span.partition("-")
                done.update(range(int(first), int(last or first) + 1))


def _take_out(noted: dict[tuple[str, str], Any], queue: str, reader: str) -> None:
    for key in [key for key in noted if key[0] == queue and reader in (ALL, key[1])]:
        del noted[key]


class AckLog:
    """The log of one server, in its folder. Raises ``OSError`` and ``QueueDiskFull`` as a queue does."""

    def __init__(
        self,
        directory: str | PathLike[str],
        clock: Clock,
        disk: Disk | None = None,
        on_corruption: Literal["raise", "quarantine"] = "raise",
    ) -> None:
        self._queue = JournaledQueue(
            directory,
            NAME,
            sync="never",
            segment_bytes=4 << 20,
            inbox_interval=None,
            checkpoint_interval=60.0,
            on_corruption=on_corruption,
            clock=clock,
            disk=disk,
        )
        try:
            self._reader = self._queue.reader()
        except BaseException:
            self._queue.close()
            raise
        self._dropped: dict[tuple[str, str], int] = {}  # the number of the record that says so
        self._dropping = threading.Lock()
        self._dropped_through = 0

    def read(self) -> tuple[Acks, Dropped]:
        """What the records say. Called at the start, once.

        The records stay until ``drop_through``: if the start fails after this, the next one reads them again.
        """
        acks: Acks = {}
        dropped: Dropped = {}
        while self._reader.items > self._reader.open_items:
            for item in self._reader.get_many(1000, timeout=0):
                unpack(item.data, acks, dropped)
        return acks, dropped

    @property
    def last(self) -> int:
        """The number of the last record."""
        return self._queue.stats().tail_id

    def append(self, acks: dict[tuple[str, str], list[int]]) -> int:
        """Write a record; returns its number."""
        return self._queue.put(pack(acks))

    def note_drop(self, queue: str, reader: str) -> None:
        """That reader (``ALL``: the whole queue) is about to be deleted. On disk when this returns."""
        self._dropped[queue, reader] = self._note(queue, reader, "dropped")

    def note_make(self, queue: str, reader: str) -> None:
        """That reader, or queue, is about to be made. On disk when this returns, if it was deleted before."""
        if (queue, reader) in self._dropped:
            self._note(queue, reader, "made")
            _take_out(self._dropped, queue, reader)

    def _note(self, queue: str, reader: str, what: str) -> int:
        record = self._queue.put(f"{queue} {reader or '-'} {what}".encode("ascii"))
        self._queue.sync()
        return record

    def sync(self) -> None:
        self._queue.sync()

    def drop_through(self, record: int) -> None:
        """The records up to this one are not needed any more. Thread-safe."""
        with self._dropping:
            if record > self._dropped_through:  # never back: what is gone is not known any more
                self._reader.seek(record + 1)
                self._queue.checkpoint(durable=True)
                self._dropped_through = record

    def forget_drops(self, record: int) -> None:
        """The deletions up to this record are finished, and ``drop_through`` has dropped it."""
        for key in [key for key, number in self._dropped.items() if number <= record]:
            del self._dropped[key]

    @property
    def closed(self) -> bool:
        return self._queue.closed

    def close(self) -> None:
        self._queue.close()
