"""Slots: bytes to values and back, and nothing accepted that was not written so."""

from __future__ import annotations

import re
import tracemalloc
from collections import Counter
from random import Random
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrelpy._journal import format as fmt
from kestrelpy.ship import slots as codec
from kestrelpy.ship.slots import CLOSE, DATA, FENCE, SEAL, DroppedReader, SealedSegment, ShippedLedger, Slot, SlotHeader
from tests.ship import second_reader
from tests.ship.examples import CHECKPOINT, FILE, LEDGER, NUMBER, QUEUE_ID, SEALED, example_log
from tests.ship.logs import flipped, mutated, random_log, resealed_slot, slots_of
from tests.support.budget import SEED, share
from tests.support.paths import ROOT

GOLDEN = {
    "fence": """
    4b5354524c534c5401000100a0000000010000000000000001000000000000001011121314151617
    18191a1b1c1d1e1f000102030405060708090a0b0c0d0e0fff0000000000000000000000983a0000
    00000000000000000000000000000000000000000000000000000000000000000100000000000000
    0000000000000000000000000000000003000000000000000000000000000000000000000c804e29
    683a3158900f6e
    """,
    "first bytes": """
    4b5354524c534c5401000200a0000000020000000000000001000000000000001011121314151617
    18191a1b1c1d1e1f000102030405060708090a0b0c0d0e0f000100000000000058900f6e983a0000
    0068e5cf8b010000443322910281b9af000000000000000085000000000000000100000000000000
    010000000000000000000000000000000000000000000000000000000000000000000000d8da1a47
    4b5354524c5345470100600044332291000102030405060708090a0b0c0d0e0f0068e5cf8b010000
    01000000000000000000000000000000000000000000000000000000000000000000000000000000
    000000000000000000000000043d0387063ba889050000000100000000000000ff00000000000000
    010000004433229168656c6c6f00e408c0
    """,
    "bytes, a checkpoint, the ledger": """
    4b5354524c534c5401000200a0000000030000000000000001000000000000001011121314151617
    18191a1b1c1d1e1f000102030405060708090a0b0c0d0e0f010100000000000000e408c0983a0000
    0068e5cf8b010000443322919412d369850000000000000020000000000000000200000000000000
    020000000000000082000000990000000000000000000000000000000000000000000000c8791ac8
    c111fb3e00000000020000000000000000010000000000000100000044332291007d000000000102
    030405060708090a0b0c0d0e0f000000000000000001000000000000000000000000000000000000
    00000000000068e5cf8b010000600000000000000001000000000000000000000000000000000005
    00010000000100000061756469740200000000000000020000000000000001000000000000000300
    00000700000000000000198f96690c00000001080000000000000061707034ee2948210000000362
    62626262626262626262626262626206000000000000000000000000000000d2eb5e054c00000002
    63636363636363636363636363636363000102030405060708090a0b0c0d0e0f0700000000000000
    03000000000000000200000000000000050000000000000009000000000000006170702bc7d667
    """,
    "seal": """
    4b5354524c534c5401000300a0000000040000000000000001000000000000001011121314151617
    18191a1b1c1d1e1f000102030405060708090a0b0c0d0e0f02010000000000002bc7d667983a0000
    0068e5cf8b010000443322919412d369a50000000000000000000000000000000100000000000000
    02000000000000000000000000000000f2000000000000000000000000000000000000006079f936
    24007365672f313730303030303030303030302d312d31303131313231332e7365676d656e740501
    000000000000845dec524b5354524c5345470100600044332291000102030405060708090a0b0c0d
    0e0f0068e5cf8b010000010000000000000000000000000000000000000000000000000000000000
    00000000000000000000000000000000000000000000043d0387051edea240000000020000000000
    00000000000000000800000000004433229101000000000000000200000000000000050000000000
    0000ff000000000000000001000000000000a5000000000000000068e5cf8b0100004b5354524c45
    4e443aca9d81
    """,
    "no bytes, a drop, what is forgotten": """
    4b5354524c534c5401000200a0000000050000000000000001000000000000001011121314151617
    18191a1b1c1d1e1f000102030405060708090a0b0c0d0e0f03010000000000003aca9d81983a0000
    0068e5cf8b010000443322919412d369a50000000000000000000000000000000300000000000000
    02000000000000000a000000000000000800000000000000000000000000000000000000298d635a
    010500000061756469740068e5cf8b01000004fcbc29
    """,
    "close": """
    4b5354524c534c5401000400a0000000060000000000000001000000000000001011121314151617
    18191a1b1c1d1e1f000102030405060708090a0b0c0d0e0f040100000000000004fcbc29983a0000
    0068e5cf8b010000443322919412d369a50000000000000000000000000000000300000000000000
    020000000000000000000000000000000100000000000000000000000000000000000000b329c9a1
    0104f4ccf7
    """,
}
"""The slots of ``example_log``. These bytes are never edited."""
LOG = [bytes.fromhex(text) for text in GOLDEN.values()]
NAMED = dict(zip(GOLDEN, LOG, strict=True))
RICH = "bytes, a checkpoint, the ledger"


