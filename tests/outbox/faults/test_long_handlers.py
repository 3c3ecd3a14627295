"""A handler that takes longer than the lease: it is renewed, and nobody else runs the job."""

from __future__ import annotations

import asyncio
import threading

import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine

from kestrelpy.outbox.outbox import Outbox
from tests.support.patience import until

LEASE = 1.5


@pytest.mark.parametrize("transactional", [False, True])
def test_a_lease_is_renewed_as_long_as_the_handler_runs(database_url: str, transactional: bool) -> None:
    begun: list[str] = []
    ended = threading.Event()
    outboxes = [Outbox(database_url, lease=LEASE, backoff=0.0) for _ in range(2)]
    for number, outbox in enumerate(outboxes):

        def handle(name: str, *_: object, number: int = number) -> None:
            begun.append(f"{name} by {number}")
            if name == "long":
                ended.wait(2.5 * LEASE)
                ended.set()

        outbox.add_consumer("q", handle, transactional=transactional)
    try:
        outboxes[0].create_tables()
        with outboxes[0].begin() as connection:
            job = outboxes[0].put(connection, "q", "long")
        for outbox in outboxes:
            outbox.start(threads=2, poll_interval=0.1, retry_interval=0.01)
        until(ended.is_set)
        until(lambda: outboxes[1].get(job.id).status == "done")
        assert len(begun) == 1, begun
        assert outboxes[1].get(job.id).tries == 1
    finally:
        for outbox in outboxes:
            outbox.close()


@pytest.mark.parametrize("kind", ["engine", "async engine"])
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_handlers_that_have_all_connections_keep_their_leases(database_url: str, kind: str) -> None:
    """On SQLite one handler has the write lock, and the others wait for it."""
    begun: list[int] = []
    other = Outbox(database_url, lease=LEASE)
    other.create_tables()

    def handle(number: int, _connection: object) -> None:
        begun.append(number)
        threading.Event().wait(2 * LEASE)

    async def ahandle(number: int, _connection: object) -> None:
        begun.append(number)
        await asyncio.sleep(2 * LEASE)

    async def consume_on_this_loop() -> None:
        engine = create_async_engine(database_url.replace("+psycopg", "+asyncpg"), pool_size=2, max_overflow=0)
        async with Outbox(engine, lease=LEASE) as outbox:
            outbox.add_consumer("q", ahandle, transactional=True)
            async with outbox.arunning(poll_interval=0.1):
                await asyncio.to_thread(until, lambda: [job.status for job in other.jobs("q")] == ["done"] * 3)
        await engine.dispose()

    other.add_consumer("q", handle, transactional=True)
    with other.begin() as connection:
        other.put_many(connection, "q", [1, 2, 3])
    other.pause("q")  # it sweeps, and claims none
    with other.running(threads=1, poll_interval=0.1):
        if kind == "async engine":
            other.resume("q")
            asyncio.run(consume_on_this_loop())
        else:
            engine = sqlalchemy.create_engine(database_url, pool_size=2, max_overflow=0)
            with Outbox(engine, lease=LEASE) as outbox:
                outbox.add_consumer("q", handle, transactional=True)
                other.resume("q")
                with outbox.running(threads=3, poll_interval=0.1):
                    until(lambda: [job.status for job in other.jobs("q")] == ["done"] * 3)
            engine.dispose()
    assert sorted(begun) == [1, 2, 3]
    assert [job.tries for job in other.jobs("q")] == [1, 1, 1]
    other.close()
