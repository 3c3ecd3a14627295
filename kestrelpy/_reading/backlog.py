"""What one reader has to take: unread items, returned ones, open ones; and where the next one comes from.

Rules:
1. Memory is a window, the journal is the truth: what is not in memory is read back, and losing a window loses
   nothing.
2. An item is in exactly one place: unread, returned (ahead of the unread, by id), being settled (a hook has it),
   open, or done. One that an exception from outside left in none is looked for before anything else is taken (R13).

NOTE ON LOCKING: ``_lock`` (R in docs/locking.md) guards everything here that is not said to be otherwise.
"""

from __future__ import annotations

import threading
from itertools import repeat
from typing import TYPE_CHECKING, cast

from kestrelpy._journal.format import Entry
from kestrelpy._journal.segment import FramePosition
from kestrelpy._reading.progress import Progress
from kestrelpy._reading.repair import mend_locked
from kestrelpy._reading.source import Source, Take
from kestrelpy._reading.window import Requeued, WindowBatch
from kestrelpy._waiting.line import Line, Waiting
from kestrelpy.config import FullPolicy, ReaderConfig
from kestrelpy.errors import KestrelError, copy_of
from kestrelpy.item import Item, new_item

if TYPE_CHECKING:
    from kestrelpy._reading.dispatch import Taking
    from kestrelpy._reading.reader import Reader

BLOCK_BYTES = 1 << 20
"""How much memory one read of the journal may fill, if ``memory_bytes`` allows it."""
EXPANDED = 256
"""How many items of a batch become entries at a time: ``get`` takes entries, ``get_many`` the batch itself."""
_NO_LIMIT = 1 << 62


