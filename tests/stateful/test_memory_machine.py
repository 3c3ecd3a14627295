"""Random programs of calls against a model of a queue that is a list, step by step; each step ends with ``_check()``.

One thread plays everybody: futures and threads that wait are waiters that are looked at, tasks run on loops that are
told to run, and time is a ``ManualClock``. Whatever is out of order in such a program is not a matter of luck, and
shrinks.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kestrelpy._waiting.waiters import ThreadWaiter
from kestrelpy.config import FullPolicy
from kestrelpy.errors import QueueClosed, QueueEmpty, QueueFull
from kestrelpy.memory import ConcurrentBlockingQueue, SimpleBlockingQueue
from kestrelpy.memory._simple import Supplier as RealSupplier
from kestrelpy.memory._simple import SupplierLine
from kestrelpy.testing import ManualClock
from tests.support.budget import share

WAITING = "waiting"


@dataclass(eq=False)
class Consumer:
    """Somebody in line, or served, or failed; as the model knows it."""

    kind: str
    real: Any
    deadline: float | None = None
    outcome: Any = WAITING
    order: float = 0
    seen: bool = True
    """Has a task's loop run since its outcome?"""


@dataclass(eq=False)
class Supplier:
    """Somebody who waits for room with an item, or was let in, or failed."""

    kind: str
    real: Any
    item: int
    deadline: float | None = None
    outcome: Any = WAITING


@dataclass
class Model:
    """The queue as a list of (order, item): what came back has the order of its handing out, anything else has none."""

    maxsize: int
    policy: FullPolicy
    items: list[tuple[float | None, int]] = field(default_factory=list)
    line: list[Consumer] = field(default_factory=list)
    suppliers: list[Supplier] = field(default_factory=list)
    reserved: int = 0
    dropped: int = 0
    closed: bool = False
    discards: bool = False
    last_order: float = 0
    first_order: float = 0

    def has_room(self) -> bool:
        return self.maxsize <= 0 or len(self.items) + self.reserved < self.maxsize

    def settle(self) -> None:
        """Serve until nobody can be served."""
        while True:
            if self.line and self.items:
                order, item = self.items.pop(0)
                if order is None:
                    order = self.last_order = self.last_order + 1
                served = self.line.pop(0)
                served.outcome, served.order, served.seen = item, order, False
            elif self.suppliers and self.has_room():
                supplier = self.suppliers.pop(0)
                supplier.outcome = "let in"
                if supplier.kind == "task":
                    self.reserved += 1
                else:
                    self.items.append((None, supplier.item))
            else:
                return

    def give_back(self, consumer: Consumer) -> None:
        if not self.discards:
            at = 0
            while at < len(self.items):
                order = self.items[at][0]
                if order is None or order > consumer.order:
                    break
                at += 1
            self.items.insert(at, (consumer.order, consumer.outcome))
        self.settle()


