"""Logs as an owner writes them, made by a random generator: slot after slot, with the segments that they are from.

What the codec refuses is made here too: ``resealed`` gives changed bytes the checksums that they need.
"""

from __future__ import annotations

from random import Random
from typing import Any
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
    SavedState,
    SealedSegment,
    ShippedLedger,
    Slot,
    SlotHeader,
)

QUEUE_ID = bytes(range(16))
READERS = ("", "audit", "spark-1", "z" * 100)


class Author:
    """Writes a log. ``log``: the slots so far, as bytes."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.log: list[bytes] = []
        self.epoch = self.crc = self.lease_ms = 0
        self.written_ms = 1_700_000_000_000
        self.nonce = bytes(16)
        self.queue_id = QUEUE_ID
        self.number = self.marker = self.last_id = self.end = self.segment_crc = 0
        self.first_id = 0  # of the active segment; 0: there is none
        self.file = b""  # of the active segment, up to its end
        self.sealed: list[SealedSegment] = []
        self.heads: dict[str, int] = {}
        self.taken = 0
        self.damaged = 0.1  # the share of closed segments whose header is
        self.least = 0  # the items of a segment
        self.closed = False

    def slot(self, kind: int, frames: bytes = b"", *, first_id: int | None = None, **more: Any) -> Slot:
        """The next slot, with the place where the log is to end with it."""
        self.written_ms += self.random.choice((0, 1, 1000))
        first_id = self.last_id + 1 if first_id is None else first_id
        offset = self.end - len(frames)
        header = SlotHeader(
            kind, len(self.log) + 1, self.epoch, self.nonce, self.queue_id, self.written_ms, self.crc, self.lease_ms,
            self.number, self.marker, self.segment_crc, offset, len(frames), first_id, self.last_id,
        )  # fmt: skip
        return Slot(header, frames, **more)

    def add(self, slot: Slot) -> None:
        data = codec.encode_slot(slot)
        self.crc = codec.slot_crc(data)
        self.log.append(data)

    # -- what an owner does ------------------------------------------------------------------------------------------

    def fence(self) -> None:
        self.epoch += 1
        self.nonce = self.random.randbytes(16)
        self.lease_ms = self.random.choice((0, 15_000))
        self.written_ms += self.random.choice((-5000, 5000))
        self.closed = False
        first_id = self.last_id + self.random.choice((1, 1 << 30))
        owner = "".join(self.random.choices("ab:é漢", k=self.random.choice((0, 5, 300))))
        self.add(self.slot(FENCE, first_id=first_id, note=codec.owner_note(owner), **self.extras()))

    def begin(self) -> bytes:
        """Begin a segment. Returns its header."""
        before = self.sealed[-1].segment_footer() if self.sealed else None
        gap = self.random.choice((0, 0, 1 << 30, 7))
        previous = (self.number, before.last_id, before.records_end) if before is not None else (0, 0, 0)
        self.number += self.random.choice((1, 1_700_000_000_000))
        self.marker = self.random.getrandbits(32) | 1 << 31
        self.first_id, self.last_id = self.last_id + 1 + gap, self.last_id + gap
        header = fmt.SegmentHeader(self.marker, QUEUE_ID, self.number, self.first_id, 3, 30, *previous)
        self.file, self.end, self.segment_crc = b"", 0, 0
        return fmt.encode_header(header)

    def grow(self, data: bytes) -> bytes:
        self.file += data
        self.end, self.segment_crc = len(self.file), crc32(self.file)
        return data

    def frames(self, count: int) -> bytes:
        made = []
        for _ in range(count):
            items = [self.random.randbytes(self.random.randrange(20)) for _ in range(self.random.choice((1, 1, 3)))]
            sizes = list(map(len, items))
            frame = fmt.encode_batch(self.last_id + 1, items, sizes, 255, None, self.last_id, self.marker)
            if len(items) == 1:
                frame = fmt.encode_item(self.last_id + 1, items[0], 255, None, self.last_id, self.marker)
            self.last_id += len(items)
            made.append(frame)
        return b"".join(made)

    def data(self) -> None:
        """The next bytes of the active segment, or the first ones of a new one."""
        header = b"" if self.first_id else self.begin()
        first_id = self.last_id + 1
        frames = self.grow(header + self.frames(self.random.randrange(self.least if header else 1, 4)))
        self.add(self.slot(DATA, frames, first_id=first_id, **self.extras()))

    def seal(self) -> None:
        """Close the active segment, with bytes that are in no slot; or a whole new one."""
        if not self.first_id:
            self.grow(self.begin() + self.frames(self.least))
        self.grow(self.frames(self.random.choice((0, 0, 2))))
        items = self.last_id + 1 - self.first_id
        about = fmt.SegmentFooter(self.first_id, self.last_id, items, 10 * bool(items), 255, 255, self.end)
        footer = fmt.encode_footer(about, self.number, self.marker)
        file = self.file + bytes(self.random.choice((0, 40))) + footer
        header = file[:96]
        if self.random.random() < self.damaged:
            header = b"\0" * 96  # damaged before it was shipped
        key = codec.segment_key(self.number, self.epoch, self.nonce)
        segment = SealedSegment(key, len(file), crc32(file), header, footer)
        self.add(self.slot(SEAL, first_id=self.first_id, note=codec.encode_sealed(segment), **self.extras()))
        self.sealed.append(segment)
        self.first_id = 0

    def beat(self) -> None:
        """DATA without bytes; now and then it forgets what all readers have passed."""
        extras, note = self.extras(), b""
        head = min(self.heads.values(), default=self.last_id)
        passed = [each.number for each in self.sealed if each.segment_footer().last_id <= head]
        if passed and self.random.random() < 0.5:
            note = codec.forget_note(passed[-1] + self.random.choice((0, 1)))
        self.add(self.slot(DATA, note=note, **extras))

    def close(self) -> None:
        handed_over = self.random.random() < 0.5
        self.add(self.slot(CLOSE, note=codec.close_note(handed_over=handed_over), **self.extras()))
        self.closed = True

    def extras(self) -> dict[str, Any]:
        """Checkpoints and the ledger, now and then."""
        states: list[SavedState] = []
        while self.random.random() < 0.3:
            states.append(self.state())
        if self.random.random() > 0.15:
            return {"checkpoints": tuple(states)}
        self.taken += self.random.choice((0, 1))
        return {"checkpoints": tuple(states), "ledger": ShippedLedger.of(self.taken, self.ledger())}

    def state(self) -> SavedState:
        name = self.random.choice(READERS)
        if self.random.random() < 0.2:
            self.heads.pop(name, None)
            return DroppedReader(name)
        head = self.random.randint(min(self.heads.get(name, 0), self.last_id), self.last_id)
        spans = ((head + 2, head + 3), (head + 5, self.last_id)) if head + 5 <= self.last_id else ()
        self.heads[name] = head
        errors = ((head + 1, 3),) * self.random.randrange(2)
        queue_id = self.random.choice((QUEUE_ID, bytes(16)))
        watermark = self.random.randint(0, self.last_id)
        return fmt.Checkpoint(queue_id, name, head, watermark, 5, 50, self.number, 96, 1, 2 * bool(name), spans, errors)

    def ledger(self) -> LedgerState:
        state = LedgerState()
        for number in range(self.random.randrange(3)):
            state.note_done(self.random.randbytes(16), number, self.random.choice(("", "nächtlich")), number)
        if self.random.random() < 0.5:
            state.intent = Intent(self.random.randbytes(16), QUEUE_ID, 7, self.last_id + 1, 0, 3, 5, "app")
        return state


def random_log(seed: int, slots: int = 25) -> Author:
    """A log of so many slots."""
    author = Author(seed)
    author.fence()
    while len(author.log) < slots:
        what = author.random.choices(
            (author.data, author.beat, author.seal, author.fence, author.close), (8, 3, 4, 1, 1)
        )[0]
        if author.closed:
            author.fence()
        else:
            what()
    return author


def slots_of(log: list[bytes]) -> list[Slot]:
    found = [codec.decode_slot(data) for data in log]
    assert None not in found
    return [slot for slot in found if slot is not None]


# -- checksums for changed bytes -------------------------------------------------------------------------------------


def resealed_slot(data: bytes) -> bytes:
    """The bytes of a slot with both of its checksums made right."""
    head = data[:156]
    rest = data[160:-4]
    return head + crc32(head).to_bytes(4, "little") + rest + crc32(head + rest).to_bytes(4, "little")


def resealed_manifest(data: bytes) -> bytes:
    """The bytes of a manifest with its length and its checksums made right, that of the slot's header too."""
    head = data[24:180]
    body = head + crc32(head).to_bytes(4, "little") + data[184:]
    return data[:16] + crc32(body, len(body)).to_bytes(4, "little") + len(body).to_bytes(4, "little") + body


