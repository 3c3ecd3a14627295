"""Reading a journal: its segments as one sequence of items.

Used by the journal's writer and by a reader in another process alike. Nothing here writes, but for bytes that
quarantine keeps aside.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from kestrelpy import _format as fmt
from kestrelpy._disk import Directory, File
from kestrelpy._names import quarantine_name
from kestrelpy._recovery import MARK_EVERY
from kestrelpy._segment import Place, Segment, read_entries
from kestrelpy.errors import CorruptJournal


class Block(NamedTuple):
    """What one read of the journal brought: items by id, the next id, where its frame is, and what had to be passed
    over.
    """

    entries: dict[int, fmt.Entry]
    next_id: int
    number: int
    place: Place
    lost_items: int


class JournalView:
    """The segments of one queue, for reading. What may be called from any thread, beside the writer, says so."""

    def __init__(self, directory: Directory, queue: str, *, quarantine: bool = False) -> None:
        self._directory = directory
        self._queue = queue
        self._quarantine = quarantine
        self._aside: set[tuple[int, int]] = set()
        self.quarantined = 0
        self.missing = 0
        """How many ids up to the tail were given out and lost, or passed over: what is there is ``tail_id -
        missing``.
        """
        self.segments: tuple[Segment, ...] = ()
        """Oldest first; replaced as a whole, never changed: reading it needs no lock."""

    @property
    def tail_id(self) -> int:
        """The last id given out. May be read at any time."""
        raise NotImplementedError

    @property
    def total_bytes(self) -> int:
        """Bytes of all items ever put. May be read at any time."""
        raise NotImplementedError

    @property
    def first_id(self) -> int:
        """The earliest id that is kept, or the next one if there is none. May be read at any time."""
        segments = self.segments
        return segments[0].first_id if segments else self.tail_id + 1

    def hint(self, item_id: int) -> tuple[int, Place]:
        """The number of a segment and a place in it at or before ``item_id``. May be called at any time."""
        segment = self._holding(item_id, self.segments)
        return (segment.number, segment.place_before(item_id)) if segment else (0, (0, 0))

    def read(self, item_id: int, last_id: int, max_bytes: int, hint: tuple[int, Place] | None = None) -> Block:
        """Items from ``item_id`` to at most ``last_id``, which must have been put before the call.

        About ``max_bytes``, from one segment. May be called beside appends, from any thread. Raises
        ``CorruptJournal``; in quarantine mode the bytes are kept aside instead and the items passed over.
        """
        segments = self.segments
        segment = self._holding(item_id, segments)
        if segment is None or (segment is not segments[-1] and item_id > segment.last_id):
            following = next((other for other in segments if self._may_hold_from(item_id, other)), None)
            if following is None or following.first_id > last_id:
                return Block({}, last_id + 1, 0, (0, 0), 0)
            segment, item_id = following, following.first_id
        if segment is not segments[-1] or segment.closed:
            if item_id > segment.last_id:
                return Block({}, last_id + 1, 0, (0, 0), 0)
            last_id = min(last_id, segment.last_id)
        place = segment.place_before(item_id)
        if hint is not None and hint[0] == segment.number and place[0] <= hint[1][0] <= item_id:
            place = hint[1]
        file = self._directory.open(segment.name)
        try:
            end = segment.records_end if segment.closed else file.size()
            path = f"{self._directory.path}/{segment.name}"
            try:
                entries, behind = read_entries(
                    file, segment.header.marker, path, place, end, item_id, last_id, max_bytes
                )
                return Block(entries, behind[0], segment.number, behind, 0)
            except CorruptJournal as damage:
                if not self._quarantine:
                    raise
                return self._read_around(file, segment, damage, item_id, last_id, end)
        finally:
            file.close()

    def _may_hold_from(self, item_id: int, segment: Segment) -> bool:
        """Whether a segment begins at ``item_id`` or later. A crash may leave several empty ones, one behind the other."""
        return segment.first_id >= item_id and (segment.items > 0 or not segment.closed)

    def _read_around(
        self, file: File, segment: Segment, damage: CorruptJournal, first_id: int, last_id: int, end: int
    ) -> Block:
        """Take what is whole before the damage; if that is nothing, pass over exactly the bad frames."""
        bad_id = damage.item_id or first_id
        if bad_id > first_id:
            place = segment.place_before(first_id)
            path = damage.path
            marker = segment.header.marker
            entries, behind = read_entries(file, marker, path, place, end, first_id, bad_id - 1, 1 << 62)
            return Block(entries, behind[0], segment.number, behind, 0)
        rest = file.read(damage.offset, end - damage.offset)
        after = fmt.find_frame(rest, 1, segment.header.marker, bad_id + 1)
        resume_id = last_id + 1 if after is None or after[1].footer else after[1].first_id
        length = len(rest) if after is None else after[0]
        self._keep_aside(segment, damage.offset, rest[:length], resume_id - bad_id)
        place = (resume_id, damage.offset + length)
        if after is not None and not after[1].footer:
            segment.marks = sorted({*segment.marks, place})
        return Block({}, resume_id, segment.number, place, max(0, resume_id - first_id))

    def _keep_aside(self, segment: Segment, offset: int, data: bytes, items: int) -> None:
        if (segment.number, offset) in self._aside:
            return
        self._aside.add((segment.number, offset))
        self.quarantined += items
        with contextlib.suppress(FileExistsError):
            file = self._directory.create(quarantine_name(self._queue, segment.number, offset))
            try:
                file.write(0, data)
                file.sync()
            finally:
                file.close()
            self._directory.sync()

    @staticmethod
    def _holding(item_id: int, segments: tuple[Segment, ...]) -> Segment | None:
        """The last segment that begins at or before ``item_id``."""
        low, high = 0, len(segments)
        while low < high:
            middle = (low + high) // 2
            if segments[middle].first_id <= item_id:
                low = middle + 1
            else:
                high = middle
        return segments[low - 1] if low else None

    def before(self, item_id: int) -> tuple[int, int]:
        """How many items, and bytes of items, were ever put before ``item_id``. Reads the frames of one segment."""
        segments, tail_id, total_bytes = self.segments, self.tail_id, self.total_bytes
        if item_id > tail_id:
            return tail_id - self.missing, total_bytes
        segment = self._holding(item_id, segments)
        if segment is None:
            header = segments[0].header
            return header.base_items, header.base_bytes
        items, size = segment.header.base_items, segment.header.base_bytes
        next_id, hint = segment.first_id, None
        while next_id < item_id:
            block = self.read(next_id, item_id - 1, MARK_EVERY, hint)
            items += len(block.entries)
            size += sum(len(entry[0]) for entry in block.entries.values())
            next_id, hint = block.next_id, (block.number, block.place)
        return items, size

    def find_time(self, time_ms: int, last_id: int) -> int:
        """The first id up to ``last_id`` that was added at ``time_ms`` or later; ``last_id + 1`` if there is none."""
        for segment in self.segments:
            if segment.closed and (segment.max_added_ms < time_ms or not segment.items):
                continue
            next_id, hint = segment.first_id, None
            stop = min(last_id, segment.last_id) if segment.closed else last_id
            while next_id <= stop:
                block = self.read(next_id, stop, MARK_EVERY, hint)
                for item_id, entry in block.entries.items():
                    if entry[1] >= time_ms:
                        return item_id
                next_id, hint = block.next_id, (block.number, block.place)
        return last_id + 1
