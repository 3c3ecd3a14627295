"""Readers in other processes: they follow the writer's files, own their place, and keep what they need."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import (
    CorruptJournal,
    FullPolicy,
    InvalidName,
    JournaledQueue,
    NoDefaultReader,
    QueueClosed,
    QueueEmpty,
    QueueFull,
    QueueLocked,
    Reader,
    ReaderConfig,
    UnknownItem,
    UnknownReader,
    inspect,
    open_reader,
    scan,
    verify,
)
from kestrelpy._disk.real import RealDirectory, RealDisk
from kestrelpy._journal import format as fmt
from kestrelpy._journal.follow import LOOK_EVERY, FollowingView
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._journal.segment import iterate_frames
from kestrelpy._reading.checkpointer import Checkpointer
from kestrelpy._reading.detached_source import DetachedSource
from kestrelpy._reading.registry import ReaderRegistry
from kestrelpy.testing import FailingDisk, ManualClock, MemoryDisk
from tests.support.disks import GatedDisk
from tests.support.paths import ROOT
from tests.support.patience import until
from tests.support.queues import drain, let_die, take_all

Open = Callable[..., JournaledQueue]


@pytest.fixture
def outside(folder: Path, clock: ManualClock) -> Iterator[Callable[..., Reader]]:
    """``outside(reader, **options)``: a reader opened by the files alone, as another process would."""
    opened: list[Reader] = []

    def open_one(reader: str = "far", **options: Any) -> Reader:
        options.setdefault("clock", clock)
        opened.append(open_reader(folder, "jobs", reader, **options, create=True))
        return opened[-1]

    yield open_one
    for reader in opened:
        reader.close()


def test_it_sees_what_is_put_as_it_is_put(open_queue: Open, outside: Any) -> None:
    queue = open_queue()
    far = outside()
    assert (far.items, far.full_name) == (0, "jobs+far")
    queue.put(b"1")
    assert far.items == 1
    item = far.get_nowait()
    assert (item.id, item.data, item.value) == (1, b"1", b"1")
    item.commit()
    queue.put_many([b"2", b"3"], expires_in=60)
    assert [item.data for item in take_all(far)] == [b"2", b"3"]
    assert (far.items, far.open_items, far.bytes) == (2, 2, 2)
    with pytest.raises(QueueEmpty):
        far.get_nowait()
    far._check()


def test_it_follows_a_rotation_a_clean_close_and_the_next_life(open_queue: Open, outside: Any) -> None:
    data = [b"%02d" % n * 300 for n in range(60)]
    queue = open_queue(segment_bytes=4096)
    far = outside()
    seen = []
    for n, each in enumerate(data):
        if n in (20, 40):
            queue.close()
            seen += drain(far)
            queue = open_queue(segment_bytes=4096)
        queue.put(each)
        if n % 7 == 0:
            seen += drain(far)
    seen += drain(far)
    assert seen == data
    assert (far.head, far.items, far.bytes) == (60, 0, 0)


def test_it_follows_a_killed_writer_and_its_successor(open_queue: Open, outside: Any, folder: Path) -> None:
    queue = open_queue(sync="never")
    far = outside()
    queue.put_many([b"1", b"2"])
    queue.put(b"torn")
    let_die(queue)
    (path,) = folder.glob("*.segment")
    path.write_bytes(path.read_bytes().rstrip(b"\0")[:-1])
    assert drain(far) == [b"1", b"2"]
    with pytest.raises(QueueEmpty):
        far.get_nowait()
    with open_queue() as queue:
        new_id = queue.put(b"new")
        assert new_id >= 3
        items = take_all(far)
        assert [(item.id, item.data) for item in items] == [(new_id, b"new")]
        far.commit(new_id)
        assert (far.head, far.items) == (new_id, 0)


def test_waiting_polls_soon_at_first_and_more_seldom_then(open_queue: Open, outside: Any, clock: ManualClock) -> None:
    queue = open_queue()
    far = outside(poll_interval=0.5)
    futures = [far.get_future(), far.get_future(30)]
    clock.advance(3)
    assert not futures[0].done()
    queue.put(b"1")
    clock.advance(0.5)
    assert futures[0].result(0).data == b"1"
    assert not futures[1].done()
    clock.advance(30)
    assert isinstance(futures[1].exception(0), QueueEmpty)
    assert far.waiter_count == 0
    again = far.get_future()
    queue.put(b"2")
    clock.advance(0.5)
    assert again.result(0).data == b"2"


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch, clock: ManualClock) -> list[float]:
    """When the files were looked at for who waits."""
    moments: list[float] = []

    def poll(self: DetachedSource, waited: float, real: Any = DetachedSource._poll) -> None:
        moments.append(clock.monotonic())
        real(self, waited)

    monkeypatch.setattr(DetachedSource, "_poll", poll)
    return moments


@pytest.mark.parametrize("pause", [0.001, 0.005, 0.02, 0.1, 1.0])
def test_what_comes_at_a_pace_is_seen_within_a_share_of_it(
    open_queue: Open, outside: Any, clock: ManualClock, pause: float
) -> None:
    queue = open_queue()
    far = outside(poll_interval=0.5)
    for number in range(5):
        future = far.get_future()
        clock.advance(pause)
        queue.put(b"%d" % number)
        clock.advance(max(0.0005, pause * 0.033))
        assert future.result(0).data == b"%d" % number


def test_an_idle_reader_looks_no_more_often_than_it_must(
    open_queue: Open, outside: Any, clock: ManualClock, looks: list[float]
) -> None:
    queue = open_queue()
    far = outside(poll_interval=0.05)
    future, _ = far.get_future(), far.get_future()
    queue.put(b"1")
    clock.advance(2)
    assert future.done()
    assert len(looks) < 200, "it was not much busier on the way"
    looks.clear()
    clock.advance(10)
    assert len(looks) in (200, 201)


def test_who_comes_after_a_long_pause_is_soon_served(open_queue: Open, outside: Any, clock: ManualClock) -> None:
    """By looks that grow as if it had just begun, and stop at a share of the time since the last item."""
    queue = open_queue()
    far = outside(poll_interval=0.5)
    clock.advance(100)
    future = far.get_future()
    clock.advance(0.003)
    queue.put(b"1")
    clock.advance(0.004)
    assert future.result(0).data == b"1"


def test_what_the_reader_found_by_itself_counts_as_come(open_queue: Open, outside: Any, clock: ManualClock) -> None:
    queue = open_queue()
    far = outside(poll_interval=0.5)
    clock.advance(100)
    queue.put(b"1")
    assert far.get_nowait().data == b"1"
    future = far.get_future()
    clock.advance(0.02)
    queue.put(b"2")
    clock.advance(0.001)
    assert future.result(0).data == b"2"


def test_a_poll_interval_below_the_first_wait_holds_from_the_start(
    open_queue: Open, outside: Any, clock: ManualClock, looks: list[float]
) -> None:
    open_queue()
    far = outside(poll_interval=0.0001)
    far.get_future()
    clock.advance(0.002)
    assert len(looks) == 20


def test_threads_and_tasks_wait_too(open_queue: Open, folder: Path, start: Any) -> None:
    queue = open_queue()
    with_real_clock = open_reader(folder, "jobs", "far", poll_interval=0.002, create=True)
    found: list[bytes] = []
    thread = start(lambda: found.append(with_real_clock.get(timeout=20).data))
    until(lambda: with_real_clock.waiter_count == 1)
    queue.put(b"1")
    thread.join(20)
    assert found == [b"1"]

    async def wait() -> bytes:
        task = asyncio.ensure_future(with_real_clock.aget(20))
        while not with_real_clock.waiter_count:
            await asyncio.sleep(0)
        queue.put(b"2")
        return (await task).data

    assert asyncio.run(wait()) == b"2"
    with_real_clock.close()


def test_its_place_is_kept(open_queue: Open, outside: Any) -> None:
    queue = open_queue()
    far = outside()
    queue.put_many([b"1", b"2", b"3", b"4"])
    items = take_all(far)
    items[0].commit()
    items[2].commit()
    items[3].abort()
    far.close()
    with pytest.raises(QueueClosed):
        items[1].commit()
    again = outside()
    assert [(item.id, item.error_count) for item in take_all(again)] == [(2, 0), (4, 1)]
    assert (again.items, again.bytes) == (2, 2)
    again.commit_many([2, 4])
    again.close()
    # ... and the same place from inside
    assert queue.reader("far").items == 0


def test_a_writer_without_readers_of_its_own_retires_for_those_elsewhere(
    open_queue: Open, outside: Any, clock: ManualClock
) -> None:
    queue = open_queue(segment_bytes=4096, sync="never")
    queue.put(b"first")
    far = outside(start="earliest")
    segments = []
    for _ in range(3):
        queue.put_many([b"x" * 300] * 10)
        for n in range(30):
            queue.put(b"%02d" % n * 150)
        segments.append(queue.stats().segments)
        far.commit_many(far.get_many(100))
        far.checkpoint(durable=True)
        clock.advance(1.0)
        assert queue.stats().segments <= 2, "what is done elsewhere is let go before long"
        clock.advance(1.0)
    assert min(segments) > 3


# R5 across processes: the writer keeps what a reader elsewhere has not durably done.
def test_the_writer_keeps_what_it_needs(open_queue: Open, outside: Any) -> None:
    queue = open_queue(segment_bytes=4096)
    near = queue.reader("near")
    far = outside()
    for n in range(30):
        queue.put(b"%02d" % n * 300)
    drain(near)
    queue.checkpoint()
    kept = queue.stats().segments
    assert kept > 4
    far.commit_many(far.get_many(15))
    queue.checkpoint()
    assert queue.stats().segments == kept, "it has not saved its place yet"
    far.checkpoint(durable=True)
    queue.checkpoint()
    assert 1 < queue.stats().segments < kept
    assert len(drain(far)) == 15
    far.close()
    queue.checkpoint()
    assert queue.stats().segments == 1


def test_its_own_maintenance_saves_its_place(open_queue: Open, outside: Any, clock: ManualClock) -> None:
    queue = open_queue(segment_bytes=4096)
    far = outside()
    for n in range(30):
        queue.put(b"%02d" % n * 300)
    drain(far)
    clock.advance(1.1)
    clock.advance(1.1)
    if queue.stats().segments > 1:
        queue.checkpoint()
        assert queue.stats().segments == 1


# -- owners ----------------------------------------------------------------------------------------------------------


def test_each_reader_has_one_owner(open_queue: Open, outside: Any) -> None:
    queue = open_queue()
    far = outside()
    for attempt in (lambda: outside(), lambda: queue.reader("far"), lambda: queue.drop_reader("far")):
        with pytest.raises(QueueLocked) as caught:
            attempt()
        assert caught.value.pid == os.getpid()
    queue.reader("near")
    with pytest.raises(QueueLocked):
        outside("near")
    far.close()
    assert queue.reader("far").name == "far"


def test_two_processes_own_two_readers(open_queue: Open, folder: Path, script: Any) -> None:
    queue = open_queue()
    near = queue.reader("near")
    queue.put_many([b"1", b"2", b"3"])
    told = script(
        """
        import sys
        from kestrelpy import QueueLocked, open_reader
        with_own = open_reader(sys.argv[1], "jobs", "far", create=True, start="earliest")
        for _ in range(3):
            with with_own.get(timeout=10) as item:
                print(item.data.decode(), end=" ")
        with_own.close()
        try:
            open_reader(sys.argv[1], "jobs", "near", create=True)
        except QueueLocked as error:
            print(error.pid == int(sys.argv[2]))
        """,
        folder,
        os.getpid(),
    )
    assert told == "1 2 3 True"
    assert len(drain(near)) == 3


# LK-F32 from outside: the first named reader takes over, unless somebody has the default one open.
def test_the_first_named_reader_takes_over_from_outside(open_queue: Open, outside: Any) -> None:
    with open_queue() as queue:
        queue.put_many([b"1", b"2"])
        queue.get_nowait().commit()
    far = outside(start="tail")
    assert [item.id for item in take_all(far)] == [2]
    with open_queue() as queue, pytest.raises(NoDefaultReader):
        queue.reader()


def test_a_default_reader_in_use_stays(open_queue: Open, outside: Any) -> None:
    queue = open_queue()
    default = queue.reader()
    queue.put_many([b"1", b"2"])
    far = outside()
    assert far.items == 0
    queue.put(b"3")
    assert len(drain(default)) == 3
    assert drain(far) == [b"3"]


def test_a_default_reader_that_nobody_took_over_keeps_its_place_beside_named_ones(
    open_queue: Open, outside: Any
) -> None:
    with open_queue() as queue:
        queue.put_many([b"1", b"2", b"3"])
        queue.get_nowait().commit()
        outside("monitor").close()  # it looks in, and begins at the tail
        assert queue.reader().items == 2
    with open_queue() as queue:
        assert queue.get_nowait().id == 2
        assert queue.reader("monitor").items == 0
        assert queue.reader("new", start="earliest").head == 0, "it is not the first, and takes nothing over"
        assert queue.reader().items == 2
    with open_queue() as queue:
        queue.drop_reader("monitor")
        queue.drop_reader("new")
        assert [item.id for item in take_all(queue.reader())] == [2, 3], "as it was saved"


def test_a_segment_that_only_the_default_reader_needs_is_kept_beside_named_ones(open_queue: Open, outside: Any) -> None:
    with open_queue(segment_bytes=4096) as queue:
        queue.put_many([b"1", b"2"])
        queue.get_nowait().commit()
        outside("monitor").close()
    with open_queue(segment_bytes=4096) as queue:
        monitor = queue.reader("monitor")
        for _ in range(20):
            queue.put(bytes(500))
        monitor.commit_many(take_all(monitor))
        queue.checkpoint(durable=True)
        assert queue.get_nowait().data == b"2"
        queue.drop_reader("")
        queue.checkpoint(durable=True)
        assert queue.stats().segments == 1, "until it is dropped"
        with pytest.raises(NoDefaultReader):
            queue.reader()


def test_a_named_reader_beside_the_one_elsewhere_takes_nothing_from_it(open_queue: Open, outside: Any) -> None:
    queue = open_queue()
    queue.put_many([b"1", b"2"])
    far = outside("")
    far.get_nowait().commit()
    assert queue.reader("near").items == 0
    far.close()
    far = outside("")
    assert [item.id for item in take_all(far)] == [2]
    far.close()
    assert [item.id for item in take_all(queue.reader())] == [2]


def test_a_lost_place_beside_a_default_reader_in_use_begins_with_the_earliest_item(
    open_queue: Open, outside: Any, folder: Path
) -> None:
    queue = open_queue()
    queue.put_many([b"1", b"2"])
    queue.reader()
    outside().close()
    (folder / "jobs+far.checkpoint").unlink()
    assert outside().items == 2


def test_the_default_reader_from_outside(open_queue: Open, outside: Any, folder: Path) -> None:
    queue = open_queue()
    queue.put(b"1")
    far = outside("")
    assert far.full_name == "jobs"
    assert drain(far) == [b"1"]
    far.close()
    queue.reader("named")
    with pytest.raises(NoDefaultReader):
        outside("")


@pytest.mark.parametrize("at", range(1, 8))
def test_items_that_were_counted_when_a_read_failed_are_there_at_the_next_look(at: int) -> None:
    disk = FailingDisk(MemoryDisk())
    with JournaledQueue("/queues", "jobs", disk=disk.inner) as queue:
        reader = open_reader("/queues", "jobs", "far", disk=disk, create=True)
        queue.put_many([b"1", b"2"])
        with contextlib.suppress(QueueEmpty, OSError):
            disk.arm(errno.EIO, at=at, kinds={"read"})
            reader.get_nowait()
        disk.disarm()
        assert reader.items == 2
        reader.close()


def test_a_reader_that_was_elsewhere_is_never_ahead_of_what_is_there(open_queue: Open, outside: Any) -> None:
    """It sees there what is put and not on disk yet, and here it does not."""
    queue = open_queue(sync="always")
    queue.reader("first")
    queue.put_future(b"not synced")
    outside("far", start="tail").close()
    far = queue.reader("far")
    assert (far.items, far.bytes) == (0, 0)
    queue.sync()
    queue.put(b"next")
    assert (far.items, far.bytes, far.get_nowait().id) == (1, 4, 2)


# -- a queue that is erased, and made anew ---------------------------------------------------------------------------


def made_anew(queue: JournaledQueue, **options: Any) -> JournaledQueue:
    queue.erase()
    return JournaledQueue(queue.directory, "jobs", clock=ManualClock(), **options)


def test_the_reader_of_an_erased_queue_leaves_that_of_the_new_one_alone(open_queue: Open, outside: Any) -> None:
    queue = open_queue()
    old = outside(start="earliest")
    queue.put_many([b"old"] * 10)
    old.commit_many(take_all(old))
    with made_anew(queue, segment_bytes=4096, sync="always") as again:
        new, main = outside(start="earliest"), again.reader("main")
        again.put_many([b"new"] * 3)
        new.commit_many(take_all(new))
        new.close()
        with pytest.raises(QueueClosed, match="queue 'jobs' was erased"):
            old.checkpoint()
        old.close()
        for _ in range(20):
            again.put(bytes(500))
        main.commit_many(take_all(main))
        again.checkpoint(durable=True)
        assert [item.id for item in take_all(outside())] == list(range(4, 24))


def test_who_waits_for_an_item_of_an_erased_queue_is_told(
    open_queue: Open, outside: Any, clock: ManualClock, start: Any
) -> None:
    queue = open_queue()
    queue.put(b"1")
    far = outside(start="earliest")
    item = far.get_nowait()
    waiting = [far.get_future() for _ in range(2)]
    queue.erase()
    clock.advance(0.1)
    for future in waiting:
        with pytest.raises(QueueClosed, match="erased"):
            future.result(0)
    for call in (far.get, far.get_nowait, item.commit, far.checkpoint, lambda: far.seek(1)):
        with pytest.raises(QueueClosed, match="erased"):
            call()
    far.close()
    far.close()
    open_queue().close()


def test_who_does_not_wait_is_told_too_when_there_is_nothing(open_queue: Open, outside: Any, folder: Path) -> None:
    queue = open_queue()
    queue.put_many([b"1", b"2"])
    far, unread = outside(start="earliest"), outside("unread", start="earliest")
    take_all(far)
    queue.erase()
    for reader in (far, unread):
        with pytest.raises(QueueClosed, match="erased"):
            reader.get_nowait()
        reader.close()
    assert not list(folder.glob("jobs*"))


def test_the_reader_of_an_erased_queue_gets_no_item_of_the_new_one(open_queue: Open, outside: Any) -> None:
    queue = open_queue()
    far = outside(start="earliest")
    with made_anew(queue) as again:
        again.put(b"not for it")
        with pytest.raises(QueueClosed, match="erased"):
            _ = far.items  # and what has been looked at once is not taken for its own the second time
        with pytest.raises(QueueClosed, match="erased"):
            far.get_nowait()


def test_what_a_reader_of_an_erased_queue_keeps_holds_no_frames(
    open_queue: Open, outside: Any, clock: ManualClock
) -> None:
    queue = open_queue()
    queue.put(b"1")
    far = outside(start="earliest")
    far.get_nowait().commit()
    queue.erase()
    clock.advance(5)
    assert isinstance(far._backlog.broken, QueueClosed)
    assert far._backlog.broken.__traceback__ is None


def test_a_reader_of_an_erased_queue_is_told_in_the_background(
    open_queue: Open, outside: Any, clock: ManualClock
) -> None:
    queue = open_queue()
    queue.put(b"1")
    far = outside(start="earliest")
    far.get_nowait().commit()
    queue.erase()
    clock.advance(1.0)
    with pytest.raises(QueueClosed, match="erased"):
        far.commit(1)


@pytest.mark.parametrize("made_anew", [False, True])
def test_a_reader_that_is_opened_while_its_queue_is_erased_is_of_what_is_there_then(
    open_queue: Open, folder: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, made_anew: bool
) -> None:
    queue = open_queue()
    queue.put(b"old")
    real = ReaderRegistry.reader

    def reader(self: ReaderRegistry, *arguments: Any) -> Reader:
        queue.erase()
        if made_anew:
            open_queue().put(b"new")
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ReaderRegistry, "reader", reader)
        far = open_reader(folder, "jobs", "far", create=True, start="earliest", clock=clock)
    assert drain(far) == [b"new"] * made_anew
    far.close()
    assert [each.data for each in scan(folder, "jobs")] == [b"new"] * made_anew
    assert verify(folder, "jobs").ok


def test_a_checkpoint_that_is_under_way_while_the_queue_is_erased_replaces_nothing(start: Any) -> None:
    disk = GatedDisk(MemoryDisk())
    options: dict[str, Any] = {"clock": ManualClock(), "disk": disk}
    queue = JournaledQueue("/q", "jobs", **options)
    queue.put(b"old")
    far = open_reader("/q", "jobs", "far", create=True, start="earliest", **options)
    far.get_nowait().commit()
    source: Any = far._source
    source._registry._files[far].forget()  # the next save makes the file anew
    raised: list[BaseException] = []

    def save() -> None:
        try:
            far.checkpoint()
        except QueueClosed as error:
            raised.append(error)

    queue.sync()
    disk.started = threading.Semaphore(0)
    disk.gate.clear()
    saving = start(save)
    assert disk.started.acquire(timeout=20)
    queue.erase()
    disk.gate.set()
    again = JournaledQueue("/q", "jobs", **options)
    new = open_reader("/q", "jobs", "far", create=True, start="earliest", **options)
    saving.join(20)
    assert "erased" in str(raised)
    again.put(b"new")
    assert drain(new) == [b"new"]
    new.close()
    far.close()
    with again:
        assert again.reader("far").head == 1


def foreign_place(folder: Path, head: int = 21) -> None:
    state = fmt.Checkpoint(b"x" * 16, "far", head, head, head, head, durable_head=head)
    (folder / "jobs+far.checkpoint").write_bytes(fmt.checkpoint_prefix() + fmt.encode_checkpoint(state))


def test_a_place_in_another_queue_holds_nothing_and_makes_no_reader(
    open_queue: Open, outside: Any, folder: Path
) -> None:
    queue = open_queue(segment_bytes=4096, default_reader=ReaderConfig(max_items=20))
    main = queue.reader()
    queue.put(b"1")
    foreign_place(folder)
    for _ in range(18):
        queue.put(bytes(500))
    main.commit_many(take_all(main))
    queue.checkpoint(durable=True)
    assert queue.stats().segments == 1
    assert not queue._registry.waits_for_others(queue._source)
    queue.put_many([b"2"] * 20)
    assert queue.reader("named") is main, "it is the first"
    assert outside().items == 0, "it is new, and begins at the tail"


def test_a_place_in_another_queue_is_a_lost_one_where_the_reader_was_known(
    open_queue: Open, outside: Any, folder: Path
) -> None:
    queue = open_queue(segment_bytes=4096)
    main = queue.reader("main")
    outside().close()
    foreign_place(folder)
    for _ in range(20):
        queue.put(bytes(500))
    main.commit_many(take_all(main))
    queue.checkpoint(durable=True)
    assert queue.stats().segments == 3
    assert queue._registry.waits_for_others(queue._source)
    assert outside().items == 20


def test_a_checkpoint_in_the_background_waits_for_nobody(open_queue: Open, outside: Any, clock: ManualClock) -> None:
    queue = open_queue()
    queue.put(b"1")
    far = outside(start="earliest")
    far.get_nowait().commit()
    with QueueFiles(far._source.directory, "jobs").guard():  # a process that is stopped, say
        clock.advance(1.0)
        assert far._checkpointer.is_unsaved
    clock.advance(1.0)
    assert not far._checkpointer.is_unsaved


@pytest.mark.parametrize("moves", [False, True])
def test_a_checkpoint_of_its_own_keeps_no_segment(
    moves: bool, open_queue: Open, outside: Any, clock: ManualClock
) -> None:
    """The writer goes by durable checkpoints; what ``checkpoint()`` has saved was as good as saved for the next one."""
    queue = open_queue(segment_bytes=4096)
    far = outside(start="earliest")
    for _ in range(20):
        queue.put(bytes(500))
    far.commit_many(take_all(far))
    if moves:
        far.seek(20)
    else:
        far.checkpoint()
    clock.advance(1.0)
    queue.checkpoint()
    assert queue.stats().segments == 1
    assert not far._checkpointer.holds_segments


# -- moving beside a writer that retires -----------------------------------------------------------------------------


def three_segments(disk: Any) -> tuple[JournaledQueue, Reader]:
    """A queue of three segments, and a reader elsewhere that is done with all of them."""
    queue = JournaledQueue("/q", "jobs", clock=ManualClock(), disk=disk, segment_bytes=4096, sync="never")
    far = open_reader("/q", "jobs", "far", clock=ManualClock(), disk=disk, create=True)
    for _ in range(20):
        queue.put(bytes(500))
    far.commit_many(take_all(far))
    far.checkpoint(durable=True)
    return queue, far


def test_a_seek_that_could_not_be_saved_has_not_moved() -> None:
    disk = FailingDisk(MemoryDisk())
    queue, far = three_segments(disk)
    disk.arm(errno.EIO, kinds={"write", "create"}, sticky=True)
    with pytest.raises(OSError, match="Input/output"):
        far.seek(1)
    disk.disarm()
    assert far.head == 20
    queue.checkpoint()
    far.checkpoint()
    assert queue.stats().segments == 2, "the newest, and the newest that is on disk"
    far.close()
    queue.close()
    JournaledQueue("/q", "jobs", clock=ManualClock(), disk=disk).close()


def test_a_segment_that_could_not_be_deleted_stays_for_who_has_gone_back_to_it() -> None:
    disk = FailingDisk(MemoryDisk())
    queue, far = three_segments(disk)
    disk.arm(errno.EIO, kinds={"unlink"})
    with pytest.raises(OSError, match="Input/output"):
        queue.checkpoint()
    far.seek(1)
    queue.checkpoint()
    assert [item.id for item in take_all(far)] == list(range(1, 21))
    queue.close()
    far.close()
    with JournaledQueue("/q", "jobs", clock=ManualClock(), disk=disk) as again:
        assert len(take_all(again.reader("far"))) == 20


@pytest.mark.parametrize(("where", "expected"), [("tail", 0), ("earliest", 3), (2, 2), (99, 0)])
def test_start(where: Any, expected: int, open_queue: Open, outside: Any) -> None:
    queue = open_queue()
    queue.reader("near")
    queue.put_many([b"1", b"2", b"3"])
    assert outside(start=where).items == expected


# -- its limits, in and against the writer ---------------------------------------------------------------------------


def test_a_writer_configured_with_its_limits_respects_them(open_queue: Open, outside: Any) -> None:
    queue = open_queue(readers={"far": ReaderConfig(max_items=2)})
    queue.reader("near")
    far = outside()
    far.close()
    far = outside()
    queue.drop_reader("near")
    queue.reader("near")
    queue.put_many([b"1", b"2"])
    with pytest.raises(QueueFull) as caught:
        queue.put(b"3")
    assert caught.value.reader == "jobs+far"
    drain(far)
    far.checkpoint()
    assert queue.put(b"3") == 3


def test_drop_oldest_from_outside(open_queue: Open, outside: Any, clock: ManualClock) -> None:
    queue = open_queue()
    far = outside(config=ReaderConfig(max_items=2, full_policy=FullPolicy.DROP_OLDEST))
    queue.put_many([b"1", b"2", b"3", b"4"])
    far.get_nowait().commit()
    clock.advance(1.1)
    assert far.items == 2
    assert drain(far) == [b"3", b"4"]
    assert far.stats().discarded == 1


def test_a_seek_by_time_passes_over_what_was_retired(open_queue: Open, outside: Any) -> None:
    queue = open_queue(segment_bytes=4096)
    far = outside(start="earliest")
    for _ in range(12):
        queue.put(bytes(900))
    far.commit_many(take_all(far)[:8])
    far.checkpoint(durable=True)
    queue.checkpoint()
    first = next(iter(scan(queue.directory, "jobs"))).id
    assert first > 1, "something was retired"
    far.seek(time_ms=0)
    assert far.get_nowait().id == first


def test_a_closed_reader_has_figures(open_queue: Open, outside: Any) -> None:
    queue = open_queue()
    far = outside(start="earliest")
    queue.put(b"x")
    assert far.items == 1
    far.close()
    queue.put(b"y")
    assert far.items == far.stats().items == 1
    assert "items=1" in repr(far)
    assert "closed" in repr(far)


def test_a_reader_of_an_erased_queue_can_be_shown(open_queue: Open, outside: Any) -> None:
    queue = open_queue()
    far = outside(start="earliest")
    queue.put(b"x")
    assert far.items == 1
    queue.erase()
    with pytest.raises(QueueClosed):
        far.stats()
    assert "items=?" in repr(far)


def test_expiry_seek_and_flush_from_outside(open_queue: Open, outside: Any, clock: ManualClock) -> None:
    queue = open_queue(segment_bytes=4096)
    seen: list[bytes] = []
    far = outside(config=ReaderConfig(on_expired=lambda item: seen.append(item.data)))
    for n in range(20):
        queue.put(b"%02d" % n * 300, expires_in=1 if n < 2 else None)
    clock.advance(1)
    held = far.get_nowait()
    assert held.id == 3
    assert len(seen) == 2
    far.seek(18)
    with pytest.raises(UnknownItem):
        held.commit()
    assert [item.id for item in take_all(far)] == [18, 19, 20]
    far.seek(5)
    assert far.flush() == 16
    assert far.items == 0
    far.seek(time_ms=0)
    assert far.items == 20
    far._check()


# -- trouble ---------------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_said_and_nothing_stays_open(folder: Path, open_queue: Open, tmp_path: Path) -> None:
    open_queue()
    before = len(os.listdir("/proc/self/fd"))
    calls: tuple[tuple[Callable[[], object], type[Exception]], ...] = (
        (lambda: open_reader(tmp_path / "no", "jobs", "a", create=True), FileNotFoundError),
        (lambda: open_reader(folder, "a/b", "a", create=True), InvalidName),
        (lambda: open_reader(folder, "jobs", "a/b", create=True), InvalidName),
        (lambda: open_reader(folder, "jobs", "a", create=True, start="now"), ValueError),
        (lambda: open_reader(folder, "jobs", "a", poll_interval=0, create=True), ValueError),
    )
    for call, error in calls:
        with pytest.raises(error):
            call()
    assert len(os.listdir("/proc/self/fd")) == before
    held = {"jobs+.checkpoint.tmp", "jobs+.lock", "jobs+.lock.tmp"}
    assert {each.name for each in folder.glob("jobs+*")} == held, "for the first reader"


def test_damage_is_raised_where_it_is(open_queue: Open, outside: Any, folder: Path) -> None:
    with open_queue() as queue:
        queue.reader("near")
        queue.put_many([b"1"])
        queue.put(b"2" * 50)
        queue.put(b"3")
    (path,) = folder.glob("*.segment")
    data = bytearray(path.read_bytes())
    data[data.index(b"2" * 50)] ^= 1
    path.write_bytes(data)
    far = outside(start="earliest")
    assert far.get_nowait().id == 1, "what is in front of the damage is delivered"
    for _ in range(2):
        with pytest.raises(CorruptJournal) as caught:
            far.get_nowait()
        assert caught.value.item_id == 2
        assert caught.value.path == str(path)
    assert (far.head, far.items) == (0, 3)


def test_a_queue_that_is_not_there_yet(folder: Path, open_queue: Open, outside: Any) -> None:
    folder.mkdir()
    far = outside()
    with pytest.raises(QueueEmpty):
        far.get_nowait()
    with open_queue() as queue:
        queue.put(b"1")
        assert far.get_nowait().data == b"1"
        far.commit(1)
        far.checkpoint(durable=True)
    far.close()
    assert outside().items == 0


WRITER = """
    import sys
    from kestrelpy import JournaledQueue
    queue = JournaledQueue(sys.argv[1], "jobs", sync="never", segment_bytes=65536)
    print("ready", flush=True)
    number = 0
    while True:
        number += 1
        queue.put(b"%d" % number * 3)
        if number == 2000:
            print("2000", flush=True)
