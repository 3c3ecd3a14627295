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

from kestrelpy._journal import archive as archive_module
from kestrelpy._journal import checkpoint as checkpoint_module
from kestrelpy._journal import file_names, journal, recovery
from kestrelpy._journal import format as format_module
from kestrelpy._journal import segment as segment_module
from kestrelpy._journal.checkpoint import CheckpointFile, FileWithSpare
from kestrelpy._journal.journal import Journal
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._journal.recovery import Recovered, Recovery
from kestrelpy._journal.retention import Retention
from kestrelpy._journal.segment import Segment
from kestrelpy._reading import skipping
from kestrelpy._reading.backlog import Backlog
from kestrelpy._reading.checkpointer import Checkpointer
from kestrelpy._reading.local_source import LocalSource
from kestrelpy._reading.progress import Progress
from kestrelpy._reading.reader import Reader
from kestrelpy._reading.registry import ReaderRegistry
from kestrelpy._writing.group_commit import GroupCommit
from kestrelpy.testing import CrashingDisk
from tests.crash.workload import MANY_LIVES, ROOM, Style


@dataclass(frozen=True)
class Fault:
    """A mutation and how to look for it. ``rules``: which of docs/guarantees.md it breaks, if any. ``invariants``: one
    of these is what the explorer says is broken. ``states``: within so many.
    """

    plant: Callable[[], AbstractContextManager[None]]
    rules: str
    invariants: str
    states: int = 8_000
    options: dict[str, Any] = field(default_factory=dict)


FAULTS: dict[str, Fault] = {}


def fault(
    rules: str, invariants: str, *, states: int = 8_000, **options: Any
) -> Callable[[Callable[[], Iterator[None]]], None]:
    def note(function: Callable[[], Iterator[None]]) -> None:
        FAULTS[function.__name__] = Fault(contextmanager(function), rules, invariants, states, options)

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
    """A directory whose files are never synced; it is itself."""

    def create(self, name: str) -> Any:
        return _Deaf(self._inner.create(name))

    def open(self, name: str, *, write: bool = False, linked: bool = False) -> Any:
        return _Deaf(self._inner.open(name, write=write, linked=linked))

    def sync(self) -> None:
        self._inner.sync()


RETIRING = Style(
    steps=40, segment_bytes=(4096,), payloads=(900, 1400), commits=14, checkpoints=8, archive=0, deaths=0, failing=0
)
ROTATING = Style(steps=40, segment_bytes=(8192,), payloads=(900, 1400, 3500), deaths=0, failing=0)
TEARING = Style(
    payloads=(900, 1400, 3500), segment_bytes=(24_000,), checkpoints=0, commits=3, archive=0, failing=0, detached=0
)
DYING: dict[str, Any] = {
    "style": Style(
        steps=80,
        segment_bytes=(4096,),
        payloads=(900, 1400),
        archive=0,
        detached=0,
        failing=0,
        starts_with_default=0,
        deaths=10,
        commits=40,
        aborts=0,
        checkpoints=25,
        durable=0.0,
        expiring=0,
    ),
    "points": 60,
    "nested": 0.0,
}
"""Everything is committed and saved, never durably, and killed."""
UNSYNCED: dict[str, Any] = {"syncs": ("never",)}


# -- writing ---------------------------------------------------------------------------------------------------------


@fault("R15", "(1) (3) (5) (7) (8) (10) (13)")
def no_checksum() -> Iterator[None]:
    """Frames are taken as they come."""
    with in_place_of(crc32, lambda *_: 0):
        yield


@fault("R7", "(1) (8) (10)")
def no_sync_when_a_segment_is_closed() -> Iterator[None]:
    """R7: the next segment takes records while the old one may be lost."""
    real = segment_module.close_segment
    real_rotate = Journal.rotate

    def rotate(self: Journal) -> None:
        self.durable_id = self.tail_id
        real_rotate(self)

    with (
        in_place_of(real, lambda file, segment: real(_Deaf(file), segment)),
        patch.object(Journal, "rotate", rotate),
    ):
        yield


