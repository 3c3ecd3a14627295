"""Putting jobs into a work queue."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kestrelpy import QueueFull
from kestrelpy.work._options import (
    MAX_PRIORITY,
    MAX_SECONDS,
    PLAIN,
    check_key,
    check_priority,
    check_seconds,
    check_span,
)
from kestrelpy.work._records import DELAYED, PUT, READY, encode_put, pack_put
from kestrelpy.work._settling import Settling
from kestrelpy.work.errors import Draining, DuplicateJob, JobTooBig
from kestrelpy.work.stored import StoredJob

if TYPE_CHECKING:
    from kestrelpy.work.stored import Tube


class Putting(Settling):
    """The part of a work queue that takes jobs in."""

    max_job_bytes: int
    _max_jobs: int | None
    _max_bytes: int | None
    _is_limited: bool  # by either, or it is draining
    _draining: bool

    def put(
        self,
        body: bytes | bytearray | memoryview,
        *,
        tube: str = "default",
        priority: int = 65536,
        delay: float = 0,
        ttr: float = 60,
        key: str | None = None,
        expires_in: float | None = None,
        job_id: int | None = None,
    ) -> int:
        """A new job; its id. ``priority``: 0 (most urgent) to 2**32 - 1. ``delay``: seconds until it is ready. ``ttr``:
        how long a session may have it reserved before it is ready again. ``key``: no other job of the tube may live
        with the same one. ``expires_in``: a job that is not reserved by then is dropped. ``job_id``: drawn before, by
        ``new_id()``.

        Raises ``JobTooBig``, ``QueueFull``, ``DuplicateJob``, ``Draining``, ``InvalidName``, ``QueueDiskFull``,
        ``DurabilityUnknown``, ``QueueClosed``, ``ValueError``; then nothing was stored, but for ``DurabilityUnknown``.
        """
        if type(priority) is not int or type(delay) not in PLAIN or type(ttr) not in PLAIN:
            priority, delay, ttr = check_priority(priority), check_seconds("delay", delay), check_span("ttr", ttr)
        body = self._checked(body, priority, delay, ttr)
        if key is not None:
            check_key(key)
        if expires_in is not None:
            expires_in = check_span("expires_in", expires_in)
        machine = self._machine
        with self._lock:  # a turn, and one record, written out: this is a hot path
            try:
                now = self._clock.monotonic()
                if now >= machine.next_due:
                    now = self._begin_locked()
                where = machine.tubes.get(tube) or self._tube_locked(tube)
                if self._is_limited:
                    self._check_room_locked(1, len(body))
                if len(machine.jobs) >= self._jobs_held:
                    self._hold_room_locked(1)
                live = self._make_locked(where, body, priority, delay, ttr, now)
                live.id = machine.last_id + 1 if job_id is None else self._drawn_locked(job_id)
                self._at_work = (live,)
                if key is None and expires_in is None:
                    added_ms = self._clock.time_ns() // 1_000_000
                    record = pack_put(PUT, len(where.encoded), 0, priority, live.id, added_ms, delay, ttr, 0)
                    at = self._append(record + body + where.encoded)
                else:
                    self._adorn_locked(live, key, expires_in, now)
                    at = self._append(encode_put(self._origin_of(live, now), live.body))
                self._add_locked(live, at, now)
            except BaseException as error:
                self._note(error)
                self._forget_empty_locked(tube)
                raise
            if machine.next_due < self._armed_at or machine.expired:
                self._end_locked()
        if machine.told:
            self._tell()
        if self._always:
            self.sync()
        return live.id

    def put_many(
        self,
        bodies: Iterable[bytes | bytearray | memoryview],
        *,
        tube: str = "default",
        priority: int = 65536,
        delay: float = 0,
        ttr: float = 60,
        expires_in: float | None = None,
    ) -> range:
        """New jobs, all or none of them, also across a crash; their ids. Raises as ``put``."""
        priority, delay, ttr = check_priority(priority), check_seconds("delay", delay), check_span("ttr", ttr)
        if expires_in is not None:
            expires_in = check_span("expires_in", expires_in)
        checked = [self._checked(body, priority, delay, ttr) for body in bodies]
        with self._news, self._lock, self._turn as now:
            first_id = self._machine.last_id + 1
            where = self._machine.tubes.get(tube) or self._tube_locked(tube)
            try:
                self._put_many_locked(checked, where, priority, delay, ttr, expires_in, now)
            except BaseException:
                self._forget_empty_locked(tube)
                raise
        if self._always:
            self.sync()
        return range(first_id, first_id + len(checked))

    def _put_many_locked(
        self,
        bodies: list[bytes],
        tube: Tube,
        priority: int,
        delay: float,
        ttr: float,
        expires_in: float | None,
        now: float,
    ) -> None:
        self._check_room_locked(len(bodies), sum(map(len, bodies)))
        if len(self._machine.jobs) + len(bodies) > self._jobs_held:
            self._hold_room_locked(len(bodies))
        lives = []
        for job_id, body in enumerate(bodies, self._machine.last_id + 1):
            live = self._make_locked(tube, body, priority, delay, ttr, now)
            live.id = job_id
            self._adorn_locked(live, None, expires_in, now)
            lives.append(live)
        self._at_work = lives
        ids = (
            self._log.append_many([encode_put(self._origin_of(live, now), live.body) for live in lives])
            if lives
            else ()
        )
        for live, at in zip(lives, ids, strict=True):
            self._add_locked(live, at, now)
        if not lives:
            self._machine.forget_unneeded(tube)

    def _forget_empty_locked(self, name: str) -> None:
        """A put has failed: its tube may have been made for it."""
        tube = self._machine.tubes.get(name)
        if tube is not None:
            self._machine.forget_unneeded(tube)

    def _checked(self, body: bytes | bytearray | memoryview, priority: int, delay: float, ttr: float) -> bytes:
        if type(body) is not bytes:
            body = bytes(memoryview(body))
        if len(body) > self.max_job_bytes:
            raise JobTooBig(len(body), self.max_job_bytes)
        if not (0 <= priority <= MAX_PRIORITY and 0 <= delay <= MAX_SECONDS and 0 < ttr <= MAX_SECONDS):
            check_priority(priority), check_seconds("delay", delay), check_span("ttr", ttr)
        return body

    def _check_room_locked(self, jobs: int, size: int) -> None:
        machine = self._machine
        if self._draining:
            raise Draining(f"work queue {self.name} is draining")
        if self._max_jobs is not None and len(machine.jobs) + jobs > self._max_jobs:
            raise QueueFull(f"work queue {self.name} has max_jobs={self._max_jobs}")
        if self._max_bytes is not None and machine.bytes + size > self._max_bytes:
            raise QueueFull(f"work queue {self.name} has max_bytes={self._max_bytes}")

    def _check_key_locked(self, tube: Tube, key: str, now: float) -> None:
        machine = self._machine
        other = machine.keys.get((tube.name, key))
        if other is not None and not machine.expire(machine.jobs[other], now):
            raise DuplicateJob(other, tube.name, key)

    def _make_locked(self, tube: Tube, body: bytes, priority: int, delay: float, ttr: float, now: float) -> StoredJob:
        """As ``Replay`` makes one."""
        live = StoredJob()
        live.tube, live.body, live.priority, live.delay, live.ttr = tube, body, priority, delay, ttr
        live.added = now
        live.key = live.expires = live.holder = None
        live.state = live.state_at = 0
        live.reserves = live.timeouts = live.releases = live.buries = live.kicks = live.new_timeouts = 0
        return live

    def _adorn_locked(self, live: StoredJob, key: str | None, expires_in: float | None, now: float) -> None:
        """What only some jobs have."""
        if key is not None:
            self._check_key_locked(live.tube, key, now)
            live.key = key
        if expires_in is not None:
            live.expires = (now + expires_in, live.id)

    def _add_locked(self, live: StoredJob, at: int, now: float) -> None:
        machine, tube = self._machine, live.tube
        live.at = at
        if live.id > machine.last_id:
            machine.last_id = live.id
        machine.total_jobs += 1
        tube.total_jobs += 1
        if not tube.is_changed:
            machine.note(tube)
        if live.delay or live.key or live.expires or tube.waiting:
            live.place = (now + live.delay, live.id)
            live.state = DELAYED if live.delay else READY
            machine.add(live, now)
        else:
            machine.add_plain(live)

    def new_id(self) -> int:
        """Draw the id of a put to come, ``put(..., job_id=that)``; one that is not put is not given out again.

        But after a kill it may be: nothing is written until it is put.

        For protocols that give ids out before they have the body, and use some up in vain. Each may be put once: an id
        whose job is gone is not to be named again.
        """
        with self._news, self._lock, self._turn:
            self._machine.last_id += 1
            return self._machine.last_id

    def _drawn_locked(self, job_id: int) -> int:
        if type(job_id) is not int or not 0 < job_id <= self._machine.last_id or job_id in self._machine.jobs:
            raise self._refusal_locked(f"id {job_id} was not drawn, or a job lives with it")
        return job_id
