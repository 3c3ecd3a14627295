"""What handlers return and raise, and what becomes of their jobs: docs/outbox.md, "Queues and handlers"."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest

from kestrelpy.outbox import GiveUp, Job, Outbox, RetryLater, current_job
from tests.support.outboxes import (
    ALONE,
    KINDS,
    Records,
    Steps,
    all_become,
    as_kind,
    becomes,
    put,
    put_each,
    running,
)
from tests.support.patience import PATIENCE, until

kinds = pytest.mark.parametrize("kind", KINDS)
HARMLESS = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Boom(Exception):
    """What handlers raise here."""


def raising(error: Any) -> Callable[[Any], None]:
    def work(_payload: Any) -> None:
        raise error

    return work


def failing_once(error: Any) -> Callable[[Any], None]:
    """A handler that raises at the first run of each payload."""
    seen = set()

    def work(payload: Any) -> None:
        if payload not in seen:
            seen.add(payload)
            raise error

    return work


# -- returned and raised ---------------------------------------------------------------------------------------------


@kinds
def test_whatever_a_handler_returns_is_success(outbox: Outbox, kind: str) -> None:
    values = [None, False, 0, Boom("returned"), NotImplemented]
    outbox.add_consumer("q", as_kind(kind, values.__getitem__))
    jobs = put_each(outbox, "q", range(len(values)))
    with running(outbox, **ALONE):
        done = all_become(outbox, "q", "done")
    assert [(job.id, job.tries, job.error, job.first_error_ms) for job in done] == [
        (job.id, 1, None, None) for job in jobs
    ]


@kinds
@pytest.mark.parametrize(
    "error",
    [Boom("no"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), StopIteration(1)],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_handler_raises_is_a_failure_of_that_job_alone(
    outbox: Outbox, kind: str, error: BaseException
) -> None:
    outbox.add_consumer("bad", as_kind(kind, raising(error)), max_retries=0)
    outbox.add_consumer("good", as_kind(kind, lambda _: None))
    bad = put_each(outbox, "bad", range(4))
    good = put(outbox, "good")
    with running(outbox, **ALONE):
        all_become(outbox, "bad", "dead")
        becomes(outbox, good, "done")
        assert becomes(outbox, put(outbox, "good"), "done").tries == 1
        found = outbox.get(bad[0].id)
    assert found.error is not None
    assert (type(error).__name__ in found.error, found.tries) == (True, 1)
    assert found.first_error_ms is not None
    assert found.finished_ms is not None


@kinds
def test_a_job_is_run_again_until_it_succeeds_and_then_has_no_error(outbox: Outbox, kind: str) -> None:
    outbox.add_consumer("q", as_kind(kind, failing_once(Boom("once"))), backoff=0)
    job = put(outbox, "q", 1)
    with running(outbox, **ALONE):
        done = becomes(outbox, job, "done")
    assert (done.tries, done.error) == (2, None)


@kinds
@pytest.mark.parametrize(("max_retries", "runs"), [(0, 1), (2, 3)])
def test_max_retries_are_runs_after_the_first(outbox: Outbox, kind: str, max_retries: int, runs: int) -> None:
    steps = Steps()

    def work(payload: Any) -> None:
        steps.add(payload)
        raise Boom

    outbox.add_consumer("q", as_kind(kind, work), backoff=0, max_retries=max_retries)
    job = put(outbox, "q", 1)
    with running(outbox, **ALONE):
        dead = becomes(outbox, job, "dead")
    assert (dead.tries, steps.seen) == (runs, [1] * runs)


def test_without_max_retries_a_job_is_tried_for_ever(outbox: Outbox) -> None:
    steps = Steps()

    def work(payload: Any) -> None:
        steps.add(payload)
        raise Boom

    outbox.add_consumer("q", work, backoff=0, max_retries=None)
    put(outbox, "q", 1)
    with running(outbox, **{**ALONE, "retry_interval": 0.001}):
        steps.wait(20)


@kinds
def test_retry_later_is_no_failure_and_no_try(outbox: Outbox, records: Records, kind: str) -> None:
    outbox.add_consumer("q", as_kind(kind, failing_once(RetryLater(0.02))), max_retries=0)
    job = put(outbox, "q", 1)
    with running(outbox, **ALONE):
        done = becomes(outbox, job, "done")
    assert (done.tries, done.first_error_ms) == (1, None)
    assert done.started_ms is not None
    assert done.started_ms - job.added_ms >= 20
    assert not records.of("failed")


def test_retry_later_of_a_job_in_error_keeps_its_tries(outbox: Outbox) -> None:
    errors = [Boom("first"), RetryLater(0), RetryLater(0.001)]

    def work(_payload: Any) -> None:
        if errors:
            raise errors.pop(0)

    outbox.add_consumer("q", work, max_retries=1, backoff=0)
    job = put(outbox, "q", 1)
    with running(outbox, **ALONE):
        assert becomes(outbox, job, "done").tries == 2


@pytest.mark.parametrize("seconds", [-1, float("nan"), "soon", None, [], 10**400, 1j], ids=lambda value: str(value)[:5])
def test_nonsense_in_retry_later_is_a_failure(outbox: Outbox, seconds: Any) -> None:
    outbox.add_consumer("q", raising(RetryLater(seconds)), max_retries=0)
    job = put(outbox, "q", 1)
    with running(outbox, **ALONE):
        dead = becomes(outbox, job, "dead")
        assert "RetryLater" in (dead.error or "")
        outbox.add_consumer("q", lambda _: None, replace=True)
        becomes(outbox, put(outbox, "q", 2), "done")


def test_retry_later_for_ever_waits(outbox: Outbox) -> None:
    outbox.add_consumer("q", raising(RetryLater(float("inf"))))
    job = put(outbox, "q", 1)
    with running(outbox, **ALONE):
        until(lambda: outbox.get(job.id).due_ms > job.added_ms + 1_000_000)
    assert outbox.get(job.id).status == "ready"


@kinds
def test_give_up_is_death_at_once(outbox: Outbox, records: Records, kind: str) -> None:
    outbox.add_consumer("q", as_kind(kind, raising(GiveUp("no such address"))), max_retries=None)
    job = put(outbox, "q", 1)
    with running(outbox, **ALONE):
        dead = becomes(outbox, job, "dead")
    assert (dead.tries, "no such address" in (dead.error or "")) == (1, True)
    assert [record.levelno for record in records.of(f"job {job.id} ", "no such address")] == [logging.ERROR]


# -- done_on ---------------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("done_on", [Boom, (ValueError, Boom), lambda error: isinstance(error, Boom)])
def test_done_on_says_which_errors_are_success(outbox: Outbox, records: Records, kind: str, done_on: Any) -> None:
    outbox.add_consumer("q", as_kind(kind, raising(Boom("somebody has done it"))), done_on=done_on)
    outbox.add_consumer("other", as_kind(kind, raising(OSError())), done_on=done_on, max_retries=0)
    job, other = put(outbox, "q", 1), put(outbox, "other", 1)
    with running(outbox, **ALONE):
        assert becomes(outbox, job, "done").error is None
        becomes(outbox, other, "dead")
    assert not records.of(f"job {job.id} ")


@kinds
@pytest.mark.parametrize("error", [ValueError("predicate"), SystemExit("predicate")], ids=["error", "exit"])
def test_a_predicate_that_raises_is_logged_and_the_failure_counts(
    outbox: Outbox, records: Records, kind: str, error: BaseException
) -> None:
    def done_on(_error: BaseException) -> bool:
        raise error

    outbox.add_consumer("q", as_kind(kind, raising(Boom("failed"))), done_on=done_on, max_retries=0)
    jobs = put_each(outbox, "q", range(4))
    with running(outbox, **ALONE):
        all_become(outbox, "q", "dead")
    assert "Boom" in (outbox.get(jobs[0].id).error or "")
    assert records.of("done_on")


# -- back-off --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backoff", [100, 100.0, lambda failures: 100 * failures], ids=["int", "float", "function"])
def test_backoff_is_the_time_until_the_next_run(outbox: Outbox, backoff: Any) -> None:
    outbox.add_consumer("q", raising(Boom()), backoff=backoff)
    job = put(outbox, "q", 1)
    with running(outbox, **ALONE):
        failed = becomes(outbox, job, "error")
    assert failed.started_ms is not None
    assert 100_000 <= failed.due_ms - failed.started_ms < 110_000


def test_a_backoff_is_asked_with_the_number_of_failures(outbox: Outbox) -> None:
    asked = Steps()

    def backoff(failures: int) -> float:
        asked.add(failures)
        return 0

    outbox.add_consumer("q", raising(Boom()), backoff=backoff, max_retries=3)
    job = put(outbox, "q", 1)
    with running(outbox, **ALONE):
        becomes(outbox, job, "dead")
    assert asked.seen == [1, 2, 3, 4]


def test_retries_come_in_the_order_in_which_they_are_due(outbox: Outbox) -> None:
    """Also where one that is due later is more urgent."""
    seen = Steps()
    outbox.add_consumer("q", seen.add, stop_at_failure=False)
    jobs = [put(outbox, "q", number, priority=-number) for number in range(4)]
    with outbox.begin() as connection:
        for number, job in enumerate(jobs):
            sql = f"UPDATE kestrel_jobs SET status = 'error', first_error_ms = 1, due_ms = {number} WHERE id = {job.id}"
            connection.exec_driver_sql(sql)
    with running(outbox, **{**ALONE, "threads": 1}):
        assert seen.wait(4) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "backoff",
    [raising(Boom("backoff")), raising(SystemExit()), lambda _: -1, lambda _: float("nan"), lambda _: "5"],
    ids=["raises", "exits", "negative", "nan", "text"],
)
def test_a_backoff_that_fails_is_logged_and_the_default_is_used(outbox: Outbox, records: Records, backoff: Any) -> None:
    outbox.add_consumer("q", raising(Boom("failed")), backoff=backoff)
    jobs = put_each(outbox, "q", range(4))
    with running(outbox, **ALONE):
        all_become(outbox, "q", "error")
    failed = outbox.get(jobs[0].id)
    assert failed.started_ms is not None
    assert 4000 <= failed.due_ms - failed.started_ms <= 7000
    assert "Boom" in (failed.error or "")
    assert records.of("backoff")


# -- retries of a queue ----------------------------------------------------------------------------------------------


class Service:
    """A handler that notes its retries, and fails."""

    def __init__(self) -> None:
        self.retries = Steps()

    def __call__(self, payload: int) -> None:
        job = current_job()
        assert job is not None
        if job.tries > 1:
            self.retries.add(payload)
        raise Boom


def test_a_service_that_is_down_is_asked_once_a_pass(outbox: Outbox) -> None:
    """A hundred jobs in error, all due: each pass runs one of them. First runs are not held."""
    service = Service()
    outbox.add_consumer("q", service, backoff=lambda failures: 0.0 if failures == 1 else 1000.0)
    put_each(outbox, "q", range(100))
    with running(outbox, **{**ALONE, "retry_interval": 1000.0}):
        all_become(outbox, "q", "error")
        service.retries.wait()
        first_runs = put_each(outbox, "q", range(100, 103))
        until(lambda: all(outbox.get(job.id).status == "error" for job in first_runs))
        becomes(outbox, put(outbox, "q", 200, priority=9), "error")
    assert len(service.retries.seen) == 1  # which failed first is up to four threads


def test_the_next_pass_asks_again_after_the_retry_interval(outbox: Outbox) -> None:
    """And not when the job that failed in the pass before is due, nor at the next poll."""
    service = Service()
    outbox.add_consumer("q", service, backoff=lambda failures: 0.0 if failures == 1 else 1000.0)
    put_each(outbox, "q", range(5))
    with running(outbox, **ALONE):
        assert sorted(service.retries.wait(5)) == list(range(5))


def test_after_a_success_the_other_retries_go_on_at_once(outbox: Outbox) -> None:
    """Their pass is not over: the interval between two passes plays no part."""
    outbox.add_consumer("q", failing_once(Boom()), backoff=0)
    put_each(outbox, "q", range(30))
    with running(outbox, **{**ALONE, "retry_interval": 1000.0}):
        all_become(outbox, "q", "done")


@kinds
def test_retries_run_one_at_a_time(outbox: Outbox, kind: str) -> None:
    now, most = set(), []
    lock = threading.Lock()
    seen = set()

    def begin(payload: int) -> bool:
        with lock:
            if payload not in seen:
                seen.add(payload)
                return False
            now.add(payload)
            most.append(len(now))
            return True

    def work(payload: int) -> None:
        if not begin(payload):
            raise Boom
        threading.Event().wait(0.001)
        now.discard(payload)

    async def awork(payload: int) -> None:
        if not begin(payload):
            raise Boom
        await asyncio.sleep(0.001)
        now.discard(payload)

    outbox.add_consumer("q", work if kind == "def" else awork, backoff=0)
    put_each(outbox, "q", range(10))
    with running(outbox, **{**ALONE, "threads": 4}):
        all_become(outbox, "q", "done")
    assert max(most) == 1


@kinds
def test_without_stop_at_failure_all_retries_are_run(outbox: Outbox, kind: str) -> None:
    steps = Steps()

    def work(payload: int) -> None:
        steps.add(payload)
        raise Boom

    outbox.add_consumer(
        "q", as_kind(kind, work), stop_at_failure=False, backoff=lambda failures: 0 if failures == 1 else 1000
    )
    put_each(outbox, "q", range(30))
    with running(outbox, **{**ALONE, "retry_interval": 1000.0}):
        assert sorted(steps.wait(60)) == sorted([*range(30), *range(30)])


def test_a_failing_queue_holds_no_other_queue(outbox: Outbox) -> None:
    outbox.add_consumer("bad", raising(Boom()), backoff=0, max_retries=None)
    outbox.add_consumer("good", failing_once(Boom()), backoff=0)
    put_each(outbox, "bad", range(10))
    put_each(outbox, "good", range(10))
    with running(outbox, **{**ALONE, "retry_interval": 1000.0}):
        all_become(outbox, "good", "done")


# -- concurrency -----------------------------------------------------------------------------------------------------


@kinds
def test_concurrency_bounds_the_runs_of_a_queue(outbox: Outbox, kind: str) -> None:
    """Also while jobs fail, and while other queues have room."""
    now, most = set(), []
    lock = threading.Lock()

    def begin(payload: int) -> None:
        with lock:
            now.add(payload)
            most.append(len(now))

    def work(payload: int) -> None:
        begin(payload)
        threading.Event().wait(0.001)
        now.discard(payload)
        if payload % 2:
            raise Boom

    async def awork(payload: int) -> None:
        begin(payload)
        await asyncio.sleep(0.001)
        now.discard(payload)
        if payload % 2:
            raise Boom

    outbox.add_consumer("q", work if kind == "def" else awork, concurrency=2, max_retries=0)
    outbox.add_consumer("other", lambda _: None)
    put_each(outbox, "q", range(20))
    put_each(outbox, "other", range(20))
    with running(outbox, **{**ALONE, "threads": 4}):
        until(lambda: all(job.status in ("done", "dead") for job in outbox.jobs()))
    assert max(most) <= 2


def test_a_full_queue_does_not_hold_up_another(outbox: Outbox) -> None:
    """All threads are busy with one queue, and a claim for the loop finds nothing: the rest is not forgotten."""

    async def idle(_payload: Any) -> None: ...

    outbox.add_consumer("async", idle)
    outbox.add_consumer("def", lambda _: threading.Event().wait(0.002))
    put_each(outbox, "def", range(50))
    with running(outbox, **{**ALONE, "threads": 1, "prefetch": 0}):
        all_become(outbox, "def", "done")


def test_many_queues_share_the_threads(outbox: Outbox) -> None:
    """No more is claimed than there are threads for, however many queues there are."""
    gate = threading.Event()
    for number in range(10):
        outbox.add_consumer(f"q{number}", lambda _: gate.wait(PATIENCE))
        put_each(outbox, f"q{number}", range(5))

    async def awork(_payload: Any) -> None: ...

    outbox.add_consumer("async", awork)
    with running(outbox, threads=2, prefetch=1):
        until(lambda: len(outbox.jobs(status="running")) == 3)
        becomes(outbox, put(outbox, "async"), "done")
        assert len(outbox.jobs(status="running")) == 3
        gate.set()


# -- what is logged --------------------------------------------------------------------------------------------------


@kinds
def test_failures_are_logged_with_what_one_needs_to_know(outbox: Outbox, records: Records, kind: str) -> None:
    outbox.add_consumer("q", as_kind(kind, raising(Boom("no connection"))), backoff=0, max_retries=3)
    job = put(outbox, "q", 1)
    with running(outbox, **ALONE):
        becomes(outbox, job, "dead")
    found = records.of(f"job {job.id} ", "'q'")
    assert [record.levelname for record in found] == ["WARNING", "WARNING", "ERROR", "ERROR"]
    assert ["try 1" in found[0].getMessage(), "try 4" in found[3].getMessage()] == [True, True]
    assert all(record.exc_info and isinstance(record.exc_info[1], Boom) for record in found)
    assert all(" s" in record.getMessage() for record in found)


@HARMLESS
def test_a_log_that_raises_ends_no_thread(outbox: Outbox) -> None:
    class Failing(logging.Filter):
        def filter(self, _record: logging.LogRecord) -> bool:
            raise Boom("in a filter")

    log = logging.getLogger("kestrelpy.outbox")
    failing = Failing()
    log.addFilter(failing)
    try:
        outbox.add_consumer("q", failing_once(GiveUp(1)), on_dead=raising(Boom()))
        outbox.add_consumer("r", failing_once(Boom()), backoff=0, on_error=lambda *_: raising(Boom())(0))
        jobs = [put(outbox, "q", 1), put(outbox, "r", 1)]
        with running(outbox, **ALONE):
            becomes(outbox, jobs[0], "dead")
            becomes(outbox, jobs[1], "done")
            becomes(outbox, put(outbox, "q", 1), "done")
    finally:
        log.removeFilter(failing)


class Unspeakable(Exception):
    """Its text can't be had."""

    def __str__(self) -> str:
        raise Boom("no text")

    __repr__ = __str__


