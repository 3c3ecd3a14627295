"""``Agenda``: what the feeder of a running outbox is to do, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Agenda"]

LONGEST = 3600.0
"""Seconds of one sleep: more than ``wait`` takes is no number of seconds that anybody means."""


class Agenda:
    """Any thread plans; the feeder takes what is due, and sleeps until something is.

    A name is planned once: at the earliest instant that anybody gave for it. What is taken is planned no longer, so
    whoever plans it while it is done has it done again. Instants are of ``clock``.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._planned: dict[str, float] = {}  # guarded by self._lock
        self._woken = threading.Event()

    def plan(self, what: str, instant: float) -> None:
        """Do it then, or earlier if that is planned. The feeder is not woken."""
        with self._lock:
            self._planned[what] = min(instant, self._planned.get(what, instant))

    def plan_now(self, what: str) -> None:
        """Do it at once."""
        self.plan(what, self._clock())
        self._woken.set()

    def plan_in(self, what: str, seconds: float) -> None:
        """Do it in so many seconds, or earlier if that is planned."""
        self.plan(what, self._clock() + seconds)
        self._woken.set()

    def take(self, what: str, now: float) -> bool:
        """Whether it is due; then it is to be done now."""
        with self._lock:
            is_due = self._planned.get(what, now + 1) <= now
            if is_due:
                del self._planned[what]
            return is_due

    @property
    def is_woken(self) -> bool:
        """Whether somebody woke since the last sleep ended."""
        return self._woken.is_set()

    def wake(self) -> None:
        """End the sleep: what was planned, or what can be done, has changed."""
        self._woken.set()

    def sleep(self) -> None:
        """Until something is due, or somebody wakes."""
        with self._lock:
            first = min(self._planned.values(), default=None)
        pause = LONGEST if first is None else min(first - self._clock(), LONGEST)
        if pause > 0:
            self._woken.wait(pause)
        self._woken.clear()

    def rest(self, seconds: float) -> None:
        """Sleep for so long, whatever is due, unless somebody wakes."""
        self._woken.wait(seconds)
        self._woken.clear()
