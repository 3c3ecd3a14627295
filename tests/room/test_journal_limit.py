"""``max_journal_bytes``: a journal that does not fill the disk."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import FullPolicy, JournaledQueue, QueueFull, ReaderConfig
from kestrelpy.inbox import PartWriter, pending, publish
from tests.room.rooms import ITEM, SEGMENT, Rooms, drain, feed

LIMIT = 4 * SEGMENT


def fill(queue: JournaledQueue) -> int:
    """Put until the queue is full; how many items."""
    count, full = 0, None
    while full is None:
        try:
            queue.put(ITEM)
            count += 1
        except QueueFull as error:
            full = error
        assert count < 10_000, "there is no limit"
    assert full.reader is None
    assert f"max_journal_bytes={queue._journal.growth.max_bytes:,}" in str(full)
    return count


def test_r42_a_put_that_would_make_the_journal_larger_is_refused(rooms: Rooms) -> None:
    queue = rooms.open(max_journal_bytes=LIMIT)
    assert fill(queue) >= 9
    stats = queue.stats()
    assert LIMIT - SEGMENT < stats.journal_bytes <= LIMIT
    with pytest.raises(QueueFull):
        queue.put_many([ITEM, ITEM])
    with pytest.raises(QueueFull):
        queue.put_future(ITEM)
    with pytest.raises(QueueFull):
        asyncio.run(queue.aput(ITEM))
    assert queue.stats().tail_id == stats.tail_id, "nothing was stored"
    queue.close()


def test_the_limit_counts_what_the_stats_say_and_the_disk_has(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "jobs", segment_bytes=1 << 20, max_journal_bytes=2 << 20, sync="never") as queue:
        for _ in range(3):
            fill(queue)
            size = sum(path.stat().st_size for path in tmp_path.glob("*.segment"))
            assert size == queue.stats().journal_bytes <= 2 << 20
            drain(queue, queue.reader().items)
            queue.put(ITEM)


def test_what_may_go_goes_first(rooms: Rooms) -> None:
    queue = rooms.open(max_journal_bytes=LIMIT)
    count = fill(queue)
    drain(queue, 4)
    assert queue.put(ITEM) == count + 1, "without waiting for the maintenance"
    assert queue.stats().journal_bytes <= LIMIT
    queue.close()


def test_kept_segments_go_before_a_put_is_refused(rooms: Rooms) -> None:
    queue = rooms.open(max_journal_bytes=LIMIT, keep_for=1e9, keep_bytes=1 << 40)
    for _ in range(40):
        queue.put(ITEM)
        drain(queue, 1)
        assert queue.stats().journal_bytes <= LIMIT
    queue.seek(1)
    assert 20 < queue.get(block=False).id <= 30, "no more went than had to"
    assert queue.stats().segments >= 3
    queue.close()


def test_r42_everything_consumed_is_room_for_any_put(rooms: Rooms) -> None:
    """Also where the newest segments are batches of the largest size that is accepted."""
    queue = rooms.open(max_journal_bytes=2 * SEGMENT)
    most = [b"y" * 250] * 15
    for batch in (most, most, most, [ITEM], most, [ITEM] * 3, most):
        ids = queue.put_many(batch)
        drain(queue, len(ids))
    queue.close()


def test_a_batch_that_never_fits_is_refused_at_once(rooms: Rooms) -> None:
    config = ReaderConfig(max_items=1000, full_policy=FullPolicy.BLOCK)
    queue = rooms.open(max_journal_bytes=LIMIT, default_reader=config)
    with pytest.raises(QueueFull, match="never fit"):
        queue.put_many([ITEM] * 9, timeout=None)
    queue.put_many([ITEM] * 7)
    queue.close()


def test_a_put_with_a_timeout_waits_for_room(rooms: Rooms) -> None:
    queue = rooms.open(max_journal_bytes=LIMIT)
    count = fill(queue)
    with pytest.raises(QueueFull):
        queue.put(ITEM, timeout=0.01)
    ids: list[int] = []
    thread = threading.Thread(target=lambda: ids.append(queue.put(ITEM, timeout=60)))
    thread.start()
    while not queue._room:
        thread.join(0.001)
    assert drain(queue, 4) == [1, 2, 3, 4]
    thread.join(60)
    assert ids == [count + 1]
    queue.close()


def test_a_task_waits_too(rooms: Rooms) -> None:
    queue = rooms.open(max_journal_bytes=LIMIT)
    count = fill(queue)

    async def scene() -> int:
        task = asyncio.create_task(queue.aput(ITEM, timeout=60))
        while not queue._room:
            await asyncio.sleep(0)
        drain(queue, 4)
        return await task

    assert asyncio.run(asyncio.wait_for(scene(), 60)) == count + 1
    queue.close()


def test_many_threads_at_the_limit_lose_nothing(rooms: Rooms) -> None:
    queue = rooms.open(max_journal_bytes=LIMIT)
    seen: list[int] = []

    def produce() -> None:
        for _ in range(50):
            queue.put(ITEM, timeout=60)

    threads = [threading.Thread(target=produce) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(seen) < 200:
        with queue.get(timeout=60) as item:
            seen.append(item.id)
    for thread in threads:
        thread.join()
    assert seen == list(range(1, 201))
    assert queue.stats().journal_bytes <= LIMIT
    queue.close()


def test_a_journal_that_is_larger_already_opens_and_refuses(rooms: Rooms) -> None:
    queue = rooms.open()
    feed(queue, 30)
    queue.close()
    queue = rooms.open(max_journal_bytes=LIMIT)
    assert queue.stats().journal_bytes > LIMIT
    fill(queue)
    drain(queue, 30)
    queue.put(ITEM)
    assert queue.stats().journal_bytes <= LIMIT
    queue.close()


def test_segments_that_the_archive_has_no_room_for_are_counted(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = rooms.open(max_journal_bytes=LIMIT, archive_dir="/a")
    fill(queue)
    monkeypatch.setattr(queue._journal, "dispose", _no_room)
    drain(queue, 9)
    with pytest.raises(QueueFull):
        feed(queue, 100)
    assert len(queue._registry.undisposed) > 0
    assert LIMIT - SEGMENT < queue.stats().journal_bytes <= LIMIT
    monkeypatch.undo()
    queue.put(ITEM)
    queue.close()


def _no_room(_: object) -> None:
    raise OSError(28, "no room")


def test_batches_stay_in_the_inbox(tmp_path: Path) -> None:
    options: dict[str, Any] = {"segment_bytes": SEGMENT, "max_journal_bytes": LIMIT, "inbox_interval": None}
    with JournaledQueue(tmp_path, "jobs", **options) as queue:
        count = fill(queue)
        with PartWriter(tmp_path, "jobs") as writer:
            writer.add([ITEM] * 5)
            part = writer.seal()
        publish(tmp_path, "jobs", [part])
        assert queue.take_in() == 0
        assert pending(tmp_path, "jobs") == 1
        drain(queue, count)
        assert queue.take_in() == 5
        assert queue.stats().journal_bytes <= LIMIT
        assert drain(queue, 5) == list(range(count + 1, count + 6))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("max_journal_bytes", 2 * SEGMENT - 1, ValueError),
        ("max_journal_bytes", 0, ValueError),
        ("max_journal_bytes", -1, ValueError),
        ("max_journal_bytes", 1.5, TypeError),
        ("keep_bytes", -1, ValueError),
        ("keep_bytes", True, TypeError),
        ("keep_for", -1.0, ValueError),
        ("keep_for", float("nan"), ValueError),
        ("keep_for", "1", TypeError),
    ],
)
def test_the_least_and_the_types(rooms: Rooms, name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        rooms.open(**{name: value})


def test_a_batch_has_no_room_while_a_reader_is_too_far_behind(rooms: Rooms) -> None:
    """Whatever the journal itself may take."""
    queue = rooms.open()
    feed(queue, 1)
    journal = queue._source.journal
    assert journal.growth.has_room(journal, 1)
    journal.growth.max_total = 0
    assert not journal.growth.has_room(journal, 1)
    journal.growth.max_total = journal.total_bytes
    assert journal.growth.has_room(journal, 1)
    queue.close()
