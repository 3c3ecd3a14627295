"""The scheduler finds each planted fault of locks and threads within some hundred schedules."""

from __future__ import annotations

import re

import planted_ends
import pytest
from budget import drawn, takes_long
from planted_races import RACES, Race
from scheduler import BrokenSchedule
from schedules import play

pytestmark = pytest.mark.usefixtures("small_batches")

SCHEDULES = 3_000


def search(race: Race) -> None:
    for number in range(SCHEDULES):
        play(race.scenes[number % len(race.scenes)], number)


@pytest.mark.parametrize("name", drawn(RACES, 8))
def test_found(name: str) -> None:
    race = RACES[name]
    with race.plant(), pytest.raises(BrokenSchedule) as found:
        search(race)
    assert re.search(race.says, str(found.value)), found.value


@takes_long
def test_a_schedule_that_fails_fails_again() -> None:
    race = RACES["the_lead_is_not_passed_on"]
    with race.plant():
        with pytest.raises(BrokenSchedule) as first:
            search(race)
        name, seed = re.search(r"\[play\('(.*)', (\d+)\)\]", str(first.value)).groups()
        with pytest.raises(BrokenSchedule) as second:
            play(name, int(seed))
    assert str(first.value) == str(second.value)


def test_there_are_enough_of_them() -> None:
    assert len(RACES) >= 30
    assert planted_ends.__doc__