def whole(data: bytes) -> Slot:
    slot = codec.decode_slot(data)
    assert slot is not None
    return slot


def test_golden_bytes() -> None:
    assert example_log() == LOG
    assert [whole(data).header.kind for data in LOG] == [FENCE, DATA, DATA, SEAL, DATA, CLOSE]


def test_documented_example() -> None:
    """The bytes that docs/format.md shows."""
    shown = re.search(r"```hex example=slot\n(.*?)```", (ROOT / "docs" / "format.md").read_text(), re.DOTALL)
    assert shown is not None
    data = bytes.fromhex(shown[1])
    assert data == NAMED["fence"]
    header = SlotHeader(FENCE, 1, 1, bytes(range(16, 32)), bytes(range(16)), 255, 0, 15_000, 0, 0, 0, 0, 0, 1, 0)
    assert codec.encode_slot(Slot(header, note=b"h:1")) == data
    assert data[:8] == b"KSTRLSLT"
    assert data[12:16] == (160).to_bytes(4, "little")
    assert data[16:32] == 2 * (1).to_bytes(8, "little")
    assert data[64:72] == (255).to_bytes(8, "little")
    assert data[76:80] == (15_000).to_bytes(4, "little")
    assert data[136:140] == (3).to_bytes(4, "little")
    assert data[156:160] == crc32(data[:156]).to_bytes(4, "little")
    assert data[160:163] == b"h:1"
    assert data[163:] == crc32(data[:156] + b"h:1").to_bytes(4, "little")


def test_what_a_slot_says() -> None:
    fence, first, rich, seal, forgets, close = map(whole, LOG)
    assert (fence.owner, first.owner) == ("h:1", "")
    assert (close.handed_over, fence.handed_over) == (True, False)
    assert (seal.sealed, first.sealed) == (SEALED, None)
    assert (forgets.forgets_below, first.forgets_below, fence.forgets_below) == (NUMBER, 0, 0)
    assert forgets.checkpoints == (DroppedReader("audit"),)
    assert rich.checkpoints == (CHECKPOINT,)
    assert rich.ledger is not None
    assert rich.ledger.taken == 7
    state = rich.ledger.state()
    assert (state.versions, state.finished, state.intent) == (LEDGER.versions, LEDGER.finished, LEDGER.intent)
    assert first.frames + rich.frames == FILE[: seal.header.offset]
    assert rich.header.end == len(first.frames + rich.frames)
    assert seal.header.segment_crc == rich.header.segment_crc == crc32(FILE[: seal.header.offset])
    footer = SEALED.segment_footer()
    assert (SEALED.number, SEALED.marker) == (NUMBER, first.header.marker)
    assert (footer.first_id, footer.last_id) == (1, 2)
    for data in LOG:
        assert whole(data).header.slot_bytes == len(data)
        assert codec.decode_header(data[:160]) == whole(data).header
        assert whole(data).crc == codec.slot_crc(data)


