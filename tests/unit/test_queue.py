"""The journaled queue: writing, durability, figures, opening and closing. Reading is in ``test_reader``."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import (
    BatchTooLarge,
    CorruptJournal,
    DurabilityUnknown,
    FullPolicy,
    ItemTooLarge,
    JournaledQueue,
    QueueClosed,
    QueueDiskFull,
    QueueEmpty,
    QueueFull,
    QueueLocked,
    ReaderConfig,
    UnknownItem,
    open_reader,
    queue_names,
    scan,
)
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal.checkpoint import load_checkpoint
from kestrelpy.testing import FailingDisk, ManualClock, MemoryDisk
from tests.support.disks import GatedDisk
from tests.support.patience import until
from tests.support.queues import drain, let_die, take_all

Open = Callable[..., JournaledQueue]
SYNCS = ["always", 0, 0.1, 30, "never"]


def config(**options: Any) -> ReaderConfig:
    return ReaderConfig(**options)


# -- putting ---------------------------------------------------------------------------------------------------------


# LK-F36, LK-F38: a put is one record; ids are dense from 1.
@pytest.mark.parametrize("sync", SYNCS)
def test_lk_f38_ids_are_dense_from_1_and_go_on_after_a_reopen(sync: Any, open_queue: Open) -> None:
    with open_queue(sync=sync) as queue:
        assert [queue.put(b"a"), queue.put(b"b", expires_in=99)] == [1, 2]
        assert queue.put_many([b"c", b"d"]) == range(3, 5)
        queue._check()
    with open_queue(sync=sync) as queue:
        assert queue.put(b"e") == 5
        assert drain(queue) == [b"a", b"b", b"c", b"d", b"e"]
    with open_queue(sync=sync) as queue:
        assert queue.put(b"f") == 6


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 4095, 4096, 65_536, 70_000])
def test_items_of_any_size_come_back(size: int, open_queue: Open) -> None:
    data = bytes(i % 251 for i in range(size))
    with open_queue() as queue:
        queue.put(data)
        queue.put(data, expires_in=9)
        queue.put_many([data, b"", data])
        assert drain(queue) == [data, data, data, b"", data]
    with open_queue() as queue:
        queue.put_many([data, data])
    with open_queue() as queue:
        assert drain(queue) == [data, data]


# LK-F36, LK-B11, LK-B25: too large is refused before anything happened; the largest fits an empty segment.
def test_lk_b11_the_largest_item_fits_and_one_byte_more_is_refused(open_queue: Open) -> None:
    with open_queue(segment_bytes=4096) as queue:
        largest = queue.max_item_bytes
        for _ in range(3):
            queue.put(bytes(largest), expires_in=10)
            queue.put(bytes(largest))
            with pytest.raises(ItemTooLarge) as caught:
                queue.put(bytes(largest + 1))
            assert (caught.value.item_bytes, caught.value.max_item_bytes) == (largest + 1, largest)
        assert queue.stats().tail_id == 6
        assert queue.stats().segments == 6
        assert all(path.stat().st_size <= 4096 for path in Path(queue.directory).glob("*.segment")), "R21"
    with open_queue(segment_bytes=4096) as queue:
        assert [len(data) for data in drain(queue)] == [largest] * 6


# LK-C11: == is allowed.
def test_lk_c11_max_item_bytes(open_queue: Open) -> None:
    with open_queue(max_item_bytes=10) as queue:
        assert queue.max_item_bytes == 10
        assert queue.put(bytes(10)) == 1
        puts: tuple[Callable[[], int], ...] = (
            lambda: queue.put(bytes(11)),
            lambda: queue.put(bytes(11), expires_in=1),
        )
        for refused in puts:
            with pytest.raises(ItemTooLarge):
                refused()
        assert queue.put(bytes(10)) == 2


def test_a_batch_with_one_item_too_large_stores_nothing(open_queue: Open) -> None:
    with open_queue(max_item_bytes=10) as queue:
        with pytest.raises(ItemTooLarge):
            queue.put_many([b"good", bytes(11), b"good"])
        assert queue.stats().tail_id == 0
        assert queue.put_many([b"x"] * 3) == range(1, 4)


def test_a_batch_larger_than_a_segment_is_one_record_in_one_of_its_own(open_queue: Open) -> None:
    with open_queue(segment_bytes=4096) as queue:
        queue.put(b"before")
        items = [bytes([n]) * 1000 for n in range(20)]
        assert queue.put_many(items) == range(2, 22)
        queue.put(b"after")
    with open_queue(segment_bytes=4096) as queue:
        assert drain(queue) == [b"before", *items, b"after"]


def test_put_many_of_nothing(open_queue: Open) -> None:
    with open_queue() as queue:
        assert queue.put_many([]) == range(0)
        assert queue.put_many(iter(())) == range(0)
        assert queue.put(b"x") == 1
    with pytest.raises(QueueClosed):
        queue.put_many([])


def test_put_many_takes_any_iterable_and_one_write_and_one_sync(folder: Path, clock: ManualClock) -> None:
    disk = FailingDisk(RealDisk(), mapped=False)
    with JournaledQueue(folder, "jobs", sync="always", clock=clock, disk=disk) as queue:
        queue.put(b"first")
        syncs, stores = disk.counts["sync"], disk.counts["store"]
        assert queue.put_many(b"%d" % n for n in range(100)) == range(2, 102)
        assert disk.counts["sync"] - syncs == 1
        assert disk.counts["store"] - stores == 1


@pytest.mark.parametrize("data", [bytearray(b"abc"), memoryview(b"abc"), memoryview(b"aXbXcX")[::2]])
def test_buffers_are_items(data: Any, open_queue: Open) -> None:
    with open_queue() as queue:
        queue.put(data)
        queue.put_many([data, b"x"])
        if isinstance(data, bytearray):
            data[:] = b"zzz"  # what was put does not change any more
        found = [queue.get_nowait().data for _ in range(2)]
        assert found == [b"abc", b"abc"]
        assert type(found[0]) is bytes


# LK-F72: the expiry instant is stored, whichever way it was given.
def test_expiry_is_stored_in_milliseconds(open_queue: Open, clock: ManualClock) -> None:
    with open_queue() as queue:
        now_ms = clock.time_ns() // 1_000_000
        queue.put(b"a", expires_in=1.5)
        queue.put(b"b", expires_at_ms=now_ms + 7)
        queue.put(b"c")
        items = take_all(queue)
        assert [item.expires_ms for item in items] == [now_ms + 1500, now_ms + 7, None]
        assert {item.added_ms for item in items} == {now_ms}


# -- durability ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", SYNCS)
def test_a_put_that_returned_survives_the_death_of_the_process(sync: Any, killed: Any, open_queue: Open) -> None:
    def work(queue: JournaledQueue) -> None:
        queue.put(b"a")
        queue.put_many([b"b", b"c"])
        queue.put(b"d", expires_in=999)

    killed(work, sync=sync)
    with open_queue(sync=sync) as queue:
        assert drain(queue) == [b"a", b"b", b"c", b"d"]
        assert queue.put(b"e") == 5


# LK-C13: 0 is always; etcd #14370: acknowledged means synced.
@pytest.mark.parametrize("sync", ["always", 0])
def test_history_etcd_14370_items_are_not_seen_before_they_are_durable(
    sync: Any, open_queue: Open, gated_disk: GatedDisk, start: Any
) -> None:
    queue = open_queue(sync=sync, disk=gated_disk)
    reader = queue.reader()
    queue.put(b"first")
    waiting = reader.get_future()
    assert waiting.result(0).data == b"first"
    waiting = reader.get_future()
    with gated_disk.started:
        pass
    while gated_disk.started.acquire(blocking=False):
        pass
    gated_disk.gate.clear()
    done = threading.Event()

    def put_and_say_so() -> None:
        queue.put(b"second")
        done.set()

    start(put_and_say_so)
    assert gated_disk.started.acquire(timeout=20)
    assert not done.is_set()
    assert not waiting.done()
    assert reader.items == 1, "the open one"
    assert queue.stats().durable_id == 1
    assert queue.stats().tail_id == 2
    with pytest.raises(QueueEmpty):
        reader.peek()
    gated_disk.gate.set()
    assert waiting.result(20).data == b"second"
    assert done.wait(20)
    assert queue.stats().durable_id == 2


# R33: a sync runs without the queue's lock; the leader takes the batch.
def test_group_commit_threads_share_syncs(open_queue: Open, gated_disk: GatedDisk, start: Any) -> None:
    queue = open_queue(sync="always", disk=gated_disk)
    queue.reader()
    queue.put(b"first")
    while gated_disk.started.acquire(blocking=False):
        pass
    before = gated_disk.syncs
    gated_disk.gate.clear()
    threads = [start(queue.put, b"leader")]
    assert gated_disk.started.acquire(timeout=20)
    threads += [start(queue.put, b"follower") for _ in range(9)]
    until(lambda: queue.stats().tail_id == 11)
    assert gated_disk.syncs - before == 1
    gated_disk.gate.set()
    for thread in threads:
        thread.join(20)
    assert gated_disk.syncs - before <= 3, (
        "one for the leader, one for all who came meanwhile (one more if some came late)"
    )
    assert queue.stats().durable_id == 11
    assert len(drain(queue)) == 11
    queue._check()


# LK-F94: with seconds, one background sync for all puts of that time.
def test_lk_f94_background_sync_comes_once_per_interval(folder: Path, clock: ManualClock) -> None:
    disk = FailingDisk(MemoryDisk())
    with JournaledQueue(folder, "jobs", sync=0.5, clock=clock, disk=disk) as queue:
        for _ in range(10):
            queue.put(b"x")
        before = disk.counts["sync"]
        assert queue.stats().durable_id == 0
        clock.advance(0.49)
        assert disk.counts["sync"] == before
        clock.advance(0.02)
        assert disk.counts["sync"] == before + 1
        assert queue.stats().durable_id == 10
        assert queue.stats().sync_count == 1
        clock.advance(5)
        assert disk.counts["sync"] == before + 1, "nothing was put, nothing is synced"


def test_sync_never_syncs_only_when_asked(folder: Path, clock: ManualClock) -> None:
    disk = FailingDisk(MemoryDisk())
    with JournaledQueue(folder, "jobs", sync="never", clock=clock, disk=disk) as queue:
        queue.put(b"x")
        before = disk.counts["sync"]
        queue.put_many([b"y"] * 5)
        clock.advance(100)
        assert disk.counts["sync"] == before
        assert queue.stats().durable_id == 0
        queue.sync()
        assert disk.counts["sync"] == before + 1
        assert queue.stats().durable_id == 6
        queue.sync()
        assert disk.counts["sync"] == before + 1


@pytest.mark.parametrize("sync", SYNCS)
def test_put_future_completes_when_the_policy_says_so(sync: Any, open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue(sync=sync)
    future = queue.put_future(b"x", expires_in=5)
    assert future.done() is (sync == "never")
    clock.advance(0)  # "always": a sync is asked for at once
    assert future.done() is (sync in ("never", "always", 0))
    clock.advance(30)
    assert future.result(0) == 1
    assert queue.put_future(b"y") is not future
    with pytest.raises(ItemTooLarge):
        queue.put_future(bytes(queue.max_item_bytes + 1))


def test_a_batch_that_is_too_large_is_called_a_batch(open_queue: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = open_queue()
    monkeypatch.setattr("kestrelpy._writing.options.MAX_BATCH_BYTES", 3000)
    with pytest.raises(
        BatchTooLarge, match=r"^a batch of 3,012 bytes is larger than 3,000: split it into several$"
    ) as caught:
        queue.put_many([bytes(1000)] * 3)
    assert isinstance(caught.value, ItemTooLarge)
    assert (caught.value.batch_bytes, caught.value.max_batch_bytes, queue.stats().items) == (3012, 3000, 0)
    queue.put_many([bytes(1000)] * 2)


def test_put_future_completes_at_close_and_at_sync(open_queue: Open) -> None:
    queue = open_queue(sync=60)
    first = queue.put_future(b"x")
    queue.sync()
    assert first.result(0) == 1
    second = queue.put_future(b"y")
    assert not second.done()
    queue.close()
    assert second.result(0) == 2


def test_put_future_in_always_mode_with_the_real_clock(folder: Path) -> None:
    with JournaledQueue(folder, "jobs", sync="always") as queue:
        futures = [queue.put_future(b"%d" % n) for n in range(20)]
        assert [future.result(20) for future in futures] == list(range(1, 21))
        assert queue.stats().durable_id == 20


@pytest.mark.parametrize("sync", ["always", 0.01, "never"])
def test_aput(sync: Any, folder: Path) -> None:
    async def work() -> list[int]:
        with JournaledQueue(folder, "jobs", sync=sync) as queue:
            ids = await asyncio.gather(*(queue.aput(b"%d" % n) for n in range(10)))
            assert await queue.aput(b"more", timeout=1, expires_in=60) == 11
            return list(ids)

    assert sorted(asyncio.run(work())) == list(range(1, 11))


def test_a_cancelled_aput_leaves_the_item(folder: Path, clock: ManualClock) -> None:
    async def work() -> None:
        with JournaledQueue(folder, "jobs", sync=60, clock=clock) as queue:
            task = asyncio.ensure_future(queue.aput(b"stays"))
            while queue.stats().tail_id == 0:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            queue.sync()
            assert queue.get_nowait().data == b"stays"

    asyncio.run(work())


# -- a disk that fails -----------------------------------------------------------------------------------------------


# R9: a failed sync fails the queue until it is reopened, and everybody hears of it.
def test_r9_a_failed_sync_reaches_everybody_and_fails_the_queue(
    folder: Path, open_queue: Open, gated_disk: GatedDisk, start: Any
) -> None:
    queue = open_queue(sync="always", disk=gated_disk)
    reader = queue.reader()
    queue.put(b"good")
    while gated_disk.started.acquire(blocking=False):
        pass
    gated_disk.gate.clear()
    heard: list[BaseException] = []

    def hearing(work: Callable[[], object]) -> None:
        with pytest.raises(DurabilityUnknown) as caught:
            work()
        heard.append(caught.value)

    threads = [start(hearing, lambda: queue.put(b"doubtful"))]
    assert gated_disk.started.acquire(timeout=20)
    threads.append(start(hearing, lambda: queue.put(b"doubtful too")))
    until(lambda: queue.stats().tail_id == 3)
    future = queue.put_future(b"and this")
    assert reader.get_nowait().data == b"good"
    waiting = reader.get_future()
    gated_disk.error = OSError(errno.EIO, "bad")
    gated_disk.gate.set()
    for thread in threads:
        thread.join(20)
    assert len(heard) == 2
    for error in (*heard, future.exception(20), waiting.exception(20)):
        assert isinstance(error, DurabilityUnknown)
        assert (error.errno, error.first_id) == (errno.EIO, 2)
        assert error.last_id >= 3
    gated_disk.error = None
    for call in (
        lambda: queue.put(b"x"),
        queue.sync,
        queue.checkpoint,
        reader.get_nowait,
        lambda: queue.put_many([b"x"]),
    ):
        with pytest.raises(DurabilityUnknown):
            call()
    assert not queue.closed
    queue.close()
    assert queue.closed
    with open_queue() as again:
        assert drain(again)[0] == b"good"


def test_a_failed_background_sync_shows_at_the_next_call(folder: Path, clock: ManualClock) -> None:
    disk = FailingDisk(MemoryDisk())
    queue = JournaledQueue(folder, "jobs", sync=1.0, clock=clock, disk=disk)
    queue.put(b"a")
    queue.put(b"b")
    disk.arm(errno.EIO, kinds={"sync"})
    clock.advance(1)
    with pytest.raises(DurabilityUnknown) as caught:
        queue.put(b"c")
    assert (caught.value.first_id, caught.value.last_id) == (1, 2)
    for call in (queue.sync, queue.checkpoint):
        with pytest.raises(DurabilityUnknown):
            call()
    queue.close()
    with JournaledQueue(folder, "jobs", clock=clock, disk=disk) as again:
        assert drain(again) == [b"a", b"b"]
        assert again.put(b"d") == 3


# kestrel #69: a full disk left zero bytes, and the next start failed.
def test_history_kestrel_69_a_full_disk_refuses_puts_and_nothing_else(folder: Path, clock: ManualClock) -> None:
    disk = FailingDisk(MemoryDisk())
    queue = JournaledQueue(folder, "jobs", clock=clock, disk=disk, segment_bytes=4096)
    for _ in range(5):
        queue.put(bytes(600))
    held = queue.get_nowait()
    disk.arm(errno.ENOSPC, sticky=True, kinds={"grow"})
    with pytest.raises(QueueDiskFull) as caught:
        queue.put_many([bytes(600)] * 10)
    assert caught.value.errno == errno.ENOSPC
    tail_id = queue.stats().tail_id
    with pytest.raises(QueueDiskFull):
        queue.put_many([bytes(900)] * 5)
    assert queue.stats().tail_id == tail_id
    held.commit()
    queue.get_nowait().commit()
    disk.disarm()
    assert queue.put(b"there is room again") == tail_id + 1
    queue._check()
    queue.close()
    with JournaledQueue(folder, "jobs", clock=clock, disk=disk) as again:
        assert drain(again) == [bytes(600)] * (tail_id - 2) + [b"there is room again"]


def test_every_operation_may_fail_once_and_nothing_acknowledged_is_lost(clock: ManualClock) -> None:
    """Each disk operation of a short life fails once with EIO: what was acknowledged is there after a reopen, whole
    and in order.
    """

    def live(disk: FailingDisk, acknowledged: list[bytes]) -> None:
        queue = JournaledQueue("/q", "jobs", sync="always", clock=clock, disk=disk, segment_bytes=4096)
        with contextlib.closing(queue):
            for n in range(4):
                data = b"%d" % n * 700
                queue.put(data)
                acknowledged.append(data)
            queue.get_nowait()
            queue.put_many([b"x", b"y"])
            acknowledged += [b"x", b"y"]
            queue.checkpoint()

    counting = FailingDisk(MemoryDisk())
    live(counting, [])
    failures = 0
    for at in range(1, counting.operations + 1):
        disk = FailingDisk(MemoryDisk())
        disk.arm(errno.EIO, at=at)
        acknowledged: list[bytes] = []
        with contextlib.suppress(OSError):
            live(disk, acknowledged)
        failures += disk.failures
        disk.disarm()
        with JournaledQueue("/q", "jobs", clock=clock, disk=disk.inner) as queue:  # and no lock is held any more
            found = drain(queue)
        assert found[: len(acknowledged)] == acknowledged, f"operation {at}"
        assert len(found) <= len(acknowledged) + 2, f"operation {at}: a put that raised may be there, no more"
    assert failures == counting.operations


# -- limits ----------------------------------------------------------------------------------------------------------


# LK-C1, LK-C2, LK-F12: full when items >= maxItems; bytes may be overshot by one item.
def test_lk_c1_refuse_by_items(open_queue: Open) -> None:
    queue = open_queue(default_reader=config(max_items=2))
    queue.put(b"a")
    queue.put(b"b")
    for refused in (lambda: queue.put(b"c"), lambda: queue.put_future(b"c"), lambda: queue.put_many([b"c"])):
        with pytest.raises(QueueFull) as caught:
            refused()
        assert caught.value.reader == "jobs"
    assert queue.stats().tail_id == 2
    item = queue.get_nowait()
    with pytest.raises(QueueFull):
        queue.put(b"c")  # an open read counts
    item.commit()
    assert queue.put(b"c") == 3
    with pytest.raises(QueueFull):
        queue.put_many([b"d", b"e"])


def test_lk_c2_refuse_by_bytes_overshoots_by_one_item(open_queue: Open) -> None:
    queue = open_queue(default_reader=config(max_bytes=10))
    queue.put(bytes(9))
    queue.put(bytes(100))
    with pytest.raises(QueueFull):
        queue.put(b"")
    queue.get_nowait().commit()
    with pytest.raises(QueueFull):
        queue.put(b"x")
    queue.get_nowait().commit()
    assert queue.put(b"x") == 3


# LK-F36: refused if any reader refuses; nothing is stored for the others.
def test_lk_f36_any_reader_may_refuse_for_all(open_queue: Open) -> None:
    queue = open_queue(readers={"small": config(max_items=1)})
    large, small = queue.reader("large"), queue.reader("small")
    queue.put(b"a")
    with pytest.raises(QueueFull) as caught:
        queue.put(b"b")
    assert caught.value.reader == "jobs+small"
    assert (large.items, small.items) == (1, 1)
    small.get_nowait().commit()
    queue.put(b"b")
    assert (large.items, small.items) == (2, 1)


def test_limits_of_a_reader_that_is_not_open_count_by_its_checkpoint(open_queue: Open) -> None:
    options = {"readers": {"absent": config(max_items=2)}}
    with open_queue(**options) as queue:
        queue.reader("other")
        queue.reader("absent").close()
        queue.put(b"a")
        queue.put(b"b")
        with pytest.raises(QueueFull):
            queue.put(b"c")
        queue.drop_reader("absent")
        queue.put(b"c")


@pytest.mark.parametrize("limits", [{"max_items": 2}, {"max_bytes": 2}])
def test_block_waits_for_room(limits: dict[str, int], open_queue: Open, start: Any) -> None:
    queue = open_queue(default_reader=config(full_policy=FullPolicy.BLOCK, **limits))
    queue.put(b"a")
    queue.put(b"b")
    for timeout in (0, 0.001):
        with pytest.raises(QueueFull):
            queue.put(b"c", timeout=timeout)
    ids: list[int] = []
    thread = start(lambda: ids.append(queue.put(b"c", timeout=None)))
    until(lambda: len(queue._room) == 1)
    assert ids == []
    queue.get_nowait().commit()
    thread.join(20)
    assert ids == [3]
    queue._check()


@pytest.mark.parametrize("release", ["flush", "discard", "seek", "drop"])
def test_whatever_makes_room_wakes_a_blocked_put(
    release: str, open_queue: Open, start: Any, clock: ManualClock
) -> None:
    limited = config(full_policy=FullPolicy.BLOCK, max_items=1)
    queue = open_queue(readers={"a": limited})
    reader, _ = queue.reader("a"), queue.reader("b")
    queue.put(b"1", expires_in=1)
    thread = start(lambda: queue.put(b"2", timeout=None))
    until(lambda: len(queue._room) == 1)
    if release == "flush":
        reader.flush()
    elif release == "discard":
        clock.advance(1)
        reader.discard_expired()
    elif release == "seek":
        reader.seek(2)
    else:
        queue.drop_reader("a")
    thread.join(20)
    assert queue.stats().tail_id == 2


def test_a_blocked_put_is_woken_by_close(open_queue: Open, start: Any) -> None:
    queue = open_queue(default_reader=config(full_policy=FullPolicy.BLOCK, max_items=1))
    queue.put(b"1")

    def put() -> None:
        with pytest.raises(QueueClosed):
            queue.put(b"2", timeout=None)

    thread = start(put)
    until(lambda: len(queue._room) == 1)
    queue.close()
    thread.join(20)
    assert not thread.is_alive()


def test_aput_waits_for_room_without_blocking_the_loop(folder: Path) -> None:
    async def work() -> None:
        limited = config(full_policy=FullPolicy.BLOCK, max_items=1)
        with JournaledQueue(folder, "jobs", default_reader=limited) as queue:
            await queue.aput(b"1")
            task = asyncio.ensure_future(queue.aput(b"2", timeout=20))
            while not queue._room:
                await asyncio.sleep(0)
            queue.get_nowait().commit()
            assert await task == 2

    asyncio.run(work())


# LK-F12, LK-C4: DropOldest always accepts, drops the head after the put, and counts.
@pytest.mark.parametrize("sync", ["always", 0.1])
def test_lk_c4_drop_oldest_drops_and_counts(sync: Any, open_queue: Open) -> None:
    queue = open_queue(sync=sync, default_reader=config(max_items=3, full_policy=FullPolicy.DROP_OLDEST))
    reader = queue.reader()
    for n in range(10):
        queue.put(b"%d" % n)
    assert reader.items == 3
    assert reader.stats().discarded == 7
    assert reader.stats().committed == 0, "committed counts consumers' commits only"
    assert drain(queue) == [b"7", b"8", b"9"]
    queue.put_many([b"a"] * 5)
    assert reader.items == 3
    queue._check()


def test_drop_oldest_by_bytes_and_past_open_reads(open_queue: Open) -> None:
    queue = open_queue(default_reader=config(max_bytes=10, full_policy=FullPolicy.DROP_OLDEST))
    queue.put(bytes(6))
    held = queue.get_nowait()
    queue.put(bytes(3))
    queue.put(bytes(4))  # 13 bytes: the unread 3 go, the open 6 stay
    assert queue.reader().bytes == 10
    assert queue.reader().open_items == 1
    held.commit()
    assert drain(queue) == [bytes(4)]


@pytest.mark.parametrize("sync", ["always", 0.1, "never"])
@pytest.mark.parametrize("way", ["put", "put_many", "put_future"])
def test_an_error_while_dropping_fails_no_put(
    sync: Any, way: str, open_queue: Open, clock: ManualClock, caplog: Any
) -> None:
    dropping = config(max_items=3, memory_bytes=1000, full_policy=FullPolicy.DROP_OLDEST)
    disk = FailingDisk(MemoryDisk())
    queue = open_queue(sync=sync, disk=disk, default_reader=dropping, inbox_interval=None)
    reader = queue.reader()
    for _ in range(3):
        queue.put(bytes(400))
    disk.arm(errno.EMFILE, kinds={"open", "read"}, sticky=True)
    for number in range(4, 8):
        if way == "put":
            assert queue.put(b"x" * 400) == number
        elif way == "put_many":
            assert queue.put_many([b"x" * 400]) == range(number, number + 1)
        else:
            future = queue.put_future(b"x" * 400)
            clock.advance(0.2)
            assert future.result(0) == number
    assert reader.items > 3, "the limit is overshot meanwhile"
    assert len([record for record in caplog.records if "drop" in record.message]) == 1, "it is logged once"
    disk.disarm()
    assert queue.put(b"later") == 8
    queue.sync()
    assert reader.items == 3
    assert [item.id for item in take_all(reader)] == [6, 7, 8]
    queue._check()


def test_a_reader_is_there_though_it_can_drop_nothing(open_queue: Open, monkeypatch: Any) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "oh")

    with open_queue() as queue:
        queue.reader()
        queue.put_many([b"1", b"2"])
    queue = open_queue(default_reader=config(max_items=1, full_policy=FullPolicy.DROP_OLDEST))
    with monkeypatch.context() as patched:
        patched.setattr(queue._journal, "read", fail)
        reader = queue.reader()
    assert reader.items == 2
    queue.put(b"3")
    assert drain(queue) == [b"3"]


def test_drop_oldest_keeps_the_newest_item_however_large_it_is(open_queue: Open) -> None:
    queue = open_queue(default_reader=config(max_bytes=10, full_policy=FullPolicy.DROP_OLDEST))
    reader = queue.reader()
    queue.put(bytes(100))
    assert (reader.items, reader.stats().discarded) == (1, 0)
    queue.put(bytes(101))
    assert (reader.items, reader.bytes, reader.stats().discarded) == (1, 101, 1)
    queue.put_many([bytes(20), bytes(30)])
    assert drain(queue) == [bytes(30)]


def test_drop_oldest_keeps_its_word_after_a_reopen(open_queue: Open) -> None:
    dropping = config(max_items=2, full_policy=FullPolicy.DROP_OLDEST)
    with open_queue() as queue:
        for n in range(5):
            queue.put(b"%d" % n)
    with open_queue(default_reader=dropping) as queue:
        assert queue.reader().items == 2
        assert drain(queue) == [b"3", b"4"]


def test_expired_items_make_room(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue(default_reader=config(max_items=2))
    queue.reader()
    queue.put(b"a", expires_in=1)
    queue.put(b"b")
    with pytest.raises(QueueFull):
        queue.put(b"c")
    clock.advance(1)
    assert queue.put(b"c") == 3
    assert drain(queue) == [b"b", b"c"]
    assert queue.reader().stats().expired == 1


# -- readers of a queue ----------------------------------------------------------------------------------------------


# LK-F41: flush flushes every reader. LK-F42: checkpoint all of them. LK-F45: discard_expired sums.
def test_lk_f41_calls_for_all_readers(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue()
    a, b = queue.reader("a"), queue.reader("b")
    for _ in range(3):
        queue.put(b"x", expires_in=1)
    clock.advance(1)
    assert queue.discard_expired(1) == 2
    assert queue.discard_expired() == 4
    queue.put_many([b"y", b"z"])
    a.get_nowait().commit()
    assert queue.flush() == 3
    waiting = [a.get_future(), b.get_future(), b.get_future()]
    assert queue.evict_waiters() == 3
    assert all(isinstance(future.exception(0), QueueEmpty) for future in waiting)
    queue.checkpoint()
    assert (a.head, b.head) == (5, 5)


def test_calls_for_all_readers_open_the_default_one_if_there_is_no_other(open_queue: Open) -> None:
    with open_queue() as queue:
        queue.put(b"x")
        assert queue.flush() == 1
        assert list(queue.readers) == [""]
    with open_queue(name="named") as queue:
        queue.reader("r").close()
        queue.put(b"x")
        assert queue.flush() == 0
        assert dict(queue.readers) == {}


# LK-F40: items and bytes are sums over the readers.
def test_lk_f40_stats(open_queue: Open) -> None:
    with open_queue() as queue:
        queue.put(b"before")
    queue = open_queue()
    a, b = queue.reader("a"), queue.reader("b")
    queue.put(b"12345")
    queue.put_many([b"1", b"22"])
    a.get_nowait().commit()
    queue.sync()
    stats = queue.stats()
    assert (stats.items, stats.bytes) == (a.items + b.items, a.bytes + b.bytes) == (3 + 3, 8 + 8)
    assert (stats.put_count, stats.put_bytes) == (3, 8), "since the queue was opened"
    assert (stats.tail_id, stats.durable_id) == (4, 4)
    assert (stats.segments, stats.archived_segments, stats.quarantined) == (2, 0, 0)
    assert stats.sync_count == 1
    assert stats.journal_bytes == sum(path.stat().st_size for path in Path(queue.directory).glob("*.segment"))
    assert set(stats.readers) == {"a", "b"}
    assert stats.readers["a"].head == 1
    with pytest.raises(AttributeError):
        stats.items = 3  # type: ignore[misc]


def test_readers_is_a_mapping_of_those_open_here(open_queue: Open) -> None:
    queue = open_queue(readers={"configured": config(max_items=1)})
    assert dict(queue.readers) == {}, "readers= configures, it opens nothing"
    a = queue.reader("a")
    assert dict(queue.readers) == {"a": a}
    with pytest.raises(TypeError):
        queue.readers["b"] = a  # type: ignore[index]
    a.close()
    assert dict(queue.readers) == {}


# LK-C16: per-reader configuration by name, and a default.
def test_lk_c16_configuration_by_name(open_queue: Open) -> None:
    special, other = config(max_items=1), config(max_items=2)
    queue = open_queue(readers={"special": special}, default_reader=other)
    assert queue.reader("special").config is special
    assert queue.reader("x").config is other


# LK-C15: the checkpoint timer.
def test_lk_c15_readers_that_moved_are_checkpointed_by_the_timer(
    open_queue: Open, clock: ManualClock, folder: Path
) -> None:
    queue = open_queue(checkpoint_interval=2.0)
    for _ in range(3):
        queue.put(b"x")
    reader = queue.reader()
    clock.advance(10)
    saved = (folder / "jobs+.checkpoint").read_bytes()
    reader.get_nowait().commit()
    clock.advance(1.9)
    assert (folder / "jobs+.checkpoint").read_bytes() == saved
    clock.advance(0.2)
    assert (folder / "jobs+.checkpoint").read_bytes() != saved
    let_die(queue)
    with open_queue() as again:
        assert len(drain(again)) == 2


def test_looking_for_readers_elsewhere_goes_on_when_it_fails(folder: Path, clock: ManualClock, caplog: Any) -> None:
    disk = FailingDisk(MemoryDisk())
    with JournaledQueue(folder, "jobs", clock=clock, disk=disk, segment_bytes=4096, inbox_interval=None) as queue:
        here, elsewhere = queue.reader("here"), queue.reader("elsewhere")
        for _ in range(4):
            queue.put(bytes(3000))
        elsewhere.close()  # as if another process had it
        here.commit_many(here.get_many(4))
        disk.arm(errno.EIO, at=2, kinds={"names"})  # the first one is that of retiring
        clock.advance(1)
        assert "looking for readers" in caplog.text
        assert queue.stats().segments == 4
        reader = open_reader(folder, "jobs", "elsewhere", disk=disk, clock=clock, create=True)
        reader.commit_many(reader.get_many(4))
        reader.checkpoint(durable=True)
        reader.close()
        clock.advance(3)
        assert queue.stats().segments == 1


def test_a_checkpoint_that_fails_is_tried_again(folder: Path, clock: ManualClock, caplog: Any) -> None:
    disk = FailingDisk(MemoryDisk())
    with JournaledQueue(folder, "jobs", clock=clock, disk=disk, sync=60) as queue:
        queue.put_many([b"a", b"b"])
        queue.sync()
        queue.get_nowait().commit()
        disk.arm(errno.ENOSPC, sticky=True, kinds={"write", "create"})
        clock.advance(1)
        assert "will be tried again" in caplog.text
        queue.get_nowait().commit()
        disk.disarm()
        clock.advance(1)
        state, _ = load_checkpoint(disk.inner.directory(str(folder)), "jobs+.checkpoint")
        assert state is not None
        assert state.head == 2


# -- segments --------------------------------------------------------------------------------------------------------


# LK-F86, LK-C12: rotation before a record would go past the segment's size; kestrel #1: no item is lost at it.
def test_history_kestrel_1_rotation_loses_nothing(open_queue: Open) -> None:
    data = [b"%03d" % n * 50 for n in range(200)]
    with open_queue(segment_bytes=4096) as queue:
        for each in data:
            queue.put(each)
        assert queue.stats().segments > 8
        queue._check()
    with open_queue(segment_bytes=4096) as queue:
        assert drain(queue) == data


# LK-F88: a segment that every reader is past goes; the newest stays.
def test_lk_f88_segments_go_when_every_reader_is_past_them(open_queue: Open) -> None:
    queue = open_queue(segment_bytes=4096)
    a, b = queue.reader("a"), queue.reader("b")
    for n in range(40):
        queue.put(b"%02d" % n * 300)
    segments = queue.stats().segments
    drain(a)
    queue.checkpoint()
    assert queue.stats().segments == segments, "b still needs them"
    half = [b.get_nowait() for _ in range(20)]
    b.commit_many(half)
    queue.checkpoint()
    assert 1 < queue.stats().segments < segments
    assert [item.data for item in take_all(b)] == [b"%02d" % n * 300 for n in range(20, 40)]
    b.commit_many(range(21, 41))
    queue.checkpoint()
    assert queue.stats().segments == 1
    queue.put(b"x")
    assert a.get_nowait().id == 41


def test_segments_are_kept_for_an_open_read(open_queue: Open) -> None:
    """LK-B4's other side: the head stands at an item that is not done."""
    with open_queue(segment_bytes=4096) as queue:
        for n in range(20):
            queue.put(b"%02d" % n * 300)
        items = take_all(queue)
        queue.commit_many(items[1:])
        queue.checkpoint()
        assert queue.reader().head == 0
        assert queue.stats().segments > 3
    with open_queue(segment_bytes=4096) as queue:
        assert [item.id for item in take_all(queue)] == [1]
        queue.commit(1)
        queue.checkpoint()
        assert queue.stats().segments == 1


