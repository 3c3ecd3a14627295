"""``Checkpointer``: saves where one reader is; moves it; and saves it for the last time when it closes.

NOTE ON LOCKING: ``lock`` (C in docs/locking.md) is held while a checkpoint is taken and written, so that an older one
never replaces a newer; it comes before the backlog's lock (R). A ``seek`` holds the guard of the queue's readers (G) as
well: what it needs must not be retired before its new position is saved. See ``guard_and_saving``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING

from kestrelpy._reading.dispatch import Dispatcher, Notify, fail_all
from kestrelpy._waiting.line import taken_now
from kestrelpy.errors import ForkedQueue, QueueClosed

if TYPE_CHECKING:
    from kestrelpy._journal.format import Checkpoint
    from kestrelpy._reading.progress import Progress
    from kestrelpy._waiting.waiters import Waiter


@contextmanager
def guard_and_saving(guard: Callable[[], AbstractContextManager[None]], saving: threading.Lock) -> Iterator[None]:
    """The guard and a checkpointer's ``lock``, neither of them waited for with the other in hand. The guard may be
    another process's for long, and nobody may save the position meanwhile; and a reader in another process asks for the
    guard while it saves.
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
    """The checkpoints of one reader, the last of them at its end. The rest of the library holds a reader by this."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.backlog = dispatcher.backlog
        self._source = dispatcher.source
        self.lock = threading.Lock()
        self._saved: tuple[int, ...] = ()
        self.is_ending = False  # a thread is closing the reader
        self._is_unfinished = False  # one has begun to, and is not done

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(self, durable: bool) -> None:
        """``Reader.checkpoint``."""
        with self.lock:
            self.save_alone(durable)

    def save_last(self, durable: bool, end: Exception, notify: Notify = fail_all) -> None:
        """Every later call raises ``end``. It breaks first: what is saved then has every commit it accepted. Who waits
        is told last: what users call back may raise anything.
        """
        gone: list[Waiter] = []
        try:
            try:
                self.dispatcher.break_off(end, lambda waiters, _: gone.extend(waiters))
                with self.lock:
                    self.save_alone(durable, ending=True)
            finally:
                notify(gone, end)
        except BaseException:  # an interrupt, perhaps, of whoever was telling
            notify(gone, end)
            raise

    def save_alone(self, durable: bool, *, ending: bool = False) -> None:
        """Under ``lock``, or while nobody else has this reader."""
        backlog = self.backlog
        with backlog.lock:
            if not ending:
                backlog.check_usable()
                if backlog.disturbed:
                    backlog.repair()
            backlog.progress.absorb()
            state, version = self._state_of(backlog.progress), self._version()
        self._store(state, durable=durable)
        self._saved = version

    def _state_of(self, progress: Progress) -> Checkpoint:
        source = self._source
        hint = source.hint(progress.head + 1)
        return progress.checkpoint(source.queue_id, self.backlog.name, source.durable_id, hint)

    def _store(self, state: Checkpoint, *, durable: bool) -> None:
        """Save a state (R4). Under ``lock``."""
        self._source.make_durable(state.last_named_id)
        self._source.save(self.backlog.owner, state, durable)

    @property
    def is_unsaved(self) -> bool:
        """Whether something happened since the last checkpoint."""
        return self._saved != self._version()

    def note_saved(self) -> None:
        """The reader goes on where a checkpoint has it."""
        self._saved = self._version()

    def _version(self) -> tuple[int, ...]:
        """Differs whenever there is something new to save."""
        return self._version_of(self.backlog.progress)

    def _version_of(self, progress: Progress) -> tuple[int, ...]:
        return progress.released_items, progress.released_bytes, progress.head, self.backlog.aborted_count

    # -- moving ------------------------------------------------------------------------------------------------------

    def seek(self, item_id: int | None, time_ms: int | None) -> None:
        """``Reader.seek``."""
        backlog, source = self.backlog, self._source
        backlog.check_usable()
        try:
            with guard_and_saving(source.guard, self.lock):  # nothing is retired that is read here, or needed then
                failure = self._move(item_id, time_ms)
        except OSError:
            backlog.check_usable()  # who closes it meanwhile closes its folder
            raise
        source.attach(backlog)
        self.dispatcher.hand_off()
        source.moved()
        if failure is not None:
            raise failure

    def _move(self, item_id: int | None, time_ms: int | None) -> OSError | None:
        """Save the position and go there. Under the guard and ``lock``. What is returned is why it could not be saved,
        where the reader has moved all the same.
        """
        backlog, failure = self.backlog, None
        with backlog.lock:
            backlog.check_usable()
            position = self._find_position(item_id, time_ms)
            moved = backlog.progress.moved_to(*position)
            state, version = self._state_of(moved), self._version_of(moved)
        try:
            self._saved = ()
            self._store(state, durable=False)
        except OSError as error:
            if not self._source.knows_heads:  # who retires goes by what is saved
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
        """Where to go on, and how many items and bytes were ever put before that."""
        source = self._source
        visible_id = source.visible_id
        if item_id is None:
            assert time_ms is not None
            item_id = source.find_time(time_ms, visible_id)
        item_id = max(source.first_id, min(item_id, visible_id + 1))
        return (item_id, *source.before(item_id))

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """``Reader.close``."""
        backlog = self.backlog
        if isinstance(backlog.broken, ForkedQueue):
            return  # all of it is the parent's
        closed = QueueClosed(f"reader {backlog.full_name} is closed")
        mine = False
        try:
            with backlog.lock:
                if self.is_ending or (isinstance(backlog.broken, QueueClosed) and not self._is_unfinished):
                    return
                mine = self.is_ending = self._is_unfinished = True
            if backlog.broken is None:
                with suppress(QueueClosed):  # of the queue, which ends beside this: it saves what there is to save
                    self.save_last(False, closed)
        finally:
            if mine:
                try:
                    self.dispatcher.break_off(closed)
                finally:
                    self._part()

    def _part(self) -> None:
        try:
            self._source.closed_reader(self.backlog.owner)
            self._is_unfinished = False
        finally:
            self.is_ending = False

    def orphan(self, error: QueueClosed) -> None:
        """Its queue was erased by another process: every later call raises ``error``. ``close`` gives back the rest."""
        self._is_unfinished = True
        self.dispatcher.break_off(error)

    @property
    def is_half_closed(self) -> bool:
        """Whether closing it was interrupted."""
        return self._is_unfinished and not self.is_ending

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or its queue was."""
        return isinstance(self.backlog.broken, QueueClosed)

    def abandon(self, error: Exception) -> None:
        """In a forked child: every later call raises ``error``; no lock is touched that a thread may have held."""
        self.lock = threading.Lock()
        self.dispatcher.abandon(error)
