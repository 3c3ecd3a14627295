"""Followed queues: what ``FolderWatch`` says, look after look, is what ``inspect`` says by reading everything."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import JournaledQueue, inspect, open_reader, scan
from kestrelpy._disk.real import RealDisk
from kestrelpy.inspection import FolderWatch, WatchedQueue, WatchedReader, followed
from kestrelpy.testing import ManualClock
from kestrelpy.work import WorkQueue
from tests.support.budget import SEED, Tally, share
from tests.support.disks import CountingDisk
from tests.support.queues import START_MS, let_die

SMALL = 4096


def queue_at(watch: FolderWatch, name: str) -> WatchedQueue:
    found = watch.look()[name]
    assert not found.problem
    return found


def oldest_ms(folder: Path, name: str, head: int) -> int:
    """When the first item after ``head`` was added, by reading all of them."""
    return next((record.added_ms for record in scan(folder, name, start_id=head + 1)), 0)


def checkpoints(folder: Path, name: str) -> list[Path]:
    return list(folder.glob(f"{name}+*.checkpoint"))


def check(watch: FolderWatch, folder: Path) -> None:
    """What the watch says is what a look at everything says."""
    found = watch.look()
    for name, queue in found.items():
        saved = inspect(folder, name)
        assert not queue.problem
        assert not queue.is_estimated
        assert (queue.kind, queue.put_items, queue.put_bytes) == (saved.kind, saved.put_items, saved.put_bytes)
        assert (queue.tail_id, queue.segments) == (saved.tail_id, len(saved.segments))
        assert queue.journal_bytes == sum(segment.file_bytes for segment in saved.segments)
        assert queue.file_bytes == queue.journal_bytes + sum(path.stat().st_size for path in checkpoints(folder, name))
        expected = [
            (reader.name, reader.head, reader.items, reader.bytes, oldest_ms(folder, name, reader.head))
            for reader in saved.readers
        ]
        assert [tuple(reader)[:5] for reader in queue.readers] == expected


class Life:
    """Random steps of a folder with two queues."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.rng = random.Random(seed)
        self.clock = ManualClock(START_MS)
        self.queues: dict[str, JournaledQueue] = {}
        self.steps: list[Callable[[], object]] = [
            *[self.put] * 6,
            *[self.consume] * 5,
            self.checkpoint,
            self.checkpoint,
            self.named,
            self.drop,
            self.close,
            self.kill,
            self.erase,
        ]

    def queue(self) -> JournaledQueue:
        name = self.rng.choice("ab")
        if name not in self.queues:
            options: dict[str, Any] = {"sync": self.rng.choice(("never", "always")), "segment_bytes": SMALL}
            self.queues[name] = JournaledQueue(self.folder, name, clock=self.clock, inbox_interval=None, **options)
        return self.queues[name]

    def put(self) -> None:
        queue, rng = self.queue(), self.rng
        self.clock.advance(rng.randint(0, 5))
        for _ in range(rng.choice((1, 1, 8))):
            if rng.random() < 0.3:
                queue.put_many([b"x" * rng.randint(0, 300)] * rng.randint(2, 6))
            else:
                queue.put(b"y" * rng.randint(0, 900), expires_in=rng.choice((None, None, 1000)))

    def consume(self) -> None:
        for reader in list(self.queue().readers.values()):
            for item in [
                reader.get(False) for _ in range(min(reader.items - reader.open_items, self.rng.randint(0, 9)))
            ]:
                if self.rng.random() < 0.8:
                    item.commit()
                else:
                    item.abort()

    def checkpoint(self) -> None:
        self.queue().checkpoint(durable=self.rng.random() < 0.5)

    def named(self) -> None:
        self.queue().reader(self.rng.choice(("x", "y")), start=self.rng.choice(("tail", "earliest")))

    def drop(self) -> None:
        queue = self.queue()
        if len(queue.readers) > 1:
            queue.drop_reader(self.rng.choice(list(queue.readers)))

    def close(self) -> None:
        queue = self.queue()
        self.queues.pop(queue.name).close()

    def kill(self) -> None:
        queue = self.queue()
        let_die(self.queues.pop(queue.name))

    def erase(self) -> None:
        queue = self.queue()
        if self.rng.random() < 0.3:
            self.queues.pop(queue.name).erase()

    def end(self) -> None:
        for queue in self.queues.values():
            queue.close()


