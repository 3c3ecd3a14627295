"""What a restored queue is compared with, for the tests of restoring."""

from __future__ import annotations

from random import Random
from typing import Any

from kestrelpy import JournaledQueue, QueueEmpty, scan, verify
from kestrelpy import inspect as inspect_queue
from kestrelpy._journal.format import Checkpoint
from kestrelpy.inbox import PartWriter, publish
from kestrelpy.ship import Restored, reading, restore
from kestrelpy.testing import MemoryDisk
from kestrelpy.testing.clock import ManualClock
from kestrelpy.testing.stores import MemoryStore
from tests.ship.shipped import ARCHIVE, FOLDER, QUEUE, Moment, Shipper

HERE = "/elsewhere"
SEGMENT_BYTES = 4096


def queue_on(disk: Any, folder: str = FOLDER, **options: Any) -> JournaledQueue:
    made: dict[str, Any] = {
        "segment_bytes": SEGMENT_BYTES,
        "sync": "always",
        "inbox_interval": None,
        "clock": ManualClock(255),
        "ship": False,
    }
    archive = ARCHIVE if folder == FOLDER else None
    return JournaledQueue(folder, QUEUE, disk=disk, archive_dir=archive, **(made | options))


def rest_of(disk: Any, folder: str = HERE) -> dict[str, list[tuple[int, bytes]]]:
    """What each reader of a queue gets from here on; the queue is opened for that."""
    found: dict[str, list[tuple[int, bytes]]] = {}
    with queue_on(disk, folder) as queue:
        readers = [each.name for each in inspect_queue(folder, QUEUE, disk=disk).readers] or [""]
        for name in readers:
            reader: Any = queue.reader(name) if name else queue
            found[name] = got = []
            try:
                while True:
                    item = reader.get_nowait()
                    got.append((item.id, item.value))
            except QueueEmpty:
                pass
    return found


def rest_due(moment: Moment, items: dict[int, bytes]) -> dict[str, list[tuple[int, bytes]]]:
    """What each reader is to get, as of a moment."""
    due: dict[str, list[tuple[int, bytes]]] = {}
    there = {key: data for key, data in items.items() if key <= moment.last_id}
    new = Checkpoint(bytes(16), "", 0, 0, 0, 0)
    for name, state in (moment.checkpoints or {"": new}).items():
        done = {each for first, last in state.done for each in range(first, last + 1)}
        due[name] = [(key, there[key]) for key in sorted(there) if key > state.head and key not in done]
    return due


def small_log(store: Any = None, *, with_manifest: bool = True) -> Shipper:
    """A small log with all that there is: two closed segments, an active one, two readers, a restart, a manifest of the
    last slot.
    """
    disk = MemoryDisk()
    with queue_on(disk) as queue:
        queue.put(b"first")
        shipper = Shipper(store if store is not None else MemoryStore(), disk)
        shipper.fence()
        for size in (2000, 2000, 10, 2500, 2500, 10, 20):
            queue.put(bytes([size % 251]) * size)
            shipper.ship(seals_alone=True)
        audit = queue.reader("audit")
        for _ in range(3):
            audit.get_nowait().commit()
        queue.reader("spark", start="earliest").get_nowait()
        queue.checkpoint()
        shipper.ship()
        queue.put(b"last")
        shipper.fence(gap=5)
        shipper.ship()
    if with_manifest:
        shipper.manifest()
    return shipper


def grown(seed: int, store: Any = None, *, steps: int = 30) -> Shipper:
    """A queue that lived for a while, with readers, restarts and torn tails, and was shipped on the way."""
    random, disk = Random(seed), MemoryDisk()
    queue = queue_on(disk)
    queue.put(b"first")
    shipper = Shipper(store if store is not None else MemoryStore(), disk, seed=seed)
    shipper.fence()
    names = [""]
    for _ in range(steps):
        what = random.choice(("put", "put", "put", "many", "get", "ship", "ship", "restart", "manifest", "reader"))
        if what == "put":
            queue.put(random.randbytes(random.choice((0, 50, 700, 2000))))
        elif what == "many":
            queue.put_many([random.randbytes(9) for _ in range(random.randrange(1, 5))])
        elif what == "get":
            reader: Any = queue.reader(random.choice(names)) if names[-1] else queue
            taken = [each for each in (_got(reader) for _ in range(random.randrange(1, 7))) if each is not None]
            for item in random.sample(taken, random.randint(0, len(taken))):
                item.commit()
        elif what == "ship":
            queue.checkpoint()
            shipper.ship(most=random.choice((1, 2, 100)), seals_alone=random.random() < 0.5)
        elif what == "restart":
            queue.close()
            queue = queue_on(disk)
            shipper.close()
            shipper.fence(gap=random.choice((0, 0, 3, 1 << 30)))
        elif what == "manifest":
            shipper.manifest()
        elif len(names) < 3:
            names = [*filter(None, names), f"reader-{len(names)}"]
            queue.reader(names[-1])
    queue.close()
    shipper.ship()
    shipper.close()
    return shipper


def _got(reader: Any) -> Any:
    try:
        return reader.get_nowait()
    except QueueEmpty:
        return None


def collect(shipper: Shipper, kept: int) -> None:
    """Delete what is not needed from the manifest of slot ``kept`` on."""
    manifest = reading.ShippedQueue(shipper.store, QUEUE).manifest(kept)
    stays = {*manifest.fences, *(each.slot for each in manifest.tail)}
    for each in shipper.store.list(f"{QUEUE}/"):
        kind, _, number = each.key.removeprefix(f"{QUEUE}/").partition("/")
        is_old_slot = kind == "log" and int(number) <= kept and int(number) not in stays
        if is_old_slot or (kind == "manifest" and int(number) < kept):
            shipper.store.delete([each.key])


def check_restored(shipper: Shipper, moment: Moment, **how: Any) -> Restored:
    """Restore, and compare with what the log was at that moment."""
    disk = MemoryDisk()
    found = restore(shipper.store, QUEUE, HERE, disk=disk, **how)
    assert (found.slot, found.last_id, found.written_ms) == (moment.slot, moment.last_id, moment.written_ms)
    assert found.readers == tuple(sorted(moment.checkpoints))
    assert verify(HERE, QUEUE, disk=disk).ok
    there = [(record.id, record.data) for record in scan(HERE, QUEUE, disk=disk)]
    assert there == [(key, shipper.items[key]) for key in sorted(shipper.items) if key <= moment.last_id][-len(there) :]
    assert found.items == len(there)
    assert rest_of(disk) == rest_due(moment, shipper.items)
    return found


def log_with_a_batch() -> Shipper:
    disk = MemoryDisk()
    queue_on(disk).close()
    with PartWriter(FOLDER, QUEUE, disk=disk) as writer:
        writer.add([b"of a batch"])
        part = writer.seal()
    publish(FOLDER, QUEUE, [part], app_id="app", version=4, disk=disk)
    with queue_on(disk) as queue:
        for size in (2000, 2000, 10):
            queue.put(b"x" * size)
        audit = queue.reader("audit")
        audit.get_nowait().commit()
        queue.checkpoint()
        shipper = Shipper(MemoryStore(), disk)
        shipper.fence()
        shipper.ship(seals_alone=True)
        shipper.close()
    return shipper
