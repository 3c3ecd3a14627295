"""``Syncer``: syncs a queue's journal, in foreground and background, and fails the queue after a failed sync.

NOTE ON LOCKING: ``source.lock`` (Q in docs/locking.md) guards the journal and the window. A sync runs without it, under
``_syncing`` (S). The methods that the leader of a sync calls (``_sync_once``, ``_note_failure``) run no callbacks of
users, as if the lead were a lock.
"""

from __future__ import annotations

import contextlib

from kestrelpy import _logging
from kestrelpy._reading.local_source import LocalSource
from kestrelpy._reading.reader import checkpointer_of
from kestrelpy._reading.registry import ReaderRegistry
from kestrelpy._writing.backpressure import Room
from kestrelpy._writing.group_commit import Absent, GroupCommit
from kestrelpy._writing.open_journal import OpenJournal
from kestrelpy._writing.status import QueueStatus
from kestrelpy._writing.sync_times import SyncTimes
from kestrelpy.clock import Timer, sync_later
from kestrelpy.errors import DurabilityUnknown, ForkedQueue, KestrelError, QueueClosed, copy_of

LOOK_SECONDS = 1.0
"""How often a sync is followed by a look whether the lock file and the segment are still there."""


class Syncer:
    """The syncs of one queue."""

    def __init__(
        self,
        directory: str,
        status: QueueStatus,
        source: LocalSource,
        registry: ReaderRegistry,
        room: Room,
        held: OpenJournal,
    ) -> None:
        self._directory = directory
        self._status = status
        self._source = source
        self._journal = source.journal
        self._registry = registry
        self._room = room
        self._clock = source.clock
        self._held = held
        self._syncing = held.syncing
        self._look_at = 0.0
        self.commit = commit = GroupCommit(
            self._sync_once, lambda: self._sync_in(0), self._serve, lambda: self._notify_later(self.commit)
        )
        commit.durable_id = self._journal.durable_id
        self.acks = commit
        """What a put waits for before it returns: the disk, or a copy elsewhere."""
        self.times = SyncTimes()
        self._is_unattended = False  # True once it was logged that no thread can be started

    def sync(self) -> None:
        """Sync in any mode: return when everything that was put before is on disk. Raises ``DurabilityUnknown``."""
        self._status.check_usable()
        self.wait_durable(self._journal.tail_id)

    def wait_durable(self, item_id: int) -> None:
        try:
            self.commit.wait(item_id)
        except DurabilityUnknown as error:
            self.fail(error, reported=True)
            raise

    def wait_acknowledged(self, first_id: int, last_id: int) -> None:
        """Return when these items of a put are as safe as the queue was told to make them."""
        try:
            self.acks.wait(last_id, first_id=first_id)
        except DurabilityUnknown as error:
            self.fail(error, reported=True)
            raise
        except KestrelError as error:
            if type(error) is type(self._status.error):  # another owner has the queue, say: this call raises that
                self._status.note_reported()
            raise

    def acknowledge_elsewhere(self, leader: Absent) -> None:
        """From here on puts wait for ``leader``, and not for the disk. Called before the first put."""
        self.acks = GroupCommit(bool, bool, self._serve, lambda: self._notify_later(self.acks), leader=leader)
        self.acks.durable_id = self._journal.tail_id

    def _sync_once(self) -> int:
        """Sync the active segment once, without the queue's lock (R33). Returns the highest id on disk.

        This is allowed while the queue is being closed: closing is no reason to doubt the items.
        """
        with self._source.lock:
            self._check_syncable()
            file, tail_id = self._journal.sync_target()
            total_bytes = self._journal.total_bytes
        failure: DurabilityUnknown | None = None
        if file is not None:
            with self._syncing:
                if self._journal.is_active(file):
                    begun = self._clock.monotonic()
                    try:
                        self._journal.sync(file)
                        if begun >= self._look_at and self._status.error is None:  # not while it is being erased
                            self._look_at = begun + LOOK_SECONDS
                            self._held.check_there()
                    except OSError as cause:
                        failure = self._journal.fail(cause)
                    self.times.note(self._clock.monotonic() - begun)
        if failure is not None:
            self._note_failure(failure)
            raise failure
        with self._source.lock:
            self._check_syncable()
            self._journal.durable_id = max(self._journal.durable_id, tail_id)
            self._source.show_durable_locked(tail_id, total_bytes)
        return tail_id

    def check_files(self) -> None:
        """Before the queue is closed: raise ``DurabilityUnknown`` if its files are gone."""
        try:
            with self._syncing:
                self._held.check_there()
        except OSError as cause:
            raise self._journal.fail(cause) from cause

    def _serve(self) -> None:
        """Serve the waiting consumers: items that became durable may be visible now. With no lock held."""
        if self._status.error is None:
            if self._registry.limited:
                self._registry.keep_limits()
            if self._source.waiting:
                self._source.wake()

    def _notify_later(self, commit: GroupCommit) -> None:
        """Make another thread deliver the notifications of a sync.

        If no thread can be started, the next call that syncs and holds no lock delivers them.
        """
        if commit.notifies or not (commit.notifications or self._source.waiting or self._registry.limited):
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
        """Schedule the next sync: this is the first put since the last one. Called in a put, under the queue's lock."""
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
        """Sync on the thread of a put, as no thread can be started to sync in the background.

        So the promise of ``sync=T`` holds, at the cost of ``"always"``, until threads can be started again.
        """
        self.wait_durable(self._journal.tail_id)
        if not self._is_unattended:
            self._is_unattended = True
            _logging.warning("no thread can be started for queue %s: puts sync on their own threads", self._source.name)

    def _sync_in(self, seconds: float) -> Timer:
        return sync_later(self._clock, seconds, self._background_sync, self.lose_thread)

    def sync_soon(self) -> None:
        """Make a sync happen soon. With no lock held."""
        self.commit.sync_soon()

    def _background_sync(self) -> None:
        """Sync on the sync thread. All queues depend on that thread, so no code of users runs here."""
        if self._status.sync_seconds:
            self._status.sync_armed = False  # before the look: a put from here on arms the next one
        try:
            with contextlib.suppress(DurabilityUnknown, QueueClosed, ForkedQueue):  # the next call raises it
                self.commit.run()
        finally:
            if self._status.sync_seconds and not self._status.sync_armed and self._is_behind():
                self.arm()  # for items put during this sync or another thread's; or this one was cut short

    def _is_behind(self) -> bool:
        commit = self.commit
        return self._status.error is None and (self._journal.tail_id > commit.durable_id or commit.needs_notify)

    def fail(self, error: KestrelError, *, reported: bool = False) -> None:
        """Fail the queue after a failed sync, or because it has another owner, until it is reopened (R9). With no lock
        held.
        """
        self._note_failure(error, reported=reported)
        self.notify_all()

    def fail_later(self, error: KestrelError) -> None:
        """``fail``, but another thread runs the callbacks of users."""
        self._note_failure(error)
        self._notify_later(self.commit)
        if self.acks is not self.commit:
            self._notify_later(self.acks)

    def notify_all(self) -> None:
        """Deliver all notifications, as ``GroupCommit.notify``."""
        try:
            self.commit.notify()
        finally:
            if self.acks is not self.commit:
                self.acks.notify()

    def fail_waits(self, error: KestrelError) -> None:
        """Let every wait raise ``error``, now and later. ``notify_all`` tells the futures. May be repeated."""
        try:
            self.commit.fail(error)
        finally:
            if self.acks is not self.commit:
                self.acks.fail(error)

    def _note_failure(self, error: KestrelError, *, reported: bool = False) -> None:
        """Fail the queue, and wake its waiting threads.

        The next ``GroupCommit.notify`` notifies all other waiters, as that runs callbacks of users.
        """
        if reported:
            self._status.note_reported()
        kept = copy_of(error)
        with self._source.lock:
            if self._status.error is not None:
                return
            self._status.error = kept
            self._status.fast = False
            self._journal.refuse(kept)
        self._room.ring_all()
        self.fail_waits(kept)
        for reader in self._registry.open.values():
            checkpointer_of(reader).dispatcher.fail_waiting(kept, self.commit.add_notifications)

    def lose_thread(self, _cause: BaseException) -> None:
        """Fail the queue: the thread that syncs, or the one that saves and retires, has died (R30)."""
        self.fail(DurabilityUnknown(self._directory, self._journal.durable_id + 1, self._journal.tail_id))
