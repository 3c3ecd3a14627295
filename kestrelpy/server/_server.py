"""``BeanstalkServer``: where the server listens, which clients it admits, and its figures.

Clients, the queue's timers and the syncs that replies wait for all run on the thread of one event loop. So nothing here
has a lock. Only background syncs and compaction run on the library's own thread.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import resource
import socket
from collections.abc import Sequence
from os import getpid
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from kestrelpy.clock import SystemClock
from kestrelpy.server import _replies as replies
from kestrelpy.server._clock import LoopClock
from kestrelpy.server._commands import Commands
from kestrelpy.server._connection import Connection
from kestrelpy.server._rounds import Rounds
from kestrelpy.work import WorkQueue

if TYPE_CHECKING:
    from os import PathLike
    from typing import Self

    from kestrelpy.clock import Clock

__all__ = ["BeanstalkServer", "parse_address"]

VERSION = "1.12+kestrelpy"
"""The version in ``stats``: it begins with that of the beanstalkd whose protocol this is, as clients may look at it."""

DEFAULT_PORT = 11300
BACKLOG = 1024
LOOK_SECONDS = 1.0
"""How often to look whether clients that wait, and are not read from, have hung up."""

_logger = logging.getLogger("kestrelpy.server")

Address = tuple[str, int] | str


def parse_address(text: str) -> Address:
    """Read ``HOST:PORT``, ``[V6]:PORT``, ``HOST``, ``:PORT`` (a pair of host and port) or ``unix:PATH`` (a path).

    Raises ``ValueError``.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path:
            raise ValueError("unix: needs a path")
        return path
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        host, port = text, str(DEFAULT_PORT)
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"{text}: {port!r} is not a port from 0 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


