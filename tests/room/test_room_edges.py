"""``DiskRoom`` when a look can't be done: it is logged or tried again, and no put hears of it."""

from __future__ import annotations

import gc
import weakref
from unittest import mock

import pytest

from kestrelpy import CorruptJournal, JournaledQueue, QueueClosed, QueueLocked, ReaderConfig
from kestrelpy._journal.archive_trimming import ArchiveTrimmer
from kestrelpy._reading.lag_watch import LagWatch
from kestrelpy._reading.registry import ReaderRegistry
from kestrelpy._writing.disk_room import DiskRoom
from kestrelpy.testing import ManualClock, MemoryDisk
from tests.room.rooms import Rooms, feed, lines

FAR = ReaderConfig(max_lag_bytes=1 << 40)


def room_of(queue: object) -> DiskRoom:
    room: DiskRoom = queue._puts._disk_room  # type: ignore[attr-defined]
    return room


def test_a_queue_that_nobody_has_is_not_looked_at() -> None:
    queue = JournaledQueue("/q", "jobs", disk=MemoryDisk(), clock=ManualClock(), keep_for=100.0)
    room = room_of(queue)
    with mock.patch.object(ManualClock, "call_later") as later:
        room._watch()
    look, there = later.call_args.args[1], weakref.ref(room)
    queue.close()
    del room, queue, later
    gc.collect()
    assert there() is None
    with mock.patch.object(DiskRoom, "_look") as looked:
        look()
    looked.assert_not_called()


def test_without_a_thread_the_next_put_begins_to_look(rooms: Rooms) -> None:
    queue = rooms.open(keep_for=100.0)
    room = room_of(queue)
    with (
        mock.patch.object(ManualClock, "call_later", side_effect=RuntimeError("no thread")),
        mock.patch.object(type(room._source), "leave") as left,
    ):
        room._watch()
    left.assert_called_once_with(room._watch)
    queue.close()


@pytest.mark.parametrize("error", [OSError("bad"), QueueClosed("gone"), QueueLocked("/q/jobs.readers.lock")])
def test_a_retirement_that_fails_is_logged_unless_the_guard_was_taken(
    rooms: Rooms, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    queue = rooms.open(keep_for=100.0)
    feed(queue, 1)
    with mock.patch.object(ReaderRegistry, "retire", side_effect=error):
        rooms.clock.advance(2)
    assert bool([line for line in lines(caplog) if "retiring" in line]) is not isinstance(error, QueueLocked)
    queue.close()


def test_what_fails_once_the_queue_has_failed_is_not_logged(rooms: Rooms, caplog: pytest.LogCaptureFixture) -> None:
    queue = rooms.open(keep_for=100.0, archive_dir="/a", archive_keep_for=1.0, readers={"audit": FAR})
    room = room_of(queue)
    error = CorruptJournal("/q/jobs", 0, "bad")
    with (
        mock.patch.object(LagWatch, "look", side_effect=error),
        mock.patch.object(ArchiveTrimmer, "trim", side_effect=OSError("bad")),
        mock.patch.object(room._status, "error", error),
    ):
        room._look_at_readers()
        room._trim()
    assert lines(caplog) == []
    with mock.patch.object(LagWatch, "look", side_effect=error):
        room._look_at_readers()
    assert [line for line in lines(caplog) if "looking how far" in line]
    queue.close()