# LK-F88 with readers elsewhere: those that are not open here count by their checkpoints.
def test_segments_wait_for_a_reader_that_is_not_open(open_queue: Open) -> None:
    with open_queue(segment_bytes=4096) as queue:
        queue.reader("a")
        queue.reader("elsewhere").close()
        for n in range(20):
            queue.put(b"%02d" % n * 300)
        drain(queue.reader("a"))
        queue.checkpoint()
        assert queue.stats().segments > 3
        elsewhere = queue.reader("elsewhere")
        assert len(drain(elsewhere)) == 20
        elsewhere.close()
        queue.checkpoint()
        assert queue.stats().segments == 1


@pytest.mark.parametrize("way", ["itself", "another way there", "another queue of that name"])
def test_an_archive_where_the_queue_lives_is_refused(folder: Path, tmp_path: Path, way: str) -> None:
    """It would take each segment for one that is in the archive already, and delete it."""
    archive = folder
    if way == "another way there":
        archive = tmp_path / "link"
        archive.symlink_to(folder)
    elif way != "itself":
        archive = tmp_path / "other"
        JournaledQueue(archive, "jobs").close()
    with JournaledQueue(folder, "jobs") as queue:
        queue.put(b"x")
    with pytest.raises(ValueError, match="archive_dir must not be where a queue named 'jobs' lives"):
        JournaledQueue(folder, "jobs", archive_dir=archive, segment_bytes=4096)
    with JournaledQueue(folder, "jobs", archive_dir=tmp_path / "third", segment_bytes=4096) as queue:
        assert queue.get().data == b"x"


