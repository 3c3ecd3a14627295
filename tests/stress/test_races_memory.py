"""Races between the calls of a queue in memory, provoked by switching threads as often as the interpreter can.

No test waits for time to pass. A lost wake-up shows as a get that comes to nothing after ``PATIENCE``; a lost,
doubled or misplaced item shows in what came out. Most races also check that they took place.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import queue
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from kestrelpy.config import FullPolicy
from kestrelpy.errors import QueueClosed, QueueEmpty, QueueFull
from kestrelpy.memory import ConcurrentBlockingQueue, SimpleBlockingQueue
from tests.support.budget import takes_long

PATIENCE = 60.0
Kind = type[SimpleBlockingQueue[Any]]

BOTH = pytest.mark.parametrize(
    ("kind", "rounds"),
    [(ConcurrentBlockingQueue, 100_000), (SimpleBlockingQueue, 10_000)],
    ids=["concurrent", "simple"],
)
"""The fast one is where the races are."""


def rounds_of(count: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("kind", "rounds"),
        [(ConcurrentBlockingQueue, count), (SimpleBlockingQueue, count // 10)],
        ids=["concurrent", "simple"],
    )


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def race(*calls: Callable[[], object]) -> None:
    """Run ``calls`` at once, each on a thread of its own, to the end; raise what any of them raised."""
    errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> None:
        try:
            start.wait(PATIENCE)
            call()
        except BaseException as error:
            errors.put(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and errors.empty():
            thread.join(0.1)
    if not errors.empty():
        raise errors.get()


def drain(q: SimpleBlockingQueue[Any]) -> list[Any]:
    found = []
    while q:
        found.append(q.get_nowait())
    return found


def put_when_somebody_waits(
    q: SimpleBlockingQueue[Any], put_count: Iterator[int], done: threading.Event, pauses: Sequence[range] = (range(0),)
) -> None:
    """Put the next number whenever somebody is in line, after the next of ``pauses``."""
    is_over, line, pause = done.is_set, q._line.waiters, itertools.cycle(pauses)
    while not is_over():
        if line:
            for _ in next(pause):
                pass
            q.put(next(put_count))


# -- the three named ones --------------------------------------------------------------------------------------------


@BOTH
def test_no_wake_up_is_lost(kind: Kind, rounds: int) -> None:
    """Every item is put while its consumer is about to wait, or just waits."""
    there, back = kind(), kind()

    def ping() -> None:
        for number in range(rounds // 2):
            there.put(number)
            assert back.get(timeout=PATIENCE) == number

    def pong() -> None:
        for number in range(rounds // 2):
            assert there.get(timeout=PATIENCE) == number
            back.put(number)

    race(ping, pong)
    there._check()
    back._check()


@BOTH
def test_a_cancelled_waiter_loses_no_item(kind: Kind, rounds: int) -> None:
    """Futures are cancelled while their items are handed to them."""
    q = kind()
    pauses = [range(0), range(20), range(60), range(150), range(500)]
    outcomes: Counter[str] = Counter()
    found: list[int] = []
    put_count = itertools.count()
    done = threading.Event()

    def cancel() -> None:
        try:
            for number in range(rounds):
                future = q.get_future()
                at_once = future.done()
                for _ in pauses[number % len(pauses)]:
                    pass
                if future.cancel():
                    outcomes["cancelled"] += 1
                else:
                    outcomes["at once" if at_once else "handed over"] += 1
                    found.append(future.result(PATIENCE))
        finally:
            done.set()

    race(lambda: put_when_somebody_waits(q, put_count, done), cancel)
    assert found + drain(q) == list(range(next(put_count)))
    assert outcomes["cancelled"] > 0
    assert outcomes["handed over"] + outcomes["at once"] > 0  # the latter left there by one that was cancelled
    q._check()


@BOTH
def test_peek_and_get_of_one_item(kind: Kind, rounds: int) -> None:
    """One thread peeks while the other takes the one item there is, waiting for it in every second round."""
    q = kind()
    outcomes: Counter[bool] = Counter()
    turn: queue.SimpleQueue[int] = queue.SimpleQueue()
    taken: queue.SimpleQueue[int] = queue.SimpleQueue()

    def put_and_peek() -> None:
        for number in range(rounds):
            if number % 2:
                q.put(number)
                turn.put(number)
            else:
                turn.put(number)
                q.put(number)
            for _ in range(number % 8):
                if not sees(number):
                    break
            assert taken.get(timeout=PATIENCE) == number

    def sees(number: int) -> bool:
        try:
            seen = q.peek()
        except QueueEmpty:
            outcomes[False] += 1
            return False
        outcomes[True] += 1
        assert seen == number
        return True

    def take() -> None:
        for number in range(rounds):
            assert turn.get(timeout=PATIENCE) == number
            assert q.get(timeout=PATIENCE) == number
            taken.put(number)

    race(put_and_peek, take)
    assert outcomes[True] > 0
    assert q.empty()
    q._check()


# -- others that wait ------------------------------------------------------------------------------------------------


@rounds_of(10_000)
def test_deadlines_race_with_puts(kind: Kind, rounds: int) -> None:
    q = kind()
    outcomes: Counter[str] = Counter()
    found: list[int] = []
    put_count = itertools.count()
    done = threading.Event()
    pauses = [range(0), range(100), range(1000), range(3000), range(10_000)]

    def consume() -> None:
        try:
            for _ in range(rounds):
                try:
                    found.append(q.get(timeout=1e-6))
                except QueueEmpty:
                    outcomes["late"] += 1
                else:
                    outcomes["in time"] += 1
        finally:
            done.set()

    race(lambda: put_when_somebody_waits(q, put_count, done, pauses), consume)
    assert found + drain(q) == list(range(next(put_count)))
    assert min(outcomes["late"], outcomes["in time"]) > 0
    q._check()


@takes_long
@rounds_of(10_000)
def test_eviction_races_with_puts(kind: Kind, rounds: int) -> None:
    q = kind()
    found: list[int] = []
    evicted: set[str] = set()

    def produce() -> None:
        for number in range(rounds):
            q.put(number)
            while len(found) + 2 < number:
                pass

    def consume() -> None:
        while len(found) < rounds:
            try:
                found.append(q.get(timeout=PATIENCE))
            except QueueEmpty as error:
                evicted.add(str(error))

    def evict() -> None:
        while len(found) < rounds:
            q.evict_waiters()

    race(produce, consume, evict)
    assert found == list(range(rounds))
    assert evicted == {"the waiters were evicted"}
    q._check()


@rounds_of(50_000)
def test_cancelled_tasks_race_with_puts(kind: Kind, rounds: int) -> None:
    q = kind()
    found: list[int] = []
    put_count = itertools.count()
    done = threading.Event()
    cancelled = [0]

    async def consume() -> None:
        for number in range(rounds):
            task = asyncio.create_task(q.aget())
            for _ in range(number % 3):
                await asyncio.sleep(0)
            task.cancel()
            try:
                found.append(await task)
            except asyncio.CancelledError:
                cancelled[0] += 1

    def run() -> None:
        try:
            asyncio.run(consume())
        finally:
            done.set()

    race(lambda: put_when_somebody_waits(q, put_count, done), run)
    assert found + drain(q) == list(range(next(put_count)))
    assert cancelled[0] > 0
    q._check()


# -- many at once ----------------------------------------------------------------------------------------------------


@rounds_of(200_000)
@pytest.mark.parametrize("maxsize", [0, 3])
def test_many_producers_and_consumers(kind: Kind, rounds: int, maxsize: int) -> None:
    q = kind(maxsize)
    threads = 4
    each = rounds // threads // (10 if maxsize else 1)
    found: list[list[tuple[int, int]]] = [[] for _ in range(threads)]

    def produce(who: int) -> None:
        for number in range(each):
            q.put((who, number), timeout=PATIENCE)

    def consume(mine: list[tuple[int, int]]) -> None:
        for _ in range(each):
            mine.append(q.get(timeout=PATIENCE))
            assert not maxsize or len(q) <= maxsize

    race(
        *(functools.partial(produce, who) for who in range(threads)),
        *(functools.partial(consume, mine) for mine in found),
    )
    assert sorted(itertools.chain(*found)) == [(who, number) for who in range(threads) for number in range(each)]
    for mine in found:
        for who in range(threads):
            assert [item for item in mine if item[0] == who] == sorted(item for item in mine if item[0] == who)
    q._check()


@rounds_of(200_000)
def test_get_if_races_with_gets(kind: Kind, rounds: int) -> None:
    """Items are taken once, by both together in order, whatever the predicate says in between."""
    q = kind()
    found: list[int] = []
    taken: list[int] = []

    def produce() -> None:
        for number in range(rounds):
            q.put(number)

    def consume() -> None:
        while len(found) + len(taken) < rounds:
            with suppress(QueueEmpty):
                found.append(q.get_nowait())

    def consume_even() -> None:
        while len(found) + len(taken) < rounds:
            with suppress(QueueEmpty):
                taken.append(q.get_if(lambda number: number % 2 == 0))

    race(produce, consume, consume_even)
    assert sorted(found + taken) == list(range(rounds))
    assert not any(number % 2 for number in taken)
    assert taken == sorted(taken)
    q._check()


@rounds_of(200_000)
def test_drop_oldest_accounts_for_every_item(kind: Kind, rounds: int) -> None:
    q = kind(4, full_policy=FullPolicy.DROP_OLDEST)
    found: list[int] = []
    done = threading.Event()

    def produce() -> None:
        for number in range(rounds):
            q.put(number)
            assert len(q) <= 4
        done.set()

    def consume() -> None:
        while not done.is_set() or q:
            with suppress(QueueEmpty):
                found.append(q.get_nowait())

    race(produce, consume)
    assert found == sorted(set(found))
    assert len(found) + q.dropped_count == rounds
    q._check()


@rounds_of(40_000)
def test_producers_that_give_up_put_nothing(kind: Kind, rounds: int) -> None:
    q = kind(1)
    accepted: list[int] = []
    found: list[int] = []
    done = threading.Event()

    def produce() -> None:
        for number in range(rounds):
            try:
                q.put(number, timeout=1e-5)
            except QueueFull:
                continue
            accepted.append(number)
        done.set()

    def consume() -> None:
        while not done.is_set() or q:
            with suppress(QueueEmpty):
                found.append(q.get(timeout=1e-5))

    race(produce, consume)
    assert found == accepted
    q._check()


@pytest.mark.parametrize(("kind", "rounds"), [(ConcurrentBlockingQueue, 4_000), (SimpleBlockingQueue, 4_000)])
@pytest.mark.parametrize("immediate", [False, True])
def test_shutdown_races_with_puts_and_gets(kind: Kind, rounds: int, immediate: bool) -> None:
    """What was accepted comes out, unless it was dropped by an immediate end; after the end nothing is there."""
    outcomes: Counter[str] = Counter()
    queues = [kind() for _ in range(rounds)]
    turns = [threading.Barrier(3) for _ in range(2)]
    accepted: list[int] = []
    found: list[int] = []

    def produce() -> None:
        for turn, q in enumerate(queues):
            turns[turn % 2].wait(PATIENCE)
            try:
                for number in range(turn % 4 + 1):
                    q.put(number)
                    accepted.append(turn)
            except QueueClosed:
                outcomes["refused"] += 1

    def consume() -> None:
        for turn, q in enumerate(queues):
            turns[turn % 2].wait(PATIENCE)
            try:
                while True:
                    q.get(timeout=PATIENCE)
                    found.append(turn)
            except QueueClosed:
                pass

    def end() -> None:
        for turn, q in enumerate(queues):
            turns[turn % 2].wait(PATIENCE)
            q.shutdown(immediate)

    race(produce, consume, end)
    for q in queues:
        assert q.empty()
        q._check()
    if immediate:
        assert not Counter(found) - Counter(accepted)
    else:
        assert Counter(found) == Counter(accepted)
    assert outcomes["refused"] > 0
