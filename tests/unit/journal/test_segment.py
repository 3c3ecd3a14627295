"""One segment: made, closed, read back, bounded by what is known of it."""

from __future__ import annotations

import errno
import itertools
from typing import Any
from zlib import crc32

import pytest

from kestrelpy import CorruptJournal, UnsupportedFormat
from kestrelpy._journal import format as fmt
from kestrelpy._journal.segment import (
    Segment,
    close_segment,
    create_segment,
    frames_of,
    is_abandoned,
    iterate_frames,
    load_segment,
    open_segment,
    read_entries,
    read_footer,
    read_header,
    read_searchable,
    read_used,
    segments_in,
    stored_header,
    sync_and_name,
)
from kestrelpy.testing import FailingDisk, MemoryDisk

MARKER = 0x80000001
HEADER = fmt.SegmentHeader(MARKER, b"q" * 16, 7, 5, 4, 40, 6, 4, 200)
NAME = "jobs.0000000000007.segment"
NEW = "jobs.0000000000007.new.segment"


def made(frames: list[bytes], size: int = 4096) -> tuple[Any, Segment]:
    directory = MemoryDisk().directory("/q", create=True)
    file, buffer = create_segment(directory, NAME, HEADER, size)
    segment = Segment(NAME, HEADER, HEADER.first_id - 1, 0, fmt.HEADER_BYTES, size=size)
    for frame in frames:
        end = segment.records_end + len(frame)
        buffer[segment.records_end : end] = frame
        decoded = fmt.decode_frame(frame, 0, MARKER)
        assert decoded is not None
        segment.records_end = end
        segment.last_id = decoded.last_id
        segment.data_bytes += sum(len(entry[0]) for entry in decoded.entries)
    return file, segment


FRAMES = [
    fmt.encode_item(5, b"five", 100, None, 4, MARKER),
    fmt.encode_item(6, b"", 101, 500, 4, MARKER),
    fmt.encode_batch(7, [b"a", b"", b"c"], [1, 0, 1], 102, None, 6, MARKER),
    fmt.encode_item(10, b"ten" * 40, 103, None, 6, MARKER),
]
ENTRIES = {
    5: (b"five", 100, None),
    6: (b"", 101, 500),
    7: (b"a", 102, None),
    8: (b"", 102, None),
    9: (b"c", 102, None),
    10: (b"ten" * 40, 103, None),
}


# R1: content and name are on disk before it is used.
def test_r1_a_segment_is_new_until_it_is_on_disk_by_content_and_by_name() -> None:
    disk = FailingDisk(MemoryDisk())
    directory = disk.directory("/q", create=True)
    before = disk.counts.copy()
    file, _ = create_segment(directory, NEW, HEADER, 4096)
    assert disk.counts["sync"] + disk.counts["sync_directory"] == before["sync"] + before["sync_directory"]
    assert file.size() == 4096
    assert read_header(file, "path") == HEADER
    assert read_footer(file, HEADER) is None
    segment = load_segment(file, NEW, HEADER)
    with pytest.raises(FileExistsError):
        create_segment(directory, NEW, HEADER, 4096)
    for synced in ((1, 1), (2, 1)):
        sync_and_name(directory, file, segment)
        counts = disk.counts - before
        assert (counts["sync"], counts["sync_directory"], counts["rename"]) == (*synced, 1)
        assert (segment.name, directory.names()) == (NAME, [NAME])
    with pytest.raises(FileExistsError, match="has the name"):
        create_segment(directory, NEW, HEADER, 4096)
    assert open_segment(directory, NEW).read(0, 96) == open_segment(directory, NAME).read(0, 96)
    for name in (NEW, NAME):
        with pytest.raises(FileNotFoundError):
            open_segment(directory, name.replace("7", "8"))


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_segment_may_be_given_its_name_once_more(at: int) -> None:
    """As far as it came before it was interrupted."""
    disk = FailingDisk(MemoryDisk())
    directory = disk.directory("/q", create=True)
    file, _ = create_segment(directory, NEW, HEADER, 4096)
    segment = load_segment(file, NEW, HEADER)
    disk.arm(errno.EINTR, at=at)
    with pytest.raises(InterruptedError):
        sync_and_name(directory, file, segment)
    assert segment.name == NEW
    sync_and_name(directory, file, segment)
    assert (segment.name, directory.names()) == (NAME, [NAME])


