"""A queue that is shipped, as its user sees it: with its own thread, on stores that answer, that do not, and that have
another owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import pytest

from kestrelpy import (
    ForkedQueue,
    JournaledQueue,
    QueueClosed,
    QueueEmpty,
    QueueFull,
    ReaderConfig,
    UnsupportedFormat,
    open_reader,
)
from kestrelpy.ship import (
    Collected,
    Fenced,
    HistoryMismatch,
    NotShipped,
    Ship,
    ShipError,
    ShippingRequired,
    StoreDamaged,
    StoreTooWeak,
    StoreUnavailable,
    open_store,
    restore,
    verify,
)
from kestrelpy.ship.log import Opening, carry_out, open_log, read_end
from kestrelpy.ship.manifest import encode_manifest, manifest_key
from kestrelpy.ship.shipper import Shipper
from kestrelpy.ship.slots import CLOSE, slot_key
from kestrelpy.testing import ManualClock
from kestrelpy.testing.stores import Fault, MemoryStore, Request, SimulatedStore
from tests.ship.in_store import items_of, log_of, no_pause
from tests.ship.logs import resealed_slot
from tests.support.budget import takes_long
from tests.support.patience import PATIENCE, until

Acks = Literal["disk", "shipped"]
ACKS: tuple[Acks, ...] = ("disk", "shipped")


class Slow:
    """A ``Store`` of which a test opens and shuts the door. ``create`` waits before it."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.door = threading.Event()
        self.door.set()
        self.waiting = 0
        self.is_away = False
        self.trouble: BaseException | None = None
        self.once: list[BaseException] = []
        """Each of them is raised by one ``create``."""

    def describe(self) -> str:
        return "a slow store"

    def _pass(self, key: str) -> None:
        if self.trouble is not None:
            raise self.trouble
        if self.is_away:
            raise StoreUnavailable(self.describe(), key, "no answer in time")

    def create(self, key: str, data: bytes) -> bool:
        self._pass(key)
        if self.once:
            raise self.once.pop()
        self.waiting += 1
        self.door.wait(PATIENCE)
        self.waiting -= 1
        return self.store.create(key, data)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        self._pass(key)
        return self.store.read(key, start, length)

    def list(self, prefix: str) -> list:  # type: ignore[type-arg]
        self._pass(prefix)
        return self.store.list(prefix)

    def delete(self, keys) -> None:  # type: ignore[no-untyped-def]
        self._pass("")
        self.store.delete(keys)


@pytest.fixture
def slow() -> Iterator[Slow]:
    store = Slow()
    yield store
    store.door.set()


def fence(store: MemoryStore, queue_id: bytes) -> None:
    """Another owner takes the log."""
    opening = Opening(queue_id, os.urandom(16), "another", 0, 0)
    carry_out(open_log("jobs/", opening, lambda state: state.place.last_id + 1), store, no_pause)


# -- what is there ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("acks", ACKS)
def test_all_that_was_put_is_in_the_store(tmp_path: Path, acks: Acks) -> None:
    store = MemoryStore()
    with JournaledQueue(tmp_path, "jobs", segment_bytes=4096, ship=Ship(store, acks=acks, interval=0)) as queue:
        assert queue.shipping is not None
        put = {queue.put(b"%d" % number * 20): b"%d" % number * 20 for number in range(300)}
        batch = [b"one", b"", b"three"]
        put |= dict(zip(queue.put_many(batch), batch, strict=True))
        queue.shipping.flush(PATIENCE)
        assert items_of(store) == put
        status = queue.shipping.status()
        assert (status.state, status.shipped_id, status.unshipped_items) == ("shipping", 303, 0)
        assert status.segments > 1
        for _ in range(100):
            queue.commit(queue.get())
    state = log_of(store)
    assert state.header is not None
    assert state.header.kind == CLOSE
    assert state.checkpoints[""].head == 100
    assert items_of(store) == put


def test_the_log_goes_on_after_each_opening(tmp_path: Path) -> None:
    store = MemoryStore()
    put: dict[int, bytes] = {}
    for number in range(5):
        with JournaledQueue(tmp_path, "jobs", ship=Ship(store)) as queue:
            for data in (b"a%d" % number, b"b"):
                put[queue.put(data)] = data
    assert list(put) == list(range(1, 11))
    assert items_of(store) == put
    assert len(log_of(store).fences) == 5


def test_a_queue_that_is_there_already_is_shipped_from_its_first_segment(tmp_path: Path) -> None:
    store = MemoryStore()
    with JournaledQueue(tmp_path, "jobs", segment_bytes=4096) as queue:
        put = {queue.put(b"x" * 500): b"x" * 500 for _ in range(50)}
        queue.reader("audit", start="earliest")
    with JournaledQueue(tmp_path, "jobs", segment_bytes=4096, ship=Ship(store)) as queue:
        put[queue.put(b"new")] = b"new"
        assert queue.shipping is not None
        queue.shipping.flush(PATIENCE)
        assert items_of(store) == put
    assert log_of(store).checkpoints["audit"].head == 0


