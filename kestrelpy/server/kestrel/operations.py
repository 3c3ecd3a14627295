"""``Operations``: what every protocol of the server does in the same way: who may do what, and opening and ending
reads.

A protocol turns its commands into calls here, and what they return into its own replies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from kestrelpy.server.kestrel import figures
from kestrelpy.server.kestrel.line import Get, Monitor

if TYPE_CHECKING:
    from kestrelpy import Item
    from kestrelpy.server._connection import Connection
    from kestrelpy.server.kestrel.client import Client
    from kestrelpy.server.kestrel.config import Config
    from kestrelpy.server.kestrel.queue import ServedQueue
    from kestrelpy.server.kestrel.queues import Queues
    from kestrelpy.server.kestrel.status import ServerStatus

__all__ = ["Forbidden", "Operations", "TooManyReads"]

NEVER_BEFORE = 1_000_000
"""An expiry below this is a number of seconds from now, as in memcache; else it is seconds since 1970."""
LAST_MS = 1 << 50
"""The last time at which an item can expire: in the year 37,648."""
QUEUES_A_SLICE = 100
"""How many queues a long command does before other clients are served."""

_ORIGINAL_NAMES = {
    "set": "setItem",
    "get": "getItem",
    "peek": "getItem",
    "monitor": "monitorUntil",
    "flush": "flush",
    "delete": "delete",
    "flush_all": "flushAll",
    "flush_expired": "flushExpired",
    "flush_all_expired": "flushExpired",
}
"""What the original calls the operations that a status forbids."""

_WRITES = {"set", "delete", "flush", "flush_all", "flush_expired", "flush_all_expired"}


class Forbidden(Exception):
    """The status, or the number of connections, forbids it. ``original_name``: what kestrel calls the operation."""

    def __init__(self, operation: str) -> None:
        super().__init__(operation)
        self.original_name = _ORIGINAL_NAMES[operation]


class TooManyReads(Exception):
    """The client has as many open reads of the queue as it may have, or must confirm one first."""


class CommandHost(Protocol):
    """The part of the server that its clients' commands use."""

    queues: Queues
    status: ServerStatus
    config: Config
    monotonic: Callable[[], float]
    started_at: float
    connections: dict[Connection, None]
    connections_ever: int
    bytes_read: int
    bytes_written: int

    def reload(self) -> bool:
        """Read the configuration again. False if it is wrong."""

    def set_status(self, word: bytes) -> bool:
        """Change the status. False if there is no such status."""

    def shut_down_soon(self) -> bool:
        """End the server shortly. False if clients may not do that."""


