"""The test kit: an outbox under the control of a test, in memory, on a SQLite file and on PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import doctest
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import text

import kestrelpy.outbox.testing
from kestrelpy.outbox import GiveUp, JobNotFound, Outbox, OutboxError, RetryLater, UnknownQueue, current_job
from kestrelpy.outbox.testing import ANY, Run, StillWaiting, VirtualOutbox, virtual
from kestrelpy.testing import ManualClock

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def outbox() -> Outbox:
    """Of an application: bound to nothing yet."""
    return Outbox()


@pytest.fixture
def kit(outbox: Outbox, bind: Any) -> Iterator[VirtualOutbox]:
    """On each of the databases."""
    with virtual(outbox, bind) as opened:
        yield opened


@pytest.fixture
def in_memory(outbox: Outbox) -> Iterator[VirtualOutbox]:
    """For what the database has no part in."""
    with virtual(outbox) as opened:
        yield opened


class Handler:
    """Keeps what it is called with, and does what its ``script`` says: return, or raise, one after the other; then it
    returns the payload.
    """

    def __init__(self, *script: Any) -> None:
        self.seen: list[Any] = []
        self.script = list(script)

    def __call__(self, payload: Any) -> Any:
        self.seen.append(payload)
        found = self.script.pop(0) if self.script else payload
        if isinstance(found, BaseException):
            raise found
        return found


def states(kit: VirtualOutbox) -> list[tuple[int, str, int]]:
    return [(job.id, job.status, job.tries) for job in kit.jobs()]


def rolled_back(outbox: Outbox, begin: Callable[[], Any], payload: Any) -> None:
    """Put in a transaction that is rolled back; within it the job is seen."""
    with contextlib.suppress(ZeroDivisionError), begin() as connection:
        job = outbox.put(connection, outbox.core.queues.all()[0].queue, payload)
        assert outbox.get(job.id, connection=connection).payload == payload
        if connection.engine.url.database in (None, ""):
            assert outbox.get(job.id).payload == payload
        raise ZeroDivisionError


# -- one job ---------------------------------------------------------------------------------------------------------


def test_consume_runs_the_next_job_and_returns_the_value(outbox: Outbox, kit: VirtualOutbox) -> None:
    handler = Handler({"sent": 1}, None)
    outbox.add_consumer("mail", handler)
    first, second = kit.put("mail", {"to": "ann"}), kit.put("mail", [2])
    assert (first.status, first.added_ms, first.tries) == ("ready", 0, 0)
    assert kit.consume("mail") == {"sent": 1}
    assert kit.consume("mail") is None
    assert handler.seen == [{"to": "ann"}, [2]]
    assert states(kit) == [(first.id, "done", 1), (second.id, "done", 1)]
    assert outbox.get(first.id).worker == "virtual"


def test_the_next_one_is_the_most_urgent_and_first_runs_come_before_retries(outbox: Outbox, kit: VirtualOutbox) -> None:
    handler = Handler(ValueError("no"))
    outbox.add_consumer("mail", handler, backoff=0)
    kit.put("mail", "fails")
    kit.consume("mail", expect="error")
    kit.put("mail", "late", delay=5)
    kit.put("mail", "usual")
    kit.put("mail", "urgent", priority=-1)
    for _ in range(3):
        kit.consume("mail")
    kit.clock.advance(5)
    kit.consume("mail")
    assert handler.seen == ["fails", "urgent", "usual", "fails", "late"]


def test_a_failure_is_expected_and_returned(outbox: Outbox, kit: VirtualOutbox) -> None:
    boom = ValueError("boom")
    outbox.add_consumer("mail", Handler(boom, GiveUp("no such user")))
    job = kit.put("mail")
    assert kit.consume("mail", expect="error") is boom
    failed = outbox.get(job.id)
    assert (failed.status, failed.due_ms, failed.first_error_ms) == ("error", 5_000, 0)
    assert "ValueError: boom" in (failed.error or "")
    with pytest.raises(AssertionError, match=r"no job of queue 'mail' is due:\n.*error, due in 5 s.*ValueError: boom"):
        kit.consume("mail")
    kit.clock.advance(5)
    assert isinstance(kit.consume("mail", expect="dead"), GiveUp)


def test_another_status_than_the_expected_one_says_why(outbox: Outbox, kit: VirtualOutbox) -> None:
    boom = ValueError("boom")
    outbox.add_consumer("mail", Handler(boom))
    kit.put("mail", {"to": "ann"}, key="k")
    with pytest.raises(AssertionError) as caught:
        kit.consume("mail")
    assert caught.value.__cause__ is boom
    assert "is 'error' after its run, not 'done'; its handler raised ValueError('boom')" in str(caught.value)
    assert "key='k', payload {'to': 'ann'}" in str(caught.value)
    kit.clock.advance(5)
    with pytest.raises(AssertionError, match="is 'done' after its run, not 'error'"):
        kit.consume("mail", expect="error")


def test_a_status_that_there_is_not_runs_nothing(outbox: Outbox, in_memory: VirtualOutbox) -> None:
    handler = Handler()
    outbox.add_consumer("mail", handler)
    in_memory.put("mail")
    with pytest.raises(ValueError, match="expect must be one of ready, "):
        in_memory.consume("mail", expect="ok")
    with pytest.raises(ValueError, match="status must be 'ready' or 'error', not 'done'"):
        in_memory.run_once("mail", "done")
    assert handler.seen == []


def test_a_handler_says_later_and_that_is_no_failure(outbox: Outbox, kit: VirtualOutbox) -> None:
    outbox.add_consumer("mail", Handler(RetryLater(60)))
    job = kit.put("mail")
    assert isinstance(kit.consume("mail", expect="ready"), RetryLater)
    assert (outbox.get(job.id).tries, outbox.get(job.id).due_ms) == (0, 60_000)
    kit.clock.advance(60)
    kit.consume("mail")


def test_what_counts_as_done_is_done(outbox: Outbox, kit: VirtualOutbox) -> None:
    errors: list[Any] = []
    outbox.add_consumer("mail", Handler(KeyError("sent")), done_on=KeyError, on_error=lambda *told: errors.append(told))
    kit.put("mail")
    run = kit.run_once("mail")
    assert run is not None
    assert run.job.status == "done"
    assert isinstance(run.exception, KeyError)
    assert errors == []


def test_only_waiting_jobs_say_for_which(outbox: Outbox, kit: VirtualOutbox) -> None:
    outbox.add_consumer("mail", Handler())
    outbox.queue("order")
    order = kit.put("order", 7)
    kit.put("mail", depends_on=order, priority=3)
    with pytest.raises(StillWaiting, match=r"wait, the first of them for <Job \d+ of order: ready, tries=0>") as caught:
        kit.consume("mail")
    assert caught.value.depends_on == outbox.get(order.id)
    assert str(caught.value).startswith("the jobs of queue 'mail' wait")
    assert f"mail: waiting, depends_on={order.id}, tries=0, priority=3, payload None" in str(caught.value)
    kit.put("mail", delay=1)
    with pytest.raises(AssertionError, match="no job of queue 'mail' is due") as other:
        kit.consume("mail")
    assert not isinstance(other.value, StillWaiting)


def test_a_job_runs_after_the_one_it_depends_on(outbox: Outbox, kit: VirtualOutbox) -> None:
    outbox.add_consumer("mail", Handler())
    outbox.add_consumer("order", Handler())
    with kit.begin() as connection:
        order = outbox.put(connection, "order", 7)
        mail = outbox.put(connection, "mail", depends_on=order)
    assert mail.status == "waiting"
    kit.consume("order")
    kit.consume("mail")


def test_nothing_due_lists_what_is_there(outbox: Outbox, in_memory: VirtualOutbox) -> None:
    outbox.add_consumer("mail", Handler())
    outbox.queue("mial")
    with pytest.raises(AssertionError, match=r"^no job of queue 'mail' is due:\n  there are no jobs$"):
        in_memory.consume("mail")
    in_memory.put("mial", "x" * 1000)
    with pytest.raises(AssertionError, match=r"\n  job 1 of mial: ready, due now, tries=0, payload 'x{199}\.\.\.$"):
        in_memory.consume("mail")
    for _ in range(30):
        in_memory.put("mail", delay=1)
    with pytest.raises(AssertionError, match=r"\n  and 10 more$"):
        in_memory.consume("mail")


def test_a_paused_queue_is_hinted_at(outbox: Outbox, kit: VirtualOutbox) -> None:
    outbox.add_consumer("mail", Handler())
    kit.put("mail")
    outbox.pause("mail")
    with pytest.raises(AssertionError, match="it is paused, or another one of the lane comes first"):
        kit.consume("mail")
    assert kit.run_due() == kit.drain() == []
    outbox.resume("mail")
    kit.consume("mail")


def test_only_queues_with_a_handler_run(outbox: Outbox, in_memory: VirtualOutbox) -> None:
    outbox.queue("mail")
    in_memory.put("mail")
    calls: list[Callable[[str], Any]] = [
        in_memory.consume,
        in_memory.force_retry,
        in_memory.run_once,
        in_memory.take,
        in_memory.run_due,
        in_memory.drain,
    ]
    for call in calls:
        with pytest.raises(OutboxError, match="queue 'mail' is only declared"):
            call("mail")
        with pytest.raises(UnknownQueue):
            call("mial")
    assert in_memory.run_due() == in_memory.drain() == []


def test_a_queue_is_named_by_its_handler_too(outbox: Outbox, in_memory: VirtualOutbox) -> None:
    @outbox.consumer("mail")
    def send(payload: Any) -> Any:
        return payload

    in_memory.put(send, 1)
    assert in_memory.consume(send) == 1
    assert in_memory.force_retry(send) == 1
    assert in_memory.contains(send, 1)
    assert len(in_memory.jobs(send)) == 1


def test_a_payload_that_does_not_decode_is_a_failure(outbox: Outbox, kit: VirtualOutbox) -> None:
    class Codec:
        def encode(self, value: Any) -> bytes:
            return bytes(value)

        def decode(self, data: bytes) -> Any:
            raise OSError("the key is gone")

    outbox.add_consumer("mail", Handler(), codec=Codec())
    kit.put("mail", b"secret")
    assert not kit.contains("mail", b"secret")
    assert kit.contains("mail")
    assert isinstance(kit.consume("mail", expect="error"), OSError)
    with pytest.raises(AssertionError, match=r"payload unreadable, OSError\('the key is gone'\)"):
        kit.consume("mail")


def test_context_and_current_job_are_those_of_the_job(bind: Any) -> None:
    tenant = contextvars.ContextVar("tenant", default="nobody")
    outbox = Outbox(context={"tenant": tenant})
    seen: list[Any] = []

    @outbox.consumer("mail")
    def send(payload: Any) -> None:
        job = current_job()
        assert job is not None
        seen.append((tenant.get(), job.key, job.status))

    @outbox.consumer("async-mail")
    async def send_async(payload: Any) -> None:
        send(payload)

    with virtual(outbox, bind) as test:
        token = tenant.set("ann")
        test.put("mail", key="one")
        test.put("async-mail", key="two")
        tenant.reset(token)
        tenant.set("bob")
        test.put("mail", key="three")
        test.run_due()
    assert seen == [("ann", "one", "running"), ("ann", "two", "running"), ("bob", "three", "running")]
    assert current_job() is None


def test_hooks_come_after_the_state_is_saved(outbox: Outbox, kit: VirtualOutbox) -> None:
    told: list[Any] = []
    outbox.add_consumer(
        "mail",
        Handler(ValueError("one"), ValueError("two")),
        max_retries=1,
        on_error=lambda job, error: told.append(("error", str(error), outbox.get(job.id).status)),
        on_dead=lambda job: told.append(("dead", outbox.get(job.id).status)),
    )
    kit.put("mail")
    kit.drain()
    assert told == [("error", "one", "error"), ("error", "two", "dead"), ("dead", "dead")]


def test_ctrl_c_in_a_handler_ends_the_test(outbox: Outbox, in_memory: VirtualOutbox) -> None:
    outbox.add_consumer("mail", Handler(KeyboardInterrupt()))
    in_memory.put("mail")
    with pytest.raises(KeyboardInterrupt):
        in_memory.consume("mail")
    assert states(in_memory) == [(1, "running", 1)]


@pytest.fixture
def pythons_own_ctrl_c() -> Iterator[None]:
    """PySpark leaves another handler behind, with which asyncio cancels no task."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("pythons_own_ctrl_c")
