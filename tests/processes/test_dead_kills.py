"""SIGKILL at any moment of who moves dead letters there and back: ``dead_kills.py`` says what is done."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.processes import dead_kills
from tests.processes.programs import counts_of
from tests.support.budget import SEED, Tally, share

KILLS = max(25, share(150))


@pytest.mark.parametrize("what", ["owner", "elsewhere"])
def test_who_moves_dead_letters_is_killed(what: str, tmp_path: Path, tally: Tally) -> None:
    counts = counts_of(dead_kills, tmp_path, what, SEED, limit=KILLS)
    tally.add("SIGKILLs", counts["kills"])
    tally.add("dead letters", counts.get("letters", 0))
    assert counts["kills"] >= KILLS
    assert dead_kills.is_enough(Counter(counts), KILLS), counts
