"""The database of an outbox: the transactions that are its own, on an ``Engine`` or an ``AsyncEngine``.

``transact(function)`` calls ``function(connection)`` within a transaction, from any thread. On an ``AsyncEngine`` it
runs on an event loop, in the greenlet that SQLAlchemy has for that, so what is done within is written once: the loop is
that of ``astart`` while it runs, and otherwise one of the database's own, on a thread that is made when it is needed.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import (
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from typing import TYPE_CHECKING, Any, TypeVar

from kestrelpy.errors import UnsupportedFormat
from kestrelpy.outbox.connections import commits_each, fetch_on, in_transaction, to_its_end
from kestrelpy.outbox.errors import MissingPackage, OutboxError, UnsupportedDatabase
from kestrelpy.outbox.flavours import Postgresql, Sqlite
from kestrelpy.outbox.fork_gate import gate
from kestrelpy.outbox.loop_thread import LoopThread, loop_here
from kestrelpy.outbox.schema import VERSION, OutboxTables
from kestrelpy.outbox.sql import Compiler, Kind, Operation, run

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Dialect, Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

T = TypeVar("T")

__all__ = ["Compilers", "Database"]

_PARENTS: list[object] = []
"""In a forked child, what is the parent's: it must not be closed here, nor by the garbage collector."""
OLDEST = {"postgresql": (13,), "sqlite": (3, 35)}
CONFLICTS = ("40001", "40P01", "23505")
"""States by which PostgreSQL says that another transaction was in the way: serialization, deadlock, unique index."""
ATTEMPTS = 10


class Compilers:
    """A compiler for each dialect that puts have come with, and the one of the outbox's own database."""

    def __init__(
        self,
        tables: OutboxTables,
        clock_ms: Callable[[], int] | None,
        system_ms: Callable[[], int],
        channel: str | None,
    ) -> None:
        self.tables = tables
        self._channel = channel
        self._clock_ms = clock_ms
        self._system_ms = system_ms
        self._known: dict[tuple[str, str], Compiler] = {}

    def of(self, dialect: Dialect) -> Compiler:
        """Raises ``UnsupportedDatabase``."""
        which = dialect.name, dialect.driver
        found = self._known.get(which)
        if found is None:
            if dialect.name == "postgresql":
                has_clock = self._clock_ms is not None
                found = Compiler(
                    dialect,
                    self.tables,
                    Postgresql(server_time=not has_clock, takes_text=dialect.driver != "asyncpg"),
                    self._clock_ms,
                    self._channel,
                )
            elif dialect.name == "sqlite":
                found = Compiler(dialect, self.tables, Sqlite(), self._clock_ms or self._system_ms)
            else:
                raise UnsupportedDatabase(dialect.name)
            self._known[which] = found
        return found


