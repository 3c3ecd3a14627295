"""What time does to jobs: delays, reservations, pauses, lives and waits that are over; a bounded piece at a time."""

from __future__ import annotations

from kestrelpy.errors import QueueEmpty
from kestrelpy.work._holder import Holder
from kestrelpy.work._machine import NEVER, Machine
from kestrelpy.work._records import BURIED, RESERVED
from kestrelpy.work.errors import DeadlineSoon


class Due(Machine):
    """The machine, with time going on."""

    def advance(self, now: float, limit: int) -> None:
        """Do what is due, at most ``limit`` of it: if there is more, ``next_due`` says now."""
        for step in (
            self._left_behind,
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

    def leave_behind(self, holder: Holder, now: float) -> None:
        """What a session that is gone had reserved goes back, a slice at a time."""
        self.leaving.append(holder)
        self._expect(now)

    def _left_behind(self, now: float) -> bool:
        if not self.leaving:
            return False
        held = self.leaving[0].held
        if held:
            self.make_ready(held[next(iter(held))], now)
        if not held:
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
        if self.is_worn_out(job.timeouts + job.releases):
            job.buries += 1
            self.settle_into(job, BURIED, now)
        else:
            self.put_ready(job, now)
        return True

    def is_worn_out(self, attempts: int) -> bool:
        """Whether a job with so many timeouts and releases has been tried as often as it may."""
        return self.max_attempts is not None and attempts >= self.max_attempts

    def _pause_over(self, now: float) -> bool:
        if not self.paused or self.paused[0][0] > now:
            return False
        until, name = self.paused[0]
        tube = self.tubes[name]
        if tube.paused_until == until:
            if self.serve_one(tube, now):  # until all are served the pause goes on for those who come
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
        if job.state != RESERVED:  # one that is has its time to run; when it comes back, it goes
            self.take_out(job)
            self._drop(job)
        return True

    def _wait_over(self, now: float) -> bool:
        if not self.waiting or self.waiting[0][0] > now:
            return False
        who = self.waiting[0][2]
        holder = who if isinstance(who, Holder) else who.holder
        soon = self.deadline_soon(holder, now)
        if soon is not None:
            self.fail(next(iter(who.waiters)) if isinstance(who, Holder) else who, DeadlineSoon(soon))
        elif isinstance(who, Holder):  # the reservation that was to be told of has ended
            self.watch_deadline(who)
        else:
            self.fail(who, QueueEmpty("no job was ready in time"))
        return True
