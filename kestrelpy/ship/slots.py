"""The slots of a shipped queue's log: encodes them to bytes, and decodes them.

docs/format.md is the specification; the boxes here repeat it. The rules are those of ``kestrelpy._journal.format``:

1. This module knows no file, store, lock or clock.
2. Every length is checked against the bytes at hand before anything is sliced: a forged one costs nothing.
3. A decoder returns ``None`` for bytes that are not a whole, valid structure. Then ``slot_version`` and ``slot_kind``
   say whether the bytes are whole, and of a version or kind that a newer library knows.
4. One value has one encoding: what decodes to a value is what the value encodes to. So "byte for byte ours" (S4), and
   "whoever computes it" of a manifest, are comparisons of bytes.

What a slot says of itself is checked here. Whether it may follow the slot before it: ``kestrelpy.ship.manifest``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias
from zlib import crc32

from kestrelpy._journal import format as fmt
from kestrelpy._journal.file_names import check_name
from kestrelpy._journal.format import LARGEST
from kestrelpy.errors import InvalidName
from kestrelpy.inbox.format import LedgerState, decode_ledger, encode_ledger

SLOT_MAGIC = b"KSTRLSLT"
SLOT_VERSION, MOVES_VERSION = 1, 2
"""The versions of a slot: without, and with a checkpoint that has a move."""
MAX_SLOT_BYTES = 64 << 20
MOST_SLOTS = 10**16 - 1
"""The number of a slot has at most 16 digits: so the keys of slots are in the order of their numbers."""
MAX_OWNER_BYTES = 200

FENCE, DATA, SEAL, CLOSE = KINDS = (1, 2, 3, 4)

#   0          8         10     12       16     24      32         48            64
#   | KSTRLSLT | version | kind | head 4 | slot | epoch | nonce 16 | queue_id 16 |
#   64           72             76           80
#   | written_ms | crc_before 4 | lease_ms 4 |
#   80       88         92              96       104      112        120
#   | number | marker 4 | segment_crc 4 | offset | length | first_id | last_id |
#   128             132        136      140    156   160
#   | checkpoints 4 | ledger 4 | note 4 | 0 16 | crc |   then: | frames | checkpoints | ledger | note | crc |
_HEADER = struct.Struct("<8sHHIQQ16s16sQIIQIIQQQQIII16s")
_BEGIN = struct.Struct("<HHI")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STATE = struct.Struct("<BI")
_IS_STATE, _IS_DROPPED = 0, 1
_SEALED = struct.Struct("<QI")
HEADER_BYTES = _HEADER.size + _U32.size
_UNUSED = bytes(16)
_NO_QUEUE_ID = bytes(16)
_LEDGER_PREFIX = encode_ledger(LedgerState(), None, from_store=True)
_LONGEST_NAME = 100
_SEGMENT_KEY = re.compile(r"seg/([0-9]{13}|[1-9][0-9]{13,18})-([1-9][0-9]{0,18})-([0-9a-f]{8})\.segment")


class SlotHeader(NamedTuple):
    """The first bytes of a slot: what it is, and where the log ends with it.

    ``number``, ``marker``: of the segment in which the log ends; 0 if there is none yet. ``segment_crc``: of that
    segment's file, up to ``end``. ``last_id``: the last id in the log. ``length`` and the fields from ``checkpoints``
    on are the lengths of what the slot has after its header; ``encode_slot`` computes them.
    """

    kind: int
    slot: int
    epoch: int
    nonce: bytes
    queue_id: bytes
    written_ms: int
    crc_before: int
    lease_ms: int
    number: int
    marker: int
    segment_crc: int
    offset: int
    length: int
    first_id: int
    last_id: int
    checkpoints: int = 0
    ledger: int = 0
    note: int = 0

    @property
    def end(self) -> int:
        """The offset in the segment at which the log ends with this slot."""
        return self.offset + self.length

    @property
    def slot_bytes(self) -> int:
        """The size of the object."""
        return HEADER_BYTES + self.length + self.checkpoints + self.ledger + self.note + _U32.size


class DroppedReader(NamedTuple):
    """In place of a checkpoint: the reader has been dropped. Its name is empty if it is the default reader."""

    reader: str


SavedState: TypeAlias = fmt.Checkpoint | DroppedReader


class ShippedLedger(NamedTuple):
    """The ledger of the inbox. ``taken``: the number of the last batch that was taken from the store; 0 if none was.
    ``records``: those of the ledger's file, as they are in it.
    """

    taken: int
    records: bytes

    @classmethod
    def of(cls, taken: int, state: LedgerState) -> ShippedLedger:
        return cls(taken, encode_ledger(state, state.intent)[len(_LEDGER_PREFIX) :])

    def file(self) -> bytes:
        """The ledger's file."""
        state = self.state()
        return encode_ledger(state, state.intent)

    def state(self) -> LedgerState:
        state = decode_ledger(_LEDGER_PREFIX + self.records)[0]
        state.taken = max(state.taken, self.taken)
        return state