@fault(
    "R7",
    "(10)",
    **UNSYNCED,
    samples=8,
    style=replace(
        ROTATING,
        segment_bytes=(12_288,),
        payloads=(900, 1400),
        syncs=6,
        checkpoints=0,
        detached=0.0,
        archive=0.0,
        commits=2,
        aborts=0,
    ),
    states=24_000,
)
def footer_before_the_frames_are_on_disk() -> Iterator[None]:
    """One sync for both: a power cut keeps the one and loses the other."""
    real = Journal.rotate

    def rotate(self: Journal) -> None:
        self.durable_id = self.tail_id
        real(self)

    with patch.object(Journal, "rotate", rotate):
        yield


@fault("R1", "(1) (8) (10)")
def no_directory_sync_for_a_new_segment() -> Iterator[None]:
    """R1: the file is on disk, its name is not."""
    real = segment_module.sync_and_name
    with in_place_of(real, lambda directory, *rest: real(_Deaf(directory), *rest)):
        yield


@fault("R1", "(1) (8) (10)")
def named_before_its_content_is_synced() -> Iterator[None]:
    """R1: what a power cut has taken the header of is called as if that had been on disk."""
    real = segment_module.sync_and_name

    def settle(directory: Any, file: Any, segment: Segment) -> None:
        real(directory, _Deaf(file), segment)
        file.sync()

    with in_place_of(real, settle):
        yield


@fault("R1", "(1) (8) (10)", **UNSYNCED, samples=8)
def a_new_segment_without_a_header_taken_for_damage() -> Iterator[None]:
    """R1: a power cut may keep frames of it alone."""
    real = segment_module.is_abandoned
    with in_place_of(real, lambda file, name, *rest: real(file, file_names.lasting_name(name), *rest)):
        yield


@fault(
    "R1",
    "(1) (8) (10)",
    **UNSYNCED,
    samples=16,
    points=60,
    nested=0.0,
    style=replace(RETIRING, steps=60, payloads=(1400,), commits=20, durable=1.0),
)
def the_last_segment_on_disk_is_retired_beside_a_new_one() -> Iterator[None]:
    """A power cut takes the new one, and nothing says any more how far the queue had come."""
    with patch.object(journal, "is_new", lambda name: False):
        yield


@fault("R33", "(1) (8)", syncs=("always",))
def acknowledged_before_it_is_synced() -> Iterator[None]:
    with patch.object(GroupCommit, "wait", lambda *_, **__: None):
        yield


@fault("R14", "(1)")
def batch_in_parts() -> Iterator[None]:
    """``put_many`` as several records."""
    real = Journal.append_frame

    def append(self: Journal, items: Any, *rest: Any) -> range:
        ids = [real(self, [item], *rest)[0] for item in items]
        return range(ids[0], ids[-1] + 1)

    with patch.object(Journal, "append_frame", append):
        yield


@fault(
    "R9",
    "(1) (8) (10)",
    style=Style(failing=1.0, payloads=(900, 3500)),
    syncs=("always",),
    points=80,
    samples=1,
    nested=0,
)
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


@fault("R3", "(1) (2) (8) (10)", style=Style(commits=14, checkpoints=6))
def checkpoint_not_synced() -> Iterator[None]:
    """R3: a state is believed to be on disk that is not, and segments are retired on its word."""
    real_save = CheckpointFile.save

    def save(self: CheckpointFile, state: Any, *, durable: bool) -> None:
        real_save(self, state, durable=False)
        if durable:
            self.durable = state

    with _replaced_through(_MakesDeaf), patch.object(CheckpointFile, "save", save):
        yield


@contextmanager
def _replaced_through(wrapped: Callable[[Any], Any]) -> Iterator[None]:
    """Checkpoints and marks are replaced in a directory that is ``wrapped``."""
    real = FileWithSpare.replace

    def replace(self: FileWithSpare, data: bytes, size: int) -> int:
        with patch.object(self, "_directory", wrapped(self._directory)):
            return real(self, data, size)

    with patch.object(FileWithSpare, "replace", replace):
        yield


@fault("R3", "(1) (2) (10)", style=Style(commits=14, checkpoints=6))
def checkpoint_in_place() -> Iterator[None]:
    """R3: the old state is overwritten."""

    def replace(self: FileWithSpare, data: bytes, size: int) -> int:
        try:
            file = self._directory.open(self.name, write=True)
        except FileNotFoundError:
            file = self._directory.create(self.name)
            self._directory.sync()
        file.truncate(0)
        file.write(0, data, bytes(size - len(data)))
        file.sync()
        file.close()
        return size

    with patch.object(FileWithSpare, "replace", replace):
        yield


