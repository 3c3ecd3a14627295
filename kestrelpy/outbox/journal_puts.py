"""Puts into a work queue: each by itself, or collected by a transaction and stored at its end as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kestrelpy import work
from kestrelpy.outbox.errors import DuplicateJob, NotSupported, OutboxError
from kestrelpy.outbox.journal_body import new_body, stored_priority
from kestrelpy.outbox.journal_jobs import FOR_EVER

if TYPE_CHECKING:
    from kestrelpy.outbox.journal_admin import JournalAdmin
    from kestrelpy.outbox.journal_jobs import JournalJobs
    from kestrelpy.outbox.puts import NewPayload, PutOptions

__all__ = ["JournalPuts", "JournalTransaction"]

ATTEMPTS = 100
"""So often a put finds that the job with its key ended just now, before it gives up."""
MAX_KEY_BYTES = 255
"""Of a work queue."""

Collected = tuple[work.NewJob, int, float]
"""A job of a transaction, its id, and when it may run, on the monotonic clock."""
Put = tuple[Sequence[Any], bool]
"""A row of ``COLUMNS``, and whether the job is new."""


class JournalTransaction:
    """What ``begin()`` gives on a ``WorkQueue``: it collects puts, and its end stores all of them, or none.

    For one thread or task at a time. ``puts``: of the work queue that it is for; ``is_open``: until the end of its
    block.
    """

    def __init__(self, puts: JournalPuts) -> None:
        self.is_open = True
        self.puts = puts
        self._jobs: list[Collected] = []
        self._rows: dict[tuple[str, str], Sequence[Any]] = {}  # by queue and key

    def add(self, job: work.NewJob, row: Sequence[Any], due: float) -> None:
        """A job to be stored, its row, and when it may run, on the monotonic clock."""
        self._jobs.append((job, row[0], due))
        if job.key is not None:
            self._rows[job.tube, job.key] = row

    def find(self, queue: str, key: str) -> Sequence[Any] | None:
        """The row of the job of this transaction that has the key."""
        return self._rows.get((queue, key))

    def end(self) -> None:
        """Put no more. What was put is forgotten."""
        self.is_open = False

    def commit(self) -> None:
        """Store all puts as one batch. Raises ``DuplicateJob``, and what ``WorkQueue.put_all`` raises; then none is
        stored.
        """
        self.is_open = False
        self.puts.store(self._jobs)

    def __repr__(self) -> str:
        return f"<JournalTransaction: {len(self._jobs)} puts{'' if self.is_open else ', ended'}>"


class JournalPuts:
    """The puts of an outbox on one work queue."""

    def __init__(self, jobs: JournalJobs, admin: JournalAdmin) -> None:
        self._jobs = jobs
        self._admin = admin

    def put_one(self, into: JournalTransaction | None, new: PutOptions, payload: NewPayload) -> Put:
        """``puts.put_one``; ``into``: the transaction, or ``None``: at once."""
        return self.put_all(into, new, (payload,))[0]

    def put_all(self, into: JournalTransaction | None, new: PutOptions, payloads: Sequence[NewPayload]) -> list[Put]:
        """``puts.put_all``."""
        _check(new, payloads)
        if into is not None and not into.is_open:
            raise OutboxError("this transaction has ended: put on it within its block, with outbox.begin() as tx")
        now_ms = self._jobs.core.now_ms()
        due_ms = now_ms + new.delay_ms if new.at_ms is None else new.at_ms
        jobs = [self._job(new, payload, now_ms, due_ms) for payload in payloads]
        if into is not None:
            return self._put_into(into, new, payloads, jobs, (now_ms, due_ms))
        for _ in range(ATTEMPTS):
            there = {each.key: self._there(new, each.key, None) for each in payloads if each.key is not None}
            left = [job for job in jobs if job.key is None or there[job.key] is None]
            try:
                ids = iter(self._put_now(left))
            except work.DuplicateJob as error:
                if new.if_exists == "raise":
                    raise _duplicate(error) from None
                continue  # put just now by somebody else
            if left:
                self._jobs.notify(max(0, due_ms - now_ms) / 1000)
            found: list[Put] = []
            for payload in payloads:
                row = None if payload.key is None else there[payload.key]
                is_new = row is None
                found.append((_row(next(ids), new, payload, now_ms, due_ms) if row is None else row, is_new))
            return found
        raise OutboxError(f"the jobs of queue {new.queue!r} with these keys come and go: they were not put")

    def _put_now(self, jobs: Sequence[work.NewJob]) -> Sequence[int]:
        """Store these jobs, all or none. Equal options cost less."""
        if not jobs:
            return ()
        first = jobs[0]
        how: dict[str, Any] = {
            "tube": first.tube,
            "priority": first.priority,
            "delay": first.delay,
            "ttr": first.ttr,
        }
        if len(jobs) == 1:
            return (self._jobs.queue.put(first.body, key=first.key, **how),)
        if all(job.key is None for job in jobs):
            return self._jobs.queue.put_many([job.body for job in jobs], **how)
        return self._jobs.queue.put_all(jobs)

    def _put_into(
        self,
        into: JournalTransaction,
        new: PutOptions,
        payloads: Sequence[NewPayload],
        jobs: Sequence[work.NewJob],
        times: tuple[int, int],
    ) -> list[Put]:
        there = {each.key: self._there(new, each.key, into) for each in payloads if each.key is not None}
        for job in jobs:
            if len(job.body) > self._jobs.queue.max_job_bytes:
                raise work.JobTooBig(len(job.body), self._jobs.queue.max_job_bytes)
        found: list[Put] = []
        for job, payload in zip(jobs, payloads, strict=True):
            row = None if payload.key is None else there[payload.key]
            if row is not None:
                found.append((row, False))
                continue
            job_id = self._jobs.queue.new_id()
            row = _row(job_id, new, payload, *times)
            into.add(job, row, self._jobs.core.time.monotonic() + job.delay)
            found.append((row, True))
        return found

    def store(self, collected: Sequence[Collected]) -> None:
        """Store the jobs of a transaction, all or none."""
        now = self._jobs.core.time.monotonic()
        jobs = [
            work.NewJob(job.body, job.tube, job.priority, max(0.0, due - now), job.ttr, job.key, None, job_id)
            for job, job_id, due in collected
        ]
        try:
            self._jobs.queue.put_all(jobs)
        except work.DuplicateJob as error:
            raise _duplicate(error) from None
        for seconds in {float(job.delay) for job in jobs}:
            self._jobs.notify(seconds)

    def _job(self, new: PutOptions, payload: NewPayload, now_ms: int, due_ms: int) -> work.NewJob:
        stored = payload.binary if payload.text is None else payload.text
        assert stored is not None
        body = new_body(stored, added_ms=now_ms, due_ms=due_ms, group=new.group, context=new.context)
        delay = min(max(0, due_ms - now_ms) / 1000, FOR_EVER)
        return work.NewJob(body, new.queue, stored_priority(new.priority), delay, FOR_EVER, payload.key)

    def _there(self, new: PutOptions, key: str, into: JournalTransaction | None) -> Sequence[Any] | None:
        """The job that has the key already, if that is to be returned. Raises ``DuplicateJob``."""
        row = None if into is None else into.find(new.queue, key)
        if row is None and (into is not None or new.if_exists == "return"):
            row = self._admin.with_key(new.queue, key)
        if row is not None and new.if_exists == "raise":
            raise DuplicateJob(row[0], new.queue, key)
        return row


def _check(new: PutOptions, payloads: Sequence[NewPayload]) -> None:
    """Raises ``NotSupported``, ``ValueError``."""
    if new.lane is not None:
        raise NotSupported("lane")
    if new.if_exists == "replace":
        raise NotSupported('if_exists="replace"')
    for payload in payloads:
        if payload.depends_on is not None:
            raise NotSupported("depends_on")
        if payload.key is not None and len(payload.key.encode()) > MAX_KEY_BYTES:
            raise ValueError(
                f"key must have at most {MAX_KEY_BYTES} bytes in UTF-8 on a WorkQueue, not {payload.key!r}"
            )


def _row(job_id: int, new: PutOptions, payload: NewPayload, now_ms: int, due_ms: int) -> Sequence[Any]:
    """A new row of ``COLUMNS``."""
    given = (new.queue, payload.key, new.group, None, "ready", new.priority, payload.text, payload.binary)
    return (job_id, *given, new.context, None, 0, now_ms, due_ms, None, None, None, None, None)


def _duplicate(error: work.DuplicateJob) -> DuplicateJob:
    assert error.job_id is not None
    return DuplicateJob(error.job_id, error.tube, error.key)
