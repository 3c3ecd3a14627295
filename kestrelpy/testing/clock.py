"""A clock that stands still until a test advances it.

NOTE ON LOCKING: ``_lock`` guards the time and the heap of timers. It is a leaf, as in ``kestrelpy.clock``, and is not
held while a callback runs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from kestrelpy.clock import Timer, TimerHeap

__all__ = ["ManualClock"]

_SECOND = 1_000_000_000


class ManualClock:
    """A ``Clock`` for tests: both its clocks stand still, and ``advance()`` runs the timers that fall due.

    The wall clock starts at ``now_ms``, the monotonic clock at 0. Thread-safe. Durations are rounded to nanoseconds, so
    that ten advances of 0.1 reach a timer of 1.0 exactly.

    >>> clock = ManualClock(now_ms=1_000)
    >>> timer = clock.call_later(5, lambda: print("due"))
    >>> clock.advance(4.5)
    >>> clock.advance(0.5)
    due
    >>> clock.time_ns(), clock.monotonic()
    (6000000000, 5.0)
    """

    def __init__(self, now_ms: int = 0) -> None:
        self._lock = threading.Lock()
        self._start_ns = now_ms * 1_000_000  # guarded by self._lock: the wall clock when the monotonic one was 0
        self._elapsed_ns = 0  # guarded by self._lock
        self._heap = TimerHeap(lambda: None)  # guarded by self._lock; the next call removes cancelled timers

    def time_ns(self) -> int:
        """Nanoseconds since the Unix epoch, by this clock."""
        return self._start_ns + self._elapsed_ns

    def monotonic(self) -> float:
        """The seconds by which this clock was advanced so far."""
        return self._elapsed_ns / _SECOND

    def call_later(
        self,
        seconds: float,
        callback: Callable[[], object],
        *,
        on_lost: Callable[[BaseException], object] | None = None,
    ) -> Timer:
        """Call ``callback`` once, from the ``advance()`` that reaches or passes the present time plus ``seconds``.

        ``on_lost`` is never called, because this clock has no thread that could die.
        """
        with self._lock:
            due_ns = self._elapsed_ns + (round(seconds * _SECOND) if math.isfinite(seconds) else seconds)
            timer = Timer(due_ns / _SECOND, callback, on_lost, self._heap)
            self._heap.push(due_ns, timer)
        return timer

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass: run the timers that fall due, by deadline and then by age, each at its own time.

        Timers that a callback makes run too if they fall due. If a callback raises, this raises the same error, and the
        time stops there. The next ``advance()`` continues. Raises ``ValueError`` for a negative duration.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"'seconds' must be finite and not negative, not {seconds!r}")
        until_ns = self._elapsed_ns + round(seconds * _SECOND)
        while (timer := self._next(until_ns)) is not None:
            callback = timer.callback
            timer.cancel()  # the caller's reference to the timer must not keep the callback's objects alive
            callback()

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward by ``seconds``, or back if negative, as an operator may. No timer notices."""
        with self._lock:
            self._start_ns += round(seconds * _SECOND)

    @property
    def timer_count(self) -> int:
        """The number of timers that are neither cancelled nor run. O(n)."""
        with self._lock:
            return sum(not timer.cancelled for _, _, timer in self._heap.entries)

    def _next(self, until_ns: int) -> Timer | None:
        """Advance to the next deadline and return its timer. If none is due, go to ``until_ns`` and return ``None``."""
        with self._lock:
            found = self._heap.pop_due(until_ns)
            self._elapsed_ns = max(self._elapsed_ns, until_ns if found is None else int(found[0]))
            return None if found is None else found[1]