@fault(
    "R3",
    "(1) (2) (8) (10)",
    states=16_000,
    samples=10,
    points=60,
    nested=0.0,
    style=replace(DYING["style"], detached=1.0, deaths=0, deaths_elsewhere=40, durable=1.0),
)
def spare_file_of_an_earlier_life_written_at_once() -> Iterator[None]:
    """Where its process was killed before the folder was synced, it is the file itself, on disk. An opening of the
    queue syncs the folder; that of a reader elsewhere does not.
    """
    real = FileWithSpare.__init__

    def begin(self: FileWithSpare, *rest: Any) -> None:
        real(self, *rest)
        self._exchange_is_durable = True

    with patch.object(FileWithSpare, "__init__", begin):
        yield


@fault("R3", "(1) (2) (8) (10)", states=16_000, style=Style(commits=14, checkpoints=6))
def old_states_left_behind_the_new_one() -> Iterator[None]:
    """The spare file is not written to its end: what is behind goes on where the new state ends. That it is of another
    series alone masks this.
    """
    real = checkpoint_module._fill

    def fill(file: Any, data: bytes, size: int) -> int:
        if file.size() < size:
            return real(file, data, size)
        file.write(0, data)
        return int(file.size())

    with patch.object(checkpoint_module, "_fill", fill), patch.object(format_module, "SERIES", 1):
        yield


@fault(
    "R3",
    "(1) (2) (8) (10)",
    states=24_000,
    syncs=("always",),
    samples=20,
    points=30,
    nested=0.0,
    style=replace(
        MANY_LIVES,
        steps=60,
        payloads=(0, 1, 40),
        archive=0,
        detached=0,
        failing=0,
        starts_with_default=0,
        deaths=3,
        commits=60,
        aborts=0,
        durable=1.0,
        expiring=0,
    ),
)
def states_of_the_spare_file_taken_for_those_of_the_file() -> Iterator[None]:
    """What a power cut leaves of it where a state was being appended has the same series, and counts."""
    with patch.object(format_module, "SERIES", 1):
        yield


@fault("R4 R17", "(7) (8) (15)", **UNSYNCED, style=Style(payloads=(0, 1, 40), commits=16, checkpoints=8, failing=0))
def checkpoint_ahead_of_the_journal_and_ids_used_again() -> Iterator[None]:
    """R4 and R17: each alone is masked by the other."""
    real = Recovery.run

    def run(self: Recovery, names: Any) -> Any:
        found = real(self, names)
        found.tail_id = found.segments[-1].last_id if found.segments else 0
        return found

    with patch.object(Recovery, "run", run), patch.object(LocalSource, "make_durable", lambda *_: None):
        yield


@fault("R5", "(1)")
def reader_restarted_at_the_tail() -> Iterator[None]:
    """LK-B2: a reader whose checkpoint cannot be read begins behind everything."""
    real = ReaderRegistry._beginning
    with patch.object(ReaderRegistry, "_beginning", lambda self, _: real(self, "tail")):
        yield


@fault("R3", "(2) (15) (8)", style=Style(commits=16, checkpoints=8))
def done_ids_forgotten() -> Iterator[None]:
    """LK-B1: what was committed out of order is saved and never looked at."""
    real = Progress.load

    def load(state: Any) -> Progress:
        progress = real(state)
        progress.spans.clear()
        return progress

    with patch.object(Progress, "load", load):
        yield


@fault("R3", "(14)", style=Style(aborts=10, checkpoints=8, failing=0))
def error_counts_forgotten() -> Iterator[None]:
    real = Progress.load

    def load(state: Any) -> Progress:
        progress = real(state)
        progress.error_counts.clear()
        return progress

    with patch.object(Progress, "load", load):
        yield


@fault("R3", "(2) (8)", style=Style(commits=14, checkpoints=6))
def every_checkpoint_lost() -> Iterator[None]:
    with patch.object(QueueFiles, "load", lambda *_: None):
        yield


@fault("", "(3)", style=Style(expiring=0.7))
def expired_items_delivered() -> Iterator[None]:
    with patch.object(Backlog, "is_expired", lambda *_: False):
        yield


# -- retiring --------------------------------------------------------------------------------------------------------


