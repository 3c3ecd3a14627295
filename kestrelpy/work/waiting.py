"""Those who wait for a job: a thread that is blocked, a future, or a task of asyncio.

Whoever is told of a job holds it already: there is no moment between in which it is nobody's. Telling may be repeated.

A task may be gone without a word: its loop is closed while it waits, or it is thrown away. Then the job that was meant
for it goes back. The garbage collector, which may find that out, may do so in the middle of anything: it takes no lock,
and leaves a note for the next call (``WorkCore.leave_note``).
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from kestrelpy.work.job import Job, leave, unreserve
from kestrelpy.work.stored import JobWaiter, SessionState

if TYPE_CHECKING:
    import asyncio


class Blocked(JobWaiter):
    """A thread."""

    __slots__ = ("_bell", "outcome")

    def __init__(self, holder: SessionState, number: int) -> None:
        super().__init__(holder, number)
        self.outcome: Job | Exception | None = None
        self._bell = threading.Lock()
        self._bell.acquire()

    def notify(self, outcome: Any) -> None:
        self.outcome = outcome
        with contextlib.suppress(RuntimeError):  # it was told already
            self._bell.release()

    def wait(self, seconds: float | None) -> None:
        """Until it is told, or so many seconds of real time have passed."""
        if seconds is None:
            self._bell.acquire()
        else:
            self._bell.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))


class Promised(JobWaiter):
    """Somebody with a future."""

    __slots__ = ("_is_notified", "future")

    def __init__(self, holder: SessionState, number: int) -> None:
        super().__init__(holder, number)
        self.future = Reservation(self)
        self._is_notified = False

    def notify(self, outcome: Any) -> None:
        if self._is_notified:
            return
        self._is_notified = True
        self.future._waiter = None  # no circle is left for the collector
        if not self.future.set_running_or_notify_cancel():
            if not isinstance(outcome, Exception):
                unreserve(outcome)
        elif isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class Awaiting(JobWaiter):
    """A task of asyncio. Made in its loop."""

    __slots__ = ("_is_notified", "_loop", "future")

    def __init__(self, holder: SessionState, number: int) -> None:
        from asyncio import get_running_loop  # here and not above: who does not use it must not pay for it

        super().__init__(holder, number)
        self._loop = get_running_loop()
        self.future: asyncio.Future[Delivery] = self._loop.create_future()
        self._is_notified = False

    def notify(self, outcome: Any) -> None:
        if self._is_notified:
            return
        self._is_notified = True
        arrived = outcome if isinstance(outcome, Exception) else Delivery(outcome)
        try:
            self._loop.call_soon_threadsafe(self._arrive, arrived)
        except RuntimeError:  # the loop is closed
            if isinstance(arrived, Delivery):
                unreserve(arrived.take())

    def _arrive(self, outcome: Delivery | Exception) -> None:
        """In the loop."""
        if not self.future.done():
            if isinstance(outcome, Exception):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)
        elif isinstance(outcome, Delivery):  # it was cancelled
            unreserve(outcome.take())

    def give_back(self) -> None:
        """What has arrived, and the task was cancelled before it could look."""
        if self.future.done() and not self.future.cancelled() and self.future.exception() is None:
            unreserve(self.future.result().take())


class Delivery:
    """A job on its way to a task. If nobody takes it, it goes back."""

    __slots__ = ("_job",)

    def __init__(self, job: Job) -> None:
        self._job: Job | None = job

    def take(self) -> Job:
        job, self._job = self._job, None
        assert job is not None
        return job

    def __del__(self) -> None:
        if self._job is not None:
            leave(self._job)


class Reservation(Future[Job]):
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
