"""Format version 1: encodes records to bytes, and decodes them. docs/format.md specifies it; the boxes here repeat it.

Rules:
1. This module knows no file, lock or clock (style rule 9): it is what the fuzzing tests call.
2. Every length is checked against the bytes at hand before anything is sliced (rule R21).
3. A decoder returns ``None`` for bytes that are not a whole, valid structure. Whether that is a torn tail or damage is
   for the layers above to decide: only they know the watermark (rule R15).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple, TypeAlias
from zlib import crc32

from kestrelpy._journal.moves import Move, decode_move, encode_move
from kestrelpy._journal.packing import TABLE_BYTES, join_batch, split_batch

FORMAT_VERSION = 1
MOVES_VERSION = 2
"""The version of a checkpoint file with a state that has a move."""

SEGMENT_MAGIC = b"KSTRLSEG"
FOOTER_MAGIC = b"KSTRLEND"
CHECKPOINT_MAGIC = b"KSTRLCKP"

KIND_ITEM = 0
KIND_EXPIRES = 1  # a bit: the body begins with the time of expiry
KIND_BATCH = 2
KIND_FOOTER = 8

#   0        4        8                16            22     24       28       32
#   +--------+--------+----------------+-------------+------+--------+--------+------ - -
#   | crc    | length | id             | added_ms    | kind | lag    | marker | body
#   +--------+--------+----------------+-------------+------+--------+--------+------ - -
#            <------------------- the crc covers all of this -------------------------->
_FRAME = struct.Struct("<IIQQII")
_FRAME_AFTER_CRC = struct.Struct("<IQQII")
FRAME_BYTES = _FRAME.size
MARKER_OFFSET = 28
KIND_SHIFT = 48
ADDED_MASK = (1 << KIND_SHIFT) - 1
MAX_BODY_BYTES = (1 << 32) - 1
LARGEST = (1 << 62) - 1
"""No valid id, count, size, offset or file number is larger. So the sum of two of them fits a field."""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

pack_frame = _FRAME_AFTER_CRC.pack
"""``pack_frame(length, id, added_ms | kind << KIND_SHIFT, lag, marker)``: a frame's header after its checksum."""
pack_crc = _U32.pack
unpack_frame = _FRAME.unpack_from


def _layout(*fields: str) -> tuple[struct.Struct, dict[str, int]]:
    """Build a struct from fields in order, each given as "name code". Also returns each field's offset, for reports."""
    codes = [field.split()[1] for field in fields]
    places = {field.split()[0]: struct.calcsize("<" + "".join(codes[:at])) for at, field in enumerate(fields)}
    return struct.Struct("<" + "".join(codes)), places


_HEADER, HEADER_OFFSET = _layout(
    "magic 8s",
    "version H",
    "header_bytes H",
    "marker I",
    "queue_id 16s",
    "number Q",
    "first_id Q",
    "base_items Q",
    "base_bytes Q",
    "previous_number Q",
    "previous_last_id Q",
    "previous_end Q",
    "zero I",
)
HEADER_BYTES = _HEADER.size + 4
_FOOTER = struct.Struct("<QQQQQQQ8s")
FOOTER_BYTES = FRAME_BYTES + _FOOTER.size
SEGMENT_OVERHEAD = HEADER_BYTES + FRAME_BYTES + _U64.size + FOOTER_BYTES
"""The bytes of a segment with one expiring item, without the item's data."""


def footer_offset(file_bytes: int) -> int:
    """Where the footer of a closed segment of that size is, or should be."""
    return max(file_bytes - FOOTER_BYTES, 0)


SEARCH_COST = 64
"""How many times the bytes at hand a search for frames may checksum in vain before it gives up."""

Entry: TypeAlias = tuple[bytes, int, int | None]
"""One item as the readers pass it along: data, added_ms, expires_ms. A plain tuple, as one is made for every put."""


class SegmentHeader(NamedTuple):
    """The first bytes of a segment. All items up to ``previous_last_id`` were on disk before they were written (R7)."""

    marker: int
    queue_id: bytes
    number: int
    first_id: int
    base_items: int
    base_bytes: int
    previous_number: int
    previous_last_id: int
    previous_end: int


class SegmentFooter(NamedTuple):
    """The last bytes of a closed segment. If the segment has no items, ``last_id == first_id - 1``."""

    first_id: int
    last_id: int
    items: int
    data_bytes: int
    min_added_ms: int
    max_added_ms: int
    records_end: int


