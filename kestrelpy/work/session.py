"""A session: what one connection is to beanstalkd; and the jobs that it hands out."""

from __future__ import annotations

from concurrent.futures import Future
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING

from kestrelpy import KestrelError, QueueClosed, QueueEmpty
from kestrelpy._process import why_not_wait
from kestrelpy.work._options import PLAIN, check_timeout
from kestrelpy.work._records import READY, RESERVED
from kestrelpy.work._waiting import Awaiting, Blocked, Promised
from kestrelpy.work.errors import DeadlineSoon, JobNotFound, NotReserved
from kestrelpy.work.scheduler import NEVER
from kestrelpy.work.stored import SessionState

if TYPE_CHECKING:
    from kestrelpy.work.queue import WorkQueue
    from kestrelpy.work.stored import JobWaiter, StoredJob, Tube

__all__ = ["Job", "Session"]

_STEP = 1000
"""How many jobs ``reserve_many`` takes in one go."""


class Job:
    """A job as it was when it was reserved, or looked at: ``id``, ``body`` (bytes), ``tube``, ``priority``, ``delay``,
    ``ttr`` (seconds), ``reserves``.

    As a context manager it is deleted at the end of the block, released if the block raises, and left alone if the
    block has done either, or buried it. If the reservation is over by then, because its time to run was, and no call in
    the block has said so, the end of the block raises ``NotReserved``: somebody else does the job, or has done it.
    A block that raises keeps its own error; what goes wrong at its end is logged.

    ``delete``, ``release``, ``bury`` and ``touch`` raise ``NotReserved`` once the reservation is over, also if the same
    session has reserved the job again since; ``JobNotFound`` once it is gone.
    """

    __slots__ = ("_live", "_queue", "_session", "_told", "body", "delay", "id", "priority", "reserves", "ttr", "tube")

    def __init__(self, queue: WorkQueue, session: Session | None, live: StoredJob) -> None:
        self._queue = queue
        self._session = session
        self._live = live
        self._told = False  # the user has said what is to become of it, or was told that the reservation is over
        self.id = live.id
        self.body = live.body
        self.tube = live.tube.name
        self.priority = live.priority
        self.delay = live.delay
        self.ttr = live.ttr
        self.reserves = live.reserves

    def delete(self) -> None:
        """Done with it: it is gone for good. Of one that was only looked at, as ``WorkQueue.delete``."""
        self._told = True
        if self._session is None:
            self._queue.delete(self.id)
        else:
            self._queue._delete_reserved(self)

    def release(self, priority: int | None = None, delay: float = 0) -> bool:
        """Give it back, ready at once or in ``delay`` seconds. False if it is worn out and was buried instead."""
        self._told = True
        return self._queue._release(self, priority, delay)

    def bury(self, priority: int | None = None) -> None:
        """Set it aside, until it is kicked."""
        self._told = True
        self._queue._bury(self, priority)

    def touch(self) -> None:
        """Its time to run begins again."""
        try:
            self._queue._touch(self)
        except (NotReserved, JobNotFound):
            self._told = True
            raise

    @property
    def time_left(self) -> float:
        """Seconds until the reservation ends, or a delayed one is ready; 0 if neither."""
        return self._queue._time_left(self)

    def _is_held(self) -> bool:
        live, session = self._live, self._session
        return session is not None and live.holder is session and live.reserves == self.reserves

    def _unreserve(self) -> None:
        """Nobody got to see it: back, as if it had not been reserved."""
        self._queue._unreserve(self)

    def __enter__(self) -> Job:
        if self._session is not None:
            self._told = False
            self._session.blocks[self.id, self.reserves] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is None:
            return
        self._session.blocks.pop((self.id, self.reserves), None)
        if self._told and not self._is_held():
            return
        try:
            if kind is None:
                self.delete()
            else:
                self.release()
        except (KestrelError, OSError) as failure:
            if kind is None and isinstance(failure, JobNotFound):
                raise NotReserved(self.id) from None
            if kind is None:
                raise
            from logging import getLogger  # here and not above: mostly there is nothing to say

            getLogger("kestrelpy").warning("%r was not released when its block raised: %s", self, failure)

    def __repr__(self) -> str:
        shown = self.body if len(self.body) <= 32 else self.body[:29] + b"..."
        return f"<Job {self.id} of {self.tube}: {shown!r}, {len(self.body)} bytes>"


