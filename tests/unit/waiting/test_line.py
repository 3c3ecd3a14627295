"""The waiting line and those who wait in it, one by one. How queues use them is in test_memory.py."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from kestrelpy import ConcurrentBlockingQueue, JournaledQueue, SimpleBlockingQueue
from kestrelpy._checks import check_timeout
from kestrelpy._waiting import deferred
from kestrelpy._waiting.line import Line, Waiting, fail_all
from kestrelpy._waiting.waiters import FutureWaiter, TaskWaiter, ThreadWaiter, Waiter
from kestrelpy.clock import Timer
from kestrelpy.errors import QueueClosed, QueueEmpty
from kestrelpy.memory._simple import SupplierLine
from kestrelpy.testing import ManualClock, MemoryDisk
from tests.support.patience import until


class Counter(Waiting[Any]):
    """The least that can be waited for: a queue without a lock, for one thread."""

    def __init__(self, clock: Any = None) -> None:
        self._clock = ManualClock() if clock is None else clock
        self._line = Line()
        self.items: deque[Any] = deque()
        self.returned: list[tuple[Waiter, Any]] = []
        self.missed: list[Waiter] = []
        self.closed = False

    def _take_now(self) -> Any:
        if self.items and not self._line:
            return self.items.popleft()
        raise QueueEmpty

    def _enter(self, waiter: Waiter) -> None:
        if self.closed:
            raise QueueClosed
        self._line.add(waiter)

    def _leave(self, waiter: Waiter) -> bool:
        return self._line.remove(waiter)

    def _give_back(self, waiter: Waiter, item: Any) -> None:
        self.returned.append((waiter, item))

    def _missed(self, waiter: Waiter) -> None:
        self.missed.append(waiter)

    def serve(self, item: Any) -> None:
        waiter = self._line.first()
        assert waiter is not None
        waiter.give(item)


def in_a_loop(main: Callable[[], Any]) -> None:
    async def run() -> None:
        await main()

    asyncio.run(run())


# -- timeouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [None, 0, 0.0, 1, 1.5, float("inf"), True])
def test_timeouts(timeout: float | None) -> None:
    check_timeout(timeout)


@pytest.mark.parametrize("timeout", [-1, -1e-9, float("nan"), float("-inf")])
def test_negative_timeouts(timeout: float) -> None:
    with pytest.raises(ValueError, match="non-negative"):
        check_timeout(timeout)


def test_timeouts_that_are_no_numbers() -> None:
    with pytest.raises(TypeError):
        check_timeout("soon")  # type: ignore[arg-type]


# -- the line --------------------------------------------------------------------------------------------------------


def test_a_line_is_in_order_of_arrival() -> None:
    line, waiters = Line(), [ThreadWaiter() for _ in range(4)]
    assert (len(line), bool(line), line.head(), line.first()) == (0, False, None, None)
    for waiter in waiters:
        line.add(waiter)
    assert (len(line), bool(line), line.head()) == (4, True, waiters[0])
    assert line.remove(waiters[1])
    assert not line.remove(waiters[1])
    assert [line.first(), line.first(), line.first(), line.first()] == [waiters[0], waiters[2], waiters[3], None]


def test_first_passes_over_those_who_want_nothing_any_more() -> None:
    line, waiters = Line(), [FutureWaiter() for _ in range(4)]
    for waiter in waiters:
        line.add(waiter)
    waiters[0].future.cancel()
    waiters[1].future.cancel()
    assert line.first() is waiters[2]
    waiters[3].future.cancel()
    assert (line.first(), len(line)) == (None, 0)


def test_drain_takes_out_everybody_who_still_waits() -> None:
    line, waiters = Line(), [FutureWaiter() for _ in range(3)]
    for waiter in waiters:
        line.add(waiter)
    waiters[1].future.cancel()
    assert (line.drain(), len(line)) == ([waiters[0], waiters[2]], 0)


def test_one_that_leaves_while_it_is_claimed() -> None:
    """A finaliser may run anywhere, and take a waiter out of its line."""
    line, next_in_line = Line(), ThreadWaiter()

    class Leaving(FutureWaiter):
        def claim_now(self) -> bool | None:
            assert line.remove(self)
            return True

    line.add(Leaving())
    line.add(next_in_line)
    assert line.first() is next_in_line


def test_an_interrupt_in_a_claim_leaves_the_waiter_in_line() -> None:
    line = Line()

    class Interrupted(FutureWaiter):
        def claim_now(self) -> bool | None:
            super().claim_now()
            raise KeyboardInterrupt

    waiter = Interrupted()
    line.add(waiter)
    with pytest.raises(KeyboardInterrupt):
        line.first()
    assert line.head() is waiter
    Interrupted.claim_now = FutureWaiter.claim_now  # type: ignore[method-assign]
    assert line.first() is waiter


def test_fail_all_fails_each_with_its_own_error_in_order() -> None:
    found: list[int] = []
    made = [FutureWaiter() for _ in range(3)]
    waiters: list[Waiter] = [*made]
    futures = [waiter.future for waiter in made]
    for number, future in enumerate(futures):

        def note(_: object, number: int = number) -> None:
            found.append(number)

        future.add_done_callback(note)
    fail_all(waiters, QueueEmpty)
    assert found == [0, 1, 2]
    assert len({id(future.exception()) for future in futures}) == 3
    assert waiters == []


def test_fail_all_goes_on_after_an_interrupt() -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    made = [FutureWaiter() for _ in range(3)]
    waiters: list[Waiter] = [*made]
    futures = [waiter.future for waiter in made]
    futures[0].add_done_callback(interrupt)
    with pytest.raises(KeyboardInterrupt):
        fail_all(waiters, QueueEmpty)
    assert all(isinstance(future.exception(0), QueueEmpty) for future in futures)


# -- those who wait --------------------------------------------------------------------------------------------------


def test_a_thread_is_given_its_item() -> None:
    waiter = ThreadWaiter()
    assert not waiter.wait(0)
    waiter.give(None)
    assert waiter.wait(None)
    assert waiter.result() is None


def test_a_thread_is_failed() -> None:
    waiter = ThreadWaiter()
    waiter.fail(QueueEmpty("evicted"))
    assert waiter.wait(None)
    with pytest.raises(QueueEmpty, match="evicted"):
        waiter.result()


def test_a_thread_that_failed_is_freed_at_once() -> None:
    gc.disable()
    try:
        waiter = ThreadWaiter()
        waiter.fail(QueueEmpty())
        reference = weakref.ref(waiter)
        try:
            waiter.result()
        except QueueEmpty:
            del waiter
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("timeout", [float("inf"), threading.TIMEOUT_MAX * 2])
def test_a_thread_may_wait_longer_than_the_platform_can(timeout: float) -> None:
    waiter = ThreadWaiter()
    waiter.give(1)
    assert waiter.wait(timeout)


def test_giving_twice_does_nothing_the_second_time() -> None:
    """A thread that was interrupted in ``give`` does it once more, not knowing how far it got."""
    owner = Counter()
    asleep, awake = ThreadWaiter(owner), ThreadWaiter(owner)
    for waiter in (asleep, awake):
        waiter.give(1)
    assert awake.wait(None)
    assert awake.result() == 1
    for waiter in (asleep, awake):
        waiter.give(1)
    assert (asleep.wait(0), asleep.result()) == (True, 1)
    future = FutureWaiter()
    assert [future.claim(), future.claim()] == [True, True]
    future.give(1)
    future.give(1)
    future.fail(QueueEmpty())
    assert future.future.result(0) == 1
    assert owner.returned == []


def test_failing_twice_does_nothing_the_second_time() -> None:
    future = FutureWaiter()
    assert future.claim()
    for _ in range(2):
        future.fail(QueueEmpty())
    assert isinstance(future.future.exception(0), QueueEmpty)


@pytest.mark.parametrize("given_first", [False, True])
def test_what_an_abandoned_thread_is_given_goes_back_once(given_first: bool) -> None:
    owner = Counter()
    waiter = ThreadWaiter(owner)
    for step in ("give", "abandon") if given_first else ("abandon", "give"):
        waiter.give("item") if step == "give" else waiter.abandon()
    waiter.give("item")
    waiter.abandon()
    assert owner.returned == [(waiter, "item")]


def test_an_abandoned_thread_that_fails_gives_nothing_back() -> None:
    owner = Counter()
    waiter = ThreadWaiter(owner)
    waiter.fail(QueueEmpty())
    waiter.abandon()
    assert owner.returned == []


def test_a_cancelled_future_cannot_be_claimed_and_says_so() -> None:
    waiter = FutureWaiter()
    waiter.future.cancel()
    assert not waiter.claim()
    assert concurrent.futures.wait([waiter.future], timeout=30).done == {waiter.future}


def test_completing_stops_the_timer() -> None:
    async def main() -> None:
        clock = ManualClock()
        for step in ("give", "fail"):
            for waiter in (FutureWaiter(), TaskWaiter(asyncio.get_running_loop(), Counter())):
                waiter.timer = clock.call_later(1, pytest.fail)
                waiter.give(1) if step == "give" else waiter.fail(QueueEmpty())
                assert clock.timer_count == 0

    in_a_loop(main)


def test_a_task_is_woken_by_its_loop_from_another_thread() -> None:
    async def main() -> None:
        waiter = TaskWaiter(asyncio.get_running_loop(), Counter())
        await asyncio.to_thread(waiter.give, 1)
        await asyncio.wait_for(waiter.future, 30)
        assert waiter.result() == 1

    in_a_loop(main)


def test_what_the_task_of_a_closed_loop_is_given_goes_back_once() -> None:
    owner, loop = Counter(), asyncio.new_event_loop()
    waiter = TaskWaiter(loop, owner)
    assert waiter.claim()
    loop.close()
    assert not waiter.claim()
    waiter.give(1)  # the loop was closed between the claim and this
    waiter.give(1)
    waiter.abandon()
    waiter.fail(QueueEmpty())
    assert owner.returned == [(waiter, 1)]


# -- waiting ---------------------------------------------------------------------------------------------------------


def test_an_interrupted_thread_leaves_the_line() -> None:
    source = Counter()

    class Interrupted(ThreadWaiter):
        def wait(self, timeout: float | None) -> bool:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        source._wait(None, waiter=Interrupted(source))
    assert (len(source._line), source.returned, source.missed) == (0, [], [])


@pytest.mark.parametrize("arrives", ["before", "after"])
def test_an_interrupted_thread_that_was_claimed_passes_its_item_on(arrives: str) -> None:
    source = Counter()
    claimed = []

    class Interrupted(ThreadWaiter):
        def wait(self, timeout: float | None) -> bool:
            claimed.append(source._line.first())
            if arrives == "before":
                self.give("item")
            raise KeyboardInterrupt

    waiter = Interrupted(source)
    with pytest.raises(KeyboardInterrupt):
        source._wait(None, waiter=waiter)
    if arrives == "after":
        assert source.returned == []
        waiter.give("item")
    assert claimed == [waiter]
    assert source.returned == [(waiter, "item")]


def test_a_refused_thread_does_not_linger() -> None:
    source = Counter()
    source.closed = True
    with pytest.raises(QueueClosed):
        source._wait(None)
    with pytest.raises(QueueClosed):
        source.get_future(timeout=1)
    assert source._clock.timer_count == 0  # type: ignore[attr-defined]


def test_a_thread_that_waits_in_vain_is_counted() -> None:
    source = Counter()
    with pytest.raises(QueueEmpty, match=r"0\.001 s"):
        source._wait(0.001)
    assert (len(source.missed), len(source._line)) == (1, 0)


def test_a_deadline_that_passes_at_once_is_not_lost() -> None:
    """The machine's clock may run a timer before the call that set it has returned."""

    class Hasty(ManualClock):
        def call_later(self, seconds: float, callback: Any, **options: Any) -> Timer:
            callback()
            return super().call_later(seconds, callback, **options)

    source = Counter(Hasty())
    future = source.get_future(timeout=1e-9)
    assert isinstance(future.exception(0), QueueEmpty)
    assert (len(source._line), len(source.missed), source._clock.timer_count) == (0, 1, 0)  # type: ignore[attr-defined]


