"""Forks, and races for a queue and for a reader: the parent is not disturbed, and there is one owner at a time.

``fork_races.py`` and ``owner_races.py`` say what is done.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from tests.processes import fork_races, owner_races
from tests.processes.programs import counts_of, run
from tests.support.budget import SEED, Tally, share

FORKS = max(30, share(30))
ROUNDS = max(200, share(500))


def test_a_fork_while_a_thread_holds_a_lock(tmp_path: Path) -> None:
    counts = counts_of(fork_races, tmp_path, "held", SEED)
    assert counts["locks"] == counts["parents killed"] == 19


def test_forks_of_a_busy_process(tmp_path: Path, tally: Tally) -> None:
    counts = counts_of(fork_races, tmp_path, "forks", SEED, limit=FORKS)
    tally.add("forks of a busy process", counts["forks"])
    assert counts["forks"] == FORKS
    assert all(counts[end] > 0 for end in fork_races.ENDS)
    assert counts["opened meanwhile"] > FORKS


def test_the_witness_objects_to_a_second_owner(tmp_path: Path) -> None:
    witness = owner_races.Witness(str(tmp_path / "owner"))
    with witness, pytest.raises(AssertionError, match="there are two owners"):
        witness.__enter__()
    with witness:
        pass


@pytest.mark.parametrize("what", ["owners", "readers"])
def test_races_for_ownership(what: str, tmp_path: Path, tally: Tally) -> None:
    counts = counts_of(owner_races, tmp_path, what, SEED, limit=ROUNDS)
    tally.add("races for ownership", counts["rounds"])
    assert owner_races.is_enough(Counter(counts), ROUNDS), counts


@pytest.mark.parametrize(
    ("harness", "what", "plant", "shows"),
    [
        (fork_races, "held", "keeps locks in children", "QueueLocked"),
        # A child is let in, trips over the files of its parent, or cuts the parent's segment short: a matter of chance.
        (fork_races, "forks", "unlocks in children", "QueueLocked was due|in refuses|Bus error"),
        # How two owners trip over each other first, at the witness or over the files, is a matter of chance.
        (owner_races, "owners", "locks nothing", "ended with status"),
        (owner_races, "owners", "compares no lock", "ended with status"),
    ],
)
def test_a_planted_fault_is_found(
    harness: ModuleType, what: str, plant: str, shows: str, tmp_path: Path, tally: Tally
) -> None:
    done = run(harness, tmp_path, what, SEED, seconds=60, plant=plant)
    assert done.returncode != 0
    assert re.search(shows, done.stderr), done.stderr
    tally.add("planted faults caught", 1)