@kinds
@pytest.mark.parametrize("error", [Unspeakable(), GiveUp(Unspeakable())], ids=["failure", "give up"])
def test_an_error_without_a_text_is_a_failure(outbox: Outbox, kind: str, error: Exception) -> None:
    outbox.add_consumer("q", as_kind(kind, raising(error)), max_retries=0)
    jobs = put_each(outbox, "q", range(4))
    with running(outbox, **ALONE):
        all_become(outbox, "q", "dead")
    assert type(error).__name__ in (outbox.get(jobs[0].id).error or "")


@pytest.mark.parametrize("text", ["x" * 100_000, "ä\0\ud800" * 20_000], ids=["ascii", "hostile"])
@pytest.mark.usefixtures("quiet")  # xdist can't send the record to its master
def test_the_text_of_an_error_is_16_kib_at_most_and_its_end(outbox: Outbox, text: str) -> None:
    outbox.add_consumer("q", raising(Boom(text + "the end")), max_retries=0)
    job = put(outbox, "q", 1)
    with running(outbox, **ALONE):
        error = becomes(outbox, job, "dead").error
    assert error is not None
    assert 16_000 < len(error.encode()) <= 16 << 10
    assert error.rstrip().endswith("the end")


def test_error_text_may_be_the_type_alone(open_outbox: Callable[..., Outbox]) -> None:
    outbox = open_outbox(error_text="type")
    outbox.add_consumer("q", raising(Boom("a secret")), max_retries=0)
    outbox.add_consumer("r", raising(ValueError("a secret")), max_retries=0)
    jobs = put(outbox, "q", 1), put(outbox, "r", 1)
    with running(outbox, **ALONE):
        assert becomes(outbox, jobs[0], "dead").error == f"{__name__}.Boom"
        assert becomes(outbox, jobs[1], "dead").error == "ValueError"


