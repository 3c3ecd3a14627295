"""One put: what it writes, what it returns, what it refuses before anything is sent, and keys."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextvars import ContextVar
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy

from kestrelpy import InvalidName
from kestrelpy.outbox import (
    DuplicateJob,
    InvalidPayload,
    Job,
    JobTooBig,
    Outbox,
    UnknownDependency,
    UnknownQueue,
)
from kestrelpy.testing import ManualClock
from tests.outbox.claimant import Claimant
from tests.support.queues import START_MS

MakeOutbox = Callable[..., Outbox]
FIRST_MS, YEAR_MS = 1_600_000_000_000, 365 * 86_400_000


def put(outbox: Outbox, queue: Any = "mail", payload: Any = None, **options: Any) -> Job:
    """In a transaction of its own."""
    with outbox.begin() as connection:
        return outbox.put(connection, queue, payload, **options)


def row_of(outbox: Outbox, job: Job) -> dict[str, Any]:
    with outbox.begin() as connection:
        found = connection.exec_driver_sql(f"SELECT * FROM kestrel_jobs WHERE id = {job.id}").mappings().one()
        return dict(found)


# -- what is written -------------------------------------------------------------------------------------------------


def test_the_row_has_what_people_query(outbox: Outbox) -> None:
    first = put(outbox, "bills", 0)
    job = put(outbox, "mail", {"a": [1, "ü"]}, key="k", group="g", lane="l", priority=-7, delay=2.5, depends_on=first)
    assert row_of(outbox, job) == {
        "id": job.id,
        "queue": "mail",
        "key": "k",
        "job_group": "g",
        "lane": "l",
        "status": "waiting",
        "priority": -7,
        "payload": '{"a":[1,"ü"]}',
        "payload_binary": None,
        "payload_bytes": 14,
        "context": None,
        "depends_on": first.id,
        "tries": 0,
        "added_ms": START_MS,
        "due_ms": START_MS + 2500,
        **dict.fromkeys(("started_ms", "finished_ms", "first_error_ms", "error", "worker", "token", "was_due_ms")),
        "held": row_of(outbox, first)["held"],
        "relay_batch": None,
    }
    assert not row_of(outbox, job)["held"]


def test_the_job_is_that_row(outbox: Outbox) -> None:
    job = put(outbox, "mail", {"a": 1}, key="k", group="g", lane="l", priority=3, delay=1)
    assert job == outbox.get(job.id)
    shown = {name: getattr(job, name) for name in ("queue", "key", "group", "lane", "status", "priority", "tries")}
    assert shown == {
        "queue": "mail",
        "key": "k",
        "group": "g",
        "lane": "l",
        "status": "ready",
        "priority": 3,
        "tries": 0,
    }
    assert (job.added_ms, job.due_ms, job.is_new, job.payload) == (START_MS, START_MS + 1000, True, {"a": 1})
    assert outbox.get(job.id).is_new is False


def test_ids_grow(outbox: Outbox) -> None:
    ids = [put(outbox).id for _ in range(3)]
    assert ids == sorted(set(ids))


def test_an_id_is_not_given_out_again(outbox: Outbox) -> None:
    """Not even that of the last row, once it is deleted: somebody may depend on it, or have it noted."""
    last = put(outbox)
    with outbox.begin() as connection:
        connection.exec_driver_sql("DELETE FROM kestrel_jobs")
    assert put(outbox).id > last.id


@pytest.mark.parametrize(
    ("options", "due_ms"),
    [
        ({}, START_MS),
        ({"delay": 0}, START_MS),
        ({"delay": 3}, START_MS + 3000),
        ({"delay": 0.0001}, START_MS + 1),  # not before it is over
        ({"delay": Decimal("1.5")}, START_MS + 1500),
        ({"delay": 1 << 32}, START_MS + (1000 << 32)),
        ({"at_ms": 0}, 0),
        ({"at_ms": START_MS - 1, "delay": 0.0}, START_MS - 1),
        ({"at_ms": (1 << 53) - 1}, (1 << 53) - 1),
    ],
)
def test_due_times(outbox: Outbox, options: Any, due_ms: int) -> None:
    assert put(outbox, **options).due_ms == due_ms
    with outbox.begin() as connection:
        assert outbox.put_many(connection, "mail", [1], **options)[0].due_ms == due_ms


def test_without_a_clock_the_server_says_what_time_it_is(make_outbox: MakeOutbox, engine: sqlalchemy.Engine) -> None:
    outbox = make_outbox(clock=None)
    job = put(outbox, delay=10)
    with engine.connect() as connection:
        is_server = engine.dialect.name == "postgresql"
        now = "extract(epoch from now())" if is_server else "(julianday('now') - 2440587.5) * 86400"
        seconds = float(connection.exec_driver_sql(f"SELECT {now}").scalar_one())
    assert abs(job.added_ms / 1000 - seconds) < 10
    assert job.due_ms == job.added_ms + 10_000


def test_a_put_in_a_long_transaction_is_due_by_the_statement(postgres_url: str) -> None:
    """PostgreSQL's ``now()`` is that of the transaction's begin."""
    with Outbox(postgres_url) as outbox:
        outbox.create_tables()
        outbox.queue("mail")
        with outbox.begin() as connection:
            begun = connection.exec_driver_sql("SELECT extract(epoch FROM now()) * 1000").scalar_one()
            connection.exec_driver_sql("SELECT pg_sleep(0.05)")
            assert outbox.put(connection, "mail").added_ms >= float(begun) + 45


# -- payloads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "payload",
    [None, True, 0, -(1 << 70), 1.5, "", "ü\U0001f600\u2028'\"\\%s :x", [], {}, {"": None}, [[1], {"a": [1.0]}]],
    ids=ascii,
)
def test_values_come_back(outbox: Outbox, payload: Any) -> None:
    job = put(outbox, payload=payload)
    found = outbox.get(job.id).payload
    assert (found, type(found)) == (payload, type(payload))
    with outbox.begin() as connection:
        many = outbox.put_many(connection, "mail", [payload, payload])
    assert [outbox.get(each.id).payload for each in many] == [payload, payload]


@pytest.mark.parametrize(
    "payload", [(1,), {1: 2}, math.nan, math.inf, "\ud800", {"\udfff": 1}, b"x", {1, 2}, Ellipsis], ids=ascii
)
def test_values_that_json_changes_are_refused(outbox: Outbox, payload: Any) -> None:
    with outbox.begin() as connection:
        with pytest.raises(InvalidPayload) as caught:
            outbox.put(connection, "mail", payload)
        assert caught.value.queue == "mail"
        assert caught.value.reason
        with pytest.raises(InvalidPayload):
            outbox.put_many(connection, "mail", [1, payload])
    assert outbox.jobs() == []


class Given:
    """A codec that gives what it is told."""

    def __init__(self, given: Any = None) -> None:
        self.given = given

    def encode(self, value: Any) -> Any:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given if self.given is not None else value

    def decode(self, data: Any) -> Any:
        if data in ("bad", b"bad"):
            raise ValueError("not readable")
        return ("decoded", data)


@pytest.mark.parametrize("value", ["", "text ü", b"", b"\0\xff", bytes(range(256)) * 10], ids=len)
def test_a_codec_gives_text_or_bytes(outbox: Outbox, value: Any) -> None:
    outbox.queue("own", codec=Given())
    job = put(outbox, "own", value)
    assert job.payload == outbox.get(job.id).payload == ("decoded", value)
    assert job == outbox.get(job.id)
    assert row_of(outbox, job)["payload_bytes"] == len(value.encode() if isinstance(value, str) else value)
    with outbox.begin() as connection:
        many = outbox.put_many(connection, "own", [value, value], keys=["a", None])
    assert [outbox.get(each.id).payload for each in many] == [("decoded", value)] * 2


@pytest.mark.parametrize("given", [bytearray(b"ab"), memoryview(b"ab")], ids=["bytearray", "memoryview"])
def test_buffers_are_bytes(outbox: Outbox, given: Any) -> None:
    outbox.queue("own", codec=Given(given))
    assert put(outbox, "own", 1).payload == ("decoded", b"ab")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (ValueError("no such thing"), "the codec refuses it: no such thing"),
        (KeyError("k"), "the codec refuses it"),
        (7, "the codec gives int, neither str nor bytes"),
        ([b"x"], "neither str nor bytes"),
        ("a\0b", "NUL"),
        ("\ud800", "lone surrogate"),
    ],
)
def test_a_codec_that_fails(outbox: Outbox, given: Any, reason: str) -> None:
    outbox.queue("own", codec=Given(given))
    with outbox.begin() as connection, pytest.raises(InvalidPayload, match=reason):
        outbox.put(connection, "own", 1)
    assert outbox.jobs() == []


def test_of_an_unreadable_payload_only_the_payload_raises(outbox: Outbox) -> None:
    outbox.queue("own", codec=Given())
    job = outbox.get(put(outbox, "own", "bad", key="k").id)
    with pytest.raises(ValueError, match="not readable"):
        _ = job.payload
    assert (job.stored, job.key, job.queue) == ("bad", "k", "own")
    assert repr(job) == f"<Job {job.id} of own key='k': ready, tries=0>"
    assert job == outbox.find("own", "k")


def test_a_queue_that_is_not_known_here_is_read_with_the_default_codec(make_outbox: MakeOutbox, outbox: Outbox) -> None:
    outbox.queue("elsewhere")
    job = put(outbox, "elsewhere", [1])
    assert make_outbox().get(job.id).payload == [1]


@pytest.mark.parametrize("payload", ["a" * 98, "ä" * 49])
def test_the_size_is_in_bytes_as_stored(outbox: Outbox, payload: str) -> None:
    outbox.queue("small", max_payload_bytes=100)
    put(outbox, "small", payload)
    with outbox.begin() as connection:
        with pytest.raises(JobTooBig, match="101") as caught:
            outbox.put(connection, "small", payload + "x")
        with pytest.raises(JobTooBig):
            outbox.put_many(connection, "small", ["x", payload + "x"])
    assert caught.value.args
    assert len(outbox.jobs()) == 1


def test_validate_says_yes_or_no(outbox: Outbox) -> None:
    def validate(payload: Any) -> object:
        if payload == "raise":
            raise LookupError("no such customer")
        return payload

    outbox.queue("checked", validate=validate)
    put(outbox, "checked", 1)
    with outbox.begin() as connection:
        for payload, reason in ((0, "validate refuses it"), ("raise", "LookupError: no such customer")):
            with pytest.raises(InvalidPayload, match=reason):
                outbox.put(connection, "checked", payload)
            with pytest.raises(InvalidPayload, match=reason):
                outbox.put_many(connection, "checked", [1, payload])
    assert len(outbox.jobs()) == 1


# -- context ---------------------------------------------------------------------------------------------------------


def test_context_is_kept_as_json(make_outbox: MakeOutbox) -> None:
    request: ContextVar[Any] = ContextVar("request")
    outbox = make_outbox(context={"request": request})
    assert put(outbox).context is None
    token = request.set({"id": "ü"})
    assert put(outbox).context == '{"request":{"id":"ü"}}'
    request.set(object())
    with outbox.begin() as connection, pytest.raises(InvalidPayload, match="request"):
        outbox.put(connection, "mail")
    request.reset(token)
    assert len(outbox.jobs()) == 2


# -- queues ----------------------------------------------------------------------------------------------------------


def test_a_queue_is_named_by_the_function_that_consumes_it(outbox: Outbox) -> None:
    @outbox.consumer("letters")
    def send(payload: Any) -> None: ...

    async def asend(payload: Any) -> None: ...

    outbox.add_consumer("alerts", asend)
    assert put(outbox, send).queue == "letters"
    assert put(outbox, asend).queue == "alerts"
    with outbox.begin() as connection:
        assert outbox.put_many(connection, send, [1])[0].queue == "letters"


def test_a_function_must_name_one_queue(outbox: Outbox) -> None:
    def send(payload: Any) -> None: ...

    with outbox.begin() as connection:
        with pytest.raises(UnknownQueue, match="send"):
            outbox.put(connection, send)
        outbox.add_consumer("a", send)
        outbox.add_consumer("b", send)
        with pytest.raises(ValueError, match="several queues"):
            outbox.put(connection, send)
        outbox.remove_consumer("b")
        assert outbox.put(connection, send).queue == "a"
        assert outbox.put(connection, "b").queue == "b"


def test_unknown_queues(outbox: Outbox) -> None:
    with outbox.begin() as connection:
        with pytest.raises(UnknownQueue, match=r"outbox\.queue\('nope'\)") as caught:
            outbox.put(connection, "nope")
        assert caught.value.queue == "nope"
        with pytest.raises(UnknownQueue):
            outbox.put_many(connection, "nope", [])
        for name in ("", "a b", "-a", "ü", "a" * 101, None, 7, b"mail"):
            with pytest.raises(InvalidName):
                outbox.put(connection, name)  # type: ignore[arg-type]


# -- what is refused before anything is sent -------------------------------------------------------------------------

BAD_OPTIONS: list[tuple[type[Exception], dict[str, Any]]] = [
    (ValueError, {"if_exists": "ignore"}),
    (ValueError, {"if_exists": None}),
    (ValueError, {"priority": 1 << 31}),
    (ValueError, {"priority": -(1 << 31) - 1}),
    (ValueError, {"priority": 1.0}),
    (ValueError, {"priority": True}),
    (ValueError, {"delay": -1}),
    (ValueError, {"delay": -0.001}),
    (ValueError, {"delay": math.nan}),
    (ValueError, {"delay": math.inf}),
    (ValueError, {"delay": 1 << 33}),
    (TypeError, {"delay": "1"}),
    (TypeError, {"delay": None}),
    (ValueError, {"delay": 1, "at_ms": 5}),
    (ValueError, {"at_ms": -1}),
    (ValueError, {"at_ms": 1 << 53}),
    (TypeError, {"at_ms": 1.5}),
    *[
        (error, {name: value})
        for name in ("key", "group", "lane")
        for error, value in (
            (ValueError, ""),
            (ValueError, "x" * 256),
            (ValueError, "a\0b"),
            (ValueError, "\ud800"),
            (TypeError, 7),
            (TypeError, b"k"),
        )
    ],
    (TypeError, {"depends_on": "1"}),
    (TypeError, {"depends_on": 1.0}),
    (TypeError, {"depends_on": True}),
    (TypeError, {"depends_on": ("mail", 1)}),
    (TypeError, {"depends_on": ("mail", "k", "x")}),
    (TypeError, {"depends_on": ["mail", "k"]}),
    (ValueError, {"depends_on": ("mail", "")}),
    (ValueError, {"depends_on": ("mail", None)}),
    (ValueError, {"depends_on": -1}),
    (ValueError, {"depends_on": 1 << 63}),
    (InvalidName, {"depends_on": ("a b", "k")}),
]


@pytest.mark.parametrize(("error", "options"), BAD_OPTIONS, ids=lambda value: ascii(value)[:40])
def test_bad_options(make_outbox: MakeOutbox, error: type[Exception], options: dict[str, Any]) -> None:
    outbox = make_outbox()
    sent: list[str] = []
    with outbox.begin() as connection:
        sqlalchemy.event.listen(connection, "before_cursor_execute", lambda *args: sent.append(args[2]))
        with pytest.raises(error) as caught:
            outbox.put(connection, "mail", 1, **options)
        assert type(caught.value) is error
        many = dict(options)
        if "key" in options:
            many["keys"] = [many.pop("key")]
        with pytest.raises(error):
            outbox.put_many(connection, "mail", [1], **many)
        assert error is InvalidName or any(name in str(caught.value) for name in options)
        assert sent == []


@pytest.mark.parametrize(
    "options", [{"key": "k" * 255, "group": "ü" * 255, "lane": "\U0001f600" * 255}, {"priority": (1 << 31) - 1}]
)
def test_the_largest_options(outbox: Outbox, options: Any) -> None:
    job = put(outbox, **options)
    assert outbox.get(job.id) == job
    assert {name: getattr(job, name) for name in options} == options


def test_unknown_options(outbox: Outbox) -> None:
    with outbox.begin() as connection:
        with pytest.raises(TypeError, match="keys"):
            outbox.put(connection, "mail", keys=["a"])  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="put has no option 'key'"):
            outbox.put_many(connection, "mail", [1], key="k")


def test_the_signature_is_that_of_the_page() -> None:
    assert list(inspect.signature(Outbox.put).parameters) == [
        "self",
        "connection",
        "queue",
        "payload",
        "key",
        "if_exists",
        "depends_on",
        "group",
        "lane",
        "priority",
        "delay",
        "at_ms",
    ]


def test_a_closed_or_unbound_outbox_says_so(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox()
    with outbox.begin() as connection:
        outbox.close()
        with pytest.raises(Exception, match="closed"):
            outbox.put(connection, "mail")
        unbound = Outbox()
        unbound.queue("mail")
        with pytest.raises(Exception, match="not bound"):
            unbound.put(connection, "mail")
        unbound.close()


# -- keys ------------------------------------------------------------------------------------------------------------


def test_a_key_is_unique_in_its_queue(outbox: Outbox) -> None:
    first = put(outbox, "mail", 1, key="k")
    with outbox.begin() as connection:
        with pytest.raises(DuplicateJob, match="'k' already") as caught:
            outbox.put(connection, "mail", 2, key="k")
        assert (caught.value.job_id, caught.value.queue, caught.value.key) == (first.id, "mail", "k")
        assert outbox.put(connection, "bills", 2, key="k").is_new
        assert outbox.put(connection, "mail", 2, key="K").is_new
        assert outbox.put(connection, "mail", 2, key="k ").is_new
        assert outbox.put(connection, "mail", 2).is_new
        assert outbox.put(connection, "mail", 2).is_new
    assert len(outbox.jobs()) == 6


@pytest.mark.parametrize("status", ["ready", "waiting", "running", "error", "done", "dead", "cancelled"])
@pytest.mark.parametrize("if_exists", ["raise", "return", "replace"])
def test_a_key_that_is_there(
    outbox: Outbox, claimant: Claimant, clock: ManualClock, status: str, if_exists: str
) -> None:
    there = in_status(outbox, claimant, status, key="k", group="g", lane="l", priority=5)
    clock.advance(1)
    with outbox.begin() as connection:
        change: dict[str, Any] = {"group": "other", "lane": "other", "priority": -1, "delay": 2}
        if if_exists == "return":
            found = outbox.put(connection, "mail", "new", key="k", if_exists="return", **change)
            assert (found, found.is_new) == (there, False)
        elif if_exists == "replace" and status in ("ready", "waiting", "error"):
            found = outbox.put(connection, "mail", "new", key="k", if_exists="replace", **change)
            assert (found.id, found.is_new, found.payload) == (there.id, False, "new")
            assert (found.priority, found.due_ms, found.tries) == (-1, clock.time_ns() // 1_000_000 + 2000, 0)
            assert (found.error, found.first_error_ms) == (None, None)
            assert found.status == ("waiting" if status == "waiting" else "ready")
            assert (found.group, found.lane, found.added_ms, found.depends_on) == (
                "g",
                "l",
                there.added_ms,
                there.depends_on,
            )
        else:
            with pytest.raises(DuplicateJob) as caught:
                outbox.put(connection, "mail", "new", key="k", if_exists=if_exists, **change)
            assert caught.value.job_id == there.id
            found = there
    assert outbox.get(there.id) == found


def in_status(outbox: Outbox, claimant: Claimant, status: str, **options: Any) -> Job:
    """A job of ``mail`` in this status."""
    if status == "waiting":
        options["depends_on"] = put(outbox, "bills")
    job = put(outbox, "mail", "old", **options)
    if status in ("running", "error", "done", "dead"):
        (claimed,) = claimant.claim("mail")
        if status == "done":
            claimant.done(claimed)
        elif status != "running":
            claimant.fail(claimed, is_dead=status == "dead")
    elif status == "cancelled":
        outbox.cancel(job.id)
    found = outbox.get(job.id)
    assert found.status == status
    return found


def test_a_key_is_free_once_its_row_is_deleted(outbox: Outbox, claimant: Claimant) -> None:
    first = put(outbox, "mail", 1, key="k")
    claimant.done(*claimant.claim(), delete=True)
    again = put(outbox, "mail", 2, key="k")
    assert (again.is_new, again.id > first.id) == (True, True)


def test_a_rolled_back_key_is_free(outbox: Outbox) -> None:
    with outbox.begin() as connection:
        outbox.put(connection, "mail", 1, key="k")
        connection.rollback()
    assert put(outbox, "mail", 2, key="k").is_new


# -- rows that do not stay -------------------------------------------------------------------------------------------


def test_a_row_that_a_trigger_swallows_is_an_error(outbox: Outbox, engine: sqlalchemy.Engine) -> None:
    """It is not looked for until the end of time."""
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql(
                "CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'"
            )
            connection.exec_driver_sql(
                "CREATE TRIGGER swallow BEFORE INSERT ON kestrel_jobs FOR EACH ROW EXECUTE FUNCTION swallow()"
            )
        else:
            connection.exec_driver_sql(
                "CREATE TRIGGER swallow BEFORE INSERT ON kestrel_jobs BEGIN SELECT RAISE(IGNORE); END"
            )
    for key in (None, "k"):
        with outbox.begin() as connection, pytest.raises(Exception, match="did not take the job"):
            outbox.put(connection, "mail", 1, key=key)
        with outbox.begin() as connection, pytest.raises(Exception, match="did not take"):
            outbox.put_many(connection, "mail", [1, 2], keys=[key, None], if_exists="return")


# -- dependencies that do not exist ----------------------------------------------------------------------------------


@pytest.mark.parametrize("depends_on", [0, 10**12, ("mail", "nope"), ("nobody", "k")])
def test_unknown_dependencies(outbox: Outbox, depends_on: Any) -> None:
    with outbox.begin() as connection:
        with pytest.raises(UnknownDependency) as caught:
            outbox.put(connection, "mail", 1, depends_on=depends_on)
        assert caught.value.depends_on == depends_on
        with pytest.raises(UnknownDependency):
            outbox.put_many(connection, "mail", [1, 2], depends_on=depends_on)
        with pytest.raises(UnknownDependency):
            outbox.put(connection, "mail", 1, key="k", if_exists="replace", depends_on=depends_on)
    assert outbox.jobs() == []