class Database:
    """An engine, and how to work on it. ``is_owned``: it was made for the outbox, which disposes of it."""

    def __init__(
        self, engine: Engine | None, async_engine: AsyncEngine | None, compilers: Compilers, *, is_owned: bool
    ) -> None:
        self.engine = engine
        self.async_engine = async_engine
        self.is_owned = is_owned
        self._compilers = compilers
        self.dialect = self.sync_engine.dialect
        self.sql = compilers.of(self.dialect)
        if self.dialect.name == "sqlite":
            compilers.tables.become_those_of_sqlite()
        self.loop: asyncio.AbstractEventLoop | None = None  # that of astart, while it runs
        self._own: LoopThread | None = None
        self._engines: dict[asyncio.AbstractEventLoop, AsyncEngine] = {}  # of the loops of the outbox's own
        self._thread = threading.local()  # ``loop``: see apart()
        self._lock = threading.Lock()
        self._is_checked = False
        self._gate: AbstractContextManager[None] = gate if self.dialect.name == "sqlite" else nullcontext()
        self.path: str | None = None  # of SQLite's file, once it is known

    @property
    def sync_engine(self) -> Engine:
        """The engine, or the one that is in the AsyncEngine."""
        if self.engine is not None:
            return self.engine
        assert self.async_engine is not None
        return self.async_engine.sync_engine

    def beside(self) -> Database:
        """The same database with a pool of its own, which the caller closes; on an AsyncEngine also with a loop of its
        own, so that handlers that block theirs hold up no renewal.
        """
        engine = None if self.engine is None else _with_own_pool(self.engine)
        async_engine = None if self.async_engine is None else _copy_of(self.async_engine)
        return Database(engine, async_engine, self._compilers, is_owned=not shares_connections(self.sync_engine))

    def run(self, make: Callable[[Compiler], Operation[T]], kind: Kind = "write") -> T:
        """Run an operation in a transaction of its own. Never called on the event loop.

        If another transaction was in the way, it is run again. Two claims that overlap may both take a job of one lane:
        the unique index of what runs in lanes lets the later one fail, and when it is run again it sees the other.
        """
        for _ in range(ATTEMPTS - 1):
            try:
                return self._run(make, kind)
            except Exception as error:
                if not _is_conflict(error):
                    raise
        return self._run(make, kind)

    def _run(self, make: Callable[[Compiler], Operation[T]], kind: Kind) -> T:
        return self.transact(lambda connection: run(make(self.sql), fetch_on(connection)), kind)

    async def arun(self, make: Callable[[Compiler], Operation[T]], kind: Kind = "write") -> T:
        """``run``, for coroutines on any loop: with a sync engine on a thread, with an async one on this loop."""
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._arun(make, kind)
            except Exception as error:
                if not _is_conflict(error):
                    raise
        return await self._arun(make, kind)

    async def _arun(self, make: Callable[[Compiler], Operation[T]], kind: Kind) -> T:
        return await self.atransact(lambda connection: run(make(self.sql), fetch_on(connection)), kind)

    def transact(self, function: Callable[[Connection], T], kind: Kind = "write") -> T:
        """Call ``function`` in a transaction that is committed when it returns, and rolled back when it raises."""
        if self.engine is not None:
            check_free(self.engine)
            with self.engine.connect() as connection:
                return self._within(connection, function, kind)
        loop = self.loop
        if loop is not None and loop.is_running() and loop_here() is not loop:
            try:
                return wait_for(asyncio.run_coroutine_threadsafe(self.atransact(function, kind), loop), loop)
            except CancelledError:  # the loop is about to be closed, and cancels all that is on it
                self.loop = None
                raise ConnectionError("the event loop of astart() is ending") from None
        return self._own_loop().run(self.atransact(function, kind))

    async def atransact(self, function: Callable[[Connection], T], kind: Kind = "write") -> T:
        """``transact`` from a coroutine."""
        if self.async_engine is None:
            return await asyncio.to_thread(self.transact, function, kind)
        check_free(self.here().sync_engine)
        async with self.here().connect() as connection:
            return await to_its_end(connection, lambda connection: self._within(connection, function, kind))

    def _within(self, connection: Connection, function: Callable[[Connection], T], kind: Kind) -> T:
        self._check(connection)
        if kind in ("single", "look") and self.dialect.name == "postgresql":
            connection.execution_options(isolation_level="AUTOCOMMIT")
        with self._gate, connection.begin():
            if self.dialect.name == "sqlite":
                begin_sqlite(connection, is_reading=kind in ("read", "look"))
            return function(connection)

    def begin_writing(self, connection: Connection) -> None:
        """Take SQLite's write lock now: what is read in the transaction stays true until its end."""
        if self.dialect.name == "sqlite":
            begin_sqlite(connection, is_reading=False)

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """A transaction for a caller, committed at the end of the block. Raises ``OutboxError`` on an AsyncEngine."""
        if self.engine is None:
            raise OutboxError("this outbox has an AsyncEngine: use abegin()")
        check_free(self.engine)
        with self.engine.connect() as connection:
            self._check(connection)
            with self._gate, connection.begin():
                begin_for_caller(connection)
                yield connection

    @asynccontextmanager
    async def abegin(self) -> AsyncIterator[AsyncConnection]:
        """``begin`` on an AsyncEngine. Raises ``OutboxError`` on another one."""
        if self.async_engine is None:
            raise OutboxError("this outbox has no AsyncEngine: use begin()")
        check_free(self.here().sync_engine)
        async with self.here().connect() as connection:
            await connection.run_sync(self._check)
            with self._gate:
                async with connection.begin():
                    await connection.run_sync(begin_for_caller)
                    yield connection

    def _check(self, connection: Connection) -> None:
        """On the first connection: is the database new enough, and has the engine transactions? With the isolation
        AUTOCOMMIT it has none; then this connection, and those to come, get some.
        """
        if self._is_checked:
            return
        version = connection.dialect.server_version_info
        if version is not None and version < OLDEST[self.dialect.name]:
            raise UnsupportedDatabase(f"{self.dialect.name} {'.'.join(map(str, version))}")
        if self.dialect.name == "postgresql" and commits_each(connection):
            connection.execution_options(isolation_level="READ COMMITTED")
            if self.engine is not None:
                self.engine = self.engine.execution_options(isolation_level="READ COMMITTED")
            if self.async_engine is not None:
                self.async_engine = self.async_engine.execution_options(isolation_level="READ COMMITTED")
                for loop, engine in list(self._engines.items()):
                    self._engines[loop] = engine.execution_options(isolation_level="READ COMMITTED")
        self._is_checked = True

    def check(self, tables: OutboxTables) -> None:
        """Raises ``OutboxError`` if there are no tables, or if threads can't share them."""
        if shares_connections(self.sync_engine):
            raise OutboxError(
                "threads can't share one connection, as to a SQLite in memory: use a file, or the test kit"
            )
        if not self.transact(lambda connection: check_tables(connection, tables), "read"):
            self.transact(lambda connection: note_version(connection, tables))
        if self.dialect.name == "sqlite":
            rows = self.transact(lambda connection: fetch_on(connection)("PRAGMA database_list", ()), "read")
            self.path = next((row[2] for row in rows if row[1] == "main"), "")
            if not self.path:
                raise OutboxError("threads can't share a SQLite database in memory: use a file, or the test kit")

    def here(self) -> AsyncEngine:
        """The AsyncEngine for the running event loop: an engine of the outbox has a pool for each."""
        assert self.async_engine is not None
        loop = asyncio.get_running_loop()
        found = self._engines.get(loop)
        if found is not None or not self.is_owned or shares_connections(self.sync_engine):
            return found or self.async_engine
        for other in list(self._engines):
            if other.is_closed():
                self._engines.pop(other, None)
        self._engines[loop] = _copy_of(self.async_engine)
        return self._engines[loop]

    async def leave_loop(self) -> None:
        """Close the connections that an engine of the outbox has on the running event loop."""
        engine = self._engines.pop(asyncio.get_running_loop(), None) if self.is_owned else None
        if engine is not None:
            await engine.dispose()

    @asynccontextmanager
    async def on_this_loop(self) -> AsyncIterator[None]:
        """Within the block, the running loop has a pool of its own, which ends with it: a connection of asyncio belongs
        to one loop, and those of the engine's own pool to the caller's.
        """
        loop = asyncio.get_running_loop()
        if self.async_engine is None or loop in self._engines or shares_connections(self.sync_engine):
            yield
            return
        engine = self._engines[loop] = _copy_of(self.async_engine)
        try:
            yield
        finally:
            for each in {engine, self._engines.pop(loop, engine)}:
                await each.dispose()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within the block, ``transact_apart`` on this thread uses one event loop and its connections."""
        if self.async_engine is None or hasattr(self._thread, "loop"):
            yield
            return
        self._thread.loop = None
        try:
            yield
        finally:
            found = self._thread.loop
            del self._thread.loop
            if found is not None:
                loop, entered = found
                try:
                    loop.run_until_complete(entered.__aexit__(None, None, None))
                finally:
                    loop.close()

    def transact_apart(self, function: Callable[[Connection], T]) -> T:
        """``transact`` for what may take long. On an AsyncEngine it runs on an event loop of this thread's own, so that
        neither other transactions wait for it, nor the caller's loop.
        """
        if self.async_engine is None or loop_here() is not None:
            return self.transact(function)
        with self.apart():
            if self._thread.loop is None:
                loop, entered = asyncio.new_event_loop(), self.on_this_loop()
                self._thread.loop = loop, entered
                loop.run_until_complete(entered.__aenter__())
            loop = self._thread.loop[0]
            return loop.run_until_complete(self.atransact(function))  # type: ignore[no-any-return]

    def _own_loop(self) -> LoopThread:
        with self._lock:
            if self._own is None:
                self._own = LoopThread("kestrelpy-outbox-database", self.on_this_loop)
            return self._own

    def close(self) -> None:
        """Close what is the outbox's own."""
        with self._lock:
            own, self._own = self._own, None
        if own is not None:
            own.close()
        if self.is_owned and self.engine is not None:
            self.engine.dispose()
        elif self.is_owned and self.async_engine is not None:
            self.async_engine.sync_engine.dispose(close=False)

    async def aclose(self) -> None:
        await self.leave_loop()
        await asyncio.to_thread(self.close)

    def abandon(self) -> None:
        """In a forked child: use none of the connections, which are the parent's. A caller's engine gets a new pool,
        too, as SQLAlchemy tells every program to do there: the old one would give out the parent's.
        """
        self._lock = threading.Lock()
        self.loop = None
        engine = self.sync_engine
        _PARENTS.append((self._own, self._engines, engine.pool))
        self._own, self._engines, self._thread = None, {}, threading.local()
        if not shares_connections(engine):  # that holds what there is in memory only
            engine.dispose(close=False)


