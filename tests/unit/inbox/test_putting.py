"""``inbox.put_many``: a part and its batch in one call."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import ItemTooLarge, JournaledQueue, WrongKind, open_reader, scan, verify
from kestrelpy.codecs import JSON
from kestrelpy.inbox import PartWriter, last_version, pending, publish, put_many, take_in
from kestrelpy.logging import DurableHandler, collect
from kestrelpy.testing import FailingDisk, ManualClock, MemoryDisk
from kestrelpy.work import JobsOutside, WorkQueue
from tests.support.queues import START_MS

NAME = "jobs"


def data_of(folder: Path | str, **options: Any) -> list[bytes]:
    return [record.data for record in scan(folder, NAME, **options)]


def test_items_come_in_order_and_all_at_once(tmp_path: Path) -> None:
    items = [b"%d" % number for number in range(2500)]
    assert put_many(tmp_path, NAME, iter(items))
    assert pending(tmp_path, NAME) == 1
    with JournaledQueue(tmp_path, NAME) as queue:
        assert [item.data for item in queue.get_many(3000)] == items
        assert put_many(tmp_path, NAME, [b"while it is open"])
        queue.take_in()
        assert queue.get(timeout=0).data == b"while it is open"


def test_values_go_through_the_codec(tmp_path: Path) -> None:
    assert put_many(tmp_path, NAME, [{"a": 1}, None], codec=JSON)
    with JournaledQueue(tmp_path, NAME, codec=JSON) as queue:
        assert [item.value for item in queue.get_many(2)] == [{"a": 1}, None]


def test_a_version_is_put_once(tmp_path: Path) -> None:
    assert put_many(tmp_path, NAME, [b"a"], app_id="nightly", version=1)
    assert not put_many(tmp_path, NAME, [b"b"], app_id="nightly", version=1)
    assert put_many(tmp_path, NAME, [], app_id="nightly", version=2)
    assert put_many(tmp_path, NAME, [])
    take_in(tmp_path, NAME)
    assert data_of(tmp_path) == [b"a"]
    assert not [name for name in os.listdir(tmp_path / "inbox") if name.endswith(".part")]


def test_items_expire(tmp_path: Path, clock: ManualClock) -> None:
    put_many(tmp_path, NAME, [b"soon"], expires_ms=START_MS + 1000, clock=clock)
    put_many(tmp_path, NAME, [b"never"], clock=clock)
    clock.advance(2)
    with JournaledQueue(tmp_path, NAME, clock=clock) as queue:
        assert [item.data for item in queue.get_many(5, timeout=0)] == [b"never"]


@pytest.mark.parametrize(
    ("error", "items", "about"),
    [
        (TypeError, ["text"], {}),
        (TypeError, [b"x", {}], {"codec": JSON, "version": 0, "app_id": "a"}),
        (ItemTooLarge, [b"x" * 101], {}),
        (ValueError, [b"x"], {"version": 1}),
        (ValueError, [b"x"], {"app_id": ""}),
        (ZeroDivisionError, (1 // (2 - number) for number in range(3)), {"codec": JSON}),
    ],
    ids=["no bytes", "a codec", "too large", "no app_id", "an empty app_id", "the caller's own"],
)
def test_what_fails_puts_nothing_and_leaves_nothing(
    tmp_path: Path, error: type[Exception], items: Any, about: dict[str, Any]
) -> None:
    JournaledQueue(tmp_path, NAME, max_item_bytes=100).close()
    with pytest.raises(error):
        put_many(tmp_path, NAME, items, **about)
    assert pending(tmp_path, NAME) == 0
    inbox = tmp_path / "inbox"
    assert not inbox.exists() or not [path for path in inbox.iterdir() if path.suffix == ".part"]


@pytest.mark.parametrize("expires_ms", [1.5, "1", True, 1 << 63, -1])
def test_an_instant_that_is_none(tmp_path: Path, expires_ms: Any) -> None:
    """It is refused where it is given: items that were added before are put."""
    with PartWriter(tmp_path, NAME) as writer:
        writer.add([b"before"])
        with pytest.raises((TypeError, ValueError), match="expires_ms must"):
            writer.add([b"x"], expires_ms=expires_ms)
        with pytest.raises((TypeError, ValueError), match="expires_ms must"):
            writer.add_packed(bytes([1, 0, 0, 0]), b"x", 1, expires_ms=expires_ms)
        assert publish(tmp_path, NAME, [writer.seal()])
    take_in(tmp_path, NAME)
    assert data_of(tmp_path) == [b"before"]


@pytest.mark.parametrize("items", [[], [b"x"]])
def test_a_codec_that_is_none(tmp_path: Path, items: list[bytes]) -> None:
    with pytest.raises(TypeError, match="codec must have encode"):
        put_many(tmp_path, NAME, items, codec=5)  # type: ignore[arg-type]


def test_a_folder_of_bytes_is_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ``repr`` was the name of another folder, in the current one, and nobody got what was put there."""
    monkeypatch.chdir(tmp_path)
    folder: Any = os.fsencode(tmp_path / "queues")
    handler = DurableHandler(NAME, folder)
    try:
        with JournaledQueue(folder, NAME) as queue:
            assert queue.directory == str(tmp_path / "queues")
            assert put_many(folder, NAME, [b"x"])
            assert pending(folder, NAME) == 1
            assert queue.take_in() == 1
            handler.handle(logging.makeLogRecord({"msg": "m", "levelno": 20}))
            handler.flush()
            assert pending(folder, NAME) == 1
            assert verify(folder, NAME).batches == 1
        assert collect(folder, NAME) == 0
        assert take_in(folder, NAME) == 1
        assert last_version(folder, NAME, "nobody") is None
        with open_reader(folder, NAME, "second", create=True, start="earliest") as reader:
            assert [len(item.data) > 1 for item in reader.get_many(5)] == [False, True]
    finally:
        handler.close()
    with WorkQueue(folder, "work") as work:
        work.put(b"job")
    outside = JobsOutside(folder, "work")
    outside.look()
    assert len(list(outside.jobs())) == 1
    assert os.listdir(tmp_path) == ["queues"]


def test_a_work_queue_takes_none(tmp_path: Path) -> None:
    WorkQueue(tmp_path, NAME).close()
    with pytest.raises(WrongKind):
        put_many(tmp_path, NAME, [b"x"])


def test_a_disk_that_fails_at_any_operation() -> None:
    """Nothing is there, or all of it once; and nothing is left over that could still be removed."""
    seen, at, is_over = set(), 0, False
    while not is_over:
        at += 1
        disk = FailingDisk(MemoryDisk())
        disk.directory("/data", create=True).close()
        disk.arm(errno.EIO, at=at)
        try:
            is_new = put_many("/data", NAME, [b"a", b"b"], disk=disk)
        except OSError:
            is_new = False
        is_over = disk.armed
        disk.disarm()
        take_in("/data", NAME, disk=disk)
        found = data_of("/data", disk=disk)
        assert found in ([], [b"a", b"b"])
        assert found or not is_new
        seen.add((is_new, bool(found)))
    assert seen >= {(False, False), (True, True)}


def test_many_threads_at_once(tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=put_many, args=(tmp_path, NAME, [b"%d %d" % (who, item) for item in range(20)]))
        for who in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with JournaledQueue(tmp_path, NAME) as queue:
        found = [item.data for item in queue.get_many(1000)]
    for who in range(8):
        mine = [data for data in found if data.startswith(b"%d " % who)]
        assert mine == [b"%d %d" % (who, item) for item in range(20)]
        first = found.index(mine[0])
        assert found[first : first + 20] == mine
