"""A beanstalk server in a thread with a clock that stands still, and its clients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kestrelpy.server import BeanstalkServer, serve_in_thread
from kestrelpy.testing import ManualClock
from tests.server.harness import PATIENCE, Client, Running

__all__ = ["PATIENCE", "Client", "Served", "served"]


class Served(Running):
    """A beanstalk server, its queue, its clock, and its clients."""

    def __init__(self, server: BeanstalkServer, clock: ManualClock) -> None:
        super().__init__(server, clock)
        self.server = server
        self.queue = server.queue

    def wait_for_waiting(self, number: int = 1) -> None:
        self.until(lambda: self.queue.stats().waiting == number)

    def check(self) -> None:
        """The invariants of the queue and of all connections."""

        def check_connections() -> None:
            """In one turn of the loop: each of them may be closed in the next."""
            for connection in self.server.connections:
                connection._check()
                connection.client._check()

        self.call(self.queue._check)
        self.call(check_connections)


@contextlib.contextmanager
def served(directory: Any = None, **options: Any) -> Iterator[Served]:
    """A server on a manual clock."""
    clock = options.pop("clock", None) or ManualClock(1_700_000_000_000)
    with serve_in_thread(directory, clock=clock, **options) as server:
        it = Served(server, clock)
        try:
            yield it
            it.check()
        finally:
            it.close()
