"""A second reader of the file format, written from ``docs/format.md`` alone: ``struct`` and ``zlib``, slow, clear.

It shares no line with the library, so where the two agree, the page, the library and this file say the same. It takes
the files of a folder as a dictionary, name to bytes, and tells what is in them for one queue:

1. ``read_segment`` finds the frames of one segment and the gaps between them.
2. ``read_checkpoint`` finds the last whole state of a checkpoint file or mark.
3. ``read_queue`` puts the segments in a row, finds the highest watermark, and says of each gap whether it is damage
   or a torn tail.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

HEADER = 96
PREVIOUS_NUMBER, PREVIOUS_LAST_ID = 64, 72
"""Where the header has them."""
FRAME = 32
FOOTER = 96
PREFIX = 16
LARGEST = (1 << 62) - 1


@dataclass(frozen=True)
class Record:
    """One item as it is in the files."""

    id: int
    data: bytes
    added_ms: int
    expires_ms: int | None


@dataclass(frozen=True)
class Header:
    """What a segment says of itself."""

    marker: int
    queue_id: bytes
    number: int
    first_id: int
    base_items: int
    base_bytes: int
    previous_number: int
    previous_last_id: int
    previous_end: int


@dataclass(frozen=True)
class Frame:
    """One frame that is whole: where it is, and its items."""

    offset: int
    end: int
    first_id: int
    watermark: int
    records: tuple[Record, ...]

    @property
    def last_id(self) -> int:
        return self.first_id + len(self.records) - 1


@dataclass(frozen=True)
class Footer:
    """What a closed segment says at its end."""

    last_id: int
    first_id: int
    items: int
    data_bytes: int
    records_end: int
    number: int


@dataclass(frozen=True)
class Gap:
    """Bytes that are no frame although id ``due`` should be there; ``end`` is where the next frame is, or the end."""

    offset: int
    end: int
    due: int


@dataclass
class Segment:
    """One segment: what was found in it. ``header`` is ``None`` where that is not valid."""

    number: int
    header: Header | None
    frames: list[Frame] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    footer: Footer | None = None
    watermark: int = 0
    """The highest one of any frame that is valid, wherever it stands."""
    is_new: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """The last whole state of a checkpoint file."""

    queue_id: bytes
    reader: str
    is_mark: bool
    head: int
    watermark: int
    released_items: int
    released_bytes: int
    done: tuple[tuple[int, int], ...]
    error_counts: tuple[tuple[int, int], ...]
    series: int


@dataclass
class Reading:
    """What a queue's files hold. ``damage`` says for each what is wrong: a segment's number, an offset, a reason."""

    records: dict[int, Record] = field(default_factory=dict)
    damage: list[tuple[int, int, str]] = field(default_factory=list)
    torn: list[tuple[int, int]] = field(default_factory=list)
    checkpoints: dict[str, Checkpoint | None] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    watermark: int = 0

    def unread(self, reader: str) -> list[Record]:
        """What the reader has not done, in the order of ids; all there is if it has no state."""
        return [self.records[key] for key in sorted(self.records) if not self.is_done(reader, key)]

    def is_done(self, reader: str, item_id: int) -> bool:
        state = self.checkpoints.get(reader)
        done = [] if state is None else [(0, state.head), *state.done]
        return any(low <= item_id <= high for low, high in done)


# -- one segment -----------------------------------------------------------------------------------------------------


def read_header(data: bytes) -> Header | None:
    """The header, or ``None`` if these bytes do not begin with one."""
    if len(data) < HEADER or data[:8] != b"KSTRLSEG":
        return None
    if struct.unpack_from("<I", data, 92)[0] != zlib.crc32(data[:92]):
        return None
    version, size, marker, queue_id = struct.unpack_from("<HHI16s", data, 8)
    numbers = struct.unpack_from("<7Q", data, 32)
    header = Header(marker, queue_id, *numbers)
    if version != 1 or size != HEADER or marker == 0 or max(numbers) > LARGEST:
        return None
    return header if header.first_id > header.previous_last_id else None


def read_frame(data: bytes, offset: int, marker: int) -> tuple[int, int, int, int, bytes] | None:
    """``(kind, id, lag, added_ms, body)`` of the frame that begins at ``offset``, or ``None``."""
    if offset + FRAME > len(data):
        return None
    crc, length, first_id, added, kind, lag, its_marker = struct.unpack_from("<IIQ6sHII", data, offset)
    end = offset + FRAME + length
    if its_marker != marker or end > len(data) or zlib.crc32(data[offset + 4 : end]) != crc:
        return None
    return kind, first_id, lag, int.from_bytes(added, "little"), data[offset + FRAME : end]


def read_items(data: bytes, offset: int, marker: int) -> Frame | None:
    """The frame of one item or of a batch at ``offset``, or ``None``."""
    found = read_frame(data, offset, marker)
    if found is None or found[0] not in (0, 1, 2, 3):
        return None
    kind, first_id, lag, added_ms, body = found
    end = offset + FRAME + len(body)
    expires_ms = None
    if kind in (1, 3):
        if len(body) < 8:
            return None
        expires_ms = struct.unpack_from("<Q", body)[0]
        body = body[8:]
    items = [body] if kind in (0, 1) else split_batch(body)
    if not items or not 1 <= first_id <= LARGEST or lag > first_id:
        return None
    records = tuple(Record(first_id + n, item, added_ms, expires_ms) for n, item in enumerate(items))
    return Frame(offset, end, first_id, first_id - lag, records)


def split_batch(body: bytes) -> list[bytes] | None:
    """The items of a batch, or ``None`` if its lengths are not those of its bytes."""
    if len(body) < 4:
        return None
    (count,) = struct.unpack_from("<I", body)
    if count == 0 or 4 + 4 * count > len(body):
        return None
    lengths = struct.unpack_from(f"<{count}I", body, 4)
    at = 4 + 4 * count
    if at + sum(lengths) != len(body):
        return None
    items = []
    for length in lengths:
        items.append(body[at : at + length])
        at += length
    return items


def read_footer_body(last_id: int, kind: int, body: bytes) -> Footer | None:
    """The footer that a valid frame holds, if it holds one that does not contradict itself."""
    if kind != 8 or len(body) != 64 or body[56:] != b"KSTRLEND":
        return None
    first_id, items, data_bytes, _, _, records_end, number = struct.unpack_from("<7Q", body)
    if last_id > LARGEST or last_id != first_id - 1 + items or records_end < HEADER or data_bytes > records_end:
        return None
    return Footer(last_id, first_id, items, data_bytes, records_end, number)


def read_footer(data: bytes, header: Header) -> Footer | None:
    """The footer: the last 96 bytes of the file, or ``None`` if they are not one of this segment."""
    offset = len(data) - FOOTER
    found = read_frame(data, offset, header.marker) if offset >= HEADER else None
    footer = None if found is None else read_footer_body(found[1], found[0], found[4])
    if footer is None or (footer.number, footer.first_id) != (header.number, header.first_id):
        return None
    return footer if footer.records_end <= offset else None


def read_segment(number: int, data: bytes) -> Segment:
    """The frames of a segment, and the gaps between and behind them."""
    header = read_header(data)
    if header is None or header.number != number:
        return Segment(number, None)
    segment = Segment(number, header, footer=read_footer(data, header))
    end = len(data) if segment.footer is None else segment.footer.records_end
    data = data[:end]
    at, due = HEADER, header.first_id
    most = LARGEST if segment.footer is None else segment.footer.last_id
    while at < end and (segment.footer is not None or data[at:].strip(b"\0")):
        frame = read_items(data, at, header.marker)
        if frame is not None and frame.first_id == due:
            segment.frames.append(frame)
            segment.watermark = max(segment.watermark, frame.watermark)
            at, due = frame.end, frame.last_id + 1
            continue
        behind = [hit for hit in search(data, at, header.marker) if hit.first_id >= due]
        segment.watermark = max([segment.watermark, *(hit.watermark for hit in behind)])
        fitting = (hit for hit in behind if hit.offset > at or hit.first_id > due)
        following = next((hit for hit in fitting if hit.first_id <= most), None)
        segment.gaps.append(Gap(at, end if following is None else following.offset, due))
        if following is None:
            break
        at, due = following.offset, following.first_id
    return segment


def search(data: bytes, start: int, marker: int) -> list[Frame]:
    """The valid frames of items from ``start`` on. What is inside a valid frame is its content and no frame."""
    found = []
    place = data.find(struct.pack("<I", marker), start + 28)
    while place >= 0:
        at = place - 28
        frame = read_items(data, at, marker)
        if frame is not None:
            found.append(frame)
            place = data.find(struct.pack("<I", marker), frame.end + 28)
        else:
            size = 96 if is_footer(data, at, marker) else 1
            place = data.find(struct.pack("<I", marker), place + size)
    return found


def is_footer(data: bytes, offset: int, marker: int) -> bool:
    found = read_frame(data, offset, marker)
    return found is not None and read_footer_body(found[1], found[0], found[4]) is not None


# -- a checkpoint file -----------------------------------------------------------------------------------------------


def read_checkpoint(data: bytes) -> Checkpoint | None:
    """The last whole state of a checkpoint file or mark; ``None`` if there is none."""
    if len(data) < PREFIX or data[:10] not in (b"KSTRLCKP" + struct.pack("<H", version) for version in (1, 2)):
        return None
    last = None
    at = PREFIX
    while at + 8 <= len(data):
        crc, length = struct.unpack_from("<II", data, at)
        end = at + 8 + length
        if end > len(data) or zlib.crc32(data[at + 8 : end], length) != crc:
            break
        state = read_state(data[at + 8 : end])
        if state is None or (last is not None and state.series != last.series):
            break
        last, at = state, end
    return last


def is_move(data: bytes) -> bool:
    """Whether this is a whole move."""
    if len(data) < 32:
        return False
    number, target_bytes, kind, notes = struct.unpack_from("<QHHI", data, 16)
    at = 32 + target_bytes
    target = data[32:at]
    if not re.fullmatch(rb"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}", target) or kind not in (1, 2) or not notes:
        return False
    last_id = 0
    for _ in range(notes):
        if at + 22 > len(data):
            return False
        item_id, _, died_ms, reason_bytes = struct.unpack_from("<QIQH", data, at)
        reason, at = data[at + 22 : at + 22 + reason_bytes], at + 22 + reason_bytes
        if not last_id < item_id <= LARGEST or died_ms > LARGEST or reason_bytes > 1024 or not is_utf8(reason):
            return False
        last_id = item_id
    return at == len(data) and 0 < int(number) <= LARGEST


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def read_state(body: bytes) -> Checkpoint | None:
    """One state, or ``None`` if its parts do not fit together."""
    if len(body) < 92:
        return None
    queue_id, head, watermark, items, size, _, _, _, _, flags, name_bytes, spans, counts = struct.unpack_from(
        "<16s8QHHII", body
    )
    at = 92
    end = at + name_bytes + 16 * spans + 12 * counts
    if end > len(body) or max(head, watermark, items, size) > LARGEST:
        return None
    if not is_move(body[end:]) if flags & 4 else end != len(body):
        return None
    name = body[at : at + name_bytes]
    at += name_bytes
    done = [struct.unpack_from("<QQ", body, at + 16 * n) for n in range(spans)]
    at += 16 * spans
    errors = tuple(struct.unpack_from("<QI", body, at + 12 * n) for n in range(counts))
    if any(byte > 127 for byte in name) or not spans_are_apart(head, done):
        return None
    is_mark, series = flags % 16 & ~4 == 1, flags // 16
    errors = tuple(each for each in errors if each[0])  # id 0: what the reader was moved past
    return Checkpoint(queue_id, name.decode(), is_mark, head, watermark, items, size, tuple(done), errors, series)


def spans_are_apart(head: int, spans: list[tuple[int, int]]) -> bool:
    """Whether the spans rise, are above the head and do not touch each other's ids."""
    for first, last in spans:
        if not head < first <= last <= LARGEST:
            return False
        head = last
    return True


