"""Operations on a work queue in the folder of the others: jobs, sessions, waiters, who takes it for another queue."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable
from concurrent.futures import Future
from decimal import Decimal
from functools import wraps
from typing import TYPE_CHECKING, Any

from kestrelpy import DurabilityUnknown, JournaledQueue, QueueClosed, QueueEmpty, QueueFull, QueueLocked, WrongKind
from kestrelpy import open_reader as open_elsewhere
from kestrelpy.inbox import PartWriter
from kestrelpy.ship import NotShipped, ShipError, ShippingRequired
from kestrelpy.work import DeadlineSoon, DuplicateJob, Job, JobNotFound, NewJob, NotReserved, WorkQueue
from kestrelpy.work.core import CALL_SLICE
from tests.support.patience import until
from tests.use.use_job_model import (
    FLYING,
    GONE,
    MAYBE,
    NAME,
    NEVER,
    REFUSED,
    THERE,
    TUBES,
    JobModel,
    SessionModel,
    Work,
    work_of,
)
from tests.use.use_opening import FOLDER
from tests.use.use_operations import operation
from tests.use.use_outside import see_batches
from tests.use.use_trouble import pass_time

if TYPE_CHECKING:
    from tests.use.use_world import Process, Result, World

MANY = 130
"""More jobs than a call does of what is due before it does its own."""


def mine(w: World, process: Process) -> Work | None:
    work = work_of(w)
    return work if work.process is process and work.queue is not None else None


def check_error(w: World, work: Work, result: Result) -> None:
    """An error that is documented must have a reason, too."""
    error = result.error
    if error is None or result.interrupted:
        return
    if w.ships.explains(NAME, error):
        work.failed = work.failed or not isinstance(error, NotShipped)
        work.doubt_all()
    elif isinstance(error, QueueFull) and w.ships.jobs_may_be_refused(work):
        work.doubt_all()
    elif isinstance(error, QueueClosed):
        w.require(work.queue is None or work.queue.closed or w.nested or work.failed, f"{error!r}, and it is open")
    elif isinstance(error, OSError):
        fault = w.trouble.fired or w.trouble.refused_blocks or any(each.disk.waited for each in w.processes)
        fault = fault or (isinstance(error, DurabilityUnknown) and w.trouble.ever_fired)  # it is kept for the close
        w.require(fault, f"{error!r}, and nothing is wrong with the disk")
        work.failed = work.failed or isinstance(error, DurabilityUnknown)
        work.doubt_all()


def is_full(w: World) -> bool:
    return w.trouble.blocks is not None and w.disk.used_blocks() >= w.trouble.blocks


def seconds(rng: random.Random, *choices: float) -> Any:
    """A duration, as whoever calls may have it."""
    number = rng.choice(choices)
    return Decimal(str(number)) if rng.random() < 0.2 else number


# -- its life --------------------------------------------------------------------------------------------------------


@operation("job_open", 3)
def open_work(w: World, rng: random.Random, process: Process) -> None:
    work = work_of(w)
    if work.is_closing:
        return
    if work.has_codec is None:
        work.has_codec = rng.random() < 0.5
    retry_delay = rng.choice((0.0, 0.0, 0.3))
    options: dict[str, Any] = {
        "codec": work.codec,
        "retry_delay": rng.choice((retry_delay, lambda attempts: attempts and retry_delay)),
        "sync": rng.choice(("always", 0.1, "never")),
        "segment_bytes": 4096,
        "max_job_bytes": 600,
        "max_attempts": rng.choice((None, None, 1, 2)),
        "max_jobs": rng.choice((None, None, None, 5)),
        "checkpoint_interval": rng.choice((1.0, 0.2)),
    }
    if w.ships.is_on:
        options["ship"] = w.ships.draw(rng, NAME, work)
    w.touched.add(NAME)
    nested, before = w.nested, w.ships.before(NAME, options.get("ship"))
    result = w.call(process, WorkQueue, FOLDER, NAME, clock=process.clock, disk=process.disk, **options)
    if w.ships.judge_opening(NAME, work, options.get("ship"), result, before):
        return
    if isinstance(result.error, QueueLocked):
        busy = work.process is not None or w.depth or nested != w.nested or w.locks_unsure
        w.require(busy, f"{result.error!r}, and nobody has it open")
        return
    if result.error is not None:
        check_error(w, work, result)
        w.locks_unsure = True
        return
    w.require(work.process is None, "the work queue is open twice")
    work.process, work.queue, work.made = process, result.value, True
    work.ship = options.get("ship")
    work.max_attempts, work.max_jobs, work.retry_delay = options["max_attempts"], options["max_jobs"], retry_delay
    process.others.append(work)
    known = bool(work.jobs)
    work.adopt()
    w.saw("a work queue is opened again" if known else "a work queue is opened")


@operation("job_close", 0.5)
def close_work(w: World, rng: random.Random, process: Process) -> None:
    del rng
    work = mine(w, process)
    if work is None or work.queue is None:
        return
    queue, age = work.queue, work.age
    work.is_closing = True
    result = w.call(process, queue.close)
    work.is_closing = False
    w.ships.note_closed_jobs(queue, result)
    check_error(w, work, result)
    if work.queue is queue and work.age == age:
        work.let_go()


@operation("job_kind", 1)
def take_for_another(w: World, rng: random.Random, process: Process) -> None:
    """Who takes the work queue for a queue, or a queue for a work queue, is refused by name."""
    work = work_of(w)
    ways: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
    if work.made:
        clocked = {"clock": process.clock, "disk": process.disk}
        ways += [
            (JournaledQueue, (FOLDER, NAME), {**clocked, "inbox_interval": None}),
            (open_elsewhere, (FOLDER, NAME, "r"), clocked),
            (open_elsewhere, (FOLDER, NAME, ""), clocked),
            (PartWriter, (FOLDER, NAME), {"disk": process.disk}),
        ]
    if w.models["a"].stored and not w.models["a"].damaged:  # an empty one may become a work queue
        ways.append((WorkQueue, (FOLDER, "a"), {"clock": process.clock, "disk": process.disk, "max_job_bytes": 600}))
    if not ways:
        return
    function, arguments, options = rng.choice(ways)
    nested = w.nested
    result = w.call(process, function, *arguments, **options)
    if w.nested != nested or w.erasures or w.models["a"].damaged:
        w.require(result.error is not None, f"{result.value!r} is not what the queue is for")
        return
    excused = isinstance(result.error, QueueLocked | OSError | ShippingRequired)
    w.require(isinstance(result.error, WrongKind) or excused, f"{arguments[1]!r} is opened as what it is not: {result}")
    w.saw("a queue is taken for one of another kind")


# -- jobs come -------------------------------------------------------------------------------------------------------


def draw_job(w: World, work: Work, rng: random.Random, tube: str) -> JobModel:
    w.number += 1
    data = b"%d:" % w.number + b"j" * rng.choice((0, 1, 100, 500))
    key = rng.choice((None, None, None, "k", "l"))
    job = JobModel(w.number, data, tube, rng.choice((0, 5, 5, 1024, 65536)), 0.0, key)
    job.put_at_jump = w.jumps
    work.jobs[job.number] = job
    return job


def settle_put(w: World, work: Work, jobs: list[JobModel], result: Result) -> None:
    work.refresh()
    if result.ok:
        ids = [result.value] if isinstance(result.value, int) else list(result.value)
        for job, job_id in zip(jobs, ids, strict=True):
            if job.state in (FLYING, MAYBE) or job.id == 0:
                work.store(job, job_id)
            w.require(job.id == job_id, f"{job} was put as job {job_id}")
        return
    kept = result.interrupted or isinstance(result.error, DurabilityUnknown | ShipError)
    for job in jobs:
        if kept:
            job.state = MAYBE if job.state == FLYING else job.state
        else:
            w.require(job.state == FLYING or w.nested, f"the put of {job} has raised, and somebody has seen it")
            job.state = REFUSED if job.state == FLYING else job.state
    check_error(w, work, result)


@operation("job_put", 5)
def put_job(w: World, rng: random.Random, process: Process) -> None:
    work = mine(w, process)
    if work is None or work.queue is None:
        return
    job = draw_job(w, work, rng, rng.choice(TUBES))
    delay, ttr = seconds(rng, 0, 0, 0, 0.3, 2.5), seconds(rng, 0.7, 3, 60)
    now, age, nested = work.refresh(), work.age, w.nested
    job.ttr, job.due = float(ttr), now + float(delay) if delay else 0.0
    options: dict[str, Any] = {"tube": job.tube, "priority": job.priority, "delay": delay, "ttr": ttr}
    if rng.random() < 0.25:
        life = seconds(rng, 0.2, 1.5, 30)
        job.expires, options["expires_in"] = now + float(life), life
    if job.key is not None:
        options["key"] = job.key
    twins = [other for other in work.jobs.values() if other.key == job.key is not None and other is not job]
    twins = [other for other in twins if other.tube == job.tube or other.vague]
    call = work.queue.put
    if may_be_a_task(w, work) and rng.random() < 0.2:
        call = in_a_task(process, call, work.queue.aput, w)
    result = w.call(process, call, job.data, **options)
    settle_put(w, work, [job], result)
    if work.age != age or nested != w.nested:
        return
    if isinstance(result.error, DuplicateJob):
        w.require(any(twin.state in (THERE, MAYBE) for twin in twins), f"{result.error!r}, and there is none")
    elif result.ok and twins:
        alive = [twin for twin in twins if twin.is_alive(now) and not twin.vague]
        w.require(not alive, f"{job} has the key {job.key!r}, and {alive} has it too")
    elif isinstance(result.error, QueueFull) and not w.ships.jobs_may_be_refused(work):
        most = sum(each.state in (THERE, MAYBE, FLYING) for each in work.jobs.values())
        w.require(work.max_jobs is not None and most >= work.max_jobs, f"{result.error!r} with {most} jobs")
        w.saw("a job is refused")


@operation("job_put_many", 1)
def put_jobs(w: World, rng: random.Random, process: Process) -> None:
    work = mine(w, process)
    if work is None or work.queue is None:
        return
    tube, ttr, delay = rng.choice(TUBES), seconds(rng, 0.7, 3, 60), seconds(rng, 0, 0, 0.5)
    now = work.refresh()
    many = "many jobs" in w.swarm.lean or rng.random() < 0.05
    jobs = [draw_job(w, work, rng, tube) for _ in range(MANY if many else rng.choice((0, 1, 2, 5)))]
    options: dict[str, Any] = {"tube": tube, "ttr": ttr, "delay": delay, "priority": 7}
    life = seconds(rng, 0.2, 1.5) if rng.random() < (0.7 if many else 0.2) else None
    if life is not None:
        options["expires_in"] = life
    for job in jobs:
        job.priority, job.ttr, job.key = 7, float(ttr), None
        job.due = now + float(delay) if delay else 0.0
        if life is not None:
            job.expires = now + float(life)
    settle_put(w, work, jobs, w.call(process, work.queue.put_many, [job.data for job in jobs], **options))


@operation("job_put_all", 1)
def put_jobs_of_all_tubes(w: World, rng: random.Random, process: Process) -> None:
    work = mine(w, process)
    if work is None or work.queue is None:
        return
    now, age, nested = work.refresh(), work.age, w.nested
    jobs = [draw_job(w, work, rng, rng.choice(TUBES)) for _ in range(rng.choice((0, 1, 2, 5)))]
    new = []
    for job in jobs:
        delay, ttr = seconds(rng, 0, 0, 0.5), seconds(rng, 0.7, 3, 60)
        life = seconds(rng, 0.2, 1.5) if rng.random() < 0.2 else None
        job.ttr, job.due = float(ttr), now + float(delay) if delay else 0.0
        job.expires = NEVER if life is None else now + float(life)
        new.append(NewJob(job.data, job.tube, job.priority, delay, ttr, job.key, life))
    named = [(job.tube, job.key) for job in jobs if job.key is not None]
    twins = [other for other in work.jobs.values() if other.key is not None and other not in jobs]
    twins = [other for other in twins if (other.tube, other.key) in named or other.vague]
    result = w.call(process, work.queue.put_all, new)
    settle_put(w, work, jobs, result)
    w.saw("a batch of jobs of several tubes")
    if work.age != age or nested != w.nested:
        return
    twice = len(set(named)) < len(named)
    if isinstance(result.error, DuplicateJob):
        alive = any(twin.state in (THERE, MAYBE) for twin in twins)
        w.require(twice or alive, f"{result.error!r}, and there is none")
    elif result.ok:
        alive = any(twin.is_alive(now) and not twin.vague for twin in twins)
        w.require(not twice and not alive, f"{jobs} are put, and others have their keys too")


# -- sessions --------------------------------------------------------------------------------------------------------


def some_session(w: World, work: Work, rng: random.Random, process: Process) -> SessionModel | None:
    there = work.open_sessions()
    if there and (len(there) > 3 or rng.random() < 0.85):
        return rng.choice(there)
    return new_session(w, work, rng, process)


def new_session(w: World, work: Work, rng: random.Random, process: Process) -> SessionModel | None:
    assert work.queue is not None
    age = work.age
    named = rng.sample(TUBES, rng.randint(1, len(TUBES))) if rng.random() < 0.3 else []
    result = w.call(process, work.queue.session, *named, deadline_soon=rng.random() < 0.3)
    check_error(w, work, result)
    if not result.ok or work.age != age:
        return None
    session = SessionModel(result.value)
    work.sessions.append(session)
    if named:
        w.saw("a session of some tubes")
        session.watching = named
        return session
    for tube in TUBES[1:]:
        if rng.random() < 0.6 and w.call(process, result.value.watch, tube).ok:
            session.watching.append(tube)
    return session


class Going:
    """Jobs during a call that lets go of them: somebody who waits may have them before it returns."""

    def __init__(self, jobs: list[JobModel]) -> None:
        self.before = [(job, job.given, job.vague) for job in jobs]
        for job in jobs:
            job.vague = True

    def stayed(self) -> list[JobModel]:
        """Those that nobody has got meanwhile, as they were."""
        stayed = []
        for job, given, vague in self.before:
            if job.given == given:
                job.vague = vague
                stayed.append(job)
        return stayed


@operation("job_session_end", 0.6)
def end_session(w: World, rng: random.Random, process: Process) -> None:
    """Closed, or dropped by whoever had it, with its jobs or without."""
    work = mine(w, process)
    if work is None or not work.open_sessions():
        return
    session = rng.choice(work.open_sessions())
    handle, age = session.handle, work.age
    assert handle is not None
    if rng.random() < 0.5:
        if session.held or session.waiting:
            return
        session.handle = None
        del handle
        gc.collect(1)
        w.saw("a session is dropped")
        return
    going = Going(list(session.held))
    result = w.call(process, handle.close)
    check_error(w, work, result)
    if work.age != age:
        return
    session.handle = None
    work.refresh()
    for job in going.stayed():
        job.leave_line()
        job.due = 0.0
        job.vague = job.vague or not result.ok or bool(w.nested)
    w.saw("a session is closed")


def left_of(due: list[tuple[JobModel, int]]) -> list[JobModel]:
    """Those that nobody has got meanwhile who waited for longer."""
    return [job for job, given in due if job.given == given]


def judge_taken(
    w: World, work: Work, session: SessionModel, handles: list[Job], due: list[tuple[JobModel, int]], nested: int
) -> None:
    """``due``: what had to be found, and how often it was given out until then."""
    left = left_of(due)
    taken = [work.give(session, handle, session.watching) for handle in handles]
    if nested != w.nested or w.depth or work.left_behind or work.stopped_early:
        return
    for job in taken:
        passed = [other for other in left if (other.priority, other.id) < (job.priority, job.id) and other not in taken]
        w.require(not passed, f"{job} is given out before {passed[:1]}")


@operation("job_reserve", 5)
def reserve(w: World, rng: random.Random, process: Process) -> None:
    work = mine(w, process)
    session = some_session(w, work, rng, process) if work is not None and work.queue is not None else None
    if work is None or session is None or session.handle is None:
        return
    count = rng.choice((None, None, 2, 200))
    now, age, nested = work.refresh(), work.age, w.nested
    due = [(job, job.given) for job in work.ready_for(session.watching, now)]
    if count is None:
        result = w.call(process, session.handle.reserve, 0)
    else:
        result = w.call(process, session.handle.reserve_many, count, 0)
    if work.age != age:
        return
    if result.ok:
        judge_taken(w, work, session, result.value if count else [result.value], due, nested)
        w.saw("a job is reserved")
        return
    check_error(w, work, result)
    if isinstance(result.error, QueueEmpty | DeadlineSoon) and nested == w.nested and not w.depth:
        late = work.left_behind or work.stopped_early
        w.require(not left_of(due) or late, f"{result.error!r}, and {left_of(due)[:1]} is ready")
    elif result.interrupted:
        work.doubt_all()


@operation("job_late", 0.5, nestable=False)
def reserve_late(w: World, rng: random.Random, process: Process) -> None:
    """A process that was stopped for a while: its timers have not run yet when it asks."""
    work = mine(w, process)
    if work is None:
        return
    seconds_late = rng.choice((0.5, 1.6, 5.0))
    w.now_ms += round(seconds_late * 1000)
    w.elapsed += seconds_late
    process.clock._elapsed_ns += round(seconds_late * 1e9)
    for other in w.processes:
        if other is not process:
            w.call(other, advance_of(other), seconds_late)
    work.stopped_early = work.due_since(work.now() - seconds_late) >= CALL_SLICE
    rng.choice((reserve, reserve, put_job))(w, rng, process)
    work.stopped_early = False
    w.call(process, advance_of(process), 0)
    for model in w.models.values():
        see_batches(w, model)
    w.saw("a process asks for a job before its timers have run")


def advance_of(process: Process) -> Callable[[float], None]:
    def run(seconds: float) -> None:
        """Raises nothing of the library's."""
        process.clock.advance(seconds)

    return run