def test_readers_that_come_move_and_go(tmp_path: Path) -> None:
    store = MemoryStore()
    with JournaledQueue(tmp_path, "jobs", ship=Ship(store, interval=0)) as queue:
        queue.reader("one", start="earliest")
        queue.reader("two", start="earliest")
        for number in range(10):
            queue.put(b"%d" % number)
        one = queue.reader("one")
        items = [one.get() for _ in range(6)]
        for item in (items[0], items[1], items[4]):
            one.commit(item)
        one.abort(items[2])
        until(lambda: (state := log_of(store).checkpoints.get("one")) is not None and state.head == 2)
        until(lambda: log_of(store).checkpoints["one"].error_counts == ((3, 1),))
        assert log_of(store).checkpoints["one"].done == ((5, 5),)
        queue.drop_reader("two")
        until(lambda: set(log_of(store).checkpoints) == {"one"})


def test_a_reader_in_another_place_is_shipped_too(tmp_path: Path) -> None:
    store = MemoryStore()
    with JournaledQueue(tmp_path, "jobs", sync="always", ship=Ship(store, interval=0)) as queue:
        queue.put(b"1")
        queue.put(b"2")
        with contextlib.closing(open_reader(tmp_path, "jobs", "outside", create=True, start="earliest")) as outside:
            outside.commit(outside.get())
            outside.checkpoint()
            until(lambda: (state := log_of(store).checkpoints.get("outside")) is not None and state.head == 1)


def test_a_large_batch_goes_in_parts_and_one_that_fits_no_slot_as_a_segment(tmp_path: Path) -> None:
    store = MemoryStore()
    with JournaledQueue(tmp_path, "jobs", segment_bytes=128 << 20, ship=Ship(store, chunk_bytes=64 << 10)) as queue:
        assert queue.shipping is not None
        put = {queue.put(b"x" * 5000): b"x" * 5000 for _ in range(100)}
        big = os.urandom(1 << 20)
        put[queue.put(big)] = big
        queue.shipping.flush(PATIENCE)
        assert max(size for key, size, _ in store.list("jobs/log/")) < 1 << 21
        huge = bytes(61 << 20)
        put[queue.put(huge)] = huge
        put[queue.put(b"after")] = b"after"
        queue.shipping.flush(PATIENCE)
        assert max(size for key, size, _ in store.list("jobs/log/")) < 1 << 21
        assert items_of(store) == put


# -- acks="shipped" --------------------------------------------------------------------------------------------------


def test_a_put_returns_when_its_slot_is_there_and_readers_see_it_then(tmp_path: Path, slow: Slow) -> None:
    with JournaledQueue(tmp_path, "jobs", ship=Ship(slow, acks="shipped", interval=0)) as queue:
        queue.put(b"first")
        assert queue.get(timeout=PATIENCE).data == b"first"
        slow.door.clear()
        thread = threading.Thread(target=queue.put, args=(b"second",))
        future = queue.put_future(b"third")
        thread.start()
        until(lambda: slow.waiting)
        with pytest.raises(QueueEmpty):
            queue.get(block=False)
        assert not future.done()
        assert thread.is_alive()
        waiting = queue.get_future()
        slow.door.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert future.result(PATIENCE) in (2, 3)
        assert waiting.result(PATIENCE).data in (b"second", b"third")
        assert set(items_of(slow.store).values()) == {b"first", b"second", b"third"}


def test_a_put_that_waits_too_long_says_so_and_is_shipped_later(tmp_path: Path, slow: Slow) -> None:
    with JournaledQueue(tmp_path, "jobs", ship=Ship(slow, acks="shipped", interval=0, ack_timeout=0.05)) as queue:
        slow.door.clear()
        with pytest.raises(NotShipped) as raised:
            queue.put_many([b"1", b"2"])
        assert (raised.value.first_id, raised.value.last_id) == (1, 2)
        assert isinstance(raised.value, TimeoutError)
        assert isinstance(pickle.loads(pickle.dumps(raised.value)), NotShipped)
        with pytest.raises(QueueEmpty):
            queue.get(block=False)
        slow.door.set()
        assert queue.get(timeout=PATIENCE).data == b"1"
        assert queue.put_future(b"3").result(PATIENCE) == 3  # a put waits no longer than before
        queue._check()


def test_puts_from_many_threads_and_tasks(tmp_path: Path) -> None:
    store = MemoryStore()
    with JournaledQueue(tmp_path, "jobs", ship=Ship(store, acks="shipped", interval=0.01)) as queue:
        ids: list[int] = []
        missing: list[int] = []

        def put() -> None:
            for number in range(20):
                item_id = queue.put(b"%d" % number)
                missing.extend({item_id} - items_of(store).keys())
                ids.append(item_id)

        threads = [threading.Thread(target=put) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)

        async def tasks() -> list[int]:
            return await asyncio.gather(*(queue.aput(b"task") for _ in range(20)))

        ids += asyncio.run(tasks())
        assert not missing
        assert sorted(ids) == list(range(1, 181))
        assert sorted(items_of(store)) == sorted(ids)