class Unread(Waiting[Item]):
    """One reader's items, under its lock."""

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
        self._returned = Requeued()
        self._settling: dict[int, Item] = {}  # a hook has them, or has failed on them
        self._ahead: dict[int, Entry] = {}  # read back from the journal for this reader alone
        self._batch: WindowBatch | None = None  # at hand for this reader: what comes behind _ahead, or is done
        self._hint: tuple[int, FramePosition] | None = None  # where in the journal to go on reading
        self._take: Take = self._ahead.pop
        self._fast = False  # whether get() may take the short way; see _update_fast_path_locked
        self._wants_window = False
        self._special_through = progress.special_through
        self._disturbed = False  # an exception from outside struck: see _mend_locked
        self._broken: Exception | None = None  # why it can't be used any more
        self._ending = self._unfinished = False  # a thread is closing it; it has begun to and is not done
        self._may_skip_notify = False  # whether a commit has nobody to tell
        self._saved: tuple[int, ...] = ()
        self._busy_at = self._clock.monotonic()
        self._opened = self._misses = self._committed = self._aborted = 0
        self._expired = self._discarded = self._flushes = self._hook_errors = 0
        self._wants_quiet = config.full_policy is not FullPolicy.BLOCK and config.max_idle is None

    def _find_locked(self, expired: list[Item]) -> tuple[int, Entry] | None:
        """Take the next live item out of where it is; expired ones on the way go to ``expired``, or are released."""
        if self._disturbed:
            self._mend_locked()
        while True:
            found = self._next_locked()
            if found is None:
                return None
            item_id, entry = found
            if not self._is_expired(entry):
                return item_id, entry
            self._count_expired_locked(item_id, entry, expired)

    def _count_expired_locked(self, item_id: int, entry: Entry, expired: list[Item]) -> None:
        """An expired item has been taken out of where it was: it is done, or is for its hook to settle."""
        self._expired += 1
        if self.config.on_expired is None:
            self._release_locked(item_id, entry[0])
        else:
            item = self._item(item_id, entry)
            expired.append(item)
            self._settling[item_id] = item

    def _next_locked(self) -> tuple[int, Entry] | None:
        """Take the next item, expired or not, out of where it is."""
        found = self._returned.first()
        if found is None:
            return self._next_unread_locked()
        del self._returned.entries[found[0]]
        if not self._returned:
            self._update_fast_path_locked()
        return found

    def _next_unread_locked(self) -> tuple[int, Entry] | None:
        progress = self._progress
        while True:
            if progress.next_id <= self._special_through and progress.skip_done():
                continue
            item_id = progress.next_id
            entry = self._ahead.pop(item_id, None) or self._take(item_id, None)
            if entry is not None:
                progress.next_id = item_id + 1
                if not self._fast:
                    self._update_fast_path_locked()
                return item_id, entry
            if not self._refill_locked():
                return None

    def _refill_locked(self) -> bool:
        """See to it that ``_take`` has the next item, from the window or from the journal; false if there is none."""
        progress, source = self._progress, self._source
        visible_id = source.seen_id
        if progress.next_id > visible_id:
            visible_id = source.visible_id
        if progress.next_id > visible_id:
            self._batch = None
            return False
        take = self._expand_locked() or source.window(cast("Taking", self))
        if take is not None:
            self._take = take
            self._hint = None
            return True
        block = source.read(progress.next_id, visible_id, min(BLOCK_BYTES, self.config.memory_bytes), self._hint)
        first_id = next(iter(block.entries), block.next_id)
        if first_id > progress.next_id:  # ids that no item has, or whose items were damaged and set aside
            self._pass_over_locked(first_id)
        self._ahead = block.entries
        self._take = self._ahead.pop
        self._hint = (block.number, block.place) if block.number else None
        self._wants_window = block.next_id > visible_id
        return bool(block.entries) or first_id <= visible_id

    def _expand_locked(self) -> Take | None:
        """Make entries of the next items of the batch at hand; ``None`` if it has no more."""
        if self._batch is None:
            return None
        first_id, items, added_ms = self._batch
        next_id = self._progress.next_id
        at = next_id - first_id
        if not 0 <= at < len(items):
            self._batch = None
            return None
        some = items[at : at + EXPANDED]
        self._ahead = dict(zip(range(next_id, next_id + len(some)), zip(some, repeat(added_ms), repeat(None))))  # noqa: B905 - repeat() has no end
        return self._ahead.pop

    def _pass_over_locked(self, item_id: int) -> None:
        """What is not done before ``item_id`` and not in memory is lost, or was never there."""
        progress, source = self._progress, self._source
        items, size = source.before(progress.next_id)
        items_then, size_then = source.before(item_id)
        if not progress.skip_to(item_id):
            kept = [*self._open.values(), *self._settling.values()]
            progress.released_items = items_then - len(kept) - len(self._returned)
            progress.released_bytes = size_then - sum(len(item.data) for item in kept)
            progress.released_bytes -= sum(len(entry[0]) for entry in self._returned.entries.values())
        else:
            progress.released_items += items_then - items
            progress.released_bytes += size_then - size

    def _peek_locked(self) -> tuple[int, Entry] | None:
        """The next item, expired or not, left where it is."""
        if self._disturbed:
            self._mend_locked()
        first = self._returned.first()
        if first is not None:
            return first
        found = self._next_unread_locked()
        if found is not None:
            self._progress.next_id = found[0]
            self._ahead[found[0]] = found[1]
            self._update_fast_path_locked()
        return found

    def _take_more_locked(self, items: list[Item], expired: list[Item], max_items: int, max_bytes: int | None) -> None:
        """Open reads of what is there, up to the limits. ``items`` has each before anything can interrupt."""
        left = (_NO_LIMIT if max_bytes is None else max_bytes) - len(items[0].data)
        while True:
            if self._fast:
                left = self._take_run_locked(items, max_items - len(items), left)
            if len(items) >= max_items or left < 0 or self._line:
                break
            try:
                found = self._find_locked(expired)
            except (KestrelError, OSError):  # the caller gets what was taken; whoever is next is told
                break
            if found is None:
                break
            left -= len(found[1][0])
            if left < 0:
                self._returned.add(*found)
                self._update_fast_path_locked()
                break
            item = self._item(*found)
            items.append(item)
            self._open[item.id] = item
            self._opened += 1

    def _take_run_locked(self, items: list[Item], count: int, left: int) -> int:
        """Open reads of up to ``count`` items that are at hand and do not expire, as ``get`` opens one. Returns how
        many of ``left`` bytes are left; less than none if there was no room for the next item.
        """
        take, owner, made = self._take, cast("Reader", self), {}
        next_id = self._progress.next_id
        for item_id in range(next_id, next_id + count):
            entry = take(item_id, None)
            if entry is None:
                break
            data, added_ms, expires_ms = entry
            if expires_ms is not None:
                self._ahead[item_id] = entry
                break
            left -= len(data)
            if left < 0:
                self._ahead[item_id] = entry
                break
            item = made[item_id] = new_item(Item)
            item.id = item_id
            item.data = data
            item.added_ms = added_ms
            item.expires_ms = None
            item.error_count = 0
            item._owner = owner
        self._open_run_locked(items, made)
        if self._batch is not None and not self._ahead and left >= 0:
            left = self._take_batch_locked(items, count - len(made), left)
        return left

    def _take_batch_locked(self, items: list[Item], count: int, left: int) -> int:
        """The same out of the batch at hand."""
        assert self._batch is not None
        first_id, batch, added_ms = self._batch
        owner, made = cast("Reader", self), {}
        next_id = self._progress.next_id
        at = next_id - first_id
        for item_id, data in enumerate(batch[at : at + count] if at >= 0 else (), next_id):
            left -= len(data)
            if left < 0:
                break
            item = made[item_id] = new_item(Item)
            item.id = item_id
            item.data = data
            item.added_ms = added_ms
            item.expires_ms = None
            item.error_count = 0
            item._owner = owner
        self._open_run_locked(items, made)
        return left

    def _open_run_locked(self, items: list[Item], made: dict[int, Item]) -> None:
        """Those of ``made``, which follow each other, are open reads, and behind ``items``."""
        if made:
            opened, taken = self._open, list(made.values())
            next_id, count = taken[-1].id + 1, self._opened + len(taken)
            # No call from here on: an interrupt falls before all of it or behind.
            items += taken
            opened |= made
            self._progress.next_id = next_id
            self._opened = count

    def _expire_locked(self, item_id: int, entry: Entry, expired: list[Item]) -> None:
        if item_id in self._returned.entries:
            del self._returned.entries[item_id]
        else:
            self._ahead.pop(item_id, None)
            self._progress.next_id = item_id + 1
        self._count_expired_locked(item_id, entry, expired)
        self._update_fast_path_locked()

    def _return_locked(self, item_id: int, entry: Entry) -> None:
        self._returned.add(item_id, entry)
        self._may_skip_notify = False
        self._update_fast_path_locked()

    def _release_locked(self, item_id: int, data: bytes) -> None:
        self._progress.release(item_id, len(data))
        self._may_skip_notify = False

    def _open_locked(self, item_id: int, entry: Entry) -> Item:
        item = self._open[item_id] = self._item(item_id, entry)
        self._opened += 1
        return item

    def _item(self, item_id: int, entry: Entry) -> Item:
        errors = self._progress.error_counts
        error_count = errors.get(item_id, 0) if errors else 0
        return Item(item_id, entry[0], entry[1], entry[2], error_count, cast("Reader", self))

    def _update_fast_path_locked(self) -> None:
        """Whether ``get`` may take the short way: nothing but the next unread item can be meant."""
        config = self.config
        self._fast = (
            self._broken is None
            and not self._disturbed
            and not self._returned
            and not self._line
            and self._progress.next_id > self._special_through
            and config.max_age is None
            and config.on_delivery is None
        )

    def _look_again(self) -> None:
        with self._lock:
            self._update_fast_path_locked()

    def _move_locked(self, progress: Progress, *, drop: bool = False) -> None:
        """Go on with ``progress``, without what was returned and read ahead; with ``drop``, without open reads too."""
        returned, ahead = Requeued(), {}  # type: ignore[var-annotated]
        opened, settling = ({}, {}) if drop else (self._open, self._settling)
        take: Take = ahead.pop
        # No call from here on until it is done, and nothing that needs memory.
        self._progress = progress
        self._open = opened
        self._settling = settling
        self._returned = returned
        self._ahead = ahead
        self._batch = None
        self._take = take
        self._hint = None

    def _mend_locked(self) -> None:
        try:
            mend_locked(self, BLOCK_BYTES)
        except (KestrelError, OSError):  # whoever takes next tries again, and is told
            return
        self._disturbed = False
        self._update_fast_path_locked()

    def _expiry_ms(self, entry: Entry) -> int | None:
        expires_ms, max_age = entry[2], self.config.max_age
        if max_age is not None:
            limit_ms = entry[1] + int(min(max_age * 1000, _NO_LIMIT))
            expires_ms = limit_ms if expires_ms is None else min(expires_ms, limit_ms)
        return expires_ms

    def _is_expired(self, entry: Entry) -> bool:
        expires_ms = self._expiry_ms(entry)
        return expires_ms is not None and expires_ms <= self._clock.time_ns() // 1_000_000

    def _expires_in(self) -> float | None:
        """Seconds until the next unread item expires; ``None`` if it does not, or can't be read."""
        with self._lock:
            try:
                found = None if self._broken is not None else self._peek_locked()
            except (KestrelError, OSError):
                found = None
        expires_ms = None if found is None else self._expiry_ms(found[1])
        return None if expires_ms is None else max(0.0, (expires_ms * 1_000_000 - self._clock.time_ns()) / 1e9)

    def _is_over_limit(self) -> bool:
        """Whether the oldest item has to be dropped. The last one that is unread stays, however large it is: nothing
        else would ever get past a limit of bytes that is smaller.
        """
        max_items, max_bytes = self.config.max_items, self.config.max_bytes
        if max_items is not None and self.items > max_items:
            return True
        if max_bytes is None or self.bytes <= max_bytes:
            return False
        return self.items - len(self._open) - len(self._settling) > 1

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise copy_of(self._broken)

    def _items_through(self, visible_id: int) -> int:
        return visible_id - self._source.missing - self._progress.released_items

    @property
    def full_name(self) -> str:
        """``queue`` for the default reader, else ``queue+reader``."""
        return f"{self._source.name}+{self.name}" if self.name else self._source.name

    @property
    def items(self) -> int:
        """Items not done: unread, aborted and open ones. 0 where it has passed what is not on disk yet."""
        head, visible_id = self._progress.head, self._source.visible_id  # in this order: the head goes on
        if head > visible_id:
            return 0
        items = self._items_through(visible_id)
        return items if self._special_through <= visible_id else max(0, items)  # it may be ahead, with gaps

    @property
    def bytes(self) -> int:
        """Bytes of the items not done."""
        seen_id = self._source.seen_id
        if self._progress.head > seen_id:
            return 0
        size = self._source.visible_bytes - self._progress.released_bytes
        return size if self._special_through <= seen_id else max(0, size)
