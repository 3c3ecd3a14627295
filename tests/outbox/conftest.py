"""Databases for the tests of the outbox: each test has one of its own, empty, and most tests run on both kinds."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from kestrelpy.outbox import Outbox
from kestrelpy.testing import ManualClock
from tests.outbox.claimant import Claimant
from tests.support import postgres


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tests that are skipped for one reason at one place are one line of the summary, not one line each."""
    report = yield
    if isinstance(report.longrepr, tuple) and report.longrepr[2].endswith(postgres.NOT_INSTALLED):
        report.longrepr = (__file__, 1, report.longrepr[2])
    return report


@pytest.fixture(scope="session")
def postgres_installed() -> None:
    """For a test with a ``private_cluster``: skips it where there can be none."""
    if postgres.programs() is None:
        pytest.skip(postgres.NOT_INSTALLED)


@pytest.fixture(scope="session")
def postgres_cluster(postgres_installed: None) -> Iterator[postgres.Cluster]:
    """The PostgreSQL server of this process, started by the first test that wants it. Do not stop it."""
    with postgres.quick_cluster() as cluster:
        yield cluster


@pytest.fixture
def postgres_url(postgres_cluster: postgres.Cluster) -> Iterator[str]:
    """Of a new PostgreSQL database, for SQLAlchemy with psycopg; over a socket."""
    with postgres_cluster.database() as name:
        yield postgres_cluster.url(name)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """Of a SQLite file that is not there yet, for SQLAlchemy."""
    return f"sqlite:///{tmp_path / 'outbox.db'}"


@pytest.fixture(params=["postgresql", "sqlite"])
def database_url(request: pytest.FixtureRequest) -> str:
    """Of a new database: the test runs on PostgreSQL and on SQLite."""
    fixtures = {"postgresql": "postgres_url", "sqlite": "sqlite_url"}
    return str(request.getfixturevalue(fixtures[request.param]))


@pytest.fixture
def engine(database_url: str) -> Iterator[sqlalchemy.Engine]:
    """On ``database_url``; disposed of at the end. No power cut is tested here: nothing waits for a disk."""
    made = sqlalchemy.create_engine(database_url)
    if made.dialect.name == "sqlite":
        sqlalchemy.event.listen(made, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF"))
    yield made
    made.dispose()


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def bind(request: pytest.FixtureRequest) -> Iterator[Any]:
    """What ``virtual`` is bound to: nothing, or an engine."""
    if request.param == "memory":
        yield None
        return
    url = request.getfixturevalue({"sqlite": "sqlite_url", "postgresql": "postgres_url"}[request.param])
    engine = sqlalchemy.create_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def make_outbox(engine: sqlalchemy.Engine, clock: ManualClock) -> Iterator[Callable[..., Outbox]]:
    """``make_outbox(bind, **options)``: with its tables and the queues ``mail`` and ``bills``, on ``engine`` and the
    manual clock unless these are given; closed at the end of the test.
    """
    made: list[Outbox] = []

    def make(bind: Any = engine, **options: Any) -> Outbox:
        made.append(Outbox(bind, **{"clock": clock, **options}))
        made[-1].create_tables()
        for queue in ("mail", "bills"):
            made[-1].queue(queue)
        return made[-1]

    yield make
    for outbox in made:
        outbox.close()


@pytest.fixture
def outbox(make_outbox: Callable[..., Outbox]) -> Outbox:
    """On a new database of either kind and the manual clock, with its tables and the queues ``mail`` and ``bills``."""
    return make_outbox()


@pytest.fixture
def claimant(outbox: Outbox) -> Claimant:
    """What a running outbox does, step by step, for ``outbox``."""
    return Claimant(outbox)
