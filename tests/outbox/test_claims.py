"""Claims, leases, outcomes and the sweep: what a running outbox does, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy

from kestrelpy.outbox import Outbox, claims
from kestrelpy.outbox.sql import MAX_CLAIM
from kestrelpy.testing import ManualClock
from tests.outbox.claimant import Claimant
from tests.outbox.test_puts import in_status, put, row_of
from tests.support.queues import START_MS

MakeOutbox = Callable[..., Outbox]
LEASE_MS = 30_000


def put_each(outbox: Outbox, *options: dict[str, Any], queue: str = "mail") -> list[int]:
    with outbox.begin() as connection:
        return [outbox.put(connection, queue, **each).id for each in options]


# -- what is claimed -------------------------------------------------------------------------------------------------


def test_a_claim_is_noted_in_the_row(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    job = put(outbox, "mail", 1, delay=1)
    clock.advance(3)
    (claimed,) = claimant.claim()
    row = row_of(outbox, job)
    noted = {name: row[name] for name in ("status", "tries", "worker", "token", "started_ms", "due_ms", "was_due_ms")}
    assert noted == {
        "status": "running",
        "tries": 1,
        "worker": "tests",
        "token": claimed.token,
        "started_ms": START_MS + 3000,
        "due_ms": START_MS + 3000 + LEASE_MS,
        "was_due_ms": START_MS + 1000,
    }
    assert claimed.row["tries"] == 1
    assert claimed.row["was_due_ms"] == START_MS + 1000
    assert claimed.row["payload_bytes"] == 1
    found = outbox.get(job.id)
    assert (found.status, found.worker, found.due_ms) == ("running", "tests", START_MS + 3000 + LEASE_MS)


def test_the_most_urgent_first(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    """Smaller priorities, then what was due earlier, then what was put earlier."""
    ids = put_each(
        outbox,
        {"priority": 5},
        {"priority": 0, "delay": 2},
        {"priority": 0, "delay": 1},
        {"priority": 0, "delay": 1},
        {"priority": -5, "delay": 3},
        {"priority": 5, "delay": 1},
        {"priority": -(1 << 31)},
        {"priority": (1 << 31) - 1},
    )
    order = [ids[at] for at in (6, 4, 2, 3, 1, 0, 5, 7)]
    clock.advance(3)
    assert claimant.ids(jobs=3) == order[:3]
    assert claimant.ids(jobs=100) == order[3:]


def test_the_most_urgent_of_several_queues(outbox: Outbox, claimant: Claimant) -> None:
    with outbox.begin() as connection:
        bills = [outbox.put(connection, "bills", n, priority=n).id for n in (0, 2, 4)]
        mails = [outbox.put(connection, "mail", n, priority=n).id for n in (1, 3, 5)]
    assert claimant.ids("mail", "bills", jobs=4) == [bills[0], mails[0], bills[1], mails[1]]


@pytest.mark.parametrize("status", ["ready", "error"])
def test_no_queue_hides_another_one(outbox: Outbox, claimant: Claimant, clock: ManualClock, status: str) -> None:
    """However many jobs the first ones have."""
    names = ["a", "b", "c", "d"]
    for name in names:
        outbox.queue(name)
    with outbox.begin() as connection:
        for name in names[:3]:
            outbox.put_many(connection, name, [1] * 600, priority=5, delay=1)
        urgent = outbox.put(connection, "d", priority=-1)
    clock.advance(1)
    if status == "error":
        claimant.fail(*claimant.claim("d"), seconds=0)
        for name in names[:3]:
            claimant.fail(*claimant.claim(name, jobs=1000), seconds=0.001)
        clock.advance(1)
    found = claimant.ids(*names, jobs=500, status=status)
    assert (len(found), found[0]) == (500, urgent.id)


@pytest.mark.parametrize("status", ["ready", "error"])
def test_no_more_than_asked_for(outbox: Outbox, claimant: Claimant, status: str) -> None:
    with outbox.begin() as connection:
        for number in range(5):
            outbox.put_many(connection, "mail", list(range(20)), priority=number)
            outbox.put_many(connection, "bills", list(range(20)), priority=number)
    if status == "error":
        claimant.fail(*claimant.claim("mail", "bills", jobs=200), seconds=0)
    seen: set[int] = set()
    for jobs in (0, 1, 7, 3, 50):
        found = claimant.ids("mail", "bills", jobs=jobs, status=status)
        assert len(found) == jobs
        seen.update(found)
    assert len(seen) == 61


@pytest.mark.parametrize("status", ["ready", "error"])
def test_no_more_of_a_queue_than_it_may_have(outbox: Outbox, claimant: Claimant, status: str) -> None:
    with outbox.begin() as connection:
        outbox.put_many(connection, "mail", list(range(9)), priority=-1)
        outbox.put_many(connection, "mail", list(range(9)), priority=1)
        outbox.put_many(connection, "bills", list(range(9)))
    if status == "error":
        claimant.fail(*claimant.claim("mail", "bills"), seconds=0)
    found = claimant.claim("mail", "bills", most=4, status=status)
    assert sorted(each.row["queue"] for each in found) == ["bills"] * 4 + ["mail"] * 4


def test_a_thousand_at_most(outbox: Outbox, claimant: Claimant) -> None:
    with outbox.begin() as connection:
        outbox.put_many(connection, "mail", [1] * (MAX_CLAIM + 5))
    rows, _ = claimant.rows(jobs=5000, most=5000)
    assert len(rows) == MAX_CLAIM


def test_no_more_bytes_than_asked_for(outbox: Outbox, claimant: Claimant) -> None:
    """But always one, however large it is. What would not fit is left for the next claim, and nothing is skipped."""
    with outbox.begin() as connection:
        ids = [job.id for job in outbox.put_many(connection, "mail", ["x" * 98] * 5)]
        ids.append(outbox.put(connection, "mail", "y" * 998).id)
        ids.append(outbox.put(connection, "mail", "z").id)
    assert claimant.ids(max_bytes=250) == ids[:3]
    assert claimant.ids(max_bytes=100) == ids[3:4]
    assert claimant.ids(max_bytes=101) == ids[4:6]
    assert claimant.ids(max_bytes=1) == ids[6:]


def test_only_of_the_queues_that_are_asked_for(outbox: Outbox, claimant: Claimant) -> None:
    put(outbox, "bills")
    assert claimant.ids("mail") == []
    assert claimant.ids("mail", "nobody", "bills") != []


def test_nothing_is_claimed_before_it_is_due(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    ids = put_each(outbox, {"delay": 10}, {"at_ms": START_MS + 5000}, {})
    assert claimant.ids() == ids[2:]
    clock.advance(4.999)
    assert claimant.ids() == []
    clock.advance(0.001)
    assert claimant.ids() == ids[1:2]
    clock.advance(5)
    assert claimant.ids() == ids[:1]


def test_the_future_of_one_priority_hides_no_other(outbox: Outbox, claimant: Claimant) -> None:
    with outbox.begin() as connection:
        outbox.put_many(connection, "mail", list(range(50)), priority=-1, delay=60)
        outbox.put_many(connection, "mail", list(range(50)), priority=0, delay=60)
        last = outbox.put(connection, "mail", priority=1)
    assert claimant.ids(jobs=1) == [last.id]


def test_what_commits_late_is_not_skipped(postgres_url: str, clock: ManualClock) -> None:
    """Ids are given out before their transactions commit."""
    with Outbox(postgres_url, clock=clock) as outbox:
        outbox.create_tables()
        outbox.queue("mail")
        claimant = Claimant(outbox)
        with outbox.begin() as connection:
            slow = outbox.put(connection, "mail")
            quick = put(outbox)
            assert claimant.ids() == [quick.id]
        assert slow.id < quick.id
        assert claimant.ids() == [slow.id]


@pytest.mark.parametrize("status", ["waiting", "running", "error", "done", "dead", "cancelled"])
def test_only_what_is_ready(outbox: Outbox, claimant: Claimant, status: str) -> None:
    in_status(outbox, claimant, status)
    assert claimant.ids() == []


def test_nothing_of_a_paused_queue(outbox: Outbox, claimant: Claimant) -> None:
    first, second = put(outbox, "mail"), put(outbox, "bills")
    (failing,) = claimant.claim("mail")
    claimant.fail(failing, seconds=0)
    put(outbox, "mail")
    outbox.pause("mail")
    outbox.pause("mail")
    assert claimant.ids("mail", "bills") == [second.id]
    assert claimant.ids("mail", status="error") == []
    outbox.resume("mail")
    assert claimant.ids("mail", status="error") == [first.id]
    assert len(claimant.ids("mail")) == 1
    outbox.resume("bills")


def test_a_job_of_a_queue_nobody_has_declared_is_left_alone(make_outbox: MakeOutbox) -> None:
    outbox, other = make_outbox(), make_outbox()
    outbox.queue("elsewhere")
    job = put(outbox, "elsewhere")
    claimant = Claimant(other)
    claimant.sweep()
    assert claimant.lapse("mail") == set()
    assert outbox.get(job.id) == job


# -- retries ---------------------------------------------------------------------------------------------------------


def test_failed_jobs_come_again_earliest_first(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    ids = put_each(outbox, {"priority": 0}, {"priority": 2}, {"priority": 1})
    for claimed in claimant.claim():
        claimant.fail(claimed, seconds={ids[0]: 7, ids[1]: 3, ids[2]: 5}[claimed.id])
    clock.advance(2.999)
    assert claimant.ids(status="error") == []
    clock.advance(10)
    assert claimant.ids(status="error", jobs=2) == [ids[1], ids[2]]
    assert claimant.ids(status="ready") == []
    assert claimant.ids(status="error") == [ids[0]]


def test_a_failure_is_noted(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    job = put(outbox)
    clock.advance(1)
    (claimed,) = claimant.claim()
    clock.advance(1)
    assert claimant.fail(claimed, seconds=1.5, error="Boom ü") == {job.id}
    found = outbox.get(job.id)
    assert (found.status, found.error, found.tries) == ("error", "Boom ü", 1)
    assert (found.first_error_ms, found.due_ms) == (START_MS + 2000, START_MS + 3500)
    assert (found.started_ms, found.finished_ms) == (START_MS + 1000, None)
    clock.advance(2)
    (again,) = claimant.claim(status="error")
    assert again.row["tries"] == 2
    clock.advance(1)
    claimant.fail(again, is_dead=True, error="worn out")
    found = outbox.get(job.id)
    assert (found.status, found.error, found.tries) == ("dead", "worn out", 2)
    assert (found.first_error_ms, found.finished_ms) == (START_MS + 2000, START_MS + 5000)
    assert row_of(outbox, job)["token"] is None


def test_done_is_noted(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    job = put(outbox, delay=1)
    clock.advance(2)
    claimant.fail(*claimant.claim(), seconds=0)
    (claimed,) = claimant.claim(status="error")
    clock.advance(1)
    assert claimant.done(claimed) == {job.id}
    found = outbox.get(job.id)
    assert (found.status, found.error, found.tries, found.finished_ms) == ("done", None, 2, START_MS + 3000)
    assert found.due_ms == START_MS + 2000  # of the retry
    assert found.first_error_ms == START_MS + 2000
    assert row_of(outbox, job)["was_due_ms"] is None


def test_done_and_deleted(outbox: Outbox, claimant: Claimant) -> None:
    jobs = put_each(outbox, {}, {}, {})
    first, second, third = claimant.claim()
    assert claimant.done(first, second, delete=True) == set(jobs[:2])
    assert [job.id for job in outbox.jobs()] == jobs[2:]
    assert claimant.done(third, delete=True) == {third.id}


def test_all_kinds_of_outcomes_in_one_transaction(outbox: Outbox, claimant: Claimant) -> None:
    ids = put_each(outbox, *[{}] * 6)
    jobs = claimant.claim()
    what = claims.Finish()
    what.done.append(jobs[0].own)
    what.deleted.append(jobs[1].own)
    what.failed += [(*jobs[2].own, "error", 500, "e"), (*jobs[3].own, "dead", 0, "d")]
    what.returned += [(*jobs[4].own, None), (*jobs[5].own, 700)]
    saved, freed = outbox.core.open_store().perform(None, claims.finish, what)
    assert saved == set(ids)
    assert freed == []
    assert [job.status for job in outbox.jobs()] == ["done", "error", "dead", "ready", "ready"]
    assert [job.due_ms - START_MS for job in outbox.jobs()] == [0, 500, 0, 0, 700]


# -- given back ------------------------------------------------------------------------------------------------------


def test_what_is_given_back_was_not_tried(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    job = put(outbox, delay=1)
    clock.advance(5)
    (claimed,) = claimant.claim()
    assert claimant.give_back(claimed) == {job.id}
    found = outbox.get(job.id)
    assert (found.status, found.tries, found.due_ms) == ("ready", 0, START_MS + 1000)
    (claimed,) = claimant.claim()
    claimant.give_back(claimed, seconds=60)
    found = outbox.get(job.id)
    assert (found.status, found.tries, found.due_ms) == ("ready", 0, START_MS + 65_000)
    assert claimant.ids() == []


def test_a_retry_that_is_given_back_stays_one(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    job = put(outbox)
    claimant.fail(*claimant.claim(), seconds=1)
    clock.advance(3)
    claimant.give_back(*claimant.claim(status="error"))
    found = outbox.get(job.id)
    assert (found.status, found.tries, found.due_ms, found.error) == ("error", 1, START_MS + 1000, "Boom")
    assert claimant.ids(status="error") == [job.id]


# -- tokens and leases -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", ["done", "deleted", "error", "dead", "back", "renew"])
@pytest.mark.parametrize("meanwhile", ["lapsed", "claimed again", "given back", "done"])
def test_a_late_outcome_is_refused(
    outbox: Outbox, claimant: Claimant, clock: ManualClock, late: str, meanwhile: str
) -> None:
    job = put(outbox)
    (first,) = claimant.claim()
    if meanwhile == "given back":
        claimant.give_back(first)
    elif meanwhile == "done":
        claimant.done(first)
    else:
        clock.advance(31)
        assert claimant.lapse(seconds=0) == {job.id}
    other = Claimant(outbox, "another")
    again = other.claim(status="error") if meanwhile == "claimed again" else []
    before = row_of(outbox, job)
    refused = {
        "done": lambda: claimant.done(first),
        "deleted": lambda: claimant.done(first, delete=True),
        "error": lambda: claimant.fail(first),
        "dead": lambda: claimant.fail(first, is_dead=True),
        "back": lambda: claimant.give_back(first),
        "renew": lambda: claimant.renew(first),
    }[late]()
    assert refused == set()
    assert row_of(outbox, job) == before
    if again:
        assert other.done(*again) == {job.id}


def test_a_batch_of_which_some_are_late(outbox: Outbox, claimant: Claimant) -> None:
    jobs = put_each(outbox, {}, {}, {})
    first, second, third = claimant.claim()
    claimant.give_back(second)
    assert claimant.done(first, second, third) == {jobs[0], jobs[2]}
    assert [job.status for job in outbox.jobs()] == ["done", "ready", "done"]


def test_a_lease_that_is_over_is_a_failure(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    job = put(outbox)
    claimant.claim()
    clock.advance(29.999)
    assert claimant.lapse() == set()
    clock.advance(0.001)
    assert claimant.lapse("bills") == set()
    assert claimant.lapse(seconds=5) == {job.id}
    found = outbox.get(job.id)
    assert (found.status, found.tries, found.error, found.due_ms) == (
        "error",
        1,
        "its lease was over",
        START_MS + 35_000,
    )
    assert claimant.lapse() == set()


def test_a_renewed_lease_lasts_longer(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    job = put(outbox)
    (claimed,) = claimant.claim()
    clock.advance(20)
    assert claimant.renew(claimed) == {job.id}
    assert outbox.get(job.id).due_ms == START_MS + 50_000
    clock.advance(20)
    assert claimant.lapse() == set()
    clock.advance(10)
    assert claimant.lapse() == {job.id}
    assert claimant.renew(claimed) == set()


def test_a_lease_that_is_renewed_at_the_last_moment(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    """After somebody has found it to be over, and before he notes the failure."""
    job = put(outbox)
    (claimed,) = claimant.claim()
    clock.advance(30)
    rows = outbox.core.open_store().perform(None, claims.lapsed, ["mail"])
    assert [row[0] for row in rows] == [job.id]
    assert claimant.renew(claimed) == {job.id}
    assert claimant.note_lapses(rows) == set()
    assert claimant.done(claimed) == {job.id}


def test_two_find_the_same_lapse(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    job = put(outbox)
    claimant.claim()
    clock.advance(30)
    rows = outbox.core.open_store().perform(None, claims.lapsed, ["mail"])
    assert claimant.note_lapses(rows, seconds=1) == {job.id}
    assert claimant.note_lapses(rows, seconds=99) == set()
    assert outbox.get(job.id).due_ms == START_MS + 31_000


def test_a_lapse_of_a_worn_out_job_is_its_death(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    job = put(outbox)
    claimant.claim()
    clock.advance(30)
    assert claimant.lapse(is_dead=True) == {job.id}
    assert outbox.get(job.id).status == "dead"


def test_many_lapses_take_several_looks(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    with outbox.begin() as connection:
        outbox.put_many(connection, "mail", [1] * 1200)
    while claimant.claim(jobs=1000):
        pass
    clock.advance(30)
    assert [len(claimant.lapse()) for _ in range(3)] == [1000, 200, 0]


# -- what is due next ------------------------------------------------------------------------------------------------


def test_what_is_due_next(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    def next_due(*queues: str) -> Any:
        return outbox.core.open_store().perform(None, claims.next_due_ms, queues or ("mail", "bills"))

    assert next_due() == (START_MS, None, None)
    put_each(outbox, {"delay": 9, "priority": -1}, {"delay": 7}, {"delay": 8, "priority": 1})
    assert next_due() == (START_MS, START_MS + 7000, None)
    put(outbox, "bills")
    claimant.fail(*claimant.claim("bills"), seconds=3)
    assert next_due() == (START_MS, START_MS + 7000, START_MS + 3000)
    assert next_due("mail") == (START_MS, START_MS + 7000, None)
    assert next_due("bills") == (START_MS, None, START_MS + 3000)
    clock.advance(20)
    assert next_due() == (START_MS + 20_000, START_MS + 7000, START_MS + 3000)


def test_a_claim_sees_the_servers_time(make_outbox: MakeOutbox, engine: sqlalchemy.Engine) -> None:
    outbox = make_outbox(clock=None)
    claimant = Claimant(outbox)
    soon, later = put(outbox, delay=0), put(outbox, delay=3600)
    assert claimant.ids() == [soon.id]
    now, ready, _ = outbox.core.open_store().perform(None, claims.next_due_ms, ["mail"])
    assert ready == later.due_ms
    assert 0 <= now - soon.added_ms < 60_000
    assert 29_000 < outbox.get(soon.id).due_ms - now <= LEASE_MS
