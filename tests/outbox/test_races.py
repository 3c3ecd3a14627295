"""Transactions that overlap: two connections in an order that is fixed, and some threads where that can't be."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine

from kestrelpy.outbox import DuplicateJob, Outbox, claims
from kestrelpy.outbox.sql import Claim
from kestrelpy.outbox.sweeping import Sweep
from kestrelpy.testing import ManualClock
from tests.outbox.claimant import Claimant
from tests.outbox.test_puts import put
from tests.outbox.ways import follow_the_recipe, with_driver
from tests.support.patience import PATIENCE, until

Start = Callable[..., threading.Thread]
JOBS = 2000
AT_ONCE = 20


def is_waiting(engine: sqlalchemy.Engine) -> bool:
    """Whether somebody waits for a lock of another transaction."""
    with engine.connect() as connection:
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        return bool(connection.exec_driver_sql(waiting).scalar())


@pytest.fixture
def on_postgres(postgres_url: str, clock: ManualClock) -> Iterator[Outbox]:
    """For what can't happen on SQLite, where one connection at a time writes."""
    with Outbox(postgres_url, clock=clock) as outbox:
        outbox.create_tables()
        outbox.queue("mail")
        outbox.queue("bills")
        yield outbox


def engine_of(outbox: Outbox) -> sqlalchemy.Engine:
    with outbox.begin() as connection:
        engine: sqlalchemy.Engine = connection.engine
        return engine


# -- puts and marks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deleted", [False, True], ids=["kept", "deleted"])
def test_a_put_that_overlaps_with_the_mark_is_found_by_the_sweep(on_postgres: Outbox, deleted: bool) -> None:
    outbox, claimant = on_postgres, Claimant(on_postgres)
    first = put(outbox, "bills")
    (claimed,) = claimant.claim("bills")
    with outbox.begin() as connection:
        second = outbox.put(connection, "mail", depends_on=first)
        assert second.status == "waiting"
        claimant.done(claimed, delete=deleted)  # which does not wait for the slow caller
        assert claimant.sweep() == []
    assert outbox.get(second.id).status == "waiting"
    assert claimant.ids() == []
    assert claimant.sweep() == [second.id]
    assert claimant.ids() == [second.id]


