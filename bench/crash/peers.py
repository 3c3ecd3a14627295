"""The libraries, each behind the same few calls: open, put, take, done, close. One class for each way of using one.

Rules:
1. Each is set up as its documents say for the most that it promises, where they say anything; ``settings`` has it.
2. ``take`` returns an item or ``None``, without waiting; ``done`` says that the last item taken is finished. Where the
   library knows no such thing, taking is final and ``done`` does nothing (``acknowledges`` is false).
3. ``open`` is also what comes after a crash: where the documents name a call for that, it is made there.
"""

from __future__ import annotations

import sqlite3
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar


class Peer:
    """A queue in a folder, for one process at a time."""

    name: ClassVar[str]
    package: ClassVar[str] = ""
    """What has to be installed, as ``pip`` knows it; empty: the standard library."""
    module: ClassVar[str] = ""
    settings: ClassVar[str]
    promise: ClassVar[str]
    acknowledges: ClassVar[bool] = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open()

    @classmethod
    def load(cls) -> None:
        """Import what it takes. Raises ``ImportError``."""
        if cls.module:
            import_module(cls.module)

    def open(self) -> None:
        """Open it, new or as a crash has left it."""

    def put(self, data: bytes) -> None:
        raise NotImplementedError

    def take(self) -> bytes | None:
        raise NotImplementedError

    def done(self) -> None:
        """The item that was taken last is finished."""

    def close(self) -> None:
        raise NotImplementedError


class Kestrel(Peer):
    """kestrelpy, every put on disk when it returns, every commit too."""

    name = "kestrelpy (always)"
    package = "kestrelpy"
    module = "kestrelpy"
    settings = '`sync="always"`, segments of 64 KB; `commit`, then `checkpoint(durable=True)`'
    promise = (
        "neither a kill nor a power cut loses an acknowledged item; an item that a durable checkpoint has as done does "
        "not come again"
    )
    options: ClassVar[dict[str, Any]] = {"sync": "always", "segment_bytes": 1 << 16}

    def open(self) -> None:
        module = import_module("kestrelpy")
        self._queue: Any = module.JournaledQueue(self.folder, "queue", **self.options)
        self._empty = module.QueueEmpty
        self._reader = self._queue.reader()

    def put(self, data: bytes) -> None:
        self._queue.put(data)

    def take(self) -> bytes | None:
        try:
            self._item = self._reader.get_nowait()
        except self._empty:
            return None
        data: bytes = self._item.data
        return data

    def done(self) -> None:
        self._reader.commit(self._item)
        self._reader.checkpoint(durable=True)

    def close(self) -> None:
        self._queue.close()


class KestrelNever(Kestrel):
    """kestrelpy that leaves the disk to the system."""

    name = "kestrelpy (never)"
    settings = '`sync="never"`; `commit` alone, saved once a second'
    promise = (
        "a kill loses no acknowledged item, and items committed in the last second may come again; a power cut may "
        "lose a suffix, never a hole"
    )
    options: ClassVar[dict[str, Any]] = {"sync": "never"}

    def done(self) -> None:
        self._reader.commit(self._item)


class Sqlite(Peer):
    """sqlite3 by hand, as its documents have it for durability."""

    name = "SQLite by hand"
    settings = "WAL, `synchronous=FULL`; a take marks the row, done deletes it; an opening clears the marks"
    promise = "neither a kill nor a power cut loses a transaction that has returned"

    def open(self) -> None:
        self._database = sqlite3.connect(self.folder / "queue.db", isolation_level=None)
        self._database.execute("pragma journal_mode = wal")
        self._database.execute("pragma synchronous = full")
        self._database.execute(
            "create table if not exists items (id integer primary key autoincrement, data blob, taken int default 0)"
        )
        self._database.execute("update items set taken = 0 where taken")

    def put(self, data: bytes) -> None:
        self._database.execute("insert into items (data) values (?)", (data,))

    def take(self) -> bytes | None:
        next_id = "select id from items where not taken order by id limit 1"
        rows = self._database.execute(
            f"update items set taken = 1 where id = ({next_id}) returning id, data"
        ).fetchall()
        if not rows:
            return None
        self._id, data = rows[0]
        return bytes(data)

    def done(self) -> None:
        self._database.execute("delete from items where id = ?", (self._id,))

    def close(self) -> None:
        self._database.close()


