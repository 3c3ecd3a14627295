"""What is left of a damaged journal: which frames of each segment are intact, which bytes are not, which ids are lost.

For a repair. It reads all bytes, and writes nothing. It judges as ``recovery`` does with quarantine, and finds more in
four places:

1. A header of which only the version was hit is known by its checksum.
2. A segment without a valid header, whose footer does not show it either, is known by its first frame. A segment's
   marker is random, so no other bytes there pass for a frame.
3. Damage in a closed segment is found here. Recovery does not read those; a reader meets it later.
4. The queue is the one that most segments are of, not the one of the newest segment: that file may be another queue's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kestrelpy._disk.interface import Directory, File
from kestrelpy._journal import file_names
from kestrelpy._journal import format as fmt
from kestrelpy._journal.checkpoint import known_ids, known_queue_id, likely_queue_id
from kestrelpy._journal.recovery import rebuild_header
from kestrelpy._journal.segment import (
    FOREIGN,
    MAX_SEGMENT_BYTES,
    Objection,
    Segment,
    is_abandoned,
    iterate_frames,
    link_offset,
    link_reason,
    read_footer,
    read_searchable,
    read_used,
    wrong_header,
)
from kestrelpy.errors import UnsupportedFormat

_VERSION_AT = (8, 10)
"""Where a header has its version."""


class BadBytes(NamedTuple):
    """One place that is damaged: ``size`` bytes of a file from ``offset``, and the ids that are lost with them (0: none
    are).
    """

    name: str
    offset: int
    size: int
    reason: str
    first_id: int = 0
    last_id: int = 0


class FrameRun(NamedTuple):
    """Intact frames, one directly after the other: where they are, their ids, and the bytes of their items. Of the last
    one, a batch, only the items up to ``last_id`` may count.
    """

    offset: int
    end: int
    first_id: int
    last_id: int
    data_bytes: int


class SalvagedSegment:
    """What is left of one segment.

    ``last_id``: the last id it has or had. ``closed``: it has a valid footer, or later segments show its end.
    ``claimed_bytes``: those of all its items, by its footer. ``has_header``, ``has_footer``: whether they are intact.
    ``bad``: what is damaged. ``is_rewritten`` asks for new files in its place, also if nothing of it is damaged.
    """

    def __init__(self, name: str, number: int, header: fmt.SegmentHeader, size: int) -> None:
        self.name = name
        self.number = number
        self.header = header
        self.size = size
        self.has_header = self.closed = self.has_footer = False
        self.runs: list[FrameRun] = []
        self.bad: list[BadBytes] = []
        self.last_id = header.first_id - 1
        self.data_bytes = self.claimed_bytes = 0
        self.records_end = fmt.HEADER_BYTES
        self.is_rewritten = False

    @property
    def first_id(self) -> int:
        return self.header.first_id

    @property
    def items(self) -> int:
        return self.last_id + 1 - self.header.first_id

    @property
    def intact_items(self) -> int:
        """How many items are there."""
        return sum(run.last_id + 1 - run.first_id for run in self.runs)

    def as_segment(self) -> Segment:
        """The segment as the code for intact ones knows it."""
        return Segment(self.name, self.header, self.last_id, self.data_bytes, self.records_end, size=self.size)

    def note_bad(self, at: int, end: int, due: int, next_id: int, reason: str) -> None:
        """Note bytes between frames, and the items from ``due`` to ``next_id`` that are lost there, if any."""
        if next_id > due:
            self.bad.append(BadBytes(self.name, at, end - at, reason, due, next_id - 1))
        else:
            self.bad.append(BadBytes(self.name, at, end - at, "these bytes are no frames of this segment"))

    def cut_after(self, last_id: int, reason: str, *, is_loss: bool) -> None:
        """Leave out the items after ``last_id``. ``is_loss``: nothing else has items of these ids."""
        ids = (max(self.header.first_id, last_id + 1), self.last_id) if is_loss else (0, 0)
        at = next((run.offset for run in self.runs if run.last_id > last_id), self.records_end)
        self.bad.append(BadBytes(self.name, at, 0, reason, *ids))
        self.runs = [run._replace(last_id=min(run.last_id, last_id)) for run in self.runs if run.first_id <= last_id]
        self.last_id = last_id
        self.is_rewritten = True


def _is_of(header: fmt.SegmentHeader | None, number: int) -> bool:
    """Whether a file with this header may be the segment of that number: nothing says that it is another one."""
    return header is None or header.number == number


class Salvage:
    """One look at a journal. ``states``: the whole states of its readers and its mark. ``is_archive``: the folder has
    only segments, and of several queues perhaps; there need not be all of one. ``queue_id``: of which of these, if it
    is not the one of the newest segment.

    ``segments``: in order. ``foreign``: files that are no segments of this queue. ``stale``: segments that came back
    from a deletion; they do not count. ``bad``: what is damaged that is in no segment of ``segments``.
    ``is_cut_before``: an item that a reader needs is missing before the first segment. ``is_cut_after``: one that was
    on disk is missing after the last one.
    """

    def __init__(
        self,
        folder: Directory,
        queue: str,
        states: Sequence[fmt.Checkpoint],
        *,
        is_archive: bool = False,
        queue_id: bytes = b"",
    ) -> None:
        self._folder = folder
        self._queue = queue
        self._states = states
        self._is_archive = is_archive
        self.heads: list[int] = []
        self.segments: list[SalvagedSegment] = []
        self.foreign: list[tuple[int, str]] = []
        self.stale: list[SalvagedSegment] = []
        self.bad: list[BadBytes] = []
        self.is_cut_before = self.is_cut_after = False
        self.queue_id = queue_id
        self._is_chosen = bool(queue_id)
        self.watermark = self.tail_id = self.torn_bytes = 0
        self._numbered: list[tuple[int, str]] = []
        self._headers: list[fmt.SegmentHeader | None] = []
        self._intact: list[bool] = []

    def run(self, names: Iterable[str]) -> None:
        """``names``: the files in the folder. Raises ``UnsupportedFormat`` and ``OSError``."""
        self._list(file_names.segments_among(names, self._queue))
        self.heads, self.watermark, self.tail_id = known_ids(self._states, self.queue_id)
        for at in range(len(self._numbered)):
            self._look_at(at)
        if not self._is_archive:
            self._fit_together()
            self._check_ends()
        last_id = self.segments[-1].last_id if self.segments else 0
        self.tail_id = max(self.tail_id, self.watermark, last_id)

    @property
    def other_ids(self) -> set[bytes]:
        """The ids of other queues of which there are segments."""
        return {header.queue_id for header in self._headers if header is not None} - {self.queue_id}

    @property
    def items(self) -> int:
        """How many items were ever put, as an opening counts them."""
        last = self.segments[-1] if self.segments else None
        return 0 if last is None else last.header.base_items + last.items

    def all_bad(self) -> list[BadBytes]:
        """All that is damaged."""
        return [*self.bad, *(bad for segment in self.segments for bad in segment.bad)]

    def drop_from(self, item_id: int, reason: str) -> None:
        """Leave out all items from this one on, which nobody has seen yet."""
        for segment in [segment for segment in self.segments if segment.first_id >= item_id]:
            self.segments.remove(segment)
            if segment.items > 0:
                self.bad.append(BadBytes(segment.name, 0, segment.size, reason, segment.first_id, segment.last_id))
            self.foreign.append((segment.number, segment.name))
        if self.segments and self.segments[-1].last_id >= item_id:
            self.segments[-1].cut_after(item_id - 1, reason, is_loss=True)
        self.is_cut_after = False
        self._check_end()

    def _set_aside(self, number: int, name: str, offset: int, reason: str) -> None:
        self.foreign.append((number, name))
        self.bad.append(BadBytes(name, offset, 0, reason))

    def _list(self, numbered: list[tuple[int, str]]) -> None:
        """Read the headers, and put the segments in order. A file with the name of another segment, whose own name no
        file has, is the segment that its header says.
        """
        found: list[tuple[int, str, fmt.SegmentHeader | None, bool]] = []
        for number, name in numbered:
            if number <= fmt.LARGEST >> 1:
                found.append((number, name, *self._read_header(name)))
            elif not self._is_chosen:
                self._set_aside(number, name, 0, f"no segment has a number as large as {number}")
        self._choose([header for _, _, header, _ in found if header is not None])
        if not self._is_archive:
            found = [each for each in found if self._is_ours(*each[:3])]
        right = {number for number, name, header, _ in found if file_names.is_new(name) or _is_of(header, number)}
        listed: list[tuple[int, str, fmt.SegmentHeader | None, bool]] = []
        for number, name, header, is_intact in found:
            if header is not None and header.number != number:
                if header.number in right or not is_intact or file_names.is_new(name):
                    header, is_intact = None, False
                else:
                    right.add(header.number)
                    listed.append((header.number, name, header, False))
                    continue
            listed.append((number, name, header, is_intact))
        for number, name, header, is_intact in sorted(listed, key=lambda each: each[:2]):
            self._numbered.append((number, name))
            self._headers.append(header)
            self._intact.append(is_intact)

    def _choose(self, headers: list[fmt.SegmentHeader]) -> None:
        """Say of which queue the segments are. In an archive it is the newest one, and the others come after it."""
        if not headers:
            self.queue_id = self.queue_id or known_queue_id(self._states)
        elif not self._is_archive:
            self.queue_id = likely_queue_id(headers[::-1], self._states)
        elif not self._is_chosen:
            self.queue_id = headers[-1].queue_id

    def _is_ours(self, number: int, name: str, header: fmt.SegmentHeader | None) -> bool:
        """Whether a file may be a segment of this queue. Else it is set aside."""
        is_other = header is not None and header.queue_id != self.queue_id
        if is_other:
            self._set_aside(number, name, *FOREIGN)
        return not is_other

    # -- headers -----------------------------------------------------------------------------------------------------

    def _read_header(self, name: str) -> tuple[fmt.SegmentHeader | None, bool]:
        """The header in that file, and whether it is intact."""
        file = self._folder.open(name)
        try:
            if file.size() > MAX_SEGMENT_BYTES:
                return None, False
            data = file.read(0, fmt.HEADER_BYTES)
        finally:
            file.close()
        header = fmt.decode_header(data)
        is_intact = header is not None
        version = fmt.header_version(data)
        if header is None and version is not None:
            low, high = _VERSION_AT
            header = fmt.decode_header(data[:low] + fmt.FORMAT_VERSION.to_bytes(2, "little") + data[high:])
            if header is None and version > fmt.FORMAT_VERSION:
                raise UnsupportedFormat(f"{self._folder.path}/{name}", version, fmt.FORMAT_VERSION)
        return header, is_intact

    def _header_from(self, at: int) -> fmt.SegmentHeader | None:
        """The first whole header of this queue among the files from index ``at`` on."""
        headers = (self._headers[each] for each in range(at, len(self._headers)))
        return next((each for each in headers if each is not None and each.queue_id == self.queue_id), None)

    # -- one segment -------------------------------------------------------------------------------------------------

    def _look_at(self, at: int) -> None:
        number, name = self._numbered[at]
        header, after = self._headers[at], self._header_from(at + 1)
        last = at + 1 == len(self._numbered)
        file = self._folder.open(name)
        try:
            if header is not None and header.queue_id != self.queue_id:  # an archive's, and looked at by itself
                return
            objection: Objection | None = None
            if header is None:
                if self._is_chosen:  # whose file that is, the look at the newest queue says
                    return
                if file.size() > MAX_SEGMENT_BYTES:
                    self._set_aside(number, name, MAX_SEGMENT_BYTES, "this file is larger than a segment can be")
                    return
                if is_abandoned(file, name, number, None, after):
                    return
                objection = wrong_header(fmt.decode_header(file.read(0, fmt.HEADER_BYTES)))
                header = self._find_header(file, number, after)
                if header is None:
                    self._set_aside(number, name, *objection)
                    return
            segment = SalvagedSegment(name, number, header, file.size())
            segment.has_header = objection is None and self._intact[at]
            if objection is not None:
                segment.bad.append(BadBytes(name, objection.offset, fmt.HEADER_BYTES, objection.reason))
            elif not segment.has_header:
                self._note_header(file, segment)
            self._read(file, segment, after, last=last)
        finally:
            file.close()

    @staticmethod
    def _note_header(file: File, segment: SalvagedSegment) -> None:
        """The header is known, and not intact, or it is not that of the file's name."""
        if fmt.decode_header(file.read(0, fmt.HEADER_BYTES)) is not None:
            objection = wrong_header(segment.header)
            segment.has_header = True
            segment.bad.append(BadBytes(segment.name, objection.offset, 0, objection.reason))
        else:
            reason = "this segment has no valid header: its version is damaged"
            segment.bad.append(BadBytes(segment.name, _VERSION_AT[0], 2, reason))

    def _read(self, file: File, segment: SalvagedSegment, after: fmt.SegmentHeader | None, *, last: bool) -> None:
        """Read all frames of a segment, and add it to the others."""
        header = segment.header
        self.watermark = max(self.watermark, header.previous_last_id)
        self.tail_id = max(self.tail_id, header.first_id - 1)
        footer = read_footer(file, header)
        if footer is not None:
            segment.closed = segment.has_footer = True
            self._read_closed(file, segment, footer)
        else:
            if not last or self._is_archive:
                if segment.has_header and is_abandoned(file, segment.name, segment.number, header, after):
                    return
                at = fmt.footer_offset(segment.size)
                segment.bad.append(
                    BadBytes(segment.name, at, segment.size - at, "the footer of this closed segment is not intact")
                )
                segment.closed = True
            self._read_open(file, segment, None if last or after is None else after.previous_last_id)
        self.watermark = max(self.watermark, segment.last_id) if segment.closed else self.watermark
        self.segments.append(segment)

    def _find_header(self, file: File, number: int, after: fmt.SegmentHeader | None) -> fmt.SegmentHeader | None:
        """The header of a segment whose own header is damaged: by its footer, its first frame and its neighbours."""
        before = self.segments[-1] if self.segments else None
        known = before.as_segment() if before is not None else None
        end = file.read(max(0, file.size() - fmt.FOOTER_BYTES), fmt.FOOTER_BYTES)
        header = rebuild_header(end, number, self.queue_id, known, after)
        if header is not None:
            return header
        marker = int.from_bytes(file.read(fmt.HEADER_BYTES + fmt.MARKER_OFFSET, 4), "little")
        found = next(iterate_frames(file, marker, fmt.HEADER_BYTES, file.size()), None) if marker else None
        if found is None or found[1].footer is not None or not self.queue_id:
            return None
        first_id = found[1].first_id
        if before is None:
            return fmt.SegmentHeader(marker, self.queue_id, number, first_id, first_id - 1, 0, 0, first_id - 1, 0)
        if first_id <= before.last_id or (after is not None and first_id > after.previous_last_id):
            return None
        items, size = before.header.base_items + before.items, before.header.base_bytes + before.data_bytes
        previous = (before.number, before.last_id, before.records_end)
        return fmt.SegmentHeader(marker, self.queue_id, number, first_id, items, size, *previous)

    def _follow(self, file: File, segment: SalvagedSegment, at: int, due: int, end: int) -> tuple[int, int]:
        """Note the whole frames from ``at`` on, the first of which has the id ``due``. Returns where they end, and the
        id that is due there.
        """
        begin, first_id, size = at, due, 0
        for offset, frame in iterate_frames(file, segment.header.marker, at, end):
            if frame.footer is not None or frame.first_id != due:
                break
            size += sum(len(entry[0]) for entry in frame.entries)
            self.watermark = max(self.watermark, frame.watermark)
            at, due = offset + frame.size, frame.last_id + 1
        if due > first_id:
            segment.runs.append(FrameRun(begin, at, first_id, due - 1, size))
            segment.data_bytes += size
        return at, due

    def _read_closed(self, file: File, segment: SalvagedSegment, footer: fmt.SegmentFooter) -> None:
        end, marker, rest, base = footer.records_end, segment.header.marker, b"", 0
        at, due = fmt.HEADER_BYTES, segment.first_id
        while True:
            at, due = self._follow(file, segment, at, due, end)
            if at >= end and due > footer.last_id:
                break
            if not base:  # read once: the other gaps are after this one
                rest, base = file.read(at, end - at), at
            found = fmt.find_frame(rest, at - base, marker, due, footer.last_id)
            resume, next_id = (base + found[0], found[1].first_id) if found is not None else (end, footer.last_id + 1)
            segment.note_bad(at, resume, due, next_id, f"item {due} is not intact here")
            at, due = resume, next_id
            if found is None:
                break
        if segment.data_bytes != footer.data_bytes and not any(each.last_id for each in segment.bad):
            at = fmt.footer_offset(segment.size)
            reason = "the footer does not match the frames"
            segment.bad.append(BadBytes(segment.name, at, segment.size - at, reason))
            segment.has_footer = False
        segment.last_id, segment.records_end = due - 1, end
        segment.claimed_bytes = footer.data_bytes

    def _read_open(self, file: File, segment: SalvagedSegment, end_id: int | None) -> None:
        """Read a segment without a footer. ``end_id``: its last id, as a later segment says it."""
        marker, rest, base = segment.header.marker, b"", 0
        at, due, beyond = fmt.HEADER_BYTES, segment.first_id, 0
        while True:
            at, due = self._follow(file, segment, at, due, segment.size)
            if not base:
                rest, base = read_searchable(file, at, segment.size, marker), at
                beyond, watermark = fmt.look_beyond(rest, marker, due)
                self.watermark = max(self.watermark, watermark)
            durable_id = self.watermark if end_id is None else end_id
            if due > durable_id:
                break
            found = fmt.find_frame(rest, at - base, marker, due, fmt.LARGEST if end_id is None else end_id)
            stop = base + (found[0] if found is not None else len(rest))
            next_id = found[1].first_id if found is not None else durable_id + 1
            segment.note_bad(at, stop, due, next_id, f"item {due} was on disk and is not intact here")
            at, due = stop, next_id
            if found is None:
                break
        segment.last_id, segment.records_end = due - 1, at
        left = len(read_used(file, at, segment.size))
        if not segment.closed:
            self.torn_bytes += left
            self.tail_id = max(self.tail_id, beyond)

    # -- all of them -------------------------------------------------------------------------------------------------

    def _fit_together(self) -> None:
        """Leave out what can't stand beside the segment after it, as recovery does."""
        segments = self.segments
        for at in range(len(segments) - 1, 0, -1):
            before, after = segments[at - 1], segments[at].header
            if after.previous_number == before.number and after.previous_last_id == before.last_id:
                continue
            if self.heads and min(self.heads) >= after.previous_last_id:
                self.segments = segments[at:]
                self.stale = [segment for segment in segments[:at] if not segment.bad]
                for segment in segments[:at]:
                    if segment.bad:  # an opening would object all the same
                        self._set_aside(segment.number, segment.name, segment.bad[0].offset, segment.bad[0].reason)
                return
            if before.first_id >= after.first_id:  # it cannot be read beside the segment after it
                self._set_aside(before.number, before.name, 0, "the segment after it has the same items")
                del segments[at - 1]
            elif before.last_id >= after.first_id:  # say, an older copy
                before.cut_after(after.first_id - 1, "the segment after it has the same items", is_loss=False)
            else:
                found = before.as_segment()
                offset, reason = link_offset(after, found), link_reason(after, found)
                self._miss(segments[at].name, offset, reason, before.last_id, after)

    def _miss(self, name: str, offset: int, reason: str, last_id: int, after: fmt.SegmentHeader) -> None:
        """Items between ``last_id`` and the segment ``after`` are missing."""
        ids = (last_id + 1, after.previous_last_id) if last_id < after.previous_last_id else (0, 0)
        self.bad.append(BadBytes(name, offset, 0, reason, *ids))

    def _check_ends(self) -> None:
        """Note what is missing before the first segment and after the last one."""
        segments = self.segments
        if segments:
            header = segments[0].header
            was_there = any(number == header.previous_number for number, _ in self.foreign)
            lowest = min(self.heads, default=0 if was_there else header.previous_last_id)
            if lowest < header.previous_last_id:
                self.is_cut_before = True
                reason = f"a reader needs item {lowest + 1}; the journal begins after it"
                self._miss(segments[0].name, link_offset(header, None), reason, lowest, header)
        self._check_end()

    def _check_end(self) -> None:
        segments = self.segments
        last_id = segments[-1].last_id if segments else 0
        if self.watermark > last_id:
            self.is_cut_after = True
            name = segments[-1].name if segments else f"{self._queue}.*.segment"
            end = segments[-1].records_end if segments else 0
            reason = f"items up to {self.watermark} were on disk; the journal ends at {last_id}"
            self.bad.append(BadBytes(name, end, 0, reason, last_id + 1, self.watermark))
