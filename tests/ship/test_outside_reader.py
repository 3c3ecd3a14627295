"""The commits of readers outside: their bytes, and whatever is not exactly one is not taken for one."""

from __future__ import annotations

import re
from random import Random
from zlib import crc32

import pytest

from kestrelpy.ship.outside_reader import (
    MOST_COMMITS,
    OutsideReader,
    decode_outside,
    encode_outside,
    outside_key,
    outside_version,
    parse_outside_key,
)
from tests.ship.examples import NONCE, QUEUE_ID
from tests.ship.logs import flipped, mutated
from tests.support.budget import SEED, share
from tests.support.paths import ROOT

EXAMPLE = OutsideReader(QUEUE_ID, NONCE, 5)


def test_documented_example() -> None:
    """These bytes are never edited."""
    shown = re.search(r"```hex example=outside\n(.*?)```", (ROOT / "docs" / "format.md").read_text(), re.DOTALL)
    assert shown is not None
    data = bytes.fromhex(shown[1])
    assert encode_outside(EXAMPLE) == data
    assert decode_outside(data) == EXAMPLE


def test_every_flipped_bit_and_every_other_length_is_refused() -> None:
    data = encode_outside(EXAMPLE)
    assert [bit for bit in range(8 * len(data)) if decode_outside(flipped(data, bit)) is not None] == []
    assert [size for size in range(len(data)) if decode_outside(data[:size]) is not None] == []
    assert decode_outside(data + b"\0") is None


def test_mutations() -> None:
    random, data = Random(SEED), encode_outside(EXAMPLE)
    for _ in range(share(20_000)):
        changed = mutated(data, random)
        found = decode_outside(changed)
        assert found is None or encode_outside(found) == changed


@pytest.mark.parametrize(("at", "value"), [(8, 2), (10, 1), (15, 1), (55, 0x80)])
def test_what_is_whole_and_no_commit(at: int, value: int) -> None:
    """Another version, bytes that are not used, an id that no item can have: each with the crc that it needs."""
    data = bytearray(encode_outside(EXAMPLE))
    data[at] = value
    whole = bytes(data[:-4]) + crc32(data[:-4]).to_bytes(4, "little")
    assert decode_outside(whole) is None
    assert outside_version(whole) == (2 if at == 8 else 1)


@pytest.mark.parametrize("name", ["spark", "a" * 100, "_x-9"])
def test_keys(name: str) -> None:
    for number in (1, MOST_COMMITS):
        assert parse_outside_key(outside_key(name, number)) == (name, number)


@pytest.mark.parametrize(
    "key",
    [
        "reader/spark/0000000000000",
        "reader/spark/000000000001",
        "reader/spark/00000000000001",
        "reader/spark/0000000000001.tmp",
        "reader/spark/0000000000001\n",
        "reader/spark/00000000000\u06601",
        "reader/../0000000000001",
        "reader/-x/0000000000001",
        "reader//0000000000001",
        "reader/a/b/0000000000001",
        f"reader/{'a' * 101}/0000000000001",
        "readers/spark/0000000000001",
    ],
)
def test_keys_that_are_none(key: str) -> None:
    assert parse_outside_key(key) is None
