"""The outbox on a work queue: how it is bound, what it does not have, and its transactions."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import KestrelError, QueueFull, UnsupportedFormat
from kestrelpy.outbox import (
    DuplicateJob,
    Job,
    JobTooBig,
    MissingPackage,
    NotSupported,
    Outbox,
    OutboxError,
    admin,
    claims,
    puts,
    reports,
)
from kestrelpy.testing import ManualClock, MemoryDisk
from kestrelpy.work import WorkQueue
from tests.outbox.journal.looks import put, states, store_of
from tests.support.paths import PYTHONPATH
from tests.support.queues import START_MS

MakeOutbox = Callable[..., Outbox]


# -- binding ---------------------------------------------------------------------------------------------------------


def test_the_work_queue_is_the_callers(queue: WorkQueue) -> None:
    with Outbox(queue) as outbox:
        outbox.create_tables()
        asyncio.run(outbox.acreate_tables())
        outbox.queue("mail")
        put(outbox, "mail", 1)
    assert not queue.closed
    assert [job.tube for job in queue.jobs("mail")] == ["mail"]
    with pytest.raises(OutboxError, match="closed"):
        put(outbox, "mail", 1)
    later = Outbox()
    later.queue("mail")
    with pytest.raises(OutboxError, match="not bound"):
        put(later)
    later.bind(queue)
    assert len(later.jobs()) == 1
    with pytest.raises(OutboxError, match="bound already"):
        later.bind(queue)
    asyncio.run(later.aclose())


def test_a_work_queue_has_one_outbox_at_a_time(queue: WorkQueue) -> None:
    with Outbox(queue), pytest.raises(OutboxError, match="has an outbox already"):
        Outbox(queue)
    Outbox(queue).close()
    unbound = Outbox()
    unbound.add_consumer("mail", print, transactional=True)
    with pytest.raises(NotSupported):
        unbound.bind(queue)
    Outbox(queue).close()


def test_one_that_buries_by_itself_is_refused() -> None:
    with WorkQueue(None, max_attempts=3) as queue, pytest.raises(ValueError, match="max_attempts=3"):
        Outbox(queue)


def test_jobs_of_a_later_version_are_refused(queue: WorkQueue) -> None:
    queue.put(b"kOB\x02...", tube="mail")
    with pytest.raises(UnsupportedFormat, match="job 1 of work queue work has format version 2"):
        Outbox(queue)
    queue.delete(1)
    assert queue.stats().sessions == 0
    Outbox(queue).close()


def test_a_closed_work_queue(queue: WorkQueue) -> None:
    outbox = Outbox(queue)
    outbox.add_consumer("mail", print)
    queue.close()
    with pytest.raises(OutboxError, match="is closed: the outbox needs it"):
        outbox.start()
    assert "did not answer: QueueClosed" in outbox.health().reasons[0]
    with pytest.raises(KestrelError):
        put(outbox)
    outbox.close()


WITHOUT_PACKAGES = """
import sys

for name in {blocked!r}:
    sys.modules[name] = None
from kestrelpy.outbox import MissingPackage, Outbox
from kestrelpy.work import WorkQueue

seen = []
with WorkQueue("work") as queue, Outbox(queue) as outbox:
    outbox.create_tables()
    outbox.add_consumer("mail", seen.append)
    with outbox.begin() as tx:
        outbox.put(tx, "mail", 1, key="k")
    outbox.put_many(None, "mail", [2, 3])
    assert len(outbox.jobs()) == 3 and outbox.find("mail", "k").payload == 1
    assert outbox.health().healthy and outbox.stats()[0].count == 3
    try:
        with outbox.running(threads=1):
            while outbox.stats():
                pass
    except MissingPackage as missing:
        print(missing)
    else:
        print(sorted(seen))
try:
    Outbox("sqlite://")
except MissingPackage as missing:
    print(missing)
