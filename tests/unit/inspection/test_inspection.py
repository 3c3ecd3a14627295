"""A folder of queues from outside: names, scans, checks. Nothing is written and no lock is taken."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import (
    CorruptJournal,
    InvalidName,
    JournaledQueue,
    UnsupportedFormat,
    inspect,
    queue_names,
    scan,
    verify,
)
from kestrelpy._disk.interface import Directory, File
from kestrelpy._journal.segment import open_segment
from kestrelpy.inspection.verify import Verification, VerifyReport
from kestrelpy.testing import CrashingDisk, ManualClock, PowerModel
from tests.support.queues import drain, let_die, take_all

Open = Callable[..., JournaledQueue]


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir() if path.is_file()}


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.segment"))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


# -- names -----------------------------------------------------------------------------------------------------------


# LK-F49: the queues of a folder; directories, foreign and temporary files are none.
def test_lk_f49_queue_names(folder: Path, open_queue: Open) -> None:
    for name in ("b", "a", "A-1"):
        open_queue(name=name).put(b"x")
    (folder / "foreign.txt").write_text("x")
    (folder / "directory.1.segment.d").mkdir()
    (folder / "left.1.segment.tmp").write_text("x")
    (folder / ".hidden.lock").write_text("x")
    assert queue_names(folder) == ["A-1", "a", "b"]
    assert queue_names(str(folder)) == ["A-1", "a", "b"]


def test_queue_names_of_an_empty_and_of_no_folder(tmp_path: Path) -> None:
    assert queue_names(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        queue_names(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists(), "opening to read never writes"


# -- scan ------------------------------------------------------------------------------------------------------------


def test_scan_sees_everything_while_the_writer_writes(folder: Path, open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue(segment_bytes=4096)
    for n in range(20):
        queue.put(b"%02d" % n * 300, expires_in=n or None)
        clock.advance(1)
    queue.put_many([b"x", b"y"])
    before = contents(folder)
    records = list(scan(folder, "jobs"))
    assert [record.id for record in records] == list(range(1, 23))
    assert [record.data for record in records] == [b"%02d" % n * 300 for n in range(20)] + [b"x", b"y"]
    assert [record.added_ms for record in records[:3]] == [records[0].added_ms + 1000 * n for n in range(3)]
    assert records[2].expires_ms == records[2].added_ms + 2000
    assert records[0].expires_ms is None
    assert {record.segment for record in records} == {path.name for path in segments(folder)}
    assert contents(folder) == before
    queue.put(b"more")
    assert len(list(scan(folder, "jobs"))) == 23


def test_scan_ranges(folder: Path, open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue(segment_bytes=4096)
    base = clock.time_ns() // 1_000_000
    for n in range(20):
        queue.put(b"%02d" % n * 300)
        clock.advance(1)

    def ids(**limits: Any) -> list[int]:
        return [record.id for record in scan(folder, "jobs", **limits)]

    assert ids(start_id=5, stop_id=9) == [5, 6, 7, 8]
    assert ids(start_id=19) == [19, 20]
    assert ids(start_id=21) == []
    assert ids(stop_id=1) == []
    assert ids(start_ms=base + 3000, stop_ms=base + 6000) == [4, 5, 6]
    assert ids(start_ms=base + 2001, stop_id=6) == [4, 5]
    assert ids(start_ms=base + 10**6) == []


def test_scan_stops_reading_where_it_need_not_read(folder: Path, open_queue: Open) -> None:
    """A damaged segment outside the range does not matter."""
    queue = open_queue(segment_bytes=4096)
    for n in range(30):
        queue.put(b"%02d" % n * 300)
    flip(segments(folder)[1], 140)
    with pytest.raises(CorruptJournal):
        list(scan(folder, "jobs"))
    assert [record.id for record in scan(folder, "jobs", stop_id=4)] == [1, 2, 3]
    assert [record.id for record in scan(folder, "jobs", start_id=25)] == list(range(25, 31))


def test_scan_shows_the_error_counts_of_checkpoints(folder: Path, open_queue: Open) -> None:
    queue = open_queue()
    a, b = queue.reader("a"), queue.reader("b")
    queue.put_many([b"1", b"2"])
    for reader, count in ((a, 2), (b, 1)):
        for _ in range(count):
            reader.get_nowait().abort()
    queue.checkpoint()
    assert [record.error_count for record in scan(folder, "jobs")] == [2, 0]


def test_scan_of_live_and_archived_segments(folder: Path, tmp_path: Path, open_queue: Open) -> None:
    archive = tmp_path / "archive"
    queue = open_queue(segment_bytes=4096, archive_dir=archive)
    for n in range(30):
        queue.put(b"%02d" % n * 300)
    queue.commit_many([item.id for item in queue.get_many(20)])
    queue.checkpoint()
    assert segments(archive)
    assert [record.id for record in scan(folder, "jobs", archive_dir=archive)] == list(range(1, 31))
    live = [record.id for record in scan(folder, "jobs")]
    assert live[0] > 1
    assert live[-1] == 30
    twin = segments(archive)[-1]
    (folder / twin.name).write_bytes(twin.read_bytes())
    assert [record.id for record in scan(folder, "jobs", archive_dir=archive)] == list(range(1, 31))


def test_a_scan_passes_over_an_archive_of_an_erased_queue(folder: Path, tmp_path: Path, open_queue: Open) -> None:
    """Its segments may have later names than the last one that is live: the clock was set back, say."""
    archive = tmp_path / "archive"
    queue = open_queue(segment_bytes=4096, archive_dir=archive)
    for _ in range(30):
        queue.put(bytes(600))
    drain(queue)
    queue.checkpoint()
    assert len(segments(archive)) > 1
    queue.erase()
    with open_queue(segment_bytes=4096, archive_dir=archive) as again:
        again.put(b"new")
        assert [record.data for record in scan(folder, "jobs", archive_dir=archive)] == [b"new"]


def test_a_scan_survives_segments_that_are_archived_meanwhile(folder: Path, tmp_path: Path, open_queue: Open) -> None:
    archive = tmp_path / "archive"
    queue = open_queue(segment_bytes=4096, archive_dir=archive)
    for n in range(30):
        queue.put(b"%02d" % n * 300)
    records = scan(folder, "jobs", archive_dir=archive)
    assert next(records).id == 1
    drain(queue)
    queue.checkpoint()
    assert [record.id for record in records] == list(range(2, 31))


@pytest.mark.parametrize("made_again", [False, True], ids=["erased", "made again"])
def test_a_scan_of_what_is_erased_meanwhile_does_not_end_as_if_that_were_all(
    folder: Path, open_queue: Open, made_again: bool
) -> None:
    queue = open_queue(segment_bytes=4096)
    for _ in range(5):
        queue.put(bytes(2000))
    found = scan(folder, "jobs")
    next(found)
    queue.erase()
    if made_again:
        open_queue().put(b"another")
    with pytest.raises(FileNotFoundError, match="queue 'jobs' is gone, or another one is in its place"):
        list(found)


def test_scan_ends_at_a_torn_tail(folder: Path, killed: Any) -> None:
    killed(lambda queue: queue.put_many([b"1"]) and queue.put(b"2"), sync="never")
    (path,) = segments(folder)
    data = path.read_bytes().rstrip(b"\0")
    path.write_bytes(data[:-1])
    assert [record.data for record in scan(folder, "jobs")] == [b"1"]


def test_scan_of_nothing(tmp_path: Path) -> None:
    assert list(scan(tmp_path, "jobs")) == []
    with pytest.raises(InvalidName):
        list(scan(tmp_path, "../jobs"))
    with pytest.raises(FileNotFoundError):
        list(scan(tmp_path / "no", "jobs"))


# -- verify ----------------------------------------------------------------------------------------------------------


def test_verify_of_a_good_queue(folder: Path, open_queue: Open) -> None:
    queue = open_queue(segment_bytes=4096)
    queue.reader("a")
    queue.reader("b")
    for n in range(20):
        queue.put(b"%02d" % n * 300)
    queue.put_many([b"x", b"yy"])
    for state in ("live", "closed"):
        before = contents(folder)
        report = verify(folder, "jobs")
        assert report.ok, report
        assert (report.queue, report.items, report.bytes, report.first_id, report.last_id) == (
            "jobs",
            22,
            12_003,
            1,
            22,
        )
        assert report.segments == len(segments(folder))
        assert (report.readers, report.torn_bytes, report.unknown_files) == (("a", "b"), 0, ())
        assert contents(folder) == before
        if state == "live":
            queue.close()


@pytest.mark.parametrize("which", [0, 1, -1])
@pytest.mark.parametrize("offset", [3, 40, 96, 100, 130, 400, -1, -40])
def test_verify_reports_a_flipped_bit_anywhere(which: int, offset: int, folder: Path, open_queue: Open) -> None:
    with open_queue(segment_bytes=4096) as queue:
        for n in range(20):
            queue.put(b"%02d" % n * 300)
    path = segments(folder)[which]
    flip(path, offset)
    report = verify(folder, "jobs")
    if which == -1 and offset < 0:  # the footer of the last segment: it is taken for one that was not closed
        assert report.ok
        assert report.items == 20
        return
    assert not report.ok
    assert any(damage.path == str(path) for damage in report.damage)
    assert all(damage.reason for damage in report.damage)


def test_verify_counts_what_is_intact_before_the_damage(folder: Path, open_queue: Open) -> None:
    queue = open_queue()
    for number in range(10):
        queue.put(b"item %d" % number)
    queue.close()
    path = segments(folder)[0]
    flip(path, path.read_bytes().index(b"item 6"))
    report = verify(folder, "jobs")
    assert (report.items, report.bytes, len(report.damage)) == (6, 36, 1)


def test_verify_reports_what_is_missing(folder: Path, open_queue: Open) -> None:
    with open_queue(segment_bytes=4096) as queue:
        queue.reader("a")
        for n in range(20):
            queue.put(b"%02d" % n * 300)
    all_of_them = segments(folder)
    for path in (all_of_them[0], all_of_them[1], all_of_them[-1]):
        data = path.read_bytes()
        lost = [record.id for record in scan(folder, "jobs") if record.segment == path.name]
        path.unlink()
        report = verify(folder, "jobs")
        assert not report.ok, path.name
        if path == all_of_them[1]:
            (damage,) = report.damage
            follows = f"it does not follow the segment before it: items {lost[0]} to {lost[-1]} are missing"
            assert damage.reason == follows
            with pytest.raises(CorruptJournal, match=follows):
                open_queue()
        path.write_bytes(data)
    assert verify(folder, "jobs").ok
    (folder / "jobs+a.checkpoint").write_bytes(b"garbage")
    report = verify(folder, "jobs")
    assert [damage.path for damage in report.damage] == [str(folder / "jobs+a.checkpoint")]


def test_verify_counts_a_torn_tail_and_does_not_call_it_damage(folder: Path, killed: Any, open_queue: Open) -> None:
    killed(lambda queue: [queue.put(b"1" * 100), queue.put(b"2" * 100)], sync="never")
    (path,) = segments(folder)
    data = path.read_bytes().rstrip(b"\0")
    path.write_bytes(data[:-10])
    report = verify(folder, "jobs")
    assert report.ok
    assert (report.items, report.last_id, report.torn_bytes) == (1, 1, 132 - 10)
    open_queue().close()
    assert verify(folder, "jobs").torn_bytes == 132 - 10, "kept, not read"


def test_what_is_left_of_a_missing_item_is_no_torn_tail(folder: Path, open_queue: Open) -> None:
    with open_queue(sync="always") as queue:
        queue.put(b"1" * 100)
        queue.put(b"2" * 100)
    (path,) = segments(folder)
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"2" * 100) + 2])
    report = verify(folder, "jobs")
    assert [damage.reason for damage in report.damage] == ["items 2 to 2 are missing"]
    assert (report.items, report.torn_bytes) == (1, 0)


def test_verify_beside_a_writer_that_retires(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment that was there when the folder was listed and is gone when it is to be opened is no damage."""
    disk, about_to_go = CrashingDisk(), []
    disk.before_operation = lambda: (
        about_to_go.append(disk.after_kill())
        if disk.next_operation[0] == "unlink" and disk.next_operation[1].endswith(".segment") and not about_to_go
        else None
    )
    with JournaledQueue("/q", "jobs", segment_bytes=4096, disk=disk) as queue:
        for _ in range(8):
            queue.put(bytes(1500))
        for item in queue.get_many(7):
            item.commit()
        queue.checkpoint(durable=True)
        queue.put_many([bytes(1500)] * 4)
    left, folder = about_to_go[0], about_to_go[0].directory("/q")
    first = min(name for name in folder.names() if name.endswith(".segment"))
    assert verify("/q", "jobs", disk=left).ok

    def meanwhile(directory: Directory, name: str) -> File:
        if name == first:
            folder.unlink(name)
        return open_segment(directory, name)

    monkeypatch.setattr("kestrelpy.inspection.verify.open_segment", meanwhile)
    report = verify("/q", "jobs", disk=left)
    assert report.ok
    assert report.first_id > 1