def test_what_an_earlier_process_could_not_ship_is_seen_when_it_is_there(tmp_path: Path, slow: Slow) -> None:
    options = Ship(slow, acks="shipped", interval=0, ack_timeout=0.05, close_timeout=0.2)
    queue = JournaledQueue(tmp_path, "jobs", ship=options)
    queue.put_future(b"shipped").result(PATIENCE)
    slow.is_away = True
    with pytest.raises(NotShipped):
        queue.put(b"not yet")
    with pytest.raises(NotShipped):
        queue.close()
    slow.is_away = False
    calls: list[str] = []
    create = slow.create

    def after_the_fence(key: str, data: bytes) -> bool:
        calls.append(key)
        if len([key for key in calls if "/log/" in key or "/seg/" in key]) > 1:
            slow.door.clear()
        return create(key, data)

    slow.create = after_the_fence  # type: ignore[method-assign]
    with JournaledQueue(tmp_path, "jobs", ship=options) as again:
        until(lambda: slow.waiting)
        assert again.get(block=False).data == b"shipped"
        with pytest.raises(QueueEmpty):
            again.get(block=False)
        slow.create = create  # type: ignore[method-assign]
        slow.door.set()
        assert again.get(timeout=PATIENCE).data == b"not yet"


# -- a store that is away --------------------------------------------------------------------------------------------


def test_puts_go_on_while_the_store_is_away(tmp_path: Path, slow: Slow) -> None:
    with JournaledQueue(tmp_path, "jobs", ship=Ship(slow, interval=0)) as queue:
        assert queue.shipping is not None
        queue.put(b"1")
        queue.shipping.flush(PATIENCE)
        slow.is_away = True
        queue.put(b"2")
        until(lambda: queue.shipping is not None and queue.shipping.status().state == "away")
        assert queue.get().data == b"1"
        with pytest.raises(NotShipped):
            queue.shipping.flush(0.05)
        status = queue.shipping.status()
        assert (status.unshipped_items, status.unshipped_bytes) == (1, 1)
        assert "no answer in time" in status.last_error
        assert status.failures > 0
        slow.is_away = False
        queue.shipping.flush(PATIENCE)
        assert queue.shipping.status().state == "shipping"
        assert items_of(slow.store) == {1: b"1", 2: b"2"}


def test_no_segment_is_retired_that_is_not_in_the_store(tmp_path: Path, slow: Slow) -> None:
    with JournaledQueue(tmp_path, "jobs", segment_bytes=4096, ship=Ship(slow, interval=0)) as queue:
        assert queue.shipping is not None
        queue.shipping.flush(PATIENCE)
        slow.is_away = True
        for _ in range(40):
            queue.put(b"x" * 500)
            queue.commit(queue.get())
        queue.checkpoint(durable=True)
        kept = queue.stats().segments
        assert kept >= 5
        slow.is_away = False
        queue.shipping.flush(PATIENCE)

        def retired() -> bool:
            queue.checkpoint(durable=True)
            return queue.stats().segments < 3

        until(retired)


@pytest.mark.parametrize("when_behind", ["refuse", "block"])
def test_a_queue_that_is_behind(tmp_path: Path, slow: Slow, when_behind: Literal["refuse", "block"]) -> None:
    options = Ship(slow, interval=0, when_behind=when_behind, max_unshipped_bytes=1000)
    with JournaledQueue(tmp_path, "jobs", ship=options) as queue:
        assert queue.shipping is not None
        shipping = queue.shipping
        shipping.flush(PATIENCE)
        slow.is_away = True
        queue.put(b"x" * 2000)
        until(lambda: shipping.status().state == "away" and queue._status.gate is not None)
        with pytest.raises(QueueFull, match="2,000 bytes are not in the store"):
            queue.put(b"another", timeout=0)
        with pytest.raises(QueueFull, match="behind"):
            queue.put(b"another", timeout=0.02)
        future_raises = pytest.raises(QueueFull, match="behind")
        with future_raises:
            queue.put_future(b"another")
        threading.Timer(0.05, lambda: setattr(slow, "is_away", False)).start()
        if when_behind == "block":
            assert queue.put(b"waits") == 2
        shipping.flush(PATIENCE)
        until(lambda: queue._status.gate is None)
        queue.put(b"y")


def test_a_queue_is_not_opened_while_its_store_is_away(tmp_path: Path, slow: Slow) -> None:
    slow.is_away = True
    with pytest.raises(StoreUnavailable):
        JournaledQueue(tmp_path, "jobs", ship=Ship(slow))
    slow.is_away = False
    JournaledQueue(tmp_path, "jobs", ship=Ship(slow)).close()


def test_closing_waits_for_the_store_and_not_for_ever(tmp_path: Path, slow: Slow) -> None:
    queue = JournaledQueue(tmp_path, "jobs", ship=Ship(slow, interval=0, close_timeout=0.2))
    slow.is_away = True
    queue.put(b"1")
    with pytest.raises(NotShipped):
        queue.close()
    queue.close()
    slow.is_away = False
    with JournaledQueue(tmp_path, "jobs", ship=Ship(slow)) as again:
        assert again.get().data == b"1"
    assert items_of(slow.store) == {1: b"1"}


