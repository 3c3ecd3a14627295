"""SIGKILL at any moment of what consumes an outbox: ``kills.py`` says what is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.outbox.faults import kills
from tests.processes.programs import counts_of
from tests.support.budget import ALL, SEED, Tally, share, takes_long

PARTS = {
    "postgresql": ("postgresql", "postgresql", "postgresql+asyncpg", "postgresql"),
    "sqlite": ("sqlite", "sqlite-wal", "sqlite-wal+aiosqlite", "sqlite"),
}
"""Of each database. SQLite with a rollback journal, as it is by default, and with a write-ahead log."""
KILLS = share(75)
"""Of consumers, in each part: 300 for each database."""
CASES = [(kind, part) for kind, parts in PARTS.items() for part in range(len(parts)) if ALL or part == SEED % 4]


@takes_long
@pytest.mark.parametrize(("kind", "part"), CASES)
def test_a_consumer_is_killed(
    kind: str, part: int, tmp_path: Path, tally: Tally, request: pytest.FixtureRequest
) -> None:
    if kind == "postgresql":
        request.getfixturevalue("postgres_installed")
    counts = counts_of(kills, tmp_path, PARTS[kind][part], SEED * len(CASES) + part, limit=KILLS)
    tally.add("SIGKILLs of consumers of an outbox", counts["kills of consumers"])
    tally.add("jobs of an outbox that were run to their end", counts["jobs"])
    tally.add("jobs of an outbox in flight when their process was killed", counts["in flight"])
    assert counts["kills of consumers"] >= KILLS
    assert counts["jobs"] > 2 * KILLS
    assert counts["rolled back"] > KILLS
    if ALL:
        for kind_of_job in ("in flight", "transactional", "dependants", "neighbours in lanes", "failures"):
            assert counts[kind_of_job], kind_of_job
