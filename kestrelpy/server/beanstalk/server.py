"""``BeanstalkServer``: a beanstalkd on a work queue, and its figures."""

from __future__ import annotations

import logging
import platform
import resource
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from os import getpid
from typing import TYPE_CHECKING, Any, Literal

from kestrelpy.clock import SystemClock
from kestrelpy.errors import KestrelError
from kestrelpy.server._clock import LoopClock
from kestrelpy.server._server import QueueServer
from kestrelpy.server.beanstalk import replies
from kestrelpy.server.beanstalk.commands import Commands
from kestrelpy.server.figures import ServerFigures
from kestrelpy.work import WorkQueue

if TYPE_CHECKING:
    from os import PathLike

    from kestrelpy.clock import Clock
    from kestrelpy.ship import Ship

__all__ = ["BeanstalkServer"]

LOOK_SECONDS = 0.2
"""How often to look whether another owner has a queue that is shipped."""
_logger = logging.getLogger("kestrelpy.server")

VERSION = "1.12+kestrelpy"
"""The version in ``stats``: it begins with that of the beanstalkd whose protocol this is, as clients may look at it."""


class BeanstalkServer(QueueServer):
    """A beanstalkd on a ``WorkQueue``, in the running event loop.

    ``directory`` holds the jobs; ``None``: they are in memory only. ``listen`` is one address or several
    (``"127.0.0.1:0"``: any free port; ``"unix:/run/jobs"``). ``sockets`` listen already, and are used instead. ``sync``
    is that of the queue; with ``"always"``, a change is on disk before its reply is sent, and all clients of a turn
    share one sync (group commit). ``ship`` is that of the queue, too; with ``acks="shipped"``, all clients of a turn
    share one wait for the store. If the store does not answer in time, they get INTERNAL_ERROR, and the server goes on.
    If another owner has the queue now, clients get INTERNAL_ERROR, and the server ends with ``Fenced``. At most
    ``max_connections`` clients are admitted at a time; one client more gets OUT_OF_MEMORY. ``open_queue`` is called in
    place of ``WorkQueue``, with its arguments, and returns one that is open: a standby takes it over. The other options
    are the queue's.

    ``start`` opens the queue, and ``stop`` closes it: reserved jobs are ready at the next start. In between it is
    ``queue``, and the program may use it too, from any thread. The server itself is not thread-safe.

    >>> import asyncio
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

    def __init__(
        self,
        directory: str | PathLike[str] | None = None,
        *,
        listen: str | Sequence[str] = "127.0.0.1:11300",
        sockets: Sequence[socket.socket] = (),
        sync: float | Literal["always", "never"] = 0.05,
        max_connections: int | None = None,
        segment_bytes: int = 10 << 20,
        ship: str | Ship | Literal[False] | None = None,
        open_queue: Callable[..., WorkQueue] = WorkQueue,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.max_connections = max_connections
        self.commands = Commands(self._figures)
        self.serve_at(self.commands, listen, sockets)
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._clock = clock
        if sync == "always" or getattr(ship, "acks", "disk") == "shipped":
            self.commit = self._sync_if_written
            options = {**options, "group_commit": True}
        self._options = {**options, "sync": sync, "segment_bytes": segment_bytes, "ship": ship}
        self._system = platform.uname()
        self._hands_over = False
        self._open_queue = open_queue

    def open(self) -> None:
        clock = self._clock if self._clock is not None else LoopClock(self.loop)
        disk_clock = self._clock or SystemClock()
        self.queue = self._open_queue(self._directory, clock=clock, disk_clock=disk_clock, **self._options)
        self.commands.queue = self.queue
        self._opened_at = clock.monotonic()
        self.monotonic = clock.monotonic
        if self.queue.shipping is not None:
            self._look_for_fence()
        self._identity = f"{getpid() & 0xFFFFFFFF:08x}{clock.time_ns() >> 10 & 0xFFFFFFFF:08x}"

    def close(self) -> None:
        queue = getattr(self, "queue", None)  # the start may have failed before it was there
        if queue is not None and self._hands_over and queue.shipping is not None and not queue.closed:
            queue.shipping.hand_over()
        elif queue is not None:
            queue.close()

    def _look_for_fence(self) -> None:
        """Look from time to time whether another owner has the queue: what reserves and peeks do not find out."""
        shipping = self.queue.shipping
        if shipping is None or self.queue.closed:
            return
        if shipping.status().state == "fenced":
            try:
                shipping.flush(0)
            except KestrelError as error:
                self.fail(error)
            return
        self.loop.call_later(LOOK_SECONDS, self._look_for_fence)

    def fail(self, error: BaseException) -> None:
        if self._is_late(error):  # it is on disk here, and is shipped when the store is back
            _logger.warning("clients get INTERNAL_ERROR, because the store does not answer in time: %s", error)
            return
        super().fail(error)
        for connection in list(self.connections):
            connection.give_up(replies.INTERNAL_ERROR)  # a job does not come any more

    def _is_late(self, error: BaseException) -> bool:
        """Whether the store has not answered in time, and no more than that."""
        if self.queue.shipping is None:
            return False

        from kestrelpy.ship import NotShipped  # a server that ships nothing does without it

        return isinstance(error, NotShipped)

    def drain(self) -> None:
        """Refuse puts from now on; all other commands work as before."""
        self.queue.drain()

    def hand_over(self) -> None:
        """End, and let a standby have the jobs at once (``Shipping.hand_over``), if they are shipped."""
        self._hands_over = True
        self.end()

    def on_signals(self) -> Mapping[signal.Signals, Callable[[], object]]:
        return {signal.SIGUSR1: self.drain, signal.SIGUSR2: self.hand_over}

    def _sync_if_written(self) -> None:
        if self.commands.wrote:
            self.commands.wrote = False
            self.queue.sync()

    def figures(self) -> ServerFigures:
        return ServerFigures(len(self.connections), self.commands.counts, jobs=self.queue)

    def _figures(self) -> bytes:
        work = self.queue.stats()
        used = resource.getrusage(resource.RUSAGE_SELF)
        clients = [connection.client for connection in self.connections]
        middle: dict[str, object] = {
            "max-job-size": self.queue.max_job_bytes,
            "current-tubes": work.tubes,
            "current-connections": len(clients),
            "current-producers": sum(client.is_producer for client in clients),
            "current-workers": sum(client.is_worker for client in clients),
            "current-waiting": work.waiting,
            "total-connections": self.connections_ever,
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
