"""The inside of a batch: joined and split, of even and of uneven items, and refused where it does not fit."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrelpy._journal.packing import EVEN_RUN, TABLE_BYTES, join_batch, split_batch


def joined(items: list[bytes]) -> bytes:
    return join_batch(b"", items, [len(item) for item in items])


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=40))
def test_what_was_joined_is_split_again(items: list[bytes]) -> None:
    assert split_batch(joined(items)) == items
    assert split_batch(join_batch(b"", tuple(items), tuple(map(len, items)))) == items


@pytest.mark.parametrize("count", [1, EVEN_RUN - 1, EVEN_RUN, EVEN_RUN + 1, 3 * EVEN_RUN])
@pytest.mark.parametrize("size", [0, 1, 7])
def test_items_of_one_size_are_split_at_the_right_places(count: int, size: int) -> None:
    items = [(b"%07d" % number)[7 - size :] for number in range(count)]
    assert split_batch(joined(items)) == items


def test_a_head_stands_in_front() -> None:
    batch = join_batch(b"head", [b"a", b"bc"], [1, 2])
    assert batch.startswith(b"head")
    assert split_batch(batch[4:]) == [b"a", b"bc"]


@pytest.mark.parametrize("items", [[b"abc", b"def"], [b"abc", b"de"], [b"", b""]])
def test_a_batch_that_does_not_fit_its_bytes_is_none(items: list[bytes]) -> None:
    batch = joined(items)
    for end in range(len(batch)):
        assert split_batch(batch[:end]) is None
    assert split_batch(batch + b"\0") is None
    for at in range(0, TABLE_BYTES * (len(items) + 1), TABLE_BYTES):
        for wrong in (struct.unpack_from("<I", batch, at)[0] + 1, 0xFFFFFFFF):
            changed = batch[:at] + struct.pack("<I", wrong) + batch[at + TABLE_BYTES :]
            assert split_batch(changed) is None


def test_nothing_is_a_batch_of_nothing() -> None:
    assert split_batch(struct.pack("<I", 0)) == []
    assert split_batch(b"") is None
    assert split_batch(struct.pack("<I", 0) + b"x") is None
