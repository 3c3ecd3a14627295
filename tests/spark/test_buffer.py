"""``DriverBuffer``: its batches, what becomes of one that fails, and that a batch that comes again is the same.

Where Spark is not what is tested, the session is a stand-in that hands the Arrow table to ``process`` as it is.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kestrelpy import (
    CorruptJournal,
    Item,
    JournaledQueue,
    QueueClosed,
    ReaderConfig,
    UnknownItem,
    UnsupportedFormat,
    open_reader,
)
from kestrelpy.codecs import JSON, UTF8
from kestrelpy.spark import DriverBuffer, UndecodableItem
from kestrelpy.spark.buffer.batch_plan import BatchPlan, decode_plan, encode_plan, spans_of
from kestrelpy.testing import CrashingDisk, FailingDisk, ManualClock, MemoryDisk, PowerModel
from tests.spark.sessions import SPARK_PATIENCE, need_java, slow_spark, spark  # noqa: F401
from tests.support.budget import ALL, LONG
from tests.support.patience import PATIENCE, until
from tests.support.queues import let_die, take_all

OpenQueue = Callable[..., JournaledQueue]


class Tables:
    """A session whose DataFrames are Arrow tables."""

    def createDataFrame(self, table: Any) -> Any:  # noqa: N802 - Spark's name
        return table


class Seen:
    """A ``process`` that remembers, and fails as often as it is told to."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, list[int]]] = []
        self.tables: list[Any] = []
        self.fails = 0
        self.error: BaseException = RuntimeError("not this time")

    def __call__(self, table: Any, batch_id: int) -> None:
        self.tables.append(table)
        self.batches.append((batch_id, table["id"].to_pylist()))
        if self.fails:
            self.fails -= 1
            raise self.error


@pytest.fixture
def seen() -> Seen:
    return Seen()


def buffer_of(queue: Any, process: Any, **options: Any) -> DriverBuffer:
    options.setdefault("max_wait", 0.0)
    options.setdefault("backoff", (0.001, 0.002))
    return DriverBuffer(queue, Tables(), process, **options)  # type: ignore[arg-type]


# -- batches ---------------------------------------------------------------------------------------------------------


def test_a_batch_is_a_dataframe_of_what_is_there(open_queue: OpenQueue, clock: ManualClock, spark: Any) -> None:  # noqa: F811
    queue = open_queue()
    queue.put(b"one")
    clock.advance(1.5)
    queue.put(b"\xff", expires_in=60)
    rows: list[Any] = []
    schemas = []

    def process(df: Any, batch_id: int) -> None:
        schemas.append(df.schema.simpleString())
        rows.extend(
            (batch_id, *row)
            for row in df.selectExpr("id", "unix_millis(added)", "unix_millis(expires)", "data").collect()
        )

    buffer = DriverBuffer(queue, spark, process, max_wait=0)
    assert buffer.run_once() == 2
    assert buffer.run_once() == 0
    now_ms = clock.time_ns() // 1_000_000
    assert rows == [(0, 1, now_ms - 1500, None, b"one"), (0, 2, now_ms, now_ms + 60_000, b"\xff")]
    assert schemas == ["struct<id:bigint,added:timestamp,expires:timestamp,error_count:int,data:binary>"]
    assert (buffer.items, buffer.batches, buffer.failures, buffer.error, buffer.batch_id) == (2, 1, 0, None, 0)
    assert queue.reader().items == 0


