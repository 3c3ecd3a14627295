"""The scheduler finds each planted fault of locks and threads within some hundred schedules."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from tests.interleavings import planted_ends
from tests.interleavings.planted_races import RACES, Race
from tests.interleavings.scheduler import BrokenSchedule
from tests.interleavings.schedules import play
from tests.support.budget import drawn, takes_long

pytestmark = pytest.mark.usefixtures("small_batches")

SCHEDULES = 3_000


def search(race: Race) -> None:
    for number in range(SCHEDULES):
        play(race.scenes[number % len(race.scenes)], number)


def library() -> dict[str, dict[str, Any]]:
    """What the library's modules and their classes have, by name."""
    places: dict[str, object] = {
        name: module for name, module in sys.modules.items() if name.partition(".")[0] == "kestrelpy"
    }
    for name, module in list(places.items()):
        places |= {f"{name}.{key}": each for key, each in vars(module).items() if isinstance(each, type)}
    return {
        name: {key: each for key, each in vars(place).items() if not key.startswith("__")}
        for name, place in places.items()
    }


def changed(before: dict[str, dict[str, Any]]) -> list[str]:
    """What is no more as it was ``before``."""
    after = library()
    return [
        f"{name}.{key}"
        for name, had in before.items()
        for key in had.keys() | after[name].keys()
        if had.get(key) is not after[name].get(key)
    ]


@takes_long
@pytest.mark.parametrize("name", drawn(RACES, 8))
def test_found(name: str) -> None:
    """And it is gone after that: what one race leaves behind is found in the place of the next."""
    play("flow", 0)  # what is imported at first use is there from here on
    race, before = RACES[name], library()
    with race.plant(), pytest.raises(BrokenSchedule) as found:
        search(race)
    assert changed(before) == []
    assert re.search(race.says, str(found.value)), found.value


@takes_long
def test_a_schedule_that_fails_fails_again() -> None:
    race = RACES["the_lead_is_not_passed_on"]
    with race.plant():
        with pytest.raises(BrokenSchedule) as first:
            search(race)
        said = re.search(r"\[play\('(.*)', (\d+)\)\]", str(first.value))
        assert said is not None
        name, seed = said.groups()
        with pytest.raises(BrokenSchedule) as second:
            play(name, int(seed))
    assert str(first.value) == str(second.value)


def test_there_are_enough_of_them() -> None:
    assert len(RACES) >= 30
    assert planted_ends.__doc__
