"""The databases that the tests of the outbox run on: tests.support.postgres, and the fixtures of this folder."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import psycopg
import pytest
import sqlalchemy

from tests.support import postgres
from tests.support.budget import takes_long
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE, until

PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.outbox.conftest")
WAITING = """
import json, pathlib, threading
def test_that_never_ends(postgres_cluster):
    there = {"folder": str(postgres_cluster.folder), "pids": postgres_cluster.pids}
    half = pathlib.Path(__file__).with_name("half")
    half.write_text(json.dumps(there))
    half.rename(half.with_name("there"))
    threading.Event().wait()
"""
NOWHERE = """
import sys, pytest
from tests.support import postgres
postgres.programs = lambda: None
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.fixture
def private(postgres_installed: None) -> Iterator[postgres.Cluster]:
    """A server to be stopped and killed, with a table of one committed row."""
    with postgres.private_cluster() as cluster:
        with psycopg.connect(cluster.url(driver=None)) as connection:
            connection.execute("CREATE TABLE seen (number int)")
            connection.execute("INSERT INTO seen VALUES (1)")
        yield cluster


def rows(cluster: postgres.Cluster) -> list[int]:
    with psycopg.connect(cluster.url(driver=None)) as connection:
        return [number for (number,) in connection.execute("SELECT number FROM seen ORDER BY number")]


def left_of(folder: Path, pids: list[int]) -> list[object]:
    """What is still there of a server that is over."""
    return [pid for pid in pids if postgres.is_alive(pid)] + [folder] * folder.exists()


# -- the fixtures ----------------------------------------------------------------------------------------------------


def test_a_row_comes_back(engine: sqlalchemy.Engine, database_url: str) -> None:
    assert engine.dialect.name == sqlalchemy.make_url(database_url).get_backend_name()
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("CREATE TABLE seen (text text)"))
        connection.execute(sqlalchemy.text("INSERT INTO seen VALUES (:text)"), {"text": "Grüße"})
    with engine.connect() as connection:
        assert connection.scalars(sqlalchemy.text("SELECT text FROM seen")).all() == ["Grüße"]


@pytest.mark.parametrize("_", range(2))
def test_each_test_has_an_empty_database(engine: sqlalchemy.Engine, _: int) -> None:
    assert sqlalchemy.inspect(engine).get_table_names() == []
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("CREATE TABLE seen (number int)"))


def test_two_databases_see_nothing_of_each_other(postgres_cluster: postgres.Cluster) -> None:
    """A notification of one does not come to the other either, nor does a lock of one hold up the other."""
    with postgres_cluster.database() as one, postgres_cluster.database() as other:
        first, second = (
            psycopg.connect(postgres_cluster.url(name, driver=None), autocommit=True) for name in (one, other)
        )
        with first, second:
            for connection in (first, second):
                connection.execute("CREATE TABLE seen (number int)")
                connection.execute("LISTEN news")
                taken = connection.execute("SELECT pg_try_advisory_lock(1)").fetchone()
                assert taken == (True,)
            first.execute("NOTIFY news, 'first'")
            second.execute("NOTIFY news, 'second'")
            heard = [next(connection.notifies(timeout=PATIENCE)).payload for connection in (first, second)]
            assert heard == ["first", "second"]


def test_a_database_is_dropped_although_somebody_is_connected(postgres_cluster: postgres.Cluster) -> None:
    with postgres_cluster.database() as name:
        late = psycopg.connect(postgres_cluster.url(name, driver=None), autocommit=True)
    with late, pytest.raises(psycopg.OperationalError):
        late.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(postgres_cluster.url(name, driver=None))


@pytest.mark.parametrize("tcp", [False, True], ids=["socket", "tcp"])
def test_every_driver_connects(postgres_cluster: postgres.Cluster, tcp: bool) -> None:
    async def ask() -> object:
        connection = await asyncpg.connect(postgres_cluster.url(driver=None, tcp=tcp))
        try:
            return await connection.fetchval("SELECT 1")
        finally:
            await connection.close()

    async def ask_with_sqlalchemy(driver: str) -> object:
        from sqlalchemy.ext.asyncio import create_async_engine

        engine = create_async_engine(postgres_cluster.url(driver=driver, tcp=tcp))
        try:
            async with engine.connect() as connection:
                return await connection.scalar(sqlalchemy.text("SELECT 1"))
        finally:
            await engine.dispose()

    with psycopg.connect(postgres_cluster.url(driver=None, tcp=tcp)) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    assert asyncio.run(ask()) == 1
    assert [asyncio.run(ask_with_sqlalchemy(driver)) for driver in ("psycopg", "asyncpg")] == [1, 1]


