"""Every byte of a small queue is flipped, and every file is cut at every place; and damages together, drawn by
hypothesis. Each queue is repaired, and judged by ``repairing.py``; faults that are planted in the repair are found.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kestrelpy import RepairLoss
from kestrelpy._journal import salvage
from kestrelpy.inspection.repair import QueueRepair
from kestrelpy.inspection.repair_files import RepairStage
from tests.fuzz.damages import DAMAGES
from tests.fuzz.reference import Case, healthy, small
from tests.fuzz.repairing import BrokenRepair, judge_repair, move_heads
from tests.support.budget import ALL, SEED, share

STEP = 1 if ALL else 16
pytestmark = pytest.mark.usefixtures("quiet")


HITS = [
    *("flip_bits", "byte_run", "zeroed_page", "swapped_blocks", "inserted_bytes"),
    *("removed_bytes", "truncated", "extended", "appended_file", "deleted_file"),
]
"""What disks do. Where hands have put a copy in the place of a file, nothing shows which of two is right."""


def places(case: Case) -> list[tuple[str, int]]:
    """Each byte that is in use, and the end of each file."""
    return [(name, at) for name, data in sorted(case.files.items()) for at in range(len(data.rstrip(b"\0")) + 1)]


def flipped(case: Case, name: str, at: int) -> dict[str, bytes]:
    data = case.files[name]
    return {**case.files, name: data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]}


def flip_all(step: int, case: Case) -> Counter[str]:
    counter = Counter[str]()
    for name, at in places(case)[SEED % step :: step]:
        if at < len(case.files[name]):
            try:
                counter[judge_repair(flipped(case, name, at), case, strict=True)] += 1
            except BrokenRepair as broken:
                raise BrokenRepair(f"{name}, byte {at}: {broken}") from broken
    return counter


def cut_all(step: int, case: Case) -> Counter[str]:
    counter = Counter[str]()
    for name, at in places(case)[SEED % step :: step]:
        try:
            counter[judge_repair({**case.files, name: case.files[name][:at]}, case, strict=False)] += 1
        except BrokenRepair as broken:
            raise BrokenRepair(f"{name}, cut at {at}: {broken}") from broken
    return counter


def test_m1_every_byte_flipped() -> None:
    counter = flip_all(STEP, small())
    assert counter["damaged"] > 800 / STEP
    assert counter["newer"] < 10


def test_m2_every_cut() -> None:
    assert cut_all(STEP, small())["damaged"] > 800 / STEP


def test_queues_that_differ() -> None:
    """Several segments, torn tails, deaths; numbers of segments that follow one another."""
    counter = Counter[str]()
    for seed in range(share(60)):
        counter += flip_all(40, healthy(SEED * 1000 + seed)) if healthy(SEED * 1000 + seed).put else Counter()
    assert counter["damaged"] > 5


@settings(max_examples=share(2_000), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.integers(0, 30), st.integers(0, 1 << 32), st.lists(st.sampled_from(HITS), min_size=1, max_size=4))
def test_damages_together(case_seed: int, seed: int, names: list[str]) -> None:
    case, other = healthy(case_seed), healthy(case_seed + 1)
    files, generator = dict(case.files), random.Random(seed)
    if any(name.endswith(".segment") for name in case.files):
        for name in names:
            if len(files) > 1:
                DAMAGES[name](files, generator, case, other)
        judge_repair(files, case, strict=False)


# -- planted faults --------------------------------------------------------------------------------------------------


def lose_behind() -> Any:
    return mock.patch.object(salvage.fmt, "find_frame", return_value=None)


def forget_bytes() -> Any:
    return mock.patch.object(RepairStage, "keep", return_value=None)


@contextmanager
def dry_run_writes() -> Iterator[None]:
    real = QueueRepair._repair
    with mock.patch.object(QueueRepair, "_repair", lambda self, *, dry_run: real(self, dry_run=False)):
        yield


def believe_no_header() -> Any:
    return mock.patch.object(salvage.Salvage, "_find_header", return_value=None)


def forget_to_say() -> Any:
    def bare(self: QueueRepair, bad: salvage.BadBytes, _: object) -> RepairLoss:
        return RepairLoss(bad.name, bad.offset, bad.size, bad.reason)

    return mock.patch.object(QueueRepair, "_loss_of", bare)


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "it loses the items behind a bad one": (lose_behind, "3"),
    "it keeps no bad bytes": (forget_bytes, "5"),
    "a reader is moved over items": (move_heads, "6"),
    "the dry run writes": (dry_run_writes, "1"),
    "a segment without a header is given up": (believe_no_header, "3"),
    "what is lost is not said": (forget_to_say, "4"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    plant, rule = FAULTS[name]
    case = small()
    with plant(), pytest.raises(BrokenRepair, match=f": {rule}: |^{rule}: "):
        flip_all(3, case)
