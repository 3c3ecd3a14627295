"""What the slots of a log add up to, and the manifest that says so in bytes.

docs/format.md is the specification. Rules, beside those of ``kestrelpy.ship.slots``:

1. A manifest is a function of the slots up to it. ``LogState`` is that function: slots are applied to it one after
   another. A state that begins at a manifest and one that begins at slot 1 make the same bytes.
2. So nothing in a manifest comes from anywhere else. Which segments it names is decided by the owner, who knows the
   readers outside, the store's dates and his options; but he decides it in a slot (``Slot.forgets_below``). From the
   readers' heads alone it could not be decided: a segment that all of them have passed may be kept for Spark, and is
   found there only if the newest manifest names it. The readers' heads are a limit: what one of them needs stays.
3. ``objection`` is all of rule S6 that needs no store, and what else can be seen in the slots alone: bytes that do not
   continue those before, checkpoints of what is not in the log (S11), segments out of order (S9). What has an objection
   is not applied, and changes nothing. An owner asks it of his own slots, too.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar
from zlib import crc32

from kestrelpy._journal import format as fmt
from kestrelpy._journal.format import LARGEST
from kestrelpy.ship import slots as codec
from kestrelpy.ship.slots import (
    CLOSE,
    FENCE,
    MAX_SLOT_BYTES,
    SEAL,
    DroppedReader,
    SealedSegment,
    ShippedLedger,
    Slot,
    SlotHeader,
)

T = TypeVar("T", int, str)

MANIFEST_MAGIC = b"KSTRLMAN"
MANIFEST_VERSION, MOVES_VERSION = 2, 3
MAX_MANIFEST_BYTES = MAX_SLOT_BYTES
"""It names 250,000 segments then, of 4 TB with the segments' usual size."""

#   | KSTRLMAN | version 2 or 3 | 0 6 | crc 4 | length 4 | body |
#   body: | header of the slot 160 | crc of the slot 4 | fences 4 | segments 4 | tail 4 | checkpoints 4 | ledger 4 |
#         | fences x slot 8 | segments | tail x (slot 8, offset 8, first_id 8) | checkpoints | ledger |
_PREFIX = struct.Struct("<8sH6s")
_RECORD = struct.Struct("<II")
_COUNTS = struct.Struct("<IIIIII")
_FENCE = struct.Struct("<Q")
_TAIL = struct.Struct("<QQQ")
_UNUSED = bytes(6)
_BODY_AT = _PREFIX.size + _RECORD.size
_FIRST_AT = codec.HEADER_BYTES + _COUNTS.size


class TailSlot(NamedTuple):
    """A slot with bytes of the active segment: from ``offset`` on, which begin with item ``first_id``."""

    slot: int
    offset: int
    first_id: int


class Manifest(NamedTuple):
    """The log up to a slot. ``header``, ``crc``: of that slot. ``fences``: the numbers of all FENCEs. ``segments``: the
    closed ones that are named, the last one always. ``tail``: the slots that make the active segment; none if there is
    no active one. ``checkpoints``: in the order of the readers' names.
    """

    header: SlotHeader
    crc: int
    fences: tuple[int, ...]
    segments: tuple[SealedSegment, ...] = ()
    tail: tuple[TailSlot, ...] = ()
    checkpoints: tuple[fmt.Checkpoint, ...] = ()
    ledger: ShippedLedger | None = None


class Place(NamedTuple):
    """Where a log ends: the segment, its crc up to there, the offset in it, and the last id. 0 before there is any."""

    number: int = 0
    marker: int = 0
    segment_crc: int = 0
    offset: int = 0
    last_id: int = 0


