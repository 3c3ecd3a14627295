"""The relay: what it moves and what not, in which order, and what becomes of jobs that it can't move."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from kestrelpy import InvalidName, JournaledQueue, WrongKind, scan
from kestrelpy.inbox import last_version, pending, publish, take_in
from kestrelpy.outbox import GiveUp, Outbox, OutboxError
from kestrelpy.outbox.relay import Relay, RelaySession
from kestrelpy.outbox.relay_operations import MAX_BYTES
from kestrelpy.testing import FailingDisk, MemoryDisk
from kestrelpy.work import WorkQueue
from tests.outbox.relaying import FOLDER, LEASE, TABLE, World
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE, until
from tests.support.small_disk import SmallDisk


@pytest.fixture
def world(engine: sqlalchemy.Engine) -> World:
    return World(engine)


def execute(world: World, text: str, **parameters: Any) -> Any:
    with world.engine.begin() as connection:
        result = connection.execute(sqlalchemy.text(text), parameters)
        return result.all() if result.returns_rows else None


def job_rows(world: World) -> list[dict[str, Any]]:
    with world.engine.connect() as connection:
        text = sqlalchemy.text(f"SELECT * FROM {TABLE} ORDER BY id")
        return [dict(row) for row in connection.execute(text).mappings()]


# -- what is moved ---------------------------------------------------------------------------------------------------


def test_jobs_are_moved_in_batches(world: World) -> None:
    world.put(7)
    moving = world.relay()
    assert [moving.step() for _ in range(4)] == [3, 3, 1, 0]
    assert world.moved() == list(range(7))
    assert world.published == [(1, 3), (2, 3), (3, 1)]
    assert world.statuses() == {}
    assert world.row()["app_id"].startswith("the relay of events/")
    assert last_version(FOLDER, "log", world.row()["app_id"], disk=world.disk) == 3
    world.check()


def test_the_rows_of_a_batch_say_where_they_are(world: World) -> None:
    world.put(2)
    seen: list[dict[str, Any]] = []

    def encode(_: Any) -> bytes:
        seen.extend(job_rows(world))
        return b""

    world.relay(encode=encode).step()
    for row in seen:
        assert (row["status"], row["relay_batch"], row["worker"]) == ("running", 1, "the relay of events")
        assert (row["tries"], row["token"]) == (1, None)
    assert len(seen) == 4


def test_done_jobs_are_kept_if_they_are_not_to_be_deleted(world: World) -> None:
    world.put(2)
    assert world.relay(delete=False).step() == 2
    for row in job_rows(world):
        assert (row["status"], row["relay_batch"]) == ("done", None)
        assert row["finished_ms"] == world.clock.time_ns() // 1_000_000
    world.check()
    world.app.prune()
    assert world.statuses() == {"done": 2}
    world.clock.advance(7 * 86400)
    assert world.app.prune() == 2


def test_nothing_is_kept_for_no_time(world: World) -> None:
    world.queue_options = {"keep_done": 0}
    world.put(2)
    assert world.relay(delete=False).step() == 2
    assert world.statuses() == {}


def test_a_done_job_that_is_retried_is_moved_again(world: World) -> None:
    (job_id,) = world.put(1)
    moving = world.relay(delete=False)
    moving.step()
    assert world.app.retry(job_id)
    assert moving.step() == 1
    assert world.moved() == [0, 0]


def test_items_are_payloads_as_they_are_stored(engine: sqlalchemy.Engine) -> None:
    class Reversed:
        def encode(self, value: str) -> str | bytes:
            return value.encode()[::-1] if value.isascii() else value[::-1]

        def decode(self, data: Any) -> Any:
            raise AssertionError("nobody decodes it")

    world = World(engine)
    world.app.queue("events", codec=Reversed())
    with world.app.begin() as connection:
        world.app.put(connection, "events", "abc")
        world.app.put(connection, "events", "äb")
    world.relay().step()
    take_in(FOLDER, "log", disk=world.disk)
    assert [record.data for record in scan(FOLDER, "log", disk=world.disk)] == [b"cba", "bä".encode()]


def test_items_are_what_encode_makes(world: World) -> None:
    made: list[Any] = [b"bytes", "täxt", bytearray(b"array"), memoryview(b"view"), b""]
    jobs: list[Any] = []
    with world.app.begin() as connection:
        for number in range(5):
            world.app.put(connection, "events", number, key=f"key {number}", group="all")

    def encode(job: Any) -> Any:
        jobs.append((job.payload, job.key, job.group, job.status))
        return made[job.payload]

    assert world.relay(batch=5, encode=encode).step() == 5
    take_in(FOLDER, "log", disk=world.disk)
    found = [record.data for record in scan(FOLDER, "log", disk=world.disk)]
    assert found == [b"bytes", "täxt".encode(), b"array", b"view", b""]
    assert jobs == [(number, f"key {number}", "all", "running") for number in range(5)]


def test_the_most_urgent_jobs_are_moved_first_and_each_batch_by_id(world: World) -> None:
    world.put(2, priority=5)
    world.put(2, priority=1)
    world.put(1, priority=3)
    world.put(2, priority=1)
    moving = world.relay()
    assert [moving.step() for _ in range(3)] == [3, 3, 1]
    assert world.batches(world.moved()) == [[2, 3, 5], [0, 4, 6], [1]]


def test_delays_hold_until_the_relay(world: World) -> None:
    world.put(2, delay=10)
    world.put(1)
    moving = world.relay()
    assert [moving.step(), moving.step()] == [1, 0]
    world.clock.advance(9.9)
    assert moving.step() == 0
    world.clock.advance(0.1)
    assert moving.step() == 2
    assert world.moved() == [2, 0, 1]


def test_keys_hold_until_the_relay(world: World) -> None:
    with world.app.begin() as connection:
        world.app.put(connection, "events", 0, key="one")
    with world.app.begin() as connection:
        assert not world.app.put(connection, "events", 1, key="one", if_exists="return").is_new
    moving = world.relay()
    moving.step()
    with world.app.begin() as connection:
        assert world.app.put(connection, "events", 2, key="one", if_exists="return").is_new
    moving.step()
    assert world.moved() == [0, 2]


def test_dependencies_hold_until_the_relay(world: World) -> None:
    """Both of a job here on one elsewhere, and of one elsewhere on a job here."""
    world.app.queue("mail")
    with world.app.begin() as connection:
        mail = world.app.put(connection, "mail", "first")
        event = world.app.put(connection, "events", 0, depends_on=mail)
        later = world.app.put(connection, "mail", "later", depends_on=event)
    moving = world.relay()
    assert moving.step() == 0
    execute(world, f"UPDATE {TABLE} SET status = 'done' WHERE id = :id", id=mail.id)
    execute(world, f"UPDATE {TABLE} SET status = 'ready' WHERE id = :id", id=event.id)  # as its mark does it
    assert moving.step() == 1
    assert world.app.get(later.id).status == "ready"


def test_who_waits_for_a_moved_job_is_told(postgres_url: str) -> None:
    engine = sqlalchemy.create_engine(postgres_url)
    world = World(engine)
    world.app.queue("mail")
    with world.app.begin() as connection:
        event = world.app.put(connection, "events", 0)
        world.app.put(connection, "mail", "later", depends_on=event)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as listening:
        listening.exec_driver_sql(f"LISTEN {TABLE}")
        world.relay().step()
        driver: Any = listening.connection.driver_connection
        (heard,) = driver.notifies(timeout=PATIENCE, stop_after=1)
    assert (heard.channel, heard.payload) == (TABLE, "mail")
    engine.dispose()


def test_a_paused_queue_is_not_moved(world: World) -> None:
    world.put(4)
    moving = world.relay()
    assert moving.step() == 3
    world.app.pause("events")
    assert [moving.step(), moving.step(), world.relay().step()] == [0, 0, 0]
    world.app.resume("events")
    assert moving.step() == 1


def test_a_batch_that_was_begun_is_moved_in_a_pause(world: World) -> None:
    world.put(2)
    disk = world.disk = FailingDisk(MemoryDisk())
    moving = world.relay()
    disk.arm(errno.EIO, kinds={"sync"})
    with pytest.raises(OSError, match="Input/output"):
        moving.step()
    world.app.pause("events")
    world.put(2)
    assert moving.step() == 2
    assert moving.step() == 0


def test_a_batch_is_as_large_as_16_mib(engine: sqlalchemy.Engine) -> None:
    world = World(engine, batch=100)
    world.app.queue("events", max_payload_bytes=2 * MAX_BYTES)
    with world.app.begin() as connection:
        sizes = [MAX_BYTES // 2, MAX_BYTES // 2 - 10, MAX_BYTES + 10, 10]
        world.app.put_many(connection, "events", ["x" * (size - 2) for size in sizes])
    moving = world.relay()
    assert [moving.step() for _ in range(4)] == [2, 1, 1, 0]


def test_other_queues_are_let_be(engine: sqlalchemy.Engine) -> None:
    worlds = [World(engine, "events"), World(engine, "clicks", name="the relay of clicks")]
    worlds[1].disk = worlds[0].disk
    worlds[0].put(4)
    worlds[1].put(4)
    first, second = worlds[0].relay(), worlds[1].relay()
    assert [first.step(), second.step(), second.step(), first.step(), first.step(), second.step()] == [3, 3, 1, 1, 0, 0]
    take_in(FOLDER, "log", disk=worlds[0].disk)
    assert len(list(scan(FOLDER, "log", disk=worlds[0].disk))) == 8


# -- what can't be moved ---------------------------------------------------------------------------------------------


def refusing(*numbers: int, error: type[BaseException] = ValueError) -> Callable[[Any], bytes]:
    def encode(job: Any) -> bytes:
        if job.payload in numbers:
            raise error(f"number {job.payload}")
        return str(job.payload).encode()

    return encode


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_job_that_encode_refuses_is_in_error_and_the_others_are_moved(
    world: World, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    world.queue_options = {"backoff": 10.0}
    ids = world.put(3)
    moving = world.relay(encode=refusing(1, error=error))
    assert moving.step() == 2
    job = world.app.get(ids[1])
    assert (job.status, job.tries) == ("error", 1)
    assert job.due_ms == world.clock.time_ns() // 1_000_000 + 10_000
    assert "number 1" in (job.error or "")
    assert job.first_error_ms is not None
    assert "job 2 of queue 'events' failed at try 1" in caplog.text
    assert moving.step() == 0
    world.check(left=[1])
    world.clock.advance(10)
    assert world.relay().step() == 0  # the other one has the lease
    assert moving.step() == 0
    assert world.app.get(ids[1]).tries == 2
    world.clock.advance(10)
    moving.release()
    assert world.relay(encode=refusing()).step() == 1
    world.check()


def test_a_job_that_is_worn_out_is_dead(world: World) -> None:
    called: list[str] = []
    world.queue_options = {
        "backoff": 1.0,
        "max_retries": 1,
        "on_error": lambda job, error: called.append(f"error {job.status} {error}"),
        "on_dead": lambda job: called.append(f"dead {job.tries}"),
    }
    (job_id,) = world.put(1)
    world.put(1)
    moving = world.relay(encode=refusing(0))
    assert moving.step() == 1
    world.clock.advance(1)
    assert moving.step() == 0
    assert world.app.get(job_id).status == "dead"
    assert called == ["error error number 0", "error dead number 0", "dead 2"]
    assert world.app.retry(job_id)
    assert world.app.get(job_id).status == "ready"


def test_give_up_is_the_end(world: World) -> None:
    (job_id,) = world.put(1)
    assert world.relay(encode=refusing(0, error=GiveUp)).step() == 0
    assert world.app.get(job_id).status == "dead"


@pytest.mark.parametrize("made", [None, 3, object()])
def test_encode_must_give_bytes(world: World, made: Any) -> None:
    (job_id,) = world.put(1)
    assert world.relay(encode=lambda _: made).step() == 0
    job = world.app.get(job_id)
    assert job.status == "error"
    assert "TypeError: encode must give bytes or a str" in (job.error or "")


@pytest.mark.parametrize("is_encoded", [False, True])
def test_an_item_that_is_too_large_for_the_queue_is_in_error(world: World, is_encoded: bool) -> None:
    JournaledQueue(FOLDER, "log", disk=world.disk, max_item_bytes=10).close()
    with world.app.begin() as connection:
        world.app.put_many(connection, "events", ["small", "x" * 10, "little"])
    options: dict[str, Any] = {"encode": lambda job: job.payload.ljust(11 if job.payload[0] == "x" else 0)}
    assert world.relay(**(options if is_encoded else {})).step() == 2
    (job,) = world.app.jobs("events")
    assert job.status == "error"
    assert "larger than max_item_bytes=10" in (job.error or "")
    take_in(FOLDER, "log", disk=world.disk)
    assert len(list(scan(FOLDER, "log", disk=world.disk))) == 2


def test_a_limit_that_is_lowered_after_the_seal(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is written anew, without the item."""
    with world.app.begin() as connection:
        world.app.put_many(connection, "events", ["small", "x" * 10, "little"])
    moving = world.relay()
    with monkeypatch.context() as patch:
        patch.setattr("kestrelpy.outbox.relay.publish", None)
        with pytest.raises(TypeError):
            moving.step()
    assert world.row()["sealed"] is not None
    JournaledQueue(FOLDER, "log", disk=world.disk, max_item_bytes=10).close()
    assert moving.step() == 2
    (job,) = world.app.jobs("events")
    assert job.status == "error"
    take_in(FOLDER, "log", disk=world.disk)
    assert [record.data for record in scan(FOLDER, "log", disk=world.disk)] == [b'"small"', b'"little"']
    assert world.parts() == []