def test_lost_answers_and_repetitions(tmp_path: Path) -> None:
    store = SimulatedStore()
    count = 0

    def fault(request: Request) -> Fault:
        nonlocal count
        count += 1
        faults = [Fault.NONE, Fault.LOST_AFTER, Fault.TWICE, Fault.LOST_BEFORE, Fault.LATE]
        return faults[count % 5] if request.kind == "create" and "/log/" in request.key else Fault.NONE

    with JournaledQueue(tmp_path, "jobs", segment_bytes=4096, ship=Ship(store.client("a"), interval=0)) as queue:
        store.before_request = fault
        assert queue.shipping is not None
        put = {}
        for number in range(30):
            put[queue.put(b"%d" % number * 100)] = b"%d" % number * 100
            if number % 5 == 0:
                queue.shipping.flush(PATIENCE)
    assert items_of(store.objects) == put
    assert queue.shipping.status().failures > 0


# -- other owners ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("acks", ACKS)
def test_a_queue_with_another_owner_is_over(tmp_path: Path, acks: Acks) -> None:
    store = MemoryStore()
    queue = JournaledQueue(tmp_path, "jobs", ship=Ship(store, acks=acks, interval=0))
    assert queue.shipping is not None
    shipping = queue.shipping
    queue.put(b"1")
    queue.put(b"2")
    shipping.flush(PATIENCE)
    item, waiting = queue.get(), queue.reader()
    fence(store, queue._journal.queue_id)
    if acks == "disk":
        queue.put(b"3")
        with pytest.raises(Fenced):
            shipping.flush(PATIENCE)
    else:
        with pytest.raises(Fenced):
            queue.put(b"3")
    assert queue._shipment is not None
    queue._shipment._shipper._thread.join(PATIENCE)  # it tells one after the other
    calls: list[Callable[[], object]] = [
        lambda: queue.put(b"4"),
        queue.get,
        queue.sync,
        lambda: queue.commit(item),
        lambda: waiting.get_many(1),
        queue.checkpoint,
        lambda: queue.put_future(b"4").result(PATIENCE),
        lambda: shipping.flush(1),
    ]
    for call in calls:
        with pytest.raises(Fenced) as raised:
            call()
        error = raised.value
        assert (error.epoch, error.owner, error.first_unshipped_id, error.last_id) == (2, "another", 3, 3)
    assert shipping.status().state == "fenced"
    queue.close()
    with pytest.raises(Fenced) as again:
        JournaledQueue(tmp_path, "jobs", ship=Ship(store))
    assert (again.value.first_unshipped_id, again.value.last_id) == (3, 3)
    with JournaledQueue(tmp_path, "jobs", ship=False) as detached:
        assert [detached.get().data for _ in range(3)] == [b"1", b"2", b"3"]


def test_a_waiting_consumer_hears_of_another_owner(tmp_path: Path) -> None:
    store = MemoryStore()
    queue = JournaledQueue(tmp_path, "jobs", ship=Ship(store, interval=0))
    queue.put(b"1")
    assert queue.shipping is not None
    queue.shipping.flush(PATIENCE)
    queue.commit(queue.get())
    future = queue.get_future()
    fence(store, queue._journal.queue_id)
    queue.put(b"2")
    assert future.result(PATIENCE).data == b"2"
    future = queue.get_future()
    with pytest.raises(Fenced):
        future.result(PATIENCE)
    with pytest.raises(Fenced):
        queue.close()  # no call has raised it
    queue.close()


def test_a_queue_that_is_shipped_is_not_opened_by_mistake(tmp_path: Path) -> None:
    store = MemoryStore()
    JournaledQueue(tmp_path, "jobs", ship=Ship(store)).close()
    with pytest.raises(ShippingRequired, match="ship=False") as raised:
        JournaledQueue(tmp_path, "jobs")
    assert raised.value.url == "a store in memory"
    JournaledQueue(tmp_path, "jobs", ship=False).close()
    JournaledQueue(tmp_path, "jobs").close()


def test_without_a_store_nothing_of_it_is_there(tmp_path: Path) -> None:
    program = """
import os, sys, threading
from kestrelpy import JournaledQueue
before = len(os.listdir("/proc/self/fd")), threading.active_count()
with JournaledQueue(sys.argv[1], "jobs", sync="never") as queue:
    queue.put(b"1")
    assert queue.get().data == b"1"
    assert queue.shipping is None
    print(len(os.listdir("/proc/self/fd")) - before[0], threading.active_count() - before[1])
    print([name for name in sys.modules if name.startswith("kestrelpy.ship") or "export" in name or "obstore" in name])
"""
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["5 1", "[]"]  # R32: four of the queue, one of its folder; and a thread of timers


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="in memory"):
        JournaledQueue(tmp_path, "jobs", journaled=False, ship=Ship(MemoryStore()))
    for wrong in (1, True, b"file:///x", MemoryStore()):
        with pytest.raises(TypeError):
            JournaledQueue(tmp_path, "jobs", ship=wrong)  # type: ignore[call-overload]
    for options in ({"acks": "never"}, {"interval": -1}, {"chunk_bytes": 1}, {"when_behind": "wait"}, {"uploads": 0}):
        with pytest.raises(ValueError):  # noqa: PT011
            Ship("file:///x", **options)
    with pytest.raises(ValueError, match="sync"):
        JournaledQueue(tmp_path, "jobs", sync=-1, ship=Ship(MemoryStore(), acks="shipped"))
    with JournaledQueue(tmp_path, "plain") as queue:
        assert queue.shipping is None


