"""``JournalJobs``: the jobs of an outbox in a work queue, and what only memory has of them: which run, which failed.

    status                   in the work queue, in the tube of the queue's name
    ready, due               ready
    ready, for later         delayed
    running                  reserved by ``session``; ``running`` has the token and the lease
    running, its process     buried with the status LAPSED: when the queue is opened, a job that was reserved more often
    has died                 than its body accounts for becomes one
    error, dead              buried; ``failed`` knows when those in error come again
    done, cancelled          deleted

Rules:
1. The work queue decides who comes first: a job is deleted, buried or released by the handle of its reservation, once.
2. Leases are in memory: no other process can have one. In the work queue a reservation lasts for ever.
3. A job that is taken and can't be buried or released, because the disk is full, is a running one whose lease is over.

NOTE ON LOCKING: ``lock`` guards ``failed``, and is held while a job is buried or taken out of there, which may wait for
a sync. Claims of ready jobs and their ends take no lock but the work queue's: single steps on a dict are atomic.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kestrelpy import InvalidName, QueueDiskFull, QueueFull, work
from kestrelpy.outbox.failed_jobs import FailedJob, FailedJobs
from kestrelpy.outbox.journal_body import DEAD, LAPSED, NONE, READY, STATUSES, JobBody, check_version, decode
from kestrelpy.outbox.queues import check_name

if TYPE_CHECKING:
    from kestrelpy.outbox.core import OutboxCore

__all__ = ["DUE", "FOR_EVER", "LAPSED_TOKEN", "STARTED", "WORKER", "JournalJobs", "RunningJob"]

FOR_EVER = 1 << 32
"""Seconds: the longest time to run, delay and pause of a work queue, 136 years."""
LAPSED_TOKEN = 0
"""Of a job whose process has died: no claim has it."""
DUE, STARTED, WORKER = 13, 14, 18
"""Places in a row of ``COLUMNS``."""


class RunningJob:
    """A job that is claimed here. ``until``: the end of its lease, in milliseconds of the monotonic clock."""

    __slots__ = ("job", "started_ms", "token", "until", "worker")

    def __init__(self, job: work.Job, token: int, until: int, started_ms: int, worker: str) -> None:
        self.job = job
        self.token = token
        self.until = until
        self.started_ms = started_ms
        self.worker = worker


class JournalJobs:
    """The jobs in one work queue. ``on_due`` is called when a job may run: with the seconds until then.

    Raises ``UnsupportedFormat`` for jobs of a later version. Cost: O(jobs).
    """

    def __init__(self, core: OutboxCore, queue: work.WorkQueue) -> None:
        self.core = core
        self.queue = queue
        self.session = queue.session(deadline_soon=False)
        self.lock = threading.Lock()
        self.running: dict[int, RunningJob] = {}
        self.failed = FailedJobs()  # guarded by self.lock
        self.on_due: Callable[[float], object] | None = None
        try:
            with self.lock:
                for name in self.queues():
                    self._load_locked(name)
        except BaseException:
            self.session.close()
            raise

    def close(self) -> None:
        """Give back what is still claimed."""
        self.session.close()
        self.running.clear()

    def abandon(self) -> None:
        """In a forked child: a new lock, as another thread may have held the old one."""
        self.lock = threading.Lock()
        self.running.clear()

    def notify(self, seconds: float) -> None:
        """A job may run in so many seconds. Call without the lock."""
        on_due = self.on_due
        if on_due is not None:
            on_due(seconds)

    def now(self) -> int:
        """Milliseconds of the monotonic clock."""
        return round(self.core.time.monotonic() * 1000)

    def queues(self) -> list[str]:
        """The tubes that can be queues of an outbox."""
        found = []
        for tube in self.queue.tubes():
            with contextlib.suppress(InvalidName):
                found.append(check_name(tube))
        return found

    def decode(self, body: bytes) -> JobBody:
        return decode(body, self.core.now_ms())

    def _check(self) -> None:
        """The invariants; for tests, with nobody else at work."""
        with self.lock:
            self.failed._check()
            counts = self.failed.counts()
            buried = {name: self.queue.stats_tube(name).buried for name in self.queues()}
            assert buried == {name: _of_queue(name, counts) for name in buried}
            assert sorted(self.running) == sorted(self.session.reserved)

    # -- opening -----------------------------------------------------------------------------------------------------

    def _load_locked(self, queue: str) -> None:
        """Find the jobs that have failed, and those that were running when their process died."""
        interrupted = []
        for stats in self.queue.jobs(queue):
            check_version(stats.body, f"job {stats.id} of work queue {self.queue.name}")
            if stats.state == "buried":
                self._note_buried_locked(stats.id, queue, self.decode(stats.body))
            elif stats.reserves and stats.state != "reserved":
                body = self.decode(stats.body)
                if body.is_own and (body.status != READY or stats.reserves > body.reserves):
                    interrupted.append((stats, body))
        for stats, body in interrupted:
            self._set_aside_locked(stats, body)

    def _set_aside_locked(self, stats: work.JobStats, body: JobBody) -> None:
        """A job was running when its process died: its lease is over. Its tries are those of that time."""
        status = LAPSED if stats.reserves > body.reserves else body.status  # the same if its claim was not on disk yet
        job = self.take_locked(stats.id)
        if job is not None:
            with contextlib.suppress(QueueDiskFull):  # rule 3
                self.bury_locked(job, body._replace(status=status, tries=body.tries_at(stats.reserves)))

    # -- reservations ------------------------------------------------------------------------------------------------

    def claimed_by(self, job_id: int, token: int) -> RunningJob | None:
        """The job, if this is the token of its claim."""
        found = self.running.get(job_id)
        return found if found is not None and found.token == token else None

    def take_locked(self, job_id: int) -> work.Job | None:
        """Reserve a failed job; ``None`` if somebody else has it, or it is gone. See rule 3."""
        try:
            job = self.session.reserve_job(job_id)
        except (work.JobNotFound, work.NotReserved):
            self.failed.discard(job_id)
            return None
        self.running[job_id] = RunningJob(job, LAPSED_TOKEN, self.now(), self.core.now_ms(), self.core.worker)
        self.failed.discard(job_id)
        return job

    def give_back_locked(self, job_id: int) -> None:
        """Let a job that is reserved, and that nobody has noted, be what its body says. The try is counted."""
        with contextlib.suppress(work.JobNotFound, work.NotReserved):
            stats = self.queue.stats_job(job_id)
            body = self.decode(stats.body)
            if body.status == READY:
                self.session.release(job_id, delay=0)
            else:
                self.session.bury(job_id)
                self._note_buried_locked(job_id, stats.tube, body)

    def forget(self, job: work.Job) -> None:
        """The reservation of this job has ended."""
        found = self.running.get(job.id)
        if found is not None and found.job is job:
            del self.running[job.id]

    def bury_locked(self, job: work.Job, body: JobBody) -> bool:
        """Bury a reserved job with a new body; the error is cut to what there is room for. False if it is not ours."""
        body = body._replace(reserves=job.reserves)
        is_ours = False
        with contextlib.suppress(work.NotReserved, work.JobNotFound):
            try:
                job.bury(body=body.encode(self.queue.max_job_bytes))
            except (QueueFull, work.JobTooBig):
                body = self._bury_without_room(job, body)
            is_ours = True
            self._note_buried_locked(job.id, job.tube, body)
        self.forget(job)
        return is_ours

    def _bury_without_room(self, job: work.Job, body: JobBody) -> JobBody:
        """Bury a job whose body must not grow. A body without a head, which somebody else has put, must stay as it is:
        then nothing can be known of the job, and it is dead.
        """
        if not self.decode(job.body).is_own:
            job.bury()
            return body._replace(status=DEAD)
        job.bury(body=body.encode(len(job.body)))
        return body

    def _note_buried_locked(self, job_id: int, queue: str, body: JobBody) -> None:
        """A job is buried, with this body. One that somebody else has buried is dead, from now on."""
        now_ms = self.core.now_ms()
        due = self.now() + body.due_ms - now_ms
        status = DEAD if body.status == READY else body.status
        instants = [now_ms if each == NONE else each for each in (body.first_error_ms, body.finished_ms)]
        self.failed.add(FailedJob(job_id, queue, status, due, *instants))

    def release(self, job: work.Job, body: JobBody, seconds: float = 0) -> bool:
        """Let a reserved job be ready, in so many seconds. False if it is not ours."""
        is_ours = False
        with contextlib.suppress(work.NotReserved, work.JobNotFound):
            try:
                job.release(delay=seconds, body=body._replace(status=READY).encode(self.queue.max_job_bytes))
            except (QueueFull, work.JobTooBig):  # a body without a head, which must stay as it is
                job.release(delay=seconds)
            is_ours = True
        self.forget(job)
        return is_ours

    # -- rows --------------------------------------------------------------------------------------------------------

    def row(self, stats: work.JobStats) -> list[Any]:
        """A row of ``COLUMNS``."""
        if stats.state == "reserved":
            found = self.running.get(stats.id)
            if found is not None:
                return self.row_of_running(found)
            row = self.decode(stats.body).row(stats, "running")
            row[DUE] = self.core.now_ms() + round(stats.time_left * 1000)
            return row
        body = self.decode(stats.body)
        is_buried_by_others = body.status == READY and stats.state == "buried"
        return body.row(stats, "dead" if is_buried_by_others else STATUSES[body.status])

    def row_of_running(self, found: RunningJob) -> list[Any]:
        """A row of ``COLUMNS``: the lease decides what is due, as in a database."""
        row = self.decode(found.job.body).row(found.job, "running")
        row[DUE] = self.core.now_ms() + found.until - self.now()
        row[STARTED], row[WORKER] = found.started_ms, found.worker
        return row


def _of_queue(name: str, counts: Mapping[tuple[str, str], int]) -> int:
    return sum(count for (queue, _), count in counts.items() if queue == name)
