"""SIGKILL of consumers and producers of an outbox at any moment, under load.

Two producers put jobs beside orders of theirs, and commit or roll back; three consumers run them, on a short lease. A
process is killed at a random moment, and another one takes its place. When all is done, the ledger, the orders, the
jobs and the effects must agree. What is asked for is a database and, behind a ``+``, the driver of the consumers.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy

from tests.outbox.faults.actors import Setting, consume, produce, spawn
from tests.outbox.faults.ledger import Ledger
from tests.outbox.planted import plant_from_environment
from tests.processes.programs import as_program, rounds
from tests.support import postgres

LEASE = 3.0
"""Seconds. A process that gets no turn for so long, or no lock of SQLite, loses its jobs as if it were killed."""
PATIENCE = 60.0
"""Seconds until all is done when nothing is killed any more."""
CONSUMERS, PRODUCERS = 3, 2


@contextmanager
def database(kind: str, folder: Path) -> Iterator[str]:
    """The URL of a new one: ``postgresql``, ``sqlite`` or ``sqlite-wal``."""
    if kind == "postgresql":
        with postgres.quick_cluster() as cluster:
            yield cluster.url()
        return
    path = folder / "outbox.db"
    if kind == "sqlite-wal":
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
    yield f"sqlite:///{path}"


class Stage:
    """The actors that live, and what is asked of the database. Each question has a connection of its own: there is none
    when a process is forked.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.kills: dict[str, int] = {}
        self.in_flight: Counter[str] = Counter()
        self.living: dict[str, int] = {}
        self._number = 0

    def start(self, kind: str) -> None:
        work = {"consumer": consume, "producer": produce}[kind]
        self._number += 1
        who = f"{kind}-{self._number}"
        self.living[who] = spawn(functools.partial(work, self.setting, who))

    def wait_until_started(self) -> None:
        """All consumers."""
        for who in self.living:
            ledger = self.setting.folder / f"{who}.ledger"
            while who.startswith("consumer") and not (ledger.exists() and " started " in ledger.read_text()):
                time.sleep(0.01)

    def kill(self, who: str) -> None:
        """And note which of its jobs were in flight."""
        pid = self.living.pop(who)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), f"{who} had ended by itself"
        self.kills[who] = time.monotonic_ns()
        if who.startswith("consumer"):
            rows = self.ask(
                "SELECT payload FROM kestrel_jobs WHERE status = 'running' AND worker LIKE :who", f"%:{pid}"
            )
            self.in_flight.update(json.loads(payload) for (payload,) in rows)

    def end(self, kind: str) -> None:
        """Ask all of this kind to end, and wait."""
        for who in [who for who in self.living if who.startswith(kind)]:
            pid = self.living.pop(who)
            os.kill(pid, signal.SIGTERM)
            _, status = os.waitpid(pid, 0)
            assert status == 0, f"{who} has ended with {status}"

    def ask(self, question: str, who: str = "") -> list[Any]:
        engine = sqlalchemy.create_engine(self.setting.url, poolclass=sqlalchemy.NullPool)
        with engine.connect() as connection:
            return list(connection.execute(sqlalchemy.text(question), {"who": who} if who else {}))

    def wait_until_done(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while left := self.ask("SELECT status, count(*) FROM kestrel_jobs WHERE status <> 'done' GROUP BY status"):
            assert time.monotonic() < deadline, f"not done: {left}, such as {self._some()}"
            time.sleep(0.1)

    def _some(self) -> list[Any]:
        return self.ask("SELECT payload, status, lane, held, tries, error FROM kestrel_jobs WHERE status <> 'done'")[:5]

    def check(self) -> Ledger:
        """When all have ended: everything but how often a job was run."""
        ledger = Ledger(self.setting.folder, self.kills)
        expected = ledger.check_orders({name for (name,) in self.ask("SELECT name FROM orders")})
        done = Counter(json.loads(payload) for (payload,) in self.ask("SELECT payload FROM kestrel_jobs"))
        ledger.check_done(expected, done, Counter(name for (name,) in self.ask("SELECT name FROM effects")))
        ledger.check_order(expected)
        assert not ledger.ended_threads, f"threads that ended: {ledger.ended_threads}"
        return ledger

    def close(self) -> None:
        for pid in self.living.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def main(what: str, seed: int, limit: int | None, seconds: float | None, _: object) -> Counter[str]:
    choose, counts = random.Random(seed), Counter[str]()
    plant_from_environment()
    kind, _, driver = what.partition("+")
    with tempfile.TemporaryDirectory() as name, database(kind, Path(name)) as url:
        setting = Setting(url, Path(name), seed, driver=driver, lease=LEASE, pause=0.03)
        setting.create()
        stage = Stage(setting)
        try:
            for kind in ("consumer",) * CONSUMERS + ("producer",) * PRODUCERS:
                stage.start(kind)
            for _ in rounds(limit, seconds):
                time.sleep(0.02 + choose.random() ** 2 * 0.8)
                for kind in ("consumer", "producer") if choose.random() < 0.1 else ("consumer",):
                    stage.kill(choose.choice([who for who in stage.living if who.startswith(kind)]))
                    counts[f"kills of {kind}s"] += 1
                    stage.start(kind)
            stage.end("producer")
            begin = time.monotonic()
            stage.wait_until_done()
            counts["milliseconds until the rest was done"] = round((time.monotonic() - begin) * 1000)
            stage.end("consumer")
            ledger = stage.check()
            ledger.check_runs(stage.in_flight)
        finally:
            stage.close()
    counts.update(ledger.figures())
    counts["in flight"] = stage.in_flight.total()
    assert counts["runs"] <= counts["jobs"] + counts["in flight"] + counts["failures"]
    return counts


if __name__ == "__main__":
    as_program(main)