# LK-C14, LK-S8: consumed segments go into the archive.
@pytest.mark.parametrize("other_file_system", [False, True])
def test_lk_c14_archive(other_file_system: bool, clock: ManualClock) -> None:
    """R6, also where the archive is on another file system."""
    disk = MemoryDisk(mounts=["/archive"] if other_file_system else [])
    with JournaledQueue("/q", "jobs", clock=clock, disk=disk, segment_bytes=4096, archive_dir="/archive") as queue:
        for n in range(20):
            queue.put(b"%02d" % n * 300)
        live = sorted(name for name in disk.directory("/q").names() if name.endswith(".segment"))
        drain(queue)
        queue.checkpoint()
        archived = sorted(disk.directory("/archive").names())
        assert archived == live[:-1]
        assert queue.stats().archived_segments == len(archived) >= 3
    found = [record.data for record in scan("/q", "jobs", archive_dir="/archive", disk=disk)]
    assert found == [b"%02d" % n * 300 for n in range(20)]


def test_an_archive_is_never_overwritten(clock: ManualClock) -> None:
    disk = MemoryDisk()
    archive = disk.directory("/archive", create=True)
    with JournaledQueue("/q", "jobs", clock=clock, disk=disk, segment_bytes=4096, archive_dir="/archive") as queue:
        for n in range(20):
            queue.put(b"%02d" % n * 300)
        name = min(name for name in disk.directory("/q").names() if name.endswith(".segment"))
        archive.create(name).write(0, b"another file")
        drain(queue)
        queue.checkpoint()
        assert archive.open(name).read(0, 99) == b"another file"
        assert any(other.startswith(name[:-8]) and other != name for other in archive.names())
    assert len(list(scan("/q", "jobs", archive_dir="/archive", disk=disk))) == 20


