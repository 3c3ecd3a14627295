"""Sessions: what they watch, whom a job goes to, and what becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from kestrelpy import InvalidName, QueueClosed, QueueEmpty
from kestrelpy.testing import ManualClock
from kestrelpy.work import DeadlineSoon, Job, JobNotFound, NotReserved, Session, WorkQueue
from kestrelpy.work.core import WorkCore


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000_000)


@pytest.fixture
def queue(clock: ManualClock) -> Iterator[WorkQueue]:
    with WorkQueue(None, clock=clock) as made:
        yield made
        made._check()


def test_a_session_of_some_tubes_watches_no_other(queue: WorkQueue) -> None:
    for tube in ("default", "a", "b"):
        queue.put(tube.encode(), tube=tube)
    with queue.session("b", "a", "b") as session:
        assert (session.used, session.watching) == ("default", ("b", "a"))
        assert [session.reserve(timeout=0).body for _ in range(2)] == [b"a", b"b"]
        with pytest.raises(QueueEmpty):
            session.reserve(timeout=0)
    with queue.session("a", "default") as session:
        assert session.watching == ("default", "a")
    with pytest.raises(InvalidName):
        queue.session("fine", "a b")
    with pytest.raises(TypeError, match="each an argument of its own"):
        queue.session(["a", "b"])  # type: ignore[arg-type]
    assert queue.tubes() == ["default", "a", "b"]
    assert (queue.stats().sessions, queue.stats_tube("default").watching) == (0, 0)


def test_tubes_are_there_as_long_as_somebody_needs_them(queue: WorkQueue) -> None:
    session = queue.session()
    assert (session.used, session.watching) == ("default", ("default",))
    assert session.watch("a") == 2
    assert session.watch("a") == 2
    session.use("b")
    assert queue.tubes() == ["default", "a", "b"]
    assert session.watching == ("default", "a")
    stats = queue.stats_tube("a"), queue.stats_tube("b")
    assert [(each.watching, each.using) for each in stats] == [(1, 0), (0, 1)]
    assert session.ignore("default") == 1
    assert session.ignore("nowhere") == 1
    with pytest.raises(ValueError, match="at least one"):
        session.ignore("a")
    with pytest.raises(InvalidName):
        session.watch("a b")
    with pytest.raises(InvalidName):
        session.use("-")
    session.use("default")
    assert queue.tubes() == ["default", "a"]
    session.close()
    session.close()
    assert queue.tubes() == ["default"]
    for call in (session.reserve, lambda: session.watch("x"), lambda: session.use("x"), lambda: session.touch(1)):
        with pytest.raises(QueueClosed):
            call()


def test_the_most_urgent_job_of_all_watched_tubes_comes_first(queue: WorkQueue) -> None:
    with queue.session() as session:
        session.watch("b")
        for tube, priority in (("default", 5), ("b", 5), ("b", 4), ("unseen", 0), ("default", 2**32 - 1), ("b", 0)):
            queue.put(b"", tube=tube, priority=priority)
        assert [job.id for job in session.reserve_many(10, timeout=0)] == [6, 3, 1, 2, 5]
        with pytest.raises(ValueError, match="at least 1"):
            session.reserve_many(0)
        with pytest.raises(ValueError, match="negative"):
            session.reserve(-1)
        assert session.reserved == (6, 3, 1, 2, 5)


def test_those_who_wait_are_served_in_the_order_of_their_coming(queue: WorkQueue) -> None:
    sessions = [queue.session() for _ in range(6)]
    for session in sessions[::2]:
        session.watch("b")
    futures = [session.reserve_future() for session in sessions]
    assert queue.stats().waiting == 6
    assert queue.stats_tube("b").waiting == 3
    queue.put(b"", tube="b")
    assert [future.done() for future in futures] == [True] + [False] * 5
    queue.put_many([b""] * 3)
    assert [future.result(0).id if future.done() else 0 for future in futures] == [1, 2, 3, 4, 0, 0]
    assert futures[4].cancel()
    queue.put(b"", tube="b")
    assert not futures[5].done()
    queue.put(b"")
    assert futures[5].result(0).id == 6
    for session in sessions:
        session.close()
    assert queue.stats().ready == 6


def test_a_job_that_comes_back_goes_to_who_waits(queue: WorkQueue, clock: ManualClock) -> None:
    holder, waiter = queue.session(), queue.session()
    queue.put(b"", ttr=5)
    job = holder.reserve(0)
    future = waiter.reserve_future()
    clock.advance(5)
    assert future.result(0).reserves == 2
    with pytest.raises(NotReserved):
        job.delete()
    again = holder.reserve_future()
    waiter.close()
    assert again.result(0).id == job.id
    again.result().release(delay=3)
    future = holder.reserve_future(timeout=3.5)
    clock.advance(3)
    future.result(0).bury()
    future = holder.reserve_future()
    queue.kick(1)
    assert future.result(0).reserves == 5


def test_a_handle_is_good_for_its_own_reservation_only(queue: WorkQueue, clock: ManualClock) -> None:
    with queue.session(deadline_soon=False) as session:
        queue.put(b"", ttr=5)
        first = session.reserve(0)
        clock.advance(5)
        second = session.reserve(0)
        for call in (first.delete, first.release, first.bury, first.touch):
            with pytest.raises(NotReserved):
                call()
        assert first.time_left == 0
        assert second.time_left == 5
        clock.advance(4)
        second.touch()
        clock.advance(4)
        assert second.time_left == 1
        for wrong in (-1, float("inf")):
            with pytest.raises(ValueError, match="delay"):
                session.release(1, delay=wrong)
        assert second.release(priority=3, delay=0.5) is True
        assert queue.peek(1).time_left == 0.5
        with pytest.raises(NotReserved):
            session.bury(1)
        with pytest.raises(JobNotFound):
            session.bury(2)


def test_wrong_priorities_change_nothing(queue: WorkQueue) -> None:
    with queue.session() as session:
        queue.put(b"")
        job = session.reserve(0)
        for call in (
            lambda: job.release(priority=-1),
            lambda: job.bury(priority=2**32),
            lambda: job.bury(priority=1.5),  # type: ignore[arg-type]
        ):
            with pytest.raises(ValueError, match="priority"):
                call()
        assert session.reserved == (1,)


def test_a_job_as_a_context_manager(queue: WorkQueue) -> None:
    with queue.session() as session:
        queue.put_many([b"a", b"b", b"c", b"d"])
        with session.reserve(0):
            pass
        with pytest.raises(KeyError), session.reserve(0):
            raise KeyError
        assert queue.stats_job(2).releases == 1
        with session.reserve(0) as job:
            job.bury()
        assert queue.stats_job(2).state == "buried"
        with queue.peek(3) as seen:
            assert seen.body == b"c"
        assert "b'c'" in repr(seen)
        assert queue.stats().ready == 2


def test_deadline_soon(queue: WorkQueue, clock: ManualClock) -> None:
    with queue.session() as session, queue.session(deadline_soon=False) as calm, queue.session() as other:
        queue.put(b"", ttr=3)
        queue.put(b"", ttr=2)
        jobs = session.reserve_many(2)
        future = session.reserve_future()
        clock.advance(0.9)
        assert not future.done()
        clock.advance(0.1)
        soon = future.exception(0)
        assert isinstance(soon, DeadlineSoon)
        assert soon.job_id == 2
        with pytest.raises(DeadlineSoon):
            session.reserve(0)
        with pytest.raises(QueueEmpty):
            other.reserve(0)
        queue.put(b"ready", ttr=60)
        assert session.reserve(0).id == 3
        session.touch(2)
        with pytest.raises(QueueEmpty):
            session.reserve(0)
        for job in jobs:
            job.delete()
        queue.put(b"", ttr=1)
        calm.reserve(0)
        future = calm.reserve_future(0.5)
        clock.advance(0.5)
        assert isinstance(future.exception(0), QueueEmpty)


def test_deadline_soon_of_one_among_many(queue: WorkQueue, clock: ManualClock) -> None:
    with queue.session() as session:
        queue.put_many([b""] * 100, ttr=50)
        queue.put(b"", ttr=10, priority=2**32 - 1)
        assert len(session.reserve_many(200)) == 101
        future = session.reserve_future()
        session.delete(5)
        clock.advance(8.5)
        assert not future.done()
        queue._check()
        session.touch(101)
        clock.advance(1)
        assert not future.done()
        clock.advance(8)
        soon = future.exception(0)
        assert isinstance(soon, DeadlineSoon)
        assert soon.job_id == 101
        for job_id in session.reserved:
            session.delete(job_id)
        queue._check()


def test_a_reserve_that_waits_is_told_of_a_reservation_made_since(queue: WorkQueue, clock: ManualClock) -> None:
    with queue.session() as session:
        future = session.reserve_future()
        queue.put(b"", tube="other", ttr=2)
        session.reserve_job(1)
        clock.advance(1)
        assert isinstance(future.exception(0), DeadlineSoon)


def test_a_blocked_thread(queue: WorkQueue) -> None:
    with queue.session() as session:
        with pytest.raises(QueueEmpty):
            session.reserve(0.01)
        got: list[object] = []

        def wait(waiting: Session) -> None:
            try:
                got.append(waiting.reserve(30))
            except QueueClosed as error:
                got.append(error)

        for end in (lambda waiting: waiting.close(), lambda waiting: queue.put(b"x")):
            waiting = queue.session()
            thread = threading.Thread(target=wait, args=(waiting,))
            thread.start()
            while not queue.stats().waiting:
                pass
            end(waiting)
            thread.join(10)
            waiting.close()
        assert isinstance(got[0], QueueClosed)
        assert isinstance(got[1], Job)
        assert queue.stats().ready == 1


def test_a_tube_is_there_as_long_as_somebody_waits_for_it(queue: WorkQueue) -> None:
    with queue.session() as session:
        session.watch("t2")
        future = session.reserve_future()
        session.ignore("t2")
        queue.put(b"x", tube="t2")
        assert future.result(0).tube == "t2"
        queue.put(b"y", tube="t2")
        assert queue.tubes() == ["default", "t2"]
        assert [job.id for job in queue.jobs("t2")] == [2, 1]
        queue._check()


def test_a_session_that_held_very_many_gives_them_back_in_slices(queue: WorkQueue, clock: ManualClock) -> None:
    session = queue.session()
    queue.put_many([b""] * 5000)
    assert len(session.reserve_many(5000)) == 5000
    session.close()
    assert queue.stats().reserved > 0
    queue._check()
    clock.advance(0.1)
    assert queue.stats().reserved == 0
    assert queue.stats().ready == 5000


def test_a_cancelled_future_gives_back_what_was_on_its_way(queue: WorkQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    future = queue.session().reserve_future()
    with monkeypatch.context() as patch:
        patch.setattr(WorkCore, "notify", lambda self: None)  # as if the thread that puts were stopped here
        queue.put(b"")
        assert queue.stats_job(1).state == "reserved"
        assert future.cancel()
    queue._core.notify()
    assert queue.stats_job(1).state == "ready"
    assert queue.stats_job(1).reserves == 0
    with pytest.raises(CancelledError):
        future.result(0)


def test_a_callback_that_raises_keeps_nobody_from_being_told(tmp_path: Path) -> None:
    queue = WorkQueue(tmp_path)

    def leave(_: object) -> None:
        raise SystemExit

    waiting = [queue.session().reserve_future() for _ in range(3)]
    for future in waiting[:2]:
        future.add_done_callback(leave)
    with pytest.raises(SystemExit):
        queue.close()
    assert all(isinstance(future.exception(0), QueueClosed) for future in waiting)
    WorkQueue(tmp_path).close()


def test_a_reserve_in_vain_leaves_nothing_for_the_collector(queue: WorkQueue) -> None:
    with queue.session() as session:

        def in_vain() -> None:
            for timeout in (0, 0.001):
                with contextlib.suppress(QueueEmpty):
                    session.reserve(timeout)
            session.reserve_future(0).exception(0)
            waiting = session.reserve_future()
            queue.put(b"")
            waiting.result(0).delete()

        in_vain()
        gc.collect()
        gc.disable()
        try:
            in_vain()
            assert gc.collect() == 0
        finally:
            gc.enable()


def test_asyncio(queue: WorkQueue) -> None:
    async def scene() -> None:
        session = queue.session()
        queue.put(b"a")
        assert (await session.areserve()).id == 1
        task = asyncio.ensure_future(session.areserve())
        await asyncio.sleep(0)
        queue.put(b"b")
        assert (await task).id == 2
        task = asyncio.ensure_future(session.areserve())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert queue.stats().waiting == 0
        task = asyncio.ensure_future(session.areserve())
        await asyncio.sleep(0)
        queue.put(b"c")  # it is the task's from here on
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert queue.stats_job(3).state == "ready"
        assert queue.stats_job(3).reserves == 0
        session.reserve_job(3)
        with pytest.raises(QueueEmpty):
            await session.areserve(0)

    asyncio.run(scene())


def test_a_repair_leaves_no_tube_that_only_the_line_needed() -> None:
    with WorkQueue(None) as queue:
        session = queue.session()
        session.watch("gone")
        future = session.reserve_future()
        core = queue._core
        with core.lock:  # as an interrupt in the middle of close() leaves it
            session.closed = True
            core._disturbed = core.must_check = True
        queue.stats()
        assert isinstance(future.exception(1), QueueClosed)
        queue.stats()
        assert queue.tubes() == ["default"]
        queue._check()
