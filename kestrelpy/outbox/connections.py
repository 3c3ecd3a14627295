"""What a caller passes to ``put``: which dialect it speaks, whether it is in a transaction, and how it executes SQL.

Nothing here commits, rolls back, or opens a connection. Modules are looked up where they are loaded already: who passes
a connection of ``psycopg`` has imported it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from kestrelpy.outbox.errors import NotInTransaction

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Dialect
    from sqlalchemy.ext.asyncio import AsyncConnection

    from kestrelpy.outbox.sql import Arguments, AsyncFetch, Fetch, Rows

__all__ = ["Given", "GivenAsync", "given", "given_async"]

T = TypeVar("T")


class Given:
    """A connection of a caller: its dialect, and what executes a statement on it."""

    __slots__ = ("dialect", "fetch")

    def __init__(self, dialect: Dialect, fetch: Fetch) -> None:
        self.dialect = dialect
        self.fetch = fetch


class GivenAsync:
    """The same of a connection of asyncio."""

    __slots__ = ("dialect", "fetch")

    def __init__(self, dialect: Dialect, fetch: AsyncFetch) -> None:
        self.dialect = dialect
        self.fetch = fetch


def given(connection: Any) -> Given:
    """Raises ``TypeError`` for what is no connection that ``put`` takes, ``NotInTransaction``."""
    orm = sys.modules.get("sqlalchemy.orm")
    if orm is not None and isinstance(connection, orm.scoped_session):
        connection = connection()
    if orm is not None and isinstance(connection, orm.Session):
        connection.flush()
        connection = connection.connection()
    from sqlalchemy.engine import Connection

    if isinstance(connection, Connection):
        return _given_sqlalchemy(connection)
    sqlite3, psycopg = sys.modules.get("sqlite3"), sys.modules.get("psycopg")
    if sqlite3 is not None and isinstance(connection, sqlite3.Connection):
        _check(connection)
        return Given(_dialect("sqlite"), _sqlite_fetch(connection))
    if psycopg is not None and isinstance(connection, psycopg.Connection):
        _check(connection)
        return Given(_dialect("postgresql"), _psycopg_fetch(connection, psycopg))
    raise TypeError(
        "put takes a Connection or Session of SQLAlchemy, a sqlite3.Connection or a psycopg.Connection, "
        f"not {_name(connection)}{_hint(connection)}"
    )


async def given_async(connection: Any) -> GivenAsync:
    """``given`` for the connections of asyncio."""
    found = sys.modules.get("sqlalchemy.ext.asyncio")
    if found is not None and isinstance(connection, found.async_scoped_session):
        connection = connection()
    if found is not None and isinstance(connection, found.AsyncSession):
        await connection.flush()
        connection = await connection.connection()
    if found is not None and isinstance(connection, found.AsyncConnection):
        under = await connection.run_sync(_given_sqlalchemy)

        async def fetch(sql: str, arguments: Arguments) -> Rows:
            result: Rows = await to_its_end(connection, lambda _: under.fetch(sql, arguments))
            return result

        return GivenAsync(under.dialect, fetch)
    psycopg = sys.modules.get("psycopg")
    if psycopg is not None and isinstance(connection, psycopg.AsyncConnection):
        _check(connection)
        return GivenAsync(_dialect("postgresql"), _async_psycopg_fetch(connection, psycopg))
    raise TypeError(
        "aput takes an AsyncConnection or AsyncSession of SQLAlchemy, or a psycopg.AsyncConnection, "
        f"not {_name(connection)}{_async_hint(connection)}"
    )


async def to_its_end(connection: AsyncConnection, function: Callable[[Connection], T]) -> T:
    """``connection.run_sync(function)``; on SQLite one that is cancelled is waited for.

    A statement of SQLite runs on a thread and goes on all the same. Whose task is gone leaves a cursor that is nobody's
    and keeps the write lock, for ever if it is of an INSERT that returns rows.
    """
    if connection.dialect.name != "sqlite":
        return await connection.run_sync(function)
    task = asyncio.ensure_future(connection.run_sync(function))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await _wait_for(task)
        raise


async def _wait_for(task: asyncio.Future[T]) -> None:
    """Until it is done, also if it is cancelled again."""
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task])
        if task.done():
            if not task.cancelled():
                task.exception()  # else it is reported as never looked at
            return


def fetch_on(connection: Connection) -> Fetch:
    """What executes a statement on a connection of SQLAlchemy."""
    options = connection.get_execution_options()
    if options.get("stream_results") or options.get("yield_per"):
        plain = {"stream_results": False, "yield_per": None}  # a cursor of the server takes queries only

        def fetch_all(sql: str, arguments: Arguments) -> Rows:
            result = connection.exec_driver_sql(sql, arguments, plain)
            return result.fetchall() if result.returns_rows else ()

        return fetch_all

    def fetch(sql: str, arguments: Arguments) -> Rows:
        result = connection.exec_driver_sql(sql, arguments)
        return result.fetchall() if result.returns_rows else ()

    return fetch


def commits_each(connection: Connection) -> bool:
    """Whether the driver's connection commits each statement by itself, unless somebody begins by hand."""
    pooled = connection.connection
    return _commits_each(pooled.dbapi_connection, pooled.driver_connection)


