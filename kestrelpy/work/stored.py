"""What a scheduler knows of jobs, tubes, sessions and those who wait, in memory. No locks, clocks or files here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

from sortedcontainers import SortedList

from kestrelpy import QueueClosed
from kestrelpy.work.records import BURIED, DELAYED, READY, RESERVED

URGENT = 1024
"""Jobs of a priority below this one are counted as urgent, as beanstalkd does."""
_MANY = 64
"""From so many reservations on the first one to end is not searched for but looked up."""
ID_BITS = 64
ID_MASK = (1 << ID_BITS) - 1


class StoredJob:
    """One job that lives.

    ``sort_key`` orders it in the list of its state: priority and id in one number (ready), when it is due and the id
    (delayed, reserved), the number of the burial and the id (buried). ``added`` and ``expires`` are by the
    monotonic clock, before whose beginning a job may have been put; with the latter goes the id. ``at`` and
    ``state_at``: the ids of its records in the journal, 0 for none.
    """

    __slots__ = (
        "added",
        "at",
        "body",
        "buries",
        "delay",
        "expires",
        "holder",
        "id",
        "key",
        "kicks",
        "new_timeouts",
        "priority",
        "releases",
        "reserves",
        "sort_key",
        "state",
        "state_at",
        "timeouts",
        "ttr",
        "tube",
    )
    id: int
    body: bytes
    tube: Tube
    state: int
    priority: int
    delay: float
    ttr: float
    added: float
    sort_key: Any
    expires: tuple[float, int] | None
    key: str | None
    holder: SessionState | None
    at: int
    state_at: int
    reserves: int
    timeouts: int
    releases: int
    buries: int
    kicks: int
    new_timeouts: int

    @property
    def due(self) -> float:
        """When a delayed one is ready, or a reservation ends, by the monotonic clock."""
        due: float = self.sort_key[0]
        return due


class Tube:
    """One tube: its jobs by state, who waits for one, and what was counted."""

    __slots__ = (
        "at",
        "buried",
        "delayed",
        "deletes",
        "encoded",
        "is_changed",
        "name",
        "pause",
        "paused_until",
        "pauses",
        "ready",
        "reserved",
        "total_jobs",
        "urgent",
        "using",
        "waiting",
        "watching",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.encoded = name.encode()
        self.ready: SortedList[int] = SortedList()
        self.delayed: SortedList[tuple[float, int]] = SortedList()
        self.buried: SortedList[tuple[float, int]] = SortedList()
        self.reserved = 0
        self.urgent = 0
        self.waiting: OrderedDict[JobWaiter, None] = OrderedDict()  # in the order of their coming
        self.using = self.watching = 0
        self.total_jobs = self.deletes = self.pauses = 0
        self.pause = 0.0
        self.paused_until = 0.0  # by the monotonic clock; 0: it is not paused
        self.is_changed = False  # since its record at ``at`` was written
        self.at = 0

    @property
    def is_needed(self) -> bool:
        """Whether anybody would miss it."""
        has_jobs = self.ready or self.reserved or self.delayed or self.buried
        return bool(has_jobs or self.using or self.watching or self.waiting or self.paused_until)

    def _check(self, jobs: dict[int, StoredJob]) -> None:
        """The invariants; for tests."""
        mine = [job for job in jobs.values() if job.tube is self]
        assert [key & ID_MASK for key in self.ready] == [
            job.id for job in sorted(mine, key=lambda job: (job.priority, job.id)) if job.state == READY
        ]
        assert {job_id for _, job_id in self.delayed} == {job.id for job in mine if job.state == DELAYED}
        assert {job_id for _, job_id in self.buried} == {job.id for job in mine if job.state == BURIED}
        assert self.reserved == sum(job.state == RESERVED for job in mine)
        assert self.urgent == sum(job.state == READY and job.priority < URGENT for job in mine)
        assert all(jobs[key & ID_MASK].sort_key == key for key in self.ready)
        assert all(jobs[key[1]].sort_key == key for key in (*self.delayed, *self.buried))
        assert not (self.waiting and self.ready) or self.paused_until


class SessionState:
    """What the scheduler knows of a session: what it watches, holds and waits for."""

    def __init__(self, number: int, *, deadline_soon: bool) -> None:
        self.number = number  # of its own among those who wait
        self.closed = False
        self.blocks: dict[tuple[int, int], Any] = {}  # by id and number of the reservation: jobs in a ``with``
        self.wakes: tuple[float, int, SessionState] | None = None  # when those who wait are to hear of a deadline
        self.watched: dict[str, Tube] = {}
        self.held: dict[int, StoredJob] = {}
        self.waiters: OrderedDict[JobWaiter, None] = OrderedDict()
        self.deadline_soon = deadline_soon
        self.using: Tube | None = None
        self._deadlines: SortedList[tuple[float, int]] | None = None  # of all held, if they are many

    def hold(self, job: StoredJob) -> None:
        self.held[job.id] = job
        if self._deadlines is not None:
            self._deadlines.add(job.sort_key)

    def drop(self, job: StoredJob) -> None:
        """No error for one that it does not hold; ``job.sort_key`` must still be the reservation's."""
        if self.held.pop(job.id, None) is not None and self._deadlines is not None:
            self._deadlines.discard(job.sort_key)
            if not self._deadlines:
                self._deadlines = None

    def soonest(self) -> tuple[float, int] | None:
        """The reservation that ends first: when, and the job's id."""
        if self._deadlines is None and len(self.held) > _MANY:
            self._deadlines = SortedList(job.sort_key for job in self.held.values())
        if self._deadlines is not None:
            return self._deadlines[0]
        return min(((job.due, job.id) for job in self.held.values()), default=None)

    def handle(self, job: StoredJob) -> object:
        """What whoever waited is told: the job that this session has reserved now."""
        raise NotImplementedError

    def abandon(self, waiter: JobWaiter) -> None:
        """It waits no longer. Takes the queue's lock."""
        raise NotImplementedError

    def reset_held(self, jobs: Iterable[StoredJob]) -> None:
        """These are what it holds, whatever it seemed to."""
        self.held = {job.id: job for job in jobs}
        self._deadlines = None


class JobWaiter:
    """One place in the line. ``number`` is its rank; ``wakes``: its entry among those who do not wait for ever."""

    __slots__ = ("holder", "number", "tubes", "until", "wakes")

    def __init__(self, holder: SessionState, number: int) -> None:
        self.holder = holder
        self.number = number
        self.tubes: tuple[Tube, ...] = ()
        self.until = float("inf")
        self.wakes: tuple[float, int, JobWaiter] | None = None

    def notify(self, outcome: Any) -> None:
        """The job that was reserved for it, or the error that it waited for in vain. Without the queue's lock."""
        raise NotImplementedError


def check_open(session: SessionState) -> None:
    """Raises ``QueueClosed``."""
    if session.closed:
        raise QueueClosed("this session is closed")


class Reserved(NamedTuple):
    """One reservation of a job."""

    job: StoredJob
    holder: SessionState | None
    reserves: int


def is_held(job: StoredJob, holder: SessionState | None, reserves: int) -> bool:
    """Whether ``holder`` still has its reservation number ``reserves``: it may have reserved the job again since."""
    return holder is not None and job.holder is holder and job.reserves == reserves
