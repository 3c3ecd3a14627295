"""What the hot paths rely on.

1. Code that is written out instead of being called does what its original does. A copy is marked ``# HOT COPY of
   NAME``, and held equal by a test of this module. So each mark is named in ``COPIES``.
2. Objects on a hot path have slots, or at most 29 attributes: the 30th takes an object out of the layout that the
   interpreter shares between the objects of a class, which makes each access slower (measured: 5 to 7% of a put).
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import JournaledQueue, Reader, ReaderConfig, UnknownItem
from kestrelpy._journal import format as fmt
from kestrelpy._reading.progress import Progress
from kestrelpy._reading.reader import checkpointer_of
from kestrelpy.item import Item
from kestrelpy.memory import ConcurrentBlockingQueue, SimpleBlockingQueue
from kestrelpy.testing import ManualClock, MemoryDisk
from kestrelpy.work import WorkQueue
from tests.support.paths import ROOT

LIBRARY = ROOT / "kestrelpy"
MARK = re.compile(r"# HOT COPY of ([\w.]*\w)")
COPIES = {
    ("queue.py", "Journal.append"): 1,
    ("_journal/journal.py", "format.encode_item"): 1,
    ("_writing/put_path.py", "PutPath._append_locked"): 1,
    ("_reading/reader.py", "Item"): 1,
    ("_reading/reader.py", "Progress.release"): 1,
    ("_reading/dispatch.py", "Reader.get"): 1,
    ("_reading/backlog.py", "Item"): 2,
    ("work/queue.py", "Turn"): 1,
    ("work/queue.py", "records.encode_put"): 1,
    ("work/job.py", "Turn"): 1,
    ("work/session.py", "Turn"): 1,
}
"""Where each copy is, of what, and how many of it there are."""


def test_every_copy_is_marked_and_named_here() -> None:
    found: Counter[tuple[str, str]] = Counter()
    for path in LIBRARY.rglob("*.py"):
        for name in MARK.findall(path.read_text("utf-8")):
            found[path.relative_to(LIBRARY).as_posix(), name] += 1
    assert dict(found) == COPIES


# -- puts ------------------------------------------------------------------------------------------------------------

ITEMS = [b"", b"x", b"y" * 100, b"z" * 1000, b"w" * 3000]
"""Sizes that fit a segment, fill it, and begin the next one."""


def short(queue: JournaledQueue, data: bytes) -> int:
    assert queue._status.fast
    return queue.put(data)


def plain(queue: JournaledQueue, data: bytes) -> int:
    return queue._puts._store_plain(data)[0]


def slow(queue: JournaledQueue, data: bytes) -> int:
    source = queue._source
    with source.lock:
        return queue._puts._append_locked([data], None, None)[0]


def stored(put: Callable[[JournaledQueue, bytes], int]) -> dict[str, Any]:
    """All that is known of a queue after some puts, in memory and on disk."""
    disk, clock = MemoryDisk(), ManualClock(1_700_000_000_000)
    seeded = random.Random(7).randbytes
    with patch("os.urandom", seeded), JournaledQueue("/q", "jobs", disk=disk, clock=clock, segment_bytes=4096) as queue:
        reader = queue.reader()
        ids = []
        for number, data in enumerate(ITEMS * 3):
            clock.advance(0.001 * (number % 2))  # within a millisecond, and not
            ids.append(put(queue, data))
        window, journal = queue._source.shared, queue._journal
        return {
            "ids": ids,
            "end": journal._at,
            "window": dict(window.entries),
            "left": window.left,
            "visible": (queue._source.visible_id, queue._source.visible_bytes, reader.items, reader.bytes),
            "armed": queue._status.sync_armed,
            "segments": [(each.number, each.first_id, each.items, each.data_bytes) for each in journal.segments],
            "files": {name: disk.directory("/q").open(name).read(0, 4096) for name in names_of(disk)},
        }


def names_of(disk: MemoryDisk) -> list[str]:
    return sorted(name for name in disk.directory("/q").names() if name.endswith(".segment"))


@pytest.mark.parametrize("copy", [short, plain])
def test_a_put_stores_the_same_whichever_way_it_goes(copy: Callable[[JournaledQueue, bytes], int]) -> None:
    assert stored(copy) == stored(slow)


def test_a_frame_is_the_same_whoever_makes_it() -> None:
    disk, clock = MemoryDisk(), ManualClock(1_700_000_000_000)
    with JournaledQueue("/q", "jobs", disk=disk, clock=clock, sync="never") as queue:
        for data in ITEMS:
            item_id = queue._journal.append(data, 1_700_000_000_000)
            frame = fmt.encode_item(
                item_id, data, 1_700_000_000_000, None, queue._journal.durable_id, queue._journal._marker
            )
            end = queue._journal._at[0]
            (name,) = names_of(disk)
            assert disk.directory("/q").open(name).read(end - len(frame), len(frame)) == frame


# -- gets ------------------------------------------------------------------------------------------------------------


def by_get(reader: Reader) -> Item:
    assert reader._backlog.fast
    return reader.get(timeout=0)


def at_hand(reader: Reader) -> Item:
    """Where it has to be read back first, nothing is at hand."""
    dispatcher, count = checkpointer_of(reader).dispatcher, reader._backlog.opened_count
    item = dispatcher.get_at_hand()
    assert item is not None or not count, "only the first one had to be read back"
    return item or dispatcher.get(False, None)


def the_long_way(reader: Reader) -> Item:
    return checkpointer_of(reader).dispatcher.get(False, None)


def of_many(reader: Reader) -> Item:
    (item,) = reader.get_many(1, timeout=0)
    return item


def behind_one(reader: Reader) -> Item:
    """By the loop that takes more, behind an item that is put back."""
    first, second = reader.get_many(2, timeout=0)
    checkpointer_of(reader).dispatcher.unget(first)
    return second


def seen(item: Item, reader: Reader) -> tuple[object, ...]:
    assert item._owner is reader
    assert reader.is_open(item)
    return item.id, item.data, item.added_ms, item.expires_ms, item.error_count


@pytest.mark.parametrize("in_batches", [False, True])
@pytest.mark.parametrize("take", [by_get, at_hand, of_many])
def test_an_item_is_the_same_whoever_takes_it(take: Callable[[Reader], Item], in_batches: bool) -> None:
    left, right = taken(take, in_batches), taken(the_long_way, in_batches)
    assert left == right


def taken(take: Callable[[Reader], Item], in_batches: bool) -> list[object]:
    clock = ManualClock(1_700_000_000_000)
    with JournaledQueue("/q", "jobs", disk=MemoryDisk(), clock=clock) as queue:
        reader = queue.reader()
        if in_batches:
            queue.put_many([b"%d" % number for number in range(20)])
        else:
            for number in range(20):
                queue.put(b"%d" % number)
        result: list[object] = [seen(take(reader), reader) for _ in range(20)]
        backlog = reader._backlog
        reader._check()
        return [*result, backlog.progress.next_id, backlog.opened_count, sorted(backlog.opened), reader.stats()]


def test_items_behind_the_first_one_are_the_same() -> None:
    with JournaledQueue("/q", "jobs", disk=MemoryDisk(), clock=ManualClock(1_700_000_000_000)) as queue:
        reader = queue.reader()
        for number in range(4):
            queue.put(b"%d" % number)
        queue.put_many([b"4", b"5", b"6"])
        assert seen(behind_one(reader), reader) == (2, b"1", 1_700_000_000_000, None, 0)
        many = reader.get_many(10, timeout=0)
        assert [item.id for item in many] == [1, 3, 4, 5, 6, 7]
        assert {seen(item, reader)[2:] for item in many} == {(1_700_000_000_000, None, 0)}


# -- commits ---------------------------------------------------------------------------------------------------------


def state(progress: Progress) -> tuple[object, ...]:
    return (
        progress.head,
        sorted(progress.done),
        progress.done_spans(),
        progress.released_items,
        progress.released_bytes,
        progress.error_counts,
        progress.next_id,
    )


@pytest.mark.parametrize("order", list(itertools.permutations(range(1, 5))))
def test_a_commit_releases_as_progress_does(order: tuple[int, ...]) -> None:
    clock = ManualClock(1_700_000_000_000)
    with JournaledQueue("/q", "jobs", disk=MemoryDisk(), clock=clock, default_reader=ReaderConfig()) as queue:
        reader = queue.reader()
        for size in range(4):
            queue.put(b"x" * size)
        reader.get(timeout=0).abort()
        items = {item.id: item for item in reader.get_many(4, timeout=0)}
        expected = reader._backlog.progress.copy()
        for item_id in order:
            expected.release(item_id, item_id - 1)
            reader.commit(items[item_id])
            assert state(reader._backlog.progress) == state(expected)
            with pytest.raises(UnknownItem):
                reader.commit(items[item_id])
        assert state(expected)[0] == 4


# -- jobs ------------------------------------------------------------------------------------------------------------


def turned(*, hot: bool) -> list[object]:
    """What is known of a work queue after some calls: by the hot ways, or by calls that take a turn as all others."""
    disk, clock = MemoryDisk(), ManualClock(1_700_000_000_000)
    seeded = random.Random(7).randbytes
    with patch("os.urandom", seeded), WorkQueue("/q", "work", disk=disk, clock=clock, sync="never") as queue:
        session = queue.session()
        result: list[object] = []
        for number in range(12):
            body = b"x" * number
            result.append(queue.put(body, ttr=5) if hot else queue.put_many([body], ttr=5)[0])
            clock.advance(1)  # reservations end meanwhile
            if number % 3:
                job = session.reserve(0) if hot else session.reserve_future(0).result()
                result.append((job.id, job.body, job.reserves, job.time_left))
                if number % 2 and hot:
                    job.delete()
                elif number % 2:
                    session.delete(job.id)
            queue._check()
        result.append(queue.stats()._replace(uptime=0.0, records_written=0))
        result.append([queue.stats_job(job_id) for job_id in range(1, 13) if job_id in queue._core.scheduler.jobs])
        log = queue._core.journal
        assert log is not None
        segment = names_of(disk)[0]
        result.append(disk.directory("/q").open(segment).read(0, log.queue._journal._at[0]))
        return result


def test_the_hot_ways_of_a_job_are_turns() -> None:
    assert turned(hot=True)[:-1] == turned(hot=False)[:-1]


def test_a_plain_put_writes_the_record_that_is_encoded_for_others() -> None:
    assert turned(hot=True)[-1] == turned(hot=False)[-1]


# -- objects ---------------------------------------------------------------------------------------------------------

MOST_ATTRIBUTES = 29


def test_objects_on_hot_paths_are_small() -> None:
    with JournaledQueue("/q", "jobs", disk=MemoryDisk(), sync=1.0) as queue:
        reader = queue.reader()
        queue.put_future(b"x")
        queue.put(b"x")
        reader.get(timeout=0).commit()
        reader.get(timeout=0).abort()
        saver = checkpointer_of(reader)
        parts = [queue, reader, saver, saver.dispatcher, saver.dispatcher.hooks, saver.backlog, saver.backlog.progress]
        parts += [queue._status, queue._puts, queue._syncer, queue._syncer.commit, queue._registry, queue._room]
        parts += [queue._source, queue._source.shared, queue._journal, queue._journal.segments[0]]
        check_small(parts)
    with WorkQueue("/w", "work", disk=MemoryDisk(), max_jobs=10) as work:
        session = work.session()
        work.put(b"")
        job = session.reserve(0)
        core = work._core
        parts = [work, session, job, core, core.scheduler, core.journal, work._intake]
        check_small([*parts, work._compactor, core.turn, core.deliveries, core.scheduler.tubes["default"]])
        job.delete()
    memory = ConcurrentBlockingQueue[bytes](10)
    memory.put(b"")
    check_small([memory, SimpleBlockingQueue()])


def check_small(parts: list[Any]) -> None:
    counts = {type(part).__name__: len(getattr(part, "__dict__", ())) for part in parts}
    assert {name: count for name, count in counts.items() if count > MOST_ATTRIBUTES} == {}
