"""``Thrift``: kestrel's thrift service: what each method does, and its reply.

Open reads have numbers, one count for the server. They may be confirmed from any connection, outlive their own, and end
after their time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from kestrelpy.server._connection import Connection
from kestrelpy.server.kestrel import thrift_codec as codec
from kestrelpy.server.kestrel.client import Client
from kestrelpy.server.kestrel.figures import VERSION
from kestrelpy.server.kestrel.line import Consumer
from kestrelpy.server.kestrel.names import is_legal
from kestrelpy.server.kestrel.operations import Forbidden
from kestrelpy.server.kestrel.protocol import KestrelProtocol, log_error
from kestrelpy.server.kestrel.storage import TooManyQueues
from kestrelpy.server.kestrel.text_parser import ILLEGAL_NAME

if TYPE_CHECKING:
    from kestrelpy import Item
    from kestrelpy.server.kestrel.queue import OpenRead, ServedQueue

__all__ = ["Thrift"]

STATUSES = ("", "quiescent", "readonly", "up")
"""By the numbers of the enum Status; ``writeavoid`` has none, and is shown as 0."""

PUTS_A_SLICE = 500
"""How many items of one call are put before other clients are served."""
MOST_ITEMS = 10_000
"""The reply to one ``get`` has at most so many items ..."""
MOST_BYTES = 16 << 20
"""... and ends with the item that brings it to so many bytes."""

MOST_SHOWN = 200
"""Of the name of an unknown method, the message has so many bytes: the name may have 16 MiB."""


class ThriftClient(Client):
    """A client of the thrift service. ``call``: the method and the number of the call that is done, or waits."""

    call: codec.Command = ("", 0)


class Refused(Exception):
    """The call is refused; the client gets the message."""


class ThriftGet(Consumer):
    """A ``get`` that waits until it has ``most`` items, or its time is over. Its items are open reads meanwhile."""

    def __init__(self, client: Client, queue: ServedQueue, reply: Callable[[list[Item]], bytes], most: int) -> None:
        super().__init__(client.connection, queue, lambda _item: b"", b"")
        self._reply = reply
        self._most = most
        self._held: list[Item] = []
        self._held_bytes = 0

    def take(self, item: Item) -> None:
        self._held.append(item)
        self._held_bytes += len(item.data)
        if self.is_full and self.is_in_line:
            self.dismiss()

    @property
    def has_items(self) -> bool:
        return bool(self._held)

    @property
    def is_full(self) -> bool:
        return len(self._held) >= self._most or self._held_bytes >= MOST_BYTES

    def run_out(self) -> None:
        if self._held:
            self.dismiss()
        else:
            super().run_out()

    def last_reply(self) -> bytes:
        held, self._held = self._held, []
        for _ in held:
            self.queue.queues.count_hit()
        return self._reply(held)

    def fail(self, error: Exception) -> None:
        self._give_back()
        super().fail(error)

    def hang_up(self) -> bytes | None:
        """The client sends no more, and is probably gone: it takes nothing with it."""
        self._give_back()
        return super().hang_up()

    def cancel(self) -> None:
        """The client is gone: it takes nothing with it."""
        super().cancel()
        self._give_back()

    def _give_back(self) -> None:
        held, self._held = self._held, []
        for item in held:
            self.queue.give_back(item)


class Thrift(KestrelProtocol):
    """The methods of the thrift service on the queues of one server."""

    ends_at_failure = True

    def methods(self) -> dict[str, Callable[..., bytes | None]]:
        return {
            "put": self._put,
            "get": self._get,
            "confirm": self._confirm,
            "abort": self._abort,
            "peek": self._peek,
            "flush_queue": self._flush_queue,
            "flush_all_queues": self._flush_all_queues,
            "delete_queue": self._delete_queue,
            "current_status": self._current_status,
            "set_status": self._set_status,
            "get_version": self._get_version,
            "unknown-method": self._unknown_method,
            "malformed": self._malformed,
        }

    def parser(self) -> codec.ThriftParser:
        return codec.ThriftParser()

    def client(self, connection: Connection, parser: codec.ThriftParser) -> ThriftClient:
        return ThriftClient(connection, parser)

    def leave(self, _client: Client) -> None:
        """Its open reads stay open until their time is over."""

    def perform(self, client: ThriftClient, command: codec.Command) -> bytes | None:
        client.call = command[:2]
        return super().perform(client, command)

    def refusal(self, client: ThriftClient, error: Exception) -> bytes:
        method, number = client.call
        if isinstance(error, Forbidden):
            message = f"Server not available for operation {error.original_name}"
        elif isinstance(error, Refused):
            message = str(error)
        elif isinstance(error, TooManyQueues):
            message = "Too many queues."
        else:
            log_error(error)
            message = "Internal error."
        return codec.exception_reply(method.encode("ascii"), number, codec.INTERNAL_ERROR, message)

    def _malformed(self, client: ThriftClient) -> None:
        client.connection.finish()

    def _unknown_method(self, _client: Client, number: int, name: bytes) -> bytes:
        shown = name[:MOST_SHOWN].decode(errors="replace")
        return codec.exception_reply(name, number, codec.UNKNOWN_METHOD, f"Invalid method name: {shown}")

    # -- items ---------------------------------------------------------------------------------------------------------

    def _put(self, client: ThriftClient, number: int, name: bytes, items: list[bytes], expiration_ms: int) -> None:
        _check_name(name)
        client.connection.long_command = self._put_all(number, name, items, expiration_ms)

    def _put_all(self, number: int, name: bytes, items: list[bytes], expiration_ms: int) -> Iterator[bytes | None]:
        operations = self._operations
        expires_at_ms = operations.in_ms(expiration_ms) if expiration_ms else None
        for taken, item in enumerate(items):
            if taken and not taken % PUTS_A_SLICE:
                yield None
            if not operations.put(name, item, expires_at_ms):
                yield codec.i32_reply(b"put", number, taken)
                return
        yield codec.i32_reply(b"put", number, len(items))

    def _get(
        self, client: Client, number: int, name: bytes, max_items: int, timeout_ms: int, auto_abort_ms: int
    ) -> bytes | None:
        _check_name(name)
        operations = self._operations
        operations.check_allowed("get")
        queues = operations.queues
        queues.gets += 1
        queue = queues.get(name)
        most = min(max_items, MOST_ITEMS)
        if auto_abort_ms and queue is not None:
            most = min(most, operations.server.config.server.max_open_transactions - client.reads.count(queue))
        if queue is None or most <= 0:
            queues.misses += 1
            return codec.items_reply(number, [])
        wait = ThriftGet(client, queue, partial(self._given, client, queue, number, auto_abort_ms), most)
        for _ in range(most):
            item = queues.next_item(queue)
            if item is None:
                break
            wait.take(item)
            if wait.is_full:
                break
        if wait.is_full or timeout_ms <= 0 or client.connection.is_half_closed:
            if not wait.has_items:
                queues.misses += 1
            return wait.last_reply()
        wait.enter(timeout_ms / 1000)
        return None

    def _given(self, client: Client, queue: ServedQueue, number: int, auto_abort_ms: int, items: list[Item]) -> bytes:
        """The reply with these items, which are open reads from now on, or done with at the end of the turn."""
        queues = self._operations.queues
        found = []
        for item in items:
            read_number = 0
            if auto_abort_ms:
                queues.last_number = read_number = queues.last_number + 1
                seconds = max(0, auto_abort_ms) / 1000
                queues.numbered[read_number] = queue.open_read(client.reads, item, read_number, seconds)
            else:
                queues.take_plain(queue, item, client.connection)
            found.append((item.data, read_number))
        return codec.items_reply(number, found)

    def _confirm(self, _client: Client, number: int, _name: bytes, ids: list[int]) -> bytes:
        reads = self._reads(ids)
        for read in reads:
            read.queue.confirm(read)
        return codec.i32_reply(b"confirm", number, len(reads))

    def _abort(self, _client: Client, number: int, _name: bytes, ids: list[int]) -> bytes:
        reads = self._reads(ids)
        for read in reads:
            read.queue.take_back(read)
        return codec.i32_reply(b"abort", number, len(reads))

    def _reads(self, ids: list[int]) -> list[OpenRead]:
        """Those of these reads that are open: the number counts, and not the queue's name."""
        numbered = self._operations.queues.numbered
        return [numbered[each] for each in ids if each in numbered]

    def _peek(self, _client: Client, number: int, name: bytes) -> bytes:
        _check_name(name)
        operations = self._operations
        operations.check_allowed("peek")
        queues = operations.queues
        queues.peeks += 1
        queue = queues.get(name)
        item = None if queue is None else queue.peek()
        if item is None:
            queues.misses += 1
        else:
            queues.hits += 1
        if queue is None:
            return codec.queue_info_reply(number, codec.QueueInfo(None, 0, 0, 0, 0, 0, 0))
        journal = queues.journal_of(queue).queue
        info = codec.QueueInfo(
            head_item=None if item is None else item.data,
            items=queue.items,
            bytes=queue.bytes,
            journal_bytes=0 if journal is None else journal.stats().journal_bytes,
            age=queue.age_ms,
            waiters=len(queue.line),
            open_transactions=len(queue.reads),
        )
        return codec.queue_info_reply(number, info)

    # -- whole queues, and the server ----------------------------------------------------------------------------------

    def _flush_queue(self, _client: Client, number: int, name: bytes) -> bytes:
        _check_name(name)
        self._operations.flush(name)
        return codec.void_reply(b"flush_queue", number)

    def _flush_all_queues(self, client: ThriftClient, number: int) -> None:
        reply = codec.void_reply(b"flush_all_queues", number)
        client.connection.long_command = self._operations.flush_all(reply)

    def _delete_queue(self, _client: Client, number: int, name: bytes) -> bytes:
        _check_name(name)
        self._operations.delete(name)
        return codec.void_reply(b"delete_queue", number)

    def _current_status(self, _client: Client, number: int) -> bytes:
        shown = self._operations.server.status.shown
        return codec.i32_reply(b"current_status", number, STATUSES.index(shown) if shown in STATUSES else 0)

    def _set_status(self, _client: Client, number: int, status: int) -> bytes:
        if not 0 < status < len(STATUSES):
            raise Refused("Unknown status.")
        self._operations.server.set_status(STATUSES[status].encode("ascii"))
        return codec.void_reply(b"set_status", number)

    def _get_version(self, _client: Client, number: int) -> bytes:
        return codec.string_reply(b"get_version", number, VERSION.encode("ascii"))


def _check_name(name: bytes) -> None:
    if not is_legal(name):
        raise Refused(ILLEGAL_NAME.decode("ascii"))