def test_ctrl_c_while_an_async_handler_waits_ends_the_test(outbox: Outbox, in_memory: VirtualOutbox) -> None:
    @outbox.consumer("mail")
    async def send(payload: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)

    in_memory.put("mail")
    with pytest.raises(KeyboardInterrupt):
        in_memory.consume("mail")
    assert states(in_memory) == [(1, "ready", 0)]


# -- what was lost ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_done", [None, 0])
def test_force_retry_runs_a_job_as_if_its_mark_had_been_lost(
    outbox: Outbox, kit: VirtualOutbox, keep_done: float | None
) -> None:
    handler = Handler("first", "second", "third", ValueError("already there"))
    outbox.add_consumer("mail", handler, keep_done=keep_done)
    with pytest.raises(AssertionError, match="no job of queue 'mail' was run yet"):
        kit.force_retry("mail")
    job = kit.put("mail", {"to": "ann"}, key="k", group="g", priority=3)
    kit.consume("mail")
    assert kit.force_retry("mail") == "second"
    assert kit.force_retry("mail") == "third"
    assert [done.tries for done in kit.jobs()] == ([3] if keep_done is None else [])
    with pytest.raises(AssertionError, match="is 'error' after its run, not 'done'"):
        kit.force_retry("mail")
    assert handler.seen == [{"to": "ann"}] * 4
    found = outbox.get(job.id)
    assert (found.key, found.group, found.priority, found.tries) == ("k", "g", 3, 4)


