"""``ServedQueue``: one queue as clients see it, its own or a fan-out. Its items, its line, its open reads, its figures.

A queue reads from a ``SharedJournal`` with a reader of its own. A fan-out to which something was put directly has a
second queue on disk for that, its side queue; its items are both together, by the time of adding.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Protocol

from kestrelpy import FullPolicy, JournaledQueue, QueueClosed, QueueEmpty, Reader, ReaderConfig, UnknownItem

if TYPE_CHECKING:
    from kestrelpy import Clock, Item, ReaderStats
    from kestrelpy.clock import Timer
    from kestrelpy.server.kestrel.config import QueueConfig

__all__ = ["InLine", "OpenRead", "Reads", "ServedQueue"]

LOST_SECONDS = 60.0
"""How often the log may say that expired items of a queue are dropped, for want of room in ``expire_to_queue``."""

EXPIRED_A_SLICE = 500
"""How many expired items are dropped before clients are served."""

_logger = logging.getLogger("kestrelpy.server")


class InLine(Protocol):
    """A consumer that waits in a queue's line."""

    @property
    def peeks(self) -> bool:
        """Whether it only looks at the item."""

    def is_ready(self) -> bool:
        """Whether an item may be given to it now."""

    def take(self, item: Item) -> None:
        """This item is for this consumer: it leaves the line, or goes to the end of it."""

    def end(self) -> None:
        """There will be no more: the queue is deleted, or the server ends."""

    def fail(self, error: Exception) -> None:
        """The next item can't be read."""


class QueueJournal(Protocol):
    """The part of its ``SharedJournal`` that a queue uses."""

    queue: JournaledQueue | None
    puts: int
    waiting: dict[ServedQueue, None]


class QueueStorage(Protocol):
    """The part of ``Storage`` that a queue uses."""

    synced_each_turn: set[JournaledQueue]

    def note_ack(self, journal: JournaledQueue, reader: str, item_id: int) -> None:
        """An item of that reader is done."""


class QueueHost(Protocol):
    """The part of ``Queues`` that a queue uses."""

    clock: Clock
    is_ending: bool
    numbered: dict[int, OpenRead]

    @property
    def storage(self) -> QueueStorage:
        """Where acknowledgements are noted."""

    def move(self, name: bytes, data: bytes) -> bool:
        """Put an item that another queue gave up."""

    def wake(self, queue: ServedQueue) -> None:
        """Items have come."""

    def wake_later(self, queue: ServedQueue) -> None:
        """As ``wake``, in the next turn."""

    def count_hit(self) -> None:
        """A get has found an item."""

    def count_miss(self) -> None:
        """A get has found none."""


class OpenRead:
    """An item that is open. ``number``: the id that thrift's clients use; 0 for the other protocols."""

    __slots__ = ("item", "number", "queue", "reads", "timer")

    def __init__(self, queue: ServedQueue, reads: Reads, item: Item, number: int = 0) -> None:
        self.queue = queue
        self.reads = reads
        self.item = item
        self.number = number
        self.timer: Timer | None = None

    def stop_timer(self) -> None:
        timer, self.timer = self.timer, None
        if timer is not None:
            timer.cancel()


class Reads:
    """The open reads of one client, by queue, the oldest first."""

    __slots__ = ("_by_queue",)

    def __init__(self) -> None:
        self._by_queue: dict[ServedQueue, dict[OpenRead, None]] = {}

    def add(self, read: OpenRead) -> None:
        self._by_queue.setdefault(read.queue, {})[read] = None

    def remove(self, read: OpenRead) -> None:
        """Forget the read. No effect if it is forgotten already."""
        reads = self._by_queue.get(read.queue)
        if reads is not None:
            reads.pop(read, None)
            if not reads:
                del self._by_queue[read.queue]

    def count(self, queue: ServedQueue) -> int:
        reads = self._by_queue.get(queue)
        return len(reads) if reads else 0

    def oldest(self, queue: ServedQueue, count: int = 1) -> list[OpenRead]:
        """The oldest reads of this queue, at most ``count``."""
        return [read for read, _ in zip(self._by_queue.get(queue, ()), range(count), strict=False)]

    def all(self) -> list[OpenRead]:
        return [read for reads in self._by_queue.values() for read in reads]

    def __bool__(self) -> bool:
        return bool(self._by_queue)


