"""The figures of a work queue, its tubes and its jobs, at one moment."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["JobStats", "TubeStats", "WorkStats"]


class JobStats(NamedTuple):
    """One job. ``state``: ``"ready"``, ``"delayed"``, ``"reserved"`` or ``"buried"``; seconds for all durations.

    ``time_left``: until a delayed one is ready, or a reservation ends; else 0.
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


class TubeStats(NamedTuple):
    """One tube. ``using``, ``watching``, ``waiting``: sessions. ``pause``: its length, ``pause_left``: what is left."""

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
    """A queue. ``bytes``: of all bodies. ``waiting``: how many sessions wait. ``journal_bytes``, ``segments``: on disk.

    ``oldest_segment``, ``newest_segment``: their numbers.
    ``records_written``, ``records_migrated``: since it was opened; the latter were written anew because their old
    record held a segment back. ``uptime``: seconds since it was opened.
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
