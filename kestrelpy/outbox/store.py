"""``DatabaseStore``: where the operations of an outbox run, in transactions of their own or on a caller's connection.

An operation is a function ``operation(sql, *arguments)``. A store without a database (``journal_store``) has a method
of the same name for each.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from kestrelpy.outbox.connections import given, given_async
from kestrelpy.outbox.sql import Compiler, Operation, arun, kind_of, run

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from sqlalchemy.engine import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection

    from kestrelpy.outbox.database import Compilers, Database
    from kestrelpy.outbox.queues import QueueConsumer

__all__ = ["DatabaseStore", "JobStore"]

P = ParamSpec("P")
T = TypeVar("T")


class JobStore(Protocol):
    """Performs operations."""

    needs_connection: bool
    """Whether a put must be given a connection."""
    has_relays: bool

    def perform(
        self,
        connection: Any,
        operation: Callable[Concatenate[Compiler, P], Operation[T]],
        *args: P.args,
        **kw: P.kwargs,
    ) -> T:
        """On ``connection``, within its transaction; ``None``: in a transaction of its own."""

    async def aperform(
        self,
        connection: Any,
        operation: Callable[Concatenate[Compiler, P], Operation[T]],
        *args: P.args,
        **kw: P.kwargs,
    ) -> T:
        """The same from a coroutine."""

    def on_this_loop(self) -> AbstractAsyncContextManager[None]:
        """Around what the running event loop, which is the outbox's own, does."""

    def beside(self) -> JobStore:
        """A store of the same jobs for what a running outbox does itself. Nothing that handlers do, and callers, can
        use up its connections: leases are renewed, whoever waits for one.
        """

    async def leave_loop(self) -> None:
        """Close the outbox's own connections of the running event loop, which may be about to end."""

    def apart(self) -> AbstractContextManager[None]:
        """Around what a thread does that runs handlers."""

    def check_consumer(self, consumer: QueueConsumer) -> None:
        """Raises ``NotSupported`` for a queue that it can't have."""

    def begin(self) -> AbstractContextManager[Any]:
        """A transaction for callers who have none."""
        ...

    def abegin(self) -> AbstractAsyncContextManager[Any]:
        """The same for asyncio."""
        ...

    def watch(self, on_due: Callable[[float], object] | None) -> bool:
        """Call ``on_due`` when a job may run, with the seconds until then; ``None``: no more. False if it can't."""
        ...

    def create_tables(self) -> None: ...

    async def acreate_tables(self) -> None: ...

    def check(self) -> None:
        """Raises ``OutboxError`` if there are no tables, or if threads can't share them."""

    def use_loop(self, loop: AbstractEventLoop | None) -> None:
        """Work on this loop, if on any: that of ``astart``, until it is stopped."""

    def close(self) -> None: ...

    async def aclose(self) -> None: ...

    def abandon(self) -> None:
        """In a forked child: forget what is the parent's."""


class DatabaseStore:
    """A ``JobStore`` of rows in a database."""

    needs_connection = True
    has_relays = True

    def __init__(self, compilers: Compilers, database: Database) -> None:
        self.compilers = compilers
        self.database = database
        self._beside: DatabaseStore | None = None  # that of the running outbox

    def beside(self) -> DatabaseStore:
        self._beside = DatabaseStore(self.compilers, self.database.beside())
        return self._beside

    def perform(
        self,
        connection: Any,
        operation: Callable[Concatenate[Compiler, P], Operation[T]],
        *args: P.args,
        **kw: P.kwargs,
    ) -> T:
        if connection is None:
            return self.database.run(lambda sql: operation(sql, *args, **kw), kind_of(operation))
        on = given(connection)
        return run(operation(self.compilers.of(on.dialect), *args, **kw), on.fetch)

    async def aperform(
        self,
        connection: Any,
        operation: Callable[Concatenate[Compiler, P], Operation[T]],
        *args: P.args,
        **kw: P.kwargs,
    ) -> T:
        if connection is None:
            return await self.database.arun(lambda sql: operation(sql, *args, **kw), kind_of(operation))
        on = await given_async(connection)
        return await arun(operation(self.compilers.of(on.dialect), *args, **kw), on.fetch)

    def on_this_loop(self) -> AbstractAsyncContextManager[None]:
        return self.database.on_this_loop()

    def apart(self) -> AbstractContextManager[None]:
        return self.database.apart()

    def check_consumer(self, consumer: QueueConsumer) -> None:
        """It can have all."""

    def begin(self) -> AbstractContextManager[Connection]:
        """Raises ``OutboxError`` on an AsyncEngine."""
        return self.database.begin()

    def abegin(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """Raises ``OutboxError`` without an AsyncEngine."""
        return self.database.abegin()

    def watch(self, on_due: Callable[[float], object] | None) -> bool:  # noqa: ARG002
        """Others put, too: ``wakeup`` has what listens to a database."""
        return False

    def create_tables(self) -> None:
        from kestrelpy.outbox.database import create_tables

        self.database.transact(lambda connection: create_tables(connection, self.compilers.tables))

    async def acreate_tables(self) -> None:
        from kestrelpy.outbox.database import create_tables

        await self.database.atransact(lambda connection: create_tables(connection, self.compilers.tables))

    async def leave_loop(self) -> None:
        await self.database.leave_loop()

    def use_loop(self, loop: AbstractEventLoop | None) -> None:
        self.database.loop = None if self.database.async_engine is None else loop

    def check(self) -> None:
        self.database.check(self.compilers.tables)

    def close(self) -> None:
        self.database.close()

    async def aclose(self) -> None:
        await self.database.aclose()

    def abandon(self) -> None:
        self.database.abandon()
        if self._beside is not None:
            self._beside.abandon()
