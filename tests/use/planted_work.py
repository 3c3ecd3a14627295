"""Defects of work queues and of their server, put back one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from kestrelpy._reading import detached_source
from kestrelpy._writing import open_journal
from kestrelpy.errors import KestrelError
from kestrelpy.inbox import parts, publishing
from kestrelpy.server.beanstalk.parser import BeanstalkParser
from kestrelpy.work import core, intake, job, queue
from kestrelpy.work import queue as work_queue
from kestrelpy.work import session as work_session
from kestrelpy.work.compaction import Compactor
from kestrelpy.work.core import WorkCore
from kestrelpy.work.errors import JobTooBig
from kestrelpy.work.held_room import HeldRoom
from kestrelpy.work.job_log import JobLog
from kestrelpy.work.journal import JobJournal
from kestrelpy.work.scheduler import NEVER, Scheduler
from kestrelpy.work.session import Job
from kestrelpy.work.stored import SessionState, StoredJob, Tube, is_held
from kestrelpy.work.waiting import Awaiting, Delivery
from tests.use.planting import defect


def does_nothing(*_: Any, **__: Any) -> None:
    """Instead of a check."""


@defect(
    "U3",
    "items are put into, and taken from, the journal of a work queue: jobs are lost, or it never opens again",
    test="tests/work/test_work_kind.py::test_a_work_queue_is_refused_by_name",
)
def work_queues_are_not_told_from_others() -> Iterator[None]:
    with (
        patch.object(open_journal, "refuse_jobs", does_nothing),
        patch.object(detached_source, "refuse_jobs", does_nothing),
        patch.object(publishing, "refuse_jobs", does_nothing),
        patch.object(publishing, "refuse_jobs_in", does_nothing),
        patch.object(parts, "refuse_jobs_in", does_nothing),
    ):
        yield


@defect(
    "U3 (mark)",
    "a work queue that is new is not marked: until it is opened again anybody may put items into it",
    test="tests/work/test_work_kind.py::test_a_work_queue_is_refused_by_name",
)
def new_work_queues_are_not_marked() -> Iterator[None]:
    with patch.object(JobJournal, "_mark_as_jobs", does_nothing), patch.object(HeldRoom, "hold", does_nothing):
        yield  # the room is in the file that is the mark


@defect(
    "U5",
    "a Decimal as a delay or ttr raises TypeError half-way: a job that was refused is there after a restart",
    test="tests/work/test_work_use.py::test_a_duration_is_any_number",
)
def durations_are_taken_as_they_are() -> Iterator[None]:
    def as_it_is(_: str, value: Any) -> Any:
        return value

    with (
        patch.object(queue, "check_seconds", as_it_is),
        patch.object(queue, "check_span", as_it_is),
        patch.object(intake, "check_seconds", as_it_is),
        patch.object(intake, "check_span", as_it_is),
        patch.object(job, "check_seconds", as_it_is),
    ):
        yield


@defect(
    "U5 (note)",
    "a TypeError in the middle of a reservation leaves a job that nobody gets until a restart",
    test="tests/work/test_work_use.py::test_an_error_in_the_middle_of_something_is_mended",
    unreachable="it takes an error that no argument brings about any more",
)
def type_errors_are_taken_for_harmless() -> Iterator[None]:
    real = WorkCore.note

    def note(self: WorkCore, error: BaseException) -> None:
        if not isinstance(error, KestrelError | OSError | ValueError | TypeError):
            real(self, error)

    with patch.object(WorkCore, "note", note):
        yield


@defect(
    "U6",
    "a thread that waits in reserve() keeps the interpreter from ending",
    test="tests/work/test_work_use.py::test_a_work_queue_is_known_to_the_interpreters_end",
    unreachable="the explorer's own process does not end; one that waits for ever would be its own timeout",
)
def work_queues_are_unknown_at_the_end() -> Iterator[None]:
    with patch.object(work_queue, "remember", does_nothing), patch.object(work_queue, "forget", does_nothing):
        yield


@defect(
    "U7",
    "with session.reserve() as job: says nothing when the reservation is over, and the job is done twice",
    test="tests/work/test_work_use.py::test_a_block_whose_reservation_is_over_says_so",
)
def blocks_are_silent_about_what_they_lost() -> Iterator[None]:
    real = Job.__exit__

    def leave(self: Job, *error: Any) -> None:
        if is_held(self._stored, self._session, self.reserves):
            real(self, *error)

    with patch.object(Job, "__exit__", leave):
        yield


@defect(
    "U16",
    "a timeout of NaN is accepted, and costs a timer every millisecond",
    test="tests/work/test_work_use.py::test_what_is_no_timeout_is_refused_whether_a_job_is_ready_or_not",
)
def timeouts_are_taken_as_they_are() -> Iterator[None]:
    def as_it_is(timeout: Any) -> Any:
        return timeout

    with patch.object(work_session, "check_timeout", as_it_is):
        yield


@defect(
    "bug 5 (jobs)",
    "JobTooBig names max_item_bytes, an option that nobody has set",
    test="tests/work/test_work_use.py::test_a_job_that_is_too_big_is_told_so_in_its_own_words",
    unreachable="the explorer compares types of errors, not their words",
)
def a_job_too_big_is_an_item_too_large() -> Iterator[None]:
    def begin(self: JobTooBig, size: int, most: int) -> None:
        super(JobTooBig, self).__init__(size, most)

    with patch.object(JobTooBig, "__init__", begin):
        yield


@defect(
    "U8",
    "one bad byte in a record, and no job of the work queue can be reached any more",
    test="tests/work/test_work_damage.py::test_one_bad_byte_costs_one_job",
)
def quarantine_does_not_reach_the_jobs() -> Iterator[None]:
    real = JobLog.replay

    def replay(self: JobLog, disk: Any, *, quarantine: bool) -> Any:
        return real(self, disk, quarantine=False)

    with patch.object(JobLog, "replay", replay):
        yield


@defect(
    "U8 (goes)",
    "a damaged segment stays for as long as one job in it lives: each opening needs quarantine again",
    test="tests/work/test_work_damage.py::test_what_is_damaged_goes_when_what_lives_there_was_written_anew",
)
def damage_stays() -> Iterator[None]:
    with patch.object(JobLog, "is_short", lambda self, size: self.bytes <= self.bound(size)):
        yield


@defect(
    "H10",
    "a job is given to a task whose event loop is closed: nobody has it until its ttr is over",
    test="tests/work/test_work_leavers.py::test_a_loop_that_is_closed_takes_no_job_with_it",
)
def jobs_go_into_closed_loops() -> Iterator[None]:
    def notify(self: Awaiting, outcome: Any) -> None:
        delivered = Delivered()
        delivered.send(outcome)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._arrive, delivered)

    with patch.object(Awaiting, "notify", notify):
        yield


class Delivered(Delivery):
    """One that does not come back."""

    def __del__(self) -> None:
        """Nothing."""


@defect(
    "U13",
    "sessions that were dropped without close() are never freed",
    test="tests/work/test_work_leavers.py::test_sessions_that_nobody_has_are_no_more",
)
def sessions_are_held_for_ever() -> Iterator[None]:
    with patch.object(core, "WeakSet", set):
        yield


@defect(
    "U11",
    "waiting in one session costs O(waiters) for each job: 4,000 tasks in areserve() take a minute",
    test="tests/work/test_work_slices.py::test_many_waiters_in_one_session_cost_no_more_each",
    unreachable="it costs time, and changes no answer",
)
def every_waiter_is_looked_at_for_every_job() -> Iterator[None]:
    real = Scheduler.reserve

    def reserve(self: Scheduler, job: Any, holder: Any, now: float) -> None:
        real(self, job, holder, now)
        for waiter in holder.waiters:
            entry = (NEVER, waiter.number, waiter)
            self.waiting.add(entry)
            self.waiting.discard(entry)

    with patch.object(Scheduler, "reserve", reserve):
        yield


@defect(
    "U12",
    "the counters of a hundred thousand tubes are written with the lock held in one go",
    test="tests/work/test_work_slices.py::test_changed_tubes_are_written_in_slices",
    unreachable="it costs time, and changes no answer",
)
def tubes_are_written_in_one_go() -> Iterator[None]:
    def write(self: Compactor) -> int:
        core = self._core
        assert core.journal is not None
        with core.deliveries, core.lock, core.turn as now:
            self._write_unrecorded_locked()
            self._write_tubes_locked(list(core.scheduler.changed_tubes.values()), now)
            self._write_totals_locked()
            return core.journal.last_over

    with patch.object(Compactor, "_write_counters", write):
        yield


@defect(
    "U14",
    "a job whose life is over is given out, if more than a hundred things are due before it",
    test="tests/work/test_work_slices.py::test_what_has_expired_is_not_there",
)
def what_has_expired_is_there_until_somebody_comes() -> Iterator[None]:
    def take(self: Scheduler, holder: SessionState, now: float) -> StoredJob | None:
        job = self._take_first(holder)
        if job is not None:
            self.reserve(job, holder, now)
        return job

    with patch.object(Scheduler, "expire", lambda *_: False), patch.object(Scheduler, "take", take):
        yield


@defect(
    "U17",
    "a job with the key of an expired one, the last of its tube, is in a tube that is gone: nobody can reserve it",
    test="tests/work/test_work_slices.py::test_the_key_of_the_last_job_of_a_tube_is_free_when_it_has_expired",
)
def the_key_of_an_expired_job_takes_the_tube_with_it() -> Iterator[None]:
    real = intake.JobIntake.check_key_locked

    def check(self: intake.JobIntake, tube: Tube, key: str, now: float) -> Tube:
        scheduler = self._core.scheduler
        was_taken = (tube.name, key) in scheduler.keys
        found = real(self, tube, key, now)
        if was_taken:
            scheduler.forget_unneeded(found)
        return tube

    with patch.object(intake.JobIntake, "check_key_locked", check):
        yield


@defect(
    "U18",
    "a put of jobs that Ctrl-C strikes leaves a part of the batch",
    test="tests/interrupts/test_interrupts_work.py::test_a_batch_is_whole_or_not_there",
    unreachable="its interrupts come before and after calls, and in callbacks: none comes between two jobs of a batch",
)
def batches_come_into_memory_one_by_one() -> Iterator[None]:
    class OneByOne(dict[int, StoredJob]):
        """Does not take many at once."""

        def update(self, *_: Any, **__: Any) -> None:
            """``_store_locked`` adds them one by one then."""

    real = Scheduler.__init__

    def init(self: Scheduler, max_attempts: int | None = None) -> None:
        real(self, max_attempts)
        self.jobs = OneByOne()

    with patch.object(Scheduler, "__init__", init):
        yield


@defect(
    "U10",
    "the server keeps the last body of every idle connection",
    test="tests/server/test_bad_clients.py::test_one_who_says_nothing_any_more_holds_nothing",
    unreachable="it costs memory, and changes no answer",
)
def parsers_keep_what_is_done() -> Iterator[None]:
    with patch.object(BeanstalkParser, "trim", does_nothing):
        yield


@defect(
    "U15",
    "one client that watches 100,000 tubes takes 150 MB, whatever the limits",
    test="tests/server/test_bad_clients.py::test_tubes_may_be_bounded",
)
def tubes_are_not_bounded() -> Iterator[None]:
    with patch.object(work_queue, "check_limit", lambda what, value: None if what == "max_tubes" else value):
        yield


@defect(
    "E2",
    "a work queue whose sync has failed in the background is closed in silence",
    test="tests/work/test_better.py::test_bd_w9_a_sync_that_fails_in_the_background_is_told_by_close_at_the_latest",
)
def what_a_work_queue_does_by_itself_counts_as_told() -> Iterator[None]:
    with patch.object(JobJournal, "unreported", lambda self: contextlib.nullcontext()):
        yield


@defect(
    "jobs delay",
    "a job that is released without a delay is ready at once, whatever the retry_delay of its queue says",
    test="tests/work/test_retry_delay.py::test_it_is_for_a_release_without_a_delay_and_for_blocks_that_raise",
)
def jobs_are_tried_again_at_once() -> Iterator[None]:
    with patch.object(intake.JobIntake, "retry_delay", lambda self, attempts: 0.0):
        yield


@defect(
    "jobs codec",
    "the new body of a job that is released or buried is stored as it was given, and never decodes again",
    test="tests/work/test_work_codec.py::test_a_new_body_is_a_value_too",
)
def new_bodies_are_not_encoded() -> Iterator[None]:
    def checked_body(self: intake.JobIntake, body: Any) -> bytes:
        return self._as_bytes(body)

    with patch.object(intake.JobIntake, "checked_body", checked_body):
        yield
