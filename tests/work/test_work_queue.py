"""The work queue as a whole: what each call does, what it refuses, and what a restart finds."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kestrelpy import (
    ForkedQueue,
    InvalidName,
    JournaledQueue,
    QueueClosed,
    QueueDiskFull,
    QueueEmpty,
    QueueFull,
    WrongKind,
)
from kestrelpy._process import forget
from kestrelpy.testing import FailingDisk, ManualClock, MemoryDisk
from kestrelpy.work import (
    Draining,
    DuplicateJob,
    Job,
    JobNotFound,
    JobTooBig,
    NotReserved,
    TubeNotFound,
    WorkQueue,
)
from kestrelpy.work.core import CALL_SLICE

START_MS = 1_700_000_000_000


class World:
    """A clock, a disk, and a queue that can be opened again."""

    def __init__(self, **options: object) -> None:
        self.clock = ManualClock(START_MS)
        self.disk = MemoryDisk()
        self.options: dict[str, Any] = {"segment_bytes": 8192, "max_job_bytes": 4000, **options}
        self.queue = self.open()

    def open(self) -> WorkQueue:
        self.queue = WorkQueue("/work", clock=self.clock, disk=self.disk, **self.options)
        return self.queue

    def reopen(self) -> WorkQueue:
        self.queue._check()
        self.queue.close()
        self.open()._check()
        return self.queue

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.queue.close()


@pytest.fixture
def world() -> Iterator[World]:
    with World() as made:
        yield made


def test_a_put_refuses_what_it_can_not_keep(world: World) -> None:
    queue = world.queue
    with pytest.raises(JobTooBig) as too_big:
        queue.put(bytes(4001))
    assert (too_big.value.item_bytes, too_big.value.max_item_bytes) == (4001, 4000)
    endless = float("inf"), float("nan"), 2.0**33
    for what, values in {
        "priority": (-1, 2**32, 1.5),
        "delay": (-0.1, *endless),
        "ttr": (0, *endless),
        "expires_in": (0, *endless),
        "key": ("", "x" * 256),
    }.items():
        for wrong in values:
            with pytest.raises(ValueError, match=what):
                queue.put(b"", **{what: wrong})  # type: ignore[arg-type]
    for name in ("", "-a", "a b", "x" * 201, "ä"):
        with pytest.raises(InvalidName):
            queue.put(b"", tube=name)
    with pytest.raises(ValueError, match="drawn"):
        queue.put(b"", job_id=1)
    assert queue.tubes() == ["default"]
    assert queue.stats().last_id == 0
    assert queue.put(memoryview(b"abc"), tube="x" * 200) == 1
    assert queue.peek(1).body == b"abc"


def test_limits_refuse_and_room_comes_back(world: World) -> None:
    world.options |= {"max_jobs": 2, "max_bytes": 10}
    queue = world.reopen()
    first = queue.put(b"12345678")
    with pytest.raises(QueueFull):
        queue.put(b"123", tube="new")
    assert queue.tubes() == ["default"]
    queue.put(b"12")
    with pytest.raises(QueueFull):
        queue.put_many([b""])
    queue.delete(first)
    assert queue.put(b"12345678") == 3


def test_put_many_is_one_write(world: World) -> None:
    queue = world.queue
    assert queue.put_many([b"a", bytearray(b"b")], tube="t", priority=3, delay=2, ttr=7, expires_in=9) == range(1, 3)
    assert queue.put_many([]) == range(3, 3)
    stats = queue.stats_job(2)
    assert (stats.tube, stats.priority, stats.delay, stats.ttr, stats.state) == ("t", 3, 2, 7, "delayed")
    with pytest.raises(JobTooBig):
        queue.put_many([b"ok", bytes(5000)], tube="other")
    assert queue.stats().total_jobs == 2
    world.reopen()
    world.clock.advance(9)
    assert world.queue.stats().ready == 0


def test_a_drawn_id_is_put_once_or_never(world: World) -> None:
    queue = world.queue
    drawn = queue.new_id()
    assert queue.put(b"next") == drawn + 1
    assert queue.put(b"late", job_id=drawn) == drawn
    with pytest.raises(ValueError, match="a job lives"):
        queue.put(b"", job_id=drawn)
    burned = queue.new_id()
    queue = world.reopen()
    assert queue.put(b"") == burned + 1
    with queue.session() as session:
        assert [session.reserve(0).id for _ in range(3)] == [drawn, drawn + 1, burned + 1]


def test_states_survive_a_restart(world: World) -> None:
    queue = world.queue
    for number in range(6):
        queue.put(b"%d" % number, priority=10)
    queue.put(b"later", delay=30.5, tube="slow")
    session = queue.session()
    jobs = [session.reserve(0) for _ in range(5)]
    jobs[0].bury(priority=7)
    jobs[2].bury()
    jobs[1].bury()
    jobs[3].release(priority=2)
    jobs[4].release(delay=10)
    queue.kick_job(3)
    queue.move(6, "elsewhere")
    queue.pause_tube("elsewhere", 100)
    before = {job_id: queue.stats_job(job_id) for job_id in range(1, 8)}
    order = [job.id for job in queue.jobs("default", "buried")]
    figures = queue.stats(), queue.stats_tube("elsewhere")
    queue = world.reopen()
    assert {job_id: queue.stats_job(job_id) for job_id in range(1, 8)} == before
    assert [job.id for job in queue.jobs("default", "buried")] == order == [1, 2]
    assert (queue.stats().total_jobs, queue.stats().last_id) == (figures[0].total_jobs, figures[0].last_id)
    assert queue.stats_tube("elsewhere") == figures[1]
    world.clock.advance(10)
    assert [job.id for job in queue.jobs("default", "ready")] == [4, 3, 5]
    world.clock.advance(90)
    assert queue.stats_tube("elsewhere").pause == 0


def test_a_delay_is_no_longer_after_the_clock_was_set_back(world: World) -> None:
    world.queue.put(b"", delay=10)
    world.queue.close()
    world.clock = ManualClock(START_MS - 3_600_000)
    queue = world.open()
    assert queue.stats_job(1).time_left == 10


def test_ages_do_not_follow_the_wall_clock(world: World) -> None:
    world.queue.put(b"", delay=1000)
    world.clock.advance(10)
    world.clock.jump(3600)
    assert world.queue.stats_job(1).age == 10
    assert world.queue.stats_job(1).time_left == 990
    world.clock.jump(-7200)
    assert world.queue.stats_job(1).age == 10


def test_unique_keys(world: World) -> None:
    queue = world.queue
    queue.put(b"", key="k")
    queue.put(b"", key="k", tube="other")
    with pytest.raises(DuplicateJob) as again:
        queue.put(b"", key="k")
    assert (again.value.job_id, again.value.tube, again.value.key) == (1, "default", "k")
    with pytest.raises(DuplicateJob):
        queue.move(2, "default")
    queue = world.reopen()
    with pytest.raises(DuplicateJob):
        queue.put(b"", key="k")
    queue.delete(1)
    queue.move(2, "default")
    with pytest.raises(DuplicateJob):
        queue.put(b"", key="k")
    assert queue.tubes() == ["default"]


def test_who_may_delete(world: World) -> None:
    queue = world.queue
    queue.put(b"")
    with queue.session() as mine, queue.session() as other:
        job = mine.reserve(0)
        calls: tuple[Callable[[], object], ...] = (
            lambda: queue.delete(1),
            lambda: other.delete(1),
            lambda: other.touch(1),
            lambda: queue.move(1, "x"),
        )
        for refused in calls:
            with pytest.raises(NotReserved):
                refused()
        with pytest.raises(NotReserved):
            other.reserve_job(1)
        mine.delete(1)
        for gone in (job.delete, job.release, job.touch, job.bury, lambda: queue.peek(1), lambda: queue.kick_job(1)):
            with pytest.raises(JobNotFound):
                gone()


def test_kick_and_clear(world: World) -> None:
    queue = world.queue
    for _ in range(450):
        queue.put(b"", delay=100)
    with queue.session() as session:
        for job_id in (5, 3, 4):
            session.reserve_job(job_id).bury()
        assert queue.kick(1000) == 3
        assert [session.reserve(0).id for _ in range(3)] == [3, 4, 5]
        assert queue.kick(440) == 440
        assert queue.kick(1, "nowhere") == 0
        with pytest.raises(JobNotFound):
            queue.kick_job(1)
        assert queue.stats_job(1).kicks == 1
        assert queue.clear() == 447
        assert queue.stats().reserved == 3
    assert [job.id for job in world.reopen().jobs()] == [3, 4, 5]


def test_pauses(world: World) -> None:
    queue = world.queue
    with pytest.raises(TubeNotFound):
        queue.pause_tube("nowhere", 1)
    for wrong in (-1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="pause"):
            queue.pause_tube("default", wrong)
    queue.put(b"")
    queue.pause_tube("default", 10)
    session = queue.session()
    with pytest.raises(QueueEmpty):
        session.reserve(0)
    future = session.reserve_future()
    world.clock.advance(9.9)
    assert not future.done()
    assert queue.stats_tube("default").pause_left == pytest.approx(0.1)
    world.clock.advance(0.1)
    assert future.result(0).id == 1
    future.result().release()
    queue.pause_tube("default", 10)
    future = session.reserve_future()
    queue.pause_tube("default", 0)
    assert future.result(0).id == 1
    assert queue.stats_tube("default").pauses == 3


def test_expiry(world: World) -> None:
    queue = world.queue
    queue.put(b"", expires_in=5)
    queue.put(b"", expires_in=5, delay=6)
    queue.put(b"", expires_in=5)
    session = queue.session()
    job = session.reserve(0)
    world.clock.advance(5)
    assert [each.id for each in queue.jobs()] == [job.id]
    job.touch()
    job.release()
    assert queue.stats().reserved == queue.stats().ready == 0
    assert not list(world.reopen().jobs())


def test_reserves_survive_a_kill_once_they_are_saved(world: World) -> None:
    world.options["checkpoint_interval"] = 1000
    queue = world.reopen()
    queue.put_many([b""] * 1100)
    session = queue.session()
    session.reserve_many(1050)
    written = queue.stats().records_written
    queue.save_reserves()
    assert queue.stats().records_written == written + 1050
    queue.save_reserves()
    assert queue.stats().records_written == written + 1050
    session.reserve(0)
    kill(world)
    queue = world.open()
    assert [job.reserves for job in queue.jobs()] == [1] * 1050 + [0] * 50
    assert queue.stats().ready == 1100
    queue.close()
    with pytest.raises(QueueClosed):
        queue.save_reserves()
    world.open()


def kill(world: World) -> None:
    world.disk.kill()
    forget(world.queue)
    world.queue._abandon()


def test_max_attempts(world: World) -> None:
    world.options["max_attempts"] = 3
    queue = world.reopen()
    queue.put(b"poison", ttr=2)
    session = queue.session(deadline_soon=False)
    session.reserve(0)
    world.clock.advance(2)
    assert session.reserve(0).release() is True
    assert session.reserve(0).release() is False
    stats = queue.stats_job(1)
    assert (stats.state, stats.timeouts, stats.releases, stats.buries, stats.reserves) == ("buried", 1, 2, 1, 3)
    assert world.reopen().stats_job(1).state == "buried"


def test_drain(world: World) -> None:
    queue = world.queue
    queue.put(b"")
    queue.drain()
    assert queue.draining
    assert queue.stats().draining
    with pytest.raises(Draining):
        queue.put(b"")
    with pytest.raises(Draining):
        queue.put_many([b""])
    with queue.session() as session, session.reserve(0):
        pass
    assert not world.reopen().draining


def test_what_is_committed_in_between_is_not_committed_again(world: World) -> None:
    """An interrupt is mended while the settling thread is between two steps of its own."""
    queue = world.queue
    queue.put(b"stays", delay=1000)
    queue.checkpoint()
    log = queue._core.journal
    assert log is not None
    with queue.session() as session:
        for _ in range(50):
            queue.put(b"")
            session.reserve(0).delete()
        last = queue._compactor._prepare()
        queue._core.log.sync()
        queue._core._disturbed = queue._core.must_check = True
        queue.stats()
        queue._compactor._commit(last)
        queue._core._disturbed = queue._core.must_check = True
        queue.stats()
        queue._compactor._commit(last)
        queue._check()
        queue.put(b"later")
    assert [job.body_bytes for job in world.reopen().jobs()] == [5, 5]


def test_listing_pages_through_many(world: World) -> None:
    queue = world.queue
    for number in range(700):
        queue.put(b"", priority=700 - number)
        queue.put(b"", tube="other")
    listed = queue.jobs(state="ready")
    assert next(listed).id == 1399
    assert [job.id for job in listed] == list(range(1397, 0, -2))
    with queue.session() as session:
        session.watch("other")
        session.reserve_many(900)
        reserved = {job.id for job in queue.jobs("other", "reserved")}
        assert len(reserved) == 200
        assert {job.id for job in queue.jobs("other")} == set(range(2, 1401, 2))
    with pytest.raises(ValueError, match="state"):
        queue.jobs(state="asleep")
    assert list(queue.jobs("nowhere")) == []


@pytest.mark.parametrize("state", [None, ("ready", "buried")], ids=["all", "two"])
def test_a_job_that_moves_while_it_is_listed_is_listed(world: World, state: tuple[str, ...] | None) -> None:
    queue = world.queue
    queue.put(b"", priority=0)
    with queue.session() as session:
        session.reserve().bury()
    for _ in range(3):
        queue.put(b"", priority=1)
    listed = queue.jobs(state=state)
    found = [next(listed)]
    assert queue.kick(1) == 1
    found += listed
    assert [job.id for job in found] == [2, 3, 4, 1]


def test_a_state_that_is_named_twice_is_one(world: World) -> None:
    queue = world.queue
    queue.put(b"")
    queue.put(b"", delay=10)
    for state in (["ready", "ready"], ("ready", "delayed", "ready")):
        assert [job.id for job in queue.jobs(state=state)] == [1, 2][: len(set(state))]


def test_a_job_that_has_left_the_states_is_not_listed(world: World) -> None:
    queue = world.queue
    for number in range(700):
        queue.put(b"", priority=number)
    listed = queue.jobs(state=("ready", "delayed"))
    assert next(listed).id == 1
    with queue.session() as session:
        session.reserve_job(600)
        queue.delete(699)
        assert {600, 699}.isdisjoint(job.id for job in listed)
    with pytest.raises(ValueError, match="state"):
        queue.jobs(state=["ready", "asleep"])


def test_peeks(world: World) -> None:
    queue = world.queue
    for peek in (queue.peek_ready, queue.peek_delayed, queue.peek_buried):
        with pytest.raises(JobNotFound):
            peek()
        with pytest.raises(JobNotFound):
            peek("nowhere")
    queue.put(b"a", priority=5)
    queue.put(b"b", priority=4, key="k")
    queue.put(b"c", delay=9)
    queue.put(b"d", delay=8)
    assert queue.peek_ready().body == b"b"
    assert queue.peek_delayed().time_left == 8
    assert queue.peek_ready().time_left == 0
    with queue.session() as session:
        session.reserve(0).bury()
    buried = queue.peek_buried()
    assert buried.body == b"b"
    with pytest.raises(NotReserved):
        buried.release()
    buried.delete()
    with pytest.raises(JobNotFound):
        queue.peek(2)


def test_a_job_is_found_by_its_key(world: World) -> None:
    queue = world.queue
    queue.put(b"a", key="k")
    other = queue.put(b"b", key="k", tube="other", delay=5)
    assert [queue.peek_key("k").body, queue.peek_key("k", "other").id] == [b"a", other]
    with queue.session() as session:
        reserved = session.reserve(0)
        assert queue.peek_key("k").id == reserved.id
        with pytest.raises(NotReserved):
            queue.peek_key("k").delete()
        reserved.delete()
    with pytest.raises(JobNotFound, match="no job of 'default' has the key 'k'") as gone:
        queue.peek_key("k")
    assert gone.value.job_id is None
    with pytest.raises(JobNotFound):
        queue.peek_key("k", "nowhere")
    with pytest.raises(ValueError, match="key"):
        queue.peek_key("")
    assert world.reopen().peek_key("k", "other").body == b"b"


def test_an_expired_job_is_not_found_by_its_key(world: World) -> None:
    queue = world.queue
    queue.put_many([b""] * (CALL_SLICE + 1), expires_in=1)
    queue.put(b"", tube="t", key="k", expires_in=1)
    world.clock._elapsed_ns += 2_000_000_000  # no timer has run yet
    with pytest.raises(JobNotFound):
        queue.peek_key("k", "t")


def test_the_stats_of_a_job_have_its_body(world: World) -> None:
    queue = world.queue
    queue.put(b"a" * 32)
    queue.put(b"b" * 33)
    stats = list(queue.jobs())
    assert [each.body for each in stats] == [b"a" * 32, b"b" * 33] == [queue.stats_job(each.id).body for each in stats]
    assert repr(stats[0]).endswith(f"body_bytes=32, key=None, body={b'a' * 32!r})")
    assert repr(stats[1]).endswith(f"body_bytes=33, key=None, body={b'b' * 29 + b'...'!r})")


def test_a_closed_queue_says_so(world: World) -> None:
    queue = world.queue
    session = queue.session()
    future = session.reserve_future()
    queue.close()
    queue.close()
    assert queue.closed
    assert isinstance(future.exception(0), QueueClosed)
    for call in (lambda: queue.put(b""), session.reserve, queue.stats, queue.session, lambda: session.watch("x")):
        with pytest.raises(QueueClosed):
            call()
    session.close()
    assert "closed" in repr(queue)


def test_in_memory() -> None:
    clock = ManualClock(START_MS)
    with WorkQueue(None, clock=clock) as queue, queue.session() as session:
        queue.put(b"a", delay=1)
        queue.put_many([b"b", b"c"])
        session.reserve(0).delete()
        session.reserve(0).bury()
        assert queue.kick(1) == 1
        clock.advance(1)
        assert [session.reserve(0).id for _ in range(2)] == [1, 3]
        queue.sync()
        queue.checkpoint()
        queue._check()
        assert queue.stats().journal_bytes == queue.stats().segments == 0


def test_always_is_on_disk_when_it_returns() -> None:
    with World(sync="always", checkpoint_interval=1000) as world:
        queue = world.queue
        session = queue.session()
        journal = queue._core.journal
        assert journal is not None
        jobs: list[Job] = []
        for call in (
            lambda: queue.put(b"a"),
            lambda: queue.put_many([b"b", b"c"]),
            lambda: jobs.extend(session.reserve_many(3)),
            lambda: queue.save_reserves(),
            lambda: jobs[0].delete(),
            lambda: jobs[1].release(priority=1),
            lambda: jobs[2].bury(),
            lambda: queue.kick(1),
            lambda: queue.move(2, "elsewhere"),
            lambda: queue.pause_tube("default", 5),
            lambda: queue.delete(3),
            lambda: queue.clear("elsewhere"),
        ):
            call()
            stats = journal.queue.stats()
            assert stats.durable_id == stats.tail_id


def test_a_forked_child_has_to_open_its_own(world: World) -> None:
    queue = world.queue
    session = queue.session()
    queue.put(b"")
    with queue._core.lock:  # as another thread may have it at that moment
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (lambda: queue.put(b""), lambda: session.reserve(0), lambda: queue.delete(1), queue.stats):
                try:
                    call()
                except ForkedQueue:
                    refused += 1
            queue.close()
            os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    session.reserve(0).delete()


def test_a_job_that_was_only_looked_at_can_not_be_released(world: World) -> None:
    queue = world.queue
    queue.put(b"")
    with queue.session() as session:
        job = session.reserve(0)
        seen = queue.peek(1)
        assert seen.time_left == 60
        for call in (seen.release, seen.bury, seen.touch, seen.delete):
            with pytest.raises(NotReserved):
                call()
        job.delete()
        assert seen.time_left == 0
        for call in (seen.release, seen.bury, seen.touch, seen.delete):
            with pytest.raises(JobNotFound):
                call()
        queue._check()


def test_what_is_no_work_queue_is_refused(world: World) -> None:
    world.queue.close()
    for name, item in (("other", b"\x63 hello"), ("short", b"\x01 short"), ("line", b"\n")):
        with JournaledQueue("/work", name, clock=world.clock, disk=world.disk) as queue:
            queue.put(item)
        with pytest.raises(WrongKind, match="no work queue"):
            WorkQueue("/work", name, clock=world.clock, disk=world.disk)
        with JournaledQueue("/work", name, clock=world.clock, disk=world.disk) as queue:
            assert queue.get(timeout=0).data == item
    with pytest.raises(ValueError, match="max_job_bytes"):
        WorkQueue("/work", "small", segment_bytes=8192, clock=world.clock, disk=world.disk)
    for limit in ("max_jobs", "max_bytes", "max_attempts"):
        with pytest.raises(ValueError, match=limit):
            WorkQueue(None, **{limit: 0})  # type: ignore[call-overload]


def test_many_threads_share_the_work() -> None:
    """Real threads on the real clock: every job is done exactly once."""
    queue = WorkQueue(None)
    done: list[int] = []

    def work() -> None:
        with queue.session() as session:
            while True:
                with session.reserve(timeout=30) as job:
                    if job.body == b"stop":
                        return
                    done.append(job.id)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    ids = [queue.put(b"", priority=number % 7) for number in range(2000)]
    queue.put_many([b"stop"] * 8, priority=2**32 - 1)
    for worker in workers:
        worker.join(30)
    assert sorted(done) == ids
    queue._check()
    assert queue.stats().ready == queue.stats().reserved == 0
    queue.close()


def again_and_again(call: Callable[[], object]) -> None:
    """Until there is no room left in what was grown before."""
    for _ in range(300):
        call()


def test_a_full_disk_refuses_changes_but_no_delete() -> None:
    with World() as world:
        world.queue.close()
        disk = FailingDisk(world.disk)
        queue = world.queue = WorkQueue("/work", clock=world.clock, disk=disk, **world.options)
        session = queue.session()
        queue.put_many([bytes(300)] * 20)
        session.reserve(0)
        disk.arm(errno.ENOSPC, sticky=True, kinds=("grow", "create"))
        for refused in (
            lambda: queue.put(bytes(300)),
            lambda: queue.put_many([bytes(300)]),
            lambda: queue.pause_tube("default", 1),
            lambda: session.reserve_job(2).bury(),
            lambda: session.release(1, 5, 1) and session.reserve_job(1),
        ):
            with pytest.raises(QueueDiskFull):
                again_and_again(refused)
        queue.pause_tube("default", 0) if queue.stats_tube("default").pause else None
        states = [each.state for each in queue.jobs()]
        assert len(states) >= 20
        for each in list(queue.jobs()):
            session.delete(each.id)
        assert not list(queue.jobs())
        queue._check()
        disk.disarm()
        queue.put(b"there is room again")
        queue.close()
        assert [each.body_bytes for each in world.open().jobs()] == [19]