# -- a queue ---------------------------------------------------------------------------------------------------------


def read_queue(files: Mapping[str, bytes], queue: str) -> Reading:
    """What the files of one queue hold, and what is wrong with them."""
    reading = Reading()
    for name, data in files.items():
        segment_name = re.fullmatch(re.escape(queue) + r"\.([0-9]{1,19})(\.new)?\.segment", name)
        if segment_name is not None:
            segment = read_segment(int(segment_name[1]), data)
            segment.is_new = segment_name[2] is not None
            if segment.is_new and f"{queue}.{segment_name[1]}.segment" in files:
                continue
            reading.segments.append(segment)
    reading.segments.sort(key=lambda segment: segment.number)
    reading.segments = [
        segment
        for at, segment in enumerate(reading.segments)
        if segment.header is not None or is_needed(reading.segments, at)
    ]
    headers = [segment.header for segment in reading.segments if segment.header is not None]
    states = checkpoints_of(files, queue)
    queue_id = headers[-1].queue_id if headers else next((each.queue_id for each in states.values() if each), None)
    heads = []
    for reader, state in states.items():
        if state is not None and queue_id in (None, state.queue_id):
            reading.watermark = max(reading.watermark, state.watermark)
            if not state.is_mark:
                heads.append(state.head)
            if reader is not None:
                reading.checkpoints[reader] = state
    whole = []
    for segment in reading.segments:
        if segment.header is None or segment.header.queue_id != queue_id:
            reading.damage.append((segment.number, 0, "no valid header of this queue"))
        else:
            whole.append(segment)
            closed = segment.footer.last_id if segment.footer is not None else 0
            known = max(segment.header.previous_last_id, segment.watermark, closed)
            reading.watermark = max(reading.watermark, known)
    last_ids = []
    for at, segment in enumerate(whole):
        following = whole[at + 1] if at + 1 < len(whole) else None
        last_ids.append(take_records(reading, segment, following, segment is reading.segments[-1]))
    check_order(reading, whole, last_ids, heads)
    return reading


