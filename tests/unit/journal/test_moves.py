"""The bytes of a move in a checkpoint, in its file and in a slot; and those of a dead letter."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrelpy import DeadLetter, UnsupportedFormat
from kestrelpy._journal import format as fmt
from kestrelpy._journal.checkpoint import CheckpointFile, load_checkpoint
from kestrelpy._journal.moves import MAX_REASON_BYTES, Move, MoveNote, cut_reason, decode_move, encode_move
from kestrelpy.letter import content_bytes, decode_letter, encode_letter
from kestrelpy.ship import manifest as manifests
from kestrelpy.ship import slots
from kestrelpy.testing import MemoryDisk
from tests.fuzz import naive_reader

MOVE = Move(bytes(range(16)), 7, "dead", False, (MoveNote(3, 2, 300, "no ä"), MoveNote(9, 5, 255, "")))
BYTES = bytes(range(16)) + bytes.fromhex(
    "0700000000000000 0400 0100 02000000 64656164"
    "0300000000000000 02000000 2c01000000000000 0500 6e6f20c3a4"
    "0900000000000000 05000000 ff00000000000000 0000"
)
STATE = fmt.Checkpoint(b"q" * 16, "audit", 2, 9, 2, 20, done=((4, 5),), error_counts=((3, 2),), move=MOVE)
NAME = "jobs+audit.checkpoint"

notes = st.lists(st.tuples(st.integers(1, 1 << 40), st.sampled_from(("", "no ä", "a\n"))), min_size=1, max_size=3).map(
    lambda found: tuple(MoveNote(item_id, 1, 2, reason) for item_id, reason in sorted(dict(found).items()))
)


def test_the_bytes_are_these() -> None:
    assert encode_move(MOVE) == BYTES
    assert decode_move(BYTES) == MOVE
    assert MOVE.app_id == "kestrelpy-move-000102030405060708090a0b0c0d0e0f"
    body = fmt.encode_checkpoint_body(STATE)
    assert body.endswith(BYTES)
    assert fmt.decode_checkpoint_body(body) == STATE
    assert STATE.last_named_id == 9


@given(st.binary(min_size=16, max_size=16), st.integers(1, 1 << 60), st.booleans(), notes)
def test_there_and_back(stream: bytes, number: int, is_requeue: bool, some: tuple[MoveNote, ...]) -> None:
    try:
        move = Move(stream, number, "dead", is_requeue, some)
        data = encode_move(move)
    except UnicodeEncodeError:
        return
    assert decode_move(data) == move
    assert decode_move(data[:-1]) is None
    assert decode_move(data + b"\0") is None
    assert naive_reader.is_move(data)


@pytest.mark.parametrize(
    "spoiled",
    [
        b"",
        BYTES[:31],
        BYTES.replace(b"dead", b"../x"),
        BYTES.replace(b"\x04\x00\x01\x00", b"\x04\x00\x03\x00"),
        BYTES.replace(b"\xc3\xa4", b"\xc3\xc3"),
        BYTES.replace(b"dead", b"d\xffad"),
        BYTES.replace(b"\x07" + bytes(7), bytes(8)),
        BYTES.replace(b"\x09" + bytes(7), b"\x03" + bytes(7)),
        BYTES.replace(b"\x02\x00\x00\x00dead", b"\x01\x00\x00\x00dead"),
        BYTES.replace(b"\x02\x00\x00\x00dead", b"\x00\x00\x00\x00dead"),
    ],
)
def test_what_is_no_move_is_none(spoiled: bytes) -> None:
    assert decode_move(spoiled) is None
    assert not naive_reader.is_move(spoiled)


def test_a_file_with_a_move_has_version_2_until_the_move_is_over() -> None:
    directory = MemoryDisk().directory("/q", create=True)
    file = CheckpointFile(directory, NAME)
    versions = []
    for state in (STATE._replace(move=None), STATE, STATE._replace(head=3), STATE._replace(move=None)):
        file.save(state, durable=False)
        versions.append(fmt.checkpoint_version(directory.open(NAME).read(0, 4096)))
        found, _ = load_checkpoint(directory, NAME)
        assert found is not None
        assert found.move == state.move
        naive = naive_reader.read_checkpoint(directory.open(NAME).read(0, 1 << 20))
        assert naive is not None
        assert naive.head == state.head
    assert versions == [1, 2, 2, 1]


def test_a_slot_and_a_manifest_with_a_move_are_of_a_newer_version() -> None:
    header = slots.SlotHeader(slots.FENCE, 1, 1, b"n" * 16, b"q" * 16, 255, 0, 0, 0, 0, 0, 0, 0, 10, 9)
    plain = slots.Slot(header, checkpoints=(STATE._replace(move=None),))
    moving = slots.Slot(header, checkpoints=(STATE,))
    for slot, version in ((plain, 1), (moving, 2)):
        data = slots.encode_slot(slot)
        assert slots.slot_version(data) == version
        found = slots.decode_slot(data)
        assert found is not None
        assert found.checkpoints == slot.checkpoints
    assert slots.has_moves(moving.checkpoints)
    assert not slots.has_moves((slots.DroppedReader("audit"),))
    assert (manifests.MANIFEST_VERSION, manifests.MOVES_VERSION) == (2, 3)


def test_a_newer_version_of_a_checkpoint_is_refused() -> None:
    directory = MemoryDisk().directory("/q", create=True)
    directory.create(NAME).write(0, fmt.checkpoint_prefix(3) + bytes(100))
    with pytest.raises(UnsupportedFormat):
        load_checkpoint(directory, NAME)


def test_a_reason_is_cut_between_characters() -> None:
    assert cut_reason("a" * 2000) == "a" * MAX_REASON_BYTES
    assert cut_reason("a" + "ä" * 600) == "a" + "ä" * ((MAX_REASON_BYTES - 1) // len(r"\u00e4"))
    assert cut_reason("🐦" * 600) == "🐦" * (MAX_REASON_BYTES // len(r"\ud83d\udc26"))
    assert cut_reason("\n" * 600) == "\n" * (MAX_REASON_BYTES // 2)


@pytest.mark.parametrize("each", ["é", "🐦", "\0", '"', "x", "\udc80"])
def test_a_reason_is_bounded_in_the_first_line_of_a_letter(each: str) -> None:
    reason = cut_reason(each * 5000)
    line = encode_letter(DeadLetter(b"", "q" * 100, "r" * 100, 1 << 61, 1 << 61, 1 << 61, 1 << 31, reason))
    assert MAX_REASON_BYTES - 12 < len(json.dumps(reason)) - 2 <= MAX_REASON_BYTES
    assert len(line) < MAX_REASON_BYTES + 512


# -- a dead letter -----------------------------------------------------------------------------------------------------

LETTER = DeadLetter(b"data\nmore", "jobs", "", 7, 255, 300, 3, "ValueError: no such address")


def test_what_counts_of_a_letter_is_without_its_first_lines() -> None:
    """For a few letters in letters, as far as they may go: an item may be made to look like any number of them."""
    data = b"data\nmore"
    for depth in range(12):
        assert (content_bytes(data) == 9) is (depth <= 8)
        data = encode_letter(DeadLetter(data, "jobs", "", 7, 255, 300, 3, ""))


def test_the_bytes_of_a_letter() -> None:
    made = encode_letter(LETTER)
    assert made == (
        b'{"dead_letter": 1, "queue": "jobs", "reader": "", "id": 7, "added_ms": 255, "died_ms": 300, '
        b'"error_count": 3, "reason": "ValueError: no such address", "crc": 3236854053}\ndata\nmore'
    )
    assert decode_letter(made) == LETTER
    assert decode_letter(encode_letter(DeadLetter(b"", "", "", 0, 0, 0, 0, "\0\n" * 512))) is not None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"data", b"dato"),
        (b"\n", b" "),
        (b'"id": 7', b'"id": -7'),
        (b'"id": 7', b'"id": 7.0'),
        (b'"id": 7', b'"id": true'),
        (b'"id": 7', b'"id": 9999999999999999999'),
        (b'"id": 7', b'"no": 7'),
        (b'"jobs"', b"null"),
        (b'"jobs"', b'"\\ud800"'),
        (b'"dead_letter": 1', b'"dead_letter": 2'),
        (b"}", b""),
        (b"{", b"["),
    ],
)
def test_what_is_no_letter_is_none(old: bytes, new: bytes) -> None:
    assert decode_letter(encode_letter(LETTER).replace(old, new, 1)) is None


@given(st.binary(max_size=60))
def test_any_bytes_are_a_letter_or_not(data: bytes) -> None:
    decode_letter(data)
    decode_letter(b'{"dead_letter": 1, ' + data)
    letter = DeadLetter(data, "jobs", "a", 1, 2, 3, 4, "")
    assert decode_letter(encode_letter(letter)) == letter
