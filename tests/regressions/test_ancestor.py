"""The faults of libkestrel (LK-B) and of other relatives (history), each as a test that fails where the fault is back.

Those of the in-memory queues are in ``test_memory``; several have their tests with the module that prevents them:
etcd #14370, kestrel #1 and #69 in ``test_queue``; nsq #938, #471 and #1033, libkestrel #4 in ``test_recovery`` and
``test_segment``;
logstash #8218 and #12554, Kafka 16541 in ``test_checkpoint``; Chronicle #793 in ``test_journal``; diskcache #300 in
``unit/test_lifetime``.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import (
    CorruptJournal,
    InvalidName,
    ItemTooLarge,
    JournaledQueue,
    QueueClosed,
    QueueEmpty,
    QueueLocked,
    ReaderConfig,
)
from kestrelpy.testing import CrashingDisk, FailingDisk, ManualClock, MemoryDisk, PowerModel
from tests.support.disks import GatedDisk
from tests.support.paths import ROOT
from tests.support.patience import until
from tests.support.queues import drain, let_die, take_all

Open = Callable[..., JournaledQueue]


def ids(items: list[Any]) -> list[int]:
    return [item.id for item in items]


# -- libkestrel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "kill"])
def test_lk_b1_what_was_committed_out_of_order_does_not_come_again(how: str, open_queue: Open) -> None:
    queue = open_queue()
    for n in range(6):
        queue.put(b"%d" % n)
    items = queue.get_many(6)
    queue.commit_many([items[1], items[2], items[4]])
    queue.checkpoint()
    if how == "close":
        queue.close()
    else:
        let_die(queue)
    with open_queue() as again:
        reader = again.reader()
        assert (reader.items, reader.bytes) == (3, 3), "nor is it counted"
        assert ids(take_all(reader)) == [1, 4, 6]
        reader.commit_many([1, 4, 6])
        assert reader.head == 6


def test_lk_b2_a_corrupt_checkpoint_never_skips_and_erases_nothing(open_queue: Open, folder: Path) -> None:
    with open_queue(segment_bytes=4096) as queue:
        queue.reader("a")
        for n in range(20):
            queue.put(b"%02d" % n * 300)
    (folder / "jobs+a.checkpoint").write_bytes(b"\0" * 40)
    with open_queue(segment_bytes=4096) as queue:
        queue.checkpoint()
        queue.put(b"new")
        assert drain(queue.reader("a")) == [b"%02d" % n * 300 for n in range(20)] + [b"new"]


def gap(clock: ManualClock) -> MemoryDisk:
    """Items 1 and 2, then two ids lost with a torn tail, then items 5 and 6 in the next segment."""
    disk = MemoryDisk()
    queue = JournaledQueue("/q", "jobs", disk=disk, clock=clock, sync="never")
    for n in range(1, 5):
        queue.put(b"item %d" % n)
    disk.kill()
    with contextlib.suppress(Exception):
        queue.close()
    directory = disk.directory("/q")
    name = next(name for name in directory.names() if name.endswith(".segment"))
    file = directory.open(name, write=True)
    at = file.read(0, file.size()).index(b"item 3")
    file.write(at, b"torn")
    with JournaledQueue("/q", "jobs", disk=disk, clock=clock) as queue:
        assert queue.put(b"item 5") == 5
        assert queue.put(b"item 6") == 6
    return disk


def test_lk_b3_a_gap_in_the_ids_stalls_nobody(clock: ManualClock) -> None:
    disk = gap(clock)
    for _ in range(2):
        with JournaledQueue("/q", "jobs", disk=disk, clock=clock) as queue:
            reader = queue.reader()
            assert reader.items == 4
            assert ids(take_all(reader)) == [1, 2, 5, 6]


def test_lk_b4_a_gap_in_the_ids_does_not_hold_the_head(clock: ManualClock) -> None:
    disk = gap(clock)
    with JournaledQueue("/q", "jobs", disk=disk, clock=clock) as queue:
        reader = queue.reader()
        reader.commit_many(take_all(reader))
        assert (reader.head, reader.items, reader.bytes) == (6, 0, 0)
        queue.checkpoint(durable=True)
        assert queue.stats().segments == 1
        reader._check()


def test_lk_b5_flush_with_an_open_read_returns(open_queue: Open, start: Any) -> None:
    queue = open_queue()
    for n in range(5):
        queue.put(b"%d" % n)
    held = queue.get_nowait()
    done = threading.Event()

    def flush() -> None:
        queue.flush()
        done.set()

    start(flush)
    assert done.wait(20)
    held.commit()
    assert queue.reader().head == 5


def test_lk_b6_no_wake_up_is_lost_between_empty_and_waiting(folder: Path) -> None:
    """A producer and a consumer that meet at the empty queue a few thousand times, with the threads switched all
    the time.
    """
    with JournaledQueue(folder, "jobs", sync="never") as queue:
        reader = queue.reader()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            acknowledged = threading.Semaphore(0)

            def consume() -> None:
                for _ in range(2000):
                    reader.get(timeout=20).commit()
                    acknowledged.release()

            consumer = threading.Thread(target=consume)
            consumer.start()
            for _ in range(2000):
                queue.put(b"x")
                assert acknowledged.acquire(timeout=20), "the getter sleeps with an item present"
            consumer.join(20)
        finally:
            sys.setswitchinterval(interval)
        assert reader.items == 0
        reader._check()


def test_lk_b7_a_peeking_waiter_does_not_swallow_the_wake_up(open_queue: Open, start: Any) -> None:
    queue = open_queue()
    reader = queue.reader()
    seen: list[bytes] = []
    threads = [start(lambda: seen.append(reader.peek(20).data))]
    until(lambda: reader.waiter_count == 1)
    future = reader.get_future()
    threads.append(start(lambda: seen.append(reader.peek(20).data)))
    until(lambda: reader.waiter_count == 3)
    queue.put(b"x")
    assert future.result(20).data == b"x"
    queue.put(b"y")
    for thread in threads:
        thread.join(20)
    assert sorted(seen) == [b"x", b"y"]
    assert reader.get_nowait().data == b"y"
    reader._check()


def test_lk_b8_what_expired_before_its_get_is_accounted_for(open_queue: Open, clock: ManualClock) -> None:
    seen: list[int] = []
    queue = open_queue(default_reader=ReaderConfig(on_expired=lambda item: seen.append(item.id)))
    reader = queue.reader()
    queue.put(b"x", expires_in=1)
    assert reader.peek().id == 1
    clock.advance(1)
    for call in (
        reader.get_nowait,
        reader.peek,
        lambda: reader.get_future(0).result(0),
        lambda: reader.get_many(1, timeout=0),
    ):
        with pytest.raises(QueueEmpty):
            call()
    assert seen == [1]
    assert (reader.items, reader.head, reader.stats().expired) == (0, 1, 1)


def test_lk_b9_error_counts_survive_a_restart(open_queue: Open) -> None:
    queue = open_queue()
    queue.put_many([b"poison", b"good"])
    for expected in range(3):
        item = queue.get_nowait()
        assert (item.id, item.error_count) == (1, expected)
        item.abort()
        if expected == 1:
            queue.close()
        elif expected == 2:
            queue.checkpoint()
            let_die(queue)
        if expected:
            queue = open_queue()
    item = queue.get_nowait()
    assert (item.id, item.error_count) == (1, 3)
    item.commit()
    assert queue.get_nowait().error_count == 0


def test_lk_b10_a_flipped_bit_is_never_delivered(open_queue: Open, folder: Path) -> None:
    with open_queue() as queue:
        queue.put(b"good")
        queue.put(b"payload of the second")
        queue.put(b"also good")
    (path,) = folder.glob("*.segment")
    data = bytearray(path.read_bytes())
    data[data.index(b"payload")] ^= 0x20
    path.write_bytes(data)
    with open_queue() as queue:
        assert queue.get_nowait().data == b"good"
        with pytest.raises(CorruptJournal):
            queue.get_nowait()
    with open_queue(on_corruption="quarantine") as queue:
        assert drain(queue) == [b"good", b"also good"], "nothing behind it is dropped"


def test_lk_b11_an_item_larger_than_a_segment_is_refused_without_a_trace(open_queue: Open, folder: Path) -> None:
    queue = open_queue(segment_bytes=4096)
    for size in (4097, 1 << 20, 32 << 20):
        with pytest.raises(ItemTooLarge):
            queue.put(bytes(size))
    assert not list(folder.glob("*.segment"))
    assert queue.put(b"x") == 1


def test_lk_b12_reader_names_cannot_leave_the_folder(open_queue: Open, tmp_path: Path) -> None:
    queue = open_queue()
    for name in ("../x", "a/../../x", "a.b", "a~b", "a+b"):
        for call in (lambda name=name: queue.reader(name), lambda name=name: JournaledQueue(tmp_path / "other", name)):
            with pytest.raises(InvalidName):
                call()
    assert os.listdir(tmp_path) == ["queues"]


@pytest.mark.parametrize("rounds", [1, 3])
def test_lk_b13_ids_go_on_when_everything_was_consumed(rounds: int, open_queue: Open) -> None:
    expected = 0
    for _ in range(rounds):
        with open_queue(segment_bytes=4096) as queue:
            for _ in range(10):
                expected += 1
                assert queue.put(bytes(900)) == expected
            drain(queue)
            queue.checkpoint(durable=True)
        with open_queue(segment_bytes=4096) as queue:
            assert queue.reader().items == 0
            assert queue.stats().tail_id == expected


def test_lk_b14_a_checkpoint_and_a_segment_are_synced_by_name_too(clock: ManualClock) -> None:
    """Kafka-3968 too: whatever a power cut does to names, what was acknowledged is there."""
    disk = CrashingDisk()
    queue = JournaledQueue("/q", "jobs", disk=disk, clock=clock, sync="always", segment_bytes=4096)
    reader = queue.reader()
    for n in range(6):
        queue.put(b"%d" % n * 1500)
    reader.get_nowait().commit()
    queue.checkpoint(durable=True)
    states = list(disk.power_states(PowerModel.ANY, 40))
    assert states
    for state in states:
        with JournaledQueue("/q", "jobs", disk=state, clock=clock) as after:
            assert drain(after) == [b"%d" % n * 1500 for n in range(1, 6)]
    with contextlib.suppress(Exception):
        queue.close()


def test_lk_b15_close_leaves_no_waiter_and_no_timer(open_queue: Open, clock: ManualClock, folder: Path) -> None:
    queue = open_queue(sync=0.5)
    futures = [queue.get_future(), queue.get_future(5)]
    queue.put(b"x")
    queue.put(b"y")
    last = queue.get_future(5)
    queue.close()
    assert all(future.done() for future in (*futures, last))
    assert isinstance(last.exception(0), QueueClosed)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    clock.advance(100)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_lk_b16_drop_reader_leaves_nobody_asleep(open_queue: Open, start: Any) -> None:
    queue = open_queue()
    reader = queue.reader("a")

    def wait() -> None:
        with pytest.raises(QueueClosed):
            reader.get()

    thread = start(wait)
    until(lambda: reader.waiter_count == 1)
    queue.drop_reader("a")
    thread.join(20)
    with pytest.raises(QueueClosed):
        reader.get_nowait()


def test_lk_b17_opening_does_not_read_what_was_consumed_or_waits(clock: ManualClock) -> None:
    """LK-S1: a checkpoint holds a place in a segment; a reopened reader with a long done part goes on reading there."""
    disk = MemoryDisk()
    options: dict[str, Any] = {"disk": disk, "clock": clock, "segment_bytes": 32 << 20, "sync": "never"}
    with JournaledQueue("/q", "jobs", **options) as queue:
        for _ in range(400):
            queue.put(bytes(10_000))
        queue.commit_many(queue.get_many(390))
    counting = FailingDisk(disk)
    with JournaledQueue("/q", "jobs", **{**options, "disk": counting}) as queue:
        before = counting.counts["read"]
        assert queue.get_nowait().id == 391
        assert counting.counts["read"] - before <= 12, "a megabyte or so, and not all of four"


def test_lk_b21_figures_do_not_depend_on_the_order_of_files(open_queue: Open, folder: Path) -> None:
    queue = open_queue(segment_bytes=4096)
    for _ in range(20):
        queue.put(bytes(600))
    assert queue.stats().journal_bytes == sum(path.stat().st_size for path in folder.glob("*.segment"))
    queue.close()
    queue = open_queue(segment_bytes=4096)
    assert queue.stats().journal_bytes == sum(path.stat().st_size for path in folder.glob("*.segment"))


def test_lk_b22_two_queues_in_one_folder_leave_each_other_alone(open_queue: Open, folder: Path) -> None:
    first = open_queue(name="jobs")
    first.put(b"1")
    (folder / "jobs-2.1700000000000.segment.tmp").write_bytes(b"in the middle of something")
    (folder / "jobs2+.checkpoint.tmp").write_bytes(b"in the middle of something")
    first.close()
    with open_queue(name="jobs"):
        assert (folder / "jobs-2.1700000000000.segment.tmp").exists()
        assert (folder / "jobs2+.checkpoint.tmp").exists()
        open_queue(name="jobs-2").put(b"2")
    assert not (folder / "jobs-2.1700000000000.segment.tmp").exists()


def test_lk_b23_a_batch_is_one_record(open_queue: Open) -> None:
    queue = open_queue()
    queue.put_many([b"x"] * 1000)
    assert queue.stats().journal_bytes < 64 << 10 or queue.stats().segments == 1
    assert ids(queue.get_many(1000)) == list(range(1, 1001))


def test_lk_b25_a_put_that_raises_leaves_no_gap_and_no_file(open_queue: Open, folder: Path) -> None:
    queue = open_queue(segment_bytes=4096)
    queue.put(b"1")
    for _ in range(3):
        for wrong in (lambda: queue.put(bytes(10_000)), lambda: queue.put("text"), lambda: queue.put_many([b"x", 5])):
            with pytest.raises((ItemTooLarge, TypeError)):
                wrong()
    assert queue.put(b"2") == 2
    queue.commit_many(queue.get_many(2))
    assert queue.reader().head == 2
    assert len(list(folder.glob("*.segment"))) == 1


def test_lk_b26_syncs_while_it_closes_and_rotates(folder: Path) -> None:
    """libkestrel #6: a background sync that runs into a rotation or a close."""
    for _ in range(5):
        with JournaledQueue(folder, "jobs", sync=0.0005, segment_bytes=4096) as queue:
            for _ in range(60):
                queue.put(bytes(500))
            assert queue.flush() == 60


