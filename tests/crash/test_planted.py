"""The explorer catches each planted fault within a few thousand states, and says which promise is broken."""

from __future__ import annotations

import re

import pytest
from budget import Tally
from explorer import Explorer
from planted import FAULTS, Fault
from promise import BrokenPromise

pytestmark = pytest.mark.usefixtures("quiet")
STATES = 8_000


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_caught(fault: Fault, tally: Tally) -> None:
    explorer = Explorer(1, STATES, **fault.options)
    with fault.plant(), pytest.raises(BrokenPromise) as caught:
        explorer.run()
    found = re.search(r"\(\d+\)|workload", str(caught.value))
    assert found is not None, caught.value
    assert found[0] in fault.invariants.split(), caught.value
    tally.add("planted faults caught", 1)


def test_there_are_enough_of_them() -> None:
    assert len(FAULTS) >= 40
