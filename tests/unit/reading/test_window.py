"""The shared window: what readers find in it, above all batches, which stay together until somebody reads them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kestrelpy import Item, JournaledQueue, QueueEmpty, Reader, ReaderConfig, UnknownItem
from kestrelpy._reading.backlog import EXPANDED
from kestrelpy._reading.window import Window
from kestrelpy._writing.put_path import LARGE_BATCH
from kestrelpy.testing import ManualClock
from tests.support.queues import START_MS

Open = Callable[..., JournaledQueue]


def batch(count: int, first: int = 1) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


def ids(items: list[Item]) -> list[int]:
    return [item.id for item in items]


def before_a_batch(queue: JournaledQueue) -> Reader:
    """The queue's reader, which shares the window since it has read item 1; items 2 to 601 wait as one batch."""
    reader = queue.reader()
    queue.put(b"1")
    reader.get().commit()
    queue.put_many(batch(600, 2))
    return reader


def check_items(items: list[Item], first: int, count: int) -> None:
    """Those of ``batch(count, first)``, with all their fields."""
    assert ids(items) == list(range(first, first + count))
    assert [item.data for item in items] == batch(count, first)
    assert {(item.added_ms, item.expires_ms, item.error_count) for item in items} == {(START_MS, None, 0)}


def test_a_batch_stays_together_until_it_is_read(open_queue: Open) -> None:
    queue = open_queue()
    reader = queue.reader()
    assert queue.put(b"1") == 1
    assert reader.get().id == 1  # it shares the window from here on
    queue.put_many(batch(1000, 2))
    assert list(queue._source.shared.batches) == [2]
    assert not queue._source.shared.entries
    queue._check()
    check_items(reader.get_many(2000), 2, 1000)
    assert not queue._source.shared.batches
    queue._check()
    assert reader.stats().opened == 1001


@pytest.mark.parametrize("step", [1, 7, LARGE_BATCH, EXPANDED - 1, EXPANDED, EXPANDED + 1, 999, 1000, 1500])
def test_batches_and_single_items_come_in_order_whatever_is_taken_at_once(open_queue: Open, step: int) -> None:
    queue = open_queue()
    reader = queue.reader()
    queue.put(b"1")
    reader.get().commit()
    queue.put_many(batch(1000, 2))
    queue.put(b"1002")
    queue.put_many(batch(LARGE_BATCH - 1, 1003))
    queue.put_many(batch(LARGE_BATCH, 1002 + LARGE_BATCH))
    last = 1001 + 2 * LARGE_BATCH
    taken = 1
    while taken < last:
        items = [reader.get()] if step == 1 else reader.get_many(step)
        check_items(items, taken + 1, min(step, last - taken))
        reader._check()
        taken += len(items)
        reader.commit_many(items)
    with pytest.raises(QueueEmpty):
        reader.get_nowait()
    assert (reader.head, reader.items, reader.bytes) == (last, 0, 0)


def test_a_batch_is_cut_where_max_bytes_says(open_queue: Open) -> None:
    queue = open_queue()
    reader = queue.reader()
    queue.put(b"")
    reader.get().commit()
    queue.put_many([b"x" * 10] * 1000)
    assert len(reader.get_many(1000, max_bytes=10 * EXPANDED + 95)) == EXPANDED + 9
    assert len(reader.get_many(1000, max_bytes=5)) == 1
    assert len(reader.get_many(1000)) == 1000 - EXPANDED - 10
    reader._check()


def test_several_readers_share_a_batch(open_queue: Open) -> None:
    queue = open_queue()
    first, second = queue.reader("first", start="earliest"), queue.reader("second", start="earliest")
    queue.put(b"1")
    for reader in (first, second):
        reader.get().commit()
    queue.put_many(batch(600, 2))
    check_items(first.get_many(300), 2, 300)
    check_items([second.get() for _ in range(400)], 2, 400)
    assert list(queue._source.shared.batches) == [2]
    check_items(first.get_many(1000), 302, 300)
    check_items(second.get_many(1000), 402, 200)
    queue._check()


