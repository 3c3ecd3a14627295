"""Opening an outbox, its options and those of its queues, and who consumes what."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import sqlalchemy

from kestrelpy import InvalidName
from kestrelpy.outbox import Outbox, OutboxError, UnknownQueue, UnsupportedDatabase, exponential
from tests.outbox.test_puts import put, row_of
from tests.outbox.ways import async_engine_of

# -- opening ---------------------------------------------------------------------------------------------------------


def test_bound_to_a_url_it_owns_the_engine(database_url: str) -> None:
    outbox = Outbox(database_url)
    outbox.create_tables()
    with outbox.begin() as connection:
        pool: Any = connection.engine.pool
    assert pool.checkedin() == 1
    outbox.close()
    outbox.close()
    assert pool.checkedin() == 0
    for call in (outbox.create_tables, outbox.jobs, lambda: outbox.bind(database_url), outbox.start, outbox.prune):
        with pytest.raises(OutboxError, match="closed"):
            call()
    assert repr(outbox) == "<Outbox kestrel_jobs (closed)>"


def test_a_url_object(database_url: str) -> None:
    with Outbox(sqlalchemy.make_url(database_url)) as outbox:
        outbox.create_tables()
        assert outbox.jobs() == []


def test_an_engine_stays_its_owners(engine: sqlalchemy.Engine) -> None:
    with Outbox(engine) as outbox:
        outbox.create_tables()
        pool: Any = engine.pool
        assert pool.checkedin() == 1
    assert (engine.pool, pool.checkedin()) == (pool, 1)


def test_bound_later_and_once(engine: sqlalchemy.Engine) -> None:
    outbox = Outbox(keep_done=5)

    @outbox.consumer("mail")
    def send(payload: Any) -> None: ...

    for call in (outbox.create_tables, outbox.jobs, outbox.start):
        with pytest.raises(OutboxError, match=r"not bound: pass Outbox\(bind\), or call outbox\.bind"):
            call()
    outbox.bind(engine)
    outbox.create_tables()
    assert put(outbox, send).queue == "mail"
    with pytest.raises(OutboxError, match="bound already"):
        outbox.bind(engine)
    outbox.close()


NO_DATABASES = [object(), 7, sqlalchemy.MetaData(), ["sqlite://"]]


@pytest.mark.parametrize("bind", NO_DATABASES, ids=lambda bind: type(bind).__name__)
def test_what_it_can_not_be_bound_to(bind: Any) -> None:
    with pytest.raises(TypeError, match="bound to an Engine, an AsyncEngine, a URL or a WorkQueue"):
        Outbox(bind)


@pytest.mark.parametrize("url", ["mysql://root@localhost/x", "oracle://x", "mssql+pyodbc://x"])
def test_other_databases(url: str) -> None:
    with pytest.raises(UnsupportedDatabase, match=r"use PostgreSQL 13 or newer, or SQLite 3\.35") as caught:
        Outbox(url)
    assert isinstance(caught.value, ValueError)
    assert caught.value.database == url.split(":")[0].split("+")[0]
    assert Outbox().core.store is None


def test_an_engine_of_another_database() -> None:
    engine = sqlalchemy.create_mock_engine("mysql://", lambda *_: None)
    with pytest.raises((UnsupportedDatabase, TypeError)):
        Outbox(engine)


def test_an_old_version(engine: sqlalchemy.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from kestrelpy.outbox import database

    monkeypatch.setattr(database, "OLDEST", {"postgresql": (99,), "sqlite": (99, 0)})
    for call in ("create_tables", "jobs", "start"):
        with Outbox(engine) as outbox, pytest.raises(UnsupportedDatabase, match=rf"{engine.dialect.name} \d+\.\d+"):
            getattr(outbox, call)()
    with Outbox(engine) as outbox, pytest.raises(UnsupportedDatabase), outbox.begin():
        pass


def test_an_async_context_manager(database_url: str) -> None:
    driver = "aiosqlite" if database_url.startswith("sqlite") else "asyncpg"

    async def main() -> None:
        async with async_engine_of(database_url, driver) as engine, Outbox(engine) as outbox:
            await outbox.acreate_tables()
            await asyncio.to_thread(outbox.jobs)
        await outbox.aclose()
        with pytest.raises(OutboxError, match="closed"):
            await outbox.ajobs()

    asyncio.run(main())


# -- options ---------------------------------------------------------------------------------------------------------


def name_of(value: Any) -> str:
    """Of a case."""
    return next(iter(value)) if isinstance(value, dict) else str(value.__name__)


WRONG: list[tuple[type[Exception], dict[str, Any]]] = [
    (ValueError, {"lease": 0}),
    (ValueError, {"lease": float("inf")}),
    (ValueError, {"lease": float("nan")}),
    (TypeError, {"lease": "30"}),
    (TypeError, {"lease": True}),
    (ValueError, {"health_grace": -1}),
    (TypeError, {"healthy_error_age": None}),
    (TypeError, {"on_system_error": 7}),
    (TypeError, {"on_system_recovery": "log"}),
    (ValueError, {"error_text": "none"}),
    (TypeError, {"nonsense": 1}),
]
WRONG_OF_QUEUES: list[tuple[type[Exception], dict[str, Any]]] = [
    (TypeError, {"codec": object()}),
    (TypeError, {"validate": 7}),
    (TypeError, {"depends_on": 7}),
    (ValueError, {"max_payload_bytes": -1}),
    (TypeError, {"max_payload_bytes": 1.5}),
    (ValueError, {"max_retries": -1}),
    (TypeError, {"max_retries": "3"}),
    (ValueError, {"backoff": -1}),
    (ValueError, {"backoff": float("nan")}),
    (TypeError, {"backoff": "5"}),
    (TypeError, {"stop_at_failure": 1}),
    (TypeError, {"done_on": 7}),
    (TypeError, {"done_on": (ValueError, 7)}),
    (TypeError, {"transactional": None}),
    (ValueError, {"concurrency": 0}),
    (TypeError, {"concurrency": 1.5}),
    (ValueError, {"slow_after": -1}),
    (ValueError, {"hung_after": float("nan")}),
    (ValueError, {"timeout": -1}),
    (ValueError, {"keep_done": -1}),
    (TypeError, {"keep_dead": "7 days"}),
    (TypeError, {"on_error": 7}),
    (TypeError, {"on_dead": 7}),
    (TypeError, {"nonsense": 1}),
]


@pytest.mark.parametrize(("error", "options"), WRONG + WRONG_OF_QUEUES, ids=name_of)
def test_wrong_options_of_an_outbox(error: type[Exception], options: dict[str, Any]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        Outbox(**options)


@pytest.mark.parametrize(("error", "options"), WRONG_OF_QUEUES, ids=name_of)
def test_wrong_options_of_a_queue(error: type[Exception], options: dict[str, Any]) -> None:
    with Outbox() as outbox:
        with pytest.raises(error, match=next(iter(options))):
            outbox.queue("mail", **options)
        with pytest.raises(error):
            outbox.add_consumer("mail", print, **options)
        with pytest.raises(error):
            outbox.consumer("mail", **options)(print)
        assert outbox.core.queues.all() == []


def test_options_of_the_outbox_are_defaults_of_its_queues() -> None:
    with Outbox(max_retries=3, keep_done=5.0, backoff=exponential(first=1.0)) as outbox:
        outbox.queue("mail", keep_done=7)
        outbox.queue("bills")
        options = outbox.core.queues.options
        assert (options("mail").max_retries, options("mail").keep_done) == (3, 7)
        assert (options("bills").max_retries, options("bills").keep_done) == (3, 5.0)
        assert options("never heard of").max_retries == 3


def test_the_options_have_the_defaults_of_the_page() -> None:
    with Outbox() as outbox:
        options = outbox.core.queues.defaults
    found = {name: getattr(options, name) for name in options.__annotations__ if name not in ("codec", "backoff")}
    assert found == {
        "validate": None,
        "depends_on": None,
        "max_payload_bytes": 1 << 20,
        "max_retries": 10_000,
        "stop_at_failure": True,
        "done_on": (),
        "transactional": False,
        "concurrency": None,
        "slow_after": 300,
        "hung_after": 1800,
        "timeout": None,
        "keep_done": 7 * 86_400,
        "keep_dead": None,
        "on_error": None,
        "on_dead": None,
    }


# -- consumers -------------------------------------------------------------------------------------------------------


def test_a_consumer_is_returned_unchanged_and_registered() -> None:
    with Outbox() as outbox:

        @outbox.consumer("mail", max_retries=2)
        def send(payload: Any) -> str:
            return f"sent {payload}"

        assert send(1) == "sent 1"
        (consumer,) = outbox.core.queues.all()
        assert (consumer.queue, consumer.handler, consumer.options.max_retries) == ("mail", send, 2)
        assert not consumer.is_async


def test_a_second_consumer_is_an_error_unless_it_replaces() -> None:
    def other(payload: Any) -> None: ...

    with Outbox() as outbox:
        outbox.add_consumer("mail", print, max_retries=1)
        with pytest.raises(ValueError, match="replace=True"):
            outbox.add_consumer("mail", other)
        with pytest.raises(ValueError, match="replace=True"):
            outbox.consumer("mail")(other)
        outbox.add_consumer("mail", other, replace=True)
        (consumer,) = outbox.core.queues.all()
        assert (consumer.handler, consumer.options.max_retries) == (other, 10_000)


def test_declared_first_and_consumed_then() -> None:
    """The options of the declaration stay, if the consumer has none of its own."""
    with Outbox() as outbox:
        outbox.queue("mail", max_retries=1)
        outbox.add_consumer("mail", print)
        (consumer,) = outbox.core.queues.all()
        assert (consumer.handler, consumer.options.max_retries) == (print, 1)
        outbox.queue("mail")
        (consumer,) = outbox.core.queues.all()
        assert (consumer.handler, consumer.options.max_retries) == (print, 1)


def test_a_removed_consumer_leaves_its_queue_declared(outbox: Outbox) -> None:
    outbox.add_consumer("letters", print)
    outbox.remove_consumer("letters")
    assert put(outbox, "letters").queue == "letters"
    for name in ("letters", "nobody"):
        with pytest.raises(UnknownQueue):
            outbox.remove_consumer(name)


@pytest.mark.parametrize("name", ["", "a b", "-a", "ü", "a" * 101, "a/b", None, 7])
def test_wrong_names_of_queues(name: Any) -> None:
    with Outbox() as outbox:
        with pytest.raises(InvalidName):
            outbox.queue(name)
        with pytest.raises(InvalidName):
            outbox.add_consumer(name, print)
        with pytest.raises(InvalidName):
            outbox.consumer(name)(print)


@pytest.mark.parametrize("name", ["a", "_", "A-b_9", "a" * 100])
def test_names_of_queues(outbox: Outbox, name: str) -> None:
    outbox.queue(name)
    assert put(outbox, name).queue == name


def test_a_handler_is_a_function() -> None:
    with Outbox() as outbox, pytest.raises(TypeError, match="a handler is a function"):
        outbox.add_consumer("mail", "send")  # type: ignore[arg-type]


def test_what_is_async() -> None:
    async def handler(payload: Any) -> None: ...

    class Handler:
        async def __call__(self, payload: Any) -> None: ...

    with Outbox() as outbox:
        outbox.add_consumer("a", handler)
        outbox.add_consumer("b", Handler())
        outbox.add_consumer("c", lambda payload: None)
        assert [each.is_async for each in outbox.core.queues.all()] == [True, True, False]


def test_the_columns_of_the_page_are_there(outbox: Outbox) -> None:
    """People query them."""
    wanted = """id queue key job_group lane status priority payload payload_bytes context depends_on tries
    added_ms due_ms started_ms finished_ms first_error_ms error worker token"""
    assert set(wanted.split()) <= row_of(outbox, put(outbox)).keys()
