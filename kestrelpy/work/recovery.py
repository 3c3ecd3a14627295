"""``JobRecovery``: builds a scheduler from a journal. It reads the records that are not committed, in order: the last
record about a job counts.
"""

from __future__ import annotations

import gc
import struct
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kestrelpy import CorruptJournal, UnsupportedFormat
from kestrelpy.work import records
from kestrelpy.work.job_log import JobLog
from kestrelpy.work.losses import Losses
from kestrelpy.work.records import BURIED, DELAYED, PUT_BYTES, State
from kestrelpy.work.repair import rebuild
from kestrelpy.work.scheduler import Scheduler
from kestrelpy.work.stored import StoredJob

if TYPE_CHECKING:
    from kestrelpy._disk.interface import Disk
    from kestrelpy.work.held_room import Gone
    from kestrelpy.work.stored import Tube


class JobRecovery:
    """The recovery at one opening. ``apart``: what the held room says. ``is_known``: whether a mark says that the
    journal is a work queue's. ``now`` and ``now_ms`` are the same moment on the monotonic clock and on the wall clock.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        log: JobLog,
        apart: Iterable[Gone],
        path: str,
        disk: Disk | None,
        *,
        now: float,
        now_ms: int,
        is_known: bool,
        quarantine: bool,
    ) -> None:
        self._scheduler = scheduler
        self._log = log
        self._apart = deque(apart)
        self._path = path
        self._is_known = is_known
        self._quarantine = quarantine
        self.losses = Losses(scheduler, path)
        self.records = 0
        """How many records of a work queue were read."""
        self._disk = disk
        self._now = now
        self._now_ms = now_ms
        self._totals_at = 0
        self.unrecorded: list[int] = []
        """Jobs that are gone by a slot of the held room, and by no record."""
        self._tubes: dict[bytes, Tube] = {}
        self._priorities: dict[int, int] = {}
        self._seconds: dict[float, float] = {}
        self._last_ms, self._last_added = now_ms, now
        self._steps = {
            records.PUT: self._put,
            records.CARRIED: self._carried,
            records.STATE: self._state,
            records.GONE: self._gone,
            records.TUBE: self._tube,
            records.TOTALS: self._totals,
        }

    def run(self) -> int:
        """Read all records. Returns the id of the last TOTALS record, 0 if there is none.

        Raises ``UnsupportedFormat``, ``CorruptJournal`` for a record that is not intact, or that no work queue has
        written; ``WrongKind`` if such a record is the first one of a journal without a mark. With ``quarantine``, both
        kinds of bad records are skipped, and the log says which jobs are in doubt.
        """
        totals_at = self.build()
        self.losses.log()
        return totals_at

    def build(self) -> int:
        """``run``, but nothing is logged: ``losses`` has the jobs in doubt."""
        was_enabled = gc.isenabled()
        gc.disable()  # a million new objects, and none of them garbage: the collector took a fifth of the time
        try:
            self._read()
        finally:
            if was_enabled:
                gc.enable()
        self.losses.end()
        scheduler = self._scheduler
        rebuild(scheduler)
        for tube in list(scheduler.tubes.values()):
            scheduler.forget_unneeded(tube)
        scheduler.next_due = self._now
        return self._totals_at

    def _read(self) -> None:
        steps, losses, apart = self._steps, self.losses, self._apart
        for at, data in self._log.replay(self._disk, quarantine=self._quarantine):
            while apart and apart[0].after < at:
                self._end_apart(apart.popleft())
            if data is None:
                losses.lose(at)
                continue
            step = steps.get(data[0] if data else 0)
            try:
                if step is None:
                    records.refuse_kind(f"{self._path}, item {at}", data[0] if data else 0)
                else:
                    step(at, data)
            except (ValueError, OverflowError, struct.error, UnsupportedFormat) as error:
                if not self._is_known and not self.records:
                    raise self._log.queue.wrong() from None
                if isinstance(error, UnsupportedFormat):
                    raise
                if self._quarantine:
                    self._log.leave_out(at)
                    losses.lose(at)
                    continue
                reason = f"item {at} is no record of a job: {error}. Was it put by something else than kestrelpy.work?"
                raise CorruptJournal(self._path, 0, reason, item_id=at) from error
            self.records += 1
            if losses.missing_from:
                losses.see(data)
        while apart:
            self._end_apart(apart.popleft())

    def _end_apart(self, gone: Gone) -> None:
        """Apply a slot of the held room, like a GONE after record ``gone.after``."""
        job = self._scheduler.jobs.get(gone.job_id)
        self._end(gone.job_id, gone.cause)
        if job is not None:
            self.unrecorded.append(gone.job_id)
            self._scheduler.note(job.tube)

    def _put(self, at: int, data: bytes) -> None:
        """A new job. There may be a million: so there are few calls here, and equal values share one object."""
        scheduler = self._scheduler
        _, tube_bytes, key_bytes, priority, job_id, added_ms, delay, ttr, expires_ms = records.unpack_put(data)
        key_at = len(data) - key_bytes
        tube_at = key_at - tube_bytes
        if tube_at < PUT_BYTES:
            raise ValueError("it is shorter than the lengths it gives")
        name = data[tube_at:key_at]
        tube = self._tubes.get(name) or self._find_tube(name)
        if job_id in scheduler.jobs:  # the job was carried, or written again after an interrupt
            self._forget(scheduler.jobs[job_id])
        job = StoredJob()
        job.id, job.tube, job.body, job.at = job_id, tube, data[PUT_BYTES:tube_at], at
        job.priority = self._priorities.setdefault(priority, priority)
        job.delay, job.ttr = self._seconds.setdefault(delay, delay), self._seconds.setdefault(ttr, ttr)
        if added_ms != self._last_ms:
            self._last_ms, self._last_added = added_ms, self._when(added_ms)
        job.added = self._last_added
        job.key = data[key_at:].decode() if key_bytes else None
        job.sort_key = job.expires = job.holder = None
        job.state = job.state_at = 0
        job.reserves = job.timeouts = job.releases = job.buries = job.kicks = job.new_timeouts = 0
        scheduler.jobs[job_id] = job
        scheduler.total_jobs += 1
        tube.total_jobs += 1
        if job_id > scheduler.last_id:
            scheduler.last_id = job_id
        if expires_ms:
            job.expires = (self._when(expires_ms), job_id)
        if delay:
            self._delay(job, added_ms + round(delay * 1000))

    def _carried(self, at: int, data: bytes) -> None:
        head, state = records.split_carried(data)
        self._put(at, head)
        job = self._scheduler.jobs[records.job_of(data)]
        self._scheduler.total_jobs -= 1  # it was counted when it was put
        job.tube.total_jobs -= 1
        self._become(job, state)

    def _find_tube(self, name: bytes) -> Tube:
        found = name.decode()
        tube = self._tubes[name] = self._scheduler.tubes.get(found) or self._scheduler.make_tube(found)
        return tube

    def _forget(self, job: StoredJob) -> None:
        self._log.over(job.at)
        self._log.over(job.state_at)

    def _state(self, at: int, data: bytes) -> None:
        job_id, name, state = records.decode_state(data)
        job = self._scheduler.jobs.get(job_id)
        if job is None:  # gone: its PUT is committed, and this record is over too
            self._log.over(at)
            return
        self._scheduler.timeouts += state.new_timeouts
        self._log.over(job.state_at)
        job.state_at = at
        job.tube = self._scheduler.tubes.get(name) or self._scheduler.make_tube(name)
        self._become(job, state)

    def _become(self, job: StoredJob, state: State) -> None:
        job.state, job.priority, job.delay = state.state, state.priority, state.delay
        job.reserves, job.timeouts, job.releases = state.reserves, state.timeouts, state.releases
        job.buries, job.kicks = state.buries, state.kicks
        if job.state == DELAYED:
            self._delay(job, state.due_ms)
        elif job.state == BURIED:
            job.sort_key = (state.burial, job.id)
            self._scheduler.burials = max(self._scheduler.burials, state.burial)

    def _delay(self, job: StoredJob, due_ms: int) -> None:
        job.state = DELAYED
        job.sort_key = (min(self._when(due_ms), self._now + job.delay), job.id)

    def _when(self, instant_ms: int) -> float:
        return self._now + (instant_ms - self._now_ms) / 1000

    def _gone(self, at: int, data: bytes) -> None:
        job_id, cause = records.decode_gone(data)
        self._log.over(at)
        self._end(job_id, cause)

    def _end(self, job_id: int, cause: int) -> None:
        job = self._scheduler.jobs.pop(job_id, None)
        if job_id > self._scheduler.last_id:  # the record that put it is lost
            self._scheduler.last_id = job_id
        if cause == records.TIMED_OUT:
            self._scheduler.timeouts += 1
        if job is not None:
            self._forget(job)
            if cause == records.DELETED:
                job.tube.deletes += 1

    def _tube(self, at: int, data: bytes) -> None:
        figures = records.decode_tube(data)
        tube = self._scheduler.tubes.get(figures.name) or self._scheduler.make_tube(figures.name)
        self._log.over(tube.at)
        tube.at = at
        tube.total_jobs, tube.deletes, tube.pauses = figures.total_jobs, figures.deletes, figures.pauses
        tube.pause, tube.paused_until = figures.pause, 0.0
        if figures.paused_until_ms:
            tube.paused_until = min(self._when(figures.paused_until_ms), self._now + figures.pause)

    def _totals(self, at: int, data: bytes) -> None:
        scheduler = self._scheduler
        totals = records.decode_totals(data)
        self._log.over(self._totals_at)
        self._totals_at = at
        scheduler.last_id = max(scheduler.last_id, totals.last_id)
        scheduler.total_jobs, scheduler.timeouts = totals.total_jobs, totals.timeouts
        scheduler.burials = max(scheduler.burials, totals.burials)
