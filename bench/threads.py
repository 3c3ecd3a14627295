"""Workloads of several threads: handing over in memory, waking who waits, and waiting for the disk together.

All threads of a round stand at a barrier first; the clock runs from there until the last has ended.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench import rivals
from bench.floor import make_sync_floor
from bench.measure import Contender, Figures, Workload, along, per_item, percentile, together
from bench.rivals import ITEM, Rival
from bench.rivals.durable import Lmdb, LmdbSync, Sqlite, SqliteFull

HANDED_ITEMS = 300_000
SIDES = (1, 4)
WAKE_UPS = 500
PAUSE_SECONDS = 0.001
SYNC_ITEMS = 1_600
FUTURE_ITEMS = 20 * SYNC_ITEMS
THREADS = (1, 4, 16, 64)
_STAMP = struct.Struct("<d")


def _hand_over(rival: type[Rival], side: int, folder: Path, scale: float) -> Figures:
    each = max(1, int(HANDED_ITEMS * rival.share * scale) // side)
    made = rival(folder, each * side)
    produce, consume = partial(made.fill, each, ITEM), partial(made.drain, each)
    try:
        return {"items/s": each * side / together([produce, consume] * side)}
    finally:
        made.close()


def _wake_up(rival: type[Rival], folder: Path, scale: float) -> Figures:
    """A consumer waits; one item comes, after a pause in which it has parked. What makes taking final counts too."""
    count = max(3, int(WAKE_UPS * scale))
    made = rival(folder, count)
    put, take, now = made.put, made.take, time.perf_counter
    stamp, moment_of = _STAMP.pack, _STAMP.unpack
    waits: list[float] = []

    def consume() -> None:
        for _ in range(count):
            item = take()
            waits.append(now() - moment_of(item)[0])

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    try:
        for _ in range(count):
            time.sleep(PAUSE_SECONDS)
            put(stamp(now()))
        consumer.join()
    finally:
        made.close()
    return {"p50": percentile(waits, 0.5) * 1e6, "p99": percentile(waits, 0.99) * 1e6}


def _syncs(threads: int, scale: float) -> int:
    """How many puts each thread makes: as many for one as for sixteen, and a hundred each if there are more."""
    return max(1, int(SYNC_ITEMS * max(1, threads / 16) * scale) // threads)


def _from_threads(put: Callable[[], object], threads: int, scale: float) -> Figures:
    each = _syncs(threads, scale)

    def work() -> None:
        for _ in range(each):
            put()

    return {"put": together([work] * threads) / (each * threads) * 1e6}


def _kestrel_sync(threads: int, folder: Path, scale: float) -> Figures:
    from kestrelpy import JournaledQueue

    with JournaledQueue(folder, "bench", sync="always") as queue:
        return _from_threads(partial(queue.put, ITEM), threads, scale)


def _kestrel_futures(_threads: int, folder: Path, scale: float) -> Figures:
    from kestrelpy import JournaledQueue

    count = max(1, int(FUTURE_ITEMS * scale))
    with JournaledQueue(folder, "bench", sync="always") as queue:
        put_future = queue.put_future

        def fill() -> None:
            for future in [put_future(ITEM) for _ in range(count)]:
                future.result()

        return {"put": per_item(fill, count)}


def _store_sync(rival: type[Sqlite] | type[Lmdb], threads: int, folder: Path, scale: float) -> Figures:
    """One connection behind a lock: several to SQLite, each busy waiting for its turn, are ten times slower."""
    made = rival(folder, SYNC_ITEMS)
    lock, put = threading.Lock(), made.put

    def locked() -> None:
        with lock:
            put(ITEM)

    try:
        return _from_threads(locked, threads, scale)
    finally:
        made.close()


def _floor_sync(_threads: int, folder: Path, scale: float) -> Figures:
    put, close = make_sync_floor(folder / "floor", (SYNC_ITEMS + 1) * (len(ITEM) + 4))
    try:
        return _from_threads(partial(put, ITEM), 1, scale)
    finally:
        close()


def _bare_sync(threads: int, folder: Path, scale: float) -> Figures:
    """An append and an fdatasync by every thread: what the disk takes."""
    descriptor = os.open(folder / "file", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def put() -> None:
        os.write(descriptor, ITEM)
        os.fdatasync(descriptor)

    try:
        return _from_threads(put, threads, scale)
    finally:
        os.close(descriptor)


IN_MEMORY = (
    Workload(
        "memory-threads",
        "items through an in-memory queue, producers on one side and as many consumers on the other",
        "items a second: more is better",
        tuple(
            contender for rival in rivals.BLOCKING for contender in along(SIDES, rival.name, partial(_hand_over, rival))
        ),
        axis="on each side",
    ),
    Workload(
        "wake-up",
        "from a put to the return of the get that a consumer was parked in",
        "microseconds",
        tuple(Contender(rival.name, partial(_wake_up, rival)) for rival in rivals.WAKING),
    ),
)
ON_DISK = Workload(
    "sync",
    "put that returns when the item is on disk",
    "microseconds per item",
    (
        *along(THREADS, "kestrelpy always", _kestrel_sync),
        *along((1,), "kestrelpy always, put_future", _kestrel_futures),
        *along((1,), "floor", _floor_sync),
        *along(THREADS, "append and fdatasync", _bare_sync),
        *along(THREADS, "sqlite3 FULL", partial(_store_sync, SqliteFull)),
        *along(THREADS, "lmdb sync", partial(_store_sync, LmdbSync)),
    ),
    axis="threads",
)
