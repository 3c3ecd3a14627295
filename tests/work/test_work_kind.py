"""A work queue is told from other queues by what is on disk, whoever comes, and refused by who knows no jobs."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import (
    CorruptJournal,
    JournaledQueue,
    KestrelError,
    UnsupportedFormat,
    WrongKind,
    inspect,
    open_reader,
    queue_names,
    scan,
    verify,
)
from kestrelpy._disk.interface import Disk
from kestrelpy.cli import main
from kestrelpy.inbox import PartWriter, publish, take_in
from kestrelpy.testing import CrashingDisk, FailingDisk, ManualClock, MemoryDisk
from kestrelpy.testing._crash import PowerModel
from kestrelpy.work import WorkQueue
from kestrelpy.work.journal import JobJournal

MARK = "work.work"


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()


def opened(disk: Disk, **options: Any) -> WorkQueue:
    clock = ManualClock(1_700_000_000_000)
    return WorkQueue("/wq", clock=clock, disk=disk, segment_bytes=8192, max_job_bytes=4000, **options)


def kill(disk: MemoryDisk, queue: WorkQueue) -> None:
    disk.kill()
    with contextlib.suppress(OSError, KestrelError):
        queue.close()  # nothing is saved any more


def plain(disk: MemoryDisk) -> JournaledQueue:
    return JournaledQueue("/wq", "work", disk=disk, segment_bytes=8192, inbox_interval=None)


def unmark(disk: MemoryDisk) -> None:
    """As the version before left it."""
    disk.directory("/wq").unlink(MARK)


def published(disk: MemoryDisk) -> None:
    with PartWriter("/wq", "work", disk=disk) as writer:
        writer.add([b"hello"])
        publish("/wq", "work", [writer.seal()], disk=disk)


CALLS: dict[str, Callable[[MemoryDisk], object]] = {
    "JournaledQueue": plain,
    "open_reader": lambda disk: open_reader("/wq", "work", "x", disk=disk),
    "the default reader": lambda disk: open_reader("/wq", "work", "", disk=disk),
    "PartWriter": lambda disk: PartWriter("/wq", "work", disk=disk),
    "publish": lambda disk: publish("/wq", "work", [], app_id="a", version=1, disk=disk),
    "take_in": lambda disk: take_in("/wq", "work", disk=disk),
}


@pytest.mark.parametrize("jobs", [0, 5])
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("name", CALLS)
def test_a_work_queue_is_refused_by_name(disk: MemoryDisk, name: str, closed: bool, jobs: int) -> None:
    queue = opened(disk)
    for number in range(jobs):
        queue.put(b"%d" % number)
    if closed:
        queue.close()
    else:
        kill(disk, queue)
    before = sorted(disk.directory("/wq").names())
    with pytest.raises(WrongKind, match=r"/wq/work is a work queue: use kestrelpy\.work"):
        CALLS[name](disk)
    left = {"work.lock", "work.readers.lock"}
    assert set(disk.directory("/wq").names()) - left == set(before) - left
    with opened(disk) as queue:
        assert [job.id for job in queue.jobs()] == [*range(1, jobs + 1)]
        assert queue.put(b"next") == jobs + 1


def test_those_who_look_say_what_it_is(disk: MemoryDisk) -> None:
    with opened(disk) as queue:
        queue.put(b"job")
    assert queue_names("/wq", disk=disk) == ["work"]
    assert inspect("/wq", "work", disk=disk).kind == "work queue"
    report = verify("/wq", "work", disk=disk)
    assert (report.ok, report.kind, report.unknown_files) == (True, "work queue", ())
    assert len(list(scan("/wq", "work", disk=disk))) > 0
    with JournaledQueue("/wq", "jobs", disk=disk) as items:
        items.put(b"item")
    assert inspect("/wq", "jobs", disk=disk).kind == verify("/wq", "jobs", disk=disk).kind == "queue"


@pytest.mark.parametrize("settled", [True, False])
def test_one_of_the_version_before_is_opened_and_marked(disk: MemoryDisk, settled: bool) -> None:
    queue = opened(disk)
    queue.put_many([b"a", b"b"])
    if settled:
        queue.delete(1)
        queue.delete(2)
        queue.checkpoint()
    kill(disk, queue)
    unmark(disk)
    with opened(disk) as queue:
        assert queue.put(b"c") == 3
    with pytest.raises(WrongKind):
        plain(disk)


def test_one_of_the_version_before_opens_where_no_file_can_be_made(
    disk: MemoryDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(disk) as queue:
        queue.put(b"a")
    unmark(disk)

    def fail(_: JobJournal) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patched:
        patched.setattr(JobJournal, "_mark_as_jobs", fail)
        with opened(disk) as queue:
            assert queue.peek(1).body == b"a"
    assert "could not be marked" in caplog.text
    opened(disk).close()
    assert MARK in disk.directory("/wq").names()


def items(disk: MemoryDisk) -> None:
    with plain(disk) as queue:
        queue.put(b"hello")


def consumed(disk: MemoryDisk) -> None:
    with plain(disk) as queue:
        queue.put(b"hello")
        queue.get(timeout=0).commit()


def watched(disk: MemoryDisk) -> None:
    """Nothing was put yet, and a reader waits for it."""
    open_reader("/wq", "work", "monitor", create=True, disk=disk).close()


def watched_items(disk: MemoryDisk) -> None:
    items(disk)
    watched(disk)


@pytest.mark.parametrize("make", [items, consumed, watched, watched_items, published])
def test_what_is_no_work_queue_is_left_as_it_is(disk: MemoryDisk, make: Callable[[MemoryDisk], None]) -> None:
    disk.directory("/wq", create=True)
    make(disk)
    with pytest.raises(WrongKind, match=r"/wq/work is a queue and no work queue.*use kestrelpy\.JournaledQueue"):
        opened(disk)
    assert MARK not in disk.directory("/wq").names()
    with plain(disk) as queue:
        assert queue.put(b"more") > 0


def test_what_is_no_work_queue_keeps_what_it_is_to_archive(disk: MemoryDisk) -> None:
    """To be opened as what it is not retired the segments that are done with, which its owner would have archived."""
    with JournaledQueue("/wq", "work", disk=disk, segment_bytes=8192, inbox_interval=None, archive_dir="/old") as queue:
        for _ in range(20):
            queue.put(bytes(600))
    reader = open_reader("/wq", "work", "monitor", create=True, start="earliest", disk=disk)
    reader.commit_many(reader.get_many(20))
    reader.checkpoint(durable=True)
    reader.close()
    before = segments(disk)
    assert len(before) > 1
    with pytest.raises(WrongKind):
        opened(disk)
    assert segments(disk) == before


def segments(disk: MemoryDisk) -> list[str]:
    return sorted(name for name in disk.directory("/wq").names() if name.endswith(".segment"))


@pytest.mark.parametrize("marked", [True, False])
def test_what_was_published_for_it_all_the_same_is_never_taken_in(
    disk: MemoryDisk, marked: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(disk) as queue:
        queue.put(b"a")
    with monkeypatch.context() as before:  # the version before let it in
        before.setattr("kestrelpy.inbox.publishing.refuse_jobs_in", lambda *_: None)
        before.setattr("kestrelpy.inbox.parts.refuse_jobs_in", lambda *_: None)
        published(disk)
    if not marked:
        unmark(disk)
    with opened(disk) as queue:
        assert [job.id for job in queue.jobs()] == [1]
    assert "1 batches in its inbox are never ingested" in caplog.text


def test_a_queue_that_was_opened_and_never_used_may_become_one(disk: MemoryDisk) -> None:
    plain(disk).close()
    with opened(disk) as queue:
        assert queue.put(b"a") == 1


@pytest.mark.parametrize("item", [b"hello", b"", b"\x01 short"])
def test_an_item_among_the_jobs_is_damage(disk: MemoryDisk, item: bytes) -> None:
    """The version before let it in."""
    with opened(disk) as queue:
        queue.put(b"a")
    unmark(disk)
    with plain(disk) as queue:
        queue.put(item)
    with pytest.raises(CorruptJournal, match=r"no record of a job.*something else than kestrelpy\.work"):
        opened(disk)


def test_a_record_of_a_later_version_is_no_damage(disk: MemoryDisk) -> None:
    with opened(disk) as queue:
        queue.put(b"a")
        assert queue._core.journal is not None
        queue._core.journal.append(b"\x07 new")
    with pytest.raises(UnsupportedFormat):
        opened(disk)


def test_the_mark_is_there_before_anything_else_at_every_operation() -> None:
    """Wherever the first opening and the first put are cut short, by a kill or a power cut: what looks like a queue
    with items is marked, and it opens.
    """
    cut = True
    number = seen = 0
    while cut:
        number += 1
        inner = CrashingDisk()
        disk = FailingDisk(inner, mapped=False)
        disk.arm(errno.EIO, at=number, sticky=True)
        with contextlib.suppress(OSError, KestrelError), opened(disk, sync="always") as queue:
            queue.put(b"a")
        cut = disk.failures > 0
        for state in (inner.after_kill(), *inner.power_states(PowerModel.ANY, 4, seed=number)):
            with contextlib.suppress(FileNotFoundError):
                there = inspect("/wq", "work", disk=state)
                assert there.kind == "work queue" or not there.put_items
                seen += bool(there.put_items)
            opened(state).close()
            assert inspect("/wq", "work", disk=state).kind == "work queue"
    assert seen


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path)
    with WorkQueue(folder) as queue:
        queue.put(b"job")
    for arguments in (["put", folder, "work", "/dev/null"], ["get", folder, "work"], ["peek", folder, "work"]):
        assert main(arguments) == 1
        assert "is a work queue: use kestrelpy.work" in capsys.readouterr().err
    assert main(["drop-reader", folder, "work", "x"]) == 1
    for command in ("stat", "verify"):
        assert main([command, folder, "work"]) == 0
        assert "work queue" in capsys.readouterr().out
    assert main(["ls", folder]) == 0
    assert "(work queue)" in capsys.readouterr().out
    assert main(["scan", folder, "work"]) == 0
    assert "work queue" in capsys.readouterr().err


def test_spark_refuses_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("pyspark", reason="the extra [spark] is not installed")
    from pyspark.sql.types import BinaryType, StructType

    from kestrelpy.spark import DriverBuffer
    from kestrelpy.spark.lake.archived import segments_of
    from kestrelpy.spark.read.batch import queues_of
    from kestrelpy.spark.read.folder_feed import open_source
    from kestrelpy.spark.write.sink import BatchSink

    folder = str(tmp_path)
    with WorkQueue(folder) as queue:
        queue.put(b"job")
        with pytest.raises(TypeError, match="WorkQueue work"):
            DriverBuffer(queue, None, print)  # type: ignore[arg-type]
    JournaledQueue(folder, "items").close()
    calls: list[Callable[[], object]] = [
        lambda: queues_of((folder,), "work"),
        lambda: BatchSink({"path": folder, "queue": "work"}, StructType().add("data", BinaryType()), overwrite=False),
        lambda: open_source(folder, "work", "spark", "earliest"),
        lambda: segments_of([path.name for path in tmp_path.iterdir()], folder),
    ]
    for call in calls:
        with pytest.raises(WrongKind, match="/work is a work queue"):
            call()
    assert queues_of((folder,), None) == ["items"]
    assert "left out" in caplog.text