class PersistSqlite(Peer):
    """persist-queue's SQLite queue with acknowledgements."""

    name = "persist-queue SQLite"
    package = "persist-queue"
    module = "persistqueue"
    settings = "`SQLiteAckQueue`, default options; `get`, then `ack`; unacknowledged items come back at opening"
    promise = '"survive process crashes and restarts"; power cuts are not mentioned'

    def open(self) -> None:
        self._queue: Any = import_module("persistqueue").SQLiteAckQueue(str(self.folder / "queue"))
        self._exceptions = import_module("persistqueue").exceptions

    def put(self, data: bytes) -> None:
        self._queue.put(data)

    def take(self) -> bytes | None:
        try:
            item: bytes | None = self._queue.get(block=False)
        except self._exceptions.Empty:
            return None
        self._item = item
        return item

    def done(self) -> None:
        self._queue.ack(self._item)

    def close(self) -> None:
        self._queue.close()


class PersistFile(PersistSqlite):
    """persist-queue's file queue."""

    name = "persist-queue file"
    settings = (
        "`Queue`, temporary files in its own folder; `get`, then `task_done` (a `put` saves the read position, too)"
    )

    def open(self) -> None:
        place = self.folder / "queue"
        place.mkdir(exist_ok=True)
        self._queue = import_module("persistqueue").Queue(str(place), tempdir=str(place))
        self._exceptions = import_module("persistqueue").exceptions

    def done(self) -> None:
        self._queue.task_done()

    def close(self) -> None:
        """It has nothing to close."""


class Litequeue(Peer):
    """litequeue: a table of messages with states; text only."""

    name = "litequeue"
    package = "litequeue"
    module = "litequeue"
    settings = (
        "default options (WAL, `synchronous=NORMAL`, which cannot be changed); `pop`, then `done`; locked messages are "
        "retried at opening"
    )
    promise = '"Persistence"; neither kills nor power cuts are mentioned'

    def open(self) -> None:
        self._queue: Any = import_module("litequeue").LiteQueue(str(self.folder / "queue.db"))
        for message in list(self._queue.list_locked(0)):
            self._queue.retry(message.message_id)

    def put(self, data: bytes) -> None:
        self._queue.put(data.hex())

    def take(self) -> bytes | None:
        self._message = self._queue.pop()
        return None if self._message is None else bytes.fromhex(self._message.data)

    def done(self) -> None:
        claim = {"claim_id": self._message.claim_id} if hasattr(self._message, "claim_id") else {}
        self._queue.done(self._message.message_id, **claim)

    def close(self) -> None:
        getattr(self._queue, "close", self._queue.conn.close)()


class Diskcache(Peer):
    """diskcache's Deque."""

    name = "diskcache Deque"
    package = "diskcache"
    module = "diskcache"
    settings = '`Deque` over a `Cache` with `sqlite_synchronous=2` and `eviction_policy="none"`'
    promise = "operations are atomic and stored items persist; neither kills nor power cuts are mentioned"
    acknowledges = False

    def open(self) -> None:
        module = import_module("diskcache")
        cache = module.Cache(str(self.folder / "queue"), sqlite_synchronous=2, eviction_policy="none")
        self._deque: Any = module.Deque.fromcache(cache)

    def put(self, data: bytes) -> None:
        self._deque.append(data)

    def take(self) -> bytes | None:
        try:
            item: bytes = self._deque.popleft()
        except IndexError:
            return None
        return item

    def close(self) -> None:
        self._deque.cache.close()


class Queuelib(Peer):
    """queuelib's FIFO queue on disk."""

    name = "queuelib"
    package = "queuelib"
    module = "queuelib"
    settings = "`FifoDiskQueue`, default options"
    promise = 'none without `close()`: "Queuelib offers no way to repair or to recover such a queue"'
    acknowledges = False

    def open(self) -> None:
        self._queue: Any = import_module("queuelib").FifoDiskQueue(str(self.folder / "queue"))

    def put(self, data: bytes) -> None:
        self._queue.push(data)

    def take(self) -> bytes | None:
        item: bytes | None = self._queue.pop()
        return item

    def close(self) -> None:
        self._queue.close()


PEERS: tuple[type[Peer], ...] = (
    Kestrel,
    KestrelNever,
    Sqlite,
    Diskcache,
    PersistSqlite,
    Litequeue,
    PersistFile,
    Queuelib,
)
