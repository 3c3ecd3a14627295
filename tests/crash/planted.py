"""Planted faults: mutations of the library, one switch each. A harness that does not catch them proves nothing.

Where a function is imported by name, ``in_place_of`` puts the mutation into every module that has it. With each fault
stands what the explorer should lean to in order to catch it soon; whatever it is, a workload has all of its other steps
as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch
from zlib import crc32

from workload import Style

from kestrelpy import _checkpoint, _format, _journal, _recovery, _segment
from kestrelpy._checkpoint import CheckpointFile
from kestrelpy._feed import Feed
from kestrelpy._home import Home
from kestrelpy._journal import Journal
from kestrelpy._progress import Progress
from kestrelpy._readership import Readership
from kestrelpy._recovery import Recovered, Recovery
from kestrelpy._sync import GroupCommit
from kestrelpy.reader import Reader


@dataclass(frozen=True)
class Fault:
    """A mutation and how to look for it. ``invariants``: one of these begins the message."""

    plant: Callable[[], AbstractContextManager[None]]
    invariants: str
    options: dict[str, Any] = field(default_factory=dict)


FAULTS: dict[str, Fault] = {}


def fault(invariants: str, **options: Any) -> Callable[[Callable[[], Iterator[None]]], None]:
    def note(function: Callable[[], Iterator[None]]) -> None:
        FAULTS[function.__name__] = Fault(contextmanager(function), invariants, options)

    return note


@contextmanager
def in_place_of(original: Any, replacement: Any) -> Iterator[None]:
    """``replacement`` wherever a module of the library has ``original`` by a name."""
    with ExitStack() as patches:
        found = [
            (module, name)
            for module_name, module in list(sys.modules.items())
            if module_name.partition(".")[0] == "kestrelpy" and not module_name.startswith("kestrelpy.testing")
            for name, value in list(vars(module).items())
            if value is original
        ]
        assert found, f"nobody uses {original!r} by a name"
        for module, name in found:
            patches.enter_context(patch.object(module, name, replacement))
        yield


class _Deaf:
    """A file or directory whose syncs do nothing."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def sync(self) -> None:
        """The fault."""


class _MakesDeaf(_Deaf):
    """A directory in which new files are never synced; it is itself."""

    def create(self, name: str) -> Any:
        return _Deaf(self._inner.create(name))

    def sync(self) -> None:
        self._inner.sync()


RETIRING = Style(
    steps=40, segment_bytes=(4096,), payloads=(900, 1400), commits=14, checkpoints=8, archive=0, deaths=0, failing=0
)
ROTATING = Style(steps=40, segment_bytes=(8192,), payloads=(900, 1400, 3500), deaths=0, failing=0)
UNSYNCED = {"syncs": ("never",)}


# -- writing ---------------------------------------------------------------------------------------------------------


@fault("(1) (3) (5) (7) (8) (10) (11)")
def no_checksum() -> Iterator[None]:
    """Frames are taken as they come."""
    with in_place_of(crc32, lambda *_: 0):
        yield


@fault("(1) (8) (10)")
def no_sync_when_a_segment_is_closed() -> Iterator[None]:
    """R7: the next segment takes records while the old one may be lost."""
    real = _segment.close_segment
    real_rotate = Journal.rotate

    def rotate(self: Journal) -> None:
        self.durable_id = self.tail_id
        real_rotate(self)

    with (
        in_place_of(real, lambda file, segment: real(_Deaf(file), segment)),
        patch.object(Journal, "rotate", rotate),
    ):
        yield


@fault("(10)", **UNSYNCED, samples=8, style=ROTATING)
def footer_before_the_frames_are_on_disk() -> Iterator[None]:
    """One sync for both: a power cut keeps the one and loses the other."""
    real = Journal.rotate

    def rotate(self: Journal) -> None:
        self.durable_id = self.tail_id
        real(self)

    with patch.object(Journal, "rotate", rotate):
        yield


