"""Opening a journal: what counts, what is cut, what is damage. Small queues, damaged in every way there is (every
flipped
bit of a closed queue in "raise" mode; of the others, every third or seventh).

The rule held by the long tests, with one fault in one file: whatever was on disk for certain and not done is
delivered, or an error
says that it is not; what is delivered is what was put, once, in order. In quarantine mode nothing but the bad records
is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from kestrelpy import CorruptJournal, JournaledQueue, QueueEmpty, UnsupportedFormat
from kestrelpy._journal import format as fmt
from kestrelpy._journal.segment import iterate_frames
from kestrelpy.testing import ManualClock, MemoryDisk
from tests.support.budget import ALL
from tests.support.queues import START_MS, drain, take_all

Open = Callable[..., JournaledQueue]
Files = dict[str, bytes]

PUT = {1: b"one", 2: b"two!", 3: b"", 4: b"four", 5: b"five", 6: b"six six", 7: b"7", 8: b"eight", 9: b"nine nine"}
DONE = {2}


def opened(disk: MemoryDisk, **options: Any) -> JournaledQueue:
    return JournaledQueue("/q", "jobs", disk=disk, clock=ManualClock(START_MS + 1000), sync="never", **options)


def reference(*, killed: bool) -> Files:
    """Two segments: plain items, an expiring one, a batch; item 2 is done, item 1 has an error count."""
    disk = MemoryDisk()
    with opened(disk) as queue:
        queue.put(PUT[1])
        queue.put(PUT[2])
        queue.put(PUT[3])
        items = queue.get_many(2)
        items[1].commit()
        items[0].abort()
    queue = opened(disk)
    queue.put(PUT[4])
    queue.put(PUT[5], expires_in=10**6)
    queue.put_many([PUT[6], PUT[7]])
    queue.put(PUT[8])
    queue.sync()
    queue.put(PUT[9])
    queue.reader()
    queue.checkpoint(durable=True)
    if killed:
        disk.kill()
        with contextlib.suppress(Exception):
            queue.close()
    else:
        queue.close()
    return files_of(disk)


def files_of(disk: MemoryDisk) -> Files:
    directory = disk.directory("/q")
    found = {}
    for name in sorted(directory.names()):
        file = directory.open(name)
        found[name] = file.read(0, file.size())
    return {name: data for name, data in found.items() if not name.endswith(".lock")}


def disk_of(files: Files) -> MemoryDisk:
    disk = MemoryDisk()
    directory = disk.directory("/q", create=True)
    for name, data in files.items():
        file = directory.create(name)
        file.write(0, data)
    return disk


def durable_id(killed: bool) -> int:
    return 8 if killed else 9


def records(name: str, data: bytes) -> list[tuple[range, range]]:
    """The frames of a segment: their bytes and their ids."""
    header = fmt.decode_header(data)
    assert header is not None

    class File:
        def read(self, offset: int, size: int) -> bytes:
            return data[offset : offset + size]

    found = []
    for at, frame in iterate_frames(cast("Any", File()), header.marker, fmt.HEADER_BYTES, len(data)):
        if frame.footer is None:
            found.append((range(at, at + frame.size), range(frame.first_id, frame.last_id + 1)))
    return found


def check(files: Files, killed: bool, *, quarantine: bool, expected_loss: set[int] | None) -> str:
    """Open, drain, check; what happened. ``expected_loss``: ids that may be missing; ``None``: not to be told."""
    disk = disk_of(files)
    try:
        queue = opened(disk, on_corruption="quarantine" if quarantine else "raise")
    except UnsupportedFormat:
        return "refused"
    except CorruptJournal:
        assert not quarantine
        return "refused"
    seen: dict[int, bytes] = {}
    outcome = "good"
    with queue:
        reader = queue.reader()
        try:
            while True:
                item = reader.get_nowait()
                assert not seen or item.id > max(seen), "rising ids, nothing twice"
                seen[item.id] = item.data
        except CorruptJournal:
            assert not quarantine
            outcome = "raised"
        except QueueEmpty:
            pass
        for item_id, data in seen.items():
            assert PUT.get(item_id) == data, "never what was not put"
        missing = set(range(1, durable_id(killed) + 1)) - DONE - set(seen)
        if outcome == "good" and not quarantine:
            assert not missing, "never a silent loss"
        if quarantine:
            assert len(missing) <= queue.stats().quarantined, "what is skipped is counted"
            if expected_loss is not None:
                assert missing <= expected_loss, "exactly the bad records"
            reader.commit_many(list(seen))
            assert (reader.items, reader.bytes) == (0, 0)
        if outcome == "good":
            queue._check()
            assert queue.put(b"later") > max(seen, default=0)
            assert reader.get_nowait().data == b"later"
    return outcome


@pytest.fixture(autouse=True)
def _may_skip_notify(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of damaged queues are opened here; what they log would take more time than they do."""
    caplog.set_level("CRITICAL", "kestrelpy")


