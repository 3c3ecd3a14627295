"""Planted faults: mutations of the library, one switch each. A harness that does not catch them proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from kestrelpy import _checkpoint, _format, _journal, _recovery, _segment
from kestrelpy._feed import Feed
from kestrelpy._home import Home
from kestrelpy._journal import Journal
from kestrelpy._progress import Progress
from kestrelpy._readership import Readership
from kestrelpy._recovery import Recovery
from kestrelpy._sync import GroupCommit

Fault = Callable[[], Any]
FAULTS: dict[str, Fault] = {}


def fault(function: Callable[[], Iterator[None]]) -> Fault:
    FAULTS[function.__name__] = contextmanager(function)
    return FAULTS[function.__name__]


class _Deaf:
    """A file or directory whose syncs do nothing."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def sync(self) -> None:
        """The fault."""


@fault
def no_checksum() -> Iterator[None]:
    """Frames are taken as they come."""
    with (
        patch.object(_format, "crc32", lambda *_: 0),
        patch.object(_journal, "crc32", lambda *_: 0),
        patch.object(_segment, "crc32", lambda *_: 0),
    ):
        yield


@fault
def no_sync_when_a_segment_is_closed() -> Iterator[None]:
    """R7: the next segment takes records while the old one may be lost."""
    real = _segment.close_segment
    with (
        patch.object(_journal, "close_segment", lambda file, segment: real(_Deaf(file), segment)),
        patch.object(_recovery, "close_segment", lambda file, segment: real(_Deaf(file), segment)),
    ):
        yield


@fault
def no_directory_sync_for_a_new_segment() -> Iterator[None]:
    """R1: the file is on disk, its name is not."""
    real = _segment.create_segment
    with patch.object(_journal, "create_segment", lambda directory, *rest: real(_Deaf(directory), *rest)):
        yield


@fault
def acknowledged_before_it_is_synced() -> Iterator[None]:
    with patch.object(GroupCommit, "wait", lambda *_: None):
        yield


@fault
def checkpoint_not_synced() -> Iterator[None]:
    """R3: a state is believed to be on disk that is not, and segments are retired on its word."""
    real = _checkpoint.replace_file

    class Careless(_Deaf):
        def create(self, name: str) -> Any:
            return _Deaf(self._inner.create(name))

    with patch.object(_checkpoint, "replace_file", lambda directory, *rest: real(Careless(directory), *rest)):
        yield


@fault
def checkpoint_in_place() -> Iterator[None]:
    """R3: the old state is overwritten."""

    def replace(directory: Any, name: str, data: bytes) -> None:
        try:
            file = directory.open(name, write=True)
        except FileNotFoundError:
            file = directory.create(name)
            directory.sync()
        file.truncate(0)
        file.write(0, data)
        file.sync()
        file.close()

    with patch.object(_checkpoint, "replace_file", replace):
        yield


@fault
def retired_on_a_checkpoint_that_is_not_durable() -> Iterator[None]:
    """R5: segments go when the head in memory is past them."""
    with patch.object(Readership, "_durable_head", lambda _, reader: reader.head):
        yield


@fault
def retired_one_segment_too_many() -> Iterator[None]:
    real = Journal.take_retired
    with patch.object(Journal, "take_retired", lambda self, head: real(self, head + 3)):
        yield


@fault
def checkpoint_ahead_of_the_journal_and_ids_used_again() -> Iterator[None]:
    """R4 and R17: each alone is masked by the other."""
    real = Recovery.run

    def run(self: Recovery) -> Any:
        found = real(self)
        found.tail_id = found.segments[-1].last_id if found.segments else 0
        return found

    with patch.object(Recovery, "run", run), patch.object(Feed, "make_durable", lambda *_: None):
        yield


@fault
def reader_restarted_at_the_tail() -> Iterator[None]:
    """LK-B2: a reader whose checkpoint cannot be read begins behind everything."""
    real = Readership._beginning
    with patch.object(Readership, "_beginning", lambda self, _: real(self, "tail")):
        yield


@fault
def done_ids_forgotten() -> Iterator[None]:
    """LK-B1: what was committed out of order is saved and never looked at."""
    real = Progress.load

    def load(state: Any) -> Progress:
        progress = real(state)
        progress.spans.clear()
        return progress

    with patch.object(Progress, "load", load):
        yield


@fault
def error_counts_forgotten() -> Iterator[None]:
    real = _format.decode_checkpoints

    def decode(data: bytes) -> Any:
        state, end = real(data)
        if state is not None:
            object.__setattr__(state, "error_counts", ())
        return state, end

    with patch.object(_format, "decode_checkpoints", decode):
        yield


@fault
def torn_tail_not_cut() -> Iterator[None]:
    """Frames behind a hole are taken as if nothing were missing."""
    real = _segment.iterate_frames

    def iterate(file: Any, marker: int, offset: int, end: int) -> Iterator[Any]:
        while True:
            for at, frame in real(file, marker, offset, end):
                yield at, frame
                offset = at + frame.size
            hit = _format.find_frame(file.read(offset, end - offset), 1, marker, 0)
            if hit is None:
                return
            offset += hit[0]

    def follow(self: Recovery, file: Any, segment: Any, offset: int, size: int) -> int:
        for at, frame in iterate(file, segment.header.marker, offset, size):
            if frame.footer is not None:
                break
            segment.last_id = frame.last_id
            segment.data_bytes += sum(len(entry[0]) for entry in frame.entries)
            offset = at + frame.size
        return offset

    with patch.object(Recovery, "_follow", follow):
        yield


@fault
def every_checkpoint_lost() -> Iterator[None]:
    with patch.object(Home, "load", lambda *_: None):
        yield
