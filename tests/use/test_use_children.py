"""Real processes that are killed, stopped and forked keep what they have acknowledged."""

from __future__ import annotations

from tests.support.budget import SEED, Tally, share
from tests.use import use_children

STEPS = 100


def test_processes_keep_what_they_have_acknowledged(tally: Tally) -> None:
    for seed in range(SEED * 1000, SEED * 1000 + share(20)):
        counts = use_children.run(seed, STEPS)
        tally.add("steps of real processes of the use explorer", counts.total() - counts["SIGKILL"])
        tally.add("processes that the use explorer has killed", counts["SIGKILL"])