@kinds
def test_a_payload_that_does_not_decode_is_a_failure_and_holds_nothing(outbox: Outbox, kind: str) -> None:
    class OneWay:
        def encode(self, value: Any) -> str:
            return str(value)

        def decode(self, data: Any) -> Any:
            if data == "bad":
                raise Boom("no key for it")
            return data

    seen = Steps()
    outbox.add_consumer(
        "q", as_kind(kind, lambda _: None), codec=OneWay(), max_retries=0, on_dead=lambda job: seen.add(job)
    )
    jobs = put_each(outbox, "q", ["bad", "good"])
    with running(outbox, **ALONE):
        dead = becomes(outbox, jobs[0], "dead")
        becomes(outbox, jobs[1], "done")
        (hooked,) = seen.wait()
    assert "no key for it" in (dead.error or "")
    assert (hooked.id, hooked.stored) == (dead.id, "bad")
    with pytest.raises(Boom):
        _ = hooked.payload


# -- hooks -----------------------------------------------------------------------------------------------------------


@kinds
def test_hooks_are_called_after_the_state_is_saved(outbox: Outbox, kind: str) -> None:
    """For the last failure both, on_error first."""
    seen = Steps()

    def on_error(job: Job, error: BaseException) -> None:
        saved = outbox.get(job.id)
        seen.add((job.queue, "on_error", job.status, saved.status, job.tries, saved.error == job.error, type(error)))

    def on_dead(job: Job) -> None:
        saved = outbox.get(job.id)
        seen.add((job.queue, "on_dead", job.status, saved.status, job.tries, saved.error == job.error))

    options: dict[str, Any] = {"on_error": on_error, "on_dead": on_dead}
    outbox.add_consumer("again", as_kind(kind, raising(Boom("x"))), backoff=1000, **options)
    outbox.add_consumer("last", as_kind(kind, raising(Boom("x"))), max_retries=0, **options)
    with running(outbox, **ALONE):
        put(outbox, "again", 1)
        seen.wait()
        put(outbox, "last", 1)
        found = seen.wait(3)
    assert found == [
        ("again", "on_error", "error", "error", 1, True, Boom),
        ("last", "on_error", "dead", "dead", 1, True, Boom),
        ("last", "on_dead", "dead", "dead", 1, True),
    ]


