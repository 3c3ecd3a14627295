"""The kestrel server beside our beanstalk server, beanstalkd and redis on the same work: ``python -m bench.kestrel``.

Workloads:
    never, 100ms, 0ms   a server that never syncs, that syncs now and then (redis: appendfsync everysec), and whose
                        replies mean "on disk" (redis: appendfsync always). Bodies of 100 bytes over the loopback: puts;
                        gets; gets with open and close (beanstalk: reserve and delete; redis: none). On 1 connection and
                        on 64, each waiting for its answer, and on 1 connection with 32 requests under way. redis as a
                        list (LPUSH, RPOP) and as a stream (XADD, XREADGROUP with NOACK).
    fan-out             puts into a queue with 0, 1, 4, 16 and 64 fan-outs, pipelined, nothing synced; then gets by a
                        connection for each fan-out, a few requests under way on each.
    backlog             the start of the server with a backlog of 10 GB, and with none; ms until it listens.
    queues              1,000 queues with an item each: the start, and a put and a get on each.

How not to misread this: figures are microseconds per request as the client sees it, loopback and client included.
"busy" is the share of its time that the load generator spent working: where that is near 1, the generator is what was
measured. A get of redis's list is gone when it is answered, as a plain get of kestrel; redis answers from memory, and
keeps all of its data there.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import program
from bench.goals import Figure, Goal
from bench.measure import Contender, Figures, LeftOut, Workload

SIZE = 100
BODY = "x" * SIZE
SHAPES = {"1 connection": (1, 1, 10_000), "64 connections": (64, 1, 32_000), "pipelined": (1, 32, 64_000)}
"""Connections, requests under way on each, requests."""
SYNCED_SHARE = 0.2
FANOUTS = (0, 1, 4, 16, 64)
BACKLOG_BYTES = 10_000_000_000
QUEUES = 1000
KESTREL, BEANSTALK, BEANSTALKD, LIST, STREAM = "kestrel", "beanstalk", "beanstalkd", "redis list", "redis stream"
OPTIONS: dict[str, dict[str, list[str]]] = {
    "never": {"ours": ["--no-sync"], "theirs": ["-F"], "redis": ["--appendfsync", "no"]},
    "100ms": {"ours": ["--sync-ms", "100"], "theirs": ["-f", "100"], "redis": ["--appendfsync", "everysec"]},
    "0ms": {"ours": ["--sync-ms", "0"], "theirs": ["-f", "0"], "redis": ["--appendfsync", "always"]},
}


def resp(*words: str) -> str:
    """A command of redis."""
    return f"*{len(words)}\r\n" + "".join(f"${len(word)}\r\n{word}\r\n" for word in words)


REQUESTS: dict[str, dict[str, tuple[str, str, str]]] = {
    # what: what is sent first, the request, the mark in its reply
    KESTREL: {
        "put": ("", f"set q 0 0 {SIZE}\r\n{BODY}\r\n", "STORED"),
        "get": ("", "get q\r\n", "END"),
        "open, close": ("", "get q/close/open\r\n", "END"),
    },
    BEANSTALK: {
        "put": ("", f"put 0 0 3600 {SIZE}\r\n{BODY}\r\n", "INSERTED"),
        "open, close": ("", "", ""),  # its own generator: a delete needs the id
    },
    LIST: {
        "put": ("", resp("LPUSH", "q", BODY), ":"),
        "get": ("", resp("RPOP", "q"), "$"),
    },
    STREAM: {
        "put": ("", resp("XADD", "q", "*", "d", BODY), "$"),
        "get": ("", resp("XREADGROUP", "GROUP", "g", "c", "COUNT", "1", "NOACK", "STREAMS", "q", ">"), "xxx\r\n"),
    },
}


class Served:
    """A server on a free port, its data in a folder. ``started``: seconds until it listened."""

    def __init__(self, name: str, folder: Path, options: Sequence[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [*_command(name, folder, self.port), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                break
            except ConnectionRefusedError:
                if self._process.poll() is not None or time.perf_counter() - began > 60:
                    self.close()
                    raise LeftOut(f"{name} does not start here") from None
                time.sleep(0.002)
        self.started = time.perf_counter() - began

    def load(self, **specification: Any) -> dict[str, float]:
        """What the load generator measures on it."""
        module = "bench.beanstalk_load" if "what" in specification else "bench.kestrel_load"
        command = [sys.executable, "-m", module, json.dumps({**specification, "port": self.port})]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=Path(__file__).parent.parent)
        figures: dict[str, float] = json.loads(done.stdout)
        return figures

    def ask(self, request: bytes, mark: bytes, count: int = 1) -> None:
        """Send it, and wait for so many marks."""
        with socket.create_connection(("127.0.0.1", self.port)) as one:
            one.sendall(request)
            heard = b""
            while heard.count(mark) < count:
                heard = heard[-len(mark) :] + one.recv(1 << 20) if count == 1 else heard + one.recv(1 << 20)

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _command(name: str, folder: Path, port: int) -> list[str]:
    if name in (KESTREL, BEANSTALK):
        serve = [sys.executable, "-m", "kestrelpy", "serve", name]
        return [*serve, "--dir", str(folder), "--listen", f"127.0.0.1:{port}"]
    program = "beanstalkd" if name == BEANSTALKD else "redis-server"
    path = shutil.which(program)
    if path is None:
        raise LeftOut(f"{program} is not installed")
    if name == BEANSTALKD:
        return [path, "-l", "127.0.0.1", "-p", str(port), "-b", str(folder)]
    return [path, "--port", str(port), "--dir", str(folder), "--appendonly", "yes", "--save", ""]


def serve(name: str, sync: str, folder: Path, scale: float) -> Figures:
    """All shapes of load on one server."""
    kind = "ours" if name in (KESTREL, BEANSTALK) else "theirs" if name == BEANSTALKD else "redis"
    server = Served(name, folder, OPTIONS[sync][kind])
    figures: Figures = {}
    try:
        if name == STREAM:
            server.ask(resp("XGROUP", "CREATE", "q", "g", "$", "MKSTREAM").encode(), b"+OK")
        for shape, (connections, depth, count) in SHAPES.items():
            share = scale * (SYNCED_SHARE if sync == "0ms" else 1)
            count = max(connections * depth, int(count * share))
            spread = {"connections": connections, "depth": depth, "count": count}
            for what, (first, request, mark) in REQUESTS[BEANSTALK if name == BEANSTALKD else name].items():
                if request:
                    if what == "open, close":  # the gets before have emptied it
                        server.load(first="", request=REQUESTS[KESTREL]["put"][1], mark="STORED", **spread)
                    found = server.load(first=first, request=request, mark=mark, **spread)
                else:
                    found = server.load(kind="run", what="cycle", **spread)
                figures[f"{shape}, {what}"] = found["microseconds"]
                figures[f"{shape}, {what}: busy"] = found["busy"]
    finally:
        server.close()
    return figures


def fan_out(folder: Path, scale: float) -> Figures:
    """Puts beside fan-outs that nobody reads; then a client for each fan-out reads them."""
    server = Served(KESTREL, folder, OPTIONS["never"]["ours"])
    figures: Figures = {}
    try:
        for number in FANOUTS:
            queue = f"q{number}"
            for child in range(number):
                server.ask(f"get {queue}+c{child}\r\n".encode(), b"END")
            count = max(64, int(100_000 * scale))
            request = f"set {queue} 0 0 {SIZE}\r\n{BODY}\r\n"
            found = server.load(first="", request=request, mark="STORED", connections=1, depth=32, count=count)
            figures[f"put, {number} fan-outs"] = found["microseconds"]
            if number:
                share = count // number * number
                read = f"get {queue}+c{{n}}\r\n"
                spread = {"connections": number, "depth": 32 if number == 1 else 8, "count": share}
                figures[f"get, {number} fan-outs"] = server.load(first="", request=read, mark="END", **spread)[
                    "microseconds"
                ]
    finally:
        server.close()
    return figures


def backlog(folder: Path, scale: float) -> Figures:
    """The start of the server, without and with a backlog."""
    server = Served(KESTREL, folder / "empty", OPTIONS["never"]["ours"])
    server.close()
    figures: Figures = {"start with nothing, ms": server.started * 1000}
    full = folder / "full"
    server = Served(KESTREL, full, OPTIONS["never"]["ours"])
    body = b"x" * 100_000
    put = b"set q 0 0 %d\r\n%b\r\n" % (len(body), body)
    with socket.create_connection(("127.0.0.1", server.port)) as one:
        for _ in range(max(1, int(BACKLOG_BYTES * scale / len(body) / 10))):
            one.sendall(put * 10)
            heard = b""
            while heard.count(b"\n") < 10:
                heard += one.recv(1000)
    server.close()
    server = Served(KESTREL, full, OPTIONS["never"]["ours"])
    figures["start with the backlog, ms"] = server.started * 1000
    began = time.perf_counter()
    server.ask(b"get q\r\n", b"END")
    figures["first get after it, ms"] = (time.perf_counter() - began) * 1000
    server.close()
    return figures


def queues(folder: Path, scale: float) -> Figures:
    """A thousand queues."""
    count = max(10, int(QUEUES * scale))
    server = Served(KESTREL, folder, OPTIONS["never"]["ours"])
    figures: Figures = {}
    for what, line in (("put", "set q{0} 0 0 1\r\nx\r\n"), ("put again", "set q{0} 0 0 1\r\nx\r\n")):
        began = time.perf_counter()
        server.ask("".join(line.format(number) for number in range(count)).encode(), b"STORED", count)
        figures[f"{what} into each, us"] = (time.perf_counter() - began) / count * 1e6
    server.close()
    server = Served(KESTREL, folder, OPTIONS["never"]["ours"])
    figures["start, ms"] = server.started * 1000
    began = time.perf_counter()
    server.ask("".join(f"get q{number}\r\n" for number in range(count)).encode(), b"END", count)
    figures["get from each, us"] = (time.perf_counter() - began) / count * 1e6
    server.close()
    return figures


WORKLOADS = (
    *(
        Workload(
            sync,
            f"servers: {', '.join(' '.join(each) for each in options.values())}",
            "us each; busy: share of the load generator's time",
            tuple(
                Contender(name, partial(serve, name, sync)) for name in (KESTREL, BEANSTALK, BEANSTALKD, LIST, STREAM)
            ),
        )
        for sync, options in OPTIONS.items()
    ),
    Workload("fan-out", "puts beside fan-outs", "us each", (Contender(KESTREL, fan_out),)),
    Workload("backlog", "10 GB", "", (Contender(KESTREL, backlog),), max_repeats=1, warm_up=False),
    Workload("queues", "1,000 queues", "", (Contender(KESTREL, queues),), max_repeats=3, warm_up=False),
)
GOALS = (
    *(
        Goal(
            f"{ours}, pipelined, no sync: the beanstalk server's time over ours",
            Figure("never", BEANSTALK, f"pipelined, {theirs}"),
            Figure("never", KESTREL, f"pipelined, {ours}"),
            at_least=0.8,
        )
        for ours, theirs in (("put", "put"), ("get", "open, close"), ("open, close", "open, close"))
    ),
    *(
        Goal(
            f"{what}, 64 connections, on disk before the answer: redis's time over ours",
            Figure("0ms", LIST, f"64 connections, {what}"),
            Figure("0ms", KESTREL, f"64 connections, {what}"),
            at_least=1.0,
        )
        for what in ("put", "get")
    ),
    Goal(
        "put with 16 fan-outs over put with none",
        Figure("fan-out", KESTREL, "put, 16 fan-outs"),
        Figure("fan-out", KESTREL, "put, 0 fan-outs"),
        at_most=1.3,
    ),
    Goal("ms to start with 10 GB", Figure("backlog", KESTREL, "start with the backlog, ms"), at_most=500),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what ``argv`` asks for; returns the exit status."""
    return program.run("kestrel", __doc__, WORKLOADS, GOALS, argv)


if __name__ == "__main__":
    sys.exit(main())