class Session(SessionState):
    """Watches tubes and reserves jobs. Made by ``WorkQueue.session()``; a context manager; thread-safe.

    It begins with watching and using ``default``. What it has reserved is its own until it is deleted, released or
    buried, the time to run is over, or the session is closed. Its calls raise what those of its ``WorkQueue`` raise,
    and ``QueueClosed`` once the session is closed.
    """

    def __init__(self, queue: WorkQueue, tube: Tube, *, deadline_soon: bool) -> None:
        super().__init__(queue._next_number(), deadline_soon=deadline_soon)
        self._queue = queue
        self.closed = False
        self.blocks: dict[tuple[int, int], Job] = {}  # by id and number of the reservation: jobs in a ``with``
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
        with self._queue._lock:
            return tuple(self.held)

    def use(self, tube: str) -> None:
        """Keep this tube in being, and be counted as one who uses it, instead of the one before. ``InvalidName``,
        ``QueueFull``.
        """
        with self._queue._news, self._queue._lock, self._queue._turn:
            self._check_open()
            found = self._queue._tube_locked(tube)
            left, self.using = self.using, found
            found.using += 1
            assert left is not None
            left.using -= 1
            self._queue._machine.forget_unneeded(left)

    def watch(self, tube: str) -> int:
        """Reserve from this tube too; how many are watched then. For reserves that begin after it.

        Raises ``InvalidName``, ``QueueFull``. Each reserve looks at every tube that is watched.
        """
        with self._queue._news, self._queue._lock, self._queue._turn:
            self._check_open()
            if tube not in self.watched:
                found = self._queue._tube_locked(tube)
                self.watched[tube] = found
                found.watching += 1
            return len(self.watched)

    def ignore(self, tube: str) -> int:
        """Watch it no longer; how many are watched then. ``ValueError`` for the last one; others may not be watched."""
        with self._queue._news, self._queue._lock, self._queue._turn:
            self._check_open()
            if tube in self.watched:
                if len(self.watched) == 1:
                    raise self._queue._refusal_locked("a session watches at least one tube")
                left = self.watched.pop(tube)
                left.watching -= 1
                self._queue._machine.forget_unneeded(left)
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
        queue = self._queue
        machine = queue._machine
        with queue._lock:  # a turn, written out: this is a hot path
            try:
                now = queue._clock.monotonic()
                if now >= machine.next_due:
                    now = queue._begin_locked()
                live = machine.take(self, now)
                found: object
                found = Job(queue, self, live) if live is not None else self._line_up_locked(timeout, now, Blocked)
            except BaseException as error:
                queue._note(error)
                raise
            if machine.next_due < queue._armed_at or machine.expired:
                queue._end_locked()
            if not queue._settling_soon:
                queue._settle_later(queue._interval)
        if machine.told:
            queue._tell()
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
        queue = self._queue
        some = 1
        while some and len(jobs) < n:
            with queue._news, queue._lock, queue._turn as now:
                some = self._take_locked(jobs, min(_STEP, n - len(jobs)), now)
            if some == _STEP:
                queue._breathe()
        return jobs

    def _take_locked(self, jobs: list[Job], count: int, now: float) -> int:
        """Add up to so many that are ready; how many there were."""
        taken = 0
        while taken < count and (live := self._queue._machine.take(self, now)) is not None:
            jobs.append(Job(self._queue, self, live))
            taken += 1
        return taken

    def reserve_job(self, job_id: int) -> Job:
        """This job, if it is ready, delayed or buried; of any tube. It is ready if the session gives it back.

        Raises ``JobNotFound``, ``NotReserved`` if some session has it, ``QueueDiskFull``.
        """
        queue = self._queue
        with queue._news, queue._lock, queue._turn as now:
            self._check_open()
            live = queue._live_locked(job_id, now)
            if live.state == RESERVED:
                raise NotReserved(job_id)
            if live.state != READY:  # else it would be what it was, if the process died now
                queue._write_state_locked(live, queue._as_ready(live, now))
            is_written = live.state != READY
            queue._machine.take_out(live)
            queue._machine.reserve(live, self, now)
            job = Job(queue, self, live)
        if is_written and queue._always:
            queue.sync()
        return job

    def reserve_future(self, timeout: float | None = None) -> Future[Job]:
        """``reserve`` that never blocks: a future, done at once if a job is ready.

        ``cancel()`` leaves the line; no job is lost by it. The timeout follows the queue's clock. Raises ``ValueError``
        for what is no timeout; all else is told by the future.
        """
        timeout = check_timeout(timeout)
        queue = self._queue
        with queue._news, queue._lock, queue._turn as now:
            live = queue._machine.take(self, now)
            found = Job(queue, self, live) if live is not None else self._line_up_locked(timeout, now, Promised)
        if found is None:
            found = self._try_again(timeout, Promised)
        if isinstance(found, Promised):
            return found.future
        waiter = Promised(self, 0)
        waiter.tell(found)
        return waiter.future

    async def areserve(self, timeout: float | None = None) -> Job:
        """``reserve`` for asyncio, from any event loop. Cancelled, it leaves the line, and no job is lost by it, nor by
        the end of a loop whose tasks wait.
        """
        from asyncio import CancelledError  # here and not above: who does not use it must not pay for it

        timeout = check_timeout(timeout)
        queue = self._queue
        with queue._news, queue._lock, queue._turn as now:
            live = queue._machine.take(self, now)
            found = Job(queue, self, live) if live is not None else self._line_up_locked(timeout, now, Awaiting)
        if found is None:
            found = self._try_again(timeout, Awaiting)
        if isinstance(found, Job):
            return found
        if isinstance(found, Awaiting):
            try:
                return (await found.future).take()
            except GeneratorExit:  # the task was thrown away, perhaps by the garbage collector: no lock may be taken
                queue._leave_note(found)
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
        queue = self._queue
        found: Job | JobWaiter | Exception | None = None
        while found is None:
            if kind is Blocked:
                queue._breathe()
            with queue._news, queue._lock, queue._turn as now:
                live = queue._machine.take(self, now)
                found = Job(queue, self, live) if live is not None else self._line_up_locked(timeout, now, kind)
        return found

    def _line_up_locked(
        self, timeout: float | None, now: float, kind: type[Blocked | Promised | Awaiting]
    ) -> JobWaiter | Exception | None:
        """No job is ready: a place in the line, or why there is none; ``None`` if it is not known yet that none is.
        A thread waits in real time, as a get does.
        """
        self._check_open()
        machine = self._queue._machine
        if machine.is_behind:
            machine.is_behind = False
            return None
        soon = machine.deadline_soon(self, now)
        if soon is not None or timeout == 0:
            return QueueEmpty("no job is ready") if soon is None else DeadlineSoon(soon)
        ending = why_not_wait()
        if ending is not None:
            return ending
        waiter = kind(self, self._queue._next_number())
        machine.enter_line(waiter, NEVER if timeout is None or kind is Blocked else now + timeout)
        return waiter

    def _wait(self, waiter: Blocked, timeout: float | None) -> Job | Exception:
        try:
            waiter.wait(timeout)
        except BaseException:
            outcome = self._leave(waiter)
            if isinstance(outcome, Job):
                outcome._unreserve()
            raise
        return self._leave(waiter) or QueueEmpty("no job was ready in time")

    def _leave(self, waiter: Blocked) -> Job | Exception | None:
        """Out of the line; what it was told, or was to be told."""
        machine = self._queue._machine
        with self._queue._lock:
            machine.leave_line(waiter)
            told: Job | Exception | None = machine.told.pop(waiter, None)
        return waiter.outcome or told

    def abandon(self, waiter: JobWaiter) -> None:
        """It waits no longer."""
        with self._queue._lock:
            self._queue._machine.leave_line(waiter)

    def __del__(self) -> None:
        """Nobody has it, and it has reserved nothing. As the garbage collector may be at it, others do the rest."""
        if not getattr(self, "closed", True):
            assert self.using is not None
            self._queue._leave_note((self.watched, self.using))

    def handle(self, job: StoredJob) -> Job:
        return Job(self._queue, self, job)

    # -- by id -------------------------------------------------------------------------------------------------------

    def delete(self, job_id: int) -> None:
        """Delete a job that this session has reserved, or that nobody has. Raises ``JobNotFound``, ``NotReserved``."""
        held = self.held.get(job_id)
        self._queue._delete_by(self, job_id)
        if held is not None:
            self._tell_block(held.id, held.reserves)

    def release(self, job_id: int, priority: int | None = None, delay: float = 0) -> bool:
        """``Job.release``. Raises ``NotReserved``, ``JobNotFound``."""
        job = self._held(job_id)
        was_released = job.release(priority, delay)
        self._tell_block(job.id, job.reserves)
        return was_released

    def bury(self, job_id: int, priority: int | None = None) -> None:
        """``Job.bury``. Raises ``NotReserved``, ``JobNotFound``."""
        job = self._held(job_id)
        job.bury(priority)
        self._tell_block(job.id, job.reserves)

    def touch(self, job_id: int) -> None:
        """``Job.touch``. Raises ``NotReserved``, ``JobNotFound``."""
        self._held(job_id).touch()

    def _tell_block(self, job_id: int, reserves: int) -> None:
        """This reservation has ended as its session wanted: the ``with`` that it may have has nothing to do."""
        block = self.blocks.get((job_id, reserves))
        if block is not None:
            block._told = True

    def _held(self, job_id: int) -> Job:
        with self._queue._news, self._queue._lock, self._queue._turn:
            self._check_open()
            live = self.held.get(job_id)
            if live is None:
                raise NotReserved(job_id) if job_id in self._queue._machine.jobs else JobNotFound(job_id)
            return Job(self._queue, self, live)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give its jobs back, leave every line; whoever waits in it gets ``QueueClosed``. Idempotent."""
        if not self.closed:
            self._queue._close_session(self)

    def _check_open(self) -> None:
        if self.closed:
            raise QueueClosed("this session is closed")

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<Session watching {', '.join(self.watched)}: {len(self.held)} reserved{state}>"
