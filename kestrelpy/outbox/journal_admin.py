"""``JournalAdmin``: looking at jobs, mending and counting them, on a work queue. A method has the name and arguments
of the operation in ``admin`` or ``reports``, and returns the same.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import nsmallest
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from kestrelpy import work
from kestrelpy.outbox.admin import SLICE
from kestrelpy.outbox.errors import JobNotFound
from kestrelpy.outbox.journal_body import LAPSED, NONE, STATUSES
from kestrelpy.outbox.journal_jobs import FOR_EVER
from kestrelpy.outbox.results import QueueCount

if TYPE_CHECKING:
    from kestrelpy.outbox.journal_jobs import JournalJobs
    from kestrelpy.outbox.sql import Rows

__all__ = ["JournalAdmin"]

ALL = ("ready", "delayed", "reserved", "buried")
STATES_OF: dict[str | None, Collection[str]] = {
    None: ALL,
    "ready": ("ready", "delayed"),
    "running": ("reserved", "buried"),
    "error": ("buried",),
    "dead": ("buried",),
}
"""The states in the work queue that a job of this status may have."""
NO_LIMIT = 1 << 62


class JournalAdmin:
    """The operations of those who look at the jobs of one work queue."""

    def __init__(self, jobs: JournalJobs) -> None:
        self._jobs = jobs

    # -- looking -----------------------------------------------------------------------------------------------------

    def get(self, job_id: int) -> Sequence[Any]:
        """Raises ``JobNotFound``."""
        try:
            return self._jobs.row(self._jobs.queue.stats_job(job_id))
        except work.JobNotFound:
            raise JobNotFound(job_id) from None

    def find(self, queue: str, key: str) -> Sequence[Any]:
        """Raises ``JobNotFound``."""
        row = self.with_key(queue, key)
        if row is None:
            raise JobNotFound(queue=queue, key=key)
        return row

    def with_key(self, queue: str, key: str) -> Sequence[Any] | None:
        """The row of the job that has this key."""
        try:
            return self.get(self._jobs.queue.peek_key(key, queue).id)
        except (work.JobNotFound, JobNotFound, ValueError):  # ValueError: a key that no job can have
            return None

    def _rows(self, queue: str | None, states: Collection[str], after_id: int) -> Iterator[list[Any]]:
        for name in self._jobs.queues() if queue is None else [queue]:
            for stats in self._jobs.queue.jobs(name, states):
                if stats.id > after_id:
                    yield self._jobs.row(stats)

    def jobs(self, queue: str | None, status: str | None, group: str | None, limit: int, after_id: int) -> Rows:
        """Jobs by id. O(jobs of these queues)."""
        rows = self._rows(queue, STATES_OF.get(status, ()), after_id)
        wanted = (row for row in rows if status in (None, row[5]) and group in (None, row[3]))
        # Of one state, a job that changes meanwhile may be listed twice.
        return list({row[0]: row for row in nsmallest(limit, wanted, key=itemgetter(0))}.values())

    def errors(self, queue: str | None, limit: int) -> Rows:
        """Jobs in error or dead, the oldest failure first."""
        with self._jobs.lock:
            ids = list(islice(self._jobs.failed.oldest_first(queue), min(limit, NO_LIMIT)))
        rows = []
        for job_id in ids:
            with contextlib.suppress(JobNotFound):
                rows.append(self.get(job_id))
        return [row for row in rows if row[5] in ("error", "dead")]

    def oldest_error(self, queue: str) -> Rows:
        """The job in error or dead that has failed longest, or no row."""
        return self.errors(queue, 1)

    # -- mending -----------------------------------------------------------------------------------------------------

    def retry(self, job_id: int) -> bool:
        """Make a job ready that has failed. Raises ``JobNotFound``."""
        with self._jobs.lock:
            known = self._jobs.failed.get(job_id)
            is_retried = known is not None and known.status != LAPSED and self._retry_locked(job_id)
        if is_retried:
            self._jobs.notify(0)
        else:
            self.get(job_id)
        return is_retried

    def _retry_locked(self, job_id: int) -> bool:
        job = self._jobs.take_locked(job_id)
        if job is None:
            return False
        body = self._jobs.decode(job.body)._replace(
            tries=0,
            reserves=job.reserves,
            due_ms=self._jobs.core.now_ms(),
            started_ms=NONE,
            finished_ms=NONE,
            first_error_ms=NONE,
            error=None,
        )
        return self._jobs.release(job, body)

    def retry_all(self, queue: str, status: str) -> int:
        """Make ready all jobs of a queue in this status. None is done or cancelled."""
        count = 0
        with self._jobs.lock:
            ids = list(self._jobs.failed.oldest_first(queue))
        for job_id in ids:
            with self._jobs.lock:
                known = self._jobs.failed.get(job_id)
                if known is not None and STATUSES[known.status] == status:
                    count += self._retry_locked(job_id)
        if count:
            self._jobs.notify(0)
        return count

    def cancel(self, job_id: int) -> bool:
        """Delete a job that is not running. Raises ``JobNotFound``."""
        with self._jobs.lock:
            known = self._jobs.failed.get(job_id)
            if known is not None and known.status == LAPSED:
                return False
            try:
                self._jobs.queue.delete(job_id)
            except work.NotReserved:
                return False
            except work.JobNotFound:
                raise JobNotFound(job_id) from None
            self._jobs.failed.discard(job_id)
            return True

    def prune(self, queue: str, statuses: Iterable[str], keep_ms: int) -> int:
        """Delete a slice of the jobs that ended ``keep_ms`` ago: only dead ones are there."""
        if "dead" not in statuses:
            return 0
        count = 0
        with self._jobs.lock:
            for job_id in self._jobs.failed.dead_until(queue, self._jobs.core.now_ms() - keep_ms)[:SLICE]:
                with contextlib.suppress(work.NotReserved, work.JobNotFound):
                    self._jobs.queue.delete(job_id)
                    count += 1
                self._jobs.failed.discard(job_id)
        return count

    def set_paused(self, queue: str, is_paused: bool) -> None:
        """Pause or resume a queue."""
        if is_paused:
            with self._jobs.queue.session() as session:
                session.use(queue)  # makes the tube, which stays because it is paused
                self._jobs.queue.pause_tube(queue, FOR_EVER)
            return
        with contextlib.suppress(work.TubeNotFound):
            self._jobs.queue.pause_tube(queue, 0)
        self._jobs.notify(0)

    # -- reports -----------------------------------------------------------------------------------------------------

    def stats(self, queue: str | None) -> list[QueueCount]:
        """The jobs of each queue in each status. O(queues and failed jobs)."""
        counts: dict[tuple[str, str], int] = {}
        with self._jobs.lock:
            known = self._jobs.failed.counts()
            for name in self._jobs.queues() if queue is None else [queue]:
                try:
                    tube = self._jobs.queue.stats_tube(name)
                except work.TubeNotFound:
                    continue
                errors, lapsed = known[name, "error"], known[name, "running"]
                counts[name, "ready"] = tube.ready + tube.delayed
                counts[name, "running"] = tube.reserved + lapsed
                counts[name, "error"] = errors
                counts[name, "dead"] = tube.buried - errors - lapsed
        return [QueueCount(*which, count) for which, count in sorted(counts.items()) if count > 0]

    def group_progress(self, queue: str, group: str) -> dict[str, int]:
        """The jobs of a group in each status. O(jobs of the queue)."""
        rows = self.jobs(queue, None, group, NO_LIMIT, 0)
        return dict(sorted(Counter(row[5] for row in rows).items()))

    def health(self, age_ms: int, *, is_patient: bool) -> tuple[int, int, int | None]:  # noqa: ARG002
        """Old failures, no job that waits for a dead one, and how long the oldest ready job has been due."""
        jobs = self._jobs
        now_ms = jobs.core.now_ms()
        with jobs.lock:
            errors = jobs.failed.count_until(now_ms - age_ms)
        firsts = [job for name in jobs.queues() for job in jobs.queue.peek_priorities(name)]
        due_ms = min((jobs.decode(job.body).due_ms for job in firsts), default=None)
        return errors, 0, None if due_ms is None else max(0, now_ms - due_ms)
