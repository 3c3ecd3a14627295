"""Defects of standbys, of ``rejoin`` and of lazy restores, planted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from kestrelpy._journal import file_names
from kestrelpy.ship import rejoining
from kestrelpy.ship.following import Follower
from kestrelpy.ship.history import History
from kestrelpy.ship.lazy import LazyFolder
from kestrelpy.ship.lease import LeaseWatch
from kestrelpy.ship.manifest import LogState
from kestrelpy.ship.ship_file import ShipFile
from kestrelpy.ship.slots import CLOSE
from kestrelpy.ship.standby_folder import StandbyFolder
from tests.use.planting import defect

STANDBY = "tests/ship/test_standby.py"
FOLLOWING = "tests/ship/test_following.py"
REJOINING = "tests/ship/test_rejoining.py"
LAZY = "tests/ship/test_lazy.py"


@defect(
    "standby early",
    "a standby takes a queue over when half of its owner's lease is over",
    test="tests/ship/test_lease.py::test_a_lease_is_over_when_the_end_was_seen_unchanged_for_so_long",
)
def half_a_lease_is_enough() -> Iterator[None]:
    def left(self: LeaseWatch) -> float | None:
        return max(0.0, self._lease_ms / 2000 - self.unchanged) if self._lease_ms else None

    with patch.object(LeaseWatch, "left", property(left)):
        yield


@defect(
    "standby gone",
    "a standby takes its owner to be dead when the folder of the store is not mounted any more",
    test=f"{FOLLOWING}::test_a_store_that_is_not_the_one_it_was_says_nothing_of_an_owner",
)
def an_empty_store_is_the_end_of_the_log() -> Iterator[None]:
    with patch.object(Follower, "_is_there", lambda self, state: True):
        yield


@defect(
    "standby begins",
    "a standby, or a copy, begins a log of its own in a store that is not the one it was",
    test="tests/ship/test_takeover.py::test_a_copy_does_not_begin_a_log_where_its_own_is_gone",
)
def nobody_knows_the_slot_that_was_there() -> Iterator[None]:
    with (
        patch.object(Follower, "_is_there", lambda self, state: True),
        patch.object(ShipFile, "slot_there", property(lambda self: self.slot)),
    ):
        yield


@defect(
    "standby closed",
    "a plain close of an owner is taken for a hand-over",
    test=f"{STANDBY}::test_a_plain_close_is_no_hand_over",
)
def whoever_has_left_has_handed_over() -> Iterator[None]:
    def has_left(self: Follower) -> bool:
        return self.state is not None and self.state.header is not None and self.state.header.kind == CLOSE

    known = property(has_left, lambda self, value: None)
    with patch.object(Follower, "is_handed_over", known, create=True):
        yield


@defect(
    "standby readers",
    "a standby forgets where the readers were",
    test=f"{FOLLOWING}::test_every_slot_is_followed",
)
def checkpoints_are_saved_as_at_the_end() -> Iterator[None]:
    real = StandbyFolder._save_states

    def save_states(self: StandbyFolder, state: LogState) -> None:
        there = state.checkpoints
        state.checkpoints = {
            name: each._replace(head=state.last_id, done=()) if state.last_id > each.head else each
            for name, each in there.items()
        }
        try:
            real(self, state)
        finally:
            state.checkpoints = there

    with patch.object(StandbyFolder, "_save_states", save_states):
        yield


@defect(
    "standby tail",
    "a standby that has closed a segment loses the beginning of the next one",
    test=f"{FOLLOWING}::test_every_slot_is_followed",
)
def the_active_segment_comes_late() -> Iterator[None]:
    real = StandbyFolder._extend

    def extend(self: StandbyFolder, state: LogState) -> None:
        if len(state.tail) > 1:
            real(self, state)

    with patch.object(StandbyFolder, "_extend", extend):
        yield


@defect(
    "standby open",
    "a reader is opened in the folder of a standby",
    test=f"{FOLLOWING}::test_readers_and_writers_are_refused_while_a_standby_follows",
)
def the_sign_of_a_standby_is_not_looked_for() -> Iterator[None]:
    with patch.object(file_names, "refuse_standby", lambda names, queue, folder: None):
        yield


@defect(
    "standby ids",
    "whoever takes a queue over gives out ids that the owner before has given out",
    test="tests/ship/test_takeover.py::test_an_owner_that_has_put_nothing_still_begins_far_above",
)
def ids_go_on_after_the_last_one() -> Iterator[None]:
    real = History.judge

    def judge(self: History, state: LogState, *about: Any) -> int:
        real(self, state, *about)
        return max(self._last_id, state.place.last_id) + 1

    with patch.object(History, "judge", judge):
        yield


@defect(
    "rejoin loses",
    "the first segment that an old owner had not shipped is not set aside",
    test=f"{REJOINING}::test_what_was_not_shipped_is_set_aside_and_named",
)
def the_first_segment_stays_where_it_is() -> Iterator[None]:
    with patch.object(rejoining, "_copy", lambda folder, name, target: None):
        yield


@defect(
    "rejoin open",
    "the folder of an old owner is opened before it follows the log",
    test=f"{REJOINING}::test_what_was_not_shipped_is_set_aside_and_named",
)
def no_restore_is_under_way() -> Iterator[None]:
    real = StandbyFolder._sign

    def sign(self: StandbyFolder, name: str, names: list[str]) -> None:
        if name != file_names.restore_name(self.queue):
            real(self, name, names)

    with patch.object(StandbyFolder, "_sign", sign):
        yield


@defect(
    "rejoin merges",
    "what an old owner had not shipped stays in its folder, and comes back",
    test=f"{REJOINING}::test_what_was_not_shipped_is_set_aside_and_named",
)
def nothing_is_cut_back_to_the_log() -> Iterator[None]:
    with (
        patch.object(rejoining, "_move", lambda *arguments: None),
        patch.object(rejoining, "_describe", lambda *arguments: None),
    ):
        yield


@defect(
    "lazy hole",
    "a segment that is not here is read as zeros",
    test=f"{LAZY}::test_only_what_is_read_is_fetched",
)
def nothing_is_fetched() -> Iterator[None]:
    with patch.object(LazyFolder, "_fetch", lambda self, name, segment: None):
        yield


@defect(
    "lazy open",
    "a queue that is not all here is opened without its store",
    test=f"{LAZY}::test_nobody_else_opens_it",
)
def a_lazy_restore_looks_like_any_other() -> Iterator[None]:
    with patch.object(file_names, "lazy_name", lambda queue: f"{queue}.nothing"):
        yield


@defect(
    "lazy away",
    "a get of what is not here reads zeros once the store has not answered",
    test=f"{LAZY}::test_what_cannot_be_fetched_is_said_and_nothing_is_skipped",
)
def a_failed_fetch_counts_as_one() -> Iterator[None]:
    real = LazyFolder._fetch

    def fetch(self: LazyFolder, name: str, segment: Any) -> None:
        try:
            real(self, name, segment)
        except BaseException:
            self._missing.pop(name, None)
            raise

    with patch.object(LazyFolder, "_fetch", fetch):
        yield
