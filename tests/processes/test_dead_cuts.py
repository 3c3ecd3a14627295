"""Power cuts of who moves dead letters there and back: ``dead_cuts.py`` says what is done."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.processes import dead_cuts
from tests.processes.loop_mount import reason_not_available
from tests.processes.programs import counts_of, run
from tests.support.budget import SEED, Tally, share

CUTS = share(50)


@pytest.mark.root
@pytest.mark.parametrize("where", ["owner", "elsewhere"])
def test_the_power_is_cut_while_items_die(where: str, tmp_path: Path, tally: Tally) -> None:
    reason = reason_not_available("ext4")
    if reason is not None:
        pytest.skip(reason)
    counts = counts_of(dead_cuts, tmp_path, f"ext4 {where}", SEED, limit=CUTS)
    tally.add("power cuts on real file systems", counts["cuts"])
    tally.add("dead letters", counts.get("letters", 0))
    assert counts["cuts"] >= CUTS
    assert dead_cuts.is_enough(Counter(counts), CUTS), counts


@pytest.mark.root
def test_an_intent_that_is_not_on_disk_is_found_by_power_cuts(tmp_path: Path, tally: Tally) -> None:
    reason = reason_not_available("ext4")
    if reason is not None:
        pytest.skip(reason)
    done = run(dead_cuts, tmp_path, "ext4 owner", SEED, limit=60, plant="no sync of checkpoints")
    assert "AssertionError: there twice" in done.stderr, done.stderr[-2000:]
    tally.add("planted faults caught", 1)