class SealedSegment(NamedTuple):
    """A closed segment in the store. ``crc``: of the whole file. ``header``, ``footer``: the first and the last 96
    bytes of the file, as they are there. The footer is whole; the header may be damaged in a segment that was damaged
    before it was shipped.
    """

    key: str
    file_bytes: int
    crc: int
    header: bytes
    footer: bytes

    @property
    def number(self) -> int:
        return fmt.footer_number(self.footer)

    @property
    def marker(self) -> int:
        return int(_U32.unpack_from(self.footer, fmt.MARKER_OFFSET)[0])

    def segment_header(self) -> fmt.SegmentHeader | None:
        """What the header says; ``None`` if it is damaged."""
        return fmt.decode_header(self.header)

    def segment_footer(self) -> fmt.SegmentFooter:
        """What the footer says. It is whole in each value that was decoded."""
        frame = fmt.decode_frame(self.footer, 0, self.marker)
        assert frame is not None
        assert frame.footer is not None
        return frame.footer


class Slot(NamedTuple):
    """A slot. ``frames``: bytes of the segment from ``header.offset`` on, as they are there. ``ledger``: ``None`` if it
    is as before. ``crc``: the last 4 bytes, which the next slot names; ``encode_slot`` computes it.
    """

    header: SlotHeader
    frames: bytes = b""
    checkpoints: tuple[SavedState, ...] = ()
    ledger: ShippedLedger | None = None
    note: bytes = b""
    crc: int = 0

    @property
    def owner(self) -> str:
        """Of a FENCE: what the owner is called."""
        return self.note.decode() if self.header.kind == FENCE else ""

    @property
    def sealed(self) -> SealedSegment | None:
        """Of a SEAL: its segment."""
        return _whole_sealed(self.note) if self.header.kind == SEAL else None

    @property
    def handed_over(self) -> bool:
        """Of a CLOSE: whether the owner has handed the queue over."""
        return self.header.kind == CLOSE and self.note == b"\1"

    @property
    def forgets_below(self) -> int:
        """Of DATA: the segments below this number are named no more; 0 if this slot does not say so."""
        return int.from_bytes(self.note, "little") if self.header.kind == DATA else 0


# -- notes -----------------------------------------------------------------------------------------------------------


def owner_note(owner: str) -> bytes:
    """The note of a FENCE. A name that is too long is cut."""
    return owner.encode(errors="replace")[:MAX_OWNER_BYTES].decode(errors="ignore").encode()


def forget_note(number: int) -> bytes:
    """The note of DATA with which the segments below ``number`` are named no more."""
    return _U64.pack(number)


def close_note(*, handed_over: bool) -> bytes:
    return b"\1" if handed_over else b"\0"


