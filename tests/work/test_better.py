"""Where the work queue is better than its ancestors: each of their faults, and each wish never granted, is a test here.

The ids are those of the pages on beanstalkd (BD) and small-stalk (SS) that the queue was written against. Work is
counted by the calls that the interpreter makes, so that no test here depends on how fast a machine is.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from kestrelpy import DurabilityUnknown, QueueDiskFull, QueueEmpty, QueueFull
from kestrelpy.clock import Timer
from kestrelpy.testing import CrashingDisk, FailingDisk, ManualClock, PowerModel
from kestrelpy.work import DeadlineSoon, DuplicateJob, Job, NotReserved, WorkQueue
from tests.support.patience import PATIENCE
from tests.work.pair import no_room, vanish

START_MS = 1_700_000_000_000
MANY = 5_000


class Place:
    """A disk, and one queue on it after the other."""

    def __init__(self) -> None:
        self.disk = CrashingDisk()
        self.failing = FailingDisk(self.disk)
        self.clock = ManualClock(START_MS)
        self.queues: list[WorkQueue] = []

    def open(self, **options: Any) -> WorkQueue:
        options = {"segment_bytes": 4096, "max_job_bytes": 2000, "clock": self.clock, "disk": self.failing, **options}
        self.queues.append(WorkQueue("/data", **options))
        return self.queues[-1]

    def kill(self, seconds: float = 0, **options: Any) -> WorkQueue:
        """The process dies; another one opens the queue after so many seconds."""
        left = self.disk.after_kill()
        vanish(self.queues.pop(), self.disk)
        self.disk, self.failing = left, FailingDisk(left)
        self.clock = ManualClock(self.clock.time_ns() // 1_000_000 + round(seconds * 1000))
        return self.open(**options)


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.failing.disarm()
    for queue in made.queues:
        with contextlib.suppress(DurabilityUnknown):
            queue.close()


@pytest.fixture
def memory() -> Iterator[WorkQueue]:
    """A queue in memory alone."""
    with WorkQueue(None, clock=ManualClock(START_MS)) as queue:
        yield queue


def calls_of(work: Callable[[], object]) -> int:
    """How many calls the interpreter makes for this, of Python's functions and of C's."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # it would count what it finds
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


class SlicingClock(ManualClock):
    """Tells what changes in one call that it makes."""

    def __init__(self, figure: Callable[[], int]) -> None:
        super().__init__(START_MS)
        self.figure = figure
        self.most = 0

    def call_later(self, seconds: float, callback: Callable[[], object], **how: Any) -> Timer:
        def measured() -> None:
            before = self.figure()
            callback()
            self.most = max(self.most, abs(self.figure() - before))

        return super().call_later(seconds, measured, **how)


# -- it refuses instead of dying -------------------------------------------------------------------------------------


def test_bd_p1_more_jobs_than_allowed_are_refused(place: Place) -> None:
    queue = place.open(max_jobs=3)
    first = queue.put(b"1")
    queue.put_many([b"2", b"3"], delay=10)
    with pytest.raises(QueueFull):
        queue.put(b"4")
    queue.delete(first)
    with pytest.raises(QueueFull):
        queue.put_many([b"4", b"5"])
    assert queue.stats().delayed == 2
    assert queue.put(b"4") == 4


def test_bd_p1_more_bytes_than_allowed_are_refused(place: Place) -> None:
    queue = place.open(max_bytes=1000)
    first = queue.put(bytes(600))
    with pytest.raises(QueueFull):
        queue.put(bytes(600))
    assert queue.stats().bytes == 600
    queue.delete(first)
    queue.put(bytes(600))


def test_bd_p1_the_limits_count_what_was_there_before(place: Place) -> None:
    place.open(max_jobs=2).put_many([b"1", b"2"])
    queue = place.kill(max_jobs=2)
    with pytest.raises(QueueFull):
        queue.put(b"3")


