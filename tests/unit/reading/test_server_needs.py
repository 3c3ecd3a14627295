"""What a queue server needs of a reader: changed limits, limits without open reads, peeking futures, dropping by id."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrelpy import (
    FullPolicy,
    Item,
    JournaledQueue,
    QueueClosed,
    QueueEmpty,
    QueueFull,
    ReaderConfig,
    UnknownItem,
    open_reader,
)
from kestrelpy.testing import ManualClock, MemoryDisk
from tests.support.patience import until

Open = Callable[..., JournaledQueue]
PATIENCE = 5.0


def data(items: list[Item]) -> list[bytes]:
    return [item.data for item in items]


def rest(queue: JournaledQueue) -> list[bytes]:
    """All that is still delivered."""
    return data(queue.get_many(1000, timeout=0)) if queue.reader().items > queue.reader().open_items else []


# -- abort(counts=False) -----------------------------------------------------------------------------------------------


def test_an_item_that_nobody_has_seen_goes_back_uncounted(open_queue: Open) -> None:
    shown: list[Item] = []
    queue = open_queue(default_reader=ReaderConfig(on_abort=lambda item: bool(shown.append(item))))  # type: ignore[func-returns-value]
    queue.put_many([b"a", b"b", b"c"])
    first, second = queue.get(), queue.get()
    second.abort(counts=False)
    queue.abort(first.id, counts=False)
    with pytest.raises(UnknownItem):
        queue.abort(first.id, counts=False)
    with pytest.raises(UnknownItem):
        first.abort(counts=False)
    assert shown == []
    again = queue.get_many(3, timeout=0)
    assert [(item.data, item.error_count) for item in again] == [(b"a", 0), (b"b", 0), (b"c", 0)]
    stats = queue.reader().stats()
    assert (stats.aborted, stats.opened) == (0, 3)
    queue.reader()._check()


def test_an_uncounted_abort_goes_to_who_waits(open_queue: Open) -> None:
    queue = open_queue()
    queue.put(b"a")
    item = queue.get()
    future = queue.get_future(timeout=None)
    item.abort(counts=False)
    assert future.result(PATIENCE).data == b"a"


# -- counts_open -------------------------------------------------------------------------------------------------------


def test_open_reads_make_room_if_they_do_not_count(open_queue: Open) -> None:
    queue = open_queue(default_reader=ReaderConfig(max_items=2, counts_open=False))
    queue.put_many([b"a", b"b"])
    with pytest.raises(QueueFull):
        queue.put(b"c")
    first = queue.get()
    queue.put(b"c")
    with pytest.raises(QueueFull):
        queue.put(b"d")
    first.abort()  # three wait now: more than the limit
    with pytest.raises(QueueFull):
        queue.put(b"d")
    assert rest(queue) == [b"a", b"b", b"c"]


def test_bytes_of_open_reads_do_not_count_either(open_queue: Open) -> None:
    queue = open_queue(default_reader=ReaderConfig(max_bytes=10, counts_open=False))
    queue.put(b"x" * 9)
    queue.put(b"y" * 100)  # one item may go beyond the limit
    with pytest.raises(QueueFull):
        queue.put(b"z")
    assert [len(item.data) for item in queue.get_many(2)] == [9, 100]
    queue.put(b"z" * 5)
    queue.put(b"z" * 5)
    with pytest.raises(QueueFull):
        queue.put(b"z")


def test_a_get_rings_a_producer_if_open_reads_do_not_count(open_queue: Open) -> None:
    config = ReaderConfig(max_items=1, counts_open=False, full_policy=FullPolicy.BLOCK)
    queue = open_queue(default_reader=config)
    queue.put(b"a")
    ids: list[int] = []
    producer = threading.Thread(target=lambda: ids.append(queue.put(b"b", timeout=PATIENCE)))
    producer.start()
    until(lambda: len(queue._room) == 1)
    item = queue.get()
    producer.join(PATIENCE)
    assert ids == [2]
    item.abort()
    assert rest(queue) == [b"a", b"b"]


def test_drop_oldest_leaves_open_reads_out(open_queue: Open) -> None:
    config = ReaderConfig(max_items=2, counts_open=False, full_policy=FullPolicy.DROP_OLDEST)
    queue = open_queue(default_reader=config)
    queue.put_many([b"a", b"b"])
    opened = queue.get_many(2)
    queue.put(b"c")
    queue.put(b"d")
    queue.put(b"e")
    assert rest(queue) == [b"d", b"e"]
    assert queue.reader().stats().discarded == 1
    queue.commit_many(opened)


def test_a_reader_that_is_not_open_counts_all_that_comes_again(tmp_path: Path) -> None:
    config = ReaderConfig(max_items=2, counts_open=False)
    with JournaledQueue(tmp_path, "q", readers={"a": config}) as queue:
        reader = queue.reader("a")
        queue.put_many([b"a", b"b"])
        reader.get_many(2)
        queue.put(b"c")
        reader.close()
        with pytest.raises(QueueFull):
            queue.put(b"d")


# -- configure ---------------------------------------------------------------------------------------------------------


def test_limits_of_an_open_reader_change(open_queue: Open) -> None:
    queue = open_queue()
    queue.put_many([b"a", b"b", b"c"])
    reader = queue.reader()
    reader.configure(ReaderConfig(max_items=3))
    assert reader.config.max_items == 3
    with pytest.raises(QueueFull, match="max_items=3"):
        queue.put(b"d")
    reader.configure(ReaderConfig(max_items=4))
    queue.put(b"d")
    reader.configure(ReaderConfig())
    queue.put_many([b"e"] * 10)


def test_a_changed_age_holds_for_what_is_queued(open_queue: Open) -> None:
    clock = ManualClock(1_700_000_000_000)
    expired: list[bytes] = []
    queue = open_queue(clock=clock)
    queue.put(b"old")
    clock.advance(10)
    queue.put(b"new")
    queue.reader().configure(ReaderConfig(max_age=5, on_expired=lambda item: expired.append(item.data)))
    assert queue.get(timeout=0).data == b"new"
    assert expired == [b"old"]


def test_drop_oldest_drops_at_once(open_queue: Open) -> None:
    queue = open_queue()
    queue.put_many([b"a", b"b", b"c"])
    queue.reader().configure(ReaderConfig(max_items=1, full_policy=FullPolicy.DROP_OLDEST))
    assert rest(queue) == [b"c"]


def test_a_producer_that_waits_sees_the_new_limit(open_queue: Open) -> None:
    queue = open_queue(default_reader=ReaderConfig(max_items=1, full_policy=FullPolicy.BLOCK))
    queue.put(b"a")
    ids: list[int] = []
    producer = threading.Thread(target=lambda: ids.append(queue.put(b"b", timeout=PATIENCE)))
    producer.start()
    until(lambda: len(queue._room) == 1)
    queue.reader().configure(ReaderConfig(max_items=2, full_policy=FullPolicy.BLOCK))
    producer.join(PATIENCE)
    assert ids == [2]


def test_the_configuration_stays_while_the_queue_is_open(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "q") as queue:
        reader = queue.reader("a")
        reader.configure(ReaderConfig(max_items=1))
        queue.put(b"a")
        reader.close()
        with pytest.raises(QueueFull):
            queue.put(b"b")
        assert queue.reader("a").config.max_items == 1
        with pytest.raises(QueueClosed):
            reader.configure(ReaderConfig())
    with JournaledQueue(tmp_path, "q") as queue:
        assert queue.reader("a").config.max_items is None


def test_only_a_configuration_is_taken(open_queue: Open) -> None:
    nothing: Any = {"max_items": 1}
    with pytest.raises(TypeError, match="must be a ReaderConfig"):
        open_queue().reader().configure(nothing)


def test_a_reader_in_another_process_is_configured_too(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "q", sync="always") as queue:
        queue.reader("mine")
        reader = open_reader(tmp_path, "q", "theirs", create=True, start="earliest")
        try:
            queue.put_many([b"a", b"b"])
            reader.configure(ReaderConfig(max_age=0))
            with pytest.raises(QueueEmpty):
                reader.get(timeout=0)
        finally:
            reader.close()


# -- peek_future -------------------------------------------------------------------------------------------------------


def test_a_future_that_peeks_leaves_the_item(open_queue: Open) -> None:
    queue = open_queue()
    waiting = queue.peek_future()
    taking = queue.get_future()
    queue.put(b"a")
    assert waiting.result(PATIENCE).data == b"a"
    item = taking.result(PATIENCE)
    assert item.data == b"a"
    assert queue.reader().open_items == 1
    item.abort()
    assert queue.peek_future().result(0).data == b"a"  # at once
    assert queue.reader().open_items == 0
    queue.reader()._check()


def test_a_future_that_peeks_in_vain(open_queue: Open) -> None:
    clock = ManualClock(0)
    queue = open_queue(clock=clock)
    future = queue.peek_future(timeout=2)
    at_once = queue.peek_future(timeout=0)
    clock.advance(3)
    for each in (future, at_once):
        with pytest.raises(QueueEmpty):
            each.result(PATIENCE)
    cancelled = queue.peek_future()
    assert cancelled.cancel()
    assert queue.reader().waiter_count == 0
    with pytest.raises(ValueError, match="timeout"):
        queue.peek_future(timeout=-1)


# -- discard -----------------------------------------------------------------------------------------------------------


def test_items_are_dropped_by_id(open_queue: Open) -> None:
    queue = open_queue()
    queue.put_many([b"1", b"2", b"3", b"4", b"5", b"6", b"7"])
    one, two, three = queue.get_many(3)
    one.commit()
    three.abort()
    reader = queue.reader()
    assert reader.discard([1, 2, 3, 5, 6, 99, 0, -4, 5]) == 3  # done, open, aborted, two unread, and no items
    assert reader.stats().discarded == 3
    assert reader.items == 3
    assert reader.discard([]) == reader.discard([3, 5]) == 0
    with pytest.raises(TypeError, match="expected an item or its id, not str"):
        reader.discard(["1"])  # type: ignore[list-item]
    reader._check()
    assert rest(queue) == [b"4", b"7"]
    two.commit()
    assert reader.items == 2


def test_what_was_dropped_does_not_come_after_a_restart(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "q") as queue:
        queue.put_many([b"%d" % number for number in range(1, 21)])
        assert queue.reader().discard(range(5, 15)) == 10
    with JournaledQueue(tmp_path, "q") as queue:
        assert queue.reader().discard([1, 20]) == 2
        assert rest(queue) == [b"2", b"3", b"4", b"15", b"16", b"17", b"18", b"19"]


def test_many_are_dropped_quickly(open_queue: Open) -> None:
    queue = open_queue()
    for _ in range(10):
        queue.put_many([b"x"] * 10_000)
    assert queue.reader().discard(range(2, 100_001)) == 99_999
    assert queue.reader().items == 1
    assert queue.reader().bytes == 1


def test_dropping_makes_room(open_queue: Open) -> None:
    queue = open_queue(default_reader=ReaderConfig(max_items=2, full_policy=FullPolicy.BLOCK))
    queue.put_many([b"a", b"b"])
    ids: list[int] = []
    producer = threading.Thread(target=lambda: ids.append(queue.put(b"c", timeout=PATIENCE)))
    producer.start()
    until(lambda: len(queue._room) == 1)
    assert queue.reader().discard([1]) == 1
    producer.join(PATIENCE)
    assert ids == [3]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_ids_in_any_state(choices: st.DataObject) -> None:
    """Against a model: gets, commits, aborts and drops of any ids, over many segments."""
    with JournaledQueue("d", "q", disk=MemoryDisk(), segment_bytes=4096, inbox_interval=None) as queue:
        reader = queue.reader()
        unread: list[int] = []
        opened: list[int] = []
        for _ in range(choices.draw(st.integers(1, 25))):
            step = choices.draw(st.sampled_from(["put", "get", "commit", "abort", "discard", "save"]))
            if step == "put":
                count = choices.draw(st.integers(1, 30))
                unread += queue.put_many([b"%0100d" % number for number in range(count)])
            elif step == "get" and unread:
                assert reader.get(timeout=0).id == unread[0]
                opened.append(unread.pop(0))
            elif step == "commit" and opened:
                reader.commit(opened.pop(choices.draw(st.integers(0, len(opened) - 1))))
            elif step == "abort" and opened:
                item_id = opened.pop(choices.draw(st.integers(0, len(opened) - 1)))
                reader.abort(item_id, counts=choices.draw(st.booleans()))
                unread = sorted([*unread, item_id])
            elif step == "discard":
                ids = choices.draw(st.sets(st.integers(-1, 200), max_size=30))
                assert reader.discard(ids) == len(ids & set(unread))
                unread = [item_id for item_id in unread if item_id not in ids]
            elif step == "save":
                reader.checkpoint()
            reader._check()
            assert (reader.items, reader.open_items) == (len(unread) + len(opened), len(opened))
            assert reader.bytes == 100 * reader.items
        got = [reader.get(timeout=0).id for _ in unread]
        assert got == unread


def test_items_are_discarded_as_ids_are(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "q") as queue:
        queue.put_many([b"one", b"two", b"three"])
        assert queue.discard([queue.peek(), 2]) == 2
        assert queue.get_nowait().data == b"three"
