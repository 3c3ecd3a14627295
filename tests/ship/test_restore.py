"""Restoring: what is restored is what the log says, at its end and at every moment; or it is an error."""

from __future__ import annotations

import errno
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrelpy import JournaledQueue, QueueLocked, RestoreIncomplete, scan
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal.checkpoint import load_checkpoint
from kestrelpy._journal.file_names import mark_name
from kestrelpy._journal.format import Checkpoint
from kestrelpy.errors import InvalidName
from kestrelpy.inbox import last_version
from kestrelpy.ship import (
    NoSuchQueue,
    RestoreTargetExists,
    Ship,
    open_store,
    reading,
    restore,
)
from kestrelpy.ship.restoring import is_taken, needed
from kestrelpy.ship.ship_file import ShipFile, read_ship_file
from kestrelpy.testing import MemoryDisk
from kestrelpy.testing.clock import ManualClock
from kestrelpy.testing.stores import MemoryStore
from kestrelpy.work import WorkQueue
from tests.ship.restores import (
    HERE,
    check_restored,
    collect,
    grown,
    log_with_a_batch,
    queue_on,
    rest_due,
    rest_of,
    small_log,
)
from tests.ship.shipped import FOLDER, QUEUE, Shipper
from tests.support.budget import ALL, SEED, Tally


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PAUSES", (0.0,) * 5)


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


def test_just_what_no_reader_has_passed_is_needed() -> None:
    shipper = small_log()
    state = shipper.state
    lasts = [each.segment_footer().last_id for each in state.segments]
    for head in range(state.last_id + 1):
        state.checkpoints = {name: Checkpoint(bytes(16), name, at, 0, 0, 0) for name, at in (("a", head), ("b", 99))}
        assert [each.segment_footer().last_id for each in needed(state)] == [last for last in lasts if last > head]
    state.checkpoints = {}
    assert needed(state) == state.segments


def test_a_queue_that_is_read_to_its_end_and_closed() -> None:
    """The last segment has nothing that anybody needs, and the ids go on after it."""
    disk = MemoryDisk()
    with queue_on(disk) as queue:
        queue.put_many([b"one", b"two"])
        for _ in range(2):
            queue.get_nowait().commit()
    with queue_on(disk):
        pass
    shipper = Shipper(MemoryStore(), disk)
    shipper.fence()
    shipper.ship(seals_alone=True)
    shipper.close()
    assert not shipper.state.tail
    found = check_restored(shipper, shipper.moments[-1])
    assert found.segments == 1
    disk = MemoryDisk()
    restore(shipper.store, QUEUE, HERE, disk=disk)
    with queue_on(disk, HERE) as queue:
        assert queue.put(b"three") == 3
        assert queue.get_nowait().id == 3


def test_a_reader_whose_checkpoint_is_lost_later_skips_nothing() -> None:
    shipper, disk = small_log(), MemoryDisk()
    restore(shipper.store, QUEUE, HERE, disk=disk)
    disk.directory(HERE).unlink(f"{QUEUE}+spark.checkpoint")
    with queue_on(disk, HERE) as queue:
        assert queue.reader("spark").get_nowait().id == 1


def test_progress_ends_with_everything() -> None:
    shipper = grown(7)
    seen: list[tuple[int, int]] = []
    found = restore(shipper.store, QUEUE, HERE, disk=MemoryDisk(), progress=lambda *each: seen.append(each))
    assert seen == sorted(seen)
    assert seen[-1] == (found.bytes, found.bytes)