def test_it_runs_beside_the_producers(folder: Path, spark: Any, start: Callable[..., Any]) -> None:  # noqa: F811
    found: list[tuple[int, int, int]] = []

    def process(df: Any, batch_id: int) -> None:
        counted = df.selectExpr("count(*)", "sum(cast(cast(data as string) as bigint))").collect()[0]
        found.append((batch_id, *counted))

    with (
        JournaledQueue(folder, "jobs") as queue,
        DriverBuffer(queue, spark, process, max_items=700, max_wait=0.05) as buffer,
    ):
        producers = [start(queue.put_many, [b"%d" % n for n in range(at, 5000, 4)]) for at in range(4)]
        for producer in producers:
            producer.join(PATIENCE)
        assert buffer.wait_idle(SPARK_PATIENCE)
        assert buffer.running
        assert buffer.stop(SPARK_PATIENCE)
        assert not buffer.running
    assert [batch_id for batch_id, _, _ in found] == list(range(len(found)))
    assert sum(count for _, count, _ in found) == 5000
    assert max(count for _, count, _ in found) <= 700
    assert sum(total for _, _, total in found) == sum(range(5000))


def test_decoded_values_are_columns(open_queue: OpenQueue, spark: Any) -> None:  # noqa: F811
    queue = open_queue(codec=JSON)
    queue.put({"id": "a", "price": 1.5, "tags": ["x", "y"]})
    queue.put({"id": "b", "unknown": True})
    rows: list[Any] = []
    schema = "id string, price double, tags array<string>"
    buffer = DriverBuffer(
        queue, spark, lambda df, n: rows.extend(df.drop("added", "expires").collect()), schema=schema, max_wait=0
    )
    assert buffer.run_once() == 2
    assert [row.asDict() for row in rows] == [
        {"id": "a", "error_count": 0, "price": 1.5, "tags": ["x", "y"]},
        {"id": "b", "error_count": 0, "price": None, "tags": None},
    ]


def test_without_a_schema_the_value_is_one_column(open_queue: OpenQueue, seen: Seen) -> None:
    queue = open_queue()
    queue.put("größer".encode())
    assert buffer_of(queue, seen, codec=UTF8).run_once() == 1
    assert seen.tables[0]["value"].to_pylist() == ["größer"]
    assert "data" not in seen.tables[0].column_names


def test_a_batch_is_cut_at_its_limits(open_queue: OpenQueue, seen: Seen) -> None:
    queue = open_queue()
    queue.put_many([b"x" * 40] * 7)
    queue.put(b"y" * 1000)
    queue.put(b"z")
    buffer = buffer_of(queue, seen, max_items=3, max_bytes=100, max_wait=0.001)
    while buffer.run_once():
        pass
    assert seen.batches == [(0, [1, 2]), (1, [3, 4]), (2, [5, 6]), (3, [7]), (4, [8]), (5, [9])]


def test_a_batch_waits_for_more_until_its_time_is_up(folder: Path, seen: Seen, start: Callable[..., Any]) -> None:
    with JournaledQueue(folder, "jobs") as queue:
        queue.put(b"first")
        buffer = buffer_of(queue, seen, max_wait=PATIENCE, max_items=3)
        working = start(buffer.run_once)
        until(lambda: queue.reader().open_items)
        queue.put(b"second")
        assert working.is_alive()
        queue.put(b"third")  # it is full
        working.join(PATIENCE)
        assert seen.batches == [(0, [1, 2, 3])]
        assert buffer_of(queue, seen, max_wait=0.001).run_once() == 0


def test_while_a_batch_is_processed_the_next_one_is_taken(open_queue: OpenQueue) -> None:
    queue = open_queue()
    queue.put_many([b"x"] * 6)
    gate, done = threading.Event(), []

    def process(table: Any, batch_id: int) -> None:
        assert gate.wait(PATIENCE)
        done.append(table["id"].to_pylist())

    with buffer_of(queue, process, max_items=2) as buffer:
        until(lambda: queue.reader().open_items == 4)
        assert not buffer.stop(0.001)  # and the one in hand goes on
        assert queue.reader().open_items == 4
        gate.set()
        assert buffer.stop(PATIENCE)
    assert done == [[1, 2]]
    assert [item.id for item in take_all(queue)] == [3, 4, 5, 6]