@operation("job_future", 2)
def reserve_future(w: World, rng: random.Random, process: Process) -> None:
    work = mine(w, process)
    session = some_session(w, work, rng, process) if work is not None and work.queue is not None else None
    if work is None or session is None or session.handle is None:
        return
    waiting = [future for future in work.futures if not future.done()]
    if waiting and rng.random() < 0.3:
        w.call(process, rng.choice(waiting).cancel)
        return
    if rng.random() < 0.1:
        odd = w.call(process, session.handle.reserve_future, float("nan"))
        w.require(not odd.ok, "NaN is not a timeout, and it is accepted")
        return
    age, watching = work.age, list(session.watching)
    result = w.call(process, session.handle.reserve_future, rng.choice((None, 0, 0.4, 5)))
    check_error(w, work, result)
    if not result.ok:
        if result.interrupted:
            work.doubt_all()
        return
    future: Future[Job] = result.value
    session.waiting += 1

    def done(future: Future[Job]) -> None:
        session.waiting -= 1
        w.did = True
        if work.age != age or future.cancelled():
            return
        error = future.exception(0)
        if error is not None:
            over = isinstance(error, ShipError) and w.ships.explains(NAME, error)
            w.require(over or isinstance(error, QueueEmpty | DeadlineSoon | QueueClosed), f"a future has {error!r}")
        else:
            work.give(session, future.result(0), watching)
            w.saw("a future has got a job")
        w.act(process, "a callback of reserve_future")

    work.futures.append(future)
    try:
        future.add_done_callback(done)
    except BaseException as error:
        if not any(error is thrown for thrown in w.thrown):
            raise


