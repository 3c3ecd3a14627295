"""A reserved job is released or buried with a new body: all of it happens, or nothing."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kestrelpy import QueueDiskFull, QueueFull
from kestrelpy._process import forget
from kestrelpy.testing import FailingDisk, ManualClock, MemoryDisk
from kestrelpy.work import JobTooBig, Session, WorkQueue


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


def opened(clock: ManualClock, disk: MemoryDisk | FailingDisk, **options: Any) -> WorkQueue:
    return WorkQueue("/work", clock=clock, disk=disk, segment_bytes=8192, max_job_bytes=4000, **options)


def killed(queue: WorkQueue, clock: ManualClock, disk: MemoryDisk) -> WorkQueue:
    """The process dies; another one opens the queue."""
    disk.kill()
    forget(queue)
    queue._abandon()
    return opened(clock, disk)


def test_a_release_with_a_body_is_one_record(queue: WorkQueue, clock: ManualClock, disk: MemoryDisk) -> None:
    job_id = queue.put(b"call", tube="t", key="k", priority=9, expires_in=100)
    session = queue.session()
    session.watch("t")
    job = session.reserve(0)
    written = queue.stats().records_written
    assert job.release(3, delay=5, body=bytearray(b"call, refused once"))
    assert queue.stats().records_written == written + 1
    assert job.body == b"call"
    again = killed(queue, clock, disk)
    for each in (queue._core.scheduler.jobs[job_id], again._core.scheduler.jobs[job_id]):
        assert (each.body, each.priority, each.delay) == (b"call, refused once", 3, 5)
        assert (each.releases, each.reserves) == (1, 1)
    stats = again.stats_job(job_id)
    assert (stats.tube, stats.key, stats.state, stats.age) == ("t", "k", "delayed", 0)
    assert (again.stats().total_jobs, again.stats_tube("t").total_jobs, again.stats().bytes) == (1, 1, 18)
    clock.advance(5)
    with again.session() as later:
        later.watch("t")
        assert later.reserve(0).body == b"call, refused once"
    clock.advance(95)
    assert again.stats().ready == 0  # it has expired
    again._check()
    again.close()


def test_a_dead_letter_says_why(queue: WorkQueue) -> None:
    queue.put(b"call")
    with queue.session() as session:
        session.reserve(0).bury(body=b"call, refused for good")
        assert queue.peek_buried().body == b"call, refused for good"
        queue.kick(1)
        session.bury(session.reserve(0).id, 4, body=b"")
        queue.kick(1)
        session.release(session.reserve(0).id, body=b"x")
    stats = queue.stats_job(1)
    assert (stats.body, stats.body_bytes, stats.priority, stats.buries, stats.releases) == (b"x", 1, 4, 2, 1)
    assert queue.stats().bytes == 1


def test_the_last_attempt_buries_the_new_body(clock: ManualClock, disk: MemoryDisk) -> None:
    with opened(clock, disk, max_attempts=1) as queue, queue.session() as session:
        queue.put(b"a")
        assert not session.reserve(0).release(body=b"b")
        assert queue.peek_buried().body == b"b"


def test_what_is_refused_changes_nothing(clock: ManualClock, disk: MemoryDisk) -> None:
    with opened(clock, disk, max_bytes=10) as queue, queue.session() as session:
        queue.put(b"12345")
        queue.put(b"1234")
        job = session.reserve(0)
        before = queue.stats_job(job.id)
        refused: list[tuple[type[Exception], Any]] = [
            (JobTooBig, bytes(4001)),
            (QueueFull, b"1234567"),
            (TypeError, ""),
        ]
        for error, body in refused:
            calls: tuple[Callable[[], object], ...] = (
                lambda body=body: job.release(1, 5, body=body),  # type: ignore[misc]
                lambda body=body: session.bury(job.id, 1, body=body),  # type: ignore[misc]
            )
            for call in calls:
                with pytest.raises(error):
                    call()
                assert queue.stats_job(job.id) == before
                assert session.reserved == (job.id,)
        assert job.release(body=b"123456")
        assert session.reserve(0).release(body=b"1")
        assert queue.stats().bytes == 5
        queue._check()


def test_a_smaller_body_is_accepted_above_the_limit(clock: ManualClock, disk: MemoryDisk) -> None:
    with opened(clock, disk) as queue:
        queue.put(bytes(100))
    with opened(clock, disk, max_bytes=10) as queue, queue.session() as session:
        assert session.reserve(0).release(body=bytes(99))


@pytest.mark.parametrize("how", ["release", "bury"])
def test_a_full_disk_changes_nothing(clock: ManualClock, disk: MemoryDisk, how: str) -> None:
    failing = FailingDisk(disk)
    with opened(clock, failing) as queue, queue.session() as session:
        queue.put(b"short")
        job = session.reserve(0)
        failing.arm(errno.ENOSPC, sticky=True, kinds=frozenset({"grow", "create"}))
        with pytest.raises(QueueDiskFull):
            until_refused(session, job.id, how)
        stats = queue.stats_job(job.id)
        assert stats.state == "reserved"
        queue._check()
        failing.disarm()
        again = killed(queue, clock, disk)
        found = again.stats_job(job.id)
        assert (found.body, found.releases, found.buries) == (stats.body, stats.releases, stats.buries)
        again.close()


def until_refused(session: Session, job_id: int, how: str) -> None:
    for number in range(100):
        getattr(session, how)(job_id, body=bytes(3000 + number))
        session.reserve_job(job_id)


def test_timeouts_that_found_no_room_are_counted(clock: ManualClock, disk: MemoryDisk) -> None:
    failing = FailingDisk(disk, mapped=False)
    queue = opened(clock, failing, checkpoint_interval=1000)
    queue.put(b"", ttr=1)
    queue.put(bytes(3000))
    session = queue.session()
    session.reserve(0)
    failing.arm(errno.ENOSPC, sticky=True, kinds=frozenset({"write", "store", "grow"}))
    clock.advance(1)
    failing.disarm()
    assert queue._core.scheduler.jobs[1].new_timeouts == 1
    session.reserve_job(1).release(body=b"timed out once")
    again = killed(queue, clock, disk)
    assert (again.stats().timeouts, again.stats_job(1).timeouts, again.stats_job(1).releases) == (1, 1, 1)
    again.close()


def test_many_new_bodies_do_not_lengthen_the_journal(queue: WorkQueue) -> None:
    queue.put_many([bytes(100)] * 3)
    with queue.session() as session:
        for number in range(300):
            session.reserve(0).release(70_000 + number, body=bytes(1000))
        queue.checkpoint()
    assert queue.stats().journal_bytes < 40_000
    assert queue.stats().total_jobs == 3


def test_in_memory(clock: ManualClock) -> None:
    with WorkQueue(None, clock=clock, max_job_bytes=10) as queue, queue.session() as session:
        queue.put(b"a")
        assert session.reserve(0).release(delay=1, body=b"b")
        clock.advance(1)
        session.reserve(0).bury(body=memoryview(b"c"))
        assert queue.peek(1).body == b"c"
        queue._check()


def test_always_is_on_disk_when_it_returns(clock: ManualClock, disk: MemoryDisk) -> None:
    with opened(clock, disk, sync="always") as queue, queue.session() as session:
        queue.put(b"a")
        log = queue._core.journal
        assert log is not None
        for call in (
            lambda: session.reserve(0).release(body=b"b"),
            lambda: session.reserve(0).bury(body=b"c"),
        ):
            call()
            stats = log.queue.stats()
            assert stats.durable_id == stats.tail_id
