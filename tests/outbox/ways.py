"""The kinds of connections that a put takes: how each is opened, and how its owner commits and rolls back.

Each ``Way`` is a context manager of a ``Held``: the connection, in a transaction or about to begin one by itself, with
what its owner would call on it.
"""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import psycopg
import psycopg.rows
import pytest
import sqlalchemy
from sqlalchemy import event, orm
from sqlalchemy.ext import asyncio as sa_asyncio


class Held(NamedTuple):
    """A connection, and what its owner does with it. ``execute``: a statement without parameters."""

    connection: Any
    execute: Callable[[str], Any]
    commit: Callable[[], Any]
    rollback: Callable[[], Any]


class Way(NamedTuple):
    """``database``: the kind it speaks with. ``open``: called with a URL of SQLAlchemy for its default driver."""

    database: str
    open: Callable[[str], AbstractContextManager[Held]]


class AsyncWay(NamedTuple):
    """The same for asyncio: what its owner calls is awaited."""

    database: str
    open: Callable[[str], AbstractAsyncContextManager[Held]]


WAYS: dict[str, Way] = {}
ASYNC_WAYS: dict[str, AsyncWay] = {}
TABLE = "CREATE TABLE orders (number integer PRIMARY KEY)"


def way(database: str) -> Callable[[Callable[[str], Iterator[Held]]], Callable[[str], Iterator[Held]]]:
    def note(function: Callable[[str], Iterator[Held]]) -> Callable[[str], Iterator[Held]]:
        WAYS[function.__name__] = Way(database, contextmanager(function))
        return function

    return note


def async_way(database: str) -> Callable[[Callable[[str], AsyncIterator[Held]]], None]:
    def note(function: Callable[[str], AsyncIterator[Held]]) -> None:
        ASYNC_WAYS[function.__name__] = AsyncWay(database, asynccontextmanager(function))

    return note


# -- SQLAlchemy ------------------------------------------------------------------------------------------------------


@contextmanager
def engine_of(url: str, driver: str = "", **options: Any) -> Iterator[sqlalchemy.Engine]:
    made = sqlalchemy.create_engine(with_driver(url, driver), **options)
    yield made
    made.dispose()


def with_driver(url: str, driver: str) -> sqlalchemy.URL:
    parsed = sqlalchemy.make_url(url)
    return parsed.set(drivername=f"{parsed.get_backend_name()}+{driver}") if driver else parsed


def of_sqlalchemy(connection: sqlalchemy.Connection) -> Held:
    return Held(connection, connection.exec_driver_sql, connection.commit, connection.rollback)


def of_session(session: Any) -> Held:
    return Held(session, lambda sql: session.execute(sqlalchemy.text(sql)), session.commit, session.rollback)


@contextmanager
def connected(url: str, driver: str = "", **options: Any) -> Iterator[sqlalchemy.Connection]:
    with engine_of(url, driver, **options) as engine, engine.connect() as connection:
        yield connection


def sqlalchemy_connection(url: str) -> Iterator[Held]:
    with connected(url) as connection:
        yield of_sqlalchemy(connection)


WAYS["sqlalchemy on psycopg"] = Way("postgresql", contextmanager(sqlalchemy_connection))
WAYS["sqlalchemy on sqlite3"] = Way("sqlite", contextmanager(sqlalchemy_connection))


@way("postgresql")
def sqlalchemy_on_psycopg2(url: str) -> Iterator[Held]:
    pytest.importorskip("psycopg2")
    with connected(url, "psycopg2") as connection:
        yield of_sqlalchemy(connection)


@way("postgresql")
def sqlalchemy_that_streams(url: str) -> Iterator[Held]:
    """Cursors of the server, which take queries only."""
    with connected(url) as connection:
        run = connection.exec_driver_sql
        connection.execution_options(stream_results=True)
        yield of_sqlalchemy(connection)._replace(
            execute=lambda sql: run(sql, execution_options={"stream_results": False})
        )


@way("postgresql")
def sqlalchemy_serializable(url: str) -> Iterator[Held]:
    with connected(url, isolation_level="SERIALIZABLE") as connection:
        yield of_sqlalchemy(connection)


@way("postgresql")
def sqlalchemy_autocommit_begun_by_hand(url: str) -> Iterator[Held]:
    with connected(url, isolation_level="AUTOCOMMIT") as connection:
        run = connection.exec_driver_sql
        run("BEGIN")
        yield Held(connection, run, lambda: run("COMMIT"), lambda: run("ROLLBACK"))


