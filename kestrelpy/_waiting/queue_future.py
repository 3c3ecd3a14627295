"""The future that a queue or a reader hands out: a ``concurrent.futures.Future`` that is claimed in one step.

``Future.set_running_or_notify_cancel`` waits for the future's lock. A thread that holds the lock, in ``cancel()`` for
example, may run a handler of signals, which may put, and wait for the lock of a queue. So a thread that holds the lock
of a queue claims a future by ``claim_now``, which waits for nothing.

A claim reads the state and stores the new one with no call in between: a handler that comes in the middle of a claim,
and cancels the future, comes before both or after both. This relies on the attributes of ``Future`` that ``asyncio``
and ``concurrent.futures`` share, which have been the same since Python 3.2.

NOTE ON LOCKING: the lock is that of the future's condition. It is reentrant.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_PENDING, _RUNNING = "PENDING", "RUNNING"
_CANCELLED, _NOTIFIED = "CANCELLED", "CANCELLED_AND_NOTIFIED"


class QueueFuture(Future[T]):
    """A future that its queue completes: once the future is claimed, nobody cancels it. A claim may be repeated."""

    def claim(self) -> bool:
        """Whether the future may be completed. If it was cancelled, ``concurrent.futures.wait`` is notified. Waits for
        the future's lock: called with no lock of ours held.
        """
        condition, held = self._condition, False
        try:
            for held in map(condition.acquire, (True,)):  # noqa: B007 - one step: docs/interrupts.md, rule 4
                break
            if self._state == _PENDING:
                self._state = _RUNNING
            elif self._state == _CANCELLED:
                self._state = _NOTIFIED
                for waiter in self._waiters:
                    waiter.add_cancelled(self)
            return self._state == _RUNNING
        finally:
            if held:
                condition.release()

    def claim_now(self) -> bool | None:
        """Whether the future may be completed; ``None`` if another thread has the future's lock. Waits for nothing, and
        notifies nobody.
        """
        condition, held = self._condition, False
        try:
            for held in map(condition.acquire, (False,)):  # noqa: B007 - as in claim()
                break
            if not held:
                return None
            if self._state == _PENDING:
                self._state = _RUNNING
            return self._state == _RUNNING
        finally:
            if held:
                condition.release()

    def wait_for_lock(self) -> None:
        """Return when no other thread has the future's lock."""
        condition, held = self._condition, False
        try:
            for held in map(condition.acquire, (True,)):  # noqa: B007 - as in claim()
                break
        finally:
            if held:
                condition.release()
