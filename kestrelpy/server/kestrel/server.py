"""``KestrelServer``: a kestrel on journaled queues, with its memcache, text and thrift protocols."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

from kestrelpy import SystemClock
from kestrelpy._disk.interface import Directory, Disk
from kestrelpy._disk.real import RealDisk
from kestrelpy.server._clock import LoopClock
from kestrelpy.server._connection import Connection
from kestrelpy.server._server import QueueServer
from kestrelpy.server.figures import ServerFigures
from kestrelpy.server.kestrel.config import STATUSES, Config, ConfigError, parse_config
from kestrelpy.server.kestrel.figures import served_journals
from kestrelpy.server.kestrel.memcache import Memcache
from kestrelpy.server.kestrel.operations import Operations
from kestrelpy.server.kestrel.queues import Queues
from kestrelpy.server.kestrel.status import ServerStatus
from kestrelpy.server.kestrel.text import Text
from kestrelpy.server.kestrel.thrift import Thrift

if TYPE_CHECKING:
    from os import PathLike

    from kestrelpy import Clock

__all__ = ["KestrelServer"]

STATUS_FILE = "kestrel.status"
DESCRIPTORS_OF_ITS_OWN = 48
"""How many files the server needs besides those of its queues and its clients."""
SHUTDOWN_SECONDS = 0.1
"""A server that a client has told to shut down goes on for so long."""

_logger = logging.getLogger("kestrelpy.server")


class KestrelServer(QueueServer):
    """A kestrel on journaled queues, in the running event loop.

    ``directory`` holds the queues; ``None``: they are in memory only. ``config``: the text of a TOML configuration, or
    a function that reads it, which is called at the start and at each reload. ``listen``, ``text`` and ``thrift``:
    where the three protocols are served (addresses as for ``BeanstalkServer``; the default is that of the
    configuration). ``sockets`` listen already, for the memcache protocol; a mapping has those of ``"memcache"``,
    ``"text"`` and ``"thrift"``. ``sync_journal``: for queues of which the configuration says nothing: seconds; 0: a
    reply means that the change is on disk, and all clients of a turn share one sync; ``"never"``. ``on_corruption``: as
    for ``JournaledQueue``, for all queues. ``options``: other server keys of the configuration, which win over it.
    ``clock`` and ``disk`` replace those of the system, for tests.

    ``start`` opens the queues, and ``stop`` closes them. Raises ``ValueError`` for a bad configuration, and what
    opening a queue raises. The server is not thread-safe.

    >>> import asyncio
    >>> async def main():
    ...     async with KestrelServer(listen="127.0.0.1:0") as server:
    ...         reader, writer = await asyncio.open_connection(*server.addresses[0])
    ...         writer.write(b"set jobs 0 0 5\\r\\nhello\\r\\nget jobs\\r\\n")
    ...         print(await reader.readline(), await reader.readline())
    ...         writer.close()
    >>> asyncio.run(main())
    b'STORED\\r\\n' b'VALUE jobs 0 5\\r\\n'
    """

    queues: Queues
    status: ServerStatus

    def __init__(
        self,
        directory: str | PathLike[str] | None = None,
        *,
        config: str | Callable[[], str] = "",
        listen: str | Sequence[str] | None = None,
        text: str | Sequence[str] | None = None,
        thrift: str | Sequence[str] | None = None,
        sockets: Sequence[socket.socket] | Mapping[str, Sequence[socket.socket]] = (),
        sync_journal: float | Literal["never"] = 0.1,
        on_corruption: Literal["raise", "quarantine"] = "raise",
        clock: Clock | None = None,
        disk: Disk | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._directory = None if directory is None else str(directory)
        self._config_text = config
        places = {"listen": listen, "text": text, "thrift": thrift}
        self._overrides = {
            **{key: (at,) if isinstance(at, str) else tuple(at) for key, at in places.items() if at is not None},
            **options,
        }
        self._clock = clock
        self._disk = disk
        self._closers: list[Callable[[], None]] = []
        self._sync_journal = sync_journal
        self._on_corruption = on_corruption
        self.config = self._read_config()
        server = self.config.server
        self.max_connections = server.max_connections
        operations = Operations(self)
        self.commit = self._commit
        passed = sockets if isinstance(sockets, Mapping) else {"memcache": sockets}
        self.serve_at(Memcache(operations), server.listen, passed.get("memcache", ()), default_port=22133)
        self.serve_at(Text(operations), server.text, passed.get("text", ()), default_port=2222)
        self.serve_at(Thrift(operations), server.thrift, passed.get("thrift", ()), default_port=2229)
        self._is_closed = False

    def _read_config(self) -> Config:
        text = self._config_text if isinstance(self._config_text, str) else self._config_text()
        return parse_config(text, overrides=self._overrides, sync_journal=self._sync_journal)

    # -- life ----------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        self.clock = self._clock if self._clock is not None else LoopClock(self.loop)
        self.monotonic = self.clock.monotonic
        self.started_at = self.monotonic()
        server = self.config.server
        for warning in self.config.warnings:
            _logger.warning("configuration: %s", warning)
        self._folder: Directory | None = None
        if self._directory is not None:
            self._folder = (self._disk or RealDisk()).directory(self._directory, create=True)
            self._closers.append(self._folder.close)
        self.queues = Queues(
            self._directory,
            self.config,
            self._off_loop,
            self.rounds,
            self.clock,
            self._clock or SystemClock(),
            self._disk,
            self._on_corruption,
        )
        self._closers.append(self.queues.close)
        self._saver = ThreadPoolExecutor(1, "kestrel-checkpoints")
        self._closers.append(self._saver.shutdown)
        self.queues.open()
        self._most_descriptors = _most_descriptors()
        self.queues.storage.has_descriptors = self._has_descriptors
        self.status = ServerStatus(
            self.clock, self._stored_status(), server.status_change_grace_period, self._store_status
        )
        self._closers.append(self.status.close)
        if server.expiration_timer_frequency > 0:
            self._every(server.expiration_timer_frequency, self.queues.sweep)
        if server.client_timeout is not None:
            self._every(min(1.0, server.client_timeout / 4), self._end_silent_clients)

    def _off_loop(self, call: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        future = self.loop.run_in_executor(self._saver, call)
        future.add_done_callback(lambda made: None if made.cancelled() else done(made.exception()))

    def _every(self, seconds: float, call: Callable[[], object]) -> None:
        def run() -> None:
            if self._is_closed:
                return
            try:
                call()
            except Exception:
                _logger.exception("what is done every %s s has failed, and is done again", seconds)
            finally:
                self.clock.call_later(seconds, run)

        self.clock.call_later(seconds, run)

    async def stop(self) -> None:
        """Answer those that wait that there is nothing, close all connections, then all queues. May be repeated."""
        self._stop_listening()
        queues = getattr(self, "queues", None)  # the start may have failed before they were there
        if not self._is_closed and queues is not None:
            queues.is_ending = True
            for queue in list(queues.by_name.values()):
                queue.dismiss_all()
            await asyncio.sleep(0)  # their replies are sent at the end of this turn
            await asyncio.sleep(0)
        await super().stop()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.ExitStack() as rest:
            for close in self._closers:  # the last one first
                rest.callback(close)

    def _commit(self) -> None:
        self.queues.commit()

    def on_signals(self) -> Mapping[signal.Signals, Callable[[], object]]:
        return {signal.SIGHUP: self.reload}

    def _end_silent_clients(self) -> None:
        timeout = self.config.server.client_timeout
        now = self.monotonic()
        for connection in list(self.connections):
            if timeout is not None and not connection.is_waiting and now - connection.served_at > timeout:
                if connection.is_stuck:
                    connection.abort()
                else:
                    connection.hang_up()

    def admit(self, connection: Connection) -> bool:
        return self._has_descriptors(1) and super().admit(connection)

    def _has_descriptors(self, wanted: int) -> bool:
        used = DESCRIPTORS_OF_ITS_OWN + len(self.connections) + self.queues.descriptors
        return used + wanted <= self._most_descriptors

    def figures(self) -> ServerFigures:
        queues = self.queues
        commands = {"get": queues.gets, "set": queues.sets, "peek": queues.peeks}
        return ServerFigures(len(self.connections), commands, queues=tuple(served_journals(queues)))

    # -- what clients may ask of the whole server ----------------------------------------------------------------------

    def reload(self) -> bool:
        """Read the options of queues and the aliases again. False if the configuration is wrong: nothing changes."""
        try:
            config = self._read_config()
            self.queues.storage.check_archives(config)
        except (ConfigError, OSError) as error:
            _logger.error("the configuration is not loaded: %s", error)
            return False
        config.server = self.config.server  # these need another start
        self.config = config
        for line in [*config.warnings, *self.queues.reload(config)]:
            _logger.warning("configuration: %s", line)
        return True

    def set_status(self, word: bytes) -> bool:
        """Change the status. False if there is no such status, or it cannot be set."""
        return self.status.set(word.decode("latin-1").lower())

    def shut_down_soon(self) -> bool:
        """End the server shortly. False if clients may not do that."""
        if not self.config.server.allow_shutdown:
            return False
        self.clock.call_later(SHUTDOWN_SECONDS, self.end)
        return True

    # -- the file of the status ----------------------------------------------------------------------------------------

    def _stored_status(self) -> str:
        default = self.config.server.default_status
        if self._folder is None:
            return default
        try:
            with contextlib.closing(self._folder.open(STATUS_FILE)) as file:
                text = file.read(0, 100).decode("latin-1").strip()
        except FileNotFoundError:
            return default
        except OSError as error:
            _logger.warning("%s can't be read, and the status is %s: %s", STATUS_FILE, default, error)
            return default
        if text not in STATUSES:
            _logger.warning("%s has no status, but %r: the status is %s", STATUS_FILE, text, default)
            return default
        return text

    def _store_status(self, name: str) -> None:
        folder = self._folder
        if folder is None:
            return
        temporary = STATUS_FILE + ".tmp"
        with contextlib.suppress(FileNotFoundError):
            folder.unlink(temporary)
        file = folder.create(temporary)
        try:
            file.write(0, name.encode("ascii") + b"\n")
            file.sync()
        finally:
            file.close()
        folder.rename(temporary, STATUS_FILE)
        folder.sync()


def _most_descriptors() -> int:
    """How many files this process may have open."""
    try:
        import resource
    except ImportError:  # no Unix
        return 1 << 20
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft
