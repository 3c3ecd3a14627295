"""Transactions that overlap, statement by statement: ``overlaps.py`` says what is done."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.outbox.faults import overlaps
from tests.support.budget import ALL, SEED, Tally, share

PARTS = {
    "marks": {"postgresql": 10, "sqlite": 2, "sqlite-wal": 2},
    **{name: dict.fromkeys(("postgresql", "sqlite", "sqlite-wal"), 1) for name in ("lanes", "keys", "leases")},
}
SCHEDULES = {"postgresql": 500, "sqlite": 1250, "sqlite-wal": 1250}
"""In each part: 10,000 of marks."""
CASES = [(name, kind, part) for name, kinds in PARTS.items() for kind, parts in kinds.items() for part in range(parts)]


@pytest.mark.parametrize(("name", "kind", "part"), [case for case in CASES if ALL or case[2] == 0])
def test_transactions_overlap(
    name: str, kind: str, part: int, tmp_path: Path, tally: Tally, request: pytest.FixtureRequest
) -> None:
    if kind == "postgresql":
        url = str(request.getfixturevalue("postgres_url"))
    else:
        url = f"sqlite:///{tmp_path / 'outbox.db'}"
        with closing(sqlite3.connect(tmp_path / "outbox.db")) as connection:
            connection.execute(f"PRAGMA journal_mode = {'WAL' if kind == 'sqlite-wal' else 'DELETE'}")
    count = share(SCHEDULES[kind] * (1 if ALL else PARTS[name][kind]))
    counts = overlaps.run(url, name, SEED * 10 + part, count)
    tally.add(f"schedules of an outbox's transactions: {name}", count)
    assert counts["different orders"] > 0.9 * count
    assert counts["claimed"] > count