def test_a_lost_mark_leaves_the_job_running_until_its_lease_is_over(outbox: Outbox, kit: VirtualOutbox) -> None:
    told: list[Any] = []
    handler = Handler()
    outbox.add_consumer("mail", handler, on_error=lambda *error: told.append(error))
    job = kit.put("mail", 1)
    kit.lose_mark()
    assert kit.consume("mail", expect="running") is None
    assert kit.sweep() == []
    kit.clock.advance(30)
    assert [(found.id, found.status, found.due_ms) for found in kit.sweep()] == [(job.id, "error", 35_000)]
    kit.clock.advance(5)
    kit.consume("mail")
    assert handler.seen == [1, 1]
    assert told == []


def test_the_outcome_of_a_failure_is_lost_too(outbox: Outbox, kit: VirtualOutbox) -> None:
    boom = ValueError("boom")
    outbox.add_consumer("mail", Handler(boom), on_error=lambda *_: pytest.fail("it was not saved"))
    kit.put("mail", 1)
    kit.lose_mark()
    assert kit.consume("mail", expect="running") is boom
    assert states(kit)[0][1:] == ("running", 1)
    assert kit.force_retry("mail") == 1


def test_a_job_that_was_taken_comes_again_after_its_lease_and_wears_out(outbox: Outbox, kit: VirtualOutbox) -> None:
    dead: list[Any] = []
    handler = Handler()
    outbox.add_consumer("mail", handler, max_retries=1, on_dead=lambda job: dead.append(outbox.get(job.id).status))
    job = kit.put("mail")
    taken = kit.take("mail")
    assert taken is not None
    assert (taken.id, taken.status, taken.due_ms, taken.tries) == (job.id, "running", 30_000, 1)
    assert kit.take("mail") is None
    kit.clock.advance(29.999)
    assert kit.sweep() == []
    kit.clock.advance(0.001)
    assert [found.status for found in kit.sweep()] == ["error"]
    kit.clock.advance(5)
    assert kit.take("mail") is not None
    kit.clock.advance(30)
    assert [found.status for found in kit.sweep()] == ["dead"]
    assert dead == ["dead"]
    assert handler.seen == []


def test_an_outcome_that_comes_after_the_lease_is_refused(outbox: Outbox, kit: VirtualOutbox) -> None:
    @outbox.consumer("mail")
    def slow(payload: Any) -> None:
        kit.clock.advance(31)
        assert [job.status for job in kit.sweep()] == ["error"]

    kit.put("mail")
    kit.consume("mail", expect="error")


def test_a_sweep_finds_a_dependant_that_was_overlooked(outbox: Outbox, kit: VirtualOutbox) -> None:
    outbox.add_consumer("mail", Handler())
    first = kit.put("mail", 1)
    second = kit.put("mail", 2, depends_on=first)
    table = outbox.core.tables.jobs
    with kit.begin() as connection:  # as if the put had overlapped with the mark
        connection.execute(table.update().where(table.c.id == first.id).values(status="done"))
    assert [(job.id, job.status) for job in kit.sweep()] == [(second.id, "ready")]
    assert kit.sweep() == []
    kit.consume("mail")


# -- all that is due -------------------------------------------------------------------------------------------------


def test_run_once(outbox: Outbox, kit: VirtualOutbox) -> None:
    boom = ValueError("boom")
    outbox.add_consumer("mail", Handler(boom, "value"))
    kit.put("mail")
    assert kit.run_once("mail", "error") is None
    failed = kit.run_once("mail")
    assert failed == Run(failed.job, None, boom) if failed else False
    assert kit.run_once("mail", "error") is None
    kit.clock.advance(5)
    assert kit.run_once("mail") is None
    run = kit.run_once("mail", "error")
    assert run is not None
    assert (run.job.status, run.job.tries, run.value, run.exception) == ("done", 2, "value", None)


