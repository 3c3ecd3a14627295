"""Restoring: what is restored is what the log says, at its end and at every moment; or it is an error."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrelpy import (
    JournaledQueue,
    QueueEmpty,
    scan,
    verify,
)
from kestrelpy import inspect as inspect_queue
from kestrelpy._journal.format import Checkpoint
from kestrelpy.ship import NoSuchQueue, Restored, reading, restore
from kestrelpy.ship.ship_file import ShipFile, read_ship_file
from kestrelpy.testing import MemoryDisk
from kestrelpy.testing.clock import ManualClock
from kestrelpy.testing.stores import MemoryStore
from kestrelpy.work import WorkQueue
from tests.ship.shipped import ARCHIVE, FOLDER, QUEUE, Moment, Shipper
from tests.support.budget import ALL, SEED, Tally

HERE = "/elsewhere"
SEGMENT_BYTES = 4096


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PAUSES", (0.0,) * 5)


def queue_on(disk: Any, folder: str = FOLDER, **options: Any) -> JournaledQueue:
    made: dict[str, Any] = {
        "segment_bytes": SEGMENT_BYTES,
        "sync": "always",
        "inbox_interval": None,
        "clock": ManualClock(255),
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


# -- to the end, to a slot, to a moment ------------------------------------------------------------------------------


@given(st.integers(0, 10_000))
@settings(max_examples=200 if ALL else 25, deadline=None)
def test_the_end_is_what_was_shipped(seed: int) -> None:
    shipper = grown(seed)
    for how in ({}, {"threads": 1}, {"all": True}):
        check_restored(shipper, shipper.moments[-1], **how)


@pytest.mark.parametrize("seed", range(40 if ALL else 3))
def test_every_slot_is_exact(seed: int, tally: Tally) -> None:
    shipper = grown(SEED * 100 + seed)
    for moment in shipper.moments:
        check_restored(shipper, moment, at_slot=moment.slot)
    tally.add("slots restored, exact", len(shipper.moments))


@pytest.mark.parametrize("seed", range(40 if ALL else 3))
def test_every_time_is_exact(seed: int, tally: Tally) -> None:
    shipper = grown(SEED * 100 + 50 + seed)
    times = {each.written_ms + some for each in shipper.moments for some in (-1, 0, 1)}
    for at_ms in sorted(times):
        until = [each for each in shipper.moments if each.written_ms <= at_ms]
        if until:
            check_restored(shipper, until[-1], at_ms=at_ms)
        else:
            with pytest.raises(NoSuchQueue, match=f"begins later, at {shipper.moments[0].written_ms} ms"):
                restore(shipper.store, QUEUE, HERE, at_ms=at_ms, disk=MemoryDisk())
    tally.add("times restored, exact", len(times))


def test_times_that_fall_from_one_owner_to_the_next() -> None:
    disk = MemoryDisk()
    with queue_on(disk) as queue:
        shipper = None
        for late in (0, -5000, 3000, -9000):
            queue.put(b"%d" % late)
            shipper = shipper or Shipper(MemoryStore(), disk)
            shipper.written_ms += late
            shipper.fence()
            shipper.ship()
            shipper.manifest()
            queue.put(b"more")
            shipper.ship()
    assert shipper is not None
    for at_ms in {each.written_ms + some for each in shipper.moments for some in (-1, 0, 1)}:
        until = [each for each in shipper.moments if each.written_ms <= at_ms]
        if until:
            check_restored(shipper, until[-1], at_ms=at_ms)


def test_what_all_readers_have_passed_is_left_out_unless_all_is_wanted() -> None:
    disk = MemoryDisk()
    with queue_on(disk) as queue:
        queue.put(b"x" * 100)
        shipper = Shipper(MemoryStore(), disk)
        shipper.fence()
        for at in range(30):
            queue.put(b"%d" % at * 300)
            shipper.ship()
        for _ in range(20):
            queue.get_nowait().commit()
        queue.checkpoint()
        shipper.ship()
    some = check_restored(shipper, shipper.moments[-1])
    every = check_restored(shipper, shipper.moments[-1], all=True)
    assert some.segments < every.segments
    assert some.items < every.items == 31
    assert some.bytes < every.bytes


def test_progress_ends_with_everything() -> None:
    shipper = grown(7)
    seen: list[tuple[int, int]] = []
    found = restore(shipper.store, QUEUE, HERE, disk=MemoryDisk(), progress=lambda *each: seen.append(each))
    assert seen == sorted(seen)
    assert seen[-1] == (found.bytes, found.bytes)


def test_the_local_file_says_where_it_came_from(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    from kestrelpy.ship import open_store

    shipper = grown(5, open_store(url))
    restore(url, QUEUE, tmp_path / "end")
    restore(url, QUEUE, tmp_path / "slot", at_slot=3)
    restore(url, QUEUE, tmp_path / "last", at_slot=shipper.state.slot)
    from kestrelpy._disk.real import RealDisk

    queue_id = shipper.opening.queue_id
    for name, slot, is_end in (
        ("end", shipper.state.slot, True),
        ("slot", 3, False),
        ("last", shipper.state.slot, True),
    ):
        folder = RealDisk().directory(str(tmp_path / name))
        said = ShipFile(url, queue_id, restored_slot=slot, restored_to_end=is_end)
        assert read_ship_file(folder, QUEUE) == said
        assert f"{QUEUE}.restore" not in folder.names()
        folder.close()


def test_a_store_without_a_url_is_described() -> None:
    shipper, disk = grown(5), MemoryDisk()
    restore(shipper.store, QUEUE, HERE, disk=disk)
    said = read_ship_file(disk.directory(HERE), QUEUE)
    assert said is not None
    assert said.url == "a store in memory"


def test_ids_that_may_have_been_given_out_stay_used() -> None:
    disk = MemoryDisk()
    with queue_on(disk) as queue:
        queue.put(b"one")
        shipper = Shipper(MemoryStore(), disk)
        shipper.fence()
        shipper.ship()
        shipper.fence(gap=1 << 30)
    other = MemoryDisk()
    restore(shipper.store, QUEUE, HERE, disk=other)
    with queue_on(other, HERE) as queue:
        assert queue.put(b"two") == 2 + (1 << 30)
        assert [queue.get_nowait().value for _ in range(2)] == [b"one", b"two"]


def test_an_empty_log_makes_an_empty_queue() -> None:
    disk = MemoryDisk()
    with queue_on(disk) as queue:
        queue.put(b"one")
        shipper = Shipper(MemoryStore(), disk)
        shipper.fence()
    check_restored(shipper, shipper.moments[0])


def test_the_ledger_of_the_inbox_comes_along() -> None:
    from kestrelpy.inbox import PartWriter, publish

    disk = MemoryDisk()
    queue_on(disk).close()
    with PartWriter(FOLDER, QUEUE, disk=disk) as writer:
        writer.add([b"of a batch"])
        part = writer.seal()
    publish(FOLDER, QUEUE, [part], app_id="app", version=4, disk=disk)
    with queue_on(disk) as queue:
        queue.put(b"one")
        shipper = Shipper(MemoryStore(), disk)
        shipper.fence()
        shipper.ship()
        shipper.close()
    other = MemoryDisk()
    restore(shipper.store, QUEUE, HERE, disk=other)
    from kestrelpy.inbox import last_version

    assert last_version(HERE, QUEUE, "app", disk=other) == 4
    other = MemoryDisk()
    restore(shipper.store, QUEUE, HERE, at_slot=1, disk=other)
    assert last_version(HERE, QUEUE, "app", disk=other) is None


def test_a_work_queue_is_restored() -> None:
    disk = MemoryDisk()
    with WorkQueue(FOLDER, QUEUE, disk=disk, clock=ManualClock(255)) as work:
        work.put(b"a job")
        shipper = Shipper(MemoryStore(), disk)
        shipper.fence()
        shipper.ship()
    other = MemoryDisk()
    restore(shipper.store, QUEUE, HERE, disk=other)
    with WorkQueue(HERE, QUEUE, disk=other, clock=ManualClock(255)) as work, work.session() as session:
        job = session.reserve(timeout=0)
        assert job is not None
        assert job.body == b"a job"
