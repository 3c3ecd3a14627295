"""Defects of full disks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from kestrelpy._disk import real as real_module
from kestrelpy._journal.checkpoint import FileWithSpare
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._logging import Trouble, warning
from kestrelpy.work.held_room import HeldRoom
from tests.use.planting import defect


@defect(
    "H1",
    "a put on a full btrfs kills the process (SIGBUS)",
    test="tests/unit/disk/test_disk.py::test_nothing_is_mapped_where_a_store_may_need_room",
    unreachable="it is in what a copying file system does, and no simulated disk does that; tests/processes fills one",
)
def mapped_on_every_file_system() -> Iterator[None]:
    with patch.object(real_module, "_COPYING", frozenset[str]()):
        yield


@defect(
    "U1",
    "on a full disk, jobs whose deletes were acknowledged come back after a kill",
    test="tests/work/test_work_full_disk.py::test_what_is_deleted_on_a_full_disk_stays_deleted",
)
def deletes_without_room_are_said_nowhere() -> Iterator[None]:
    with patch.object(HeldRoom, "write", lambda *_: None):
        yield


@contextmanager
def no_spare_files() -> Iterator[None]:
    """A checkpoint file is made anew when it is replaced, for which there must be room."""
    with patch.object(FileWithSpare, "hold", lambda *_: None), patch.object(QueueFiles, "hold_back", lambda *_: None):
        yield


@defect(
    "C11",
    "a full disk and a restart: an empty queue never gives its room back",
    test="tests/unit/test_full_disk.py::test_consuming_makes_room_after_a_restart",
    unreachable="only on a disk that stays full over a restart",
)
def nothing_is_held_back_for_checkpoints() -> Iterator[None]:
    with no_spare_files():
        yield


@defect(
    "H3",
    "after a restart on a full tmpfs, consuming makes no room, and two tracebacks a second are logged",
    test="tests/unit/test_full_disk.py::test_a_place_that_can_not_be_saved_is_said_once",
    unreachable="only on a disk that stays full over a restart",
)
def each_failure_is_said() -> Iterator[None]:
    def begin(_self: Trouble, what: str, _error: BaseException) -> None:
        warning("%s failed and will be tried again", what, error=True)

    with no_spare_files(), patch.object(Trouble, "begin", begin):
        yield


@defect(
    "H2",
    "a queue that has filled its disk can't be drained if nobody has read yet",
    test="tests/unit/test_full_disk.py::test_a_queue_that_nobody_has_read_is_drained_on_a_full_disk",
    unreachable="only on a disk that stays full over a restart",
)
def nothing_is_held_back_for_the_first_reader() -> Iterator[None]:
    with patch.object(QueueFiles, "hold_back", lambda *_: None):
        yield
