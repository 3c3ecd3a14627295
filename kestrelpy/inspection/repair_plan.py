"""What a repair makes of a damaged journal: which files stay, which new segments there are, what is kept aside.

Rules:
1. A segment that is intact, and that the one before it leads to, stays as it is.
2. Ids without an item are between two segments. So a damaged segment becomes several: one for each run of intact
   frames. Where nothing is left at an end that others name, there is a segment without items.
3. A lost item still counts as put, as it does with quarantine: ``base_items`` of what comes after it stays what it was.
   The bytes of lost items count at the first of them.
4. New segments have numbers between those beside them. If there are not enough, the segments after them get higher
   numbers, and are written again too.
5. No byte gets lost. What is not in a new file, and no valid header or footer or zero, is kept aside.

Nothing is written here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kestrelpy._journal import format as fmt
from kestrelpy._journal.salvage import FrameRun, Salvage, SalvagedSegment
from kestrelpy.errors import RepairRefused


class NewSegment(NamedTuple):
    """A segment that the repair makes: frames of ``source`` in ``runs``, or the one record ``record``, or nothing.
    ``header`` has no marker yet.
    """

    header: fmt.SegmentHeader
    last_id: int
    source: SalvagedSegment | None = None
    runs: tuple[FrameRun, ...] = ()
    record: bytes | None = None


class _End(NamedTuple):
    """What the next segment has to name as the one before it."""

    number: int
    last_id: int
    records_end: int
    items: int
    data_bytes: int


class RepairPlan:
    """The plan for one journal. ``made``: the new segments, in order. ``replaced``: the segments that they are made of.
    ``first_id``: the first id that the journal has, or had; ``base``: the items and bytes put before it.
    """

    def __init__(
        self, salvage: Salvage, path: str, numbers: Iterable[int], *, is_archive: bool, record: bytes | None = None
    ) -> None:
        """``numbers``: those of all files that have the name of a segment. ``record``: one more item to be added at the
        end. Raises ``RepairRefused`` if no numbers are left.
        """
        self._salvage = salvage
        self._path = path
        self.queue_id = salvage.queue_id
        self._is_archive = is_archive
        self.made: list[NewSegment] = []
        self.replaced: list[SalvagedSegment] = []
        aside = {number for number, _ in salvage.foreign}
        self._taken = {number for number in numbers if number not in aside}
        self.first_id, self.base = salvage.tail_id + 1, (0, 0)
        self._is_empty = True
        self._end = _End(0, 0, 0, 0, 0)
        for at in range(len(salvage.segments)):
            self._place(at, is_followed=at + 1 < len(salvage.segments) or salvage.is_cut_after or record is not None)
        if salvage.is_cut_after:
            self._add_empty(salvage.watermark + 1)
        if record is not None:
            self._add_record(record)
        self.last_id = self._end.last_id

    @property
    def tail_id(self) -> int:
        """The last id given out."""
        return max(self._salvage.tail_id, self._end.last_id)

    def _add_record(self, record: bytes) -> None:
        """Add one item, with the next id, in a segment of its own."""
        end, item_id = self._end, self.tail_id + 1
        header = self._header(self._last_number(), item_id, end.items, end.data_bytes)
        self.made.append(NewSegment(header, item_id, record=record))
        records_end = fmt.HEADER_BYTES + fmt.FRAME_BYTES + len(record)
        self._end = _End(header.number, item_id, records_end, end.items + 1, end.data_bytes + len(record))

    def _place(self, at: int, *, is_followed: bool) -> None:
        """Keep a segment, or put new ones in its place."""
        salvage = self._salvage
        segment, is_first = salvage.segments[at], at == 0
        header = segment.header
        previous = (header.previous_number, header.previous_last_id)
        if self._is_archive or (is_first and not salvage.is_cut_before):  # the one before it may be gone for good
            number = max(header.previous_number, salvage.segments[at - 1].number if at else 0)
            self._end = _End(number, header.previous_last_id, header.previous_end, header.base_items, header.base_bytes)
            is_linked = True
        else:
            is_linked = not is_first and previous == self._end[:2]
        if not is_linked and self._may_fill(header):
            self._fill(header)
            is_linked = True
        is_kept = not segment.bad and not segment.is_rewritten and (segment.closed or not is_followed)
        if is_kept and is_linked and header.number > self._end.number:
            self._note(segment.first_id, header.base_items, header.base_bytes)
            items, size = header.base_items + segment.items, header.base_bytes + segment.data_bytes
            self._end = _End(header.number, segment.last_id, segment.records_end, items, size)
            return
        self.replaced.append(segment)
        following = salvage.segments[at + 1].header if at + 1 < len(salvage.segments) else None
        is_named = following is not None and following.previous_number == segment.number
        self._split(segment, following.previous_last_id if following is not None and is_named else segment.last_id)

    def _may_fill(self, after: fmt.SegmentHeader) -> bool:
        """Whether a segment without items can stand where the one was that ``after`` names."""
        number, last_id = after.previous_number, after.previous_last_id
        is_free = self._end.number < number < after.number and number not in self._taken
        return is_free and last_id >= self._end.last_id

    def _fill(self, after: fmt.SegmentHeader) -> None:
        """Add a segment without items, in the place of one that is gone: the one that ``after`` names."""
        first_id = after.previous_last_id + 1
        header = self._header(after.previous_number, first_id, after.base_items, after.base_bytes)
        if not self._end.number:  # every reader may need what was before it
            header = header._replace(previous_last_id=0)
        self._append(header, first_id - 1, None, ())

    def _add_empty(self, first_id: int) -> None:
        """Add a segment without items at the end: the items before ``first_id`` are lost."""
        end = self._end
        lost = max(0, first_id - 1 - end.last_id)
        header = self._header(self._last_number(), first_id, end.items + lost, end.data_bytes)
        self._append(header, first_id - 1, None, ())

    def _split(self, segment: SalvagedSegment, last_id: int) -> None:
        """Put new segments in the place of one: one for each run, and one without items at the end if ``last_id``, the
        last one that it had, is lost.
        """
        groups, old = _joined(segment.runs), segment.header
        if not groups or groups[-1][-1].last_id != last_id:
            groups.append(())
        lost_bytes, size = self._lost_bytes(segment), old.base_bytes
        due = old.first_id
        for number, group in zip(self._numbers(segment.number, len(groups)), groups, strict=True):
            first_id, end_id = (group[0].first_id, group[-1].last_id) if group else (last_id + 1, last_id)
            if first_id > due:
                lost_bytes, size = 0, size + lost_bytes
            header = self._header(number, first_id, old.base_items + first_id - old.first_id, size)
            self._append(header, end_id, segment if group else None, group)
            due = end_id + 1
            size += sum(run.data_bytes for run in group)

    def _lost_bytes(self, segment: SalvagedSegment) -> int:
        """How many bytes the lost items of a segment had, as far as the segment after it says that."""
        segments = self._salvage.segments
        at = segments.index(segment) + 1
        if at == len(segments) or segments[at].header.previous_number != segment.number:
            return max(0, segment.claimed_bytes - segment.data_bytes)
        return max(0, segments[at].header.base_bytes - segment.header.base_bytes - segment.data_bytes)

    def _numbers(self, number: int, count: int) -> list[int]:
        """Numbers for ``count`` segments in place of the one of that number, which is the last of them if it can."""
        numbers = list(range(number - count + 1, number + 1))
        if numbers[0] > self._end.number and not self._taken.intersection(numbers[:-1]):
            return numbers
        if self._is_archive:
            raise RepairRefused(self._path, f"there are no {count} numbers for what is left of segment {number}")
        last, numbers = max(self._end.number, number - 1), []  # not before a file that is no segment yet
        while len(numbers) < count:
            last = last + 1 if last + 1 == number else self._free(last + 1)
            numbers.append(last)
        return numbers

    def _free(self, number: int) -> int:
        while number in self._taken:
            number += 1
        return number

    def _last_number(self) -> int:
        """A number above all others."""
        return max([self._end.number, *self._taken]) + 1

    def _header(self, number: int, first_id: int, items: int, size: int) -> fmt.SegmentHeader:
        end = self._end
        previous = (end.number, end.last_id, end.records_end)
        return fmt.SegmentHeader(0, self._salvage.queue_id, number, first_id, items, size, *previous)

    def _append(
        self, header: fmt.SegmentHeader, last_id: int, source: SalvagedSegment | None, runs: tuple[FrameRun, ...]
    ) -> None:
        self.made.append(NewSegment(header, last_id, source, runs))
        self._note(header.first_id, header.base_items, header.base_bytes)
        records_end = fmt.HEADER_BYTES + sum(run.end - run.offset for run in runs)
        items, size = header.base_items + last_id + 1 - header.first_id, sum(run.data_bytes for run in runs)
        self._end = _End(header.number, last_id, records_end, items, header.base_bytes + size)

    def _note(self, first_id: int, items: int, size: int) -> None:
        if self._is_empty:
            self._is_empty, self.first_id, self.base = False, first_id, (items, size)


def _joined(runs: Iterable[FrameRun]) -> list[tuple[FrameRun, ...]]:
    """Runs whose ids follow one another, though other bytes are between them, are one segment."""
    groups: list[tuple[FrameRun, ...]] = []
    for run in runs:
        if groups and groups[-1][-1].last_id + 1 == run.first_id:
            groups[-1] = (*groups[-1], run)
        else:
            groups.append((run,))
    return groups
