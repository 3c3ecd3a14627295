"""One reader of a journaled queue: getting, waiting, settling, expiry, moving, figures, and what a restart keeps."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kestrelpy import (
    DurabilityUnknown,
    FullPolicy,
    InvalidName,
    Item,
    JournaledQueue,
    NoDefaultReader,
    QueueClosed,
    QueueEmpty,
    QueueFull,
    Reader,
    ReaderConfig,
    UnknownItem,
    inspect,
    open_reader,
    scan,
    verify,
)
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal.journal import Journal
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._reading.checkpointer import Checkpointer
from kestrelpy._reading.dispatch import Dispatcher
from kestrelpy._reading.local_source import LocalSource
from kestrelpy._reading.reader import checkpointer_of
from kestrelpy._reading.registry import ReaderRegistry
from kestrelpy.inbox import PartWriter
from kestrelpy.testing import CrashingDisk, FailingDisk, ManualClock, MemoryDisk, PowerModel
from tests.support.disks import GatedDisk
from tests.support.patience import until
from tests.support.queues import drain, let_die, take_all

Open = Callable[..., JournaledQueue]
PATIENCE = 3.0


def filled(open_queue: Open, count: int, **options: Any) -> tuple[JournaledQueue, Reader]:
    queue = open_queue(**options)
    reader = queue.reader()
    for n in range(1, count + 1):
        queue.put(b"%d" % n)
    return queue, reader


def ids(items: list[Any]) -> list[int]:
    return [item.id for item in items]


# -- getting ---------------------------------------------------------------------------------------------------------


# LK-F60: immediate, or wait; an item opened stays in items and bytes until it is committed.
def test_lk_f60_an_open_read_counts_until_it_is_committed(open_queue: Open) -> None:
    _, reader = filled(open_queue, 2)
    item = reader.get()
    assert (item.id, item.data, item.value, item.error_count) == (1, b"1", b"1", 0)
    assert (reader.items, reader.bytes, reader.open_items, reader.open_bytes) == (2, 2, 1, 1)
    item.commit()
    assert (reader.items, reader.bytes, reader.open_items, reader.open_bytes, reader.head) == (1, 1, 0, 0, 1)
    reader._check()


def test_get_without_waiting(open_queue: Open) -> None:
    _, reader = filled(open_queue, 1)
    assert reader.get_nowait().id == 1
    for call in (
        reader.get_nowait,
        lambda: reader.get(False),
        lambda: reader.get(timeout=0),
        lambda: reader.get(True, 0.001),
    ):
        with pytest.raises(QueueEmpty):
            call()
    assert reader.stats().get_misses == 4
    assert reader.waiter_count == 0


def test_a_get_waits_for_a_put(open_queue: Open, start: Any) -> None:
    queue, reader = filled(open_queue, 0)
    found: list[bytes] = []
    thread = start(lambda: found.append(reader.get(timeout=20).data))
    until(lambda: reader.waiter_count == 1)
    queue.put(b"x")
    thread.join(20)
    assert found == [b"x"]
    reader._check()


# LK-F13: strictly in the order of arrival, whatever way they wait.
def test_lk_f13_first_come_first_served(open_queue: Open) -> None:
    queue, reader = filled(open_queue, 0)
    futures = [reader.get_future() for _ in range(5)]
    with pytest.raises(QueueEmpty):
        reader.get_nowait()  # nor does a late one push in:
    queue.put(b"1")
    assert futures[0].result(0).id == 1
    with pytest.raises(QueueEmpty):
        reader.get_nowait()
    queue.put_many([b"2", b"3", b"4", b"5"])
    assert [future.result(0).id for future in futures] == [1, 2, 3, 4, 5]


def test_get_many_takes_what_is_there(open_queue: Open) -> None:
    _, reader = filled(open_queue, 5)
    assert ids(reader.get_many(3)) == [1, 2, 3]
    assert ids(reader.get_many(100)) == [4, 5]
    with pytest.raises(QueueEmpty):
        reader.get_many(1, timeout=0)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="max_items"):
            reader.get_many(wrong)


def test_get_many_waits_for_the_first(open_queue: Open, start: Any) -> None:
    queue, reader = filled(open_queue, 0)
    found: list[Any] = []
    thread = start(lambda: found.extend(reader.get_many(10, timeout=20)))
    until(lambda: reader.waiter_count == 1)
    queue.put_many([b"a", b"b"])
    thread.join(20)
    rest = take_all(reader)
    assert ids(found + rest) == [1, 2]
    assert found


def test_get_many_max_bytes_takes_at_least_one(open_queue: Open) -> None:
    queue, reader = filled(open_queue, 0)
    for size in (5, 3, 3, 9, 1):
        queue.put(bytes(size))
    assert ids(reader.get_many(9, max_bytes=8)) == [1, 2]
    assert ids(reader.get_many(9, max_bytes=5)) == [3]
    assert ids(reader.get_many(9, max_bytes=1)) == [4]
    reader.abort(3)
    assert ids(reader.get_many(9, max_bytes=3)) == [3]
    assert ids(reader.get_many(9, max_bytes=3)) == [5]
    reader._check()


def test_get_many_mixes_returned_expiring_and_plain_items_in_order(open_queue: Open, clock: ManualClock) -> None:
    queue, reader = filled(open_queue, 3)
    queue.put(b"4", expires_in=5)
    queue.put(b"5")
    queue.put(b"6", expires_in=1)
    queue.put(b"7")
    items = reader.get_many(3)
    items[2].abort()
    items[0].abort()
    clock.advance(2)
    assert ids(reader.get_many(10)) == [1, 3, 4, 5, 7]
    assert reader.stats().expired == 1
    reader._check()


# LK-F61: peek does not open it.
def test_lk_f61_peek(open_queue: Open) -> None:
    _, reader = filled(open_queue, 2)
    for _ in range(2):
        seen = reader.peek()
        assert (seen.id, seen.data) == (1, b"1")
        assert reader.open_items == 0
    with pytest.raises(UnknownItem):
        seen.commit()
    with pytest.raises(UnknownItem):
        reader.abort(seen)
    with seen:
        pass  # leaving does nothing: it is not open
    assert ids(take_all(reader)) == [1, 2]
    with pytest.raises(QueueEmpty):
        reader.peek()
    with pytest.raises(UnknownItem):
        seen.commit()  # the read that is open is another one


def test_peek_waits(open_queue: Open, start: Any) -> None:
    queue, reader = filled(open_queue, 0)
    with pytest.raises(QueueEmpty):
        reader.peek(0.001)
    found: list[Any] = []
    thread = start(lambda: found.append(reader.peek(20)))
    until(lambda: reader.waiter_count == 1)
    queue.put(b"x")
    thread.join(20)
    assert [item.data for item in found] == [b"x"]
    assert reader.get_nowait().id == 1


# -- futures and asyncio ---------------------------------------------------------------------------------------------


# LK-F5: resolved at once if an item is there; fails exactly when the deadline is reached.
def test_lk_f5_future(open_queue: Open, clock: ManualClock) -> None:
    queue, reader = filled(open_queue, 1)
    assert reader.get_future(0).result(0).id == 1
    assert isinstance(reader.get_future(0).exception(0), QueueEmpty)
    late, early, forever = reader.get_future(5), reader.get_future(1.5), reader.get_future()
    clock.advance(1.4)
    assert not early.done()
    clock.advance(0.2)
    assert isinstance(early.exception(0), QueueEmpty)
    assert reader.waiter_count == 2
    queue.put(b"x")
    assert late.result(0).id == 2
    clock.advance(1000)
    assert not forever.done()
    queue.put(b"y")
    assert forever.result(0).id == 3


# LK-F15: cancelling leaves the line, and no item is lost by it.
def test_lk_f15_a_cancelled_future_loses_no_item(open_queue: Open) -> None:
    queue, reader = filled(open_queue, 0)
    first, second, third = (reader.get_future(60) for _ in range(3))
    assert second.cancel()
    assert reader.waiter_count == 2
    assert first.cancel()
    queue.put(b"x")
    assert third.result(0).id == 1
    assert not third.cancel()
    queue.put(b"y")
    assert reader.get_nowait().id == 2
    assert reader.open_items == 2


def test_aget(folder: Path) -> None:
    async def work() -> None:
        with JournaledQueue(folder, "jobs") as queue:
            reader = queue.reader()
            queue.put(b"there")
            assert (await reader.aget()).data == b"there"
            for timeout in (0, 0.001):
                with pytest.raises(QueueEmpty):
                    await reader.aget(timeout)
            tasks = [asyncio.ensure_future(queue.aget(20)) for _ in range(3)]
            while reader.waiter_count < 3:
                await asyncio.sleep(0)
            threading.Thread(target=lambda: queue.put_many([b"a", b"b", b"c"])).start()
            assert [item.data for item in await asyncio.gather(*tasks)] == [b"a", b"b", b"c"]

    asyncio.run(work())


@pytest.mark.parametrize("when", ["before the put", "after the put"])
def test_a_cancelled_aget_loses_nothing(when: str, folder: Path) -> None:
    async def work() -> None:
        with JournaledQueue(folder, "jobs") as queue:
            reader = queue.reader()
            task = asyncio.ensure_future(reader.aget())
            while not reader.waiter_count:
                await asyncio.sleep(0)
            if when == "before the put":
                task.cancel()
                await asyncio.sleep(0)
                queue.put(b"x")
            else:
                queue.put(b"x")  # handed over, not seen by the task yet
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert reader.waiter_count == 0
            assert reader.open_items == 0
            item = reader.get_nowait()
            assert (item.data, item.error_count) == (b"x", 0)
            reader._check()

    asyncio.run(work())


# LK-F11, LK-F69: every waiter, timed or not, gets QueueEmpty; its timer is gone.
def test_lk_f69_evict_waiters(open_queue: Open, start: Any, clock: ManualClock) -> None:
    _, reader = filled(open_queue, 0)

    def wait() -> None:
        with pytest.raises(QueueEmpty):
            reader.get()

    thread = start(wait)
    until(lambda: reader.waiter_count == 1)
    futures = [reader.get_future(), reader.get_future(5)]
    assert reader.evict_waiters() == 3
    thread.join(20)
    assert all(isinstance(future.exception(0), QueueEmpty) for future in futures)
    assert reader.waiter_count == 0
    clock.advance(10)
    assert reader.evict_waiters() == 0


# -- settling --------------------------------------------------------------------------------------------------------


# LK-F62: what is not open is UnknownItem, and nothing is changed.
def test_lk_f62_commit_of_what_is_not_open(open_queue: Open) -> None:
    queue, reader = filled(open_queue, 3)
    item = reader.get_nowait()
    item.commit()
    for wrong in (1, 2, 3, 4, 0, -1, item):
        for call in (reader.commit, reader.abort, lambda x: reader.commit_many([x])):
            with pytest.raises(UnknownItem) as caught:
                call(wrong)
            assert caught.value.reader == "jobs"
            assert caught.value.item_id == (wrong if isinstance(wrong, int) else 1)
    assert (reader.items, reader.head) == (2, 1)
    aborted = reader.get_nowait()
    aborted.abort()
    with pytest.raises(UnknownItem):
        aborted.commit()
    again = reader.get_nowait()
    with pytest.raises(UnknownItem):
        aborted.commit()  # the item is open again, but this is not that read
    again.commit()
    del queue


def test_items_of_one_reader_are_unknown_to_another(open_queue: Open) -> None:
    queue = open_queue()
    a, b = queue.reader("a"), queue.reader("b")
    queue.put(b"x")
    mine, other = a.get_nowait(), b.get_nowait()
    with pytest.raises(UnknownItem):
        a.commit(other)
    with pytest.raises(UnknownItem):
        a.commit_many([other])
    a.commit(1)
    with pytest.raises(UnknownItem):
        mine.commit()
    assert b.open_items == 1


def test_commits_in_any_order_from_any_thread(open_queue: Open, start: Any) -> None:
    _, reader = filled(open_queue, 100)
    items = reader.get_many(100)
    threads = [start(lambda part: [item.commit() for item in part], items[n::4]) for n in range(3, -1, -1)]
    for thread in threads:
        thread.join(20)
    assert (reader.head, reader.items, reader.stats().committed) == (100, 0, 100)
    reader._check()


def test_commit_many_is_all_or_nothing(open_queue: Open) -> None:
    _, reader = filled(open_queue, 5)
    items = reader.get_many(4)
    refused: tuple[list[Item | int], ...] = (
        [*items, 5],
        [items[0], items[0]],
        [items[0], 1],
        [1, 1],
        [items[3], 99],
    )
    for wrong in refused:
        with pytest.raises(UnknownItem):
            reader.commit_many(wrong)
        assert (reader.open_items, reader.items, reader.head) == (4, 5, 0)
    reader.commit_many([items[2], 1])
    reader.commit_many(item for item in (items[1], items[3]))
    assert (reader.head, reader.items) == (4, 1)
    reader.commit_many([])
    reader._check()


# LK-F64: aborted items come before unread ones; here in the order of their ids.
def test_lk_f64_aborted_items_come_first_in_id_order(open_queue: Open) -> None:
    _, reader = filled(open_queue, 6)
    items = reader.get_many(4)
    for n in (2, 0, 3):
        items[n].abort()
    assert ids(reader.get_many(10)) == [1, 3, 4, 5, 6]
    assert reader.stats().aborted == 3
    reader._check()


def test_an_abort_wakes_a_waiter(open_queue: Open) -> None:
    _, reader = filled(open_queue, 1)
    item = reader.get_nowait()
    future = reader.get_future()
    item.abort()
    assert future.result(0).error_count == 1


# LK-F63: error_count + 1 at each abort.
def test_lk_f63_error_counts_grow(open_queue: Open) -> None:
    _, reader = filled(open_queue, 2)
    for expected in range(4):
        item = reader.get_nowait()
        assert (item.id, item.error_count) == (1, expected)
        assert reader.peek().error_count == 0
        item.abort()
    assert reader.peek().error_count == 4


# LK-C6: called with the count already raised; true: done with it.
def test_lk_c6_on_abort(open_queue: Open) -> None:
    seen: list[tuple[int, int]] = []

    def give_up(item: Item) -> bool:
        seen.append((item.id, item.error_count))
        return item.error_count >= 2

    queue, reader = filled(open_queue, 2, default_reader=ReaderConfig(on_abort=give_up))
    reader.get_nowait().abort()
    assert reader.get_nowait().error_count == 1
    reader.abort(1)
    assert seen == [(1, 1), (1, 2)]
    assert (reader.items, reader.head) == (1, 1)
    assert reader.get_nowait().id == 2
    assert reader.stats().aborted == 2
    queue._check()


def test_an_on_abort_that_raises_loses_nothing(open_queue: Open, caplog: Any) -> None:
    def broken(item: Any) -> bool:
        raise RuntimeError("oh")

    _, reader = filled(open_queue, 1, default_reader=ReaderConfig(on_abort=broken))
    reader.get_nowait().abort()
    assert "a hook of reader jobs raised" in caplog.text
    assert reader.stats().hook_errors == 1
    assert reader.get_nowait().error_count == 1
    reader._check()


def test_a_hook_may_use_the_queue(open_queue: Open) -> None:
    """Hooks run outside every lock: one that moves the item to another queue of errors works."""

    def move(item: Any) -> bool:
        queue.put(b"moved " + item.data)
        reader.stats()
        return True

    queue, reader = filled(open_queue, 1, default_reader=ReaderConfig(on_abort=move))
    reader.get_nowait().abort()
    assert drain(reader) == [b"moved 1"]


def test_the_item_as_a_context(open_queue: Open) -> None:
    _, reader = filled(open_queue, 4)
    with reader.get() as item:
        assert item.id == 1
    assert reader.head == 1
    with pytest.raises(KeyError), reader.get():
        raise KeyError
    assert reader.stats().aborted == 1
    with reader.get() as item:
        assert (item.id, item.error_count) == (2, 1)
        item.commit()
    with reader.get() as item:
        item.abort()

    def commit_and_raise() -> None:
        with reader.get() as item:
            item.commit()
            raise KeyError

    with pytest.raises(KeyError):
        commit_and_raise()
    assert (reader.head, reader.open_items, reader.stats().committed) == (3, 0, 3)


# -- expiry ----------------------------------------------------------------------------------------------------------


# LK-F72: inclusive; the earlier of both.
@pytest.mark.parametrize(
    ("expires_in", "max_age", "limit"), [(2, None, 2), (None, 3, 3), (2, 3, 2), (5, 3, 3), (0, None, 0), (None, 0, 0)]
)
def test_lk_f72_expiry_is_inclusive(
    expires_in: float | None, max_age: float | None, limit: float, open_queue: Open, clock: ManualClock
) -> None:
    queue = open_queue(default_reader=ReaderConfig(max_age=max_age))
    reader = queue.reader()
    queue.put(b"x", expires_in=expires_in)
    if limit:
        clock.advance(limit - 0.001)
        assert reader.peek().id == 1
        clock.advance(0.001)
    with pytest.raises(QueueEmpty):
        reader.get_nowait()
    assert (reader.items, reader.stats().expired, reader.stats().committed, reader.head) == (0, 1, 0, 1)
    reader._check()


# LK-F73: only the front is looked at. LK-F71, LK-C7: the sweep's limit is discard_expired's alone.
def test_lk_f73_expiry_is_head_only(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue(default_reader=ReaderConfig(max_expire_sweep=2))
    reader = queue.reader()
    for expires_in in (1, 1, 1, None, 1, 1):
        queue.put(b"x", expires_in=expires_in)
    clock.advance(1)
    assert reader.items == 6
    assert reader.discard_expired() == 2
    assert reader.discard_expired(0) == 0
    assert reader.discard_expired() == 1
    assert reader.discard_expired() == 0
    assert reader.items == 3
    item = reader.get_nowait()
    assert item.id == 4
    assert reader.discard_expired(10) == 2
    assert reader.stats().expired == 5
    reader._check()


def test_lk_c7_get_ignores_the_sweep_limit(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue(default_reader=ReaderConfig(max_expire_sweep=1))
    reader = queue.reader()
    for expires_in in (1, 1, 1, None):
        queue.put(b"x", expires_in=expires_in)
    clock.advance(1)
    assert reader.get_nowait().id == 4


# LK-F74, LK-C5: the hook sees each expired item before it is dropped.
def test_lk_f74_on_expired(open_queue: Open, clock: ManualClock) -> None:
    seen: list[tuple[bytes, int]] = []
    queue = open_queue(default_reader=ReaderConfig(on_expired=lambda item: seen.append((item.data, reader.items))))
    reader = queue.reader()
    for n in range(4):
        queue.put(b"%d" % n, expires_in=1 if n < 3 else None)
    clock.advance(1)
    reader.discard_expired(1)
    assert seen == [(b"0", 4)]
    assert reader.get_nowait().data == b"3"
    assert seen == [(b"0", 4), (b"1", 3), (b"2", 2)]
    assert reader.items == 1


def test_an_on_expired_that_raises_loses_nothing(open_queue: Open, clock: ManualClock, caplog: Any) -> None:
    seen: list[bytes] = []
    broken = [True]

    def hook(item: Any) -> None:
        if broken[0]:
            raise RuntimeError("oh")
        seen.append(item.data)

    queue = open_queue(default_reader=ReaderConfig(on_expired=hook))
    reader = queue.reader()
    queue.put(b"old", expires_in=1)
    queue.put(b"new")
    clock.advance(1)
    assert reader.get_nowait().data == b"new", "the consumer is not disturbed"
    assert reader.stats().hook_errors == 1
    assert reader.head == 0, "it is not done: nobody has seen it"
    broken[0] = False
    reader.discard_expired()
    assert seen == [b"old"]
    reader.commit(2)
    assert (reader.head, reader.items) == (2, 0)
    reader._check()


def test_what_was_done_out_of_order_counts_after_an_error(open_queue: Open) -> None:
    """An error of a call has the reader count anew; items behind the next one may be done since long ago."""
    queue = open_queue()
    queue.put_many([b"first", b"second", b"third"])
    queue.get_many(3)[1].commit()
    queue.close()
    reader = open_queue().reader()
    before = (reader.items, reader.bytes)
    with pytest.raises(TypeError):
        reader.commit_many([True])
    assert (reader.items, reader.bytes) == before == (2, len(b"firstthird"))
    assert [item.id for item in take_all(reader)] == [1, 3]


def test_a_hook_that_closes_the_queue_leaves_no_timer(open_queue: Open, clock: ManualClock) -> None:
    """The read that called it goes on, and moves a reader of a queue that is closed by then."""
    queue = open_queue(default_reader=ReaderConfig(on_delivery=lambda *_: queue.close()))
    queue.put(b"1")
    queue.get(timeout=0)
    assert not clock.timer_count


def test_an_expired_item_is_shown_once_while_its_hook_runs(open_queue: Open, clock: ManualClock, start: Any) -> None:
    seen: list[int] = []
    entered, leave = threading.Event(), threading.Event()

    def hook(item: Any) -> None:
        seen.append(item.id)
        entered.set()
        assert leave.wait(20)

    queue = open_queue(default_reader=ReaderConfig(on_expired=hook, max_items=1))
    reader = queue.reader()
    queue.put(b"x", expires_in=1)
    clock.advance(1)
    thread = start(reader.discard_expired)
    assert entered.wait(20)
    assert reader.discard_expired() == 0
    with pytest.raises(QueueFull):
        queue.put(b"y")
    leave.set()
    thread.join(20)
    assert (seen, reader.items, reader.stats().hook_errors) == ([1], 0, 0)


@pytest.mark.parametrize("call", ["discard", "get", "put"])
def test_a_hook_of_expired_items_never_calls_itself(call: str, open_queue: Open, clock: ManualClock) -> None:
    seen: list[int] = []
    depths: list[int] = []
    depth = 0

    def hook(item: Any) -> None:
        nonlocal depth
        depth += 1
        seen.append(item.id)
        depths.append(depth)
        try:
            if call == "discard":
                assert queue.discard_expired() == 0, "the next ones are shown when this one is"
            elif call == "get":
                with pytest.raises(QueueEmpty):
                    queue.get_nowait()
            else:
                with pytest.raises(QueueFull):  # it counts until it is dropped
                    queue.put_many([b"again"] * 300)
        finally:
            depth -= 1

    queue = open_queue(default_reader=ReaderConfig(on_expired=hook, max_items=300))
    reader = queue.reader()
    for _ in range(300):
        queue.put(b"x", expires_in=1)
    clock.advance(1)
    if call == "put":
        assert queue.put(b"new") == 301
    else:
        reader.discard_expired()
    assert (sorted(seen), max(depths)) == (list(range(1, 301)), 1)
    assert (reader.stats().hook_errors, reader.items) == (0, 1 if call == "put" else 0)
    reader._check()


def test_a_hook_that_raised_has_another_go_and_nobody_is_told_in_vain(
    open_queue: Open, clock: ManualClock, caplog: Any
) -> None:
    caplog.set_level(logging.CRITICAL)
    calls = 0
    fails = True

    def hook(_: Any) -> None:
        nonlocal calls
        calls += 1
        if fails:
            raise RuntimeError("oh")

    queue = open_queue(default_reader=ReaderConfig(on_expired=hook, full_policy=FullPolicy.BLOCK))
    reader = queue.reader()
    for _ in range(3):
        queue.put(b"x", expires_in=0.0)
    assert reader.discard_expired() == 0, "none was dropped"
    moved: list[Any] = []
    with patch.object(queue._source, "_moved", lambda: moved.append(None)):
        reader.discard_expired()
        assert (calls, moved) == (6, [])
        fails = False
        reader.discard_expired()
    assert (calls, len(moved), reader.items) == (9, 3, 0)
    reader._check()


def test_a_hook_error_elsewhere_is_not_taken_for_this_ones(open_queue: Open, clock: ManualClock) -> None:
    seen: list[int] = []

    def show(item: Any) -> None:
        seen.append(item.id)
        reader._dispatcher.hooks.errors += 1  # what another thread's hook does meanwhile

    queue = open_queue(default_reader=ReaderConfig(on_expired=show))
    reader = queue.reader()
    queue.put(b"x", expires_in=0.0)
    assert reader.discard_expired() == 1
    reader.discard_expired()
    assert (seen, reader.items) == ([1], 0)


@pytest.mark.parametrize("takes", [True, False])
def test_an_item_that_on_abort_has_is_shown_to_no_other_hook(takes: bool, open_queue: Open, clock: ManualClock) -> None:
    expired: list[int] = []
    put: list[object] = []

    def on_abort(_: Any) -> bool:
        assert queue.discard_expired() == 0
        with pytest.raises(QueueFull):
            queue.put(b"y")
        put.append(expired.copy())
        return takes

    for on_expired in (None, lambda item: expired.append(item.id)):
        config = ReaderConfig(on_abort=on_abort, on_expired=on_expired, max_items=1)
        queue = open_queue(f"with{on_expired is not None}", default_reader=config)
        reader = queue.reader()
        queue.put(b"x", expires_in=1)
        item = reader.get_nowait()
        clock.advance(2)
        item.abort()
        assert put == [[]]
        assert reader.items == (0 if takes else 1)
        assert reader.discard_expired() == (0 if takes else 1)
        put.clear()
    assert expired == ([] if takes else [1])


def test_a_hook_that_outlives_a_seek_drops_nothing(open_queue: Open, start: Any, caplog: Any) -> None:
    caplog.set_level(logging.CRITICAL)
    seen: list[int] = []

    def hook(item: Any) -> None:
        seen.append(item.id)
        if len(seen) == 1:
            reader.seek(1)  # it comes again, and to another hook
            start(reader.discard_expired).join(20)
        elif len(seen) == 2:
            raise RuntimeError("oh")

    queue = open_queue(default_reader=ReaderConfig(on_expired=hook))
    reader = queue.reader()
    queue.put(b"x", expires_in=0.0)
    reader.discard_expired()
    assert (seen, reader.items) == ([1, 1], 1), "the second one has not taken it"
    assert reader.discard_expired() == 0
    assert (seen, reader.items) == ([1, 1, 1], 0)
    reader._check()


def test_a_waiter_never_gets_an_expired_item(open_queue: Open, clock: ManualClock) -> None:
    queue, reader = filled(open_queue, 0)
    future = reader.get_future()
    queue.put(b"dead on arrival", expires_in=0)
    assert not future.done()
    queue.put(b"x", expires_in=1)
    assert future.result(0).data == b"x"


def test_an_aborted_item_expires_too(open_queue: Open, clock: ManualClock) -> None:
    queue, reader = filled(open_queue, 0)
    queue.put(b"x", expires_in=1)
    item = reader.get_nowait()
    clock.advance(5)
    assert reader.open_items == 1, "an open read does not expire"
    item.abort()
    with pytest.raises(QueueEmpty):
        reader.get_nowait()
    assert reader.stats().expired == 1
    assert reader.items == 0


# -- hooks of latency ------------------------------------------------------------------------------------------------


# LK-F75, LK-C9
def test_lk_f75_latency_hooks(open_queue: Open, clock: ManualClock) -> None:
    delivered: list[tuple[str, float]] = []
    missed: list[tuple[str, float]] = []
    configured = ReaderConfig(
        on_delivery=lambda reader, seconds: delivered.append((reader.full_name, seconds)),
        on_timeout=lambda reader, seconds: missed.append((reader.full_name, seconds)),
    )
    queue = open_queue(default_reader=configured)
    reader = queue.reader()
    queue.put_many([b"a", b"b", b"c"])
    clock.advance(2)
    reader.get_nowait()
    reader.get_many(5)
    assert delivered == [("jobs", 2.0)] * 3
    with pytest.raises(QueueEmpty):
        reader.get_nowait()
    future = reader.get_future(3)
    clock.advance(3)
    assert isinstance(future.exception(0), QueueEmpty)
    assert [name for name, _ in missed] == ["jobs", "jobs"]
    assert missed[1][1] == pytest.approx(3.0)
    future = reader.get_future()
    queue.put(b"d")
    assert delivered[3:] == [("jobs", 0.0)]
    assert future.done()


def test_latency_hooks_that_raise_lose_nothing(open_queue: Open, caplog: Any) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("oh")

    queue = open_queue(default_reader=ReaderConfig(on_delivery=broken, on_timeout=broken))
    reader = queue.reader()
    queue.put(b"x")
    assert reader.get_nowait().data == b"x"
    with pytest.raises(QueueEmpty):
        reader.get_nowait()
    assert reader.stats().hook_errors == 2


# -- moving ----------------------------------------------------------------------------------------------------------


# LK-F65, LK-B5: with an open read it returns, and the read stays open.
def test_lk_f65_flush_with_open_reads(open_queue: Open) -> None:
    queue, reader = filled(open_queue, 10)
    items = reader.get_many(5)
    items[0].commit()
    items[1].abort()
    assert reader.flush() == 6
    assert (reader.items, reader.open_items, reader.head) == (3, 3, 2)
    assert reader.stats().flushes == 1
    with pytest.raises(QueueEmpty):
        reader.get_nowait()
    queue.put(b"new")
    items[2].abort()
    assert ids(take_all(reader)) == [3, 11]
    items[4].commit()
    items[3].commit()
    reader.commit_many([3, 11])
    assert (reader.head, reader.items, reader.bytes) == (11, 0, 0)
    assert reader.flush() == 0
    reader._check()


def test_flush_counts_survive_a_kill(open_queue: Open) -> None:
    queue, reader = filled(open_queue, 6)
    held = reader.get_nowait()
    reader.flush()
    let_die(queue)
    with open_queue() as again:
        assert ids(take_all(again)) == [1]
    del held


def test_flush_keeps_waiters(open_queue: Open) -> None:
    """LK-F8: waiters are unaffected."""
    queue, reader = filled(open_queue, 0)
    future = reader.get_future()
    assert reader.flush() == 0
    queue.put(b"x")
    assert future.result(0).id == 1


def test_seek_by_id(open_queue: Open) -> None:
    queue, reader = filled(open_queue, 10)
    items = reader.get_many(4)
    items[0].commit()
    items[2].commit()
    items[3].abort()
    reader.seek(6)
    assert (reader.head, reader.items, reader.bytes, reader.open_items) == (5, 5, 6, 0)
    with pytest.raises(UnknownItem):
        items[1].commit()
    assert reader.get_nowait().id == 6
    reader.seek(2)
    assert (reader.head, reader.items, reader.bytes) == (1, 9, 10)
    assert ids(take_all(reader)) == list(range(2, 11)), "also those committed before"
    reader.seek(99)
    assert (reader.head, reader.items, reader.bytes) == (10, 0, 0)
    assert queue.put(b"x") == 11
    assert reader.get_nowait().id == 11
    for low in (1, 0, -5):
        reader.seek(low)
        assert (reader.head, reader.items) == (0, 11)
    reader._check()


def test_seek_by_time(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue(segment_bytes=4096)
    reader = queue.reader()
    base = clock.time_ns() // 1_000_000
    for _ in range(20):
        queue.put(bytes(700))
        clock.advance(1)
    for milliseconds, expected in (
        (0, 1),
        (1, 2),
        (999, 2),
        (1000, 2),
        (7500, 9),
        (19_000, 20),
        (19_001, 21),
        (10**9, 21),
    ):
        reader.seek(time_ms=base + milliseconds)
        assert reader.head + 1 == expected
        assert reader.items == 21 - expected
        assert reader.bytes == 700 * (21 - expected)
    reader.seek(time_ms=0)
    assert len(drain(reader)) == 20


def test_seek_takes_one_place(open_queue: Open) -> None:
    _, reader = filled(open_queue, 1)
    calls: tuple[Callable[[], object], ...] = (reader.seek, lambda: reader.seek(1, time_ms=1))
    for call in calls:
        with pytest.raises(TypeError):
            call()
    assert reader.get_nowait().id == 1


def test_seek_wakes_a_waiter_and_lasts_over_a_kill(open_queue: Open) -> None:
    queue, reader = filled(open_queue, 3)
    reader.commit_many(take_all(reader))
    future = reader.get_future()
    reader.seek(2)
    assert future.result(0).id == 2
    let_die(queue)
    with open_queue() as again:
        assert ids(take_all(again)) == [2, 3]


@pytest.mark.parametrize("item_id", [1, 3, 5])
def test_what_get_many_took_before_a_seek_is_what_it_returns(open_queue: Open, item_id: int) -> None:
    def seek(*_: object) -> None:
        queue.reader().configure(ReaderConfig())
        queue.seek(item_id)

    queue = open_queue(default_reader=ReaderConfig(on_delivery=seek))
    queue.put_many([b"1", b"2", b"3", b"4"])
    assert ids(queue.get_many(4)) == [1]
    assert ids(take_all(queue.reader())) == list(range(item_id, 5))


def test_seek_back_ends_at_the_earliest_kept(open_queue: Open) -> None:
    queue = open_queue(segment_bytes=4096)
    reader = queue.reader()
    for n in range(20):
        queue.put(b"%02d" % n * 300)
    reader.commit_many(reader.get_many(10))
    queue.checkpoint()
    reader.seek(1)
    first_id = reader.head + 1
    assert 1 < first_id <= 10
    assert ids(take_all(reader)) == list(range(first_id, 21))
    assert reader.items == 21 - first_id
    reader.commit_many(range(first_id, 21))
    assert (reader.items, reader.bytes) == (0, 0)


# -- figures ---------------------------------------------------------------------------------------------------------


# LK-F68: of the next deliverable item; an open one is not counted.
def test_lk_f68_age(open_queue: Open, clock: ManualClock) -> None:
    queue, reader = filled(open_queue, 1)
    clock.advance(3)
    queue.put(b"x")
    clock.advance(1)
    assert reader.age == pytest.approx(4.0)
    item = reader.get_nowait()
    assert reader.age == pytest.approx(1.0)
    reader.get_nowait().commit()
    assert reader.age == 0
    item.abort()
    assert reader.age == pytest.approx(4.0)


# LK-F66, LK-F67
def test_lk_f66_stats(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue()
    reader = queue.reader("a")
    for n in range(6):
        queue.put(b"%d" % n, expires_in=5 if n == 0 else None)
    clock.advance(5)
    items = reader.get_many(3)
    items[0].commit()
    items[1].abort()
    stats = reader.stats()
    assert stats.name == reader.name == "a"
    assert reader.full_name == "jobs+a"
    assert (stats.head, stats.items, stats.bytes, stats.open_items, stats.open_bytes) == (2, 4, 4, 1, 1)
    assert (stats.opened, stats.get_hits, stats.committed, stats.aborted, stats.expired) == (3, 3, 1, 1, 1)
    assert stats.age == pytest.approx(5.0)
    assert stats.waiter_count == 0
    assert stats.flushes == stats.discarded == stats.hook_errors == stats.get_misses == 0
    reader.flush()
    after = reader.stats()
    assert (after.flushes, after.committed, after.items) == (1, 1, 1)


# LK-F70, LK-C8
def test_lk_f70_idle_expired(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue(default_reader=ReaderConfig(max_idle=10))
    reader = queue.reader()
    clock.advance(9)
    assert not reader.idle_expired
    clock.advance(1)
    assert reader.idle_expired
    queue.put(b"x")
    assert not reader.idle_expired
    item = reader.get_nowait()
    clock.advance(100)
    assert not reader.idle_expired, "an open read is no emptiness"
    item.commit()
    assert not reader.idle_expired
    clock.advance(10)
    assert reader.idle_expired
    assert not open_queue(name="other").reader().idle_expired


def test_repr(open_queue: Open) -> None:
    _, reader = filled(open_queue, 2)
    item = reader.get_nowait()
    assert repr(reader) == "<Reader jobs: head=0 items=2 open=1 waiters=0>"
    assert repr(item) == "<Item 1: b'1', 1 bytes, error_count=0>"
    reader.close()
    assert "closed" in repr(reader)


# -- fan-out ---------------------------------------------------------------------------------------------------------


# LK-S6: one record, seen by every reader.
def test_fan_out_every_reader_sees_every_item(open_queue: Open) -> None:
    queue = open_queue()
    readers = [queue.reader(f"r{n}") for n in range(5)]
    queue.put(b"before")
    assert readers[0].get_nowait().data == b"before"
    queue.put_many([b"a", b"b"])
    assert [len(drain(reader)) for reader in readers] == [2, 3, 3, 3, 3]
    assert queue.stats().journal_bytes < 70_000
    queue._check()


# LK-F31: the same object again; no default reader beside named ones.
def test_lk_f31_reader(open_queue: Open) -> None:
    queue = open_queue()
    a = queue.reader("a")
    assert queue.reader("a") is a
    for call in (queue.reader, queue.get_nowait, queue.peek, lambda: queue.commit(1), queue.as_blocking_queue):
        with pytest.raises(NoDefaultReader) as caught:
            call()
        assert (caught.value.queue_name, caught.value.readers) == ("jobs", ("a",))
    a.close()
    with pytest.raises(NoDefaultReader):
        queue.reader()
    again = queue.reader("a")
    assert again is not a


# LK-F32: the first named reader is the default one under its new name; open reads stay valid.
def test_lk_f32_the_first_named_reader_takes_over(open_queue: Open, folder: Path) -> None:
    queue, default = filled(open_queue, 4)
    done, held = default.get_nowait(), default.get_nowait()
    done.commit()
    future: list[Future[Any]] = []
    named = queue.reader("a")
    assert named is default
    assert (named.name, named.full_name, named.head) == ("a", "jobs+a", 1)
    assert dict(queue.readers) == {"a": named}
    held.commit()
    assert ids(take_all(named)) == [3, 4]
    future.append(named.get_future())
    queue.put(b"x")
    assert future[0].result(0).id == 5
    second = queue.reader("b")
    assert second.items == 0
    queue.checkpoint()
    assert sorted(path.name for path in folder.glob("*.checkpoint")) == ["jobs+a.checkpoint", "jobs+b.checkpoint"]
    named.commit_many([3, 4, 5])
    let_die(queue)
    with open_queue() as again:
        assert ids(take_all(again.reader("a"))) == [3, 4, 5]
        assert again.reader("b").items == 0


def test_the_default_readers_place_is_taken_over_from_disk_too(open_queue: Open) -> None:
    with open_queue() as queue:
        queue.put_many([b"1", b"2", b"3"])
        queue.get_nowait().commit()
        second = queue.get_nowait()
        second.abort()
    with open_queue() as queue:
        named = queue.reader("a", start="tail")
        assert [(item.id, item.error_count) for item in take_all(named)] == [(2, 1), (3, 0)]


def test_waiters_of_the_default_reader_stay_in_line_when_it_is_renamed(open_queue: Open) -> None:
    queue, default = filled(open_queue, 0)
    future = default.get_future()
    named = queue.reader("a")
    assert named.waiter_count == 1
    queue.put(b"x")
    assert future.result(0).id == 1


def test_the_config_changes_with_the_name(open_queue: Open) -> None:
    limited = ReaderConfig(max_items=1)
    queue, default = filled(open_queue, 2, readers={"a": limited})
    assert queue.reader("a") is default
    assert default.config is limited
    from kestrelpy import QueueFull

    with pytest.raises(QueueFull):
        queue.put(b"x")


# LK-F33: further new ones start where start= says, and have a checkpoint from then on.
@pytest.mark.parametrize(
    ("where", "expected"), [("tail", []), ("earliest", [1, 2, 3]), (2, [2, 3]), (1, [1, 2, 3]), (4, []), (99, [])]
)
def test_lk_f33_start(where: Any, expected: list[int], open_queue: Open, folder: Path) -> None:
    queue, _ = filled(open_queue, 3)
    queue.reader("first")
    reader = queue.reader("new", start=where)
    assert reader.items == len(expected)
    assert (folder / "jobs+new.checkpoint").exists()
    let_die(queue)
    with open_queue() as again:
        reader = again.reader("new", start="earliest")
        again.put(b"4")
        assert ids(take_all(reader)) == [*expected, 4], "start is ignored for one that exists"


def test_start_at_the_tail_does_not_see_what_was_put_before(open_queue: Open) -> None:
    queue = open_queue()
    queue.reader("a")
    queue.put(b"1")
    late = queue.reader("b")
    queue.put(b"2")
    assert ids(take_all(late)) == [2]


@pytest.mark.parametrize("where", ["head", "", 0, -3, 1.5, None, True])
def test_a_wrong_start_makes_no_reader(where: Any, open_queue: Open, folder: Path) -> None:
    queue = open_queue()
    with pytest.raises(ValueError, match="start"):
        queue.reader("a", start=where)
    assert not list(folder.glob("jobs+a*"))


def test_reader_names_follow_the_rule(open_queue: Open, tmp_path: Path) -> None:
    """LK-B12."""
    queue = open_queue()
    for name in ("../x", "a.b", "a/b", "-a", "a+b", "x" * 101):
        with pytest.raises(InvalidName):
            queue.reader(name)
    assert [path.name for path in tmp_path.iterdir()] == ["queues"]


# LK-F35: closes it and forgets its place; unknown: no error; when all are gone the default one may be made again.
def test_lk_f35_drop_reader(open_queue: Open, folder: Path) -> None:
    queue, _ = filled(open_queue, 2)
    a, b = queue.reader("a"), queue.reader("b")
    waiting = b.get_future()
    queue.drop_reader("nobody")
    queue.drop_reader("b")
    assert isinstance(waiting.exception(20), QueueClosed)
    with pytest.raises(QueueClosed):
        b.get_nowait()
    assert dict(queue.readers) == {"a": a}
    assert not list(folder.glob("jobs+b*"))
    assert queue.reader("b", start=1).items == 2, "it is a new one"
    queue.drop_reader("b")
    queue.drop_reader("a")
    default = queue.reader()
    assert ids(take_all(default)) == [1, 2]
    assert (default.name, default.full_name) == ("", "jobs")


def test_a_dropped_reader_holds_no_segments(open_queue: Open) -> None:
    queue = open_queue(segment_bytes=4096)
    a = queue.reader("a")
    queue.reader("b")
    for n in range(20):
        queue.put(b"%02d" % n * 300)
    a.commit_many(take_all(a))
    queue.checkpoint()
    assert queue.stats().segments > 3
    queue.drop_reader("b")
    queue.checkpoint()
    assert queue.stats().segments == 1


# LK-F34: a default reader's place that named ones have superseded goes.
def test_lk_f34_a_left_over_default_checkpoint_goes(open_queue: Open, folder: Path) -> None:
    with open_queue() as queue:
        queue.put(b"x")
        queue.reader()
    data = (folder / "jobs+.checkpoint").read_bytes()
    with open_queue() as queue:
        queue.reader("a")
    (folder / "jobs+.checkpoint").write_bytes(data)
    with open_queue():
        assert not (folder / "jobs+.checkpoint").exists()


def test_a_left_over_default_checkpoint_is_no_place_of_a_reader(open_queue: Open, folder: Path) -> None:
    """Without the opening that would remove it. Who has taken it over says so in each of its states."""
    with open_queue() as queue:
        queue.put_many([b"1", b"2"])
        queue.reader()
    data = (folder / "jobs+.checkpoint").read_bytes()
    for rounds in range(2):
        with open_queue() as queue:
            reader = queue.reader("a")
            reader.get_nowait().commit()
            reader.checkpoint()
            (folder / "jobs+.checkpoint").write_bytes(data)
            with pytest.raises(NoDefaultReader):
                queue.reader()
            with pytest.raises(NoDefaultReader):
                open_reader(folder, "jobs", "", create=True)
        del rounds


def test_a_default_reader_taken_over_in_the_middle_of_a_checkpoint_leaves_no_second_place(start: Any) -> None:
    disk = GatedDisk(MemoryDisk())
    folder = disk.directory("/q", create=True)
    queue = JournaledQueue("/q", "jobs", clock=ManualClock(), disk=disk)
    queue.put_many([b"1", b"2"])
    queue.sync()
    default = queue.reader()
    default.get_nowait().commit()
    queue._registry._files[default].forget()  # the next save makes the file anew
    disk.gate.clear()
    saving = start(default.checkpoint)
    until(lambda: "jobs+.checkpoint.tmp" in folder.names())
    renaming = start(queue.reader, "a")
    until(lambda: queue._registry._opening.locked() or not renaming.is_alive())
    disk.gate.set()
    saving.join(20)
    renaming.join(20)
    assert [name for name in folder.names() if name.endswith(".checkpoint")] == ["jobs+a.checkpoint"]
    queue.close()
    with JournaledQueue("/q", "jobs", clock=ManualClock(), disk=disk) as again:
        assert ids(take_all(again.reader("a"))) == [2]


class NoticingDisk(MemoryDisk):
    """Notes that somebody waits for a lock."""

    waited = False

    def _wait(self) -> None:
        self.waited = True
        super()._wait()


def retiring_at(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """``call`` when a retirement has read the place of every reader here, and has not taken anything yet."""
    real = QueueFiles.lowest_head_of_others

    def lowest(self: QueueFiles, own: set[str], wanted: int, queue_id: bytes) -> int | None:
        found = real(self, own, wanted, queue_id)
        if wanted > 1:
            call()
        return found

    monkeypatch.setattr(QueueFiles, "lowest_head_of_others", lowest)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_seek_back_beside_a_retirement_comes_before_it_or_after_it(
    elsewhere: bool, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, clock, seeking = NoticingDisk(), ManualClock(), list[Any]()
    queue = JournaledQueue("/q", "jobs", clock=clock, disk=disk, segment_bytes=4096, sync="never")
    reader = open_reader("/q", "jobs", "a", clock=clock, disk=disk, create=True) if elsewhere else queue.reader("a")
    for _ in range(20):
        queue.put(bytes(500))
    reader.commit_many(take_all(reader))
    reader.checkpoint(durable=True)

    def seek() -> None:
        if not seeking:
            seeking.append(start(reader.seek, 1))
            until(lambda: disk.waited or not seeking[0].is_alive())

    retiring_at(monkeypatch, seek)
    queue.checkpoint()
    seeking[0].join(20)
    first = next(iter(scan("/q", "jobs", disk=disk))).id
    assert 1 < first <= 20
    assert reader.head == first - 1
    queue.close()
    reader.close()
    assert verify("/q", "jobs", disk=disk).ok
    with JournaledQueue("/q", "jobs", clock=clock, disk=disk) as again:
        assert [item.id for item in take_all(again.reader("a"))] == list(range(first, 21))


def test_a_seek_that_could_not_be_saved_holds_its_segments_too(clock: ManualClock) -> None:
    disk = FailingDisk(MemoryDisk())
    queue = JournaledQueue("/q", "jobs", clock=clock, disk=disk, segment_bytes=4096, sync="never")
    reader = queue.reader("a")
    for _ in range(20):
        queue.put(bytes(500))
    reader.commit_many(take_all(reader))
    reader.checkpoint(durable=True)
    disk.arm(errno.EIO, kinds={"write", "create"}, sticky=True)
    with pytest.raises(OSError, match="Input/output"):
        reader.seek(1)
    disk.disarm()
    assert (reader.head, reader.items) == (0, 20), "it has moved"
    queue._registry.retire(queue._source)
    assert [item.id for item in take_all(reader)] == list(range(1, 21))
    queue.close()


# -- restarts --------------------------------------------------------------------------------------------------------


# LK-F76: open reads are memory only, with the error count unchanged.
@pytest.mark.parametrize("how", ["close", "kill"])
def test_lk_f76_open_reads_come_again(how: str, open_queue: Open) -> None:
    queue, reader = filled(open_queue, 4)
    items = reader.get_many(3)
    items[1].commit()
    items[2].abort()
    items.append(reader.get_nowait())
    assert items[-1].id == 3
    reader.checkpoint()
    if how == "close":
        queue.close()
    else:
        let_die(queue)
    with open_queue() as again:
        assert [(item.id, item.error_count) for item in take_all(again)] == [(1, 0), (3, 1), (4, 0)]


def test_a_closed_reader_gives_its_place_to_the_next_owner(open_queue: Open) -> None:
    queue = open_queue()
    reader = queue.reader("a")
    queue.put_many([b"1", b"2", b"3"])
    first = reader.get_nowait()
    reader.get_nowait().commit()
    waiting = [reader.get_future() for _ in range(2)]
    assert waiting[0].done()
    reader.close()
    reader.close()
    assert isinstance(waiting[1].exception(20), QueueClosed)
    for call in (first.commit, reader.get_nowait, reader.flush):
        with pytest.raises(QueueClosed):
            call()
    again = queue.reader("a")
    assert ids(take_all(again)) == [1, 3]
    assert (again.items, again.bytes) == (2, 2)
    assert queue.put(b"4") == 4
    assert again.get_nowait().id == 4


def test_items_and_bytes_are_exact_as_soon_as_it_is_open(open_queue: Open) -> None:
    queue, reader = filled(open_queue, 30, segment_bytes=4096)
    reader.commit_many(reader.get_many(20)[5:15])
    reader.checkpoint()
    expected = (reader.items, reader.bytes)
    let_die(queue)
    with open_queue() as again:
        reader = again.reader()
        assert (reader.items, reader.bytes) == expected == (20, len(b"12345") + len(b"16") * 15)


def test_checkpoint_saves_what_is_committed(open_queue: Open) -> None:
    queue, reader = filled(open_queue, 5)
    reader.commit_many(reader.get_many(2))
    reader.checkpoint(durable=True)
    reader.get_nowait().commit()
    let_die(queue)
    with open_queue() as again:
        assert ids(take_all(again)) == [3, 4, 5], "commits since the last checkpoint come again"


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_bytes", [0, 1, 1000, 20_000])
def test_a_reader_reads_back_beyond_its_memory(memory_bytes: int, open_queue: Open) -> None:
    queue = open_queue(default_reader=ReaderConfig(memory_bytes=memory_bytes), segment_bytes=65_536)
    reader = queue.reader()
    data = [b"%04d" % n * 25 for n in range(1000)]
    for n, each in enumerate(data):
        queue.put(each)
        if n % 100 == 0:
            assert len(queue._source.shared.entries) * 356 <= max(memory_bytes, 356) + 356
    assert reader.get_nowait().data == data[0]
    assert reader.memory_bytes <= max(memory_bytes, 356) + 356
    assert drain(reader) == data[1:]
    queue.put(b"after")
    assert drain(reader) == [b"after"]
    queue._check()


def test_readers_far_apart_see_the_same(open_queue: Open) -> None:
    queue = open_queue(
        readers={"fast": ReaderConfig(memory_bytes=5000), "slow": ReaderConfig(memory_bytes=2000)}, segment_bytes=4096
    )
    fast, slow = queue.reader("fast"), queue.reader("slow")
    seen: list[bytes] = []
    for n in range(300):
        queue.put(b"%03d" % n)
        with fast.get_nowait() as item:
            seen.append(item.data)
    assert seen == [b"%03d" % n for n in range(300)]
    assert drain(slow) == seen
    queue.put(b"x")
    assert fast.get_nowait().data == slow.get_nowait().data == b"x"
    queue._check()


# -- against a model -------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "many", "get", "commit", "abort", "flush", "seek", "reopen", "kill"]), st.integers(0, 7)
    ),
    max_size=40,
)


@given(STEPS)
@example([("put", 0), ("get", 0), ("abort", 0), ("seek", 0), ("flush", 0), ("seek", 0)])
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_a_reader_does_what_a_list_does(steps: list[tuple[str, int]]) -> None:
    """Unread, open and done, against plain lists; reopened and killed in between, with a checkpoint before each
    kill.
    """
    disk, clock = MemoryDisk(), ManualClock(1)
    queue = JournaledQueue("/q", "jobs", disk=disk, clock=clock, segment_bytes=4096)
    reader = queue.reader()
    unread: dict[int, int] = {}  # id to error count
    opened: dict[int, int] = {}
    tail = 0
    for step, number in steps:
        if step == "put":
            tail = queue.put(bytes(number * 100))
            unread[tail] = 0
        elif step == "many":
            for item_id in queue.put_many([bytes(9)] * number):
                tail = item_id
                unread[item_id] = 0
        elif step == "get" and unread:
            item = reader.get_nowait()
            assert (item.id, item.error_count) == min(unread.items())
            opened[item.id] = unread.pop(item.id)
        elif step == "commit" and opened:
            chosen = sorted(opened)[number % len(opened)]
            reader.commit(chosen)
            del opened[chosen]
        elif step == "abort" and opened:
            chosen = sorted(opened)[number % len(opened)]
            reader.abort(chosen)
            unread[chosen] = opened.pop(chosen) + 1
        elif step == "flush":
            assert reader.flush() == len(unread)
            unread.clear()
        elif step == "seek" and not opened and tail:
            head = reader.head
            first = max(queue._journal.first_id, min(number + head - 3, tail + 1))
            counts = dict(unread)
            reader.seek(number + head - 3)
            unread = {item_id: counts.get(item_id, 0) for item_id in range(first, tail + 1)}
        elif step in ("reopen", "kill"):
            if step == "reopen":
                queue.close()
            else:
                reader.checkpoint()
                dead = queue
                disk.kill()
                dead._status.error = QueueClosed("killed")
            queue = JournaledQueue("/q", "jobs", disk=disk, clock=clock, segment_bytes=4096)
            reader = queue.reader()
            unread |= opened
            opened.clear()
        assert (reader.items, reader.open_items) == (len(unread) + len(opened), len(opened))
        reader._check()
    assert [(item.id, item.error_count) for item in take_all(reader)] == sorted(unread.items())
    queue.close()


# -- places that are lost --------------------------------------------------------------------------------------------


def two_readers(open_queue: Open) -> tuple[JournaledQueue, Reader]:
    """Twenty items in several segments, one reader, and a second one that is closed."""
    queue = open_queue(segment_bytes=4096)
    reader = queue.reader("a")
    queue.reader("b").close()
    for n in range(20):
        queue.put(b"%02d" % n * 300)
    return queue, reader


@pytest.mark.parametrize("then", ["opened", "opened elsewhere", "dropped"])
def test_a_reader_whose_checkpoint_is_gone_still_holds_segments(
    then: str, open_queue: Open, folder: Path, clock: ManualClock, caplog: Any
) -> None:
    queue, reader = two_readers(open_queue)
    (folder / "jobs+b.checkpoint").unlink()
    segments = queue.stats().segments
    assert segments > 3
    reader.commit_many(take_all(reader))
    for _ in range(3):
        queue.checkpoint()
    assert queue.stats().segments == segments
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [
        "checkpoint jobs+b.checkpoint is gone"
    ]
    if then == "dropped":
        queue.drop_reader("b")
        assert not list(folder.glob("jobs+b*"))
    else:
        other = queue.reader("b") if then == "opened" else open_reader(folder, "jobs", "b", clock=clock, create=True)
        assert len(drain(other)) == 20
        other.close()
    clock.advance(5)
    queue.checkpoint()
    assert queue.stats().segments == 1


def test_a_place_that_was_taken_over_is_not_lost(open_queue: Open, folder: Path) -> None:
    with open_queue() as queue:
        queue.reader().close()
    queue, reader = two_readers(open_queue)
    assert (folder / "jobs+.lock").exists()
    queue.drop_reader("b")
    reader.commit_many(take_all(reader))
    queue.checkpoint()
    assert queue.stats().segments == 1


def test_a_reader_that_could_not_be_made_was_never_there(clock: ManualClock) -> None:
    disk = FailingDisk(MemoryDisk())
    with JournaledQueue("/q", "jobs", clock=clock, disk=disk) as queue:
        queue.reader("first")
        queue.put(b"old")
        for kinds in ({"create"}, {"write"}, {"sync"}, {"rename"}):
            disk.arm(errno.ENOSPC, kinds=kinds, sticky=True)
            with pytest.raises(OSError, match="No space left"):
                queue.reader("far", start="tail")
            disk.disarm()
            assert not {"jobs+far.lock", "jobs+far.checkpoint"} & set(disk.directory("/q").names())
        assert queue.reader("far", start="tail").items == 0


def test_a_drop_leaves_a_place_or_nothing() -> None:
    disk = CrashingDisk()
    queue = JournaledQueue("/q", "jobs", disk=disk, clock=ManualClock())
    queue.reader("a")
    queue.put(b"an item")
    states: list[CrashingDisk] = []
    disk.before_operation = lambda: states.append(disk.after_kill())
    queue.drop_reader("a")
    disk.before_operation = None
    queue.close()
    for state in states:
        for seed in range(20):
            names = state.after_power_cut(random.Random(seed), PowerModel.ANY).directory("/q").names()
            assert "jobs+a.lock" not in names or "jobs+a.checkpoint" in names


def test_what_a_dropped_reader_left_unfinished_does_not_bring_it_back(open_queue: Open, folder: Path) -> None:
    with open_queue() as queue:
        queue.reader("a")
    (folder / "jobs+b.checkpoint.tmp").write_bytes(b"left")
    with open_queue():
        assert not list(folder.glob("jobs+b*"))


# -- the end of the queue, meanwhile -----------------------------------------------------------------------------------


def made_at_the_end(queue: JournaledQueue, monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """What becomes of a reader that another thread makes when who ends the queue has looked for its readers: that one
    found the queue open.
    """
    real, said = ReaderRegistry.owned, list[Exception]()

    def owned(self: ReaderRegistry) -> list[Reader]:
        known = real(self)
        monkeypatch.undo()
        with pytest.raises(Exception) as raised:  # noqa: PT011 - who asks says what it must be
            queue._registry.reader("new", "earliest")
        said.append(raised.value)
        return known

    monkeypatch.setattr(ReaderRegistry, "owned", owned)
    return said


def test_a_reader_that_is_made_while_its_queue_is_closed_is_closed(
    open_queue: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = open_queue()
    queue.put(b"1")
    said = made_at_the_end(queue, monkeypatch)
    queue.close()
    assert [type(error) for error in said] == [QueueClosed]
    with open_queue() as again:  # nobody has its lock
        assert drain(again.reader("new", start="earliest")) == [b"1"]


def test_a_reader_that_is_made_while_its_queue_is_erased_leaves_nothing(
    open_queue: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = open_queue()
    queue.put(b"1")
    said = made_at_the_end(queue, monkeypatch)
    queue.erase()
    assert [type(error) for error in said] == [QueueClosed]
    assert list(folder.iterdir()) == []


def test_a_reader_that_is_made_while_a_sync_fails_is_told(clock: ManualClock) -> None:
    disk = FailingDisk(MemoryDisk())
    queue = JournaledQueue("/q", "jobs", disk=disk, clock=clock, sync="never")
    queue.put(b"1")
    disk.arm(errno.EIO, kinds={"sync"})
    with pytest.raises(DurabilityUnknown):
        queue.sync()
    with pytest.raises(DurabilityUnknown):  # whoever had found the queue well a moment before
        queue._registry.reader("new", "earliest")
    assert "new" not in queue.readers
    open_reader("/q", "jobs", "new", disk=disk, clock=clock, create=True).close()
    queue.close()


def test_a_reader_that_can_not_be_made_beside_one_that_closes(
    open_queue: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_queue() as queue:
        first, second = queue.reader("a"), queue.reader("b")
        lock, stands, goes_on = queue._registry._locks[second], threading.Event(), threading.Event()
        release = lock.release

        def stand() -> None:
            release()
            stands.set()
            assert goes_on.wait(PATIENCE)

        class Looked(Checkpointer):
            @property
            def is_closed(self) -> bool:
                if stands.is_set() and not goes_on.is_set():
                    goes_on.set()
                    closer.join(PATIENCE)
                return super().is_closed

        monkeypatch.setattr(lock, "release", stand)
        first._checkpointer.__class__ = Looked
        closer = threading.Thread(target=second.close)
        closer.start()
        assert stands.wait(PATIENCE)
        with pytest.raises(NoDefaultReader):  # and no RuntimeError, of a dictionary that has changed meanwhile
            queue.reader()
        assert goes_on.is_set()
        assert set(queue.readers) == {"a"}


def test_a_place_is_not_saved_any_more_when_its_reader_was_released(
    open_queue: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, opened = ReaderRegistry.save, list[JournaledQueue]()

    def save(self: ReaderRegistry, *arguments: Any) -> None:
        opened[0].close()  # in another thread
        real(self, *arguments)

    monkeypatch.setattr(ReaderRegistry, "save", save)
    opened.append(open_queue())
    with pytest.raises(QueueClosed):
        opened[0].reader("new")


def test_a_reader_that_is_closed_while_another_is_made_is_not_listed(
    open_queue: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = open_queue()
    closing = threading.Thread(target=queue.reader("a").close)
    real = ReaderRegistry._set_open

    def set_open(self: ReaderRegistry, readers: dict[str, Reader]) -> None:
        monkeypatch.undo()
        closing.start()
        closing.join(0.2)  # as far as it comes
        real(self, readers)

    monkeypatch.setattr(ReaderRegistry, "_set_open", set_open)
    queue.reader("b")
    closing.join()
    assert list(queue.readers) == ["b"]
    assert queue.reader("a").items == 0


def test_a_close_beside_that_of_the_queue_loses_no_commit(open_queue: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, reader = filled(open_queue, 3)
    reader.commit_many(reader.get_many(3))
    real = Dispatcher.fail_waiting

    def breaks(self: Dispatcher, *arguments: Any) -> None:
        monkeypatch.undo()
        real(self, *arguments)
        queue.close()  # in another thread, before the reader's own close saves its place

    monkeypatch.setattr(Dispatcher, "fail_waiting", breaks)
    reader.close()
    with open_queue() as again:
        assert again.reader().items == 0


def test_a_close_that_comes_after_the_reader_has_parted_is_no_trouble(
    open_queue: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, reader = filled(open_queue, 3)
    reader.commit_many(reader.get_many(3))
    real = Checkpointer.save_last

    def save_last(self: Checkpointer, *arguments: Any) -> None:
        monkeypatch.undo()
        reader.close()  # in another thread, when the queue has seen that it is open
        real(self, *arguments)

    monkeypatch.setattr(Checkpointer, "save_last", save_last)
    queue.close()
    with open_queue() as again:
        assert again.reader().items == 0


@pytest.mark.parametrize("waits", [lambda queue: queue.reader().seek(1), lambda queue: queue.reader("named")])
def test_who_waits_for_the_guard_keeps_nobody_from_saving(
    open_queue: Open, folder: Path, waits: Callable[[JournaledQueue], object]
) -> None:
    """It may be another process's for long, which was stopped."""
    queue, reader = filled(open_queue, 2)
    guard = RealDisk().directory(str(folder)).lock("jobs.readers.lock")
    asked = threading.Event()
    real = QueueFiles.guard

    def asks(self: QueueFiles, **options: Any) -> Any:
        asked.set()
        return real(self, **options)

    with patch.object(QueueFiles, "guard", asks):
        thread = threading.Thread(target=waits, args=(queue,))
        thread.start()
        assert asked.wait(PATIENCE)
        reader.commit(reader.get())
        saving = threading.Thread(target=reader.checkpoint)
        saving.start()
        saving.join(PATIENCE)
        is_held_up = saving.is_alive()
        guard.release()
        thread.join()
    assert not is_held_up
    saving.join()


