"""``Reader``: open reads, commit, abort, a place that is saved.

Its items come out of ``_taking``; this half is what users call.

NOTE ON LOCKING: ``_lock`` (R) is the one of ``_taking``. ``_saving`` is held while a checkpoint is taken and written,
so that an older one never replaces a newer; it comes before ``_lock``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kestrelpy._format import Checkpoint
from kestrelpy._line import check_timeout
from kestrelpy._segment import ITEM_COST
from kestrelpy._taking import Taking
from kestrelpy.config import FullPolicy, ReaderConfig, ReaderStats
from kestrelpy.errors import CorruptJournal, KestrelError, QueueClosed, QueueEmpty, UnknownItem
from kestrelpy.item import Item, id_of, no_item

__all__ = ["Reader"]


class Reader(Taking):
    """One reader's place in a queue. Made by ``JournaledQueue.reader`` or ``open_reader``, never directly.

    Thread-safe. Every call raises ``QueueClosed`` after ``close()``, ``DurabilityUnknown`` once a sync of the queue
    has failed, and ``ForkedQueue`` in a forked child.
    """

    # -- getting --------------------------------------------------------------------------------------------------

    def get(self, block: bool = True, timeout: float | None = None) -> Item:
        """Open a read of the next item: an aborted one first, else the next unread one.

        Waits in line for up to ``timeout`` seconds of real time (``None``: for ever; ``block=False``: not at all).
        Raises ``QueueEmpty``, ``ValueError`` for a negative timeout, ``CorruptJournal`` if the next item is damaged
        on disk.
        """
        with self._lock:
            if self._plain and (timeout is None or timeout >= 0 or not block):
                progress = self._progress
                item_id = progress.next_id
                entry = self._take(item_id, None)
                if entry is not None:
                    if entry[2] is None:
                        item = Item(item_id, entry[0], entry[1], None, 0, self)
                        self._open[item_id] = item
                        progress.next_id = item_id + 1
                        self._opened += 1
                        return item
                    self._ahead[item_id] = entry
        return self._get_slowly(block, timeout)

    def get_nowait(self) -> Item:
        """``get(block=False)``."""
        return self.get(False)

    def _get_slowly(self, block: bool, timeout: float | None) -> Item:
        if block:
            check_timeout(timeout)
        entered = self._clock.monotonic() if self.config.on_timeout else 0.0
        try:
            return self._take_now()
        except QueueEmpty:
            if not block or timeout == 0:
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
        items = [self.get(True, timeout)]
        size = len(items[0].data)
        expired: list[Item] = []
        with self._lock:
            opened, progress = self._open, self._progress
            while len(items) < max_items and not self._line:
                item_id = progress.next_id
                entry = self._take(item_id, None) if self._plain else None
                if entry is not None and entry[2] is None:
                    if max_bytes is not None and size + len(entry[0]) > max_bytes:
                        self._ahead[item_id] = entry
                        break
                    item = opened[item_id] = Item(item_id, entry[0], entry[1], None, 0, self)
                    progress.next_id = item_id + 1
                    self._opened += 1
                else:
                    if entry is not None:
                        self._ahead[item_id] = entry
                    try:
                        found = self._find_locked(expired)
                    except (KestrelError, OSError):  # the caller gets what was taken; whoever is next is told
                        found = None
                    if found is None:
                        break
                    if max_bytes is not None and size + len(found[1][0]) > max_bytes:
                        self._returned[found[0]] = found[1]
                        self._look_again_locked()
                        break
                    item = self._open_locked(*found)
                items.append(item)
                size += len(item.data)
        self._after_taking(items[1:], expired)
        return items

    def peek(self, timeout: float | None = 0) -> Item:
        """The next item, not opened: it cannot be committed, and stays where it is. Waits as ``get`` does."""
        check_timeout(timeout)
        expired: list[Item] = []
        with self._lock:
            self._check_usable()
            found = None if self._line else self._find_locked(expired)
            if found is not None:
                self._returned[found[0]] = found[1]
                self._look_again_locked()
        self._after_taking([], expired)
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
            self._quiet = False
            self._look_again_locked()

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
                item = opened.pop(item_id, None)
                if item is None:
                    raise self._unknown(item_id)
            else:
                item = item_or_id  # type: ignore[assignment]  # mypy does not narrow by type() is
                try:
                    item_id = item.id  # type: ignore[union-attr]
                except AttributeError:
                    raise no_item(item_or_id) from None
                found = opened.pop(item_id, None)
                if found is not item:
                    if found is not None:
                        opened[item_id] = found
                    raise self._unknown(item_id)
            # Progress.release, written out: this is a hot path.
            progress = self._progress
            progress.released_items += 1
            progress.released_bytes += len(item.data)  # type: ignore[union-attr]
            if item_id == progress.head + 1:
                progress.head = item_id
                if progress.done or progress.spans:
                    progress.absorb()
            else:
                progress.done.add(item_id)
            if progress.error_counts:
                progress.error_counts.pop(item_id, None)
            self._committed += 1
        if not self._quiet:
            self._tell()

    def commit_many(self, items: Iterable[Item | int]) -> None:
        """Commit all of them, or none: raises ``UnknownItem`` before anything is done if one is not open."""
        with self._lock:
            opened = self._open
            chosen: dict[int, Item] = {}
            for each in items:
                item_id = id_of(each)
                item = opened.get(item_id)
                if item is None or not (each is item or isinstance(each, int)) or item_id in chosen:
                    raise self._unknown(item_id)
                chosen[item_id] = item
            progress = self._progress
            for item_id, item in chosen.items():
                del opened[item_id]
                progress.release(item_id, len(item.data))
            self._committed += len(chosen)
        if not self._quiet:
            self._tell()

    def abort(self, item_or_id: Item | int) -> None:
        """Give it back, ahead of unread items; aborted ones keep the order of their ids. Its ``error_count`` grows by
        one.

        With an ``on_abort`` hook that returns true it is committed instead. Raises ``UnknownItem`` if it is not open.
        """
        item_id = id_of(item_or_id)
        hook = self.config.on_abort
        with self._lock:
            item = self._open.get(item_id)
            if item is None or not (item_or_id is item or isinstance(item_or_id, int)):
                raise self._unknown(item_id)
            del self._open[item_id]
            errors = self._progress.error_counts
            errors[item_id] = errors.get(item_id, 0) + 1
            self._aborted += 1
            entry = (item.data, item.added_ms, item.expires_ms)
            if hook is None:
                self._return_locked(item_id, entry)
            else:
                again = self._settling[item_id] = self._item(item_id, entry)
        if hook is not None:
            taken = self._call(hook, again)
            with self._lock:
                if self._settling.pop(item_id, None) is None:
                    return  # closed or moved meanwhile
                if taken:
                    self._release_locked(item_id, item.data)
                else:
                    self._return_locked(item_id, entry)
        self._hand_off()
        if not self._quiet:
            self._tell()

    # -- moving ---------------------------------------------------------------------------------------------------

    def flush(self) -> int:
        """Drop everything unread and aborted; returns how many items. Open reads stay open and may be committed or
        aborted.
        """
        with self._lock:
            self._check_usable()
            progress, visible_id = self._progress, self._source.visible_id
            visible_bytes = self._source.visible_bytes
            kept = [*self._open.values(), *self._settling.values()]
            dropped = self._items_through(visible_id) - len(kept)
            size = visible_bytes - progress.released_bytes - sum(len(item.data) for item in kept)
            for item_id in self._returned:
                progress.error_counts.pop(item_id, None)
                progress.pass_over(item_id, item_id)
            self._returned.clear()
            while progress.next_id <= visible_id:
                if not progress.skip_done():
                    at = progress.spans.bisect_left(progress.next_id)
                    stop = progress.spans.peekitem(at)[0] - 1 if at < len(progress.spans) else visible_id
                    progress.pass_over(progress.next_id, min(stop, visible_id))
                    progress.next_id = max(progress.next_id, min(stop, visible_id) + 1)
            progress.released_items += dropped
            progress.released_bytes += size
            self._ahead.clear()
            self._hint = None
            self._flushes += 1
            self._look_again_locked()
        self.checkpoint()
        self._source.moved(self)
        return dropped

    def seek(self, item_id: int | None = None, *, time_ms: int | None = None) -> None:
        """Move the head: the next item is ``item_id``, or the first one added at ``time_ms`` or later.

        Back as far as segments last (an id before them means the earliest that is kept), or forward up to behind the
        tail. Open reads and aborted items are dropped: what of them is ahead comes again. Raises ``TypeError`` unless
        exactly one place is given. Costs the reading of one segment.
        """
        if (item_id is None) == (time_ms is None):
            raise TypeError("seek() takes an item id or time_ms")
        with self._lock:
            self._check_usable()
            source = self._source
            visible_id = source.visible_id
            if item_id is None:
                assert time_ms is not None
                item_id = source.find_time(time_ms, visible_id)
            item_id = max(source.first_id, min(item_id, visible_id + 1))
            items, size = source.before(item_id)
            self._open.clear()
            self._settling.clear()
            self._returned.clear()
            self._ahead.clear()
            self._hint = None
            self._read_ahead_locked()
            self._progress.move_to(item_id, items, size)
            self._special_through = self._progress.special_through
            self._look_again_locked()
        self.checkpoint()
        self._source.attach(self)
        self._hand_off()
        self._source.moved(self)

    # -- saving ---------------------------------------------------------------------------------------------------

    def checkpoint(self, durable: bool = False) -> None:
        """Save the reader's place: what is committed now does not come again after the death of the process.

        With ``durable`` not after a power cut either. Raises ``OSError``; then the last checkpoint counts, and only
        redelivery grows.
        """
        self._save(durable, last=False)

    def _save_last(self, error: Exception, *, durable: bool) -> None:
        """Make every later call raise ``error``, and save the reader's place after that: a commit that was accepted
        is in it.
        """
        self._break(error)
        self._save(durable, last=True)

    def _save(self, durable: bool, *, last: bool) -> None:
        with self._saving:
            with self._lock:
                if not last:
                    self._check_usable()
                state, version = self._state_locked()
            self._source.make_durable(state.last_named_id)
            self._source.save(self, state, durable)
            self._saved = version

    @property
    def _unsaved(self) -> bool:
        """Whether something happened since the last checkpoint."""
        return self._saved != self._version()

    def _version(self) -> tuple[int, ...]:
        """Differs whenever there is something new to save."""
        progress = self._progress
        return progress.released_items, progress.released_bytes, progress.head, self._aborted

    def _state_locked(self) -> tuple[Checkpoint, tuple[int, ...]]:
        progress, source = self._progress, self._source
        state = progress.checkpoint(source.queue_id, self.name, source.durable_id, source.hint(progress.head + 1))
        return state, self._version()

    def close(self) -> None:
        """Save the place, wake the waiters with ``QueueClosed`` and give up the ownership. Open reads come again.
        Idempotent.
        """
        if isinstance(self._broken, QueueClosed):
            return
        closed = QueueClosed(f"reader {self.full_name} is closed")
        try:
            if self._broken is None:
                self._save_last(closed, durable=False)
        finally:
            self._break(closed)
            self._source.closed_reader(self)

    def _unknown(self, item_id: int) -> Exception:
        return self._broken or UnknownItem(item_id, self.full_name)

    # -- figures --------------------------------------------------------------------------------------------------

    def decode(self, data: bytes) -> Any:
        """``data`` through the queue's codec."""
        return self._source.decode(data)

    def is_open(self, item: Item) -> bool:
        """Whether ``item`` is an open read of this reader."""
        return self._open.get(item.id) is item

    @property
    def head(self) -> int:
        """Every id up to and including it is done."""
        return self._progress.head

    @property
    def open_items(self) -> int:
        """How many reads are open."""
        return len(self._open)

    @property
    def open_bytes(self) -> int:
        """Bytes of the items whose reads are open. Cost: O(open reads)."""
        with self._lock:
            return sum(len(item.data) for item in self._open.values())

    @property
    def waiter_count(self) -> int:
        """How many consumers wait in line."""
        return len(self._line)

    @property
    def age(self) -> float:
        """Seconds since the next deliverable item was put; 0 if there is none, or if it can't be read."""
        with self._lock:
            try:
                found = None if self._broken is not None else self._peek_locked()
            except (CorruptJournal, OSError):  # a get says so; a figure need not
                found = None
        return 0.0 if found is None else max(0.0, self._clock.time_ns() / 1e9 - found[1][1] / 1e3)

    @property
    def idle_expired(self) -> bool:
        """Whether ``max_idle`` is set and the reader has been empty that long."""
        max_idle = self.config.max_idle
        return max_idle is not None and not self.items and self._clock.monotonic() - self._busy_at >= max_idle

    @property
    def memory_bytes(self) -> int:
        """What this reader keeps in memory for itself: data and a fixed cost an item. Cost: O(items kept)."""
        with self._lock:
            kept = [*self._ahead.values(), *self._returned.values()]
        return sum(len(entry[0]) + ITEM_COST for entry in kept)

    def stats(self) -> ReaderStats:
        """The reader's figures at this moment."""
        return ReaderStats(
            name=self.name,
            head=self.head,
            items=self.items,
            bytes=self.bytes,
            open_items=self.open_items,
            open_bytes=self.open_bytes,
            waiter_count=self.waiter_count,
            age=self.age,
            get_hits=self._opened,
            get_misses=self._misses,
            opened=self._opened,
            committed=self._committed,
            aborted=self._aborted,
            expired=self._expired,
            discarded=self._discarded,
            flushes=self._flushes,
            hook_errors=self._hook_errors,
            memory_bytes=self.memory_bytes,
        )

    def __repr__(self) -> str:
        state = " closed" if self._broken else ""
        return (
            f"<Reader {self.full_name}: head={self.head} items={self.items} open={self.open_items} "
            f"waiters={self.waiter_count}{state}>"
        )

    def _check(self) -> None:
        """The invariants; for tests, with nobody else at work."""
        with self._lock:
            self._progress._check()
            progress = self._progress
            places = [set(self._open), set(self._returned), set(self._settling)]
            assert sum(map(len, places)) == len(set().union(*places))
            for item_id in set().union(*places):
                assert progress.head < item_id < progress.next_id
                assert item_id not in progress.done
            assert self._items_through(self._source.visible_id) >= sum(map(len, places))
            assert not (self._plain and (self._returned or self._line))
            assert (self in self._source.waiting) == bool(self._line)
