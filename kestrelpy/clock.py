"""Time as a parameter: a wall clock for what is stored, a monotonic one for deadlines, and calls at a later time.

``SystemClock`` runs its calls on the one maintenance thread of the process, started at the first call and shared by
every queue. ``kestrelpy.testing.ManualClock`` runs them from ``advance()``.

NOTE ON LOCKING: ``_Timers._lock`` guards the heap and is never held while a callback runs. It is a leaf of the lock
order (docs/locking.md): a timer may be made or cancelled with any other lock held.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from kestrelpy import _log

__all__ = ["Clock", "SystemClock", "Timer"]


class Timer:
    """One call to come. ``cancel()`` is idempotent and may come too late."""

    __slots__ = ("callback", "cancelled", "deadline", "on_lost")

    def __init__(
        self, deadline: float, callback: Callable[[], object], on_lost: Callable[[BaseException], object] | None
    ) -> None:
        self.deadline = deadline
        self.callback = callback
        self.on_lost = on_lost
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        self.callback = _nothing  # what it refers to must not live until the deadline
        self.on_lost = None


class Clock(Protocol):
    """What a queue needs of time."""

    def time_ns(self) -> int:
        """Nanoseconds since the Unix epoch, UTC."""

    def monotonic(self) -> float:
        """Seconds from some fixed point, never going back."""

    def call_later(
        self,
        seconds: float,
        callback: Callable[[], object],
        *,
        on_lost: Callable[[BaseException], object] | None = None,
    ) -> Timer:
        """Call ``callback`` once in ``seconds``; ``on_lost`` instead if whoever makes the calls has died (rule R30)."""


class SystemClock:
    """The machine's clocks and the maintenance thread of this process."""

    time_ns = staticmethod(time.time_ns)
    monotonic = staticmethod(time.monotonic)

    def call_later(
        self,
        seconds: float,
        callback: Callable[[], object],
        *,
        on_lost: Callable[[BaseException], object] | None = None,
    ) -> Timer:
        return _timers.add(seconds, callback, on_lost)


class _Timers:
    """A heap of timers and the thread that runs them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, Timer]] = []  # guarded by self._lock
        self._order = itertools.count()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None  # guarded by self._lock
        self._next = float("inf")  # guarded by self._lock: when the thread will wake by itself

    def add(
        self, seconds: float, callback: Callable[[], object], on_lost: Callable[[BaseException], object] | None
    ) -> Timer:
        timer = Timer(time.monotonic() + seconds, callback, on_lost)
        with self._lock:
            heapq.heappush(self._heap, (timer.deadline, next(self._order), timer))
            if self._thread is None:
                self._start_locked()
            elif timer.deadline < self._next:
                self._wake.set()
        return timer

    def _start_locked(self) -> None:
        thread = threading.Thread(target=self._run, name="kestrelpy-maintenance", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down: close() does what this thread would have done (R29)
            return
        self._thread = thread

    def _run(self) -> None:
        due: list[Timer] = []
        try:
            while True:
                due = self._due()
                for timer in due:
                    callback = timer.callback
                    try:
                        callback()
                    except Exception:
                        _log.exception("a maintenance call failed")
                    finally:
                        timer.cancel()
                    callback = _nothing
        except BaseException as error:
            self._abandon(error, due)
            raise

    def _due(self) -> list[Timer]:
        """Wait for the next deadline; the timers that have reached theirs."""
        due: list[Timer] = []
        with self._lock:
            now = time.monotonic()
            due += self._pop_due_locked(now)
            self._next = now if due else self._heap[0][0] if self._heap else float("inf")
            wait = self._next - now
            self._wake.clear()
        if not due:
            self._wake.wait(min(wait, threading.TIMEOUT_MAX))
        return due

    def _pop_due_locked(self, now: float) -> list[Timer]:
        due = []
        while self._heap and (self._heap[0][2].cancelled or self._heap[0][0] <= now):
            timer = heapq.heappop(self._heap)[2]
            if not timer.cancelled:
                due.append(timer)
        return due

    def _abandon(self, error: BaseException, due: list[Timer]) -> None:
        """The thread is going: tell everybody who counts on it; the next call starts another."""
        with self._lock:
            lost = [*due, *(entry[2] for entry in self._heap)]
            self._heap.clear()
            self._thread = None
            self._next = float("inf")
        for timer in lost:
            if timer.on_lost is not None:  # a cancelled one has none
                timer.on_lost(error)

    def reset_after_fork(self) -> None:
        """In a forked child: no thread came along, and the parent's timers are not ours."""
        self.__init__()  # type: ignore[misc]


def _nothing() -> None:
    """What a cancelled timer calls."""


_timers = _Timers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_timers.reset_after_fork)
