"""The figures of a work queue, its tubes and its jobs, at one moment."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kestrelpy.work.records import DELAYED, RESERVED, STATES

if TYPE_CHECKING:
    from kestrelpy.work.core import WorkCore
    from kestrelpy.work.stored import StoredJob, Tube

__all__ = ["JobStats", "TubeStats", "WorkStats"]

_SHOWN = 32
"""How many bytes of a body are shown, at the most."""


class JobStats(NamedTuple):
    """One job at one moment. ``state``: ``"ready"``, ``"delayed"``, ``"reserved"`` or ``"buried"``.

    Durations are in seconds. ``age``: since the job was put. ``time_left``: until a delayed job is ready, or a
    reservation ends; otherwise 0.
    """

    id: int
    tube: str
    state: str
    priority: int
    age: float
    delay: float
    ttr: float
    time_left: float
    reserves: int
    timeouts: int
    releases: int
    buries: int
    kicks: int
    body_bytes: int
    key: str | None
    body: bytes

    def __repr__(self) -> str:
        """With the beginning of the body."""
        shown = self if len(self.body) <= _SHOWN else self._replace(body=self.body[: _SHOWN - 3] + b"...")
        return f"JobStats({', '.join(f'{name}={value!r}' for name, value in shown._asdict().items())})"


class TubeStats(NamedTuple):
    """The figures of one tube. ``using``, ``watching``, ``waiting``: how many sessions do so. ``pause``: the length of
    its pause, ``pause_left``: the rest of it, in seconds.
    """

    name: str
    urgent: int
    ready: int
    reserved: int
    delayed: int
    buried: int
    total_jobs: int
    using: int
    watching: int
    waiting: int
    deletes: int
    pauses: int
    pause: float
    pause_left: float


class WorkStats(NamedTuple):
    """The figures of a work queue. ``bytes``: of all bodies. ``waiting``: how many sessions wait. ``journal_bytes``,
    ``segments``: on disk. ``oldest_segment``, ``newest_segment``: segment numbers.

    ``records_written``, ``records_migrated``: since the queue was opened. Migrated records were written again because
    the old ones held a segment back. ``uptime``: seconds since the queue was opened.
    """

    urgent: int
    ready: int
    reserved: int
    delayed: int
    buried: int
    total_jobs: int
    timeouts: int
    tubes: int
    sessions: int
    waiting: int
    bytes: int
    last_id: int
    journal_bytes: int
    segments: int
    oldest_segment: int
    newest_segment: int
    records_written: int
    records_migrated: int
    draining: bool
    uptime: float

    @property
    def jobs(self) -> int:
        """How many jobs there are: ready, reserved, delayed or buried."""
        return self.ready + self.reserved + self.delayed + self.buried


def job_stats(job: StoredJob, now: float) -> JobStats:
    """The figures of a job."""
    return JobStats(
        id=job.id,
        tube=job.tube.name,
        state=STATES[job.state],
        priority=job.priority,
        age=max(0.0, now - job.added),
        delay=job.delay,
        ttr=job.ttr,
        time_left=max(0.0, job.due - now) if job.state in (DELAYED, RESERVED) else 0.0,
        reserves=job.reserves,
        timeouts=job.timeouts,
        releases=job.releases,
        buries=job.buries,
        kicks=job.kicks,
        body_bytes=len(job.body),
        key=job.key,
        body=job.body,
    )


def tube_stats(tube: Tube, now: float) -> TubeStats:
    """The figures of a tube."""
    return TubeStats(
        name=tube.name,
        urgent=tube.urgent,
        ready=len(tube.ready),
        reserved=tube.reserved,
        delayed=len(tube.delayed),
        buried=len(tube.buried),
        total_jobs=tube.total_jobs,
        using=tube.using,
        watching=tube.watching,
        waiting=len({waiter.holder for waiter in tube.waiting}),
        deletes=tube.deletes,
        pauses=tube.pauses,
        pause=tube.pause,
        pause_left=max(0.0, tube.paused_until - now) if tube.paused_until else 0.0,
    )


def work_stats(core: WorkCore, *, draining: bool, uptime: float) -> WorkStats:
    """The figures of a work queue. With its lock held."""
    scheduler, log = core.scheduler, core.journal
    on_disk = None if log is None else log.queue.stats()
    reserved, delayed, buried = len(scheduler.reserved), len(scheduler.delayed), scheduler.buried
    return WorkStats(
        urgent=scheduler.urgent,
        ready=len(scheduler.jobs) - reserved - delayed - buried,
        reserved=reserved,
        delayed=delayed,
        buried=buried,
        total_jobs=scheduler.total_jobs,
        timeouts=scheduler.timeouts,
        tubes=len(scheduler.tubes),
        sessions=len(core.sessions),
        waiting=sum(bool(session.waiters) for session in core.sessions),
        bytes=scheduler.bytes,
        last_id=scheduler.last_id,
        journal_bytes=0 if on_disk is None else on_disk.journal_bytes,
        segments=0 if on_disk is None else on_disk.segments,
        oldest_segment=0 if on_disk is None else on_disk.oldest_segment,
        newest_segment=0 if on_disk is None else on_disk.newest_segment,
        records_written=0 if log is None else log.appended,
        records_migrated=core.compactor.migrated,
        draining=draining,
        uptime=uptime,
    )
