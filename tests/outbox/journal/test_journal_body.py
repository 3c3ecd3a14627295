"""The bodies of jobs of an outbox in a work queue: their bytes, and how they change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrelpy import UnsupportedFormat
from kestrelpy.outbox import journal_body
from kestrelpy.outbox.journal_body import (
    ERROR,
    MAX_ERROR_BYTES,
    NONE,
    READY,
    JobBody,
    body_of_row,
    check_version,
    decode,
    new_body,
    payload_bytes,
    stored_priority,
)

HEAD_BYTES = 62
GOLDEN = bytes.fromhex(
    "6b4f4201"  # the magic, and the version
    "01"  # in error
    "00"  # a text
    "02000000"  # tries
    "05000000"  # reservations by then
    "e803000000000000"  # added_ms
    "d007000000000000"  # due_ms
    "dc05000000000000"  # started_ms
    "ffffffffffffffff"  # finished_ms: none
    "4006000000000000"  # first_error_ms
    "0100"
    "0200"
    "0000"
    "0300"
    "67"
    "7b7d"
    "457272"
    "22c3bc22"
)
"""A body of version 1. Never edited: later versions must read it."""
OF_GOLDEN = JobBody(ERROR, 0, 2, 5, 1000, 2000, 1500, NONE, 1600, "g", "{}", "Err", '"ü"'.encode())

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
MAYBE = st.none() | TEXTS.filter(bool)
INSTANTS = st.integers(-1, 1 << 53)
BODIES = st.builds(
    JobBody,
    st.integers(0, 3),
    st.just(1),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, (1 << 32) - 1),
    *[INSTANTS] * 5,
    MAYBE,
    MAYBE,
    MAYBE,
    st.binary(max_size=100),
    is_own=st.just(True),
)


def test_the_bytes_of_version_1() -> None:
    assert decode(GOLDEN, 7) == OF_GOLDEN
    assert OF_GOLDEN.encode() == GOLDEN
    assert len(GOLDEN) == HEAD_BYTES + 1 + 2 + 3 + 4


@given(BODIES)
def test_what_is_encoded_is_decoded(body: JobBody) -> None:
    encoded = body.encode()
    assert decode(encoded, 7) == body
    assert payload_bytes(encoded) == len(body.payload)
    check_version(encoded, "here")


@given(BODIES, st.integers(0, 300))
def test_an_error_is_cut_to_its_end(body: JobBody, most: int) -> None:
    encoded = body.encode(most)
    found = decode(encoded, 7)
    assert (body.error or "").endswith(found.error or "")
    assert found._replace(error=None) == body._replace(error=None)
    without = len(body._replace(error=None).encode())
    assert len(encoded) <= max(most, without)
    whole = len((body.error or "").encode())
    assert found.error == body.error or len(encoded) + 4 > min(most, without + whole)  # a character has up to 4 bytes


def test_no_change_of_the_head_makes_a_body_longer() -> None:
    new = new_body("text", added_ms=1, due_ms=2, group="g", context="{}")
    changed = decode(new, 0)._replace(
        status=3, tries=1 << 31, reserves=1 << 31, due_ms=1 << 60, started_ms=1 << 60, first_error_ms=1 << 60, error="E"
    )
    assert len(changed.encode(len(new))) == len(new)
    assert decode(changed.encode(len(new)), 0).error is None


def test_an_error_of_any_length_and_with_surrogates() -> None:
    body = OF_GOLDEN._replace(error="ä" * MAX_ERROR_BYTES + "\ud800")
    error = decode(body.encode(), 0).error
    assert error is not None
    assert error.endswith("ä\\ud800")
    assert MAX_ERROR_BYTES - 4 < len(error.encode()) <= MAX_ERROR_BYTES


@pytest.mark.parametrize("body", [b"", b"{}", b"kOB", b"kOB\x01", GOLDEN[:50], b"\xff\0", "ü".encode()])
def test_a_body_of_others_is_a_payload(body: bytes) -> None:
    found = decode(body, 77)
    assert (found.payload, found.is_own, found.added_ms, found.due_ms, found.status) == (body, False, 77, 77, READY)
    assert found.is_binary == (body == b"\xff\0" or (body.startswith(b"kOB\x01") and len(body) > 40))
    assert payload_bytes(body) == len(body)


def test_a_later_version_is_refused() -> None:
    check_version(GOLDEN, "here")
    check_version(b"kOB", "here")
    with pytest.raises(
        UnsupportedFormat, match="job 7 of work queue w has format version 2; this kestrelpy reads up to 1"
    ):
        check_version(b"kOB\x02", "job 7 of work queue w")


def test_tries_are_counted_by_reservations() -> None:
    assert OF_GOLDEN.tries_at(5) == 2
    assert OF_GOLDEN.tries_at(6) == 3


def test_the_body_of_a_row() -> None:
    row = [7, "mail", None, "g", None, "running", 3, '"ü"', None, "{}", None, 2, 1000, 9, 8, None, 1600, "Err", "w"]
    assert body_of_row(row, 2000) == OF_GOLDEN._replace(status=READY, reserves=0, started_ms=NONE)
    binary = body_of_row([*row[:7], None, b"\0", *row[9:16], None, *row[17:]], 5)
    assert (binary.payload, binary.is_binary, binary.first_error_ms) == (b"\0", 1, NONE)


def test_priorities_keep_their_order() -> None:
    assert [stored_priority(each) for each in (-(1 << 31), -1, 0, (1 << 31) - 1)] == [
        0,
        (1 << 31) - 1,
        1 << 31,
        (1 << 32) - 1,
    ]
    assert journal_body.PRIORITIES == 1 << 31
