"""``Syncer``: when a queue's journal is synced, in the foreground and in the background, and what a failed sync means.

NOTE ON LOCKING: ``source.lock`` (Q in docs/locking.md) guards the journal and the window. A sync runs without it, under
``_syncing`` (S). What is called by who leads a sync (``_sync_once``, ``_note_failure``) runs nothing that users call
back, as if the lead were a lock.
"""

from __future__ import annotations

import contextlib
import threading

from kestrelpy import _logging
from kestrelpy._reading.local_source import LocalSource
from kestrelpy._reading.reader import checkpointer_of
from kestrelpy._reading.registry import ReaderRegistry
from kestrelpy._writing.backpressure import Room
from kestrelpy._writing.group_commit import GroupCommit
from kestrelpy._writing.status import QueueStatus
from kestrelpy.clock import Timer, sync_later
from kestrelpy.errors import DurabilityUnknown, ForkedQueue, QueueClosed, copy_of


class Syncer:
    """The syncs of one queue. ``syncing``: the lock S, which the journal knows, too."""

    def __init__(
        self,
        directory: str,
        status: QueueStatus,
        source: LocalSource,
        registry: ReaderRegistry,
        room: Room,
        syncing: threading.Lock,
    ) -> None:
        self._directory = directory
        self._status = status
        self._source = source
        self._journal = source.journal
        self._registry = registry
        self._room = room
        self._clock = source.clock
        self._syncing = syncing
        self.commit = GroupCommit(self._sync_once, lambda: self._sync_in(0), self._serve, self._notify_later)
        self.commit.durable_id = self._journal.durable_id
        self._is_unattended = False  # it was logged that no thread could be started

    def sync(self) -> None:
        """Return when everything put before is on disk, in every mode. Raises ``DurabilityUnknown``."""
        self._status.check_usable()
        self.wait_durable(self._journal.tail_id)

    def wait_durable(self, item_id: int) -> None:
        try:
            self.commit.wait(item_id)
        except DurabilityUnknown as error:
            self.fail(error, reported=True)
            raise

    def _sync_once(self) -> int:
        """One sync of the active segment, without the queue's lock (R33).

        A queue that is being closed may still be synced: closing it is no reason to doubt what was put.
        """
        with self._source.lock:
            self._check_syncable()
            file, tail_id = self._journal.sync_target()
            total_bytes = self._journal.total_bytes
        failure: DurabilityUnknown | None = None
        if file is not None:
            with self._syncing:
                if self._journal.is_active(file):
                    try:
                        self._journal.sync(file)
                    except OSError as cause:
                        failure = self._journal.fail(cause)
        if failure is not None:
            self._note_failure(failure)
            raise failure
        with self._source.lock:
            self._check_syncable()
            self._journal.durable_id = max(self._journal.durable_id, tail_id)
            self._source.show_durable_locked(tail_id, total_bytes)
        return tail_id

    def _serve(self) -> None:
        """What has become durable may be visible since: see to those who wait for it. With no lock held."""
        if self._status.error is None:
            if self._registry.limited:
                self._registry.keep_limits()
            if self._source.waiting:
                self._source.wake()

    def _notify_later(self) -> None:
        """Have another thread notify those whom a sync concerns. If none can be started, the next call does it that
        may: one that syncs and holds no lock.
        """
        commit = self.commit
        if commit.notifies or not (commit.owed or self._source.waiting or self._registry.limited):
            return
        try:
            commit.notifies = True
            self._clock.call_later(0, commit.notify, on_lost=lambda _: commit.notify())
        except RuntimeError:
            commit.notifies = False
        except BaseException:
            commit.notifies = False
            raise

    def _check_syncable(self) -> None:
        if self._status.error is not None and not isinstance(self._status.error, QueueClosed):
            raise copy_of(self._status.error)

    def arm(self) -> None:
        """The first put since the last sync: see to the next one. Under the lock, in a put."""
        self._status.sync_armed = True
        if self._status.sync_seconds:
            try:
                self.commit.timer = self._sync_in(self._status.sync_seconds)
            except RuntimeError:  # no thread can be started
                self._status.sync_armed = False  # the next put tries again
                self._source.leave(self._sync_unattended)
            except BaseException:
                self._status.sync_armed = False
                raise

    def _sync_unattended(self) -> None:
        """No thread can be started to sync in the background: the put that was to see to that syncs itself. So what is
        promised of ``sync=T`` holds, at the price of ``"always"``, until threads can be started again.
        """
        self.wait_durable(self._journal.tail_id)
        if not self._is_unattended:
            self._is_unattended = True
            _logging.warning("no thread can be started for %s: puts sync by themselves", self._source.name)

    def _sync_in(self, seconds: float) -> Timer:
        return sync_later(self._clock, seconds, self._background_sync, self.lose_thread)

    def sync_soon(self) -> None:
        """See to it that a sync comes. With no lock held."""
        self.commit.sync_soon()

    def _background_sync(self) -> None:
        """On the thread of syncs, which every queue counts on: nothing of a user's is run here."""
        if self._status.sync_seconds:
            self._status.sync_armed = False  # before the look: a put from here on arms the next one
        try:
            with contextlib.suppress(DurabilityUnknown, QueueClosed, ForkedQueue):  # told at the next call
                self.commit.run()
        finally:
            if self._status.sync_seconds and not self._status.sync_armed and self._is_behind():
                self.arm()  # put while that sync, or another thread's, was under way; or it was cut short

    def _is_behind(self) -> bool:
        commit = self.commit
        return self._status.error is None and (self._journal.tail_id > commit.durable_id or commit.is_silent)

    def fail(self, error: DurabilityUnknown, *, reported: bool = False) -> None:
        """A sync failed: the queue is failed until it is reopened (R9). With no lock held."""
        self._note_failure(error, reported=reported)
        self.commit.notify()

    def _note_failure(self, error: DurabilityUnknown, *, reported: bool = False) -> None:
        """The queue is failed from here on. Threads are woken; who runs what users call back is told by the next
        ``GroupCommit.notify``.
        """
        if reported:  # one store: others may be here too
            self._status.is_reported = True
        kept = copy_of(error)
        with self._source.lock:
            if self._status.error is not None:
                return
            self._status.error = kept
            self._status.fast = False
            self._journal.refuse(kept)
        self._room.ring_all()
        self.commit.fail(kept)
        for reader in self._registry.open.values():
            checkpointer_of(reader).dispatcher.break_off(kept, self.commit.owe)

    def lose_thread(self, _cause: BaseException) -> None:
        """The thread died that was to sync, or to save and retire (R30): nobody would do it any more."""
        self.fail(DurabilityUnknown(self._directory, self._journal.durable_id + 1, self._journal.tail_id))
