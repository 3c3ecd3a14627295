"""What an owner that was taken over had not shipped: set aside, named, never merged, whatever cuts that short."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from kestrelpy import CorruptJournal, JournaledQueue, QueueLocked, RestoreIncomplete, open_reader, scan
from kestrelpy.ship import (
    Fenced,
    HistoryMismatch,
    NotShipped,
    Orphan,
    RestoreTargetExists,
    Ship,
    Standby,
    StoreDamaged,
    orphans,
    reading,
    rejoin,
    restore,
)
from kestrelpy.ship import rejoining as aside
from kestrelpy.ship.standby_folder import StandbyFolder
from kestrelpy.testing import CrashingDisk, ManualClock, MemoryDisk
from kestrelpy.testing.disks import PowerModel
from kestrelpy.testing.stores import Fault, SimulatedStore
from kestrelpy.work import WorkQueue
from tests.ship.followed import Followed
from tests.ship.in_store import items_of, log_of
from tests.support.budget import ALL, Tally, drawn
from tests.support.patience import PATIENCE, until

HERE, THERE, QUEUE = "/elsewhere", "/there", "jobs"


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PAUSES", ())


class Killed(BaseException):
    """The process is killed here."""


class TakenOver(NamedTuple):
    """``disk``: of an owner that was taken over, and is dead. ``unshipped``: its items that are in no log."""

    store: SimulatedStore
    disk: CrashingDisk
    unshipped: dict[int, bytes]


def opened(store: SimulatedStore, name: str, disk: Any, folder: str, *, ends_in_vain: bool = False) -> JournaledQueue:
    """``ends_in_vain``: the store is away when it is closed."""
    ship = Ship(store.client(name), interval=0, close_timeout=0.1 if ends_in_vain else PATIENCE)
    return JournaledQueue(
        folder, QUEUE, segment_bytes=4096, sync="always", inbox_interval=None, disk=disk, ship=ship,
        clock=ManualClock(255),
    )  # fmt: skip


def taken_over(sizes: tuple[int, ...] = (2000, 2000, 10, 2500, 30), *, shipped: int = 3) -> TakenOver:
    """An owner ships some items, reads, and puts ``sizes`` when the store is away for it. Another one takes over."""
    store, disk, other = SimulatedStore(), CrashingDisk(), MemoryDisk()
    queue = opened(store, "one", disk, HERE, ends_in_vain=True)
    for number in range(shipped):
        queue.put(b"%d" % number * 500)
    audit = queue.reader("audit", start="earliest")
    for _ in range(shipped and 2):
        audit.get_nowait().commit()
    queue.checkpoint()
    assert queue.shipping is not None
    queue.shipping.flush(PATIENCE)
    until(lambda: not shipped or "audit" in log_of(store.objects).checkpoints)
    store.before_request = lambda request: Fault.LOST_BEFORE if request.client == "one" else Fault.NONE
    unshipped = {queue.put(bytes([number % 251]) * number): bytes([number % 251]) * number for number in sizes}
    for _ in range(2 if sizes else 0):
        audit.get_nowait().commit()
    queue.checkpoint()
    dead = disk.after_kill()
    with contextlib.suppress(NotShipped):
        queue.close()
    store.before_request = lambda _: Fault.NONE
    restore(store.client("two"), QUEUE, THERE, disk=other)
    with opened(store, "two", other, THERE) as queue:
        queue.put(b"of the new owner")
    return TakenOver(store, dead, unshipped)


def rejoined(made: TakenOver, disk: Any) -> Orphan | None:
    return rejoin(HERE, QUEUE, made.store.client("one"), disk=disk)


def check_set_aside(made: TakenOver, disk: Any, found: Orphan | None) -> None:
    first, last = min(made.unshipped), max(made.unshipped)
    size = sum(map(len, made.unshipped.values()))
    path = f"{HERE}/{QUEUE}.1.orphan"
    due = Orphan(path=path, epoch=1, first_id=first, last_id=last, items=len(made.unshipped), bytes=size)
    assert found in (due, None)
    assert orphans(HERE, QUEUE, disk=disk) == [due]
    there = {record.id: record.data for record in scan(path, QUEUE, start_id=first, disk=disk)}
    assert there == made.unshipped


def check_stands_by(made: TakenOver, disk: Any) -> None:
    """A standby goes on with the folder, and takes over: it has what is in the log, and nothing of the orphan."""
    here = Followed(made.store.client("one"), disk, url="a simulated store, by one")
    here.to(1 << 50)
    here.close()
    items = items_of(made.store.objects)
    assert not items.keys() & made.unshipped.keys()
    there = {record.id: record.data for record in scan(HERE, QUEUE, disk=disk)}
    assert there.items() <= items.items()
    assert max(there) == max(items)


# -- one by one ------------------------------------------------------------------------------------------------------


def test_what_was_not_shipped_is_set_aside_and_named(caplog: pytest.LogCaptureFixture) -> None:
    made = taken_over()
    with pytest.raises(Fenced) as fenced:
        opened(made.store, "one", made.disk, HERE)
    assert (fenced.value.first_unshipped_id, fenced.value.last_id) == (min(made.unshipped), max(made.unshipped))
    with caplog.at_level(logging.WARNING, "kestrelpy"):
        found = rejoined(made, made.disk)
    assert found is not None
    assert f"items {min(made.unshipped)} to {max(made.unshipped)} of epoch 1" in caplog.text
    check_set_aside(made, made.disk, found)
    assert rejoined(made, made.disk) is None
    with pytest.raises(RestoreIncomplete, match="start its standby"):
        opened(made.store, "one", made.disk, HERE)
    check_stands_by(made, made.disk)
    check_set_aside(made, made.disk, None)


def test_a_standby_does_it_by_itself() -> None:
    made = taken_over()
    client = made.store.client("one")
    with Standby(HERE, QUEUE, client, poll_interval=0.01, disk=made.disk) as here:
        until(lambda: here.status().state == "following")
        check_set_aside(made, made.disk, None)
        with here.take_over(force=True, segment_bytes=4096, clock=ManualClock(255)) as taken:
            reader = taken.reader("audit")
            got = [reader.get_nowait() for _ in range(2)]
            assert [item.id for item in got] == [3, max(items_of(made.store.objects))]
            new_id = taken.put(b"new")
            assert taken.shipping is not None
            taken.shipping.flush(PATIENCE)
        assert items_of(made.store.objects)[new_id] == b"new"
    check_set_aside(made, made.disk, None)


def test_a_work_queue_keeps_nothing_that_its_old_owner_has_noted_aside() -> None:
    """The slots for deletes on a full disk would end jobs that the log has."""
    store, disk, other = SimulatedStore(), MemoryDisk(), MemoryDisk()
    clock = ManualClock(255)
    with WorkQueue(HERE, QUEUE, disk=disk, disk_clock=clock, ship=Ship(store.client("one"), interval=0)) as work:
        work.put(b"job")
    file = disk.directory(HERE).open(f"{QUEUE}.work", write=True)
    assert file.size() > 4000
    file.write(128, b"\xff" * 24)
    restore(store.client("two"), QUEUE, THERE, disk=other)
    WorkQueue(THERE, QUEUE, disk=other, disk_clock=clock, ship=Ship(store.client("two"), interval=0)).close()
    made = TakenOver(store, disk, {})  # type: ignore[arg-type]
    assert rejoined(made, disk) is None
    here = Followed(store.client("one"), disk, url="a simulated store, by one")
    here.to(1 << 50)
    here.close()
    assert disk.directory(HERE).open(f"{QUEUE}.work").size() < 128
    with WorkQueue(HERE, QUEUE, disk=disk, disk_clock=clock, ship=False) as work:
        job = work.peek_ready()
        assert job is not None
        assert job.body == b"job"


def test_nothing_unshipped_is_nothing_set_aside() -> None:
    made = taken_over(())
    made_again = made._replace(unshipped={})
    assert rejoined(made_again, made.disk) is None
    assert orphans(HERE, QUEUE, disk=made.disk) == []
    check_stands_by(made_again, made.disk)


def test_an_owner_that_has_shipped_nothing() -> None:
    made = taken_over(shipped=0)
    check_set_aside(made, made.disk, rejoined(made, made.disk))
    check_stands_by(made, made.disk)


def test_a_second_orphan_of_an_epoch_gets_a_folder_of_its_own() -> None:
    made = taken_over()
    before = made.disk.after_kill()
    found = rejoined(made, made.disk)
    folder = made.disk.directory(HERE)
    for name in folder.names():  # the folder is put back as of a backup: but for the list, which is newer
        if not name.endswith((".orphans", ".orphan", ".lock")):
            folder.unlink(name)
    old = before.directory(HERE)
    for name in [each for each in old.names() if not each.endswith(".lock")]:
        file, copy = old.open(name), folder.create(name)
        copy.write(0, file.read(0, file.size()))
    again = rejoined(made, made.disk)
    assert found is not None
    assert again is not None
    assert again.path == f"{HERE}/{QUEUE}.1-2.orphan"
    assert orphans(HERE, QUEUE, disk=made.disk) == [found, again]
    folder.unlink(f"{QUEUE}.orphans")  # and if the list is lost, no folder is used again
    folder.unlink(f"{QUEUE}.standby")
    folder.unlink(f"{QUEUE}.restore")
    write_owner_s_file(old, folder)
    third = rejoined(made, made.disk)
    assert third is not None
    assert third.path == f"{HERE}/{QUEUE}.1-3.orphan"


def write_owner_s_file(source: Any, target: Any) -> None:
    file = source.open(f"{QUEUE}.ship")
    copy = target.open(f"{QUEUE}.ship", write=True)
    copy.write(0, file.read(0, file.size()))
    copy.truncate(file.size())


def test_an_owner_whose_epoch_is_the_last_one_is_to_be_opened() -> None:
    store, disk = SimulatedStore(), CrashingDisk()
    queue = opened(store, "one", disk, HERE, ends_in_vain=True)
    queue.put(b"1")
    assert queue.shipping is not None
    queue.shipping.flush(PATIENCE)
    store.is_away = True
    queue.put(b"2")
    dead = disk.after_kill()
    with contextlib.suppress(NotShipped):
        queue.close()
    store.is_away = False
    made = TakenOver(store, dead, {})
    with pytest.raises(HistoryMismatch, match="open it with ship="):
        rejoined(made, dead)
    assert orphans(HERE, QUEUE, disk=dead) == []
    with opened(store, "one", dead, HERE) as queue:
        assert [queue.get().data for _ in range(2)] == [b"1", b"2"]
    assert rejoined(made, dead) is None  # now all of it is shipped


def test_a_restore_after_it_was_cut_short_is_not_set_aside() -> None:
    made = taken_over()
    real = StandbyFolder._sign

    def once(self: StandbyFolder, name: str, names: list[str]) -> None:
        real(self, name, names)
        raise Killed

    with patch.object(StandbyFolder, "_sign", once), pytest.raises(Killed):
        rejoined(made, made.disk)
    disk = made.disk.after_kill()
    restore(made.store.client("one"), QUEUE, HERE, disk=disk)
    rejoined(made, disk)
    check_set_aside(made, disk, None)
    check_stands_by(made, disk)


def test_a_folder_that_was_put_back_is_followed_from_there() -> None:
    store, disk = SimulatedStore(), CrashingDisk()
    with opened(store, "one", disk, HERE) as queue:
        queue.put(b"1")
        assert queue.shipping is not None
        queue.shipping.flush(PATIENCE)
        backup = disk.after_kill()
        queue.put(b"2")
    with pytest.raises(HistoryMismatch):
        opened(store, "one", backup.after_kill(), HERE)
    made = TakenOver(store, backup, {})
    assert rejoined(made, backup) is None
    check_stands_by(made, backup)


def test_a_store_that_was_put_back_sets_nothing_aside() -> None:
    store, disk = SimulatedStore(), CrashingDisk()
    with opened(store, "one", disk, HERE) as queue:
        queue.put(b"1")
    before = store.objects.contents()
    with opened(store, "one", disk, HERE) as queue:
        queue.put(b"2")
    store.put_back(before)
    with pytest.raises(HistoryMismatch, match="was ours"):
        rejoined(TakenOver(store, disk, {}), disk)
    assert orphans(HERE, QUEUE, disk=disk) == []


def test_refusals(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    with pytest.raises(FileNotFoundError):
        rejoin(tmp_path / "none", QUEUE, store)
    with JournaledQueue(tmp_path, QUEUE) as queue:
        queue.put(b"1")
    with pytest.raises(RestoreTargetExists, match="is there, and is not shipped"):
        rejoin(tmp_path, QUEUE, store)
    with JournaledQueue(tmp_path, QUEUE, ship=store), pytest.raises(QueueLocked):
        rejoin(tmp_path, QUEUE, store)
    with contextlib.closing(open_reader(tmp_path, QUEUE, "audit", create=True)), pytest.raises(QueueLocked):
        rejoin(tmp_path, QUEUE, store)
    with pytest.raises(HistoryMismatch, match="shipped to"):
        rejoin(tmp_path, QUEUE, f"file://{tmp_path}/another")
    (tmp_path / "store" / QUEUE / "log" / ("1".zfill(16))).write_bytes(b"damage")
    with pytest.raises(StoreDamaged):
        rejoin(tmp_path, QUEUE, store)
    assert orphans(tmp_path, QUEUE) == []


@pytest.mark.parametrize("text", [b"", b"[]", b'{"format": 1}', b'{"format": 1, "orphans": [{"folder": "../x"}]}'])
def test_a_damaged_list_is_said(tmp_path: Path, text: bytes) -> None:
    (tmp_path / f"{QUEUE}.orphans").write_bytes(text)
    with pytest.raises(CorruptJournal, match="set aside"):
        orphans(tmp_path, QUEUE)


# -- cut short -------------------------------------------------------------------------------------------------------


def cut_short(made: TakenOver, disk: CrashingDisk, operation: int, then: Callable[[], object]) -> None:
    """``rejoin`` up to an operation of the disk: the process is killed before it."""
    first, seen = disk.operations, False

    def stop() -> None:
        nonlocal seen
        if disk.operations - first >= operation:
            if not seen:
                seen = True
                then()
            raise Killed

    disk.before_operation = stop
    with contextlib.suppress(Killed):
        rejoined(made, disk)
    disk.before_operation = None


def explore(made: TakenOver, limit: int) -> int:
    """Cut ``rejoin`` short at operations, and repeat it. Returns how many states of the disk that were."""
    whole = made.disk.after_kill()
    before = whole.operations
    rejoined(made, whole)
    states = 0

    def look(disk: CrashingDisk, seed: int) -> None:
        nonlocal states
        limits = {PowerModel.PREFIX: 2, PowerModel.EXT4: 2, PowerModel.ANY: 8 if ALL else 3}
        cut = [each for model, many in limits.items() for each in disk.power_states(model, many, seed=seed)]
        for each in (disk.after_kill(), *cut):
            states += 1
            check_set_aside(made, each, rejoined(made, each))
            check_stands_by(made, each)

    for operation in sorted(drawn(range(whole.operations - before), limit)):
        disk = made.disk.after_kill()
        cut_short(made, disk, operation, partial(look, disk, operation))
    look(whole, 0)
    return states


@pytest.mark.parametrize("sizes", [(2000, 2000, 10, 2500, 30), (10,), (3800, 3800)])
def test_a_kill_or_a_power_cut_at_every_operation(sizes: tuple[int, ...], tally: Tally) -> None:
    tally.add("states of a disk after setting aside was cut short", explore(taken_over(sizes), 40))


# -- planted faults --------------------------------------------------------------------------------------------------

PLANTED: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {}


def planted(plant: Callable[[], Iterator[None]]) -> None:
    PLANTED[plant.__name__] = contextlib.contextmanager(plant)


@planted
def orphan_merged() -> Iterator[None]:
    """What the old owner has counts as what is in the log."""
    with patch.object(aside, "_first_unshipped", lambda *_: (0, 0)):
        yield


@planted
def orphan_overwritten() -> Iterator[None]:
    with patch.object(aside, "_is_taken", lambda *_: False):
        yield


@planted
def first_segment_left_out() -> Iterator[None]:
    with patch.object(aside, "_copy", lambda *_: None):
        yield


@planted
def signed_before_it_is_moved() -> Iterator[None]:
    real = aside._entry

    def begin(folder: Any, queue: str, *rest: Any) -> Any:
        entry = real(folder, queue, *rest)
        folder.create(f"{queue}.standby").close()
        folder.sync()
        return entry

    with patch.object(aside, "_entry", begin), patch.object(aside.StandbyFolder, "sign", lambda self: None):
        yield


@planted
def not_synced_where_it_goes() -> Iterator[None]:
    real = aside._copy

    def copy(folder: Any, name: str, target: Any) -> None:
        real(folder, name, target)
        target.unlink(name)
        again = target.create(name)
        source = folder.open(name)
        again.write(0, source.read(0, source.size()))

    with patch.object(aside, "_copy", copy):
        yield


def explore_all(made: TakenOver) -> None:
    explore(made, 1000)
    test_a_second_orphan_of_an_epoch_gets_a_folder_of_its_own()


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name: str, tally: Tally) -> None:
    made = taken_over()
    with PLANTED[name](), pytest.raises(Exception) as raised:  # noqa: PT011 - a fault may end in any error
        explore_all(made)
    assert not isinstance(raised.value, AttributeError | NameError | TypeError), "the plant itself is wrong"
    tally.add("planted faults caught", 1)