class ServedQueue:
    """A queue. ``reader`` is ``None`` as long as the queue has had no item, or is only for its fan-outs."""

    def __init__(self, name: bytes, config: QueueConfig, journal: QueueJournal, queues: QueueHost) -> None:
        self.name = name
        self.parent = name.partition(b"+")[0]
        self.config = config
        self.journal = journal
        self.queues = queues
        self.reader: Reader | None = None
        self.side: JournaledQueue | None = None
        self._side_reader: Reader | None = None
        self.line: dict[InLine, None] = {}
        self.reads: dict[OpenRead, None] = {}
        self.made_at = queues.clock.monotonic()
        self.made_ms = queues.clock.time_ns() // 1_000_000
        self.puts_before = journal.puts  # of what the journal got, how much came before this queue
        self.side_puts = 0
        self.transactions = 0
        self.canceled = 0
        self.flushes = 0
        self.expired_lost = 0
        self._discarded_before = 0  # what the reader had counted as discarded when the server began
        self._lost_logged_at = float("-inf")

    def _check(self) -> None:
        assert all(read.queue is self for read in self.reads)
        assert (self in self.journal.waiting) == bool(self.line)
        assert len(self.reads) <= sum(reader.open_items for reader in self.readers())

    # -- its readers ---------------------------------------------------------------------------------------------------

    def readers(self) -> list[Reader]:
        return [reader for reader in (self.reader, self._side_reader) if reader is not None]

    def start_counting(self) -> None:
        """The server begins: what readers have discarded so far is not this queue's."""
        self._discarded_before = sum(reader.stats().discarded for reader in self.readers())

    def set_side(self, side: JournaledQueue | None) -> None:
        """The side queue was opened, or is gone."""
        self.side = side
        self._side_reader = None if side is None else side.reader()

    def reader_config(self, *, is_side: bool = False) -> ReaderConfig:
        """The limits and hooks of the queue's reader, or of its side queue's."""
        config = self.config
        error_queue = config.error_to_queue or config.many_errors_to_queue
        is_limited = self.side is None  # with a side queue, both together are limited: see has_room
        return ReaderConfig(
            max_items=(config.max_items or None) if is_limited else None,  # 0: see has_room
            max_bytes=config.max_size if is_limited else None,
            counts_open=False,
            max_age=config.max_age,
            full_policy=FullPolicy.DROP_OLDEST if config.discard_old_when_full else FullPolicy.REFUSE,
            on_expired=partial(self._move_expired, is_side) if config.expire_to_queue else None,
            on_abort=partial(self._move_aborted, is_side) if error_queue else None,
            memory_bytes=config.max_memory_size,
        )

    def configure(self, config: QueueConfig) -> None:
        """The configuration has changed."""
        old, self.config = self.config, config
        for reader in self.readers():
            reader.configure(self.reader_config(is_side=reader is self._side_reader))
        if old.open_transaction_timeout != config.open_transaction_timeout:
            for read in self.reads:
                if not read.number:
                    self._start_timer(read, config.open_transaction_timeout)

    def _move_expired(self, is_side: bool, item: Item) -> None:
        target = self.config.expire_to_queue
        if target is not None and self.queues.move(target, item.data):
            self._note_ack(item, is_side=is_side)
            return
        self.expired_lost += 1
        now = self.queues.clock.monotonic()
        if now - self._lost_logged_at >= LOST_SECONDS:
            self._lost_logged_at = now
            _logger.warning(
                "%r has no room: expired items of %r are dropped (%d)", target, self.name, self.expired_lost
            )

    def _move_aborted(self, is_side: bool, item: Item) -> bool:
        config = self.config
        target = config.error_to_queue
        if config.many_errors_to_queue is not None and item.error_count >= config.many_errors_count:
            target = config.many_errors_to_queue
        if target is None or not self.queues.move(target, item.data):
            return False
        self._note_ack(item, is_side=is_side)
        return True

    # -- room, for a queue with a side queue ---------------------------------------------------------------------------

    @property
    def items(self) -> int:
        """Items that wait."""
        return sum(reader.items - reader.open_items for reader in self.readers())

    @property
    def bytes(self) -> int:
        """Bytes of the items that wait."""
        return sum(reader.bytes - reader.open_bytes for reader in self.readers())

    def has_room(self) -> bool:
        """Whether one more item may be put, by the limits of both readers together."""
        config = self.config
        if config.discard_old_when_full:
            return True
        return not (
            (config.max_items is not None and self.items >= config.max_items)
            or (config.max_size is not None and self.bytes >= config.max_size)
        )

    def keep_limits(self) -> None:
        """Drop the oldest items, as ``discard_old_when_full`` says, by the limits of both readers together."""
        config = self.config
        if not config.discard_old_when_full:
            return
        while (config.max_items is not None and self.items > config.max_items) or (
            config.max_size is not None and self.bytes > config.max_size and self.items > 1
        ):
            reader, first = self._first()
            if reader is None or first is None:
                break
            reader.discard([first.id])
            self._note_ack(first, is_side=reader is self._side_reader)

    # -- items ---------------------------------------------------------------------------------------------------------

    def take(self) -> Item | None:
        """Open a read of the next item; ``None`` if there is none. Raises ``OSError``, ``CorruptJournal``."""
        reader = self.reader if self._side_reader is None else self._first()[0]
        if reader is None:
            return None
        try:
            return reader.get(False)
        except QueueEmpty:
            return None

    def peek(self) -> Item | None:
        """The next item, which stays; ``None`` if there is none."""
        return self._first()[1]

    def _first(self) -> tuple[Reader | None, Item | None]:
        """The next item, and the reader that has it: of two readers, the one whose next item was added first."""
        first_reader, first = None, None
        for reader in self.readers():
            try:
                item = reader.peek()
            except QueueEmpty:
                continue
            if first is None or item.added_ms < first.added_ms:
                first_reader, first = reader, item
        return first_reader, first

    def open_read(self, reads: Reads, item: Item, number: int = 0, seconds: float | None = None) -> OpenRead:
        """The item is open for this client, until it is confirmed or its time is over.

        ``seconds``: the client's own time, if that is sooner than ``open_transaction_timeout``.
        """
        read = OpenRead(self, reads, item, number)
        self.reads[read] = None
        reads.add(read)
        self.transactions += 1
        limit = self.config.open_transaction_timeout
        if seconds is not None:
            limit = seconds if limit is None else min(limit, seconds)
        if limit is not None:
            self._start_timer(read, limit)
        return read

    def _start_timer(self, read: OpenRead, seconds: float | None) -> None:
        read.stop_timer()
        if seconds is not None:
            read.timer = self.queues.clock.call_later(seconds, partial(self._run_out, read))

    def _run_out(self, read: OpenRead) -> None:
        self.take_back(read)

    def confirm(self, read: OpenRead) -> None:
        """The client is done with the item."""
        self.forget(read)
        is_side = self._is_of_side(read.item)
        read.item.commit()
        self._note_ack(read.item, is_side=is_side)

    def note_done(self, item: Item) -> None:
        """Note for the log of acknowledgements that the item's work is done. It is still open, and committed next."""
        self._note_ack(item, is_side=self._is_of_side(item))

    def _is_of_side(self, item: Item) -> bool:
        side = self._side_reader
        return side is not None and side.is_open(item)

    def _note_ack(self, item: Item, *, is_side: bool) -> None:
        journal, reader = (self.side, self._side_reader) if is_side else (self.journal.queue, self.reader)
        if journal is not None and reader is not None:
            self.queues.storage.note_ack(journal, reader.name, item.id)

    def take_back(self, read: OpenRead) -> None:
        """The item comes back, ahead of the unread ones: it was aborted, or its client is gone, or its time is over."""
        if read not in self.reads or self.queues.is_ending:
            return
        self.forget(read)
        self.canceled += 1
        read.item.abort()
        self.queues.wake(self)

    def give_back(self, item: Item) -> None:
        """An item that no client has seen comes back."""
        with contextlib.suppress(QueueClosed, UnknownItem):  # the queue was deleted meanwhile
            item.abort(counts=False)
            self.queues.wake(self)

    def forget(self, read: OpenRead) -> None:
        """The read is over, in whatever way."""
        read.stop_timer()
        self.reads.pop(read, None)
        read.reads.remove(read)
        self.queues.numbered.pop(read.number, None)

    def flush(self) -> None:
        """Drop what waits."""
        self.flushes += 1
        for reader, journal in ((self.reader, self.journal.queue), (self._side_reader, self.side)):
            if reader is not None:
                reader.flush()
                if journal in self.queues.storage.synced_each_turn:
                    reader.checkpoint(durable=True)

    def flush_expired(self) -> Iterator[int]:
        """Drop expired items from the front, at most ``max_expire_sweep`` of them, and none that comes meanwhile.

        Yields how many, in slices that take no longer than a client's turn.
        """
        most = self.config.max_expire_sweep
        for reader in self.readers():
            left = reader.items - reader.open_items
            if most is not None:
                left = min(left, most)
            while left > 0 and reader in self.readers():
                wanted = min(left, EXPIRED_A_SLICE)
                dropped = reader.discard_expired(wanted)
                left -= wanted
                if most is not None:
                    most -= dropped
                yield dropped
                if dropped < wanted:
                    break

    # -- the line ------------------------------------------------------------------------------------------------------

    def enter(self, consumer: InLine) -> None:
        self.line[consumer] = None
        self.journal.waiting[self] = None

    def leave(self, consumer: InLine) -> None:
        if self.line.pop(consumer, self) is None and not self.line:
            self.journal.waiting.pop(self, None)

    def serve(self) -> None:
        """Give items to those in line, in order of arrival, as long as there are items."""
        while True:
            consumer = next((one for one in self.line if one.is_ready()), None)
            if consumer is None:
                return
            try:
                item = self.peek() if consumer.peeks else self.take()
            except Exception as error:
                consumer.fail(error)
                continue
            if item is None:
                return
            consumer.take(item)

    def dismiss_all(self) -> None:
        """All in line get nothing: the queue is deleted, or the server ends."""
        for consumer in list(self.line):
            consumer.end()

    # -- figures -------------------------------------------------------------------------------------------------------

    @property
    def total_items(self) -> int:
        return self.journal.puts - self.puts_before + self.side_puts

    def stats(self) -> list[ReaderStats]:
        return [reader.stats() for reader in self.readers()]

    @property
    def discarded(self) -> int:
        return sum(reader.stats().discarded for reader in self.readers()) - self._discarded_before

    @property
    def age_ms(self) -> int:
        return max((int(reader.age * 1000) for reader in self.readers()), default=0)
