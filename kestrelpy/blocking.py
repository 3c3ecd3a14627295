"""A journaled queue behind the interface of ``queue.Queue``, for code that was written against that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic

from kestrelpy._checks import check_timeout
from kestrelpy._process import StaysInProcess
from kestrelpy._reading.consuming import wait_until
from kestrelpy._reading.reader import checkpointer_of
from kestrelpy._waiting.line import Line, Waiting
from kestrelpy._waiting.waiters import Waiter
from kestrelpy.errors import QueueClosed, QueueEmpty, UnknownItem
from kestrelpy.item import Item, V

if TYPE_CHECKING:
    from concurrent.futures import Future

    from kestrelpy._reading.reader import Reader
    from kestrelpy._writing.put_path import PutPath


class JournaledBlockingQueue(StaysInProcess, Generic[V]):
    """A ``BlockingQueue`` over the default reader of a journaled queue; made by ``JournaledQueue.as_blocking_queue``.

    A get commits at once. So an item that was got is not delivered again, even if nobody has worked on it; only after a
    crash, items committed since the last checkpoint come again. Values go through the queue's codec. An item that the
    codec cannot decode is aborted: the item stays, and the next get has it again, unless an ``on_abort`` hook takes it.
    A get beside a ``seek`` returns its item, as if the get came first. Thread-safe.

    NOTE ON LOCKING: ``_counting`` guards ``_taken``, and is a leaf.
    """

    def __init__(self, reader: Reader[V], puts: PutPath, close: Callable[[], object]) -> None:
        self._reader = reader
        self._puts = puts
        self._close = close
        self._dispatcher = checkpointer_of(self._reader).dispatcher
        self._gets = _Gets(self)
        self._shut = False
        self._counting = threading.Lock()
        self._taken = 0  # gets without a task_done; guarded by self._counting

    def _done(self, item: Item[V]) -> V:
        try:
            value = item.value
        except Exception as error:
            with suppress(UnknownItem):  # as below
                item.abort(reason=f"{type(error).__name__}: {error}")
            raise
        self._count(1)  # first: join must not find that no item is left, and that none was taken
        try:
            with suppress(UnknownItem):  # a seek has ended the open read, and has moved the reader: the get came first
                item.commit()
        except BaseException:
            self._count(-1)
            raise
        return value

    def _count(self, change: int) -> None:
        with self._counting:
            self._taken += change

    # -- putting -----------------------------------------------------------------------------------------------------

    def put(self, item: V, block: bool = True, timeout: float | None = None) -> None:
        """Add an item at the tail. Waits for room, with the full policy ``REFUSE``, too; ``DROP_OLDEST`` makes room.

        Waits up to ``timeout`` seconds (``None``: for ever; ``block=False``: not at all). Raises ``QueueFull`` if there
        is no room in time, ``QueueClosed`` after ``shutdown()``, and the errors of ``JournaledQueue.put``.
        """
        if block:
            check_timeout(timeout)
        self._check_open()
        self._puts.put_waiting(item, timeout if block else 0, self._check_open)

    def _check_open(self) -> None:
        if self._shut:
            raise self._shut_down()

    def _shut_down(self) -> QueueClosed:
        return QueueClosed(f"the blocking queue of {self._reader.full_name} is shut down")

    def put_nowait(self, item: V) -> None:
        """``put(item, block=False)``: raises ``QueueFull`` if there is no room now."""
        self.put(item, False)

    def put_head(self, item: V) -> None:
        """Raises ``NotImplementedError``: a journal is appended to at its tail only."""
        raise NotImplementedError("put_head(): a journaled queue takes items at its tail only")

    async def aput(self, item: V, timeout: float | None = None) -> None:
        """``put`` for asyncio, from any event loop. ``timeout`` is in seconds of the queue's clock.

        A task that is cancelled while it waits for room has put nothing, and the next producer has its turn. A task
        that is cancelled while it waits for the disk has put its item.
        """
        check_timeout(timeout)
        self._check_open()
        await self._puts.aput_waiting(item, timeout, self._check_open)

    # -- getting -----------------------------------------------------------------------------------------------------

    def get(self, block: bool = True, timeout: float | None = None) -> V:
        """Take and commit the next item; returns its value.

        Waits in line up to ``timeout`` seconds (``None``: for ever; ``block=False``: not at all). Raises ``QueueEmpty``
        if no item came in time, ``QueueClosed`` after ``shutdown()`` once the queue is empty, and the codec's error.
        """
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
        except BaseException:  # perhaps an interrupt: no caller has the item, so return it
            if item is not None:
                self._dispatcher.unget(item)
            raise

    def get_nowait(self) -> V:
        """``get(block=False)``: raises ``QueueEmpty`` if there is no item now."""
        return self.get(False)

    def get_if(self, predicate: Callable[[V], object]) -> V:
        """Raises ``NotImplementedError``: a journaled queue does not offer this."""
        raise NotImplementedError("get_if(): a journaled queue has no conditional get")

    def get_future(self, timeout: float | None = None) -> Future[V]:
        """A future of the next item, which is committed when the future completes. ``cancel()`` loses no item."""
        from concurrent.futures import Future  # imported here: a program that does not use it must not pay for it

        outer: Future[V] = Future()
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
                except BaseException as trouble:  # the queue was closed, or an interrupt: the item comes again
                    self._dispatcher.unget(item)
                    outer.set_exception(trouble)
                    if not isinstance(trouble, Exception):
                        raise
                else:
                    outer.set_result(value)

        outer.add_done_callback(lambda done: inner.cancel() if done.cancelled() else None)
        inner.add_done_callback(arrive)
        return outer

    async def aget(self, timeout: float | None = None) -> V:
        """``get`` for asyncio, from any event loop. A cancelled task loses no item."""
        item = None
        try:
            item = await self._gets.aget(timeout)
            return self._done(item)
        except BaseException:  # as in get
            if item is not None:
                self._dispatcher.unget(item)
            raise

    def peek(self) -> V:
        """The value of the next item, which stays in the queue. Raises ``QueueEmpty``."""
        return self._reader.peek().value

    # -- the rest ----------------------------------------------------------------------------------------------------

    def task_done(self) -> None:
        """The work on an item of an earlier ``get`` is done, for ``join``. The get has committed the item already, so
        this changes nothing on disk. Raises ``ValueError`` if it is called more often than items were got from this
        object. Thread-safe.
        """
        with self._counting:
            if not self._taken:
                raise ValueError("task_done() called more often than items were got")
            self._taken -= 1

    def join(self, timeout: float | None = None) -> bool:
        """Return when no item is left, and ``task_done`` was called for each that was got from this object.

        Waits up to ``timeout`` seconds of real time (``None``: for ever); returns whether everything was done in time.
        Raises ``QueueClosed`` if the queue is closed while items are left: they stay in the journal.
        """
        return wait_until(
            lambda: not (self._reader.items or self._taken),  # in this order: a get counts before it commits
            self._dispatcher.backlog.check_usable,
            timeout,
        )

    def flush(self) -> int:
        """Drop all unread and aborted items; returns how many. Waiters stay in line."""
        return self._reader.flush()

    def evict_waiters(self) -> int:
        """Give ``QueueEmpty`` to all waiting consumers; returns how many there were."""
        return self._reader.evict_waiters()

    def qsize(self) -> int:
        """The number of unread items."""
        return max(0, self._reader.items - self._reader.open_items)  # a get in between is counted by the second alone

    def __len__(self) -> int:
        return self.qsize()

    def empty(self) -> bool:
        """True if there is no unread item."""
        return self.qsize() == 0

    def full(self) -> bool:
        """True if the reader has ``max_items`` items, so that a put would have to wait."""
        return 0 < self.maxsize <= self._reader.items

    @property
    def maxsize(self) -> int:
        """The reader's ``max_items``; 0 if it has none."""
        return self._reader.config.max_items or 0

    @property
    def waiter_count(self) -> int:
        """The number of consumers that wait in line."""
        return self._reader.waiter_count

    @property
    def dropped_count(self) -> int:
        """The number of items that were dropped to keep the limits."""
        return self._reader.stats().discarded

    def shutdown(self, immediate: bool = False) -> None:
        """Refuse puts from now on. Gets go on until the queue is empty; with ``immediate`` they end at once.

        Unlike in a queue in memory, no item is dropped: the items that are left stay in the journal. Idempotent.
        """
        self._shut = True
        if immediate:
            self._close()
        else:
            self._dispatcher.dismiss_empty_handed(self._shut_down())
            self._puts.look_again()  # producers that wait for room look again, and see the shutdown

    def close(self) -> None:
        """``shutdown(immediate=True)``: closes the journaled queue. Idempotent."""
        self.shutdown(immediate=True)

    def __enter__(self) -> JournaledBlockingQueue[V]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<JournaledBlockingQueue {self._puts.source.name}: {self.qsize()} items, {self.waiter_count} waiters>"


