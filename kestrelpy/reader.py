"""Readers: open reads, commit, abort, limits, expiry, and the waiting line of one reader.

Rules:
1. Memory is a window, the journal is the truth: what is not in memory is read back, and losing a window loses nothing.
2. An item is in exactly one place: unread, returned (ahead of the unread, by id), being settled (a hook has it), open, or done.
3. Hooks run outside every lock; one that raises is logged and counted, and its item goes back to where it was.

NOTE ON LOCKING: ``_lock`` guards everything here that is not said to be otherwise. It is held for memory work and for the read of one
block of the journal; never while a hook runs, a waiter is completed or the queue's lock is asked for (order: queue before reader).
``_saving`` is held while a checkpoint is taken and written, so that an older one never replaces a newer; it comes before ``_lock``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from sortedcontainers import SortedDict

from kestrelpy._format import Checkpoint, Entry
from kestrelpy._line import Line, Waiter, Waiting, check_timeout
from kestrelpy._progress import Progress
from kestrelpy._segment import ITEM_COST, Place
from kestrelpy._view import Block
from kestrelpy.config import FullPolicy, ReaderConfig, ReaderStats
from kestrelpy.errors import KestrelError, QueueClosed, QueueEmpty, UnknownItem
from kestrelpy.item import Item

if TYPE_CHECKING:
    from kestrelpy.clock import Clock

__all__ = ["Reader"]

BLOCK_BYTES = 1 << 20
"""How much memory one read of the journal may fill, if ``memory_bytes`` allows it."""

_log = logging.getLogger("kestrelpy")

Take = Callable[[int, None], Entry | None]


class Source(Protocol):
    """Where a reader's items come from: a queue in this process, or the files of one that another process writes."""

    name: str
    clock: Clock
    waiting: dict[Reader, None]
    """The readers with somebody in line: whom a producer has to look after."""

    @property
    def visible_id(self) -> int:
        """The last id that readers may see."""

    @property
    def missing(self) -> int:
        """How many ids up to ``visible_id`` have no item."""

    @property
    def visible_bytes(self) -> int:
        """Bytes of all items ever put, up to ``visible_id``."""

    @property
    def first_id(self) -> int:
        """The earliest id that is kept."""

    @property
    def queue_id(self) -> bytes: ...

    @property
    def durable_id(self) -> int: ...

    def read(self, item_id: int, last_id: int, max_bytes: int, hint: tuple[int, Place] | None) -> Block: ...

    def before(self, item_id: int) -> tuple[int, int]: ...

    def find_time(self, time_ms: int, last_id: int) -> int: ...

    def hint(self, item_id: int) -> tuple[int, Place]: ...

    def window(self, reader: Reader) -> Take | None:
        """How to take from the shared window, if the reader's next item is or will be in it. Called under its lock."""

    def attach(self, reader: Reader) -> None:
        """The reader has read all there is: let it share the window. Called without its lock."""

    def detach(self, reader: Reader) -> None:
        """The reader is closed. Called without its lock."""

    def make_durable(self, item_id: int) -> None:
        """Return when ``item_id`` is on disk (R4)."""

    def save(self, reader: Reader, state: Checkpoint, durable: bool) -> None: ...

    def moved(self, reader: Reader) -> None:
        """Something was released: see to a checkpoint before long, and to producers who wait for room."""

    def polls(self, reader: Reader) -> None:
        """Somebody is in line now: a source that nobody wakes has to look by itself."""

    def decode(self, data: bytes) -> Any: ...

    def closed_reader(self, reader: Reader) -> None: ...


