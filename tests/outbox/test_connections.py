"""Everything that a put takes as its connection: the job is in the caller's transaction, and the caller ends it."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import aiosqlite
import asyncpg
import psycopg
import pytest
import sqlalchemy
from sqlalchemy import event, orm
from sqlalchemy.ext import asyncio as sa_asyncio

from kestrelpy.outbox import (
    DuplicateJob,
    NotInTransaction,
    Outbox,
    OutboxError,
    UnknownDependency,
    UnsupportedDatabase,
)
from kestrelpy.testing import ManualClock
from tests.outbox import ways
from tests.outbox.ways import ASYNC_WAYS, TABLE, WAYS, AsyncWay, Held, Way

COUNT = "SELECT count(*) FROM orders"


class Bytes:
    """A codec that gives bytes."""

    def encode(self, value: Any) -> bytes:
        return bytes(value)

    def decode(self, data: bytes) -> bytes:
        return data


def open_outbox(url: str, clock: ManualClock) -> Outbox:
    """With tables, of its own and of its user."""
    outbox = Outbox(url, clock=clock)
    outbox.create_tables()
    outbox.queue("mail")
    outbox.queue("blobs", codec=Bytes())
    with outbox.begin() as connection:
        connection.exec_driver_sql(TABLE)
    return outbox


def orders(outbox: Outbox) -> int:
    with outbox.begin() as connection:
        return int(connection.exec_driver_sql(COUNT).scalar_one())


def url_of(database: str, request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("postgres_url" if database == "postgresql" else "sqlite_url"))


def ids(name: object) -> str:
    return str(name).replace("_", " ")


@pytest.fixture(params=WAYS, ids=ids)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.fixture
def url(way: Way, request: pytest.FixtureRequest) -> str:
    return url_of(way.database, request)


@pytest.fixture
def outbox(url: str, clock: ManualClock) -> Iterator[Outbox]:
    with open_outbox(url, clock) as made:
        yield made


# -- connections -----------------------------------------------------------------------------------------------------


def test_a_job_and_the_callers_data_are_committed_together(way: Way, url: str, outbox: Outbox) -> None:
    with way.open(url) as held:
        job = outbox.put(held.connection, "mail", {"to": "ä"}, key="k", group="g", lane="l", priority=3, delay=1.5)
        held.execute("INSERT INTO orders VALUES (1)")
        with ways.connected(url) as another:
            assert another.exec_driver_sql("SELECT count(*) FROM kestrel_jobs").scalar() == 0
        held.commit()
    assert outbox.get(job.id) == job
    assert (job.payload, job.is_new, job.tries, job.status) == ({"to": "ä"}, True, 0, "ready")
    assert orders(outbox) == 1


def test_neither_is_there_after_a_rollback(way: Way, url: str, outbox: Outbox) -> None:
    with way.open(url) as held:
        held.execute("INSERT INTO orders VALUES (1)")
        outbox.put(held.connection, "mail", 1)
        outbox.put_many(held.connection, "mail", [2, 3])
        held.rollback()
    assert (outbox.jobs(), orders(outbox)) == ([], 0)


def test_nor_if_nobody_commits(way: Way, url: str, outbox: Outbox) -> None:
    with way.open(url) as held:
        held.execute("INSERT INTO orders VALUES (1)")
        outbox.put_many(held.connection, "mail", [1, 2], keys=["a", "b"])
    assert (outbox.jobs(), orders(outbox)) == ([], 0)


def test_a_job_goes_with_its_savepoint(way: Way, url: str, outbox: Outbox) -> None:
    with way.open(url) as held:
        held.execute("INSERT INTO orders VALUES (1)")
        held.execute("SAVEPOINT first")
        outbox.put(held.connection, "mail", "taken back", key="k")
        held.execute("ROLLBACK TO SAVEPOINT first")
        outbox.put(held.connection, "mail", "kept", key="k")
        held.execute("RELEASE SAVEPOINT first")
        held.commit()
    assert [job.payload for job in outbox.jobs()] == ["kept"]


def test_the_transaction_goes_on_after_each_refusal(way: Way, url: str, outbox: Outbox) -> None:
    with way.open(url) as held:
        first = outbox.put(held.connection, "mail", 1, key="k")
        with pytest.raises(DuplicateJob) as caught:
            outbox.put(held.connection, "mail", 2, key="k")
        assert (caught.value.job_id, caught.value.queue, caught.value.key) == (first.id, "mail", "k")
        with pytest.raises(DuplicateJob):
            outbox.put_many(held.connection, "mail", [2, 3, 4], keys=["a", "k", None])
        with pytest.raises(DuplicateJob):
            outbox.put_many(held.connection, "blobs", [b"1", b"2"], keys=["a", "k"]) and outbox.put_many(
                held.connection, "blobs", [b"1", b"2"], keys=["b", "k"]
            )
        with pytest.raises(UnknownDependency):
            outbox.put(held.connection, "mail", 2, depends_on=first.id + 1000)
        held.execute("INSERT INTO orders VALUES (1)")
        held.commit()
    assert [job.payload for job in outbox.jobs("mail")] == [1]
    assert [job.payload for job in outbox.jobs("blobs")] == [b"1", b"2"]
    assert orders(outbox) == 1


def test_many_are_put_in_order(way: Way, url: str, outbox: Outbox) -> None:
    with way.open(url) as held:
        keys = [f"ü{number}" if number % 3 else None for number in range(50)]
        jobs = outbox.put_many(held.connection, "mail", [[number] for number in range(50)], keys=keys)
        blobs = outbox.put_many(held.connection, "blobs", [b"\0\xff", b""])
        held.commit()
    assert outbox.jobs("mail") == jobs
    assert [(job.payload, job.key) for job in jobs] == [([number], keys[number]) for number in range(50)]
    assert [job.payload for job in outbox.jobs("blobs")] == [job.payload for job in blobs] == [b"\0\xff", b""]


def test_looking_and_mending_are_in_the_transaction_too(way: Way, url: str, outbox: Outbox) -> None:
    with way.open(url) as held:
        at = {"connection": held.connection}
        job, other = outbox.put_many(held.connection, "mail", [1, 2], keys=["a", "b"], group="g")
        assert outbox.get(job.id, **at) == outbox.find("mail", "a", **at) == job
        assert outbox.jobs("mail", status="ready", group="g", **at) == [job, other]
        assert outbox.cancel(job.id, **at)
        assert outbox.retry_all("mail", "cancelled", **at) == 1
        assert outbox.cancel(job.id, **at)
        assert outbox.retry(job.id, **at)
        assert outbox.put(held.connection, "mail", 3, key="b", if_exists="replace").payload == 3
        assert outbox.cancel(other.id, **at)
        outbox.pause("mail", **at)
        outbox.resume("mail", **at)
        assert outbox.errors(**at) == []
        assert outbox.prune(**at) == 0
        held.rollback()
    assert outbox.jobs() == []


# -- sessions, and other engines -------------------------------------------------------------------------------------


class Base(orm.DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    number: orm.Mapped[int] = orm.mapped_column(primary_key=True)


@pytest.fixture
def on_both(database_url: str, clock: ManualClock) -> Iterator[Outbox]:
    with open_outbox(database_url, clock) as made:
        yield made


def engine_of(outbox: Outbox) -> sqlalchemy.Engine:
    with outbox.begin() as connection:
        engine: sqlalchemy.Engine = connection.engine
        return engine


@pytest.mark.parametrize("kind", ["session", "scoped", "not autoflushing"])
def test_pending_objects_of_a_session_are_flushed_first(on_both: Outbox, kind: str) -> None:
    engine = engine_of(on_both)
    maker = orm.sessionmaker(engine, autoflush=kind != "not autoflushing")
    session: Any = orm.scoped_session(maker) if kind == "scoped" else maker()
    flushed: list[int] = []
    session.add(Order(number=1))
    event.listen(engine, "before_cursor_execute", lambda *args: flushed.append("INTO orders" in args[2]))
    on_both.put(session, "mail", 1)
    session.commit()
    session.close()
    assert flushed[0]
    assert orders(on_both) == 1


def test_what_a_session_can_not_flush_is_its_own_error(on_both: Outbox) -> None:
    with orm.Session(engine_of(on_both)) as session:
        session.add_all([Order(number=1)])
        session.commit()
        session.expunge_all()
        session.add(Order(number=1))
        with pytest.raises(sqlalchemy.exc.IntegrityError):
            on_both.put(session, "mail", 1)
    assert on_both.jobs() == []


def test_a_nested_transaction_of_a_session(on_both: Outbox) -> None:
    with orm.Session(engine_of(on_both)) as session, session.begin():
        on_both.put(session, "mail", "kept")
        with contextlib.suppress(LookupError), session.begin_nested():
            on_both.put(session, "mail", "taken back")
            raise LookupError
    assert [job.payload for job in on_both.jobs()] == ["kept"]


def test_a_nested_transaction_of_a_connection(on_both: Outbox) -> None:
    with on_both.begin() as connection:
        with contextlib.suppress(LookupError), connection.begin_nested():
            on_both.put(connection, "mail", "taken back")
            raise LookupError
        with connection.begin_nested():
            on_both.put(connection, "mail", "kept")
    assert [job.payload for job in on_both.jobs()] == ["kept"]


def test_a_transaction_that_begins_with_a_savepoint(on_both: Outbox) -> None:
    """To SQLite a savepoint without a transaction is one, which ends with it."""
    with on_both.begin() as connection:
        with connection.begin_nested():
            on_both.put(connection, "mail", 1)
        connection.rollback()
    assert on_both.jobs() == []


def test_a_nested_transaction_of_psycopg(postgres_url: str, clock: ManualClock) -> None:
    with open_outbox(postgres_url, clock) as outbox:
        with psycopg.connect(ways.conninfo(postgres_url)) as connection, connection.transaction():
            with connection.transaction(force_rollback=True):
                outbox.put(connection, "mail", "taken back")
            outbox.put(connection, "mail", "kept")
        assert [job.payload for job in outbox.jobs()] == ["kept"]


def test_a_pipeline_of_psycopg(postgres_url: str, clock: ManualClock) -> None:
    with open_outbox(postgres_url, clock) as outbox:
        with psycopg.connect(ways.conninfo(postgres_url)) as connection, connection.pipeline():
            connection.execute("INSERT INTO orders VALUES (1)")
            assert outbox.put(connection, "mail", 1).payload == 1
        assert (len(outbox.jobs()), orders(outbox)) == (1, 1)


def test_a_put_lands_in_the_database_of_its_connection(postgres_url: str, sqlite_url: str, clock: ManualClock) -> None:
    with open_outbox(postgres_url, clock) as one, open_outbox(sqlite_url, clock) as other:
        with other.begin() as connection:
            job = one.put(connection, "mail", "in SQLite")
        with one.begin() as connection:
            other.put_many(connection, "mail", ["in", "PostgreSQL"])
        assert [each.payload for each in one.jobs()] == ["in", "PostgreSQL"]
        assert other.jobs() == [job]
        with other.begin() as connection:
            assert one.jobs(connection=connection) == [job]


def test_an_engine_of_another_kind_is_refused(clock: ManualClock) -> None:
    engine = sqlalchemy.create_mock_engine("mysql://", lambda *_: None)
    with pytest.raises(UnsupportedDatabase, match="mysql"):
        Outbox(clock=clock).core.compilers.of(engine.dialect)


# -- refused ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    yield None


@contextlib.contextmanager
def autocommit_psycopg(url: str) -> Iterator[Any]:
    with psycopg.connect(ways.conninfo(url), autocommit=True) as connection:
        yield connection


@contextlib.contextmanager
def autocommit_by_option(url: str) -> Iterator[Any]:
    with ways.connected(url) as connection:
        yield connection.execution_options(isolation_level="AUTOCOMMIT")


@contextlib.contextmanager
def begun_autocommit(url: str) -> Iterator[Any]:
    """SQLAlchemy's ``begin`` begins nothing there."""
    with ways.connected(url, isolation_level="AUTOCOMMIT") as connection, connection.begin():
        yield connection


