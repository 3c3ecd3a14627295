"""How far one reader is: which ids are done, which id comes next, how much counts as released.

A plain state machine without locks, files or clocks. Ids up to ``head`` are done. Above it, single done ids are in
``done`` and runs of done ids in ``spans``; each checkpoint turns single ids into runs. Ids that never had an item (lost
tails, damage) are done from the start; only items that existed count as released.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection
from itertools import pairwise

from kestrelpy._journal import format as fmt
from kestrelpy._journal.moves import Move


class Progress:
    """The bookkeeping of one reader. ``next_id`` is the next id to be read. ``skipped``: as in a checkpoint. ``move``
    has the items that are on their way to another queue, and are not done yet.
    """

    __slots__ = (
        "_firsts",
        "done",
        "error_counts",
        "head",
        "move",
        "next_id",
        "released_bytes",
        "released_items",
        "skipped",
        "spans",
    )

    def __init__(self, head: int, released_items: int, released_bytes: int) -> None:
        self.head = head
        self.next_id = head + 1
        self.done: dict[int, None] = {}
        self.spans: dict[int, int] = {}  # the last id of each run, by its first
        self._firsts: list[int] = []  # first ids of the spans, and of some that are gone; rising
        self.released_items = released_items
        self.released_bytes = released_bytes
        self.error_counts: dict[int, int] = {}
        self.skipped = 0
        self.move: Move | None = None

    @classmethod
    def load(cls, state: fmt.Checkpoint) -> Progress:
        progress = cls(state.head, state.released_items, state.released_bytes)
        progress.spans = dict(state.done)
        progress._firsts = sorted(progress.spans)
        progress.error_counts = dict(state.error_counts)
        progress.skipped = state.skipped
        progress.move = state.move
        progress.absorb()
        return progress

    def release(self, item_id: int, size: int) -> None:
        """Mark ``item_id``, of ``size`` bytes, as done.

        No call is made before that is stored: an interrupt strikes before all of it or after. If it keeps the head
        from moving on, the next ``absorb`` moves it.
        """
        items, total = self.released_items + 1, self.released_bytes + size
        if item_id != self.head + 1:
            self.done[item_id] = None
            self.released_items, self.released_bytes = items, total
        else:
            self.head, self.released_items, self.released_bytes = item_id, items, total
            if self.done or self.spans:
                self.absorb()
        if self.error_counts:
            self.error_counts.pop(item_id, None)

    def release_all(self, ids: Collection[int], size: int) -> None:
        """Mark these ids as done, all in one step. None of them was done; they have ``size`` bytes together."""
        last_id = max(ids)
        if last_id - self.head == len(ids):  # all ids right after the head, as no id is named twice
            self.head = last_id
        else:
            self.done.update(dict.fromkeys(ids))
        self.released_items += len(ids)
        self.released_bytes += size
        if self.error_counts:
            for item_id in ids:
                self.error_counts.pop(item_id, None)
        self.absorb()

    def forget_errors(self) -> None:
        """Forget the error counts of ids that are done. A function of its own: docs/interrupts.md, rule 3."""
        self.error_counts = {key: count for key, count in self.error_counts.items() if not self.is_done(key)}

    def is_done(self, item_id: int) -> bool:
        """Whether ``item_id`` is done, or was passed over."""
        return item_id <= self.head or item_id in self.done or self._span_end(item_id) >= item_id

    def pass_over(self, first_id: int, last_id: int) -> None:
        """Mark these ids, none of which is done, as done; they do not count as released."""
        if first_id > last_id:
            return
        if first_id == self.head + 1:
            self.head = last_id
            self.absorb()
        else:
            insort(self._firsts, first_id)
            self.spans[first_id] = last_id

    def _span_end(self, item_id: int) -> int:
        """The last id of the span that begins at ``item_id`` or before; 0 if there is none."""
        for at in range(bisect_right(self._firsts, item_id) - 1, -1, -1):
            first = self._firsts[at]
            if first in self.spans:
                return self.spans[first]
            if first <= self.head:
                break
        return 0

    def _span_from(self, item_id: int) -> int | None:
        """The first id of the first span that begins at ``item_id`` or later; ``None`` if there is none."""
        for at in range(bisect_left(self._firsts, item_id), len(self._firsts)):
            if self._firsts[at] in self.spans:
                return self._firsts[at]
        return None

    def gap_end(self, limit: int) -> int:
        """The last id before the next span from ``next_id`` on, but at most ``limit``."""
        first = self._span_from(self.next_id)
        return limit if first is None else min(first - 1, limit)

    def skip_to(self, item_id: int) -> bool:
        """Continue at ``item_id``, and mark all ids before it as done. Returns whether some id from there on is done
        already.
        """
        while self.next_id < item_id:
            if not self.skip_done():
                first_id, stop = self.next_id, self.gap_end(item_id - 1)
                self.next_id = stop + 1
                self.pass_over(first_id, stop)
        self.next_id = max(self.next_id, self.head + 1)
        return self.next_id > item_id or self._span_from(item_id) is not None

    def absorb(self) -> None:
        """Move the head over all done ids directly after it, and ``next_id`` with it. May be repeated."""
        done, spans = self.done, self.spans
        while True:
            following = self.head + 1
            if following in done:
                self.head = following
                del done[following]
            elif following in spans:
                self.head = spans[following]
                del spans[following]
            else:
                break
        if self.next_id <= self.head:
            self.next_id = self.head + 1

    def skip_done(self) -> bool:
        """If ``next_id`` is in a run of done ids, move it past the run; true if it moved. For ids that are done by a
        checkpoint.
        """
        last = max(self._span_end(self.next_id), self.head)
        if last < self.next_id:
            return False
        self.next_id = last + 1
        return True

    @property
    def special_through(self) -> int:
        """The highest id that needs a check before it is delivered: it may be done, or have an error count."""
        return max(max(self.spans.values(), default=0), max(self.error_counts, default=0))

    def copy(self) -> Progress:
        copied = Progress(self.head, self.released_items, self.released_bytes)
        copied.next_id = self.next_id
        copied.done, copied.spans, copied._firsts = self.done.copy(), self.spans.copy(), self._firsts.copy()
        copied.error_counts = self.error_counts.copy()
        copied.skipped = self.skipped
        copied.move = self.move
        return copied

    def moved_to(self, item_id: int, items_before: int, bytes_before: int) -> Progress:
        """The progress of a reader that starts again at ``item_id``, given what was ever put before that id."""
        moved = Progress(item_id - 1, items_before, bytes_before)
        moved.error_counts = {key: count for key, count in self.error_counts.items() if key >= item_id}
        moved.skipped = self.skipped
        return moved

    def done_spans(self) -> tuple[tuple[int, int], ...]:
        """All done ids above the head, as separate runs, rising."""
        runs = sorted([*self.spans.items(), *((item_id, item_id) for item_id in self.done)])
        merged: list[tuple[int, int]] = []
        for first, last in runs:
            if merged and first == merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], last)
            else:
                merged.append((first, last))
        return tuple(merged)

    def fold(self) -> tuple[tuple[int, int], ...]:
        """Return ``done_spans``, and keep each run as one span: so the next call costs only what was done since.
        Otherwise, if one read stays open, each checkpoint would sort all ids that are done after it.
        """
        runs, done = self.done_spans(), self.done
        if done:
            spans, firsts, done = dict(runs), [first for first, _ in runs], {}
            # No call from here on: an interrupt strikes before or after all of these stores.
            self.spans = spans
            self._firsts = firsts
            self.done = done
        return runs

    def checkpoint(
        self, queue_id: bytes, reader: str, watermark: int, hint: tuple[int, tuple[int, int]]
    ) -> fmt.Checkpoint:
        number, (hint_id, offset) = hint
        done = self.fold()
        return fmt.Checkpoint(
            queue_id=queue_id,
            reader=reader,
            head=self.head,
            watermark=watermark,
            released_items=self.released_items,
            released_bytes=self.released_bytes,
            hint_number=number,
            hint_offset=offset,
            hint_id=hint_id,
            done=done,
            error_counts=tuple(sorted(self.error_counts.items())),
            skipped=self.skipped,
            move=self.move,
        )

    def _check(self) -> None:
        """Check the invariants; for tests."""
        assert self.next_id > self.head
        assert self.head + 1 not in self.done
        assert self.head + 1 not in self.spans
        assert all(item_id > self.head for item_id in self.done)
        assert all(self.head < first <= last for first, last in self.spans.items())
        assert all(a[1] < b[0] for a, b in pairwise(sorted(self.spans.items())))
        assert self._firsts == sorted(self._firsts)
        assert self.spans.keys() <= set(self._firsts)
        assert not any(first <= item_id <= last for item_id in self.done for first, last in self.spans.items())
