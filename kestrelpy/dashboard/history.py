"""The last hour of each queue, as lines of points: in memory only, and bounded.

Rules:
1. A line has one point for each ``SLOT_SECONDS``: the mean of what was seen in them. So a line takes 1.5 kB, and a
   thousand queues with a reader each take about 8 MB, however long the server runs.
2. There are at most ``MAX_LINES``. A queue for which there is no room any more is not drawn; its figures are there.
3. A queue that is gone is forgotten.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from math import isnan, nan

from kestrelpy.inspection import WatchedQueue

SLOT_SECONDS = 10
SLOTS = 360
MAX_LINES = 25_000
"""Some 40 MB."""
OF_ALL = ""
"""The name under which the sums of all queues are kept: no queue has it."""
_NOTHING = array("f", [nan]) * SLOTS


class HourLine:
    """The last ``SLOTS`` points. A slot in which nothing was seen has none."""

    __slots__ = ("_count", "_last", "_points")

    def __init__(self) -> None:
        self._points = _NOTHING[:]
        self._last = -1
        self._count = 0

    def add(self, slot: int, value: float) -> None:
        """Note what was seen in a slot; slots rise."""
        if slot != self._last:
            for skipped in range(max(self._last + 1, slot + 1 - SLOTS), slot + 1):
                self._points[skipped % SLOTS] = nan
            self._last, self._count = slot, 0
        at = slot % SLOTS
        self._count += 1
        before = self._points[at] if self._count > 1 else 0.0
        self._points[at] = before + (value - before) / self._count

    def points(self, first: int, last: int) -> list[float | None]:
        """The points of slots ``first`` to ``last``, with three digits that count; ``None`` where there is none."""
        return [self._point(slot) for slot in range(max(first, last + 1 - SLOTS), last + 1)]

    def _point(self, slot: int) -> float | None:
        if not self._last - SLOTS < slot <= self._last:
            return None
        value = self._points[slot % SLOTS]
        return None if isnan(value) else float(f"{value:.4g}")

    def coarse(self, last: int, points: int) -> list[float | None]:
        """The whole hour in fewer points: each is the mean of those it stands for."""
        fine = self.points(last + 1 - SLOTS, last)
        step = SLOTS // points
        return [_mean([each for each in fine[at : at + step] if each is not None]) for at in range(0, SLOTS, step)]


def _mean(values: list[float]) -> float | None:
    return float(f"{sum(values) / len(values):.3g}") if values else None


class QueueLines:
    """The lines of one queue. ``lag``: unread items, by reader."""

    __slots__ = ("items", "lag", "oldest", "rate_in", "rate_out")

    def __init__(self) -> None:
        self.rate_in, self.rate_out, self.items, self.oldest = HourLine(), HourLine(), HourLine(), HourLine()
        self.lag: dict[str, HourLine] = {}

    @property
    def count(self) -> int:
        return 4 + len(self.lag)


class LastHour:
    """The lines of all queues. Not thread-safe: its sampler guards it."""

    def __init__(self) -> None:
        self._queues: dict[str, QueueLines] = {OF_ALL: QueueLines()}
        self._lines = 4

    @property
    def lines(self) -> int:
        """How many there are."""
        return self._lines

    def of(self, name: str) -> QueueLines | None:
        """The lines of a queue; ``None`` if there are none."""
        return self._queues.get(name)

    def add(self, slot: int, queues: Iterable[WatchedQueue], now_ms: int) -> None:
        """Note what was seen in a slot."""
        seen = {OF_ALL}
        rate_in = rate_out = items = 0.0
        for one in queues:
            seen.add(one.name)
            rate_in, rate_out, items = rate_in + one.rate_in, rate_out + one.rate_out, items + one.items
            self._add_one(slot, one, now_ms)
        total = self._queues[OF_ALL]
        total.rate_in.add(slot, rate_in)
        total.rate_out.add(slot, rate_out)
        total.items.add(slot, items)
        for gone in self._queues.keys() - seen:
            self._lines -= self._queues.pop(gone).count

    def _add_one(self, slot: int, one: WatchedQueue, now_ms: int) -> None:
        lines = self._queues.get(one.name)
        if lines is None:
            if self._lines + 4 > MAX_LINES:
                return
            lines = self._queues[one.name] = QueueLines()
            self._lines += lines.count
        lines.rate_in.add(slot, one.rate_in)
        lines.rate_out.add(slot, one.rate_out)
        lines.items.add(slot, one.items)
        lines.oldest.add(slot, max(0, now_ms - one.oldest_ms) / 1000 if one.oldest_ms else 0.0)
        there = {reader.name for reader in one.readers}
        for gone in lines.lag.keys() - there:
            del lines.lag[gone]
            self._lines -= 1
        for reader in one.readers:
            if reader.name not in lines.lag:
                if self._lines >= MAX_LINES:
                    continue
                lines.lag[reader.name] = HourLine()
                self._lines += 1
            lines.lag[reader.name].add(slot, reader.items)
