"""SIGKILL at any moment of loggers and of the owner of their queue: ``logging_kills.py`` says what is done."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import logging_kills
from tests.processes.programs import counts_of, run
from tests.support.budget import ALL, SEED, Tally, share
from tests.support.patience import until

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


def test_a_process_that_has_the_number_of_a_logger_is_left_alone(tmp_path: Path) -> None:
    """Numbers come round on a busy machine. It was killed; and the end was waited for, for as long as it lived."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        path = tmp_path / "forked" / str(stranger.pid)
        path.parent.mkdir()
        path.touch()
        until(lambda: b"input()" in Path(f"/proc/{path.name}/cmdline").read_bytes())  # while it starts, it has none
        assert not logging_kills.lives(path)
        assert not logging_kills.kill_a_forked_one(tmp_path, random.Random(1))
        stranger.communicate(b"\n")
    assert stranger.returncode == 0