@pytest.mark.parametrize("name", GOLDEN)
def test_every_flipped_bit_and_every_cut_of_a_slot_is_seen(name: str) -> None:
    data = NAMED[name]
    for bit in range(len(data) * 8):
        changed = flipped(data, bit)
        assert codec.decode_slot(changed) is None
        if bit < 160 * 8:
            assert codec.decode_header(changed) is None
            assert codec.slot_version(changed) is None, "not for a newer library either: it is damaged"
            assert codec.slot_kind(changed) is None
    for size in range(len(data)):
        assert codec.decode_slot(data[:size]) is None
        assert (codec.decode_header(data[:size]) is None) is (size < 160)
    assert codec.decode_slot(data + b"\0") is None


def test_another_version_or_kind_is_told_from_damage() -> None:
    data = NAMED["fence"]
    newer = resealed_slot(data[:8] + b"\3\0" + data[10:])
    assert (codec.decode_slot(newer), codec.slot_version(newer), codec.slot_kind(newer)) == (None, 3, None)
    other = resealed_slot(data[:10] + b"\5\0" + data[12:])
    assert (codec.decode_slot(other), codec.slot_version(other), codec.slot_kind(other)) == (None, 1, 5)
    assert codec.decode_header(other) is None
    assert (codec.slot_version(data), codec.slot_kind(data), codec.slot_kind(data[:160])) == (1, 1, 1)
    foreign = resealed_slot(b"KSTRLMAN" + data[8:])
    assert (codec.decode_slot(foreign), codec.slot_version(foreign), codec.slot_kind(foreign)) == (None, None, None)
    larger = data[:8] + b"\2\0\1\0" + (161).to_bytes(4, "little") + data[16:156] + b"\0"
    larger += crc32(larger).to_bytes(4, "little")
    assert (codec.slot_version(larger + b"more"), codec.slot_version(larger[:-1])) == (2, None)
    for head in (0, 19, 166, (1 << 32) - 1):
        assert codec.slot_version(resealed_slot(data[:12] + head.to_bytes(4, "little") + data[16:])) is None


def test_slots_that_differ_in_their_headers_alone_have_other_crcs() -> None:
    """The next slot names one of them by its crc. A crc over the header's crc, too, would be the same for all."""
    slot = whole(NAMED["fence"])
    fields: list[dict[str, Any]] = [{}, {"nonce": b"n" * 16}, {"written_ms": 7}, {"epoch": 2}, {"first_id": 2}]
    made = {
        whole(codec.encode_slot(slot._replace(header=slot.header._replace(**each), note=note))).crc
        for each in fields
        for note in (b"h:1", b"")
    }
    assert len(made) == 10


# -- round trips -----------------------------------------------------------------------------------------------------

U32, IDS, BINARY = st.integers(0, (1 << 32) - 1), st.integers(1, 1 << 61), st.binary(min_size=16, max_size=16)


@given(
    epoch=IDS, slot=st.integers(1, codec.MOST_SLOTS), nonce=BINARY, queue_id=BINARY, crcs=st.tuples(U32, U32, U32),
    written_ms=st.integers(0, (1 << 64) - 1), marker=st.integers(1, (1 << 32) - 1), number=IDS, last_id=IDS,
    offset=st.integers(96, 1 << 61), frames=st.binary(min_size=1, max_size=200), taken=IDS,
    below=st.none() | IDS, names=st.lists(st.from_regex(r"\A([A-Za-z0-9_][A-Za-z0-9_-]{0,99})?\Z"), max_size=3),
)  # fmt: skip
def test_round_trip_of_data(
    epoch: int, slot: int, nonce: bytes, queue_id: bytes, crcs: tuple[int, int, int], written_ms: int, marker: int,
    number: int, last_id: int, offset: int, frames: bytes, taken: int, below: int | None, names: list[str],
) -> None:  # fmt: skip
    states = tuple(fmt.Checkpoint(queue_id, name, last_id, 0, 0, 0) for name in names)
    before, lease, segment_crc = crcs
    header = SlotHeader(
        DATA, slot, epoch, nonce, queue_id, written_ms, before, lease, number, marker, segment_crc, offset, 0, last_id,
        last_id + 5,
    )  # fmt: skip
    note = b"" if below is None else codec.forget_note(below)
    made = Slot(header, frames, states, ShippedLedger.of(taken, LEDGER), note)
    data = codec.encode_slot(made)
    found = whole(data)
    assert found[1:-1] == made[1:-1]
    assert found.header[:12] == header[:12]
    assert (found.header.length, found.header.first_id, found.header.last_id) == (len(frames), last_id, last_id + 5)
    assert codec.encode_slot(found) == data
    assert found.forgets_below == (below or 0)


