"""``Job``: what a session hands out, and what becomes of it."""

from __future__ import annotations

from types import TracebackType

from kestrelpy import KestrelError, QueueClosed
from kestrelpy.work.core import WorkCore
from kestrelpy.work.errors import JobNotFound, NotReserved
from kestrelpy.work.options import check_priority, check_seconds
from kestrelpy.work.records import BURIED, DELAYED, READY, RESERVED
from kestrelpy.work.stored import Reserved, SessionState, StoredJob, check_open, is_held

__all__ = ["Job"]


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

    __slots__ = ("_core", "_ended", "_session", "_stored", "body", "delay", "id", "priority", "reserves", "ttr", "tube")

    def __init__(self, core: WorkCore, session: SessionState | None, stored: StoredJob) -> None:
        self._core = core
        self._session = session
        self._stored = stored
        self._ended = False  # the user has said what is to become of it, or was told that the reservation is over
        self.id = stored.id
        self.body = stored.body
        self.tube = stored.tube.name
        self.priority = stored.priority
        self.delay = stored.delay
        self.ttr = stored.ttr
        self.reserves = stored.reserves

    def delete(self) -> None:
        """Done with it: it is gone for good. Of one that was only looked at, as ``WorkQueue.delete``."""
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

    def release(self, priority: int | None = None, delay: float = 0) -> bool:
        """Give it back, ready at once or in ``delay`` seconds. False if it is worn out and was buried instead."""
        self._ended = True
        delay = check_seconds("delay", delay)
        if priority is not None:
            priority = check_priority(priority)
        core = self._core
        with core.news, core.lock, core.turn as now:
            stored, scheduler = self._held_locked(), core.scheduler
            is_worn_out = scheduler.is_worn_out(stored.timeouts + stored.releases + 1)
            state = BURIED if is_worn_out else DELAYED if delay else READY
            new = core.state_of(stored, now)._replace(
                state=state,
                priority=stored.priority if priority is None else priority,
                delay=delay,
                due_ms=core.wall_ms(delay) if state == DELAYED else 0,
                releases=stored.releases + 1,
                buries=stored.buries + is_worn_out,
                burial=scheduler.burials + 1 if is_worn_out else 0,
            )
            core.become_locked(stored, new, now, due=now + delay)
        if core.always:
            core.sync()
        return not is_worn_out

    def bury(self, priority: int | None = None) -> None:
        """Set it aside, until it is kicked."""
        self._ended = True
        if priority is not None:
            priority = check_priority(priority)
        core = self._core
        with core.news, core.lock, core.turn as now:
            stored = self._held_locked()
            new = core.state_of(stored, now)._replace(
                state=BURIED,
                priority=stored.priority if priority is None else priority,
                buries=stored.buries + 1,
                burial=core.scheduler.burials + 1,
            )
            core.become_locked(stored, new, now)
        if core.always:
            core.sync()

    def touch(self) -> None:
        """Its time to run begins again."""
        core = self._core
        try:
            with core.news, core.lock, core.turn as now:
                core.scheduler.touch(self._held_locked(), now)
        except (NotReserved, JobNotFound):
            self._ended = True
            raise

    @property
    def time_left(self) -> float:
        """Seconds until the reservation ends, or a delayed one is ready; 0 if neither."""
        core = self._core
        with core.news, core.lock, core.turn as now:
            stored = self._stored
            if self._session is not None:
                is_running = is_held(stored, self._session, self.reserves)
            else:
                is_running = stored.state in (DELAYED, RESERVED) and core.scheduler.jobs.get(stored.id) is stored
            return max(0.0, stored.due - now) if is_running else 0.0

    def _held_locked(self) -> StoredJob:
        """The job that this handle has reserved."""
        if is_held(self._stored, self._session, self.reserves):
            return self._stored
        raise NotReserved(self.id) if self.id in self._core.scheduler.jobs else JobNotFound(self.id)

    def __enter__(self) -> Job:
        if self._session is not None:
            self._ended = False
            self._session.blocks[self.id, self.reserves] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is None:
            return
        self._session.blocks.pop((self.id, self.reserves), None)
        if self._ended and not is_held(self._stored, self._session, self.reserves):
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


def mark_ended(job: Job) -> None:
    """The reservation has ended as its session wanted: the ``with`` that the job may be in has nothing to do."""
    job._ended = True


def unreserve(job: Job) -> None:
    """Nobody got to see it: back, as if it had not been reserved. No error if its reservation is over."""
    core = job._core
    try:
        with core.news, core.lock, core.turn as now:
            if is_held(job._stored, job._session, job.reserves):
                core.scheduler.unreserve(job._stored, now)
    except QueueClosed:
        return


def leave(job: Job) -> None:
    """``unreserve`` by the next call: the garbage collector has found a job that nobody got to see."""
    job._core.leave_note(Reserved(job._stored, job._session, job.reserves))


def delete_by(core: WorkCore, session: SessionState | None, job_id: int) -> None:
    """Delete a job that ``session`` has reserved, or that nobody has. Raises ``JobNotFound``, ``NotReserved``."""
    with core.news, core.lock, core.turn as now:
        if session is not None:
            check_open(session)
        stored = core.find_locked(job_id, now)
        if stored.state == RESERVED and stored.holder is not session:
            raise NotReserved(job_id)
        core.delete_locked(stored)
    if core.always:
        core.sync()
