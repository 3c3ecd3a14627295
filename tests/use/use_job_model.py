"""What is known of the jobs of a work queue in the explorer's folder, and what may be known of them after an accident.

The exact model is that of tests/work (``model``, ``pair``): no accident, no two moments that coincide. This one knows
what must be so and what may be so, and a job whose place is in doubt (``vague``) may be anywhere, but must be there. A
job that was put is never lost, one that was deleted never comes back, none is two sessions' at
a time, and none is given out before its time or after its life.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from kestrelpy import DurabilityUnknown, KestrelError
from kestrelpy._process import forget
from kestrelpy.work import Job, Session, WorkQueue
from kestrelpy.work.stored import is_held

if TYPE_CHECKING:
    from tests.use.use_world import Process, World

NAME = "work"
TUBES = ("default", "a", "b")
EPS = 0.003
"""Seconds by which a moment may have moved that was stored in milliseconds."""
NEVER = float("inf")
FLYING, THERE, MAYBE, REFUSED, GONE = "on its way", "there", "perhaps there", "refused", "gone"

T = TypeVar("T")


class JobModel:
    """One job."""

    def __init__(self, number: int, data: bytes, tube: str, priority: int, ttr: float, key: str | None) -> None:
        self.number = number
        self.data = data
        self.bodies = {data}
        """All that its body may be: a call that gives it another one may be interrupted."""
        self.changes = 0
        self.tube = tube
        self.priority = priority
        self.ttr = ttr
        self.key = key
        self.id = 0
        self.state = FLYING
        self.buried = False
        self.due = 0.0
        self.expires = NEVER
        self.put_at_jump = 0
        """How often the wall clock had jumped when it was put. What is stored follows that clock, and the queue may
        have written it again since.
        """
        self.fails = 0
        self.fails_vague = False
        """Whether it may have failed once more: in the middle of a call that others came into."""
        self.given = 0
        """How many reservations of it there were: one may be made within the call that ends another."""
        self.vague = False
        self.vague_time = False
        self.holder: SessionModel | None = None
        self.until = 0.0
        self.handle: Job | None = None

    def __repr__(self) -> str:
        return f"job {self.id or '?'} ({self.data[:12]!r}, {self.state})"

    def leave_line(self) -> None:
        """Nobody has it any more."""
        if self.holder is not None:
            self.holder.held.discard(self)
        self.holder = self.handle = None

    def is_expired(self, now: float) -> bool:
        return self.expires < now - EPS and not self.vague_time

    def is_alive(self, now: float) -> bool:
        """Whether it must be there."""
        return self.state == THERE and (self.holder is not None or self.expires == NEVER or self.outlives(now))

    def outlives(self, now: float) -> bool:
        return self.expires > now + EPS and not self.vague_time

    def is_ready(self, now: float) -> bool:
        """Whether a reserve must find it, in a tube that is not paused."""
        return (
            self.state == THERE
            and not (self.vague or self.vague_time or self.buried or self.holder)
            and self.due < now - EPS
            and self.expires > now + EPS
        )

    def states(self, now: float) -> set[str]:
        """What may be said of it."""
        if self.vague:
            return {"ready", "delayed", "buried", "reserved"}
        if self.holder is not None:
            return {"reserved"}
        if self.buried:
            return {"buried"}
        if self.vague_time or abs(self.due - now) < EPS:
            return {"ready", "delayed"}
        return {"delayed"} if self.due > now else {"ready"}


class Backwards:
    """A codec: what is on disk is not what was put, so a call that encodes or decodes too little, or twice, is seen."""

    def encode(self, value: bytes, /) -> bytes:
        return bytes(memoryview(value))[::-1]

    def decode(self, data: bytes, /) -> bytes:
        return data[::-1]


class SessionModel:
    """One session. ``handle``: ``None`` if whoever had it has dropped it."""

    def __init__(self, handle: Session) -> None:
        self.handle: Session | None = handle
        self.watching = ["default"]
        self.held: set[JobModel] = set()
        self.waiting = 0


class Work:
    """The work queue of a world: who has it open, and its jobs."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.name = NAME
        self.process: Process | None = None
        self.queue: WorkQueue | None = None
        self.ship: Any = None
        self.has_codec: bool | None = None
        """Drawn before the first opening; the codec stays the same."""
        self.retry_delay = 0.0
        self.made = self.is_closing = False
        self.failed = False
        self.jobs: dict[int, JobModel] = {}
        self.by_id: dict[int, JobModel] = {}
        self.sessions: list[SessionModel] = []
        self.futures: list[Future[Job]] = []
        self.paused: dict[str, float] = {}
        self.may_be_paused: dict[str, float] = {}
        self.max_attempts: int | None = None
        self.max_jobs: int | None = None
        self.left_behind = 0
        """Tasks in closed loops that are still in line: what they are given goes back a moment later."""
        self.stopped_early = False
        """Whether more is due than is done in one turn: what is ready by now may not be in line yet."""
        self.trouble = 0
        self.age = 0
        """How often it was opened: what comes of an earlier life counts no more."""

    @property
    def codec(self) -> Backwards | None:
        return Backwards() if self.has_codec else None

    # -- time --------------------------------------------------------------------------------------------------------

    def jumped(self) -> float:
        from tests.use.use_world import START_MS

        return (self.world.now_ms - START_MS) / 1000 - self.world.elapsed

    def now(self) -> float:
        """By the clock of who has it open: in the middle of an advance it is not where others are."""
        from tests.use.use_world import START_MS

        if self.process is None:
            return self.world.elapsed
        return (self.process.clock.time_ns() - START_MS * 1_000_000) / 1e9 - self.jumped()

    def refresh(self) -> float:
        """Let the time do its work."""
        now = self.now()
        for job in list(self.jobs.values()):
            if job.holder is not None and job.until <= now + EPS:
                job.vague = job.vague or abs(job.until - now) <= EPS
                job.leave_line()
                self.note_failure(job)
            if job.state == THERE and job.holder is None and job.is_expired(now) and not job.vague:
                job.state = MAYBE  # if the clock is set back, and nobody could write that it is gone, it may live again
        trouble = self.world.trouble.fired + self.world.trouble.refused_blocks
        if trouble != self.trouble:  # something may not have been written
            self.trouble = trouble
            self.doubt_all()
        if self.world.ships.is_shut(self):
            self.doubt_all()
        return now

    def due_since(self, then: float) -> int:
        """How many things may have become due after that, and have not been done."""
        now = self.now()
        ends = [end for job in self.jobs.values() for end in (job.due, job.expires, job.until)]
        return sum(then - EPS <= end <= now + EPS for end in ends) + len(self.futures) + len(self.sessions)

    def note_failure(self, job: JobModel, due: float = 0.0) -> None:
        job.fails += 1
        job.due = due
        job.buried = self.max_attempts is not None and job.fails >= self.max_attempts
        job.vague = job.vague or (job.fails_vague and self.max_attempts is not None)

    def doubt_all(self) -> None:
        for job in self.jobs.values():
            job.vague = True

    # -- jobs --------------------------------------------------------------------------------------------------------

    def see(self, job_id: int, body: bytes) -> JobModel:
        head = body.split(b":", 1)[0]
        job = self.jobs.get(int(head)) if head.isdigit() else None
        if job is None or body not in job.bodies:
            raise self.world.fail(f"the work queue has job {job_id} that nobody has put: {body[:30]!r}")
        if job.state in (REFUSED, GONE):
            raise self.world.fail(f"{job} is seen again as job {job_id}")
        self.store(job, job_id)
        return job

    def store(self, job: JobModel, job_id: int) -> None:
        if self.by_id.setdefault(job_id, job) is not job or job.id not in (0, job_id):
            raise self.world.fail(f"the id {job_id} is that of {job} and of {self.by_id[job_id]}")
        job.id = job_id
        if job.state in (FLYING, MAYBE):
            job.state = THERE

    def give(self, session: SessionModel, handle: Job, watching: list[str]) -> JobModel:
        """A reservation: whether it may have been made."""
        w, age, job, now = self.world, self.age, self.see(handle.id, handle.value), self.refresh()
        now_known = not (job.vague or job.vague_time)
        if now_known:
            w.require(job.holder is None, f"{job} is given out, and a session has it for {job.until - now} s more")
            w.require(not job.buried, f"{job} is given out, and it is buried")
            w.require(job.due <= now + EPS, f"{job} is given out {job.due - now} s early")
        w.require(not job.is_expired(now), f"{job} is given out, and its life is over")
        w.require(
            job.tube in watching or not now_known, f"{job} of tube {job.tube} is given out to who watches {watching}"
        )
        paused = self.paused.get(job.tube, 0.0)
        w.require(paused <= now + EPS or not now_known, f"{job} is given out, and its tube is paused")
        job.leave_line()
        left = self.ask(lambda: handle.time_left)
        w.require(-EPS <= left <= job.ttr + EPS, f"{job} has a ttr of {job.ttr} s, and {left} s are left")
        job.given += 1
        job.tube, job.priority = handle.tube, handle.priority
        held = self.ask(lambda: is_held(handle._stored, handle._session, handle.reserves))
        job.vague = not held or age != self.age  # to ask may have told others, who have closed it
        job.buried, job.due = False, 0.0
        if not job.vague:
            job.holder, job.until, job.handle = session, now + left, handle
            session.held.add(job)
        return job

    def ask(self, question: Callable[[], T]) -> T:
        """What a callback of somebody else's raises may come out of any call."""
        try:
            return question()
        except BaseException as error:
            if not any(error is thrown for thrown in self.world.thrown):
                raise
            return question()

    def open_sessions(self) -> list[SessionModel]:
        return [session for session in self.sessions if session.handle is not None]

    def held(self) -> list[JobModel]:
        return [job for job in self.jobs.values() if job.handle is not None and job.holder is not None]

    def ready_for(self, watching: list[str], now: float) -> list[JobModel]:
        """What a reserve must find, the most urgent first."""
        ends = {tube: max(self.paused.get(tube, 0.0), self.may_be_paused.get(tube, 0.0)) for tube in watching}
        open_tubes = [tube for tube in watching if ends[tube] < now - EPS]
        jobs = [job for job in self.jobs.values() if job.tube in open_tubes and job.is_ready(now)]
        return sorted(jobs, key=lambda job: (job.priority, job.id))

    # -- the end of a process, and a new beginning ---------------------------------------------------------------------

    def let_go(self) -> None:
        """Its process has it no longer: what was reserved is in line again, and nothing is counted."""
        if self.process is not None:
            self.process.others.remove(self)
        self.refresh()
        for job in self.jobs.values():
            if job.holder is not None:
                job.leave_line()
                job.due, job.buried = 0.0, False
            if job.state == FLYING:
                job.state = MAYBE
        self.sessions.clear()
        self.futures.clear()
        self.queue = self.process = None
        if self.failed:  # for how long nothing was written is not said
            self.doubt_all()
        self.failed = False
        self.left_behind = 0
        self.age += 1

    def kill(self) -> None:
        """SIGKILL."""
        assert self.queue is not None
        forget(self.queue)
        self.queue._abandon()
        self.let_go()

    def adopt(self) -> None:
        """After an opening: what is there is what must be there."""
        queue, w = self.queue, self.world
        assert queue is not None
        for job in self.jobs.values():
            if job.put_at_jump != w.jumps:
                job.vague_time = True
        now = self.refresh()
        self.paused.clear()
        self.may_be_paused.clear()
        found: dict[JobModel, str] = {}
        for tube in queue.tubes():
            for stats in queue.jobs(tube):
                job = self.see(stats.id, queue.peek(stats.id).value)
                found[job] = stats.state
                w.require(
                    stats.state in job.states(now) and stats.state != "reserved",
                    f"{job} is {stats.state} after an opening, not {job.states(now)}",
                )
                w.require(job.tube == tube or job.vague, f"{job} is in tube {tube}, not {job.tube}")
                w.require(not job.is_expired(now), f"{job} is there, and its life is over")
                self.learn(job, stats, tube, now)
        for tube in TUBES:  # the end of a pause follows the wall clock
            with contextlib.suppress(KestrelError):
                self.paused[tube] = now + queue.stats_tube(tube).pause_left
        lost = [job for job in self.jobs.values() if job.is_alive(now) and job not in found]
        w.require(not lost, f"jobs are lost: {lost[:3]}")
        for job in self.jobs.values():
            if job not in found and job.state in (THERE, MAYBE):
                job.state = GONE

    def learn(self, job: JobModel, stats: Any, tube: str, now: float) -> None:
        """Take over what is seen, where it was in doubt."""
        job.tube, job.priority = tube, stats.priority
        job.buried = stats.state == "buried"
        if job.vague or job.vague_time:  # a delay begins anew if the clock was set back: so each opening may differ
            job.due = now + stats.time_left if stats.state == "delayed" else 0.0
        job.fails = stats.timeouts + stats.releases
        job.vague = False

    # -- checks --------------------------------------------------------------------------------------------------------

    def check(self, *, thoroughly: bool) -> None:
        """After each step."""
        queue, w = self.queue, self.world
        if queue is None or self.failed:
            return
        now = self.refresh()
        self.futures = [future for future in self.futures if not future.done()]  # a job that came holds its session
        try:
            stats = queue.stats()
            if thoroughly:
                queue._check()
        except AssertionError as error:
            raise w.fail(f"an invariant of {queue!r} is broken: {error}") from error
        except KestrelError:
            return
        count = stats.ready + stats.delayed + stats.reserved + stats.buried
        least = sum(job.is_alive(now) for job in self.jobs.values())
        most = sum(job.state in (THERE, MAYBE, FLYING) for job in self.jobs.values())
        w.require(least <= count <= most, f"there are {count} jobs, not {least} to {most}")
        sure = len(self.open_sessions())
        waiting = sum(session.handle is None and session.waiting > 0 for session in self.sessions)
        holding = sum(session.handle is None and bool(session.held) for session in self.sessions)
        if not any(job.vague for job in self.jobs.values()):
            if stats.sessions > sure + waiting + holding:  # one may be part of a cycle
                gc.collect()
                stats = queue.stats()
            w.require(
                sure <= stats.sessions <= sure + waiting + holding,
                f"there are {stats.sessions} sessions; somebody has {sure}, and {waiting + holding} have work",
            )
            mine = sum(job.holder is not None for job in self.jobs.values())
            if stats.reserved != mine:  # the call has told somebody who was not there any more
                stats = queue.stats()
                mine = sum(job.holder is not None for job in self.jobs.values())
            w.require(stats.reserved == mine, f"{stats.reserved} jobs are reserved, and {mine} are somebody's")

    def close_quietly(self) -> None:
        queue = self.queue
        if queue is not None:
            with contextlib.suppress(KestrelError, OSError):
                try:
                    queue.close()
                except DurabilityUnknown:
                    self.failed = True
            self.let_go()


def work_of(w: World) -> Work:
    """The work queue of this world."""
    if w.work is None:
        w.work = Work(w)
    found: Work = w.work
    return found