def test_a_batch_of_nothing_but_poison(world: World) -> None:
    world.put(3)
    world.put(2)
    moving = world.relay(encode=refusing(0, 1, 2))
    assert [moving.step(), moving.step()] == [0, 2]
    assert world.moved() == [3, 4]
    assert world.published == [(2, 2)]
    assert world.statuses() == {"error": 3}
    assert world.parts() == []


def test_retries_do_not_take_all_the_room(world: World) -> None:
    """One in ten jobs of a batch may be a retry."""
    world.queue_options = {"backoff": 0}
    world.options["batch"] = 10
    bad = set(range(30))
    world.put(30)
    moving = world.relay(encode=lambda job: refusing(*bad)(job))
    assert [moving.step() for _ in range(3)] == [0, 0, 0]
    world.put(20)
    assert moving.step() == 7  # two bad ones were left, and one was tried again
    bad.clear()
    assert moving.step() == 10


def test_an_encode_that_is_slow_keeps_the_lease(world: World) -> None:
    world.put(3)
    second = world.relay()

    def slow(job: Any) -> bytes:
        world.clock.advance(LEASE * 0.9)
        assert second.step() == 0
        return str(job.payload).encode()

    assert world.relay(encode=slow).step() == 3
    world.check()


def test_an_encode_that_hangs_loses_the_lease(world: World) -> None:
    world.put(3)
    second = world.relay()

    def hangs(job: Any) -> bytes:
        world.clock.advance(LEASE)
        world.drain(second)
        return b"99"

    first = world.relay(encode=hangs)
    assert first.step() == 0
    world.check()
    assert first.step() == 0