def test_a_seek_of_a_queue_that_is_closed_meanwhile_says_so(open_queue: Open) -> None:
    queue, reader = filled(open_queue, 2)
    real = QueueFiles.guard

    def guard(self: QueueFiles, **options: Any) -> Any:
        queue.close()
        return real(self, **options)

    with patch.object(QueueFiles, "guard", guard), pytest.raises(QueueClosed):
        reader.seek(1)


def test_two_that_release_a_lock_release_it_once(folder: Path) -> None:
    directory = RealDisk().directory(str(folder), create=True)
    for _ in range(200):
        lock = directory.lock("a.lock")
        threads = [threading.Thread(target=lock.release) for _ in range(2)]
        failed: list[object] = []
        with patch.object(threading, "excepthook", failed.append):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert failed == []
        assert lock.is_current(), "it was not taken away"
    directory.close()


# -- flushing what is not there ----------------------------------------------------------------------------------------


def test_a_flush_of_a_reader_that_is_ahead_of_its_queue_drops_nothing() -> None:
    """It was in another process, which sees what is not on disk yet."""
    disk, few = MemoryDisk(), {"far": ReaderConfig(max_items=5)}
    options: dict[str, Any] = {"disk": disk, "clock": ManualClock()}
    with JournaledQueue("/q", "jobs", sync="always", readers=few, **options) as queue:
        for _ in range(5):
            queue.put_future(b"12345")
        far = open_reader("/q", "jobs", "far", create=True, start="earliest", **options)
        items = far.get_many(5)
        far.commit_many(items[:1] + items[2:])  # one by one, and behind what is open
        far.close()
        reader = queue.reader("far")
        assert (reader.items, reader.bytes) == (0, 0)
        assert reader.flush() == 0
        queue.sync()
        assert (reader.items, reader.bytes) == (1, 5)
        assert reader.flush() == 1
        assert (reader.items, reader.bytes) == (0, 0)
        reader._check()
    with JournaledQueue("/q", "jobs", readers=few, **options) as queue:
        assert queue.reader("far").items == 0
        assert queue.put(b"6") == 6


