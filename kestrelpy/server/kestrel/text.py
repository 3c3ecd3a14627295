"""``Text``: the text protocol of kestrel: what each command does, and its reply.

Replies are lines: ``+number``, ``-message``, ``:item``, ``*`` for no item. No error ends the connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kestrelpy.server._connection import Connection
from kestrelpy.server.kestrel.client import Client
from kestrelpy.server.kestrel.figures import VERSION
from kestrelpy.server.kestrel.operations import Forbidden, TooManyReads
from kestrelpy.server.kestrel.protocol import KestrelProtocol, log_error
from kestrelpy.server.kestrel.storage import TooManyQueues
from kestrelpy.server.kestrel.text_parser import TextParser

if TYPE_CHECKING:
    from kestrelpy import Item

__all__ = ["Text"]

NOTHING = b"*\n"
DONE = b"+0\n"


def _found(item: Item) -> bytes:
    return b":%b\n" % item.data


class TextClient(Client):
    """A client of the text protocol. Of the ``put`` that is being read: how many items were ``taken``, and ``refusal``,
    its reply if it is refused; then the rest of its items are dropped.
    """

    taken = 0
    refusal: bytes | None = None


class Text(KestrelProtocol):
    """The commands of the text protocol on the queues of one server."""

    no_room = b"-Too many connections.\n"
    failure = b"-Internal error.\n"
    ends_at_failure = True

    def methods(self) -> dict[str, Callable[..., bytes | None]]:
        return {
            "put": self._put,
            "get": self._get,
            "peek": self._peek,
            "monitor": self._monitor,
            "confirm": self._confirm,
            "flush": self._flush,
            "delete": self._delete,
            "flush_expired": self._flush_expired,
            "flush_all": self._flush_all,
            "flush_all_expired": self._flush_all_expired,
            "reload": self._reload,
            "status": self._status,
            "shutdown": self._shutdown,
            "version": self._version,
            "quit": self._quit,
            "refused": self._refused,
        }

    def parser(self) -> TextParser:
        return TextParser(self._operations.queues.largest_item, self._operations.server.config.server.max_line_bytes)

    def client(self, connection: Connection, parser: TextParser) -> TextClient:
        return TextClient(connection, parser)

    def refusal(self, _client: TextClient, error: Exception) -> bytes:
        if isinstance(error, Forbidden):
            return f"-Server not available for operation {error.original_name}\n".encode("ascii")
        if isinstance(error, TooManyReads):
            limit = self._operations.server.config.server.max_open_transactions
            return b"-Too many open transactions; limit=%d\n" % limit
        if isinstance(error, TooManyQueues):
            return b"-Too many queues.\n"
        log_error(error)
        return self.failure

    def _refused(self, _client: TextClient, message: bytes) -> bytes:
        return b"-%b\n" % message

    # -- items ---------------------------------------------------------------------------------------------------------

    def _put(
        self, client: TextClient, name: bytes, expiry_ms: int | None, items: list[bytes], is_last: bool
    ) -> bytes | None:
        if client.refusal is None:
            try:
                expires_at_ms = self._operations.in_ms(expiry_ms) if expiry_ms else None
                for item in items:
                    client.taken += self._operations.put(name, item, expires_at_ms)
            except Exception as error:
                client.refusal = self.refusal(client, error)
        if not is_last:
            return None
        reply = client.refusal or b"+%d\n" % client.taken
        client.taken, client.refusal = 0, None
        return reply

    def _get(self, client: TextClient, name: bytes, timeout_ms: int) -> bytes | None:
        self._operations.confirm_all(client, name)
        return self._operations.get(client, name, timeout_ms / 1000, _found, NOTHING, opens=True)

    def _peek(self, client: TextClient, name: bytes, timeout_ms: int) -> bytes | None:
        self._operations.confirm_all(client, name)
        return self._operations.peek(client, name, timeout_ms / 1000, _found, NOTHING)

    def _monitor(self, client: TextClient, name: bytes, timeout_ms: int) -> bytes | None:
        self._operations.confirm_all(client, name)
        return self._operations.monitor(client, name, timeout_ms / 1000, None, _found, NOTHING)

    def _confirm(self, client: TextClient, name: bytes, count: int) -> bytes:
        if self._operations.confirm_oldest(client, name, count):
            return b"+%d\n" % count
        return b"-Not that many transactions open.\n"

    # -- whole queues, and the server ----------------------------------------------------------------------------------

    def _flush(self, _client: TextClient, name: bytes) -> bytes:
        self._operations.flush(name)
        return DONE

    def _delete(self, _client: TextClient, name: bytes) -> bytes:
        self._operations.delete(name)
        return DONE

    def _flush_expired(self, client: TextClient, name: bytes) -> None:
        client.connection.long_command = self._operations.flush_expired(name, lambda count: b"+%d\n" % count)

    def _flush_all(self, client: TextClient) -> None:
        client.connection.long_command = self._operations.flush_all(DONE)

    def _flush_all_expired(self, client: TextClient) -> None:
        client.connection.long_command = self._operations.flush_all_expired(lambda count: b"+%d\n" % count)

    def _reload(self, _client: TextClient) -> bytes:
        return DONE if self._operations.server.reload() else b"-The configuration is wrong; see the log.\n"

    def _status(self, _client: TextClient, word: bytes | None = None) -> bytes:
        server = self._operations.server
        if word is None:
            return b":%b\n" % server.status.shown.upper().encode("ascii")
        if word.lower() == b"down":
            return b"-Status forbidden.\n"
        return DONE if server.set_status(word) else b"-Unknown status.\n"

    def _shutdown(self, _client: TextClient) -> bytes:
        return DONE if self._operations.server.shut_down_soon() else b"-Shutdown is not allowed.\n"

    def _version(self, _client: TextClient) -> bytes:
        return f":{VERSION}\n".encode("ascii")

    def _quit(self, client: TextClient) -> bytes:
        client.connection.finish()
        return DONE
