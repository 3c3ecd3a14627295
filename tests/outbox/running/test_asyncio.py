"""``astart`` and its kin, on a caller's event loop; and all kinds of handlers on all kinds of engines."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from kestrelpy.outbox import Job, Outbox, OutboxError, current_job
from tests.support.outboxes import (
    ALONE,
    Records,
    Steps,
    all_become,
    becomes,
    put,
    put_each,
    running,
    threads_left,
)
from tests.support.patience import PATIENCE, until

SYNC = [("postgresql", "sync"), ("sqlite", "sync")]
ASYNC = [("postgresql", "asyncpg"), ("postgresql", "psycopg"), ("sqlite", "aiosqlite")]
on_each_engine = pytest.mark.parametrize(("database_url", "driver"), SYNC + ASYNC, indirect=["database_url"])
"""Sync, or an AsyncEngine with one of the drivers that there are for the database."""
on_each_async_engine = pytest.mark.parametrize(("database_url", "driver"), ASYNC, indirect=["database_url"])


class Boom(Exception):
    """What handlers raise here."""


@pytest.fixture
def look(engine: sqlalchemy.Engine) -> Iterator[Outbox]:
    """An outbox on a sync engine, to put with and to look with."""
    with Outbox(engine) as made:
        made.create_tables()
        for queue in ("q", "a", "d"):
            made.queue(queue)
        yield made


@contextlib.asynccontextmanager
async def opened(engine: sqlalchemy.Engine, driver: str, **options: Any) -> AsyncIterator[tuple[Outbox, Any]]:
    """An outbox on an engine, and that engine; both are closed on this loop."""
    if driver == "sync":
        async with Outbox(engine, **options) as outbox:
            yield outbox, engine
        return
    made = async_engine(engine, driver)
    try:
        async with Outbox(made, **options) as outbox:
            yield outbox, made
    finally:
        await made.dispose()


def async_engine(engine: sqlalchemy.Engine, driver: str) -> AsyncEngine:
    made = create_async_engine(engine.url.set(drivername=f"{engine.dialect.name}+{driver}"))
    if engine.dialect.name == "sqlite":

        @sqlalchemy.event.listens_for(made.sync_engine, "connect")
        def be_quick(connection: Any, _record: object) -> None:
            connection.execute("PRAGMA synchronous = OFF")

    return made


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """On a loop of its own. No thread of an outbox is left."""
    before = threads_left()
    found = asyncio.run(asyncio.wait_for(coroutine, PATIENCE * 2))
    until(lambda: threads_left() == before)
    return found


async def abecomes(outbox: Outbox, job: Job, status: str) -> Job:
    """``becomes`` for what runs on this loop."""
    return await asyncio.to_thread(becomes, outbox, job, status)


def test_a_sync_call_does_not_wait_for_a_loop_that_stands_still(engine: sqlalchemy.Engine, look: Outbox) -> None:
    """Between two calls of ``Runner.run``, as in a console or in the fixtures of a test."""
    driver = "asyncpg" if engine.dialect.name == "postgresql" else "aiosqlite"
    made = async_engine(engine, driver)
    outbox = Outbox(made)
    outbox.add_consumer("q", lambda _: None)
    with asyncio.Runner() as runner:
        runner.run(outbox.astart(**ALONE))
        runner.run(asyncio.sleep(0.3))  # what has begun on the loop must end there
        assert outbox.jobs() == []
        becomes(look, put(look, "q"), "done")
        assert runner.run(outbox.astop())
        outbox.close()
        runner.run(made.dispose())


# -- all kinds of handlers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["astart", "start"])
@on_each_engine
def test_all_handlers_on_all_engines(engine: sqlalchemy.Engine, look: Outbox, driver: str, how: str) -> None:
    """Plain and transactional, def and async; with astart the async ones are on the caller's loop and thread."""
    where = Steps()

    async def work() -> None:
        async with opened(engine, driver) as (outbox, _):

            def handler(payload: Any, *_: Any) -> None:
                where.add((payload, threading.current_thread().name, current_job() is not None))

            async def ahandler(payload: Any, *_: Any) -> None:
                await asyncio.sleep(0)
                where.add((payload, threading.current_thread().name, current_job() is not None))

            for name, function in (("def", handler), ("async", ahandler)):
                outbox.add_consumer(name, function)
                outbox.add_consumer(f"{name}-tx", function, transactional=True)
            queues = ["def", "async", "def-tx", "async-tx"]
            jobs = [await asyncio.to_thread(put, outbox_for(look, queue), queue, queue) for queue in queues]
            if how == "astart":
                await outbox.astart(**ALONE)
            else:
                outbox.start(**ALONE)
            for job in jobs:
                await abecomes(look, job, "done")
            assert await outbox.astop(timeout=PATIENCE)

    run(work())
    found = {payload: (thread, has_job) for payload, thread, has_job in where.seen}
    assert {thread[:-1] for thread, _ in (found["def"], found["def-tx"])} == {"kestrelpy-outbox-"}
    loop = "MainThread" if how == "astart" else "kestrelpy-outbox-loop"
    assert [found["async"], found["async-tx"]] == [(loop, True), (loop, True)]
    assert [found["def"][1], found["def-tx"][1]] == [True, True]