def test_two_queues_of_one_name_share_an_archive(clock: ManualClock) -> None:
    disk = MemoryDisk()
    for directory in ("/one", "/two"):
        with JournaledQueue(directory, "jobs", clock=clock, disk=disk, segment_bytes=4096, archive_dir="/a") as queue:
            for n in range(6):
                queue.put(b"%s%02d" % (directory.encode(), n) * 300)
            drain(queue)
            queue.checkpoint()
            count = queue.stats().archived_segments
            assert count >= 2
    assert len(disk.directory("/a").names()) == 2 * count
    for directory in ("/one", "/two"):
        found = [record.data for record in scan(directory, "jobs", archive_dir="/a", disk=disk)]
        assert found == [b"%s%02d" % (directory.encode(), n) * 300 for n in range(6)]


def test_an_archive_that_fails_keeps_the_segment_and_is_tried_again(clock: ManualClock, caplog: Any) -> None:
    disk = FailingDisk(MemoryDisk())
    with JournaledQueue("/q", "jobs", clock=clock, disk=disk, segment_bytes=4096, archive_dir="/a") as queue:
        for n in range(20):
            queue.put(b"%02d" % n * 300)
        drain(queue)
        disk.arm(errno.ENOSPC, kinds={"move"})
        clock.advance(1)
        assert "will be tried again" in caplog.text
        clock.advance(1)
        assert len(disk.directory("/a").names()) == queue.stats().archived_segments >= 3
    assert len(list(scan("/q", "jobs", archive_dir="/a", disk=disk))) == 20


