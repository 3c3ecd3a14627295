"""``Session.delete_many``: jobs that are acknowledged in one step."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from kestrelpy import QueueClosed
from kestrelpy.testing import CrashingDisk, FailingDisk, ManualClock, MemoryDisk, PowerModel
from kestrelpy.work import Job, WorkQueue
from kestrelpy.work.core import WorkCore
from tests.work.pair import vanish


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000_000)


@pytest.fixture
def queue(clock: ManualClock) -> Iterator[WorkQueue]:
    with WorkQueue("/work", clock=clock, disk=MemoryDisk(), segment_bytes=8192, max_job_bytes=4000) as made:
        yield made
        made._check()


def test_jobs_of_several_tubes_are_gone(queue: WorkQueue) -> None:
    queue.put_many([b"a"] * 3, tube="a")
    queue.put(b"b", key="k", expires_in=9)
    queue.put(b"c")
    with queue.session() as session:
        session.watch("a")
        jobs = session.reserve_many(4)
        with jobs[0]:  # the end of the block has nothing left to do
            assert session.delete_many(iter(jobs)) == []
        assert session.reserved == ()
        assert session.delete_many([]) == []
        assert [job.id for job in queue.jobs()] == [5]
        assert (queue.stats().bytes, queue.stats_tube("a").deletes, queue.stats_tube("default").deletes) == (1, 3, 1)
        queue.put(b"again", key="k")


def test_those_whose_reservation_is_over_are_returned(queue: WorkQueue, clock: ManualClock) -> None:
    queue.put(b"short", ttr=1)
    queue.put_many([b""] * 4)
    with queue.session() as session, queue.session() as other:
        jobs = session.reserve_many(4)
        short, gone, released, good = jobs
        clock.advance(2)
        assert session.reserve_job(short.id).reserves == 2
        gone.delete()
        released.release()
        of_another = other.reserve_job(5)
        peeked = queue.peek(released.id)
        wrong: list[Job] = [short, gone, released, of_another, peeked]
        assert session.delete_many([*wrong[:2], good, good, *wrong[2:]]) == wrong
        assert [job.id for job in queue.jobs()] == [released.id, short.id, of_another.id]
        assert session.reserved == (short.id,)


def test_what_is_no_job_deletes_nothing(queue: WorkQueue) -> None:
    queue.put(b"")
    with queue.session() as session:
        job = session.reserve()
        with pytest.raises(TypeError, match="delete_many takes the jobs that reserve_many returns, not 1"):
            session.delete_many([job, 1])  # type: ignore[list-item]
        assert session.reserved == (1,)
    with pytest.raises(QueueClosed):
        session.delete_many([job])


@pytest.mark.parametrize("is_power_cut", [False, True])
@pytest.mark.parametrize("sync", ["always", "never"])
def test_a_crash_leaves_all_of_them_or_none(clock: ManualClock, sync: Any, is_power_cut: bool) -> None:
    options: dict[str, Any] = {"segment_bytes": 8192, "max_job_bytes": 4000}
    disk = CrashingDisk()
    queue = WorkQueue("/work", clock=clock, disk=disk, sync=sync, **options)
    queue.put_many([bytes(300)] * 24)
    queue.sync()
    session = queue.session()
    jobs = session.reserve_many(20)
    states: list[CrashingDisk] = []
    disk.before_operation = lambda: states.append(disk.after_kill(Random(len(states))))
    session.delete_many(jobs)
    disk.before_operation = None
    states.append(disk.after_kill())
    vanish(queue, disk)
    if is_power_cut:
        states = [cut for state in states for cut in state.power_states(PowerModel.EXT4, 10)]
    found = []
    for state in states:
        with WorkQueue("/work", clock=clock, disk=state, **options) as again:
            found.append(again.stats().ready)
    assert set(found) == {24, 4}
    assert is_power_cut or found == sorted(found, reverse=True)


def test_a_full_disk_is_no_hindrance(clock: ManualClock) -> None:
    memory = MemoryDisk()
    failing = FailingDisk(memory)
    with WorkQueue("/work", clock=clock, disk=failing, segment_bytes=8192, max_job_bytes=4000) as queue:
        queue.put_many([b""] * 400)
        session = queue.session()
        jobs = session.reserve_many(390)
        failing.arm(errno.ENOSPC, sticky=True, kinds=frozenset({"grow"}))
        assert session.delete_many(jobs) == []
        queue._check()
        failing.disarm()
    with WorkQueue("/work", clock=clock, disk=memory, segment_bytes=8192, max_job_bytes=4000) as again:
        assert again.stats().ready == 10


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_interrupt_in_the_middle_deletes_all(
    queue: WorkQueue, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    queue.put_many([b""] * 4)
    session = queue.session()
    jobs = session.reserve_many(3)
    real, calls = WorkCore._forget_deleted_locked, []

    def interrupted(core: WorkCore, job: object) -> None:
        calls.append(job)
        if len(calls) > at:
            raise KeyboardInterrupt
        real(core, job)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(WorkCore, "_forget_deleted_locked", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.delete_many(jobs)
    assert [job.id for job in queue.jobs()] == [4]
    assert session.reserved == ()
    queue._check()
    queue.checkpoint()
    queue._check()
