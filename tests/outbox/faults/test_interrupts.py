"""Ctrl-C at any place of a call of the outbox: it was done or not done, the caller's transaction is the caller's, no
lock and no connection is kept, no thread is left, and the outbox goes on.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import sqlalchemy

from kestrelpy.outbox import DuplicateJob
from kestrelpy.outbox.fork_gate import ForkGate
from kestrelpy.outbox.outbox import Outbox
from tests.interrupts import strikes
from tests.interrupts.strikes import Interrupter, interrupter_at, watchdog
from tests.support.budget import ALL, SEED, Tally, share
from tests.support.patience import until

Call = Callable[[], object]
PLACES = 400
"""Of each call, at most, that are struck."""
PATIENCE = 20.0


class Scene:
    """An outbox with a few jobs."""

    def __init__(self, engine: sqlalchemy.Engine) -> None:
        self.engine = engine
        self.outbox = Outbox(engine, backoff=0.0)
        self.ran: list[object] = []
        self.outbox.add_consumer("q", self.ran.append, stop_at_failure=False)
        self.outbox.create_tables()
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE orders (name TEXT)")

    def reset(self) -> None:
        """Four jobs: ready, in error, done, cancelled; their payload is their status."""
        self.ran.clear()
        with self.engine.begin() as connection:
            for table in ("kestrel_jobs", "kestrel_jobs_queues", "orders"):
                connection.exec_driver_sql(f"DELETE FROM {table}")
            self.jobs = {
                name: self.outbox.put(connection, "q", name, key=name)
                for name in ("ready", "error", "done", "cancelled")
            }
            for name in ("error", "done", "cancelled"):
                connection.exec_driver_sql(
                    f"UPDATE kestrel_jobs SET status = '{name}', first_error_ms = 1, finished_ms = 1, tries = 1 "
                    f"WHERE id = {self.jobs[name].id}"
                )

    def statuses(self) -> dict[str, str]:
        """By payload, seen by somebody else."""
        return {job.payload: job.status for job in self.outbox.jobs()}

    def check(self) -> None:
        """No connection is kept, no lock is held, and everything works."""
        if self.engine.pool.checkedout():  # type: ignore[attr-defined]
            gc.collect()  # what an exception's frames hold
        assert self.engine.pool.checkedout() == 0, "a connection is kept"  # type: ignore[attr-defined]
        with closing(self.engine.raw_connection()) as connection, closing(connection.cursor()) as cursor:
            if self.engine.dialect.name == "sqlite":
                cursor.execute("PRAGMA busy_timeout = 0")
                cursor.execute("BEGIN IMMEDIATE")
                cursor.execute("ROLLBACK")
                cursor.execute("PRAGMA busy_timeout = 5000")
            else:
                cursor.execute("LOCK TABLE kestrel_jobs IN ACCESS EXCLUSIVE MODE NOWAIT")
        with self.outbox.begin() as transaction:
            job = self.outbox.put(transaction, "q", "goes on")
        assert self.outbox.get(job.id).status == "ready"
        assert self.outbox.cancel(job.id)


@pytest.fixture
def scene(engine: sqlalchemy.Engine) -> Iterator[Scene]:
    made = Scene(engine)
    yield made
    made.outbox.close()


def strike(name: str, run: Callable[[Interrupter], None], tally: Tally) -> int:
    """``run`` undisturbed, then struck at every place, or at those that are drawn. Returns how many were."""
    undisturbed = interrupter_at(0)
    run(undisturbed)
    assert undisturbed.places > 3, "the tracer sees nothing"
    count = min(undisturbed.places, share(PLACES) if not ALL else PLACES)
    struck = 0
    for at in sorted(random.Random(f"{SEED} {name}").sample(range(1, undisturbed.places + 1), max(count, 8))):
        striker = interrupter_at(at)
        try:
            with watchdog(PATIENCE):
                run(striker)
        except BaseException as error:
            raise AssertionError(f"{name}, struck at place {at}, {striker.where}: {error!r}") from error
        struck += bool(striker.where)
    tally.add("interrupts of an outbox's calls", struck)
    return struck


# -- in the caller's transaction -------------------------------------------------------------------------------------

IN_TRANSACTION: dict[str, tuple[Callable[[Scene, Any], object], list[set[str]]]] = {
    "put": (lambda scene, connection: scene.outbox.put(connection, "q", "new"), [set(), {"new"}]),
    "put with all": (
        lambda scene, connection: scene.outbox.put(
            connection, "q", "new", key="new", depends_on=scene.jobs["ready"], lane="l", group="g", delay=1
        ),
        [set(), {"new"}],
    ),
    "put there": (
        lambda scene, connection: scene.outbox.put(connection, "q", "new", key="ready", if_exists="return"),
        [set()],
    ),
    "put refused": (
        lambda scene, connection: _refused(lambda: scene.outbox.put(connection, "q", "new", key="ready")),
        [set()],
    ),
    "put_many": (
        lambda scene, connection: scene.outbox.put_many(connection, "q", ["a", "b", "c"]),
        [set(), {"a", "b", "c"}],
    ),
    "put_many there": (
        lambda scene, connection: scene.outbox.put_many(
            connection, "q", ["a", "b"], keys=["new", "ready"], if_exists="return"
        ),
        [set(), {"a"}],
    ),
    "get": (lambda scene, connection: scene.outbox.get(scene.jobs["ready"].id, connection=connection), [set()]),
    "jobs": (lambda scene, connection: scene.outbox.jobs(connection=connection), [set()]),
}
"""The call, and what new jobs there may be when it has come to an end."""


def _refused(call: Call) -> None:
    with pytest.raises(DuplicateJob):
        call()


@pytest.mark.parametrize("kind", ["sqlalchemy", "driver"])
@pytest.mark.parametrize("name", IN_TRANSACTION)
def test_the_callers_transaction_is_the_callers(name: str, kind: str, scene: Scene, tally: Tally) -> None:
    call, allowed = IN_TRANSACTION[name]

    def run(striker: Interrupter) -> None:
        scene.reset()
        with scene.engine.connect() as connection:
            transaction = connection.begin()
            connection.exec_driver_sql("INSERT INTO orders VALUES ('before')")
            given = connection if kind == "sqlalchemy" else connection.connection.driver_connection
            struck = striker.run(lambda: call(scene, given))
            connection.exec_driver_sql("INSERT INTO orders VALUES ('after')")
            new = {job.payload for job in scene.outbox.jobs(connection=connection)} - scene.statuses().keys()
            assert new in (allowed if struck else allowed[-1:]), f"new: {new}"
            job = scene.outbox.put(connection, "q", "afterwards")
            transaction.commit()
        with scene.engine.begin() as connection:
            orders = connection.exec_driver_sql("SELECT name FROM orders ORDER BY name DESC")
            assert [order for (order,) in orders] == ["before", "after"]
        assert scene.statuses() == {
            **{each: each for each in scene.jobs},
            **dict.fromkeys(new, "ready"),
            "afterwards": "ready",
        } | ({"new": "waiting"} if name == "put with all" and new else {})
        assert scene.outbox.get(job.id).payload == "afterwards"
        scene.check()

    assert strike(name, run, tally)


def test_the_gate_for_forks_is_free_wherever_it_is_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the calls of ``threading``, too: no other thread waits for ever, and a fork goes on."""
    monkeypatch.setattr(strikes, "HELPERS", (*strikes.HELPERS, "/threading.py"))

    def use(gate: ForkGate, done: list[str]) -> None:
        with gate:
            done.append("used")

    for at in itertools.count(1):
        gate = ForkGate()
        done: list[str] = []
        striker = interrupter_at(at)
        striker.run(partial(use, gate, []))
        thread = threading.Thread(target=use, args=(gate, done), daemon=True)
        thread.start()
        thread.join(PATIENCE)
        assert done, f"struck at place {at}, {striker.where}: another thread waits for ever"
        gate.close()
        gate.open()
        if not striker.where:
            break
    assert at > 4, "the tracer sees nothing"