def test_a_small_queue_is_small_on_disk(open_queue: Open, folder: Path) -> None:
    queue = open_queue()
    for _ in range(3):
        queue.put(b"small")
    assert sum(path.stat().st_blocks * 512 for path in folder.iterdir()) <= 128 << 10
    queue.close()
    assert sum(path.stat().st_blocks * 512 for path in folder.iterdir()) <= 32 << 10


# -- opening and closing ---------------------------------------------------------------------------------------------


# LK-F43: later calls raise; idempotent; waiters are woken (LK-B15).
def test_lk_f43_use_after_close(open_queue: Open) -> None:
    queue = open_queue()
    reader = queue.reader()
    queue.put(b"x")
    item = queue.get_nowait()
    assert not queue.closed
    queue.close()
    queue.close()
    assert queue.closed
    calls: list[Callable[[], object]] = [
        lambda: queue.put(b"x"), lambda: queue.put(b"x", expires_in=1), lambda: queue.put_many([b"x"]),
        lambda: queue.put_future(b"x"), queue.sync, queue.checkpoint, queue.flush, queue.discard_expired,
        queue.reader, lambda: queue.reader("x"), lambda: queue.drop_reader("x"), queue.get, queue.get_nowait,
        lambda: queue.get_many(1), queue.get_future, queue.peek, lambda: queue.commit(1), lambda: queue.abort(1),
        lambda: queue.commit_many([1]), lambda: queue.seek(1), reader.get, reader.get_nowait,
        lambda: reader.get_many(1),
        reader.get_future, reader.peek, item.commit, item.abort, reader.flush, reader.discard_expired,
        reader.checkpoint,
        lambda: reader.seek(1), lambda: asyncio.run(reader.aget()), lambda: asyncio.run(queue.aput(b"x")),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(QueueClosed):
            call()
    reader.close()
    assert "closed" in repr(queue)


def test_lk_b15_close_wakes_waiters(open_queue: Open, start: Any) -> None:
    queue = open_queue()
    reader = queue.reader()

    def wait() -> None:
        with pytest.raises(QueueClosed):
            reader.get()

    start(wait)
    start(wait)
    until(lambda: reader.waiter_count == 2)
    future = reader.get_future()
    queue.close()
    assert isinstance(future.exception(20), QueueClosed)
    assert reader.waiter_count == 0


def test_the_context_manager_closes_also_when_it_raises(folder: Path, clock: ManualClock) -> None:
    opened: list[JournaledQueue] = []

    def work() -> None:
        with JournaledQueue(folder, "jobs", clock=clock) as queue:
            opened.append(queue)
            queue.put(b"x")
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert opened[0].closed
    with JournaledQueue(folder, "jobs", clock=clock) as queue:
        assert drain(queue) == [b"x"]


def test_names_and_directory(folder: Path, open_queue: Open) -> None:
    queue = open_queue()
    assert (queue.name, queue.directory) == ("jobs", str(folder))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())
    queue.put(b"x")
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir()), "R24"


