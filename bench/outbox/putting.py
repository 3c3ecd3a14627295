"""What a put costs whoever puts: in a transaction with an INSERT of the caller's own, and by the thousand."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy

from bench import measure
from bench.measure import Contender, Figures, Workload
from bench.outbox.peers import floor, ours
from bench.outbox.peers.base import QUEUE, Peer, payload, sqlalchemy_url
from bench.outbox.peers.with_huey import PostgresHuey, SqliteHuey
from bench.outbox.peers.with_procrastinate import Procrastinate
from bench.outbox.servers import Cluster

TRANSACTIONS = 1_000
THREADS = 8
BATCHES, BATCH = 20, 1_000
ORDER = "a shop's order"
CREATE_ORDERS = "CREATE TABLE orders (id {id} PRIMARY KEY, customer integer NOT NULL, text text NOT NULL)"
INSERT_ORDER = "INSERT INTO orders (customer, text) VALUES (%s, %s)"
ONE, TWO = "floor, 1 INSERT", "floor, 2 INSERTs"
BY_DRIVER, BY_SQLALCHEMY, BY_EIGHT = "by the driver", "by SQLAlchemy", "by the driver, 8 threads"
A_JOB = "us a job"

_METADATA = sqlalchemy.MetaData()
ORDERS = sqlalchemy.Table(
    "orders",
    _METADATA,
    sqlalchemy.Column("id", sqlalchemy.BigInteger, primary_key=True),
    sqlalchemy.Column("customer", sqlalchemy.Integer),
    sqlalchemy.Column("text", sqlalchemy.Text),
)
JOBS = sqlalchemy.Table(
    "floor_jobs",
    _METADATA,
    sqlalchemy.Column("id", sqlalchemy.BigInteger, primary_key=True),
    sqlalchemy.Column("queue", sqlalchemy.Text),
    sqlalchemy.Column("payload", sqlalchemy.Text),
)

Write = Callable[[Any, int], object]
"""Puts a job with this number on this connection; or does nothing."""


def _nothing(_connection: object, _number: int) -> None:
    """No second INSERT."""


def _insert_with_sqlalchemy(connection: sqlalchemy.Connection, number: int) -> None:
    connection.execute(JOBS.insert().inline(), {"queue": QUEUE, "payload": payload(number)})


class Caller:
    """Transactions with an order, and what else is written with it. ``after``: done when it is committed."""

    def __init__(self, where: str, count: int, after: Callable[[int], object] | None = None) -> None:
        self.where = where
        self.count = count
        self.after = after
        self.is_file = not where.startswith("postgresql:")
        self.insert = INSERT_ORDER.replace("%s", "?") if self.is_file else INSERT_ORDER

    def create(self) -> None:
        """The caller's own table."""
        with self.connect() as connection:
            if self.is_file:
                connection.execute("PRAGMA journal_mode = wal")
            connection.execute(CREATE_ORDERS.format(id="integer" if self.is_file else "bigserial"))
            connection.commit()

    @contextmanager
    def connect(self) -> Iterator[Any]:
        """A connection of the driver's."""
        connection = sqlite3.connect(self.where, timeout=60.0) if self.is_file else psycopg.connect(self.where)
        try:
            yield connection
        finally:
            connection.close()

    @contextmanager
    def engine(self) -> Iterator[sqlalchemy.Engine]:
        """An engine."""
        engine = sqlalchemy.create_engine(sqlalchemy_url(self.where))
        try:
            yield engine
        finally:
            engine.dispose()

    def by_driver(self, write: Write) -> float:
        """Microseconds a transaction."""
        with self.connect() as connection:
            return measure.per_item(lambda: self._transactions(connection, write, self.count), self.count)

    def _transactions(self, connection: Any, write: Write, count: int) -> None:
        for number in range(count):
            connection.execute(self.insert, (number, ORDER))
            write(connection, number)
            connection.commit()
            if self.after is not None:
                self.after(number)

    def by_threads(self, write: Write) -> float:
        """Microseconds a transaction, eight threads at it."""
        count = max(1, self.count // THREADS)
        with ExitStack() as stack:
            opened = [stack.enter_context(self.connect()) for _ in range(THREADS)]
            works = [partial(self._transactions, connection, write, count) for connection in opened]
            return measure.together(works) / count / THREADS * 1e6

    def by_sqlalchemy(self, write: Write) -> float:
        """Microseconds a transaction, each with a connection from the pool."""

        def work() -> None:
            for number in range(self.count):
                with engine.begin() as connection:
                    connection.execute(ORDERS.insert().inline(), {"customer": number, "text": ORDER})
                    write(connection, number)

        with self.engine() as engine:
            return measure.per_item(work, self.count)


def _figures(caller: Caller, by_driver: Write, by_sqlalchemy: Write | None) -> Figures:
    figures: Figures = {BY_DRIVER: caller.by_driver(by_driver)}
    if by_sqlalchemy is not None:
        figures[BY_SQLALCHEMY] = caller.by_sqlalchemy(by_sqlalchemy)
    if not caller.is_file:
        figures[BY_EIGHT] = caller.by_threads(by_driver)
    return figures


def bare(inserts: int, where: str, scale: float) -> Figures:
    """One INSERT or two."""
    caller = Caller(where, _transactions(scale))
    caller.create()
    made = floor.SqliteFloor(where) if caller.is_file else floor.PostgresFloor(where)
    made.create()
    made.close()
    if inserts == 1:
        return _figures(caller, _nothing, _nothing)
    insert = floor.INSERT_SQLITE if caller.is_file else floor.INSERT
    return _figures(
        caller,
        lambda connection, number: connection.execute(insert, (QUEUE, payload(number))),
        _insert_with_sqlalchemy,
    )


def our_put(notify: bool, where: str, scale: float) -> Figures:
    """The put."""
    caller = Caller(where, _transactions(scale))
    caller.create()
    peer = ours.OnSqlite(where) if caller.is_file else ours.OnPostgres(where, notify=notify)
    peer.create()
    try:
        return _figures(caller, peer.put_on, peer.put_on)
    finally:
        peer.close()


def with_procrastinate(where: str, scale: float) -> Figures:
    """Its job on the caller's connection."""
    caller = Caller(where, _transactions(scale))
    caller.create()
    peer = Procrastinate(where)
    peer.create()
    try:
        return _figures(caller, lambda connection, number: peer.defer(connection, [number]), None)
    finally:
        peer.close()


def with_huey(kind: type[Peer], where: str, scale: float) -> Figures:
    """Its job after the commit, in a transaction of its own."""
    peer = kind(where)
    caller = Caller(where, _transactions(scale), after=peer.put)
    caller.create()
    try:
        return _figures(caller, _nothing, None)
    finally:
        peer.close()


def _transactions(scale: float) -> int:
    return max(THREADS, int(TRANSACTIONS * scale))


# -- by the thousand -------------------------------------------------------------------------------------------------


def _per_job(batch: Callable[[list[int]], object], scale: float) -> float:
    """Microseconds a job; ``batch`` puts so many and commits."""
    batches = max(1, int(BATCHES * scale))
    size = max(10, int(BATCH * min(1.0, scale * 100)))
    numbers = list(range(size))

    def work() -> None:
        for _ in range(batches):
            batch(numbers)

    batch(numbers)  # the statements are prepared
    return measure.per_item(work, batches * size)


def bare_batches(where: str, scale: float) -> Figures:
    """A thousand INSERTs by each of the ways there are; the fastest is the floor."""
    caller = Caller(where, 0)
    made = floor.SqliteFloor(where) if caller.is_file else floor.PostgresFloor(where)
    made.create()
    made.close()
    insert = floor.INSERT_SQLITE if caller.is_file else floor.INSERT
    figures: dict[str, float] = {}
    with caller.connect() as connection, caller.engine() as engine:

        def executemany(numbers: list[int]) -> None:
            connection.cursor().executemany(insert, [(QUEUE, payload(number)) for number in numbers])
            connection.commit()

        def unnest(numbers: list[int]) -> None:
            values = [QUEUE, [payload(number) for number in numbers]]
            connection.execute(f"{floor.INSERT_MANY} RETURNING id", values).fetchall()
            connection.commit()

        def insertmanyvalues(numbers: list[int]) -> None:
            rows = [{"queue": QUEUE, "payload": payload(number)} for number in numbers]
            with engine.begin() as opened:
                opened.execute(JOBS.insert().returning(JOBS.c.id), rows).all()

        figures["executemany"] = _per_job(executemany, scale)
        if not caller.is_file:
            figures["unnest, RETURNING"] = _per_job(unnest, scale)
        figures["SQLAlchemy, RETURNING"] = _per_job(insertmanyvalues, scale)
    return {A_JOB: min(figures.values()), **figures}


def our_batches(where: str, scale: float) -> Figures:
    """put_many, and a bare INSERT of the same rows into the same table."""
    caller = Caller(where, 0)
    peer = ours.OnSqlite(where) if caller.is_file else ours.OnPostgres(where)
    peer.create()
    try:
        with caller.connect() as connection, caller.engine() as engine:

            def bare(numbers: list[int]) -> None:
                if caller.is_file:
                    rows = [(QUEUE, text, len(text), 0, 0) for text in map(payload, numbers)]
                    connection.cursor().executemany(ours.INSERT_SQLITE, rows)
                else:
                    connection.execute(ours.INSERT, (QUEUE, list(map(payload, numbers)))).fetchall()
                connection.commit()

            def driver(numbers: list[int]) -> None:
                peer.put_many_on(connection, numbers)
                connection.commit()

            def by_sqlalchemy(numbers: list[int]) -> None:
                with engine.begin() as opened:
                    peer.put_many_on(opened, numbers)

            return {
                A_JOB: _per_job(driver, scale),
                "through SQLAlchemy": _per_job(by_sqlalchemy, scale),
                "bare INSERT of such rows": _per_job(bare, scale),
            }
    finally:
        peer.close()


def procrastinate_batches(where: str, scale: float) -> Figures:
    """batch_defer."""
    peer = Procrastinate(where)
    peer.create()
    try:
        return {A_JOB: _per_job(peer.fill, scale)}
    finally:
        peer.close()


def on_postgres(work: Callable[[str, float], Figures], folder: Path, scale: float) -> Figures:
    """With a cluster of its own."""
    with Cluster(folder) as cluster:
        return work(cluster.url, scale)


def in_file(work: Callable[[str, float], Figures], folder: Path, scale: float) -> Figures:
    """With a file."""
    return work(str(folder / "jobs.db"), scale)


WORKLOADS = (
    Workload(
        "put",
        "a transaction with an INSERT of the caller's, and a job, in PostgreSQL; huey's job comes after it",
        "us a transaction",
        tuple(
            Contender(name, partial(on_postgres, work))
            for name, work in (
                (ours.OnPostgres.name, partial(our_put, True)),
                ("kestrelpy, notify=False", partial(our_put, False)),
                (ONE, partial(bare, 1)),
                (TWO, partial(bare, 2)),
                (Procrastinate.name, with_procrastinate),
                (PostgresHuey.name, partial(with_huey, PostgresHuey)),
            )
        ),
    ),
    Workload(
        "put-sqlite",
        "the same in a SQLite file",
        "us a transaction",
        tuple(
            Contender(name, partial(in_file, work))
            for name, work in (
                (ours.OnSqlite.name, partial(our_put, True)),
                (ONE, partial(bare, 1)),
                (TWO, partial(bare, 2)),
                (SqliteHuey.name, partial(with_huey, SqliteHuey)),
            )
        ),
    ),
    Workload(
        "batch",
        "a thousand jobs in one transaction, in PostgreSQL",
        "us a job",
        tuple(
            Contender(name, partial(on_postgres, work))
            for name, work in (
                (ours.OnPostgres.name, our_batches),
                ("floor", bare_batches),
                (Procrastinate.name, procrastinate_batches),
            )
        ),
    ),
    Workload(
        "batch-sqlite",
        "the same in a SQLite file",
        "us a job",
        (
            Contender(ours.OnSqlite.name, partial(in_file, our_batches)),
            Contender("floor", partial(in_file, bare_batches)),
        ),
    ),
)
