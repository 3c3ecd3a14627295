"""What a reader tells about itself: how much is unread, open, waiting; and its invariants.

NOTE ON LOCKING: as in ``backlog``; what is one number is read without the lock.
"""

from __future__ import annotations

from typing import Any

from kestrelpy._journal.segment import ITEM_COST
from kestrelpy._reading.dispatch import Taking
from kestrelpy.config import ReaderStats
from kestrelpy.errors import CorruptJournal, KestrelError
from kestrelpy.item import Item


class Figures(Taking):
    """The figures of a ``Reader``."""

    def decode(self, data: bytes) -> Any:
        """``data`` through the queue's codec."""
        return self._source.decode(data)

    def is_open(self, item: Item) -> bool:
        """Whether ``item`` is an open read of this reader."""
        return self._open.get(item.id) is item

    def _check_settled(self, item: Item) -> None:
        """Raise why nothing can be settled any more, unless somebody has committed or aborted ``item`` before."""
        with self._lock:
            progress = self._progress
            is_settled = progress.is_done(item.id) or progress.error_counts.get(item.id, 0) > item.error_count
        if not is_settled:
            self._check_usable()

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
            kept = [entry[0] for entry in (*self._ahead.values(), *self._returned.entries.values())]
            if self._batch is not None:
                first_id, items, _ = self._batch
                kept += items[self._progress.next_id + len(self._ahead) - first_id :]
        return sum(map(len, kept)) + ITEM_COST * len(kept)

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
        try:
            items = str(self.items)
        except (KestrelError, OSError):  # of a queue that was erased, or whose files can't be read
            items = "?"
        return (
            f"<Reader {self.full_name}: head={self.head} items={items} open={self.open_items} "
            f"waiters={self.waiter_count}{state}>"
        )

    def _check(self) -> None:
        """The invariants; for tests, with nobody else at work."""
        with self._lock:
            self._check_locked()

    def _check_locked(self) -> None:
        self._progress._check()
        progress = self._progress
        places = [set(self._open), set(self._returned.entries), set(self._settling)]
        assert sum(map(len, places)) == len(set().union(*places))
        for item_id in set().union(*places):
            assert progress.head < item_id < progress.next_id
            assert item_id not in progress.done
        assert self.items >= sum(map(len, places))
        assert not (self._fast and (self._returned or self._line))
        assert (self in self._source.waiting) == bool(self._line)
