"""``repair`` where files contradict each other, or say what can't be: what a campaign meets seldom or never."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from kestrelpy import CorruptJournal, JournaledQueue, RepairRefused, UnsupportedFormat, repair, scan, verify
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import file_names
from kestrelpy._journal import format as fmt
from kestrelpy.inbox import PartWriter, publish
from kestrelpy.inbox.format import Intent, LedgerState, decode_batch_file, encode_ledger
from kestrelpy.inspection import repair_files
from kestrelpy.inspection.repair import QueueRepair, Records
from kestrelpy.inspection.repair_report import JobDoubts
from kestrelpy.inspection.strange_files import strange_files
from kestrelpy.testing import ManualClock
from kestrelpy.work import WorkQueue
from tests.support.queues import START_MS, let_die

NAME = "jobs"
pytestmark = pytest.mark.usefixtures("quiet")


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("jobs.*.segment"))


def ids(folder: Path) -> list[int]:
    return [record.id for record in scan(folder, NAME)]


def mended(folder: Path) -> None:
    """It verifies, a second repair finds nothing, and the queue opens."""
    assert verify(folder, NAME).ok
    assert repair(folder, NAME).ok
    JournaledQueue(folder, NAME).close()


def two_segments(folder: Path, items: int = 2) -> list[Path]:
    """So many items in a closed segment, and as many in the next one."""
    clock = ManualClock(START_MS)
    for _ in "12":
        with JournaledQueue(folder, NAME, clock=clock) as queue:
            for _ in range(items):
                queue.put(b"x" * 50)
        clock.advance(60)
    return segments(folder)


def header_of(path: Path) -> fmt.SegmentHeader:
    header = fmt.decode_header(path.read_bytes())
    assert header is not None
    return header


# -- segments --------------------------------------------------------------------------------------------------------


def older_copy(folder: Path) -> list[Path]:
    """An older copy of the first segment has a batch of items 2 to 4, which a crash has torn off since; the second
    segment has another item 3.
    """
    other = folder.parent / "other"
    queue = JournaledQueue(folder, NAME, sync="always")
    queue.put(b"one")
    shutil.copytree(folder, other)
    queue.put(b"two")
    queue.close()
    with JournaledQueue(folder, NAME) as again:
        again.put_many([b"three", b"four"])
        again.put(b"five")
    with JournaledQueue(other, NAME) as again:
        pass
    assert ids(other) == [1]
    return segments(folder)


def test_an_older_copy_of_a_segment_that_was_cut_since(tmp_path: Path) -> None:
    folder = tmp_path / "q"
    first, _ = older_copy(folder)
    header, data = header_of(first), first.read_bytes()
    frame = fmt.decode_frame(data, fmt.HEADER_BYTES, header.marker)
    assert frame is not None
    items = [b"2", b"3", b"4"]
    batch = fmt.encode_batch(2, items, [1, 1, 1], START_MS, None, 1, header.marker)
    later = fmt.encode_item(5, b"5", START_MS, None, 1, header.marker)
    first.write_bytes(data[: fmt.HEADER_BYTES + frame.size] + batch + later)
    assert not verify(folder, NAME).ok
    report = repair(folder, NAME)
    assert not report.lost_ids, "items 3 to 5 are in the segment after it"
    assert [record.data for record in scan(folder, NAME)] == [b"one", b"2", b"three", b"four", b"five"]
    assert any(batch in path.read_bytes() for path in folder.glob("*.quarantine"))
    mended(folder)


def test_records_that_were_cut_do_not_count(tmp_path: Path) -> None:
    """Of a work queue: what is in doubt is said by the records that stay."""
    folder = tmp_path / "q"
    first, second = older_copy(folder)
    header, data = header_of(first), first.read_bytes()
    frame = fmt.decode_frame(data, fmt.HEADER_BYTES, header.marker)
    assert frame is not None
    batch = fmt.encode_batch(2, [b"2", b"3"], [1, 1], START_MS, None, 1, header.marker)
    first.write_bytes(data[: fmt.HEADER_BYTES + frame.size] + batch)
    second.write_bytes(second.read_bytes().replace(b"five", b"fiVe"))
    (folder / "jobs.work").write_bytes(b"")
    seen: list[tuple[int, bytes | None]] = []

    def judge(records: Records) -> tuple[JobDoubts, bytes]:
        seen.extend(records.items)
        return JobDoubts(), b""

    disk = RealDisk()
    place = disk.directory(str(folder))
    QueueRepair(place, NAME, disk, judge, lambda count: bytes(count), START_MS).run(dry_run=True)
    place.close()
    assert seen == [(1, b"one"), (2, b"2"), (3, b"three"), (4, b"four"), (5, None)]


def test_a_segment_with_the_items_of_the_one_after_it(tmp_path: Path) -> None:
    _, second = two_segments(tmp_path)
    header = header_of(second)
    number = header.number - 1
    copied = header._replace(number=number, marker=header.marker ^ 1)
    frame = fmt.encode_item(header.first_id, b"again", START_MS, None, header.first_id - 1, copied.marker)
    (tmp_path / file_names.segment_name(NAME, number)).write_bytes(fmt.encode_header(copied) + frame)
    assert not verify(tmp_path, NAME).ok
    assert not repair(tmp_path, NAME).lost_ids
    assert b"again" not in [record.data for record in scan(tmp_path, NAME)]
    mended(tmp_path)


def test_a_segment_that_has_never_taken_a_frame_is_no_damage(tmp_path: Path) -> None:
    _, second = two_segments(tmp_path)
    header = header_of(second)
    number = header.number - 1
    empty = fmt.encode_header(header._replace(number=number, marker=header.marker ^ 1))
    (tmp_path / file_names.segment_name(NAME, number)).write_bytes(empty + bytes(400))
    assert verify(tmp_path, NAME).ok
    assert repair(tmp_path, NAME).ok


def test_a_number_out_of_reach(tmp_path: Path) -> None:
    two_segments(tmp_path)
    name = file_names.segment_name(NAME, fmt.LARGEST)
    (tmp_path / name).write_bytes(b"?")
    (damage,) = verify(tmp_path, NAME).damage
    assert "no segment has a number as large" in damage.reason
    (tmp_path / file_names.quarantine_name(NAME, fmt.LARGEST, 0)).write_bytes(b"taken")
    (loss,) = repair(tmp_path, NAME).losses
    assert loss.kept.endswith(".1.quarantine")
    mended(tmp_path)


def test_only_the_version_of_a_header_is_damaged(tmp_path: Path) -> None:
    first, _ = two_segments(tmp_path)
    data = first.read_bytes()
    first.write_bytes(data[:8] + b"\x63\x00" + data[10:])
    report = repair(tmp_path, NAME)
    assert "its version is damaged" in report.losses[0].reason
    assert not report.lost_ids
    assert ids(tmp_path) == [1, 2, 3, 4]
    mended(tmp_path)


def test_a_header_of_a_newer_version(tmp_path: Path) -> None:
    first, _ = two_segments(tmp_path)
    data = first.read_bytes()
    first.write_bytes(data[:8] + b"\x63\x00" + bytes([data[10] ^ 1]) + data[11:20] + b"??" + data[22:])
    with pytest.raises(UnsupportedFormat):
        repair(tmp_path, NAME)


def test_a_footer_that_does_not_match_its_frames(tmp_path: Path) -> None:
    first, _ = two_segments(tmp_path)
    header, data = header_of(first), first.read_bytes()
    footer = fmt.decode_footer(data[-fmt.FOOTER_BYTES :], header)
    assert footer is not None
    false = fmt.encode_footer(footer._replace(data_bytes=footer.data_bytes + 1), header.number, header.marker)
    first.write_bytes(data[: -fmt.FOOTER_BYTES] + false)
    assert [damage.reason for damage in verify(tmp_path, NAME).damage] == ["the footer does not match the frames"]
    assert not repair(tmp_path, NAME).lost_ids
    assert ids(tmp_path) == [1, 2, 3, 4]
    mended(tmp_path)


def test_bytes_between_frames_that_follow_one_another(tmp_path: Path) -> None:
    queue = JournaledQueue(tmp_path, NAME, sync="always")
    for _ in range(4):
        queue.put(b"x" * 50)
    let_die(queue)
    (path,) = segments(tmp_path)
    data, at = path.read_bytes(), fmt.HEADER_BYTES + 2 * (fmt.FRAME_BYTES + 50)
    path.write_bytes(data[:at] + b"?" * 40 + data[at:])
    report = repair(tmp_path, NAME)
    assert not report.lost_ids
    assert [loss.size for loss in report.losses] == [40]
    assert ids(tmp_path) == [1, 2, 3, 4]
    mended(tmp_path)


def test_a_twin_under_the_name_of_a_new_segment(tmp_path: Path) -> None:
    first, _ = two_segments(tmp_path)
    twin = tmp_path / first.name.replace(".segment", ".new.segment")
    twin.write_bytes(first.read_bytes())
    first.write_bytes(first.read_bytes().replace(b"x" * 50, b"y" * 50, 1))
    assert repair(tmp_path, NAME).lost_ids == ((1, 1),)
    assert not twin.exists()
    mended(tmp_path)


def test_a_name_for_bad_bytes_that_is_taken(tmp_path: Path) -> None:
    first, _ = two_segments(tmp_path)
    data = first.read_bytes()
    first.write_bytes(data.replace(b"x" * 50, b"y" * 50, 1))
    taken = tmp_path / file_names.quarantine_name(NAME, header_of(first).number, fmt.HEADER_BYTES)
    taken.write_bytes(b"mine")
    (loss,) = repair(tmp_path, NAME).losses
    assert loss.kept != str(taken)
    assert taken.read_bytes() == b"mine"
    assert b"y" * 50 in Path(loss.kept).read_bytes()


def test_bad_bytes_that_are_kept_already(tmp_path: Path) -> None:
    folder, copy = tmp_path / "q", tmp_path / "copy"
    first, _ = two_segments(folder)
    first.write_bytes(first.read_bytes().replace(b"x" * 50, b"y" * 50, 1))
    shutil.copytree(folder, copy)
    (loss,) = repair(copy, NAME).losses
    kept = folder / Path(loss.kept).name
    shutil.copy(loss.kept, kept)
    assert [Path(each.kept) for each in repair(folder, NAME).losses] == [kept]
    assert len(list(folder.glob("*.quarantine"))) == 1


def test_a_checkpoint_that_is_damaged_twice(tmp_path: Path) -> None:
    two_segments(tmp_path)
    for number in (1, 2):
        (tmp_path / "jobs.mark").write_bytes(b"?" * number)
        (loss,) = repair(tmp_path, NAME).losses
        assert Path(loss.kept).name == f"jobs.mark.{number}.damaged"
        assert Path(loss.kept).read_bytes() == b"?" * number
        JournaledQueue(tmp_path, NAME).close()


def test_segments_of_the_archive_that_came_back(tmp_path: Path) -> None:
    """The one that is intact is retired again. The one that is damaged is set aside: an opening would object to it."""
    folder, archive = tmp_path / "q", tmp_path / "archive"
    archived(folder, archive, lives=4)
    back = [folder / path.name for path in segments(archive)[:2]]
    for path in back:
        shutil.copy(archive / path.name, path)
    assert verify(folder, NAME).ok
    assert repair(folder, NAME).ok
    data = back[0].read_bytes()
    back[0].write_bytes(data[:200] + b"?" + data[201:])
    assert not repair(folder, NAME).ok
    assert not back[0].exists()
    assert back[1].exists()
    mended(folder)


# -- claims ----------------------------------------------------------------------------------------------------------


def far_state(folder: Path, head: int) -> None:
    """The mark says that ids up to ``head`` were given out."""
    (mark,) = folder.glob("jobs.mark")
    state = fmt.decode_checkpoints(mark.read_bytes())[0]
    assert state is not None
    mark.write_bytes(fmt.checkpoint_prefix() + fmt.encode_checkpoint(state._replace(head=head)))


def test_a_mark_that_claims_ids_out_of_reach(tmp_path: Path) -> None:
    two_segments(tmp_path)
    far_state(tmp_path, 1 << 40)
    assert not verify(tmp_path, NAME).ok
    (loss,) = repair(tmp_path, NAME).losses
    assert "are said to be given out" in loss.reason
    assert Path(loss.kept).read_bytes() != b""
    mended(tmp_path)


def test_a_segment_that_claims_counts_out_of_reach(tmp_path: Path) -> None:
    *_, last = two_segments(tmp_path)
    header, data = header_of(last), last.read_bytes()
    false = fmt.encode_header(header._replace(base_bytes=fmt.LARGEST))
    last.write_bytes(false + data[fmt.HEADER_BYTES :])
    with pytest.raises(CorruptJournal, match=last.name):
        repair(tmp_path, NAME)


# -- steps -----------------------------------------------------------------------------------------------------------


@contextmanager
def fails_at_the_end() -> Iterator[None]:
    with mock.patch.object(repair_files, "_end", side_effect=OSError("no more")), pytest.raises(OSError, match="no mo"):
        yield


def test_a_repair_that_is_resumed_once_all_is_done(tmp_path: Path) -> None:
    first, _ = two_segments(tmp_path)
    foreign = tmp_path / "other"
    two_segments(foreign)
    first.write_bytes(segments(foreign)[0].read_bytes())
    with fails_at_the_end():
        repair(tmp_path, NAME)
    said = repair(tmp_path, NAME, dry_run=True)
    assert said.resumed
    report = repair(tmp_path, NAME)
    assert report.resumed
    assert report.losses == said.losses != ()
    mended(tmp_path)


def test_what_a_resumed_repair_says_of_jobs(tmp_path: Path) -> None:
    with WorkQueue(tmp_path, NAME, sync="always") as queue:
        for number in range(3):
            queue.put(b"job %d" % number * 20)
    (path,) = segments(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"job 1", b"job ?", 1))
    with fails_at_the_end():
        repair(tmp_path, NAME)
    report = repair(tmp_path, NAME)
    assert report.jobs is not None
    assert report.jobs.missing == ((2, 2),)


# -- archives --------------------------------------------------------------------------------------------------------


def archived(folder: Path, archive: Path, *, step: float = 60.0, items: int = 2, lives: int = 3) -> None:
    clock = ManualClock(START_MS)
    for _ in range(lives):
        with JournaledQueue(folder, NAME, archive_dir=archive, clock=clock) as queue:
            for _ in range(items):
                queue.put(b"x" * 50)
            queue.commit_many(queue.get_many(items))
            queue.checkpoint(durable=True)
        clock.advance(step)


def test_an_archive_of_two_queues(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archived(tmp_path / "one", archive)
    archived(tmp_path / "two", archive)
    both = [header_of(path).queue_id for path in segments(archive)]
    assert len(set(both)) == 2
    items = verify(archive, NAME).items
    for path in segments(archive):
        path.write_bytes(path.read_bytes().replace(b"x" * 50, b"y" * 50, 1))
    (archive / file_names.segment_name(NAME, 1)).write_bytes(b"?" * 200)
    (archive / file_names.segment_name(NAME, fmt.LARGEST)).write_bytes(segments(archive)[-1].read_bytes())
    report = repair(archive, NAME)
    assert len(report.losses) == len(both) + 2
    assert verify(archive, NAME).ok
    assert verify(archive, NAME).items == items - len(both), "of each segment, the damaged item"
    assert repair(archive, NAME).ok


def test_an_archive_without_numbers_for_what_is_left(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archived(tmp_path / "q", archive, step=0.0, items=5)
    _, second = segments(archive)
    data, size = second.read_bytes(), fmt.FRAME_BYTES + 50
    for item in (1, 3):
        at = fmt.HEADER_BYTES + item * size + fmt.FRAME_BYTES
        data = data[:at] + b"?" + data[at + 1 :]
    second.write_bytes(data)
    with pytest.raises(RepairRefused, match="there are no 3 numbers"):
        repair(archive, NAME)


# -- the inbox -------------------------------------------------------------------------------------------------------


def published(folder: Path, items: list[bytes]) -> Path:
    with PartWriter(folder, NAME) as writer:
        writer.add(items)
        part = writer.seal()
    assert publish(folder, NAME, [part])
    return sorted((folder / "inbox").glob("jobs.*.batch"))[-1]


def test_a_batch_of_a_newer_version_waits(tmp_path: Path) -> None:
    two_segments(tmp_path)
    batch = published(tmp_path, [b"one"])
    data = batch.read_bytes()
    batch.write_bytes(data[:8] + b"\x63\x00" + data[10:])
    intend(tmp_path, batch, data, items=3)
    assert verify(tmp_path, NAME).ok
    assert repair(tmp_path, NAME).ok
    assert batch.exists()


def intend(folder: Path, path: Path, data: bytes, *, items: int) -> None:
    """The ledger says that this batch is being ingested, and that 2 items of it are in the journal."""
    batch = decode_batch_file(data)
    assert batch is not None
    queue_id = header_of(segments(folder)[-1]).queue_id
    intent = Intent(batch.batch_id, queue_id, batch.number, 3, 2, items, 0, "")
    (path.parent / "jobs.batches").write_bytes(encode_ledger(LedgerState(), intent))


def test_half_a_batch_that_can_be_finished_is_no_damage(tmp_path: Path) -> None:
    two_segments(tmp_path)
    batch = published(tmp_path, [b"x" * 50] * 3)
    intend(tmp_path, batch, batch.read_bytes(), items=3)
    assert verify(tmp_path, NAME).ok
    assert repair(tmp_path, NAME).ok


def test_half_a_batch_in_the_middle_of_a_segment(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, NAME) as queue:
        queue.put(b"one")
        queue.put_many([b"two", b"three", b"four"])
        queue.put(b"five")
    batch = published(tmp_path, [b"x"] * 9)
    data = batch.read_bytes()
    intend(tmp_path, batch, data, items=9)
    batch.unlink()
    report = repair(tmp_path, NAME)
    assert report.lost_ids == ((3, 5),)
    assert [record.data for record in scan(tmp_path, NAME)] == [b"one", b"two"]
    mended(tmp_path)


def test_half_a_batch_before_a_segment_without_items(tmp_path: Path) -> None:
    _, last = two_segments(tmp_path)
    batch = published(tmp_path, [b"x"] * 9)
    intend(tmp_path, batch, batch.read_bytes(), items=9)
    batch.unlink()
    header, data = header_of(last), last.read_bytes()
    footer = fmt.decode_footer(data[-fmt.FOOTER_BYTES :], header)
    assert footer is not None
    empty = header._replace(
        number=header.number + 1,
        marker=header.marker ^ 1,
        first_id=footer.last_id + 1,
        base_items=header.base_items + footer.items,
        base_bytes=header.base_bytes + footer.data_bytes,
        previous_number=header.number,
        previous_last_id=footer.last_id,
        previous_end=footer.records_end,
    )
    (tmp_path / file_names.segment_name(NAME, empty.number)).write_bytes(fmt.encode_header(empty) + bytes(400))
    assert repair(tmp_path, NAME).lost_ids == ((3, 4),)
    assert ids(tmp_path) == [1, 2]
    mended(tmp_path)


def test_a_batch_that_the_ledger_knows_is_not_looked_at(tmp_path: Path) -> None:
    two_segments(tmp_path)
    path = published(tmp_path, [b"one"])
    batch = decode_batch_file(path.read_bytes())
    assert batch is not None
    state = LedgerState()
    state.note_done(batch.batch_id, batch.number, "", 0)
    (path.parent / "jobs.batches").write_bytes(encode_ledger(state, None))
    for part in path.parent.glob("*.part"):
        part.unlink()
    assert verify(tmp_path, NAME).ok


def test_a_ledger_that_is_never_read_beside_a_damaged_batch(tmp_path: Path) -> None:
    two_segments(tmp_path)
    path = published(tmp_path, [b"one"])
    (path.parent / "jobs.batches").mkdir()
    for part in path.parent.glob("*.part"):
        part.write_bytes(b"?")
    assert len(verify(tmp_path, NAME).damage) == 2
    assert len(repair(tmp_path, NAME).losses) == 2
    mended(tmp_path)


def test_a_file_that_is_gone_since_it_was_listed_is_not_strange(tmp_path: Path) -> None:
    first, _ = two_segments(tmp_path)
    folder = RealDisk().directory(str(tmp_path))
    names = folder.names()
    first.unlink()
    with mock.patch.object(type(folder), "names", return_value=names):
        assert strange_files(folder, NAME) == []
    folder.close()
