"""Putting: the writing half of a ``JournaledQueue``, from a put to the journal.

NOTE ON LOCKING: ``_lock`` (Q in docs/locking.md) guards the journal's appends, the feed and ``_room``. Readers' locks
come after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from zlib import crc32

from kestrelpy._durability import Durability
from kestrelpy._format import FRAME_BYTES, Entry, pack_crc, pack_frame
from kestrelpy._line import ThreadWaiter, check_timeout
from kestrelpy._options import encode_items, expiry
from kestrelpy._readership import AbsentReader, Limited
from kestrelpy._segment import ITEM_COST
from kestrelpy.clock import SystemClock
from kestrelpy.config import Codec, FullPolicy
from kestrelpy.errors import DurabilityUnknown, ItemTooLarge, QueueFull
from kestrelpy.reader import Reader

if TYPE_CHECKING:
    from concurrent.futures import Future

    from kestrelpy._inflow import Inflow, Watch
    from kestrelpy._promise import Promise

_NO_LIMIT = 1 << 62
LARGE_BATCH = 16
"""A batch of so many items stays together in the window: a reader makes the entries of a smaller one no cheaper."""


class Writing(Durability):
    """What puts need; ``JournaledQueue`` sets it up."""

    max_item_bytes: int
    _codec: Codec | None
    _time_ns: Callable[[], int]
    _append: Callable[[bytes, int], int]
    _promise: type[Promise[int]] | None = None
    _inflow: Inflow | None = None
    _watch: Watch | None = None
    _unfinished = False  # a batch of the inbox is not taken in to its end

    def _choose_path(self) -> None:
        """Whether a put may take the short way: nothing but journal and window to see to."""
        self._plain = (
            self._state is None
            and self._codec is None
            and self._sync_seconds != 0
            and not self._readership.limited
            and not self._unfinished
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
                feed.visible_id = min(self._journal.tail_id, feed.limit_id)
            hidden = not self._unfinished and self._state is None and feed.visible_id < self._journal.tail_id
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
        if self._unfinished and self._inflow is not None:
            self._inflow.finish()
        plain = self._codec is None and not self._readership.limited and expires_in is None and expires_at_ms is None
        if plain and timeout == 0 and len(values) == 1 and type(values[0]) is bytes:
            return self._store_plain(values[0])
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

    def _store_plain(self, data: bytes) -> range:
        """``_store`` where there is nothing but journal and feed to see to. ``_append_locked`` is written out for one
        item: with it ``put_future`` would take a third longer.
        """
        if len(data) > self.max_item_bytes:
            raise ItemTooLarge(len(data), self.max_item_bytes)
        feed = self._feed
        try:
            with self._lock:
                self._check_usable()
                added_ms = self._clock.time_ns() // 1_000_000
                item_id = self._append(data, added_ms)
                if self._sync_seconds == 0:
                    feed.pending.append((item_id, (data, added_ms, None)))
                else:
                    feed.show_locked(item_id, [(data, added_ms, None)], len(data))
                if not self._sync_armed:
                    self._arm_sync()
        except DurabilityUnknown as error:
            self._fail(error, told=True)
            raise
        if feed.waiting:
            feed.wake()
        return range(item_id, item_id + 1)

    def _discard_expired(self, items: list[bytes]) -> None:
        """Expired items do not count where these would be refused; their hooks run outside the lock."""
        for reader in self._readership.limited:
            if isinstance(reader, Reader) and self._is_refused(reader, items):
                reader.discard_expired(_NO_LIMIT)

    def _is_refused(self, reader: Limited, items: list[bytes]) -> bool:
        config = reader.config
        if config.full_policy is FullPolicy.DROP_OLDEST:
            return False
        if isinstance(reader, AbsentReader) and not self._fits(reader, len(items)):
            reader.refresh()
        return not self._fits(reader, len(items))

    def _fits(self, reader: Limited, count: int) -> bool:
        """Items are limited to the last one; bytes may be overshot by one put, as anything else would keep a large
        item out.
        """
        config, waiting = reader.config, len(self._feed.pending)
        return (config.max_items is None or reader.items + waiting + count <= config.max_items) and (
            config.max_bytes is None or reader.bytes < config.max_bytes
        )

    def _append_locked(self, items: list[bytes], expires_in: float | None, expires_at_ms: int | None) -> range:
        added_ms = self._time_ns() // 1_000_000
        expires_ms = expiry(added_ms, expires_in, expires_at_ms)
        journal = self._journal
        before = journal.total_bytes
        if len(items) == 1 and expires_ms is None:
            first_id = self._append(items[0], added_ms)
            ids = range(first_id, first_id + 1)
        else:
            ids = journal.append_frame(items, added_ms, expires_ms)
        if self._sync_seconds != 0 and expires_ms is None and len(items) >= LARGE_BATCH:
            self._feed.show_batch_locked(ids[0], items, added_ms, journal.total_bytes - before)
        else:
            entries: list[Entry] = [(data, added_ms, expires_ms) for data in items]
            if self._sync_seconds == 0:
                self._feed.hold_locked(ids[0], entries)
            else:
                self._feed.show_locked(ids[0], entries, journal.total_bytes - before)
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
        promise = (self._promise or self._import_promise())()
        try:
            item_id = self._store([data], expires_in, expires_at_ms, timeout)[0]
            if self._sync_seconds is None:
                promise.give(item_id)
            else:
                self._commit.add(item_id, promise, soon=self._sync_seconds == 0)
        except BaseException:
            self._after_interrupt()
            raise
        return promise

    def _import_promise(self) -> type[Promise[int]]:
        from kestrelpy._promise import Promise  # here and not above: who does not use it must not pay for it

        Writing._promise = Promise
        return Promise

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
