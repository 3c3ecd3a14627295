"""``PutPath``: the slow path of a put into the journal. The fast path is ``JournaledQueue.put``.

NOTE ON LOCKING: ``source.lock`` (Q in docs/locking.md) guards the journal's appends and the window. Readers' locks come
after it. ``backpressure`` has its own rules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from kestrelpy._checks import check_timeout
from kestrelpy._journal.format import Entry
from kestrelpy._journal.growth import JournalFull
from kestrelpy._process import why_not_wait
from kestrelpy._reading.backlog import NO_LIMIT
from kestrelpy._reading.dispatch import Dispatcher
from kestrelpy._reading.hooks import in_hook
from kestrelpy._reading.limits import Limited, shown_limits
from kestrelpy._reading.local_source import LocalSource
from kestrelpy._reading.registry import ReaderRegistry
from kestrelpy._writing.backpressure import Producer, ProducerTask, ProducerThread, Room
from kestrelpy._writing.gate import Gate
from kestrelpy._writing.options import encode_items, expiry
from kestrelpy._writing.status import QueueStatus
from kestrelpy._writing.syncer import Syncer
from kestrelpy.config import Codec, FullPolicy
from kestrelpy.errors import DurabilityUnknown, ItemTooLarge, KestrelError, QueueDiskFull, QueueFull

if TYPE_CHECKING:
    from kestrelpy._waiting.put_future import PutFuture
    from kestrelpy._writing.disk_room import DiskRoom

LARGE_BATCH = 16
"""A batch of at least so many items stays one batch in the window. For fewer items, that would save nothing."""


LOOK_SECONDS = 0.05
"""How often a producer looks for room while a reader in another process refuses: that reader's commits ring nobody."""
HOOK_SECONDS = 1.0
"""How often a producer looks for room while a reader refuses whose ``on_expired`` hook has raised: the look calls the
hook again.
"""


class PutRequest(NamedTuple):
    """The items of one put, and their expiry."""

    items: list[bytes]
    expires_in: float | None
    expires_at_ms: int | None


def never_fits(reader: Limited, request: PutRequest) -> bool:
    """True if the reader would refuse the put even when empty. An empty reader takes any number of bytes."""
    config = reader.config
    return (config.max_items is not None and len(request.items) > config.max_items) or config.max_bytes == 0


def is_open_here(reader: Limited) -> bool:
    """True if the reader is open in this process, so that its progress is known without a look at the folder."""
    return isinstance(reader, Dispatcher) and reader.broken is None


def _no_batch() -> None:
    """The ``finish_batch`` of a queue without an inbox."""