# -- lanes -----------------------------------------------------------------------------------------------------------


def test_a_lane_is_moved_in_the_order_of_ids(world: World) -> None:
    """Whatever is more urgent; and one batch has many of a lane."""
    world.put(2, lane="one", priority=9)
    world.put(3, lane="one", priority=1)
    world.put(2, lane="two")
    world.put(1)
    world.drain(world.relay())
    world.check()
    assert len(world.published) == 3


def test_a_job_in_error_holds_its_lane_and_no_other(world: World) -> None:
    world.queue_options = {"backoff": 60.0}
    bad = {1}
    world.put(9, lane="one")
    world.put(2, lane="two")
    world.put(1)
    moving = world.relay(encode=lambda job: refusing(*bad)(job))
    assert world.drain(moving) == 4
    assert sorted(world.moved()) == [0, 9, 10, 11]
    world.put(2, lane="one")
    assert world.drain(moving) == 0
    bad.clear()
    world.clock.advance(60)
    assert world.drain(moving) == 10
    world.check()


@pytest.mark.parametrize("how", ["dead", "cancelled", "retried"])
def test_a_lane_goes_on_when_its_job_in_error_is_dealt_with(world: World, how: str) -> None:
    world.queue_options = {"backoff": 60.0, "max_retries": 1}
    ids = world.put(9, lane="one")
    moving = world.relay(encode=refusing(0))
    assert world.drain(moving) == 0
    if how == "cancelled":
        assert world.app.cancel(ids[0])
    elif how == "retried":
        assert world.app.retry(ids[0])
        moving = world.relay()
        world.clock.advance(LEASE)
    else:
        world.clock.advance(60)
    world.drain(moving)
    assert world.moved() == list(range(0 if how == "retried" else 1, 9))


