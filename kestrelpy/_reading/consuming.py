"""``Consuming``: what a reader and a queue share for those who consume: loops over items, ``async with``, and the
questions of ``queue.Queue``.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import TYPE_CHECKING, Generic, Protocol

from kestrelpy._checks import check_timeout
from kestrelpy._process import why_not_wait
from kestrelpy._tasks import ClosesInTask
from kestrelpy.clock import SystemClock
from kestrelpy.errors import QueueClosed
from kestrelpy.item import Item, V

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from kestrelpy.config import ReaderConfig

LOOK_SECONDS = 0.02
"""How often ``join`` looks."""


class Consumed(Protocol):
    """The reader whose items are meant."""

    @property
    def items(self) -> int: ...

    @property
    def open_items(self) -> int: ...

    @property
    def config(self) -> ReaderConfig: ...

    def check_usable(self) -> None: ...


class Consuming(ClosesInTask, Generic[V]):
    """Items are got one by one; a loop over them ends when it is closed."""

    @abstractmethod
    def get(self, block: bool = True, timeout: float | None = None) -> Item[V]: ...

    @abstractmethod
    async def aget(self, timeout: float | None = None) -> Item[V]: ...

    @abstractmethod
    def _consumed(self) -> Consumed:
        """The reader in question."""

    def __iter__(self) -> Items[V]:
        """Get items for ever: ``for item in reader: with item: ...``. Each step is a ``get()``; the loop ends when the
        reader or its queue is closed. Other errors of ``get`` are raised.

        Each item is an open read, and nothing commits it but the body of the loop. So when a ``break`` or an error ends
        the loop, the last item is what the body has made of it: committed, aborted, or still open, as after a ``get``;
        an open one comes again when the reader is opened the next time. No item is got ahead. Threads may loop over one
        reader, each with a ``for`` of its own.
        """
        return Items(self)

    def __aiter__(self) -> ItemsInTask[V]:
        """``async for item in reader: async with item: ...``: as ``for``, by ``aget()``. A task that is cancelled
        while it waits for the next item loses none.
        """
        return ItemsInTask(self)

    def qsize(self) -> int:
        """How many items a ``get`` could have: unread and aborted ones, also those that wait for their delay."""
        reader = self._consumed()
        return max(0, reader.items - reader.open_items)

    def __len__(self) -> int:
        """``qsize()``."""
        return self.qsize()

    def __bool__(self) -> bool:
        """True, whatever ``len`` says: ``queue or other`` must not take an empty queue for none."""
        return True

    def empty(self) -> bool:
        """True if ``qsize()`` is 0: there may be open reads."""
        return self.qsize() == 0

    def full(self) -> bool:
        """True if the reader has ``max_items`` items that are not done. Without that limit it is never full."""
        reader = self._consumed()
        return 0 < (reader.config.max_items or 0) <= reader.items

    def join(self, timeout: float | None = None) -> bool:
        """Return when every item is done: committed, or gone in another way (expired, dropped, a dead letter). So no
        item is unread, open or waiting for its delay. ``item.commit()`` is what ``task_done`` is to ``queue.Queue``.

        Waits up to ``timeout`` seconds of real time (``None``: for ever); returns whether everything was done in time.
        It looks fifty times a second, so that commits need not notify anybody. Other threads may put meanwhile, and it
        waits for these items, too. Raises ``QueueClosed`` if it is closed while items are left, ``DurabilityUnknown``
        if a sync fails, ``OSError`` and ``CorruptJournal`` where a reader in another process can't look at the files,
        ``Fenced`` and ``ShipError`` if items are left in a queue that is shipped, and ``ValueError`` for a negative
        timeout. Thread-safe.
        """
        reader = self._consumed()
        return wait_until(lambda: reader.items == 0, reader.check_usable, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wait_until(is_done: Callable[[], bool], check: Callable[[], object], timeout: float | None) -> bool:
    """Look until ``is_done`` is true; False after ``timeout`` seconds. ``check`` raises where there is no sense in it,
    as the queue is closed. No lock is held while it waits.
    """
    check_timeout(timeout)
    deadline = None if timeout is None else SystemClock.monotonic() + timeout
    while not is_done():
        check()
        ending = why_not_wait()
        if ending is not None:
            raise ending
        left = LOOK_SECONDS if deadline is None else min(LOOK_SECONDS, deadline - SystemClock.monotonic())
        if left <= 0:
            return False
        threading.Event().wait(left)
    return True


class Items(Generic[V]):
    """The items of one ``for`` loop."""

    def __init__(self, source: Consuming[V]) -> None:
        self._source = source

    def __iter__(self) -> Items[V]:
        return self

    def __next__(self) -> Item[V]:
        try:
            return self._source.get()
        except QueueClosed:
            raise StopIteration from None


class ItemsInTask(Generic[V]):
    """The items of one ``async for`` loop."""

    def __init__(self, source: Consuming[V]) -> None:
        self._source = source

    def __aiter__(self) -> ItemsInTask[V]:
        return self

    async def __anext__(self) -> Item[V]:
        try:
            return await self._source.aget()
        except QueueClosed:
            raise StopAsyncIteration from None
