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
from kestrelpy.work.figures import TubeJobs, WorkFigures
from kestrelpy.work.job import Job
from kestrelpy.work.new_job import NewJob
from kestrelpy.work.outside import JobsOutside, TubeOutside, VisibleJob
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
    "JobsOutside",
    "NewJob",
    "NotReserved",
    "Session",
    "TubeJobs",
    "TubeNotFound",
    "TubeOutside",
    "TubeStats",
    "VisibleJob",
    "WorkFigures",
    "WorkQueue",
    "WorkStats",
]
