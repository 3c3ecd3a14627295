"""Faults of relatives' places in a file, to write at and to read from, that were behind or off a boundary. Each test
fails where the fault is back, and a twin with the fault planted shows that it does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kestrelpy import CorruptJournal
from kestrelpy._journal import format as fmt
from kestrelpy._journal import view
from kestrelpy._journal.checkpoint import load_checkpoint
from kestrelpy._journal.recovery import Recovered, Recovery
from kestrelpy._journal.segment import FramePosition, iterate_frames
from kestrelpy.testing import CrashingDisk, MemoryDisk
from tests.regressions.relatives import CHECKPOINT, history, item, on_disk, overwrite, read, segments, take, vanish


@contextlib.contextmanager
def tail_by_the_checkpoint() -> Iterator[None]:
    """Where to write is what the small file says."""
    real = Recovery.run

    def run(self: Recovery, names: Any) -> Recovered:
        found = real(self, names)
        found.tail_id = max((state.head for state in self._states), default=0)
        for segment in found.segments:
            segment.last_id = min(segment.last_id, found.tail_id)
        return found

    with patch.object(Recovery, "run", run):
        yield


def journal_ahead_of_its_checkpoint() -> tuple[CrashingDisk, dict[int, bytes]]:
    """Five items done and saved, then five put and three done that no checkpoint tells of, then a kill."""
    disk = CrashingDisk()
    queue = on_disk(disk)
    for n in range(5):
        queue.put(item(n))
    queue.commit_many(queue.get_many(5))
    queue.checkpoint(durable=True)
    for n in range(5, 10):
        queue.put(item(n))
    queue.commit_many(queue.get_many(3))
    vanish(queue, disk)
    return disk, {n + 1: item(n) for n in range(5, 10)}


@history(tail_by_the_checkpoint)
def test_history_go_diskqueue_28_metadata_behind_the_data(tmp_path: Path) -> None:
    """go-diskqueue #28: killed before its metadata was synced, it wrote at the place that the metadata had, over
    messages that were still to be read. Here: what is put after such a kill is behind all that is there.
    """
    disk, expected = journal_ahead_of_its_checkpoint()
    queue = on_disk(disk)
    for n in range(3):
        expected[11 + n] = b"new %d" % n
        assert queue.put(expected[11 + n]) == 11 + n
    assert take(queue) == expected
    vanish(queue, disk)
    assert take(on_disk(disk)) == expected


@contextlib.contextmanager
def appends_to_the_last_segment() -> Iterator[None]:
    """The old file goes on behind what the checkpoint tells of: what stood there is overwritten."""
    real = Recovery._close_last

    def close_last(self: Recovery, file: Any, segment: Any) -> None:
        done_id = max((state.head for state in self._states), default=0)
        size = file.size()
        frames = iterate_frames(file, segment.header.marker, fmt.HEADER_BYTES, size)
        offset = next(at for at, frame in frames if frame.first_id > done_id)
        file.truncate(offset)
        file.truncate(size)
        real(self, file, segment)

    with patch.object(Recovery, "_close_last", close_last):
        yield


@history(appends_to_the_last_segment, raises=(CorruptJournal,))
def test_history_go_diskqueue_31_the_place_to_write_inside_the_file(tmp_path: Path) -> None:
    """go-diskqueue #31, the mending of #28: where the file is longer than the metadata says, begin another. Here: after
    such a kill not a byte of the old segment's records changes, and what is put goes into a segment of its own.
    """
    disk, expected = journal_ahead_of_its_checkpoint()
    (name,) = segments(disk)
    before = read(disk, name).rstrip(b"\0")
    queue = on_disk(disk)
    queue.put(b"new")
    vanish(queue, disk)
    assert len(segments(disk)) == 2
    assert read(disk, name).startswith(before)
    assert take(on_disk(disk)) == expected | {11: b"new"}


@contextlib.contextmanager
def places_believed() -> Iterator[None]:
    """Reading begins at the place that the checkpoint has, whatever stands there."""

    def read_block(
        self: Any, file: Any, segment: Any, places: list[FramePosition], first: int, last: int, size: int
    ) -> Any:
        end = segment.records_end if segment.closed else file.size()
        marker, path = segment.header.marker, segment.name
        entries, behind = view.read_entries(file, marker, path, places[-1], end, first, last, size)
        return view.Block(entries, behind[0], segment.number, behind)

    with patch.object(view.JournalView, "_read_block", read_block):
        yield


@history(places_believed, raises=(CorruptJournal,))
def test_history_go_diskqueue_34_a_place_that_is_no_boundary(tmp_path: Path) -> None:
    """go-diskqueue #34 and what led to it: a place to read from that was saved in the middle of a message, or past the
    end of a file; what stood there was taken for a length, and the rest of the file for bad. Here: whole checkpoints
    whose place is everywhere but where it should be.
    """
    disk = MemoryDisk()
    with on_disk(disk) as queue:
        for n in range(10):
            queue.put(item(n))
        queue.commit_many(queue.get_many(5))
    state, _ = load_checkpoint(disk.directory("/q"), CHECKPOINT)
    assert state is not None
    assert state.hint_number
    for number in (state.hint_number, state.hint_number + 1, 1):
        for offset in (0, 96, 97, 133, 136, 140, 300, 1 << 40):
            for hint_id in (1, 3, 6, 9, 1 << 50):
                forged = state._replace(hint_number=number, hint_offset=offset, hint_id=hint_id)
                overwrite(disk, CHECKPOINT, fmt.checkpoint_prefix() + fmt.encode_checkpoint(forged))
                queue = on_disk(disk)
                assert list(take(queue)) == [6, 7, 8, 9, 10], (number, offset, hint_id)
                vanish(queue, disk)
