"""The scheduler itself, on small cases whose outcomes are known."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kestrelpy import SimpleBlockingQueue, clock
from kestrelpy._waiting import deferred
from tests.interleavings.scheduler import MAX_POINTS, BrokenSchedule, Priorities, RandomWalk, Scheduler
from tests.interleavings.standins import Condition, Event, Mutex, installed
from tests.support.patience import PATIENCE


def schedule(seed: int, work: Callable[[Scheduler], object], *, priorities: bool = False) -> Scheduler:
    rng = random.Random(seed)
    scheduler = Scheduler(Priorities(rng, changes=3, points=30) if priorities else RandomWalk(rng), rng)
    scheduler.run(lambda: work(scheduler))
    return scheduler


def schedules_of(work: Callable[[Scheduler], object]) -> None:
    for seed in range(200):
        schedule(seed, work)


def outcomes(work: Callable[[Scheduler, list[Any]], object], *, priorities: bool = False) -> set[Any]:
    """What ``work`` leaves in its list, over all seeds."""
    found = set()
    for seed in range(200):
        left: list[Any] = []

        def leave(scheduler: Scheduler, left: list[Any] = left) -> None:
            work(scheduler, left)

        schedule(seed, leave, priorities=priorities)
        found.add(tuple(left))
    return found


def test_one_task_runs_at_a_time() -> None:
    def work(scheduler: Scheduler) -> None:
        running: list[int] = []

        def run(name: int) -> None:
            for _ in range(20):
                running.append(name)
                assert running == [name]
                sys.setswitchinterval(sys.getswitchinterval())
                running.remove(name)
                scheduler.point()

        for name in range(4):
            scheduler.start(str(name), partial(run, name))

    assert schedule(1, work).switches > 10


@pytest.mark.parametrize("priorities", [False, True])
def test_all_orders_are_seen(priorities: bool) -> None:
    def work(scheduler: Scheduler, left: list[Any]) -> None:
        tasks = [scheduler.start(name, partial(left.append, name)) for name in "abc"]
        for task in tasks:
            task.join()

    assert len(outcomes(work, priorities=priorities)) == 6


def test_an_unprotected_count_is_lost_and_a_protected_one_is_not() -> None:
    def work(scheduler: Scheduler, left: list[Any], protect: bool) -> None:
        lock, count = Mutex(scheduler, "a test's"), [0]

        def add() -> None:
            if protect:
                lock.acquire()
            seen = count[0]
            scheduler.point()
            count[0] = seen + 1
            if protect:
                lock.release()

        for task in [scheduler.start(str(number), add) for number in range(2)]:
            task.join()
        left.append(count[0])

    assert outcomes(partial(work, protect=False)) == {(1,), (2,)}
    assert outcomes(partial(work, protect=True)) == {(2,)}


def test_a_deadlock_is_found_and_says_where_everybody_is() -> None:
    def work(scheduler: Scheduler) -> None:
        locks = [Mutex(scheduler, "first"), Mutex(scheduler, "second")]

        def take(*order: int) -> None:
            for number in order:
                locks[number].acquire()
            for number in order:
                locks[number].release()

        for task in [scheduler.start("up", lambda: take(0, 1)), scheduler.start("down", lambda: take(1, 0))]:
            task.join()

    found = []
    for seed in range(50):
        try:
            schedule(seed, work)
        except BrokenSchedule as error:
            found.append(str(error))
    assert 0 < len(found) < 50
    assert all(
        "deadlock" in each and "up waits for second" in each and "down waits for first" in each for each in found
    )


def test_a_lost_wake_up_is_found() -> None:
    def work(scheduler: Scheduler) -> None:
        condition, there = Condition(scheduler, Mutex(scheduler, "a test's", reentrant=True)), list[int]()

        def wait() -> None:
            is_there = bool(there)
            with condition:
                if not is_there:
                    condition.wait()

        def tell() -> None:
            with condition:
                there.append(1)
                condition.notify_all()

        scheduler.start("waits", wait)
        scheduler.start("tells", tell)

    with pytest.raises(BrokenSchedule, match="lost"):
        schedules_of(work)


def test_who_goes_in_circles_is_found() -> None:
    def work(scheduler: Scheduler) -> None:
        while True:
            scheduler.point()

    with pytest.raises(BrokenSchedule, match="nobody gets anywhere"):
        schedule(1, work)


@pytest.mark.parametrize("seconds", [100.0, 1_000_000.0, None])
def test_who_waits_for_a_deadline_gets_somewhere_whatever_timers_do_meanwhile(seconds: float | None) -> None:
    """And who waits for one that is no end in itself, or for none, does not."""

    def work(scheduler: Scheduler) -> None:
        def tick() -> None:
            while True:
                scheduler.wait([], "the next round", 0.2)
                for _ in range(300):
                    scheduler.point()

        scheduler.start("a timer", tick, daemon=True)
        scheduler.wait([], "an item", seconds)

    if seconds == 100.0:
        assert schedule(1, work).points > MAX_POINTS
        return
    with pytest.raises(BrokenSchedule, match="nobody gets anywhere") as found:
        schedule(1, work)
    assert f"after {MAX_POINTS + 1} points" in str(found.value)


def test_what_a_task_raises_ends_the_run_and_unwinds_the_others() -> None:
    ended: list[str] = []

    def work(scheduler: Scheduler) -> None:
        event = Event(scheduler)

        def wait() -> None:
            try:
                event.wait()
            finally:
                ended.append("unwound")

        def fail() -> None:
            raise ValueError("this")

        scheduler.start("waits", wait)
        scheduler.start("fails", fail)
        event.wait()

    for seed in range(20):
        ended.clear()
        with pytest.raises(ValueError, match="this"):
            schedule(seed, work)
        assert len(ended) <= 1


def test_time_passes_when_nobody_can_run() -> None:
    def work(scheduler: Scheduler) -> None:
        assert not Event(scheduler).wait(5)
        scheduler.wait([], "time to pass", 2.5)
        assert scheduler.now == 7.5

    schedule(1, work)


def test_a_planned_stop_comes_at_its_point() -> None:
    stopped_at: list[int] = []
    rng = random.Random(1)
    scheduler = Scheduler(RandomWalk(rng), rng, stop_at=7)
    scheduler.on_stop = lambda: stopped_at.append(scheduler.points)

    def work() -> None:
        for _ in range(100):
            scheduler.point()

    scheduler.run(work)
    assert scheduler.stopped
    assert stopped_at == [7]


def test_lines_of_the_library_are_points() -> None:
    def points(gap: int) -> int:
        rng = random.Random(1)
        scheduler = Scheduler(RandomWalk(rng), rng, gap=gap)
        with installed(scheduler):
            queue = SimpleBlockingQueue[int]()

            def puts() -> None:
                for number in range(20):
                    queue.put(number)

            scheduler.run(lambda: scheduler.start("puts", puts))
        return scheduler.points

    assert points(1) > 2 * points(0)


def test_what_a_finaliser_has_left_is_done_by_a_task() -> None:
    rng, found = random.Random(1), []
    scheduler = Scheduler(RandomWalk(rng), rng)
    with installed(scheduler):
        scheduler.run(lambda: deferred.leave(lambda: found.append(scheduler.here())))
    assert [task and task.name for task in found] == ["what was deferred"]


def test_nothing_is_left_installed() -> None:
    before = (clock.threading, clock._timers, clock.SystemClock.monotonic)
    rng = random.Random(1)
    with installed(Scheduler(RandomWalk(rng), rng)):
        assert clock.threading is not threading
    assert (clock.threading, clock._timers, clock.SystemClock.monotonic) == before


def test_the_threads_of_the_process_keep_their_own_time() -> None:
    """One that looked at the virtual time would sleep until hours later, and all that the process does after this
    in the background would wait for it.
    """
    called, rng = threading.Event(), random.Random(1)
    real = clock._timers
    clock.SystemClock().call_later(0.3, called.set)
    with installed(Scheduler(RandomWalk(rng), rng)):
        real._ring()
        threading.Event().wait(0.1)
    assert called.wait(PATIENCE)


def test_an_order_of_locks_that_is_not_the_documented_one_is_found() -> None:
    def work(scheduler: Scheduler) -> None:
        with Mutex(scheduler, "R (Backlog.lock)"), Mutex(scheduler, "Q (LocalSource.lock)"):
            pass

    with pytest.raises(BrokenSchedule, match="order of locks"):
        schedule(1, work)


def test_a_lock_that_the_page_does_not_name_is_found() -> None:
    rng = random.Random(1)
    with installed(Scheduler(RandomWalk(rng), rng)), pytest.raises(AssertionError, match=r"locking\.md"):
        clock.threading.Lock()
