"""Both queues in memory, call by call. Every test ends with the invariants of the queues that it made."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import itertools
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy.config import FullPolicy
from kestrelpy.errors import KestrelError, QueueClosed, QueueEmpty, QueueFull
from kestrelpy.memory import BlockingQueue, ConcurrentBlockingQueue, SimpleBlockingQueue
from kestrelpy.memory._simple import SupplierLine
from kestrelpy.testing import ManualClock

Make = Callable[..., SimpleBlockingQueue[Any]]
PATIENCE = 30.0
BOTH = pytest.mark.parametrize("kind", [SimpleBlockingQueue, ConcurrentBlockingQueue])


@pytest.fixture(params=[SimpleBlockingQueue, ConcurrentBlockingQueue])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[SimpleBlockingQueue[Any]] = []

    def make_one(*args: Any, **options: Any) -> SimpleBlockingQueue[Any]:
        made.append(request.param(*args, **options))
        return made[-1]

    yield make_one
    for q in made:
        q._check()


class Call:
    """A call on a thread of its own."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self._outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(call, args), daemon=True).start()

    def _run(self, call: Callable[..., Any], args: Any) -> None:
        try:
            self._outcome.put((call(*args), None))
        except BaseException as error:
            self._outcome.put((None, error))

    def result(self) -> Any:
        value, error = self._outcome.get(timeout=PATIENCE)
        if error is not None:
            raise error
        return value


def until(condition: Callable[[], object]) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.001)):
        if condition():
            return
        pause.wait(0.001)
    pytest.fail("it never came to that")


def parked(q: SimpleBlockingQueue[Any], call: Callable[..., Any], *args: Any) -> Call:
    """``call`` on a thread, once it stands in line: as a consumer or as a producer."""
    before = len(q._line) + len(q._producers)
    started = Call(call, *args)
    until(lambda: len(q._line) + len(q._producers) > before)
    return started


def drain(q: SimpleBlockingQueue[Any]) -> list[Any]:
    found = []
    while q:
        found.append(q.get_nowait())
    return found


def fill(q: SimpleBlockingQueue[Any], *items: Any) -> None:
    for item in items:
        q.put(item)


# -- putting and taking ----------------------------------------------------------------------------------------------


def test_both_are_blocking_queues(make: Make) -> None:
    assert isinstance(make(), BlockingQueue)
    assert not isinstance(queue.Queue(), BlockingQueue)


def test_first_in_first_out(make: Make) -> None:
    q = make()
    fill(q, 1, None, 3)
    assert (q.get(), q.get(timeout=1), q.get(block=False)) == (1, None, 3)


def test_sizes(make: Make) -> None:
    q = make(2)
    assert (q.qsize(), len(q), q.empty(), q.full(), bool(q)) == (0, 0, True, False, False)
    q.put(1)
    assert (q.qsize(), len(q), q.empty(), q.full(), bool(q)) == (1, 1, False, False, True)
    q.put(2)
    assert (q.qsize(), len(q), q.empty(), q.full(), bool(q)) == (2, 2, False, True, True)
    assert (q.maxsize, q.waiter_count, q.dropped_count) == (2, 0, 0)


@pytest.mark.parametrize("maxsize", [0, -1])
def test_no_limit_is_never_full(make: Make, maxsize: int) -> None:
    q = make(maxsize)
    fill(q, *range(1000))
    assert not q.full()
    assert q.maxsize == maxsize
    assert drain(q) == list(range(1000))


def test_an_empty_queue(make: Make) -> None:
    q = make()
    for call in (q.get_nowait, lambda: q.get(block=False), lambda: q.get(timeout=0), lambda: q.get(True, 1e-6), q.peek):
        with pytest.raises(QueueEmpty) as caught:
            call()
        assert isinstance(caught.value, queue.Empty)
        assert isinstance(caught.value, KestrelError)
    assert q.waiter_count == 0


def test_timeouts_are_those_of_the_standard_library(make: Make) -> None:
    q = make()
    q.put(1)
    calls: tuple[Callable[[Any], object], ...] = (
        q.get_future,
        lambda timeout: q.get(timeout=timeout),
        lambda timeout: q.put(0, timeout=timeout),
    )
    for bad in (-1, -0.001, float("nan")):
        for call in calls:
            with pytest.raises(ValueError, match="non-negative"):
                call(bad)
    for call in calls:
        with pytest.raises(TypeError):
            call("1")
    q.put(2, block=False, timeout=-1)  # ignored, as there
    assert (q.get(block=False, timeout=-1), q.get(timeout=float("inf"))) == (1, 2)


def test_the_policy_is_checked(make: Make) -> None:
    with pytest.raises(TypeError, match="FullPolicy"):
        make(1, full_policy=1)
    with pytest.raises(ValueError, match="full_policy must be one of 'block', 'refuse', 'drop-oldest', not 'drop'"):
        make(1, full_policy="drop")
    refusing = make(1, full_policy="refuse")
    refusing.put(1)
    with pytest.raises(QueueFull):
        refusing.put(2)
    with pytest.raises(TypeError):
        make(1, FullPolicy.BLOCK)  # by keyword only


@pytest.mark.parametrize("maxsize", ["3", 2.5, 3.0, None, True, [3]])
def test_a_limit_that_is_no_whole_number_is_refused_where_it_is_given(make: Make, maxsize: Any) -> None:
    with pytest.raises(TypeError, match="maxsize must be a whole number, not"):
        make(maxsize)
    q = make(1)
    with pytest.raises(TypeError, match="maxsize must be a whole number, not"):
        q.maxsize = maxsize
    assert q.maxsize == 1
    q.put(1)
    assert q.full()


