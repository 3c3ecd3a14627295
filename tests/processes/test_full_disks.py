"""Real file systems that somebody else fills: ``full_disks.py`` says what is done there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import full_disks
from tests.processes.programs import counts_of, run
from tests.support.budget import SEED, Tally, share

ROUNDS = max(2, share(20))
"""Of each sort, on each file system."""


@pytest.mark.root
@pytest.mark.parametrize("kind", full_disks.KINDS)
def test_filled_restarted_and_emptied(kind: str, tmp_path: Path, tally: Tally) -> None:
    reason = full_disks.reason_not_available(kind)
    if reason is not None:
        pytest.skip(reason)
    counts = counts_of(full_disks, tmp_path, kind, SEED * 100_000, limit=ROUNDS)
    tally.add("rounds on full file systems", counts["rounds"])
    tally.add("deletes on full file systems", counts["deletes acknowledged"])
    assert counts["rounds"] == 2 * ROUNDS
    assert counts["puts resumed"] == 2 * ROUNDS
    assert counts["deletes acknowledged"] > 0
    assert counts.get("came back", 0) == counts.get("lost", 0) == 0


@pytest.mark.root
def test_what_is_said_nowhere_is_found(tmp_path: Path) -> None:
    """A delete on a full disk is acknowledged and not written."""
    reason = full_disks.reason_not_available("tmpfs")
    if reason is not None:
        pytest.skip(reason)
    done = run(full_disks, tmp_path, "tmpfs", SEED, limit=10, plant="deletes in silence")
    assert "jobs came back" in done.stderr
