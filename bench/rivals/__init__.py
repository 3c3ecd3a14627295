"""The contenders, each behind the same few calls: fill, drain, cycle, close. One class for each.

Rules:
1. A loop calls the contender's own function, bound beforehand: no adapter stands between where one call is enough.
2. Taking an item out includes whatever makes that final: a commit, an acknowledgement, ``task_done``.
3. A module is imported when its contender is opened. One that is not installed is left out, and the report says so.
4. What is put comes out, in that order: ``tests/bench/test_bench_rivals.py`` asks every one of them.
"""

from __future__ import annotations

from bench.rivals import batches, durable, memory, servers
from bench.rivals.base import BATCH, ITEM, Rival

__all__ = ["BATCH", "BATCHED", "BLOCKING", "DURABLE", "FEW", "ITEM", "LARGE", "MEMORY", "PUTTING", "WAKING", "Rival"]

BLOCKING: tuple[type[Rival], ...] = (
    memory.ConcurrentMemory,
    memory.SimpleMemory,
    memory.MemoryFloor,
    memory.StandardQueue,
    memory.StandardSimpleQueue,
    memory.Culsans,
)
"""In memory, and one can wait for an item."""
WAKING: tuple[type[Rival], ...] = (*BLOCKING, durable.Kestrel)
"""The same, and a durable one."""
MEMORY: tuple[type[Rival], ...] = (*BLOCKING, memory.Deque)
DURABLE: tuple[type[Rival], ...] = (
    durable.Kestrel,
    durable.KestrelTenth,
    durable.Floor,
    durable.Queuelib,
    durable.Sqlite,
    durable.Lmdb,
    durable.Rocksdict,
    durable.PersistFile,
    durable.PersistSqlite,
    durable.Litequeue,
    durable.Diskcache,
    servers.Redis,
    servers.Beanstalkd,
)
PUTTING: tuple[type[Rival], ...] = (*DURABLE, durable.KestrelAlways, durable.SqliteFull, durable.LmdbSync)
"""The same in other sync modes too."""
BATCHED: tuple[type[Rival], ...] = (
    batches.KestrelBatch,
    durable.Kestrel,
    batches.FloorBatch,
    batches.SqliteBatch,
    batches.LmdbBatch,
    batches.RocksdictBatch,
    batches.RedisBatch,
    durable.Queuelib,
)
FEW: tuple[type[Rival], ...] = (durable.Kestrel, durable.Floor, durable.Queuelib, durable.Lmdb, durable.Sqlite)
"""Who takes part where there is an axis: the quick ones."""
LARGE: tuple[type[Rival], ...] = (durable.Kestrel, durable.Plain, durable.PlainSynced)
