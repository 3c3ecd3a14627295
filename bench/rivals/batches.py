"""Queues on disk, by batches: ``fill`` and ``drain`` do a thousand items at a time, where a contender can."""

from __future__ import annotations

from typing import Any

from bench.rivals.base import BATCH
from bench.rivals.durable import Floor, Kestrel, Lmdb, Rocksdict, Sqlite, key_of
from bench.rivals.servers import Redis


class KestrelBatch(Kestrel):
    """kestrelpy: put_many, get_many, commit_many."""

    name = "kestrelpy batches"
    least = BATCH

    def fill(self, count: int, item: Any) -> None:
        items, put_many = [item] * BATCH, self.queue.put_many
        for _ in range(count // BATCH):
            put_many(items)

    def drain(self, count: int) -> None:
        get_many, commit_many = self.reader.get_many, self.reader.commit_many
        while count > 0:
            items = get_many(min(count, BATCH))
            commit_many(items)
            count -= len(items)


class FloorBatch(Floor):
    """The least code that does it."""

    name = "floor batches"
    least = BATCH

    def fill(self, count: int, item: Any) -> None:
        items, put_many = [item] * BATCH, self.floor.put_many
        for _ in range(count // BATCH):
            put_many(items)

    def drain(self, count: int) -> None:
        take_many, commit_many = self.floor.take_many, self.floor.commit_many
        for _ in range(count // BATCH):
            commit_many(take_many(BATCH))


class SqliteBatch(Sqlite):
    """sqlite3 by hand, a thousand items a transaction."""

    name = "sqlite3 batches"
    share = 1.0
    least = BATCH

    def fill(self, count: int, item: Any) -> None:
        rows = [(item,)] * BATCH
        for _ in range(count // BATCH):
            self.database.execute("begin")
            self.database.executemany("insert into items (data) values (?)", rows)
            self.database.execute("commit")

    def drain(self, count: int) -> None:
        take = f"delete from items where id in (select id from items order by id limit {BATCH}) returning data"
        for _ in range(count // BATCH):
            self.database.execute(take).fetchall()


class LmdbBatch(Lmdb):
    """lmdb, a thousand items a transaction."""

    name = "lmdb batches"
    share = 1.0
    least = BATCH

    def fill(self, count: int, item: Any) -> None:
        begin = self.store.begin
        for _ in range(count // BATCH):
            rows = [(key_of(number), item) for number in range(self.tail + 1, self.tail + BATCH + 1)]
            with begin(write=True) as transaction:
                transaction.cursor().putmulti(rows, append=True)
            self.tail += BATCH

    def drain(self, count: int) -> None:
        begin = self.store.begin
        for _ in range(count // BATCH):
            with begin(write=True) as transaction:
                pop = transaction.pop
                for number in range(self.head + 1, self.head + BATCH + 1):
                    pop(key_of(number))
            self.head += BATCH


class RocksdictBatch(Rocksdict):
    """rocksdict, a thousand items a write."""

    name = "rocksdict batches"
    share = 1.0
    least = BATCH

    def fill(self, count: int, item: Any) -> None:
        write, make = self.store.write, self.module.WriteBatch
        for _ in range(count // BATCH):
            batch = make(raw_mode=True)
            for number in range(self.tail + 1, self.tail + BATCH + 1):
                batch.put(key_of(number), item)
            write(batch)
            self.tail += BATCH

    def drain(self, count: int) -> None:
        get, write, make = self.store.get, self.store.write, self.module.WriteBatch
        for _ in range(count // BATCH):
            keys = [key_of(number) for number in range(self.head + 1, self.head + BATCH + 1)]
            get(keys)
            batch = make(raw_mode=True)
            batch.delete_range(keys[0], key_of(self.head + BATCH + 1))
            write(batch)
            self.head += BATCH


class RedisBatch(Redis):
    """redis, a thousand items a command; they are gone when they are taken, with no acknowledgement."""

    name = "redis batches"
    share = 1.0
    least = BATCH

    def fill(self, count: int, item: Any) -> None:
        items, push = [item] * BATCH, self.client.rpush
        for _ in range(count // BATCH):
            push("items", *items)

    def drain(self, count: int) -> None:
        pop = self.client.lpop
        for _ in range(count // BATCH):
            pop("items", BATCH)
