"""The jobs of a work queue by its files, beside the process that has it open: for looking only.

Rules:
1. Nothing is written and no lock is taken. The records that are not committed are read in order, and the last one about
   a job counts, as at an opening (``recovery``).
2. A reservation is in the memory of the owner alone: a job that is reserved is shown as ready. So is one whose delay is
   over. A job that was deleted while the disk was full is shown until the owner has room to write that.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from kestrelpy import Clock, CorruptJournal, SystemClock, inspect, scan
from kestrelpy._disk.interface import text_of
from kestrelpy.work import records
from kestrelpy.work.queue import WorkQueue
from kestrelpy.work.records import BURIED, DELAYED, READY, STATES

__all__ = ["JobsOutside", "TubeOutside", "VisibleJob"]


_TRIES = 3
_SEGMENT_BYTES = 16 << 20
_ROOM_BESIDE_A_JOB = 64 * 1024
_PAUSE = 10
"""A look of some seconds is followed by a pause that is so many times as long."""
_COLUMNS = {READY: 0, DELAYED: 1, BURIED: 2}
"""Where a tube counts the jobs of a state."""


class VisibleJob(NamedTuple):
    """One job. ``state``: ``"ready"``, which may be reserved too, ``"delayed"`` or ``"buried"``. ``body``: as much of
    it as was asked for; ``body_bytes``: how long it is. ``due_ms``: when a delayed job is ready, 0 for others.
    """

    id: int
    tube: str
    state: str
    priority: int
    added_ms: int
    due_ms: int
    ttr: float
    reserves: int
    timeouts: int
    releases: int
    buries: int
    kicks: int
    key: str | None
    body_bytes: int
    body: bytes


class TubeOutside(NamedTuple):
    """One tube: jobs by state, and until when it is paused (0: it is not)."""

    name: str
    ready: int
    delayed: int
    buried: int
    bytes: int
    oldest_ms: int
    paused_until_ms: int


class _ReplayedJob:
    """What the records say about one job."""

    __slots__ = ("body", "body_bytes", "burial", "due_ms", "expires_ms", "key", "origin", "state", "tried", "tube")

    body: bytes
    body_bytes: int
    burial: int
    due_ms: int
    expires_ms: int
    key: str | None
    origin: tuple[int, float]  # when it was put, time to run
    state: tuple[int, int]  # state, priority
    tube: str
    tried: tuple[int, int, int, int, int]


class JobsOutside:
    """Looks at the jobs of the work queue ``name`` in ``directory``, whether a process has it open or not.

    ``head_bytes``: so much of each body is kept; ``None``: all. ``look()`` reads what is new since the last one, the
    first time all live records. Memory: some 600 bytes for each live job, and what is kept of its body. Not
    thread-safe.
    """

    def __init__(
        self, directory: str | os.PathLike[str], name: str, *, head_bytes: int | None = 0, clock: Clock | None = None
    ) -> None:
        self.directory, self.name = text_of(directory), name
        self._head_bytes = head_bytes
        self._jobs: dict[int, _ReplayedJob] = {}
        self._paused: dict[str, int] = {}
        self._next = 0
        self._clock = clock if clock is not None else SystemClock()
        self._seen_tail = -1
        self._not_before = 0.0

    def look(self) -> None:
        """Read on. Raises ``CorruptJournal`` for what is damaged or no record of a job, ``UnsupportedFormat``,
        ``OSError``. Cost: O(records since the last look), and those of the newest segment before them.
        """
        for _ in range(_TRIES):
            if self._read_on():
                return
        self._read_on()

    def look_if_cheap(self, tail_id: int) -> bool:
        """``look()``, but for two cases: nothing was put since the last one (``tail_id``: the last id of the journal,
        as ``FolderWatch`` has it), or the last one took so long that the next is not yet due. Whether it has looked.
        """
        before = self._clock.monotonic()
        if tail_id == self._seen_tail or before < self._not_before:
            return False
        try:
            self.look()
            self._seen_tail = tail_id
        finally:
            now = self._clock.monotonic()
            self._not_before = now + (now - before) * _PAUSE
        return True

    def _read_on(self) -> bool:
        """False if records were committed and retired before they could be read: then begin again."""
        head, early, tail_id = self._saved()
        if head >= self._next or tail_id + 1 < self._next:  # all that lives is above; or another queue has the name
            self._jobs, self._paused, self._next = {}, {}, head + 1
        start = self._next
        for record in scan(self.directory, self.name, start_id=start):
            if record.id > start == self._next and self._saved()[0] >= start:
                self._next = 0
                return False
            self._next = record.id + 1
            if record.id not in early and record.data:
                self._take(record.id, record.data)
        return True

    def _saved(self) -> tuple[int, frozenset[int], int]:
        """Of the last checkpoint: the head, and ids above it that are done (an earlier version left some). And the last
        id of the journal.
        """
        saved = inspect(self.directory, self.name)
        if not saved.readers:
            return 0, frozenset(), saved.tail_id
        spans = saved.readers[0].done
        return (
            saved.readers[0].head,
            frozenset(i for first, last in spans for i in range(first, last + 1)),
            saved.tail_id,
        )

    def _take(self, at: int, data: bytes) -> None:
        path = f"{self.directory}/{self.name}"
        try:
            kind = data[0]
            if kind in (records.PUT, records.CARRIED):
                self._put(data)
            elif kind == records.STATE:
                job_id, tube, state = records.decode_state(data)
                if job_id in self._jobs:
                    _become(self._jobs[job_id], tube, state)
            elif kind == records.GONE:
                self._jobs.pop(records.decode_gone(data)[0], None)
            elif kind == records.TUBE:
                figures = records.decode_tube(data)
                self._paused[figures.name] = figures.paused_until_ms
            elif kind != records.TOTALS:
                records.refuse_kind(f"{path}, item {at}", kind)
        except (ValueError, struct.error) as error:
            raise CorruptJournal(path, 0, f"item {at} is no record of a job: {error}", item_id=at) from error

    def _put(self, data: bytes) -> None:
        state = None
        if data[0] == records.CARRIED:
            data, state = records.split_carried(data)
        _, tube_bytes, key_bytes, priority, job_id, added_ms, delay, ttr, expires_ms = records.unpack_put(data)
        key_at = len(data) - key_bytes
        tube_at = key_at - tube_bytes
        if tube_at < records.PUT_BYTES:
            raise ValueError("it is shorter than the lengths it gives")
        end = tube_at if self._head_bytes is None else min(tube_at, records.PUT_BYTES + self._head_bytes)
        job = _ReplayedJob()
        job.tube, job.body = data[tube_at:key_at].decode(), data[records.PUT_BYTES : end]
        job.body_bytes = tube_at - records.PUT_BYTES
        job.key = data[key_at:].decode() if key_bytes else None
        job.origin, job.expires_ms, job.burial = (added_ms, ttr), expires_ms, 0
        job.due_ms = added_ms + round(delay * 1000) if delay else 0
        job.state, job.tried = (DELAYED if delay else READY, priority), (0, 0, 0, 0, 0)
        if state is not None:
            _become(job, job.tube, state)
        self._jobs[job_id] = job

    def _now_ms(self) -> int:
        return self._clock.time_ns() // 1_000_000

    def open_queue(self) -> WorkQueue:
        """Open the queue itself, to change something now and then close it: each change is on disk when its call
        returns, and a segment has room for the largest job that is there. Raises as ``WorkQueue``.
        """
        self.look()
        largest = max((job.body_bytes for job in self._jobs.values()), default=0)
        return WorkQueue(
            self.directory, self.name, segment_bytes=max(_SEGMENT_BYTES, largest + _ROOM_BESIDE_A_JOB), sync="always"
        )

    def tubes(self) -> list[TubeOutside]:
        """The tubes that have jobs or are paused, by name. O(jobs)."""
        now_ms = self._now_ms()
        counts: dict[str, list[int]] = {name: [0, 0, 0, 0, 0] for name, until in self._paused.items() if until > now_ms}
        for job in self._jobs.values():
            if 0 < job.expires_ms <= now_ms:
                continue
            mine = counts.setdefault(job.tube, [0, 0, 0, 0, 0])
            mine[_COLUMNS[_state_at(job, now_ms)]] += 1
            mine[3] += job.body_bytes
            mine[4] = min(mine[4] or job.origin[0], job.origin[0])
        paused = {name: until for name, until in self._paused.items() if until > now_ms}
        return [
            TubeOutside(name, ready, delayed, buried, size, oldest, paused.get(name, 0))
            for name, (ready, delayed, buried, size, oldest) in sorted(counts.items())
        ]

    def jobs(self, *, tube: str | None = None, state: str | None = None) -> Iterator[VisibleJob]:
        """The jobs, those of one tube or of all, in one ``state`` or in any: buried ones in the order of burial,
        delayed ones by their due time, ready ones by priority and id.
        """
        now_ms = self._now_ms()
        chosen = [
            (_state_at(job, now_ms), job_id, job)
            for job_id, job in self._jobs.items()
            if tube in (None, job.tube) and not 0 < job.expires_ms <= now_ms
        ]
        chosen = [each for each in chosen if state in (None, STATES[each[0]])]
        for now_state, job_id, job in sorted(chosen, key=_turn):
            yield _visible(job_id, job, now_state)

    def job(self, job_id: int) -> VisibleJob | None:
        """The job with that id; ``None`` if it is not there."""
        now_ms = self._now_ms()
        job = self._jobs.get(job_id)
        if job is None or 0 < job.expires_ms <= now_ms:
            return None
        return _visible(job_id, job, _state_at(job, now_ms))

    def newest(self, count: int) -> list[VisibleJob]:
        """The jobs that were put last, the newest first."""
        found = (self.job(job_id) for job_id in sorted(self._jobs, reverse=True))
        return list(islice((job for job in found if job is not None), count))


def _become(job: _ReplayedJob, tube: str, state: records.State) -> None:
    job.tube, job.state = tube, (state.state, state.priority)
    job.due_ms = state.due_ms if state.state == DELAYED else 0
    job.tried = (state.reserves, state.timeouts, state.releases, state.buries, state.kicks)
    job.burial = state.burial


def _state_at(job: _ReplayedJob, now_ms: int) -> int:
    return READY if job.state[0] == DELAYED and job.due_ms <= now_ms else job.state[0]


def _turn(each: tuple[int, int, _ReplayedJob]) -> tuple[str, int, int, int]:
    state, job_id, job = each
    within = {READY: job.state[1], DELAYED: job.due_ms, BURIED: job.burial}[state]
    return job.tube, state, within, job_id


def _visible(job_id: int, job: _ReplayedJob, state: int) -> VisibleJob:
    return VisibleJob(
        job_id,
        job.tube,
        STATES[state],
        job.state[1],
        job.origin[0],
        job.due_ms if state == DELAYED else 0,
        job.origin[1],
        *job.tried,
        job.key,
        job.body_bytes,
        job.body,
    )
