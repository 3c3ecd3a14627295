"""Outboxes on a database of the test's own. At the end no thread of theirs is left that no handler holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy

from kestrelpy.outbox import Outbox
from tests.support.outboxes import Records, logged


@pytest.fixture
def engine(database_url: str) -> Iterator[sqlalchemy.Engine]:
    """One that does not wait for the disk, as no test here pulls the plug."""
    made = sqlalchemy.create_engine(database_url)
    if made.dialect.name == "sqlite":

        @sqlalchemy.event.listens_for(made, "connect")
        def be_quick(connection: Any, _record: object) -> None:
            connection.execute("PRAGMA synchronous = OFF")

    yield made
    made.dispose()


@pytest.fixture
def open_outbox(engine: sqlalchemy.Engine) -> Iterator[Callable[..., Outbox]]:
    """``open_outbox(**options)``: bound to ``engine``, with its tables; closed at the end."""
    opened: list[Outbox] = []

    def open_one(**options: Any) -> Outbox:
        outbox = Outbox(engine, **options)
        opened.append(outbox)
        outbox.create_tables()
        return outbox

    yield open_one
    for outbox in opened:
        outbox.stop(timeout=1.0)
        outbox.close()


@pytest.fixture
def outbox(open_outbox: Callable[..., Outbox]) -> Outbox:
    """One with the usual options."""
    return open_outbox()


@pytest.fixture
def records() -> Iterator[Records]:
    """What ``kestrelpy.outbox`` logs."""
    with logged() as found:
        yield found
