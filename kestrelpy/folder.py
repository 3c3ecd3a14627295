"""A folder of queues from outside: which there are, reading one in another process, scanning and checking one.

``scan`` and ``verify`` take no lock and write nothing; they may run while the writer writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from kestrelpy import _format as fmt
from kestrelpy import _names
from kestrelpy._checkpoint import load_checkpoint
from kestrelpy._detached import Outside
from kestrelpy._disk import Directory, Disk, File, RealDisk
from kestrelpy._home import Home
from kestrelpy._readership import Readership, Start, check_start
from kestrelpy._segment import Segment, frames_of, holds_frame, load_segment, read_header, read_used
from kestrelpy.clock import Clock, SystemClock
from kestrelpy.config import ReaderConfig
from kestrelpy.errors import CorruptJournal
from kestrelpy.item import Record
from kestrelpy.reader import Reader

__all__ = ["Damage", "VerifyReport", "open_reader", "queue_names", "scan", "verify"]

StrPath = str | os.PathLike[str]


def queue_names(directory: StrPath, *, disk: Disk | None = None) -> list[str]:
    """The names of the queues in ``directory``, sorted. Raises ``OSError``. Cost: O(files)."""
    folder = (disk or RealDisk()).directory(os.fspath(directory))
    try:
        names = folder.names()
    finally:
        folder.close()
    owners = (_names.parse_owner(name) for name in names)
    return sorted({owner[0] for owner in owners if owner is not None and not owner[1]})


def open_reader(
    directory: StrPath,
    queue: str,
    reader: str,
    *,
    config: ReaderConfig | None = None,
    start: Start = "tail",
    poll_interval: float = 0.05,
    clock: Clock | None = None,
    disk: Disk | None = None,
) -> Reader:
    """Open one reader of a queue that another process writes (or nobody does).

    The reader is owned by this process until its ``close()``. While somebody waits in its line, the files are looked
    at every ``poll_interval`` seconds at the latest. ``start`` is for a new reader: ``"tail"``, ``"earliest"`` or an
    item id; the first named one takes over the default reader's place, unless somebody has that open. Items are
    bytes.

    Raises ``QueueLocked`` if the reader has an owner, ``InvalidName``, ``NoDefaultReader``, ``UnsupportedFormat``,
    ``ValueError``, ``OSError`` (``FileNotFoundError`` for a folder that is not there).
    """
    _names.check_name(queue)
    if reader:
        _names.check_name(reader)
    check_start(start)
    if not poll_interval > 0:
        raise ValueError(f"poll_interval must be above 0, not {poll_interval!r}")
    config = config if config is not None else ReaderConfig()
    folder = (disk or RealDisk()).directory(os.fspath(directory))
    outside: Outside | None = None
    try:
        readership = Readership(Home(folder, queue), {}, config, _nothing)
        outside = Outside(folder, queue, clock if clock is not None else SystemClock(), poll_interval, readership)
        readership.feed = outside
        return readership.reader(reader, start)
    except BaseException:
        if outside is None:
            folder.close()
        else:
            outside.close()
        raise


def _nothing() -> None:
    """A reader from outside has no puts to consider."""


def scan(
    directory: StrPath,
    queue: str,
    *,
    archive_dir: StrPath | None = None,
    start_id: int | None = None,
    stop_id: int | None = None,
    start_ms: int | None = None,
    stop_ms: int | None = None,
    disk: Disk | None = None,
) -> Iterator[Record]:
    """Every item in the live and archived segments, in the order of ids, from ``start_id`` and ``start_ms`` to before
    ``stop_id`` and ``stop_ms``.

    Takes no lock and writes nothing. Segments outside the range are not read beyond their header and footer. Raises
    ``CorruptJournal`` where a closed segment is not intact, ``UnsupportedFormat``, ``OSError``.
    """
    _names.check_name(queue)
    chosen = disk or RealDisk()
    folders = [chosen.directory(os.fspath(directory))]
    try:
        if archive_dir is not None:
            folders.append(chosen.directory(os.fspath(archive_dir)))
        yield from _Scan(folders, queue, start_id, stop_id, start_ms, stop_ms).records()
    finally:
        for folder in folders:
            folder.close()


class _Chain:
    """What the segments of a queue must be like together, by its checkpoints. Its writer may be at work meanwhile."""

    def __init__(self, folder: Directory, queue: str) -> None:
        self._folder = folder
        self._queue = queue
        self.queue_id = _queue_id(folder, queue)
        self.states = self._load()
        self.watermark = max((state.watermark for state in self.states), default=0)

    def _load(self) -> list[fmt.Checkpoint]:
        readers = Home(self._folder, self._queue).reader_names()
        names = [_names.mark_name(self._queue), *(_names.checkpoint_name(self._queue, reader) for reader in readers)]
        states = (load_checkpoint(self._folder, name)[0] for name in names)
        return [state for state in states if state is not None and self.queue_id in (None, state.queue_id)]

    def objection(self, before: Segment | None, segment: Segment) -> str | None:
        """Why ``segment`` cannot come behind ``before``, or be the first one that is left, if it cannot."""
        header = segment.header
        previous_id = header.previous_last_id
        if before is not None and (header.previous_number, previous_id) == (before.number, before.last_id):
            return None
        # As they are now: what a live writer has retired since the folder was listed, every reader is past.
        head = min((state.head for state in self._load() if not state.flags & fmt.FLAG_MARK), default=None)
        if head is not None and head < previous_id and before is None:
            return f"a reader needs item {head + 1}; the journal begins behind it"
        if before is None or (head is not None and head >= previous_id):
            return None
        return "it does not follow the segment before it"


class _Scan:
    """One scan. That a live writer retires what was listed is no damage; that a file is missing otherwise is."""

    def __init__(
        self,
        folders: list[Directory],
        queue: str,
        start_id: int | None,
        stop_id: int | None,
        start_ms: int | None,
        stop_ms: int | None,
    ) -> None:
        self._folders = folders
        self._queue = queue
        self._next_id = 1 if start_id is None else start_id
        self._stop_id = stop_id
        self._start_ms = start_ms
        self._stop_ms = stop_ms
        self._chain = _Chain(folders[0], queue)  # before the listing: the segments listed go at least as far
        self._counts: dict[int, int] = {}
        for state in self._chain.states:
            for item_id, count in state.error_counts:
                self._counts[item_id] = max(count, self._counts.get(item_id, 0))
        self._before: Segment | None = None

    def records(self) -> Iterator[Record]:
        numbers = sorted(_numbered(self._folders, self._queue))
        gone = False
        for number in numbers:
            before, last = 0 if self._before is None else self._before.last_id, number == numbers[-1]
            opened = _open_segment(self._folders, self._queue, number, self._chain.queue_id, before, last=last)
            if opened is None:  # being made in this moment, or retired since the folder was listed
                if number not in _numbered(self._folders, self._queue):
                    self._before, gone = None, True
                continue
            gone = False
            try:
                yield from self._records_of(*opened, last=last)
            finally:
                opened[0].close()
        last_id, watermark = self._before.last_id if self._before is not None else 0, self._chain.watermark
        sought = self._stop_id is None or last_id + 1 < self._stop_id
        if last_id < watermark and sought and not gone:
            name = self._before.name if self._before is not None else f"{self._queue}.*.segment"
            path, reason = f"{self._folders[0].path}/{name}", f"items {last_id + 1} to {watermark} are missing"
            raise CorruptJournal(path, 0, reason, item_id=last_id + 1)

    def _records_of(
        self, file: File, path: str, name: str, header: fmt.SegmentHeader, *, last: bool
    ) -> Iterator[Record]:
        segment = load_segment(file, self._queue, header)
        segment.name = name
        objection = self._chain.objection(self._before, segment)
        if objection is not None:
            raise CorruptJournal(path, 48, objection)
        self._before = segment
        if segment.closed and _outside(segment, self._next_id, self._stop_id, self._start_ms, self._stop_ms):
            return
        for _, frame in frames_of(file, segment, path):
            if self._stop_id is not None and frame.first_id >= self._stop_id:
                segment.last_id = max(segment.last_id, frame.first_id - 1)
                return
            if not segment.closed:
                segment.last_id = frame.last_id
            for item_id, (data, added_ms, expires_ms) in enumerate(frame.entries, frame.first_id):
                if self._wants(item_id, added_ms):
                    yield Record(item_id, data, added_ms, expires_ms, self._counts.get(item_id, 0), name)
                    self._next_id = item_id + 1
        if not segment.closed and not last:
            raise CorruptJournal(path, segment.size, "the footer of this closed segment is not intact")

    def _wants(self, item_id: int, added_ms: int) -> bool:
        return (
            item_id >= self._next_id
            and (self._stop_id is None or item_id < self._stop_id)
            and (self._start_ms is None or added_ms >= self._start_ms)
            and (self._stop_ms is None or added_ms < self._stop_ms)
        )


def _numbered(folders: list[Directory], queue: str) -> dict[int, list[tuple[Directory, str]]]:
    """Where the segments of a queue are, by number; the live one before its archived twin."""
    found: dict[int, list[tuple[Directory, str]]] = {}
    for folder in folders:
        for number, name in sorted(
            _names.segments_among(folder.names(), queue), key=lambda each: (len(each[1]), each[1])
        ):
            found.setdefault(number, []).append((folder, name))
    return found


def _open_segment(
    folders: list[Directory], queue: str, number: int, queue_id: bytes | None, before: int, *, last: bool
) -> tuple[File, str, str, fmt.SegmentHeader] | None:
    """The file of a segment, wherever it is by now; ``None`` if it is gone, or the last one and being made. ``before``:
    the last id of the segment before it.

    Raises ``CorruptJournal`` where there is no other than a file without a valid header. In an archive another queue's
    may have the plain name.
    """
    objection: CorruptJournal | None = None
    for folder, name in _numbered(folders, queue).get(number, []):
        path = f"{folder.path}/{name}"
        try:
            file = folder.open(name)
        except FileNotFoundError:
            continue
        try:
            header = read_header(file, path)
            if header is not None and header.number == number and queue_id in (None, header.queue_id):
                return file, path, name, header
            if header is None and not (last and not holds_frame(file, before)):
                objection = objection or CorruptJournal(path, 0, "this segment has no valid header")
            if header is not None and folder is folders[0]:
                objection = CorruptJournal(path, 16, "this segment belongs to another place or another queue")
        except BaseException:
            file.close()
            raise
        file.close()
    if objection is not None:
        raise objection
    return None


def _queue_id(folder: Directory, queue: str) -> bytes | None:
    """The id of the queue that lives in ``folder``, as its newest segment has it; ``None`` if it has none there."""
    for number, name in reversed(_names.segments_among(folder.names(), queue)):
        try:
            file = folder.open(name)
        except FileNotFoundError:
            continue  # retired in this moment
        try:
            header = read_header(file, f"{folder.path}/{name}")
        finally:
            file.close()
        if header is not None and header.number == number:
            return header.queue_id
    return None


def _outside(segment: Segment, next_id: int, stop_id: int | None, start_ms: int | None, stop_ms: int | None) -> bool:
    return (
        segment.last_id < next_id
        or (stop_id is not None and segment.first_id >= stop_id)
        or (start_ms is not None and segment.max_added_ms < start_ms)
        or (stop_ms is not None and segment.min_added_ms >= stop_ms)
    )


# -- checking --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Damage:
    """One place that is not as it should be."""

    path: str
    offset: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What ``verify`` found. ``torn_bytes``: left behind by crashes above what was durable; no damage."""

    queue: str
    segments: int = 0
    items: int = 0
    bytes: int = 0
    first_id: int = 0
    last_id: int = 0
    torn_bytes: int = 0
    readers: tuple[str, ...] = ()
    damage: tuple[Damage, ...] = ()
    unknown_files: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damage