def test_peek(make: Make) -> None:
    q = make()
    fill(q, 1, 2)
    assert (q.peek(), q.peek(), drain(q)) == (1, 1, [1, 2])


def test_put_head_is_last_in_first_out(make: Make) -> None:
    q = make()
    q.put(1)
    q.put_head(2)
    q.put_head(3)
    assert drain(q) == [3, 2, 1]


def test_put_head_passes_the_limit(make: Make) -> None:
    q = make(1, full_policy=FullPolicy.REFUSE)
    q.put(1)
    q.put_head(2)
    assert (q.qsize(), q.full()) == (2, True)
    with pytest.raises(QueueFull):
        q.put(3)
    q.get()
    with pytest.raises(QueueFull):
        q.put(3)
    assert drain(q) == [1]


def test_get_if(make: Make) -> None:
    q = make()
    fill(q, 1, 2)
    assert q.get_if(lambda item: item == 1) == 1
    q.put(1)
    with pytest.raises(QueueEmpty, match="predicate"):
        q.get_if(lambda item: item == 1)
    with pytest.raises(ZeroDivisionError):
        q.get_if(lambda item: 1 / 0)
    assert drain(q) == [2, 1]
    with pytest.raises(QueueEmpty):
        q.get_if(lambda item: True)


def test_get_if_with_a_predicate_that_uses_the_queue(make: Make) -> None:
    q = make()
    fill(q, 1, 2, 3)

    def takes_the_head(item: int) -> bool:
        if item == 1:
            assert q.get_nowait() == 1
        q.put(item + 10)
        return True

    assert q.get_if(takes_the_head) == 2
    assert drain(q) == [3, 11, 12]


def test_get_if_keeps_others_out_while_the_predicate_runs(make: Make) -> None:
    q = make()
    fill(q, 1, 2)
    got = queue.SimpleQueue[Any]()

    def predicate(item: int) -> bool:
        assert item == 1
        Call(lambda: got.put(q.get()))
        with pytest.raises(queue.Empty):
            got.get(timeout=0.05)
        return True

    assert q.get_if(predicate) == 1
    assert got.get(timeout=PATIENCE) == 2


def test_items_are_not_kept_alive(make: Make) -> None:
    class Thing:
        pass

    for q in (make(), make(2)):
        waiting = parked(q, lambda q=q: weakref.ref(q.get()))
        q.put(Thing())
        reference = waiting.result()
        gc.collect()
        assert reference() is None
        q.put(Thing())
        reference = weakref.ref(q.get())
        assert reference() is None
        future = q.get_future()
        q.put(Thing())
        reference = weakref.ref(future.result(0))
        del future
        assert reference() is None


@BOTH
def test_a_queue_is_freed_at_once(kind: type[SimpleBlockingQueue[Any]]) -> None:
    gc.disable()
    try:
        q = kind(1)
        q.put(1)
        assert _error_of(q.put, 2, True, 0.001) is QueueFull
        assert q.get() == 1
        assert _error_of(q.get, True, 0.001) is QueueEmpty
        q.get_future(timeout=PATIENCE).cancel()
        future = q.get_future(timeout=PATIENCE)
        q.put(1)
        assert future.result(0) == 1
        waiting = [parked(q, _error_of, q.get), parked(q, _error_of, q.get)]
        q.evict_waiters()
        assert [call.result() for call in waiting] == [QueueEmpty] * 2
        reference = weakref.ref(q)
        del q, future
        until(lambda: reference() is None)  # the last thread may still be leaving
    finally:
        gc.enable()


def _error_of(call: Callable[..., Any], *args: Any) -> type[BaseException] | None:
    try:
        call(*args)
    except Exception as error:
        return type(error)
    return None


def test_repr(make: Make) -> None:
    q = make()
    q.put(1)
    assert repr(q) == f"<{type(q).__name__} size=1 waiters=0>"
    drain(q)
    q.get_future()
    assert repr(q) == f"<{type(q).__name__} size=0 waiters=1>"


# -- limits ----------------------------------------------------------------------------------------------------------


def test_refuse(make: Make) -> None:
    q = make(1, full_policy=FullPolicy.REFUSE)
    q.put(1)
    for call in (
        q.put,
        q.put_nowait,
        lambda item: q.put(item, timeout=PATIENCE),
        lambda item: asyncio.run(q.aput(item)),
    ):
        with pytest.raises(QueueFull) as caught:
            call(2)
        assert isinstance(caught.value, queue.Full)
    assert drain(q) == [1]


def test_block_gives_up(make: Make) -> None:
    q = make(1)
    q.put(1)
    for call in (
        q.put_nowait,
        lambda item: q.put(item, timeout=0),
        lambda item: q.put(item, timeout=0.001),
        lambda item: asyncio.run(q.aput(item, timeout=0)),
        lambda item: asyncio.run(q.aput(item, timeout=0.001)),
    ):
        with pytest.raises(QueueFull):
            call(2)
        q._check()
    assert drain(q) == [1]


def test_blocked_producers_are_served_in_order(make: Make) -> None:
    q = make(2)
    fill(q, 0, 1)
    producers = [parked(q, q.put, number, True, PATIENCE) for number in range(2, 6)]
    assert [q.get_nowait() for _ in range(6)] == list(range(6))  # whoever makes room puts the next one's item in
    for producer in producers:
        producer.result()


def test_a_later_put_does_not_pass_a_blocked_producer(make: Make) -> None:
    q = make(1)
    q.put(0)
    first = parked(q, q.put, 1)
    second = parked(q, q.put, 2)
    with pytest.raises(QueueFull):
        q.put_nowait(3)
    assert drain(q) == [0, 1, 2]
    first.result()
    second.result()


