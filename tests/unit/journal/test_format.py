"""The format: bytes to records and back, and nothing accepted that was not written so."""

from __future__ import annotations

import random
import re
import time
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrelpy._journal import format as fmt
from tests.support.paths import ROOT

U32, VALUES = st.integers(0, (1 << 32) - 1), st.integers(0, fmt.LARGEST)
IDS = st.integers(1, fmt.LARGEST)
MARKERS = st.integers(1, (1 << 32) - 1)
TIMES = st.integers(0, fmt.ADDED_MASK)
EXPIRY = st.none() | VALUES
HEADERS = st.builds(
    fmt.SegmentHeader, MARKERS, st.binary(min_size=16, max_size=16), *[VALUES] * 7
).filter(lambda header: header.first_id > header.previous_last_id)  # fmt: skip
MARKER = 0x11223344


@given(HEADERS)
def test_header_round_trip(header: fmt.SegmentHeader) -> None:
    data = fmt.encode_header(header)
    assert len(data) == fmt.HEADER_BYTES == 96
    assert fmt.decode_header(data) == header
    assert fmt.decode_header(data + b"more") == header
    assert fmt.header_version(data) == fmt.FORMAT_VERSION == 1


def test_every_flipped_bit_of_a_header_is_seen() -> None:
    data = fmt.encode_header(fmt.SegmentHeader(MARKER, b"q" * 16, 7, 1, 0, 0, 0, 0, 0))
    for bit in range(len(data) * 8):
        assert fmt.decode_header(flipped(data, bit)) is None
    for size in range(len(data)):
        assert fmt.decode_header(data[:size]) is None


def test_a_header_without_a_marker_or_with_id_0_is_none() -> None:
    assert fmt.decode_header(fmt.encode_header(fmt.SegmentHeader(0, b"q" * 16, 7, 1, 0, 0, 0, 0, 0))) is None
    assert fmt.decode_header(fmt.encode_header(fmt.SegmentHeader(MARKER, b"q" * 16, 7, 0, 0, 0, 0, 0, 0))) is None


def test_header_version_is_read_before_anything_else() -> None:
    assert fmt.header_version(fmt.SEGMENT_MAGIC + b"\x02\x01") == 0x102
    assert fmt.header_version(b"") is None
    assert fmt.header_version(b"KSTRLSEH\x01\x00") is None
    assert fmt.header_version(fmt.SEGMENT_MAGIC + b"\x01") is None


@given(item_id=IDS, data=st.binary(), added_ms=TIMES, expires_ms=EXPIRY, behind=st.integers(0, 100), marker=MARKERS)
def test_item_round_trip(
    item_id: int, data: bytes, added_ms: int, expires_ms: int | None, behind: int, marker: int
) -> None:
    durable_id = max(item_id - behind, 0)
    frame = fmt.encode_item(item_id, data, added_ms, expires_ms, durable_id, marker)
    found = fmt.decode_frame(b"xyz" + frame + b"tail", 3, marker)
    assert found is not None
    assert (found.first_id, found.last_id, found.watermark, found.size) == (item_id, item_id, durable_id, len(frame))
    assert found.entries == ((data, added_ms, expires_ms),)
    assert fmt.decode_frame(frame, 0, marker ^ 1) is None
    assert fmt.frame_span(b"xyz" + frame, 3) == (item_id, len(frame))


@given(
    first_id=IDS, items=st.lists(st.binary(max_size=40), min_size=1, max_size=20), added_ms=TIMES,
    expires_ms=EXPIRY, marker=MARKERS
)  # fmt: skip
def test_batch_round_trip(
    first_id: int, items: list[bytes], added_ms: int, expires_ms: int | None, marker: int
) -> None:
    frame = fmt.encode_batch(first_id, items, list(map(len, items)), added_ms, expires_ms, first_id - 1, marker)
    found = fmt.decode_frame(frame, 0, marker)
    assert found is not None
    assert (found.first_id, found.last_id) == (first_id, first_id + len(items) - 1)
    assert list(found.entries) == [(data, added_ms, expires_ms) for data in items]
    assert len(frame) <= fmt.batch_bytes(sum(map(len, items)), len(items))


