"""Queues of which most is still in the store: what is read is fetched, everybody else is refused, and nothing that is
cut short leaves a hole that is believed.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kestrelpy import (
    CorruptJournal,
    JournaledQueue,
    QueueDiskFull,
    QueueEmpty,
    RestoreIncomplete,
    UnsupportedFormat,
    inspect,
    open_reader,
    scan,
    verify,
)
from kestrelpy.ship import Ship, Standby, StoreDamaged, StoreUnavailable, lazy, preparing, reading, restore
from kestrelpy.ship.lazy import LazyFolder, decode_lazy, encode_lazy, read_lazy
from kestrelpy.ship.slots import parse_segment_key
from kestrelpy.testing import CrashingDisk, FailingDisk, ManualClock, MemoryDisk
from kestrelpy.testing.disks import PowerModel
from kestrelpy.testing.stores import MemoryStore
from kestrelpy.work import WorkQueue
from tests.support.budget import SEED, Tally, drawn
from tests.support.patience import PATIENCE, until

HERE, THERE, QUEUE = "/here", "/there", "jobs"
COUNT = 120
LIST = f"{QUEUE}.lazy"


class Counted(MemoryStore):
    """A store that notes which segments are read from it. ``trouble`` is raised in place of that."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.trouble: Exception | None = None

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        if "/seg/" in key and start == 0:
            self.fetched.append(key)
        if "/seg/" in key and self.trouble is not None:
            raise self.trouble
        return super().read(key, start, length)


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PAUSES", ())


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread fetches ahead."""
    monkeypatch.setattr(LazyFolder, "_start", lambda self: None)


def data_of(number: int) -> bytes:
    return b"%d." % number * 200


def queue_at(folder: str, store: MemoryStore, disk: Any, **more: Any) -> JournaledQueue:
    options: dict[str, Any] = {"segment_bytes": 4096, "sync": "never", "inbox_interval": None, "disk": disk, **more}
    return JournaledQueue(folder, QUEUE, clock=ManualClock(1_700_000_000_000), ship=Ship(store, interval=0), **options)


@pytest.fixture(scope="module")
def log() -> Counted:
    """A store with the log of a queue of many closed segments, that two readers are at. Tests use copies of it."""
    store = Counted()
    with queue_at(HERE, store, MemoryDisk()) as queue:
        first, audit = queue.reader("first"), queue.reader("audit")
        queue.put_many([data_of(number) for number in range(1, 4)])
        for number in range(4, COUNT + 1):
            queue.put(data_of(number))
        for _ in range(20):
            first.get().commit()
        for _ in range(50):
            audit.get().commit()
    return store


@pytest.fixture
def store(log: Counted) -> Counted:
    copy = Counted()
    copy.replace_all(log.contents())
    return copy


def restored(store: MemoryStore, disk: Any = None) -> Any:
    disk = disk if disk is not None else MemoryDisk()
    restore(store, QUEUE, THERE, lazy=True, disk=disk)
    return disk


def rest_of(queue: JournaledQueue, reader: str = "first") -> list[tuple[int, bytes]]:
    found = []
    source = queue.reader(reader)
    with contextlib.suppress(QueueEmpty):
        while True:
            item = source.get(block=False)
            found.append((item.id, item.data))
    return found


def due(first: int) -> list[tuple[int, bytes]]:
    return [(number, data_of(number)) for number in range(first, COUNT + 1)]


def folder_of(queue: JournaledQueue) -> LazyFolder:
    folder: Any = queue._held.files.directory
    assert isinstance(folder, LazyFolder)
    return folder


def listed(disk: Any) -> list[int]:
    return [each.number for each in read_lazy(disk.directory(THERE), QUEUE) or []]


# -- what is read is fetched -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_only_what_is_read_is_fetched(store: Counted) -> None:
    disk = restored(store)
    whole = listed(disk)
    assert len(whole) > 15
    store.fetched.clear()
    with queue_at(THERE, store, disk) as queue:
        assert queue.reader("first").stats().items == COUNT - 20
        assert len(store.fetched) <= 2  # where a reader's head is in the middle of one
        item = queue.reader("first").get(block=False)
        assert (item.id, item.data) == (21, data_of(21))
        item.abort()
        assert 1 <= len(set(store.fetched)) <= 3  # its segment; a backlog reads a little ahead
        audit = queue.reader("audit").get(block=False)
        assert (audit.id, audit.data) == (51, data_of(51))
        assert len(set(store.fetched)) <= 5
        assert set(listed(disk)) < set(whole)
        assert rest_of(queue) == due(21)
    assert len(set(store.fetched)) == len(store.fetched)


def test_the_rest_is_fetched_ahead_and_then_it_is_a_queue_as_any_other(store: Counted, tmp_path: Path) -> None:
    url = Ship(store, interval=0)
    restore(store, QUEUE, tmp_path, lazy=True)
    assert (tmp_path / LIST).exists()
    with JournaledQueue(tmp_path, QUEUE, ship=url) as queue:
        until(lambda: not (tmp_path / LIST).exists())
        open_reader(tmp_path, QUEUE, "another", create=True).close()
        assert rest_of(queue) == due(21)
    assert verify(tmp_path, QUEUE).ok
    restore(store, QUEUE, tmp_path / "eager")
    with (
        JournaledQueue(tmp_path / "eager", QUEUE, ship=False) as eager,
        JournaledQueue(tmp_path, QUEUE, ship=url) as mine,
    ):
        assert rest_of(eager, "audit") == rest_of(mine, "audit") == due(51)


def test_many_readers_and_the_thread_at_once(store: Counted) -> None:
    disk = restored(store)
    with queue_at(THERE, store, disk) as queue:
        readers = [queue.reader(f"r{number}", start="earliest") for number in range(4)]
        found: list[list[tuple[int, bytes]]] = [[] for _ in readers]

        def read(at: int) -> None:
            with contextlib.suppress(QueueEmpty):
                while True:
                    item = readers[at].get(block=False)
                    found[at].append((item.id, item.data))

        threads = [threading.Thread(target=read, args=(at,)) for at in range(len(readers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        for each in found:
            assert each == due(each[0][0])
            assert each[0][0] <= 21
        until(lambda: LIST not in disk.directory(THERE).names())
    assert len(set(store.fetched)) == len(store.fetched), "a segment was fetched twice"


@pytest.mark.usefixtures("alone")
def test_what_comes_after_the_last_one_read_is_fetched_first(store: Counted) -> None:
    disk = restored(store)
    with queue_at(THERE, store, disk) as queue:
        assert queue.reader("audit").get(block=False).id == 51
        asked, left = number_in(store.fetched[-1]), listed(disk)
        store.fetched.clear()
        while folder_of(queue).fetch_next():
            pass
    order = [number_in(key) for key in store.fetched]
    assert order == [each for each in left if each > asked] + [each for each in left if each < asked]
    assert order[0] > order[-1]
    assert LIST not in disk.directory(THERE).names()


def number_in(key: str) -> int:
    """The number of the segment with that key."""
    found = parse_segment_key(key.removeprefix(f"{QUEUE}/"))
    assert found is not None
    return found[0]


# -- everybody else --------------------------------------------------------------------------------------------------

OTHERS: dict[str, Callable[[Any], Any]] = {
    "JournaledQueue": lambda disk: JournaledQueue(THERE, QUEUE, disk=disk, ship=False),
    "WorkQueue": lambda disk: WorkQueue(THERE, QUEUE, disk=disk, ship=False),
    "open_reader": lambda disk: open_reader(THERE, QUEUE, "audit", disk=disk, create=True),
    "scan": lambda disk: list(scan(THERE, QUEUE, disk=disk)),
    "verify": lambda disk: verify(THERE, QUEUE, disk=disk),
    "inspect": lambda disk: inspect(THERE, QUEUE, disk=disk),
    "another store": lambda disk: queue_at(THERE, Elsewhere(), disk),
}


class Elsewhere(MemoryStore):
    def describe(self) -> str:
        return "another store"


@pytest.mark.parametrize("opening", OTHERS)
def test_nobody_else_opens_it(store: Counted, opening: str) -> None:
    disk = restored(store)
    with pytest.raises(RestoreIncomplete, match="the rest is fetched") as refused:
        OTHERS[opening](disk)
    assert refused.value.lazily
    with queue_at(THERE, store, disk) as queue:
        assert rest_of(queue) == due(21)


@pytest.mark.usefixtures("alone")
def test_who_does_not_know_the_list_finds_damage(store: Counted) -> None:
    disk = restored(store)
    disk.directory(THERE).unlink(LIST)
    with pytest.raises(CorruptJournal):
        list(scan(THERE, QUEUE, disk=disk))
    with JournaledQueue(THERE, QUEUE, disk=disk, ship=False) as queue, pytest.raises(CorruptJournal):
        rest_of(queue)


def test_lazy_goes_with_the_end_of_the_log(store: Counted) -> None:
    with pytest.raises(ValueError, match="lazy"):
        restore(store, QUEUE, THERE, lazy=True, at_slot=5, disk=MemoryDisk())


def test_a_work_queue_is_restored_lazily_too() -> None:
    store, disk = MemoryStore(), MemoryDisk()
    options: Any = {"segment_bytes": 4096, "max_job_bytes": 3000, "ship": Ship(store, interval=0)}
    with WorkQueue(HERE, QUEUE, disk=MemoryDisk(), **options) as work:
        ids = [work.put(data_of(number)) for number in range(40)]
    restored(store, disk)
    assert LIST in disk.directory(THERE).names()
    with WorkQueue(THERE, QUEUE, disk=disk, **options) as work:
        assert [job.id for job in work.jobs()] == ids


@pytest.mark.usefixtures("alone")
def test_a_work_queue_fetches_all_of_it_before_it_is_open() -> None:
    """It reads its records beside the queue, as everybody else who is refused while ``jobs.lazy`` is there."""
    store, disk = Counted(), MemoryDisk()
    options: Any = {"segment_bytes": 4096, "max_job_bytes": 3000, "ship": Ship(store, interval=0)}
    with WorkQueue(HERE, QUEUE, disk=MemoryDisk(), **options) as work:
        ids = [work.put(data_of(number)) for number in range(40)]
    restored(store, disk)
    store.trouble = StoreUnavailable("the store", "seg", "it is away")
    for _ in range(2):  # the lock is released
        with pytest.raises(StoreUnavailable):
            WorkQueue(THERE, QUEUE, disk=disk, **options)
    assert LIST in disk.directory(THERE).names()
    store.trouble = None
    with WorkQueue(THERE, QUEUE, disk=disk, **options) as work:
        assert LIST not in disk.directory(THERE).names()
        assert [job.id for job in work.jobs()] == ids


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("of_jobs", [False, True])
def test_what_another_owner_has_fetched_meanwhile_is_not_missing(
    monkeypatch: pytest.MonkeyPatch, of_jobs: bool
) -> None:
    """The list is read; then its owner fetches the segments and closes; only then the queue is locked."""
    store, disk = Counted(), MemoryDisk()
    options: dict[str, Any] = {"segment_bytes": 4096, "ship": Ship(store, interval=0)}
    if of_jobs:
        options["max_job_bytes"] = 3000
    kind: Any = WorkQueue if of_jobs else JournaledQueue
    with kind(HERE, QUEUE, disk=MemoryDisk(), **options) as queue:
        for number in range(40):
            queue.put(data_of(number))
    restored(store, disk)
    folder = disk.directory(THERE)
    before = read_lazy(folder, QUEUE)
    assert before
    with kind(THERE, QUEUE, disk=disk, **options) as queue:
        if not of_jobs:
            assert len(queue.get_many(40)) == 40
    assert LIST not in folder.names()
    monkeypatch.setattr(preparing, "read_lazy", lambda *_: before)
    store.fetched.clear()
    with kind(THERE, QUEUE, disk=disk, **options) as queue:
        assert of_jobs or len(queue.get_many(40)) == 40
    assert (store.fetched, LIST in folder.names()) == ([], False)


# -- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("error", [StoreUnavailable("the store", "seg", "it is away"), None])
def test_what_cannot_be_fetched_is_said_and_nothing_is_skipped(store: Counted, error: Exception | None) -> None:
    disk = restored(store)
    good = store.contents()
    if error is None:
        store.replace_all({key: (damaged(data) if "/seg/" in key else data, at) for key, (data, at) in good.items()})
    store.trouble = error
    with queue_at(THERE, store, disk) as queue:
        for _ in range(2):
            with pytest.raises(type(error) if error is not None else StoreDamaged):
                queue.reader("first").get(block=False)
        mine = queue.put(b"puts go on")
        store.trouble = None
        store.replace_all({**store.contents(), **good})
        assert rest_of(queue) == [*due(21), (mine, b"puts go on")]


def damaged(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.usefixtures("alone")
def test_a_full_disk(store: Counted) -> None:
    inner = MemoryDisk()
    restored(store, inner)
    disk = FailingDisk(inner)
    with queue_at(THERE, store, disk) as queue:
        reader = queue.reader("first")
        disk.arm(errno.ENOSPC, sticky=True, kinds=("write",))
        with pytest.raises(QueueDiskFull):
            rest_of(queue)
        disk.disarm()
        reader.seek(21)
        assert rest_of(queue) == due(21)


def test_the_thread_tries_again(
    store: Counted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lazy, "RETRY_SECONDS", 0.01)
    disk = restored(store)
    store.trouble = StoreUnavailable("the store", "seg", "it is away")
    with queue_at(THERE, store, disk):
        until(lambda: "fetching what queue jobs has in its store failed" in caplog.text)
        store.trouble = None
        until(lambda: LIST not in disk.directory(THERE).names())
    assert caplog.text.count("failed and will be tried again") == 1


@pytest.mark.usefixtures("alone")
def test_segments_that_nobody_needs_are_not_fetched(store: Counted) -> None:
    disk = restored(store)
    store.fetched.clear()
    with queue_at(THERE, store, disk) as queue:
        for reader in (queue.reader("first"), queue.reader("audit")):
            reader.seek(COUNT - 1)
        queue.checkpoint()
        queue.put(b"more")
        queue.checkpoint()
        until(lambda: len(listed(disk)) < 3)
        assert len(set(store.fetched)) <= 3
    names = disk.directory(THERE).names()
    assert all(f"{QUEUE}.{number:013}.segment" in names for number in listed(disk))


@pytest.mark.usefixtures("alone")
def test_what_is_archived_is_fetched_before(store: Counted) -> None:
    disk = restored(store)
    with queue_at(THERE, store, disk, archive_dir="/archive") as queue:
        for reader in (queue.reader("first"), queue.reader("audit")):
            reader.seek(COUNT - 1)
        queue.checkpoint()
        until(lambda: len(disk.directory("/archive").names()) > 15)
    archived = [record.id for record in scan("/archive", QUEUE, disk=disk)]
    assert len(archived) > 60
    assert archived == list(range(archived[0], archived[-1] + 1))


# -- cut short -------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("power_cut", [False, True])
def test_cut_short_at_any_place_it_goes_on(store: Counted, tally: Tally, *, power_cut: bool) -> None:
    explore_cuts(store, tally, power_cut=power_cut)


def explore_cuts(store: MemoryStore, tally: Tally, *, power_cut: bool, seed: int | None = None) -> None:
    """The restore, the opening and the fetches are cut short at each operation of the disk; then they are repeated."""
    random, good = Random(SEED if seed is None else seed), store.contents()
    total = operations_of(store)
    places = drawn(list(range(1, total)), 60 if seed is None else total)
    for place in places:
        disk = CrashingDisk()
        store.replace_all(good)
        cut_after(disk, place)
        with contextlib.suppress(Killed):
            go_through(store, disk)
        disk.before_operation = None
        if power_cut:
            disk = disk.after_power_cut(random, random.choice((PowerModel.PREFIX, PowerModel.ANY)))
        else:
            disk = disk.after_kill(random)
        names = disk.directory(THERE, create=True).names()
        if f"{QUEUE}.restore" in names or f"{QUEUE}.ship" not in names:
            restored(store, disk)
        with queue_at(THERE, store, disk) as queue:
            found = rest_of(queue, "audit")
            assert found == due(found[0][0])
            assert found[0][0] <= 54
            while folder_is_lazy(queue) and folder_of(queue).fetch_next():
                pass
        assert LIST not in disk.directory(THERE).names()
        assert verify(THERE, QUEUE, disk=disk).ok
    tally.add("states of a disk with a queue that was not all there", len(places))


def go_through(store: MemoryStore, disk: Any) -> None:
    restored(store, disk)
    queue = queue_at(THERE, store, disk)
    try:
        audit = queue.reader("audit")
        for _ in range(3):
            audit.get(block=False).commit()
        queue.checkpoint(durable=True)
        while folder_of(queue).fetch_next():
            pass
    finally:
        if disk.before_operation is not None:
            queue._ending.saves_nothing = True
        with contextlib.suppress(Killed, OSError):
            queue.close()


def folder_is_lazy(queue: JournaledQueue) -> bool:
    return isinstance(queue._held.files.directory, LazyFolder)


def cut_after(disk: CrashingDisk, operations: int) -> list[int]:
    """Kill the process before that operation of the disk, and before each later one. Returns the operations so far."""
    counted = [0]

    def count() -> None:
        counted[0] += 1
        if counted[0] >= operations:
            raise Killed

    disk.before_operation = count
    return counted


def operations_of(store: MemoryStore) -> int:
    disk = CrashingDisk()
    counted = cut_after(disk, 1 << 60)
    go_through(store, disk)
    return counted[0]


# -- the list --------------------------------------------------------------------------------------------------------


def test_the_list_has_one_encoding_and_no_changed_byte_is_believed(store: Counted) -> None:
    disk = restored(store)
    folder = disk.directory(THERE)
    file = folder.open(LIST)
    data = file.read(0, file.size())
    segments = decode_lazy(data)
    assert segments
    assert encode_lazy(segments) == data
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        assert decode_lazy(changed) is None
    for changed in (data[:-1], data + b"\0", b"", data[:20]):
        assert decode_lazy(changed) is None
    folder.unlink(LIST)
    folder.create(LIST).write(0, data[:8] + b"\x02" + data[9:])
    with pytest.raises(UnsupportedFormat):
        queue_at(THERE, store, disk)
    folder.unlink(LIST)
    folder.create(LIST).write(0, data[:-1])
    with pytest.raises(CorruptJournal, match="which segments are not here"):
        queue_at(THERE, store, disk)


# -- planted faults --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "plant", ["list_after_the_sign", "whole_before_synced", "header_written_again", "crc_not_asked"]
)
def test_planted_faults_are_found(store: Counted, monkeypatch: pytest.MonkeyPatch, tally: Tally, plant: str) -> None:
    def find() -> None:
        if plant == "crc_not_asked":
            monkeypatch.setattr(reading, "crc32", lambda data, crc=0: AnyCrc())
            test_what_cannot_be_fetched_is_said_and_nothing_is_skipped(store, None)
            return
        if plant == "list_after_the_sign":
            monkeypatch.setattr("kestrelpy.ship.restoring.write_lazy", lambda *arguments: None)
        else:
            monkeypatch.setattr(
                LazyFolder, "_fetch", without_sync if plant == "whole_before_synced" else with_the_header
            )
        for seed in range(10):
            explore_cuts(store, tally, power_cut=True, seed=seed)

    with pytest.raises((AssertionError, CorruptJournal, pytest.fail.Exception)):
        find()
    tally.add("planted faults caught", 1)


class AnyCrc(int):
    """Equal to every checksum."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def without_sync(self: LazyFolder, name: str, segment: Any) -> None:
    file = self._inner.open(name, write=True)
    file.write(96, b"".join(self._shipped.segment_parts(segment))[96:-96])
    file.close()


def with_the_header(self: LazyFolder, name: str, segment: Any) -> None:
    file = self._inner.open(name, write=True)
    file.write(0, b"".join(self._shipped.segment_parts(segment)))
    file.sync()
    file.close()


# -- a standby -------------------------------------------------------------------------------------------------------


def test_a_standby_does_not_believe_a_file_with_a_hole(store: Counted, tmp_path: Path) -> None:
    restore(store, QUEUE, tmp_path, lazy=True)
    with Standby(tmp_path, QUEUE, store, poll_interval=0.01) as standby:
        until(lambda: standby.status().state in ("following", "over"))
        assert not (tmp_path / LIST).exists()
        queue = standby.take_over(force=True)
    with queue:
        assert rest_of(queue) == due(21)
