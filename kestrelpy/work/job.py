"""``Job``: the handle that a reserve returns, and the calls that end a reservation."""

from __future__ import annotations

from types import TracebackType
from typing import Generic

from kestrelpy import KestrelError, QueueClosed
from kestrelpy.item import V
from kestrelpy.work.core import WorkCore
from kestrelpy.work.errors import JobNotFound, NotReserved
from kestrelpy.work.in_task import acknowledged
from kestrelpy.work.options import check_priority, check_seconds
from kestrelpy.work.records import BURIED, DELAYED, READY, RESERVED
from kestrelpy.work.stored import Reserved, SessionState, StoredJob, check_open, is_held

__all__ = ["Job"]


class Job(Generic[V]):
    """A job as it was when it was reserved, or looked at: ``id``, ``body`` (bytes), ``tube``, ``key``, ``priority``,
    ``delay``, ``ttr`` (seconds), ``reserves``. For type checkers, ``Job[V]`` has a ``value`` of type ``V``.

    As a context manager, also of asyncio, the job is deleted (acknowledged) at the end of the block, and released if
    the block raises.
    A job that the block has deleted, released or buried is left alone. If the time to run was over before the end of
    the block, and no call in the block has raised ``NotReserved``, the end of the block raises it: another worker does
    the job, or has done it. If the block raises, that error is raised, and an error at the end of the block is logged.

    ``delete``, ``release``, ``bury`` and ``touch`` raise ``NotReserved`` once the reservation is over, also if the same
    session has reserved the job again since; ``JobNotFound`` once the job is gone.
    """

    __slots__ = (
        "_core",
        "_ended",
        "_session",
        "_stored",
        "body",
        "delay",
        "id",
        "key",
        "priority",
        "reserves",
        "ttr",
        "tube",
    )

    def __init__(self, core: WorkCore, session: SessionState | None, stored: StoredJob) -> None:
        self._core = core
        self._session = session
        self._stored = stored
        self._ended = False  # the user has ended the reservation, or got an error that it is over
        self.id = stored.id
        self.body = stored.body
        self.tube = stored.tube.name
        self.key = stored.key
        self.priority = stored.priority
        self.delay = stored.delay
        self.ttr = stored.ttr
        self.reserves = stored.reserves

    @property
    def value(self) -> V:
        """The body, decoded by the queue's codec; without a codec, the body itself. Decoded again at each access.

        Raises what the codec raises (``DecodeError``, ``ValueError``).
        """
        value: V = self._core.limits.decode(self.body)
        return value

    def delete(self) -> None:
        """Acknowledge the job: it is gone for good. A job that was only looked at: as ``WorkQueue.delete``."""
        self._ended = True
        if self._session is None:
            delete_by(self._core, None, self.id)
            return
        core = self._core
        scheduler = core.scheduler
        with core.lock:
            try:  # HOT COPY of Turn
                if core.clock.monotonic() >= scheduler.next_due or core.must_check:
                    core.begin_locked()
                core.delete_locked(self._held_locked())
            except BaseException as error:
                core.note(error)
                raise
            if scheduler.next_due < core.armed_at or scheduler.expired or core.must_check:
                core.end_locked()
        if scheduler.completions:
            core.notify()
        if core.always:
            core.sync()

    async def adelete(self) -> None:
        """``delete`` for asyncio: the event loop goes on while this waits for the disk, as ``delete`` does.

        A task that is cancelled while it waits has deleted the job. Raises as ``delete``.
        """
        self._ended = True
        core = self._core
        if self._session is None:
            delete_unsynced(core, None, self.id)
        else:
            with core.deliveries, core.lock, core.turn:
                core.delete_locked(self._held_locked())
        await acknowledged(core)

    def release(
        self,
        priority: int | None = None,
        delay: float | None = None,
        *,
        body: V | bytearray | memoryview | None = None,
    ) -> bool:
        """Give the job back, ready in ``delay`` seconds (0: at once; ``None``: as ``retry_delay`` of the queue says).
        False if it was buried instead: its attempts have reached ``max_attempts``.

        ``priority``, ``body``: the job's new ones (with a codec, a value; ``None``: the old one). All of it happens, or
        nothing, also across a crash. With a body, the whole job is written again. Raises ``JobTooBig``; ``QueueFull``
        if a larger body would exceed ``max_bytes``.
        """
        was_released = self._release(priority, delay, body)
        if self._core.always:
            self._core.sync()
        return was_released

    async def arelease(
        self,
        priority: int | None = None,
        delay: float | None = None,
        *,
        body: V | bytearray | memoryview | None = None,
    ) -> bool:
        """``release`` for asyncio: the event loop goes on while this waits for the disk, as ``release`` does.

        ``priority``, ``delay``, ``body``: as there. A task that is cancelled while it waits has released the job.
        Raises as ``release``.
        """
        was_released = self._release(priority, delay, body)
        await acknowledged(self._core)
        return was_released

    def _release(self, priority: int | None, delay: float | None, body: V | bytearray | memoryview | None) -> bool:
        """``release``, without waiting for the disk."""
        self._ended = True
        core, attempts = self._core, self._stored.timeouts + self._stored.releases + 1
        delay = check_seconds("delay", delay) if delay is not None else core.limits.retry_delay(attempts)
        if priority is not None:
            priority = check_priority(priority)
        new_body = None if body is None else core.limits.checked_body(body)
        with core.deliveries, core.lock, core.turn as now:
            stored, scheduler = self._held_locked(), core.scheduler
            attempts_used_up = scheduler.attempts_used_up(stored.timeouts + stored.releases + 1)
            state = BURIED if attempts_used_up else DELAYED if delay else READY
            new = core.state_of(stored, now)._replace(
                state=state,
                priority=stored.priority if priority is None else priority,
                delay=delay,
                due_ms=core.wall_ms(delay) if state == DELAYED else 0,
                releases=stored.releases + 1,
                buries=stored.buries + attempts_used_up,
                burial=scheduler.burials + 1 if attempts_used_up else 0,
            )
            core.become_locked(stored, new, now, due=now + delay, body=new_body)
        return not attempts_used_up

    def bury(self, priority: int | None = None, *, body: V | bytearray | memoryview | None = None) -> None:
        """Set the job aside until it is kicked, like a dead letter. ``priority``, ``body``: as in ``release``."""
        self._bury(priority, body)
        if self._core.always:
            self._core.sync()

    async def abury(self, priority: int | None = None, *, body: V | bytearray | memoryview | None = None) -> None:
        """``bury`` for asyncio: the event loop goes on while this waits for the disk, as ``bury`` does.

        ``priority``, ``body``: as there. A task that is cancelled while it waits has buried the job. Raises as
        ``bury``.
        """
        self._bury(priority, body)
        await acknowledged(self._core)

    def _bury(self, priority: int | None, body: V | bytearray | memoryview | None) -> None:
        """``bury``, without waiting for the disk."""
        self._ended = True
        if priority is not None:
            priority = check_priority(priority)
        core = self._core
        new_body = None if body is None else core.limits.checked_body(body)
        with core.deliveries, core.lock, core.turn as now:
            stored = self._held_locked()
            new = core.state_of(stored, now)._replace(
                state=BURIED,
                priority=stored.priority if priority is None else priority,
                buries=stored.buries + 1,
                burial=core.scheduler.burials + 1,
            )
            core.become_locked(stored, new, now, body=new_body)

    def touch(self) -> None:
        """Begin the job's time to run again."""
        core = self._core
        try:
            with core.deliveries, core.lock, core.turn as now:
                core.scheduler.touch(self._held_locked(), now)
        except (NotReserved, JobNotFound):
            self._ended = True
            raise

    @property
    def time_left(self) -> float:
        """Seconds until the reservation ends, or a delayed job is ready; otherwise 0."""
        core = self._core
        with core.deliveries, core.lock, core.turn as now:
            stored = self._stored
            if self._session is not None:
                is_running = is_held(stored, self._session, self.reserves)
            else:
                is_running = stored.state in (DELAYED, RESERVED) and core.scheduler.jobs.get(stored.id) is stored
            return max(0.0, stored.due - now) if is_running else 0.0

    def _held_locked(self) -> StoredJob:
        """The stored job, if the reservation of this handle still holds. Raises ``NotReserved``, ``JobNotFound``."""
        if is_held(self._stored, self._session, self.reserves):
            return self._stored
        raise NotReserved(self.id) if self.id in self._core.scheduler.jobs else JobNotFound(self.id)

    def __enter__(self) -> Job[V]:
        if self._session is not None:
            self._ended = False
            self._session.blocks[self.id, self.reserves] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._leave_block():
            try:
                if kind is None:
                    self.delete()
                else:
                    self.release()
            except (KestrelError, OSError) as failure:
                if self._is_raised(kind, failure):
                    raise

    async def __aenter__(self) -> Job[V]:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._leave_block():
            try:
                if kind is None:
                    await self.adelete()
                else:
                    await self.arelease()
            except (KestrelError, OSError) as failure:
                if self._is_raised(kind, failure):
                    raise

    def _leave_block(self) -> bool:
        """The end of a ``with`` block of this job. True if the job has to be deleted or released now."""
        if self._session is None:
            return False
        self._session.blocks.pop((self.id, self.reserves), None)
        return not self._ended or is_held(self._stored, self._session, self.reserves)

    def _is_raised(self, kind: type[BaseException] | None, failure: Exception) -> bool:
        """Whether the end of a block that has raised ``kind`` raises ``failure``, or logs it. Raises ``NotReserved``
        for a job that is gone.
        """
        if kind is None and isinstance(failure, JobNotFound):
            raise NotReserved(self.id) from None
        if kind is not None:
            from logging import getLogger  # imported here: mostly there is nothing to log

            getLogger("kestrelpy").warning("%r was not released when its block raised: %s", self, failure)
        return kind is None

    def __repr__(self) -> str:
        shown = self.body if len(self.body) <= 32 else self.body[:29] + b"..."
        return f"<Job {self.id} of {self.tube}: {shown!r}, {len(self.body)} bytes>"


