"""``Backlog``: the items one reader has not done yet, and where the next one comes from.

Rules:
1. Memory is a window, the journal is the truth: what is not in memory is read back, and losing a window loses
   nothing.
2. An item is in exactly one place: unread, requeued (ahead of the unread, by id), with a hook, open, or done. An item
   that an exception from outside left in none is looked for before anything else is taken (R13).

NOTE ON LOCKING: ``lock`` (R in docs/locking.md) guards every method, and every attribute that is not said to be
otherwise. Nothing here takes it: whoever calls holds it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import repeat

from kestrelpy._journal.format import Entry
from kestrelpy._journal.segment import FramePosition
from kestrelpy._reading.progress import Progress
from kestrelpy._reading.source import Source, Take
from kestrelpy._reading.window import Requeued, WindowBatch
from kestrelpy._waiting.line import Line
from kestrelpy.config import ReaderConfig
from kestrelpy.errors import KestrelError, copy_of
from kestrelpy.item import Item, ItemOwner, new_item

BLOCK_BYTES = 1 << 20
"""How much memory one read of the journal may fill, if ``memory_bytes`` allows it."""
EXPANDED = 256
"""How many items of a batch become entries at a time: ``get`` takes entries, ``get_many`` the batch itself."""
NO_LIMIT = 1 << 62


class Backlog:
    """One reader's items. ``owner``: whom they are handed out by; ``line``: who waits for one, looked at only."""

    __slots__ = (
        "_clock",
        "_source",
        "aborted_count",
        "ahead",
        "batch",
        "broken",
        "config",
        "disturbed",
        "expired_count",
        "fast",
        "hint",
        "line",
        "lock",
        "may_skip_notify",
        "name",
        "opened",
        "opened_count",
        "owner",
        "progress",
        "requeued",
        "special_through",
        "take",
        "wants_window",
        "with_hook",
    )

    def __init__(
        self, owner: ItemOwner, source: Source, name: str, config: ReaderConfig, progress: Progress, line: Line
    ) -> None:
        self.owner = owner
        self.name = name
        self.config = config
        self._source = source
        self._clock = source.clock
        self.lock = threading.Lock()
        self.line = line
        self.progress = progress
        self.opened: dict[int, Item] = {}
        self.requeued = Requeued()
        self.with_hook: dict[int, Item] = {}  # a hook has them, or has failed on them
        self.ahead: dict[int, Entry] = {}  # read back from the journal for this reader alone
        self.batch: WindowBatch | None = None  # at hand for this reader: what follows ``ahead``, or is done
        self.hint: tuple[int, FramePosition] | None = None  # where in the journal to go on reading
        self.take: Take = self.ahead.pop
        self.fast = False  # whether get() may take the short way; see update_fast_path
        self.wants_window = False
        self.special_through = progress.special_through
        self.disturbed = False  # an exception from outside struck: see repair
        self.broken: Exception | None = None  # why the reader can't be used any more; read without the lock
        self.may_skip_notify = False  # whether a commit has nobody to notify
        self.opened_count = 0
        self.aborted_count = 0
        self.expired_count = 0

    def find(self, expired: list[Item]) -> tuple[int, Entry] | None:
        """Take the next live item out of where it is; expired ones on the way go to ``expired``, or are released."""
        if self.disturbed:
            self.repair()
        while True:
            found = self.take_next()
            if found is None:
                return None
            item_id, entry = found
            if not self.is_expired(entry):
                return item_id, entry
            self._count_expired(item_id, entry, expired)

    def _count_expired(self, item_id: int, entry: Entry, expired: list[Item]) -> None:
        """An expired item has been taken out of where it was: it is done, or is for its hook to settle."""
        self.expired_count += 1
        if self.config.on_expired is None:
            self.release(item_id, entry[0])
        else:
            item = self.make_item(item_id, entry)
            expired.append(item)
            self.with_hook[item_id] = item

    def take_next(self) -> tuple[int, Entry] | None:
        """Take the next item, expired or not, out of where it is."""
        found = self.requeued.first()
        if found is None:
            return self._next_unread()
        del self.requeued.entries[found[0]]
        if not self.requeued:
            self.update_fast_path()
        return found

    def _next_unread(self) -> tuple[int, Entry] | None:
        progress = self.progress
        while True:
            if progress.next_id <= self.special_through and progress.skip_done():
                continue
            item_id = progress.next_id
            entry = self.ahead.pop(item_id, None) or self.take(item_id, None)
            if entry is not None:
                progress.next_id = item_id + 1
                if not self.fast:
                    self.update_fast_path()
                return item_id, entry
            if not self._refill():
                return None

    def _refill(self) -> bool:
        """See to it that ``_take`` has the next item, from the window or from the journal; false if there is none."""
        progress, source = self.progress, self._source
        visible_id = source.seen_id
        if progress.next_id > visible_id:
            visible_id = source.visible_id
        if progress.next_id > visible_id:
            self.batch = None
            return False
        take = self.expand() or source.window(self)
        if take is not None:
            self.take = take
            self.hint = None
            return True
        block = source.read(progress.next_id, visible_id, min(BLOCK_BYTES, self.config.memory_bytes), self.hint)
        first_id = next(iter(block.entries), block.next_id)
        if first_id > progress.next_id:  # ids that no item has, or whose items were damaged and set aside
            self._pass_over(first_id)
        self.ahead = block.entries
        self.take = self.ahead.pop
        self.hint = (block.number, block.place) if block.number else None
        self.wants_window = block.next_id > visible_id
        return bool(block.entries) or first_id <= visible_id

    def expand(self) -> Take | None:
        """Make entries of the next items of the batch at hand; ``None`` if it has no more."""
        if self.batch is None:
            return None
        first_id, items, added_ms = self.batch
        next_id = self.progress.next_id
        at = next_id - first_id
        if not 0 <= at < len(items):
            self.batch = None
            return None
        some = items[at : at + EXPANDED]
        self.ahead = dict(zip(range(next_id, next_id + len(some)), zip(some, repeat(added_ms), repeat(None))))  # noqa: B905 - repeat() has no end
        return self.ahead.pop

    def _pass_over(self, item_id: int) -> None:
        """What is not done before ``item_id`` and not in memory is lost, or was never there."""
        progress, source = self.progress, self._source
        items, size = source.before(progress.next_id)
        items_then, size_then = source.before(item_id)
        if not progress.skip_to(item_id):
            kept = [*self.opened.values(), *self.with_hook.values()]
            progress.released_items = items_then - len(kept) - len(self.requeued)
            progress.released_bytes = size_then - sum(len(item.data) for item in kept)
            progress.released_bytes -= sum(len(entry[0]) for entry in self.requeued.entries.values())
        else:
            progress.released_items += items_then - items
            progress.released_bytes += size_then - size

    def peek(self) -> tuple[int, Entry] | None:
        """The next item, expired or not, left where it is."""
        if self.disturbed:
            self.repair()
        first = self.requeued.first()
        if first is not None:
            return first
        found = self._next_unread()
        if found is not None:
            self.progress.next_id = found[0]
            self.ahead[found[0]] = found[1]
            self.update_fast_path()
        return found

    def take_more(self, items: list[Item], expired: list[Item], max_items: int, max_bytes: int | None) -> None:
        """Open reads of what is there, up to the limits. ``items`` has each before anything can interrupt."""
        left = (NO_LIMIT if max_bytes is None else max_bytes) - len(items[0].data)
        while True:
            if self.fast:
                left = self._take_run(items, max_items - len(items), left)
            if len(items) >= max_items or left < 0 or self.line:
                break
            try:
                found = self.find(expired)
            except (KestrelError, OSError):  # the caller gets what was taken; whoever is next is told
                break
            if found is None:
                break
            left -= len(found[1][0])
            if left < 0:
                self.requeued.add(*found)
                self.update_fast_path()
                break
            item = self.make_item(*found)
            items.append(item)
            self.opened[item.id] = item
            self.opened_count += 1

    def _take_run(self, items: list[Item], count: int, left: int) -> int:
        """Open reads of up to ``count`` items that are at hand and do not expire, as ``get`` opens one. Returns how
        many of ``left`` bytes are left; less than none if there was no room for the next item.
        """
        take, owner, made = self.take, self.owner, {}
        next_id = self.progress.next_id
        for item_id in range(next_id, next_id + count):
            entry = take(item_id, None)
            if entry is None:
                break
            data, added_ms, expires_ms = entry
            if expires_ms is not None:
                self.ahead[item_id] = entry
                break
            left -= len(data)
            if left < 0:
                self.ahead[item_id] = entry
                break
            item = made[item_id] = new_item(Item)  # HOT COPY of Item
            item.id = item_id
            item.data = data
            item.added_ms = added_ms
            item.expires_ms = None
            item.error_count = 0
            item._owner = owner
        self._open_run(items, made)
        if self.batch is not None and not self.ahead and left >= 0:
            left = self._take_batch(items, count - len(made), left)
        return left

    def _take_batch(self, items: list[Item], count: int, left: int) -> int:
        """The same out of the batch at hand."""
        assert self.batch is not None
        first_id, batch, added_ms = self.batch
        owner, made = self.owner, {}
        next_id = self.progress.next_id
        at = next_id - first_id
        for item_id, data in enumerate(batch[at : at + count] if at >= 0 else (), next_id):
            left -= len(data)
            if left < 0:
                break
            item = made[item_id] = new_item(Item)  # HOT COPY of Item
            item.id = item_id
            item.data = data
            item.added_ms = added_ms
            item.expires_ms = None
            item.error_count = 0
            item._owner = owner
        self._open_run(items, made)
        return left

    def _open_run(self, items: list[Item], made: dict[int, Item]) -> None:
        """Those of ``made``, which follow each other, are open reads, and behind ``items``."""
        if made:
            opened, taken = self.opened, list(made.values())
            next_id, count = taken[-1].id + 1, self.opened_count + len(taken)
            # No call from here on: an interrupt falls before all of it or behind.
            items += taken
            opened |= made
            self.progress.next_id = next_id
            self.opened_count = count

    def expire(self, item_id: int, entry: Entry, expired: list[Item]) -> None:
        """Take an item that ``peek`` has shown, and that has expired, out of where it is."""
        if item_id in self.requeued.entries:
            del self.requeued.entries[item_id]
        else:
            self.ahead.pop(item_id, None)
            self.progress.next_id = item_id + 1
        self._count_expired(item_id, entry, expired)
        self.update_fast_path()

    def requeue(self, item_id: int, entry: Entry) -> None:
        """An item that was with somebody goes ahead of the unread ones."""
        self.requeued.add(item_id, entry)
        self.may_skip_notify = False
        self.update_fast_path()

    def release(self, item_id: int, data: bytes) -> None:
        """The item is done."""
        self.progress.release(item_id, len(data))
        self.may_skip_notify = False

    def open_read(self, item_id: int, entry: Entry) -> Item:
        """Note an item that was taken as an open read."""
        item = self.opened[item_id] = self.make_item(item_id, entry)
        self.opened_count += 1
        return item

    def make_item(self, item_id: int, entry: Entry) -> Item:
        """The entry as users see it."""
        errors = self.progress.error_counts
        error_count = errors.get(item_id, 0) if errors else 0
        return Item(item_id, entry[0], entry[1], entry[2], error_count, self.owner)

    def update_fast_path(self) -> None:
        """Whether ``get`` may take the short way: nothing but the next unread item can be meant."""
        config = self.config
        self.fast = (
            self.broken is None
            and not self.disturbed
            and not self.requeued
            and not self.line
            and self.progress.next_id > self.special_through
            and config.max_age is None
            and config.on_delivery is None
        )

    def move(self, progress: Progress, *, drop: bool = False) -> None:
        """Go on with ``progress``, without what was requeued and read ahead; with ``drop``, without open reads too."""
        requeued, ahead = Requeued(), {}  # type: ignore[var-annotated]
        opened, with_hook = ({}, {}) if drop else (self.opened, self.with_hook)
        take: Take = ahead.pop
        # No call from here on until it is done, and nothing that needs memory.
        self.progress = progress
        self.opened = opened
        self.with_hook = with_hook
        self.requeued = requeued
        self.ahead = ahead
        self.batch = None
        self.take = take
        self.hint = None

    def break_off(self, error: Exception, requeued: Requeued, ahead: dict[int, Entry]) -> None:
        """Nothing is handed out any more; ``error`` is why. ``requeued`` and ``ahead``: empty, and made before, as an
        allocation may fail.
        """
        self.broken, self.fast, self.opened, self.with_hook = error, False, {}, {}
        self.requeued, self.ahead, self.batch, self.take = requeued, ahead, None, ahead.pop

    def abandon(self, error: Exception, line: Line) -> None:
        """In a forked child: as ``break_off``, with a lock and a line that no thread of the parent has had."""
        self.lock = threading.Lock()
        self.line = line
        self.broken, self.fast = error, False
        self.opened = {}

    def repair(self) -> None:
        """After an exception from outside: give every id up to the next one its place again, and count anew (R13)."""
        try:
            self._repair()
        except (KestrelError, OSError):  # whoever takes next tries again, and is told
            return
        self.disturbed = False
        self.update_fast_path()

    def _repair(self) -> None:
        """An item that was being moved when a thread was interrupted comes back ahead of the unread ones, as if it had
        not been taken.

        Raises ``KestrelError`` or ``OSError`` for what can't be read; what was found before that is in its place.
        """
        progress, source, requeued = self.progress, self._source, self.requeued
        progress.absorb()
        for places in (self.opened, self.with_hook, requeued.entries):
            for item_id in [item_id for item_id in places if progress.is_done(item_id)]:
                del places[item_id]
        held = self.opened.keys() | self.with_hook.keys() | requeued.entries.keys()
        progress.next_id = max(progress.next_id, max(held, default=0) + 1)
        for first_id, last_id in list(self._strays(held)):
            item_id = first_id
            while item_id <= last_id:
                block = source.read(item_id, last_id, BLOCK_BYTES, None)
                for found_id, entry in block.entries.items():
                    if item_id <= found_id <= last_id:
                        progress.pass_over(item_id, found_id - 1)
                        requeued.add(found_id, entry)
                        item_id = found_id + 1
                if item_id < block.next_id:
                    progress.pass_over(item_id, min(block.next_id - 1, last_id))
                    item_id = block.next_id
        items, size = done_before(source, progress, progress.next_id)
        kept = [*self.opened.values(), *self.with_hook.values()]
        progress.released_items = items - len(kept) - len(requeued)
        progress.released_bytes = size - sum(len(item.data) for item in kept)
        progress.released_bytes -= sum(len(entry[0]) for entry in requeued.entries.values())

    def _strays(self, held: set[int]) -> Iterator[tuple[int, int]]:
        """Runs of ids before the next one that are not done and nowhere."""
        progress = self.progress
        first_id = 0
        for item_id in range(progress.head + 1, progress.next_id):
            if item_id in held or progress.is_done(item_id):
                if first_id:
                    yield first_id, item_id - 1
                first_id = 0
            elif not first_id:
                first_id = item_id
        if first_id:
            yield first_id, progress.next_id - 1

    def _expiry_ms(self, entry: Entry) -> int | None:
        expires_ms, max_age = entry[2], self.config.max_age
        if max_age is not None:
            limit_ms = entry[1] + int(min(max_age * 1000, NO_LIMIT))
            expires_ms = limit_ms if expires_ms is None else min(expires_ms, limit_ms)
        return expires_ms

    def is_expired(self, entry: Entry) -> bool:
        expires_ms = self._expiry_ms(entry)
        return expires_ms is not None and expires_ms <= self._clock.time_ns() // 1_000_000

    def expires_in(self) -> float | None:
        """Seconds until the next unread item expires; ``None`` if it does not, or can't be read."""
        try:
            found = None if self.broken is not None else self.peek()
        except (KestrelError, OSError):
            found = None
        expires_ms = None if found is None else self._expiry_ms(found[1])
        return None if expires_ms is None else max(0.0, (expires_ms * 1_000_000 - self._clock.time_ns()) / 1e9)

    def is_over_limit(self) -> bool:
        """Whether the oldest item has to be dropped. The last one that is unread stays, however large it is: nothing
        else would ever get past a limit of bytes that is smaller.
        """
        max_items, max_bytes = self.config.max_items, self.config.max_bytes
        if max_items is not None and self.items > max_items:
            return True
        if max_bytes is None or self.bytes <= max_bytes:
            return False
        return self.items - len(self.opened) - len(self.with_hook) > 1

    def check_usable(self) -> None:
        if self.broken is not None:
            raise copy_of(self.broken)

    def items_through(self, visible_id: int) -> int:
        return visible_id - self._source.missing - self.progress.released_items

    @property
    def full_name(self) -> str:
        """``queue`` for the default reader, else ``queue+reader``."""
        return f"{self._source.name}+{self.name}" if self.name else self._source.name

    @property
    def items(self) -> int:
        """Items not done: unread, aborted and open ones. 0 where it has passed what is not on disk yet."""
        head, visible_id = self.progress.head, self._source.visible_id  # in this order: the head goes on
        if head > visible_id:
            return 0
        items = self.items_through(visible_id)
        return items if self.special_through <= visible_id else max(0, items)  # it may be ahead, with gaps

    @property
    def bytes(self) -> int:
        """Bytes of the items not done."""
        seen_id = self._source.seen_id
        if self.progress.head > seen_id:
            return 0
        size = self._source.visible_bytes - self.progress.released_bytes
        return size if self.special_through <= seen_id else max(0, size)


def done_before(source: Source, progress: Progress, item_id: int) -> tuple[int, int]:
    """How many items were put before ``item_id``, and of those from there on how many are done; and their bytes."""
    items, size = source.before(item_id)
    for first_id, last_id in progress.done_spans():
        if last_id >= item_id:
            (items_to, size_to), (items_from, size_from) = (
                source.before(last_id + 1),
                source.before(max(first_id, item_id)),
            )
            items, size = items + items_to - items_from, size + size_to - size_from
    return items, size