def test_an_item_that_comes_before_the_timer_is_known() -> None:
    class Serving(ManualClock):
        def call_later(self, seconds: float, callback: Any, **options: Any) -> Timer:
            source.serve("item")
            return super().call_later(seconds, callback, **options)

    clock = Serving()
    source = Counter(clock)
    assert source.get_future(timeout=5).result(0) == "item"
    assert clock.timer_count == 0


@pytest.mark.parametrize("served", [False, True])
def test_a_timer_that_cannot_be_set(served: bool) -> None:
    class Broken(ManualClock):
        def call_later(self, seconds: float, callback: Any, **options: Any) -> Timer:
            if served:
                source.serve("item")
            raise MemoryError

    source = Counter(Broken())
    if served:
        assert source.get_future(timeout=5).result(0) == "item"
    else:
        with pytest.raises(MemoryError):
            source.get_future(timeout=5)
    assert len(source._line) == 0


def test_a_maintenance_thread_that_dies_wakes_the_waiters() -> None:
    """Rule R30: what was to end the wait will not come."""
    lost: list[Callable[[BaseException], object]] = []

    class Dying(ManualClock):
        def call_later(self, seconds: float, callback: Any, *, on_lost: Any = None) -> Timer:
            lost.append(on_lost)
            return super().call_later(seconds, callback)

    source = Counter(Dying())
    future, served = source.get_future(timeout=5), source.get_future(timeout=5)
    error = SystemExit()
    lost[0](error)
    assert repr(error) in str(future.exception(0)), "not the error itself: that would end the thread that waits"
    source.serve("item")
    lost[1](error)
    assert served.result(0) == "item"


