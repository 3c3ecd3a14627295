"""``KestrelProtocol``: what the three protocols of the server have in common, and how an error becomes a reply."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kestrelpy import KestrelError
from kestrelpy.server._connection import QueueProtocol

if TYPE_CHECKING:
    from kestrelpy.server.kestrel.client import Client
    from kestrelpy.server.kestrel.operations import Operations

__all__ = ["KestrelProtocol"]

_logger = logging.getLogger("kestrelpy.server")


class KestrelProtocol(QueueProtocol):
    """A protocol on the queues of one server. ``methods``: what does a command, by its word."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._do = self.methods()

    def methods(self) -> dict[str, Callable[..., bytes | None]]:
        """What does each command, by its word."""
        raise NotImplementedError

    def perform(self, client: Any, command: tuple[Any, ...]) -> bytes | None:
        try:
            return self._do[command[0]](client, *command[1:])
        except Exception as error:
            return self._refuse(client, error)

    def proceed(self, client: Any, long_command: Iterator[bytes | None]) -> bytes | None:
        try:
            return next(long_command)
        except Exception as error:
            return self._refuse(client, error)

    def _refuse(self, client: Client, error: Exception) -> bytes:
        reply = self.refusal(client, error)
        if self.ends(error):
            client.connection.finish()
        return reply

    def refusal(self, client: Any, error: Exception) -> bytes:
        """The reply to a command that has raised this."""
        raise NotImplementedError

    def ends(self, error: Exception) -> bool:  # noqa: ARG002 - for those that derive from it
        """Whether the connection is closed after ``refusal``."""
        return False

    def leave(self, client: Any) -> None:
        client.give_back()


def log_error(error: Exception) -> None:
    """A client gets an error that is no refusal. With a traceback, if it was not foreseen."""
    is_known = isinstance(error, OSError | KestrelError)
    _logger.error("a client gets an error: %s", error, exc_info=None if is_known else error)
