"""Every operation on the disk fails once, or from there on: only documented errors are seen, and nothing acknowledged
is lost.

The same run, in each sync mode, is repeated with the n-th operation failing, for all n. What an error meant is checked
when the fault is gone and the queue is opened by another process.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
from recovered import abandon_all, opened, read_all, vanish

from kestrelpy import CorruptJournal, DurabilityUnknown, Item, JournaledQueue, QueueDiskFull, QueueEmpty, ReaderConfig
from kestrelpy._journal import Journal
from kestrelpy.testing import CrashingDisk, FailingDisk, ManualClock, PowerModel
from kestrelpy.testing._choices import Corner

ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EMFILE)
LONG = os.environ.get("KESTRELPY_LONG") == "1"
STORES = 16
GROWING = ("create", "grow")
"""What takes room; the room of a footer is reserved with its segment."""
NAMES = ("left", "right")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    abandon_all()


class Recording(FailingDisk):
    """Knows the kinds of operations that it made fail."""

    failed: frozenset[str] = frozenset()

    def due(self, kind: str, path: str = "") -> OSError | None:
        error = super().due(kind, path)
        if error is not None:
            self.failed |= {kind}
        return error


@dataclass
class Run:
    """The run, and its ledger."""

    sync: float | str
    error: int
    mapped: bool = True
    disk: CrashingDisk = field(default_factory=CrashingDisk)
    acknowledged: dict[int, bytes] = field(default_factory=dict)
    refused: set[bytes] = field(default_factory=set)
    doubtful: set[bytes] = field(default_factory=set)
    durable_id: int = 0
    committed: dict[str, set[int]] = field(default_factory=lambda: {name: set() for name in NAMES})
    opened: dict[str, list[Item]] = field(default_factory=lambda: {name: [] for name in NAMES})
    errors: int = 0
    queue: JournaledQueue | None = None

    def __post_init__(self) -> None:
        self.failing = Recording(self.disk, mapped=self.mapped)
        self.serial = 0

    # -- steps -------------------------------------------------------------------------------------------------------

    def steps(self) -> None:
        """Puts over three segments, reads by two readers, checkpoints, retirement, a clean end and a death."""
        self.open()
        for _ in range(3):
            self.put(1200)
        self.take("left", 2)
        self.put(10, 900, 900)
        self.commit("left", 1)
        self.checkpoint()
        self.put(40)
        self.do(lambda queue: queue.sync(), self.synced)
        self.abort("left")
        for name in NAMES:
            self.take(name, 100)
            self.commit(name, 100)
        self.put(3000)
        self.wait()
        self.close()
        self.open()
        self.put(100)
        self.checkpoint()
        self.die()
        self.open()
        self.put(2000)
        self.put(5, 5)
        self.take("right", 2)
        self.commit("right", 2)
        self.checkpoint()
        self.close()

    def do(self, call: Callable[[JournaledQueue], Any], then: Callable[[Any], object] = lambda _: None) -> None:
        """One call. What it raises must be documented; after a failed sync nothing works but ``close()``."""
        if self.queue is None:
            return
        try:
            result = call(self.queue)
        except QueueEmpty:
            return
        except DurabilityUnknown as error:
            self.note(error)
            self.in_doubt(error)
            if not self.queue.closed:
                self.is_failed(error)
                self.end()
        except OSError as error:
            self.note(error)
        else:
            then(result)

    def note(self, error: OSError) -> None:
        assert self.failing.failures, error
        assert error.errno == self.error, error
        self.errors += 1

    def in_doubt(self, error: DurabilityUnknown) -> None:
        """The items in doubt are named; what was acknowledged before them stands, and is looked for in the end."""
        assert error.first_id > self.durable_id
        assert error.last_id >= max(self.acknowledged, default=0)
        self.durable_id = error.first_id - 1
        self.doubt()

    def doubt(self) -> None:
        for item_id in [item_id for item_id in self.acknowledged if item_id > self.durable_id]:
            self.doubtful.add(self.acknowledged.pop(item_id))

    def is_failed(self, error: DurabilityUnknown) -> None:
        """Everybody is told, now and later, although the disk is well again: only a reopening helps (R9)."""
        assert self.queue is not None
        queue = self.queue
        self.failing.disarm()
        calls: list[Callable[[], object]] = [lambda: queue.put(b"after the failure"), queue.sync, queue.checkpoint]
        calls += [reader.get_nowait for reader in queue.readers.values()]
        calls += [reader.checkpoint for reader in queue.readers.values()]
        for call in calls:
            with pytest.raises(DurabilityUnknown) as again:
                call()
            assert again.value.first_id == error.first_id

    def end(self) -> None:
        """Close what has failed, as a program would, and go on."""
        assert self.queue is not None
        with contextlib.suppress(OSError):
            self.queue.close()
        self.queue = None
        self.open()

    def open(self) -> None:
        self.opened = {name: [] for name in NAMES}
        for attempt in range(2):
            clock = self.clock = ManualClock(1_000_000)
            queue = None
            try:
                queue = JournaledQueue(
                    "/data",
                    "jobs",
                    sync=self.sync,  # type: ignore[arg-type]
                    segment_bytes=4096,
                    clock=clock,
                    disk=self.failing,
                )
                opened.add(queue)
                for name in NAMES:
                    queue.reader(name, start="earliest")
                self.queue = queue
            except OSError as error:
                self.note(error)
                assert attempt == 0
                self.doubt()  # if it was the sync of a recovery
                self.failing.disarm()
                if queue is not None:
                    with contextlib.suppress(OSError):
                        queue.close()
            else:
                return

    def put(self, *sizes: int) -> None:
        items = []
        for size in sizes:
            self.serial += 1
            items.append(b"%05d" % self.serial + bytes(size))
        self.refused |= set(items)
        try:
            self.do(lambda queue: queue.put_many(items) if len(items) > 1 else queue.put(items[0]), self.stored(items))
        finally:
            if self.errors and self.queue is None:
                self.refused -= set(items)

    def stored(self, items: list[bytes]) -> Callable[[Any], None]:
        def note(result: Any) -> None:
            ids = result if isinstance(result, range) else range(result, result + 1)
            self.acknowledged.update(zip(ids, items, strict=True))
            self.refused.difference_update(items)
            if self.sync == "always":
                self.durable_id = ids[-1]

        return note

    def synced(self, _: Any) -> None:
        self.durable_id = max(self.acknowledged, default=self.durable_id)

    def take(self, name: str, count: int) -> None:
        self.do(lambda queue: queue.reader(name).get_many(count, timeout=0), self.opened[name].extend)

    def commit(self, name: str, count: int) -> None:
        chosen, self.opened[name] = self.opened[name][:count], self.opened[name][count:]
        if chosen:
            self.committed[name] |= {item.id for item in chosen}
            self.do(lambda queue: queue.reader(name).commit_many(chosen))

    def abort(self, name: str) -> None:
        if self.opened[name]:
            item = self.opened[name].pop()
            self.do(lambda queue: queue.reader(name).abort(item))

    def checkpoint(self) -> None:
        self.do(lambda queue: queue.checkpoint(durable=True))

    def wait(self) -> None:
        self.do(lambda queue: self.clock.advance(1.5))
        self.do(lambda queue: queue.sync(), self.synced)

    def close(self) -> None:
        queue = self.queue
        if queue is not None:
            failed = self.errors
            self.do(lambda queue: queue.close(), self.synced)
            if self.queue is queue:
                assert queue.closed
                if self.errors > failed:
                    self.doubt()
                self.queue = None

    def die(self) -> None:
        if self.queue is not None:
            vanish(self.queue, self.disk)
            self.queue = None

    # -- afterwards --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.failing.disarm()
        self.die()
        self.check_contents(self.disk.after_kill(), self.acknowledged)
        if "sync_directory" in self.failing.failed:
            return  # of the names from then on nothing is known
        durable = {item_id: data for item_id, data in self.acknowledged.items() if item_id <= self.durable_id}
        self.check_contents(self.disk.after_power_cut(Corner(last=False), PowerModel.PREFIX), durable)

    def check_contents(self, disk: CrashingDisk, kept: dict[int, bytes]) -> None:
        clock = ManualClock(2_000_000)
        queue = JournaledQueue("/data", "jobs", sync="never", segment_bytes=4096, disk=disk, clock=clock)
        opened.add(queue)
        for name in NAMES:
            items = read_all(queue.reader(name, start="earliest"))
            ids = [item.id for item in items]
            assert ids == sorted(set(ids))
            seen = {item.id: item.data for item in items}
            assert not self.refused & set(seen.values())
            for item_id, data in kept.items():
                assert item_id in self.committed[name] or seen.get(item_id) == data, (name, item_id)
            known = self.doubtful | set(self.acknowledged.values())
            assert all(data in known for data in seen.values())
        last_id = queue.put(b"and on it goes")
        assert last_id > max(kept, default=0)
        queue.close()


def operations(sync: float | str) -> int:
    run = Run(sync, 0)
    run.steps()
    run.check()
    assert not run.errors
    assert not run.refused
    return run.failing.operations


def fail_in_turn(sync: float | str, error: int, count: int, **how: Any) -> int:
    """The run with each of ``count`` operations failing; how many errors were seen in all."""
    seen = 0
    for at in range(1, count + 1):
        run = Run(sync, error, mapped="store" not in how.get("kinds", ()))
        run.failing.arm(error, at=at, **how)
        try:
            run.steps()
            run.check()
        except BaseException as broken:
            broken.add_note(f"sync {sync!r}, {errno.errorcode[error]} at operation {at}, {how}")
            raise
        seen += run.errors
    return seen


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "sticky"])
@pytest.mark.parametrize("sync", ["always", 0.1, "never"])
def test_every_operation_fails_in_turn(sync: float | str, sticky: bool) -> None:
    count = operations(sync)
    assert count > 80
    for error in ERRORS if LONG or sync == "always" else ERRORS[:2]:
        seen = fail_in_turn(sync, error, count, sticky=sticky)
        assert seen > count // 2  # most of them show


@pytest.mark.parametrize("short_bytes", [0, 1, 40, -1])
def test_every_store_fails_in_turn(short_bytes: int) -> None:
    """Where stores go by writes, and one of them stops in the middle (R12)."""
    assert fail_in_turn("never", errno.ENOSPC, STORES, kinds={"store"}, short_bytes=short_bytes) > STORES // 2


@contextlib.contextmanager
def failed_stores_stay() -> Iterator[None]:
    with patch.object(Journal, "_undo", lambda _: None):
        yield


@contextlib.contextmanager
def only_the_caller_is_told() -> Iterator[None]:
    with patch.object(JournaledQueue, "_fail", lambda *_: None):
        yield


@pytest.mark.parametrize(
    ("plant", "how"),
    [
        (failed_stores_stay, {"kinds": {"store"}, "short_bytes": -1}),
        (only_the_caller_is_told, {"kinds": {"sync"}}),
    ],
    ids=["failed_stores_stay", "only_the_caller_is_told"],
)
def test_planted_faults_are_caught(plant: Callable[[], Any], how: dict[str, Any]) -> None:
    """R12 and R9."""
    with plant(), pytest.raises((AssertionError, CorruptJournal, pytest.fail.Exception)):
        fail_in_turn("never", errno.EIO, STORES, **how)


def test_gets_and_commits_go_on_without_room_and_puts_come_back() -> None:
    disk = CrashingDisk()
    failing = FailingDisk(disk)
    queue = JournaledQueue("/data", "jobs", sync="never", segment_bytes=4096, disk=failing, clock=ManualClock())
    ids = [queue.put(bytes(700)) for _ in range(20)]
    reader = queue.reader()
    failing.arm(errno.ENOSPC, sticky=True, kinds=GROWING)
    full = None
    while full is None and len(ids) < 40:
        try:
            ids += [queue.put(bytes(700))]
        except QueueDiskFull as error:
            full = error
    assert full is not None
    assert full.errno == errno.ENOSPC
    with pytest.raises(QueueDiskFull):
        queue.put_many([bytes(300)] * 12)
    for item in read_all(reader):
        assert item.id == ids.pop(0)
        reader.commit(item)
    assert not ids
    assert reader.items == 0
    failing.disarm()
    new = queue.put(b"room again")
    assert reader.get_nowait().id == new
    queue.close()


def test_a_failed_sync_reaches_everybody_who_waits() -> None:
    clock, failing = ManualClock(), FailingDisk(CrashingDisk())
    queue = JournaledQueue("/data", "jobs", sync=0.1, disk=failing, clock=clock)
    durable = queue.put(b"durable")
    queue.sync()
    consumer = queue.reader()
    waiting = [queue.put_future(b"%d" % n) for n in range(3)]
    consumer.commit_many(read_all(consumer))
    gets = [consumer.get_future() for _ in range(2)]
    failing.arm(errno.EIO, kinds=["sync"])
    clock.advance(0.1)
    for future in (*waiting, *gets):
        error = future.exception(timeout=0)
        assert isinstance(error, DurabilityUnknown)
        assert (error.first_id, error.last_id, error.errno) == (durable + 1, durable + 3, errno.EIO)
    calls: list[Callable[[], object]] = [lambda: queue.put(b"x"), queue.sync, queue.checkpoint, consumer.get_nowait]
    for call in calls:
        with pytest.raises(DurabilityUnknown):
            call()
    queue.close()


def test_a_read_that_fails_loses_nothing() -> None:
    failing = FailingDisk(CrashingDisk())
    queue = JournaledQueue("/data", "jobs", sync="never", disk=failing, clock=ManualClock())
    ids = [queue.put(bytes(5000)) for _ in range(300)]
    queue.close()
    queue = JournaledQueue("/data", "jobs", sync="never", disk=failing, default_reader=ReaderConfig(memory_bytes=1000))
    reader = queue.reader()
    seen: list[int] = []
    for at in range(240):
        if at % 2:
            failing.disarm()
        else:
            failing.arm(ERRORS[at // 2 % 4], at=1 + at // 2 % 7, kinds=["read", "open"])
        with contextlib.suppress(OSError, QueueEmpty):
            for item in reader.get_many(3, timeout=0):
                seen.append(item.id)
                item.commit()
        assert not reader.open_items
    failing.disarm()
    assert failing.failures > 50
    while reader.items:
        item = reader.get_nowait()
        seen.append(item.id)
        item.commit()
    assert seen == ids
    queue.close()
