"""A full disk: consuming makes room, in this life and in each later one, also where nobody has read yet."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import JournaledQueue, QueueDiskFull, QueueEmpty, open_reader
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._process import forget
from kestrelpy.testing import ManualClock, MemoryDisk
from tests.support.small_disk import SmallDirectory, SmallDisk, SmallFile

ITEM = bytes(1000)


class World:
    """One queue on a disk of 60 blocks, of which others take what is left."""

    def __init__(self, *, segment_bytes: int = 16384, sync: str = "never") -> None:
        self.disk = SmallDisk(60)
        self.clock = ManualClock()
        self.options: dict[str, Any] = {"segment_bytes": segment_bytes, "sync": sync}
        self.queue = self.open()

    def open(self) -> JournaledQueue:
        return JournaledQueue("/q", "jobs", disk=self.disk, clock=self.clock, **self.options)

    def fill(self) -> list[int]:
        """Put until there is no room; somebody else takes the rest, if there is any."""
        ids: list[int] = []
        with contextlib.suppress(QueueDiskFull):
            while len(ids) < 10_000:
                ids.append(self.queue.put(ITEM))
        assert 0 < len(ids) < 10_000
        self.disk.fill()
        return ids

    def restart(self, *, killed: bool) -> None:
        if killed:
            self.disk.kill()
            forget(self.queue)
            self.queue._abandon()
        else:
            with contextlib.suppress(OSError):
                self.queue.close()
        self.disk.fill()
        self.queue = self.open()
        self.disk.fill()

    def drain(self, reader: str = "") -> list[int]:
        """Get and commit all that there is."""
        ids = []
        taken = self.queue.reader(reader)
        with contextlib.suppress(QueueEmpty):
            while True:
                item = taken.get_nowait()
                item.commit()
                ids.append(item.id)
                self.clock.advance(0.5)
        self.clock.advance(5)
        return ids


Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    worlds: list[World] = []

    def begin(**options: Any) -> World:
        worlds.append(World(**options))
        return worlds[-1]

    yield begin
    for world in worlds:
        if not world.queue.closed:
            world.restart(killed=True)
            forget(world.queue)
            world.queue._abandon()


@pytest.fixture(autouse=True)
def _may_skip_notify(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", "kestrelpy")


@pytest.mark.parametrize("reader", ["", "named"])
def test_a_queue_that_nobody_has_read_is_drained_on_a_full_disk(make: Make, reader: str) -> None:
    world = make()
    ids = world.fill()
    assert world.drain(reader) == ids
    assert world.queue.put(ITEM) > ids[-1]
    world.queue.close()


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("sync", ["never", "always"])
def test_consuming_makes_room_after_a_restart(make: Make, killed: bool, sync: str) -> None:
    world = make(sync=sync)
    world.queue.reader()
    last = 0
    for _ in range(3):
        ids = world.fill()
        assert ids[0] > last
        world.restart(killed=killed)
        assert world.drain() == ids
        last = world.queue.put(ITEM)
        world.queue.get().commit()
        world.queue.checkpoint(durable=True)
    world.queue.close()


def test_every_save_finds_room_on_a_full_disk(make: Make) -> None:
    """A state for each item, in one life; the file was appended to until its block was full, and no further."""
    world = make(segment_bytes=1 << 20)
    world.queue.reader()
    ids = world.fill()
    for _ in ids:
        world.queue.get().commit()
        world.queue.checkpoint(durable=True)
    world.restart(killed=True)
    with pytest.raises(QueueEmpty):
        world.queue.get_nowait()
    world.queue.close()


def test_a_reader_in_another_process_lets_a_full_disk_retire(make: Make) -> None:
    world = make()
    reader = open_reader("/q", "jobs", "audit", disk=world.disk, clock=world.clock, create=True, start="earliest")
    ids = world.fill()
    reader.close()
    reader = open_reader("/q", "jobs", "audit", disk=world.disk, clock=world.clock, create=True)
    reader.commit_many(reader.get_many(len(ids)))
    world.clock.advance(5)
    assert world.queue.put(ITEM) > ids[-1]
    reader.close()
    world.queue.close()


def test_a_place_that_can_not_be_saved_is_said_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """It was said with two tracebacks, every second."""
    caplog.set_level("WARNING", "kestrelpy")
    world = make()
    for _ in range(40):
        world.queue.put(ITEM)
    items = world.queue.get_many(40)
    directory = world.disk.directory("/q")
    with contextlib.suppress(FileNotFoundError):
        directory.unlink("jobs+.checkpoint.tmp")
    world.queue._registry._files[world.queue.reader()]._size = 0
    world.disk.fill()
    for item in items[:30]:
        item.commit()
        world.clock.advance(1)
    assert len(caplog.records) == 2
    assert not any(record.exc_info for record in caplog.records)
    world.disk.room = 60
    world.clock.advance(5)
    assert [record.message for record in caplog.records[2:]] == [
        "saving the position of jobs works again",
        "retiring segments of jobs works again",
    ]
    world.queue.close()


def test_the_traceback_of_what_is_said_once_is_at_debug(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "kestrelpy")
    world = make()
    for _ in range(40):
        world.queue.put(ITEM)
    items = world.queue.get_many(40)
    with contextlib.suppress(FileNotFoundError):
        world.disk.directory("/q").unlink("jobs+.checkpoint.tmp")
    world.queue._registry._files[world.queue.reader()]._size = 0
    world.disk.fill()
    for item in items[:30]:
        item.commit()
        world.clock.advance(1)
    levels = [(record.levelname, bool(record.exc_info)) for record in caplog.records]
    assert levels == [("WARNING", False), ("DEBUG", True)] * 2
    assert "saving the position of jobs failed" in caplog.text
    assert "in _store" in caplog.text, "it says where"
    world.disk.room = 60
    world.clock.advance(5)
    world.queue.close()


@pytest.mark.parametrize("drop", [JournaledQueue.erase, lambda queue: queue.drop_reader("")])
def test_what_is_held_back_goes_with_the_queue_and_with_the_reader(
    make: Make, drop: Callable[[JournaledQueue], object]
) -> None:
    world = make()
    world.queue.reader()
    names = world.disk.directory("/q").names
    assert "jobs+.checkpoint.tmp" in names()
    drop(world.queue)
    assert "jobs+.checkpoint.tmp" not in names()
    world.queue.close()


def test_the_spare_file_is_not_made_beside_a_reader_that_is_being_made() -> None:
    """What an opening queue holds back for the first reader would be written over that reader's place."""
    disk = MemoryDisk()
    with contextlib.closing(disk.directory("/queues", create=True)) as directory:
        files = QueueFiles(directory, "jobs")
        with QueueFiles(directory, "jobs").guard():
            files.hold_back([])
        assert "jobs+.checkpoint.tmp" not in directory.names()
        with contextlib.closing(open_reader("/queues", "jobs", "a", disk=disk, create=True)):
            files.hold_back([])  # the list is from before the reader was made
            assert "jobs+.checkpoint.tmp" not in directory.names()


