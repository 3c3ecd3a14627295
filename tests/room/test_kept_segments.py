"""``keep_for`` and ``keep_bytes``: what all readers have done stays readable for some time."""

from __future__ import annotations

import pytest

from kestrelpy import JournaledQueue, scan, verify
from kestrelpy._journal.retention import Retention
from tests.room.rooms import ITEM, SEGMENT, Rooms, drain, feed


def consumed(rooms: Rooms, count: int = 30, **options: object) -> JournaledQueue:
    """A queue with ``count`` items, one put each second and all committed at once after the last."""
    queue = rooms.open(**options)
    feed(queue, count, each=1, clock=rooms.clock)
    drain(queue, count)
    queue.checkpoint()
    return queue


def first_kept(queue: JournaledQueue) -> int:
    """The earliest id to which a reader can go back."""
    queue.seek(1)
    item = queue.get(block=False)
    item.abort(counts=False)
    return item.id


def test_without_options_nothing_is_kept(rooms: Rooms) -> None:
    queue = consumed(rooms)
    assert queue.stats().segments == 1
    queue.close()


def test_r41_a_segment_stays_for_keep_for_after_its_last_item_and_not_longer(rooms: Rooms) -> None:
    queue = consumed(rooms, keep_for=100.0)  # at second 30; segments end with the seconds 2, 5, 8 ...
    rooms.clock.advance(100 + 2 - 30 - 1)
    assert first_kept(queue) == 1, "the first segment is 99 seconds old"
    drain(queue, 30)
    rooms.clock.advance(2)
    assert first_kept(queue) == 4
    queue.close()


def test_keep_bytes_counts_what_is_consumed_and_the_oldest_go_first(rooms: Rooms) -> None:
    queue = consumed(rooms, keep_bytes=3 * SEGMENT)
    sizes = [segment.size for segment in queue._journal.segments[:-1]]
    assert sum(sizes) <= 3 * SEGMENT < sum(sizes) + max(sizes)
    assert first_kept(queue) == 31 - 3 - 3 * len(sizes), "the newest segment is not counted, and always stays"
    queue.close()


def test_what_a_reader_has_not_done_is_not_counted_and_stays(rooms: Rooms) -> None:
    queue = rooms.open(keep_bytes=0, keep_for=0.0)
    feed(queue, 30)
    drain(queue, 4)
    queue.checkpoint()
    assert queue.get(block=False).id == 5
    assert first_kept(queue) == 4
    queue.close()


def test_both_bounds_count(rooms: Rooms) -> None:
    queue = consumed(rooms, keep_for=1000.0, keep_bytes=2 * SEGMENT)
    assert queue.stats().segments == 3
    rooms.clock.advance(1002)
    assert queue.stats().segments == 1
    queue.close()


def test_a_reader_begins_at_the_oldest_kept_item_here_and_elsewhere(rooms: Rooms) -> None:
    queue = consumed(rooms, keep_bytes=4 * SEGMENT)
    oldest = first_kept(queue)
    here = queue.reader("here", start="earliest")
    assert here.get(block=False).id == oldest
    elsewhere = rooms.elsewhere(name="there")
    assert elsewhere.get(block=False).id == oldest
    elsewhere.seek(31)
    elsewhere.seek(oldest + 1)
    assert elsewhere.get(block=False).id == oldest + 1
    elsewhere.close()
    queue.close()


def test_scan_and_verify_see_what_is_kept(rooms: Rooms) -> None:
    queue = consumed(rooms, keep_bytes=4 * SEGMENT)
    oldest = first_kept(queue)
    assert [record.id for record in scan("/q", "jobs", disk=rooms.disk)] == list(range(oldest, 31))
    queue.close()
    report = verify("/q", "jobs", disk=rooms.disk)
    assert report.ok
    assert report.items == 31 - oldest