@contextlib.contextmanager
def autocommit_session(url: str) -> Iterator[Any]:
    with ways.engine_of(url, isolation_level="AUTOCOMMIT") as engine, orm.Session(engine) as session:
        yield session


@contextlib.contextmanager
def with_a_driver_that_begins_nothing(url: str) -> Iterator[Any]:
    """Half of the recipe: nobody begins anything."""
    with ways.engine_of(url) as engine:

        @event.listens_for(engine, "connect")
        def connect(connection: Any, _record: object) -> None:
            connection.isolation_level = None

        with engine.connect() as connection:
            yield connection


COMMITS_EACH: dict[str, tuple[str, Callable[[str], contextlib.AbstractContextManager[Any]]]] = {
    "psycopg": ("postgresql", autocommit_psycopg),
    "sqlalchemy on psycopg": (
        "postgresql",
        lambda url: ways.connected(url, isolation_level="AUTOCOMMIT"),
    ),
    "sqlalchemy on psycopg2": (
        "postgresql",
        lambda url: ways.connected(url, "psycopg2", isolation_level="AUTOCOMMIT"),
    ),
    "sqlalchemy on sqlite3": ("sqlite", lambda url: ways.connected(url, isolation_level="AUTOCOMMIT")),
    "by an option, psycopg": ("postgresql", autocommit_by_option),
    "by an option, sqlite3": ("sqlite", autocommit_by_option),
    "begun, psycopg": ("postgresql", begun_autocommit),
    "begun, sqlite3": ("sqlite", begun_autocommit),
    "session on psycopg": ("postgresql", autocommit_session),
    "session on sqlite3": ("sqlite", autocommit_session),
    "half of the recipe": ("sqlite", with_a_driver_that_begins_nothing),
    "sqlite3": ("sqlite", lambda url: ways.sqlite(url, isolation_level=None)),
    "sqlite3 of Python 3.12": ("sqlite", lambda url: ways.pep249(url, autocommit=True)),
}


