"""What people do to a work queue, and what was found by it: odd numbers, work that takes too long, a program's end."""

from __future__ import annotations

import gc
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest

from kestrelpy import QueueClosed, QueueEmpty, _process
from kestrelpy.clock import Timer
from kestrelpy.testing import ManualClock, MemoryDisk
from kestrelpy.work import JobNotFound, JobTooBig, NotReserved, Session, WorkQueue


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000_000)


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()


@pytest.fixture
def queue(clock: ManualClock, disk: MemoryDisk) -> Iterator[WorkQueue]:
    with opened(clock, disk) as made:
        yield made
        made._check()


def opened(clock: ManualClock, disk: MemoryDisk, segment_bytes: int = 8192, max_job_bytes: int = 4000) -> WorkQueue:
    return WorkQueue("/work", clock=clock, disk=disk, segment_bytes=segment_bytes, max_job_bytes=max_job_bytes)


def test_the_figures_say_how_many_jobs_there_are(queue: WorkQueue, clock: ManualClock) -> None:
    for delay in (0, 0, 0, 60):
        queue.put(b"job", delay=delay)
    session = queue.session()
    session.reserve(0).bury()
    job = session.reserve(0)
    stats = queue.stats()
    assert (stats.ready, stats.reserved, stats.delayed, stats.buried, stats.jobs) == (1, 1, 1, 1, 4)
    job.delete()
    assert queue.stats().jobs == 3
    session.close()


# -- numbers ---------------------------------------------------------------------------------------------------------

NUMBERS: list[Any] = [Decimal("2.5"), Fraction(5, 2), numpy.float32(2.5), numpy.float64(2.5), numpy.array(2.5)]
NO_DURATIONS: list[Any] = [
    *(True, False, "2", b"2", None, 2j, [2], object(), 10**400),
    *(Decimal("NaN"), Decimal("sNaN"), Decimal("-1"), Decimal("Infinity"), Fraction(-1, 2)),
    *(float("nan"), float("inf"), -0.5, numpy.float64("nan"), numpy.float32(-1)),
]


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_a_duration_is_any_number(queue: WorkQueue, clock: ManualClock, disk: MemoryDisk, number: Any) -> None:
    delayed = queue.put(b"delayed", delay=number, ttr=number, expires_in=number * 4)
    [batched] = queue.put_many([b"batched"], delay=number, ttr=number, expires_in=number * 4)
    assert [each.delay for each in queue.jobs()] == [2.5, 2.5]
    session = queue.session()
    future = session.reserve_future(timeout=number)
    clock.advance(2.5)
    job = future.result(0)
    assert (job.id, job.ttr, job.time_left) == (delayed, 2.5, 2.5)
    assert session.reserve(number).id == batched
    job.release(delay=number)
    assert queue.stats_job(delayed).time_left == 2.5
    queue.pause_tube("default", number)
    assert queue.stats_tube("default").pause_left == 2.5
    queue.close()
    with opened(clock, disk) as again:
        again._check()
        assert again.stats_job(delayed).delay == again.stats_tube("default").pause == 2.5


@pytest.mark.parametrize("wrong", NO_DURATIONS, ids=lambda wrong: type(wrong).__name__)
def test_what_is_no_duration_changes_nothing(queue: WorkQueue, wrong: Any) -> None:
    kept = queue.put(b"kept", ttr=30)
    session, waiting = queue.session(), queue.session()
    waiting.watch("other")
    waiting.ignore("default")
    future = waiting.reserve_future()
    job = session.reserve(0)
    calls: list[Callable[[], object]] = [
        lambda: queue.put(b"", tube="other", delay=wrong),
        lambda: queue.put(b"", tube="other", ttr=wrong),
        lambda: queue.put_many([b""], tube="other", delay=wrong),
        lambda: queue.put_many([b""], tube="other", ttr=wrong),
        lambda: queue.pause_tube("default", wrong),
    ]
    if wrong is not None:
        calls += [
            lambda: job.release(delay=wrong),
            lambda: queue.put(b"", tube="other", expires_in=wrong),
            lambda: queue.put_many([b""], tube="other", expires_in=wrong),
        ]
    before = queue.stats()
    for call in calls:
        with pytest.raises(ValueError, match="must be"):
            call()
        assert not queue._core._disturbed
    assert queue.stats()._replace(uptime=before.uptime) == before
    assert not future.done()
    assert session.reserved == (kept,)