def test_run_due_runs_what_handlers_put_meanwhile_and_dependants(outbox: Outbox, kit: VirtualOutbox) -> None:
    seen: list[Any] = []
    outbox.add_consumer("mail", seen.append)

    @outbox.consumer("order")
    def order(payload: Any) -> None:
        seen.append(payload)
        with outbox.begin() as connection:
            outbox.put(connection, "mail", "of the order")
            outbox.put(connection, "mail", "tomorrow", delay=86_400)

    first = kit.put("order", "order")
    kit.put("mail", "depends", depends_on=first)
    kit.put("mail", "usual", priority=1)
    runs = kit.run_due()
    assert seen == ["order", "depends", "of the order", "usual"]
    assert [run.job.status for run in runs] == ["done"] * 4
    assert kit.run_due() == []


def test_run_due_of_one_queue(outbox: Outbox, in_memory: VirtualOutbox) -> None:
    outbox.add_consumer("mail", Handler())
    outbox.add_consumer("order", Handler())
    in_memory.put("order")
    mail = in_memory.put("mail")
    assert [run.job.id for run in in_memory.run_due("mail")] == [mail.id]
    assert [job.queue for job in in_memory.jobs(status="ready")] == ["order"]


@pytest.mark.parametrize(("stop_at_failure", "tried"), [(True, 1), (False, 3)])
def test_a_pass_stops_at_the_failure_of_a_retry(
    outbox: Outbox, kit: VirtualOutbox, stop_at_failure: bool, tried: int
) -> None:
    down = Handler(*[OSError("down")] * 100)
    outbox.add_consumer("mail", down, stop_at_failure=stop_at_failure, backoff=5)
    outbox.add_consumer("order", Handler(OSError("once")))
    for number in range(3):
        kit.put("mail", number)
    kit.put("order", 1)
    assert len(kit.run_due()) == 4  # first runs are not held
    kit.clock.advance(5)
    kit.put("mail", 3)
    runs = kit.run_due()
    assert [run.job.queue for run in runs].count("mail") == 1 + tried
    assert [run.job.status for run in runs if run.job.queue == "order"] == ["done"]
    assert down.seen[4:] == [0, 1, 2][:tried]


def test_successes_of_retries_go_on_at_once(outbox: Outbox, kit: VirtualOutbox) -> None:
    outbox.add_consumer("mail", Handler(*[OSError("down")] * 3))
    for number in range(3):
        kit.put("mail", number)
    kit.run_due()
    kit.clock.advance(5)
    assert [run.value for run in kit.run_due()] == [0, 1, 2]


@pytest.mark.parametrize("again", [ValueError("at once"), RetryLater(0)], ids=["failure", "later"])
def test_a_pass_runs_each_job_once(outbox: Outbox, kit: VirtualOutbox, again: Exception) -> None:
    handler = Handler(again, "other", again)
    outbox.add_consumer("mail", handler, backoff=0, stop_at_failure=False)
    kit.put("mail", "again")
    kit.put("mail", "other")
    seen = [[run.job.id - kit.jobs()[0].id for run in kit.run_due()] for _ in range(4)]
    assert seen == [[0, 1], [0], [0], []]
    assert [job.status for job in kit.jobs()] == ["done", "done"]


def test_jobs_of_a_lane_run_in_order_and_a_failure_holds_it(outbox: Outbox, kit: VirtualOutbox) -> None:
    handler = Handler("fine", ValueError("no"))
    outbox.add_consumer("mail", handler)
    for number in range(4):
        kit.put("mail", number, lane="ann", priority=-number)
    kit.put("mail", "bob", lane="bob", priority=9)
    assert [run.job.status for run in kit.run_due()] == ["done", "error", "done"]
    assert handler.seen == [0, 1, "bob"]
    kit.clock.advance(5)
    kit.run_due()
    assert handler.seen == [0, 1, "bob", 1, 2, 3]


def test_drain_moves_the_clock_to_each_due_time(outbox: Outbox, kit: VirtualOutbox) -> None:
    seen: list[tuple[Any, float]] = []

    @outbox.consumer("mail", backoff=lambda failures: failures * 10, max_retries=2)
    def send(payload: Any) -> None:
        seen.append((payload, kit.clock.monotonic()))
        if payload == "fails":
            raise ValueError("no")

    kit.put("mail", "now")
    kit.put("mail", "later", delay=7 * 86_400.001)
    kit.put("mail", "fails", delay=1.5)
    kit.put("mail", "taken", priority=-1)
    kit.take("mail")
    runs = kit.drain()
    assert seen == [
        ("now", 0.0),
        ("fails", 1.5),
        ("fails", 11.5),
        ("fails", 31.5),
        ("taken", 40.0),
        ("later", 604_800.007),
    ]
    assert [run.job.status for run in runs] == ["done", "error", "error", "dead", "done", "done"]
    assert kit.drain() == []
    assert kit.clock.monotonic() == 604_800.007


def test_drain_goes_on_with_what_a_failure_held_a_second_later(outbox: Outbox, kit: VirtualOutbox) -> None:
    outbox.add_consumer("mail", Handler(*[OSError("down")] * 3), backoff=10)
    kit.put("mail", 1)
    kit.put("mail", 2)
    runs = kit.drain()
    assert [(run.job.id, run.job.finished_ms) for run in runs if run.job.status == "done"] == [
        (kit.jobs()[1].id, 11_000),
        (kit.jobs()[0].id, 20_000),
    ]


def test_drain_ends_after_max_seconds(outbox: Outbox, kit: VirtualOutbox) -> None:
    @outbox.consumer("cron", transactional=True)
    def each_hour(payload: Any, connection: Any) -> None:
        outbox.put(connection, "cron", payload, delay=3600)

    kit.put("cron")
    assert len(kit.drain(max_seconds=2 * 3600)) == 3
    assert len(kit.drain(max_seconds=5000)) == 1
    assert kit.clock.monotonic() == 12_200.0
    assert kit.drain(max_seconds=0) == []
    with pytest.raises(ValueError, match="max_seconds must be at least 0"):
        kit.drain(max_seconds=-1)


