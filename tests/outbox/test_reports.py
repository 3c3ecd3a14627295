"""The reports and the health of an outbox, on both databases, against figures computed row by row in Python."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import sqlalchemy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kestrelpy.errors import InvalidName
from kestrelpy.outbox import (
    ErrorWatch,
    Health,
    NotInTransaction,
    Outbox,
    OutboxError,
    QueueCount,
    RetryStats,
    Times,
    reports,
)
from kestrelpy.testing import ManualClock
from tests.support.patience import until

DAY_MS = 86_400_000
NOW_MS = 1_000 * DAY_MS
STATUSES = ("ready", "waiting", "running", "error", "done", "dead", "cancelled")
Row = dict[str, Any]


def job(queue: str = "mail", status: str = "ready", **columns: Any) -> Row:
    """A row of a job that was put, and is due, now."""
    usual = {
        "job_group": None,
        "priority": 0,
        "payload": "null",
        "payload_bytes": 4,
        "depends_on": None,
        "tries": 0,
        "added_ms": NOW_MS,
        "due_ms": NOW_MS,
        "started_ms": None,
        "finished_ms": None,
        "first_error_ms": None,
        "held": False,
    }
    return {"queue": queue, "status": status, **usual, **columns}


@pytest.fixture
def outbox(engine: sqlalchemy.Engine) -> Iterator[Outbox]:
    """Empty, at ``NOW_MS``."""
    with Outbox(engine, clock=ManualClock(NOW_MS)) as made:
        made.create_tables()
        yield made


def fill(outbox: Outbox, rows: list[Row]) -> None:
    """Let these be the jobs, numbered from 1 on."""
    table = outbox.metadata.tables["kestrel_jobs"]
    with outbox.begin() as connection:
        connection.execute(table.delete())
        if rows:
            connection.execute(table.insert(), [{"id": number, **row} for number, row in enumerate(rows, 1)])


# -- against a computation in Python ---------------------------------------------------------------------------------

INSTANTS = st.integers(NOW_MS - 40 * DAY_MS, NOW_MS + DAY_MS)
MAYBE = st.one_of(st.none(), INSTANTS)
ROWS = st.lists(
    st.builds(
        job,
        queue=st.sampled_from(["mail", "Mail", "a-b", "a_b", "ab"]),
        status=st.sampled_from([*STATUSES, "done", "done", "ready"]),
        job_group=st.sampled_from([None, "g", "h"]),
        priority=st.sampled_from([-(1 << 31), -1, 0, 1, (1 << 31) - 1]),
        depends_on=st.one_of(st.none(), st.integers(1, 12)),
        tries=st.integers(0, 5),
        added_ms=st.one_of(INSTANTS, st.sampled_from([NOW_MS - 30 * DAY_MS, NOW_MS - 30 * DAY_MS - 1])),
        due_ms=st.one_of(INSTANTS, st.just(NOW_MS)),
        started_ms=MAYBE,
        finished_ms=MAYBE,
        first_error_ms=st.one_of(MAYBE, st.sampled_from([NOW_MS - 900_000, NOW_MS - 899_999])),
        held=st.booleans(),
    ),
    max_size=24,
)
AGES = st.one_of(st.none(), st.sampled_from([0, 30, 0.5, 1e300, math.inf]), st.floats(0, 50))
SPANS = {"total": ("added_ms", "finished_ms"), "wait": ("due_ms", "started_ms"), "run": ("started_ms", "finished_ms")}


def nearest_rank(values: list[int], percent: int) -> float:
    """The smallest value that at least ``percent`` percent of the values do not exceed, in seconds."""
    return (
        next(value for value in sorted(values) if 100 * sum(one <= value for one in values) >= percent * len(values))
        / 1000
    )


def times_of(values: list[int]) -> Times:
    mean = sum(values) / len(values) / 1000
    p50, p90, p95, p99 = (nearest_rank(values, percent) for percent in (50, 90, 95, 99))
    return Times(len(values), min(values) / 1000, mean, p50, p90, p95, p99, max(values) / 1000)


def rounded(times: Times) -> Times:
    """To microseconds: a mean is not the same to the last digit."""
    return dataclasses.replace(times, avg=round(times.avg, 6))


def retries_of(rows: list[Row]) -> RetryStats:
    count = Counter(row["status"] for row in rows)
    retries = sum(max(row["tries"] - 1, 0) for row in rows)
    percentage = 100 * retries / count["done"] if count["done"] else None
    return RetryStats(count["done"], retries, count["error"] + count["dead"], count["running"], percentage)


def health_of(rows: list[Row]) -> tuple[int, int, float | None]:
    errors = sum(
        row["status"] in ("error", "dead")
        and row["first_error_ms"] is not None
        and row["first_error_ms"] <= NOW_MS - 900_000
        for row in rows
    )
    ended = {number for number, row in enumerate(rows, 1) if row["status"] in ("dead", "cancelled")}
    waiting = sum(row["status"] == "waiting" and row["depends_on"] in ended for row in rows)
    ready = [NOW_MS - row["due_ms"] for row in rows if row["status"] == "ready" and not row["held"]]
    ages = [age for age in ready if age >= 0]
    return errors, waiting, max(ages) / 1000 if ages else None


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(rows=ROWS, age_days=AGES, queue=st.sampled_from([None, "mail", "a-b", "nobody"]))
def test_the_reports_are_those_of_the_rows(
    outbox: Outbox, rows: list[Row], age_days: float | None, queue: str | None
) -> None:
    fill(outbox, rows)
    asked = [row for row in rows if queue in (None, row["queue"])]
    count = Counter((row["queue"], row["status"]) for row in asked)
    assert outbox.stats(queue) == [QueueCount(*which, count[which]) for which in sorted(count)]

    of_group = Counter(row["status"] for row in rows if row["queue"] == "mail" and row["job_group"] == "g")
    assert outbox.group_progress("mail", "g") == dict(of_group)

    young = [row for row in asked if age_days is None or row["added_ms"] >= NOW_MS - age_days * DAY_MS]
    by_queue = {name: [row for row in young if row["queue"] == name] for name in sorted({r["queue"] for r in young})}
    retries = outbox.retry_stats(age_days=age_days, queue=queue)
    assert list(retries.items()) == [(name, retries_of(mine)) for name, mine in by_queue.items()]

    for of, (begin, end) in SPANS.items():
        spans = {
            name: [
                row[end] - row[begin]
                for row in mine
                if row["status"] == "done" and row[begin] is not None and row[end] is not None
            ]
            for name, mine in by_queue.items()
        }
        times = outbox.processing_times(age_days=age_days, queue=queue, of=of)
        found = [(name, rounded(one)) for name, one in times.items()]
        assert found == [(name, rounded(times_of(mine))) for name, mine in spans.items() if mine]

    health = outbox.health()
    assert (health.errors, health.waiting_on_dead, health.oldest_ready_age) == health_of(rows)
    assert health.healthy == (not health.reasons) == (not health.errors)


@pytest.mark.parametrize("count", [1, 2, 19, 20, 21, 99, 100, 101, 300])
def test_percentiles_are_the_times_of_jobs(outbox: Outbox, count: int) -> None:
    done = [job(status="done", started_ms=NOW_MS, finished_ms=NOW_MS + 1000 * number) for number in range(1, count + 1)]
    fill(outbox, done)
    found = outbox.processing_times()["mail"]
    ranks = [-(-percent * count // 100) for percent in (50, 90, 95, 99)]
    assert [found.p50, found.p90, found.p95, found.p99] == ranks
    assert (found.count, found.min, found.max) == (count, 1, count)
    assert found.avg == pytest.approx((count + 1) / 2)


# -- what they are asked for -----------------------------------------------------------------------------------------


def test_nothing_of_nothing(outbox: Outbox) -> None:
    assert outbox.stats() == []
    assert outbox.group_progress("mail", "nobody") == {}
    assert outbox.retry_stats() == {} == outbox.processing_times()
    assert outbox.health() == Health(True, (), 0, 0, 0, None)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda box: box.stats("no name"), InvalidName),
        (lambda box: box.group_progress("mail", None), TypeError),
        (lambda box: box.group_progress("mail", ""), ValueError),
        (lambda box: box.retry_stats(age_days=-1), ValueError),
        (lambda box: box.retry_stats(age_days=math.nan), ValueError),
        (lambda box: box.retry_stats(age_days="30"), TypeError),
        (lambda box: box.retry_stats(queue="no name"), InvalidName),
        (lambda box: box.processing_times(of="all"), ValueError),
        (lambda box: box.processing_times(age_days=True), TypeError),
        (lambda box: box.errors(limit=-1), ValueError),
    ],
)
def test_wrong_arguments_are_refused_before_the_database_is_asked(
    call: Callable[[Outbox], object], error: type[Exception]
) -> None:
    with Outbox() as unbound, pytest.raises(error):
        call(unbound)


def test_errors_can_be_limited(outbox: Outbox) -> None:
    fill(outbox, [job(status="dead", first_error_ms=NOW_MS - number) for number in range(5)])
    assert [one.id for one in outbox.errors(limit=2)] == [5, 4]
    assert len(outbox.errors()) == 5


def test_on_the_connection_of_the_caller(outbox: Outbox) -> None:
    """What its transaction has not committed is counted there, and nowhere else."""
    outbox.queue("mail")
    with outbox.begin() as connection:
        outbox.put(connection, "mail", 1, group="g")
        assert outbox.stats(connection=connection) == [QueueCount("mail", "ready", 1)]
        assert outbox.group_progress("mail", "g", connection=connection) == {"ready": 1}
        assert outbox.retry_stats(connection=connection) == {"mail": RetryStats(0, 0, 0, 0, None)}
        assert outbox.processing_times(connection=connection) == {}
        assert outbox.health(connection=connection).oldest_ready_age == 0
        connection.rollback()
    assert outbox.stats() == []


def test_a_run_of_real_jobs(engine: sqlalchemy.Engine) -> None:
    """By the server's clock, where it has one."""
    ran = []
    with Outbox(engine) as box:
        box.create_tables()

        @box.consumer("mail", backoff=0)
        def handle(payload: int) -> None:
            ran.append(payload)
            if payload == 2 and ran.count(2) == 1:
                raise ValueError("once")

        with box.begin() as connection:
            box.put_many(connection, "mail", [1, 2, 3], group="g")
        with box.running(retry_interval=0.01):
            until(lambda: box.group_progress("mail", "g") == {"done": 3})
        assert box.retry_stats() == {"mail": RetryStats(3, 1, 0, 0, 100 / 3)}
        total, wait, run = (box.processing_times(of=of)["mail"] for of in ("total", "wait", "run"))
        assert total.count == wait.count == run.count == 3
        assert 0 <= run.min <= run.p50 <= run.p90 <= run.p95 <= run.p99 <= run.max <= total.max
        assert wait.min >= 0
        assert box.stats() == [QueueCount("mail", "done", 3)]