@pytest.mark.parametrize("held", [False, True])
def test_a_job_in_error_does_not_overtake_those_before_it(world: World, held: bool) -> None:
    """The third one has failed when the first two were not in its batch any more."""
    ids = world.put(5, lane="one")
    execute(world, f"UPDATE {TABLE} SET status = 'error', first_error_ms = 1 WHERE id = :id", id=ids[2])
    execute(world, f"UPDATE {TABLE} SET held = :held WHERE id <> :id", held=held, id=ids[2])
    moving = world.relay(batch=2)
    world.drain(moving)
    world.check()


def test_a_job_in_error_that_is_not_due_lets_those_before_it_pass(world: World) -> None:
    ids = world.put(4, lane="one")
    later = world.clock.time_ns() // 1_000_000 + 10_000
    execute(
        world,
        f"UPDATE {TABLE} SET status = 'error', first_error_ms = 1, due_ms = :t WHERE id = :id",
        t=later,
        id=ids[2],
    )
    moving = world.relay()
    assert world.drain(moving) == 2
    assert moving.step() == 0
    world.clock.advance(10)
    assert world.drain(moving) == 2
    world.check()


def test_who_opens_the_relay_frees_what_was_held(world: World) -> None:
    """By a relay that is gone, or by consumers that the queue had before."""
    world.put(9, lane="one")
    execute(world, f"UPDATE {TABLE} SET held = true WHERE id > 1")
    assert world.drain(world.relay()) == 9
    world.check()


def test_a_lane_waits_for_a_consumer_elsewhere(world: World) -> None:
    ids = world.put(3, lane="one")
    world.put(1)
    execute(world, f"UPDATE {TABLE} SET status = 'running', token = 1 WHERE id = :id", id=ids[0])
    moving = world.relay()
    assert world.drain(moving) == 1
    execute(world, f"UPDATE {TABLE} SET status = 'done' WHERE id = :id", id=ids[0])
    assert world.drain(moving) == 2


def test_locked_rows_are_passed_but_not_in_their_lane(postgres_url: str) -> None:
    engine = sqlalchemy.create_engine(postgres_url)
    world = World(engine)
    world.put(1)
    world.put(3, lane="one")
    world.put(2)
    moving = world.relay(batch=10)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"SELECT 1 FROM {TABLE} WHERE id IN (1, 2) FOR UPDATE")
        assert moving.step() == 2
    assert moving.step() == 4
    assert world.batches(world.moved()) == [[4, 5], [0, 1, 2, 3]]
    engine.dispose()


# -- the lease -------------------------------------------------------------------------------------------------------


def test_one_relay_of_a_name_works_at_a_time(world: World) -> None:
    world.put(9)
    first, second = world.relay(), world.relay()
    assert [first.step(), second.step(), first.step()] == [3, 0, 3]
    world.clock.advance(LEASE - 0.001)
    assert second.step() == 0
    world.clock.advance(0.001)
    assert [second.step(), first.step(), second.step()] == [3, 0, 0]
    world.check()


def test_a_released_lease_is_free_at_once(world: World) -> None:
    world.put(9)
    first, second = world.relay(), world.relay()
    assert [first.step(), second.step()] == [3, 0]
    second.release()
    assert second.step() == 0
    first.release()
    assert [second.step(), first.step()] == [3, 0]


