"""``JobJournal``: the journaled queue under a work queue, and how it is distinguished from other queues.

Rules:
1. The journal of a work queue is marked as one, on disk, before anything is put into it: docs/format.md, ``jobs.work``.
2. A journal without a mark whose first record is about a job belongs to a work queue: an older version made it without
   a mark. It is marked when it is opened.
3. A journal into which nothing was ever put becomes a work queue's, if it has no named reader and no published batch.
4. Any other journal is refused, and nothing in it is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal

from kestrelpy import JournaledQueue, KestrelError, WrongKind, inspect
from kestrelpy.inbox import pending

if TYPE_CHECKING:
    from concurrent.futures import Future

    from kestrelpy import Clock
    from kestrelpy._disk.interface import Disk, File
    from kestrelpy.ship import Ship

WORK = "work queue"
"""The ``kind`` that ``inspect`` reports for a work queue."""


class JobJournal(JournaledQueue):
    """The journal of a work queue. It has no inbox, and no other class opens it."""

    _holds_jobs = True

    def claim(self, disk: Disk | None) -> bool:
        """True if a mark says that this is a work queue's journal; a new journal is marked here. False if its records
        must tell (see ``adopt``). Raises ``WrongKind``, ``OSError``.
        """
        is_new = not self.stats().tail_id
        if self._purpose.kind() == WORK:
            if is_new:  # a killed process may have left the mark in the page cache alone
                self._mark_as_jobs()
            self._look_for_batches(disk)
            return True
        if is_new:
            named = any(reader.name for reader in inspect(self.directory, self.name, disk=disk).readers)
            if named or pending(self.directory, self.name, disk=disk):
                raise self.wrong()
            self._mark_as_jobs()
        return is_new

    def adopt(self, disk: Disk | None, *, records: int) -> None:
        """Mark a journal without a mark; ``records`` of its items are a work queue's. Raises ``WrongKind``."""
        if not records and inspect(self.directory, self.name, disk=disk).put_items:
            raise self.wrong()  # all items are committed: a work queue would still have its counters
        self._look_for_batches(disk)
        try:
            self._mark_as_jobs()
        except OSError as error:  # for example, the disk is full: the next opening marks it
            _warn("%s/%s could not be marked as a work queue: %s", self.directory, self.name, error)

    def _mark_as_jobs(self) -> None:
        self._purpose.mark()

    def open_mark(self, *, make: bool) -> File:
        """Open the marking file for writing; ``make``: make it if somebody has removed it. Raises ``OSError``."""
        try:
            return self._purpose.open_mark()
        except FileNotFoundError:
            if not make:
                raise
        self._mark_as_jobs()
        return self._purpose.open_mark()

    def lift_limit(self) -> None:
        """Accept records of any size from here on. The work queue limits the size of jobs. A job that was put under a
        higher limit must still be written again, or the journal could never be compacted.
        """
        self.max_item_bytes = self._puts.max_item_bytes = sys.maxsize

    @property
    def queue_id(self) -> bytes:
        """Distinguishes this queue from another one of the same name."""
        return self._journal.queue_id

    def bytes_above(self, head: int) -> int:
        """The size of the segments with records above ``head``, and of the newest one. Older ones may be there yet as a
        store has not got them: it does not help against that to write records again.
        """
        segments = self._journal.segments
        return sum(each.size for at, each in enumerate(segments, 1) if each.last_id > head or at == len(segments))

    @property
    def jump(self) -> int:
        """How far the ids of jobs must jump, as another owner had the queue. Mostly 0. ``note_jumped`` tells when they
        have.
        """
        log = self._held.log
        return 0 if log is None else log.jump

    def on_failed(self, call: Callable[[KestrelError], object]) -> None:
        """Call this once another owner has the queue: on another thread, with no lock held."""
        self._status.on_failed = call

    def note_jumped(self) -> None:
        """Call it when it is on disk that ids have jumped. Raises ``OSError``."""
        if self._held.log is not None:
            self._held.log.note_jumped()

    @property
    def never_syncs(self) -> bool:
        return self._status.sync_seconds is None

    def sync_or_ship(self) -> None:
        """``sync``; if a store acknowledges what is put, return when it has everything put before.

        It is for a call that has written its record: a close meanwhile, which syncs, is no reason to raise.
        """
        self._syncer.wait_acknowledged(self._journal.tail_id, self._journal.tail_id)

    def acknowledged(self) -> Future[int]:
        """``sync_or_ship`` as a future."""
        return self._puts.future_of_all()

    def sync_under_lock(self) -> None:
        """``sync`` for a caller that holds a lock of its own. Raises ``DurabilityUnknown``."""
        self._status.check_usable()
        self._make_durable(self._journal.tail_id)

    def unreported(self) -> AbstractContextManager[None]:
        """``QueueStatus.unreported``."""
        return self._status.unreported()

    def _look_for_batches(self, disk: Disk | None) -> None:
        """Warn of batches in the inbox: an older version let others publish them."""
        count = pending(self.directory, self.name, disk=disk)
        if count:
            message = "%s/%s is a work queue: the %d batches in its inbox are never ingested, and may be deleted"
            _warn(message, self.directory, self.name, count)

    def __del__(self) -> None:
        """No warning here: the work queue itself warns if nobody has closed it."""

    def wrong(self) -> WrongKind:
        """The error to raise if the records are not about jobs. After this, closing the queue changes nothing: it would
        retire segments that were read, and their owner may want to archive them.
        """
        self._ending.saves_nothing = True
        return WrongKind(f"{self.directory}/{self.name}", "queue")


def open_journal(
    directory: str,
    name: str,
    sync: float | Literal["always", "never"],
    segment_bytes: int,
    checkpoint_interval: float,
    on_corruption: Literal["raise", "quarantine"],
    ship: str | Ship | Literal[False] | None,
    clock: Clock,
    disk: Disk | None,
) -> JobJournal:
    """Open the journal of a work queue. Raises as ``JournaledQueue``."""
    return JobJournal(
        directory,
        name,
        sync=sync,
        segment_bytes=segment_bytes,
        checkpoint_interval=checkpoint_interval,
        on_corruption=on_corruption,
        inbox_interval=None,
        ship=ship,
        clock=clock,
        disk=disk,
    )


def _warn(message: str, *arguments: object) -> None:
    from logging import getLogger  # imported here: mostly there is nothing to log

    getLogger("kestrelpy").warning(message, *arguments)