def test_a_batch_that_is_ready_too_early_waits_in_peace(open_queue: OpenQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = open_queue()
    queue.put_many([b"x"] * 3)
    reader, gate, looks = queue.reader(), threading.Event(), list[int]()
    get_many = reader.get_many

    def look(*each: Any, **more: Any) -> list[Item]:
        looks.append(1)
        return get_many(*each, **more)

    monkeypatch.setattr(reader, "get_many", look)
    with buffer_of(reader, lambda table, batch_id: gate.wait(PATIENCE), max_items=2) as buffer:
        until(lambda: reader.open_items == 3)
        before = len(looks)
        threading.Event().wait(0.2)
        assert len(looks) - before < 20
        gate.set()
        assert buffer.wait_idle(PATIENCE)


def test_a_reader_of_another_process_will_do(open_queue: OpenQueue, folder: Path, seen: Seen) -> None:
    queue = open_queue()
    queue.put_many([b"a", b"b"])
    reader = open_reader(folder, "jobs", "lake", create=True, start="earliest")
    assert buffer_of(reader, seen).run_once() == 2
    assert (folder / "jobs+lake.batch").exists()
    reader.close()
    queue.put(b"c")
    reader = open_reader(folder, "jobs", "lake", create=True)
    assert buffer_of(reader, seen).run_once() == 1
    reader.close()
    assert seen.batches == [(0, [1, 2]), (1, [3])]


def test_a_queue_in_memory_will_do(open_queue: OpenQueue, folder: Path, seen: Seen) -> None:
    queue = open_queue(journaled=False)
    queue.put(b"a")
    assert buffer_of(queue, seen).run_once() == 1
    assert not folder.exists()


# -- failures --------------------------------------------------------------------------------------------------------


def test_a_batch_that_fails_comes_again_and_nothing_with_it(open_queue: OpenQueue, seen: Seen) -> None:
    queue = open_queue()
    queue.put_many([b"x"] * 3)
    buffer = buffer_of(queue, seen, max_items=3)
    seen.fails = 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not this time"):
            buffer.run_once()
        queue.put(b"later")
        assert buffer.error is seen.error
        assert queue.reader().open_items == 0
    assert buffer.run_once() == 3
    assert buffer.run_once() == 2
    assert seen.batches == [(0, [1, 2, 3])] * 3 + [(1, [4, 5])]
    assert [table["error_count"].to_pylist()[0] for table in seen.tables] == [0, 1, 2, 0]
    assert (buffer.failures, buffer.batches, buffer.items, buffer.error) == (2, 2, 5, None)


def test_failures_are_tried_again_after_a_while(open_queue: OpenQueue, seen: Seen, quiet: None) -> None:
    queue = open_queue()
    queue.put_many([b"x"] * 10)
    seen.fails = 5
    with buffer_of(queue, seen, max_items=2) as buffer:
        assert buffer.wait_idle(PATIENCE)
    assert buffer.failures == 5
    assert seen.batches == [(0, [1, 2])] * 5 + [(n, [2 * n + 1, 2 * n + 2]) for n in range(5)]
    queue._check()


def test_a_buffer_that_waits_to_try_again_stops_at_once(open_queue: OpenQueue, seen: Seen, quiet: None) -> None:
    queue = open_queue()
    queue.put(b"x")
    seen.fails = 1
    buffer = buffer_of(queue, seen, backoff=(1000, 1000)).start()
    until(lambda: buffer.failures)
    assert buffer.stop(PATIENCE)
    assert str(buffer.error) == "not this time"
    with pytest.raises(RuntimeError, match="not this time"):
        buffer.wait_idle()
    assert buffer.run_once() == 1
    assert seen.batches == [(0, [1])] * 2


def test_a_hook_may_take_what_fails_too_often(open_queue: OpenQueue, seen: Seen) -> None:
    dead = []

    def take(item: Item) -> bool:
        if item.error_count <= 1:
            return False
        dead.append(item.data)
        return True

    queue = open_queue(default_reader=ReaderConfig(on_abort=take))
    queue.put(b"{}")
    queue.put(b"broken")
    queue.put(b"{}")
    buffer = buffer_of(queue, seen, codec=JSON, max_items=2)
    for _ in range(2):
        with pytest.raises(UndecodableItem, match="item 2 cannot be decoded: JSONDecodeError") as caught:
            buffer.run_once()
    assert (caught.value.item_id, caught.value.last_id) == (2, 2)
    assert dead == [b"{}", b"broken"]
    assert buffer.run_once() == 1  # nothing is left of batch 0
    assert seen.batches == [(1, [3])]


@pytest.mark.usefixtures("spark")  # which parses the schema
def test_values_that_do_not_fit_the_schema_fail(open_queue: OpenQueue, seen: Seen) -> None:
    queue = open_queue(codec=JSON)
    queue.put({"n": 1})
    queue.put({"n": "many"})
    with pytest.raises(UndecodableItem, match="one of the items 1 to 2 cannot be decoded"):
        buffer_of(queue, seen, schema="n int").run_once()
    assert not seen.batches
    with pytest.raises(ValueError, match="columns with names"):
        buffer_of(queue, seen, schema="int")


def test_expired_items_do_not_come_again(open_queue: OpenQueue, clock: ManualClock, seen: Seen) -> None:
    queue = open_queue()
    queue.put(b"x")
    queue.put(b"y", expires_in=10)
    buffer = buffer_of(queue, seen)
    seen.fails = 1
    with pytest.raises(RuntimeError):
        buffer.run_once()
    clock.advance(11)
    queue.put(b"z")
    assert buffer.run_once() == 1
    assert buffer.run_once() == 1
    assert seen.batches == [(0, [1, 2]), (0, [1]), (1, [3])]


def test_what_ends_it_is_raised(open_queue: OpenQueue, seen: Seen, quiet: None) -> None:
    queue = open_queue()
    buffer = buffer_of(queue, seen)
    with pytest.raises(QueueClosed), buffer:
        _close_under(queue, buffer)
    assert isinstance(buffer.error, QueueClosed)


def _close_under(queue: JournaledQueue, buffer: DriverBuffer) -> None:
    queue.close()
    until(lambda: not buffer.running)


def test_an_interrupt_of_process_loses_nothing(open_queue: OpenQueue, seen: Seen) -> None:
    queue = open_queue()
    queue.put_many([b"x"] * 3)
    seen.fails, seen.error = 1, KeyboardInterrupt()
    buffer = buffer_of(queue, seen)
    with pytest.raises(KeyboardInterrupt):
        buffer.run_once()
    assert buffer.run_once() == 3
    assert seen.batches == [(0, [1, 2, 3])] * 2


def test_a_seek_under_a_batch_ends_it(open_queue: OpenQueue, seen: Seen) -> None:
    queue = open_queue()
    queue.put_many([b"x"] * 3)

    def process(table: Any, batch_id: int) -> None:
        seen(table, batch_id)
        if batch_id == 0:
            queue.seek(2)

    buffer = buffer_of(queue, process)
    with pytest.raises(LookupError, match="not an open read"):
        buffer.run_once()
    assert buffer.run_once() == 2
    assert seen.batches == [(0, [1, 2, 3]), (1, [2, 3])]


def test_an_error_of_process_is_never_taken_for_one_of_the_reader(open_queue: OpenQueue, seen: Seen) -> None:
    queue = open_queue()
    queue.put_many([b"x"] * 2)
    seen.fails, seen.error = 1, UnknownItem(7, "another")
    buffer = buffer_of(queue, seen)
    with pytest.raises(UnknownItem):
        buffer.run_once()
    assert buffer.run_once() == 2
    assert seen.batches == [(0, [1, 2])] * 2


def test_nobody_else_may_take_from_its_reader(open_queue: OpenQueue, seen: Seen) -> None:
    queue = open_queue()
    queue.put_many([b"x", b"y"])
    buffer = buffer_of(queue, seen)
    seen.fails = 1
    with pytest.raises(RuntimeError):
        buffer.run_once()
    stolen = queue.get()
    with pytest.raises(Exception, match="item 1 of batch 0 was taken by another consumer"):
        buffer.run_once()
    stolen.abort()
    assert buffer.run_once() == 2
    with buffer_of(queue, seen):
        with pytest.raises(ValueError, match="another buffer drains 'jobs'"):
            buffer.run_once()
        with pytest.raises(ValueError, match="another buffer drains 'jobs'"):
            buffer.start()
    with buffer, pytest.raises(RuntimeError, match="running already"):
        buffer.start()
    with pytest.raises(RuntimeError, match="running already"), buffer:
        buffer.run_once()


@pytest.mark.parametrize(
    "options", [{"max_items": 0}, {"max_bytes": 0}, {"max_bytes": 1 << 31}, {"max_wait": -1.0}, {"backoff": (2, 1)}]
)
def test_options_out_of_range_are_refused(open_queue: OpenQueue, options: Any) -> None:
    with pytest.raises(ValueError, match="not"):
        buffer_of(open_queue(), print, **options)


# -- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_is_read_back(seen: Seen) -> None:
    ids = [1, 2, 3, 7, 9, 10]
    plan = BatchPlan(b"q" * 16, 41, spans_of(ids))
    assert list(plan.ids()) == ids
    for each in (plan, plan._replace(finished=True), plan._replace(spans=())):
        assert decode_plan(encode_plan(each), "x") == each
    assert not decode_plan(
        encode_plan(plan) + encode_plan(plan._replace(batch_id=40, finished=True))[-4:], "x"
    ).finished


def test_a_damaged_plan_is_seen() -> None:
    whole = encode_plan(BatchPlan(b"q" * 16, 41, ((1, 3), (5, 5))))
    for size in range(len(whole)):
        with pytest.raises(CorruptJournal):
            decode_plan(whole[:size], "x")
    for at in range(len(whole)):
        with pytest.raises((CorruptJournal, UnsupportedFormat)):
            decode_plan(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :], "x")


