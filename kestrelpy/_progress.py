"""How far one reader is: which ids are done, which comes next, what is counted as released.

A plain state machine without locks, files or clocks. Ids up to ``head`` are done; above it single ids are in ``done``
and runs of them in ``spans``. Ids that were never there (lost tails, damage) are done from the start; only what was
there counts as released.
"""

from __future__ import annotations

from itertools import pairwise

from sortedcontainers import SortedDict

from kestrelpy import _format as fmt


class Progress:
    """The bookkeeping of one reader. ``next_id`` is the next one to be fetched from the journal."""

    __slots__ = ("done", "error_counts", "head", "next_id", "released_bytes", "released_items", "spans")

    def __init__(self, head: int, released_items: int, released_bytes: int) -> None:
        self.head = head
        self.next_id = head + 1
        self.done: set[int] = set()
        self.spans: SortedDict[int, int] = SortedDict()
        self.released_items = released_items
        self.released_bytes = released_bytes
        self.error_counts: dict[int, int] = {}

    @classmethod
    def load(cls, state: fmt.Checkpoint) -> Progress:
        progress = cls(state.head, state.released_items, state.released_bytes)
        for first, last in state.done:
            progress.spans[first] = last
        progress.error_counts = dict(state.error_counts)
        progress.absorb()
        return progress

    def release(self, item_id: int, size: int) -> None:
        """``item_id``, of ``size`` bytes, is done. (``Reader.commit`` has this written out.)"""
        self.released_items += 1
        self.released_bytes += size
        if self.error_counts:
            self.error_counts.pop(item_id, None)
        if item_id == self.head + 1:
            self.head = item_id
            if self.done or self.spans:
                self.absorb()
        else:
            self.done.add(item_id)

    def pass_over(self, first_id: int, last_id: int) -> None:
        """These ids, none of them done, are done from now on; nothing is counted."""
        if first_id > last_id:
            return
        if first_id == self.head + 1:
            self.head = last_id
            self.absorb()
        else:
            self.spans[first_id] = last_id

    def skip_to(self, item_id: int) -> bool:
        """Go on at ``item_id``; what is before it and not done is done from now on. Whether something behind is
        done.
        """
        while self.next_id < item_id:
            if not self.skip_done():
                at = self.spans.bisect_left(self.next_id)
                stop = self.spans.peekitem(at)[0] if at < len(self.spans) else item_id
                first_id, self.next_id = self.next_id, min(stop, item_id)
                self.pass_over(first_id, self.next_id - 1)
        self.next_id = max(self.next_id, self.head + 1)
        return self.next_id > item_id or bool(self.spans and self.spans.peekitem(-1)[0] >= item_id)

    def absorb(self) -> None:
        """Move the head over everything done right behind it, and ``next_id`` with it."""
        done, spans = self.done, self.spans
        while True:
            following = self.head + 1
            if following in done:
                done.remove(following)
                self.head = following
            elif following in spans:
                self.head = spans.pop(following)
            else:
                break
        if self.next_id <= self.head:
            self.next_id = self.head + 1

    def skip_done(self) -> bool:
        """Move ``next_id`` behind a run of done ids that it is in; true if it moved. For ids that a checkpoint says
        are done.
        """
        at = self.spans.bisect_right(self.next_id) - 1
        if at >= 0:
            last: int = self.spans.peekitem(at)[1]
            if last >= self.next_id:
                self.next_id = last + 1
                return True
        if self.next_id <= self.head:
            self.next_id = self.head + 1
            return True
        return False

    @property
    def special_through(self) -> int:
        """The highest id that needs a second look before it is handed out: known as done, or with an error count."""
        return max(self.spans.peekitem(-1)[1] if self.spans else 0, max(self.error_counts, default=0))

    def move_to(self, item_id: int, items_before: int, bytes_before: int) -> None:
        """Start again at ``item_id``, before which so many items and bytes were ever put."""
        self.head = item_id - 1
        self.next_id = item_id
        self.done.clear()
        self.spans.clear()
        self.released_items = items_before
        self.released_bytes = bytes_before
        self.error_counts = {key: count for key, count in self.error_counts.items() if key >= item_id}

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

    def checkpoint(
        self, queue_id: bytes, reader: str, watermark: int, hint: tuple[int, tuple[int, int]]
    ) -> fmt.Checkpoint:
        number, (hint_id, offset) = hint
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
            done=self.done_spans(),
            error_counts=tuple(sorted(self.error_counts.items())),
        )

    def _check(self) -> None:
        """The invariants; for tests."""
        assert self.next_id > self.head
        assert self.head + 1 not in self.done
        assert self.head + 1 not in self.spans
        assert all(item_id > self.head for item_id in self.done)
        assert all(self.head < first <= last for first, last in self.spans.items())
        assert all(a[1] < b[0] for a, b in pairwise(self.spans.items()))
        assert not any(first <= item_id <= last for item_id in self.done for first, last in self.spans.items())
