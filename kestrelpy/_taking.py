"""Taking items: from memory or the journal to whoever asked first. The half of a reader that is under its lock.

Rules:
1. Memory is a window, the journal is the truth: what is not in memory is read back, and losing a window loses
   nothing.
2. An item is in exactly one place: unread, returned (ahead of the unread, by id), being settled (a hook has it),
   open, or done.
3. Hooks run outside every lock; one that raises is logged and counted, and its item stays where it was.

NOTE ON LOCKING: ``_lock`` (R in docs/locking.md) guards everything here that is not said to be otherwise. It is held
for memory work and for the read of one block of the journal; never while a hook runs, a waiter is completed or the
queue's lock is asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from sortedcontainers import SortedDict

from kestrelpy import _log
from kestrelpy._format import Entry
from kestrelpy._line import Line, Waiter, Waiting
from kestrelpy._progress import Progress
from kestrelpy._segment import Place
from kestrelpy._source import Source, Take
from kestrelpy.config import FullPolicy, ReaderConfig
from kestrelpy.errors import KestrelError, QueueEmpty
from kestrelpy.item import Item

if TYPE_CHECKING:
    from kestrelpy.reader import Reader

BLOCK_BYTES = 1 << 20
"""How much memory one read of the journal may fill, if ``memory_bytes`` allows it."""


class Taking(Waiting[Item]):
    """What is unread, returned or open, and the line of those who wait for it."""

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

    # -- taking one item --------------------------------------------------------------------------------------------

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
            self._pass_over_locked(first_id)
        self._ahead = block.entries
        self._read_ahead_locked()
        self._hint = (block.number, block.place) if block.number else None
        self._wants_window = block.next_id > visible_id
        return bool(block.entries) or first_id <= visible_id

    def _pass_over_locked(self, item_id: int) -> None:
        """What is not done before ``item_id`` and not in memory is lost, or was never there."""
        progress, source = self._progress, self._source
        items, size = source.before(progress.next_id)
        items_then, size_then = source.before(item_id)
        if not progress.skip_to(item_id):
            kept = [*self._open.values(), *self._settling.values()]
            progress.released_items = items_then - len(kept) - len(self._returned)
            progress.released_bytes = size_then - sum(len(item.data) for item in kept)
            progress.released_bytes -= sum(len(entry[0]) for entry in self._returned.values())
        else:
            progress.released_items += items_then - items
            progress.released_bytes += size_then - size

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

    def _item(self, item_id: int, entry: Entry) -> Item:
        errors = self._progress.error_counts
        error_count = errors.get(item_id, 0) if errors else 0
        return Item(item_id, entry[0], entry[1], entry[2], error_count, cast("Reader", self))

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
                self._call(self.config.on_delivery, cast("Reader", self), (now_ms - item.added_ms) / 1000)
        if not self._quiet:
            self._tell()

    def _tell(self) -> None:
        with self._lock:
            self._quiet = self._wants_quiet
            self._busy_at = self._clock.monotonic()
        self._source.moved(self)

    # -- the line --------------------------------------------------------------------------------------------------

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
            self._call(self.config.on_timeout, cast("Reader", self), self._clock.monotonic() - entered)

    def _dismiss(self, error: Exception) -> int:
        with self._lock:
            gone = self._line.drain()
            self._after_line_locked()
        for waiter in gone:
            waiter.fail(error)
        return len(gone)

    # -- expiry and limits -----------------------------------------------------------------------------------------

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

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _settle_expired(self, item: Item) -> None:
        assert self.config.on_expired is not None
        errors_before = self._hook_errors
        self._call(self.config.on_expired, item)
        if self._hook_errors != errors_before:
            return  # it stays with us, undelivered and not done; discard_expired() tries again
        with self._lock:
            if self._settling.pop(item.id, None) is not None:
                self._release_locked(item.id, item.data)

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

    def _call(self, hook: Callable[..., object], *arguments: object) -> object:
        try:
            return hook(*arguments)
        except Exception:
            self._hook_errors += 1
            _log.exception("a hook of reader %s raised", self.full_name)
            return None

    def _return_locked(self, item_id: int, entry: Entry) -> None:
        self._returned[item_id] = entry
        self._quiet = False
        self._look_again_locked()

    # -- the end -----------------------------------------------------------------------------------------------------

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

    def _items_through(self, visible_id: int) -> int:
        return visible_id - self._source.missing - self._progress.released_items

    @property
    def full_name(self) -> str:
        """``queue`` for the default reader, else ``queue+reader``."""
        return f"{self._source.name}+{self.name}" if self.name else self._source.name

    @property
    def items(self) -> int:
        """Items not done: unread, aborted and open ones."""
        return self._items_through(self._source.visible_id)

    @property
    def bytes(self) -> int:
        """Bytes of the items not done."""
        return self._source.visible_bytes - self._progress.released_bytes
