"""A running outbox on a work queue: what wakes it, leases, stops, failures. In real time."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kestrelpy.outbox import GiveUp, JobNotFound, Outbox, RetryLater, current_job
from kestrelpy.work import WorkQueue
from tests.outbox.journal.looks import check, put, store_of
from tests.outbox.running import test_handlers
from tests.support.outboxes import ALONE, QUICK, Records, Steps, becomes, is_idle, logged, running
from tests.support.patience import until

OpenOutbox = Callable[..., Outbox]


@pytest.fixture
def open_outbox(tmp_path: Path) -> Iterator[OpenOutbox]:
    """``open_outbox(**options)``: on a work queue of its own; both are checked and closed at the end."""
    opened: list[tuple[Outbox, WorkQueue]] = []

    def open_one(**options: Any) -> Outbox:
        queue = WorkQueue(tmp_path / str(len(opened)))
        opened.append((Outbox(queue, **options), queue))
        return opened[-1][0]

    yield open_one
    for outbox, queue in opened:
        if outbox.stop(timeout=1.0):
            check(outbox)
        outbox.close()
        queue.close()


@pytest.fixture
def outbox(open_outbox: OpenOutbox) -> Outbox:
    """One with the usual options."""
    return open_outbox()


@pytest.fixture
def records() -> Iterator[Records]:
    """What ``kestrelpy.outbox`` logs."""
    with logged() as found:
        yield found


HANDLERS = (
    "a_backoff_is_asked_with_the_number_of_failures a_backoff_that_fails_is_logged_and_the_default_is_used "
    "a_failing_queue_holds_no_other_queue a_full_queue_does_not_hold_up_another "
    "a_predicate_that_raises_is_logged_and_the_failure_counts "
    "after_a_success_the_other_retries_go_on_at_once an_error_without_a_text_is_a_failure "
    "an_object_and_a_method_may_be_handlers backoff_is_the_time_until_the_next_run "
    "concurrency_bounds_the_runs_of_a_queue context_is_set_in_the_handler_its_hooks_and_its_log "
    "current_job_is_the_job_of_the_handler_and_its_hooks error_text_may_be_the_type_alone give_up_is_death_at_once "
    "hooks_are_called_after_the_state_is_saved max_retries_are_runs_after_the_first retries_run_one_at_a_time "
    "retry_later_for_ever_waits tasks_of_an_async_handler_see_its_job_and_no_other "
    "the_next_pass_asks_again_after_the_retry_interval without_max_retries_a_job_is_tried_for_ever "
    "without_stop_at_failure_all_retries_are_run"
)
"""Tests of handlers on databases that do not look at done jobs. They are collected here once more."""
globals().update({f"test_{name}": getattr(test_handlers, f"test_{name}") for name in HANDLERS.split()})


def gone(outbox: Outbox) -> None:
    """Wait until all jobs are done."""
    until(lambda: not outbox.jobs())


# -- what wakes it ---------------------------------------------------------------------------------------------------


def test_puts_wake_it_at_once(outbox: Outbox) -> None:
    steps = Steps()
    outbox.add_consumer("mail", steps.add)
    with running(outbox, **ALONE):
        until(lambda: outbox.core.started_ms)
        put(outbox, "mail", 1)
        steps.wait(1)
        with outbox.begin() as tx:
            outbox.put_many(tx, "mail", [2, 3])
        assert sorted(steps.wait(3)) == [1, 2, 3]
        asyncio.run(outbox.aput(None, "mail", 4))
        steps.wait(4)
        gone(outbox)


def more_than(items: list[Any], number: int) -> bool:
    return len(items) > number


def test_it_starts_within_milliseconds(outbox: Outbox) -> None:
    started: list[float] = []
    outbox.add_consumer("mail", lambda _: started.append(time.perf_counter()))
    waits = []
    with running(outbox, **ALONE):
        for number in range(30):
            begin = time.perf_counter()
            put(outbox, "mail", number)
            until(partial(more_than, started, number))
            waits.append(started[-1] - begin)
    assert sorted(waits)[15] < 0.05  # a loaded machine, too


def test_delayed_jobs_come_in_time_without_polling(outbox: Outbox) -> None:
    steps = Steps()
    outbox.add_consumer("mail", lambda payload: steps.add((payload, time.monotonic())))
    with running(outbox, **ALONE):
        begin = time.monotonic()
        put(outbox, "mail", "late", delay=0.3)
        with outbox.begin() as tx:
            outbox.put(tx, "mail", "early", delay=0.1)
        found = steps.wait(2)
        assert [payload for payload, _ in found] == ["early", "late"]
        assert [at - begin >= least for (_, at), least in zip(found, (0.099, 0.299), strict=True)] == [True, True]


def test_mending_wakes_it(outbox: Outbox) -> None:
    steps = Steps()

    def handler(payload: Any) -> None:
        steps.add(payload)
        if len(steps.seen) <= 2:
            raise GiveUp("not yet")

    outbox.add_consumer("mail", handler)
    with running(outbox, **ALONE):
        one, two = put(outbox, "mail", 1), put(outbox, "mail", 2)
        for job in (one, two):
            becomes(outbox, job, "dead")
        assert outbox.retry(one.id)
        steps.wait(3)
        assert outbox.retry_all("mail") == 1
        steps.wait(4)
        outbox.pause("mail")
        put(outbox, "mail", 3)
        outbox.resume("mail")
        assert steps.wait(5)[-1] == 3
        gone(outbox)


def test_it_waits_for_nobody_else(outbox: Outbox, queue_calls: Callable[[Outbox], list[str]]) -> None:
    """Idle, it asks nothing."""
    outbox.add_consumer("mail", print)
    calls = queue_calls(outbox)
    with running(outbox, **ALONE):
        until(lambda: calls)
        until(lambda: is_idle(outbox, calls))
        calls.clear()
        threading.Event().wait(0.3)
        assert calls == []


@pytest.fixture
def queue_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[Outbox], list[str]]:
    """What an outbox asks of its store."""

    def watch(outbox: Outbox) -> list[str]:
        store, calls = store_of(outbox), list[str]()
        perform = store.perform

        def noted(connection: Any, operation: Any, *args: Any, **kw: Any) -> Any:
            calls.append(operation.__name__)
            return perform(connection, operation, *args, **kw)

        monkeypatch.setattr(store, "perform", noted)
        return calls

    return watch


# -- outcomes --------------------------------------------------------------------------------------------------------


def test_thousands_of_jobs_run_once(outbox: Outbox) -> None:
    seen: list[int] = []

    async def async_handler(payload: int) -> None:
        seen.append(payload)

    outbox.add_consumer("mail", seen.append)
    outbox.add_consumer("bills", async_handler)
    with running(outbox, **ALONE):
        outbox.put_many(None, "mail", list(range(3000)))
        for number in range(3000, 3300):
            put(outbox, "bills" if number % 3 else "mail", number)
        gone(outbox)
    assert sorted(seen) == list(range(3300))


def test_retries_later_and_done_jobs(outbox: Outbox) -> None:
    tries: list[tuple[Any, int]] = []

    def handler(payload: Any) -> None:
        job = current_job()
        assert job is not None
        tries.append((payload, job.tries))
        if payload == "fails twice" and job.tries < 3:
            raise ValueError("no")
        if payload == "later" and len([each for each in tries if each[0] == "later"]) < 3:
            raise RetryLater(0.01)

    outbox.add_consumer("mail", handler, backoff=0.01)
    with running(outbox, **QUICK):
        put(outbox, "mail", "fails twice", key="k")
        put(outbox, "mail", "later")
        gone(outbox)
        assert put(outbox, "mail", "again", key="k").is_new
        gone(outbox)
    assert [each for each in tries if each[0] != "later"] == [
        ("fails twice", 1),
        ("fails twice", 2),
        ("fails twice", 3),
        ("again", 1),
    ]
    assert [each for each in tries if each[0] == "later"] == [("later", 1)] * 3


def test_a_dead_job_runs_by_hand(outbox: Outbox) -> None:
    seen: list[Any] = []

    def handler(payload: Any) -> None:
        seen.append(payload)
        if len(seen) < 3:
            raise ValueError("not yet")

    outbox.add_consumer("mail", handler, max_retries=0)
    job = put(outbox, "mail", 7)
    with running(outbox, **QUICK):
        becomes(outbox, job, "dead")
    again = outbox.retry_one("mail")
    assert again is not None
    assert (again.status, again.tries) == ("dead", 2)
    assert asyncio.run(outbox.aretry_one("mail")) is None  # done, and so deleted
    assert seen == [7, 7, 7]
    assert outbox.retry_one("mail") is None


def test_dead_jobs_that_are_not_kept(outbox: Outbox) -> None:
    def handler(payload: Any) -> None:
        raise GiveUp("never")

    outbox.add_consumer("mail", handler, keep_dead=0)
    with running(outbox, **QUICK):
        job = put(outbox, "mail", 7)
        until(lambda: not outbox.jobs())
    with pytest.raises(JobNotFound):
        outbox.get(job.id)


def test_a_handler_that_hangs_loses_its_job(open_outbox: OpenOutbox, records: Records) -> None:
    outbox = open_outbox(lease=0.2)
    go_on, runs = threading.Event(), Steps()

    def handler(payload: Any) -> None:
        job = current_job()
        assert job is not None
        runs.add(job.tries)
        if job.tries == 1:
            go_on.wait(20)

    outbox.add_consumer("mail", handler, hung_after=0.1, backoff=0)
    with running(outbox, **QUICK):
        put(outbox, "mail", 7)
        assert runs.wait(2) == [1, 2]
        gone(outbox)
        go_on.set()
        until(lambda: records.of("came too late") or records.of("lost"))


def test_a_long_handler_keeps_its_job(open_outbox: OpenOutbox) -> None:
    outbox = open_outbox(lease=0.2)
    runs = Steps()

    def handler(payload: Any) -> None:
        runs.add(payload)
        threading.Event().wait(0.6)

    outbox.add_consumer("mail", handler)
    with running(outbox, **QUICK):
        put(outbox, "mail", 7)
        gone(outbox)
    assert runs.seen == [7]


def test_a_stop_gives_back_what_has_not_begun(outbox: Outbox) -> None:
    begun, go_on = Steps(), threading.Event()

    def handler(payload: Any) -> None:
        begun.add(payload)
        go_on.wait(20)

    outbox.add_consumer("mail", handler)
    outbox.put_many(None, "mail", list(range(10)))
    outbox.start(threads=2, prefetch=5)
    begun.wait(2)
    until(lambda: sum(job.status == "running" for job in outbox.jobs()) == 7)
    stopping = threading.Thread(target=outbox.stop)
    stopping.start()
    until(lambda: sum(job.status == "ready" for job in outbox.jobs()) == 8)
    go_on.set()
    stopping.join()
    assert [(job.status, job.tries) for job in outbox.jobs()] == [("ready", 0)] * 8
    assert sorted(begun.seen) == [0, 1]


def test_what_can_not_be_stopped_is_given_back(outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def handler(payload: Any) -> None:
        begun.set()
        go_on.wait(20)

    outbox.add_consumer("mail", handler)
    job = put(outbox, "mail", 7)
    outbox.start(threads=1)
    assert begun.wait(20)
    assert outbox.stop(timeout=0.1) is False
    assert (outbox.get(job.id).status, outbox.get(job.id).tries) == ("ready", 0)
    go_on.set()
    assert caplog.at_level(logging.WARNING) is not None


def test_a_work_queue_that_is_closed_under_a_running_outbox(outbox: Outbox, records: Records) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def handler(payload: Any) -> None:
        begun.set()
        go_on.wait(20)

    outbox.add_consumer("mail", handler)
    put(outbox, "mail", 7)
    outbox.start(**QUICK)
    assert begun.wait(20)
    store_of(outbox)._queue.close()
    go_on.set()
    until(lambda: records.of("the database failed"))
    begin = time.monotonic()
    assert outbox.stop(timeout=5)
    assert time.monotonic() - begin < 5


def test_with_sync_always_outcomes_are_on_disk(tmp_path: Path) -> None:
    with WorkQueue(tmp_path, sync="always") as queue, Outbox(queue) as outbox:
        seen: list[int] = []
        outbox.add_consumer("mail", seen.append)
        with running(outbox, **ALONE):
            outbox.put_many(None, "mail", list(range(300)))
            gone(outbox)
        assert sorted(seen) == list(range(300))
        log = queue._core.journal
        assert log is not None
        stats = log.queue.stats()
        assert stats.durable_id == stats.tail_id
