"""A SQLite file that can't grow: a put raises what the driver raises, and nothing is lost, nor there in part."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.exc import OperationalError

from kestrelpy.outbox.outbox import Outbox
from tests.outbox.faults import full_disks
from tests.processes import no_room
from tests.processes.programs import counts_of
from tests.support.budget import SEED, Tally, share
from tests.support.patience import until

FULL = (sqlite3.OperationalError, OperationalError)


class SmallFile:
    """A database whose engine's connections refuse to let it grow when it is ``full``."""

    def __init__(self, url: str) -> None:
        self.engine = sqlalchemy.create_engine(url)
        sqlalchemy.event.listen(self.engine, "checkout", lambda made, *_: self.limit(made))
        self.room: int | None = None
        """How many pages it may have beside those that it has; ``None``: any number."""

    def limit(self, connection: Any) -> None:
        with closing(connection.cursor()) as cursor:
            [count] = cursor.execute("PRAGMA page_count").fetchone()
            cursor.execute(f"PRAGMA max_page_count = {1 << 30 if self.room is None else count + self.room}")


@pytest.fixture
def small(sqlite_url: str) -> Iterator[SmallFile]:
    made = SmallFile(sqlite_url)
    yield made
    made.engine.dispose()


@pytest.fixture
def outbox(small: SmallFile) -> Iterator[Outbox]:
    with Outbox(small.engine, backoff=0.0, max_payload_bytes=10 << 20) as made:
        made.queue("q")
        made.create_tables()
        with small.engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE orders (name TEXT)")
        yield made


PUTS: dict[str, Callable[[Outbox, Any], object]] = {
    "put": lambda outbox, connection: outbox.put(connection, "q", "x" * 20_000, key="k"),
    "put_many": lambda outbox, connection: outbox.put_many(connection, "q", ["x" * 100] * 2500),
    "put_many of long ones": lambda outbox, connection: outbox.put_many(connection, "q", ["x" * 20_000] * 7),
    "replace": lambda outbox, connection: outbox.put_many(
        connection, "q", ["x" * 10_000] * 3, keys=["a", "b", "c"], if_exists="replace"
    ),
}


@pytest.mark.parametrize("kind", ["sqlalchemy", "sqlite3"])
@pytest.mark.parametrize("name", PUTS)
def test_a_put_that_finds_no_room_leaves_nothing(
    name: str, kind: str, small: SmallFile, outbox: Outbox, tally: Tally
) -> None:
    """Wherever it ends: the caller may commit what else is there, and the same put works when there is room."""
    refused = 0
    with outbox.begin() as connection:
        outbox.put_many(connection, "q", ["old"] * 2, keys=["a", "b"])
    before = {job.id: job.payload for job in outbox.jobs()}
    for room in range(0, 200, max(1, 200 // share(200))):
        small.room = room
        with small.engine.connect() as connection:
            transaction = connection.begin()
            connection.exec_driver_sql("INSERT INTO orders VALUES ('mine')")
            given = connection if kind == "sqlalchemy" else connection.connection.driver_connection
            try:
                PUTS[name](outbox, given)
            except FULL:
                refused += 1
            else:
                break
            small.room = None
            small.limit(connection.connection.driver_connection)
            connection.exec_driver_sql("INSERT INTO orders VALUES ('mine')")
            transaction.commit()
        assert {job.id: job.payload for job in outbox.jobs(limit=5000)} == before, f"room for {room} pages"
    assert refused
    tally.add("puts into a full SQLite file", refused)
    small.room = None
    with small.engine.begin() as connection:
        assert list(connection.exec_driver_sql("SELECT count(*) FROM orders")) == [(2 * refused,)]
        PUTS[name](outbox, connection)
    assert len(outbox.jobs(limit=5000)) > len(before) - 1


@pytest.fixture
def _tmpfs() -> None:
    reason = no_room.reason_not_available()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.root
@pytest.mark.usefixtures("_tmpfs")
@pytest.mark.parametrize("mode", ["DELETE", "WAL"])
def test_a_file_system_is_full_anywhere(mode: str, tmp_path: Path, tally: Tally) -> None:
    counts = counts_of(full_disks, tmp_path, mode, SEED, limit=max(30, share(300)))
    refused = counts["refused at the commit"] + counts.get("refused before it", 0)
    assert refused > 5
    tally.add("transactions with a put that a full file system has refused", refused)


def test_consumers_go_on_when_there_is_room(small: SmallFile, outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    """A mark that finds no room is tried again, a claim too."""
    ran: list[int] = []
    gate: list[object] = []

    def fill(number: int) -> None:
        ran.append(number)
        until(lambda: gate)
        raise ValueError("x" * 16_000)  # needs room to be saved

    outbox.add_consumer("q", fill, max_retries=0, keep_done=0)
    with outbox.begin() as connection:
        outbox.put_many(connection, "q", list(range(3)))
    outbox.start(threads=1, poll_interval=0.05)
    until(lambda: ran)
    small.room = 0
    gate.append(None)
    until(lambda: "full" in caplog.text)
    small.room = None
    until(lambda: [job.status for job in outbox.jobs()] == ["dead"] * 3)
    assert outbox.stop()
    assert sorted(ran) == [0, 1, 2]
    assert all(job.error is not None and "xxx" in job.error for job in outbox.jobs())
