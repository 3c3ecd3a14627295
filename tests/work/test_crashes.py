"""Crash states of a work queue keep every promise, so does a queue on a disk that fails; and planted faults are caught.

A failure names the seed of its program, and the letter of the promise.
"""

from __future__ import annotations

import re

import pytest

from tests.support.budget import SEED, Tally, drawn, share, takes_long
from tests.work.crash import BrokenPromise, WorkExplorer
from tests.work.faults import WorkFaults
from tests.work.work_planted import FAULTS

pytestmark = pytest.mark.usefixtures("quiet")
PARTS, STATES, ERRORS = 2, 2_000, 80
KINDS = {"kill", "PREFIX", "EXT4", "ANY", "in recovery"}


@pytest.mark.parametrize("part", range(PARTS))
def test_every_crash_state_keeps_the_promises(part: int, tally: Tally) -> None:
    wanted = share(STATES)
    explorer = WorkExplorer((SEED * PARTS + part) * 1_000_000, wanted)
    explorer.run()
    tally.add("crash states of work queues", explorer.counts)
    assert explorer.counts.total() >= wanted
    if wanted > 1_000:
        assert explorer.counts.keys() == KINDS


@pytest.mark.parametrize("part", range(PARTS))
def test_a_failing_disk_loses_no_job(part: int, tally: Tally) -> None:
    faults = WorkFaults((SEED * PARTS + part) * 1_000_000, share(ERRORS))
    faults.run()
    tally.add("faults injected into work queues", faults.counts)
    assert faults.counts.total() >= share(ERRORS)


@takes_long
def test_a_seed_leads_to_the_same_states() -> None:
    def counts() -> dict[str, int]:
        explorer = WorkExplorer(SEED, 100)
        explorer.run()
        return dict(explorer.counts)

    assert counts() == counts()


@pytest.mark.parametrize("name", drawn(FAULTS, 5))
def test_caught(name: str, tally: Tally) -> None:
    """A planted fault is found within some thousand states, and it is said which promise it breaks."""
    fault = FAULTS[name]
    explorer = WorkFaults(1, 200) if fault.by_errors else WorkExplorer(1, 4_000, **{"nested": 0.0, **fault.options})
    with fault.plant(), pytest.raises(BrokenPromise) as caught:
        explorer.run()
    found = re.findall(r"\([a-k]\)|itself", str(caught.value))
    assert set(found) & set(fault.letters.split()), caught.value
    tally.add("planted faults caught", 1)


def test_there_are_enough_of_them() -> None:
    assert len(FAULTS) >= 20