def shares_connections(engine: Engine) -> bool:
    """Whether the pool gives out a connection that somebody else may have."""
    from sqlalchemy.pool import SingletonThreadPool, StaticPool

    return isinstance(engine.pool, StaticPool | SingletonThreadPool)


def check_free(engine: Engine) -> None:
    """Raises ``OutboxError`` if the only connection of the engine is in a transaction of the caller's, which one of the
    outbox's own would end: even to give the connection back rolls back.
    """
    if not shares_connections(engine):
        return
    pool: Any = engine.pool
    current = getattr(getattr(pool, "_conn", None), "current", None)  # of SingletonThreadPool: this thread's
    record = pool.connection if hasattr(pool, "connection") else current() if current is not None else None
    driver = getattr(record, "driver_connection", None)
    if getattr(driver, "in_transaction", False) and getattr(driver, "autocommit", True) is not False:
        raise OutboxError(
            "this engine has one connection, which is in a transaction of yours: give it to the call, "
            "as connection=..., or end it first"
        )


def begin_sqlite(connection: Connection, *, is_reading: bool) -> None:
    """Begin a transaction of SQLite, at once with the write lock unless it only reads.

    One that SQLAlchemy's recipe has begun is begun again: it would take the lock with its first write, and that fails
    at once where it has read before and somebody else has written since.
    """
    is_begun = in_transaction(connection)
    if is_reading:
        if not is_begun:
            connection.exec_driver_sql("BEGIN")
        return
    if is_begun:
        connection.exec_driver_sql("ROLLBACK")
    try:
        _begin_immediate(connection)
    except BaseException:
        if is_begun:
            connection.exec_driver_sql("BEGIN")  # SQLAlchemy, or the driver, is about to roll it back
        raise