def test_a_reader_that_comes_later_begins_in_the_middle_of_a_batch(open_queue: Open) -> None:
    queue = open_queue()
    first = queue.reader("first", start="earliest")
    queue.put(b"1")
    first.get().commit()
    queue.put_many(batch(600, 2))
    second = queue.reader("second", start=300)
    check_items(second.get_many(1000), 300, 302)
    check_items(first.get_many(1000), 2, 600)
    queue._check()


def test_seeking_back_into_a_batch_and_out_of_it(open_queue: Open) -> None:
    reader = before_a_batch(open_queue())
    check_items(reader.get_many(100), 2, 100)
    reader.seek(50)
    check_items(reader.get_many(20), 50, 20)
    reader.seek(590)
    check_items([reader.get() for _ in range(12)], 590, 12)
    reader.seek(2)
    check_items(reader.get_many(1000), 2, 600)
    reader._check()


def test_items_of_a_batch_that_come_back_come_first(open_queue: Open) -> None:
    reader = before_a_batch(open_queue())
    items = reader.get_many(500)
    items[3].abort()
    assert reader.peek().id == 5
    assert ids(reader.get_many(10)) == [5, *range(502, 511)]
    with pytest.raises(UnknownItem):
        reader.commit_many([items[0], items[0]])
    with pytest.raises(UnknownItem):
        reader.commit_many([items[3]])
    reader.commit_many([item for item in items if item.id != 5])
    reader._check()


def test_max_age_holds_for_the_items_of_a_batch(open_queue: Open, clock: ManualClock) -> None:
    reader = before_a_batch(open_queue(default_reader=ReaderConfig(max_age=10)))
    check_items(reader.get_many(300), 2, 300)
    clock.advance(10)
    with pytest.raises(QueueEmpty):
        reader.get_nowait()
    assert reader.stats().expired == 300


def test_a_batch_counts_where_memory_is_bounded(open_queue: Open) -> None:
    queue = open_queue(default_reader=ReaderConfig(memory_bytes=100_000))
    reader = queue.reader()
    queue.put(b"1")
    reader.get().commit()
    queue.put_many([b"x" * 1000] * 50)
    assert reader.memory_bytes == 0
    reader.get()
    assert 49 * 1000 < reader.memory_bytes < 49 * 1500
    for _ in range(20):
        queue.put_many([b"x" * 1000] * 50)
    assert not queue._source.shared.is_open, "more than memory_bytes waits"
    assert len(reader.get_many(2000)) == 21 * 50 - 1
    assert reader.memory_bytes == 0
    queue._check()


def test_a_batch_in_hand_is_let_go_when_it_is_read(open_queue: Open) -> None:
    queue = open_queue()
    reader = before_a_batch(queue)
    reader.get_many(600)
    with pytest.raises(QueueEmpty):
        reader.get_nowait()
    assert reader._backlog.batch is None
    queue.put_many(batch(600, 602))
    reader.get()
    reader.close()
    assert reader._backlog.batch is None


def test_nothing_of_a_batch_is_seen_before_it_is_on_disk(open_queue: Open) -> None:
    queue = open_queue(sync="always")
    reader = queue.reader()
    queue.put(b"1")
    reader.get().commit()
    queue.put_many(batch(100, 2))
    assert not queue._source.shared.batches, "items that wait for the disk are held one by one"
    check_items(reader.get_many(1000), 2, 100)


def test_a_window_forgets_what_all_readers_are_past() -> None:
    window = Window()
    window.resize(100_000)
    window.restart()
    for first in (1, 11, 21):
        window.batches[first] = (first, [b"x"] * 10, START_MS)
    assert window.batch_of(1) == window.batch_of(10) == window.batches[1]
    assert window.batch_of(11) == window.batches[11]
    assert window.batch_of(31) is None
    window.trim([15, 21])
    assert list(window.batches) == [11, 21]
    assert window.is_open
    window.restart()
    assert not window.batches
