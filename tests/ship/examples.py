"""A small log with one slot of each kind, whose bytes are written out in the tests."""

from __future__ import annotations

from zlib import crc32

from kestrelpy._journal import format as fmt
from kestrelpy.inbox.format import Intent, LedgerState
from kestrelpy.ship import slots as codec
from kestrelpy.ship.slots import (
    CLOSE,
    DATA,
    FENCE,
    SEAL,
    DroppedReader,
    SealedSegment,
    ShippedLedger,
    Slot,
    SlotHeader,
)

QUEUE_ID = bytes(range(16))
NONCE = bytes(range(16, 32))
NUMBER = 1_700_000_000_000
MARKER = 0x91223344

FIRST = fmt.encode_header(fmt.SegmentHeader(MARKER, QUEUE_ID, NUMBER, 1, 0, 0, 0, 0, 0)) + fmt.encode_item(
    1, b"hello", 255, None, 0, MARKER
)
SECOND = fmt.encode_item(2, b"", 256, None, 1, MARKER)
FOOTER = fmt.encode_footer(fmt.SegmentFooter(1, 2, 2, 5, 255, 256, len(FIRST + SECOND)), NUMBER, MARKER)
FILE = FIRST + SECOND + FOOTER
SEALED = SealedSegment(codec.segment_key(NUMBER, 1, NONCE), len(FILE), crc32(FILE), FILE[:96], FOOTER)
CHECKPOINT = fmt.Checkpoint(QUEUE_ID, "audit", 0, 1, 0, 0, NUMBER, 96, 1, 0, ((2, 2),), ((1, 3),))
LEDGER = LedgerState()
LEDGER.note_done(b"b" * 16, 6, "app", 8)
LEDGER.intent = Intent(b"c" * 16, QUEUE_ID, 7, 3, 2, 5, 9, "app")


def header(kind: int, slot: int, ids: tuple[int, int], *, crc_before: int, place: tuple[int, int] | None) -> SlotHeader:
    """The header of a slot of this log. ``place``: offset and length, and ``None`` while there is no segment."""
    offset, length = place or (0, 0)
    number, marker = (NUMBER, MARKER) if place else (0, 0)
    crc = crc32(FILE[: offset + length])
    return SlotHeader(
        kind, slot, 1, NONCE, QUEUE_ID, 254 + slot, crc_before, 15_000, number, marker, crc, offset, length, *ids
    )  # fmt: skip


def example_log() -> list[bytes]:
    """FENCE; DATA with a header and a frame; DATA with a frame, a checkpoint and the ledger; SEAL; DATA without bytes,
    with a drop and a note; CLOSE.
    """
    log: list[bytes] = []

    def add(kind: int, ids: tuple[int, int], place: tuple[int, int] | None, slot: Slot) -> None:
        crc = codec.slot_crc(log[-1]) if log else 0
        about = header(kind, len(log) + 1, ids, crc_before=crc, place=place)
        log.append(codec.encode_slot(slot._replace(header=about)))

    none = header(FENCE, 1, (1, 0), crc_before=0, place=None)
    size = len(FIRST + SECOND)
    ledger = ShippedLedger.of(7, LEDGER)
    add(FENCE, (1, 0), None, Slot(none, note=codec.owner_note("h:1")))
    add(DATA, (1, 1), (0, len(FIRST)), Slot(none, FIRST))
    add(DATA, (2, 2), (len(FIRST), len(SECOND)), Slot(none, SECOND, (CHECKPOINT,), ledger))
    add(SEAL, (1, 2), (size, 0), Slot(none, note=codec.encode_sealed(SEALED)))
    add(DATA, (3, 2), (size, 0), Slot(none, b"", (DroppedReader("audit"),), note=codec.forget_note(NUMBER)))
    add(CLOSE, (3, 2), (size, 0), Slot(none, note=codec.close_note(handed_over=True)))
    return log