@kinds
@pytest.mark.parametrize("error", [Boom("hook"), SystemExit(), KeyboardInterrupt()], ids=["error", "exit", "interrupt"])
def test_a_hook_that_raises_is_logged_and_changes_nothing(
    outbox: Outbox, records: Records, kind: str, error: BaseException
) -> None:
    seen = Steps()

    def on_error(job: Job, _error: BaseException) -> None:
        seen.add(("on_error", job.id))
        raise error

    def on_dead(job: Job) -> None:
        seen.add(("on_dead", job.id))
        raise error

    outbox.add_consumer("q", as_kind(kind, raising(Boom("x"))), max_retries=0, on_error=on_error, on_dead=on_dead)
    outbox.add_consumer("good", as_kind(kind, lambda _: None))
    jobs = put_each(outbox, "q", range(4))
    with running(outbox, **ALONE):
        seen.wait(8)
        all_become(outbox, "q", "dead")
        becomes(outbox, put(outbox, "good"), "done")
    assert sorted(seen.seen) == sorted((hook, job.id) for job in jobs for hook in ("on_dead", "on_error"))
    assert len(records.of("hook")) == 8


@kinds
def test_hooks_are_not_called_for_what_is_no_failure(outbox: Outbox, kind: str) -> None:
    seen = Steps()
    options: dict[str, Any] = {"on_error": lambda *found: seen.add(found), "on_dead": seen.add, "done_on": KeyError}
    outbox.add_consumer("later", as_kind(kind, failing_once(RetryLater(0))), **options)
    outbox.add_consumer("done", as_kind(kind, raising(KeyError())), **options)
    jobs = put(outbox, "later", 1), put(outbox, "done", 1)
    with running(outbox, **ALONE):
        for job in jobs:
            becomes(outbox, job, "done")
    assert seen.seen == []