class MemoryMachine(RuleBasedStateMachine):
    """``kind`` is the class under test."""

    kind: type[SimpleBlockingQueue[int]]

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.numbers = itertools.count()
        self.loop = asyncio.new_event_loop()
        self.consumers: list[Consumer] = []
        self.producers: list[Supplier] = []

    @initialize(maxsize=st.sampled_from([0, 0, 1, 2, 5]), policy=st.sampled_from(FullPolicy))
    def make(self, maxsize: int, policy: FullPolicy) -> None:
        self.q = self.kind(maxsize, full_policy=policy, clock=self.clock)
        self.model = Model(maxsize, policy)

    def teardown(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.run_the_loop()
        everybody: list[Consumer | Supplier] = [*self.consumers, *self.producers]
        for one in everybody:
            if one.kind == "task" and not one.real.cancelled():
                one.real.exception()  # asked for: nobody need be told of it
        self.loop.close()

    # -- putting -----------------------------------------------------------------------------------------------------

    @rule(way=st.sampled_from(["put", "put_nowait", "timeout", "aput"]))
    def put(self, way: str) -> None:
        """A put that does not wait."""
        item, model = next(self.numbers), self.model
        calls = {
            "put": lambda: self.q.put(item, block=False),
            "put_nowait": lambda: self.q.put_nowait(item),
            "timeout": lambda: self.q.put(item, timeout=0),
            "aput": lambda: self.loop.run_until_complete(self.q.aput(item, timeout=0)),
        }
        if way == "aput":
            self.tasks_run()
        if model.closed:
            with pytest.raises(QueueClosed):
                calls[way]()
        elif model.has_room() or model.policy is FullPolicy.DROP_OLDEST:
            calls[way]()
            while not model.has_room():
                model.items.pop(0)
                model.dropped += 1
            model.items.append((None, item))
            model.settle()
        else:
            with pytest.raises(QueueFull):
                calls[way]()

    @rule()
    def put_head(self) -> None:
        item, model = next(self.numbers), self.model
        if model.closed:
            with pytest.raises(QueueClosed):
                self.q.put_head(item)
            return
        self.q.put_head(item)
        order = None
        if model.items and model.items[0][0] is not None:
            order = model.first_order = model.first_order - 1
        model.items.insert(0, (order, item))
        model.settle()

    @precondition(lambda self: self.model.policy is FullPolicy.BLOCK and not self.model.closed)
    @precondition(lambda self: not self.model.has_room())
    @rule(seconds=st.none() | st.integers(1, 5), task=st.booleans())
    def put_and_wait(self, seconds: int | None, task: bool) -> None:
        item = next(self.numbers)
        if task:
            self.tasks_run()
            if self.model.has_room():
                return
            real: Any = self.loop.create_task(self.q.aput(item, timeout=seconds))
            self.run_the_loop()
            deadline = None if seconds is None else self.clock.monotonic() + seconds
        else:
            room = SupplierLine(self.q)
            real, deadline = RealSupplier(room, item), None
            room._enter(real)
        self.producers.append(Supplier("task" if task else "thread", real, item, deadline))
        self.model.suppliers.append(self.producers[-1])

    # -- taking ------------------------------------------------------------------------------------------------------

    def nothing(self) -> type[Exception]:
        return QueueClosed if self.model.closed else QueueEmpty

    @rule(way=st.sampled_from(["get", "get_nowait", "timeout", "get_if", "get_future", "aget"]))
    def get(self, way: str) -> None:
        """A get that does not wait."""
        model = self.model
        calls = {
            "get": lambda: self.q.get(block=False),
            "get_nowait": lambda: self.q.get_nowait(),
            "timeout": lambda: self.q.get(timeout=0),
            "get_if": lambda: self.q.get_if(lambda item: True),
            "get_future": lambda: self.q.get_future(timeout=0).result(0),
            "aget": lambda: self.loop.run_until_complete(self.q.aget(timeout=0)),
        }
        if way == "aget":
            self.tasks_run()
        if model.items:
            assert calls[way]() == model.items.pop(0)[1]
            model.settle()
        else:
            with pytest.raises(self.nothing()):
                calls[way]()

    @rule(remainder=st.integers(0, 1))
    def get_if(self, remainder: int) -> None:
        model = self.model
        if model.items and model.items[0][1] % 2 == remainder:
            assert self.q.get_if(lambda item: item % 2 == remainder) == model.items.pop(0)[1]
            model.settle()
        else:
            with pytest.raises(QueueEmpty if model.items else self.nothing()):
                self.q.get_if(lambda item: item % 2 == remainder)

    @rule()
    def peek(self) -> None:
        if self.model.items:
            assert self.q.peek() == self.model.items[0][1]
        else:
            with pytest.raises(self.nothing()):
                self.q.peek()

    @precondition(lambda self: not self.model.items and not self.model.closed)
    @rule(kind=st.sampled_from(["future", "thread", "task"]), seconds=st.none() | st.integers(1, 5))
    def wait(self, kind: str, seconds: int | None) -> None:
        """Somebody gets into line."""
        if kind == "task":
            self.tasks_run()
            if self.model.items:
                return
        deadline = None if seconds is None or kind == "thread" else self.clock.monotonic() + seconds
        if kind == "future":
            real: Any = self.q.get_future(timeout=seconds)
        elif kind == "thread":
            real = ThreadWaiter(self.q)
            self.q._enter(real)
        else:
            real = self.loop.create_task(self.q.aget(timeout=seconds))
            self.run_the_loop()
        self.consumers.append(Consumer(kind, real, deadline))
        self.model.line.append(self.consumers[-1])

    # -- leaving the line --------------------------------------------------------------------------------------------

    @precondition(lambda self: self.consumers)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """Cancel a future, or a task whose loop may not yet have told it of its item; interrupt a thread."""
        consumer = data.draw(st.sampled_from(self.consumers))
        self.consumers.remove(consumer)
        waits = consumer.outcome is WAITING
        if consumer.kind == "future":
            assert consumer.real.cancel() == waits
            if not waits:
                self.consumers.append(consumer)
                return
        elif consumer.kind == "thread":
            self.q._quit(consumer.real)
        elif consumer.seen and not waits:
            self.consumers.append(consumer)  # it has returned
            return
        else:
            consumer.real.cancel()
        if waits:
            self.model.line.remove(consumer)
        elif isinstance(consumer.outcome, int):
            self.model.give_back(consumer)
        if consumer.kind == "task":
            self.tasks_run()
            assert consumer.real.cancelled()

    @precondition(lambda self: self.producers)
    @rule(data=st.data())
    def give_up_putting(self, data: st.DataObject) -> None:
        supplier = data.draw(st.sampled_from(self.producers))
        if supplier.kind == "thread":
            left = SupplierLine(self.q)._leave(supplier.real)
            assert left == (supplier.outcome is WAITING)
            assert bool(supplier.real.parcel) == (supplier.outcome != "let in")
        elif supplier.outcome == "put":
            return
        else:
            supplier.real.cancel()
            was_let_in = supplier.outcome == "let in"
            supplier.outcome = "cancelled" if supplier.outcome in (WAITING, "let in") else supplier.outcome
            if was_let_in:
                self.model.reserved -= 1
        self.producers.remove(supplier)
        if supplier in self.model.suppliers:
            self.model.suppliers.remove(supplier)
        self.model.settle()  # its place may be the next one's, who is then let in as the loop goes on
        if supplier.kind == "task":
            self.tasks_run()

    @rule(seconds=st.integers(0, 3))
    def advance(self, seconds: int) -> None:
        self.clock.advance(seconds)
        now = self.clock.monotonic()
        for consumer in [one for one in self.model.line if one.deadline is not None and one.deadline <= now]:
            consumer.outcome, consumer.seen = QueueEmpty, False
            self.model.line.remove(consumer)
        for supplier in [one for one in self.model.suppliers if one.deadline is not None and one.deadline <= now]:
            supplier.outcome = QueueFull
            self.model.suppliers.remove(supplier)

    @rule()
    def evict(self) -> None:
        assert self.q.evict_waiters() == len(self.model.line)
        self.fail_the_line(QueueEmpty)

    def fail_the_line(self, error: type[Exception]) -> None:
        for consumer in self.model.line:
            consumer.outcome, consumer.seen = error, False
        self.model.line.clear()

    # -- the whole queue ---------------------------------------------------------------------------------------------

    @rule()
    def flush(self) -> None:
        assert self.q.flush() == len(self.model.items)
        self.model.items.clear()
        self.model.settle()

    @rule(maxsize=st.sampled_from([0, 1, 3]))
    def change_the_limit(self, maxsize: int) -> None:
        self.q.maxsize = self.model.maxsize = maxsize
        self.model.settle()

    @precondition(lambda self: len(self.consumers) + len(self.producers) > 2 or self.model.closed)
    @rule(immediate=st.booleans())
    def shutdown(self, immediate: bool) -> None:
        model = self.model
        self.q.shutdown(immediate)
        model.closed = True
        model.discards |= immediate
        if immediate:
            model.items.clear()
        self.fail_the_line(QueueClosed)
        for supplier in model.suppliers:
            supplier.outcome = QueueClosed
        model.suppliers.clear()

    @rule()
    def tasks_run(self) -> None:
        """The loop goes on: tasks learn of what became of them."""
        self.run_the_loop()
        while let_in := [each for each in self.producers if each.kind == "task" and each.outcome == "let in"]:
            for supplier in let_in:
                self.model.reserved -= 1
                if self.model.closed:
                    supplier.outcome = QueueClosed
                else:
                    supplier.outcome = "put"
                    self.model.items.append((None, supplier.item))
                self.model.settle()
        for consumer in self.consumers:
            consumer.seen = True

    def run_the_loop(self) -> None:
        for _ in range(20):  # as long as one task's end may be another's turn
            self.loop.run_until_complete(asyncio.sleep(0))

    # -- after each step ---------------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "q"):
            return
        model, q = self.model, self.q
        q._check()
        assert (q.qsize(), len(q), q.empty()) == (len(model.items), len(model.items), not model.items)
        assert q.full() == (not model.has_room())
        assert (q.maxsize, q.dropped_count, q.is_shutdown) == (model.maxsize, model.dropped, model.closed)
        assert (q.waiter_count, len(q._producers)) == (len(model.line), len(model.suppliers))
        waiting: list[Consumer | Supplier] = [*model.line, *model.suppliers]
        assert self.clock.timer_count == sum(one.deadline is not None for one in waiting)
        for consumer in self.consumers:
            assert outcome_of(consumer) == (consumer.outcome if consumer.seen or consumer.kind != "task" else WAITING)
        for supplier in self.producers:
            if supplier.kind == "thread":
                assert supplier.real._asleep.locked() == (supplier.outcome is WAITING)


def outcome_of(consumer: Consumer) -> Any:
    """What has become of it in truth."""
    real = consumer.real
    if consumer.kind == "thread":
        if real._asleep.locked():
            return WAITING
        return type(real._error) if real._error is not None else real._item
    if not real.done():
        return WAITING
    error = real.exception()
    return type(error) if error is not None else real.result()


class ConcurrentMachine(MemoryMachine):
    kind: type[SimpleBlockingQueue[int]] = ConcurrentBlockingQueue


class SimpleMachine(MemoryMachine):
    kind: type[SimpleBlockingQueue[int]] = SimpleBlockingQueue


SETTINGS = settings(max_examples=max(100, share(300)), stateful_step_count=40, deadline=None)
TestConcurrent = ConcurrentMachine.TestCase
TestConcurrent.settings = SETTINGS
TestSimple = SimpleMachine.TestCase
TestSimple.settings = SETTINGS
