"""Opening a journal: which segments there are, where the last one ends, and what is missing.

Rules:
1. A record at or below the watermark that is not intact is damage: ``CorruptJournal``, or set aside with
   ``quarantine``. A record above it that is not intact is a torn tail: it never counted (R15).
2. Nothing is destroyed: a torn tail stays in its file after the recorded end, or is kept aside (R19). Only an empty
   file is removed.
3. A crash may cut short every step; the next opening repeats it (R20).
4. Except after a clean close, the disk is trusted and not the page cache (R10), and the old segment is closed (R11).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from kestrelpy._disk.interface import Directory, File
from kestrelpy._journal import format as fmt
from kestrelpy._journal.checkpoint import BLOCK, FileWithSpare, field_offset, known_ids, known_queue_id, load_checkpoint
from kestrelpy._journal.file_names import (
    checkpoint_name,
    is_new,
    mark_name,
    quarantine_name,
    readers_among,
    segments_among,
)
from kestrelpy._journal.segment import (
    FOREIGN,
    ListedSegments,
    Objection,
    Segment,
    close_segment,
    first_header,
    identify,
    is_abandoned,
    iterate_frames,
    link_offset,
    link_reason,
    load_segment,
    read_searchable,
    read_used,
    sync_and_name,
)
from kestrelpy.errors import CorruptJournal

MOST_LOST = 1 << 31
"""At most so many ids may have been given out after the last one that is there. A ``lag`` holds twice as many."""


class Recovered:
    """A journal as it was found.

    ``stale``: segments that every reader is past and that came back from a deletion: they must be retired again.
    ``tail_id``: the last id that was ever given out, as far as any file shows. ``counted``: segment number and offset
    of each damage that is already in ``quarantined``: a read will meet it again.
    """

    __slots__ = ("counted", "last_number", "quarantined", "queue_id", "segments", "stale", "tail_id", "watermark")

    def __init__(self, *, queue_id: bytes = b"", tail_id: int = 0) -> None:
        self.segments: list[Segment] = []
        self.stale: list[Segment] = []
        self.queue_id = queue_id
        self.tail_id = tail_id
        self.watermark = 0
        self.quarantined = 0
        self.counted: set[tuple[int, int]] = set()
        self.last_number = 0


class Recovery:
    """One opening of one queue's journal. ``states``: its readers' checkpoints and its mark, if they are whole."""

    def __init__(self, directory: Directory, queue: str, states: Sequence[fmt.Checkpoint], *, quarantine: bool) -> None:
        self._directory = directory
        self._queue = queue
        self._quarantine = quarantine
        self._states = states
        self._heads: list[int] = []
        self._found = Recovered()
        self._none: list[tuple[int, str, bool]] = []
        self._listed = ListedSegments(directory, ())

    def run(self, names: Iterable[str]) -> Recovered:
        """``names``: the files in the directory. Raises ``CorruptJournal``, ``UnsupportedFormat`` and ``OSError``."""
        found = self._found
        numbered = self._within_reach(segments_among(names, self._queue))
        found.queue_id = self._find_queue_id(numbered)
        self._heads, found.watermark, found.tail_id = known_ids(self._states, found.queue_id)
        self._listed = ListedSegments(self._directory, numbered, found.queue_id)
        for at, (number, _) in enumerate(numbered):
            found.last_number = number
            segment = self._load(at)
            if segment is not None:
                found.segments.append(segment)
        self._check_chain()
        self._check_ends()
        found.tail_id = max(found.tail_id, found.watermark)
        if found.segments:
            self._check_tail(found.segments[-1])
        elif found.tail_id:
            self._check_tail(None)
        self._remove_abandoned()
        return found

    def _check_tail(self, end: Segment | None) -> None:
        """``end``: the last segment. Raises ``CorruptJournal``, also with quarantine: no record is bad, a claim is."""
        found = self._found
        last_id = end.last_id if end is not None else 0
        last = found.segments[-1] if found.segments else None
        reason = why_tail_impossible(found.tail_id, last_id, last)
        if reason is not None:
            segments = [segment for segment in (last, end) if segment is not None]
            claimed = claimed_at(self._directory, self._queue, found.queue_id, found.tail_id, segments)
            in_frames = (end.name, end.records_end) if end is not None else (mark_name(self._queue), 0)
            name, at = claimed or in_frames
            raise CorruptJournal(self._path(name), at, reason, item_id=last_id + 1)

    def _within_reach(self, numbered: list[tuple[int, str]]) -> list[tuple[int, str]]:
        """The segments whose numbers leave room for later ones. Numbers are times: no segment ever had a larger."""
        for number, name in numbered:
            if number > fmt.LARGEST >> 1:
                self._damage(name, 0, f"no segment has a number as large as {number}")
        return [(number, name) for number, name in numbered if number <= fmt.LARGEST >> 1]

    def _find_queue_id(self, numbered: list[tuple[int, str]]) -> bytes:
        """The queue's id, from its newest segment, or from its checkpoints if there is none; empty for a new queue."""
        newest = first_header(self._directory, reversed(numbered))
        return newest.queue_id if newest is not None else known_queue_id(self._states)

    def _path(self, name: str) -> str:
        return f"{self._directory.path}/{name}"

    def _damage(self, name: str, offset: int, reason: str, item_id: int | None = None) -> None:
        if not self._quarantine:
            raise CorruptJournal(self._path(name), offset, reason, item_id=item_id)

    # -- one segment -------------------------------------------------------------------------------------------------

    def _load(self, at: int) -> Segment | None:
        number, name = self._listed.numbered[at]
        last = at + 1 == len(self._listed)
        file = self._directory.open(name, write=last)
        try:
            if last:  # what it holds, even a footer, may be in the page cache alone (R10)
                file.sync()
                file.forget()
            found = self._found
            header = identify(
                file, self._path(name), name, number, found.queue_id, lambda: self._listed.header_from(at + 1)
            )
            if header is FOREIGN:
                self._damage(name, *FOREIGN)
                return None
            if not isinstance(header, fmt.SegmentHeader):
                header = self._without_header(file, at, header)
                if header is None:
                    return None
            segment = load_segment(file, name, header)
            found.watermark = max(found.watermark, header.previous_last_id)
            found.tail_id = max(found.tail_id, header.first_id - 1)
            if not segment.closed:
                if last:
                    self._close_last(file, segment)
                elif is_abandoned(file, name, number, header, self._listed.header_from(at + 1)):
                    self._none.append((number, name, bool(read_used(file, fmt.HEADER_BYTES, segment.size))))
                    return None
                else:
                    at_footer = fmt.footer_offset(segment.size)
                    self._damage(name, at_footer, "the footer of this closed segment is not intact")
                    self._scan(file, segment, self._end_before(at + 1))
                    segment.closed = True  # for reading: nothing is added to it
            found.watermark = max(found.watermark, segment.last_id)
            found.tail_id = max(found.tail_id, segment.last_id)
            return segment
        finally:
            file.close()

    def _without_header(self, file: File, at: int, objection: Objection | None) -> fmt.SegmentHeader | None:
        """A file without a valid header. A crash during a segment's creation leaves one: it has taken no frame yet, or
        none that is known to be on disk (R1).

        Its room then holds zeros, or old bytes of the disk, which may be a part of an old segment: those are kept
        aside. New frames mean that the file had a header: with quarantine, this returns that header, as far as the
        footer and the neighbours show it.
        """
        number, name = self._listed.numbered[at]
        rest = read_used(file, fmt.HEADER_BYTES, file.size())
        if objection is not None:
            self._damage(name, *objection)
            return self._rebuilt_header(rest[-fmt.FOOTER_BYTES :], at)
        self._none.append((number, name, bool(rest)))
        return None

    def _remove_abandoned(self) -> None:
        """Remove the files that have taken no frame. A file with bytes after its header is kept aside instead (R19). A
        refused opening leaves all of them: their headers are among the reasons.
        """
        for number, name, used in self._none:
            if used:
                self._directory.rename(name, quarantine_name(self._queue, number, 0))
            else:
                self._directory.unlink(name)

    def _rebuilt_header(self, end: bytes, at: int) -> fmt.SegmentHeader | None:
        """The header of a closed segment, from its footer (the last bytes of the file) and the segments beside it."""
        number, found = self._listed.numbered[at][0], self._found
        before = found.segments[-1] if found.segments else None
        return rebuild_header(end, number, found.queue_id, before, self._listed.header_from(at + 1))

    def _end_before(self, at: int) -> int | None:
        """The last id before the listed segments from ``at`` on, from the first whole header among them."""
        header = self._listed.header_from(at)
        return None if header is None else header.previous_last_id

    def _scan(self, file: File, segment: Segment, end_id: int | None = None) -> int:
        """Go through the frames of a segment without a footer. Returns the last id found after their end, or 0.

        ``end_id``: the last id that the segment must have, if there are later segments.
        """
        end, size = fmt.HEADER_BYTES, file.size()
        left, base, beyond = b"", 0, 0
        while True:
            end = self._follow(file, segment, end, size)
            if segment.closed:
                return 0
            if not base:  # read once: the other gaps are after this one
                left, base = read_searchable(file, end, size, segment.header.marker), end
                beyond, watermark = fmt.look_beyond(left, segment.header.marker, segment.last_id + 1)
                self._found.watermark = max(self._found.watermark, watermark)  # a torn tail may be damage (R15)
            durable_id = self._found.watermark if end_id is None else end_id
            if segment.last_id >= durable_id:
                segment.records_end = end
                return beyond
            # An item that was on disk is not intact here.
            missing = segment.last_id + 1
            self._damage(segment.name, end, f"item {missing} was on disk and is not intact here", missing)
            self._found.counted.add((segment.number, end))
            limit = fmt.LARGEST if end_id is None else end_id
            next_frame = fmt.find_frame(left, end - base, segment.header.marker, missing, limit)
            if next_frame is None:
                self._found.quarantined += durable_id - segment.last_id
                segment.last_id = durable_id
                segment.records_end = end
                return beyond
            self._found.quarantined += next_frame[1].first_id - missing
            segment.last_id = next_frame[1].first_id - 1
            end = base + next_frame[0]

    def _follow(self, file: File, segment: Segment, offset: int, size: int) -> int:
        """Count the whole frames from ``offset`` on, in the order of their ids. Returns the offset of their end."""
        for at, frame in iterate_frames(file, segment.header.marker, offset, size):
            if frame.footer is not None:
                if frame.footer.records_end == at and frame.footer.first_id == segment.first_id:
                    segment.apply(frame.footer)
                break
            if frame.first_id != segment.last_id + 1:
                break
            segment.count(at, frame)
            self._found.watermark = max(self._found.watermark, frame.watermark)
            offset = at + frame.size
        return offset

    def _close_last(self, file: File, segment: Segment) -> None:
        """The last segment was not closed: find its end and close it there."""
        beyond = self._scan(file, segment)
        found = self._found
        found.tail_id = max(found.tail_id, segment.last_id, beyond)
        self._check_tail(segment)
        if found.tail_id > segment.last_id:  # before the footer hides the torn tail: its ids stay used (R17)
            write_mark(self._directory, self._queue, found, segment.last_id)
        if is_new(segment.name):
            sync_and_name(self._directory, file, segment)
        else:
            self._directory.sync()  # a kill may have come before its name was on disk (R1); the next one names it
        close_segment(file, segment)

    # -- all of them -------------------------------------------------------------------------------------------------

    def _check_chain(self) -> None:
        """Check that each segment follows the one before it. Old segments that nobody needs may have come back from a
        deletion (R5).
        """
        found = self._found
        segments = found.segments
        for at in range(len(segments) - 1, 0, -1):
            before, after = segments[at - 1], segments[at].header
            if after.previous_number == before.number and after.previous_last_id == before.last_id:
                continue
            if self._heads and min(self._heads) >= after.previous_last_id:
                found.stale, found.segments = segments[:at], segments[at:]
                return
            self._damage(segments[at].name, link_offset(after, before), link_reason(after, before))
            found.quarantined += max(0, after.previous_last_id - before.last_id)
            if before.first_id >= after.first_id:  # it cannot be read beside the segment after it
                found.quarantined += before.items
                del segments[at - 1]
            elif before.last_id >= after.first_id:  # say, an older copy, with items that a crash has torn off since
                before.last_id = after.first_id - 1

    def _check_ends(self) -> None:
        """No reader may need an item before the first segment, and no item that was on disk may be missing after the
        last one (R16).
        """
        found = self._found
        if found.segments:
            first, last_id = found.segments[0].header, found.segments[-1].last_id
            lowest = min(self._heads, default=first.previous_last_id)
            if lowest < first.previous_last_id:
                reason = f"a reader needs item {lowest + 1}; the journal begins after it"
                self._damage(found.segments[0].name, link_offset(first, None), reason)
                found.quarantined += first.previous_last_id - lowest
        else:
            last_id = 0
        if found.watermark > last_id:
            last = found.segments[-1] if found.segments else None
            name, end = (last.name, last.records_end) if last is not None else (f"{self._queue}.*.segment", 0)
            self._damage(
                name, end, f"items up to {found.watermark} were on disk; the journal ends at {last_id}", last_id + 1
            )
            found.quarantined += found.watermark - last_id


