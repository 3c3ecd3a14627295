"""Spools: what a process leaves is brought by the next one, once, whatever fails on the way."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import DurabilityUnknown, JournaledQueue, QueueClosed, inbox, queue_names, scan
from kestrelpy.logging import DurableHandler, collect, spool
from kestrelpy.logging.courier import Courier
from kestrelpy.logging.spool import Spool, SpoolSweep, spools_of


def left(folder: Path, *items: bytes) -> str:
    """A spool with items that nobody has published; its name."""
    found = Spool.open(str(folder), "logs")
    for data in items:
        found.put(data)
    found.journal.close()
    return found.journal.name


def stored(folder: Path) -> list[bytes]:
    inbox.take_in(folder, "logs")
    return [record.data for record in scan(folder, "logs")]


def test_collect_brings_what_was_left_once(tmp_path: Path) -> None:
    left(tmp_path, b"a", b"b")
    assert collect(tmp_path, "logs") == 2
    assert collect(tmp_path, "logs") == 0
    assert stored(tmp_path) == [b"a", b"b"]


def test_collect_where_there_is_nothing(tmp_path: Path) -> None:
    assert collect(tmp_path / "nowhere", "logs") == 0
    assert collect(str(tmp_path), "logs") == 0
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_lives_keeps_its_records(tmp_path: Path) -> None:
    mine = Spool.open(str(tmp_path), "logs")
    mine.put(b"mine")
    assert collect(tmp_path, "logs") == 0
    assert mine.publish() == 1
    mine.journal.close()
    assert stored(tmp_path) == [b"mine"]


def test_spools_are_used_again_and_older_records_come_first(tmp_path: Path) -> None:
    name = left(tmp_path, b"old")
    again = Spool.open(str(tmp_path), "logs")
    second = Spool.open(str(tmp_path), "logs")
    assert (again.journal.name == name, second.journal.name == name) == (True, False)
    again.put(b"new")
    again.publish()
    for each in (again, second):
        each.journal.close()
    assert stored(tmp_path) == [b"old", b"new"]
    assert len(spools_of(str(tmp_path), "logs")) == 2
    assert queue_names(tmp_path) == ["logs"]


@pytest.mark.parametrize("moment", ["before it is published", "after it is published"])
def test_a_batch_that_fails_is_published_once(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = inbox.publish

    def failing(*arguments: Any, **options: Any) -> bool:
        if moment == "after it is published":
            publish(*arguments, **options)
        raise OSError("the network is away")

    mine = Spool.open(str(tmp_path), "logs")
    mine.put(b"a")
    with monkeypatch.context() as patched:
        patched.setattr(inbox, "publish", failing)
        with pytest.raises(OSError, match="away"):
            mine.publish()
    mine.put(b"b")
    mine.publish()
    mine.journal.close()
    assert stored(tmp_path) == [b"a", b"b"]


def killed_after_publishing(folder: Path) -> list[bytes]:
    """What arrives of a process that was killed before it had committed what was published, and of the next one."""
    name = left(folder, b"a", b"b")
    mine = Spool(str(folder), "logs", name)
    mine._publish(mine.journal.reader().get_many(9), 2)
    mine.journal.close()
    assert inbox.pending(folder, "logs") == 1
    again = Spool(str(folder), "logs", name)
    again.put(b"c")
    again.publish()
    again.journal.close()
    return stored(folder)


def test_a_kill_after_the_batch_is_published(tmp_path: Path) -> None:
    """The commit is lost, and with it that the batch was published: the version says it."""
    assert killed_after_publishing(tmp_path) == [b"a", b"b", b"c"]


def test_a_spool_that_does_not_ask_for_the_version_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above sees what it is for."""
    monkeypatch.setattr(inbox, "last_version", lambda *_: None)
    assert killed_after_publishing(tmp_path) == [b"a", b"b", b"a", b"b", b"c"]


