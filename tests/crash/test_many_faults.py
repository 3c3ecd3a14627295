"""Eighty thousand injected faults: short runs on disks that fail at each of their operations."""

from __future__ import annotations

import pytest

from tests.crash import injected
from tests.support.budget import SEED, Tally, share

pytestmark = pytest.mark.usefixtures("quiet")
PARTS, FAULTS = 8, 10_000


@pytest.mark.parametrize("part", range(PARTS))
def test_a_disk_that_fails_at_any_operation_loses_nothing(part: int, tally: Tally) -> None:
    wanted = share(FAULTS)
    counts = injected.run(SEED * PARTS + part, wanted)
    tally.add("injected I/O faults", counts)
    assert counts.total() >= wanted