"""


def test_a_writer_killed_in_mid_flow_leaves_a_prefix(folder: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as writer:
        assert writer.stdout is not None
        try:
            assert writer.stdout.readline() == b"ready\n"
            far = open_reader(folder, "jobs", "far", poll_interval=0.002, create=True, start="earliest")
            seen = 0
            for _ in range(500):
                seen += 1
                assert far.get(timeout=20).data == b"%d" % seen * 3
            assert writer.stdout.readline() == b"2000\n"
        finally:
            writer.send_signal(signal.SIGKILL)
    while items := take_all(far):
        for item in items:
            seen += 1
            assert (item.id, item.data) == (seen, b"%d" % seen * 3)
    assert seen >= 2000, "acknowledged puts survive the death of the process"
    far.commit_many(range(1, seen + 1))
    with JournaledQueue(folder, "jobs") as queue:
        new_id = queue.put(b"new")
        assert new_id > seen
        assert far.get(timeout=20).data == b"new"
    far.close()


# -- files that are not what their names say -------------------------------------------------------------------------


def made(folder: Path, clock: ManualClock, *items: bytes) -> Path:
    """The one segment of another queue of that name."""
    with JournaledQueue(folder, "jobs", clock=clock) as queue:
        queue.put_many(list(items))
    (path,) = folder.glob("*.segment")
    return path


@pytest.mark.parametrize("opened_before", [True, False])
def test_another_queues_segment_is_refused(
    opened_before: bool, open_queue: Open, outside: Any, folder: Path, tmp_path: Path, clock: ManualClock
) -> None:
    with open_queue() as queue:
        queue.reader("far")
        queue.put(b"ours")
    clock.advance(1)
    theirs = made(tmp_path / "theirs", clock, b"theirs 1", b"theirs 2")
    if opened_before:
        far = outside()
        assert far.get_nowait().data == b"ours"
    (folder / theirs.name).write_bytes(theirs.read_bytes())
    open_files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(CorruptJournal, match="another queue"):
            far.get_nowait() if opened_before else outside()
    assert len(os.listdir("/proc/self/fd")) == open_files
    with pytest.raises(CorruptJournal, match="another queue"):
        open_queue()
    (folder / theirs.name).unlink()
    with open_queue() as queue:
        queue.put(b"ours again")
        assert take_all(far if opened_before else outside())[-1].data == b"ours again"


def test_a_segment_under_the_name_of_another_is_refused(
    open_queue: Open, outside: Any, folder: Path, clock: ManualClock
) -> None:
    open_queue().close()
    far = outside()
    for data in (b"1", b"2", b"3"):
        with open_queue() as queue:
            queue.put(data)
        clock.advance(1)
    _, second, third = sorted(folder.glob("*.segment"))
    second.write_bytes(third.read_bytes())
    with pytest.raises(CorruptJournal, match="no valid header") as caught:
        far.get_nowait()
    assert caught.value.path == str(second)
    with pytest.raises(CorruptJournal, match="no valid header"):
        open_queue()


def test_what_is_left_of_a_making_is_passed_over(
    open_queue: Open, outside: Any, folder: Path, clock: ManualClock
) -> None:
    """Of one that failed, with a header; of others that a crash has ended, with old bytes in their room, or none."""
    open_queue().close()
    far = outside()
    numbers = []
    for data in (b"1", b"2"):
        with open_queue() as queue:
            queue.put(data)
        numbers.append(clock.time_ns() // 1_000_000)
        clock.advance(1)
    first, _ = sorted(folder.glob("*.segment"))
    header = fmt.decode_header(first.read_bytes())
    assert header is not None
    vain = header._replace(number=numbers[0] + 1, marker=1 << 31)
    for number, data in enumerate(
        (fmt.encode_header(vain) + bytes(500), first.read_bytes(), bytes(500)), numbers[0] + 1
    ):
        (folder / f"jobs.{number}.new.segment").write_bytes(data)
    (folder / f"jobs.{numbers[1] + 1}.new.segment").write_bytes(bytes(500))
    assert drain(far) == [b"1", b"2"]
    with open_queue() as queue:
        queue.put(b"3")
        assert drain(far) == [b"3"]


def test_a_segment_that_could_not_be_made_is_not_waited_for() -> None:
    disk = MemoryDisk()
    failing = FailingDisk(disk)
    with JournaledQueue("/q", "jobs", clock=ManualClock(1000), disk=failing, segment_bytes=4096) as queue:
        far = open_reader("/q", "jobs", "far", clock=ManualClock(1000), disk=disk, create=True, start="earliest")
        queue.put(bytes(3000))
        failing.arm(errno.EIO, kinds={"grow", "unlink"}, sticky=True)
        with pytest.raises(OSError, match="Input/output error"):
            queue.put(bytes(3001))
        assert len(drain(far)) == 1, "and it has seen a segment that is about to go"
        failing.disarm()
        queue.put(bytes(3002))
        assert [len(data) for data in drain(far)] == [3002]
        far.close()


# -- timers ----------------------------------------------------------------------------------------------------------


def test_a_closed_reader_is_not_kept_alive_by_its_timers(open_queue: Open, outside: Any, clock: ManualClock) -> None:
    queue = open_queue()
    queue.put(b"x")
    before = clock.timer_count
    reader = outside("far", start="earliest")
    reader.get().commit()
    future = reader.get_future(timeout=1000)
    assert clock.timer_count > before
    reader.close()
    assert isinstance(future.exception(0), QueueClosed)
    assert clock.timer_count == before


def test_a_callback_that_exits_does_not_end_the_looks(open_queue: Open, outside: Any, clock: ManualClock) -> None:
    queue, reader = open_queue(), outside("far", start="earliest")

    def stop(_: object) -> None:
        raise SystemExit(1)

    first, second = reader.get_future(), reader.get_future()
    first.add_done_callback(stop)
    queue.put(b"1")
    with pytest.raises(SystemExit):  # where the thread of the system's clock logs it
        clock.advance(1)
    queue.put(b"2")
    clock.advance(1)
    assert (first.result(0).data, second.result(0).data) == (b"1", b"2")


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_segment_that_is_not_there_is_told_and_not_passed_over(folder: Path, open_queue: Any, which: int) -> None:
    """What a reader needs was not retired. It may seek past it."""
    queue = open_queue(segment_bytes=4096, sync="never")
    queue.reader("keep")
    for number in range(10):
        queue.put(b"%d" % number + bytes(1000))
    open_reader(folder, "jobs", "elsewhere", create=True, start="earliest").close()
    queue.close()
    segments = sorted(folder.glob("*.segment"))
    lost = [record.id for record in scan(folder, "jobs") if record.segment == segments[which].name]
    segments[which].unlink()
    with contextlib.closing(open_reader(folder, "jobs", "elsewhere", create=True)) as reader:
        before = list(range(1, lost[0]))
        assert [reader.get(timeout=0).id for _ in before] == before
        needed = f"needs item {lost[0]}; the next item in the journal is {lost[-1] + 1}"
        for _ in range(2):
            with pytest.raises(CorruptJournal, match=needed):
                reader.get(timeout=0)
        reader.seek(lost[-1] + 1)
        assert [reader.get(timeout=0).id for _ in range(lost[-1], 10)] == list(range(lost[-1] + 1, 11))


def cut_short(path: Path, items: int) -> None:
    """Cut a segment off in the middle of an item after the first ones; its footer is gone, too."""
    header = fmt.decode_header(path.read_bytes()[: fmt.HEADER_BYTES])
    assert header is not None
    with contextlib.closing(RealDisk().directory(str(path.parent))) as directory:
        file = directory.open(path.name)
        ends = [
            offset + frame.size for offset, frame in iterate_frames(file, header.marker, fmt.HEADER_BYTES, file.size())
        ]
        file.close()
    os.truncate(path, ends[items - 1] + 5)


@pytest.mark.parametrize("which", [0, 1])
def test_a_segment_that_was_cut_short_is_told_and_not_waited_for(folder: Path, open_queue: Any, which: int) -> None:
    """The segments after it show that no writer goes on with it. Before, the reader waited for ever."""
    with open_queue(segment_bytes=4096, sync="never") as queue:
        queue.reader("keep")
        for number in range(10):
            queue.put(b"%d" % number + bytes(1000))
    open_reader(folder, "jobs", "elsewhere", create=True, start="earliest").close()
    cut = sorted(folder.glob("*.segment"))[which]
    first, lost, *_, last = [record.id for record in scan(folder, "jobs") if record.segment == cut.name]
    cut_short(cut, items=1)
    with contextlib.closing(open_reader(folder, "jobs", "elsewhere")) as reader:
        assert reader.items == 10
        assert [reader.get(timeout=0).id for _ in range(first)] == list(range(1, first + 1))
        for _ in range(2):
            with pytest.raises(CorruptJournal) as caught:
                reader.get(timeout=0)
            assert (caught.value.path, caught.value.item_id) == (str(cut), lost)
        reader.seek(last + 1)
        assert [reader.get(timeout=0).id for _ in range(last, 10)] == list(range(last + 1, 11))


def test_a_segment_that_is_cut_short_while_it_is_followed_is_told(folder: Path, open_queue: Any) -> None:
    queue = open_queue(segment_bytes=4096, sync="never")
    queue.reader("elsewhere", start="earliest").close()
    queue.put(b"0" + bytes(1000))
    with contextlib.closing(open_reader(folder, "jobs", "elsewhere")) as reader:
        reader.get(timeout=0).commit()
        (cut,) = folder.glob("*.segment")
        for number in range(1, 10):
            queue.put(b"%d" % number + bytes(1000))
        queue.close()
        cut = min(folder.glob("*.segment"))
        cut_short(cut, items=1)
        told: list[CorruptJournal] = []
        for _ in range(2 * LOOK_EVERY):
            try:
                reader.get(timeout=0)
            except QueueEmpty:
                continue
            except CorruptJournal as error:
                told.append(error)
        assert len(told) >= LOOK_EVERY
        assert {error.item_id for error in told} == {2}
        assert reader.items == 9


def test_a_segment_that_is_closed_while_the_reader_looks_is_no_damage(folder: Path, open_queue: Any) -> None:
    """The writer closes it, and makes the next one, after the look at the segment and before that at the folder."""
    queue = open_queue(segment_bytes=4096, sync="never")
    queue.reader("elsewhere", start="earliest").close()
    queue.put(b"0" + bytes(1000))
    real = FollowingView._list_behind

    def meanwhile(view: FollowingView, number: int) -> Any:
        if number >= 0 and queue.stats().tail_id == 1:
            queue.put_many([b"%d" % number + bytes(1000) for number in range(1, 10)])
        return real(view, number)

    with (
        contextlib.closing(open_reader(folder, "jobs", "elsewhere")) as reader,
        patch.object(FollowingView, "_list_behind", meanwhile),
    ):
        reader.get(timeout=0).commit()
        for _ in range(LOOK_EVERY):
            with contextlib.suppress(QueueEmpty):
                reader.get(timeout=0).commit()
        assert queue.stats().tail_id == 10
        assert [item.id for item in take_all(reader)] == list(range(reader.head + 1, 11))


def test_a_reader_is_not_made_by_mistake(folder: Path, open_queue: Open) -> None:
    queue = open_queue()
    queue.put(b"1")
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(UnknownReader, match=r"'jobs' has no reader 'mial' \(it has no named reader\)") as caught:
        open_reader(folder, "jobs", "mial")
    assert (caught.value.queue_name, caught.value.reader, caught.value.readers) == ("jobs", "mial", ())
    there_is = r"there is no queue 'jbos' \(the folder has jobs\): create=True makes reader 'mail' ahead of it"
    with pytest.raises(UnknownReader, match=there_is) as caught:
        open_reader(folder, "jbos", "mail", start="earliest")
    assert (caught.value.readers, caught.value.queues) == ((), ("jobs",))
    with pytest.raises(UnknownReader, match=r"there is no queue 'jobs' \(the folder has no queue\)"):
        open_reader(folder.parent, "jobs", "mail")
    assert sorted(path.name for path in folder.iterdir()) == before
    open_reader(folder, "jobs", "mail", create=True).close()
    with pytest.raises(UnknownReader, match=r"its readers: mail\)"):
        open_reader(folder, "jobs", "mial")
    with contextlib.closing(open_reader(folder, "jobs", "mail")) as reader:
        assert reader.get_nowait().data == b"1"


def test_a_reader_whose_checkpoint_is_lost_is_there(folder: Path, open_queue: Open) -> None:
    open_queue().put(b"1")
    open_reader(folder, "jobs", "mail", create=True).close()
    for path in folder.glob("*mail*checkpoint*"):
        path.unlink()
    with contextlib.closing(open_reader(folder, "jobs", "mail")) as reader:
        assert reader.get_nowait().data == b"1"


@pytest.mark.parametrize("outside_too", [False, True], ids=["of the owner", "in another process"])
def test_a_close_amid_a_round_is_no_trouble(
    open_queue: Open,
    outside: Any,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    outside_too: bool,
) -> None:
    """The close saves the position: there is nothing to tell, and nothing to try again."""
    queue = open_queue()
    reader = queue.reader("far")
    if outside_too:
        reader.close()
        reader = outside()
    queue.put(b"x")
    reader.get(timeout=0).commit()

    def save(self: Checkpointer, durable: bool, real: Any = Checkpointer.save) -> None:
        monkeypatch.undo()
        reader.close()
        real(self, durable)

    monkeypatch.setattr(Checkpointer, "save", save)
    clock.advance(2)
    assert inspect(queue.directory, "jobs").readers[0].items == 0
    clock.advance(5)
    assert caplog.messages == []


@pytest.mark.parametrize("hidden", [(1,), (1, 2)])
def test_a_listing_that_a_rename_hides_segments_from_is_no_hole(
    open_queue: Open, outside: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, hidden: tuple[int, ...]
) -> None:
    """A listing of a folder may have neither name of a file that is renamed meanwhile, and yet have later files."""
    queue = open_queue(segment_bytes=4096)
    far = outside()
    data = [b"%d" % n * 3000 for n in range(6)]
    for each in data[:1]:
        queue.put(each)
    assert drain(far) == data[:1]
    for each in data[1:]:
        queue.put(each)
    names = sorted(path.name for path in folder.glob("*.segment"))
    listing = RealDirectory.names

    def tear(torn_at: int) -> None:
        """Before that listing the segments were not made, and after it they all have their lasting names."""
        looks = iter(range(1000))

        def torn(self: RealDirectory) -> list[str]:
            look = next(looks)
            missing = names[hidden[0] :] if look < torn_at else [names[at] for at in hidden if look == torn_at]
            return [name for name in listing(self) if name not in missing]

        monkeypatch.setattr(RealDirectory, "names", torn)

    for torn_at in range(12):
        tear(torn_at)
        found = [record.data for record in scan(folder, "jobs")]
        assert found == data[: len(found)]
        tear(torn_at)
        assert verify(folder, "jobs").damage == ()
        tear(torn_at)
        assert inspect(folder, "jobs").tail_id <= len(data)
    tear(0)
    assert drain(far) == data[1:]