def segment_key(number: int, epoch: int, nonce: bytes) -> str:
    """The key of a closed segment, below that of the queue."""
    return f"seg/{number:013d}-{epoch}-{nonce[:4].hex()}.segment"


def parse_segment_key(key: str) -> tuple[int, int, bytes] | None:
    """Number, epoch and the first 4 bytes of the nonce; ``None`` if this is not the key of a closed segment."""
    match = _SEGMENT_KEY.fullmatch(key)
    if match is None or max(int(match[1]), int(match[2])) > LARGEST:
        return None
    return int(match[1]), int(match[2]), bytes.fromhex(match[3])


def encode_sealed(segment: SealedSegment) -> bytes:
    """The note of a SEAL; a manifest has the same bytes.

    | key_bytes 2 | key | file_bytes 8 | crc 4 | header 96 | footer 96 |
    """
    key = segment.key.encode("ascii")
    return b"".join(
        (
            _U16.pack(len(key)),
            key,
            _SEALED.pack(segment.file_bytes, segment.crc),
            segment.header,
            segment.footer,
        )
    )


def decode_sealed(data: bytes, at: int) -> tuple[SealedSegment, int] | None:
    """The segment that ``encode_sealed`` has put at ``at``, and where its bytes end."""
    key_at = at + _U16.size
    if key_at > len(data):
        return None
    key_end = key_at + _U16.unpack_from(data, at)[0]
    header_at = key_end + _SEALED.size
    footer_at = header_at + fmt.HEADER_BYTES
    end = footer_at + fmt.FOOTER_BYTES
    if end > len(data):
        return None
    key = data[key_at:key_end].decode("latin-1")
    parsed = parse_segment_key(key)
    if parsed is None:
        return None
    size, crc = _SEALED.unpack_from(data, key_end)
    segment = SealedSegment(key, size, crc, data[header_at:footer_at], data[footer_at:end])
    return (segment, end) if _is_sealed(segment, parsed[0]) else None


def _is_sealed(segment: SealedSegment, number: int) -> bool:
    frame = fmt.decode_frame(segment.footer, 0, segment.marker)
    if frame is None or frame.footer is None or segment.number != number or segment.marker == 0:
        return False
    footer, header = frame.footer, segment.segment_header()
    if number == 0 or not 0 < footer.first_id <= LARGEST:
        return False
    if not footer.records_end + fmt.FOOTER_BYTES <= segment.file_bytes <= LARGEST:
        return False
    there = (number, segment.marker, footer.first_id)
    return header is None or (header.number, header.marker, header.first_id) == there


def _whole_sealed(note: bytes) -> SealedSegment | None:
    """The segment, if ``note`` is exactly one."""
    found = decode_sealed(note, 0)
    return found[0] if found is not None and found[1] == len(note) else None


# -- checkpoints and the ledger --------------------------------------------------------------------------------------


def encode_states(states: Iterable[SavedState]) -> bytes:
    """Checkpoints, one after another:  | kind 1 | length 4 | body |"""
    parts = []
    for state in states:
        if isinstance(state, DroppedReader):
            kind, body = _IS_DROPPED, state.reader.encode("ascii")
        else:
            kind, body = _IS_STATE, fmt.encode_checkpoint_body(state)
        parts += [_STATE.pack(kind, len(body)), body]
    return b"".join(parts)


def decode_states(data: bytes, queue_id: bytes) -> tuple[SavedState, ...] | None:
    """What ``encode_states`` has made of this queue's checkpoints; ``None`` unless that is all of ``data``."""
    states: list[SavedState] = []
    at = 0
    while at < len(data):
        body_at = at + _STATE.size
        if body_at > len(data):
            return None
        kind, length = _STATE.unpack_from(data, at)
        at = body_at + length
        if at > len(data):
            return None
        state = _decode_state(kind, data[body_at:at], queue_id)
        if state is None:
            return None
        states.append(state)
    return tuple(states)


