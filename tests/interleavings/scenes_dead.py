"""Scenes of items that fail: delays whose timers meet gets and aborts, and moves that meet aborts, seeks and a close.

What is asked in the end: each item is there once, in one of the two queues or with a consumer who has committed it; and
whoever waits for a delayed item gets it.
"""

from __future__ import annotations

import contextlib
import json  # noqa: F401 - here, and not in the middle of the first schedule, as the next but one

from kestrelpy import JournaledQueue, QueueClosed, QueueEmpty, ReaderConfig, UnknownItem, dead_letters
from kestrelpy.inbox import moves  # noqa: F401
from kestrelpy.testing import MemoryDisk
from tests.interleavings.journal_work import drain
from tests.interleavings.scene import Scene, require

DEAD = ReaderConfig(max_deliveries=2, retry_delay=0.05, dead_letter="dead")


def delays(scene: Scene) -> None:
    """Consumers abort what they get, with delays or without, and commit it in the end; nobody is left waiting."""
    rng, disk = scene.rng, MemoryDisk()
    queue = scene.open(disk, default_reader=ReaderConfig(retry_delay=rng.choice((0.0, 0.02, 0.3))))
    reader = queue.reader()
    count = rng.randrange(2, 6)
    seen: list[int] = []

    def consume() -> None:
        for _ in range(300):
            if len(seen) >= count:
                break
            with contextlib.suppress(QueueEmpty):  # deadlines may come early
                item = reader.get(timeout=0.5)
                if item.error_count < 2 and scene.chance(0.6):
                    item.abort(rng.choice((None, 0, 0.01, 0.1)))
                else:
                    seen.append(item.id)
                    item.commit()

    def put() -> None:
        for at in range(count):
            queue.put(b"%d" % at)

    tasks = [scene.start(consume), scene.start(put), scene.start(consume)]
    for task in tasks:
        task.join()
    require(sorted(seen) == list(range(1, count + 1)), f"no item within the time: {sorted(seen)} of {count}")
    queue._check()
    queue.close()


def dying(scene: Scene) -> None:
    """Two consumers let items die, somebody seeks to where the reader is or saves it, and the queue is closed."""
    rng, disk = scene.rng, MemoryDisk()
    queue = scene.open(disk, default_reader=DEAD, sync=rng.choice(("always", "never")))
    reader = queue.reader()
    count = rng.randrange(2, 6)
    committed: list[bytes] = []
    seeks: list[int] = []
    queue.put_many([b"%d" % at for at in range(count)])

    def consume() -> None:
        with contextlib.suppress(QueueClosed, QueueEmpty, UnknownItem):
            for _ in range(rng.randrange(2, 8)):
                item = reader.get(timeout=0.2)
                if scene.chance(0.8):
                    item.abort(reason="it fails")
                else:
                    item.commit()
                    committed.append(item.data)

    def look() -> None:
        with contextlib.suppress(QueueClosed):
            for _ in range(rng.randrange(1, 4)):
                if may_seek and scene.chance(0.4):
                    seeks.append(reader.head + 1)
                    reader.seek(seeks[-1])
                else:
                    reader.checkpoint(scene.chance(0.5))
                scene.sleep(0.01)

    may_seek = scene.chance(0.4)
    tasks = [scene.start(consume), scene.start(consume), scene.start(look)]
    if scene.chance(0.5):
        scene.sleep(0.05 * rng.randrange(3))
        queue.close()
    for task in tasks:
        task.join()
    if not queue.closed:
        queue._check()
    queue.close()
    _check(scene, disk, committed, count, 1 + len(seeks))


def _check(scene: Scene, disk: MemoryDisk, committed: list[bytes], count: int, most: int) -> None:
    """``most``: a seek brings back what was done after the head, so that may be there again after each."""
    queue: JournaledQueue = scene.open(disk)
    left = list(drain(queue.reader()).values())
    queue.close()
    with dead_letters("/data", "dead", disk=disk) as letters:
        dead = [letter.data for letter in letters]
    for at in range(count):
        data = b"%d" % at
        there = left.count(data) + dead.count(data)
        require(there + committed.count(data) >= 1, f"{data!r} is lost")
        require(there <= most, f"{data!r} is there {there} times: {left}, {dead}")


SCENES = (delays, dying)
