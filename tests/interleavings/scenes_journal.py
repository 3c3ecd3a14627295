"""Scenes of a journaled queue and its readers, on a disk in memory whose syncs take time.

What is asked in the end is the same in all of them: each acknowledged item was committed once or is still there, none
that was committed comes again, none of a put that raised is there, and nobody is left waiting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from kestrelpy import DurabilityUnknown, FullPolicy, QueueClosed, QueueEmpty, Reader, ReaderConfig, _process
from tests.interleavings.journal_work import LONG, Work
from tests.interleavings.scene import Scene, require
from tests.interleavings.scheduler import ENDED


def flow(scene: Scene) -> None:
    """Producers, consumers of one or two readers, checkpoints and retiring; in the end it is closed."""
    rng = scene.rng
    memory = rng.choice((16 << 20, 2000))
    config = ReaderConfig(memory_bytes=memory, **(_hooks(scene) if scene.chance(0.3) else {}))
    codec = Checking(scene) if scene.chance(0.3) else None
    work = Work(scene, checkpoint_interval=0.3, default_reader=config, codec=codec)
    names = rng.choice(([""], ["a"], ["a", "b"]))
    readers = [work.reader(name) for name in names]
    producers = [scene.start(work.produce, f"p{at}", rng.randrange(1, 5)) for at in range(rng.randrange(1, 4))]
    consumers = [scene.start(work.consume, rng.choice(readers)) for _ in range(rng.randrange(3))]
    consumers += [scene.start(work.consume, reader) for reader in readers]
    if scene.chance(0.5):
        scene.start(work.queue.checkpoint).join()
    for task in producers:
        task.join()
    if scene.chance(0.7):
        work.settle_all(*readers)
        work.queue._check()
        require(not any(reader.bytes for reader in readers), "bytes are left of no items")
    work.queue.close()
    for task in consumers:
        task.join()
    work.reopen_and_check(*names)


class Checking:
    """A codec that changes nothing, and minds the locks that are held when it is called."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def encode(self, value: bytes) -> bytes:
        self._scene.check_free("a codec is called")
        return value

    decode = encode


def _hooks(scene: Scene) -> dict[str, Any]:
    return {
        "on_delivery": lambda reader, seconds: scene.check_free("on_delivery is called"),
        "on_timeout": lambda reader, seconds: scene.check_free("on_timeout is called"),
        "on_abort": lambda item: scene.check_free("on_abort is called"),
    }


def overflowing(scene: Scene) -> None:
    """A reader that drops its oldest items: each item is committed, dropped, or still there, and they come in order."""
    work = Work(scene, default_reader=ReaderConfig(max_items=2, full_policy=FullPolicy.DROP_OLDEST))
    reader = work.reader("")
    seen: list[int] = [0]

    def consume() -> None:
        with contextlib.suppress(QueueClosed):
            while True:
                item = reader.get()
                require(item.id > seen[-1], f"{item.id} after {seen[-1]}")
                seen.append(item.id)
                work.ledger.deliver("", item)
                work.ledger.commit("", item, reader.commit)

    producers = [scene.start(work.produce, f"p{at}", scene.rng.randrange(1, 6)) for at in range(2)]
    consumer = scene.start(consume)
    for task in producers:
        task.join()
    if scene.chance(0.5):
        work.settle_all(reader)
        require(reader.bytes == 0, "bytes are left of no items")
    work.queue.close()
    consumer.join()
    work.reopen_and_check("", dropped=reader.stats().discarded)


def closing(scene: Scene) -> None:
    """The queue is closed or erased, or the interpreter ends, in the midst of puts and gets: everybody is told."""
    rng = scene.rng
    work = Work(scene, default_reader=ReaderConfig(max_items=3, full_policy=FullPolicy.BLOCK))
    reader = work.reader("")
    tasks = [scene.start(work.produce, f"p{at}", 3) for at in range(rng.randrange(1, 4))]
    tasks += [scene.start(work.consume, reader) for _ in range(rng.randrange(3))]
    for _ in range(rng.randrange(30)):
        scene.point()
    erases = scene.chance(0.2)
    how: Callable[[], object] = work.queue.erase if erases else rng.choice((work.queue.close, _end))
    closes = scene.chance(0.3)
    if closes:
        tasks.append(scene.start(work.queue.close))
    try:
        how()
    except QueueClosed:
        require(erases and closes, "a close was refused")
    for task in tasks:
        task.join()
    require(scene.scheduler.now < LONG, "a producer was not woken")
    if work.queue._status.error is not None and "erased" in str(work.queue._status.error):
        left = work.disk.directory("/data").names()
        require(not left, f"erased, and {left} is left")
    else:
        work.reopen_and_check("")


def _end() -> None:
    """Of the interpreter."""
    _process.dismiss_all()
    _process.close_all()


def failing(scene: Scene) -> None:
    """A sync fails: all who wait for it are told, nothing is acknowledged on its word, nobody waits for ever."""
    rng = scene.rng
    work = Work(scene, sync=rng.choice(("always", 0.1)))
    reader = work.reader("")
    work.disk.syncs, work.disk.fail_at = 0, rng.randrange(1, 6)
    tasks = [scene.start(work.produce, f"p{at}", rng.randrange(1, 5)) for at in range(rng.randrange(2, 5))]
    tasks.append(scene.start(_consume_what_there_is, work, reader))
    for task in tasks:
        task.join()
    try:
        work.queue.sync()
        work.queue.close()
    except (DurabilityUnknown, OSError):
        work.queue.close()
    require(not work.queue._syncer.commit._tickets, "a ticket was forgotten")