@pytest.mark.parametrize("kind", COMMITS_EACH)
def test_a_connection_that_commits_each_statement_is_refused(
    kind: str, request: pytest.FixtureRequest, clock: ManualClock
) -> None:
    database, opened = COMMITS_EACH[kind]
    if "psycopg2" in kind:
        pytest.importorskip("psycopg2")
    url = url_of(database, request)
    with open_outbox(url, clock) as outbox:
        with opened(url) as connection:
            for call in (
                lambda: outbox.put(connection, "mail", 1),
                lambda: outbox.put_many(connection, "mail", [1]),
                lambda: outbox.pause("mail", connection=connection),
            ):
                with pytest.raises(NotInTransaction, match="begin a transaction") as caught:
                    call()
                assert type(connection).__qualname__ in caught.value.connection or "ession" in kind
        assert outbox.jobs() == []


def test_a_refused_connection_can_still_begin(sqlite_url: str, clock: ManualClock) -> None:
    with open_outbox(sqlite_url, clock) as outbox, with_a_driver_that_begins_nothing(sqlite_url) as connection:
        with pytest.raises(NotInTransaction):
            outbox.put(connection, "mail", 1)
        with connection.begin():
            connection.exec_driver_sql("BEGIN")
            outbox.put(connection, "mail", 2)
        assert [job.payload for job in outbox.jobs()] == [2]