# LK-B22, R27: one object at a time, also in the same process.
def test_lk_b22_a_second_open_is_refused(folder: Path, open_queue: Open, clock: ManualClock) -> None:
    import os

    queue = open_queue()
    queue.put(b"x")
    with pytest.raises(QueueLocked) as caught:
        JournaledQueue(folder, "jobs", clock=clock)
    assert caught.value.pid == os.getpid()
    assert caught.value.path == str(folder / "jobs.lock")
    assert queue.put(b"y") == 2
    queue.close()
    with open_queue() as again:
        assert drain(again) == [b"x", b"y"]


def test_another_process_is_refused(folder: Path, open_queue: Open, script: Any) -> None:
    import os

    queue = open_queue()
    queue.put(b"x")
    told = script(
        """
        import sys
        from kestrelpy import JournaledQueue, QueueLocked
        try:
            JournaledQueue(sys.argv[1], "jobs")
        except QueueLocked as error:
            print(error.pid)
        """,
        folder,
    )
    assert int(told) == os.getpid()
    assert queue.get_nowait().data == b"x"


# LK-F44: erase deletes this queue's files and no others.
def test_lk_f44_erase(folder: Path, open_queue: Open) -> None:
    other = open_queue(name="jobs-2")
    other.put(b"stays")
    queue = open_queue(segment_bytes=4096)
    for n in range(20):
        queue.put(b"%02d" % n * 300)
    queue.reader("a")
    waiting = queue.reader("b").get_future()
    (folder / "jobs.txt").write_text("foreign")
    queue.erase()
    assert queue.closed
    assert isinstance(waiting.exception(20), QueueClosed)
    queue.erase()
    assert not [
        path.name for path in folder.iterdir() if path.name.startswith(("jobs.", "jobs+")) and path.suffix != ".txt"
    ]
    assert (folder / "jobs.txt").read_text() == "foreign"
    assert queue_names(folder) == ["jobs-2"]
    with pytest.raises(QueueClosed):
        queue.put(b"x")
    with open_queue() as again:
        assert again.put(b"new") == 1
    assert other.get_nowait().data == b"stays"


def leave(_: object) -> None:
    raise SystemExit


