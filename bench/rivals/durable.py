"""Queues on disk, and stores that one can make a queue of, an item at a time."""

from __future__ import annotations

import os
import sqlite3
import struct
from functools import partial
from importlib import import_module
from itertools import repeat
from typing import Any, ClassVar

from bench.floor import FRAME_BYTES, make_floor
from bench.rivals.base import Rival

key_of = struct.Struct(">Q").pack
"""A key that sorts as its number does."""
SPARE = 10
"""Items that a floor has room for beyond those it is opened for."""


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

    def _take(self) -> bytes:
        item = self.reader.get()
        self.reader.commit(item)
        return item.data

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


class KestrelAlways(Kestrel):
    """The same, a put returns once it is on disk."""

    name = "kestrelpy always"
    share = 0.01
    sync = "always"


class Floor(Rival):
    """The least code that does the work (``floor.py``)."""

    name = "floor"

    def open(self) -> None:
        self.floor = make_floor(self.folder / "floor", (self.count + SPARE) * (FRAME_BYTES + self.item_bytes))
        self.put, self.take = self.floor.put, self._take

    def _take(self) -> bytes:
        item = self.floor.take()
        self.floor.commit(item[0])
        return item[1]

    def drain(self, count: int) -> None:
        get, commit = self.floor.take, self.floor.commit
        for _ in repeat(None, count):
            commit(get()[0])

    def cycle(self, count: int, item: Any) -> None:
        put, get, commit = self.put, self.floor.take, self.floor.commit
        for _ in repeat(None, count):
            put(item)
            commit(get()[0])

    def close(self) -> None:
        self.floor.close()


class Plain(Rival):
    """A bare file: ``os.write`` to append, ``os.read`` to read, nothing else."""

    name = "os.write, os.read"
    sync_bytes: ClassVar[int] = 0

    def open(self) -> None:
        path = self.folder / "file"
        self._writing = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._reading = os.open(path, os.O_RDONLY)
        self.put, self.take = partial(os.write, self._writing), partial(os.read, self._reading, self.item_bytes)

    def close(self) -> None:
        os.close(self._writing)
        os.close(self._reading)


class PlainSynced(Plain):
    """The same with a sync every 16 MiB, as kestrelpy's journal has where one segment ends and the next begins."""

    name = "os.write, synced each 16 MiB"
    sync_bytes = 16 << 20

    def fill(self, count: int, item: Any) -> None:
        put, every = self.put, max(1, self.sync_bytes // self.item_bytes)
        for number in range(1, count + 1):
            put(item)
            if not number % every:
                os.fdatasync(self._writing)


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

    def _take(self) -> bytes:
        take = "delete from items where id = (select min(id) from items) returning data"
        data: bytes = self.database.execute(take).fetchall()[0][0]
        return data

    def stock(self, count: int, item: Any) -> None:
        self.database.execute("begin")
        self.database.executemany("insert into items (data) values (?)", repeat((item,), count))
        self.database.execute("commit")

    def close(self) -> None:
        self.database.close()


class SqliteFull(Sqlite):
    """The same with synchronous=FULL: a put returns once it is on disk."""

    name = "sqlite3 FULL"
    share = 0.01
    synchronous = "FULL"


class PersistFile(Rival):
    """persist-queue's file queue, saved at each item."""

    name = "persist-queue file"
    share = 0.01

    def open(self) -> None:
        made = import_module("persistqueue").Queue(str(self.folder / "queue"), tempdir=str(self.folder))
        self._queue, self.put, self.take = made, made.put, self._take

    def _take(self) -> Any:
        item = self._queue.get()
        self._queue.task_done()
        return item


class PersistSqlite(Rival):
    """persist-queue's SQLite queue with acknowledgements."""

    name = "persist-queue sqlite"
    share = 0.01

    def open(self) -> None:
        made = import_module("persistqueue").SQLiteAckQueue(str(self.folder / "queue"))
        self._queue, self.put, self.take = made, made.put, self._take

    def _take(self) -> Any:
        item = self._queue.get()
        self._queue.ack(item)
        return item

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

    def _take(self) -> bytes:
        message = self._queue.pop()
        claim = {"claim_id": message.claim_id} if hasattr(message, "claim_id") else {}  # newer versions ask for it
        self._queue.done(message.message_id, **claim)
        data: bytes = message.data.encode("ascii")
        return data

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


class Numbered(Rival):
    """A store of keys and values as a queue: keys are numbers, what is put last and taken last is kept in memory."""

    def open(self) -> None:
        self.tail = self.head = 0
        self.put, self.take = self._put, self._take
        self.open_store()

    def open_store(self) -> None:
        """Open the store."""
        raise NotImplementedError

    def _put(self, item: bytes) -> None:
        raise NotImplementedError

    def _take(self) -> bytes:
        raise NotImplementedError


class Lmdb(Numbered):
    """lmdb, sync left to the system, a transaction an item."""

    name = "lmdb"
    share = 0.2
    sync: ClassVar[bool] = False

    def open_store(self) -> None:
        self.store = import_module("lmdb").open(str(self.folder / "queue"), map_size=1 << 34, sync=self.sync)

    def _put(self, item: bytes) -> None:
        self.tail += 1
        with self.store.begin(write=True) as transaction:
            transaction.put(key_of(self.tail), item, append=True)

    def _take(self) -> bytes:
        self.head += 1
        with self.store.begin(write=True) as transaction:
            item: bytes = transaction.pop(key_of(self.head))
            return item

    def stock(self, count: int, item: Any) -> None:
        with self.store.begin(write=True) as transaction:
            rows = ((key_of(number), item) for number in range(self.tail + 1, self.tail + count + 1))
            transaction.cursor().putmulti(rows, append=True)
        self.tail += count

    def close(self) -> None:
        self.store.close()


class LmdbSync(Lmdb):
    """The same, a put returns once it is on disk."""

    name = "lmdb sync"
    share = 0.01
    sync = True


class Rocksdict(Numbered):
    """rocksdict, which is RocksDB: its log left to the system, a write an item."""

    name = "rocksdict"
    share = 0.2

    def open_store(self) -> None:
        self.module = import_module("rocksdict")
        self.store = self.module.Rdict(str(self.folder / "queue"), self.module.Options(raw_mode=True))

    def _put(self, item: bytes) -> None:
        self.tail += 1
        self.store[key_of(self.tail)] = item

    def _take(self) -> bytes:
        self.head += 1
        key = key_of(self.head)
        item: bytes = self.store[key]
        del self.store[key]
        return item

    def close(self) -> None:
        self.store.close()
