"""Back-pressure: the line of producers that wait for room in a journaled queue, in order of arrival.

Rules:
1. A producer is never handed anything. A producer that is rung checks for room and stores its item itself. So a
   producer that is cancelled, interrupted or garbage-collected in line has put nothing, and has nothing to give back.
2. The first producer in line checks for room; the others sleep. Every producer that leaves, for whatever reason, rings
   the producer that is first then.
3. Register, then look again: a producer enters the line first, and checks for room after that. Whoever makes room, or
   changes which readers refuse, does so first and rings after that.
4. The line does not wait for a producer that does not come, such as a task of an event loop that is stopped or busy.
   ``pass_over`` removes such a producer; it enters the line again when it looks.

There is no lock: the line is a deque, and each operation on it is atomic. So a task that is garbage-collected can
leave the line wherever the collector runs, whatever lock its thread holds there.
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
    """A producer in line. ``check`` raises when the producer must stop waiting.

    A producer with a ``check`` waits for room whatever the full policy of the reader is.
    """

    timer: Timer | None = None
    """Rings this producer when the item that takes up the room expires."""
    watched: object = None
    """The reader that refused the item at the last look."""
    overdue = False
    """True if ``pass_over`` has rung this producer, and the producer has not looked since."""
    check: Callable[[], object] | None = None
    was_told = False
    """Whether the put says how long it waits."""

    def is_late(self) -> bool:
        """True if the timeout has passed."""
        raise NotImplementedError

    def ring(self) -> bool:
        """Make the producer look again. Returns False if the producer cannot be expected to look."""
        raise NotImplementedError

    def stop_timer(self) -> None:
        timer, self.timer = self.timer, None
        if timer is not None:
            timer.cancel()

    def stop(self) -> None:
        """Cancel the timers: the producer waits no longer."""
        self.stop_timer()


class ProducerThread(Producer):
    """A thread in ``put``. Its deadline is in real time."""

    def __init__(self, timeout: float | None, check: Callable[[], object] | None) -> None:
        self.check = check
        self.was_told = timeout is not None
        self._deadline = None if timeout is None else SystemClock.monotonic() + timeout
        self._bell = ThreadWaiter()

    def is_late(self) -> bool:
        return self._deadline is not None and self._deadline <= SystemClock.monotonic()

    def ring(self) -> bool:
        self._bell.give(None)
        return True

    def sleep(self, seconds: float | None) -> None:
        """Sleep until rung, at most ``seconds``, and not past the deadline. Returns at once if rung before."""
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
        self.was_told = timeout is not None
        self._loop = loop
        self._clock = clock
        self._timeout = timeout
        self._deadline: Timer | asyncio.TimerHandle | None = None
        self._is_late = False
        self._rung = loop.create_future()

    def is_late(self) -> bool:
        return self._is_late

    def start(self, on_lost: Callable[[BaseException], object]) -> None:
        """Start the timeout."""
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
    """The line of producers of one queue."""

    __slots__ = ("_line",)

    def __init__(self) -> None:
        self._line: deque[Producer] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def enter(self, producer: Producer) -> bool:
        """Enter at the end of the line; False if ``producer`` is in line already. Only the producer calls this."""
        if producer in self._line:
            return False
        self._line.append(producer)
        return True

    def leave(self, producer: Producer) -> None:
        """Leave the line, and ring the producer that is first then. May be repeated."""
        producer.stop()
        self._remove(producer)
        self.ring_first()

    def is_first(self, producer: Producer) -> bool:
        try:
            return self._line[0] is producer
        except IndexError:
            return False

    def ring_first(self) -> None:
        """Ring the first producer: there may be room.

        A first producer that cannot be expected to look is removed, and the next one is rung.
        """
        while True:
            try:
                first = self._line[0]
            except IndexError:
                return
            if first.ring():
                return
            self._remove(first)

    def ring_all(self) -> None:
        """Make every producer look again: some or all of them must stop waiting."""
        for producer in list(self._line):
            producer.ring()

    def pass_over(self) -> None:
        """Ring all producers, and remove those that have not looked since the last call. Called from time to time."""
        for producer in list(self._line):
            if producer.overdue:
                self._remove(producer)
            else:
                producer.overdue = True
                producer.ring()

    def _remove(self, producer: Producer) -> None:
        try:
            self._line.remove(producer)
        except ValueError:  # the producer has left, or was passed over
            return
