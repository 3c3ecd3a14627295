"""The kinds of waiters for a job: a blocked thread, a future, or a task of asyncio.

The job is reserved for the waiter before the waiter is notified: so there is no moment at which the job is lost. A
waiter may be notified again; the second time does nothing.

A task may disappear without notice: its loop is closed while it waits, or the task is dropped. Then the job that was
meant for it goes back. The garbage collector may find this out in the middle of any code. So this takes no lock, and
leaves a note for the next call (``WorkCore.leave_note``).
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
    """A blocked thread."""

    __slots__ = ("_bell", "outcome")

    def __init__(self, holder: SessionState, number: int) -> None:
        super().__init__(holder, number)
        self.outcome: Job | Exception | None = None
        self._bell = threading.Lock()
        self._bell.acquire()

    def notify(self, outcome: Any) -> None:
        self.outcome = outcome
        with contextlib.suppress(RuntimeError):  # it was notified already
            self._bell.release()

    def wait(self, seconds: float | None) -> None:
        """Wait until it is notified, or ``seconds`` of real time have passed."""
        if seconds is None:
            self._bell.acquire()
        else:
            self._bell.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))


class Promised(JobWaiter):
    """A caller with a future."""

    __slots__ = ("_is_notified", "future")

    def __init__(self, holder: SessionState, number: int) -> None:
        super().__init__(holder, number)
        self.future = Reservation(self)
        self._is_notified = False

    def notify(self, outcome: Any) -> None:
        if self._is_notified:
            return
        self._is_notified = True
        self.future._waiter = None  # leave no reference cycle to the collector
        if not self.future.set_running_or_notify_cancel():
            if not isinstance(outcome, Exception):
                unreserve(outcome)
        elif isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class Awaiting(JobWaiter):
    """A task of asyncio. Made in the task's loop."""

    __slots__ = ("_is_notified", "_loop", "future")

    def __init__(self, holder: SessionState, number: int) -> None:
        from asyncio import get_running_loop  # imported here: callers who do not use asyncio must not pay for it

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
        """Complete the future, in the loop's thread."""
        if not self.future.done():
            if isinstance(outcome, Exception):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)
        elif isinstance(outcome, Delivery):  # the task was cancelled
            unreserve(outcome.take())

    def give_back(self) -> None:
        """Give back a job that arrived, if the task was cancelled before it could take it."""
        if self.future.done() and not self.future.cancelled() and self.future.exception() is None:
            unreserve(self.future.result().take())


class Delivery:
    """A job on its way to a task. If the task never takes the job, the job goes back."""

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
    """The future of ``reserve_future``. ``cancel()`` leaves the line; a job that was on its way is ready again."""

    def __init__(self, waiter: Promised) -> None:
        super().__init__()
        self._waiter: Promised | None = waiter

    def cancel(self) -> bool:
        waiter, self._waiter = self._waiter, None
        cancelled = super().cancel()
        if cancelled and waiter is not None:
            waiter.holder.abandon(waiter)
        return cancelled
