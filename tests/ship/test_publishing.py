"""Publishing in a store, request by request: which number a batch gets, and when nothing is published again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import InvalidName, ItemTooLarge, JournaledQueue, WrongKind
from kestrelpy.inbox.format import BatchPart, LedgerState, PublishedBatch, StoreMark, decode_batch_file
from kestrelpy.inbox.publishing import batch_id_of
from kestrelpy.ship import (
    BatchRefused,
    NoSuchQueue,
    NotTakenIn,
    PartUploader,
    Ship,
    StoreDamaged,
    StoreUnavailable,
    in_objects,
    log,
    publish,
    publishing,
)
from kestrelpy.ship import slots as codec
from kestrelpy.ship.log import Opening
from kestrelpy.ship.manifest import LogState
from kestrelpy.ship.publishing import Publication
from kestrelpy.ship.slots import DATA, ShippedLedger, Slot
from kestrelpy.testing.stores import Fault, MemoryStore, SimulatedStore
from kestrelpy.work import WorkQueue
from tests.ship.examples import QUEUE_ID
from tests.support.patience import PATIENCE

PREFIX = "jobs/"


class Log:
    """The log of an owner that does nothing but to take batches in. ``ledger``: of its inbox."""

    def __init__(self, store: SimulatedStore) -> None:
        self.client = store.client("owner")
        self.opening = Opening(QUEUE_ID, b"n" * 16, "owner", 0, 1)
        self.state = self._do(log.open_log(PREFIX, self.opening, lambda _: 1))
        self.ledger = LedgerState()

    def _do(self, steps: Any) -> Any:
        return log.carry_out(steps, self.client, lambda _: None)

    def take(self, number: int, *, refused: bool = False) -> None:
        data = self.client.read(PREFIX + in_objects.batch_key(number))
        batch = decode_batch_file(data) if data is not None else None
        if batch is not None and not refused:
            self.ledger.note_done(batch.batch_id, 1, batch.app_id, batch.version)
            self.ledger.finished.clear()
        batch_id = batch.batch_id if batch is not None else bytes(16)
        mark = StoreMark(batch_id, 1, refused)
        self.ledger.note_taken(number, mark, remembers=refused or batch is not None)
        header = log.empty_header(self.state, DATA, self.opening)
        slot = Slot(header, ledger=ShippedLedger.of(self.ledger.taken, self.ledger))
        self._do(log.append(PREFIX, self.state, slot))


def batch(name: bytes, app_id: str = "", version: int = 0) -> PublishedBatch:
    parts = (BatchPart(name.ljust(16), 1, 1, 1),)
    return PublishedBatch(batch_id_of(parts, app_id, version), 1, app_id, version, parts)


def published(store: SimulatedStore, what: PublishedBatch, name: str = "publisher") -> Publication:
    steps = publishing.publish_steps(PREFIX, what)
    return log.carry_out(steps, store.client(name), lambda seconds: store.clock.advance(seconds))


def numbers(store: SimulatedStore) -> list[int]:
    found = [in_objects.parse_batch_key(each.key.removeprefix(PREFIX)) for each in store.objects.list(PREFIX)]
    return [number for number in found if number]


@pytest.fixture
def store() -> SimulatedStore:
    return SimulatedStore()


@pytest.fixture
def owner(store: SimulatedStore) -> Log:
    return Log(store)


# -- numbers ---------------------------------------------------------------------------------------------------------


def test_batches_are_numbered_without_a_gap(store: SimulatedStore, owner: Log) -> None:
    assert [published(store, batch(b"%d" % at))[:2] for at in (1, 2, 3)] == [(1, True), (2, True), (3, True)]
    owner.take(1)
    owner.take(2)
    assert published(store, batch(b"4"))[:2] == (4, True)


def test_what_is_published_or_taken_in_is_not_published_again(store: SimulatedStore, owner: Log) -> None:
    for at, version in ((1, 3), (2, 4)):
        assert published(store, batch(b"%d" % at, "app", version))[:2] == (at, True)
    for name, version, number in ((b"1", 3, 1), (b"other", 3, 1), (b"other", 2, 1), (b"other", 4, 2)):
        assert published(store, batch(name, "app", version))[:2] == (number, False)
    assert published(store, batch(b"5", "other app", 3))[:2] == (3, True)
    job = batch(b"job")
    assert published(store, job)[:2] == (4, True)
    assert published(store, job)[:2] == (4, False)
    for number in (1, 2, 3, 4):
        owner.take(number)
    for what in (batch(b"other", "app", 4), batch(b"1", "app", 3), job):
        assert published(store, what)[:2] == (0, False)
    assert numbers(store) == [1, 2, 3, 4]


def test_a_batch_in_a_hole_is_published_again(store: SimulatedStore, owner: Log) -> None:
    """Batch 1 was taken in and deleted while the publisher slept between its look at the log and its create."""
    steps = publishing.publish_steps(PREFIX, batch(b"late"))
    client, answer, request = store.client("late"), None, None
    while not isinstance(request, log.Create):
        request = log.resume(steps, answer)
        answer = log.ask(request, client, bool) if not isinstance(request, log.Create) else None
    published(store, batch(b"quick"))
    owner.take(1)
    store.delete_now([PREFIX + in_objects.batch_key(1)])
    assert request.key == PREFIX + in_objects.batch_key(1)
    answer = log.ask(request, client, bool)
    assert answer is True, "it stands in the hole"
    while True:
        try:
            request = log.resume(steps, answer)
        except StopIteration as end:
            done = end.value
            break
        answer = log.ask(request, client, bool)
    assert done[:2] == (2, True)
    assert numbers(store) == [1, 2]


@pytest.mark.parametrize("fault", [Fault.LOST_BEFORE, Fault.LOST_AFTER, Fault.TWICE, Fault.LATE])
def test_a_create_in_doubt_is_asked_for(store: SimulatedStore, owner: Log, fault: Fault) -> None:
    left = 2

    def once(request: Any) -> Fault:
        nonlocal left
        left -= request.kind == "create"
        return fault if request.kind == "create" and left >= 0 else Fault.NONE

    store.before_request = once
    what = batch(b"1", "app", 1)
    assert published(store, what)[:2] == (1, True)
    store.clock.advance(10_000)
    assert published(store, what)[:2] == (1, False)
    assert numbers(store) == [1]
    owner.take(1)
    assert published(store, what)[:2] == (0, False)


def test_a_damaged_batch_is_another_one(store: SimulatedStore, owner: Log) -> None:
    store.create_now(PREFIX + in_objects.batch_key(1), b"nonsense")
    assert published(store, batch(b"1"))[:2] == (2, True)


def test_a_batch_that_was_refused_may_be_published_again(store: SimulatedStore, owner: Log) -> None:
    what = batch(b"1", "app", 1)
    published(store, what)
    owner.take(1, refused=True)
    done = published(store, what)
    assert done[:2] == (2, True)
    owner.take(2)
    log.carry_out(publishing.wait_steps(PREFIX, what, done), store.client("publisher"), bool)
    assert published(store, what)[:2] == (0, False)


def test_who_waits_is_told_of_a_refusal(store: SimulatedStore, owner: Log) -> None:
    done = published(store, batch(b"1"))
    pauses = 0

    def pause(seconds: float) -> None:
        nonlocal pauses
        del seconds
        pauses += 1
        if pauses == 2:
            owner.take(1, refused=True)

    steps = publishing.wait_steps(PREFIX, batch(b"1"), done)
    with pytest.raises(BatchRefused) as caught:
        log.carry_out(steps, store.client("publisher"), pause)
    assert caught.value.number == 1


# -- objects ---------------------------------------------------------------------------------------------------------


def test_other_keys_are_none_of_the_inbox() -> None:
    good = in_objects.batch_key(7)
    assert (good, in_objects.parse_batch_key(good)) == ("in/0000000000007.batch", 7)
    for key in (f"{good}.refused", f"x/{good}", "in/7.batch", f"{good}\n", "in/0000000000000.batch", good.upper()):
        assert in_objects.parse_batch_key(key) == 0
    part = in_objects.part_key(bytes(16))
    assert in_objects.is_part_key(part)
    for key in (f"{part}.tmp", f"{part}\n", f"in/{'0' * 31}.part", f"in/{'A' * 32}.part", "in/../x.part"):
        assert not in_objects.is_part_key(key)


@pytest.mark.parametrize(
    "bad",
    [
        batch(b"1")._replace(number=2),
        batch(b"1")._replace(parts=batch(b"1").parts * 2),
        batch(b"1")._replace(parts=(BatchPart(b"p" * 16, 0, 0, 0),)),
    ],
    ids=["another number", "a part twice", "a part of nothing"],
)
def test_what_is_no_batch(bad: PublishedBatch) -> None:
    with pytest.raises(StoreDamaged):
        in_objects.decode_batch("key", 1, in_objects.encode_batch(bad))


def test_a_batch_that_was_fetched_is_none_of_a_store() -> None:
    with pytest.raises(Exception, match="version 2"):
        in_objects.decode_batch("key", 1, in_objects.encode_batch(batch(b"1")._replace(stored=1)))


# -- the calls -------------------------------------------------------------------------------------------------------


@pytest.fixture
def shipped(tmp_path: Path) -> Iterator[MemoryStore]:
    store = MemoryStore()
    with JournaledQueue(tmp_path, "jobs", ship=Ship(store, interval=0, inbox_interval=0.01)):
        yield store


def uploaded(store: Any, *items: bytes, **options: Any) -> tuple[BatchPart, ...]:
    with PartUploader(store, "jobs", **options) as uploader:
        uploader.add(items)
        return uploader.finish()


def test_publish(shipped: MemoryStore) -> None:
    parts = uploaded(shipped, b"one")
    assert publish(shipped, "jobs", parts, wait=PATIENCE)
    assert not publish(shipped, "jobs", parts, wait=PATIENCE)
    assert publish(shipped, "jobs", [])
    assert publish(shipped, "jobs", [], app_id="app", version=1, wait=PATIENCE)
    assert not publish(shipped, "jobs", uploaded(shipped, b"two"), app_id="app", version=1)


def test_what_cannot_be_published(shipped: MemoryStore, tmp_path: Path) -> None:
    part = uploaded(shipped, b"one")
    with pytest.raises(ValueError, match="needs an app_id"):
        publish(shipped, "jobs", part, version=1)
    with pytest.raises(ValueError, match="each of them once"):
        publish(shipped, "jobs", part * 2)
    with pytest.raises(InvalidName):
        publish(shipped, "../jobs", part)
    with pytest.raises(InvalidName):
        PartUploader(shipped, "a/b")
    with pytest.raises(NoSuchQueue):
        publish(shipped, "other", part)
    with WorkQueue(tmp_path / "work", "tubes", ship=Ship(shipped)), pytest.raises(WrongKind):
        publish(shipped, "tubes", part)


def test_it_says_so_if_nobody_takes_the_batch_in(tmp_path: Path) -> None:
    store = MemoryStore()
    JournaledQueue(tmp_path, "jobs", ship=Ship(store)).close()
    with pytest.raises(NotTakenIn) as caught:
        publish(store, "jobs", uploaded(store, b"one"), wait=0.3)
    assert caught.value.number == 1


def test_parts_have_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    items = [b"%d" % at * 3000 for at in range(200)]
    parts = uploaded(store, *items, part_bytes=100_000)
    sizes = [each.size_bytes for each in store.list("jobs/in/")]
    assert len(parts) == len(sizes) > 10
    assert max(sizes) <= 100_000
    assert sum(part.items for part in parts) == 200
    with pytest.raises(ItemTooLarge):
        uploaded(store, bytes(100_000), part_bytes=100_000)
    assert len(store.list("jobs/in/")) == len(parts)


@pytest.mark.parametrize("fault", [Fault.LOST_BEFORE, Fault.LOST_AFTER, Fault.TWICE])
def test_an_upload_in_doubt_is_repeated(store: SimulatedStore, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrelpy.ship.part_upload.PAUSES", (0.0, 0.0))
    faults = iter([fault, Fault.NONE, Fault.NONE, Fault.NONE])
    store.before_request = lambda _: next(faults)
    (part,) = uploaded(store.client("task"), b"one", b"two")
    assert part.items == 2
    assert len(store.objects.contents()) == 1
    store.is_away = True
    store.before_request = lambda _: Fault.NONE
    with pytest.raises(StoreUnavailable):
        uploaded(store.client("task"), b"three")


def test_what_was_uploaded_is_deleted_if_the_task_fails() -> None:
    store = MemoryStore()

    def fail() -> None:
        with PartUploader(store, "jobs", part_bytes=10_000) as uploader:
            uploader.add([bytes(3000)] * 10)
            assert store.contents()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not store.contents()


def test_the_log_of_an_owner_is_what_a_publisher_goes_by(store: SimulatedStore, owner: Log) -> None:
    assert publishing.taken_in(LogState()) == 0
    owner.take(1)
    state = log.carry_out(log.read_end(PREFIX), store.client("reader"), bool)
    assert (publishing.taken_in(state), state.slot) == (1, 2)
    assert codec.slot_key(2) == "log/0000000000000002"