def test_a_cancelled_future_leaves_and_is_let_go() -> None:
    gc.disable()
    try:
        source = Counter()
        future = source.get_future(timeout=5)
        assert future.cancel()
        assert (len(source._line), source._clock.timer_count) == (0, 0)  # type: ignore[attr-defined]
        assert concurrent.futures.wait([future], timeout=30).done == {future}
        reference = weakref.ref(future)
        del future
        assert reference() is None
    finally:
        gc.enable()


def test_a_task_that_is_cancelled_before_its_item_was_given() -> None:
    async def main() -> None:
        source = Counter()
        task = asyncio.create_task(source.aget(timeout=5))
        await asyncio.sleep(0)
        waiter = source._line.first()
        assert waiter is not None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (task.cancelled(), source.returned) == (True, [])
        waiter.give("item")
        await asyncio.sleep(0)
        assert source.returned == [(waiter, "item")]
        assert source._clock.timer_count == 0  # type: ignore[attr-defined]

    in_a_loop(main)


def test_a_task_that_is_cancelled_after_its_item_arrived() -> None:
    async def main() -> None:
        source = Counter()
        task = asyncio.create_task(source.aget())
        await asyncio.sleep(0)
        waiter = source._line.head()
        source.serve("item")
        await asyncio.sleep(0)  # its future has the wake-up, and the task has not run yet
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (task.cancelled(), source.returned) == (True, [(waiter, "item")])

    in_a_loop(main)