def test_drain_of_one_queue_and_of_a_paused_one(outbox: Outbox, kit: VirtualOutbox) -> None:
    outbox.add_consumer("mail", Handler())
    outbox.add_consumer("order", Handler())
    outbox.add_consumer("paused", Handler())
    kit.put("order", delay=5)
    kit.put("paused", delay=1)
    kit.put("mail", delay=10)
    outbox.pause("paused")
    assert [run.job.queue for run in kit.drain("mail")] == ["mail"]
    assert kit.clock.monotonic() == 10.0
    assert [run.job.queue for run in kit.drain()] == ["order"]
    assert kit.clock.monotonic() == 10.0


# -- transactional handlers ------------------------------------------------------------------------------------------


@pytest.fixture
def ledger(kit: VirtualOutbox) -> Callable[[], list[int]]:
    """A table of the application in the kit's database; what is in it."""
    with kit.begin() as connection:
        connection.execute(text("CREATE TABLE ledger (number int)"))

    def read() -> list[int]:
        with kit.begin() as connection:
            return list(connection.scalars(text("SELECT number FROM ledger ORDER BY number")))

    return read


def test_a_transactional_handler_is_one_transaction_with_its_mark(
    outbox: Outbox, kit: VirtualOutbox, ledger: Callable[[], list[int]]
) -> None:
    script: list[Any] = [ValueError("after the write"), "booked"]

    @outbox.consumer("book", transactional=True)
    def book(payload: int, connection: Any) -> Any:
        connection.execute(text("INSERT INTO ledger VALUES (:number)"), {"number": payload})
        outbox.put(connection, "book", payload, key="successor", delay=60, if_exists="return")
        found = script.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    kit.put("book", 7)
    kit.consume("book", expect="error")
    assert ledger() == []
    assert len(kit.jobs()) == 1
    kit.clock.advance(5)
    assert kit.consume("book") == "booked"
    assert ledger() == [7]
    assert [job.key for job in kit.jobs(status="ready")] == ["successor"]


@pytest.mark.parametrize("keep_done", [None, 0])
def test_what_a_transactional_handler_wrote_is_lost_with_its_mark(
    outbox: Outbox, kit: VirtualOutbox, ledger: Callable[[], list[int]], keep_done: float | None
) -> None:
    @outbox.consumer("book", transactional=True, keep_done=keep_done)
    def book(payload: int, connection: Any) -> str:
        connection.execute(text("INSERT INTO ledger VALUES (:number)"), {"number": payload})
        return "booked"

    kit.put("book", 7)
    kit.lose_mark()
    kit.consume("book", expect="running")
    assert ledger() == []
    assert [run.value for run in kit.drain()] == ["booked"]
    assert ledger() == [7]
    assert kit.force_retry("book") == "booked"
    assert ledger() == [7, 7]


def test_an_async_transactional_handler(outbox: Outbox, kit: VirtualOutbox, ledger: Callable[[], list[int]]) -> None:
    script: list[Any] = [ValueError("no"), None, None]

    @outbox.consumer("book", transactional=True)
    async def book(payload: int, connection: Any) -> None:
        connection.execute(text("INSERT INTO ledger VALUES (:number)"), {"number": payload})
        await asyncio.sleep(0)
        if error := script.pop(0):
            raise error

    kit.put("book", 7)
    kit.consume("book", expect="error")
    assert ledger() == []
    kit.clock.advance(5)
    kit.consume("book")
    assert ledger() == [7]
    kit.put("book", 8)
    asyncio.run(kit.aconsume("book"))
    assert ledger() == [7, 8]


def test_a_look_from_within_does_not_commit_what_is_rolled_back(outbox: Outbox, in_memory: VirtualOutbox) -> None:
    """There is one connection: a second transaction on it would commit the first one's half."""
    with in_memory.begin() as connection:
        connection.execute(text("CREATE TABLE ledger (number int)"))

    def count() -> Any:
        with in_memory.begin() as connection:
            return connection.scalar(text("SELECT count(*) FROM ledger"))

    @outbox.consumer("book", transactional=True)
    def book(payload: int, connection: Any) -> None:
        connection.execute(text("INSERT INTO ledger VALUES (1)"))
        assert [job.status for job in outbox.jobs("book")] == ["running"]
        with outbox.begin() as other:
            outbox.put(other, "book", "second", key="second")
        rolled_back(outbox, outbox.begin, "third")
        assert [job.payload for job in outbox.jobs("book")] == ["first", "second"]
        raise ValueError("all is rolled back")

    in_memory.put("book", "first")
    in_memory.consume("book", expect="error")
    assert count() == 0
    assert [job.payload for job in in_memory.jobs()] == ["first"]
    rolled_back(outbox, in_memory.begin, "fourth")
    assert [job.payload for job in in_memory.jobs()] == ["first"]


def test_an_open_transaction_that_only_read_takes_nothing_with_it(outbox: Outbox, in_memory: VirtualOutbox) -> None:
    outbox.add_consumer("mail", Handler())
    in_memory.put("mail")
    with in_memory.begin() as connection:
        connection.execute(text("SELECT 1"))
        in_memory.consume("mail")
        connection.rollback()
    in_memory.assert_put("mail", status="done")


# -- async handlers --------------------------------------------------------------------------------------------------


def test_async_handlers_run_on_a_loop_of_their_own(outbox: Outbox, kit: VirtualOutbox) -> None:
    where: list[int] = []

    @outbox.consumer("mail")
    async def send(payload: Any) -> Any:
        await asyncio.sleep(0)
        where.append(threading.get_ident())
        return payload

    kit.put("mail", 1)
    kit.put("mail", 2)
    assert kit.consume("mail") == 1
    assert [run.value for run in kit.drain()] == [2]
    assert kit.force_retry("mail") == 2
    assert set(where) == {threading.get_ident()}


