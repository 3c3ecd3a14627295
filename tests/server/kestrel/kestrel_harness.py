"""A kestrel server in a thread with a clock that stands still, and its clients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kestrelpy.server import KestrelServer, serve_in_thread
from kestrelpy.server.kestrel.client import Client as ServedClient
from kestrelpy.testing import ManualClock
from tests.server.harness import Client, Running

START_S = 1_700_000_000


class Kestrel(Running):
    """A kestrel server, its queues, its clock, and its clients."""

    def __init__(self, server: KestrelServer, clock: ManualClock) -> None:
        super().__init__(server, clock)
        self.server = server

    def waiting(self, name: bytes) -> int:
        """How many wait in the line of this queue."""
        queue = self.server.queues.find(name)
        return 0 if queue is None else len(queue.line)

    def wait_for_waiting(self, name: bytes, number: int = 1) -> None:
        self.until(lambda: self.waiting(name) == number)

    def stats(self) -> dict[str, str]:
        """What ``stats`` says, on a connection of its own."""
        client = Client(self.server.addresses[0])
        client.send(b"stats\r\n")
        found = {}
        while (line := client.line()) != b"END\r\n":
            word, key, value = line.rstrip(b"\r\n").split(b" ", 2)
            assert word == b"STAT"
            found[key.decode("latin-1")] = value.decode("latin-1")
        client.hang_up()
        return found

    def check(self) -> None:
        """The invariants of the queues, of the connections and of the status."""
        self.call(self.server.queues._check)
        acks = self.server.queues.storage.acks
        if acks is not None:
            self.call(acks._check)
        self.call(self.server.status._check)
        for connection in self.call(lambda: list(self.server.connections)):
            self.call(connection._check)
            client = self.call(lambda: connection.client)  # noqa: B023 - called at once
            if isinstance(client, ServedClient):
                self.call(client.parser._check)


@contextlib.contextmanager
def kestrel(directory: Any = None, config: Any = "", **options: Any) -> Iterator[Kestrel]:
    """A kestrel server on a manual clock."""
    clock = options.pop("clock", None) or ManualClock(START_S * 1000)
    with serve_in_thread(directory, protocol="kestrel", config=config, clock=clock, **options) as server:
        it = Kestrel(server, clock)
        try:
            yield it
            it.check()
        finally:
            it.close()