class Frame(NamedTuple):
    """A whole, valid frame: one item, a batch, or the footer. ``size`` is its length in bytes."""

    kind: int
    first_id: int
    last_id: int
    watermark: int
    entries: Sequence[Entry]
    size: int
    footer: SegmentFooter | None = None


# -- segments --------------------------------------------------------------------------------------------------------


def encode_header(header: SegmentHeader) -> bytes:
    body = _HEADER.pack(
        SEGMENT_MAGIC,
        FORMAT_VERSION,
        HEADER_BYTES,
        header.marker,
        header.queue_id,
        header.number,
        header.first_id,
        header.base_items,
        header.base_bytes,
        header.previous_number,
        header.previous_last_id,
        header.previous_end,
        0,
    )
    return body + pack_crc(crc32(body))


def header_version(data: bytes) -> int | None:
    """The format version that the first bytes of a segment claim; ``None`` if they are not those of a segment."""
    if len(data) < 10 or data[:8] != SEGMENT_MAGIC:
        return None
    return int.from_bytes(data[8:10], "little")


def decode_header(data: bytes) -> SegmentHeader | None:
    if len(data) < HEADER_BYTES or header_version(data) != FORMAT_VERSION:
        return None
    body = data[: _HEADER.size]
    if _U32.unpack_from(data, _HEADER.size)[0] != crc32(body):
        return None
    _, _, size_said, marker, queue_id, number, first_id, items, size, prev, prev_last, prev_end, _ = _HEADER.unpack(
        body
    )
    if size_said != HEADER_BYTES or marker == 0 or first_id <= prev_last:
        return None
    if max(number, first_id, items, size, prev, prev_end) > LARGEST:
        return None
    return SegmentHeader(marker, queue_id, number, first_id, items, size, prev, prev_last, prev_end)


def encode_footer(footer: SegmentFooter, number: int, marker: int) -> bytes:
    body = _FOOTER.pack(
        footer.first_id,
        footer.items,
        footer.data_bytes,
        footer.min_added_ms,
        footer.max_added_ms,
        footer.records_end,
        number,
        FOOTER_MAGIC,
    )
    return _seal(pack_frame(len(body), footer.last_id, KIND_FOOTER << KIND_SHIFT, 0, marker) + body)


def encode_item(
    item_id: int, data: bytes, added_ms: int, expires_ms: int | None, durable_id: int, marker: int
) -> bytes:
    """Encode one item as a frame. ``durable_id`` is the watermark: the highest id known to be on disk."""
    kind, body = KIND_ITEM, data
    if expires_ms is not None:
        kind, body = KIND_EXPIRES, _U64.pack(expires_ms) + data
    return _seal(pack_frame(len(body), item_id, added_ms | kind << KIND_SHIFT, item_id - durable_id, marker) + body)


def encode_batch(
    first_id: int,
    items: Sequence[bytes],
    sizes: Sequence[int],
    added_ms: int,
    expires_ms: int | None,
    durable_id: int,
    marker: int,
) -> bytes:
    """Encode several items, of these sizes, as one frame: after a crash all of them are there, or none."""
    kind, head = KIND_BATCH, b""
    if expires_ms is not None:
        kind, head = KIND_BATCH | KIND_EXPIRES, _U64.pack(expires_ms)
    body = join_batch(head, items, sizes)
    return _seal(pack_frame(len(body), first_id, added_ms | kind << KIND_SHIFT, first_id - durable_id, marker) + body)


def batch_bytes(size: int, count: int) -> int:
    """The size of the frame of an expiring batch, of ``count`` items that have ``size`` bytes together."""
    return FRAME_BYTES + _U64.size + TABLE_BYTES * (count + 1) + size


def _seal(frame: bytes) -> bytes:
    return pack_crc(crc32(frame)) + frame


