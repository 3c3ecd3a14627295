"""Scenes of an inbox: publishers, who takes in what they publish, puts beside that, and who reads.

What is asked in the end: each published version is there once, as a whole and with nothing in it, and each put once.
"""

from __future__ import annotations

import contextlib

from kestrelpy import JournaledQueue, QueueClosed, QueueEmpty
from kestrelpy.inbox import PartWriter, publish
from kestrelpy.testing import MemoryDisk
from tests.interleavings.journal_work import drain
from tests.interleavings.scene import Scene, require

ITEMS = 3


def publishing(scene: Scene) -> None:
    """Two publishers, an owner that looks by itself and is asked, puts, and a reader; closed on the way, or after."""
    rng, disk = scene.rng, MemoryDisk()
    queue = scene.open(
        disk, sync=rng.choice(("always", 0.1, "never")), segment_bytes=4096, inbox_interval=rng.choice((None, 0.2))
    )
    reader = queue.reader()
    wanted: list[bytes] = []
    seen: list[bytes] = []

    def write(app_id: str) -> None:
        for version in range(rng.randrange(1, 4)):
            for _ in range(1 + scene.chance(0.3)):
                with PartWriter("/data", "jobs", disk=disk) as writer:
                    writer.add([b"%s%d" % (app_id.encode(), version)] * ITEMS)
                    part = writer.seal()
                publish("/data", "jobs", [part], app_id=app_id, version=version, disk=disk)
            wanted.append(b"%s%d" % (app_id.encode(), version))

    def ask() -> None:
        with contextlib.suppress(QueueClosed):
            for _ in range(rng.randrange(1, 4)):
                queue.take_in()
                scene.sleep(0.05)

    def put() -> None:
        with contextlib.suppress(QueueClosed):
            for at in range(rng.randrange(1, 4)):
                how = rng.randrange(3)
                name = b"put%d" % at
                if how == 0:
                    queue.put(name)
                elif how == 1:
                    queue.put_many([name])
                else:
                    queue.put_future(name).result()
                wanted.append(name)

    def read() -> None:
        with contextlib.suppress(QueueClosed):
            while True:
                with contextlib.suppress(QueueEmpty):
                    items = reader.get_many(100, timeout=0.1)
                    reader.commit_many(items)
                    seen.extend(item.data for item in items)

    tasks = [scene.start(write, "a"), scene.start(write, "b"), scene.start(ask), scene.start(put)]
    reading = scene.start(read)
    if scene.chance(0.3):
        scene.sleep(0.05 * rng.randrange(4))
        queue.close()
    for task in tasks:
        task.join()
    if not queue.closed:
        queue.take_in()
        queue._check()
    queue.close()
    reading.join()
    _check(scene, disk, wanted, seen)


def _check(scene: Scene, disk: MemoryDisk, wanted: list[bytes], seen: list[bytes]) -> None:
    queue: JournaledQueue = scene.open(disk)
    queue.take_in()
    everything = seen + list(drain(queue.reader()).values())
    queue.close()
    for name in wanted:
        count = 1 if name.startswith(b"put") else ITEMS
        require(everything.count(name) == count, f"{name!r} is there {everything.count(name)} times")
        first = everything.index(name)
        require(everything[first : first + count] == [name] * count, f"{name!r} is in pieces")
    extra = {name for name in everything if name not in wanted}
    require(all(name.startswith(b"put") for name in extra), f"{extra} was never published")


SCENES = (publishing,)