def test_a_blocked_producer_feeds_a_consumer_in_line(make: Make) -> None:
    q = make(1)
    q.put(0)
    producer = parked(q, q.put, 1)
    assert q.get() == 0
    assert q.get_future().result(0) == 1
    producer.result()


def test_flush_lets_producers_in(make: Make) -> None:
    q = make(2)
    fill(q, 0, 1)
    producers = [parked(q, q.put, number) for number in (2, 3, 4)]
    assert q.flush() == 2
    assert drain(q) == [2, 3, 4]
    for producer in producers:
        producer.result()


def test_a_new_limit_lets_producers_in(make: Make) -> None:
    q = make(1)
    q.put(0)
    producers = [parked(q, q.put, number) for number in (1, 2, 3)]
    q.maxsize = 2
    assert q.qsize() == 2
    q.maxsize = 0
    assert q.qsize() == 4
    q._check()
    for producer in producers:
        producer.result()
    q.maxsize = 1  # what is there stays
    with pytest.raises(QueueFull):
        q.put_nowait(4)
    assert drain(q) == [0, 1, 2, 3]


def test_a_producer_that_gave_up_puts_nothing(make: Make) -> None:
    q = make(1)
    q.put(0)
    leave, may_leave = SupplierLine._leave, threading.Event()

    def leave_later(line: SupplierLine, waiter: Any) -> bool:
        assert may_leave.wait(PATIENCE)
        return leave(line, waiter)

    with patch.object(SupplierLine, "_leave", leave_later):
        first = parked(q, q.put, 1, True, 0.01)
        second = parked(q, q.put, 2)
        may_leave.set()
        with pytest.raises(QueueFull):
            first.result()
    assert drain(q) == [0, 2]
    second.result()


def test_aput_waits_for_room(make: Make) -> None:
    async def main() -> None:
        q = make(1)
        q.put(0)
        tasks = [asyncio.create_task(q.aput(number)) for number in (1, 2, 3)]
        await asyncio.sleep(0)
        found: list[int] = []
        while len(found) < 4:
            found.append(await q.aget())
        assert found == [0, 1, 2, 3]
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_a_cancelled_aput_has_put_nothing(make: Make) -> None:
    async def main() -> None:
        q = make(1)
        q.put(0)
        waiting, granted, last = (asyncio.create_task(q.aput(number)) for number in (1, 2, 3))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        assert q.get_nowait() == 0
        assert q.full()  # there is a place, and it is promised to a task
        with pytest.raises(QueueFull):
            q.put_nowait(4)
        granted.cancel()  # before its loop came to tell it
        await last
        assert drain(q) == [3]
        outcomes: Sequence[object] = await asyncio.gather(waiting, granted, return_exceptions=True)
        assert outcomes != [None, None]

    asyncio.run(main())


def test_an_aput_granted_room_by_a_queue_that_is_closed_then(make: Make) -> None:
    async def main() -> None:
        q = make(1)
        q.put(0)
        task = asyncio.create_task(q.aput(1))
        await asyncio.sleep(0)
        q.get_nowait()
        q.close()
        with pytest.raises(QueueClosed):
            await task
        assert q.empty()

    asyncio.run(main())


def test_aput_deadlines_follow_the_clock(make: Make) -> None:
    async def main() -> None:
        clock = ManualClock()
        q = make(1, clock=clock)
        q.put(0)
        task = asyncio.create_task(q.aput(1, timeout=5))
        await asyncio.sleep(0)
        clock.advance(4.999)
        await asyncio.sleep(0)
        assert not task.done()
        clock.advance(0.001)
        with pytest.raises(QueueFull):
            await task
        assert drain(q) == [0]

    asyncio.run(main())


def test_drop_oldest(make: Make) -> None:
    q = make(2, full_policy=FullPolicy.DROP_OLDEST)
    fill(q, 1, 2, 3, 4)
    assert (q.dropped_count, drain(q)) == (2, [3, 4])
    asyncio.run(q.aput(5))
    assert drain(q) == [5]


def test_lk_b19_flush_then_size(make: Make) -> None:
    """The ancestor kept the old count after a flush, and refused for ever."""
    q = make(2, full_policy=FullPolicy.REFUSE)
    for _ in range(3):
        fill(q, 1, 2)
        with pytest.raises(QueueFull):
            q.put(3)
        assert (q.flush(), q.qsize(), q.empty(), q.full()) == (2, 0, True, False)
    fill(q, 3, 4)
    assert drain(q) == [3, 4]


def test_lk_b20_drop_oldest_drops_what_was_put_at_the_head(make: Make) -> None:
    """The ancestor looked at the tail part of its queue only."""
    q = make(2, full_policy=FullPolicy.DROP_OLDEST)
    q.put(1)
    q.put_head(2)
    q.put(3)
    assert (q.dropped_count, drain(q)) == (1, [1, 3])
    fill(q, 1, 2)
    q.put_head(0)
    q.put(3)  # two above the limit: the limit holds again
    assert (q.dropped_count, drain(q)) == (3, [2, 3])


def test_lk_b20_put_head_twice_is_last_in_first_out_in_both() -> None:
    """The ancestor's two queues differed."""
    found = []
    for q in (SimpleBlockingQueue[int](), ConcurrentBlockingQueue[int]()):
        q.put_head(1)
        q.put_head(2)
        found.append(drain(q))
    assert found == [[2, 1], [2, 1]]


def test_dropped_items_are_freed_with_no_lock_held(make: Make) -> None:
    q = make(2, full_policy=FullPolicy.DROP_OLDEST)
    free = []

    class Thing:
        def __del__(self) -> None:
            free.append(Call(_try, q._lock).result())

    fill(q, Thing(), Thing(), Thing())
    assert free == [True]
    q.flush()
    assert free == [True] * 3
    fill(q, Thing(), Thing())
    q.close()
    assert free == [True] * 5


