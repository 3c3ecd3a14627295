"""``Exchange``: gives items to consumers, and room to producers. The rules are in ``kestrelpy.memory``.

NOTE ON LOCKING: ``Exchange._lock`` guards both lines and all items. The notes of the subclasses on it hold here, too.
"""

from __future__ import annotations

import functools
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat
from operator import itemgetter
from typing import Any, Concatenate, ParamSpec, TypeVar

from kestrelpy._waiting.deferred import leave
from kestrelpy._waiting.line import Line, Waiting, fail_all
from kestrelpy._waiting.waiters import TaskWaiter, ThreadWaiter, Waiter
from kestrelpy.clock import Clock, SystemClock
from kestrelpy.errors import QueueClosed, QueueEmpty

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
S = TypeVar("S", bound="Exchange[Any]")

_NOTHING: Any = object()


def settles(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method that takes the lock call ``_match`` after releasing it (rule 4), even if an interrupt strikes in
    the method or at the start of ``_match``.
    """

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **options: P.kwargs) -> R:
        try:
            try:
                return method(self, *args, **options)
            finally:
                self._match()
        except BaseException:
            self._match()
            raise

    return call


class Exchange(Waiting[T]):
    """The items of a blocking queue, the line of its consumers and the line of its producers."""

    def __init__(self, maxsize: int, clock: Clock | None) -> None:
        self._clock = SystemClock() if clock is None else clock
        self._lock = threading.RLock()
        self._maxsize = maxsize  # guarded by self._lock
        self._closed = False  # guarded by self._lock
        self._discards = False  # guarded by self._lock: nothing comes back, after shutdown(immediate=True)
        self._items: deque[T] = deque()  # guarded by self._lock (here; see ConcurrentBlockingQueue)
        # Items that came back from a cancelled task, ahead of all others, by the order in which they were handed out.
        self._returned: deque[tuple[int, T]] = deque()  # guarded by self._lock
        self._last_order = 0  # guarded by self._lock: order of the item handed out last
        self._first_order = 0  # guarded by self._lock: of the last item put ahead of returned ones; counts down
        self._line = Line()  # guarded by self._lock: consumers
        self._producers = Line()  # guarded by self._lock
        self._reserved = 0  # guarded by self._lock: room reserved for tasks in aput that have not put their items yet
        self._settling = False  # guarded by self._lock
        self._admitting = False  # guarded by self._lock: a producer's item is in, and it has not left the line yet
        # Endless iterators; each step is a call (rule 2).
        self._attempts = map(self._lock.acquire, repeat(False))  # to get the lock without waiting for it
        self._heads: Iterator[Any] = map(deque.popleft, repeat(self._items))  # guarded by self._lock
        self._returned_heads: Iterator[Any] = map(deque.popleft, repeat(self._returned))  # guarded by self._lock

    def _has_items(self) -> bool:
        return bool(self._items or self._returned)

    def _has_room(self) -> bool:
        return self._maxsize <= 0 or self.qsize() + self._reserved < self._maxsize

    def qsize(self) -> int:
        """How many items are queued at this moment; an item that was handed to a consumer is not counted."""
        return len(self._items) + len(self._returned)

    def _check_open_locked(self) -> None:
        if self._closed:
            raise QueueClosed("the queue is shut down")

    def _nothing(self) -> QueueEmpty | QueueClosed:
        return QueueClosed("the queue is shut down") if self._closed else QueueEmpty("the queue is empty")

    # -- the line of consumers ---------------------------------------------------------------------------------------

    def _enter(self, waiter: Waiter) -> None:
        try:
            with self._lock:
                if self._closed and not self._has_items():
                    raise self._nothing()
                self._line.add(waiter)
        finally:
            self._match()
        if self._closed:
            self._fail_consumers()

    def _leave(self, waiter: Waiter) -> bool:
        try:
            with self._lock:
                return self._line.remove(waiter)
        finally:
            self._match()

    def _forsake(self, waiter: TaskWaiter) -> None:
        self._end_of(self, waiter)

    def _end_of(self, line: Waiting[Any], waiter: TaskWaiter) -> None:
        """A finaliser ends a waiter of one of this queue's lines. It leaves at once if the lock, which is reentrant,
        can be taken. If another thread has the lock, a deferred call does it: that thread may be waiting for a lock of
        this one.
        """
        waiter.forsake()
        if self._is_free():
            line._quit(waiter)
        else:
            leave(functools.partial(line._quit, waiter))

    def _is_free(self) -> bool:
        held = False
        try:
            for held in self._attempts:  # noqa: B007 - rule 2
                break
        finally:
            if held:
                self._lock.release()
        return held

    @settles
    def _give_back(self, waiter: Waiter, item: T) -> None:
        with self._lock:
            if not self._discards:
                insort(self._returned, (waiter.order, item), key=itemgetter(0))
                self._changed_locked()

    # -- room for producers ------------------------------------------------------------------------------------------

    @settles
    def _reserve(self) -> None:
        """Reserve room for a task's item; raises ``QueueEmpty`` if there is none, or if others came before."""
        with self._lock:
            self._check_open_locked()
            if self._producers or not self._has_room():
                raise QueueEmpty("no room")
            self._reserved += 1

    @settles
    def _fill(self, item: T) -> None:
        """Put ``item`` into the room that was reserved for it."""
        with self._lock:
            self._reserved -= 1
            self._check_open_locked()
            self._items.append(item)

    @settles
    def _unreserve(self) -> None:
        with self._lock:
            self._reserved -= 1

    # -- settling: serving whoever can be served ---------------------------------------------------------------------

    def _match(self) -> None:
        """Give items to consumers in line and room to producers in line, until one or the other runs out.

        Never waits for the lock: a thread that has it calls this again after releasing it.
        """
        consumers, producers = self._line.waiters, self._producers.waiters
        waiter: Waiter | None = None
        entry: Any = _NOTHING
        try:
            while True:  # and no condition: docs/interrupts.md, rule 3
                if not (consumers and (self._items or self._returned)) and not (
                    producers and (self._has_room() or self._admitting)
                ):
                    break
                held = serving = False
                waiter, entry = None, _NOTHING
                try:
                    for held in self._attempts:  # noqa: B007 - rule 2
                        break
                    if not held or self._settling:  # the latter: in a finaliser that interrupts this
                        return
                    self._settling = serving = True
                    if self._returned or not (consumers and self._items):
                        waiter, entry = self._serve_others_locked()
                        self._changed_locked()
                    else:
                        for entry in self._heads:  # noqa: B007 - rule 2
                            break
                        for head in consumers:  # noqa: B007
                            break
                        if head.may_refuse:
                            waiter = self._line.first()
                        else:  # the same in fewer calls: a thread's wake-up takes this long
                            del consumers[head]
                            waiter = head
                        if waiter is not None:
                            self._last_order = waiter.order = self._last_order + 1
                except IndexError:  # a get that was under way took the item
                    continue
                finally:
                    if serving:
                        self._settling = False
                    try:
                        if waiter is None and entry is not _NOTHING:  # nobody wants it any more, or an interrupt struck
                            self._items.appendleft(entry)
                    finally:
                        if held:
                            self._lock.release()
                if waiter is not None:
                    waiter.give(entry)
        except BaseException:  # an interrupt, or a callback's: others may rely on this thread to continue
            if waiter is not None:
                waiter.give(entry)  # a second time, that does nothing
            self._match()
            raise

    def _serve_others_locked(self) -> tuple[Waiter | None, Any]:
        """The less common cases: a consumer gets a returned item, or a producer gets room."""
        if self._line.waiters and self._returned:
            return self._serve_returned_locked()
        waiter = self._producers.head()
        is_thread = isinstance(waiter, Supplier)
        is_in = isinstance(waiter, Supplier) and not waiter.parcel  # an interrupt struck after its item was put in
        if waiter is None or not (self._has_room() or is_in):
            self._admitting = False
            return None, _NOTHING
        wanted = waiter.claim()
        if isinstance(waiter, Supplier) and not is_in:
            self._admitting = True
            self._items.extend(map(deque.popleft, (waiter.parcel,)))  # before it leaves: one that has left was served
        left = self._producers.remove(waiter)
        self._admitting = False
        if not left or not wanted:
            return None, _NOTHING
        if not is_thread:
            self._reserved += 1
        return waiter, None  # no call since it left: no interrupt can strike

    def _serve_returned_locked(self) -> tuple[Waiter | None, Any]:
        waiter, entry = None, _NOTHING
        try:
            for entry in self._returned_heads:  # noqa: B007 - rule 2
                break
            waiter = self._line.first()
        finally:
            if waiter is None and entry is not _NOTHING:
                self._returned.appendleft(entry)
        if waiter is None:
            return None, _NOTHING
        waiter.order, item = entry
        return waiter, item

    def _fail_consumers(self) -> None:
        """The queue is closed: serve consumers in line while there are items, and fail the others."""
        while self._line.waiters:
            self._match()
            gone: list[Waiter] = []
            try:
                with self._lock:
                    if self._settling or not self._has_items():
                        gone += self._line.drain()
                fail_all(gone, self._nothing)
            except BaseException:
                fail_all(gone, self._nothing)
                raise

    def _changed_locked(self) -> None:
        """Called when it changes whether there are returned items, a limit or a shutdown. For the subclass."""

    def _check(self) -> None:
        """Raise ``AssertionError`` if an invariant does not hold. For tests, while no other thread uses the queue."""
        orders = [order for order, _ in self._returned]
        assert not self._settling
        assert not self._admitting
        assert not (self._line and self._has_items())
        assert not (self._producers and self._has_room())
        assert not (self._closed and (self._line or self._producers))
        assert not (self._producers and self._maxsize <= 0)
        assert orders == sorted(set(orders))
        assert not orders or self._first_order <= orders[0]
        assert not orders or orders[-1] <= self._last_order
        assert self._reserved >= 0


class Supplier(ThreadWaiter):
    """A thread that waits for room, with its item. The thread that makes room puts the item in for it."""

    def __init__(self, room: SupplierLine, item: Any) -> None:
        super().__init__(room)
        self.parcel = deque((item,))  # empty once the item is in the queue


class SupplierLine(Waiting[None]):
    """The producers' side of a bounded queue: producers wait for room.

    The item of a thread is put in for it (``Supplier``). A task only gets room reserved, and puts its item when its
    loop runs it: so a task that is cancelled meanwhile has put nothing.
    """

    def __init__(self, queue: Exchange[Any]) -> None:
        self._queue = queue
        self._clock = queue._clock
        self._line = queue._producers

    def _take_now(self) -> None:
        self._queue._reserve()

    def _enter(self, waiter: Waiter) -> None:
        queue = self._queue
        try:
            with queue._lock:
                queue._check_open_locked()
                self._line.add(waiter)
        finally:
            queue._match()

    def _leave(self, waiter: Waiter) -> bool:
        queue = self._queue
        try:
            with queue._lock:
                return self._line.remove(waiter)
        finally:
            queue._match()

    def _forsake(self, waiter: TaskWaiter) -> None:
        self._queue._end_of(self, waiter)

    def _give_back(self, waiter: Waiter, item: None) -> None:  # noqa: ARG002 - a place is all there is to give back
        if not isinstance(waiter, Supplier):  # else this was an interrupted put whose item is in already
            self._queue._unreserve()