def begin_for_caller(connection: Connection) -> None:
    """Begin a transaction of SQLite where neither the driver nor a recipe does. Where the driver does it with the first
    write, do it with a savepoint, too: that would be the transaction, and its release the commit.
    """
    if connection.dialect.name != "sqlite":
        return
    if commits_each(connection):
        _begin_if_none_is(connection)
    else:
        from sqlalchemy import event

        event.listen(connection, "savepoint", _begin_if_none_is)


def _begin_if_none_is(connection: Connection, _savepoint: str = "") -> None:
    if not in_transaction(connection):
        connection.exec_driver_sql("BEGIN")


def _begin_immediate(connection: Connection) -> None:
    if connection.dialect.is_async:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        return
    cursor = connection.connection.cursor()
    try:
        patience_ms = cursor.execute("PRAGMA busy_timeout").fetchone()[0]
        cursor.execute("PRAGMA busy_timeout = 0")
        try:
            if not _begin_impatiently(cursor, patience_ms):
                connection.exec_driver_sql("BEGIN IMMEDIATE")  # raises SQLAlchemy's error
        finally:
            cursor.execute(f"PRAGMA busy_timeout = {patience_ms}")
    finally:
        cursor.close()


def _begin_impatiently(cursor: Any, patience_ms: int) -> bool:
    """Try each millisecond. SQLite's own wait tries ever more rarely: beside a program that commits all the time it
    does not get a turn for seconds.
    """
    pause = threading.Event()
    for _ in range(patience_ms):
        try:
            cursor.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if not str(error).startswith("database is locked"):
                return False
        else:
            return True
        pause.wait(0.001)
    return False


def _is_conflict(error: Exception) -> bool:
    """Whether another transaction was in the way, and this one is rolled back."""
    found: Any = getattr(error, "orig", None)
    return (getattr(found, "sqlstate", None) or getattr(found, "pgcode", None)) in CONFLICTS


def wait_for(future: Future[T], loop: asyncio.AbstractEventLoop) -> T:
    """The result of what runs on a loop of the caller's. Raises ``ConnectionError`` if that has ended, or stopped."""
    while True:
        done, _ = wait([future], 0.1)
        if done:
            return future.result()
        if not loop.is_running() and future.cancel():
            raise ConnectionError("the event loop of astart() has ended, or stands still")


