"""``Outbox``: jobs in the caller's own transaction, and what runs, looks at and mends them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from operator import index
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

from kestrelpy import Clock
from kestrelpy._process import forget, remember
from kestrelpy.errors import QueueClosed
from kestrelpy.outbox import admin, reports
from kestrelpy.outbox.core import OutboxCore, Settings, put_options
from kestrelpy.outbox.errors import OutboxError
from kestrelpy.outbox.job import Job
from kestrelpy.outbox.lifecycle import EXIT_SECONDS, Lifecycle
from kestrelpy.outbox.puts import put_all, put_one
from kestrelpy.outbox.queues import check_handler, check_name

if TYPE_CHECKING:
    from sqlalchemy import MetaData

    from kestrelpy.outbox.results import Health, QueueCount, RetryStats, Times
    from kestrelpy.outbox.sql import Operation
    from kestrelpy.outbox.store import JobStore

__all__ = ["Outbox"]

H = TypeVar("H", bound=Callable[..., Any])
T = TypeVar("T")


class Outbox:
    """Jobs that are put in the transaction that changes the caller's own data, and run by consumers.

    ``bind``: an ``Engine`` or ``AsyncEngine`` of SQLAlchemy, a URL (the outbox then owns the engine), a ``WorkQueue``,
    or ``None`` and ``bind(...)`` later. ``table``, ``schema``: where the jobs are, ``[A-Za-z_][A-Za-z0-9_]{0,40}``.
    ``context``: context variables and ``Carrier`` objects whose values go with each job. ``lease``: seconds after which
    a job of a dead process is run again. Options of queues are defaults for all queues. docs/outbox.md has them all.

    Raises ``InvalidName``, ``TypeError``, ``ValueError``, ``UnsupportedDatabase``, and ``MissingPackage`` where an
    extra is not installed. Thread-safe; a context manager.
    """

    def __init__(
        self,
        bind: Any = None,
        *,
        table: str = "kestrel_jobs",
        schema: str | None = None,
        context: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
        lease: float = 30.0,
        notify: bool = True,
        listen_url: Any = None,
        health_grace: float = 600.0,
        healthy_error_age: float = 900.0,
        on_system_error: Callable[[], object] | None = None,
        on_system_recovery: Callable[[], object] | None = None,
        error_text: str = "full",
        **queue_options: Any,
    ) -> None:
        settings = Settings(
            lease=lease,
            notify=notify,
            listen_url=listen_url,
            health_grace=health_grace,
            healthy_error_age=healthy_error_age,
            on_system_error=on_system_error,
            on_system_recovery=on_system_recovery,
            error_text=error_text,
        )
        self.core = OutboxCore(table, schema, context, clock, settings, queue_options)
        self._is_closed = False
        self._is_ending = False  # the interpreter is
        self._lifecycle = Lifecycle(self.core)
        if bind is not None:
            self.bind(bind)
        remember(self, must_close=False)

    # -- opening -----------------------------------------------------------------------------------------------------

    def bind(self, bind: Any) -> None:
        """Bind an outbox that was made without. Raises ``OutboxError`` if it is bound already; else as ``Outbox``."""
        self._check_open()
        if self.core.is_virtual:
            return
        if self.core.store is not None:
            raise OutboxError("this outbox is bound already")
        from kestrelpy.outbox.binding import open_store

        store = open_store(self.core, bind)
        try:
            self.core.check_supported(store)
        except BaseException:
            store.close()
            raise
        self.core.store = store

    @property
    def metadata(self) -> MetaData:
        """SQLAlchemy's ``MetaData`` of the tables, for Alembic's ``target_metadata``."""
        return self.core.tables.metadata

    def create_tables(self) -> None:
        """Create the tables that are missing, with their indexes. Any number of processes may call it at once.

        Raises ``UnsupportedFormat`` for tables of a newer version, ``UnsupportedDatabase``, and what the driver raises.
        """
        self._open_store().create_tables()

    async def acreate_tables(self) -> None:
        """``create_tables`` for asyncio."""
        await self._open_store().acreate_tables()

    def close(self) -> None:
        """Stop, and dispose of an engine that was made from a URL. A second call does nothing."""
        if self._is_closed or self.core.is_virtual:
            return
        self.stop(EXIT_SECONDS if self._is_ending else None)
        self._is_closed = True
        forget(self)
        if self.core.store is not None:
            self.core.store.close()

    async def aclose(self) -> None:
        """``close`` for asyncio."""
        if self._is_closed or self.core.is_virtual:
            return
        await self.astop()
        self._is_closed = True
        forget(self)
        if self.core.store is not None:
            await self.core.store.aclose()

    def __enter__(self) -> Outbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Outbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _dismiss(self, error: QueueClosed) -> None:  # noqa: ARG002 - its name is part of the protocol
        """The interpreter is ending. Handlers go on for a while, until ``close``."""
        self._is_ending = True
        self._lifecycle.begin_stop(EXIT_SECONDS)

    def _abandon(self) -> None:
        """In a forked child: stopped, with its registrations; the parent's connections are not touched."""
        remember(self, must_close=False)  # in the child there may be another fork
        self._lifecycle.abandon()
        self.core.abandon()

    def _check_open(self) -> None:
        if self._is_closed:
            raise OutboxError("this outbox is closed")

    def _open_store(self) -> JobStore:
        self._check_open()
        return self.core.open_store()

    def _perform(self, connection: Any, operation: Callable[..., Operation[T]], *args: Any, **kw: Any) -> T:
        return self._open_store().perform(connection, operation, *args, **kw)

    async def _aperform(self, connection: Any, operation: Callable[..., Operation[T]], *args: Any, **kw: Any) -> T:
        return await self._open_store().aperform(connection, operation, *args, **kw)

    # -- queues ------------------------------------------------------------------------------------------------------

    def consumer(self, queue: str, **options: Any) -> Callable[[H], H]:
        """Register the decorated function, ``def`` or ``async def``, as the consumer of ``queue``.

        It is called with the payload, or with the payload and a connection if ``transactional``. Whatever it returns is
        success; an exception is failure. Raises ``ValueError`` if the queue has a consumer, ``InvalidName``,
        ``TypeError``.
        """

        def register(handler: H) -> H:
            self.add_consumer(queue, handler, **options)
            return handler

        return register

    def add_consumer(self, queue: str, handler: Callable[..., Any], *, replace: bool = False, **options: Any) -> None:
        """``consumer`` as a call, also while running. ``replace``: instead of the consumer that the queue has."""
        check_handler(handler)
        self.core.queues.add(queue, handler, options, replace=replace)
        self._lifecycle.wake()

    def remove_consumer(self, queue: str) -> None:
        """Claim no more jobs of ``queue``. It stays declared. Raises ``UnknownQueue`` if it has no consumer."""
        self.core.queues.remove(queue)

    def queue(self, name: str, **options: Any) -> None:
        """Declare a queue that other processes consume. Raises ``InvalidName``, ``TypeError``, ``ValueError``."""
        self.core.queues.add(name, None, options)

    def add_relay(
        self,
        queue: str,
        directory: str | PathLike[str],
        into: str,
        *,
        name: str | None = None,
        batch: int = 1000,
        encode: Callable[[Job], bytes | str] | None = None,
        delete: bool = True,
    ) -> None:
        """Move the jobs of ``queue`` into the ``JournaledQueue`` ``into`` of ``directory``, each exactly once, while
        the outbox runs. Also while it runs already.

        An item is the payload as it is stored, or what ``encode`` makes of the job. ``name``: two relays of one name in
        a database are one. ``delete``: what was moved; else it is done, and kept for ``keep_done``.
        docs/relay.md has the promises. Raises ``ValueError`` if the queue has a consumer or a relay, ``InvalidName``.
        """
        from kestrelpy.outbox.relay import Relay

        made = Relay(self.core, queue, directory, into, name=name, batch=batch, encode=encode, delete=delete)
        self.core.add_relay(made)
        self._lifecycle.wake()

    # -- putting -----------------------------------------------------------------------------------------------------

    def put(
        self,
        connection: Any,
        queue: str | Callable[..., Any],
        payload: Any = None,
        *,
        key: str | None = None,
        if_exists: str = "raise",
        depends_on: Any = None,
        group: str | None = None,
        lane: str | None = None,
        priority: int = 0,
        delay: float = 0,
        at_ms: int | None = None,
    ) -> Job:
        """Put a job in the transaction of ``connection``: it is there when that commits, and not if it does not.

        ``connection``: a ``Connection`` or ``Session`` of SQLAlchemy, a ``sqlite3.Connection`` or a
        ``psycopg.Connection``; on a ``WorkQueue`` what ``begin`` gives, or ``None``: it is stored at once. ``queue``: a
        name, or the function that consumes it. ``key``: unique in the queue as long as the row is there; ``if_exists``:
        ``"raise"``, ``"return"`` the job there (its ``is_new`` is False), or ``"replace"`` its payload, priority and
        due time. ``depends_on``: a ``Job``, an id, or a queue and a key, which must be done first. ``lane``: jobs of
        one lane run one at a time, in their order. ``priority``: smaller is more urgent. ``delay``: seconds;
        ``at_ms``: an instant instead.

        It neither commits nor rolls back. When it raises one of these, nothing was written, and the transaction can go
        on: ``UnknownQueue``, ``InvalidPayload``, ``JobTooBig``, ``DuplicateJob``, ``UnknownDependency``,
        ``NotInTransaction``, ``NotSupported``, ``ValueError``, ``TypeError``.
        """
        new, payloads = self.core.prepare(
            queue,
            (payload,),
            (key,),
            if_exists=if_exists,
            depends_on=depends_on,
            group=group,
            lane=lane,
            priority=priority,
            delay=delay,
            at_ms=at_ms,
        )
        row, is_new = self._perform(self.core.needed(connection), put_one, new, payloads[0])
        return self.core.job(row, is_new=is_new)

    async def aput(self, connection: Any, queue: str | Callable[..., Any], payload: Any = None, **options: Any) -> Job:
        """``put`` on an ``AsyncConnection`` or ``AsyncSession`` of SQLAlchemy, or a ``psycopg.AsyncConnection``."""
        new, payloads = self.core.prepare(queue, (payload,), (options.pop("key", None),), **put_options(options))
        row, is_new = await self._aperform(self.core.needed(connection, "abegin"), put_one, new, payloads[0])
        return self.core.job(row, is_new=is_new)

    def put_many(
        self,
        connection: Any,
        queue: str | Callable[..., Any],
        payloads: Sequence[Any],
        *,
        keys: Sequence[str | None] | None = None,
        **options: Any,
    ) -> list[Job]:
        """``put`` of many payloads, all of them or none. ``keys``: one for each payload. All are checked first.

        The options are those of ``put``, for all of the jobs. Raises ``ValueError`` for a key that is there twice, and
        what ``put`` raises. No payloads are no error.
        """
        new, made = self.core.prepare_many(queue, payloads, keys, options)
        self.core.needed(connection)
        found = self._perform(connection, put_all, new, made) if made else []
        return [self.core.job(row, is_new=is_new) for row, is_new in found]

    async def aput_many(
        self,
        connection: Any,
        queue: str | Callable[..., Any],
        payloads: Sequence[Any],
        *,
        keys: Sequence[str | None] | None = None,
        **options: Any,
    ) -> list[Job]:
        """``put_many`` for asyncio."""
        new, made = self.core.prepare_many(queue, payloads, keys, options)
        self.core.needed(connection, "abegin")
        found = await self._aperform(connection, put_all, new, made) if made else []
        return [self.core.job(row, is_new=is_new) for row, is_new in found]

    def begin(self) -> AbstractContextManager[Any]:
        """A transaction for callers who have none: its connection, committed at the end of the block, rolled back if
        that raises. On a ``WorkQueue`` it collects puts, and stores them at the end of the block as one batch.
        """
        return self._open_store().begin()

    def abegin(self) -> AbstractAsyncContextManager[Any]:
        """``begin`` for asyncio."""
        return self._open_store().abegin()

    # -- running -----------------------------------------------------------------------------------------------------

    def start(
        self,
        queues: Iterable[str] | None = None,
        *,
        threads: int = 4,
        prefetch: int | None = None,
        poll_interval: float | None = None,
        retry_interval: float = 1.0,
    ) -> None:
        """Run the jobs of the queues consumed here (``queues``: of these only) in threads, until ``stop``.

        ``threads``: for ``def`` handlers; those that are ``async`` run on an event loop on a thread of its own.
        ``prefetch``: how many jobs to claim ahead; ``None``: as many as were finished in the last 50 ms.
        ``poll_interval``: seconds between looks for what no notification came for; ``None``: 5, or 1 where nothing
        notifies. ``retry_interval``: seconds between two passes over failed jobs. A second call does nothing.

        Raises ``OutboxError`` before ``create_tables``, ``TypeError``, ``ValueError``.
        """
        self._check_open()
        self._lifecycle.start(
            queues,
            threads=threads,
            prefetch=prefetch,
            poll_interval=poll_interval,
            retry_interval=retry_interval,
        )

    async def astart(self, queues: Iterable[str] | None = None, **options: Any) -> None:
        """``start`` with the ``async`` handlers on the calling event loop."""
        self._check_open()
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._lifecycle.start, queues, loop=loop, **options)

    def stop(self, timeout: float | None = None) -> bool:
        """Claim no more jobs, and wait for the handlers that run. What was claimed and not begun is given back.

        After ``timeout`` seconds ``async`` handlers are cancelled, and the jobs of the others are given back. Returns
        True if nothing was left running. Never takes longer than ``timeout`` and a second. Called in a handler it does
        not wait, as that handler is running: False. Interrupted, it goes on by itself; call it again to wait. Raises
        ``OutboxError`` on the event loop of ``astart``, which it would block: use ``astop`` there.
        """
        return self._lifecycle.stop(timeout)

    async def astop(self, timeout: float | None = None) -> bool:
        """``stop`` for asyncio."""
        if not self._lifecycle.is_running:
            return True
        try:
            return await asyncio.to_thread(self.stop, timeout)
        finally:
            await self.core.open_store().leave_loop()

    @contextlib.contextmanager
    def running(self, queues: Iterable[str] | None = None, **options: Any) -> Iterator[Outbox]:
        """``start`` at the beginning of the block, ``stop`` at its end."""
        self.start(queues, **options)
        try:
            yield self
        finally:
            self.stop()

    @contextlib.asynccontextmanager
    async def arunning(self, queues: Iterable[str] | None = None, **options: Any) -> AsyncIterator[Outbox]:
        """``running`` for asyncio."""
        await self.astart(queues, **options)
        try:
            yield self
        finally:
            await self.astop()

    def run(self, queues: Iterable[str] | None = None, **options: Any) -> None:
        """Run jobs until SIGTERM or SIGINT; then drain and return. A second signal ends the process now. Raises
        ``OutboxError`` outside of the main thread.
        """
        from kestrelpy.outbox.signals import check_thread, until_signal

        if self.core.is_virtual:
            return
        check_thread("run", "start")
        try:
            until_signal(partial(self.start, queues, **options), self.stop)
        except BaseException:  # the second signal, perhaps
            self.stop(0)
            raise

    async def arun(self, queues: Iterable[str] | None = None, **options: Any) -> None:
        """``run`` for asyncio."""
        from kestrelpy.outbox.signals import auntil_signal, check_thread

        if self.core.is_virtual:
            return
        check_thread("arun", "astart")
        try:
            await auntil_signal(partial(self.astart, queues, **options), self.astop)
        except BaseException:
            await self.astop(0)
            raise

    # -- looking and mending -----------------------------------------------------------------------------------------

    def get(self, job_id: int, *, connection: Any = None) -> Job:
        """A job by its id. Raises ``JobNotFound``."""
        return self.core.job(self._perform(connection, admin.get, index(job_id)))

    async def aget(self, job_id: int, *, connection: Any = None) -> Job:
        """``get`` for asyncio."""
        return self.core.job(await self._aperform(connection, admin.get, index(job_id)))

    def find(self, queue: str, key: str, *, connection: Any = None) -> Job:
        """A job by its queue and key. Raises ``JobNotFound``, ``TypeError``, ``ValueError``."""
        return self.core.job(self._perform(connection, admin.find, check_name(queue), admin.check_key(key)))

    async def afind(self, queue: str, key: str, *, connection: Any = None) -> Job:
        """``find`` for asyncio."""
        return self.core.job(await self._aperform(connection, admin.find, check_name(queue), admin.check_key(key)))

    def jobs(
        self,
        queue: str | None = None,
        *,
        status: str | None = None,
        group: str | None = None,
        limit: int = 100,
        after_id: int = 0,
        connection: Any = None,
    ) -> list[Job]:
        """Jobs by id, from the one after ``after_id`` on. Raises ``ValueError`` for a status that there is not."""
        rows = self._perform(connection, admin.jobs, *admin.wanted(queue, status, group, limit, after_id))
        return [self.core.job(row) for row in rows]

    async def ajobs(self, queue: str | None = None, *, connection: Any = None, **options: Any) -> list[Job]:
        """``jobs`` for asyncio."""
        rows = await self._aperform(connection, admin.jobs, *admin.wanted(queue, **options))
        return [self.core.job(row) for row in rows]

    def errors(self, queue: str | None = None, *, limit: int | None = None, connection: Any = None) -> list[Job]:
        """Jobs in error or dead, the oldest failure first; at most ``limit``, if it is given."""
        rows = self._perform(connection, admin.errors, *admin.wanted_errors(queue, limit))
        return [self.core.job(row) for row in rows]

    async def aerrors(self, queue: str | None = None, *, limit: int | None = None, connection: Any = None) -> list[Job]:
        """``errors`` for asyncio."""
        rows = await self._aperform(connection, admin.errors, *admin.wanted_errors(queue, limit))
        return [self.core.job(row) for row in rows]

    def retry(self, job_id: int, *, connection: Any = None) -> bool:
        """Make a job ready now that is in error, dead, cancelled or done; its tries begin at 0. Where the job that it
        depends on is not done, it waits for that.

        False while it is ready, waiting or running. Raises ``JobNotFound``.
        """
        return self._perform(connection, admin.retry, index(job_id))

    async def aretry(self, job_id: int, *, connection: Any = None) -> bool:
        """``retry`` for asyncio."""
        return await self._aperform(connection, admin.retry, index(job_id))

    def retry_all(self, queue: str, status: str = "dead", *, connection: Any = None) -> int:
        """``retry`` of all jobs of ``queue`` in ``status``: error, dead, cancelled or done. Returns how many."""
        return self._perform(connection, admin.retry_all, check_name(queue), admin.check_ended(status))

    async def aretry_all(self, queue: str, status: str = "dead", *, connection: Any = None) -> int:
        """``retry_all`` for asyncio."""
        return await self._aperform(connection, admin.retry_all, check_name(queue), admin.check_ended(status))

    def retry_one(self, queue: str) -> Job | None:
        """Run the job of ``queue`` that fails longest, in the calling thread, due or not, worn out or not.

        Returns it as it is afterwards; ``None`` if no job is in error or dead, or if it was done and deleted. Raises
        ``UnknownQueue`` if the queue is not consumed here.
        """
        self._check_open()
        from kestrelpy.outbox.by_hand import retry_one

        return retry_one(self.core, self.core.queues.find(queue))

    async def aretry_one(self, queue: str) -> Job | None:
        """``retry_one`` for asyncio."""
        self._check_open()
        from kestrelpy.outbox.by_hand import aretry_one

        return await aretry_one(self.core, self.core.queues.find(queue))

    def cancel(self, job_id: int, *, connection: Any = None) -> bool:
        """Cancel a job that is ready, waiting, in error or dead; False for another one. Raises ``JobNotFound``."""
        return self._perform(connection, admin.cancel, index(job_id))

    async def acancel(self, job_id: int, *, connection: Any = None) -> bool:
        """``cancel`` for asyncio."""
        return await self._aperform(connection, admin.cancel, index(job_id))

    def prune(self, *, connection: Any = None) -> int:
        """Delete the jobs of the queues known here that ended longer ago than ``keep_done`` (done and cancelled) or
        ``keep_dead``. Returns how many. A running outbox does so each minute.
        """
        self._check_open()
        total = 0
        for which in admin.prunable(self.core.queues.all()):
            deleted = admin.SLICE
            while deleted == admin.SLICE:
                deleted = self._perform(connection, admin.prune, *which)
                total += deleted
        return total

    async def aprune(self, *, connection: Any = None) -> int:
        """``prune`` for asyncio."""
        self._check_open()
        total = 0
        for which in admin.prunable(self.core.queues.all()):
            deleted = admin.SLICE
            while deleted == admin.SLICE:
                deleted = await self._aperform(connection, admin.prune, *which)
                total += deleted
        return total

    def pause(self, queue: str, *, connection: Any = None) -> None:
        """Claim no jobs of ``queue`` in any process, until ``resume``. Jobs that run go on."""
        self._perform(connection, admin.set_paused, check_name(queue), True)

    async def apause(self, queue: str, *, connection: Any = None) -> None:
        """``pause`` for asyncio."""
        await self._aperform(connection, admin.set_paused, check_name(queue), True)

    def resume(self, queue: str, *, connection: Any = None) -> None:
        """End a pause."""
        self._perform(connection, admin.set_paused, check_name(queue), False)

    async def aresume(self, queue: str, *, connection: Any = None) -> None:
        """``resume`` for asyncio."""
        await self._aperform(connection, admin.set_paused, check_name(queue), False)

    # -- reports -----------------------------------------------------------------------------------------------------

    def stats(self, queue: str | None = None, *, connection: Any = None) -> list[QueueCount]:
        """How many jobs of each queue are in each status, sorted by both, without zeros. It reads all rows."""
        return self._perform(connection, reports.stats, reports.check_optional(queue))

    async def astats(self, queue: str | None = None, *, connection: Any = None) -> list[QueueCount]:
        """``stats`` for asyncio."""
        return await self._aperform(connection, reports.stats, reports.check_optional(queue))

    def group_progress(self, queue: str, group: str, *, connection: Any = None) -> dict[str, int]:
        """How many jobs of a group are in each status, without zeros."""
        return self._perform(connection, reports.group_progress, check_name(queue), reports.check_group(group))

    async def agroup_progress(self, queue: str, group: str, *, connection: Any = None) -> dict[str, int]:
        """``group_progress`` for asyncio."""
        return await self._aperform(connection, reports.group_progress, check_name(queue), reports.check_group(group))

    def retry_stats(
        self, *, age_days: float | None = 30, queue: str | None = None, connection: Any = None
    ) -> dict[str, RetryStats]:
        """How often jobs had to be run again, by queue: of the jobs that were put in the last ``age_days`` days
        (``None``: of all) and are still there.
        """
        return self._perform(connection, reports.retry_stats, *reports.wanted(age_days, queue))

    async def aretry_stats(self, *, connection: Any = None, **options: Any) -> dict[str, RetryStats]:
        """``retry_stats`` for asyncio."""
        return await self._aperform(connection, reports.retry_stats, *reports.wanted(**options))

    def processing_times(
        self, *, age_days: float | None = 30, queue: str | None = None, of: str = "total", connection: Any = None
    ) -> dict[str, Times]:
        """How long done jobs took, by queue: of the jobs that were put in the last ``age_days`` days (``None``: of all)
        and are still there. ``of``: ``"total"``, from the put to the end; ``"wait"``, from when it was due to its last
        start; ``"run"``, from its last start to the end.
        """
        return self._perform(connection, reports.processing_times, *reports.wanted_times(age_days, queue, of))

    async def aprocessing_times(self, *, connection: Any = None, **options: Any) -> dict[str, Times]:
        """``processing_times`` for asyncio."""
        return await self._aperform(connection, reports.processing_times, *reports.wanted_times(**options))

    def health(self, *, connection: Any = None) -> Health:
        """What is wrong, if anything: old errors, slow handlers of this process, a database that does not answer (which
        raises nothing, and takes as long as the driver waits). For ``health_grace`` seconds after ``start`` it is
        healthy; where it is not started, it looks at once. Cheap: a few looks into indexes.
        """
        self._check_open()
        return reports.look(self.core, connection)

    async def ahealth(self, *, connection: Any = None) -> Health:
        """``health`` for asyncio."""
        self._check_open()
        return await reports.alook(self.core, connection)

    def healthy(self, *, connection: Any = None) -> bool:
        """``health().healthy``."""
        return self.health(connection=connection).healthy

    async def ahealthy(self, *, connection: Any = None) -> bool:
        """``healthy`` for asyncio."""
        return (await self.ahealth(connection=connection)).healthy

    def unhealthy(self, *, connection: Any = None) -> bool:
        """``not healthy()``."""
        return not self.healthy(connection=connection)

    async def aunhealthy(self, *, connection: Any = None) -> bool:
        """``unhealthy`` for asyncio."""
        return not await self.ahealthy(connection=connection)

    def __repr__(self) -> str:
        return f"<Outbox {self.core.table}{' (closed)' if self._is_closed else ''}>"
