"""SIGKILL at any moment of processes with a relay of one name, and of the owner of the queue that they move jobs into.

Jobs are put all the while, some in transactions that are rolled back. Before and after each kill the batch that the
table shows is noted: it must have the same jobs as long as it is there. At last each committed job is in the queue
once, no other one is, and each batch that was noted stands in one piece.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import sqlalchemy
from sqlalchemy.pool import NullPool

from kestrelpy import JournaledQueue, QueueLocked, scan
from kestrelpy.inbox import pending, take_in
from kestrelpy.outbox import Outbox
from tests.processes.programs import as_program, rounds

LEASE = 0.1
NAME = "the relay that is killed"
pause = threading.Event().wait
QUERY = "SELECT relay_batch, id FROM kestrel_jobs WHERE relay_batch IS NOT NULL ORDER BY id"


def engine_of(url: str) -> sqlalchemy.Engine:
    patience = {"timeout": 30} if url.startswith("sqlite") else {}
    engine = sqlalchemy.create_engine(url, poolclass=NullPool, connect_args=patience)
    if patience:

        @sqlalchemy.event.listens_for(engine, "connect")
        def _make_quick(connection: Any, _: Any) -> None:
            connection.execute("PRAGMA synchronous = OFF")

    return engine


def outbox_of(url: str, folder: str, *, deletes: bool) -> Outbox:
    outbox = Outbox(engine_of(url), lease=LEASE)
    outbox.add_relay("events", folder, "log", name=NAME, batch=20, delete=deletes)
    return outbox


def mover(url: str, folder: str, deletes: bool) -> None:
    (relay,) = outbox_of(url, folder, deletes=deletes).core.relays
    while True:
        if not relay.step():
            pause(0.001)


def owner(folder: str) -> None:
    while True:
        with (
            contextlib.suppress(QueueLocked),
            JournaledQueue(folder, "log", sync="never", segment_bytes=1 << 16, inbox_interval=0.002) as queue,
        ):
            while True:
                queue.put(b"own")
                pause(0.001)


def start(work: Callable[..., None], *arguments: Any) -> int:
    """Another process."""
    pid = os.fork()
    if not pid:
        try:
            work(*arguments)
        except BaseException as error:  # to be seen by who runs this
            print(f"{work.__name__}: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    return pid


def end(pid: int) -> None:
    """Kill it, which must be what ends it."""
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
        raise AssertionError("it had ended by itself")


class Putter:
    """Puts jobs, each with its number as payload, and looks at what the table says of batches."""

    def __init__(self, outbox: Outbox, engine: sqlalchemy.Engine, choose: random.Random) -> None:
        self._outbox = outbox
        self._engine = engine
        self._choose = choose
        self.numbers: dict[int, int] = {}
        """By id: the payload."""
        self.batches: dict[int, list[int]] = {}
        """By number: the ids of a batch that was noted."""
        self._next = 0

    def put(self) -> None:
        count = self._choose.randrange(1, 40)
        payloads = list(range(self._next, self._next + count))
        self._next += count
        is_rolled_back = self._choose.random() < 0.2
        with contextlib.suppress(ZeroDivisionError), self._outbox.begin() as connection:
            jobs = self._outbox.put_many(connection, "events", payloads)
            if is_rolled_back:
                raise ZeroDivisionError
            for job, number in zip(jobs, payloads, strict=True):
                self.numbers[job.id] = number

    def note(self) -> None:
        found: dict[int, list[int]] = {}
        with self._engine.connect() as connection:
            for number, job_id in connection.exec_driver_sql(QUERY):
                found.setdefault(number, []).append(job_id)
        assert len(found) <= 1, f"several batches at once: {sorted(found)}"
        for number, ids in found.items():
            there = self.batches.setdefault(number, ids)
            assert there == ids, f"batch {number} had the jobs {there}, and has {ids}"


def check(folder: str, putter: Putter, counts: Counter[str]) -> None:
    take_in(folder, "log")
    assert pending(folder, "log") == 0
    parts = [name for name in os.listdir(f"{folder}/inbox") if name.endswith(".part")]
    assert len(parts) <= 2 + counts["kills"] // 20, f"{len(parts)} parts are left"  # of who wrote late, and was killed
    items = [int(record.data) for record in scan(folder, "log") if record.data != b"own"]
    assert len(items) == len(set(items)), "jobs are there twice"
    assert set(items) == set(putter.numbers.values()), "jobs are missing, or were never committed"
    places = {item: place for place, item in enumerate(items)}
    for number, ids in putter.batches.items():
        wanted = [putter.numbers[job_id] for job_id in ids]
        first = places[wanted[0]]
        assert items[first : first + len(wanted)] == wanted, f"batch {number} is not in one piece"
    counts["jobs"] += len(items)
    counts["batches that were noted"] += len(putter.batches)


def main(what: str, seed: int, limit: int | None, seconds: float | None, _plant: object) -> Counter[str]:
    choose, counts = random.Random(seed), Counter[str]()
    folder = tempfile.mkdtemp()
    deletes = bool(seed % 2)
    engine = engine_of(what)
    if what.startswith("sqlite"):
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")
    outbox = outbox_of(what, folder, deletes=deletes)
    outbox.create_tables()
    putter = Putter(outbox, engine, choose)
    work: dict[str, tuple[Any, ...]] = {
        "first": (mover, what, folder, deletes),
        "second": (mover, what, folder, deletes),
        "owner": (owner, folder),
    }
    running: dict[str, int] = {}
    for _ in rounds(limit, seconds):
        for name in work.keys() - running.keys():
            running[name] = start(*work[name])
        for _ in moments(choose):
            putter.put()
        putter.note()
        for name in choose.choice((["first"], ["second"], ["first", "second"], ["first", "owner"], ["owner"])):
            end(running.pop(name))
            counts["kills"] += 1
        putter.note()
    for pid in running.values():
        end(pid)
    putter.note()
    pause(LEASE)
    (relay,) = outbox.core.relays
    while relay.step():
        pass
    check(folder, putter, counts)
    shutil.rmtree(folder)
    return counts


def moments(choose: random.Random) -> Iterator[None]:
    for _ in range(choose.randrange(1, 5)):
        pause(choose.random() * 0.03)
        yield


if __name__ == "__main__":
    as_program(main)