def mark_ended(job: Job) -> None:
    """The session itself has ended the reservation: a ``with`` block of the job has nothing left to do."""
    job._ended = True


def release_unsynced(
    job: Job[V], priority: int | None, delay: float | None, body: V | bytearray | memoryview | None
) -> bool:
    """``Job.release``, without waiting for the disk."""
    return job._release(priority, delay, body)


def bury_unsynced(job: Job[V], priority: int | None, body: V | bytearray | memoryview | None) -> None:
    """``Job.bury``, without waiting for the disk."""
    job._bury(priority, body)


def unreserve(job: Job) -> None:
    """Give back a job that no caller got, as if it had not been reserved. No error if its reservation is over."""
    core = job._core
    try:
        with core.deliveries, core.lock, core.turn as now:
            if is_held(job._stored, job._session, job.reserves):
                core.scheduler.unreserve(job._stored, now)
    except QueueClosed:
        return


def leave(job: Job) -> None:
    """Let the next call ``unreserve`` the job: the garbage collector has found that no caller got it."""
    job._core.leave_note(Reserved(job._stored, job._session, job.reserves))


def delete_many(core: WorkCore, session: SessionState, jobs: list[Job[V]]) -> list[Job[V]]:
    """Delete those of the jobs that ``session`` still has reserved by these handles; returns the others."""
    held: dict[int, Job[V]] = {}
    left = []
    with core.deliveries, core.lock, core.turn:
        check_open(session)
        for job in jobs:
            if job._session is session and is_held(job._stored, session, job.reserves):
                held[job.id] = job
            else:
                left.append(job)
        if held:
            core.delete_many_locked([job._stored for job in held.values()])
    for job in jobs:
        job._ended = True
    if held and core.always:
        core.sync()
    return left


def delete_by(core: WorkCore, session: SessionState | None, job_id: int) -> None:
    """Delete a job that ``session``, or no session, has reserved. Raises ``JobNotFound``, ``NotReserved``."""
    delete_unsynced(core, session, job_id)
    if core.always:
        core.sync()


def delete_unsynced(core: WorkCore, session: SessionState | None, job_id: int) -> None:
    """``delete_by``, without waiting for the disk."""
    with core.deliveries, core.lock, core.turn as now:
        if session is not None:
            check_open(session)
        stored = core.find_locked(job_id, now)
        if stored.state == RESERVED and stored.holder is not session:
            raise NotReserved(job_id)
        core.delete_locked(stored)