def test_a_release_without_a_database_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    moving = world.relay()
    moving.step()
    execute(world, f"DROP TABLE {TABLE}_relays")
    moving.release()
    assert "'the relay of events'" in caplog.text
    moving.release()


def statements(world: World) -> Iterator[list[str]]:
    found: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        found.append(statement)

    sqlalchemy.event.listen(world.engine, "before_cursor_execute", note)
    yield found
    sqlalchemy.event.remove(world.engine, "before_cursor_execute", note)


def test_where_there_is_nothing_to_do_nothing_is_written(world: World) -> None:
    """Neither by the one that has the lease nor by the others; but the lease is renewed in time."""
    world.put(1)
    world.put(1, delay=100)
    first, second = world.relay(), world.relay()
    assert [first.step(), first.step(), second.step()] == [1, 0, 0]
    noting = statements(world)
    found = next(noting)
    for _ in range(3):
        assert [first.step(), second.step()] == [0, 0]
    assert found
    assert [each for each in found if not each.startswith(("SELECT", "WITH", "BEGIN"))] == []
    for _ in range(10):
        world.clock.advance(LEASE / 3)
        assert [first.step(), second.step()] == [0, 0] or world.clock.monotonic() >= 100
    assert len([each for each in found if each.startswith("UPDATE")]) == pytest.approx(10, abs=4)
    next(noting, None)


def test_a_blocked_lane_is_not_written_to(world: World) -> None:
    world.queue_options = {"backoff": 60.0}
    world.put(9, lane="one")
    moving = world.relay(encode=refusing(0))
    assert world.drain(moving) == 0
    assert moving.step() == 0
    noting = statements(world)
    found = next(noting)
    for _ in range(3):
        assert moving.step() == 0
    assert [each for each in found if not each.startswith(("SELECT", "WITH", "BEGIN"))] == []
    next(noting, None)