@given(st.integers(0, 1 << 32))
def test_round_trip_of_random_logs(seed: int) -> None:
    author = random_log(seed)
    for data, slot in zip(author.log, slots_of(author.log), strict=True):
        assert codec.encode_slot(slot) == data


@given(st.text())
def test_an_owners_name_is_cut_between_letters(owner: str) -> None:
    note = codec.owner_note(owner)
    assert len(note) <= codec.MAX_OWNER_BYTES
    assert owner.startswith(note.decode())
    assert len(owner.encode()) - len(note) < 4 or len(note) > codec.MAX_OWNER_BYTES - 4


@given(st.integers(1, fmt.LARGEST), st.integers(1, fmt.LARGEST), BINARY)
def test_keys_of_segments(number: int, epoch: int, nonce: bytes) -> None:
    assert codec.parse_segment_key(codec.segment_key(number, epoch, nonce)) == (number, epoch, nonce[:4])


@pytest.mark.parametrize(
    "key",
    [
        "",
        "seg/170000000000-1-0a1b2c3d.segment",  # 12 digits
        "seg/01700000000000-1-0a1b2c3d.segment",  # 14, with a zero
        "seg/1700000000000-01-0a1b2c3d.segment",
        "seg/1700000000000-0-0a1b2c3d.segment",
        "seg/1700000000000-1-0A1B2C3D.segment",
        "seg/1700000000000-1-0a1b2c3d.segment\n",
        "seg/9999999999999999999-1-0a1b2c3d.segment",
        "../1700000000000-1-0a1b2c3d.segment",
        "seg/../../0000000-1-0a1b2c3d.segment",
        "seg/\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661-1-0a1b2c3d.segment",
    ],
)
def test_other_keys_are_no_segments(key: str) -> None:
    assert codec.parse_segment_key(key) is None


def test_keys_of_slots_are_in_their_order() -> None:
    assert codec.slot_key(1) == "log/0000000000000001"
    assert len(codec.slot_key(codec.MOST_SLOTS)) == len(codec.slot_key(1))


def test_a_slot_that_would_be_too_large_is_not_made() -> None:
    first = whole(NAMED["first bytes"])
    most = first._replace(frames=bytes(codec.MAX_SLOT_BYTES - 164))
    data = codec.encode_slot(most)
    assert len(data) == codec.MAX_SLOT_BYTES
    assert whole(data).header.length == len(most.frames)
    with pytest.raises(ValueError, match="more than 67108864"):
        codec.encode_slot(first._replace(frames=bytes(codec.MAX_SLOT_BYTES - 163)))


# -- a good checksum is not enough -----------------------------------------------------------------------------------

FIELDS = {
    "kind": (10, 2), "slot": (16, 8), "epoch": (24, 8), "number": (80, 8), "marker": (88, 4), "segment_crc": (92, 4),
    "offset": (96, 8), "length": (104, 8), "first_id": (112, 8), "last_id": (120, 8), "checkpoints": (128, 4),
    "ledger": (132, 4), "note": (136, 4), "unused": (140, 8),
}  # fmt: skip