def faults(data: bytes, step: int) -> Iterator[tuple[int, bytes]]:
    """Every ``step``-th single flipped bit of the bytes in use, and some of the zeros behind them. ``make test`` takes
    fewer.
    """
    step = step if ALL else 7 * step
    used = len(data.rstrip(b"\0"))
    for bit in [*range(0, used * 8, step), *range(used * 8, min(len(data), used + 200) * 8, 37)]:
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        yield bit // 8, bytes(changed)


@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
@pytest.mark.parametrize("quarantine", [False, True], ids=["raise", "quarantine"])
def test_every_flipped_bit(killed: bool, quarantine: bool) -> None:
    files = reference(killed=killed)
    segments = [name for name in files if name.endswith(".segment")]
    assert len(segments) == 2
    assert sum(len(data.rstrip(b"\0")) for data in files.values()) < 2000
    outcomes = {"good": 0, "raised": 0, "refused": 0}
    for name, data in files.items():
        for offset, changed in faults(data, 7 if killed else 3 if quarantine else 1):
            expected: set[int] | None = set()
            if name.endswith(".segment"):
                for span, ids in records(name, data):
                    if offset in span:
                        expected = set(ids)
                if offset < fmt.HEADER_BYTES:
                    expected = {item_id for _, ids in records(name, data) for item_id in ids}
            outcome = check(files | {name: changed}, killed, quarantine=quarantine, expected_loss=expected)
            outcomes[outcome] += 1
    assert outcomes["good"] > (300 if ALL else 40)
    if ALL:
        assert outcomes["refused"] > 0
    assert (outcomes["raised"] > 0) is not quarantine


@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
@pytest.mark.parametrize("quarantine", [False, True], ids=["raise", "quarantine"])
def test_every_truncation_and_every_missing_file(killed: bool, quarantine: bool) -> None:
    files = reference(killed=killed)
    outcomes: list[str] = []
    for name, data in files.items():
        for size in range(0, len(data.rstrip(b"\0")), 1 if ALL else 5):
            lost = set()
            if name.endswith(".segment"):
                lost = {item_id for span, ids in records(name, data) if span.stop > size for item_id in ids}
                if size < fmt.HEADER_BYTES:
                    lost = {item_id for _, ids in records(name, data) for item_id in ids}
            outcomes.append(check(files | {name: data[:size]}, killed, quarantine=quarantine, expected_loss=lost))
        rest = {other: each for other, each in files.items() if other != name}
        lost = {item_id for _, ids in records(name, data) for item_id in ids} if name.endswith(".segment") else set()
        outcomes.append(check(rest, killed, quarantine=quarantine, expected_loss=lost))
    assert set(outcomes) == ({"good"} if quarantine else {"good", "refused"})


@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
def test_zeros_from_any_point_on(killed: bool) -> None:
    """R18: what a real power cut leaves of a file whose size was there before its content."""
    files = reference(killed=killed)
    for name, data in files.items():
        used = len(data.rstrip(b"\0"))
        for size in range(0, used, 3):
            check(files | {name: data[:size] + bytes(len(data) - size)}, killed, quarantine=False, expected_loss=None)


# -- single cases ----------------------------------------------------------------------------------------------------


def last_segment(files: Files) -> str:
    return max(name for name in files if name.endswith(".segment"))


