"""The life of jobs as a work queue promises it: dicts and lists, one time line, and every version that a job has had.

Written from the documentation, not from the code. What is refused is ``Refused``, by the name of the error, so that the
model needs nothing of what it is held against. ``now`` is in seconds and never goes back, whatever dies; nothing here
is fast, and nothing is sorted but where it is looked at. Two moments never coincide: whoever drives the model sees to
that, by durations of which no two have the same thousandths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

URGENT = 1024
MARGIN = 1.0
STATES = ("ready", "delayed", "reserved", "buried")
WAITING = "waiting"


class Refused(Exception):
    """What the queue must raise: one of these names of classes, with these attributes."""

    def __init__(self, *names: str, **facts: object) -> None:
        super().__init__(*names)
        self.names = names
        self.facts = facts


class Version(NamedTuple):
    """What must be there of a job when it is found again. A job that is reserved is found ready."""

    state: str
    tube: str
    priority: int
    delay: float
    due: float
    timeouts: int
    releases: int
    buries: int
    kicks: int
    burying: int
    """Which burying it was, of all; not to be seen from outside, but by the order of the buried."""
    body: bytes


@dataclass(eq=False)
class ModelSession:
    """What one connection is."""

    deadline_soon: bool = True
    used: str = "default"
    watching: list[str] = field(default_factory=lambda: ["default"])
    closed: bool = False


@dataclass(eq=False)
class ModelJob:
    id: int
    body: bytes
    tube: str
    priority: int
    delay: float
    ttr: float
    key: str | None
    expires: float
    made: float
    state: str = "ready"
    due: float = 0.0
    holder: ModelSession | None = None
    reservation: int = 0
    reserves: int = 0
    timeouts: int = 0
    releases: int = 0
    buries: int = 0
    kicks: int = 0
    burying: int = 0
    reserved_at: list[float] = field(default_factory=list)
    """When its reservations were made that need not have survived yet."""
    saved_reserves: int = 0

    def version(self) -> Version:
        state = "ready" if self.state == "reserved" else self.state
        due = round(self.due, 3) if state == "delayed" else 0.0
        counts = (self.timeouts, self.releases, self.buries, self.kicks)
        return Version(state, self.tube, self.priority, self.delay, due, *counts, self.burying, self.body)

    def time_left(self, now: float) -> float:
        return self.due - now if self.state in ("delayed", "reserved") else 0.0


@dataclass(eq=False)
class ModelWaiter:
    """A reserve that waits, or has been answered: by a job's id, or by the name of an error."""

    session: ModelSession
    deadline: float
    tubes: tuple[str, ...]
    """What the session watched when it began: later changes are for later reserves."""
    outcome: int | str = WAITING
    job_id: int = 0
    """Which job a ``DeadlineSoon`` names."""
    body: bytes = b""
    """That of the job it was given, at that moment."""


@dataclass
class ModelTube:
    total_jobs: int = 0
    deletes: int = 0
    pauses: int = 0
    pause: float = 0.0
    paused_until: float = 0.0