def changed(name: str, **fields: int) -> bytes:
    """A golden slot with other values in its header, and right checksums."""
    data = bytearray(NAMED[name])
    for field, value in fields.items():
        at, size = FIELDS[field]
        data[at : at + size] = value.to_bytes(size, "little")
    return resealed_slot(bytes(data))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("fence", {"slot": 0}),
        ("fence", {"slot": 10**16}),
        ("fence", {"epoch": 0}),
        ("fence", {"epoch": 1 << 62}),
        ("fence", {"first_id": 0}),
        ("fence", {"first_id": 1 << 62}),
        ("fence", {"last_id": 1}),
        ("fence", {"unused": 1}),
        ("fence", {"marker": 1}),  # of no segment
        ("fence", {"segment_crc": 1}),
        ("fence", {"offset": 96}),
        ("fence", {"length": 3, "note": 0}),  # a FENCE has no bytes of a segment
        ("fence", {"note": 4}),
        ("fence", {"checkpoints": 3, "note": 0}),
        ("fence", {"ledger": 3, "note": 0}),
        ("first bytes", {"number": 0}),
        ("first bytes", {"number": 1 << 62}),
        ("first bytes", {"marker": 0}),
        ("first bytes", {"offset": 95}),
        ("first bytes", {"offset": fmt.LARGEST}),
        ("first bytes", {"first_id": 3}),
        ("first bytes", {"first_id": 0}),
        (RICH, {"first_id": 0}),
        ("first bytes", {"length": (1 << 64) - 1}),
        (RICH, {"first_id": 3}),  # bytes in the middle of a segment have an id
        (RICH, {"checkpoints": 129, "ledger": 154}),
        (RICH, {"checkpoints": 131, "ledger": 152}),
        (RICH, {"ledger": 152, "note": 1}),
        ("no bytes, a drop, what is forgotten", {"first_id": 2}),
        ("no bytes, a drop, what is forgotten", {"offset": 95}),
        ("no bytes, a drop, what is forgotten", {"note": 9, "checkpoints": 9}),
        ("seal", {"offset": 166}),
        ("seal", {"marker": 5}),
        ("seal", {"number": 7}),
        ("seal", {"last_id": 3}),
        ("seal", {"first_id": 2}),
        ("seal", {"length": 2, "note": 240}),
        ("close", {"length": 1, "note": 0}),
        ("close", {"kind": FENCE, "length": 1, "note": 0}),
        ("close", {"first_id": 4}),
        ("close", {"last_id": 1 << 62, "first_id": (1 << 62) + 1}),
    ],
)
def test_headers_that_contradict_themselves(name: str, fields: dict[str, int]) -> None:
    assert changed(name) == NAMED[name]
    data = changed(name, **fields)
    assert codec.decode_slot(data) is None
    with pytest.raises(second_reader.Bad):
        second_reader.read_slot(data)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("first bytes", {"length": codec.MAX_SLOT_BYTES - 163}),
        ("seal", {"length": 1}),
        ("seal", {"number": 0, "marker": 0, "segment_crc": 0, "offset": 0}),
        ("seal", {"first_id": 0}),
        ("seal", {"first_id": 4}),
    ],
)
def test_a_header_is_refused_without_the_rest_of_its_slot(name: str, fields: dict[str, int]) -> None:
    assert codec.decode_header(NAMED[name][:160]) is not None
    assert codec.decode_header(changed(name, **fields)[:160]) is None


def test_the_largest_numbers() -> None:
    for name, fields in (
        ("first bytes", {"last_id": fmt.LARGEST, "epoch": fmt.LARGEST, "slot": codec.MOST_SLOTS}),
        ("close", {"number": fmt.LARGEST, "offset": fmt.LARGEST, "last_id": fmt.LARGEST - 1, "first_id": fmt.LARGEST}),
    ):
        assert whole(changed(name, **fields))
    ledger = ShippedLedger(fmt.LARGEST, b"")
    assert whole(codec.encode_slot(whole(NAMED["first bytes"])._replace(ledger=ledger))).ledger == ledger
    assert decoded(SEALED._replace(file_bytes=fmt.LARGEST)) is not None


def test_an_owner_whose_name_is_a_note_of_another_kind() -> None:
    slot = whole(with_note(FENCE, b"\1"))
    assert (slot.handed_over, slot.forgets_below, slot.sealed, slot.owner) == (False, 0, None, "\1")


def decoded(segment: SealedSegment) -> SealedSegment | None:
    data = codec.encode_sealed(segment)
    found = codec.decode_sealed(b"before" + data + b"after", 6)
    assert found is None or found == (segment, 6 + len(data))
    return found and found[0]


