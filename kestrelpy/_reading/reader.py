"""``Reader``: open reads, commit, abort, a place that is saved.

Its items come out of ``dispatch``; this half is what users call.

NOTE ON LOCKING: ``_lock`` (R) is the one of ``dispatch``. ``_saving`` is held while a checkpoint is taken and written,
so that an older one never replaces a newer; it comes before ``_lock``. A ``seek`` holds the guard of the queue's
readers (G) as well: what it needs must not be retired before its new place is saved. See ``guard_and_saving``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from math import isnan
from operator import is_
from typing import cast

from kestrelpy._checks import check_timeout
from kestrelpy._journal.format import Checkpoint
from kestrelpy._reading.dispatch import Tell, fail_all
from kestrelpy._reading.figures import Figures
from kestrelpy._reading.progress import Progress
from kestrelpy._waiting.line import taken_now
from kestrelpy._waiting.waiters import Waiter
from kestrelpy.config import FullPolicy, ReaderConfig
from kestrelpy.errors import ForkedQueue, QueueClosed, QueueEmpty, UnknownItem, copy_of
from kestrelpy.item import Item, id_of, new_item

__all__ = ["Reader"]


@contextmanager
def guard_and_saving(guard: Callable[[], AbstractContextManager[None]], saving: threading.Lock) -> Iterator[None]:
    """The guard and a reader's ``_saving``, neither of them waited for with the other in hand. The guard may be another
    process's for long, and nobody may save the place meanwhile; and a reader in another process asks for the guard
    while it saves.
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