# LK-F83, LK-F85, R11: a torn tail is cut, the old segment is closed, a new one goes on.
def test_lk_f83_a_torn_tail_never_counted() -> None:
    files = reference(killed=True)
    name = last_segment(files)
    used = len(files[name].rstrip(b"\0"))
    disk = disk_of(files | {name: files[name][: used - 1]})
    with opened(disk) as queue:
        assert [item.id for item in take_all(queue)] == [1, 3, 4, 5, 6, 7, 8]
        new_id = queue.put(b"new")
        assert new_id >= 9
        assert queue.stats().segments == 3
    after = files_of(disk)
    kept = after[name]
    assert kept.startswith(files[name][: used - 1]), "R19: recovery destroys nothing"
    assert kept.endswith(after[name][-fmt.FOOTER_BYTES :])
    with opened(disk) as queue:
        assert [item.data for item in take_all(queue)][-1] == b"new"


# R15: a watermark behind a bad record makes it damage, even where nothing else says so.
def test_r15_a_later_record_proves_that_an_earlier_one_was_on_disk() -> None:
    disk = MemoryDisk()
    queue = opened(disk)
    queue.put(b"first")
    queue.sync()
    queue.put(b"second")
    disk.kill()
    files = files_of(disk)
    with contextlib.suppress(Exception):
        queue.close()
    name = last_segment(files)
    at = files[name].index(b"first")
    bad = files[name][:at] + b"F" + files[name][at + 1 :]
    with pytest.raises(CorruptJournal) as caught:
        opened(disk_of({name: bad}))
    assert caught.value.item_id == 1
    assert caught.value.path == f"/q/{name}"
    # Without the second record nothing says that it ever was on disk.
    end = files[name].index(b"second") - fmt.FRAME_BYTES
    with opened(disk_of({name: bad[:end] + bytes(len(bad) - end)})) as queue:
        assert take_all(queue) == []


# R17, LK-B13: ids are never reused, whatever is left of the files.
@pytest.mark.parametrize("kept", [("mark",), ("checkpoint",), ("mark", "checkpoint")])
def test_r17_ids_are_not_reused_when_segments_are_gone(kept: tuple[str, ...]) -> None:
    files = reference(killed=False)
    left = {name: data for name, data in files.items() if name.endswith(kept)}
    with pytest.raises(CorruptJournal):
        opened(disk_of(left))
    with opened(disk_of(left), on_corruption="quarantine") as queue:
        assert queue.put(b"new") == 10
        assert queue.stats().quarantined > 0
        assert [item.id for item in take_all(queue)] == [10]


def test_a_torn_tail_above_which_ids_were_given_keeps_them_used() -> None:
    """R17: a whole record behind a torn one shows that its id was given out."""
    disk = MemoryDisk()
    queue = opened(disk)
    for n in range(4):
        queue.put(b"item %d" % n)
    disk.kill()
    files = files_of(disk)
    with contextlib.suppress(Exception):
        queue.close()
    name = last_segment(files)
    at = files[name].index(b"item 1")
    torn = files[name][:at] + b"I" + files[name][at + 1 :]
    disk = disk_of({name: torn})
    with opened(disk) as queue:
        assert [item.id for item in take_all(queue)] == [1]
        assert queue.put(b"new") == 5
    with opened(disk) as queue:
        reader = queue.reader()
        items = take_all(reader)
        assert [item.id for item in items] == [1, 5]
        assert reader.items == 2, "the ids that nobody has are not counted"
        reader.commit_many(items)
        assert reader.head == 5


# R18, libkestrel #4: an empty or headerless last segment is a crash while it was made.
@pytest.mark.parametrize("content", [b"", bytes(96), bytes(65_536), b"KSTRLSEG\1\0" + bytes(500), b"KSTR"])
def test_history_libkestrel_4_an_unfinished_last_segment(content: bytes) -> None:
    files = reference(killed=False)
    disk = disk_of(files | {"jobs.9000000000000.new.segment": content})
    with opened(disk) as queue:
        assert len(take_all(queue)) == 8
        queue.put(b"new")
    with opened(disk) as queue:
        assert len(take_all(queue)) == 9


