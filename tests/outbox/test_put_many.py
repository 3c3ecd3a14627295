"""``put_many``: all of the jobs or none, in the order of their payloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy

from kestrelpy.outbox import DuplicateJob, InvalidPayload, Job, Outbox
from kestrelpy.testing import ManualClock
from tests.outbox.claimant import Claimant
from tests.outbox.test_puts import Given, in_status, put


def many(outbox: Outbox, payloads: Any, queue: str = "mail", **options: Any) -> list[Job]:
    """In a transaction of their own."""
    with outbox.begin() as connection:
        return outbox.put_many(connection, queue, payloads, **options)


@pytest.fixture(params=["text", "bytes"])
def codec(request: pytest.FixtureRequest, outbox: Outbox) -> Callable[[int], Any]:
    """Makes a payload of a number for the queue ``own``. Bytes take another way to SQLite than texts."""
    outbox.queue("own", codec=Given())
    return str if request.param == "text" else lambda number: str(number).encode()


def test_no_payloads_are_no_error(outbox: Outbox) -> None:
    assert many(outbox, []) == many(outbox, (), keys=[]) == []
    with outbox.begin() as connection:
        assert outbox.put_many(connection, "mail", [], if_exists="replace") == []


def test_thousands_in_order(outbox: Outbox, codec: Callable[[int], Any]) -> None:
    payloads = [codec(number) for number in range(3000)]
    keys = [None if number % 7 == 0 else f"k{-number}" for number in range(3000)]
    jobs = many(outbox, payloads, "own", keys=keys, group="g", priority=3, delay=1)
    assert [job.payload[1] for job in jobs] == payloads
    assert [job.key for job in jobs] == keys
    ids = [job.id for job in jobs]
    assert ids == sorted(ids)
    assert outbox.jobs(limit=5000) == jobs
    assert {(job.group, job.priority, job.due_ms - job.added_ms, job.is_new) for job in jobs} == {("g", 3, 1000, True)}


def test_payloads_and_keys_of_any_kind_of_iterable(outbox: Outbox) -> None:
    jobs = many(outbox, (number for number in (1, 2)), keys=(key for key in ("a", "b")))
    assert [(job.payload, job.key) for job in jobs] == [(1, "a"), (2, "b")]


@pytest.mark.parametrize("keys", [[], ["a"], ["a", "b", "c"]])
def test_a_key_for_each(outbox: Outbox, keys: list[str]) -> None:
    with outbox.begin() as connection, pytest.raises(ValueError, match=f"{len(keys)} of them for 2 payloads"):
        outbox.put_many(connection, "mail", [1, 2], keys=keys)


def test_a_key_twice_is_an_error_of_the_caller(outbox: Outbox) -> None:
    for if_exists in ("raise", "return", "replace"):
        with outbox.begin() as connection, pytest.raises(ValueError, match="twice"):
            outbox.put_many(connection, "mail", [1, 2], keys=["a", "a"], if_exists=if_exists)
    assert len(many(outbox, [1, 2, 3], keys=[None, None, "a"])) == 3


def test_all_are_checked_before_any_is_written(outbox: Outbox) -> None:
    sent: list[str] = []
    with outbox.begin() as connection:
        sqlalchemy.event.listen(connection, "before_cursor_execute", lambda *args: sent.append(args[2]))
        with pytest.raises(InvalidPayload):
            outbox.put_many(connection, "mail", [1, 2, object()])
        with pytest.raises(ValueError, match="key"):
            outbox.put_many(connection, "mail", [1, 2], keys=["a", ""])
    assert sent == []


@pytest.mark.parametrize("status", ["ready", "waiting", "running", "error", "done", "dead", "cancelled"])
def test_one_key_there_and_nothing_is_written(
    outbox: Outbox, claimant: Claimant, codec: Callable[[int], Any], status: str
) -> None:
    there = in_status(outbox, claimant, status, key="k")
    own = put(outbox, "own", codec(0), key="k")
    for queue, id_, payloads in (("mail", there.id, [1, 2, 3]), ("own", own.id, [codec(n) for n in (1, 2, 3)])):
        before = outbox.jobs(limit=1000)
        with outbox.begin() as connection:
            with pytest.raises(DuplicateJob) as caught:
                outbox.put_many(connection, queue, payloads, keys=["a", None, "k"])
            assert (caught.value.job_id, caught.value.queue, caught.value.key) == (id_, queue, "k")
            assert outbox.jobs(limit=1000, connection=connection) == before
            # the transaction goes on, and the keys of the others are free
            outbox.put_many(connection, queue, payloads[:2], keys=["a", None])
        assert len(outbox.jobs(limit=1000)) == len(before) + 2


def test_the_jobs_there_are_returned_in_their_places(outbox: Outbox, codec: Callable[[int], Any]) -> None:
    there = many(outbox, [codec(8), codec(9)], "own", keys=["b", "d"])
    jobs = many(outbox, [codec(n) for n in range(5)], "own", keys=["d", "a", None, "b", "c"], if_exists="return")
    assert [(job.key, job.is_new, job.payload[1]) for job in jobs] == [
        ("d", False, codec(9)),
        ("a", True, codec(1)),
        (None, True, codec(2)),
        ("b", False, codec(8)),
        ("c", True, codec(4)),
    ]
    assert [jobs[3], jobs[0]] == there
    assert len(outbox.jobs()) == 5


def test_only_jobs_there(outbox: Outbox) -> None:
    there = many(outbox, [1, 2], keys=["a", "b"])
    assert many(outbox, [3, 4], keys=["b", "a"], if_exists="return") == [there[1], there[0]]


@pytest.mark.parametrize("status", ["ready", "waiting", "error"])
def test_replaced_in_their_places(
    outbox: Outbox, claimant: Claimant, clock: ManualClock, codec: Callable[[int], Any], status: str
) -> None:
    there = in_status(outbox, claimant, status, key="k", priority=9)
    clock.advance(1)
    jobs = many(outbox, [1, 2, 3], keys=["a", "k", None], if_exists="replace", priority=2, delay=3)
    assert [(job.key, job.is_new, job.payload) for job in jobs] == [("a", True, 1), ("k", False, 2), (None, True, 3)]
    assert (jobs[1].id, jobs[1].priority, jobs[1].tries) == (there.id, 2, 0)
    assert {job.due_ms for job in jobs} == {clock.time_ns() // 1_000_000 + 3000}
    assert [outbox.get(job.id) for job in jobs] == jobs
    own = many(outbox, [codec(1), codec(2)], "own", keys=["x", "y"])
    again = many(outbox, [codec(3), codec(4), codec(5)], "own", keys=["y", "z", "x"], if_exists="replace")
    assert [job.payload[1] for job in again] == [codec(3), codec(4), codec(5)]
    assert [again[2].id, again[0].id] == [job.id for job in own]
    assert again[0].id < again[1].id
    assert outbox.jobs("own", limit=9) == sorted(again, key=lambda job: job.id)


@pytest.mark.parametrize("status", ["running", "done", "dead", "cancelled"])
def test_one_that_can_not_be_replaced_and_none_is(
    outbox: Outbox, claimant: Claimant, codec: Callable[[int], Any], status: str
) -> None:
    there = in_status(outbox, claimant, status, key="k")
    first = put(outbox, "mail", "first", key="f")
    before = outbox.jobs(limit=1000)
    with outbox.begin() as connection:
        with pytest.raises(DuplicateJob) as caught:
            outbox.put_many(connection, "mail", [1, 2, 3, 4], keys=["a", "f", "k", None], if_exists="replace")
        assert (caught.value.job_id, caught.value.key) == (there.id, "k")
        assert outbox.jobs(limit=1000, connection=connection) == before
    assert outbox.get(first.id).payload == "first"


def test_a_payload_may_depend_on_something_of_its_own(outbox: Outbox) -> None:
    def depends_on(payload: Any) -> Any:
        return payload.get("after")

    outbox.queue("steps", depends_on=depends_on)
    first = put(outbox, "mail", key="first")
    jobs = many(outbox, [{"after": first.id}, {}, {"after": None}, {"after": first.id}], "steps")
    assert [(job.depends_on, job.status) for job in jobs] == [
        (first.id, "waiting"),
        (None, "ready"),
        (None, "ready"),
        (first.id, "waiting"),
    ]
    second = put(outbox, "mail")
    given = many(outbox, [{"after": first.id}, {}], "steps", depends_on=second)
    assert [job.depends_on for job in given] == [second.id] * 2


@pytest.mark.parametrize("found", ["x", ("mail",), -1])
def test_a_dependency_that_makes_no_sense(outbox: Outbox, found: Any) -> None:
    outbox.queue("steps", depends_on=lambda payload: found)
    outbox.queue("broken", depends_on=lambda payload: payload["no such thing"])
    with outbox.begin() as connection:
        for queue in ("steps", "broken"):
            with pytest.raises(InvalidPayload, match="depends_on failed"):
                outbox.put_many(connection, queue, [{}])
            with pytest.raises(InvalidPayload, match="depends_on failed"):
                outbox.put(connection, queue, {})
    assert outbox.jobs() == []