class Reader(Figures):
    """One reader's place in a queue. Made by ``JournaledQueue.reader`` or ``open_reader``, never directly.

    Thread-safe. Every call raises ``QueueClosed`` after ``close()``, ``DurabilityUnknown`` once a sync of the queue
    has failed, ``ForkedQueue`` in a forked child, ``CorruptJournal`` where it has to read what is damaged on disk,
    ``OSError`` where the system refuses a file, and ``TypeError`` for an argument that is neither an item nor an id.
    """

    # -- getting --------------------------------------------------------------------------------------------------

    def get(self, block: bool = True, timeout: float | None = None) -> Item:
        """Open a read of the next item: an aborted one first, else the next unread one.

        Waits in line for up to ``timeout`` seconds of real time (``None``: for ever; ``block=False``: not at all).
        Raises ``QueueEmpty``, ``ValueError`` for a negative timeout, ``CorruptJournal`` if the next item is damaged
        on disk, or the segment that it was in is not there: ``seek`` past it, or open the queue with quarantine.
        """
        item = None
        try:
            with self._lock:
                if self._fast and (timeout is None or timeout >= 0 or not block):
                    progress, take = self._progress, self._take
                    item_id = progress.next_id
                    entry = take(item_id, None)
                    if entry is not None:
                        data, added_ms, expires_ms = entry
                        if expires_ms is None:
                            item = new_item(Item)
                            item.id = item_id
                            item.data = data
                            item.added_ms = added_ms
                            item.expires_ms = None
                            item.error_count = 0
                            item._owner = self
                            self._open[item_id] = item
                            progress.next_id = item_id + 1
                            self._opened += 1
                            return item
                        self._ahead[item_id] = entry
        except BaseException as error:
            self._let_fall(error, [] if item is None else [item.id])
            raise
        return self._get_slowly(block, timeout)

    def get_nowait(self) -> Item:
        """``get(block=False)``."""
        return self.get(False)

    def _get_slowly(self, block: bool | None, timeout: float | None) -> Item:
        if block:
            check_timeout(timeout)
        entered = self._clock.monotonic() if self.config.on_timeout else 0.0
        try:
            return self._take_now()
        except QueueEmpty:
            if not block or timeout == 0:
                if block is not None:  # else whoever asks will wait by himself
                    self._count_miss(entered)
                raise
        return self._wait(timeout)

    def get_many(self, max_items: int, *, max_bytes: int | None = None, timeout: float | None = None) -> list[Item]:
        """Open reads of up to ``max_items`` items: waits for the first as ``get`` does, then takes what is there.

        Stops before the item that would bring the data above ``max_bytes``, but takes at least one. Raises
        ``QueueEmpty`` if none came in time.
        """
        if max_items < 1:
            raise ValueError(f"max_items must be at least 1, not {max_items!r}")
        items: list[Item] = []
        expired: list[Item] = []
        first = self.get(True, timeout)
        try:
            items.append(first)
            with self._lock:
                self._take_more_locked(items, expired, max_items, max_bytes)
            self._after_taking(items[1:], expired)
        except BaseException as error:
            self._let_fall(error, [first.id, *(item.id for item in items)], expired)
            raise
        return items

    def peek(self, timeout: float | None = 0) -> Item:
        """The next item, not opened: it cannot be committed, and stays where it is. Waits as ``get`` does."""
        check_timeout(timeout)
        expired: list[Item] = []
        try:
            with self._lock:
                self._check_usable()
                found = None if self._line else self._find_locked(expired)
                if found is not None:
                    self._returned.add(*found)
                    self._update_fast_path_locked()
            self._after_taking([], expired)
        except BaseException as error:
            self._let_fall(error, (), expired)
            raise
        if found is not None:
            return self._item(*found)
        if timeout == 0:
            self._misses += 1
            raise QueueEmpty("nothing is there")
        return self._wait(timeout, peeks=True)

    def _rename(self, name: str, config: ReaderConfig) -> None:
        """The default reader becomes the first named one."""
        with self._lock:
            self.name, self.config = name, config
            self._wants_quiet = config.full_policy is not FullPolicy.BLOCK and config.max_idle is None
            self._may_skip_notify = False
            self._update_fast_path_locked()

    def evict_waiters(self) -> int:
        """Every waiter gets ``QueueEmpty`` now; returns how many there were."""
        return self._dismiss(QueueEmpty("the waiters were evicted"))

    # -- settling -------------------------------------------------------------------------------------------------

    def commit(self, item_or_id: Item | int) -> None:
        """Done with it; in any order, from any thread. Durable with the next checkpoint.

        Raises ``UnknownItem`` if it is not an open read of this reader.
        """
        with self._lock:
            opened = self._open
            if type(item_or_id) is int:
                item_id = item_or_id
                item = opened.get(item_id)
                if item is None:
                    raise self._unknown(item_id)
            else:
                item = item_or_id  # type: ignore[assignment]  # mypy does not narrow by type() is
                try:
                    item_id = item.id  # type: ignore[union-attr]
                except AttributeError:
                    item_id = id_of(item_or_id)
                    item = opened.get(item_id)
                    if item is None:
                        raise self._unknown(item_id) from None
                if opened.get(item_id) is not item:
                    raise self._unknown(item_id)
            # Progress.release, written out: this is a hot path. Nor is there a call from here on until it is done.
            size = len(item.data)  # type: ignore[union-attr]
            progress = self._progress
            items, size = progress.released_items + 1, progress.released_bytes + size
            if item_id != progress.head + 1:
                progress.done[item_id] = None
                del opened[item_id]
                progress.released_items, progress.released_bytes = items, size
            else:
                del opened[item_id]
                progress.head, progress.released_items, progress.released_bytes = item_id, items, size
                if progress.done or progress.spans:
                    progress.absorb()
            if progress.error_counts:
                progress.error_counts.pop(item_id, None)
            self._committed += 1
        if not self._may_skip_notify:
            self._tell()

    def commit_many(self, items: Iterable[Item | int]) -> None:
        """Commit all of them, or none: raises ``UnknownItem`` before anything is done if one is not open."""
        named = list(items)
        try:
            with self._lock:
                chosen = self._chosen_locked(named)
                if chosen:
                    self._commit_locked(chosen)
        except BaseException as error:
            self._let_fall(error)
            raise
        if not self._may_skip_notify:
            self._tell()

    def _chosen_locked(self, named: list[Item | int]) -> dict[int, Item]:
        """The open reads that these name, by id."""
        opened = self._open
        if len(named) == len(opened) and all(map(is_, named, opened.values())):
            return opened
        try:
            chosen = {item.id: item for item in cast("list[Item]", named)}
        except AttributeError:  # there are ids among them, or what is neither
            chosen = {}
        if len(chosen) == len(named) and all(map(is_, map(opened.get, chosen), chosen.values())):
            return chosen
        chosen = {}
        for each in named:
            item_id = id_of(each)
            item = opened.get(item_id)
            if item is None or (isinstance(each, Item) and each is not item) or item_id in chosen:
                raise self._unknown(item_id)
            chosen[item_id] = item
        return chosen

    def _commit_locked(self, chosen: dict[int, Item]) -> None:
        opened = self._open
        size = sum(map(len, [item.data for item in chosen.values()]))
        self._progress.release_all(chosen, size)  # from its first step on all of them are done
        if len(opened) == len(chosen):
            opened.clear()
        else:
            for item_id in chosen:
                del opened[item_id]
        self._committed += len(chosen)

    def abort(self, item_or_id: Item | int) -> None:
        """Give it back, ahead of unread items; aborted ones keep the order of their ids. Its ``error_count`` grows by
        one.

        With an ``on_abort`` hook that returns true it is committed instead. Raises ``UnknownItem`` if it is not open.
        """
        item_id = id_of(item_or_id)
        settling: list[Item] = []
        try:
            with self._lock:
                item = self._open.get(item_id)
                if item is None or (isinstance(item_or_id, Item) and item_or_id is not item):
                    raise self._unknown(item_id)
                entry = (item.data, item.added_ms, item.expires_ms)
                errors = self._progress.error_counts
                errors[item_id] = errors.get(item_id, 0) + 1
                del self._open[item_id]
                self._aborted += 1
                if self.config.on_abort is None:
                    self._return_locked(item_id, entry)
                else:
                    again = self._item(item_id, entry)
                    settling.append(again)
                    self._settling[item_id] = again
            if self.config.on_abort is not None:
                if self._call(self.config.on_abort, again):
                    self._settled(again)
                else:
                    self._unsettled(again)
            self._hand_off()
        except BaseException as error:
            self._let_fall(error, (), settling)
            raise
        if not self._may_skip_notify:
            self._tell()

    def _unsettled(self, item: Item) -> None:
        """A hook has not taken an aborted item: it comes again, unless the reader was closed or moved meanwhile."""
        with self._lock:
            if self._settling.get(item.id) is item:
                del self._settling[item.id]
                self._return_locked(item.id, (item.data, item.added_ms, item.expires_ms))

    # -- moving ---------------------------------------------------------------------------------------------------

    def flush(self) -> int:
        """Drop everything unread and aborted; returns how many items. Open reads stay open and may be committed or
        aborted. Raises ``OSError`` if the place could not be saved: all of it is dropped even so.
        """
        with self._lock:
            self._check_usable()
            if self._disturbed:
                self._mend_locked()
            progress, visible_id = self._progress, self._source.visible_id
            _, visible_bytes = self._source.before(visible_id + 1)  # of that moment, whatever is put since
            kept = [*self._open.values(), *self._settling.values()]
            items_beyond, bytes_beyond = self._done_beyond(visible_id)
            dropped = self._items_through(visible_id) + items_beyond - len(kept)
            size = visible_bytes - (progress.released_bytes - bytes_beyond) - sum(len(item.data) for item in kept)
            moved = progress.copy()
            for item_id in self._returned.entries:
                moved.pass_over(item_id, item_id)
            moved.skip_to(visible_id + 1)
            moved.error_counts = {key: count for key, count in moved.error_counts.items() if not moved.is_done(key)}
            moved.released_items += dropped
            moved.released_bytes += size
            self._move_locked(moved)
            self._flushes += 1
            self._update_fast_path_locked()
        try:
            self.checkpoint()
        finally:
            self._source.moved(self)
        return dropped

    def _done_beyond(self, item_id: int) -> tuple[int, int]:
        """What is done behind ``item_id``, in items and bytes: of a reader that another process has had, which sees
        what is not on disk yet.
        """
        items = size = 0
        for first, last in [(1, self._progress.head), *self._progress.done_spans()]:
            if last > item_id:
                items_before, bytes_before = self._source.before(max(first, item_id + 1))
                items_then, bytes_then = self._source.before(last + 1)
                items, size = items + items_then - items_before, size + bytes_then - bytes_before
        return items, size

    def seek(self, item_id: int | None = None, *, time_ms: int | None = None) -> None:
        """Move the head: the next item is ``item_id``, or the first one added at ``time_ms`` or later.

        Back as far as segments last (an id before them means the earliest that is kept), or forward up to behind the
        tail. Open reads and aborted items are dropped: what of them is ahead comes again. The place is saved when this
        returns. Raises ``TypeError`` unless exactly one place is given, and ``OSError`` if it could not be saved: a
        reader in the queue's own process has moved all the same, one elsewhere has not. Costs the reading of one
        segment.
        """
        if (item_id is None) == (time_ms is None):
            raise TypeError("seek() takes an item id or time_ms")
        if item_id is not None:
            item_id = id_of(item_id)
        elif time_ms is not None and isnan(time_ms):
            raise ValueError("time_ms must be milliseconds since 1970, not nan")
        self._check_usable()
        source = self._source
        try:
            with guard_and_saving(source.guard, self._saving):  # nothing is retired that is read here, or needed then
                failure = self._move(item_id, time_ms)
        except OSError:
            self._check_usable()  # who closes it meanwhile closes its folder
            raise
        source.attach(self)
        self._hand_off()
        source.moved(self)
        if failure is not None:
            raise failure

    def _move(self, item_id: int | None, time_ms: int | None) -> OSError | None:
        """Save the place and go there. Under the guard and ``_saving``. What is returned is why it could not be saved,
        where it has moved all the same.
        """
        failure = None
        with self._lock:
            self._check_usable()
            place = self._find_place(item_id, time_ms)
            moved = self._progress.moved_to(*place)
            state, version = self._state_of(moved), self._version_of(moved)
        try:
            self._saved = ()
            self._store(state, durable=False)
        except OSError as error:
            if not self._source.knows_heads:  # who retires goes by what is saved
                raise
            failure = error
        with self._lock:
            self._check_usable()
            self._move_locked(self._progress.moved_to(*place), drop=True)
            self._special_through = self._progress.special_through
            self._update_fast_path_locked()
        self._saved = version if failure is None else ()
        return failure

    def _find_place(self, item_id: int | None, time_ms: int | None) -> tuple[int, int, int]:
        """Where to go on, and how many items and bytes were ever put before that."""
        source = self._source
        visible_id = source.visible_id
        if item_id is None:
            assert time_ms is not None
            item_id = source.find_time(time_ms, visible_id)
        item_id = max(source.first_id, min(item_id, visible_id + 1))
        return (item_id, *source.before(item_id))

    # -- saving ---------------------------------------------------------------------------------------------------

    def checkpoint(self, durable: bool = False) -> None:
        """Save the reader's place: what is committed now does not come again after the death of the process.

        With ``durable`` not after a power cut either. Raises ``OSError``; then the last checkpoint counts, and only
        redelivery grows.
        """
        self._save(durable)

    def _save(self, durable: bool) -> None:
        with self._saving:
            self._save_alone(durable)

    def _save_last(self, durable: bool, end: Exception, tell: Tell = fail_all) -> None:
        """Every later call raises ``end``. It breaks first: what is saved then has every commit it accepted. Who waits
        is told last: what users call back may raise anything.
        """
        gone: list[Waiter] = []
        try:
            try:
                self._break(end, lambda waiters, _: gone.extend(waiters))
                with self._saving:
                    self._save_alone(durable, ending=True)
            finally:
                tell(gone, end)
        except BaseException:  # an interrupt, perhaps, of whoever was telling
            tell(gone, end)
            raise

    def _save_alone(self, durable: bool, *, ending: bool = False) -> None:
        """Under ``_saving``, or while nobody else has this reader."""
        with self._lock:
            if not ending:
                self._check_usable()
                if self._disturbed:
                    self._mend_locked()
            self._progress.absorb()
            state, version = self._state_of(self._progress), self._version()
        self._store(state, durable=durable)
        self._saved = version

    def _state_of(self, progress: Progress) -> Checkpoint:
        source = self._source
        hint = source.hint(progress.head + 1)
        return progress.checkpoint(source.queue_id, self.name, source.durable_id, hint)

    def _store(self, state: Checkpoint, *, durable: bool) -> None:
        """Save a state (R4). Under ``_saving``."""
        self._source.make_durable(state.last_named_id)
        self._source.save(self, state, durable)

    @property
    def _unsaved(self) -> bool:
        """Whether something happened since the last checkpoint."""
        return self._saved != self._version()

    def _version(self) -> tuple[int, ...]:
        """Differs whenever there is something new to save."""
        return self._version_of(self._progress)

    def _version_of(self, progress: Progress) -> tuple[int, ...]:
        return progress.released_items, progress.released_bytes, progress.head, self._aborted

    def close(self) -> None:
        """Save the place, wake waiters with ``QueueClosed``, give up ownership. Open reads come again. Idempotent.

        Of a reader whose calls raise for good, as a sync of its queue has failed, nothing is saved any more: what was
        committed since its last checkpoint comes again. The queue's ``close`` raises what it was.
        """
        if isinstance(self._broken, ForkedQueue):
            return  # all of it is the parent's
        closed = QueueClosed(f"reader {self.full_name} is closed")
        mine = False
        try:
            with self._lock:
                if self._ending or (isinstance(self._broken, QueueClosed) and not self._unfinished):
                    return
                mine = self._ending = self._unfinished = True
            if self._broken is None:
                with suppress(QueueClosed):  # of the queue, which ends beside this: it saves what there is to save
                    self._save_last(False, closed)
        finally:
            if mine:
                try:
                    self._break(closed)
                finally:
                    self._part()

    def _part(self) -> None:
        try:
            self._source.closed_reader(self)
            self._unfinished = False
        finally:
            self._ending = False

    def _orphan(self, error: QueueClosed) -> None:
        """Its queue was erased by another process: every later call raises ``error``. ``close`` gives back the rest."""
        self._unfinished = True
        self._break(error)

    @property
    def _half_closed(self) -> bool:
        """Whether closing it was interrupted."""
        return self._unfinished and not self._ending

    def _unknown(self, item_id: int) -> Exception:
        return UnknownItem(item_id, self.full_name) if self._broken is None else copy_of(self._broken)
