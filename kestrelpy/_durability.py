"""Durability: the syncs of a ``JournaledQueue``, in the foreground and behind it, and what becomes of it if one fails.

NOTE ON LOCKING: ``_lock`` (Q in docs/locking.md) guards the journal and the feed. A sync runs without it, under
``_syncing``. ``_state``, why the queue can't be used, is one store, read without a lock.
"""

from __future__ import annotations

import contextlib
import threading

from kestrelpy._feed import Feed
from kestrelpy._journal import Journal
from kestrelpy._line import Line
from kestrelpy._readership import Readership
from kestrelpy._sync import GroupCommit
from kestrelpy.clock import Clock
from kestrelpy.config import FullPolicy
from kestrelpy.errors import DurabilityUnknown, ForkedQueue, QueueClosed
from kestrelpy.reader import Reader


class Durability:
    """What syncs need; ``JournaledQueue`` sets it up."""

    name: str
    directory: str
    _state: Exception | None
    _plain: bool
    _clock: Clock
    _sync_seconds: float | None
    _sync_armed: bool
    _lock: threading.Lock
    _syncing: threading.Lock
    _room: Line
    _journal: Journal
    _feed: Feed
    _commit: GroupCommit
    _readership: Readership
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
                        failure.__cause__ = cause
        if failure is not None:
            self._fail(failure)
            raise failure
        with self._lock:
            self._check_syncable()
            self._journal.durable_id = max(self._journal.durable_id, tail_id)
            shown = self._feed.show_durable_locked(tail_id, total_bytes)
        if shown:  # else whoever put what is there wakes those who wait for it
            self._keep_limits()
            if self._feed.waiting:
                self._feed.wake()
        return tail_id

    def _check_syncable(self) -> None:
        if self._state is not None and not isinstance(self._state, QueueClosed):
            raise self._state

    def _arm_sync(self) -> None:
        """The first put since the last sync: see to the next one."""
        self._sync_armed = True
        if self._sync_seconds:
            try:
                self._clock.call_later(self._sync_seconds, self._background_sync, on_lost=self._maintenance_lost)
            except BaseException:
                self._sync_armed = False
                raise

    def _sync_soon(self) -> None:
        self._clock.call_later(0, self._background_sync, on_lost=self._maintenance_lost)

    def _background_sync(self) -> None:
        if self._sync_seconds:
            self._sync_armed = False  # before the look: a put from here on arms the next one
        with contextlib.suppress(DurabilityUnknown, QueueClosed, ForkedQueue):  # told at the next call
            self._commit.run()
            if self._sync_seconds and not self._sync_armed and self._journal.tail_id > self._commit.durable_id:
                self._arm_sync()  # put while that sync, or another thread's, was under way

    def _fail(self, error: DurabilityUnknown, *, told: bool = False) -> None:
        """A sync failed: the queue is failed until it is reopened (R9). Called with no lock held."""
        if told:  # one store: others may be here too
            self._told = True
        with self._lock:
            if self._state is not None:
                return
            self._state = error
            self._plain = False
            self._journal.refuse(error)
            waiting = self._room.drain()
        for waiter in waiting:
            waiter.fail(error)
        self._commit.fail(error)
        for reader in self._readership.open.values():
            reader._break(error)

    def _maintenance_lost(self, _cause: BaseException) -> None:
        """The maintenance thread died (R30): nobody would sync any more."""
        self._fail(DurabilityUnknown(self.directory, self._journal.durable_id + 1, self._journal.tail_id))

    def _check_usable(self) -> None:
        if self._state is not None:
            self._told = True
            raise self._state

    def _keep_limits(self) -> None:
        """After items have become visible: let the readers that may drop their oldest ones do so. Called with no lock
        held.
        """
        for reader in self._readership.limited:
            if reader.config.full_policy is FullPolicy.DROP_OLDEST and isinstance(reader, Reader):
                reader._drop_oldest()