# -- what becomes of them ----------------------------------------------------------------------------------------------


def may_be_a_task(w: World, work: Work) -> bool:
    """Not within another loop. Where a job is shipped, a task may wait for a store that nobody drives meanwhile."""
    return not w.depth and work.ship is None and asyncio._get_running_loop() is None


def in_a_task(process: Process, call: Callable[..., Any], its_task: Callable[..., Any], w: World) -> Callable[..., Any]:
    """``call`` by its name for asyncio, in a loop of its own that is turned until the task is done."""

    @wraps(call)
    def run(*arguments: Any, **options: Any) -> Any:
        loop = asyncio.new_event_loop()
        try:
            task = loop.create_task(its_task(*arguments, **options))
            until(lambda: turned(task))
            w.saw("a task changes a job")
            return task.result()
        finally:
            loop.close()

    def turned(task: asyncio.Task[Any]) -> bool:
        turn_loop(task.get_loop(), 3)
        if not task.done():
            try:
                process.clock.advance(0)
            except BaseException as error:  # of somebody else's callback
                if not any(error is thrown for thrown in w.thrown):
                    raise
        return task.done()

    return run


def turn_loop(loop: asyncio.AbstractEventLoop, times: int) -> None:
    for _ in range(times):
        loop.call_soon(loop.stop)
        loop.run_forever()