def test_segments_with_damaged_headers_are_known_by_their_footers() -> None:
    damaged = SEALED._replace(header=b"?" * 96)

    def footer(first_id: int, number: int, marker: int) -> bytes:
        return fmt.encode_footer(fmt.SegmentFooter(first_id, 2, 3 - first_id, 5, 255, 256, 165), number, marker)

    assert decoded(damaged) == damaged
    assert decoded(damaged._replace(key=codec.segment_key(NUMBER + 1, 1, b"nonce"))) is None
    assert decoded(damaged._replace(key=codec.segment_key(0, 1, b"nonce"), footer=footer(1, 0, 7))) is None
    assert decoded(damaged._replace(footer=footer(1, NUMBER, 7))) is not None
    assert decoded(damaged._replace(footer=footer(1, NUMBER, 0))) is None
    assert decoded(damaged._replace(footer=footer(0, NUMBER, 7))) is None
    data = codec.encode_sealed(damaged)
    assert all(codec.decode_sealed(data[:size], 0) is None for size in range(len(data)))


def with_note(kind: int, note: bytes) -> bytes:
    name = {FENCE: "fence", DATA: "first bytes", SEAL: "seal", CLOSE: "close"}[kind]
    return codec.encode_slot(whole(NAMED[name])._replace(note=note))


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        (FENCE, b"x" * 201),
        (FENCE, b"\xff"),
        (DATA, bytes(8)),
        (DATA, b"\xff" * 8),
        (DATA, b"\1"),
        (CLOSE, b""),
        (CLOSE, b"\2"),
        (CLOSE, b"\0\0"),
        (SEAL, b""),
        (SEAL, codec.encode_sealed(SEALED) + b"\0"),
        (SEAL, codec.encode_sealed(SEALED)[:-1]),
        (SEAL, codec.encode_sealed(SEALED._replace(key="../1700000000000-1-10111213.segment"))),
        (SEAL, codec.encode_sealed(SEALED._replace(key="seg/1700000000001-1-10111213.segment"))),
        (SEAL, codec.encode_sealed(SEALED._replace(file_bytes=SEALED.file_bytes - 1))),
        (SEAL, codec.encode_sealed(SEALED._replace(file_bytes=1 << 62))),
        (SEAL, codec.encode_sealed(SEALED._replace(footer=bytes(96)))),
        (SEAL, codec.encode_sealed(SEALED._replace(footer=SEALED.header))),
        (  # an item whose data imitates a footer
            SEAL,
            codec.encode_sealed(
                SEALED._replace(footer=fmt.encode_item(2, SEALED.footer[32:], 255, None, 2, SEALED.marker))
            ),
        ),
        (
            SEAL,
            codec.encode_sealed(
                SEALED._replace(
                    key=codec.segment_key(0, 1, b"nonce"),
                    footer=fmt.encode_footer(fmt.SegmentFooter(1, 2, 2, 5, 255, 256, 165), 0, SEALED.marker),
                )
            ),
        ),
        (
            SEAL,  # ids from 0 on
            codec.encode_sealed(
                SEALED._replace(
                    footer=fmt.encode_footer(fmt.SegmentFooter(0, 2, 3, 5, 255, 256, 165), NUMBER, SEALED.marker)
                )
            ),
        ),
        (SEAL, b"\xff\xff" + codec.encode_sealed(SEALED)[2:]),
        (
            SEAL,  # another segment's header
            codec.encode_sealed(
                SEALED._replace(header=fmt.encode_header(fmt.SegmentHeader(5, QUEUE_ID, NUMBER, 1, 0, 0, 0, 0, 0)))
            ),
        ),
        (
            SEAL,  # another queue's
            codec.encode_sealed(
                SEALED._replace(
                    header=fmt.encode_header(fmt.SegmentHeader(SEALED.marker, b"q" * 16, NUMBER, 1, 0, 0, 0, 0, 0))
                )
            ),
        ),
    ],
)
def test_notes_that_no_slot_has(kind: int, note: bytes) -> None:
    data = with_note(kind, note)
    assert codec.decode_slot(data) is None
    with pytest.raises(second_reader.Bad):
        second_reader.read_slot(data)


def test_the_largest_number_may_be_forgotten() -> None:
    assert whole(with_note(DATA, codec.forget_note(fmt.LARGEST))).forgets_below == fmt.LARGEST


