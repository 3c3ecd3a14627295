"""``JournalClaims``: what consumers do, on a work queue. A method has the name and the arguments of the operation in
``claims``, and returns the same.

Rules:
1. A claim is on disk before its jobs begin, in the work queue's count of reservations. So a job that kills the process
   is worn out at last.
2. Outcomes that failed to be saved in part are known when they are saved again (``_unreported``): nothing that was
   saved is told to be refused.
3. One thread at a time claims ready jobs: the session has one set of tubes that it watches.
4. An interrupt may fall between a reservation and the note of it. ``lapsed`` gives back what it finds so twice.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kestrelpy import QueueClosed, QueueDiskFull, QueueEmpty, QueueFull, work
from kestrelpy.outbox.journal_body import DEAD, ERROR, LAPSED, NONE, JobBody, payload_bytes
from kestrelpy.outbox.journal_jobs import DUE, LAPSED_TOKEN, STARTED, WORKER, RunningJob

if TYPE_CHECKING:
    from kestrelpy.outbox.claims import Done, Failure, Finish, Lane, Return
    from kestrelpy.outbox.journal_jobs import JournalJobs
    from kestrelpy.outbox.sql import Claim, Rows

__all__ = ["JournalClaims"]


class JournalClaims:
    """The operations of consumers on the jobs of one work queue."""

    def __init__(self, jobs: JournalJobs) -> None:
        self._jobs = jobs
        self._unreported: dict[int, int] = {}  # ids and tokens
        self._strays: set[int] = set()  # reserved, and not noted, at the last look

    # -- claims ------------------------------------------------------------------------------------------------------

    def claim(self, status: str, queues: Sequence[tuple[str, int]], wanted: Claim) -> Rows:
        """Of ready jobs of one priority, the one with the smallest id comes first, whenever it was due."""
        if not queues or wanted.jobs < 1:
            return []
        take = self._take_due if status == "error" else self._take_ready
        return self.claimed(take(queues, wanted), wanted)

    def claim_failed(self, job_id: int, wanted: Claim) -> Rows:
        """Claim one job that is in error or dead."""
        jobs = self._jobs
        with jobs.lock:
            known = jobs.failed.get(job_id)
            if known is None or known.status == LAPSED:
                return []
            job = jobs.take_locked(job_id)
        return [] if job is None else self.claimed([job], wanted)

    def claimed(self, taken: Sequence[work.Job], wanted: Claim) -> Rows:
        """Rows of ``CLAIMED`` of jobs that were reserved just now. That they were is on disk then."""
        if not taken:
            return []
        jobs = self._jobs
        with contextlib.suppress(QueueDiskFull):  # then the death of the process is not counted
            jobs.queue.save_reserves()
        now_ms = jobs.core.now_ms()
        until, until_ms = jobs.now() + wanted.lease_ms, now_ms + wanted.lease_ms
        token, worker, running, decode = wanted.token, wanted.worker, jobs.running, jobs.decode
        rows = []
        for job in taken:
            running[job.id] = RunningJob(job, token, until, now_ms, worker)
            body = decode(job.body)
            row = body.row(job, "running")
            row[DUE], row[STARTED], row[WORKER] = until_ms, now_ms, worker
            row += (False, body.due_ms, len(body.payload))
            rows.append(row)
        return rows

    def _take_ready(self, queues: Sequence[tuple[str, int]], wanted: Claim) -> list[work.Job]:
        """Reserve ready jobs, the most urgent first, of each queue at most so many."""
        left = {queue: min(most, wanted.jobs) for queue, most in queues if most > 0}
        largest = max(self._jobs.queue.max_job_bytes, 1)
        jobs_left, bytes_left = wanted.jobs, wanted.max_bytes
        found: list[work.Job] = []
        while left and jobs_left > 0 and bytes_left > 0 and self._watch(left):
            count = min(jobs_left, *left.values(), bytes_left // largest + 1)
            taken = self._reserve_many(count)
            found += taken
            jobs_left -= len(taken)
            bytes_left -= sum(payload_bytes(job.body) for job in taken)
            if len(taken) < count:
                break
            for queue, of_queue in Counter(job.tube for job in taken).items():
                left[queue] -= of_queue
                if left[queue] <= 0:
                    del left[queue]
        return found

    def _watch(self, queues: Iterable[str]) -> bool:
        """Let the session watch the tubes of these queues, and no others. False if there is none of these tubes."""
        session, names = self._jobs.session, set(queues)
        for tube in names.difference(session.watching):
            with contextlib.suppress(QueueFull):  # max_tubes: there is no such tube, and so no job in it
                session.watch(tube)
        for tube in set(session.watching) - names:
            with contextlib.suppress(ValueError):  # the last one
                session.ignore(tube)
        return names.issuperset(session.watching)

    def _reserve_many(self, count: int) -> list[work.Job]:
        try:
            return self._jobs.session.reserve_many(count, timeout=0)
        except QueueEmpty:
            return []

    def _take_due(self, queues: Sequence[tuple[str, int]], wanted: Claim) -> list[work.Job]:
        """Reserve jobs in error that are due, the earliest first."""
        jobs = self._jobs
        now = jobs.now()
        found: list[work.Job | None] = []
        with jobs.lock:
            for job_id in self._due_locked(queues, now, wanted.jobs):
                try:
                    found.append(jobs.take_locked(job_id))
                except QueueDiskFull:
                    if not any(found):
                        raise
                    break
        return [job for job in found if job is not None]

    def _due_locked(self, queues: Sequence[tuple[str, int]], now: int, count: int) -> list[int]:
        due: list[tuple[int, int]] = []
        for queue, most in queues:
            if most > 0 and not self.is_paused(queue):
                due += self._jobs.failed.due(queue, now, min(most, count))
        return [job_id for _, job_id in sorted(due)[:count]]

    def is_paused(self, queue: str) -> bool:
        """Whether no job of the queue is to be claimed."""
        try:
            return self._jobs.queue.stats_tube(queue).pause_left > 0
        except work.TubeNotFound:
            return False

    # -- leases, and what is due -------------------------------------------------------------------------------------

    def renew(self, running: Sequence[Done], lease_ms: int) -> set[int]:
        """Renew the leases of running jobs."""
        until = self._jobs.now() + lease_ms
        renewed = set()
        for job_id, token in running:
            found = self._jobs.claimed_by(job_id, token)
            if found is not None:
                found.until = until
                renewed.add(job_id)
        return renewed

    def lapsed(self, queues: Iterable[str]) -> Rows:
        """Running jobs whose lease is over, or whose process has died."""
        self._give_back_strays()
        jobs = self._jobs
        names, now = set(queues), jobs.now()
        with jobs.lock:
            ids = [job.id for job in jobs.failed.lapsed(names)]
        rows = []
        for job_id in ids:
            with contextlib.suppress(work.JobNotFound):
                rows.append([*jobs.row(jobs.queue.stats_job(job_id)), LAPSED_TOKEN])
        over = [found for found in list(jobs.running.values()) if found.until <= now and found.job.tube in names]
        return rows + [[*jobs.row_of_running(found), found.token] for found in over]

    def _give_back_strays(self) -> None:
        """See rule 4."""
        jobs = self._jobs
        strays = set(jobs.session.reserved) - jobs.running.keys()
        for job_id in strays & self._strays:
            with jobs.lock:
                jobs.give_back_locked(job_id)
            jobs.notify(0)
        self._strays = strays

    def overlooked(self, after: int) -> tuple[list[int], int | None]:  # noqa: ARG002
        """No job waits for another."""
        return [], None

    def held_lanes(self, after: Lane) -> tuple[list[Lane], Lane | None]:  # noqa: ARG002
        """There are no lanes."""
        return [], None

    def next_due_ms(self, queues: Iterable[str]) -> tuple[int, int | None, int | None]:
        """The time, and when the next job is due that is ready, and that is in error."""
        jobs = self._jobs
        now, now_ms = jobs.now(), jobs.core.now_ms()
        ready: list[int] = []
        failed: list[int] = []
        for queue in queues:
            if self.is_paused(queue):
                continue
            with contextlib.suppress(work.JobNotFound):
                jobs.queue.peek_ready(queue)
                ready.append(now_ms)
            with contextlib.suppress(work.JobNotFound):
                ready.append(now_ms + _milliseconds(jobs.queue.peek_delayed(queue).time_left))
            with jobs.lock:
                due = jobs.failed.next_due(queue)
            if due is not None:
                failed.append(now_ms + due - now)
        return now_ms, min(ready, default=None), min(failed, default=None)

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def finish(self, what: Finish) -> tuple[set[int], list[str]]:
        """Save outcomes: all that are done in one step, each of the others in one of its own."""
        done: list[Done] = [*what.done, *what.deleted]
        outcomes = done + [(each[0], each[1]) for each in what.failed] + [(each[0], each[1]) for each in what.returned]
        saved = {job_id for job_id, token in outcomes if self._unreported.get(job_id) == token}
        try:
            saved |= self._delete(done)
            for failure in what.failed:
                if self._fail(failure):
                    saved.add(failure[0])
            for returned in what.returned:
                if self._give_back(returned):
                    saved.add(returned[0])
        except QueueClosed:  # all reservations have ended with it
            return saved, []
        except BaseException:
            self._unreported.update((job_id, token) for job_id, token in outcomes if job_id in saved)
            raise
        for job_id in saved:
            self._unreported.pop(job_id, None)
        return saved, []

    def mark_done(self, done: Sequence[Done]) -> tuple[set[int], list[str]]:
        """Delete jobs that are done, in one step."""
        try:
            return self._delete(done), []
        except QueueClosed:
            return set(), []

    delete_done = mark_done

    def give_back(self, returned: Sequence[Return]) -> set[int]:
        """Undo claims: the tries are not counted."""
        return {each[0] for each in returned if self._give_back(each)}

    def fail(self, failures: Sequence[Failure], *, are_lapsed: bool = False) -> set[int]:
        """Let jobs be in error, or dead."""
        return {failure[0] for failure in failures if self._fail(failure, are_lapsed=are_lapsed)}

    def _delete(self, done: Sequence[Done]) -> set[int]:
        jobs = self._jobs
        found = [each for each in (jobs.claimed_by(*own) for own in done) if each is not None]
        if not found:
            return set()
        deleted = {each.job.id for each in found}
        deleted.difference_update(job.id for job in jobs.session.delete_many([each.job for each in found]))
        for each in found:
            jobs.forget(each.job)
        return deleted

    def _fail(self, failure: Failure, *, are_lapsed: bool = False) -> bool:
        """Bury a job, in error or dead. Whether its token was still good."""
        job_id, token, status, delay_ms, error = failure
        jobs = self._jobs
        with jobs.lock:
            found = jobs.claimed_by(job_id, token)
            if found is None:
                return token == LAPSED_TOKEN and self._fail_lapsed_locked(job_id, status, delay_ms, error)
            if are_lapsed and found.until > jobs.now():
                return False
            body = jobs.decode(found.job.body)
            body = body._replace(tries=body.tries_at(found.job.reserves), started_ms=found.started_ms)
            return jobs.bury_locked(found.job, self._failed_body(body, status, delay_ms, error))

    def _fail_lapsed_locked(self, job_id: int, status: str, delay_ms: int, error: str) -> bool:
        """The same of a job whose process has died: its body knows its tries."""
        jobs = self._jobs
        known = jobs.failed.get(job_id)
        job = jobs.take_locked(job_id) if known is not None and known.status == LAPSED else None
        if job is None:
            return False
        return jobs.bury_locked(job, self._failed_body(jobs.decode(job.body), status, delay_ms, error))

    def _failed_body(self, body: JobBody, status: str, delay_ms: int, error: str) -> JobBody:
        now_ms = self._jobs.core.now_ms()
        is_dead = status == "dead"
        return body._replace(
            status=DEAD if is_dead else ERROR,
            due_ms=body.due_ms if is_dead else now_ms + delay_ms,
            finished_ms=now_ms if is_dead else NONE,
            first_error_ms=now_ms if body.first_error_ms == NONE else body.first_error_ms,
            error=error,
        )

    def _give_back(self, returned: Return) -> bool:
        """Undo a claim: the try is not counted. Whether its token was still good."""
        job_id, token, delay_ms = returned
        jobs = self._jobs
        found = jobs.claimed_by(job_id, token)
        if found is None:
            return False
        job = found.job
        body = jobs.decode(job.body)
        due_ms = body.due_ms if delay_ms is None else jobs.core.now_ms() + delay_ms
        body = body._replace(tries=body.tries_at(job.reserves) - 1, reserves=job.reserves, due_ms=due_ms)
        if body.first_error_ms == NONE:
            return jobs.release(job, body, (delay_ms or 0) / 1000)
        with jobs.lock:
            return jobs.bury_locked(job, body._replace(status=ERROR, finished_ms=NONE))


def _milliseconds(seconds: float) -> int:
    """Rounded up, but for what a float adds."""
    return math.ceil(seconds * 1000 - 0.001)
