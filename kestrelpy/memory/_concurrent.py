"""The fast blocking queue: no lock unless somebody waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from kestrelpy._checks import check_timeout
from kestrelpy.clock import Clock
from kestrelpy.config import FullPolicy
from kestrelpy.errors import QueueClosed, QueueEmpty
from kestrelpy.memory._simple import SimpleBlockingQueue

T = TypeVar("T")


class ConcurrentBlockingQueue(SimpleBlockingQueue[T]):
    """A blocking queue that is fast: without a limit, its puts and gets take no lock unless somebody waits.

    Each call does what it does in ``SimpleBlockingQueue``; only differences are documented here. Without a limit, no
    producer ever waits: not for a consumer, and not for another producer that is handing items over, because that
    producer hands over the items of both. A put or a get that need not wait costs little more than the call of a Python
    function.

    NOTE ON LOCKING: with a limit, ``_lock`` guards everything, as in the base class. Without one, puts append to
    ``_items`` and gets take from it without the lock while ``_busy`` is false, and the lock guards the rest.
    ``_busy`` is the line of consumers itself, and so true while consumers wait; or it is ``True`` while a limit, a
    shutdown or returned items need attention. A put appends, then reads ``_busy``. A thread that makes ``_busy`` true
    looks at the items after that. So one of the two sees the other. A get that read ``_busy`` just before it became
    true still takes the head: it came first.
    """

    def __init__(
        self, maxsize: int = 0, *, full_policy: FullPolicy | str = FullPolicy.BLOCK, clock: Clock | None = None
    ) -> None:
        super().__init__(maxsize, full_policy=full_policy, clock=clock)
        self._busy: object = None  # changed with self._lock held, read without
        self._changed_locked()

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        """Add ``item`` at the tail; if consumers wait, it goes to the first in line. Without a limit it never waits.

        At the limit, the queue's policy decides. ``BLOCK`` waits for room in line with other producers, for up to
        ``timeout`` seconds (``None``: for ever; not at all without ``block``), then raises ``QueueFull``. ``REFUSE``
        raises it at once. ``DROP_OLDEST`` drops the head. Raises ``QueueClosed`` after ``shutdown``, and ``ValueError``
        for a negative timeout. Then nothing was stored.
        """
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
                self._match()
        except BaseException:  # an interrupt: no consumer may sleep while an item is there
            self._match()
            raise

    def put_head(self, item: T) -> None:
        """Add ``item`` at the head, past any limit: the last one put there comes out first. It never waits.

        Raises ``QueueClosed`` after ``shutdown``.
        """
        if self._busy and (self._returned or self._maxsize > 0 or self._closed):
            super().put_head(item)
            return
        try:
            self._items.appendleft(item)
            if self._busy:
                if self._closed:
                    self._take_back(item)
                self._match()
        except BaseException:
            self._match()
            raise

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """Take the head, or wait for it in line with other consumers: first come, first served.

        Waits up to ``timeout`` seconds of real time (``None``: for ever; not at all without ``block``), then raises
        ``QueueEmpty``. Raises ``QueueClosed`` if the queue is shut down and empty, and ``ValueError`` for a negative
        timeout. Takes no lock while there are items and nobody waits.
        """
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
            raise QueueEmpty("the queue is empty")
        return self._wait(timeout)

    def peek(self) -> T:
        """The head, which stays; raises ``QueueEmpty`` if there is none (``QueueClosed`` after ``shutdown``).

        Takes no lock while nobody waits.
        """
        return super().peek() if self._busy else self._head()

    def _take_back(self, item: T) -> None:
        """Undo a put that was under way when the queue was shut down, unless a consumer has the item. O(n)."""
        after: deque[T] = deque()
        with self._lock, suppress(IndexError):  # a get that was under way, too, may take the last item
            try:
                while True:  # and no condition: see Line.drain
                    last = self._items.pop()
                    if last is item:
                        break
                    after.appendleft(last)
            finally:
                self._items.extend(after)
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
