"""``JournalVirtual``: the operations of the test kit alone, on a work queue; ``virtual_operations`` has the others."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kestrelpy import work
from kestrelpy.outbox.flavours import WAS_DUE
from kestrelpy.outbox.job import ID
from kestrelpy.outbox.journal_body import body_of_row, stored_priority
from kestrelpy.outbox.journal_jobs import FOR_EVER

if TYPE_CHECKING:
    from kestrelpy.outbox.journal_claims import JournalClaims
    from kestrelpy.outbox.journal_jobs import JournalJobs
    from kestrelpy.outbox.sql import Claim

__all__ = ["JournalVirtual"]


class JournalVirtual:
    """What a test does to the jobs of one work queue."""

    def __init__(self, jobs: JournalJobs, claims: JournalClaims) -> None:
        self._jobs = jobs
        self._claims = claims

    def next_later_ms(self, names: Sequence[str]) -> int | None:
        """When something of these queues is due after now."""
        jobs = self._jobs
        now, now_ms = jobs.now(), jobs.core.now_ms()
        later = [found.until for found in jobs.running.values() if found.until > now and found.job.tube in names]
        for name in names:
            if self._claims.is_paused(name):
                continue
            with contextlib.suppress(work.JobNotFound):
                later.append(max(now + 1, now + round(jobs.queue.peek_delayed(name).time_left * 1000)))
            with jobs.lock:
                due = jobs.failed.next_due(name, after=now)
            if due is not None:
                later.append(due)
        return now_ms + min(later) - now if later else None

    def with_due_errors(self, queues: Sequence[str]) -> list[str]:
        """Those of the queues that have jobs in error that are due."""
        with self._jobs.lock:
            return sorted(queue for queue in queues if self._jobs.failed.due(queue, self._jobs.now(), 1))

    def claim_again(self, row: Sequence[Any], wanted: Claim) -> Sequence[Any]:
        """Claim the job of this row of ``CLAIMED``, whatever its status is, and also if it was deleted."""
        jobs, job_id = self._jobs, row[ID]
        found = jobs.running.get(job_id)
        if found is not None:
            found.job.release(delay=0)
            jobs.forget(found.job)
        with jobs.lock:
            job = jobs.take_locked(job_id)
            if job is None:
                body = body_of_row(row, row[WAS_DUE])
                how: dict[str, Any] = {"priority": stored_priority(row[6]), "ttr": FOR_EVER, "key": row[2]}
                jobs.queue.put(body.encode(), tube=row[1], job_id=job_id, **how)
                job = jobs.take_locked(job_id)
        assert job is not None
        return self._claims.claimed([job], wanted)[0]
