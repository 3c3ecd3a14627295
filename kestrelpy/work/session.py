"""``Session``: what one connection is to beanstalkd. It watches tubes, and reserves jobs."""

from __future__ import annotations

from concurrent.futures import Future
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING

from kestrelpy import KestrelError, QueueClosed, QueueEmpty
from kestrelpy._process import why_not_wait
from kestrelpy.work.core import MUCH, LeftTubes, WorkCore
from kestrelpy.work.errors import DeadlineSoon, JobNotFound, NotReserved
from kestrelpy.work.job import Job, delete_by, mark_ended, unreserve
from kestrelpy.work.options import PLAIN, check_timeout
from kestrelpy.work.records import READY, RESERVED
from kestrelpy.work.scheduler import NEVER
from kestrelpy.work.stored import SessionState, check_open
from kestrelpy.work.waiting import Awaiting, Blocked, Promised

if TYPE_CHECKING:
    from kestrelpy.work.stored import JobWaiter, StoredJob, Tube

__all__ = ["Session"]

_STEP = 1000
"""How many jobs ``reserve_many`` takes in one go."""


class Session(SessionState):
    """Watches tubes and reserves jobs. Made by ``WorkQueue.session()``; a context manager; thread-safe.

    It begins with watching and using ``default``. What it has reserved is its own until it is deleted, released or
    buried, the time to run is over, or the session is closed. Its calls raise what those of its ``WorkQueue`` raise,
    and ``QueueClosed`` once the session is closed.
    """

    def __init__(self, core: WorkCore, tube: Tube, *, deadline_soon: bool) -> None:
        super().__init__(core.next_number(), deadline_soon=deadline_soon)
        self._core = core
        self.using = tube
        self.watched = {tube.name: tube}
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
        """Keep this tube in being, and be counted as one who uses it, instead of the one before. ``InvalidName``,
        ``QueueFull``.
        """
        with self._core.news, self._core.lock, self._core.turn:
            check_open(self)
            found = self._core.tube_locked(tube)
            left, self.using = self.using, found
            found.using += 1
            assert left is not None
            left.using -= 1
            self._core.scheduler.forget_unneeded(left)

    def watch(self, tube: str) -> int:
        """Reserve from this tube too; how many are watched then. For reserves that begin after it.

        Raises ``InvalidName``, ``QueueFull``. Each reserve looks at every tube that is watched.
        """
        with self._core.news, self._core.lock, self._core.turn:
            check_open(self)
            if tube not in self.watched:
                found = self._core.tube_locked(tube)
                self.watched[tube] = found
                found.watching += 1
            return len(self.watched)

    def ignore(self, tube: str) -> int:
        """Watch it no longer; how many are watched then. ``ValueError`` for the last one; others may not be watched."""
        with self._core.news, self._core.lock, self._core.turn:
            check_open(self)
            if tube in self.watched:
                if len(self.watched) == 1:
                    raise self._core.refusal_locked("a session watches at least one tube")
                left = self.watched.pop(tube)
                left.watching -= 1
                self._core.scheduler.forget_unneeded(left)
            return len(self.watched)

    # -- reserving ---------------------------------------------------------------------------------------------------

    def reserve(self, timeout: float | None = None) -> Job:
        """The most urgent job that is ready in the tubes watched: smallest priority, then smallest id.

        Waits for one, first come first served; ``timeout`` in seconds, ``None``: for ever, 0: not at all. Raises
        ``QueueEmpty`` if none came, ``DeadlineSoon`` if one that this session has reserved is about to be taken from
        it and nothing is ready, ``QueueClosed``; ``ValueError`` for what is no timeout.
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
            del found  # else the error and this frame would hold each other

    def reserve_many(self, n: int, timeout: float | None = None) -> list[Job]:
        """Up to ``n`` jobs: waits for the first as ``reserve`` does, then takes what is ready. Raises as that."""
        n = index(n)
        if n < 1:
            raise ValueError(f"n must be at least 1, not {n!r}")
        jobs = [self.reserve(timeout)]
        core = self._core
        some = 1
        while some and len(jobs) < n:
            with core.news, core.lock, core.turn as now:
                some = self._take_locked(jobs, min(_STEP, n - len(jobs)), now)
            if some == _STEP:
                core.yield_lock()
        return jobs

    def _take_locked(self, jobs: list[Job], count: int, now: float) -> int:
        """Add up to so many that are ready; how many there were."""
        taken = 0
        while taken < count and (stored := self._core.scheduler.take(self, now)) is not None:
            jobs.append(Job(self._core, self, stored))
            taken += 1
        return taken

    def reserve_job(self, job_id: int) -> Job:
        """This job, if it is ready, delayed or buried; of any tube. It is ready if the session gives it back.

        Raises ``JobNotFound``, ``NotReserved`` if some session has it, ``QueueDiskFull``.
        """
        core = self._core
        with core.news, core.lock, core.turn as now:
            check_open(self)
            stored = core.find_locked(job_id, now)
            if stored.state == RESERVED:
                raise NotReserved(job_id)
            if stored.state != READY:  # else it would be what it was, if the process died now
                core.write_state_locked(stored, core.as_ready(stored, now))
            is_written = stored.state != READY
            core.scheduler.take_out(stored)
            core.scheduler.reserve(stored, self, now)
            job = Job(core, self, stored)
        if is_written and core.always:
            core.sync()
        return job

    def reserve_future(self, timeout: float | None = None) -> Future[Job]:
        """``reserve`` that never blocks: a future, done at once if a job is ready.

        ``cancel()`` leaves the line; no job is lost by it. The timeout follows the queue's clock. Raises ``ValueError``
        for what is no timeout; all else is told by the future.
        """
        timeout = check_timeout(timeout)
        core = self._core
        with core.news, core.lock, core.turn as now:
            stored = core.scheduler.take(self, now)
            found = Job(core, self, stored) if stored is not None else self._line_up_locked(timeout, now, Promised)
        if found is None:
            found = self._try_again(timeout, Promised)
        if isinstance(found, Promised):
            return found.future
        waiter = Promised(self, 0)
        waiter.notify(found)
        return waiter.future

    async def areserve(self, timeout: float | None = None) -> Job:
        """``reserve`` for asyncio, from any event loop. Cancelled, it leaves the line, and no job is lost by it, nor by
        the end of a loop whose tasks wait.
        """
        from asyncio import CancelledError  # here and not above: who does not use it must not pay for it

        timeout = check_timeout(timeout)
        core = self._core
        with core.news, core.lock, core.turn as now:
            stored = core.scheduler.take(self, now)
            found = Job(core, self, stored) if stored is not None else self._line_up_locked(timeout, now, Awaiting)
        if found is None:
            found = self._try_again(timeout, Awaiting)
        if isinstance(found, Job):
            return found
        if isinstance(found, Awaiting):
            try:
                return (await found.future).take()
            except GeneratorExit:  # the task was thrown away, perhaps by the garbage collector: no lock may be taken
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
            del found  # else the error and this frame would hold each other

    def _try_again(
        self, timeout: float | None, kind: type[Blocked | Promised | Awaiting]
    ) -> Job | JobWaiter | Exception:
        """Very many expired jobs are in front of what is ready: on, a slice at a time."""
        core = self._core
        found: Job | JobWaiter | Exception | None = None
        while found is None:
            if kind is Blocked:
                core.yield_lock()
            with core.news, core.lock, core.turn as now:
                stored = core.scheduler.take(self, now)
                found = Job(core, self, stored) if stored is not None else self._line_up_locked(timeout, now, kind)
        return found

    def _line_up_locked(
        self, timeout: float | None, now: float, kind: type[Blocked | Promised | Awaiting]
    ) -> JobWaiter | Exception | None:
        """No job is ready: a place in the line, or why there is none; ``None`` if it is not known yet that none is.
        A thread waits in real time, as a get does.
        """
        check_open(self)
        scheduler = self._core.scheduler
        if scheduler.is_behind:
            scheduler.is_behind = False
            return None
        soon = scheduler.deadline_soon(self, now)
        if soon is not None or timeout == 0:
            return QueueEmpty("no job is ready") if soon is None else DeadlineSoon(soon)
        ending = why_not_wait()
        if ending is not None:
            return ending
        waiter = kind(self, self._core.next_number())
        scheduler.enter_line(waiter, NEVER if timeout is None or kind is Blocked else now + timeout)
        return waiter

    def _wait(self, waiter: Blocked, timeout: float | None) -> Job | Exception:
        try:
            waiter.wait(timeout)
        except BaseException:
            outcome = self._leave(waiter)
            if isinstance(outcome, Job):
                unreserve(outcome)
            raise
        return self._leave(waiter) or QueueEmpty("no job was ready in time")

    def _leave(self, waiter: Blocked) -> Job | Exception | None:
        """Out of the line; what it was told, or was to be told."""
        scheduler = self._core.scheduler
        with self._core.lock:
            scheduler.leave_line(waiter)
            found: Job | Exception | None = scheduler.completions.pop(waiter, None)
        return waiter.outcome or found

    def abandon(self, waiter: JobWaiter) -> None:
        """It waits no longer."""
        with self._core.lock:
            self._core.scheduler.leave_line(waiter)

    def __del__(self) -> None:
        """Nobody has it, and it has reserved nothing. As the garbage collector may be at it, others do the rest."""
        if not getattr(self, "closed", True):
            assert self.using is not None
            self._core.leave_note(LeftTubes(self.watched, self.using))

    def handle(self, job: StoredJob) -> Job:
        return Job(self._core, self, job)

    # -- by id -------------------------------------------------------------------------------------------------------

    def delete(self, job_id: int) -> None:
        """Delete a job that this session has reserved, or that nobody has. Raises ``JobNotFound``, ``NotReserved``."""
        held = self.held.get(job_id)
        delete_by(self._core, self, job_id)
        if held is not None:
            self._notify_block(held.id, held.reserves)

    def release(self, job_id: int, priority: int | None = None, delay: float = 0) -> bool:
        """``Job.release``. Raises ``NotReserved``, ``JobNotFound``."""
        job = self._held(job_id)
        was_released = job.release(priority, delay)
        self._notify_block(job.id, job.reserves)
        return was_released

    def bury(self, job_id: int, priority: int | None = None) -> None:
        """``Job.bury``. Raises ``NotReserved``, ``JobNotFound``."""
        job = self._held(job_id)
        job.bury(priority)
        self._notify_block(job.id, job.reserves)

    def touch(self, job_id: int) -> None:
        """``Job.touch``. Raises ``NotReserved``, ``JobNotFound``."""
        self._held(job_id).touch()

    def _notify_block(self, job_id: int, reserves: int) -> None:
        """This reservation has ended as its session wanted: the ``with`` that it may have has nothing to do."""
        block = self.blocks.get((job_id, reserves))
        if block is not None:
            mark_ended(block)

    def _held(self, job_id: int) -> Job:
        with self._core.news, self._core.lock, self._core.turn:
            check_open(self)
            stored = self.held.get(job_id)
            if stored is None:
                raise NotReserved(job_id) if job_id in self._core.scheduler.jobs else JobNotFound(job_id)
            return Job(self._core, self, stored)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give its jobs back, leave every line; whoever waits in it gets ``QueueClosed``. Idempotent."""
        if self.closed:
            return
        core = self._core
        try:
            more = True
            while more:  # in slices; others come in between
                with core.unheard(), core.news, core.lock, core.turn as now:
                    more = self._close_some_locked(now)
        except KestrelError:  # the queue is closed, and all of its sessions with it
            self.closed = True

    def _close_some_locked(self, now: float) -> bool:
        """Whether there is more to do."""
        scheduler, sessions = self._core.scheduler, self._core.sessions
        self.closed = True
        for waiter in [each for each, _ in zip(self.waiters, range(MUCH), strict=False)]:
            scheduler.fail(waiter, QueueClosed("this session was closed"))
        if self.waiters:
            return True
        if self in sessions:
            sessions.discard(self)
            assert self.using is not None
            self.using.using -= 1
            scheduler.forget_unneeded(self.using)
            scheduler.leave_behind(self, now)
            scheduler.advance(now, MUCH)
        for _ in range(min(MUCH, len(self.watched))):
            _, tube = self.watched.popitem()
            tube.watching -= 1
            scheduler.forget_unneeded(tube)
        return bool(self.watched)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<Session watching {', '.join(self.watched)}: {len(self.held)} reserved{state}>"