def test_verify_names_unknown_files(folder: Path, open_queue: Open) -> None:
    open_queue().put(b"x")
    (folder / "jobs.txt").write_text("x")
    (folder / "other.txt").write_text("x")
    for name in ("jobs+.batch", "jobs+audit.batch", "jobs+audit.batch.tmp"):  # of kestrelpy.spark
        (folder / name).write_text("x")
    assert verify(folder, "jobs").unknown_files == ("jobs.txt",)


def test_verify_of_nothing_and_of_the_future(tmp_path: Path, folder: Path, open_queue: Open) -> None:
    assert verify(tmp_path, "jobs").ok
    open_queue().close()
    (folder / "jobs.1.segment").write_bytes(b"KSTRLSEG\x02\x00" + bytes(100))
    with pytest.raises(UnsupportedFormat):
        verify(folder, "jobs")


def test_reading_a_folder_that_may_only_be_read(script: Any) -> None:
    """Scans and checks need no right to write; whoever wants to own something is told so by the system's error."""
    assert (
        script(
            """
        import os, pathlib, shutil, tempfile
        import portalocker
        from kestrelpy import JournaledQueue, open_reader, queue_names, scan, verify
        from kestrelpy.codecs import JSON
        folder = pathlib.Path(tempfile.mkdtemp())
        try:
            with JournaledQueue(folder, "jobs") as queue:
                queue.put(b"x")
            for path in folder.iterdir():
                path.chmod(0o444)
            folder.chmod(0o555)
            if os.geteuid() == 0:
                os.seteuid(65534)
            before = sorted(os.listdir(folder))
            assert [record.data for record in scan(folder, "jobs")] == [b"x"]
            assert verify(folder, "jobs").ok
            assert queue_names(folder) == ["jobs"]
            for call in (
                lambda: JournaledQueue(folder, "jobs"), lambda: JournaledQueue(folder, "new"),
                lambda: open_reader(folder, "jobs", "a", create=True), lambda: JournaledQueue(folder / "sub", "jobs"),
            ):
                try:
                    call()
                except PermissionError as error:
                    assert error.filename or error.strerror
                else:
                    raise AssertionError("it was opened")
            assert sorted(os.listdir(folder)) == before
        finally:
            if os.getuid() == 0:
                os.seteuid(0)
            folder.chmod(0o700)
            shutil.rmtree(folder)
        print("done")
        """
        )
        == "done"
    )


