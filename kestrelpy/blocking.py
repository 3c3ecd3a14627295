"""The blocking-queue face of a journaled queue: for code that was written against ``queue.Queue``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kestrelpy._checks import check_timeout
from kestrelpy._reading.reader import checkpointer_of
from kestrelpy._waiting.line import Line, Waiting
from kestrelpy._waiting.waiters import Waiter
from kestrelpy.errors import QueueClosed, QueueEmpty
from kestrelpy.item import Item

if TYPE_CHECKING:
    from concurrent.futures import Future

    from kestrelpy._reading.reader import Reader
    from kestrelpy._writing.put_path import PutPath


class JournaledBlockingQueue:
    """A ``BlockingQueue`` over the default reader of a journaled queue; made by ``JournaledQueue.as_blocking_queue``.

    A get commits at once: an item that was got and not yet worked on is not delivered again, but for the commits
    since the last checkpoint after a crash. Values go through the queue's codec; an item that it can't decode is
    aborted: it stays, and the next get has it again, unless an ``on_abort`` hook takes it. Thread-safe.
    """

    def __init__(self, reader: Reader, puts: PutPath, close: Callable[[], object]) -> None:
        self._reader = reader
        self._puts = puts
        self._close = close
        self._dispatcher = checkpointer_of(self._reader).dispatcher
        self._gets = _Gets(self)
        self._shut = False

    def _done(self, item: Item) -> Any:
        try:
            value = item.value
        except Exception:
            item.abort()
            raise
        item.commit()
        return value

    # -- putting -----------------------------------------------------------------------------------------------------

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add at the tail; waits for room, whatever the reader's policy. Raises ``QueueFull``, ``QueueClosed``."""
        if block:
            check_timeout(timeout)
        self._check_open()
        self._puts.put_waiting(item, timeout if block else 0, self._check_open)

    def _check_open(self) -> None:
        if self._shut:
            raise _shut_down()

    def put_nowait(self, item: Any) -> None:
        """``put(item, block=False)``."""
        self.put(item, False)

    def put_head(self, item: Any) -> None:
        """A journal has no head to put at: raises ``NotImplementedError``."""
        raise NotImplementedError("a journaled queue takes items at its tail only")

    async def aput(self, item: Any, timeout: float | None = None) -> None:
        """``put`` for asyncio, from any event loop; ``timeout`` is by the queue's clock.

        A task that is cancelled while it waits for room has put nothing, and leaves its turn to the next; while it
        waits for the disk, it has put its item.
        """
        check_timeout(timeout)
        self._check_open()
        await self._puts.aput_waiting(item, timeout, self._check_open)

    # -- getting -----------------------------------------------------------------------------------------------------

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next item, committed. Raises ``QueueEmpty``, ``QueueClosed``."""
        if block:
            check_timeout(timeout)
        waits = block and timeout != 0
        item = None
        try:
            try:
                item = self._dispatcher.get_at_hand() or self._dispatcher.get(False, None, counts=not waits)
            except QueueEmpty:
                if self._shut:
                    item = self._gets._take_now()
                elif not waits:
                    raise
                else:
                    item = self._gets._wait(timeout)
            return self._done(item)
        except BaseException:  # an interrupt, perhaps: nobody has got it
            if item is not None:
                self._dispatcher.unget(item)
            raise

    def get_nowait(self) -> Any:
        """``get(block=False)``."""
        return self.get(False)

    def get_if(self, predicate: Callable[[Any], object]) -> Any:
        """Not offered by a journaled queue: raises ``NotImplementedError``."""
        raise NotImplementedError("a journaled queue has no conditional get")

    def get_future(self, timeout: float | None = None) -> Future[Any]:
        """A future of the next item, committed when it is delivered. ``cancel()`` loses no item."""
        from concurrent.futures import Future  # here and not above: who does not use it must not pay for it

        outer: Future[Any] = Future()
        check_timeout(timeout)
        try:
            inner = self._gets.get_future(timeout)
        except QueueClosed as error:
            outer.set_exception(error)
            return outer

        def arrive(done: Future[Item]) -> None:
            if done.cancelled():
                outer.cancel()
                return
            error = done.exception()
            if not outer.set_running_or_notify_cancel():
                if error is None:
                    self._dispatcher.unget(done.result())
            elif error is not None:
                outer.set_exception(error)
            else:
                item = done.result()
                try:
                    value = self._done(item)
                except BaseException as trouble:  # closed meanwhile, or an interrupt: the item comes again
                    self._dispatcher.unget(item)
                    outer.set_exception(trouble)
                    if not isinstance(trouble, Exception):
                        raise
                else:
                    outer.set_result(value)

        outer.add_done_callback(lambda done: inner.cancel() if done.cancelled() else None)
        inner.add_done_callback(arrive)
        return outer

    async def aget(self, timeout: float | None = None) -> Any:
        """``get`` for asyncio, from any event loop; a cancelled one loses no item."""
        item = None
        try:
            item = await self._gets.aget(timeout)
            return self._done(item)
        except BaseException:  # as in get
            if item is not None:
                self._dispatcher.unget(item)
            raise

    def peek(self) -> Any:
        """The next item, not removed. Raises ``QueueEmpty``."""
        return self._reader.peek().value

    # -- the rest ----------------------------------------------------------------------------------------------------

    def flush(self) -> int:
        """Drop what is queued; returns how many items. Waiters stay."""
        return self._reader.flush()

    def evict_waiters(self) -> int:
        """Every waiter gets ``QueueEmpty`` now; returns how many there were."""
        return self._reader.evict_waiters()

    def qsize(self) -> int:
        """How many items are unread."""
        return self._reader.items - self._reader.open_items

    def __len__(self) -> int:
        return self.qsize()

    def empty(self) -> bool:
        """Whether nothing is unread."""
        return self.qsize() == 0

    def full(self) -> bool:
        """Whether a put would have to wait."""
        return 0 < self.maxsize <= self._reader.items

    @property
    def maxsize(self) -> int:
        """The reader's ``max_items``; 0 if it has none."""
        return self._reader.config.max_items or 0

    @property
    def waiter_count(self) -> int:
        """How many consumers wait in line."""
        return self._reader.waiter_count

    @property
    def dropped_count(self) -> int:
        """How many items were dropped to keep the limits."""
        return self._reader.stats().discarded

    def shutdown(self, immediate: bool = False) -> None:
        """Refuse puts from now on; gets go on until the queue is empty, or with ``immediate`` end at once.

        Unlike a queue in memory, nothing is dropped: what is left is in the journal. Idempotent.
        """
        self._shut = True
        if immediate:
            self._close()
        else:
            self._dispatcher.dismiss_empty_handed(_shut_down())
            self._puts.look_again()  # producers that wait for room look again, and see it

    def close(self) -> None:
        """``shutdown(immediate=True)``: closes the journaled queue. Idempotent."""
        self.shutdown(immediate=True)

    def __repr__(self) -> str:
        return f"<JournaledBlockingQueue {self._puts.source.name}: {self.qsize()} items, {self.waiter_count} waiters>"


