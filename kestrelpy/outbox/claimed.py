"""``ClaimedJobs``: what a running outbox has claimed and not finished, and how much that is of what."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator

from kestrelpy.outbox.execution import Attempt

__all__ = ["ClaimedJobs"]


class ClaimedJobs:
    """An attempt is in here from its claim until its outcome is saved or refused. Any thread may call.

    Iterating gives those of that moment. The counts by queue are those of one instant, and may have changed since.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempts: set[Attempt] = set()  # guarded by self._lock
        self._by_queue: Counter[str] = Counter()  # guarded by self._lock
        self._retries: Counter[str] = Counter()  # guarded by self._lock
        self._async = 0  # guarded by self._lock

    def add(self, attempts: Iterable[Attempt]) -> None:
        with self._lock:
            for attempt in attempts:
                self._attempts.add(attempt)
                self._count(attempt, 1)

    def forget(self, attempt: Attempt) -> None:
        """A second time it does nothing."""
        with self._lock:
            if attempt in self._attempts:
                self._attempts.remove(attempt)
                self._count(attempt, -1)

    def release_retry(self, attempt: Attempt) -> None:
        """Let the other retries of its queue go on, though this one has not ended."""
        with self._lock:
            if attempt in self._attempts and attempt.is_retry:
                self._retries[attempt.consumer.queue] -= 1
                attempt.is_retry = False

    def of_queue(self, queue: str) -> int:
        return self._by_queue[queue]

    def retries(self, queue: str) -> int:
        return self._retries[queue]

    @property
    def async_ones(self) -> int:
        """How many of them are for an event loop."""
        return self._async

    def __len__(self) -> int:
        return len(self._attempts)

    def __iter__(self) -> Iterator[Attempt]:
        with self._lock:
            return iter(list(self._attempts))

    def _count(self, attempt: Attempt, step: int) -> None:
        queue = attempt.consumer.queue
        self._by_queue[queue] += step
        self._async += step * attempt.consumer.is_async
        self._retries[queue] += step * attempt.is_retry
