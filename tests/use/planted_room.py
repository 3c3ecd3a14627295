"""Defects of the room on the disk, put into it."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

from kestrelpy._journal.growth import Growth
from kestrelpy._journal.retention import Retention
from kestrelpy._reading import lag_watch
from kestrelpy._reading.checkpointer import Checkpointer
from kestrelpy._reading.lag import LagGauge
from kestrelpy._writing.disk_room import DiskRoom
from tests.use.planting import defect


@defect(
    "room journal",
    "a put is refused although the journal has room",
    test="tests/room/test_journal_limit.py::test_r42_everything_consumed_is_room_for_any_put",
)
def what_is_kept_takes_its_room_for_ever() -> Iterator[None]:
    with patch.object(Growth, "taken", lambda self, journal: 2 * sum(each.size for each in journal.segments)):
        yield


@defect(
    "room lag",
    "a put is refused for a reader that is within its limits",
    test="tests/room/test_lag.py::test_one_line_when_it_begins_and_one_when_it_is_over",
)
def a_reader_within_its_limits_is_behind() -> Iterator[None]:
    with patch.object(LagGauge, "is_behind", lambda self, source, place, config: place.head < source.visible_id):
        yield


@defect(
    "room gate",
    "puts are refused for a reader that has come closer",
    test="tests/room/test_lag.py::test_puts_are_refused_and_the_reader_is_named",
)
def a_gate_is_never_opened() -> Iterator[None]:
    real = DiskRoom._choose_gate

    def choose(self: DiskRoom) -> bool:
        was = self._status.room_gate
        opened = real(self)
        if was is not None:
            self._status.room_gate = was
        return opened

    with patch.object(DiskRoom, "_choose_gate", choose):
        yield


@defect(
    "room skipped",
    "items that a reader is moved past are not counted",
    test="tests/room/test_lag.py::test_a_reader_that_nobody_has_open_is_moved_and_its_opening_says_so",
)
def what_is_skipped_does_not_count() -> Iterator[None]:
    real = Checkpointer.skip_to

    def skip_to(self: Checkpointer, item_id: int) -> int:
        before = self.skipped
        skipped = real(self, item_id)
        self.skipped = before
        return skipped

    with patch.object(Checkpointer, "skip_to", skip_to):
        yield


@defect(
    "room forgets",
    "a reader that was moved forward is back after a crash",
    test="tests/room/test_lag.py::test_r40_a_skip_that_cannot_be_saved_moves_nothing",
)
def a_reader_is_moved_in_memory_only() -> Iterator[None]:
    real = Checkpointer.skip_to

    def skip_to(self: Checkpointer, item_id: int) -> int:
        with patch.object(self, "_store", lambda state, durable: None):
            return real(self, item_id)

    with patch.object(Checkpointer, "skip_to", skip_to):
        yield


@defect(
    "room eager",
    "a reader within its limits is moved forward",
    test="tests/room/test_lag.py::test_readers_that_are_within_are_left_alone",
)
def a_reader_within_its_limits_is_moved() -> Iterator[None]:
    with (
        patch.object(LagGauge, "is_behind", lambda self, source, place, config: place.head < source.visible_id),
        patch.object(lag_watch, "place_within", lambda source, config, head: source.visible_id + 1),
    ):
        yield


@defect(
    "room stays",
    "a reader that is too far behind is not moved forward",
    test="tests/room/test_lag.py::test_r40_a_reader_is_moved_to_the_first_segment_from_which_it_is_within",
)
def nobody_is_moved() -> Iterator[None]:
    with patch.object(LagGauge, "is_behind", lambda self, source, place, config: False):
        yield


@defect(
    "room silent",
    "nobody is told at an opening how many items a reader was moved past",
    test="tests/room/test_lag.py::test_a_reader_that_nobody_has_open_is_moved_and_its_opening_says_so",
)
def an_opening_says_nothing() -> Iterator[None]:
    def tell(self: Checkpointer) -> None:
        self.skipped += self.backlog.progress.skipped
        self.backlog.progress.skipped = 0

    with patch.object(Checkpointer, "tell_skipped", tell):
        yield


@defect(
    "room kept",
    "a kept segment goes at once",
    test="tests/room/test_kept_segments.py::test_r41_a_segment_stays_for_keep_for_after_its_last_item_and_not_longer",
    unreachable="what is consumed may be gone, for the explorer: it asks for nothing that all readers have done",
)
def nothing_is_kept() -> Iterator[None]:
    with patch.object(Retention, "count_due", lambda self, consumed, *_, **__: len(consumed)):
        yield
