"""Our server and the real beanstalkd under the same load, and the work queue in-process: ``python -m bench.beanstalk``.

Workloads:
    never, 50ms, 0ms   a server with a directory and -F, -f 50 or -f 0. Over the loopback, bodies of 100 bytes: puts;
                       reserve and delete. On 1 connection and on 64, each waiting for its answer, and on 1 connection
                       with 32 commands under way.
    together           a million jobs that fall due in one second: how long another client waits meanwhile.
    in-process         put, reserve and delete, a job at a time: the work queue, huey's SQLite storage, persist-queue
                       with acknowledgements.
    live, due, old     a million jobs in the work queue (``bench/jobs_at_scale.py``): opening them and their memory, how
                       long others wait when all of them fall due, and what the disk holds because of a year-old one.

The load comes from a process of its own (``bench/beanstalk_load.py``), both servers are measured in turn in each round,
in folders of one file system.

How not to misread this: figures are microseconds per operation as the client sees it, loopback and client included;
"times" is how many times longer the other server takes than ours. "busy" is the share of its time that the load
generator spent working. Where that is near 1, the generator is what was measured, and a faster server would look the
same. Replies with -f 50 and -F come before the data is on disk, those with -f 0 after it; beanstalkd with -f 0 syncs at
each command, ours once for all commands that came meanwhile: that is what the 64 connections show, and a disk whose
sync is free would not show it.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from bench import jobs_at_scale, measure, program
from bench.goals import Figure, Goal
from bench.measure import Contender, Figures, LeftOut, Workload

OURS, THEIRS = "kestrelpy", "beanstalkd"
SYNCS = {"never": ["-F"], "50ms": ["-f", "50"], "0ms": ["-f", "0"]}
SHAPES = {"1 connection": (1, 1, 20_000), "64 connections": (64, 1, 64_000), "pipelined": (1, 32, 100_000)}
"""Connections, commands under way on each, operations."""
SYNCED_SHARE = 0.1
"""Of the operations where each is on disk before it is answered."""
START_SECONDS = 30.0
MILLION = 1_000_000
JOBS = 20_000
BODY = b"x" * 100


class Server:
    """A server on a free port, its jobs in a folder."""

    def __init__(self, name: str, folder: Path, options: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [*_program(name), *self._arguments(folder), *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except ConnectionRefusedError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.close()
                    raise LeftOut(f"{name} does not start here") from None
                time.sleep(0.01)

    def _arguments(self, folder: Path) -> list[str]:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        return ["-l", "127.0.0.1", "-p", str(self.port), "-b", str(folder)]

    def load(self, **specification: Any) -> dict[str, float]:
        """What the load generator measures on it."""
        specification["port"] = self.port
        command = [sys.executable, "-m", "bench.beanstalk_load", json.dumps(specification)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=Path(__file__).parent.parent)
        figures: dict[str, float] = json.loads(done.stdout)
        return figures

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _program(name: str) -> list[str]:
    if name == OURS:
        return [sys.executable, "-m", "kestrelpy", "serve", "beanstalk"]
    path = shutil.which(name)
    if path is None:
        raise LeftOut(f"{name} is not installed")
    return [path]


def serve(name: str, sync: str, folder: Path, scale: float) -> Figures:
    """All shapes of load on one server."""
    server = Server(name, folder, SYNCS[sync])
    figures: Figures = {}
    try:
        for shape, (connections, depth, count) in SHAPES.items():
            share = scale * (SYNCED_SHARE if sync == "0ms" else 1)
            count = max(connections * depth, int(count * share))
            for what, text in (("put", "put"), ("cycle", "reserve, delete")):
                found = server.load(kind="run", what=what, connections=connections, depth=depth, count=count)
                figures[f"{shape}, {text}"] = found["microseconds"]
                figures[f"{shape}, {text}: busy"] = found["busy"]
    finally:
        server.close()
    return figures


def together(name: str, folder: Path, scale: float) -> Figures:
    """The million."""
    server = Server(name, folder, SYNCS["never"])
    try:
        found = server.load(kind="together", count=max(1000, int(MILLION * scale)))
    finally:
        server.close()
    return {
        "longest wait, ms": found["longest_ms"],
        "middle wait, ms": found["middle_ms"],
        "all ready after, s": found["took_seconds"],
    }


# -- in-process ------------------------------------------------------------------------------------------------------


def _per_job(work: Callable[[int], None], count: int) -> Figures:
    return {"put, reserve, delete": measure.per_item(lambda: work(count), count)}


def our_cycle(folder: Path, scale: float) -> Figures:
    """The work queue."""
    from kestrelpy.work import WorkQueue

    with WorkQueue(folder, sync="never") as queue, queue.session() as session:
        put, reserve = queue.put, session.reserve

        def work(count: int) -> None:
            for _ in range(count):
                put(BODY)
                reserve().delete()

        return _per_job(work, max(1, int(JOBS * 5 * scale)))


def huey_cycle(folder: Path, scale: float) -> Figures:
    """huey's SQLite storage, which has no reservations: what is taken out is gone."""
    storage = import_module("huey.storage").SqliteStorage(name="bench", filename=str(folder / "huey.db"))

    def work(count: int) -> None:
        for _ in range(count):
            storage.enqueue(BODY)
            storage.dequeue()

    try:
        return _per_job(work, max(1, int(JOBS * 0.2 * scale)))
    finally:
        storage.close()


