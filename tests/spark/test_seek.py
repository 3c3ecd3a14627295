"""Finding what is wanted in a segment: nothing is missed, and little is read."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kestrelpy import JournaledQueue
from kestrelpy._disk.real import RealDisk
from kestrelpy.arrow.plan import pieces_of
from kestrelpy.arrow.wanted import Wanted
from kestrelpy.spark.read.part import SegmentPart
from kestrelpy.spark.read.plan import parts_of
from kestrelpy.testing import ManualClock, MemoryDisk
from tests.spark.journals import read_part
from tests.support.budget import share
from tests.support.disks import CountingDisk
from tests.support.journals import ROW, fill, scanned
from tests.support.queues import let_die

Open = Callable[..., JournaledQueue]


def parts(folder: Path, wanted: Wanted) -> list[SegmentPart]:
    directory = RealDisk().directory(str(folder))
    try:
        return parts_of((str(folder),), pieces_of([directory], "jobs", wanted), 1)
    finally:
        directory.close()


def read(folder: Path, wanted: Wanted) -> tuple[list[ROW], int]:
    """The wanted rows, and how many bytes of segments were read for them."""
    found = [read_part(part) for part in parts(folder, wanted)]
    return [row for rows, _ in found for row in rows], sum(size for _, size in found)


@pytest.mark.parametrize("archived", [False, True])
def test_folders_are_listed_as_often_for_many_segments_as_for_few(archived: bool) -> None:
    def listings(count: int) -> int:
        disk = MemoryDisk()
        archive = disk.directory("/archive", create=True)
        with JournaledQueue("/q", "jobs", sync="never", segment_bytes=4096, archive_dir="/archive", disk=disk) as queue:
            queue.reader()
            for _ in range(count):
                queue.put(bytes(3000))
            if archived:
                queue.commit_many(queue.get_many(count))
                queue.checkpoint(durable=True)
                assert len(archive.names()) == count - 1
        counting = CountingDisk(disk)
        assert len(pieces_of([counting.directory("/q"), counting.directory("/archive")], "jobs", Wanted())) == count
        return counting.calls["names"]

    assert listings(10) == listings(100) < 10


def one_segment(open_queue: Open, clock: ManualClock, shape: str) -> JournaledQueue:
    """16 MB in one segment, in which time goes by."""
    queue = open_queue(segment_bytes=64 << 20, sync="never")
    rnd = random.Random(1)
    if shape == "small":
        for at in range(1280):
            queue.put_many([b"x"]) if at % 640 else None
            for _ in range(100):
                queue.put(bytes(100))
            clock.advance(0.01)
    elif shape == "medium":
        for _ in range(20_000):
            queue.put(bytes(rnd.randrange(600, 1000)))
            clock.advance(0.001)
    elif shape == "large":
        for _ in range(400):
            queue.put(bytes(rnd.randrange(30_000, 50_000)))
            clock.advance(0.05)
    else:
        for _ in range(320):
            queue.put_many([bytes(100)] * 500)
            clock.advance(0.05)
    return queue


@pytest.mark.parametrize("shape", ["small", "medium", "large", "batches"])
def test_one_percent_of_a_segment_is_found_in_a_twentieth_of_it(
    folder: Path, open_queue: Open, clock: ManualClock, shape: str
) -> None:
    queue = one_segment(open_queue, clock, shape)
    queue.close()
    rows = scanned(folder)
    size = sum(path.stat().st_size for path in folder.glob("*.segment"))
    for at in (0, len(rows) // 3, len(rows) * 99 // 100):
        first, last = rows[at], rows[min(at + len(rows) // 100, len(rows) - 1)]
        found, bytes_read = read(folder, Wanted(start_id=first[0], stop_id=last[0]))
        assert found == [row for row in rows if first[0] <= row[0] < last[0]]
        assert bytes_read <= size / 20
        found, bytes_read = read(folder, Wanted(start_ms=first[1] // 1000, stop_ms=last[1] // 1000))
        assert found == [row for row in rows if first[1] <= row[1] < last[1]]
        assert bytes_read <= size / 20


def test_what_was_there_of_an_open_segment_is_searched(folder: Path, open_queue: Open) -> None:
    """The plan counts what there is: so it is known to be whole up to there."""
    queue = open_queue(segment_bytes=64 << 20, sync="never")
    for _ in range(40_000):
        queue.put(bytes(100))
    found, bytes_read = read(folder, Wanted(start_id=39_000, stop_id=39_100))
    assert [row[0] for row in found] == list(range(39_000, 39_100))
    assert bytes_read < 1_000_000


@pytest.mark.parametrize("closed", [True, False])
def test_nothing_is_missed(folder: Path, open_queue: Open, clock: ManualClock, closed: bool) -> None:
    """Frames of very different sizes, and a clock that is set back now and then."""
    rnd = random.Random(4)
    for _ in range(share(6)):
        queue = open_queue(segment_bytes=64 << 20, sync="never")
        for _ in range(25):
            fill(queue, rnd, rnd.randrange(100), largest=rnd.choice([50, 500, 20_000]))
            clock.advance(rnd.choice([0.001, 0.1, 3]))
            if rnd.random() < 0.1:
                clock._start_ns -= rnd.choice([1, 50, 5000]) * 1_000_000
        if rnd.random() < 0.5:
            queue.sync()
        queue.close() if closed else let_die(queue)
        rows = scanned(folder)
        times = sorted({row[1] // 1000 for row in rows})
        for _ in range(20):
            first, last = sorted((rnd.randrange(len(rows) + 5), rnd.randrange(len(rows) + 5)))
            found, _ = read(folder, Wanted(start_id=first, stop_id=last))
            assert found == [row for row in rows if first <= row[0] < last]
            start, stop = sorted((rnd.choice(times), rnd.choice(times)))
            found, _ = read(folder, Wanted(start_ms=start, stop_ms=stop, start_id=first))
            assert found == [row for row in rows if start * 1000 <= row[1] < stop * 1000 and row[0] >= first]