# -- in transactions of its own --------------------------------------------------------------------------------------

OWN: dict[str, tuple[Callable[[Scene], object], list[dict[str, str]]]] = {
    "get": (lambda scene: scene.outbox.get(scene.jobs["ready"].id), [{}]),
    "find": (lambda scene: scene.outbox.find("q", "done"), [{}]),
    "errors": (lambda scene: scene.outbox.errors(), [{}]),
    "retry": (lambda scene: scene.outbox.retry(scene.jobs["error"].id), [{}, {"error": "ready"}]),
    "retry_all": (lambda scene: scene.outbox.retry_all("q", "done"), [{}, {"done": "ready"}]),
    "retry_one": (
        lambda scene: scene.outbox.retry_one("q"),
        [{}, {"error": "running"}, {"error": "error"}, {"error": "done"}],
    ),
    "cancel": (lambda scene: scene.outbox.cancel(scene.jobs["ready"].id), [{}, {"ready": "cancelled"}]),
    "prune": (lambda scene: scene.outbox.prune(), [{}, {"done": "", "cancelled": ""}]),
    "pause": (lambda scene: scene.outbox.pause("q"), [{}]),
    "stats": (lambda scene: scene.outbox.stats(), [{}]),
    "health": (lambda scene: scene.outbox.health(), [{}]),
    "create_tables": (lambda scene: scene.outbox.create_tables(), [{}]),
    "begin": (lambda scene: _begin(scene), [{}, {"new": "ready"}]),
}
"""The call, and what may have become of the jobs."""


