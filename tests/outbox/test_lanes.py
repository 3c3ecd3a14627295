"""Lanes: one job of a lane at a time, in the order of ids, and what holds a lane and what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kestrelpy.outbox import Job, Outbox, claims
from kestrelpy.testing import ManualClock
from tests.outbox.claimant import Claimant
from tests.outbox.test_puts import put, row_of


def put_lane(outbox: Outbox, count: int, **options: Any) -> list[Job]:
    with outbox.begin() as connection:
        return outbox.put_many(connection, "mail", list(range(count)), lane="l", **options)


def test_one_at_a_time_in_order(outbox: Outbox, claimant: Claimant) -> None:
    jobs = put_lane(outbox, 5)
    for job in jobs:
        (claimed,) = claimant.claim()
        assert claimed.id == job.id
        assert claimant.ids() == []
        claimant.done(claimed)


def test_a_lane_is_of_one_queue(outbox: Outbox, claimant: Claimant) -> None:
    first, second = put_lane(outbox, 2)
    other, free = put(outbox, "bills", lane="l"), put(outbox, "mail")
    third = put(outbox, "mail", lane="m")
    assert set(claimant.ids("mail", "bills")) == {first.id, other.id, free.id, third.id}
    assert outbox.get(second.id).status == "ready"


def test_the_order_of_ids_beats_priority_and_due_time(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    first = put(outbox, "mail", lane="l", priority=9)
    second = put(outbox, "mail", lane="l", priority=-9)
    other = put(outbox, "mail", priority=10)
    clock.advance(1)
    assert claimant.ids(jobs=1) == [first.id]
    assert claimant.ids() == [other.id]
    claimant.sweep()
    assert claimant.ids() == []
    assert outbox.get(second.id).status == "ready"


def test_what_is_held_takes_no_room_of_a_claim(outbox: Outbox, claimant: Claimant) -> None:
    first = put_lane(outbox, 30)[0]
    free = [put(outbox, "mail").id for _ in range(3)]
    assert claimant.ids(jobs=3) == [first.id, *free[:2]]
    assert claimant.ids(jobs=3) == free[2:]


def test_a_claim_says_what_it_has_held(outbox: Outbox, claimant: Claimant) -> None:
    first, second, third = put_lane(outbox, 3)
    urgent = put(outbox, "mail", lane="l", priority=-1)
    rows, _ = claimant.rows()
    assert [row[0] for row in claims.claimed_among(rows)] == [first.id]
    assert {row[0] for row in rows} == {first.id, second.id, third.id, urgent.id}
    assert claims.lanes_of(rows) == [("mail", "l")]
    assert claims.lanes_of(rows)
    assert [row_of(outbox, job)["held"] for job in (first, second, third, urgent)] == [False, True, True, True]
    assert outbox.get(second.id).tries == 0
    rows, _ = claimant.rows()
    assert rows == []


@pytest.mark.parametrize("end", ["done", "deleted", "dead", "given back later"])
def test_the_next_one_goes_on_when_the_first_has_left(outbox: Outbox, claimant: Claimant, end: str) -> None:
    first, second = put_lane(outbox, 2)
    (claimed,) = claimant.claim()
    {
        "done": lambda: claimant.done(claimed),
        "deleted": lambda: claimant.done(claimed, delete=True),
        "dead": lambda: claimant.fail(claimed, is_dead=True),
        "given back later": lambda: claimant.give_back(claimed, seconds=60),
    }[end]()
    assert claimant.ids() == [second.id]
    if end != "deleted":
        assert outbox.get(first.id).status == ("ready" if end == "given back later" else end)


def test_one_that_is_given_back_is_first_again(outbox: Outbox, claimant: Claimant) -> None:
    first, second = put_lane(outbox, 2)
    claimant.give_back(*claimant.claim())
    (claimed,) = claimant.claim()
    assert claimed.id == first.id
    claimant.done(claimed)
    assert claimant.ids() == [second.id]


def test_one_in_error_holds_its_lane_while_it_backs_off(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    first, second = put_lane(outbox, 2)
    claimant.fail(*claimant.claim(), seconds=10)
    assert claimant.ids() == []
    claimant.sweep()
    assert claimant.ids() == []
    clock.advance(10)
    claimant.sweep()
    assert claimant.ids() == []
    (again,) = claimant.claim(status="error")
    assert again.id == first.id
    claimant.sweep()
    assert claimant.ids() == []
    claimant.done(again)
    assert claimant.ids() == [second.id]


def test_a_lapse_holds_its_lane_as_an_error_does(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    first, second = put_lane(outbox, 2)
    claimant.claim()
    clock.advance(30)
    assert claimant.ids() == []
    claimant.lapse(seconds=0)
    claimant.sweep()
    assert claimant.ids() == []
    assert claimant.ids(status="error") == [first.id]
    clock.advance(30)
    claimant.lapse(is_dead=True)
    claimant.sweep()
    assert claimant.ids() == [second.id]


def test_one_that_is_cancelled_does_not_hold_it(outbox: Outbox, claimant: Claimant) -> None:
    first, second, third = put_lane(outbox, 3)
    claimant.fail(*claimant.claim(), seconds=60)
    assert claimant.ids() == []
    assert outbox.cancel(second.id)
    assert claimant.ids() == []
    assert outbox.cancel(first.id)
    assert claimant.ids() == [third.id]
    assert outbox.get(second.id).status == "cancelled"


def test_nor_one_that_waits(outbox: Outbox, claimant: Claimant) -> None:
    other = put(outbox, "bills")
    waiting = put(outbox, "mail", lane="l", depends_on=other)
    second, third = put_lane(outbox, 2)
    (claimed,) = claimant.claim("mail")
    assert claimed.id == second.id
    claimant.done(*claimant.claim("bills"))
    assert claimant.ids("mail") == []  # it is ready now, but one at a time
    claimant.done(claimed)
    assert claimant.ids("mail") == [waiting.id]
    assert outbox.get(third.id).status == "ready"


def test_nor_one_for_the_future(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    future = put(outbox, "mail", lane="l", delay=10)
    second, third = put_lane(outbox, 2)
    (claimed,) = claimant.claim()
    assert claimed.id == second.id
    clock.advance(10)
    assert claimant.ids() == []
    claimant.done(claimed)
    (claimed,) = claimant.claim()
    assert claimed.id == future.id  # its id is the smallest of what is due
    claimant.done(claimed)
    assert claimant.ids() == [third.id]


def test_nor_one_that_is_replaced_into_the_future(outbox: Outbox, claimant: Claimant) -> None:
    first = put(outbox, "mail", lane="l", key="k")
    second = put(outbox, "mail", lane="l")
    claimant.fail(*claimant.claim(), seconds=0)
    assert claimant.ids() == []
    with outbox.begin() as connection:
        outbox.put(connection, "mail", key="k", if_exists="replace", delay=60)
    claimant.sweep()
    assert claimant.ids() == [second.id]
    assert outbox.get(first.id).status == "ready"


def test_the_retry_of_one_in_error_lets_the_lane_go_on_in_order(outbox: Outbox, claimant: Claimant) -> None:
    first, second = put_lane(outbox, 2)
    claimant.fail(*claimant.claim(), seconds=3600)
    assert claimant.ids() == []
    assert outbox.retry(first.id)
    (claimed,) = claimant.claim()
    assert claimed.id == first.id
    claimant.done(claimed)
    assert claimant.ids() == [second.id]


def test_one_that_is_made_ready_again_waits_for_its_turn(outbox: Outbox, claimant: Claimant) -> None:
    """It came first, and another one runs; and it came last, and another one is in error."""
    first, second = put_lane(outbox, 2)
    claimant.fail(*claimant.claim(), is_dead=True)
    (running,) = claimant.claim()
    assert running.id == second.id
    assert outbox.retry(first.id)
    assert claimant.ids() == []
    claimant.fail(running, seconds=0)
    claimant.sweep()
    assert claimant.ids() == []
    (again,) = claimant.claim(status="error")
    claimant.done(again)
    assert claimant.ids() == [first.id]


def test_one_by_hand_waits_for_no_turn_but_runs_alone(outbox: Outbox, claimant: Claimant) -> None:
    """``retry_one`` of a dead job whose lane is busy finds nothing to run, and no error."""
    seen: list[Any] = []
    outbox.add_consumer("mail", seen.append)
    first, second = put_lane(outbox, 2)
    claimant.fail(*claimant.claim(), is_dead=True)
    (running,) = claimant.claim()
    assert running.id == second.id
    assert outbox.retry_one("mail") is None
    assert outbox.get(first.id).status == "dead"
    assert seen == []
    claimant.done(running)
    done = outbox.retry_one("mail")
    assert done is not None
    assert (done.id, done.status, seen) == (first.id, "done", [0])


def test_two_in_error_run_one_at_a_time(outbox: Outbox, claimant: Claimant, clock: ManualClock) -> None:
    """The second one failed while the first one was put for the future, say."""
    first = put(outbox, "mail", lane="l", delay=1)
    second = put(outbox, "mail", lane="l")
    claimant.fail(*claimant.claim(), seconds=5)
    with outbox.begin() as connection:  # what a careless repair in SQL would leave
        connection.exec_driver_sql(f"UPDATE kestrel_jobs SET status = 'error', due_ms = 0 WHERE id = {first.id}")
    clock.advance(10)
    (claimed,) = claimant.claim(status="error")
    assert claimed.id == first.id
    assert claimant.ids(status="error") == []
    claimant.done(claimed)
    assert claimant.ids(status="error") == [second.id]


@pytest.mark.parametrize("count", [1, 7])
def test_all_lanes_come_to_their_end(outbox: Outbox, claimant: Claimant, count: int) -> None:
    with outbox.begin() as connection:
        for number in range(60):
            outbox.put(connection, "mail", number, lane=f"l{number % 7}", priority=number % 3)
    order: dict[str, list[int]] = {}
    while found := claimant.claim(jobs=count):
        lanes = [each.row["lane"] for each in found]
        assert len(set(lanes)) == len(lanes)
        for each in found:
            order.setdefault(each.row["lane"], []).append(each.id)
        claimant.done(*found)
    assert sum(map(len, order.values())) == 60
    assert all(ids == sorted(ids) for ids in order.values())


def test_the_sweep_frees_a_lane_whose_process_died_before_it_did(outbox: Outbox, claimant: Claimant) -> None:
    _, second = put_lane(outbox, 2)
    (claimed,) = claimant.claim()
    store = outbox.core.open_store()
    store.perform(None, claims.mark_done, [claimed.own])  # and then the process is gone
    assert claimant.ids() == []
    claimant.sweep()
    assert claimant.ids() == [second.id]


def test_the_sweep_frees_nothing_that_has_to_wait(
    make_outbox: Callable[..., Outbox], outbox: Outbox, claimant: Claimant
) -> None:
    put_lane(outbox, 3)
    (claimed,) = claimant.claim()
    claimant.sweep()
    assert claimant.rows()[0] == []
    claimant.done(claimed)
    assert len(claimant.ids()) == 1


def test_free_lanes_says_which_queues_go_on(outbox: Outbox, claimant: Claimant) -> None:
    put_lane(outbox, 2)
    (claimed,) = claimant.claim()
    store = outbox.core.open_store()
    assert store.perform(None, claims.free_lanes, [("mail", "l")]) == []
    store.perform(None, claims.mark_done, [claimed.own])
    assert store.perform(None, claims.free_lanes, [("bills", "l"), ("mail", "x")]) == []
    assert store.perform(None, claims.free_lanes, [("mail", "l")]) == ["mail"]
    assert store.perform(None, claims.free_lanes, [("mail", "l")]) == []
    assert claimant.sweep() == []
