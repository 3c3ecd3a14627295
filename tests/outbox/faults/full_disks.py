"""A file system with so many pages and no more, with a SQLite database on it: wherever it is full, an order and its job
are both there or neither is, and everything goes on when there is room. For root, in a process of its own mounts.
"""

from __future__ import annotations

import random
import sqlite3
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path

import sqlalchemy
from sqlalchemy.exc import OperationalError

from kestrelpy.outbox.outbox import Outbox
from tests.outbox.planted import plant_from_environment
from tests.processes.loop_mount import let_go, mount, own_mounts
from tests.processes.no_room import pages_left
from tests.processes.programs import as_program, rounds

SIZE = 16 << 20
PAGES = 40
"""More than one transaction of these needs."""


class Shop:
    """Orders with a job each, in a database of a journal mode."""

    def __init__(self, folder: str, mode: str, counts: Counter[str]) -> None:
        self.counts = counts
        self.path = Path(folder) / "outbox.db"
        with closing(sqlite3.connect(self.path)) as connection:
            connection.execute(f"PRAGMA journal_mode = {mode}")
        self.outbox = Outbox(f"sqlite:///{self.path}", backoff=0.0)
        self.ran: list[str] = []
        self.outbox.add_consumer("q", self.ran.append)
        self.outbox.create_tables()
        with self.outbox.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE orders (name TEXT)")

    def order(self, name: str, kilobytes: int, *, many: bool) -> None:
        """In one transaction, which is committed if all of it succeeds."""
        payload = name + "." * (kilobytes << 10)
        is_put = False
        try:
            with self.outbox.begin() as connection:
                connection.execute(sqlalchemy.text("INSERT INTO orders VALUES (:name)"), {"name": name})
                if many:
                    self.outbox.put_many(connection, "q", [payload] * 20)
                else:
                    self.outbox.put(connection, "q", payload)
                is_put = True
        except OperationalError as error:
            if "full" not in str(error) and "disk I/O error" not in str(error):
                raise
            self.counts["refused at the commit" if is_put else "refused before it"] += 1

    def check(self) -> None:
        """With room: all jobs are of orders, all orders have their jobs, and all are run."""
        with closing(sqlite3.connect(self.path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            orders = {name for (name,) in connection.execute("SELECT name FROM orders")}
        jobs = Counter(job.payload.rstrip(".") for job in self.outbox.jobs(limit=10_000) if job.status != "cancelled")
        assert jobs.keys() == orders, f"orders without jobs, or jobs without orders: {jobs.keys() ^ orders}"
        assert all(count == (20 if name.startswith("many") else 1) for name, count in jobs.items())


def main(what: str, seed: int, limit: int | None, seconds: float | None, _: object) -> Counter[str]:
    plant_from_environment()
    own_mounts()
    choose, counts = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        mount("tmpfs", folder, "tmpfs", f"size={SIZE},mode=0700")
        try:
            shop = Shop(folder, what, counts)
            for number in rounds(limit, seconds):
                many = choose.random() < 0.5
                with pages_left(folder, choose.randrange(PAGES)):
                    shop.order(f"{'many' if many else 'one'} {number}", choose.randrange(8), many=many)
                shop.check()
                if number % 10 == 9:
                    _start_over(shop)
                counts["rooms"] += 1
            shop.outbox.close()
        finally:
            let_go(folder)
    return counts


def _start_over(shop: Shop) -> None:
    with shop.outbox.begin() as connection:
        for table in ("orders", "kestrel_jobs"):
            connection.exec_driver_sql(f"DELETE FROM {table}")


if __name__ == "__main__":
    as_program(main)