def renumbered(log: list[bytes]) -> list[bytes]:
    """The slots with numbers, crcs of the slot before and checksums made right."""
    made: list[bytes] = []
    for slot, data in enumerate(log, start=1):
        before = made[-1][-4:] if made else bytes(4)
        made.append(resealed_slot(data[:16] + slot.to_bytes(8, "little") + data[24:72] + before + data[76:]))
    return made


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def mutated(data: bytes, random: Random) -> bytes:
    """The bytes with one to three changes of the kinds that matter to a codec."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 3))):
        at = random.randrange(len(changed))
        what = random.randrange(6)
        if what == 0:
            changed[at] ^= 1 << random.randrange(8)
        elif what == 1:
            changed[at] = random.choice((0, 1, 4, 0x7F, 0x80, 0xFF))
        elif what == 2:
            value = random.choice((0, 1, len(data), (1 << 32) - 1, 1 << 62, (1 << 64) - 1))
            changed[at : at + 8] = value.to_bytes(8, "little")[: len(changed) - at]
        elif what == 3:
            del changed[at : at + random.choice((1, 8))]
        elif what == 4:
            changed[at:at] = random.randbytes(random.choice((1, 8)))
        else:
            other = random.randrange(len(changed))
            changed[at : at + 8] = changed[other : other + 8]
    return bytes(changed)
