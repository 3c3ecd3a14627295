"""``JournalStore``: an outbox without a database, on a ``WorkQueue``, in one process.

    journal_body    what the outbox knows of a job, and its payload, as the body of a job in the work queue
    journal_jobs    the jobs, what of them is in memory, and which state of the work queue is which status
    failed_jobs     those that have failed, in memory
    journal_puts    puts, and transactions that collect them
    journal_claims  the operations of consumers
    journal_admin   the operations of those who look at jobs

A queue of the outbox is a tube of the same name. The work queue is the caller's, who opens and closes it. Jobs of these
tubes are the outbox's: nobody else reserves, kicks or moves them. Whoever puts a body into one of the tubes puts a
payload.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakSet

from kestrelpy.outbox.errors import NotSupported, OutboxError
from kestrelpy.outbox.journal_admin import JournalAdmin
from kestrelpy.outbox.journal_claims import JournalClaims
from kestrelpy.outbox.journal_jobs import JournalJobs
from kestrelpy.outbox.journal_puts import JournalPuts, JournalTransaction

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from kestrelpy.outbox.core import OutboxCore
    from kestrelpy.outbox.queues import QueueConsumer
    from kestrelpy.outbox.sql import Compiler, Operation
    from kestrelpy.work import WorkQueue

__all__ = ["JournalStore"]

P = ParamSpec("P")
T = TypeVar("T")

CALLS = {"set_paused": "pause"}
"""How a user calls an operation that has another name."""
_bound: WeakSet[WorkQueue] = WeakSet()
"""Work queues that an outbox is bound to: a second one would not know what the first one knows in memory."""


class JournalStore:
    """A ``JobStore`` of jobs in a work queue.

    Raises ``ValueError`` for a queue with ``max_attempts`` or a codec, ``OutboxError`` for one that has an outbox
    already, ``UnsupportedFormat`` for jobs of a later version, and what the queue raises. Cost: O(jobs).
    """

    needs_connection = False
    has_relays = False

    def __init__(self, core: OutboxCore, queue: WorkQueue) -> None:
        if queue.max_attempts is not None:
            raise ValueError(
                f"a WorkQueue with max_attempts={queue.max_attempts} would bury jobs by itself: open it without, and "
                "use max_retries of the queues"
            )
        if queue.codec is not None:
            raise ValueError("an outbox writes the bodies of its jobs itself: open its WorkQueue without a codec")
        if queue in _bound:
            raise OutboxError(f"{queue!r} has an outbox already: close that one first")
        self._queue = queue
        self._jobs = JournalJobs(core, queue)
        self._claims = JournalClaims(self._jobs)
        admin = JournalAdmin(self._jobs)
        self._puts = JournalPuts(self._jobs, admin)
        self._operations: dict[str, Callable[..., Any]] = {}
        for part in (admin, self._claims):
            self._add(part)
        self._open: dict[object, JournalTransaction] = {}  # by thread or task: the transaction that it is in
        _bound.add(queue)

    @property
    def max_job_bytes(self) -> int:
        """Of the work queue."""
        return self._queue.max_job_bytes

    def _add(self, part: object) -> None:
        self._operations.update({name: getattr(part, name) for name in dir(part) if not name.startswith("_")})

    def extend(self, make: Callable[[JournalJobs, JournalClaims], object]) -> None:
        """Have also the operations of what this makes."""
        self._add(make(self._jobs, self._claims))

    # -- operations --------------------------------------------------------------------------------------------------

    def perform(
        self,
        connection: Any,
        operation: Callable[Concatenate[Compiler, P], Operation[T]],
        *args: P.args,
        **kw: P.kwargs,
    ) -> T:
        """On ``connection``: ``None``, or for puts a transaction of ``begin``.

        Raises ``TypeError`` for anything else, ``NotSupported`` for what a work queue does not have.
        """
        name = operation.__name__
        if connection is not None and not isinstance(connection, JournalTransaction):
            raise TypeError(
                "an outbox on a WorkQueue takes None or what its begin() gives, and no connection: "
                f"not {type(connection).__module__}.{type(connection).__qualname__}"
            )
        found: Any
        if name in ("put_one", "put_all"):
            where = self._puts if connection is None else connection.puts  # as with a connection of another engine
            found = getattr(where, name)(connection, *args, **kw)
        elif name not in self._operations:
            raise NotSupported(f"{name}()")
        elif connection is not None:
            raise NotSupported(f"{CALLS.get(name, name)}() within a transaction")
        else:
            found = self._operations[name](*args, **kw)
        result: T = found
        return result

    async def aperform(
        self,
        connection: Any,
        operation: Callable[Concatenate[Compiler, P], Operation[T]],
        *args: P.args,
        **kw: P.kwargs,
    ) -> T:
        """On a thread: it may wait for the disk. Within a transaction a put only collects."""
        if isinstance(connection, JournalTransaction):
            return self.perform(connection, operation, *args, **kw)
        return await self._wait(lambda: self.perform(connection, operation, *args, **kw))

    async def _wait(self, function: Callable[[], T]) -> T:
        """Call what may wait for the disk; under the test kit there are neither threads nor a disk."""
        return function() if self._jobs.core.is_virtual else await asyncio.to_thread(function)

    def check_consumer(self, consumer: QueueConsumer) -> None:
        """Raises ``NotSupported`` for a queue with an option that a work queue can't have."""
        options = consumer.options
        if options.transactional:
            raise NotSupported("transactional")
        if options.depends_on is not None:
            raise NotSupported("depends_on")
        if options.keep_done != 0 and "keep_done" in consumer.given:
            raise NotSupported("keep_done")

    # -- transactions ------------------------------------------------------------------------------------------------

    @contextmanager
    def begin(self) -> Iterator[JournalTransaction]:
        """A transaction: its puts are stored at the end of the block, and forgotten if the block raises.

        Raises ``OutboxError`` within another one of this thread or task.
        """
        with self._begun() as transaction:
            yield transaction
            transaction.commit()

    @asynccontextmanager
    async def abegin(self) -> AsyncIterator[JournalTransaction]:
        """``begin`` for asyncio."""
        with self._begun() as transaction:
            yield transaction
            await self._wait(transaction.commit)

    @contextmanager
    def _begun(self) -> Iterator[JournalTransaction]:
        owner = _owner()
        if owner in self._open:
            raise OutboxError("a transaction has begun here already: put on it, or leave its block first")
        transaction = self._open[owner] = JournalTransaction(self._puts)
        try:
            yield transaction
        finally:
            transaction.end()
            self._open.pop(owner, None)  # in a child that was forked within the block it is gone

    def on_this_loop(self) -> AbstractAsyncContextManager[None]:
        """It has nothing that belongs to a loop."""
        return nullcontext()

    def apart(self) -> AbstractContextManager[None]:
        """It has nothing that belongs to a thread."""
        return nullcontext()

    # -- its life ----------------------------------------------------------------------------------------------------

    def watch(self, on_due: Callable[[float], object] | None) -> bool:
        """Call ``on_due`` when a job may run, with the seconds until then; ``None``: no more."""
        self._jobs.on_due = on_due
        return True

    def check(self) -> None:
        """Raises ``OutboxError`` if the work queue is closed."""
        if self._queue.closed:
            raise OutboxError(f"{self._queue!r} is closed: the outbox needs it for as long as it runs")

    def create_tables(self) -> None:
        """There are none."""

    async def acreate_tables(self) -> None:
        """There are none."""

    def beside(self) -> JournalStore:
        """It has no connections."""
        return self

    async def leave_loop(self) -> None:
        """It has no connections."""

    def use_loop(self, loop: AbstractEventLoop | None) -> None:
        """It works in the thread that calls."""

    def close(self) -> None:
        """Give back what is claimed. The work queue stays open: it is the caller's."""
        self._jobs.close()
        _bound.discard(self._queue)

    async def aclose(self) -> None:
        await self._wait(self.close)

    def abandon(self) -> None:
        self._open.clear()
        self._jobs.abandon()


def _owner() -> object:
    """Who is in a transaction: the task, or the thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.get_ident() if task is None else task
