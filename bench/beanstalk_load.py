"""Load on a server with the beanstalkd protocol, from a process of its own: ``python -m bench.beanstalk_load SPEC``.

Raw sockets, bytes that are made beforehand, answers that are counted and not read: so that it is the server that one
waits for. SPEC is a JSON object; figures and the share of the time that this process was busy are printed as JSON. Near
1, that share says that the figure is this program's, not the server's.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from collections.abc import Callable

BODY = b"x" * 100
PUT = b"put 0 0 3600 %d\r\n%b\r\n" % (len(BODY), BODY)
RESERVE = b"reserve\r\n"
RESERVED = b"RESERVED "
READ_BYTES = 1 << 18
TUBE_OF_PROBE = b"probe"


class Client:
    """One connection that repeats one thing: puts, or reserves and deletes; ``depth`` of them at a time."""

    def __init__(self, port: int, what: str, depth: int) -> None:
        self.socket = connect(port)
        self.depth = depth
        self.left = 0
        self._pending = 0
        self._rest = b""
        self._step: Callable[[bytes], None] = self._put_step if what == "put" else self._cycle_step
        self._first = PUT if what == "put" else RESERVE

    def begin(self, count: int) -> None:
        """Start on so many."""
        self.left = count
        self._send(self._first)

    def _send(self, command: bytes) -> None:
        self._pending = min(self.depth, self.left)
        self.socket.sendall(command * self._pending)

    def step(self) -> None:
        """There is an answer to read."""
        data = self.socket.recv(READ_BYTES)
        if not data:
            raise ConnectionError("the server has hung up")
        self._step(data)

    def _put_step(self, data: bytes) -> None:
        done = data.count(b"\n")
        self._pending -= done
        self.left -= done
        if not self._pending and self.left:
            self._send(PUT)

    def _cycle_step(self, data: bytes) -> None:
        if data[0] == _D and not self._rest:  # DELETED: a job has no such line, its body is all of one letter
            done = data.count(b"\n")
            self._pending -= done
            self.left -= done
            if not self._pending and self.left:
                self._send(RESERVE)
            return
        data = self._rest + data
        if data.count(b"\n") < 2 * self._pending:
            self._rest = data
            return
        self._rest = b""
        lines = data.split(b"\r\n")
        self.socket.sendall(b"".join([b"delete %b\r\n" % line.split()[1] for line in lines[: 2 * self._pending : 2]]))


_D = ord("D")


def connect(port: int) -> socket.socket:
    """A connection without delays."""
    made = socket.create_connection(("127.0.0.1", port))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def run(port: int, what: str, connections: int, depth: int, count: int) -> dict[str, float]:
    """Do ``count`` of something over so many connections: microseconds of each, and how busy this process was."""
    clients = [Client(port, what, depth) for _ in range(connections)]
    by_descriptor = {client.socket.fileno(): client for client in clients}
    poll = select.epoll()
    for descriptor in by_descriptor:
        poll.register(descriptor, select.EPOLLIN)
    left = connections
    began, busy = time.perf_counter(), time.process_time()
    for client in clients:
        client.begin(count // connections)
    while left:
        for descriptor, _ in poll.poll():
            client = by_descriptor[descriptor]
            client.step()
            if not client.left:
                poll.unregister(descriptor)
                left -= 1
    elapsed, busy = time.perf_counter() - began, time.process_time() - busy
    poll.close()
    for client in clients:
        client.socket.close()
    return {"microseconds": elapsed / (count // connections * connections) * 1e6, "busy": busy / elapsed}


# -- many jobs that fall due at once ---------------------------------------------------------------------------------


def together(port: int, count: int) -> dict[str, float]:
    """Put ``count`` jobs that are all due in one second, and cycle with another client until they are ready.

    The longest and the middle wait of that client for an answer, in milliseconds, from two seconds before.
    """
    due = _fill(port, count)
    probe, looker = connect(port), connect(port)
    _ask(probe, b"use %b\r\n" % TUBE_OF_PROBE)
    _ask(probe, b"watch %b\r\n" % TUBE_OF_PROBE)
    _ask(probe, b"ignore default\r\n")
    waits: list[float] = []
    next_look = due + 1.0
    while True:
        began = time.perf_counter()
        _ask(probe, PUT)
        middle = time.perf_counter()
        job = _ask(probe, RESERVE, 2).split()[1]
        end = time.perf_counter()
        _ask(probe, b"delete %b\r\n" % job)
        if time.monotonic() > due - 2.0:
            waits += [middle - began, end - middle, time.perf_counter() - end]
        if time.monotonic() > next_look:
            if b"current-jobs-delayed: 0\n" in _ask(looker, b"stats-tube default\r\n", 14):
                break
            next_look = time.monotonic() + 0.5
    waits.sort()
    for one in (probe, looker):
        one.close()
    took = time.monotonic() - due
    return {"longest_ms": waits[-1] * 1e3, "middle_ms": waits[len(waits) // 2] * 1e3, "took_seconds": took}


def _fill(port: int, count: int, batch: int = 500) -> float:
    """Put them; when they are due, by the monotonic clock: as far off as the time that a sample takes makes it."""
    filler = connect(port)
    began = time.monotonic()
    sample = min(count, 20 * batch)
    _ask(filler, b"use sample\r\n")
    for _ in range(sample // batch):
        _ask(filler, _delayed(3600) * batch, batch)
    _ask(filler, b"use default\r\n")
    due = time.monotonic() + 5 + 1.5 * (time.monotonic() - began) * count / sample
    for done in range(0, count, batch):
        delay = due - time.monotonic()
        if delay < 1:
            raise RuntimeError("it became slower while it was filled: the jobs would not be due at once")
        _ask(filler, _delayed(int(delay)) * min(batch, count - done), min(batch, count - done))
    filler.close()
    return due


def _delayed(seconds: int) -> bytes:
    return b"put 0 %d 3600 %d\r\n%b\r\n" % (seconds, len(BODY), BODY)


def _ask(client: socket.socket, command: bytes, lines: int = 1) -> bytes:
    """What a server answers, so many lines of it at least."""
    client.sendall(command)
    answer = b""
    while answer.count(b"\n") < lines:
        data = client.recv(READ_BYTES)
        if not data:
            raise ConnectionError("the server has hung up")
        answer += data
    return answer


def main(argv: list[str]) -> int:
    """Do what the specification says, and print the figures."""
    specification = json.loads(argv[0])
    kind = specification.pop("kind")
    print(json.dumps(together(**specification) if kind == "together" else run(**specification)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