def test_with_a_damaged_plan_nothing_is_taken(open_queue: OpenQueue, folder: Path, seen: Seen) -> None:
    queue = open_queue()
    queue.put(b"x")
    (folder / "jobs+.batch").write_bytes(b"KSTRLBAT")
    with pytest.raises(CorruptJournal, match=r"jobs\+\.batch"):
        buffer_of(queue, seen).run_once()
    assert queue.reader().open_items == 0


def test_erasing_the_queue_leaves_the_plan_and_ids_go_on(open_queue: OpenQueue, folder: Path, seen: Seen) -> None:
    queue = open_queue()
    queue.put_many([b"x", b"y"])
    seen.fails = 1
    with pytest.raises(RuntimeError):
        buffer_of(queue, seen).run_once()
    queue.erase()
    assert [path.name for path in folder.iterdir()] == ["jobs+.batch"]
    queue = open_queue()
    queue.put(b"of another queue")
    assert buffer_of(queue, seen).run_once() == 1
    assert seen.batches == [(0, [1, 2]), (1, [1])]


# -- the same batch again --------------------------------------------------------------------------------------------


class Died(BaseException):
    """The process dies here."""


def _die(*_: object, **__: object) -> NoReturn:
    raise Died


@pytest.mark.parametrize("where", ["save", "process", "commit", "checkpoint", "finish"])
@pytest.mark.parametrize("after", [False, True])
def test_a_batch_comes_again_after_a_death(
    folder: Path, clock: ManualClock, seen: Seen, monkeypatch: pytest.MonkeyPatch, where: str, after: bool
) -> None:
    queue = JournaledQueue(folder, "jobs", clock=clock)
    queue.put_many([b"x"] * 4)
    buffer = buffer_of(queue, seen, max_items=2)
    assert buffer.run_once() == 2
    owner, name = {
        "save": (buffer._file, "save"),
        "process": (buffer, "_process"),
        "commit": (queue.reader(), "commit_many"),
        "checkpoint": (queue.reader(), "checkpoint"),
        "finish": (buffer._file, "finish"),
    }[where]
    inner = getattr(owner, name)

    def die(*each: Any, **more: Any) -> None:
        if after:
            inner(*each, **more)
        _die()

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, die)
        patch.setattr(queue.reader(), "abort", lambda item: None)  # the dead give nothing back
        with pytest.raises(Died):
            buffer.run_once()
    let_die(queue)
    before = len(seen.batches)
    with JournaledQueue(folder, "jobs", clock=clock) as queue:
        queue.put(b"later")
        buffer = buffer_of(queue, seen)
        while buffer.run_once():
            pass
    planned = (where, after) != ("save", False)
    committed = where == "finish" or (where, after) == ("checkpoint", True)
    expected = [(2, [5])] if committed else [(1, [3, 4]), (2, [5])] if planned else [(1, [3, 4, 5])]
    assert seen.batches[before:] == expected