# -- other relatives -------------------------------------------------------------------------------------------------


def test_history_libkestrel_truncation_of_any_segment(open_queue: Open, folder: Path) -> None:
    """A bad record in a segment that is not the last never makes anything behind it go."""
    with open_queue(segment_bytes=4096) as queue:
        queue.reader()
        for n in range(20):
            queue.put(b"%02d" % n * 300)
    first = min(folder.glob("*.segment"))
    data = bytearray(first.read_bytes())
    data[data.index(b"01" * 300)] ^= 1
    first.write_bytes(data)
    with open_queue(on_corruption="quarantine") as queue:
        assert drain(queue) == [b"%02d" % n * 300 for n in range(20) if n != 1]
        assert queue.stats().quarantined == 1


def test_history_go_diskqueue_28_31_34_a_checkpoint_behind_or_off_a_boundary(open_queue: Open, folder: Path) -> None:
    """A place that is behind, or no boundary of a record, is looked at and not believed."""
    from kestrelpy._disk.real import RealDisk
    from kestrelpy._journal import format as fmt
    from kestrelpy._journal.checkpoint import load_checkpoint

    with open_queue() as queue:
        for n in range(10):
            queue.put(b"%d" % n * 20)
        queue.commit_many(queue.get_many(5))
    state, _ = load_checkpoint(RealDisk().directory(str(folder)), "jobs+.checkpoint")
    assert state is not None
    for number, offset, hint_id in (
        (state.hint_number, 97, 1), (state.hint_number, 1 << 40, 3), (state.hint_number + 1, 96, 1), (1, 0, 0),
        (state.hint_number, 96, 6), (state.hint_number, 148, 3),
    ):  # fmt: skip
        forged = fmt.Checkpoint(
            state.queue_id,
            "",
            state.head,
            state.watermark,
            state.released_items,
            state.released_bytes,
            number,
            offset,
            hint_id,
        )
        (folder / "jobs+.checkpoint").write_bytes(fmt.checkpoint_prefix() + fmt.encode_checkpoint(forged))
        with open_queue() as queue:
            reader = queue.reader()
            assert ids(take_all(reader)) == [6, 7, 8, 9, 10], (number, offset, hint_id)