@operation("job_settle", 5)
def settle(w: World, rng: random.Random, process: Process) -> None:
    work = mine(w, process)
    held = work.held() if work is not None else []
    if work is None or not held:
        return
    job, what = rng.choice(held), rng.choice(("delete", "delete", "delete", "release", "bury", "touch"))
    handle = job.handle
    assert handle is not None
    now, age, nested = work.refresh(), work.age, w.nested
    was_held = job.handle is handle and job.until > now and not job.vague
    delay, full = rng.choice((seconds(rng, 0, 0, 0.4), None)), is_full(w)
    priority = rng.choice((None, None, 3))
    body = another_body(job, rng) if what in ("release", "bury") and rng.random() < 0.4 else None
    going = Going([job])
    call = getattr(handle, what)
    if what != "touch" and may_be_a_task(w, work) and rng.random() < 0.3:
        call = in_a_task(process, call, getattr(handle, "a" + what), w)
    if what == "release":
        result = w.call(process, call, priority, delay, body=body)
    elif what == "bury":
        result = w.call(process, call, priority, body=body)
    else:
        result = w.call(process, call)
    if work.age != age:
        if what == "delete":
            job.state = GONE if result.ok else MAYBE
        return
    if not going.stayed():
        job.fails += what == "release"
        return
    later = work.refresh()
    if result.ok:
        if nested != w.nested:
            job.vague = job.vague or what != "delete"
        elif body is not None:
            job.bodies = {body}
            w.saw("a job has another body")
        if what == "release" and delay is None and work.retry_delay:
            w.saw("a job is given back, and waits as the queue says")
        become(work, job, what, later, work.retry_delay if delay is None else float(delay), priority, result.value)
        if what == "delete" and full:
            w.saw("a delete on a full disk")
        return
    settle_refused(w, work, job, what, result, was_held=was_held and nested == w.nested)