@pytest.mark.parametrize("pool", ["StaticPool", "SingletonThreadPool"])
def test_a_call_that_would_end_the_callers_transaction_is_refused(clock: ManualClock, pool: str) -> None:
    """The engine has one connection, which the caller uses: the outbox can have no transaction of its own beside it."""
    engine = sqlalchemy.create_engine("sqlite://", poolclass=getattr(sqlalchemy.pool, pool))
    with Outbox(engine, clock=clock) as outbox:
        outbox.create_tables()
        outbox.queue("mail")
        with engine.begin() as connection:
            job = outbox.put(connection, "mail", 1)
            for call in (
                outbox.create_tables,
                outbox.begin().__enter__,
                outbox.prune,
                lambda: outbox.pause("mail"),
                lambda: outbox.get(job.id),
                outbox.stats,
            ):
                with pytest.raises(OutboxError, match="one connection, which is in a transaction of yours"):
                    call()
            assert outbox.get(job.id, connection=connection) == job
        assert outbox.get(job.id) == job
    engine.dispose()


def test_what_is_no_connection_is_a_type_error(on_both: Outbox, database_url: str) -> None:
    engine = engine_of(on_both)
    with engine.connect() as connection:
        cursor = connection.connection.cursor()
        wrong = [engine, cursor, connection.connection.dbapi_connection.cursor(), "a URL", object(), database_url]  # type: ignore[union-attr]
        for each in wrong:
            with pytest.raises(TypeError, match="put takes a Connection or Session of SQLAlchemy"):
                on_both.put(each, "mail", 1)
        with pytest.raises(TypeError, match=r"outbox\.begin\(\)"):
            on_both.put(None, "mail", 1)
        with pytest.raises(TypeError, match=r"outbox\.begin\(\)"):
            on_both.put_many(None, "mail", [])
        with pytest.raises(TypeError, match="put takes a Connection or Session"):
            on_both.get(1, connection=engine)
        cursor.close()
    assert on_both.jobs() == []


