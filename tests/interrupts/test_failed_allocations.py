"""A failed allocation at places of the operations of a journaled queue; ``allocations.py`` says what counts as what.

The central operations in every run, and some others, drawn by a seed that is printed, each at every few allocations;
with ``KESTRELPY_SHARE=10`` all of them at each one. ``make test`` strikes at fewer.
"""

from __future__ import annotations

import random

import pytest

from tests.interrupts.allocations import PLANTED, Supervisor, available
from tests.interrupts.operations import CENTRAL, OPERATIONS
from tests.support.budget import ALL, LONG, SEED

pytestmark = pytest.mark.usefixtures("small_batches")

OTHERS = [name for name in OPERATIONS if name not in CENTRAL]
DRAWN = OTHERS if LONG else random.Random(SEED).sample(OTHERS, 4 if ALL else 2)

pytestmark = pytest.mark.skipif(not available(), reason="this Python has no _testcapi.set_nomemory")


def _strike(name: str) -> None:
    print(f"seed {SEED}")
    step = 1 if LONG else random.Random(SEED).choice((11, 13, 17)) * (1 if ALL else 3)
    first = random.Random(SEED).randrange(1, step + 1)
    supervisor = Supervisor(name, SEED)
    supervisor.run(first=first, step=step, seconds=600.0 if LONG else 20.0)
    print(dict(supervisor.counts))
    assert not supervisor.broken
    assert sum(supervisor.counts.values()) > 3


@pytest.mark.parametrize("name", CENTRAL)
def test_one_failed_allocation_in_a_central_operation(name: str) -> None:
    _strike(name)


@pytest.mark.parametrize("number", range(len(DRAWN)))
def test_one_failed_allocation_in_another_operation(number: int) -> None:
    _strike(DRAWN[number])


def test_a_planted_fault_is_caught() -> None:
    supervisor = Supervisor(PLANTED, 1)
    supervisor.run(seconds=20.0)
    assert supervisor.broken