def test_documented_example() -> None:
    """The bytes that docs/format.md shows, built here by hand."""
    text = (ROOT / "docs" / "format.md").read_text()
    shown = re.search(r"```hex example=item\n(.*?)```", text, re.DOTALL)
    assert shown is not None
    frame = bytes.fromhex(shown[1])
    assert fmt.encode_item(100, b"hello", 255, None, 99, MARKER) == frame
    assert frame[:4] == crc32(frame[4:]).to_bytes(4, "little")
    assert frame[4:8] == len(b"hello").to_bytes(4, "little")
    assert frame[8:16] == (100).to_bytes(8, "little")
    assert frame[16:22] == (255).to_bytes(6, "little")
    assert frame[22:24] == bytes(2)
    assert frame[24:28] == (1).to_bytes(4, "little")
    assert frame[28:32] == MARKER.to_bytes(4, "little")
    assert frame[32:] == b"hello"


FRAMES = {
    "item": fmt.encode_item(3, b"hello", 255, None, 2, MARKER),
    "expiring": fmt.encode_item(3, b"hello", 255, 999, 2, MARKER),
    "batch": fmt.encode_batch(3, [b"a", b"", b"ccc"], [1, 0, 3], 255, None, 2, MARKER),
    "expiring batch": fmt.encode_batch(3, [b"a", b"", b"ccc"], [1, 0, 3], 255, 999, 2, MARKER),
    "footer": fmt.encode_footer(fmt.SegmentFooter(1, 5, 5, 40, 10, 20, 300), 7, MARKER),
}


@pytest.mark.parametrize("kind", FRAMES)
def test_every_flipped_bit_and_every_cut_of_a_frame_is_seen(kind: str) -> None:
    frame = FRAMES[kind]
    assert fmt.decode_frame(frame, 0, MARKER) is not None
    for bit in range(len(frame) * 8):
        assert fmt.decode_frame(flipped(frame, bit), 0, MARKER) is None
    for size in range(len(frame)):
        assert fmt.decode_frame(frame[:size], 0, MARKER) is None


def test_zeros_are_never_a_frame() -> None:
    assert fmt.decode_frame(bytes(4096), 0, MARKER) is None
    assert fmt.decode_frame(bytes(4096), -1, MARKER) is None
    assert fmt.decode_frame(bytes(4096), 4096, MARKER) is None


def sealed(length: int, item_id: int, kind: int, lag: int, body: bytes) -> bytes:
    """A frame with a good checksum, whatever it says."""
    frame = fmt.pack_frame(length, item_id, kind << fmt.KIND_SHIFT, lag, MARKER) + body
    return fmt.pack_crc(crc32(frame)) + frame


@pytest.mark.parametrize(
    "frame",
    [
        sealed(1, 0, fmt.KIND_ITEM, 0, b"x"),  # id 0
        sealed(1, 5, fmt.KIND_ITEM, 6, b"x"),  # a watermark below 0
        sealed(1, 5, 4, 0, b"x"),  # an unknown kind
        sealed(1, 5, 16, 0, b"x"),
        sealed(7, 5, fmt.KIND_EXPIRES, 0, b"x" * 7),  # no room for the expiry
        sealed(3, 5, fmt.KIND_BATCH, 0, b"x" * 3),  # no room for the count
        sealed(4, 5, fmt.KIND_BATCH, 0, bytes(4)),  # a batch of nothing
        sealed(4, 5, fmt.KIND_BATCH, 0, b"\xff" * 4),  # a table larger than the frame
        sealed(8, 5, fmt.KIND_BATCH, 0, b"\1\0\0\0\1\0\0\0"),  # an item that is not there
        sealed(9, 5, fmt.KIND_BATCH, 0, b"\1\0\0\0\0\0\0\0x"),  # bytes that belong to no item
        sealed(1, fmt.LARGEST + 1, fmt.KIND_ITEM, 0, b"x"),  # an id that no queue reaches
        sealed(63, 5, fmt.KIND_FOOTER, 0, b"x" * 63),
        sealed(64, 5, fmt.KIND_FOOTER, 0, b"x" * 64),
    ],
)
def test_a_good_checksum_is_not_enough(frame: bytes) -> None:
    """R21: every length and every field is checked against what is there."""
    assert fmt.decode_frame(frame, 0, MARKER) is None


@given(st.binary(max_size=200), st.integers(-5, 250))
def test_decoders_take_any_bytes(data: bytes, offset: int) -> None:
    assert fmt.decode_frame(data, offset, MARKER) is None
    assert fmt.decode_header(data) is None
    assert fmt.decode_checkpoints(fmt.checkpoint_prefix() + data)[0] is None
    assert fmt.find_frame(data, 0, MARKER, 1) is None