def test_a_forked_child_is_somebody_else(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.put(9)
    moving = world.relay()
    assert moving.step() == 3
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    assert moving.step() == 0
    monkeypatch.undo()
    assert moving.step() == 0  # this is not the process that had the lease either
    world.clock.advance(LEASE)
    assert moving.step() == 3


# -- the queue and its folder ----------------------------------------------------------------------------------------


def test_the_queue_is_open_here(engine: sqlalchemy.Engine, tmp_path: Path) -> None:
    outbox = Outbox(engine)
    outbox.create_tables()
    outbox.add_relay("events", tmp_path, "log", batch=2)
    with outbox.begin() as connection:
        outbox.put_many(connection, "events", [1, 2, 3])
    (moving,) = outbox.core.relays
    with JournaledQueue(tmp_path, "log", inbox_interval=0.01) as queue:
        assert [moving.step(), moving.step(), moving.step()] == [2, 1, 0]
        assert [queue.get(timeout=PATIENCE).data for _ in range(3)] == [b"1", b"2", b"3"]


READER = """
import sys
from kestrelpy import JournaledQueue
with JournaledQueue(sys.argv[1], "log", inbox_interval=0.01) as queue:
    print("open", flush=True)
    for _ in range(3):
        with queue.get(timeout=20) as item: print(item.data.decode(), flush=True)
"""


def test_the_queue_is_open_in_another_process(engine: sqlalchemy.Engine, tmp_path: Path) -> None:
    outbox = Outbox(engine)
    outbox.create_tables()
    outbox.add_relay("events", tmp_path, "log", batch=2)
    with outbox.begin() as connection:
        outbox.put_many(connection, "events", [1, 2, 3])
    reading = subprocess.Popen([sys.executable, "-c", READER, tmp_path], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with reading:
        assert reading.stdout is not None
        assert reading.stdout.readline() == "open\n"
        (moving,) = outbox.core.relays
        assert [moving.step(), moving.step(), moving.step()] == [2, 1, 0]
        assert reading.stdout.read().split() == ["1", "2", "3"]


def test_the_queue_is_open_nowhere(engine: sqlalchemy.Engine, tmp_path: Path) -> None:
    """Not even its folder is there. What was published waits for its owner; nothing holds the lock of the queue."""
    outbox = Outbox(engine)
    outbox.create_tables()
    outbox.add_relay("events", tmp_path / "new", "log", batch=2)
    with outbox.begin() as connection:
        outbox.put_many(connection, "events", [1, 2, 3])
    (moving,) = outbox.core.relays
    assert [moving.step(), moving.step(), moving.step()] == [2, 1, 0]
    assert pending(tmp_path / "new", "log") == 2
    with JournaledQueue(tmp_path / "new", "log") as queue:
        assert [item.data for item in queue.get_many(3)] == [b"1", b"2", b"3"]


def test_a_running_outbox_moves(engine: sqlalchemy.Engine, tmp_path: Path) -> None:
    outbox = Outbox(engine)
    outbox.create_tables()
    outbox.add_relay("events", tmp_path, "log", batch=2)
    with JournaledQueue(tmp_path, "log", inbox_interval=0.01) as queue, outbox.running(poll_interval=0.05):
        with outbox.begin() as connection:
            outbox.put_many(connection, "events", list(range(9)))
        assert [queue.get(timeout=PATIENCE).data for _ in range(9)] == [str(number).encode() for number in range(9)]
        until(lambda: not outbox.jobs("events"))
    owners = sqlalchemy.text(f"SELECT owner FROM {TABLE}_relays")
    with engine.connect() as connection:
        assert connection.scalars(owners).all() == [None]


@pytest.mark.parametrize("is_published", [False, True])
def test_the_folder_is_moved(
    engine: sqlalchemy.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_published: bool
) -> None:
    """With an unfinished batch in it; the next process is given the new place. The name of the relay stays."""

    def outbox(directory: Path) -> Relay:
        made = Outbox(engine, lease=0.001)
        made.create_tables()
        made.add_relay("events", directory, "log", batch=2)
        with made.begin() as connection:
            made.put_many(connection, "events", [1, 2, 3])
        (moving,) = made.core.relays
        assert isinstance(moving, Relay)
        return moving

    def killed(*args: Any, **kw: Any) -> bool:
        if is_published:
            publish(*args, **kw)
            take_in(args[0], args[1])
        raise KeyboardInterrupt

    first = outbox(tmp_path / "old")
    assert first.step() == 2
    with monkeypatch.context() as patch:
        patch.setattr("kestrelpy.outbox.relay.publish", killed)
        with pytest.raises(KeyboardInterrupt):
            first.step()
    (tmp_path / "old").rename(tmp_path / "new")
    second = outbox(tmp_path / "new")
    while second.step():
        pass
    take_in(tmp_path / "new", "log")
    assert [record.data for record in scan(tmp_path / "new", "log")] == [b"1", b"2", b"3", b"1", b"2", b"3"]
    assert not (tmp_path / "old").exists()


def test_the_folder_is_gone(world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With a sealed batch in it, that is written anew into the new one."""
    world.put(5)
    moving = world.relay()
    assert moving.step() == 3
    with monkeypatch.context() as patch:
        patch.setattr("kestrelpy.outbox.relay.publish", None)
        with pytest.raises(TypeError):
            moving.step()
    world.disk = MemoryDisk()
    world.clock.advance(LEASE)
    assert world.drain(world.relay()) == 2
    assert world.moved() == [3, 4]
    assert "knows none of its 1 batches" in caplog.text
    assert "batch 2 is written anew" in caplog.text


def test_another_queue_is_given_for_an_unfinished_batch(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.put(2)
    moving = world.relay()
    with monkeypatch.context() as patch:
        patch.setattr("kestrelpy.outbox.relay.publish", None)
        with pytest.raises(TypeError):
            moving.step()
    moving.release()
    other = world.relay()
    other.into = "other"
    assert other.step() == 2
    take_in(FOLDER, "other", disk=world.disk)
    assert len(list(scan(FOLDER, "other", disk=world.disk))) == 2
    assert "on its way to another queue" in caplog.text


def test_a_full_disk(world: World) -> None:
    """Nothing is lost, nothing is left, and the relay goes on when there is room."""
    world.put(50)
    for room in range(40):
        disk = world.disk = SmallDisk(room)
        moving = world.relay(batch=5)
        try:
            moving.step()
            break
        except OSError as error:
            refusal = error.errno
        assert refusal == errno.ENOSPC
        assert world.statuses()["running"] == 5
        disk.room += 1000
        assert moving.step() == 5
        assert world.parts() != []
        moving.release()
    assert room > 1
    assert disk.refused == 0


def test_a_queue_of_jobs_is_refused(engine: sqlalchemy.Engine, tmp_path: Path) -> None:
    WorkQueue(tmp_path, "log").close()
    outbox = Outbox(engine)
    outbox.create_tables()
    outbox.add_relay("events", tmp_path, "log")
    with outbox.begin() as connection:
        outbox.put(connection, "events", 1)
    with pytest.raises(WrongKind):
        outbox.core.relays[0].step()
    assert outbox.jobs("events")[0].status == "ready"


# -- numbers and names -----------------------------------------------------------------------------------------------


def test_numbers_go_on_above_those_that_the_queue_knows(world: World) -> None:
    """An older state of the database is restored: what it has forgotten is moved again, and nothing is lost."""
    world.put(6)
    first = world.relay()
    assert world.drain(first) == 6
    first.release()
    execute(world, f"UPDATE {TABLE}_relays SET batch = 0")
    world.put(3)
    assert world.relay().step() == 3
    world.check()
    assert world.published == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("has_name", [True, False])
def test_the_row_of_a_relay_is_lost(world: World, has_name: bool) -> None:
    if not has_name:
        world.options["name"] = None
    world.put(3)
    assert world.relay().step() == 3
    execute(world, f"DELETE FROM {TABLE}_relays")
    world.put(3)
    assert world.relay().step() == 3
    take_in(FOLDER, "log", disk=world.disk)
    assert [int(record.data) for record in scan(FOLDER, "log", disk=world.disk)] == list(range(6))


def test_the_row_is_lost_with_an_unfinished_batch(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.put(3)
    moving = world.relay()
    with monkeypatch.context() as patch:
        patch.setattr("kestrelpy.outbox.relay.publish", None)
        with pytest.raises(TypeError):
            moving.step()
    execute(world, f"DELETE FROM {TABLE}_relays")
    world.put(2)
    assert world.drain(world.relay()) == 5
    assert world.batches(world.moved()) == [[0, 1, 2], [3, 4]]


def test_an_unsealed_batch_of_a_restored_database_gets_a_new_number(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number it had was published by what is forgotten."""
    world.put(6)
    world.drain(world.relay())
    execute(world, f"UPDATE {TABLE}_relays SET batch = 0, owner = NULL")
    world.put(2)
    with monkeypatch.context() as patch:
        patch.setattr("kestrelpy.outbox.relay.last_version", lambda *_, **__: None)
        patch.setattr("kestrelpy.outbox.relay.PartWriter.seal", None)
        moving = world.relay()
        with pytest.raises(TypeError):
            moving.step()
    assert world.row()["batch"] == 1
    assert moving.step() == 2
    world.check()
    assert world.published[-1] == (3, 2)


def engine_that_keeps_nothing(tmp_path: Path, name: str) -> sqlalchemy.Engine:
    """On a file of SQLite: it keeps no connection open that somebody would have to close."""
    return sqlalchemy.create_engine(f"sqlite:///{tmp_path}/{name}.db", poolclass=sqlalchemy.NullPool)


def databases(tmp_path: Path, disk: Any, name: str | None, count: int) -> list[tuple[World, Relay]]:
    """Two databases with relays of one name into one queue."""
    found = []
    for number in range(2):
        world = World(engine_that_keeps_nothing(tmp_path, str(number)), name=name)
        world.disk = disk
        world.put(count)
        found.append((world, world.relay()))
    return found


def all_items(disk: Any) -> list[int]:
    take_in(FOLDER, "log", disk=disk)
    return sorted(int(record.data) for record in scan(FOLDER, "log", disk=disk))


@pytest.mark.parametrize("name", [None, "shared"])
def test_databases_with_relays_of_one_name(tmp_path: Path, name: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """Each has an app_id of its own: neither takes the batches of the other for its own."""
    disk = MemoryDisk()
    worlds = databases(tmp_path, disk, name, 4)
    for _ in range(3):
        for _, moving in worlds:
            moving.step()
    assert worlds[0][1].name == worlds[1][1].name == (name or "kestrel_jobs/events/log")
    assert all_items(disk) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert caplog.text == ""


def test_databases_with_relays_of_one_name_where_one_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its seal and its publication, while the other one publishes the same number."""
    disk = MemoryDisk()
    (first, killed), (_, other) = databases(tmp_path, disk, "shared", 3)
    with monkeypatch.context() as patch:
        patch.setattr("kestrelpy.outbox.relay.publish", None)
        with pytest.raises(TypeError):
            killed.step()
    assert first.row()["sealed"] is not None
    assert other.step() == 3
    first.clock.advance(LEASE)
    assert first.relay().step() == 3
    assert all_items(disk) == [0, 0, 1, 1, 2, 2]


def test_a_copy_of_the_database(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is a mistake, and is logged; nothing is lost by it all the same, unless a relay is killed at one moment."""
    disk = MemoryDisk()
    worlds = databases(tmp_path, disk, "shared", 10)
    for world, moving in worlds:
        moving.step()
        execute(world, f"UPDATE {TABLE}_relays SET app_id = 'shared/copied'")
        moving.release()
    for _ in range(5):
        for _, moving in worlds:
            moving.step()
    assert all_items(disk) == sorted([*range(10)] * 2)
    assert "as 'shared/copied', which must be this relay's alone" in caplog.text


def test_a_name_is_one_queues(world: World, engine: sqlalchemy.Engine) -> None:
    world.relay().step()
    other = World(engine, "clicks", name="the relay of events")
    with pytest.raises(OutboxError, match="'the relay of events' is the one of queue 'events'"):
        other.relay().step()


def test_jobs_in_a_batch_of_another_name_are_told(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.put(3)
    with monkeypatch.context() as patch:
        patch.setattr("kestrelpy.outbox.relay.publish", None)
        with pytest.raises(TypeError):
            world.relay().step()
    assert world.relay(name="another").step() == 0
    assert "3 jobs of queue 'events' are in a batch of 'the relay of events'" in caplog.text
    world.clock.advance(LEASE)
    assert world.relay().step() == 3


def test_the_marks_of_a_batch_are_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a server that crashed, while the relay goes on with a connection of another one."""

    def forgotten(_: Relay, session: RelaySession) -> int:
        session.last, session.unfinished, session.sealed = session.unfinished or 0, None, None
        return 3

    world.put(7)
    moving = world.relay()
    with monkeypatch.context() as patch:
        patch.setattr(Relay, "_finish", forgotten)
        assert moving.step() == 3
    assert world.statuses() == {"running": 3, "ready": 4}
    assert [moving.step() for _ in range(4)] == [0, 3, 3, 1]
    world.check()
    assert world.moved() == list(range(7))
    assert world.published == [(1, 3), (2, 3), (3, 1)]


def test_the_numbers_of_a_batch_are_forgotten(world: World) -> None:
    """Before it is sealed: the relay lets it be, and the next one gives them numbers."""
    world.put(2)
    done: list[int] = []

    def encode(job: Any) -> str:
        if not done:
            done.append(1)
            execute(world, f"UPDATE {TABLE}_relays SET batch = 0, part = NULL")
            execute(world, f"UPDATE {TABLE} SET status = 'ready', relay_batch = NULL, worker = NULL, tries = 0")
        return str(job.payload)

    moving = world.relay(encode=encode)
    assert moving.step() == 0
    assert world.parts() == []
    assert moving.step() == 2
    world.check()


# -- add_relay -------------------------------------------------------------------------------------------------------


def test_a_queue_has_a_consumer_or_a_relay(tmp_path: Path) -> None:
    outbox = Outbox()
    outbox.add_consumer("mail", print)
    with pytest.raises(ValueError, match="queue 'mail' has a consumer: it can't have a relay, too"):
        outbox.add_relay("mail", tmp_path, "log")
    outbox.add_relay("events", tmp_path, "log")
    for replace in (False, True):
        with pytest.raises(ValueError, match="queue 'events' has the relay 'kestrel_jobs/events/log'"):
            outbox.add_consumer("events", print, replace=replace)
    with pytest.raises(ValueError, match="queue 'events' has a relay already"):
        outbox.add_relay("events", tmp_path, "other")
    with pytest.raises(ValueError, match="another queue has a relay of the name"):
        outbox.add_relay("clicks", tmp_path, "log", name="kestrel_jobs/events/log")
    outbox.remove_consumer("mail")
    outbox.add_relay("mail", tmp_path, "log")
    outbox.queue("events", max_retries=3)
    assert [relay.queue for relay in outbox.core.relays] == ["events", "mail"]


def test_names_have_the_schema() -> None:
    outbox = Outbox(schema="app", table="jobs")
    outbox.add_relay("events", "/tmp/x", "log")
    assert [relay.name for relay in outbox.core.relays] == ["app.jobs/events/log"]


async def asynchronous(_: Any) -> bytes:
    return b""


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        (("no name", "/tmp", "log"), {}, InvalidName),
        (("events", "/tmp", "no name"), {}, InvalidName),
        (("events", 3, "log"), {}, TypeError),
        (("events", b"/tmp", "log"), {}, TypeError),
        (("events", "/tmp", "log"), {"batch": 0}, ValueError),
        (("events", "/tmp", "log"), {"batch": 100_001}, ValueError),
        (("events", "/tmp", "log"), {"batch": 1.5}, TypeError),
        (("events", "/tmp", "log"), {"encode": "json"}, TypeError),
        (("events", "/tmp", "log"), {"encode": asynchronous}, TypeError),
        (("events", "/tmp", "log"), {"delete": 1}, TypeError),
        (("events", "/tmp", "log"), {"name": ""}, ValueError),
        (("events", "/tmp", "log"), {"name": "x" * 401}, ValueError),
        (("events", "/tmp", "log"), {"name": "\0"}, ValueError),
        (("events", "/tmp", "log"), {"name": "\ud800"}, ValueError),
        (("events", "/tmp", "log"), {"name": 3}, TypeError),
    ],
)
def test_arguments_are_checked(arguments: Any, options: dict[str, Any], error: type[Exception]) -> None:
    outbox = Outbox()
    with pytest.raises(error):
        outbox.add_relay(*arguments, **options)
    assert outbox.core.relays == []
    outbox.add_consumer("events", print)


def test_without_a_database() -> None:
    outbox = Outbox()
    outbox.add_relay("events", "/tmp/x", "log")
    with pytest.raises(OutboxError, match="not bound"):
        outbox.core.relays[0].step()
    outbox.core.relays[0].release()


def test_the_outbox_is_bound_to_another_database(world: World, tmp_path: Path) -> None:
    """As the test kit does it: the relay works where the outbox does."""
    world.put(3)
    moving = world.relay()
    assert moving.step() == 3
    other = World(engine_that_keeps_nothing(tmp_path, "other"))
    other.put(2)
    moving._core.store = other.app.core.store
    moving._disk = other.disk
    assert moving.step() == 2
    other.check()


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg", "aiosqlite"])
def test_on_an_engine_of_asyncio(request: pytest.FixtureRequest, driver: str, tmp_path: Path) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    url = request.getfixturevalue("sqlite_url" if driver == "aiosqlite" else "postgres_url")
    sync = sqlalchemy.create_engine(url)
    made = sqlalchemy.make_url(url)
    made = made.set(drivername=f"{made.get_backend_name()}+{driver}")
    world = World(sync)
    world.put(3, lane="one")
    world.put(3, lane="two")
    with Outbox(create_async_engine(made)) as outbox:
        outbox.add_relay("events", tmp_path, "log", batch=4, encode=refusing(1))
        (moving,) = outbox.core.relays
        assert sum(moving.step() for _ in range(3)) == 4
        assert world.statuses() == {"error": 1, "ready": 1}
        moving.release()
    sync.dispose()