def another_body(job: JobModel, rng: random.Random) -> bytes:
    """From here on the job may have it."""
    job.changes += 1
    body = b"%d:%d " % (job.number, job.changes) + b"k" * rng.choice((0, 1, 100, 500))
    job.bodies.add(body)
    return body


def become(work: Work, job: JobModel, what: str, now: float, delay: float, priority: int | None, alive: object) -> None:
    if what == "touch":
        job.until = now + job.ttr
        return
    job.leave_line()
    if what == "delete":
        job.state = GONE
        return
    job.priority = job.priority if priority is None else priority
    job.buried = what == "bury"
    job.due = 0.0
    if what == "release":
        work.note_failure(job, now + delay if delay else 0.0)
        under_way = work.world.stack[:-1]
        if "job_settle" in under_way or "job_with" in under_way:  # the one that is under way counts already, perhaps
            job.vague = True
        if not job.vague and not job.fails_vague:
            work.world.require(alive is not job.buried, f"{job} is released, and the answer is {alive}")


def settle_refused(w: World, work: Work, job: JobModel, what: str, result: Result, *, was_held: bool) -> None:
    if isinstance(result.error, NotReserved | JobNotFound):
        w.require(not was_held, f"{what} of {job}: {result.error!r}, and it is held")
        return
    check_error(w, work, result)
    job.vague = True
    if what == "delete" and job.state == THERE:
        job.state = MAYBE