class Reader(Waiting[Item]):
    """One reader's place in a queue. Made by ``JournaledQueue.reader`` or ``open_reader``, never directly.

    Thread-safe. Every call raises ``QueueClosed`` after ``close()``, ``DurabilityUnknown`` once a sync of the queue has failed, and
    ``ForkedQueue`` in a forked child.
    """

    def __init__(self, source: Source, name: str, config: ReaderConfig, progress: Progress) -> None:
        self.name = name
        self.config = config
        self._source = source
        self._clock = source.clock
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._line = Line()
        self._progress = progress
        self._open: dict[int, Item] = {}
        self._returned: SortedDict[int, Entry] = SortedDict()
        self._settling: dict[int, Item] = {}  # a hook has them, or has failed on them
        self._ahead: dict[int, Entry] = {}  # read back from the journal for this reader alone
        self._hint: tuple[int, Place] | None = None  # where in the journal to go on reading
        self._take: Take = self._ahead.pop
        self._plain = False  # whether get() may take the short way; see _look_again_locked
        self._wants_window = False
        self._special_through = progress.special_through
        self._broken: Exception | None = None  # why it can't be used any more
        self._quiet = False  # whether a commit has nobody to tell
        self._saved: tuple[int, ...] = ()
        self._busy_at = self._clock.monotonic()
        self._opened = self._misses = self._committed = self._aborted = 0
        self._expired = self._discarded = self._flushes = self._hook_errors = 0
        self._wants_quiet = config.full_policy is not FullPolicy.BLOCK and config.max_idle is None

    # -- getting -----------------------------------------------------------------------------------------------------

    def get(self, block: bool = True, timeout: float | None = None) -> Item:
        """Open a read of the next item: an aborted one first, else the next unread one.

        Waits in line for up to ``timeout`` seconds of real time (``None``: for ever; ``block=False``: not at all). Raises
        ``QueueEmpty``, ``ValueError`` for a negative timeout, ``CorruptJournal`` if the next item is damaged on disk.
        """
        with self._lock:
            if self._plain:
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

        Stops before the item that would bring the data above ``max_bytes``, but takes at least one. Raises ``QueueEmpty`` if
        none came in time.
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
                    found = self._find_locked(expired)
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

    # -- taking one item, under the lock -----------------------------------------------------------------------------

    def _take_now(self) -> Item:
        expired: list[Item] = []
        with self._lock:
            self._check_usable()
            found = None if self._line else self._find_locked(expired)
            item = None if found is None else self._open_locked(*found)
        self._after_taking([] if item is None else [item], expired)
        if item is None:
            raise QueueEmpty("nothing is there")
        return item

    def _find_locked(self, expired: list[Item]) -> tuple[int, Entry] | None:
        """Take the next live item out of where it is; expired ones on the way go to ``expired``, or are released."""
        while True:
            if self._returned:
                item_id, entry = self._returned.popitem(0)
                if not self._returned:
                    self._look_again_locked()
            else:
                found = self._next_unread_locked()
                if found is None:
                    return None
                item_id, entry = found
            if not self._is_expired(entry):
                return item_id, entry
            self._expired += 1
            if self.config.on_expired is None:
                self._release_locked(item_id, entry[0])
            else:
                item = self._settling[item_id] = self._item(item_id, entry)
                expired.append(item)

    def _next_unread_locked(self) -> tuple[int, Entry] | None:
        progress = self._progress
        while True:
            if progress.next_id <= self._special_through and progress.skip_done():
                continue
            item_id = progress.next_id
            entry = self._ahead.pop(item_id, None) or self._take(item_id, None)
            if entry is not None:
                progress.next_id = item_id + 1
                if not self._plain:
                    self._look_again_locked()
                return item_id, entry
            if not self._refill_locked():
                return None

    def _refill_locked(self) -> bool:
        """See to it that ``_take`` has the next item, from the window or from the journal; false if there is none."""
        progress, source = self._progress, self._source
        visible_id = source.visible_id
        if progress.next_id > visible_id:
            return False
        take = source.window(self)
        if take is not None:
            self._take = take
            self._hint = None
            return True
        block = source.read(progress.next_id, visible_id, min(BLOCK_BYTES, self.config.memory_bytes), self._hint)
        first_id = next(iter(block.entries), block.next_id)
        if first_id > progress.next_id:  # ids that no item has, or whose items were damaged and set aside
            progress.pass_over(progress.next_id, first_id - 1)
            progress.released_items += block.lost_items
            progress.next_id = max(first_id, progress.head + 1)
        self._ahead = block.entries
        self._read_ahead_locked()
        self._hint = (block.number, block.place) if block.number else None
        self._wants_window = block.next_id > visible_id
        return bool(block.entries) or first_id <= visible_id

    def _read_ahead_locked(self) -> None:
        self._take = self._ahead.pop

    def _look_again_locked(self) -> None:
        """Whether ``get`` may take the short way: nothing but the next unread item can be meant."""
        config = self.config
        self._plain = (
            self._broken is None
            and not self._returned
            and not self._line
            and self._progress.next_id > self._special_through
            and config.max_age is None
            and config.on_delivery is None
        )

    def _look_again(self) -> None:
        with self._lock:
            self._look_again_locked()

    def _rename(self, name: str, config: ReaderConfig) -> None:
        """The default reader becomes the first named one."""
        with self._lock:
            self.name, self.config = name, config
            self._wants_quiet = config.full_policy is not FullPolicy.BLOCK and config.max_idle is None
            self._quiet = False
            self._look_again_locked()

    def _item(self, item_id: int, entry: Entry) -> Item:
        errors = self._progress.error_counts
        return Item(item_id, entry[0], entry[1], entry[2], errors.get(item_id, 0) if errors else 0, self)

    def _open_locked(self, item_id: int, entry: Entry) -> Item:
        item = self._open[item_id] = self._item(item_id, entry)
        self._opened += 1
        return item

    def _is_expired(self, entry: Entry) -> bool:
        expires_ms, max_age = entry[2], self.config.max_age
        if max_age is not None:
            limit_ms = entry[1] + int(max_age * 1000)
            expires_ms = limit_ms if expires_ms is None else min(expires_ms, limit_ms)
        return expires_ms is not None and expires_ms <= self._clock.time_ns() // 1_000_000

    def _release_locked(self, item_id: int, data: bytes) -> None:
        self._progress.release(item_id, len(data))
        self._quiet = False

    def _after_taking(self, items: list[Item], expired: list[Item]) -> None:
        """What must be done with no lock held: hooks, joining the window, telling the queue what was released."""
        if self._wants_window:
            self._wants_window = False
            self._source.attach(self)
        for item in expired:
            self._settle_expired(item)
        if self.config.on_delivery is not None:
            now_ms = self._clock.time_ns() // 1_000_000
            for item in items:
                self._call(self.config.on_delivery, self, (now_ms - item.added_ms) / 1000)
        if not self._quiet:
            self._tell()

    def _tell(self) -> None:
        with self._lock:
            self._quiet = self._wants_quiet
            self._busy_at = self._clock.monotonic()
        self._source.moved(self)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _enter(self, waiter: Waiter) -> None:
        with self._lock:
            self._check_usable()
            self._line.add(waiter)
            self._plain = False
            self._source.waiting[self] = None
        self._source.polls(self)
        self._hand_off()

    def _leave(self, waiter: Waiter) -> bool:
        with self._lock:
            left = self._line.remove(waiter)
            self._after_line_locked()
        return left

    def _after_line_locked(self) -> None:
        if not self._line:
            self._source.waiting.pop(self, None)
            self._look_again_locked()

    def _hand_off(self) -> None:
        """Serve the line, as far as there are items. Called by whoever brings an item or enters the line."""
        given: list[tuple[Waiter, Item]] = []
        expired: list[Item] = []
        failed: tuple[Waiter, Exception] | None = None
        with self._lock:
            try:
                while self._line and (found := self._find_locked(expired)) is not None:
                    waiter = self._line.first()
                    if waiter is None or waiter.peeks:
                        self._returned[found[0]] = found[1]
                        if waiter is None:
                            break
                        given.append((waiter, self._item(*found)))
                    else:
                        given.append((waiter, self._open_locked(*found)))
            except (KestrelError, OSError) as error:  # the consumer's trouble, not the producer's
                waiter = self._line.first()
                failed = None if waiter is None else (waiter, error)
            self._after_line_locked()
        for waiter, item in given:
            waiter.give(item)
        if failed is not None:
            failed[0].fail(failed[1])
        self._after_taking([item for waiter, item in given if not waiter.peeks], expired)

    def _give_back(self, waiter: Waiter, item: Item) -> None:
        if not waiter.peeks:
            self._unget(item)

    def _unget(self, item: Item) -> None:
        """An open read that nobody got to see: back to its place, as if it had not been opened."""
        with self._lock:
            if self._open.get(item.id) is not item:
                return
            del self._open[item.id]
            self._opened -= 1
            self._returned[item.id] = (item.data, item.added_ms, item.expires_ms)
            self._look_again_locked()
        self._hand_off()

    def _missed(self, waiter: Waiter) -> None:
        self._count_miss(waiter.entered)

    def _count_miss(self, entered: float) -> None:
        self._misses += 1
        if self.config.on_timeout is not None:
            self._call(self.config.on_timeout, self, self._clock.monotonic() - entered)

    def evict_waiters(self) -> int:
        """Every waiter gets ``QueueEmpty`` now; returns how many there were."""
        return self._dismiss(QueueEmpty("the waiters were evicted"))

    def _dismiss(self, error: Exception) -> int:
        with self._lock:
            gone = self._line.drain()
            self._after_line_locked()
        for waiter in gone:
            waiter.fail(error)
        return len(gone)

    # -- settling ----------------------------------------------------------------------------------------------------

    def commit(self, item_or_id: Item | int) -> None:
        """Done with it; in any order, from any thread. Durable with the next checkpoint.

        Raises ``UnknownItem`` if it is not an open read of this reader.
        """
        with self._lock:
            if type(item_or_id) is int:
                found = self._open.pop(item_or_id, None)
                if found is None:
                    raise self._unknown(item_or_id)
                item = found
            else:
                item = item_or_id  # type: ignore[assignment]  # mypy does not narrow by type() is
                if self._open.get(item.id) is not item:
                    raise self._unknown(item.id)
                del self._open[item.id]
            # Progress.release, written out: this is a hot path.
            progress = self._progress
            item_id = item.id
            progress.released_items += 1
            progress.released_bytes += len(item.data)
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
                item_id = each if isinstance(each, int) else each.id
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
        """Give it back, ahead of unread items; aborted ones keep the order of their ids. Its ``error_count`` grows by one.

        With an ``on_abort`` hook that returns true it is committed instead. Raises ``UnknownItem`` if it is not open.
        """
        item_id = item_or_id if isinstance(item_or_id, int) else item_or_id.id
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

    def _return_locked(self, item_id: int, entry: Entry) -> None:
        self._returned[item_id] = entry
        self._quiet = False
        self._look_again_locked()

    def _settle_expired(self, item: Item) -> None:
        assert self.config.on_expired is not None
        errors_before = self._hook_errors
        self._call(self.config.on_expired, item)
        if self._hook_errors != errors_before:
            return  # it stays with us, undelivered and not done; discard_expired() tries again
        with self._lock:
            if self._settling.pop(item.id, None) is not None:
                self._release_locked(item.id, item.data)

    def _call(self, hook: Callable[..., object], *arguments: object) -> object:
        try:
            return hook(*arguments)
        except Exception:
            self._hook_errors += 1
            _log.exception("a hook of reader %s raised", self.full_name)
            return None

    def discard_expired(self, limit: int | None = None) -> int:
        """Drop expired items from the front, at most ``limit`` (default: ``max_expire_sweep``); returns how many.

        Only the front is looked at: an expired item behind one that is not waits until that is gone.
        """
        limit = self.config.max_expire_sweep if limit is None else limit
        for item in [
            item for item in self._settling.values() if self._is_expired((b"", item.added_ms, item.expires_ms))
        ]:
            self._settle_expired(item)
        count = 0
        while limit is None or count < limit:
            expired: list[Item] = []
            with self._lock:
                self._check_usable()
                found = self._peek_locked()
                if found is None or not self._is_expired(found[1]):
                    break
                item_id, entry = found
                if self._returned.pop(item_id, None) is None:
                    self._ahead.pop(item_id, None)
                    self._progress.next_id = item_id + 1
                self._expired += 1
                count += 1
                if self.config.on_expired is None:
                    self._release_locked(item_id, entry[0])
                else:
                    self._settling[item_id] = self._item(item_id, entry)
                    expired.append(self._settling[item_id])
                self._look_again_locked()
            self._after_taking([], expired)
        if not self._quiet:
            self._tell()
        return count

    def _peek_locked(self) -> tuple[int, Entry] | None:
        """The next item, expired or not, left where it is."""
        if self._returned:
            first: tuple[int, Entry] = self._returned.peekitem(0)
            return first
        found = self._next_unread_locked()
        if found is not None:
            self._progress.next_id = found[0]
            self._ahead[found[0]] = found[1]
            self._look_again_locked()
        return found

    def _drop_oldest(self) -> None:
        """For ``FullPolicy.DROP_OLDEST``: drop unread items from the front until the limits are kept."""
        max_items, max_bytes = self.config.max_items, self.config.max_bytes
        with self._lock:
            while (max_items is not None and self.items > max_items) or (
                max_bytes is not None and self.bytes > max_bytes
            ):
                if self._returned:
                    item_id, entry = self._returned.popitem(0)
                elif (found := self._next_unread_locked()) is not None:
                    item_id, entry = found
                else:
                    break  # the rest is open
                self._release_locked(item_id, entry[0])
                self._discarded += 1
            self._look_again_locked()
        self._after_taking([], [])

    # -- moving ------------------------------------------------------------------------------------------------------

    def flush(self) -> int:
        """Drop everything unread and aborted; returns how many items. Open reads stay open and may be committed or aborted."""
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

        Back as far as segments last (an id before them means the earliest that is kept), or forward up to behind the tail. Open reads and
        aborted items are dropped: what of them is ahead comes again. Raises ``TypeError`` unless exactly one place is given. Costs
        the reading of one segment.
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

    # -- saving ------------------------------------------------------------------------------------------------------

    def checkpoint(self, durable: bool = False) -> None:
        """Save the reader's place: what is committed now does not come again after the death of the process.

        With ``durable`` not after a power cut either. Raises ``OSError``; then the last checkpoint counts, and only redelivery
        grows.
        """
        with self._saving:
            with self._lock:
                self._check_usable()
                state, version = self._state_locked()
            self._source.make_durable(state.highest_id)
            self._source.save(self, state, durable)
            self._saved = version

    @property
    def _unsaved(self) -> bool:
        """Whether something happened since the last checkpoint."""
        progress = self._progress
        return self._saved != (progress.released_items, progress.released_bytes, progress.head, self._aborted)

    def _state_locked(self) -> tuple[Checkpoint, tuple[int, ...]]:
        progress, source = self._progress, self._source
        state = progress.checkpoint(source.queue_id, self.name, source.durable_id, source.hint(progress.head + 1))
        return state, (progress.released_items, progress.released_bytes, progress.head, self._aborted)

    def close(self) -> None:
        """Save the place, wake the waiters with ``QueueClosed`` and give up the ownership. Open reads come again. Idempotent."""
        if isinstance(self._broken, QueueClosed):
            return
        try:
            if self._broken is None:
                self.checkpoint()
        finally:
            self._break(QueueClosed(f"reader {self.full_name} is closed"))
            self._source.closed_reader(self)

    def _break(self, error: Exception) -> None:
        """Make every later call raise ``error``, and wake whoever waits with it."""
        with self._lock:
            self._broken = error
            self._plain = False
            self._open = {}
            self._settling.clear()
            self._returned.clear()
            self._ahead = {}
            self._read_ahead_locked()
        self._dismiss(error)

    def _abandon(self, error: Exception) -> None:
        """In a forked child: break without touching any lock that another thread may have held."""
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._line = Line()
        self._broken, self._plain = error, False
        self._open = {}

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _unknown(self, item_id: int) -> Exception:
        return self._broken or UnknownItem(item_id, self.full_name)

    # -- figures -----------------------------------------------------------------------------------------------------

    def decode(self, data: bytes) -> Any:
        """``data`` through the queue's codec."""
        return self._source.decode(data)

    def is_open(self, item: Item) -> bool:
        """Whether ``item`` is an open read of this reader."""
        return self._open.get(item.id) is item

    def _items_through(self, visible_id: int) -> int:
        return visible_id - self._source.missing - self._progress.released_items

    @property
    def full_name(self) -> str:
        """``queue`` for the default reader, else ``queue+reader``."""
        return f"{self._source.name}+{self.name}" if self.name else self._source.name

    @property
    def head(self) -> int:
        """Every id up to and including it is done."""
        return self._progress.head

    @property
    def items(self) -> int:
        """Items not done: unread, aborted and open ones."""
        return self._items_through(self._source.visible_id)

    @property
    def bytes(self) -> int:
        """Bytes of the items not done."""
        return self._source.visible_bytes - self._progress.released_bytes

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
        """Seconds since the next deliverable item was put; 0 if there is none."""
        with self._lock:
            found = None if self._broken is not None else self._peek_locked()
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
