"""How the journal of a work queue is kept short.

Rules:
1. Nothing is committed before the queue's counters are written: so they are exact after a crash. If there is no room
   for them, nothing goes past the counters that were written last.
2. Nothing is committed before what made it be over is on disk.
3. Old live records are written anew when the journal is longer than they explain: bounded work at a time.

NOTE ON LOCKING: ``_settling`` (Z) is held for all of it, ``_lock`` (W) for slices; neither while the journal is synced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from kestrelpy import QueueClosed, QueueDiskFull
from kestrelpy.errors import KestrelError
from kestrelpy.work import _records as records
from kestrelpy.work._keeping import Keeping
from kestrelpy.work._log import FRAME_BYTES, SLICE
from kestrelpy.work._records import EXPIRED, GONE, PUT_BYTES, pack_gone

if TYPE_CHECKING:
    from kestrelpy.work.stored import Tube

OVERHEAD_BYTES = PUT_BYTES + FRAME_BYTES + 16
"""About what a live job takes in the journal beside its body."""
_ROUNDS = 8


class Settling(Keeping):
    """The part of a work queue that forgets what is over."""

    def _look_locked(self) -> None:
        """Something was written since the last look: settle before long, at once if the journal is too long."""
        log = self._journal
        assert log is not None
        bound = log.bound(self._live_bytes_locked())
        if log.bytes > bound:
            log.look_at = log.bytes + self._segment_bytes
            self._maintain_in(0, None)
        else:
            log.look_at = bound
            self._settle_later(self._interval)

    def _settle_later(self, seconds: float) -> None:
        if self._journal is not None and not self._settling_soon:
            self._settling_soon = True
            self._maintain_in(seconds, self._maintenance_lost)

    def _maintain_in(self, seconds: float, on_lost: Callable[[BaseException], object] | None) -> None:
        assert self._journal is not None
        try:
            self._settle_timer = self._disk_clock.call_later(seconds, self._maintain, on_lost=on_lost)
        except RuntimeError:  # no thread can be started: the next append tries again
            self._settling_soon = False
            self._journal.look_at = -1

    def _maintenance_lost(self, _error: BaseException) -> None:
        self._settling_soon = False

    def _maintain(self) -> None:
        """On the clock's thread."""
        self._settling_soon = False
        if self._state is not None:
            return
        try:
            with self._unheard():
                self._settle()
        except QueueClosed:
            return
        except (OSError, KestrelError):  # the next call tells of it, or the closing; a full disk may have room later
            self._settle_later(self._interval)

    def _live_bytes_locked(self) -> int:
        return self._machine.bytes + OVERHEAD_BYTES * len(self._machine.jobs)

    def _settle(self) -> None:
        """Write what is only counted so far, commit what is over, carry old live records forward, save the place.

        Raises ``DurabilityUnknown``, ``OSError``.
        """
        log = self._journal
        assert log is not None
        with self._settling:
            for _ in range(_ROUNDS):
                last = self._prepare()
                self.sync()
                self._commit(last)
                log.checkpoint()
                with self._news, self._lock, self._turn as now:
                    self._clear_held_locked()
                    if log.is_short(self._live_bytes_locked()):
                        log.look_at = -1  # the next append sees to the next time
                        return
                    self._carry_locked(now)
            self._settle_later(0)  # there is more; others come first

    def _prepare(self) -> int:
        """Bring the counters to paper; up to which record all may be committed after a sync, 0 for none."""
        assert self._journal is not None
        left = 1
        while left:
            with self._news, self._lock, self._turn:
                unsaved = self._machine.unsaved
                before = len(unsaved)
                some = [job for job, _ in zip(unsaved.values(), range(SLICE), strict=False)]
                if some:
                    self._save_locked(some)
                left = len(unsaved) if len(unsaved) < before else 0
            if left:
                self._breathe()
        try:
            return self._write_counters()
        except QueueDiskFull:
            self._settle_later(self._interval)
            with self._lock:
                return self._journal.last_over if self._totals_at else 0  # it does not go past the totals there are

    def _write_counters(self) -> int:
        """Write what the tubes and the queue have counted, in slices; up to which record all may be committed then.

        What others write between two slices may be counted by no record of its tube yet: so not beyond what was there
        at the beginning.
        """
        log, machine = self._journal, self._machine
        assert log is not None
        with self._news, self._lock, self._turn as now:
            said = self._write_unsaid_locked()
            end = log.last_id
            tubes = list(machine.changed_tubes.values())
            self._write_tubes_locked(tubes[:SLICE], now)
            if len(tubes) <= SLICE:
                self._write_totals_locked()
                self._said = said
                return log.last_over
        for at in range(SLICE, len(tubes), SLICE):
            self._breathe()
            with self._news, self._lock, self._turn as now:
                self._write_tubes_locked(tubes[at : at + SLICE], now)
        with self._news, self._lock, self._turn:
            self._write_totals_locked()
            self._said = said
            return min(log.last_over, end)

    def _write_unsaid_locked(self) -> int:
        """How many slots of the held room say nothing new any more, once the counters are written too."""
        log, held = self._journal, self._held
        assert log is not None
        assert held is not None
        while self._unsaid:
            log.over(log.append(pack_gone(GONE, EXPIRED, self._unsaid[-1])))
            self._unsaid.pop()
        return held.used

    def _clear_held_locked(self) -> None:
        """What the held room has is in the journal, and on disk: it is free again."""
        held = self._held
        assert held is not None
        if held.used == self._said:
            with contextlib.suppress(OSError):  # it says nothing new
                held.clear(len(self._machine.jobs))
                self._said = 0
            self._jobs_held = held.free

    def _write_tubes_locked(self, tubes: list[Tube], now: float) -> None:
        log, machine = self._journal, self._machine
        assert log is not None
        for tube in tubes:
            if machine.changed_tubes.get(tube.name) is not tube:
                continue
            until_ms = self._wall_ms(tube.paused_until - now) if tube.paused_until else 0
            self._write_tube_locked(tube, tube.pauses, tube.pause, until_ms)
            tube.is_changed = False
            machine.changed_tubes.pop(tube.name, None)
            if tube.name not in machine.tubes:  # it is no more: this record is to say so once
                log.over(tube.at)
                tube.at = 0

    def _write_totals_locked(self) -> None:
        log, machine = self._journal, self._machine
        assert log is not None
        totals = records.Totals(machine.last_id, machine.total_jobs, machine.timeouts, machine.places)
        if totals != self._saved_totals:
            at = log.append(records.encode_totals(totals))
            log.over(self._totals_at)
            self._totals_at, self._saved_totals = at, totals

    def _commit(self, last: int) -> None:
        """Commit all records up to this one: they are over, and what made them so is on disk."""
        log = self._journal
        assert log is not None
        log.skip(last)
        left = 1
        while left > 0:
            with self._news, self._lock, self._turn:
                left = log.commit(last)
            if left > 0:
                self._breathe()

    def _carry_locked(self, now: float) -> None:
        """Write the oldest live records anew."""
        log, machine = self._journal, self._machine
        assert log is not None
        for at, data in log.oldest(SLICE):
            if data[0] == records.TUBE:
                tube = machine.tubes.get(records.decode_tube(data).name)
                if tube is not None and tube.at == at:
                    machine.note(tube)
                else:
                    log.over(at)  # an interrupt fell before anybody knew of it: it was said anew
            elif data[0] == records.TOTALS:
                self._saved_totals = None
                if at != self._totals_at:
                    log.over(at)
            else:
                self._carry_job_locked(at, data, now)

    def _carry_job_locked(self, at: int, data: bytes, now: float) -> None:
        log, machine = self._journal, self._machine
        assert log is not None
        job = machine.jobs.get(records.job_of(data))
        if job is None or at not in (job.at, job.state_at):
            log.over(at)
            return
        if at == job.state_at:
            self._write_state_locked(job, self._state_of(job, now))
        else:
            self._rewrite_locked(job, now)
        self._migrated += 1