def is_needed(segments: list[Segment], at: int) -> bool:
    """Whether a segment without a valid header is more than what a crash has left of its creation."""
    later = next((segment.header for segment in segments[at + 1 :] if segment.header is not None), None)
    return not segments[at].is_new or (later is not None and later.previous_number == segments[at].number)


def checkpoints_of(files: Mapping[str, bytes], queue: str) -> dict[str | None, Checkpoint | None]:
    """The states by the reader's name in the file's name; the mark is under ``None``."""
    found: dict[str | None, Checkpoint | None] = {}
    for name, data in sorted(files.items(), key=lambda each: (not each[0].endswith(".mark"), each[0])):
        match = re.fullmatch(re.escape(queue) + r"\+([A-Za-z0-9_-]*)\.checkpoint", name)
        if match is not None:
            found[match[1]] = read_checkpoint(data)
        elif name == f"{queue}.mark":
            found[None] = read_checkpoint(data)
    return found


def take_records(reading: Reading, segment: Segment, following: Segment | None, last: bool) -> int:
    """Take the records of a segment, and judge its gaps. Returns its last id."""
    assert segment.header is not None
    due_until = reading.watermark
    if segment.footer is not None:
        due_until = segment.footer.last_id
    elif not last:
        reading.damage.append((segment.number, 0, "not closed, but not the last"))
        if following is not None and following.header is not None:
            due_until = following.header.previous_last_id
    stop = None
    for gap in segment.gaps:
        if gap.due > due_until:
            reading.torn.append((segment.number, gap.offset))
            stop = gap.offset
            break
        reading.damage.append((segment.number, gap.offset, f"item {gap.due} is not intact"))
    last_id = segment.header.first_id - 1
    behind = following.header.first_id if following is not None and following.header is not None else LARGEST + 1
    for frame in segment.frames:
        if stop is None or frame.offset < stop:
            reading.records.update((record.id, record) for record in frame.records if record.id < behind)
            last_id = frame.last_id
    if last_id < due_until and not (segment.gaps and segment.gaps[-1].due == last_id + 1):
        reading.damage.append((segment.number, 0, f"item {last_id + 1} is missing"))
    return last_id if segment.footer is None else segment.footer.last_id