def test_a_flush_whose_place_could_not_be_saved_has_made_room(clock: ManualClock) -> None:
    disk = FailingDisk(MemoryDisk())
    few = ReaderConfig(max_items=1, full_policy=FullPolicy.BLOCK)
    with JournaledQueue("/q", "jobs", disk=disk, clock=clock, default_reader=few) as queue:
        reader = queue.reader()
        queue.put(b"1")
        queue.sync()
        rung: list[object] = []
        disk.arm(errno.EIO, kinds={"open", "write", "create", "rename"}, sticky=True)
        with (
            patch.object(queue._source, "_moved", lambda: rung.append(None)),
            pytest.raises(OSError, match="Input/output error"),
        ):
            reader.flush()
        disk.disarm()
        assert rung == [None]
        assert reader.items == 0


@pytest.mark.parametrize("take", [Reader.get_nowait, Reader.peek])
def test_what_has_expired_before_an_item_that_cannot_be_read_is_shown_to_its_hook(
    clock: ManualClock, take: Callable[[Reader], object]
) -> None:
    disk, shown = FailingDisk(MemoryDisk()), list[int]()
    config = ReaderConfig(on_expired=lambda item: shown.append(item.id), memory_bytes=300, max_items=2)
    options: dict[str, Any] = {"disk": disk, "clock": clock, "default_reader": config}
    with JournaledQueue("/q", "jobs", **options) as queue:
        queue.put(b"x", expires_in=1)
        queue.put(b"y" * 300_000)
    with JournaledQueue("/q", "jobs", **options) as queue:
        reader = queue.reader()
        reader.abort(reader.get_nowait())  # it is in memory, and the next one is not
        clock.advance(5)
        disk.arm(errno.EIO, kinds={"read"})
        with pytest.raises(OSError, match="Input/output error"):
            take(reader)
        item = reader.get_nowait()
        assert (item.id, shown) == (2, [1])
        reader.commit(item)
        assert reader.items == 0
        reader._check()


