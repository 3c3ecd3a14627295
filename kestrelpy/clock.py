"""Time as a parameter: a wall clock for stored times, a monotonic clock for deadlines, and calls at a later time.

``SystemClock`` runs its calls on two threads of the process, each started at its first call and shared by all queues.
One thread runs syncs. The other runs everything else, which may be users' code: hooks, callbacks of futures. So no
code of a user delays a sync. ``kestrelpy.testing.ManualClock`` runs all calls from ``advance()``.

NOTE ON LOCKING: ``_Timers._lock`` guards the heap and is never held while a callback runs. It is a leaf of the lock
order (docs/locking.md): a timer may be made or cancelled with any other lock held. Cancelling a timer takes no lock.
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
"""So many cancelled timers may stay in a heap, however few others it has."""


_ELAPSED: int | None = getattr(time, "CLOCK_BOOTTIME", None)


class Timer:
    """One call at a later time. ``cancel()`` is idempotent and may come too late."""

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
        self.callback = _nothing  # the objects that it refers to must not live until the deadline
        self.on_lost = None
        heap, self.heap = self.heap, None
        if heap is not None:
            heap.note_cancelled()


class TimerHeap:
    """Timers by deadline; those of one deadline by age. Cancelled ones are removed when more than half of the heap is
    cancelled, as in asyncio's event loop: otherwise the timers of calls served in time would fill memory until their
    deadlines.

    NOTE ON LOCKING: its owner's lock guards all but ``note_cancelled``, which takes none: a timer may be cancelled by
    a finaliser, in a thread that has that lock. So ``cancelled`` may be wrong by a few; each clearing corrects it.
    """

    __slots__ = ("_order", "cancelled", "entries", "on_stale")

    def __init__(self, on_stale: Callable[[], object]) -> None:
        self.entries: list[tuple[float, int, Timer]] = []
        self.cancelled = 0  # how many entries are cancelled
        self.on_stale = on_stale
        """Called when more than half is cancelled: have ``clear_out`` run. With any locks held, or in a finaliser."""
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
        """Remove the cancelled timers."""
        left = [entry for entry in self.entries if not entry[2].cancelled]
        heapq.heapify(left)
        self.entries, self.cancelled = left, 0

    def drain(self) -> list[Timer]:
        """Take out all timers that are not cancelled, and forget the others."""
        entries, self.entries, self.cancelled = self.entries, [], 0
        return [timer for _, _, timer in entries if not timer.cancelled]

    def note_cancelled(self) -> None:
        self.cancelled += 1
        if self.is_stale:
            self.on_stale()


class Clock(Protocol):
    """What a queue needs from time."""

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
        """Call ``callback`` once in ``seconds``; ``on_lost`` instead if the thread for it has died (rule R30)."""


def _elapsed() -> float:
    """Seconds from some fixed point, never going back, and going on while the machine is suspended, where that is
    known.
    """
    return time.clock_gettime(_ELAPSED) if _ELAPSED is not None else time.monotonic()


class SystemClock:
    """The machine's clocks, and the two threads of this process.

    ``call_later`` and ``sync_later`` raise ``RuntimeError`` if their thread has to be started and can't be: then no
    call will come.
    """

    time_ns = staticmethod(time.time_ns)
    monotonic = staticmethod(time.monotonic)
    elapsed = staticmethod(_elapsed)
    """As ``monotonic``, and it goes on while the machine is suspended (on Linux)."""

    def call_later(
        self,
        seconds: float,
        callback: Callable[[], object],
        *,
        on_lost: Callable[[BaseException], object] | None = None,
    ) -> Timer:
        """Call ``callback`` in ``seconds``, on the maintenance thread. ``on_lost`` as in ``Clock``."""
        return _timers.add(seconds, callback, on_lost)

    def sync_later(
        self,
        seconds: float,
        callback: Callable[[], object],
        *,
        on_lost: Callable[[BaseException], object] | None = None,
    ) -> Timer:
        """As ``call_later``, on a thread that runs nothing but syncs; ``on_lost``, if that thread has died."""
        return _syncs.add(seconds, callback, on_lost)


def sync_later(
    clock: Clock, seconds: float, callback: Callable[[], object], on_lost: Callable[[BaseException], object]
) -> Timer:
    """``call_later`` for a callback that syncs and runs no user's code: on a thread for syncs, if the clock has one."""
    later: Callable[..., Timer] = getattr(clock, "sync_later", clock.call_later)
    return later(seconds, callback, on_lost=on_lost)


class _Timers:
    """A heap of timers and the thread that runs them. ``notifier``: if this thread dies, the thread of these timers
    makes the ``on_lost`` calls, which run users' callbacks.
    """

    def __init__(self, name: str, notifier: _Timers | None = None) -> None:
        self._name = name
        self._notifier = notifier
        self._monotonic = SystemClock.monotonic  # once, here: the thread must outlive a test that replaces the time
        self._lock = threading.Lock()
        self._heap = TimerHeap(self._ring)  # guarded by self._lock
        self._wake = threading.Lock()  # a lock as a bell, and no event: finalisers ring it too
        self._wake.acquire()
        self._thread: threading.Thread | None = None  # guarded by self._lock
        self._next = math.inf  # guarded by self._lock: when the thread will wake by itself

    def add(
        self, seconds: float, callback: Callable[[], object], on_lost: Callable[[BaseException], object] | None
    ) -> Timer:
        """Raises ``RuntimeError`` if there is no thread and none can be started; then nothing was added."""
        timer = Timer(self._monotonic() + seconds, callback, on_lost, self._heap)
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
        with contextlib.suppress(RuntimeError):  # it is ringing already
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
        """The timers that have reached their deadline. If there are none, wait for the next deadline and return an
        empty list.
        """
        due: list[Timer] = []
        with self._lock:
            now = self._monotonic()
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
        """The thread is ending: notify everybody who relies on it. The next call starts another thread."""
        with self._lock:
            lost = [*due, *self._heap.drain()]
            self._thread = None
            self._next = math.inf
        for timer in lost:
            if timer.on_lost is not None:  # a cancelled one has none
                self._notify(partial(timer.on_lost, error))

    def _notify(self, call: Callable[[], object]) -> None:
        try:
            if self._notifier is not None:
                with contextlib.suppress(RuntimeError):  # no thread can be started
                    self._notifier.add(0, call, lambda _: call())
                    return
            call()
        except BaseException:  # the others have to be notified all the same
            _logging.exception("notifying of a lost maintenance thread failed")

    def reset_after_fork(self) -> None:
        """In a forked child: it has no such thread, and the parent's timers are not its own."""
        self.__init__(self._name, self._notifier)  # type: ignore[misc]


def _run_timer(timer: Timer) -> None:
    """Run a timer. What its callback raises is logged, even ``SystemExit``: every queue relies on this thread, so it
    outlives any user's hook or callback.
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
