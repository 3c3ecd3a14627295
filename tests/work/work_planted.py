"""Planted faults of the work queue: mutations of the library, one switch each. With each stands what the explorer of
crashes, or of errors, says is broken, and what the programs should lean to so that it is caught soon.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import groupby
from typing import Any, NamedTuple
from unittest.mock import patch

from kestrelpy.work import bulk, records
from kestrelpy.work.compaction import Compactor
from kestrelpy.work.core import WorkCore
from kestrelpy.work.held_room import Gone, HeldRoom
from kestrelpy.work.job_log import JobLog
from kestrelpy.work.queue import WorkQueue
from kestrelpy.work.records import BURIED, State, Totals
from kestrelpy.work.recovery import JobRecovery
from kestrelpy.work.stored import StoredJob

SETTLING = {"advance": 8.0, "checkpoint": 5.0}
"""Leaning to what commits old records."""


class WorkFault(NamedTuple):
    """A mutation. ``letters``: one of these is what is said to be broken. ``by_errors``: it takes a failing disk."""

    plant: Callable[[], AbstractContextManager[None]]
    letters: str
    by_errors: bool
    options: dict[str, Any]


FAULTS: dict[str, WorkFault] = {}


def fault(letters: str, *, by_errors: bool = False, **options: Any) -> Callable[[Callable[[], Iterator[None]]], None]:
    def note(function: Callable[[], Iterator[None]]) -> None:
        FAULTS[function.__name__] = WorkFault(contextmanager(function), letters, by_errors, options)

    return note


def written_otherwise(job: Callable[[State], State]) -> Any:
    """States of jobs are written as ``job`` says."""
    real = records.encode_state
    return patch.object(records, "encode_state", lambda job_id, tube, state: real(job_id, tube, job(state)))


# -- what is not written ---------------------------------------------------------------------------------------------


@fault("(b) (f)")
def deletes_are_not_written() -> Iterator[None]:
    """Only the journal's reader learns of them."""

    def write(self: WorkCore, job: StoredJob, cause: int) -> None:
        self.log.over(job.at)
        self.log.over(job.state_at)

    with patch.object(WorkCore, "write_gone_locked", write):
        yield


@fault("(a)", steps={"bury": 0.0, "kick": 0.0, "release": 20.0})
def the_priority_of_a_release_is_not_written() -> Iterator[None]:
    """BD-W5."""
    real, write = WorkCore.become_locked, WorkCore.write_state_locked

    def write_state(self: WorkCore, job: StoredJob, state: State) -> None:
        write(self, job, state._replace(priority=job.priority))

    def become(self: WorkCore, stored: StoredJob, new: State, now: float, **others: Any) -> None:
        with patch.object(WorkCore, "write_state_locked", write_state):
            real(self, stored, new, now, **others)

    with patch.object(WorkCore, "become_locked", become):
        yield


@fault("(a)", steps={"release": 12.0})
def the_new_body_of_a_job_is_not_written() -> Iterator[None]:
    real = WorkCore.write_again_locked

    def write(self: WorkCore, job: StoredJob, body: bytes, state: State, now: float) -> None:
        real(self, job, job.body, state, now)

    with patch.object(WorkCore, "write_again_locked", write):
        yield


@fault("(a)", steps={"release": 12.0})
def the_new_body_and_the_state_of_a_job_are_two_records() -> Iterator[None]:
    real = WorkCore.write_again_locked

    def write(self: WorkCore, job: StoredJob, body: bytes, state: State, now: float) -> None:
        real(self, job, body, self.state_of(job, now), now)
        self.write_state_locked(job, state)

    with patch.object(WorkCore, "write_again_locked", write):
        yield


@fault("(a)")
def kicks_are_not_written() -> Iterator[None]:
    def kick(core: WorkCore, lives: list[StoredJob], now: float) -> int:
        for stored in lives:
            stored.kicks += 1
            core.scheduler.make_ready(stored, now)
        return len(lives)

    with patch.object(bulk, "kick_locked", kick):
        yield


@fault("(d)", steps={"reserve_many": 8.0, "bury": 15.0, "kick": 0.0, "delete": 2.0})
def the_order_of_burying_is_not_written() -> Iterator[None]:
    """BD-W6."""
    with written_otherwise(lambda state: state._replace(burial=0)):
        yield


@fault("(a)")
def buries_are_counted_at_opening() -> Iterator[None]:
    """BD-W6: replay goes through the same door as a call."""
    real = JobRecovery._become

    def become(self: JobRecovery, job: StoredJob, state: State) -> None:
        real(self, job, state)
        job.buries += state.state == BURIED

    with patch.object(JobRecovery, "_become", become):
        yield