def _copy_of(engine: AsyncEngine) -> AsyncEngine:
    """With a pool of its own."""
    from sqlalchemy.ext.asyncio import AsyncEngine

    return AsyncEngine(_with_own_pool(engine.sync_engine))


def _with_own_pool(engine: Engine) -> Engine:
    """The same engine with a pool of its own, and with the events of both: some set the role, or the schema. One whose
    only connection holds what there is in memory is given back as it is.
    """
    from sqlalchemy.engine import Engine

    if shares_connections(engine):
        return engine
    made: Any = Engine(
        engine.pool.recreate(),
        engine.dialect,
        engine.url,
        echo=engine.echo,
        execution_options=engine.get_execution_options(),
        hide_parameters=engine.hide_parameters,
    )
    made.dispatch = made.dispatch._join(engine.dispatch)  # as the engines do that execution_options() makes
    made._has_events = True  # whoever adds the first listener later adds it to the other engine
    return made  # type: ignore[no-any-return]


def open_database(bind: Any, compilers: Compilers) -> Database:
    """For an ``Engine``, an ``AsyncEngine`` or a URL. Raises ``TypeError``, ``UnsupportedDatabase``,
    ``MissingPackage``.
    """
    try:
        from sqlalchemy import URL, create_engine, make_url
        from sqlalchemy.engine import Engine
    except ImportError:
        raise MissingPackage("sqlalchemy", "outbox") from None
    if isinstance(bind, Engine):
        return Database(bind, None, compilers, is_owned=False)
    if isinstance(bind, str | URL):
        url = make_url(bind)
        if url.get_backend_name() not in OLDEST:
            raise UnsupportedDatabase(url.get_backend_name())
        is_patient = url.get_backend_name() == "sqlite" and "timeout" not in url.query  # connect_args win over the URL
        patience = {"connect_args": {"timeout": 30}} if is_patient else {}
        try:
            if not url.get_dialect().is_async or url.get_driver_name() == "psycopg":
                return Database(create_engine(url, **patience), None, compilers, is_owned=True)
            from sqlalchemy.ext.asyncio import create_async_engine

            return Database(None, create_async_engine(url, **patience), compilers, is_owned=True)
        except ModuleNotFoundError as missing:
            package = missing.name or url.get_driver_name()
            raise MissingPackage(package, "postgres" if package.startswith("psycopg") else "outbox-async") from None
    if getattr(type(bind), "__module__", "").startswith("sqlalchemy.ext.asyncio"):
        from sqlalchemy.ext.asyncio import AsyncEngine

        if isinstance(bind, AsyncEngine):
            return Database(None, bind, compilers, is_owned=False)
    raise TypeError(f"an outbox is bound to an Engine, an AsyncEngine, a URL or a WorkQueue, not {bind!r}")


def create_tables(connection: Connection, tables: OutboxTables) -> None:
    """Create what is missing. Any number of processes may do so at once. Raises ``UnsupportedFormat``."""
    _be_alone(connection)
    tables.metadata.create_all(connection)
    _note_version(connection, tables)
    check_tables(connection, tables)


def note_version(connection: Connection, tables: OutboxTables) -> None:
    """Where none is noted: a tool of migrations has made the tables."""
    _be_alone(connection)
    _note_version(connection, tables)


def _be_alone(connection: Connection) -> None:
    """Until the end of the transaction no other process changes the tables; on SQLite its write lock sees to that."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtext('kestrelpy.outbox'))")


def _note_version(connection: Connection, tables: OutboxTables) -> None:
    if not connection.execute(tables.version.select()).scalars().all():
        connection.execute(tables.version.insert().values(version=VERSION))


def check_tables(connection: Connection, tables: OutboxTables) -> bool:
    """Whether their version is noted. Raises ``UnsupportedFormat`` for a newer one, ``OutboxError`` without tables."""
    from sqlalchemy.exc import OperationalError, ProgrammingError

    try:
        found = connection.execute(tables.version.select()).scalars().all()
    except (OperationalError, ProgrammingError) as error:
        if "no such table" not in str(error) and not isinstance(error, ProgrammingError):
            raise
        raise OutboxError(f"there is no table {tables.version.fullname!r}: call create_tables() first") from error
    if found and found[0] > VERSION:
        raise UnsupportedFormat(tables.jobs.fullname, found[0], VERSION)
    return bool(found)