class PutPath:
    """Stores the puts of one queue, on every path but the fast one."""

    _future_class: type[PutFuture[int]] | None = None

    def __init__(
        self,
        status: QueueStatus,
        syncer: Syncer,
        source: LocalSource,
        registry: ReaderRegistry,
        room: Room,
        codec: Codec | None,
        max_item_bytes: int,
        disk_room: DiskRoom,
    ) -> None:
        self.status = status
        self.syncer = syncer
        self.source = source
        self.registry = registry
        self.journal = source.journal
        self.clock = source.clock
        self.max_item_bytes = max_item_bytes
        self.finish_batch: Callable[[], object] = _no_batch
        """Finishes a batch of the inbox that is not completely ingested."""
        self._room = room
        self._disk_room = disk_room
        self._codec = codec
        self._append = self.journal.append
        self.refused = 0  # guarded by source.lock; read without it

    @property
    def waiting(self) -> int:
        """How many producers wait for room."""
        return len(self._room)

    def look_again(self) -> None:
        """Make every producer that waits for room look again."""
        self._room.ring_all()

    def fail(self, error: DurabilityUnknown, *, reported: bool) -> None:
        """Fail the queue after a failed sync. With no lock held."""
        self.syncer.fail(error, reported=reported)

    def note_durable(self, item_id: int) -> None:
        """Notify the waiters for durability: everything up to ``item_id`` is on disk."""
        self.syncer.commit.note(item_id)

    def put(
        self,
        values: list[Any],
        expires_in: float | None,
        expires_at_ms: int | None,
        timeout: float | None,
        patient: Callable[[], object] | None = None,
    ) -> range:
        try:
            ids = self._store(values, expires_in, expires_at_ms, timeout, patient=patient)
            if self.status.sync_seconds == 0:
                self.syncer.wait_acknowledged(ids[0], ids[-1])
        except BaseException as error:
            self.recover(error)
            raise
        return ids

    def recover(self, error: BaseException) -> None:
        """Repair after a put was cut short by ``error`` (R13): if its item was stored, readers get the item."""
        source = self.source
        with self.source.lock:
            if isinstance(error, QueueFull | QueueDiskFull):
                self.refused += 1
            if self.status.sync_seconds != 0:
                source.visible_id = min(self.journal.tail_id, source.limit_id)
            hidden = (
                not self.status.is_unfinished and self.status.error is None and source.visible_id < self.journal.tail_id
            )
        if hidden:
            self.syncer.sync_soon()
        if source.waiting:
            source.wake()

    def put_waiting(self, value: Any, timeout: float | None, check: Callable[[], object]) -> int:
        """``put`` for ``JournaledBlockingQueue``: waits for room whatever the reader's full policy is.

        The wait ends when ``check`` raises.
        """
        return self.put([value], None, None, timeout, check)[0]

    def _store(
        self,
        values: list[Any],
        expires_in: float | None,
        expires_at_ms: int | None,
        timeout: float | None,
        *,
        patient: Callable[[], object] | None = None,
    ) -> range:
        """Do all of a put except waiting for the disk.

        With ``patient``, wait for room whatever the full policy is, until ``patient`` raises.
        """
        if self.status.is_unfinished:
            self.finish_batch()
        plain = self._codec is None and not self.registry.limited and self.status.gate is None
        plain = plain and self.status.room_gate is None
        plain = plain and expires_in is None and expires_at_ms is None
        if plain and (timeout is None or timeout == 0) and len(values) == 1 and type(values[0]) is bytes:
            try:
                return self._store_plain(values[0])
            except JournalFull:  # there may be room all the same
                pass
        check_timeout(timeout)
        if timeout is None and in_hook():
            timeout = 0
        request = PutRequest(encode_items(values, self._codec, self.max_item_bytes), expires_in, expires_at_ms)
        answer = self._offer(request, timeout, patient)
        return answer if isinstance(answer, range) else self._wait_for_room(request, ProducerThread(timeout, patient))

    def _store_plain(self, data: bytes) -> range:
        """``_store`` for one item of ``bytes``, with no codec, limit or expiry: it needs journal and window only."""
        if len(data) > self.max_item_bytes:
            raise ItemTooLarge(len(data), self.max_item_bytes)
        source = self.source
        try:
            with self.source.lock:
                self.status.check_usable()
                # HOT COPY of PutPath._append_locked: with that, put_future would take a third longer.
                added_ms = self.clock.time_ns() // 1_000_000
                item_id = self._append(data, added_ms)
                if self.status.sync_seconds == 0:
                    source.pending.append((item_id, (data, added_ms, None)))
                else:
                    source.publish_locked(item_id, [(data, added_ms, None)], len(data))
                if not self.status.sync_armed:
                    self.syncer.arm()
        except DurabilityUnknown as error:
            self.syncer.fail(error, reported=True)
            raise
        if source.waiting:
            source.wake()
        return range(item_id, item_id + 1)

    # -- room --------------------------------------------------------------------------------------------------------

    def _offer(self, request: PutRequest, timeout: float | None, patient: Callable[[], object] | None) -> range | None:
        """Store the put if there is room and no earlier producer waits; else return ``None``, and the put must wait.

        A put that may not wait ignores the line: it takes the room that there is. Raises ``QueueFull``.
        """
        may_wait, was_told = timeout != 0 and bool(self._room), timeout is not None
        answer = self._admit(request, in_turn=not (may_wait and self._may_wait(patient is not None, was_told)))
        if isinstance(answer, range):
            return answer
        if answer is not None:
            self._check_worth_waiting(answer, request, timeout == 0, patient is not None, was_told)
        expiry(0, *request[1:])  # what would be refused in the end does not wait for that
        return None

    def _may_wait(self, is_patient: bool, was_told: bool) -> bool:
        gates = self.status.gate, self.status.room_gate, self._disk_room.gate if self._disk_room.may_refuse else None
        refusing = (*(gate for gate in gates if gate is not None), *self.registry.limited)
        return is_patient or any(_waits_for(each, was_told) for each in refusing)

    def _check_worth_waiting(
        self, refusing: Limited, request: PutRequest, is_late: bool, is_patient: bool, was_told: bool
    ) -> None:
        """Raise ``QueueFull`` for a put that may not wait (any longer), or would wait for ever."""
        may_wait = not is_late and (is_patient or _waits_for(refusing, was_told))
        if isinstance(refusing, Gate):
            if not may_wait:
                raise refusing.error()
            return
        name, limits = refusing.full_name, shown_limits(refusing.config)
        if never_fits(refusing, request):
            raise QueueFull(f"{len(request.items)} items at once never fit reader {name} ({limits})", reader=name)
        if not may_wait:
            late = "; no room within the timeout of the put" if refusing.config.full_policy is FullPolicy.BLOCK else ""
            raise QueueFull(f"reader {name} is full ({limits}){late}", reader=name)

    def _wait_for_room(self, request: PutRequest, producer: ProducerThread) -> range:
        """Wait in line on this thread, then store the put."""
        room = self._room
        try:
            try:
                while True:  # and no condition: docs/interrupts.md, rule 3
                    ids = self._look_for_room(request, producer)
                    if isinstance(ids, range):
                        break
                    producer.sleep(ids)
            finally:
                room.leave(producer)
        except BaseException:  # as in SimpleBlockingQueue: an interrupt as the ``finally`` began
            room.leave(producer)
            raise
        return ids

    def _look_for_room(self, request: PutRequest, producer: Producer) -> range | float | None:
        """Store the put if it is the producer's turn and there is room; returns its ids.

        Else returns after how many seconds the producer looks again (``None``: only when rung). Raises ``QueueFull``.
        """
        producer.stop_timer()
        producer.overdue = False
        self.status.check_usable()
        if producer.check is not None:
            producer.check()
        self._room.enter(producer)
        ending = why_not_wait()
        if ending is not None:
            raise ending
        is_late = producer.is_late()
        if not (is_late or self._room.is_first(producer)):
            return None
        while True:
            watched = producer.watched
            if isinstance(watched, Dispatcher):
                watched.backlog.may_skip_notify = False  # the reader's next commit rings the line
            answer = self._admit(request, in_turn=True, producer=producer)
            if answer is None or isinstance(answer, range):
                return answer
            self._check_worth_waiting(answer, request, is_late, producer.check is not None, producer.was_told)
            if answer is watched:
                return self._recheck_after(answer, producer)
            producer.watched = answer

    def _recheck_after(self, refusing: Limited, producer: Producer) -> float | None:
        """After how many seconds ``producer`` looks again by itself; ``None`` if somebody will ring for certain."""
        pending = bool(self.source.pending)  # before expires_in(), which counts the items that are no longer pending
        if not isinstance(refusing, Dispatcher) or not is_open_here(refusing):
            return LOOK_SECONDS  # nobody rings when that reader moves
        seconds = refusing.expires_in()
        if seconds is not None:
            try:
                producer.timer = self.clock.call_later(seconds, producer.ring, on_lost=self.syncer.lose_thread)
            except RuntimeError:  # no thread can be started
                return LOOK_SECONDS
        elif pending:
            return LOOK_SECONDS
        return HOOK_SECONDS if refusing.hooks.failed else None

    def _admit(self, request: PutRequest, *, in_turn: bool, producer: Producer | None = None) -> range | Limited | None:
        """Store the put if there is room and it is its turn; returns its ids.

        Returns ``None`` if there is room but it is not its turn, else the reader that refuses. ``producer``: the
        producer in line that puts, if any.
        """
        if self.status.is_unfinished:
            self.finish_batch()
        answer = self._append_if_room(request, in_turn)
        if not isinstance(answer, range) and answer is not None:
            self._discard_expired(request)
            answer = self._append_or_find_room(request, in_turn)
        if not (isinstance(answer, range) or answer is None or is_open_here(answer)):
            self.registry.refresh_limits()  # read that reader's state on disk again before it refuses a put
            answer = self._append_or_find_room(request, in_turn)
        if isinstance(answer, range):
            if producer is not None:
                self._room.leave(producer)  # before any callback: a callback may put, and would wait in line after it
            self.registry.keep_limits()
            if self.source.waiting:
                self.source.wake()
        return answer

    def _append_or_find_room(self, request: PutRequest, in_turn: bool) -> range | Limited | None:
        """``_append_if_room``, and once more after a look for room on the disk, if that is what refuses."""
        answer = self._append_if_room(request, in_turn)
        if isinstance(answer, Gate) and answer is not self.status.gate:
            self._disk_room.find_room()
            answer = self._append_if_room(request, in_turn)
        return answer

    def _append_if_room(self, request: PutRequest, in_turn: bool) -> range | Limited | None:
        try:
            with self.source.lock:
                self.status.check_usable()
                refusing = self._who_refuses(request)
                if refusing is None and in_turn:
                    return self._append_locked(*request)
        except DurabilityUnknown as error:
            self.syncer.fail(error, reported=True)
            raise
        except JournalFull as error:
            refusing = self._disk_room.refusal(error)
        return refusing

    def _who_refuses(self, request: PutRequest) -> Limited | None:
        """A reader that has no room for the put, or ``None``. A reader whose policy is not ``BLOCK`` comes first."""
        refusing: Limited | None = self.status.gate or self.status.room_gate
        for reader in self.registry.limited:
            if self._is_refused(reader, request):
                if reader.config.full_policy is not FullPolicy.BLOCK:
                    return reader
                refusing = refusing or reader
        return refusing

    def _discard_expired(self, request: PutRequest) -> None:
        """Discard the expired items of readers that refuse the put. The items' hooks run outside the lock.

        Where discarding fails, expired items still count against the limits.
        """
        for reader in self.registry.limited:
            if isinstance(reader, Dispatcher) and self._is_refused(reader, request):
                with contextlib.suppress(KestrelError, OSError):
                    reader.discard_expired(NO_LIMIT)

    def _is_refused(self, reader: Limited, request: PutRequest) -> bool:
        if reader.config.full_policy is FullPolicy.DROP_OLDEST:
            return False
        items = request.items
        count = len(items)
        if count == 1 or reader.config.max_bytes is None:
            return not self.fits(reader, count)
        return not self.fits(reader, count, sum(map(len, items)) - len(items[-1]))

    def fits(self, reader: Limited, count: int, before_last: int = 0) -> bool:
        """True if the reader has room for ``count`` items. ``before_last``: the bytes of all these items but the last.

        ``max_items`` is a hard limit. ``max_bytes`` may be exceeded by one item, or a large item would never get in. A
        reader without items takes a batch of any size.
        """
        config, source = reader.config, self.source
        items, size = reader.counted()
        if config.max_items is not None and items + len(source.pending) + count > config.max_items:
            return False
        if config.max_bytes is None:
            return True
        size += self.journal.total_bytes - source.visible_bytes
        return size + before_last < config.max_bytes or size <= 0 < config.max_bytes

    def has_room(self, size: int) -> bool:
        """True if the journal may grow by so many bytes, and no reader is too far behind. Called with the queue's lock
        held.
        """
        return self.status.room_gate is None and self.journal.growth.has_room(self.journal, size)

    def find_room(self) -> None:
        """After ``has_room`` was false: make room, as far as it can be made. With no lock held."""
        self._disk_room.find_room()

    def _append_locked(self, items: list[bytes], expires_in: float | None, expires_at_ms: int | None) -> range:
        added_ms = self.clock.time_ns() // 1_000_000
        expires_ms = expiry(added_ms, expires_in, expires_at_ms)
        journal = self.journal
        before = journal.total_bytes
        if len(items) == 1 and expires_ms is None:
            first_id = self._append(items[0], added_ms)
            ids = range(first_id, first_id + 1)
        else:
            ids = journal.append_frame(items, added_ms, expires_ms)
        if self.status.sync_seconds != 0 and expires_ms is None and len(items) >= LARGE_BATCH:
            self.source.show_batch_locked(ids[0], items, added_ms, journal.total_bytes - before)
        else:
            entries: list[Entry] = [(data, added_ms, expires_ms) for data in items]
            if self.status.sync_seconds == 0:
                self.source.hold_locked(ids[0], entries)
            else:
                self.source.publish_locked(ids[0], entries, journal.total_bytes - before)
        if not self.status.sync_armed:
            self.syncer.arm()
        return ids

    def put_future(
        self, data: Any, expires_in: float | None, expires_at_ms: int | None, timeout: float | None
    ) -> PutFuture[int]:
        """``JournaledQueue.put_future``."""
        future = (self._future_class or self._import_future_class())()
        try:
            self._future_when_durable(future, self._store([data], expires_in, expires_at_ms, timeout)[0])
        except BaseException as error:
            self.recover(error)
            raise
        return future

    def _future_of(self, item_id: int) -> PutFuture[int]:
        """The future of an item that is already stored."""
        future = (self._future_class or self._import_future_class())()
        try:
            self._future_when_durable(future, item_id)
        except BaseException as error:
            self.recover(error)
            raise
        return future

    def future_of_all(self) -> PutFuture[int]:
        """A future that completes when everything put so far is as safe as ``sync="always"`` makes it, in each mode."""
        future = (self._future_class or self._import_future_class())()
        self.syncer.acks.add(self.journal.tail_id, future, soon=True)
        return future

    def _future_when_durable(self, future: PutFuture[int], item_id: int) -> None:
        """Complete ``future`` with the id of a stored item once the item is as durable as ``sync`` asks for."""
        if self.status.sync_seconds is None:
            future.give(item_id)
        else:
            self.syncer.acks.add(item_id, future, soon=self.status.sync_seconds == 0)

    def _import_future_class(self) -> type[PutFuture[int]]:
        from kestrelpy._waiting.put_future import (
            PutFuture,  # imported here: a program that does not use it must not pay for it
        )

        PutPath._future_class = PutFuture
        return PutFuture

    async def aput(self, data: Any, expires_in: float | None, expires_at_ms: int | None, timeout: float | None) -> int:
        """``JournaledQueue.aput``."""
        import asyncio  # imported here: a program that does not use it must not pay for it

        check_timeout(timeout)
        if timeout == 0 or not self._may_be_full():
            try:
                return await asyncio.wrap_future(self.put_future(data, expires_in, expires_at_ms, 0))
            except QueueFull:  # it has stored nothing
                if timeout == 0:
                    raise
        item_id = await self._store_in_task(data, expires_in, expires_at_ms, timeout)
        return await asyncio.wrap_future(self._future_of(item_id))

    def _may_be_full(self) -> bool:
        status = self.status
        return bool(self.registry.limited or status.gate or status.room_gate or self._disk_room.may_refuse)

    async def aput_waiting(self, value: Any, timeout: float | None, check: Callable[[], object]) -> None:
        """``put_waiting`` for asyncio."""
        import asyncio

        item_id = await self._store_in_task(value, None, None, timeout, check)
        if self.status.sync_seconds == 0:
            await asyncio.wrap_future(self._future_of(item_id))

    async def _store_in_task(
        self,
        value: Any,
        expires_in: float | None,
        expires_at_ms: int | None,
        timeout: float | None,
        patient: Callable[[], object] | None = None,
    ) -> int:
        """``_store`` for asyncio. The callers have checked the timeout."""
        import asyncio

        try:
            request = PutRequest(encode_items([value], self._codec, self.max_item_bytes), expires_in, expires_at_ms)
            ids = self._offer(request, timeout, patient)
        except BaseException as error:
            self.recover(error)
            raise
        if ids is None:
            producer = ProducerTask(asyncio.get_running_loop(), self.clock, timeout, patient)
            ids = await self._wait_in_task(request, producer)
        return ids[0]

    async def _wait_in_task(self, request: PutRequest, producer: ProducerTask) -> range:
        """``_wait_for_room`` for asyncio.

        An exception from outside (a cancelled or garbage-collected task) strikes while the task sleeps, when nothing is
        stored. So such an end takes no lock.
        """
        try:
            producer.start(self.syncer.lose_thread)
            while True:
                try:
                    ids = self._look_for_room(request, producer)
                except BaseException as error:
                    self.recover(error)
                    raise
                if isinstance(ids, range):
                    return ids
                await producer.sleep(ids)
        finally:
            self._room.leave(producer)


def _waits_for(refusing: Limited, was_told: bool) -> bool:
    """Whether a put waits for room there; ``was_told``: it says for how long."""
    if refusing.config.full_policy is FullPolicy.BLOCK:
        return True
    return was_told and isinstance(refusing, Gate) and refusing.waits_if_told
