"""A KeyboardInterrupt at every place of a memory queue's calls: nothing is lost, doubled or left hanging.

What an interrupted get had in its hands is the caller's loss, as with any function; nobody else's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kestrelpy._waiting.waiters import TaskWaiter, ThreadWaiter
from kestrelpy.errors import QueueClosed, QueueEmpty
from kestrelpy.memory import ConcurrentBlockingQueue, SimpleBlockingQueue
from kestrelpy.memory._simple import Supplier, SupplierLine
from tests.interrupts import strikes
from tests.interrupts.strikes import Interrupter, interrupter_at

Q = SimpleBlockingQueue[Any]


def every_place(at_least: int) -> Iterator[Interrupter]:
    """An interrupter for every place; the loop goes on while it struck."""
    for at in range(1, 10_000):
        striker = interrupter_at(at)
        yield striker
        if striker.places < at:
            assert at > at_least, "the tracer sees nothing"
            return
    pytest.fail("there is no end")


def drain(q: Q) -> list[Any]:
    found = []
    while q:
        found.append(q.get_nowait())
    return found


def is_free(q: Q) -> bool:
    """Nobody has the lock: not this thread either, which could take it again and again."""
    return "count=0" in repr(q._lock)


@pytest.fixture(params=[SimpleBlockingQueue, ConcurrentBlockingQueue], ids=["simple", "concurrent"])
def kind(request: pytest.FixtureRequest) -> type[Q]:
    found: type[Q] = request.param
    return found


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.mark.parametrize("maxsize", [0, 5])
@pytest.mark.parametrize("put", ["put", "put_head"])
def test_put_with_futures_in_line(kind: type[Q], maxsize: int, put: str) -> None:
    for interrupter in every_place(5):
        q = kind(maxsize)
        first, cancelled, second = (q.get_future() for _ in range(3))
        leave, q._leave = q._leave, lambda waiter: False  # type: ignore[method-assign]
        cancelled.cancel()  # and it has not left the line yet
        q._leave = leave  # type: ignore[method-assign]
        struck = interrupter.run(functools.partial(getattr(q, put), "a"))
        assert is_free(q)
        q._check()
        assert first.done() or (struck and q.waiter_count >= 2)
        q.put("b")
        q.put("c")
        found = [future.result(0) for future in (first, second)]
        assert found + drain(q) in (["a", "b", "c"], ["b", "c"])
        assert found[0] == "a" or struck


@pytest.mark.parametrize("maxsize", [0, 5])
def test_put_with_a_thread_and_a_task_in_line(kind: type[Q], maxsize: int, loop: asyncio.AbstractEventLoop) -> None:
    for interrupter in every_place(5):
        q = kind(maxsize)
        thread, task = ThreadWaiter(q), TaskWaiter(loop, q)
        q._enter(thread)
        q._enter(task)

        def put_two(q: Q = q) -> None:
            q.put("a")
            q.put("b")

        struck = interrupter.run(put_two)
        loop.run_until_complete(asyncio.sleep(0))
        assert is_free(q)
        q._check()
        assert struck or q.waiter_count == 0
        q.put("c")
        q.put("d")
        loop.run_until_complete(asyncio.sleep(0))
        assert thread.wait(0)
        assert task.future.done()
        found = "".join([thread.result(), task.result(), *drain(q)])
        assert found in (("abcd", "acd", "bcd", "cd") if struck else ("abcd",))


def test_a_get_that_makes_room(kind: type[Q]) -> None:
    for interrupter in every_place(5):
        q = kind(1)
        q.put("a")
        room = SupplierLine(q)
        producers = [Supplier(room, item) for item in "bc"]
        for producer in producers:
            room._enter(producer)
        struck = interrupter.run(q.get)
        assert is_free(q)
        if struck and q.peek() == "a":
            assert [producer.wait(0) for producer in producers] == [False, False]
            q.get()
        q._check()
        assert [producer.wait(0) for producer in producers] == [True, False], interrupter.where
        assert (q.get(), q.get(), producers[1].wait(0), len(q)) == ("b", "c", True, 0)


@pytest.mark.parametrize("arrives", ["before it enters", "before it waits"])
def test_a_get_that_waits(kind: type[Q], arrives: str) -> None:
    """What was on its way to an interrupted get is there again."""
    for interrupter in every_place(5):
        q = kind()
        put: list[str] = []

        def deliver(q: Q = q, put: list[str] = put, interrupter: Interrupter = interrupter) -> None:
            with interrupter.paused():
                q.put("a")
                put.append("a")

        class Waiter(ThreadWaiter):
            def wait(self, timeout: float | None, deliver: Callable[[], None] = deliver) -> bool:
                if arrives == "before it waits":
                    deliver()
                return super().wait(timeout)

        enter = q._enter

        def put_and_enter(
            waiter: Any, enter: Callable[[Any], None] = enter, deliver: Callable[[], None] = deliver
        ) -> None:
            if arrives == "before it enters":
                deliver()
            enter(waiter)

        q._enter = put_and_enter  # type: ignore[method-assign]
        taken: list[str] = []
        waiter = Waiter(q)

        def take(q: Q = q, taken: list[str] = taken, waiter: Waiter = waiter) -> None:
            taken.append(q._wait(None, waiter=waiter))

        interrupter.run(take)
        assert is_free(q)
        assert q.waiter_count == 0
        q._check()
        assert taken + drain(q) == put


def test_evicting_and_closing(kind: type[Q]) -> None:
    for call in ("evict_waiters", "close"):
        for interrupter in every_place(5):
            q = kind()
            futures = [q.get_future() for _ in range(3)]
            interrupter.run(getattr(q, call))
            assert is_free(q)
            getattr(q, call)()
            for future in futures:
                assert future.done(), interrupter.where
                assert isinstance(future.exception(0), QueueEmpty | QueueClosed)
            q._check()


@pytest.mark.parametrize("call", ["put", "evict_waiters", "close"])
@pytest.mark.parametrize("handler", ["cancel", "put", "evict_waiters"])
def test_a_handler_in_the_middle_of_a_claim(
    kind: type[Q], call: str, handler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also in the middle of a call of ``Future``. It says nothing of a state that it did not expect."""
    monkeypatch.setattr(strikes, "HELPERS", (*strikes.HELPERS, "/concurrent/futures/_base.py", "/threading.py"))
    for interrupter in every_place(5):
        q = kind()
        futures = [q.get_future() for _ in range(3)]

        def handle(q: Q = q, future: Any = futures[0]) -> None:
            with contextlib.suppress(QueueClosed):
                future.cancel() if handler == "cancel" else q.put("b") if handler == "put" else q.evict_waiters()

        interrupter.handler = handle
        interrupter.run(functools.partial(getattr(q, call), *(("a",) if call == "put" else ())))
        assert not caplog.records, interrupter.where
        assert is_free(q)
        q._check()
        q.close()
        assert all(future.done() for future in futures), interrupter.where


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers here")
def test_real_signals(kind: type[Q]) -> None:
    """Interrupts at places that no list of ours foresees: by a timer, at random.

    An exception that a signal raises in a callback of the collector (hypothesis has one) is lost: it does not run here.
    An interrupt that is lost in a queue comes again, so that the test comes to its end, and is counted.
    """
    choose = random.Random(20)
    numbers = itertools.count()
    handed_over = strikes = 0

    def interrupt(*_: object) -> None:
        nonlocal strikes
        strikes += 1
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()
    try:
        for _ in range(1500):
            q = kind()
            futures = [q.get_future() for _ in range(20)]
            first = next(numbers)
            try:
                signal.setitimer(signal.ITIMER_REAL, choose.uniform(0.000_01, 0.000_3), 5.0)
                while True:
                    q.put(next(numbers))
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert is_free(q)
            q._check()
            served = [future.result(0) for future in futures if future.done()]
            found = served + drain(q)
            last = next(numbers) - 1
            handed_over += 0 < len(served) < 20
            assert found in (list(range(first + 1, last + 1)), list(range(first + 1, last)))
            q.close()
            assert all(future.done() for future in futures)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert handed_over > 0
    assert strikes == 1500