def test_a_segment_whose_header_was_damaged_is_shipped_as_it_is() -> None:
    slot = whole(with_note(SEAL, codec.encode_sealed(SEALED._replace(header=b"?" * 96))))
    assert slot.sealed is not None
    assert slot.sealed.segment_header() is None
    assert slot.sealed.segment_footer().last_id == 2


def with_states(*states: fmt.Checkpoint | DroppedReader) -> bytes:
    return codec.encode_slot(whole(NAMED["first bytes"])._replace(checkpoints=states))


@pytest.mark.parametrize(
    "data",
    [
        with_states(CHECKPOINT._replace(flags=fmt.FLAG_MARK)),
        with_states(CHECKPOINT._replace(flags=1 << 4)),  # a series
        with_states(CHECKPOINT._replace(queue_id=b"q" * 16)),
        with_states(CHECKPOINT._replace(reader="../../etc/passwd")),  # a restore makes a file of that name
        with_states(CHECKPOINT._replace(reader="-r")),
        with_states(CHECKPOINT._replace(reader="r" * 101)),
        with_states(DroppedReader("a/b")),
        with_states(DroppedReader("r" * 101)),
        with_states(DroppedReader("\0")),
        with_states(CHECKPOINT._replace(head=2)),  # a span below it
    ],
)
def test_checkpoints_that_no_slot_has(data: bytes) -> None:
    assert codec.decode_slot(data) is None
    with pytest.raises(second_reader.Bad):
        second_reader.read_slot(data)


def test_checkpoints_that_a_slot_may_have() -> None:
    states = (
        CHECKPOINT._replace(queue_id=bytes(16)),  # of a reader that was opened before the queue had a segment
        CHECKPOINT._replace(reader="", flags=fmt.FLAG_INHERITED),
        DroppedReader(""),
    )
    assert whole(with_states(*states)).checkpoints == states


@pytest.mark.parametrize("records", [b"\0", bytes(8), b"x" * 40, ShippedLedger.of(7, LEDGER).records[:-1]])
def test_a_ledger_that_is_not_whole(records: bytes) -> None:
    data = codec.encode_slot(whole(NAMED["first bytes"])._replace(ledger=ShippedLedger(7, records)))
    assert codec.decode_slot(data) is None


def test_a_ledger_of_no_records_is_not_the_one_before() -> None:
    slot = whole(NAMED["first bytes"])
    assert slot.ledger is None
    assert whole(codec.encode_slot(slot._replace(ledger=ShippedLedger(0, b"")))).ledger == ShippedLedger(0, b"")
    too_large = ShippedLedger(1 << 62, b"")
    assert codec.decode_slot(codec.encode_slot(slot._replace(ledger=too_large))) is None


# -- forged bytes ----------------------------------------------------------------------------------------------------


def patched(name: str, at: int, data: bytes) -> bytes:
    """A golden slot with other bytes ``at`` a place after its header, and right checksums."""
    old = NAMED[name]
    return resealed_slot(old[: 160 + at] + data + old[160 + at + len(data) :])


ALL_ONES = b"\xff" * 4
HOSTILE = {
    "length": changed("first bytes", length=1 << 61),
    "all lengths": changed(RICH, length=1 << 25, checkpoints=(1 << 32) - 1, ledger=(1 << 32) - 1, note=(1 << 32) - 1),
    "a checkpoint's length": patched(RICH, 32 + 1, ALL_ONES),
    "a checkpoint's spans": patched(RICH, 32 + 5 + 84, ALL_ONES),
    "a checkpoint's name": patched(RICH, 32 + 5 + 82, ALL_ONES[:2]),
    "a ledger record's length": patched(RICH, 32 + 130 + 8 + 4, ALL_ONES),
    "a key": patched("seal", 0, ALL_ONES[:2]),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_lengths_that_claim_more_than_there_is_cost_nothing(what: str) -> None:
    data = HOSTILE[what]
    tracemalloc.start()
    try:
        assert codec.decode_slot(data) is None
        assert tracemalloc.get_traced_memory()[1] < 16 * 1024
    finally:
        tracemalloc.stop()


def test_a_whole_slot_is_decoded_with_one_copy() -> None:
    data = codec.encode_slot(whole(NAMED["first bytes"])._replace(frames=bytes(8 << 20)))
    tracemalloc.start()
    try:
        assert codec.decode_slot(data) is not None
        assert tracemalloc.get_traced_memory()[1] < (8 << 20) + 64 * 1024
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=400))
def test_decoders_take_any_bytes(data: bytes) -> None:
    found = (codec.decode_slot(data), codec.decode_header(data), codec.slot_kind(data), codec.slot_version(data))
    assert found == (None, None, None, None)
    begun = codec.SLOT_MAGIC + b"\1\0\1\0" + (160).to_bytes(4, "little") + data
    assert codec.decode_slot(begun) is None
    if len(begun) >= 164:
        codec.decode_slot(resealed_slot(begun))
    codec.decode_sealed(data, 0)
    codec.decode_states(data, QUEUE_ID)
    codec.is_ledger(data)


