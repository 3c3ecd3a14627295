"""``start``, ``stop`` and what is between them: docs/outbox.md, "Running"."""

from __future__ import annotations

import asyncio
import linecache
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import sqlalchemy

from kestrelpy.outbox import Job, Outbox, OutboxError
from kestrelpy.outbox.lifecycle import Lifecycle
from kestrelpy.outbox.runner import Runner
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
    threads_left,
)
from tests.support.patience import PATIENCE, until

kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threads_left()
    yield
    until(lambda: threads_left() == before)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Handlers wait for it; it opens at the end of the test at the latest."""
    opened = threading.Event()
    yield opened
    opened.set()


def is_stopping(outbox: Outbox) -> bool:
    """Whether a stop has begun, and has not ended."""
    runner = outbox._lifecycle._runner
    return runner is not None and runner.is_stopping


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    began = time.monotonic()
    return function(), time.monotonic() - began


# -- starting --------------------------------------------------------------------------------------------------------


def test_start_and_stop_are_idempotent(outbox: Outbox) -> None:
    outbox.add_consumer("q", lambda _: None)
    assert outbox.stop()
    outbox.start(threads=1)
    there = threads_left()
    outbox.start(threads=9, poll_interval=0.5)
    assert threads_left() == there
    becomes(outbox, put(outbox, "q"), "done")
    assert outbox.stop()
    assert threads_left() == []
    assert outbox.stop(timeout=0)


def test_it_starts_again(outbox: Outbox) -> None:
    outbox.add_consumer("q", lambda _: None)
    for _ in range(3):
        with running(outbox, **ALONE):
            becomes(outbox, put(outbox, "q"), "done")
    left = put(outbox, "q")
    with running(outbox, **ALONE):
        becomes(outbox, left, "done")


def test_many_threads_start_and_stop_it_at_once(outbox: Outbox) -> None:
    outbox.add_consumer("q", lambda _: None)
    together = threading.Barrier(8)

    def many(call: Callable[[], Any]) -> list[threading.Thread]:
        def wait_and_call() -> None:
            together.wait()
            call()

        threads = [threading.Thread(target=wait_and_call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        return threads

    many(lambda: outbox.start(threads=2))
    there = threads_left()
    assert there.count("kestrelpy-outbox-feeder") == 1
    assert len([name for name in there if name[-1].isdigit()]) == 2
    becomes(outbox, put(outbox, "q"), "done")
    many(outbox.stop)
    assert threads_left() == []


def test_before_create_tables_it_says_what_to_do(engine: sqlalchemy.Engine) -> None:
    outbox = Outbox(engine)
    outbox.add_consumer("q", lambda _: None)
    with pytest.raises(OutboxError, match="create_tables"):
        outbox.start()
    with pytest.raises(OutboxError, match="create_tables"), outbox.running():
        pass
    assert threads_left() == []
    outbox.create_tables()
    with running(outbox, **ALONE):
        becomes(outbox, put(outbox, "q"), "done")
    outbox.close()


def test_an_outbox_without_a_database_says_what_to_do() -> None:
    with pytest.raises(OutboxError, match="bind"):
        Outbox().start()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_sqlite_in_memory_is_refused(url: str) -> None:
    """Each thread would see an empty database of its own, or all would share one transaction."""
    outbox = Outbox(url)
    outbox.create_tables()
    outbox.add_consumer("q", lambda _: None)
    job = put(outbox, "q")
    with pytest.raises(OutboxError, match="memory"):
        outbox.start()
    assert outbox.jobs() == [job]
    outbox.close()


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 0},
        {"threads": 1.5},
        {"prefetch": -1},
        {"poll_interval": 0},
        {"poll_interval": float("nan")},
        {"retry_interval": 0},
        {"queues": ["no such name!"]},
        {"queues": [7]},
    ],
    ids=str,
)
def test_nonsense_is_refused_and_nothing_runs(outbox: Outbox, options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        outbox.start(**options)
    assert threads_left() == []


@pytest.mark.parametrize("timeout", [-1, float("nan"), "1"])
def test_a_timeout_must_be_seconds(outbox: Outbox, timeout: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        outbox.stop(timeout)


@pytest.mark.parametrize("queues", ["a", ["a"], {"a", "later"}], ids=["str", "list", "set"])
def test_queues_chooses_some(outbox: Outbox, queues: Any) -> None:
    for queue in ("a", "b"):
        outbox.add_consumer(queue, lambda _: None)
    with running(outbox, queues, **ALONE):
        other = put(outbox, "b")
        becomes(outbox, put(outbox, "a"), "done")
        becomes(outbox, put(outbox, "a"), "done")
    assert (outbox.get(other.id).status, outbox.get(other.id).tries) == ("ready", 0)


# -- consumers while it runs -----------------------------------------------------------------------------------------


@kinds
def test_consumers_come_and_go_while_it_runs(outbox: Outbox, kind: str) -> None:
    """A job that was put before its consumer came does not wait for a poll."""
    seen = Steps()
    outbox.queue("q")
    waiting = put(outbox, "q", 1)
    with running(outbox, **ALONE):
        outbox.add_consumer("q", as_kind(kind, lambda payload: seen.add(("first", payload))))
        becomes(outbox, waiting, "done")
        with pytest.raises(ValueError, match="replace"):
            outbox.add_consumer("q", lambda _: None)
        outbox.add_consumer("q", as_kind("def", lambda payload: seen.add(("second", payload))), replace=True)
        becomes(outbox, put(outbox, "q", 2), "done")
        outbox.remove_consumer("q")
        outbox.add_consumer("other", as_kind(kind, lambda payload: seen.add(("other", payload))))
        left = put(outbox, "q", 3)
        becomes(outbox, put(outbox, "other", 4), "done")
        becomes(outbox, put(outbox, "other", 5), "done")
    assert seen.seen == [("first", 1), ("second", 2), ("other", 4), ("other", 5)]
    assert (outbox.get(left.id).status, outbox.get(left.id).tries) == ("ready", 0)


def test_a_handler_registers_another_one(outbox: Outbox) -> None:
    outbox.add_consumer("q", lambda _: outbox.add_consumer("r", lambda _: None))
    outbox.queue("r")
    with running(outbox, **ALONE):
        job = put(outbox, "r")
        put(outbox, "q")
        becomes(outbox, job, "done")


# -- stopping --------------------------------------------------------------------------------------------------------


@kinds
def test_stop_waits_for_what_runs_and_for_its_hooks(outbox: Outbox, kind: str) -> None:
    steps = Steps()

    def begin() -> None:
        steps.add("began")
        threading.Timer(0.05, lambda: steps.add("stopping")).start()

    def work(_payload: Any) -> None:
        begin()
        steps.wait(2)
        raise ValueError

    async def awork(_payload: Any) -> None:
        begin()
        await asyncio.to_thread(steps.wait, 2)
        raise ValueError

    def on_dead(_job: Job) -> None:
        threading.Event().wait(0.02)
        steps.add("hook")

    outbox.add_consumer("q", work if kind == "def" else awork, max_retries=0, on_dead=on_dead)
    outbox.start(**ALONE)
    job = put(outbox, "q")
    steps.wait()
    assert outbox.stop()
    assert (outbox.get(job.id).status, steps.seen) == ("dead", ["began", "stopping", "hook"])


@kinds
def test_a_stuck_handler_holds_no_stop_and_its_job_is_given_back(
    outbox: Outbox, gate: threading.Event, kind: str
) -> None:
    """A def handler goes on, and what comes of it changes nothing; an async one is cancelled."""
    steps = Steps()

    def work(_payload: Any) -> None:
        steps.add("began")
        gate.wait(PATIENCE)
        steps.add("ended")

    async def awork(_payload: Any) -> None:
        steps.add("began")
        try:
            await asyncio.Event().wait()
        finally:
            steps.add("ended")

    outbox.add_consumer("q", work if kind == "def" else awork, max_retries=0)
    outbox.start(**ALONE)
    job = put(outbox, "q")
    steps.wait()
    is_done, seconds = timed(lambda: outbox.stop(timeout=0.05))
    assert (is_done, seconds < 1.05) == (False, True)
    found = outbox.get(job.id)
    assert (found.status, found.tries, found.due_ms, found.error) == ("ready", 0, job.due_ms, None)
    gate.set()
    steps.wait(2)
    until(lambda: threads_left() == [])
    assert outbox.get(job.id).status == "ready"
    outbox.add_consumer("q", lambda _: None, replace=True)
    with running(outbox, **ALONE):
        assert becomes(outbox, job, "done").tries == 1


@pytest.mark.parametrize("how", ["swallows", "blocks"])
def test_an_async_handler_that_can_not_be_cancelled_holds_no_stop(
    outbox: Outbox, gate: threading.Event, how: str
) -> None:
    steps = Steps()

    async def swallows(_payload: Any) -> None:
        steps.add("began")
        while not gate.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                steps.add("cancelled")

    async def blocks(_payload: Any) -> None:
        steps.add("began")
        gate.wait(PATIENCE)

    outbox.add_consumer("q", swallows if how == "swallows" else blocks)
    outbox.start(**ALONE)
    job = put(outbox, "q")
    steps.wait()
    is_done, seconds = timed(lambda: outbox.stop(timeout=0.05))
    assert (is_done, seconds < 1.05) == (False, True)
    assert (outbox.get(job.id).status, outbox.get(job.id).tries) == ("ready", 0)


def test_what_was_claimed_and_not_begun_is_given_back_in_its_order(outbox: Outbox, gate: threading.Event) -> None:
    steps, began = Steps(), threading.Event()

    def work(payload: int) -> None:
        steps.add(payload)
        began.set()
        gate.wait(PATIENCE)

    outbox.add_consumer("q", work)
    jobs = put_each(outbox, "q", range(20))
    outbox.start(threads=1, prefetch=15)
    began.wait(PATIENCE)
    until(lambda: len(outbox.jobs(status="running")) > 10)

    def open_the_gate() -> None:
        until(lambda: is_stopping(outbox))
        gate.set()

    opening = threading.Thread(target=open_the_gate)
    opening.start()
    assert outbox.stop()
    opening.join(PATIENCE)
    found = outbox.jobs("q")
    assert [job.status for job in found] == ["done"] + ["ready"] * 19
    assert [(job.tries, job.due_ms) for job in found[1:]] == [(0, job.due_ms) for job in jobs[1:]]
    with running(outbox, **{**ALONE, "threads": 1}):
        all_become(outbox, "q", "done")
    assert steps.seen == list(range(20))


def test_a_retry_is_given_back_as_a_retry(outbox: Outbox, gate: threading.Event) -> None:
    steps = Steps()

    def work(_payload: Any) -> None:
        steps.add(1)
        if len(steps.seen) == 1:
            raise ValueError
        gate.wait(PATIENCE)

    outbox.add_consumer("q", work, backoff=0)
    job = put(outbox, "q")
    outbox.start(**ALONE)
    steps.wait(2)
    assert not outbox.stop(timeout=0)
    found = outbox.get(job.id)
    assert (found.status, found.tries, "ValueError" in (found.error or "")) == ("error", 1, True)


@pytest.mark.parametrize("how", ["stop", "astop", "stop in a coroutine", "hook", "timeout"])
def test_stop_in_a_handler_does_not_wait_for_itself(outbox: Outbox, how: str) -> None:
    said = Steps()

    def work(_payload: Any) -> None:
        said.add(outbox.stop(timeout=0.2 if how == "timeout" else None))

    async def awork(_payload: Any) -> None:
        said.add(await outbox.astop() if how == "astop" else outbox.stop())

    def failing(_payload: Any) -> None:
        raise ValueError

    handlers: dict[str, Any] = {"stop": work, "timeout": work, "hook": failing}
    outbox.add_consumer("q", handlers.get(how, awork), max_retries=0, on_dead=work if how == "hook" else None)
    outbox.start(**ALONE)
    job = put(outbox, "q")
    assert said.wait() == [False]
    assert outbox.stop()
    assert outbox.get(job.id).status == ("dead" if how == "hook" else "done")
    with running(outbox, **ALONE):
        pass


def test_start_in_a_handler_that_has_stopped_it_is_refused(outbox: Outbox) -> None:
    """It would wait for its own end."""
    said = Steps()

    def work(_payload: Any) -> None:
        outbox.stop()
        try:
            outbox.start()
        except OutboxError as error:
            said.add(str(error))

    outbox.add_consumer("q", work)
    outbox.start(**ALONE)
    put(outbox, "q")
    assert "stopping" in said.wait()[0]
    assert outbox.stop()


def test_a_start_waits_for_the_stop_before_it(outbox: Outbox, gate: threading.Event) -> None:
    began = threading.Event()

    def work(payload: Any) -> None:
        if payload == 1:
            began.set()
            gate.wait(PATIENCE)

    outbox.add_consumer("q", work)
    outbox.start(**ALONE)
    first = put(outbox, "q", 1)
    began.wait(PATIENCE)
    stopping = threading.Thread(target=outbox.stop)
    stopping.start()
    until(lambda: is_stopping(outbox))
    threading.Timer(0.05, gate.set).start()
    outbox.start(**ALONE)
    assert (gate.is_set(), outbox.get(first.id).status) == (True, "done")
    becomes(outbox, put(outbox, "q", 2), "done")
    stopping.join(PATIENCE)
    assert outbox.stop()


def test_a_stop_forgets_no_runner_but_its_own(outbox: Outbox) -> None:
    """Another thread starts the outbox again right before the stop of the first runner notes that it has ended."""
    outbox.add_consumer("q", lambda _: None)
    is_there, has_started = threading.Event(), threading.Event()

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        if frame.f_code is not Lifecycle.stop.__code__:
            return None
        if event == "line" and linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() == FORGETS:
            is_there.set()
            has_started.wait(0.2)
        return trace

    def stop() -> None:
        sys.settrace(trace)
        outbox.stop()

    outbox.start(**ALONE)
    stopping = threading.Thread(target=stop)
    stopping.start()
    assert is_there.wait(PATIENCE)
    outbox.start(**ALONE)
    has_started.set()
    stopping.join(PATIENCE)
    becomes(outbox, put(outbox, "q"), "done")
    assert outbox.stop()
    assert threads_left() == []


def test_a_consumer_is_added_while_another_thread_stops(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner is there at the first look, and forgotten at the next one."""
    looks: list[Any] = [SimpleNamespace(wake=lambda: None)]
    with monkeypatch.context() as patch:
        patch.setattr(Lifecycle, "_runner", property(lambda _: looks.pop() if looks else None), raising=False)
        outbox.add_consumer("q", lambda _: None)
    assert looks == []


