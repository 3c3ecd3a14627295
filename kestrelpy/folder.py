"""A folder of queues from outside: which there are, reading one in another process, scanning and checking one.

``scan`` and ``verify`` take no lock and write nothing; they may run while the writer writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TypeAlias

from kestrelpy import _format as fmt
from kestrelpy import _names
from kestrelpy._chain import Chain, missing_items
from kestrelpy._checks import check_seconds
from kestrelpy._detached import Outside
from kestrelpy._disk import Directory, Disk, File, RealDisk
from kestrelpy._home import Home
from kestrelpy._options import check_config
from kestrelpy._parts import refused_batches
from kestrelpy._purpose import refuse_jobs
from kestrelpy._readership import Readership, Start, check_start
from kestrelpy._segment import (
    FOREIGN,
    Segment,
    frames_of,
    load_segment,
    open_segment,
    read_footer,
    read_header,
    wrong_header,
)
from kestrelpy._verification import Damage, Verification, VerifyReport
from kestrelpy.clock import Clock, SystemClock
from kestrelpy.config import ReaderConfig
from kestrelpy.errors import CorruptJournal
from kestrelpy.item import Record
from kestrelpy.reader import Reader

__all__ = ["Damage", "VerifyReport", "open_reader", "queue_names", "scan", "verify"]

StrPath = str | os.PathLike[str]
Opened: TypeAlias = tuple[File, str, str, fmt.SegmentHeader]
"""A segment's file, its path, its name and its header."""


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
    at every ``poll_interval`` seconds at the latest; while items come, whenever a thirtieth of the time since the last
    one has passed, but at most twice a millisecond, which takes a few percent of a processor. ``start`` is for a new
    reader: ``"tail"``, ``"earliest"`` or an item id; the first named one takes over the default reader's place, unless
    somebody has that open: then it begins at ``start`` and stands beside the default reader. Items are bytes.

    Raises ``QueueLocked`` if the reader has an owner, ``InvalidName``, ``NoDefaultReader``, ``WrongKind`` for a work
    queue, ``CorruptJournal``, ``UnsupportedFormat``, ``ValueError``, ``TypeError``, ``OSError``
    (``FileNotFoundError`` for a folder that is not there).
    """
    _names.check_name(queue)
    if reader:
        _names.check_name(reader)
    check_start(start)
    poll_interval = check_seconds("poll_interval", poll_interval, above_zero=True)
    config = check_config("config", config if config is not None else ReaderConfig())
    folder = (disk or RealDisk()).directory(os.fspath(directory))
    outside: Outside | None = None
    try:
        refuse_jobs(folder, queue)
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
    ``CorruptJournal`` where a closed segment is not intact, ``UnsupportedFormat``, ``InvalidName``, ``OSError``
    (``FileNotFoundError`` for a queue that is erased meanwhile).
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
        self._chain = Chain(folders, queue)  # before the listing: the segments listed go at least as far
        self._counts: dict[int, int] = {}
        for state in self._chain.states:
            for item_id, count in state.error_counts:
                self._counts[item_id] = max(count, self._counts.get(item_id, 0))
        self._before: Segment | None = None

    def records(self) -> Iterator[Record]:
        numbers = list(self._chain.numbered())
        gone = False
        for number in numbers:
            last = number == numbers[-1]
            opened = self._open(number, last=last)
            if opened is None:  # being made in this moment, or retired since the folder was listed
                if number not in self._chain.numbered():
                    self._chain.check_there()
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
            raise missing_items(self._folders[0].path, self._queue, self._before, watermark)

    def _open(self, number: int, *, last: bool) -> Opened | None:
        """The file of a segment, wherever it is by now; ``None`` if it is gone, or never was one.

        Raises ``CorruptJournal`` where there is no other than a file without a valid header. In an archive another
        queue's may have the plain name.
        """
        opened, objection, is_gone = self._open_listed(number, last)
        if opened is None and is_gone:
            self._chain.look_again()
            opened, objection, _ = self._open_listed(number, last)
        if opened is None and objection is not None:
            raise objection
        return opened

    def _open_listed(self, number: int, last: bool) -> tuple[Opened | None, CorruptJournal | None, bool]:
        """The file where it was when the folders were listed, what is wrong with what was found in its place, and
        whether a file of the list is gone.
        """
        chain = self._chain
        objection: CorruptJournal | None = None
        is_gone = False
        for folder, name in chain.numbered().get(number, []):
            path = f"{folder.path}/{name}"
            try:
                file = open_segment(folder, name)
            except FileNotFoundError:
                is_gone = True
                continue
            try:
                header = read_header(file, path)
                if header is None or header.number != number:
                    if not chain.is_none(file, name, number, None):
                        objection = objection or wrong_header(header).error(path)
                elif chain.queue_id not in (b"", header.queue_id):
                    if folder is self._folders[0]:
                        objection = FOREIGN.error(path)
                elif last or read_footer(file, header) or not chain.is_none(file, name, number, header):
                    return (file, path, name, header), None, False
            except BaseException:
                file.close()
                raise
            file.close()
        return None, objection, is_gone

    def _records_of(
        self, file: File, path: str, name: str, header: fmt.SegmentHeader, *, last: bool
    ) -> Iterator[Record]:
        segment = load_segment(file, name, header)
        objection = self._chain.objection(self._before, segment)
        if objection is not None:
            raise objection.error(path)
        self._before = segment
        if segment.closed and _outside(segment, self._next_id, self._stop_id, self._start_ms, self._stop_ms):
            return
        for offset, frame in frames_of(file, segment, path):
            if self._stop_id is not None and frame.first_id >= self._stop_id:
                segment.last_id = max(segment.last_id, frame.first_id - 1)
                return
            if not segment.closed:
                segment.last_id, segment.records_end = frame.last_id, offset + frame.size
            for item_id, (data, added_ms, expires_ms) in enumerate(frame.entries, frame.first_id):
                if self._wants(item_id, added_ms):
                    yield Record(item_id, data, added_ms, expires_ms, self._counts.get(item_id, 0), name)
                    self._next_id = item_id + 1
        if not segment.closed and not last and self._chain.header_behind(segment.number) is not None:
            raise CorruptJournal(
                path, fmt.footer_offset(segment.size), "the footer of this closed segment is not intact"
            )

    def _wants(self, item_id: int, added_ms: int) -> bool:
        return (
            item_id >= self._next_id
            and (self._stop_id is None or item_id < self._stop_id)
            and (self._start_ms is None or added_ms >= self._start_ms)
            and (self._stop_ms is None or added_ms < self._stop_ms)
        )


def _outside(segment: Segment, next_id: int, stop_id: int | None, start_ms: int | None, stop_ms: int | None) -> bool:
    return (
        segment.last_id < next_id
        or (stop_id is not None and segment.first_id >= stop_id)
        or (start_ms is not None and segment.max_added_ms < start_ms)
        or (stop_ms is not None and segment.min_added_ms >= stop_ms)
    )


def verify(directory: StrPath, queue: str, *, disk: Disk | None = None) -> VerifyReport:
    """Read every byte of a queue and check it: checksums, order of ids, footers, the chain of segments, checkpoints.

    Read-only and without a lock, also while the writer is at work; of a queue that is erased meanwhile, items may be
    reported as missing. Damage is reported, not raised; raises ``OSError``, ``InvalidName`` and ``UnsupportedFormat``.
    """
    _names.check_name(queue)
    disk = disk or RealDisk()
    folder = disk.directory(os.fspath(directory))
    try:
        return Verification(folder, queue).run(refused_batches(os.fspath(directory), queue, disk))
    finally:
        folder.close()