def test_an_unfinished_segment_in_the_middle_is_damage() -> None:
    files = reference(killed=False)
    names = sorted(name for name in files if name.endswith(".segment"))
    number = int(names[0].split(".")[1]) + 0
    middle = f"jobs.{number}.00000000.segment"
    first = files[names[0]]
    with pytest.raises(CorruptJournal):
        opened(disk_of(files | {names[0]: b""}))
    disk = disk_of({middle: first, **{name: data for name, data in files.items() if name != names[0]}})
    with opened(disk) as queue:
        assert len(take_all(queue)) == 8, "an archived segment put back under its long name is the same segment"


# R5: a deleted segment that comes back is harmless.
def test_r5_a_deleted_segment_that_comes_back_is_harmless() -> None:
    disk = MemoryDisk()
    with opened(disk, segment_bytes=4096) as queue:
        for n in range(20):
            queue.put(b"%02d" % n * 300)
        queue.sync()
        before = files_of(disk)
        queue.commit_many([item.id for item in queue.get_many(15)])
        queue.checkpoint()
        queue.put(b"last")
    after = files_of(disk)
    gone = sorted(set(before) - set(after))
    assert len(gone) >= 2
    for comes_back in (gone[:1], gone[-1:], gone):
        disk = disk_of(after | {name: before[name] for name in comes_back})
        with opened(disk, segment_bytes=4096) as queue:
            assert [item.id for item in take_all(queue)] == [16, 17, 18, 19, 20, 21]
            queue.commit_many(range(16, 22))
            queue.checkpoint(durable=True)
            assert queue.stats().segments == 1
        assert sum(name.endswith(".segment") for name in files_of(disk)) == 1


# R16: a hole in the chain.
def test_r16_a_missing_segment_is_damage() -> None:
    disk = MemoryDisk()
    with opened(disk, segment_bytes=4096) as queue:
        queue.reader()
        for n in range(20):
            queue.put(b"%02d" % n * 300)
    files = files_of(disk)
    names = sorted(name for name in files if name.endswith(".segment"))
    for name in names:
        left = {other: data for other, data in files.items() if other != name}
        with pytest.raises(CorruptJournal):
            opened(disk_of(left), segment_bytes=4096)
        lost = {item_id for _, ids in records(name, files[name]) for item_id in ids}
        with opened(disk_of(left), segment_bytes=4096, on_corruption="quarantine") as queue:
            found = [item.id for item in take_all(queue)]
            assert set(found) == set(range(1, 21)) - lost
            assert queue.stats().quarantined == len(lost)
            assert queue.put(b"new") == 21
            queue.commit_many(found)
            assert (queue.reader().items, queue.reader().bytes) == (1, 3)


def test_a_segment_of_another_queue_is_damage() -> None:
    files = reference(killed=False)
    other = reference(killed=False)
    name = last_segment(files)
    with pytest.raises(CorruptJournal):
        opened(
            disk_of({**files, min(n for n in files if n.endswith(".segment")): other[min(other)]} | {name: other[name]})
        )


# R8: left-over temporary files go, by exact pattern; unknown files stay. The spare files of what is there stay too, and
# those of readers that are not there go.
def test_r8_temporary_files_go_and_foreign_ones_stay() -> None:
    files = reference(killed=False)
    assert {"jobs+.checkpoint.tmp", "jobs.mark.tmp"} <= files.keys()
    foreign = {"jobs.txt": b"x", "jobs.tmp": b"x", "other+.checkpoint.tmp": b"x", "jobs.1.segment.tmp.bak": b"x"}
    ours = {"jobs+gone.checkpoint.tmp": b"x", "jobs.readers.lock.tmp": b"x", "jobs.123.segment.tmp": b"x"}
    disk = disk_of(files | foreign | ours)
    with opened(disk) as queue:
        assert len(take_all(queue)) == 8
    left = files_of(disk)
    assert foreign.items() <= left.items()
    assert not ours.keys() & left.keys()


def test_nsq_938_thousands_of_empty_temporaries() -> None:
    files = reference(killed=False) | {f"jobs.{n}.segment.tmp": b"" for n in range(2000)}
    disk = disk_of(files)
    with opened(disk) as queue:
        assert len(take_all(queue)) == 8
    assert len(files_of(disk)) < 10