def test_history_chronicle_629_no_lock_is_taken_over_after_a_time(open_queue: Open, folder: Path) -> None:
    queue = open_queue()
    old = time.time() - 10**7
    for path in folder.glob("*.lock"):
        os.utime(path, (old, old))
    with pytest.raises(QueueLocked):
        open_queue()
    assert queue.put(b"x") == 1


def test_history_beanstalkd_546_killed_while_it_opens(clock: ManualClock) -> None:
    """Killed at every operation of the first open, and of a reopen: the next open works and nothing is lost."""
    disk = CrashingDisk()
    clones: list[Any] = []
    disk.before_operation = lambda *_: clones.append(disk.after_kill())
    with JournaledQueue("/q", "jobs", disk=disk, clock=clock, sync="always") as queue:
        queue.reader()
    first = len(clones)
    assert first > 5
    for clone in clones:
        with JournaledQueue("/q", "jobs", disk=clone, clock=clock) as queue:
            assert queue.put(b"x") == 1
            assert drain(queue) == [b"x"]
    disk.before_operation = None
    with JournaledQueue("/q", "jobs", disk=disk, clock=clock, sync="always") as queue:
        queue.put(b"1")
        queue.put(b"2")
    clones.clear()
    disk.before_operation = lambda *_: clones.append(disk.after_kill())
    with JournaledQueue("/q", "jobs", disk=disk, clock=clock) as queue:
        queue.put(b"3")
    for clone in clones:
        with JournaledQueue("/q", "jobs", disk=clone, clock=clock) as queue:
            assert drain(queue)[:2] == [b"1", b"2"]


