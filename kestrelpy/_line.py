"""The waiting line: consumers in order of arrival, like taxis at a rank. The only code of the library that waits for items.

Rules:
1. Register, then look again: a consumer enters the line first and looks for an item after that (``Waiting._enter``).
2. Claim by removal: waiters leave the line under its owner's lock; whoever removed one must complete it, and nobody else may.
3. Waiters are completed with no lock held: completing a future runs its callbacks.
4. What a waiter was given and cannot use goes back to its old place (``Waiting._give_back``).

NOTE ON LOCKING: a ``Line`` has no lock of its own. Its owner's lock guards every method except ``len`` and truth,
which are single atomic reads and may be used as a hint without it.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kestrelpy.errors import QueueEmpty

if TYPE_CHECKING:
    import asyncio

    from kestrelpy.clock import Clock, Timer

T = TypeVar("T")

_ON_ITS_WAY = 1.0
"""Seconds: a claimed waiter is completed within microseconds; one that was interrupted before it entered the line never is."""


def check_timeout(timeout: float | None) -> None:
    """Raise ``ValueError`` for a timeout below zero, ``TypeError`` for one that is no number."""
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"'timeout' must be a non-negative number, not {timeout!r}")


class Waiter:
    """Somebody who waits: for one item, or for room. Completed once, by ``give`` or by ``fail``."""

    __slots__ = ("entered", "order", "timer")

    def __init__(self) -> None:
        self.entered = 0.0  # monotonic seconds
        self.order = 0  # of being handed an item, among all that were; memory queues put items back by it
        self.timer: Timer | None = None

    def claim(self) -> bool:
        """Called once by whoever removed it from the line: does it still want an item?"""
        return True

    def give(self, item: Any) -> None:
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        raise NotImplementedError

    def stop_timer(self) -> None:
        timer = self.timer
        if timer is not None:
            timer.cancel()


class ThreadWaiter(Waiter):
    """A thread, asleep on a lock of its own."""

    __slots__ = ("_asleep", "_error", "_item")

    def __init__(self) -> None:
        super().__init__()
        self._asleep = threading.Lock()
        self._asleep.acquire()
        self._item: Any = None
        self._error: BaseException | None = None

    def give(self, item: Any) -> None:
        self._item = item
        self._asleep.release()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._asleep.release()

    def wait(self, timeout: float | None) -> bool:
        """Sleep until completed, or for ``timeout`` seconds; true if completed."""
        return self._asleep.acquire(True, -1 if timeout is None else min(timeout, threading.TIMEOUT_MAX))

    def result(self) -> Any:
        """What it was completed with. Call it once, after ``wait`` returned true."""
        if self._error is not None:
            raise self._error
        return self._item


class FutureWaiter(Waiter):
    """A ``concurrent.futures.Future`` that somebody holds."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        super().__init__()
        self.future: Future[Any] = Future()

    def claim(self) -> bool:
        return self.future.set_running_or_notify_cancel()

    def give(self, item: Any) -> None:
        self.stop_timer()
        self.future.set_result(item)

    def fail(self, error: BaseException) -> None:
        self.stop_timer()
        self.future.set_exception(error)


