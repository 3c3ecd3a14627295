"""One reader against a plain model: any order of calls, with expiry, limits and reopenings; ``_check()`` after each."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kestrelpy import FullPolicy, Item, JournaledQueue, QueueEmpty, QueueFull, ReaderConfig, UnknownItem
from kestrelpy.testing import ManualClock, MemoryDisk
from tests.support.budget import share
from tests.support.queues import Sync

pytestmark = pytest.mark.usefixtures("small_batches")

SIZES = st.sampled_from([0, 1, 7, 100, 700, 2500])
LIFETIMES = st.sampled_from([None, None, None, 0.0, 0.5, 3.0, 60.0])


@dataclass
class Model:
    """Every id is in one place: unread (from ``next_id`` on), returned, open, or done."""

    items: dict[int, tuple[bytes, int | None]] = field(default_factory=dict)
    next_id: int = 1
    returned: set[int] = field(default_factory=set)
    opened: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    errors: dict[int, int | None] = field(default_factory=dict)
    """How often an id was aborted; ``None`` if that is not said (a flush keeps counts or not)."""

    @property
    def tail_id(self) -> int:
        return len(self.items)

    @property
    def head(self) -> int:
        head = 0
        while head + 1 in self.done:
            head += 1
        return head

    def left(self) -> set[int]:
        return self.items.keys() - self.done

    def front(self) -> int | None:
        if self.returned:
            return min(self.returned)
        return next((key for key in range(self.next_id, self.tail_id + 1) if key not in self.done), None)

    def pop(self, item_id: int) -> None:
        if item_id in self.returned:
            self.returned.remove(item_id)
        else:
            self.next_id = item_id + 1

    def finish(self, item_id: int) -> None:
        self.done.add(item_id)
        self.errors.pop(item_id, None)

    def is_expired(self, item_id: int, now_ms: int) -> bool:
        expires_ms = self.items[item_id][1]
        return expires_ms is not None and expires_ms <= now_ms

    def take(self, now_ms: int) -> int | None:
        while (item_id := self.front()) is not None:
            self.pop(item_id)
            if not self.is_expired(item_id, now_ms):
                return item_id
            self.finish(item_id)
        return None

    def discard_expired(self, now_ms: int, limit: int | None = None) -> int:
        count = 0
        while limit is None or count < limit:
            item_id = self.front()
            if item_id is None or not self.is_expired(item_id, now_ms):
                break
            self.pop(item_id)
            self.finish(item_id)
            count += 1
        return count

    def restart(self) -> None:
        """Open reads and aborted items come again, in the order of their ids."""
        self.returned.clear()
        self.opened.clear()
        self.next_id = 1


class ReaderMachine(RuleBasedStateMachine):
    """What is drawn first: where the queue is, how much a reader keeps in memory, and its limit."""

    @initialize(
        journaled=st.booleans(),
        memory_bytes=st.sampled_from([1, 2000, 1 << 20]),
        max_items=st.sampled_from([None, None, 1, 4]),
        policy=st.sampled_from([FullPolicy.REFUSE, FullPolicy.DROP_OLDEST]),
        sync=st.sampled_from(["always", 0.1, "never"]),
    )
    def set_up(self, journaled: bool, memory_bytes: int, max_items: int | None, policy: FullPolicy, sync: Sync) -> None:
        self.disk = MemoryDisk()
        self.journaled = journaled
        self.sync = sync
        self.config = ReaderConfig(memory_bytes=memory_bytes, max_items=max_items, full_policy=policy)
        self.clock = ManualClock(1_000)
        self.model = Model()
        self.open()

    def open(self) -> None:
        self.queue = JournaledQueue(
            "/data",
            "jobs",
            sync=self.sync,
            segment_bytes=4096,
            readers={"r": self.config},
            journaled=self.journaled,
            clock=self.clock,
            disk=self.disk,
        )
        self.reader = self.queue.reader("r", start="earliest")
        self.items: dict[int, Item] = {}

    @property
    def now_ms(self) -> int:
        return self.clock.time_ns() // 1_000_000

    # -- writing -----------------------------------------------------------------------------------------------------

    @rule(sizes=st.lists(SIZES, min_size=1, max_size=4), lifetime=LIFETIMES)
    def put(self, sizes: list[int], lifetime: float | None) -> None:
        model = self.model
        items = [bytes([len(model.items) % 251]) * size for size in sizes]
        limit = self.config.max_items if self.config.full_policy is FullPolicy.REFUSE else None
        if limit is not None and len(model.left()) + len(items) > limit:
            model.discard_expired(self.now_ms)
        full = limit is not None and len(model.left()) + len(items) > limit
        try:
            if len(items) == 1:
                first_id = self.queue.put(items[0], expires_in=lifetime)
            else:
                first_id = self.queue.put_many(items, expires_in=lifetime)[0]
        except QueueFull:
            assert full
            return
        assert not full
        assert first_id == model.tail_id + 1
        expires_ms = None if lifetime is None else self.now_ms + int(lifetime * 1000)
        for item_id, data in enumerate(items, first_id):
            model.items[item_id] = (data, expires_ms)
        self.drop_oldest()

    def drop_oldest(self) -> None:
        """After a put, and when the reader is opened. After a seek back it is not said when: so there is none here."""
        model, limit = self.model, self.config.max_items
        if limit is not None and self.config.full_policy is FullPolicy.DROP_OLDEST:
            while len(model.left()) > limit and (item_id := model.front()) is not None:
                model.pop(item_id)
                model.finish(item_id)

    # -- reading -----------------------------------------------------------------------------------------------------

    def compare(self, item: Item, item_id: int) -> None:
        data, expires_ms = self.model.items[item_id]
        assert (item.id, item.data, item.expires_ms) == (item_id, data, expires_ms)
        errors = self.model.errors.get(item_id, 0)
        assert errors is None or item.error_count == errors

    @rule(count=st.integers(1, 5), by_bytes=st.booleans())
    def get_many(self, count: int, by_bytes: bool) -> None:
        model, max_bytes = self.model, 800 if by_bytes else None
        expected: list[int] = []
        size = 0
        while len(expected) < count and (max_bytes is None or size <= max_bytes):
            item_id = model.take(self.now_ms)
            if item_id is None:
                break
            size += len(model.items[item_id][0])
            if expected and max_bytes is not None and size > max_bytes:
                model.returned.add(item_id)
                break
            expected.append(item_id)
        try:
            items = self.reader.get_many(count, max_bytes=max_bytes, timeout=0)
        except QueueEmpty:
            items = []
        assert [item.id for item in items] == expected
        for item in items:
            self.compare(item, item.id)
            self.items[item.id] = item
        model.opened.update(expected)

    @rule()
    def get(self) -> None:
        item_id = self.model.take(self.now_ms)
        try:
            item = self.reader.get_nowait()
        except QueueEmpty:
            assert item_id is None
            return
        assert item_id is not None
        self.compare(item, item_id)
        self.items[item_id] = item
        self.model.opened.add(item_id)

    @rule()
    def peek(self) -> None:
        item_id = self.model.take(self.now_ms)
        try:
            item = self.reader.peek()
        except QueueEmpty:
            assert item_id is None
            return
        assert item_id is not None
        self.compare(item, item_id)
        self.model.returned.add(item_id)

    def choose(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.items)))

    @precondition(lambda self: self.items)
    @rule(data=st.data(), by_id=st.booleans())
    def commit(self, data: st.DataObject, by_id: bool) -> None:
        item = self.items.pop(self.choose(data))
        self.reader.commit(item.id if by_id else item)
        self.model.opened.remove(item.id)
        self.model.finish(item.id)
        with contextlib.suppress(UnknownItem):
            self.reader.commit(item)
            raise AssertionError("an item was committed twice")

    @precondition(lambda self: self.items)
    @rule()
    def commit_all(self) -> None:
        self.reader.commit_many(self.items.values())
        for item_id in self.items:
            self.model.opened.remove(item_id)
            self.model.finish(item_id)
        self.items = {}

    @precondition(lambda self: self.items)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        item = self.items.pop(self.choose(data))
        item.abort()
        self.model.opened.remove(item.id)
        self.model.returned.add(item.id)
        errors = self.model.errors.get(item.id, 0)
        self.model.errors[item.id] = None if errors is None else errors + 1

    # -- moving ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.config.full_policy is FullPolicy.REFUSE or self.config.max_items is None)
    @rule(data=st.data())
    def seek(self, data: st.DataObject) -> None:
        model = self.model
        target = data.draw(st.integers(1, model.tail_id + 2))
        self.reader.seek(target)
        head = self.reader.head
        assert head + 1 >= min(target, model.tail_id + 1)
        assert head < target or set(range(target, head + 1)) <= model.done  # they are retired, so each was done
        model.restart()
        model.done = set(range(1, head + 1))
        model.errors = {item_id: count for item_id, count in model.errors.items() if item_id > head}
        model.next_id = head + 1
        self.items = {}

    @rule()
    def flush(self) -> None:
        model = self.model
        dropped = model.left() - model.opened
        assert self.reader.flush() == len(dropped)
        for item_id in dropped:
            model.done.add(item_id)
            model.errors[item_id] = None
        model.returned.clear()
        model.next_id = model.tail_id + 1

    @rule(limit=st.sampled_from([None, 0, 1, 2]))
    def discard_expired(self, limit: int | None) -> None:
        assert self.reader.discard_expired(limit) == self.model.discard_expired(self.now_ms, limit)

    # -- time and ends -----------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 0.4, 1.1, 100.0]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(durable=st.booleans())
    def checkpoint(self, durable: bool) -> None:
        self.queue.checkpoint(durable)

    @precondition(lambda self: self.journaled)
    @rule()
    def reopen(self) -> None:
        self.queue.close()
        self.model.restart()
        self.open()
        self.drop_oldest()

    @invariant()
    def the_figures_agree(self) -> None:
        if not hasattr(self, "queue"):
            return
        model, reader = self.model, self.reader
        left = model.left()
        assert reader.items == len(left)
        assert reader.bytes == sum(len(model.items[item_id][0]) for item_id in left)
        assert reader.head == model.head
        assert reader.open_items == len(model.opened)
        self.queue._check()

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            try:
                while (item_id := self.model.take(self.now_ms)) is not None:
                    self.compare(self.reader.get_nowait(), item_id)
            finally:
                self.queue.close()


TestReader = ReaderMachine.TestCase
TestReader.settings = settings(
    max_examples=max(100, share(400)),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