def test_the_loopback_asks_for_a_password(postgres_cluster: postgres.Cluster) -> None:
    """Its superuser may run programs as this user, and the other users of the machine reach the port."""
    url = re.sub(":[0-9a-f]{32}@", ":wrong@", postgres_cluster.url(driver=None, tcp=True))
    with pytest.raises(psycopg.OperationalError, match="authentication failed"):
        psycopg.connect(url)
    assert postgres_cluster.folder.stat().st_mode & 0o077 == 0


# -- stops, kills, starts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fast", "immediate", "kill"])
def test_committed_rows_outlive_the_server(private: postgres.Cluster, how: str) -> None:
    ends: dict[str, Callable[[], None]] = {
        "fast": private.stop,
        "immediate": lambda: private.stop("immediate"),
        "kill": private.kill9,
    }
    url, before = private.url(), private.pids
    with psycopg.connect(private.url(driver=None)) as open_one:
        assert open_one.execute("SHOW fsync").fetchone() == ("on",)
        open_one.execute("INSERT INTO seen VALUES (2)")
        ends[how]()
        assert not any(map(postgres.is_alive, before))
        assert private.pids == []
        with pytest.raises(psycopg.OperationalError):
            open_one.execute("INSERT INTO seen VALUES (3)")
    private.start()
    assert rows(private) == [1]
    assert ("database system was interrupted" in private.log) == (how != "fast")
    assert private.url() == url


def test_settings_are_those_of_the_server(postgres_installed: None) -> None:
    with (
        postgres.private_cluster(fsync=False, settings={"max_connections": "7"}) as cluster,
        psycopg.connect(cluster.url(driver=None)) as connection,
    ):
        assert connection.execute("SHOW max_connections").fetchone() == ("7",)
        assert connection.execute("SHOW fsync").fetchone() == ("off",)


def test_a_server_that_does_not_start_says_why(postgres_installed: None) -> None:
    with pytest.raises(postgres.ServerNotStarted, match="no_such_setting"):
        postgres.private_cluster(fsync=False, settings={"no_such_setting": "1"})


# -- nothing is left -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["running", "stopped", "killed", "halted"])
def test_nothing_is_left_of_a_closed_cluster(private: postgres.Cluster, how: str) -> None:
    pids = private.pids
    segment = (private.folder / "data" / "postmaster.pid").read_text().splitlines()[6].split()[1]
    if how == "stopped":
        private.stop()
    elif how == "killed":
        private.kill9()
    elif how == "halted":
        os.kill(pids[0], signal.SIGSTOP)
    private.close()
    private.close()
    assert len(pids) > 3
    assert left_of(private.folder, pids) == []
    segments = [line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()]
    assert segment not in segments


@pytest.mark.parametrize(
    ("options", "number", "whole_group"),
    [
        pytest.param(["-n1"], signal.SIGINT, True, id="ctrl-c-with-xdist", marks=takes_long),
        pytest.param([], signal.SIGINT, True, id="ctrl-c", marks=takes_long),
        pytest.param(["-n1"], signal.SIGKILL, False, id="killed-with-xdist", marks=takes_long),
        pytest.param([], signal.SIGKILL, False, id="killed"),
    ],
)
def test_nothing_is_left_of_a_run_that_was_killed(
    postgres_installed: None, tmp_path: Path, options: list[str], number: signal.Signals, whole_group: bool
) -> None:
    """A worker of xdist takes five seconds to notice the death of its master."""
    (tmp_path / "test_waiting.py").write_text(WAITING)
    run = subprocess.Popen(
        [sys.executable, *PYTEST, *options, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with run:
        until(lambda: (tmp_path / "there").exists() or run.poll() is not None)
        there = json.loads((tmp_path / "there").read_text())
        assert left_of(Path(there["folder"]), there["pids"]) != []
        (os.killpg if whole_group else os.kill)(run.pid, number)
        until(lambda: left_of(Path(there["folder"]), there["pids"]) == [])


def test_where_it_is_not_installed_one_line_says_so() -> None:
    tests = ["test_a_row_comes_back", "test_each_test_has_an_empty_database", "test_settings_are_those_of_the_server"]
    options = ("-p", "no:cacheprovider", *(f"tests/outbox/test_support.py::{test}" for test in tests))
    run = subprocess.run(
        [sys.executable, "-c", NOWHERE, *options], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stdout
    assert "3 passed, 4 skipped" in run.stdout
    said = [line for line in run.stdout.splitlines() if "SKIPPED" in line]
    assert len(said) == 1
    assert said[0].endswith(postgres.NOT_INSTALLED)
