"""``QueueServer``: where a server listens, which clients it admits, and its turns, whatever the protocol.

Clients, the queue's timers and the syncs that replies wait for all run on the thread of one event loop. So nothing here
has a lock. Only background syncs and compaction run on the library's own thread.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kestrelpy.clock import SystemClock
from kestrelpy.server._connection import Connection, QueueProtocol
from kestrelpy.server._rounds import Rounds
from kestrelpy.server.figures import ServerFigures

if TYPE_CHECKING:
    from typing import Self

__all__ = ["QueueServer", "parse_address"]

BACKLOG = 1024
LINGER_SECONDS = 2.0
"""How long a server that stops waits for clients that have not read all of their replies."""
LOOK_SECONDS = 1.0
"""How often to look whether clients that wait, and are not read from, have hung up."""

_logger = logging.getLogger("kestrelpy.server")

Address = tuple[str, int] | str


def parse_address(text: str, default_port: int = 11300) -> Address:
    """Read ``HOST:PORT``, ``[V6]:PORT``, ``HOST``, ``:PORT`` (a pair of host and port) or ``unix:PATH`` (a path).

    ``default_port`` is the port where none is named. Raises ``ValueError``.
    """
    if not text:
        raise ValueError("the address is empty")
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path:
            raise ValueError("unix: needs a path")
        return path
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        host, port = text, str(default_port)
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"{text}: {port!r} is not a port from 0 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


class QueueServer:
    """A server for clients of some queue protocol, in the running event loop. Derive from it, and say what it serves.

    A subclass opens its queues in ``open`` and closes them in ``close``. It calls ``serve_at`` in its constructor, for
    each protocol: where that protocol is served. If it has a ``commit``, that is called once a turn, before the replies
    of the turn are sent: so one sync is enough for all clients of the turn (group commit). docs/servers.md shows a
    small one.

    ``start`` opens the queues and listens, ``stop`` closes everything. Not thread-safe: other threads use
    ``loop.call_soon_threadsafe``. At most ``max_connections`` clients are admitted at a time (``None``: no limit).
    """

    loop: asyncio.AbstractEventLoop
    rounds: Rounds
    commit: Callable[[], None] | None = None
    monotonic: Callable[[], float] = staticmethod(SystemClock.monotonic)
    max_connections: int | None = None

    def __init__(self) -> None:
        self._places: list[tuple[str | socket.socket, QueueProtocol, int]] = []
        self._listeners: list[asyncio.AbstractServer] = []
        self._unread: dict[Connection, None] = {}
        self.connections: dict[Connection, None] = {}
        self.connections_ever = 0
        self.bytes_read = 0
        self.bytes_written = 0

    # -- what a subclass says ------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the queues. ``loop`` is set by now. Called by ``start``."""

    def close(self) -> None:
        """Close the queues. Called by ``stop``, when no client is left; may be called again, and after an ``open`` that
        has raised.
        """

    def serve_at(
        self,
        protocol: QueueProtocol,
        listen: str | Sequence[str],
        sockets: Sequence[socket.socket] = (),
        default_port: int = 11300,
    ) -> None:
        """Serve ``protocol`` at these addresses (``"127.0.0.1:0"``: any free port; ``"unix:/run/jobs"``).

        ``sockets`` listen already, and are used instead of addresses. ``default_port``: for addresses without a port.
        """
        addresses = [listen] if isinstance(listen, str) else list(listen)
        self._places += [(place, protocol, default_port) for place in (list(sockets) or addresses)]

    def bind(self, bound: Callable[[str, int], Sequence[socket.socket]]) -> None:
        """Bind all addresses now, before the process gives up the rights that this takes.

        ``bound`` makes sockets of an address and its default port.
        """
        places: list[tuple[str | socket.socket, QueueProtocol, int]] = []
        for place, protocol, port in self._places:
            sockets = bound(place, port) if isinstance(place, str) else [place]
            places += [(each, protocol, port) for each in sockets]
        self._places = places

    def on_signals(self) -> Mapping[signal.Signals, Callable[[], object]]:
        """What a server that is a process of its own does at which signal, besides ending at SIGTERM and SIGINT."""
        return {}

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the queues and listen. Raises what ``open`` raises; ``ValueError``, ``OSError`` for an address."""
        self.loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = self.loop.create_future()
        self.rounds = Rounds(self.loop, self.commit, self.fail)
        try:
            self.open()
            for place, protocol, default_port in self._places:
                self._listeners.append(await self._listen(place, protocol, default_port))
        except BaseException:
            await self.stop()
            raise

    async def _listen(
        self, place: str | socket.socket, protocol: QueueProtocol, default_port: int
    ) -> asyncio.AbstractServer:
        def connection() -> Connection:
            return Connection(self, protocol)

        if isinstance(place, socket.socket):
            if place.family == socket.AF_UNIX:
                return await self._serve_path(connection, place)
            return await self.loop.create_server(connection, sock=place, backlog=BACKLOG)
        address = parse_address(place, default_port)
        if isinstance(address, str):
            return await self.loop.create_unix_server(connection, address, backlog=BACKLOG)
        host, port = address
        return await self.loop.create_server(connection, host or None, port, backlog=BACKLOG)

    async def _serve_path(self, connection: Callable[[], Connection], bound: socket.socket) -> asyncio.AbstractServer:
        """The path stays when the server ends: it is of whoever has bound it, as systemd, which listens on.

        From Python 3.13 on, a loop removes it unless it is told not to; before, a loop does not know the option.
        """
        create: Callable[..., Any] = self.loop.create_unix_server
        try:
            made = create(connection, sock=bound, backlog=BACKLOG, cleanup_socket=False)
        except TypeError:
            made = create(connection, sock=bound, backlog=BACKLOG)
        server: asyncio.AbstractServer = await made
        return server

    async def stop(self) -> None:
        """Close all connections and the queues. May be repeated.

        Clients that still read their last replies get ``LINGER_SECONDS``.
        """
        self._stop_listening()
        for connection in list(self.connections):
            connection.hang_up()
        await asyncio.sleep(0)  # the connections are closed in the loop's next round
        await asyncio.sleep(0)
        now = asyncio.get_running_loop().time
        end = now() + LINGER_SECONDS
        while self.connections and now() < end:  # they still read their last replies
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.abort()
        self.close()

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def end(self) -> None:
        """Let ``ended`` return: a client or a signal has asked the server to stop."""
        if not self._end.done():
            self._end.set_result(None)

    async def ended(self) -> None:
        """Wait until somebody has called ``end``, or a sync has failed; raises the error of the sync.

        No change is acknowledged after a failed sync. In either case, stop the server.
        """
        await asyncio.shield(self._end)

    def fail(self, error: BaseException) -> None:
        """A commit has failed: accept no more clients, and let ``ended`` raise."""
        _logger.error("a sync has failed, and the server accepts no more clients: %s", error)
        for listener in self._listeners:
            listener.close()
        if not self._end.done():
            self._end.set_exception(error)
            self._end.exception()  # so the loop does not log it if nobody calls ``ended``

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

    @property
    def listens_at(self) -> list[str]:
        """``addresses`` as texts, each as ``parse_address`` reads it."""
        return [_text_of(address) for address in self.addresses]

    def figures(self) -> ServerFigures:
        """The figures for who watches the server. May be called from any thread once the server has started."""
        return ServerFigures(len(self.connections), {})

    # -- connections ---------------------------------------------------------------------------------------------------

    def admit(self, connection: Connection) -> bool:
        """Add the client; False if there is no room, or the server is about to end."""
        if self._end.done() or len(self.connections) == self.max_connections:
            return False
        self.connections[connection] = None
        self.connections_ever += 1
        return True

    def forget(self, connection: Connection) -> None:
        """The client is gone."""
        self.connections.pop(connection, None)
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


def _text_of(address: object) -> str:
    if isinstance(address, tuple):
        host, port = address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"unix:{address}"