def test_many_records_are_several_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "MOST_ITEMS", 3)
    left(tmp_path, *(b"%d" % number for number in range(8)))
    assert collect(tmp_path, "logs") == 8
    assert inbox.pending(tmp_path, "logs") == 3
    assert stored(tmp_path) == [b"%d" % number for number in range(8)]


def test_records_that_come_meanwhile_wait_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a busy process would publish one batch after the other, each of a few records."""
    publish = inbox.publish
    mine = Spool.open(str(tmp_path), "logs")

    def while_others_come(*arguments: Any, **options: Any) -> bool:
        mine.put(b"meanwhile")
        return publish(*arguments, **options)

    mine.put(b"a")
    with monkeypatch.context() as patched:
        patched.setattr(inbox, "publish", while_others_come)
        assert mine.publish() == 1
    assert inbox.pending(tmp_path, "logs") == 1
    assert mine.publish() == 1
    mine.journal.close()
    assert stored(tmp_path) == [b"a", b"meanwhile"]


def test_a_record_that_the_queue_does_not_take(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is named in the log, and holds up nobody."""
    JournaledQueue(tmp_path, "logs", max_item_bytes=100).close()
    left(tmp_path, b"small", bytes(101), b"small too")
    collect(tmp_path, "logs")
    assert stored(tmp_path) == [b"small", b"small too"]
    assert "a log record for queue logs is dropped: an item of 101 bytes" in caplog.text


def test_a_spool_that_is_damaged_holds_up_nobody(tmp_path: Path) -> None:
    name = left(tmp_path, b"a")
    for path in (tmp_path / "spool" / "logs").glob(f"{name}.*.segment"):
        path.write_bytes(b"x" * 200)
    handler = DurableHandler("logs", tmp_path)
    handler.handle(logging.makeLogRecord({"msg": "good", "name": "x", "levelno": 20}))
    assert handler.failed_count == 0
    handler.close()
    assert len(stored(tmp_path)) == 1


def test_trouble_is_logged_once_and_records_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any, **__: Any) -> bool:
        raise OSError("the disk is away")

    courier = Courier(str(tmp_path), "logs", 1000)
    courier.put(b"a")
    with monkeypatch.context() as patched:
        patched.setattr(inbox, "publish", failing)
        for _ in range(3):
            courier.flush()
    assert caplog.text.count("can't be published") == 1
    courier.close()
    assert caplog.text.count("are published again") == 1
    assert stored(tmp_path) == [b"a"]


def test_a_spool_whose_sync_has_failed_is_opened_again(tmp_path: Path) -> None:
    """Its records are there, and those that come are stored."""
    courier = Courier(str(tmp_path), "logs", 1000)
    courier.put(b"a")
    failed: Any = courier._spool
    failed.journal._syncer.fail(DurabilityUnknown(str(tmp_path), 1, 1, OSError("EIO")), reported=True)
    courier.put(b"b")
    assert courier._spool is not failed
    courier.close()
    collect(tmp_path, "logs")
    assert sorted(stored(tmp_path)) == [b"a", b"b"]


def test_a_put_ends_though_every_spool_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    courier = Courier(str(tmp_path), "logs", 1000)
    courier.put(b"a")
    closed: Any = courier._spool
    closed.journal.close()
    with pytest.raises(QueueClosed, match="can't be stored"):
        courier.put(b"b")
    courier._spool = None
    courier.put(b"c")
    courier.close()
    assert stored(tmp_path) == [b"a", b"c"]


def test_the_sweep_collects_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "SWEEP_SECONDS", 0.01)
    sweep = SpoolSweep(str(tmp_path), "logs")
    with JournaledQueue(tmp_path, "logs", inbox_interval=0.01) as queue:
        for data in (b"a", b"b"):
            left(tmp_path, data)
            assert queue.get(timeout=20).data == data
    sweep.stop()
    assert sweep._timer is None


def test_a_sweep_that_nobody_has_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gc
    import weakref

    sweep = SpoolSweep(str(tmp_path), "logs")
    watch = weakref.ref(sweep)
    del sweep
    gc.collect()
    assert watch() is None
