"""The plain blocking queue: everything under one lock. The rules are in ``kestrelpy.memory``."""

from __future__ import annotations

import functools
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import repeat
from operator import itemgetter
from typing import Any, Concatenate, ParamSpec, TypeVar

from kestrelpy._checks import check_timeout, check_whole
from kestrelpy._waiting.deferred import leave
from kestrelpy._waiting.line import FutureLocked, Line, Waiting, fail_all
from kestrelpy._waiting.waiters import TaskWaiter, ThreadWaiter, Waiter
from kestrelpy.clock import Clock, SystemClock
from kestrelpy.config import FullPolicy, full_policy_of
from kestrelpy.errors import QueueClosed, QueueEmpty, QueueFull

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
S = TypeVar("S", bound="SimpleBlockingQueue[Any]")

_NOTHING: Any = object()


def then_match(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
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


class SimpleBlockingQueue(Waiting[T]):
    """A blocking queue with everything under one lock: the plain reference for ``ConcurrentBlockingQueue``.

    First in, first out, for any number of threads and asyncio loops. The items are any objects, ``None`` included.
    ``maxsize`` is a hard limit on the number of queued items, and 0 or less means none; ``full_policy`` says what a
    put does at the limit. Only ``put_head``, and an item that a cancelled ``aget`` gives back, go past it. ``clock`` is
    for the deadlines of ``get_future``, ``aget`` and ``aput``. Raises ``TypeError`` if ``maxsize`` is not a whole
    number, or ``full_policy`` not a ``FullPolicy``.

    Every call is thread-safe. Calls that do not wait may also be made in a finaliser or a signal handler, even one that
    interrupts another call on the same queue (a put may then pass the limit by one).

    NOTE ON LOCKING: ``_lock`` guards everything. It is reentrant because of finalisers. It is held for a few operations
    on memory at a time and while the predicate of ``get_if`` runs, never while a thread waits.
    """

    def __init__(
        self, maxsize: int = 0, *, full_policy: FullPolicy | str = FullPolicy.BLOCK, clock: Clock | None = None
    ) -> None:
        self._full_policy = full_policy_of(full_policy)
        self._clock = SystemClock() if clock is None else clock
        self._lock = threading.RLock()
        self._maxsize = check_whole("maxsize", maxsize, None)  # guarded by self._lock
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
        self._matching = False  # guarded by self._lock
        self._admitting = False  # guarded by self._lock: a producer's item is in, and it has not left the line yet
        # Endless iterators; each step is a call (rule 2).
        self._attempts = map(self._lock.acquire, repeat(False))  # to get the lock without waiting for it
        self._heads: Iterator[Any] = map(deque.popleft, repeat(self._items))  # guarded by self._lock
        self._returned_heads: Iterator[Any] = map(deque.popleft, repeat(self._returned))  # guarded by self._lock
        self._dropped = 0  # guarded by self._lock

    # -- putting -----------------------------------------------------------------------------------------------------

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        """Add ``item`` at the tail; if consumers wait, it is handed straight to the first in line.

        At the limit, the queue's policy decides. ``BLOCK`` (back-pressure) waits for room in line with other producers,
        for up to ``timeout`` seconds (``None``: for ever; not at all without ``block``), then raises ``QueueFull``.
        ``REFUSE`` raises it at once. ``DROP_OLDEST`` drops the head. Raises ``QueueClosed`` after ``shutdown``, also if
        the shutdown comes while the put waits, and ``ValueError`` for a negative timeout. If one of these is raised,
        nothing was stored.
        """
        if block and timeout is not None:
            check_timeout(timeout)
        try:
            self._put_now(item)
        except QueueFull:
            if not block or timeout == 0 or self._full_policy is not FullPolicy.BLOCK:
                raise
        else:
            return
        room = SupplierLine(self)
        producer = Supplier(room, item)
        try:
            room._wait(timeout, waiter=producer)
        except QueueEmpty:
            if producer.parcel:
                raise QueueFull(f"no room within {timeout} s") from None

    def put_nowait(self, item: T) -> None:
        """The same as ``put(item, block=False)``."""
        self.put(item, False)

    async def aput(self, item: T, timeout: float | None = None) -> None:
        """The same as ``put`` for asyncio, from any event loop; the queue's clock measures ``timeout``.

        A task that is cancelled in it has put nothing, and its turn goes to the next producer.
        """
        check_timeout(timeout)
        try:
            self.put_nowait(item)
        except QueueFull:
            if timeout == 0 or self._full_policy is not FullPolicy.BLOCK:
                raise
        else:
            return
        try:
            await SupplierLine(self).aget(timeout)
        except QueueEmpty:
            raise QueueFull(f"no room within {timeout} s") from None
        self._fill(item)

    @then_match
    def put_head(self, item: T) -> None:
        """Add ``item`` at the head, past any limit: the last one put there comes out first.

        Raises ``QueueClosed`` after ``shutdown``.
        """
        with self._lock:
            self._check_open_locked()
            if self._returned:
                self._first_order -= 1
                self._returned.appendleft((self._first_order, item))
            else:
                self._items.appendleft(item)

    def _put_now(self, item: T) -> None:
        """Put without waiting; raises ``QueueFull`` at the limit."""
        gone: deque[T] = deque()
        try:
            while True:
                try:
                    with self._lock:
                        self._check_open_locked()
                        if self._full_policy is FullPolicy.DROP_OLDEST:
                            self._make_room_locked(gone)
                        room = self._has_room()
                        if room and not self._producers:
                            self._items.append(item)
                            return
                        if not room or self._matching:
                            raise QueueFull(f"the queue holds {self._maxsize} items, its maxsize")
                finally:
                    self._match()  # if there is room, and producers are in line, they come first
        except BaseException:  # as in then_match()
            self._match()
            raise

    def _make_room_locked(self, gone: deque[T]) -> None:
        while not self._has_room():
            try:
                gone.append(self._take_locked())
            except QueueEmpty:  # a signal handler, on this thread, has taken it
                continue
            self._dropped += 1

    # -- taking ------------------------------------------------------------------------------------------------------

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """Take the head, or wait for it in line with other consumers: first come, first served.

        Waits up to ``timeout`` seconds of real time (``None``: for ever; not at all without ``block``), then raises
        ``QueueEmpty``. Raises ``QueueClosed`` if the queue is shut down and empty, and ``ValueError`` for a negative
        timeout.
        """
        if block and timeout is not None:
            check_timeout(timeout)
        try:
            return self._take_now()
        except QueueEmpty:
            if not block or timeout == 0:
                raise
        return self._wait(timeout)

    def get_nowait(self) -> T:
        """The same as ``get(block=False)``."""
        return self.get(False)

    @then_match
    def get_if(self, predicate: Callable[[T], object]) -> T:
        """Take the head if ``predicate`` is true of it, else raise ``QueueEmpty``. Looks at the head only; never waits.

        The predicate runs while the lock is held, so it should be quick. If it raises, the call raises that, and the
        item stays.
        """
        while True:
            with self._lock:
                if not self._line:
                    return self._take_if_locked(predicate)
                if not self._has_items() or self._matching:
                    raise self._nothing()
            self._match()

    @then_match
    def peek(self) -> T:
        """The head, which stays; raises ``QueueEmpty`` if there is none (``QueueClosed`` after ``shutdown``)."""
        with self._lock:
            return self._head()

    def _take_now(self) -> T:
        try:
            while True:
                try:
                    with self._lock:
                        if not self._line:
                            return self._take_locked()
                        if not self._has_items() or self._matching:
                            raise self._nothing()
                finally:
                    self._match()  # if there are items, and consumers in line, they come first
        except BaseException:  # as in then_match()
            self._match()
            raise

    def _take_locked(self) -> T:
        if self._returned:
            _, item = self._returned.popleft()
            self._changed_locked()
            return item
        try:
            return self._items.popleft()
        except IndexError:
            raise self._nothing() from None

    def _take_if_locked(self, predicate: Callable[[T], object]) -> T:
        while True:
            head = self._head()
            if not predicate(head):
                raise QueueEmpty("the head does not satisfy the predicate")
            item = self._take_locked()
            if item is head:
                return item
            self._items.appendleft(item)  # the predicate, or a get that was under way already, took the head

    def _head(self) -> T:
        try:
            return self._returned[0][1] if self._returned else self._items[0]
        except IndexError:
            raise self._nothing() from None

    @then_match
    def evict_waiters(self) -> int:
        """Every consumer that waits now gets ``QueueEmpty``; returns how many there were. Producers stay in line."""
        gone: list[Waiter] = []
        try:
            with self._lock:
                gone += self._line.drain()
            count = len(gone)
            fail_all(gone, _evicted)
        except BaseException:
            fail_all(gone, _evicted)
            raise
        return count

    # -- the whole queue ---------------------------------------------------------------------------------------------

    @then_match
    def flush(self) -> int:
        """Drop all queued items; returns how many. Consumers in line stay; producers in line get the room. O(n)."""
        with self._lock:
            gone = self._take_all_locked()
        return len(gone)

    def _take_all_locked(self) -> deque[T]:
        gone = deque(item for _, item in self._returned)
        self._returned.clear()
        self._changed_locked()
        with suppress(IndexError):  # gets that were under way took some
            gone.extend(map(deque.popleft, repeat(self._items, len(self._items))))
        return gone

    def shutdown(self, immediate: bool = False) -> None:
        """Refuse every later put with ``QueueClosed``; once the queue is empty, every get too.

        With ``immediate`` the items are dropped. Consumers and producers that wait in vain get ``QueueClosed``.
        Idempotent.
        """
        producers: list[Waiter] = []
        try:
            with self._lock:
                self._closed = True
                self._discards = self._discards or immediate
                producers += self._producers.drain()
                dropped = self._take_all_locked() if immediate else None
                self._changed_locked()
            fail_all(producers, self._nothing)
            self._fail_consumers()
        except BaseException:
            fail_all(producers, self._nothing)
            self._fail_consumers()
            raise
        del dropped  # not earlier: no item is freed while the lock is held

    def close(self) -> None:
        """The same as ``shutdown(immediate=True)``."""
        self.shutdown(immediate=True)

    @property
    def is_shutdown(self) -> bool:
        """True from ``shutdown()`` or ``close()`` on."""
        return self._closed

    @property
    def maxsize(self) -> int:
        """The limit; 0 or less means none. It may be changed while nobody else uses the queue; queued items stay.

        Raises ``TypeError`` for anything but a whole number.
        """
        return self._maxsize

    @maxsize.setter
    @then_match
    def maxsize(self, maxsize: int) -> None:
        limit = check_whole("maxsize", maxsize, None)
        with self._lock:
            self._maxsize = limit
            self._changed_locked()

    def qsize(self) -> int:
        """How many items are queued at this moment; an item that was handed to a consumer is not counted."""
        return len(self._items) + len(self._returned)

    def __len__(self) -> int:
        """The same as ``qsize()``."""
        return self.qsize()

    def empty(self) -> bool:
        """True if nothing is queued at this moment."""
        return not self._has_items()

    def full(self) -> bool:
        """True if there is no room at this moment; never for an unbounded queue."""
        return not self._has_room()

    @property
    def waiter_count(self) -> int:
        """How many consumers wait at this moment."""
        return len(self._line)

    @property
    def dropped_count(self) -> int:
        """How many items ``DROP_OLDEST`` has dropped."""
        return self._dropped

    # -- what is there -----------------------------------------------------------------------------------------------

    def _has_items(self) -> bool:
        return bool(self._items or self._returned)

    def _has_room(self) -> bool:
        return self._maxsize <= 0 or self.qsize() + self._reserved < self._maxsize

    def _check_open_locked(self) -> None:
        if self._closed:
            raise QueueClosed("the queue is shut down")

    def _nothing(self) -> QueueEmpty | QueueClosed:
        return QueueClosed("the queue is shut down") if self._closed else QueueEmpty("the queue is empty")

    def _changed_locked(self) -> None:
        """Called when it changes whether there are returned items, a limit or a shutdown. For the subclass."""

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
        if self._can_take_lock():
            line._quit(waiter)
        else:
            leave(functools.partial(line._quit, waiter))

    def _can_take_lock(self) -> bool:
        held = False
        try:
            for held in self._attempts:  # noqa: B007 - rule 2
                break
        finally:
            if held:
                self._lock.release()
        return held

    @then_match
    def _give_back(self, waiter: Waiter, item: T) -> None:
        with self._lock:
            if not self._discards:
                insort(self._returned, (waiter.order, item), key=itemgetter(0))
                self._changed_locked()

    # -- room for producers ------------------------------------------------------------------------------------------

    @then_match
    def _reserve(self) -> None:
        """Reserve room for a task's item; raises ``QueueEmpty`` if there is none, or if others came before."""
        with self._lock:
            self._check_open_locked()
            if self._producers or not self._has_room():
                raise QueueEmpty("no room")
            self._reserved += 1

    @then_match
    def _fill(self, item: T) -> None:
        """Put ``item`` into the room that was reserved for it."""
        with self._lock:
            self._reserved -= 1
            self._check_open_locked()
            self._items.append(item)

    @then_match
    def _unreserve(self) -> None:
        with self._lock:
            self._reserved -= 1

    # -- matching: serving whoever can be served ---------------------------------------------------------------------

    def _match(self) -> None:
        """Give items to consumers in line and room to producers in line, until one or the other runs out.

        Never waits for the lock: a thread that has it calls this again after releasing it.
        """
        consumers, producers = self._line.waiters, self._producers.waiters
        waiter: Waiter | None = None
        locked: Waiter | None
        entry: Any = _NOTHING
        try:
            while True:  # and no condition: docs/interrupts.md, rule 3
                if not (consumers and (self._items or self._returned)) and not (
                    producers and (self._has_room() or self._admitting)
                ):
                    break
                held = serving = False
                waiter, entry, locked = None, _NOTHING, None
                try:
                    for held in self._attempts:  # noqa: B007 - rule 2
                        break
                    if not held or self._matching:  # the latter: in a finaliser that interrupts this
                        return
                    self._matching = serving = True
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
                except FutureLocked as error:
                    locked = error.waiter
                finally:
                    if serving:
                        self._matching = False
                    try:
                        if waiter is None and entry is not _NOTHING:  # nobody wants it any more, or an interrupt struck
                            self._items.appendleft(entry)
                    finally:
                        if held:
                            self._lock.release()
                if waiter is not None:
                    waiter.give(entry)
                elif locked is not None:
                    locked.wait_for_lock()
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
                    if self._matching or not self._has_items():
                        gone += self._line.drain()
                fail_all(gone, self._nothing)
            except BaseException:
                fail_all(gone, self._nothing)
                raise

    def __repr__(self) -> str:
        return f"<{type(self).__name__} size={self.qsize()} waiters={self.waiter_count}>"

    def _check(self) -> None:
        """Raise ``AssertionError`` if an invariant does not hold. For tests, while no other thread uses the queue."""
        orders = [order for order, _ in self._returned]
        assert not self._matching
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

    def __init__(self, queue: SimpleBlockingQueue[Any]) -> None:
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


def _evicted() -> QueueEmpty:
    return QueueEmpty("the waiters were evicted")
