"""The work queue: jobs with priority, delay and time to run, on a journaled queue.

NOTE ON LOCKING: see ``core``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Literal, overload

from kestrelpy import ForkedQueue, KestrelError, QueueClosed, SystemClock
from kestrelpy._disk.interface import text_of
from kestrelpy._process import forget, remember, warn_unclosed
from kestrelpy._tasks import ClosesInTask
from kestrelpy.config import check_codec
from kestrelpy.item import V
from kestrelpy.work import bulk, records
from kestrelpy.work.compaction import Compactor
from kestrelpy.work.core import TIMER_SLICE, WorkCore
from kestrelpy.work.errors import NotReserved, TubeNotFound
from kestrelpy.work.figures import WorkFigures, work_figures
from kestrelpy.work.in_task import acknowledged
from kestrelpy.work.intake import JobIntake
from kestrelpy.work.job import Job, delete_by
from kestrelpy.work.journal import JobJournal, open_journal
from kestrelpy.work.listing import first_job, first_jobs, job_with_key, jobs_of
from kestrelpy.work.new_job import NewJob
from kestrelpy.work.options import (
    PLAIN,
    check_interval,
    check_job_bytes,
    check_key,
    check_limit,
    check_on_corruption,
    check_priority,
    check_retry_delay,
    check_seconds,
    check_span,
    check_sync,
)
from kestrelpy.work.records import BURIED, DELAYED, PUT, READY, RESERVED, encode_put, pack_put
from kestrelpy.work.recovery import JobRecovery
from kestrelpy.work.session import Session
from kestrelpy.work.stats import JobStats, TubeStats, WorkStats, job_stats, tube_stats, work_stats

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kestrelpy import Clock, Codec
    from kestrelpy._disk.interface import Disk
    from kestrelpy.ship import Ship, Shipping
    from kestrelpy.work.opening import WorkOptions

__all__ = ["WorkQueue"]

_NAMES_BYTES = 512
"""Room for the tube's name and the key in a record."""