@fault("(1) (8) (10)")
def no_directory_sync_for_a_new_segment() -> Iterator[None]:
    """R1: the file is on disk, its name is not."""
    real = _segment.create_segment
    with in_place_of(real, lambda directory, *rest: real(_Deaf(directory), *rest)):
        yield


@fault("(1) (8)", syncs=("always",))
def acknowledged_before_it_is_synced() -> Iterator[None]:
    with patch.object(GroupCommit, "wait", lambda *_: None):
        yield


@fault("(1)")
def batch_in_parts() -> Iterator[None]:
    """``put_many`` as several records."""
    real = Journal.append_frame

    def append(self: Journal, items: Any, *rest: Any) -> range:
        ids = [real(self, [item], *rest)[0] for item in items]
        return range(ids[0], ids[-1] + 1)

    with patch.object(Journal, "append_frame", append):
        yield


@fault("(1) (8) (10)", style=Style(failing=1.0), syncs=("always", "never"))
def retry_after_a_failed_sync_is_believed() -> Iterator[None]:
    """R9: the second sync succeeds, and what the first marked clean is not on disk."""

    class Retrying(_Deaf):
        def sync(self) -> None:
            try:
                self._inner.sync()
            except OSError:
                self._inner.sync()

    real_target, real_active = Journal.sync_target, Journal.is_active

    def target(self: Journal) -> Any:
        file, item_id = real_target(self)
        return (file and Retrying(file)), item_id

    with (
        patch.object(Journal, "sync_target", target),
        patch.object(Journal, "is_active", lambda self, file: real_active(self, file._inner)),
    ):
        yield


# -- checkpoints -----------------------------------------------------------------------------------------------------


@fault("(1) (2) (8) (10)", style=Style(commits=14, checkpoints=6))
def checkpoint_not_synced() -> Iterator[None]:
    """R3: a state is believed to be on disk that is not, and segments are retired on its word."""
    real, real_save = _checkpoint.replace_file, CheckpointFile.save

    def save(self: CheckpointFile, state: Any, *, durable: bool) -> None:
        real_save(self, state, durable=False)
        if durable:
            self.durable = state

    with (
        in_place_of(real, lambda directory, *rest: real(_MakesDeaf(directory), *rest)),
        patch.object(CheckpointFile, "save", save),
    ):
        yield


@fault("(1) (2) (10)", style=Style(commits=14, checkpoints=6))
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

    with in_place_of(_checkpoint.replace_file, replace):
        yield


@fault("(7) (8) (13)", **UNSYNCED, style=Style(payloads=(0, 1, 40), commits=16, checkpoints=8, failing=0))
def checkpoint_ahead_of_the_journal_and_ids_used_again() -> Iterator[None]:
    """R4 and R17: each alone is masked by the other."""
    real = Recovery.run

    def run(self: Recovery, names: Any) -> Any:
        found = real(self, names)
        found.tail_id = found.segments[-1].last_id if found.segments else 0
        return found

    with patch.object(Recovery, "run", run), patch.object(Feed, "make_durable", lambda *_: None):
        yield


@fault("(1)")
def reader_restarted_at_the_tail() -> Iterator[None]:
    """LK-B2: a reader whose checkpoint cannot be read begins behind everything."""
    real = Readership._beginning
    with patch.object(Readership, "_beginning", lambda self, _: real(self, "tail")):
        yield


@fault("(2) (13)", style=Style(commits=16, checkpoints=8))
def done_ids_forgotten() -> Iterator[None]:
    """LK-B1: what was committed out of order is saved and never looked at."""
    real = Progress.load

    def load(state: Any) -> Progress:
        progress = real(state)
        progress.spans.clear()
        return progress

    with patch.object(Progress, "load", load):
        yield


@fault("(12)", style=Style(aborts=10, checkpoints=8, failing=0))
def error_counts_forgotten() -> Iterator[None]:
    real = Progress.load

    def load(state: Any) -> Progress:
        progress = real(state)
        progress.error_counts.clear()
        return progress

    with patch.object(Progress, "load", load):
        yield