class _Gets(Waiting[Item]):
    """Those who wait for an item of a blocking queue: in the reader's line, unless the queue is shut down."""

    def __init__(self, face: JournaledBlockingQueue) -> None:
        self._face = face
        self._dispatcher = face._dispatcher
        self._clock = self._dispatcher._clock

    @property
    def _line(self) -> Line:  # type: ignore[override]  # whichever the reader has
        return self._dispatcher._line

    def _take_now(self) -> Item:
        try:
            return self._dispatcher._take_now()
        except QueueEmpty:
            if not self._face._shut:
                raise
        self._dispatcher.hand_off()  # known to be shut, then looked again: what was put before that is there
        try:
            return self._dispatcher._take_now()
        except QueueEmpty:
            raise _shut_down() from None

    def _enter(self, waiter: Waiter) -> None:
        self._dispatcher._enter(waiter)
        if self._face._shut:  # entered, then looked again; and for an item, too
            self._dispatcher.hand_off()
            if self._dispatcher._leave(waiter):
                raise _shut_down()

    def _leave(self, waiter: Waiter) -> bool:
        return self._dispatcher._leave(waiter)

    def _leave_now(self, waiter: Waiter) -> bool | None:
        return self._dispatcher._leave_now(waiter)

    def _give_back(self, waiter: Waiter, item: Item) -> None:
        self._dispatcher._give_back(waiter, item)

    def _missed(self, waiter: Waiter) -> None:
        self._dispatcher._missed(waiter)


def _shut_down() -> QueueClosed:
    return QueueClosed("this queue is shut down")
