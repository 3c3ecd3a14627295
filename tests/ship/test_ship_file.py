"""``jobs.ship``: what is written is read, and what is damaged is not believed."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrelpy import CorruptJournal, UnsupportedFormat
from kestrelpy._disk.real import RealDisk
from kestrelpy.ship.ship_file import (
    MAX_URL_BYTES,
    MOST_NONCES,
    ShipFile,
    decode_ship_file,
    encode_ship_file,
    read_ship_file,
    write_ship_file,
)
from kestrelpy.testing import MemoryDisk

QUEUE_ID = bytes(range(16))
NONCES = (bytes([1]) * 16, bytes([2]) * 16)
FULL = ShipFile("s3://bucket/prod", QUEUE_ID, NONCES, 7, 1234, 99, True, True)

_number = st.integers(0, 2**63 - 1)
states = st.builds(
    ShipFile,
    st.text(max_size=50),
    st.binary(min_size=16, max_size=16),
    st.lists(st.binary(min_size=16, max_size=16), max_size=3).map(tuple),
    _number,
    _number,
    _number,
    st.booleans(),
    st.booleans(),
)


@given(states)
def test_what_is_written_is_read(state: ShipFile) -> None:
    folder = MemoryDisk().directory("/queues", create=True)
    assert read_ship_file(folder, "jobs") is None
    write_ship_file(folder, "jobs", state)
    assert read_ship_file(folder, "jobs") == state


def test_any_byte_changed_is_noticed() -> None:
    data = encode_ship_file(FULL)
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        assert decode_ship_file(changed) is None, at
        assert decode_ship_file(data[:at]) is None, at
    assert decode_ship_file(data + b"\0") is None


def test_damage_is_told_from_a_newer_version() -> None:
    folder = MemoryDisk().directory("/queues", create=True)
    data = bytearray(encode_ship_file(FULL))
    for at, error in ((30, CorruptJournal), (8, UnsupportedFormat)):
        changed = bytearray(data)
        changed[at] ^= 2
        file = folder.create("jobs.ship")
        file.write(0, bytes(changed))
        file.close()
        with pytest.raises(error):
            read_ship_file(folder, "jobs")
        folder.unlink("jobs.ship")


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """Its size is nothing to allocate by: it may be a hole of terabytes."""
    folder = RealDisk().directory(str(tmp_path))
    largest = ShipFile("x" * MAX_URL_BYTES, QUEUE_ID, NONCES[:1] * MOST_NONCES)
    write_ship_file(folder, "jobs", largest)
    assert read_ship_file(folder, "jobs") == largest
    os.truncate(tmp_path / "jobs.ship", 1 << 43)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptJournal):
            read_ship_file(folder, "jobs")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
        folder.close()


def test_each_opening_adds_its_nonce_and_the_next_good_one_forgets_the_rest() -> None:
    state = ShipFile("file:///store", QUEUE_ID)
    for each in NONCES:
        state = state.opening(each)
    assert state.nonces == NONCES
    assert state.opened(NONCES[1], 3, 17) == ShipFile("file:///store", QUEUE_ID, NONCES[1:], 3, 17)
    for number in range(2 * MOST_NONCES):
        state = state.opening(number.to_bytes(16, "big"))
    assert len(state.nonces) == MOST_NONCES
    assert decode_ship_file(encode_ship_file(state)) == state


def test_a_url_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="65536"):
        encode_ship_file(ShipFile("u" * 65536, QUEUE_ID))
