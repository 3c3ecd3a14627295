"""Crash states of a kestrel server's queues keep every promise, and planted faults are caught.

A failure names the seed of its program, the letter of the promise, and the program's steps.
"""

from __future__ import annotations

import re

import pytest

from tests.server.kestrel.crash import BrokenPromise, KestrelExplorer
from tests.server.kestrel.kestrel_planted import FAULTS
from tests.support.budget import SEED, Tally, drawn, share

pytestmark = pytest.mark.usefixtures("quiet")
PARTS, STATES = 4, 13_000
KINDS = {"kill", "PREFIX", "EXT4", "ANY", "in the start"}


@pytest.mark.parametrize("part", range(PARTS))
def test_every_crash_state_keeps_the_promises(part: int, tally: Tally) -> None:
    """KP-2.21: fan-out: after a crash all of them have an item, or none."""
    wanted = share(STATES)
    explorer = KestrelExplorer((SEED * PARTS + part) * 1_000_000, wanted)
    explorer.run()
    tally.add("crash states of kestrel's queues", explorer.counts)
    assert explorer.counts.total() >= wanted
    if wanted > 1_000:
        assert explorer.counts.keys() == KINDS


def test_a_seed_leads_to_the_same_states() -> None:
    def counts() -> dict[str, int]:
        explorer = KestrelExplorer(SEED, 100)
        explorer.run()
        return dict(explorer.counts)

    assert counts() == counts()


@pytest.mark.parametrize("name", drawn(FAULTS, 5))
def test_caught(name: str, tally: Tally) -> None:
    """A planted fault is found within some thousand states, and it is said which promise it breaks."""
    fault = FAULTS[name]
    explorer = KestrelExplorer(1, 6_000, **fault.options)
    with fault.plant(), pytest.raises(BrokenPromise) as caught:
        explorer.run()
    found = re.findall(r"\([a-e]\)", str(caught.value))
    assert set(found) & set(fault.letters.split()), caught.value
    tally.add("planted faults caught", 1)