def test_who_raises_out_of_a_callback_of_close_keeps_no_place_from_being_saved(open_queue: Open) -> None:
    """What the callback raises comes out of ``close``, when everything is saved and everybody was told."""
    queue = open_queue(sync="never")
    first, second = queue.reader("a"), queue.reader("b")
    queue.put(b"1")
    for reader in (first, second):
        reader.get_nowait().commit()
    waiting = [reader.get_future() for reader in (first, second) for _ in range(3)]
    for future in waiting[::2]:
        future.add_done_callback(leave)
    with pytest.raises(SystemExit):
        queue.close()
    assert all(isinstance(future.exception(0), QueueClosed) for future in waiting)
    with open_queue() as again:
        assert [again.reader(name).head for name in "ab"] == [1, 1]


def test_a_put_whose_callback_raises_keeps_no_place_from_being_saved(open_queue: Open) -> None:
    queue = open_queue(sync="always")
    queue.put(b"1")
    queue.get_nowait().commit()
    stored = queue.put_future(b"2")
    stored.add_done_callback(leave)
    with pytest.raises(SystemExit):
        queue.close()
    assert stored.result(0) == 2
    with open_queue() as again:
        assert again.get_nowait().data == b"2"


def test_a_reader_whose_callback_raises_is_closed_all_the_same(open_queue: Open) -> None:
    queue = open_queue(sync="never")
    reader = queue.reader("a")
    queue.put(b"1")
    reader.get_nowait().commit()
    waiting = [reader.get_future() for _ in range(3)]
    for future in waiting:
        future.add_done_callback(leave)
    with pytest.raises(SystemExit):
        reader.close()
    assert all(isinstance(future.exception(0), QueueClosed) for future in waiting)
    assert queue.reader("a").head == 1


def test_a_queue_whose_callback_raises_is_erased_all_the_same(open_queue: Open, folder: Path) -> None:
    queue = open_queue()
    waiting = [queue.get_future() for _ in range(2)]
    waiting[0].add_done_callback(leave)
    with pytest.raises(SystemExit):
        queue.erase()
    assert all(isinstance(future.exception(0), QueueClosed) for future in waiting)
    assert queue_names(folder) == []


def test_a_reader_is_dropped_whose_callback_closes_the_queue(open_queue: Open) -> None:
    queue = open_queue()
    queue.reader("a").get_future().add_done_callback(lambda _: queue.close())
    with pytest.raises(QueueClosed):
        queue.drop_reader("a")


def test_a_closed_queue_is_not_erased_in_silence(open_queue: Open) -> None:
    """Its files may be another owner's by now: whoever wants them erased opens it again."""
    queue = open_queue()
    queue.put(b"kept")
    queue.close()
    with pytest.raises(QueueClosed, match="open it again to erase it"):
        queue.erase()
    with open_queue() as again:
        assert again.get().data == b"kept"


def test_a_callback_of_who_closes_hears_that_nothing_is_erased(open_queue: Open) -> None:
    queue = open_queue(sync="always")
    heard: list[BaseException] = []

    def erase(_: object) -> None:
        try:
            queue.erase()
        except QueueClosed as error:
            heard.append(error)

    queue.get_future().add_done_callback(erase)
    queue.close()
    assert len(heard) == 1


# R31: nothing is saved from __del__; it is only said.
def test_a_queue_never_closed_gives_a_resource_warning(folder: Path, clock: ManualClock) -> None:
    disk = MemoryDisk()
    queue = JournaledQueue(folder, "jobs", clock=clock, disk=disk, sync="never")
    queue.put(b"x")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del queue
        gc.collect()
    assert [each.category for each in caught if "unclosed" in str(each.message)] == [ResourceWarning]
    disk.kill()
    with JournaledQueue(folder, "jobs", clock=clock, disk=disk) as again:
        assert drain(again) == [b"x"]


def test_a_queue_that_could_not_open_gives_no_warning_and_keeps_nothing_open(folder: Path, open_queue: Open) -> None:
    open_queue().close()
    (folder / "jobs.00.segment").write_bytes(b"KSTRLSEG\x09\x00" + bytes(100))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Exception, match="format version 9"):
            open_queue()
        gc.collect()
    (folder / "jobs.00.segment").unlink()
    open_queue().close()


def test_journaled_false_keeps_nothing_on_disk(folder: Path, clock: ManualClock) -> None:
    with JournaledQueue(folder, "jobs", journaled=False, clock=clock, archive_dir=folder / "archive") as queue:
        a, b = queue.reader("a"), queue.reader("b")
        queue.put_many([b"x", b"y"])
        item = a.get_nowait()
        item.abort()
        assert a.get_nowait().error_count == 1
        assert drain(b) == [b"x", b"y"]
        queue.checkpoint()
        queue.sync()
    assert not folder.exists()
    with JournaledQueue(folder, "jobs", journaled=False, clock=clock) as queue:
        assert queue.reader().items == 0


def test_repr_is_one_line_with_the_figures(open_queue: Open) -> None:
    queue = open_queue()
    queue.reader("a")
    queue.put(b"x")
    assert repr(queue) == "<JournaledQueue jobs: tail=1 readers=[<Reader jobs+a: head=0 items=1 open=0 waiters=0>]>"


