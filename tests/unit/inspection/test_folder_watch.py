"""``FolderWatch``: the same figures as ``inspect``, at the price of what has changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kestrelpy import JournaledQueue, inbox, inspect, scan
from kestrelpy._disk.interface import File
from kestrelpy._disk.real import RealDirectory, RealDisk, RealFile
from kestrelpy._journal import format as fmt
from kestrelpy._journal.segment import Segment
from kestrelpy.inspection import FolderWatch, WatchedQueue, folder_watch, followed
from kestrelpy.testing import ManualClock, MemoryDisk
from kestrelpy.work import WorkQueue
from tests.support.disks import CountingDisk
from tests.support.queues import START_MS, let_die

Open = Callable[..., JournaledQueue]
BLOCK = followed.READ_BYTES


@pytest.fixture
def watch(folder: Path, clock: ManualClock) -> FolderWatch:
    folder.mkdir()
    return FolderWatch(folder, clock=clock)


def same_as_inspect(folder: Path, one: WatchedQueue) -> None:
    """Everything that both know."""
    saved = inspect(folder, one.name)
    assert (one.put_items, one.tail_id, one.segments) == (saved.put_items, saved.tail_id, len(saved.segments))
    assert [(r.name, r.head, r.items) for r in one.readers] == [(r.name, r.head, r.items) for r in saved.readers]
    if not one.is_estimated:
        assert one.put_bytes == saved.put_bytes
        assert [r.bytes for r in one.readers] == [r.bytes for r in saved.readers]
    for reader in one.readers:
        first = next(scan(folder, one.name, start_id=reader.head + 1), None) if reader.items else None
        assert reader.oldest_ms == (0 if first is None else first.added_ms)


def test_an_empty_folder_and_one_that_is_gone(folder: Path, watch: FolderWatch) -> None:
    assert watch.look() == {}
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        watch.look()


def test_the_figures_of_inspect_at_every_step(
    folder: Path, watch: FolderWatch, open_queue: Open, clock: ManualClock
) -> None:
    queue = open_queue("jobs", segment_bytes=1 << 16, checkpoint_interval=3600)
    mail, audit = queue.reader("mail"), queue.reader("audit")
    queue.checkpoint()
    for step in range(60):
        queue.put(b"x" * (step * 90))
        queue.put_many([b"y" * 100] * (step % 7 + 1), expires_in=10 if step % 2 else None)
        clock.advance(1)
        for item in mail.get_many(5, timeout=0):
            mail.commit(item)
        if step % 9 == 8:
            for item in audit.get_many(9, timeout=0):
                audit.commit(item)
        queue.checkpoint()
        same_as_inspect(folder, watch.look()["jobs"])
    assert watch.look()["jobs"].segments > 2
    same_as_inspect(folder, watch.look()["jobs"])


def test_a_queue_without_a_checkpoint_is_all_unread(folder: Path, watch: FolderWatch, open_queue: Open) -> None:
    queue = open_queue("jobs", checkpoint_interval=3600)
    queue.put_many([b"abc"] * 4)
    one = watch.look()["jobs"]
    assert (one.items, one.bytes, one.put_items) == (4, 12, 4)


def test_rates_are_those_of_the_last_seconds(watch: FolderWatch, open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue("jobs", checkpoint_interval=3600)
    assert watch.look()
    assert watch.look()["jobs"].rate_in == 0
    for _ in range(10):
        queue.put_many([b"x"] * 100)
        queue.commit_many(queue.get_many(50))
        queue.checkpoint()
        clock.advance(1)
        one = watch.look()["jobs"]
    assert one.rate_in == pytest.approx(100)
    assert one.rate_out == one.readers[0].rate == pytest.approx(50)
    clock.advance(60)
    watch.look()
    clock.advance(10)
    assert watch.look()["jobs"].rate_in == 0


def test_much_that_was_put_is_passed_over_and_items_stay_exact(
    folder: Path, watch: FolderWatch, open_queue: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = [0]
    usual = RealFile.read

    def counting(self: RealFile, offset: int, size: int) -> bytes:
        data = usual(self, offset, size)
        read[0] += len(data)
        return data

    monkeypatch.setattr(RealFile, "read", counting)
    queue = open_queue("jobs", sync="never", segment_bytes=64 << 20)
    queue.put(b"first")
    watch.look()
    for _ in range(200_000):
        queue.put(b"y" * 90)  # 18 MB in all
    read[0] = 0
    one = watch.look()["jobs"]
    assert one.put_items == one.items == 200_001
    assert one.is_estimated
    assert one.put_bytes == pytest.approx(18_000_005, rel=0.1)
    assert read[0] < 12 * BLOCK, f"{read[0]:,} bytes were read to count 18 MB"
    queue.close()
    one = watch.look()["jobs"]
    assert (one.put_bytes, one.is_estimated) == (18_000_005, False)  # the footer has them


def test_what_is_passed_by_its_heads_is_exact(folder: Path, watch: FolderWatch, open_queue: Open) -> None:
    queue = open_queue("jobs", sync="never", segment_bytes=64 << 20)
    watch.look()
    for round_ in range(3):
        for _ in range(20):
            queue.put_many([b"y" * 90] * 5000, expires_in=None if round_ else 60)  # 27 MB in all
        for size in range(0, 9000, 10):
            queue.put(b"z" * size, expires_in=60 if size % 3 else None)
        one = watch.look()["jobs"]
        assert not one.is_estimated
        same_as_inspect(folder, one)
    assert one.put_bytes > 100 * BLOCK


def heads_are_believed(self: followed.FollowedQueue, file: File, segment: Segment) -> bool:
    """``_pass_frames`` with the last frame: the planted fault."""
    heads = followed._heads(file, segment.header.marker, segment.records_end, segment.last_id + 1)
    for frame in heads:
        segment.last_id, segment.records_end = segment.last_id + frame.items, frame.end
    return False


@pytest.mark.parametrize("plant", [False, True])
def test_a_frame_of_which_only_the_head_is_stored_is_not_counted(
    folder: Path, watch: FolderWatch, open_queue: Open, monkeypatch: pytest.MonkeyPatch, plant: bool
) -> None:
    queue = open_queue("jobs", sync="never", segment_bytes=8 << 20)
    for _ in range(30):
        queue.put(b"x" * 20_000)
    queue.put(b"last" * 100)
    let_die(queue)
    (path,) = folder.glob("*.segment")
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"last")] + bytes(400) + data[data.index(b"last") + 400 :])
    if plant:
        monkeypatch.setattr(followed.FollowedQueue, "_pass_frames", heads_are_believed)
    one = watch.look()["jobs"]
    assert (one.put_items == 30) == (not plant)
    if not plant:
        same_as_inspect(folder, one)


@pytest.mark.parametrize("plant", [False, True])
def test_a_list_that_is_older_than_the_checkpoints_is_made_again(
    folder: Path, clock: ManualClock, open_queue: Open, monkeypatch: pytest.MonkeyPatch, plant: bool
) -> None:
    queue = open_queue("jobs", segment_bytes=4096, checkpoint_interval=3600)
    queue.put_many([b"x" * 100] * 5)
    rounds = iter(range(2))

    def go_on() -> None:
        for _ in rounds:  # twice: at the first list of a look, and when it is made again
            for _ in range(9):
                queue.put(b"x" * 1000)
            queue.commit_many(queue.get_many(12))
            queue.checkpoint()
            return

    watch = FolderWatch(folder, clock=clock, disk=CountingDisk(RealDisk(), go_on))
    if plant:
        monkeypatch.setattr(folder_watch, "_TRIES", 1)
    one = watch.look()["jobs"]
    assert (one.put_items == 23) == (not plant)
    if not plant:
        same_as_inspect(folder, one)


def test_an_item_that_looks_like_a_frame_is_none(watch: FolderWatch, open_queue: Open, folder: Path) -> None:
    """The marker is a secret of the segment, but who can read the folder can put it into an item."""
    queue = open_queue("jobs", sync="never", segment_bytes=16 << 20)
    queue.put(b"first")
    header = fmt.decode_header(next(folder.glob("*.segment")).read_bytes())
    assert header is not None
    lie = fmt.encode_item(77, b"no", 1, None, 76, header.marker ^ 1).replace(
        fmt.pack_crc(header.marker ^ 1), fmt.pack_crc(header.marker)
    )
    for _ in range(8):
        queue.put(lie * 4000)
    assert watch.look()["jobs"].put_items == 9


def test_only_what_has_changed_is_read_again(folder: Path, open_queue: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        open_queue(f"q{number}").put(b"x")
    watch = FolderWatch(
        folder, clock=ManualClock(START_MS * 10)
    )  # the dates of the files, which are real, are long ago
    watch.look()
    opened: list[str] = []
    listed = [0]
    usual, names = RealDirectory.open, RealDirectory.names

    def noting(self: RealDirectory, name: str, *, write: bool = False, linked: bool = False) -> RealFile:
        opened.append(name)
        return usual(self, name, write=write, linked=linked)

    def counting(self: RealDirectory) -> list[str]:
        listed[0] += 1
        return names(self)

    monkeypatch.setattr(RealDirectory, "open", noting)
    monkeypatch.setattr(RealDirectory, "names", counting)
    watch.look()
    assert len(opened) == 20  # the newest segment of each; no checkpoint
    assert listed[0] == 1


def test_what_waits_in_the_inbox_is_seen_also_without_a_queue(
    folder: Path, watch: FolderWatch, open_queue: Open
) -> None:
    queue = open_queue("jobs", inbox_interval=None)
    for name in ("jobs", "job", "job"):
        inbox.put_many(folder, name, [b"x"])
    found = watch.look()
    assert list(found) == ["job", "jobs"]
    assert {one.name: (one.pending_batches, one.exists, one.items) for one in found.values()} == {
        "job": (2, False, 0),
        "jobs": (1, True, 0),
    }
    assert queue.take_in() == inbox.take_in(folder, "job") - 1 == 1
    found = watch.look()
    assert {one.name: (one.pending_batches, one.exists, one.items) for one in found.values()} == {
        "job": (0, True, 2),
        "jobs": (0, True, 1),
    }


def test_an_inbox_that_can_not_be_read_is_none(folder: Path, watch: FolderWatch, open_queue: Open) -> None:
    open_queue("jobs").put(b"x")
    (folder / "inbox").write_bytes(b"no folder")
    assert [(one.items, one.pending_batches, one.problem) for one in watch.look().values()] == [(1, 0, "")]
    assert str(folder / "inbox") in watch.inbox_problem
    (folder / "inbox").unlink()
    watch.look()
    assert watch.inbox_problem == ""


def test_damage_is_a_problem_of_that_queue_alone(watch: FolderWatch, open_queue: Open, folder: Path) -> None:
    for name in ("good", "bad", "worse"):
        with open_queue(name, segment_bytes=1 << 16) as queue:
            queue.put_many([b"x" * 1000] * 50)
            queue.put_many([b"x" * 1000] * 50)
    first = min(folder.glob("bad.*.segment"))
    first.write_bytes(bytes(200) + first.read_bytes()[200:])
    for path in folder.glob("worse.*.segment"):
        path.unlink()
        path.mkdir()
    found = watch.look()
    assert found["good"].problem == ""
    assert found["good"].items == 100
    assert "no valid header" in found["bad"].problem
    assert found["worse"].problem


def test_damage_behind_what_was_on_disk_is_seen_at_the_first_look(
    watch: FolderWatch, open_queue: Open, folder: Path
) -> None:
    queue = open_queue("jobs", sync="always")
    for _ in range(5):
        queue.put(b"z" * 100)
    (path,) = folder.glob("*.segment")
    data = bytearray(path.read_bytes())
    data[data.index(b"z" * 100) + 150] ^= 1
    copied = folder / "copy"
    copied.mkdir()
    for each in folder.glob("jobs*"):
        (copied / each.name).write_bytes(bytes(data) if each == path else each.read_bytes())
    other = FolderWatch(copied)
    assert "not intact" in other.look()["jobs"].problem
    assert "not intact" in other.look()["jobs"].problem


def test_names_that_are_none_of_a_queue(watch: FolderWatch, open_queue: Open, folder: Path) -> None:
    open_queue("jobs").put(b"x")
    for name in ("<script>alert(1)<!--.lock", "a b.mark", ".hidden", "README", "x.segment", "-x.mark", "jobs.png"):
        (folder / name).write_bytes(b"")
    (folder / "inbox").mkdir()
    assert list(watch.look()) == ["jobs"]


def test_queues_come_and_go(watch: FolderWatch, open_queue: Open) -> None:
    first = open_queue("b")
    first.put(b"x")
    assert list(watch.look()) == ["b"]
    open_queue("a").put(b"x")
    assert list(watch.look()) == ["a", "b"]
    first.erase()
    assert list(watch.look()) == ["a"]


def test_another_queue_of_the_same_name_has_no_negative_rate(
    watch: FolderWatch, open_queue: Open, clock: ManualClock
) -> None:
    queue = open_queue("jobs")
    queue.put_many([b"x"] * 100)
    queue.checkpoint()
    watch.look()
    queue.erase()
    clock.advance(1)
    later = open_queue("jobs")
    later.put(b"x")
    later.checkpoint()
    watch.look()
    one = watch.look()["jobs"]
    assert (one.put_items, one.items, one.rate_in, one.rate_out) == (1, 1, 0, 0)
    assert one.oldest_ms == clock.time_ns() // 1_000_000
    later.erase()
    clock.advance(1)
    open_queue("jobs").put_many([b"x"] * 200)
    assert watch.look()["jobs"].rate_in == 0, "more items than the one before, and none of them after its last look"


def test_a_work_queue_says_so(watch: FolderWatch, folder: Path) -> None:
    with WorkQueue(folder, "work") as queue:
        queue.put(b"x")
    assert watch.look()["work"].kind == "work queue"


@pytest.mark.parametrize("seed", range(8))
def test_nothing_but_a_problem_comes_of_any_damage(
    folder: Path, open_queue: Open, clock: ManualClock, seed: int
) -> None:
    """Flipped, cut, exchanged and forged files: a look says what it can, and raises nothing."""
    dice = random.Random(seed)
    with open_queue("jobs", segment_bytes=1 << 13) as queue:
        mail = queue.reader("mail")
        for _ in range(40):
            queue.put_many([dice.randbytes(dice.randrange(200)) for _ in range(5)])
        mail.commit_many(mail.get_many(30))
    files = [path for path in folder.iterdir() if path.suffix in (".segment", ".checkpoint", ".mark")]
    whole = {path: path.read_bytes() for path in files}
    watches = [FolderWatch(folder, clock=clock)]
    for _ in range(60):
        path = dice.choice(files)
        data = bytearray(whole[path])
        act = dice.randrange(5)
        if act == 0:
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        elif act == 1:
            del data[dice.randrange(len(data)) :]
        elif act == 2:
            data = bytearray(whole[dice.choice(files)])
        elif act == 3:
            at = dice.randrange(len(data))
            data[at : at + 8] = dice.randbytes(8)
        else:  # whole again
            path = dice.choice(files)
            data = bytearray(whole[path])
        path.write_bytes(data)
        watches.append(FolderWatch(folder, clock=clock))
        for watch in (watches[0], watches[-1]):
            one = watch.look()["jobs"]
            assert min(one.items, one.bytes, one.put_items, one.rate_in, one.rate_out) >= 0
    for path, original in whole.items():
        path.write_bytes(original)
    last = FolderWatch(folder, clock=clock)
    last.look()
    same_as_inspect(folder, last.look()["jobs"])


def test_on_a_disk_without_dates(clock: ManualClock) -> None:
    disk = MemoryDisk()
    watch = FolderWatch("/queues", clock=clock, disk=disk)
    with JournaledQueue("/queues", "jobs", disk=disk, clock=clock) as queue:
        queue.put_many([b"x"] * 9)
        for left in (9, 6, 3):
            queue.checkpoint()
            assert watch.look()["jobs"].items == left
            queue.commit_many(queue.get_many(3))


def test_a_torn_tail_is_no_damage_and_is_judged_once(
    watch: FolderWatch, open_queue: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = open_queue("jobs", sync="never")
    queue.put_many([b"x" * 100] * 3)
    let_die(queue)
    (path,) = folder.glob("*.segment")
    data = path.read_bytes()
    end = len(data.rstrip(b"\0"))
    path.write_bytes(data[:end] + b"\xff" * 50 + data[end + 50 :])
    judged: list[int] = []
    usual = followed.was_on_disk

    def judging(file: File, segment: Segment, offset: int, item_id: int) -> bool:
        judged.append(offset)
        return usual(file, segment, offset, item_id)

    monkeypatch.setattr(followed, "was_on_disk", judging)
    for _ in range(5):
        one = watch.look()["jobs"]
        assert (one.problem, one.items) == ("", 3)
    assert len(judged) == 1


def test_to_find_the_oldest_item_little_is_read(
    watch: FolderWatch, open_queue: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = open_queue("jobs", sync="never", checkpoint_interval=3600)
    for _ in range(20):
        queue.put(b"x" * 200_000)
    watch.look()
    queue.commit_many(queue.get_many(15))
    queue.checkpoint()
    read: list[int] = []
    usual = RealFile.read

    def counting(self: RealFile, offset: int, size: int) -> bytes:
        data = usual(self, offset, size)
        read.append(len(data))
        return data

    monkeypatch.setattr(RealFile, "read", counting)
    assert watch.look()["jobs"].items == 5
    assert sum(read) < 100_000


def test_many_segments_are_counted_at_once_and_checked_by_and_by(
    watch: FolderWatch, open_queue: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "CHECKED_AT_ONCE", 8)
    queue = open_queue("jobs", segment_bytes=4096, sync="never", checkpoint_interval=3600)
    for _ in range(40):
        queue.put(b"x" * 3500)
    queue.checkpoint()
    saved = inspect(folder, "jobs")
    one = watch.look()["jobs"]
    assert one.segments == len(saved.segments) > 30
    in_segments = sum(segment.file_bytes for segment in saved.segments)
    assert in_segments <= one.file_bytes <= saved.file_bytes
    middle = folder / saved.segments[20].name
    middle.write_bytes(bytes(200) + middle.read_bytes()[200:])
    problems = [watch.look()["jobs"].problem for _ in range(5)]
    assert problems[0] == ""
    assert "no valid header" in problems[-1]
    queue.put(b"later")
    one = watch.look()["jobs"]
    assert one.problem  # it stays
    assert one.put_items == 41  # and what is put is seen all the same
