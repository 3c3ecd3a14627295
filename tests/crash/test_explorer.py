"""Thousands of crash states of seeded workloads keep every promise.

``KESTRELPY_SEED`` sets the first seed, ``KESTRELPY_LONG=1`` goes on ten times as long. A failure names the seed of its
workload.
"""

from __future__ import annotations

import logging
import os

import pytest
from explorer import Explorer

SEED = int(os.environ.get("KESTRELPY_SEED", "1"))
STATES = 80_000 if os.environ.get("KESTRELPY_LONG") == "1" else 8_000
KINDS = {"kill", "PREFIX", "EXT4", "ANY", "HOSTILE", "lost checkpoint", "damaged", "in recovery", "after it went on"}


@pytest.fixture(autouse=True)
def _quiet() -> object:
    """A lost checkpoint is logged each time; that costs more than the recovery."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_every_crash_state_keeps_the_promises() -> None:
    explorer = Explorer(SEED, STATES)
    explorer.run()
    assert explorer.states >= STATES
    assert explorer.counts.keys() == KINDS
    assert all(count > STATES // 200 for count in explorer.counts.values()), explorer.counts


def test_a_seed_leads_to_the_same_states() -> None:
    first, second = Explorer(SEED, 300), Explorer(SEED, 300)
    first.run()
    second.run()
    assert first.counts == second.counts