def in_transaction(connection: Connection) -> bool:
    """Whether the driver's connection is in a transaction."""
    return _in_transaction(connection.connection.driver_connection)


def _given_sqlalchemy(connection: Connection) -> Given:
    if commits_each(connection) and not in_transaction(connection):
        _begin(connection)
    return Given(connection.dialect, fetch_on(connection))


def _begin(connection: Connection) -> None:
    """The driver begins no transaction; by SQLAlchemy's recipe an event does, when the first statement comes, which is
    now. Raises ``NotInTransaction`` if there is no such event.
    """
    if not connection.in_transaction():
        begun = connection.begin()
        if in_transaction(connection):
            return
        begun.rollback()
    raise NotInTransaction(_name(connection))


def _check(driver: Any) -> None:
    """Raise ``NotInTransaction`` if the driver's connection commits each statement by itself, and nobody has begun a
    transaction by hand.
    """
    if _commits_each(driver, driver) and not _in_transaction(driver):
        raise NotInTransaction(_name(driver))


def _commits_each(adapted: Any, driver: Any) -> bool:
    """``adapted``: the driver's connection as SQLAlchemy has it, which is another one if the driver is asyncio's."""
    for each in (adapted, getattr(driver, "_conn", None)):  # aiosqlite has sqlite3's there
        autocommit = getattr(each, "autocommit", None)
        if autocommit is True or autocommit is False:
            return autocommit
    return getattr(adapted, "isolation_level", "") is None


def _in_transaction(driver: Any) -> bool:
    found = getattr(driver, "in_transaction", None)  # sqlite3, aiosqlite
    if found is not None:
        return bool(found)
    if hasattr(driver, "is_in_transaction"):  # asyncpg
        return bool(driver.is_in_transaction())
    status = getattr(getattr(driver, "info", None), "transaction_status", None)  # psycopg 3
    if status is None and hasattr(driver, "get_transaction_status"):  # psycopg2
        status = driver.get_transaction_status()
    return status is not None and int(status) != 0


def _sqlite_fetch(connection: Any) -> Fetch:
    """The caller's factories may make something else of rows and texts than tuples of ``str``."""

    def fetch(sql: str, arguments: Arguments) -> Rows:
        text_factory, connection.text_factory = connection.text_factory, str
        cursor = connection.cursor()
        cursor.row_factory = None
        try:
            rows: Rows = cursor.execute(sql, arguments).fetchall()
            return rows
        finally:
            cursor.close()
            connection.text_factory = text_factory

    return fetch


def _psycopg_fetch(connection: Any, psycopg: Any) -> Fetch:
    """With a cursor of psycopg's own class: the caller's may have another style of parameters. In a pipeline the rows
    come with its synchronization, which is at the end of a pipeline within.
    """

    def fetch(sql: str, arguments: Arguments) -> Rows:
        with psycopg.Cursor(connection, row_factory=psycopg.rows.tuple_row) as cursor:
            if connection.pgconn.pipeline_status:
                with connection.pipeline():
                    cursor.execute(sql, arguments)
            else:
                cursor.execute(sql, arguments)
            rows: Rows = cursor.fetchall() if cursor.description else ()
            return rows

    return fetch


def _async_psycopg_fetch(connection: Any, psycopg: Any) -> Callable[[str, Arguments], Awaitable[Rows]]:
    async def fetch(sql: str, arguments: Arguments) -> Rows:
        async with psycopg.AsyncCursor(connection, row_factory=psycopg.rows.tuple_row) as cursor:
            if connection.pgconn.pipeline_status:
                async with connection.pipeline():
                    await cursor.execute(sql, arguments)
            else:
                await cursor.execute(sql, arguments)
            rows: Rows = await cursor.fetchall() if cursor.description else ()
            return rows

    return fetch


_dialects: dict[str, Dialect] = {}


def _dialect(name: str) -> Dialect:
    """The dialect of plain connections; one object, by which its statements are known."""
    if name not in _dialects:
        if name == "sqlite":
            from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite as made
        else:
            from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg as made  # type: ignore[assignment]
        _dialects[name] = made()
    return _dialects[name]


def _name(connection: object) -> str:
    kind = type(connection)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _hint(connection: object) -> str:
    if connection is None:
        return " (only an outbox on a WorkQueue puts without one: use outbox.begin())"
    return " (use aput)" if "Async" in type(connection).__name__ else ""


def _async_hint(connection: object) -> str:
    kind = type(connection)
    is_known = kind.__module__.partition(".")[0] in ("sqlalchemy", "sqlite3", "psycopg")
    return " (use put)" if is_known and kind.__name__ in ("Connection", "Session", "scoped_session") else ""
