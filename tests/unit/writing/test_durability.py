"""Syncs, in the foreground and behind it, and what users' code may do while they go on."""

from __future__ import annotations

import errno
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import DurabilityUnknown, FullPolicy, JournaledQueue, QueueClosed, ReaderConfig, clock
from kestrelpy import errors as errors_module
from kestrelpy._disk.real import RealDisk
from kestrelpy._writing.syncer import LOOK_SECONDS
from kestrelpy.inbox import PartWriter, publish
from kestrelpy.testing import FailingDisk, ManualClock, MemoryDisk
from tests.support.disks import GatedDisk
from tests.support.patience import until

Open = Callable[..., JournaledQueue]
Start = Callable[..., threading.Thread]

# -- nobody who leads runs what users call back ------------------------------------------------------------------------


def ends(start: Start, work: Callable[..., object], *arguments: object) -> None:
    """``work`` comes back: what hangs would wait for itself."""
    thread = start(work, *arguments)
    thread.join(10)
    assert not thread.is_alive(), "it waits for itself"


def checkpoint(queue: JournaledQueue) -> None:
    queue.reader().checkpoint(durable=True)


AGAIN: list[Callable[[JournaledQueue], object]] = [
    lambda queue: queue.put(b"reply"),
    lambda queue: queue.put_many([b"reply", b"too"]),
    lambda queue: queue.put_future(b"reply"),
    JournaledQueue.sync,
    checkpoint,
]


@pytest.mark.parametrize("again", range(len(AGAIN)))
def test_what_a_future_calls_back_may_wait_for_a_sync(again: int, open_queue: Open, start: Start) -> None:
    """C2: of a consumer's future, and of a put's that is completed by somebody else's sync."""
    queue = open_queue(sync="always")
    queue.reader()
    done: list[object] = []
    queue.get_future().add_done_callback(lambda _: done.append(AGAIN[again](queue)))
    ends(start, queue.put, b"request")
    queue.put_future(b"another").add_done_callback(lambda _: done.append(AGAIN[again](queue)))
    ends(start, queue.put, b"and one more")
    assert len(done) == 2
    ends(start, queue.put, b"nobody hangs")


@pytest.mark.parametrize("hook", ["on_delivery", "on_expired", "on_timeout"])
def test_a_hook_may_wait_for_a_sync(hook: str, open_queue: Open, start: Start, clock: ManualClock) -> None:
    done: list[object] = []

    def put(*_: object) -> None:
        if not done:
            done.append(None)
            queue.put(b"by a hook")

    hooks: dict[str, Any] = {hook: put}
    queue = open_queue(sync="always", default_reader=ReaderConfig(**hooks))
    queue.reader()
    if hook == "on_expired":
        ends(
            start,
            queue.put,
            b"short",
        )
        queue.get().commit()
        queue.put(b"expires", expires_in=1)
        clock.advance(2)
    future = queue.get_future(timeout=1)
    if hook == "on_timeout":
        ends(start, clock.advance, 2)
    else:
        ends(start, queue.put, b"request")
        assert future.result(0)
    assert done
    ends(start, queue.put, b"nobody hangs")


def test_nothing_is_called_back_under_the_locks_of_a_checkpoint(open_queue: Open, start: Start) -> None:
    """A checkpoint that has to sync brings to the disk what others wait for; their callbacks may take one too."""
    queue = open_queue(sync="always", clock=None)
    reader = queue.reader()
    told = threading.Event()

    def checkpoint(_: object) -> None:
        reader.checkpoint(durable=True)
        told.set()

    reader.get_future().add_done_callback(checkpoint)
    with_item = threading.Event()

    def store() -> None:
        queue._puts._store([b"x"], None, None, 0)  # a put that has not waited for the disk yet
        with_item.set()

    ends(start, store)
    assert with_item.wait(20)
    reader._backlog.progress.head = 1  # so that the checkpoint has to sync
    reader._backlog.progress.head = 0
    ends(start, reader._source.make_durable, 1)
    assert told.wait(20)