def _try(lock: Any) -> bool:
    if not lock.acquire(False):
        return False
    lock.release()
    return True


# -- consumers in line -----------------------------------------------------------------------------------------------


def test_a_waiting_thread_gets_the_item(make: Make) -> None:
    for q in (make(), make(1)):
        waiting = parked(q, q.get)
        assert q.waiter_count == 1
        q.put(1)
        assert waiting.result() == 1
        assert (q.waiter_count, q.qsize()) == (0, 0)


def test_put_head_wakes_a_consumer(make: Make) -> None:
    for q in (make(), make(1)):
        future = q.get_future()
        q.put_head(1)
        assert future.result(0) == 1


def test_consumers_of_every_kind_share_one_line(make: Make) -> None:
    async def one(q: SimpleBlockingQueue[Any]) -> Any:
        return await q.aget()

    for q in (make(), make(10)):
        found: list[Call | concurrent.futures.Future[Any]] = []
        for _ in range(3):
            found.append(parked(q, q.get))
            found.append(parked(q, asyncio.run, one(q)))
            found.append(q.get_future())
        fill(q, *range(9))
        assert [waiting.result() for waiting in found] == list(range(9))


def test_a_get_does_not_pass_those_in_line(make: Make) -> None:
    """It is held up between the put's append and its hand-off, where an item and a waiter are both there."""
    for q in (make(), make(1)):
        first = q.get_future()
        late: list[Any] = []

        def hold_up(q: SimpleBlockingQueue[Any] = q, late: list[Any] = late) -> None:
            settle = type(q)._match
            q.__dict__.pop("_match")
            for call in (q.get_nowait, lambda: q.get_if(lambda item: True)):
                with pytest.raises(QueueEmpty):
                    call()
            late.append(q.get_future())
            settle(q)

        q._match = hold_up  # type: ignore[method-assign]
        q.put(1)
        assert first.result(0) == 1
        q.put(2)
        assert late[0].result(0) == 2


def test_lk_b6_lost_wakeup(make: Make) -> None:
    """The ancestor lost a put that came between "is it empty?" and "enter the line"."""
    for q in (make(), make(1)):
        take_now, enter = q._take_now, q._enter

        def put_in_between(waiter: Any, q: SimpleBlockingQueue[Any] = q, enter: Any = enter) -> None:
            q.put("item")
            enter(waiter)

        q._enter = put_in_between  # type: ignore[method-assign]
        assert q.get(timeout=PATIENCE) == "item"
        assert q.get_future().result(0) == "item"
        assert asyncio.run(asyncio.wait_for(q.aget(), PATIENCE)) == "item"
        assert q._take_now == take_now


def test_lk_b7_peek_does_not_swallow_wakeup(make: Make) -> None:
    """The ancestor's peek used up the one wake-up of a put."""
    q = make()
    waiting = parked(q, q.get)
    with pytest.raises(QueueEmpty):
        q.peek()
    settle = q._match
    peeked = []

    def peek_in_between() -> None:
        q.__dict__.pop("_match", None)
        peeked.append(q.peek())
        settle()

    q._match = peek_in_between  # type: ignore[method-assign]
    q.put(1)
    assert waiting.result() == 1
    assert peeked == [1]


def test_a_consumer_that_gave_up_takes_nothing(make: Make) -> None:
    q = make()
    with pytest.raises(QueueEmpty):
        q.get(timeout=0.001)
    q.put(1)
    assert drain(q) == [1]


def test_evict_waiters(make: Make) -> None:
    q = make()
    thread, future, timed = parked(q, q.get), q.get_future(), q.get_future(timeout=PATIENCE)
    assert q.evict_waiters() == 3
    errors = []
    for waiting in (thread, future, timed):
        with pytest.raises(QueueEmpty, match="evicted") as caught:
            waiting.result()
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 3  # one each: an error carries the traceback of who raised it
    assert (q.evict_waiters(), q.waiter_count) == (0, 0)


def test_evict_leaves_producers(make: Make) -> None:
    q = make(1)
    q.put(0)
    producer = parked(q, q.put, 1)
    assert q.evict_waiters() == 0
    assert drain(q) == [0, 1]
    producer.result()


def test_flush_leaves_the_waiters(make: Make) -> None:
    q = make()
    future = q.get_future()
    assert (q.flush(), q.waiter_count) == (0, 1)
    q.put(1)
    assert future.result(0) == 1


# -- futures ---------------------------------------------------------------------------------------------------------


def test_a_future_of_what_is_there_is_done(make: Make) -> None:
    q = make()
    q.put(1)
    assert q.get_future().result(0) == 1
    assert isinstance(q.get_future(timeout=0).exception(0), QueueEmpty)


def test_future_deadlines_follow_the_clock(make: Make) -> None:
    clock = ManualClock()
    q = make(clock=clock)
    late, later, never = q.get_future(timeout=2), q.get_future(timeout=3), q.get_future()
    assert clock.timer_count == 2  # waiting for ever needs no timer
    clock.advance(1.999)
    assert not late.done()
    clock.advance(0.001)
    assert isinstance(late.exception(0), QueueEmpty)
    assert q.waiter_count == 2
    q.put(1)
    assert later.result(0) == 1
    assert clock.timer_count == 0
    q.put(2)
    clock.advance(10)
    assert never.result(0) == 2


def test_a_cancelled_future_leaves_the_line(make: Make) -> None:
    clock = ManualClock()
    q = make(clock=clock)
    first, second = q.get_future(timeout=1_000_000), q.get_future()
    assert first.cancel()
    assert (q.waiter_count, clock.timer_count) == (1, 0)
    fill(q, 1, 2)
    assert (second.result(0), drain(q)) == (1, [2])
    assert not second.cancel()


