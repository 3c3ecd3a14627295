"""``DriverBuffer``: items that producers in the driver put become micro-batches, delivered at least once each.

Rules:
1. The items of the queue are durable, and a batch is a claim on some of them. Before ``process`` sees batch n, first
   its items and then its plan (the exact ids, see ``batch_plan``) are on disk. So after any crash the same batch comes
   again, with the same id.
2. One ``commit_many`` commits all ids of a batch. So every checkpoint of the reader has all of them or none.
3. The plan of batch n + 1 is saved only when the commit of batch n is known to be on disk. So there is one plan at a
   time, and only its batch may lack a commit.
4. A plan may have no mark although the reader says that all its items are done. Then its batch is finished, but the
   reader's checkpoint is made durable first: a process that was killed may have left it in the page cache only.
5. While batch n is processed, the items of the next batch are taken (see ``drain``) but not planned. If batch n fails,
   these items go back as if they had never been taken. The items of batch n go back as aborted, and come first.

A batch that comes again does not have the items that are gone by then: items that have expired, that an ``on_abort``
hook took, or that a flush or a seek skipped. It never has additional items.

NOTE ON LOCKING: a step (taking a batch, processing it, committing it) is made by the one thread that has claimed the
reader in ``_claimed``, without a lock. ``_changed`` is for threads that wait for a step to end. A thread that holds it
may take the reader's lock.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from kestrelpy import _logging
from kestrelpy._process import reset_after_fork
from kestrelpy._reading.reader import Reader, checkpointer_of
from kestrelpy.config import Codec
from kestrelpy.errors import KestrelError, UnknownItem
from kestrelpy.item import Item
from kestrelpy.queue import JournaledQueue
from kestrelpy.spark.buffer.batch_plan import BatchPlan, PlanFile, spans_of
from kestrelpy.spark.buffer.drain import Drain, MicroBatch
from kestrelpy.spark.buffer.rows import Rows, UndecodableItem

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

__all__ = ["DriverBuffer", "UndecodableItem"]

Process = Callable[["DataFrame", int], object]

IDLE = 0.1
"""How long the thread waits for the first item of a batch before it looks at ``stop()`` again, in seconds."""
_claiming = threading.Lock()
_claimed: weakref.WeakSet[Reader] = weakref.WeakSet()  # guarded by _claiming


def _reset_after_fork() -> None:
    """In a forked child: make a new lock. Another thread of the parent may have held the old one, and is not here."""
    global _claiming, _claimed
    _claiming, _claimed = threading.Lock(), weakref.WeakSet()


reset_after_fork(_reset_after_fork)


class DriverBuffer:
    """Delivers the items of a queue of this process in micro-batches: calls ``process(df, batch_id)`` for each.

    ``queue_or_reader``: a ``JournaledQueue``, whose default reader is drained, or a ``Reader`` (also one from
    ``open_reader``). The buffer must be the only consumer of that reader. ``process`` is called on the buffer's own
    thread. If ``process`` returns, the batch is committed, durably. If it raises, all items of the batch are aborted
    (``error_count`` + 1), and the same batch comes again after ``backoff[0]`` seconds. The pause doubles with each
    failure, up to ``backoff[1]``.

    **Batch ids** begin at 0 and rise by one. After a crash, a batch whose commit was not on disk comes again with the
    same id and the same items (except items that have expired), before any other batch. So code that stores the last
    batch id with its results, or that overwrites by batch id, has every item exactly once. The last plan is in the file
    ``QUEUE+READER.batch`` beside the queue's files. ``erase()`` of the queue leaves this file, so batch ids continue if
    the queue is made again. Stop the buffer before you ``seek``.

    A batch has at most ``max_items`` items and ``max_bytes`` of data; an item that is larger is a batch alone. A batch
    is complete when it is full, or when ``max_wait`` seconds have passed since its first item was taken and the batch
    before is done. At most two batches are in memory: the one that is processed, and the next one, which is taken
    meanwhile.

    **Columns**: ``id bigint, added timestamp, expires timestamp, error_count int``, then ``data binary``. With a
    ``codec`` (or a ``schema`` and the queue's own codec) the data is decoded: into the columns of ``schema`` (a
    ``StructType`` or its DDL; values are dicts, tuples, or of a declared type, which has its fields), or without a
    schema into one column ``value``. A column of the schema replaces a column of the item with the same name. Data that
    cannot be decoded raises ``UndecodableItem`` and fails its batch, as ``process`` does. To continue after such an
    item, let a ``ReaderConfig(on_abort=...)`` take items with a high ``error_count`` (dead letters), or decode it in
    Spark.

    Thread-safe. Raises ``ValueError`` for an option out of range or a reader that has a buffer already, and what
    ``JournaledQueue.reader`` raises.
    """

    def __init__(
        self,
        queue_or_reader: JournaledQueue | Reader,
        spark: SparkSession,
        process: Process,
        *,
        max_items: int = 10_000,
        max_bytes: int = 32 << 20,
        max_wait: float = 1.0,
        schema: StructType | str | None = None,
        codec: Codec | None = None,
        backoff: tuple[float, float] = (0.1, 30.0),
    ) -> None:
        if max_items < 1 or not 1 <= max_bytes <= 1 << 30:
            raise ValueError(
                f"max_items must be at least 1, and max_bytes 1 to 1 GiB, not {max_items!r} and {max_bytes!r}"
            )
        if not max_wait >= 0 or not 0 <= backoff[0] <= backoff[1]:
            raise ValueError(
                f"max_wait must be seconds, and backoff two rising numbers of seconds, not {max_wait!r} and {backoff!r}"
            )
        reader = queue_or_reader.reader() if isinstance(queue_or_reader, JournaledQueue) else queue_or_reader
        if not isinstance(reader, Reader):  # a WorkQueue, say: its jobs are reserved through sessions
            raise TypeError(f"a DriverBuffer drains a JournaledQueue or one of its readers, not {queue_or_reader!r}")
        self._reader = reader
        self._process = process
        self._drain = Drain(reader, Rows(spark, schema, codec), max_items, max_bytes, max_wait)
        self._backoff = backoff
        self._dispatcher = checkpointer_of(reader).dispatcher
        source = self._dispatcher.source
        self._file = PlanFile(source.directory, source.name, reader.name)
        self._plan: BatchPlan | None = None  # the last one
        self._loaded = False
        self._is_unfinished = False  # a commit may not be on disk yet
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.items = 0
        """How many items this object has committed."""
        self.batches = 0
        """How many batches this object has committed."""
        self.failures = 0
        """How many times taking, processing or committing a batch failed."""
        self.error: BaseException | None = None
        """The error of the last failure, or the error that ended the buffer; ``None`` once a batch was committed."""

    # -- running -----------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """True while the thread runs: from ``start()`` until ``stop()``, or until the reader becomes unusable."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def batch_id(self) -> int | None:
        """The id of the last batch that was planned; ``None`` before the first."""
        return self._plan.batch_id if self._plan is not None else None

    def start(self) -> DriverBuffer:
        """Start to take and process batches, on a thread of the buffer. Returns this object.

        Raises ``RuntimeError`` if the buffer runs already, ``ValueError`` if another buffer drains the same reader.
        """
        with self._changed:
            if self.running:
                raise RuntimeError("this buffer is running already")
            self._claim()
            self._stopping.clear()
            self._drain.restart()
            self.error = None
            name = f"kestrelpy-buffer-{self._reader.full_name}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                self._thread.start()
            except BaseException:
                self._release_all()
                raise
        return self

    def stop(self, timeout: float | None = None) -> bool:
        """Stop after the current batch: it is still committed or aborted. Returns true if the thread has ended.

        Waits at most ``timeout`` seconds (``None``: as long as ``process`` takes). If this returns false, the batch is
        still being processed, and ``stop`` may be called again. Unread items stay in the queue. Idempotent. ``process``
        may call ``stop``, which then returns false at once.
        """
        self._stopping.set()
        self._drain.stop()
        thread = self._thread
        if thread is threading.current_thread():
            return False
        if thread is not None:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Return true as soon as no item is unread, open or uncommitted, and false if ``timeout`` seconds pass first.

        If the buffer does not run and items are left, raises the error that ended the buffer, or ``RuntimeError``.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._changed:
                running = self.running
                if not self._reader.items and not self._is_unfinished:
                    return True
                left = IDLE if deadline is None else min(IDLE, deadline - time.monotonic())
                if running and left > 0:
                    self._changed.wait(left)
                    continue
            if running:
                return False
            raise self.error or RuntimeError("this buffer is not running, and items are left")

    def run_once(self, timeout: float | None = 0) -> int:
        """Take one batch and process it on this thread. Returns its number of items, 0 if no item came in time.

        Waits up to ``timeout`` seconds for the first item. If ``process`` raises, aborts the batch and raises the same
        error; the next call gets the same batch. Raises ``RuntimeError`` if the buffer runs.
        """
        with self._changed:
            if self.running:
                raise RuntimeError("this buffer is running already")
            self._claim()
        self._drain.restart()
        try:
            return self._tried(timeout)
        finally:
            self._release_all()

    def __enter__(self) -> DriverBuffer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop. If an error ended the buffer before, and the block raised nothing, raise that error."""
        ended = not self.running
        self.stop()
        if ended and error is None and self.error is not None:
            raise self.error

    def _claim(self) -> None:
        with _claiming:
            if self._reader in _claimed:
                raise ValueError(f"another buffer drains {self._reader.full_name!r}")
            _claimed.add(self._reader)

    def _release_all(self) -> None:
        self._drain.drop()
        with _claiming:
            _claimed.discard(self._reader)
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        """The buffer's thread: batch after batch, with a pause after a failure."""
        pause = 0.0
        try:
            while not self._stopping.is_set():
                try:
                    taken = self._tried(IDLE, ahead=True)
                except Exception:
                    if self._dispatcher.broken is not None:  # the reader is not usable any more
                        break
                    if pause == 0.0:
                        _logging.warning(
                            "a batch of %s failed and will be tried again", self._reader.full_name, error=True
                        )
                    pause = min(max(2 * pause, self._backoff[0]), self._backoff[1])
                    self._stopping.wait(pause)
                else:
                    pause = 0.0 if taken else pause
        finally:
            self._release_all()

    # -- a step ------------------------------------------------------------------------------------------------------

    def _tried(self, timeout: float | None, *, ahead: bool = False) -> int:
        try:
            taken = self._step(timeout, ahead=ahead)
        except BaseException as error:
            self.error = error
            self.failures += 1
            raise
        finally:
            with self._changed:
                self._changed.notify_all()
        if taken:
            self.error = None
        return taken

    def _step(self, timeout: float | None, *, ahead: bool) -> int:
        """Do one batch, up to its durable commit. Returns its number of items. After an error no item of it is open.

        ``ahead``: take the next batch meanwhile.
        """
        self._finish_plan()
        batch = self._next(timeout)
        if not batch.items:
            return 0
        try:
            plan = self._planned(batch)
            if ahead and not self._stopping.is_set():
                self._drain.begin(IDLE)
        except BaseException:
            self._drain.give_back(batch.items)
            raise
        try:
            if batch.objection is not None:
                raise batch.objection
            self._process(batch.frame, plan.batch_id)  # type: ignore[arg-type]  # there is a frame or an objection
            self._commit(batch.items, plan)
        except BaseException:
            self._drain.drop()
            self._abort(batch.items)
            raise
        self.items += len(batch.items)
        self.batches += 1
        self._finish_plan()
        return len(batch.items)

    def _commit(self, items: list[Item], plan: BatchPlan) -> None:
        self._is_unfinished = True  # set before the items are committed, for wait_idle()
        try:
            self._reader.commit_many(items)
        except BaseException as error:
            self._is_unfinished = False
            if isinstance(error, UnknownItem):  # the reader was moved meanwhile: items left over come in another batch
                self._plan = self._file.finish(plan)
            raise

    def _next(self, timeout: float | None) -> MicroBatch:
        """The batch that is planned and not finished, if there is one; else a new batch."""
        plan = self._plan
        if plan is not None and not plan.finished:
            batch = self._drain.take_planned(plan)
            if batch.items:
                return batch
            self._is_unfinished = True  # rule 4
            self._finish_plan()
        return self._drain.take(timeout)

    def _planned(self, batch: MicroBatch) -> BatchPlan:
        """The plan of ``batch``; a new plan is saved first (rules 1 and 3)."""
        plan = self._plan
        if plan is not None and not plan.finished:
            return plan
        source = self._dispatcher.source
        source.make_durable(batch.items[-1].id)
        batch_id = 0 if plan is None else plan.batch_id + 1
        plan = BatchPlan(source.queue_id, batch_id, spans_of(item.id for item in batch.items))
        try:
            self._file.save(plan)
        except OSError:
            self._dispatcher.backlog.check_usable()  # closing the queue meanwhile closes its folder
            raise
        self._plan = plan
        return plan

    def _finish_plan(self) -> None:
        """Make the last commit durable, if it may not be on disk, and mark its plan as finished (rule 3)."""
        if not self._loaded:
            self._load()
        if self._is_unfinished:
            self._reader.checkpoint(durable=True)
            assert self._plan is not None
            self._plan = self._file.finish(self._plan)
            self._is_unfinished = False

    def _load(self) -> None:
        plan = self._file.load()
        if plan is not None and plan.queue_id != self._dispatcher.source.queue_id:
            plan = plan._replace(finished=True)  # of another queue of this name: only its number counts
        self._plan, self._loaded = plan, True

    def _abort(self, items: Iterable[Item]) -> None:
        for item in items:
            with contextlib.suppress(KestrelError):  # the reader was moved or closed: items not done come again
                self._reader.abort(item)