def rebuild_header(
    end: bytes, number: int, queue_id: bytes, before: Segment | None, after: fmt.SegmentHeader | None
) -> fmt.SegmentHeader | None:
    """The header of a closed segment whose own header is damaged; ``None`` if its footer and the segments beside it do
    not show it.

    ``end``: the last bytes of the file, where its footer is. ``before``: the segment before it. ``after``: the first
    whole header after it.
    """
    marker = int.from_bytes(end[fmt.MARKER_OFFSET : fmt.FRAME_BYTES], "little")
    frame = fmt.decode_frame(end, 0, marker)
    if frame is None or frame.footer is None or fmt.footer_number(end) != number:
        return None
    first_id = frame.footer.first_id
    ends = (frame.footer.last_id, frame.footer.records_end)
    known = after is not None and after.previous_number == number
    if after is not None and known and (after.previous_last_id, after.previous_end) != ends:
        return None  # not the file that was here
    if before is not None:
        if first_id <= before.last_id or not (known or first_id == before.last_id + 1):
            return None
        items, size = before.header.base_items + before.items, before.header.base_bytes + before.data_bytes
        previous = (before.number, before.last_id, before.records_end)
        return fmt.SegmentHeader(marker, queue_id, number, first_id, items, size, *previous)
    if first_id == 1:
        return fmt.SegmentHeader(marker, queue_id, number, 1, 0, 0, 0, 0, 0)
    if after is None or after.previous_number != number:
        return None
    items, size = after.base_items - frame.footer.items, after.base_bytes - frame.footer.data_bytes
    return fmt.SegmentHeader(marker, queue_id, number, first_id, items, size, 0, first_id - 1, 0)


