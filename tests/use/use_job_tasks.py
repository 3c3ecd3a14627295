"""Tasks of asyncio that wait for a job of the work queue, and the end of a world with one."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import TYPE_CHECKING, Any

from kestrelpy.work import Job, WorkQueue
from tests.use.use_job_model import NAME, Work
from tests.use.use_jobs import close_work, mine, new_session, put_job, turn_loop
from tests.use.use_opening import FOLDER
from tests.use.use_operations import operation

if TYPE_CHECKING:
    from tests.use.use_world import Process, World


@operation("job_task", 1)
def tasks(w: World, rng: random.Random, process: Process) -> None:
    """A task in ``areserve`` gets a job, is cancelled before or after that, or is left behind by a loop that closes."""
    work = mine(w, process)
    if work is None or work.queue is None or asyncio._get_running_loop() is not None or w.depth:
        return
    session = new_session(w, work, rng, process)
    if session is None or session.handle is None:
        return
    loop, age, got = asyncio.new_event_loop(), work.age, list[Job]()

    async def wait(handle: Any, watching: list[str]) -> None:
        try:
            job = await handle.areserve(None)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            w.judge(handle.areserve, error)
            return
        got.append(job)
        if work.age == age:
            work.give(session, job, watching)

    task: asyncio.Task[None] | None = loop.create_task(wait(session.handle, list(session.watching)))
    assert task is not None
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    turn_loop(loop, 1)
    if not task.done():
        put_job(w, rng, process)
    turn_loop(loop, rng.choice((0, 1, 3)))
    end = rng.choice(("left", "left", "cancelled", "waited for"))
    if end == "cancelled":
        task.cancel()
    if end != "left":
        turn_loop(loop, 4)
    error = task.exception() if task.done() and not task.cancelled() else None
    if not task.done():
        session.waiting += 1  # it stays in line until a job comes, which then goes back
        work.left_behind += 1
    loop.close()
    del task, loop
    gc.collect(2 if gc.isenabled() else 1)  # what has lived through collections takes a whole one
    if error is not None:
        raise w.fail(f"a task in areserve has ended with {error!r}")
    w.saw("a task that waits for a job is " + end)


# -- the end -----------------------------------------------------------------------------------------------------------


def account(w: World) -> None:
    """Every job that was put is done, or there."""
    work: Work | None = w.work
    if work is None or not work.made:
        return
    if work.process is not None:
        close_work(w, random.Random(0), work.process)
    process = w.processes[0]
    work.process = process
    process.others.append(work)
    options: dict[str, Any] = {"codec": work.codec, "segment_bytes": 4096, "max_job_bytes": 600, "ship": False}
    work.queue, work.ship = WorkQueue(FOLDER, NAME, clock=process.clock, disk=process.disk, **options), None
    work.max_attempts = work.max_jobs = None
    try:
        work.adopt()
        work.check(thoroughly=True)
    finally:
        work.close_quietly()