def test_bd_p1_a_full_disk_refuses_puts(place: Place) -> None:
    queue = place.open()
    queue.put(b"before")
    with no_room(place.disk):
        there = put_until(queue, QueueDiskFull)
        assert queue.stats().ready == there
        assert sum(1 for _ in queue.jobs("default")) == there
    queue.put(b"after")
    assert place.kill().stats().ready == there + 1


def put_until(queue: WorkQueue, error: type[Exception]) -> int:
    """How many jobs there are when a put fails."""
    for _ in range(20):
        there = queue.stats().ready
        try:
            queue.put(bytes(1000))
        except error:
            return there
    raise AssertionError("no put has failed")


# -- no work is unbounded --------------------------------------------------------------------------------------------


def test_bd_p4_many_that_fall_due_at_once_come_in_slices() -> None:
    clock = SlicingClock(lambda: queue.stats().ready)
    with WorkQueue(None, clock=clock) as queue:
        queue.put_many([b""] * MANY, delay=1)
        clock.advance(1)
        clock.advance(0.1)  # between the slices others have a moment
        assert queue.stats().ready == MANY
        assert 0 < clock.most <= MANY / 4


def test_bd_p4_many_that_time_out_at_once_come_in_slices() -> None:
    clock = SlicingClock(lambda: queue.stats().reserved)
    with WorkQueue(None, clock=clock) as queue, queue.session() as session:
        queue.put_many([b""] * MANY, ttr=1)
        assert len(session.reserve_many(MANY, 0)) == MANY
        clock.advance(1)
        clock.advance(0.1)  # between the slices others have a moment
        assert queue.stats().timeouts == MANY
        assert 0 < clock.most <= MANY / 4


@pytest.mark.parametrize("state", ["buried", "delayed"])
def test_bd_p5_a_kick_of_many_lets_others_go_between(memory: WorkQueue, state: str) -> None:
    """The lock is had again and again, and for a part of them each time."""
    memory.put_many([b""] * MANY, delay=100 if state == "delayed" else 0)
    with memory.session() as session:
        if state == "buried":
            for job in session.reserve_many(MANY, 0):
                job.bury()
        seen = between_slices(memory, lambda: memory.kick(MANY), lambda: memory.stats().ready)
    assert memory.stats().ready == MANY
    assert max(b - a for a, b in zip([0, *seen], seen, strict=False)) <= MANY / 4


def between_slices(queue: WorkQueue, work: Callable[[], object], figure: Callable[[], int]) -> list[int]:
    """What others see whenever the queue's lock is let go of while this works."""
    lock, seen = queue._core.lock, list[int]()

    class Watched:
        looking = False

        def __enter__(self) -> None:
            self.acquire()

        def __exit__(self, *error: Any) -> None:
            self.release()

        def acquire(self) -> None:
            lock.acquire()

        def release(self) -> None:
            lock.release()
            if not self.looking:
                self.looking = True
                seen.append(figure())
                self.looking = False

    queue._core.lock = cast("threading.Lock", Watched())
    try:
        work()
    finally:
        queue._core.lock = lock
    return seen


def test_bd_p10_a_delayed_job_whose_time_has_come_is_ready_on_a_disk_without_room(place: Place) -> None:
    """There it is buried if there is no memory for it at that moment."""
    queue = place.open()
    queue.put_many([b""] * 50, delay=1)
    with no_room(place.disk):
        there = put_until(queue, QueueDiskFull)
        place.clock.advance(2)
    assert (queue.stats().ready, queue.stats().buried, queue.stats().delayed) == (50 + there, 0, 0)


def calls_of_a_tick(tubes: int) -> int:
    clock = ManualClock(START_MS)
    with WorkQueue(None, clock=clock) as queue:
        for at in range(tubes):
            queue.put(b"", tube=f"tube{at}", delay=1000 + at)
        queue.put(b"", delay=1)
        count = calls_of(lambda: clock.advance(2))
        assert queue.stats().ready == 1
    return count


