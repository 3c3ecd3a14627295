"""Reading a journal: its segments as one sequence of items.

The journal's writer uses this, and so does a reader in another process. Nothing here writes, except bytes that
quarantine keeps aside.
"""

from __future__ import annotations

import contextlib
from array import array
from bisect import bisect_left
from itertools import accumulate
from typing import NamedTuple

from kestrelpy._disk.interface import Directory, File
from kestrelpy._journal import format as fmt
from kestrelpy._journal.file_names import quarantine_name
from kestrelpy._journal.segment import MARK_EVERY, FramePosition, Segment, open_segment, read_entries
from kestrelpy.errors import CorruptJournal

SEARCH_BYTES = 64 << 10
"""How many bytes are searched first for the next frame after damage."""


class Block(NamedTuple):
    """The result of one read of the journal: items by id, the next id, and the segment and position of its frame."""

    entries: dict[int, fmt.Entry]
    next_id: int
    number: int
    position: FramePosition


class JournalView:
    """The segments of one queue, for reading. A method that any thread may call, also during a write, says so."""

    def __init__(self, directory: Directory, queue: str, *, quarantine: bool = False) -> None:
        self._directory = directory
        self._queue = queue
        self._quarantine = quarantine
        self._aside: set[tuple[int, int]] = set()
        self._counted: set[tuple[int, int]] = set()  # as _aside, but counted in ``quarantined`` by the recovery
        self._intact: tuple[tuple[int, int], array[int], array[int]] = (0, 0), array("Q"), array("Q", [0])
        """For the last damaged segment that was measured (number, last id): its intact ids, and the bytes before each.
        A caller that goes from damage to damage asks again and again.
        """
        self.quarantined = 0
        self.missing = 0
        """How many ids up to the tail have no item: they were given out and lost, or skipped. The other ``tail_id -
        missing`` have one.
        """
        self.segments: tuple[Segment, ...] = ()
        """Oldest first. The tuple is replaced as a whole and never changed, so reading it needs no lock."""

    @property
    def tail_id(self) -> int:
        """The last id given out. May be read at any time."""
        raise NotImplementedError

    @property
    def total_bytes(self) -> int:
        """Bytes of all items ever put. May be read at any time."""
        raise NotImplementedError

    def _end(self) -> tuple[int, int]:
        """``tail_id`` and ``total_bytes`` at one moment."""
        raise NotImplementedError

    @property
    def first_id(self) -> int:
        """The earliest id that is kept, or the next id if none is. May be read at any time."""
        segments = self.segments
        return segments[0].first_id if segments else self.tail_id + 1

    def hint(self, item_id: int) -> tuple[int, FramePosition]:
        """The number of a segment, and a position in it at or before ``item_id``. May be called at any time."""
        segment = self._holding(item_id, self.segments)
        return (segment.number, segment.position_before(item_id)) if segment else (0, (0, 0))

    def read(self, item_id: int, last_id: int, max_bytes: int, hint: tuple[int, FramePosition] | None = None) -> Block:
        """Items from ``item_id`` to at most ``last_id``, which must have been put before the call.

        Reads about ``max_bytes``, from one segment. May be called during an append, from any thread. Raises
        ``CorruptJournal``; in quarantine mode the bad bytes are kept aside instead, and their items skipped.
        """
        segments = self.segments
        segment = self._holding(item_id, segments)
        if segment is None or (segment is not segments[-1] and item_id > segment.last_id):
            following = next((other for other in segments if self._may_hold_from(item_id, other)), None)
            if following is None or following.first_id > last_id:
                return Block({}, last_id + 1, 0, (0, 0))
            segment, item_id = following, following.first_id
        if segment is not segments[-1] or segment.closed:
            if item_id > segment.last_id:
                return Block({}, last_id + 1, 0, (0, 0))
            last_id = min(last_id, segment.last_id)
        positions = [segment.position_before(item_id)]
        if hint is not None and hint[0] == segment.number and positions[0][0] <= hint[1][0] <= item_id:
            positions.append(hint[1])
        file = open_segment(self._directory, segment.name)
        try:
            return self._read_block(file, segment, positions, item_id, last_id, max_bytes)
        finally:
            file.close()

    def _read_block(
        self,
        file: File,
        segment: Segment,
        positions: list[FramePosition],
        item_id: int,
        last_id: int,
        max_bytes: int,
    ) -> Block:
        """Read items from the last of ``positions`` on; if no frame of its id is there, from the position before."""
        end = segment.records_end if segment.closed else file.size()
        marker, path = segment.header.marker, f"{self._directory.path}/{segment.name}"
        position = positions.pop()
        while True:
            try:
                entries, after = read_entries(file, marker, path, position, end, item_id, last_id, max_bytes)
                if after[0] > last_id + 1:  # a batch that reaches beyond ``last_id``, perhaps into the next segment
                    entries = {key: entry for key, entry in entries.items() if key <= last_id}
                    after = (last_id + 1, after[1])
                return Block(entries, after[0], segment.number, after)
            except CorruptJournal as damage:
                bad_id = damage.item_id or item_id
                if positions and damage.offset == position[1]:
                    position = positions.pop()
                elif bad_id > item_id:
                    last_id = bad_id - 1  # first read the items before it
                elif self._quarantine:
                    return self._read_around(file, segment, damage, item_id, last_id, end)
                else:
                    after_it = None if bad_id == item_id else self._position_after(file, segment, damage, bad_id, end)
                    if after_it is None or after_it[0] > item_id:
                        raise
                    position = after_it

    def _position_after(
        self, file: File, segment: Segment, damage: CorruptJournal, bad_id: int, end: int
    ) -> FramePosition | None:
        """The position of the first whole frame after the damage. The frame that is due may have been moved there."""
        want, left = SEARCH_BYTES, end - damage.offset
        most = segment.last_id if segment.closed else self.tail_id
        while True:
            rest = file.read(damage.offset, min(want, left))
            after = fmt.find_frame(rest, 0, segment.header.marker, bad_id, most)
            if after is not None or want >= left:
                break
            want *= 16  # mostly, the next frame is near; and there may be damage after damage
        if after is None:
            return None
        position = (after[1].first_id, damage.offset + after[0])
        marks = segment.marks
        at = bisect_left(marks, position)
        if at == len(marks) or marks[at] != position:  # a new list: others may be reading the old one
            segment.marks = [*marks[:at], position, *marks[at:]]
        return position

    def _may_hold_from(self, item_id: int, segment: Segment) -> bool:
        """Whether a segment may hold items from ``item_id`` on only. Crashes may leave several empty ones in a row."""
        return segment.first_id >= item_id and (segment.items > 0 or not segment.closed)

    def _read_around(
        self, file: File, segment: Segment, damage: CorruptJournal, first_id: int, last_id: int, end: int
    ) -> Block:
        """Skip exactly the bad frames, the first of which is due at ``first_id`` or before."""
        bad_id = damage.item_id or first_id
        after = self._position_after(file, segment, damage, bad_id, end)
        resume_id, resume_at = after if after is not None else (last_id + 1, end)
        rest = file.read(damage.offset, resume_at - damage.offset)
        self._keep_aside(segment, damage.offset, rest, resume_id - bad_id)
        return Block({}, resume_id, segment.number, (resume_id, resume_at))

    def _keep_aside(self, segment: Segment, offset: int, data: bytes, items: int) -> None:
        if (segment.number, offset) in self._aside:
            return
        self._aside.add((segment.number, offset))
        if (segment.number, offset) not in self._counted:
            self.quarantined += items
        if not data:  # the record is gone, and no bytes are in its place
            return
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

    def is_gap(self, item_id: int) -> bool:
        """Whether the id was given out, or skipped, and has no item: it was lost with the end of a segment."""
        segments = self.segments
        segment = self._holding(item_id, segments)
        if segment is not None:
            return segment.closed and item_id > segment.last_id
        return not segments or item_id > segments[0].header.previous_last_id

    def before(self, item_id: int) -> tuple[int, int]:
        """How many items, and bytes of items, were ever put before ``item_id``. Reads the frames of one segment.

        Exact, and also given around damage: the bytes of items that are not intact count at the first of them.
        """
        tail_id, total_bytes = self._end()
        segments = self.segments  # after _end(): so they include the segment of that tail
        if item_id > tail_id or tail_id == self.missing:  # after the tail, or no id up to the tail has an item
            return tail_id - self.missing, total_bytes
        segment = self._holding(item_id, segments)
        if segment is None:
            header = segments[0].header
            return header.base_items, header.base_bytes
        header, following = segment.header, segments[segments.index(segment) + 1 :]
        last_id, data_bytes = segment.last_id, segment.data_bytes
        if not following and not segment.closed:
            last_id, data_bytes = tail_id, total_bytes - header.base_bytes
        items = header.base_items + item_id - header.first_id
        if item_id > last_id:  # lost with a segment that is missing, or never given out
            ever = following[0].header.base_items if following else tail_id - self.missing
            return min(items, ever), header.base_bytes + data_bytes
        key = (segment.number, last_id)
        try:
            if self._intact[0] != key:
                if item_id == header.first_id:  # there is nothing to read
                    return items, header.base_bytes
                return items, header.base_bytes + self._bytes_to(segment, item_id - 1)
        except CorruptJournal:
            sizes = self._sizes(segment, last_id, around=True)
            self._intact = key, array("Q", sizes), array("Q", accumulate(sizes.values(), initial=0))
        _, ids, sums = self._intact
        return items, header.base_bytes + sums[bisect_left(ids, item_id)] + data_bytes - sums[-1]

    def _bytes_to(self, segment: Segment, last_id: int) -> int:
        """The bytes of a segment's items up to ``last_id``. Raises ``CorruptJournal``, ``OSError``."""
        return sum(self._sizes(segment, last_id).values())

    def _sizes(self, segment: Segment, last_id: int, *, around: bool = False) -> dict[int, int]:
        """The sizes of a segment's items up to ``last_id``. With ``around``: of those that are intact."""
        sizes: dict[int, int] = {}
        position = (segment.first_id, fmt.HEADER_BYTES)
        marker, path = segment.header.marker, f"{self._directory.path}/{segment.name}"
        file = open_segment(self._directory, segment.name)
        try:
            end, stop = segment.records_end if segment.closed else file.size(), last_id
            while position[0] <= last_id:
                try:
                    entries, position = read_entries(file, marker, path, position, end, position[0], stop, MARK_EVERY)
                    sizes.update((key, len(entry[0])) for key, entry in entries.items() if key <= last_id)
                    stop = last_id
                except CorruptJournal as damage:
                    bad_id = damage.item_id or position[0]
                    if not around:
                        raise
                    if bad_id > position[0]:
                        stop = bad_id - 1  # first read the items before it
                        continue
                    after = self._position_after(file, segment, damage, bad_id, end)
                    if after is None:
                        break
                    position, stop = after, last_id
        finally:
            file.close()
        return sizes

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
                next_id, hint = block.next_id, (block.number, block.position)
        return last_id + 1
