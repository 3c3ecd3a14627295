"""Crash states of moves to a dead-letter queue and back keep every promise, on disks that fail too; and the explorer
catches each planted fault.

A failure names the seed of its world.
"""

from __future__ import annotations

import re

import pytest

from tests.crash import dead_explorer
from tests.crash.dead_explorer import DeadExplorer
from tests.crash.dead_planted import FAULTS
from tests.crash.promise import BrokenPromise
from tests.support.budget import SEED, Tally, drawn, share

pytestmark = pytest.mark.usefixtures("quiet")
PARTS, STATES = 10, 5_000
KINDS = {"kill", "PREFIX", "EXT4", "ANY", "in an owner"}


@pytest.mark.parametrize("part", range(PARTS))
def test_every_crash_state_of_a_move_keeps_the_promises(part: int, tally: Tally) -> None:
    wanted = share(STATES)
    counts = dead_explorer.run(SEED * PARTS + part, wanted)
    tally.add("crash states of moves", counts)
    assert counts.total() >= wanted
    if wanted > 1_000:
        assert counts.keys() == KINDS


@pytest.mark.parametrize("name", drawn(FAULTS, 4))
def test_caught(name: str, tally: Tally) -> None:
    fault = FAULTS[name]
    with fault.plant(), pytest.raises(BrokenPromise) as caught:
        DeadExplorer(**{"seed": 1, "limit": 12_000, **fault.options}).run()
    found = set(re.findall(r"\([a-f]\)", str(caught.value)))
    assert found & set(fault.invariants.split()), caught.value
    tally.add("planted faults caught", 1)


def test_there_are_enough_of_them() -> None:
    assert len(FAULTS) >= 10