def outbox_for(outbox: Outbox, queue: str) -> Outbox:
    outbox.queue(queue)
    return outbox


def test_two_hundred_async_jobs_run_at_once_as_far_as_they_may(engine: sqlalchemy.Engine, look: Outbox) -> None:
    async def work() -> None:
        most, now = 0, 0

        async def handler(_payload: Any) -> None:
            nonlocal most, now
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.01)
            now -= 1

        async with opened(engine, "sync") as (outbox, _):
            outbox.add_consumer("q", handler)
            await outbox.astart(**ALONE)
            await asyncio.to_thread(all_become, look, "q", "done")
            assert await outbox.astop()
        assert 50 < most <= 100

    put_each(look, "q", range(200))
    run(work())


# -- starting and stopping -------------------------------------------------------------------------------------------


@on_each_engine
def test_arunning_and_arun_in_a_task(engine: sqlalchemy.Engine, look: Outbox, driver: str) -> None:
    async def work() -> None:
        async with opened(engine, driver) as (outbox, _):
            outbox.add_consumer("q", handler)
            async with outbox.arunning(**ALONE) as same:
                assert same is outbox
                await outbox.astart(threads=7)
                await abecomes(look, await asyncio.to_thread(put, look, "q"), "done")
            assert threads_left() == []
            assert await outbox.astop()
            await outbox.astart(**ALONE)
            await abecomes(look, await asyncio.to_thread(put, look, "q"), "done")
        # left: aclose() stops

    async def handler(_payload: Any) -> None: ...

    run(work())


@on_each_engine
def test_astart_before_create_tables_says_what_to_do(engine: sqlalchemy.Engine, driver: str) -> None:
    async def work() -> None:
        async with opened(engine, driver) as (outbox, _):
            with pytest.raises(OutboxError, match="create_tables"):
                await outbox.astart()
            await outbox.acreate_tables()
            async with outbox.arunning(**ALONE):
                pass

    run(work())


@on_each_engine
def test_stop_and_close_on_the_loop_of_the_handlers_are_refused(
    engine: sqlalchemy.Engine, look: Outbox, driver: str
) -> None:
    """They would block the loop for which they wait."""

    async def work() -> None:
        began, gate = asyncio.Event(), asyncio.Event()

        async def handler(_payload: Any) -> None:
            began.set()
            await gate.wait()

        async with opened(engine, driver) as (outbox, _):
            outbox.add_consumer("q", handler)
            await outbox.astart(**ALONE)
            job = await asyncio.to_thread(put, look, "q")
            await began.wait()
            for call in (outbox.stop, outbox.close, lambda: outbox.stop(timeout=1)):
                with pytest.raises(OutboxError, match="astop"):
                    call()
            gate.set()
            assert await outbox.astop()
            assert look.get(job.id).status == "done"

    run(work())


@on_each_engine
def test_a_stuck_handler_is_cancelled_and_its_job_given_back(
    engine: sqlalchemy.Engine, look: Outbox, driver: str
) -> None:
    async def work() -> None:
        seen: list[str] = []
        began = asyncio.Event()

        async def handler(_payload: Any) -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                seen.append("ended")

        async with opened(engine, driver) as (outbox, _):
            outbox.add_consumer("q", handler, max_retries=0)
            await outbox.astart(**ALONE)
            job = await asyncio.to_thread(put, look, "q")
            await began.wait()
            assert not await outbox.astop(timeout=0.01)
            assert seen == ["ended"]
            found = look.get(job.id)
            assert (found.status, found.tries, found.due_ms) == ("ready", 0, job.due_ms)

    run(work())


