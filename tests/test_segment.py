"""One segment: made, closed, read back, bounded by what is known of it."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from kestrelpy import CorruptJournal, UnsupportedFormat
from kestrelpy import _format as fmt
from kestrelpy._segment import (
    Segment,
    close_segment,
    create_segment,
    iterate_frames,
    load_segment,
    read_entries,
    read_footer,
    read_header,
)
from kestrelpy.testing import FailingDisk, MemoryDisk

MARKER = 0x80000001
HEADER = fmt.SegmentHeader(MARKER, b"q" * 16, 7, 5, 4, 40, 6, 4, 200)
NAME = "jobs.0000000000007.segment"


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
    fmt.encode_batch(7, [b"a", b"", b"c"], 102, None, 6, MARKER),
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
def test_r1_a_new_segment_is_synced_by_content_and_by_name() -> None:
    disk = FailingDisk(MemoryDisk())
    directory = disk.directory("/q", create=True)
    before = disk.counts.copy()
    file, _ = create_segment(directory, NAME, HEADER, 4096)
    assert (disk.counts["sync"] - before["sync"], disk.counts["sync_directory"] - before["sync_directory"]) == (1, 1)
    assert file.size() == 4096
    assert read_header(file, "path") == HEADER
    assert read_footer(file, HEADER) is None
    with pytest.raises(FileExistsError):
        create_segment(directory, NAME, HEADER, 4096)


@pytest.mark.parametrize("kind", ["grow", "sync", "sync_directory"])
def test_a_segment_that_cannot_be_made_leaves_no_file(kind: str) -> None:
    disk = FailingDisk(MemoryDisk())
    directory = disk.directory("/q", create=True)
    disk.arm(errno.ENOSPC, kinds={kind})
    with pytest.raises(OSError, match="No space"):
        create_segment(directory, NAME, HEADER, 4096)
    assert directory.names() == []


# R7: closed by a footer, cut, synced.
def test_close_and_load_again() -> None:
    file, segment = made(FRAMES)
    close_segment(file, segment)
    assert segment.closed
    assert file.size() == segment.size == segment.records_end + fmt.FOOTER_BYTES
    loaded = load_segment(file, "jobs", HEADER)
    assert loaded.closed
    assert (loaded.name, loaded.number, loaded.first_id, loaded.last_id, loaded.items) == (NAME, 7, 5, 10, 6)
    assert (loaded.data_bytes, loaded.records_end, loaded.size) == (126, segment.records_end, segment.size)
    assert loaded.as_footer() == segment.as_footer()


def test_an_empty_segment_can_be_closed() -> None:
    file, segment = made([])
    close_segment(file, segment)
    loaded = load_segment(file, "jobs", HEADER)
    assert (loaded.closed, loaded.items, loaded.last_id) == (True, 0, 4)


# R19: what a crash left behind the records is kept in front of the footer.
def test_leftover_bytes_are_kept_and_not_read() -> None:
    file, segment = made(FRAMES[:1])
    file.write(segment.records_end, b"torn bytes")
    close_segment(file, segment)
    assert file.read(segment.records_end, 10) == b"torn bytes"
    assert file.size() == segment.records_end + 10 + fmt.FOOTER_BYTES
    loaded = load_segment(file, "jobs", HEADER)
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
    batch = fmt.encode_batch(6, [bytes(300_000)] * 3, 100, None, 4, MARKER)
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
    assert segment.place_before(9) == (5, fmt.HEADER_BYTES)
    segment.marks = [(6, 132), (10, 300)]
    assert [segment.place_before(item_id)[0] for item_id in (5, 6, 9, 10, 99)] == [5, 6, 6, 10, 10]