def decode_frame(data: bytes | memoryview, offset: int, marker: int) -> Frame | None:
    """The frame at ``offset``; ``None`` if there is no whole, valid frame of this segment (by its marker)."""
    body_start = offset + FRAME_BYTES
    if offset < 0 or body_start > len(data):
        return None
    crc, length, first_id, stamp, lag, found = _FRAME.unpack_from(data, offset)
    end = body_start + length
    if found != marker or end > len(data) or crc32(data[offset + 4 : end]) != crc:
        return None
    kind, added_ms, watermark = stamp >> KIND_SHIFT, stamp & ADDED_MASK, first_id - lag
    if kind == KIND_FOOTER:
        footer = _decode_footer_body(data[body_start:end], first_id)
        return None if footer is None else Frame(kind, first_id, first_id, first_id, (), FRAME_BYTES + length, footer)
    if not 0 < first_id <= LARGEST or lag > first_id or kind & ~(KIND_EXPIRES | KIND_BATCH):
        return None
    expires_ms = None
    if kind & KIND_EXPIRES:
        if length < _U64.size:
            return None
        expires_ms = _U64.unpack_from(data, body_start)[0]
        body_start += _U64.size
    if not kind & KIND_BATCH:
        entry = (bytes(data[body_start:end]), added_ms, expires_ms)
        return Frame(kind, first_id, first_id, watermark, (entry,), FRAME_BYTES + length)
    bodies = split_batch(bytes(data[body_start:end]))
    if not bodies:
        return None
    entries = list(zip(bodies, repeat(added_ms), repeat(expires_ms)))
    return Frame(kind, first_id, first_id + len(entries) - 1, watermark, entries, FRAME_BYTES + length)


def frame_span(data: bytes | memoryview, offset: int) -> tuple[int, int]:
    """First id and size of the frame at ``offset``, which is known to be whole: nothing is checked."""
    _, length, first_id, _, _, _ = _FRAME.unpack_from(data, offset)
    return first_id, FRAME_BYTES + length


def _decode_footer_body(body: bytes | memoryview, last_id: int) -> SegmentFooter | None:
    if len(body) != _FOOTER.size:
        return None
    first_id, items, size, low, high, records_end, _number, magic = _FOOTER.unpack(body)
    if magic != FOOTER_MAGIC or last_id > LARGEST or items != last_id + 1 - first_id:
        return None
    if records_end < HEADER_BYTES or size > records_end:
        return None
    return SegmentFooter(first_id, last_id, items, size, low, high, records_end)


def decode_footer(data: bytes, header: SegmentHeader) -> SegmentFooter | None:
    """The footer, if ``data`` is exactly one footer, and closes the segment with this header."""
    frame = decode_frame(data, 0, header.marker)
    if frame is None or frame.footer is None or frame.size != len(data):
        return None
    footer = frame.footer
    return footer if (footer.first_id, footer_number(data)) == (header.first_id, header.number) else None


def footer_number(data: bytes) -> int:
    """The segment number in a valid footer."""
    return int(_FOOTER.unpack_from(data, FRAME_BYTES)[6])


def frames_in(data: bytes, offset: int, marker: int) -> Iterator[tuple[int, Frame]]:
    """The valid frames at or after ``offset``, with their offsets. There may be other bytes between them.

    Every segment has a random marker, so a payload that imitates a frame does not pass for one. Somebody who writes
    files can put the marker anywhere, with a length over which a checksum has to be taken. So the search ends once it
    has checksummed, in vain, more than ``SEARCH_COST`` times all the bytes.
    """
    needle, vain = pack_crc(marker), 0
    at = data.find(needle, offset + MARKER_OFFSET)
    while at >= 0 and vain <= SEARCH_COST * len(data):
        start = at - MARKER_OFFSET
        frame = decode_frame(data, start, marker)
        if frame is not None:
            yield start, frame
            at = data.find(needle, start + frame.size + MARKER_OFFSET)
            continue
        (length,) = _U32.unpack_from(data, start + _U32.size)
        if length <= len(data) - start:
            vain += length
        at = data.find(needle, at + 1)


def find_frame(data: bytes, offset: int, marker: int, missing: int, limit: int = LARGEST) -> tuple[int, Frame] | None:
    """The first valid frame of items from which to continue, and its offset. The frame of item ``missing`` is due at
    ``offset`` and is not intact: at ``offset`` only the frame of a later item counts. A frame above ``limit`` does not
    belong in these bytes.
    """
    for at, frame in frames_in(data, offset, marker):
        if frame.footer is None and missing + (at == offset) <= frame.first_id <= limit:
            return at, frame
    return None


def look_beyond(data: bytes, marker: int, first_id: int) -> tuple[int, int]:
    """The highest id, and the highest watermark, in the valid frames of ``first_id`` and above in ``data``; 0 if there
    are no such frames.
    """
    last_id = watermark = 0
    for _, frame in frames_in(data, 0, marker):
        if frame.footer is None and frame.first_id >= first_id:
            last_id, watermark = max(last_id, frame.last_id), max(watermark, frame.watermark)
    return last_id, watermark


# -- checkpoints -----------------------------------------------------------------------------------------------------