class TaskWaiter(Waiter):
    """An asyncio task; completed from any thread through its loop."""

    __slots__ = ("_loop", "_owner", "future")

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: Waiting[Any]) -> None:
        super().__init__()
        self._loop = loop
        self._owner = owner
        self.future: asyncio.Future[Any] = loop.create_future()

    def give(self, item: Any) -> None:
        self.stop_timer()
        try:
            self._loop.call_soon_threadsafe(self._arrive, item)
        except RuntimeError:  # the loop is closed and will run nothing more
            self._owner._give_back(self, item)

    def _arrive(self, item: Any) -> None:
        if self.future.done():
            self._owner._give_back(self, item)
        else:
            self.future.set_result(item)

    def fail(self, error: BaseException) -> None:
        self.stop_timer()
        try:
            self._loop.call_soon_threadsafe(self._refuse, error)
        except RuntimeError:  # as above: nobody is left to be told
            return

    def _refuse(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Line:
    """Waiters in order of arrival."""

    __slots__ = ("waiters",)

    def __init__(self) -> None:
        self.waiters: OrderedDict[Waiter, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.waiters)

    def add(self, waiter: Waiter) -> None:
        self.waiters[waiter] = None

    def remove(self, waiter: Waiter) -> bool:
        """Take ``waiter`` out; false if somebody has claimed it already."""
        return self.waiters.pop(waiter, waiter) is None

    def first(self) -> Waiter | None:
        """Take out the longest-waiting one that still wants an item."""
        while self.waiters:
            waiter, _ = self.waiters.popitem(last=False)
            if waiter.claim():
                return waiter
        return None

    def drain(self) -> list[Waiter]:
        """Take out everybody who still wants an item."""
        gone = []
        while (waiter := self.first()) is not None:
            gone.append(waiter)
        return gone


class Waiting(Generic[T]):
    """What a queue and a reader share: three ways to wait for an item, one line.

    The subclass has the items, the lock and ``self._line``. It provides ``_take_now`` (an item without waiting, or
    ``QueueEmpty``, or ``QueueClosed``), ``_enter``, ``_leave`` and ``_give_back``.
    """

    _clock: Clock

    @abstractmethod
    def _take_now(self) -> T:
        """An item at once, if whoever came first does not have to be served first; else ``QueueEmpty``."""

    @abstractmethod
    def _enter(self, waiter: Waiter) -> None:
        """Put ``waiter`` at the end of the line, then look again; raises ``QueueClosed``."""

    @abstractmethod
    def _leave(self, waiter: Waiter) -> bool:
        """Take ``waiter`` out of the line; false if it was claimed and so is being completed."""

    @abstractmethod
    def _give_back(self, waiter: Waiter, item: T) -> None:
        """Put an item that ``waiter`` was given to the place it came from."""

    def _missed(self, waiter: Waiter) -> None:
        """``waiter`` waited in vain. For counters and hooks; called with no lock held."""

    def _wait(self, timeout: float | None) -> T:
        """Wait in line on this thread. Raises ``QueueEmpty`` after ``timeout`` seconds of real time."""
        waiter = ThreadWaiter()
        waiter.entered = self._clock.monotonic()
        try:
            self._enter(waiter)
            if not waiter.wait(timeout):
                if self._leave(waiter):
                    self._missed(waiter)
                    raise QueueEmpty(f"nothing arrived within {timeout} s")
                waiter.wait(None)
        except QueueEmpty:
            raise
        except BaseException:  # an interrupt: what is on its way to this thread must not be lost
            if not self._leave(waiter) and waiter.wait(_ON_ITS_WAY):
                self._give_back(waiter, waiter.result())
            raise
        item: T = waiter.result()
        return item

    def get_future(self, timeout: float | None = None) -> Future[T]:
        """A future of the next item; never blocks.

        It fails with ``QueueEmpty`` when ``timeout`` seconds have passed on the queue's clock. ``cancel()`` leaves the line, and
        no item is lost by it. Raises ``ValueError`` for a negative timeout. Thread-safe.
        """
        check_timeout(timeout)
        waiter = FutureWaiter()
        waiter.entered = self._clock.monotonic()
        future: Future[T] = waiter.future
        try:
            item = self._take_now()
        except QueueEmpty as error:
            if timeout == 0:
                future.set_exception(error)
                return future
        else:
            future.set_result(item)
            return future
        future.add_done_callback(lambda done: self._quit(waiter) if done.cancelled() else None)
        self._enter_until(waiter, timeout)
        return future

    async def aget(self, timeout: float | None = None) -> T:
        """The next item, for asyncio, from any event loop.

        Raises ``QueueEmpty`` when ``timeout`` seconds have passed on the queue's clock. A task that is cancelled while it waits
        loses no item: what it was about to be given goes back to its place.
        """
        import asyncio  # here and not above: who does not use it must not pay for it

        check_timeout(timeout)
        entered = self._clock.monotonic()
        try:
            return self._take_now()
        except QueueEmpty:
            if timeout == 0:
                raise
        waiter = TaskWaiter(asyncio.get_running_loop(), self)
        waiter.entered = entered
        self._enter_until(waiter, timeout)
        try:
            item: T = await waiter.future
        except asyncio.CancelledError:
            future = waiter.future
            if not self._quit(waiter) and future.done() and not future.cancelled() and future.exception() is None:
                self._give_back(waiter, future.result())
            raise
        return item

    def _enter_until(self, waiter: Waiter, timeout: float | None) -> None:
        if timeout is not None:  # before it enters: whoever completes it stops its timer
            waiter.timer = self._clock.call_later(timeout, lambda: self._time_out(waiter, timeout))
        try:
            self._enter(waiter)
        except BaseException:
            waiter.stop_timer()
            raise

    def _quit(self, waiter: Waiter) -> bool:
        waiter.stop_timer()
        return self._leave(waiter)

    def _time_out(self, waiter: Waiter, timeout: float) -> None:
        if self._leave(waiter) and waiter.claim():
            self._missed(waiter)
            waiter.fail(QueueEmpty(f"nothing arrived within {timeout} s"))