def test_a_cancelled_future_is_known_to_be_cancelled(make: Make) -> None:
    """``concurrent.futures.wait`` waits for a cancelled future until it was told by whoever was to complete it."""
    q = make()
    future = q.get_future()
    future.cancel()
    assert concurrent.futures.wait([future], timeout=PATIENCE).done == {future}


def test_a_future_completed_by_its_holder_is_passed_over(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    q = make()
    mine, next_in_line = q.get_future(), q.get_future()
    mine.set_result("mine")
    q.put(1)
    assert next_in_line.result(0) == 1


def test_a_cancel_between_the_append_and_the_hand_off(make: Make) -> None:
    q = make()
    first, second = q.get_future(), q.get_future()
    settle = q._match

    def cancel_in_between() -> None:
        del q._match
        leave = q._leave
        q._leave = lambda waiter: False  # type: ignore[method-assign]  # as if it had not got the lock yet
        first.cancel()
        q._leave = leave  # type: ignore[method-assign]
        settle()

    q._match = cancel_in_between  # type: ignore[method-assign]
    q.put(1)
    assert (second.result(0), first.cancelled()) == (1, True)


def test_when_the_last_in_line_was_cancelled_the_item_stays(make: Make) -> None:
    q = make()
    future = q.get_future()
    leave = q._leave
    q._leave = lambda waiter: False  # type: ignore[method-assign]
    future.cancel()
    q._leave = leave  # type: ignore[method-assign]
    fill(q, 1, 2)
    assert drain(q) == [1, 2]


def test_callbacks_run_with_no_lock_held(make: Make) -> None:
    for q in (make(), make(5)):
        free: list[bool] = []

        def note(_: object, q: SimpleBlockingQueue[Any] = q, free: list[bool] = free) -> None:
            free.append(Call(_try, q._lock).result())

        futures = [q.get_future() for _ in range(4)]
        for future in futures:
            future.add_done_callback(note)
        q.put(1)
        q.put_head(2)
        futures[2].cancel()
        q.evict_waiters()
        q.get_future().add_done_callback(note)
        q.close()
        assert free == [True] * 5


def test_a_callback_may_use_the_queue(make: Make) -> None:
    q = make()
    found = []

    def again(future: concurrent.futures.Future[int]) -> None:
        found.append(future.result())
        if len(found) < 5:
            q.get_future().add_done_callback(again)
            q.put(len(found))

    q.get_future().add_done_callback(again)
    q.put(0)
    assert found == [0, 1, 2, 3, 4]


def test_a_callback_that_interrupts_does_not_hold_up_others(make: Make) -> None:
    q = make()
    first, second = q.get_future(), q.get_future()

    def interrupt(_: object) -> None:
        q._items.append(2)  # as another thread whose put relies on this one
        raise KeyboardInterrupt

    first.add_done_callback(interrupt)
    with pytest.raises(KeyboardInterrupt):
        q.put(1)
    assert (first.result(0), second.result(0)) == (1, 2)


def test_an_interrupt_while_one_leaves_does_not_hold_up_others(make: Make) -> None:
    q = make()
    leaving, first, second = (q.get_future() for _ in range(3))

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    first.add_done_callback(interrupt)
    leave = q._leave

    def leave_when_items_came(waiter: Any) -> bool:
        q._items.extend((1, 2))  # of puts that rely on whoever has the lock
        return leave(waiter)

    q._leave = leave_when_items_came  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        leaving.cancel()
    assert (first.result(0), second.result(0)) == (1, 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda q, waiting: waiting[1].cancel(),
        lambda q, waiting: q.get_future(),
        lambda q, waiting: q.get_nowait(),
        lambda q, waiting: q.get(timeout=0.001),
        lambda q, waiting: q.get_if(lambda item: False),
        lambda q, waiting: q.peek(),
        lambda q, waiting: q.flush(),
        lambda q, waiting: setattr(q, "maxsize", -1),
    ],
    ids=["cancel", "get_future", "get_nowait", "get", "get_if", "peek", "flush", "maxsize"],
)
def test_whoever_had_the_lock_looks_again(call: Callable[..., object]) -> None:
    """A put that finds the lock taken leaves its item to the one who has it."""
    q = ConcurrentBlockingQueue[Any]()
    waiting = [q.get_future(), q.get_future()]
    lock, busy = q._lock, list[bool]()

    class Held:
        release = lock.release

        def __enter__(self) -> None:
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            if not busy:
                busy.append(True)
                Call(q.put, "item").result()  # from another thread, which does not wait
            lock.release()

    q._lock = Held()  # type: ignore[assignment]
    with suppress(QueueEmpty):
        call(q, waiting)
    q._lock = lock
    assert busy
    assert waiting[0].done()
    assert waiting[0].result(0) == "item"
    q._check()


def test_a_put_within_a_hand_over_waits_its_turn(make: Make) -> None:
    """A finaliser may run anywhere; here, while the first in line is asked whether it still wants an item."""
    for q in (make(), make(5)):
        first, second = q.get_future(), q.get_future()
        waiter = q._line.head()
        assert waiter is not None
        claim = waiter.claim_now

        def claim_and_put(
            q: SimpleBlockingQueue[Any] = q, waiter: Any = waiter, claim: Callable[[], bool | None] = claim
        ) -> bool | None:
            waiter.claim_now = claim
            q.put_nowait(2)
            return claim()

        waiter.claim_now = claim_and_put  # type: ignore[method-assign]
        q.put(1)
        assert (first.result(0), second.result(0)) == (1, 2)