def test_a_store_that_is_too_weak(tmp_path: Path) -> None:
    store = SimulatedStore(ignores_conditions=True)
    with pytest.raises(StoreTooWeak):
        JournaledQueue(tmp_path, "jobs", ship=Ship(store.client("a")))
    assert not store.objects.list("")
    JournaledQueue(tmp_path, "jobs").close()


def test_histories_that_do_not_match(tmp_path: Path) -> None:
    store = MemoryStore()
    here, other = tmp_path / "here", tmp_path / "other"
    with JournaledQueue(here, "jobs", ship=Ship(store)) as queue:
        queue.put(b"1")
    before = store.contents()
    copied = {path.name: path.read_bytes() for path in here.iterdir()}
    with pytest.raises(HistoryMismatch, match="restore it first"):
        JournaledQueue(other, "jobs", ship=Ship(store))
    with JournaledQueue(other, "jobs") as queue:
        queue.put(b"another queue of that name")
    with pytest.raises(HistoryMismatch, match="another queue"):
        JournaledQueue(other, "jobs", ship=Ship(store))
    with JournaledQueue(here, "jobs", ship=Ship(store)) as queue:
        queue.put(b"2")
    after = store.contents()
    # A backup of the folder was put back: the log is ahead, though its owner was this queue.
    for path in here.iterdir():
        path.unlink()
    for name, data in copied.items():
        (here / name).write_bytes(data)
    with pytest.raises(Fenced):  # the log's last epoch is of a nonce that this folder has never seen
        JournaledQueue(here, "jobs", ship=Ship(store))
    assert store.contents() == after
    store.replace_all(before)
    with JournaledQueue(here, "jobs", ship=Ship(store)) as queue:
        queue.put(b"2 again")


def test_a_store_that_was_put_back_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrelpy.ship.opened.LISTING_SECONDS", 0.2)
    store = MemoryStore()
    with JournaledQueue(tmp_path, "jobs", ship=Ship(store)) as queue:
        queue.put(b"1")
    before = store.contents()
    with JournaledQueue(tmp_path, "jobs", ship=Ship(store)) as queue:
        queue.put(b"2")
    store.replace_all(before)
    with pytest.raises(HistoryMismatch, match="was ours"):
        JournaledQueue(tmp_path, "jobs", ship=Ship(store))
    assert store.contents() == before
    elsewhere = f"file://{tmp_path}/store"
    with JournaledQueue(tmp_path, "jobs", ship=elsewhere) as queue:
        assert [queue.get().data, queue.get().data] == [b"1", b"2"]
        assert queue.shipping is not None
        queue.shipping.flush(PATIENCE)
        assert items_of(open_store(elsewhere)) == {1: b"1", 2: b"2"}


def test_a_slot_that_is_lost_is_not_taken_for_the_end(tmp_path: Path) -> None:
    store = MemoryStore()
    with JournaledQueue(tmp_path, "jobs", ship=Ship(store, interval=0)) as queue:
        assert queue.shipping is not None
        for number in range(5):
            queue.put(b"%d" % number)
            queue.shipping.flush(PATIENCE)
    store.delete(["jobs/log/0000000000000003"])
    before = store.contents()
    with pytest.raises(StoreDamaged, match="0000000000000003"):
        JournaledQueue(tmp_path, "jobs", ship=Ship(store))
    assert store.contents() == before


@pytest.mark.parametrize("how", ["it is missing", "it is of another opening"])
def test_the_last_fence_is_needed(tmp_path: Path, how: str) -> None:
    """A manifest leads behind it, but only the FENCE says from which id on its epoch may have given out ids."""
    store = MemoryStore()
    with JournaledQueue(tmp_path, "jobs", ship=Ship(store)) as queue:
        queue.put(b"1")
    state = log_of(store)
    store.create(f"jobs/{manifest_key(state.slot)}", encode_manifest(state.manifest()))
    objects = store.contents()
    key = f"jobs/{slot_key(state.fences[-1])}"
    fence, modified_ms = objects.pop(key)
    if how != "it is missing":
        objects[key] = resealed_slot(fence[:32] + b"another's nonce!" + fence[48:]), modified_ms
    store.replace_all(objects)
    with pytest.raises(StoreDamaged, match=key):
        JournaledQueue(tmp_path, "jobs", ship=Ship(store))
    assert store.contents() == objects


