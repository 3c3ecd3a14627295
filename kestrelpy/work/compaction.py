"""``Compactor``: keeps the journal of a work queue short.

Rules:
1. No record is committed before the queue's counters are written: so the counters are exact after a crash. If there is
   no room for the counters, no commit goes past the counters that were written last.
2. No record is committed before the record that made it be over is on disk.
3. Old live records are written again when the journal is longer than its bound (``JobLog.bound``), a bounded number at
   a time.

NOTE ON LOCKING: ``_compacting`` (Z) is held for a whole compaction, the core's lock (W) for slices of it, but not while
the journal is synced. Z is taken before W: one thread at a time shortens the journal.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from kestrelpy import QueueClosed, QueueDiskFull
from kestrelpy.errors import KestrelError
from kestrelpy.work import records
from kestrelpy.work.core import WorkCore
from kestrelpy.work.job_log import FRAME_BYTES, SLICE
from kestrelpy.work.records import EXPIRED, GONE, PUT_BYTES, pack_gone

if TYPE_CHECKING:
    from kestrelpy import Clock
    from kestrelpy.clock import Timer
    from kestrelpy.work.stored import Tube

OVERHEAD_BYTES = PUT_BYTES + FRAME_BYTES + 16
"""About how many bytes a live job takes in the journal beside its body."""
_ROUNDS = 8


class Compactor:
    """Compacts the journal of one work queue. Does nothing for a queue in memory."""

    def __init__(self, core: WorkCore, disk_clock: Clock, segment_bytes: int) -> None:
        self._core = core
        self._disk_clock = disk_clock
        self._segment_bytes = segment_bytes
        self._compacting = threading.Lock()
        self._timer: Timer | None = None
        self.is_armed = False
        """Whether a compaction is scheduled."""
        self.migrated = 0
        """How many live records were written again."""
        self.totals_at = 0
        self._saved_totals: records.Totals | None = None
        self._said = 0  # how many slots of the held room are in the journal too

    def forget_totals(self) -> None:
        """The totals in the journal may be wrong: write them again."""
        self._saved_totals = None

    def cancel_timer(self) -> None:
        """Cancel the timer: it would keep a closed queue alive."""
        if self._timer is not None:
            self._timer.cancel()

    def abandon(self) -> None:
        """In a forked child: a new lock, as another thread may have held the old one."""
        self._compacting = threading.Lock()

    def grown_locked(self) -> None:
        """The journal has grown past ``look_at``: schedule a compaction; at once, if the journal is too long."""
        core = self._core
        log = core.journal
        assert log is not None
        bound = log.bound(self._live_bytes_locked())
        if log.bytes > bound:
            log.look_at = log.bytes + self._segment_bytes
            self._maintain_in(0, None)
        else:
            log.look_at = bound
            self.arm(core.interval)

    def arm(self, seconds: float) -> None:
        core = self._core
        if core.journal is not None and not self.is_armed:
            self.is_armed = True
            self._maintain_in(seconds, self._maintenance_lost)

    def _maintain_in(self, seconds: float, on_lost: Callable[[BaseException], object] | None) -> None:
        core = self._core
        assert core.journal is not None
        try:
            self._timer = self._disk_clock.call_later(seconds, self._maintain, on_lost=on_lost)
        except RuntimeError:  # no thread can be started: the next append tries it again
            self.is_armed = False
            core.journal.look_at = -1

    def _maintenance_lost(self, _error: BaseException) -> None:
        self.is_armed = False

    def _maintain(self) -> None:
        """The timer's call, on the clock's thread."""
        core = self._core
        self.is_armed = False
        if core.state is not None:
            return
        try:
            with core.unreported():
                self.compact()
        except QueueClosed:
            return
        except (OSError, KestrelError):  # the next call, or ``close``, raises it; a full disk may have room later
            self.arm(core.interval)

    def _live_bytes_locked(self) -> int:
        core = self._core
        return core.scheduler.bytes + OVERHEAD_BYTES * len(core.scheduler.jobs)

    def compact(self) -> None:
        """Write the counters, sync, commit records that are over, save the reader's position, and write old live
        records again if the journal is too long.

        Raises ``DurabilityUnknown``, ``OSError``.
        """
        core = self._core
        log = core.journal
        assert log is not None
        with self._compacting:
            for _ in range(_ROUNDS):
                last = self._prepare()
                core.sync()
                self._commit(last)
                log.checkpoint()
                with core.deliveries, core.lock, core.turn as now:
                    self._clear_held_locked()
                    if log.is_short(self._live_bytes_locked()):
                        log.look_at = -1  # the next append schedules the next compaction
                        return
                    self._carry_locked(now)
            self.arm(0)  # there is more to do; other callbacks of the clock come first

    def _prepare(self) -> int:
        """Write the counters. Returns the id up to which records may be committed after a sync; 0 for none."""
        core = self._core
        assert core.journal is not None
        left = 1
        while left:
            with core.deliveries, core.lock, core.turn:
                unsaved = core.scheduler.unsaved
                before = len(unsaved)
                some = [job for job, _ in zip(unsaved.values(), range(SLICE), strict=False)]
                if some:
                    core.save_locked(some)
                left = len(unsaved) if len(unsaved) < before else 0
            if left:
                core.yield_lock()
        try:
            return self._write_counters()
        except QueueDiskFull:
            self.arm(core.interval)
            with core.lock:
                return core.journal.last_over if self.totals_at else 0  # not past the last TOTALS, which is not over

    def _write_counters(self) -> int:
        """Write the counters of tubes and queue, in slices. Returns the id up to which records may be committed then.

        Other calls may write records between two slices, and the TUBE record of their tube may not count these yet. So
        with several slices, the id is not above the last record that was there at the beginning.
        """
        core = self._core
        log, scheduler = core.journal, core.scheduler
        assert log is not None
        with core.deliveries, core.lock, core.turn as now:
            said = self._write_unrecorded_locked()
            end = log.last_id
            tubes = list(scheduler.changed_tubes.values())
            self._write_tubes_locked(tubes[:SLICE], now)
            if len(tubes) <= SLICE:
                self._write_totals_locked()
                self._said = said
                return log.last_over
        for at in range(SLICE, len(tubes), SLICE):
            core.yield_lock()
            with core.deliveries, core.lock, core.turn as now:
                self._write_tubes_locked(tubes[at : at + SLICE], now)
        with core.deliveries, core.lock, core.turn:
            self._write_totals_locked()
            self._said = said
            return min(log.last_over, end)

    def _write_unrecorded_locked(self) -> int:
        """Write a GONE for each job that only the held room has. Returns how many slots of the held room say nothing
        new, once the counters are written too.
        """
        core = self._core
        log, held = core.journal, core.held
        assert log is not None
        assert held is not None
        while core.unrecorded:
            log.over(log.append(pack_gone(GONE, EXPIRED, core.unrecorded[-1])))
            core.unrecorded.pop()
        return held.used

    def _clear_held_locked(self) -> None:
        """Clear the held room, if all that its slots say is in the journal, and on disk."""
        core = self._core
        held = core.held
        assert held is not None
        if held.used == self._said:
            with contextlib.suppress(OSError):  # a slot that stays says nothing new
                held.clear(len(core.scheduler.jobs))
                self._said = 0
            core.jobs_held = held.free

    def _write_tubes_locked(self, tubes: list[Tube], now: float) -> None:
        core = self._core
        log, scheduler = core.journal, core.scheduler
        assert log is not None
        for tube in tubes:
            if scheduler.changed_tubes.get(tube.name) is not tube:
                continue
            until_ms = core.wall_ms(tube.paused_until - now) if tube.paused_until else 0
            core.write_tube_locked(tube, tube.pauses, tube.pause, until_ms)
            tube.is_changed = False
            scheduler.changed_tubes.pop(tube.name, None)
            if tube.name not in scheduler.tubes:  # removed: this record says so, and is over at once
                log.over(tube.at)
                tube.at = 0

    def skip_ids(self, count: int) -> None:
        """Give out none of the next ``count`` ids of jobs. Raises as ``JobLog.append``."""
        core = self._core
        with core.lock:
            core.scheduler.last_id += count
            self._write_totals_locked()

    def _write_totals_locked(self) -> None:
        core = self._core
        log, scheduler = core.journal, core.scheduler
        assert log is not None
        totals = records.Totals(scheduler.last_id, scheduler.total_jobs, scheduler.timeouts, scheduler.burials)
        if totals != self._saved_totals:
            at = log.append(records.encode_totals(totals))
            log.over(self.totals_at)
            self.totals_at, self._saved_totals = at, totals

    def _commit(self, last: int) -> None:
        """Commit all records up to ``last``: they are over, and what made them be over is on disk."""
        core = self._core
        log = core.journal
        assert log is not None
        log.skip(last)
        left = 1
        while left > 0:
            with core.deliveries, core.lock, core.turn:
                left = log.commit(last)
            if left > 0:
                core.yield_lock()

    def _carry_locked(self, now: float) -> None:
        """Write the oldest live records again."""
        core = self._core
        log, scheduler = core.journal, core.scheduler
        assert log is not None
        for at, data in log.oldest(SLICE):
            if data[0] == records.TUBE:
                tube = scheduler.tubes.get(records.decode_tube(data).name)
                if tube is not None and tube.at == at:
                    scheduler.note(tube)
                else:
                    log.over(at)  # an interrupt came before memory knew of it, and it was written again
            elif data[0] == records.TOTALS:
                self._saved_totals = None
                if at != self.totals_at:
                    log.over(at)
            else:
                self._carry_job_locked(at, data, now)

    def _carry_job_locked(self, at: int, data: bytes, now: float) -> None:
        core = self._core
        log, scheduler = core.journal, core.scheduler
        assert log is not None
        job = scheduler.jobs.get(records.job_of(data))
        if job is None or at not in (job.at, job.state_at):
            log.over(at)
            return
        if at == job.state_at:
            core.write_state_locked(job, core.state_of(job, now))
        else:
            core.rewrite_locked(job, now)
        self.migrated += 1
