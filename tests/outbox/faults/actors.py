"""Producers and consumers of an outbox, each a process of its own that may be killed at any moment.

What they do is written into a ledger outside of the database, a file for each process, a line for each event, before
or after it as ``ledger.py`` says. A line is one ``write``: a kill leaves all of it or nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy.exc import DBAPIError

import kestrelpy.outbox.runner  # noqa: F401 - before the first child is made: not in each of them
from kestrelpy.outbox.outbox import Outbox

LANES = 3
"""Of each producer: its puts do not overlap, so the jobs of a lane have an order."""
KEPT = 20
"""So many orders back another one may depend on."""
TABLES = ("CREATE TABLE orders (name TEXT PRIMARY KEY)", "CREATE TABLE effects (name TEXT)")
"""The producers' own table, and what transactional handlers write: without a constraint that would hide a second."""


class Notes:
    """The ledger of one process: ``note("begins", name)``."""

    def __init__(self, folder: Path, who: str) -> None:
        self._file = os.open(folder / f"{who}.ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def __call__(self, event: str, name: str) -> None:
        os.write(self._file, f"{time.monotonic_ns()} {event} {name}\n".encode())


class Setting:
    """Where the actors work: the database, the folder of the ledger, the lease."""

    def __init__(self, url: str, folder: Path, seed: int, *, driver: str = "", lease: float, pause: float) -> None:
        self.url = url
        self.driver = driver  # of the consumers, if it is another one
        self.folder = folder
        self.seed = seed
        self.lease = lease
        self.pause = pause  # of a producer, between two transactions

    def outbox(self, *, consumes: bool = False) -> Outbox:
        """Another one, of the calling process."""
        url = sqlalchemy.make_url(self.url)
        if consumes and self.driver:
            url = url.set(drivername=f"{url.get_backend_name()}+{self.driver}")
        outbox = Outbox(url, lease=self.lease, backoff=0.01)
        for queue in ("plain", "async", "second"):
            outbox.queue(queue)
        outbox.queue("within", transactional=True)
        return outbox

    def create(self) -> None:
        """All tables."""
        with self.outbox() as outbox:
            outbox.create_tables()
            with outbox.begin() as connection:
                for table in TABLES:
                    connection.execute(sqlalchemy.text(table))


def spawn(work: Callable[[], object]) -> int:
    """Call ``work`` in a child, which ends with it. The calling process has one thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until the child is ready for it
    pid = os.fork()
    if not pid:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    return pid


def asked_to_end() -> threading.Event:
    """Set by SIGTERM."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    return asked


# -- consumers -------------------------------------------------------------------------------------------------------


def consume(setting: Setting, who: str, *, threads: int = 3) -> None:
    """Run jobs until SIGTERM; then say which threads of the outbox are still there."""
    asked = asked_to_end()
    logging.getLogger("kestrelpy.outbox").addFilter(lambda record: "failed at try" not in record.getMessage())
    notes = Notes(setting.folder, who)
    outbox = setting.outbox(consumes=True)
    _register(outbox, notes, random.Random(f"{setting.seed} {who}"), 1.3 * setting.lease)
    outbox.start(threads=threads, poll_interval=0.3, retry_interval=0.02)
    expected = _own_threads()
    notes("started", str(os.getpid()))
    asked.wait()
    for name in sorted(expected - _own_threads()):
        notes("ended", name)
    outbox.close()
    notes("stopped", str(os.getpid()))


def _own_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("kestrelpy-outbox")}


def _register(outbox: Outbox, notes: Notes, choose: random.Random, long: float) -> None:
    def plain(name: str) -> None:
        with _run(notes, name):
            _take_time(choose)
            if name.endswith("long"):
                time.sleep(long)  # its lease is renewed meanwhile
            if "fails" in name and choose.random() < 0.5:
                raise RuntimeError(name)

    def within(name: str, connection: sqlalchemy.Connection) -> None:
        with _run(notes, name):
            connection.execute(sqlalchemy.text("INSERT INTO effects VALUES (:name)"), {"name": name})
            if "follows" in name:
                outbox.put(connection, "plain", f"{name}:next")
            _take_time(choose)
            if "fails" in name and choose.random() < 0.5:
                raise RuntimeError(name)

    async def awaited(name: str) -> None:
        with _run(notes, name):
            await asyncio.sleep(choose.random() * 0.01)

    outbox.add_consumer("plain", plain)
    outbox.add_consumer("second", plain)
    outbox.add_consumer("within", within, transactional=True)
    outbox.add_consumer("async", awaited)