def test_on_sqlite_the_same_by_a_connection_that_has_looked(sqlite_url: str, clock: ManualClock) -> None:
    """The driver begins a transaction with the INSERT; the look at the other job comes before."""
    with Outbox(sqlite_url, clock=clock) as outbox:
        outbox.create_tables()
        outbox.queue("mail")
        claimant = Claimant(outbox)
        first = put(outbox)
        (claimed,) = claimant.claim()
        with outbox.begin() as connection:
            raced: list[bool] = []

            def mark(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
                if statement.startswith("INSERT") and not raced:
                    raced.append(True)
                    claimant.done(claimed)

            event.listen(connection, "before_cursor_execute", mark)
            second = outbox.put(connection, "mail", depends_on=first)
        assert raced
        assert outbox.get(second.id).status == "waiting"
        assert claimant.sweep() == [second.id]


def test_a_mark_before_the_put_looks_and_after(outbox: Outbox, claimant: Claimant) -> None:
    first = put(outbox, "bills")
    (claimed,) = claimant.claim("bills")
    early = put(outbox, "mail", depends_on=first)
    assert early.status == "waiting"
    claimant.done(claimed)
    late = put(outbox, "mail", depends_on=first)
    assert (outbox.get(early.id).status, late.status) == ("ready", "ready")
    assert claimant.sweep() == []


def test_a_slow_caller_holds_up_no_consumer(on_postgres: Outbox, start: Start) -> None:
    """Whatever a caller has put or replaced in a transaction that stays open: outcomes are saved, lanes go on, and
    others are claimed. What had to be left alone for that, a sweep finds when the caller has come to an end.
    """
    outbox, claimant = on_postgres, Claimant(on_postgres)
    first = put(outbox, "bills", key="first")
    dependant = put(outbox, "mail", key="dependant", depends_on=first)
    running = put(outbox, "mail", key="running", lane="l")
    behind = put(outbox, "mail", key="behind", lane="l")
    (billed,) = claimant.claim("bills")
    (claimed,) = claimant.claim("mail")
    assert claimed.id == running.id
    with outbox.begin() as connection:
        outbox.put(connection, "mail", 2, key="dependant", if_exists="replace")
        outbox.put_many(connection, "mail", [2, 3], keys=["new", "behind"], if_exists="replace")
        with pytest.raises(DuplicateJob):
            outbox.put_many(connection, "mail", [2], keys=["running"], if_exists="replace")
        with pytest.raises(DuplicateJob):
            outbox.put(connection, "bills", 2, key="first", if_exists="replace")
        outbox.put(connection, "mail", depends_on=billed.id)
        started = start(lambda: (claimant.renew(billed, claimed), claimant.done(billed, claimed), claimant.sweep()))
        started.join(PATIENCE / 2)
        assert not started.is_alive()
        assert outbox.get(first.id).status == outbox.get(running.id).status == "done"
        assert claimant.ids() == []
    claimant.sweep()
    assert {dependant.id, behind.id} <= set(claimant.ids())


def test_nor_does_one_who_cancels(on_postgres: Outbox, start: Start) -> None:
    outbox, claimant = on_postgres, Claimant(on_postgres)
    first = put(outbox, "bills")
    dependant = put(outbox, "mail", depends_on=first)
    claimed = claimant.claim("bills")
    with outbox.begin() as connection:
        outbox.cancel(dependant.id, connection=connection)
        started = start(claimant.done, *claimed)
        started.join(PATIENCE / 2)
        assert not started.is_alive()
        connection.rollback()
    assert claimant.sweep() == [dependant.id]


# -- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["put", "put_many"])
@pytest.mark.parametrize("if_exists", ["raise", "return", "replace"])
@pytest.mark.parametrize("committed", [True, False], ids=["committed", "rolled back"])
def test_a_key_that_another_transaction_holds(
    outbox: Outbox, engine: sqlalchemy.Engine, start: Start, how: str, if_exists: str, committed: bool
) -> None:
    """The second put waits until the first is decided; and the key is never a unique violation."""
    seen: list[Any] = []
    begun = threading.Event()

    def second() -> None:
        with outbox.begin() as connection:
            connection.exec_driver_sql("SELECT 1")
            begun.set()
            try:
                if how == "put":
                    seen.append(outbox.put(connection, "mail", 2, key="k", if_exists=if_exists))
                else:
                    keys = ["a", "k", None]
                    seen.append(outbox.put_many(connection, "mail", [1, 2, 3], keys=keys, if_exists=if_exists)[1])
            except DuplicateJob as error:
                seen.append(error.job_id)
            outbox.put(connection, "bills", "goes on")

    with outbox.begin() as connection:
        first = outbox.put(connection, "mail", 1, key="k")
        started = start(second)
        assert begun.wait(PATIENCE)
        if engine.dialect.name == "postgresql":
            until(lambda: is_waiting(engine))
        assert seen == []
        if not committed:
            connection.rollback()
    started.join(PATIENCE)
    (found,) = seen
    if not committed:
        assert (found.is_new, found.payload) == (True, 2)
    elif if_exists == "raise":
        assert found == first.id
    else:
        assert (found.id, found.is_new, found.payload) == (first.id, False, 1 if if_exists == "return" else 2)
    assert len(outbox.jobs("bills")) == 1
    assert len(outbox.jobs("mail")) == (1 if how == "put" or found == first.id else 3)


def test_a_batch_that_meets_its_conflict_late_replaces_nothing(on_postgres: Outbox, start: Start) -> None:
    """The key in the way is there only when the batch has begun, and its job can't be replaced."""
    outbox = on_postgres
    there = put(outbox, "mail", "there", key="there")
    seen: list[Any] = []

    def second() -> None:
        with outbox.begin() as connection:
            with pytest.raises(DuplicateJob) as caught:
                outbox.put_many(connection, "mail", [1, 2, 3], keys=["there", "new", "late"], if_exists="replace")
            seen.append(caught.value.job_id)

    with outbox.begin() as connection:
        late = outbox.put(connection, "mail", "late", key="late")
        outbox.cancel(late.id, connection=connection)
        started = start(second)
        until(lambda: is_waiting(engine_of(outbox)))
    started.join(PATIENCE)
    assert seen == [late.id]
    assert outbox.get(there.id) == there
    assert {job.key for job in outbox.jobs()} == {"there", "late"}


@pytest.mark.parametrize("if_exists", ["raise", "return", "replace"])
@pytest.mark.parametrize("how", ["put", "put_many"])
def test_a_key_that_is_freed_between_two_statements(outbox: Outbox, how: str, if_exists: str) -> None:
    """The INSERT met it, and the look at the job that has it finds nothing any more. On SQLite the same transaction
    deletes it, since no other one can.
    """
    there = put(outbox, "mail", "old", key="k")
    first_look = "UPDATE" if if_exists == "replace" and how == "put" else "SELECT"
    with outbox.begin() as connection:
        deleted: list[bool] = []

        def delete(with_: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if statement.startswith(first_look) and not deleted:
                deleted.append(True)
                sql = "DELETE FROM kestrel_jobs WHERE id = "
                if with_.dialect.name == "sqlite":
                    with_.exec_driver_sql(f"{sql}{there.id}")
                else:
                    with outbox.begin() as another:
                        another.exec_driver_sql(f"{sql}{there.id}")

        event.listen(connection, "before_cursor_execute", delete)
        if how == "put":
            jobs = [outbox.put(connection, "mail", 1, key="k", if_exists=if_exists)]
        else:
            jobs = outbox.put_many(connection, "mail", [0, 1, 2], keys=["a", "k", None], if_exists=if_exists)
    assert deleted
    assert all(job.is_new for job in jobs)
    assert outbox.jobs() == jobs
    assert [job.payload for job in jobs] == ([1] if how == "put" else [0, 1, 2])


def test_batches_with_the_same_keys_in_another_order_do_not_lock_each_other_out(on_postgres: Outbox) -> None:
    """Those who replace lock in the order of ids."""
    outbox, keys = on_postgres, ["a", "b"]
    with outbox.begin() as connection:
        outbox.put_many(connection, "mail", [0, 0], keys=keys)
    statements: list[str] = []
    with outbox.begin() as connection:
        event.listen(connection, "before_cursor_execute", lambda *args: statements.append(args[2]))
        outbox.put_many(connection, "mail", [1, 2], keys=["b", "a"], if_exists="replace")
    assert next(sql for sql in statements if "FOR UPDATE" in sql).index("ORDER BY id") > 0


# -- claims ----------------------------------------------------------------------------------------------------------


def claim_within(outbox: Outbox, connection: sqlalchemy.Connection, jobs: int, status: str = "ready") -> Any:
    """A claim whose transaction stays open."""
    wanted = Claim(worker="slow", token=7, lease_ms=30_000, jobs=jobs)
    return outbox.core.open_store().perform(connection, claims.claim, status, [("mail", 1000)], wanted)


@pytest.mark.parametrize("status", ["ready", "error"])
def test_a_claim_passes_what_another_one_is_about_to_take(on_postgres: Outbox, status: str) -> None:
    outbox, claimant = on_postgres, Claimant(on_postgres)
    with outbox.begin() as connection:
        ids = [job.id for job in outbox.put_many(connection, "mail", list(range(10)))]
    if status == "error":
        claimant.fail(*claimant.claim(), seconds=0)
    with outbox.begin() as connection:
        rows = claim_within(outbox, connection, 4, status)
        assert sorted(row[0] for row in rows) == ids[:4]
        assert claimant.ids(jobs=3, status=status) == ids[4:7]
        connection.rollback()
    assert claimant.ids(status=status) == ids[:4] + ids[7:]


def test_a_claim_passes_what_a_caller_replaces_or_cancels(on_postgres: Outbox) -> None:
    outbox, claimant = on_postgres, Claimant(on_postgres)
    with outbox.begin() as connection:
        jobs = outbox.put_many(connection, "mail", [1, 2, 3], keys=["a", "b", "c"])
    with outbox.begin() as connection:
        outbox.put(connection, "mail", "new", key="a", if_exists="replace")
        outbox.cancel(jobs[1].id, connection=connection)
        assert claimant.ids() == [jobs[2].id]
    (claimed,) = claimant.claim()
    assert (claimed.id, claimed.row["payload"]) == (jobs[0].id, '"new"')


def test_of_two_claims_that_overlap_one_takes_the_lane(on_postgres: Outbox, clock: ManualClock, start: Start) -> None:
    """The first takes the second job of a lane, since the first job is not due. Before it commits, that job is due, and
    another claim finds it: neither sees the other, the unique index lets one of them wait, and fail; it sees the other
    when it is run again. Nobody is told of an error.
    """
    outbox, claimant = on_postgres, Claimant(on_postgres)
    early = put(outbox, "mail", lane="l", delay=1)
    late = put(outbox, "mail", lane="l")
    other = put(outbox, "mail")
    taken: list[int] = []
    with outbox.begin() as connection:
        assert [row[0] for row in claim_within(outbox, connection, 1)] == [late.id]
        clock.advance(1)
        started = start(lambda: taken.extend(claimant.ids()))
        until(lambda: is_waiting(engine_of(outbox)))
    started.join(PATIENCE)
    assert taken == [other.id]
    assert {job.id: job.status for job in outbox.jobs()} == {early.id: "ready", late.id: "running", other.id: "running"}
    # and once the lane is free, the one that was early goes on
    (row,) = [row for row in outbox.jobs(status="running") if row.id == late.id]
    assert outbox.core.open_store().perform(None, claims.mark_done, [(row.id, 7)])[0] == {late.id}
    claimant.sweep()
    assert claimant.ids() == [early.id]


@pytest.mark.parametrize("driver", ["psycopg2", "asyncpg", "psycopg async"])
def test_whatever_the_driver(on_postgres: Outbox, clock: ManualClock, start: Start, driver: str) -> None:
    """Each says in its own way that another transaction was in the way."""
    if driver == "psycopg2":
        pytest.importorskip("psycopg2")
    engine = engine_of(on_postgres)
    url = with_driver(engine.url.render_as_string(hide_password=False), driver.split()[0])
    bind = url if driver == "psycopg2" else create_async_engine(url)
    early = put(on_postgres, "mail", lane="l", delay=1)
    put(on_postgres, "mail", lane="l")
    taken: list[int] = []
    with Outbox(bind, clock=clock) as outbox:
        outbox.queue("mail")
        outbox.jobs()
        with on_postgres.begin() as connection:
            claim_within(on_postgres, connection, 1)
            clock.advance(1)
            started = start(lambda: taken.extend(Claimant(outbox).ids()))
            until(lambda: is_waiting(engine))
        started.join(PATIENCE)
    assert taken == []
    assert on_postgres.get(early.id).status == "ready"


def test_and_if_the_first_one_is_rolled_back_the_other_does(
    on_postgres: Outbox, clock: ManualClock, start: Start
) -> None:
    outbox, claimant = on_postgres, Claimant(on_postgres)
    early = put(outbox, "mail", lane="l", delay=1)
    put(outbox, "mail", lane="l")
    taken: list[int] = []
    with outbox.begin() as connection:
        claim_within(outbox, connection, 1)
        clock.advance(1)
        started = start(lambda: taken.extend(claimant.ids()))
        until(lambda: is_waiting(engine_of(outbox)))
        connection.rollback()
    started.join(PATIENCE)
    assert taken == [early.id]


def test_claims_that_wait_for_each_others_lanes(on_postgres: Outbox, clock: ManualClock, start: Start) -> None:
    """A deadlock, by two lanes in two orders. PostgreSQL ends it, and nobody is told of it."""
    outbox = on_postgres
    first, second = put(outbox, "mail", lane="x", delay=1), put(outbox, "bills", lane="y", delay=1)
    put(outbox, "mail", lane="x")
    put(outbox, "bills", lane="y")
    taken: list[int] = []
    store = outbox.core.open_store()

    def both(names: list[str]) -> Any:
        def operation(sql: Any) -> Any:
            found = []
            for name in names:
                wanted = Claim(worker="w", token=9, lease_ms=30_000, jobs=5)
                found += [row[0] for row in (yield from claims.claim(sql, "ready", [(name, 5)], wanted))]
                barrier_once()
            return found

        return operation

    met = threading.Barrier(2)
    rounds: Counter[int] = Counter()

    def barrier_once() -> None:
        """Both have claimed from one queue before either goes on; once a thread."""
        me = threading.get_ident()
        rounds[me] += 1
        if rounds[me] == 1:
            met.wait(PATIENCE)
            clock_once()

    advanced: list[bool] = []

    def clock_once() -> None:
        if not advanced:
            advanced.append(True)
            clock.advance(1)

    threads = [
        start(lambda: taken.extend(store.perform(None, both(["mail", "bills"])))),
        start(lambda: taken.extend(store.perform(None, both(["bills", "mail"])))),
    ]
    for thread in threads:
        thread.join(PATIENCE)
    statuses = Counter((job.queue, job.lane, job.status) for job in outbox.jobs(status="running"))
    assert set(statuses.values()) == {1}
    assert len(statuses) == 2
    assert first.id
    assert second.id


@pytest.mark.parametrize("lanes", [0, 40], ids=["no lanes", "lanes"])
def test_many_claimants_and_no_job_twice(
    make_outbox: Callable[..., Outbox], start: Start, lanes: int, engine: sqlalchemy.Engine
) -> None:
    """A claim never takes more than it asked for, and what it took nobody else takes."""
    outbox = make_outbox(clock=None)
    with outbox.begin() as connection:
        if not lanes:
            jobs = outbox.put_many(connection, "mail", list(range(JOBS)))
        else:
            jobs = [outbox.put(connection, "mail", n, lane=f"l{n % lanes}") for n in range(JOBS // 4)]
    taken: Counter[int] = Counter()
    lock = threading.Lock()
    running: Counter[str] = Counter()
    errors: list[Any] = []

    def consume(number: int) -> None:
        claimant = Claimant(outbox, f"worker {number}")
        while sum(taken.values()) < len(jobs):
            rows, token = claimant.rows(jobs=AT_ONCE)
            claimed = claims.claimed_among(rows)
            if len(rows) > AT_ONCE:
                errors.append(len(rows))
            with lock:
                taken.update(row[0] for row in claimed)
                running.update(row[4] for row in claimed if row[4] is not None)
                errors.extend((lane, count) for lane, count in running.items() if count > 1)
                running.subtract(row[4] for row in claimed if row[4] is not None)
            store = outbox.core.open_store()
            saved = store.perform(None, claims.mark_done, [(row[0], token) for row in claimed]) if claimed else None
            if saved is not None and saved[0] != {row[0] for row in claimed}:
                errors.append(saved)
            freeing = claims.lanes_of(rows) + [("mail", row[4]) for row in claimed if row[4] is not None]
            if freeing:
                store.perform(None, claims.free_lanes, sorted(set(freeing)))
            else:
                Sweep(store).all()

    for thread in [start(consume, number) for number in range(4)]:
        thread.join(4 * PATIENCE)
    assert errors == []
    assert taken == Counter({job.id: 1 for job in jobs})
    assert len(outbox.jobs(status="done", limit=2 * JOBS)) == len(jobs)


# -- SQLite ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["as it comes", "recipe"])
def test_a_claim_on_sqlite_takes_the_lock_before_it_looks(sqlite_url: str, clock: ManualClock, kind: str) -> None:
    """A transaction that has read, and then wants to write after another one has written, fails at once there."""
    engine = sqlalchemy.create_engine(sqlite_url)
    if kind == "recipe":
        follow_the_recipe(engine)
    with engine.connect() as connection:
        connection.connection.dbapi_connection.execute("PRAGMA journal_mode = WAL")  # type: ignore[union-attr]
    with Outbox(engine, clock=clock) as outbox:
        outbox.create_tables()
        outbox.queue("mail")
        job = put(outbox)
        another = sqlalchemy.create_engine(sqlite_url, connect_args={"timeout": 0})
        tried: list[str] = []

        def write(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if statement.startswith("UPDATE") and not tried:
                try:
                    with another.begin() as connection:
                        connection.exec_driver_sql("UPDATE kestrel_jobs SET priority = 1")
                    tried.append("written")
                except sqlalchemy.exc.OperationalError as error:
                    tried.append(str(error.orig))

        event.listen(engine, "before_cursor_execute", write)
        assert Claimant(outbox).ids() == [job.id]
        assert tried == ["database is locked"]
        another.dispose()
    engine.dispose()


def test_looking_waits_for_nobody(outbox: Outbox) -> None:
    job = put(outbox)
    with outbox.begin() as connection:
        outbox.put(connection, "mail", 2)
        assert outbox.jobs() == [outbox.get(job.id)]
        assert outbox.errors() == []