def persist_queue_cycle(folder: Path, scale: float) -> Figures:
    """persist-queue's SQLite queue with acknowledgements."""
    queue = import_module("persistqueue").SQLiteAckQueue(str(folder / "queue"))

    def work(count: int) -> None:
        for _ in range(count):
            queue.put(BODY)
            queue.ack(queue.get())

    try:
        return _per_job(work, max(1, int(JOBS * 0.1 * scale)))
    finally:
        queue.close()


# -- the whole -------------------------------------------------------------------------------------------------------

WORKLOADS = (
    *(
        Workload(
            sync,
            f"a server with {' '.join(options)}",
            "us each; busy: share of the load generator's time",
            tuple(Contender(name, partial(serve, name, sync)) for name in (OURS, THEIRS)),
        )
        for sync, options in SYNCS.items()
    ),
    Workload(
        "together",
        "a million jobs due in one second, and another client",
        "",
        tuple(Contender(name, partial(together, name)) for name in (OURS, THEIRS)),
        max_repeats=3,
        warm_up=False,
    ),
    Workload(
        "in-process",
        "a job at a time, nothing synced by ours and huey, persist-queue as it does by itself",
        "us each",
        (
            Contender(OURS, our_cycle),
            Contender("huey sqlite", huey_cycle),
            Contender("persist-queue acks", persist_queue_cycle),
        ),
    ),
    *(
        Workload(name, title, "", (Contender(OURS, run),), max_repeats=3, warm_up=False)
        for name, title, run in (
            ("live", "opening a million live jobs", jobs_at_scale.live),
            ("due", "a million jobs fall due in-process", jobs_at_scale.due),
            ("old", "a year-old job among a million short ones", jobs_at_scale.old),
        )
    ),
)
CYCLE = "put, reserve, delete"
GOALS = (
    *(
        Goal(
            f"{what}, 1 connection, not pipelined, -f 50: beanstalkd's time over ours",
            Figure("50ms", THEIRS, f"1 connection, {what}"),
            Figure("50ms", OURS, f"1 connection, {what}"),
            at_least=0.5,
        )
        for what in ("put", "reserve, delete")
    ),
    Goal(
        "put, 64 connections, each on disk before its answer: the same",
        Figure("0ms", THEIRS, "64 connections, put"),
        Figure("0ms", OURS, "64 connections, put"),
        at_least=1.5,
    ),
    Goal("ms that a client waits while a million fall due", Figure("together", OURS, "longest wait, ms"), at_most=50),
    Goal("us for a job in-process", Figure("in-process", OURS, CYCLE), at_most=10),
    Goal(
        "in-process: persist-queue's time over ours",
        Figure("in-process", "persist-queue acks", CYCLE),
        Figure("in-process", OURS, CYCLE),
        at_least=10,
    ),
    Goal("s to open a million live jobs", Figure("live", OURS, "opening, s"), at_most=5),
    Goal("bytes a live job takes beside its body", Figure("live", OURS, "bytes a job beside its body"), at_most=600),
    Goal(
        "ms that others wait in-process while a million fall due", Figure("due", OURS, "longest wait, ms"), at_most=50
    ),
    Goal("MiB on disk with a year-old job: four segments", Figure("old", OURS, "most on disk, MiB"), at_most=64),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what ``argv`` asks for; returns the exit status."""
    return program.run("beanstalk", __doc__, WORKLOADS, GOALS, argv)


if __name__ == "__main__":
    sys.exit(main())
