"""From PostgreSQL into a journaled queue."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from bench.measure import LeftOut
from bench.outbox.peers.base import QUEUE, Handler
from bench.outbox.peers.floor import PostgresFloor
from bench.outbox.peers.ours import OnPostgres
from kestrelpy import JournaledQueue

BATCH = 1000
INTO = "relayed"
TAKE = """
    WITH taken AS MATERIALIZED (
        SELECT id FROM floor_jobs WHERE status = 0 AND queue = %s ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED
    )
    DELETE FROM floor_jobs AS job USING taken WHERE job.id = taken.id RETURNING job.payload
"""


def directory_of(where: str) -> str:
    """A folder beside the data of the cluster with this address."""
    return str(Path(where.partition("host=")[2]) / "journal")


class OurRelay(OnPostgres):
    """A relay in place of a handler. Rows are deleted when the queue has them."""

    tells_starts = False

    def start(self, handler: Handler) -> None:  # noqa: ARG002
        outbox: Any = self.outbox
        if not hasattr(outbox, "add_relay"):
            raise LeftOut("kestrelpy.outbox has no relay yet")
        outbox.add_relay(QUEUE, directory_of(self.where), INTO, batch=BATCH)
        outbox.start()

    def left(self) -> int:
        with self.engine.connect() as connection:
            found = connection.exec_driver_sql("SELECT EXISTS (SELECT FROM kestrel_jobs WHERE queue = 'bench')")
            return int(found.scalar_one())


class FloorRelay(PostgresFloor):
    """Deletes a thousand, stores them synced, commits: after a crash in between some are stored twice."""

    tells_starts = False

    def start(self, handler: Handler) -> None:  # noqa: ARG002
        self._relay = threading.Thread(target=self._relay_all, daemon=True)
        self._relay.start()

    def _relay_all(self) -> None:
        connection: Any = self.connect()
        with JournaledQueue(directory_of(self.where), INTO, sync="always") as into:
            while not self._stopping.is_set():
                with connection.transaction():
                    rows = connection.execute(TAKE, [QUEUE, BATCH]).fetchall()
                    into.put_many([text.encode() for (text,) in rows])
                if not rows:
                    self._stopping.wait(0.01)
        connection.close()

    def stop(self) -> None:
        self._stopping.set()
        self._relay.join()

    def left(self) -> int:
        (found,) = self.connection.execute("SELECT EXISTS (SELECT FROM floor_jobs)").fetchone()
        return int(found)