@fault("(h)")
def counters_are_not_written() -> Iterator[None]:
    """BD-W12."""
    with patch.object(Compactor, "_write_counters", lambda self: self._core.journal.last_over):
        yield


@fault("(a) (h) itself", steps={"advance": 8.0})
def timeouts_are_not_written() -> Iterator[None]:
    def save(self: WorkCore, jobs: list[StoredJob]) -> None:
        for job in jobs:
            self.scheduler.unsaved.pop(job.id, None)
            self.scheduler.overdue.pop(job.id, None)

    with patch.object(WorkCore, "save_locked", save):
        yield


@fault("(i)", steps={"pause": 8.0})
def pauses_are_not_written() -> Iterator[None]:
    """BD-W5."""
    real = records.encode_tube
    with patch.object(records, "encode_tube", lambda figures: real(figures._replace(pause=0.0, paused_until_ms=0))):
        yield


@fault("(a)", steps={"move": 8.0})
def moves_are_not_written() -> Iterator[None]:
    real = WorkQueue.move

    def move(self: WorkQueue, job_id: int, tube: str) -> None:
        jobs = self._core.scheduler.jobs
        here = jobs[job_id].tube.name if job_id in jobs else ""
        encode = records.encode_state
        with patch.object(records, "encode_state", lambda job_id, tube, state: encode(job_id, here, state)):
            real(self, job_id, tube)

    with patch.object(WorkQueue, "move", move):
        yield


@fault("itself", steps={"reserve": 16.0, "save_reserves": 8.0, "kill": 8.0, "release": 1.0, "checkpoint": 0.0})
def reserves_are_not_written_when_they_are_saved() -> Iterator[None]:
    with patch.object(WorkQueue, "save_reserves", lambda self: None):
        yield


@fault("(g)", steps={"put_many": 8.0})
def batches_are_many_records_in_many_writes() -> Iterator[None]:
    def append_many(self: JobLog, some: list[bytes]) -> range:
        ids = [self.append(record) for record in some]
        return range(ids[0], ids[-1] + 1)

    with patch.object(JobLog, "append_many", append_many):
        yield


@fault("(g)", steps={"put_all": 8.0})
def a_batch_of_several_tubes_is_a_batch_for_each() -> Iterator[None]:
    real = JobLog.append_many

    def append_many(self: JobLog, some: list[bytes]) -> list[int]:
        ids: list[int] = []
        for _, of_one in groupby(some, lambda record: records.unpack_put(record)[1] if record[0] == records.PUT else 0):
            ids += real(self, list(of_one))
        return ids

    with patch.object(JobLog, "append_many", append_many):
        yield


# -- what is committed too early -------------------------------------------------------------------------------------


@fault("(a) (b) (h)", steps=SETTLING)
def records_are_committed_before_what_replaces_them_is_on_disk() -> Iterator[None]:
    """SS-B3."""
    with patch.object(JobLog, "sync", lambda self: None):
        yield


@fault("(a) itself", steps=SETTLING)
def the_put_is_over_when_a_state_is_written() -> Iterator[None]:
    real = WorkCore.saved_locked

    def saved(self: WorkCore, job: StoredJob, at: int) -> None:
        real(self, job, at)
        if at:
            self.log.over(job.at)

    with patch.object(WorkCore, "saved_locked", saved), patch.object(JobLog, "_check", lambda self, live: None):
        yield


@fault("(a) (h) itself", steps=SETTLING)
def one_record_too_many_is_committed() -> Iterator[None]:
    last_over: property = vars(JobLog)["last_over"]
    real = last_over.fget
    assert real is not None
    with (
        patch.object(
            JobLog, "last_over", property(lambda self: min(real(self) + 1, self._first + len(self._over) - 1))
        ),
        patch.object(JobLog, "_check", lambda self, live: None),
    ):
        yield


@fault("(a) itself", steps=SETTLING, length=120)
def jobs_that_are_carried_forward_lose_their_state() -> Iterator[None]:
    real = records.encode_put

    def encode(origin: Any, body: bytes, state: State | None = None) -> bytes:
        return real(origin, body, state and State(0, state.priority, 0.0, 0, 0, 0, 0, 0, 0, 0))

    with patch.object(records, "encode_put", encode):
        yield