def live(folder: Path, seed: int, steps: int) -> None:
    life, watch = Life(folder, seed), FolderWatch(folder)
    try:
        for _ in range(steps):
            life.rng.choice(life.steps)()
            if life.rng.random() < 0.7:
                check(watch, folder)
    finally:
        life.end()


def live_many(folder: Path, count: int) -> None:
    for number in range(count):
        (folder / str(number)).mkdir()
        live(folder / str(number), SEED * 1_000 + number, 60)


def test_every_look_says_what_inspect_says(tmp_path: Path, tally: Tally) -> None:
    count = share(120)
    live_many(tmp_path, count)
    tally.add("lives of a folder that a watch has followed", count)


def forgets_what_is_new() -> Any:
    """What was put since the last look is not counted."""
    real = followed.FollowedQueue._count

    def count(self: Any, file: Any, segment: Any, *, is_first: bool) -> None:
        if is_first:
            real(self, file, segment, is_first=is_first)

    return patch.object(followed.FollowedQueue, "_count", count)


def believes_every_date() -> Any:
    """A checkpoint is never read again, unless its file has another size."""
    status = RealDisk().directory("/").__class__.status

    def undated(self: Any, name: str) -> Any:
        found = status(self, name)
        return found._replace(modified_ms=1) if found is not None else None

    return patch.object(RealDisk().directory("/").__class__, "status", undated)


def forgets_the_place() -> Any:
    """The next item is found, and then taken for that of every head."""
    return patch.object(followed.FollowedReader, "find_oldest", lambda self, *_: setattr(self, "oldest_ms", 7))


def keeps_the_readers_of_another() -> Any:
    """A queue of the same name goes on with what was known of the one before."""
    return patch.object(followed.FollowedQueue, "_begin", _begin_once)


_real_begin = followed.FollowedQueue._begin


def _begin_once(self: Any) -> None:
    if hasattr(self, "queue_id"):
        self.queue_id = b""
    else:
        _real_begin(self)


def estimates_at_once() -> Any:
    """Bytes are guessed by the first item."""
    real = followed.FollowedQueue._count_block

    def count(self: Any, file: Any, segment: Any) -> None:
        real(self, file, segment)
        if segment.items:
            segment.data_bytes = segment.items * 100

    return patch.object(followed.FollowedQueue, "_count_block", count)


def sees_no_change() -> Any:
    """What was whole at one look is taken to be so for ever."""
    return patch.object(followed.FollowedQueue, "_is_unchanged", lambda self, folder: True)


PLANTS = [
    sees_no_change,
    forgets_what_is_new,
    believes_every_date,
    forgets_the_place,
    keeps_the_readers_of_another,
    estimates_at_once,
]


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_found(plant: Callable[[], Any], tmp_path: Path) -> None:
    with plant(), pytest.raises(AssertionError):
        live_many(tmp_path, 20)


def test_a_work_queue(tmp_path: Path) -> None:
    watch = FolderWatch(tmp_path)
    with WorkQueue(tmp_path, "jobs", segment_bytes=SMALL, max_job_bytes=2_000) as queue:
        for _ in range(3):
            queue.put(b"x" * 2_000)
            check(watch, tmp_path)
        assert queue_at(watch, "jobs").kind == "work queue"


def test_a_reader_of_another_process(tmp_path: Path) -> None:
    watch, clock = FolderWatch(tmp_path), ManualClock(START_MS)
    with JournaledQueue(tmp_path, "jobs", clock=clock) as queue:
        queue.put(b"one")
        clock.advance(60)
        queue.put(b"three")
        with closing(open_reader(tmp_path, "jobs", "other", create=True, start="earliest")) as reader:
            (seen,) = queue_at(watch, "jobs").readers
            assert seen == WatchedReader("other", 0, 2, 8, START_MS, 0.0)
            reader.get().commit()
            reader.checkpoint()
            (seen,) = queue_at(watch, "jobs").readers
            assert (seen.head, seen.items, seen.bytes, seen.oldest_ms) == (1, 1, 5, START_MS + 60_000)
            reader.get().commit()
            reader.checkpoint()
            (seen,) = queue_at(watch, "jobs").readers
            assert (seen.head, seen.items, seen.bytes, seen.oldest_ms) == (2, 0, 0, 0)


