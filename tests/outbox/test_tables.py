"""The tables: made once however many make them, named as wanted, of a version that is checked, and known to Alembic."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine

from kestrelpy import InvalidName, UnsupportedFormat
from kestrelpy.outbox import DuplicateJob, Outbox, OutboxError
from kestrelpy.outbox.database import check_tables
from kestrelpy.outbox.schema import VERSION
from kestrelpy.testing import ManualClock
from tests.outbox.claimant import Claimant
from tests.outbox.ways import async_engine_of, follow_the_recipe, with_driver

MakeOutbox = Callable[..., Outbox]
AT_ONCE = 8


def names_in(engine: sqlalchemy.Engine, schema: str | None = None) -> set[str]:
    return set(sqlalchemy.inspect(engine).get_table_names(schema=schema))


def use_everything(outbox: Outbox, claimant: Claimant) -> None:
    """Every table and most statements."""
    outbox.queue("mail")
    with outbox.begin() as connection:
        jobs = outbox.put_many(connection, "mail", [1, 2, 3], keys=["a", "b", "c"], lane="l")
        waiting = outbox.put(connection, "mail", 4, depends_on=jobs[0], group="g")
        outbox.put(connection, "mail", 5, key="a", if_exists="replace")
        with pytest.raises(DuplicateJob):
            outbox.put_many(connection, "mail", [6, 7], keys=["d", "a"])
    (first,) = claimant.claim()
    claimant.renew(first)
    claimant.give_back(first)
    (first,) = claimant.claim()
    assert claimant.done(first) == {jobs[0].id}
    second, fourth = sorted(claimant.claim(), key=lambda each: each.id)
    assert (second.id, fourth.id) == (jobs[1].id, waiting.id)
    claimant.fail(second, seconds=0)
    claimant.done(fourth, delete=True)
    assert claimant.ids(status="error") == [jobs[1].id]
    claimant.sweep()
    claimant.lapse()
    assert outbox.find("mail", "b").status == "running"
    assert outbox.cancel(jobs[2].id)
    assert outbox.retry(jobs[2].id)
    assert outbox.retry_all("mail", "done") == 1
    outbox.pause("mail")
    assert claimant.ids() == []
    outbox.resume("mail")
    assert len(outbox.jobs("mail")) == 3
    assert outbox.prune() == 0
    assert outbox.health().healthy
    assert outbox.stats("mail")


# -- made ------------------------------------------------------------------------------------------------------------


def test_all_tables_are_made_and_the_version_is_noted(engine: sqlalchemy.Engine) -> None:
    with Outbox(engine) as outbox:
        outbox.create_tables()
    names = {"kestrel_jobs", "kestrel_jobs_queues", "kestrel_jobs_relays", "kestrel_jobs_version"}
    assert names_in(engine) >= names
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT version FROM kestrel_jobs_version").scalars().all() == [VERSION]


def test_a_second_time_changes_nothing(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox()
    with outbox.begin() as connection:
        job = outbox.put(connection, "mail", 1)
    outbox.create_tables()
    make_outbox().create_tables()
    assert outbox.jobs() == [job]


def test_by_many_threads_at_once(database_url: str, start: Callable[..., threading.Thread]) -> None:
    barrier = threading.Barrier(AT_ONCE)

    def create() -> None:
        with Outbox(database_url) as outbox:
            barrier.wait()
            outbox.create_tables()

    for thread in [start(create) for _ in range(AT_ONCE)]:
        thread.join()
    with Outbox(database_url) as outbox, outbox.begin() as connection:
        versions = connection.exec_driver_sql("SELECT version FROM kestrel_jobs_version").scalars().all()
    assert versions == [VERSION]


def test_by_many_processes_at_once(database_url: str, script: Callable[..., str]) -> None:
    said = script(
        """
        import os, sys
        from kestrelpy.outbox import Outbox
        Outbox(sys.argv[1]).close()  # what is imported late is imported once
        read, write = os.pipe()
        pids = []
        for number in range(int(sys.argv[2])):
            pids.append(os.fork())
            if not pids[-1]:
                os.close(write)
                os.read(read, 1)  # until the parent closes its end
                outbox = Outbox(sys.argv[1])
                outbox.create_tables()
                outbox.queue("mail")
                with outbox.begin() as connection:
                    outbox.put(connection, "mail", number)
                outbox.close()
                os._exit(0)
        os.close(write)
        print([os.waitpid(pid, 0)[1] for pid in pids])
        """,
        database_url,
        AT_ONCE,
    )
    assert said == str([0] * AT_ONCE)
    with Outbox(database_url) as outbox:
        assert sorted(job.payload for job in outbox.jobs()) == list(range(AT_ONCE))


def test_by_a_coroutine(database_url: str) -> None:
    driver = "aiosqlite" if database_url.startswith("sqlite") else "asyncpg"

    async def main() -> None:
        async with async_engine_of(database_url, driver) as engine:
            outboxes = [Outbox(engine) for _ in range(4)]
            await asyncio.gather(*(outbox.acreate_tables() for outbox in outboxes))
            outboxes[0].queue("mail")
            async with outboxes[0].abegin() as connection:
                await outboxes[0].aput(connection, "mail", 1)
            assert len(await outboxes[1].ajobs()) == 1
            for outbox in outboxes:
                await outbox.aclose()

    asyncio.run(main())


def test_nothing_of_it_is_left_if_it_fails(engine: sqlalchemy.Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE kestrel_jobs_version (version integer, surprise integer NOT NULL)")
    with Outbox(engine) as outbox, pytest.raises(sqlalchemy.exc.IntegrityError):
        outbox.create_tables()
    assert "kestrel_jobs" not in names_in(engine)


# -- versions --------------------------------------------------------------------------------------------------------


def set_version(outbox: Outbox, sql: str) -> None:
    with outbox.begin() as connection:
        connection.exec_driver_sql(sql)


def test_a_newer_version_is_refused(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox()
    set_version(outbox, f"UPDATE kestrel_jobs_version SET version = {VERSION + 1}")
    for call in (outbox.create_tables, lambda: asyncio.run(outbox.acreate_tables()), outbox.start):
        with pytest.raises(UnsupportedFormat, match="kestrel_jobs"):
            call()
    with outbox.begin() as connection:
        found = connection.exec_driver_sql("SELECT version FROM kestrel_jobs_version").scalars().all()
    assert found == [VERSION + 1]


def test_a_version_that_was_lost_is_noted_again(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox()
    set_version(outbox, "DELETE FROM kestrel_jobs_version")
    outbox.start()  # as after a migration by Alembic, which makes tables and no rows
    outbox.stop()
    assert versions(outbox) == [1]
    set_version(outbox, "DELETE FROM kestrel_jobs_version")
    outbox.create_tables()
    outbox.create_tables()
    assert versions(outbox) == [1]


def versions(outbox: Outbox) -> list[int]:
    with outbox.begin() as connection:
        return list(connection.exec_driver_sql("SELECT version FROM kestrel_jobs_version").scalars())


def test_nothing_starts_without_tables(engine: sqlalchemy.Engine) -> None:
    with Outbox(engine) as outbox:
        with pytest.raises(OutboxError, match=r"no table 'kestrel_jobs_version': call create_tables\(\) first"):
            outbox.start()
        assert names_in(engine) == set()


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "1a", "a-b", "a b", 'a"b', "ü", "a" * 42, "a.b", "a\n", None, 7])
def test_no_names(name: Any) -> None:
    with pytest.raises(InvalidName, match="table must be 1 to 41 characters"):
        Outbox(table=name)
    if name is not None:
        with pytest.raises(InvalidName, match="schema must be"):
            Outbox(schema=name)


@pytest.mark.parametrize("name", ["t", "_", "order", "Jobs", "select", "values", "a" * 41])
def test_names(make_outbox: MakeOutbox, engine: sqlalchemy.Engine, name: str) -> None:
    outbox = make_outbox(table=name)
    assert name in names_in(engine)
    use_everything(outbox, Claimant(outbox))


def test_the_longest_names_differ(make_outbox: MakeOutbox, engine: sqlalchemy.Engine) -> None:
    """PostgreSQL cuts names of more than 63 bytes off."""
    first, second = make_outbox(table="a" * 40 + "x"), make_outbox(table="a" * 40 + "y")
    use_everything(first, Claimant(first))
    assert second.jobs() == []
    indexes = {index["name"] for index in sqlalchemy.inspect(engine).get_indexes("a" * 40 + "x")}
    assert len(indexes) == len(first.core.tables.jobs.indexes)


def test_two_outboxes_of_one_database_know_nothing_of_each_other(make_outbox: MakeOutbox) -> None:
    one, other = make_outbox(), make_outbox(table="others")
    with one.begin() as connection:
        one.put(connection, "mail", 1, key="k")
        other.put(connection, "mail", 2, key="k")
    one.pause("mail")
    assert Claimant(one).ids() == []
    assert [each.row["payload"] for each in Claimant(other).claim()] == ["2"]
    assert [job.status for job in one.jobs()] == ["ready"]


def test_one_transaction_puts_into_several_tables(make_outbox: MakeOutbox) -> None:
    outboxes = [make_outbox(table=name) for name in ("a", "b")]
    with outboxes[0].begin() as connection:
        for outbox in outboxes:
            outbox.put(connection, "mail", outbox.core.table)
        connection.rollback()
    assert [outbox.jobs() for outbox in outboxes] == [[], []]


@pytest.fixture(params=["postgresql", "sqlite"])
def with_schema(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[sqlalchemy.Engine]:
    """An engine with a schema ``other``."""
    if request.param == "postgresql":
        engine = sqlalchemy.create_engine(request.getfixturevalue("postgres_url"))
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE SCHEMA other")
    else:
        engine = sqlalchemy.create_engine(request.getfixturevalue("sqlite_url"))

        @event.listens_for(engine, "connect")
        def attach(connection: Any, _record: object) -> None:
            connection.execute(f"ATTACH DATABASE '{tmp_path / 'other.db'}' AS other")

    yield engine
    engine.dispose()


def test_a_schema(with_schema: sqlalchemy.Engine, clock: ManualClock) -> None:
    with Outbox(with_schema, schema="other", clock=clock) as outbox, Outbox(with_schema, clock=clock) as usual:
        with pytest.raises(OutboxError, match=r"no table 'other\.kestrel_jobs_version'"):
            outbox.start()
        usual.create_tables()
        outbox.create_tables()
        outbox.create_tables()
        assert "kestrel_jobs" in names_in(with_schema, "other")
        use_everything(outbox, Claimant(outbox))
        assert usual.jobs() == []
        assert outbox.metadata.schema == "other"
        set_version(outbox, f"UPDATE other.kestrel_jobs_version SET version = {VERSION + 1}")
        with pytest.raises(UnsupportedFormat, match=r"other\.kestrel_jobs"):
            outbox.create_tables()
        usual.create_tables()


# -- Alembic ---------------------------------------------------------------------------------------------------------


def differences(engine: sqlalchemy.Engine, outbox: Outbox, schema: str | None = None) -> list[Any]:
    options: dict[str, Any] = {
        "compare_type": True,
        "compare_server_default": True,
        "include_schemas": schema is not None,
        "include_name": lambda name, kind, parents: kind != "schema" or name == schema,
    }
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts=options)
        return list(compare_metadata(context, outbox.metadata))


def test_alembic_finds_nothing_to_do(engine: sqlalchemy.Engine) -> None:
    with Outbox(engine) as outbox:
        assert len(differences(engine, outbox)) > 4
        outbox.create_tables()
        assert differences(engine, outbox) == []


def test_alembic_finds_nothing_to_do_in_a_schema(with_schema: sqlalchemy.Engine) -> None:
    with Outbox(with_schema, schema="other", table="Order") as outbox:
        outbox.create_tables()
        assert differences(with_schema, outbox, "other") == []


def test_what_alembic_makes_is_what_create_tables_makes(make_outbox: MakeOutbox, engine: sqlalchemy.Engine) -> None:
    """A migration makes the tables; the version is noted by ``create_tables`` then, which finds all the others."""
    with Outbox() as outbox:
        outbox.metadata.create_all(engine)
    outbox = make_outbox()
    assert differences(engine, outbox) == []
    use_everything(outbox, Claimant(outbox))


def test_the_metadata_can_join_another_one(engine: sqlalchemy.Engine) -> None:
    """As ``target_metadata`` of an application that has tables of its own."""
    with Outbox() as outbox:
        assert set(outbox.metadata.tables) == {f"kestrel_jobs{end}" for end in ("", "_queues", "_relays", "_version")}
        application = sqlalchemy.MetaData()
        sqlalchemy.Table("orders", application, sqlalchemy.Column("number", sqlalchemy.Integer, primary_key=True))
        for table in outbox.metadata.tables.values():
            table.to_metadata(application)
        application.create_all(engine)
        outbox.bind(engine)
        outbox.create_tables()
        assert "orders" in names_in(engine)
        with engine.begin() as connection:
            connection.exec_driver_sql("DROP TABLE orders")
        assert differences(engine, outbox) == []


# -- engines of other kinds ------------------------------------------------------------------------------------------


ODD = [
    ("postgresql", "AUTOCOMMIT"),
    ("postgresql", "REPEATABLE READ"),
    ("postgresql", "SERIALIZABLE"),
    ("sqlite", "AUTOCOMMIT"),
    ("sqlite", "SERIALIZABLE"),
    ("sqlite", "recipe"),
]


@pytest.fixture(params=ODD, ids=" ".join)
def odd_engine(request: pytest.FixtureRequest) -> Iterator[sqlalchemy.Engine]:
    """Whose transactions are not as they come."""
    database, kind = request.param
    url = request.getfixturevalue("postgres_url" if database == "postgresql" else "sqlite_url")
    engine = sqlalchemy.create_engine(url, **({} if kind == "recipe" else {"isolation_level": kind}))
    if kind == "recipe":
        follow_the_recipe(engine)
    yield engine
    engine.dispose()


def test_its_own_transactions_are_whole_on_any_engine(odd_engine: sqlalchemy.Engine, clock: ManualClock) -> None:
    with Outbox(odd_engine, clock=clock) as outbox:
        outbox.create_tables()
        use_everything(outbox, Claimant(outbox))


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize("is_running", [False, True])
def test_nor_does_an_async_engine_commit_each_statement(postgres_url: str, driver: str, is_running: bool) -> None:
    """Also on the second transaction of a loop, and of the running outbox's own connections."""
    url = sqlalchemy.make_url(postgres_url).set(drivername=f"postgresql+{driver}")
    outbox = Outbox(create_async_engine(url, isolation_level="AUTOCOMMIT"))
    database = outbox.core.open_store().database  # type: ignore[attr-defined]
    if is_running:
        database = database.beside()

    def work(connection: sqlalchemy.Connection) -> None:
        connection.exec_driver_sql("DELETE FROM kestrel_jobs_version")
        raise LookupError

    outbox.create_tables()
    for _ in range(3):
        with pytest.raises(LookupError):
            database.transact(work)
        assert database.transact(lambda connection: check_tables(connection, outbox.core.compilers.tables))
    database.close()
    outbox.close()


