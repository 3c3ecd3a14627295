"""A work queue and its model, side by side: every call is made on both, and all that can be seen of both is compared.

Whoever drives a pair draws from it the seconds that it asks for, so that no two moments of a run coincide.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from kestrelpy._disk.interface import Disk
from kestrelpy._process import forget
from kestrelpy.testing import CrashingDisk, ManualClock, MemoryDisk
from kestrelpy.work import Job, JobStats, NewJob, Session, WorkQueue
from kestrelpy.work.core import YIELD_SECONDS
from tests.work.model import MARGIN, STATES, WAITING, Model, ModelJob, ModelSession, ModelWaiter, Refused

START_MS = 1_700_000_000_000
TUBES = ("default", "a", "b", "Tube-1/x")
DIRECTORY = "/data"
CLOSE = 0.0015
"""Seconds by which a moment may have moved that was stored in milliseconds."""
opened: set[WorkQueue] = set()
"""What is to be let go of when a promise is broken in the middle of a run."""
LIMITS = {"max_jobs", "max_bytes", "max_attempts", "max_job_bytes"}


def open_queue(clock: ManualClock, disk: Disk, options: dict[str, Any]) -> WorkQueue:
    queue = WorkQueue(DIRECTORY, clock=clock, disk=disk, **options)
    opened.add(queue)
    return queue


class Pair:
    """``options`` are those of ``WorkQueue``; ``disk`` is one in memory, ``through`` what the queue sees of it."""

    def __init__(self, disk: MemoryDisk, *, through: Disk | None = None, **options: Any) -> None:
        self.disk = disk
        self.through = through
        self.options = options
        self.model = Model(**{name: value for name, value in options.items() if name in LIMITS and value is not None})
        self.moments = 0
        self.serial = 0
        self.futures: list[tuple[Future[Job], ModelWaiter]] = []
        self.handles: list[tuple[Job, ModelJob, int]] = []
        """Jobs that ``reserve`` gave, with the number of the reservation in the model; some are over."""
        self.open()

    # -- its life ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        self.clock = ManualClock(START_MS + round(self.model.now * 1000))
        self.queue = open_queue(self.clock, self.through or self.disk, self.options)
        self.sessions: list[tuple[Session, ModelSession]] = []
        self.handles.clear()
        self.opened_at = self.model.now

    def close(self, seconds: float = 0) -> None:
        """A clean end, and a new beginning after so many seconds."""
        for session, _ in self.sessions:
            assert not session.closed
        self.queue.close()
        opened.discard(self.queue)
        self._after_the_end(seconds)

    def kill(self, seconds: float = 0, disk: MemoryDisk | None = None) -> None:
        """The process dies, and another one goes on, here or on what is left of the disk."""
        vanish(self.queue, self.disk)
        if disk is not None:
            self.disk = disk
        self._after_the_end(seconds, killed=True)

    def _after_the_end(self, seconds: float, *, killed: bool = False) -> None:
        self.model.reopen(seconds)
        if not killed:
            self.compare_futures()
        self.futures.clear()
        self.open()
        self.adopt()

    def adopt(self) -> None:
        """Take over what no page promises exactly: ids that were drawn and not put, reservations of the last second,
        figures of tubes.
        """
        model, queue = self.model, self.queue
        last_id = queue.stats().last_id
        put = [job_id for job_id in model.history if job_id <= model.last_id]
        assert max(put, default=0) <= last_id <= model.last_id
        model.last_id = last_id
        model.drawn.clear()
        for job in model.jobs.values():
            reserves = queue.stats_job(job.id).reserves
            assert job.saved_reserves <= reserves <= job.reserves, job
            job.reserves = job.saved_reserves = reserves
        names = queue.tubes()
        assert names[0] == "default"
        assert set(names) == set(model.tubes)
        model.tubes = {name: model.tubes[name] for name in names}
        for name in names:
            stats, tube = queue.stats_tube(name), model.tubes[name]
            tube.total_jobs, tube.deletes, tube.pauses = stats.total_jobs, stats.deletes, stats.pauses

    # -- calls -------------------------------------------------------------------------------------------------------

    def seconds(self, base: int) -> float:
        """About so many, and never the same thousandths twice."""
        self.moments += 1
        assert self.moments < 500
        return base + self.moments * 0.002

    def body(self, size: int) -> bytes:
        self.serial += 1
        return b"%d." % self.serial + bytes(size)

    def both(self, real: Callable[[], Any], model: Callable[[], Any]) -> tuple[Any, Any] | None:
        """What the two have returned; ``None`` if they have refused, as they must."""
        try:
            wanted = model()
        except Refused as refused:
            self.refuses(real, refused)
            return None
        return real(), wanted

    def refuses(self, real: Callable[[], Any], refused: Refused) -> None:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - which one it is comes next
            real()
        error = caught.value
        if type(error).__name__ not in refused.names:
            raise error
        if len(refused.names) == 1:
            for name, value in refused.facts.items():
                assert getattr(error, name) == value, (error, name, value)

    def same(self, real: Callable[[], Any], model: Callable[[], Any]) -> Any:
        """The same result, or the same refusal: the result."""
        results = self.both(real, model)
        if results is not None:
            assert results[0] == results[1], results
            return results[1]
        return None

    def put(self, size: int, **how: Any) -> int | None:
        body = self.body(size)
        result: int | None = self.same(lambda: self.queue.put(body, **how), lambda: self.model.put(body, **how))
        return result

    def put_many(self, sizes: list[int], **how: Any) -> range | None:
        bodies = [self.body(size) for size in sizes]
        result: range | None = self.same(
            lambda: self.queue.put_many(iter(bodies), **how), lambda: self.model.put_many(bodies, **how)
        )
        return result

    def put_all(self, jobs: list[tuple[int, dict[str, Any]]]) -> list[int] | None:
        """``jobs``: sizes, each with the options of its own put."""
        new = [(self.body(size), how) for size, how in jobs]
        result: list[int] | None = self.same(
            lambda: self.queue.put_all(NewJob(body, **how) for body, how in new), lambda: self.model.put_all(new)
        )
        return result

    def new_session(self, *, deadline_soon: bool = True) -> None:
        real = self.queue.session(deadline_soon=deadline_soon)
        self.sessions.append((real, self.model.session(deadline_soon=deadline_soon)))

    def close_session(self, at: int) -> None:
        session, model = self.sessions.pop(at)
        session.close()
        assert session.closed
        self.model.close_session(model)

    def reserve(self, at: int, count: int | None = None) -> None:
        session, model = self.sessions[at]
        if count is None:
            got = self.both(lambda: [session.reserve(0)], lambda: [self.model.reserve(model)])
        else:
            got = self.both(lambda: session.reserve_many(count, 0), lambda: self.model.reserve_many(model, count))
        if got is not None:
            self.same_jobs(*got)
            self.handles += [(job, wanted, wanted.reservation) for job, wanted in zip(*got, strict=True)]

    def delete_many(self, at: int, count: int) -> None:
        """Those of the last so many reservations that the session has."""
        session, model = self.sessions[at]
        handles, self.handles = self.handles[-count:], self.handles[:-count]
        self.same(
            lambda: [job.id for job in session.delete_many(job for job, _, _ in handles)],
            lambda: self.model.delete_many(model, [handle[1:] for handle in handles]),
        )

    def reserve_job(self, at: int, job_id: int) -> None:
        session, model = self.sessions[at]
        got = self.both(lambda: [session.reserve_job(job_id)], lambda: [self.model.reserve_job(model, job_id)])
        if got is not None:
            self.same_jobs(*got)

    def same_jobs(self, jobs: list[Job], wanted: list[ModelJob]) -> None:
        assert [job.id for job in jobs] == [job.id for job in wanted]
        for job, model in zip(jobs, wanted, strict=True):
            self.same_job(job, model)

    def same_job(self, job: Job, model: ModelJob) -> None:
        facts = (job.body, job.tube, job.key, job.priority, job.ttr, job.reserves)
        assert facts == (model.body, model.tube, model.key, model.priority, model.ttr, model.reserves)
        assert abs(job.delay - model.delay) < CLOSE
        assert abs(job.time_left - model.time_left(self.model.now)) < CLOSE

    def release(
        self, at: int, job_id: int, priority: int | None = None, delay: float = 0, size: int | None = None
    ) -> None:
        session, model = self.sessions[at]
        body = None if size is None else self.body(size)
        self.same(
            lambda: session.release(job_id, priority, delay, body=body),
            lambda: self.model.release(model, job_id, priority, delay, body),
        )

    def bury(self, at: int, job_id: int, priority: int | None = None, size: int | None = None) -> None:
        session, model = self.sessions[at]
        body = None if size is None else self.body(size)
        self.same(
            lambda: session.bury(job_id, priority, body=body), lambda: self.model.bury(model, job_id, priority, body)
        )

    def wait(self, at: int, timeout: float | None) -> None:
        session, model = self.sessions[at]
        soon = self.model.soonest(model)
        if self.model.best(model.watching) is None and soon is not None and soon.due - MARGIN <= self.model.now:
            return  # whether that is raised, or told by the future, is left to the other tests
        waiter = self.model.reserve_future(model, timeout)
        self.futures.append((session.reserve_future(timeout), waiter))

    def cancel(self, at: int) -> None:
        future, waiter = self.futures[at]
        assert future.cancel() == self.model.cancel(waiter)

    def advance(self, seconds: float) -> None:
        self.model.advance(seconds)
        self.clock.advance(seconds)

    # -- looking at both ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """All that can be seen is the same, once the clock has told those of whom the moment has come."""
        self.clock.advance(0)
        self.queue._check()
        self.compare_futures()
        self.compare_figures()
        self.compare_tubes()
        for job in self.model.jobs.values():
            self.compare_job(job, self.queue.stats_job(job.id))
        for session, model in self.sessions:
            assert (session.used, session.watching) == (model.used, tuple(model.watching))
            assert sorted(session.reserved) == sorted(job.id for job in self.model.reserved_by(model))

    def compare_futures(self) -> None:
        if any(waiter.outcome == "DeadlineSoon" and not future.done() for future, waiter in self.futures):
            self.advance(YIELD_SECONDS)  # a reservation has begun that ends soon: the others in line hear of it next
        for future, waiter in self.futures:
            assert future.done() == (waiter.outcome != WAITING), waiter
            if waiter.outcome == WAITING:
                continue
            if future.cancelled():
                assert waiter.outcome == "CancelledError"
            elif (error := future.exception(0)) is not None:
                assert type(error).__name__ == waiter.outcome, (error, waiter)
                assert getattr(error, "job_id", 0) == waiter.job_id
            else:
                job = future.result(0)
                assert (job.id, job.body) == (waiter.outcome, waiter.body)
        self.futures = [each for each in self.futures if each[1].outcome == WAITING]

    def compare_figures(self) -> None:
        stats, model = self.queue.stats(), self.model
        for state in ("urgent", *STATES):
            assert getattr(stats, state) == model.count(state), state
        figures = (stats.total_jobs, stats.timeouts, stats.last_id, stats.bytes, stats.draining)
        assert figures == (model.total_jobs, model.timeouts, model.last_id, model.bytes(), model.draining)
        people = (stats.tubes, stats.sessions, stats.waiting)
        assert people == (len(model.tubes), len(model.sessions), len({id(each.session) for each in model.line}))
        assert abs(stats.uptime - (model.now - self.opened_at)) < CLOSE

    def compare_tubes(self) -> None:
        queue, model = self.queue, self.model
        assert queue.tubes() == list(model.tubes)
        for name, tube in model.tubes.items():
            stats = queue.stats_tube(name)
            for state in ("urgent", *STATES):
                assert getattr(stats, state) == model.count(state, name), (name, state)
            waiting = {id(each.session) for each in model.line if name in each.tubes}
            people = (stats.using, stats.watching, stats.waiting)
            using = sum(session.used == name for session in model.sessions)
            watching = sum(name in session.watching for session in model.sessions)
            assert (stats.name, *people) == (name, using, watching, len(waiting))
            counts = (stats.total_jobs, stats.deletes, stats.pauses)
            assert counts == (tube.total_jobs, tube.deletes, tube.pauses), name
            left = tube.paused_until - model.now if tube.paused_until else 0
            assert abs(stats.pause - tube.pause) < CLOSE
            assert abs(stats.pause_left - left) < CLOSE
            self.compare_lists(name)

    def compare_lists(self, name: str) -> None:
        queue, model = self.queue, self.model
        listed = [stats.id for stats in queue.jobs(name)]
        assert sorted(listed) == sorted(job.id for job in model.jobs.values() if job.tube == name)
        for state in STATES:
            there = [job.id for job in model.in_state(name, state)]
            assert sorted(stats.id for stats in queue.jobs(name, state)) == sorted(there)
        firsts: dict[int, int] = {}
        for job in self.model.in_state(name, "ready"):
            firsts.setdefault(job.priority, job.id)
        assert [job.id for job in queue.peek_priorities(name)] == list(firsts.values())
        for state in ("ready", "delayed", "buried"):
            peek = getattr(queue, f"peek_{state}")
            got = self.both(partial(peek, name), partial(model.peek, name, state))
            if got is not None:
                self.same_jobs([got[0]], [got[1]])
        for key in "kl":
            got = self.both(partial(queue.peek_key, key, name), partial(model.peek_key, key, name))
            if got is not None:
                self.same_jobs([got[0]], [got[1]])

    def compare_job(self, job: ModelJob, stats: JobStats) -> None:
        facts = (stats.id, stats.tube, stats.state, stats.priority, stats.ttr, stats.key, stats.body_bytes)
        assert facts == (job.id, job.tube, job.state, job.priority, job.ttr, job.key, len(job.body))
        assert stats.body == job.body
        counts = (stats.reserves, stats.timeouts, stats.releases, stats.buries, stats.kicks)
        assert counts == (job.reserves, job.timeouts, job.releases, job.buries, job.kicks), job
        assert abs(stats.delay - job.delay) < CLOSE
        assert abs(stats.age - (self.model.now - job.made)) < CLOSE
        assert abs(stats.time_left - job.time_left(self.model.now)) < CLOSE
        self.same_job(self.queue.peek(job.id), job)

    def vanish(self) -> None:
        """At the end of a run."""
        vanish(self.queue, self.disk)


@contextmanager
def no_room(disk: CrashingDisk, block: int = 1) -> Iterator[None]:
    """A full disk: no file grows, whether it is asked to or written beyond its end, or that of its last block of so
    many bytes. Names are found room for.
    """

    def refuse() -> None:
        kind, name = disk.next_operation
        node, offset, data = disk._in_flight or (None, 0, b"")
        room = 0 if node is None else -(-node.size // block) * block
        if kind == "grow" or (kind == "write" and offset + len(data) > room):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    before, disk.before_operation = disk.before_operation, refuse
    try:
        yield
    finally:
        disk.before_operation = before


def vanish(queue: WorkQueue, disk: MemoryDisk) -> None:
    """The death of its process: no call is made, nothing is written."""
    disk.kill()
    abandon(queue)


def abandon(queue: WorkQueue) -> None:
    opened.discard(queue)
    if not queue.closed:
        forget(queue)
        queue._abandon()


def abandon_all() -> None:
    """Let go of every queue that a broken promise has left open."""
    for queue in list(opened):
        abandon(queue)