class LogState:
    """What the slots that were applied add up to. ``header`` is ``None`` before the first one. ``begun_at``: the slot
    of the manifest that it began at, or 0.

    NOTE ON LOCKING: none of its own; its owner does one thing at a time.
    """

    __slots__ = ("begun_at", "checkpoints", "crc", "fences", "header", "ledger", "segments", "tail")

    def __init__(self, manifest: Manifest | None = None) -> None:
        """Begin at a manifest, or before slot 1."""
        self.begun_at = manifest.header.slot if manifest is not None else 0
        self.header: SlotHeader | None = None
        self.crc = 0
        self.fences: list[int] = []
        self.segments: list[SealedSegment] = []
        self.tail: list[TailSlot] = []
        self.checkpoints: dict[str, fmt.Checkpoint] = {}
        self.ledger: ShippedLedger | None = None
        if manifest is not None:
            self.header, self.crc, self.ledger = manifest.header, manifest.crc, manifest.ledger
            self.fences, self.segments, self.tail = [*manifest.fences], [*manifest.segments], [*manifest.tail]
            self.checkpoints = {state.reader: state for state in manifest.checkpoints}

    @property
    def slot(self) -> int:
        """The number of the last slot; 0 before the first one."""
        return self.header.slot if self.header is not None else 0

    @property
    def last_id(self) -> int:
        return self.header.last_id if self.header is not None else 0

    @property
    def place(self) -> Place:
        """Where the log ends."""
        at = self.header
        return Place(at.number, at.marker, at.segment_crc, at.end, at.last_id) if at is not None else Place()

    def manifest(self) -> Manifest:
        """The manifest of the last slot."""
        assert self.header is not None
        return Manifest(
            self.header,
            self.crc,
            tuple(self.fences),
            tuple(self.segments),
            tuple(self.tail),
            tuple(self.checkpoints[name] for name in sorted(self.checkpoints)),
            self.ledger,
        )

    def apply(self, slot: Slot) -> str | None:
        """Apply the next slot. Returns the objection to it; then nothing is changed."""
        objection = self.objection(slot)
        if objection is None:
            self.add(slot)
        return objection

    def add(self, slot: Slot) -> None:
        """Apply the next slot, to which there is no objection."""
        header = self.header = slot.header
        self.crc = slot.crc
        if header.kind == FENCE:
            self.fences.append(header.slot)
        sealed = slot.sealed
        if sealed is not None:
            self.segments.append(sealed)
            self.tail.clear()
        if header.length:
            self.tail.append(TailSlot(header.slot, header.offset, header.first_id))
        self._save(slot, self.checkpoints)
        if slot.ledger is not None:
            self.ledger = slot.ledger
        if slot.forgets_below:
            self.segments = self._named(slot.forgets_below)

    @staticmethod
    def _save(slot: Slot, checkpoints: dict[str, fmt.Checkpoint]) -> None:
        for state in slot.checkpoints:
            if isinstance(state, DroppedReader):
                checkpoints.pop(state.reader, None)
            else:
                checkpoints[state.reader] = state

    def _named(self, number: int) -> list[SealedSegment]:
        """The segments that are named once those below ``number`` are forgotten."""
        return [each for each in self.segments[:-1] if each.number >= number] + self.segments[-1:]

    # -- may this slot be the next one? ------------------------------------------------------------------------------

    def objection(self, slot: Slot) -> str | None:
        """Why ``slot`` cannot be the next one; ``None`` if it can."""
        return self._order_objection(slot.header) or self._place_objection(slot) or self._content_objection(slot)

    def _order_objection(self, new: SlotHeader) -> str | None:
        """Whether it is the next slot of this queue, by the owner who has the log."""
        at = self.header
        if new.slot != self.slot + 1:
            return f"slot {new.slot} is not the one after slot {self.slot}"
        if new.crc_before != self.crc:
            return "it names another slot before it, by its crc"
        if at is not None and new.queue_id != at.queue_id:
            return "it is another queue's"
        if new.kind == FENCE:
            before = at.epoch if at is not None else 0
            return None if new.epoch == before + 1 else f"its epoch is {new.epoch}, after epoch {before}"
        if at is None:
            return "the first slot is no FENCE"
        if new.epoch != at.epoch:
            return f"its epoch is {new.epoch}, in epoch {at.epoch}"
        if (new.nonce, new.lease_ms) != (at.nonce, at.lease_ms):
            return "its nonce or lease is not that of its epoch"
        if new.written_ms < at.written_ms:
            return "it was written before the slot before it"
        return "the owner had left" if at.kind == CLOSE else None

    def _place_objection(self, slot: Slot) -> str | None:
        """Whether the log goes on where it ended."""
        new, sealed = slot.header, slot.sealed
        if sealed is not None:
            return self._seal_objection(new, sealed)
        if new.length:
            return self._data_objection(slot)
        stays = Place(new.number, new.marker, new.segment_crc, new.offset, new.last_id) == self.place
        return None if stays else "it has no bytes, and is not where the log ends"

    def _data_objection(self, slot: Slot) -> str | None:
        new, at = slot.header, self.header
        assert at is not None
        crc = 0
        if self.tail:
            if (new.number, new.marker, new.offset) != (at.number, at.marker, at.end):
                return "its bytes do not continue those of the slot before"
            if new.first_id != at.last_id + 1:
                return f"it begins with item {new.first_id}, and item {at.last_id + 1} is due"
            crc = at.segment_crc
        else:
            header = fmt.decode_header(slot.frames[: fmt.HEADER_BYTES]) if new.offset == 0 else None
            if header is None:
                return "it is of a segment whose beginning is not in the log"
            if (header.number, header.marker, header.first_id) != (new.number, new.marker, new.first_id):
                return "the segment's header says something else"
            objection = self._link_objection(header, new)
            if objection is not None:
                return objection
        return None if crc32(slot.frames, crc) == new.segment_crc else "segment_crc is not that of the bytes in the log"

    def _seal_objection(self, new: SlotHeader, sealed: SealedSegment) -> str | None:
        at, header = self.header, sealed.segment_header()
        assert at is not None
        if self.tail:
            if (new.number, new.marker, new.first_id) != (at.number, at.marker, self.tail[0].first_id):
                return "it closes another segment than the one in the log"
            if new.offset < at.end or new.last_id < at.last_id:
                return "the segment is closed before the end that it has in the log"
            is_same = (new.last_id, new.segment_crc) == (at.last_id, at.segment_crc)
            return None if new.offset > at.end or is_same else "the segment is not the one in the log"
        if header is not None:
            return self._link_objection(header, new)
        is_next = new.number > at.number and new.first_id > at.last_id
        return None if is_next else "its segment is not a later one"

    def _link_objection(self, header: fmt.SegmentHeader, new: SlotHeader) -> str | None:
        """Whether a new segment follows the last one in the log. The first one in the log may follow any."""
        if header.queue_id != new.queue_id:
            return "the segment is another queue's"
        if not self.segments:
            return None
        before = self.segments[-1]
        footer = before.segment_footer()
        link = (header.previous_number, header.previous_last_id, header.previous_end)
        if header.number <= before.number or link != (before.number, footer.last_id, footer.records_end):
            return "its segment does not follow the last one in the log"
        return None

    def _content_objection(self, slot: Slot) -> str | None:
        last_id = slot.header.last_id
        for state in slot.checkpoints:
            if not isinstance(state, DroppedReader) and max(state.highest_id, state.watermark) > last_id:
                return f"the checkpoint of reader {state.reader!r} is ahead of the log"
        if slot.ledger is not None and self.ledger is not None and slot.ledger.taken < self.ledger.taken:
            return "fewer batches are taken in than before"
        if slot.forgets_below:
            checkpoints = self.checkpoints.copy()
            self._save(slot, checkpoints)
            head = min((state.head for state in checkpoints.values()), default=LARGEST)
            forgotten = [each for each in self.segments[:-1] if each.number < slot.forgets_below]
            if forgotten and forgotten[-1].segment_footer().last_id > head:
                return f"it forgets a segment that a reader needs from item {head + 1} on"
        return None

    def _check(self) -> None:
        """Assert the invariants: those that a manifest is checked for."""
        assert (self.header is None) == (not self.fences)
        assert self.header is not None or not (self.segments or self.tail or self.checkpoints or self.ledger)
        assert self.header is None or _is_consistent(self.manifest())