def _consume_what_there_is(work: Work, reader: Reader) -> None:
    """As ``consume``, and a checkpoint may fail under it."""
    for _ in range(8):
        try:
            item = reader.get(timeout=0.2)
            work.ledger.deliver(reader.name, item)
            work.ledger.commit(reader.name, item, reader.commit)
            if work.scene.chance(0.3):
                reader.checkpoint()
        except QueueEmpty:
            continue
        except (QueueClosed, DurabilityUnknown, OSError):
            return


def limited(scene: Scene) -> None:
    """Producers wait for room of a reader that is full, until items are committed, flushed, or have expired."""
    rng = scene.rng
    config = ReaderConfig(max_items=rng.choice((1, 2)), full_policy=FullPolicy.BLOCK)
    work = Work(scene, default_reader=config, checkpoint_interval=2 * LONG)  # nobody looks for who was not woken
    reader = work.reader("")
    ways = rng.randrange(3)
    count = rng.randrange(1, 4)
    expires: list[float] = []

    def produce(name: str) -> None:
        for number in range(count):
            data = scene.payload(f"{name} {number}", 100)
            seconds = rng.choice((0.5, 3.0)) if ways == 1 else None
            item_id = work.queue.put(data, timeout=LONG, expires_in=seconds)
            work.ledger.acknowledge(item_id, data)
            if seconds:
                expires.append(seconds)
                work.ledger.expirable.add(item_id)

    producers = [scene.start(produce, f"p{at}") for at in range(rng.randrange(1, 4))]
    if ways == 0:
        consumers = [scene.start(work.consume, reader) for _ in range(rng.randrange(1, 3))]
    elif ways == 1:  # nobody consumes: only expiry makes room
        consumers = []
    else:
        consumers = [scene.start(_flush_till, work, reader, producers)]
    for task in producers:
        task.join()
    require(scene.scheduler.now < LONG, "a producer was not woken")
    if ways == 0:
        work.settle_all(reader)
    work.queue.close()
    for task in consumers:
        task.join()
    if ways != 2:
        work.reopen_and_check("")


def _flush_till(work: Work, reader: Reader, producers: list[Any]) -> None:
    while any(task.state is not ENDED for task in producers):
        if reader.items:
            with contextlib.suppress(QueueClosed):
                reader.flush()
        work.scene.sleep(0.1)


def one_sync_fails(scene: Scene) -> None:
    """The first of two puts is to be synced by its own thread, or by the rotation that the other one brings."""
    work = Work(scene, sync="always", segment_bytes=4096)
    work.queue.put(bytes(1500))
    work.disk.syncs, work.disk.fail_at = 0, 1

    def put(name: bytes) -> None:
        with contextlib.suppress(DurabilityUnknown):
            work.queue.put(name + bytes(1500))
            require(False, "acknowledged before its sync")

    for task in [scene.start(put, b"one"), scene.start(put, b"other")]:
        task.join()
    work.queue.close()


def crowd(scene: Scene) -> None:
    """Many threads wait for few syncs; what is called back waits for one more."""
    work = Work(scene, sync="always")
    reader = work.reader("")
    count = scene.rng.randrange(2)

    def reply(_: object) -> None:
        scene.check_free("a future is completed")
        how = scene.rng.choice((work.queue.put, lambda _: work.queue.sync(), lambda _: reader.checkpoint(True)))
        how(b"reply")

    for _ in range(count):
        reader.get_future().add_done_callback(reply)
    for task in [scene.start(work.produce, f"p{at}", 3) for at in range(5)]:
        task.join()
    work.queue.close()


def last_put(scene: Scene) -> None:
    """Two puts while the queue is closed: each is there, or it was refused."""
    work = Work(scene, sync="always")
    work.reader("")
    tasks = [scene.start(work.produce, name, 1) for name in ("one", "other")]
    for _ in range(scene.rng.randrange(20)):
        scene.point()
    work.queue.close()
    for task in tasks:
        task.join()
    work.reopen_and_check("")


def erased(scene: Scene) -> None:
    """The files of a queue go while it syncs: no more comes of it than that the queue is closed."""
    work = Work(scene, sync="always")

    def put(name: bytes) -> None:
        with contextlib.suppress(QueueClosed):
            for _ in range(4):
                work.queue.put(name)

    def save() -> None:
        with contextlib.suppress(QueueClosed):
            reader.checkpoint(True)

    reader = work.queue.reader()
    tasks = [scene.start(put, b"one"), scene.start(put, b"other")]
    if scene.chance(0.3):
        tasks.append(scene.start(save))
    for _ in range(scene.rng.randrange(60)):
        scene.point()
    work.queue.erase()
    for task in tasks:
        task.join()
    left = work.disk.directory("/data").names()
    require(not left, f"{left} is left")


SCENES = (flow, overflowing, closing, failing, limited, one_sync_fails, crowd, last_put, erased)
