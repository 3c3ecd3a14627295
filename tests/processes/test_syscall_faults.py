"""System calls of a real interpreter fail one by one: only documented errors are seen, and nothing promised is lost.

``syscall_faults.py`` says what is done. A run takes a sample, by the seed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import syscall_faults
from tests.processes.programs import counts_of, run
from tests.support.budget import SEED, Tally, share

LIMIT = share(110)


@pytest.fixture(autouse=True)
def _strace() -> None:
    reason = syscall_faults.reason_not_available()
    if reason is not None:
        pytest.skip(reason)


def test_calls_fail_once_and_for_ever(tmp_path: Path, tally: Tally) -> None:
    counts = counts_of(syscall_faults, tmp_path, "calls", SEED, limit=LIMIT)
    tally.add("workloads with failing system calls", counts["cases"])
    cases = min(LIMIT, counts["calls there are"])
    assert counts["cases"] == cases
    assert counts["cases without a failure"] <= cases // 20
    assert counts["cases with an error told"] > cases // 2


def test_a_planted_fault_is_found(tmp_path: Path, tally: Tally) -> None:
    done = run(syscall_faults, tmp_path, "calls", SEED, limit=20, plant="forgives syncs")
    assert "a sync failed and nobody was told" in done.stderr
    tally.add("planted faults caught", 1)