@given(st.binary(max_size=80), st.sampled_from(sorted(set(FRAMES) - {"footer"})), st.binary(max_size=20))
def test_find_frame_finds_the_first_one(before: bytes, kind: str, after: bytes) -> None:
    found = fmt.find_frame(before + FRAMES[kind] + after, 0, MARKER, 1)
    assert found is not None
    assert found[0] == len(before)
    assert found[1].size == len(FRAMES[kind])
    assert fmt.find_frame(before + FRAMES[kind][:-1], 0, MARKER, 1) is None


def place_of(data: bytes, start: int, item_id: int) -> int:
    """Where ``find_frame`` finds one."""
    found = fmt.find_frame(data, start, MARKER, item_id)
    assert found is not None
    return found[0]


def test_find_frame_looks_from_the_id_on() -> None:
    data = FRAMES["item"] + fmt.encode_item(4, b"next", 255, None, 2, MARKER)
    item = len(FRAMES["item"])
    assert place_of(data, 0, 2) == 0  # 2 is missing, and 3 in its place
    assert place_of(data, 0, 3) == item  # it is there that 3 is not intact
    assert place_of(b"?" + data, 0, 3) == 1
    assert place_of(data, 0, 4) == item
    assert place_of(data, 1, 3) == item
    assert fmt.find_frame(data, 0, MARKER, 5) is None
    found = fmt.find_frame(FRAMES["footer"] + data, 0, MARKER, 4)
    assert found is not None
    assert found[0] == fmt.FOOTER_BYTES + len(FRAMES["item"]), "a footer in the way is no end"


def test_what_stands_inside_a_whole_frame_is_its_payload() -> None:
    copy = fmt.encode_item(4, b"once more", 255, None, 4, MARKER)
    data = b"damaged" + fmt.encode_item(3, copy, 255, None, 2, MARKER) + fmt.encode_item(4, b"", 255, None, 3, MARKER)
    assert [frame.first_id for _, frame in fmt.frames_in(data, 0, MARKER)] == [3, 4]
    assert place_of(data, 0, 4) == len(data) - 32
    assert fmt.look_beyond(data, MARKER, 3) == (4, 3)
    assert fmt.look_beyond(data, MARKER, 5) == (0, 0)


def test_markers_everywhere_with_lengths_to_checksum_do_not_make_a_search_last() -> None:
    """Every 32 bytes a header whose checksum has to be taken over all that follows: that is given up."""
    size = 1 << 20
    at = range(0, size, 32)
    data = b"".join(fmt.pack_crc(1) + fmt.pack_frame(size - place - 32, 9, 0, 0, MARKER) for place in at)
    before = time.process_time()
    assert fmt.find_frame(data, 0, MARKER, 1) is None
    assert fmt.look_beyond(data, MARKER, 1) == (0, 0)
    assert time.process_time() - before < 1


def test_a_payload_that_imitates_a_frame_is_none_without_the_marker() -> None:
    imitation = fmt.encode_item(4, b"forged", 255, None, 2, MARKER ^ 0xFFFF)
    data = fmt.encode_item(3, imitation, 255, None, 2, MARKER)
    assert fmt.find_frame(data, 1, MARKER, 1) is None


def test_footer_belongs_to_its_header() -> None:
    header = fmt.SegmentHeader(MARKER, b"q" * 16, 7, 1, 0, 0, 0, 0, 0)
    footer = fmt.SegmentFooter(1, 5, 5, 40, 10, 20, 300)
    data = fmt.encode_footer(footer, 7, MARKER)
    assert len(data) == fmt.FOOTER_BYTES == 96
    assert fmt.decode_footer(data, header) == footer
    assert fmt.decode_footer(data + b"\0", header) is None
    assert fmt.decode_footer(data, fmt.SegmentHeader(MARKER, b"q" * 16, 7, 2, 0, 0, 0, 0, 0)) is None
    assert fmt.decode_footer(data, fmt.SegmentHeader(MARKER + 1, b"q" * 16, 7, 1, 0, 0, 0, 0, 0)) is None
    assert fmt.decode_footer(FRAMES["item"], header) is None
    assert fmt.decode_footer(fmt.encode_footer(footer, 8, MARKER), header) is None
    early = fmt.encode_footer(fmt.SegmentFooter(1, 5, 5, 40, 10, 20, 95), 7, MARKER)
    assert fmt.decode_footer(early, header) is None


@pytest.mark.parametrize(
    "footer",
    [
        fmt.SegmentFooter(1, 5, 4, 40, 10, 20, 300),  # items that are not those of its ids
        fmt.SegmentFooter(7, 5, 0, 0, 10, 20, 300),  # it ends before it begins
        fmt.SegmentFooter(1, fmt.LARGEST + 1, fmt.LARGEST + 1, 40, 10, 20, 300),
        fmt.SegmentFooter(1, 5, 5, 301, 10, 20, 300),  # more data than there are bytes
        fmt.SegmentFooter(1, 5, 5, 40, 10, 20, 95),  # frames that end inside the header
    ],
)
def test_a_footer_that_contradicts_itself_is_none(footer: fmt.SegmentFooter) -> None:
    assert fmt.decode_frame(fmt.encode_footer(footer, 7, MARKER), 0, MARKER) is None