@way("sqlite")
def sqlite_autocommit_begun_by_hand(url: str) -> Iterator[Held]:
    with connected(url, isolation_level="AUTOCOMMIT") as connection:
        run = connection.exec_driver_sql
        run("BEGIN IMMEDIATE")
        yield Held(connection, run, lambda: run("COMMIT"), lambda: run("ROLLBACK"))


def follow_the_recipe(engine: Any) -> None:
    """SQLAlchemy's, for a SQLite whose transactions are whole: the driver begins none, an event does."""

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")


@way("sqlite")
def sqlite_by_the_recipe(url: str) -> Iterator[Held]:
    with engine_of(url) as engine:
        follow_the_recipe(engine)
        with engine.connect() as connection:
            yield of_sqlalchemy(connection)


@way("sqlite")
def sqlite_by_the_recipe_begun(url: str) -> Iterator[Held]:
    with engine_of(url) as engine:
        follow_the_recipe(engine)
        with engine.connect() as connection:
            connection.begin()
            yield of_sqlalchemy(connection)


@way("sqlite")
def session_by_the_recipe(url: str) -> Iterator[Held]:
    with engine_of(url) as engine:
        follow_the_recipe(engine)
        with orm.Session(engine) as session:
            yield of_session(session)


def sqlalchemy_session(url: str) -> Iterator[Held]:
    with engine_of(url) as engine, orm.Session(engine) as session:
        yield of_session(session)


WAYS["session on psycopg"] = Way("postgresql", contextmanager(sqlalchemy_session))
WAYS["session on sqlite3"] = Way("sqlite", contextmanager(sqlalchemy_session))


@way("sqlite")
def scoped_session(url: str) -> Iterator[Held]:
    with engine_of(url) as engine:
        scoped = orm.scoped_session(orm.sessionmaker(engine))
        yield of_session(scoped)
        scoped.remove()


@way("postgresql")
def session_in_a_transaction(url: str) -> Iterator[Held]:
    """As a test suite has it: the session joins a transaction of its connection, and commits a savepoint."""
    with connected(url) as connection:
        outer = connection.begin()
        with orm.Session(connection, join_transaction_mode="rollback_only") as session:
            run = of_session(session).execute
            yield Held(session, run, outer.commit, outer.rollback)


# -- sqlite3 ---------------------------------------------------------------------------------------------------------


@contextmanager
def sqlite(url: str, **options: Any) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(str(sqlalchemy.make_url(url).database), **options)
    try:
        yield connection
    finally:
        connection.close()


def of_sqlite(connection: sqlite3.Connection) -> Held:
    return Held(connection, connection.execute, connection.commit, connection.rollback)


@way("sqlite")
def sqlite3_as_it_comes(url: str) -> Iterator[Held]:
    with sqlite(url) as connection:
        yield of_sqlite(connection)


@way("sqlite")
def sqlite3_immediate(url: str) -> Iterator[Held]:
    with sqlite(url, isolation_level="IMMEDIATE") as connection:
        yield of_sqlite(connection)


@way("sqlite")
def sqlite3_begun_by_hand(url: str) -> Iterator[Held]:
    with sqlite(url, isolation_level=None) as connection:
        run = connection.execute
        run("BEGIN")
        yield Held(connection, run, lambda: run("COMMIT"), lambda: run("ROLLBACK"))


@way("sqlite")
def sqlite3_with_rows_and_bytes(url: str) -> Iterator[Held]:
    """Its owner has other rows and other texts than tuples of ``str``."""
    with sqlite(url) as connection:
        connection.row_factory = lambda cursor, row: dict(
            zip((each[0] for each in cursor.description), row, strict=True)
        )
        connection.text_factory = bytes
        yield of_sqlite(connection)


class Pep249Connection(sqlite3.Connection):
    """What Python 3.12 has, on an older one: ``autocommit`` decides, and ``isolation_level`` says nothing."""

    def __init__(self, path: str, *, autocommit: bool) -> None:
        super().__init__(path, isolation_level=None)
        self._autocommit = autocommit
        self._begin()

    if sys.version_info < (3, 12):

        @property
        def autocommit(self) -> bool:
            return self._autocommit

    def _begin(self) -> None:
        if not self._autocommit:
            self.execute("BEGIN")

    def commit(self) -> None:
        if not self._autocommit:
            super().commit()
            self._begin()

    def rollback(self) -> None:
        if not self._autocommit:
            super().rollback()
            self._begin()


