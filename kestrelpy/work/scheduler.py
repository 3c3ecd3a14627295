"""The life cycle of jobs, in memory: ready, delayed, reserved and buried jobs, the line of waiters, what is due next.

Rules:
1. No locks, files or clocks: the caller holds the queue's lock and passes the time (seconds, monotonic).
2. A job's own fields (``job.state`` and those that go with it) are the truth. ``repair`` can make every list from them,
   and does so after an exception from outside.
3. A waiter stands in line because none of its tubes has a job for it. Waiters are served first come, first served. A
   waiter that is served leaves every line in the same step.
4. No step costs more than a search in a sorted list of all jobs. ``repair`` is the exception.
5. Completions collect in ``completions``; the caller delivers them after releasing the lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Any

from sortedcontainers import SortedList

from kestrelpy.errors import QueueClosed
from kestrelpy.work.errors import DeadlineSoon
from kestrelpy.work.records import BURIED, DELAYED, READY, RESERVED
from kestrelpy.work.stored import ID_BITS, ID_MASK, URGENT, JobWaiter, SessionState, StoredJob, Tube

MARGIN = 1.0
"""How long before the end of its reservation a waiting session gets ``DeadlineSoon``, in seconds (as in beanstalkd)."""
NEVER = float("inf")
_NO_TIME = -5e-324
"""Stands for a pause that ends at time 0.0, because 0.0 means that there is no pause."""
MOST_DROPPED = 1000
"""How many expired jobs one ``take`` drops, with the lock held, before it gives up for now."""


class Scheduler:
    """All jobs, tubes and waiters of one queue."""

    def __init__(self, max_attempts: int | None = None) -> None:
        self.max_attempts = max_attempts
        self.jobs: dict[int, StoredJob] = {}
        self.tubes: dict[str, Tube] = {"default": Tube("default")}
        self.keys: dict[tuple[str, str], int] = {}
        self.delayed: SortedList[tuple[float, int]] = SortedList()
        self.reserved: SortedList[tuple[float, int]] = SortedList()
        self.expiring: SortedList[tuple[float, int]] = SortedList()
        self.paused: SortedList[tuple[float, str]] = SortedList()
        # By the time at which a wait ends, or a session's waiters get ``DeadlineSoon``.
        self.waiting: SortedList[tuple[float, int, JobWaiter | SessionState]] = SortedList()
        self.completions: dict[JobWaiter, Any] = {}  # jobs and errors for waiters that have left the line
        self.unsaved: dict[int, StoredJob] = {}  # jobs with a count that no record has yet
        self.overdue: dict[int, StoredJob] = {}  # those of them whose time to run is over: to be saved at once
        self.expired: list[StoredJob] = []  # dropped jobs whose end is not written yet
        self.changed_tubes: dict[str, Tube] = {}  # with a count that no record has yet
        self.leaving: deque[SessionState] = deque()  # closed sessions, with waiters, tubes or jobs to be released
        self.next_due = NEVER
        self.stopped_early = False
        self.bytes = self.urgent = self.buried = 0
        self.last_id = self.total_jobs = self.timeouts = self.burials = 0
        self.ended = 0
        """Reservations that are over. With those in ``reserved``, all that there have been: none is counted as it is
        made, which is a hot path.
        """
        self.refused = 0
        """Calls that raised for want of room."""

    # -- tubes ------------------------------------------------------------------------------------------------------

    def forget_unneeded(self, tube: Tube) -> None:
        """Remove the tube if it is empty, and nobody uses it, watches it or has paused it."""
        if not tube.is_needed and tube.name != "default" and self.tubes.get(tube.name) is tube:
            del self.tubes[tube.name]
            if tube.at:
                tube.total_jobs = tube.deletes = tube.pauses = 0
                tube.pause = 0.0
                self.note(tube)
            else:
                self.changed_tubes.pop(tube.name, None)

    def note(self, tube: Tube) -> None:
        """A count of the tube has changed."""
        if not tube.is_changed:
            tube.is_changed = True
            self.changed_tubes[tube.name] = tube

    def make_tube(self, name: str) -> Tube:
        """A new tube. A removed tube of that name whose end is not written yet is used again, with its counts at 0."""
        tube = self.tubes[name] = self.changed_tubes.get(name) or Tube(name)
        return tube

    def pause(self, tube: Tube, seconds: float, now: float) -> None:
        if tube.paused_until:
            self.paused.discard((tube.paused_until, tube.name))
        tube.pause, tube.pauses = seconds, tube.pauses + 1
        if not seconds and not tube.paused_until:
            self.forget_unneeded(tube)
            return
        tube.paused_until = now + seconds or _NO_TIME
        self.paused.add((tube.paused_until, tube.name))  # ``advance`` ends the pause, and serves waiters in slices
        self._expect(tube.paused_until)

    # -- the lists ---------------------------------------------------------------------------------------------------

    def add(self, job: StoredJob, now: float) -> None:
        """Add a new job, whose state and ``sort_key`` are set."""
        self.jobs[job.id] = job
        self.bytes += len(job.body)
        if job.key is not None:
            self.keys[job.tube.name, job.key] = job.id
        if job.expires is not None:
            self.expiring.add(job.expires)
            self._expect(job.expires[0])
        self._enter(job, now)

    def add_plain(self, job: StoredJob) -> None:
        """``add`` for a new job without delay, key or expiry, whose tube has no waiter: the usual case."""
        job_id, tube, priority = job.id, job.tube, job.priority
        self.jobs[job_id] = job
        self.bytes += len(job.body)
        job.sort_key = key = priority << ID_BITS | job_id
        tube.ready.add(key)
        if priority < URGENT:
            tube.urgent += 1
            self.urgent += 1

    def remove_plain(self, job: StoredJob) -> None:
        """``take_out`` and ``remove`` for a reserved job without key or expiry: the usual case."""
        job_id, tube, holder = job.id, job.tube, job.holder
        self.reserved.remove(job.sort_key)
        holder.drop(job)  # type: ignore[union-attr]
        job.holder = None
        tube.reserved -= 1
        self.ended += 1
        del self.jobs[job_id]
        self.bytes -= len(job.body)
        self.unsaved.pop(job_id, None)
        if self.overdue:
            self.overdue.pop(job_id, None)
        if not tube.using and not tube.watching:
            self.forget_unneeded(tube)

    def remove(self, job: StoredJob) -> None:
        """Forget the job. Call ``take_out`` first: the job must be in no list."""
        if self.jobs.pop(job.id, None) is None:
            return
        self.bytes -= len(job.body)
        if job.key is not None and self.keys.get((job.tube.name, job.key)) == job.id:
            del self.keys[job.tube.name, job.key]
        if job.expires is not None:
            self.expiring.discard(job.expires)
        self.unsaved.pop(job.id, None)
        self.overdue.pop(job.id, None)
        self.forget_unneeded(job.tube)

    def take_out(self, job: StoredJob) -> None:
        """Remove the job from the list of its state."""
        tube, state = job.tube, job.state
        if state == RESERVED:
            self.reserved.discard(job.sort_key)
            tube.reserved -= 1
            self.ended += 1
            assert job.holder is not None
            job.holder.drop(job)
            job.holder = None
        elif state == READY:
            tube.ready.discard(job.sort_key)
            if job.priority < URGENT:
                tube.urgent -= 1
                self.urgent -= 1
        elif state == DELAYED:
            self.delayed.discard(job.sort_key)
            tube.delayed.discard(job.sort_key)
        else:
            tube.buried.discard(job.sort_key)
            self.buried -= 1

    def expire(self, job: StoredJob, now: float) -> bool:
        """Drop the job if it has expired; True if it was dropped. A reserved job has its time to run first."""
        if job.expires is None or job.expires[0] > now or job.state == RESERVED:
            return False
        self.take_out(job)
        self._drop(job)
        return True

    def _drop(self, job: StoredJob) -> None:
        """Forget a job that has expired and is in no list; its end is written later."""
        self.remove(job)
        self.expired.append(job)

    def _enter(self, job: StoredJob, now: float) -> None:
        """Add the job to the list of its state, by its ``sort_key``. A ready job may go to a waiter instead."""
        if job.expires is not None and job.expires[0] <= now:
            self._drop(job)
            return
        state = job.state
        if state == READY:
            self.put_ready(job, now)
        elif state == DELAYED:
            self.delayed.add(job.sort_key)
            job.tube.delayed.add(job.sort_key)
            self._expect(job.due)
        else:
            job.tube.buried.add(job.sort_key)
            self.buried += 1

    def put_ready(self, job: StoredJob, now: float) -> None:
        """The job is in no list and becomes ready: give it to the first waiter of its tube, or else to the tube."""
        if job.expires is not None and job.expires[0] <= now:
            self._drop(job)
            return
        tube = job.tube
        job.state, job.sort_key = READY, job.priority << ID_BITS | job.id
        if tube.waiting and not tube.paused_until:
            self._give(job, next(iter(tube.waiting)), now)
            return
        tube.ready.add(job.sort_key)
        if job.priority < URGENT:
            tube.urgent += 1
            self.urgent += 1

    def make_ready(self, job: StoredJob, now: float) -> None:
        """Take the job out of the list of its state, and make it ready. Counts nothing."""
        self.take_out(job)
        self.put_ready(job, now)

    def change_state(self, job: StoredJob, state: int, now: float, *, due: float = 0.0) -> None:
        """Put a job that is in no list into ``state``, which is not RESERVED. Its priority is set already."""
        if state == BURIED:
            self.burials += 1
            due = self.burials
        job.state, job.sort_key = state, (due, job.id)
        self._enter(job, now)

    def move(self, job: StoredJob, tube: Tube, now: float) -> None:
        """Move the job to another tube; it keeps its state."""
        self.take_out(job)
        if job.key is not None:
            self.keys.pop((job.tube.name, job.key), None)
            self.keys[tube.name, job.key] = job.id
        left, job.tube = job.tube, tube
        self._enter(job, now)
        self.forget_unneeded(left)

    # -- reserving ---------------------------------------------------------------------------------------------------

    def take(self, holder: SessionState, now: float) -> StoredJob | None:
        """Reserve the most urgent ready job of the tubes that the session watches; ``None`` if there is none.

        After ``MOST_DROPPED`` expired jobs it stops, returns ``None`` and sets ``stopped_early``: there may be more
        jobs.
        """
        dropped = 0
        while True:
            job = self._take_first(holder)
            if job is None:
                return None
            if job.expires is None or job.expires[0] > now:
                self.reserve(job, holder, now)
                return job
            self._drop(job)
            dropped += 1
            if dropped == MOST_DROPPED:
                self.stopped_early = True
                return None

    def _take_first(self, holder: SessionState) -> StoredJob | None:
        found: Tube | None = None
        best = 0
        for tube in holder.watched.values():
            ready = tube.ready
            if ready and not tube.paused_until:
                first = ready[0]
                if found is None or first < best:
                    found, best = tube, first
        if found is None:
            return None
        job = self.jobs[best & ID_MASK]
        del found.ready[0]
        if job.priority < URGENT:
            found.urgent -= 1
            self.urgent -= 1
        return job

    def reserve(self, job: StoredJob, holder: SessionState, now: float) -> None:
        """Reserve a job that is in no list for this session, for the job's time to run."""
        due = now + job.ttr
        key = (due, job.id)
        job.state, job.sort_key, job.holder = RESERVED, key, holder
        job.reserves += 1
        job.tube.reserved += 1
        self.reserved.add(key)
        holder.hold(job)
        self.unsaved[job.id] = job
        if due < self.next_due:
            self.next_due = due
        if holder.waiters and (holder.wakes is None or due - MARGIN < holder.wakes[0]):
            self.watch_deadline(holder)

    def touch(self, job: StoredJob, now: float) -> None:
        """Begin the time to run of a reserved job again."""
        holder = job.holder
        assert holder is not None
        self.reserved.discard(job.sort_key)
        holder.drop(job)
        job.sort_key = (now + job.ttr, job.id)
        self.reserved.add(job.sort_key)
        holder.hold(job)
        self._expect(job.due)

    def unreserve(self, job: StoredJob, now: float) -> None:
        """Undo a reservation that no caller got: the job is ready, and the reservation is not counted."""
        job.reserves -= 1
        self.make_ready(job, now)

    # -- the line ----------------------------------------------------------------------------------------------------

    def deadline_soon(self, holder: SessionState, now: float) -> int | None:
        """The id of the job whose reservation by this session ends within ``MARGIN``, if the session wants to know."""
        if holder.deadline_soon and holder.held:
            soonest = holder.soonest()
            if soonest is not None and soonest[0] - MARGIN <= now:
                return soonest[1]
        return None

    def enter_line(self, waiter: JobWaiter, until: float) -> None:
        """Put the waiter into the line of each tube that its session watches, until ``until`` at most."""
        waiter.until = until
        waiter.tubes = tuple(waiter.holder.watched.values())
        for tube in waiter.tubes:
            tube.waiting[waiter] = None
        waiter.holder.waiters[waiter] = None
        if until != NEVER:
            waiter.wakes = (until, waiter.number, waiter)
            self.waiting.add(waiter.wakes)
            self._expect(until)
        if waiter.holder.wakes is None:
            self.watch_deadline(waiter.holder)

    def leave_line(self, waiter: JobWaiter) -> bool:
        """Take the waiter out of every line; False if it was in none."""
        if waiter.holder.waiters.pop(waiter, waiter) is waiter:
            return False
        for tube in waiter.tubes:
            tube.waiting.pop(waiter, None)
        if waiter.wakes is not None:
            self.waiting.discard(waiter.wakes)
            waiter.wakes = None
        if not waiter.holder.waiters:
            self.watch_deadline(waiter.holder)
        for tube in waiter.tubes:
            self.forget_unneeded(tube)
        return True

    def watch_deadline(self, holder: SessionState) -> None:
        """Set when the session's waiters get ``DeadlineSoon`` for the reservation that ends first. There is one entry
        for all of them. If that reservation ends earlier, the entry comes up too early, and does no harm.
        """
        if holder.wakes is not None:
            self.waiting.discard(holder.wakes)
            holder.wakes = None
        soonest = holder.soonest() if holder.deadline_soon and holder.waiters else None
        if soonest is not None:
            holder.wakes = (soonest[0] - MARGIN, holder.number, holder)
            self.waiting.add(holder.wakes)
            self._expect(holder.wakes[0])

    def _give(self, job: StoredJob, waiter: JobWaiter, now: float) -> None:
        self.reserve(job, waiter.holder, now)
        # Before it leaves the line: after an interrupt the waiter is in the line, has its completion, or both.
        self.completions[waiter] = waiter.holder.handle(job)
        self.leave_line(waiter)

    def fail(self, waiter: JobWaiter, error: Exception) -> None:
        """Complete the waiter with ``error``, if it is in line."""
        if waiter in waiter.holder.waiters:
            self.completions[waiter] = error
            self.leave_line(waiter)

    def serve_one(self, tube: Tube, now: float) -> bool:
        """Serve the first waiter of a tube that was paused, or drop an expired job.

        False if the tube has no waiter, or no ready job.
        """
        if tube.waiting and tube.ready:
            job = self.jobs[tube.ready[0] & ID_MASK]
            if not self.expire(job, now):
                self.take_out(job)
                self._give(job, next(iter(tube.waiting)), now)
            return True
        return False

    def _expect(self, when: float) -> None:
        if when < self.next_due:
            self.next_due = when

    # -- lists for callers -------------------------------------------------------------------------------------------

    def first_of(self, tube: Tube, count: int) -> list[StoredJob]:
        """Up to ``count`` jobs of the tube that are not reserved: ready ones, then delayed, then buried."""
        keys = [key & ID_MASK for key in tube.ready[:count]]
        for listed in (tube.delayed, tube.buried):
            keys += [key[1] for key in listed[: count - len(keys)]]
        return [self.jobs[key] for key in keys]

    def first_of_priorities(self, name: str, limit: int, now: float) -> list[StoredJob]:
        """Of each priority that ready jobs of a tube have, the first job that has not expired; up to ``limit``."""
        tube = self.tubes.get(name)
        found: list[StoredJob] = []
        least = 0
        while tube is not None and len(found) < limit:
            key = next(tube.ready.irange(least), None)
            if key is None:
                break
            job = self.jobs[key & ID_MASK]
            if not self.expire(job, now):
                found.append(job)
                least = (job.priority + 1) << ID_BITS
        return found

    def page(self, name: str, state: int, last: object, count: int) -> list[tuple[object, StoredJob]]:
        """The next ``count`` jobs of a tube in a state, after sort key ``last``, with their sort keys. For RESERVED,
        the jobs of other tubes are among them.
        """
        tube = self.tubes.get(name)
        if tube is None:
            return []
        found = islice(self._sorted_of(tube, state).irange(last, None, (False, True)), count)
        if state == READY:
            return [(key, self.jobs[key & ID_MASK]) for key in found]
        return [(key, self.jobs[key[1]]) for key in found]

    def ids(self, name: str, states: Iterable[int]) -> list[int]:
        """The ids of the jobs of a tube in these states, state by state, each in the order of ``page``. O(jobs)."""
        tube = self.tubes.get(name)
        if tube is None:
            return []
        found: list[int] = []
        for state in states:
            keys = self._sorted_of(tube, state)
            found += (key & ID_MASK for key in keys) if state == READY else (key[1] for key in keys)
        return [each for each in found if self.jobs[each].tube is tube]

    def _sorted_of(self, tube: Tube, state: int) -> Any:
        return {READY: tube.ready, DELAYED: tube.delayed, BURIED: tube.buried, RESERVED: self.reserved}[state]

    # -- time --------------------------------------------------------------------------------------------------------

    def advance(self, now: float, limit: int) -> None:
        """Handle up to ``limit`` due events. If more are due, ``next_due`` is ``now`` afterwards."""
        for step in (
            self._release_one,
            self._delay_over,
            self._reservation_over,
            self._pause_over,
            self._job_expired,
            self._wait_over,
        ):
            while step(now):
                limit -= 1
                if limit <= 0:
                    self.next_due = now
                    return
        self.next_due = min(
            self.delayed[0][0] if self.delayed else NEVER,
            self.reserved[0][0] if self.reserved else NEVER,
            self.paused[0][0] if self.paused else NEVER,
            self.expiring[0][0] if self.expiring else NEVER,
            self.waiting[0][0] if self.waiting else NEVER,
        )

    def release_later(self, holder: SessionState, now: float) -> None:
        """Let ``advance`` release the waiters, tubes and jobs of a closed session, a slice at a time."""
        self.leaving.append(holder)
        self._expect(now)

    def _release_one(self, now: float) -> bool:
        """Release one waiter, one tube or one job of the first session that leaves."""
        if not self.leaving:
            return False
        holder = self.leaving[0]
        if holder.waiters:
            self.fail(next(iter(holder.waiters)), QueueClosed("this session was closed"))
        elif holder.left:
            _, tube = holder.left.popitem()
            tube.watching -= 1
            self.forget_unneeded(tube)
        elif holder.using is not None:
            tube, holder.using = holder.using, None
            tube.using -= 1
            self.forget_unneeded(tube)
            holder.finish()
        elif holder.held:
            self.make_ready(holder.held[next(iter(holder.held))], now)
        else:
            holder.finish()
            self.leaving.popleft()
        return True

    def _delay_over(self, now: float) -> bool:
        if not self.delayed or self.delayed[0][0] > now:
            return False
        self.make_ready(self.jobs[self.delayed[0][1]], now)
        return True

    def _reservation_over(self, now: float) -> bool:
        if not self.reserved or self.reserved[0][0] > now:
            return False
        job = self.jobs[self.reserved[0][1]]
        self.take_out(job)
        job.timeouts += 1
        job.new_timeouts += 1
        self.timeouts += 1
        self.unsaved[job.id] = self.overdue[job.id] = job
        if self.attempts_used_up(job.timeouts + job.releases):
            job.buries += 1
            self.change_state(job, BURIED, now)
        else:
            self.put_ready(job, now)
        return True

    def attempts_used_up(self, attempts: int) -> bool:
        """Whether ``attempts`` (timeouts and releases of a job) have reached ``max_attempts``."""
        return self.max_attempts is not None and attempts >= self.max_attempts

    def _pause_over(self, now: float) -> bool:
        if not self.paused or self.paused[0][0] > now:
            return False
        until, name = self.paused[0]
        tube = self.tubes[name]
        if tube.paused_until == until:
            if self.serve_one(tube, now):  # the pause goes on for newcomers until all waiters are served
                return True
            tube.paused_until = tube.pause = 0.0
            self.forget_unneeded(tube)
        self.paused.discard((until, name))
        return True

    def _job_expired(self, now: float) -> bool:
        if not self.expiring or self.expiring[0][0] > now:
            return False
        job = self.jobs[self.expiring[0][1]]
        del self.expiring[0]
        if job.state != RESERVED:  # a reserved job has its time to run, and is dropped when it comes back
            self.take_out(job)
            self._drop(job)
        return True

    def _wait_over(self, now: float) -> bool:
        if not self.waiting or self.waiting[0][0] > now:
            return False
        who = self.waiting[0][2]
        holder = who.holder if isinstance(who, JobWaiter) else who
        soon = self.deadline_soon(holder, now)
        if soon is not None:
            self.fail(who if isinstance(who, JobWaiter) else next(iter(who.waiters)), DeadlineSoon(soon))
        elif not isinstance(who, JobWaiter):  # the reservation of this entry has ended
            self.watch_deadline(who)
        else:
            self.fail(who, holder.nothing_ready())
        return True
