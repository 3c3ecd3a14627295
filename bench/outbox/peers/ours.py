"""Ours: the outbox on PostgreSQL, on a SQLite file and on the journal store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy

from bench.outbox.peers.base import MARGIN_SECONDS, QUEUE, THREADS, Handler, Peer, payload, sqlalchemy_url
from bench.outbox.peers.floor import open_file
from kestrelpy.outbox.claims import claim
from kestrelpy.outbox.outbox import Outbox
from kestrelpy.outbox.sql import Claim
from kestrelpy.work import WorkQueue

TEMPLATE = "template"
"""A queue with one job, of which the rows of a crowd are copies."""
COLUMNS = "payload, payload_bytes, context, priority, tries, added_ms"
"""What the rows of a crowd have of it. The names of columns are part of the interface: people query them."""
LEFT = "SELECT count(*) FROM kestrel_jobs WHERE queue = 'bench' AND status IN ('ready', 'waiting', 'running', 'error')"
LEASE_MS = 30_000
INSERT = """
    INSERT INTO kestrel_jobs (queue, status, priority, payload, payload_bytes, added_ms, due_ms)
    SELECT %s, 'ready', 0, payload, length(payload), 0, 0 FROM unnest(%s::text[]) AS given (payload) RETURNING id
"""
INSERT_SQLITE = """
    INSERT INTO kestrel_jobs (queue, status, priority, payload, payload_bytes, added_ms, due_ms)
    VALUES (?, 'ready', 0, ?, ?, ?, ?)
"""
CROWD = """
    INSERT INTO kestrel_jobs ({columns}, queue, status, due_ms, started_ms, finished_ms, first_error_ms)
    WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {count})
    SELECT {columns}, '{queue}', '{status}', due_ms + {later}, {ended}, {ended}, {failed}
    FROM numbers, (SELECT * FROM kestrel_jobs WHERE queue = 'template' LIMIT 1) AS template
"""


class _Ours(Peer):
    """Whatever it is bound to."""

    name = "kestrelpy"

    def __init__(self, where: str, **options: Any) -> None:
        super().__init__(where)
        self.outbox = Outbox(self.bind(), **options)
        for queue in (QUEUE, TEMPLATE):
            self.outbox.queue(queue)

    def bind(self) -> Any:
        """An engine, or a work queue."""
        raise NotImplementedError

    def create(self) -> None:
        self.outbox.create_tables()

    def fill(self, numbers: Sequence[int]) -> None:
        with self.outbox.begin() as opened:
            self.put_many_on(opened, numbers)

    def put(self, number: int) -> None:
        with self.outbox.begin() as opened:
            self.put_on(opened, number)

    def put_on(self, connection: Any, number: int) -> None:
        """Put a job in the transaction of this connection."""
        self.outbox.put(connection, QUEUE, payload(number))

    def put_many_on(self, connection: Any, numbers: Sequence[int]) -> None:
        """Put jobs in the transaction of this connection."""
        self.outbox.put_many(connection, QUEUE, [payload(number) for number in numbers])

    def start(self, handler: Handler) -> None:
        self.outbox.add_consumer(QUEUE, handler)
        self.outbox.start(threads=THREADS)

    def stop(self) -> None:
        self.outbox.stop()

    def close(self) -> None:
        self.outbox.close()


class _InDatabase(_Ours):
    """With SQLAlchemy."""

    crowds = ("ready", "done", "error", "other queue")
    claims = 100

    def bind(self) -> sqlalchemy.Engine:
        self.engine = sqlalchemy.create_engine(sqlalchemy_url(self.where))
        return self.engine

    def close(self) -> None:
        super().close()
        self.engine.dispose()

    def crowd(self, what: str, count: int) -> None:
        with self.outbox.begin() as opened:
            self.outbox.put(opened, TEMPLATE, payload(0))
        self.execute(
            CROWD.format(
                columns=COLUMNS,
                count=count,
                queue="other" if what == "other queue" else QUEUE,
                status="ready" if what == "other queue" else what,
                later=int(MARGIN_SECONDS * 1000) if what == "error" else 0,
                ended="added_ms" if what in ("done", "error") else "NULL",
                failed="added_ms" if what == "error" else "NULL",
            )
        )

    def execute(self, statement: str) -> None:
        """On a connection of the driver's, and commit."""
        raise NotImplementedError

    def left(self) -> int:
        with self.engine.connect() as connection:
            return int(connection.exec_driver_sql(LEFT).scalar_one())

    def claim(self) -> int:
        core = self.outbox.core
        wanted = Claim(worker=core.worker, token=core.token(), lease_ms=LEASE_MS, jobs=self.claims)
        return len(core.open_store().perform(None, claim, "ready", [(QUEUE, self.claims)], wanted))


class OnPostgres(_InDatabase):
    """With psycopg."""

    def execute(self, statement: str) -> None:
        with psycopg.connect(self.where) as connection:
            connection.execute(statement.encode())


class OnSqlite(_InDatabase):
    """With a write-ahead log."""

    def create(self) -> None:
        self.execute("PRAGMA journal_mode = wal")
        super().create()

    def execute(self, statement: str) -> None:
        file = open_file(self.where)
        try:
            file.execute(statement)
        finally:
            file.close()


class OnJournal(_Ours):
    """On a work queue, as it is by default."""

    name = "kestrelpy journal"

    def bind(self) -> WorkQueue:
        self.queue = WorkQueue(Path(self.where).with_suffix(".journal"))
        return self.queue

    def close(self) -> None:
        super().close()
        self.queue.close()

    def create(self) -> None:
        """There are no tables."""

    def put_on(self, connection: Any, number: int) -> None:  # noqa: ARG002
        self.outbox.put(None, QUEUE, payload(number))

    def put_many_on(self, connection: Any, numbers: Sequence[int]) -> None:  # noqa: ARG002
        self.outbox.put_many(None, QUEUE, [payload(number) for number in numbers])

    def left(self) -> int:
        return sum(found.count for found in self.outbox.stats(QUEUE))