def test_a_get_under_way_takes_the_item_of_a_hand_over() -> None:
    """It had looked before anybody was in line."""
    q = ConcurrentBlockingQueue[Any]()
    future = q.get_future()
    taken = []

    def taken_already(items: Any) -> Any:
        taken.append(items.popleft())
        return items.popleft()

    heads, q._heads = q._heads, map(taken_already, itertools.repeat(q._items))
    q.put(1)
    q._heads = heads
    assert (taken, future.done(), q.waiter_count) == ([1], False, 1)
    q._check()
    q.put(2)
    assert future.result(0) == 2


# -- asyncio ---------------------------------------------------------------------------------------------------------


def test_aget(make: Make) -> None:
    async def main() -> None:
        q = make()
        q.put(1)
        assert await q.aget() == 1
        task = asyncio.create_task(q.aget())
        await asyncio.sleep(0)
        assert (q.waiter_count, task.done()) == (1, False)
        q.put(2)
        assert await task == 2
        with pytest.raises(QueueEmpty):
            await q.aget(timeout=0)
        with pytest.raises(ValueError, match="non-negative"):
            await q.aget(timeout=-1)

    asyncio.run(main())


def test_aget_deadlines_follow_the_clock(make: Make) -> None:
    async def main() -> None:
        clock = ManualClock()
        q = make(clock=clock)
        task = asyncio.create_task(q.aget(timeout=5))
        await asyncio.sleep(0)
        clock.advance(4.999)
        await asyncio.sleep(0)
        assert not task.done()
        clock.advance(0.001)
        with pytest.raises(QueueEmpty):
            await task

    asyncio.run(main())


class Task:
    """A task in ``aget`` with a loop of its own, which runs when it is told to."""

    def __init__(self, q: SimpleBlockingQueue[Any]) -> None:
        self.loop = asyncio.new_event_loop()
        self.task = self.loop.create_task(q.aget())
        self.step()

    def step(self) -> None:
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.run_until_complete(asyncio.sleep(0))

    def cancel(self) -> None:
        self.task.cancel()
        self.step()
        assert self.task.cancelled()
        self.loop.close()

    def result(self) -> Any:
        self.step()
        self.loop.close()
        return self.task.result()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_cancelled_tasks_pass_their_items_on_in_order(make: Make, order: tuple[int, ...]) -> None:
    for q in (make(), make(3)):
        tasks = [Task(q) for _ in range(3)]
        fill(q, 0, 1, 2, 3)
        for count, number in enumerate(order):
            tasks[number].cancel()
            assert q.qsize() == count + 2
            assert q.peek() == min(order[: count + 1])
        assert drain(q) == [0, 1, 2, 3]


def test_a_cancelled_task_passes_its_item_to_the_next_in_line(make: Make) -> None:
    async def main() -> None:
        q = make()
        first, second = asyncio.create_task(q.aget()), asyncio.create_task(q.aget())
        await asyncio.sleep(0)
        q.put(1)
        first.cancel()
        assert await second == 1
        assert first.cancelled()

    asyncio.run(main())


def test_returned_items_keep_their_order_when_handed_out_again(make: Make) -> None:
    q = make()
    one, two = Task(q), Task(q)
    fill(q, 1, 2)
    again, three = Task(q), Task(q)
    one.cancel()  # 1 is handed out once more
    q.put(3)
    three.cancel()
    two.cancel()
    again.cancel()
    assert drain(q) == [1, 2, 3]


def test_the_head_is_before_returned_items(make: Make) -> None:
    q = make()
    tasks = [Task(q) for _ in range(4)]
    fill(q, 1, 2, 3, 4)
    tasks[0].cancel()
    q.put_head("a")
    q.put_head("b")
    tasks[1].cancel()
    assert (q.qsize(), q.peek()) == (4, "b")
    assert q.get_if(lambda item: item == "b") == "b"
    assert q.flush() == 3
    tasks[3].cancel()
    q.put(5)
    q.put_head("c")
    tasks[2].cancel()
    assert drain(q) == ["c", 3, 4, 5]


def test_after_close_nothing_comes_back(make: Make) -> None:
    async def main() -> None:
        for immediate in (False, True):
            q = make()
            task = asyncio.create_task(q.aget())
            await asyncio.sleep(0)
            q.put(1)
            q.shutdown(immediate)
            task.cancel()
            await asyncio.sleep(0)
            assert q.qsize() == (0 if immediate else 1)
            q._check()

    asyncio.run(main())


def test_a_coroutine_that_is_thrown_away_loses_nothing(make: Make) -> None:
    q = make()
    loop = asyncio.new_event_loop()
    waiting, served = (loop.create_task(q.aget()) for _ in range(2))
    loop.run_until_complete(asyncio.sleep(0))
    waiting.cancel()
    q.put(1)
    loop.close()  # without running it: the item is on its way, and never arrives
    for task in (waiting, served):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        task.get_coro().close()
    assert (q.waiter_count, drain(q)) == (0, [1])


def test_a_closed_loop_is_passed_over(make: Make) -> None:
    q = make()
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(q.aget()) for _ in range(500)]
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    future = q.get_future()
    fill(q, 1, 2)
    assert (future.result(0), drain(q)) == (1, [2])
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        task.get_coro().close()


def test_a_loop_that_closes_while_an_item_is_on_its_way(make: Make) -> None:
    async def main(q: SimpleBlockingQueue[Any], taken: threading.Event, go: threading.Event) -> None:
        task = asyncio.create_task(q.aget())
        await asyncio.sleep(0)
        await asyncio.to_thread(taken.wait, PATIENCE)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    q = make()
    taken, go = threading.Event(), threading.Event()
    consumer = parked(q, asyncio.run, main(q, taken, go))
    waiter = q._line.head()
    assert waiter is not None
    give = waiter.give

    def give_late(item: Any) -> None:
        taken.set()
        assert go.wait(PATIENCE)
        give(item)

    waiter.give = give_late  # type: ignore[method-assign]
    producer = Call(q.put, 1)
    consumer.result()  # its loop has ended and was closed, while the producer held an item for it
    go.set()
    producer.result()
    assert drain(q) == [1]


