"""Damage in the journal of a work queue: refused, or gone on without, with the jobs in doubt in the log."""

from __future__ import annotations

import re
from typing import Literal

import pytest

from kestrelpy import CorruptJournal, JournaledQueue, verify
from kestrelpy.testing import ManualClock, MemoryDisk
from kestrelpy.work import WorkQueue

BODY = b"body of job %03d"


def opened(disk: MemoryDisk, on_corruption: Literal["raise", "quarantine"] = "raise") -> WorkQueue:
    return WorkQueue(
        "/wq",
        clock=ManualClock(1_700_000_000_000),
        disk=disk,
        segment_bytes=4096,
        max_job_bytes=2000,
        on_corruption=on_corruption,
    )


def spoil(disk: MemoryDisk, wanted: bytes) -> None:
    """Flip a bit of the last one of these bytes there is in a segment."""
    folder = disk.directory("/wq")
    for name in folder.names():
        file = folder.open(name, write=True)
        at = file.read(0, file.size()).rfind(wanted) if name.endswith(".segment") else -1
        if at >= 0:
            file.write(at, bytes([file.read(at, 1)[0] ^ 1]))
            return
    raise AssertionError(f"{wanted!r} is nowhere")


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()


def test_one_bad_byte_costs_one_job(disk: MemoryDisk, caplog: pytest.LogCaptureFixture) -> None:
    with opened(disk) as queue:
        for number in range(1, 101):
            queue.put(BODY % number)
    spoil(disk, BODY % 40)
    with pytest.raises(CorruptJournal):
        opened(disk)
    with opened(disk, "quarantine") as queue:
        assert [job.id for job in queue.jobs()] == [each for each in range(1, 101) if each != 40]
        found = re.search(r"records 40 are .* of jobs 40, .* to jobs 1-39 may be forgotten", caplog.text)
        assert found, caplog.text
        queue._check()
        with queue.session() as session:
            assert [session.reserve(0).body for _ in range(99)] == [BODY % n for n in range(1, 101) if n != 40]
        assert queue.put(b"next") == 101


def test_what_is_damaged_goes_when_what_lives_there_was_written_anew(disk: MemoryDisk) -> None:
    with opened(disk) as queue:
        for number in range(1, 101):
            queue.put(BODY % number)
        queue.put(b"later", delay=1000)
    spoil(disk, BODY % 40)
    with opened(disk, "quarantine") as queue:
        queue.checkpoint()
        assert queue.stats().records_migrated >= 39
        queue._check()
    assert verify("/wq", "work", disk=disk).ok
    kept = [name for name in disk.directory("/wq").names() if name.endswith(".quarantine")]
    assert len(kept) == 1
    with opened(disk) as queue:
        assert len(list(queue.jobs())) == 100
        assert queue.stats_job(101).time_left == 1000


def test_a_lost_delete_brings_the_job_back_and_says_so(disk: MemoryDisk, caplog: pytest.LogCaptureFixture) -> None:
    queue = opened(disk)
    queue.put_many([b"a", b"b", b"c"])
    queue.delete(2)
    queue.put(b"last")
    assert queue._core.journal is not None
    gone = queue._core.journal.queue.stats().tail_id - 1
    queue.close()
    spoil(disk, b"\x04\x00\x02\x00\x00\x00\x00\x00\x00\x00")
    with opened(disk, "quarantine") as queue:
        assert [job.id for job in queue.jobs()] == [1, 2, 3, 4]
    assert f"records {gone} are" in caplog.text
    assert "to jobs 1-3 may be forgotten" in caplog.text


def test_no_id_is_given_out_again_because_its_record_is_lost(disk: MemoryDisk) -> None:
    queue = opened(disk)
    queue.put(b"a")
    queue.checkpoint()
    last = queue.put(b"damaged")
    queue.sync()
    assert queue._core.journal is not None
    queue._core.journal.queue.checkpoint(durable=True)
    queue._core.journal.queue._journal.rotate()
    disk.kill()
    queue._abandon()
    spoil(disk, b"damaged")
    with opened(disk, "quarantine") as queue:
        assert queue.put(b"next") > last


def test_an_item_that_is_no_record_is_passed_over(disk: MemoryDisk, caplog: pytest.LogCaptureFixture) -> None:
    """The version before let it in."""
    with opened(disk) as queue:
        queue.put(b"a")
    disk.directory("/wq").unlink("work.work")
    with JournaledQueue("/wq", "work", disk=disk, segment_bytes=4096, inbox_interval=None) as items:
        at = items.put(b"hello")
    with opened(disk, "quarantine") as queue:
        assert [job.id for job in queue.jobs()] == [1]
        queue.checkpoint()
    assert f"records {at} are" in caplog.text
    with opened(disk) as queue:
        assert queue.peek(1).body == b"a"


def test_the_option_is_checked() -> None:
    for disk in (None, MemoryDisk()):
        with pytest.raises(ValueError, match="on_corruption"):
            WorkQueue(None if disk is None else "/wq", disk=disk, on_corruption="skip")  # type: ignore[call-overload]