FORGETS = "self._runner = None"
"""Such is the line of ``Lifecycle.stop``."""


def test_a_stop_with_a_timeout_shortens_the_one_that_waits(outbox: Outbox, gate: threading.Event) -> None:
    began, said = threading.Event(), Steps()

    def work(_payload: Any) -> None:
        began.set()
        gate.wait(PATIENCE)

    outbox.add_consumer("q", work)
    outbox.start(**ALONE)
    put(outbox, "q")
    began.wait(PATIENCE)
    waiting = threading.Thread(target=lambda: said.add(outbox.stop()))
    waiting.start()
    until(lambda: is_stopping(outbox))
    assert not outbox.stop(timeout=0.01)
    assert said.wait() == [False]
    waiting.join(PATIENCE)


def test_a_database_that_hangs_holds_no_stop(outbox: Outbox, engine: sqlalchemy.Engine, gate: threading.Event) -> None:
    """A lock of somebody else: neither claims, nor outcomes, nor the jobs that are given back come through."""
    began = threading.Event()

    def work(_payload: Any) -> None:
        began.set()
        gate.wait(PATIENCE)

    outbox.add_consumer("q", work)
    outbox.start(threads=2, poll_interval=0.01)
    job = put(outbox, "q")
    began.wait(PATIENCE)
    with engine.connect() as locking, locking.begin():
        statement = "LOCK TABLE kestrel_jobs" if engine.dialect.name == "postgresql" else "BEGIN IMMEDIATE"
        locking.exec_driver_sql(statement)
        put_in_vain = threading.Thread(target=lambda: put(outbox, "q"))
        put_in_vain.start()
        is_done, seconds = timed(lambda: outbox.stop(timeout=0.05))
    put_in_vain.join(PATIENCE)
    assert (is_done, seconds < 1.05) == (False, True)
    gate.set()
    until(lambda: threads_left() == [])
    assert outbox.get(job.id).status in ("done", "ready", "running")