# R20: recovering twice gives the same.
def test_r20_recovery_is_repeatable() -> None:
    files = reference(killed=True)
    name = last_segment(files)
    files[name] = files[name][: len(files[name].rstrip(b"\0")) - 2]
    disk = disk_of(files)
    seen = []
    for _ in range(3):
        queue = opened(disk)
        seen.append([(item.id, item.data) for item in take_all(queue)])
        disk.kill()
        with contextlib.suppress(Exception):
            queue.close()
    assert seen[0] == seen[1] == seen[2]
    assert [item_id for item_id, _ in seen[0]] == [1, 3, 4, 5, 6, 7, 8]


# -- quarantine ------------------------------------------------------------------------------------------------------


def damaged(where: bytes) -> tuple[MemoryDisk, str, int]:
    files = reference(killed=False)
    for name, data in files.items():
        if name.endswith(".segment") and where in data:
            at = data.index(where)
            return disk_of(files | {name: data[:at] + b"\xff" + data[at + 1 :]}), name, at - fmt.FRAME_BYTES
    raise AssertionError(where)


def test_quarantine_skips_exactly_the_bad_record_and_keeps_its_bytes() -> None:
    disk, name, offset = damaged(b"four")
    with opened(disk, on_corruption="quarantine") as queue:
        reader = queue.reader()
        assert [item.id for item in take_all(reader)] == [1, 3, 5, 6, 7, 8, 9]
        assert queue.stats().quarantined == 1
        reader.commit_many([1, 3, 5, 6, 7, 8, 9])
        assert (reader.head, reader.items, reader.bytes) == (9, 0, 0)
        aside = [other for other in files_of(disk) if other.endswith(".quarantine")]
        number = name.split(".")[1]
        assert aside == [f"jobs.{number}.{offset}.quarantine"]
        assert files_of(disk)[aside[0]][fmt.FRAME_BYTES :] == b"\xffour"
    with opened(disk) as queue:
        queue.put(b"new")
        assert drain(queue) == [b"new"]


def test_quarantine_of_a_batch_skips_the_batch() -> None:
    disk, _, _ = damaged(b"six six")
    with opened(disk, on_corruption="quarantine") as queue:
        assert [item.id for item in take_all(queue)] == [1, 3, 4, 5, 8, 9]
        assert queue.stats().quarantined == 2


def test_every_reader_skips_it_and_it_is_counted_once() -> None:
    disk, _, _ = damaged(b"four")
    with opened(disk, on_corruption="quarantine") as queue:
        a = queue.reader("a")
        b = queue.reader("b", start="earliest")
        for reader in (a, b):
            found = [item.id for item in take_all(reader)]
            assert 4 not in found
            assert found[-1] == 9
        assert queue.stats().quarantined == 1


def test_on_corruption_raise_keeps_raising_and_seek_goes_past_it() -> None:
    disk, name, offset = damaged(b"four")
    with opened(disk) as queue:
        reader = queue.reader()
        assert [reader.get_nowait().id for _ in range(2)] == [1, 3]
        for call in (reader.get_nowait, reader.peek, reader.get_nowait, lambda: reader.get_many(5)):
            with pytest.raises(CorruptJournal) as caught:
                call()
            assert (caught.value.path, caught.value.offset, caught.value.item_id) == (f"/q/{name}", offset, 4)
        reader.commit(1)
        reader.seek(5)
        assert (reader.head, reader.items, reader.bytes) == (4, 5, sum(len(PUT[n]) for n in range(5, 10)))
        assert [item.id for item in take_all(reader)] == [5, 6, 7, 8, 9]
        reader.commit_many(range(5, 10))
        assert (reader.head, reader.items, reader.bytes) == (9, 0, 0)
        reader.seek(4)
        with pytest.raises(CorruptJournal):
            reader.get_nowait()
        reader.seek(time_ms=START_MS + 10**9)
        assert queue.put(b"new") == 10
        assert reader.get_nowait().id == 10


def test_a_waiter_hears_of_the_damage() -> None:
    disk, _, _ = damaged(b"four")
    with opened(disk) as queue:
        reader = queue.reader()
        assert len([reader.get_nowait() for _ in range(2)]) == 2
        with pytest.raises(CorruptJournal):
            reader.get_future().result(0)
        assert queue.put(b"a producer is not disturbed") == 10