def test_bd_p11_a_tick_does_not_look_at_every_tube() -> None:
    assert calls_of_a_tick(1000) <= calls_of_a_tick(4) + 20


def test_bd_p2_no_put_does_what_others_should_have_done(memory: WorkQueue) -> None:
    """No put, take or delete is larger than another, however many jobs there are: nothing grows but by one."""
    with memory.session() as session:
        counts: list[int] = []
        for _ in range(3000):
            counts.append(calls_of(lambda: memory.put(b"", priority=len(counts) % 7)))
        assert max(counts) <= 4 * sorted(counts)[len(counts) // 2]
        counts = [calls_of(lambda: session.reserve(0).delete()) for _ in range(3000)]
        assert max(counts) <= 4 * sorted(counts)[len(counts) // 2]


# -- what survives ---------------------------------------------------------------------------------------------------


def test_bd_w5_the_priority_of_a_release_survives(place: Place) -> None:
    queue = place.open()
    job_id = queue.put(b"", priority=100)
    queue.session().reserve(0).release(priority=7)
    queue = place.kill()
    assert queue.stats_job(job_id).priority == 7
    assert queue.stats_job(job_id).releases == 1


def test_bd_w5_the_delay_of_a_release_survives(place: Place) -> None:
    queue = place.open()
    job_id = queue.put(b"")
    queue.session().reserve(0).release(delay=10)
    queue = place.kill(4)
    assert queue.stats_job(job_id).state == "delayed"
    assert queue.stats_job(job_id).time_left == pytest.approx(6, abs=0.01)
    place.clock.advance(6)
    assert queue.stats_job(job_id).state == "ready"


def test_bd_w5_a_pause_survives(place: Place) -> None:
    queue = place.open()
    queue.put(b"")
    queue.pause_tube("default", 10)
    queue = place.kill(4)
    session = queue.session()
    with pytest.raises(QueueEmpty):
        session.reserve(0)
    assert queue.stats_tube("default").pause_left == pytest.approx(6, abs=0.01)
    place.clock.advance(6)
    assert session.reserve(0).body == b""


def test_bd_w6_the_buried_keep_their_order_and_their_counts(place: Place) -> None:
    queue = place.open()
    ids = queue.put_many([b"%d" % at for at in range(6)])
    session = queue.session()
    order = [ids[at] for at in (3, 0, 5, 1, 4, 2)]
    for job_id in order:
        session.reserve_job(job_id).bury()
    for _ in range(3):
        queue = place.kill()
    assert [queue.stats_job(job_id).buries for job_id in order] == [1] * 6
    found = []
    while queue.stats_tube("default").buried:
        found.append(queue.peek_buried().id)
        assert queue.kick(1) == 1
    assert found == order


def test_bd_w7_ids_are_not_used_again(place: Place) -> None:
    queue = place.open()
    ids = queue.put_many([b""] * 20)
    for job_id in ids:
        queue.delete(job_id)
    queue.checkpoint()
    queue = place.kill()
    assert queue.put(b"") == 21
    queue.delete(21)
    queue.close()
    place.queues.clear()
    assert place.open().put(b"") == 22


def test_bd_w12_the_counters_survive(place: Place) -> None:
    queue = place.open()
    job_id = queue.put(b"", ttr=1)
    gone = queue.put(b"")
    queue.delete(gone)
    session = queue.session()
    session.reserve(0)
    place.clock.advance(1)
    session.reserve(0).release()
    session.reserve(0).bury()
    queue.kick(1)
    for _ in range(3):
        queue = place.kill()
        job, stats = queue.stats_job(job_id), queue.stats()
        assert (job.timeouts, job.releases, job.buries, job.kicks, job.reserves) == (1, 1, 1, 1, 3)
        assert (stats.total_jobs, stats.timeouts) == (2, 1)


# -- errors of the disk are told -------------------------------------------------------------------------------------


def test_bd_w8_a_write_error_is_an_error_to_who_puts(place: Place) -> None:
    queue = place.open()
    queue.put(b"before")
    place.failing.arm(errno.EIO, sticky=True, kinds={"write", "grow", "create", "store"})
    there = put_until(queue, OSError)
    assert queue.stats().ready == there
    place.failing.disarm()


def test_bd_w9_a_sync_that_fails_is_an_error_to_who_puts_and_to_all_after(place: Place) -> None:
    queue = place.open(sync="always")
    queue.put(b"before")
    place.failing.arm(errno.EIO, kinds={"sync"})
    with pytest.raises(DurabilityUnknown):
        queue.put(b"")
    with pytest.raises(DurabilityUnknown):
        queue.put(b"")
    with contextlib.suppress(DurabilityUnknown):
        queue.close()
    place.queues.clear()
    assert place.open().peek(1).body == b"before"


@pytest.mark.parametrize("meanwhile", ["nothing", "time runs out", "a session is closed", "more is counted"])
def test_bd_w9_a_sync_that_fails_in_the_background_is_told_by_close_at_the_latest(place: Place, meanwhile: str) -> None:
    queue = place.open(sync=0.1)
    queue.put(b"job", ttr=1)
    queue.put(b"expires", expires_in=2.0)
    session = queue.session()
    session.reserve(0)
    place.failing.arm(errno.EIO, kinds={"sync"})
    place.clock.advance(0.2)
    if meanwhile == "time runs out":
        place.clock.advance(5.0)
    elif meanwhile == "a session is closed":
        session.close()
    elif meanwhile == "more is counted":
        session.reserve(0)
    with pytest.raises(DurabilityUnknown):
        queue.close()
    queue.close()
    place.queues.clear()


def test_what_a_put_has_raised_is_not_raised_by_close_whatever_goes_on_meanwhile(place: Place) -> None:
    """A background task that saw no error when it began says nothing of what callers have got since."""
    queue = place.open(sync="always")
    begun, go_on = threading.Event(), threading.Event()

    def maintain() -> None:
        with queue._core.unreported():
            begun.set()
            go_on.wait(PATIENCE)

    background = threading.Thread(target=maintain)
    background.start()
    assert begun.wait(PATIENCE)
    place.failing.arm(errno.EIO, kinds={"sync"})
    with pytest.raises(DurabilityUnknown):
        queue.put(b"")
    go_on.set()
    background.join(PATIENCE)
    queue.close()
    place.queues.clear()


def test_bd_w14_a_release_that_fails_leaves_the_job_with_its_holder(place: Place) -> None:
    queue = place.open()
    job_id = queue.put(b"", priority=9)
    session = queue.session()
    session.reserve(0)
    queue.put_many([bytes(1000)] * 3, tube="other")
    with no_room(place.disk):
        for _ in range(300):
            try:
                session.release(job_id, priority=9, delay=1000)
            except QueueDiskFull:
                break
            queue.kick_job(job_id)
            session.reserve(0)
        else:
            raise AssertionError("the disk was never full")
        assert session.reserved == (job_id,)
        assert queue.stats_job(job_id).state == "reserved"
    session.release(job_id, delay=1000)
    assert queue.stats_job(job_id).state == "delayed"


def test_bd_w3_a_delete_needs_no_room(place: Place) -> None:
    queue = place.open()
    ids = queue.put_many([bytes(30)] * 40)
    session = queue.session()
    session.reserve_many(20, 0)
    with no_room(place.disk):
        put_until(queue, QueueDiskFull)
        for job_id in ids:
            session.delete(job_id)
        left = queue.stats().ready
    place.clock.advance(2)
    assert place.kill().stats().ready == left


@pytest.mark.parametrize("opened_again", [False, True])
def test_bd_w3_a_delete_on_a_full_disk_survives_the_process(place: Place, opened_again: bool) -> None:
    """As long as there is room in a block of a file that is there."""
    queue = place.open()
    ids = queue.put_many([bytes(30)] * 40)
    place.clock.advance(2)  # the totals are written, and know of these ids
    if opened_again:
        queue = place.kill()
    session = queue.session()
    with no_room(place.disk, block=4096):
        put_until(queue, QueueDiskFull)
        for job_id in ids[:20]:
            session.delete(job_id)
        left = queue.stats().ready
    assert place.kill().stats().ready == left


def test_bd_w11_a_step_of_the_clock_moves_no_deadline(place: Place) -> None:
    queue = place.open()
    delayed = queue.put(b"", delay=10)
    queue.put(b"", tube="held", ttr=10)
    queue.put(b"", tube="paused", expires_in=10)
    queue.pause_tube("paused", 10)
    session = queue.session()
    session.watch("held")
    held = session.reserve(0).id
    for jump in (3600, -7200):
        place.clock.jump(jump)
        place.clock.advance(4)
        assert queue.stats_job(delayed).state == "delayed"
        assert queue.stats_job(held).state == "reserved"
        assert queue.stats_tube("paused").pause_left > 0
    assert queue.stats_job(delayed).time_left == pytest.approx(2)
    place.clock.advance(2)
    assert {queue.stats_job(delayed).state, queue.stats_job(held).state} == {"ready"}
    assert queue.stats().ready == 2


# -- fairness, and what one old job does -----------------------------------------------------------------------------


def test_bd_s7_six_who_wait_are_served_in_their_order(memory: WorkQueue) -> None:
    sessions = [memory.session() for _ in range(6)]
    futures = [session.reserve_future() for session in sessions]
    ids = [memory.put(b"") for _ in range(6)]
    assert [future.result(0).id for future in futures] == ids


def test_bd_s7_whoever_comes_back_stands_at_the_end(memory: WorkQueue) -> None:
    first, second = memory.session(), memory.session()
    one, two = first.reserve_future(), second.reserve_future()
    memory.put(b"1")
    three = first.reserve_future()
    memory.put(b"2")
    assert (one.result(0).body, two.result(0).body, three.done()) == (b"1", b"2", False)


@pytest.mark.parametrize("state", ["delayed", "buried", "ready"])
def test_bd_w13_one_old_job_does_not_pin_the_log(place: Place, state: str) -> None:
    queue = place.open()
    old = queue.put(b"old", delay=10_000 if state == "delayed" else 0, priority=9, tube="old")
    session = queue.session()
    if state == "buried":
        session.reserve_job(old).bury()
    most = 0
    for _ in range(600):
        queue.put(bytes(200))
        session.reserve(0).delete()
        place.clock.advance(0.1)
        most = max(most, queue.stats().segments)
    assert queue.stats().records_migrated > 0
    assert most <= 8, "600 jobs of 200 bytes are some 40 segments"
    queue = place.kill()
    assert queue.peek(old).body == b"old"
    assert queue.stats_job(old).state == state
    assert queue.stats_job(old).priority == 9


# -- what small-stalk names ------------------------------------------------------------------------------------------


def test_ss_b1_who_goes_gives_back_what_it_has(memory: WorkQueue) -> None:
    job_id = memory.put(b"", ttr=1000)
    session, other = memory.session(), memory.session()
    session.reserve(0)
    future = other.reserve_future()
    session.close()
    assert future.result(0).id == job_id
    assert memory.stats_job(job_id).timeouts == memory.stats_job(job_id).releases == 0


def each_crash_of_a_checkpoint(place: Place) -> Iterator[WorkQueue]:
    """What the next process opens after a death, or a power cut, at any operation of a checkpoint, and at any of the
    opening after that.
    """
    queue = place.open()
    ids = queue.put_many([bytes(300)] * 30)
    session = queue.session()
    for job_id in ids[:20]:
        session.reserve_job(job_id).delete()
    for job_id in ids[20:25]:
        session.reserve_job(job_id).release(priority=3)
    for job_id in ids[:24:-1][:3]:
        session.reserve_job(job_id).bury()
    queue.sync()
    states: list[CrashingDisk] = []
    place.disk.before_operation = lambda: states.append(place.disk.after_kill())
    queue.checkpoint()
    place.disk.before_operation = None
    states.append(place.disk.after_kill())
    for state in list(states):
        states += state.power_states(PowerModel.EXT4, 4)
    for state in states:
        opening = state.after_kill()
        inner: list[CrashingDisk] = [state]
        opening.before_operation = lambda opening=opening, inner=inner: inner.append(opening.after_kill())
        with WorkQueue("/data", segment_bytes=4096, max_job_bytes=2000, clock=place.clock, disk=opening) as reopened:
            opening.before_operation = None
            yield reopened
        for disk in inner[1::5]:
            with WorkQueue("/data", segment_bytes=4096, max_job_bytes=2000, clock=place.clock, disk=disk) as again:
                yield again


def test_ss_b2_nothing_is_applied_twice_after_a_crash_of_a_checkpoint(place: Place) -> None:
    seen = 0
    for queue in each_crash_of_a_checkpoint(place):
        jobs = {stats.id: stats for stats in queue.jobs("default")}
        counts = [(jobs[job_id].releases, jobs[job_id].buries) for job_id in sorted(jobs)]
        assert counts == [(1, 0)] * 5 + [(0, 0)] * 2 + [(0, 1)] * 3
        assert queue.stats().total_jobs == 30
        seen += 1
    assert seen > 10


def test_ss_b3_there_is_always_something_to_recover_from(place: Place) -> None:
    for queue in each_crash_of_a_checkpoint(place):
        assert sorted(stats.id for stats in queue.jobs("default")) == list(range(21, 31))
        buried = []
        while queue.stats_tube("default").buried:
            buried.append(queue.peek_buried().id)
            queue.kick(1)
        assert buried == [30, 29, 28]


@pytest.mark.parametrize("end", [Job.release, Job.bury])
def test_ss_b5_the_timer_of_an_earlier_reservation_is_no_longer_there(
    memory: WorkQueue, end: Callable[[Job], object]
) -> None:
    clock = memory._core.clock
    assert isinstance(clock, ManualClock)
    job_id = memory.put(b"", ttr=10)
    session = memory.session(deadline_soon=False)
    job = session.reserve(0)
    clock.advance(5)
    end(job)
    session.reserve_job(job_id)
    clock.advance(9)
    assert memory.stats_job(job_id).state == "reserved"
    assert memory.stats_job(job_id).timeouts == 0
    clock.advance(1)
    assert memory.stats_job(job_id).state == "ready"
    assert memory.stats_job(job_id).timeouts == 1


# -- wishes never granted --------------------------------------------------------------------------------------------


def test_wish_clear_a_tube(place: Place) -> None:
    queue = place.open()
    ids = queue.put_many([b""] * 5, tube="a")
    queue.put(b"", tube="a", delay=100)
    queue.put(b"", tube="b")
    session = queue.session()
    session.reserve_job(ids[0])
    session.reserve_job(ids[1]).bury()
    assert queue.clear("a") == 5
    assert [stats.id for stats in queue.jobs("a")] == [ids[0]]
    assert place.kill().tubes() == ["default", "a", "b"]


def test_wish_list_jobs(memory: WorkQueue) -> None:
    ids = memory.put_many([b"xy"] * 3)
    late = memory.put(b"", delay=5)
    assert [stats.id for stats in memory.jobs("default", "ready")] == list(ids)
    assert [stats.id for stats in memory.jobs("default", "delayed")] == [late]
    assert {stats.body_bytes for stats in memory.jobs("default")} == {0, 2}
    listed = memory.jobs("default")
    assert iter(listed) is listed, "lazily"


def test_wish_batches(memory: WorkQueue) -> None:
    ids = memory.put_many([b"%d" % at for at in range(10)])
    session = memory.session()
    assert [job.id for job in session.reserve_many(4, 0)] == list(ids[:4])
    assert [job.id for job in session.reserve_many(100, 0)] == list(ids[4:])
    with pytest.raises(QueueEmpty):
        session.reserve_many(1, 0)


def test_wish_unique_jobs(place: Place) -> None:
    queue = place.open()
    job_id = queue.put(b"", key="once")
    queue.put(b"", key="once", tube="other")
    queue = place.kill()
    with pytest.raises(DuplicateJob) as caught:
        queue.put(b"", key="once")
    assert (caught.value.job_id, caught.value.key, caught.value.tube) == (job_id, "once", "default")
    queue.delete(job_id)
    assert queue.put(b"", key="once") == 3


def test_wish_move(place: Place) -> None:
    queue = place.open()
    job_id = queue.put(b"x", tube="a", priority=3)
    session = queue.session()
    session.watch("b")
    queue.move(job_id, "b")
    queue = place.kill()
    assert queue.stats_job(job_id).tube == "b"
    session = queue.session()
    session.watch("b")
    assert session.reserve(0).id == job_id
    with pytest.raises(NotReserved):
        queue.move(job_id, "a")


def test_wish_put_into_a_named_tube(memory: WorkQueue) -> None:
    session = memory.session()
    memory.put(b"", tube="named")
    assert session.used == "default"
    assert memory.stats_tube("named").ready == 1
    assert memory.stats_tube("named").using == 0


def test_wish_fractional_seconds(memory: WorkQueue) -> None:
    clock = memory._core.clock
    assert isinstance(clock, ManualClock)
    job_id = memory.put(b"", delay=0.25, ttr=0.5)
    clock.advance(0.2)
    assert memory.stats_job(job_id).state == "delayed"
    clock.advance(0.05)
    session = memory.session()
    job = session.reserve(0)
    clock.advance(0.4)
    assert job.time_left == pytest.approx(0.1)
    job.touch()
    clock.advance(0.4)
    reserved: tuple[int, ...] = session.reserved
    assert reserved == (job_id,)
    clock.advance(0.1)
    assert session.reserved == ()


def test_wish_jobs_expire(place: Place) -> None:
    queue = place.open()
    queue.put(b"short", expires_in=1.5)
    queue.put(b"long", expires_in=10)
    place.clock.advance(1)
    assert queue.stats().ready == 2
    place.clock.advance(0.5)
    assert queue.stats().ready == 1
    assert place.kill(5).stats().ready == 1
    assert place.kill(5).stats().ready == 0


def test_wish_a_poisonous_job_is_buried(place: Place) -> None:
    queue = place.open(max_attempts=3)
    job_id = queue.put(b"", ttr=1)
    session = queue.session(deadline_soon=False)
    assert session.release(session.reserve(0).id)
    session.reserve(0)
    place.clock.advance(1)
    assert queue.stats_job(job_id).state == "ready"
    queue = place.kill(max_attempts=3)
    session = queue.session()
    assert not session.release(session.reserve(0).id)
    assert queue.stats_job(job_id).state == "buried"


def test_wish_deadline_soon_says_which_job(memory: WorkQueue) -> None:
    clock = memory._core.clock
    assert isinstance(clock, ManualClock)
    memory.put(b"", ttr=60)
    soon = memory.put(b"", ttr=5)
    session = memory.session()
    session.reserve_many(2, 0)
    future = session.reserve_future()
    clock.advance(3.9)
    assert not future.done()
    clock.advance(0.1)
    with pytest.raises(DeadlineSoon) as caught:
        future.result(0)
    assert caught.value.job_id == soon
    with pytest.raises(DeadlineSoon) as again:
        session.reserve(10)
    assert again.value.job_id == soon