@pytest.mark.parametrize("place", range(7))
def test_a_header_beyond_the_largest_number_is_none(place: int) -> None:
    """What it says may be added to something and stored again: it must still fit then."""
    values = [7, fmt.LARGEST, 0, 0, 0, 0, 0]
    assert fmt.decode_header(fmt.encode_header(fmt.SegmentHeader(MARKER, b"q" * 16, *values))) is not None
    values[place] = fmt.LARGEST + 1
    assert fmt.decode_header(fmt.encode_header(fmt.SegmentHeader(MARKER, b"q" * 16, *values))) is None


def test_a_header_of_another_size_is_none() -> None:
    data = bytearray(fmt.encode_header(fmt.SegmentHeader(MARKER, b"q" * 16, 7, 1, 0, 0, 0, 0, 0)))
    data[10] += 1
    data[92:] = crc32(data[:92]).to_bytes(4, "little")
    assert fmt.decode_header(bytes(data)) is None


def test_a_header_that_begins_before_the_segment_before_it_ends_is_none() -> None:
    assert fmt.decode_header(fmt.encode_header(fmt.SegmentHeader(MARKER, b"q" * 16, 7, 5, 4, 0, 6, 4, 99))) is not None
    assert fmt.decode_header(fmt.encode_header(fmt.SegmentHeader(MARKER, b"q" * 16, 7, 5, 4, 0, 6, 5, 99))) is None


# -- checkpoints -----------------------------------------------------------------------------------------------------


@st.composite
def checkpoints(draw: Any) -> fmt.Checkpoint:
    head = draw(st.integers(0, 1 << 40))
    steps = draw(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), max_size=6))
    spans, at = [], head
    for gap, length in steps:
        spans.append((at + gap, at + gap + length))
        at += gap + length
    return fmt.Checkpoint(
        queue_id=draw(st.binary(min_size=16, max_size=16)),
        reader=draw(st.from_regex(r"\A[a-z_-]{0,100}\Z")),
        head=head,
        watermark=draw(VALUES),
        released_items=draw(VALUES),
        released_bytes=draw(VALUES),
        hint_number=draw(VALUES),
        hint_offset=draw(VALUES),
        hint_id=draw(VALUES),
        flags=draw(st.integers(0, 1)),
        done=tuple(spans),
        error_counts=tuple(draw(st.lists(st.tuples(st.integers(1, fmt.LARGEST), U32), max_size=5))),
        skipped=draw(U32),
    )


@given(st.lists(checkpoints(), min_size=1, max_size=3))
def test_checkpoint_round_trip_the_last_whole_one_counts(states: list[fmt.Checkpoint]) -> None:
    data = fmt.checkpoint_prefix() + b"".join(map(fmt.encode_checkpoint, states))
    assert fmt.decode_checkpoints(data) == (states[-1], len(data))
    whole = len(data) - len(fmt.encode_checkpoint(states[-1]))
    expected = states[-2] if len(states) > 1 else None
    assert fmt.decode_checkpoints(data[:-1]) == (expected, whole)


def test_every_flipped_bit_and_every_cut_of_a_checkpoint_is_seen() -> None:
    """R3, and the repaired Kafka and logstash faults: a damaged state never counts as another one."""
    first = fmt.Checkpoint(b"q" * 16, "audit", 5, 9, 5, 50)
    second = fmt.Checkpoint(b"q" * 16, "audit", 7, 9, 7, 70, done=((9, 12),), error_counts=((8, 3),))
    kept = fmt.checkpoint_prefix() + fmt.encode_checkpoint(first)
    data = kept + fmt.encode_checkpoint(second)
    for bit in range(len(kept) * 8, len(data) * 8):
        assert fmt.decode_checkpoints(flipped(data, bit)) == (first, len(kept))
    for size in range(len(kept), len(data)):
        assert fmt.decode_checkpoints(data[:size]) == (first, len(kept))