def test_a_failed_sync_of_a_checkpoint_calls_nobody_back_under_its_locks(folder: Path, start: Start) -> None:
    disk = FailingDisk(MemoryDisk())
    queue = JournaledQueue(folder, "jobs", sync="always", disk=disk)
    reader = queue.reader()
    heard: list[object] = []
    told = threading.Event()

    def hear(_: object) -> None:
        try:
            reader.checkpoint(durable=True)
        except DurabilityUnknown as error:
            heard.append(error)
        told.set()

    reader.get_future().add_done_callback(hear)
    queue._puts._store([b"x"], None, None, 0)
    disk.arm(errno.EIO, kinds={"sync"})

    def save() -> None:
        with reader._checkpointer.lock, pytest.raises(DurabilityUnknown):  # as a checkpoint does
            reader._source.make_durable(1)

    ends(start, save)
    assert told.wait(20)
    assert len(heard) == 1
    with pytest.raises(DurabilityUnknown):
        queue.put(b"y")
    queue.close()


# -- the thread of syncs ---------------------------------------------------------------------------------------------


@pytest.fixture
def hold() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_slow_callback_does_not_hold_up_the_syncs_of_other_queues(folder: Path, hold: threading.Event) -> None:
    """C18. And the callback of a put's future may put and sync itself (C2)."""
    slow, other = JournaledQueue(folder, "slow", sync=0.01), JournaledQueue(folder, "other", sync=0.01)
    entered = threading.Event()

    def put_and_sync(_: object) -> None:
        slow.put(b"y")
        slow.sync()
        entered.set()
        hold.wait()

    slow.put_future(b"x").add_done_callback(put_and_sync)
    assert entered.wait(20)
    other.put(b"z")
    until(lambda: other.stats().durable_id == 1)
    slow.put(b"z")
    until(lambda: slow.stats().durable_id == 3)
    hold.set()
    slow.close()
    other.close()


def test_a_held_guard_does_not_hold_up_other_queues_nor_a_close(folder: Path) -> None:
    """C18: a process that was stopped while it has NAME.readers.lock. Retiring comes again."""
    options: dict[str, Any] = {"sync": "never", "segment_bytes": 4096, "checkpoint_interval": 0.01}
    queue, other = JournaledQueue(folder, "jobs", **options), JournaledQueue(folder, "other", **options)
    queue.reader()
    other.reader()
    folder_of_jobs = RealDisk().directory(str(folder))
    lock = folder_of_jobs.lock("jobs.readers.lock", wait=True)
    try:
        for each in (queue, other):
            each.put_many([bytes(600)] * 5)
            each.put_many([bytes(600)] * 5)
            each.commit_many(each.get_many(10))
        until(lambda: other.stats().segments == 1)
        assert queue.stats().segments == 2
    finally:
        lock.release()
    until(lambda: queue.stats().segments == 1)
    for _ in range(2):
        queue.put_many([bytes(600)] * 5)
    queue.commit_many(queue.get_many(10))
    lock = folder_of_jobs.lock("jobs.readers.lock", wait=True)
    try:
        queue.close()
    finally:
        lock.release()
        folder_of_jobs.close()
    other.close()