@pytest.mark.parametrize("kind", ["grow"])
def test_a_segment_that_cannot_be_made_leaves_no_file(kind: str) -> None:
    disk = FailingDisk(MemoryDisk())
    directory = disk.directory("/q", create=True)
    disk.arm(errno.ENOSPC, kinds={kind})
    with pytest.raises(OSError, match="No space"):
        create_segment(directory, NEW, HEADER, 4096)
    assert directory.names() == []


# R7: closed by a footer, cut, synced.
def test_close_and_load_again() -> None:
    file, segment = made(FRAMES)
    close_segment(file, segment)
    assert segment.closed
    assert file.size() == segment.size == segment.records_end + fmt.FOOTER_BYTES
    loaded = load_segment(file, NAME, HEADER)
    assert loaded.closed
    assert (loaded.name, loaded.number, loaded.first_id, loaded.last_id, loaded.items) == (NAME, 7, 5, 10, 6)
    assert (loaded.data_bytes, loaded.records_end, loaded.size) == (126, segment.records_end, segment.size)
    assert loaded.as_footer() == segment.as_footer()


def test_an_empty_segment_can_be_closed() -> None:
    file, segment = made([])
    close_segment(file, segment)
    loaded = load_segment(file, NAME, HEADER)
    assert (loaded.closed, loaded.items, loaded.last_id) == (True, 0, 4)


# R19: what a crash left behind the records is kept in front of the footer.
def test_leftover_bytes_are_kept_and_not_read() -> None:
    file, segment = made(FRAMES[:1])
    file.write(segment.records_end, b"torn bytes")
    close_segment(file, segment)
    assert file.read(segment.records_end, 10) == b"torn bytes"
    assert file.size() == segment.records_end + 10 + fmt.FOOTER_BYTES
    loaded = load_segment(file, NAME, HEADER)
    assert (loaded.closed, loaded.last_id, loaded.records_end) == (True, 5, segment.records_end)


def test_a_footer_that_claims_more_than_the_file_has_is_none() -> None:
    file, segment = made(FRAMES)
    segment.records_end += 1000
    file.write(500, fmt.encode_footer(segment.as_footer(), 7, MARKER))
    file.truncate(500 + fmt.FOOTER_BYTES)
    assert read_footer(file, HEADER) is None


@pytest.mark.parametrize("size", [0, 1, 95, 96, 191])
def test_a_file_too_short_has_no_footer(size: int) -> None:
    file, _ = made(FRAMES)
    file.truncate(size)
    assert read_footer(file, HEADER) is None
    assert (read_header(file, "path") is None) is (size < 96)


def test_a_newer_version_is_unsupported() -> None:
    directory = MemoryDisk().directory("/q", create=True)
    file = directory.create(NAME)
    file.write(0, fmt.SEGMENT_MAGIC + b"\2\0")
    with pytest.raises(UnsupportedFormat) as caught:
        read_header(file, "/q/x")
    assert (caught.value.path, caught.value.version, caught.value.supported) == ("/q/x", 2, 1)


def read(file: Any, segment: Segment, first_id: int, last_id: int, max_bytes: int = 1 << 30, **more: Any) -> Any:
    place = more.get("place", (5, fmt.HEADER_BYTES))
    return read_entries(file, MARKER, "path", place, segment.records_end, first_id, last_id, max_bytes)


def test_read_entries_from_any_id_to_any_id() -> None:
    file, segment = made(FRAMES)
    for first in ENTRIES:
        for last in range(first, 11):
            entries, (next_id, _) = read(file, segment, first, last)
            end = 9 if 7 <= last <= 9 else last  # a batch is read as a whole
            assert entries == {item_id: ENTRIES[item_id] for item_id in range(first, end + 1)}
            assert next_id == end + 1
    assert read(file, segment, 5, 10)[1] == (11, segment.records_end)