class BeanstalkServer:
    """A beanstalkd on a ``WorkQueue``, in the running event loop.

    ``directory`` holds the jobs; ``None``: they are in memory only. ``listen`` is one address or several
    (``"127.0.0.1:0"``: any free port; ``"unix:/run/jobs"``). ``sockets`` listen already, and are used instead. ``sync``
    is that of the queue; with ``"always"``, a change is on disk before its reply is sent, and all clients of a turn
    share one sync (group commit). At most ``max_connections`` clients are admitted at a time; one client more gets
    OUT_OF_MEMORY. The other options are the queue's.

    ``start`` opens the queue, and ``stop`` closes it. In between it is ``queue``, and the program may use it too, from
    any thread. The server itself is not thread-safe.

    >>> async def main():
    ...     async with BeanstalkServer(listen="127.0.0.1:0") as server:
    ...         reader, writer = await asyncio.open_connection(*server.addresses[0])
    ...         writer.write(b"put 0 0 60 5\\r\\nhello\\r\\n")
    ...         print(await reader.readline())
    ...         writer.close()
    >>> asyncio.run(main())
    b'INSERTED 1\\r\\n'
    """

    queue: WorkQueue
    loop: asyncio.AbstractEventLoop
    commands: Commands
    rounds: Rounds

    def __init__(
        self,
        directory: str | PathLike[str] | None = None,
        *,
        listen: str | Sequence[str] = "127.0.0.1:11300",
        sockets: Sequence[socket.socket] = (),
        sync: float | Literal["always", "never"] = 0.05,
        max_connections: int | None = None,
        segment_bytes: int = 10 << 20,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        self._directory = directory
        self._listen = [listen] if isinstance(listen, str) else list(listen)
        self._sockets = list(sockets)
        if self._sockets:
            self._listen = []
        self._syncs_each_turn = sync == "always"
        self._max_connections = max_connections
        self._segment_bytes = segment_bytes
        self._clock = clock
        self._options = {**options, "sync": "never" if self._syncs_each_turn else sync, "segment_bytes": segment_bytes}
        self._listeners: list[asyncio.AbstractServer] = []
        self._connections: dict[Connection, None] = {}
        self._unread: dict[Connection, None] = {}
        self._connections_ever = 0
        self._system = platform.uname()

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the queue and listen. Raises what opening a queue raises; ``ValueError``, ``OSError`` for an address."""
        self.loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] = self.loop.create_future()
        clock = self._clock if self._clock is not None else LoopClock(self.loop)
        self.queue = WorkQueue(self._directory, clock=clock, disk_clock=self._clock or SystemClock(), **self._options)
        self._opened_at = clock.monotonic()
        self.monotonic = clock.monotonic
        self._identity = f"{getpid() & 0xFFFFFFFF:08x}{clock.time_ns() >> 10 & 0xFFFFFFFF:08x}"
        self.commands = Commands(self.queue, self._figures)
        self.rounds = Rounds(self.loop, self._commit if self._syncs_each_turn else None, self._fail)
        try:
            for address in self._listen:
                self._listeners.append(await self._listen_at(parse_address(address)))
            for ready in self._sockets:
                self._listeners.append(await self._listen_on(ready))
        except BaseException:
            await self.stop()
            raise

    async def _listen_at(self, address: Address) -> asyncio.AbstractServer:
        if isinstance(address, str):
            return await self.loop.create_unix_server(self._connection, address, backlog=BACKLOG)
        host, port = address
        return await self.loop.create_server(self._connection, host or None, port, backlog=BACKLOG)

    async def _listen_on(self, ready: socket.socket) -> asyncio.AbstractServer:
        if ready.family == socket.AF_UNIX:
            return await self.loop.create_unix_server(self._connection, sock=ready, backlog=BACKLOG)
        return await self.loop.create_server(self._connection, sock=ready, backlog=BACKLOG)

    async def stop(self) -> None:
        """Close all connections and the queue: reserved jobs are ready at the next start. May be repeated."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for connection in list(self._connections):
            connection.hang_up()
        await asyncio.sleep(0)  # the connections are closed in the loop's next round
        await asyncio.sleep(0)
        self.queue.close()

    async def failed(self) -> None:
        """Wait until a sync fails; raises its error. No change is acknowledged after that: stop the server."""
        await asyncio.shield(self._failure)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def addresses(self) -> list[Any]:
        """The addresses on which it listens, from ``socket.getsockname``: pairs of host and port, and paths."""
        found = [one.getsockname() for listener in self._listeners for one in getattr(listener, "sockets", ())]
        return [name[:2] if isinstance(name, tuple) else name for name in found]

    def drain(self) -> None:
        """Refuse puts from now on; all other commands work as before."""
        self.queue.drain()

    def _commit(self) -> None:
        if self.commands.wrote:
            self.commands.wrote = False
            self.queue.sync()

    def _fail(self, error: BaseException) -> None:
        _logger.error("the queue could not be synced, and the server accepts no more clients: %s", error)
        for listener in self._listeners:
            listener.close()
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # so the loop does not log it if nobody calls ``failed``

    # -- connections ---------------------------------------------------------------------------------------------------

    def _connection(self) -> Connection:
        return Connection(self)

    def admit(self, connection: Connection) -> bool:
        """Add the client; False if there is no room, or a sync has failed."""
        if self._failure.done() or len(self._connections) == self._max_connections:
            return False
        self._connections[connection] = None
        self._connections_ever += 1
        return True

    def forget(self, connection: Connection) -> None:
        self._connections.pop(connection, None)
        self._unread.pop(connection, None)

    def watch_over(self, connection: Connection) -> None:
        """The client is not read from: look from time to time whether it has hung up."""
        if not self._unread:
            self.loop.call_later(LOOK_SECONDS, self._look)
        self._unread[connection] = None

    def _look(self) -> None:
        for connection in list(self._unread):
            if not connection.look_for_hanging_up():
                self._unread.pop(connection, None)
        if self._unread:
            self.loop.call_later(LOOK_SECONDS, self._look)

    # -- figures -------------------------------------------------------------------------------------------------------

    def _figures(self) -> bytes:
        work = self.queue.stats()
        used = resource.getrusage(resource.RUSAGE_SELF)
        clients = self._connections
        middle: dict[str, object] = {
            "max-job-size": self.queue.max_job_bytes,
            "current-tubes": work.tubes,
            "current-connections": len(clients),
            "current-producers": sum(client.is_producer for client in clients),
            "current-workers": sum(client.is_worker for client in clients),
            "current-waiting": work.waiting,
            "total-connections": self._connections_ever,
            "pid": getpid(),
            "version": f'"{VERSION}"',
            "rusage-utime": f"{used.ru_utime:.6f}",
            "rusage-stime": f"{used.ru_stime:.6f}",
            "uptime": int(self.monotonic() - self._opened_at),
        }
        last = {
            "binlog-max-size": self._segment_bytes,
            "draining": "true" if work.draining else "false",
            "id": self._identity,
            "hostname": self._system.node,
            "os": self._system.version,
            "platform": self._system.machine,
        }
        return replies.stats(work, self.commands.counts, middle, last)