class Operations:
    """What clients do, on the queues of one server."""

    def __init__(self, server: CommandHost) -> None:
        self.server = server

    @property
    def queues(self) -> Queues:
        return self.server.queues

    def check_allowed(self, operation: str) -> None:
        """Raise ``Forbidden`` if the status or the number of connections forbids it."""
        server = self.server
        if not server.status.allows(operation):
            raise Forbidden(operation)
        limits = server.config.server
        limit = limits.connection_limit_refuse_writes if operation in _WRITES else limits.connection_limit_refuse_reads
        if limit is not None and len(server.connections) > limit:
            raise Forbidden(operation)

    def expires_at_ms(self, expiry: int) -> int | None:
        """When an item of memcache's ``expiry`` expires."""
        if expiry == 0:
            return None
        if expiry >= NEVER_BEFORE:
            return min(expiry * 1000, LAST_MS)
        return self.in_ms(expiry * 1000)

    def in_ms(self, milliseconds: int) -> int:
        """The time so long from now, or some time in the past, in milliseconds since 1970."""
        return min(max(0, self.queues.clock.time_ns() // 1_000_000 + milliseconds), LAST_MS)

    def put(self, name: bytes, data: bytes, expires_at_ms: int | None) -> bool:
        """Put an item. False if it was refused. Raises ``Forbidden``, ``TooManyQueues``, ``OSError``."""
        self.check_allowed("set")
        queues = self.queues
        queues.sets += 1
        return queues.add(name, data, expires_at_ms)

    # -- getting -------------------------------------------------------------------------------------------------------

    def get(
        self,
        client: Client,
        name: bytes,
        seconds: float,
        found: Callable[[Item], bytes],
        nothing: bytes,
        *,
        opens: bool,
    ) -> bytes | None:
        """The next item as a reply; ``None`` if the client waits for it. Raises as ``check_allowed``, and
        ``TooManyReads``.
        """
        self.check_allowed("get")
        queues = self.queues
        queues.gets += 1
        queue = queues.get(name)
        if queue is None:
            queues.misses += 1
            return nothing
        open_now = client.reads.count(queue)
        if open_now >= self.server.config.server.max_open_transactions if opens else open_now:
            raise TooManyReads
        item = queues.next_item(queue)
        if item is not None:
            queues.hits += 1
            return self._given(client, queue, found, item, opens=opens)
        if seconds <= 0 or client.connection.is_half_closed:
            queues.misses += 1
            return nothing
        given = partial(self._given, client, queue, found, opens=opens)
        Get(client.connection, queue, given, nothing).enter(seconds)
        return None

    def _given(
        self, client: Client, queue: ServedQueue, found: Callable[[Item], bytes], item: Item, *, opens: bool
    ) -> bytes:
        if opens:
            queue.open_read(client.reads, item)
        else:
            self.queues.take_plain(queue, item, client.connection)
        return found(item)

    def peek(
        self, client: Client, name: bytes, seconds: float, found: Callable[[Item], bytes], nothing: bytes
    ) -> bytes | None:
        """As ``get``; the item stays."""
        self.check_allowed("peek")
        queues = self.queues
        queues.peeks += 1
        queue = queues.get(name)
        item = None if queue is None else queue.peek()
        if item is not None:
            queues.hits += 1
            return found(item)
        if queue is None or seconds <= 0 or client.connection.is_half_closed:
            queues.misses += 1
            return nothing
        Get(client.connection, queue, found, nothing, peeks=True).enter(seconds)
        return None

    def monitor(
        self,
        client: Client,
        name: bytes,
        seconds: float,
        limit: int | None,
        found: Callable[[Item], bytes],
        nothing: bytes,
    ) -> bytes | None:
        """Open reads as items come, at most ``limit`` of them; ``nothing`` is the last reply."""
        self.check_allowed("monitor")
        queues = self.queues
        queue = queues.get(name)
        most = self.server.config.server.max_open_transactions
        left = most if limit is None else limit
        if queue is None or left == 0 or seconds <= 0 or client.connection.is_half_closed:
            return nothing

        def may_go_on() -> bool:
            return client.reads.count(queue) < most and self.server.status.allows("monitor")

        if not may_go_on():
            return nothing
        given = partial(self._given, client, queue, found, opens=True)
        Monitor(client.connection, queue, given, nothing, left=left, may_go_on=may_go_on).enter(seconds)
        queues.wake(queue)
        return None

    # -- open reads ----------------------------------------------------------------------------------------------------

    def confirm_oldest(self, client: Client, name: bytes, count: int) -> bool:
        """Confirm the oldest open reads of this client. False, and nothing is done, if it has fewer."""
        queue = self.queues.by_name.get(name)  # also one that an alias hides by now
        if queue is None or count < 1 or client.reads.count(queue) < count:
            return False
        for read in client.reads.oldest(queue, count):
            queue.confirm(read)
        self.queues.rounds.schedule()
        return True

    def confirm_all(self, client: Client, name: bytes) -> None:
        """Confirm all open reads that this client has of the queue."""
        queue = self.queues.by_name.get(name)
        if queue is not None and client.reads:
            self.confirm_oldest(client, name, client.reads.count(queue))

    def abort_oldest(self, client: Client, name: bytes) -> None:
        """The oldest open read of this client comes back; no effect if it has none."""
        queue = self.queues.by_name.get(name)
        if queue is not None:
            for read in client.reads.oldest(queue):
                queue.take_back(read)

    # -- whole queues --------------------------------------------------------------------------------------------------

    def flush(self, name: bytes) -> None:
        self.check_allowed("flush")
        queue = self.queues.find(name)
        if queue is not None:
            queue.flush()

    def flush_expired(self, name: bytes, reply: Callable[[int], bytes]) -> Iterator[bytes | None]:
        """A long command: drop expired items of a queue, then the reply with their number."""
        self.check_allowed("flush_expired")
        queue = self.queues.find(name)
        count = 0
        for dropped in () if queue is None else queue.flush_expired():
            count += dropped
            yield None
        yield reply(count)

    def delete(self, name: bytes) -> None:
        self.check_allowed("delete")
        queue = self.queues.find(name)
        if queue is not None:
            self.queues.delete(queue)

    def flush_all(self, reply: bytes) -> Iterator[bytes | None]:
        """A long command: flush all queues, then ``reply``."""
        self.check_allowed("flush_all")
        for some in self._slices():
            for queue in some:
                queue.flush()
                if queue.config.sync_journal == 0:  # it has synced
                    yield None
            yield None
        yield reply

    def flush_all_expired(self, reply: Callable[[int], bytes]) -> Iterator[bytes | None]:
        """A long command: drop expired items of all queues, then the reply with their number."""
        self.check_allowed("flush_all_expired")
        count = 0
        for some in self._slices():
            for queue in some:
                for dropped in queue.flush_expired():
                    count += dropped
                    if dropped:
                        yield None
            yield None
        yield reply(count)

    def _slices(self) -> Iterator[list[ServedQueue]]:
        """All queues, a few at a time, without those that are deleted meanwhile."""
        queues = self.queues
        left = iter(list(queues.by_name.values()))
        while some := list(islice(left, QUEUES_A_SLICE)):
            yield [queue for queue in some if queues.by_name.get(queue.name) is queue]

    def stats(self, line: Callable[[str, object], bytes], end: bytes) -> Iterator[bytes | None]:
        """A long command: the figures of the server, of each queue and of each alias."""
        queues = self.queues
        parts = [line(key, value) for key, value in figures.of_server(self.server, queues)]
        for some in self._slices():
            for queue in some:
                name, journal = queue.name.decode("latin-1"), queues.journal_of(queue)
                parts += [line(f"queue_{name}_{key}", value) for key, value in figures.of_queue(queue, journal)]
            yield None
        for alias in queues.aliases.values():
            name = alias.name.decode("latin-1")
            parts += [line(f"queue_{name}_{key}", value) for key, value in figures.of_alias(alias)]
        yield b"".join([*parts, end])

    def dump_stats(self, names: list[bytes], end: bytes) -> Iterator[bytes | None]:
        """A long command: the figures of these queues; of all, if none is named."""
        return self._dump(names, end, lambda queue: figures.of_queue(queue, self.queues.journal_of(queue)))

    def dump_config(self, names: list[bytes], end: bytes) -> Iterator[bytes | None]:
        """A long command: the configuration of these queues; of all, if none is named."""
        return self._dump(names, end, lambda queue: list(queue.config.dump()))

    def _dump(
        self, names: list[bytes], end: bytes, of: Callable[[ServedQueue], list[tuple[str, object]]]
    ) -> Iterator[bytes | None]:
        left = iter(names or list(self.queues.by_name))
        parts: list[bytes] = []
        while some := list(islice(left, QUEUES_A_SLICE)):
            for name in some:
                queue = self.queues.find(name)
                parts += figures.dump(name, None if queue is None else of(queue))
            yield None
        yield b"".join([*parts, end])
