"""Jobs and asyncio: the event loop goes on while the disk syncs, and a cancelled task has done what its page says."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import DurabilityUnknown, QueueClosed, QueueFull
from kestrelpy.work import DuplicateJob, Job, JobNotFound, JobTooBig, NewJob, NotReserved, Session, WorkQueue
from kestrelpy.work import job as job_module
from kestrelpy.work import queue as queue_module
from kestrelpy.work import session as session_module
from kestrelpy.work.core import WorkCore
from kestrelpy.work.held_room import HeldRoom
from tests.support import disks
from tests.support.disks import GatedDisk
from tests.support.patience import PATIENCE

Change = Callable[[WorkQueue, Session, Job], Awaitable[object]]


async def leave_block(_: WorkQueue, __: Session, job: Job) -> None:
    async with job:
        pass


async def raise_in_block(_: WorkQueue, __: Session, job: Job) -> None:
    try:
        async with job:
            raise LookupError("the work failed")
    except LookupError:
        return


CHANGES: dict[str, tuple[Change, dict[str, int]]] = {
    "put": (lambda queue, _, __: queue.aput(b"new"), {"reserved": 1, "ready": 1}),
    "job.delete": (lambda _, __, job: job.adelete(), {}),
    "job.release": (lambda _, __, job: job.arelease(), {"ready": 1}),
    "job.bury": (lambda _, __, job: job.abury(), {"buried": 1}),
    "session.delete": (lambda _, session, job: session.adelete(job.id), {}),
    "session.release": (lambda _, session, job: session.arelease(job.id, delay=60), {"delayed": 1}),
    "session.bury": (lambda _, session, job: session.abury(job.id), {"buried": 1}),
    "end of a block": (leave_block, {}),
    "end of a block that raises": (raise_in_block, {"ready": 1}),
}
"""By name: the call, and how many jobs are in which state after it."""


def states(queue: WorkQueue) -> dict[str, int]:
    stats = queue.stats()
    counts = {name: getattr(stats, name) for name in ("ready", "reserved", "delayed", "buried")}
    return {name: count for name, count in counts.items() if count}


async def turns(count: int = 20) -> None:
    """The loop goes round so many times: it is not blocked."""
    for _ in range(count):
        await asyncio.sleep(0)


async def started(disk: GatedDisk) -> None:
    """A sync is under way, and waits at the gate."""
    for _ in range(int(PATIENCE * 1000)):
        if disk.started.acquire(blocking=False):
            return
        await asyncio.sleep(0.001)
    raise AssertionError("no sync has begun")


async def begin(name: str, queue: WorkQueue, session: Session, disk: GatedDisk) -> asyncio.Task[object]:
    """Reserve a job, shut the gate, and let a task make the change; returns it when its sync is under way."""
    queue.put(b"job")
    job = await session.areserve(0)
    while disk.started.acquire(blocking=False):
        pass
    disk.gate.clear()
    task = asyncio.ensure_future(CHANGES[name][0](queue, session, job))
    await started(disk)
    return task


@pytest.mark.parametrize("name", CHANGES)
def test_the_loop_goes_on_while_the_disk_syncs(name: str, tmp_path: Path) -> None:
    async def scene() -> None:
        disk = GatedDisk()
        with WorkQueue(tmp_path, sync="always", disk=disk) as queue, queue.session() as session:
            try:
                task = await begin(name, queue, session, disk)
                await turns()
                assert not task.done(), "it has not waited for the disk"
                assert states(queue) == CHANGES[name][1], "the change is there, and is not on disk yet"
            finally:
                disk.gate.set()
            await asyncio.wait_for(task, PATIENCE)
            queue._check()

    asyncio.run(scene())


@pytest.mark.parametrize("name", CHANGES)
def test_a_cancelled_task_has_made_its_change(name: str, tmp_path: Path) -> None:
    async def scene() -> None:
        disk = GatedDisk()
        with WorkQueue(tmp_path, sync="always", disk=disk) as queue:
            session = queue.session()
            try:
                task = await begin(name, queue, session, disk)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert not disk.gate.is_set(), "the task has not waited for the sync"
            finally:
                disk.gate.set()
            assert states(queue) == CHANGES[name][1]
            job_id = await asyncio.wait_for(queue.aput(b"the next one"), PATIENCE)
            queue.delete(job_id)
            queue._check()
            session.close()

    asyncio.run(scene())
    with WorkQueue(tmp_path) as again:
        expected = dict(CHANGES[name][1])
        expected["ready"] = expected.get("ready", 0) + expected.pop("reserved", 0)
        assert states(again) == {name: count for name, count in expected.items() if count}


@pytest.mark.parametrize("name", CHANGES)
def test_a_sync_that_fails_reaches_the_task(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        disk = GatedDisk()
        queue = WorkQueue(tmp_path, sync="always", disk=disk)
        try:
            task = await begin(name, queue, queue.session(), disk)
            disk.error = OSError(5, "the disk has failed")
        finally:
            disk.gate.set()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if "raises" in name:  # the error of the block is raised, and that of its end is logged
            assert "was not released when its block raised" in caplog.text
        else:
            assert isinstance(outcome, DurabilityUnknown)
        with pytest.raises(DurabilityUnknown):
            await queue.aput(b"after that")
        queue.close()

    asyncio.run(scene())


def test_many_tasks_share_a_sync_and_take_no_thread(tmp_path: Path) -> None:
    async def scene() -> None:
        disk = GatedDisk()
        with WorkQueue(tmp_path, sync="always", disk=disk) as queue:
            await queue.aput(b"the thread that syncs is there from here on")
            threads = threading.active_count()
            while disk.started.acquire(blocking=False):
                pass
            disk.gate.clear()
            tasks = [asyncio.ensure_future(queue.aput(b"%d" % number)) for number in range(200)]
            await started(disk)
            await turns()
            assert threading.active_count() == threads
            before = disk.syncs
            disk.gate.set()
            ids = await asyncio.gather(*tasks)
            assert ids == sorted(ids), "first come, first served"
            assert disk.syncs - before <= 3
            assert queue.stats().ready == 201

    asyncio.run(scene())


@pytest.mark.parametrize("sync", ["never", 30.0])
def test_no_call_waits_for_a_sync_that_none_of_its_twins_waits_for(sync: Any, tmp_path: Path) -> None:
    async def scene() -> None:
        disk = GatedDisk()
        async with WorkQueue(tmp_path, sync=sync, disk=disk) as queue:
            disk.gate.clear()
            try:
                async with queue.session() as session:
                    await asyncio.wait_for(queue.aput(b"a"), PATIENCE)
                    await asyncio.wait_for((await session.areserve()).adelete(), PATIENCE)
            finally:
                disk.gate.set()

    asyncio.run(scene())


def test_the_close_of_a_queue_does_not_block_the_loop(tmp_path: Path) -> None:
    async def scene() -> None:
        disk = GatedDisk()
        async with WorkQueue(tmp_path, sync="never", disk=disk) as queue:
            await queue.aput(b"a")
            waiting = asyncio.ensure_future(queue.session().areserve())
            await (await waiting).abury()
            waiting = asyncio.ensure_future(queue.session().areserve())
            await turns(2)
            disk.gate.clear()
            closing = asyncio.ensure_future(queue.aclose())
            await started(disk)
            await turns()
            assert not closing.done()
            closing.cancel()
            await turns()
            assert not closing.done(), "a close is never left half done"
            disk.gate.set()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(closing, PATIENCE)
            assert queue.closed
            with pytest.raises(QueueClosed):
                await waiting

    asyncio.run(scene())
    with WorkQueue(tmp_path) as again:
        assert states(again) == {"buried": 1}


def test_blocks_of_asyncio_end_as_other_blocks_do() -> None:
    async def scene() -> None:
        async with WorkQueue(None) as queue:
            async with queue.session() as session:
                await queue.aput(b"done", ttr=60)
                async with await session.areserve() as job:
                    assert job.body == b"done"
                assert states(queue) == {}
                await queue.aput(b"raises")
                with pytest.raises(LookupError):
                    async with await session.areserve() as job:
                        raise LookupError
                assert states(queue) == {"ready": 1}
                async with await session.areserve() as job:
                    await session.abury(job.id)  # the block has nothing left to do
                assert states(queue) == {"buried": 1}
                queue.kick(1)
                with pytest.raises(NotReserved):
                    await take_away(queue, await session.areserve())
                async with queue.peek(job.id):  # not reserved: left alone
                    pass
                held = await session.areserve()
                task = asyncio.ensure_future(raise_when_cancelled(held))
                await turns(2)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert states(queue) == {"ready": 1}
                await session.areserve()
            assert states(queue) == {"ready": 1}, "the end of the session gives its jobs back"
            assert session.closed
        assert queue.closed

    asyncio.run(scene())


async def take_away(queue: WorkQueue, job: Job) -> None:
    """The job's time to run ends in its block."""
    core = queue._core
    async with job:
        with core.deliveries, core.lock, core.turn as now:
            core.scheduler.unreserve(job._stored, now)