def do_block(handle: Job, inside: Callable[[], None], raises: bool) -> None:
    """The end of the block raises ``NotReserved``, ``OSError``, ``QueueClosed``, ``QueueFull``, ``ShipError``."""
    try:
        with handle:
            inside()
            if raises:
                raise LookupError("of the block")
    except LookupError as error:
        if "of the block" not in str(error):
            raise


@operation("job_with", 1)
def with_job(w: World, rng: random.Random, process: Process) -> None:
    """The block of ``with job:`` takes its time."""
    work = mine(w, process)
    held = work.held() if work is not None else []
    if work is None or not held or w.depth:
        return
    job = rng.choice(held)
    handle, raises = job.handle, rng.random() < 0.3
    assert handle is not None
    work.refresh()

    age, nested = work.age, w.nested
    after: dict[str, Any] = {}

    def inside() -> None:
        pass_time(w, rng.choice((0, 0, 1, 5)))
        after["held"] = work.age == age and job.handle is handle and work.now() < job.until - 0.01
        after["over"] = work.age != age or work.now() > job.until + 0.01

    was_vague, going = job.vague, Going([job])
    result = w.call(process, do_block, handle, inside, raises)
    if work.age != age or nested != w.nested or not going.stayed():
        job.vague = job.fails_vague = True
        if job.state == THERE:
            job.state = MAYBE
        return
    w.require(not (result.ok and after["over"] and not raises), f"the block of {job} says nothing, and it was over")
    later = work.refresh()
    if result.ok and after["held"]:
        job.vague = was_vague or raises
        become(
            work, job, "release" if raises else "delete", later, work.retry_delay if raises else 0.0, None, alive=True
        )
    elif not result.ok:
        settle_refused(w, work, job, "delete", result, was_held=after.get("held", False) and not was_vague)
    else:
        job.vague = True
        if job.state == THERE and not raises:
            job.state = MAYBE
    w.saw("a block with a job")


