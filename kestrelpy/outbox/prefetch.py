"""``Prefetch``: how many jobs a running outbox claims ahead."""

from __future__ import annotations

from collections import deque

from kestrelpy.outbox.sql import MAX_CLAIM

__all__ = ["Prefetch"]

WINDOW = 0.05
"""Seconds: what was finished within them is claimed ahead."""


class Prefetch:
    """As many jobs as were finished in the last 50 ms, or a fixed number."""

    def __init__(self, fixed: int | None) -> None:
        self._fixed = fixed
        self._samples: deque[tuple[float, int]] = deque()

    def jobs(self, now: float, finished: int) -> int:
        """How many to claim ahead. ``finished``: all that were, until ``now``, by the monotonic clock."""
        if self._fixed is not None:
            return self._fixed
        self._samples.append((now, finished))
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW:
            self._samples.popleft()
        first_time, first_finished = self._samples[0]
        passed = max(now - first_time, WINDOW)
        return min(int((finished - first_finished) * WINDOW / passed), MAX_CLAIM)
