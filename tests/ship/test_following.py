"""Following a log: the files are at each slot what the log is there, whatever cuts it short."""

from __future__ import annotations

import contextlib
import errno
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kestrelpy import CorruptJournal, QueueEmpty, QueueLocked, RestoreIncomplete, open_reader, scan
from kestrelpy._journal.checkpoint import load_checkpoint
from kestrelpy.inbox import last_version
from kestrelpy.ship import HistoryMismatch, RestoreTargetExists, StoreDamaged, reading
from kestrelpy.ship import slots as codec
from kestrelpy.ship.lease import LeaseWatch
from kestrelpy.testing import CrashingDisk, FailingDisk, MemoryDisk
from kestrelpy.testing.disks import PowerModel
from kestrelpy.testing.stores import MemoryStore
from tests.ship.followed import Followed, check_followed, follow_to_end, followed
from tests.ship.restores import HERE, collect, grown, log_with_a_batch, queue_on, small_log
from tests.ship.shipped import QUEUE, Shipper
from tests.support.budget import ALL, Tally, drawn


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PAUSES", ())


@pytest.mark.parametrize("seed", range(40 if ALL else 6))
def test_every_slot_is_followed(seed: int) -> None:
    shipper = grown(seed)
    disk = CrashingDisk()
    with followed(shipper.store, disk) as here:
        for slot in range(1, shipper.state.slot + 1):
            here.to(slot)
            assert (here.follower.slot, here.follower.last_id) == (slot, shipper.moments[slot - 1].last_id)
            due = [key for key in sorted(shipper.items) if key <= shipper.moments[slot - 1].last_id]
            there = [record.id for record in scan(HERE, QUEUE, disk=disk)]
            assert there == due[len(due) - len(there) :]
            if slot % 5 == seed % 5:
                check_followed(shipper, disk.after_kill(), slot - 1)
    check_followed(shipper, disk)