def test_and_taken_back_whole(odd_engine: sqlalchemy.Engine, clock: ManualClock) -> None:
    with Outbox(odd_engine, clock=clock) as outbox:
        outbox.create_tables()
        database = outbox.core.open_store().database  # type: ignore[attr-defined]

        def work(connection: sqlalchemy.Connection) -> None:
            connection.exec_driver_sql("DELETE FROM kestrel_jobs_version")
            raise LookupError

        with pytest.raises(LookupError):
            database.transact(work)
        outbox.start()
        outbox.stop()


@pytest.mark.parametrize("driver", ["psycopg2", "psycopg"])
def test_the_drivers_of_postgresql(postgres_url: str, clock: ManualClock, driver: str) -> None:
    if driver == "psycopg2":
        pytest.importorskip("psycopg2")
    with Outbox(with_driver(postgres_url, driver), clock=clock) as outbox:
        outbox.create_tables()
        use_everything(outbox, Claimant(outbox))


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_the_async_drivers_of_postgresql(postgres_url: str, clock: ManualClock, driver: str) -> None:
    """From a thread, on the loop that the outbox has for that. The puts are those of another, sync, engine."""

    async def main() -> None:
        async with async_engine_of(postgres_url, driver) as engine:
            with Outbox(engine, clock=clock) as outbox:
                await asyncio.to_thread(all_of_it, outbox)

    def all_of_it(outbox: Outbox) -> None:
        outbox.create_tables()
        with Outbox(postgres_url, clock=clock) as for_puts:
            outbox.begin = for_puts.begin  # type: ignore[method-assign]
            use_everything(outbox, Claimant(outbox))

    asyncio.run(main())