# -- a manifest ------------------------------------------------------------------------------------------------------


def manifest_key(slot: int) -> str:
    """The key of a manifest, below that of the queue."""
    return f"manifest/{slot:016d}"


def encode_manifest(manifest: Manifest) -> bytes:
    """The object. Raises ``ValueError`` if it is larger than ``MAX_MANIFEST_BYTES``: nobody would read it."""
    checkpoints, ledger = codec.encode_states(manifest.checkpoints), codec.encode_shipped_ledger(manifest.ledger)
    counts = (len(manifest.fences), len(manifest.segments), len(manifest.tail), len(checkpoints), len(ledger))
    body = b"".join(
        (
            codec.encode_header(manifest.header),
            _COUNTS.pack(manifest.crc, *counts),
            *map(_FENCE.pack, manifest.fences),
            *map(codec.encode_sealed, manifest.segments),
            *(_TAIL.pack(*each) for each in manifest.tail),
            checkpoints,
            ledger,
        )
    )
    if _BODY_AT + len(body) > MAX_MANIFEST_BYTES:
        raise ValueError(f"the manifest would have {_BODY_AT + len(body)} bytes, more than {MAX_MANIFEST_BYTES}")
    version = MOVES_VERSION if codec.has_moves(manifest.checkpoints) else MANIFEST_VERSION
    prefix = _PREFIX.pack(MANIFEST_MAGIC, version, _UNUSED)
    return prefix + _RECORD.pack(crc32(body, len(body)), len(body)) + body


def manifest_version(data: bytes) -> int | None:
    """The format version of a manifest of any version; ``None`` unless ``data`` is a whole one, by its magic and crc.
    The crc does not cover the version.
    """
    if len(data) < _BODY_AT or data[:8] != MANIFEST_MAGIC or _whole_body(data) is None:
        return None
    return int(_PREFIX.unpack_from(data)[1])


def _whole_body(data: bytes) -> memoryview | None:
    crc, length = _RECORD.unpack_from(data, _PREFIX.size)
    body = memoryview(data)[_BODY_AT:]
    return body if len(body) == length and crc32(body, length) == crc else None