def test_a_task_that_is_cancelled_after_it_failed() -> None:
    async def main() -> None:
        source = Counter()
        task = asyncio.create_task(source.aget())
        await asyncio.sleep(0)
        fail_all(source._line.drain(), QueueEmpty)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (task.cancelled(), source.returned) == (True, [])

    in_a_loop(main)


# -- ends in a finaliser: rule 5 -------------------------------------------------------------------------------------


class Case(NamedTuple):
    source: Any
    lock: Any
    bring: Callable[[], object]


def journaled() -> Iterator[Case]:
    with JournaledQueue("/q", "jobs", sync="never", clock=ManualClock(), disk=MemoryDisk()) as queue:
        reader = queue.reader()
        yield Case(reader._dispatcher, reader._backlog.lock, lambda: queue.put(b"x"))


def face() -> Iterator[Case]:
    with JournaledQueue("/q", "jobs", sync="never", clock=ManualClock(), disk=MemoryDisk()) as queue:
        yield Case(queue.as_blocking_queue()._gets, queue.reader()._backlog.lock, lambda: queue.put(b"x"))


def simple() -> Iterator[Case]:
    queue: Any = SimpleBlockingQueue()
    yield Case(queue, queue._lock, lambda: queue.put(b"x"))


def concurrent_one() -> Iterator[Case]:
    queue: Any = ConcurrentBlockingQueue()
    yield Case(queue, queue._lock, lambda: queue.put(b"x"))


def room() -> Iterator[Case]:
    """The line of the producers of a full queue."""
    queue: Any = SimpleBlockingQueue(1)
    queue.put(b"x")
    yield Case(SupplierLine(queue), queue._lock, queue.get)


