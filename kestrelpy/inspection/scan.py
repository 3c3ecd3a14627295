"""Reading all items of a queue from outside: ``scan``.

It takes no lock and writes nothing. It may run while the writer writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from kestrelpy._disk.interface import Directory, Disk, File, StrPath
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import file_names
from kestrelpy._journal import format as fmt
from kestrelpy._journal.catalog import SegmentCatalog, missing_items
from kestrelpy._journal.segment import (
    FOREIGN,
    Objection,
    Segment,
    frames_of,
    load_segment,
    open_segment,
)
from kestrelpy.errors import CorruptJournal
from kestrelpy.item import Record


class Opened(NamedTuple):
    """A segment and its open file. The caller of ``Scan.open`` closes the file."""

    file: File
    path: str
    segment: Segment


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
    """Every item in the live segments and those of ``archive_dir``, in the order of ids, from ``start_id`` and
    ``start_ms`` (milliseconds since 1970) to before ``stop_id`` and ``stop_ms``.

    Takes no lock and writes nothing. Segments outside the range are not read beyond their header and footer. Raises
    ``CorruptJournal`` where a closed segment is not intact, ``UnsupportedFormat``, ``InvalidName``, ``OSError``
    (``FileNotFoundError`` for a queue that is erased meanwhile).
    """
    file_names.check_name(queue)
    chosen = disk or RealDisk()
    folders = [chosen.directory(os.fspath(directory))]
    try:
        if archive_dir is not None:
            folders.append(chosen.directory(os.fspath(archive_dir)))
        yield from Scan(folders, queue, start_id, stop_id, start_ms, stop_ms).records()
    finally:
        for folder in folders:
            folder.close()


class Scan:
    """One scan. A segment that a live writer retires after the listing is no damage; any other missing file is."""

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
        self.catalog = SegmentCatalog(folders, queue)  # before the listing, so that the list goes at least as far
        self.error_counts: dict[int, int] = {}
        for state in self.catalog.states:
            for item_id, count in state.error_counts:
                self.error_counts[item_id] = max(count, self.error_counts.get(item_id, 0))
        self._before: Segment | None = None

    def records(self) -> Iterator[Record]:
        numbers = list(self.catalog.numbered())
        gone = False
        for number in numbers:
            last = number == numbers[-1]
            opened = self.open(number, last=last)
            if opened is None:  # it is being made at this moment, or was retired since the folder was listed
                if number not in self.catalog.numbered():
                    self.catalog.check_there()
                    self._before, gone = None, True
                continue
            gone = False
            try:
                yield from self._records_of(*opened, last=last)
            finally:
                opened.file.close()
        last_id, watermark = self._before.last_id if self._before is not None else 0, self.catalog.watermark
        sought = self._stop_id is None or last_id + 1 < self._stop_id
        if last_id < watermark and sought and not gone:
            raise missing_items(self._folders[0].path, self._queue, self._before, watermark)

    def open(self, number: int, *, last: bool) -> Opened | None:
        """Open the file of a segment, wherever it is by now; ``None`` if it is gone, or never was one.

        Raises ``CorruptJournal`` if there is only a file without a valid header. In an archive, a segment of another
        queue may have the plain name.
        """
        opened, objection, is_gone = self._open_listed(number, last)
        if opened is None and is_gone:
            self.catalog.look_again()
            opened, objection, _ = self._open_listed(number, last)
        if opened is None and objection is not None:
            raise objection
        return opened

    def _open_listed(self, number: int, last: bool) -> tuple[Opened | None, CorruptJournal | None, bool]:
        """Open the file where it was when the folders were listed. Also returns what is wrong with the file that was
        found there, and whether a listed file is gone.
        """
        catalog = self.catalog
        objection: CorruptJournal | None = None
        is_gone = False
        for folder, name in catalog.numbered().get(number, []):
            path = f"{folder.path}/{name}"
            try:
                file = open_segment(folder, name)
            except FileNotFoundError:
                is_gone = True
                continue
            try:
                header = catalog.identify(file, path, name, number)
                if isinstance(header, Objection):
                    if header is not FOREIGN:
                        objection = objection or header.error(path)
                    elif folder is self._folders[0]:
                        objection = header.error(path)
                elif header is not None:
                    segment = load_segment(file, name, header)
                    if last or segment.closed or not catalog.is_abandoned(file, segment):
                        return Opened(file, path, segment), None, False
            except BaseException:
                file.close()
                raise
            file.close()
        return None, objection, is_gone

    def _records_of(self, file: File, path: str, segment: Segment, *, last: bool) -> Iterator[Record]:
        objection = self.catalog.objection(self._before, segment)
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
                    yield Record(item_id, data, added_ms, expires_ms, self.error_counts.get(item_id, 0), segment.name)
                    self._next_id = item_id + 1
        if not segment.closed and not last and self.catalog.header_after(segment.number) is not None:
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
