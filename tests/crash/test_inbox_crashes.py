"""Crash states of the inbox keep every promise, on disks that fail too; and the explorer catches each planted fault.

A failure names the seed of its world.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest

from tests.crash import inbox_explorer
from tests.crash.inbox_explorer import InboxExplorer
from tests.crash.inbox_planted import FAULTS
from tests.crash.promise import BrokenPromise
from tests.support.budget import SEED, Tally, drawn, share, takes_long

pytestmark = pytest.mark.usefixtures("quiet")
PARTS, STATES = 4, 1_300
KINDS = {"kill", "PREFIX", "EXT4", "ANY", "in an owner"}


@pytest.mark.parametrize("part", range(PARTS))
def test_every_crash_state_of_an_inbox_keeps_the_promises(part: int, tally: Tally) -> None:
    wanted = share(STATES)
    counts = inbox_explorer.run(SEED * PARTS + part, wanted)
    tally.add("crash states of inboxes", counts)
    assert counts.total() >= wanted
    if wanted > 1_000:
        assert counts.keys() == KINDS


@takes_long
def test_every_crash_of_one_case(tally: Tally) -> None:
    counts = inbox_explorer.exhaust(30)
    tally.add("crash states of inboxes", counts)
    assert counts.total() > 500


@takes_long
@pytest.mark.parametrize("name", drawn(FAULTS, 5))
def test_caught(name: str, tally: Tally) -> None:
    fault = FAULTS[name]
    options = {"seed": 1, "limit": 12_000, **fault.options}
    limit = options.pop("exhaust", 0)
    look: Callable[[], object] = InboxExplorer(**options).run
    if limit:
        look = partial(inbox_explorer.exhaust, limit)
    with fault.plant(), pytest.raises(BrokenPromise) as caught:
        look()
    found = set(re.findall(r"\([a-h]\)", str(caught.value)))
    assert found & set(fault.invariants.split()), caught.value
    tally.add("planted faults caught", 1)


def test_there_are_enough_of_them() -> None:
    assert len(FAULTS) >= 20