FAULTS = (errno.EIO, errno.ENOSPC)


@pytest.mark.parametrize("error", FAULTS)
def test_every_failing_operation_of_the_disk(clock: ManualClock, seen: Seen, quiet: None, error: int) -> None:
    """A batch is planned, processed and committed with its n-th operation failing, for all n."""
    at, failed = 0, True
    while failed:
        at += 1
        disk = FailingDisk(MemoryDisk())
        queue = JournaledQueue("/q", "jobs", clock=clock, disk=disk)
        queue.put_many([b"x"] * 4)
        ledger: dict[int, list[int]] = {}

        def process(table: Any, batch_id: int, ledger: dict[int, list[int]] = ledger) -> None:
            assert ledger.setdefault(batch_id, table["id"].to_pylist()) == table["id"].to_pylist()

        buffer = buffer_of(queue, process, max_items=2)
        disk.arm(error, at=at)
        _all_batches(buffer)
        failed = disk.failures > 0
        disk.disarm()
        with contextlib.suppress(OSError):  # a sync has failed: closing says so
            queue.close()
        with JournaledQueue("/q", "jobs", clock=clock, disk=disk) as queue:
            _all_batches(buffer_of(queue, process, max_items=2))
        assert ledger == {0: [1, 2], 1: [3, 4]}, at
    assert at > 10