def _decode_state(kind: int, body: bytes, queue_id: bytes) -> SavedState | None:
    state: SavedState | None
    if kind == _IS_STATE:
        state = fmt.decode_checkpoint_body(body)
        if state is None or state.flags & ~fmt.FLAG_INHERITED or state.queue_id not in (queue_id, _NO_QUEUE_ID):
            return None
    elif kind == _IS_DROPPED and len(body) <= _LONGEST_NAME and body.isascii():
        state = DroppedReader(body.decode("ascii"))
    else:
        return None
    if state.reader:
        try:
            check_name(state.reader)  # a restore makes a file of that name
        except InvalidName:
            return None
    return state


def encode_shipped_ledger(ledger: ShippedLedger | None) -> bytes:
    """Nothing, or  | taken 8 | records |"""
    return b"" if ledger is None else _U64.pack(ledger.taken) + ledger.records


def is_ledger(data: bytes) -> bool:
    """Whether ``data`` is what ``encode_shipped_ledger`` makes."""
    if not data:
        return True
    if len(data) < _U64.size or _U64.unpack_from(data)[0] > LARGEST:
        return False
    file = _LEDGER_PREFIX + data[_U64.size :]
    return decode_ledger(file)[1] == len(file)


def decode_shipped_ledger(data: bytes) -> ShippedLedger | None:
    """Of bytes that ``is_ledger`` says yes to."""
    return ShippedLedger(_U64.unpack_from(data)[0], data[_U64.size :]) if data else None


# -- a slot ----------------------------------------------------------------------------------------------------------


def slot_key(slot: int) -> str:
    """The key of a slot, below that of the queue."""
    return f"log/{slot:016d}"


def has_moves(states: Iterable[SavedState]) -> bool:
    """Whether one of these checkpoints has a move."""
    return any(isinstance(state, fmt.Checkpoint) and state.move is not None for state in states)


def encode_header(header: SlotHeader, version: int = SLOT_VERSION) -> bytes:
    """The header alone, with the lengths that it says."""
    kind, *rest = header
    body = _HEADER.pack(SLOT_MAGIC, version, kind, HEADER_BYTES, *rest, _UNUSED)
    return body + _U32.pack(crc32(body))


def encode_slot(slot: Slot) -> bytes:
    """The object. Raises ``ValueError`` if it is larger than ``MAX_SLOT_BYTES``: nobody would read it."""
    parts = (slot.frames, encode_states(slot.checkpoints), encode_shipped_ledger(slot.ledger), slot.note)
    length, checkpoints, ledger, note = map(len, parts)
    header = slot.header._replace(length=length, checkpoints=checkpoints, ledger=ledger, note=note)
    if header.slot_bytes > MAX_SLOT_BYTES:
        raise ValueError(f"slot {header.slot} would have {header.slot_bytes} bytes, more than {MAX_SLOT_BYTES}")
    head = encode_header(header, MOVES_VERSION if has_moves(slot.checkpoints) else SLOT_VERSION)
    crc = slot_crc(head)
    for part in parts:
        crc = crc32(part, crc)
    return b"".join((head, *parts, _U32.pack(crc)))


def slot_crc(data: bytes) -> int:
    """The crc that ends a whole slot. It continues that of the header, and so passes over its 4 bytes: a checksum over
    something and the checksum of that is the same for everything, and would not tell slots apart that have nothing
    after their headers.
    """
    return int(_U32.unpack_from(data, len(data) - _U32.size)[0])


def slot_version(data: bytes) -> int | None:
    """The format version of a slot of any version; ``None`` unless ``data`` begins with a whole header of one. A header
    of any version has its magic, its version and its size where this one has them, and its crc at its end.
    """
    if len(data) < HEADER_BYTES or data[:8] != SLOT_MAGIC:
        return None
    version, _, head = _BEGIN.unpack_from(data, len(SLOT_MAGIC))
    crc_at = head - _U32.size
    if not _BEGIN.size <= crc_at <= len(data) - _U32.size:
        return None
    return int(version) if crc32(memoryview(data)[:crc_at]) == _U32.unpack_from(data, crc_at)[0] else None


