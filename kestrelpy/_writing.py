"""Putting: the writing half of a ``JournaledQueue``, from a put to the disk.

NOTE ON LOCKING: ``_lock`` (Q in docs/locking.md) guards the journal's appends, the feed and ``_room``. A sync runs
without it, under ``_syncing``. Readers' locks come after it. ``_state``, why the queue can't be used, is one store,
read without a lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from zlib import crc32

from kestrelpy._feed import Feed
from kestrelpy._format import FRAME_BYTES, Entry, pack_crc, pack_frame
from kestrelpy._journal import Journal
from kestrelpy._line import FutureWaiter, Line, ThreadWaiter, check_timeout
from kestrelpy._options import encode_items, expiry
from kestrelpy._readership import AbsentReader, Limited, Readership
from kestrelpy._segment import ITEM_COST
from kestrelpy._sync import GroupCommit
from kestrelpy.clock import Clock, SystemClock
from kestrelpy.config import Codec, FullPolicy
from kestrelpy.errors import DurabilityUnknown, ForkedQueue, ItemTooLarge, QueueClosed, QueueFull
from kestrelpy.reader import Reader

if TYPE_CHECKING:
    from concurrent.futures import Future

_NO_LIMIT = 1 << 62


class Writing:
    """What puts need; ``JournaledQueue`` sets it up."""

    name: str
    directory: str
    max_item_bytes: int
    _state: Exception | None
    _plain: bool
    _codec: Codec | None
    _clock: Clock
    _time_ns: Callable[[], int]
    _sync_seconds: float | None
    _sync_armed: bool
    _lock: threading.Lock
    _syncing: threading.Lock
    _room: Line
    _journal: Journal
    _append: Callable[[bytes, int], int]
    _feed: Feed
    _commit: GroupCommit
    _readership: Readership
    _told = False  # a call of the queue's own has raised what it has failed of

    def _choose_path(self) -> None:
        """Whether a put may take the short way: nothing but journal and window to see to."""
        self._plain = (
            self._state is None and self._codec is None and self._sync_seconds != 0 and not self._readership.limited
        )

    def put(
        self,
        data: Any,
        *,
        expires_in: float | None = None,
        expires_at_ms: int | None = None,
        timeout: float | None = 0,
    ) -> int:
        """Add one item for every reader; returns its id.

        When it returns, the item survives the death of the process; with ``sync="always"`` a power cut too. ``data``:
        ``bytes``, ``bytearray`` or ``memoryview``, or any value with a codec. It expires ``expires_in`` seconds from
        now or at ``expires_at_ms``. Where a reader's policy is ``BLOCK``, waits for room up to ``timeout`` seconds.

        Raises ``QueueFull``, ``ItemTooLarge``, ``QueueDiskFull`` (in each case nothing was stored),
        ``DurabilityUnknown``, ``QueueClosed``, ``ForkedQueue``, ``TypeError``, ``ValueError``.
        """
        if (
            not self._plain
            or type(data) is not bytes
            or expires_in is not None
            or expires_at_ms is not None
            or timeout  # not only to be waited for: it may be no timeout at all
        ):
            return self._put_slowly([data], expires_in, expires_at_ms, timeout)[0]
        size = len(data)
        if size > self.max_item_bytes:
            raise ItemTooLarge(size, self.max_item_bytes)
        feed, journal, time_ns = self._feed, self._journal, self._time_ns
        try:
            with self._lock:
                added_ms = time_ns() // 1_000_000
                # Journal.append, written out: on the hottest path of all, a call less is a seventh.
                offset, item_id, total_bytes = journal._at
                end = offset + FRAME_BYTES + size
                if end > journal._room or added_ms != journal._last_ms:
                    item_id = self._append(data, added_ms)
                else:
                    item_id += 1
                    frame = pack_frame(size, item_id, added_ms, item_id - journal.durable_id, journal._marker) + data
                    try:
                        journal._buffer[offset:end] = pack_crc(crc32(frame)) + frame  # type: ignore[index]  # as there
                        journal._at = (end, item_id, total_bytes + size)
                    except BaseException as error:
                        journal._undo(error)
                        raise
                window = feed.shared
                if window.is_open:
                    window.entries[item_id] = (data, added_ms, None)
                    window.left -= size + ITEM_COST
                    if window.left < 0:
                        feed.trim_locked()
                feed.visible_id = item_id
                if not self._sync_armed:
                    self._arm_sync()
            if feed.waiting:
                feed.wake()
        except DurabilityUnknown as error:
            self._fail(error, told=True)
            raise
        except BaseException:
            self._after_interrupt()
            raise
        return item_id

    def put_many(
        self,
        items: Iterable[Any],
        *,
        expires_in: float | None = None,
        expires_at_ms: int | None = None,
        timeout: float | None = 0,
    ) -> range:
        """Add several items as one record: all or nothing, also across a crash. Returns their ids; of nothing, an
        empty range.

        One write, one sync. Guarantees and errors as ``put``.
        """
        values = list(items)
        if not values:
            self._check_usable()
            return range(0)
        ids = self._put_slowly(values, expires_in, expires_at_ms, timeout)
        return range(ids[0], ids[-1] + 1)

    def _put_slowly(
        self,
        values: list[Any],
        expires_in: float | None,
        expires_at_ms: int | None,
        timeout: float | None,
        patient: Callable[[], object] | None = None,
    ) -> range:
        try:
            ids = self._store(values, expires_in, expires_at_ms, timeout, patient=patient)
            if self._sync_seconds == 0:
                self._wait_durable(ids[-1])
        except BaseException:
            self._after_interrupt()
            raise
        return ids

    def _after_interrupt(self) -> None:
        """A put was cut short, perhaps after it stored its item (R13): then that is there, for readers too."""
        feed = self._feed
        with self._lock:
            if self._sync_seconds != 0:
                feed.visible_id = self._journal.tail_id
            hidden = self._state is None and feed.visible_id < self._journal.tail_id
        if hidden:
            self._sync_soon()
        if feed.waiting:
            feed.wake()

    def _put_waiting(self, value: Any, timeout: float | None, check: Callable[[], object]) -> int:
        """``put`` that waits for room whatever the reader's policy, as long as ``check`` does not raise: for the
        blocking-queue face.
        """
        return self._put_slowly([value], None, None, timeout, check)[0]

    def _store(
        self,
        values: list[Any],
        expires_in: float | None,
        expires_at_ms: int | None,
        timeout: float | None,
        *,
        patient: Callable[[], object] | None = None,
    ) -> range:
        """Everything of a put but waiting for the disk. ``patient``: wait for room whatever the policy, until it
        raises.
        """
        check_timeout(timeout)
        items = encode_items(values, self._codec, self.max_item_bytes)
        deadline = None if timeout is None else SystemClock.monotonic() + timeout
        while True:
            self._discard_expired(items)
            try:
                with self._lock:
                    self._check_usable()
                    limited = self._readership.limited
                    refusing = next((reader for reader in limited if self._is_refused(reader, items)), None)
                    if refusing is None:
                        ids = self._append_locked(items, expires_in, expires_at_ms)
                        break
            except DurabilityUnknown as error:
                self._fail(error, told=True)
                raise
            self._await_room(refusing, items, deadline, patient)
        self._keep_limits()
        if self._feed.waiting:
            self._feed.wake()
        return ids

    def _keep_limits(self) -> None:
        """After items have become visible: let the readers that may drop their oldest ones do so. Called with no lock
        held.
        """
        for reader in self._readership.limited:
            if reader.config.full_policy is FullPolicy.DROP_OLDEST and isinstance(reader, Reader):
                reader._drop_oldest()

    def _discard_expired(self, items: list[bytes]) -> None:
        """Expired items do not count where these would be refused; their hooks run outside the lock."""
        for reader in self._readership.limited:
            if isinstance(reader, Reader) and self._is_refused(reader, items):
                reader.discard_expired(_NO_LIMIT)

    def _is_refused(self, reader: Limited, items: list[bytes]) -> bool:
        config = reader.config
        if config.full_policy is FullPolicy.DROP_OLDEST:
            return False
        if isinstance(reader, AbsentReader) and not self._fits(reader, items):
            reader.refresh()
        return not self._fits(reader, items)

    def _fits(self, reader: Limited, items: list[bytes]) -> bool:
        """Items are limited to the last one; bytes may be overshot by one put, as anything else would keep a large
        item out.
        """
        config, waiting = reader.config, len(self._feed.pending)
        return (config.max_items is None or reader.items + waiting + len(items) <= config.max_items) and (
            config.max_bytes is None or reader.bytes < config.max_bytes
        )

    def _append_locked(self, items: list[bytes], expires_in: float | None, expires_at_ms: int | None) -> range:
        added_ms = self._time_ns() // 1_000_000
        expires_ms = expiry(added_ms, expires_in, expires_at_ms)
        if len(items) == 1 and expires_ms is None:
            first_id = self._append(items[0], added_ms)
            ids = range(first_id, first_id + 1)
        else:
            ids = self._journal.append_frame(items, added_ms, expires_ms)
        entries: list[Entry] = [(data, added_ms, expires_ms) for data in items]
        if self._sync_seconds == 0:
            self._feed.hold_locked(ids[0], entries)
        else:
            self._feed.show_locked(ids[0], entries)
        if not self._sync_armed:
            self._arm_sync()
        return ids

    def _await_room(
        self, refusing: Limited, items: list[bytes], deadline: float | None, patient: Callable[[], object] | None
    ) -> None:
        """Wait until a reader may have room, or raise ``QueueFull``."""
        left = None if deadline is None else deadline - SystemClock.monotonic()
        waits = patient is not None or refusing.config.full_policy is FullPolicy.BLOCK
        if not waits or (left is not None and left <= 0):
            raise QueueFull(f"reader {refusing.full_name!r} is full", reader=refusing.full_name)
        waiter = ThreadWaiter()
        with self._lock:
            self._check_usable()
            self._room.add(waiter)
        try:
            if isinstance(refusing, Reader):
                refusing._quiet = False  # its next commit tells us
            if patient is not None:
                patient()
            if not self._is_refused(refusing, items):
                return  # registered, then looked again
            pending = bool(self._feed.pending)  # first: what is not pending then is seen by the next line
            seconds = refusing._expires_in() if isinstance(refusing, Reader) else None
            if seconds is not None:
                waiter.timer = self._clock.call_later(
                    seconds, lambda: self._look_for_room(waiter), on_lost=self._maintenance_lost
                )
            elif isinstance(refusing, AbsentReader) or pending:  # nobody tells us when it moves, or is seen to expire
                left = 0.05 if left is None else min(left, 0.05)
            if waiter.wait(left):
                waiter.result()
                if patient is not None:
                    patient()
        finally:
            waiter.stop_timer()
            with self._lock:
                self._room.remove(waiter)

    def _look_for_room(self, waiter: ThreadWaiter) -> None:
        """The head has expired, which is nobody's doing: a producer in line looks again."""
        with self._lock:
            left = self._room.remove(waiter)
        if left:
            waiter.give(None)

    def put_future(
        self,
        data: Any,
        *,
        expires_in: float | None = None,
        expires_at_ms: int | None = None,
        timeout: float | None = 0,
    ) -> Future[int]:
        """As ``put``, without waiting for the disk: the future completes with the id when the item is there under the
        sync policy.

        With ``sync="never"`` it is complete at once. Raises what ``put`` raises before anything is stored; the future
        fails with ``DurabilityUnknown``.
        """
        ticket = FutureWaiter()
        try:
            item_id = self._store([data], expires_in, expires_at_ms, timeout)[0]
            if self._sync_seconds is None:
                ticket.claim()
                ticket.give(item_id)
            else:
                self._commit.add(item_id, ticket, soon=self._sync_seconds == 0)
        except BaseException:
            self._after_interrupt()
            raise
        future: Future[int] = ticket.future
        return future

    async def aput(
        self,
        data: Any,
        *,
        expires_in: float | None = None,
        expires_at_ms: int | None = None,
        timeout: float | None = 0,
    ) -> int:
        """``put`` for asyncio: waits for room and for the disk without blocking the loop. The item stays put if it is
        cancelled.
        """
        import asyncio  # here and not above: who does not use it must not pay for it

        if timeout == 0:
            return await asyncio.wrap_future(self.put_future(data, expires_in=expires_in, expires_at_ms=expires_at_ms))
        return await asyncio.to_thread(
            self.put, data, expires_in=expires_in, expires_at_ms=expires_at_ms, timeout=timeout
        )

    # -- durability ----------------------------------------------------------------------------------------------

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
                        file.sync()
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
