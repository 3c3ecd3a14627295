"""The future of a put: a ``concurrent.futures.Future`` that costs little until somebody waits for it.

More than half of the cost of making and completing a future is its condition variable. A producer of thousands of items
looks at few of their futures before they are done, so this one makes its condition when it is first asked for. It
relies on the attributes of ``Future`` that ``asyncio`` and ``concurrent.futures`` share, which have been the same since
Python 3.2.

NOTE ON LOCKING: ``_making`` guards ``_has_no_condition``, and what ``give`` stores while ``_has_no_condition`` is true.
It is a leaf, and one lock serves all futures, as it is held for a few stores. It is reentrant: a signal handler may
take it again. A forked child makes a new one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, cast

from kestrelpy._process import reset_after_fork
from kestrelpy._waiting.queue_future import QueueFuture

T = TypeVar("T")

_PENDING, _FINISHED = "PENDING", "FINISHED"
_making = threading.RLock()


class PutFuture(QueueFuture[T]):
    """A future that is completed like a ``Waiter``: by ``give`` or ``fail``, each of which may be repeated."""

    def __init__(self) -> None:
        self._state = _PENDING
        self._result = None
        self._exception = None
        self._waiters = []
        self._done_callbacks: list[Callable[[Future[T]], object]] = []
        self._has_no_condition = True  # nobody has asked for the condition, so nobody waits, listens or has cancelled

    def __getattr__(self, name: str) -> Any:
        """Make the condition, when it is first used."""
        if name != "_condition":
            raise AttributeError(name)
        condition = threading.Condition()  # before the lock is taken, which is held for a few stores only
        with _making:
            if self._has_no_condition:
                self._condition = condition
                self._has_no_condition = False
        return self._condition

    def done(self) -> bool:
        return self._state == _FINISHED or super().done()

    def result(self, timeout: float | None = None) -> T:
        if self._state == _FINISHED and self._exception is None:
            return cast("T", self._result)
        return super().result(timeout)

    def claim(self) -> bool:
        """Whether the future may be completed: not if it is completed already, or its holder has cancelled it."""
        return self._state == _PENDING if self._has_no_condition else super().claim()

    def give(self, result: T) -> None:
        with _making:
            if self._has_no_condition:
                if self._state == _PENDING:
                    self._result = result
                    self._state = _FINISHED
                return
        if super().claim():
            self.set_result(result)

    def fail(self, error: BaseException) -> None:
        if super().claim():
            self.set_exception(error)


def _reset_after_fork() -> None:
    """In a forked child: another thread of the parent may have held the lock, and will never release it here."""
    global _making
    _making = threading.RLock()


reset_after_fork(lambda: _reset_after_fork())