async def raise_when_cancelled(job: Job) -> None:
    async with job:
        await asyncio.Event().wait()


def test_the_calls_raise_what_their_twins_raise() -> None:
    async def scene() -> None:
        async with WorkQueue(None, max_job_bytes=8, max_jobs=1) as queue, queue.session() as session:
            with pytest.raises(JobTooBig):
                await queue.aput(b"123456789")
            with pytest.raises(ValueError, match="ttr"):
                await queue.aput(b"", ttr=0)
            drawn = queue.new_id()
            assert await queue.aput(b"a", key="k", job_id=drawn, priority=7, delay=0.0, tube="t") == drawn
            assert queue.peek(drawn).priority == 7
            with pytest.raises(QueueFull):
                await queue.aput(b"b")
            queue._intake._max_jobs = None
            with pytest.raises(DuplicateJob):
                await queue.aput(b"b", key="k", tube="t")
            for call in (session.arelease, session.abury):
                with pytest.raises(NotReserved):
                    await call(drawn)
            with pytest.raises(JobNotFound):
                await session.adelete(99)
            session.watch("t")
            job = await session.areserve(0)
            assert await session.arelease(job.id, 3) is True
            with pytest.raises(NotReserved):
                await job.adelete()
            await queue.peek(drawn).adelete()
        with pytest.raises(QueueClosed):
            await queue.aput(b"")

    asyncio.run(scene())


