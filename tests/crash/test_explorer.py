"""Five hundred thousand crash states keep every promise: small cases, exhausted, and seeded workloads.

A failure names the seed of its workload, or its steps.
"""

from __future__ import annotations

import pytest

from tests.crash import explorer, small
from tests.crash.workload import ELSEWHERE, MANY_LIVES, ROOM
from tests.support.budget import ALL, SEED, Tally, share, takes_long

pytestmark = pytest.mark.usefixtures("quiet")
PARTS, STATES = 10, 38_000
KINDS = {
    "kill",
    "PREFIX",
    "EXT4",
    "ANY",
    "HOSTILE",
    "lost checkpoint",
    "damaged",
    "in recovery",
    "after it went on",
    "recovered again",
}


@pytest.mark.parametrize("part", range(PARTS))
def test_every_crash_state_keeps_the_promises(part: int, tally: Tally) -> None:
    wanted = share(STATES)
    counts = explorer.run(SEED * PARTS + part, wanted)
    tally.add("crash states of seeded workloads", counts)
    assert counts.total() >= wanted
    if wanted > 5_000:
        assert counts.keys() == KINDS
        assert all(count > wanted // 500 for count in counts.values()), counts


def test_many_lives_keep_the_promises(tally: Tally) -> None:
    """What one power cut has left on the disk, the next may bring to light."""
    searching = explorer.Explorer(SEED * 1_000, share(2_000), style=MANY_LIVES, points=5, samples=1)
    searching.run()
    tally.add("crash states of seeded workloads", searching.counts)
    assert searching.states >= share(2_000)


def test_many_lives_of_a_reader_elsewhere_keep_the_promises(tally: Tally) -> None:
    searching = explorer.Explorer(SEED * 1_000, share(8_000), style=ELSEWHERE, samples=10)
    searching.run()
    tally.add("crash states of seeded workloads", searching.counts)
    assert searching.states >= share(8_000)


def test_kept_segments_and_readers_that_are_moved_keep_the_promises(tally: Tally) -> None:
    searching = explorer.Explorer(SEED * 1_000, share(12_000), style=ROOM)
    searching.run()
    tally.add("crash states of seeded workloads", searching.counts)
    assert searching.states >= share(12_000)


@pytest.mark.parametrize("length", [1, pytest.param(2, marks=takes_long)])
def test_every_crash_of_one_step_and_of_two(length: int, tally: Tally) -> None:
    counts = small.run(length)
    tally.add("crash states of small cases", counts)
    assert counts.total() > 80**length


@pytest.mark.parametrize("part", range(small.PARTS))
def test_every_crash_of_three_steps(part: int, tally: Tally) -> None:
    counts = small.run(3, part, small.PARTS, limit=1 << 62 if ALL else share(20_000))
    tally.add("crash states of small cases", counts)
    assert counts.total() > share(1_000)


def test_a_seed_leads_to_the_same_states() -> None:
    assert explorer.run(SEED, 300) == explorer.run(SEED, 300)