@fault("R5", "(1) (8) (10)", **UNSYNCED, style=RETIRING, samples=6)
def retired_on_a_checkpoint_that_is_not_durable() -> Iterator[None]:
    """R5: segments go when the head in memory is past them."""
    with patch.object(ReaderRegistry, "_durable_head", lambda _, reader: reader.head):
        yield


@fault("R5", "(1) (8) (10)")
def retired_one_segment_too_many() -> Iterator[None]:
    """And deleted at once: what is taken out and still needed is not deleted later."""
    real = Journal.take_retired

    def take_retired(self: Journal, head: int, limit: int = format_module.LARGEST) -> list[Segment]:
        retired = real(self, head + 3, limit)
        for segment in retired:
            self.dispose(segment)
        return retired

    with patch.object(Journal, "take_retired", take_retired):
        yield


@fault("R5", "(1) (8) (10)", style=replace(RETIRING, detached=1.0, starts_with_default=0))
def retired_past_a_reader_elsewhere() -> Iterator[None]:
    """R5: only the readers open here are asked."""
    with patch.object(QueueFiles, "lowest_head_of_others", lambda *_: None):
        yield


@fault("R6", "(1) (10)", style=replace(RETIRING, archive=1.0, other_mount=1.0))
def archived_copy_not_synced() -> Iterator[None]:
    """R6: to another file system without a sync of the copy."""
    real = archive_module._copy
    with in_place_of(real, lambda directory, name, target, new: real(directory, name, _MakesDeaf(target), new)):
        yield


# -- the room on the disk --------------------------------------------------------------------------------------------


@fault("R5", "(1)", style=ROOM)
def a_kept_segment_is_retired() -> Iterator[None]:
    with patch.object(Retention, "count_due", lambda self, consumed, *_, **__: len(consumed)):
        yield


@fault("R40", "(2) (8)", **UNSYNCED, style=replace(ROOM, skips=20), samples=6)
def a_skip_is_not_durable() -> Iterator[None]:
    real = CheckpointFile.save

    def save(self: CheckpointFile, state: Any, *, durable: bool) -> None:
        real(self, state, durable=durable and not state.skipped)

    with patch.object(CheckpointFile, "save", save):
        yield


@fault("R40", "(1) (8)", style=replace(ROOM, skips=20))
def a_skip_goes_one_item_too_far() -> Iterator[None]:
    real = skipping.moved_past

    def moved_past(source: Any, progress: Progress, item_id: int, held: Any) -> Progress:
        return real(source, progress, min(item_id + 1, source.visible_id + 1), held)

    with in_place_of(real, moved_past):
        yield


@fault("R40", "(2) (8)", style=replace(ROOM, skips=20))
def a_skip_moves_places_back() -> Iterator[None]:
    """What was done after the place where it goes on."""
    real = skipping.moved_past

    def moved_past(source: Any, progress: Progress, item_id: int, held: Any) -> Progress:
        moved = progress.moved_to(item_id, *source.before(item_id))
        moved.skipped = real(source, progress, item_id, held).skipped
        return moved

    with in_place_of(real, moved_past):
        yield


# -- recovery --------------------------------------------------------------------------------------------------------


@fault(
    "R18", "(10) (5)", **UNSYNCED, samples=6, style=Style(payloads=(200, 900, 1400), segment_bytes=(24_000,), failing=0)
)
def torn_tail_not_cut() -> Iterator[None]:
    """Frames behind a hole are taken as if nothing were missing."""
    real = Recovery._follow

    def follow(self: Recovery, file: Any, segment: Any, offset: int, size: int) -> int:
        while True:
            offset = real(self, file, segment, offset, size)
            hit = format_module.find_frame(
                file.read(offset, size - offset), 0, segment.header.marker, segment.last_id + 1
            )
            if segment.closed or hit is None or hit[1].footer is not None:
                return offset
            segment.last_id = hit[1].first_id - 1
            offset += hit[0]

    with patch.object(Recovery, "_follow", follow):
        yield


@fault("R15", "(13)", damage=1.0, samples=0)
def watermark_ignored() -> Iterator[None]:
    """R15: what is not intact is cut, whatever shows that it was on disk."""
    with patch.object(Recovered, "watermark", property(lambda _: 0, lambda *_: None)):
        yield


