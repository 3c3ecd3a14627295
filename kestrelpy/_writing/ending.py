"""``Ending``: closing a queue, erasing it, and abandoning it in a forked child.

Rules:
1. A queue is closed once. A close() that comes while another thread is closing returns at once. A second close()
   finishes what an interrupted first one left undone (R13).
   What was committed is saved by the first close(), even if it is interrupted.
2. All waiters are notified and all resources are released, whatever raises on the way.

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
from kestrelpy.errors import (
    ForkedQueue,
    KestrelError,
    QueueClosed,
    QueueDiskFull,
    QueueLocked,
    copy_of,
)


class Inbox(Protocol):
    """The calls of an inbox that closing a queue needs."""

    def stop(self) -> None: ...

    def erase(self) -> None: ...

    def abandon(self) -> None: ...


class CopyElsewhere(Protocol):
    """The calls of a copy elsewhere that closing a queue needs."""

    def close(self) -> None: ...

    def release(self) -> None: ...

    def abandon(self, error: KestrelError) -> None: ...


class Ending:
    """Closes one queue. ``forget`` removes the queue from those that are closed at the end of the interpreter."""

    def __init__(
        self,
        status: QueueStatus,
        syncer: Syncer,
        source: LocalSource,
        registry: ReaderRegistry,
        room: Room,
        held: OpenJournal,
        inbox: Inbox | None,
        shipping: CopyElsewhere | None,
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
        self._shipping = shipping
        self._forget = forget
        self._is_ending = False  # guarded by source.lock: a thread is closing the queue
        self._is_unsaved = False  # the checkpoints are to be saved, and are not all saved
        self._is_gone = False  # everything is released
        self.saves_nothing = False
        """True if closing must save nothing: the journal turned out to be of another kind."""
        self._erases = False  # guarded by source.lock: an erase() is deleting the files, or has deleted them

    def end(self, closed: QueueClosed, *, erase: bool = False) -> None:
        """``JournaledQueue.close`` and ``erase``. Every later call raises ``closed``."""
        waiting: list[Waiter] = []

        def keep(waiters: list[Waiter], _: Exception) -> None:
            waiting.extend(waiters)

        try:
            try:
                self._end_it(closed, keep, erase=erase)
            finally:  # last: callbacks of users may raise anything, and may open the queue again
                fail_all(waiting, closed)
        except BaseException:  # perhaps an interrupt of ``fail_all``
            fail_all(waiting, closed)
            raise

    def _end_it(self, closed: QueueClosed, notify: Notify, *, erase: bool) -> None:
        """Close or erase. ``notify`` collects the waiters for items; ``end`` completes them after everything else."""
        mine = False
        if self._inbox is not None and not isinstance(self._status.error, ForkedQueue):
            self._inbox.stop()
        try:
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
                    # In this order: the first store may raise MemoryError. And no call until the queue is closed.
                    self._is_ending = mine = True
                    if is_open:
                        self._is_unsaved = state is None and not erase and not self.saves_nothing
                        self._erases = erase
                        self._status.error, self._status.fast = closed, False
                        self._journal.refuse(closed)
                self._dismiss_producers()
                self._forget()
                if erase and is_open:
                    self._erase_files(closed, notify)
                elif self._is_unsaved:
                    try:
                        self._close_cleanly(closed, notify)
                    except BaseException:  # that is what its caller has to know
                        if self._shipping is not None:
                            with contextlib.suppress(KestrelError, OSError):
                                self._shipping.close()
                        raise
                    if self._shipping is not None:
                        self._shipping.close()
                elif isinstance(state, KestrelError) and is_open and not (erase or self._status.is_reported):
                    raise copy_of(state)
            except (KestrelError, OSError):
                raise
            except BaseException:  # an interrupt: what was committed must not come again
                if mine and self._is_unsaved:
                    self._close_cleanly(closed, notify)
                raise
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
        """Fail every waiter with ``error``, and make waiting producers look again."""
        for reader in list(self._registry.open.values()):
            checkpointer_of(reader).dispatcher.dismiss(error)
        self._dismiss_producers()

    def _dismiss_producers(self) -> None:
        """Ring the producers that wait for room. ``_release_all`` repeats this, in case of an interrupt here."""
        self._room.ring_all()

    def _close_cleanly(self, closed: QueueClosed, notify: Notify) -> None:
        """Close the journal, and save all checkpoints. May be repeated after an interrupt."""
        self._syncer.check_files()
        with self._source.lock:
            with contextlib.suppress(QueueDiskFull):  # the items are on disk; the next opening finds the end
                self._journal.rotate()
            tail_id = self._journal.tail_id
            self._source.show_durable_locked(tail_id, self._journal.total_bytes)
        try:
            self._save_checkpoints(closed, notify)
            self._is_unsaved = False
            with contextlib.suppress(QueueLocked):  # the next owner retires them, when its readers move
                self._registry.retire(self._source, wait=False)
            self._held.save_mark(tail_id)
        finally:
            self._syncer.commit.note(tail_id)  # last: it runs callbacks of users, which may raise anything

    def _save_checkpoints(self, closed: QueueClosed, notify: Notify) -> None:
        """Save the checkpoints of all readers, even if one of them raises.

        This includes a reader that its own ``close`` is about to save.
        """
        savers = [checkpointer_of(reader) for reader in self._registry.open.values()]
        unsaved = [each for each in savers if each.backlog.broken is None or each.is_ending or each.is_last_due]
        with contextlib.ExitStack() as rest:
            for saver in unsaved:
                rest.callback(saver.save_last, True, closed, notify)

    def _release_all(self, closed: QueueClosed) -> None:
        """Wake all waiters and release everything, whatever raises on the way. May be repeated."""
        if self._status.error is None:  # an allocation failed before ``_end_it`` could set the error
            self._status.error, self._status.fast = closed, False
        with contextlib.ExitStack() as rest:
            self._held.release(rest)
            rest.callback(self._held.files.leave_guard)
            for reader in self._registry.owned():
                rest.callback(self._registry.release, reader)
                rest.callback(checkpointer_of(reader).dispatcher.fail_waiting, closed)
            rest.callback(self._dismiss_producers)
            rest.callback(self._cancel_timers)
            if self._shipping is not None:
                rest.callback(self._shipping.release)
            rest.callback(self._syncer.notify_all)
            self._syncer.fail_waits(closed)
        self._is_gone = True

    def _cancel_timers(self) -> None:
        """Cancel the timers, which would keep a closed queue alive."""
        for timer in (self._syncer.commit.timer, self._registry.timer):
            if timer is not None:
                timer.cancel()

    def abandon(self, foreign: Exception) -> None:
        """In a forked child: abandon everything, as it belongs to the parent (R26)."""
        self._status.error, self._status.fast, self._status.is_unfinished = foreign, False, False
        self._source.lock = threading.Lock()
        self._journal.refuse(foreign)
        self._registry.abandon(foreign)
        self._held.abandon()
        if self._inbox is not None:
            self._inbox.abandon()
        if self._shipping is not None and isinstance(foreign, KestrelError):
            self._shipping.abandon(foreign)
