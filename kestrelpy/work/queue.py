"""The work queue: jobs with priority, delay and time to run, on a journaled queue.

NOTE ON LOCKING: see ``_keeping``. ``with self._turn as now`` takes the lock, and lets time do its work first.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING, Literal
from weakref import WeakSet

from kestrelpy import JournaledQueue, KestrelError, QueueClosed, SystemClock
from kestrelpy.work._changing import Changing
from kestrelpy.work._keeping import MUCH
from kestrelpy.work._machine import NEVER
from kestrelpy.work._replay import Replay
from kestrelpy.work.session import Session

if TYPE_CHECKING:
    from kestrelpy import Clock
    from kestrelpy._disk import Disk

__all__ = ["WorkQueue"]

_NAMES_BYTES = 512
"""Room for the names of a tube and a key in a record."""


class WorkQueue(Changing):
    """Jobs with priority, delay and time to run, in any process, without a server.

    ``directory`` and ``name``: of the journaled queue that holds them, made if need be; ``directory=None``: in memory
    only. ``max_job_bytes``: of one body; ``max_jobs``, ``max_bytes``: of all that live, above which a put raises
    ``QueueFull``. ``max_attempts``: a job that was released or timed out so often is buried instead of being ready
    again. ``sync``: ``"always"``: what returned is on disk; seconds: synced in the background that often; ``"never"``:
    the system decides. In every mode what returned survives the death of the process.
    ``checkpoint_interval``: seconds between looks for what is over and can be forgotten. ``clock``, ``disk``: other
    than the system's, for tests; ``disk_clock``: one whose calls may wait for the disk, if those of ``clock`` may not.

    Raises what ``JournaledQueue`` raises, and ``CorruptJournal`` for a queue that is no work queue. Thread-safe. Cost
    of opening: O(jobs).
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        name: str = "work",
        *,
        max_job_bytes: int = 65535,
        max_jobs: int | None = None,
        max_bytes: int | None = None,
        max_attempts: int | None = None,
        sync: float | Literal["always", "never"] = 0.1,
        segment_bytes: int = 16 << 20,
        checkpoint_interval: float = 1.0,
        clock: Clock | None = None,
        disk_clock: Clock | None = None,
        disk: Disk | None = None,
    ) -> None:
        for limit, number in (("max_jobs", max_jobs), ("max_bytes", max_bytes), ("max_attempts", max_attempts)):
            if number is not None and number < 1:
                raise ValueError(f"{limit} must be at least 1, or None, not {number!r}")
        self.name = name
        self.directory = None if directory is None else os.fspath(directory)
        self.max_job_bytes = max_job_bytes
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._is_limited = max_jobs is not None or max_bytes is not None
        self._clock = clock if clock is not None else SystemClock()
        self._disk_clock = disk_clock if disk_clock is not None else self._clock
        self._interval = checkpoint_interval
        self._always = self.directory is not None and (sync == "always" or sync == 0)
        self._draining = False
        self._opened_at = self._clock.monotonic()
        queue = None
        if self.directory is not None:
            queue = JournaledQueue(
                self.directory,
                name,
                sync="never" if self._always else sync,  # then each call syncs for itself, outside the lock
                segment_bytes=segment_bytes,
                checkpoint_interval=checkpoint_interval,
                inbox_interval=None,
                clock=self._disk_clock,
                disk=disk,
            )
        try:
            if queue is not None and not 0 <= max_job_bytes <= queue.max_item_bytes - _NAMES_BYTES:
                raise ValueError(f"max_job_bytes must be at most {queue.max_item_bytes - _NAMES_BYTES:,} here")
            self._set_up(queue, segment_bytes, max_attempts)
            if self._journal is not None:
                now, now_ms = self._clock.monotonic(), self._wall_ms()
                path = f"{self.directory}/{name}"
                replay = Replay(self._machine, self._journal, path, disk, now=now, now_ms=now_ms)
                self._totals_at, self._covered_id = replay.run(), replay.covered_id
                with self._news, self._lock, self._turn:  # what fell due meanwhile
                    pass
        except BaseException:
            if queue is not None:
                queue.close()
            raise
        _opened.add(self)

    def session(self, *, deadline_soon: bool = True) -> Session:
        """A new session. ``deadline_soon``: whether its reserves raise ``DeadlineSoon``."""
        with self._news, self._lock, self._turn:
            session = Session(self, self._machine.tubes["default"], deadline_soon=deadline_soon)
            self._sessions[session] = None
            return session

    def _close_session(self, session: Session) -> None:
        machine = self._machine
        try:
            with self._news, self._lock, self._turn as now:
                session.closed = True
                for waiter in list(session.waiters):
                    machine.fail(waiter, QueueClosed("this session was closed"))
                for tube in session.watched.values():
                    tube.watching -= 1
                assert session.using is not None
                session.using.using -= 1
                self._sessions.pop(session, None)
                machine.leave_behind(session, now)
                machine.advance(now, MUCH)
                watched, session.watched = session.watched, {}
                for tube in (*watched.values(), session.using):
                    machine.forget_unneeded(tube)
        except KestrelError:  # the queue is closed, and all of its sessions with it
            session.closed = True

    # -- the queue as a whole ------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Refuse puts from now on, with ``Draining``; all else goes on."""
        self._draining = self._is_limited = True

    @property
    def draining(self) -> bool:
        """Whether puts are refused."""
        return self._draining

    def checkpoint(self) -> None:
        """All that returned before is on disk when this returns; what is over is forgotten, its segments retired.

        Raises ``DurabilityUnknown``, ``OSError``.
        """
        if self._journal is not None:
            self._settle()

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return isinstance(self._state, QueueClosed)

    def close(self) -> None:
        """Save what is only counted so far and close the journal; waiters get ``QueueClosed``. Idempotent.

        Reserved jobs are ready at the next opening.
        """
        if self._state is not None:
            return
        try:
            if self._journal is not None:
                self._settle()
        except (OSError, KestrelError):
            pass  # the journal tells of it below, unless it has told somebody before
        finally:
            with self._lock:
                self._state = QueueClosed(f"work queue {self.name} is closed")
                for session in self._sessions:
                    session.closed = True
                    for waiter in list(session.waiters):
                        self._machine.fail(waiter, self._state)
                self._sessions.clear()
                self._machine.next_due = -NEVER
                if self._timer is not None:
                    self._timer.cancel()
            self._tell()
            if self._journal is not None:
                self._journal.queue.close()

    def __enter__(self) -> WorkQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._state is None else " closed"
        return f"<WorkQueue {self.name}: {len(self._machine.jobs)} jobs, {len(self._machine.tubes)} tubes{state}>"


_opened: WeakSet[WorkQueue] = WeakSet()


def _abandon_all() -> None:
    for queue in list(_opened):
        queue._abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