@on_each_engine
def test_astop_in_a_handler_does_not_wait_for_itself(engine: sqlalchemy.Engine, look: Outbox, driver: str) -> None:
    async def work() -> None:
        said: list[bool] = []

        async with opened(engine, driver) as (outbox, _):

            async def handler(_payload: Any) -> None:
                said.append(await outbox.astop())

            outbox.add_consumer("q", handler)
            await outbox.astart(**ALONE)
            job = await asyncio.to_thread(put, look, "q")
            await abecomes(look, job, "done")
            assert await outbox.astop()
            assert said == [False]

    run(work())


@on_each_engine
def test_a_cancelled_astop_goes_on_and_can_be_awaited_again(
    engine: sqlalchemy.Engine, look: Outbox, driver: str
) -> None:
    async def work() -> None:
        began, gate = asyncio.Event(), asyncio.Event()

        async def handler(_payload: Any) -> None:
            began.set()
            await gate.wait()

        async with opened(engine, driver) as (outbox, _):
            outbox.add_consumer("q", handler)
            await outbox.astart(**ALONE)
            job = await asyncio.to_thread(put, look, "q")
            await began.wait()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(outbox.astop(), 0.05)
            stopping = asyncio.create_task(outbox.astop())
            gate.set()
            assert await stopping
            assert look.get(job.id).status == "done"
            async with outbox.arunning(**ALONE):
                pass

    run(work())


@on_each_engine
def test_asyncio_run_twice_with_one_outbox(engine: sqlalchemy.Engine, look: Outbox, driver: str) -> None:
    """A connection belongs to one loop: an AsyncEngine is disposed of before the next, as SQLAlchemy says."""
    made = None if driver == "sync" else async_engine(engine, driver)
    outbox = Outbox(engine if made is None else made)

    async def handler(_payload: Any) -> None: ...

    outbox.add_consumer("q", handler)

    async def work() -> None:
        async with outbox.arunning(**ALONE):
            await abecomes(look, await asyncio.to_thread(put, look, "q"), "done")
        if made is not None:
            await made.dispose()

    run(work())
    run(work())
    outbox.close()


@on_each_async_engine
def test_asyncio_run_twice_with_an_engine_of_the_outbox(engine: sqlalchemy.Engine, look: Outbox, driver: str) -> None:
    """It knows itself when a loop is another one."""
    url = engine.url.set(drivername=f"{engine.dialect.name}+{driver}")
    outbox = Outbox(url)

    async def handler(_payload: Any) -> None: ...

    outbox.add_consumer("q", handler)

    async def work() -> None:
        async with outbox.arunning(**ALONE):
            job = await asyncio.to_thread(put, look, "q")
            await abecomes(look, job, "done")
            assert (await outbox.aget(job.id)).status == "done"

    run(work())
    run(work())
    run(outbox.aclose())


def test_a_loop_that_ends_without_astop(engine: sqlalchemy.Engine, look: Outbox) -> None:
    """The job that ran is given back, and the outbox can be started on the next loop."""
    outbox = Outbox(engine)
    gate = threading.Event()

    async def handler(_payload: Any) -> None:
        if not gate.is_set():
            gate.set()
            await asyncio.Event().wait()

    outbox.add_consumer("q", handler, max_retries=0)
    job = put(look, "q")

    async def forget() -> None:
        await outbox.astart(**ALONE)
        await asyncio.to_thread(gate.wait, PATIENCE)

    async def work() -> None:
        await outbox.astart(**ALONE)
        await abecomes(look, job, "done")
        assert await outbox.astop()

    asyncio.run(forget())
    asyncio.run(work())
    assert look.get(job.id).tries == 1
    outbox.close()
    until(lambda: threads_left() == [])


@on_each_engine
def test_sync_calls_on_the_loop_do_not_hang(engine: sqlalchemy.Engine, look: Outbox, driver: str) -> None:
    """Not nice, as they block it; but a call of get() in a coroutine must not wait for the loop that it blocks."""

    async def work() -> None:
        found: list[Any] = []

        async with opened(engine, driver) as (outbox, _):

            async def handler(_payload: Any) -> None:
                job = current_job()
                assert job is not None
                found.append(outbox.get(job.id).status)
                found.append((await outbox.aget(job.id)).status)

            outbox.add_consumer("q", handler)
            async with outbox.arunning(**ALONE):
                job = await asyncio.to_thread(put, look, "q")
                await abecomes(look, job, "done")
                assert outbox.get(job.id).status == "done"
        assert found == ["running", "running"]

    run(work())


# -- the caller's engine ---------------------------------------------------------------------------------------------


