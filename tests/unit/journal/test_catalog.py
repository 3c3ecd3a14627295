"""Walks over the segments of a queue: how often a folder is listed, and a writer that goes on meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kestrelpy import CorruptJournal, JournaledQueue, open_reader, scan, verify
from kestrelpy._journal.file_names import new_segment_name
from kestrelpy._journal.segment import HeadersAfter
from kestrelpy.inspection.summary import inspect
from kestrelpy.testing import MemoryDisk
from tests.support.disks import CountingDisk

ITEM = bytes(3000)


def fill(disk: MemoryDisk, count: int) -> None:
    """As many segments, of an item each."""
    with JournaledQueue("/q", "jobs", sync="never", segment_bytes=4096, disk=disk, inbox_interval=None) as queue:
        queue.reader("main")
        queue.reader("other")
        for _ in range(count):
            queue.put(ITEM)
    assert len(inspect("/q", "jobs", disk=disk).segments) == count


def scan_all(disk: CountingDisk) -> None:
    assert {record.data for record in scan("/q", "jobs", disk=disk)} == {ITEM}


def scan_both(disk: CountingDisk) -> None:
    assert {record.data for record in scan("/q", "jobs", archive_dir="/archive", disk=disk)} == {ITEM}


def read_elsewhere(disk: CountingDisk) -> None:
    reader = open_reader("/q", "jobs", "main", disk=disk, create=True)
    reader.commit_many(reader.get_many(1000))
    reader.close()


def read_anew(disk: CountingDisk) -> None:
    open_reader("/q", "jobs", "new", create=True, start="earliest", disk=disk).close()


def check(disk: CountingDisk) -> None:
    assert verify("/q", "jobs", disk=disk).ok


def look(disk: CountingDisk) -> None:
    inspect("/q", "jobs", disk=disk)


def open_and_close(disk: CountingDisk) -> None:
    JournaledQueue("/q", "jobs", disk=disk).close()


def retire_into_an_archive(disk: CountingDisk) -> None:
    with JournaledQueue("/q", "jobs", archive_dir="/archive", inbox_interval=None, disk=disk) as queue:
        for name in ("main", "other"):
            queue.reader(name).commit_many(queue.reader(name).get_many(1000))
        queue.checkpoint(durable=True)


def erase(disk: CountingDisk) -> None:
    JournaledQueue("/q", "jobs", disk=disk).erase()


WALKS: list[Callable[[CountingDisk], None]] = [
    scan_all,
    scan_both,
    read_elsewhere,
    read_anew,
    check,
    look,
    open_and_close,
    retire_into_an_archive,
    erase,
]


def cost(walk: Callable[[CountingDisk], None], count: int, *, left_over: int = 0) -> Counter[str]:
    disk = MemoryDisk()
    disk.directory("/archive", create=True)
    fill(disk, count)
    number = inspect("/q", "jobs", disk=disk).segments[0].number
    for at in range(left_over):  # begun, and never a segment
        disk.directory("/q").create(new_segment_name("jobs", number - left_over + at))
    counting = CountingDisk(disk)
    walk(counting)
    return counting.calls


@pytest.mark.parametrize("walk", WALKS)
def test_folders_are_listed_as_often_for_many_segments_as_for_few(walk: Callable[[CountingDisk], None]) -> None:
    few, many = cost(walk, 10), cost(walk, 100)
    assert many["names"] == few["names"] < 25
    assert many["open"] <= 11 * few["open"]


@pytest.mark.parametrize("walk", [scan_all, read_anew, check, look, open_and_close])
def test_what_was_left_over_is_not_gone_through_for_each_of_it(walk: Callable[[CountingDisk], None]) -> None:
    few, many = cost(walk, 2, left_over=10), cost(walk, 2, left_over=100)
    assert many["names"] == few["names"]
    assert many["open"] <= 11 * few["open"]


def test_headers_behind_whatever_the_order_they_are_asked_for_in() -> None:
    class Header:
        pass

    read: list[int] = []
    headers: dict[int, Any] = {3: Header(), 7: Header()}

    def look_at(at: int) -> Any:
        read.append(at)
        return headers.get(at)

    for order in (range(10), reversed(range(10)), (5, 2, 9, 0, 3)):
        behind, read[:] = HeadersAfter(10, look_at), []
        for at in order:
            assert behind.first_from(at) is headers.get(3 if at <= 3 else 7 if at <= 7 else 10)
        assert len(read) <= 10


# -- beside a writer -------------------------------------------------------------------------------------------------


class Writer:
    """A queue that moves on whenever a folder is listed, so that nothing is left of what was in the list."""

    def __init__(self, times: int, *, archived: bool = False) -> None:
        self.disk = MemoryDisk()
        self.queue = JournaledQueue(
            "/q",
            "jobs",
            segment_bytes=4096,
            disk=self.disk,
            inbox_interval=None,
            archive_dir="/archive" if archived else None,
        )
        self.times = times
        self.go_on()

    def go_on(self) -> None:
        for _ in range(5):
            self.queue.put(ITEM)
        self.queue.commit_many(self.queue.get_many(5))
        self.queue.checkpoint(durable=True)

    def beside(self) -> CountingDisk:
        return CountingDisk(self.disk, self._meanwhile)

    def _meanwhile(self) -> None:
        if self.times > 0:
            self.times -= 1
            self.go_on()


@pytest.mark.parametrize("times", [1, 2, 3, 4, 5, 1000])
def test_inspect_beside_a_busy_writer(times: int) -> None:
    writer = Writer(times)
    with writer.queue as queue:
        found = inspect("/q", "jobs", disk=writer.beside())
        if times < 1000:
            assert found.segments
            assert found.tail_id <= queue.stats().tail_id
            assert found == inspect("/q", "jobs", disk=writer.disk) or times in (3, 4, 5)
            assert [reader.name for reader in found.readers] == [""]


def test_inspect_where_the_last_of_many_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retired between the listing and the look: the rest counts."""
    writer = Writer(0)
    with writer.queue as queue:
        for _ in range(3):
            queue.put(ITEM)
        before = inspect("/q", "jobs", disk=writer.disk)
        queue.commit_many(queue.get_many(2))
        counting = CountingDisk(writer.disk)
        listings = iter(range(100))

        def retire() -> None:
            if next(listings) == 2:
                queue.checkpoint(durable=True)

        counting.after_listing = retire
        found = inspect("/q", "jobs", disk=counting)
        assert 0 < len(found.segments) < len(before.segments)
        assert (found.tail_id, found.put_items) == (before.tail_id, before.put_items)


@pytest.mark.parametrize("times", [1, 2, 3, 50])
@pytest.mark.parametrize("archived", [False, True])
def test_scan_and_verify_beside_a_busy_writer(times: int, archived: bool) -> None:
    for look_at in (
        lambda disk: list(scan("/q", "jobs", archive_dir="/archive" if archived else None, disk=disk)),
        lambda disk: verify("/q", "jobs", disk=disk).damage,
    ):
        writer = Writer(times, archived=archived)
        with writer.queue:
            found = look_at(writer.beside())
            if not isinstance(found, tuple):
                ids = [record.id for record in found]
                assert ids == sorted(set(ids))
            else:
                assert found == ()


def test_damage_is_damage_beside_a_writer() -> None:
    writer = Writer(0)
    with writer.queue:
        name = inspect("/q", "jobs", disk=writer.disk).segments[-1].name
        writer.disk.directory("/q").open(name, write=True).write(0, b"damage")
        with pytest.raises(CorruptJournal):
            inspect("/q", "jobs", disk=writer.beside())
