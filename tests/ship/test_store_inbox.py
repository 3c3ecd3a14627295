"""The inbox in the store, on the owner's side: each batch once, whatever happens to the owner; and bad objects."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kestrelpy import CorruptJournal, JournaledQueue, KestrelError, QueueEmpty, ReaderConfig, inbox
from kestrelpy._disk.real import RealDisk
from kestrelpy.inbox.format import LedgerState, StoreMark, decode_ledger, encode_ledger
from kestrelpy.inbox.ingest import Ingest
from kestrelpy.ship import (
    NotShipped,
    PartUploader,
    Ship,
    StoreUnavailable,
    detach,
    fetching,
    in_objects,
    publish,
    restore,
    store_inbox,
)
from kestrelpy.ship.slots import ShippedLedger
from kestrelpy.ship.store_inbox import StoreInbox
from kestrelpy.testing import FailingDisk
from kestrelpy.testing.stores import MemoryStore, SimulatedStore
from tests.ship.in_store import items_of, log_of
from tests.ship.owner_explorer import single_threaded
from tests.ship.test_publishing import uploaded
from tests.ship.test_shipped_inbox import ship_all
from tests.support import seaweed
from tests.support.patience import PATIENCE, until


def put_there(store: Any, *items: bytes, **options: Any) -> bool:
    return publish(store, "jobs", uploaded(store, *items), **options)


def opened(folder: Path, store: Any, *, interval: float | None = 0.01, **options: Any) -> JournaledQueue:
    shipped = Ship(store, interval=0, inbox_interval=interval, close_timeout=5.0)
    return JournaledQueue(folder, "jobs", segment_bytes=8192, ship=shipped, inbox_interval=None, **options)


def inbox_of(queue: JournaledQueue) -> StoreInbox:
    assert queue._shipment is not None
    assert queue._shipment._inbox is not None
    return queue._shipment._inbox


def look(queue: JournaledQueue, times: int = 1) -> None:
    """On this thread, as its thread would."""
    for _ in range(times):
        inbox_of(queue)._look_once()


def got(queue: JournaledQueue) -> list[bytes]:
    found: list[bytes] = []
    with contextlib.suppress(QueueEmpty):
        while True:
            found.append(queue.get(block=False).data)
    return found


def status(queue: JournaledQueue) -> Any:
    assert queue.shipping is not None
    return queue.shipping.status()


@pytest.fixture
def store(tmp_path: Path) -> MemoryStore:
    """A store that has the queue, without an item."""
    made = MemoryStore()
    opened(tmp_path / "first", made, interval=None).close()
    return made


@pytest.fixture
def queue(tmp_path: Path, store: MemoryStore) -> Iterator[JournaledQueue]:
    """Looks when a test says so."""
    with opened(tmp_path / "first", store, interval=None) as made:
        yield made


# -- once ------------------------------------------------------------------------------------------------------------


def test_batches_are_taken_in_by_themselves(tmp_path: Path, store: MemoryStore) -> None:
    with opened(tmp_path / "first", store) as queue:
        for at in range(5):
            assert put_there(store, b"%d" % at, b"and %d" % at, wait=PATIENCE)
        assert got(queue) == [each for at in range(5) for each in (b"%d" % at, b"and %d" % at)]
        until(lambda: status(queue).taken_batch == 5)
        assert (status(queue).refused_batches, status(queue).inbox_error) == (0, "")
    assert not (tmp_path / "first" / "inbox").exists() or not list((tmp_path / "first" / "inbox").glob("*.part"))


def test_without_an_interval_nothing_is_looked_for(queue: JournaledQueue, store: MemoryStore) -> None:
    put_there(store, b"1")
    assert inbox_of(queue)._thread is None
    assert got(queue) == []
    look(queue)
    assert got(queue) == [b"1"]


def test_a_batch_that_is_not_there_yet_is_waited_for(queue: JournaledQueue, store: MemoryStore) -> None:
    put_there(store, b"1")
    put_there(store, b"2")
    there = store.contents()
    first = f"jobs/{in_objects.batch_key(1)}"
    store.replace_all({key: data for key, data in there.items() if key != first})  # its create comes late
    look(queue, 3)
    assert got(queue) == []
    store.replace_all({**store.contents(), first: there[first]})
    look(queue, 3)
    assert got(queue) == [b"1", b"2"]


def test_an_owner_that_comes_again_goes_on(tmp_path: Path, store: MemoryStore) -> None:
    for at in range(1, 4):
        put_there(store, b"%d" % at)
        with opened(tmp_path / "first", store, interval=None) as queue:
            look(queue, 3)
            assert status(queue).taken_batch == at
            assert queue.stats().tail_id == at
    restore(store, "jobs", tmp_path / "second")
    put_there(store, b"4")
    with opened(tmp_path / "second", store, interval=None) as queue:
        look(queue, 3)
        assert got(queue) == [b"1", b"2", b"3", b"4"]


def test_a_job_is_remembered_without_an_app_id(queue: JournaledQueue, store: MemoryStore) -> None:
    parts = uploaded(store, b"1")
    publish(store, "jobs", parts)
    look(queue, 2)
    for _ in range(3):
        put_there(store, b"more")
        look(queue, 2)
    assert queue.shipping is not None
    queue.shipping.flush(PATIENCE)
    until(lambda: (ledger := log_of(store).ledger) is not None and ledger.taken == 4)
    assert not publish(store, "jobs", parts)
    # One who does not look into the log publishes it again, and the owner knows it.
    key = "jobs/in/0000000000005.batch"
    data = store.read("jobs/in/0000000000001.batch")
    assert data is not None
    batch = inbox.format.decode_batch_file(data)
    assert batch is not None
    store.create(key, inbox.format.encode_batch_file(batch._replace(number=5)))
    look(queue, 2)
    assert status(queue).taken_batch == 5
    assert got(queue) == [b"1", b"more", b"more", b"more"]


def test_numbers_go_on_when_old_batches_are_deleted(queue: JournaledQueue, store: MemoryStore) -> None:
    for at in (1, 2):
        put_there(store, b"%d" % at)
        look(queue, 2)
    assert queue.shipping is not None
    queue.shipping.flush(PATIENCE)
    until(lambda: len(items_of(store)) == 2)
    store.delete([each.key for each in store.list("jobs/in/")])
    put_there(store, b"3")
    look(queue, 2)
    assert got(queue) == [b"1", b"2", b"3"]


def test_whatever_slot_the_log_ends_with(tmp_path: Path, store: MemoryStore) -> None:
    """An owner takes a batch in, is killed before it has shipped anything of it, and ships it slot by slot."""
    folder, items = tmp_path / "first", [b"%d" % at * 30_000 for at in range(5)]
    options = Ship(store, interval=0, inbox_interval=None, chunk_bytes=64 << 10)
    with single_threaded():
        queue = JournaledQueue(folder, "jobs", segment_bytes=70_000, inbox_interval=None, ship=options)
        put_there(store, *items, app_id="app", version=1)
        queue.put(b"before")
        look(queue, 2)
        queue.put(b"after")
        shipper: Any = queue._shipment._shipper  # type: ignore[union-attr]
        shipper._is_lost = True
        with contextlib.suppress(NotShipped):
            queue.close()
        with JournaledQueue(folder, "jobs", segment_bytes=70_000, inbox_interval=None, ship=options) as queue:
            first = log_of(store).slot
            ship_all(queue, 100)
    last = log_of(store).slot
    assert last >= first + 3
    for slot in range(first, last + 1):
        there = tmp_path / f"slot-{slot}"
        restore(store, "jobs", there, at_slot=slot)
        elsewhere = MemoryStore()
        for each in store.list("jobs/in/"):
            elsewhere.create(each.key, store.read(each.key) or b"")
        detach(there, "jobs")
        ship = Ship(elsewhere, inbox_interval=None)
        with JournaledQueue(there, "jobs", segment_bytes=70_000, ship=ship) as queue:
            look(queue, 3)
            found = got(queue)
        assert [item for item in found if item[:1].isdigit()] == items, slot


@contextlib.contextmanager
def half_taken(tmp_path: Path, store: MemoryStore) -> Iterator[None]:
    """An owner whose log has three of five items of a batch, and whose machine is then lost."""
    queue = opened(tmp_path / "first", store, interval=None)
    queue.put(b"before")
    with PartUploader(store, "jobs", part_bytes=4000) as uploader:
        uploader.add([b"%d" % at * 2500 for at in range(5)])
        publish(store, "jobs", uploader.finish(), app_id="app", version=1)
    append = queue._journal.append_body
    left = 3

    def fail(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "full")
        return append(*arguments)

    with patch.object(queue._journal, "append_body", fail):
        look(queue)
    assert queue.shipping is not None
    until(lambda: len(items_of(store)) == 4)
    try:
        yield
    finally:
        with contextlib.suppress(KestrelError, OSError):
            queue.close()


ITEMS = [b"before", *(b"%d" % at * 2500 for at in range(5))]


@pytest.mark.parametrize("how", ["restore", "opening"])
def test_another_owner_finishes_half_a_batch(tmp_path: Path, store: MemoryStore, how: str) -> None:
    """The parts are fetched by the restore, or by an opening that misses them."""
    with half_taken(tmp_path, store):
        if how == "opening":
            with patch.object(fetching, "fetch_unfinished", lambda *_: (_ for _ in ())):
                restore(store, "jobs", tmp_path / "second")
        else:
            restore(store, "jobs", tmp_path / "second")
            assert len(list((tmp_path / "second" / "inbox").glob("*.batch"))) == 1
        with opened(tmp_path / "second", store, interval=None) as queue:
            look(queue, 2)
            assert got(queue) == ITEMS
            assert status(queue).taken_batch == 1


def test_half_a_batch_whose_parts_are_gone_is_an_error(
    tmp_path: Path, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    with half_taken(tmp_path, store):
        store.delete([each.key for each in store.list("jobs/in/") if each.key.endswith(".part")])
        restore(store, "jobs", tmp_path / "second")
        assert "can't be finished" in caplog.text
        with pytest.raises(CorruptJournal, match="3 of its 5 items are ingested"):
            opened(tmp_path / "second", store, interval=None)
        with opened(tmp_path / "second", store, interval=None, on_corruption="quarantine") as queue:
            look(queue, 2)
            assert status(queue).taken_batch == 1
            assert got(queue) == ITEMS[:4]


def test_a_restored_queue_that_is_not_shipped_finishes_it_too(tmp_path: Path, store: MemoryStore) -> None:
    with half_taken(tmp_path, store):
        restore(store, "jobs", tmp_path / "second")
        with JournaledQueue(tmp_path / "second", "jobs", segment_bytes=8192, ship=False) as queue:
            assert got(queue) == ITEMS


# -- bad objects -----------------------------------------------------------------------------------------------------


def damage_part(store: MemoryStore, change: Any) -> None:
    objects = store.contents()
    (key,) = [key for key in objects if key.endswith(".part")]
    data = change(objects.pop(key)[0])
    if data is not None:
        objects[key] = data, 1
    store.replace_all(objects)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda data: None, "it is not there"),
        (lambda data: data[:200] + b"?" + data[201:], "not intact"),
        (lambda data: data[:-1], "not sealed"),
        (lambda data: b"", "no valid header"),
    ],
    ids=["missing", "changed", "cut", "empty"],
)
def test_a_damaged_part_is_read_again_and_then_refused(
    queue: JournaledQueue, store: MemoryStore, change: Any, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    put_there(store, b"1" * 300)
    whole = store.contents()
    damage_part(store, change)
    look(queue)
    assert word in status(queue).inbox_error
    assert status(queue).taken_batch == 0
    store.replace_all(whole)
    look(queue)
    assert got(queue) == [b"1" * 300]
    assert status(queue).inbox_error == ""
    put_there(store, b"2" * 300)
    objects = {key: each for key, each in store.contents().items() if key not in whole or not key.endswith(".part")}
    store.replace_all(objects)
    damage_part(store, change)
    put_there(store, b"3")
    look(queue, store_inbox.MOST_LOOKS + 1)
    assert (status(queue).taken_batch, status(queue).refused_batches) == (3, 1)
    assert got(queue) == [b"3"]
    assert "is refused" in caplog.text


def test_a_damaged_batch_is_refused_and_its_publisher_goes_on(queue: JournaledQueue, store: MemoryStore) -> None:
    store.create("jobs/in/0000000000001.batch", b"nonsense")
    put_there(store, b"2")
    look(queue, store_inbox.MOST_LOOKS + 1)
    assert got(queue) == [b"2"]
    assert (status(queue).taken_batch, status(queue).refused_batches) == (2, 1)


def test_a_batch_of_a_newer_version_waits(queue: JournaledQueue, store: MemoryStore) -> None:
    store.create("jobs/in/0000000000001.batch", b"KSTRLBAT\x09\0" + bytes(6))
    put_there(store, b"2")
    look(queue, 5)
    assert "format version 9" in status(queue).inbox_error
    assert (status(queue).taken_batch, got(queue)) == (0, [])


def test_a_part_that_is_too_large_is_not_read(
    queue: JournaledQueue, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_there(store, b"1" * 3000)
    read = store.read
    asked: list[int | None] = []

    def note(key: str, start: int = 0, length: int | None = None) -> bytes | None:
        if key.endswith(".part"):
            asked.append(length)
        return read(key, start, length)

    monkeypatch.setattr(store, "read", note)
    monkeypatch.setattr("kestrelpy.ship.in_objects.MOST_PART_BYTES", 1000)
    monkeypatch.setattr(fetching, "MOST_PART_BYTES", 1000)
    look(queue, store_inbox.MOST_LOOKS)
    assert set(asked) == {1001}
    assert (status(queue).taken_batch, status(queue).refused_batches) == (1, 1)


def test_an_item_that_is_too_large(queue: JournaledQueue, store: MemoryStore, tmp_path: Path) -> None:
    put_there(store, bytes(8192))
    put_there(store, b"small")
    look(queue, 3)
    assert got(queue) == [b"small"]
    assert (status(queue).taken_batch, status(queue).refused_batches) == (2, 1)
    assert len(list((tmp_path / "first" / "inbox").glob("*.refused"))) == 1


def test_files_here_have_names_of_our_own(queue: JournaledQueue, store: MemoryStore, tmp_path: Path) -> None:
    folder = tmp_path / "first"
    with inbox.PartWriter(folder, "jobs") as writer:
        writer.add([b"local"])
        mine = writer.seal()
    with PartUploader(store, "jobs") as uploader:
        uploader.add([b"forged"])
        (part,) = uploader.finish()
    data = store.read(f"jobs/in/{part.part_id.hex()}.part")
    assert data is not None
    part_id = bytes.fromhex(mine.name.split(".")[1])
    store.create(f"jobs/in/{part_id.hex()}.part", data)
    publish(store, "jobs", [part._replace(part_id=part_id)])
    before = (folder / "inbox" / mine.name).read_bytes()
    look(queue, 2)
    assert got(queue) == [b"forged"]
    assert (folder / "inbox" / mine.name).read_bytes() == before


# -- room, and a store that is away ----------------------------------------------------------------------------------


def test_a_batch_waits_for_room(tmp_path: Path, store: MemoryStore) -> None:
    limits = ReaderConfig(max_items=2)
    with opened(tmp_path / "first", store, interval=None, default_reader=limits) as queue:
        queue.put(b"before")
        for at in (1, 2):
            put_there(store, b"%d" % at, b"more")
        look(queue, 4)
        assert (queue.stats().tail_id, status(queue).taken_batch) == (1, 0)
        queue.commit(queue.get())
        look(queue, 4)
        assert (queue.stats().tail_id, status(queue).taken_batch) == (3, 1)


def test_the_store_is_away(tmp_path: Path) -> None:
    simulated = SimulatedStore()
    store = simulated.client("owner")
    with opened(tmp_path / "first", store, interval=None) as queue:
        put_there(store, b"1")
        simulated.is_away = True
        look(queue, 5)
        assert "no answer in time" in status(queue).inbox_error
        assert (status(queue).taken_batch, status(queue).refused_batches) == (0, 0)
        queue.put(b"a put does not wait for it")
        simulated.is_away = False
        look(queue, 2)
        assert got(queue) == [b"a put does not wait for it", b"1"]


def test_a_full_disk_is_tried_again(tmp_path: Path, store: MemoryStore) -> None:
    disk = FailingDisk(RealDisk())
    with opened(tmp_path / "first", store, interval=None, disk=disk) as queue:
        put_there(store, b"1" * 100)
        disk.arm(errno.ENOSPC, at=1, kinds={"write"})
        look(queue)
        assert status(queue).inbox_error != ""
        look(queue, 3)
        assert got(queue) == [b"1" * 100]


def test_nothing_happens_after_a_close(tmp_path: Path, store: MemoryStore) -> None:
    queue = opened(tmp_path / "first", store)
    feed = inbox_of(queue)
    queue.close()
    assert feed._thread is not None
    until(lambda: not feed._thread.is_alive())  # type: ignore[union-attr]
    put_there(store, b"1")
    look(queue)
    assert log_of(store).last_id == 0


def test_a_fork_has_no_thread(tmp_path: Path, store: MemoryStore) -> None:
    with opened(tmp_path / "first", store) as queue:
        child = os.fork()
        if not child:
            os._exit(0 if inbox_of(queue)._is_over else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert put_there(store, b"1", wait=PATIENCE)


# -- the ledger ------------------------------------------------------------------------------------------------------


def test_a_ledger_that_was_damaged_does_not_stop_shipping(
    tmp_path: Path, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path / "first", store, interval=None) as queue:
        for at in (1, 2):
            put_there(store, b"%d" % at)
            look(queue, 2)
    (tmp_path / "first" / "inbox" / "jobs.batches").write_bytes(b"nonsense")
    put_there(store, b"3")
    with opened(tmp_path / "first", store, interval=None) as queue:
        assert status(queue).taken_batch == 2
        look(queue, 2)
        assert got(queue) == [b"1", b"2", b"3"]
        assert queue.shipping is not None
        queue.shipping.flush(PATIENCE)
    assert "is behind the store, which has batch 2" in caplog.text
    ledger = log_of(store).ledger
    assert ledger is not None
    assert ledger.taken == 3


def test_a_ledger_in_bytes() -> None:
    state = LedgerState()
    state.note_version("app", 3)
    state.note_taken(4, StoreMark(b"a" * 16, 5, refused=False), remembers=True)
    state.note_taken(5, StoreMark(b"b" * 16, 6, refused=True), remembers=True)
    state.note_taken(7, StoreMark(b"c" * 16, 7, refused=False), remembers=False)
    data = encode_ledger(state, None)
    again, end = decode_ledger(data)
    assert end == len(data)
    assert (again.versions, again.taken, again.marks) == ({"app": 3}, 7, state.marks)
    assert data[8] == 2, "a file that an older library does not take for its own"
    assert ShippedLedger.of(7, state).file() == data
    older, end = decode_ledger(data[:8] + b"\1" + data[9:])
    assert (older.taken, older.versions) == (0, {"app": 3})
    state.forget_marks(6)
    assert list(state.marks) == [5]
    assert encode_ledger(LedgerState(), None)[8] == 1


def test_the_oldest_batches_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrelpy.inbox.format.MOST_MARKS", 3)
    state = LedgerState()
    for number in range(1, 6):
        state.note_taken(number, StoreMark(bytes([number]) * 16, 1, refused=False), remembers=True)
    assert (list(state.marks), state.taken) == ([3, 4, 5], 5)


def test_what_was_refused_before_a_kill_is_kept_aside(
    queue: JournaledQueue, store: MemoryStore, tmp_path: Path
) -> None:
    """Killed between the record that it was refused and the new name of its file."""
    put_there(store, bytes(8192))
    with patch.object(Ingest, "_refuse", lambda *_: None):
        look(queue, 2)
    assert status(queue).taken_batch == 1
    queue.take_in()
    assert len(list((tmp_path / "first" / "inbox").glob("*.refused"))) == 1


# -- a real store ----------------------------------------------------------------------------------------------------


def test_an_object_store(tmp_path: Path, s3: seaweed.Seaweed, caplog: pytest.LogCaptureFixture) -> None:
    url = f"s3://{seaweed.BUCKET}/inbox-{os.getpid()}"
    shipped = Ship(url, interval=0, inbox_interval=0.05, options=s3.options())
    with JournaledQueue(tmp_path / "first", "jobs", ship=shipped) as queue, caplog.at_level(logging.WARNING):
        for at in range(3):
            with PartUploader(url, "jobs", options=s3.options()) as uploader:
                uploader.add([b"%d" % at] * 10)
                parts = uploader.finish()
            for is_new in (True, False):
                done = publish(url, "jobs", parts, app_id="app", version=at, wait=PATIENCE, options=s3.options())
                assert done is is_new
        assert got(queue) == [b"%d" % at for at in range(3) for _ in range(10)]
    assert caplog.text == ""


def test_an_unavailable_store_at_an_opening_is_an_error(tmp_path: Path, store: MemoryStore) -> None:
    """Half a batch cannot be finished now, and may be later."""
    with half_taken(tmp_path, store):
        with patch.object(fetching, "fetch_unfinished", lambda *_: (_ for _ in ())):
            restore(store, "jobs", tmp_path / "second")
        read = store.read

        def fail(key: str, start: int = 0, length: int | None = None) -> bytes | None:
            if key.endswith(".part"):
                raise StoreUnavailable("store", key, "503")
            return read(key, start, length)

        with patch.object(store, "read", fail), pytest.raises(StoreUnavailable):
            opened(tmp_path / "second", store, interval=None)
        with opened(tmp_path / "second", store, interval=None) as queue:
            assert got(queue) == ITEMS