def test_a_reader_that_took_over_the_default_one_is_shipped_by_its_own_name(tmp_path: Path) -> None:
    store = MemoryStore()
    with JournaledQueue(tmp_path, "jobs") as queue:
        queue.put(b"1")
        queue.put(b"2")
        queue.commit(queue.get())
    with contextlib.closing(open_reader(tmp_path, "jobs", "named", create=True)):
        pass
    with JournaledQueue(tmp_path, "jobs", ship=Ship(store)) as queue:
        assert queue.shipping is not None
        queue.shipping.flush(PATIENCE)
        until(lambda: log_of(store).checkpoints)
    assert {name: state.head for name, state in log_of(store).checkpoints.items()} == {"named": 1}
    restore(store, "jobs", tmp_path / "there")
    with JournaledQueue(tmp_path / "there", "jobs", ship=False) as queue:
        assert queue.reader("named").get(block=False).data == b"2"


# -- what stays in the store ------------------------------------------------------------------------------------------


@takes_long
def test_what_is_needed_no_more_is_deleted(tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000_000)
    store = MemoryStore(clock=clock)
    options = Ship(store, interval=0, history=100, manifest_interval=0.001)
    with JournaledQueue(tmp_path, "jobs", segment_bytes=4096, ship=options) as queue:
        assert queue.shipping is not None
        for number in range(12):
            for _ in range(5):
                queue.put(b"%d" % number * 500)
                queue.commit(queue.get())
            queue.checkpoint(durable=True)
            queue.shipping.flush(PATIENCE)
            clock.advance(30)
            until(
                lambda: (state := log_of(store).checkpoints.get("")) is not None and state.head == log_of(store).last_id
            )
        before = len(store.contents())
        collected = []
        for _ in range(4):  # the log forgets a segment, a manifest says so, and that manifest is older than the history
            clock.advance(200)
            queue.put(b"one more")
            queue.shipping.flush(PATIENCE)
            collected.append(queue.shipping.collect(PATIENCE))
        assert sum(each.segments for each in collected) > 5
        assert sum(each.slots for each in collected) > 10
        assert len(store.contents()) < before
        assert verify(store, "jobs").ok
    restore(store, "jobs", tmp_path / "elsewhere")
    with JournaledQueue(tmp_path / "elsewhere", "jobs", ship=False) as queue:
        assert queue.get(block=False).data == b"one more"


def test_a_collection_says_why_it_was_not_done(tmp_path: Path, slow: Slow) -> None:
    queue = JournaledQueue(tmp_path, "jobs", ship=Ship(slow, interval=0))
    assert queue.shipping is not None
    shipping = queue.shipping
    slow.is_away = True
    with pytest.raises(StoreUnavailable):
        shipping.collect(PATIENCE)
    slow.is_away = False
    assert shipping.collect(PATIENCE) == Collected(0, 0, 0, 0, 0)
    fence(slow.store, queue._journal.queue_id)
    with pytest.raises(Fenced):
        shipping.collect(PATIENCE)
    queue.close()
    with pytest.raises(Fenced):
        shipping.collect(PATIENCE)


@pytest.mark.parametrize("version", [b"\2", b"\4"])
def test_a_damaged_manifest_ends_a_collection_and_not_the_shipping(tmp_path: Path, version: bytes) -> None:
    """Three failures in a row would end it, and with it the queue: a collection that somebody waits for is repeated."""
    clock = ManualClock(1_700_000_000_000)
    store = MemoryStore(clock=clock)
    with JournaledQueue(tmp_path, "jobs", ship=Ship(store, acks="shipped", interval=0, history=100)) as queue:
        assert queue.shipping is not None
        for number in range(5):
            clock.advance(60)
            queue.put(b"%d" % number)
            state = log_of(store)
            store.create(f"jobs/{manifest_key(state.slot)}", encode_manifest(state.manifest()))
        objects = store.contents()
        for each in store.list("jobs/manifest/")[:-1]:
            data, modified_ms = objects[each.key]
            changed = data if version != b"\2" else data[:-1] + bytes([data[-1] ^ 1])
            objects[each.key] = changed[:8] + version + changed[9:], modified_ms
        store.replace_all(objects)
        for _ in range(2):
            with pytest.raises(StoreDamaged if version == b"\2" else UnsupportedFormat, match="jobs/manifest/"):
                queue.shipping.collect(PATIENCE)
        assert store.contents().keys() >= objects.keys()
        assert queue.shipping.status().state == "shipping"
        assert "jobs/manifest/" in queue.shipping.status().last_error
        queue.put(b"5")
        assert items_of(store)[6] == b"5"


def test_a_segment_in_many_slots_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrelpy.ship.owner.MOST_TAIL_SLOTS", 5)
    store = MemoryStore()
    with JournaledQueue(tmp_path, "jobs", ship=Ship(store, interval=0)) as queue:
        assert queue.shipping is not None
        put = {}
        for number in range(23):
            put[queue.put(b"%d" % number)] = b"%d" % number
            queue.shipping.flush(PATIENCE)
            assert len(log_of(store).tail) <= 5
        assert items_of(store) == put
        assert queue.stats().rotations >= 3


