"""The shared window: the newest items in memory, for all readers of a queue that keep up.

A put stores its item here once, whatever the number of readers. A batch is stored as one object: a reader makes an
entry for each of its items. A reader that falls behind the window reads the journal instead, and joins again when it
has caught up. Losing any part of the window loses no item.

NOTE ON LOCKING: writers of ``entries`` and ``batches`` hold the queue's lock; but readers that take items out hold only
their own. Every single operation on the two is atomic. Everything else here is guarded by the queue's lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from kestrelpy._journal.format import Entry
from kestrelpy._journal.segment import ITEM_COST

MAX_STALE_IDS = 64
"""The heap of requeued items may keep this many ids of items that are gone, however few others it has."""

WindowBatch = tuple[int, list[bytes], int]
"""The first id of a batch without an expiry, its items, and when they were added."""


class Window:
    """Items by id, batches by their first id. ``is_open``: whether puts store items in it. ``left``: bytes until it has
    to be trimmed.
    """

    __slots__ = ("batches", "capacity", "entries", "is_open", "left")

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.batches: dict[int, WindowBatch] = {}
        self.is_open = False
        self.capacity = 0
        self.left = 0

    def resize(self, capacity: int) -> None:
        """Set how many bytes the window may hold: the largest number that one of its readers allows."""
        self.left += capacity - self.capacity
        self.capacity = capacity

    def restart(self) -> None:
        """Empty the window and open it: from the next put on it has every item."""
        self.clear()
        self.left = self.capacity
        self.is_open = True

    def close(self) -> None:
        """Take no more items; what is in it may still be read."""
        self.is_open = False

    def clear(self) -> None:
        """Forget all items."""
        self.entries.clear()
        self.batches.clear()

    def batch_of(self, item_id: int) -> WindowBatch | None:
        """The batch that has this item. Readers mostly ask for its first one."""
        batch = self.batches.get(item_id)
        if batch is not None:
            return batch
        return next((batch for batch in list(self.batches.values()) if batch[0] < item_id <= last_of(batch)), None)

    def trim(self, next_ids: Iterable[int]) -> None:
        """``left`` has run out: drop the items that every reader is past, by its next id. If more than half of the
        window is still in use, drop the items that the fastest reader is past.

        If even the fastest reader is more than half a window behind, the window closes: readers read the journal then.
        """
        positions = sorted(next_ids)
        if positions:
            self._drop_before(positions[0])
        used = self._used()
        if used > self.capacity // 2 and len(positions) > 1:
            self._drop_before(positions[-1])
            used = self._used()
        self.left = self.capacity - used
        if not positions or used > self.capacity // 2:
            self.is_open = False

    def _drop_before(self, item_id: int) -> None:
        for stale in [key for key in list(self.entries) if key < item_id]:
            self.entries.pop(stale, None)
        for batch in list(self.batches.values()):
            if last_of(batch) < item_id:
                self.batches.pop(batch[0], None)

    def _used(self) -> int:
        """Bytes in use."""
        entries = list(self.entries.values())
        used = sum(len(entry[0]) for entry in entries) + ITEM_COST * len(entries)
        for _, items, _ in list(self.batches.values()):
            used += sum(map(len, items)) + ITEM_COST * len(items)
        return used


def last_of(batch: WindowBatch) -> int:
    """The last id of a batch."""
    return batch[0] + len(batch[1]) - 1


class Requeued:
    """Items that came back to one reader; of those that are due, the lowest id goes out first. Guarded by that reader's
    lock.

    ``entries`` decides, and ``due_at`` says which of them are not due yet, and when. The heaps may have ids of items
    that are gone or not due: so each change is one step, and an interrupt strikes before or after it. It is true if it
    has an item that is due.
    """

    __slots__ = ("_later", "_order", "due_at", "entries")

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.due_at: dict[int, float] = {}
        self._order: list[int] = []
        self._later: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self.entries)

    def __bool__(self) -> bool:
        return len(self.entries) != len(self.due_at)

    def add(self, item_id: int, entry: Entry, due: float | None = None) -> None:
        """Add an item. ``due``: when it may go out, by the monotonic clock; ``None``: at once."""
        if due is not None:
            heappush(self._later, (due, item_id))
            self.due_at[item_id] = due  # before the entry: an item never goes out too early
            self.entries[item_id] = entry
            return
        heappush(self._order, item_id)
        self.entries[item_id] = entry
        if len(self._order) > 2 * len(self.entries) + MAX_STALE_IDS:
            self._order = sorted(self.entries.keys() - self.due_at.keys())  # a sorted list is a heap

    def first(self) -> tuple[int, Entry] | None:
        """The lowest id that is due and its entry, which both stay."""
        order, entries, due_at = self._order, self.entries, self.due_at
        while True:
            if not order:
                return None
            entry = entries.get(order[0])
            if entry is not None and order[0] not in due_at:
                return order[0], entry
            heappop(order)

    def ripen(self, now: float) -> bool:
        """Let the items go out that are due by ``now``; true if there are any."""
        later, due_at, found = self._later, self.due_at, False
        while True:
            if not later or later[0][0] > now:
                return found
            due, item_id = later[0]
            if due_at.get(item_id) == due:
                heappush(self._order, item_id)
                del due_at[item_id]
                found = True
            heappop(later)

    def next_due(self) -> float | None:
        """When the next item is due; ``None`` if none is waiting for that."""
        later, due_at = self._later, self.due_at
        while True:
            if not later:
                return None
            due, item_id = later[0]
            if due_at.get(item_id) == due:
                return due
            heappop(later)

    def forget_gone(self) -> None:
        """Forget the due times of items that are gone."""
        self.due_at = {item_id: due for item_id, due in self.due_at.items() if item_id in self.entries}