def test_aconsume_runs_on_the_callers_loop(outbox: Outbox, kit: VirtualOutbox) -> None:
    loops: list[Any] = []
    outbox.add_consumer("order", Handler())

    @outbox.consumer("mail")
    async def send(payload: Any) -> Any:
        loops.append(asyncio.get_running_loop())
        if payload is None:
            raise ValueError("no")
        return payload

    async def main() -> None:
        kit.put("mail", 1)
        kit.put("mail")
        kit.put("order", 3)
        assert await kit.aconsume("mail") == 1
        assert isinstance(await kit.aconsume("mail", expect="error"), ValueError)
        assert await kit.aconsume("order") == 3
        with pytest.raises(AssertionError, match="no job of queue 'order' is due"):
            await kit.aconsume("order")
        assert loops == [asyncio.get_running_loop()] * 2

    asyncio.run(main())


def test_consume_on_a_loop_says_what_to_do(outbox: Outbox, in_memory: VirtualOutbox) -> None:
    @outbox.consumer("mail")
    async def send(payload: Any) -> Any:
        return payload

    async def main() -> None:
        in_memory.put("mail", 1)
        with pytest.raises(OutboxError, match=r"use await test\.aconsume\(queue\)"):
            in_memory.consume("mail")
        assert states(in_memory) == [(1, "ready", 0)]
        assert [run.value for run in await asyncio.to_thread(in_memory.run_due)] == [1]

    asyncio.run(main())


