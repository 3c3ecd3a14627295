"""SIGKILL at any moment of loggers and of the owner of their queue: ``logging_kills.py`` says what is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import logging_kills
from tests.processes.programs import counts_of, run
from tests.support.budget import ALL, SEED, Tally, share

KILLS = max(8, share(100))
LOGGERS = 16 if ALL else 3
SECONDS = 900 if ALL else 100


def test_loggers_and_the_owner_are_killed(tmp_path: Path, tally: Tally) -> None:
    counts = counts_of(logging_kills, tmp_path, str(LOGGERS), SEED, limit=KILLS, seconds=SECONDS)
    tally.add("SIGKILLs", counts["kills"])
    tally.add("log records, none of them lost", counts["records"])
    assert counts["kills"] >= KILLS
    assert counts["records"] >= KILLS * (logging_kills.RECORDS_PER_KILL if ALL else 300)
    assert counts["handled"] >= counts["records"]


@pytest.mark.parametrize(
    ("fault", "said"), [("buffered", "emit returned for"), ("doubled", "comes after"), ("unordered", "comes after")]
)
def test_a_planted_fault_is_found(fault: str, said: str, tmp_path: Path) -> None:
    done = run(logging_kills, tmp_path, f"3 {fault}", SEED, limit=8, seconds=SECONDS)
    assert done.returncode != 0
    assert said in done.stderr