@pytest.mark.parametrize("driver", ["aiosqlite", "psycopg", "asyncpg"])
def test_the_twins_of_asyncio(request: pytest.FixtureRequest, driver: str) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    if driver == "aiosqlite":
        url = request.getfixturevalue("sqlite_url").replace("sqlite:", "sqlite+aiosqlite:")
    else:
        url = request.getfixturevalue("postgres_url").replace("+psycopg", f"+{driver}")

    async def main() -> None:
        engine = create_async_engine(url)
        async with Outbox(engine, clock=ManualClock(NOW_MS)) as box:
            await box.acreate_tables()
            table = box.metadata.tables["kestrel_jobs"]
            done: Row = {"job_group": "g", "tries": 3, "started_ms": NOW_MS, "finished_ms": NOW_MS + 250}
            rows = [job(status="done", **done), job(status="dead", first_error_ms=0), job(due_ms=NOW_MS - 1500)]
            async with box.abegin() as connection:
                for row in rows:
                    await connection.execute(table.insert().values(row))
            assert [one.status for one in await box.astats()] == ["dead", "done", "ready"]
            assert await box.agroup_progress("mail", "g") == {"done": 1}
            assert await box.aretry_stats(age_days=None) == {"mail": RetryStats(1, 2, 1, 0, 200.0)}
            assert await box.aprocessing_times(of="run") == {"mail": Times(1, *[0.25] * 7)}
            assert (await box.ahealth()).errors == 1
            assert (await box.ahealth()).oldest_ready_age == 1.5
            assert not await box.ahealthy()
            assert await box.aunhealthy()
            assert len(await box.aerrors(limit=5)) == 1
            async with box.abegin() as connection:
                assert await box.aunhealthy(connection=connection)
                with pytest.raises(TypeError, match="aput takes"):
                    await box.ahealth(connection="no connection")
        await engine.dispose()

    within(main())