def test_items_larger_than_a_block_are_read_by_themselves_and_only_once() -> None:
    directory = (disk := MemoryDisk()).directory("/q", create=True)
    sizes = [300_000, 300_000, 10, 20, 300_000, 200_000, 1_000_000, 5]
    entries = {n: (b"%d" % (n % 10) * size, 100, 999 if n == 10 else None) for n, size in enumerate(sizes, 5)}
    frames = [fmt.encode_item(n, *entry, 4, MARKER) for n, entry in entries.items()]
    file, _ = create_segment(directory, NAME, HEADER, 3 << 20)
    file.write(fmt.HEADER_BYTES, *frames)
    end = fmt.HEADER_BYTES + sum(map(len, frames))
    for max_bytes in (1, 1 << 20):
        found: dict[int, fmt.Entry] = {}
        place, before = (5, fmt.HEADER_BYTES), disk.bytes_read
        while place[0] <= 12:
            some, place = read_entries(file, MARKER, "path", place, end, place[0], 12, max_bytes)
            assert some
            found |= some
        assert found == entries
        assert place == (13, end)
        assert disk.bytes_read - before < end * 1.35, "what expires is read by a block first, and no other"
    place = (5, fmt.HEADER_BYTES)
    for first_id in entries:
        for last_id in range(first_id, 13):
            some, (next_id, _) = read_entries(file, MARKER, "path", place, end, first_id, last_id, 1 << 20)
            assert next(iter(some)) == first_id
            assert next_id == max(some) + 1 <= last_id + 1


def test_reading_goes_on_from_the_place_it_ended_at() -> None:
    file, segment = made([fmt.encode_item(n, b"%02d" % n * 1000, 100, None, 4, MARKER) for n in range(5, 25)], 65_536)
    found: dict[int, Any] = {}
    place = (5, fmt.HEADER_BYTES)
    while place[0] <= 24:
        entries, place = read(file, segment, place[0], 24, 1, place=place)
        assert 1 <= len(entries) <= 2, "about max_bytes and at least one"
        assert not found.keys() & entries.keys()
        found |= entries
    assert found == {n: (b"%02d" % n * 1000, 100, None) for n in range(5, 25)}


def test_frames_larger_than_one_read() -> None:
    large = fmt.encode_item(5, bytes(700_000), 100, None, 4, MARKER)
    batch = fmt.encode_batch(6, [bytes(300_000)] * 3, [300_000] * 3, 100, None, 4, MARKER)
    file, segment = made([large, batch], 2 << 20)
    for max_bytes in (1, 1 << 30):
        entries, place = read(file, segment, 5, 5, max_bytes)
        assert [len(entry[0]) for entry in entries.values()] == [700_000]
        entries, _ = read(file, segment, 6, 8, max_bytes, place=place)
        assert [len(entry[0]) for entry in entries.values()] == [300_000] * 3
    assert [frame.first_id for _, frame in iterate_frames(file, MARKER, 96, segment.records_end)] == [5, 6]


@pytest.mark.parametrize("bad_id", [5, 6, 7, 10])
def test_damage_is_named_with_its_place(bad_id: int) -> None:
    file, segment = made(FRAMES)
    offset, frame = next(
        (o, f) for o, f in iterate_frames(file, MARKER, 96, segment.records_end) if f.first_id == bad_id
    )
    file.write(offset + frame.size - 1, bytes([file.read(offset + frame.size - 1, 1)[0] ^ 4]))
    with pytest.raises(CorruptJournal) as caught:
        read(file, segment, 5, 10)
    assert (caught.value.path, caught.value.offset, caught.value.item_id) == ("path", offset, bad_id)
    if bad_id > 5:
        assert list(read(file, segment, 5, bad_id - 1)[0]) == list(range(5, bad_id))