# -- the end of a block ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end",
    [
        lambda queue: queue.close(),
        lambda queue: queue.reader().close(),
        lambda queue: queue.drop_reader(""),
        lambda queue: queue.erase(),
    ],
)
def test_a_block_whose_item_was_taken_away_says_so(open_queue: Open, end: Callable[[JournaledQueue], None]) -> None:
    queue, reader = filled(open_queue, 1)
    with pytest.raises(QueueClosed), reader.get():
        end(queue)


@pytest.mark.parametrize("end", [lambda queue, item: queue.close(), lambda queue, item: queue.seek(1)])
@pytest.mark.parametrize("settle", [lambda item: item.commit(), lambda item: item.abort()])
def test_a_block_that_has_settled_its_item_ends_as_it_likes(
    open_queue: Open, settle: Callable[[Item], None], end: Callable[[JournaledQueue, Item], None]
) -> None:
    queue, reader = filled(open_queue, 1)
    with reader.get() as item:
        settle(item)
    with contextlib.suppress(QueueEmpty), reader.get(timeout=0) as item:
        settle(item)
        if item.error_count:
            end(queue, item)


def test_a_block_that_raises_raises_that(open_queue: Open) -> None:
    queue, reader = filled(open_queue, 1)

    def leave() -> None:
        with reader.get():
            queue.close()
            raise KeyError

    with pytest.raises(KeyError):
        leave()


