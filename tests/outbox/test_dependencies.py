"""``depends_on``: a job that is ready when another one is done, and waits as long as it is not."""

from __future__ import annotations

from typing import Any

import pytest

from kestrelpy.outbox import Outbox, UnknownDependency, claims
from kestrelpy.testing import ManualClock
from tests.outbox.claimant import Claimant
from tests.outbox.test_puts import in_status, put
from tests.support.queues import START_MS


def test_ready_in_the_transaction_that_marks_the_other(outbox: Outbox, claimant: Claimant) -> None:
    first = put(outbox, "bills")
    second = put(outbox, "mail", depends_on=first)
    assert (second.status, second.depends_on) == ("waiting", first.id)
    assert claimant.ids("mail") == []
    (claimed,) = claimant.claim("bills")
    what = claims.Finish()
    what.done.append(claimed.own)
    with outbox.begin() as connection:
        saved, queues = outbox.core.open_store().perform(connection, claims.finish, what)
        assert (saved, queues) == ({first.id}, ["mail"])
        assert outbox.get(second.id, connection=connection).status == "ready"
        connection.rollback()
    assert (outbox.get(first.id).status, outbox.get(second.id).status) == ("running", "waiting")
    claimant.done(claimed)
    assert claimant.ids("mail") == [second.id]


@pytest.mark.parametrize("delete", [False, True], ids=["kept", "deleted"])
def test_several_may_wait_for_one(outbox: Outbox, claimant: Claimant, delete: bool) -> None:
    first, other = put(outbox, "bills"), put(outbox, "bills")
    with outbox.begin() as connection:
        jobs = outbox.put_many(connection, "mail", [1, 2, 3], depends_on=first)
        for_other = outbox.put(connection, "mail", depends_on=other)
    (claimed, _) = claimant.claim("bills")
    assert claimed.id == first.id
    claimant.done(claimed, delete=delete)
    assert claimant.ids("mail") == [job.id for job in jobs]
    assert outbox.get(for_other.id).status == "waiting"
    assert claimant.sweep() == []


@pytest.mark.parametrize("by", ["retry", "retry_all"])
def test_one_that_was_cancelled_while_it_waited_waits_again(outbox: Outbox, claimant: Claimant, by: str) -> None:
    first = put(outbox, "bills")
    second = put(outbox, "mail", depends_on=first)
    assert outbox.cancel(second.id)
    assert outbox.retry(second.id) if by == "retry" else outbox.retry_all("mail", "cancelled") == 1
    assert outbox.get(second.id).status == "waiting"
    claimant.done(*claimant.claim("bills"))
    (claimed,) = claimant.claim("mail")
    claimant.done(claimed)
    assert outbox.retry(second.id)
    assert outbox.get(second.id).status == "ready"


def test_a_sweep_comes_to_all_of_those_that_wait(outbox: Outbox, claimant: Claimant) -> None:
    """More than a slice of them; those of the last slice too, and each once."""
    with outbox.begin() as connection:
        firsts = outbox.put_many(connection, "bills", range(claims.SLICE + 2))
        waiting = [outbox.put(connection, "mail", depends_on=firsts[at]) for at in (0, 1, -2, -1)]
        others = outbox.put_many(connection, "mail", [0] * 3, depends_on=firsts[-1])
        for number in (1, -1):
            connection.exec_driver_sql(f"UPDATE kestrel_jobs SET status = 'done' WHERE id = {firsts[number].id}")
        for first in firsts[2:-2]:
            outbox.put(connection, "mail", depends_on=first)
    assert claimant.sweep() == [waiting[1].id, waiting[3].id, *(job.id for job in others)]
    assert claimant.sweep() == []


def test_one_of_the_same_transaction_and_of_the_same_savepoint(outbox: Outbox, claimant: Claimant) -> None:
    with outbox.begin() as connection:
        first = outbox.put(connection, "mail", 1, key="first")
        second = outbox.put(connection, "mail", 2, depends_on=first)
        third = outbox.put(connection, "mail", 3, depends_on=("mail", "first"))
        with connection.begin_nested() as savepoint:
            fourth = outbox.put(connection, "mail", 4)
            outbox.put(connection, "mail", 5, depends_on=fourth)
            savepoint.rollback()
        with pytest.raises(UnknownDependency):
            outbox.put(connection, "mail", 6, depends_on=fourth)
    assert [job.depends_on for job in (second, third)] == [first.id] * 2
    claimant.done(*claimant.claim())
    assert claimant.ids() == [second.id, third.id]


@pytest.mark.parametrize("by", ["job", "id", "key"])
def test_named_in_three_ways(outbox: Outbox, by: str) -> None:
    first = put(outbox, "bills", key="k")
    depends_on: Any = {"job": first, "id": first.id, "key": ("bills", "k")}[by]
    assert put(outbox, "mail", depends_on=depends_on).depends_on == first.id
    with outbox.begin() as connection:
        assert [job.depends_on for job in outbox.put_many(connection, "mail", [1, 2], depends_on=depends_on)] == [
            first.id
        ] * 2


