"""A server in a thread with a clock that stands still, and clients that send bytes and want certain bytes back."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kestrelpy.server import QueueServer
from kestrelpy.testing import ManualClock

PATIENCE = 20.0
QUIET = 0.05
"""Seconds in which a server that has something to say would have said it."""

T = TypeVar("T")


class Client:
    """One connection. ``said`` is what it wants to hear."""

    def __init__(self, address: Any) -> None:
        if isinstance(address, str):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(address)
        else:
            self.socket = socket.create_connection(address)
        self.socket.settimeout(PATIENCE)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def ask(self, data: bytes, said: bytes) -> None:
        """Send it; exactly this must come back."""
        self.send(data)
        self.hear(said)

    def hear(self, said: bytes) -> None:
        heard = b""
        while len(heard) < len(said):
            more = self.socket.recv(len(said) - len(heard))
            if not more:
                break
            heard += more
            if not said.startswith(heard):
                self.socket.settimeout(QUIET)  # it is wrong: hear the rest of it, to show it
                with contextlib.suppress(TimeoutError):
                    heard += self.socket.recv(1000)
                break
        assert heard == said

    def line(self) -> bytes:
        heard = b""
        while not heard.endswith(b"\r\n"):
            heard += self.exactly(1)
        return heard

    def exactly(self, size: int) -> bytes:
        heard = b""
        while len(heard) < size:
            more = self.socket.recv(size - len(heard))
            assert more, f"only {heard!r}, and then the end"
            heard += more
        return heard

    def hear_nothing(self) -> None:
        self.socket.settimeout(QUIET)
        with contextlib.suppress(TimeoutError):
            heard = self.socket.recv(1000)
            raise AssertionError(f"heard {heard!r}")
        self.socket.settimeout(PATIENCE)

    def hear_the_end(self) -> None:
        """The other side hangs up."""
        with contextlib.suppress(ConnectionResetError):
            assert self.socket.recv(1000) == b""

    def figures(self, command: bytes) -> dict[str, str]:
        """The YAML that a stats command of beanstalkd brings."""
        self.send(command + b"\r\n")
        head = self.line()
        assert head.startswith(b"OK ")
        body = self.exactly(int(head[3:]) + 2)
        assert body.startswith(b"---\n")
        assert body.endswith(b"\n\r\n")
        return dict(line.split(": ", 1) for line in body[4:-3].decode().split("\n"))

    def hang_up(self) -> None:
        self.socket.close()

    def half_close(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)


class Running:
    """A server, its clock, and its clients."""

    def __init__(self, server: QueueServer, clock: ManualClock) -> None:
        self._server = server
        self.clock = clock
        self._clients: list[Client] = []

    def client(self, place: int = 0) -> Client:
        """A new client, at the first of the server's addresses or at another one."""
        self._clients.append(Client(self._server.addresses[place]))
        return self._clients[-1]

    def clients(self, number: int) -> list[Client]:
        return [self.client() for _ in range(number)]

    def call(self, function: Callable[[], T]) -> T:
        """What it returns, called on the server's thread."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        self._server.loop.call_soon_threadsafe(run)
        return done.result(PATIENCE)

    def advance(self, seconds: float) -> None:
        self.call(lambda: self.clock.advance(seconds))

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until it holds, asked on the server's thread."""
        pause = threading.Event()
        for _ in range(int(PATIENCE / 0.002)):
            if self.call(condition):
                return
            pause.wait(0.002)
        raise AssertionError("it never came true")

    def close(self) -> None:
        for client in self._clients:
            client.hang_up()
