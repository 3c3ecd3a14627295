"""Every single-bit flip and every truncation of a small queue, each opened, drained, scanned and verified.

What is asked of each stands at the top of ``judge.py``. Nothing is sampled by ``make test-all``: there are some 12,000
flips and 1,500 truncations, each judged with both settings of ``on_corruption``. ``make test`` takes an eighth of each.
"""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest

from kestrelpy._journal import format as fmt
from tests.fuzz.judge import BrokenInvariant, judge, rearm, watched
from tests.fuzz.naive_reader import read_queue
from tests.fuzz.reference import NAME, small
from tests.support.budget import ALL, SEED

PARTS = 16
THOROUGH_EVERY = 8


def flip(files: dict[str, bytes], bit: int) -> dict[str, bytes]:
    """The files with one bit flipped, counted through all of them."""
    for name, data in sorted(files.items()):
        if bit < 8 * len(data):
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            return {**files, name: bytes(changed)}
        bit -= 8 * len(data)
    raise AssertionError("there are not so many bits")


def run(part: int, parts: int = PARTS) -> Counter[str]:
    """Every flip, from ``part`` on in steps of ``parts``, in both modes; what came of them."""
    case, counter = small(), Counter[str]()
    with watched():
        for bit in range(part, 8 * sum(map(len, case.files.values())), parts):
            rearm()
            files = flip(case.files, bit)
            reading = read_queue(files, NAME)
            for mode in ("raise", "quarantine"):
                try:
                    thorough = mode == "raise" and bit // parts % THOROUGH_EVERY == 0
                    counter[judge(files, case, mode, thorough=thorough, looking=mode == "raise", reading=reading)] += 1
                except BrokenInvariant as broken:
                    raise AssertionError(f"bit {bit}, {mode}: {broken}") from broken
    return counter


@pytest.mark.parametrize("part", range(PARTS) if ALL else [SEED % PARTS])
def test_every_flipped_bit(part: int) -> None:
    counter = run(part)
    print(f"flips: {dict(counter)}")
    assert counter["CorruptJournal"] > 250
    assert counter["some quarantined"] > 150


def test_every_truncation() -> None:
    case, counter = small(), Counter[str]()
    with watched():
        for name, data in case.files.items():
            for size in range(0 if ALL else SEED % PARTS, len(data), 1 if ALL else PARTS):
                rearm()
                for mode in ("raise", "quarantine"):
                    files = {**case.files, name: data[:size]}
                    try:
                        counter[judge(files, case, mode, thorough=size % 4 == 0, looking=mode == "raise")] += 1
                    except BrokenInvariant as broken:
                        raise AssertionError(f"{name} cut to {size}, {mode}: {broken}") from broken
    print(f"truncations: {dict(counter)}")
    assert counter["CorruptJournal"] > (500 if ALL else 30)


class Agreeable(int):
    """A checksum that is equal to every other."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def test_a_flip_that_nobody_sees_would_be_found() -> None:
    """The harness sees what it is for: without checksums a flipped bit is delivered."""
    small()  # made beforehand, with checksums
    blind = mock.Mock(return_value=Agreeable())
    with (
        mock.patch.object(fmt, "crc32", blind),
        mock.patch("kestrelpy._journal.segment.crc32", blind),
        pytest.raises(AssertionError, match=r"never put|not given"),
    ):
        run(0)
