"""Leases: how their owner keeps them, and what others see of them."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from kestrelpy import JournaledQueue, QueueClosed
from kestrelpy.clock import SystemClock
from kestrelpy.ship import (
    Fenced,
    HistoryMismatch,
    NotShipped,
    OwnerAlive,
    Ship,
    ShipError,
    Shipping,
    Standby,
    garbage,
    opened,
    options,
    restore,
    shipper,
    status,
)
from kestrelpy.ship.lease import LeaseWatch, OwnLease
from kestrelpy.ship.manifest import LogState
from kestrelpy.ship.slots import CLOSE, DATA, decode_slot
from kestrelpy.ship.takeover import Takeover
from kestrelpy.testing.stores import MemoryStore
from kestrelpy.work import WorkQueue
from tests.ship.in_store import items_of, log_of
from tests.ship.logs import Author, slots_of
from tests.support.patience import PATIENCE, until


class Seconds:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_what_counts_is_when_a_decided_slot_was_begun() -> None:
    clock = Seconds()
    mine = OwnLease(12.0, clock)
    clock.now += 3.0
    assert (mine.next_beat, mine.left) == (0.0, 5.0)
    mine.begin()
    clock.now += 4.0  # the answer takes so long
    mine.renew()
    assert (mine.next_beat, mine.left) == (-1.0, 4.0)
    mine.begin()
    clock.now += 4.0
    assert mine.left == 0.0  # begun, and not decided


def test_a_lease_is_over_when_the_end_was_seen_unchanged_for_so_long() -> None:
    clock, state = Seconds(), LogState()
    author = fenced(lease_ms=15_000)
    watch = LeaseWatch(clock)
    see_all(watch, state, author)
    clock.now += 14.0
    watch.see(state)
    assert watch.left == 1.0
    author.beat()
    see_all(watch, state, author)
    assert watch.left == 15.0
    clock.now += 16.0
    assert watch.left == 0.0


@pytest.mark.parametrize("slots", [0, 1])
def test_without_a_lease_nothing_is_ever_over(slots: int) -> None:
    clock, state = Seconds(), LogState()
    watch = LeaseWatch(clock)
    if slots:
        see_all(watch, state, fenced(lease_ms=0))
    else:
        watch.see(state)
    clock.now += 1e6
    assert watch.left is None


def fenced(lease_ms: int) -> Author:
    """The author of a log with one FENCE, that has this lease."""
    for seed in range(100):
        author = Author(seed)
        author.fence()
        if author.lease_ms == lease_ms:
            return author
    raise AssertionError(f"no author has a lease of {lease_ms} ms")


def see_all(watch: LeaseWatch, state: LogState, author: Author) -> None:
    for slot in slots_of(author.log)[state.slot :]:
        assert state.apply(slot) is None
    watch.see(state)


# -- a queue with a lease --------------------------------------------------------------------------------------------

LEASE = 0.4
"""Seconds; so short a lease is allowed here alone."""


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "LEAST_LEASE", 0.1)


class Held(MemoryStore):
    """A store that answers no request for a key with ``what`` in it while ``door`` is shut."""

    def __init__(self, what: str = "") -> None:
        super().__init__()
        self.what = what
        self.door = threading.Event()
        self.door.set()

    def create(self, key: str, data: bytes) -> bool:
        if self.what in key:
            self.door.wait(PATIENCE)
        return super().create(key, data)


@pytest.fixture
def held() -> Iterator[Held]:
    store = Held()
    yield store
    store.door.set()


def leased(folder: Path, store: MemoryStore, **more: Any) -> JournaledQueue:
    return JournaledQueue(folder, "jobs", ship=Ship(store, lease=LEASE, **more))


def copied(store: MemoryStore, folder: Path) -> Path:
    restore(store, "jobs", folder)
    return folder


def shipping_of(queue: JournaledQueue) -> Shipping:
    assert queue.shipping is not None
    return queue.shipping


def put_in_time(queue: JournaledQueue, data: bytes) -> None:
    """Put as soon as the lease lets us: the thread that renews so short a one may be late on a busy machine."""

    def is_put() -> bool:
        try:
            queue.put(data)
        except NotShipped as error:
            return error.first_id <= error.last_id
        return True

    until(is_put)


def test_an_idle_owner_renews_its_lease(tmp_path: Path) -> None:
    store = MemoryStore()
    with leased(tmp_path, store) as queue:
        shipping = shipping_of(queue)
        until(lambda: shipping.status().slot > 5)
        until(lambda: shipping.status().lease_left)  # its thread may be late
        left = shipping.status().lease_left
        assert left is not None
        assert 0 <= left <= LEASE * 2 / 3
        header = log_of(store).header
        assert header is not None
        assert (header.kind, header.length, header.lease_ms) == (DATA, 0, 400)
    found = status(store, "jobs")
    assert (found.lease, found.closed) == (LEASE, True)


def test_an_idle_owner_without_a_lease_appends_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    with JournaledQueue(tmp_path, "jobs", ship=Ship(store, interval=0)) as queue:
        shipping = shipping_of(queue)
        queue.put(b"x")
        last = shipping.flush(PATIENCE)
        threading.Event().wait(LEASE)
        assert shipping.status().slot == last
        assert shipping.status().lease_left is None


@pytest.mark.parametrize("acks", ["disk", "shipped"])
def test_puts_are_refused_before_the_lease_is_over_and_go_on_later(tmp_path: Path, held: Held, acks: Any) -> None:
    with leased(tmp_path, held, acks=acks, interval=0, ack_timeout=0.1) as queue:
        put_in_time(queue, b"one")
        shipping_of(queue).flush(PATIENCE)
        held.door.clear()

        def is_refused() -> bool:
            try:
                queue.put(b"while it is away")
            except NotShipped as error:
                return error.first_id > error.last_id
            return False

        until(is_refused)
        items, error = queue.stats().items, NotShipped.by_lease(7)
        assert (error.first_id, error.last_id) == (8, 7)
        with pytest.raises(NotShipped, match="nothing was put"):
            queue.put_many([b"two", b"three"])
        assert queue.stats().items == items
        assert shipping_of(queue).status().lease_left == 0
        assert queue.get(timeout=PATIENCE).data == b"one"  # readers go on
        held.door.set()

        def is_accepted() -> bool:
            with contextlib.suppress(NotShipped):
                queue.put(b"later")
                return True
            return False

        until(is_accepted)


def test_a_long_upload_does_not_cost_the_lease(tmp_path: Path) -> None:
    store = Held("/seg/")
    try:
        with leased(tmp_path, store, interval=0) as queue:
            store.door.clear()
            put_in_time(queue, b"x")
            shipping_of(queue).flush(PATIENCE)
            queue._journal.rotate()
            put_in_time(queue, b"y")
            at = shipping_of(queue).status().slot
            until(lambda: shipping_of(queue).status().slot > at + 5)
            put_in_time(queue, b"z")
            store.door.set()
            shipping_of(queue).flush(PATIENCE)
    finally:
        store.door.set()
    assert sorted(items_of(store).values()) == [b"x", b"y", b"z"]


def test_a_long_collection_does_not_cost_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dawdling(MemoryStore):
        def delete(self, keys: Iterable[str]) -> None:
            threading.Event().wait(LEASE / 3)
            super().delete(keys)

    monkeypatch.setattr(garbage, "MOST_KEYS", 1)
    store = Dawdling()
    with leased(tmp_path, store, interval=0) as queue:
        shipping = shipping_of(queue)
        at = shipping.status().slot
        forgotten = {f"jobs/in/{number:032x}.part": (b"", 0) for number in range(12)}
        store.replace_all(store.contents() | forgotten)
        assert shipping.collect(PATIENCE).bytes == 0
        assert not forgotten.keys() & store.contents().keys()
        assert shipping.status().slot - at >= len(forgotten) // 3
        queue.put(b"the lease is not over")


def test_an_opening_waits_for_a_lease_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened, "PATIENCE", 0.5)
    store = MemoryStore()
    with leased(tmp_path / "a", store, owner="the first one") as queue:
        put_in_time(queue, b"x")
        shipping_of(queue).flush(PATIENCE)
        keys = {key for key in store.contents() if "/log/" not in key}
        with pytest.raises(OwnerAlive, match="the first one") as raised:
            leased(copied(store, tmp_path / "b"), store)
        assert 0 < raised.value.seconds <= LEASE
        assert pickle.loads(pickle.dumps(raised.value)).owner == "the first one"
        assert {key for key in store.contents() if "/log/" not in key} == keys
        put_in_time(queue, b"y")
        shipping_of(queue).flush(PATIENCE)


def test_who_is_dead_is_fenced_when_the_lease_is_over(tmp_path: Path) -> None:
    store = MemoryStore()
    dead = leased(tmp_path / "a", store)
    put_in_time(dead, b"x")
    shipping_of(dead).flush(PATIENCE)
    assert dead._shipment is not None
    dead._shipment.release()  # it appends nothing more
    last = shipping_of(dead).status().slot
    copied(store, tmp_path / "b")
    began = SystemClock.elapsed()
    with leased(tmp_path / "b", store) as queue:
        assert SystemClock.elapsed() - began > LEASE * 0.9
        assert shipping_of(queue).status().taken_over
        assert shipping_of(queue).status().slot > last
        assert queue.get(timeout=0).data == b"x"
    with contextlib.suppress(Fenced, NotShipped):
        dead.close()
    with leased(tmp_path / "b", store) as queue:  # it was ours
        assert not shipping_of(queue).status().taken_over
    with pytest.raises(Fenced):
        leased(tmp_path / "a", store)


@pytest.mark.parametrize("hands_over", [False, True])
def test_who_has_closed_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hands_over: bool) -> None:
    monkeypatch.setattr(opened, "LOOK_SECONDS", PATIENCE)  # a wait would take so long
    store = MemoryStore()
    with JournaledQueue(tmp_path / "a", "jobs", ship=Ship(store, lease=60)) as queue:
        queue.put(b"x")
        if hands_over:
            shipping_of(queue).hand_over()
            with pytest.raises(QueueClosed):
                queue.put(b"y")
            with pytest.raises(QueueClosed, match="already"):
                shipping_of(queue).hand_over()
    last = decode_slot(store.contents()[f"jobs/log/{status(store, 'jobs').slot:016}"][0])
    assert last is not None
    assert (last.header.kind, last.note) == (CLOSE, bytes([hands_over]))
    with leased(copied(store, tmp_path / "b"), store) as queue:
        assert queue.get(timeout=0).data == b"x"


def test_what_is_not_in_the_store_is_not_handed_over(tmp_path: Path, held: Held) -> None:
    queue = leased(tmp_path, held)
    shipping = shipping_of(queue)

    def is_put() -> bool:
        held.door.clear()
        with contextlib.suppress(NotShipped):  # the lease was over: it is renewed
            queue.put(b"x")
            return True
        held.door.set()
        return False

    until(is_put)
    with pytest.raises(NotShipped):
        shipping.hand_over(timeout=0.1)
    held.door.set()
    with pytest.raises(QueueClosed):
        queue.put(b"y")
    with leased(tmp_path, held) as queue:
        assert queue.get(timeout=0).data == b"x"


def test_a_work_queue_is_handed_over(tmp_path: Path) -> None:
    store = MemoryStore()
    work = WorkQueue(tmp_path / "a", "jobs", ship=Ship(store, lease=60, acks="shipped", interval=0))
    work.put(b"a job")
    assert work.shipping is not None
    work.shipping.hand_over()
    with pytest.raises(QueueClosed):
        work.put(b"another one")
    elsewhere = WorkQueue(copied(store, tmp_path / "b"), "jobs", ship=Ship(store, lease=60))
    with elsewhere, elsewhere.session() as session:
        job = session.reserve(timeout=0)
        assert job is not None
        assert job.body == b"a job"


def test_a_standby_takes_the_queue_from_that_owner_alone(tmp_path: Path) -> None:
    store = MemoryStore()
    leased(tmp_path / "a", store).close()
    copied(store, tmp_path / "b")
    before = store.contents()
    with pytest.raises(Fenced) as raised:
        JournaledQueue(tmp_path / "b", "jobs", ship=cast(Ship, Takeover(Ship(store), 7)))
    assert raised.value.epoch == 1
    assert store.contents() == before
    with JournaledQueue(tmp_path / "b", "jobs", ship=cast(Ship, Takeover(Ship(store), 1))) as queue:
        assert shipping_of(queue).status().epoch == 2


def test_shipping_that_has_failed_ends_a_queue_with_a_lease(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipper, "RESTARTS", ())
    queue = leased(tmp_path, held, interval=0)
    monkeypatch.setattr(held, "create", lambda key, data: 1 / 0)
    until(lambda: shipping_of(queue).status().state == "failed")

    def is_refused() -> bool:
        try:
            queue.put(b"x")
        except ShipError:
            return True
        return False

    until(is_refused)  # the state is known a moment before
    with contextlib.suppress(ShipError):
        queue.close()


@pytest.mark.parametrize("lease", [0, 4.9, float("inf"), float("nan"), True, "15"])
def test_a_lease_that_is_none(monkeypatch: pytest.MonkeyPatch, lease: Any) -> None:
    monkeypatch.setattr(options, "LEAST_LEASE", 5.0)
    with pytest.raises((ValueError, TypeError), match="lease"):
        Ship("file:///folder", lease=lease)
    assert Ship("file:///folder", lease=5).lease_ms == 5000


@pytest.mark.parametrize("is_seen", [False, True])
def test_who_opens_the_queue_of_a_standby_need_not_wait_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_seen: bool
) -> None:
    """As ``kestrelpy standby --exec`` does it. What was seen of another end of the log does not count."""
    monkeypatch.setattr(opened, "PATIENCE", 0.0)
    store = MemoryStore()
    dead = leased(tmp_path / "a", store)
    put_in_time(dead, b"x")
    shipping_of(dead).flush(PATIENCE)
    with Standby(tmp_path / "b", "jobs", store, poll_interval=0.01) as standby:
        assert not standby.wait(LEASE)
        assert dead._shipment is not None
        dead._shipment.release()  # it appends nothing more
        assert standby.wait(PATIENCE)
    with contextlib.suppress(NotShipped, QueueClosed):
        dead.close()
    if not is_seen:
        with leased(tmp_path / "a", store) as alive:  # it was not dead
            put_in_time(alive, b"y")
    waits: list[float] = []
    monkeypatch.setattr(opened, "pause", waits.append)
    if is_seen:
        leased(tmp_path / "b", store).close()
        assert not waits
    else:
        with pytest.raises(HistoryMismatch):
            leased(tmp_path / "b", store)