@pytest.fixture(params=[journaled, face, simple, concurrent_one, room])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    gc.collect()
    gc.disable()
    yield from request.param()
    gc.enable()


@contextmanager
def nobody_works() -> Iterator[None]:
    """Nobody does what finalisers leave: not even a thread that has done all that was left, and is about to end."""
    until(lambda: not deferred._working)
    with patch.object(deferred, "_working", True):
        yield


def throw_away(case: Case, *, given: bool) -> None:
    """Leave a task as garbage that waited on a loop that is closed; with ``given`` something is on its way to it."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(case.source.aget())
    loop.run_until_complete(asyncio.sleep(0))
    assert len(case.source._line) == 1
    if given:
        case.bring()
    loop.close()
    if not given:  # it is found dead
        case.bring()
    assert not case.source._line
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def half_done(case: Case) -> Coroutine[Any, Any, Any]:
    """What waits in line, and belongs to no task."""

    async def begin() -> Coroutine[Any, Any, Any]:
        call: Coroutine[Any, Any, Any] = case.source.aget()
        call.send(None)
        return call

    return asyncio.run(begin())


def returns_while_held(lock: Any, call: Callable[[], object]) -> bool:
    """Whether ``call`` returns on a thread that can't have ``lock``: one that has it, and others wait for, say."""
    with lock:
        calling = threading.Thread(target=call, daemon=True)
        calling.start()
        calling.join(5)
        return not calling.is_alive()


@pytest.mark.parametrize("given", [False, True])
def test_a_task_that_is_thrown_away_waits_for_no_lock(given: bool, case: Case) -> None:
    throw_away(case, given=given)
    assert returns_while_held(case.lock, gc.collect)
    item = case.source._wait(20)  # what was on its way comes again
    assert getattr(item, "data", item) in (b"x", None)  # a place is nothing


def test_what_waits_in_line_and_is_thrown_away_leaves_it_without_waiting_for_the_lock(case: Case) -> None:
    call = half_done(case)
    assert returns_while_held(case.lock, call.close)
    until(lambda: not case.source._line)
    call = half_done(case)
    call.close()
    assert not case.source._line, "at once, where the lock is free"


def test_what_is_thrown_away_while_the_lock_is_held_is_handed_nothing(case: Case) -> None:
    call = half_done(case)
    with nobody_works():
        assert returns_while_held(case.lock, call.close)
        future = case.source.get_future()
        case.bring()
        assert future.done()
    deferred.leave(lambda: None)
    until(lambda: not deferred._left)


@pytest.mark.parametrize("case", [journaled, face], indirect=True)
def test_a_future_that_is_cancelled_in_a_finaliser_waits_for_no_lock(case: Case) -> None:
    future = case.source.get_future()
    assert returns_while_held(case.lock, future.cancel)
    until(lambda: not case.source._line)
    until(lambda: concurrent.futures.wait([future], 0).done)


def test_what_is_left_and_raises_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    with nobody_works():
        deferred.leave(lambda: 1 // 0)
    deferred.leave(lambda: done.append(1))
    until(lambda: done and not deferred._working)
    assert "finaliser" in caplog.text


def test_what_is_left_waits_where_no_thread_can_be_had() -> None:
    done: list[int] = []
    until(lambda: not deferred._working)
    with patch.object(deferred._thread, "start_new_thread", side_effect=RuntimeError("can't start new thread")):
        deferred.leave(lambda: done.append(1))
    assert not done
    deferred.leave(lambda: done.append(2))
    until(lambda: done == [1, 2])


def test_a_handler_that_changes_the_line_does_not_disturb_who_looks_at_it() -> None:
    """A signal handler's put or get comes between the making of an iterator and its first step."""

    class Disturbed(OrderedDict[Any, None]):
        left = 1

        def __iter__(self) -> Iterator[Any]:
            iterator = super().__iter__()
            if self.left:
                self.left -= 1
                self[ThreadWaiter()] = None
            return iterator

    for look in (Line.head, Line.wanting, Line.first):
        line, waiter = Line(), ThreadWaiter()
        line.waiters = Disturbed({waiter: None})
        assert look(line) is waiter
        assert len(line) == (1 if look is Line.first else 2)
