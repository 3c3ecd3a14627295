"""``Checkpointer``: saves the checkpoints of one reader, moves the reader (``seek``), and closes it.

NOTE ON LOCKING: ``lock`` (C in docs/locking.md) is held while a checkpoint is taken and written, so that an older one
never replaces a newer one. It comes before the backlog's lock (R). A ``seek`` also holds the guard of the queue's
readers (G): the items that it moves to must not be retired before its new position is saved. See ``guard_and_saving``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING

from kestrelpy import _logging
from kestrelpy._reading.burial import Burial
from kestrelpy._reading.dispatch import Dispatcher, Notify, fail_all
from kestrelpy._reading.lag import LagPlace
from kestrelpy._reading.skipping import moved_past
from kestrelpy._waiting.line import taken_now
from kestrelpy.errors import ForkedQueue, KestrelError, QueueClosed

if TYPE_CHECKING:
    from kestrelpy._journal.format import Checkpoint
    from kestrelpy._reading.progress import Progress
    from kestrelpy._waiting.waiters import Waiter


@contextmanager
def guard_and_saving(guard: Callable[[], AbstractContextManager[None]], saving: threading.Lock) -> Iterator[None]:
    """Hold the guard and a checkpointer's ``lock``, and wait for neither while holding the other. Another process may
    hold the guard for long, and a wait for it with ``lock`` held would keep everybody from saving the position. And a
    reader in another process asks for the guard while it saves.
    """
    while True:
        held = False
        with guard():
            try:
                for held in taken_now(saving.acquire):  # noqa: B007 - one step
                    break
                if held:
                    yield
                    return
            finally:
                if held:
                    saving.release()
        with saving:
            pass


class Checkpointer:
    """The checkpoints of one reader, and its end. The rest of the library refers to a reader by this object."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.backlog = dispatcher.backlog
        self._source = dispatcher.source
        self.lock = threading.Lock()
        self.burial = Burial(dispatcher, self.save)
        self._saved: tuple[int, ...] = ()
        self.failures = 0  # guarded by ``lock``; read without it
        self._is_durable = True  # whether the state that was saved last had to be on disk
        self.is_ending = False  # a thread is closing the reader
        self._is_unfinished = False  # closing has begun, and is not finished
        self.is_last_due = False  # ``save_last`` has begun, and the last checkpoint is not saved
        self.lagging = False  # as of the last look: the reader is further behind than its configuration allows
        self.skipped = 0  # items that it was moved past, as it was too far behind

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(self, durable: bool) -> None:
        """``Reader.checkpoint``."""
        with self.lock:
            self.save_alone(durable)

    def save_last(self, durable: bool, end: Exception, notify: Notify = fail_all) -> None:
        """Make every later call raise ``end``, then save the last checkpoint, then notify the waiters. The reader
        breaks before the save, so that the checkpoint has every commit that was accepted. The waiters are notified
        last, because callbacks of users may raise anything. May be repeated after an interrupt.
        """
        gone: list[Waiter] = []
        self.is_last_due = True
        try:
            try:
                self.dispatcher.fail_waiting(end, lambda waiters, _: gone.extend(waiters))
                with self.lock:
                    self.save_alone(durable, ending=True)
                    self.is_last_due = False
            finally:
                notify(gone, end)
        except BaseException:  # perhaps an interrupt while the waiters were being notified
            notify(gone, end)
            raise

    def save_alone(self, durable: bool, *, ending: bool = False) -> None:
        """Save a checkpoint. Called with ``lock`` held, or while nobody else has this reader."""
        backlog = self.backlog
        with backlog.lock:
            if not ending:
                backlog.check_usable()
                if backlog.disturbed:
                    backlog.repair()
            if self.burial.waiting:
                self.burial.note_locked()
            backlog.progress.absorb()
            state, version = self._state_of(backlog.progress), self._version()
        self._store(state, durable=durable)
        self._is_durable = durable
        self._saved = version

    def state(self) -> Checkpoint | None:
        """Where the reader is now, as a checkpoint would say; ``None`` once it is closed. Nothing is saved."""
        backlog = self.backlog
        with backlog.lock:
            if backlog.broken is not None or backlog.disturbed:
                return None
            backlog.progress.absorb()
            return self._state_of(backlog.progress)

    def _state_of(self, progress: Progress) -> Checkpoint:
        source = self._source
        hint = source.hint(progress.head + 1)
        return progress.checkpoint(source.queue_id, self.backlog.name, source.durable_id, hint)

    def _store(self, state: Checkpoint, *, durable: bool) -> None:
        """Save ``state``, once the journal is durable up to what it names (R4). Called as ``save_alone``."""
        try:
            self._source.make_durable(state.last_named_id)
            self._source.save(self.backlog.owner, state, durable)
        except OSError:
            self.failures += 1
            raise

    @property
    def is_unsaved(self) -> bool:
        """Whether the reader has changed since its last checkpoint."""
        return self._saved != self._version()

    @property
    def holds_segments(self) -> bool:
        """Whether a durable checkpoint is due: segments that others retire are retired by durable checkpoints only."""
        return self.is_unsaved or not self._is_durable

    def note_saved(self) -> None:
        """The reader is where its checkpoint says: there is nothing to save."""
        self._saved = self._version()

    def tell_skipped(self) -> None:
        """The reader was just opened: log how many items it was moved past since it was opened last. The next
        checkpoint does not count them any more.
        """
        progress = self.backlog.progress
        skipped, progress.skipped = progress.skipped, 0
        if skipped:
            self.skipped += skipped
            name, reason = self.backlog.full_name, "as it was too far behind: they are not delivered to it"
            _logging.warning(
                "reader %s was moved past %s items since it was opened last, %s", name, f"{skipped:,}", reason
            )

    def _version(self) -> tuple[int, ...]:
        """A value that changes whenever there is something new to save."""
        return self._version_of(self.backlog.progress)

    def _version_of(self, progress: Progress) -> tuple[int, ...]:
        moves = progress.released_items, progress.released_bytes, progress.head
        return *moves, self.backlog.aborted_count, progress.skipped

    # -- moving ------------------------------------------------------------------------------------------------------

    def seek(self, item_id: int | None, time_ms: int | None) -> None:
        """``Reader.seek``."""
        backlog, source = self.backlog, self._source
        backlog.check_usable()
        try:
            with (
                self.burial.paused(),  # no item is on its way while the reader moves
                guard_and_saving(source.guard, self.lock),  # keeps the segments that this reads and needs
            ):
                failure = self._move(item_id, time_ms)
        except OSError:
            backlog.check_usable()  # closing the reader meanwhile closes its folder
            self.burial.run()
            raise
        source.attach(backlog)
        self.dispatcher.hand_off()
        source.moved()
        self.burial.run()
        if failure is not None:
            raise failure

    def _move(self, item_id: int | None, time_ms: int | None) -> OSError | None:
        """Save the new position and move there. Called with the guard and ``lock`` held. Returns the error if the
        position could not be saved and the reader has moved all the same.
        """
        backlog, failure = self.backlog, None
        with backlog.lock:
            backlog.check_usable()
            position = self._find_position(item_id, time_ms)
            moved = backlog.progress.moved_to(*position)
            state, version = self._state_of(moved), self._version_of(moved)
        try:
            self._saved, self._is_durable = (), False
            self._store(state, durable=False)
        except OSError as error:
            if not self._source.knows_heads:  # segments are retired by what is saved: do not move
                raise
            failure = error
        with backlog.lock:
            backlog.check_usable()
            backlog.move(backlog.progress.moved_to(*position), drop=True)
            backlog.special_through = backlog.progress.special_through
            backlog.update_fast_path()
        self._saved = version if failure is None else ()
        return failure

    def _find_position(self, item_id: int | None, time_ms: int | None) -> tuple[int, int, int]:
        """The id to continue at, and the number and bytes of all items ever put before it."""
        source = self._source
        visible_id = source.visible_id
        if item_id is None:
            assert time_ms is not None
            item_id = source.find_time(time_ms, visible_id)
        item_id = max(source.first_id, min(item_id, visible_id + 1))
        return (item_id, *source.before(item_id))

    def place(self) -> LagPlace:
        """Where the reader is now. Raises ``QueueClosed`` once it is closed."""
        backlog = self.backlog
        with backlog.lock:
            backlog.check_usable()
            backlog.progress.absorb()
            return LagPlace(backlog.progress.head, backlog.progress.released_bytes)

    def skip_to(self, item_id: int) -> int:
        """Move the reader forward to ``item_id``, durably; returns how many items it was moved past. Their open reads
        are dropped, as by a seek; all others stay. Does nothing if the reader is past that id. Nobody is notified: the
        caller calls ``moved`` of the source, with no lock held.

        Raises ``OSError`` if the new position cannot be saved: then the reader has not moved.
        """
        backlog, skipped = self.backlog, 0
        with self.lock:
            with backlog.lock:
                backlog.check_usable()
                if backlog.disturbed:
                    backlog.repair()
                if item_id <= backlog.progress.head + 1:
                    return 0
                moved = moved_past(self._source, backlog.progress, item_id, backlog.held())
                state, version = self._state_of(moved), self._version_of(moved)
            self._store(state, durable=True)
            with backlog.lock:
                backlog.check_usable()
                progress = backlog.progress  # commits may have come in between
                moved = moved_past(self._source, progress, item_id, backlog.held())
                skipped = moved.skipped - progress.skipped
                backlog.skip(moved, item_id)
                self.burial.skip_locked(item_id)
                backlog.update_fast_path()
            self._saved, self._is_durable = version, True
            self.skipped += skipped
        self._source.attach(backlog)
        return skipped

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """``Reader.close``."""
        backlog = self.backlog
        if isinstance(backlog.broken, ForkedQueue):
            return  # everything belongs to the parent
        closed = QueueClosed(f"reader {backlog.full_name} is closed")
        mine = False
        try:
            try:
                with backlog.lock:
                    if self.is_ending or (isinstance(backlog.broken, QueueClosed) and not self._is_unfinished):
                        return
                    mine = self.is_ending = self._is_unfinished = True
                self._save_at_end(closed)
            except (KestrelError, OSError):
                raise
            except BaseException:  # an interrupt: what was committed must not come again
                if mine:
                    self._save_at_end(closed)
                raise
        finally:
            if mine:
                try:
                    self.dispatcher.fail_waiting(closed)
                finally:
                    try:
                        self._source.closed_reader(backlog.owner)
                        self._is_unfinished = False
                    finally:  # written out: an interrupt at the start of a function would leave it true
                        self.is_ending = False

    def _save_at_end(self, closed: QueueClosed) -> None:
        if self.backlog.broken is None or self.is_last_due:
            with suppress(QueueClosed):  # from the queue, which ends at the same time and saves the checkpoint
                self.save_last(False, closed)

    def orphan(self, error: QueueClosed) -> None:
        """Another process erased the queue: make every later call raise ``error``. ``close`` releases the rest."""
        self._is_unfinished = True
        self.dispatcher.fail_waiting(error)

    @property
    def is_half_closed(self) -> bool:
        """Whether an interrupt has cut the closing short."""
        return self._is_unfinished and not self.is_ending

    @property
    def is_closed(self) -> bool:
        """Whether the reader, or its queue, was closed."""
        return isinstance(self.backlog.broken, QueueClosed)

    def abandon(self, error: Exception) -> None:
        """In a forked child: make every later call raise ``error``. Touches no lock that a thread may have held."""
        self.lock = threading.Lock()
        self.burial.abandon()
        self.dispatcher.abandon(error)