def test_an_async_function_is_refused_where_nobody_awaits(outbox: Outbox) -> None:
    async def hook(*_: Any) -> None: ...

    for option in ("on_error", "on_dead", "validate", "depends_on", "done_on", "backoff"):
        options: dict[str, Any] = {option: hook}
        with pytest.raises(TypeError, match=option):
            outbox.add_consumer("q", lambda _: None, **options)


# -- current_job and context -----------------------------------------------------------------------------------------


def test_current_job_is_the_job_of_the_handler_and_its_hooks(outbox: Outbox) -> None:
    seen = Steps()

    def note(where: str) -> None:
        job = current_job()
        seen.add((where, None if job is None else (job.id, job.queue, job.key, job.tries, job.payload)))

    def work(payload: Any) -> None:
        note("handler")
        raise Boom

    outbox.add_consumer(
        "q", work, max_retries=0, on_error=lambda *_: note("on_error"), on_dead=lambda _: note("on_dead")
    )
    outbox.add_consumer("r", lambda _: note("r"))
    with running(outbox, **ALONE):
        job = put(outbox, "q", {"a": 1}, key="k")
        seen.wait(3)
        other = put(outbox, "r")
        seen.wait(4)
    fields = (job.id, "q", "k", 1, {"a": 1})
    assert seen.seen == [
        *((where, fields) for where in ("handler", "on_error", "on_dead")),
        ("r", (other.id, "r", None, 1, None)),
    ]
    assert current_job() is None