def test_a_connection_of_psycopg2_itself_is_a_type_error(postgres_url: str, clock: ManualClock) -> None:
    psycopg2 = pytest.importorskip("psycopg2")
    with open_outbox(postgres_url, clock) as outbox:
        connection = psycopg2.connect(ways.conninfo(postgres_url))
        with pytest.raises(TypeError, match=r"not psycopg2\.extensions\.connection"):
            outbox.put(connection, "mail", 1)
        connection.close()


@pytest.mark.parametrize("name", ["sqlite3 as it comes", "sqlalchemy on psycopg", "psycopg as it comes"])
def test_an_async_put_takes_no_other_connection(name: str, request: pytest.FixtureRequest, clock: ManualClock) -> None:
    way = {ids(key): value for key, value in WAYS.items()}[name]
    url = url_of(way.database, request)
    with open_outbox(url, clock) as outbox, way.open(url) as held:
        with pytest.raises(TypeError, match=r"aput takes an AsyncConnection .*use put"):
            asyncio.run(outbox.aput(held.connection, "mail", 1))
        with pytest.raises(TypeError, match=r"outbox\.abegin\(\)"):
            asyncio.run(outbox.aput(None, "mail", 1))
        with pytest.raises(TypeError):
            asyncio.run(outbox.aput_many(object(), "mail", [1]))