def _begin(scene: Scene) -> None:
    with scene.outbox.begin() as connection:
        scene.outbox.put(connection, "q", "new")


@pytest.mark.parametrize("name", OWN)
def test_a_call_is_done_or_not_done(name: str, scene: Scene, tally: Tally) -> None:
    call, allowed = OWN[name]

    def run(striker: Interrupter) -> None:
        scene.reset()
        before = scene.statuses()
        struck = striker.run(lambda: call(scene))
        assert struck == bool(striker.where), "the interrupt was swallowed"
        wanted = [{each: status for each, status in {**before, **change}.items() if status} for change in allowed]
        found = scene.statuses()
        assert found in (wanted if struck else wanted[-1:]), f"{found}"
        if found == {**before, "error": "ready"}:
            assert scene.outbox.get(scene.jobs["error"].id).tries == 0
        scene.check()

    assert strike(name, run, tally)


# -- start and stop --------------------------------------------------------------------------------------------------


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kestrelpy-outbox")]


def _works(scene: Scene) -> None:
    """Started, it runs a job; stopped, nothing of it is left."""
    scene.outbox.start(threads=2, poll_interval=0.2)
    with scene.outbox.begin() as connection:
        scene.outbox.put(connection, "q", "works")
    until(lambda: "works" in scene.ran)
    assert scene.outbox.stop()
    assert not _threads()
    assert set(scene.statuses().values()) <= {"done", "cancelled", "ready", "error"}


@pytest.mark.filterwarnings("ignore:.*socket:pytest.PytestUnraisableExceptionWarning")  # closed when it is collected
@pytest.mark.parametrize("name", ["start", "stop", "running", "close"])
def test_start_and_stop_are_done_or_not_done(name: str, scene: Scene, tally: Tally) -> None:
    def block() -> None:
        with scene.outbox.running(threads=2):
            pass

    def run(striker: Interrupter) -> None:
        scene.reset()
        scene.outbox.stop()
        outbox = scene.outbox
        if name == "start":
            striker.run(lambda: outbox.start(threads=2))
        elif name == "running":
            striker.run(block)
        else:
            outbox.start(threads=2)
            striker.run(outbox.stop if name == "stop" else outbox.close)
        if name == "close":
            outbox.close()
            assert not _threads()
            scene.outbox = Outbox(scene.engine, backoff=0.0)
            scene.outbox.add_consumer("q", scene.ran.append)
        scene.outbox.stop()
        assert not _threads(), _threads()
        assert "running" not in scene.statuses().values()
        _works(scene)
        scene.check()

    assert strike(name, run, tally)


