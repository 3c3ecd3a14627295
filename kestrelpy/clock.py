"""Time as a parameter: a wall clock for what is stored, a monotonic one for deadlines, and calls at a later time.

``SystemClock`` runs its calls on two threads of the process, each started at its first call and shared by every queue:
one for syncs, and one for all else, which may run what users have given: hooks, callbacks of futures. Nothing of that
kind holds up a sync. ``kestrelpy.testing.ManualClock`` runs all calls from ``advance()``.

NOTE ON LOCKING: ``_Timers._lock`` guards the heap and is never held while a callback runs. It is a leaf of the lock
order (docs/locking.md): a timer may be made or cancelled with any other lock held. To cancel one takes no lock.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from kestrelpy import _logging
from kestrelpy._process import reset_after_fork

__all__ = ["Clock", "SystemClock", "Timer"]

FEW_CANCELLED = 100
"""So many cancelled timers may stay where they are, however few others there are."""


class Timer:
    """One call to come. ``cancel()`` is idempotent and may come too late."""

    __slots__ = ("callback", "cancelled", "deadline", "heap", "on_lost")

    def __init__(
        self,
        deadline: float,
        callback: Callable[[], object],
        on_lost: Callable[[BaseException], object] | None,
        heap: TimerHeap | None = None,
    ) -> None:
        self.deadline = deadline
        self.callback = callback
        self.on_lost = on_lost
        self.heap = heap
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        self.callback = _nothing  # what it refers to must not live until the deadline
        self.on_lost = None
        heap, self.heap = self.heap, None
        if heap is not None:
            heap.note_cancelled()


class TimerHeap:
    """Timers by their deadline, those of one deadline by age. Cancelled ones leave when more than half of it is
    cancelled, as in asyncio's event loop: what is served in time would else fill memory until its deadline.

    NOTE ON LOCKING: its owner's lock guards all but ``note_cancelled``, which takes none: a timer may be cancelled by
    a finaliser, in a thread that has that lock. So ``cancelled`` may be wrong by a few; each clearing sets it right.
    """

    __slots__ = ("_order", "cancelled", "entries", "on_stale")

    def __init__(self, on_stale: Callable[[], object]) -> None:
        self.entries: list[tuple[float, int, Timer]] = []
        self.cancelled = 0  # how many of them are
        self.on_stale = on_stale
        """Called when half of it is cancelled: see to ``clear_out``. With any locks held, or from a finaliser."""
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self.entries)

    def push(self, due: float, timer: Timer) -> None:
        if self.is_stale:
            self.clear_out()
        heapq.heappush(self.entries, (due, next(self._order), timer))

    def pop_due(self, now: float) -> tuple[float, Timer] | None:
        """Take out the next timer that is due and not cancelled."""
        if self.is_stale:
            self.clear_out()
        while self.entries and (self.entries[0][2].cancelled or self.entries[0][0] <= now):
            due, _, timer = heapq.heappop(self.entries)
            timer.heap = None
            if not timer.cancelled:
                return due, timer
            self.cancelled -= 1
        return None

    def next_due(self) -> float:
        return self.entries[0][0] if self.entries else math.inf

    @property
    def is_stale(self) -> bool:
        return self.cancelled > FEW_CANCELLED and self.cancelled * 2 > len(self.entries)

    def clear_out(self) -> None:
        """Forget those that are cancelled."""
        left = [entry for entry in self.entries if not entry[2].cancelled]
        heapq.heapify(left)
        self.entries, self.cancelled = left, 0

    def drain(self) -> list[Timer]:
        """Take out all that are not cancelled."""
        entries, self.entries, self.cancelled = self.entries, [], 0
        return [timer for _, _, timer in entries if not timer.cancelled]

    def note_cancelled(self) -> None:
        self.cancelled += 1
        if self.is_stale:
            self.on_stale()


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
    """The machine's clocks, and the two threads of this process.

    ``call_later`` raises ``RuntimeError`` if its thread has to be started and can't be: then no call will come. So does
    ``sync_later``.
    """

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

    def sync_later(
        self,
        seconds: float,
        callback: Callable[[], object],
        *,
        on_lost: Callable[[BaseException], object] | None = None,
    ) -> Timer:
        """As ``call_later``, on a thread that runs nothing but syncs."""
        return _syncs.add(seconds, callback, on_lost)


def sync_later(
    clock: Clock, seconds: float, callback: Callable[[], object], on_lost: Callable[[BaseException], object]
) -> Timer:
    """``call_later`` for what syncs and runs nothing of a user's: on a thread of its own, if the clock has one."""
    later: Callable[..., Timer] = getattr(clock, "sync_later", clock.call_later)
    return later(seconds, callback, on_lost=on_lost)


