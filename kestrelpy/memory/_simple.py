"""The plain blocking queue: everything under one lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import repeat
from typing import TypeVar

from kestrelpy._checks import check_timeout
from kestrelpy._waiting.line import fail_all
from kestrelpy._waiting.waiters import Waiter
from kestrelpy.clock import Clock
from kestrelpy.config import FullPolicy
from kestrelpy.errors import QueueEmpty, QueueFull
from kestrelpy.memory._exchange import Exchange, Supplier, SupplierLine, settles

T = TypeVar("T")


class SimpleBlockingQueue(Exchange[T]):
    """A blocking queue with everything under one lock: the plain reference for ``ConcurrentBlockingQueue``.

    First in, first out, for any number of threads and asyncio loops. The items are any objects, ``None`` included.
    ``maxsize`` is a hard limit on the number of queued items, and 0 or less means none; ``full_policy`` says what a
    put does at the limit. Only ``put_head``, and an item that a cancelled ``aget`` gives back, go past it. ``clock`` is
    for the deadlines of ``get_future``, ``aget`` and ``aput``. Raises ``TypeError`` if ``full_policy`` is not a
    ``FullPolicy``.

    Every call is thread-safe. Calls that do not wait may also be made in a finaliser or a signal handler, even one that
    interrupts another call on the same queue (a put may then pass the limit by one).

    NOTE ON LOCKING: ``_lock`` guards everything. It is reentrant because of finalisers. It is held for a few operations
    on memory at a time and while the predicate of ``get_if`` runs, never while a thread waits.
    """

    def __init__(
        self, maxsize: int = 0, *, full_policy: FullPolicy = FullPolicy.BLOCK, clock: Clock | None = None
    ) -> None:
        if not isinstance(full_policy, FullPolicy):
            raise TypeError(f"full_policy must be a FullPolicy, not {full_policy!r}")
        super().__init__(maxsize, clock)
        self._full_policy = full_policy
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

    @settles
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
                        if not room or self._settling:
                            raise QueueFull(f"the queue holds {self._maxsize} items, its maxsize")
                finally:
                    self._match()  # if there is room, and producers are in line, they come first
        except BaseException:  # as in settles()
            self._match()
            raise

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

    @settles
    def get_if(self, predicate: Callable[[T], object]) -> T:
        """Take the head if ``predicate`` is true of it, else raise ``QueueEmpty``. Looks at the head only; never waits.

        The predicate runs while the lock is held, so it should be quick. If it raises, the call raises that, and the
        item stays.
        """
        while True:
            with self._lock:
                if not self._line:
                    return self._take_if_locked(predicate)
                if not self._has_items() or self._settling:
                    raise self._nothing()
            self._match()

    @settles
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
                        if not self._has_items() or self._settling:
                            raise self._nothing()
                finally:
                    self._match()  # if there are items, and consumers in line, they come first
        except BaseException:  # as in settles()
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

    @settles
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

    @settles
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
        """The limit; 0 or less means none. It may be changed while nobody else uses the queue; queued items stay."""
        return self._maxsize

    @maxsize.setter
    @settles
    def maxsize(self, maxsize: int) -> None:
        with self._lock:
            self._maxsize = maxsize
            self._changed_locked()

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


def _evicted() -> QueueEmpty:
    return QueueEmpty("the waiters were evicted")