def test_the_local_file_says_where_it_came_from(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    shipper = grown(5, open_store(url))
    restore(url, QUEUE, tmp_path / "end")
    restore(url, QUEUE, tmp_path / "slot", at_slot=3)
    restore(url, QUEUE, tmp_path / "last", at_slot=shipper.state.slot)
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


def test_a_fence_beyond_what_an_opening_believes_is_not_followed() -> None:
    disk = MemoryDisk()
    with queue_on(disk) as queue:
        queue.put(b"one")
        shipper = Shipper(MemoryStore(), disk)
        shipper.fence()
        shipper.ship()
        shipper.fence(gap=1 << 40)
    check_restored(shipper, shipper.moments[-1])


def test_an_empty_log_makes_an_empty_queue() -> None:
    disk = MemoryDisk()
    with queue_on(disk) as queue:
        queue.put(b"one")
        shipper = Shipper(MemoryStore(), disk)
        shipper.fence()
    check_restored(shipper, shipper.moments[0])


def test_a_restored_queue_that_is_empty_has_a_mark() -> None:
    """By it an opening knows which queue that is, before it has a segment."""
    disk, other = MemoryDisk(), MemoryDisk()
    with queue_on(disk) as queue:
        queue.put(b"one")
        shipper = Shipper(MemoryStore(), disk)
        shipper.fence()
    restore(shipper.store, QUEUE, HERE, disk=other)
    state, exists = load_checkpoint(other.directory(HERE), mark_name(QUEUE))
    assert exists
    assert state is not None
    assert (state.head, state.queue_id) == (0, shipper.state.header.queue_id if shipper.state.header else b"")


def test_one_rule_says_whether_a_queue_is_there(tmp_path: Path) -> None:
    """A file that only begins like a queue's is none; a ledger is, for ``restore`` as for ``on_missing``."""
    store, folder = MemoryStore(), tmp_path / "there"
    with JournaledQueue(tmp_path / "here", QUEUE, ship=Ship(store, interval=0)) as queue:
        queue.put(b"one")
    folder.mkdir()
    (folder / f"{QUEUE}.txt").write_bytes(b"a note")
    with JournaledQueue(folder, QUEUE, ship=Ship(store, interval=0, on_missing="restore")) as queue:
        assert queue.get(timeout=0).data == b"one"
    inbox = tmp_path / "ledger" / "inbox"
    inbox.mkdir(parents=True)
    (inbox / f"{QUEUE}.batches").write_bytes(b"")
    assert is_taken(MemoryDisk().directory(HERE, create=True), QUEUE, MemoryDisk()) is False
    assert is_taken(RealDisk().directory(str(tmp_path / "ledger")), QUEUE, None)
    with pytest.raises(RestoreTargetExists):
        restore(store, QUEUE, tmp_path / "ledger")


def test_the_ledger_of_the_inbox_comes_along() -> None:
    shipper, disk = log_with_a_batch(), MemoryDisk()
    restore(shipper.store, QUEUE, HERE, disk=disk)
    assert last_version(HERE, QUEUE, "app", disk=disk) == 4
    disk = MemoryDisk()
    restore(shipper.store, QUEUE, HERE, at_slot=1, disk=disk)
    assert last_version(HERE, QUEUE, "app", disk=disk) is None


def test_a_work_queue_is_restored() -> None:
    disk = MemoryDisk()
    with WorkQueue(FOLDER, QUEUE, disk=disk, clock=ManualClock(255)) as work:
        work.put(b"a job")
        shipper = Shipper(MemoryStore(), disk)
        shipper.fence()
        shipper.ship()
    other = MemoryDisk()
    restore(shipper.store, QUEUE, HERE, disk=other)
    with WorkQueue(HERE, QUEUE, disk=other, ship=False, clock=ManualClock(255)) as work, work.session() as session:
        job = session.reserve(timeout=0)
        assert job is not None
        assert job.body == b"a job"


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_after_a_collection_the_kept_moments_are_exact_and_the_others_are_named() -> None:
    disk = MemoryDisk()
    with queue_on(disk) as queue:
        queue.put(b"first")
        shipper = Shipper(MemoryStore(), disk)
        shipper.fence()
        kept = 0
        for at in range(40):
            queue.put(bytes([at]) * 500)
            shipper.ship()
            if at % 10 == 5:
                for _ in range(6):
                    queue.get_nowait().commit()
                queue.checkpoint()
                shipper.ship()
                shipper.manifest()
                kept = shipper.state.slot if at == 15 else kept
    collect(shipper, kept)
    for moment in shipper.moments:
        hows: tuple[dict[str, Any], ...] = ({"at_slot": moment.slot}, {"at_ms": moment.written_ms})
        for how in hows:
            until = [each for each in shipper.moments if each.written_ms <= how.get("at_ms", 1 << 60)]
            due = moment if "at_slot" in how else until[-1]
            if due.slot >= kept:
                check_restored(shipper, due, **how)
            elif due.slot > 1:
                with pytest.raises(NoSuchQueue, match=f"from slot {kept} on") as error:
                    restore(shipper.store, QUEUE, HERE, disk=MemoryDisk(), **how)
                assert error.value.first_slot == kept
                assert error.value.first_ms == shipper.moments[kept - 1].written_ms
    check_restored(shipper, shipper.moments[-1])


def test_what_is_not_there_is_named() -> None:
    shipper = small_log()
    end, disk = shipper.state.slot, MemoryDisk()
    hows: dict[str, dict[str, Any]] = {
        f"slot {end + 1} is not there: its log ends at slot {end}": {"at_slot": end + 1},
        "its log begins later": {"at_ms": 1},
    }
    for reason, how in hows.items():
        with pytest.raises(NoSuchQueue, match=reason):
            restore(shipper.store, QUEUE, HERE, disk=disk, **how)
    for other in ("jobs-2", "job"):
        with pytest.raises(NoSuchQueue, match=f"a store in memory, queue '{other}': it is not there"):
            restore(shipper.store, other, HERE, disk=disk)
    with pytest.raises(NoSuchQueue, match="it is not there"):
        restore(MemoryStore(), QUEUE, HERE, at_slot=3, disk=disk)
    with pytest.raises(FileNotFoundError):
        disk.directory(HERE)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"at_slot": 0}, ValueError),
        ({"at_slot": 1.5}, TypeError),
        ({"at_slot": 1, "at_ms": 1}, ValueError),
        ({"threads": 0}, ValueError),
        ({"queue": "a/b"}, InvalidName),
        ({"queue": "../jobs"}, InvalidName),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], error: type[Exception]) -> None:
    made: dict[str, Any] = {"store": MemoryStore(), "queue": QUEUE, "directory": HERE, "disk": MemoryDisk()}
    with pytest.raises(error):
        restore(**(made | wrong))


