"""Planted defects of readers: their places, who owns them, what they wait for, and what they are told to keep to."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from unittest.mock import patch

from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._reading import reader as reader_module
from kestrelpy._reading.consuming import Consuming, wait_until
from kestrelpy._reading.detached_source import DetachedSource
from kestrelpy._reading.dispatch import Dispatcher
from kestrelpy._reading.progress import Progress
from kestrelpy._reading.reader import Reader
from kestrelpy._waiting.line import Waiting
from kestrelpy._waiting.waiters import Waiter
from kestrelpy._writing import options
from kestrelpy._writing.maintenance import Maintenance
from kestrelpy.errors import KestrelError
from kestrelpy.item import Item
from kestrelpy.memory._simple import SimpleBlockingQueue
from tests.use.planting import defect


@defect(
    "C1",
    "a default reader's place, and its unread items, are deleted at the next opening after anybody opened a named "
    "reader elsewhere",
    test="tests/unit/reading/test_detached_source.py::test_a_default_reader_that_nobody_took_over_keeps_its_place_beside_named_ones",
)
def a_named_reader_beside_the_default_one_counts_as_its_heir() -> Iterator[None]:
    def has_heir(self: QueueFiles, readers: Iterable[str], queue_id: bytes) -> bool:
        return any(self.is_there(reader, queue_id) for reader in readers)

    with patch.object(QueueFiles, "has_heir", has_heir):
        yield


@defect(
    "C3",
    "a seek back beside a retirement: the queue does not open any more (CorruptJournal), or the seek raises "
    "FileNotFoundError",
    test="tests/unit/reading/test_reader.py::test_a_seek_back_beside_a_retirement_comes_before_it_or_after_it",
)
def a_seek_does_not_keep_retirements_out() -> Iterator[None]:
    real = Reader.seek

    @functools.wraps(real)
    def seek(self: Reader, item_id: int | None = None, *, time_ms: int | None = None) -> None:
        with patch.object(QueueFiles, "guard", lambda self, **_: nullcontext()):
            real(self, item_id, time_ms=time_ms)

    with patch.object(Reader, "seek", seek):
        yield


@defect(
    "C8",
    "a task in aget that is thrown away takes its reader's lock in a finaliser, and hangs where its own thread has it",
    test="tests/unit/waiting/test_line.py::test_a_task_that_is_thrown_away_waits_for_no_lock",
)
def a_task_that_is_thrown_away_waits_for_the_lock() -> Iterator[None]:
    with patch.object(Waiting, "_forsake", Waiting._quit), patch.object(SimpleBlockingQueue, "_forsake", Waiting._quit):
        yield


@defect(
    "C7",
    "after erase() an old reader elsewhere replaces the place of the new queue's reader: segments are retired on it, "
    "and it waits for ever",
    test="tests/unit/reading/test_detached_source.py::test_the_reader_of_an_erased_queue_leaves_that_of_the_new_one_alone",
)
def an_old_reader_elsewhere_does_not_ask_whether_its_queue_was_erased() -> Iterator[None]:
    with (
        patch.object(DetachedSource, "_check_there", lambda self: None),
        patch("kestrelpy._journal.queue_files.is_checkpoint_of", lambda state, reader, queue_id: True),
    ):
        yield


@defect(
    "C25",
    "behind one open read that stays, each done id costs memory, and all of them are sorted at each checkpoint",
    test="tests/unit/reading/test_progress.py::test_a_checkpoint_behind_an_open_read_that_stays_costs_what_was_done_since",
    unreachable="nothing is wrong but the time and the memory, by hundreds of thousands of items",
)
def what_is_done_behind_an_open_read_stays_single() -> Iterator[None]:
    with patch.object(Progress, "fold", Progress.done_spans):
        yield


@defect(
    "C26",
    "options that are taken and break later: max_age=inf breaks every get, a float of segment_bytes every later put",
    test="tests/unit/test_queue.py::test_a_queue_is_not_opened_with_what_would_break_later",
)
def options_are_taken_without_a_look() -> Iterator[None]:
    with patch.object(options, "check_whole", lambda name, value: value):
        yield


@defect(
    "house-6",
    "abort(True) aborts item 1, where commit(True) is a TypeError",
    test="tests/unit/test_queue.py::test_an_id_is_any_whole_number_and_no_bool",
)
def a_bool_is_an_id() -> Iterator[None]:
    real = reader_module.id_of

    def id_of(item_or_id: Item | int) -> int:
        return int(item_or_id) if isinstance(item_or_id, int) else real(item_or_id)

    with patch.object(reader_module, "id_of", id_of):
        yield


@defect(
    "E1",
    "open_reader of a queue that is erased meanwhile raises CorruptJournal or leaves a place for which scan raises it",
    test="tests/unit/reading/test_detached_source.py::test_a_reader_that_is_opened_while_its_queue_is_erased_is_of_what_is_there_then",
)
def a_reader_elsewhere_is_made_by_what_was_seen_without_the_guard() -> Iterator[None]:
    with patch.object(DetachedSource, "look_again", lambda self: None):
        yield


@defect(
    "E3",
    "one item can't be read from the disk: the first in line is told, and those behind it wait beside what is there",
    test="tests/unit/reading/test_dispatch.py::test_who_waits_behind_somebody_for_whom_an_item_could_not_be_read_gets_it",
)
def one_is_told_of_a_read_error_and_nobody_else_is_served() -> Iterator[None]:
    def serve_locked(
        self: Dispatcher, given: list[tuple[Waiter, Item]], failed: list[tuple[Waiter, Exception]], expired: list[Item]
    ) -> None:
        try:
            self._give_locked(given, expired)
        except (KestrelError, OSError) as error:
            waiter = self._line.wanting()
            if waiter is not None:
                failed.append((waiter, error))
                del self._line.waiters[waiter]
        self._after_line_locked()

    with patch.object(Dispatcher, "_serve_locked", serve_locked):
        yield


@defect(
    "E4",
    "join() returns while items are got and not done: a program that stops then has done half of its work",
    test="tests/unit/test_queue_methods.py::test_join_of_a_reader_waits_for_commits",
)
def join_forgets_open_reads() -> Iterator[None]:
    def join(self: Consuming[object], timeout: float | None = None) -> bool:
        reader = self._consumed()
        return wait_until(lambda: reader.items == reader.open_items, reader.check_usable, timeout)

    with patch.object(Consuming, "join", join):
        yield


@defect(
    "E5",
    "a queue that takes in a batch while it is opened saves no position in the background: a kill repeats everything",
    test="tests/unit/inbox/test_inbox.py::test_an_opening_that_ingests_saves_positions_later_on",
)
def a_round_that_the_opening_asks_for_counts_as_armed() -> Iterator[None]:
    real = Maintenance.arm

    def arm(self: Maintenance) -> None:
        real(self)
        self._is_armed = self._is_armed or self._is_due

    with patch.object(Maintenance, "arm", arm):
        yield
