"""The kestrel server as a process under load, killed at random moments again and again: nothing acknowledged is lost.

Producers put into a queue with two fan-outs. One queue is read with open reads that are confirmed, one with plain gets,
one with monitors. A client that is killed in the middle of a plain get does not know what it has lost: so there, as
many items may be missing as such gets were under way.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes.loop_mount import Kind, LoopFileSystem, reason_not_available
from tests.server.kestrel.test_kestrel_command import Process
from tests.support.budget import SEED, Tally, share, takes_long

KILLS = 75
"""For each of the parts below."""
CUTS = 25
"""For each file system."""
OPEN, PLAIN, MONITORED = b"q", b"q+plain", b"q+monitored"
NAMES = (OPEN, PLAIN, MONITORED)


class Line:
    """A connection that reads replies. ``ConnectionError`` once the server is gone."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, timeout=20)
        self._file = self._socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def line(self) -> bytes:
        line = self._file.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError
        return line

    def item(self) -> bytes | None:
        """The item of a ``VALUE ... END``; ``None`` for ``END``."""
        head = self.line()
        if head == b"END\r\n":
            return None
        size = int(head.split()[3])
        data = self._file.read(size + 2)
        if len(data) < size + 2 or self.line() != b"END\r\n":
            raise ConnectionError
        return data[:-2]

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class Book:
    """What clients know."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.number = 0
        self.stored: set[bytes] = set()
        self.sent: set[bytes] = set()
        self.done: dict[bytes, set[bytes]] = {name: set() for name in NAMES}
        self.unsure: dict[bytes, set[bytes]] = {name: set() for name in NAMES}
        self.under_way: Counter[bytes] = Counter()
        self.wrong: list[str] = []

    def next_item(self) -> bytes:
        with self.lock:
            self.number += 1
            item = b"%08d" % self.number + b"x" * (self.number % 50)
            self.sent.add(item)
            return item

    def fetched(self, name: bytes, item: bytes) -> None:
        with self.lock:
            if item in self.done[name]:
                self.wrong.append(f"{name!r}: {item!r} came again")
            if item not in self.sent:
                self.wrong.append(f"{name!r}: {item!r} was never put")


def produce(line: Line, book: Book, rng: random.Random) -> None:
    items = [book.next_item() for _ in range(rng.randint(1, 8))]
    line.send(b"".join(b"set q 0 0 %d\r\n%b\r\n" % (len(item), item) for item in items))
    for item in items:
        if line.line() == b"STORED\r\n":
            book.stored.add(item)


def get_plainly(line: Line, book: Book, rng: random.Random) -> None:
    book.under_way[PLAIN] += 1
    line.send(b"get %b/t=20\r\n" % PLAIN)
    item = line.item()
    book.under_way[PLAIN] -= 1
    if item is not None:
        book.fetched(PLAIN, item)
        book.done[PLAIN].add(item)


def get_and_confirm(line: Line, book: Book, rng: random.Random) -> None:
    line.send(b"get %b/t=20/open\r\n" % OPEN)
    item = line.item()
    if item is None:
        return
    book.fetched(OPEN, item)
    if rng.random() < 0.2:
        line.send(b"get %b/abort\r\n" % OPEN)
        line.item()
        return
    book.unsure[OPEN].add(item)
    line.send(b"get %b/close\r\n" % OPEN)
    if line.item() is None:
        book.unsure[OPEN].discard(item)
        book.done[OPEN].add(item)


def monitor(line: Line, book: Book, rng: random.Random) -> None:
    line.send(b"monitor %b 1 4\r\n" % MONITORED)
    items = []
    while (item := line.item()) is not None:
        book.fetched(MONITORED, item)
        items.append(item)
    if items:
        book.unsure[MONITORED].update(items)
        line.send(b"confirm %b %d\r\n" % (MONITORED, len(items)))
        if line.line() == b"END\r\n":
            book.done[MONITORED].update(items)
            book.unsure[MONITORED].difference_update(items)


def work(address: tuple[str, int], book: Book, step: Callable[[Line, Book, random.Random], None], seed: int) -> None:
    rng = random.Random(seed)
    with contextlib.suppress(OSError, ValueError, IndexError):  # also SERVER_ERROR, where a sync has failed
        line = Line(address)
        with contextlib.closing(line):
            while True:
                step(line, book, rng)


STEPS = (produce, produce, get_plainly, get_and_confirm, get_and_confirm, monitor)


def kill(server: Process) -> None:
    os.kill(server.process.pid, signal.SIGKILL)


def campaign(folder: str, sync: str, count: int, rng: random.Random, end: Callable[[Process], None]) -> Book:
    """Start the server, load it, and end it, again and again; then compare what is left with what is known."""
    book = Book()
    options = ("--dir", folder, "--max-open-reads", "20", "--sync-ms", sync, "--listen", "127.0.0.1:0")
    for number in range(count):
        with Process(*options) as server:
            if not number:
                first = Line(server.addresses[0])
                first.send(b"get q+plain\r\nget q+monitored\r\n")
                assert first.item() is first.item() is None
                first.close()
            threads = [
                threading.Thread(target=work, args=(server.addresses[0], book, step, rng.randrange(1 << 30)))
                for step in STEPS
            ]
            for thread in threads:
                thread.start()
            threading.Event().wait(rng.uniform(0.02, 0.4))
            end(server)
            for thread in threads:
                thread.join()
        assert not book.wrong
    with Process(*options) as server:
        left = {name: drain(server.addresses[0], name) for name in NAMES}
        assert server.end() == (0, "")
    assert len(book.stored) > 30 * count
    for name in NAMES:
        there = set(left[name])
        assert len(there) == len(left[name])
        assert not there & book.done[name], "what was answered comes again"
        assert there <= book.sent
        missing = book.stored - there - book.done[name] - book.unsure[name]
        assert len(missing) <= book.under_way[name], f"{name!r} has lost {sorted(missing)[:10]}"
    return book


@takes_long
@pytest.mark.parametrize("part", range(4))
def test_kills_under_load(part: int, tmp_path: Path, tally: Tally) -> None:
    """KP-2.13: crash: SIGKILL under load loses nothing acknowledged; what was answered does not come again."""
    book = campaign(str(tmp_path), "0" if part % 2 else "100", share(KILLS), random.Random(SEED * 10 + part), kill)
    tally.add("kills of the kestrel server under load", share(KILLS))
    tally.add("items of the kestrel server that survived kills", len(book.stored))


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_power_cuts_under_load(kind: Kind, tmp_path: Path, tally: Tally) -> None:
    """KP-1.5, KP-2.13: crash: a power cut with --sync-ms 0 loses nothing acknowledged, and brings nothing back."""
    reason = reason_not_available(kind)
    if reason is not None:
        pytest.skip(reason)
    with LoopFileSystem(kind, 300, tmp_path) as system:

        def cut(server: Process) -> None:
            system.shut_down()
            kill(server)
            server.process.wait(20)
            system.remount()

        book = campaign(f"{system.path}/queues", "0", share(CUTS), random.Random(SEED), cut)
    tally.add("power cuts of the kestrel server under load", share(CUTS))
    tally.add("items of the kestrel server that survived power cuts", len(book.stored))


def drain(address: tuple[str, int], name: bytes) -> list[bytes]:
    line = Line(address)
    items: list[bytes] = []
    with contextlib.closing(line):
        while True:
            line.send(b"get %b\r\n" % name)
            item = line.item()
            if item is None:
                return items
            items.append(item)
