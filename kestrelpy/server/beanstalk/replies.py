"""The server's replies: fixed words, jobs, and lists and figures in YAML. They have beanstalkd's form, byte for byte.

Some clients count lines instead of reading YAML, so the order of the keys is part of the form. Names are not quoted, as
in 1.12 (1.13 quotes them).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kestrelpy.work import JobStats, TubeStats, WorkStats

__all__ = ["COUNTED", "found", "names", "reserved", "stats", "stats_job", "stats_tube"]

BAD_FORMAT = b"BAD_FORMAT\r\n"
BURIED = b"BURIED\r\n"
DEADLINE_SOON = b"DEADLINE_SOON\r\n"
DELETED = b"DELETED\r\n"
DRAINING = b"DRAINING\r\n"
EXPECTED_CRLF = b"EXPECTED_CRLF\r\n"
INTERNAL_ERROR = b"INTERNAL_ERROR\r\n"
JOB_TOO_BIG = b"JOB_TOO_BIG\r\n"
KICKED_ONE = b"KICKED\r\n"
NOT_FOUND = b"NOT_FOUND\r\n"
NOT_IGNORED = b"NOT_IGNORED\r\n"
OUT_OF_MEMORY = b"OUT_OF_MEMORY\r\n"
PAUSED = b"PAUSED\r\n"
RELEASED = b"RELEASED\r\n"
TIMED_OUT = b"TIMED_OUT\r\n"
TOUCHED = b"TOUCHED\r\n"

COUNTED = (
    "put",
    "peek",
    "peek-ready",
    "peek-delayed",
    "peek-buried",
    "reserve",
    "reserve-with-timeout",
    "delete",
    "release",
    "use",
    "watch",
    "ignore",
    "bury",
    "kick",
    "touch",
    "stats",
    "stats-job",
    "stats-tube",
    "list-tubes",
    "list-tube-used",
    "list-tubes-watched",
    "pause-tube",
)
"""The commands that ``stats`` counts, in the order of its reply. reserve-job and kick-job are not among them."""


def reserved(job_id: int, body: bytes) -> bytes:
    return b"RESERVED %d %d\r\n%b\r\n" % (job_id, len(body), body)


def found(job_id: int, body: bytes) -> bytes:
    return b"FOUND %d %d\r\n%b\r\n" % (job_id, len(body), body)


def names(of: Iterable[str]) -> bytes:
    """A list of tubes."""
    return _ok("---\n" + "".join([f"- {name}\n" for name in of]))


def stats_job(job: JobStats) -> bytes:
    """The figures of a job. ``file`` is 0, because compaction moves a job from one file to another."""
    return _figures(
        {
            "id": job.id,
            "tube": job.tube,
            "state": job.state,
            "pri": job.priority,
            "age": int(job.age),
            "delay": int(job.delay),
            "ttr": int(job.ttr),
            "time-left": int(job.time_left) if job.state in ("reserved", "delayed") else 0,
            "file": 0,
            "reserves": job.reserves,
            "timeouts": job.timeouts,
            "releases": job.releases,
            "buries": job.buries,
            "kicks": job.kicks,
        }
    )


def stats_tube(tube: TubeStats) -> bytes:
    return _figures(
        {
            "name": tube.name,
            "current-jobs-urgent": tube.urgent,
            "current-jobs-ready": tube.ready,
            "current-jobs-reserved": tube.reserved,
            "current-jobs-delayed": tube.delayed,
            "current-jobs-buried": tube.buried,
            "total-jobs": tube.total_jobs,
            "current-using": tube.using,
            "current-watching": tube.watching,
            "current-waiting": tube.waiting,
            "cmd-delete": tube.deletes,
            "cmd-pause-tube": tube.pauses,
            "pause": int(tube.pause),
            "pause-time-left": int(tube.pause_left),
        }
    )


def stats(
    work: WorkStats, counts: Mapping[str, int], middle: Mapping[str, object], last: Mapping[str, object]
) -> bytes:
    """All figures. ``middle`` and ``last`` have, in order, the figures that are not the queue's."""
    return _figures(
        {
            "current-jobs-urgent": work.urgent,
            "current-jobs-ready": work.ready,
            "current-jobs-reserved": work.reserved,
            "current-jobs-delayed": work.delayed,
            "current-jobs-buried": work.buried,
            **{f"cmd-{verb}": counts[verb] for verb in COUNTED},
            "job-timeouts": work.timeouts,
            "total-jobs": work.total_jobs,
            **middle,
            "binlog-oldest-index": work.oldest_segment,
            "binlog-current-index": work.newest_segment,
            "binlog-records-migrated": work.records_migrated,
            "binlog-records-written": work.records_written,
            **last,
        }
    )


def _figures(figures: Mapping[str, object]) -> bytes:
    return _ok("---\n" + "".join([f"{key}: {value}\n" for key, value in figures.items()]))


def _ok(text: str) -> bytes:
    body = text.encode("utf-8", "backslashreplace")
    return b"OK %d\r\n%b\r\n" % (len(body), body)
