"""Serving the line: chains of callbacks, and callbacks and hooks that end their thread."""

from __future__ import annotations

import contextlib
import errno
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from kestrelpy import Item, JournaledQueue, QueueEmpty, ReaderConfig
from kestrelpy._reading import dispatch
from kestrelpy.testing import FailingDisk, ManualClock, MemoryDisk

Open = Callable[..., JournaledQueue]

# -- errors of the disk ------------------------------------------------------------------------------------------------


def test_who_waits_behind_somebody_for_whom_an_item_could_not_be_read_gets_it(clock: ManualClock) -> None:
    disk = FailingDisk(MemoryDisk())
    few = ReaderConfig(memory_bytes=1)  # so that each item is read from the disk
    with JournaledQueue("/q", "jobs", disk=disk, clock=clock, sync="never", default_reader=few) as queue:
        queue.put_many([b"1", b"2"])
        reader = queue.reader("a", start="earliest")
        assert [reader.get_nowait().data for _ in range(2)] == [b"1", b"2"]
        first, second = reader.get_future(), reader.get_future()
        queue.put(b"3", expires_in=0.0)  # the next one is behind it, and not handed over as it comes
        disk.arm(errno.EIO, kinds={"read"})
        queue.put(b"4")
        assert isinstance(first.exception(timeout=0), OSError)
        assert second.result(timeout=0).data == b"4"


# -- chains of callbacks -----------------------------------------------------------------------------------------------


def chain(queues: list[JournaledQueue], count: int) -> list[Future[Item]]:
    """Who is given an item puts the next one, into the next queue in turn."""
    futures: list[Future[Item]] = []

    def reply(at: int) -> Callable[[object], object]:
        return lambda _: queues[(at + 1) % len(queues)].put(b"%d" % at)

    for at in range(count):
        future = queues[at % len(queues)].get_future()
        future.add_done_callback(reply(at))
        futures.append(future)
    return futures


@pytest.mark.parametrize("names", [["jobs"], ["jobs", "other", "third"]])
@pytest.mark.parametrize("sync", ["never", "always"])
def test_a_long_chain_of_callbacks_is_served_to_its_end(
    names: list[str], sync: str, open_queue: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """C21: nested in each other, they reach the recursion limit, and nobody is woken after that."""
    queues = [open_queue(name, sync=sync, disk=MemoryDisk()) for name in names]
    futures = chain(queues, 400)
    queues[0].put(b"first")
    assert [future.done() for future in futures].count(False) == 0
    assert not caplog.records, "no callback failed"
    for queue in queues:
        queue._check()
        assert not queue.reader().waiter_count


def test_what_a_callback_puts_is_there_for_a_consumer_at_once(open_queue: Open) -> None:
    """As long as the chain is short: a callback may count on it."""
    queue = open_queue()
    first, second = queue.get_future(), queue.get_future()
    seen: list[bytes] = []

    def put_and_see(_: object) -> None:
        queue.put(b"reply")
        seen.append(second.result(0).data)

    first.add_done_callback(put_and_see)
    queue.put(b"request")
    assert seen == [b"reply"]


def test_a_chain_is_served_though_an_exception_struck_the_last_one(open_queue: Open) -> None:
    """It may have struck as a hand-off ended, and left its mark."""
    queue = open_queue(sync="never")
    dispatch._turns.depth = 1000
    future = queue.get_future()
    queue.put(b"x")
    assert future.done()
    assert dispatch._turns.depth == 0


def deep(frames: int, call: Callable[[], object]) -> None:
    if frames:
        deep(frames - 1, call)
    else:
        call()


@pytest.mark.parametrize("sync", [1.0, "never", "always"])
def test_a_put_near_the_recursion_limit_breaks_nothing(
    sync: Any, open_queue: Open, clock: ManualClock, start: Callable[..., threading.Thread]
) -> None:
    """Whatever step of it finds no room on the stack: nobody is left with the lead, no waiter and no item is lost."""
    queue = open_queue(sync=sync, disk=MemoryDisk())
    reader = queue.reader()
    futures: list[Future[Item]] = []

    def work() -> None:
        for frames in range(sys.getrecursionlimit() - 70, sys.getrecursionlimit()):
            future = queue.get_future()
            futures.append(future)
            with contextlib.suppress(RecursionError):
                deep(frames, lambda: queue.put(b"x"))
            clock.advance(2)  # what was left to another thread
            if not future.done():
                queue.put(b"y")
            future.result(0).commit()

    start(work).join(20)
    assert len(futures) == 70
    for item in reader.get_many(1000) if reader.items else ():
        item.commit()
    assert [future.result(0).id for future in futures] == sorted(future.result(0).id for future in futures)
    assert reader.stats().committed == queue.stats().tail_id == reader.head
    queue._check()


# -- what ends a thread ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["on_delivery", "on_timeout", "on_expired", "on_abort"])
def test_a_hook_that_calls_exit_is_logged_and_counted(
    hook: str, open_queue: Open, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """C17: and loses nothing."""

    def stop(*_: object) -> None:
        raise SystemExit(1)

    hooks: dict[str, Any] = {hook: stop}
    queue = open_queue(default_reader=ReaderConfig(**hooks))
    reader = queue.reader()
    future = queue.get_future(timeout=1)
    clock.advance(2)
    assert isinstance(future.exception(0), QueueEmpty)
    queue.put(b"x", expires_in=1)
    if hook == "on_expired":
        clock.advance(2)
        with pytest.raises(QueueEmpty):
            queue.get_nowait()
    else:
        queue.get().abort()
        assert queue.get().error_count == 1
    assert reader.stats().hook_errors >= 1
    assert "a hook of reader jobs raised" in caplog.text


def test_a_callback_that_exits_keeps_nobody_else_waiting(open_queue: Open, clock: ManualClock) -> None:
    def stop(_: object) -> None:
        raise SystemExit(1)

    queue = open_queue(sync=1.0)
    futures = [queue.get_future() for _ in range(4)]
    for future in futures[1:3]:
        future.add_done_callback(stop)
    with pytest.raises(SystemExit):
        queue.put_many([b"1", b"2", b"3", b"4"])
    assert [future.result(0).data for future in futures] == [b"1", b"2", b"3", b"4"]
    promises = [queue.put_future(b"x") for _ in range(4)]
    for promise in promises[1:3]:
        promise.add_done_callback(stop)
    with pytest.raises(SystemExit):  # where the thread of the system's clock logs it
        clock.advance(1)
    assert [promise.result(0) for promise in promises] == [5, 6, 7, 8]


# -- what grows ------------------------------------------------------------------------------------------------------


def test_peeks_and_aborts_leave_nothing_behind(open_queue: Open) -> None:
    """C28: whichever of several items they come back to."""
    queue = open_queue()
    reader = queue.reader()
    queue.put_many([b"1", b"2", b"3"])
    for _ in range(500):
        assert queue.peek().data == b"1"
    for _ in range(500):
        items = [reader.get() for _ in range(3)]
        assert [item.data for item in items] == [b"1", b"2", b"3"]
        for item in items:
            item.abort()
    assert len(reader._backlog.requeued._order) < 100
    reader._check()
