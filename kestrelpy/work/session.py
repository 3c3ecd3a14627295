"""``Session``: a consumer that watches tubes and reserves jobs, like one connection to beanstalkd."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from itertools import islice
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Generic

from sortedcontainers import SortedList

from kestrelpy import KestrelError, QueueEmpty
from kestrelpy._process import warn_unclosed, why_not_wait
from kestrelpy._tasks import ClosesInTask
from kestrelpy.item import V
from kestrelpy.work.core import TIMER_SLICE, WorkCore
from kestrelpy.work.errors import DeadlineSoon, JobNotFound, NotReserved
from kestrelpy.work.in_task import acknowledged
from kestrelpy.work.job import (
    Job,
    bury_unsynced,
    delete_by,
    delete_many,
    delete_unsynced,
    mark_ended,
    release_unsynced,
    unreserve,
)
from kestrelpy.work.options import PLAIN, check_timeout
from kestrelpy.work.records import READY, RESERVED
from kestrelpy.work.scheduler import NEVER
from kestrelpy.work.stored import LeftTubes, check_open
from kestrelpy.work.waiting import Awaiting, Blocked, Promised

if TYPE_CHECKING:
    from kestrelpy.work.stored import JobWaiter, SessionState, StoredJob, Tube

__all__ = ["Session"]

_STEP = 1000
"""How many jobs ``reserve_many`` takes in one go, with the lock held."""
_SHOWN = 3
"""How many tubes an error names."""
_MANY = 64
"""A session with more reservations than this keeps their ends sorted, instead of searching for the first one."""


class Session(ClosesInTask, Generic[V]):
    """Watches tubes and reserves jobs. Made by ``WorkQueue.session()``; a context manager, also of asyncio;
    thread-safe.

    A new session watches and uses ``default``; ``WorkQueue.session("images")`` watches that tube instead. A job that it
    has reserved (a lease) is its own until the job is deleted, released or buried, the job's time to run is over, or
    the session is closed. Its calls raise what the calls of its ``WorkQueue`` raise, and ``QueueClosed`` once the
    session is closed.
    """

    def __init__(self, core: WorkCore, tube: Tube, *, deadline_soon: bool) -> None:
        self._core = core
        self._deadlines: SortedList[tuple[float, int]] | None = None  # of all jobs held, if they are many
        # What the scheduler knows of a session: see ``SessionState``.
        self.number = core.next_number()
        self.closed = False
        self.deadline_soon = deadline_soon
        self.blocks: dict[tuple[int, int], Job[V]] = {}
        self.wakes: tuple[float, int, SessionState] | None = None
        self.held: dict[int, StoredJob] = {}
        self.waiters: OrderedDict[JobWaiter, None] = OrderedDict()
        self.using: Tube | None = tube
        self.watched = {tube.name: tube}
        self.left: dict[str, Tube] = {}
        tube.using += 1
        tube.watching += 1

    # -- tubes -------------------------------------------------------------------------------------------------------

    @property
    def used(self) -> str:
        """The tube that it uses."""
        assert self.using is not None
        return self.using.name

    @property
    def watching(self) -> tuple[str, ...]:
        """The tubes that it watches, in the order of watching."""
        return tuple(self.watched)

    @property
    def reserved(self) -> tuple[int, ...]:
        """The ids of the jobs that it has reserved."""
        with self._core.lock:
            return tuple(self.held)

    def use(self, tube: str) -> None:
        """Use this tube instead of the one before. The tube exists as long as a session uses it, and counts its users.

        Raises ``InvalidName``, ``QueueFull``.
        """
        with self._core.deliveries, self._core.lock, self._core.turn:
            check_open(self)
            found = self._core.tube_locked(tube)
            left, self.using = self.using, found
            found.using += 1
            assert left is not None
            left.using -= 1
            self._core.scheduler.forget_unneeded(left)

    def watch(self, tube: str) -> int:
        """Watch this tube too: later reserves take jobs from it. Returns how many tubes are watched.

        Raises ``InvalidName``, ``QueueFull``. Each reserve looks at every tube that is watched.
        """
        with self._core.deliveries, self._core.lock, self._core.turn:
            check_open(self)
            if tube not in self.watched:
                found = self._core.tube_locked(tube)
                self.watched[tube] = found
                found.watching += 1
            return len(self.watched)

    def ignore(self, tube: str) -> int:
        """Stop watching this tube, if it is watched. Returns how many are watched. ``ValueError`` for the last one."""
        with self._core.deliveries, self._core.lock, self._core.turn:
            check_open(self)
            if tube in self.watched:
                if len(self.watched) == 1:
                    raise self._core.refusal_locked("a session must watch at least one tube")
                left = self.watched.pop(tube)
                left.watching -= 1
                self._core.scheduler.forget_unneeded(left)
            return len(self.watched)

    # -- reserving ---------------------------------------------------------------------------------------------------

    def reserve(self, timeout: float | None = None) -> Job[V]:
        """Reserve the most urgent ready job of the watched tubes: smallest priority, then smallest id.

        If no job is ready, it waits, first come first served: ``timeout`` seconds, ``None`` for ever, 0 not at all.
        Raises ``QueueEmpty`` if no job came in time; ``DeadlineSoon`` if no job is ready, and a reservation of this
        session is about to end; ``QueueClosed``; ``ValueError`` for a bad timeout.
        """
        if timeout is not None and (type(timeout) not in PLAIN or not timeout >= 0):
            timeout = check_timeout(timeout)
        core = self._core
        scheduler = core.scheduler
        with core.lock:
            try:  # HOT COPY of Turn
                now = core.clock.monotonic()
                if now >= scheduler.next_due or core.must_check:
                    now = core.begin_locked()
                stored = scheduler.take(self, now)
                found: object
                found = Job(core, self, stored) if stored is not None else self._line_up_locked(timeout, now, Blocked)
            except BaseException as error:
                core.note(error)
                raise
            if scheduler.next_due < core.armed_at or scheduler.expired or core.must_check:
                core.end_locked()
            if not core.compactor.is_armed:
                core.compactor.arm(core.interval)
        if scheduler.completions:
            core.notify()
        if isinstance(found, Job):
            return found
        if found is None:
            found = self._try_again(timeout, Blocked)
        if isinstance(found, Blocked):
            found = self._wait(found, timeout)
        if isinstance(found, Job):
            return found
        try:
            assert isinstance(found, Exception)
            raise found
        finally:
            del found  # otherwise the error and this frame would keep each other alive

    def reserve_many(self, n: int, timeout: float | None = None) -> list[Job[V]]:
        """Reserve up to ``n`` jobs: waits for the first up to ``timeout`` seconds (``None``: for ever), then takes what
        is ready. Raises as ``reserve``, and ``ValueError`` for less than one job.
        """
        n = index(n)
        if n < 1:
            raise ValueError(f"n must be at least 1, not {n!r}")
        jobs = [self.reserve(timeout)]
        core = self._core
        some = 1
        while some and len(jobs) < n:
            with core.deliveries, core.lock, core.turn as now:
                some = self._take_locked(jobs, min(_STEP, n - len(jobs)), now)
            if some == _STEP:
                core.yield_lock()
        return jobs

    def _take_locked(self, jobs: list[Job[V]], count: int, now: float) -> int:
        """Reserve up to ``count`` ready jobs into ``jobs``; returns how many."""
        taken = 0
        while taken < count and (stored := self._core.scheduler.take(self, now)) is not None:
            jobs.append(Job(self._core, self, stored))
            taken += 1
        return taken

    def reserve_job(self, job_id: int) -> Job[V]:
        """Reserve this job, of any tube, if it is ready, delayed or buried. If its session closes, the job is ready.

        Raises ``JobNotFound``, ``NotReserved`` if some session has reserved it, ``QueueDiskFull``.
        """
        core = self._core
        with core.deliveries, core.lock, core.turn as now:
            check_open(self)
            stored = core.find_locked(job_id, now)
            if stored.state == RESERVED:
                raise NotReserved(job_id)
            if stored.state != READY:  # else it would be delayed or buried again, if the process died now
                core.write_state_locked(stored, core.as_ready(stored, now))
            is_written = stored.state != READY
            core.scheduler.take_out(stored)
            core.scheduler.reserve(stored, self, now)
            job = Job(core, self, stored)
        if is_written and core.always:
            core.sync()
        return job

    def reserve_future(self, timeout: float | None = None) -> Future[Job[V]]:
        """``reserve`` as a future: it never blocks, and the future is done at once if a job is ready.

        ``cancel()`` leaves the line and loses no job. The timeout follows the queue's clock. Raises ``ValueError`` for
        a bad timeout; the future has every other error.
        """
        timeout = check_timeout(timeout)
        core = self._core
        with core.deliveries, core.lock, core.turn as now:
            stored = core.scheduler.take(self, now)
            found = Job(core, self, stored) if stored is not None else self._line_up_locked(timeout, now, Promised)
        if found is None:
            found = self._try_again(timeout, Promised)
        if isinstance(found, Promised):
            return found.future
        waiter = Promised(self, 0)
        waiter.notify(found)
        return waiter.future

    async def areserve(self, timeout: float | None = None) -> Job[V]:
        """``reserve`` for asyncio, from any event loop: waits up to ``timeout`` seconds (``None``: for ever). A
        cancelled task leaves the line and loses no job, and neither does a loop that is closed while its tasks wait.
        """
        from asyncio import CancelledError  # imported here: callers who do not use asyncio must not pay for it

        timeout = check_timeout(timeout)
        core = self._core
        with core.deliveries, core.lock, core.turn as now:
            stored = core.scheduler.take(self, now)
            found = Job(core, self, stored) if stored is not None else self._line_up_locked(timeout, now, Awaiting)
        if found is None:
            found = self._try_again(timeout, Awaiting)
        if isinstance(found, Job):
            return found
        if isinstance(found, Awaiting):
            try:
                return (await found.future).take()
            except GeneratorExit:  # the task was dropped, perhaps by the garbage collector: take no lock
                core.leave_note(found)
                raise
            except CancelledError:
                self.abandon(found)
                found.give_back()
                raise
        try:
            assert isinstance(found, Exception)
            raise found
        finally:
            del found  # otherwise the error and this frame would keep each other alive

    def _try_again(
        self, timeout: float | None, kind: type[Blocked | Promised | Awaiting]
    ) -> Job[V] | JobWaiter | Exception:
        """Go on after ``_line_up_locked`` gave ``None``: drop the many expired jobs in front, a slice at a time."""
        core = self._core
        found: Job[V] | JobWaiter | Exception | None = None
        while found is None:
            if kind is Blocked:
                core.yield_lock()
            with core.deliveries, core.lock, core.turn as now:
                stored = core.scheduler.take(self, now)
                found = Job(core, self, stored) if stored is not None else self._line_up_locked(timeout, now, kind)
        return found

    def _line_up_locked(
        self, timeout: float | None, now: float, kind: type[Blocked | Promised | Awaiting]
    ) -> JobWaiter | Exception | None:
        """``take`` found no job: a new waiter in the line, or the error that says why not. ``None`` if ``take`` stopped
        early (``stopped_early``), so that a job may be ready. A thread waits in real time, as a get does.
        """
        check_open(self)
        scheduler = self._core.scheduler
        if scheduler.stopped_early:
            scheduler.stopped_early = False
            return None
        soon = scheduler.deadline_soon(self, now)
        if soon is not None or timeout == 0:
            return self.nothing_ready() if soon is None else DeadlineSoon(soon)
        ending = why_not_wait()
        if ending is not None:
            return ending
        waiter = kind(self, self._core.next_number())
        scheduler.enter_line(waiter, NEVER if timeout is None or kind is Blocked else now + timeout)
        return waiter

    def _wait(self, waiter: Blocked, timeout: float | None) -> Job[V] | Exception:
        try:
            waiter.wait(timeout)
        except BaseException:
            outcome = self._leave(waiter)
            if isinstance(outcome, Job):
                unreserve(outcome)
            raise
        return self._leave(waiter) or self.nothing_ready()

    def _leave(self, waiter: Blocked) -> Job[V] | Exception | None:
        """Leave the line; returns the outcome that the waiter was given, or was about to be given."""
        scheduler = self._core.scheduler
        with self._core.lock:
            scheduler.leave_line(waiter)
            found: Job[V] | Exception | None = scheduler.completions.pop(waiter, None)
        return waiter.outcome or found

    def abandon(self, waiter: JobWaiter) -> None:
        """Take the waiter out of the line."""
        with self._core.lock:
            self._core.scheduler.leave_line(waiter)

    def __del__(self) -> None:
        """Nobody has the session, and it has reserved nothing. The garbage collector may run this at any point: so the
        next call does the rest.
        """
        if not getattr(self, "closed", True):
            assert self.using is not None
            self._core.leave_note(LeftTubes(self.watched, self.using))
            if self._core.journal is not None and self._core.state is None:
                warn_unclosed(self)

    @property
    def _what(self) -> str:
        queue = None if self._core.journal is None else self._core.journal.queue
        return f"Session of WorkQueue {self._core.name!r} in {'memory' if queue is None else queue.directory}"

    # -- for the scheduler, with the lock held -----------------------------------------------------------------------

    def hold(self, job: StoredJob) -> None:
        self.held[job.id] = job
        if self._deadlines is not None:
            self._deadlines.add(job.sort_key)

    def drop(self, job: StoredJob) -> None:
        if self.held.pop(job.id, None) is not None and self._deadlines is not None:
            self._deadlines.discard(job.sort_key)
            if not self._deadlines:
                self._deadlines = None

    def soonest(self) -> tuple[float, int] | None:
        if self._deadlines is None and len(self.held) > _MANY:
            self._deadlines = SortedList(job.sort_key for job in self.held.values())
        if self._deadlines is not None:
            return self._deadlines[0]
        return min(((job.due, job.id) for job in self.held.values()), default=None)

    def handle(self, job: StoredJob) -> Job[V]:
        return Job(self._core, self, job)

    def reset_held(self, jobs: Iterable[StoredJob]) -> None:
        self.held = {job.id: job for job in jobs}
        self._deadlines = None

    def nothing_ready(self) -> QueueEmpty:
        tubes = [*islice(self.watched, _SHOWN), *["..."] * (len(self.watched) > _SHOWN)]
        return QueueEmpty(f"work queue {self._core.name}: no job was ready in time (watched: {', '.join(tubes)})")

    def finish(self) -> None:
        self._core.sessions.discard(self)

    def delete_many(self, jobs: Iterable[Job[V]]) -> list[Job[V]]:
        """Acknowledge jobs that this session has reserved, in one step: all of them are gone for good, or none, also
        across a crash. Returns those that are not deleted, because their reservation is over, or is not this session's.

        Costs about half of as many ``Job.delete``, and one sync with ``sync="always"``. On a full disk the jobs are
        deleted one after the other, as each of them needs no new room; that is not one step.
        """
        given = list(jobs)
        for job in given:
            if not isinstance(job, Job):
                raise TypeError(f"delete_many takes the jobs that reserve_many returns, not {job!r}")
        return delete_many(self._core, self, given)

    # -- by id -------------------------------------------------------------------------------------------------------

    def delete(self, job_id: int) -> None:
        """Delete a job that this session, or no session, has reserved. Raises ``JobNotFound``, ``NotReserved``."""
        held = self.held.get(job_id)
        delete_by(self._core, self, job_id)
        if held is not None:
            self._notify_block(held.id, held.reserves)

    def release(
        self,
        job_id: int,
        priority: int | None = None,
        delay: float | None = None,
        *,
        body: V | bytearray | memoryview | None = None,
    ) -> bool:
        """Give a reserved job back, ready in ``delay`` seconds (``None``: as ``retry_delay`` of the queue says), with a
        new ``priority`` and ``body`` if they are given. False if it was buried instead: its attempts have reached
        ``max_attempts``. Raises ``NotReserved``, ``JobNotFound``, ``JobTooBig``, ``QueueFull``, ``ValueError``.
        """
        job = self._held(job_id)
        was_released = job.release(priority, delay, body=body)
        self._notify_block(job.id, job.reserves)
        return was_released

    def bury(self, job_id: int, priority: int | None = None, *, body: V | bytearray | memoryview | None = None) -> None:
        """Set a reserved job aside until it is kicked, like a dead letter, with a new ``priority`` and ``body`` if they
        are given. Raises ``NotReserved``, ``JobNotFound``, ``JobTooBig``, ``QueueFull``, ``ValueError``.
        """
        job = self._held(job_id)
        job.bury(priority, body=body)
        self._notify_block(job.id, job.reserves)

    async def adelete(self, job_id: int) -> None:
        """``delete`` for asyncio: the event loop goes on while this waits for the disk. A task that is cancelled while
        it waits has deleted the job. Raises as ``delete``.
        """
        held = self.held.get(job_id)
        delete_unsynced(self._core, self, job_id)
        if held is not None:
            self._notify_block(held.id, held.reserves)
        await acknowledged(self._core)

    async def arelease(
        self,
        job_id: int,
        priority: int | None = None,
        delay: float | None = None,
        *,
        body: V | bytearray | memoryview | None = None,
    ) -> bool:
        """``Job.arelease`` with its ``priority``, ``delay`` and ``body``. Raises ``NotReserved``, ``JobNotFound``."""
        job = self._held(job_id)
        was_released = release_unsynced(job, priority, delay, body)
        self._notify_block(job.id, job.reserves)
        await acknowledged(self._core)
        return was_released

    async def abury(
        self, job_id: int, priority: int | None = None, *, body: V | bytearray | memoryview | None = None
    ) -> None:
        """``Job.abury`` with its ``priority`` and ``body``. Raises ``NotReserved``, ``JobNotFound``."""
        job = self._held(job_id)
        bury_unsynced(job, priority, body)
        self._notify_block(job.id, job.reserves)
        await acknowledged(self._core)

    def touch(self, job_id: int) -> None:
        """Begin the time to run of a reserved job again. Raises ``NotReserved``, ``JobNotFound``."""
        self._held(job_id).touch()

    def _notify_block(self, job_id: int, reserves: int) -> None:
        """The session itself has ended this reservation: a ``with`` block of the job has nothing left to do."""
        block = self.blocks.get((job_id, reserves))
        if block is not None:
            mark_ended(block)

    def _held(self, job_id: int) -> Job[V]:
        with self._core.deliveries, self._core.lock, self._core.turn:
            check_open(self)
            stored = self.held.get(job_id)
            if stored is None:
                raise NotReserved(job_id) if job_id in self._core.scheduler.jobs else JobNotFound(job_id)
            return Job(self._core, self, stored)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the jobs back and leave every line: waiters of this session get ``QueueClosed``. Idempotent.

        If the session has very many jobs, the last of them are given back after this has returned.
        """
        core = self._core
        try:
            while self in core.sessions:  # in slices; other calls run in between
                self._close_some()
        except KestrelError:  # the queue is closed, and so are all of its sessions
            pass
        self._closed()

    async def aclose(self) -> None:
        """``close`` for asyncio: the event loop goes on between slices. ``async with`` ends with it.

        If the task is cancelled meanwhile, the session is closed all the same, as after ``close``.
        """
        from asyncio import sleep

        try:
            while True:  # and no condition: docs/interrupts.md, rule 3
                if self not in self._core.sessions:
                    break
                self._close_some()
                await sleep(0)
        except KestrelError:  # as in close
            pass
        self._closed()

    def _close_some(self) -> None:
        core = self._core
        with core.unreported(), core.deliveries, core.lock, core.turn as now:
            self._close_some_locked(now)

    def _closed(self) -> None:
        self.closed = True
        if self._core.scheduler.completions:  # a close() before this one was interrupted
            self._core.notify()

    def _close_some_locked(self, now: float) -> None:
        """Do a slice of ``close``. Whatever interrupts ``close``, the queue's timer and its next calls do the rest."""
        scheduler = self._core.scheduler
        if not self.closed:
            self.closed = True
            self.left, self.watched = self.watched, {}  # from here on no reserve finds a job
        if self not in scheduler.leaving:
            scheduler.release_later(self, now)
        scheduler.advance(now, TIMER_SLICE)

    def __enter__(self) -> Session[V]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<Session watching {', '.join(self.watched)}: {len(self.held)} reserved{state}>"
