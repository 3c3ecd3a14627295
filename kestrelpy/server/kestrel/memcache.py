"""``Memcache``: the memcache protocol of kestrel: what each command does, and its reply.

Section by section as in docs/kestrel-protocol.md. An error ends in a word of the protocol, never in a traceback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kestrelpy.server._connection import Connection
from kestrelpy.server.kestrel.client import Client
from kestrelpy.server.kestrel.figures import VERSION
from kestrelpy.server.kestrel.memcache_parser import MemcacheParser
from kestrelpy.server.kestrel.operations import Forbidden, TooManyReads
from kestrelpy.server.kestrel.protocol import KestrelProtocol, log_error
from kestrelpy.server.kestrel.storage import TooManyQueues

if TYPE_CHECKING:
    from kestrelpy import Item

__all__ = ["Memcache"]

END = b"END\r\n"
STORED = b"STORED\r\n"
NOT_STORED = b"NOT_STORED\r\n"
DELETED = b"DELETED\r\n"
ERROR = b"ERROR\r\n"
CLIENT_ERROR = b"CLIENT_ERROR\r\n"
SERVER_ERROR = b"SERVER_ERROR\r\n"


class Memcache(KestrelProtocol):
    """The commands of the memcache protocol on the queues of one server."""

    no_room = SERVER_ERROR
    failure = SERVER_ERROR
    ends_at_failure = True

    def methods(self) -> dict[str, Callable[..., bytes | None]]:
        return {
            "set": self._set,
            "get": self._get,
            "unwanted": self._unwanted,
            "monitor": self._monitor,
            "confirm": self._confirm,
            "delete": self._delete,
            "flush": self._flush,
            "flush_all": self._flush_all,
            "flush_expired": self._flush_expired,
            "flush_all_expired": self._flush_all_expired,
            "stats": self._stats,
            "dump_stats": self._dump_stats,
            "dump_config": self._dump_config,
            "status": self._status,
            "version": self._version,
            "reload": self._reload,
            "quit": self._quit,
            "shutdown": self._shutdown,
            "client-error": self._client_error,
        }

    def parser(self) -> MemcacheParser:
        return MemcacheParser(
            self._operations.queues.largest_item, self._operations.server.config.server.max_line_bytes
        )

    def client(self, connection: Connection, parser: MemcacheParser) -> Client:
        return Client(connection, parser)

    def refusal(self, _client: Client, error: Exception) -> bytes:
        if isinstance(error, TooManyReads):
            return ERROR
        if not isinstance(error, Forbidden | TooManyQueues):
            log_error(error)
        return SERVER_ERROR

    def ends(self, error: Exception) -> bool:
        return not isinstance(error, TooManyQueues)

    def _client_error(self, client: Client, ends: bool) -> bytes:
        if ends:
            client.connection.finish()
        return CLIENT_ERROR

    # -- items ---------------------------------------------------------------------------------------------------------

    def _set(self, _client: Client, name: bytes, expiry: int, body: bytes, noreply: bool) -> bytes | None:
        operations = self._operations
        try:
            taken = operations.put(name, body, operations.expires_at_ms(expiry) if expiry else None)
        except TooManyQueues:  # the connection goes on, so one who wants no reply must get none
            if not noreply:
                raise
        if noreply:
            return None
        return STORED if taken else NOT_STORED

    def _unwanted(self, _client: Client, name: bytes, noreply: bool) -> bytes | None:
        self._operations.check_allowed("set")
        self._operations.queues.sets += 1
        try:
            self._operations.queues.get(name)  # it is mentioned all the same
        except TooManyQueues:  # as above
            if not noreply:
                raise
        return None if noreply else NOT_STORED

    def _get(
        self, client: Client, name: bytes, timeout_ms: int, opens: bool, close: bool, abort: bool, peek: bool, ids: bool
    ) -> bytes | None:
        operations = self._operations
        if abort:
            operations.abort_oldest(client, name)
            return END
        if close:
            operations.confirm_oldest(client, name, 1)
            if not opens:
                return END

        def found(item: Item) -> bytes:
            data = item.data
            if ids:
                return b"VALUE %b 0 %d %d\r\n%b\r\nEND\r\n" % (name, len(data), item.id, data)
            return b"VALUE %b 0 %d\r\n%b\r\nEND\r\n" % (name, len(data), data)

        seconds = timeout_ms / 1000
        if peek:
            return operations.peek(client, name, seconds, found, END)
        return operations.get(client, name, seconds, found, END, opens=opens)

    def _monitor(self, client: Client, name: bytes, seconds: int, limit: int | None) -> bytes | None:
        def found(item: Item) -> bytes:
            return b"VALUE %b 0 %d\r\n%b\r\nEND\r\n" % (name, len(item.data), item.data)

        return self._operations.monitor(client, name, seconds, limit, found, END)

    def _confirm(self, client: Client, name: bytes, count: int) -> bytes:
        return END if self._operations.confirm_oldest(client, name, count) else ERROR

    # -- whole queues --------------------------------------------------------------------------------------------------

    def _delete(self, _client: Client, name: bytes, noreply: bool) -> bytes | None:
        self._operations.delete(name)
        return None if noreply else DELETED

    def _flush(self, _client: Client, name: bytes, noreply: bool) -> bytes | None:
        self._operations.flush(name)
        return None if noreply else END

    def _flush_all(self, client: Client, noreply: bool) -> None:
        client.connection.long_command = self._operations.flush_all(b"" if noreply else b"Flushed all queues.\r\n")

    def _flush_expired(self, client: Client, name: bytes) -> None:
        client.connection.long_command = self._operations.flush_expired(name, lambda count: b"%d\r\n" % count)

    def _flush_all_expired(self, client: Client) -> None:
        client.connection.long_command = self._operations.flush_all_expired(lambda count: b"%d\r\n" % count)

    # -- figures -------------------------------------------------------------------------------------------------------

    def _stats(self, client: Client) -> None:
        def line(key: str, value: object) -> bytes:
            return f"STAT {key} {value}\r\n".encode("latin-1")

        client.connection.long_command = self._operations.stats(line, END)

    def _dump_stats(self, client: Client, names: list[bytes]) -> None:
        client.connection.long_command = self._operations.dump_stats(names, END)

    def _dump_config(self, client: Client, names: list[bytes]) -> None:
        client.connection.long_command = self._operations.dump_config(names, END)

    def _version(self, _client: Client) -> bytes:
        return f"VERSION {VERSION}\r\n".encode("ascii")

    # -- the server ----------------------------------------------------------------------------------------------------

    def _status(self, client: Client, word: bytes | None = None) -> bytes:
        server = self._operations.server
        if word is None:
            return server.status.shown.upper().encode("ascii") + b"\r\n"
        if not server.set_status(word):
            client.connection.finish()
            return CLIENT_ERROR
        return END

    def _reload(self, _client: Client) -> bytes:
        return b"Reloaded config.\r\n" if self._operations.server.reload() else SERVER_ERROR

    def _quit(self, client: Client) -> None:
        client.connection.finish()

    def _shutdown(self, client: Client) -> bytes | None:
        client.connection.finish()
        return None if self._operations.server.shut_down_soon() else SERVER_ERROR