async def block(core: WorkCore) -> None:
    if core.always:
        core.sync()


async def return_early(_: WorkCore) -> None:
    return


@pytest.mark.parametrize("fault", [block, return_early])
@pytest.mark.parametrize("name", CHANGES)
def test_a_call_that_waits_in_another_way_is_found(
    name: str, fault: Callable[[WorkCore], Awaitable[None]], tmp_path: Path
) -> None:
    with ExitStack() as planted:
        for module in (job_module, session_module, queue_module):
            planted.enter_context(patch.object(module, "acknowledged", fault))
        for module in (disks, sys.modules[__name__]):
            planted.enter_context(patch.object(module, "PATIENCE", 0.05))
        with pytest.raises((AssertionError, DurabilityUnknown)):
            test_the_loop_goes_on_while_the_disk_syncs(name, tmp_path)


def test_slots_of_a_full_disk_are_synced_apart(tmp_path: Path) -> None:
    """A delete that the journal had no room for is in the held room: that is synced, too, and not by the loop."""
    threads = []
    real = HeldRoom.sync

    def sync(self: HeldRoom) -> None:
        threads.append(threading.current_thread().name)
        real(self)

    async def scene() -> None:
        async with WorkQueue(tmp_path, sync="always") as queue:
            job_id = await queue.aput(b"a")
            held = queue._core.held
            assert held is not None
            with queue._core.lock:
                held._written += 1  # as a delete on a full disk leaves it
            await queue.session().adelete(job_id)
            assert not held.is_unsynced

    with patch.object(HeldRoom, "sync", sync):
        asyncio.run(scene())
    assert threads[0] == "kestrelpy-close"


NOTIFYING: dict[str, Callable[[WorkQueue], object]] = {
    "put": lambda work: work.put(b"x"),
    "aput": lambda work: asyncio.run(work.aput(b"x")),
    "put_many": lambda work: work.put_many([b"x"])[0],
    "put_all": lambda work: work.put_all([NewJob(b"x")])[0],
    "kick": lambda work: work.kick(1),
}


@pytest.mark.parametrize("change", NOTIFYING)
def test_a_change_that_a_close_has_synced_is_acknowledged(tmp_path: Path, change: str) -> None:
    """The callback of a worker's future closes the queue before the call that notified it has returned."""
    work = WorkQueue(tmp_path, "jobs", sync="always")
    if change == "kick":
        work.put(b"later", delay=100)
    reserved = work.session().reserve_future()
    reserved.add_done_callback(lambda _: work.close())
    assert NOTIFYING[change](work) == 1, "QueueClosed says that nothing was stored"
    assert work.closed
    with pytest.raises(QueueClosed):
        work.sync()
    with WorkQueue(tmp_path, "jobs") as again:
        assert [(job.id, job.state) for job in again.jobs()] == [(1, "ready")]
