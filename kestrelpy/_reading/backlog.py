"""``Backlog``: the items that one reader has not done yet, and where its next item comes from.

Rules:
1. The journal is the truth, memory is a window on it: items that are not in memory are read back from the journal, and
   losing the window loses nothing.
2. An item is in exactly one state: unread, requeued (ahead of unread items, by id), with a hook, open, or done. An
   interrupt may leave an item in none of them: ``repair`` looks for it before another item is taken (R13).

NOTE ON LOCKING: ``lock`` (R in docs/locking.md) guards every method, and every attribute unless its comment says
otherwise. No method takes the lock: the caller holds it. ``items``, ``bytes`` and ``check_usable`` may be used without.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
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
"""How many bytes one read of the journal may bring into memory, if ``memory_bytes`` allows as many."""
EXPANDED = 256
"""How many items of a batch become entries at a time. ``get`` takes entries; ``get_many`` reads the batch itself."""
NO_LIMIT = 1 << 62


class Backlog:
    """One reader's items. ``owner`` hands them out; ``line`` holds the waiters, and the backlog only looks at it."""

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
        "is_timed",
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
        self.with_hook: dict[int, Item] = {}  # items that a hook is looking at, or whose hook raised
        self.ahead: dict[int, Entry] = {}  # for this reader alone: read from the journal, or from ``batch``
        self.batch: WindowBatch | None = None  # the batch that this reader is in the middle of, or has used up
        self.hint: tuple[int, FramePosition] | None = None  # where the next read of the journal starts
        self.take: Take = self.ahead.pop
        self.fast = False  # whether get() may take the fast path; see update_fast_path
        self.wants_window = False
        self.is_timed = True  # a timer lets delayed items go out; else each get looks
        self.special_through = progress.special_through
        self.disturbed = False  # an interrupt struck while items were moving: see repair
        self.broken: Exception | None = None  # why the reader can't be used any more; read without the lock
        self.may_skip_notify = False  # whether a commit has nobody to notify
        self.opened_count = 0
        self.aborted_count = 0
        self.expired_count = 0

    def find(self, expired: list[Item]) -> tuple[int, Entry] | None:
        """Take and return the next item that has not expired; ``None`` if there is none. Expired items before it are
        appended to ``expired`` if the reader has an ``on_expired`` hook, and released otherwise. Raises ``OSError`` or
        ``CorruptJournal`` if the next item, or the only one that is left, can't be read.
        """
        if self.disturbed:
            self.repair()
        if self.requeued.due_at:
            self.requeued.ripen(self._clock.monotonic())
        while True:
            found = self.take_next()
            if found is None:
                if not self.disturbed:
                    return None
                self._repair()  # only items that can't be read are left: raise why
                continue
            item_id, entry = found
            if not self.is_expired(entry):
                return item_id, entry
            self._count_expired(item_id, entry, expired)

    def _count_expired(self, item_id: int, entry: Entry, expired: list[Item]) -> None:
        """Count an expired item that was taken: it is done, or its hook decides."""
        self.expired_count += 1
        if self.config.on_expired is None:
            self.release(item_id, entry[0])
        else:
            item = self.make_item(item_id, entry)
            expired.append(item)
            self.with_hook[item_id] = item

    def take_next(self) -> tuple[int, Entry] | None:
        """Take and return the next item, expired or not."""
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
        """Make ``take`` find the next item, from the window or from the journal; false if there is none."""
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
        if first_id > progress.next_id:  # no item has these ids, or it was damaged and quarantined
            self._pass_over(first_id)
        self.ahead = block.entries
        self.take = self.ahead.pop
        self.hint = (block.number, block.position) if block.number else None
        self.wants_window = block.next_id > visible_id
        return bool(block.entries) or first_id <= visible_id

    def expand(self) -> Take | None:
        """Make entries of the next items of ``batch``, and return how to take them; ``None`` if it is used up."""
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
        """Mark ids before ``item_id`` as done unless memory has their items: such items are lost, or never existed."""
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
        """Return the next item, expired or not, and leave it where it is."""
        if self.disturbed:
            self.repair()
        if self.requeued.due_at and self.requeued.ripen(self._clock.monotonic()):
            self.update_fast_path()
        first = self.requeued.first()
        if first is not None:
            return first
        found = self._next_unread()
        if found is not None:
            self.progress.next_id = found[0]
            self.ahead[found[0]] = found[1]
            self.update_fast_path()
        elif self.disturbed:
            self._repair()  # as in ``find``
            return self.requeued.first()
        return found

    def take_more(self, items: list[Item], expired: list[Item], max_items: int, max_bytes: int | None) -> None:
        """Open reads of available items, up to the limits. Each is in ``items`` before an interrupt can strike."""
        left = (NO_LIMIT if max_bytes is None else max_bytes) - len(items[0].data)
        while True:
            if self.fast:
                left = self._take_run(items, max_items - len(items), left)
            if len(items) >= max_items or left < 0 or self.line:
                break
            try:
                found = self.find(expired)
            except (KestrelError, OSError):  # the caller gets the items taken so far; the next get raises
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
        """Open reads of up to ``count`` items that ``take`` has and that have no expiry, as the fast path of ``get``
        does. Returns how many of ``left`` bytes remain; a negative number if the next item did not fit.
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
        """Open reads of up to ``count`` items of ``batch``. Returns as ``_take_run``."""
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
        """Note the items of ``made``, whose ids are consecutive, as open reads, and append them to ``items``."""
        if made:
            opened, taken = self.opened, list(made.values())
            next_id, count = taken[-1].id + 1, self.opened_count + len(taken)
            # No call from here on: an interrupt strikes before or after all of these stores.
            items += taken
            opened |= made
            self.progress.next_id = next_id
            self.opened_count = count

    def expire(self, item_id: int, entry: Entry, expired: list[Item]) -> None:
        """Take the item that ``peek`` returned, which has expired, and count it."""
        if item_id in self.requeued.entries:
            del self.requeued.entries[item_id]
        else:
            self.ahead.pop(item_id, None)
            self.progress.next_id = item_id + 1
        self._count_expired(item_id, entry, expired)
        self.update_fast_path()

    def requeue(self, item_id: int, entry: Entry, due: float | None = None) -> None:
        """Put an item that a consumer or a hook had ahead of the unread items. ``due``: not before that time."""
        self.requeued.add(item_id, entry, due)
        self.may_skip_notify = False
        self.update_fast_path()

    def release(self, item_id: int, data: bytes) -> None:
        """Mark an item as done."""
        self.progress.release(item_id, len(data))
        self.may_skip_notify = False

    def open_read(self, item_id: int, entry: Entry) -> Item:
        """Open a read of an item that was taken."""
        item = self.opened[item_id] = self.make_item(item_id, entry)
        self.opened_count += 1
        return item

    def make_item(self, item_id: int, entry: Entry) -> Item:
        """Make the ``Item`` that users see of an entry."""
        errors = self.progress.error_counts
        error_count = errors.get(item_id, 0) if errors else 0
        return Item(item_id, entry[0], entry[1], entry[2], error_count, self.owner)

    def update_fast_path(self) -> None:
        """Set ``fast``: whether a get can only mean the next unread item, and so may take it directly."""
        config = self.config
        self.fast = (
            self.broken is None
            and not self.disturbed
            and not self.requeued
            and (self.is_timed or not self.requeued.due_at)
            and not self.line
            and self.progress.next_id > self.special_through
            and config.max_age is None
            and config.on_delivery is None
            and (config.counts_open or not has_limits(config))  # else a get makes room, and producers are notified
        )

    def move(self, progress: Progress, *, drop: bool = False) -> None:
        """Continue with ``progress``. Forget requeued items and items read ahead; with ``drop``, forget open reads and
        items with hooks too.
        """
        requeued, ahead = Requeued(), {}  # type: ignore[var-annotated]
        opened, with_hook = ({}, {}) if drop else (self.opened, self.with_hook)
        take: Take = ahead.pop
        # No call from here on, and nothing that needs memory: an interrupt strikes before or after all of these stores.
        self.progress = progress
        self.opened = opened
        self.with_hook = with_hook
        self.requeued = requeued
        self.ahead = ahead
        self.batch = None
        self.take = take
        self.hint = None

    def held(self) -> dict[int, int]:
        """The items before ``next_id`` that are not done, and their sizes."""
        sizes = {item_id: len(item.data) for each in (self.opened, self.with_hook) for item_id, item in each.items()}
        return sizes | {item_id: len(entry[0]) for item_id, entry in self.requeued.entries.items()}

    def skip(self, progress: Progress, item_id: int) -> None:
        """Continue with ``progress``, in which all before ``item_id`` is done. Open reads and items with hooks before
        it are dropped; the rest stays where it is.
        """
        requeued, ahead, batch, take, hint = Requeued(), self.ahead, self.batch, self.take, self.hint
        opened = {key: item for key, item in self.opened.items() if key >= item_id}
        with_hook = {key: item for key, item in self.with_hook.items() if key >= item_id}
        for key, entry in self.requeued.entries.items():
            if key >= item_id:
                requeued.add(key, entry, self.requeued.due_at.get(key))
        if progress.next_id != self.progress.next_id:
            ahead, batch, hint = {}, None, None
            take = ahead.pop
        special_through = max(self.special_through, progress.special_through)
        # No call from here on: an interrupt strikes before or after all of these stores.
        self.progress = progress
        self.opened = opened
        self.with_hook = with_hook
        self.requeued = requeued
        self.ahead, self.batch, self.take, self.hint = ahead, batch, take, hint
        self.special_through = special_through

    def fail_waiting(self, error: Exception, requeued: Requeued, ahead: dict[int, Entry]) -> None:
        """Hand out no more items; ``error`` says why. ``requeued`` and ``ahead`` are empty, and made by the caller: an
        allocation here may fail.
        """
        self.broken, self.fast, self.opened, self.with_hook = error, False, {}, {}
        self.requeued, self.ahead, self.batch, self.take = requeued, ahead, None, ahead.pop

    def abandon(self, error: Exception, line: Line) -> None:
        """In a forked child: like ``fail_waiting``, with a new lock and a line that no thread of the parent has
        used.
        """
        self.lock = threading.Lock()
        self.line = line
        self.broken, self.fast = error, False
        self.opened = {}

    def repair(self) -> None:
        """After an interrupt: put every id before ``next_id`` into exactly one state again, and count again (R13)."""
        with suppress(KestrelError, OSError):  # ``disturbed`` stays: the next take tries again
            self._repair()

    def _repair(self) -> None:
        """Requeue the items that were moving when an interrupt struck, ahead of the unread items, as if they had not
        been taken.

        Raises ``KestrelError`` or ``OSError`` if an item can't be read; the items found before it are requeued.
        """
        progress, source, requeued = self.progress, self._source, self.requeued
        progress.absorb()
        for places in (self.opened, self.with_hook, requeued.entries):
            for item_id in [item_id for item_id in places if progress.is_done(item_id)]:
                del places[item_id]
        requeued.forget_gone()
        held = self.opened.keys() | self.with_hook.keys() | requeued.entries.keys()
        progress.next_id = max(progress.next_id, max(held, default=0) + 1)
        for first_id, last_id in list(self._missing_runs(held)):
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
        self.disturbed = False
        self.update_fast_path()

    def _missing_runs(self, held: set[int]) -> Iterator[tuple[int, int]]:
        """Runs of ids before ``next_id`` that are neither done nor in ``held``."""
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
        """Seconds until the next item expires; ``None`` if it does not, or can't be read."""
        try:
            found = None if self.broken is not None else self.peek()
        except (KestrelError, OSError):
            found = None
        expires_ms = None if found is None else self._expiry_ms(found[1])
        return None if expires_ms is None else max(0.0, (expires_ms * 1_000_000 - self._clock.time_ns()) / 1e9)

    def counted(self) -> tuple[int, int]:
        """The items and bytes that count against the limits. May be called without the lock."""
        if self.config.counts_open:
            return self.items, self.bytes
        opened = list(self.opened.values())
        return self.items - len(opened), self.bytes - sum(len(item.data) for item in opened)

    def is_over_limit(self) -> bool:
        """Whether the oldest item has to be dropped. The last unread item stays, however large it is: otherwise an item
        larger than ``max_bytes`` could never be delivered.
        """
        max_items, max_bytes = self.config.max_items, self.config.max_bytes
        items, size = self.counted()
        if max_items is not None and items > max_items:
            return True
        if max_bytes is None or size <= max_bytes:
            return False
        return self.items - len(self.opened) - len(self.with_hook) > 1

    def discard(self, ids: Iterable[int]) -> int:
        """Mark these ids as done as far as they are unread or aborted; returns how many items were dropped."""
        progress, source = self.progress, self._source
        moved, requeued, ahead = progress.copy(), Requeued(), self.ahead.copy()
        visible_id = source.visible_id
        items = size = 0
        for first_id, last_id in runs_of(item_id for item_id in ids if self._is_waiting(item_id, visible_id)):
            items_before, bytes_before = source.before(first_id)
            items_then, bytes_then = source.before(last_id + 1)
            items, size = items + items_then - items_before, size + bytes_then - bytes_before
            moved.pass_over(first_id, last_id)
            for item_id in range(first_id, last_id + 1):
                ahead.pop(item_id, None)
        for item_id, entry in self.requeued.entries.items():
            if not moved.is_done(item_id):
                requeued.add(item_id, entry, self.requeued.due_at.get(item_id))
        moved.absorb()
        moved.released_items += items
        moved.released_bytes += size
        moved.forget_errors()
        special_through = max(self.special_through, moved.special_through)
        uses_ahead = self.take == self.ahead.pop
        take: Take = ahead.pop if uses_ahead else self.take
        # No call from here on: an interrupt strikes before or after all of these stores.
        self.progress = moved
        self.requeued = requeued
        self.ahead = ahead
        self.take = take
        self.special_through = special_through
        return items

    def _is_waiting(self, item_id: int, visible_id: int) -> bool:
        """Whether this id is unread or requeued, as far as anybody knows without reading it."""
        return (
            0 < item_id <= visible_id
            and item_id not in self.opened
            and item_id not in self.with_hook
            and not self.progress.is_done(item_id)
        )

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
        """Items not done: unread, aborted and open ones. 0 if the reader is past items that are not on disk yet.

        Without the lock it may be too high, and is never too low: who puts an item and then commits another one is seen
        with both of them, or with one. So it is 0 only if there was a moment without an item.
        """
        progress = self.progress
        released_items, head = progress.released_items, progress.head  # first: what is done after this is not counted
        visible_id = self._source.visible_id
        if head > visible_id:
            return 0
        items = visible_id - self._source.missing - released_items
        return items if self.special_through <= visible_id else max(0, items)  # the reader may be ahead, with gaps

    @property
    def bytes(self) -> int:
        """Bytes of the items not done. Without the lock as ``items``."""
        progress = self.progress
        released_bytes, head = progress.released_bytes, progress.head
        seen_id = self._source.seen_id
        if head > seen_id:
            return 0
        size = self._source.visible_bytes - released_bytes
        return size if self.special_through <= seen_id else max(0, size)


def runs_of(ids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The runs of consecutive ids, rising, in which these ids lie, each named once."""
    first_id = last_id = 0
    for item_id in sorted(set(ids)):
        if first_id and item_id != last_id + 1:
            yield first_id, last_id
            first_id = 0
        first_id, last_id = first_id or item_id, item_id
    if first_id:
        yield first_id, last_id


def has_limits(config: ReaderConfig) -> bool:
    """Whether a put has to look at the reader first."""
    return config.max_items is not None or config.max_bytes is not None


def done_before(source: Source, progress: Progress, item_id: int) -> tuple[int, int]:
    """Count the items put before ``item_id``, and the done items from there on. Returns their number and bytes."""
    items, size = source.before(item_id)
    for first_id, last_id in progress.done_spans():
        if last_id >= item_id:
            (items_to, size_to), (items_from, size_from) = (
                source.before(last_id + 1),
                source.before(max(first_id, item_id)),
            )
            items, size = items + items_to - items_from, size + size_to - size_from
    return items, size
