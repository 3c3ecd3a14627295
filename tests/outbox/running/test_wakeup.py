"""What wakes a consumer: commits, due times, other jobs; and how little it does while there is nothing to do."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from kestrelpy.outbox import Job, Outbox, RetryLater
from tests.support.outboxes import (
    ALONE,
    QUICK,
    Records,
    Steps,
    all_become,
    becomes,
    is_idle,
    put,
    put_each,
    running,
    threads_left,
)
from tests.support.patience import until

on_postgresql = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
LISTENER = "kestrelpy-outbox-listener"
LISTENING = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"


def put_in_another_process(script: Callable[..., str], url: str, queue: str = "q") -> None:
    script(
        """
        import sys
        from kestrelpy.outbox import Outbox
        with Outbox(sys.argv[1]) as outbox:
            outbox.queue(sys.argv[2])
            with outbox.begin() as connection:
                outbox.put(connection, sys.argv[2], 1)
        """,
        url,
        queue,
    )


# -- commits ---------------------------------------------------------------------------------------------------------


def test_a_commit_of_another_process_wakes(
    outbox: Outbox, script: Callable[..., str], engine: sqlalchemy.Engine
) -> None:
    seen = Steps()
    outbox.add_consumer("q", seen.add)
    with running(outbox, **ALONE):
        put_in_another_process(script, engine.url.render_as_string(hide_password=False))
        assert seen.wait() == [1]


def test_it_is_the_commit_that_wakes(outbox: Outbox) -> None:
    seen = Steps()
    outbox.add_consumer("q", seen.add)
    with running(outbox, **ALONE):
        with outbox.begin() as connection:
            outbox.put(connection, "q", "first")
            assert seen.seen == []
        seen.wait()
        with pytest.raises(ZeroDivisionError), outbox.begin() as connection:  # noqa: PT012
            outbox.put(connection, "q", "rolled back")
            raise ZeroDivisionError
        put_each(outbox, "q", ["second", "third"])
        with outbox.begin() as connection:
            outbox.put(connection, "q", "fourth", key="k")
        assert sorted(seen.wait(4)) == ["first", "fourth", "second", "third"]


def test_a_job_that_is_replaced_wakes(outbox: Outbox) -> None:
    seen = Steps()
    outbox.add_consumer("q", seen.add)
    put(outbox, "q", "old", key="k", delay=1000)
    with running(outbox, **ALONE):
        put(outbox, "q", "new", key="k", if_exists="replace")
        assert seen.wait() == ["new"]


@pytest.mark.parametrize("options", [{"table": "other_jobs"}, {"notify": False}], ids=str)
def test_options_of_an_outbox(open_outbox: Callable[..., Outbox], options: dict[str, Any], outbox: Outbox) -> None:
    """Another table beside one, whose jobs it leaves alone; no notifications on PostgreSQL."""
    other = open_outbox(**options)
    seen = Steps()
    other.add_consumer("q", seen.add)
    outbox.queue("q")
    start = QUICK if "notify" in options else ALONE
    with running(other, **start):
        if "notify" in options:
            has_listener = other.core.store.database.dialect.name == "sqlite"  # type: ignore[union-attr]
            assert (LISTENER in threads_left()) is has_listener
        else:
            left = put(outbox, "q", "left")
        put(other, "q", "taken")
        assert seen.wait() == ["taken"]
    if "table" in options:
        assert outbox.get(left.id).status == "ready"


@on_postgresql
def test_a_schema_and_a_table_with_a_long_name(engine: sqlalchemy.Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text(f'CREATE SCHEMA "{"S" * 41}"'))
    with Outbox(engine, table="t" * 41, schema="S" * 41) as outbox:
        outbox.create_tables()
        outbox.add_consumer("q", lambda _: None)
        with running(outbox, **ALONE):
            becomes(outbox, put(outbox, "q"), "done")


# -- the connection that listens -------------------------------------------------------------------------------------


@pytest.fixture
def driver() -> str:
    """Overridden by a parameter of the test."""
    return "psycopg"


@pytest.fixture
def listening(driver: str, engine: sqlalchemy.Engine, outbox: Outbox) -> Iterator[Outbox]:
    """An outbox on PostgreSQL with an engine of that driver."""
    pytest.importorskip(driver.removesuffix("_async"))
    url = engine.url.set(drivername=f"postgresql+{driver}")
    if driver in ("psycopg", "psycopg2"):
        made: Any = sqlalchemy.create_engine(url)
        dispose = made.dispose
    else:
        made = create_async_engine(url)
        dispose = made.sync_engine.dispose
    outbox.queue("q")
    with Outbox(made) as found:
        yield found
    dispose()


@on_postgresql
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "asyncpg", "psycopg_async"])
def test_each_driver_is_woken(listening: Outbox, outbox: Outbox, driver: str) -> None:
    """psycopg2 can't listen by itself, and polls each second."""
    listening.add_consumer("q", lambda _: None)
    is_polling = driver == "psycopg2"
    listening.start(threads=1, poll_interval=None if is_polling else 1000)
    try:
        assert (LISTENER in threads_left()) is not is_polling
        becomes(outbox, put(outbox, "q"), "done")
        becomes(outbox, put(outbox, "q"), "done")
    finally:
        assert listening.stop()