def test_a_background_sync_that_is_cut_short_comes_again(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue(sync=1.0)
    queue.put(b"x")
    real, errors = queue._syncer.commit._sync_once, [MemoryError()]

    def sync_once() -> int:
        if errors:
            raise errors.pop()
        return real()

    queue._syncer.commit._sync_once = sync_once
    with pytest.raises(MemoryError):
        clock.advance(1)
    clock.advance(1)
    assert queue.stats().durable_id == 1


# -- no thread can be started ----------------------------------------------------------------------------------------


class NoThreads(ManualClock):
    """As the machine's clock where no thread can be started: what was armed before is lost."""

    has_threads = False

    def call_later(self, *arguments: Any, **options: Any) -> clock.Timer:
        if not self.has_threads:
            raise RuntimeError("can't start new thread")
        return super().call_later(*arguments, **options)


@pytest.mark.parametrize("put", ["put", "put_many", "put_future", "expires"])
def test_where_no_thread_can_be_started_puts_sync_themselves(
    put: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C5: nothing is left unsynced in silence, and the next put tries again."""
    time = NoThreads()
    queue = JournaledQueue(folder, "jobs", sync=0.1, clock=time)
    calls: dict[str, Callable[[], Any]] = {
        "put": lambda: queue.put(b"x"),
        "put_many": lambda: queue.put_many([b"x"]),
        "put_future": lambda: queue.put_future(b"x").result(0),
        "expires": lambda: queue.put(b"x", expires_in=99),
    }
    calls[put]()
    calls[put]()
    assert queue.stats().durable_id == 2
    assert [record.levelname for record in caplog.records if "no thread can be started" in record.message] == [
        "WARNING"
    ]
    time.has_threads = True
    calls[put]() if put != "put_future" else queue.put(b"x")
    assert queue.stats().durable_id == 2
    time.advance(0.1)
    assert queue.stats().durable_id == 3
    queue.close()


def test_where_no_thread_can_be_started_the_futures_of_sync_always_complete(folder: Path) -> None:
    queue = JournaledQueue(folder, "jobs", sync="always", clock=NoThreads())
    assert queue.put_future(b"x").result(0) == 1
    assert queue.stats().durable_id == 1
    queue.close()


def test_the_rounds_of_maintenance_and_the_looks_at_the_inbox_begin_when_threads_can_be_started(folder: Path) -> None:
    time = NoThreads()
    queue = JournaledQueue(folder, "jobs", sync="never", clock=time)
    queue.put(b"x")
    queue.get().commit()
    with PartWriter(folder, "jobs") as writer:
        writer.add([b"published"])
        publish(folder, "jobs", [writer.seal()], app_id="nightly", version=1)
    time.has_threads = True
    queue.put(b"y")
    time.advance(2)
    assert queue.reader()._checkpointer._saved == queue.reader()._checkpointer._version()
    until(lambda: queue.stats().tail_id == 3)
    queue.close()


def test_a_failed_put_of_an_unattended_queue_is_in_doubt(folder: Path) -> None:
    disk = FailingDisk(MemoryDisk())
    queue = JournaledQueue(folder, "jobs", sync=0.1, clock=NoThreads(), disk=disk)
    queue.put(b"x")
    disk.arm(errno.EIO, kinds={"sync"})
    with pytest.raises(DurabilityUnknown):
        queue.put(b"y")
    queue.close()


# -- what a closed queue leaves behind -------------------------------------------------------------------------------


def test_a_closed_queue_is_not_kept_alive_by_its_timers(folder: Path) -> None:
    """C28: not until they are due."""
    queue = JournaledQueue(folder, "jobs", sync=1000, checkpoint_interval=1000, inbox_interval=1000)
    queue.put(b"x")
    queue.get().commit()
    queue.close()
    gone = weakref.ref(queue)
    del queue
    gc.collect()
    assert gone() is None


# -- errors that are kept --------------------------------------------------------------------------------------------


def frames(error: BaseException | None) -> int:
    count, trace = 0, error.__traceback__ if error is not None else None
    while trace is not None:
        count, trace = count + 1, trace.tb_next
    return count


def fail_queue(queue: JournaledQueue, disk: FailingDisk) -> None:
    disk.arm(errno.EIO, kinds={"sync"})
    with pytest.raises(DurabilityUnknown):
        queue.sync()


@pytest.mark.parametrize("how", ["closed", "failed"])
def test_an_error_that_is_kept_keeps_no_arguments(how: str, folder: Path) -> None:
    """C10: one object that is raised again and again keeps what each caller had in hand."""
    disk = FailingDisk(MemoryDisk())
    queue = JournaledQueue(folder, "jobs", sync="never", disk=disk)
    reader = queue.reader()
    queue.put(b"x")
    if how == "closed":
        queue.close()
    else:
        fail_queue(queue, disk)
    wanted = QueueClosed if how == "closed" else DurabilityUnknown
    calls: list[Callable[[], object]] = [
        lambda: queue.put(b"y"),
        lambda: queue.put(b"y", expires_in=1),
        lambda: queue.put_future(b"y"),
        queue.sync,
        queue.checkpoint,
        reader.get_nowait,
        reader.get_future,
        reader.checkpoint,
        lambda: reader.commit(1),
        lambda: queue._syncer.commit.wait(5),
        lambda: queue._journal._make_room(1 << 30, 0),
    ]
    for call in calls:
        raised = []
        for _ in range(3):
            with pytest.raises(wanted) as caught:
                call()
            raised.append(caught.value)
        assert len(set(map(id, raised))) == 3
        assert len({frames(each) for each in raised}) == 1
    kept = [queue._status.error, reader._backlog.broken, queue._journal._refusal, queue._syncer.commit._error]
    assert [frames(each) for each in kept] == [0] * 4
    queue.close()


def test_everybody_who_waited_has_an_error_of_his_own(open_queue: Open) -> None:
    queue = open_queue()
    futures = [queue.get_future() for _ in range(3)]
    queue.close()
    assert len({id(future.exception(0)) for future in futures}) == 3


def test_a_copy_of_an_error_has_all_but_its_traceback() -> None:
    cause = OSError(errno.EIO, "bad")
    error = DurabilityUnknown("/data", 3, 9, cause)
    error.__cause__ = cause
    again = errors_module.copy_of(error)
    assert (again.first_id, again.last_id, again.errno, str(again)) == (3, 9, errno.EIO, str(error))
    assert again is not error
    assert again.__cause__ is cause

    class Foreign(Exception):
        def __init__(self, one: object, *, other: object) -> None:
            super().__init__(one)

    foreign = Foreign(1, other=2)
    assert errors_module.copy_of(foreign) is foreign, "it can't be made anew"


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kestrelpy")


def test_drop_oldest_is_seen_to_after_the_lead_is_passed_on(open_queue: Open, start: Start) -> None:
    config = ReaderConfig(max_items=1, full_policy=FullPolicy.DROP_OLDEST)
    queue = open_queue(sync="always", default_reader=config)
    queue.reader()
    for number in range(3):
        ends(start, queue.put, b"%d" % number)
    assert queue.get().data == b"2"


def test_followers_are_woken_with_callbacks_pending(
    open_queue: Open, gated_disk: GatedDisk, start: Start, hold: threading.Event
) -> None:
    """A leader whose callback takes its time does not hold up who leads next."""
    queue = open_queue(sync="always", disk=gated_disk)
    entered = threading.Event()

    def take_its_time(_: object) -> None:
        entered.set()
        hold.wait()

    queue.get_future().add_done_callback(take_its_time)
    leader = start(queue.put, b"x")
    assert entered.wait(20)
    ends(start, queue.put, b"y")
    assert leader.is_alive()
    hold.set()
    leader.join(20)


# -- files that somebody deletes while the queue is open -------------------------------------------------------------


def test_an_owner_whose_lock_file_was_deleted_is_told(open_queue: Open, folder: Path, clock: ManualClock) -> None:
    """A second owner can open the queue then. Before, both put, both closed without an error, and items were gone."""
    queue = open_queue(sync="always")
    queue.put(b"first")
    (folder / "jobs.lock").unlink()
    with JournaledQueue(folder, "jobs") as other:
        assert other.get_nowait().data == b"first"
        clock.advance(LOOK_SECONDS)
        with pytest.raises(DurabilityUnknown) as caught:
            queue.put(b"second")
        assert "a sync failed (jobs.lock was deleted while the queue was open: another process" in str(caught.value)
        with pytest.raises(DurabilityUnknown):
            queue.put(b"third")
        queue.close()
        other.put(b"other")


@pytest.mark.parametrize("name", ["jobs.lock", "*.segment"])
@pytest.mark.parametrize("sync", ["never", 60, "always"])
def test_a_close_without_the_lock_file_or_the_segment_is_an_error(
    open_queue: Open, folder: Path, name: str, sync: Any
) -> None:
    queue = open_queue(sync=sync)
    queue.put(b"gone")
    (path,) = folder.glob(name)
    path.unlink()
    with pytest.raises(DurabilityUnknown, match=f"{path.name} was deleted"):
        queue.close()
    queue.close()
    with JournaledQueue(folder, "jobs") as again:  # the lock is free
        again.put(b"new")


def test_a_background_sync_without_the_segment_fails_the_queue(
    open_queue: Open, folder: Path, clock: ManualClock
) -> None:
    queue = open_queue(sync=0.1)
    queue.put(b"there")
    clock.advance(LOOK_SECONDS)
    queue.put(b"gone")
    (path,) = folder.glob("*.segment")
    path.unlink()
    clock.advance(LOOK_SECONDS)
    with pytest.raises(DurabilityUnknown):
        queue.put(b"refused")
