"""The contenders, each behind the same few calls: fill, drain, cycle, close. One class for each.

Rules:
1. A loop calls the contender's own function, bound beforehand: no adapter stands between where one call is enough.
2. Taking an item out includes whatever makes that final: a commit, an acknowledgement, ``task_done``.
3. A module is imported when its contender is opened. One that is not installed is left out, and the report says so.
"""

from __future__ import annotations

import queue
import sqlite3
from collections import deque
from collections.abc import Callable
from importlib import import_module
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar

from bench.floor import FRAME_BYTES, make_floor

ITEM = b"x" * 100
BATCH = 1000


class Rival:
    """A queue as the workloads see it.

    ``share``: which part of the items it does, because it is slow; ``least``: no fewer than that.
    """

    name: ClassVar[str]
    share: ClassVar[float] = 1.0
    least: ClassVar[int] = 1
    put: Callable[[Any], object]
    take: Callable[[], object]

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.count = count
        self.open()

    def open(self) -> None:
        """Open it in its folder, which is empty, for about ``count`` items."""

    def fill(self, count: int, item: object) -> None:
        """Put ``count`` items."""
        put = self.put
        for _ in repeat(None, count):
            put(item)

    def drain(self, count: int) -> None:
        """Take ``count`` items out for good."""
        take = self.take
        for _ in repeat(None, count):
            take()

    def cycle(self, count: int, item: object) -> None:
        """Put one, take it out, ``count`` times."""
        put, take = self.put, self.take
        for _ in repeat(None, count):
            put(item)
            take()

    def close(self) -> None:
        """Let go of everything."""


# -- in memory -------------------------------------------------------------------------------------------------------


class ConcurrentMemory(Rival):
    """kestrelpy's ConcurrentBlockingQueue."""

    name = "kestrelpy Concurrent"

    def open(self) -> None:
        from kestrelpy import ConcurrentBlockingQueue

        made: Any = ConcurrentBlockingQueue()
        self.put, self.take = made.put, made.get


class SimpleMemory(Rival):
    """kestrelpy's SimpleBlockingQueue."""

    name = "kestrelpy Simple"

    def open(self) -> None:
        from kestrelpy import SimpleBlockingQueue

        made: Any = SimpleBlockingQueue()
        self.put, self.take = made.put, made.get


class StandardQueue(Rival):
    """The standard library's queue.Queue."""

    name = "queue.Queue"

    def open(self) -> None:
        made: queue.Queue[Any] = queue.Queue()
        self.put, self.take = made.put, made.get


class StandardSimpleQueue(Rival):
    """The standard library's queue.SimpleQueue, in C."""

    name = "queue.SimpleQueue"

    def open(self) -> None:
        made: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.put, self.take = made.put, made.get


class Deque(Rival):
    """A bare collections.deque: no waiting, no lock."""

    name = "collections.deque"

    def open(self) -> None:
        made: deque[Any] = deque()
        self.put, self.take = made.append, made.popleft


# -- on disk ---------------------------------------------------------------------------------------------------------


class Kestrel(Rival):
    """kestrelpy's JournaledQueue, items committed one by one."""

    name = "kestrelpy never"
    sync: ClassVar[Any] = "never"

    def open(self) -> None:
        from kestrelpy import JournaledQueue

        self.queue = JournaledQueue(self.folder, "bench", sync=self.sync)
        self.reader = self.queue.reader()
        self.put = self.queue.put
        self.take = self._take

    def _take(self) -> None:
        self.reader.commit(self.reader.get())

    def drain(self, count: int) -> None:
        get, commit = self.reader.get, self.reader.commit
        for _ in repeat(None, count):
            commit(get())

    def cycle(self, count: int, item: Any) -> None:
        put, get, commit = self.put, self.reader.get, self.reader.commit
        for _ in repeat(None, count):
            put(item)
            commit(get())

    def close(self) -> None:
        self.queue.close()


class KestrelTenth(Kestrel):
    """The same, synced in the background every 0.1 s."""

    name = "kestrelpy 0.1 s"
    sync = 0.1


