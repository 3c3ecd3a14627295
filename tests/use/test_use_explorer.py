"""The explorer itself: a seed leads to the same end twice, a failure is made short, a hang is a failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import CorruptJournal, ItemTooLarge, JournaledQueue, QueueEmpty, QueueFull, Reader, UnknownItem
from kestrelpy._reading.reader import checkpointer_of
from kestrelpy.inspection.repair import QueueRepair
from tests.support.budget import ALL, SEED, Tally, share, takes_long
from tests.use import use_explorer, use_scenes_threads
from tests.use.use_coverage import SOMETIMES
from tests.use.use_explorer import Failure, draw, play
from tests.use.use_operations import OPERATIONS
from tests.use.use_outcomes import documented
from tests.use.use_world import Hang


@pytest.fixture
def patience() -> Iterator[None]:
    with patch.object(use_explorer, "PATIENCE", 2):
        yield


def test_nothing_is_found(tally: Tally) -> None:
    """Seeds of their own for every ``KESTRELPY_SEED``. In ``make test-all`` every state must have been reached."""
    coverage = use_explorer.explore(SEED * 1_000_000, share(200_000))
    missing = coverage.missing_pairs(OPERATIONS, {tag for _, tag in coverage.pairs})
    pairs = len(coverage.pairs) + len(missing)
    tally.add("steps of the use explorer", coverage.steps)
    tally.add("failures of the use explorer that their seeds did not show again", coverage.unrepeated)
    tally.add("worlds of the use explorer", coverage.seeds)
    tally.add("pairs of an operation and a state of the use explorer", pairs - len(missing))
    tally.add("states that the use explorer must sometimes reach, and has", len(SOMETIMES) - len(coverage.never()))
    assert coverage.steps >= share(200_000)
    if ALL:
        assert coverage.never() == []
        assert len(missing) <= pairs // 20, missing


def test_no_threads_find_anything(tally: Tally) -> None:
    counts = use_scenes_threads.run(SEED * 1_000_000, share(1_000))
    tally.add("schedules of the use explorer", counts["schedules"])


def played(seed: int) -> str:
    try:
        coverage = play(seed, draw(seed, 60), in_words=True)
    except Failure as failure:
        return str(failure)
    return repr(sorted(coverage.sometimes.items()) + sorted(coverage.operations.items()))


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_does_the_same_twice(seed: int) -> None:
    assert played(seed) == played(seed)


def test_a_failure_is_made_short_and_says_how_to_see_it_again() -> None:
    real = Reader.commit

    def forgets(self: Reader, item_or_id: Any) -> None:
        """Raises ``UnknownItem``."""
        real(self, item_or_id)
        checkpointer_of(self).backlog.progress.released_items -= 1

    with patch.object(Reader, "commit", forgets), pytest.raises(Failure) as found:
        use_explorer.explore(1, 5_000, ("commit",))
    assert len(found.value.steps) <= 7, found.value
    assert f"python -m tests.use.use_explorer {found.value.seed} --lean commit" in str(found.value)


@takes_long
@pytest.mark.usefixtures("patience")
def test_a_hang_is_a_failure_that_says_where() -> None:
    def hangs(self: JournaledQueue) -> None:
        """Never returns."""
        lock = threading.Lock()
        with lock:
            lock.acquire()

    with patch.object(JournaledQueue, "sync", hangs), pytest.raises(Failure, match="in hangs"):
        use_explorer.explore(1, 5_000, ("sync",))


def test_who_waits_for_a_processor_does_not_hang() -> None:
    """Two or three seconds had to do for a step, with all that it imports, on a machine that is busy with others."""
    dog, times = use_explorer.Watchdog(), iter((100.0, 101.0, 103.9, 104.0))
    with patch.object(use_explorer, "lived", lambda: next(times)):
        for _ in range(3):
            dog._look()
        with pytest.raises(Hang, match="nothing went on for 4 seconds"):
            dog._look()


def test_the_time_of_the_watchdog_goes_on_while_it_sleeps() -> None:
    """Else a hang would never be found."""
    before = use_explorer.lived()
    threading.Event().wait(0.2)
    assert use_explorer.lived() - before > 0.1


def test_docstrings_say_what_may_be_raised() -> None:
    assert {QueueFull, ItemTooLarge} <= set(documented(JournaledQueue.put))
    assert {QueueFull, ItemTooLarge} <= set(documented(JournaledQueue.put_many))
    assert {QueueEmpty, CorruptJournal, ValueError} <= set(documented(Reader.get_many))
    assert {QueueEmpty, UnknownItem} & set(documented(JournaledQueue.commit)) == {UnknownItem}


def test_a_repair_that_leaves_the_damage_is_found() -> None:
    """At the end of a world, whatever was damaged is repaired, and checked."""
    with patch.object(QueueRepair, "_write", return_value=None), pytest.raises(Failure, match="verify says"):
        damage_worlds(500)


def damage_worlds(seeds: int) -> None:
    for seed in range(seeds):
        use_explorer.run(seed, 60, ("flip", "delete"))
