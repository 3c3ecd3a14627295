"""``Ending``: closing a queue, erasing it, and leaving it to the parent in a forked child.

Rules:
1. Closing is once: who comes while another thread is at it has nothing to do. Who comes after one that was interrupted
   gives back what that one has left (R13).
2. Everybody who waits is notified, and everything is given back, whatever raises on the way.

NOTE ON LOCKING: ``source.lock`` is Q in docs/locking.md. Nobody is notified while a lock is held.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Protocol

from kestrelpy._reading.dispatch import Notify, fail_all
from kestrelpy._reading.local_source import LocalSource
from kestrelpy._reading.reader import checkpointer_of
from kestrelpy._reading.registry import ReaderRegistry
from kestrelpy._waiting.waiters import Waiter
from kestrelpy._writing.backpressure import Room
from kestrelpy._writing.open_journal import OpenJournal
from kestrelpy._writing.status import QueueStatus
from kestrelpy._writing.syncer import Syncer
from kestrelpy.errors import DurabilityUnknown, ForkedQueue, QueueClosed, QueueDiskFull, QueueLocked, copy_of


class Inbox(Protocol):
    """What the end of a queue needs of its inbox."""

    def stop(self) -> None: ...

    def erase(self) -> None: ...

    def abandon(self) -> None: ...


class Ending:
    """The end of one queue. ``forget``: it is not to be closed at the interpreter's end any more."""

    def __init__(
        self,
        status: QueueStatus,
        syncer: Syncer,
        source: LocalSource,
        registry: ReaderRegistry,
        room: Room,
        held: OpenJournal,
        inbox: Inbox | None,
        forget: Callable[[], object],
    ) -> None:
        self._status = status
        self._syncer = syncer
        self._source = source
        self._journal = source.journal
        self._registry = registry
        self._room = room
        self._held = held
        self._inbox = inbox
        self._forget = forget
        self._is_ending = False  # guarded by source.lock: somebody is at it
        self._is_gone = False  # everything is given back
        self.changes_nothing = False
        """Closing saves nothing: the journal is of another kind than was thought."""
        self._erases = False  # guarded by source.lock: what ends it deletes its files, or has

    def end(self, closed: QueueClosed, *, erase: bool = False) -> None:
        """``JournaledQueue.close`` and ``erase``. Every later call raises ``closed``."""
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

    def _end_it(self, closed: QueueClosed, notify: Notify, *, erase: bool) -> None:
        """``notify`` is given those who wait for an item: they are told when all is done."""
        mine = False
        if self._inbox is not None and not isinstance(self._status.error, ForkedQueue):
            self._inbox.stop()
        try:
            with self._source.lock:
                state = self._status.error
                is_open = not isinstance(state, QueueClosed)
                if erase and not is_open and not self._erases:
                    raise QueueClosed(f"queue {self._source.name!r} is closed: open it again to erase it")
                if erase and isinstance(state, ForkedQueue):
                    raise copy_of(state)
                if self._is_gone or self._is_ending or isinstance(state, ForkedQueue):
                    return
                # In this order: the first may find no memory. And no call until it is closed.
                self._is_ending = mine = True
                if is_open:
                    self._erases = erase
                    self._status.error, self._status.fast = closed, False
                    self._journal.refuse(closed)
            self._dismiss_producers()
            self._forget()
            if erase and is_open:
                self._erase_files(closed, notify)
            elif state is None and not self.changes_nothing:
                self._close_cleanly(closed, notify)
            elif isinstance(state, DurabilityUnknown) and not self._status.is_reported:
                raise copy_of(state)
        finally:
            if mine:
                try:
                    self._release_all(closed)
                finally:
                    self._is_ending = False

    def _erase_files(self, closed: QueueClosed, notify: Notify) -> None:
        try:
            self._registry.stop(closed, notify)
            self._held.keep_name()
            if self._inbox is not None:
                self._inbox.erase()
            self._held.files.erase()
        except BaseException:
            self._erases = False
            raise

    def dismiss(self, error: QueueClosed) -> None:
        """Everybody who waits gets ``error``."""
        for reader in list(self._registry.open.values()):
            checkpointer_of(reader).dispatcher.dismiss(error)
        self._dismiss_producers()

    def _dismiss_producers(self) -> None:
        """Tell those who wait for room. Done again by ``_release_all``, for those that an interrupt has left."""
        self._room.ring_all()

    def _close_cleanly(self, closed: QueueClosed, notify: Notify) -> None:
        with self._source.lock:
            with contextlib.suppress(QueueDiskFull):  # it is on disk; the next opening finds its end
                self._journal.rotate()
            tail_id = self._journal.tail_id
            self._source.show_durable_locked(tail_id, self._journal.total_bytes)
        try:
            self._save_checkpoints(closed, notify)
            with contextlib.suppress(QueueLocked):  # the next owner does it, when its readers move
                self._registry.retire(self._source, wait=False)
            self._held.save_mark(tail_id)
        finally:
            self._syncer.commit.note(tail_id)  # last: it runs what users call back, which may raise anything

    def _save_checkpoints(self, closed: QueueClosed, notify: Notify) -> None:
        """Of all readers, whatever is wrong with one of them; also of one that its own ``close`` is about to save."""
        with contextlib.ExitStack() as rest:
            for reader in self._registry.open.values():
                saver = checkpointer_of(reader)
                if saver.backlog.broken is None or saver.is_ending:
                    rest.callback(saver.save_last, True, closed, notify)

    def _release_all(self, closed: QueueClosed) -> None:
        """Wake everybody and release everything, whatever raises on the way. May be repeated."""
        if self._status.error is None:  # an allocation failed where ``_end`` was to say so
            self._status.error, self._status.fast = closed, False
        with contextlib.ExitStack() as rest:
            self._held.release(rest)
            rest.callback(self._held.files.leave_guard)
            for reader in self._registry.owned():
                rest.callback(self._registry.release, reader)
                rest.callback(checkpointer_of(reader).dispatcher.break_off, closed)
            rest.callback(self._dismiss_producers)
            rest.callback(self._cancel_timers)
            rest.callback(self._syncer.commit.notify)
            self._syncer.commit.fail(closed)
        self._is_gone = True

    def _cancel_timers(self) -> None:
        """They would keep a queue alive that is closed."""
        for timer in (self._syncer.commit.timer, self._registry.timer):
            if timer is not None:
                timer.cancel()

    def abandon(self, foreign: Exception) -> None:
        """In a forked child: everything here is the parent's (R26)."""
        self._status.error, self._status.fast, self._status.is_unfinished = foreign, False, False
        self._source.lock = threading.Lock()
        self._journal.refuse(foreign)
        self._registry.abandon(foreign)
        self._held.abandon()
        if self._inbox is not None:
            self._inbox.abandon()