def decode_manifest(data: bytes) -> Manifest | None:
    """The manifest, if ``data`` is exactly one: a whole object."""
    if not _BODY_AT + _FIRST_AT <= len(data) <= MAX_MANIFEST_BYTES:
        return None
    magic, version, unused = _PREFIX.unpack_from(data)
    if (magic, unused) != (MANIFEST_MAGIC, _UNUSED) or _whole_body(data) is None:
        return None
    header = codec.decode_header(data[_BODY_AT : _BODY_AT + codec.HEADER_BYTES])
    if header is None:
        return None
    counts_at = _BODY_AT + codec.HEADER_BYTES
    crc, fences, segments, tail, checkpoints, ledger = _COUNTS.unpack_from(data, counts_at)
    fences_at = counts_at + _COUNTS.size
    segments_at = fences_at + fences * _FENCE.size
    ledger_at = len(data) - ledger
    checkpoints_at = ledger_at - checkpoints
    tail_at = checkpoints_at - tail * _TAIL.size
    if not segments_at <= tail_at:
        return None
    named = _decode_segments(data[segments_at:tail_at], segments)
    states = codec.decode_states(data[checkpoints_at:ledger_at], header.queue_id)
    if named is None or states is None or not codec.is_ledger(data[ledger_at:]):
        return None
    if version != (MOVES_VERSION if codec.has_moves(states) else MANIFEST_VERSION):
        return None
    saved = tuple(state for state in states if not isinstance(state, DroppedReader))
    manifest = Manifest(
        header,
        crc,
        tuple(slot for (slot,) in _FENCE.iter_unpack(data[fences_at:segments_at])),
        named,
        tuple(TailSlot(*each) for each in _TAIL.iter_unpack(data[tail_at:checkpoints_at])),
        saved,
        codec.decode_shipped_ledger(data[ledger_at:]),
    )
    return manifest if len(saved) == len(states) and _is_consistent(manifest) else None


def _decode_segments(data: bytes, count: int) -> tuple[SealedSegment, ...] | None:
    segments: list[SealedSegment] = []
    at = 0
    while at < len(data) and len(segments) < count:
        found = codec.decode_sealed(data, at)
        if found is None:
            return None
        segments.append(found[0])
        at = found[1]
    return tuple(segments) if (at, len(segments)) == (len(data), count) else None


def _is_consistent(manifest: Manifest) -> bool:
    """Whether slots can add up to this."""
    header, fences = manifest.header, manifest.fences
    if len(fences) != header.epoch or fences[0] != 1 or not _rise(fences) or fences[-1] > header.slot:
        return False
    if (fences[-1] == header.slot) != (header.kind == FENCE):
        return False
    names = [state.reader for state in manifest.checkpoints]
    if not _rise(names) or any(max(each.highest_id, each.watermark) > header.last_id for each in manifest.checkpoints):
        return False
    return _do_segments_rise(manifest) and (_is_tail(manifest) if manifest.tail else _ends_with_a_seal(manifest))


def _do_segments_rise(manifest: Manifest) -> bool:
    number = last_id = 0
    for each in manifest.segments:
        footer, header = each.segment_footer(), each.segment_header()
        if each.number <= number or footer.first_id <= last_id:
            return False
        if header is not None and header.queue_id != manifest.header.queue_id:
            return False
        number, last_id = each.number, footer.last_id
    return True


def _is_tail(manifest: Manifest) -> bool:
    """Whether the active segment is one, and is where the log ends."""
    header, tail = manifest.header, manifest.tail
    before = manifest.segments[-1] if manifest.segments else None
    if header.kind == SEAL or (before is not None and header.number <= before.number):
        return False
    if tail[0].offset != 0 or tail[0].first_id <= (before.segment_footer().last_id if before is not None else 0):
        return False
    if not _rise([each.slot for each in tail]) or not _rise([each.offset for each in tail]):
        return False
    if any(one.first_id > other.first_id for one, other in pairwise(tail)) or tail[-1].first_id > header.last_id + 1:
        return False
    last = TailSlot(header.slot, header.offset, header.first_id)
    if header.length:
        return tail[-1] == last
    return tail[-1].slot < header.slot and tail[-1].offset < header.end


def _ends_with_a_seal(manifest: Manifest) -> bool:
    """Whether the log ends where its last closed segment does, or before the first one begins."""
    header = manifest.header
    place = (header.number, header.marker, header.end, header.last_id)
    if header.length:
        return False
    if not manifest.segments:
        return place == (0, 0, 0, 0)
    last = manifest.segments[-1]
    footer = last.segment_footer()
    return place == (last.number, last.marker, footer.records_end, footer.last_id)


def _rise(values: Sequence[T]) -> bool:
    return all(one < other for one, other in pairwise(values))