def pep249(url: str, *, autocommit: bool) -> AbstractContextManager[sqlite3.Connection]:
    if sys.version_info >= (3, 12):
        return sqlite(url, autocommit=autocommit)
    return contextlib.closing(Pep249Connection(str(sqlalchemy.make_url(url).database), autocommit=autocommit))


@way("sqlite")
def sqlite3_autocommit_false(url: str) -> Iterator[Held]:
    with pep249(url, autocommit=False) as connection:
        yield of_sqlite(connection)


@way("sqlite")
def sqlite3_autocommit_true_begun_by_hand(url: str) -> Iterator[Held]:
    with pep249(url, autocommit=True) as connection:
        run = connection.execute
        run("BEGIN")
        yield Held(connection, run, lambda: run("COMMIT"), lambda: run("ROLLBACK"))


# -- psycopg ---------------------------------------------------------------------------------------------------------


def conninfo(url: str) -> str:
    return sqlalchemy.make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


@contextmanager
def psycopg_connection(url: str, **options: Any) -> Iterator[psycopg.Connection[Any]]:
    """Closed at the end, and not committed, as its own context manager would do it."""
    with contextlib.closing(psycopg.connect(conninfo(url), **options)) as connection:
        yield connection


def of_psycopg(connection: psycopg.Connection[Any]) -> Held:
    def execute(sql: str) -> Any:
        return connection.execute(sql.encode())

    return Held(connection, execute, connection.commit, connection.rollback)


@way("postgresql")
def psycopg_as_it_comes(url: str) -> Iterator[Held]:
    with psycopg_connection(url) as connection:
        yield of_psycopg(connection)


@way("postgresql")
def psycopg_with_rows_as_dicts(url: str) -> Iterator[Held]:
    with psycopg_connection(url, row_factory=psycopg.rows.dict_row) as connection:
        yield of_psycopg(connection)


@way("postgresql")
def psycopg_with_raw_cursors(url: str) -> Iterator[Held]:
    """Cursors with another style of parameters."""
    with psycopg_connection(url, cursor_factory=psycopg.RawCursor) as connection:
        yield of_psycopg(connection)


@way("postgresql")
def psycopg_with_client_cursors(url: str) -> Iterator[Held]:
    with psycopg_connection(url, cursor_factory=psycopg.ClientCursor) as connection:
        yield of_psycopg(connection)


@way("postgresql")
def psycopg_autocommit_begun_by_hand(url: str) -> Iterator[Held]:
    with psycopg_connection(url, autocommit=True) as connection:
        run = of_psycopg(connection).execute
        run("BEGIN")
        yield Held(connection, run, lambda: run("COMMIT"), lambda: run("ROLLBACK"))


@way("postgresql")
def psycopg_autocommit_with_a_transaction(url: str) -> Iterator[Held]:
    with psycopg_connection(url, autocommit=True) as connection:
        transaction = connection.transaction()
        transaction.__enter__()

        def leave(error: BaseException | None) -> None:
            transaction.__exit__(None if error is None else type(error), error, None)

        yield Held(connection, of_psycopg(connection).execute, lambda: leave(None), lambda: leave(psycopg.Rollback()))


# -- asyncio ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def async_engine_of(url: str, driver: str, **options: Any) -> AsyncIterator[sa_asyncio.AsyncEngine]:
    made = sa_asyncio.create_async_engine(
        for_asyncpg(url) if driver == "asyncpg" else with_driver(url, driver), **options
    )
    yield made
    await made.dispose()


def for_asyncpg(url: str) -> sqlalchemy.URL:
    """The same database; asyncpg has no use for an empty name of a host."""
    return with_driver(url, "asyncpg")


def of_async_sqlalchemy(connection: sa_asyncio.AsyncConnection) -> Held:
    return Held(connection, connection.exec_driver_sql, connection.commit, connection.rollback)


@asynccontextmanager
async def async_connected(url: str, driver: str, **options: Any) -> AsyncIterator[sa_asyncio.AsyncConnection]:
    async with async_engine_of(url, driver, **options) as engine, engine.connect() as connection:
        yield connection


@async_way("sqlite")
async def async_on_aiosqlite(url: str) -> AsyncIterator[Held]:
    async with async_connected(url, "aiosqlite") as connection:
        yield of_async_sqlalchemy(connection)


