"""Durability: the syncs of a ``JournaledQueue``, in the foreground and behind it, and what becomes of it if one fails.

NOTE ON LOCKING: ``_lock`` (Q in docs/locking.md) guards the journal and the feed. A sync runs without it, under
``_syncing``. ``_state``, why the queue can't be used, is one store, read without a lock. What is called by who leads a
sync (``_sync_once``, ``_note_failure``) runs nothing that users call back, as if the lead were a lock.
"""

from __future__ import annotations

import contextlib
import threading

from kestrelpy import _logging
from kestrelpy._journal.journal import Journal
from kestrelpy._reading.dispatch import Dispatcher
from kestrelpy._reading.local_source import LocalSource
from kestrelpy._reading.reader import checkpointer_of
from kestrelpy._reading.registry import ReaderRegistry
from kestrelpy._writing.backpressure import Room
from kestrelpy._writing.group_commit import GroupCommit
from kestrelpy.clock import Clock, Timer, sync_later
from kestrelpy.config import FullPolicy
from kestrelpy.errors import DurabilityUnknown, ForkedQueue, QueueClosed, copy_of


class Durability:
    """What syncs need; ``JournaledQueue`` sets it up."""

    name: str
    directory: str
    _state: Exception | None
    _fast: bool
    _clock: Clock
    _sync_seconds: float | None
    _sync_armed: bool
    _lock: threading.Lock
    _syncing: threading.Lock
    _room: Room
    _journal: Journal
    _feed: LocalSource
    _commit: GroupCommit
    _readership: ReaderRegistry
    _is_unattended = False  # it was logged that no thread could be started
    _told = False  # a call of the queue's own has raised what it has failed of

    def sync(self) -> None:
        """Return when everything put before is on disk, in every mode. Raises ``DurabilityUnknown``."""
        self._check_usable()
        self._wait_durable(self._journal.tail_id)

    def _wait_durable(self, item_id: int) -> None:
        try:
            self._commit.wait(item_id)
        except DurabilityUnknown as error:
            self._fail(error, told=True)
            raise

    def _sync_once(self) -> int:
        """One sync of the active segment, without the queue's lock (R33).

        A queue that is being closed may still be synced: closing it is no reason to doubt what was put.
        """
        with self._lock:
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
        with self._lock:
            self._check_syncable()
            self._journal.durable_id = max(self._journal.durable_id, tail_id)
            self._feed.show_durable_locked(tail_id, total_bytes)
        return tail_id

    def _serve(self) -> None:
        """What has become durable may be visible since: see to those who wait for it. With no lock held."""
        if self._state is None:
            if self._readership.limited:
                self._keep_limits()
            if self._feed.waiting:
                self._feed.wake()

    def _tell_later(self) -> None:
        """Have another thread notify those whom a sync concerns. If none can be started, the next call does it that
        may: one that syncs and holds no lock.
        """
        commit = self._commit
        if commit.tells or not (commit.owed or self._feed.waiting or self._readership.limited):
            return
        try:
            commit.tells = True
            self._clock.call_later(0, commit.tell, on_lost=lambda _: commit.tell())
        except RuntimeError:
            commit.tells = False
        except BaseException:
            commit.tells = False
            raise

    def _check_syncable(self) -> None:
        if self._state is not None and not isinstance(self._state, QueueClosed):
            raise copy_of(self._state)

    def _arm_sync(self) -> None:
        """The first put since the last sync: see to the next one. Under the lock, in a put."""
        self._sync_armed = True
        if self._sync_seconds:
            try:
                self._commit.timer = self._sync_in(self._sync_seconds)
            except RuntimeError:  # no thread can be started
                self._sync_armed = False  # the next put tries again
                self._feed.leave(self._sync_unattended)
            except BaseException:
                self._sync_armed = False
                raise

    def _sync_unattended(self) -> None:
        """No thread can be started to sync in the background: the put that was to see to that syncs itself. So what is
        promised of ``sync=T`` holds, at the price of ``"always"``, until threads can be started again.
        """
        self._wait_durable(self._journal.tail_id)
        if not self._is_unattended:
            self._is_unattended = True
            _logging.warning("no thread can be started for %s: puts sync by themselves", self.name)

    def _sync_in(self, seconds: float) -> Timer:
        return sync_later(self._clock, seconds, self._background_sync, self._maintenance_lost)

    def _sync_soon(self) -> None:
        """See to it that a sync comes. With no lock held."""
        self._commit.sync_soon()

    def _background_sync(self) -> None:
        """On the thread of syncs, which every queue counts on: nothing of a user's is run here."""
        if self._sync_seconds:
            self._sync_armed = False  # before the look: a put from here on arms the next one
        try:
            with contextlib.suppress(DurabilityUnknown, QueueClosed, ForkedQueue):  # told at the next call
                self._commit.run()
        finally:
            if self._sync_seconds and not self._sync_armed and self._is_behind():
                self._arm_sync()  # put while that sync, or another thread's, was under way; or it was cut short

    def _is_behind(self) -> bool:
        commit = self._commit
        return self._state is None and (self._journal.tail_id > commit.durable_id or commit.is_silent)

    def _fail(self, error: DurabilityUnknown, *, told: bool = False) -> None:
        """A sync failed: the queue is failed until it is reopened (R9). With no lock held."""
        self._note_failure(error, told=told)
        self._commit.tell()

    def _note_failure(self, error: DurabilityUnknown, *, told: bool = False) -> None:
        """The queue is failed from here on. Threads are woken; who runs what users call back is told by the next
        ``GroupCommit.tell``.
        """
        if told:  # one store: others may be here too
            self._told = True
        kept = copy_of(error)
        with self._lock:
            if self._state is not None:
                return
            self._state = kept
            self._fast = False
            self._journal.refuse(kept)
        self._room.ring_all()
        self._commit.fail(kept)
        for reader in self._readership.open.values():
            checkpointer_of(reader).dispatcher.break_off(kept, self._commit.owe)

    def _maintenance_lost(self, _cause: BaseException) -> None:
        """The thread died that was to sync, or to save and retire (R30): nobody would do it any more."""
        self._fail(DurabilityUnknown(self.directory, self._journal.durable_id + 1, self._journal.tail_id))

    def _check_usable(self) -> None:
        if self._state is not None:
            self._told = True
            raise copy_of(self._state)

    def _keep_limits(self) -> None:
        """After items have become visible: let the readers that may drop their oldest ones do so. Called with no lock
        held; raises nothing, as the items are there.
        """
        for reader in self._readership.limited:
            if reader.config.full_policy is FullPolicy.DROP_OLDEST and isinstance(reader, Dispatcher):
                reader.keep_limits()
