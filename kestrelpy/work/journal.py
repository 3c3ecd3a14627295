"""The journaled queue under a work queue, and how it is told from others.

Rules:
1. The journal of a work queue is marked as one, on disk, before anything is put into it: docs/format.md, ``jobs.work``.
2. One that is not marked is a work queue's, made by a version that did not mark them, if its first record is about a
   job; it is marked then. One into which nothing was ever put becomes one, if nobody has a named reader there and
   nothing is published for it. Any other is refused, and nothing of it is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kestrelpy import JournaledQueue, WrongKind, inspect
from kestrelpy.inbox import pending

if TYPE_CHECKING:
    from kestrelpy._disk.interface import Disk, File

WORK = "work queue"
"""The ``kind`` of a work queue, as ``inspect`` has it."""


class JobJournal(JournaledQueue):
    """The journal of a work queue: it has no inbox, and is opened by no other class."""

    _holds_jobs = True

    def claim(self, disk: Disk | None) -> bool:
        """Whether it is known to be a work queue's; a new one is marked. Raises ``WrongKind``, ``OSError``."""
        is_new = not self.stats().tail_id
        if self._kind() == WORK:
            if is_new:  # the mark may be in the page cache alone, left there by a process that was killed
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
        """It was not known; so many ``records`` are of a work queue, from the first on. Raises ``WrongKind``."""
        if not records and inspect(self.directory, self.name, disk=disk).put_items:
            raise self.wrong()  # all was read: a work queue always keeps what it has counted
        self._look_for_batches(disk)
        try:
            self._mark_as_jobs()
        except OSError as error:  # no room, say: then the next opening does it
            _warn("%s/%s could not be marked as a work queue: %s", self.directory, self.name, error)

    def open_mark(self, *, make: bool) -> File:
        """The file that marks it, for writing; with ``make`` made if somebody has removed it. Raises ``OSError``."""
        try:
            return self._open_mark()
        except FileNotFoundError:
            if not make:
                raise
        self._mark_as_jobs()
        return self._open_mark()

    def lift_limit(self) -> None:
        """Take records of any size from here on. How large a job may be is the work queue's business; and one that was
        put when more was allowed must be written anew, or the journal could never be shortened.
        """
        self.max_item_bytes = self._puts.max_item_bytes = sys.maxsize

    @property
    def queue_id(self) -> bytes:
        """What tells it from one of the same name."""
        return self._journal.queue_id

    @property
    def never_syncs(self) -> bool:
        return self._status.sync_seconds is None

    def sync_under_lock(self) -> None:
        """``sync`` for a caller that has a lock of its own. Raises ``DurabilityUnknown``."""
        self._status.check_usable()
        self._make_durable(self._journal.tail_id)

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """What is raised in here reaches nobody: ``close`` tells of it still, unless somebody had been told before."""
        status = self._status
        reported = status.is_reported
        try:
            yield
        finally:
            status.is_reported = reported

    def _look_for_batches(self, disk: Disk | None) -> None:
        """Those that a version before has let somebody publish."""
        count = pending(self.directory, self.name, disk=disk)
        if count:
            message = "%s/%s is a work queue: the %d batches in its inbox are never taken in, and may be deleted"
            _warn(message, self.directory, self.name, count)

    def __del__(self) -> None:
        """Whether it was closed is the work queue's business, which says so in its own name."""

    def wrong(self) -> WrongKind:
        """What to raise if its records are no jobs. Closing it changes nothing then: it would retire what was read, and
        its owner may keep that in an archive.
        """
        self._ending.changes_nothing = True
        return WrongKind(f"{self.directory}/{self.name}", "queue")


def _warn(message: str, *arguments: object) -> None:
    from logging import getLogger  # here and not above: mostly there is nothing to say

    getLogger("kestrelpy").warning(message, *arguments)
