"""The segments of a queue as seen from outside: without a lock, and while the writer may be at work.

The catalog checks that the segments fit together. It objects to a segment where an opening (``recovery``) would.
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from typing import NamedTuple

from kestrelpy._disk.interface import Directory, File
from kestrelpy._journal import file_names
from kestrelpy._journal import format as fmt
from kestrelpy._journal.checkpoint import known_ids, known_queue_id, likely_queue_id
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._journal.segment import (
    HeadersAfter,
    Objection,
    Segment,
    identify,
    is_abandoned,
    link_offset,
    link_reason,
    segments_in,
    stored_header,
)
from kestrelpy.errors import CorruptJournal

_TRIES = 20  # a live writer may retire all listed segments, before one of them is opened


class NotRetired(NamedTuple):
    """Why a segment is not known to have been retired. ``item_id``: the item that a reader needs of it, if any."""

    reason: str
    item_id: int | None = None


def missing_items(folder: str, queue: str, last: Segment | None, watermark: int) -> CorruptJournal:
    """The error if the ``last`` segment ends before ``watermark``, although items up to it were on disk."""
    name, end, last_id = (f"{queue}.*.segment", 0, 0) if last is None else (last.name, last.records_end, last.last_id)
    reason = f"items {last_id + 1} to {watermark} are missing"
    return CorruptJournal(f"{folder}/{name}", end, reason, item_id=last_id + 1)


class SegmentCatalog:
    """The segments of a queue, and its checkpoints. ``folders``: the live folder first, then perhaps an archive.

    The folders are listed when the segments are first asked for. Call ``look_again`` if a listed file is gone: it lists
    them again.
    """

    def __init__(self, folders: list[Directory], queue: str, *, reads_all: bool = False) -> None:
        """``reads_all``: read the headers of all segments, and believe the most of them. Else the newest one says which
        queue this is.
        """
        self._folders = folders
        self.queue = queue
        names = folders[0].names()
        file_names.refuse_unrestored(names, queue, folders[0].path)
        numbered = file_names.segments_among(names, queue)
        headers = (_header(folders[0], number, name) for number, name in reversed(numbered))
        there = [header for header in headers if header is not None] if reads_all else None
        self.queue_id = next((header.queue_id for header in headers if header is not None), b"")
        """The id of the queue that lives here; empty if no file says it."""
        states = self._load()
        self.queue_id = likely_queue_id(there, states) if there else self.queue_id or known_queue_id(states)
        self.states = [state for state in states if state.queue_id == self.queue_id]
        known = known_ids(states, self.queue_id)
        self.watermark = known.watermark
        self._numbered: dict[int, list[tuple[Directory, str]]] | None = None
        self._order: list[tuple[int, Directory, str]] = []
        self._headers_after = HeadersAfter(0, self._header_at)
        self._heads = known.heads
        self._may_have_moved = True  # whether readers may have moved past the heads in ``_heads``

    def _load(self) -> list[fmt.Checkpoint]:
        return QueueFiles(self._folders[0], self.queue).load_all(self._folders[0].names())

    def numbered(self) -> dict[int, list[tuple[Directory, str]]]:
        """The files of the segments by number, in order. A live file comes before its archived twin."""
        if self._numbered is None:
            self.look_again()
        assert self._numbered is not None
        return self._numbered

    def look_again(self) -> None:
        """List the folders again: a listed file was retired or archived, or never was a segment."""
        found: dict[int, list[tuple[Directory, str]]] = {}
        for folder in self._folders:
            for number, name in sorted(segments_in(folder, self.queue), key=lambda each: (len(each[1]), each[1])):
                found.setdefault(number, []).append((folder, name))
        self._numbered = {number: found[number] for number in sorted(found)}
        self._order = [(number, *place) for number, places in self._numbered.items() for place in places]
        self._headers_after = HeadersAfter(len(self._order), self._header_at)
        self._may_have_moved = True

    def check_there(self) -> None:
        """Call this when a listed segment is gone. Raises ``FileNotFoundError`` if the queue itself is gone, or another
        one is in its place: the segments of an erased queue were not retired.
        """
        if self.queue_id not in (b"", SegmentCatalog(self._folders, self.queue).queue_id):
            reason = f"queue {self.queue!r} is gone, or another one is in its place"
            raise FileNotFoundError(errno.ENOENT, reason, self._folders[0].path)

    def note_gone(self) -> None:
        """Note that a listed file is gone. It was retired if all readers are past it, so their heads may have moved."""
        self._may_have_moved = True

    def identify(self, file: File, path: str, name: str, number: int) -> fmt.SegmentHeader | Objection | None:
        """Identify a file by its first bytes; ``None`` for a segment whose creation was abandoned."""
        return identify(file, path, name, number, self.queue_id, lambda: self.header_after(number))

    def is_abandoned(self, file: File, segment: Segment) -> bool:
        """Whether the creation of this segment, which has no footer and is not the last one, was abandoned."""
        return is_abandoned(file, segment.name, segment.number, segment.header, self.header_after(segment.number))

    def header_after(self, number: int) -> fmt.SegmentHeader | None:
        """The first whole header of this queue after that number. An archive may have later ones of other queues."""
        self.numbered()
        return self._headers_after.first_from(bisect_right(self._order, number, key=_number))

    def _header_at(self, at: int) -> fmt.SegmentHeader | None:
        number, folder, name = self._order[at]
        header = _header(folder, number, name)
        return header if header is not None and header.queue_id == self.queue_id else None

    def doubt(self, number: int, queue_id: bytes) -> NotRetired | None:
        """Why a segment that was there before is not known to have been retired; ``None`` if it is known.

        That it is not here proves nothing: this may be another folder than the one where it was seen, or an older copy.
        Two facts together prove that it was retired: a later segment of the same queue is there, and the checkpoint of
        every reader is past everything before that later segment. The checkpoints are read after the segment was seen:
        a live writer goes on, and earlier ones may not be past what it has retired since.
        """
        if self.queue_id != queue_id:
            return NotRetired(
                "another queue of that name is there" if self.queue_id else "nothing of that queue is there"
            )
        after = self._next_header(number)
        if after is None:
            return NotRetired("no later segment is there")
        heads = known_ids(self._load(), self.queue_id).heads
        if not heads:
            return NotRetired("no reader has a checkpoint there that says so")
        if min(heads) < after.previous_last_id:
            return NotRetired(f"a reader needs item {min(heads) + 1}; this segment is gone", min(heads) + 1)
        return None

    def _next_header(self, number: int) -> fmt.SegmentHeader | None:
        """The header of the first live segment of this queue after ``number``."""
        for _ in range(_TRIES):
            later = [each for each in segments_in(self._folders[0], self.queue) if each[0] > number]
            headers = (_header(self._folders[0], *each) for each in later)
            found = next((each for each in headers if each is not None and each.queue_id == self.queue_id), None)
            if found is not None or not later:
                return found
        return None

    def objection(self, before: Segment | None, segment: Segment) -> Objection | None:
        """Why ``segment`` cannot follow ``before``, or cannot be the first remaining segment; ``None`` if it can."""
        header = segment.header
        previous_id = header.previous_last_id
        if before is not None and (header.previous_number, previous_id) == (before.number, before.last_id):
            return None
        head = self._lowest_head(previous_id)
        if head is not None and head < previous_id and before is None:
            return Objection(link_offset(header, None), f"a reader needs item {head + 1}; the journal begins after it")
        if before is None or (head is not None and head >= previous_id):
            return None
        return Objection(link_offset(header, before), link_reason(header, before))

    def _lowest_head(self, wanted: int) -> int | None:
        """The lowest head of all readers; ``None`` if there are none.

        A live writer may have retired segments since the folders were listed; every reader is past those. So if a
        higher head would help, the checkpoints are read once more.
        """
        lowest = min(self._heads, default=None)
        if self._may_have_moved and (lowest is None or lowest < wanted):
            self._may_have_moved = False
            self._heads = known_ids(self._load(), self.queue_id).heads
            lowest = min(self._heads, default=None)
        return lowest


def _number(each: tuple[int, Directory, str]) -> int:
    return each[0]


def _header(folder: Directory, number: int, name: str) -> fmt.SegmentHeader | None:
    """The header of a segment; ``None`` for a file larger than any segment. Reading that file raises the error."""
    try:
        return stored_header(folder, number, name)
    except CorruptJournal:
        return None
