"""What a work queue writes about its jobs, and the turns in which it is used.

Rules:
1. A change is written before memory knows it: what could not be written has not happened, and whoever asked is told.
   What time alone does (the end of a reservation) happens all the same; it is written as soon as that is possible.
2. Work is done in slices, with the lock let go between.

NOTE ON LOCKING: ``_lock`` (W) guards the machine and the log. It is held for memory work and for appending to the
journal; a delete on a full disk also waits for a sync under it. Never while somebody who waits is told. ``_settling``
(Z) comes before it: one thread at a time shortens the journal.
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
from typing import TYPE_CHECKING
from weakref import WeakSet

from kestrelpy import ForkedQueue, QueueDiskFull, QueueFull
from kestrelpy.errors import KestrelError
from kestrelpy.work import _records as records
from kestrelpy.work._held_room import NO_ROOM, Gone, HeldRoom
from kestrelpy.work._log import Log, NoLog
from kestrelpy.work._mending import check, mend
from kestrelpy.work._names import check_tube
from kestrelpy.work._records import (
    BURIED,
    DELAYED,
    EXPIRED,
    GONE,
    READY,
    RESERVED,
    TIMED_OUT,
    Origin,
    State,
    pack_gone,
)
from kestrelpy.work._turns import News, Turn
from kestrelpy.work.errors import JobNotFound
from kestrelpy.work.scheduler import NEVER, Scheduler
from kestrelpy.work.stored import JobWaiter, StoredJob

if TYPE_CHECKING:
    from kestrelpy import Clock
    from kestrelpy.clock import Timer
    from kestrelpy.work._journal import JobJournal
    from kestrelpy.work.session import Job, Session
    from kestrelpy.work.stored import Tube

    Orphan = Job | JobWaiter | tuple[dict[str, Tube], Tube]

TICK = 100
"""How much of what is due a call does before it does its own."""
MUCH = 1000
"""How much of it the timer does in one go."""
BREATH = 0.001
"""For how many seconds whoever works in slices leaves the lock to others: one that takes it again at once is never too
late for it, and those who wait always are.
"""
SHORTEST = 1e-6
"""In seconds: a shorter wait may end before its time, as clocks count nanoseconds and not parts of them."""


class Keeping:
    """The machine, the log, the lock, and the turns that are taken with it."""

    name: str
    _clock: Clock
    _disk_clock: Clock
    _interval: float
    _always: bool
    _max_tubes: int | None

    def _set_up(self, queue: JobJournal | None, segment_bytes: int, max_attempts: int | None) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._settling = threading.Lock()
        self._turn = Turn(self)
        self._news = News(self)
        self._machine = Scheduler(max_attempts)
        self._sessions: WeakSet[Session] = WeakSet()  # that are open, and that somebody has
        self._orphans: deque[Orphan] = deque()
        self._numbers = itertools.count(1)  # of those who wait
        self._state: Exception | None = None  # why it can't be used
        self._disturbed = False  # an exception from outside struck while the lock was held
        self._refused: ValueError | None = None  # the error of our own that is being raised
        self._at_work: Sequence[StoredJob] = ()  # about whom the last records were written, or are being written
        self._timer: Timer | None = None
        self._armed_at = NEVER
        self._settle_timer: Timer | None = None
        self._settling_soon = False
        self._totals_at = 0
        self._saved_totals: records.Totals | None = None
        self._migrated = 0
        self._unsaid: list[int] = []  # jobs that are gone, and the journal had no room to say so
        self._said = 0  # of how many slots of the held room the journal says what they say
        self._segment_bytes = segment_bytes
        self._journal = None if queue is None else Log(queue, segment_bytes, self._look_locked)
        self._log: Log | NoLog = self._journal or NoLog()
        self._append = self._log.append
        self._held = None if queue is None else HeldRoom(queue)
        self._jobs_held = sys.maxsize if queue is None else 0  # room is held for the end of so many jobs

    def _next_number(self) -> int:
        return next(self._numbers)

    def _live_locked(self, job_id: int, now: float) -> StoredJob:
        """The job of that id. Raises ``JobNotFound``, also if its life is over and nobody has come to drop it yet."""
        live = self._machine.jobs.get(job_id)
        if live is None or (live.expires is not None and self._machine.expire(live, now)):
            raise JobNotFound(job_id)
        return live

    def _tube_locked(self, name: str) -> Tube:
        """The tube of that name, made if need be. Raises ``InvalidName``, ``QueueFull``."""
        machine = self._machine
        tube = machine.tubes.get(name)
        if tube is None:
            check_tube(name)
            if self._max_tubes is not None and len(machine.tubes) >= self._max_tubes:
                raise QueueFull(f"work queue {self.name} has max_tubes={self._max_tubes}")
            tube = machine.make_tube(name)
        return tube

    # -- turns -------------------------------------------------------------------------------------------------------

    def _begin_locked(self) -> float:
        """What time it is. Time has done its work by then, or a slice of it. Raises ``QueueClosed``.

        Hot paths ask for the time themselves, and come here if that is not before ``next_due``: it is long past where
        there is something wrong.
        """
        if self._state is not None:
            raise copy(self._state)  # one object would keep what each caller had in hand
        now = self._clock.monotonic()
        if self._disturbed:
            self._mend_locked(now)
        machine = self._machine
        if now >= machine.next_due:
            self._advance_locked(now, TICK)
        if self._orphans:  # after that: a note that comes later makes the next call come here
            self._read_notes_locked(now)
        return now

    def _leave_note(self, orphan: Orphan) -> None:
        """The garbage collector has found what nobody has any more; without a lock: it may strike anywhere."""
        self._orphans.append(orphan)
        self._machine.next_due = -NEVER

    def _read_notes_locked(self, now: float) -> None:
        """A job that nobody got goes back, a task that is gone leaves the line, a session's tubes may go."""
        machine = self._machine
        while self._orphans:
            orphan = self._orphans.popleft()
            if isinstance(orphan, JobWaiter):
                machine.leave_line(orphan)
            elif isinstance(orphan, tuple):
                watched, using = orphan
                for tube in watched.values():
                    tube.watching -= 1
                using.using -= 1
                for tube in (*watched.values(), using):
                    machine.forget_unneeded(tube)
            elif orphan._is_held():
                machine.unreserve(orphan._live, now)
            del orphan  # a waiter may be the last to have what has arrived for it, which is noted in turn

    def _advance_locked(self, now: float, limit: int) -> None:
        machine = self._machine
        machine.advance(now, limit)
        if machine.overdue:
            self._save_locked(list(machine.overdue.values()))

    def _mend_locked(self, now: float) -> None:
        """An exception from outside struck in the middle of something: make the lists, the log and the journal agree.

        Memory is right: what a record said of the jobs that were at work is said anew, as memory has it.
        """
        machine, log = self._machine, self._log
        sessions = list(self._sessions)
        for _ in range(len(self._orphans)):  # tubes are counted anew, by the sessions there are
            orphan = self._orphans.popleft()
            if not isinstance(orphan, tuple):
                self._orphans.append(orphan)
        mend(machine, sessions, now)
        log.realign()
        self._saved_totals = None
        for tube in machine.tubes.values():
            machine.note(tube)
        at_work, self._at_work, self._disturbed = self._at_work, (), False
        for job in at_work:
            is_live = machine.jobs.get(job.id) is job
            if is_live and job.id in self._unsaid:
                self._unsaid.remove(job.id)
            try:
                if is_live:
                    self._rewrite_locked(job, now)
                else:
                    machine.last_id = max(machine.last_id, job.id)
                    log.over(self._append(pack_gone(GONE, EXPIRED, job.id)))
            except QueueDiskFull:  # later, when there is room
                if is_live:
                    machine.unsaved[job.id] = job
                    self._void_locked(job.id)
                else:
                    self._unsaid.append(job.id)

    def _end_locked(self) -> None:
        """Before the lock is let go."""
        machine = self._machine
        if machine.expired:
            self._write_expired_locked()
        if machine.unsaved and not self._settling_soon:
            self._settle_later(self._interval)
        if machine.next_due < self._armed_at:
            self._arm_locked()

    def _note(self, error: BaseException) -> None:
        """It was raised with the lock held. Errors of our own are raised where nothing is half done; any other, such as
        a ``TypeError``, may come out of the middle of something.
        """
        refused, self._refused = self._refused, None
        if not (isinstance(error, KestrelError | OSError) or error is refused):
            self._disturbed = True
            self._machine.next_due = -NEVER

    def _refusal_locked(self, reason: str) -> ValueError:
        """To be raised now, before anything is changed."""
        self._refused = ValueError(reason)
        return self._refused

    def _arm_locked(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_at = self._machine.next_due
        wait = self._armed_at - self._clock.monotonic()
        wait = max(wait, SHORTEST) if wait > 0 else BREATH
        try:
            self._timer = self._clock.call_later(wait, self._tick, on_lost=self._timer_lost)
        except RuntimeError:  # no thread can be started
            self._armed_at = NEVER  # the next call sets another one, and sees to what is due by itself

    def _timer_lost(self, _error: BaseException) -> None:
        self._armed_at = NEVER  # the next call sets another one

    def _tick(self) -> None:
        """Something is due. On the clock's thread."""
        with self._lock:
            self._armed_at, self._timer = NEVER, None
        try:
            with self._unheard(), self._news, self._lock, self._turn as now:
                if now >= self._machine.next_due:
                    self._advance_locked(now, MUCH)
        except KestrelError:  # it is closed, or has failed: whoever uses it is told
            return

    def _unheard(self) -> contextlib.AbstractContextManager[None]:
        """For what raises nothing, whatever is raised in it: closing tells of a journal that has failed."""
        return contextlib.nullcontext() if self._journal is None else self._journal.queue.unheard()

    def _breathe(self) -> None:
        """Between two slices of one call: let others have the lock. Without it, and in real time."""
        threading.Event().wait(BREATH)

    def _tell(self) -> None:
        """Tell those who have left the line what became of it, whatever they raise in what they call back: the last of
        it is raised in the end. Without the lock.
        """
        told, raised = self._machine.told, None
        for waiter, outcome in list(told.items()):
            try:
                waiter.tell(outcome)
                told.pop(waiter, None)
            except BaseException as struck:  # an interrupt, perhaps, and it was not told: it stays for the next call
                raised = struck
        if raised is not None:
            raise raised

    # -- what is written ---------------------------------------------------------------------------------------------

    def _write_state_locked(self, job: StoredJob, state: State) -> None:
        """``job`` is about to be in this state. Raises as ``Log.append``, and nothing is changed."""
        self._at_work = (job,)
        at = self._append(records.encode_state(job.id, job.tube.name, state))
        self._saved_locked(job, at)

    def _write_states_locked(self, jobs: list[StoredJob], states: list[State]) -> None:
        """The same of many: all are written, or none."""
        if jobs:
            self._at_work = jobs
            pairs = zip(jobs, states, strict=True)
            ids = self._log.append_many([records.encode_state(job.id, job.tube.name, state) for job, state in pairs])
            for job, at in zip(jobs, ids, strict=True):
                self._saved_locked(job, at)

    def _write_tube_locked(self, tube: Tube, pauses: int, pause: float, until_ms: int) -> None:
        """``tube`` has these pauses, or is about to have. Raises as ``Log.append``, and nothing is changed."""
        figures = (tube.name, tube.total_jobs, tube.deletes, pauses, pause, until_ms)
        at = self._append(records.encode_tube(records.TubeFigures(*figures)))
        self._log.over(tube.at)
        tube.at = at

    def _saved_locked(self, job: StoredJob, at: int) -> None:
        """Record ``at`` says all there is to say about the job, but for how it was put."""
        self._log.over(job.state_at)
        job.state_at = at
        job.new_timeouts = 0
        self._machine.unsaved.pop(job.id, None)
        self._machine.overdue.pop(job.id, None)

    def _state_of(self, job: StoredJob, now: float) -> State:
        """As it would be after a restart: a reserved job is ready then."""
        state = READY if job.state == RESERVED else job.state
        due_ms = self._wall_ms(job.due - now) if state == DELAYED else 0
        place = int(job.due) if state == BURIED else 0
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
            place,
            job.new_timeouts,
        )

    def _as_ready(self, job: StoredJob, now: float) -> State:
        return self._state_of(job, now)._replace(state=READY, due_ms=0, place=0)

    def _wall_ms(self, seconds: float = 0.0) -> int:
        """The instant in so many seconds, in milliseconds since the Unix epoch."""
        return max(0, self._clock.time_ns() // 1_000_000 + round(seconds * 1000))

    def _save_locked(self, jobs: list[StoredJob]) -> None:
        """Write the states of these; later, if that can't be done now."""
        now = self._clock.monotonic()
        try:
            with self._unheard():
                self._write_states_locked(jobs, [self._state_of(job, now) for job in jobs])
        except (OSError, KestrelError):  # they stay in machine.unsaved
            self._settle_later(self._interval)

    def _write_gone_locked(self, job: StoredJob, cause: int) -> None:
        """It is about to be removed. Raises as ``Log.append``, and nothing is changed; on a full disk only if no room
        was held.
        """
        log = self._log
        self._at_work = (job,)
        try:
            log.over(self._append(pack_gone(GONE, cause, job.id)))
        except QueueDiskFull as error:
            self._write_apart_locked(job.id, cause, error)
        log.over(job.at)
        if job.state_at:
            log.over(job.state_at)

    def _write_apart_locked(self, job_id: int, cause: int, refused: QueueDiskFull) -> None:
        """The journal has ``refused`` to take that the job is gone: say it where room was held for it."""
        log, held = self._journal, self._held
        assert log is not None
        assert held is not None
        log.queue.sync_under_lock()
        try:
            held.write(Gone(job_id, cause, log.last_id))
        except OSError as error:
            if error.errno in NO_ROOM:
                raise refused from None
            raise
        if not (self._always or log.queue.never_syncs):  # no later sync of the journal's own would do it
            held.sync()
        self._unsaid.append(job_id)
        self._jobs_held = held.free
        self._settle_later(self._interval)

    def _void_locked(self, job_id: int) -> None:
        if self._held is not None:
            with contextlib.suppress(OSError):
                self._held.void(job_id)

    def _hold_room_locked(self, jobs: int) -> None:
        """Have room for the end of all jobs, and of so many more. Raises ``QueueDiskFull``, ``OSError``."""
        log, held = self._journal, self._held
        assert log is not None
        assert held is not None
        try:
            held.hold(len(self._machine.jobs) + jobs)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise QueueDiskFull(log.queue.directory) from None
            raise
        finally:
            self._jobs_held = held.free

    def _write_expired_locked(self) -> None:
        """The end of those that have expired. If it can't be written they expire again after a restart."""
        expired, self._machine.expired = self._machine.expired, []
        with self._unheard():
            for job in expired:
                try:
                    self._write_gone_locked(job, TIMED_OUT if job.new_timeouts else EXPIRED)
                except (OSError, KestrelError):
                    self._log.over(job.at)
                    self._log.over(job.state_at)

    def sync(self) -> None:
        """All that returned before is on disk when this returns. Raises ``DurabilityUnknown``."""
        self._log.sync()
        if self._held is not None:
            self._held.sync()

    # -- keeping the journal short: see _settling ----------------------------------------------------------------------

    def _look_locked(self) -> None:
        raise NotImplementedError

    def _settle_later(self, seconds: float) -> None:
        raise NotImplementedError

    def _rewrite_locked(self, job: StoredJob, now: float) -> None:
        """Write it anew, with its state. Raises as ``Log.append``."""
        self._at_work = (job,)
        at = self._append(records.encode_put(self._origin_of(job, now), job.body, self._state_of(job, now)))
        self._log.over(job.at)
        job.at = at
        self._saved_locked(job, 0)

    def _origin_of(self, job: StoredJob, now: float) -> Origin:
        added_ms = self._wall_ms(job.added - now)
        expires_ms = 0 if job.expires is None else self._wall_ms(job.expires[0] - now)
        return Origin(job.id, job.tube.name, job.key, job.priority, job.delay, job.ttr, added_ms, expires_ms)

    def _abandon(self) -> None:
        """In a forked child: every later call says so, without touching what another thread may have held."""
        self._lock, self._settling = threading.Lock(), threading.Lock()
        self._state = ForkedQueue(self._pid)
        self._machine.next_due = -NEVER
        self._machine.told.clear()
        self._orphans.clear()
        if self._journal is not None and self._held is not None:
            self._held.abandon()
            self._journal.queue._abandon()

    def _check(self) -> None:
        """The invariants; for tests, with nobody else at work."""
        with self._lock:
            check(self._machine, self._sessions)
            if self._journal is not None:
                self._journal._check([job.at for job in self._machine.jobs.values()])