# R32, "1,000 queues open in one process": a constant number of descriptors, two threads.
def test_many_queues_few_descriptors_one_thread(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    JournaledQueue(tmp_path, "warm", sync=0.05).close()
    before = descriptors()
    queues = [JournaledQueue(tmp_path, f"q{n}", sync=0.05) for n in range(20)]
    for queue in queues:
        queue.put(b"x")
        queue.get_nowait().commit()
    assert descriptors() - before <= 4 * len(queues) + 1
    names = [thread.name for thread in threading.enumerate()]
    assert (names.count("kestrelpy-maintenance"), names.count("kestrelpy-sync")) == (1, 1)
    for queue in queues:
        queue.close()
    assert descriptors() <= before


# -- the same on every disk ------------------------------------------------------------------------------------------


DISKS: dict[str, Callable[[], Any]] = {
    "real": RealDisk,
    "not mapped": lambda: RealDisk(mapped=False),
    "memory": MemoryDisk,
    "failing": lambda: FailingDisk(MemoryDisk(), mapped=False),
}


@pytest.mark.parametrize("kind", DISKS)
@pytest.mark.parametrize("sync", ["always", 0.1, "never"])
def test_a_life_on_every_disk(kind: str, sync: Any, folder: Path, clock: ManualClock) -> None:
    disk = DISKS[kind]()
    options: dict[str, Any] = {"disk": disk, "clock": clock, "sync": sync, "segment_bytes": 4096}
    with JournaledQueue(folder, "jobs", **options) as queue:
        a, b = queue.reader("a"), queue.reader("b")
        for n in range(30):
            queue.put(b"%02d" % n * 100)
        queue.put_many([b"x", b"yy"], expires_in=50)
        queue.put(b"soon", expires_in=1)
        items = a.get_many(30)
        a.commit_many(items[::2])
        items[1].abort()
        queue.checkpoint()
        clock.advance(2)
        queue._check()
        assert (a.items, b.items) == (18, 33)
    with JournaledQueue(folder, "jobs", **options) as queue:
        a, b = queue.reader("a"), queue.reader("b")
        assert a.get_nowait().error_count == 1
        again = take_all(a)
        assert [item.data for item in again] == [b"%02d" % n * 100 for n in range(3, 30, 2)] + [b"x", b"yy"]
        assert drain(b) == [b"%02d" % n * 100 for n in range(30)] + [b"x", b"yy"]
        assert a.stats().expired == b.stats().expired == 1
        queue._check()


# -- time ------------------------------------------------------------------------------------------------------------


def test_a_clock_that_jumps_back_changes_no_order_and_loses_nothing(open_queue: Open, clock: ManualClock) -> None:
    """R34, and the promise "clock jumps: no effect on order or loss"."""
    with open_queue(segment_bytes=4096) as queue:
        for n in range(10):
            queue.put(b"%02d" % n * 300)
    early = ManualClock(1000)
    with open_queue(segment_bytes=4096, clock=early) as queue:
        for n in range(10, 20):
            queue.put(b"%02d" % n * 300)
    with open_queue(segment_bytes=4096, clock=ManualClock(500)) as queue:
        assert drain(queue) == [b"%02d" % n * 300 for n in range(20)]


def test_a_clean_reopen_reads_no_payload(folder: Path, clock: ManualClock) -> None:
    """Invariant 12 of the simulated disk, LK-B17: opening reads headers and footers only."""
    disk = MemoryDisk()
    with JournaledQueue(folder, "jobs", clock=clock, disk=disk, segment_bytes=1 << 20) as queue:
        for _ in range(300):
            queue.put(bytes(10_000))
    watched = _Watching(disk)
    with JournaledQueue(folder, "jobs", clock=clock, disk=watched, segment_bytes=1 << 20) as queue:
        assert queue.stats().tail_id == 300
        assert watched.bytes_read < 20_000


class _Watching(GatedDisk):
    bytes_read = 0

    def directory(self, path: str, *, create: bool = False) -> Any:
        inner = self.inner.directory(path, create=create)
        opened = inner.open

        class Directory:
            def __getattr__(_, name: str) -> Any:  # noqa: N805
                return getattr(inner, name)

            def open(_, name: str, *, write: bool = False) -> Any:  # noqa: N805
                file = opened(name, write=write)

                class File:
                    def __getattr__(_, name: str) -> Any:  # noqa: N805
                        return getattr(file, name)

                    def read(_, offset: int, size: int) -> bytes:  # noqa: N805
                        data: bytes = file.read(offset, size)
                        self.bytes_read += len(data)
                        return data

                return File()

        return Directory()


def test_wrong_options(folder: Path) -> None:
    for options in (
        {"sync": -1}, {"sync": "sometimes"}, {"sync": True}, {"sync": None}, {"sync": float("nan")}, {"segment_bytes":
        100},
        {"segment_bytes": 1 << 40}, {"max_item_bytes": 0}, {"max_item_bytes": 1 << 30}, {"checkpoint_interval": 0},
        {"checkpoint_interval": -1}, {"on_corruption": "ignore"}, {"readers": {"a/b": ReaderConfig()}},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"must be|invalid name|above 0"):
            JournaledQueue(folder, "jobs", **options)
    assert not folder.exists()


def test_corrupt_is_not_swallowed_by_a_failed_open(open_queue: Open, folder: Path) -> None:
    with open_queue() as queue:
        queue.put(b"x")
    (segment,) = folder.glob("*.segment")
    segment.unlink()
    for _ in range(2):
        with pytest.raises(CorruptJournal):
            open_queue()


def test_puts_from_many_threads_are_all_there_in_order(folder: Path) -> None:
    with JournaledQueue(folder, "jobs", sync="never", segment_bytes=65_536) as queue:
        started = time.monotonic()

        def work(who: int) -> None:
            for n in range(300):
                queue.put(b"%d %d" % (who, n))

        threads = [threading.Thread(target=work, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = [tuple(map(int, data.split())) for data in drain(queue)]
        assert len(found) == 1200
        for who in range(4):
            assert [n for each, n in found if each == who] == list(range(300))
        assert time.monotonic() - started < 20
        queue._check()


def test_a_sync_that_comes_while_the_queue_is_being_closed_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = JournaledQueue(tmp_path, "jobs", sync="never")
    queue.reader()
    queue.put(b"x")
    synced = []

    def forget() -> None:  # what close() calls between refusing puts and writing the end
        queue._syncer.commit.run()
        synced.append(queue.stats().durable_id)

    monkeypatch.setattr(queue._ending, "_forget", forget)
    queue.close()
    assert synced == [1]
    with JournaledQueue(tmp_path, "jobs") as queue:
        assert queue.get(timeout=0).data == b"x"


# -- options that would break later ----------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


NO_SECONDS: tuple[Any, ...] = ("1", True, b"1", [])


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        *[(name, value, ValueError) for name in ("max_age", "max_idle") for value in (NAN, -1, -INF)],
        *[(name, value, TypeError) for name in ("max_age", "max_idle") for value in NO_SECONDS],
        *[
            (name, value, TypeError)
            for name in ("max_items", "max_bytes", "max_expire_sweep", "memory_bytes")
            for value in (NAN, INF, 2.0, True, "2")
        ],
        *[(name, -1, ValueError) for name in ("max_items", "max_bytes", "max_expire_sweep", "memory_bytes")],
        ("memory_bytes", None, TypeError),
    ],
)
def test_a_reader_is_not_configured_with_what_would_break_later(option: str, value: Any, error: type) -> None:
    with pytest.raises(error, match=option):
        ReaderConfig(**{option: value})


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        *[("segment_bytes", value, TypeError) for value in (1e5, True, "100000", NAN)],
        *[("max_item_bytes", value, TypeError) for value in (100.0, True, "100")],
        *[(name, NAN, ValueError) for name in ("sync", "checkpoint_interval", "inbox_interval")],
        *[(name, value, TypeError) for name in ("checkpoint_interval", "inbox_interval") for value in (True, "1")],
        ("readers", {"a": 5}, TypeError),
        ("default_reader", {}, TypeError),
        ("codec", 5, TypeError),
    ],
)
def test_a_queue_is_not_opened_with_what_would_break_later(
    option: str, value: Any, error: type, open_queue: Open, folder: Path
) -> None:
    with pytest.raises(error, match=option):
        open_queue(**{option: value})
    assert not list(folder.glob("jobs*"))
    for wrong, kind in ((NAN, ValueError), (True, TypeError)):
        with pytest.raises(kind, match="poll_interval"):
            open_reader(folder, "jobs", "a", poll_interval=wrong, create=True)
    with pytest.raises(TypeError, match="config"):
        open_reader(folder, "jobs", "a", config=5, create=True)  # type: ignore[call-overload]


@pytest.mark.parametrize("never", [INF, 1e306, 1 << 2000])
def test_infinitely_many_seconds_are_never(never: float, open_queue: Open, clock: ManualClock) -> None:
    config = ReaderConfig(max_age=never, max_idle=never)
    with open_queue(sync=INF, checkpoint_interval=INF, inbox_interval=INF, default_reader=config) as queue:
        queue.put(b"x")
        clock.advance(1e6)
        assert queue.discard_expired() == 0
        assert not queue.reader().idle_expired
        assert queue.get_nowait().data == b"x"


class Id:
    """As NumPy's integers are, say."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


class Int(int):
    """A kind of int."""


@pytest.mark.parametrize("call", ["commit", "commit_many", "abort", "seek"])
def test_an_id_is_any_whole_number_and_no_bool(call: str, open_queue: Open) -> None:
    queue = open_queue()
    queue.put_many([b"1", b"2", b"3"])
    reader = queue.reader()
    reader.get_many(3)
    for wrong in (True, 1.0, "1", None, NAN):
        with pytest.raises(TypeError):
            getattr(reader, call)([wrong] if call == "commit_many" else wrong)
    assert (reader.head, reader.open_items) == (0, 3)
    for number in (Id(1), Int(2), 3):
        getattr(reader, call)([number] if call == "commit_many" else number)
    assert type(reader.head) is int
    assert reader.head == {"abort": 0, "seek": 2}.get(call, 3)
    if call != "seek":
        with pytest.raises(UnknownItem):
            getattr(reader, call)([Id(1)] if call == "commit_many" else Id(1))
    else:
        with pytest.raises(ValueError, match="nan"):
            reader.seek(time_ms=NAN)  # type: ignore[arg-type]
