"""``BlockingQueue``: the interface of the blocking queues."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")


@runtime_checkable
class BlockingQueue(Protocol[T]):
    """What every blocking queue of kestrelpy does, and what ``kestrelpy.testing.check_blocking_queue`` checks.

    ``SimpleBlockingQueue`` documents each call in full.
    """

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        """Add at the tail. At a limit, wait for room up to ``timeout`` seconds (``None``: for ever; ``block=False``:
        not at all), then raise ``QueueFull``.
        """

    def put_nowait(self, item: T) -> None:
        """Add at the tail, or raise ``QueueFull``."""

    def put_head(self, item: T) -> None:
        """Add at the head, past any limit."""

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """Take the head. If there is none, wait in line up to ``timeout`` seconds (``None``: for ever; ``block=False``:
        not at all), then raise ``QueueEmpty``.
        """

    def get_nowait(self) -> T:
        """Take the head, or raise ``QueueEmpty``."""

    def get_if(self, predicate: Callable[[T], object]) -> T:
        """Take the head if the predicate is true of it, else raise ``QueueEmpty``."""

    def get_future(self, timeout: float | None = None) -> Future[T]:
        """A future of the next item; never blocks. It fails with ``QueueEmpty`` after ``timeout`` seconds."""

    async def aget(self, timeout: float | None = None) -> T:
        """The next item, for asyncio. Raises ``QueueEmpty`` after ``timeout`` seconds (``None``: never)."""

    async def aput(self, item: T, timeout: float | None = None) -> None:
        """Add at the tail, for asyncio. ``QueueFull`` after ``timeout`` seconds without room (``None``: never)."""

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