def test_the_second_reader_agrees_on_random_and_on_forged_slots() -> None:
    """The page, the library and the second reader say the same: which bytes are a slot, and what is in it."""
    random, seen = Random(SEED), Counter[bool]()
    for seed in range(share(400)):
        for data in random_log(SEED * 1000 + seed).log:
            assert_same(data)
            for _ in range(5):
                forged = mutated(data, random)
                assert_same(forged)
                if len(forged) >= 164:
                    seen[assert_same(resealed_slot(forged))] += 1
    assert seen[True] > seen[False] / 10 > 0


def assert_same(data: bytes) -> bool:
    """Whether it is a slot: for the library and for the second reader, which see the same in it."""
    slot = codec.decode_slot(data)
    try:
        theirs = second_reader.read_slot(data)
    except second_reader.Bad:
        assert slot is None
        return False
    assert slot is not None
    assert codec.encode_slot(slot) == data
    about = theirs["header"]
    assert slot.header._asdict() == {name: about[name] for name in SlotHeader._fields}
    assert (slot.header.end, slot.header.slot_bytes, slot.crc) == (about["end"], about["size"], theirs["crc"])
    assert (slot.frames, slot.note) == (theirs["frames"], theirs["note"])
    assert list(map(state_facts, slot.checkpoints)) == list(map(their_facts, theirs["checkpoints"]))
    assert (slot.ledger and slot.ledger._asdict()) == theirs["ledger"]
    if slot.sealed is not None:
        assert_same_segment(slot.sealed, theirs["segment"])
    return True


def state_facts(state: fmt.Checkpoint | DroppedReader) -> tuple[object, ...]:
    if isinstance(state, DroppedReader):
        return (state.reader,)
    hint = (state.hint_number, state.hint_offset, state.hint_id)
    return (
        state.queue_id, state.reader, state.head, state.watermark, state.released_items, state.released_bytes, hint,
        state.durable_head, state.flags, list(state.done), list(state.error_counts), state.highest_id,
    )  # fmt: skip


def their_facts(state: dict[str, object]) -> tuple[object, ...]:
    if "dropped" in state:
        return (state["dropped"],)
    return tuple(
        state[name]
        for name in (
            "queue_id", "name", "head", "watermark", "released_items", "released_bytes", "hint", "durable_head",
            "flags", "spans", "errors", "highest",
        )
    )  # fmt: skip


def assert_same_segment(segment: SealedSegment, theirs: dict[str, object]) -> None:
    assert segment == (
        theirs["key"],
        theirs["file_bytes"],
        theirs["crc"],
        theirs["header_bytes"],
        theirs["footer_bytes"],
    )
    header, footer = segment.segment_header(), segment.segment_footer()
    assert (header and header._asdict()) == theirs["header"]
    assert theirs["footer"] == {
        "marker": segment.marker,
        "first_id": footer.first_id,
        "last_id": footer.last_id,
        "records_end": footer.records_end,
        "number": segment.number,
    }


def test_a_slot_without_a_move_that_says_it_has_one_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = whole(NAMED["first bytes"])
    with monkeypatch.context() as patch:
        patch.setattr(codec, "has_moves", lambda states: True)
        data = codec.encode_slot(slot)
    assert codec.slot_version(data) == codec.MOVES_VERSION
    assert codec.decode_slot(data) is None