@pytest.mark.parametrize("seed", range(20 if ALL else 4))
def test_a_standby_begins_anywhere_and_goes_on_where_it_was(seed: int) -> None:
    shipper, disk = grown(seed), MemoryDisk()
    for slot in sorted({1 + seed % 7, 2 + shipper.state.slot // 2, shipper.state.slot}):
        with followed(shipper.store, disk) as here:
            here.to(slot)
    check_followed(shipper, disk)


def test_old_segments_go_when_all_readers_are_past_them() -> None:
    disk, mine = MemoryDisk(), MemoryDisk()
    with queue_on(disk) as queue:
        for _ in range(5):
            queue.put(b"x" * 2000)
        shipper = Shipper(MemoryStore(), disk)
        shipper.fence()
        shipper.ship()
        with followed(shipper.store, mine) as here:
            here.to(1 << 50)
            names = [name for name in mine.directory(HERE).names() if name.endswith(".segment")]
            assert len(names) == 5
            for _ in range(3):
                queue.get().commit()
            queue.checkpoint()
            shipper.ship()
            here.to(1 << 50)
            assert sorted(names)[3:] == sorted(
                name for name in mine.directory(HERE).names() if name.endswith(".segment")
            )
    check_followed(shipper, mine)


# -- who may have the files ------------------------------------------------------------------------------------------


def test_readers_and_writers_are_refused_while_a_standby_follows() -> None:
    shipper, disk = small_log(), MemoryDisk()
    with followed(shipper.store, disk) as here:
        here.to(4)
        with pytest.raises(QueueLocked):
            queue_on(disk, HERE)
        for reader in ("audit", "new", ""):
            with pytest.raises(QueueLocked, match=r"jobs\.standby"):
                open_reader(HERE, QUEUE, reader, disk=disk, create=True)
        here.to(shipper.state.slot)
    with pytest.raises(QueueLocked, match=r"jobs\.standby"):  # nobody follows, and yet these are no files to read from
        open_reader(HERE, QUEUE, "audit", disk=disk, create=True)
    check_followed(shipper, disk)
    open_reader(HERE, QUEUE, "audit", disk=disk, create=True).close()


def test_a_reader_that_is_open_keeps_a_standby_away() -> None:
    shipper, disk = small_log(), MemoryDisk()
    follow_to_end(shipper.store, disk)
    disk.directory(HERE).unlink(f"{QUEUE}.standby")
    with contextlib.closing(open_reader(HERE, QUEUE, "audit", disk=disk, create=True)), pytest.raises(QueueLocked):
        Followed(shipper.store, disk)
    here = Followed(shipper.store, disk)
    with contextlib.closing(open_reader(HERE, QUEUE, "audit", disk=disk, create=True)), pytest.raises(QueueLocked):
        here.to(1 << 50)  # between the two
    here.to(1 << 50)
    here.close()
    check_followed(shipper, disk)


def test_a_queue_that_is_not_shipped_there_is_left_alone() -> None:
    shipper, disk = small_log(), MemoryDisk()
    with queue_on(disk, HERE) as queue:
        queue.put(b"mine")
    with pytest.raises(RestoreTargetExists):
        Followed(shipper.store, disk)
    other = MemoryDisk()
    follow_to_end(shipper.store, other)
    with pytest.raises(HistoryMismatch, match="shipped to"):
        Followed(shipper.store, other, url="store://another")
    with queue_on(disk, HERE) as queue:
        assert queue.get().data == b"mine"


def test_another_queue_of_that_name_is_not_followed() -> None:
    one, other, disk = small_log(), grown(3), MemoryDisk()
    follow_to_end(one.store, disk)
    with followed(other.store, disk) as here, pytest.raises(HistoryMismatch, match="another queue"):
        here.to(1 << 50)
    check_followed(one, disk)


def test_a_store_that_was_put_back_takes_nothing_away() -> None:
    shipper, disk = small_log(with_manifest=False), MemoryDisk()
    follow_to_end(shipper.store, disk)
    with followed(shipper.store, disk) as here, pytest.raises(HistoryMismatch, match="the log ends at slot 5"):
        here.to(5)
    check_followed(shipper, disk)


# -- the store -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", ["nothing", "the beginning", "another end"])
def test_a_store_that_is_not_the_one_it_was_says_nothing_of_an_owner(left: str) -> None:
    """A folder that is not mounted, or a store that was put back, looks like a log that has ended."""
    shipper, disk, store = small_log(with_manifest=False), MemoryDisk(), MemoryStore()
    shipper.fence(lease_ms=10_000)
    objects = shipper.store.contents()  # type: ignore[attr-defined]
    store.replace_all(objects)
    with followed(store, disk) as here:
        here.to(1 << 50)
        last = f"{QUEUE}/{codec.slot_key(shipper.state.slot)}"
        kept = {key: data for key, data in objects.items() if left != "nothing" and key != last}
        if left == "another end":
            other = small_log(with_manifest=False)
            other.fence(lease_ms=10_000)
            kept[last] = other.store.contents()[last]  # type: ignore[attr-defined]
        store.replace_all(kept)
        here.seconds += 11
        for _ in range(2):
            with pytest.raises(HistoryMismatch, match="not there any more"):
                here.follower.look()
            assert not here.follower.is_over
        here.seconds -= 11
        with pytest.raises(HistoryMismatch, match="not there any more"):
            here.follower.look(surely=True)
        store.replace_all(objects)
        here.seconds += 11
        here.to(1 << 50)
        assert here.follower.is_over
    check_followed(shipper, disk)


def test_an_owner_that_collects_while_its_lease_is_looked_at_is_not_over(monkeypatch: pytest.MonkeyPatch) -> None:
    shipper, disk = grown(9, steps=80), MemoryDisk()
    known = reading.ShippedQueue(shipper.store, QUEUE).manifests()
    with followed(shipper.store, disk) as here:
        here.to(known[0] - 1)
        assert not here.follower.look()
        collect(shipper, known[-1])
        here.window.limit = 1 << 50
        monkeypatch.setattr(LeaseWatch, "left", 0.0)
        here.follower.look()
        assert not here.follower.is_over
        here.to(1 << 50)
        assert here.follower.slot == shipper.state.slot
    check_followed(shipper, disk)


def test_who_has_slept_longer_than_the_history_begins_at_a_newer_manifest() -> None:
    shipper, disk = grown(5, steps=80), MemoryDisk()
    known = reading.ShippedQueue(shipper.store, QUEUE).manifests()
    with followed(shipper.store, disk) as here:
        here.to(known[0] - 1)
        collect(shipper, known[-1])
        here.to(1 << 50)
        assert here.follower.slot == shipper.state.slot
    check_followed(shipper, disk)


def test_the_manifests_are_listed_again_after_a_while() -> None:
    """A hole may come about where the log ended when it was last looked."""
    shipper, disk = grown(9, steps=80), MemoryDisk()
    known = reading.ShippedQueue(shipper.store, QUEUE).manifests()
    with followed(shipper.store, disk) as here:
        here.to(known[0] - 1)
        assert not here.follower.look()
        collect(shipper, known[-1])
        here.window.limit = 1 << 50
        here.follower.look()
        assert here.follower.slot == known[0] - 1
        here.seconds += 60
        here.to(1 << 50)
        assert here.follower.slot == shipper.state.slot
    check_followed(shipper, disk)


def test_damage_is_raised_each_time_and_what_comes_before_it_is_there() -> None:
    shipper, disk = small_log(with_manifest=False), MemoryDisk()
    store, objects = MemoryStore(), shipper.store.contents()  # type: ignore[attr-defined]
    key = f"{QUEUE}/{codec.slot_key(6)}"
    store.replace_all({**objects, key: (objects[key][0][:-1] + b"x", 0)})
    with followed(store, disk) as here:
        here.to(3)
        for _ in range(3):
            with pytest.raises(StoreDamaged):
                here.to(1 << 50)
            assert here.follower.slot == 5
        store.replace_all(objects)
        here.to(1 << 50)
    check_followed(shipper, disk)


@pytest.mark.parametrize("what", ["other bytes", "cut", "gone"])
def test_a_damaged_segment_is_never_taken_for_whole(what: str) -> None:
    shipper = small_log(with_manifest=False)
    objects = shipper.store.contents()  # type: ignore[attr-defined]
    for key in [each for each in objects if "/seg/" in each]:
        disk, store = MemoryDisk(), MemoryStore()
        data = objects[key][0]
        place = len(data) - 97
        changed = {
            "other bytes": data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :],
            "cut": data[:-1],
            "gone": None,
        }[what]
        store.replace_all({name: kept for name, kept in objects.items() if name != key})
        if changed is not None:
            store.create(key, changed)
        with followed(store, disk) as here:
            with pytest.raises(StoreDamaged):
                here.to(1 << 50)
            store.replace_all(objects)
            here.to(1 << 50)
        check_followed(shipper, disk)


# -- cut short -------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process is killed here."""


def stops(shipper: Shipper) -> list[int]:
    """Slots at which a standby has looked, till it saw the end."""
    last = shipper.state.slot
    return [2, 3, last // 2, last - 2, last - 1, last]


def follow(shipper: Shipper, disk: Any, at: Callable[[int], object] = bool) -> None:
    """Follow a log, from stop to stop. ``at``: is told each of them."""
    with contextlib.ExitStack() as rest:
        here = Followed(shipper.store, disk)
        rest.callback(here.close)
        for slot in stops(shipper):
            at(slot)
            here.to(slot)


def follow_until(shipper: Shipper, disk: CrashingDisk, operation: int, then: Callable[[int], object]) -> None:
    """Follow, up to an operation of the disk: the process is killed before it. ``then``: is told up to which slot it
    was to follow.
    """
    last = [1]
    seen = False

    def stop() -> None:
        nonlocal seen
        if disk.operations >= operation:
            if not seen:
                seen = True
                then(last[-1])
            raise Killed

    disk.before_operation = stop
    with contextlib.suppress(Killed):
        follow(shipper, disk, last.append)
    disk.before_operation = None


def check_as_it_is(shipper: Shipper, disk: CrashingDisk, *, power_cut: bool) -> str:
    """What a standby that was cut short has left: nobody reads it, or it is a beginning of the log that no checkpoint
    is ahead of. A power cut may leave a torn tail of frames that say that more was on disk.
    """
    try:
        there = {record.id: record.data for record in scan(HERE, QUEUE, disk=disk)}
    except (RestoreIncomplete, FileNotFoundError):
        return "incomplete"
    except CorruptJournal:
        if not power_cut:
            raise
        there = {}
    assert there.items() <= shipper.items.items()
    folder = disk.directory(HERE)
    states = [load_checkpoint(folder, name)[0] for name in folder.names() if name.endswith(".checkpoint")]
    highest = max((state.highest_id for state in states if state is not None), default=0)
    if there:
        assert max(there) >= highest
    return "readable" if there else "torn"


def eager_log(*, segment_bytes: int = 4096, commits_all: bool = True) -> Shipper:
    """A log of which each item is read and committed at once, or one of several; and some segments are in no slot."""
    disk = MemoryDisk()
    with queue_on(disk, segment_bytes=segment_bytes) as queue:
        queue.put(b"first")
        shipper = Shipper(MemoryStore(), disk)
        shipper.fence()
        for number, size in enumerate((100, 200, 50, 3000, 3000, 100)):
            for _ in range(segment_bytes // 4096 if size == 3000 else 1):
                queue.put(bytes([number + 1]) * size)
            with contextlib.suppress(QueueEmpty):
                queue.get_nowait().commit()
                while commits_all:
                    queue.get_nowait().commit()
            queue.checkpoint()
            shipper.ship(most=1, seals_alone=number % 2 == 1)
    return shipper


LOGS: dict[str, Callable[[], Shipper]] = {
    "small": small_log,
    "eager": eager_log,
    "of large segments": partial(eager_log, segment_bytes=20_000, commits_all=False),
    "with a batch": log_with_a_batch,
    "grown": partial(grown, 11, steps=40),
}


def explore(name: str, limit: int) -> Counter[str]:
    """Cut short at operations; go on; compare. Returns what was left each time."""
    shipper = LOGS[name]()
    whole = CrashingDisk()
    follow(shipper, whole)
    counts = Counter[str]()

    def check(disk: CrashingDisk, slot: int, *, power_cut: bool) -> None:
        counts[check_as_it_is(shipper, disk, power_cut=power_cut)] += 1
        again = disk.after_kill()
        with followed(shipper.store, again) as here:
            here.to(slot)
        check_followed(shipper, again, slot - 1)
        follow_to_end(shipper.store, disk)
        if name == "with a batch":
            assert last_version(HERE, QUEUE, "app", disk=disk) == 4
        check_followed(shipper, disk)

    def look(disk: CrashingDisk, seed: int, slot: int) -> None:
        limits = {PowerModel.PREFIX: 2, PowerModel.EXT4: 2, PowerModel.ANY: 8 if ALL or limit > 100 else 3}
        cut = [each for model, most in limits.items() for each in disk.power_states(model, most, seed=seed)]
        check(disk.after_kill(), slot, power_cut=False)
        for each in cut:
            check(each, slot, power_cut=True)

    for operation in sorted({*drawn(range(whole.operations), limit), whole.operations - 1}):
        disk = CrashingDisk()
        follow_until(shipper, disk, operation, partial(look, disk, operation))
    for model in (PowerModel.PREFIX, PowerModel.EXT4, PowerModel.ANY):
        for each in whole.power_states(model, 5):
            check_followed(shipper, each)  # what is said to be there is on disk
    return counts


@pytest.mark.parametrize("name", LOGS)
def test_a_kill_or_a_power_cut_at_every_operation(name: str, tally: Tally) -> None:
    counts = explore(name, 40)
    assert min(counts["readable"], counts["incomplete"]) > 5
    tally.add("states of a disk after a standby was cut short", counts.total())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("sticky", [False, True])
def test_an_error_at_every_operation(code: int, *, sticky: bool) -> None:
    shipper = log_with_a_batch()
    whole = FailingDisk(MemoryDisk())
    follow(shipper, whole)
    failed = 0
    for operation in drawn(range(1, whole.operations + 1), 60):
        disk = FailingDisk(MemoryDisk())
        disk.arm(code, at=operation, sticky=sticky)
        here: Followed | None = None
        for slot in stops(shipper):
            try:
                here = here or Followed(shipper.store, disk)
                here.to(slot)
            except OSError as error:
                failed += error.errno == code
                disk.disarm()
        if here is None:
            here = Followed(shipper.store, disk)
        here.to(1 << 50)
        here.close()
        check_followed(shipper, disk.inner)
    assert failed > 20