@pytest.mark.parametrize("lives", [1, 3])
def test_a_queue_is_closed_on_a_full_disk(make: Make, lives: int) -> None:
    """Nothing is raised for which nobody can do anything, and what was committed does not come again."""
    world = make(sync="always")
    reader = world.queue.reader()
    ids = world.fill()
    for _ in range(lives):
        reader.commit_many(reader.get_many(3))
        world.queue.close()
        del ids[:3]
        world.disk.fill()
        world.queue = world.open()
        world.disk.fill()
        reader = world.queue.reader()
    assert [item.id for item in reader.get_many(10)] == ids[:10]


@pytest.mark.parametrize("reader", ["", "audit"])
def test_what_is_cut_off_a_file_need_not_be_free(make: Make, reader: str) -> None:
    """btrfs gives blocks back that were taken together when the last of them goes, ext4 fills up its own reserve."""
    world = make()
    ids = world.fill()
    truncate = SmallFile.truncate

    def keep(file: SmallFile, size: int) -> None:
        truncate(file, size)
        world.disk.fill()

    with patch.object(SmallFile, "truncate", keep):
        for _ in range(3):
            taken = world.queue.reader(reader, start="earliest")
            items = taken.get_many(5)
            taken.commit_many(items)
            taken.checkpoint()
            assert [item.id for item in items] == ids[:5]
            del ids[:5]
            world.restart(killed=True)


class NoNames(SmallDisk):
    """A full folder: no file gets a name that was not there, as on XFS now and then."""

    full = False

    def directory(self, path: str, *, create: bool = False) -> SmallDirectory:
        found = super().directory(path, create=create)
        return NoNamesDirectory(self, found._folder)


class NoNamesDirectory(SmallDirectory):
    """A folder of such a disk."""

    __slots__ = ()
    _disk: NoNames

    def rename(self, old: str, new: str) -> None:
        if self._disk.full and new not in self.names():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), new)
        super().rename(old, new)


def test_a_segment_whose_lasting_name_finds_no_room_is_no_failed_sync() -> None:
    """It is on disk, and called new until there is room: puts are refused when it would have to be closed."""
    disk, clock = NoNames(200), ManualClock()
    queue = JournaledQueue("/q", "jobs", disk=disk, clock=clock, sync="always", segment_bytes=16384)
    disk.full = True
    ids: list[int] = []
    with contextlib.suppress(QueueDiskFull):
        while len(ids) < 100:
            ids.append(queue.put(ITEM))
    assert 10 < len(ids) < 100
    with pytest.raises(QueueDiskFull):
        queue.put(ITEM)
    disk.full = False
    ids.append(queue.put(ITEM))
    assert not any(name.endswith(".new.segment") for name in disk.directory("/q").names())
    disk.full = True
    queue.close()
    disk.full = False
    with JournaledQueue("/q", "jobs", disk=disk, clock=clock) as queue:
        assert [item.id for item in queue.get_many(1000)] == ids
