"""The journal core, as a single-threaded state machine over the disk interface: append, rotate, retire, and an
interrupt anywhere.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kestrelpy._journal.journal
from kestrelpy import CorruptJournal, DurabilityUnknown, ForkedQueue, QueueDiskFull
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import format as fmt
from kestrelpy._journal.archive import archive_segment
from kestrelpy._journal.bodies import pack_body
from kestrelpy._journal.journal import SEGMENT_COST, UNFILLED_BYTES, Journal
from kestrelpy._journal.recovery import Recovered, Recovery
from kestrelpy._journal.segment import LARGE_BYTES, frames_of, read_header
from kestrelpy.testing import FailingDisk, MemoryDisk


def randomness() -> Any:
    counter = itertools.count(1)
    return lambda size: next(counter).to_bytes(size, "little")


def journal(disk: Any, *, folder: str = "/q", **options: Any) -> Journal:
    directory = disk.directory(folder, create=True)
    found = Recovery(directory, "jobs", (), quarantine=False).run(directory.names())
    options.setdefault("segment_bytes", 4096)
    return Journal(directory, "jobs", found, randomness=options.pop("randomness", randomness()), **options)


def sync(each: Journal) -> None:
    file, _ = each.sync_target()
    assert file is not None
    each.sync(file)


def everything(each: Journal) -> dict[int, fmt.Entry]:
    found: dict[int, fmt.Entry] = {}
    next_id, hint = each.first_id, None
    while next_id <= each.tail_id:
        block = each.read(next_id, each.tail_id, 10_000, hint)
        found |= block.entries
        next_id, hint = block.next_id, (block.number, block.position)
    return found


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> int:
    """Items of so many bytes are large ones here, to read and to write."""
    monkeypatch.setattr("kestrelpy._journal.journal.LARGE_BYTES", 1000)
    monkeypatch.setattr("kestrelpy._journal.segment.READ_BYTES", 500)
    monkeypatch.setattr("kestrelpy._journal.segment.PEEK_BYTES", 100)
    return 1000


class InterruptAtLine:
    """A ``KeyboardInterrupt`` before the ``at``-th line that is run in a file."""

    def __init__(self, at: int, path: str) -> None:
        self._left = at
        self._path = path

    @property
    def has_struck(self) -> bool:
        return self._left <= 0

    def __enter__(self) -> None:
        self._before = sys.gettrace()  # what measures the coverage
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != self._path:
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt
        return self._trace


def test_append_and_read_back() -> None:
    each = journal(MemoryDisk())
    assert (each.tail_id, each.first_id, each.segments, each.journal_bytes) == (0, 1, (), 0)
    assert each.append(b"a", 100) == 1
    assert each.append_frame([b"b"], 101, 999) == range(2, 3)
    assert each.append_frame([b"c", b""], 102, None) == range(3, 5)
    assert everything(each) == {1: (b"a", 100, None), 2: (b"b", 101, 999), 3: (b"c", 102, None), 4: (b"", 102, None)}
    assert (each.tail_id, each.total_bytes, each.missing) == (4, 3, 0)
    assert each.before(4) == (3, 3)
    assert each.before(99) == (4, 3)
    assert each.find_time(102, 4) == 3
    assert each.find_time(103, 4) == 5


# R34: file numbers are max(now_ms, last + 1).
def test_r34_numbers_rise_whatever_the_clock_says() -> None:
    each = journal(MemoryDisk())
    for added_ms in (1000, 1000, 500, 5000):
        each.append(bytes(3000), added_ms)
    assert [segment.number for segment in each.segments] == [1000, 1001, 1002, 5000]


# R7, R11: each header names its predecessor and where that ended.
def test_segments_are_chained() -> None:
    disk = MemoryDisk()
    each = journal(disk)
    for n in range(12):
        each.append(b"%02d" % n * 500, 1000 + n)
    for before, after in itertools.pairwise(each.segments):
        assert before.closed
        assert after.header.previous_number == before.number
        assert after.header.previous_last_id == before.last_id == after.first_id - 1
        assert after.header.previous_end == before.records_end
        assert after.header.base_items == before.header.base_items + before.items
        assert after.header.base_bytes == before.header.base_bytes + before.data_bytes
    assert len({segment.header.marker for segment in each.segments}) == len(each.segments)
    assert len({segment.header.queue_id for segment in each.segments}) == 1
    each.rotate()
    again = journal(disk)
    assert everything(again) == everything(each)
    assert again.append(b"next", 1) == 13


def test_frames_carry_the_watermark() -> None:
    disk = MemoryDisk()
    each = journal(disk)
    each.append(b"a", 1)
    each.append(b"b", 1)
    each.durable_id = 1
    each.append(b"c", 1)
    directory = disk.directory("/q")
    data = directory.open(each.segments[0].name).read(0, 4096)
    frame = fmt.decode_frame(data, fmt.HEADER_BYTES + 2 * 33, each.segments[0].header.marker)
    assert frame is not None
    assert (frame.first_id, frame.watermark) == (3, 1)


# R12: an error leaves nothing partial behind; LK-B25: and takes no id.
@pytest.mark.parametrize("kind", ["create", "grow"])
def test_lk_b25_an_append_that_fails_takes_no_id(kind: str) -> None:
    disk = FailingDisk(MemoryDisk())
    each = journal(disk)
    disk.arm(errno.ENOSPC, kinds={kind})
    with pytest.raises(QueueDiskFull):
        each.append(b"a", 1)
    assert (each.tail_id, each.total_bytes, each.segments) == (0, 0, ())
    assert each.append(b"b", 1) == 1
    assert everything(each) == {1: (b"b", 1, None)}


def test_other_errors_come_through_as_they_are() -> None:
    disk = FailingDisk(MemoryDisk())
    each = journal(disk)
    disk.arm(errno.EMFILE, kinds={"create"})
    with pytest.raises(OSError, match="Too many") as caught:
        each.append(b"a", 1)
    assert not isinstance(caught.value, QueueDiskFull)
    assert each.append(b"a", 1) == 1


def test_room_is_found_byte_by_byte_when_a_large_step_does_not_fit() -> None:
    disk = FailingDisk(MemoryDisk())
    each = journal(disk, segment_bytes=1 << 20)
    for _ in range(60):
        each.append(bytes(1000), 1)
    disk.arm(errno.ENOSPC, kinds={"grow"})
    for _ in range(20):
        each.append(bytes(1000), 1)
    assert disk.failures == 1, "it asked again for no more than it needed"
    assert len(everything(each)) == 80


@pytest.mark.parametrize(
    ("large", "exact", "expected"),
    [
        (errno.EIO, 0, errno.EIO),
        (errno.ENOSPC, errno.ENOSPC, errno.ENOSPC),
        (errno.ENOSPC, errno.EDQUOT, errno.ENOSPC),
        (errno.ENOSPC, errno.EIO, errno.EIO),
    ],
)
def test_an_append_that_finds_no_room_takes_no_id(large: int, exact: int, expected: int) -> None:
    """``large`` is what the growth by a large step fails with, ``exact`` the one by no more than is needed."""
    inner = FailingDisk(MemoryDisk())
    disk = FailingDisk(inner)
    each = journal(disk, segment_bytes=1 << 20)
    each.append(bytes(60_000), 1)
    disk.arm(large, kinds={"grow"})
    if exact:
        inner.arm(exact, kinds={"grow"})
    with pytest.raises(OSError, match=r"\[Errno") as caught:
        each.append(bytes(10_000), 1)
    assert caught.value.errno == expected
    assert isinstance(caught.value, QueueDiskFull) == (expected == errno.ENOSPC)
    assert not inner.armed
    assert (each.tail_id, each.total_bytes) == (1, 60_000)
    assert each.append(bytes(10_000), 1) == 2
    assert list(everything(each)) == [1, 2]


# R12, R13: a store that failed half-way is undone before the next one.
@pytest.mark.parametrize("short", [0, 1, 10, 31, 40, -1])
@pytest.mark.parametrize("kind", ["item", "batch", "body"])
def test_r12_a_short_store_is_undone(short: int, kind: str) -> None:
    disk = FailingDisk(MemoryDisk(), mapped=False)
    each = journal(disk)
    each.append(b"first", 1)
    disk.arm(errno.EIO, kinds={"store"}, short_bytes=short)
    torn: dict[str, Callable[[], object]] = {
        "item": lambda: each.append(b"torn" * 20, 1),
        "batch": lambda: each.append_frame([b"torn" * 9] * 2, 1, None),
        "body": lambda: each.append_body(pack_body([b"torn" * 9] * 2, None), 1),
    }
    with pytest.raises(OSError, match="Input/output"):
        torn[kind]()
    assert each.tail_id == 1
    assert each.append(b"second", 1) == 2
    assert everything(each) == {1: (b"first", 1, None), 2: (b"second", 1, None)}
    kill(disk)
    again = journal(disk.inner)
    assert everything(again) == everything_of(disk.inner) == {1: (b"first", 1, None), 2: (b"second", 1, None)}


def kill(disk: FailingDisk) -> None:
    assert isinstance(disk.inner, MemoryDisk)
    disk.inner.kill()


def everything_of(disk: Any) -> dict[int, fmt.Entry]:
    return everything(journal(disk))


def test_chronicle_793_dirty_bytes_past_a_failed_write() -> None:
    """Bytes of a failed write that nobody overwrote must not be taken for a record later."""
    disk = FailingDisk(MemoryDisk(), mapped=False)
    each = journal(disk)
    each.append(b"first", 1)
    disk.arm(errno.EIO, kinds={"store"}, short_bytes=-1)
    with pytest.raises(OSError, match="Input/output"):
        each.append(b"x" * 500, 1)
    each.append(b"y", 1)
    each.rotate()
    data = disk.inner.directory("/q").open(each.segments[0].name).read(0, 9999)
    assert b"xx" not in data
    assert list(everything_of(disk.inner)) == [1, 2]


def with_a_store_that_could_not_be_undone() -> tuple[FailingDisk, Journal]:
    disk = FailingDisk(MemoryDisk(), mapped=False)
    each = journal(disk)
    each.append(b"first", 1)
    disk.arm(errno.EIO, kinds={"store", "read"}, sticky=True, short_bytes=-1)
    with pytest.raises(OSError, match="Input/output"):
        each.append(b"torn" * 20 + b"\0", 1)  # all of it is there
    return disk, each


# R12: nothing goes on from a store that is not undone yet.
def test_r12_an_undoing_that_failed_is_done_before_the_next_append() -> None:
    disk, each = with_a_store_that_could_not_be_undone()
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            each.append(b"x", 1)
    disk.disarm()
    assert each.append(b"y", 1) == 2
    assert b"torn" not in disk.inner.directory("/q").open(each.segments[0].name).read(0, 9999)
    assert everything(each) == {1: (b"first", 1, None), 2: (b"y", 1, None)}
    kill(disk)
    assert everything_of(disk.inner) == {1: (b"first", 1, None), 2: (b"y", 1, None)}


def test_r12_an_undoing_that_failed_is_done_before_a_rotation() -> None:
    disk, each = with_a_store_that_could_not_be_undone()
    disk.disarm()
    each.rotate()
    (segment,) = each.segments
    data = disk.inner.directory("/q").open(segment.name).read(0, 9999)
    assert b"torn" not in data
    assert len(data) == segment.records_end + fmt.FOOTER_BYTES
    assert everything_of(disk.inner) == {1: (b"first", 1, None)}


# R13: an interrupt at any operation leaves file and memory of one mind.
def test_r13_an_interrupt_at_any_store_leaves_file_and_memory_of_one_mind() -> None:
    class Interrupting(FailingDisk):
        armed_at = 0

        def due(self, kind: str, path: str = "") -> OSError | None:
            if self.armed_at:
                self.armed_at -= 1
                if not self.armed_at:
                    raise KeyboardInterrupt
            return super().due(kind, path)

    for at in range(1, 60):  # one append that rotates takes some fifteen steps
        disk = Interrupting(MemoryDisk(), mapped=False)
        each = journal(disk)
        each.append(b"x" * 2000, 1)
        disk.armed_at = at
        acknowledged = {1: b"x" * 2000}
        for n in range(4):
            data = b"%d" % n * 2500
            with contextlib.suppress(KeyboardInterrupt, OSError, DurabilityUnknown):
                acknowledged[each.append(data, 1)] = data
        disk.armed_at = 0
        if each._refusal is None:
            found = everything(each)
            assert {item_id: entry[0] for item_id, entry in found.items()} == acknowledged
        kill(disk)
        found = everything_of(disk.inner)
        assert {item_id: found[item_id][0] for item_id in acknowledged} == acknowledged


# -- large items -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("real", [True, False])
def test_items_of_all_sizes_around_the_large_ones(tmp_path: Path, real: bool, mapped: bool) -> None:
    disk: Any = RealDisk(mapped=mapped) if real else FailingDisk(MemoryDisk(), mapped=mapped)
    folder = str(tmp_path)
    each = journal(disk, folder=folder, segment_bytes=1 << 20)
    sizes = [0, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, 10, 300_000, 300_000, 7, 500_000, 300_000, 0, 100_000]
    sizes += [(1 << 20) - SEGMENT_COST + more for more in (-1, 0, 1)] + [5, 1 << 21, 9, 200_000]
    expected: dict[int, fmt.Entry] = {}
    for size in sizes:
        data = bytes([1 + len(expected) % 250]) * size
        item_id = each.append(data, 100 + len(expected))
        expected[item_id] = (data, 100 + len(expected), None)
        assert everything(each) == expected
    assert len(each.segments) > 5
    for segment in each.segments[:-1]:
        with contextlib.closing(disk.directory(folder).open(segment.name)) as file:
            assert file.size() == segment.records_end + fmt.FOOTER_BYTES == segment.size
            assert [frame.first_id for _, frame in frames_of(file, segment, "path")] == [
                *range(segment.first_id, segment.last_id + 1)
            ]
    assert everything(journal(disk, folder=folder)) == expected, "as after a kill"


def test_a_large_item_is_one_write_and_small_ones_go_on_behind_it(large: int) -> None:
    disk = FailingDisk(MemoryDisk(), mapped=False)
    each = journal(disk, segment_bytes=1 << 20)
    each.append(b"x" * 65_000, 1)
    before = disk.counts.copy()
    each.append(b"y" * large, 1)
    assert disk.counts - before == {"grow": 1, "write": 1}
    before = disk.counts.copy()
    for _ in range(10):
        each.append(b"y" * large, 1)
    assert disk.counts - before == {"write": 10}, "room is made for many"
    before = disk.counts.copy()
    each.append(b"z", 1)
    each.append(b"z", 1)
    assert disk.counts - before == {"store": 2}, "and what is left of it serves small ones"
    assert [len(data) for data, _, _ in everything(each).values()] == [65_000, *[large] * 11, 1, 1]


@pytest.mark.parametrize(("size", "filled"), [(1000, True), (UNFILLED_BYTES - 200, True), (UNFILLED_BYTES, False)])
def test_room_is_not_filled_for_what_fills_it(large: int, size: int, filled: bool) -> None:
    class Watched(FailingDisk):
        def directory(self, path: str, *, create: bool = False) -> Any:
            directory = super().directory(path, create=create)
            make = directory.create
            directory.create = lambda name: watch(make(name))  # type: ignore[method-assign]
            return directory

    def watch(file: Any) -> Any:
        grow = file.grow

        def note_and_grow(size: int, fill: bool = True) -> Any:
            grown.append(fill)
            return grow(size, fill=fill)

        file.grow = note_and_grow
        return file

    grown: list[bool] = []
    each = journal(Watched(MemoryDisk()), segment_bytes=4 << 20)
    for _ in range(100_000 // size + 2):
        each.append(bytes(size), 1)
    assert grown[0], "the first room is for whatever comes"
    assert set(grown[1:]) == {filled}


def test_a_segment_has_marks_between_large_items_but_not_at_each(large: int) -> None:
    each = journal(MemoryDisk(), segment_bytes=1 << 20)
    for _ in range(600):
        each.append(bytes(large), 1)
    (segment,) = each.segments
    assert [offset // 60_000 for _, offset in segment.marks] == [1, 2, 4, 8]
    assert all(offset == fmt.HEADER_BYTES + (item_id - 1) * (large + 32) for item_id, offset in segment.marks)


# R12, R13: a large write that failed half-way is undone before the next one.
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("short", [0, 1, 31, 32, 40, -1])
def test_r12_a_short_write_of_a_large_item_is_undone(large: int, short: int, error: int) -> None:
    for following in (b"second" * large, b"second"):
        disk = FailingDisk(MemoryDisk())
        each = journal(disk, segment_bytes=1 << 17)
        first = b"first" * 13_000
        each.append(first, 1)
        disk.arm(error, kinds={"write"}, short_bytes=short)
        with pytest.raises(OSError, match=r"\[Errno") as caught:
            each.append(b"torn" * large, 1)
        assert isinstance(caught.value, QueueDiskFull) == (error == errno.ENOSPC)
        assert (each.tail_id, each.total_bytes) == (1, len(first))
        assert b"torn" not in disk.inner.directory("/q").open(each.segments[0].name).read(0, 1 << 20)
        kill(disk)
        assert list(everything(journal(disk.inner))) == [1], "nothing of it is left"
        disk = FailingDisk(MemoryDisk())
        each = journal(disk, segment_bytes=1 << 17)
        each.append(first, 1)
        disk.arm(error, kinds={"write"}, short_bytes=short)
        with pytest.raises(OSError, match=r"\[Errno"):
            each.append(b"torn" * large, 1)
        assert each.append(following, 1) == 2
        expected = {1: (first, 1, None), 2: (following, 1, None)}
        assert everything(each) == expected
        kill(disk)
        assert everything(journal(disk.inner)) == expected


@pytest.mark.parametrize("kind", ["create", "grow"])
def test_a_large_item_that_finds_no_room_takes_no_id(large: int, kind: str) -> None:
    for at in (1, 2):
        disk = FailingDisk(MemoryDisk())
        each = journal(disk, segment_bytes=1 << 20)
        disk.arm(errno.ENOSPC, kinds={kind}, at=at, sticky=True)
        data = b"x" * 100_000
        if kind == "grow" or at == 1:
            with pytest.raises(QueueDiskFull):
                each.append(data, 1)
            assert (each.tail_id, each.total_bytes) == (0, 0)
            assert everything(each) == {}
        disk.disarm()
        assert each.append(b"small", 1) == 1
        assert each.append(data, 1) == 2
        assert everything(each) == {1: (b"small", 1, None), 2: (data, 1, None)}


def test_r13_an_interrupt_between_any_two_lines_of_a_large_append(large: int) -> None:
    data = b"x" * 3000 + bytes(100)
    expected = {1: (b"first", 1, None), 2: (data, 2, None)}
    struck = 0
    for at in itertools.count(1):
        each = journal(disk := MemoryDisk(), segment_bytes=1 << 17)
        each.append(b"first", 1)
        strike = InterruptAtLine(at, kestrelpy._journal.journal.__file__)
        try:
            with strike:
                each.append(data, 2)
        except KeyboardInterrupt:
            struck += 1
            if each.tail_id == 1:
                assert everything(each) == {1: expected[1]}
                assert each.append(data, 2) == 2
        assert everything(each) == expected
        assert each.append(b"third", 2) == 3
        assert each.append(data, 2) == 4
        disk.kill()
        assert everything(journal(disk)) == expected | {3: (b"third", 2, None), 4: (data, 2, None)}
        if not strike.has_struck:
            break
    assert struck > 15


def test_damage_in_a_large_item_is_told_with_its_id(large: int) -> None:
    for at, mask in ((0, 1), (4, 1), (5, 255), (8, 1), (16, 1), (22, 1), (24, 1), (28, 1), (32, 1), (3031, 128)):
        each = journal(disk := MemoryDisk(), segment_bytes=1 << 17)
        for n in range(1, 5):
            each.append(b"%d" % n * 3000, 1)
        each.rotate()
        (segment,) = each.segments
        offset = fmt.HEADER_BYTES + 2 * 3032 + at
        file = disk.directory("/q").open(segment.name, write=True)
        file.write(offset, bytes([file.read(offset, 1)[0] ^ mask]))
        with pytest.raises(CorruptJournal, match="item 3 ") as caught:
            everything(each)
        assert (caught.value.item_id, caught.value.offset) == (3, offset - at)


# R9: a sync that failed at a rotation refuses everything from then on.
def test_r9_a_rotation_whose_sync_fails_ends_it() -> None:
    disk = FailingDisk(MemoryDisk())
    each = journal(disk)
    each.append(bytes(3000), 1)
    disk.arm(errno.EIO, kinds={"sync"})
    with pytest.raises(DurabilityUnknown) as caught:
        each.append(bytes(3000), 1)
    assert (caught.value.first_id, caught.value.last_id) == (1, 1)
    for _ in range(2):
        with pytest.raises(DurabilityUnknown):
            each.append(b"x", 1)
    each.abandon()
    kill(disk)
    assert list(everything_of(disk.inner)) == [1]


def test_r13_an_interrupt_behind_the_footer_does_not_write_it_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    disk = FailingDisk(MemoryDisk())
    each = journal(disk)
    each.append(bytes(3000), 1)
    monkeypatch.setattr(each._file, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        each.rotate()
    assert each.append(b"next", 1) == 2
    closed, _ = each.segments
    assert disk.inner.directory("/q").open(closed.name).size() == closed.records_end + fmt.FOOTER_BYTES
    kill(disk)
    assert list(everything_of(disk.inner)) == [1, 2]


# R26: a signal handler may fork; the child goes on in the middle of what it was doing.
@pytest.mark.parametrize("batch", [False, True])
def test_r26_a_child_forked_inside_an_append_stores_nothing(batch: bool) -> None:
    def fork(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is Journal._note_time.__code__:
            sys.setprofile(None)
            each.refuse(ForkedQueue(1))
            each.abandon()

    disk = MemoryDisk()
    each = journal(disk)
    each.append(b"parent's", 1)
    file = disk.directory("/q").open(each.segments[0].name)
    before = file.read(0, 9999)
    sys.setprofile(fork)
    try:
        with pytest.raises(TypeError):
            each.append_frame([b"a", b"b"], 2, None) if batch else each.append(b"child's", 2)
    finally:
        sys.setprofile(None)
    for _ in range(2):
        with pytest.raises(ForkedQueue):
            each.append(b"child's", 3)
    assert each.tail_id == 1
    assert file.read(0, 9999) == before
    assert disk.directory("/q").names() == [each.segments[0].name]


# R9: whoever has taken a file to sync, and comes when its rotation's sync has failed, must not take it for synced.
def test_the_tip_is_where_the_next_frame_goes() -> None:
    each = journal(MemoryDisk())
    assert each.tip() == (None, 0, 0, 0)
    each.append(b"one", 1)
    each.append_frame([b"two", b"three"], 1, None)
    segment, end, last_id, total_bytes = each.tip()
    assert segment is each.segments[0]
    assert (end, last_id, total_bytes) == (each._at[0], 3, 11)
    each.rotate()
    assert each.tip()[0] is None
    assert each.tip()[2:] == (3, 11)


def test_no_segment_above_the_limit_is_retired() -> None:
    each = journal(MemoryDisk())
    for _ in range(3):
        each.append(b"x", 1)
        each.rotate()
    first, second, _ = each.segments
    assert each.take_retired(3, 0) == []
    assert each.take_retired(3, first.number) == [first]
    assert each.take_retired(3) == [second]


def test_r9_a_sync_target_whose_rotation_failed_is_not_called_synced() -> None:
    disk = FailingDisk(MemoryDisk())
    each = journal(disk)
    each.append(bytes(3000), 1)
    file, tail_id = each.sync_target()
    assert tail_id == 1
    assert file is not None
    assert each.is_active(file)
    disk.arm(errno.EIO, kinds={"sync"})
    with pytest.raises(DurabilityUnknown):
        each.append(bytes(3000), 1)
    for call in (lambda: each.is_active(file), each.sync_target):
        with pytest.raises(DurabilityUnknown) as caught:
            call()
        assert (caught.value.first_id, caught.value.last_id) == (1, 1)


def test_r32_a_rotation_out_of_descriptors_leaves_a_working_journal() -> None:
    disk = FailingDisk(MemoryDisk())
    each = journal(disk)
    each.append(bytes(3000), 1)
    disk.arm(errno.EMFILE, kinds={"create"})
    with pytest.raises(OSError, match="Too many"):
        each.append(bytes(3000), 1)
    assert each.append(bytes(3000), 1) == 2
    assert list(everything(each)) == [1, 2]


# R5: only what every head is past, and never the newest.
def test_retired_segments_are_taken_from_the_front() -> None:
    each = journal(MemoryDisk())
    for _ in range(6):
        each.append(bytes(3000), 1)
    assert each.take_retired(0) == []
    assert [segment.last_id for segment in each.take_retired(2)] == [1, 2]
    assert each.first_id == 3
    assert [segment.last_id for segment in each.take_retired(99)] == [3, 4], "nothing of the newest one is on disk yet"
    sync(each)
    assert [segment.last_id for segment in each.take_retired(99)] == [5]
    assert len(each.segments) == 1


# R6, LK-B14: the archive.
@pytest.mark.parametrize("mounts", [(), ("/archive",)], ids=["same file system", "another one"])
def test_lk_b14_archive_segment(mounts: tuple[str, ...]) -> None:
    disk = MemoryDisk(mounts=mounts)
    each = journal(disk, archive=disk.directory("/archive", create=True))
    for _ in range(4):
        each.append(bytes(3000), 1)
    directory, archive = disk.directory("/q"), disk.directory("/archive")
    sync(each)
    retired = each.take_retired(3)
    contents = {segment.name: directory.open(segment.name).read(0, 9999) for segment in retired}
    for segment in retired:
        each.dispose(segment)
    assert {name: archive.open(name).read(0, 9999) for name in archive.names()} == contents
    assert not contents.keys() & set(directory.names())
    assert each.archived_count == 3
    # Its twin, come back from a deletion, is removed and not moved over it.
    name = retired[0].name
    directory.create(name).write(0, contents[name])
    assert archive_segment(directory, name, archive, "jobs", retired[0].header) is False
    assert name not in directory.names()


def test_an_archive_never_overwrites() -> None:
    disk = MemoryDisk()
    archive = disk.directory("/archive", create=True)
    each = journal(disk, archive=archive)
    for _ in range(2):
        each.append(bytes(3000), 1)
    sync(each)
    (segment,) = each.take_retired(1)
    archive.create(segment.name).write(0, b"foreign")
    long_name = segment.name.replace(".segment", f".{segment.header.queue_id[:4].hex()}.segment")
    archive.create(long_name).write(0, b"foreign too")
    with pytest.raises(FileExistsError):
        each.dispose(segment)
    assert archive.open(segment.name).read(0, 99) == b"foreign"
    assert segment.name in disk.directory("/q").names()
    archive.unlink(long_name)
    each.dispose(segment)
    assert read_header(archive.open(long_name), "x") == segment.header


@pytest.mark.parametrize("at", range(1, 20))
def test_an_archive_across_file_systems_interrupted_anywhere_keeps_a_whole_copy(at: int) -> None:
    disk = FailingDisk(MemoryDisk(mounts=["/archive"]))
    archive = disk.directory("/archive", create=True)
    each = journal(disk, archive=archive)
    for _ in range(2):
        each.append(bytes(3000), 1)
    sync(each)
    (segment,) = each.take_retired(1)
    directory = disk.inner.directory("/q")
    whole = directory.open(segment.name).read(0, 9999)
    disk.arm(errno.EIO, at=at)
    with contextlib.suppress(OSError):
        each.dispose(segment)
    disk.disarm()
    places = [directory, disk.inner.directory("/archive")]
    assert any(segment.name in place.names() and place.open(segment.name).read(0, 9999) == whole for place in places)
    if segment.name in directory.names():
        each.dispose(segment)
    assert disk.inner.directory("/archive").open(segment.name).read(0, 9999) == whole
    assert segment.name not in directory.names()


def test_a_sync_leaves_the_name_of_a_file_that_is_about_to_go() -> None:
    directory = MemoryDisk().directory("/q", create=True)
    each = Journal(directory, "jobs", Recovered(), segment_bytes=4096, randomness=randomness())
    each.keep_name()
    each.append(b"x", 1)
    each.keep_name()
    (name,) = directory.names()
    directory.unlink(name)
    sync(each)
    assert directory.names() == []


def test_a_new_journal_takes_its_queue_id_from_what_was_found() -> None:
    directory = MemoryDisk().directory("/q", create=True)
    each = Journal(
        directory, "jobs", Recovered(queue_id=b"z" * 16, tail_id=41), segment_bytes=4096, randomness=randomness()
    )
    assert each.queue_id == b"z" * 16
    assert each.append(b"x", 1) == 42
    assert each.missing == 41
    assert each.before(42) == (0, 0)
