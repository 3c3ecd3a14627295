"""PostgreSQL is stopped at once and started again, under load: ``restarts.py`` says what is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.outbox.faults import restarts
from tests.processes.programs import counts_of
from tests.support.budget import ALL, SEED, Tally, share, takes_long

PARTS = ("psycopg", "asyncpg", "psycopg", "psycopg_async")
STARTS = max(2, share(13))
"""In each part: 52."""


@takes_long
@pytest.mark.usefixtures("postgres_installed")
@pytest.mark.parametrize("part", [part for part in range(len(PARTS)) if ALL or part == SEED % len(PARTS)])
def test_the_server_is_stopped_at_once(part: int, tmp_path: Path, tally: Tally) -> None:
    counts = counts_of(restarts, tmp_path, PARTS[part], SEED * len(PARTS) + part, limit=STARTS)
    tally.add("immediate stops of PostgreSQL under an outbox", counts["stops"])
    tally.add("jobs of an outbox that were run to their end", counts["jobs"])
    assert counts["stops"] >= STARTS
    assert counts["jobs"] > 10 * STARTS
    assert counts["milliseconds to the first job, at most"] < 5000
