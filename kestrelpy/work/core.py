"""``WorkCore``: the lock of a work queue, the turns that calls take under it, and the records about its jobs.

Rules:
1. A change is written before memory is changed. If the write fails, the change has not happened, and the caller gets
   the error. What time alone does (the end of a reservation) is the exception: it happens even if it can't be written,
   and it is written as soon as possible.
2. Long work is done in slices. The lock is released between two slices.
3. Nearly every call is ``with core.deliveries, core.lock, core.turn as now``. The lock has a ``with`` of its own: so no
   interrupt falls between taking the lock and the duty to release it.

NOTE ON LOCKING: ``lock`` (W) guards the scheduler and the log. It is held for memory work and for appending to the
journal; a delete on a full disk also waits for a sync under it. It is never held while a waiter is notified.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from copy import copy
from types import TracebackType
from typing import TYPE_CHECKING
from weakref import WeakSet

from kestrelpy import ForkedQueue, QueueDiskFull, QueueFull
from kestrelpy.errors import KestrelError
from kestrelpy.work import records
from kestrelpy.work.errors import JobNotFound
from kestrelpy.work.held_room import NO_ROOM, Gone, HeldRoom
from kestrelpy.work.job_log import JobLog, NoLog
from kestrelpy.work.records import (
    BURIED,
    DELAYED,
    DELETED,
    EXPIRED,
    GONE,
    READY,
    RESERVED,
    TIMED_OUT,
    Origin,
    State,
    pack_gone,
)
from kestrelpy.work.repair import check, repair
from kestrelpy.work.scheduler import NEVER, Scheduler
from kestrelpy.work.stored import JobWaiter, LeftTubes, Reserved, SessionState, StoredJob, Tube, is_held
from kestrelpy.work.tube_names import check_tube

if TYPE_CHECKING:
    from kestrelpy import Clock
    from kestrelpy.clock import Timer
    from kestrelpy.work.journal import JobJournal
    from kestrelpy.work.parts import BodyLimits, Compaction


CALL_SLICE = 100
"""How many due events a call handles before it does its own work."""
TIMER_SLICE = 1000
"""How many due events the timer handles with the lock held, in one go."""
YIELD_SECONDS = 0.001
"""How long a call that works in slices leaves the lock to others between two slices. If it took the lock again at once,
it would always get it before the threads that wait for it.
"""
SHORTEST = 1e-6
"""The shortest wait of the timer, in seconds. A shorter one may end too early: clocks count whole nanoseconds."""


class Turn:
    """One call under the lock: first the work that is due is done; at the end the timer is set for the next."""

    def __init__(self, core: WorkCore) -> None:
        self._core = core

    def __enter__(self) -> float:
        try:
            return self._core.begin_locked()
        except BaseException as error:
            self._core.note(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        core = self._core
        try:
            if error is not None:
                core.note(error)
            core.end_locked()
        except BaseException as another:
            core.note(another)
            raise


class Deliveries:
    """Notifies the waiters that have left the line, after the lock is released."""

    def __init__(self, core: WorkCore) -> None:
        self._core = core

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._core.scheduler.completions:
            self._core.notify()


class WorkCore:
    """The lock, the scheduler and the log of one work queue. ``queue`` is its journal; ``None``: in memory only."""

    __slots__ = (
        "__weakref__",
        "_disturbed",
        "_max_tubes",
        "_notes",
        "_numbers",
        "_owner",
        "_pid",
        "_refused",
        "_timer",
        "always",
        "append",
        "armed_at",
        "clock",
        "compactor",
        "deliveries",
        "held",
        "interval",
        "jobs_being_deleted",
        "jobs_being_written",
        "jobs_held",
        "journal",
        "limits",
        "lock",
        "log",
        "must_check",
        "name",
        "scheduler",
        "sessions",
        "state",
        "turn",
        "unrecorded",
    )
    compactor: Compaction
    limits: BodyLimits

    def __init__(
        self,
        owner: object,
        name: str,
        clock: Clock,
        queue: JobJournal | None,
        *,
        segment_bytes: int,
        interval: float,
        always: bool,
        max_tubes: int | None,
        max_attempts: int | None,
    ) -> None:
        self._owner = owner  # kept alive as long as somebody has a session or a job of it
        self.name = name
        self.clock = clock
        self.interval = interval
        self.always = always
        """Whether each call syncs the records that it has written."""
        self._max_tubes = max_tubes
        self._pid = os.getpid()
        self.lock = threading.Lock()
        self.turn = Turn(self)
        self.deliveries = Deliveries(self)
        self.scheduler = Scheduler(max_attempts)
        self.sessions: WeakSet[SessionState] = WeakSet()  # open sessions that somebody references
        self._notes: deque[Reserved | JobWaiter | LeftTubes] = deque()
        self._numbers = itertools.count(1)  # for sessions and waiters
        self.state: Exception | None = None  # why the queue can't be used; None: it can
        self.must_check = False
        """The next call must look at more than the time: the queue is closed, a call was interrupted, or somebody left
        a note. Whoever has something for it stores that first, and then True here, with or without the lock.
        """
        self._disturbed = False  # an exception from outside struck while the lock was held
        self._refused: ValueError | None = None  # from ``refusal_locked``, and being raised
        self.jobs_being_written: Sequence[StoredJob] = ()  # the jobs of the latest records, written or being written
        self.jobs_being_deleted: Sequence[StoredJob] = ()  # of one call; it is written that they are gone, all of them
        self._timer: Timer | None = None
        self.armed_at = NEVER
        self.unrecorded: list[int] = []  # jobs that are gone; the journal had no room for their GONE
        self.journal = None if queue is None else JobLog(queue, segment_bytes, self._grown_locked)
        self.log: JobLog | NoLog = self.journal or NoLog()
        self.append = self.log.append
        self.held = None if queue is None else HeldRoom(queue)
        self.jobs_held = sys.maxsize if queue is None else 0  # room is held for the end of so many jobs

    def _grown_locked(self) -> None:
        self.compactor.grown_locked()

    def next_number(self) -> int:
        return next(self._numbers)

    def find_locked(self, job_id: int, now: float) -> StoredJob:
        """The job with that id. Raises ``JobNotFound``, also for a job that has expired and was not dropped yet."""
        stored = self.scheduler.jobs.get(job_id)
        if stored is None or (stored.expires is not None and self.scheduler.expire(stored, now)):
            raise JobNotFound(job_id)
        return stored

    def tube_locked(self, name: str) -> Tube:
        """The tube of that name; makes it if there is none. Raises ``InvalidName``, ``QueueFull``."""
        scheduler = self.scheduler
        tube = scheduler.tubes.get(name)
        if tube is None:
            check_tube(name)
            if self._max_tubes is not None and len(scheduler.tubes) >= self._max_tubes:
                raise QueueFull(f"work queue {self.name}: another tube would exceed max_tubes={self._max_tubes}")
            tube = scheduler.make_tube(name)
        return tube

    # -- turns -------------------------------------------------------------------------------------------------------

    def begin_locked(self) -> float:
        """Do the work that is due, or a slice of it; return the time. Raises ``QueueClosed``.

        Hot paths read the clock themselves. They call this if ``next_due`` has passed, or ``must_check`` is set.
        """
        if self.state is not None:
            raise copy(self.state)  # a copy: one shared object would keep the frames of all callers alive
        now = self.clock.monotonic()
        if self._disturbed:
            self._repair_locked(now)
        scheduler = self.scheduler
        if now >= scheduler.next_due:
            self.advance_locked(now, CALL_SLICE)
        if self.must_check:
            self.must_check = False  # before the notes are read: one that comes later sets it again
            self._read_notes_locked(now)
        return now

    def leave_note(self, orphan: Reserved | JobWaiter | LeftTubes) -> None:
        """Leave for the next call what the garbage collector has found. Takes no lock: the collector runs anywhere."""
        self._notes.append(orphan)
        self.must_check = True

    def _read_notes_locked(self, now: float) -> None:
        """A job that nobody got goes back; a lost task leaves the line; the tubes of a lost session may go."""
        scheduler = self.scheduler
        while self._notes:
            orphan = self._notes.popleft()
            if isinstance(orphan, JobWaiter):
                scheduler.leave_line(orphan)
            elif isinstance(orphan, LeftTubes):
                watched, using = orphan
                for tube in watched.values():
                    tube.watching -= 1
                using.using -= 1
                for tube in (*watched.values(), using):
                    scheduler.forget_unneeded(tube)
            elif is_held(*orphan):
                scheduler.unreserve(orphan.job, now)
            del orphan  # perhaps the last reference to a waiter and to its job: then that job is noted in turn

    def advance_locked(self, now: float, limit: int) -> None:
        scheduler = self.scheduler
        scheduler.advance(now, limit)
        if scheduler.overdue:
            self.save_locked(list(scheduler.overdue.values()))

    def _repair_locked(self, now: float) -> None:
        """Make the lists, the log and the journal consistent, after an exception from outside in the middle of a call.

        Memory is right. The records about the jobs in ``jobs_being_written`` may not be: write these jobs again, as
        memory has them.
        """
        scheduler, log = self.scheduler, self.log
        sessions = list(self.sessions)
        for job in self.jobs_being_deleted:
            scheduler.jobs.pop(job.id, None)
        self.jobs_being_deleted = ()
        for _ in range(len(self._notes)):  # without notes on tubes: ``repair`` counts again, by open sessions
            orphan = self._notes.popleft()
            if not isinstance(orphan, LeftTubes):
                self._notes.append(orphan)
        repair(scheduler, sessions, now)
        log.realign()
        self.compactor.forget_totals()
        for tube in scheduler.tubes.values():
            scheduler.note(tube)
        jobs_being_written, self.jobs_being_written, self._disturbed = self.jobs_being_written, (), False
        for job in jobs_being_written:
            if scheduler.jobs.get(job.id) is not job:
                continue
            if job.id in self.unrecorded:
                self.unrecorded.remove(job.id)
            try:
                self.rewrite_locked(job, now)
            except QueueDiskFull:  # written later, when there is room
                scheduler.unsaved[job.id] = job
                self._void_locked(job.id)
        self._write_never_put_locked([job.id for job in jobs_being_written if scheduler.jobs.get(job.id) is not job])

    def _write_never_put_locked(self, gone: list[int]) -> None:
        """After an interrupt: write that these jobs are gone, for all of them or for none, as they may be a batch."""
        if gone:
            self.scheduler.last_id = max(self.scheduler.last_id, *gone)
            try:
                for at in self.log.append_many([pack_gone(GONE, EXPIRED, job_id) for job_id in gone]):
                    self.log.over(at)
            except QueueDiskFull:  # written later, when there is room
                self.unrecorded += gone

    def end_locked(self) -> None:
        """Before the lock is released: record the end of expired jobs, and set the timers."""
        scheduler = self.scheduler
        if scheduler.expired:
            self._write_expired_locked()
        if scheduler.unsaved and not self.compactor.is_armed:
            self.compactor.arm(self.interval)
        if scheduler.next_due < self.armed_at or (self.must_check and self.armed_at != -NEVER):
            self._arm_locked()

    def note(self, error: BaseException) -> None:
        """``error`` was raised with the lock held. The library raises its own errors where nothing is half done. Any
        other error, such as a ``TypeError``, may leave something half done: then the next call repairs.
        """
        refused, self._refused = self._refused, None
        if isinstance(error, QueueFull | QueueDiskFull):
            self.scheduler.refused += 1
        if not (isinstance(error, KestrelError | OSError) or error is refused):
            self._disturbed = self.must_check = True

    def refusal_locked(self, reason: str) -> ValueError:
        """An error that the caller raises now, before anything is changed: it needs no repair."""
        self._refused = ValueError(reason)
        return self._refused

    def _arm_locked(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.armed_at = -NEVER if self.must_check else self.scheduler.next_due
        wait = self.armed_at - self.clock.monotonic()
        wait = max(wait, SHORTEST) if wait > 0 else YIELD_SECONDS
        try:
            self._timer = self.clock.call_later(wait, self._tick, on_lost=self._timer_lost)
        except RuntimeError:  # no thread can be started
            self.armed_at = NEVER  # the next call does what is due, and sets another timer

    def _timer_lost(self, _error: BaseException) -> None:
        self.armed_at = NEVER  # the next call sets another timer

    def _tick(self) -> None:
        """The timer's call, on the clock's thread: do what is due."""
        with self.lock:
            self.armed_at, self._timer = NEVER, None
        try:
            with self.unreported(), self.deliveries, self.lock, self.turn as now:
                if now >= self.scheduler.next_due:
                    self.advance_locked(now, TIMER_SLICE)
        except KestrelError:  # the queue is closed or has failed: its next call raises that
            return

    def unreported(self) -> contextlib.AbstractContextManager[None]:
        """A context for work whose errors no caller gets: ``close`` still reports that the journal has failed."""
        return contextlib.nullcontext() if self.journal is None else self.journal.queue.unreported()

    def yield_lock(self) -> None:
        """Let others have the lock between two slices of one call. Call without the lock. Waits in real time."""
        threading.Event().wait(YIELD_SECONDS)

    def notify(self) -> None:
        """Give each waiter that has left the line its completion. Call without the lock.

        Callbacks may raise anything: all waiters are notified, and then the last exception is raised.
        """
        completions, raised = self.scheduler.completions, None
        for waiter, outcome in list(completions.items()):
            try:
                waiter.notify(outcome)
                completions.pop(waiter, None)
            except BaseException as struck:  # perhaps an interrupt before it was notified: it stays for the next call
                raised = struck
        if raised is not None:
            raise raised

    # -- records -----------------------------------------------------------------------------------------------------

    def write_state_locked(self, job: StoredJob, state: State) -> None:
        """Write that ``job`` is in ``state``, before it is. Raises as ``JobLog.append``; then nothing is changed."""
        self.jobs_being_written = (job,)
        at = self.append(records.encode_state(job.id, job.tube.name, state))
        self.saved_locked(job, at)

    def write_states_locked(self, jobs: list[StoredJob], states: list[State]) -> None:
        """``write_state_locked`` for many jobs: all records are written, or none."""
        if jobs:
            self.jobs_being_written = jobs
            pairs = zip(jobs, states, strict=True)
            ids = self.log.append_many([records.encode_state(job.id, job.tube.name, state) for job, state in pairs])
            for job, at in zip(jobs, ids, strict=True):
                self.saved_locked(job, at)

    def write_tube_locked(self, tube: Tube, pauses: int, pause: float, until_ms: int) -> None:
        """Write the counters and the pause of ``tube``, which may be its next pause. Raises as ``JobLog.append``; then
        nothing is changed.
        """
        figures = (tube.name, tube.total_jobs, tube.deletes, pauses, pause, until_ms)
        at = self.append(records.encode_tube(records.TubeFigures(*figures)))
        self.log.over(tube.at)
        tube.at = at

    def saved_locked(self, job: StoredJob, at: int) -> None:
        """Note that record ``at`` has the job's whole state. Only how the job was put is in another record."""
        self.log.over(job.state_at)
        job.state_at = at
        job.new_timeouts = 0
        self.scheduler.unsaved.pop(job.id, None)
        self.scheduler.overdue.pop(job.id, None)

    def state_of(self, job: StoredJob, now: float) -> State:
        """The state that the job has after a restart: a reserved job is ready then."""
        state = READY if job.state == RESERVED else job.state
        due_ms = self.wall_ms(job.due - now) if state == DELAYED else 0
        burial = int(job.due) if state == BURIED else 0
        return State(
            state,
            job.priority,
            job.delay,
            due_ms,
            job.reserves,
            job.timeouts,
            job.releases,
            job.buries,
            job.kicks,
            burial,
            job.new_timeouts,
        )

    def as_ready(self, job: StoredJob, now: float) -> State:
        return self.state_of(job, now)._replace(state=READY, due_ms=0, burial=0)

    def wall_ms(self, seconds: float = 0.0) -> int:
        """The wall-clock time ``seconds`` from now, in milliseconds since the Unix epoch."""
        return max(0, self.clock.time_ns() // 1_000_000 + round(seconds * 1000))

    def save_locked(self, jobs: list[StoredJob]) -> None:
        """Write the states of these jobs. If that fails, it is tried again later."""
        now = self.clock.monotonic()
        try:
            with self.unreported():
                self.write_states_locked(jobs, [self.state_of(job, now) for job in jobs])
        except (OSError, KestrelError):  # they stay in scheduler.unsaved
            self.compactor.arm(self.interval)

    def write_gone_locked(self, job: StoredJob, cause: int) -> None:
        """Write that ``job`` is gone, before it is removed. Raises as ``JobLog.append``; then nothing is changed. A
        full disk is an error only if no room was held.
        """
        log = self.log
        self.jobs_being_written = (job,)
        try:
            log.over(self.append(pack_gone(GONE, cause, job.id)))
        except QueueDiskFull as error:
            self._write_apart_locked(job.id, cause, error)
        log.over(job.at)
        if job.state_at:
            log.over(job.state_at)

    def _write_apart_locked(self, job_id: int, cause: int, refused: QueueDiskFull) -> None:
        """Write into the held room that the job is gone. The journal had no room for it: ``refused``."""
        log, held = self.journal, self.held
        assert log is not None
        assert held is not None
        log.queue.sync_under_lock()
        try:
            held.write(Gone(job_id, cause, log.last_id))
        except OSError as error:
            if error.errno in NO_ROOM:
                raise refused from None
            raise
        if not (self.always or log.queue.never_syncs):  # the journal's own syncs do not cover the held room
            held.sync()
        self.unrecorded.append(job_id)
        self.jobs_held = held.free
        self.compactor.arm(self.interval)

    def _void_locked(self, job_id: int) -> None:
        if self.held is not None:
            with contextlib.suppress(OSError):
                self.held.void(job_id)

    def hold_room_locked(self, jobs: int) -> None:
        """Hold room for the end of all jobs, and of ``jobs`` more. Raises ``QueueDiskFull``, ``OSError``."""
        log, held = self.journal, self.held
        assert log is not None
        assert held is not None
        try:
            held.hold(len(self.scheduler.jobs) + jobs)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise QueueDiskFull(log.queue.directory) from None
            raise
        finally:
            self.jobs_held = held.free

    def _write_expired_locked(self) -> None:
        """Write the end of expired jobs. If that fails, they expire again after a restart."""
        expired, self.scheduler.expired = self.scheduler.expired, []
        with self.unreported():
            for job in expired:
                try:
                    self.write_gone_locked(job, TIMED_OUT if job.new_timeouts else EXPIRED)
                except (OSError, KestrelError):
                    self.log.over(job.at)
                    self.log.over(job.state_at)

    def sync(self) -> None:
        """What earlier calls have written is on disk when this returns. Raises ``DurabilityUnknown``."""
        self.log.sync()
        if self.held is not None:
            self.held.sync()

    def rewrite_locked(self, job: StoredJob, now: float) -> None:
        """Write the job again, with its state. Raises as ``JobLog.append``."""
        self.write_again_locked(job, job.body, self.state_of(job, now), now)

    def write_again_locked(self, job: StoredJob, body: bytes, state: State, now: float) -> None:
        """Write the job again, in one record, with a body and a state that it perhaps does not have yet. Raises as
        ``JobLog.append``; then nothing is changed.
        """
        self.jobs_being_written = (job,)
        at = self.append(records.encode_put(self.origin_of(job, now), body, state))
        self.log.over(job.at)
        job.at = at
        self.saved_locked(job, 0)

    def origin_of(self, job: StoredJob, now: float) -> Origin:
        added_ms = self.wall_ms(job.added - now)
        expires_ms = 0 if job.expires is None else self.wall_ms(job.expires[0] - now)
        return Origin(job.id, job.tube.name, job.key, job.priority, job.delay, job.ttr, added_ms, expires_ms)

    # -- changes of a job --------------------------------------------------------------------------------------------

    def become_locked(
        self, job: StoredJob, new: State, now: float, *, due: float = 0.0, body: bytes | None = None
    ) -> None:
        """Write the new state of a job, and perhaps its new body, and then change the job in memory."""
        scheduler = self.scheduler
        if body is None:
            self.write_state_locked(job, new)
        else:
            more = len(body) - len(job.body)
            self.limits.check_growth_locked(more)
            if job.new_timeouts:  # the disk was full; only a STATE record adds them to the queue's timeouts
                self.write_state_locked(job, self.state_of(job, now))
            self.write_again_locked(job, body, new, now)
            job.body = body  # first: if an interrupt strikes before the rest, the job is held as before
            scheduler.bytes += more
        scheduler.take_out(job)
        job.priority, job.delay = new.priority, new.delay
        job.releases, job.buries, job.kicks = new.releases, new.buries, new.kicks
        scheduler.change_state(job, new.state, now, due=due)

    def delete_locked(self, job: StoredJob) -> None:
        """Write that the job is gone, and then forget the job."""
        self.write_gone_locked(job, DELETED)
        self._forget_deleted_locked(job)

    def delete_many_locked(self, jobs: list[StoredJob]) -> None:
        """Write that these jobs are gone, all or none, and then forget them; after an interrupt, too. On a full disk
        they are deleted one after the other, in the room that is held for that.
        """
        log = self.log
        self.jobs_being_written = jobs
        try:
            ids = log.append_many([pack_gone(GONE, DELETED, job.id) for job in jobs])
        except QueueDiskFull:
            for job in jobs:
                self.delete_locked(job)
            return
        self.jobs_being_deleted = jobs
        for job, at in zip(jobs, ids, strict=True):
            log.over(at)
            log.over(job.at)
            if job.state_at:
                log.over(job.state_at)
            self._forget_deleted_locked(job)
        self.jobs_being_deleted = ()

    def _forget_deleted_locked(self, job: StoredJob) -> None:
        scheduler, tube = self.scheduler, job.tube
        tube.deletes += 1
        if not tube.is_changed:
            scheduler.note(tube)
        if job.state != RESERVED or job.key or job.expires:
            scheduler.take_out(job)
            scheduler.remove(job)
        else:
            scheduler.remove_plain(job)

    # -- the end -----------------------------------------------------------------------------------------------------

    def fail(self, error: KestrelError) -> None:
        """Another owner has the queue: every call raises ``error``, and so do those that wait. With no lock held; the
        waiters' callbacks run on another thread.
        """
        with self.lock:
            if self.state is not None:
                return
            self.state, self.must_check = error, True
            self.dismiss_locked(error)
        try:
            self.clock.call_later(0, self.notify, on_lost=lambda _: self.notify())
        except RuntimeError:  # no thread can be started
            self.notify()

    def dismiss_locked(self, error: KestrelError) -> None:
        """Every waiter gets ``error``, at the next ``notify``."""
        # Not where the lock is taken: docs/interrupts.md, rule 3.
        for session in list(self.sessions):
            for waiter in list(session.waiters):
                self.scheduler.fail(waiter, copy(error))

    def cancel_timer(self) -> None:
        """Cancel the timer: it would keep a closed queue alive."""
        if self._timer is not None:
            self._timer.cancel()

    def abandon(self) -> None:
        """In a forked child: every later call raises ``ForkedQueue``. Uses no lock that another thread may hold."""
        self.lock = threading.Lock()
        self.compactor.abandon()
        self.state = ForkedQueue(self._pid)
        self.must_check = True
        self.scheduler.completions.clear()
        self._notes.clear()
        if self.journal is not None and self.held is not None:
            self.held.abandon()
            self.journal.queue._abandon()

    def _check(self) -> None:
        """The invariants; for tests, with nobody else at work."""
        with self.lock:
            check(self.scheduler, self.sessions)
            if self.journal is not None:
                self.journal._check([job.at for job in self.scheduler.jobs.values()])