@fault("R10", "(1) (8) (10)", **UNSYNCED, style=Style(failing=0.5, deaths=3))
def reopening_trusts_the_page_cache() -> Iterator[None]:
    """R10: the last segment is neither synced nor dropped from the cache before it is believed."""
    real = Recovery._load

    class Trusting(_Deaf):
        def forget(self) -> None:
            """The fault."""

    class Opens(_Deaf):
        def open(self, name: str, *, write: bool = False, linked: bool = False) -> Any:
            file = self._inner.open(name, write=write, linked=linked)
            return Trusting(file) if write else file

        def sync(self) -> None:
            self._inner.sync()

    def load(self: Recovery, *arguments: Any) -> Any:
        with patch.object(self, "_directory", Opens(self._directory)):
            return real(self, *arguments)

    with patch.object(Recovery, "_load", load):
        yield


@fault("R17", "(7)", **UNSYNCED, samples=6, twice=1.0, style=TEARING)
def ids_of_a_torn_tail_used_again() -> Iterator[None]:
    """R17: nothing remembers them once the tail is cut."""
    with patch.object(recovery, "write_mark", lambda *_: None):
        yield


@fault(
    "R20 R17",
    "(7)",
    **UNSYNCED,
    samples=4,
    points=10,
    nested=1.0,
    twice=0.0,
    states=40_000,
    style=replace(TEARING, deaths=0, commits=0, aborts=0, expiring=0),
)
def mark_after_the_footer() -> Iterator[None]:
    """A crash between them: the footer hides the torn tail, and nothing says which ids it had."""
    real_mark, real = recovery.write_mark, Recovery._close_last

    def close_last(self: Recovery, file: Any, segment: Any) -> None:
        later: list[tuple[Any, ...]] = []
        with patch.object(recovery, "write_mark", lambda *arguments: later.append(arguments)):
            real(self, file, segment)
        for arguments in later:
            real_mark(*arguments)

    with patch.object(Recovery, "_close_last", close_last):
        yield


@fault("R11", "(8) (10)")
def old_segment_left_without_a_footer() -> Iterator[None]:
    """The next segment begins behind one that looks as if its end had been lost."""
    with patch.object(recovery, "close_segment", lambda *_: None):
        yield


@fault("R15", "(13)", damage=1.0, samples=0)
def frames_behind_the_damage_not_looked_for() -> Iterator[None]:
    """What is behind a bad frame tells that it was on disk."""
    with patch.object(format_module, "look_beyond", lambda *_: (0, 0)):
        yield


@fault("R16", "(8) (13)", damage=1.0, samples=0, style=ROTATING)
def chain_not_checked() -> Iterator[None]:
    """A segment missing in the middle, or one cut between two frames, goes unseen."""
    with patch.object(Recovery, "_check_chain", lambda _: None), patch.object(Recovery, "_scan", lambda *_: 0):
        yield


@fault("R16", "(13)", damage=1.0, samples=0, style=ROTATING)
def ends_not_checked() -> Iterator[None]:
    """The first segment is gone, or the last one, and nobody asks."""
    with patch.object(Recovery, "_check_ends", lambda _: None):
        yield


@fault("R5", "(10)", **UNSYNCED, samples=6, style=RETIRING)
def segments_that_came_back_taken_for_damage() -> Iterator[None]:
    """An unlink is not durable until its folder is synced; what comes back must be harmless."""
    real = Recovery._check_chain

    def check(self: Recovery) -> None:
        with patch.object(self, "_heads", []):
            real(self)

    with patch.object(Recovery, "_check_chain", check):
        yield


# -- files and folders -----------------------------------------------------------------------------------------------


@fault("R2", "(1) (8) (9) (10)", samples=6)
def folder_not_synced_into_its_parent() -> Iterator[None]:
    """The files are on disk, and the way to them is not. (What ``RealDisk._make`` does, done by the disk in memory.)"""
    real = CrashingDisk._make

    def make(self: CrashingDisk, path: str) -> None:
        with patch.object(CrashingDisk, "_sync_folder", lambda *_: None):
            real(self, path)

    with patch.object(CrashingDisk, "_make", make):
        yield


@fault("R3", "(1) (2) (8) (10)", samples=6, style=Style(commits=14, checkpoints=10, deaths=3, archive=0, detached=0))
def renamed_checkpoint_not_synced() -> Iterator[None]:
    """The file is on disk, its new name is not, and segments are retired on its word."""
    with _replaced_through(_Deaf):
        yield


