"""Jobs with priority, delay and time to run, in any Python process, without a server, on a journaled queue.

Everything here is built on the public interface of kestrelpy. docs/work.md is the guide.
"""

from __future__ import annotations

from kestrelpy.work.errors import (
    DeadlineSoon,
    Draining,
    DuplicateJob,
    JobNotFound,
    JobTooBig,
    NotReserved,
    TubeNotFound,
)
from kestrelpy.work.job import Job
from kestrelpy.work.new_job import NewJob
from kestrelpy.work.queue import WorkQueue
from kestrelpy.work.session import Session
from kestrelpy.work.stats import JobStats, TubeStats, WorkStats

__all__ = [
    "DeadlineSoon",
    "Draining",
    "DuplicateJob",
    "Job",
    "JobNotFound",
    "JobStats",
    "JobTooBig",
    "NewJob",
    "NotReserved",
    "Session",
    "TubeNotFound",
    "TubeStats",
    "WorkQueue",
    "WorkStats",
]