def slot_kind(data: bytes) -> int | None:
    """The kind of a slot of a known version, known or not; ``None`` unless ``data`` begins with a whole header."""
    if slot_version(data) not in (SLOT_VERSION, MOVES_VERSION):
        return None
    _, kind, head = _BEGIN.unpack_from(data, len(SLOT_MAGIC))
    return int(kind) if head == HEADER_BYTES else None


def decode_header(data: bytes) -> SlotHeader | None:
    """The header, from the first bytes of a slot. ``None`` too if its kind is not known."""
    if slot_kind(data) not in KINDS:
        return None
    _, _, kind, _, *rest, unused = _HEADER.unpack_from(data)
    header = SlotHeader(kind, *rest)
    return header if unused == _UNUSED and _is_header(header) else None


def _is_header(header: SlotHeader) -> bool:
    if not 0 < header.slot <= MOST_SLOTS or not 0 < header.epoch <= LARGEST or header.slot_bytes > MAX_SLOT_BYTES:
        return False
    if max(header.number, header.end, header.first_id, header.last_id) > LARGEST:
        return False
    if header.number == 0 and (header.marker, header.segment_crc, header.end) != (0, 0, 0):
        return False
    if header.number and (header.marker == 0 or header.end < fmt.HEADER_BYTES):
        return False
    if header.length == 0 and header.kind in (DATA, CLOSE):
        return header.first_id == header.last_id + 1
    if header.kind == FENCE:
        return header.length == 0 and header.first_id > header.last_id
    if header.kind == DATA and header.offset:
        return header.offset >= fmt.HEADER_BYTES and 0 < header.first_id <= header.last_id
    if header.kind == DATA:  # the header of its segment, and perhaps no frame
        return 0 < header.first_id <= header.last_id + 1
    return header.length == 0 < header.number and 0 < header.first_id <= header.last_id + 1  # a SEAL


def decode_slot(data: bytes) -> Slot | None:
    """The slot, if ``data`` is exactly one: a whole object."""
    header = decode_header(data)
    if header is None or header.slot_bytes != len(data):
        return None
    rest = memoryview(data)[HEADER_BYTES : -_U32.size]
    if crc32(rest, slot_crc(data[:HEADER_BYTES])) != slot_crc(data):
        return None
    checkpoints_at = HEADER_BYTES + header.length
    ledger_at = checkpoints_at + header.checkpoints
    note_at = ledger_at + header.ledger
    states = decode_states(data[checkpoints_at:ledger_at], header.queue_id)
    ledger, note = data[ledger_at:note_at], data[note_at : -_U32.size]
    if states is None or not is_ledger(ledger) or not _is_note(header, note):
        return None
    if slot_version(data) != (MOVES_VERSION if has_moves(states) else SLOT_VERSION):
        return None
    frames = data[HEADER_BYTES:checkpoints_at]
    return Slot(header, frames, states, decode_shipped_ledger(ledger), note, slot_crc(data))


def _is_note(header: SlotHeader, note: bytes) -> bool:
    """Whether a slot of this kind may have that note."""
    if header.kind == FENCE:
        return len(note) <= MAX_OWNER_BYTES and _is_text(note)
    if header.kind == DATA:
        return not note or (len(note) == _U64.size and 0 < _U64.unpack(note)[0] <= LARGEST)
    if header.kind == CLOSE:
        return note in (b"\0", b"\1")
    segment = _whole_sealed(note)
    if segment is None:
        return False
    footer, its = segment.segment_footer(), segment.segment_header()
    said = (header.number, header.marker, header.offset, header.first_id, header.last_id)
    if said != (segment.number, segment.marker, footer.records_end, footer.first_id, footer.last_id):
        return False
    return its is None or its.queue_id == header.queue_id


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
