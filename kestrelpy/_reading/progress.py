"""How far one reader is: which ids are done, which comes next, what is counted as released.

A plain state machine without locks, files or clocks. Ids up to ``head`` are done; above it single ids are in ``done``
and runs of them in ``spans``: each checkpoint makes runs of what is single. Ids that were never there (lost tails,
damage) are done from the start; only what was there counts as released.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection
from itertools import pairwise

from kestrelpy._journal import format as fmt


class Progress:
    """The bookkeeping of one reader. ``next_id`` is the next one to be fetched from the journal."""

    __slots__ = ("_firsts", "done", "error_counts", "head", "next_id", "released_bytes", "released_items", "spans")

    def __init__(self, head: int, released_items: int, released_bytes: int) -> None:
        self.head = head
        self.next_id = head + 1
        self.done: dict[int, None] = {}
        self.spans: dict[int, int] = {}  # the last ids of runs by their first
        self._firsts: list[int] = []  # of the spans, rising; and of some that are gone
        self.released_items = released_items
        self.released_bytes = released_bytes
        self.error_counts: dict[int, int] = {}

    @classmethod
    def load(cls, state: fmt.Checkpoint) -> Progress:
        progress = cls(state.head, state.released_items, state.released_bytes)
        progress.spans = dict(state.done)
        progress._firsts = sorted(progress.spans)
        progress.error_counts = dict(state.error_counts)
        progress.absorb()
        return progress

    def release(self, item_id: int, size: int) -> None:
        """``item_id``, of ``size`` bytes, is done.

        No call is made until it is so: an interrupt comes before all of it or after. What is left then, the next
        ``absorb`` does.
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
        """These ids, none of them done and of ``size`` bytes together, are done: from one step on, all of them."""
        last_id = max(ids)
        if last_id - self.head == len(ids):  # all that is behind the head, as nobody names an id twice
            self.head = last_id
        else:
            self.done.update(dict.fromkeys(ids))
        self.released_items += len(ids)
        self.released_bytes += size
        if self.error_counts:
            for item_id in ids:
                self.error_counts.pop(item_id, None)
        self.absorb()

    def is_done(self, item_id: int) -> bool:
        """Whether ``item_id`` is done, or passed over."""
        return item_id <= self.head or item_id in self.done or self._span_end(item_id) >= item_id

    def pass_over(self, first_id: int, last_id: int) -> None:
        """These ids, none of them done, are done from now on; nothing is counted."""
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
        """Where the first span begins that begins at ``item_id`` or later."""
        for at in range(bisect_left(self._firsts, item_id), len(self._firsts)):
            if self._firsts[at] in self.spans:
                return self._firsts[at]
        return None

    def gap_end(self, limit: int) -> int:
        """The last id, up to ``limit``, before the next span from ``next_id`` on."""
        first = self._span_from(self.next_id)
        return limit if first is None else min(first - 1, limit)

    def skip_to(self, item_id: int) -> bool:
        """Go on at ``item_id``; what is before it and not done is done from now on. Whether something behind is
        done.
        """
        while self.next_id < item_id:
            if not self.skip_done():
                first_id, stop = self.next_id, self.gap_end(item_id - 1)
                self.next_id = stop + 1
                self.pass_over(first_id, stop)
        self.next_id = max(self.next_id, self.head + 1)
        return self.next_id > item_id or self._span_from(item_id) is not None

    def absorb(self) -> None:
        """Move the head over everything done right behind it, and ``next_id`` with it. May be repeated."""
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
        """Move ``next_id`` behind a run of done ids that it is in; true if it moved. For ids that a checkpoint says
        are done.
        """
        last = max(self._span_end(self.next_id), self.head)
        if last < self.next_id:
            return False
        self.next_id = last + 1
        return True

    @property
    def special_through(self) -> int:
        """The highest id that needs a second look before it is handed out: known as done, or with an error count."""
        return max(max(self.spans.values(), default=0), max(self.error_counts, default=0))

    def copy(self) -> Progress:
        copied = Progress(self.head, self.released_items, self.released_bytes)
        copied.next_id = self.next_id
        copied.done, copied.spans, copied._firsts = self.done.copy(), self.spans.copy(), self._firsts.copy()
        copied.error_counts = self.error_counts.copy()
        return copied

    def moved_to(self, item_id: int, items_before: int, bytes_before: int) -> Progress:
        """What a reader has that starts again at ``item_id``, before which so many items and bytes were ever put."""
        moved = Progress(item_id - 1, items_before, bytes_before)
        moved.error_counts = {key: count for key, count in self.error_counts.items() if key >= item_id}
        return moved

    def done_spans(self) -> tuple[tuple[int, int], ...]:
        """Everything done above the head, as runs, rising and apart."""
        runs = sorted([*self.spans.items(), *((item_id, item_id) for item_id in self.done)])
        merged: list[tuple[int, int]] = []
        for first, last in runs:
            if merged and first == merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], last)
            else:
                merged.append((first, last))
        return tuple(merged)

    def fold(self) -> tuple[tuple[int, int], ...]:
        """``done_spans``, and from here on each run is one span: the next time costs what was done since. Behind one
        open read that stays all that is done would have to be sorted at each checkpoint.
        """
        runs, done = self.done_spans(), self.done
        if done:
            spans, firsts, done = dict(runs), [first for first, _ in runs], {}
            # No call from here on until it is done: an interrupt falls before or behind.
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
        )

    def _check(self) -> None:
        """The invariants; for tests."""
        assert self.next_id > self.head
        assert self.head + 1 not in self.done
        assert self.head + 1 not in self.spans
        assert all(item_id > self.head for item_id in self.done)
        assert all(self.head < first <= last for first, last in self.spans.items())
        assert all(a[1] < b[0] for a, b in pairwise(sorted(self.spans.items())))
        assert self._firsts == sorted(self._firsts)
        assert self.spans.keys() <= set(self._firsts)
        assert not any(first <= item_id <= last for item_id in self.done for first, last in self.spans.items())