def test_nothing_is_imported_for_a_connection_of_another_kind(sqlite_url: str) -> None:
    program = f"""
import sqlite3, sys
from kestrelpy.outbox import Outbox
outbox = Outbox({sqlite_url!r})
outbox.create_tables()
outbox.queue("mail")
connection = sqlite3.connect({sqlalchemy.make_url(sqlite_url).database!r})
outbox.put(connection, "mail", 1)
connection.commit()
print(sorted({{"psycopg", "psycopg2", "asyncpg", "aiosqlite", "sqlalchemy.orm", "tenacity"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- asyncio ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=ASYNC_WAYS, ids=ids)
def async_way(request: pytest.FixtureRequest) -> AsyncWay:
    return ASYNC_WAYS[request.param]


@pytest.fixture
def async_url(async_way: AsyncWay, request: pytest.FixtureRequest) -> str:
    return url_of(async_way.database, request)


@pytest.fixture
def other_outbox(async_url: str, clock: ManualClock) -> Iterator[Outbox]:
    """That of another process, on a sync engine."""
    with open_outbox(async_url, clock) as made:
        yield made


def held_by(way: AsyncWay, url: str, work: Callable[[Held], Any]) -> Any:
    async def main() -> Any:
        async with way.open(url) as held:
            return await work(held)

    return asyncio.run(main())


def test_async_together(async_way: AsyncWay, async_url: str, other_outbox: Outbox) -> None:
    async def work(held: Held) -> Any:
        job = await other_outbox.aput(held.connection, "mail", {"to": "ä"}, key="k", lane="l", priority=3, delay=1.5)
        await held.execute("INSERT INTO orders VALUES (1)")
        assert await asyncio.to_thread(other_outbox.jobs) == []
        await held.commit()
        return job

    job = held_by(async_way, async_url, work)
    assert other_outbox.get(job.id) == job
    assert orders(other_outbox) == 1


def test_async_rollback(async_way: AsyncWay, async_url: str, other_outbox: Outbox) -> None:
    async def work(held: Held) -> None:
        await held.execute("INSERT INTO orders VALUES (1)")
        await other_outbox.aput(held.connection, "mail", 1)
        await other_outbox.aput_many(held.connection, "mail", [2, 3])
        await held.rollback()

    held_by(async_way, async_url, work)
    assert (other_outbox.jobs(), orders(other_outbox)) == ([], 0)


def test_async_savepoint(async_way: AsyncWay, async_url: str, other_outbox: Outbox) -> None:
    async def work(held: Held) -> None:
        await held.execute("INSERT INTO orders VALUES (1)")
        await held.execute("SAVEPOINT first")
        await other_outbox.aput(held.connection, "mail", "taken back", key="k")
        await held.execute("ROLLBACK TO SAVEPOINT first")
        await other_outbox.aput(held.connection, "mail", "kept", key="k")
        await held.commit()

    held_by(async_way, async_url, work)
    assert [job.payload for job in other_outbox.jobs()] == ["kept"]


def test_async_refusals(async_way: AsyncWay, async_url: str, other_outbox: Outbox) -> None:
    async def work(held: Held) -> None:
        at = {"connection": held.connection}
        first = await other_outbox.aput(held.connection, "mail", 1, key="k")
        with pytest.raises(DuplicateJob):
            await other_outbox.aput(held.connection, "mail", 2, key="k")
        with pytest.raises(DuplicateJob):
            await other_outbox.aput_many(held.connection, "mail", [2, 3, 4], keys=["a", "k", None])
        with pytest.raises(UnknownDependency):
            await other_outbox.aput(held.connection, "mail", 2, depends_on=first.id + 1000)
        blobs = await other_outbox.aput_many(held.connection, "blobs", [b"\0\xff", b""], keys=["a", None])
        assert await other_outbox.ajobs("blobs", **at) == blobs
        assert await other_outbox.aget(first.id, **at) == await other_outbox.afind("mail", "k", **at) == first
        assert await other_outbox.acancel(first.id, **at)
        assert await other_outbox.aretry(first.id, **at)
        assert await other_outbox.aretry_all("mail", "cancelled", **at) == 0
        await other_outbox.apause("mail", **at)
        await other_outbox.aresume("mail", **at)
        assert await other_outbox.aprune(**at) == 0
        assert await other_outbox.aerrors(**at) == []
        await held.commit()

    held_by(async_way, async_url, work)
    assert [job.payload for job in other_outbox.jobs()] == [1, b"\0\xff", b""]


ASYNC_DRIVERS = [("sqlite", "aiosqlite"), ("postgresql", "asyncpg"), ("postgresql", "psycopg")]


@pytest.mark.parametrize(("database", "driver"), ASYNC_DRIVERS)
def test_async_connections_that_commit_each_statement_are_refused(
    database: str, driver: str, request: pytest.FixtureRequest, clock: ManualClock
) -> None:
    url = url_of(database, request)

    async def main(outbox: Outbox) -> None:
        async with ways.async_connected(url, driver, isolation_level="AUTOCOMMIT") as connection:
            with pytest.raises(NotInTransaction):
                await outbox.aput(connection, "mail", 1)
            async with connection.begin():
                with pytest.raises(NotInTransaction):
                    await outbox.aput_many(connection, "mail", [1])
        async with (
            ways.async_engine_of(url, driver) as engine,
            sa_asyncio.AsyncSession(engine.execution_options(isolation_level="AUTOCOMMIT")) as session,
        ):
            with pytest.raises(NotInTransaction):
                await outbox.aput(session, "mail", 1)
        if driver == "psycopg":
            async with await psycopg.AsyncConnection.connect(ways.conninfo(url), autocommit=True) as plain:
                with pytest.raises(NotInTransaction):
                    await outbox.aput(plain, "mail", 1)

    with open_outbox(url, clock) as outbox:
        asyncio.run(main(outbox))
        assert outbox.jobs() == []


@pytest.mark.parametrize(("database", "driver"), ASYNC_DRIVERS)
def test_pending_objects_of_an_async_session_are_flushed_first(
    database: str, driver: str, request: pytest.FixtureRequest, clock: ManualClock
) -> None:
    url = url_of(database, request)
    flushed: list[bool] = []

    async def main(outbox: Outbox) -> None:
        async with ways.async_engine_of(url, driver) as engine, sa_asyncio.AsyncSession(engine) as session:
            session.add(Order(number=1))
            listen = event.listen
            listen(engine.sync_engine, "before_cursor_execute", lambda *args: flushed.append("INTO orders" in args[2]))
            await outbox.aput(session, "mail", 1)
            await session.commit()

    with open_outbox(url, clock) as outbox:
        asyncio.run(main(outbox))
        assert flushed[0]
        assert orders(outbox) == 1


@pytest.mark.parametrize(("database", "driver"), ASYNC_DRIVERS)
def test_an_async_connection_is_one_within_run_sync(
    database: str, driver: str, request: pytest.FixtureRequest, clock: ManualClock
) -> None:
    """Code that is shared with sync callers gets a ``Connection`` or a ``Session`` there."""
    url = url_of(database, request)

    async def main(outbox: Outbox) -> None:
        async with ways.async_engine_of(url, driver) as engine:
            async with engine.begin() as connection:
                await connection.run_sync(lambda under: outbox.put(under, "mail", 1))
            async with sa_asyncio.AsyncSession(engine) as session, session.begin():
                session.add(Order(number=1))
                await session.run_sync(lambda under: outbox.put(under, "mail", 2))

    with open_outbox(url, clock) as outbox:
        asyncio.run(main(outbox))
        assert [job.payload for job in outbox.jobs()] == [1, 2]
        assert orders(outbox) == 1


@pytest.mark.parametrize(("database", "driver"), ASYNC_DRIVERS)
def test_what_is_for_aput_is_refused_by_put(
    database: str, driver: str, request: pytest.FixtureRequest, clock: ManualClock
) -> None:
    url = url_of(database, request)

    async def main(outbox: Outbox) -> None:
        async with ways.async_connected(url, driver) as connection:
            with pytest.raises(TypeError, match="use aput"):
                outbox.put(connection, "mail", 1)
            with pytest.raises(TypeError, match="use aput"):
                outbox.put(sa_asyncio.AsyncSession(connection.engine), "mail", 1)
            with pytest.raises(TypeError, match="aput takes"):
                await outbox.aput(connection.engine, "mail", 1)
        if driver == "psycopg":
            async with await psycopg.AsyncConnection.connect(ways.conninfo(url)) as plain:
                with pytest.raises(TypeError, match="use aput"):
                    outbox.put(plain, "mail", 1)
        if driver == "asyncpg":
            its_own = await asyncpg.connect(ways.conninfo(url))
            with pytest.raises(TypeError, match=r"not asyncpg\.connection\.Connection"):
                await outbox.aput(its_own, "mail", 1)
            await its_own.close()
        if driver == "aiosqlite":
            async with aiosqlite.connect(str(sqlalchemy.make_url(url).database)) as its_own:
                with pytest.raises(TypeError, match=r"not aiosqlite\.core\.Connection"):
                    await outbox.aput(its_own, "mail", 1)

    with open_outbox(url, clock) as outbox:
        asyncio.run(main(outbox))
        assert outbox.jobs() == []


# -- an outbox on an AsyncEngine -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("database", "driver"), ASYNC_DRIVERS)
def test_an_outbox_on_an_async_engine(
    database: str, driver: str, request: pytest.FixtureRequest, clock: ManualClock
) -> None:
    url = url_of(database, request)

    async def main() -> None:
        async with ways.async_engine_of(url, driver) as engine, Outbox(engine, clock=clock) as outbox:
            await outbox.acreate_tables()
            outbox.queue("mail")
            async with outbox.abegin() as connection:
                job = await outbox.aput(connection, "mail", 1)
            with contextlib.suppress(LookupError):
                async with outbox.abegin() as connection:
                    await outbox.aput(connection, "mail", 2)
                    raise LookupError
            assert await outbox.ajobs() == [job]
            # from threads, too, which are no part of this loop
            assert await asyncio.to_thread(outbox.jobs) == [job]
            assert await asyncio.to_thread(outbox.cancel, job.id)
            with pytest.raises(Exception, match=r"use abegin\(\)"), outbox.begin():
                pass

    asyncio.run(main())


def test_a_sync_outbox_from_a_coroutine(on_both: Outbox) -> None:
    async def main() -> None:
        with on_both.begin() as connection:
            job = on_both.put(connection, "mail", 1)
        assert await on_both.aget(job.id) == job
        with pytest.raises(Exception, match=r"use begin\(\)"):
            async with on_both.abegin():
                pass

    asyncio.run(main())


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python has this itself")
def test_the_stand_in_for_python_3_12(sqlite_url: str) -> None:
    with ways.pep249(sqlite_url, autocommit=False) as connection:
        assert isinstance(connection, sqlite3.Connection)
        assert (connection.in_transaction, getattr(connection, "autocommit", None)) == (True, False)
        connection.commit()
        assert connection.in_transaction
    with ways.pep249(sqlite_url, autocommit=True) as connection:
        assert (connection.in_transaction, getattr(connection, "autocommit", None)) == (False, True)