def test_history_bbolt_567_a_power_cut_in_the_first_initialisation(clock: ManualClock) -> None:
    disk = CrashingDisk()
    states: list[Any] = []
    disk.before_operation = lambda *_: states.extend(disk.power_states(PowerModel.ANY, 6))
    with JournaledQueue("/q", "jobs", disk=disk, clock=clock, sync="always") as queue:
        queue.put(b"1")
    assert len(states) > 10
    for state in states:
        with JournaledQueue("/q", "jobs", disk=state, clock=clock) as queue:
            assert drain(queue) in ([], [b"1"])
            assert queue.put(b"2") in (1, 2)


def test_history_kafka_10101_what_was_shown_after_a_recovery_stays(clock: ManualClock) -> None:
    """Items that were only in the page cache are durable once a recovery has shown them."""
    disk = CrashingDisk()
    queue = JournaledQueue("/q", "jobs", disk=disk, clock=clock, sync="never")
    for n in range(5):
        queue.put(b"%d" % n)
    killed = disk.after_kill()
    with contextlib.suppress(Exception):
        queue.close()
    again = JournaledQueue("/q", "jobs", disk=killed, clock=clock, sync="never")
    shown = [item.data for item in take_all(again)]
    assert shown == [b"%d" % n for n in range(5)]
    for state in killed.power_states(PowerModel.ANY, 30):
        with JournaledQueue("/q", "jobs", disk=state, clock=clock) as after:
            assert drain(after) == shown
    with contextlib.suppress(Exception):
        again.close()


