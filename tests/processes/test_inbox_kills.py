"""SIGKILL at any moment of who publishes and who takes in: ``inbox_kills.py`` says what is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import inbox_kills
from tests.processes.programs import counts_of
from tests.support.budget import SEED, Tally, share

KILLS = max(25, share(60))


@pytest.mark.parametrize("what", ["owner", "visitor"])
def test_who_publishes_or_takes_in_is_killed(what: str, tmp_path: Path, tally: Tally) -> None:
    counts = counts_of(inbox_kills, tmp_path, what, SEED, limit=KILLS)
    tally.add("SIGKILLs", counts["kills"])
    tally.add("batches of an inbox", counts["batches"])
    assert counts["kills"] >= KILLS
    assert counts["batches"] > KILLS // 4
