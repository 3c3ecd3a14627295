"""Shipping while something else goes wrong, or somebody else has a hand in it: found by the use explorer."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from kestrelpy import DurabilityUnknown, JournaledQueue, QueueClosed
from kestrelpy._journal import journal
from kestrelpy._writing.export import Export
from kestrelpy.inbox import PartWriter, publish, take_in
from kestrelpy.ship import Fenced, NotShipped, Ship, restore, shipper
from kestrelpy.ship.history import ID_JUMP
from kestrelpy.testing import ManualClock
from kestrelpy.testing.stores import MemoryStore
from kestrelpy.work import WorkQueue
from kestrelpy.work.compaction import Compactor
from tests.ship.in_store import items_of, log_of
from tests.ship.test_shipping import Slow, fence
from tests.support.patience import PATIENCE, until


@pytest.fixture
def slow() -> Iterator[Slow]:
    store = Slow()
    yield store
    store.door.set()


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def publish_one(folder: Path, data: bytes) -> None:
    with PartWriter(folder, "jobs") as writer:
        writer.add([data])
        assert publish(folder, "jobs", [writer.seal()])


def test_files_that_can_not_be_opened_for_a_while_do_not_end_shipping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipper, "LONGEST_PAUSE", 0.01)
    store, left = MemoryStore(), [3]
    real_read, real_totals = Export.read, Export.totals_through

    def refuse() -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def read(self: Export, segment: object, offset: int, size: int) -> bytes:
        refuse()
        return real_read(self, segment, offset, size)  # type: ignore[arg-type]

    def totals_through(self: Export, item_id: int) -> tuple[int, int]:
        refuse()
        return real_totals(self, item_id)

    with JournaledQueue(tmp_path, "jobs", ship=Ship(store, interval=0)) as queue:
        assert queue.shipping is not None
        with patch.object(Export, "read", read), patch.object(Export, "totals_through", totals_through):
            queue.put(b"one")
            queue.shipping.flush(PATIENCE)
        assert left == [0]
        assert items_of(store) == {1: b"one"}


def test_a_segment_that_could_not_be_closed_is_not_shipped_as_a_closed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipper, "RESTARTS", (0.01, 0.01, 0.01))
    store = MemoryStore()
    options = Ship(store, interval=10)
    queue = JournaledQueue(tmp_path, "jobs", segment_bytes=4096, ship=options)
    assert queue.shipping is not None
    queue.put_many([b"x" * 1000] * 3)
    with patch.object(journal, "close_segment", no_room), pytest.raises(DurabilityUnknown):
        queue.put(b"x" * 1000)
    with pytest.raises(DurabilityUnknown):
        queue.shipping.flush(PATIENCE)
    queue.close()
    assert not [key for key in store.contents() if key.endswith(".segment")]
    with JournaledQueue(tmp_path, "jobs", segment_bytes=4096, ship=options) as queue:
        assert queue.shipping is not None
        queue.shipping.flush(PATIENCE)
        assert items_of(store) == dict.fromkeys(range(1, 4), b"x" * 1000)


def test_a_close_says_that_a_sync_has_failed_rather_than_that_the_store_is_away(tmp_path: Path, slow: Slow) -> None:
    queue = JournaledQueue(tmp_path, "jobs", ship=Ship(slow, close_timeout=0.1))
    queue.put(b"one")
    slow.is_away = True
    with patch.object(journal, "close_segment", no_room), pytest.raises(DurabilityUnknown):
        queue.close()


def test_after_a_close_that_could_not_wait_nothing_waits_and_nothing_is_handed_over(tmp_path: Path, slow: Slow) -> None:
    queue = JournaledQueue(tmp_path, "jobs", ship=Ship(slow, interval=0, close_timeout=0.1))
    shipping = queue.shipping
    assert shipping is not None
    slow.door.clear()
    queue.put(b"one")
    until(lambda: slow.waiting > 0)
    with pytest.raises(NotShipped):
        queue.close()
    assert shipping.status().state == "closed"
    with pytest.raises(QueueClosed):
        shipping.hand_over()
    with pytest.raises(QueueClosed):
        shipping.flush()
    with pytest.raises(QueueClosed):
        shipping.collect()


def test_what_is_not_said_by_a_hand_over_is_no_put(tmp_path: Path, slow: Slow) -> None:
    """Everything is in the store, and the store is away when the end has to be said."""
    queue = JournaledQueue(tmp_path, "jobs", ship=Ship(slow, interval=0, close_timeout=0.1))
    shipping = queue.shipping
    assert shipping is not None
    queue.put(b"one")
    shipping.flush()
    slow.is_away = True
    with pytest.raises(
        NotShipped, match="everything is in the store, but not that the queue was handed over"
    ) as caught:
        shipping.hand_over(timeout=0.1)
    assert caught.value.first_id == caught.value.last_id + 1
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_fenced_queue_that_is_closed_is_not_handed_over(tmp_path: Path) -> None:
    store = MemoryStore()
    queue = JournaledQueue(tmp_path, "jobs", ship=Ship(store, interval=0))
    shipping, header = queue.shipping, log_of(store).header
    assert shipping is not None
    assert header is not None
    fence(store, header.queue_id)
    with pytest.raises(Fenced):
        shipping.hand_over()
    assert queue.closed
    with pytest.raises(Fenced):
        shipping.hand_over()


def test_another_owner_that_comes_after_an_error_is_named(
    tmp_path: Path, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipper, "RESTARTS", (0.3, 0.3, 0.3))
    queue = JournaledQueue(tmp_path, "jobs", ship=Ship(slow, interval=0))
    shipping, header = queue.shipping, log_of(slow.store).header
    assert shipping is not None
    assert header is not None
    slow.trouble = ValueError("of the store")
    queue.put(b"one")
    until(lambda: "of the store" in shipping.status().last_error)
    fence(slow.store, header.queue_id)
    slow.trouble = None
    with pytest.raises(Fenced):
        shipping.flush(PATIENCE)
    assert shipping.status().state == "fenced"
    with pytest.raises(Fenced):
        queue.put(b"two")
    queue.close()


def test_a_batch_for_a_shipped_queue_without_an_item_makes_no_other_queue(tmp_path: Path) -> None:
    store = MemoryStore()
    JournaledQueue(tmp_path, "jobs", ship=Ship(store)).close()
    publish_one(tmp_path, b"one")
    assert take_in(tmp_path, "jobs") == 1
    with JournaledQueue(tmp_path, "jobs", ship=Ship(store)) as queue:
        assert queue.shipping is not None
        queue.shipping.flush(PATIENCE)
        assert items_of(store) == {1: b"one"}


def test_a_batch_gets_no_id_that_the_owner_before_may_have_given_out(tmp_path: Path) -> None:
    store = MemoryStore()
    with JournaledQueue(tmp_path / "a", "jobs", ship=Ship(store)) as queue:
        queue.put(b"one")
    restore(store, "jobs", tmp_path / "b")
    JournaledQueue(tmp_path / "b", "jobs", ship=Ship(store)).close()
    publish_one(tmp_path / "b", b"two")
    assert take_in(tmp_path / "b", "jobs") == 1
    with JournaledQueue(tmp_path / "b", "jobs", ship=Ship(store)) as queue:
        assert [item.id > ID_JUMP for item in queue.get_many(5, timeout=0)] == [False, True]


def test_jobs_are_not_written_again_and_again_while_the_store_is_away(tmp_path: Path, slow: Slow) -> None:
    clock = ManualClock(1_700_000_000_000)
    calls = [0]
    real = Compactor.compact

    def compact(self: Compactor) -> None:
        calls[0] += 1
        assert calls[0] < 100, "the journal is compacted without end"
        real(self)

    ship = Ship(slow, interval=0, close_timeout=0.1)
    queue = WorkQueue(tmp_path, "jobs", segment_bytes=4096, max_job_bytes=1000, clock=clock, ship=ship)
    slow.is_away = True
    with patch.object(Compactor, "compact", compact), queue.session() as session:
        queue.put(b"stays", delay=1000)
        for _ in range(60):
            queue.put(b"x" * 1000)
            session.reserve(0).delete()
        clock.advance(100)
        was = queue.stats().journal_bytes
        clock.advance(1000)
        assert queue.stats().journal_bytes - was < 3 * 4096
    assert calls[0] > 0
    with pytest.raises(NotShipped):
        queue.close()
