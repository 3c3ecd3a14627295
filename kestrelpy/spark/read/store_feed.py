"""A streaming query on a store: it reads the log, and notes there how far it has come.

Rules:
1. What is in the log was on the owner's disk before. So every id in it stays the id of its item, and an offset may name
   it.
2. The query's reader in the store is none of the queue's own readers: it holds back what is deleted in the store, and
   nothing on the owner's disk.
3. A gap in the ids is no loss: whoever takes a queue over begins far above. Lost is what a segment says was before it,
   and is named no more.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from kestrelpy._journal import format as fmt
from kestrelpy._reading.registry import Start
from kestrelpy.arrow.object_plan import pieces_of_log, tail_spans
from kestrelpy.arrow.wanted import Wanted
from kestrelpy.ship.errors import StoreDamaged
from kestrelpy.ship.log import carry_out, read_end_surely
from kestrelpy.ship.manifest import LogState
from kestrelpy.ship.reading import ShippedQueue
from kestrelpy.spark.read.feed import Loss
from kestrelpy.spark.read.folder_feed import SPLIT_BYTES, place_of
from kestrelpy.spark.read.plan import PART_BYTES
from kestrelpy.spark.read.store_part import StorePart
from kestrelpy.spark.read.store_plan import store_parts
from kestrelpy.spark.read.store_reader import StoreReader
from kestrelpy.spark.stores import StorePlace


class _ItemSpan(NamedTuple):
    """The items of one object, and the bytes that they have there."""

    first_id: int
    last_id: int
    data_bytes: int


class StoreFeed:
    """The ``Feed`` of reader ``name`` of a queue in a store. ``start``: where a new reader begins. ``holds``: whether
    the store is to keep what the query has not read.
    """

    def __init__(self, place: StorePlace, queue: str, name: str, start: Start, *, holds: bool) -> None:
        self._place = place
        self._queue = queue
        self._name = name
        self._start = start
        self._holds = holds
        self._shipped: ShippedQueue | None = None
        self._reader: StoreReader | None = None
        self._state: LogState

    @property
    def is_open(self) -> bool:
        return self._shipped is not None

    @property
    def queue_id(self) -> bytes:
        assert self._state.header is not None
        return self._state.header.queue_id

    @property
    def first_id(self) -> int:
        state = self._state
        if state.segments:
            return state.segments[0].segment_footer().first_id
        return state.tail[0].first_id if state.tail else state.place.last_id + 1

    @property
    def last_id(self) -> int:
        return self._state.place.last_id

    @property
    def head(self) -> int:
        if self._reader is not None and self._reader.id is not None:
            return self._reader.id
        return place_of(self._start, self.first_id, self.last_id) - 1

    def open(self, start_id: int | None) -> None:  # noqa: ARG002 - ``keep_after`` notes it, once the queue is known
        """Read the log to its end, and the reader's position. Nothing is written."""
        if self._shipped is not None:
            return
        shipped = ShippedQueue(self._place.open(), self._queue)
        self._begin(shipped)
        self._shipped = shipped

    def _begin(self, shipped: ShippedQueue) -> None:
        self._state = shipped.at_end()
        if self._holds:
            self._reader = StoreReader(shipped, self._name, self.queue_id)

    def _opened(self) -> ShippedQueue:
        assert self._shipped is not None
        return self._shipped

    def look(self) -> int:
        """Where the log ends now. If it has not moved, it may be another one, and this is the place of the one before:
        then the FENCE of the last epoch is not the one that it was.
        """
        shipped, before = self._opened(), self._state.slot
        self._state = carry_out(read_end_surely(shipped.prefix, self._state), shipped.store, bool)
        if self._state.slot == before:
            try:
                shipped.given_out(self._state)
            except StoreDamaged:
                self._begin(shipped)
        return self.last_id

    def spans(self) -> list[tuple[int, int]]:
        return [(span.first_id, span.last_id) for span in self._spans()]

    def _spans(self) -> list[_ItemSpan]:
        footers = [segment.segment_footer() for segment in self._state.segments]
        return [
            *(_ItemSpan(each.first_id, each.last_id, each.data_bytes) for each in footers if each.items),
            *(_ItemSpan(each.first_id, each.last_id, each.length) for each in tail_spans(self._state)),
        ]

    def losses(self, start_id: int) -> list[Loss]:
        first_id = self.first_id
        if start_id + 1 >= first_id or start_id >= (previous_id := self._previous_id()):
            return []
        return [Loss(start_id + 1, previous_id, f"the store has the items from {first_id} on")]

    def _previous_id(self) -> int:
        """The last id before the first segment that is named."""
        state = self._state
        if state.segments:
            header = state.segments[0].segment_header()
        elif state.tail:
            header = fmt.decode_header(self._opened().slot_there(state.tail[0].slot).frames[: fmt.HEADER_BYTES])
        else:
            header = None
        return header.previous_last_id if header is not None else self.first_id - 1

    def keep_after(self, start_id: int) -> None:
        reader = self._reader
        if reader is not None and (reader.id is None or start_id < reader.id):
            reader.commit(start_id)

    def make_durable(self, last_id: int) -> None:
        """It is: nothing is shipped before."""

    def reach(self, first_id: int, last_id: int, max_bytes: int) -> int:
        """Whole objects, and at least one."""
        left, reached = float(max_bytes), first_id - 1
        for span in self._spans():
            begin, end = max(span.first_id, first_id), min(span.last_id, last_id)
            if begin > end:
                continue
            left -= span.data_bytes * (end + 1 - begin) / (span.last_id + 1 - span.first_id)
            if left < 0 and reached >= first_id:
                break
            reached = end
        return max(reached, first_id)

    def parts(self, first_id: int, last_id: int) -> list[StorePart]:
        pieces = list(pieces_of_log(self._queue, self._state, Wanted(first_id, last_id + 1)))
        share = sum(piece.data_bytes for piece in pieces) // max(2, os.cpu_count() or 2)
        return store_parts(self._place, pieces, min(max(SPLIT_BYTES, share), PART_BYTES))

    def commit(self, last_id: int) -> None:
        reader = self._reader
        if reader is not None and (reader.id is None or last_id > reader.id):
            reader.commit(last_id)

    def close(self) -> None:
        self._shipped = self._reader = None