@fault("(a) (c)", steps=SETTLING, length=120)
def jobs_that_are_carried_forward_count_again() -> Iterator[None]:
    """Their old records are not over, and the states after these strike once more: SS-B2."""
    real = WorkCore.rewrite_locked

    def rewrite(self: WorkCore, job: StoredJob, now: float) -> None:
        real(self, job, now)
        job.buries += 1

    with patch.object(WorkCore, "rewrite_locked", rewrite):
        yield


# -- what is read wrongly --------------------------------------------------------------------------------------------


@fault("(e)", steps={"delete": 30.0, **SETTLING})
def ids_go_on_above_those_that_live() -> Iterator[None]:
    """BD-W7."""
    real = records.decode_totals

    def decode(data: bytes) -> Totals:
        return real(data)._replace(last_id=0)

    with patch.object(records, "decode_totals", decode):
        yield


@fault("(h)", steps=SETTLING)
def counters_are_added_up() -> Iterator[None]:
    """SS-B2: read twice, they count twice."""
    real = JobRecovery._totals

    def totals(self: JobRecovery, at: int, data: bytes) -> None:
        before = self._scheduler.total_jobs
        real(self, at, data)
        self._scheduler.total_jobs += before

    with patch.object(JobRecovery, "_totals", totals):
        yield


@fault("(a) itself", steps={"advance": 6.0})
def delays_begin_anew_at_an_opening() -> Iterator[None]:
    """#62 of beanstalkd: replay makes delays longer."""

    def delay(self: JobRecovery, job: StoredJob, due_ms: int) -> None:
        job.state, job.sort_key = records.DELAYED, (self._now + job.delay, job.id)

    with patch.object(JobRecovery, "_delay", delay):
        yield


@fault("(a)", steps={"advance": 10.0, "put": 14.0})
def expiry_is_forgotten() -> Iterator[None]:
    real = JobRecovery._put

    def put(self: JobRecovery, at: int, data: bytes) -> None:
        real(self, at, data)
        self._scheduler.jobs[records.job_of(data)].expires = None

    with patch.object(JobRecovery, "_put", put):
        yield


# -- what a failing disk shows ---------------------------------------------------------------------------------------


@fault("(j)", by_errors=True)
def memory_is_changed_before_the_disk() -> Iterator[None]:
    """BD-W14: a release that fails leaves the job nowhere, or where it was not."""

    def become(
        self: WorkCore, stored: StoredJob, new: State, now: float, *, due: float = 0.0, body: bytes | None = None
    ) -> None:
        self.scheduler.take_out(stored)
        stored.priority, stored.delay = new.priority, new.delay
        stored.releases, stored.buries, stored.kicks = new.releases, new.buries, new.kicks
        self.scheduler.change_state(stored, new.state, now, due=due)
        if body is None:
            self.write_state_locked(stored, new)
            return
        self.scheduler.bytes += len(body) - len(stored.body)
        stored.body = body
        self.write_again_locked(stored, body, new, now)

    with patch.object(WorkCore, "become_locked", become):
        yield


@fault("(a) (j) (k)", by_errors=True)
def a_write_error_is_kept_quiet() -> Iterator[None]:
    """BD-W8."""
    real = JobLog.append

    def append(self: JobLog, record: bytes) -> int:
        try:
            return real(self, record)
        except OSError:
            return 0

    with patch.object(JobLog, "append", append), patch.object(JobLog, "_check", lambda self, live: None):
        yield


@fault("(k)", by_errors=True)
def a_delete_needs_room() -> Iterator[None]:
    """BD-W3."""

    def refuse(self: HeldRoom, gone: Gone) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with patch.object(HeldRoom, "write", refuse):
        yield


@fault("(b)", by_errors=True)
def a_delete_without_room_is_not_written_later() -> Iterator[None]:
    with patch.object(HeldRoom, "write", lambda self, gone: None):
        yield


@fault("(b)", by_errors=True)
def a_delete_without_room_is_not_synced() -> Iterator[None]:
    with patch.object(HeldRoom, "sync", lambda self: None):
        yield


@fault("(b)", by_errors=True)
def no_room_is_held_for_the_last_deletes() -> Iterator[None]:
    """Slots are used twice."""
    real = HeldRoom.write

    def write(self: HeldRoom, gone: Gone) -> None:
        self.used = min(self.used, 5)
        real(self, gone)

    with patch.object(HeldRoom, "write", write):
        yield


@fault("(b)", by_errors=True)
def a_delete_without_room_is_forgotten_too_soon() -> Iterator[None]:
    """As if the journal had it."""
    real = HeldRoom.write

    def write(self: HeldRoom, gone: Gone) -> None:
        real(self, gone)
        if self.used > 3:
            self.clear(0)

    with patch.object(HeldRoom, "write", write):
        yield
