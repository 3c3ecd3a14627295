"""A queue goes on elsewhere: restored from the store, and shipped to the same place by its new owner."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest

from kestrelpy import JournaledQueue, QueueFull, ReaderConfig, WrongKind
from kestrelpy.ship import (
    Fenced,
    HistoryMismatch,
    NotShipped,
    RestoreTargetExists,
    Ship,
    ShippingRequired,
    StoreUnavailable,
    open_store,
    restore,
)
from kestrelpy.ship import slots as codec
from kestrelpy.testing.stores import MemoryStore
from kestrelpy.work import WorkQueue
from tests.ship.in_store import items_of, log_of
from tests.support.patience import PATIENCE, until

GAP, STEP = 1 << 30, 1 << 25


def test_the_queue_goes_on_elsewhere(tmp_path: Path) -> None:
    store = MemoryStore()
    here, there = tmp_path / "here", tmp_path / "there"
    queue = JournaledQueue(here, "jobs", segment_bytes=4096, ship=Ship(store, interval=0))
    put = {queue.put(b"%d" % number * 100): b"%d" % number * 100 for number in range(60)}
    for _ in range(20):
        queue.commit(queue.get())
    assert queue.shipping is not None
    queue.shipping.flush(PATIENCE)
    until(lambda: (state := log_of(store).checkpoints.get("")) is not None and state.head == 20)
    restored = restore(store, "jobs", there)
    assert restored.last_id == 60
    with pytest.raises(ShippingRequired):
        JournaledQueue(there, "jobs")
    with JournaledQueue(there, "jobs", segment_bytes=4096, ship=Ship(store, interval=0, owner="there")) as taken:
        assert taken.get().id == 21
        new_id = taken.put(b"new")
        assert new_id == 60 + GAP
        put[new_id] = b"new"
        queue.put(b"lost")
        with pytest.raises(Fenced):
            queue.shipping.flush(PATIENCE)
        queue.close()
    assert items_of(store) == put
    with pytest.raises(Fenced, match="'there', in epoch 2"):
        JournaledQueue(here, "jobs", ship=Ship(store))
    with JournaledQueue(there, "jobs", ship=Ship(store)) as taken:
        assert taken.put(b"newer") == new_id + 1
        assert [taken.get().id for _ in range(42)] == [*range(21, 61), new_id, new_id + 1]


def test_an_owner_that_has_put_nothing_still_begins_far_above(tmp_path: Path) -> None:
    store = MemoryStore()
    with JournaledQueue(tmp_path / "1", "jobs", ship=Ship(store)) as queue:
        queue.put(b"1")
    restore(store, "jobs", tmp_path / "2")
    for _ in range(3):  # the same owner again: no further
        JournaledQueue(tmp_path / "2", "jobs", ship=Ship(store)).close()
    restore(store, "jobs", tmp_path / "3")
    with JournaledQueue(tmp_path / "3", "jobs", ship=Ship(store)) as queue:
        assert queue.put(b"2") == 1 + GAP + STEP
        assert [queue.get().data for _ in range(2)] == [b"1", b"2"]
    restore(store, "jobs", tmp_path / "4")
    with JournaledQueue(tmp_path / "4", "jobs", ship=Ship(store)) as queue:
        assert queue.put(b"3") == 1 + 2 * GAP + STEP
    assert items_of(store) == {1: b"1", 1 + GAP + STEP: b"2", 1 + 2 * GAP + STEP: b"3"}


def test_a_put_that_has_raised_fenced_is_enough(tmp_path: Path) -> None:
    store = MemoryStore()
    options = Ship(store, acks="shipped", interval=0)
    queue = JournaledQueue(tmp_path / "here", "jobs", ship=options)
    queue.put(b"1")
    restore(store, "jobs", tmp_path / "there")
    with JournaledQueue(tmp_path / "there", "jobs", ship=Ship(store)):
        with pytest.raises(Fenced):
            queue.put(b"2")
        queue.close()  # raises it no second time


def test_a_restore_of_an_earlier_moment_is_a_branch(tmp_path: Path) -> None:
    store = MemoryStore()
    with JournaledQueue(tmp_path / "1", "jobs", ship=Ship(store, interval=0)) as queue:
        queue.put(b"1")
        assert queue.shipping is not None
        slot = queue.shipping.flush(PATIENCE)
        queue.put(b"2")
    before = store.contents()
    restore(store, "jobs", tmp_path / "2", at_slot=slot)
    with pytest.raises(HistoryMismatch, match="before the log's end"):
        JournaledQueue(tmp_path / "2", "jobs", ship=Ship(store))
    assert store.contents() == before
    elsewhere = f"file://{tmp_path}/store"
    with JournaledQueue(tmp_path / "2", "jobs", ship=elsewhere) as queue:
        assert queue.put(b"another second") == 2
    assert items_of(open_store(elsewhere)) == {1: b"1", 2: b"another second"}


@pytest.mark.parametrize("lazy", [False, True])
def test_a_copy_does_not_begin_a_log_where_its_own_is_gone(tmp_path: Path, *, lazy: bool) -> None:
    """The folder of the store is not mounted, or the bucket was emptied."""
    store = MemoryStore()
    with JournaledQueue(tmp_path / "here", "jobs", ship=Ship(store)) as queue:
        queue.put(b"1")
    objects = store.contents()
    restore(store, "jobs", tmp_path / "there", lazy=lazy)
    store.replace_all({})
    with pytest.raises(HistoryMismatch, match=r"has nothing of this queue, and slot \d of its log was there"):
        JournaledQueue(tmp_path / "there", "jobs", ship=Ship(store))
    assert store.contents() == {}
    store.replace_all(objects)
    with JournaledQueue(tmp_path / "there", "jobs", ship=Ship(store)) as queue:
        assert queue.get().data == b"1"


def test_the_owner_that_has_gone_on_keeps_the_log_from_its_copy(tmp_path: Path) -> None:
    store = MemoryStore()
    with JournaledQueue(tmp_path / "1", "jobs", ship=Ship(store, interval=0)) as queue:
        queue.put(b"1")
        assert queue.shipping is not None
        queue.shipping.flush(PATIENCE)
        restore(store, "jobs", tmp_path / "2")
        queue.put(b"2")
        queue.shipping.flush(PATIENCE)
        with pytest.raises(HistoryMismatch):
            JournaledQueue(tmp_path / "2", "jobs", ship=Ship(store))
        queue.put(b"3")
        queue.shipping.flush(PATIENCE)
    with pytest.raises(RestoreTargetExists):
        restore(store, "jobs", tmp_path / "2")


@pytest.mark.parametrize("acks", ["disk", "shipped"])
def test_a_work_queue_goes_on_elsewhere(tmp_path: Path, acks: str) -> None:
    store = MemoryStore()
    options = Ship(store, acks=acks, interval=0)  # type: ignore[arg-type]
    with WorkQueue(tmp_path / "1", "work", ship=options) as work, work.session() as session:
        first = work.put(b"first")
        work.put(b"second")
        job = session.reserve(timeout=0)
        assert job is not None
        job.delete()
        if acks == "shipped":
            assert len(items_of(store, "work")) == 3
    restore(store, "work", tmp_path / "2")
    for number in range(2):
        with WorkQueue(tmp_path / "2", "work", ship=options) as work, work.session() as session:
            job = session.reserve(timeout=0)
            assert job is not None
            assert job.body == b"second"
            if number == 0:
                continue
            assert work.put(b"third") == first + 2 + GAP
            job.delete()
    with WorkQueue(tmp_path / "2", "work", ship=options) as work, work.session() as session:
        job = session.reserve(timeout=0)
        assert job is not None
        assert (job.id, job.body) == (first + 2 + GAP, b"third")


def records_of(work: WorkQueue) -> int:
    """The id of the last record of its journal."""
    assert work._core.journal is not None
    return work._core.journal.last_id


def test_a_work_queue_goes_on_elsewhere_again_and_again(tmp_path: Path) -> None:
    store = MemoryStore()
    ids = []
    for number in range(5):
        folder = tmp_path / str(number)
        if number:
            restore(store, "work", folder)
        with WorkQueue(folder, "work", ship=Ship(store)) as work:
            ids.append(work.put(b"%d" % number))
            assert records_of(work) < 100, "it has a byte for each record: those of a gap would take gigabytes"
    assert all(later - earlier >= GAP for earlier, later in pairwise(ids))
    restore(store, "work", tmp_path / "end")
    with WorkQueue(tmp_path / "end", "work", ship=False) as work:
        assert [job.id for job in work.jobs()] == ids
        assert records_of(work) < 100


def test_a_work_queue_goes_on_elsewhere_as_often_as_one_likes(tmp_path: Path) -> None:
    store = MemoryStore()
    for number in range(40):
        folder = tmp_path / str(number)
        if number:
            restore(store, "work", folder)
        with WorkQueue(folder, "work", ship=Ship(store)) as work:
            work.put(b"x")


class FencesAlone(MemoryStore):
    """A store to which nothing comes but FENCEs, if it is told so."""

    is_strict = False

    def create(self, key: str, data: bytes) -> bool:
        if self.is_strict and "/log/" in key and data[10] != codec.FENCE:
            raise StoreUnavailable("the store", key, "it is away")
        return super().create(key, data)


def test_an_owner_that_has_shipped_nothing_has_given_out_ids_of_jobs(tmp_path: Path) -> None:
    store = FencesAlone()
    options = Ship(store, interval=0)
    with WorkQueue(tmp_path / "1", "work", ship=options) as work:
        work.put(b"1")
    restore(store, "work", tmp_path / "2")
    store.is_strict = True
    work = WorkQueue(tmp_path / "2", "work", ship=Ship(store, interval=0, close_timeout=0.1))
    given_out = work.put(b"2")
    with pytest.raises(NotShipped):
        work.close()
    store.is_strict = False
    restore(store, "work", tmp_path / "3")
    with WorkQueue(tmp_path / "3", "work", ship=options) as work:
        assert work.put(b"3") > given_out


def test_a_fenced_work_queue_gives_out_no_job(tmp_path: Path) -> None:
    store = MemoryStore()
    options = Ship(store, acks="shipped", interval=0)
    with WorkQueue(tmp_path / "1", "work", ship=options) as work, work.session() as session:
        work.put(b"1")
        restore(store, "work", tmp_path / "2")
        with WorkQueue(tmp_path / "2", "work", ship=options):
            with pytest.raises(Fenced):
                work.put(b"2")
            with pytest.raises(Fenced):
                session.reserve(timeout=0)


def test_a_restored_work_queue_is_opened_as_one_alone(tmp_path: Path) -> None:
    store = MemoryStore()
    with WorkQueue(tmp_path / "1", "work", ship=Ship(store)) as work:
        work.put(b"1")
    restore(store, "work", tmp_path / "2")
    before = store.contents()
    for ship in (Ship(store), False):
        with pytest.raises(WrongKind):
            JournaledQueue(tmp_path / "2", "work", ship=ship)
    (tmp_path / "2" / "work.work").unlink()
    with pytest.raises(HistoryMismatch, match="a work queue, and it is opened as a queue"):
        JournaledQueue(tmp_path / "2", "work", ship=Ship(store))
    assert store.contents() == before
    with JournaledQueue(tmp_path / "3", "plain", ship=Ship(store)) as queue:
        queue.put(b"1")
    with pytest.raises(HistoryMismatch, match="a queue, and it is opened as a work queue"):
        WorkQueue(tmp_path / "3", "plain", ship=Ship(store))


@pytest.mark.parametrize("acks", ["disk", "shipped"])
def test_a_queue_that_was_taken_over_and_not_put_to(tmp_path: Path, acks: str) -> None:
    store = MemoryStore()
    with JournaledQueue(tmp_path / "1", "jobs", ship=Ship(store)) as queue:
        queue.put_many([b"1", b"2", b"3", b"4", b"5"])
        queue.commit(queue.get())
    restore(store, "jobs", tmp_path / "2")
    ship = Ship(store, acks=acks, interval=0)  # type: ignore[arg-type]
    config = ReaderConfig(max_items=4)
    with JournaledQueue(tmp_path / "2", "jobs", default_reader=config, ship=ship) as queue:
        assert queue.shipping is not None
        before = time.process_time()
        queue.shipping.flush(PATIENCE)  # there is nothing to wait for
        assert queue.reader().stats().items == 4
        with pytest.raises(QueueFull):
            queue.put(b"6")
        queue.shipping.flush(PATIENCE)
        assert time.process_time() - before < PATIENCE / 4
        for _ in range(4):
            queue.commit(queue.get(timeout=PATIENCE))
        assert queue.put(b"6") == 5 + GAP
        assert queue.get(timeout=PATIENCE).data == b"6"


def test_a_work_queue_in_memory_is_not_shipped() -> None:
    with pytest.raises(ValueError, match="directory"):
        WorkQueue(None, ship=Ship(MemoryStore()))