def test_after_a_stop_its_last_thread_is_over_too(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks for threads then, or forks, finds none, however late the last one is."""
    feed = Runner._feed

    def feed_and_linger(runner: Runner) -> None:
        feed(runner)
        threading.Event().wait(0.05)

    monkeypatch.setattr(Runner, "_feed", feed_and_linger)
    for timeout in (None, PATIENCE):
        outbox.start(**ALONE)
        assert outbox.stop(timeout)
        assert "kestrelpy-outbox-feeder" not in threads_left()


# -- other ways to stop ----------------------------------------------------------------------------------------------


def test_running_stops_when_its_block_raises(outbox: Outbox) -> None:
    outbox.add_consumer("q", lambda _: None)

    def fail() -> None:
        with outbox.running(**ALONE):
            becomes(outbox, put(outbox, "q"), "done")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert threads_left() == []


def test_close_stops(engine: sqlalchemy.Engine) -> None:
    with Outbox(engine.url) as outbox:
        outbox.create_tables()
        outbox.add_consumer("q", lambda _: None)
        outbox.start(**ALONE)
        job = put(outbox, "q")
        becomes(outbox, job, "done")
    assert threads_left() == []
    outbox.close()
    assert outbox.stop()
    for call in (outbox.start, lambda: outbox.get(job.id), lambda: outbox.bind(engine)):
        with pytest.raises(OutboxError, match="closed"):
            call()


def test_what_is_lost_is_logged_and_nothing_else(outbox: Outbox, records: Records) -> None:
    """A start and a stop without any trouble say nothing."""
    outbox.add_consumer("q", lambda _: None)
    outbox.add_consumer("a", as_kind("async", lambda _: None))
    with running(outbox, **ALONE):
        becomes(outbox, put(outbox, "q"), "done")
        becomes(outbox, put(outbox, "a"), "done")
    assert [record.getMessage() for record in records.records] == []
