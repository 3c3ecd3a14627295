"""The work queue: jobs with priority, delay and time to run, on a journaled queue.

NOTE ON LOCKING: see ``_keeping``. ``with self._turn as now`` takes the lock, and lets time do its work first.
"""

from __future__ import annotations

import contextlib
import os
from copy import copy
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from kestrelpy import KestrelError, QueueClosed, SystemClock
from kestrelpy._process import forget, remember, warn_unclosed
from kestrelpy.work._changing import Changing
from kestrelpy.work._journal import JobJournal
from kestrelpy.work._keeping import MUCH
from kestrelpy.work._options import check_interval, check_job_bytes, check_limit, check_on_corruption, check_sync
from kestrelpy.work._replay import Replay
from kestrelpy.work.scheduler import NEVER
from kestrelpy.work.session import Session

if TYPE_CHECKING:
    from kestrelpy import Clock
    from kestrelpy._disk.interface import Disk

__all__ = ["WorkQueue"]

_NAMES_BYTES = 512
"""Room for the names of a tube and a key in a record."""


class WorkQueue(Changing):
    """Jobs with priority, delay and time to run, in any process, without a server.

    ``directory`` and ``name``: of the journaled queue that holds them, made if need be; ``directory=None``: in memory
    only. ``max_job_bytes``: of one body; ``max_jobs``, ``max_bytes``: of all that live, above which a put raises
    ``QueueFull``; ``max_tubes``: above which what would make another one does: a put, ``use``, ``watch``, ``move``.
    ``max_attempts``: a job that was released or timed out so often is buried instead of being ready
    again. ``sync``: ``"always"``: what returned is on disk; seconds: synced in the background that often; ``"never"``:
    the system decides. In every mode what returned survives the death of the process.
    ``on_corruption``: ``"raise"``, or ``"quarantine"`` to pass over records that are not intact: jobs that they put are
    lost, and what they said of others is forgotten, so that a job that was deleted may come back. The log has the ids.
    ``checkpoint_interval``: seconds between looks for what is over and can be forgotten. ``clock``, ``disk``: other
    than the system's, for tests; ``disk_clock``: one whose calls may wait for the disk, if those of ``clock`` may not.

    Raises what ``JournaledQueue`` raises, ``WrongKind`` for a queue that is no work queue; ``CorruptJournal`` also for
    a record that is about no job. Cost of opening: O(jobs).

    Thread-safe. Calls of it and of its sessions raise ``QueueClosed`` after ``close()``, ``ForkedQueue`` in a forked
    child, ``ValueError`` or ``TypeError`` for an argument that does not fit. Those that write raise ``QueueDiskFull``
    where there is no room, and ``DurabilityUnknown`` or another ``OSError`` once the journal has failed.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        name: str = "work",
        *,
        max_job_bytes: int = 65535,
        max_jobs: int | None = None,
        max_bytes: int | None = None,
        max_tubes: int | None = None,
        max_attempts: int | None = None,
        sync: float | Literal["always", "never"] = 0.1,
        segment_bytes: int = 16 << 20,
        checkpoint_interval: float = 1.0,
        on_corruption: Literal["raise", "quarantine"] = "raise",
        clock: Clock | None = None,
        disk_clock: Clock | None = None,
        disk: Disk | None = None,
    ) -> None:
        check_job_bytes(max_job_bytes, None)
        self.name = name
        self.directory = None if directory is None else os.fspath(directory)
        self.max_job_bytes = max_job_bytes
        self._max_jobs = check_limit("max_jobs", max_jobs)
        self._max_bytes = check_limit("max_bytes", max_bytes)
        self._max_tubes = check_limit("max_tubes", max_tubes)
        max_attempts = check_limit("max_attempts", max_attempts)
        self._is_limited = max_jobs is not None or max_bytes is not None
        self._clock = clock if clock is not None else SystemClock()
        self._disk_clock = disk_clock if disk_clock is not None else self._clock
        self._interval = checkpoint_interval = check_interval(checkpoint_interval)
        quarantine = check_on_corruption(on_corruption)
        self._always = check_sync(sync) and self.directory is not None
        self._draining = False
        self._opened_at = self._clock.monotonic()
        queue = None
        if self.directory is not None:
            queue = JobJournal(
                self.directory,
                name,
                sync="never" if self._always else sync,  # then each call syncs for itself, outside the lock
                segment_bytes=segment_bytes,
                checkpoint_interval=checkpoint_interval,
                on_corruption=on_corruption,
                inbox_interval=None,
                clock=self._disk_clock,
                disk=disk,
            )
        try:
            if queue is not None:
                check_job_bytes(max_job_bytes, queue.max_item_bytes - _NAMES_BYTES)
                queue.lift_limit()
            is_known = queue is None or queue.claim(disk)
            self._set_up(queue, segment_bytes, max_attempts)
            if queue is not None:
                self._replay(queue, disk, is_known=is_known, quarantine=quarantine)
                with self._news, self._lock, self._turn:  # what fell due meanwhile
                    pass
        except BaseException:
            self._state = QueueClosed(f"work queue {name} was never opened")
            if queue is not None:
                queue.close()
            raise
        remember(self)
        if queue is not None:
            forget(queue)  # it is this object's: closed by it, at the interpreter's end too, and left to a forked child

    def _replay(self, queue: JobJournal, disk: Disk | None, *, is_known: bool, quarantine: bool) -> None:
        log = self._journal
        assert log is not None
        assert self._held is not None
        replay = Replay(
            self._machine,
            log,
            self._held.load() if is_known else (),
            f"{self.directory}/{self.name}",
            disk,
            now=self._clock.monotonic(),
            now_ms=self._wall_ms(),
            is_known=is_known,
            quarantine=quarantine,
        )
        self._totals_at = replay.run()
        self._unsaid = replay.unsaid
        if not is_known:
            queue.adopt(disk, records=replay.records)
        with contextlib.suppress(OSError), self._lock:  # the disk may be full since before there was held room
            self._hold_room_locked(1)
        if log.carry_to:  # what is damaged goes, once all that lives there was written anew
            self._settle_later(0)

    def session(self, *, deadline_soon: bool = True) -> Session:
        """A new session. ``deadline_soon``: whether its reserves raise ``DeadlineSoon``."""
        with self._news, self._lock, self._turn:
            session = Session(self, self._machine.tubes["default"], deadline_soon=deadline_soon)
            self._sessions.add(session)
            return session

    def _close_session(self, session: Session) -> None:
        try:
            more = True
            while more:  # in slices; others come in between
                with self._unheard(), self._news, self._lock, self._turn as now:
                    more = self._close_some_locked(session, now)
        except KestrelError:  # the queue is closed, and all of its sessions with it
            session.closed = True

    def _close_some_locked(self, session: Session, now: float) -> bool:
        """Whether there is more to do."""
        machine = self._machine
        session.closed = True
        for waiter in [each for each, _ in zip(session.waiters, range(MUCH), strict=False)]:
            machine.fail(waiter, QueueClosed("this session was closed"))
        if session.waiters:
            return True
        if session in self._sessions:
            self._sessions.discard(session)
            assert session.using is not None
            session.using.using -= 1
            machine.forget_unneeded(session.using)
            machine.leave_behind(session, now)
            machine.advance(now, MUCH)
        for _ in range(min(MUCH, len(session.watched))):
            _, tube = session.watched.popitem()
            tube.watching -= 1
            machine.forget_unneeded(tube)
        return bool(session.watched)

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

        Reserved jobs are ready at the next opening. Raises ``DurabilityUnknown`` if a sync has failed and no call has
        raised that.
        """
        if self._state is not None:
            return
        try:
            if self._journal is not None:
                with self._unheard():
                    self._settle()
        except (OSError, KestrelError):
            pass  # the journal tells of it below, unless it has told somebody before
        finally:
            with self._lock:
                self._state = QueueClosed(f"work queue {self.name} is closed")
                for session in list(self._sessions):
                    session.closed = True
                    for waiter in list(session.waiters):
                        self._machine.fail(waiter, copy(self._state))
                self._sessions.clear()
                self._machine.next_due = -NEVER
            self._cancel_timers()
            forget(self)
            try:
                if self._journal is not None:
                    self._journal.queue.close()
            finally:
                self._tell()  # last: it runs what users call back, which may raise anything

    def _cancel_timers(self) -> None:
        """They would keep a queue alive that is closed."""
        for timer in (self._timer, self._settle_timer):
            if timer is not None:
                timer.cancel()

    def _dismiss(self, error: QueueClosed) -> None:
        """The interpreter is ending: nobody is to wait any more (R29)."""
        with self._lock:
            self._dismiss_locked(error)
        self._tell()

    def _dismiss_locked(self, error: QueueClosed) -> None:
        # Not where the lock is taken: at the jumps of such a loop CPython 3.13 does not see the "with".
        for session in list(self._sessions):
            for waiter in list(session.waiters):
                self._machine.fail(waiter, copy(error))

    def __enter__(self) -> WorkQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._state is None else " closed"
        return f"<WorkQueue {self.name}: {len(self._machine.jobs)} jobs, {len(self._machine.tubes)} tubes{state}>"

    def __del__(self) -> None:
        if getattr(self, "_state", self) is None and self._journal is not None:
            warn_unclosed(self)