@pytest.mark.parametrize("at", ["jobs.mark", "jobs+audit.lock", "jobs.0000000000255.segment", "inbox/jobs.batches"])
def test_a_folder_with_such_a_queue_is_left_alone(at: str) -> None:
    shipper, disk = small_log(), MemoryDisk()
    folder, _, name = f"{HERE}/{at}".rpartition("/")
    disk.directory(HERE, create=True)
    disk.directory(folder, create=True).create(name).close()
    before = sorted(disk.directory(folder).names())
    with pytest.raises(RestoreTargetExists, match="restore into another folder") as error:
        restore(shipper.store, QUEUE, HERE, disk=disk)
    assert isinstance(error.value, FileExistsError)
    assert error.value.path == f"{HERE}/{QUEUE}"
    assert sorted(disk.directory(folder).names()) == before or at.startswith("inbox")
    assert "jobs.restore" not in disk.directory(HERE).names()


def test_other_queues_of_the_folder_are_left_alone() -> None:
    shipper, disk = small_log(), MemoryDisk()
    with queue_on(disk, HERE) as queue:
        queue.put(b"older")
    folder = disk.directory(HERE)
    for name in folder.names():
        if name.startswith(QUEUE):
            folder.rename(name, name.replace(QUEUE, "jobs-2", 1))
    there = set(folder.names())
    restore(shipper.store, QUEUE, HERE, disk=disk)
    assert there <= set(folder.names())
    assert rest_of(disk) == rest_due(shipper.moments[-1], shipper.items)


def test_one_restore_at_a_time() -> None:
    shipper, disk = small_log(), MemoryDisk()

    def again(*_: int) -> None:
        with pytest.raises(QueueLocked):
            restore(shipper.store, QUEUE, HERE, disk=disk, threads=1)
        with pytest.raises(QueueLocked):
            queue_on(disk, HERE)
        with pytest.raises(RestoreIncomplete):
            list(scan(HERE, QUEUE, disk=disk))

    restore(shipper.store, QUEUE, HERE, disk=disk, threads=1, progress=again)


def test_errors_carry_their_facts() -> None:
    errors: list[tuple[Exception, dict[str, Any]]] = [
        (
            NoSuchQueue("file:///s", "jobs", "why", first_slot=3, first_ms=4),
            {"store": "file:///s", "queue": "jobs", "reason": "why", "first_slot": 3, "first_ms": 4},
        ),
        (RestoreTargetExists("/d/jobs"), {"path": "/d/jobs", "filename": "/d/jobs", "errno": errno.EEXIST}),
        (RestoreIncomplete("/d/jobs"), {"path": "/d/jobs", "lazily": False, "follows": False}),
        (RestoreIncomplete("/d/jobs", follows=True), {"path": "/d/jobs", "follows": True}),
    ]
    for error, facts in errors:
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))
        assert {name: getattr(again, name) for name in facts} == facts
