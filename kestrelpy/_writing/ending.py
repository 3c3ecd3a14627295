"""The end of a ``JournaledQueue``: closing it, erasing it, and leaving it to the parent in a forked child.

Rules:
1. Closing is once: who comes while another thread is at it has nothing to do. Who comes after one that was interrupted
   gives back what that one has left (R13).
2. Everybody who waits is notified, and everything is given back, whatever raises on the way.

NOTE ON LOCKING: as in ``put``. Nobody is notified while a lock is held.
"""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType
from typing import TypeVar

from kestrelpy import _logging
from kestrelpy._disk.interface import NO_ROOM, Directory, Lock
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._journal.recovery import Recovered, write_mark
from kestrelpy._process import forget, warn_unclosed
from kestrelpy._reading.dispatch import Tell, fail_all
from kestrelpy._reading.reader import checkpointer_of
from kestrelpy._waiting.waiters import Waiter
from kestrelpy._writing.put import Writing
from kestrelpy.errors import DurabilityUnknown, ForkedQueue, QueueClosed, QueueDiskFull, QueueLocked, copy_of

Q = TypeVar("Q", bound="Ending")


class Ending(Writing):
    """What the end needs; ``JournaledQueue`` sets it up."""

    _pid: int
    _home: QueueFiles
    _archive: Directory | None
    _writer_lock: Lock
    _marked_id: int
    _ending = False  # guarded by self._lock: somebody is at it
    _gone = False  # everything is given back
    _erases = False  # guarded by self._lock: what ends it deletes its files, or has

    def close(self) -> None:
        """Write the checkpoints, close the journal properly, wake all waiters with ``QueueClosed``. Idempotent.

        Raises ``DurabilityUnknown`` or ``OSError`` if something could not be written, or if a sync in the background
        has failed and no call of the queue (a reader's or a future does not count) has raised that yet. The queue is
        closed all the same, and what was acknowledged is in its files.
        """
        self._end(QueueClosed(f"queue {self.name!r} is closed"))

    def erase(self) -> None:
        """Close the queue and delete its files, and no others. Nothing for one that is erased already. Raises
        ``OSError``, ``ForkedQueue``, and ``QueueClosed`` for one that is closed, or that is being closed: its files may
        be another owner's by now.

        A reader that another process has open is told: its calls raise ``QueueClosed``, and it saves nothing any more.
        """
        self._end(QueueClosed(f"queue {self.name!r} is erased"), erase=True)

    def _end(self, closed: QueueClosed, *, erase: bool = False) -> None:
        waiting: list[Waiter] = []

        def keep(waiters: list[Waiter], _: Exception) -> None:
            waiting.extend(waiters)

        try:
            try:
                self._end_it(closed, keep, erase=erase)
            finally:  # last: what users call back may raise anything, and may open the queue again
                fail_all(waiting, closed)
        except BaseException:  # an interrupt, perhaps, of whoever was telling
            fail_all(waiting, closed)
            raise

    def _end_it(self, closed: QueueClosed, tell: Tell, *, erase: bool) -> None:
        """``tell`` is given those who wait for an item: they are told when all is done."""
        mine = False
        if self._inflow is not None and not isinstance(self._state, ForkedQueue):
            self._inflow.stop()
        try:
            with self._lock:
                state = self._state
                is_open = not isinstance(state, QueueClosed)
                if erase and not is_open and not self._erases:
                    raise QueueClosed(f"queue {self.name!r} is closed: open it again to erase it")
                if erase and isinstance(state, ForkedQueue):
                    raise copy_of(state)
                if self._gone or self._ending or isinstance(state, ForkedQueue):
                    return
                # In this order: the first may find no memory. And no call until it is closed.
                self._ending = mine = True
                if is_open:
                    self._erases = erase
                    self._state, self._fast = closed, False
                    self._journal.refuse(closed)
            self._dismiss_producers()
            forget(self)
            if erase and is_open:
                self._erase_files(closed, tell)
            elif state is None:
                self._close_cleanly(closed, tell)
            elif isinstance(state, DurabilityUnknown) and not self._told:
                raise copy_of(state)
        finally:
            if mine:
                try:
                    self._let_go(closed)
                finally:
                    self._ending = False

    def _erase_files(self, closed: QueueClosed, tell: Tell) -> None:
        try:
            self._readership.stop(closed, tell)
            with self._syncing:
                self._journal.keep_name()
            if self._inflow is not None:
                self._inflow.erase()
            self._home.erase()
        except BaseException:
            self._erases = False
            raise

    def _dismiss(self, error: QueueClosed) -> None:
        for reader in list(self._readership.open.values()):
            checkpointer_of(reader).dispatcher.dismiss(error)
        self._dismiss_producers()

    def _dismiss_producers(self) -> None:
        """Tell those who wait for room. Done again by ``_let_go``, for those that an interrupt has left."""
        self._room.ring_all()

    def _close_cleanly(self, closed: QueueClosed, tell: Tell) -> None:
        with self._lock:
            with contextlib.suppress(QueueDiskFull):  # it is on disk; the next opening finds its end
                self._journal.rotate()
            tail_id = self._journal.tail_id
            self._feed.show_durable_locked(tail_id, self._journal.total_bytes)
        try:
            self._save_places(closed, tell)
            with contextlib.suppress(QueueLocked):  # the next owner does it, when its readers move
                self._readership.retire(self._feed, wait=False)
            if tail_id != self._marked_id:
                self._save_mark(tail_id)
        finally:
            self._commit.note(tail_id)  # last: it runs what users call back, which may raise anything

    def _save_mark(self, tail_id: int) -> None:
        """The mark says what would be missing: on a full disk that has no room for it, it stays as it was."""
        mark = Recovered(queue_id=self._journal.queue_id, tail_id=tail_id)
        try:
            write_mark(self._home.directory, self.name, mark, self._journal.durable_id)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            _logging.warning("there is no room for the mark of %s, which stays as it was: %s", self.name, error)

    def _save_places(self, closed: QueueClosed, tell: Tell) -> None:
        """Of all readers, whatever is wrong with one of them; also of one that its own ``close`` is about to save."""
        with contextlib.ExitStack() as rest:
            for reader in self._readership.open.values():
                saver = checkpointer_of(reader)
                if saver.backlog.broken is None or saver.is_ending:
                    rest.callback(saver.save_last, True, closed, tell)

    def _let_go(self, closed: QueueClosed) -> None:
        """Wake everybody and release everything, whatever raises on the way. May be repeated."""
        if self._state is None:  # an allocation failed where ``_end`` was to say so
            self._state, self._fast = closed, False
        with contextlib.ExitStack() as rest:
            rest.callback(self._home.directory.close)
            rest.callback(self._writer_lock.release)
            if self._archive is not None:
                rest.callback(self._archive.close)
            rest.callback(self._abandon_journal)
            rest.callback(self._home.leave_guard)
            for reader in self._readership.owned():
                rest.callback(self._readership.release, reader)
                rest.callback(checkpointer_of(reader).dispatcher.break_off, closed)
            rest.callback(self._dismiss_producers)
            rest.callback(self._cancel_timers)
            rest.callback(self._commit.tell)
            self._commit.fail(closed)
        self._gone = True

    def _cancel_timers(self) -> None:
        """They would keep a queue alive that is closed."""
        for timer in (self._commit.timer, self._readership.timer):
            if timer is not None:
                timer.cancel()

    def _abandon_journal(self) -> None:
        with self._syncing:  # not while it is being synced
            self._journal.abandon()

    def _abandon(self) -> None:
        """In a forked child: everything here is the parent's (R26)."""
        foreign = ForkedQueue(self._pid)
        self._state, self._fast, self._unfinished = foreign, False, False
        self._lock = self._feed.lock = threading.Lock()
        self._journal.refuse(foreign)
        self._readership.abandon(foreign)
        self._journal.abandon()
        self._writer_lock.abandon()
        if self._inflow is not None:
            self._inflow.abandon()
        self._home.directory.close()

    def __enter__(self: Q) -> Q:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_state", self) is None:
            warn_unclosed(self)
