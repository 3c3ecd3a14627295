"""The journal under a work queue: what is written, which records are over, and how it is kept short.

Rules:
1. A record is over when the job it is about is gone, or when a later record says all that it said. Whether it is over
   is one byte in ``_over``, by its id.
2. Records are committed in the order of their ids, up to the first one that is not over, and only after the journal has
   been synced up to what made them be over: a power cut leaves an old record or the one that replaced it.
3. What an old live record holds back is bounded: ``bound`` says from when on the oldest ones must be written anew.

NOTE ON LOCKING: all but ``skip``, ``sync`` and ``checkpoint`` want the queue's lock. ``_reading`` comes behind it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kestrelpy import CorruptJournal, NoDefaultReader, QueueEmpty, inspect, scan

if TYPE_CHECKING:
    from kestrelpy import Reader
    from kestrelpy._disk.interface import Disk
    from kestrelpy.work.journal import JobJournal

FRAME_BYTES = 24
"""About what a record takes on disk beside its data."""
SLICE = 1000
"""How many records are committed in one go, with the lock held."""
MANY = 5000
"""From so many on it costs less to find the place behind them (the frames of one segment) than to read them."""


class JobLog:
    """What was appended to ``queue`` and is not committed."""

    def __init__(self, queue: JobJournal, segment_bytes: int, on_look: Callable[[], object]) -> None:
        self.queue = queue
        self.bytes = 0
        """About how long the journal is."""
        self.look_at = -1
        """``on_look`` is called by the append that makes it longer than this."""
        self.carry_to = 0
        """What lives is to be written anew up to this record: it was not intact, and its segment is to go."""
        self._on_look = on_look
        self._segment_bytes = segment_bytes
        self._reader = _default_reader(queue)
        self._put = queue.put
        self._first = self._reader.head + 1  # the id that _over[0] is about
        self._over = bytearray()
        self._began = self._reader.head
        self._opened = self._reader.head  # up to here all is open or committed
        self._early: set[int] = set()  # committed out of order, by an earlier version
        self._reading = threading.Lock()  # for what the reader does without the queue's lock
        self._old: dict[int, bytes] = {}  # open, and not over when they were opened
        with contextlib.suppress(OSError):  # as long as there is room
            self._reader.checkpoint()

    # -- opening -----------------------------------------------------------------------------------------------------

    def replay(self, disk: Disk | None, *, quarantine: bool) -> Iterator[tuple[int, bytes | None]]:
        """All records that are not committed, with their ids, in the order of these; ``None`` for one that is not
        intact, which raises ``CorruptJournal`` without ``quarantine``. To be taken to its end.

        Read beside the reader and not through it: a live job is to take no memory there.
        """
        directory, name = self.queue.directory, self.queue.name
        early: set[int] = set()
        try:
            saved = inspect(directory, name, disk=disk).readers
            early = {each for first, last in (saved[0].done if saved else ()) for each in range(first, last + 1)}
            for record in scan(directory, name, start_id=self._first, disk=disk):
                if record.id not in early:
                    self._reach(record.id)
                    self._over.append(0)
                    yield record.id, record.data
        except CorruptJournal:
            if not quarantine:
                raise
            yield from self._read_around(early)
        self._reach(self.queue.stats().tail_id + 1)
        self._began = self._first + len(self._over)
        self.measure()

    def _read_around(self, early: set[int]) -> Iterator[tuple[int, bytes | None]]:
        """What ``scan`` does not get to, by the reader: that knows how to pass over what is not intact, and keeps its
        bytes aside. All of it is open from here on, which takes memory until it is committed.
        """
        while True:
            try:
                items = self._reader.get_many(SLICE, timeout=0)
            except QueueEmpty:
                break
            for item in items:
                self._opened, self._old[item.id] = item.id, item.data
                if item.id >= self._first + len(self._over):
                    yield from self._lost_before(item.id, early)
                    self._over.append(0)
                    yield item.id, item.data
        self._opened = self.queue.stats().tail_id
        yield from self._lost_before(self._opened + 1, early)

    def _lost_before(self, item_id: int, early: set[int]) -> Iterator[tuple[int, None]]:
        for missing in range(self._first + len(self._over), item_id):
            if missing not in early:
                self.carry_to = missing
                yield missing, None
        self._reach(item_id)

    def leave_out(self, at: int) -> None:
        """Record ``at`` is there and no record of a job."""
        self.over(at)
        self.carry_to = at

    def _reach(self, item_id: int) -> None:
        """What is missing before this id was committed out of order, by an earlier version, or never was."""
        while (missing := self._first + len(self._over)) < item_id:
            self._early.add(missing)
            self._over.append(1)

    def realign(self) -> None:
        """After an exception from outside: what was appended and committed is so, whether it was noted or not."""
        self._align()
        if not self._early:  # what was opened, and nobody knows of it, is to come again
            with self._reading, contextlib.suppress(OSError):
                self._opened, self._old = self._first - 1, {}
                self._reader.seek(self._first)
        self._over.extend(bytes(self.queue.stats().tail_id + 1 - self._first - len(self._over)))

    def _align(self) -> None:
        """Forget what is committed. May be repeated."""
        first = self._reader.head + 1
        if first > self._first:
            del self._over[: first - self._first]
            self._first = first
            self._opened = max(self._opened, first - 1)
            self._old = {at: data for at, data in self._old.items() if at >= first}
            self._early = {at for at in self._early if at >= first}

    # -- writing -----------------------------------------------------------------------------------------------------

    def append(self, record: bytes) -> int:
        """Write it; its id. Raises ``QueueDiskFull``, ``DurabilityUnknown``, ``OSError``, with nothing written."""
        at = self._put(record)
        self._over.append(0)
        self.bytes += len(record) + FRAME_BYTES
        if self.bytes > self.look_at:
            self._on_look()
        return at

    def append_many(self, records: list[bytes]) -> range:
        """Write all of them, or none. Raises as ``append``."""
        ids = self.queue.put_many(records)
        self._over.extend(bytes(len(records)))
        self.bytes += sum(map(len, records)) + FRAME_BYTES * len(records)
        if self.bytes > self.look_at:
            self._on_look()
        return ids

    def over(self, at: int) -> None:
        """Record ``at`` is over. 0 is none; one that is committed already is, too."""
        if at >= self._first:
            self._over[at - self._first] = 1

    @property
    def appended(self) -> int:
        """How many records this object has written."""
        return self._first + len(self._over) - self._began

    # -- keeping it short --------------------------------------------------------------------------------------------

    @property
    def last_id(self) -> int:
        """The id of the last record."""
        return self._first + len(self._over) - 1

    @property
    def last_over(self) -> int:
        """Up to this record all are over, and may be committed once the journal is synced."""
        oldest = self._over.find(0)
        return self._first - 1 + (len(self._over) if oldest < 0 else oldest)

    def bound(self, live_bytes: int) -> int:
        """How long the journal may be, if live records take so much of it."""
        return 2 * (live_bytes + self._segment_bytes)

    def is_short(self, live_bytes: int) -> bool:
        """Whether no record has to be written anew, if live ones take so much."""
        return self.bytes <= self.bound(live_bytes) and self._first > self.carry_to

    def commit(self, last: int) -> int:
        """Commit a slice of the records up to ``last``; how many are left. They must be over, and what made them so on
        disk.
        """
        self._align()
        upto = min(last, self._first + SLICE - 1)
        if upto >= self._first:
            self._commit(upto)
            self._align()
        return last - upto

    def _commit(self, last: int) -> None:
        count = last + 1 - self._first
        if self._opened < self._first and not self._early:
            items = self._reader.get_many(count, timeout=0)
            self._opened = items[-1].id
            if len(items) == count and self._opened == last:
                self._reader.commit_many(items)
                return
        self._open(last)
        self._reader.commit_many([at for at in range(self._first, last + 1) if at not in self._early])

    def skip(self, last: int) -> None:
        """``commit`` of all up to ``last``, if they are many, without the queue's lock: they are not read."""
        with self._reading:
            if last + 1 - self._first >= MANY and not self._early:
                self._opened, self._old = last, {}
                self._reader.seek(last + 1)

    def oldest(self, count: int) -> list[tuple[int, bytes]]:
        """Of the ``count`` oldest records those that are not over, with their ids."""
        self._open(min(self._first + count, self._first + len(self._over)) - 1)
        self._old = {at: data for at, data in self._old.items() if not self._over[at - self._first]}
        return [(at, data) for at, data in self._old.items() if at < self._first + count]

    def _open(self, last: int) -> None:
        """Open everything up to this id."""
        while self._opened < last:
            try:
                items = self._reader.get_many(min(SLICE, last - self._opened), timeout=0)
            except QueueEmpty:  # what is left is not there any more
                self._opened = last
                break
            for item in items:
                self._opened = item.id
                if not self._over[item.id - self._first]:
                    self._old[item.id] = item.data

    def sync(self) -> None:
        """All that was appended is on disk when this returns. Without the queue's lock."""
        self.queue.sync()

    def checkpoint(self) -> None:
        """Save what is committed, and retire the segments that are over. Without the queue's lock."""
        self.queue.checkpoint(durable=True)
        self.measure()

    def measure(self) -> None:
        """See how long the journal is."""
        self.bytes = self.queue.stats().journal_bytes

    def _check(self, live: list[int]) -> None:
        """The invariants; for tests. ``live``: records that must not be over."""
        assert self._first + len(self._over) - 1 == self.queue.stats().tail_id
        assert not any(self._over[at - self._first] for at in live)
        assert self._opened >= self._first - 1


def _default_reader(queue: JobJournal) -> Reader:
    """What has the place of a work queue. Raises ``WrongKind`` where named readers have it."""
    try:
        return queue.reader()
    except NoDefaultReader:
        raise queue.wrong() from None


class NoLog:
    """What a queue in memory has instead."""

    def append(self, _record: bytes) -> int:
        return 0

    def append_many(self, records: list[bytes]) -> list[int]:
        return [0] * len(records)

    def over(self, at: int) -> None:
        """Nothing was written."""

    def realign(self) -> None:
        """Nothing was written."""

    def sync(self) -> None:
        """Nothing to bring to a disk."""
