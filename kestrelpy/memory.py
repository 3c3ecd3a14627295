"""Blocking queues in memory: one that is fast and one that is plain, with one behaviour.

Rules:
1. First come, first served: an item goes to the consumer who has waited longest, room to the producer who has. A get
   or a put that comes later does not pass them.
2. An item is in the queue, or with one consumer, or on its way between the two on the stack of one thread, which puts
   it back if it fails. ``for x in map(f, repeat(a)): break`` is ``x = f(a)`` with no place in it for an interrupt,
   which would find the item taken and ``x`` not set.
3. Nobody is completed, no callback runs and no item is freed while the lock is held. The predicate of ``get_if`` is run
   under it, as part of the take.
4. Whoever has held the lock settles after releasing it (``_settle``): others may have counted on that.

Atomic operations relied upon, in CPython with the GIL and without: ``deque.append``, ``popleft``, ``pop``, ``len`` and
truth of a container, ``list.pop``, the load and the store of an attribute, one step of an iterator of rule 2.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from kestrelpy._line import Line, ThreadWaiter, Waiter, Waiting, check_timeout, fail_all
from kestrelpy.clock import Clock, SystemClock
from kestrelpy.config import FullPolicy
from kestrelpy.errors import QueueClosed, QueueEmpty, QueueFull

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["BlockingQueue", "ConcurrentBlockingQueue", "SimpleBlockingQueue"]

T = TypeVar("T")

_NOTHING: Any = object()


@runtime_checkable
class BlockingQueue(Protocol[T]):
    """What every blocking queue of kestrelpy does, and what ``kestrelpy.testing.check_blocking_queue`` checks.

    ``SimpleBlockingQueue`` documents each call in full.
    """

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        """Add at the tail; wait for room if there is a limit."""

    def put_nowait(self, item: T) -> None:
        """Add at the tail, or raise ``QueueFull``."""

    def put_head(self, item: T) -> None:
        """Add at the head, past any limit."""

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """Take the head, or wait in line for it."""

    def get_nowait(self) -> T:
        """Take the head, or raise ``QueueEmpty``."""

    def get_if(self, predicate: Callable[[T], object]) -> T:
        """Take the head if the predicate is true of it, else raise ``QueueEmpty``."""

    def get_future(self, timeout: float | None = None) -> Future[T]:
        """A future of the next item; never blocks."""

    async def aget(self, timeout: float | None = None) -> T:
        """The next item, for asyncio."""

    async def aput(self, item: T, timeout: float | None = None) -> None:
        """Add at the tail, for asyncio."""

    def peek(self) -> T:
        """The head, which stays, or ``QueueEmpty``."""

    def flush(self) -> int:
        """Drop what is queued; returns how many."""

    def evict_waiters(self) -> int:
        """Every waiting consumer gets ``QueueEmpty``; returns how many."""

    def qsize(self) -> int:
        """How many items are queued."""

    def __len__(self) -> int:
        """The same as ``qsize()``."""

    def empty(self) -> bool:
        """True if nothing is queued."""

    def full(self) -> bool:
        """True if there is no room."""

    @property
    def maxsize(self) -> int:
        """The limit; 0 or less means none."""

    @property
    def waiter_count(self) -> int:
        """How many consumers wait."""

    @property
    def dropped_count(self) -> int:
        """How many items were dropped to make room."""

    def shutdown(self, immediate: bool = False) -> None:
        """Refuse puts, and gets once it is empty; with ``immediate`` at once."""

    def close(self) -> None:
        """The same as ``shutdown(immediate=True)``."""


class SimpleBlockingQueue(Waiting[T]):
    """A blocking queue with everything under one lock: the plain reference for ``ConcurrentBlockingQueue``.

    First in, first out, for any number of threads and asyncio loops. The items are any objects, ``None`` included.
    ``maxsize`` is a hard limit on what is queued, and 0 or less means none; ``full_policy`` says what a put does at
    the limit. Only ``put_head``, and an item that a cancelled ``aget`` gives back, go past it. ``clock`` is for the
    deadlines of ``get_future``, ``aget`` and ``aput``. Raises ``TypeError`` for a policy that is none.

    Every call is thread-safe. Those that do not wait may also be made in a finaliser or a signal handler, even one that
    interrupts another call on the same queue (a put may then pass the limit by one).

    NOTE ON LOCKING: ``_lock`` guards everything. It is reentrant for the sake of finalisers. It is held for a few
    operations on memory at a time and while the predicate of ``get_if`` runs, never while anybody waits.
    """

    def __init__(
        self, maxsize: int = 0, *, full_policy: FullPolicy = FullPolicy.BLOCK, clock: Clock | None = None
    ) -> None:
        if not isinstance(full_policy, FullPolicy):
            raise TypeError(f"full_policy must be a FullPolicy, not {full_policy!r}")
        self._clock = SystemClock() if clock is None else clock
        self._full_policy = full_policy
        self._lock = threading.RLock()
        self._maxsize = maxsize  # guarded by self._lock
        self._closed = False  # guarded by self._lock
        self._discards = False  # guarded by self._lock: nothing comes back, after shutdown(immediate=True)
        self._dropped = 0  # guarded by self._lock
        self._items: deque[T] = deque()  # guarded by self._lock (here; see ConcurrentBlockingQueue)
        # Items that came back from a cancelled task, ahead of all others, by the order in which they were handed out.
        self._returned: deque[tuple[int, T]] = deque()  # guarded by self._lock
        self._last_order = 0  # guarded by self._lock: of the item handed out last
        self._first_order = 0  # guarded by self._lock: of the last item put ahead of returned ones; counts down
        self._line = Line()  # guarded by self._lock: consumers
        self._producers = Line()  # guarded by self._lock
        self._reserved = 0  # guarded by self._lock: places promised to tasks in aput that have not filled them yet
        self._settling = False  # guarded by self._lock
        # Endless iterators; each step is a call (rule 2).
        self._attempts = map(self._lock.acquire, repeat(False))  # to get the lock without waiting for it
        self._heads: Iterator[Any] = map(deque.popleft, repeat(self._items))  # guarded by self._lock
        self._returned_heads: Iterator[Any] = map(deque.popleft, repeat(self._returned))  # guarded by self._lock

    # -- putting -----------------------------------------------------------------------------------------------------

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        """Add ``item`` at the tail; if consumers wait, it is handed straight to the first in line.

        At the limit it goes by the queue's policy: ``BLOCK`` waits for room in line with other producers, for up to
        ``timeout`` seconds (``None``: for ever; not at all without ``block``), then raises ``QueueFull``; ``REFUSE``
        raises it at once; ``DROP_OLDEST`` drops the head. Raises ``QueueClosed`` after ``shutdown``, also if that
        comes while it waits, and ``ValueError`` for a negative timeout. If it raises one of these, nothing was
        stored.
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
        room = _Room(self)
        producer = _Producer(room, item)
        try:
            room._wait(timeout, waiter=producer)
        except QueueEmpty:
            if producer.parcel:
                raise QueueFull(f"no room within {timeout} s") from None

    def put_nowait(self, item: T) -> None:
        """The same as ``put(item, block=False)``."""
        self.put(item, False)

    async def aput(self, item: T, timeout: float | None = None) -> None:
        """The same as ``put`` for asyncio, from any event loop; ``timeout`` is by the queue's clock.

        A task that is cancelled in it has put nothing, and leaves its turn to the next.
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
            await _Room(self).aget(timeout)
        except QueueEmpty:
            raise QueueFull(f"no room within {timeout} s") from None
        try:
            with self._lock:
                self._reserved -= 1
                self._check_open_locked()
                self._items.append(item)
        finally:
            self._settle()

    def put_head(self, item: T) -> None:
        """Add ``item`` at the head, past any limit: the last one put there comes out first.

        Raises ``QueueClosed`` after ``shutdown``.
        """
        try:
            with self._lock:
                self._check_open_locked()
                if self._returned:
                    self._first_order -= 1
                    self._returned.appendleft((self._first_order, item))
                else:
                    self._items.appendleft(item)
        finally:
            self._settle()

    def _put_now(self, item: T) -> None:
        """Put without waiting; raises ``QueueFull`` at the limit."""
        gone: deque[T] = deque()
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
                    if not room or self._settling:
                        raise QueueFull(f"the queue holds its {self._maxsize} items")
            finally:
                self._settle()  # if there are both room and producers in line, these come first

    def _check_open_locked(self) -> None:
        if self._closed:
            raise QueueClosed("the queue is shut down")

    def _has_room(self) -> bool:
        return self._maxsize <= 0 or self.qsize() + self._reserved < self._maxsize

    def _make_room_locked(self, gone: deque[T]) -> None:
        while not self._has_room():
            gone.append(self._take_locked())
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

    def get_if(self, predicate: Callable[[T], object]) -> T:
        """Take the head if ``predicate`` is true of it, else raise ``QueueEmpty``. Looks at the head only; never waits.

        The predicate runs while the lock is held, so it should be quick. What it raises is raised, and the item stays.
        """
        while True:
            try:
                with self._lock:
                    if not self._line:
                        return self._take_if_locked(predicate)
                    if not self._has_items() or self._settling:
                        raise self._nothing()
            finally:
                self._settle()

    def peek(self) -> T:
        """The head, which stays; raises ``QueueEmpty`` if there is none (``QueueClosed`` after ``shutdown``)."""
        try:
            with self._lock:
                return self._head()
        finally:
            self._settle()

    def _take_now(self) -> T:
        while True:
            try:
                with self._lock:
                    if not self._line:
                        return self._take_locked()
                    if not self._has_items() or self._settling:
                        raise self._nothing()
            finally:
                self._settle()  # if there are both items and consumers in line, these come first

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

    def _has_items(self) -> bool:
        return bool(self._items or self._returned)

    def _nothing(self) -> QueueEmpty | QueueClosed:
        return QueueClosed("the queue is shut down") if self._closed else QueueEmpty("nothing is there")

    # -- the line of consumers ---------------------------------------------------------------------------------------

    def _enter(self, waiter: Waiter) -> None:
        try:
            with self._lock:
                if self._closed and not self._has_items():
                    raise self._nothing()
                self._line.add(waiter)
        finally:
            self._settle()
        if self._closed:
            self._turn_away()

    def _leave(self, waiter: Waiter) -> bool:
        try:
            with self._lock:
                return self._line.remove(waiter)
        finally:
            self._settle()

    def _give_back(self, waiter: Waiter, item: T) -> None:
        try:
            with self._lock:
                if not self._discards:
                    insort(self._returned, (waiter.order, item), key=itemgetter(0))
                    self._changed_locked()
        finally:
            self._settle()

    def evict_waiters(self) -> int:
        """Every consumer that waits now gets ``QueueEmpty``; returns how many there were. Producers stay in line."""
        gone: list[Waiter] = []
        count = 0
        try:
            with self._lock:
                gone += self._line.drain()
                count = len(gone)
        finally:
            fail_all(gone, lambda: QueueEmpty("the waiters were evicted"))
            self._settle()
        return count

    # -- settling: serving whoever can be served ---------------------------------------------------------------------

    def _settle(self) -> None:
        """Hand items to consumers in line and room to producers in line, until one or the other runs out.

        Never waits for the lock: if somebody has it, that one will look again after releasing it.
        """
        consumers, producers = self._line.waiters, self._producers.waiters
        waiter: Waiter | None = None
        entry: Any = _NOTHING
        try:
            while (consumers and (self._items or self._returned)) or (producers and self._has_room()):
                held = serving = False
                waiter, entry = None, _NOTHING
                try:
                    for held in self._attempts:  # noqa: B007 - rule 2
                        break
                    if not held or self._settling:  # the latter in a finaliser that interrupts this
                        return
                    self._settling = serving = True
                    if self._returned or not (consumers and self._items):
                        waiter, entry = self._serve_others_locked()
                        self._changed_locked()
                    else:
                        for entry in self._heads:  # noqa: B007 - rule 2
                            break
                        waiter = self._line.first()
                        if waiter is not None:
                            self._last_order = waiter.order = self._last_order + 1
                except IndexError:  # a get that was under way took the item
                    continue
                finally:
                    if serving:
                        self._settling = False
                    try:
                        if waiter is None and entry is not _NOTHING:  # nobody wants it any more, or an interrupt
                            self._items.appendleft(entry)
                    finally:
                        if held:
                            self._lock.release()
                if waiter is not None:
                    waiter.give(entry)
        except BaseException:  # an interrupt, or a future's callback: others may count on this thread to go on
            if waiter is not None:
                waiter.give(entry)  # if for the second time, that does nothing
            self._settle()
            raise

    def _serve_others_locked(self) -> tuple[Waiter | None, Any]:
        """The less common part: a consumer who gets a returned item, or a producer who gets room."""
        if self._line.waiters and self._returned:
            return self._serve_returned_locked()
        waiter = self._producers.head()
        if waiter is None or not self._has_room():
            return None, _NOTHING
        wanted = waiter.claim()
        if isinstance(waiter, _Producer) and waiter.parcel:
            self._items.extend(map(deque.popleft, (waiter.parcel,)))  # before it leaves: whoever left was served
        if not self._producers.remove(waiter) or not wanted:
            return None, _NOTHING
        if not isinstance(waiter, _Producer):
            self._reserved += 1
        return waiter, None

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

    def _turn_away(self) -> None:
        """The queue is closed: serve consumers in line while there are items, and tell the others."""
        while self._line.waiters:
            self._settle()
            gone: list[Waiter] = []
            try:
                with self._lock:
                    if self._settling or not self._has_items():
                        gone += self._line.drain()
            finally:
                fail_all(gone, self._nothing)

    def _changed_locked(self) -> None:
        """Whether there are returned items, a limit or an end of the queue changed. For the subclass."""

    # -- the whole queue ---------------------------------------------------------------------------------------------

    def flush(self) -> int:
        """Drop what is queued; returns how many items. Consumers in line stay; producers in line get the room. O(n)."""
        try:
            with self._lock:
                gone = self._take_all_locked()
        finally:
            self._settle()
        return len(gone)

    def _take_all_locked(self) -> deque[T]:
        gone = deque(item for _, item in self._returned)
        self._returned.clear()
        self._changed_locked()
        with suppress(IndexError):  # gets that were under way took some
            gone.extend(map(deque.popleft, repeat(self._items, len(self._items))))
        return gone

    def shutdown(self, immediate: bool = False) -> None:
        """Refuse every later put with ``QueueClosed``; once it is empty, every get too.

        With ``immediate`` the items are dropped. Wakes whoever waits in vain, consumers and producers, with
        ``QueueClosed``. Idempotent.
        """
        producers: list[Waiter] = []
        try:
            with self._lock:
                self._closed = True
                self._discards = self._discards or immediate
                producers += self._producers.drain()
                dropped = self._take_all_locked() if immediate else None
                self._changed_locked()
        finally:
            fail_all(producers, self._nothing)
            self._turn_away()
        del dropped  # not earlier: the lock was held

    def close(self) -> None:
        """The same as ``shutdown(immediate=True)``."""
        self.shutdown(immediate=True)

    @property
    def is_shutdown(self) -> bool:
        """True from ``shutdown()`` or ``close()`` on."""
        return self._closed

    @property
    def maxsize(self) -> int:
        """The limit; 0 or less means none. It may be changed while nobody else uses the queue; what is queued stays."""
        return self._maxsize

    @maxsize.setter
    def maxsize(self, maxsize: int) -> None:
        try:
            with self._lock:
                self._maxsize = maxsize
                self._changed_locked()
        finally:
            self._settle()

    def qsize(self) -> int:
        """How many items are queued at this moment; one that was handed to a consumer is not counted."""
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

    def __repr__(self) -> str:
        return f"<{type(self).__name__} size={self.qsize()} waiters={self.waiter_count}>"

    def _check(self) -> None:
        """Raise ``AssertionError`` if an invariant does not hold. For tests, while no other thread uses the queue."""
        orders = [order for order, _ in self._returned]
        assert not self._settling
        assert not (self._line and self._has_items())
        assert not (self._producers and self._has_room())
        assert not (self._closed and (self._line or self._producers))
        assert not (self._producers and self._maxsize <= 0)
        assert orders == sorted(set(orders))
        assert not orders or self._first_order <= orders[0]
        assert not orders or orders[-1] <= self._last_order
        assert self._reserved >= 0
        assert self._dropped >= 0


class ConcurrentBlockingQueue(SimpleBlockingQueue[T]):
    """A blocking queue that is fast: without a limit, its puts and gets take no lock unless somebody waits.

    It does what ``SimpleBlockingQueue`` does, call by call, and documents only what differs. Where there is no limit,
    no producer ever waits: not for a consumer, and not for another producer that is handing items over; the first to
    get there does it for both. A put or a get that need not wait costs little more than the call of a Python
    function.

    NOTE ON LOCKING: with a limit, ``_lock`` guards everything, as in the base class. Without one, puts append to
    ``_items`` and gets take from it without the lock while ``_busy`` is false, and the lock guards the rest.
    ``_busy`` is the line of consumers itself, and so true while there are any, or ``True`` while a limit, a shutdown
    or returned items have to be looked after. A put appends, then reads ``_busy``; whoever makes it true looks at the
    items after that; so one of them sees the other. A get that read ``_busy`` just before it became true still takes
    the head: it came first.
    """

    def __init__(
        self, maxsize: int = 0, *, full_policy: FullPolicy = FullPolicy.BLOCK, clock: Clock | None = None
    ) -> None:
        super().__init__(maxsize, full_policy=full_policy, clock=clock)
        self._busy: object = None  # changed with self._lock held, read without
        self._changed_locked()

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        """As in the base class; without a limit it never waits."""
        if block and timeout is not None:
            check_timeout(timeout)
        if self._busy and (self._maxsize > 0 or self._closed):
            super().put(item, block, timeout)
            return
        try:
            self._items.append(item)
            if self._busy:
                if self._closed:
                    self._take_back(item)
                self._settle()
        except BaseException:  # an interrupt: no consumer may sleep while an item is there
            self._settle()
            raise

    def put_head(self, item: T) -> None:
        """As in the base class; without a limit it never waits."""
        if self._busy and (self._returned or self._maxsize > 0 or self._closed):
            super().put_head(item)
            return
        try:
            self._items.appendleft(item)
            if self._busy:
                if self._closed:
                    self._take_back(item)
                self._settle()
        except BaseException:
            self._settle()
            raise

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """As in the base class; takes no lock while there are items and nobody waits."""
        if block and timeout is not None:
            check_timeout(timeout)
        if self._busy:
            return super().get(block, timeout)
        if self._items:
            try:
                return self._items.popleft()
            except IndexError:  # another get was faster
                pass
        if not block or timeout == 0:
            raise QueueEmpty("nothing is there")
        return self._wait(timeout)

    def peek(self) -> T:
        """As in the base class; takes no lock while nobody waits."""
        return super().peek() if self._busy else self._head()

    def _take_back(self, item: T) -> None:
        """Undo a put that was under way when the queue was shut down, unless the item has found a consumer. O(n)."""
        behind: deque[T] = deque()
        with self._lock, suppress(IndexError):  # a get that was under way as well may take the last one
            try:
                while (last := self._items.pop()) is not item:
                    behind.appendleft(last)
            finally:
                self._items.extend(behind)
            raise QueueClosed("the queue was shut down")

    def _take_if_locked(self, predicate: Callable[[T], object]) -> T:
        self._busy = True  # from here on other gets wait for the lock
        try:
            return super()._take_if_locked(predicate)
        finally:
            self._changed_locked()

    def _changed_locked(self) -> None:
        self._busy = True if self._returned or self._closed or self._maxsize > 0 else self._line.waiters

    def _check(self) -> None:
        super()._check()
        assert bool(self._busy) == bool(self._line or self._returned or self._closed or self._maxsize > 0)


class _Producer(ThreadWaiter):
    """A thread that waits for room, with its item. Whoever makes room puts the item in for it."""

    def __init__(self, room: _Room, item: Any) -> None:
        super().__init__(room)
        self.parcel = deque((item,))  # empty once the item is in the queue


class _Room(Waiting[None]):
    """The producers' side of a bounded queue: what is waited for is a place.

    A thread finds its place filled already, with its item (``_Producer``). A task has its place reserved, and fills
    it when its loop gets to that: so a task that is cancelled meanwhile has put nothing.
    """

    def __init__(self, queue: SimpleBlockingQueue[Any]) -> None:
        self._queue = queue
        self._clock = queue._clock
        self._line = queue._producers

    def _take_now(self) -> None:
        queue = self._queue
        try:
            with queue._lock:
                queue._check_open_locked()
                if queue._producers or not queue._has_room():
                    raise QueueEmpty("no room")
                queue._reserved += 1
        finally:
            queue._settle()

    def _enter(self, waiter: Waiter) -> None:
        queue = self._queue
        try:
            with queue._lock:
                queue._check_open_locked()
                self._line.add(waiter)
        finally:
            queue._settle()

    def _leave(self, waiter: Waiter) -> bool:
        queue = self._queue
        try:
            with queue._lock:
                return self._line.remove(waiter)
        finally:
            queue._settle()

    def _give_back(self, waiter: Waiter, item: None) -> None:  # noqa: ARG002 - a place is all there is to give back
        if isinstance(waiter, _Producer):  # an interrupted put whose item is in already
            return
        queue = self._queue
        try:
            with queue._lock:
                queue._reserved -= 1
        finally:
            queue._settle()
