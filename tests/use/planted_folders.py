"""Defects of folders, the inbox and what is looked at from outside, put back."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from kestrelpy._disk import file as file_module
from kestrelpy._disk import real as real_module
from kestrelpy._disk.file import RealFile
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import catalog, file_names, recovery
from kestrelpy._journal import format as format_module
from kestrelpy._journal import segment as segment_module
from kestrelpy._journal.catalog import SegmentCatalog
from kestrelpy._journal.follow import FollowingView
from kestrelpy._writing import open_journal, options
from kestrelpy.errors import ItemTooLarge
from kestrelpy.inbox import publishing
from kestrelpy.inbox.host import InboxHost
from kestrelpy.inspection import scan, summary, verify
from tests.use.planting import defect


@defect(
    "bug 1",
    "a queue that is in memory only takes the published batches of its folder in, and forgets them",
    test="tests/unit/inbox/test_inbox.py::test_a_queue_in_memory_leaves_the_inbox_to_its_owner",
)
def a_queue_in_memory_takes_batches() -> Iterator[None]:
    real = options.memory_disk

    def inflow(writer: Any, files: Any, disk: Any, *rest: Any, quarantine: bool) -> InboxHost:
        return InboxHost(writer, files, RealDisk() if disk in mine else disk, *rest, quarantine=quarantine)

    mine: list[Any] = []

    def memory_disk() -> Any:
        mine.append(real())
        return mine[-1]

    with patch.object(options, "memory_disk", memory_disk), patch("kestrelpy.inbox.host.InboxHost", inflow):
        yield


@defect(
    "C14",
    "a part named twice in one batch comes twice",
    test="tests/unit/inbox/test_inbox.py::test_a_part_named_twice_is_refused",
)
def a_part_twice_in_a_batch() -> Iterator[None]:
    with patch.object(publishing, "_check_named_once", lambda queue, named: None):
        yield


@defect(
    "U9",
    "a part that another published batch names: publish is True, and the batch is never taken in",
    test="tests/unit/inbox/test_inbox.py::test_a_part_of_another_batch_is_refused",
)
def a_part_in_two_batches() -> Iterator[None]:
    with patch.object(publishing, "_check_free", lambda queue, named, there: None):
        yield


@defect(
    "U9 lock",
    "take_in for a queue that never was leaves its lock behind, which is a queue to queue_names",
    test="tests/unit/inbox/test_inbox.py::test_a_visitor_makes_no_queue_for_nothing",
)
def take_in_leaves_a_lock() -> Iterator[None]:
    with patch.object(publishing, "_may_have_work", lambda directory, queue, disk: True):
        yield


NO_TIME = "the explorer compares what calls return, and not how long they take; its queues have few segments"


@defect(
    "C15",
    "scan takes time by the square of the number of segments",
    test="tests/unit/journal/test_catalog.py::test_folders_are_listed_as_often_for_many_segments_as_for_few",
    unreachable=NO_TIME,
)
def a_listing_for_each_segment() -> Iterator[None]:
    def numbered(self: SegmentCatalog) -> Any:
        self.look_again()
        return self._numbered

    with patch.object(SegmentCatalog, "numbered", numbered):
        yield


@defect(
    "bug 2",
    "open_reader takes time by the square of the number of segments",
    test="tests/unit/journal/test_catalog.py::test_folders_are_listed_as_often_for_many_segments_as_for_few",
    unreachable=NO_TIME,
)
def a_listing_for_each_segment_followed() -> Iterator[None]:
    real = FollowingView._take_following

    def take(self: FollowingView, later: Any, number: int) -> bool:
        return real(
            self, segment_module.ListedSegments(self._directory, self._list_behind(number).numbered[:1]), number
        )

    with patch.object(FollowingView, "_take_following", take):
        yield


@defect(
    "C29",
    "inspect raises FileNotFoundError beside a busy writer",
    test="tests/unit/journal/test_catalog.py::test_inspect_beside_a_busy_writer",
)
def inspect_opens_what_was_listed() -> Iterator[None]:
    def segments(folder: Any, chain: SegmentCatalog, numbered: list[tuple[int, str]]) -> Any:
        found = [summary._segment(folder, chain, *each, last=each == numbered[-1]) for each in numbered]
        return [segment for segment in found if segment is not None], False

    with patch.object(summary, "_segments", segments), patch.object(summary, "_size", _size):
        yield


def _size(folder: Any, name: str) -> int:
    file = folder.open(name)
    try:
        return int(file.size())
    finally:
        file.close()


@defect(
    "C29 verify",
    "verify says that items are missing beside a writer that retires all that was listed",
    test="tests/unit/journal/test_catalog.py::test_scan_and_verify_beside_a_busy_writer",
)
def verify_ends_where_the_list_ends() -> Iterator[None]:
    real = verify.Verification._check_newer

    def check(self: Any, number: int, segments: Any) -> int:
        real(self, number, segments)
        return -1

    with patch.object(verify.Verification, "_check_newer", check):
        yield


@defect(
    "U4",
    "type checkers see none of the types of an installed kestrelpy",
    test="tests/test_wheel.py::test_the_wheel_has_the_package_its_types_and_nothing_else",
    unreachable="the explorer runs the package, and does not install it",
)
def a_wheel_without_the_mark_of_its_types() -> Iterator[None]:
    real = zipfile.ZipFile.namelist

    def namelist(self: zipfile.ZipFile) -> list[str]:
        return [name for name in real(self) if not name.endswith("py.typed")]

    with patch.object(zipfile.ZipFile, "namelist", namelist):
        yield


@defect(
    "C22",
    "with archive_dir= the queue's own folder, what should be archived is deleted",
    test="tests/unit/test_queue.py::test_an_archive_where_the_queue_lives_is_refused",
)
def an_archive_where_the_queue_lives() -> Iterator[None]:
    with patch.object(open_journal.OpenJournal, "_check_apart", lambda self, archive: None):
        yield


@defect(
    "bug 5",
    "a batch that is too large is called an item",
    test="tests/unit/test_queue.py::test_a_batch_that_is_too_large_is_called_a_batch",
    unreachable="the explorer puts no 2 GiB, and does not read messages",
)
def a_batch_called_an_item() -> Iterator[None]:
    with patch.object(options, "BatchTooLarge", ItemTooLarge):
        yield


@defect(
    "U9 unknown",
    "verify calls the plan of a driver buffer an unknown file",
    test="tests/unit/inspection/test_inspection.py::test_verify_names_unknown_files",
    unreachable="the explorer runs no Spark",
)
def a_plan_is_unknown() -> Iterator[None]:
    with patch.object(file_names, "is_plan", lambda name, queue: False):
        yield


SYSTEM = "the explorer runs on the system that it is on"


@defect(
    "D5",
    "macOS: every durable put raises AttributeError, as posix_fallocate is missing",
    test="tests/unit/disk/test_systems.py::test_everything_goes_on_without",
    unreachable=SYSTEM,
)
def reserved_without_a_look() -> Iterator[None]:
    with patch.object(file_module, "_can_reserve", lambda: True):
        yield


@defect(
    "H11",
    "macOS: a sync raises AttributeError, as fdatasync is missing",
    test="tests/unit/disk/test_systems.py::test_everything_goes_on_without",
    unreachable=SYSTEM,
)
def synced_without_a_look() -> Iterator[None]:
    def sync(self: RealFile) -> None:
        os.fdatasync(self._descriptor)

    with patch.object(RealFile, "sync", sync):
        yield


@defect(
    "D5 resize",
    "macOS: a segment that grows raises SystemError, as a mapping can't be resized",
    test="tests/unit/disk/test_systems.py::test_everything_goes_on_without",
    unreachable=SYSTEM,
)
def resized_without_a_look() -> Iterator[None]:
    def resized(mapping: Any, size: int) -> bool:
        mapping.resize(size)
        return True

    with patch.object(file_module, "_resized", resized):
        yield


@defect(
    "D5 dir_fd",
    "Windows: an AttributeError where the system has no O_DIRECTORY, in place of a word",
    test="tests/unit/disk/test_systems.py::test_a_system_that_has_too_little_says_so",
    unreachable=SYSTEM,
)
def no_look_at_the_system() -> Iterator[None]:
    with patch.object(real_module, "_missing_calls", list):
        yield


@defect(
    "bug 4",
    "the offset of a CorruptJournal points beside the bytes that are wrong",
    test="tests/unit/journal/test_offsets.py::test_a_field_of_a_header",
    unreachable="the explorer compares which error comes, and not where in a file it says that the damage is",
)
def offsets_by_hand() -> Iterator[None]:
    foreign = segment_module.Objection(32, segment_module.FOREIGN.reason)
    with ExitStack() as stack:
        for module in (segment_module, recovery, scan):
            stack.enter_context(patch.object(module, "FOREIGN", foreign))
        for module in (catalog, recovery):
            stack.enter_context(patch.object(module, "link_offset", lambda header, before: 48))
        yield


@defect(
    "bug 4 footer",
    "the offset told for a footer that is not intact is the end of the file",
    test="tests/unit/journal/test_offsets.py::test_an_end_that_is_cut_off",
    unreachable="as bug 4",
)
def the_end_for_a_footer() -> Iterator[None]:
    with patch.object(format_module, "footer_offset", lambda size: size):
        yield


@defect(
    "D4",
    "what is not bytes is refused, and nothing says that a codec takes it",
    test="tests/unit/test_blocking.py::test_what_is_not_bytes_says_that_a_codec_takes_it",
    unreachable="the explorer does not read messages",
)
def no_word_of_a_codec() -> Iterator[None]:
    with patch.object(options, "_as_bytes", lambda data, codec: bytes(memoryview(data))):
        yield
