"""What becomes of the jobs of a work queue: deleted, released, buried, kicked, moved; and tubes that are paused."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING

from kestrelpy import QueueClosed
from kestrelpy.work import _records as records
from kestrelpy.work._keeping import MUCH
from kestrelpy.work._listing import Listing
from kestrelpy.work._options import check_priority, check_seconds
from kestrelpy.work._putting import Putting
from kestrelpy.work._records import BURIED, DELAYED, DELETED, READY, RESERVED, State
from kestrelpy.work.errors import JobNotFound, NotReserved, TubeNotFound
from kestrelpy.work.stored import StoredJob

if TYPE_CHECKING:
    from kestrelpy.work.session import Job, Session

_STEP = 500
"""How many jobs are kicked or cleared in one go."""


class Changing(Listing, Putting):
    """The part of a work queue that changes what is there."""

    # -- deleting ----------------------------------------------------------------------------------------------------

    def delete(self, job_id: int) -> None:
        """Delete a job that is ready, delayed or buried. Raises ``JobNotFound``, ``NotReserved`` if a session has it.

        Needs no room on disk but what its put has held: ``QueueDiskFull`` is left for a disk that was full before a
        version that holds room opened the queue, and for one that needs new room where something is overwritten.
        """
        self._delete_by(None, job_id)

    def _delete_by(self, session: Session | None, job_id: int) -> None:
        with self._news, self._lock, self._turn as now:
            if session is not None:
                session._check_open()
            live = self._live_locked(job_id, now)
            if live.state == RESERVED and live.holder is not session:
                raise NotReserved(job_id)
            self._delete_locked(live)
        if self._always:
            self.sync()

    def _delete_reserved(self, job: Job) -> None:
        machine = self._machine
        with self._lock:  # a turn, written out: this is a hot path
            try:
                if self._clock.monotonic() >= machine.next_due:
                    self._begin_locked()
                self._delete_locked(self._of_locked(job))
            except BaseException as error:
                self._note(error)
                raise
            if machine.next_due < self._armed_at or machine.expired:
                self._end_locked()
        if machine.told:
            self._tell()
        if self._always:
            self.sync()

    def _delete_locked(self, live: StoredJob) -> None:
        self._write_gone_locked(live, DELETED)
        machine, tube = self._machine, live.tube
        tube.deletes += 1
        if not tube.is_changed:
            machine.note(tube)
        if live.state != RESERVED or live.key or live.expires:
            machine.take_out(live)
            machine.remove(live)
        else:
            machine.end_plain(live)

    # -- what a session does with its jobs -----------------------------------------------------------------------------

    def _of_locked(self, job: Job) -> StoredJob:
        """The job that this handle has reserved."""
        if job._is_held():
            return job._live
        raise NotReserved(job.id) if job.id in self._machine.jobs else JobNotFound(job.id)

    def _release(self, job: Job, priority: int | None, delay: float) -> bool:
        delay = check_seconds("delay", delay)
        if priority is not None:
            priority = check_priority(priority)
        with self._news, self._lock, self._turn as now:
            live, machine = self._of_locked(job), self._machine
            is_worn_out = machine.is_worn_out(live.timeouts + live.releases + 1)
            state = BURIED if is_worn_out else DELAYED if delay else READY
            new = self._state_of(live, now)._replace(
                state=state,
                priority=live.priority if priority is None else priority,
                delay=delay,
                due_ms=self._wall_ms(delay) if state == DELAYED else 0,
                releases=live.releases + 1,
                buries=live.buries + is_worn_out,
                place=machine.places + 1 if is_worn_out else 0,
            )
            self._become_locked(live, new, now, due=now + delay)
        if self._always:
            self.sync()
        return not is_worn_out

    def _bury(self, job: Job, priority: int | None) -> None:
        if priority is not None:
            priority = check_priority(priority)
        with self._news, self._lock, self._turn as now:
            live = self._of_locked(job)
            new = self._state_of(live, now)._replace(
                state=BURIED,
                priority=live.priority if priority is None else priority,
                buries=live.buries + 1,
                place=self._machine.places + 1,
            )
            self._become_locked(live, new, now)
        if self._always:
            self.sync()

    def _become_locked(self, live: StoredJob, new: State, now: float, *, due: float = 0.0) -> None:
        """Write the new state of a job, and then take it on."""
        self._write_state_locked(live, new)
        self._machine.take_out(live)
        live.priority, live.delay = new.priority, new.delay
        live.releases, live.buries, live.kicks = new.releases, new.buries, new.kicks
        self._machine.settle_into(live, new.state, now, due=due)

    def _touch(self, job: Job) -> None:
        with self._news, self._lock, self._turn as now:
            self._machine.touch(self._of_locked(job), now)

    def _time_left(self, job: Job) -> float:
        with self._news, self._lock, self._turn as now:
            live = job._live
            if job._session is not None:
                is_running = job._is_held()
            else:
                is_running = live.state in (DELAYED, RESERVED) and self._machine.jobs.get(live.id) is live
            return max(0.0, live.due - now) if is_running else 0.0

    def _unreserve(self, job: Job) -> None:
        """A job that nobody got to see goes back. No error if its reservation is over."""
        try:
            with self._news, self._lock, self._turn as now:
                if job._is_held():
                    self._machine.unreserve(job._live, now)
        except QueueClosed:
            return

    # -- what anybody may do -------------------------------------------------------------------------------------------

    def kick(self, n: int, tube: str = "default") -> int:
        """Make up to ``n`` jobs ready: buried ones if there are any, else delayed ones; how many it were.

        In slices; others come in between. Raises ``QueueDiskFull``, with what was done before it done.
        """
        n = index(n)
        done = 0
        state: int | None = None
        while done < n:
            with self._news, self._lock, self._turn as now:
                where = self._machine.tubes.get(tube)
                if where is None:
                    break
                state = (BURIED if where.buried else DELAYED) if state is None else state
                places = (where.buried if state == BURIED else where.delayed)[: min(_STEP, n - done)]
                done += self._kick_locked([self._machine.jobs[place[1]] for place in places], now)
            if len(places) < _STEP or done >= n:
                break
            self._breathe()
        if done and self._always:
            self.sync()
        return done

    def kick_job(self, job_id: int) -> None:
        """Make a buried or delayed job ready. Raises ``JobNotFound`` for any other."""
        with self._news, self._lock, self._turn as now:
            live = self._live_locked(job_id, now)
            if live.state not in (BURIED, DELAYED):
                raise JobNotFound(job_id, "it is neither buried nor delayed")
            self._kick_locked([live], now)
        if self._always:
            self.sync()

    def _kick_locked(self, lives: list[StoredJob], now: float) -> int:
        """How many of them live still."""
        lives = [live for live in lives if not self._machine.expire(live, now)]
        self._write_states_locked(lives, [self._as_ready(live, now)._replace(kicks=live.kicks + 1) for live in lives])
        for live in lives:
            live.kicks += 1
            self._machine.make_ready(live, now)
        return len(lives)

    def move(self, job_id: int, tube: str) -> None:
        """To another tube; its state, delay and place stay.

        Raises ``JobNotFound``, ``NotReserved`` if a session has it, ``DuplicateJob``, ``InvalidName``, ``QueueFull``.
        """
        with self._news, self._lock, self._turn as now:
            live = self._live_locked(job_id, now)
            if live.state == RESERVED:
                raise NotReserved(job_id)
            where = self._machine.tubes.get(tube) or self._tube_locked(tube)
            if where is live.tube:
                return
            if live.key is not None:
                self._check_key_locked(where, live.key, now)
            self._at_work = (live,)
            try:
                at = self._append(records.encode_state(live.id, tube, self._state_of(live, now)))
            except BaseException:
                self._machine.forget_unneeded(where)
                raise
            self._saved_locked(live, at)
            self._machine.move(live, where, now)
        if self._always:
            self.sync()

    def clear(self, tube: str = "default") -> int:
        """Delete all jobs of a tube that are not reserved; how many. In slices; others come in between."""
        done = 0
        while True:
            with self._news, self._lock, self._turn:
                where = self._machine.tubes.get(tube)
                lives = [] if where is None else self._first_of_locked(where, _STEP)
                self._clear_locked(lives)
            done += len(lives)
            if len(lives) < _STEP:
                break
            self._breathe()
        if done and self._always:
            self.sync()
        return done

    def _clear_locked(self, lives: list[StoredJob]) -> None:
        for live in lives:
            self._delete_locked(live)

    def pause_tube(self, tube: str, seconds: float) -> None:
        """Give out no job of this tube for so long; 0 ends a pause. Raises ``TubeNotFound``."""
        seconds = check_seconds("a pause", seconds)
        with self._news, self._lock, self._turn as now:
            where = self._machine.tubes.get(tube)
            if where is None:
                raise TubeNotFound(tube)
            until_ms = self._wall_ms(seconds) if seconds else 0
            self._write_tube_locked(where, where.pauses + 1, seconds, until_ms)
            self._machine.pause(where, seconds, now)
            self._advance_locked(now, MUCH)  # whoever waited for its end
        if self._always:
            self.sync()