@on_each_async_engine
def test_a_callers_engine_is_used_on_the_callers_loop_alone(
    engine: sqlalchemy.Engine, look: Outbox, driver: str
) -> None:
    """An outbox that was started with start() runs on loops of its own; the caller uses the engine meanwhile."""

    async def work() -> None:
        async with opened(engine, driver) as (outbox, made):

            async def handler(payload: Any, connection: Any) -> None:
                await connection.execute(text("SELECT 1"))
                assert (await outbox.aget(payload)).status == "running"

            outbox.add_consumer("q", handler, transactional=True)
            outbox.add_consumer("d", lambda payload, _connection: outbox.get(payload), transactional=True)
            outbox.start(**ALONE)
            for number in range(10):
                queue = "qd"[number % 2]
                job = await asyncio.to_thread(put_itself, look, queue)
                async with made.connect() as connection:
                    await connection.execute(text("SELECT 1"))
                    await abecomes(look, job, "done")
                    await connection.execute(text("SELECT 1"))
            assert await outbox.astop()

    run(work())


def put_itself(outbox: Outbox, queue: str) -> Job:
    """Its payload is its id."""
    with outbox.begin() as connection:
        job = outbox.put(connection, queue, 0, key="new")
        connection.execute(
            text('UPDATE kestrel_jobs SET payload = :payload, "key" = NULL WHERE id = :id'),
            {"payload": str(job.id), "id": job.id},
        )
    return job


# -- timeouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["astart", "start"])
def test_a_timeout_cancels_an_async_handler_and_is_a_failure(engine: sqlalchemy.Engine, look: Outbox, how: str) -> None:
    async def work() -> None:
        seen: list[str] = []

        async def handler(_payload: Any) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

        async def clearing_up(_payload: Any) -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            raise Boom("after the timeout")

        async with opened(engine, "sync") as (outbox, _):
            outbox.add_consumer("q", handler, timeout=0.02, max_retries=0)
            outbox.add_consumer("a", clearing_up, timeout=0.02, max_retries=0)
            jobs = [await asyncio.to_thread(put, look, queue) for queue in ("q", "a")]
            if how == "astart":
                await outbox.astart(**ALONE)
            else:
                outbox.start(**ALONE)
            dead = [await abecomes(look, job, "dead") for job in jobs]
            assert await outbox.astop()
        assert seen == ["cancelled"]
        assert "TimeoutError" in (dead[0].error or "")
        assert "after the timeout" in (dead[1].error or "")

    run(work())


@on_each_engine
def test_a_timeout_of_a_transactional_handler_rolls_back(engine: sqlalchemy.Engine, look: Outbox, driver: str) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (number int)"))

    async def work() -> None:
        async with opened(engine, driver) as (outbox, _):

            async def handler(_payload: Any, connection: Any) -> None:
                statement = text("INSERT INTO effects VALUES (1)")
                if driver == "sync":
                    connection.execute(statement)
                else:
                    await connection.execute(statement)
                await asyncio.Event().wait()

            outbox.add_consumer("q", handler, transactional=True, timeout=0.02, max_retries=0)
            async with outbox.arunning(**ALONE):
                await abecomes(look, await asyncio.to_thread(put, look, "q"), "dead")

    run(work())
    with engine.connect() as connection:
        assert connection.execute(text("SELECT * FROM effects")).all() == []


def test_a_handler_that_takes_no_time_has_no_timeout(look: Outbox) -> None:
    async def handler(_payload: Any) -> None: ...

    look.add_consumer("q", handler, timeout=0)
    job = put(look, "q")
    with running(look, **ALONE):
        found = until_ended(look, job)
    assert found.status in ("done", "error")


def until_ended(outbox: Outbox, job: Job) -> Job:
    until(lambda: outbox.get(job.id).status in ("done", "error", "dead"))
    return outbox.get(job.id)


# -- what tasks of handlers do ---------------------------------------------------------------------------------------


def test_a_task_that_exits_ends_no_loop_of_the_outbox(look: Outbox, records: Records) -> None:
    """SystemExit in a task gets out of run_forever()."""

    async def gone_task() -> None:
        raise SystemExit("in a task")

    async def handler(_payload: Any) -> None:
        task = asyncio.create_task(gone_task())
        with contextlib.suppress(SystemExit):
            await task

    look.add_consumer("q", handler)
    with running(look, **ALONE):
        for _ in range(3):
            becomes(look, put(look, "q"), "done")
    assert records.of("loop")
