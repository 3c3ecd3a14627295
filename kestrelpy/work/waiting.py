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
from itertools import repeat
from typing import TYPE_CHECKING, Any

from kestrelpy._process import hand_out_future
from kestrelpy.work.job import Job, leave, unreserve
from kestrelpy.work.stored import JobWaiter, SessionState

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_PENDING, _RUNNING, _FINISHED = "PENDING", "RUNNING", "FINISHED"


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

    __slots__ = ("_is_giving_back", "future")

    def __init__(self, holder: SessionState, number: int) -> None:
        super().__init__(holder, number)
        hand_out_future()
        self.future = Reservation(self)
        self._is_giving_back = False

    def notify(self, outcome: Any) -> None:
        future = self.future
        future._waiter = None  # leave no reference cycle to the collector
        if not future.complete(outcome) and not self._is_giving_back:
            self._is_giving_back = True  # what is called next notifies those who wait, this one among them
            try:
                if not isinstance(outcome, Exception):
                    unreserve(outcome)
                future.tell_cancelled()
            finally:
                self._is_giving_back = False


class Awaiting(JobWaiter):
    """A task of asyncio. Made in the task's loop."""

    __slots__ = ("_delivery", "_loop", "future")

    def __init__(self, holder: SessionState, number: int) -> None:
        from asyncio import get_running_loop  # imported here: callers who do not use asyncio must not pay for it

        super().__init__(holder, number)
        self._loop = get_running_loop()
        self._delivery = Delivery()
        self.future: asyncio.Future[Delivery] = self._loop.create_future()

    def notify(self, outcome: Any) -> None:
        arrived = outcome
        if not isinstance(outcome, Exception):
            arrived = self._delivery
            arrived.send(outcome)
        try:
            self._loop.call_soon_threadsafe(self._arrive, arrived)
        except RuntimeError:  # the loop is closed
            self._delivery.give_back()

    def _arrive(self, outcome: Delivery | Exception) -> None:
        """Complete the future, in the loop's thread."""
        if not self.future.done():
            if isinstance(outcome, Exception):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)
        elif self.future.cancelled():
            self.give_back()

    def give_back(self) -> None:
        """Give back a job that arrived, if the task was cancelled before it could take it."""
        self._delivery.give_back()


class Delivery:
    """A job on its way to a task, once one was sent. If the task never takes the job, the job goes back.

    Each step is one operation on a dictionary or a list: so each may be repeated, by another thread or after an
    interrupt.
    """

    __slots__ = ("_is_giving_back", "_right", "_sent")

    def __init__(self) -> None:
        self._right = [None]  # whoever pops it has the job
        self._is_giving_back = False
        self._sent: dict[int, Job] = {}

    def send(self, job: Job) -> None:
        """This is the job. May be repeated."""
        self._sent.setdefault(0, job)

    def take(self) -> Job:
        """The job; called once, by the task."""
        self._right.pop()
        return self._sent[0]

    def give_back(self) -> None:
        """The job is not taken any more: it is ready again. No effect if it was taken, or none was sent."""
        if self._sent and self._right and not self._is_giving_back:
            self._is_giving_back = True  # what is called next notifies those who wait, this one among them
            try:
                unreserve(self._sent[0])
                self._right.clear()
            finally:
                self._is_giving_back = False

    def __del__(self) -> None:
        try:
            if self._sent and self._right:
                leave(self._sent[0])
        except AttributeError:  # an interrupt struck while it was made
            return


class Reservation(Future[Job]):
    """The future of ``reserve_future``. ``cancel()`` leaves the line; a job that was on its way is ready again.

    ``complete`` relies on the attributes of ``Future`` that ``asyncio`` and ``concurrent.futures`` share, which have
    been the same since Python 3.2.
    """

    _done_callbacks: list[Callable[[Future[Job]], object]]

    def __init__(self, waiter: Promised) -> None:
        super().__init__()
        self._waiter: Promised | None = waiter
        self._untold = [None]
        self._is_told = False

    def complete(self, outcome: Job | Exception) -> bool:
        """Complete the future, notify those who wait for it, and run its callbacks. False if it was cancelled.

        ``set_result`` can't be repeated: after an interrupt the lock could stay held, or those who wait would not be
        notified. This may be repeated; the second time does the rest (docs/interrupts.md, rule 7).
        """
        condition, held = self._condition, False
        job, error = (None, outcome) if isinstance(outcome, Exception) else (outcome, None)
        try:
            for held in map(condition.acquire, (True,)):  # noqa: B007 - one step: docs/interrupts.md, rule 4
                break
            if self._state in (_PENDING, _RUNNING):
                self._result, self._exception, self._state = job, error, _FINISHED
            if self._state != _FINISHED:
                return False
            if not self._is_told:
                self._tell()
        finally:
            if held:
                condition.release()
        self._call_back()
        return True

    def _tell(self) -> None:
        for waiter in self._waiters:
            waiter.add_result(self) if self._exception is None else waiter.add_exception(self)
        self._condition.notify_all()
        self._is_told = True

    def _call_back(self) -> None:
        """Run the callbacks, each once: a callback leaves the list before it runs, in one step with that."""
        with contextlib.suppress(IndexError):  # there is no other callback
            for callback in map(list.pop, repeat(self._done_callbacks), repeat(0)):
                try:
                    callback(self)
                except Exception:  # as Future does
                    from logging import getLogger  # imported here: mostly there is nothing to log

                    getLogger("concurrent.futures").exception("exception calling callback for %r", self)

    def tell_cancelled(self) -> None:
        """Tell threads in ``concurrent.futures.wait`` that it was cancelled. May be repeated."""
        with contextlib.suppress(IndexError):
            self._untold.pop()
            self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        waiter, self._waiter = self._waiter, None
        cancelled = super().cancel()
        if cancelled and waiter is not None:
            waiter.holder.abandon(waiter)
        return cancelled
