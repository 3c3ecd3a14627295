"""What wakes a consumer when somebody commits a job: PostgreSQL's NOTIFY, or SQLite's ``data_version``.

A wake-up is a hint and may be lost: polling finds what no hint was given for. Each listener has a thread and one
connection, outside of the engine's pool. When it has lost its connection, it connects again, and wakes once for what
it may have missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import selectors
import socket
import sqlite3
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kestrelpy.outbox._logging import brief, log
from kestrelpy.outbox.fork_gate import gate

if TYPE_CHECKING:
    from kestrelpy.outbox.core import OutboxCore
    from kestrelpy.outbox.database import Database

__all__ = ["Listener", "listener_for"]

LOOK_SECONDS = 0.01
"""How often ``data_version`` is read."""
MAX_PAUSE = 2.0


class Listener:
    """A thread that listens, and calls ``on_wake``."""

    def __init__(self, listen: Callable[[Callable[[], object], Stopping], None], on_wake: Callable[[], object]) -> None:
        self._listen = listen
        self._on_wake = on_wake
        self._failures = 0  # in a row
        self._stopping = Stopping()
        self._thread = threading.Thread(target=self._run, name="kestrelpy-outbox-listener", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """End the thread, and wait for it; no longer than ``timeout``, as it may be connecting."""
        self._stopping.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def abandon(self) -> None:
        """In a forked child, which does not have the thread."""
        self._stopping.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._stopping.open()
                self._listen(self._hear, self._stopping)
            except BaseException as error:
                if not self._failures:
                    log.warning(
                        "listening for new jobs failed, and goes on by polling until it works: %s", brief(error)
                    )
                self._failures = min(self._failures + 1, 10)
                self._stopping.wait(min(0.05 * 2**self._failures, MAX_PAUSE))
        self._stopping.close()

    def _hear(self) -> None:
        """The first call says that it listens."""
        self._failures = 0
        self._on_wake()


class Stopping:
    """An event that a selector can wait for, too. The thread that waits opens and closes it: an interrupt of the main
    thread can't lose the sockets.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._poll: Any = None

    def open(self) -> None:
        if self._sockets is None:
            self._sockets = socket.socketpair()
        if self._event.is_set():
            self._wake()

    @property
    def reader(self) -> socket.socket:
        assert self._sockets is not None
        return self._sockets[0]

    def stop(self) -> None:
        self._event.set()
        self._wake()

    def _wake(self) -> None:
        if self._sockets is not None:
            with contextlib.suppress(OSError):  # it was closed just now
                self._sockets[1].send(b"x")

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Whether it is set, at once or within so many seconds. A poll costs a third of an event's wait."""
        if self._sockets is None or not hasattr(select, "poll"):
            return self._event.wait(seconds)
        if self._poll is None:
            self._poll = select.poll()  # select.select takes no descriptor above 1023
            self._poll.register(self.reader, select.POLLIN)
        return bool(self._poll.poll(seconds * 1000))

    def close(self) -> None:
        for each in self._sockets or ():
            each.close()


def listener_for(core: OutboxCore, database: Database, on_wake: Callable[[], object]) -> Listener | None:
    """What listens on this database; ``None`` where nothing can, and polling has to do."""
    if database.dialect.name == "sqlite":
        path = database.path
        return None if path is None else Listener(lambda wake, stopping: _watch(path, wake, stopping), on_wake)
    if core.channel is None:
        return None
    channel = core.channel
    url = core.settings.listen_url
    if url is None and database.engine is not None and database.dialect.driver == "psycopg":
        engine = database.engine

        def listen(wake: Callable[[], object], stopping: Stopping) -> None:
            detached = engine.raw_connection()
            detached.detach()
            _listen_psycopg(detached.dbapi_connection, channel, wake, stopping)

        return Listener(listen, on_wake)
    if url is None and database.dialect.driver == "asyncpg" and database.async_engine is not None:
        url = database.async_engine.url
        return Listener(lambda wake, stopping: asyncio.run(_listen_asyncpg(url, channel, wake, stopping)), on_wake)
    if url is None and database.async_engine is not None and database.dialect.driver in ("psycopg", "psycopg_async"):
        url = database.async_engine.url
    try:
        import psycopg
    except ImportError:
        return None
    if url is None:
        return None
    conninfo = _conninfo(url)
    return Listener(lambda wake, stopping: _listen_psycopg(psycopg.connect(conninfo), channel, wake, stopping), on_wake)


def _conninfo(url: Any) -> str:
    """For libpq, of a URL of SQLAlchemy."""
    from sqlalchemy import make_url

    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def _listen_psycopg(connection: Any, channel: str, wake: Callable[[], object], stopping: Stopping) -> None:
    """Until it is stopped, or fails."""
    try:
        connection.autocommit = True
        connection.execute(f'LISTEN "{channel}"')
        wake()
        with selectors.DefaultSelector() as selector:
            selector.register(connection.fileno(), selectors.EVENT_READ)
            selector.register(stopping.reader, selectors.EVENT_READ)
            while True:  # see docs/interrupts.md, rule 3
                if stopping.is_set():
                    break
                selector.select()
                if list(connection.notifies(timeout=0)):
                    wake()
    finally:
        connection.close()


async def _listen_asyncpg(url: Any, channel: str, wake: Callable[[], object], stopping: Stopping) -> None:
    import asyncpg

    connection = await asyncpg.connect(_conninfo(url))
    try:
        lost = asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        await connection.add_listener(channel, lambda *_: wake())
        wake()
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_reader(stopping.reader, stopped.set)
        waits = [asyncio.ensure_future(event.wait()) for event in (lost, stopped)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        asyncio.get_running_loop().remove_reader(stopping.reader)
        if lost.is_set() and not stopping.is_set():
            raise ConnectionError("the connection was lost")
    finally:
        if not connection.is_closed():
            await connection.close()


def _watch(path: str, wake: Callable[[], object], stopping: Stopping) -> None:
    """``data_version`` changes with each commit of another connection, in whatever process."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        cursor = connection.cursor()
        last = None
        while True:
            if stopping.wait(LOOK_SECONDS):
                break
            with gate:
                version = cursor.execute("PRAGMA data_version").fetchone()[0]
            if version != last:
                last = version
                wake()
    finally:
        connection.close()