def test_what_has_not_changed_is_not_read_again(tmp_path: Path) -> None:
    disk = CountingDisk(RealDisk())
    watch = FolderWatch(tmp_path, disk=disk)
    with JournaledQueue(tmp_path, "jobs", segment_bytes=SMALL, checkpoint_interval=1000) as queue:
        queue.reader("late")
        for _ in range(30):
            queue.put(b"x" * 1_000)
        queue.checkpoint()
        assert queue.stats().segments > 5
        for path in tmp_path.iterdir():
            os.utime(path, (1_000_000, 1_000_000))
        watch.look()
        disk.calls.clear()
        watch.look()
        assert (disk.calls["names"], disk.calls["open"]) == (1, 1), "the open segment alone"
        queue.reader("late").get().commit()
        queue.checkpoint()
        assert queue_at(watch, "jobs").readers[0].items == 29


def test_a_closed_queue_costs_two_system_calls(tmp_path: Path) -> None:
    """The status of the segment, and that of the checkpoint; and a listing for all queues together."""
    disk = CountingDisk(RealDisk())
    for number in range(20):
        with JournaledQueue(tmp_path, f"q{number}") as queue:
            queue.put_many([b"x"] * 9)
            queue.get().commit()
    for path in tmp_path.iterdir():
        os.utime(path, (1_000_000, 1_000_000))
    watch = FolderWatch(tmp_path, disk=disk)
    before = [watch.look(), watch.look()][1]
    disk.calls.clear()
    assert watch.look() == before
    assert disk.calls == {"names": 1, "status": 40, "close": 1}


def test_a_queue_in_the_place_of_another(tmp_path: Path) -> None:
    """Of the same name, made in the same millisecond: its files have the same names and sizes."""
    watch, clock = FolderWatch(tmp_path), ManualClock(START_MS)
    for puts in (1, 2):
        with JournaledQueue(tmp_path, "jobs", clock=clock) as queue:
            queue.put_many([b"x" * (4 // puts)] * puts)
            queue.get().commit()
        (seen,) = queue_at(watch, "jobs").readers
        assert (queue_at(watch, "jobs").put_items, seen.items) == (puts, puts - 1)
        if puts == 1:
            JournaledQueue(tmp_path, "jobs", clock=clock).erase()


def test_damage_is_one_queues_alone(tmp_path: Path) -> None:
    watch = FolderWatch(tmp_path)
    with JournaledQueue(tmp_path, "fine") as fine:
        fine.put(b"x")
        with JournaledQueue(tmp_path, "bad", sync="always") as queue:
            for _ in range(3):
                queue.put(b"payload")
            assert queue_at(watch, "bad").put_items == 3
            (segment,) = tmp_path.glob("bad.*segment")
            data = bytearray(segment.read_bytes())
            at = data.index(b"payload")
            with segment.open("r+b") as file:
                file.seek(at)
                file.write(b"PAYLOAD")
            found = FolderWatch(tmp_path).look()
            assert "was on disk and is not intact" in found["bad"].problem
            assert not found["fine"].problem
            with segment.open("r+b") as file:
                file.seek(at)
                file.write(b"payload")
            assert queue_at(watch, "bad").put_items == 3, "and it is read again when it is whole"


def test_hostile_files(tmp_path: Path, tally: Tally) -> None:
    """Whatever bytes the files of a queue have, the look ends, and other queues are seen."""
    with JournaledQueue(tmp_path, "fine") as fine, JournaledQueue(tmp_path, "bad", segment_bytes=SMALL) as bad:
        fine.put(b"x")
        bad.reader("r")
        for _ in range(8):
            bad.put(b"payload" * 100)
        bad.reader("r").get().commit()
        bad.checkpoint()
    names = [path for path in tmp_path.iterdir() if path.name.startswith("bad")]
    whole = {path: path.read_bytes() for path in names}
    rng = random.Random(SEED)
    for _ in range(share(2_000)):
        path = rng.choice(names)
        data = bytearray(whole[path])
        if data:
            for _ in range(rng.choice((1, 1, 4, 40))):
                data[rng.randrange(min(len(data), 600))] = rng.randrange(256)
        path.write_bytes(data[: rng.choice((len(data), len(data), rng.randrange(len(data) + 1)))])
        watch = FolderWatch(tmp_path)
        for _ in range(2):
            assert not watch.look()["fine"].problem
        path.write_bytes(whole[path])
        assert queue_at(watch, "bad").put_items == 8
    tally.add("damaged folders that a watch has looked at", share(2_000))