class _Timers:
    """A heap of timers and the thread that runs them. ``notifier``: those on whose thread it is told that this one has
    died, which runs what users call back.
    """

    def __init__(self, name: str, notifier: _Timers | None = None) -> None:
        self._name = name
        self._notifier = notifier
        self._lock = threading.Lock()
        self._heap = TimerHeap(self._ring)  # guarded by self._lock
        self._wake = threading.Lock()  # a bell, and no event: it is also rung by finalisers
        self._wake.acquire()
        self._thread: threading.Thread | None = None  # guarded by self._lock
        self._next = math.inf  # guarded by self._lock: when the thread will wake by itself

    def add(
        self, seconds: float, callback: Callable[[], object], on_lost: Callable[[BaseException], object] | None
    ) -> Timer:
        """Raises ``RuntimeError`` if there is no thread and none can be started; then nothing was added."""
        timer = Timer(time.monotonic() + seconds, callback, on_lost, self._heap)
        try:
            with self._lock:
                self._heap.push(timer.deadline, timer)
                if self._thread is None or not self._thread.is_alive():
                    self._start_locked()
                elif timer.deadline < self._next:
                    self._ring()
        except BaseException:
            timer.cancel()
            raise
        return timer

    def _start_locked(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        thread.start()
        self._thread = thread

    def _ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is ringing
            self._wake.release()

    def _run(self) -> None:
        due: list[Timer] = []
        try:
            while True:
                due = self._due()
                for timer in due:
                    _run_timer(timer)
        except BaseException as error:
            self._abandon(error, due)
            raise

    def _due(self) -> list[Timer]:
        """Wait for the next deadline; the timers that have reached theirs."""
        due: list[Timer] = []
        with self._lock:
            now = time.monotonic()
            due += self._pop_due_locked(now)
            self._next = now if due else self._heap.next_due()
            wait = self._next - now
        if not due:
            self._wake.acquire(True, min(wait, threading.TIMEOUT_MAX))
        return due

    def _pop_due_locked(self, now: float) -> list[Timer]:
        due = []
        while (found := self._heap.pop_due(now)) is not None:
            due.append(found[1])
        return due

    def _abandon(self, error: BaseException, due: list[Timer]) -> None:
        """The thread is going: tell everybody who counts on it; the next call starts another."""
        with self._lock:
            lost = [*due, *self._heap.drain()]
            self._thread = None
            self._next = math.inf
        for timer in lost:
            if timer.on_lost is not None:  # a cancelled one has none
                self._notify(partial(timer.on_lost, error))

    def _notify(self, news: Callable[[], object]) -> None:
        try:
            if self._notifier is not None:
                with contextlib.suppress(RuntimeError):  # no thread can be started
                    self._notifier.add(0, news, lambda _: news())
                    return
            news()
        except BaseException:  # the others have to be told all the same
            _logging.exception("telling of a lost maintenance thread failed")

    def reset_after_fork(self) -> None:
        """In a forked child: no thread came along, and the parent's timers are not ours."""
        self.__init__(self._name, self._notifier)  # type: ignore[misc]


def _run_timer(timer: Timer) -> None:
    """What the call raises is logged, ``SystemExit`` too: every queue counts on this thread, which outlives whatever
    one user's hook or callback does.
    """
    try:
        timer.callback()
    except BaseException:
        _logging.exception("a maintenance call failed")
    finally:
        timer.cancel()


def _nothing() -> None:
    """What a cancelled timer calls."""


_timers = _Timers("kestrelpy-maintenance")
_syncs = _Timers("kestrelpy-sync", _timers)
reset_after_fork(_timers.reset_after_fork)
reset_after_fork(_syncs.reset_after_fork)
