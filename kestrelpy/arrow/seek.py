"""Finds where in a segment the wanted items are, and reads only a small part of the segment for it.

Rules:
1. The result is a stretch of frames that has every wanted item. It may have other items too. If nothing is known, the
   stretch is the whole segment.
2. Ids rise from frame to frame, so they are found by bisection. A position counts only if a whole, valid frame begins
   there.
3. In a segment that is not closed, only the part that is known to be on disk is searched.
4. Times of adding mostly rise, but a clock may be set back. If frames are large, all frame heads are read. If frames
   are small, samples at equal distances are read. If the sampled times rise, and begin and end with the times that the
   footer has, then a step back of the clock was smaller than one distance, and one more distance is read on both sides.
   Otherwise the whole segment is read. (One case is not detected: a clock that is set ahead and back again within one
   distance, to times that the segment has.)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import isqrt
from typing import NamedTuple, cast

from kestrelpy._disk.interface import File
from kestrelpy._journal import format as fmt
from kestrelpy._journal.segment import FramePosition, Segment
from kestrelpy.arrow.wanted import Wanted

SMALL_BYTES = 256 << 10
"""A stretch of at most this size is read as a whole, without a search."""
LOOK_BYTES = 512
"""The size of the first read that looks for a frame at an arbitrary offset."""
FURTHEST_LOOK = 64 << 10
"""If no frame begins within so many bytes after an offset, the look there fails."""
LOOKS = 512
"""The largest number of samples in one segment, in a search by time."""
LARGE_FRAME = 1 << 10
"""With frames of at least this average size, a search by time reads the heads of all frames: a small part of a segment.
"""
LARGER_FRAME = 4 << 10
"""With frames of at least this average size, a search by id reads the heads of all frames, too."""
MOST_HEADS = 64 << 10
"""Heads are not read if the segment has more frames than this."""
_NEAR = 64 << 10
_SOME = 16


class Counted:
    """A file that counts the bytes that are read from it."""

    def __init__(self, file: File) -> None:
        self._file = file
        self.bytes_read = 0

    def read(self, offset: int, size: int) -> bytes:
        data = self._file.read(offset, size)
        self.bytes_read += len(data)
        return data

    def size(self) -> int:
        return self._file.size()

    def close(self) -> None:
        self._file.close()


class Stretch(NamedTuple):
    """The frames from ``position`` (an id and its offset) up to the offset ``end``, exclusive."""

    position: FramePosition
    end: int


class _Seen(NamedTuple):
    """A frame: its first id, its offset, the time at which its items were added, its end, and its watermark."""

    item_id: int
    offset: int
    added_ms: int
    end: int
    watermark: int


def seek(counted: Counted, segment: Segment, wanted: Wanted, end: int, durable_id: int) -> Stretch:
    """Find ``wanted`` among the frames of ``segment``. They end at ``end``, or earlier if the segment is not closed.

    ``durable_id``: an id that is known to be on disk.
    """
    file = cast("File", counted)
    size = end - fmt.HEADER_BYTES
    stretch = Stretch((segment.first_id, fmt.HEADER_BYTES), end)
    known = segment.closed  # are the last id and the times of the segment known?
    by_id = wanted.start_id > segment.first_id or wanted.stop_id <= (segment.last_id if known else fmt.LARGEST)
    by_time = (
        known
        and wanted.has_times
        and not (wanted.start_ms <= segment.min_added_ms and segment.max_added_ms < wanted.stop_ms)
    )
    if size <= SMALL_BYTES or not (by_id or by_time):
        return stretch
    average = _average(file, segment, end)
    if known and average >= (LARGE_FRAME if by_time else LARGER_FRAME) and size // average <= MOST_HEADS:
        heads = _heads(file, segment, end)
        return stretch if heads is None else _among(heads, wanted, end)
    if by_id:
        stretch = _by_ids(file, segment, wanted, stretch, durable_id)
    if by_time and stretch.end - stretch.position[1] > SMALL_BYTES:
        found = _by_looks(file, segment, wanted, end, average)
        if found is not None:
            stretch = Stretch(max(stretch.position, found.position), min(stretch.end, found.end))
    return stretch


def _frame_at(file: File, marker: int, position: FramePosition, end: int) -> _Seen | None:
    """The frame at a known position, from its head; ``None`` if the bytes there are no head of such a frame."""
    head = file.read(position[1], fmt.FRAME_BYTES)
    if len(head) < fmt.FRAME_BYTES:
        return None
    _, length, item_id, stamp, lag, found = fmt.unpack_frame(head)
    after = position[1] + fmt.FRAME_BYTES + length
    if found != marker or after > end or stamp >> fmt.KIND_SHIFT >= fmt.KIND_FOOTER or item_id < position[0]:
        return None
    return _Seen(item_id, position[1], stamp & fmt.ADDED_MASK, after, item_id - lag)


def _frame_behind(file: File, marker: int, offset: int, end: int, want: int = LOOK_BYTES) -> _Seen | None:
    """The first valid frame at or after ``offset``; ``None`` if none begins within ``FURTHEST_LOOK`` bytes."""
    while True:
        data = file.read(offset, max(min(want, end - offset), 0))
        for at, frame in fmt.frames_in(data, 0, marker):
            if frame.footer is None:
                after = offset + at + frame.size
                return _Seen(frame.first_id, offset + at, frame.entries[0][1], after, frame.watermark)
        if want >= FURTHEST_LOOK or offset + want >= end:
            return None
        want *= 4


def _average(file: File, segment: Segment, end: int) -> int:
    """The average size of the first ``_SOME`` frames; 0 if one of them is not as it should be."""
    position: FramePosition = (segment.first_id, fmt.HEADER_BYTES)
    for _ in range(_SOME):
        seen = _frame_at(file, segment.header.marker, position, end)
        if seen is None:
            return 0
        position = (seen.item_id + 1, seen.end)
    return (position[1] - fmt.HEADER_BYTES) // _SOME


# -- large frames ----------------------------------------------------------------------------------------------------


def _heads(file: File, segment: Segment, end: int) -> list[_Seen] | None:
    """All frames of the segment, from their heads; ``None`` if one of them is not as it should be."""
    heads: list[_Seen] = []
    position: FramePosition = (segment.first_id, fmt.HEADER_BYTES)
    while position[1] < end:
        seen = _frame_at(file, segment.header.marker, position, end)
        if seen is None:
            return None
        heads.append(seen)
        position = (seen.item_id + 1, seen.end)
    return heads


def _among(heads: list[_Seen], wanted: Wanted, end: int) -> Stretch:
    ids = [each.item_id for each in heads]
    first = max(bisect_right(ids, wanted.start_id) - 1, 0)
    stop = bisect_left(ids, wanted.stop_id)
    if wanted.has_times:
        right = [at for at in range(first, stop) if wanted.start_ms <= heads[at].added_ms < wanted.stop_ms]
        first, stop = (right[0], right[-1] + 1) if right else (stop, stop)
    after = heads[stop].offset if stop < len(heads) else end
    begin = heads[min(first, len(heads) - 1)]
    return Stretch((begin.item_id, begin.offset), after)


# -- small ones ------------------------------------------------------------------------------------------------------


def _by_ids(file: File, segment: Segment, wanted: Wanted, whole: Stretch, durable_id: int) -> Stretch:
    position, end = whole
    known_id = segment.last_id if segment.closed else durable_id
    if wanted.start_id > segment.first_id:
        position, _ = _around(file, segment.header.marker, whole, wanted.start_id, known_id)
    if wanted.stop_id <= (segment.last_id if segment.closed else fmt.LARGEST):
        _, end = _around(file, segment.header.marker, Stretch(position, end), wanted.stop_id - 1, known_id)
    return Stretch(position, end)


def _around(file: File, marker: int, within: Stretch, item_id: int, known_id: int) -> tuple[FramePosition, int]:
    """The position of a frame at or shortly before ``item_id``, and the offset of a frame after it.

    ``known_id``: ids up to this one are known to be on disk. After it, a crash may have left single frames whose
    predecessors are missing. Such frames never counted, so the returned position is not among them.
    """
    position, end = within
    positions, top = [position], end
    while top - position[1] > _NEAR:
        here = _frame_at(file, marker, position, end)
        if here is None:
            break
        middle = (position[1] + top) // 2
        is_next = here.end >= middle  # a large frame: the next one begins at its end, no search is needed
        seen = _frame_behind(file, marker, max(middle, here.end), end)
        known_id = max(known_id, seen.watermark if seen is not None else 0)
        if seen is not None and seen.item_id <= item_id:
            position = (seen.item_id, seen.offset)
            positions.append(position)
            continue
        if seen is not None:
            end = seen.offset
        if is_next:
            break
        top = middle
    return max(each for each in positions if each[0] <= known_id + 1 or each == within.position), end


def _by_looks(file: File, segment: Segment, wanted: Wanted, end: int, average: int) -> Stretch | None:
    size = end - fmt.HEADER_BYTES
    look = max(LOOK_BYTES, 2 * average + 64)
    count = min(LOOKS, isqrt(3 * size // look))  # the samples read as many bytes as three distances have
    marker = segment.header.marker
    first = _frame_at(file, marker, (segment.first_id, fmt.HEADER_BYTES), end)
    if first is None or count < 8:
        return None
    seen = [first]
    for number in range(1, count):
        offset = fmt.HEADER_BYTES + size * number // count
        if offset < seen[-1].end:
            continue
        there = _frame_behind(file, marker, offset, end, look)
        if there is None:
            return None  # frames of very different sizes
        seen.append(there)
    times = [each.added_ms for each in seen]
    if times != sorted(times):
        return None
    if times[0] != segment.min_added_ms or _last_ms(file, marker, end) != segment.max_added_ms:
        return None
    at = max(bisect_left(times, wanted.start_ms) - 2, 0)
    to = bisect_left(times, wanted.stop_ms) + 1
    return Stretch((seen[at].item_id, seen[at].offset), seen[to].offset if to < len(seen) else end)


def _last_ms(file: File, marker: int, end: int) -> int | None:
    """The time at which the last item was added; ``None`` if no frame is found in the last ``LARGER_FRAME`` bytes."""
    begin = max(end - LARGER_FRAME, fmt.HEADER_BYTES)
    last = None
    for _, frame in fmt.frames_in(file.read(begin, end - begin), 0, marker):
        last = frame.entries[0][1] if frame.footer is None else last
    return last
