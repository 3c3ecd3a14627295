"""``Client``: what the server keeps of one client, whatever its protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kestrelpy.server.kestrel.queue import Reads

if TYPE_CHECKING:
    from kestrelpy.server._connection import Connection

__all__ = ["Client"]


class Client:
    """One client: its connection, its parser and its open reads."""

    def __init__(self, connection: Connection, parser: Any) -> None:
        self.connection = connection
        self.parser = parser
        self.reads = Reads()

    def give_back(self) -> None:
        """The client is gone: its open reads come back."""
        for read in self.reads.all():
            read.queue.take_back(read)