def verify(directory: StrPath, queue: str, *, disk: Disk | None = None) -> VerifyReport:
    """Read every byte of a queue and check it: checksums, order of ids, footers, the chain of segments, checkpoints.

    Read-only and without a lock. Damage is reported, not raised; raises ``OSError``, ``InvalidName`` and
    ``UnsupportedFormat``.
    """
    _names.check_name(queue)
    folder = (disk or RealDisk()).directory(os.fspath(directory))
    try:
        return _Verification(folder, queue).run()
    finally:
        folder.close()


class _Verification:
    def __init__(self, folder: Directory, queue: str) -> None:
        self._folder = folder
        self._queue = queue
        self._damage: list[Damage] = []
        self._items = self._bytes = self._torn = 0
        self._chain = _Chain(folder, queue)
        self._watermark = self._chain.watermark

    def _report(self, name: str, offset: int, reason: str) -> None:
        self._damage.append(Damage(f"{self._folder.path}/{name}", offset, reason))

    def run(self) -> VerifyReport:
        readers = tuple(sorted(Home(self._folder, self._queue).reader_names()))
        self._check_states(readers)
        numbered = _names.segments_among(self._folder.names(), self._queue)
        segments: list[Segment] = []
        for number, name in numbered:
            before = segments[-1].last_id if segments else 0
            segment = self._check_segment(number, name, before, last=name == numbered[-1][1])
            if segment is not None:
                objection = self._chain.objection(segments[-1] if segments else None, segment)
                if objection is not None:
                    self._report(name, 48, objection)
                segments.append(segment)
        last_id = segments[-1].last_id if segments else 0
        if self._watermark > last_id:
            self._report(
                numbered[-1][1] if numbered else "", 0, f"items {last_id + 1} to {self._watermark} are missing"
            )
        return VerifyReport(
            queue=self._queue,
            segments=len(segments),
            items=self._items,
            bytes=self._bytes,
            first_id=segments[0].first_id if segments else 0,
            last_id=last_id,
            torn_bytes=self._torn,
            readers=readers,
            damage=tuple(self._damage),
            unknown_files=tuple(
                sorted(
                    name
                    for name in self._folder.names()
                    if name.startswith((f"{self._queue}.", f"{self._queue}+")) and _names.parse_owner(name) is None
                )
            ),
        )

    def _check_states(self, readers: tuple[str, ...]) -> None:
        names = [_names.checkpoint_name(self._queue, reader) for reader in readers]
        for name in [*names, _names.mark_name(self._queue)]:
            state, exists = load_checkpoint(self._folder, name)
            if exists and state is None:
                self._report(name, 0, "no whole state in this checkpoint")
            elif state is not None and self._chain.queue_id not in (None, state.queue_id):
                self._report(name, 24, "this checkpoint belongs to another queue")

    def _check_segment(self, number: int, name: str, before: int, *, last: bool) -> Segment | None:
        file = self._folder.open(name)
        path = f"{self._folder.path}/{name}"
        segment = None
        try:
            header = read_header(file, path)
            if header is None:
                if not last or holds_frame(file, before):
                    self._report(name, 0, "no valid header")
                return None
            if (header.number, header.queue_id) != (number, self._chain.queue_id):
                self._report(name, 16, "this segment belongs to another place or another queue")
                return None
            segment = load_segment(file, self._queue, header)
            segment.name = name
            self._watermark = max(self._watermark, header.previous_last_id)
            if not segment.closed and not last:
                self._report(name, segment.size, "no valid footer")
            self._count(file, segment, path)
            return segment
        except CorruptJournal as damage:
            self._report(name, damage.offset, damage.reason)
            return segment
        finally:
            file.close()

    def _count(self, file: File, segment: Segment, path: str) -> None:
        items = size = 0
        end = fmt.HEADER_BYTES
        last_id = segment.first_id - 1
        for offset, frame in frames_of(file, segment, path):
            items += len(frame.entries)
            size += sum(len(entry[0]) for entry in frame.entries)
            self._watermark = max(self._watermark, frame.watermark)
            end, last_id = offset + frame.size, frame.last_id
        self._items += items
        self._bytes += size
        if not segment.closed:
            segment.last_id, segment.data_bytes, segment.records_end = last_id, size, end
        elif (items, size) != (segment.items, segment.data_bytes):
            self._report(segment.name, segment.records_end, "the footer does not match the frames")
        behind = segment.size - (fmt.FOOTER_BYTES if segment.closed else 0)
        self._torn += len(read_used(file, segment.records_end, behind))