@fault("(2)", style=Style(commits=14, checkpoints=6))
def every_checkpoint_lost() -> Iterator[None]:
    with patch.object(Home, "load", lambda *_: None):
        yield


@fault("(3)", style=Style(expiring=0.7))
def expired_items_delivered() -> Iterator[None]:
    with patch.object(Reader, "_is_expired", lambda *_: False):
        yield


# -- retiring --------------------------------------------------------------------------------------------------------


@fault("(1) (10)", **UNSYNCED, style=RETIRING, samples=6)
def retired_on_a_checkpoint_that_is_not_durable() -> Iterator[None]:
    """R5: segments go when the head in memory is past them."""
    with patch.object(Readership, "_durable_head", lambda _, reader: reader.head):
        yield


@fault("(1) (8) (10)")
def retired_one_segment_too_many() -> Iterator[None]:
    real = Journal.take_retired
    with patch.object(Journal, "take_retired", lambda self, head: real(self, head + 3)):
        yield


@fault("(1) (8) (10)", style=replace(RETIRING, detached=1.0, starts_with_default=0))
def retired_past_a_reader_elsewhere() -> Iterator[None]:
    """R5: only the readers open here are asked."""
    with patch.object(Home, "lowest_head_elsewhere", lambda *_: None):
        yield


@fault("(1)", style=replace(RETIRING, archive=1.0, other_mount=1.0))
def archived_copy_not_synced() -> Iterator[None]:
    """R6: to another file system without a sync of the copy."""
    real = _journal._copy
    with in_place_of(real, lambda directory, name, target, new: real(directory, name, _MakesDeaf(target), new)):
        yield


# -- recovery --------------------------------------------------------------------------------------------------------


@fault("(10) (5)", **UNSYNCED, samples=6, style=Style(payloads=(200, 900, 1400), segment_bytes=(24_000,), failing=0))
def torn_tail_not_cut() -> Iterator[None]:
    """Frames behind a hole are taken as if nothing were missing."""
    real = Recovery._follow

    def follow(self: Recovery, file: Any, segment: Any, offset: int, size: int) -> int:
        while True:
            offset = real(self, file, segment, offset, size)
            hit = _format.find_frame(file.read(offset, size - offset), 1, segment.header.marker, segment.last_id + 1)
            if segment.closed or hit is None or hit[1].footer is not None:
                return offset
            segment.last_id = hit[1].first_id - 1
            offset += hit[0]

    with patch.object(Recovery, "_follow", follow):
        yield


@fault("(11)", damage=1.0, samples=0)
def watermark_ignored() -> Iterator[None]:
    """R15: what is not intact is cut, whatever shows that it was on disk."""
    with patch.object(Recovered, "watermark", property(lambda _: 0, lambda *_: None)):
        yield


@fault("(1) (8) (10)", **UNSYNCED, style=Style(failing=0.5, deaths=3))
def reopening_trusts_the_page_cache() -> Iterator[None]:
    """R10: the last segment is neither synced nor dropped from the cache before it is believed."""
    real = Recovery._load

    class Trusting(_Deaf):
        def forget(self) -> None:
            """The fault."""

    class Opens(_Deaf):
        def open(self, name: str, *, write: bool = False) -> Any:
            file = self._inner.open(name, write=write)
            return Trusting(file) if write else file

        def sync(self) -> None:
            self._inner.sync()

    def load(self: Recovery, *arguments: Any) -> Any:
        with patch.object(self, "_directory", Opens(self._directory)):
            return real(self, *arguments)

    with patch.object(Recovery, "_load", load):
        yield


@fault("(7)", **UNSYNCED, samples=6)
def ids_of_a_torn_tail_used_again() -> Iterator[None]:
    """R17: nothing remembers them once the tail is cut."""
    with patch.object(_recovery, "write_mark", lambda *_: None):
        yield
