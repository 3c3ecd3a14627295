"""Takes batches from a reader: on the caller's thread, or on another thread while the batch before is processed.

Rules:
1. At most one batch is being taken. Its items are open reads. The caller that gets the batch must commit, abort or give
   back each of them.
2. If taking a batch raises, all its items are given back first, as if they had never been taken.
3. A batch is complete when it is full, or ``max_wait`` after its first item if the caller waits for it. While the batch
   before is processed, it continues to grow.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from kestrelpy._reading.reader import Reader, checkpointer_of
from kestrelpy.errors import KestrelError, QueueEmpty
from kestrelpy.item import Item
from kestrelpy.spark.buffer.batch_plan import BatchPlan
from kestrelpy.spark.buffer.rows import Rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SLICES = 20
"""How often, at least, a batch that is not full looks for more items during its ``max_wait``."""
LONGEST_SLICE = 0.05


class MicroBatch(NamedTuple):
    """Open reads in the order of their ids, and their DataFrame for ``process``, or the error that prevents it."""

    items: list[Item]
    frame: DataFrame | None
    objection: Exception | None


class Drain:
    """Takes batches from ``reader``, for one buffer. Not thread-safe, except ``stop``."""

    def __init__(self, reader: Reader, rows: Rows, max_items: int, max_bytes: int, max_wait: float) -> None:
        self._reader = reader
        self._dispatcher = checkpointer_of(reader).dispatcher
        self._rows = rows
        self._limits = max_items, max_bytes, max_wait
        self._wake = threading.Event()  # set when one of the next three flags is set
        self._stopping = self._hurried = False
        self._wanted = True  # the caller waits for the batch that is being taken
        self._thread: threading.Thread | None = None
        self._result: MicroBatch | BaseException | None = None

    def restart(self) -> None:
        """Undo ``stop``: later batches may wait for more items again."""
        self._stopping = False

    def stop(self) -> None:
        """Complete the batch that is being taken, and all later batches, without waiting for more items."""
        self._stopping = True
        self._wake.set()

    def begin(self, timeout: float) -> None:
        """Begin to take a batch, on another thread."""
        self._wanted = False
        self._prepare()
        self._thread = threading.Thread(target=self._take_there, args=(timeout,), daemon=True)
        self._thread.start()

    def take(self, timeout: float | None) -> MicroBatch:
        """The batch that ``begin`` has begun, or else a batch taken on this thread.

        Waits up to ``timeout`` seconds for its first item. Raises what the reader raises.
        """
        if self._thread is None:
            self._wanted = True
            self._prepare()
            return self._take(timeout)
        return self._collected()

    def drop(self) -> None:
        """Give back the batch that ``begin`` has begun, if there is one."""
        if self._thread is not None:
            self._hurried = True
            with contextlib.suppress(Exception):
                self.give_back(self._collected().items)

    def give_back(self, items: Iterable[Item]) -> None:
        """Put items back as if they had never been taken. Items that are not open any more stay as they are."""
        for item in items:
            self._dispatcher.unget(item)

    def take_planned(self, plan: BatchPlan) -> MicroBatch:
        """The remaining items of a batch that was planned earlier.

        The reader delivers them in the order of ids, before all items that were never taken. So an item with a later id
        shows that no more items of the batch will come. Raises ``KestrelError`` if another consumer has taken one of
        the items, and what the reader raises.
        """
        planned, last_id = set(plan.ids()), plan.spans[-1][1]
        hand: list[Item] = []
        try:
            self._take_up_to(last_id, len(planned), hand)
            found = _among(hand, planned)
            self._check_gone(plan, planned.difference(item.id for item in found))
        except BaseException:
            self.give_back(hand)
            raise
        self.give_back(item for item in hand if item.id not in planned)
        return self._batch(found)

    def _take_up_to(self, last_id: int, count: int, hand: list[Item]) -> None:
        """Take items until ``hand`` has an item with id ``last_id`` or later, or no item is there. A separate function,
        as ``_among``: docs/interrupts.md, rule 3.
        """
        with contextlib.suppress(QueueEmpty):
            self._take_on(last_id, count, hand)

    def _take_on(self, last_id: int, count: int, hand: list[Item]) -> None:
        while not hand or hand[-1].id < last_id:
            hand += self._reader.get_many(max(1, count - len(hand)), timeout=0)

    def _check_gone(self, plan: BatchPlan, ids: set[int]) -> None:
        backlog, source = self._dispatcher.backlog, self._dispatcher.source
        with backlog.lock:
            progress, visible_id = backlog.progress, source.visible_id
            missed = next((each for each in ids if each <= visible_id and not progress.is_done(each)), None)
        if missed is not None:
            raise KestrelError(f"item {missed} of batch {plan.batch_id} was taken by another consumer than its buffer")

    # -- one batch ---------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        self._hurried = False
        self._wake.clear()

    def _collected(self) -> MicroBatch:
        thread = self._thread
        assert thread is not None
        self._wanted = True
        self._wake.set()
        thread.join()
        result, self._thread, self._result = self._result, None, None
        if isinstance(result, BaseException):
            raise result
        assert result is not None
        return result

    def _take_there(self, timeout: float) -> None:
        try:
            self._result = self._take(timeout)
        except BaseException as error:
            self._result = error

    def _take(self, timeout: float | None) -> MicroBatch:
        items: list[Item] = []
        try:
            self._fill(items, timeout)
            return self._batch(items)
        except BaseException:
            self.give_back(items)
            raise

    def _fill(self, items: list[Item], timeout: float | None) -> None:
        max_items, max_bytes, max_wait = self._limits
        with contextlib.suppress(QueueEmpty):
            items += self._reader.get_many(max_items, max_bytes=max_bytes, timeout=timeout)
        size = sum(len(item.data) for item in items)
        deadline = time.monotonic() + max_wait
        while 0 < len(items) < max_items and size < max_bytes:
            left = deadline - time.monotonic()
            if self._stopping or self._hurried or (left <= 0 and self._wanted):
                break
            if self._wake.wait(min(left, max_wait / SLICES, LONGEST_SLICE) if left > 0 else LONGEST_SLICE):
                self._wake.clear()
                continue
            with contextlib.suppress(QueueEmpty):
                more = self._reader.get_many(max_items - len(items), max_bytes=max_bytes - size, timeout=0)
                items += more
                size += sum(len(item.data) for item in more)
        if size > max_bytes and len(items) > 1:  # a get takes at least one item
            self.give_back([items.pop()])

    def _batch(self, items: list[Item]) -> MicroBatch:
        if not items:
            return MicroBatch(items, None, None)
        try:
            return MicroBatch(items, self._rows.frame(items), None)
        except Exception as error:
            return MicroBatch(items, None, error)


def _among(items: list[Item], ids: set[int]) -> list[Item]:
    return [item for item in items if item.id in ids]