@pytest.mark.parametrize("wrong", [float("nan"), -1, True, "1", Decimal("NaN"), Fraction(-1)], ids=repr)
def test_what_is_no_timeout_is_refused_whether_a_job_is_ready_or_not(queue: WorkQueue, wrong: Any) -> None:
    session = queue.session()
    for _ in range(2):
        for call in (session.reserve, session.reserve_future, lambda timeout: session.reserve_many(1, timeout)):
            with pytest.raises(ValueError, match="timeout"):
                call(wrong)
        queue.put(b"")
    assert session.reserve(Decimal(0)).id == 1  # type: ignore[arg-type]
    assert session.reserve(float("inf")).id == 2
    assert not session.waiters


def test_priorities_are_whole_numbers(queue: WorkQueue) -> None:
    queue.put(b"", priority=numpy.int64(7))  # type: ignore[arg-type]
    session = queue.session()
    job = session.reserve(0)
    assert (job.priority, type(job.priority)) == (7, int)
    for wrong in (True, 7.0, Decimal(7), "7"):
        with pytest.raises(ValueError, match="priority"):
            queue.put(b"", priority=wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="priority"):
            job.release(priority=wrong)  # type: ignore[arg-type]
    assert session.reserved == (1,)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("sync", each) for each in ("alway", -1, float("nan"), True, None)),
        *(("max_job_bytes", each) for each in (-5, 1.5, True)),
        *(
            (name, each)
            for name in ("max_jobs", "max_bytes", "max_tubes", "max_attempts")
            for each in (0, -1, 1.5, True, "1")
        ),
        *(("checkpoint_interval", each) for each in (0, -1, float("nan"), float("inf"), True)),
    ],
)
def test_options_are_checked_in_memory_too(name: str, wrong: Any) -> None:
    for disk in (None, MemoryDisk()):
        with pytest.raises(ValueError, match=name):
            WorkQueue(None if disk is None else "/work", disk=disk, **{name: wrong})
        assert disk is None or not disk.folders.get("/work")


