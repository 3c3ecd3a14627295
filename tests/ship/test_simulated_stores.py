"""The simulated store goes wrong as it is told, and in no other way."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kestrelpy.ship import Listed, Store, StoreTooWeak, StoreUnavailable
from kestrelpy.ship.checking import probe
from kestrelpy.testing import ManualClock
from kestrelpy.testing.stores import Fault, MemoryStore, Request, SimulatedStore, check_store

KEY = "jobs/log/1"


def answer(request: Callable[[], object]) -> object:
    """What a request returns, or ``"lost"``."""
    try:
        return request()
    except StoreUnavailable:
        return "lost"


def store_with(fault: Fault) -> SimulatedStore:
    store = SimulatedStore()
    store.before_request = lambda _: fault
    return store


@pytest.mark.parametrize("make", [MemoryStore, lambda: SimulatedStore().client("one")])
def test_they_are_stores(make: Callable[[], Store]) -> None:
    one = make()
    check_store(lambda: one)


def test_two_stores_are_not_one() -> None:
    with pytest.raises(AssertionError, match="does not see"):
        check_store(MemoryStore)


@pytest.mark.parametrize(
    ("fault", "told", "told_again", "is_there"),
    [
        (Fault.NONE, True, False, True),
        (Fault.LOST_BEFORE, "lost", "lost", False),
        (Fault.LOST_AFTER, "lost", "lost", True),
        (Fault.TWICE, False, False, True),
        (Fault.LATE, "lost", "lost", False),
    ],
)
def test_a_create(fault: Fault, told: object, told_again: object, is_there: bool) -> None:
    store = store_with(fault)
    client = store.client("owner")
    assert answer(lambda: client.create(KEY, b"first")) == told
    assert answer(lambda: client.create(KEY, b"second")) == told_again
    assert store.objects.read(KEY) == (b"first" if is_there else None)


def test_a_late_create_lands_unless_another_was_first() -> None:
    store = store_with(Fault.LATE)
    late, other = store.client("late"), store.client("other")
    store.late_seconds = 3600
    for key in ("jobs/a", "jobs/b"):
        assert answer(lambda: late.create(key, b"late")) == "lost"  # noqa: B023 - called at once
    store.before_request = lambda _: Fault.NONE
    assert other.create("jobs/b", b"other")
    store.clock.advance(3599)
    assert other.read("jobs/a") is None
    store.clock.advance(1)
    assert other.read("jobs/a") == b"late"
    assert other.read("jobs/b") == b"other"


@pytest.mark.parametrize("fault", list(Fault))
def test_a_delete(fault: Fault) -> None:
    store = store_with(fault)
    store.create_now(KEY, b"data")
    told = answer(lambda: store.client("owner").delete([KEY, "jobs/missing"]))
    assert told == (None if fault in (Fault.NONE, Fault.TWICE) else "lost")
    assert (store.objects.read(KEY) is None) == (fault not in (Fault.LOST_BEFORE, Fault.LATE))
    store.clock.advance(60)
    assert (store.objects.read(KEY) is None) == (fault is not Fault.LOST_BEFORE)


@pytest.mark.parametrize("fault", list(Fault))
def test_reads_and_listings_change_nothing(fault: Fault) -> None:
    store = store_with(fault)
    store.create_now(KEY, b"data")
    before = store.objects.contents()
    client = store.client("reader")
    is_told = fault in (Fault.NONE, Fault.TWICE)
    assert answer(lambda: client.read(KEY, 1, 2)) == (b"at" if is_told else "lost")
    assert answer(lambda: client.list("jobs/")) == ([Listed(KEY, 4, before[KEY][1])] if is_told else "lost")
    store.clock.advance(3600)
    assert store.objects.contents() == before


def test_each_client_has_a_lag_of_its_own() -> None:
    store = SimulatedStore()
    one, other = store.client("one"), store.client("other")
    other.list_lag = 2
    for number in range(4):
        assert one.create(f"jobs/{number}", b"x")
    assert [each.key for each in one.list("jobs/")] == ["jobs/0", "jobs/1", "jobs/2", "jobs/3"]
    assert [each.key for each in other.list("jobs/")] == ["jobs/0", "jobs/1"]
    assert other.read("jobs/3") == b"x"
    one.delete(["jobs/0"])
    assert [each.key for each in other.list("jobs/")] == ["jobs/0", "jobs/1", "jobs/2"]
    other.list_lag = 100
    assert other.list("jobs/") == []


def test_a_store_that_is_away_does_nothing() -> None:
    store = SimulatedStore()
    client = store.client("owner")
    store.is_away = True
    assert answer(lambda: client.create(KEY, b"data")) == "lost"
    store.is_away = False
    assert client.read(KEY) is None


def test_a_store_is_put_back() -> None:
    store = SimulatedStore()
    client = store.client("owner")
    client.create("jobs/1", b"1")
    backup = store.objects.contents()
    client.create("jobs/2", b"2")
    store.put_back(backup)
    assert [each.key for each in client.list("")] == ["jobs/1"]
    assert client.create("jobs/2", b"another")


def test_dates_are_of_the_store_s_clock() -> None:
    store = SimulatedStore(clock=ManualClock(5_000))
    client = store.client("owner")
    client.create("jobs/1", b"1")
    store.clock.advance(2)
    client.create("jobs/2", b"2")
    assert [each.modified_ms for each in client.list("")] == [5_000, 7_000]


def test_a_simulated_store_that_ignores_conditions_is_found_out() -> None:
    with pytest.raises(StoreTooWeak):
        probe(SimulatedStore(ignores_conditions=True).client("owner"))


def test_requests_are_shown_before_they_are_sent() -> None:
    store, seen = SimulatedStore(), list[Request]()

    def note(request: Request) -> Fault:
        seen.append(request)
        return Fault.NONE

    store.before_request = note
    client = store.client("owner")
    client.create(KEY, b"data")
    client.read(KEY)
    client.list("jobs/")
    client.delete([KEY])
    assert seen == [
        Request("owner", *each) for each in (("create", KEY), ("read", KEY), ("list", "jobs/"), ("delete", KEY))
    ]
    assert store.requests == 4
