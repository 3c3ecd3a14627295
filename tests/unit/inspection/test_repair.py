"""``repair``: what it says and leaves alone; the inbox, archives, shipped queues, locks.

``tests/fuzz`` hits every byte, ``tests/crash`` cuts repairs short.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from kestrelpy import (
    CorruptJournal,
    InvalidName,
    JournaledQueue,
    QueueLocked,
    RepairIncomplete,
    RepairRefused,
    open_reader,
    repair,
    scan,
    verify,
)
from kestrelpy._journal.salvage import Salvage
from kestrelpy.inbox import PartWriter, publish
from kestrelpy.inbox.format import Intent, LedgerState, encode_ledger
from kestrelpy.inspection.inbox_check import InboxRepair
from kestrelpy.inspection.repair_files import RepairSteps
from kestrelpy.testing import ManualClock
from tests.support.queues import START_MS, drain, let_die

NAME = "jobs"
pytestmark = pytest.mark.usefixtures("quiet")


def fill(folder: Path, count: int = 12, *, archive: Path | None = None, step: float = 1.0) -> None:
    """Items of 1,000 bytes: three of them fill a segment."""
    clock = ManualClock(START_MS)
    with JournaledQueue(folder, NAME, segment_bytes=4096, clock=clock, archive_dir=archive) as queue:
        for number in range(1, count + 1):
            queue.put(b"%04d" % number * 250)
            clock.advance(step)
        if archive is not None:
            queue.commit_many(queue.get_many(count - 2))
            queue.checkpoint(durable=True)


def hit(path: Path, find: bytes) -> None:
    data = path.read_bytes()
    assert find in data
    path.write_bytes(data.replace(find, b"?" * len(find), 1))


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("jobs.*.segment"))


def ids(folder: Path) -> list[int]:
    return [record.id for record in scan(folder, NAME)]


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- the journal -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1.0, 0.0])  # with 0 no number is free between two segments
def test_what_is_lost_is_said(tmp_path: Path, step: float) -> None:
    fill(tmp_path, step=step)
    second = segments(tmp_path)[1]
    hit(second, b"00050005")
    report = repair(tmp_path, NAME)
    assert report.lost_ids == ((5, 5),)
    (loss,) = report.losses
    assert (loss.path, loss.first_id, loss.last_id, loss.size) == (str(second), 5, 5, 1032)
    assert b"????????0005" in Path(loss.kept).read_bytes()
    assert verify(tmp_path, NAME).ok
    assert ids(tmp_path) == [1, 2, 3, 4, *range(6, 13)]
    with JournaledQueue(tmp_path, NAME) as queue:
        assert [data[:4] for data in drain(queue)] == [b"%04d" % each for each in range(1, 13) if each != 5]
        assert queue.stats().items == queue.stats().bytes == 0


def test_nothing_is_written_if_nothing_is_damaged(tmp_path: Path) -> None:
    fill(tmp_path)
    before = content(tmp_path)
    assert repair(tmp_path, NAME).ok
    assert {name: data for name, data in content(tmp_path).items() if not name.endswith(".lock")} == {
        name: data for name, data in before.items() if not name.endswith(".lock")
    }


def test_a_torn_tail_is_no_damage(tmp_path: Path) -> None:
    queue = JournaledQueue(tmp_path, NAME, sync="never")
    queue.put_many([b"one", b"two"])
    queue.put(b"torn" * 10)
    let_die(queue)
    hit(segments(tmp_path)[0], b"torntorn")
    assert repair(tmp_path, NAME).ok
    assert ids(tmp_path) == [1, 2]


def test_a_segment_that_is_gone(tmp_path: Path) -> None:
    fill(tmp_path)
    segments(tmp_path)[1].unlink()
    assert not verify(tmp_path, NAME).ok
    assert repair(tmp_path, NAME).lost_ids == ((4, 6),)
    assert verify(tmp_path, NAME).ok
    assert ids(tmp_path) == [1, 2, 3, *range(7, 13)]


def test_files_that_are_not_ours_stay(tmp_path: Path) -> None:
    fill(tmp_path)
    others = {
        "notes.txt": b"mine",
        "jobs.txt": b"mine",
        "jobs2.1700000000000.segment": b"another's",
        "jobs+a.batch": b"p",
    }
    for name, data in others.items():
        (tmp_path / name).write_bytes(data)
    hit(segments(tmp_path)[0], b"00020002")
    assert repair(tmp_path, NAME).lost_ids == ((2, 2),)
    assert others.items() <= content(tmp_path).items()


def test_m3_a_reader_whose_checkpoint_is_damaged_begins_again(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, NAME) as queue:
        reader, other = queue.reader("a"), queue.reader("b")
        queue.put_many([b"one", b"two"])
        reader.commit_many(reader.get_many(2))
        other.commit(other.get())
    path = tmp_path / "jobs+a.checkpoint"
    path.write_bytes(b"?" * 100 + path.read_bytes()[100:])
    report = repair(tmp_path, NAME)
    assert report.reset_readers == ("a",)
    assert Path(report.losses[0].kept).read_bytes().startswith(b"?" * 100)
    assert verify(tmp_path, NAME).ok
    with JournaledQueue(tmp_path, NAME) as queue:
        assert drain(queue.reader("a")) == [b"one", b"two"]
        assert drain(queue.reader("b")) == [b"two"]


def test_an_open_queue_or_reader_is_left_alone(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, NAME) as queue:
        queue.put(b"one")
        with pytest.raises(QueueLocked):
            repair(tmp_path, NAME)
    reader = open_reader(tmp_path, NAME, "a", create=True)
    with pytest.raises(QueueLocked):
        repair(tmp_path, NAME)
    reader.close()
    assert repair(tmp_path, NAME).ok


def test_there_must_be_a_queue(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        repair(tmp_path, NAME)
    with pytest.raises(InvalidName):
        repair(tmp_path, "../jobs")
    assert not list(tmp_path.iterdir())


def test_m8_a_shipped_queue_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "q"
    with JournaledQueue(folder, NAME, ship=f"file://{tmp_path}/store") as queue:
        queue.put(b"precious")
    assert repair(folder, NAME).ok
    hit(segments(folder)[0], b"precious")
    before = content(folder)
    for dry_run in (True, False):
        with pytest.raises(RepairRefused, match="it is shipped"):
            repair(folder, NAME, dry_run=dry_run)
    changed = {name for name, data in content(folder).items() if before.get(name) != data}
    assert not {name for name in changed if not name.endswith(".lock")}


def test_what_is_still_to_be_done_is_damaged(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "jobs.repair").write_bytes(b"00000000\n{}")
    with pytest.raises(RepairIncomplete):
        JournaledQueue(tmp_path, NAME)
    with pytest.raises(RepairIncomplete):
        verify(tmp_path, NAME)
    with pytest.raises(CorruptJournal):
        repair(tmp_path, NAME)
    (tmp_path / "jobs.repair").write_bytes(RepairSteps().encode())
    assert RepairSteps.decode(RepairSteps().encode()) is not None


# -- the inbox -------------------------------------------------------------------------------------------------------


def published(folder: Path, items: list[bytes]) -> Path:
    """The file of the part of a batch that is published."""
    with PartWriter(folder, NAME) as writer:
        writer.add(items)
        part = writer.seal()
    assert publish(folder, NAME, [part])
    return folder / "inbox" / part.name


def test_verify_reads_the_inbox(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    part = published(tmp_path, [b"first", b"second"])
    report = verify(tmp_path, NAME)
    assert (report.ok, report.batches, report.parts) == (True, 1, 1)
    hit(part, b"second")
    (damage,) = verify(tmp_path, NAME).damage
    assert "item 1 of this part is not intact" in damage.reason


def test_a_damaged_batch_is_set_aside_as_a_whole(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    part = published(tmp_path, [b"first", b"second"])
    published(tmp_path, [b"third"])
    hit(part, b"second")
    assert repair(tmp_path, NAME, dry_run=True).refused_batches == repair(tmp_path, NAME).refused_batches
    assert len(list((tmp_path / "inbox").glob("*.refused"))) == 1
    assert verify(tmp_path, NAME).ok
    with JournaledQueue(tmp_path, NAME) as queue:
        assert drain(queue)[1:] == [b"third"]


def half_ingested(folder: Path) -> None:
    """A queue whose owner died within a batch of two items, of which one is in the journal. The batch is damaged."""
    fill(folder, 1)
    part = published(folder, [b"first" * 100, b"second" * 100])
    with JournaledQueue(folder, NAME, inbox_interval=None, segment_bytes=4096):
        assert not part.exists()  # it has ingested all of it; but the ledger says that these are two of three items
    queue_id = segments(folder)[-1].read_bytes()[16:32]
    intent = Intent(b"b" * 16, queue_id, START_MS, 2, 1, 3, 0, "")
    (folder / "inbox" / "jobs.batches").write_bytes(encode_ledger(LedgerState(), intent))


def test_m6_half_a_batch_is_taken_out_again(tmp_path: Path) -> None:
    half_ingested(tmp_path)
    with pytest.raises(CorruptJournal, match="2 of its 3 items are ingested"):
        JournaledQueue(tmp_path, NAME)
    assert not verify(tmp_path, NAME).ok
    report = repair(tmp_path, NAME)
    assert report.lost_ids == ((2, 3),)
    assert verify(tmp_path, NAME).ok
    with JournaledQueue(tmp_path, NAME) as queue:
        assert [len(data) for data in drain(queue)] == [1000]
        assert queue.put(b"new") > 3
    kept = b"".join(path.read_bytes() for path in tmp_path.glob("*.quarantine"))
    assert b"first" in kept
    assert b"second" in kept


@contextmanager
def half_stays() -> Iterator[None]:
    with mock.patch.object(Salvage, "drop_from", return_value=None):
        yield


def test_a_repair_that_leaves_half_a_batch_is_caught(tmp_path: Path) -> None:
    half_ingested(tmp_path)
    with half_stays():
        repair(tmp_path, NAME)
    assert ids(tmp_path) == [1, 2, 3]  # not [1]


def test_a_damaged_ledger_is_set_aside(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    published(tmp_path, [b"first"])
    JournaledQueue(tmp_path, NAME).close()
    ledger = tmp_path / "inbox" / "jobs.batches"
    data = ledger.read_bytes()
    ledger.write_bytes(b"?" + data[1:])
    assert not verify(tmp_path, NAME).ok
    (loss,) = repair(tmp_path, NAME).losses
    assert Path(loss.kept).read_bytes() == b"?" + data[1:]
    assert verify(tmp_path, NAME).ok
    with mock.patch.object(InboxRepair, "_write_ledger", return_value=None):
        ledger.write_bytes(b"?" + data[1:])
        repair(tmp_path, NAME)
        assert not verify(tmp_path, NAME).ok  # a repair that forgets it is seen


# -- archives --------------------------------------------------------------------------------------------------------


def test_verify_reads_an_archive(tmp_path: Path) -> None:
    folder, archive = tmp_path / "q", tmp_path / "archive"
    fill(folder, archive=archive)
    report = verify(folder, NAME, archive_dir=archive)
    assert report.ok
    assert report.archived_items == 9
    alone = verify(archive, NAME)
    assert (alone.kind, alone.items, alone.segments, alone.ok) == ("archive", 9, 3, True)
    hit(segments(archive)[1], b"00050005")
    assert not verify(archive, NAME).ok
    (damage,) = verify(folder, NAME, archive_dir=archive).damage
    assert damage.path == str(segments(archive)[1])


def test_an_archive_is_repaired(tmp_path: Path) -> None:
    folder, archive = tmp_path / "q", tmp_path / "archive"
    fill(folder, archive=archive)
    hit(segments(archive)[1], b"00050005")
    names = set(content(archive))
    assert repair(archive, NAME, dry_run=True).lost_ids == ((5, 5),)
    assert set(content(archive)) == names
    report = repair(archive, NAME)
    assert (report.kind, report.lost_ids) == ("archive", ((5, 5),))
    assert verify(folder, NAME, archive_dir=archive).ok
    found = [record.id for record in scan(folder, NAME, archive_dir=archive)]
    assert found == [each for each in range(1, 13) if each != 5]


def test_a_gap_in_an_archive_is_no_damage(tmp_path: Path) -> None:
    folder, archive = tmp_path / "q", tmp_path / "archive"
    fill(folder, archive=archive)
    segments(archive)[1].unlink()
    assert verify(archive, NAME).ok
    assert repair(archive, NAME).ok
