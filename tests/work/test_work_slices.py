"""No call does all of it at once: many waiters, tubes, expired jobs; and what has expired is nobody's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from kestrelpy import QueueClosed, QueueEmpty
from kestrelpy.testing import ManualClock, MemoryDisk
from kestrelpy.work import DeadlineSoon, Job, JobNotFound, Session, WorkQueue, compaction, scheduler
from kestrelpy.work import core as core_module
from kestrelpy.work import session as session_module
from kestrelpy.work.core import Deliveries, WorkCore
from kestrelpy.work.scheduler import Scheduler


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000_000)


@pytest.fixture
def queue(clock: ManualClock) -> Iterator[WorkQueue]:
    with WorkQueue(None, clock=clock) as made:
        yield made
        made._check()


class Counted:
    """Counts calls of a method."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.calls = 0
        real: Callable[..., Any] = getattr(owner, name)

        def count(*arguments: Any) -> Any:
            self.calls += 1
            return real(*arguments)

        monkeypatch.setattr(owner, name, count)


# -- many who wait in one session ------------------------------------------------------------------------------------


def moved_in_line(queue: WorkQueue, waiters: int) -> int:
    """How many entries for wake-ups are made while so many wait in one session and are served."""
    session = queue.session()
    made = 0

    class Watched(type(queue._core.scheduler.waiting)):  # type: ignore[misc]
        def add(self, value: Any) -> None:
            nonlocal made
            made += 1
            super().add(value)

    queue._core.scheduler.waiting = Watched(queue._core.scheduler.waiting)
    futures = [session.reserve_future() for _ in range(waiters)]
    for number in range(waiters):
        queue.put(b"%d" % number)
    assert [future.result(0).id for future in futures] == list(range(1, waiters + 1))
    return made


def test_many_waiters_in_one_session_cost_no_more_each(queue: WorkQueue) -> None:
    assert moved_in_line(queue, 100) <= 2


def test_all_of_a_session_hear_of_its_deadline(queue: WorkQueue, clock: ManualClock) -> None:
    session, calm = queue.session(), queue.session(deadline_soon=False)
    queue.put(b"", ttr=10)
    queue.put(b"", ttr=5)
    long, short = session.reserve(0), session.reserve(0)
    futures = [session.reserve_future() for _ in range(3)]
    last = calm.reserve_future(timeout=6)
    clock.advance(3)
    short.touch()  # what was to be told of has moved
    clock.advance(3)
    assert not any(future.done() for future in futures)
    with pytest.raises(QueueEmpty):
        last.result(0)
    short.delete()
    clock.advance(2.9)
    assert not any(future.done() for future in futures)
    clock.advance(0.1)
    for future in futures:
        with pytest.raises(DeadlineSoon) as caught:
            future.result(0)
        assert caught.value.job_id == long.id
    assert not queue._core.scheduler.waiting


# -- many tubes ------------------------------------------------------------------------------------------------------


def test_changed_tubes_are_written_in_slices(monkeypatch: pytest.MonkeyPatch, clock: ManualClock) -> None:
    disk = MemoryDisk()
    monkeypatch.setattr(compaction, "SLICE", 10)
    queue = WorkQueue("/work", clock=clock, disk=disk, segment_bytes=8192, max_job_bytes=4000, checkpoint_interval=1000)
    for number in range(95):
        queue.put(b"", tube=f"tube-{number}")
    between: list[int] = []

    def yield_lock(_: WorkCore) -> None:
        """Others come: they put into a tube that is written already, and take what was there."""
        assert not queue._core.lock.locked()
        between.append(len(queue._core.scheduler.changed_tubes))
        queue.put(b"", tube="tube-0")
        queue.delete(1 + len(between))

    monkeypatch.setattr(WorkCore, "yield_lock", yield_lock)
    queue.checkpoint()
    monkeypatch.undo()
    assert len(between) == 9
    assert max(before - after for before, after in pairwise(between)) <= 10
    disk.kill()
    queue._abandon()
    with WorkQueue("/work", clock=clock, disk=disk, segment_bytes=8192, max_job_bytes=4000) as again:
        again._check()
        assert again.stats().total_jobs == 95 + 9
        assert again.stats_tube("tube-0").total_jobs == 1 + 9
        assert all(again.stats_tube(f"tube-{number}").total_jobs == 1 for number in range(10, 95))