def _all_batches(buffer: DriverBuffer) -> None:
    for _ in range(20):
        try:
            if not buffer.run_once():
                return
        except OSError:
            continue


@pytest.mark.parametrize("model", [PowerModel.PREFIX, PowerModel.EXT4, PowerModel.ANY])
def test_every_power_cut(clock: ManualClock, quiet: None, model: PowerModel) -> None:
    """The power goes before the n-th operation of two batches, for all n, and leaves what it may."""
    disk = CrashingDisk()
    ledger: dict[int, list[int]] = {}
    states: list[tuple[CrashingDisk, dict[int, list[int]]]] = []

    def process(table: Any, batch_id: int) -> None:
        ledger[batch_id] = table["id"].to_pylist()

    with JournaledQueue("/q", "jobs", clock=clock, disk=disk, sync="never") as queue:
        queue.put_many([b"x"] * 3)
        buffer = buffer_of(queue, process, max_items=2)

        def look() -> None:
            states.extend((each, dict(ledger)) for each in disk.power_states(model, 6, seed=len(states)))

        disk.before_operation = look
        while buffer.run_once():
            pass
        disk.before_operation = None
    assert len(states) > 50
    for state, seen in states:
        _judge(state, seen, clock)


def test_a_power_cut_after_a_kill(clock: ManualClock, monkeypatch: pytest.MonkeyPatch, quiet: None) -> None:
    """A process is killed when the commit is saved and not synced; the power goes while the next one works."""
    disk = CrashingDisk()
    ledger: dict[int, list[int]] = {}
    queue = JournaledQueue("/q", "jobs", clock=clock, disk=disk)
    queue.put_many([b"x"] * 3)
    reader, saved = queue.reader(), list[CrashingDisk]()
    save = reader.checkpoint

    def save_and_die(durable: bool) -> None:
        save()
        saved.append(disk.after_kill())
        _die()

    monkeypatch.setattr(reader, "checkpoint", save_and_die)
    with pytest.raises(Died):
        buffer_of(queue, lambda table, n: ledger.__setitem__(n, table["id"].to_pylist()), max_items=2).run_once()
    queue.close()
    disk = saved[0]
    states: list[tuple[CrashingDisk, dict[int, list[int]]]] = []
    with JournaledQueue("/q", "jobs", clock=clock, disk=disk) as queue:
        buffer = buffer_of(queue, lambda table, n: ledger.__setitem__(n, table["id"].to_pylist()), max_items=2)
        disk.before_operation = lambda: states.extend(
            (each, dict(ledger)) for each in disk.power_states(PowerModel.PREFIX, 9)
        )
        assert buffer.run_once() == 1
        disk.before_operation = None
    assert ledger == {0: [1, 2], 1: [3]}
    for state, seen in states:
        _judge(state, seen, clock)


