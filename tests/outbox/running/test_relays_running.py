"""Relays in a running outbox: beside ordinary jobs, woken, failing, stopped, and several of one name."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine

from kestrelpy import JournaledQueue, scan
from kestrelpy.inbox import take_in
from kestrelpy.outbox import Job, Outbox
from kestrelpy.outbox.relay import Relay
from tests.support.outboxes import ALONE, QUICK, Records, Steps, becomes, is_idle, put, put_each, running, threads_left
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE, until

OWNERS = "SELECT owner FROM kestrel_jobs_relays"


def moved(folder: Path) -> list[Any]:
    """The payloads that are in the queue."""
    if not folder.is_dir():
        return []
    take_in(folder, "log")
    return [json.loads(record.data) for record in scan(folder, "log")]


def owners(engine: sqlalchemy.Engine) -> list[str | None]:
    with engine.connect() as connection:
        return list(connection.scalars(sqlalchemy.text(OWNERS)))


def relay_threads() -> list[str]:
    return [name for name in threads_left() if "-relay-" in name]


class Held:
    """An ``encode`` that waits. At the end of the test it goes on."""

    def __init__(self) -> None:
        self.is_in = threading.Event()
        self.may_go_on = threading.Event()

    def __call__(self, job: Job) -> str:
        self.is_in.set()
        assert self.may_go_on.wait(PATIENCE)
        return json.dumps(job.payload)


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.may_go_on.set()
    until(lambda: not relay_threads())


# -- beside ordinary jobs --------------------------------------------------------------------------------------------


def test_a_slow_encode_holds_up_no_job_and_no_lease(
    open_outbox: Callable[..., Outbox], held: Held, tmp_path: Path
) -> None:
    outbox = open_outbox(lease=0.3)
    seen, goes_on = Steps(), threading.Event()
    outbox.add_relay("events", tmp_path, "log", encode=held)
    outbox.add_consumer("q", seen.add)
    outbox.add_consumer("long", lambda _: goes_on.wait(PATIENCE))
    put_each(outbox, "events", [1, 2])
    with running(outbox, **QUICK):
        assert held.is_in.wait(PATIENCE)
        long = put(outbox, "long")
        until(lambda: outbox.get(long.id).status == "running")
        for _ in range(4):
            lease_ms = outbox.get(long.id).due_ms
            until(lambda lease_ms=lease_ms: outbox.get(long.id).due_ms > lease_ms)  # type: ignore[misc]
        put_each(outbox, "q", range(5))
        seen.wait(5)
        goes_on.set()
        assert becomes(outbox, long, "done").tries == 1
        held.may_go_on.set()
        until(lambda: moved(tmp_path) == [1, 2])


def test_a_folder_that_fails_is_no_failure_of_the_database(outbox: Outbox, records: Records, tmp_path: Path) -> None:
    """It is logged once, the relay goes on when it is mended, and nothing is moved twice."""
    folder = tmp_path / "queues"
    folder.write_text("this is no folder")
    seen = Steps()
    outbox.add_relay("events", folder, "log")
    outbox.add_consumer("q", seen.add)
    put_each(outbox, "events", [1, 2, 3])
    with running(outbox, **QUICK):
        until(lambda: records.of("relay", "failed"))
        put_each(outbox, "q", range(20))
        seen.wait(20)
        threading.Event().wait(0.5)  # for several tries
        assert len(records.of("failed")) == 1
        folder.unlink()
        until(lambda: moved(folder) == [1, 2, 3])
        until(lambda: records.of("works again after"))
    assert not records.of("database")


def test_a_folder_that_is_not_there_is_made(outbox: Outbox, records: Records, tmp_path: Path) -> None:
    outbox.add_relay("events", tmp_path / "not" / "there", "log")
    put(outbox, "events", 1)
    with running(outbox, **ALONE):
        until(lambda: moved(tmp_path / "not" / "there") == [1])
    assert not records.of("failed")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
def test_nothing_ends_the_thread(outbox: Outbox, tmp_path: Path, error: type[BaseException]) -> None:
    raised: list[int] = []

    def encode(job: Job) -> str:
        if len(raised) < 3:
            raised.append(1)
            raise error("from encode")
        return str(job.payload)

    outbox.queue("events", backoff=0.0)
    outbox.add_relay("events", tmp_path, "log", encode=encode)
    put(outbox, "events", 1)
    with running(outbox, **ALONE):
        until(lambda: moved(tmp_path) == [1])
    assert len(raised) == 3


# -- when ------------------------------------------------------------------------------------------------------------


def test_a_commit_wakes(outbox: Outbox, tmp_path: Path) -> None:
    outbox.add_relay("events", tmp_path, "log", batch=2)
    with running(outbox, **ALONE):
        for first in (0, 10, 20):
            put_each(outbox, "events", range(first, first + 5))
            until(lambda: not outbox.jobs("events"))
    assert moved(tmp_path) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14, 20, 21, 22, 23, 24]


def test_a_job_that_frees_another_wakes(open_outbox: Callable[..., Outbox], tmp_path: Path) -> None:
    outbox = open_outbox(notify=False)
    outbox.add_relay("events", tmp_path, "log")
    outbox.add_consumer("q", lambda _: None)
    with running(outbox, threads=2, poll_interval=0.05):
        first = put(outbox, "q", 1)
        put(outbox, "events", 2, depends_on=first)
        until(lambda: moved(tmp_path) == [2])


def test_delayed_jobs_do_not_wait_for_a_poll(outbox: Outbox, tmp_path: Path) -> None:
    outbox.add_relay("events", tmp_path, "log")
    with JournaledQueue(tmp_path, "log", inbox_interval=0.01) as queue, running(outbox, **ALONE):
        began = time.monotonic()
        for delay in (0.7, 0.4):
            put(outbox, "events", delay, delay=delay)
        for delay in (0.4, 0.7):
            assert json.loads(queue.get(timeout=PATIENCE).data) == delay
            took = time.monotonic() - began
            assert delay <= took < delay + 2.0  # it takes 0.1; this is a crowded machine's


def test_jobs_in_error_come_again_when_they_are_due(outbox: Outbox, tmp_path: Path) -> None:
    tries: list[int] = []

    def encode(job: Job) -> str:
        tries.append(job.tries)
        if job.tries < 3:
            raise ValueError("not yet")
        return str(job.payload)

    outbox.queue("events", backoff=0.1)
    outbox.add_relay("events", tmp_path, "log", encode=encode)
    put(outbox, "events", 1)
    with running(outbox, **ALONE):
        until(lambda: moved(tmp_path) == [1])
    assert tries == [1, 2, 3]


def test_batches_of_nothing_but_poison_do_not_wait_for_a_poll(outbox: Outbox, tmp_path: Path) -> None:
    def encode(job: Job) -> str:
        if job.payload < 10:
            raise ValueError("never")
        return str(job.payload)

    outbox.queue("events", max_retries=0)
    outbox.add_relay("events", tmp_path, "log", encode=encode, batch=2)
    put_each(outbox, "events", range(11))
    with running(outbox, **ALONE):
        until(lambda: moved(tmp_path) == [10])
    assert len(outbox.jobs("events", status="dead")) == 10


def test_an_idle_relay_asks_nothing(outbox: Outbox, engine: sqlalchemy.Engine, tmp_path: Path) -> None:
    outbox.add_relay("events", tmp_path, "log")
    put(outbox, "events", 1)
    statements: list[str] = []
    sqlalchemy.event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    with running(outbox, **ALONE):
        until(lambda: not outbox.jobs("events"))
        until(lambda: is_idle(outbox, statements))
        statements.clear()
        threading.Event().wait(0.5)
        assert statements == []


def test_what_is_locked_is_not_asked_for_all_the_time(postgres_url: str, tmp_path: Path) -> None:
    engine = sqlalchemy.create_engine(postgres_url)
    with Outbox(engine) as outbox:
        outbox.create_tables()
        outbox.add_relay("events", tmp_path, "log")
        put(outbox, "events", 1)
        looks: list[str] = []
        sqlalchemy.event.listen(engine, "before_cursor_execute", lambda *args: looks.append(args[2]))
        with engine.begin() as connection:
            connection.exec_driver_sql("SELECT id FROM kestrel_jobs FOR UPDATE")
            outbox.start(**ALONE)
            threading.Event().wait(1.0)
            assert len([each for each in looks if "SKIP LOCKED" in each and "payload_bytes" in each]) < 40
        until(lambda: moved(tmp_path) == [1])
        assert outbox.stop(PATIENCE)
    engine.dispose()


# -- starting and stopping -------------------------------------------------------------------------------------------


def test_one_that_is_added_while_running(outbox: Outbox, tmp_path: Path) -> None:
    outbox.queue("events")
    put(outbox, "events", 1)
    with running(outbox, **ALONE):
        outbox.add_relay("events", tmp_path / "a", "log")
        until(lambda: moved(tmp_path / "a") == [1])
        outbox.add_relay("clicks", tmp_path / "b", "log")
        put(outbox, "clicks", 2)
        until(lambda: moved(tmp_path / "b") == [2])
    assert threads_left() == []


def test_only_those_of_the_queues_that_are_started(outbox: Outbox, tmp_path: Path) -> None:
    outbox.add_relay("events", tmp_path / "a", "log")
    outbox.add_relay("clicks", tmp_path / "b", "log")
    put(outbox, "events", 1)
    put(outbox, "clicks", 2)
    with running(outbox, ["clicks"], **QUICK):
        until(lambda: moved(tmp_path / "b") == [2])
    assert [job.status for job in outbox.jobs("events")] == ["ready"]
    assert not (tmp_path / "a").exists()


def test_a_stop_waits_for_the_step_in_progress(
    outbox: Outbox, engine: sqlalchemy.Engine, held: Held, tmp_path: Path
) -> None:
    """And for no more than that."""
    outbox.add_relay("events", tmp_path, "log", encode=held, batch=2)
    put_each(outbox, "events", range(10))
    outbox.start(**ALONE)
    assert held.is_in.wait(PATIENCE)
    answers: list[bool] = []
    stopping = threading.Thread(target=lambda: answers.append(outbox.stop()))
    stopping.start()
    stopping.join(0.2)
    assert answers == []
    held.may_go_on.set()
    stopping.join(PATIENCE)
    assert answers == [True]
    assert moved(tmp_path) == [0, 1]
    assert owners(engine) == [None]
    assert threads_left() == []
    with running(outbox, **ALONE):
        until(lambda: not outbox.jobs("events"))
    assert moved(tmp_path) == list(range(10))


def test_a_stop_with_a_timeout_gives_up_a_step(
    outbox: Outbox, engine: sqlalchemy.Engine, held: Held, tmp_path: Path, records: Records
) -> None:
    """The next start goes on at once, and the old step, when it goes on, changes nothing."""
    encodes = [held]

    def encode(job: Job) -> str:
        return encodes[0](job) if encodes else str(job.payload)

    outbox.add_relay("events", tmp_path, "log", encode=encode, batch=3)
    put_each(outbox, "events", range(5))
    outbox.start(**ALONE)
    assert held.is_in.wait(PATIENCE)
    began = time.monotonic()
    assert not outbox.stop(timeout=0.2)
    assert time.monotonic() - began < 1.2
    until(lambda: owners(engine) == [None])
    encodes.clear()
    with running(outbox, **ALONE):
        until(lambda: not outbox.jobs("events"))
        held.may_go_on.set()
        until(lambda: len(relay_threads()) == 1)
        put(outbox, "events", 5)
        until(lambda: not outbox.jobs("events"))
    assert moved(tmp_path) == list(range(6))
    assert not records.of("failed")
    assert threads_left() == []


def test_a_step_that_was_given_up_does_not_touch_what_is_there_now(
    open_outbox: Callable[..., Outbox], held: Held, tmp_path: Path
) -> None:
    outbox = open_outbox()
    outbox.add_relay("events", tmp_path / "queues", "log", encode=held)
    put(outbox, "events", 1)
    outbox.start(**ALONE)
    assert held.is_in.wait(PATIENCE)
    assert not outbox.stop(timeout=0.01)
    until(lambda: "kestrelpy-outbox-feeder" not in threads_left())
    outbox.core.store = None
    held.may_go_on.set()
    until(lambda: not relay_threads())
    assert moved(tmp_path / "queues") == []


def test_a_stop_during_failures(outbox: Outbox, engine: sqlalchemy.Engine, tmp_path: Path, records: Records) -> None:
    (tmp_path / "file").write_text("")
    outbox.add_relay("events", tmp_path / "file", "log")
    put(outbox, "events", 1)
    outbox.start(**ALONE)
    until(lambda: records.of("relay", "failed"))
    threading.Event().wait(1.0)  # the pauses have grown
    began = time.monotonic()
    assert outbox.stop(timeout=PATIENCE)
    assert time.monotonic() - began < 1.0
    assert owners(engine) == [None]


# -- several ---------------------------------------------------------------------------------------------------------


def test_another_process_takes_over_at_a_stop(engine: sqlalchemy.Engine, tmp_path: Path) -> None:
    outboxes = [Outbox(engine) for _ in range(2)]
    for each in outboxes:
        each.create_tables()
        each.add_relay("events", tmp_path, "log", batch=2)
        each.start(threads=1, poll_interval=0.1)
    for round_ in range(4):
        put_each(outboxes[0], "events", range(round_ * 10, round_ * 10 + 10))
        until(lambda: not outboxes[0].jobs("events"))
        leaving = outboxes[round_ % 2]
        assert leaving.stop(PATIENCE)
        leaving.start(threads=1, poll_interval=0.1)
    for each in outboxes:
        assert each.stop(PATIENCE)
        each.close()
    assert moved(tmp_path) == list(range(40))


RELAYING = """
import sys
from kestrelpy.outbox import Outbox
outbox = Outbox(sys.argv[1], lease=0.5)
outbox.add_relay("events", sys.argv[2], "log", batch=2)
outbox.start(threads=1)
print("on", flush=True)
sys.stdin.read()
"""


def test_another_process_takes_over_at_the_end_of_a_lease(
    open_outbox: Callable[..., Outbox], engine: sqlalchemy.Engine, tmp_path: Path
) -> None:
    """Without polling: who waits for a lease knows when it is over."""
    outbox = open_outbox(lease=0.5)
    outbox.add_relay("events", tmp_path, "log", batch=2)
    url = engine.url.render_as_string(hide_password=False)
    command = [sys.executable, "-c", RELAYING, url, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "on\n"
        until(lambda: None not in owners(engine) and owners(engine))
        with running(outbox, **ALONE):
            put_each(outbox, "events", range(10))
            until(lambda: not outbox.jobs("events"))
            other.kill()
            put_each(outbox, "events", range(10, 20))
            until(lambda: not outbox.jobs("events"))
    assert moved(tmp_path) == list(range(20))


def test_a_forked_child_has_none(outbox: Outbox, tmp_path: Path) -> None:
    outbox.add_relay("events", tmp_path, "log")
    with running(outbox, **ALONE):
        put(outbox, "events", 1)
        until(lambda: moved(tmp_path) == [1])
        child = os.fork()
        if child == 0:
            os._exit(0 if outbox.stop() and not relay_threads() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        put(outbox, "events", 2)
        until(lambda: moved(tmp_path) == [1, 2])


# -- asyncio ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["start", "astart"])
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg", "aiosqlite"])
def test_on_an_engine_of_asyncio(request: pytest.FixtureRequest, driver: str, tmp_path: Path, kind: str) -> None:
    url = sqlalchemy.make_url(request.getfixturevalue("sqlite_url" if driver == "aiosqlite" else "postgres_url"))

    async def work() -> None:
        engine = create_async_engine(url.set(drivername=f"{url.get_backend_name()}+{driver}"))
        outbox = Outbox(engine)
        await outbox.acreate_tables()
        outbox.add_relay("events", tmp_path, "log", batch=2)
        if kind == "start":
            await asyncio.to_thread(outbox.start, **ALONE)
        else:
            await outbox.astart(**ALONE)
        async with outbox.abegin() as connection:
            await outbox.aput_many(connection, "events", list(range(5)))
        while moved(tmp_path) != list(range(5)):
            await asyncio.sleep(0.01)
        assert await outbox.astop(PATIENCE)
        await outbox.aclose()
        await engine.dispose()

    asyncio.run(asyncio.wait_for(work(), PATIENCE))
    assert threads_left() == []


def test_twins_have_nothing_in_common(outbox: Outbox, tmp_path: Path) -> None:
    outbox.add_relay("events", tmp_path, "log", batch=1)
    put_each(outbox, "events", range(3))
    (relay,) = outbox.core.relays
    assert isinstance(relay, Relay)
    first, second = (relay.twin(outbox.core.open_store()) for _ in range(2))
    assert [first.step(), second.step(), relay.step()] == [1, 0, 0]
    first.give_up()
    assert second.step() == 1
    second.release()
    assert relay.step() == 1