def check_order(reading: Reading, whole: list[Segment], last_ids: list[int], heads: list[int]) -> None:
    """Each segment must follow the one before, readers must find what they need, and the end must be there."""
    for at in range(len(whole) - 1, 0, -1):
        before, after = whole[at - 1], whole[at].header
        assert after is not None
        if (after.previous_number, after.previous_last_id) == (before.number, last_ids[at - 1]):
            continue
        if heads and min(heads) >= after.previous_last_id:  # nobody needs those in front: they came back
            numbers = {segment.number for segment in whole[:at]}
            reading.damage = [each for each in reading.damage if each[0] not in numbers]
            for key in [key for key in reading.records if key <= after.previous_last_id]:
                del reading.records[key]
            whole = whole[at:]
            break
        place = PREVIOUS_NUMBER if after.previous_number != before.number else PREVIOUS_LAST_ID
        reading.damage.append((whole[at].number, place, "it does not follow the segment before it"))
    if whole and whole[0].header is not None and heads and min(heads) < whole[0].header.previous_last_id:
        reading.damage.append((whole[0].number, PREVIOUS_LAST_ID, "a reader needs what is in front of it"))
    if reading.watermark > (last_ids[-1] if last_ids else 0):
        reading.damage.append((0, 0, "the end of the journal is missing"))
