"""The database of a virtual outbox: no threads where the engine is sync, and a single connection that bears being used
twice.

SQLite in memory has one connection. A second transaction on it would commit what the first has done so far. So what is
done while a transaction is open becomes a savepoint of it: it sees what the other wrote, and is undone with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import StaticPool, create_engine, event
from sqlalchemy.engine import Engine

from kestrelpy.outbox.database import Compilers, Database, shares_connections
from kestrelpy.outbox.errors import OutboxError

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

    from kestrelpy.outbox.sql import Kind

__all__ = ["VirtualDatabase", "in_memory"]

T = TypeVar("T")


class VirtualDatabase(Database):
    """A ``Database`` like ``found``. Raises ``OutboxError`` for an AsyncEngine of SQLite in memory."""

    def __init__(self, found: Database, compilers: Compilers) -> None:
        super().__init__(found.engine, found.async_engine, compilers, is_owned=found.is_owned)
        self._open: Connection | None = None  # that is in a transaction, of an engine with a single connection
        if self.async_engine is not None and shares_connections(self.async_engine.sync_engine):
            raise OutboxError(
                "virtual(bind=): an AsyncEngine of SQLite in memory has a single connection, which belongs to one "
                "event loop: use a file, or leave bind away"
            )

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block, know the transaction that a single connection is in."""
        if self.engine is None or not shares_connections(self.engine):
            yield
            return
        listeners: dict[str, Callable[[Connection], None]] = {
            "begin": self._begun,
            "commit": self._ended,
            "rollback": self._ended,
        }
        for name, listener in listeners.items():
            event.listen(self.engine, name, listener)
        try:
            yield
        finally:
            for name, listener in listeners.items():
                event.remove(self.engine, name, listener)

    def _begun(self, connection: Connection) -> None:
        self._open = connection

    def _ended(self, connection: Connection) -> None:
        if self._open is connection:
            self._open = None

    def _around(self) -> Connection | None:
        """The single connection, if it is in a transaction: SQLite begins one at the first write."""
        driver: Any = None if self._open is None else self._open.connection.dbapi_connection
        return self._open if driver is not None and driver.in_transaction else None

    @contextlib.contextmanager
    def begin(self) -> Iterator[Connection]:
        """Within a transaction that is open on the single connection, a savepoint of it."""
        around = self._around()
        if around is None:
            with super().begin() as connection:
                yield connection
        else:
            with around.begin_nested():
                yield around

    def transact(self, function: Callable[[Connection], T], kind: Kind = "write") -> T:
        if self._around() is None:
            return super().transact(function, kind)
        with self.begin() as connection:
            return function(connection)

    async def atransact(self, function: Callable[[Connection], T], kind: Kind = "write") -> T:
        return self.transact(function, kind) if self.async_engine is None else await super().atransact(function, kind)


def in_memory(schema: str | None) -> Engine:
    """A fresh SQLite in memory, with this schema in it."""
    engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    if schema is not None and schema.lower() not in ("main", "temp"):

        @event.listens_for(engine, "connect")
        def attach(connection: Any, _record: object) -> None:
            connection.execute(f"ATTACH DATABASE ':memory:' AS \"{schema}\"")

    return engine