#   | magic 8 | version 2 | reserved 6 |  then frames:  | crc 4 | length 4 | body |
_CHECKPOINT_PREFIX = struct.Struct("<8sH6x")
CHECKPOINT_PREFIX_BYTES = _CHECKPOINT_PREFIX.size
_CHECKPOINT_FRAME = struct.Struct("<II")
_CHECKPOINT_BODY, _CHECKPOINT_OFFSET = _layout(
    "queue_id 16s",
    "head Q",
    "watermark Q",
    "released_items Q",
    "released_bytes Q",
    "hint_number Q",
    "hint_offset Q",
    "hint_id Q",
    "durable_head Q",
    "flags H",
    "name_bytes H",
    "spans I",
    "errors I",
)
FLAG_MARK = 1
"""This state is the queue's mark, not a reader's state."""
FLAG_INHERITED = 2
"""The reader has taken over the default reader's checkpoint: a default checkpoint beside it is left over."""
_FLAG_MOVE = 4
"""A move follows the error counts. ``Checkpoint.flags`` does not have it."""
_FLAG_BITS = 4
"""The bits above these in the field of the flags are the series."""
SERIES = 1 << 16 - _FLAG_BITS
"""The series is a number below this. All states of a file have one series, those of its spare file another: so a state
of the one file that a power cut has left in the other does not count there.
"""
_SPAN = struct.Struct("<QQ")
_ERROR_COUNT = struct.Struct("<QI")
MOST_ERRORS = (1 << 32) - 1
"""An error count stops growing at this number."""
_NO_ITEM = 0
"""The id of an error count that counts the items a reader was moved past. Older versions take it for that of an item
that is done.
"""


class Checkpoint(NamedTuple):
    """A reader's saved state. As the queue's mark it has no reader, and ``head`` is the last id given out.

    ``done`` are spans of done ids above ``head``: first and last id of each, rising, without overlap. The hint is a
    position at or before the record after ``head``; ``hint_id`` is the id of the frame there. When the state was
    written, an older state was known to be on disk in which all ids up to ``durable_head`` are done. ``skipped``: how
    many items the reader was moved past since it was opened last, as it was too far behind.
    """

    queue_id: bytes
    reader: str
    head: int
    watermark: int
    released_items: int
    released_bytes: int
    hint_number: int = 0
    hint_offset: int = 0
    hint_id: int = 0
    flags: int = 0
    done: tuple[tuple[int, int], ...] = ()
    error_counts: tuple[tuple[int, int], ...] = ()
    durable_head: int = 0
    skipped: int = 0
    move: Move | None = None
    """The items that are on their way to another queue, if there are any; not done yet."""

    @property
    def highest_id(self) -> int:
        """The highest id that this state names as done."""
        return max(self.head, self.done[-1][1] if self.done else 0)

    @property
    def last_named_id(self) -> int:
        """The highest id that this state names: done, aborted or on its way. For a state that is to be saved."""
        moving_id = self.move.notes[-1].item_id if self.move is not None else 0
        return max(self.highest_id, self.error_counts[-1][0] if self.error_counts else 0, moving_id)

    def has_inherited(self, name: str) -> bool:
        """Whether this state, found under a reader's ``name``, was taken over from the default reader. The state says
        so, or the default reader saved it and nothing was saved since.
        """
        return bool(name) and (not self.reader or bool(self.flags & FLAG_INHERITED))


def checkpoint_prefix(version: int = FORMAT_VERSION) -> bytes:
    return _CHECKPOINT_PREFIX.pack(CHECKPOINT_MAGIC, version)


def checkpoint_version(data: bytes) -> int | None:
    """The format version that a checkpoint file claims; ``None`` if it is no checkpoint file."""
    if len(data) < CHECKPOINT_PREFIX_BYTES or data[:8] != CHECKPOINT_MAGIC:
        return None
    return int(_CHECKPOINT_PREFIX.unpack_from(data)[1])


def checkpoint_series(data: bytes) -> int:
    """The series of a checkpoint file. Any bytes give a number."""
    at = CHECKPOINT_PREFIX_BYTES + _CHECKPOINT_FRAME.size + _CHECKPOINT_OFFSET["flags"]
    return int.from_bytes(data[at : at + 2], "little") >> _FLAG_BITS


def encode_checkpoint(state: Checkpoint, series: int = 0) -> bytes:
    body = encode_checkpoint_body(state, series)
    return _CHECKPOINT_FRAME.pack(crc32(body, len(body)), len(body)) + body


