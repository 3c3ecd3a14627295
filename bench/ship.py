"""A queue that is shipped to a store, beside one that is not, and beside the store alone: ``python -m bench.ship``.

Workloads:
    put       a put of 100 bytes with acks="disk": not shipped, shipped to a folder, and to an object store.
    shipping  how fast what was put comes to the store, in items of 16 kB; the floor writes objects of the same size.
    shipped   one thread, acks="shipped", interval=0: the time of a put; the floor creates one object.
    threads   64 threads, acks="shipped", the usual interval of 0.05 s: puts a second.
    rate      1 MB/s for some seconds, in items of 1 kB: processor time a second, not shipped and shipped.
    restore   how fast a queue is restored; one floor reads the segments, the other one writes and syncs them, too.

The object store is SeaweedFS on the loopback, with its data in a temporary folder. How not to misread it: it shares the
processors and the disk with the queue.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import program
from bench.goals import Figure, Goal
from bench.measure import Contender, Figures, LeftOut, Workload
from kestrelpy import JournaledQueue
from kestrelpy.ship import Ship, Store, open_store, restore
from tests.support import seaweed

PUTS, SMALL = 200_000, bytes(100)
LARGE = bytes(16_000)
SHIPPED_BYTES = 256 << 20
RESTORED_BYTES = 1 << 30
SEGMENT_BYTES = 16 << 20
RATE_SECONDS = 10.0
NONE, FOLDER, OBJECTS = "not shipped", "a folder", "SeaweedFS"
FLOOR, WRITTEN = "floor, ", "floor, written, "
Make = Callable[[Path], "contextlib.AbstractContextManager[dict[str, Any] | None]"]


@contextlib.contextmanager
def nowhere(_: Path) -> Iterator[None]:
    yield None


@contextlib.contextmanager
def to_a_folder(folder: Path) -> Iterator[dict[str, Any]]:
    yield {"store": f"file://{folder}/store"}


@contextlib.contextmanager
def to_objects(_: Path) -> Iterator[dict[str, Any]]:
    if seaweed.program() is None:
        raise LeftOut(seaweed.NOT_INSTALLED)
    with seaweed.seaweed() as server:
        yield {"store": f"s3://{seaweed.BUCKET}/bench", "options": server.options()}


STORES: dict[str, Make] = {FOLDER: to_a_folder, OBJECTS: to_objects}


def _queue(folder: Path, made: dict[str, Any] | None, **ship: Any) -> JournaledQueue:
    return JournaledQueue(folder / "queue", "bench", ship=None if made is None else Ship(**made, **ship))


def _store(made: dict[str, Any] | None) -> Store:
    assert made is not None
    return open_store(made["store"], options=made.get("options"))


def put(make: Make) -> Callable[[Path, float], Figures]:
    def measure(folder: Path, scale: float) -> Figures:
        count = max(1000, int(PUTS * scale))
        with make(folder) as made, _queue(folder, made) as queue:
            call = queue.put
            for _ in range(1000):
                call(SMALL)
            began = time.perf_counter()
            for _ in range(count):
                call(SMALL)
            return {"a put": (time.perf_counter() - began) / count}

    return measure


def shipping(make: Make) -> Callable[[Path, float], Figures]:
    def measure(folder: Path, scale: float) -> Figures:
        with make(folder) as made:
            with JournaledQueue(folder / "queue", "bench") as queue:
                total = _fill(queue, int(SHIPPED_BYTES * scale))
            began = time.perf_counter()
            with _queue(folder, made) as queue:
                assert queue.shipping is not None
                queue.shipping.flush()
                return {"a MB": (time.perf_counter() - began) / total * 1e6}

    return measure


def _fill(queue: JournaledQueue, size: int) -> int:
    count = max(1, size // len(LARGE))
    for _ in range(count):
        queue.put(LARGE)
    return count * len(LARGE)


def plain_objects(make: Make) -> Callable[[Path, float], Figures]:
    """As many bytes as objects of a segment's size, four at once."""

    def measure(folder: Path, scale: float) -> Figures:
        with make(folder) as made:
            store, data = _store(made), bytes(SEGMENT_BYTES)
            count = max(1, int(SHIPPED_BYTES * scale) // SEGMENT_BYTES)
            keys = [f"plain/{number}" for number in range(count)]
            began = time.perf_counter()
            _four_at_once(lambda key: store.create(key, data), keys)
            return {"a MB": (time.perf_counter() - began) / (count * SEGMENT_BYTES) * 1e6}

    return measure


def _four_at_once(call: Callable[[str], object], keys: list[str]) -> None:
    def work(first: int) -> None:
        for key in keys[first::4]:
            call(key)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def shipped(make: Make) -> Callable[[Path, float], Figures]:
    def measure(folder: Path, scale: float) -> Figures:
        with make(folder) as made, _queue(folder, made, acks="shipped", interval=0) as queue:
            return {"a put": _median(lambda _: queue.put(SMALL), max(20, int(300 * scale)))}

    return measure


def bare_create(make: Make) -> Callable[[Path, float], Figures]:
    def measure(folder: Path, scale: float) -> Figures:
        with make(folder) as made:
            store = _store(made)
            return {"a put": _median(lambda number: store.create(f"bare/{number}", SMALL), max(20, int(300 * scale)))}

    return measure


def _median(call: Callable[[int], object], count: int) -> float:
    seconds = []
    for number in range(count):
        began = time.perf_counter()
        call(number)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def threads(make: Make) -> Callable[[Path, float], Figures]:
    def measure(folder: Path, scale: float) -> Figures:
        each = max(2, int(40 * scale))
        with make(folder) as made, _queue(folder, made, acks="shipped") as queue:
            workers = [threading.Thread(target=lambda: [queue.put(SMALL) for _ in range(each)]) for _ in range(64)]
            began = time.perf_counter()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            return {"puts/s": 64 * each / (time.perf_counter() - began)}

    return measure


def rate(make: Make) -> Callable[[Path, float], Figures]:
    def measure(folder: Path, scale: float) -> Figures:
        seconds, item = max(2.0, RATE_SECONDS * scale), bytes(1000)
        with make(folder) as made, _queue(folder, made) as queue:
            began, used = time.perf_counter(), time.process_time()
            for tick in range(int(seconds * 50)):
                queue.put_many([item] * 20)
                time.sleep(max(0.0, began + (tick + 1) / 50 - time.perf_counter()))
            return {"processor": (time.process_time() - used) / (time.perf_counter() - began)}

    return measure


def restored(make: Make) -> Callable[[Path, float], Figures]:
    def measure(folder: Path, scale: float) -> Figures:
        with make(folder) as made:
            with _queue(folder, made) as queue:
                total = _fill(queue, int(RESTORED_BYTES * scale))
            assert made is not None
            began = time.perf_counter()
            restore(made["store"], "bench", folder / "again", options=made.get("options"))
            return {"a MB": (time.perf_counter() - began) / total * 1e6}

    return measure


def plain_reads(make: Make, *, written: bool = False) -> Callable[[Path, float], Figures]:
    """Whole objects, four at once; ``written``: into files, each synced."""

    def measure(folder: Path, scale: float) -> Figures:
        with make(folder) as made:
            with _queue(folder, made) as queue:
                total = _fill(queue, int(RESTORED_BYTES * scale))
            store = _store(made)
            keys = [each.key for each in store.list("bench/seg/")]
            copies = folder / "copies"
            copies.mkdir()

            def copy(key: str) -> None:
                data = store.read(key)
                if written and data is not None:
                    with open(copies / key.replace("/", "-"), "wb") as file:
                        file.write(data)
                        os.fsync(file.fileno())

            began = time.perf_counter()
            _four_at_once(copy, keys)
            return {"a MB": (time.perf_counter() - began) / total * 1e6}

    return measure


def _each(ours: Callable[[Make], Any], floor: Callable[[Make], Any] | None = None) -> tuple[Contender, ...]:
    made = [Contender(name, ours(make)) for name, make in STORES.items()]
    if floor is not None:
        made += [Contender(FLOOR + name, floor(make)) for name, make in STORES.items()]
    return tuple(made)


WORKLOADS = (
    Workload("put", 'a put of 100 bytes, acks="disk"', "s", (Contender(NONE, put(nowhere)), *_each(put))),
    Workload("shipping", "a backlog of items of 16 kB comes to the store", "s", _each(shipping, plain_objects)),
    Workload("shipped", 'one thread, acks="shipped", interval=0', "s", _each(shipped, bare_create)),
    Workload("threads", '64 threads, acks="shipped"', "/s", _each(threads), max_repeats=3),
    Workload("rate", "1 MB/s", "s/s", (Contender(NONE, rate(nowhere)), *_each(rate)), max_repeats=3),
    Workload(
        "restore",
        "a queue is restored",
        "s",
        (
            *_each(restored, plain_reads),
            *(Contender(WRITTEN + name, plain_reads(make, written=True)) for name, make in STORES.items()),
        ),
        max_repeats=2,
        warm_up=False,
    ),
)


def _goals() -> Iterator[Goal]:
    for name in STORES:
        over, under = Figure("put", name, "a put"), Figure("put", NONE, "a put")
        yield Goal(f"put, shipped to {name}, over not shipped", over, under, at_most=1.05)
    yield Goal("shipping to a folder, s a MB", Figure("shipping", FOLDER, "a MB"), at_most=0.01)
    for workload in ("shipping", "restore"):
        over, under = Figure(workload, FLOOR + OBJECTS, "a MB"), Figure(workload, OBJECTS, "a MB")
        yield Goal(f"{workload}, SeaweedFS: the floor's time over ours", over, under, at_least=0.8)
    over, under = Figure("restore", WRITTEN + OBJECTS, "a MB"), Figure("restore", OBJECTS, "a MB")
    yield Goal("restore, SeaweedFS: the time of the floor that writes over ours", over, under, at_least=0.8)
    yield Goal("restore from a folder, s a MB", Figure("restore", FOLDER, "a MB"), at_most=0.01)
    over, under = Figure("shipped", OBJECTS, "a put"), Figure("shipped", FLOOR + OBJECTS, "a put")
    yield Goal("a shipped put over a bare create, SeaweedFS", over, under, at_most=3.0)
    yield Goal("64 threads, puts/s, SeaweedFS", Figure("threads", OBJECTS, "puts/s"), at_least=500)
    yield Goal("processor at 1 MB/s, SeaweedFS", Figure("rate", OBJECTS, "processor"), at_most=0.1)


GOALS = tuple(_goals())


def main(argv: Sequence[str] | None = None) -> int:
    """Run what ``argv`` asks for; returns the exit status."""
    return program.run("ship", __doc__, WORKLOADS, GOALS, argv)


if __name__ == "__main__":
    sys.exit(main())
