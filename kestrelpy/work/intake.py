"""``JobIntake``: the limits of a work queue, and how a new job is made. All but the calls that begin with ``checked``
want the queue's lock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from kestrelpy import QueueFull
from kestrelpy.work.core import WorkCore
from kestrelpy.work.errors import Draining, DuplicateJob, JobTooBig
from kestrelpy.work.new_job import NewJob
from kestrelpy.work.options import MAX_PRIORITY, MAX_SECONDS, check_key, check_priority, check_seconds, check_span
from kestrelpy.work.records import DELAYED, READY, encode_put
from kestrelpy.work.stored import StoredJob, Tube

if TYPE_CHECKING:
    from kestrelpy import Codec


class CheckedJob(NamedTuple):
    """A ``NewJob`` whose fields were checked and converted."""

    body: bytes
    tube: str
    priority: int
    delay: float
    ttr: float
    key: str | None
    expires_in: float | None
    job_id: int | None


class JobIntake:
    """The limits of one work queue, and the making of its jobs."""

    __slots__ = (
        "_codec",
        "_core",
        "_max_bytes",
        "_max_jobs",
        "_retry_delay",
        "draining",
        "is_limited",
        "max_job_bytes",
    )

    def __init__(
        self,
        core: WorkCore,
        codec: Codec | None,
        max_job_bytes: int,
        max_jobs: int | None,
        max_bytes: int | None,
        retry_delay: float | Callable[[int], float],
    ) -> None:
        self._core = core
        self._codec = codec
        self._retry_delay = retry_delay
        self.max_job_bytes = max_job_bytes
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self.draining = False
        self.is_limited = max_jobs is not None or max_bytes is not None
        """Whether a put must check a limit, or is refused because the queue is draining."""

    def retry_delay(self, attempts: int) -> float:
        """Seconds until a job is ready again that was released without a delay, after so many attempts. Called without
        the lock, as it may call the user's function. One that raises, or gives no delay, is logged, and counts as 0.
        """
        delay = self._retry_delay
        if not callable(delay):
            return delay
        try:
            return check_seconds("the result of retry_delay", delay(attempts))
        except Exception:
            from logging import getLogger  # imported here: mostly there is nothing to log

            getLogger("kestrelpy").exception("retry_delay of a work queue gave no delay; 0 is used")
            return 0.0

    def put_many_locked(
        self,
        bodies: list[bytes],
        tube: str,
        priority: int,
        delay: float,
        ttr: float,
        expires_in: float | None,
        now: float,
    ) -> range:
        first_id = self._core.scheduler.last_id + 1
        with self._needed_locked((tube,)) as tubes:
            self._check_many_locked(bodies)
            lives = []
            for job_id, body in enumerate(bodies, first_id):
                stored = self.make_locked(tubes[tube], body, priority, delay, ttr, now)
                stored.id = job_id
                if expires_in is not None:
                    stored.expires = (now + expires_in, job_id)
                lives.append(stored)
            self._store_locked(lives, now)
        return range(first_id, first_id + len(bodies))

    def put_all_locked(self, jobs: list[CheckedJob], now: float) -> list[int]:
        """``jobs`` comes from ``checked_jobs``."""
        with self._needed_locked(job.tube for job in jobs) as tubes:
            self._check_many_locked([job.body for job in jobs])
            lives = []
            keys = set()
            ids = self._ids_locked(jobs)
            for job_id, job in zip(ids, jobs, strict=True):
                stored = self.make_locked(tubes[job.tube], job.body, job.priority, job.delay, job.ttr, now)
                stored.id = job_id
                if job.key is not None:
                    if (job.tube, job.key) in keys:
                        raise DuplicateJob(None, job.tube, job.key)
                    keys.add((job.tube, job.key))
                self.set_key_and_expiry_locked(stored, job.key, job.expires_in, now)
                lives.append(stored)
            self._store_locked(lives, now)
        return [stored.id for stored in lives]

    def _ids_locked(self, jobs: list[CheckedJob]) -> list[int]:
        """The ids that were drawn for these jobs, and new ones for the others. Raises ``ValueError``."""
        core = self._core
        new = itertools.count(core.scheduler.last_id + 1)
        ids = [next(new) if job.job_id is None else self.check_drawn_locked(job.job_id) for job in jobs]
        if len(set(ids)) < len(ids):
            raise core.refusal_locked("put_all: two of these jobs have the same job_id")
        return ids

    @contextmanager
    def _needed_locked(self, names: Iterable[str]) -> Iterator[dict[str, Tube]]:
        """The tubes of these names. They are not forgotten meanwhile: an expired job of theirs may be dropped, and a
        waiter that only they were there for may leave. Raises as ``WorkCore.tube_locked``.
        """
        core = self._core
        tubes: dict[str, Tube] = {}
        try:
            for name in dict.fromkeys(names):
                tube = tubes[name] = core.scheduler.tubes.get(name) or core.tube_locked(name)
                tube.using += 1
            yield tubes
        finally:
            for tube in tubes.values():
                tube.using -= 1
                core.scheduler.forget_unneeded(tube)

    def _check_many_locked(self, bodies: list[bytes]) -> None:
        """Whether there is room for jobs with these bodies. Raises ``Draining``, ``QueueFull``, ``QueueDiskFull``."""
        core = self._core
        self.check_room_locked(len(bodies), sum(map(len, bodies)))
        if len(core.scheduler.jobs) + len(bodies) > core.jobs_held:
            core.hold_room_locked(len(bodies))

    def _store_locked(self, lives: list[StoredJob], now: float) -> None:
        """Write new jobs, all or none, and then add them to the scheduler. Raises as ``JobLog.append``.

        After an interrupt all of them are in memory, or none: they come into ``jobs`` in one step, and ``repair`` makes
        the lists from that. The counters may count jobs then that did not come.
        """
        core = self._core
        scheduler = core.scheduler
        if not lives:
            return
        core.jobs_being_written = lives
        ids = core.log.append_many([encode_put(core.origin_of(stored, now), stored.body) for stored in lives])
        for stored, at in zip(lives, ids, strict=True):
            tube, stored.at = stored.tube, at
            tube.total_jobs += 1
            if not tube.is_changed:
                scheduler.note(tube)
            if stored.delay:
                stored.state, stored.sort_key = DELAYED, (now + stored.delay, stored.id)
        scheduler.total_jobs += len(lives)
        scheduler.last_id = max(scheduler.last_id, *(stored.id for stored in lives))
        scheduler.jobs.update([(stored.id, stored) for stored in lives])
        for stored in sorted(lives, key=attrgetter("priority")):  # a waiter gets the most urgent one
            if stored.delay or stored.key or stored.expires or stored.tube.waiting:
                scheduler.add(stored, now)
            else:
                scheduler.add_plain(stored)

    def forget_empty_locked(self, name: str) -> None:
        """After a failed put: remove its tube, if nothing needs that. It may have been made for the put."""
        core = self._core
        tube = core.scheduler.tubes.get(name)
        if tube is not None:
            core.scheduler.forget_unneeded(tube)

    def checked(self, body: Any, priority: int, delay: float, ttr: float) -> bytes:
        """The body as bytes. Raises what the codec raises, ``TypeError``, ``JobTooBig``, ``ValueError``."""
        codec = self._codec
        encoded: bytes = body if codec is None else codec.encode(body)
        if type(encoded) is not bytes:
            encoded = self._as_bytes(encoded)
        if len(encoded) > self.max_job_bytes:
            raise JobTooBig(len(encoded), self.max_job_bytes)
        if not (0 <= priority <= MAX_PRIORITY and 0 <= delay <= MAX_SECONDS and 0 < ttr <= MAX_SECONDS):
            check_priority(priority), check_seconds("delay", delay), check_span("ttr", ttr)
        return encoded

    def checked_body(self, body: Any) -> bytes:
        return self.checked(body, 0, 0, 1)

    def _as_bytes(self, encoded: Any) -> bytes:
        try:
            return bytes(memoryview(encoded))
        except TypeError:
            codec, must_be = self._codec, f"must be bytes, bytearray or memoryview, not {type(encoded).__name__}"
            if codec is not None:
                raise TypeError(f"the value that {codec!r} encodes to {must_be}") from None
            hint = "for other values open the queue with codec= (see kestrelpy.codecs)"
            raise TypeError(f"a job's body {must_be}: {hint}") from None

    def decode(self, body: bytes) -> Any:
        """``Job.value``. Raises what the codec raises."""
        return body if self._codec is None else self._codec.decode(body)

    def check_growth_locked(self, size: int) -> None:
        core = self._core
        if self._max_bytes is not None and size > 0 and core.scheduler.bytes + size > self._max_bytes:
            raise QueueFull(f"work queue {core.name}: this body would exceed max_bytes={self._max_bytes}")

    def checked_jobs(self, jobs: Iterable[NewJob]) -> list[CheckedJob]:
        """The jobs of a ``put_all``, as plain types. Raises what ``put`` raises for such arguments."""
        found = []
        for job in jobs:
            if not isinstance(job, NewJob):
                raise TypeError(f"put_all takes objects of the class NewJob, not {type(job).__name__}")
            priority = check_priority(job.priority)
            delay, ttr = check_seconds("delay", job.delay), check_span("ttr", job.ttr)
            body = self.checked(job.body, priority, delay, ttr)
            key = None if job.key is None else check_key(job.key)
            expires_in = None if job.expires_in is None else check_span("expires_in", job.expires_in)
            found.append(CheckedJob(body, job.tube, priority, delay, ttr, key, expires_in, job.job_id))
        return found

    def check_room_locked(self, jobs: int, size: int) -> None:
        core = self._core
        scheduler = core.scheduler
        if self.draining:
            raise Draining(f"work queue {core.name} is draining")
        if self._max_jobs is not None and len(scheduler.jobs) + jobs > self._max_jobs:
            raise QueueFull(f"work queue {core.name}: this put would exceed max_jobs={self._max_jobs}")
        if self._max_bytes is not None and scheduler.bytes + size > self._max_bytes:
            raise QueueFull(f"work queue {core.name}: this put would exceed max_bytes={self._max_bytes}")

    def check_key_locked(self, tube: Tube, key: str, now: float) -> Tube:
        """The tube, in which no live job has the key from here on. Raises ``DuplicateJob``.

        It is another object than ``tube`` if the key was that of an expired job: the tube went with its last job.
        """
        scheduler = self._core.scheduler
        other = scheduler.keys.get((tube.name, key))
        if other is not None and not scheduler.expire(scheduler.jobs[other], now):
            raise DuplicateJob(other, tube.name, key)
        return scheduler.tubes.get(tube.name) or scheduler.make_tube(tube.name)

    def make_locked(self, tube: Tube, body: bytes, priority: int, delay: float, ttr: float, now: float) -> StoredJob:
        """A new job without id, key and expiry. ``JobRecovery._put`` must set the same fields."""
        stored = StoredJob()
        stored.tube, stored.body, stored.priority, stored.delay, stored.ttr = tube, body, priority, delay, ttr
        stored.added = now
        stored.key = stored.expires = stored.holder = None
        stored.state = stored.state_at = 0
        stored.reserves = stored.timeouts = stored.releases = stored.buries = stored.kicks = stored.new_timeouts = 0
        return stored

    def set_key_and_expiry_locked(
        self, stored: StoredJob, key: str | None, expires_in: float | None, now: float
    ) -> None:
        """Set the key and the expiry, which only some jobs have. Raises ``DuplicateJob``."""
        if key is not None:
            stored.tube = self.check_key_locked(stored.tube, key, now)
            stored.key = key
        if expires_in is not None:
            stored.expires = (now + expires_in, stored.id)

    def add_locked(self, stored: StoredJob, at: int, now: float) -> None:
        core = self._core
        scheduler, tube = core.scheduler, stored.tube
        stored.at = at
        if stored.id > scheduler.last_id:
            scheduler.last_id = stored.id
        scheduler.total_jobs += 1
        tube.total_jobs += 1
        if not tube.is_changed:
            scheduler.note(tube)
        if stored.delay or stored.key or stored.expires or tube.waiting:
            stored.sort_key = (now + stored.delay, stored.id)
            stored.state = DELAYED if stored.delay else READY
            scheduler.add(stored, now)
        else:
            scheduler.add_plain(stored)

    def check_drawn_locked(self, job_id: int) -> int:
        core = self._core
        if type(job_id) is not int or not 0 < job_id <= core.scheduler.last_id or job_id in core.scheduler.jobs:
            raise core.refusal_locked(f"job_id {job_id} was not drawn by new_id(), or a job lives with it")
        return job_id