def test_a_queue_that_is_missing_is_restored_if_the_user_says_so(tmp_path: Path) -> None:
    store = MemoryStore()
    options = Ship(store, on_missing="restore")
    with JournaledQueue(tmp_path / "1", "jobs", ship=options) as queue:  # there is none yet
        queue.put(b"1")
    with JournaledQueue(tmp_path / "2", "jobs", ship=options) as queue:
        assert queue.get(block=False).data == b"1"
        queue.put(b"2")
    with JournaledQueue(tmp_path / "2", "jobs", ship=options) as queue:
        assert [queue.get(block=False).data for _ in range(2)] == [b"1", b"2"]
    with pytest.raises(Fenced):
        JournaledQueue(tmp_path / "1", "jobs", ship=options)
    with pytest.raises(ValueError, match="on_missing"):
        Ship(store, on_missing="ask")  # type: ignore[arg-type]


# -- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_away", [False, True])
def test_a_queue_that_nobody_has_is_not_kept_by_its_shipping(tmp_path: Path, slow: Slow, is_away: bool) -> None:
    queue = JournaledQueue(tmp_path, "jobs", ship=Ship(slow, interval=0.01))
    slow.is_away = is_away
    queue.put(b"1")
    assert queue._shipment is not None
    if is_away:
        shipper = queue._shipment._shipper
        until(lambda: shipper.status().state == "away")
        del shipper
    thread, gone = queue._shipment._shipper._thread, weakref.ref(queue)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del queue
        until(lambda: gc.collect() >= 0 and gone() is None)  # the timer of the sync has it for a moment
    assert [each.category for each in caught] == [ResourceWarning]
    thread.join(PATIENCE)
    assert not thread.is_alive()
    slow.is_away = False
    with JournaledQueue(tmp_path, "jobs", ship=Ship(slow)) as again:
        assert again.get().data == b"1"


def test_a_forked_child_touches_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    with JournaledQueue(tmp_path, "jobs", ship=Ship(store, interval=0)) as queue:
        queue.put(b"1")
        assert queue.shipping is not None
        shipping = queue.shipping
        child = os.fork()
        if child == 0:
            status = 1
            try:
                calls: list[Callable[[], object]] = [lambda: queue.put(b"2"), lambda: shipping.flush(1)]
                for call in calls:
                    try:
                        call()
                    except ForkedQueue:
                        continue
                    os._exit(2)
                queue.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        queue.put(b"3")
        queue.shipping.flush(PATIENCE)
        assert items_of(store) == {1: b"1", 2: b"3"}