"""


@pytest.mark.parametrize(
    ("blocked", "ran"),
    [
        (["sqlalchemy"], "[1, 2, 3]"),
        (["sqlalchemy", "tenacity"], "tenacity is not installed: pip install kestrelpy[outbox]"),
    ],
)
def test_it_needs_no_sqlalchemy(tmp_path: Path, blocked: list[str], ran: str) -> None:
    program = WITHOUT_PACKAGES.format(blocked=blocked)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [ran, "sqlalchemy is not installed: pip install kestrelpy[outbox]"]


def test_missing_packages_are_import_errors() -> None:
    assert issubclass(MissingPackage, ImportError)


# -- what it does not have -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feature", "options"),
    [
        ("lane", {"lane": "l"}),
        ("depends_on", {"depends_on": 1}),
        ("depends_on", {"depends_on": ("mail", "k")}),
        ('if_exists="replace"', {"if_exists": "replace", "key": "k"}),
    ],
)
def test_puts_that_it_does_not_have(outbox: Outbox, queue: WorkQueue, feature: str, options: Any) -> None:
    for put_it in (put, put_in_transaction):
        with pytest.raises(NotSupported, match=f"an outbox on a WorkQueue has no {feature}: bind it to") as caught:
            put_it(outbox, "mail", 1, **options)
        assert caught.value.feature == feature
    options = {name: value for name, value in options.items() if name != "key"}
    with pytest.raises(NotSupported):
        outbox.put_many(None, "mail", [1], **options)
    assert states(queue) == {}


def put_in_transaction(outbox: Outbox, *args: Any, **options: Any) -> None:
    with outbox.begin() as tx:
        outbox.put(tx, *args, **options)


@pytest.mark.parametrize(
    ("feature", "options"),
    [
        ("transactional", {"transactional": True}),
        ("depends_on", {"depends_on": lambda _: None}),
        ("keep_done", {"keep_done": 60}),
        ("keep_done", {"keep_done": None}),
        ("keep_done", {"keep_done": 7 * 86_400.0}),  # also if it is what the default is
    ],
)
def test_queues_that_it_does_not_have(queue: WorkQueue, feature: str, options: Any) -> None:
    with Outbox(queue) as outbox:
        with pytest.raises(NotSupported, match=feature) as caught:
            outbox.add_consumer("q", print, **options)
        assert caught.value.feature == feature
        with pytest.raises(NotSupported, match=feature):
            outbox.queue("q", **options)
        outbox.queue("q")
        with pytest.raises(NotSupported):
            outbox.add_consumer("q", print, **options)
        put(outbox, "q", 1)
    with pytest.raises(NotSupported, match=feature):  # as a default of all queues
        Outbox(queue, **options)
    later = Outbox()
    later.add_consumer("q", print, **options)
    with pytest.raises(NotSupported, match=feature):
        later.bind(queue)
    with Outbox(queue, keep_done=0) as outbox:
        outbox.queue("q")


def test_relays(queue: WorkQueue, tmp_path: Path) -> None:
    with Outbox(queue) as outbox, pytest.raises(NotSupported, match="has no relay"):
        outbox.add_relay("mail", tmp_path / "into", "items")
    later = Outbox()
    later.add_relay("mail", tmp_path / "into", "items")
    with pytest.raises(NotSupported, match="has no relay"):
        later.bind(queue)
    later.bind("sqlite://")
    later.close()


def test_reports_over_done_jobs(outbox: Outbox) -> None:
    for report in (outbox.retry_stats, outbox.processing_times):
        with pytest.raises(NotSupported, match=rf"has no {report.__name__}\(\)"):
            report()


class Anything:
    """No connection."""


@pytest.mark.parametrize("connection", [sqlite3.connect(":memory:"), Anything(), 7], ids=["sqlite3", "object", "int"])
def test_connections_are_refused(outbox: Outbox, connection: Any) -> None:
    with pytest.raises(TypeError, match=r"takes None or what its begin\(\) gives, and no connection: not "):
        outbox.put(connection, "mail", 1)
    with pytest.raises(TypeError):
        outbox.put_many(connection, "mail", [1])
    with pytest.raises(TypeError):
        asyncio.run(outbox.aput(connection, "mail", 1))
    for look in (lambda: outbox.get(1, connection=connection), lambda: outbox.health(connection=connection)):
        with pytest.raises(TypeError):
            look()
    assert outbox.jobs() == []


def test_a_database_still_needs_a_connection() -> None:
    with Outbox("sqlite://") as outbox:
        outbox.create_tables()
        outbox.queue("mail")
        with pytest.raises(TypeError, match=r"use outbox\.begin\(\)"):
            outbox.put(None, "mail", 1)


def operations_of(module: Any) -> set[str]:
    """The functions whose first argument is ``sql``."""
    tree = ast.parse(inspect.getsource(module))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.args.args and node.args.args[0].arg == "sql"
    }


def test_each_operation_is_there_or_not_supported(outbox: Outbox) -> None:
    there = {*store_of(outbox)._operations, "put_one", "put_all"}
    wanted = {name for module in (admin, claims, puts, reports) for name in operations_of(module) if name[0] != "_"}
    within_others = {"free_waiting", "notify"}
    never_needed = {"free_lanes", "free_overlooked"}  # nothing is behind in a lane, or waits for another job
    assert wanted - there == {"retry_stats", "processing_times"} | within_others | never_needed


# -- transactions ----------------------------------------------------------------------------------------------------


def test_a_transaction_is_stored_at_its_end(outbox: Outbox, queue: WorkQueue) -> None:
    with outbox.begin() as tx:
        one = outbox.put(tx, "mail", 1, key="k", priority=3)
        two = outbox.put(tx, "bills", {"n": 2}, group="g")
        many = outbox.put_many(tx, "mail", [3, 4])
        assert (states(queue), states(queue, "bills")) == ({}, {})
        assert repr(tx) == "<JournalTransaction: 4 puts>"
    made = [one, two, *many]
    assert [job.id for job in made] == [1, 2, 3, 4]
    assert outbox.jobs() == made
    assert all(job.is_new for job in made)


def test_a_transaction_that_raises_stores_nothing(outbox: Outbox, queue: WorkQueue) -> None:
    with contextlib.suppress(ZeroDivisionError), outbox.begin() as tx:
        outbox.put(tx, "mail", 1, key="k")
        raise ZeroDivisionError
    assert states(queue) == {}
    assert put(outbox, "mail", 2, key="k").is_new


def test_a_transaction_without_puts_writes_nothing(outbox: Outbox, queue: WorkQueue) -> None:
    before = queue.stats().records_written
    with outbox.begin():
        pass
    assert queue.stats().records_written == before


def test_an_error_of_a_put_leaves_the_others(outbox: Outbox) -> None:
    put(outbox, "mail", 0, key="there")
    with outbox.begin() as tx:
        outbox.put(tx, "mail", 1)
        with pytest.raises(DuplicateJob):
            outbox.put_many(tx, "mail", [2, 3], keys=["a", "there"])
        outbox.put(tx, "mail", 4, key="a")
    assert [job.payload for job in outbox.jobs()] == [0, 1, 4]


def test_after_its_end_it_takes_nothing(outbox: Outbox) -> None:
    with outbox.begin() as tx:
        pass
    for put_it in (lambda: outbox.put(tx, "mail", 1), lambda: outbox.put_many(tx, "mail", [1])):
        with pytest.raises(OutboxError, match="this transaction has ended"):
            put_it()
    assert repr(tx) == "<JournalTransaction: 0 puts, ended>"
    assert outbox.jobs() == []


def test_within_another_one_it_is_refused(outbox: Outbox) -> None:
    with outbox.begin() as tx:
        outbox.put(tx, "mail", 1)
        with pytest.raises(OutboxError, match="has begun here already"), outbox.begin():
            pass
        outbox.put(tx, "mail", 2)
        put(outbox, "mail", "at once")
        seen: list[int] = []

        def in_another_thread() -> None:
            with outbox.begin() as other:
                seen.append(outbox.put(other, "mail", 3).id)

        thread = threading.Thread(target=in_another_thread)
        thread.start()
        thread.join()
        assert [job.payload for job in outbox.jobs()] == ["at once", 3]
    with outbox.begin() as tx:
        outbox.put(tx, "mail", 4)
    assert [job.payload for job in outbox.jobs()] == [1, 2, "at once", 3, 4]


def test_a_transaction_of_another_outbox_is_its_own(outbox: Outbox) -> None:
    """A put goes where its transaction is from, as with a connection of another engine."""
    with WorkQueue(None) as queue, Outbox(queue) as other, other.begin() as tx:
        job = outbox.put(tx, "mail", 1)
    assert outbox.jobs() == []
    assert job.id == 1


@pytest.mark.parametrize("operation", ["get", "find", "jobs", "retry", "cancel", "stats", "pause", "prune"])
def test_only_puts_take_a_transaction(outbox: Outbox, operation: str) -> None:
    arguments = {"get": (1,), "find": ("mail", "k"), "retry": (1,), "cancel": (1,), "pause": ("mail",)}
    with outbox.begin() as tx, pytest.raises(NotSupported, match=rf"no {operation}\(\) within a transaction"):
        getattr(outbox, operation)(*arguments.get(operation, ()), connection=tx)


def test_keys_are_known_at_the_put_where_that_can_be(outbox: Outbox) -> None:
    there = put(outbox, "mail", 0, key="there")
    with outbox.begin() as tx:
        first = outbox.put(tx, "mail", 1, key="k")
        for key, job in (("k", first), ("there", there)):
            with pytest.raises(DuplicateJob) as caught:
                outbox.put(tx, "mail", 2, key=key)
            assert (caught.value.job_id, caught.value.queue, caught.value.key) == (job.id, "mail", key)
            found = outbox.put(tx, "mail", 2, key=key, if_exists="return")
            assert (found, found.is_new) == (job, False)
        many = outbox.put_many(tx, "mail", [3, 4, 5], keys=["there", "new", "k"], if_exists="return")
        assert [(job.payload, job.is_new) for job in many] == [(0, False), (4, True), (1, False)]
        assert outbox.put(tx, "bills", 3, key="k").is_new
    assert [(job.queue, job.payload) for job in outbox.jobs()] == [("mail", 0), ("mail", 1), ("mail", 4), ("bills", 3)]


@pytest.mark.parametrize("if_exists", ["raise", "return"])
def test_a_key_that_comes_meanwhile_is_known_at_the_end(outbox: Outbox, if_exists: str) -> None:
    others: list[Job] = []

    def transaction() -> None:
        with outbox.begin() as tx:
            outbox.put(tx, "bills", 1)
            outbox.put(tx, "mail", 1, key="k", if_exists=if_exists)
            others.append(put(outbox, "mail", 2, key="k"))

    with pytest.raises(DuplicateJob) as caught:
        transaction()
    assert (caught.value.job_id, caught.value.queue, caught.value.key) == (others[0].id, "mail", "k")
    assert outbox.jobs() == others


def test_delays_are_counted_from_the_put(outbox: Outbox, queue: WorkQueue, clock: ManualClock) -> None:
    with outbox.begin() as tx:
        first = outbox.put(tx, "mail", 1, delay=10)
        outbox.put(tx, "mail", 2, delay=1)
        outbox.put(tx, "mail", 3, at_ms=START_MS + 5000)
        clock.advance(3)
    assert [queue.stats_job(job_id).time_left for job_id in (1, 2, 3)] == [7, 0, 2]
    assert (first.added_ms, first.due_ms) == (START_MS, START_MS + 10_000)
    assert outbox.get(first.id) == first


def test_limits_of_the_work_queue(clock: ManualClock) -> None:
    with (
        WorkQueue(None, clock=clock, max_job_bytes=200, max_jobs=3) as queue,
        Outbox(queue, clock=clock) as outbox,
    ):
        outbox.queue("mail")
        with outbox.begin() as tx:
            with pytest.raises(JobTooBig, match="max_job_bytes=200"):
                outbox.put(tx, "mail", "x" * 200)
            outbox.put(tx, "mail", "x" * 100)
        with pytest.raises(JobTooBig):
            put(outbox, "mail", "x" * 200)
        with pytest.raises(QueueFull, match="max_jobs=3"), outbox.begin() as tx:
            outbox.put_many(tx, "mail", [1, 2, 3])
        with pytest.raises(QueueFull):
            outbox.put_many(None, "mail", [1, 2, 3])
        assert len(outbox.jobs()) == 1
        outbox.put_many(None, "mail", [1, 2])
        queue.drain()
        with pytest.raises(KestrelError, match="draining"), outbox.begin() as tx:
            outbox.put(tx, "mail", 1)


@pytest.mark.parametrize("key", ["ü" * 128, "k" * 256])
def test_long_keys(outbox: Outbox, key: str) -> None:
    with pytest.raises(ValueError, match="key"):
        put(outbox, "mail", 1, key=key)
    assert put(outbox, "mail", 1, key="ü" * 127).is_new
    assert outbox.find("mail", "ü" * 127).id == 1
    with pytest.raises(LookupError):
        outbox.find("mail", "ü" * 128)


def test_the_twins_for_asyncio(outbox: Outbox) -> None:
    async def use() -> None:
        async with outbox.abegin() as tx:
            first = await outbox.aput(tx, "mail", 1, key="k")
            await outbox.aput_many(tx, "bills", [2, 3])
            assert await outbox.ajobs() == []
            with pytest.raises(OutboxError, match="has begun here already"):
                async with outbox.abegin():
                    pass
            await asyncio.gather(in_another_task(4), in_another_task(5))
        with contextlib.suppress(ZeroDivisionError):
            async with outbox.abegin() as tx:
                await outbox.aput(tx, "mail", 6)
                raise ZeroDivisionError
        second = await outbox.aput(None, "mail", 7)
        assert await outbox.aget(first.id) == first
        assert await outbox.aget(second.id) == second
        assert await outbox.afind("mail", "k") == first

    async def in_another_task(payload: int) -> None:
        async with outbox.abegin() as tx:
            await asyncio.sleep(0)
            await outbox.aput(tx, "mail", payload)

    asyncio.run(use())
    assert sorted(job.payload for job in outbox.jobs()) == [1, 2, 3, 4, 5, 7]


def test_a_transaction_is_whole_after_a_power_cut(clock: ManualClock) -> None:
    from kestrelpy.testing import CrashingDisk, PowerModel

    disk = CrashingDisk()
    queue = WorkQueue("/work", clock=clock, disk=disk, segment_bytes=8192, max_job_bytes=2000, sync="always")
    outbox = Outbox(queue, clock=clock)
    for name in ("mail", "bills"):
        outbox.queue(name)
    cuts: list[CrashingDisk] = []
    disk.before_operation = lambda: cuts.extend(disk.after_kill().power_states(PowerModel.EXT4, 3))
    for number in range(3):
        with outbox.begin() as tx:
            outbox.put_many(tx, "mail", [number] * 5)
            outbox.put(tx, "bills", "x" * 900)
    disk.before_operation = None
    outbox.close()
    queue.close()
    for cut in cuts:
        with WorkQueue("/work", clock=clock, disk=cut, segment_bytes=8192, max_job_bytes=2000) as again:
            found = Outbox(again, clock=clock)
            numbers = [job.payload for job in found.jobs("mail")]
            assert numbers == [number for number in range(3) for _ in range(5)][: len(numbers)]
            assert len(numbers) == 5 * len(found.jobs("bills"))
            found.close()
    assert len(cuts) > 20


def test_memory_only() -> None:
    with WorkQueue(None) as queue, Outbox(queue) as outbox:
        outbox.queue("mail")
        assert put(outbox, "mail", 1).payload == 1
    assert MemoryDisk is not None