@pytest.mark.parametrize("claimed", [0, 3, 5, 100, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_claimed_length_is_checked_before_anything_is_read(claimed: int) -> None:
    """R21, nsq #471 and #1033: no allocation of what a bad length claims, no endless loop."""
    file, segment = made(FRAMES)
    file.write(fmt.HEADER_BYTES + 4, claimed.to_bytes(4, "little"))
    with pytest.raises(CorruptJournal) as caught:
        read(file, segment, 5, 10)
    assert (caught.value.offset, caught.value.item_id) == (fmt.HEADER_BYTES, 5)
    assert list(iterate_frames(file, MARKER, fmt.HEADER_BYTES, segment.records_end)) == []


def test_an_id_that_is_not_due_is_damage() -> None:
    file, segment = made([fmt.encode_item(6, b"x", 100, None, 4, MARKER)])
    with pytest.raises(CorruptJournal):
        read(file, segment, 5, 6)


def test_iterate_frames_stops_at_the_end_it_is_given() -> None:
    file, _ = made(FRAMES)
    frames = list(iterate_frames(file, MARKER, fmt.HEADER_BYTES, 4096))
    assert [frame.first_id for _, frame in frames] == [5, 6, 7, 10]
    second = frames[1][0]
    assert [frame.first_id for _, frame in iterate_frames(file, MARKER, fmt.HEADER_BYTES, second)] == [5]
    assert [frame.first_id for _, frame in iterate_frames(file, MARKER, second, 4096)] == [6, 7, 10]


def test_place_before() -> None:
    _, segment = made(FRAMES)
    assert segment.position_before(9) == (5, fmt.HEADER_BYTES)
    segment.marks = [(6, 132), (10, 300)]
    assert [segment.position_before(item_id)[0] for item_id in (5, 6, 9, 10, 99)] == [5, 6, 6, 10, 10]


def test_a_file_larger_than_any_segment_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """R21: a sparse file of exabytes could be read for ever."""
    file, _ = made(FRAMES)
    monkeypatch.setattr("kestrelpy._journal.segment.MAX_SEGMENT_BYTES", 4095)
    with pytest.raises(CorruptJournal, match="larger than a segment can be"):
        read_header(file, "path")


@pytest.mark.parametrize("cut", [0, 10, 96, 100, 1000, 4096])
def test_what_is_used_of_a_file_goes_to_the_last_byte_that_is_not_zero(
    cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = made(FRAMES)
    data = file.read(0, 4096)
    for block in (7, 64, 5000):
        monkeypatch.setattr("kestrelpy._journal.segment.MARK_EVERY", block)
        assert read_used(file, cut, 4096) == data[cut:].rstrip(b"\0")
        assert read_used(file, cut, cut + 50) == data[cut : cut + 50].rstrip(b"\0")


def test_the_zeros_that_end_a_last_frame_are_searched_too() -> None:
    last = fmt.encode_item(11, bytes(50), 104, None, 10, MARKER)
    file, segment = made([*FRAMES, last])
    found = read_searchable(file, fmt.HEADER_BYTES, 4096, MARKER)
    assert len(found) == segment.records_end - fmt.HEADER_BYTES
    assert fmt.look_beyond(found, MARKER, 11) == (11, 10)
    assert len(read_searchable(file, fmt.HEADER_BYTES, segment.records_end - 1, MARKER)) < len(found), "it is cut"


@pytest.mark.parametrize(("frames", "at", "seen"), [(0, 33, False), (1, 33, True), (3, 2, True)])
def test_damage_in_an_open_segment_is_told_from_a_torn_tail(frames: int, at: int, seen: bool) -> None:
    """R15: by what the frames behind say was on disk."""
    extra = [fmt.encode_item(11, b"eleven", 104, None, 10, MARKER)] if seen else []
    file, segment = made([*FRAMES[:2], *FRAMES[2:][: 2 * seen], *extra])
    offset = fmt.HEADER_BYTES + sum(len(frame) for frame in FRAMES[:frames])
    file.write(offset + at, bytes([file.read(offset + at, 1)[0] ^ 1]))
    found = []

    def read() -> None:
        for _, frame in frames_of(file, segment, "path"):
            found.append(frame.first_id)

    if seen:
        with pytest.raises(CorruptJournal, match="was on disk"):
            read()
    else:
        read()
    assert len(found) == frames


def test_frames_out_of_order_end_an_open_segment() -> None:
    later = fmt.encode_item(8, b"eight", 102, None, 4, MARKER)
    file, segment = made([FRAMES[0], later])
    assert [frame.first_id for _, frame in frames_of(file, segment, "path")] == [5]
    file, segment = made([FRAMES[0], FRAMES[2]])
    with pytest.raises(CorruptJournal, match="item 6 was on disk"):
        list(frames_of(file, segment, "path"))
    segment.closed = True
    with pytest.raises(CorruptJournal, match="item 6 is not intact"):
        list(frames_of(file, segment, "path"))


def test_what_is_stored_while_it_is_looked_for_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer may store a frame between the look at its place and the look behind it."""
    file, segment = made(FRAMES)
    data = file.read(0, 4096)
    at = fmt.HEADER_BYTES + len(FRAMES[0]) + len(FRAMES[1])
    file.write(at, bytes(32))
    real = fmt.look_beyond

    def look(*arguments: Any) -> tuple[int, int]:
        found = real(*arguments)
        file.write(at, data[at : at + 32])
        return found[0], 99

    monkeypatch.setattr(fmt, "look_beyond", look)
    assert [frame.first_id for _, frame in frames_of(file, segment, "path")] == [5, 6]


def test_a_footer_or_nonsense_where_an_item_is_due() -> None:
    footer = fmt.encode_footer(fmt.SegmentFooter(5, 6, 2, 4, 100, 101, 200), 7, MARKER)
    file, segment = made(FRAMES[:2])
    place = (5, fmt.HEADER_BYTES)
    at = segment.records_end
    file.write(at, footer[:8] + (7).to_bytes(8, "little") + footer[16:])
    nonsense = fmt.pack_frame(4, 7, 4 << fmt.KIND_SHIFT, 0, MARKER) + b"what"
    for frame in (
        fmt.encode_footer(fmt.SegmentFooter(5, 7, 3, 4, 100, 101, 200), 7, MARKER),
        fmt.pack_crc(crc32(nonsense)) + nonsense,
    ):
        file.write(at, frame)
        with pytest.raises(CorruptJournal, match="not intact") as caught:
            read_entries(file, MARKER, "path", place, 4096, 7, 7, 1 << 20)
        assert (caught.value.offset, caught.value.item_id) == (at, 7)


def test_what_is_left_of_a_making_is_no_segment_unless_a_later_one_names_it() -> None:
    empty, full = made([])[0], made(FRAMES)[0]
    assert is_abandoned(empty, NAME, 7, HEADER, None)
    assert is_abandoned(empty, NEW, 7, None, None)
    assert not is_abandoned(full, NAME, 7, HEADER, None)
    assert not is_abandoned(full, NEW, 7, HEADER, None)
    assert not is_abandoned(full, NAME, 7, None, None)
    assert not is_abandoned(empty, NAME, 7, None, None), "its header was on disk before it had this name"
    assert is_abandoned(full, NEW, 7, None, None), "a power cut may have kept its frames without the header"
    assert not is_abandoned(empty, NAME, 7, HEADER, HEADER._replace(number=8, previous_number=7))
    assert not is_abandoned(empty, NEW, 7, None, HEADER._replace(number=8, previous_number=7))
    assert is_abandoned(empty, NAME, 7, HEADER, HEADER._replace(number=8))


def test_the_header_of_a_segment_by_its_name() -> None:
    directory = MemoryDisk().directory("/q", create=True)
    create_segment(directory, NAME, HEADER, 4096)
    assert stored_header(directory, 7, NAME) == HEADER
    assert stored_header(directory, 8, NAME) is None
    assert stored_header(directory, 9, "jobs.0000000000009.segment") is None, "it is gone"


@pytest.mark.parametrize(
    ("listings", "expected"),
    [
        ([""], ""),
        (["", "1.new"], "1.new"),
        (["", "1 3", "1 2 3"], "1 2 3"),  # it begins amid the first segments
        (["1 3", "1 2 3"], "1 2 3"),  # 2 was hidden
        (["1 2.new", "1 4"], "1 2.new"),  # 2 and 3 are
        (["1 2.new", "2 3.new"], "2"),
        (["1 2", "2 3"], "2"),  # 1 was retired
        (["1 2", "5 7", "5 6 7"], "5 6 7"),  # all of them were
    ],
)
def test_a_rename_hides_no_segment_from_two_listings(listings: list[str], expected: str) -> None:
    """Each listing is that of a later moment; the last one stays."""

    def named(numbers: str) -> list[str]:
        return [f"q.{number}.segment" for number in numbers.split()]

    looks = itertools.chain(listings, itertools.repeat(listings[-1]))

    class Listed:
        def names(self) -> list[str]:
            return named(next(looks))

    assert [name for _, name in segments_in(Listed(), "q")] == named(expected)  # type: ignore[arg-type]