def test_entering_a_block_runs_no_line_of_ours(open_queue: Open) -> None:
    """An interrupt before the first one would leave an open read that nobody has."""
    _, reader = filled(open_queue, 1)
    item, called = reader.get(), list[str]()
    before = sys.gettrace()
    sys.settrace(lambda frame, event, _: called.append(frame.f_code.co_name))
    entered = item.__enter__()
    sys.settrace(before)
    assert entered is item
    assert called == []


# -- what nobody closes, and what is not there -------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_nobody_closes_keeps_no_descriptor(folder: Path) -> None:
    def leave_all() -> None:
        queue = JournaledQueue(folder, "jobs", inbox_interval=None)
        queue.put(b"1")
        open_reader(folder, "jobs", "far", create=True)
        PartWriter(folder, "jobs").add([b"2"])
        queue._ending._cancel_timers()

    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    leave_all()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_warning_about_a_queue_may_be_put_into_it(open_queue: Open, folder: Path) -> None:
    few = {"absent": ReaderConfig(max_items=1_000)}
    with open_queue() as queue:
        queue.reader("absent")
    (folder / "jobs+absent.checkpoint").write_bytes(b"no state")
    queue = open_queue(readers=few)

    class IntoTheQueue(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            queue.put(record.getMessage().encode())

    handler = IntoTheQueue()
    logging.getLogger("kestrelpy").addHandler(handler)
    try:
        thread = threading.Thread(target=queue._registry.update_limits, daemon=True)
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive()
    finally:
        logging.getLogger("kestrelpy").removeHandler(handler)


def test_a_reader_that_closes_limits_puts_while_its_place_cannot_be_read(open_queue: Open) -> None:
    disk = FailingDisk(MemoryDisk())
    limit = ReaderConfig(max_items=2, full_policy=FullPolicy.REFUSE)
    queue = open_queue(disk=disk, readers={"mail": limit}, inbox_interval=None)
    mail = queue.reader("mail")
    future = mail.get_future()
    answers: list[type | None] = []

    def put(_: object = None) -> None:
        try:
            queue.put_many([b"1", b"2"])
            answers.append(None)
        except QueueFull as error:
            answers.append(type(error))

    queue.put(b"0")
    assert future.result(0).data == b"0"
    mail.get_future().add_done_callback(put)
    disk.arm(errno.EMFILE, kinds={"open", "create"}, sticky=True)
    with pytest.raises(OSError, match="Too many open files"):
        mail.close()
    queue.put(b"x")
    put()
    assert answers == [QueueFull, QueueFull]
    disk.disarm()
    with pytest.raises(QueueFull):
        queue.put(b"4")
    assert drain(queue.reader("mail")) == [b"0", b"x"]
    queue.put(b"4")


def test_figures_have_the_segments_that_could_not_be_archived(open_queue: Open, tmp_path: Path) -> None:
    queue = open_queue(segment_bytes=4096, archive_dir=tmp_path / "archive")
    reader = queue.reader()
    with patch.object(Journal, "dispose", side_effect=OSError(errno.ENOSPC, "no room there")):
        for _ in range(10):
            queue.put(bytes(2000))
            reader.commit(reader.get())
        with pytest.raises(OSError, match="no room there"):
            queue.checkpoint()
        stats = queue.stats()
        there = inspect(queue.directory, "jobs").segments
    assert stats.segments == len(there) > 3
    assert stats.journal_bytes > 4 * 4096
    assert f"jobs.{stats.oldest_segment}.segment" == there[0].name
    queue.checkpoint()
    assert queue.stats().segments == 1


@pytest.mark.parametrize("take", ["get_nowait", "peek"])
def test_r13_an_interrupted_item_that_cannot_be_read_is_an_error_once_it_is_the_only_one(
    take: str, open_queue: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are delivered before it. After them, "there is no item" would be false: it is there, and counted."""
    queue = open_queue()
    queue.put_many([b"1", b"2", b"3"])
    reader = queue.reader()
    reader.get_nowait().commit()
    backlog = checkpointer_of(reader).backlog
    with backlog.lock:  # as an interrupt leaves it that strikes after a get has taken item 2
        backlog.take_next()
        backlog.disturbed, backlog.fast = True, False

    def unreadable(*_: object) -> None:
        raise OSError(errno.EIO, "unreadable")

    with monkeypatch.context() as patched:
        patched.setattr(LocalSource, "read", unreadable)
        reader.get_nowait().commit()
        with pytest.raises(OSError, match="unreadable"):
            getattr(reader, take)()
        assert reader.items == 1
    assert getattr(reader, take)().data == b"2"
    reader._check()
