"""``ArchiveTrimmer``: deletes archived segments that are older, or more, than an archive is to keep.

Rules:
1. Only closed segments of this queue are deleted, by what their header says: other queues and other files may be there.
2. The oldest goes first, and is gone from the disk before the next one goes: an archive never has a hole.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from kestrelpy._disk.interface import Directory
from kestrelpy._journal.file_names import segments_among
from kestrelpy._journal.retention import Retention
from kestrelpy._journal.segment import load_segment, read_header
from kestrelpy.errors import CorruptJournal, UnsupportedFormat


class ArchivedSegment(NamedTuple):
    """One archived segment. ``max_added_ms``: when its last item was put; 0 if it has none."""

    number: int
    name: str
    size: int
    max_added_ms: int


class ArchiveTrimmer:
    """Keeps the archive of one queue within its limits.

    NOTE ON LOCKING: none of its own. One thread at a time calls ``trim``; that readers look meanwhile does no harm.
    """

    def __init__(self, archive: Directory, queue: str, queue_id: bytes, retention: Retention) -> None:
        self._archive = archive
        self._queue = queue
        self._queue_id = queue_id
        self._retention = retention
        self._known: dict[str, ArchivedSegment | None] = {}  # ``None``: a file that is not ours, or cannot be read
        self._oldest: list[ArchivedSegment] = []

    def is_due(self, now_ms: int) -> bool:
        """Whether the archive, as it was listed last, has a segment that is to go."""
        return self._retention.count_due(self._oldest, now_ms) > 0

    def trim(self, now_ms: int) -> int:
        """Delete what is to go; returns how many segments. Cost: a listing of the folder, and a look at each segment
        that was not there the last time. Raises ``OSError``.
        """
        there = segments_among(self._archive.names(), self._queue)
        self._known = {
            name: self._known[name] if name in self._known else self._look(number, name) for number, name in there
        }
        self._oldest = sorted(each for each in self._known.values() if each is not None)
        count = self._retention.count_due(self._oldest, now_ms)
        for segment in self._oldest[:count]:
            with contextlib.suppress(FileNotFoundError):
                self._archive.unlink(segment.name)
            self._archive.sync()
        del self._oldest[:count]
        return count

    def _look(self, number: int, name: str) -> ArchivedSegment | None:
        try:
            file = self._archive.open(name)
        except OSError:  # gone meanwhile, or no regular file
            return None
        try:
            header = read_header(file, f"{self._archive.path}/{name}")
            if header is None or (header.number, header.queue_id) != (number, self._queue_id):
                return None
            segment = load_segment(file, name, header)
        except (CorruptJournal, UnsupportedFormat):
            return None
        finally:
            file.close()
        return ArchivedSegment(number, name, segment.size, segment.max_added_ms) if segment.closed else None
