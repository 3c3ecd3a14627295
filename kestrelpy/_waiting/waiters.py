"""The waiters of a line: a thread, a future, a task. Each is completed once, by ``give`` or by ``fail``.

Rules 2 to 5 of ``line`` are about them.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol

from kestrelpy._process import hand_out_future

if TYPE_CHECKING:
    import asyncio

    from kestrelpy._waiting.queue_future import QueueFuture
    from kestrelpy.clock import Timer


NOTHING = object()
"""Stands for an item that is not there: ``None`` is an item like any other."""


class Owner(Protocol):
    """The owner of a line: a queue or a reader."""

    def _give_back(self, waiter: Sleeper, item: Any) -> None:
        """Put an item that ``waiter`` was given and can't use back to its old position."""


def is_deep(frames: int = 60) -> bool:
    """Whether the recursion limit is so near. Code that hits the limit has no room on the stack to clean up either."""
    try:
        sys._getframe(max(0, sys.getrecursionlimit() - frames))
    except ValueError:  # the stack is not that deep
        return False
    return True


class Waiter:
    """A consumer that waits for one item, or a producer that waits for room. Completed once, by ``give`` or ``fail``.

    ``claim``, ``give`` and ``fail`` may be repeated by a thread that was interrupted in one of them: the second time
    does nothing.
    """

    peeks = False  # wants to see the item and leave it where it is
    entered = 0.0  # monotonic seconds
    order = 0  # the number of the item it was given, in the order of giving; memory queues put items back by it
    timer: Timer | None = None

    may_refuse = False

    def claim(self) -> bool:
        """Called when it is removed from the line: does it still want an item? True unless ``may_refuse``."""
        return True

    def claim_now(self) -> bool | None:
        """``claim`` with the line owner's lock held. ``None`` if another thread has the lock of the waiter's future:
        nobody may wait for that with the owner's lock held (``wait_for_lock``).
        """
        return self.claim()

    def wait_for_lock(self) -> None:
        """Return when no other thread has the lock of the waiter's future, if there is one."""

    def give(self, item: Any) -> None:
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        raise NotImplementedError

    def stop_timer(self) -> None:
        timer = self.timer
        if timer is not None:
            timer.cancel()


class Sleeper(Waiter):
    """A waiter that is woken, and fetches its item after that. If it is gone by then (``abandon``), the item goes back.

    ``give`` stores the item, then reads ``_abandoned``; ``abandon`` does the reverse, so that at least one side sees
    the other. Only the side that pops ``_right`` may send the item back, so that exactly one side does.
    """

    _item: Any = NOTHING
    _error: BaseException | None = None
    _abandoned = False
    _owner: Owner | None  # where the item goes back to
    _right: list[None] | None = None

    def give(self, item: Any) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self._item = item
        if self._abandoned:
            self._send_back()
        else:
            self._wake()

    def fail(self, error: BaseException) -> None:
        self.stop_timer()
        self._error = error
        self._wake()

    def result(self) -> Any:
        """Return the item, or raise the error, that it was completed with. Call it once, after it was woken."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback refers to this waiter: no reference cycle
        return self._item

    def abandon(self) -> None:
        """It will not call ``result()``: an item that it was given, or will be given, goes back to its old position."""
        if self._right is None:
            self._right = [None]
        self._abandoned = True
        if self._item is not NOTHING:
            self._send_back()

    def _send_back(self) -> None:
        if self._right is None or self._owner is None:
            return
        try:
            self._right.pop()
        except IndexError:  # the other side was faster
            return
        self._owner._give_back(self, self._item)

    def _wake(self) -> None:
        raise NotImplementedError


class ThreadWaiter(Sleeper):
    """A thread that sleeps on a lock of its own."""

    def __init__(self, owner: Owner | None = None) -> None:
        self._owner = owner
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def wait(self, timeout: float | None) -> bool:
        """Sleep until completed, or for ``timeout`` seconds; true if completed."""
        return self._asleep.acquire(True, -1 if timeout is None else min(timeout, threading.TIMEOUT_MAX))

    def give(self, item: Any) -> None:
        self._item = item  # as in the base class, in fewer calls: a thread's wake-up takes this long
        if self._abandoned:
            self._send_back()
            return
        try:
            self._asleep.release()
        except RuntimeError:
            return

    def _wake(self) -> None:
        try:
            self._asleep.release()
        except RuntimeError:  # it is awake: this is a repetition
            return


class FutureWaiter(Waiter):
    """A ``concurrent.futures.Future`` that somebody holds."""

    may_refuse = True

    def __init__(self) -> None:
        # here and not above: programs without futures must not pay for it
        from kestrelpy._waiting.queue_future import QueueFuture

        hand_out_future()
        self.future: QueueFuture[Any] = QueueFuture()

    def claim(self) -> bool:
        return self.future.claim()

    def claim_now(self) -> bool | None:
        return self.future.claim_now()

    def wait_for_lock(self) -> None:
        self.future.wait_for_lock()

    def give(self, item: Any) -> None:
        self.stop_timer()
        if not self.future.done():
            self.future.set_result(item)

    def fail(self, error: BaseException) -> None:
        self.stop_timer()
        if self.claim():
            self.future.set_exception(error)


class TaskWaiter(Sleeper):
    """An asyncio task; woken from any thread through its loop."""

    may_refuse = True

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: Owner) -> None:
        self._owner = owner
        self._right = [None]  # made now: items go back even if the loop is closed
        self._loop = loop
        self.future: asyncio.Future[None] = loop.create_future()

    def claim(self) -> bool:
        return not self._abandoned and not self._loop.is_closed()

    def forsake(self) -> None:
        """The task was thrown away: an item that it is given from now on goes back."""
        self._abandoned = True

    @property
    def is_given(self) -> bool:
        """Whether it was given an item, which has to go back if the task was thrown away."""
        return self._item is not NOTHING

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._arrive)
        except RuntimeError:  # the loop was closed meanwhile and will run nothing more
            if self._item is not NOTHING:
                self._send_back()

    def _arrive(self) -> None:
        if not self.future.done():
            self.future.set_result(None)