def test_a_state_of_another_series_than_the_first_ends_a_checkpoint_file() -> None:
    """It was in another file, in that place."""
    states = [fmt.Checkpoint(b"q" * 16, "r", head, 0, 0, 0, flags=fmt.FLAG_INHERITED) for head in range(3)]
    data = fmt.checkpoint_prefix() + fmt.encode_checkpoint(states[0], 7) + fmt.encode_checkpoint(states[1], 7)
    assert fmt.checkpoint_series(data) == 7
    for series in (0, 6, fmt.SERIES - 1):
        assert fmt.decode_checkpoints(data + fmt.encode_checkpoint(states[2], series)) == (states[1], len(data))
    assert fmt.decode_checkpoints(data + fmt.encode_checkpoint(states[2], 7))[0] == states[2]
    assert fmt.checkpoint_series(b"no state") == 0


def test_checkpoint_version() -> None:
    assert fmt.checkpoint_version(fmt.checkpoint_prefix()) == 1
    assert fmt.checkpoint_version(fmt.checkpoint_prefix()[:15]) is None
    assert fmt.checkpoint_version(bytes(16)) is None
    assert fmt.checkpoint_version(fmt.CHECKPOINT_MAGIC + b"\2\0" + bytes(6)) == 2


@pytest.mark.parametrize("spans", [((5, 5),), ((9, 8),), ((7, 9), (9, 10)), ((9, 10), (7, 7))])
def test_spans_that_do_not_rise_are_no_checkpoint(spans: tuple[tuple[int, int], ...]) -> None:
    data = fmt.checkpoint_prefix() + fmt.encode_checkpoint(fmt.Checkpoint(b"q" * 16, "", 5, 5, 5, 5, done=spans))
    assert fmt.decode_checkpoints(data)[0] is None


def test_highest_id_is_the_last_one_done() -> None:
    assert fmt.Checkpoint(b"q" * 16, "", 5, 5, 5, 5).highest_id == 5
    assert fmt.Checkpoint(b"q" * 16, "", 5, 5, 5, 5, done=((7, 7), (9, 12))).highest_id == 12


def test_lengths_in_a_checkpoint_are_bounded_by_the_file() -> None:
    """R21, nsq #471: a length that claims more than there is, with a good checksum, is refused and nothing is
    allocated.
    """
    body = bytearray(fmt.encode_checkpoint(fmt.Checkpoint(b"q" * 16, "", 5, 5, 5, 5))[8:])
    generator = random.Random(1)
    for _ in range(200):
        forged = bytearray(body)
        for at in range(len(body) - 12, len(body)):  # flags, name bytes, spans, error counts
            forged[at] = generator.choice([0, 1, 0x7F, 0xFF])
        data = crc32(forged, len(forged)).to_bytes(4, "little") + len(forged).to_bytes(4, "little") + bytes(forged)
        state, _ = fmt.decode_checkpoints(fmt.checkpoint_prefix() + data)
        assert state is None or forged[-10:] == bytes(10)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("field", range(4))
def test_a_checkpoint_beyond_the_largest_number_is_none(field: int) -> None:
    """Head, watermark, released items and bytes stand one behind the other."""
    for value, valid in ((fmt.LARGEST, True), (fmt.LARGEST + 1, False)):
        body = bytearray(fmt.encode_checkpoint(fmt.Checkpoint(b"q" * 16, "", 5, 5, 5, 5))[8:])
        body[16 + 8 * field : 24 + 8 * field] = value.to_bytes(8, "little")
        data = crc32(body, len(body)).to_bytes(4, "little") + len(body).to_bytes(4, "little") + bytes(body)
        assert (fmt.decode_checkpoints(fmt.checkpoint_prefix() + data)[0] is not None) is valid


@pytest.mark.parametrize(("released", "stored"), [(-5, 0), (fmt.LARGEST + 5, fmt.LARGEST), (7, 7)])
def test_counts_that_forged_files_led_to_are_stored_as_far_as_they_go(released: int, stored: int) -> None:
    state = fmt.Checkpoint(b"q" * 16, "", 5, 5, released, released)
    found, _ = fmt.decode_checkpoints(fmt.checkpoint_prefix() + fmt.encode_checkpoint(state))
    assert found is not None
    assert (found.released_items, found.released_bytes) == (stored, stored)


def test_an_error_count_stays_at_its_largest() -> None:
    state = fmt.Checkpoint(b"q" * 16, "", 5, 5, 5, 5, error_counts=((7, fmt.MOST_ERRORS + 1),), skipped=1 << 40)
    found, _ = fmt.decode_checkpoints(fmt.checkpoint_prefix() + fmt.encode_checkpoint(state))
    assert found is not None
    assert (found.error_counts, found.skipped) == (((7, fmt.MOST_ERRORS),), fmt.MOST_ERRORS)
