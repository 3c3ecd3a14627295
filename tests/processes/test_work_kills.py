"""SIGKILL at any moment of a process that works on a work queue: ``work_kills.py`` says what is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import work_kills
from tests.processes.programs import counts_of, run
from tests.support.budget import SEED, Tally, share

PARTS = 2
KILLS = max(25, share(150))


@pytest.mark.parametrize("part", range(PARTS))
def test_a_worker_is_killed(part: int, tmp_path: Path, tally: Tally) -> None:
    counts = counts_of(work_kills, tmp_path, "worker", SEED * PARTS + part, limit=KILLS)
    tally.add("SIGKILLs", counts["kills"])
    tally.add("calls of workers that were killed", counts["calls"])
    assert counts["kills"] >= KILLS
    assert counts["calls"] > work_kills.CALLS_PER_KILL * KILLS
    assert counts["jobs compared"] > 5 * KILLS


def test_what_is_stored_late_is_found_missing(tmp_path: Path) -> None:
    """A call is acknowledged while its record is in the process only."""
    done = run(work_kills, tmp_path, "worker", SEED, limit=40, plant="stores late")
    assert done.returncode
    assert "AssertionError" in done.stderr
