"""``put_all``: jobs of several tubes as one batch."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import pytest

from kestrelpy import InvalidName, QueueDiskFull, QueueFull
from kestrelpy.testing import FailingDisk, ManualClock, MemoryDisk
from kestrelpy.work import Draining, DuplicateJob, JobTooBig, NewJob, WorkQueue
from kestrelpy.work import core as core_module

THREE = [
    NewJob(b"mail", "mail", priority=3, delay=2, ttr=7, key="order-1"),
    NewJob(bytearray(b"bill"), tube="bills", key="order-1", expires_in=9),
    NewJob(memoryview(b"plain")),
]


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


def opened(clock: ManualClock, disk: MemoryDisk, **options: Any) -> WorkQueue:
    return WorkQueue("/work", clock=clock, disk=disk, segment_bytes=8192, max_job_bytes=4000, **options)


def test_each_job_has_its_own_tube_and_options(queue: WorkQueue, clock: ManualClock, disk: MemoryDisk) -> None:
    queue.put(b"before")
    assert queue.put_all(iter(THREE)) == [2, 3, 4]
    assert queue.put_all([]) == []
    assert queue.tubes() == ["default", "mail", "bills"]

    def facts(queue: WorkQueue) -> list[tuple[object, ...]]:
        stats = [queue.stats_job(job_id) for job_id in (2, 3, 4)]
        return [(queue.peek(s.id).body, s.tube, s.state, s.priority, s.delay, s.ttr, s.key) for s in stats]

    wanted = [
        (b"mail", "mail", "delayed", 3, 2, 7, "order-1"),
        (b"bill", "bills", "ready", 65536, 0, 60, "order-1"),
        (b"plain", "default", "ready", 65536, 0, 60, None),
    ]
    assert facts(queue) == wanted
    assert [queue.stats_tube(tube).total_jobs for tube in queue.tubes()] == [2, 1, 1]
    queue._check()
    queue.close()
    with opened(clock, disk) as again:
        assert facts(again) == wanted
        assert again.stats().total_jobs == 4
        clock.advance(9)
        assert again.tubes() == ["default", "mail"]  # the bill has expired


def test_ids_that_were_drawn(queue: WorkQueue, clock: ManualClock, disk: MemoryDisk) -> None:
    first, second, third = (queue.new_id() for _ in range(3))
    assert queue.put(b"") == 4
    jobs = [NewJob(b"c", job_id=third), NewJob(b"x"), NewJob(b"a", job_id=first), NewJob(b"y")]
    assert queue.put_all(jobs) == [3, 5, 1, 6]
    assert [job.body for job in queue.jobs()] == [b"a", b"c", b"", b"x", b"y"]
    for wrong in ([second, second], [second, first], [7], [0], [True]):
        with pytest.raises(ValueError, match="job_id"):
            queue.put_all([NewJob(b"", job_id=each) for each in wrong])
    queue._check()
    queue.close()
    with opened(clock, disk) as again:
        assert [job.id for job in again.jobs()] == [1, 3, 4, 5, 6]
        assert again.put(b"") == 7


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (NewJob(bytes(4001)), JobTooBig),
        (NewJob("text"), TypeError),
        (b"no NewJob", TypeError),
        (NewJob(b"", tube="-"), InvalidName),
        (NewJob(b"", priority=-1), ValueError),
        (NewJob(b"", priority=True), ValueError),
        (NewJob(b"", delay=-1), ValueError),
        (NewJob(b"", ttr=0), ValueError),
        (NewJob(b"", expires_in=0), ValueError),
        (NewJob(b"", key=""), ValueError),
        (NewJob(b"", tube="other", key="k"), DuplicateJob),
        (NewJob(b"", tube="new", key="k"), DuplicateJob),
    ],
    ids=repr,
)
def test_one_bad_job_refuses_all(queue: WorkQueue, wrong: NewJob, error: type[Exception]) -> None:
    queue.put(b"", tube="other", key="k")
    before = queue.stats()
    with pytest.raises(error):
        queue.put_all([NewJob(b"good"), NewJob(b"", tube="new", key="k"), wrong, NewJob(b"", tube="late")])
    assert queue.stats()._replace(uptime=before.uptime) == before
    assert queue.tubes() == ["default", "other"]
    assert queue.put(b"") == 2


def test_a_duplicate_names_the_job_that_has_the_key(queue: WorkQueue) -> None:
    [other] = queue.put_all([NewJob(b"", "t", key="k")])
    with pytest.raises(DuplicateJob, match=f"job {other} of tube 't' has the key 'k' already") as alive:
        queue.put_all([NewJob(b"", "u", key="k"), NewJob(b"", "t", key="k")])
    assert (alive.value.job_id, alive.value.tube, alive.value.key) == (other, "t", "k")
    with pytest.raises(DuplicateJob, match="two of these jobs have the key 'k' in tube 'u'") as twice:
        queue.put_all([NewJob(b"", "u", key="k"), NewJob(b"", "u", key="k")])
    assert (twice.value.job_id, twice.value.tube, twice.value.key) == (None, "u", "k")
    queue.put_all([NewJob(b"", "u", key="k"), NewJob(b"", "v", key="k")])


def test_limits(clock: ManualClock) -> None:
    with WorkQueue(None, clock=clock, max_jobs=3, max_bytes=10, max_tubes=3) as queue:
        for refused in (
            [NewJob(b"", f"t{number}") for number in range(3)],
            [NewJob(b"123456", "t0"), NewJob(b"12345", "t1")],
            [NewJob(b"") for _ in range(4)],
        ):
            with pytest.raises(QueueFull):
                queue.put_all(refused)
            assert queue.tubes() == ["default"]
        assert queue.put_all([NewJob(b"12345", "t0"), NewJob(b"12345", "t1")]) == [1, 2]
        queue.drain()
        with pytest.raises(Draining):
            queue.put_all([NewJob(b"")])
        queue._check()


def test_a_full_disk_refuses_all_of_it(clock: ManualClock, disk: MemoryDisk) -> None:
    failing = FailingDisk(disk)
    with WorkQueue("/work", clock=clock, disk=failing, segment_bytes=8192, max_job_bytes=4000) as queue:
        batch = [NewJob(bytes(400), "a"), NewJob(bytes(400), "b")]
        queue.put_all(batch)
        failing.arm(errno.ENOSPC, sticky=True, kinds=frozenset({"grow"}))
        put = 1 + fill(queue, batch)
        queue._check()
        failing.disarm()
        assert [queue.stats_tube(tube).ready for tube in queue.tubes()] == [0, put, put]
    with opened(clock, disk) as again:
        assert [again.stats_tube(tube).ready for tube in again.tubes()] == [0, put, put]


def fill(queue: WorkQueue, batch: list[NewJob]) -> int:
    """How often it was put until there was no room."""
    for done in range(100):
        try:
            queue.put_all(batch)
        except QueueDiskFull:
            return done
    raise AssertionError("there is always room")


def test_whoever_waits_gets_the_most_urgent_one(queue: WorkQueue) -> None:
    one, both = queue.session(), queue.session()
    one.watch("a")
    for tube in ("a", "b"):
        both.watch(tube)
    futures = [one.reserve_future(), both.reserve_future(), both.reserve_future()]
    queue.put_all(
        [NewJob(b"1", "a", 7), NewJob(b"2", "b", 5), NewJob(b"3", "a", 6), NewJob(b"4", "a", 1, delay=9), NewJob(b"5")]
    )
    assert [future.result(0).body for future in futures] == [b"3", b"2", b"1"]
    assert queue.peek_ready().body == b"5"


def test_a_tube_that_is_left_in_the_middle_is_there_for_the_next_job(queue: WorkQueue, clock: ManualClock) -> None:
    """A waiter that has kept a tube alive leaves; a job expires at once."""
    clock.advance(1)
    session = queue.session()
    session.watch("a")
    session.watch("b")
    future = session.reserve_future()
    session.ignore("b")
    queue.put_all([NewJob(b"", "a", 1), NewJob(b"", "b"), NewJob(b"", "c", 1, expires_in=5e-324), NewJob(b"", "c")])
    assert future.result(0).id == 1
    queue._check()
    session.watch("b")
    session.watch("c")
    assert [session.reserve(0).id for _ in range(2)] == [2, 4]


def test_the_keys_of_expired_jobs_are_free(queue: WorkQueue, clock: ManualClock) -> None:
    queue.put_many([b""] * (core_module.CALL_SLICE + 1), expires_in=1)
    queue.put_all([NewJob(b"", "t", key=key, expires_in=1) for key in "kl"])
    clock._elapsed_ns += 2_000_000_000  # no timer has run yet
    new = queue.put_all([NewJob(b"", "t", key="k"), NewJob(b"", "t", key="l")])
    queue._check()
    assert [job.id for job in queue.jobs("t")] == new


def test_always_is_on_disk_when_it_returns(clock: ManualClock, disk: MemoryDisk) -> None:
    with opened(clock, disk, sync="always") as queue:
        queue.put_all(THREE)
        log = queue._core.journal
        assert log is not None
        stats = log.queue.stats()
        assert stats.durable_id == stats.tail_id


def test_a_new_job_is_a_value() -> None:
    job = NewJob(b"a", tube="t", key="k")
    assert job == NewJob(b"a", "t", 65536, 0, 60, "k", None)
    assert hash(job) == hash(NewJob(b"a", tube="t", key="k"))
    with pytest.raises(AttributeError):
        job.tube = "u"  # type: ignore[misc]