def within(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 20))


# -- health ----------------------------------------------------------------------------------------------------------


def test_an_old_error_is_unhealthy(outbox: Outbox) -> None:
    fill(outbox, [job(status="error", first_error_ms=NOW_MS - 900_000 + 1)])
    assert outbox.healthy()
    fill(outbox, [job(status="error", first_error_ms=NOW_MS - 900_000)])
    assert outbox.unhealthy()
    assert not outbox.healthy()
    found = outbox.health()
    assert found.reasons == ("1 job in error or dead, failed first 900 s ago or earlier (healthy_error_age)",)
    fill(outbox, [job(status="cancelled", first_error_ms=0)])
    assert outbox.healthy(), "a cancelled job was dealt with"


def test_a_slow_handler_is_unhealthy(outbox: Outbox) -> None:
    outbox.core.slow = lambda: 2
    found = outbox.health()
    assert (found.healthy, found.slow) == (False, 2)
    assert found.reasons == ("2 handlers running for longer than slow_after",)


def test_jobs_that_wait_for_dead_ones_are_counted(outbox: Outbox) -> None:
    waits = [job(status="waiting", depends_on=number) for number in (1, 2, 2, 3, 99)]
    fill(outbox, [job(status="dead"), job(status="cancelled"), job(status="running"), *waits])
    assert outbox.health().waiting_on_dead == 3
    assert outbox.healthy(), "the dead one itself makes it unhealthy, when it is old enough"