class _Gets(Waiting[Item]):
    """How consumers of a blocking queue wait: in the reader's line, unless the queue is shut down."""

    def __init__(self, face: JournaledBlockingQueue[Any]) -> None:
        self._face = face
        self._dispatcher = face._dispatcher
        self._clock = self._dispatcher._clock

    @property
    def _line(self) -> Line:  # type: ignore[override]  # the reader's line of the moment
        return self._dispatcher._line

    def _take_now(self) -> Item:
        try:
            return self._dispatcher._take_now()
        except QueueEmpty:
            if not self._face._shut:
                raise
        self._dispatcher.hand_off()  # it is shut down, so look again: all items put before the shutdown are there
        try:
            return self._dispatcher._take_now()
        except QueueEmpty:
            raise self._face._shut_down() from None

    def _enter(self, waiter: Waiter) -> None:
        self._dispatcher._enter(waiter)
        if self._face._shut:  # after entering: look again for the shutdown, and also for an item
            self._dispatcher.hand_off()
            if self._dispatcher._leave(waiter):
                raise self._face._shut_down()

    def _leave(self, waiter: Waiter) -> bool:
        return self._dispatcher._leave(waiter)

    def _leave_now(self, waiter: Waiter) -> bool | None:
        return self._dispatcher._leave_now(waiter)

    def _give_back(self, waiter: Waiter, item: Item) -> None:
        self._dispatcher._give_back(waiter, item)

    def _missed(self, waiter: Waiter) -> None:
        self._dispatcher._missed(waiter)