def test_figures_do_not_need_the_damaged_item() -> None:
    disk, _, _ = damaged(b"four")
    with opened(disk) as queue:
        reader = queue.reader()
        reader.commit_many([reader.get_nowait() for _ in range(2)])
        stats = queue.stats()
        assert stats.readers[""].items == 6
        assert stats.readers[""].age == 0
        assert repr(queue)


# -- checkpoints -----------------------------------------------------------------------------------------------------


# LK-B2, LK-F93: a damaged or missing checkpoint: the reader starts at the earliest item kept.
@pytest.mark.parametrize("content", [None, b"", b"garbage", bytes(200)])
def test_lk_b2_a_lost_checkpoint_replays(content: bytes | None) -> None:
    disk = MemoryDisk()
    with opened(disk) as queue:
        a = queue.reader("a")
        queue.reader("b")
        for n in range(4):
            queue.put(b"%d" % n)
        a.commit_many(a.get_many(3))
    directory = disk.directory("/q")
    directory.unlink("jobs+a.checkpoint")
    if content is not None:
        directory.create("jobs+a.checkpoint").write(0, content)
    with opened(disk) as queue:
        assert [item.id for item in take_all(queue.reader("a", start="tail"))] == [1, 2, 3, 4]
        assert [item.id for item in take_all(queue.reader("b"))] == [1, 2, 3, 4]


def test_a_checkpoint_of_another_queue_is_none() -> None:
    """A file copied from elsewhere must not make its reader skip."""
    other = MemoryDisk()
    with opened(other) as queue:
        queue.put_many([b"x"] * 50)
        queue.commit_many(queue.get_many(50))
    files = reference(killed=False)
    files["jobs+.checkpoint"] = files_of(other)["jobs+.checkpoint"]
    with opened(disk_of(files)) as queue:
        assert [item.id for item in take_all(queue)] == list(range(1, 10))


@pytest.mark.parametrize("name", ["jobs.9000000000000.segment", "jobs+b.checkpoint", "jobs.mark"])
def test_a_newer_format_version_is_unsupported_and_nothing_is_changed(name: str) -> None:
    files = reference(killed=False)
    magic, newest = (fmt.SEGMENT_MAGIC, 1) if name.endswith("segment") else (fmt.CHECKPOINT_MAGIC, fmt.MOVES_VERSION)
    files[name] = magic + bytes([newest + 1, 0]) + bytes(200)
    disk = disk_of(files)
    for mode in ("raise", "quarantine"):
        with pytest.raises(UnsupportedFormat) as caught:
            opened(disk, on_corruption=mode)
        assert (caught.value.path, caught.value.version, caught.value.supported) == (f"/q/{name}", newest + 1, newest)
    assert files_of(disk) == files


def test_quarantine_of_a_damaged_header_passes_over_no_intact_item() -> None:
    files = reference(killed=False)
    name = last_segment(files)
    data = files[name]
    disk = disk_of(files | {name: data[:40] + b"\xff" + data[41:]})
    with opened(disk, on_corruption="quarantine") as queue:
        assert [item.id for item in take_all(queue)] == [1, 3, 4, 5, 6, 7, 8, 9]


def test_quarantine_rebuilds_the_header_of_any_closed_segment() -> None:
    disk = MemoryDisk()
    with JournaledQueue("/data", "jobs", disk=disk, segment_bytes=4096) as queue:
        for number in range(1, 13):
            queue.put(bytes([number]) * 1000)
    folder = disk.directory("/data")
    segments = sorted(name for name in folder.names() if name.endswith(".segment"))
    assert len(segments) > 3
    for name in segments:
        file = folder.open(name, write=True)
        kept = file.read(16, 1)
        file.write(16, bytes([kept[0] ^ 1]))
        with pytest.raises(CorruptJournal, match="header"):
            JournaledQueue("/data", "jobs", disk=disk)
        with JournaledQueue("/data", "jobs", disk=disk, on_corruption="quarantine") as queue:
            reader = queue.reader()
            reader.seek(1)
            assert [item.id for item in reader.get_many(100, timeout=0)] == list(range(1, 13))
            assert reader.bytes == 12_000
            assert queue.stats().quarantined == 0
        file.write(16, kept)
        file.close()