@dataclass
class Model:
    max_job_bytes: int = 65535
    max_jobs: float = math.inf
    max_bytes: float = math.inf
    max_attempts: float = math.inf
    interval: float = 1.0
    now: float = 0.0
    jobs: dict[int, ModelJob] = field(default_factory=dict)
    buried: list[int] = field(default_factory=list)
    """All that are buried, in the order of their burying."""
    tubes: dict[str, ModelTube] = field(default_factory=lambda: {"default": ModelTube()})
    sessions: list[ModelSession] = field(default_factory=list)
    line: list[ModelWaiter] = field(default_factory=list)
    last_id: int = 0
    drawn: set[int] = field(default_factory=set)
    """Ids that were given out and not put yet."""
    total_jobs: int = 0
    timeouts: int = 0
    buryings: int = 0
    reservations: int = 0
    draining: bool = False
    history: dict[int, list[Version | None]] = field(default_factory=dict)
    """Every version that a job has had; ``None`` is when it was not there yet, and when it is gone."""
    known: dict[int, ModelJob] = field(default_factory=dict)
    """Every job that ever was."""

    # -- jobs come ---------------------------------------------------------------------------------------------------

    def new_id(self) -> int:
        self.last_id += 1
        self.drawn.add(self.last_id)
        return self.last_id

    def put(
        self,
        body: bytes,
        *,
        tube: str = "default",
        priority: int = 65536,
        delay: float = 0,
        ttr: float = 60,
        key: str | None = None,
        expires_in: float | None = None,
        job_id: int | None = None,
    ) -> int:
        self._admit([body])
        twin = self.holder_of(tube, key)
        if twin is not None:
            raise Refused("DuplicateJob", job_id=twin.id, key=key, tube=tube)
        if job_id is None:
            self.last_id += 1
            job_id = self.last_id
        self.drawn.discard(job_id)
        self._add(job_id, body, tube, priority, delay, ttr, key, expires_in)
        self.settle()
        return job_id

    def put_many(
        self,
        bodies: list[bytes],
        *,
        tube: str = "default",
        priority: int = 65536,
        delay: float = 0,
        ttr: float = 60,
        expires_in: float | None = None,
    ) -> range:
        self._admit(bodies)
        first = self.last_id + 1
        for body in bodies:
            self.last_id += 1
            self._add(self.last_id, body, tube, priority, delay, ttr, None, expires_in)
        self.settle()
        return range(first, self.last_id + 1)

    def put_all(self, jobs: list[tuple[bytes, dict[str, Any]]]) -> list[int]:
        """``jobs``: bodies, each with the options of its own put, of which ``tube`` is one."""
        self._admit([body for body, _ in jobs])
        named = [(how["tube"], how["key"]) for _, how in jobs if how.get("key") is not None]
        twins = [twin for twin in (self.holder_of(*each) for each in named) if twin is not None]
        if twins or len(set(named)) < len(named):
            alone = {"job_id": twins[0].id} if len(twins) == 1 and len(set(named)) == len(named) else {}
            raise Refused("DuplicateJob", **alone)
        ids = []
        for body, how in jobs:
            options = {"priority": 65536, "delay": 0, "ttr": 60, "key": None, "expires_in": None, **how}
            job_id = options.pop("job_id", None)
            if job_id is None:
                self.last_id += 1
                job_id = self.last_id
            self.drawn.discard(job_id)
            self._add(job_id, body, **options)
            ids.append(job_id)
        self.settle()
        return ids

    def _admit(self, bodies: list[bytes]) -> None:
        """Whether they may come in. Where several things are wrong, any of them may be what is said."""
        wrong = []
        if self.draining:
            wrong.append("Draining")
        if any(len(body) > self.max_job_bytes for body in bodies):
            wrong.append("JobTooBig")
        if len(self.jobs) + len(bodies) > self.max_jobs or self.bytes() + sum(map(len, bodies)) > self.max_bytes:
            wrong.append("QueueFull")
        if wrong:
            raise Refused(*wrong)

    def _add(
        self,
        job_id: int,
        body: bytes,
        tube: str,
        priority: int,
        delay: float,
        ttr: float,
        key: str | None,
        expires_in: float | None,
    ) -> None:
        expires = math.inf if expires_in is None else self.now + expires_in
        job = ModelJob(job_id, body, tube, priority, delay, ttr, key, expires, self.now)
        if delay > 0:
            job.state, job.due = "delayed", self.now + delay
        self.jobs[job_id] = job
        self.known[job_id] = job
        self.history[job_id] = [None]
        self.total_jobs += 1
        self.tube(tube).total_jobs += 1
        self.note(job)

    # -- what sessions do --------------------------------------------------------------------------------------------

    def session(self, *, deadline_soon: bool = True) -> ModelSession:
        self.sessions.append(ModelSession(deadline_soon))
        return self.sessions[-1]

    def close_session(self, session: ModelSession) -> None:
        session.closed = True
        self.sessions.remove(session)
        for waiter in [waiter for waiter in self.line if waiter.session is session]:
            self.answer(waiter, "QueueClosed")
        for job in self.reserved_by(session):
            self._make_ready(job)
            self.settle()
        self.forget_tubes()

    def use(self, session: ModelSession, tube: str) -> None:
        session.used = tube
        self.tube(tube)
        self.forget_tubes()

    def watch(self, session: ModelSession, tube: str) -> int:
        if tube not in session.watching:
            session.watching.append(tube)
        self.tube(tube)
        self.settle()
        return len(session.watching)

    def ignore(self, session: ModelSession, tube: str) -> int:
        if session.watching == [tube]:
            raise Refused("ValueError")
        if tube in session.watching:
            session.watching.remove(tube)
        self.settle()
        return len(session.watching)

    def reserve(self, session: ModelSession) -> ModelJob:
        """Without a wait."""
        job = self.best(session.watching)
        if job is not None:
            self._reserve(job, session)
            self.settle()
            return job
        soon = self.soonest(session)
        if soon is not None and soon.due - MARGIN <= self.now:
            raise Refused("DeadlineSoon", job_id=soon.id)
        raise Refused("QueueEmpty")

    def reserve_many(self, session: ModelSession, count: int) -> list[ModelJob]:
        jobs = [self.reserve(session)]
        while len(jobs) < count and self.best(session.watching) is not None:
            jobs.append(self.reserve(session))
        return jobs

    def reserve_job(self, session: ModelSession, job_id: int) -> ModelJob:
        job = self.find(job_id)
        if job.state == "reserved":
            raise Refused("NotReserved", job_id=job_id)
        self._reserve(job, session)
        self.settle()
        return job

    def reserve_future(self, session: ModelSession, timeout: float | None) -> ModelWaiter:
        deadline = math.inf if timeout is None else self.now + timeout
        waiter = ModelWaiter(session, deadline, tuple(session.watching))
        self.line.append(waiter)
        self.settle()
        if waiter.outcome == WAITING and timeout == 0:
            self.answer(waiter, "QueueEmpty")
        return waiter

    def cancel(self, waiter: ModelWaiter) -> bool:
        if waiter.outcome != WAITING:
            return False
        self.answer(waiter, "CancelledError")
        return True

    def delete(self, job_id: int, session: ModelSession | None = None) -> None:
        job = self.find(job_id)
        if job.state == "reserved" and (session is None or job.holder is not session):
            raise Refused("NotReserved", job_id=job_id)
        self.tube(job.tube).deletes += 1
        self._drop(job)
        self.settle()

    def delete_many(self, session: ModelSession, handles: list[tuple[ModelJob, int]]) -> list[int]:
        """``handles``: jobs, each with the number of its reservation. Returns the ids of those that are left."""
        left = []
        for job, reservation in handles:
            if job.holder is session and job.reservation == reservation:
                self.tube(job.tube).deletes += 1
                self._drop(job)
            else:
                left.append(job.id)
        self.settle()
        return left

    def release(
        self,
        session: ModelSession,
        job_id: int,
        priority: int | None = None,
        delay: float = 0,
        body: bytes | None = None,
    ) -> bool:
        job = self._held(session, job_id)
        self._change_body(job, body)
        if priority is not None:
            job.priority = priority
        job.delay = delay
        job.releases += 1
        alive = self._fail(job, delay)
        self.settle()
        return alive

    def bury(self, session: ModelSession, job_id: int, priority: int | None = None, body: bytes | None = None) -> None:
        job = self._held(session, job_id)
        self._change_body(job, body)
        if priority is not None:
            job.priority = priority
        self._bury(job)
        self.settle()

    def _change_body(self, job: ModelJob, body: bytes | None) -> None:
        if body is None:
            return
        wrong = []
        if len(body) > self.max_job_bytes:
            wrong.append("JobTooBig")
        if len(body) > len(job.body) and self.bytes() - len(job.body) + len(body) > self.max_bytes:
            wrong.append("QueueFull")
        if wrong:
            raise Refused(*wrong)
        job.body = body

    def touch(self, session: ModelSession, job_id: int) -> None:
        job = self._held(session, job_id)
        job.due = self.now + job.ttr

    # -- what anybody does -------------------------------------------------------------------------------------------

    def kick(self, count: int, tube: str) -> int:
        jobs = self.in_state(tube, "buried") or self.in_state(tube, "delayed")
        for job in jobs[:count]:
            self._kick(job)
            self.settle()
        return len(jobs[:count])

    def kick_job(self, job_id: int) -> None:
        job = self.find(job_id)
        if job.state not in ("buried", "delayed"):
            raise Refused("JobNotFound", job_id=job_id)
        self._kick(job)
        self.settle()

    def save_reserves(self) -> None:
        for job in self.jobs.values():
            self._save(job)

    def peek(self, tube: str, state: str) -> ModelJob:
        jobs = self.in_state(tube, state)
        if not jobs:
            raise Refused("JobNotFound")
        return jobs[0]

    def peek_key(self, key: str, tube: str) -> ModelJob:
        job = self.holder_of(tube, key)
        if job is None:
            raise Refused("JobNotFound", job_id=None)
        return job

    def move(self, job_id: int, tube: str) -> None:
        job = self.find(job_id)
        wrong = []
        if job.state == "reserved":
            wrong.append("NotReserved")
        twin = self.holder_of(tube, job.key)
        if twin is not None and twin is not job:
            wrong.append("DuplicateJob")
        if wrong:
            raise Refused(*wrong)
        if tube == job.tube:
            return
        job.tube = tube
        self.tube(tube)
        self.note(job)
        self.settle()

    def clear(self, tube: str) -> int:
        jobs = [job for job in self.jobs.values() if job.tube == tube and job.state != "reserved"]
        for job in jobs:
            self.tube(tube).deletes += 1
            self._drop(job)
        self.settle()
        return len(jobs)

    def pause_tube(self, name: str, seconds: float) -> None:
        if name not in self.tubes:
            raise Refused("TubeNotFound", tube=name)
        tube = self.tubes[name]
        tube.pauses += 1
        tube.pause, tube.paused_until = seconds, self.now + seconds if seconds else 0.0
        self.settle()

    # -- time, and death ---------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """One event after the other, each at its moment."""
        until = self.now + seconds
        while True:
            moment, happen = min(self._events(), key=lambda event: event[0], default=(math.inf, self.settle))
            if moment > until:
                break
            self.now = max(self.now, moment)
            happen()
            self.settle()
        self.now = until

    def _events(self) -> Iterator[tuple[float, Callable[[], object]]]:
        for job in self.jobs.values():
            if job.state == "delayed":
                yield job.due, partial(self._make_ready, job)
            if job.state == "reserved":
                yield job.due, partial(self._time_out, job)
            elif job.expires < math.inf:
                yield job.expires, partial(self._drop, job)
        for tube in self.tubes.values():
            if tube.paused_until:
                yield tube.paused_until, partial(self._end_pause, tube)
        for waiter in self.line:
            yield waiter.deadline, partial(self.answer, waiter, "QueueEmpty")
            soon = self.soonest(waiter.session)
            if soon is not None:
                yield soon.due - MARGIN, self.settle

    def _end_pause(self, tube: ModelTube) -> None:
        tube.pause = tube.paused_until = 0.0

    def _time_out(self, job: ModelJob) -> None:
        job.timeouts += 1
        self.timeouts += 1
        self._fail(job, 0)

    def reopen(self, seconds: float) -> None:
        """The process is gone, and another one is there after so many seconds. Nobody is reserved, nobody waits."""
        for waiter in list(self.line):
            self.answer(waiter, "QueueClosed")
        self.sessions.clear()
        self.draining = False
        for job in self.jobs.values():
            job.saved_reserves = self.reserves_at_least(job)
            job.reserved_at.clear()
            if job.state == "reserved":
                job.state, job.holder = "ready", None
        self.forget_tubes()
        self.advance(seconds)
        self.advance(0)

    # -- changes of a job --------------------------------------------------------------------------------------------

    def note(self, job: ModelJob) -> None:
        """There is a new version of it."""
        version = job.version() if job.id in self.jobs else None
        if self.history[job.id][-1] != version:
            self.history[job.id].append(version)

    def _reserve(self, job: ModelJob, session: ModelSession) -> None:
        self._unbury(job)
        job.state, job.holder, job.due = "reserved", session, self.now + job.ttr
        job.reserves += 1
        self.reservations += 1
        job.reservation = self.reservations
        job.reserved_at.append(self.now)
        self.note(job)

    def _fail(self, job: ModelJob, delay: float) -> bool:
        """A reservation has ended in a timeout or a release. Returns whether the job is alive in its line."""
        if job.timeouts + job.releases >= self.max_attempts:
            self._bury(job)
            return False
        job.state, job.holder, job.due = ("delayed" if delay else "ready"), None, self.now + delay
        self._save(job)
        self._drop_if_expired(job)
        return True

    def _bury(self, job: ModelJob) -> None:
        job.state, job.holder = "buried", None
        job.buries += 1
        self._to_the_end(job)
        self._save(job)
        self._drop_if_expired(job)

    def _to_the_end(self, job: ModelJob) -> None:
        """Of those that are buried."""
        self.buryings += 1
        job.burying = self.buryings
        self.buried.append(job.id)

    def _kick(self, job: ModelJob) -> None:
        job.kicks += 1
        self._make_ready(job)
        self._save(job)

    def _make_ready(self, job: ModelJob) -> None:
        """It is in line again, and nothing is counted. A delay that ends is nothing new: its end was known."""
        was_delayed = job.state == "delayed"
        self._unbury(job)
        job.state, job.holder = "ready", None
        if not was_delayed:
            self.note(job)
        self._drop_if_expired(job)

    def _drop_if_expired(self, job: ModelJob) -> None:
        """One that was reserved when its time had come goes when it comes back."""
        if job.expires <= self.now:
            self._drop(job)

    def _unbury(self, job: ModelJob) -> None:
        if job.state == "buried":
            self.buried.remove(job.id)
            job.burying = 0

    def _save(self, job: ModelJob) -> None:
        job.saved_reserves = job.reserves
        job.reserved_at.clear()
        self.note(job)

    def _drop(self, job: ModelJob) -> None:
        self._unbury(job)
        del self.jobs[job.id]
        job.holder = None
        self.note(job)

    # -- the line ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """First come, first served, until nobody can be; then those are told whose time is nearly up."""
        while self._serve_one():
            pass
        for waiter in list(self.line):
            soon = self.soonest(waiter.session)
            if soon is not None and soon.due - MARGIN <= self.now:
                waiter.job_id = soon.id
                self.answer(waiter, "DeadlineSoon")
        self.forget_tubes()

    def _serve_one(self) -> bool:
        for waiter in self.line:
            job = self.best(waiter.tubes)
            if job is not None:
                self._reserve(job, waiter.session)
                waiter.body = job.body
                self.answer(waiter, job.id)
                return True
        return False

    def answer(self, waiter: ModelWaiter, outcome: int | str) -> None:
        self.line.remove(waiter)
        waiter.outcome = outcome

    def best(self, tubes: Sequence[str]) -> ModelJob | None:
        """What a reserve would take."""
        jobs = [
            job
            for job in self.jobs.values()
            if job.state == "ready" and job.tube in tubes and not self.tube(job.tube).paused_until
        ]
        return min(jobs, key=lambda job: (job.priority, job.id), default=None)

    def soonest(self, session: ModelSession) -> ModelJob | None:
        """Its reserved job whose time is up first, if it wants to be told of that."""
        jobs = self.reserved_by(session) if session.deadline_soon else []
        return min(jobs, key=lambda job: job.due, default=None)

    # -- looking -----------------------------------------------------------------------------------------------------

    def find(self, job_id: int) -> ModelJob:
        if job_id not in self.jobs:
            raise Refused("JobNotFound", job_id=job_id)
        return self.jobs[job_id]

    def _held(self, session: ModelSession, job_id: int) -> ModelJob:
        job = self.find(job_id)
        if job.holder is not session:
            raise Refused("NotReserved", job_id=job_id)
        return job

    def holder_of(self, tube: str, key: str | None) -> ModelJob | None:
        """Who lives in that tube with that key."""
        found = [job for job in self.jobs.values() if key is not None and (job.tube, job.key) == (tube, key)]
        return found[0] if found else None

    def reserved_by(self, session: ModelSession) -> list[ModelJob]:
        """In the order of the reservations."""
        jobs = [job for job in self.jobs.values() if job.holder is session]
        return sorted(jobs, key=lambda job: job.reservation)

    def in_state(self, tube: str, state: str) -> list[ModelJob]:
        """In the order in which they are peeked at and kicked."""
        if state == "buried":
            return [self.jobs[job_id] for job_id in self.buried if self.jobs[job_id].tube == tube]
        jobs = [job for job in self.jobs.values() if (job.tube, job.state) == (tube, state)]
        return sorted(jobs, key=lambda job: (job.priority, job.id) if state == "ready" else (job.due, job.id))

    def count(self, state: str, tube: str | None = None) -> int:
        jobs = [job for job in self.jobs.values() if tube in (None, job.tube)]
        if state == "urgent":
            return sum(job.state == "ready" and job.priority < URGENT for job in jobs)
        return sum(job.state == state for job in jobs)

    def bytes(self) -> int:
        return sum(len(job.body) for job in self.jobs.values())

    def reserves_at_least(self, job: ModelJob) -> int:
        """How many reservations of it a death leaves."""
        return job.saved_reserves + sum(moment <= self.now - self.interval for moment in job.reserved_at)

    def tube(self, name: str) -> ModelTube:
        return self.tubes.setdefault(name, ModelTube())

    def forget_tubes(self) -> None:
        """Those that nobody has anything to do with."""
        needed = {"default"} | {job.tube for job in self.jobs.values()}
        for session in self.sessions:
            needed |= {session.used, *session.watching}
        for waiter in self.line:  # for what was watched when it came
            needed.update(waiter.tubes)
        for name in [name for name, tube in self.tubes.items() if name not in needed and not tube.paused_until]:
            del self.tubes[name]
