"""``FailedJobs``: which jobs of a work queue have failed, in memory: by when they come again, and by first failure.

The work queue has all of them among its buried jobs, in the order of burial. Its bodies say the rest, and this index is
made of them when an outbox is bound to the queue.

No locks here: the caller has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import islice
from typing import NamedTuple

from sortedcontainers import SortedList

from kestrelpy.outbox.journal_body import DEAD, ERROR, LAPSED, STATUSES

__all__ = ["FailedJob", "FailedJobs"]


class FailedJob(NamedTuple):
    """A job in error (it comes again at ``due``, in milliseconds of the monotonic clock), dead, or lapsed."""

    id: int
    queue: str
    status: int
    due: int
    first_error_ms: int
    finished_ms: int


class FailedJobs:
    """All failed jobs of one work queue."""

    def __init__(self) -> None:
        self._jobs: dict[int, FailedJob] = {}
        self._due: dict[str, SortedList[tuple[int, int]]] = {}  # by queue: those in error
        self._first: dict[str, SortedList[tuple[int, int]]] = {}  # by queue: in error and dead, by first failure
        self._lapsed: dict[int, FailedJob] = {}

    def get(self, job_id: int) -> FailedJob | None:
        return self._jobs.get(job_id)

    def add(self, job: FailedJob) -> None:
        """Add a job; instead of what was known of it, if anything was."""
        self.discard(job.id)
        self._jobs[job.id] = job
        if job.status == LAPSED:
            self._lapsed[job.id] = job
            return
        self._first.setdefault(job.queue, SortedList()).add((job.first_error_ms, job.id))
        if job.status == ERROR:
            self._due.setdefault(job.queue, SortedList()).add((job.due, job.id))

    def discard(self, job_id: int) -> None:
        """Forget a job. No error if it is not known."""
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        if job.status == LAPSED:
            del self._lapsed[job_id]
            return
        self._first[job.queue].discard((job.first_error_ms, job.id))
        if job.status == ERROR:
            self._due[job.queue].discard((job.due, job.id))

    def due(self, queue: str, now: int, most: int) -> list[tuple[int, int]]:
        """Up to ``most`` jobs in error that are due: when they were, and their ids; the earliest first."""
        listed = self._due.get(queue)
        return [] if listed is None else list(islice(listed.irange(None, (now, 1 << 64)), most))

    def next_due(self, queue: str, after: int | None = None) -> int | None:
        """When the next job in error of the queue is due; ``after``: that is due later than that."""
        listed = self._due.get(queue)
        found = None if listed is None else next(listed.irange(None if after is None else (after + 1, 0)), None)
        return None if found is None else found[0]

    def oldest_first(self, queue: str | None) -> Iterator[int]:
        """The ids of jobs in error and dead, the oldest first failure first. Nothing may change meanwhile."""
        if queue is not None:
            lists = [self._first[queue]] if queue in self._first else []
        else:
            lists = list(self._first.values())
        return (job_id for _, job_id in merge(*lists))

    def count_until(self, first_error_ms: int) -> int:
        """How many jobs failed first at this time or earlier."""
        return sum(listed.bisect_right((first_error_ms, 1 << 64)) for listed in self._first.values())

    def lapsed(self, queues: Iterable[str]) -> list[FailedJob]:
        names = set(queues)
        return [job for job in self._lapsed.values() if job.queue in names]

    def dead_until(self, queue: str, finished_ms: int) -> list[int]:
        """The ids of jobs of the queue that died at this time or earlier."""
        ids = [job_id for _, job_id in self._first.get(queue, ())]
        found = [self._jobs[job_id] for job_id in ids]
        return [job.id for job in found if job.status == DEAD and job.finished_ms <= finished_ms]

    def _check(self) -> None:
        """The invariants; for tests."""
        first = {job_id for listed in self._first.values() for _, job_id in listed}
        due = {job_id for listed in self._due.values() for _, job_id in listed}
        assert first.isdisjoint(self._lapsed)
        assert first | self._lapsed.keys() == self._jobs.keys()
        assert due == {job.id for job in self._jobs.values() if job.status == ERROR}

    def counts(self) -> Counter[tuple[str, str]]:
        """How many there are of each queue and status."""
        return Counter((job.queue, STATUSES[job.status]) for job in self._jobs.values())
