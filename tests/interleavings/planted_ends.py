"""More faults, planted as in ``planted_races``: of the locks, of those who wait for room, and of all that ends."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast
from unittest.mock import patch

from kestrelpy import QueueClosed
from kestrelpy._journal.journal import Journal
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._journal.view import JournalView
from kestrelpy._reading.checkpointer import Checkpointer
from kestrelpy._reading.dispatch import Dispatcher, Notify, fail_all
from kestrelpy._reading.local_source import LocalSource
from kestrelpy._reading.registry import ReaderRegistry
from kestrelpy._reading.source import Cursor
from kestrelpy._writing.backpressure import Producer, ProducerTask, Room
from kestrelpy._writing.ending import Ending
from kestrelpy._writing.open_journal import OpenJournal
from kestrelpy._writing.put_path import PutPath, PutRequest
from kestrelpy.blocking import _Gets
from kestrelpy.clock import _Timers
from tests.interleavings.planted_races import NOT_WOKEN, race

# -- locks -----------------------------------------------------------------------------------------------------------


@race("order of locks|deadlock", "flow", "readers_come_and_go")
def the_queue_is_asked_for_under_the_reader() -> Iterator[None]:
    real = LocalSource.attach

    def attach(self: LocalSource, cursor: Cursor) -> None:
        with cursor.lock, self.lock:
            pass
        real(self, cursor)

    with patch.object(LocalSource, "attach", attach):
        yield


@race("it began at|IndexError|FileNotFoundError|not the first|skipped|CorruptJournal", "made_while_retiring")
def retires_without_the_guard() -> Iterator[None]:
    """A reader that is being made finds its first segment gone."""
    real, real_guard = ReaderRegistry.retire, QueueFiles.guard
    retiring: set[int] = set()

    def retire(self: ReaderRegistry, source: LocalSource, *, wait: bool = True) -> None:
        retiring.add(get_ident())
        try:
            real(self, source, wait=wait)
        finally:
            retiring.discard(get_ident())

    def guard(self: QueueFiles, *, wait: bool = True) -> AbstractContextManager[None]:
        return nullcontext() if get_ident() in retiring else real_guard(self, wait=wait)

    with patch.object(ReaderRegistry, "retire", retire), patch.object(QueueFiles, "guard", guard):
        yield


@race("has lost|has changed|AssertionError|IndexError|acknowledged|was given|out twice|CorruptJournal", "cut", "flow")
def appends_without_the_lock() -> Iterator[None]:
    real = PutPath._append_if_room

    def append(self: PutPath, *arguments: Any) -> Any:
        if not isinstance(self.source, _Unlocked):
            self.source = cast("LocalSource", _Unlocked(self.source))
        return real(self, *arguments)

    with patch.object(PutPath, "_append_if_room", append):
        yield


class _Unlocked:
    """A source whose lock locks nothing."""

    lock = nullcontext()

    def __init__(self, source: LocalSource) -> None:
        self.source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)


# -- room ------------------------------------------------------------------------------------------------------------


@race(NOT_WOKEN, "closing")
def a_close_forgets_who_waits_for_room() -> Iterator[None]:
    with patch.object(Ending, "_dismiss_producers", lambda self: None):
        yield


@race(NOT_WOKEN, "limited")
def nobody_is_woken_when_the_head_expires() -> Iterator[None]:
    with patch.object(Dispatcher, "expires_in", lambda self: None):
        yield


@race(NOT_WOKEN, "limited")
def a_producer_that_leaves_the_line_rings_nobody() -> Iterator[None]:
    with patch.object(Room, "leave", lambda self, producer: self._remove(producer)):
        yield


@race(NOT_WOKEN, "limited")
def a_producer_looks_before_it_stands_in_line() -> Iterator[None]:
    real, real_enter = PutPath._look_for_room, Room.enter
    looking: set[Producer] = set()

    def look(self: PutPath, parcel: PutRequest, producer: Producer) -> range | float | None:
        looking.add(producer)
        found = real(self, parcel, producer)
        looking.discard(producer)
        if not isinstance(found, range):
            self._room.enter(producer)
        return found

    def enter(self: Room, producer: Producer) -> bool:
        return producer not in looking and real_enter(self, producer)

    with (
        patch.object(PutPath, "_look_for_room", look),
        patch.object(Room, "enter", enter),
        patch.object(Room, "is_first", _would_be_first),
    ):
        yield


def _would_be_first(self: Room, producer: Producer) -> bool:
    return not self._line or self._line[0] is producer


@race("nobody gets anywhere", "limited")
def who_looks_for_room_wakes_the_others() -> Iterator[None]:
    """Two producers without room wake each other for ever."""
    real = Dispatcher.discard_expired

    def discard(self: Dispatcher, limit: int | None = None) -> int:
        count = real(self, limit)
        self.notify()
        return count

    with patch.object(Dispatcher, "discard_expired", discard):
        yield


@race(NOT_WOKEN, "in_line")
def a_task_that_leaves_the_line_rings_nobody() -> Iterator[None]:
    real = Room.leave

    def leave(self: Room, producer: Producer) -> None:
        if isinstance(producer, ProducerTask):
            producer.stop()
            self._remove(producer)
        else:
            real(self, producer)

    with patch.object(Room, "leave", leave):
        yield


@race(NOT_WOKEN, "in_line")
def a_reader_falls_quiet_after_it_has_rung() -> Iterator[None]:
    """A producer that was rung finds no room, and says that the next commit is to ring; that is overwritten."""

    def notify(self: Dispatcher) -> None:
        self.source.moved()
        self.backlog.may_skip_notify = self._allows_skip

    with patch.object(Dispatcher, "notify", notify):
        yield


# -- the end ---------------------------------------------------------------------------------------------------------


@race("again, committed before", "flow", "closing", "coroutines")
def commits_are_accepted_after_the_last_checkpoint() -> Iterator[None]:
    def save_last(self: Checkpointer, durable: bool, end: Exception, notify: Notify = fail_all) -> None:
        with self.lock:
            self.save_alone(durable, ending=True)
        self.dispatcher.fail_waiting(end, notify)

    with patch.object(Checkpointer, "save_last", save_last):
        yield


@race(NOT_WOKEN, "blocking_face")
def a_get_enters_the_line_of_a_shut_queue() -> Iterator[None]:
    with patch.object(_Gets, "_enter", lambda self, waiter: self._dispatcher._enter(waiter)):
        yield


@race("^BrokenSchedule: put .*, got", "in_line")
def a_shutdown_sends_away_who_has_an_item_coming() -> Iterator[None]:
    with patch.object(Dispatcher, "dismiss_empty_handed", Dispatcher.dismiss):
        yield


@race(NOT_WOKEN, "maintenance_dies")
def a_dying_maintenance_thread_tells_nobody() -> Iterator[None]:
    """R30."""

    def abandon(self: _Timers, error: BaseException, due: Any) -> None:
        with self._lock:
            self._heap.drain()
            self._thread = None

    with patch.object(_Timers, "_abandon", abandon):
        yield


@race(NOT_WOKEN + "|again, committed before", "closing")
def readers_are_not_told_of_the_end() -> Iterator[None]:
    def break_(self: Dispatcher, error: Exception, notify: Notify = fail_all) -> None:
        backlog = self.backlog
        with backlog.lock:
            backlog.broken, backlog.fast = error, False

    with patch.object(Dispatcher, "fail_waiting", break_):
        yield


class _Stale:
    """A journal with the segments that it had."""

    def __init__(self, view: JournalView) -> None:
        self._view = view
        self.segments = view.segments

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


@race("IndexError", "counted")
def segments_are_read_before_the_end_of_the_journal() -> Iterator[None]:
    real: Any = JournalView.before
    with patch.object(JournalView, "before", lambda self, item_id: real(_Stale(self), item_id)):
        yield


@race("acknowledged before its sync", "one_sync_fails")
def a_file_that_is_closed_has_been_synced() -> Iterator[None]:
    """While a leader waits for its turn, the sync of a rotation fails, and the file is closed."""
    with patch.object(Journal, "is_active", lambda self, file: file is self._file):
        yield


@race("Bad file descriptor|a sync failed|NoneType|AssertionError", "erased")
def the_file_is_closed_under_a_sync() -> Iterator[None]:
    with patch.object(OpenJournal, "_abandon_journal", lambda self: self.journal.abandon()):
        yield


@race("again, committed before", "closing")
def breaks_and_empties_its_line_in_two_steps() -> Iterator[None]:
    """In between a put serves the line of a reader that is closed: the commit of that item is lost."""

    def break_(self: Dispatcher, error: Exception, notify: Notify = fail_all) -> None:
        backlog = self.backlog
        with backlog.lock:
            backlog.broken, backlog.fast, backlog.opened = error, False, {}
        self.dismiss(error)

    with patch.object(Dispatcher, "fail_waiting", break_):
        yield


@race("completed with .* held", "readers_come_and_go")
def drops_a_reader_under_the_lock() -> Iterator[None]:
    real = ReaderRegistry.drop

    def drop(self: ReaderRegistry, name: str) -> None:
        with self._opening:
            reader = self.open.get(name)
            if reader is not None:
                reader.close()
        real(self, name)

    with patch.object(ReaderRegistry, "drop", drop):
        yield


@race("QueueClosed", "readers_come_and_go")
def one_reader_that_closes_stops_the_checkpoint_of_all() -> Iterator[None]:
    def of_each(self: ReaderRegistry, call: Any) -> list[Any]:
        return [call(reader) for reader in list(self.open.values())]

    with patch.object(ReaderRegistry, "of_each", of_each):
        yield


@race("is left|FileNotFoundError|KeyError", "erased")
def a_checkpoint_comes_back_after_an_erase() -> Iterator[None]:
    with patch.object(ReaderRegistry, "stop", lambda self, error, tell=None: None):
        yield


@race("bytes of nothing", "counted")
def bytes_are_counted_later_than_items() -> Iterator[None]:
    with patch.object(LocalSource, "before", lambda self, item_id: (item_id - 1 - self.missing, self.visible_bytes)):
        yield


@race("were told nothing|QueueLocked", "parting")
def who_makes_a_reader_does_not_look_again() -> Iterator[None]:
    with patch.object(ReaderRegistry, "_check_again", lambda self, reader: None):
        yield


@race("comes again", "parting")
def a_queue_passes_over_a_reader_that_closes() -> Iterator[None]:
    def save_places(self: Ending, closed: QueueClosed, notify: Notify) -> None:
        for reader in self._registry.open.values():
            if reader._backlog.broken is None:
                reader._checkpointer.save_last(True, closed, notify)

    with patch.object(Ending, "_save_checkpoints", save_places):
        yield