def test_an_error_in_the_middle_of_something_is_mended(queue: WorkQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its type: only errors of our own are known to come before anything was changed."""
    queue.put(b"a")
    session = queue.session()

    def fail(*_: object) -> None:
        raise TypeError("half-way")

    with monkeypatch.context() as patched:
        patched.setattr(session, "hold", fail)
        with pytest.raises(TypeError):
            session.reserve(0)
    assert session.release(1)
    assert session.reserve(0).reserves == 2


def test_a_job_that_is_too_big_is_told_so_in_its_own_words() -> None:
    with WorkQueue(None, max_job_bytes=10) as queue:
        with pytest.raises(JobTooBig, match="a job of 20 bytes is larger than max_job_bytes=10") as caught:
            queue.put(bytes(20))
        assert (caught.value.item_bytes, caught.value.max_item_bytes) == (20, 10)


# -- work that takes too long ----------------------------------------------------------------------------------------


def work(session: Session, *steps: Callable[[], object]) -> None:
    with session.reserve(0):
        for step in steps:
            step()


def fail() -> None:
    raise KeyError


def test_a_block_whose_reservation_is_over_says_so(queue: WorkQueue, clock: ManualClock) -> None:
    queue.put(b"slow")
    session, other = queue.session(), queue.session()
    with pytest.raises(NotReserved, match="job 1"):
        work(session, lambda: clock.advance(61))
    assert (queue.stats_job(1).state, queue.stats_job(1).timeouts) == ("ready", 1)
    with pytest.raises(NotReserved):
        work(session, lambda: clock.advance(61), lambda: other.reserve(0))  # somebody else has it now
    clock.advance(61)
    with pytest.raises(NotReserved):
        work(session, lambda: clock.advance(61), lambda: other.reserve(0).delete())  # and has done it


def test_a_second_block_of_a_job_that_was_given_back_says_so(queue: WorkQueue) -> None:
    queue.put(b"twice")
    job = queue.session().reserve(0)
    with pytest.raises(KeyError), job:
        fail()
    with pytest.raises(NotReserved), job:
        pass
    assert queue.stats_job(1).state == "ready"


def test_a_block_that_dealt_with_its_job_is_left_alone(queue: WorkQueue, clock: ManualClock) -> None:
    session = queue.session(deadline_soon=False)

    def touch_too_late(job: Any) -> None:
        clock.advance(61)
        with pytest.raises(NotReserved):
            job.touch()

    endings: list[Callable[[Any], object]] = [
        lambda job: job.delete(),
        lambda job: job.release(delay=1000),
        lambda job: job.bury(),
        lambda job: session.delete(job.id),
        lambda job: session.release(job.id, delay=1000),
        lambda job: session.bury(job.id),
        touch_too_late,
    ]
    for end in endings:
        queue.put(b"")
        with session.reserve(0) as job:
            end(job)
            clock.advance(61)
    assert not session.blocks


def test_a_call_that_was_refused_leaves_the_job_to_the_block(queue: WorkQueue) -> None:
    queue.put(b"")
    session = queue.session()
    with session.reserve(0) as job, pytest.raises(ValueError, match="delay"):
        job.release(delay=-1)
    with pytest.raises(JobNotFound):
        queue.peek(1)


def test_a_block_that_raises_keeps_its_error(
    queue: WorkQueue, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    queue.put(b"")
    session = queue.session()
    with caplog.at_level(logging.WARNING), pytest.raises(KeyError):
        work(session, lambda: clock.advance(61), fail)
    assert "was not released" in caplog.text
    queue.put(b"")
    with pytest.raises(KeyError):
        work(session, queue.close, fail)


def test_a_block_that_outlives_the_queue_says_so(queue: WorkQueue) -> None:
    queue.put(b"")
    session = queue.session()
    with pytest.raises(QueueClosed), session.reserve(0):
        queue.close()


# -- the end of a program --------------------------------------------------------------------------------------------

WAITING = """
    import sys, threading, time
    from kestrelpy import QueueClosed, QueueEmpty, _process
    from kestrelpy.work import WorkQueue
    queue = WorkQueue({folder})
    queue.put(b"done")
    session = queue.session()
    session.reserve(0).release(delay=1000)
    def wait():
        try:
            session.reserve()
        except QueueClosed:
            print("told")
    threading.Thread(target=wait).start()
    while not session.waiters:
        time.sleep(0.001)
    {end}
"""


@pytest.mark.parametrize("end", ["pass", "raise KeyboardInterrupt"])
@pytest.mark.parametrize("where", ["sys.argv[1]", "None"], ids=["disk", "memory"])
def test_a_thread_that_reserves_lets_the_interpreter_end(script: Any, folder: Path, where: str, end: str) -> None:
    assert "told" in script(
        WAITING.format(folder=where, end=end), folder, status=0 if end == "pass" else -signal.SIGINT
    )
    if where != "None":
        with WorkQueue(folder) as queue:
            assert queue.stats_job(1).releases == 1


def test_a_work_queue_is_known_to_the_interpreters_end(queue: WorkQueue) -> None:
    """It, and not the journal under it, which it closes itself when it has saved what is only counted so far."""
    in_memory = WorkQueue(None)
    assert queue._core.journal is not None
    known = list(_process._live)
    assert queue in known
    assert in_memory in known
    assert queue._core.journal.queue not in known
    in_memory.close()
    assert in_memory not in list(_process._live)


def test_a_work_queue_that_nobody_closed_says_so_in_its_own_name(clock: ManualClock, disk: MemoryDisk) -> None:
    def leave_open() -> None:
        opened(clock, disk).put(b"")
        clock.advance(5)
        disk.kill()
        gc.collect()

    with pytest.warns(ResourceWarning, match="unclosed WorkQueue 'work' in /work$") as told:
        leave_open()
    assert not [each for each in told if "JournaledQueue" in str(each.message)]
    WorkQueue(None).put(b"")
    with pytest.raises(ValueError, match="max_jobs"):
        WorkQueue("/work", disk=disk, max_jobs=0)
    gc.collect()


def test_closing_wakes_who_waits() -> None:
    queue = WorkQueue(None)
    session = queue.session()
    told: list[BaseException] = []

    def wait() -> None:
        try:
            session.reserve()
        except (QueueClosed, QueueEmpty) as error:
            told.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not session.waiters:
        pass
    queue.close()
    thread.join(10)
    assert [type(each) for each in told] == [QueueClosed]


class NoThreads(ManualClock):
    """As the machine's clock where no thread can be started."""

    has_threads = False

    def call_later(self, *arguments: Any, **options: Any) -> Timer:
        if not self.has_threads:
            raise RuntimeError("can't start new thread")
        return super().call_later(*arguments, **options)


def test_where_no_thread_can_be_started_calls_go_on(disk: MemoryDisk) -> None:
    """And the next one tries again: what time does is done by the calls until then."""
    clock = NoThreads(1_700_000_000_000)
    with WorkQueue("/work", clock=clock, disk=disk) as queue:
        queue.put(b"soon", delay=1)
        queue.put(b"now")
        with queue.session() as session:
            session.reserve(0).delete()
            clock.advance(2)
            assert session.reserve(0).body == b"soon"
        assert clock.timer_count == 0
        clock.has_threads = True
        queue.put(b"later", delay=1)
        queue.put(b"and more")
        assert clock.timer_count > 0
        queue._check()
    assert clock.timer_count == 0, "a closed queue is not kept alive by its timers"


def test_an_error_that_is_kept_keeps_no_arguments(clock: ManualClock, disk: MemoryDisk) -> None:
    """C10, of work queues."""
    queue = opened(clock, disk)
    queue.close()
    raised = []
    for _ in range(2):
        with pytest.raises(QueueClosed) as caught:
            queue.put(b"x")
        raised.append(caught.value)
    assert raised[0] is not raised[1]
    assert queue._core.state is not None
    assert queue._core.state.__traceback__ is None


# -- sizes that have changed -------------------------------------------------------------------------------------------


def shortened(queue: WorkQueue) -> int:
    """How many segments are left when many small jobs have come and gone."""
    for _ in range(3):
        queue.put_many([b"y" * 20] * 600)
        with queue.session() as session:
            for job in session.reserve_many(600, timeout=0):
                job.delete()
        queue.checkpoint()
    return queue.stats().segments


def test_a_job_that_would_be_too_large_today_is_written_anew(clock: ManualClock, disk: MemoryDisk) -> None:
    with opened(clock, disk, segment_bytes=1 << 20, max_job_bytes=1 << 16) as queue:
        large = queue.put(b"x" * 60_000, priority=1 << 31)
    with opened(clock, disk, segment_bytes=4096, max_job_bytes=100) as queue:
        assert shortened(queue) < 40, "its own bytes twice are 30 segments, the jobs were 100"
    with opened(clock, disk) as queue:
        assert queue.peek(large).body == b"x" * 60_000


def test_the_largest_job_with_the_longest_names_is_written_anew(clock: ManualClock, disk: MemoryDisk) -> None:
    with pytest.raises(ValueError, match="at most") as refused:
        opened(clock, disk, segment_bytes=8192, max_job_bytes=10**9)
    most = int(str(refused.value).split("at most ")[1].split(" ")[0].replace(",", ""))
    with opened(clock, disk, segment_bytes=8192, max_job_bytes=most) as queue:
        large = queue.put(b"x" * most, priority=1 << 31, tube="t" * 200, key="k" * 255)
        assert shortened(queue) <= 4
        assert len(queue.peek(large).body) == most


def test_a_closed_session_deletes_nothing(queue: WorkQueue) -> None:
    job_id = queue.put(b"1")
    session = queue.session()
    session.reserve(0)
    session.close()
    with pytest.raises(QueueClosed):
        session.delete(job_id)
    assert queue.stats_job(job_id).state == "ready"


@pytest.mark.parametrize("body", ["text", 7, None])
def test_a_body_that_is_no_bytes_is_called_a_body(body: Any) -> None:
    with WorkQueue(None) as queue:
        for call in (lambda: queue.put(body), lambda: queue.put_many([body])):
            with pytest.raises(TypeError, match=f"a job's body must be bytes, .*, not {type(body).__name__}"):
                call()
