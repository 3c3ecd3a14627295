"""The floor: what one writes by hand around ``FOR UPDATE SKIP LOCKED``, and the same for SQLite.

One transaction claims up to so many jobs, another marks them; no retries, leases, keys or delays. A job whose worker
dies stays claimed for ever. A few threads, each with a connection.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import psycopg

from bench.outbox.peers.base import QUEUE, THREADS, Handler, Peer, payload

READY, RUNNING, DONE = 0, 1, 2
CHANNEL = "floor_jobs"
LISTEN_SECONDS = 1.0
LOOK_SECONDS = 0.01

TABLE = """
    CREATE TABLE floor_jobs (
        id {id} PRIMARY KEY, queue text NOT NULL, payload text NOT NULL, status smallint NOT NULL DEFAULT 0
    )
"""
INDEX = "CREATE INDEX floor_jobs_ready ON floor_jobs (queue, id) WHERE status = 0"
INSERT = "INSERT INTO floor_jobs (queue, payload) VALUES (%s, %s)"
INSERT_MANY = "INSERT INTO floor_jobs (queue, payload) SELECT %s, unnest(%s::text[])"
CLAIM = """
    WITH taken AS MATERIALIZED (
        SELECT id FROM floor_jobs WHERE status = 0 AND queue = %s ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED
    )
    UPDATE floor_jobs AS job SET status = 1 FROM taken WHERE job.id = taken.id RETURNING job.id, job.payload
"""
MARK = "UPDATE floor_jobs SET status = 2 FROM unnest(%s::bigint[]) AS done (id) WHERE floor_jobs.id = done.id"
NOTIFY = "SELECT pg_notify(%s, '')"
LEFT = "SELECT count(*) FROM floor_jobs WHERE status < 2"

INSERT_SQLITE = "INSERT INTO floor_jobs (queue, payload) VALUES (?, ?)"
CLAIM_SQLITE = """
    UPDATE floor_jobs SET status = 1
    WHERE id IN (SELECT id FROM floor_jobs WHERE status = 0 AND queue = ? ORDER BY id LIMIT ?)
    RETURNING id, payload
"""
MARK_SQLITE = "UPDATE floor_jobs SET status = 2 WHERE id IN (SELECT value FROM json_each(?))"
CROWD = """
    INSERT INTO floor_jobs (queue, payload, status)
    WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {count})
    SELECT '{queue}', '{payload}', {status} FROM numbers