class WorkQueue(ClosesInTask, Generic[V]):
    """Jobs with priority, delay and time to run, in any process, without a server.

    ``directory`` and ``name``: the journaled queue that holds the jobs, made if there is none; ``directory=None``: in
    memory only. ``codec``: bodies are values that it encodes (``kestrelpy.codecs``); ``Job.value`` decodes them.
    ``max_job_bytes``: limit of one body, as bytes. ``max_jobs``, ``max_bytes``: limits of all live jobs; a put that
    would exceed one raises ``QueueFull``. ``max_tubes``: a put, ``use``, ``watch`` or ``move`` that would make one tube
    more raises ``QueueFull``. ``max_attempts``: a job that was released or timed out so often is buried instead of
    being ready again. ``retry_delay``: seconds, or a function of the attempts so far (1, 2, ...), until a job is ready
    again that was released without a delay. ``sync``: ``"always"``: a change is on disk when its call returns; seconds:
    synced that often; ``"never"``: the system decides. A change whose call returned survives the death of the process.
    ``on_corruption``: ``"raise"``, or ``"quarantine"`` to skip records that are not intact. Jobs that these records put
    are lost. What they said about other jobs is forgotten, so a deleted job may come back. The log has the ids.
    ``checkpoint_interval``: seconds from a change to the next compaction of the journal. ``ship``: as of a
    ``JournaledQueue``; with ``acks="shipped"``, a change is in the store when its call returns. ``group_commit``: no
    call waits for the disk or the store by itself, and ``sync()`` waits for all calls before it: for a server that
    acknowledges many calls at once. ``clock``, ``disk``: instead of the system's, for tests. ``disk_clock``: its
    callbacks may wait for the disk, if those of ``clock`` may not.

    Raises what ``JournaledQueue`` raises; ``WrongKind`` for a queue that is no work queue; ``CorruptJournal`` also for
    a record that is not about a job. Cost of opening: O(jobs).

    Thread-safe. Calls of the queue and of its sessions raise ``QueueClosed`` after ``close()``, ``ForkedQueue`` in a
    forked child, ``ValueError`` or ``TypeError`` for a bad argument. Calls that write raise ``QueueDiskFull`` if there
    is no room, and ``DurabilityUnknown`` or another ``OSError`` once the journal has failed. Of a queue that is
    shipped, calls raise ``Fenced`` once another owner has it, and ``ShipError`` if shipping has failed; calls that
    write raise ``NotShipped``, and ``QueueFull`` while it is behind (``when_behind``), with ``"block"`` too.
    """

    _is_ended = False
    """Whether ``close`` has done everything."""

    @overload  # the type of the bodies is that of the codec
    def __init__(
        self: WorkQueue[bytes],
        directory: str | os.PathLike[str] | None,
        name: str = "work",
        *,
        codec: None = None,
        **_: Unpack[WorkOptions],
    ) -> None: ...

    @overload
    def __init__(
        self, directory: str | os.PathLike[str] | None, name: str = "work", *, codec: Codec[V], **_: Unpack[WorkOptions]
    ) -> None: ...

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        name: str = "work",
        *,
        codec: Codec | None = None,
        max_job_bytes: int = 65535,
        max_jobs: int | None = None,
        max_bytes: int | None = None,
        max_tubes: int | None = None,
        max_attempts: int | None = None,
        retry_delay: float | Callable[[int], float] = 0.0,
        sync: float | Literal["always", "never"] = 0.1,
        segment_bytes: int = 16 << 20,
        checkpoint_interval: float = 1.0,
        on_corruption: Literal["raise", "quarantine"] = "raise",
        ship: str | Ship | Literal[False] | None = None,
        group_commit: bool = False,
        clock: Clock | None = None,
        disk_clock: Clock | None = None,
        disk: Disk | None = None,
    ) -> None:
        check_job_bytes(max_job_bytes, None)
        self.name, self.codec = name, check_codec(codec)
        self.directory = None if directory is None else text_of(directory)
        max_jobs, max_bytes = check_limit("max_jobs", max_jobs), check_limit("max_bytes", max_bytes)
        max_tubes, max_attempts = check_limit("max_tubes", max_tubes), check_limit("max_attempts", max_attempts)
        retry_delay = check_retry_delay(retry_delay)
        clock = clock if clock is not None else SystemClock()
        disk_clock = disk_clock if disk_clock is not None else clock
        quarantine, checkpoint_interval = check_on_corruption(on_corruption), check_interval(checkpoint_interval)
        always = check_sync(sync, ship, self.directory) and self.directory is not None
        self._opened_at = clock.monotonic()
        queue: JobJournal | None = None
        core: WorkCore | None = None
        if self.directory is not None:  # with "always", each call syncs by itself, outside the lock
            options = (segment_bytes, checkpoint_interval, on_corruption, ship, disk_clock, disk)
            queue = open_journal(self.directory, name, "never" if always else sync, *options)
        try:
            if queue is not None:
                check_job_bytes(max_job_bytes, queue.max_item_bytes - _NAMES_BYTES)
                queue.lift_limit()
            is_known = queue is None or queue.claim(disk)
            self._core = core = WorkCore(
                self,
                name,
                clock,
                queue,
                segment_bytes=segment_bytes,
                interval=checkpoint_interval,
                always=always and not group_commit,
                max_tubes=max_tubes,
                max_attempts=max_attempts,
            )
            self._compactor = core.compactor = Compactor(core, disk_clock, segment_bytes)
            self._intake = core.limits = JobIntake(core, codec, max_job_bytes, max_jobs, max_bytes, retry_delay)
            if queue is not None:
                queue.on_failed(core.fail)
                self._replay(queue, disk, is_known=is_known, quarantine=quarantine)
                with core.deliveries, core.lock, core.turn:  # do what has fallen due since the last time
                    pass
        except BaseException:
            if core is not None:
                core.state = QueueClosed(f"work queue {name} was never opened")
            if queue is not None:
                queue.close()
            raise
        remember(self, must_close=queue is not None)
        if queue is not None:
            forget(queue)  # this object closes it, also at the interpreter's end, and abandons it after a fork

    def _replay(self, queue: JobJournal, disk: Disk | None, *, is_known: bool, quarantine: bool) -> None:
        core = self._core
        log = core.journal
        assert log is not None
        assert core.held is not None
        recovery = JobRecovery(
            core.scheduler,
            log,
            core.held.load() if is_known else (),
            f"{self.directory}/{self.name}",
            disk,
            now=core.clock.monotonic(),
            now_ms=core.wall_ms(),
            is_known=is_known,
            quarantine=quarantine,
        )
        self._compactor.totals_at = recovery.run()
        core.unrecorded = recovery.unrecorded
        if not is_known:
            queue.adopt(disk, records=recovery.records)
        if queue.jump:
            self._compactor.skip_ids(queue.jump)
            queue.sync()
            queue.note_jumped()
        with contextlib.suppress(OSError), core.lock:  # an older version held no room, and the disk may be full now
            core.hold_room_locked(1)
        if log.carry_to:  # write again what lives near the damage, so that the damaged segment can go
            core.compactor.arm(0)

    def session(self, *tubes: str, deadline_soon: bool = True) -> Session[V]:
        """A new session. It watches these ``tubes`` and no other; without any it watches ``default``.

        ``deadline_soon=False``: its reserves do not raise ``DeadlineSoon``. Raises ``InvalidName``, ``QueueFull``.
        """
        core = self._core
        for tube in tubes:
            if not isinstance(tube, str):
                raise TypeError(f"tubes are strings, each an argument of its own, not {tube!r}")
        with core.deliveries, core.lock, core.turn:
            session: Session[V] = Session(core, core.scheduler.tubes["default"], deadline_soon=deadline_soon)
            core.sessions.add(session)
        if tubes:
            try:
                for tube in tubes:
                    session.watch(tube)
                if "default" not in tubes:
                    session.ignore("default")
            except BaseException:
                session.close()
                raise
        return session

    @property
    def max_job_bytes(self) -> int:
        """The size limit of a job's body."""
        return self._intake.max_job_bytes

    @property
    def max_attempts(self) -> int | None:
        """How often a job may be released or time out before it is buried; ``None``: there is no limit."""
        return self._core.scheduler.max_attempts

    @property
    def shipping(self) -> Shipping | None:
        """The shipping of this queue to a store; ``None`` if it is not shipped."""
        journal = self._core.journal
        shipping = None if journal is None else journal.queue.shipping
        return None if shipping is None else shipping.closed_by(self.close)

    # -- putting -------------------------------------------------------------------------------------------------------

    def put(
        self,
        body: V | bytearray | memoryview,
        *,
        tube: str = "default",
        priority: int = 65536,
        delay: float = 0,
        ttr: float = 60,
        key: str | None = None,
        expires_in: float | None = None,
        job_id: int | None = None,
    ) -> int:
        """Put a new job, and return its id. ``body``: ``bytes``, ``bytearray`` or ``memoryview``; with a codec, any
        value that this encodes. ``priority``: 0 (most urgent) to 2**32 - 1. ``delay``: seconds until the job is ready.
        ``ttr``: seconds that a session may have it reserved before it is ready again (its visibility timeout). ``key``:
        1 to 255 bytes in UTF-8; refused if another live job of the tube has it. ``expires_in``: seconds after which the
        job is dropped, unless it is reserved then. ``job_id``: an id from ``new_id()``.

        Raises ``JobTooBig``, ``QueueFull``, ``DuplicateJob``, ``Draining``, ``InvalidName``, ``QueueDiskFull``,
        ``QueueClosed``, ``ValueError``: then nothing is stored. After ``DurabilityUnknown`` it may be stored.
        """
        if type(priority) is not int or type(delay) not in PLAIN or type(ttr) not in PLAIN:
            priority, delay, ttr = check_priority(priority), check_seconds("delay", delay), check_span("ttr", ttr)
        data = self._intake.checked(body, priority, delay, ttr)
        if key is not None:
            check_key(key)
        if expires_in is not None:
            expires_in = check_span("expires_in", expires_in)
        core, intake = self._core, self._intake
        scheduler = core.scheduler
        with core.lock:
            try:  # HOT COPY of Turn
                now = core.clock.monotonic()
                if now >= scheduler.next_due or core.must_check:
                    now = core.begin_locked()
                where = scheduler.tubes.get(tube) or core.tube_locked(tube)
                if intake.is_limited:
                    intake.check_room_locked(1, len(data))
                if len(scheduler.jobs) >= core.jobs_held:
                    core.hold_room_locked(1)
                stored = intake.make_locked(where, data, priority, delay, ttr, now)
                stored.id = scheduler.last_id + 1 if job_id is None else intake.check_drawn_locked(job_id)
                core.jobs_being_written = (stored,)
                if key is None and expires_in is None:
                    added_ms = core.clock.time_ns() // 1_000_000
                    # HOT COPY of records.encode_put
                    record = pack_put(PUT, len(where.encoded), 0, priority, stored.id, added_ms, delay, ttr, 0)
                    at = core.append(record + data + where.encoded)
                else:
                    intake.set_key_and_expiry_locked(stored, key, expires_in, now)
                    at = core.append(encode_put(core.origin_of(stored, now), stored.body))
                intake.add_locked(stored, at, now)
            except BaseException as error:
                core.note(error)
                intake.forget_empty_locked(tube)
                raise
            if scheduler.next_due < core.armed_at or scheduler.expired or core.must_check:
                core.end_locked()
        if scheduler.completions:
            core.notify()
        if core.always:
            core.sync()
        return stored.id

    async def aput(
        self,
        body: V | bytearray | memoryview,
        *,
        tube: str = "default",
        priority: int = 65536,
        delay: float = 0,
        ttr: float = 60,
        key: str | None = None,
        expires_in: float | None = None,
        job_id: int | None = None,
    ) -> int:
        """``put`` for asyncio, from any event loop, which goes on while this waits for the disk: with ``sync="always"``
        the job is on disk when this returns, else it survives the death of the process, as with ``put``.

        There is one wait, for the disk. A task that is cancelled there has put its job: the job stays, and is on disk
        as soon as it would have been. No thread waits, and one sync serves all tasks that wait at that moment. With
        ``acks="shipped"``, waits for the store as long as it takes. Takes the arguments of ``put`` (``tube``,
        ``priority``, ``delay``, ``ttr``, ``key``, ``expires_in``, ``job_id``), and raises as that.
        """
        core, intake = self._core, self._intake
        checked = intake.checked_jobs([NewJob(body, tube, priority, delay, ttr, key, expires_in, job_id)])
        with core.deliveries, core.lock, core.turn as now:
            ids = intake.put_all_locked(checked, now)
        await acknowledged(core)
        return ids[0]

    def put_many(
        self,
        bodies: Iterable[V | bytearray | memoryview],
        *,
        tube: str = "default",
        priority: int = 65536,
        delay: float = 0,
        ttr: float = 60,
        expires_in: float | None = None,
    ) -> range:
        """Put new jobs, all or none, also across a crash; returns their ids. ``tube``, ``priority``, ``delay``, ``ttr``
        and ``expires_in`` are the same for all, and as in ``put``, as are the errors.
        """
        priority, delay, ttr = check_priority(priority), check_seconds("delay", delay), check_span("ttr", ttr)
        if expires_in is not None:
            expires_in = check_span("expires_in", expires_in)
        core, intake = self._core, self._intake
        checked = [intake.checked(body, priority, delay, ttr) for body in bodies]
        with core.deliveries, core.lock, core.turn as now:
            ids = intake.put_many_locked(checked, tube, priority, delay, ttr, expires_in, now)
        if core.always:
            core.sync()
        return ids

    def put_all(self, jobs: Iterable[NewJob]) -> list[int]:
        """Put jobs of several tubes, each with its own options: all or none, also across a crash. Returns their ids.

        All are checked before one is written. Raises as ``put``; ``DuplicateJob`` also if two of them have the same
        tube and key; ``TypeError`` for anything but ``NewJob`` objects.
        """
        core, intake = self._core, self._intake
        checked = intake.checked_jobs(jobs)
        with core.deliveries, core.lock, core.turn as now:
            ids = intake.put_all_locked(checked, now)
        if core.always:
            core.sync()
        return ids

    def new_id(self) -> int:
        """Draw an id for a later ``put(..., job_id=...)``. An id that is never put is not given out again.

        After a kill it may be given out again, because nothing is written until the put.

        For protocols that give an id out before they have the body, and use up some ids without a job. An id may be put
        once: after its job is gone, do not put it again.
        """
        core = self._core
        with core.deliveries, core.lock, core.turn:
            core.scheduler.last_id += 1
            return core.scheduler.last_id

    # -- changing ------------------------------------------------------------------------------------------------------

    def delete(self, job_id: int) -> None:
        """Delete a job that is ready, delayed or buried. Raises ``JobNotFound``, ``NotReserved`` if a session has it.

        Needs no new room on disk: the job's put has held it. ``QueueDiskFull`` is left for two cases: the disk was full
        before a version that holds room opened the queue, or the file system needs new room to overwrite.
        """
        delete_by(self._core, None, job_id)

    def kick(self, n: int, tube: str = "default") -> int:
        """Make up to ``n`` jobs of ``tube`` ready: buried ones if there are any, else delayed ones. Returns how many.

        Works in slices; other calls run in between. After ``QueueDiskFull``, the jobs kicked before it stay kicked.
        """
        return bulk.kick(self._core, index(n), tube)

    def kick_job(self, job_id: int) -> None:
        """Make a buried or delayed job ready. Raises ``JobNotFound`` for any other."""
        bulk.kick_job(self._core, job_id)

    def move(self, job_id: int, tube: str) -> None:
        """Move a job to another tube; it keeps its state, delay and order.

        Raises ``JobNotFound``, ``NotReserved`` if a session has it, ``DuplicateJob``, ``InvalidName``, ``QueueFull``.
        """
        core = self._core
        with core.deliveries, core.lock, core.turn as now:
            stored = core.find_locked(job_id, now)
            if stored.state == RESERVED:
                raise NotReserved(job_id)
            where = core.scheduler.tubes.get(tube) or core.tube_locked(tube)
            if where is stored.tube:
                return
            if stored.key is not None:
                where = self._intake.check_key_locked(where, stored.key, now)
            core.jobs_being_written = (stored,)
            try:
                at = core.append(records.encode_state(stored.id, tube, core.state_of(stored, now)))
            except BaseException:
                core.scheduler.forget_unneeded(where)
                raise
            core.saved_locked(stored, at)
            core.scheduler.move(stored, where, now)
        if core.always:
            core.sync()

    def clear(self, tube: str = "default") -> int:
        """Delete all jobs of a tube that are not reserved; returns how many. In slices; other calls run in between."""
        return bulk.clear(self._core, tube)

    def pause_tube(self, tube: str, seconds: float) -> None:
        """Let no job of this tube be reserved for ``seconds``; 0 ends a pause. Raises ``TubeNotFound``."""
        core = self._core
        seconds = check_seconds("a pause", seconds)
        with core.deliveries, core.lock, core.turn as now:
            if (where := core.scheduler.tubes.get(tube)) is None:
                raise TubeNotFound(tube)
            until_ms = core.wall_ms(seconds) if seconds else 0
            core.write_tube_locked(where, where.pauses + 1, seconds, until_ms)
            core.scheduler.pause(where, seconds, now)
            core.advance_locked(now, TIMER_SLICE)  # serves waiters, if the pause has ended
        if core.always:
            core.sync()

    # -- single jobs -------------------------------------------------------------------------------------------------

    def peek(self, job_id: int) -> Job[V]:
        """The job as it is, not reserved. Raises ``JobNotFound``."""
        core = self._core
        with core.deliveries, core.lock, core.turn as now:
            return Job(core, None, core.find_locked(job_id, now))

    def peek_ready(self, tube: str = "default") -> Job[V]:
        """The most urgent job that is ready in the tube. Raises ``JobNotFound``."""
        return first_job(self._core, tube, READY)

    def peek_delayed(self, tube: str = "default") -> Job[V]:
        """The delayed job of the tube that is due first. Raises ``JobNotFound``."""
        return first_job(self._core, tube, DELAYED)

    def peek_buried(self, tube: str = "default") -> Job[V]:
        """The job of the tube that was buried first. Raises ``JobNotFound``."""
        return first_job(self._core, tube, BURIED)

    def peek_priorities(self, tube: str = "default", limit: int = 1000) -> list[Job[V]]:
        """Of each priority that ready jobs of the tube have, the first job; at most ``limit``, the most urgent first.

        Among them is the ready job that waits longest, unless jobs were delayed or kicked. O(priorities).
        """
        return first_jobs(self._core, tube, index(limit))

    def peek_key(self, key: str, tube: str = "default") -> Job[V]:
        """The job of the tube that has this key, in whatever state it is. Raises ``JobNotFound``."""
        return job_with_key(self._core, tube, check_key(key))

    # -- lists -------------------------------------------------------------------------------------------------------

    def jobs(self, tube: str = "default", state: str | Collection[str] | None = None) -> Iterator[JobStats]:
        """The jobs of a tube in one state, in several or in all, in the order in which their turn comes.

        Lazy, a page at a time. Of one state, changes made meanwhile may be seen or not. Of several or all: the jobs
        that are there at the first ``next``, but for those that have gone when their turn comes.
        """
        return jobs_of(self._core, tube, state)

    # -- figures -----------------------------------------------------------------------------------------------------

    def tubes(self) -> list[str]:
        """All tubes: ``default``, and those that have jobs, or are used, watched or paused; oldest first."""
        core = self._core
        with core.deliveries, core.lock, core.turn:
            return list(core.scheduler.tubes)

    def stats(self) -> WorkStats:
        """The queue's figures."""
        core = self._core
        with core.deliveries, core.lock, core.turn as now:
            return work_stats(core, draining=self._intake.draining, uptime=now - self._opened_at)

    def figures(self) -> WorkFigures:
        """The figures for who watches the queue: no put waits for this call, and it raises nothing."""
        return work_figures(self._core)

    def stats_tube(self, tube: str) -> TubeStats:
        """The figures of a tube. Raises ``TubeNotFound``."""
        core = self._core
        with core.deliveries, core.lock, core.turn as now:
            if (found := core.scheduler.tubes.get(tube)) is None:
                raise TubeNotFound(tube)
            return tube_stats(found, now)

    def stats_job(self, job_id: int) -> JobStats:
        """The figures of a job. Raises ``JobNotFound``."""
        core = self._core
        with core.deliveries, core.lock, core.turn as now:
            return job_stats(core.find_locked(job_id, now), now)

    # -- the queue as a whole ------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Refuse puts from now on, with ``Draining``; all other calls work as before."""
        self._intake.draining = self._intake.is_limited = True

    @property
    def draining(self) -> bool:
        """Whether puts are refused."""
        return self._intake.draining

    def checkpoint(self) -> None:
        """Sync, and compact the journal: records that are over are committed, and their segments retired.

        All earlier changes are on disk when this returns. Raises ``DurabilityUnknown``, ``OSError``.
        """
        if self._core.journal is not None:
            self._compactor.compact()

    def save_reserves(self) -> None:
        """Write how often jobs have been reserved, without the wait of up to ``checkpoint_interval``.

        When this returns, the death of the process takes no reservation out of ``JobStats.reserves``. So a job that
        kills its process is counted if it was reserved, then saved, and begun after that. Costs a small record for each
        job that was reserved since its state was written last. In slices; other calls run in between.
        """
        bulk.save_reserves(self._core)

    def sync(self) -> None:
        """All earlier changes are on disk when this returns, and in the store that acknowledges them, if there is one.
        Raises ``DurabilityUnknown``, ``NotShipped``, ``Fenced``.
        """
        core = self._core
        with core.deliveries, core.lock, core.turn:  # raises if the queue is closed, or has failed
            pass
        core.sync()

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return self._is_ended or isinstance(self._core.state, QueueClosed)

    def close(self) -> None:
        """Write the counters, and close the journal; waiters get ``QueueClosed``. Idempotent.

        Reserved jobs are ready at the next opening. Raises ``DurabilityUnknown`` if a sync has failed and no call has
        raised that yet; of a queue that is shipped, ``NotShipped`` and ``Fenced`` as ``JournaledQueue.close``.
        """
        core = self._core
        if self._is_ended or isinstance(core.state, ForkedQueue):
            return
        try:
            if core.state is None and core.journal is not None:
                with core.unreported():
                    self._compactor.compact()
        except (OSError, KestrelError):
            pass  # the journal's ``close`` below raises it, unless a call has raised it before
        finally:
            self._end()

    def _end(self) -> None:
        """May be repeated, after an interrupt, and does the rest then."""
        core = self._core
        with core.lock:
            core.state = core.state or QueueClosed(f"work queue {self.name} is closed")
            core.dismiss_locked(QueueClosed(f"work queue {self.name} is closed"))
            for session in core.sessions:
                session.closed = True
            core.sessions.clear()
            core.must_check = True
        core.cancel_timer()
        self._compactor.cancel_timer()
        try:
            if core.journal is not None:
                core.journal.queue.close()
        finally:
            forget(self)
            core.notify()  # last: it runs users' callbacks, which may raise anything
        self._is_ended = True

    def _dismiss(self, error: QueueClosed) -> None:
        """The interpreter is ending: end all waiting (R29)."""
        core = self._core
        with core.lock:
            core.dismiss_locked(error)
        core.notify()

    def _abandon(self) -> None:
        """In a forked child: every later call raises ``ForkedQueue``. Uses no lock that another thread may hold."""
        self._core.abandon()

    def _check(self) -> None:
        """The invariants; for tests, with nobody else at work."""
        self._core._check()

    def __enter__(self) -> WorkQueue[V]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        core, state = self._core, "" if self._core.state is None else " closed"
        return f"<WorkQueue {self.name}: {len(core.scheduler.jobs)} jobs, {len(core.scheduler.tubes)} tubes{state}>"

    @property
    def _what(self) -> str:
        return f"WorkQueue {self.name!r} in {self.directory}"

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is not None and core.state is None and core.journal is not None:
            warn_unclosed(self)
