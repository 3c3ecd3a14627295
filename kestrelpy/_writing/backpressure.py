"""The line of producers: who waits for room in a journaled queue, in order of arrival.

Rules:
1. Nobody here is handed anything. Who is rung looks by itself whether there is room, and stores its item by itself:
   so whoever is cancelled, interrupted or thrown away in line has put nothing, and has nothing to give back.
2. The first in line looks, the others sleep. Who leaves, in whatever way, rings who is first then.
3. Register, then look again: a producer enters the line first and looks for room after that. Whoever makes room, or
   changes who refuses, rings after that.
4. Nobody is waited for that does not come, such as a task of a loop that is stopped or busy: ``pass_over`` takes it out
   of the line, and it enters again when it looks.

No locks: the line is a deque, each step of which is atomic. So a task that is thrown away may leave it wherever the
garbage collector runs, whatever lock is held there.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kestrelpy._waiting.waiters import ThreadWaiter
from kestrelpy.clock import SystemClock

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from kestrelpy.clock import Clock, Timer


class Producer:
    """Somebody in line. ``check`` raises when it is not to wait any more; with it, it waits whatever the policy."""

    timer: Timer | None = None
    """Rings when the item that is in the way expires."""
    watched: object = None
    """The reader that refused at the last look."""
    overdue = False
    """It was rung, and has not looked since ``pass_over`` saw that."""
    check: Callable[[], object] | None = None

    def is_late(self) -> bool:
        """Whether it has waited as long as it is to."""
        raise NotImplementedError

    def ring(self) -> bool:
        """Make it look again. False if it can't be expected to."""
        raise NotImplementedError

    def stop_timer(self) -> None:
        timer, self.timer = self.timer, None
        if timer is not None:
            timer.cancel()

    def stop(self) -> None:
        """It waits no more."""
        self.stop_timer()


class ProducerThread(Producer):
    """A thread in ``put``. Its deadline is in real time."""

    def __init__(self, timeout: float | None, check: Callable[[], object] | None) -> None:
        self.check = check
        self._deadline = None if timeout is None else SystemClock.monotonic() + timeout
        self._bell = ThreadWaiter()

    def is_late(self) -> bool:
        return self._deadline is not None and self._deadline <= SystemClock.monotonic()

    def ring(self) -> bool:
        self._bell.give(None)
        return True

    def sleep(self, seconds: float | None) -> None:
        """Until it is rung, also if that was before; for ``seconds`` at most, and no longer than it is to wait."""
        if self._deadline is not None:
            left = max(0.0, self._deadline - SystemClock.monotonic())
            seconds = left if seconds is None else min(left, seconds)
        self._bell.wait(seconds)


class ProducerTask(Producer):
    """A task in ``aput``. Its deadline follows the queue's clock."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        timeout: float | None,
        check: Callable[[], object] | None,
    ) -> None:
        self.check = check
        self._loop = loop
        self._clock = clock
        self._timeout = timeout
        self._deadline: Timer | asyncio.TimerHandle | None = None
        self._is_late = False
        self._rung = loop.create_future()

    def is_late(self) -> bool:
        return self._is_late

    def start(self, on_lost: Callable[[BaseException], object]) -> None:
        """Its time begins."""
        if self._timeout is not None:
            try:
                self._deadline = self._clock.call_later(self._timeout, self._run_out, on_lost=on_lost)
            except RuntimeError:  # no thread can be started
                self._deadline = self._loop.call_later(self._timeout, self._run_out)

    def _run_out(self) -> None:
        self._is_late = True
        self.ring()

    def ring(self) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._arrive)
        except RuntimeError:  # the loop is closed
            return False
        return self._loop.is_running()

    def _arrive(self) -> None:
        if not self._rung.done():
            self._rung.set_result(None)

    async def sleep(self, seconds: float | None) -> None:
        """As ``ProducerThread.sleep``."""
        soon = None if seconds is None else self._loop.call_later(seconds, self._arrive)
        try:
            await self._rung
        finally:
            if soon is not None:
                soon.cancel()
        self._rung = self._loop.create_future()  # before the next look

    def stop(self) -> None:
        self.stop_timer()
        if self._deadline is not None:
            self._deadline.cancel()


class Room:
    """The line of one queue's producers."""

    __slots__ = ("_line",)

    def __init__(self) -> None:
        self._line: deque[Producer] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def enter(self, producer: Producer) -> bool:
        """Stand at the end; false for one that is in line. Called by the producer itself alone."""
        if producer in self._line:
            return False
        self._line.append(producer)
        return True

    def leave(self, producer: Producer) -> None:
        """May be repeated."""
        producer.stop()
        self._remove(producer)
        self.ring_first()

    def is_first(self, producer: Producer) -> bool:
        try:
            return self._line[0] is producer
        except IndexError:
            return False

    def ring_first(self) -> None:
        """There may be room. Who can't be expected to look is out of the line, and the next one rung."""
        while True:
            try:
                first = self._line[0]
            except IndexError:
                return
            if first.ring():
                return
            self._remove(first)

    def ring_all(self) -> None:
        """There is nothing to wait for any more, for some or for all of them."""
        for producer in list(self._line):
            producer.ring()

    def pass_over(self) -> None:
        """From time to time: who has not looked since the last time is out of the line."""
        for producer in list(self._line):
            if producer.overdue:
                self._remove(producer)
            else:
                producer.overdue = True
                producer.ring()

    def _remove(self, producer: Producer) -> None:
        try:
            self._line.remove(producer)
        except ValueError:  # it has left, or was passed over
            return