@pytest.mark.parametrize("status", ["ready", "waiting", "running", "error", "dead", "cancelled", "done"])
def test_of_a_job_in_any_status(outbox: Outbox, claimant: Claimant, status: str) -> None:
    """Done already: ready at once. Else it waits, also for a dead or cancelled one, which a retry makes done yet."""
    first = in_status(outbox, claimant, status)
    second = put(outbox, "bills", depends_on=first)
    assert second.status == ("ready" if status == "done" else "waiting")
    with outbox.begin() as connection:
        assert outbox.put_many(connection, "bills", [1], depends_on=first)[0].status == second.status
    claimant.sweep()
    assert outbox.get(second.id).status == second.status


@pytest.mark.parametrize("end", ["dead", "cancelled"])
def test_the_others_retry_helps(outbox: Outbox, claimant: Claimant, end: str) -> None:
    first = in_status(outbox, claimant, end)
    second = put(outbox, "bills", depends_on=first)
    assert claimant.ids("bills") == []
    assert outbox.retry(first.id)
    claimant.done(*claimant.claim("mail"))
    assert claimant.ids("bills") == [second.id]


def test_a_failure_of_the_other_is_no_end(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    first = put(outbox, "mail")
    second = put(outbox, "bills", depends_on=first)
    claimant.fail(*claimant.claim(), seconds=1)
    assert claimant.ids("bills") == []
    clock.advance(1)
    claimant.fail(*claimant.claim(status="error"), is_dead=True)
    assert claimant.ids("bills") == []
    claimant.sweep()
    assert outbox.get(second.id).status == "waiting"


def test_a_chain(outbox: Outbox, claimant: Claimant) -> None:
    jobs = [put(outbox)]
    for _ in range(4):
        jobs.append(put(outbox, depends_on=jobs[-1]))
    for job in jobs:
        (claimed,) = claimant.claim()
        assert claimed.id == job.id
        claimant.done(claimed)
    assert claimant.ids() == []


def test_a_waiting_job_never_holds_others(outbox: Outbox, claimant: Claimant) -> None:
    first = put(outbox, "bills")
    put(outbox, "mail", depends_on=first, priority=-9, lane="l")
    others = [put(outbox, "mail", lane="l").id, put(outbox, "mail").id]
    assert claimant.ids("mail") == others


def test_it_waits_for_its_own_due_time_too(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    first = put(outbox, "bills")
    second = put(outbox, "mail", depends_on=first, delay=10)
    claimant.done(*claimant.claim("bills"))
    assert (outbox.get(second.id).status, outbox.get(second.id).due_ms) == ("ready", START_MS + 10_000)
    assert claimant.ids("mail") == []
    clock.advance(10)
    assert claimant.ids("mail") == [second.id]


def test_a_refused_mark_frees_nothing(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    first = put(outbox, "bills")
    second = put(outbox, "mail", depends_on=first)
    (claimed,) = claimant.claim("bills")
    clock.advance(31)
    claimant.lapse("bills", seconds=60)
    assert claimant.done(claimed) == set()
    assert claimant.done(claimed, delete=True) == set()
    assert outbox.get(second.id).status == "waiting"


def test_the_sweep_finds_those_of_a_job_that_is_gone(outbox: Outbox, claimant: Claimant) -> None:
    """Somebody has deleted it, by hand."""
    first = put(outbox, "bills")
    second = put(outbox, "mail", depends_on=first)
    with outbox.begin() as connection:
        connection.exec_driver_sql(f"DELETE FROM kestrel_jobs WHERE id = {first.id}")
    assert claimant.sweep() == [second.id]
    assert claimant.ids("mail") == [second.id]


def test_a_job_that_was_deleted_with_its_mark_is_unknown(outbox: Outbox, claimant: Claimant) -> None:
    first = put(outbox, "bills")
    claimant.done(*claimant.claim("bills"), delete=True)
    with outbox.begin() as connection, pytest.raises(UnknownDependency, match=f"no job {first.id}"):
        outbox.put(connection, "mail", depends_on=first)


def test_two_databases_are_not_mixed_up(outbox: Outbox) -> None:
    """A key of another queue is another job."""
    put(outbox, "bills", key="k")
    with outbox.begin() as connection, pytest.raises(UnknownDependency) as caught:
        outbox.put(connection, "mail", depends_on=("mail", "k"))
    assert caught.value.depends_on == ("mail", "k")
    assert "queue 'mail' with the key 'k'" in str(caught.value)


def test_health_says_who_waits_for_a_dead_one(outbox: Outbox, claimant: Claimant) -> None:
    first = in_status(outbox, claimant, "dead")
    put(outbox, "bills", depends_on=first)
    assert outbox.health().waiting_on_dead == 1
    assert outbox.cancel(first.id)
    assert outbox.health().waiting_on_dead == 1