def test_tasks_of_an_async_handler_see_its_job_and_no_other(outbox: Outbox) -> None:
    """Ten at once, each with tasks of its own and work on a thread."""
    seen = Steps()
    together = asyncio.Barrier(10)

    def look() -> Any:
        job = current_job()
        return job and job.payload

    async def alook() -> Any:
        await asyncio.sleep(0)
        return look()

    async def work(payload: int) -> None:
        await together.wait()
        seen.add((payload, look(), await asyncio.create_task(alook()), await asyncio.to_thread(look)))

    outbox.add_consumer("q", work)
    put_each(outbox, "q", range(10))
    with running(outbox, **ALONE):
        all_become(outbox, "q", "done")
    assert sorted(seen.seen) == [(number,) * 4 for number in range(10)]


request_id: ContextVar[str] = ContextVar("request_id")
tenant: ContextVar[str] = ContextVar("tenant")


class Noting(logging.Filter):
    """Notes the value of the variable at each record."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str | None]] = []

    def filter(self, record: logging.LogRecord) -> bool:
        self.seen.append((record.getMessage(), request_id.get(None)))
        return True


@kinds
def test_context_is_set_in_the_handler_its_hooks_and_its_log(open_outbox: Callable[..., Outbox], kind: str) -> None:
    """And what a handler leaves behind is not there for the next one, nor what was unset at the put."""
    outbox = open_outbox(context={"request": request_id, "tenant": tenant})
    seen, noting = Steps(), Noting()

    def work(payload: Any) -> None:
        seen.add((payload, request_id.get(None), tenant.get(None)))
        tenant.set("left behind")
        raise Boom

    def hook(job: Job, *_: Any) -> None:
        seen.add((job.payload, request_id.get(None), tenant.get(None)))
        tenant.set("left behind")
        raise Boom("in a hook")

    outbox.add_consumer("q", as_kind(kind, work), max_retries=0, on_error=hook, on_dead=hook)
    log = logging.getLogger("kestrelpy.outbox")
    log.addFilter(noting)
    try:
        token = request_id.set("request-1")
        first = put(outbox, "q", 1)
        request_id.reset(token)
        with running(outbox, **{**ALONE, "threads": 1}):
            seen.wait(3)
            second = put(outbox, "q", 2)
            seen.wait(6)
    finally:
        log.removeFilter(noting)
    assert seen.seen == [(1, "request-1", None)] * 3 + [(2, None, None)] * 3
    of_first = [value for words, value in noting.seen if f"job {first.id}" in words]
    of_second = [value for words, value in noting.seen if f"job {second.id}" in words]
    assert (of_first, of_second) == (["request-1"] * 3, [None] * 3)


# -- what is no handler ----------------------------------------------------------------------------------------------


def test_a_generator_is_refused(outbox: Outbox) -> None:
    """A call of it would run nothing, and the job would be done."""

    def work(_payload: Any) -> Any:
        yield

    async def awork(_payload: Any) -> Any:
        yield

    for handler in (work, awork):
        with pytest.raises(TypeError, match="generator"):
            outbox.add_consumer("q", handler)


def test_a_coroutine_that_nobody_awaits_is_a_failure(outbox: Outbox) -> None:
    """As a decorator makes it that wraps an async function in a def one."""

    async def awork(_payload: Any) -> None: ...

    outbox.add_consumer("q", lambda payload: awork(payload), max_retries=0)
    job = put(outbox, "q")
    with running(outbox, **ALONE):
        assert "await" in (becomes(outbox, job, "dead").error or "")


def test_an_object_and_a_method_may_be_handlers(outbox: Outbox) -> None:
    seen = Steps()

    class Worker:
        def method(self, payload: Any) -> None:
            seen.add(payload)

        async def amethod(self, payload: Any) -> None:
            seen.add(payload)

        async def __call__(self, payload: Any) -> None:
            seen.add(payload)

    worker = Worker()
    handlers: dict[str, Callable[..., Any]] = {"a": worker.method, "b": worker.amethod, "c": worker}
    for queue, handler in handlers.items():
        outbox.add_consumer(queue, handler)
        put(outbox, handler, queue)
    with running(outbox, **ALONE):
        assert sorted(seen.wait(3)) == ["a", "b", "c"]