def test_a_scan_that_is_left_keeps_nothing_open(folder: Path, open_queue: Open) -> None:
    queue = open_queue()
    queue.put_many([b"1", b"2"])
    before = len(os.listdir("/proc/self/fd"))
    records = scan(folder, "jobs")
    next(records)
    assert isinstance(records, Generator)
    records.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_killed_writer_can_be_scanned_before_it_is_reopened(folder: Path, open_queue: Open) -> None:
    queue = open_queue()
    queue.put_many([b"1", b"2"])
    let_die(queue)
    assert [record.data for record in scan(folder, "jobs")] == [b"1", b"2"]
    assert len(take_all(open_queue())) == 2


def test_verify_beside_the_making_of_the_first_reader_finds_nothing(
    folder: Path, open_queue: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = open_queue()
    real = Verification.run

    def run(self: Verification, refused: int) -> VerifyReport:
        queue.reader("a")  # after the first look, which found nothing
        return real(self, refused)

    monkeypatch.setattr(Verification, "run", run)
    report = verify(folder, "jobs")
    assert (report.readers, report.damage) == (("a",), ())


# -- after a crash ---------------------------------------------------------------------------------------------------


def test_a_reader_is_named_as_its_file(tmp_path: Path) -> None:
    """A process that dies just after the default reader was taken over leaves the old name inside the file."""
    queue = JournaledQueue(tmp_path, "q")
    queue.put_many([b"a", b"b"])
    queue.get().commit()
    queue.reader("heir")
    let_die(queue)
    assert [(reader.name, reader.items) for reader in inspect(tmp_path, "q").readers] == [("heir", 2)]


def test_an_erasure_that_a_power_cut_interrupts_may_be_opened() -> None:
    """No state has a checkpoint without the segments that it names."""
    disk = CrashingDisk()
    queue = JournaledQueue("d", "q", disk=disk, sync="always", inbox_interval=None)
    queue.put_many([b"a", b"b"])
    queue.get().commit()
    queue.checkpoint(durable=True)
    states: list[CrashingDisk] = []
    disk.before_operation = lambda: states.extend(disk.power_states(PowerModel.ANY, 20))
    queue.erase()
    disk.before_operation = None
    assert len(states) > 50
    for state in states:
        with JournaledQueue("d", "q", disk=state, inbox_interval=None) as again:
            assert {item.data for item in take_all(again)} <= {b"a", b"b"}
