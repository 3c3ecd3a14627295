"""Aborts with a delay: when an item is due, who is woken, and what else sees of it; and items that die."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import Item, JournaledQueue, QueueEmpty, Reader, ReaderConfig, open_reader
from kestrelpy._reading.delays import Delays
from kestrelpy._reading.reader import checkpointer_of
from kestrelpy._reading.window import Requeued
from kestrelpy.testing import ManualClock, MemoryDisk
from kestrelpy.work import WorkQueue

Open = Callable[..., JournaledQueue]
SECOND = ReaderConfig(retry_delay=1.0)


def ids_of(reader: Reader | JournaledQueue) -> list[int]:
    """The ids that a reader gets now; their reads stay open."""
    try:
        return [item.id for item in reader.get_many(100, timeout=0)]
    except QueueEmpty:
        return []


def filled(open_queue: Open, count: int, config: ReaderConfig = SECOND, **options: Any) -> JournaledQueue:
    queue = open_queue(default_reader=config, **options)
    for at in range(count):
        queue.put(b"%d" % at)
    return queue


# -- the delay ---------------------------------------------------------------------------------------------------------


def test_an_aborted_item_is_not_due_before_its_delay(open_queue: Open, clock: ManualClock) -> None:
    queue = filled(open_queue, 3)
    queue.get().abort()
    assert ids_of(queue) == [2, 3]
    clock.advance(0.999)
    assert ids_of(queue) == []
    clock.advance(0.001)
    item = queue.get(False)
    assert (item.id, item.error_count) == (1, 1)
    queue._check()


def test_the_call_overrides_the_configuration(open_queue: Open, clock: ManualClock) -> None:
    queue = filled(open_queue, 3)
    queue.abort(queue.get(), 0)
    assert queue.peek().id == 1
    queue.reader().abort(1 if queue.get().id == 1 else 0, delay=5)
    clock.advance(4)
    assert ids_of(queue) == [2, 3]
    clock.advance(1)
    assert ids_of(queue) == [1]


def test_of_those_that_are_due_the_lowest_id_goes_first(open_queue: Open, clock: ManualClock) -> None:
    queue = filled(open_queue, 6, ReaderConfig())
    items = queue.get_many(5, timeout=0)
    for item, delay in zip(items, (3, 1, 2, 0, 1), strict=True):
        item.abort(delay)
    assert [item.id for item in (queue.get(False), queue.get(False))] == [4, 6]
    clock.advance(2)
    assert ids_of(queue) == [2, 3, 5]
    clock.advance(1)
    assert ids_of(queue) == [1]


def test_the_delay_is_a_function_of_the_error_count(open_queue: Open, clock: ManualClock) -> None:
    counts: list[int] = []

    def double(error_count: int) -> float:
        counts.append(error_count)
        return float(2**error_count)

    queue = filled(open_queue, 1, ReaderConfig(retry_delay=double))
    for wait in (2, 4, 8):
        queue.get(False).abort()
        clock.advance(wait - 0.5)
        assert ids_of(queue) == []
        clock.advance(0.5)
    assert counts == [1, 2, 3]


@pytest.mark.parametrize("result", [-1.0, float("inf"), float("nan"), "soon", None, ZeroDivisionError()])
def test_a_function_that_gives_no_delay_is_logged(
    open_queue: Open, result: object, caplog: pytest.LogCaptureFixture
) -> None:
    def delay(error_count: int) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    queue = filled(open_queue, 1, ReaderConfig(retry_delay=delay))
    with caplog.at_level(logging.ERROR, "kestrelpy"):
        queue.get(False).abort()
    assert queue.get(False).error_count == 1
    assert "retry_delay of reader jobs gave no delay" in caplog.text


@pytest.mark.parametrize("delay", [-1, float("inf"), float("nan")])
def test_a_delay_that_is_none_is_refused(open_queue: Open, delay: float) -> None:
    queue = filled(open_queue, 1)
    item = queue.get()
    with pytest.raises(ValueError, match="delay must"):
        item.abort(delay)
    with pytest.raises(ValueError, match="retry_delay must"):
        ReaderConfig(retry_delay=delay)
    with pytest.raises(TypeError):
        item.abort("1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="reason must be a str"):
        item.abort(reason=1)  # type: ignore[arg-type]
    item.commit()


def test_it_is_due_at_once_after_an_opening(open_queue: Open) -> None:
    queue = filled(open_queue, 2)
    queue.get().abort()
    queue.close()
    queue = open_queue(default_reader=SECOND)
    item = queue.get(False)
    assert (item.id, item.error_count) == (1, 1)


def test_counts_false_has_no_delay(open_queue: Open) -> None:
    queue = filled(open_queue, 1)
    queue.get().abort(counts=False)
    assert queue.get(False).error_count == 0


# -- who waits ---------------------------------------------------------------------------------------------------------


def test_a_future_is_served_when_an_item_is_due(open_queue: Open, clock: ManualClock) -> None:
    queue = filled(open_queue, 1)
    queue.get().abort()
    future, peeked = queue.get_future(), queue.peek_future()
    clock.advance(0.5)
    assert not future.done()
    clock.advance(0.5)
    assert future.result(0).id == 1
    assert not peeked.done()
    future.result(0).abort(delay=0)
    assert peeked.result(0).id == 1


def test_a_thread_that_waits_is_woken(open_queue: Open, clock: ManualClock) -> None:
    queue = filled(open_queue, 1)
    queue.get().abort()
    got: list[Item] = []
    thread = threading.Thread(target=lambda: got.append(queue.get(timeout=30)))
    thread.start()
    while not queue.reader().waiter_count:
        thread.join(0.001)
    clock.advance(1)
    thread.join(30)
    assert [item.id for item in got] == [1]


def test_a_task_is_woken(open_queue: Open, clock: ManualClock) -> None:
    queue = filled(open_queue, 1)
    queue.get().abort()

    async def wait() -> int:
        task = asyncio.ensure_future(queue.aget())
        await asyncio.sleep(0)
        clock.advance(1)
        return (await task).id

    assert asyncio.run(wait()) == 1


def test_a_reader_elsewhere_delays_too(folder: Path, clock: ManualClock) -> None:
    disk = MemoryDisk()
    with JournaledQueue("/q", "jobs", disk=disk, clock=clock) as queue:
        queue.put_many([b"a", b"b"])
        queue.sync()
        far = open_reader("/q", "jobs", "far", config=SECOND, create=True, start="earliest", disk=disk, clock=clock)
        far.get().abort()
        assert ids_of(far) == [2]
        future = far.get_future()
        clock.advance(1.1)
        assert future.result(0).id == 1
        far._check()
        far.close()


def test_without_a_thread_for_the_timer_each_get_looks(open_queue: Open, clock: ManualClock) -> None:
    queue = filled(open_queue, 3)
    item = queue.get()
    with patch.object(clock, "call_later", side_effect=RuntimeError("can't start new thread")):
        item.abort()
    assert not queue.reader()._backlog.fast
    clock.advance(1)
    assert ids_of(queue) == [1, 2, 3]


# -- what else sees of it ----------------------------------------------------------------------------------------------


def test_figures_with_a_delayed_item(open_queue: Open, clock: ManualClock) -> None:
    queue = filled(open_queue, 2)
    clock.advance(10)
    queue.put(b"young")
    queue.get().abort()
    reader = queue.reader()
    assert (reader.items, reader.open_items, reader.bytes) == (3, 0, 7)
    assert queue.as_blocking_queue().qsize() == 3
    assert queue.peek().id == 2
    ids_of(queue)
    assert reader.age == 0.0
    with pytest.raises(QueueEmpty):
        queue.peek()
    assert reader.memory_bytes > 0
    clock.advance(1)
    assert reader.age == 11.0


def test_flush_drops_it_and_seek_forgets_the_delay(open_queue: Open, clock: ManualClock) -> None:
    queue = filled(open_queue, 3)
    queue.get().abort()
    queue.seek(1)
    assert ids_of(queue) == [1, 2, 3]
    queue.reader().abort(1)
    assert queue.flush() == 1
    clock.advance(1)
    assert ids_of(queue) == []
    queue._check()


@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_a_clock_that_is_set_changes_no_delay(open_queue: Open, clock: ManualClock, seconds: float) -> None:
    queue = filled(open_queue, 1)
    queue.get().abort(delay=10)
    clock.jump(seconds)
    clock.advance(9)
    assert ids_of(queue) == []
    clock.advance(1)
    assert ids_of(queue) == [1]


def test_discard_finds_it_and_leaves_the_delay_of_others(open_queue: Open, clock: ManualClock) -> None:
    queue = filled(open_queue, 3)
    for item in queue.get_many(2, timeout=0):
        item.abort()
    assert queue.discard([1]) == 1
    assert ids_of(queue) == [3]
    clock.advance(1)
    assert ids_of(queue) == [2]


def test_a_skip_leaves_the_delay_of_what_is_after_it(open_queue: Open, clock: ManualClock) -> None:
    queue = filled(open_queue, 3)
    for item in queue.get_many(3):
        item.abort(10)
    assert checkpointer_of(queue.reader()).skip_to(2) == 1
    assert ids_of(queue) == []
    waiting = queue.get_future(timeout=None)
    clock.advance(10)
    assert waiting.result(30).id == 2
    assert ids_of(queue) == [3]


def test_it_expires_when_it_is_due(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue(default_reader=SECOND)
    queue.put(b"a", expires_in=0.5)
    queue.get().abort()
    clock.advance(0.6)
    assert queue.discard_expired() == 0
    clock.advance(0.4)
    assert queue.discard_expired() == 1
    assert queue.reader().items == 0


def test_other_gets_stay_on_the_fast_path(open_queue: Open) -> None:
    queue = filled(open_queue, 3)
    queue.get().abort()
    assert queue.reader()._backlog.fast


def test_an_interrupted_abort_loses_no_item(open_queue: Open) -> None:
    queue = filled(open_queue, 2)
    item = queue.get()
    with patch.object(Delays, "arm_locked", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        item.abort()
    queue._check()
    assert sorted([*ids_of(queue), *queue.reader()._backlog.requeued.entries]) == [1, 2]


def test_requeued_keeps_order_and_due_times() -> None:
    requeued = Requeued()
    entry = (b"", 0, None)
    requeued.add(3, entry, 10.0)
    assert not requeued
    assert len(requeued) == 1
    assert requeued.next_due() == 10.0
    requeued.add(5, entry)
    assert requeued
    assert requeued.first() == (5, entry)
    assert not requeued.ripen(9.9)
    assert requeued.ripen(10.0)
    assert requeued.first() == (3, entry)
    assert requeued.next_due() is None
    requeued.add(4, entry, 11.0)
    del requeued.entries[4]
    requeued.forget_gone()
    assert requeued.next_due() is None
    assert requeued


# -- dead items --------------------------------------------------------------------------------------------------------


def test_without_a_queue_for_them_dead_items_are_dropped(
    open_queue: Open, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    queue = filled(open_queue, 4, ReaderConfig(max_deliveries=1))
    with caplog.at_level(logging.WARNING, "kestrelpy"):
        for _ in range(3):
            queue.get().abort(reason="it is broken")
        clock.advance(60)
        queue.get().abort()
    stats = queue.stats().readers[""]
    assert (stats.dead, stats.aborted, stats.items, stats.committed) == (4, 4, 0, 0)
    first, second = [record.getMessage() for record in caplog.records]
    assert first == "reader jobs: item 1 has failed 1 times and is dropped: it is broken"
    assert second == "reader jobs: item 4 has failed 1 times and is dropped, and 2 before it: no reason"


def test_the_hook_comes_first(open_queue: Open) -> None:
    seen: list[tuple[int, int]] = []

    def on_abort(item: Item) -> bool:
        seen.append((item.id, item.error_count))
        return item.id == 1

    queue = filled(open_queue, 2, ReaderConfig(max_deliveries=1, on_abort=on_abort))
    for item in queue.get_many(2, timeout=0):
        item.abort()
    assert seen == [(1, 1), (2, 1)]
    assert queue.stats().readers[""].dead == 1


def test_ctrl_c_makes_no_item_dead(open_queue: Open) -> None:
    queue = filled(open_queue, 1, ReaderConfig(max_deliveries=1))
    with pytest.raises(KeyboardInterrupt), queue.get():
        raise KeyboardInterrupt
    item = queue.get(False)
    assert item.error_count == 1
    with pytest.raises(ZeroDivisionError), item:
        raise ZeroDivisionError
    assert queue.reader().items == 0


def test_a_crash_is_no_failure(open_queue: Open) -> None:
    config = ReaderConfig(max_deliveries=1)
    queue = filled(open_queue, 1, config)
    for _ in range(3):
        assert queue.get(False).error_count == 0
        queue.close()
        queue = open_queue(default_reader=config)
    assert queue.reader().items == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_deliveries": 0}, ValueError),
        ({"max_deliveries": 1.5}, TypeError),
        ({"dead_letter": 1}, TypeError),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        ReaderConfig(**options)


async def later(_: int) -> float:
    return 1.0


@pytest.mark.parametrize("wrong", [lambda: 3, lambda one, two: 3, later])
def test_a_function_that_can_not_be_asked_is_refused_where_it_is_given(wrong: Any) -> None:
    with pytest.raises(TypeError, match="retry_delay"):
        ReaderConfig(retry_delay=wrong)
    with pytest.raises(TypeError, match="retry_delay"):
        WorkQueue(None, retry_delay=wrong)


def test_a_function_of_c_is_taken() -> None:
    """One that says what it takes, and one that does not."""
    for function in (math.sqrt, int):
        assert ReaderConfig(retry_delay=function).retry_delay is function