@async_way("postgresql")
async def async_on_asyncpg(url: str) -> AsyncIterator[Held]:
    async with async_connected(url, "asyncpg") as connection:
        yield of_async_sqlalchemy(connection)


@async_way("postgresql")
async def async_on_psycopg(url: str) -> AsyncIterator[Held]:
    async with async_connected(url, "psycopg") as connection:
        yield of_async_sqlalchemy(connection)


async def _async_by_hand(url: str, driver: str) -> AsyncIterator[Held]:
    async with async_connected(url, driver, isolation_level="AUTOCOMMIT") as connection:
        run = connection.exec_driver_sql
        await run("BEGIN")
        yield Held(connection, run, lambda: run("COMMIT"), lambda: run("ROLLBACK"))


@async_way("sqlite")
def aiosqlite_autocommit_begun_by_hand(url: str) -> AsyncIterator[Held]:
    return _async_by_hand(url, "aiosqlite")


@async_way("postgresql")
def asyncpg_autocommit_begun_by_hand(url: str) -> AsyncIterator[Held]:
    return _async_by_hand(url, "asyncpg")


@async_way("postgresql")
def async_psycopg_of_sqlalchemy_begun_by_hand(url: str) -> AsyncIterator[Held]:
    return _async_by_hand(url, "psycopg")


@async_way("sqlite")
async def aiosqlite_by_the_recipe(url: str) -> AsyncIterator[Held]:
    async with async_engine_of(url, "aiosqlite") as engine:
        follow_the_recipe(engine.sync_engine)
        async with engine.connect() as connection:
            yield of_async_sqlalchemy(connection)


@async_way("postgresql")
async def async_that_streams(url: str) -> AsyncIterator[Held]:
    async with async_connected(url, "asyncpg") as connection:
        await connection.execution_options(stream_results=True)
        run: Any = connection.exec_driver_sql
        yield of_async_sqlalchemy(connection)._replace(
            execute=lambda sql: run(sql, execution_options={"stream_results": False})
        )


@async_way("sqlite")
async def async_session_on_aiosqlite(url: str) -> AsyncIterator[Held]:
    async with async_engine_of(url, "aiosqlite") as engine, sa_asyncio.AsyncSession(engine) as session:
        yield of_session(session)


@async_way("postgresql")
async def async_session_on_asyncpg(url: str) -> AsyncIterator[Held]:
    async with async_engine_of(url, "asyncpg") as engine, sa_asyncio.AsyncSession(engine) as session:
        yield of_session(session)


@async_way("sqlite")
async def async_scoped_session(url: str) -> AsyncIterator[Held]:
    async with async_engine_of(url, "aiosqlite") as engine:
        scoped = sa_asyncio.async_scoped_session(sa_asyncio.async_sessionmaker(engine), scopefunc=lambda: 1)
        yield of_session(scoped)
        await scoped.remove()


@asynccontextmanager
async def async_psycopg_connection(url: str, **options: Any) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    connection = await psycopg.AsyncConnection.connect(conninfo(url), **options)
    try:
        yield connection
    finally:
        await connection.close()


def of_async_psycopg(connection: psycopg.AsyncConnection[Any]) -> Held:
    def execute(sql: str) -> Awaitable[Any]:
        return connection.execute(sql.encode())

    return Held(connection, execute, connection.commit, connection.rollback)


@async_way("postgresql")
async def async_psycopg(url: str) -> AsyncIterator[Held]:
    async with async_psycopg_connection(url) as connection:
        yield of_async_psycopg(connection)


@async_way("postgresql")
async def async_psycopg_with_rows_as_dicts(url: str) -> AsyncIterator[Held]:
    async with async_psycopg_connection(url, row_factory=psycopg.rows.dict_row) as connection:
        yield of_async_psycopg(connection)


@async_way("postgresql")
async def async_psycopg_with_raw_cursors(url: str) -> AsyncIterator[Held]:
    async with async_psycopg_connection(url, cursor_factory=psycopg.AsyncRawCursor) as connection:
        yield of_async_psycopg(connection)


@async_way("postgresql")
async def async_psycopg_autocommit_begun_by_hand(url: str) -> AsyncIterator[Held]:
    async with async_psycopg_connection(url, autocommit=True) as connection:
        run = of_async_psycopg(connection).execute
        await run("BEGIN")
        yield Held(connection, run, lambda: run("COMMIT"), lambda: run("ROLLBACK"))
