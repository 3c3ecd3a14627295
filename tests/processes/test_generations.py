"""SIGKILL at any moment, and real power cuts on ext4 and XFS: nothing that was promised is lost, doubled or made up.

``generations.py`` says what is done.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import generations
from tests.processes.loop_mount import Kind, reason_not_available
from tests.processes.programs import counts_of, run
from tests.support.budget import SEED, Tally, share

KILLS = max(60, share(160))
CUTS = {"ext4": max(50, share(90)), "xfs": max(50, share(60))}
"""How many ends, enough to see something: a good two thirds of them are power cuts, the others kills."""


@pytest.mark.parametrize("seed", [2 * SEED, 2 * SEED + 1])
def test_killed_at_any_moment(seed: int, tmp_path: Path, tally: Tally) -> None:
    counts = counts_of(generations, tmp_path, "kills", seed, limit=KILLS)
    tally.add("SIGKILLs", counts["kills"])
    assert counts["kills"] >= KILLS
    assert counts["acknowledged"] > KILLS
    assert counts["ended while opening"] >= KILLS // 50
    assert counts["ended while recovering"] >= KILLS // 20
    assert counts["delivered again"] > 0  # otherwise no kill has struck between a commit and its checkpoint


@pytest.fixture(params=["ext4", "xfs"])
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    reason = reason_not_available(chosen)
    if reason is not None:
        pytest.skip(reason)
    return chosen


@pytest.mark.root
def test_the_power_is_cut_at_any_moment(kind: Kind, tmp_path: Path, tally: Tally) -> None:
    ends = CUTS[kind]
    counts = counts_of(generations, tmp_path, kind, SEED, limit=ends)
    tally.add("power cuts on real file systems", counts["cuts"])
    tally.add("SIGKILLs", counts["kills"])
    assert counts["cuts"] > ends // 2
    assert counts["acknowledged"] > ends
    assert counts["ended while opening"] >= ends // 50
    assert counts["ended while recovering"] >= ends // 20
    assert counts["lost before a sync"] > 0  # otherwise no cut has taken anything, and there was nothing to see


@pytest.mark.root
@pytest.mark.parametrize("plant", ["no sync", "no sync of checkpoints"])
def test_a_planted_fault_is_found_by_power_cuts(kind: Kind, plant: str, tmp_path: Path, tally: Tally) -> None:
    assert "BrokenPromise" in run(generations, tmp_path, kind, SEED, limit=300, plant=plant).stderr
    tally.add("planted faults caught", 1)


@pytest.mark.parametrize("plant", ["stores late", "saves nothing"])
def test_a_planted_fault_is_found_by_kills(plant: str, tmp_path: Path, tally: Tally) -> None:
    assert "BrokenPromise" in run(generations, tmp_path, "kills", SEED, limit=300, plant=plant).stderr
    tally.add("planted faults caught", 1)
