"""The workloads, each a name, what it does, and who takes part. Times are microseconds per item, one thread, 100 bytes.

memory           fill an in-memory queue, then empty it; put one and get one, again and again
memory-threads   items a second from producers to consumers, 1 and 1, 4 and 4     (threads.py, with the next)
wake-up          from a put to the consumer that was parked in get
put              fill a durable queue, sync left to the system unless the name says otherwise
put-take         fill a durable queue, then take every item out for good: put, take, and both together
cycle            put one item, take it out for good, again and again: a queue that is always short
batch            put-take by the thousand, where a contender can
size             put and take of items of 10 bytes to 1 MB
large            write and read items of 1 MB, against a bare file
readers          put with 1 to 64 readers attached, all of them behind
sync             put that returns when the item is on disk, from 1 to 64 threads  (threads.py)
behind           cycle with 10 to a million items waiting: each one put at the end, each one taken from the front
backlog          2 million items wait: memory that they cost, and a get in front of them  (scale.py, as those below)
reopen           open a queue of 10 GB of backlog that was closed cleanly, and one whose process was killed
disk             disk space of a queue with three small items
thousand         1,000 queues opened, one put each: time, threads, descriptors, disk
folder           10,000 queues in one folder, 1,000 of them busy
detached         from a put to a reader in another process; what that costs when idle   (detached.py)
import           time to import, over a bare interpreter                               (scale.py)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench import detached, on_spark, on_spark_stores, on_spark_streams, rivals, scale, threads
from bench.measure import Contender, Figures, Workload, along, per_item
from bench.rivals import BATCH, ITEM, Rival

MEMORY_ITEMS = 200_000
DURABLE_ITEMS = 200_000
SIZES = (10, 100, 1_000, 10_000, 100_000, 1_000_000)
SIZED_ITEMS = 100_000
SIZED_BYTES = 64_000_000
"""A round of one size puts so many items or so many bytes, whichever is less."""
LARGE_BYTES = 1_000_000
LARGE_ITEMS = 256
READERS = (1, 4, 16, 64)
BACKLOGS = (10, 10_000, 1_000_000)
BEHIND_ITEMS = 400_000
"""Three segments' worth: each round pays for the same few rotations."""
MICROSECONDS = "microseconds per item"


def _count(rival: type[Rival], items: int, scale: float) -> int:
    """How many items a contender does: whole batches, if so many."""
    count = int(items * rival.share * scale)
    return max(rival.least, count // BATCH * BATCH if count > BATCH else count)


def _memory(rival: type[Rival], folder: Path, scale: float) -> Figures:
    figures = _put_take(rival, MEMORY_ITEMS, folder, scale)
    return figures | _cycle(rival, MEMORY_ITEMS, folder, scale)


def _put(rival: type[Rival], items: int, folder: Path, scale: float) -> Figures:
    count = _count(rival, items, scale)
    made = rival(folder, count)
    try:
        return {"put": per_item(lambda: made.fill(count, ITEM), count)}
    finally:
        made.close()


def _through(rival: type[Rival], count: int, item: bytes, folder: Path) -> tuple[float, float]:
    """What it costs to put each of so many items, and to take it out for good."""
    made = rival(folder, count, len(item))
    try:
        return per_item(lambda: made.fill(count, item), count), per_item(lambda: made.drain(count), count)
    finally:
        made.close()


def _put_take(rival: type[Rival], items: int, folder: Path, scale: float) -> Figures:
    put, take = _through(rival, _count(rival, items, scale), ITEM, folder)
    return {"put": put, "take": take, "both": put + take}


def _cycle(rival: type[Rival], items: int, folder: Path, scale: float) -> Figures:
    count = _count(rival, items, scale)
    made = rival(folder, count)
    try:
        return {"cycle": per_item(lambda: made.cycle(count, ITEM), count)}
    finally:
        made.close()


def _sized(rival: type[Rival], size: int, folder: Path, scale: float) -> Figures:
    count = max(1, int(min(SIZED_ITEMS, SIZED_BYTES // size) * rival.share * scale))
    put, take = _through(rival, count, b"x" * size, folder)
    return {"put": put, "take": take}


def _large(rival: type[Rival], folder: Path, scale: float) -> Figures:
    write, read = _through(rival, max(1, int(LARGE_ITEMS * scale)), b"x" * LARGE_BYTES, folder)
    return {"write": write, "read": read}


def _behind(rival: type[Rival], waiting: int, folder: Path, scale: float) -> Figures:
    waiting = max(BACKLOGS[0], int(waiting * scale))
    count = max(1, int(BEHIND_ITEMS * rival.share * scale))
    made = rival(folder, waiting + count)
    try:
        made.stock(waiting, ITEM)
        return {"cycle": per_item(lambda: made.cycle(count, ITEM), count)}
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

        return {"put": per_item(fill, count)}


def _queues(
    measure: Callable[[type[Rival], int, Path, float], Figures], taking_part: tuple[type[Rival], ...], items: int
) -> tuple[Contender, ...]:
    return tuple(Contender(rival.name, partial(measure, rival, items)) for rival in taking_part)


def _families(
    measure: Callable[[type[Rival], int, Path, float], Figures], values: tuple[int, ...]
) -> tuple[Contender, ...]:
    """The quick ones along an axis."""
    families = [along(values, rival.name, partial(measure, rival)) for rival in rivals.FEW]
    return tuple(contender for family in families for contender in family)


WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "memory",
        "fill an in-memory queue, then empty it; put and get one by one",
        MICROSECONDS,
        tuple(Contender(rival.name, partial(_memory, rival)) for rival in rivals.MEMORY),
    ),
    *threads.IN_MEMORY,
    Workload(
        "put",
        "fill a durable queue, sync left to the system unless the name says otherwise",
        MICROSECONDS,
        _queues(_put, rivals.PUTTING, DURABLE_ITEMS),
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
        "size", "put and take of items of one size", MICROSECONDS, _families(_sized, SIZES), axis="bytes", max_repeats=5
    ),
    Workload(
        "large",
        "write and read items of 1 MB, against a bare file",
        MICROSECONDS,
        tuple(Contender(rival.name, partial(_large, rival)) for rival in rivals.LARGE),
    ),
    Workload(
        "readers",
        "put with readers attached, none of them reading",
        MICROSECONDS,
        along(READERS, "kestrelpy never", _with_readers),
        axis="readers",
    ),
    threads.ON_DISK,
    Workload(
        "behind",
        "put an item behind a backlog, take one out in front of it, again and again",
        MICROSECONDS,
        _families(_behind, BACKLOGS),
        axis="items waiting",
    ),
    *scale.WORKLOADS,
    *detached.WORKLOADS,
    scale.IMPORTING,
)

ON_SPARK: tuple[Workload, ...] = (*on_spark_stores.WORKLOADS, *on_spark.WORKLOADS, *on_spark_streams.WORKLOADS)
"""``python -m bench --spark`` runs these: they need Java, and a session of their own."""
