"""The waiting line: consumers in order of arrival, like taxis at a rank. No other code of the library waits for items.

Rules:
1. Register, then look again: a consumer first enters the line, and then looks for an item (``Waiting._enter``).
2. Claim by removal: waiters leave the line under its owner's lock. The thread that removed a waiter must complete it,
   and no other thread may. A thread with the owner's lock does not wait for the lock of a future (``claim_now``) where
   a handler of signals may wait for the owner's lock: in the memory queues.
3. Waiters are completed with no lock held, because completing a future runs its callbacks.
4. An item that a waiter was given and can't use goes back to its old position (``Waiting._give_back``).
5. A waiter may end in a finaliser: a task that is thrown away, a future that is cancelled there. A finaliser waits for
   no lock, because its own thread may hold it: ``_leave_now`` does what it can, and the rest is left to another thread.

NOTE ON LOCKING: a ``Line`` has no lock of its own. Its owner's lock guards every method except ``len``, truth and
``waiter in line.waiters``, which are single atomic reads and may be used as a hint without the lock.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from kestrelpy._checks import check_timeout
from kestrelpy._waiting.deferred import leave
from kestrelpy._waiting.waiters import FutureWaiter, Sleeper, TaskWaiter, ThreadWaiter, Waiter
from kestrelpy.errors import KestrelError, QueueEmpty

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from kestrelpy._waiting.queue_future import QueueFuture
    from kestrelpy.clock import Clock

T = TypeVar("T")


class Line:
    """Waiters in order of arrival. An interrupt leaves each in the line, or with the thread that removed it."""

    __slots__ = ("waiters",)

    def __init__(self) -> None:
        self.waiters: OrderedDict[Waiter, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.waiters)

    def add(self, waiter: Waiter) -> None:
        self.waiters[waiter] = None

    def remove(self, waiter: Waiter) -> bool:
        """Take ``waiter`` out; false if another thread has claimed it already."""
        try:
            del self.waiters[waiter]  # a statement and not a call: no interrupt falls between it and the return
        except KeyError:
            return False
        return True

    def head(self) -> Waiter | None:
        """The waiter that came first; it stays in line."""
        return _first_of(self.waiters)

    def wanting(self) -> Waiter | None:
        """The first waiter that still wants an item; it stays in line. The waiters before it leave."""
        while True:
            waiter = _first_of(self.waiters)
            if waiter is None or not waiter.may_refuse or waiter.claim():
                return waiter
            self.remove(waiter)

    def first(self) -> Waiter | None:
        """Take out the first waiter that still wants an item. Raises ``FutureLocked``."""
        while (waiter := _first_of(self.waiters)) is not None:
            wanted = not waiter.may_refuse or waiter.claim_now()
            if wanted is None:
                raise FutureLocked(waiter)
            try:
                del self.waiters[waiter]
            except KeyError:  # it left while it was asked: a finaliser may run at any time
                continue
            if wanted:
                return waiter
        return None

    def drain(self) -> list[Waiter]:
        """Take out all waiters that still want an item, or may still want one: to complete them finds out."""
        gone: list[Waiter] = []
        try:
            while True:  # and no condition: docs/interrupts.md, rule 3
                waiter = _first_of(self.waiters)
                if waiter is None:
                    break
                wanted = not waiter.may_refuse or waiter.claim_now() is not False
                gone.append(waiter)  # before the waiter leaves: the append may fail
                if not self.remove(waiter) or not wanted:
                    gone.pop()  # it left while it was asked, or wants nothing
        except BaseException:
            for waiter in reversed(gone):
                self.waiters[waiter] = None
                self.waiters.move_to_end(waiter, last=False)
            raise
        return gone


class FutureLocked(Exception):
    """Another thread has the lock of this waiter's future. To be waited for when the line owner's lock is released."""

    def __init__(self, waiter: Waiter) -> None:
        self.waiter = waiter


def _first_of(waiters: OrderedDict[Waiter, None]) -> Waiter | None:
    """The waiter that came first. A signal handler that puts or gets may change the line between the two calls here."""
    while True:
        try:
            return next(iter(waiters), None)
        except RuntimeError:
            continue


def fail_all(waiters: list[Waiter], make_error: Callable[[], BaseException]) -> None:
    """Complete each of ``waiters``, which have left their line, with its own error. Empties the list."""
    waiters.reverse()
    _fail_from_the_end(waiters, make_error)


def _fail_from_the_end(waiters: list[Waiter], make_error: Callable[[], BaseException]) -> None:
    try:
        while True:  # as in drain()
            if not waiters:
                break
            waiters[-1].fail(make_error())
            del waiters[-1]
    except BaseException:  # an interrupt: the others must not wait for ever
        _fail_from_the_end(waiters, make_error)
        raise


class Waiting(Generic[T]):
    """What a queue and a reader share: one line, and three ways to wait for an item (thread, future, task).

    The subclass has the items, the lock, ``self._line`` and ``self._clock``. It provides ``_take_now`` (an item without
    waiting, or ``QueueEmpty``, or ``QueueClosed``), ``_enter``, ``_leave`` and ``_give_back``; and ``_leave_now``
    or ``_forsake`` where there is a lock.
    """

    _clock: Clock
    _line: Line

    @abstractmethod
    def _take_now(self) -> T:
        """Return an item at once, unless earlier consumers must be served first; else raise ``QueueEmpty``."""

    def _peek_now(self) -> T:
        """As ``_take_now``, and the item stays. For a subclass that has waiters that peek."""
        raise NotImplementedError

    @abstractmethod
    def _enter(self, waiter: Waiter) -> None:
        """Put ``waiter`` at the end of the line, then look again; raises ``QueueClosed``."""

    @abstractmethod
    def _leave(self, waiter: Waiter) -> bool:
        """Take ``waiter`` out of the line; false if another thread has claimed it, and is completing it."""

    def _leave_now(self, waiter: Waiter) -> bool | None:
        """As ``_leave``, without waiting for the lock, if there is one: ``None`` if the lock is held, perhaps by this
        very thread.
        """
        return self._leave(waiter)

    @abstractmethod
    def _give_back(self, waiter: Waiter, item: T) -> None:
        """Put an item that ``waiter`` was given back to its old position."""

    def _missed(self, waiter: Waiter) -> None:
        """``waiter`` waited in vain. For counters and hooks; called with no lock held."""

    def _nothing_within(self, timeout: float | None) -> QueueEmpty:
        return QueueEmpty(f"no item within {timeout} s")

    def _wait(self, timeout: float | None, *, peeks: bool = False, waiter: ThreadWaiter | None = None) -> T:
        """Wait in line on this thread. Raises ``QueueEmpty`` after ``timeout`` seconds of real time."""
        if waiter is None:
            waiter = ThreadWaiter(self)
        waiter.peeks = peeks
        waiter.entered = self._clock.monotonic()
        try:
            self._enter(waiter)
            if not waiter.wait(timeout):
                if self._leave(waiter):
                    self._missed(waiter)
                    raise self._nothing_within(timeout)
                waiter.wait(None)
            item: T = waiter.result()
        except BaseException:  # also an interrupt: an item on its way here must not be lost
            self._quit(waiter)
            raise
        return item

    def get_future(self, timeout: float | None = None) -> Future[T]:
        """A future of the next item; never blocks.

        It fails with ``QueueEmpty`` when ``timeout`` seconds have passed on the queue's clock. ``cancel()`` leaves the
        line and loses no item. Raises ``ValueError`` for a negative timeout, and ``RuntimeError`` if a timeout needs
        the maintenance thread and that thread can't be started. Thread-safe.
        """
        return self._future_of(FutureWaiter(), timeout)

    def _future_of(self, waiter: FutureWaiter, timeout: float | None) -> Future[T]:
        check_timeout(timeout)
        waiter.entered = self._clock.monotonic()
        future: Future[T] = waiter.future
        taken: list[T] = []
        try:
            self._fulfil(waiter, timeout, taken)
        except BaseException:  # nobody has this future: an item that it got, or is about to get, goes back
            waiter.stop_timer()
            if taken and not future.done():
                future.set_result(taken[0])
            if taken or not self._leave(waiter):
                future.add_done_callback(lambda done: self._give_back(waiter, done.result()))
            raise
        return future

    def _fulfil(self, waiter: FutureWaiter, timeout: float | None, taken: list[T]) -> None:
        """Complete a new future, or put it in line. ``taken`` gets the item that was taken for it."""
        future = waiter.future
        try:
            taken += [self._peek_now() if waiter.peeks else self._take_now()]
        except QueueEmpty as error:
            if timeout == 0:
                future.set_exception(error)
                return
        else:
            future.set_result(taken[0])
            return
        reference = weakref.ref(waiter)  # the line holds it; if the future did too, that would be a cycle
        future.add_done_callback(lambda done: self._cancelled(done, reference()) if done.cancelled() else None)
        self._enter_until(waiter, timeout)

    async def aget(self, timeout: float | None = None) -> T:
        """The next item, for asyncio, from any event loop.

        Raises ``QueueEmpty`` when ``timeout`` seconds have passed on the queue's clock. A task that is cancelled while
        it waits loses no item: an item on its way to the task goes back to its old position. Raises ``RuntimeError`` as
        ``get_future``.
        """
        import asyncio  # here and not above: programs without asyncio must not pay for it

        check_timeout(timeout)
        entered = self._clock.monotonic()
        try:
            return self._take_now()
        except QueueEmpty:
            if timeout == 0:
                raise
        waiter = TaskWaiter(asyncio.get_running_loop(), self)
        waiter.entered = entered
        try:
            self._enter_until(waiter, timeout)
            await waiter.future
            item: T = waiter.result()
        except GeneratorExit:  # thrown away, perhaps by the garbage collector
            self._forsake(waiter)
            raise
        except BaseException:  # cancelled: an item on its way here must not be lost
            self._quit(waiter)
            raise
        return item

    def _enter_until(self, waiter: Waiter, timeout: float | None) -> None:
        self._enter(waiter)
        if timeout is None or waiter not in self._line.waiters:
            return
        try:
            waiter.timer = self._clock.call_later(
                timeout,
                lambda: self._give_up(waiter, self._nothing_within(timeout)),
                on_lost=lambda cause: self._give_up(waiter, KestrelError(f"the maintenance thread died: {cause!r}")),
            )
        except BaseException:
            if self._leave(waiter):
                raise
        if waiter not in self._line.waiters:  # completed meanwhile, perhaps by a thread that did not see the timer
            waiter.stop_timer()

    def _give_up(self, waiter: Waiter, error: BaseException) -> None:
        if self._leave(waiter) and waiter.claim():
            try:
                self._missed(waiter)
            finally:
                waiter.fail(error)

    def _quit(self, waiter: Sleeper) -> None:
        waiter.stop_timer()
        if not self._leave(waiter):
            waiter.abandon()

    def _forsake(self, waiter: TaskWaiter) -> None:
        """``_quit`` in a finaliser (rule 5)."""
        waiter.forsake()
        waiter.stop_timer()
        left = self._leave_now(waiter)
        if left is None or waiter.is_given:
            leave(partial(self._quit, waiter))

    def _cancelled(self, future: Future[T], waiter: FutureWaiter | None) -> None:
        """The waiter's future was cancelled, perhaps in a finaliser (rule 5). ``None`` if the waiter has left the line,
        and is gone.
        """
        if waiter is not None:
            waiter.stop_timer()
            if self._leave_now(waiter) is None:
                leave(partial(self._leave, waiter))
        cast("QueueFuture[T]", future).claim()  # this wakes threads that wait with concurrent.futures.wait


def taken_now(acquire: Callable[[bool], bool]) -> Iterator[bool]:
    """Take a lock if it is free, in one step: ``for held in taken_now(lock.acquire): break``. The step runs no Python
    function: an interrupt strikes before the lock is taken, or after ``held`` is set.
    """
    return map(acquire, (False,))