def test_history_persist_queue_180_a_zeroed_state_file(open_queue: Open, folder: Path) -> None:
    with open_queue() as queue:
        queue.put_many([b"1", b"2", b"3"])
        queue.commit_many(queue.get_many(1))
    for path in [*folder.glob("*.checkpoint"), folder / "jobs.mark"]:
        path.write_bytes(bytes(path.stat().st_size))
    with open_queue() as queue:
        assert drain(queue) == [b"1", b"2", b"3"]
        assert queue.put(b"4") == 4


def test_history_queuelib_14_a_queue_killed_before_its_close(script: Any, folder: Path) -> None:
    """queuelib keeps what is in its buffers, and the count of its items, for ``close()``: a kill loses both."""
    source = (
        "import os, sys\nfrom kestrelpy import JournaledQueue\n"
        "queue = JournaledQueue(sys.argv[1], 'jobs', sync='never')\n"
        "for n in range(500): queue.put(b'%d' % n)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", source, str(folder)], check=False, cwd=ROOT)
    assert done.returncode == -9
    with JournaledQueue(folder, "jobs") as queue:
        assert queue.reader().items == 500
        assert drain(queue) == [b"%d" % n for n in range(500)]


def test_history_diskcache_287_a_peek_at_an_expired_head_ends(open_queue: Open, clock: ManualClock, start: Any) -> None:
    queue = open_queue()
    queue.put(b"x", expires_in=1)
    clock.advance(1)
    ended = threading.Event()

    def peek() -> None:
        with pytest.raises(QueueEmpty):
            queue.peek()
        ended.set()

    start(peek)
    assert ended.wait(20)


