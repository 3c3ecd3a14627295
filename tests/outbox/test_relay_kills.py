"""SIGKILL at any moment of relays: ``relay_kills.py`` says what is done."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy

from tests.outbox import relay_kills
from tests.processes.programs import counts_of
from tests.support.budget import SEED, Tally, share

KILLS = share(200)


def test_relays_are_killed(engine: sqlalchemy.Engine, database_url: str, tmp_path: Path, tally: Tally) -> None:
    counts = counts_of(relay_kills, tmp_path, database_url, SEED, limit=KILLS)
    tally.add("SIGKILLs of relays", counts["kills"])
    tally.add("batches of killed relays", counts["batches that were noted"])
    assert counts["kills"] >= KILLS
    assert counts["jobs"] > KILLS