@on_postgresql
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg", "psycopg_async"])
def test_a_lost_connection_comes_back(listening: Outbox, outbox: Outbox, engine: sqlalchemy.Engine) -> None:
    """And what was put meanwhile is found, though nobody was notified."""
    listening.add_consumer("q", lambda _: None)
    listening.start(**ALONE)
    try:
        becomes(outbox, put(outbox, "q"), "done")
        for _ in range(3):
            pid = listener_of(engine, 0)
            with engine.begin() as connection:
                connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
                job = outbox.put(connection, "q")
            becomes(outbox, job, "done")
            listener_of(engine, pid)
            becomes(outbox, put(outbox, "q"), "done")
    finally:
        assert listening.stop()


def listener_of(engine: sqlalchemy.Engine, before: int) -> int:
    """The process that serves the connection that listens, once it is not ``before``."""
    with engine.connect() as connection:
        connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        found: list[int] = []

        def look() -> bool:
            found[:] = connection.execute(text(LISTENING)).scalars().all()
            return len(found) == 1 and found[0] != before

        until(look)
    return found[0]


@on_postgresql
def test_listen_url_is_where_it_listens(engine: sqlalchemy.Engine, open_outbox: Callable[..., Outbox]) -> None:
    outbox = open_outbox(listen_url=engine.url.render_as_string(hide_password=False))
    outbox.add_consumer("q", lambda _: None)
    with running(outbox, **ALONE):
        becomes(outbox, put(outbox, "q"), "done")
        assert listener_of(engine, 0)


@on_postgresql
def test_where_it_can_not_listen_it_polls(
    open_outbox: Callable[..., Outbox], records: Records, postgres_cluster: Any
) -> None:
    """It says so once."""
    outbox = open_outbox(listen_url=postgres_cluster.url("no_such_database"))
    outbox.add_consumer("q", lambda _: None)
    with running(outbox, **QUICK):
        until(lambda: records.of("listening", "no_such_database"))
        becomes(outbox, put(outbox, "q"), "done")
        becomes(outbox, put(outbox, "q"), "done")
    assert len(records.of("listening")) == 1


@on_postgresql
def test_it_listens_although_the_pool_is_small(engine: sqlalchemy.Engine, outbox: Outbox) -> None:
    """Its connection is its own: one for the transactions is enough."""
    outbox.queue("q")
    small = sqlalchemy.create_engine(engine.url, pool_size=1, max_overflow=0)
    with Outbox(small) as consumer:
        consumer.add_consumer("q", lambda _: None)
        with running(consumer, **ALONE):
            becomes(outbox, put(outbox, "q"), "done")
            all_become(outbox, "q", "done")
            put_each(outbox, "q", range(20))
            all_become(outbox, "q", "done")
    small.dispose()


