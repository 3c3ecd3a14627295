"""Any program on a queue, read as Arrow at every step, and faults that are planted: each is found, by its name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kestrelpy.arrow import bounds, columns, decode, pieces, plan, reading
from kestrelpy.arrow.wanted import Wanted
from kestrelpy.errors import KestrelError
from tests.arrow.programs import Program
from tests.support.budget import SEED, share, takes_long

STEPS = 12
Planted = Callable[[], AbstractContextManager[Any]]


@settings(max_examples=share(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 1 << 32))
def test_any_program(seed: int) -> None:
    Program(random.Random(seed)).play(STEPS)


@takes_long
def test_the_programs_meet_what_they_are_for() -> None:
    saw: set[str] = set()
    for seed in range(200):
        program = Program(random.Random(SEED * 1000 + seed))
        program.play(STEPS)
        saw |= program.saw
        if len(saw) == 6:
            return
    pytest.fail(f"only {sorted(saw)}")


# -- planted faults --------------------------------------------------------------------------------------------------


def _includes_its_end(self: Wanted, stop_id: int) -> Wanted:
    return self._replace(stop_id=min(self.stop_id, stop_id + 1))


@contextmanager
def _no_checksum() -> Iterator[None]:
    with (
        patch.object(decode, "_is_intact", lambda data, starts, heads: True),
        patch.object(decode, "_intact", lambda data, starts, heads: len(starts)),
    ):
        yield


def _rounded_down(name: str, value: Any) -> int:
    return int(value.timestamp() * 1000 // 1) if hasattr(value, "timestamp") else int(value)


@contextmanager
def _expand_without_gaps() -> Iterator[None]:
    """The offsets of data are counted as if nothing lay between the items."""
    original = columns._bytes

    def packed(data: Any, starts: Any, sizes: Any, ids: Any) -> pa.Array:
        ends = np.cumsum(sizes)
        return original(data, starts[0] + ends - sizes, sizes, ids)

    with patch.object(columns, "_bytes", packed):
        yield


@contextmanager
def _read_at_once() -> Iterator[None]:
    original = reading._from_folders

    def at_once(*chosen: Any) -> Iterator[pa.RecordBatch]:
        try:
            return iter(list(original(*chosen)))
        except KestrelError:
            return original(*chosen)

    with patch.object(reading, "_from_folders", at_once):
        yield


@contextmanager
def _first_cut_only() -> Iterator[None]:
    original = columns._cut
    with patch.object(columns, "_cut", lambda sizes: list(original(sizes))[:1]):
        yield


@contextmanager
def _without_archive() -> Iterator[None]:
    original = reading._from_folders
    with patch.object(reading, "_from_folders", lambda disk, folders, chosen: original(disk, folders[:1], chosen)):
        yield


FAULTS: dict[str, Planted] = {
    "an end is inclusive": lambda: patch.object(Wanted, "ids_before", _includes_its_end),
    "a time is rounded down": lambda: patch.object(bounds, "_milliseconds", _rounded_down),
    "columns come in the order of the schema": lambda: patch.object(
        reading, "names_of", lambda names: tuple(each for each in columns.COLUMNS if names is None or each in names)
    ),
    "no checksum is checked": _no_checksum,
    "damage ends a segment in silence": lambda: patch.object(pieces.PieceReader, "_check_end", lambda *_: None),
    "a batch that is too large loses its rest": _first_cut_only,
    "data is read beside where it is": _expand_without_gaps,
    "an expiry is not shown": lambda: patch.object(
        columns, "_expiries", lambda values: pa.nulls(len(values), pa.timestamp("us", tz="UTC"))
    ),
    "error counts are not shown": lambda: patch.object(plan, "counts_within", lambda counts, wanted: ()),
    "the archive is not asked": _without_archive,
    "what is put before the first batch is not there": _read_at_once,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    with ExitStack() as stack:
        stack.enter_context(FAULTS[name]())
        for seed in range(300):
            try:
                Program(random.Random(seed)).play(STEPS)
            except AssertionError:
                return
    pytest.fail(f"{name}: nothing is seen")