def test_a_cancelled_aconsume_gives_the_job_back(outbox: Outbox, kit: VirtualOutbox) -> None:
    begun = asyncio.Event()

    @outbox.consumer("mail")
    async def send(payload: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def main() -> None:
        kit.put("mail")
        task = asyncio.create_task(kit.aconsume("mail"))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert [(status, tries) for _, status, tries in states(kit)] == [("ready", 0)]


def test_the_timeout_of_an_async_handler_is_a_failure(outbox: Outbox, in_memory: VirtualOutbox) -> None:
    @outbox.consumer("mail", timeout=0)
    async def send(payload: Any) -> None:
        await asyncio.Event().wait()

    in_memory.put("mail")
    assert isinstance(in_memory.consume("mail", expect="error"), TimeoutError)


@pytest.mark.parametrize("driver", ["aiosqlite", "psycopg", "asyncpg"])
def test_an_async_engine(request: pytest.FixtureRequest, outbox: Outbox, driver: str) -> None:
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    fixture = "sqlite_url" if driver == "aiosqlite" else "postgres_url"
    url = sqlalchemy.make_url(request.getfixturevalue(fixture))
    name = f"{url.get_backend_name()}+{driver}"
    engine = create_async_engine(url.set(drivername=name))

    @outbox.consumer("book", transactional=True)
    async def book(payload: Any, connection: Any) -> Any:
        await connection.execute(text("INSERT INTO ledger VALUES (:number)"), {"number": payload})
        return payload

    async def main(test: VirtualOutbox) -> None:
        async with outbox.abegin() as connection:
            await connection.execute(text("CREATE TABLE ledger (number int)"))
        async with AsyncSession(engine) as session, session.begin():
            await outbox.aput(session, "book", 1)
        test.assert_put("book", 1, count=1)
        assert await test.aconsume("book") == 1
        async with engine.connect() as connection:
            assert await connection.scalar(text("SELECT count(*) FROM ledger")) == 1
        await engine.dispose()

    with virtual(outbox, engine) as test:
        asyncio.run(main(test))
        test.put("book", 2)
        test.put("book", 3)
        assert test.consume("book") == 2
        assert [run.value for run in test.drain()] == [3]


def test_an_async_engine_in_memory_is_refused(outbox: Outbox) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    with pytest.raises(OutboxError, match="single connection, which belongs to one event loop"):
        virtual(outbox, create_async_engine("sqlite+aiosqlite://")).__enter__()
    assert not outbox.core.is_virtual


# -- looking ---------------------------------------------------------------------------------------------------------


def test_jobs_contains_and_assert_put(outbox: Outbox, kit: VirtualOutbox) -> None:
    outbox.add_consumer("mail", Handler())
    outbox.queue("order")
    order = kit.put("order", 7)
    mail = kit.put("mail", {"to": "ann", "at": 12.5}, key="k", group="g", lane="l", priority=2, depends_on=order)
    kit.put("mail", {"to": "bob"})
    assert [job.id for job in kit.jobs()] == [order.id, mail.id, mail.id + 1]
    assert [job.id for job in kit.jobs("mail", "waiting")] == [mail.id]
    assert kit.contains("mail")
    assert kit.contains("mail", {"to": "ann", "at": ANY})
    assert not kit.contains("mail", {"to": "ann"})
    assert kit.contains("mail", key="k", group="g", lane="l", priority=2, depends_on=order, status="waiting")
    assert kit.contains("mail", depends_on=order.id, due_ms=0)
    assert not kit.contains("mail", {"to": "bob"}, key="k")
    kit.assert_put("mail")
    kit.assert_put("mail", count=2)
    kit.assert_put("mail", {"to": "bob"}, count=1, key=None)
    kit.assert_put("mail", {"to": "eve"}, count=0)


def test_every_attribute_can_be_asked_for(outbox: Outbox, kit: VirtualOutbox) -> None:
    outbox.add_consumer("mail", Handler(ValueError("no")))
    kit.put("mail", 1, key="k")
    kit.consume("mail", expect="error")
    names = [
        "id",
        "key",
        "group",
        "lane",
        "status",
        "priority",
        "context",
        "depends_on",
        "tries",
        "added_ms",
        "due_ms",
        "started_ms",
        "finished_ms",
        "first_error_ms",
        "error",
        "worker",
    ]
    (job,) = kit.jobs()
    assert kit.contains("mail", 1, **{name: getattr(job, name) for name in names})
    for name in names:
        assert not kit.contains("mail", **{name: "another"})


def test_assert_put_says_what_is_there(outbox: Outbox, in_memory: VirtualOutbox) -> None:
    outbox.queue("mail")
    outbox.queue("order")
    with pytest.raises(AssertionError, match=r"^queue 'mail' has no job, not one:\n  there are no jobs$"):
        in_memory.assert_put("mail")
    in_memory.put("order", 7, key="o")
    with pytest.raises(AssertionError, match=r"no job, not one:\n  job 1 of order: ready, .*key='o', payload 7$"):
        in_memory.assert_put("mail")
    in_memory.put("mail", 1)
    in_memory.put("mail", 1)
    with pytest.raises(AssertionError) as caught:
        in_memory.assert_put("mail", 1, count=1, status="ready")
    assert str(caught.value) == (
        "queue 'mail' has 2 jobs with payload 1, status='ready', not 1:\n"
        "  job 2 of mail: ready, due now, tries=0, payload 1\n"
        "  job 3 of mail: ready, due now, tries=0, payload 1"
    )


def test_what_can_not_be_asked_for(outbox: Outbox, in_memory: VirtualOutbox) -> None:
    outbox.queue("mail")
    with pytest.raises(TypeError, match=r"a job has no 'delay': give some of added_ms, context, "):
        in_memory.assert_put("mail", delay=5)
    with pytest.raises(TypeError, match="a job has no '_stored'"):
        in_memory.contains("mail", _stored="x")
    for call in (in_memory.assert_put, in_memory.contains, in_memory.jobs):
        with pytest.raises(UnknownQueue):
            call("mial")
    with pytest.raises(ValueError, match="status must be one of"):
        in_memory.jobs(status="ok")
    with pytest.raises(ValueError, match="count must be at least 0"):
        in_memory.assert_put("mail", count=-1)


def test_jobs_are_all_of_them(outbox: Outbox, kit: VirtualOutbox) -> None:
    outbox.queue("mail")
    with kit.begin() as connection:
        outbox.put_many(connection, "mail", list(range(250)))
    assert [job.payload for job in kit.jobs("mail")] == list(range(250))
    kit.assert_put("mail", count=250)


def test_the_outbox_works_inside(outbox: Outbox, kit: VirtualOutbox) -> None:
    outbox.add_consumer("mail", Handler(GiveUp("no")), keep_done=60)
    with kit.begin() as connection:
        job = outbox.put(connection, "mail", 1, key="k")
        assert outbox.get(job.id, connection=connection).payload == 1
    rolled_back(outbox, kit.begin, 2)
    kit.consume("mail", expect="dead")
    assert outbox.find("mail", "k").status == "dead"
    assert [failed.id for failed in outbox.errors()] == [job.id]
    assert outbox.retry(job.id)
    kit.consume("mail")
    assert [done.id for done in outbox.jobs("mail", status="done")] == [job.id]
    assert outbox.prune() == 0
    kit.clock.advance(60)
    assert outbox.prune() == 1
    with pytest.raises(JobNotFound):
        outbox.get(job.id)
    other = kit.put("mail", delay=1)
    assert [(count.queue, count.status, count.count) for count in outbox.stats()] == [("mail", "ready", 1)]
    assert outbox.healthy()
    assert outbox.cancel(other.id)
    assert kit.drain() == []
    outbox.create_tables()


def test_the_async_twins_work_inside_without_a_thread(outbox: Outbox, in_memory: VirtualOutbox) -> None:
    outbox.queue("mail")
    job = in_memory.put("mail", 1)

    async def main() -> None:
        await outbox.acreate_tables()
        assert (await outbox.aget(job.id)).payload == 1
        assert len(await outbox.ajobs()) == 1
        assert set(threading.enumerate()) <= before

    before = set(threading.enumerate())
    asyncio.run(main())


# -- entering and leaving --------------------------------------------------------------------------------------------


def attributes(outbox: Outbox) -> dict[str, Any]:
    return {**vars(outbox.core), "queues": list(outbox.core.queues.all())}


@pytest.mark.parametrize("is_bound", [True, False])
def test_everything_is_as_before(is_bound: bool, sqlite_url: str) -> None:
    outbox = Outbox(sqlite_url if is_bound else None, clock=ManualClock(1_000) if is_bound else None)
    outbox.add_consumer("mail", Handler())
    if is_bound:
        outbox.create_tables()
    before = attributes(outbox)
    with contextlib.suppress(ZeroDivisionError), virtual(outbox, now_ms=5_000) as test:
        outbox.add_consumer("mail", Handler(), replace=True)
        outbox.add_consumer("order", Handler())
        assert test.put("order").added_ms == 5_000
        outbox.remove_consumer("mail")
        raise ZeroDivisionError
    assert attributes(outbox) == before
    if is_bound:
        with outbox.begin() as connection:
            assert outbox.put(connection, "mail").added_ms == 1_000
        assert [job.queue for job in outbox.jobs()] == ["mail"]
    else:
        with pytest.raises(OutboxError, match="not bound"):
            outbox.jobs()
    with virtual(outbox) as test:
        assert test.jobs() == []
        assert test.put("mail").id == 1
    outbox.close()


def test_twice_is_refused(outbox: Outbox) -> None:
    with virtual(outbox) as test:
        outbox.queue("mail")
        job = test.put("mail")
        with pytest.raises(OutboxError, match="is virtual already: leave the first"):
            virtual(outbox).__enter__()
        assert outbox.get(job.id) == job
        with virtual(Outbox()) as other:  # another one is fine
            assert other.jobs() == []
            assert test.jobs() == [job]
    assert not outbox.core.is_virtual


def test_a_running_outbox_and_a_closed_one_are_refused(sqlite_url: str) -> None:
    outbox = Outbox(sqlite_url)
    outbox.create_tables()
    with outbox.running():
        with pytest.raises(OutboxError, match=r"is running: stop\(\) it"):
            virtual(outbox).__enter__()
        assert not outbox.core.is_virtual
    outbox.close()
    with pytest.raises(OutboxError, match="closed"):
        virtual(outbox).__enter__()
    assert not outbox.core.is_virtual


def test_a_bind_that_does_not_work_leaves_all_as_it_was(outbox: Outbox, tmp_path: Path) -> None:
    before = attributes(outbox)
    with pytest.raises(TypeError, match="an outbox is bound to"):
        virtual(outbox, 7).__enter__()
    with pytest.raises(sqlalchemy.exc.OperationalError):
        virtual(outbox, f"sqlite:///{tmp_path}/no/such/folder.db").__enter__()
    assert attributes(outbox) == before


def test_outside_of_its_block_nothing_works(outbox: Outbox) -> None:
    outbox.add_consumer("mail", Handler())
    test = virtual(outbox)
    calls: list[Callable[[], Any]] = [
        test.begin,
        test.sweep,
        test.run_due,
        test.drain,
        test.jobs,
        lambda: test.put("mail"),
        lambda: test.consume("mail"),
        lambda: test.force_retry("mail"),
        lambda: test.run_once("mail"),
        lambda: test.take("mail"),
        lambda: test.contains("mail"),
        lambda: test.assert_put("mail"),
    ]
    for _ in range(2):
        for call in calls:
            with pytest.raises(OutboxError, match=r"within its block: with virtual\(outbox\) as test"):
                call()
        with test:
            pass


def test_start_and_the_like_do_nothing(outbox: Outbox, in_memory: VirtualOutbox) -> None:
    handler = Handler()
    outbox.add_consumer("mail", handler)
    in_memory.put("mail")
    before = set(threading.enumerate())

    async def main() -> None:
        await outbox.astart()
        async with outbox.arunning():
            await outbox.arun()
        assert await outbox.astop() is True
        await outbox.aclose()

    outbox.bind("sqlite:///somewhere.db")
    outbox.start(threads=2)
    with outbox.running():
        outbox.run()
        assert set(threading.enumerate()) <= before
    assert outbox.stop() is True
    asyncio.run(main())
    outbox.close()
    with outbox:
        pass
    assert handler.seen == []
    in_memory.consume("mail")


def test_an_outbox_runs_after_it_was_virtual(sqlite_url: str) -> None:
    done = threading.Event()
    outbox = Outbox(sqlite_url)
    outbox.add_consumer("mail", lambda _: done.set())
    with virtual(outbox) as test:
        test.put("mail")
        test.consume("mail")
        outbox.close()
    done.clear()
    with outbox:
        outbox.create_tables()
        with outbox.begin() as connection:
            outbox.put(connection, "mail")
        with outbox.running():
            assert done.wait(30)


def test_a_schema_is_there_in_memory() -> None:
    outbox = Outbox(schema="app", table="jobs_of_app")
    outbox.add_consumer("mail", Handler())
    with virtual(outbox) as test:
        test.put("mail", 1)
        assert test.consume("mail") == 1
        with test.begin() as connection:
            assert connection.scalar(text("SELECT count(*) FROM app.jobs_of_app")) == 1


def test_a_url_is_opened_and_closed(outbox: Outbox, sqlite_url: str) -> None:
    outbox.queue("mail")
    with virtual(outbox, sqlite_url, now_ms=7) as test:
        test.put("mail", 1)
    gc.collect()
    with virtual(outbox, sqlite_url) as test:
        test.assert_put("mail", 1, count=1, added_ms=7)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_an_engine_in_memory_of_the_application(outbox: Outbox, url: str) -> None:
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE ledger (number int)"))

    @outbox.consumer("book", transactional=True)
    def book(payload: int, connection: Any) -> None:
        connection.execute(text("INSERT INTO ledger VALUES (1)"))
        outbox.jobs()
        if payload:
            raise ValueError("rolled back")

    with virtual(outbox, engine) as test:
        with engine.begin() as connection:
            outbox.put(connection, "book", 0)
            outbox.put(connection, "book", 1)
        assert [run.job.status for run in test.run_due()] == ["done", "error"]
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM ledger")) == 1
    engine.dispose()


def test_the_same_calls_give_the_same_ids_times_and_order(bind: Any) -> None:
    def scenario() -> list[Any]:
        outbox = Outbox()
        handler = Handler(*[ValueError("no")] * 7)
        outbox.add_consumer("mail", handler, max_retries=3)
        outbox.add_consumer("order", handler, stop_at_failure=False)
        seen: list[Any] = []
        with virtual(outbox, bind, now_ms=1_000_000) as test:
            for number in range(5):
                test.put("mail", number, priority=number % 2)
                test.put("order", number, lane="one", delay=number)
            test.take("mail")
            seen += [(run.job.id, run.job.status, run.job.due_ms, run.job.finished_ms) for run in test.drain()]
            seen += [(job.id, job.worker, job.tries, job.started_ms) for job in test.jobs()]
            seen.append(test.clock.time_ns())
            with test.begin() as connection:
                seen += list(map(tuple, connection.execute(outbox.core.tables.jobs.select().order_by(text("id")))))
                outbox.core.tables.metadata.drop_all(connection)
        return seen

    first = scenario()
    assert len(first) > 20
    assert scenario() == first


def test_each_claim_has_a_token_of_its_own_and_jitter_adds_nothing(outbox: Outbox) -> None:
    with virtual(outbox):
        tokens = [outbox.core.token() for _ in range(10_000)]
        assert len(set(tokens)) == 10_000
        assert 0.5 <= outbox.core.random() < 0.5 + 1e-9


def test_the_example_of_the_module_runs() -> None:
    found = doctest.testmod(kestrelpy.outbox.testing)
    assert found.attempted > 5
    assert not found.failed


def test_it_says_what_it_is(outbox: Outbox) -> None:
    with virtual(outbox) as test:
        assert repr(test) == "<VirtualOutbox of <Outbox kestrel_jobs>>"
    assert repr(test) == "<VirtualOutbox of <Outbox kestrel_jobs> (outside of its block)>"
