"""``JobLog``: appends records to the journal of a work queue, notes which records are over, and commits those.

Rules:
1. A record is over when its job is gone, or when a later record says all that it said. ``_over`` has one byte for each
   record, by its id.
2. Records are committed in the order of their ids, up to the first one that is not over. The records that made them be
   over are synced before that: so a power cut leaves an old record or its replacement.
3. An old live record holds back a bounded part of the journal: once the journal is longer than ``bound``, the oldest
   live records must be written again.

NOTE ON LOCKING: all but ``skip``, ``sync`` and ``checkpoint`` want the queue's lock. ``_reading`` is taken after it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from kestrelpy import CorruptJournal, NoDefaultReader, QueueEmpty, inspect, scan

if TYPE_CHECKING:
    from kestrelpy import Reader
    from kestrelpy._disk.interface import Disk
    from kestrelpy.work.journal import JobJournal

FRAME_BYTES = 24
"""About how many bytes a record takes on disk beside its data."""
SLICE = 1000
"""How many records are committed in one go, with the lock held."""
MANY = 5000
"""From so many records on, a seek past them (it reads the frames of one segment) costs less than reading them."""


class JobLog:
    """The records of ``queue`` that are not committed."""

    def __init__(self, queue: JobJournal, segment_bytes: int, on_look: Callable[[], object]) -> None:
        self.queue = queue
        self.bytes = 0
        """About how long the journal is."""
        self.look_at = -1
        """An append that makes the journal longer than this calls ``on_look``."""
        self.carry_to = 0
        """Write all live records up to this one again: it was not intact, and its segment must go."""
        self._on_look = on_look
        self._segment_bytes = segment_bytes
        self._reader = _default_reader(queue)
        self._put = partial(queue.put, timeout=0)  # with the lock of the jobs held nothing waits for room
        self._first = self._reader.head + 1  # the id that _over[0] is about
        self._over = bytearray()
        self._began = self._reader.head
        self._opened = self._reader.head  # all records up to this one are open reads, or committed
        self._early: set[int] = set()  # committed out of order, by an earlier version
        self._reading = threading.Lock()  # for calls of the reader without the queue's lock
        self._old: dict[int, bytes] = {}  # open reads of records that were not over when they were opened
        with contextlib.suppress(OSError):  # now, as later the disk may be full
            self._reader.checkpoint()

    # -- opening -----------------------------------------------------------------------------------------------------

    def replay(self, disk: Disk | None, *, quarantine: bool) -> Iterator[tuple[int, bytes | None]]:
        """All records that are not committed, in the order of their ids, as pairs of id and record.

        A record that is not intact raises ``CorruptJournal``; with ``quarantine``, it is ``None``. The caller must take
        all pairs. Records are read beside the reader, not through it: an open read of each live job would take memory.
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
        """The records that ``scan`` does not reach, by the reader. The reader skips records that are not intact, and
        keeps their bytes aside. These records are open reads from here on, which take memory until they are committed.
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
        """Item ``at`` is not a record of a work queue: it is over, and its segment must go."""
        self.over(at)
        self.carry_to = at

    def _reach(self, item_id: int) -> None:
        """Note the ids missing before this one as over: an earlier version committed them out of order, or they never
        existed.
        """
        while (missing := self._first + len(self._over)) < item_id:
            self._early.add(missing)
            self._over.append(1)

    def realign(self) -> None:
        """After an exception from outside: note what was appended and committed, if that was not noted."""
        self._align()
        if not self._early:  # open reads that nobody knows of must come again
            with self._reading, contextlib.suppress(OSError):
                self._opened, self._old = self._first - 1, {}
                self._reader.seek(self._first)
        self._over.extend(bytes(self.queue.stats().tail_id + 1 - self._first - len(self._over)))

    def _align(self) -> None:
        """Forget committed records. May be repeated."""
        first = self._reader.head + 1
        if first > self._first:
            del self._over[: first - self._first]
            self._first = first
            self._opened = max(self._opened, first - 1)
            self._old = {at: data for at, data in self._old.items() if at >= first}
            self._early = {at for at in self._early if at >= first}

    # -- writing -----------------------------------------------------------------------------------------------------

    def append(self, record: bytes) -> int:
        """Write a record; returns its id. Raises ``QueueDiskFull``, ``DurabilityUnknown``, ``OSError``, with nothing
        written.
        """
        at = self._put(record)
        self._over.append(0)
        self.bytes += len(record) + FRAME_BYTES
        if self.bytes > self.look_at:
            self._on_look()
        return at

    def append_many(self, records: list[bytes]) -> range:
        """Write all records, or none. Raises as ``append``."""
        ids = self.queue.put_many(records, timeout=0)
        self._over.extend(bytes(len(records)))
        self.bytes += sum(map(len, records)) + FRAME_BYTES * len(records)
        if self.bytes > self.look_at:
            self._on_look()
        return ids

    def over(self, at: int) -> None:
        """Record ``at`` is over. Does nothing for 0, and for a record that is committed."""
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
        """All records up to this one are over, and may be committed once the journal is synced."""
        oldest = self._over.find(0)
        return self._first - 1 + (len(self._over) if oldest < 0 else oldest)

    def bound(self, live_bytes: int) -> int:
        """How long the journal may be, in bytes, if live records take ``live_bytes`` of it."""
        return 2 * (live_bytes + self._segment_bytes)

    def is_short(self, live_bytes: int) -> bool:
        """Whether no live record has to be written again, if all of them take ``live_bytes``."""
        return self.bytes <= self.bound(live_bytes) and self._first > self.carry_to

    def commit(self, last: int) -> int:
        """Commit a slice of the records up to ``last``; returns how many are left. All of them must be over, and the
        records that made them be over must be on disk.
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
        """Commit all records up to ``last`` by a seek, if they are many: nothing is read. Without the queue's lock."""
        with self._reading:
            if last + 1 - self._first >= MANY and not self._early:
                self._opened, self._old = last, {}
                self._reader.seek(last + 1)

    def oldest(self, count: int) -> list[tuple[int, bytes]]:
        """Those of the ``count`` oldest records that are not over, with their ids."""
        self._open(min(self._first + count, self._first + len(self._over)) - 1)
        self._old = {at: data for at, data in self._old.items() if not self._over[at - self._first]}
        return [(at, data) for at, data in self._old.items() if at < self._first + count]

    def _open(self, last: int) -> None:
        """Make open reads of all records up to this id."""
        while self._opened < last:
            try:
                items = self._reader.get_many(min(SLICE, last - self._opened), timeout=0)
            except QueueEmpty:  # the rest of these records is gone
                self._opened = last
                break
            for item in items:
                self._opened = item.id
                if not self._over[item.id - self._first]:
                    self._old[item.id] = item.data

    def sync(self) -> None:
        """Everything appended so far is on disk, or in the store that acknowledges it, when this returns. Without the
        queue's lock.
        """
        self.queue.sync_or_ship()

    def checkpoint(self) -> None:
        """Save the reader's position, and retire the segments before it. Without the queue's lock."""
        self.queue.checkpoint(durable=True)
        self.measure()

    def measure(self) -> None:
        """Set ``bytes`` to the journal's length on disk, from the reader's position on."""
        self.bytes = self.queue.bytes_above(self._reader.head)

    def _check(self, live: list[int]) -> None:
        """The invariants; for tests. ``live``: ids of records that must not be over."""
        assert self._first + len(self._over) - 1 == self.queue.stats().tail_id
        assert not any(self._over[at - self._first] for at in live)
        assert self._opened >= self._first - 1


def _default_reader(queue: JobJournal) -> Reader:
    """The reader whose position is that of the work queue. Raises ``WrongKind`` if named readers have taken over."""
    try:
        return queue.reader()
    except NoDefaultReader:
        raise queue.wrong() from None


class NoLog:
    """Stands for a ``JobLog`` if the queue is in memory only."""

    def append(self, _record: bytes) -> int:
        return 0

    def append_many(self, records: list[bytes]) -> list[int]:
        return [0] * len(records)

    def over(self, at: int) -> None:
        """Nothing was written."""

    def realign(self) -> None:
        """Nothing was written."""

    def sync(self) -> None:
        """Nothing was written."""
