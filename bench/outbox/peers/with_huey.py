"""huey, with its storages for SQLite and PostgreSQL. A job is gone when it is taken out; nothing marks it later."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from bench.measure import LeftOut
from bench.outbox.peers.base import QUEUE, THREADS, Handler, Peer, payload


class _Huey(Peer):
    """Whatever the storage."""

    name = "huey"
    storage = ""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._handler: Handler = lambda _text: None
        make = getattr(import_module("huey"), self.storage, None)
        if make is None:
            raise LeftOut(f"this huey has no {self.storage}")
        self.huey = make(QUEUE, **self.options())
        self._consumer: Any = None

        def job(text: str) -> None:
            self._handler(text)

        self.task = self.huey.task()(job)

    def options(self) -> dict[str, Any]:
        """What the storage is given."""
        raise NotImplementedError

    def create(self) -> None:
        """It has done that itself."""

    def serialized(self, number: int) -> bytes:
        """A job as it is stored."""
        text: bytes = self.huey.serialize_task(self.task.s(payload(number)))
        return text

    def put(self, number: int) -> None:
        self.task(payload(number))

    def left(self) -> int:
        return int(self.huey.storage.queue_size())

    def start(self, handler: Handler) -> None:
        self._handler = handler
        self._consumer = self.huey.create_consumer(workers=THREADS, periodic=False)
        self._consumer.start()

    def stop(self) -> None:
        self._consumer.stop(graceful=True)

    def close(self) -> None:
        self.huey.storage.close()

    def claim(self) -> int:
        return int(self.huey.storage.dequeue() is not None)


class PostgresHuey(_Huey):
    """A connection for all threads, and one for each to LISTEN on."""

    storage = "PostgresHuey"
    crowds = ("ready", "other queue")

    def options(self) -> dict[str, Any]:
        return {"dsn": self.where}

    def fill(self, numbers: Sequence[int]) -> None:
        storage = self.huey.storage
        values = [(QUEUE, self.serialized(number)) for number in numbers]
        with storage.db(commit=True) as cursor:
            cursor.executemany(f"INSERT INTO {storage.table_task} (queue, data) VALUES (%s, %s)", values)
            cursor.execute("SELECT pg_notify(%s, '')", (storage.channel,))

    def crowd(self, what: str, count: int) -> None:
        storage = self.huey.storage
        queue = "other" if what == "other queue" else QUEUE
        insert = f"INSERT INTO {storage.table_task} (queue, data) SELECT %s, %s FROM generate_series(1, %s)"
        storage.sql(insert, (queue, self.serialized(0), count), commit=True)


class SqliteHuey(_Huey):
    """A write-ahead log, as it has by default."""

    storage = "SqliteHuey"

    def options(self) -> dict[str, Any]:
        return {"filename": self.where}

    def fill(self, numbers: Sequence[int]) -> None:
        values = [(QUEUE, sqlite3.Binary(self.serialized(number)), 0) for number in numbers]
        with self.huey.storage.db(commit=True) as cursor:
            cursor.executemany("INSERT INTO task (queue, data, priority) VALUES (?, ?, ?)", values)