def why_tail_impossible(tail_id: int, last_id: int, last: Segment | None) -> str | None:
    """Why a queue cannot continue after ``tail_id``; ``None`` if it can. No crash loses so many ids, and no queue gives
    out ids so high: items after such an id could not be stored.

    ``last_id``: the last item that is there. ``last``: the last segment, or the one before it.
    """
    counts = (last.header.base_items, last.header.base_bytes) if last is not None else ()
    if tail_id - last_id <= MOST_LOST and max(tail_id, *counts, 0) <= fmt.LARGEST >> 1:
        return None
    return f"ids up to {tail_id} are said to be given out, but item {last_id} is the last one here"


def claimed_at(
    directory: Directory, queue: str, queue_id: bytes, tail_id: int, segments: Iterable[Segment]
) -> tuple[str, int] | None:
    """The file that claims an id out of reach, and where in the file; ``None`` if frames claim it. ``segments``: the
    last ones. Raises ``OSError``.
    """
    for segment in segments:
        for field, claimed in (("base_items", 0), ("base_bytes", 0), ("first_id", 1)):
            if getattr(segment.header, field) - claimed > fmt.LARGEST >> 1:
                return segment.name, fmt.HEADER_OFFSET[field]
    readers = sorted(readers_among(directory.names(), queue))
    for name in (mark_name(queue), *(checkpoint_name(queue, reader) for reader in readers)):
        state, _ = load_checkpoint(directory, name)
        if state is not None and state.queue_id == queue_id and tail_id in (state.highest_id, state.watermark):
            field = "head" if tail_id == state.highest_id else "watermark"
            return name, field_offset(directory, name, field)
    return None


def write_mark(directory: Directory, queue: str, found: Recovered, durable_id: int) -> None:
    """Save the queue's mark: the last id given out, and the last one known to be on disk."""
    mark = fmt.Checkpoint(
        queue_id=found.queue_id,
        reader="",
        head=found.tail_id,
        watermark=durable_id,
        released_items=0,
        released_bytes=0,
        flags=fmt.FLAG_MARK,
    )
    file = FileWithSpare(directory, mark_name(queue))
    file.replace(fmt.checkpoint_prefix() + fmt.encode_checkpoint(mark), BLOCK)
    with contextlib.suppress(OSError):
        file.hold(BLOCK)