@fault("R8", "(9)")
def leftovers_by_their_beginning() -> Iterator[None]:
    """Whatever begins with the queue's name and is no file of its own now is taken for a left-over."""
    real = QueueFiles.remove_leftovers

    def remove(self: QueueFiles, names: list[str]) -> None:
        for name in names:
            if name.startswith(self.queue) and file_names.parse_owner(name) is None:
                self.directory.unlink(name)
        real(self, names)

    with patch.object(QueueFiles, "remove_leftovers", remove):
        yield


@fault("R8", "(10) (8)", nested=1.0, samples=4)
def leftovers_in_the_way() -> Iterator[None]:
    """A temporary file that a crash has left is neither removed at open nor before it is made again."""

    def replace(self: FileWithSpare, data: bytes, size: int) -> int:
        temporary = file_names.temporary_name(self.name)
        file = self._directory.create(temporary)
        file.write(0, data, bytes(size - len(data)))
        file.sync()
        file.close()
        self._directory.rename(temporary, self.name)
        self._directory.sync()
        return size

    with (
        patch.object(QueueFiles, "remove_leftovers", lambda *_: None),
        patch.object(QueueFiles, "hold_back", lambda *_: None),
        patch.object(FileWithSpare, "hold", lambda *_: None),
        patch.object(FileWithSpare, "replace", replace),
    ):
        yield


@fault("R34", "workload", style=ROTATING)
def numbers_from_the_clock_alone() -> Iterator[None]:
    """Two segments in one millisecond."""
    real = Journal._begin

    def begin(self: Journal, frame_bytes: int, added_ms: int) -> None:
        self._last_number = 0
        real(self, frame_bytes, added_ms)

    with patch.object(Journal, "_begin", begin):
        yield


@fault("R6", "(1)", style=replace(RETIRING, archive=1.0, other_mount=1.0), samples=6)
def archive_not_synced() -> Iterator[None]:
    """The segment is removed here before its name there is on disk."""
    real = archive_module.archive_segment

    def archive(directory: Any, name: str, target: Any, *rest: Any) -> bool:
        return real(directory, name, _Deaf(target), *rest)

    with in_place_of(real, archive):
        yield


@fault("R6", "(1)", style=replace(RETIRING, archive=1.0, other_mount=0.0))
def segment_deleted_instead_of_archived() -> Iterator[None]:
    with in_place_of(archive_module.archive_segment, lambda directory, name, *_: directory.unlink(name) or True):
        yield


@fault("R5", "(1) (8) (10)", style=replace(RETIRING, archive=1.0))
def archived_before_it_is_committed() -> Iterator[None]:
    """A segment goes as soon as it is read."""
    with patch.object(ReaderRegistry, "_durable_head", lambda _, reader: reader._backlog.progress.next_id - 1):
        yield


# -- places ----------------------------------------------------------------------------------------------------------


@fault("R3", "(1) (8)", style=Style(checkpoints=8, commits=10))
def open_reads_saved_as_done() -> Iterator[None]:
    """The place that is saved is how far the reader has read."""
    real = Progress.checkpoint

    def checkpoint(self: Progress, *rest: Any) -> Any:
        return real(self, *rest)._replace(head=self.next_id - 1, done=())

    with patch.object(Progress, "checkpoint", checkpoint):
        yield


@fault("R3", "(2) (15) (8)", style=Style(checkpoints=8, commits=16))
def done_ids_not_saved() -> Iterator[None]:
    with patch.object(Progress, "done_spans", lambda _: ()):
        yield


@fault("R3", "(2) (8)", style=Style(checkpoints=10, commits=10, detached=1.0))
def first_state_counts() -> Iterator[None]:
    """Of the states in a checkpoint file the first whole one is believed, not the last."""
    real = format_module.decode_checkpoints

    def decode(data: bytes) -> Any:
        last, end = real(data)
        size = format_module.CHECKPOINT_PREFIX_BYTES
        for at in range(size, end + 1):
            first, _ = real(data[:at])
            if first is not None:
                return first, end
        return last, end

    with patch.object(format_module, "decode_checkpoints", decode):
        yield


