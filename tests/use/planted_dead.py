"""Defects of items that fail, put into it: of their delays, their end, and their way to another queue and back."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from kestrelpy import QueueFull
from kestrelpy._reading import burial, retries
from kestrelpy._reading.backlog import Backlog
from kestrelpy._reading.burial import Burial
from kestrelpy._reading.delays import Delays
from kestrelpy._reading.progress import Progress
from kestrelpy._reading.retries import Retries
from kestrelpy._reading.window import Requeued
from kestrelpy.clock import Clock
from tests.crash import dead_planted
from tests.use.planting import defect

RETRIES = "tests/unit/reading/test_retries.py::"
BURIAL = "tests/unit/reading/test_burial.py::"


@defect("dead delay", "the delay of an abort is ignored", test=RETRIES + "test_the_call_overrides_the_configuration")
def the_delay_of_an_abort_is_ignored() -> Iterator[None]:
    real = Retries.after_abort

    def after_abort(self: Retries, item: Any, delay: float | None, reason: str, *, may_die: bool) -> None:
        real(self, item, None, reason, may_die=may_die)

    with patch.object(Retries, "after_abort", after_abort):
        yield


@defect(
    "dead blocks",
    "an item that is not due keeps back all others",
    test=RETRIES + "test_an_aborted_item_is_not_due_before_its_delay",
)
def an_item_that_is_not_due_blocks_the_others() -> Iterator[None]:
    real = Backlog.take_next

    def take_next(self: Backlog) -> Any:
        return None if self.requeued.due_at else real(self)

    with patch.object(Backlog, "take_next", take_next):
        yield


@defect(
    "dead clock",
    "the clock of the system is set forward, and items are due too early",
    test=RETRIES + "test_a_clock_that_is_set_changes_no_delay",
)
def delays_are_measured_by_the_clock_on_the_wall() -> Iterator[None]:
    class Wall:
        def __init__(self, clock: Clock) -> None:
            self.call_later, self._clock = clock.call_later, clock

        def monotonic(self) -> float:
            return self._clock.time_ns() / 1e9

    real = Delays.__init__

    def init(self: Delays, dispatcher: Any) -> None:
        real(self, dispatcher)
        self._clock = Wall(self._clock)  # type: ignore[assignment]

    with patch.object(Delays, "__init__", init):
        yield


@defect(
    "dead discard",
    "who drops one item makes all that wait due at once",
    test=RETRIES + "test_discard_finds_it_and_leaves_the_delay_of_others",
)
def a_discard_forgets_the_delays_of_the_others() -> Iterator[None]:
    real = Backlog.discard

    @functools.wraps(real)
    def discard(self: Backlog, ids: Any) -> int:
        dropped = real(self, ids)
        self.requeued.ripen(math.inf)
        return dropped

    with patch.object(Backlog, "discard", discard):
        yield


@defect(
    "dead waits",
    "a consumer that waits is not woken when an item is due",
    test=RETRIES + "test_a_future_is_served_when_an_item_is_due",
)
def nobody_is_woken_when_an_item_is_due() -> Iterator[None]:
    with patch.object(Delays, "arm_locked", lambda self: None):
        yield


@defect(
    "dead zero",
    "an item that is to wait is due at once",
    test=RETRIES + "test_an_aborted_item_is_not_due_before_its_delay",
)
def a_delay_of_the_configuration_counts_for_nothing() -> Iterator[None]:
    real = Requeued.add

    def add(self: Requeued, item_id: int, entry: Any, due: float | None = None) -> None:
        real(self, item_id, entry)

    with patch.object(Requeued, "add", add):
        yield


@defect(
    "dead late",
    "an item is delivered once more than max_deliveries says",
    test=RETRIES + "test_without_a_queue_for_them_dead_items_are_dropped",
)
def an_item_lives_once_too_often() -> Iterator[None]:
    real = Retries.after_abort

    def after_abort(self: Retries, item: Any, delay: float | None, reason: str, *, may_die: bool) -> None:
        most = self._backlog.config.max_deliveries
        real(self, item, delay, reason, may_die=may_die and item.error_count != most)

    with patch.object(Retries, "after_abort", after_abort):
        yield


@defect(
    "dead uncounted",
    "an item that is dropped is not counted",
    test=RETRIES + "test_without_a_queue_for_them_dead_items_are_dropped",
)
def what_is_dropped_does_not_count() -> Iterator[None]:
    real = Retries._log_dropped

    def log(self: Retries, item: Any, reason: str) -> None:
        real(self, item, reason)
        self.dropped -= 1

    with patch.object(Retries, "_log_dropped", log):
        yield


@defect("dead restarts", "a redelivery after a crash counts as a failure", test=RETRIES + "test_a_crash_is_no_failure")
def a_restart_counts_as_a_failure() -> Iterator[None]:
    real = Progress.load

    def load(state: Any) -> Progress:
        progress = real(state)
        progress.error_counts = {key: count + 1 for key, count in progress.error_counts.items()}
        return progress

    with patch.object(Progress, "load", load):
        yield


@defect(
    "dead reason", "a dead letter does not say why", test=BURIAL + "test_a_dead_item_is_a_letter_in_the_other_queue"
)
def a_dead_letter_has_no_reason() -> Iterator[None]:
    with patch.object(retries, "cut_reason", lambda text: ""):
        yield


@defect(
    "dead once",
    "a move that could not be done is not tried again",
    test=BURIAL + "test_an_opening_that_cannot_yet_holds_the_items_back",
)
def a_move_is_tried_once() -> Iterator[None]:
    with patch.object(Burial, "_start", lambda self: None):
        yield


@defect(
    "dead twice",
    "an item is a dead letter, and is delivered all the same",
    test=BURIAL + "test_an_opening_that_cannot_yet_holds_the_items_back",
)
def what_was_begun_is_forgotten_at_the_opening() -> Iterator[None]:
    with dead_planted.FAULTS["intent_forgotten_at_the_opening"].plant():
        yield


@defect(
    "dead first", "no room for the dead letter: the item is lost", test=BURIAL + "test_a_disk_that_fails_at_any_step"
)
def an_item_is_done_before_it_is_published() -> Iterator[None]:
    with dead_planted.FAULTS["commit_before_publish"].plant():
        yield


@defect(
    "dead back",
    "no room for what is put back: it is lost",
    test=BURIAL + "test_a_requeue_that_fails_is_done_by_the_next_opening",
)
def a_letter_is_done_before_it_is_put_back() -> Iterator[None]:
    with dead_planted.FAULTS["requeue_commits_first"].plant():
        yield


@defect(
    "dead head",
    "what is put back begins with the first line of the dead letter",
    test=BURIAL + "test_requeue_puts_the_data_back",
)
def a_letter_goes_back_with_its_head() -> Iterator[None]:
    with dead_planted.FAULTS["letter_goes_back_with_its_head"].plant():
        yield


@defect(
    "dead large",
    "one item that is too large for the queue of the dead letters keeps back all others",
    test=BURIAL + "test_a_letter_that_is_too_large_there_stays_here",
)
def a_large_item_keeps_back_the_others() -> Iterator[None]:
    def set_aside(self: Burial, move: Any, large: dict[int, int], most: int) -> None:
        raise QueueFull(f"{max(large.values())} bytes are too large, of {most}, for queue {move.target} of {self}")

    with patch.object(Burial, "_set_aside", set_aside):
        yield


@defect("dead hook", "an item that a hook has taken becomes a dead letter", test=RETRIES + "test_the_hook_comes_first")
def a_hook_is_asked_too_late() -> Iterator[None]:
    real = Retries.after_abort

    def after_abort(self: Retries, item: Any, delay: float | None, reason: str, *, may_die: bool) -> None:
        config = self._backlog.config
        most = config.max_deliveries
        if may_die and most is not None and item.error_count >= most and config.dead_letter is not None:
            self._end(item, config, reason)
            if config.on_abort is not None:
                self._dispatcher.hooks.call(config.on_abort, item)
        else:
            real(self, item, delay, reason, may_die=may_die)

    with patch.object(Retries, "after_abort", after_abort):
        yield


assert burial.RETRY_SECONDS == 1.0  # "dead once" is seen by what is still there some seconds later
