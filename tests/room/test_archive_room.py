"""``archive_keep_for`` and ``archive_keep_bytes``: an archive that does not grow for ever."""

from __future__ import annotations

import errno

import pytest

from kestrelpy import scan
from kestrelpy._journal.archive_trimming import ArchiveTrimmer
from kestrelpy._journal.retention import Retention
from kestrelpy.testing import FailingDisk
from tests.room.rooms import SEGMENT, START_MS, Rooms, drain, feed, lines


def archived(rooms: Rooms, **options: object) -> list[str]:
    """What is in the archive after 30 items, one each second, all of them consumed at once."""
    queue = rooms.open(archive_dir="/a", **options)
    feed(queue, 30, each=1, clock=rooms.clock)
    drain(queue, 30)
    queue.checkpoint()
    queue.close()
    return rooms.names("/a")


def test_without_options_an_archive_keeps_everything(rooms: Rooms) -> None:
    assert len(archived(rooms)) == 9


def test_r41_the_oldest_go_and_the_youngest_stay(rooms: Rooms) -> None:
    everything = Rooms()
    names = archived(everything)
    assert archived(rooms, archive_keep_bytes=3 * SEGMENT) == names[-3:]
    assert [record.id for record in scan("/q", "jobs", archive_dir="/a", disk=rooms.disk)] == list(range(19, 31))


def test_by_age_also_when_nothing_happens(rooms: Rooms) -> None:
    names = archived(rooms, archive_keep_for=100.0)
    assert len(names) == 9
    queue = rooms.open(archive_dir="/a", archive_keep_for=100.0)
    rooms.clock.advance(100 + 8 - 30)  # at second 108 the segments go whose last items are of the seconds 2, 5, 8
    assert rooms.names("/a") == names[3:]
    queue.close()


def test_live_segments_and_archived_ones_are_kept_apart(rooms: Rooms) -> None:
    names = archived(rooms, keep_bytes=2 * SEGMENT, archive_keep_bytes=2 * SEGMENT)
    assert len(names) == 2
    assert len(rooms.names()) == 3
    assert [record.id for record in scan("/q", "jobs", archive_dir="/a", disk=rooms.disk)] == list(range(16, 31))


def test_what_is_of_another_queue_stays(rooms: Rooms) -> None:
    names = archived(rooms)
    rooms.open().erase()
    rooms.clock.advance(1000)
    queue = rooms.open(archive_dir="/a", archive_keep_bytes=0)
    feed(queue, 10)
    drain(queue, 10)
    queue.checkpoint()
    assert queue.stats().archived_segments == 3
    assert rooms.names("/a") == names
    queue.close()


def test_what_is_no_segment_of_ours_stays_and_fails_nothing(rooms: Rooms) -> None:
    archived(rooms)
    folder = rooms.disk.directory("/a")
    strange = "jobs.1.segment"
    newer = rooms.names("/a")[0]
    changed = folder.open(newer, write=True)
    changed.write(8, b"\xff\xff")  # of a version that is not known here
    changed.close()
    file = folder.create(strange)
    file.write(0, b"strange" * 100)
    file.close()
    trimmer = ArchiveTrimmer(folder, "jobs", b"?" * 16, Retention(keep_bytes=0))
    assert trimmer.trim(START_MS) == 0
    queue = rooms.open(archive_dir="/a", archive_keep_bytes=0)
    assert rooms.names("/a") == [strange, newer]
    queue.close()
    folder.close()


def test_what_is_gone_or_no_file_stays_as_it_is(rooms: Rooms) -> None:
    archived(rooms)
    names = rooms.names("/a")
    rooms.disk.directory("/a/jobs.1.segment", create=True).close()
    folder = rooms.disk.directory("/a")
    trimmer = ArchiveTrimmer(folder, "jobs", b"?" * 16, Retention(keep_bytes=0))
    assert trimmer.trim(START_MS) == 0
    assert sorted(folder.names()) == sorted([*names, "jobs.1.segment"])
    folder.close()


def test_a_trim_that_fails_is_logged_once_and_tried_again(rooms: Rooms, caplog: pytest.LogCaptureFixture) -> None:
    archived(rooms)
    rooms.disk = failing = FailingDisk(rooms.disk)
    failing.arm(errno.EIO, kinds={"unlink"}, sticky=True)
    queue = rooms.open(archive_dir="/a", archive_keep_for=1.0)
    rooms.clock.advance(3)
    assert [line for line in lines(caplog) if "trimming" in line] != []
    rooms.clock.advance(3)
    assert lines(caplog) == []
    failing.disarm()
    rooms.clock.advance(1)
    assert lines(caplog) == ["trimming the archive of jobs works again"]
    assert rooms.names("/a") == []
    queue.close()


def test_it_needs_an_archive(rooms: Rooms) -> None:
    for options in ({"archive_keep_for": 1.0}, {"archive_keep_bytes": 1}):
        with pytest.raises(ValueError, match="archive_dir"):
            rooms.open(**options)