@fault("R3", "(8)", style=Style(checkpoints=14, commits=14), **UNSYNCED)
def saved_behind_a_torn_state() -> Iterator[None]:
    """A reader goes on at the end of its file, whatever is in front of that."""
    real = CheckpointFile.load

    def load(self: CheckpointFile) -> Any:
        found = real(self)
        self._size, self._end = self._directory.open(self.name).size() if found[1] else 0, 1 << 16
        self.durable = found[0]
        return found

    with patch.object(CheckpointFile, "load", load):
        yield


@fault(
    "R3",
    "(1) (2) (10) workload",
    syncs=("always",),
    points=5,
    samples=1,
    whole=0.0,
    style=replace(
        MANY_LIVES, payloads=(0, 1, 40), aborts=0, archive=0, detached=0, failing=0, starts_with_default=0, expiring=0
    ),
)
def saved_behind_what_a_power_cut_undid() -> Iterator[None]:
    """No zeros are behind the last state, so that a file grows; and a reader goes on at the end of its file, if that
    ends with a whole state: on the disk there may be more.
    """
    real = CheckpointFile.load

    def load(self: CheckpointFile) -> Any:
        found = real(self)
        self._size, self._end = _end_of_states(self)[0], 1 << 16
        return found

    def fill(file: Any, data: bytes, _size: int) -> int:
        file.truncate(0)
        file.write(0, data)
        return 1 << 16

    with patch.object(CheckpointFile, "load", load), patch.object(checkpoint_module, "_fill", fill):
        yield


def _end_of_states(file: CheckpointFile) -> tuple[int, int]:
    """Where the states of the file end, and the file, if there are only zeros between; zeros if not."""
    if file.name not in file._directory.names():
        return 0, 0
    handle: Any = file._directory.open(file.name)
    disk = getattr(handle._disk, "inner", handle._disk)
    read_before = disk.bytes_read
    data = handle.read(0, handle.size())
    disk.bytes_read = read_before  # what is planted is not the reading
    end = format_module.decode_checkpoints(data)[1]
    return (0, 0) if data[end:].strip(b"\0") else (end, len(data))


@fault("R10", "(1) (2) (8) (10)", **UNSYNCED, **DYING, samples=6)
def place_in_the_page_cache_believed_durable() -> Iterator[None]:
    """What was read at the opening counts as on disk, is gone on with, and segments are retired on its word."""
    real = CheckpointFile.load

    def load(self: CheckpointFile) -> Any:
        found = real(self)
        self.durable = found[0]
        self.durable_head = found[0].head if found[0] is not None else 0
        self._size, self._end = _end_of_states(self)
        return found

    with patch.object(CheckpointFile, "load", load):
        yield


@fault("", "(2) (8) (15)", style=Style(starts_with_default=1.0, commits=14))
def place_of_the_default_reader_lost() -> Iterator[None]:
    with patch.object(ReaderRegistry, "_inherit_default", lambda *_: None):
        yield


@fault("", "(1) (2)")
def seek_not_saved() -> Iterator[None]:
    real = Reader.seek

    def seek(self: Reader, *where: Any, **how: Any) -> None:
        with patch.object(Checkpointer, "_store", lambda *_, **__: None):
            real(self, *where, **how)

    with patch.object(Reader, "seek", seek):
        yield


# -- contents --------------------------------------------------------------------------------------------------------


@fault("", "(3)", style=Style(expiring=0.8))
def expiry_not_stored() -> Iterator[None]:
    real = format_module.encode_item

    def encode(item_id: int, data: bytes, added_ms: int, _: Any, *rest: Any) -> bytes:
        return real(item_id, data, added_ms, None, *rest)

    with patch.object(format_module, "encode_item", encode):
        yield


@fault("", "(15)", style=ROTATING)
def sums_not_carried_on() -> Iterator[None]:
    """A new segment's header does not say how many items there were before it."""
    real = format_module.encode_header
    with patch.object(format_module, "encode_header", lambda header: real(header._replace(base_items=0))):
        yield


@fault("R19", "(1) (5) (8) (10) workload", **UNSYNCED, samples=6)
def segment_cut_at_its_first_growth() -> Iterator[None]:
    """LK-B: a recovery that truncates: what it takes for the end is not."""
    real = Recovery._follow

    def follow(self: Recovery, file: Any, segment: Any, offset: int, size: int) -> int:
        return real(self, file, segment, offset, min(size, offset + 2000))

    with patch.object(Recovery, "_follow", follow):
        yield