def test_history_nsq_1033_a_bad_file_ends_in_an_error_and_in_no_loop(
    open_queue: Open, folder: Path, start: Any
) -> None:
    with open_queue() as queue:
        for n in range(5):
            queue.put(b"%d" % n * 100)
    (path,) = folder.glob("*.segment")
    data = bytearray(path.read_bytes())
    data[100:104] = b"\xff\xff\xff\x7f"
    path.write_bytes(data)
    ended = threading.Event()

    def work() -> None:
        with open_queue() as queue:
            for _ in range(3):
                with pytest.raises(CorruptJournal):
                    queue.get_nowait()
        with open_queue(on_corruption="quarantine") as queue:
            assert len(drain(queue)) == 4
        ended.set()

    start(work)
    assert ended.wait(20)


def test_history_a_sync_that_failed_is_not_believed_the_second_time(open_queue: Open, gated_disk: GatedDisk) -> None:
    """fsyncgate: the kernel marks the pages clean; a second sync that succeeds proves nothing."""
    queue = open_queue(sync="never", disk=gated_disk)
    queue.put(b"x")
    gated_disk.error = OSError(5, "bad")
    with pytest.raises(OSError, match="sync failed"):
        queue.sync()
    gated_disk.error = None
    before = gated_disk.syncs
    with pytest.raises(OSError, match="sync failed"):
        queue.sync()
    assert gated_disk.syncs == before