def test_an_error_that_nobody_foresaw_is_got_over(tmp_path: Path, slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrelpy.ship.shipper.RESTARTS", (0.01, 0.01, 0.01))
    with JournaledQueue(tmp_path, "jobs", ship=Ship(slow, interval=0)) as queue:
        assert queue.shipping is not None
        shipping = queue.shipping
        queue.put(b"1")
        shipping.flush(PATIENCE)
        slow.once = [ZeroDivisionError("unforeseen")]
        queue.put(b"2")
        until(lambda: "unforeseen" in shipping.status().last_error)
        shipping.flush(PATIENCE)
        assert items_of(slow.store) == {1: b"1", 2: b"2"}


def test_errors_with_something_good_in_between_are_not_added_up(
    tmp_path: Path, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kestrelpy.ship.shipper.RESTARTS", (0.01, 0.01))
    monkeypatch.setattr("kestrelpy.ship.shipper.LONGEST_PAUSE", 0.01)
    with JournaledQueue(tmp_path, "jobs", ship=Ship(slow, interval=0)) as queue:
        assert queue.shipping is not None
        for number in range(6):
            error = (ZeroDivisionError("unforeseen"), OSError(24, "too many open files"), SystemExit(1))[number % 3]
            slow.once = [error]
            queue.put(b"%d" % number)
            until(lambda error=error: str(error) in queue.shipping.status().last_error)  # type: ignore[misc]
            queue.shipping.flush(PATIENCE)
        assert len(items_of(slow.store)) == 6


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_is_gone_leaves_nobody_waiting(tmp_path: Path, slow: Slow) -> None:
    queue = JournaledQueue(tmp_path, "jobs", ship=Ship(slow, interval=0))
    assert queue.shipping is not None
    assert queue._shipment is not None
    shipping = queue.shipping
    with patch.object(Shipper, "_be_fenced", side_effect=KeyboardInterrupt):
        fence(slow.store, queue._journal.queue_id)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            queue.put(b"1")
            with pytest.raises(ShipError):
                shipping.flush(PATIENCE)
    assert shipping.status().state == "failed"
    with contextlib.suppress(ShipError):
        queue.close()


def test_limits_are_kept_while_a_request_hangs_and_in_a_long_interval(tmp_path: Path, slow: Slow) -> None:
    options = Ship(slow, interval=1000, when_behind="refuse", max_unshipped_bytes=1000)
    with JournaledQueue(tmp_path, "jobs", ship=options) as queue:
        assert queue.shipping is not None
        queue.put(b"the first one is sent at once")
        queue.shipping.flush(PATIENCE)
        queue.put(b"x" * 2000)
        until(lambda: queue._status.gate is not None)
        queue.shipping.flush(PATIENCE)
        until(lambda: queue._status.gate is None)
        slow.door.clear()
        queue.put(b"x" * 500)
        shipping = queue.shipping

        def is_sent() -> bool:
            with contextlib.suppress(NotShipped):
                shipping.flush(0.01)  # its thread may see it too late
            return slow.waiting > 0

        until(is_sent)
        queue.put(b"x" * 2000)
        until(lambda: queue._status.gate is not None)
        slow.door.set()


def test_a_long_interval_is_for_new_items_alone(tmp_path: Path) -> None:
    store = MemoryStore()
    ship = Ship(store, interval=1000, chunk_bytes=64 << 10)
    with JournaledQueue(tmp_path, "jobs", segment_bytes=4096, ship=ship) as queue:
        assert queue.shipping is not None
        queue.put(b"1")
        queue.shipping.flush(PATIENCE)
        queue.put_many([b"2", b"3"])
        queue.commit(queue.get())
        until(lambda: (state := log_of(store).checkpoints.get("")) is not None and state.head == 1)
        assert items_of(store) == {1: b"1"}
        for _ in range(10):
            queue.put(b"x" * 1000)
        until(lambda: len(log_of(store).segments) >= 2)
    with JournaledQueue(tmp_path, "other", ship=ship) as queue:
        assert queue.shipping is not None
        queue.put(b"1")
        queue.shipping.flush(PATIENCE)
        queue.put(b"x" * 70_000)
        until(lambda: len(items_of(store, "other")) == 2)


def test_a_store_that_can_only_be_read_is_away(tmp_path: Path, slow: Slow) -> None:
    with JournaledQueue(tmp_path, "jobs", ship=Ship(slow, interval=0, close_timeout=0.1)) as queue:
        assert queue.shipping is not None
        shipping = queue.shipping

        def refuse(key: str, data: bytes) -> bool:
            raise StoreUnavailable("a slow store", key, f"{len(data)} bytes cannot be written")

        create, slow.create = slow.create, refuse  # type: ignore[method-assign]
        queue.put(b"1")
        until(lambda: shipping.status().failures > 1)
        assert {shipping.status().state for _ in range(1000)} == {"away"}
        slow.create = create  # type: ignore[method-assign]
        shipping.flush(PATIENCE)
        assert shipping.status().state == "shipping"


@pytest.mark.parametrize("acks", ACKS)
def test_shipping_that_fails_for_good_is_said(
    tmp_path: Path, slow: Slow, acks: Acks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kestrelpy.ship.shipper.RESTARTS", (0.0, 0.0))
    queue = JournaledQueue(tmp_path, "jobs", ship=Ship(slow, acks=acks, interval=0))
    assert queue.shipping is not None
    shipping = queue.shipping
    slow.trouble = ZeroDivisionError("unforeseen")
    if acks == "disk":
        queue.put(b"1")
        until(lambda: shipping.status().state == "failed")
        queue.put(b"2")
        assert queue.get().data == b"1"
    else:
        with pytest.raises(Exception, match="has failed"):
            queue.put(b"1")
        with pytest.raises(Exception, match="has failed"):
            queue.get()
    with pytest.raises(Exception, match="has failed"):
        shipping.flush(PATIENCE)
    slow.trouble = None
    if acks == "disk":
        with pytest.raises(NotShipped):
            queue.close()
    else:
        queue.close()


def test_after_the_end(tmp_path: Path) -> None:
    store = MemoryStore()
    queue = JournaledQueue(tmp_path, "jobs", ship=Ship(store))
    assert queue.shipping is not None
    shipping = queue.shipping
    queue.close()
    assert shipping.status().state == "closed"
    with pytest.raises(QueueClosed):
        shipping.flush()
    with JournaledQueue(tmp_path, "jobs", ship=Ship(store)) as again:
        again.put(b"1")
        again.erase()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("jobs")]
    assert log_of(store).slot > 0


def test_limits_and_hooks_beside_shipping(tmp_path: Path) -> None:
    store = MemoryStore()
    config = ReaderConfig(max_items=2)
    with JournaledQueue(tmp_path, "jobs", default_reader=config, ship=Ship(store, acks="shipped", interval=0)) as queue:
        queue.put(b"1")
        queue.put(b"2")
        with pytest.raises(QueueFull, match="max_items"):
            queue.put(b"3")
        queue.commit(queue.get())
        queue.put(b"3", expires_in=100)
        assert items_of(store) == {1: b"1", 2: b"2", 3: b"3"}


def test_another_end_of_the_log_is_read_as_it_is(tmp_path: Path) -> None:
    store = MemoryStore()
    with JournaledQueue(tmp_path, "jobs", ship=Ship(store, manifest_interval=0.001, interval=0)) as queue:
        assert queue.shipping is not None
        for number in range(100):
            queue.put(b"%d" % number * 50)
            queue.shipping.flush(PATIENCE)
    assert store.list("jobs/manifest/")
    assert log_of(store).begun_at > 0
    whole = carry_out(read_end("jobs/"), store, no_pause)
    for key, _, _ in store.list("jobs/manifest/"):
        store.delete([key])
    assert log_of(store).manifest() == whole.manifest()
