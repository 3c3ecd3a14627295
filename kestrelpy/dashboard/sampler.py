"""Looks at the folder each second or so, and keeps what was seen last and the last hour.

NOTE ON LOCKING: ``_lock`` guards what was seen; it is held for the stores of a look, never for the look itself.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from kestrelpy import Clock, KestrelError, SystemClock
from kestrelpy.dashboard.history import SLOT_SECONDS, LastHour
from kestrelpy.inspection import FolderWatch, WatchedQueue

INTERVAL_SECONDS = 1.0
IDLE_SHARE = 5
"""A look is followed by a pause that is at least so many times as long: a huge folder takes a sixth of a processor."""


class Snapshot(NamedTuple):
    """What was seen last. ``number``: of the look, from 1; ``took``: its seconds. ``problem``: why the last look
    failed, or empty; if it failed, the queues are those of the look before. ``inbox_problem``: of ``FolderWatch``.
    """

    number: int
    now_ms: int
    took: float
    slot: int
    queues: dict[str, WatchedQueue]
    problem: str
    inbox_problem: str = ""


class Sampler:
    """Looks at ``directory`` on a thread of its own, from ``start`` to ``stop``."""

    def __init__(self, directory: str, *, clock: Clock | None = None) -> None:
        self._clock = clock if clock is not None else SystemClock()
        self._watch = FolderWatch(directory, clock=self._clock)
        self._lock = threading.Lock()
        self._history = LastHour()  # guarded by self._lock
        self._snapshot = Snapshot(0, 0, 0.0, 0, {}, "")
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kestrelpy-dashboard", daemon=True)

    @property
    def snapshot(self) -> Snapshot:
        """What was seen last: one load, and it never changes."""
        return self._snapshot

    def start(self) -> None:
        """Look once, and then again and again."""
        self.look()
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """Look once. What goes wrong is in the snapshot."""
        began = self._clock.monotonic()
        before = self._snapshot
        queues, problem = before.queues, ""
        try:
            queues = self._watch.look()
        except (OSError, KestrelError) as error:
            problem = str(error)
        except Exception as error:  # a mistake of ours: the page says so, and the next look may succeed
            problem = f"{type(error).__name__}: {error}"
        took = self._clock.monotonic() - began
        now_ms = self._clock.time_ns() // 1_000_000
        slot = now_ms // 1000 // SLOT_SECONDS
        slot = max(slot, before.slot)  # the clock of the machine may go back
        with self._lock:
            if not problem:
                self._history.add(slot, queues.values(), now_ms)
            inbox_problem = self._watch.inbox_problem
            self._snapshot = Snapshot(before.number + 1, now_ms, took, slot, queues, problem, inbox_problem)

    def lines(self, name: str, first: int, last: int) -> dict[str, object] | None:
        """The points of a queue for slots ``first`` to ``last``; ``None`` if it has no lines."""
        with self._lock:
            found = self._history.of(name)
            if found is None:
                return None
            return {
                "in": found.rate_in.points(first, last),
                "out": found.rate_out.points(first, last),
                "items": found.items.points(first, last),
                "oldest": found.oldest.points(first, last),
                "lag": {reader: line.points(first, last) for reader, line in found.lag.items()},
            }

    def small_line(self, name: str, slot: int, points: int) -> list[float | None]:
        """Items put in a second, over the hour; empty if the queue has no lines."""
        with self._lock:
            found = self._history.of(name)
            return [] if found is None else found.rate_in.coarse(slot, points)

    def _run(self) -> None:
        while not self._ending.wait(max(INTERVAL_SECONDS, IDLE_SHARE * self._snapshot.took)):
            self.look()
