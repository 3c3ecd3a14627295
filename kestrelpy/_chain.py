"""What the segments of a queue must be like together, as one sees it from outside: without a lock, and while its writer
may be at work.

It says of a segment what an opening would say; that is ``_recovery``.
"""

from __future__ import annotations

from kestrelpy import _format as fmt
from kestrelpy import _names
from kestrelpy._checkpoint import known_queue_id
from kestrelpy._disk import Directory, File
from kestrelpy._home import Home
from kestrelpy._segment import Segment, is_none, stored_header
from kestrelpy.errors import CorruptJournal


class Chain:
    """The segments of a queue in ``folders``, the live one first and perhaps an archive, and its checkpoints."""

    def __init__(self, folders: list[Directory], queue: str) -> None:
        self._folders = folders
        self.queue = queue
        newest = reversed(_names.segments_among(folders[0].names(), queue))
        headers = (_header(folders[0], number, name) for number, name in newest)
        self.queue_id = next((header.queue_id for header in headers if header is not None), b"")
        """Of the queue that lives here; empty if nothing says so."""
        states = self._load()
        self.queue_id = self.queue_id or known_queue_id(states)
        self.states = [state for state in states if state.queue_id == self.queue_id]
        self.watermark = max((state.watermark for state in self.states), default=0)

    def _load(self) -> list[fmt.Checkpoint]:
        return Home(self._folders[0], self.queue).load_all(self._folders[0].names())

    def numbered(self) -> dict[int, list[tuple[Directory, str]]]:
        """Where the segments are, by number; the live one before its archived twin."""
        found: dict[int, list[tuple[Directory, str]]] = {}
        for folder in self._folders:
            for number, name in sorted(
                _names.segments_among(folder.names(), self.queue), key=lambda each: (len(each[1]), each[1])
            ):
                found.setdefault(number, []).append((folder, name))
        return found

    def is_none(self, file: File, name: str, number: int, header: fmt.SegmentHeader | None) -> bool:
        """As ``_segment.is_none``."""
        later = sorted((each, places) for each, places in self.numbered().items() if each > number)
        headers = (_header(folder, each, name) for each, places in later for folder, name in places)
        after = next((each for each in headers if each is not None and each.queue_id == self.queue_id), None)
        return is_none(file, name, number, header, after)

    def objection(self, before: Segment | None, segment: Segment) -> str | None:
        """Why ``segment`` cannot come behind ``before``, or be the first one that is left, if it cannot."""
        header = segment.header
        previous_id = header.previous_last_id
        if before is not None and (header.previous_number, previous_id) == (before.number, before.last_id):
            return None
        # As they are now: what a live writer has retired since the folder was listed, every reader is past.
        states = (state for state in self._load() if state.queue_id == self.queue_id)
        head = min((state.head for state in states if not state.flags & fmt.FLAG_MARK), default=None)
        if head is not None and head < previous_id and before is None:
            return f"a reader needs item {head + 1}; the journal begins behind it"
        if before is None or (head is not None and head >= previous_id):
            return None
        return "it does not follow the segment before it"


def _header(folder: Directory, number: int, name: str) -> fmt.SegmentHeader | None:
    """The header of a segment. A file larger than any segment has none; whoever reads it is told so."""
    try:
        return stored_header(folder, number, name)
    except CorruptJournal:
        return None
