"""Those who wait for a job: a thread that is blocked, or a future.

Whoever is told of a job holds it already: there is no moment between in which it is nobody's. Telling may be repeated.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kestrelpy.work._holder import Holder
    from kestrelpy.work._live import Tube
    from kestrelpy.work.session import Job, Session


class Waiter:
    """One place in the line. ``number`` is its rank; ``wakes``: its entry among those who do not wait for ever."""

    __slots__ = ("holder", "number", "tubes", "until", "wakes")

    def __init__(self, holder: Holder, number: int) -> None:
        self.holder = holder
        self.number = number
        self.tubes: tuple[Tube, ...] = ()
        self.until = float("inf")
        self.wakes: tuple[float, int, Waiter] | None = None

    def tell(self, outcome: Any) -> None:
        """The job that was reserved for it, or the error that it waited for in vain. Without the queue's lock."""
        raise NotImplementedError


class Blocked(Waiter):
    """A thread."""

    __slots__ = ("_bell", "outcome")

    def __init__(self, holder: Holder, number: int) -> None:
        super().__init__(holder, number)
        self.outcome: Job | Exception | None = None
        self._bell = threading.Lock()
        self._bell.acquire()

    def tell(self, outcome: Any) -> None:
        self.outcome = outcome
        with contextlib.suppress(RuntimeError):  # it was told already
            self._bell.release()

    def wait(self, seconds: float | None) -> None:
        """Until it is told, or so many seconds of real time have passed."""
        if seconds is None:
            self._bell.acquire()
        else:
            self._bell.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))


class Promised(Waiter):
    """Somebody with a future."""

    __slots__ = ("_is_told", "future")
    holder: Session

    def __init__(self, holder: Session, number: int) -> None:
        super().__init__(holder, number)
        self.future = Reservation(self)
        self._is_told = False

    def tell(self, outcome: Any) -> None:
        if self._is_told:
            return
        self._is_told = True
        self.future._waiter = None  # no circle is left for the collector
        if not self.future.set_running_or_notify_cancel():
            if not isinstance(outcome, Exception):
                outcome._unreserve()
        elif isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class Reservation(Future["Job"]):
    """A job to come. ``cancel()`` leaves the line; a job that was on its way goes back to the front of it."""

    def __init__(self, waiter: Promised) -> None:
        super().__init__()
        self._waiter: Promised | None = waiter

    def cancel(self) -> bool:
        waiter, self._waiter = self._waiter, None
        cancelled = super().cancel()
        if cancelled and waiter is not None:
            waiter.holder.abandon(waiter)
        return cancelled
