"""Every operation on the disk fails once, or from there on: only documented errors are seen, and nothing acknowledged
is lost.

The same run, in each sync mode, is repeated with the n-th operation failing, for all n. What an error meant is checked
when the fault is gone and the queue is opened by another process.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import CorruptJournal, DurabilityUnknown, JournaledQueue, QueueDiskFull, QueueEmpty, ReaderConfig
from kestrelpy._journal.journal import Journal
from kestrelpy._writing.syncer import Syncer
from kestrelpy.testing import CrashingDisk, FailingDisk, ManualClock, PowerModel
from kestrelpy.testing._choices import Corner
from tests.crash.injected import ERRORS, Run
from tests.crash.recovered import abandon_all, read_all
from tests.support.budget import LONG, drawn
from tests.support.queues import Sync

pytestmark = pytest.mark.usefixtures("quiet")
STORES = 16
GROWING = ("create", "grow")
"""What takes room; the room of a footer is reserved with its segment."""


@pytest.fixture(autouse=True)
def _left_open() -> Iterator[None]:
    yield
    abandon_all()


def operations(sync: Sync) -> int:
    run = Run(sync, 0)
    run.steps()
    run.check_after_kill()
    assert not run.errors
    assert not run.refused
    return run.failing.operations


def fail_in_turn(sync: Sync, error: int, count: int, **how: Any) -> int:
    """The run with each of ``count`` operations failing; how many errors were seen in all."""
    seen = 0
    for at in range(1, count + 1):
        run = Run(sync, error, mapped="store" not in how.get("kinds", ()))
        run.failing.arm(error, at=at, **how)
        try:
            run.steps()
            run.check_after_kill()
            run.check_after_power_cut(Corner(last=False), PowerModel.PREFIX)
        except BaseException as broken:
            broken.add_note(f"sync {sync!r}, {errno.errorcode[error]} at operation {at}, {how}")
            raise
        seen += run.errors
    return seen


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "sticky"])
@pytest.mark.parametrize("sync", ["always", 0.1, "never"])
def test_every_operation_fails_in_turn(sync: Sync, sticky: bool) -> None:
    count = operations(sync)
    assert count > 80
    errors = ERRORS if LONG or sync == "always" else ERRORS[:2]
    for error in drawn(errors, 1):
        seen = fail_in_turn(sync, error, count, sticky=sticky)
        assert seen > count // 2  # most of them show


@pytest.mark.parametrize("short_bytes", [0, 1, 40, -1])
def test_every_store_fails_in_turn(short_bytes: int) -> None:
    """Where stores go by writes, and one of them stops in the middle (R12)."""
    assert fail_in_turn("never", errno.ENOSPC, STORES, kinds={"store"}, short_bytes=short_bytes) > STORES // 2


@contextlib.contextmanager
def failed_stores_stay() -> Iterator[None]:
    with patch.object(Journal, "_undo", lambda *_: None):
        yield


@contextlib.contextmanager
def only_the_caller_is_told() -> Iterator[None]:
    with patch.object(Syncer, "fail", lambda *_, **__: None):
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
    futures: list[Future[Any]] = [*waiting, *gets]
    for future in futures:
        error = future.exception(timeout=0)
        assert isinstance(error, DurabilityUnknown)
        assert (error.first_id, error.last_id, error.errno) == (durable + 1, durable + 3, errno.EIO)
    calls: list[Callable[[], object]] = [lambda: queue.put(b"x"), queue.sync, queue.checkpoint, consumer.get_nowait]
    for call in calls:
        with pytest.raises(DurabilityUnknown):
            call()


@pytest.mark.parametrize(
    "close", [JournaledQueue.close, lambda queue: queue.__exit__(None, None, None)], ids=["close", "with"]
)
def test_closing_tells_of_a_sync_that_failed_in_the_background(close: Callable[[JournaledQueue], None]) -> None:
    clock, failing = ManualClock(), FailingDisk(CrashingDisk())
    queue = JournaledQueue("/data", "jobs", sync=0.1, disk=failing, clock=clock)
    in_doubt = queue.put(b"acknowledged, and nothing is called any more")
    failing.arm(errno.EIO, kinds=["sync"])
    clock.advance(0.1)
    with pytest.raises(DurabilityUnknown) as caught:
        close(queue)
    assert (caught.value.first_id, caught.value.last_id) == (in_doubt, in_doubt)
    assert queue.closed
    queue.close()  # it has been said
    JournaledQueue("/data", "jobs", disk=failing, clock=clock).close()  # nothing is held


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


@pytest.mark.parametrize(
    ("there", "how"),
    [
        (True, {"kinds": {"store"}, "short_bytes": 5}),
        (False, {"kinds": {"grow", "unlink"}}),
    ],
    ids=["a torn frame", "a segment begun"],
)
def test_a_full_disk_says_so_again(there: bool, how: dict[str, Any]) -> None:
    """The second put fails where it clears away what the first has left."""
    failing = FailingDisk(CrashingDisk(), mapped=False)
    queue = JournaledQueue("/data", "jobs", sync="never", disk=failing, clock=ManualClock())
    if there:
        queue.put(b"stored")
    failing.arm(errno.ENOSPC, sticky=True, **how)
    for _ in range(3):
        with pytest.raises(QueueDiskFull):
            queue.put(b"refused")
    failing.disarm()
    assert queue.put(b"room again") == 1 + there
    assert [item.data for item in read_all(queue.reader())] == [*[b"stored"] * there, b"room again"]
    queue.close()
