"""The workloads, each a name, what it does, and who takes part. Times are microseconds per item, one thread, 100 bytes.

memory       fill an in-memory queue, then empty it
put          fill a durable queue, sync left to the system
put-take     fill a durable queue, then take every item out for good: put, take, and both together
cycle        put one item, take it out for good, again and again: a queue that is always short
batch        put-take by the thousand, where a contender can
readers      put with 1 and with 16 readers attached, all of them behind
sync         put that returns when the item is on disk, from 1 and from 16 threads
backlog      2 million items wait: memory that they cost, and a get in front of them    (scale.py, as all below)
reopen       open a queue of 1 GiB of backlog that was closed cleanly
disk         disk space of a queue with three small items
thousand     1,000 open queues: threads, descriptors, time
import       time to import
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench import rivals, scale
from bench.measure import Contender, Figures, Workload
from bench.rivals import BATCH, ITEM, Rival

MEMORY_ITEMS = 200_000
DURABLE_ITEMS = 200_000
SYNC_ITEMS = 1_600
THREADS = 16
MICROSECONDS = "microseconds per item"


def _count(rival: type[Rival], items: int, scale: float) -> int:
    """How many items a contender does: whole batches, if so many."""
    count = int(items * rival.share * scale)
    return max(rival.least, count // BATCH * BATCH if count > BATCH else count)


def _per_item(work: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) / count * 1e6


def _put(rival: type[Rival], items: int, folder: Path, scale: float) -> Figures:
    count = _count(rival, items, scale)
    made = rival(folder, count)
    try:
        return {"put": _per_item(lambda: made.fill(count, ITEM), count)}
    finally:
        made.close()


def _put_take(rival: type[Rival], items: int, folder: Path, scale: float) -> Figures:
    count = _count(rival, items, scale)
    made = rival(folder, count)
    try:
        put = _per_item(lambda: made.fill(count, ITEM), count)
        take = _per_item(lambda: made.drain(count), count)
        return {"put": put, "take": take, "both": put + take}
    finally:
        made.close()


def _cycle(rival: type[Rival], items: int, folder: Path, scale: float) -> Figures:
    count = _count(rival, items, scale)
    made = rival(folder, count)
    try:
        return {"cycle": _per_item(lambda: made.cycle(count, ITEM), count)}
    finally:
        made.close()


def _with_readers(readers: int, folder: Path, scale: float) -> Figures:
    from kestrelpy import JournaledQueue

    count = max(BATCH, int(DURABLE_ITEMS / 2 * scale))
    with JournaledQueue(folder, "bench", sync="never") as queue:
        for number in range(readers):
            queue.reader(f"r{number}", start="earliest")
        put = queue.put

        def fill() -> None:
            for _ in range(count):
                put(ITEM)

        return {"put": _per_item(fill, count)}


def _from_threads(put: Callable[[], object], threads: int, count: int) -> float:
    """Seconds per put, ``count`` of them from so many threads."""
    gate = threading.Barrier(threads + 1)
    each = max(1, count // threads)

    def work() -> None:
        gate.wait()
        for _ in range(each):
            put()
        gate.wait()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    gate.wait()
    began = time.perf_counter()
    gate.wait()
    seconds = time.perf_counter() - began
    for worker in workers:
        worker.join()
    return seconds / (each * threads)


def _kestrel_sync(threads: int, folder: Path, scale: float) -> Figures:
    from kestrelpy import JournaledQueue

    with JournaledQueue(folder, "bench", sync="always") as queue:
        put = partial(queue.put, ITEM)
        return {"put": _from_threads(put, threads, int(SYNC_ITEMS * scale)) * 1e6}


def _sqlite_sync(threads: int, folder: Path, scale: float) -> Figures:
    """One connection behind a lock: several of them, each busy waiting for its turn, are ten times slower."""
    made = rivals.SqliteFull(folder, SYNC_ITEMS)
    lock, put = threading.Lock(), made.put

    def locked() -> None:
        with lock:
            put(ITEM)

    try:
        return {"put": _from_threads(locked, threads, int(SYNC_ITEMS * scale)) * 1e6}
    finally:
        made.close()


def _bare_sync(folder: Path, scale: float) -> Figures:
    """An append and an fdatasync: what the disk takes."""
    count = max(1, int(SYNC_ITEMS * scale))
    descriptor = os.open(folder / "file", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def fill() -> None:
        for _ in range(count):
            os.write(descriptor, ITEM)
            os.fdatasync(descriptor)

    try:
        return {"put": _per_item(fill, count)}
    finally:
        os.close(descriptor)


def _queues(
    measure: Callable[[type[Rival], int, Path, float], Figures], taking_part: tuple[type[Rival], ...], items: int
) -> tuple[Contender, ...]:
    return tuple(Contender(rival.name, partial(measure, rival, items)) for rival in taking_part)


WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "memory",
        "fill an in-memory queue, then empty it",
        MICROSECONDS,
        _queues(_put_take, rivals.MEMORY, MEMORY_ITEMS),
    ),
    Workload(
        "put",
        "fill a durable queue, sync left to the system",
        MICROSECONDS,
        _queues(_put, rivals.DURABLE, DURABLE_ITEMS),
    ),
    Workload(
        "put-take",
        "fill a durable queue, then take every item out for good",
        MICROSECONDS,
        _queues(_put_take, rivals.DURABLE, DURABLE_ITEMS),
    ),
    Workload(
        "cycle",
        "put one item, take it out for good, again and again",
        MICROSECONDS,
        _queues(_cycle, rivals.DURABLE, DURABLE_ITEMS),
    ),
    Workload(
        "batch",
        f"put-take by batches of {BATCH:,} where a contender has them",
        MICROSECONDS,
        _queues(_put_take, rivals.BATCHED, DURABLE_ITEMS),
    ),
    Workload(
        "readers",
        "put with 1 and with 16 readers attached, none of them reading",
        MICROSECONDS,
        tuple(Contender(f"{number} readers", partial(_with_readers, number)) for number in (1, 16)),
    ),
    Workload(
        "sync",
        "put that returns when the item is on disk",
        MICROSECONDS,
        (
            Contender("kestrelpy always, 1 thread", partial(_kestrel_sync, 1)),
            Contender(f"kestrelpy always, {THREADS} threads", partial(_kestrel_sync, THREADS)),
            Contender("sqlite3 FULL, 1 thread", partial(_sqlite_sync, 1)),
            Contender(f"sqlite3 FULL, {THREADS} threads", partial(_sqlite_sync, THREADS)),
            Contender("append and fdatasync", _bare_sync),
        ),
    ),
    *scale.WORKLOADS,
)
