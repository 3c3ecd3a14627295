"""Which segments that nobody needs any more are kept for some time: by the age of their last item, and by bytes.

Rules:
1. The oldest go first, and none goes before an older one: the items that are left have no hole.
2. A segment's age is that of its last item, as the segment itself says: the time of a file says nothing after a copy.
3. A time in the future is no time, as a clock was wrong: then the next segment's time counts, and without one the
   segment stays. So a clock that jumps backward makes nothing old, and one that was too far ahead for a while keeps
   nothing for longer than it was ahead of the next segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple, Protocol


class Aged(Protocol):
    """A segment, as far as retention looks at it. ``max_added_ms``: 0 if it has no items."""

    @property
    def size(self) -> int: ...

    @property
    def max_added_ms(self) -> int: ...


class Retention(NamedTuple):
    """``keep_for``: seconds after the last item. ``keep_bytes``: of all that is kept together. ``None``: no bound; if
    both are ``None``, nothing is kept.
    """

    keep_for: float | None = None
    keep_bytes: int | None = None

    @property
    def keeps(self) -> bool:
        """Whether anything is kept."""
        return self != KEEP_NOTHING

    def count_due(
        self, consumed: Sequence[Aged], now_ms: int, *, following: Sequence[Aged] = (), excess: int = 0
    ) -> int:
        """How many of the ``consumed`` segments, oldest first, are to go now. ``following``: the segments after them.
        ``excess``: so many bytes go in any case, as far as there are as many.
        """
        if not self.keeps:
            return len(consumed)
        left, times = sum(segment.size for segment in consumed), (*consumed, *following)
        keep_bytes = inf if self.keep_bytes is None else self.keep_bytes
        for count, segment in enumerate(consumed):
            if left <= keep_bytes and excess <= 0 and not self._is_old(times[count:], now_ms):
                return count
            left -= segment.size
            excess -= segment.size
        return len(consumed)

    def _is_old(self, segments: Sequence[Aged], now_ms: int) -> bool:
        if self.keep_for is None:
            return False
        for segment in segments:
            if 0 < segment.max_added_ms <= now_ms:
                return now_ms - segment.max_added_ms >= self.keep_for * 1000
        return False


KEEP_NOTHING = Retention()