def encode_checkpoint_body(state: Checkpoint, series: int = 0) -> bytes:
    name = state.reader.encode("ascii")
    counts = ((_NO_ITEM, state.skipped), *state.error_counts) if state.skipped else state.error_counts
    return b"".join(
        (
            _CHECKPOINT_BODY.pack(
                state.queue_id,
                state.head,
                state.watermark,
                min(max(state.released_items, 0), LARGEST),  # forged counts may lead out of range: store the nearest
                min(max(state.released_bytes, 0), LARGEST),
                state.hint_number,
                state.hint_offset,
                state.hint_id,
                state.durable_head,
                state.flags | (_FLAG_MOVE if state.move is not None else 0) | series << _FLAG_BITS,
                len(name),
                len(state.done),
                len(counts),
            ),
            name,
            *(_SPAN.pack(*span) for span in state.done),
            *(_ERROR_COUNT.pack(item_id, min(count, MOST_ERRORS)) for item_id, count in counts),
            b"" if state.move is None else encode_move(state.move),
        )
    )


def checkpoints_end(data: bytes) -> int:
    """Where the last checkpoint that begins in ``data`` ends, by the lengths that the checkpoints claim."""
    at = CHECKPOINT_PREFIX_BYTES
    while at + _CHECKPOINT_FRAME.size <= len(data):
        length = _CHECKPOINT_FRAME.unpack_from(data, at)[1]
        if length < _CHECKPOINT_BODY.size:
            break
        at += _CHECKPOINT_FRAME.size + length
    return at


def decode_checkpoints(data: bytes) -> tuple[Checkpoint | None, int]:
    """The last whole checkpoint of a file that begins with a good prefix, and the offset of its end. A checkpoint of
    another series than the first one does not count.
    """
    last, at = None, CHECKPOINT_PREFIX_BYTES
    while at + _CHECKPOINT_FRAME.size <= len(data):
        crc, length = _CHECKPOINT_FRAME.unpack_from(data, at)
        end = at + _CHECKPOINT_FRAME.size + length
        if end > len(data):
            break
        body = data[end - length : end]
        state = decode_checkpoint_body(body) if crc32(body, length) == crc else None
        if state is None or (last is not None and (last.flags ^ state.flags) >> _FLAG_BITS):
            break
        last, at = state, end
    return last and last._replace(flags=last.flags & (1 << _FLAG_BITS) - 1), at


def checkpoint_offset(data: bytes, field: str) -> int:
    """The offset of a field of the last whole checkpoint of a file, for error reports. The reader's name comes directly
    after the fields of fixed size.
    """
    end, at = decode_checkpoints(data)[1], CHECKPOINT_PREFIX_BYTES
    while (following := at + _CHECKPOINT_FRAME.size + _CHECKPOINT_FRAME.unpack_from(data, at)[1]) < end:
        at = following
    return at + _CHECKPOINT_FRAME.size + _CHECKPOINT_OFFSET.get(field, _CHECKPOINT_BODY.size)


def decode_checkpoint_body(body: bytes) -> Checkpoint | None:
    """Decode the body of a checkpoint. Its series stays in ``flags``."""
    if len(body) < _CHECKPOINT_BODY.size:
        return None
    queue_id, head, watermark, items, size, number, offset, hint, durable, flags, name_bytes, spans, errors = (
        _CHECKPOINT_BODY.unpack_from(body)
    )
    name_end = _CHECKPOINT_BODY.size + name_bytes
    spans_end = name_end + spans * _SPAN.size
    errors_end = spans_end + errors * _ERROR_COUNT.size
    move = decode_move(body[errors_end:]) if flags & _FLAG_MOVE else None
    if errors_end > len(body) or (move is None and (flags & _FLAG_MOVE or errors_end != len(body))):
        return None
    if max(head, watermark, items, size) > LARGEST:
        return None
    name = body[_CHECKPOINT_BODY.size : name_end]
    done = tuple(_SPAN.iter_unpack(body[name_end:spans_end]))
    if not name.isascii() or not _spans_rise(head, done):
        return None
    every = tuple(_ERROR_COUNT.iter_unpack(body[spans_end:errors_end]))
    counts = tuple(each for each in every if each[0] != _NO_ITEM)
    skipped = sum(count for item_id, count in every if item_id == _NO_ITEM)
    place = head, watermark, items, size, number, offset, hint
    flags &= ~_FLAG_MOVE
    return Checkpoint(queue_id, name.decode("ascii"), *place, flags, done, counts, durable, skipped, move)


def _spans_rise(head: int, spans: Sequence[tuple[int, ...]]) -> bool:
    floor = head
    for first, last in spans:
        if not floor < first <= last <= LARGEST:
            return False
        floor = last
    return True