@contextlib.contextmanager
def _run(notes: Notes, name: str) -> Iterator[None]:
    notes("begins", name)
    try:
        yield
    except BaseException:
        notes("raises", name)
        raise
    notes("returns", name)


def _take_time(choose: random.Random) -> None:
    if choose.random() < 0.7:
        time.sleep(choose.random() ** 2 * 0.15)


# -- producers -------------------------------------------------------------------------------------------------------


def produce(setting: Setting, who: str) -> None:
    """Put jobs beside orders, and commit or roll back, until SIGTERM."""
    Producer(setting, who).work(asked_to_end())


class Producer:
    """Transactions with an order and its job, of every kind."""

    def __init__(self, setting: Setting, who: str) -> None:
        self._notes = Notes(setting.folder, who)
        self._choose = random.Random(f"{setting.seed} {who}")
        self._setting, self._who, self._number = setting, who, 0
        self._outbox = setting.outbox()
        patience = {"timeout": 60} if setting.url.startswith("sqlite") else {}
        self._engine = sqlalchemy.create_engine(setting.url, connect_args=patience)
        self._ids: dict[str, int] = {}  # of jobs that are committed, by the order's name

    def work(self, asked: threading.Event) -> None:
        while not asked.is_set():
            names: list[str] = []
            try:
                self._transact(names)
            except DBAPIError as error:  # the server was stopped
                for name in names:
                    self._notes("unknown", name)
                if not error.connection_invalidated and not isinstance(error, sqlalchemy.exc.OperationalError):
                    raise
            asked.wait(self._choose.random() * 2 * self._setting.pause)

    def _transact(self, names: list[str]) -> None:
        """One transaction, or one that is rolled back in part or as a whole; ``names``: what it would leave."""
        ids: dict[str, int] = {}
        commits = self._choose.random() < 0.75
        with self._engine.connect() as connection:
            transaction = connection.begin()
            if self._choose.random() < 0.1:
                savepoint = connection.begin_nested()
                lost: list[str] = []
                self._order(connection, lost, {}, commits=False)
                savepoint.rollback()
            self._order(connection, names, ids, commits=commits)
            if commits:
                transaction.commit()
                for name in names:
                    self._notes("committed", name)
                self._ids.update(ids)
                for old in list(self._ids)[:-KEPT]:
                    del self._ids[old]
            else:
                transaction.rollback()
                names.clear()

    def _order(
        self, connection: sqlalchemy.Connection, names: list[str], ids: dict[str, int], *, commits: bool
    ) -> None:
        """Insert an order and put its job; what is to happen to it is noted first."""
        choose = self._choose
        kind = choose.choice(
            ("simple", "simple", "fails", "within", "within", "within-fails", "within-follows", "async", "lane", "lane")
            + ("after", "after", "key", "many", "later", "urgent")
        )
        self._number += 1
        if self._number == 3:
            kind = "long"
        made = [f"{self._who}.{self._number}.{place}:{kind}" for place in range(5 if kind == "many" else 1)]
        options: dict[str, Any] = {}
        if kind == "lane":
            options["lane"] = lane = f"{self._who}-{choose.randrange(LANES)}"
            made[0] += f":{lane}"
        elif kind == "after" and self._ids:
            other = choose.choice(list(self._ids))
            options["depends_on"] = self._ids[other]
            made[0] += f":{other.partition(':')[0]}"
        for name in made:
            self._notes("commits" if commits else "rolls-back", name)
            names.append(name)
            connection.execute(sqlalchemy.text("INSERT INTO orders VALUES (:name)"), {"name": name})
        self._put(connection, kind, made, options, ids)

    def _put(self, connection: Any, kind: str, made: list[str], options: dict[str, Any], ids: dict[str, int]) -> None:
        queue = {"async": "async", "lane": "second"}.get(kind, "within" if "within" in kind else "plain")
        if self._choose.random() < 0.25:
            connection = connection.connection.driver_connection  # of sqlite3, or of psycopg
        name = made[0]
        if kind == "many":
            jobs = self._outbox.put_many(connection, queue, made)
            ids.update({each: job.id for each, job in zip(made, jobs, strict=True)})
            return
        if kind == "key":
            options |= {"key": name, "if_exists": "return"}
        elif kind == "later":
            options["delay"] = self._choose.random()
        elif kind == "urgent":
            options["priority"] = -self._choose.randrange(3)
        put = functools.partial(self._outbox.put, connection, queue, name, **options)
        ids[name] = put().id
        if kind == "key":
            assert not put().is_new
