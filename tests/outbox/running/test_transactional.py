"""``transactional`` handlers: their writes, the jobs they put and the mark are one transaction, on both engines."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from kestrelpy.outbox import GiveUp, Outbox, OutboxError, RetryLater, transactions
from tests.support.outboxes import (
    ALONE,
    KINDS,
    Records,
    Steps,
    all_become,
    becomes,
    put,
    put_each,
    running,
)
from tests.support.patience import PATIENCE, until

kinds = pytest.mark.parametrize("kind", KINDS)
on_postgresql = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
"""On SQLite the handler has the only write lock: nobody can do anything to its job meanwhile."""
ASYNC_DRIVERS = {"postgresql": "postgresql+asyncpg", "sqlite": "sqlite+aiosqlite"}


class Boom(Exception):
    """What handlers raise here."""


def async_engine_of(engine: sqlalchemy.Engine, **options: Any) -> AsyncEngine:
    """On the same database."""
    made = create_async_engine(engine.url.set(drivername=ASYNC_DRIVERS[engine.dialect.name]), **options)
    if engine.dialect.name == "sqlite":

        @sqlalchemy.event.listens_for(made.sync_engine, "connect")
        def be_quick(connection: Any, _record: object) -> None:
            connection.execute("PRAGMA synchronous = OFF")

    return made


class World:
    """An outbox on an engine of either kind, with a table of effects; ``outbox`` puts and looks with a sync one."""

    def __init__(self, engine: sqlalchemy.Engine, which: str) -> None:
        self.engine = engine
        self.outbox = Outbox(engine)
        self.outbox.create_tables()
        self.outbox.queue("q")
        self.async_engine = async_engine_of(engine) if which == "async engine" else None
        self.consumer = self.outbox if self.async_engine is None else Outbox(self.async_engine)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE effects (number int)"))
            connection.execute(text("CREATE TABLE balance (amount int)"))
            connection.execute(text("INSERT INTO balance VALUES (0)"))

    def consume(self, kind: str, work: Callable[[Any, Callable[..., Any]], Any], **options: Any) -> None:
        """``work(payload, put)`` after a row of the payload was written; ``put`` puts a job in the transaction."""
        consumer = self.consumer
        insert = text("INSERT INTO effects VALUES (:number)")

        def handler(payload: Any, connection: Any) -> Any:
            connection.execute(insert, {"number": payload})
            return work(payload, lambda *args, **kw: consumer.put(connection, *args, **kw))

        async def ahandler(payload: Any, connection: Any) -> Any:
            jobs: list[Any] = []
            if self.async_engine is None:
                connection.execute(insert, {"number": payload})
                return work(payload, lambda *args, **kw: consumer.put(connection, *args, **kw))
            await connection.execute(insert, {"number": payload})
            try:
                return work(payload, lambda *args, **kw: jobs.append((args, kw)))
            finally:
                for args, kw in jobs:
                    await consumer.aput(connection, *args, **kw)

        consumer.add_consumer("q", handler if kind == "def" else ahandler, transactional=True, **options)

    @property
    def effects(self) -> list[int]:
        with self.engine.connect() as connection:
            return list(connection.execute(text("SELECT number FROM effects ORDER BY number")).scalars())

    @property
    def balance(self) -> int:
        with self.engine.connect() as connection:
            return int(connection.execute(text("SELECT amount FROM balance")).scalar_one())

    def close(self) -> None:
        self.consumer.stop(timeout=1.0)
        self.consumer.close()
        self.outbox.close()
        if self.async_engine is not None:
            asyncio.run(self.async_engine.dispose())


@pytest.fixture(params=["engine", "async engine"])
def world(engine: sqlalchemy.Engine, request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(engine, request.param)
    yield made
    made.close()


@kinds
def test_writes_jobs_and_mark_are_committed_together(world: World, kind: str) -> None:
    world.consumer.queue("next")
    world.consume(kind, lambda payload, put_within: put_within("next", payload + 1, key=f"after-{payload}"))
    world.outbox.queue("next")
    job = put(world.outbox, "q", 1)
    with running(world.consumer, **ALONE):
        becomes(world.outbox, job, "done")
    assert world.effects == [1]
    assert [(each.payload, each.key) for each in world.outbox.jobs("next")] == [(2, "after-1")]


@kinds
@pytest.mark.parametrize(
    ("error", "status", "options"),
    [
        (Boom("x"), "dead", {"max_retries": 0}),
        (GiveUp("x"), "dead", {}),
        (SystemExit(), "dead", {"max_retries": 0}),
        (RetryLater(1000), "ready", {}),
        (Boom("somebody has done it"), "done", {"done_on": Boom}),
    ],
    ids=["failure", "give up", "exit", "later", "done on"],
)
def test_a_handler_that_raises_is_rolled_back(
    world: World, kind: str, error: BaseException, status: str, options: dict[str, Any]
) -> None:
    def work(payload: int, put_within: Callable[..., Any]) -> None:
        put_within("q", payload + 1)
        raise error

    world.consume(kind, work, **options)
    job = put(world.outbox, "q", 1)
    with running(world.consumer, **ALONE):
        until(lambda: world.outbox.get(job.id).started_ms is not None)
        found = becomes(world.outbox, job, status)
    assert (world.effects, len(world.outbox.jobs("q"))) == ([], 1)
    assert found.tries == (0 if status == "ready" else 1)


@kinds
def test_a_failed_one_is_run_again_and_has_its_effect_once(world: World, kind: str) -> None:
    seen = set()

    def work(payload: int, _put: Callable[..., Any]) -> None:
        if payload not in seen:
            seen.add(payload)
            raise Boom

    world.consume(kind, work, backoff=0)
    put_each(world.outbox, "q", range(5))
    with running(world.consumer, **ALONE):
        all_become(world.outbox, "q", "done")
    assert world.effects == list(range(5))


@kinds
@on_postgresql
def test_whose_token_is_gone_is_rolled_back(world: World, kind: str, records: Records) -> None:
    """As after a lease that lapsed: somebody else has run the job meanwhile."""
    steps = Steps()

    def work(payload: int, _put: Callable[..., Any]) -> None:
        steps.add(payload)
        with steal:
            pass

    steal = threading.Lock()
    steal.acquire()
    world.consume(kind, work)
    job = put(world.outbox, "q", 1)
    table = "kestrel_jobs"
    with running(world.consumer, **ALONE):
        steps.wait()
        with world.engine.begin() as connection:
            connection.execute(text(f"UPDATE {table} SET token = 1 WHERE id = :id"), {"id": job.id})
        steal.release()
        until(lambda: records.of("came too late", f"job {job.id} "))
        assert world.effects == []
        assert world.outbox.get(job.id).status == "running"


@kinds
def test_with_keep_done_0_the_job_is_deleted_in_its_transaction(world: World, kind: str) -> None:
    world.consume(kind, lambda *_: None, keep_done=0)
    put(world.outbox, "q", 1)
    with running(world.consumer, **ALONE):
        until(lambda: world.outbox.jobs("q") == [])
    assert world.effects == [1]


@kinds
def test_a_dependant_is_ready_in_the_same_transaction(world: World, kind: str) -> None:
    world.consume(kind, lambda *_: None)
    with world.outbox.begin() as connection:
        first = world.outbox.put(connection, "q", 1)
        second = world.outbox.put(connection, "q", 2, depends_on=first)
    with running(world.consumer, **ALONE):
        becomes(world.outbox, second, "done")
    assert world.effects == [1, 2]


@kinds
def test_what_is_read_first_may_be_written(world: World, kind: str) -> None:
    """Twenty add one to what they have read, four at a time: on SQLite none reads what another is about to change."""
    select, add = text("SELECT amount FROM balance"), text("UPDATE balance SET amount = :amount")
    if world.engine.dialect.name == "postgresql":
        select = text("SELECT amount FROM balance FOR UPDATE")
    is_async = world.async_engine is not None

    def handler(_payload: Any, connection: Any) -> None:
        amount = connection.execute(select).scalar_one()
        threading.Event().wait(0.001)
        connection.execute(add, {"amount": amount + 1})

    async def ahandler(_payload: Any, connection: Any) -> None:
        if is_async:
            amount = (await connection.execute(select)).scalar_one()
            await asyncio.sleep(0.001)
            await connection.execute(add, {"amount": amount + 1})
        else:  # two of these at once, on one thread, would wait for each other
            amount = connection.execute(select).scalar_one()
            await asyncio.sleep(0.001)
            connection.execute(add, {"amount": amount + 1})

    world.consumer.add_consumer("q", handler if kind == "def" else ahandler, transactional=True, backoff=0)
    put_each(world.outbox, "q", range(20))
    with running(world.consumer, **{**ALONE, "threads": 4}):
        all_become(world.outbox, "q", "done")
    assert world.balance == 20
    assert {job.tries for job in world.outbox.jobs("q")} == {1}


@kinds
def test_a_savepoint_in_a_handler_is_its_own(world: World, kind: str) -> None:
    insert = text("INSERT INTO effects VALUES (:number)")

    def handler(payload: int, connection: Any) -> None:
        with connection.begin_nested() as savepoint:
            connection.execute(insert, {"number": -payload})
            savepoint.rollback()
        connection.execute(insert, {"number": payload})

    async def ahandler(payload: int, connection: Any) -> None:
        if world.async_engine is None:
            handler(payload, connection)
            return
        async with connection.begin_nested() as savepoint:
            await connection.execute(insert, {"number": -payload})
            await savepoint.rollback()
        await connection.execute(insert, {"number": payload})

    world.consumer.add_consumer("q", handler if kind == "def" else ahandler, transactional=True)
    job = put(world.outbox, "q", 1)
    with running(world.consumer, **ALONE):
        becomes(world.outbox, job, "done")
    assert world.effects == [1]


@kinds
def test_a_handler_that_commits_is_refused_and_has_no_effect(world: World, kind: str) -> None:
    """Also where it goes on as if nothing had been said."""
    insert = text("INSERT INTO effects VALUES (:number)")

    def handler(payload: int, connection: Any) -> None:
        connection.execute(insert, {"number": payload})
        with contextlib.suppress(*[OutboxError] * (payload - 1)):
            connection.commit()

    async def ahandler(payload: int, connection: Any) -> None:
        if world.async_engine is None:
            handler(payload, connection)
            return
        await connection.execute(insert, {"number": payload})
        with contextlib.suppress(*[OutboxError] * (payload - 1)):
            await connection.commit()

    used = handler if kind == "def" else ahandler
    world.consumer.add_consumer("q", used, transactional=True, max_retries=1, backoff=0)
    jobs = [put(world.outbox, "q", payload) for payload in (1, 2)]
    with running(world.consumer, **ALONE):
        dead = [becomes(world.outbox, job, "dead") for job in jobs]
    assert "a transactional handler must not commit" in (dead[0].error or "")
    assert world.effects == []


@on_postgresql
def test_a_def_handler_holds_up_nothing_but_its_thread(world: World) -> None:
    """On an AsyncEngine, too: other jobs are claimed, run and marked meanwhile, and its lease is renewed."""
    steps, gate = Steps(), threading.Event()

    def work(payload: int, _put: Callable[..., Any]) -> None:
        steps.add(payload)
        if payload == 1:
            gate.wait(PATIENCE)

    world.consume("def", work)
    world.consumer.add_consumer("plain", lambda _: None)
    world.outbox.queue("plain")
    with running(world.consumer, **ALONE):
        job = put(world.outbox, "q", 1)
        steps.wait()
        becomes(world.outbox, put(world.outbox, "plain"), "done")
        becomes(world.outbox, put(world.outbox, "q", 2), "done")
        assert world.outbox.get(job.id).status == "running"
        gate.set()
        becomes(world.outbox, job, "done")
    assert world.effects == [1, 2]


@kinds
def test_a_transaction_that_can_not_begin_costs_no_try(
    world: World, kind: str, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the database is away: the handler was not even called."""
    failures: list[Exception] = []

    def fail(*_: Any) -> None:
        if failures and threading.current_thread().name in WORKING:
            raise failures.pop()

    engine = world.engine if world.async_engine is None else world.async_engine.sync_engine
    sqlalchemy.event.listen(engine, "checkout", fail)
    monkeypatch.setattr(transactions, "PAUSE_MS", 1)
    world.consume(kind, lambda *_: None, max_retries=0)
    with running(world.consumer, **ALONE):
        becomes(world.outbox, put(world.outbox, "q", 1), "done")
        failures += [Boom("no connection")]
        assert becomes(world.outbox, put(world.outbox, "q", 2), "done").tries == 1
    assert (failures, world.effects) == ([], [1, 2])
    assert records.of("no connection")


WORKING = {"kestrelpy-outbox-0", "kestrelpy-outbox-1", "kestrelpy-outbox-loop"}
"""The names of the threads that run handlers."""
