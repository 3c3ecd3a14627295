"""Both servers in an event loop that is not asyncio's own: uvloop, which many web servers run on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kestrelpy.server import BeanstalkServer, KestrelServer

uvloop = pytest.importorskip("uvloop", reason="uvloop is not installed")

PUT: dict[type[Any], bytes] = {BeanstalkServer: b"put 0 0 60 3\r\none\r\n", KestrelServer: b"set q 0 0 3\r\none\r\n"}
TAKE: dict[type[Any], bytes] = {BeanstalkServer: b"reserve\r\n", KestrelServer: b"get q/t=10000/open\r\n"}
TAKEN: dict[type[Any], bytes] = {
    BeanstalkServer: b"RESERVED 1 3\r\none\r\n",
    KestrelServer: b"VALUE q 0 3\r\none\r\nEND\r\n",
}
SYNCED: dict[type[Any], dict[str, Any]] = {BeanstalkServer: {"sync": "always"}, KestrelServer: {"sync_journal": 0}}
both = pytest.mark.parametrize("kind", [BeanstalkServer, KestrelServer])


@contextlib.contextmanager
def served(kind: type[Any], folder: Path | None = None) -> Iterator[Any]:
    server = kind(folder, listen="127.0.0.1:0", **(SYNCED[kind] if folder else {}))
    started, stop = threading.Event(), asyncio.Event()

    async def main() -> None:
        async with server:
            started.set()
            await stop.wait()

    def serve() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=serve)
    thread.start()
    assert started.wait(10)
    try:
        yield server
    finally:
        server.loop.call_soon_threadsafe(stop.set)
        thread.join()


def client(server: Any) -> socket.socket:
    return socket.create_connection(server.addresses[0], timeout=10)


def hear(one: socket.socket, what: bytes) -> None:
    heard = b""
    while len(heard) < len(what) and (more := one.recv(len(what) - len(heard))):
        heard += more
    assert heard == what


@both
def test_an_item_outlives_its_client_and_its_server(kind: type[Any], tmp_path: Path) -> None:
    with served(kind, tmp_path) as server:
        with client(server) as one, client(server) as other:
            one.sendall(TAKE[kind])
            other.sendall(PUT[kind])
            hear(one, TAKEN[kind])
        with client(server) as one:
            one.sendall(TAKE[kind])
            hear(one, TAKEN[kind])
    with served(kind, tmp_path) as server, client(server) as one:
        one.sendall(TAKE[kind])
        one.shutdown(socket.SHUT_WR)
        hear(one, TAKEN[kind])
        assert one.recv(1) == b""


@both
def test_clients_of_a_turn_share_a_sync(kind: type[Any], tmp_path: Path) -> None:
    with served(kind, tmp_path) as server, contextlib.ExitStack() as rest:
        clients = [rest.enter_context(client(server)) for _ in range(20)]
        for one in clients:
            one.sendall(b"stats\r\n")
            assert one.recv(1 << 20)
        turns = 0
        commit = server.rounds._commit

        def count() -> None:
            nonlocal turns
            turns += 1
            commit()

        server.rounds._commit = count
        all_sent = threading.Event()
        server.loop.call_soon_threadsafe(all_sent.wait, 10)  # so that all of them are there in the next turn
        for one in clients:
            one.sendall(PUT[kind])
        all_sent.set()
        for one in clients:
            assert one.recv(100) in (b"STORED\r\n", *(b"INSERTED %d\r\n" % number for number in range(21)))
        assert 1 <= turns <= 5


@both
def test_a_client_that_does_not_read_is_not_read_from(kind: type[Any]) -> None:
    with served(kind) as server, client(server) as one, client(server) as other:
        one.settimeout(0.3)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 64 << 20:
                sent += one.send(b"stats\r\n" * 1000)
        assert sent < 64 << 20
        other.sendall(PUT[kind])
        assert other.recv(100) in (b"STORED\r\n", b"INSERTED 1\r\n")