# -- the end ---------------------------------------------------------------------------------------------------------


def test_shutdown_lets_the_items_out(make: Make) -> None:
    for q in (make(), make(2)):
        fill(q, 1, 2)
        assert not q.is_shutdown
        q.shutdown()
        q.shutdown()
        assert q.is_shutdown
        for call in (q.put, q.put_nowait, q.put_head, lambda item, q=q: asyncio.run(q.aput(item))):
            with pytest.raises(QueueClosed):
                call(3)
        assert (q.peek(), q.get_if(lambda item: True), q.get()) == (1, 1, 2)
        for call in (q.get, q.get_nowait, q.peek, q.get_future, lambda q=q: q.get(timeout=1)):
            with pytest.raises(QueueClosed):
                call()
        with pytest.raises(QueueClosed):
            q.get_if(lambda item: True)
        with pytest.raises(QueueClosed):
            asyncio.run(q.aget())


def test_close_drops_the_items(make: Make) -> None:
    for end in ("close", "shutdown"):
        q = make()
        fill(q, 1, 2)
        q.close() if end == "close" else q.shutdown(immediate=True)
        assert q.qsize() == 0
        with pytest.raises(QueueClosed):
            q.get_nowait()
        q.close()


def test_closed_is_the_librarys_own_error_before_3_13() -> None:
    assert issubclass(QueueClosed, KestrelError)
    assert not issubclass(QueueClosed, queue.Empty | queue.Full)
    assert hasattr(queue, "ShutDown") == (sys.version_info >= (3, 13))
    assert not hasattr(queue, "ShutDown") or issubclass(QueueClosed, queue.ShutDown)


@pytest.mark.parametrize("immediate", [False, True])
def test_shutdown_wakes_everybody(make: Make, immediate: bool) -> None:
    q = make()
    consumers: list[Call | concurrent.futures.Future[Any]] = [
        parked(q, q.get),
        q.get_future(),
        q.get_future(timeout=PATIENCE),
    ]
    q.shutdown(immediate)
    for consumer in consumers:
        with pytest.raises(QueueClosed):
            consumer.result()
    q = make(1)
    q.put(0)
    producers = [parked(q, q.put, 1), parked(q, q.put, 2, True, PATIENCE)]
    q.shutdown(immediate)
    for producer in producers:
        with pytest.raises(QueueClosed):
            producer.result()
    assert drain(q) == ([] if immediate else [0])


def test_shutdown_serves_consumers_in_line_first(make: Make) -> None:
    q = make()
    first, second = q.get_future(), q.get_future()
    q._items.append(1)  # a put that has not handed its item over yet
    q.shutdown()
    assert first.result(0) == 1
    assert isinstance(second.exception(0), QueueClosed)


def test_a_get_that_enters_the_line_of_a_closed_queue(make: Make) -> None:
    for items, expected in (([1], 1), ([], QueueClosed)):
        q = make()
        fill(q, *items)
        enter = q._enter

        def shut_in_between(waiter: Any, q: SimpleBlockingQueue[Any] = q, enter: Any = enter) -> None:
            q.shutdown()
            enter(waiter)

        q._enter = shut_in_between  # type: ignore[method-assign]
        q._take_now = lambda: (_ for _ in ()).throw(QueueEmpty())  # type: ignore[method-assign]
        if expected is QueueClosed:
            with pytest.raises(QueueClosed):
                q._wait(None)
        else:
            assert q._wait(None) == expected


def test_a_get_that_enters_the_line_of_a_closed_queue_too_late(make: Make) -> None:
    """There was an item when it entered; another took it."""
    q = make()
    q.put(1)
    q.shutdown()
    settle = q._match

    def settle_too_late() -> None:
        q._items.clear()
        settle()

    q._match = settle_too_late  # type: ignore[method-assign]
    with pytest.raises(QueueClosed):
        q._wait(PATIENCE)


def test_a_put_under_way_at_the_shutdown_is_refused() -> None:
    """It had looked before the shutdown, and stores its item after it."""
    for put in ("put", "put_head"):
        q = ConcurrentBlockingQueue[Any]()
        item, other = object(), object()
        fill(q, 1, other)

        class Items(type(q._items)):  # type: ignore[misc]
            def append(self, item: Any, q: ConcurrentBlockingQueue[Any] = q) -> None:
                q.shutdown()
                super().append(item)

            def appendleft(self, item: Any, q: ConcurrentBlockingQueue[Any] = q) -> None:
                q.shutdown()
                super().appendleft(item)

        q._items = Items(q._items)
        with pytest.raises(QueueClosed):
            getattr(q, put)(item)
        assert drain(q) == [1, other]
        q._check()


# -- finalisers and signal handlers ----------------------------------------------------------------------------------


class Signalled(threading.Condition):
    """The condition of a future. ``handler`` runs in the middle of ``cancel()``, with the lock held, as a handler of
    signals may. ``asked`` is set when another thread asks for the lock.
    """

    def __init__(self, handler: Callable[[], object]) -> None:
        super().__init__()
        self.asked = threading.Event()
        self._handler = handler
        self._really: Callable[..., bool] = self.acquire
        self.acquire: Any = self._acquire
        self._holder = 0

    def _acquire(self, *options: Any) -> bool:
        if self._holder not in (0, threading.get_ident()):
            self.asked.set()
        return self._really(*options)

    def __enter__(self) -> bool:
        return self._acquire()

    def notify_all(self) -> None:
        self._holder = threading.get_ident()
        try:
            self._handler()
        finally:
            self._holder = 0
        super().notify_all()