@operation("job_change", 2)
def change(w: World, rng: random.Random, process: Process) -> None:
    """What anybody may do: delete by id, kick, move, pause, clear, peek."""
    work = mine(w, process)
    if work is None or work.queue is None:
        return
    queue, now, age, nested = work.queue, work.refresh(), work.age, w.nested
    what = rng.choice(("delete", "delete", "kick", "kick_job", "pause", "move", "peek", "clear", "sync"))
    there = [job for job in work.jobs.values() if job.id and job.state in (THERE, MAYBE)]
    tube = rng.choice(TUBES)
    job = rng.choice(there) if there else None
    if what in ("delete", "kick_job", "move", "peek") and job is None:
        return
    going = Going([job] if what in ("delete", "kick_job", "move") else there if what in ("kick", "pause") else [])  # type: ignore[list-item]
    if what == "kick":
        result = w.call(process, queue.kick, rng.choice((1, 3)), tube)
        touched = [each for each in there if each.tube == tube and each.holder is None]
    elif what == "pause":
        pause = seconds(rng, 0, 0.5, 3)
        result = w.call(process, queue.pause_tube, tube, pause)
        touched = []
        if not isinstance(result.error, LookupError):
            work.may_be_paused[tube] = max(work.now() + float(pause), work.may_be_paused.get(tube, 0.0))
        if result.ok:
            work.paused[tube] = work.may_be_paused[tube] = work.now() + float(pause)
        elif not isinstance(result.error, LookupError):  # a shorter one may be in its place
            work.paused.pop(tube, None)
    elif what == "clear" and rng.random() < 0.2:
        result = w.call(process, queue.clear, tube)
        touched = [each for each in there if each.tube == tube and (each.holder is None or each.vague)]
    elif what == "clear":
        result, touched = w.call(process, queue.stats), []
    elif what == "sync":
        result, touched = w.call(process, rng.choice((queue.sync, queue.checkpoint, queue.save_reserves))), []
    else:
        assert job is not None
        arguments = (job.id, tube) if what == "move" else (job.id,)
        result, touched = w.call(process, getattr(queue, what), *arguments), [job]
    if work.age != age:
        touched = list(work.jobs.values())
    stayed = going.stayed()
    if going.before:
        touched = [each for each in touched if each in stayed]
        if not touched:
            return
    judge_change(w, work, what, tube, touched, result, now, quiet=nested == w.nested and not w.depth)


def judge_change(
    w: World, work: Work, what: str, tube: str, touched: list[JobModel], result: Result, now: float, *, quiet: bool
) -> None:
    if isinstance(result.error, NotReserved):
        w.require(not quiet or touched[0].holder is not None or touched[0].vague, f"{what}: {result.error!r}")
        return
    if isinstance(result.error, JobNotFound):
        alive = what != "kick_job" and quiet and touched[0].is_alive(now) and touched[0].is_alive(work.refresh())
        w.require(not alive, f"{what} of {touched}: {result.error!r}")
        return
    check_error(w, work, result)
    if what == "peek":
        return
    for job in touched:
        if what == "delete" and result.ok:
            w.require(job.holder is None or job.vague or not quiet, f"{job} is deleted, and a session has it")
            job.leave_line()
            job.state = GONE
        elif what in ("delete", "clear"):
            job.state = MAYBE if job.state == THERE else job.state
            job.vague = True
        elif what == "move" and result.ok and quiet:
            job.tube = tube
        else:
            job.vague = True