def test_the_oldest_ready_job_may_have_any_priority(outbox: Outbox) -> None:
    fill(outbox, [job("b", priority=9, due_ms=NOW_MS - 5000), job("a", priority=-9, due_ms=NOW_MS - 4000)])
    assert outbox.health().oldest_ready_age == 5
    fill(outbox, [job(due_ms=NOW_MS + 1), job(due_ms=0, held=True), job(status="running", due_ms=0)])
    assert outbox.health().oldest_ready_age is None


def test_it_is_healthy_for_some_time_after_the_start(engine: sqlalchemy.Engine) -> None:
    clock = ManualClock(NOW_MS)
    with Outbox(engine, clock=clock, health_grace=600, healthy_error_age=0) as box:
        box.create_tables()
        fill(box, [job(status="dead", first_error_ms=0)])
        assert box.unhealthy(), "never started: it looks at once"
        box.core.started_ms = NOW_MS
        box.core.slow = lambda: 1
        found = box.health()
        assert (found.healthy, found.reasons, found.errors, found.slow) == (True, (), 1, 1)
        clock.advance(599.999)
        assert box.healthy()
        clock.advance(0.001)
        assert box.unhealthy()
        box.core.started_ms = NOW_MS + 10 * DAY_MS
        assert box.unhealthy(), "a clock that was set back by days gives no grace of days"


def test_a_start_and_a_stop_begin_and_end_the_grace(engine: sqlalchemy.Engine) -> None:
    with Outbox(engine, healthy_error_age=0) as box:
        box.create_tables()
        box.add_consumer("other", print)
        fill(box, [job(status="dead", first_error_ms=0)])
        with box.running(threads=1):
            assert box.healthy()
        assert box.unhealthy()


def test_no_tables(database_url: str) -> None:
    with Outbox(database_url) as box:
        (reason,) = box.health().reasons
        assert reason.startswith("the database did not answer: ")
        assert "kestrel_jobs" in reason
        assert "\n" not in reason
        assert "SELECT" not in reason
        box.create_tables()
        assert box.healthy(), "the transaction of the look that failed is over"


def test_a_server_that_is_away(private_server: Any) -> None:
    with Outbox(private_server.url(tcp=True)) as box:
        box.create_tables()
        assert box.healthy()
        private_server.stop("immediate")
        found = box.health()
        assert not found.healthy
        (reason,) = found.reasons
        assert reason.startswith("the database did not answer: ")
        assert found == Health(False, (reason,), 0, 0, 0, None)
        private_server.start()
        until(box.healthy)


