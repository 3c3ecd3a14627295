"""``LoopClock``: the system's clock, whose timers run in an event loop: that of the server, without another thread."""

from __future__ import annotations

import threading
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable

from kestrelpy.clock import SystemClock, Timer

__all__ = ["LoopClock"]


class _LoopTimer(Timer):
    """A timer whose callback the loop calls."""

    __slots__ = ("handle",)

    def __init__(
        self, deadline: float, callback: Callable[[], object], on_lost: Callable[[BaseException], object] | None
    ) -> None:
        super().__init__(deadline, callback, on_lost)
        self.handle: TimerHandle | None = None

    def run(self) -> None:
        callback = self.callback
        super().cancel()  # drops the references that are not needed any more
        callback()

    def cancel(self) -> None:
        super().cancel()
        if self.handle is not None:
            self.handle.cancel()
            self.handle = None


class LoopClock(SystemClock):
    """A ``Clock`` of one running event loop. Make it in the loop's thread.

    Any thread may call ``call_later``, and any thread may cancel a timer; a cancel that is too late does nothing. The
    loop must run as long as a callback is needed: close the queue before its loop.
    """

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()

    def call_later(
        self,
        seconds: float,
        callback: Callable[[], object],
        *,
        on_lost: Callable[[BaseException], object] | None = None,
    ) -> Timer:
        timer = _LoopTimer(self.monotonic() + seconds, callback, on_lost)
        if threading.get_ident() == self._thread:
            timer.handle = self._loop.call_at(timer.deadline, timer.run)
        else:
            self._loop.call_soon_threadsafe(self._arm, timer)
        return timer

    def _arm(self, timer: _LoopTimer) -> None:
        if not timer.cancelled:
            timer.handle = self._loop.call_at(timer.deadline, timer.run)
