"""The jobs, tubes, sessions and waiters of a scheduler, in memory. No locks, clocks or files here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from sortedcontainers import SortedList

from kestrelpy import QueueClosed, QueueEmpty
from kestrelpy.work.records import BURIED, DELAYED, READY, RESERVED

URGENT = 1024
"""Jobs with a priority below this one count as urgent, as in beanstalkd."""
ID_BITS = 64
ID_MASK = (1 << ID_BITS) - 1


class StoredJob:
    """One live job.

    ``sort_key`` orders the job in the list of its state: priority and id in one number (ready), due time and id
    (delayed, reserved), number of the burial and id (buried). ``added`` is a time on the monotonic clock, and
    ``expires`` such a time and the job's id; ``added`` is negative if the job was put before that clock began. ``at``
    and ``state_at`` are the ids of the job's records in the journal, 0 for none.
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
        """When a delayed job is ready, or a reservation ends, on the monotonic clock."""
        due: float = self.sort_key[0]
        return due


class Tube:
    """One tube: its jobs by state, its line of waiters, and its counters."""

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
        self.waiting: OrderedDict[JobWaiter, None] = OrderedDict()  # first come, first served
        self.using = self.watching = 0
        self.total_jobs = self.deletes = self.pauses = 0
        self.pause = 0.0
        self.paused_until = 0.0  # on the monotonic clock; 0: it is not paused
        self.is_changed = False  # whether a counter has changed since record ``at`` was written
        self.at = 0

    @property
    def is_needed(self) -> bool:
        """Whether the tube has jobs, or is used, watched, waited for or paused."""
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


class SessionState(Protocol):
    """The part of a ``Session`` that the scheduler knows and changes."""

    number: int
    """Differs from those of all sessions and waiters: it orders entries of the same time."""
    closed: bool
    deadline_soon: bool
    blocks: dict[tuple[int, int], Any]
    """The jobs in a ``with`` block, by id and number of the reservation."""
    wakes: tuple[float, int, SessionState] | None
    """When its waiters get ``DeadlineSoon``."""
    using: Tube | None
    watched: dict[str, Tube]
    left: dict[str, Tube]
    """Once it is closed: the tubes that it watched, and that do not know it yet."""
    held: dict[int, StoredJob]
    waiters: OrderedDict[JobWaiter, None]

    def hold(self, job: StoredJob) -> None:
        """The session has reserved the job."""

    def drop(self, job: StoredJob) -> None:
        """Forget a reservation. ``job.sort_key`` must still be the reservation's. No error if the job is not held."""

    def soonest(self) -> tuple[float, int] | None:
        """When the reservation that ends first ends, and its job's id."""

    def handle(self, job: StoredJob) -> object:
        """A ``Job`` for a waiter: this session has reserved ``job`` now."""

    def abandon(self, waiter: JobWaiter) -> None:
        """Take the waiter out of the line. Takes the queue's lock."""

    def reset_held(self, jobs: Iterable[StoredJob]) -> None:
        """Replace all that the session holds with these jobs."""

    def nothing_ready(self) -> QueueEmpty:
        """The error for a waiter whose time is over."""

    def finish(self) -> None:
        """The session is closed, waits for nothing, and uses and watches no tube: the queue may forget it."""


class JobWaiter:
    """A waiter in the line. ``number`` is its rank. ``wakes`` is its entry among the waits that end by time."""

    __slots__ = ("holder", "number", "tubes", "until", "wakes")

    def __init__(self, holder: SessionState, number: int) -> None:
        self.holder = holder
        self.number = number
        self.tubes: tuple[Tube, ...] = ()
        self.until = float("inf")
        self.wakes: tuple[float, int, JobWaiter] | None = None

    def notify(self, outcome: Any) -> None:
        """Deliver the job that was reserved for this waiter, or an error. Call without the queue's lock."""
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


class LeftTubes(NamedTuple):
    """The tubes that a session watched and used, when the garbage collector found that nobody has the session."""

    watched: dict[str, Tube]
    using: Tube


def is_held(job: StoredJob, holder: SessionState | None, reserves: int) -> bool:
    """Whether ``holder`` still has its reservation number ``reserves``: it may have reserved the job again since."""
    return holder is not None and job.holder is holder and job.reserves == reserves