@pytest.mark.parametrize("maxsize", [0, 5])
@pytest.mark.parametrize("serve", ["put", "put_head", "evict_waiters", "close"])
def test_a_signal_handler_that_interrupts_a_cancel_may_wait_for_the_queue(make: Make, maxsize: int, serve: str) -> None:
    """Another thread serves the line meanwhile. It must not wait for the future with the lock of the queue held."""
    q = make(maxsize)
    calls: list[Call] = []
    found: list[Any] = []

    def handler() -> None:
        calls.append(Call(getattr(q, serve), *(("item",) if "put" in serve else ())))
        assert condition.asked.wait(PATIENCE)
        with suppress(QueueClosed):
            found.append(q.get_future())
            q.put("from the handler")

    first, second = q.get_future(), q.get_future()
    first._condition = condition = Signalled(handler)
    waiting = Call(concurrent.futures.wait, [first], PATIENCE)
    until(lambda: first._waiters)
    cancelled = Call(first.cancel)
    assert cancelled.result()
    calls[0].result()
    assert waiting.result().done == {first}
    if "put" in serve:
        assert (second.result(PATIENCE), found[0].result(PATIENCE)) == ("item", "from the handler")
    else:
        assert isinstance(second.exception(PATIENCE), QueueEmpty | QueueClosed)
    assert q.waiter_count == 0


class Nested:
    """A lock that runs something when it was just taken, as a finaliser would that the interpreter runs there."""

    def __init__(self, lock: Any, call: Callable[[], object]) -> None:
        self.lock, self.call, self.busy = lock, call, False

    def __enter__(self) -> None:
        self.lock.acquire()
        self._run()

    def __exit__(self, *_: object) -> None:
        self._run()
        self.lock.release()

    def acquire(self, blocking: bool = True) -> bool:
        held: bool = self.lock.acquire(blocking)
        self._run()
        return held

    def release(self) -> None:
        self._run()
        self.lock.release()

    def _run(self) -> None:
        if not self.busy:
            self.busy = True
            try:
                self.call()
            finally:
                self.busy = False


def test_calls_from_within_calls(make: Make) -> None:
    """Each call that does not wait, from inside the critical sections of each other one: nothing is lost or hangs."""

    def operations(q: SimpleBlockingQueue[Any], number: Iterator[int], futures: list[Any]) -> dict[str, Any]:
        def quietly(call: Callable[..., Any], *args: Any) -> Callable[[], Any]:
            def run() -> None:
                try:
                    found = call(*args)
                except (QueueEmpty, QueueFull):
                    return
                if isinstance(found, concurrent.futures.Future):
                    futures.append(found)
                elif isinstance(found, str):
                    taken.append(found)

            return run

        def put() -> None:
            item = f"item {next(number)}"
            try:
                q.put_nowait(item)
            except QueueFull:
                return
            put_items.append(item)

        def peek() -> None:
            """Look, and take nothing."""
            q.peek()

        return {
            "put": put,
            "get": quietly(q.get_nowait),
            "get_if": quietly(q.get_if, lambda item: True),
            "get_future": quietly(q.get_future),
            "evict": quietly(q.evict_waiters),
            "cancel": lambda: [future.cancel() for future in futures[-2:]],
            "peek": quietly(peek),
        }

    for maxsize in (0, 3):
        names = list(operations(make(), iter(()), []))
        for outer in names:
            for inner in names:
                q = make(maxsize)
                put_items: list[str] = []
                taken: list[str] = []
                futures: list[Any] = []
                number = iter(range(1_000_000))
                calls = operations(q, number, futures)
                q._lock = nested = Nested(q._lock, calls[inner])  # type: ignore[assignment]
                q._attempts = map(nested.acquire, _for_ever(False))
                for _ in range(3):
                    calls[outer]()
                    calls["get_future"]()
                    calls["put"]()
                nested.busy = True
                q._match()
                served = [one for one in futures if not one.cancel() and one.exception(0) is None]
                found = [*taken, *(future.result(0) for future in served), *drain(q)]
                assert sorted(found) == sorted(put_items), (maxsize, outer, inner)
                q._check()


def _for_ever(value: Any) -> Iterator[Any]:
    while True:
        yield value


def test_a_put_in_a_finaliser(make: Make) -> None:
    q = make()
    waiting = [q.get_future() for _ in range(3)]

    class Circular:
        def __init__(self) -> None:
            self.self = self

        def __del__(self) -> None:
            q.put("finaliser")

    Circular()
    q.put(1)
    gc.collect()
    q.put(2)
    assert [future.result(0) for future in waiting] == [1, "finaliser", 2]


@pytest.mark.parametrize("kind", [SimpleBlockingQueue, ConcurrentBlockingQueue])
def test_a_handler_that_gets_while_room_is_made(kind: type[SimpleBlockingQueue[str]]) -> None:
    """DROP_OLDEST: a signal handler's get has made the room already, and the put stores its item."""
    queue = kind(1, full_policy=FullPolicy.DROP_OLDEST)
    queue.put("old")
    real = kind._take_locked

    def interrupted(self: SimpleBlockingQueue[str]) -> str:
        patched.stop()
        assert real(self) == "old"  # what the handler gets
        return real(self)

    patched = patch.object(kind, "_take_locked", interrupted)
    patched.start()
    queue.put("new")
    assert queue.get_nowait() == "new"
    assert queue.dropped_count == 0