def test_a_kept_segment_that_a_reader_goes_back_to_is_needed_again(rooms: Rooms) -> None:
    queue = consumed(rooms, keep_for=100.0)
    queue.seek(8)
    rooms.clock.jump(1000)
    rooms.look()
    assert drain(queue, 23) == list(range(8, 31)), "it is not kept any more, and still needed"
    queue.checkpoint()
    assert queue.stats().segments == 1
    queue.close()


def test_the_age_is_that_of_the_items_also_after_a_restart(rooms: Rooms) -> None:
    consumed(rooms, keep_for=100.0).close()
    rooms.clock.advance(60)
    queue = rooms.open(keep_for=100.0)
    assert first_kept(queue) == 1
    queue.seek(31)
    queue.close()
    rooms.clock.advance(20)
    queue = rooms.open(keep_for=100.0)
    queue.put(ITEM)  # the segment of the life before is not the newest any more
    rooms.look()
    assert first_kept(queue) == 13, "at second 111 the segments go whose last items were put up to second 11"
    queue.close()


def test_a_queue_that_is_opened_with_less_to_keep_keeps_less_at_once(rooms: Rooms) -> None:
    consumed(rooms, keep_for=1e9).close()
    assert len(rooms.names()) == 10
    rooms.open(keep_bytes=2 * SEGMENT).close()
    assert len(rooms.names()) == 3


def test_nothing_gets_old_while_the_clock_is_behind(rooms: Rooms) -> None:
    queue = consumed(rooms, keep_for=100.0)
    rooms.clock.jump(-(10**6))
    rooms.clock.advance(500)
    assert first_kept(queue) == 1
    queue.close()


def test_a_clock_that_was_ahead_keeps_nothing_for_years(rooms: Rooms) -> None:
    queue = rooms.open(keep_for=100.0)
    feed(queue, 3)
    rooms.clock.jump(10**9)
    feed(queue, 6)
    rooms.clock.jump(1 - 10**9)
    feed(queue, 6, each=1, clock=rooms.clock)
    drain(queue, 15)
    rooms.clock.advance(200)
    assert queue.stats().segments == 1
    queue.close()


def test_flush_and_erase_are_as_ever(rooms: Rooms) -> None:
    queue = rooms.open(keep_for=1e9)
    feed(queue, 30)
    assert queue.flush() == 30
    queue.checkpoint()
    assert first_kept(queue) == 1
    queue.erase()
    assert rooms.names() == []


def test_a_queue_in_memory_keeps_too(rooms: Rooms) -> None:
    queue = consumed(rooms, keep_bytes=3 * SEGMENT, journaled=False)
    assert first_kept(queue) > 1
    assert queue.stats().segments == 4
    queue.close()


class _Old:
    def __init__(self, size: int, max_added_ms: int) -> None:
        self.size, self.max_added_ms = size, max_added_ms


@pytest.mark.parametrize(
    ("retention", "excess", "count"),
    [
        (Retention(), 0, 4),
        (Retention(keep_for=5.0), 0, 2),
        (Retention(keep_for=0.0), 0, 4),
        (Retention(keep_for=float("inf")), 0, 0),
        (Retention(keep_bytes=10**9), 0, 0),
        (Retention(keep_bytes=399), 0, 1),
        (Retention(keep_bytes=400), 0, 0),
        (Retention(keep_bytes=0), 0, 4),
        (Retention(keep_for=5.0, keep_bytes=100), 0, 3),
        (Retention(keep_for=8.0), 101, 2),
        (Retention(keep_for=8.0), 10**9, 4),
    ],
)
def test_how_many_are_due(retention: Retention, excess: int, count: int) -> None:
    """At second 10 there are four segments of 100 bytes, put up to the seconds 3, 5, 7, and one without an item."""
    segments = [_Old(100, 3000), _Old(100, 5000), _Old(100, 7000), _Old(100, 0)]
    after = [_Old(100, 9000)]
    if retention.keep_for == 0:
        after = [_Old(100, 10_000)]
    assert retention.count_due(segments, 10_000, following=after, excess=excess) == count