@pytest.mark.parametrize("name", ["feeder", "writer", "0", "1", "listener"])
def test_a_start_that_gets_no_thread_leaves_none(name: str, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == f"kestrelpy-outbox-{name}":
            raise RuntimeError("can't start new thread")
        start(thread)

    scene.reset()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            scene.outbox.start(threads=2)
    assert not _threads()
    _works(scene)
    scene.check()


# -- a handler that is run by hand -----------------------------------------------------------------------------------


def test_ctrl_c_in_a_handler_that_is_run_by_hand_is_a_failure_and_is_raised(scene: Scene) -> None:
    def interrupted(payload: object) -> None:
        raise KeyboardInterrupt

    scene.reset()
    scene.outbox.add_consumer("q", interrupted, replace=True)
    with pytest.raises(KeyboardInterrupt):
        scene.outbox.retry_one("q")
    job = scene.outbox.get(scene.jobs["error"].id)
    assert (job.status, job.tries) == ("error", 2)
    scene.check()


def test_a_cancelled_task_that_runs_a_handler_by_hand_is_cancelled(scene: Scene) -> None:
    """The job has failed. (A handler that cancels itself is only that.)"""

    async def cancels_itself(payload: object) -> None:
        raise asyncio.CancelledError

    async def waits(payload: object) -> None:
        await asyncio.sleep(20)

    async def main() -> None:
        scene.outbox.add_consumer("q", cancels_itself, replace=True)
        job = await scene.outbox.aretry_one("q")
        assert job is not None
        assert (job.status, job.tries) == ("error", 2)
        scene.outbox.add_consumer("q", waits, replace=True)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scene.outbox.aretry_one("q"), 0.1)
        assert scene.outbox.get(scene.jobs["error"].id).tries == 3

    scene.reset()
    asyncio.run(main())
    scene.check()


# -- a task that is cancelled ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg_async", "aiosqlite"])
def test_a_put_whose_task_is_cancelled_is_done_or_not_done(
    driver: str, request: pytest.FixtureRequest, tally: Tally
) -> None:
    """Wherever it waits. What the driver makes of the caller's transaction is the driver's; the next one works."""
    url = str(request.getfixturevalue("sqlite_url" if driver == "aiosqlite" else "postgres_url"))
    scheme = "sqlite" if driver == "aiosqlite" else "postgresql"

    async def main() -> int:
        async with Outbox(sqlalchemy.make_url(url).set(drivername=f"{scheme}+{driver}")) as outbox:
            outbox.queue("q")
            await outbox.acreate_tables()
            cancelled = 0
            for steps in range(0, 60, 1 if ALL else 7):
                task = asyncio.create_task(_put_seven(outbox))
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                cancelled += isinstance((await asyncio.gather(task, return_exceptions=True))[0], BaseException)
                found = len(await outbox.ajobs())
                assert found % 7 == 0, f"cancelled after {steps} steps, it has left {found} jobs"
                await _put_seven(outbox)
                assert len(await outbox.ajobs(limit=1000)) == found + 7
                await outbox.aretry_all("q")
                async with outbox.abegin() as connection:
                    await connection.exec_driver_sql("DELETE FROM kestrel_jobs")
            return cancelled

    with watchdog(4 * PATIENCE):
        cancelled = asyncio.run(main())
    assert cancelled > 2
    tally.add("cancelled puts of an outbox", cancelled)


async def _put_seven(outbox: Outbox) -> None:
    async with outbox.abegin() as connection:
        await outbox.aput_many(connection, "q", list(range(5)))
        await outbox.aput(connection, "q", 5)
        await outbox.aput(connection, "q", 6)
