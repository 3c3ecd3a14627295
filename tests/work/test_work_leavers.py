"""Those who go without a word: tasks whose loop is closed, tasks and sessions that are thrown away."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from kestrelpy import QueueEmpty
from kestrelpy.testing import ManualClock
from kestrelpy.work import Job, Session, WorkQueue


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000_000)


@pytest.fixture
def queue(clock: ManualClock) -> Iterator[WorkQueue]:
    with WorkQueue(None, clock=clock) as made:
        yield made
        made._check()


def waiting_task(loop: asyncio.AbstractEventLoop, session: Session) -> asyncio.Task[Job]:
    task = loop.create_task(session.areserve())
    loop.run_until_complete(asyncio.sleep(0))
    return task


def throw_away(task: asyncio.Task[Any]) -> None:
    """It is collected while it waits, which asyncio complains of."""
    task.get_loop().set_exception_handler(lambda *_: None)


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_loop_that_is_closed_takes_no_job_with_it(queue: WorkQueue, rounds: int) -> None:
    session, other = queue.session(), queue.session()
    tasks = []
    for _ in range(rounds):
        loop = asyncio.new_event_loop()
        tasks.append(waiting_task(loop, session))
        loop.close()
    queue.put(b"for somebody who listens")
    assert queue.stats_job(1).state == "ready"
    job = other.reserve(0)
    assert job.id == 1
    assert not session.waiters
    for task in tasks:
        throw_away(task)
        task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_job_that_arrives_in_a_loop_that_ends_goes_back(queue: WorkQueue) -> None:
    """It is on its way, in the loop or in the future, and the task never looks."""
    for steps in (0, 1):
        session = queue.session()
        loop = asyncio.new_event_loop()
        task = waiting_task(loop, session)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        queue.put(b"job")
        if steps:
            loop.call_soon(loop.stop)
            loop.run_forever()  # it arrives, and the task's turn would be next
        loop.close()
        del task, loop
        gc.collect()
        assert queue.stats().ready == 1
        queue.clear()
        session.close()


def test_a_task_that_is_thrown_away_leaves_the_line(queue: WorkQueue) -> None:
    session, other = queue.session(), queue.session()
    coroutine = session.areserve()

    async def begin() -> None:
        coroutine.send(None)

    asyncio.run(begin())
    with queue._core.lock:  # the garbage collector may strike here
        coroutine.close()
    queue.put(b"job")
    assert not session.waiters
    assert other.reserve(0).id == 1


def test_a_task_that_is_cancelled_when_its_job_has_arrived_gives_it_back(queue: WorkQueue) -> None:
    async def main() -> None:
        session = queue.session()
        task = asyncio.ensure_future(session.areserve())
        await asyncio.sleep(0)
        queue.put(b"job")
        await asyncio.sleep(0)  # it arrives
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert queue.stats().ready == 1
        assert (await session.areserve()).id == 1
        with pytest.raises(QueueEmpty):
            await session.areserve(0)

    asyncio.run(main())


def test_sessions_that_nobody_has_are_no_more(queue: WorkQueue) -> None:
    for number in range(100):
        session = queue.session()
        session.watch(f"tube-{number}")
        session.use(f"used-{number}")
    del session
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert queue.stats().sessions == 0
    assert queue.tubes() == ["default"]
    assert queue.stats_tube("default").watching == 0


def test_a_session_lives_as_long_as_it_has_a_job_or_waits(queue: WorkQueue, clock: ManualClock) -> None:
    queue.put(b"job", ttr=5)
    queue.session(deadline_soon=False).reserve(0)
    gc.collect()
    assert (queue.stats().sessions, queue.stats().reserved) == (1, 1)
    future = queue.session().reserve_future()
    gc.collect()
    assert queue.stats().sessions == 2
    clock.advance(5)
    assert future.result(0).reserves == 2
    gc.collect()
    assert queue.stats().sessions == 1  # that of the second reservation


def test_a_session_that_goes_while_the_lock_is_held_is_noted(queue: WorkQueue) -> None:
    session = queue.session()
    session.watch("tube")
    with queue._core.lock:
        del session
        gc.collect()
    assert queue.tubes() == ["default"]
    queue._core._disturbed = True
    session = queue.session()
    session.watch("tube")
    queue._core._disturbed = True
    del session
    gc.collect()
    assert queue.tubes() == ["default"]
