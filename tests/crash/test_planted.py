"""The explorer catches each planted fault within a few thousand states, and says which promise is broken.

``make test`` draws some of them.
"""

from __future__ import annotations

import re

import pytest

from tests.crash.explorer import Explorer
from tests.crash.planted import FAULTS, Fault
from tests.crash.promise import BrokenPromise
from tests.support.budget import Tally, drawn

pytestmark = pytest.mark.usefixtures("quiet")

BY_A_QUEUE_ALONE = {
    "archived_copy_not_synced",
    "archive_not_synced",
    "segment_deleted_instead_of_archived",
    "leftovers_by_their_beginning",
    "place_in_the_page_cache_believed_durable",
    "saved_behind_a_torn_state",
    "saved_behind_what_a_power_cut_undid",
    "numbers_from_the_clock_alone",
    "segment_cut_at_its_first_growth",
    "a_kept_segment_is_retired",
}
"""Faults that only a queue shows: they are in what is archived, in what is not the queue's, and in what goes on, or
they break the workload itself.
"""


def broken(explorer: Explorer, fault: Fault) -> str:
    """The invariant that the explorer says is broken, or "workload"."""
    explorer.crashes.looks = 0  # what they say, the next opening says as well
    with fault.plant(), pytest.raises(BrokenPromise) as caught:
        explorer.run()
    found = re.search(r"\(\d+\)|workload", str(caught.value))
    assert found is not None, caught.value
    return found[0]


@pytest.mark.parametrize("name", drawn(FAULTS, 12))
def test_caught(name: str, tally: Tally) -> None:
    fault = FAULTS[name]
    assert broken(Explorer(1, fault.states, **{"whole": 1.0, **fault.options}), fault) in fault.invariants.split()
    tally.add("planted faults caught", 1)


@pytest.mark.parametrize("name", drawn(sorted(FAULTS.keys() - BY_A_QUEUE_ALONE), 6))
def test_caught_by_the_core_alone(name: str, tally: Tally) -> None:
    fault = FAULTS[name]
    assert broken(Explorer(1, fault.states, **{**fault.options, "whole": 0.0}), fault) != "workload"
    tally.add("planted faults caught by the core alone", 1)


def test_there_are_enough_of_them() -> None:
    assert len(FAULTS) >= 40
