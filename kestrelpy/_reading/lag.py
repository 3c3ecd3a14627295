"""How far a reader is behind the tail of its journal, and where it would be within its limits.

Rules:
1. Lag is behind the tail: bytes of data after the reader's head, and the age of the item after its head. Open reads
   count, as the journal keeps what they need.
2. Nothing is read to find the bytes. While no item after the head is done, they are exact; else they may be too small
   by what is done within one segment, and never too large.
3. A reader is moved to the first segment from whose start on it is within its limits. That reads nothing, makes whole
   segments free, and leaves room until the next time. Only within the newest segment it is moved item by item.

NOTE ON LOCKING: none here. What is read of the journal may be read at any time.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from kestrelpy._reading.backlog import BLOCK_BYTES
from kestrelpy.errors import CorruptJournal

if TYPE_CHECKING:
    from kestrelpy._journal.segment import Segment
    from kestrelpy._reading.source import Source
    from kestrelpy.config import ReaderConfig


class LagPlace(NamedTuple):
    """Where a reader is: every id up to ``head`` is done; ``released_bytes`` of all items that it has done."""

    head: int
    released_bytes: int


def has_lag_limits(config: ReaderConfig) -> bool:
    """Whether somebody has to look how far the reader is behind."""
    return config.max_lag_bytes is not None or config.max_lag_age is not None


def shown_lag_limits(config: ReaderConfig) -> str:
    """The limits of a reader's lag, as its options, for messages."""
    limits = [] if config.max_lag_bytes is None else [f"max_lag_bytes={config.max_lag_bytes:,}"]
    limits += [] if config.max_lag_age is None else [f"max_lag_age={config.max_lag_age:g}"]
    return ", ".join(limits)


def bytes_behind(source: Source, place: LagPlace) -> int:
    """How many bytes of data the journal has after the reader's head."""
    if place.head >= source.visible_id:
        return 0
    total, segments = source.visible_bytes, source.view.segments
    at = bisect_right(segments, place.head + 1, key=_first_id)
    later = total - segments[at].header.base_bytes if at < len(segments) else 0
    return max(total - place.released_bytes, later, 0)


class LagGauge:
    """Says whether one reader is too far behind. It remembers when the reader's next item was put."""

    def __init__(self) -> None:
        self._next = (0, 0)  # an id, and when its item was put

    def is_behind(self, source: Source, place: LagPlace, config: ReaderConfig) -> bool:
        """Whether the reader is further behind than ``config`` allows. Cost: O(log of segments); for the age, at most
        one segment is read, if the reader has moved. Raises ``OSError``.
        """
        if config.max_lag_bytes is not None and bytes_behind(source, place) > config.max_lag_bytes:
            return True
        return config.max_lag_age is not None and self._is_old(source, place.head + 1, config.max_lag_age)

    def _is_old(self, source: Source, item_id: int, max_age: float) -> bool:
        visible_id, segments = source.visible_id, source.view.segments
        if item_id > visible_id or not segments:
            return False
        oldest_ms = _now_ms(source) - max_age * 1000
        segment = segments[max(0, bisect_right(segments, item_id, key=_first_id) - 1)]
        if segment.closed and item_id <= segment.last_id and segment.max_added_ms < oldest_ms:
            return True
        if segment.min_added_ms >= oldest_ms:
            return False
        if self._next[0] != item_id:
            self._next = item_id, _added_ms(source, item_id, visible_id)
        return self._next[1] < oldest_ms


def _added_ms(source: Source, item_id: int, last_id: int) -> int:
    """When the next item from ``item_id`` on was put. An item that is damaged is as old as can be."""
    try:
        entries = source.read(item_id, last_id, 1, None).entries
    except CorruptJournal:
        return 0
    return next((entry[1] for entry in entries.values()), _now_ms(source))


def place_within(source: Source, config: ReaderConfig, head: int) -> int:
    """The id at which a reader with that ``head`` has to go on, so as to be within its limits. At most one after the
    last visible item. Raises ``OSError``, ``CorruptJournal``.
    """
    visible_id, total, segments = source.visible_id, source.visible_bytes, source.view.segments
    most = total if config.max_lag_bytes is None else config.max_lag_bytes
    oldest_ms = 0.0 if config.max_lag_age is None else _now_ms(source) - config.max_lag_age * 1000
    for segment in segments:
        if not head + 1 < segment.first_id <= visible_id + 1:
            continue
        if total - segment.header.base_bytes <= most and segment.min_added_ms >= oldest_ms:
            return segment.first_id
    item_id = max(head + 1, segments[-1].first_id if segments else 0)
    left = total - source.before(item_id)[1] if item_id <= visible_id else 0
    hint = None
    while item_id <= visible_id:
        block = source.read(item_id, visible_id, BLOCK_BYTES, hint)
        for found_id, (data, added_ms, _) in block.entries.items():
            if left <= most and added_ms >= oldest_ms:
                return found_id
            left -= len(data)
        item_id, hint = block.next_id, (block.number, block.position)
    return visible_id + 1


def _now_ms(source: Source) -> int:
    return source.clock.time_ns() // 1_000_000


def _first_id(segment: Segment) -> int:
    return segment.first_id