class KestrelBatch(Kestrel):
    """The same in batches: put_many, get_many, commit_many."""

    name = "kestrelpy batches"
    least = BATCH

    def fill(self, count: int, item: Any) -> None:
        items, put_many = [item] * BATCH, self.queue.put_many
        for _ in range(count // BATCH):
            put_many(items)

    def drain(self, count: int) -> None:
        get_many, commit_many = self.reader.get_many, self.reader.commit_many
        while count > 0:
            items = get_many(BATCH)
            commit_many(items)
            count -= len(items)


class Floor(Rival):
    """The least code that does the work (``floor.py``)."""

    name = "floor"

    def open(self) -> None:
        room = (self.count + 1) * (FRAME_BYTES + len(ITEM))
        self.put, self._get, self._commit, self._close = make_floor(self.folder / "floor", room)

    def drain(self, count: int) -> None:
        get, commit = self._get, self._commit
        for _ in repeat(None, count):
            commit(get()[0])

    def cycle(self, count: int, item: Any) -> None:
        put, get, commit = self.put, self._get, self._commit
        for _ in repeat(None, count):
            put(item)
            commit(get()[0])

    def close(self) -> None:
        self._close()


class Queuelib(Rival):
    """queuelib's FifoDiskQueue."""

    name = "queuelib"

    def open(self) -> None:
        made = import_module("queuelib").FifoDiskQueue(str(self.folder / "queue"))
        self.put, self.take, self._close = made.push, made.pop, made.close

    def close(self) -> None:
        self._close()


class Sqlite(Rival):
    """sqlite3 by hand: WAL, synchronous=NORMAL, a transaction an item."""

    name = "sqlite3 NORMAL"
    share = 0.2
    synchronous: ClassVar[str] = "NORMAL"

    def open(self) -> None:
        self.database = sqlite3.connect(self.folder / "queue.db", isolation_level=None, check_same_thread=False)
        self.database.execute("pragma journal_mode = wal")
        self.database.execute(f"pragma synchronous = {self.synchronous}")
        self.database.execute("create table items (id integer primary key autoincrement, data blob)")
        self.put, self.take = self._put, self._take

    def _put(self, item: bytes) -> None:
        self.database.execute("insert into items (data) values (?)", (item,))

    def _take(self) -> None:
        take = "delete from items where id = (select min(id) from items) returning data"
        self.database.execute(take).fetchall()

    def close(self) -> None:
        self.database.close()


class SqliteBatch(Sqlite):
    """The same with a thousand items a transaction."""

    name = "sqlite3 batches"
    share = 1.0
    least = BATCH

    def fill(self, count: int, item: object) -> None:
        rows = [(item,)] * BATCH
        for _ in range(count // BATCH):
            self.database.execute("begin")
            self.database.executemany("insert into items (data) values (?)", rows)
            self.database.execute("commit")

    def drain(self, count: int) -> None:
        take = f"delete from items where id in (select id from items order by id limit {BATCH}) returning data"
        for _ in range(count // BATCH):
            self.database.execute(take).fetchall()


class SqliteFull(Sqlite):
    """The same with synchronous=FULL: a put returns once it is on disk."""

    name = "sqlite3 FULL"
    share = 1.0
    synchronous = "FULL"


class PersistFile(Rival):
    """persist-queue's file queue, saved at each item."""

    name = "persist-queue file"
    share = 0.01

    def open(self) -> None:
        made = import_module("persistqueue").Queue(str(self.folder / "queue"), tempdir=str(self.folder))
        self._queue, self.put, self.take = made, made.put, self._take

    def _take(self) -> None:
        self._queue.get()
        self._queue.task_done()


class PersistSqlite(Rival):
    """persist-queue's SQLite queue with acknowledgements."""

    name = "persist-queue sqlite"
    share = 0.01

    def open(self) -> None:
        made = import_module("persistqueue").SQLiteAckQueue(str(self.folder / "queue"))
        self._queue, self.put, self.take = made, made.put, self._take

    def _take(self) -> None:
        self._queue.ack(self._queue.get())

    def close(self) -> None:
        self._queue.close()


class Litequeue(Rival):
    """litequeue: a table of messages with states; text only."""

    name = "litequeue"
    share = 0.01

    def open(self) -> None:
        made = import_module("litequeue").LiteQueue(str(self.folder / "queue.db"))
        self._queue, self.put, self.take = made, self._put, self._take

    def _put(self, item: bytes) -> None:
        self._queue.put(item.decode("ascii"))

    def _take(self) -> None:
        message = self._queue.pop()
        claim = {"claim_id": message.claim_id} if hasattr(message, "claim_id") else {}  # newer versions ask for it
        self._queue.done(message.message_id, **claim)

    def close(self) -> None:
        getattr(self._queue, "close", self._queue.conn.close)()


class Diskcache(Rival):
    """diskcache's Deque."""

    name = "diskcache Deque"
    share = 0.05

    def open(self) -> None:
        made = import_module("diskcache").Deque(directory=str(self.folder / "queue"))
        self._deque, self.put, self.take = made, made.append, made.popleft

    def close(self) -> None:
        self._deque.cache.close()


MEMORY = (ConcurrentMemory, SimpleMemory, StandardQueue, StandardSimpleQueue, Deque)
DURABLE = (Kestrel, KestrelTenth, Floor, Queuelib, Sqlite, PersistFile, PersistSqlite, Litequeue, Diskcache)
BATCHED = (KestrelBatch, Kestrel, SqliteBatch, Queuelib)