@pytest.fixture
def private_server(postgres_installed: None) -> Iterator[Any]:
    from tests.support import postgres

    with postgres.private_cluster(fsync=False) as cluster:
        yield cluster


def test_a_table_that_somebody_has_locked(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_PATIENCE", "SET LOCAL statement_timeout = 50")
    with Outbox(postgres_url) as box:
        box.create_tables()
        with box.begin() as connection:
            connection.exec_driver_sql("LOCK TABLE kestrel_jobs IN ACCESS EXCLUSIVE MODE")
            (reason,) = box.health().reasons
            assert "statement timeout" in reason
            assert box.healthy(connection=connection), "who has the lock looks without that limit"
            shown = connection.exec_driver_sql("SHOW statement_timeout").scalar()
            assert shown == "0", "the caller's transaction keeps its settings"
        assert box.healthy()


def test_an_outbox_that_is_not_bound_is_unhealthy() -> None:
    box = Outbox()
    assert box.health().reasons == ("this outbox is not bound: pass Outbox(bind), or call outbox.bind(...) first",)
    box.close()
    with pytest.raises(OutboxError, match="closed"):
        box.health()


def test_a_connection_that_can_not_be_used(outbox: Outbox, engine: sqlalchemy.Engine) -> None:
    with pytest.raises(TypeError):
        outbox.health(connection="no connection")
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as each, pytest.raises(NotInTransaction):
        outbox.health(connection=each)


def test_a_look_feeds_the_watch(outbox: Outbox) -> None:
    watch = ErrorWatch(min_count=2)
    told = []
    for rows in ([], [job(status="dead", first_error_ms=0)] * 2, [], []):
        fill(outbox, rows)
        told += [watch.observe(NOW_MS, len(reports.look(outbox.core).reasons)) for _ in range(2)]
    assert told == [None, None, None, "error", None, "recovery", None, None]


def test_looks_from_many_threads(outbox: Outbox) -> None:
    fill(outbox, [job(status="dead", first_error_ms=0)])
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(outbox.unhealthy())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8


LOOKS: list[Callable[[Outbox], object]] = [
    lambda box: box.stats(),
    lambda box: box.group_progress("mail", "g"),
    lambda box: box.retry_stats(),
    lambda box: box.processing_times(),
    lambda box: box.health().errors,
    lambda box: [one.id for one in box.jobs()],
    lambda box: [one.id for one in box.errors()],
    lambda box: box.get(1).status,
]


@pytest.mark.parametrize("driver", ["sqlite", "sqlite+aiosqlite"])
@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
def test_a_look_needs_no_write_lock_of_sqlite(sqlite_url: str, driver: str, journal: str) -> None:
    with Outbox(sqlite_url) as box:
        box.create_tables()
        fill(box, [job(status="dead", first_error_ms=0, job_group="g")])
        with box.core.open_store().database.engine.connect() as connection:  # type: ignore[attr-defined]
            connection.exec_driver_sql(f"PRAGMA journal_mode={journal}")
        seen = [look(box) for look in LOOKS]
        with Outbox(sqlite_url.replace("sqlite:", f"{driver}:") + "?timeout=0.01") as other, box.begin() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            connection.exec_driver_sql("DELETE FROM kestrel_jobs")
            assert [look(other) for look in LOOKS] == seen
            with pytest.raises(sqlalchemy.exc.OperationalError, match="locked"):
                other.retry(1)


# -- the results -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        QueueCount("mail", "done", 1),
        RetryStats(1, 2, 3, 4, None),
        Times(1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        Health(True, (), 0, 0, 0, None),
    ],
)
def test_results_are_values(value: Any) -> None:
    assert dataclasses.replace(value) == value
    assert list(dataclasses.asdict(value)) == list(value.__match_args__)
    assert hash(value) == hash(dataclasses.replace(value))
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.count = 1


def test_results_need_no_sqlalchemy(script: Any) -> None:
    told = script(
        """
        import sys
        from kestrelpy.outbox import Health, QueueCount, RetryStats, Times
        print("sqlalchemy" in sys.modules)
        """
    )
    assert told == "False"