def _judge(disk: CrashingDisk, seen: dict[int, list[int]], clock: ManualClock) -> None:
    """What was processed before comes again with the same number and the same items, or not at all."""
    again: dict[int, list[int]] = {}
    with JournaledQueue("/q", "jobs", clock=clock, disk=disk) as queue:
        last_id = queue.stats().tail_id
        queue.put(b"new")
        buffer = buffer_of(
            queue, lambda table, batch_id: again.__setitem__(batch_id, table["id"].to_pylist()), max_items=2
        )
        while buffer.run_once():
            pass
    for batch_id in seen.keys() & again.keys():
        assert seen[batch_id] == again[batch_id]
    together = seen | again
    assert sorted(together) == list(range(len(together)))
    assert [item_id for batch_id in sorted(together) for item_id in together[batch_id]] == list(range(1, last_id + 2))


# -- kills -----------------------------------------------------------------------------------------------------------

KILLED = Path(__file__).with_name("killed_buffer.py")


def test_kills_at_seeded_points(tmp_path: Path, tally: Any) -> None:
    """A process is killed again and again at its n-th step, while it puts and drains; an idempotent process sees
    every item once."""
    kills = 400 if LONG else 40 if ALL else 10
    told = _run_killed(tmp_path, "tables", kills)
    _prove(tmp_path, told)
    assert told["kills"] == kills
    assert told["repeated"] > 0  # some batches came twice, and were seen to be the same
    tally.add("kills of a process with a driver buffer", kills)


@slow_spark
def test_kills_of_a_driver(tmp_path: Path, tally: Any) -> None:
    need_java()
    told = _run_killed(tmp_path, "spark", 3)
    _prove(tmp_path, told)
    assert told["kills"] == 3
    tally.add("kills of a driver with a driver buffer", 3)


def _run_killed(folder: Path, kind: str, kills: int) -> Any:
    seed = os.environ.get("KESTRELPY_SEED", "1")
    command = [sys.executable, str(KILLED), str(folder), kind, str(kills), seed]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            told, errors = process.communicate(timeout=250)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whoever it has started
    assert process.returncode == 0, errors[-3000:]
    return json.loads(told.splitlines()[-1])


def _prove(folder: Path, told: Any) -> None:
    import hashlib

    batches = {int(path.stem): json.loads(path.read_text()) for path in (folder / "out").glob("*.json")}
    assert sorted(batches) == list(range(len(batches)))
    ids = [item_id for n in sorted(batches) for item_id, _ in batches[n]]
    assert sorted(ids) == list(range(1, told["last_id"] + 1))
    assert all(
        digest == hashlib.sha256(b"item %d" % item_id).hexdigest() for n in batches for item_id, digest in batches[n]
    )