def test_a_session_that_watches_many_is_closed_in_slices(queue: WorkQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "TIMER_SLICE", 5)
    monkeypatch.setattr(core_module, "CALL_SLICE", 5)
    session = queue.session()
    for number in range(35):
        session.watch(f"tube-{number}")
    futures = [session.reserve_future() for _ in range(35)]
    turns = Counted(monkeypatch, Session, "_close_some_locked")
    session.close()
    assert turns.calls >= 7
    assert queue.tubes() == ["default"]
    for future in futures:
        with pytest.raises(QueueClosed):
            future.result(0)
    assert queue.stats().sessions == 0


@pytest.fixture
def closing(queue: WorkQueue, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A session whose close takes many slices; job 1 is ready in a tube that it watches."""
    monkeypatch.setattr(session_module, "TIMER_SLICE", 1)
    monkeypatch.setattr(core_module, "CALL_SLICE", 0)
    session = queue.session()
    for number in range(10):
        session.watch(f"tube-{number}")
    queue.put(b"", tube="tube-0")
    return session


def between_slices(monkeypatch: pytest.MonkeyPatch, what: Callable[[], object]) -> None:
    """Do ``what`` once, after the first slice of a close, without the lock."""
    real = Deliveries.__exit__
    calls: list[None] = []

    def leave(self: Deliveries, *about: Any) -> None:
        real(self, *about)
        calls.append(None)
        if len(calls) == 1:
            what()

    monkeypatch.setattr(Deliveries, "__exit__", leave)


@pytest.mark.parametrize("reserve", ["reserve", "reserve_future", "reserve_many"])
def test_a_session_that_is_being_closed_reserves_nothing(
    queue: WorkQueue, closing: Session, monkeypatch: pytest.MonkeyPatch, reserve: str
) -> None:
    """It would keep the job until its time to run is over: nobody gives it back once more."""
    found: list[object] = []

    def what() -> None:
        try:
            found.append(getattr(closing, reserve)(*[5] * (reserve == "reserve_many"), timeout=0))
        except QueueClosed as error:
            found.append(error)

    between_slices(monkeypatch, what)
    closing.close()
    assert isinstance(found[0], QueueClosed)
    assert queue.stats().reserved == queue.stats().sessions == 0
    assert queue.stats_job(1).state == "ready"


def test_an_interrupt_between_two_slices_of_a_close_loses_none_of_it(
    queue: WorkQueue, closing: Session, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R13. No lock is held there, so nothing is repaired: the next calls and the timer do the rest."""
    futures = [closing.reserve_future() for _ in range(3)]  # the first has job 1

    def strike() -> None:
        raise KeyboardInterrupt

    between_slices(monkeypatch, strike)
    with pytest.raises(KeyboardInterrupt):
        closing.close()
    monkeypatch.undo()
    clock.advance(1)
    assert queue.stats().sessions == queue.stats().waiting == queue.stats().reserved == 0
    assert queue.tubes() == ["default", "tube-0"]
    assert queue.stats_job(1).state == "ready"
    for future in futures[1:]:
        with pytest.raises(QueueClosed):
            future.result(0)
    closing.close()
    queue._check()


def test_who_waits_for_the_end_of_a_pause_is_served_in_slices(queue: WorkQueue, clock: ManualClock) -> None:
    session = queue.session()
    queue.pause_tube("default", 5)
    futures = [session.reserve_future() for _ in range(300)]
    for _ in range(300):
        queue.put(b"")
    late = queue.session()
    with queue._core.lock:
        clock._elapsed_ns += 5_000_000_000  # and no timer has come
    assert queue.stats().reserved == 100  # one slice, by this call
    with pytest.raises(QueueEmpty):
        late.reserve(0)  # those who came first come first
    clock.advance(1)
    assert [future.result(0).id for future in futures] == list(range(1, 301))


# -- what has expired ------------------------------------------------------------------------------------------------


@pytest.fixture
def behind(queue: WorkQueue, clock: ManualClock) -> WorkQueue:
    """More things are due than a call does before its own, and job 1 has expired: nobody has come to drop it."""
    queue.put(b"expired", key="key", expires_in=5)
    queue.put(b"buried", tube="other", expires_in=5)
    with queue.session() as session:
        session.watch("other")
        session.ignore("default")
        session.reserve(0).bury()
    queue.put_many([b""] * 300, tube="many", delay=5)
    with queue._core.lock:
        clock._elapsed_ns += 5_000_000_000
    return queue


@pytest.mark.parametrize(
    "call",
    [
        lambda queue: queue.peek(1),
        lambda queue: queue.session().reserve_job(1),
        lambda queue: queue.stats_job(1),
        lambda queue: queue.delete(1),
        lambda queue: queue.move(1, "elsewhere"),
        lambda queue: queue.kick_job(2),
        lambda queue: queue.peek_ready(),
        lambda queue: queue.peek_buried("other"),
    ],
)
def test_what_has_expired_is_not_there(behind: WorkQueue, call: Callable[[WorkQueue], object]) -> None:
    with pytest.raises(JobNotFound):
        call(behind)
    assert behind._core.scheduler.next_due <= behind._core.clock.monotonic()  # there is more to be done still


def test_what_has_expired_is_in_no_list_and_bars_no_key(behind: WorkQueue) -> None:
    assert list(behind.jobs()) == []
    assert behind.kick(1, "other") == 0
    assert behind.put(b"new", key="key") == 303
    assert behind.peek_ready().id == 303


def test_what_has_expired_is_not_given_out_at_the_end_of_a_pause(queue: WorkQueue, clock: ManualClock) -> None:
    queue.pause_tube("default", 5)
    queue.put(b"expired", expires_in=5)
    queue.put(b"alive")
    future = queue.session().reserve_future()
    clock.advance(5)
    assert future.result(0).id == 2


def test_a_key_is_its_new_jobs_when_the_old_one_expires_again(clock: ManualClock) -> None:
    """A crash between the new job and the end of the old one: both are there at the opening."""
    disk = MemoryDisk()
    options: dict[str, Any] = {"clock": clock, "disk": disk, "segment_bytes": 8192, "max_job_bytes": 4000}
    queue = WorkQueue("/work", **options)
    queue.put(b"old", key="key", expires_in=5)
    queue.put_many([b""] * 300, delay=5)
    with queue._core.lock:
        clock._elapsed_ns += 5_000_000_000
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(WorkCore, "_write_expired_locked", lambda self: self.scheduler.expired.clear())
        new = queue.put(b"new", key="key")
    disk.kill()
    queue._abandon()
    with WorkQueue("/work", **options) as again:
        assert again.stats().total_jobs == 302
        assert again._core.scheduler.keys == {("default", "key"): new}
        again._check()


def test_very_many_expired_jobs_are_passed_over_in_slices(
    queue: WorkQueue, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MOST_DROPPED", 50)
    calls = Counted(monkeypatch, Scheduler, "take")
    takes: tuple[Callable[[Session], Job], ...] = (
        lambda session: session.reserve(0),
        lambda session: session.reserve_future(0).result(0),
    )
    for make in takes:
        queue.put_many([b""] * 1000, expires_in=5)
        alive = queue.put(b"alive")
        with queue._core.lock:
            clock._elapsed_ns += 5_000_000_000
        calls.calls = 0
        assert make(queue.session()).id == alive
        assert calls.calls >= 3
        queue.put_many([b""] * 1000, expires_in=5)
        with queue._core.lock:
            clock._elapsed_ns += 5_000_000_000
        with pytest.raises(QueueEmpty):
            make(queue.session())


@pytest.mark.parametrize("call", ["put", "move"])
def test_the_key_of_the_last_job_of_a_tube_is_free_when_it_has_expired(
    queue: WorkQueue, clock: ManualClock, call: str
) -> None:
    """More is due than a call does, so the key's check drops the job, and its tube with it."""
    moved = queue.put(b"new", key="k")
    queue.put_many([b""] * (core_module.CALL_SLICE + 1), expires_in=1)
    queue.put(b"expired", tube="t", key="k", expires_in=1)
    clock._elapsed_ns += 2_000_000_000  # no timer has run yet
    job_id = queue.put(b"new", tube="t", key="k") if call == "put" else moved
    if call == "move":
        queue.move(moved, "t")
    queue._check()
    with queue.session() as session:
        session.watch("t")
        session.ignore("default")
        assert session.reserve(0).id == job_id