@on_sqlite
def test_many_open_files_do_not_keep_it_from_waking(outbox: Outbox) -> None:
    """select() takes no descriptor above 1023, and a server has thousands."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("no more than 2048 files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        outbox.add_consumer("q", lambda _: None)
        with running(outbox, **ALONE):
            becomes(outbox, put(outbox, "q"), "done")
            becomes(outbox, put(outbox, "q"), "done")
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@on_sqlite
@pytest.mark.parametrize("journal", ["DELETE", "WAL"])
def test_sqlite_in_each_journal_mode(outbox: Outbox, engine: sqlalchemy.Engine, journal: str) -> None:
    with engine.connect() as connection:
        mode = connection.execute(text(f"PRAGMA journal_mode = {journal}")).scalar_one()
    outbox.add_consumer("q", lambda _: None)
    with running(outbox, **ALONE):
        becomes(outbox, put(outbox, "q"), "done")
        put_each(outbox, "q", range(20))
        all_become(outbox, "q", "done")
    with engine.connect() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar_one() == mode


# -- due times -------------------------------------------------------------------------------------------------------


def test_delayed_jobs_start_when_they_are_due(outbox: Outbox) -> None:
    """Several, put before and after the start, in two queues and of two priorities; none waits for a poll."""
    started = Steps()
    for queue in ("q", "r"):
        outbox.add_consumer(queue, started.add)
    put(outbox, "q", 1, delay=0.02)
    put(outbox, "q", 3, delay=0.3, priority=-5)
    with running(outbox, **ALONE):
        started.wait(1)
        put(outbox, "r", 2, delay=0.05)
        put(outbox, "r", 4, delay=0.32)
        put(outbox, "q", 5, delay=1000)
        assert sorted(started.wait(4)) == [1, 2, 3, 4]
        jobs = [job for job in outbox.jobs() if job.payload != 5]
        assert all(job.started_ms >= job.due_ms for job in all_done(outbox, jobs))


def all_done(outbox: Outbox, jobs: list[Job]) -> list[Any]:
    return [becomes(outbox, job, "done") for job in jobs]


def test_what_is_due_and_can_not_run_hides_nothing(outbox: Outbox) -> None:
    """A paused queue with a job that is due already, beside one whose job is due in a moment."""
    outbox.add_consumer("paused", lambda _: None)
    outbox.add_consumer("q", lambda _: None)
    outbox.pause("paused")
    put(outbox, "paused")
    job = put(outbox, "q", delay=0.1)
    with running(outbox, **ALONE):
        becomes(outbox, job, "done")


def test_retries_start_when_they_are_due(outbox: Outbox) -> None:
    """Also those that were in error before the start, and several with different times."""
    seen = set()

    def work(payload: float) -> None:
        if payload not in seen:
            seen.add(payload)
            raise ValueError

    outbox.add_consumer("q", work, backoff=0.1)
    jobs = put_each(outbox, "q", [1, 2])
    with running(outbox, **ALONE):
        until(lambda: {job.status for job in outbox.jobs("q")} == {"error"})
    with running(outbox, **ALONE):
        later = put(outbox, "q", 3)
        for job in [*jobs, later]:
            becomes(outbox, job, "done")


def test_retry_later_starts_when_it_is_due(outbox: Outbox) -> None:
    seen = Steps()

    def work(payload: float) -> None:
        seen.add(payload)
        if seen.seen.count(payload) < 3:
            raise RetryLater(payload)

    outbox.add_consumer("q", work)
    put_each(outbox, "q", [0.01, 0.04, 0.07])
    with running(outbox, **ALONE):
        all_become(outbox, "q", "done")


# -- other jobs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("process", ["same", "other"])
def test_a_dependant_starts_at_once(outbox: Outbox, open_outbox: Callable[..., Outbox], process: str) -> None:
    """Of a plain job, a transactional one, and one that is deleted with its mark; here and in another process."""
    gates = {queue: threading.Event() for queue in ("plain", "tx", "gone")}
    outbox.add_consumer("plain", lambda _: gates["plain"].wait(20))
    outbox.add_consumer("tx", lambda *_: gates["tx"].wait(20), transactional=outbox_has_readers(outbox))
    outbox.add_consumer("gone", lambda _: gates["gone"].wait(20), keep_done=0)
    other = outbox if process == "same" else open_outbox()
    other.add_consumer("next", lambda _: None)
    outbox.queue("next")
    with running(outbox, **ALONE), running(other, **ALONE):
        for queue, gate in gates.items():
            with outbox.begin() as connection:
                first = outbox.put(connection, queue)
                job = outbox.put(connection, "next", depends_on=first)
            becomes(outbox, first, "running")
            threading.Event().wait(0.15)  # it looks ahead meanwhile, and finds nothing
            gate.set()
            becomes(outbox, job, "done")


def outbox_has_readers(outbox: Outbox) -> bool:
    """On SQLite a transactional handler has the only write lock: nothing else could be put meanwhile."""
    return bool(outbox.core.store.database.dialect.name == "postgresql")  # type: ignore[union-attr]


def test_the_next_of_a_lane_starts_at_once(outbox: Outbox) -> None:
    seen = Steps()
    outbox.add_consumer("q", seen.add)
    with running(outbox, **ALONE):
        put_each(outbox, "q", range(10), lane="l")
        assert seen.wait(10) == list(range(10))


def test_payloads_of_more_than_a_claim_takes(outbox: Outbox) -> None:
    """16 MiB: the rest does not wait for a poll."""
    outbox.add_consumer("q", lambda _: None)
    put_each(outbox, "q", ["x" * 1_000_000] * 20)
    with running(outbox, **{**ALONE, "prefetch": 100}):
        all_become(outbox, "q", "done")


# -- pauses ----------------------------------------------------------------------------------------------------------


def test_a_paused_queue_is_left_alone_until_it_goes_on(outbox: Outbox) -> None:
    began, gate, seen = threading.Event(), threading.Event(), Steps()

    def work(payload: int) -> None:
        if payload == 1:
            began.set()
            gate.wait(20)
        seen.add(payload)

    outbox.add_consumer("q", work)
    outbox.add_consumer("other", lambda _: None)
    with running(outbox, **QUICK):
        put(outbox, "q", 1)
        began.wait(20)
        outbox.pause("q")
        gate.set()
        seen.wait()  # what runs goes on
        put(outbox, "q", 2)
        for _ in range(3):
            becomes(outbox, put(outbox, "other"), "done")
        assert seen.seen == [1]
        outbox.resume("q")
        assert seen.wait(2) == [1, 2]


@pytest.mark.parametrize("mend", ["retry", "retry_all", "resume", "cancel"])
def test_what_is_mended_elsewhere_wakes(outbox: Outbox, open_outbox: Callable[..., Outbox], mend: str) -> None:
    """``cancel``: of the job that the next one of its lane is behind."""
    fails = [mend != "resume"]  # the first run

    def work(_payload: int) -> None:
        if fails.pop() if fails else False:
            raise ConnectionError("away")

    consumer = open_outbox()
    consumer.add_consumer("q", work, max_retries=1 if mend == "cancel" else 0, backoff=1000)
    outbox.queue("q")
    if mend == "resume":
        outbox.pause("q")
    first = put(outbox, "q", 1, lane="l")
    last = put(outbox, "q", 2, lane="l") if mend == "cancel" else first
    with running(consumer, **ALONE):
        if mend != "resume":
            becomes(outbox, first, "error" if mend == "cancel" else "dead")
        threading.Event().wait(0.2)  # it looks ahead meanwhile, and finds nothing
        if mend in ("retry", "cancel"):
            assert getattr(outbox, mend)(first.id)
        else:
            getattr(outbox, mend)("q")
        becomes(outbox, last, "done")


# -- how little it does ----------------------------------------------------------------------------------------------


class Statements:
    """Those that an engine has executed."""

    def __init__(self, engine: sqlalchemy.Engine) -> None:
        self.seen: list[str] = []
        sqlalchemy.event.listen(engine, "before_cursor_execute", self._note)

    def _note(self, _connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        self.seen.append(statement)


def test_an_idle_consumer_executes_nothing_and_takes_no_time(outbox: Outbox, engine: sqlalchemy.Engine) -> None:
    outbox.add_consumer("q", lambda _: None)
    outbox.add_consumer("r", lambda _: None)
    statements = Statements(engine)
    with running(outbox, **ALONE):
        becomes(outbox, put(outbox, "q"), "done")
        until(lambda: is_idle(outbox, statements.seen))
        before, began = len(statements.seen), time.process_time()
        threading.Event().wait(0.5)
        taken = time.process_time() - began
        assert statements.seen[before:] == []
    assert taken < 0.05


def test_a_poll_is_a_handful_of_statements(outbox: Outbox, engine: sqlalchemy.Engine) -> None:
    for number in range(20):
        outbox.add_consumer(f"q{number}", lambda _: None)
    statements, began = Statements(engine), time.monotonic()
    with running(outbox, threads=1, poll_interval=0.2):
        threading.Event().wait(1.1)
    polls = sum("relay_batch IS NULL" in each and "'running'" in each for each in statements.seen)
    assert 2 <= polls <= (time.monotonic() - began) / 0.2 + 1
    most = 8 if engine.dialect.name == "postgresql" else 140  # SQLite's are of this process: by queue
    assert len(statements.seen) <= most * (polls + 2)


def test_a_lease_is_one_statement_for_all(open_outbox: Callable[..., Outbox], engine: sqlalchemy.Engine) -> None:
    outbox = open_outbox(lease=0.6)
    gate, seen = threading.Event(), Steps()

    def work(payload: int) -> None:
        seen.add(payload)
        gate.wait(20)

    outbox.add_consumer("q", work)
    put_each(outbox, "q", range(10))
    statements, began = Statements(engine), time.monotonic()
    with running(outbox, threads=4, prefetch=6, poll_interval=1000):
        seen.wait(4)
        until(lambda: len(outbox.jobs(status="running")) == 10)
        threading.Event().wait(1.0)
        renewals = [each for each in statements.seen if "SET due_ms" in each]
        intervals = (time.monotonic() - began) / 0.2
        assert {job.tries for job in outbox.jobs("q")} == {1}
        gate.set()
        all_become(outbox, "q", "done")
    assert 2 <= len(renewals) <= intervals + 1


@on_postgresql
def test_an_idle_listener_holds_no_transaction(outbox: Outbox, engine: sqlalchemy.Engine) -> None:
    """Which would keep vacuum from its work."""
    outbox.add_consumer("q", lambda _: None)
    with running(outbox, **ALONE):
        becomes(outbox, put(outbox, "q"), "done")
        with psycopg.connect(engine.url.set(drivername="postgresql").render_as_string(), autocommit=True) as look:
            until(
                lambda: (
                    look.execute(
                        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                        " AND xact_start IS NOT NULL AND pid <> pg_backend_pid()"
                    ).fetchone()
                    == (0,)
                )
            )