"""


def crowd(what: str, count: int) -> str:
    """The statement that makes so many rows of one kind."""
    queue = "other" if what == "other queue" else QUEUE
    return CROWD.format(count=count, queue=queue, payload=payload(0), status=DONE if what == "done" else READY)


def open_file(where: str) -> sqlite3.Connection:
    """A connection that commits each statement by itself, for any thread; it waits for the others."""
    return sqlite3.connect(where, isolation_level=None, timeout=60.0, check_same_thread=False)


class _Loop(Peer):
    """The threads, whatever the database."""

    crowds = ("ready", "done", "other queue")
    claims: ClassVar[int] = 100

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._connection: Any = None

    def connect(self) -> Any:
        """A connection that commits each statement by itself."""
        raise NotImplementedError

    def claim_on(self, connection: Any) -> list[tuple[int, str]]:
        """Claim up to ``claims`` jobs: id and payload of each."""
        raise NotImplementedError

    def mark(self, connection: Any, ids: list[int]) -> None:
        """They are done."""
        raise NotImplementedError

    def arm(self, connection: Any) -> None:
        """From here on a new job ends ``wait``."""
        raise NotImplementedError

    def wait(self, connection: Any) -> None:
        """Until there may be new jobs, or for a while."""
        raise NotImplementedError

    @property
    def connection(self) -> Any:
        """The one of who puts."""
        if self._connection is None:
            self._connection = self.connect()
        return self._connection

    def claim(self) -> int:
        return len(self.claim_on(self.connection))

    def left(self) -> int:
        return int(self.connection.execute(LEFT).fetchone()[0])

    def start(self, handler: Handler) -> None:
        self._threads = [threading.Thread(target=self._run, args=(handler,), daemon=True) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def _run(self, handler: Handler) -> None:
        connection = self.connect()
        while not self._stopping.is_set():
            self.arm(connection)
            jobs = self.claim_on(connection)
            for _, text in jobs:
                handler(text)
            if jobs:
                self.mark(connection, [job_id for job_id, _ in jobs])
            else:
                self.wait(connection)
        connection.close()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class PostgresFloor(_Loop):
    """100 jobs a claim; LISTEN on a connection of its own, so that an idle thread wakes up."""

    name = "floor"

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._news = threading.Event()
        self._listener: threading.Thread | None = None

    def create(self) -> None:
        self.connection.execute(TABLE.format(id="bigserial"))
        self.connection.execute(INDEX)

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.where, autocommit=True)

    def fill(self, numbers: Sequence[int]) -> None:
        with self.connection.transaction():
            self.connection.execute(INSERT_MANY, [QUEUE, [payload(number) for number in numbers]])
            self.connection.execute(NOTIFY, [CHANNEL])

    def put(self, number: int) -> None:
        with self.connection.transaction():
            self.connection.execute(INSERT, [QUEUE, payload(number)])
            self.connection.execute(NOTIFY, [CHANNEL])

    def claim_on(self, connection: Any) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = connection.execute(CLAIM, [QUEUE, self.claims]).fetchall()
        return found

    def mark(self, connection: Any, ids: list[int]) -> None:
        connection.execute(MARK, [ids])

    def start(self, handler: Handler) -> None:
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        super().start(handler)

    def _listen(self) -> None:
        with self.connect() as connection:
            connection.execute(f"LISTEN {CHANNEL}".encode())
            while not self._stopping.is_set():
                for _ in connection.notifies(timeout=LISTEN_SECONDS, stop_after=1):
                    self._news.set()

    def arm(self, connection: Any) -> None:  # noqa: ARG002
        self._news.clear()

    def wait(self, connection: Any) -> None:  # noqa: ARG002
        self._news.wait(LISTEN_SECONDS)

    def stop(self) -> None:
        super().stop()
        if self._listener is not None:
            self._listener.join()

    def crowd(self, what: str, count: int) -> None:
        self.connection.execute(crowd(what, count))


class PostgresFloorOne(PostgresFloor):
    """A job a claim."""

    name = "floor, 1 a claim"
    claims = 1


class SqliteFloor(_Loop):
    """100 jobs a claim; an idle thread looks every 10 ms whether somebody has committed."""

    name = "floor"

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._seen = threading.local()

    def create(self) -> None:
        self.connection.execute("PRAGMA journal_mode = wal")
        self.connection.execute(TABLE.format(id="integer"))
        self.connection.execute(INDEX)

    def connect(self) -> sqlite3.Connection:
        return open_file(self.where)

    def fill(self, numbers: Sequence[int]) -> None:
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.executemany(INSERT_SQLITE, ((QUEUE, payload(number)) for number in numbers))
        self.connection.execute("COMMIT")

    def put(self, number: int) -> None:
        self.connection.execute(INSERT_SQLITE, (QUEUE, payload(number)))

    def claim_on(self, connection: Any) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = connection.execute(CLAIM_SQLITE, (QUEUE, self.claims)).fetchall()
        return found

    def mark(self, connection: Any, ids: list[int]) -> None:
        connection.execute(MARK_SQLITE, (json.dumps(ids),))

    def arm(self, connection: Any) -> None:
        self._seen.version = self._version(connection)

    def wait(self, connection: Any) -> None:
        while self._version(connection) == self._seen.version and not self._stopping.wait(LOOK_SECONDS):
            pass

    def _version(self, connection: Any) -> int:
        """A number that is another one after each commit of another connection."""
        return int(connection.execute("PRAGMA data_version").fetchone()[0])

    def crowd(self, what: str, count: int) -> None:
        self.connection.execute(crowd(what, count))


class SqliteFloorOne(SqliteFloor):
    """A job a claim."""

    name = "floor, 1 a claim"
    claims = 1
