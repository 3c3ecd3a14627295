"""Faults planted into what keeps a queue's room on the disk: each is found by the test that is named."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import KestrelError, _logging
from kestrelpy._journal import format as fmt
from kestrelpy._journal.archive_trimming import ArchiveTrimmer
from kestrelpy._journal.growth import Growth
from kestrelpy._journal.journal import Journal
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._journal.retention import Retention
from kestrelpy._reading import checkpointer as checkpointer_module
from kestrelpy._reading import lag, lag_watch, skipping
from kestrelpy._reading.backlog import Backlog
from kestrelpy._reading.checkpointer import Checkpointer
from kestrelpy._reading.lag_watch import LagWatch
from kestrelpy._reading.registry import ReaderRegistry
from kestrelpy._writing.disk_room import DiskRoom
from tests.room import test_archive_room, test_journal_limit, test_kept_segments, test_lag
from tests.room.rooms import Rooms

FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[None]], Callable[..., object]]] = {}


def fault(test: Callable[..., object]) -> Callable[[Callable[[], Iterator[None]]], None]:
    def note(plant: Callable[[], Iterator[None]]) -> None:
        FAULTS[plant.__name__] = contextmanager(plant), test

    return note


@fault(test_kept_segments.test_r41_a_segment_stays_for_keep_for_after_its_last_item_and_not_longer)
def a_kept_segment_goes_too_early() -> Iterator[None]:
    """By the time of its first item."""
    real = Retention.count_due

    def count_due(self: Retention, consumed: Any, now_ms: int, **rest: Any) -> int:
        return real(self, consumed, now_ms + 3000, **rest)

    with patch.object(Retention, "count_due", count_due):
        yield


@fault(test_kept_segments.test_keep_bytes_counts_what_is_consumed_and_the_oldest_go_first)
def all_segments_are_counted_as_kept() -> Iterator[None]:
    """The newest, too."""
    real = Retention.count_due

    def count_due(self: Retention, consumed: Any, now_ms: int, *, following: Any = (), excess: int = 0) -> int:
        return min(len(consumed), real(self, (*consumed, *following), now_ms, excess=excess))

    with patch.object(Retention, "count_due", count_due):
        yield


@fault(test_kept_segments.test_a_clock_that_was_ahead_keeps_nothing_for_years)
def a_time_in_the_future_counts() -> Iterator[None]:
    def is_old(self: Retention, segments: Any, now_ms: int) -> bool:
        return self.keep_for is not None and now_ms - segments[0].max_added_ms >= self.keep_for * 1000

    with patch.object(Retention, "_is_old", is_old):
        yield


@fault(test_kept_segments.test_the_age_is_that_of_the_items_also_after_a_restart)
def nobody_looks_when_time_passes() -> Iterator[None]:
    with patch.object(DiskRoom, "_retire", lambda self: None), patch.object(ReaderRegistry, "_last_due", lambda *_: 0):
        yield


@fault(test_kept_segments.test_a_kept_segment_that_a_reader_goes_back_to_is_needed_again)
def what_is_not_kept_goes_although_it_is_needed() -> Iterator[None]:
    take, due = Journal.take_retired, ReaderRegistry._last_due
    with (
        patch.object(Journal, "take_retired", lambda self, head, limit: take(self, fmt.LARGEST, limit)),
        patch.object(ReaderRegistry, "_last_due", lambda self, source, head, excess: due(self, source, fmt.LARGEST, 0)),
    ):
        yield


@fault(test_archive_room.test_r41_the_oldest_go_and_the_youngest_stay)
def the_youngest_of_an_archive_goes_first() -> Iterator[None]:
    real = Retention.count_due

    def count_due(self: Retention, consumed: Any, now_ms: int, **rest: Any) -> int:
        if isinstance(consumed, list) and consumed and hasattr(consumed[0], "name"):
            consumed.reverse()
        return real(self, consumed, now_ms, **rest)

    with patch.object(Retention, "count_due", count_due):
        yield


@fault(test_archive_room.test_what_is_of_another_queue_stays)
def any_segment_of_an_archive_goes() -> Iterator[None]:
    real = ArchiveTrimmer._look

    def look(self: ArchiveTrimmer, number: int, name: str) -> Any:
        from kestrelpy._journal.segment import stored_header

        header = stored_header(self._archive, number, name)
        was, self._queue_id = self._queue_id, header.queue_id if header is not None else b""
        try:
            return real(self, number, name)
        finally:
            self._queue_id = was

    with patch.object(ArchiveTrimmer, "_look", look):
        yield


@fault(test_journal_limit.test_r42_a_put_that_would_make_the_journal_larger_is_refused)
def the_journal_is_counted_without_the_newest_segment() -> Iterator[None]:
    with patch.object(Growth, "taken", lambda self, journal: sum(each.size for each in journal.segments[:-1])):
        yield


@fault(test_journal_limit.test_segments_that_the_archive_has_no_room_for_are_counted)
def segments_that_wait_for_the_archive_are_not_counted() -> Iterator[None]:
    with patch.object(Growth, "taken", lambda self, journal: sum(each.size for each in journal.segments)):
        yield


@fault(test_journal_limit.test_what_may_go_goes_first)
def nothing_is_retired_for_a_put() -> Iterator[None]:
    with patch.object(DiskRoom, "find_room", lambda self: None):
        yield


@fault(test_journal_limit.test_kept_segments_go_before_a_put_is_refused)
def kept_segments_are_kept_whatever_the_limit() -> Iterator[None]:
    with patch.object(Growth, "excess", lambda self, journal: 1):
        real = Retention.count_due
        with patch.object(
            Retention, "count_due", lambda self, each, now, following=(), excess=0: real(self, each, now)
        ):
            yield


@fault(test_journal_limit.test_a_batch_that_never_fits_is_refused_at_once)
def a_batch_may_have_the_whole_journal() -> Iterator[None]:
    with patch.object(Growth, "check_alone", lambda self, frame_bytes: None):
        yield


@fault(test_lag.test_the_owner_sees_a_reader_that_is_open_elsewhere)
def readers_elsewhere_are_not_looked_at() -> Iterator[None]:
    with patch.object(LagWatch, "_names", lambda self: set(self._registry.open)):
        yield


@fault(test_lag.test_an_open_read_holds_the_reader_back)
def lag_is_what_is_not_done() -> Iterator[None]:
    with patch.object(lag, "bytes_behind", lambda source, place: max(0, source.visible_bytes - place.released_bytes)):
        yield


@fault(test_lag.test_r40_a_reader_is_moved_to_the_first_segment_from_which_it_is_within)
def a_skip_goes_one_item_too_far() -> Iterator[None]:
    real = skipping.moved_past

    def moved_past(source: Any, progress: Any, item_id: int, held: Any) -> Any:
        return real(source, progress, item_id + 1, held)

    with patch.object(checkpointer_module, "moved_past", moved_past):
        yield


@fault(test_lag.test_a_reader_that_nobody_has_open_is_moved_and_its_opening_says_so)
def a_skip_of_an_absent_reader_goes_one_segment_too_far() -> Iterator[None]:
    real = lag.place_within
    with patch.object(lag_watch, "place_within", lambda source, config, head: real(source, config, head) + 3):
        yield


@fault(test_lag.test_r40_a_reader_is_moved_to_the_first_segment_from_which_it_is_within)
def a_skip_is_not_saved() -> Iterator[None]:
    with patch.object(Checkpointer, "_store", lambda self, state, *, durable: None):
        yield


@fault(test_lag.test_r40_a_skip_that_cannot_be_saved_moves_nothing)
def a_skip_moves_before_it_is_saved() -> Iterator[None]:
    real = Checkpointer._store

    def store(self: Checkpointer, state: Any, *, durable: bool) -> None:
        if state.skipped:
            with self.backlog.lock:
                moved = self.backlog.progress.copy()
                moved.skip_to(state.head + 1)
                self.backlog.skip(moved, state.head + 1)
        real(self, state, durable=durable)

    with patch.object(Checkpointer, "_store", store):
        yield


@fault(test_lag.test_open_reads_and_aborted_items_before_it_are_dropped_and_those_after_it_stay)
def a_skip_drops_all_open_reads() -> Iterator[None]:
    with patch.object(Backlog, "skip", lambda self, progress, item_id: self.move(progress, drop=True)):
        yield


@fault(test_lag.test_commits_after_it_and_kept_places_are_not_lost_by_a_skip)
def a_skip_forgets_what_is_done_after_it() -> Iterator[None]:
    real = skipping.moved_past

    def moved_past(source: Any, progress: Any, item_id: int, held: Any) -> Any:
        moved = real(source, progress, item_id, held)
        moved.done, moved.spans = {}, {}
        return moved

    with patch.object(checkpointer_module, "moved_past", moved_past):
        yield


@fault(test_lag.test_a_reader_that_nobody_has_open_is_moved_and_its_opening_says_so)
def a_skip_is_silent() -> Iterator[None]:
    with patch.object(Checkpointer, "tell_skipped", lambda self: None):
        yield


@fault(test_lag.test_one_line_when_it_begins_and_one_when_it_is_over)
def lag_is_logged_at_each_look() -> Iterator[None]:
    def note(self: Any, name: str, config: Any, *, is_behind: bool, more: str = "") -> None:
        self.is_behind = is_behind
        if is_behind:
            _logging.warning("reader %s is too far behind (%s)%s", name, lag.shown_lag_limits(config), more)

    with patch.object(lag_watch.OneReader, "note", note):
        yield


@fault(test_lag.test_the_journal_sees_it_where_it_grows_without_a_look)
def lag_is_seen_at_looks_alone() -> Iterator[None]:
    real = DiskRoom._choose_gate

    def choose(self: DiskRoom) -> bool:
        opened = real(self)
        self.growth.max_total = fmt.LARGEST
        return opened

    with patch.object(DiskRoom, "_choose_gate", choose):
        yield


@fault(test_lag.test_a_reader_that_another_process_has_open_is_moved_by_that_process_alone)
def the_owner_moves_readers_of_others() -> Iterator[None]:
    class Free:
        def release(self) -> None:
            pass

    real = LagWatch._skip_absent

    def skip(self: LagWatch, name: str, config: Any) -> int | None:
        with patch.object(QueueFiles, "lock_reader", lambda *_: Free()):
            return real(self, name, config)

    with patch.object(LagWatch, "_skip_absent", skip):
        yield


@pytest.mark.parametrize("name", FAULTS)
def test_found(name: str, rooms: Rooms, request: pytest.FixtureRequest) -> None:
    plant, test = FAULTS[name]
    names = test.__code__.co_varnames[: test.__code__.co_argcount]
    arguments = {each: rooms if each == "rooms" else request.getfixturevalue(each) for each in names}
    with plant(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # a test that fails leaves open what it had open
        with pytest.raises((AssertionError, pytest.fail.Exception, KestrelError)):
            test(**arguments)
