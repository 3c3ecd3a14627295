"""Opening a journal whose files do not belong together: copies of different ages in one folder, neighbours that are
gone, bytes cut out, claims that cannot be true.

With "raise" nothing is delivered beside the damage; with "quarantine" what is delivered was put, once, in order, and
what is not is counted.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kestrelpy import CorruptJournal, JournaledQueue
from kestrelpy._journal import format as fmt
from kestrelpy.testing import ManualClock, MemoryDisk
from tests.support.patience import until
from tests.support.queues import START_MS, drain, take_all

Files = dict[str, bytes]


@pytest.fixture(autouse=True)
def _may_skip_notify(quiet: None) -> None:
    """What is damaged on purpose need not be logged."""


def opened(disk: MemoryDisk, seconds: int = 0, **options: Any) -> JournaledQueue:
    options.setdefault("on_corruption", "raise")
    return JournaledQueue(
        "/q", "jobs", disk=disk, clock=ManualClock(START_MS + 1000 * seconds), sync="never", **options
    )


def quarantined(disk: MemoryDisk) -> JournaledQueue:
    return opened(disk, 1000, on_corruption="quarantine")


def refused(files: Files) -> CorruptJournal:
    with pytest.raises(CorruptJournal) as caught, opened(disk_of(files)):
        pass
    return caught.value


def files_of(disk: MemoryDisk) -> Files:
    directory = disk.directory("/q")
    sizes = {name: directory.open(name).size() for name in directory.names() if not name.endswith(".lock")}
    return {name: directory.open(name).read(0, size) for name, size in sizes.items()}


def disk_of(files: Files) -> MemoryDisk:
    disk = MemoryDisk()
    directory = disk.directory("/q", create=True)
    for name, data in files.items():
        directory.create(name).write(0, data)
    return disk


def later(files: Files, seconds: int, *items: bytes) -> Files:
    """The files after the queue was opened on them at that time and ``items`` were put."""
    disk = disk_of(files)
    with opened(disk, seconds) as queue:
        for item in items:
            queue.put(item)
    return files_of(disk)


def segments(files: Files) -> list[str]:
    return sorted(name for name in files if name.endswith(".segment"))


def without_header(data: bytes) -> bytes:
    return data[:40] + bytes([data[40] ^ 1]) + data[41:]


def three_segments() -> Files:
    """Two items in each; no reader, and a mark that says that there are six."""
    files: Files = {}
    for n in range(3):
        files = later(files, n, b"%d" % (2 * n + 1), b"%d" % (2 * n + 2))
    assert len(segments(files)) == 3
    return files


# -- claims ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments_too", [True, False])
def test_a_mark_of_impossible_ids_is_refused_even_with_quarantine(segments_too: bool) -> None:
    """What goes on from there could not be stored."""
    files = three_segments()
    mark, _ = fmt.decode_checkpoints(files["jobs.mark"])
    assert mark is not None
    forged = fmt.checkpoint_prefix() + fmt.encode_checkpoint(mark._replace(head=1 << 40, watermark=0))
    files = {name: data for name, data in files.items() if segments_too and name.endswith("segment")}
    for mode in ("raise", "quarantine"):
        disk = disk_of({**files, "jobs.mark": forged})
        with pytest.raises(CorruptJournal, match="said to be given out"):
            opened(disk, on_corruption=mode)
        assert files_of(disk) == {**files, "jobs.mark": forged}


def test_a_segment_of_an_impossible_number_is_passed_over_and_left_alone() -> None:
    files = three_segments()
    name = f"jobs.{fmt.LARGEST}.segment"
    files[name] = files[segments(files)[-1]]
    assert refused(files).path == f"/q/{name}"
    disk = disk_of(files)
    with quarantined(disk) as queue:
        assert drain(queue) == [b"1", b"2", b"3", b"4", b"5", b"6"]
        assert queue.put(b"new") == 7
    assert files_of(disk)[name] == files[name]


def test_what_is_skipped_is_logged_by_another_thread(caplog: pytest.LogCaptureFixture) -> None:
    """Once for each damage: what the opening has found, and what a get has come to."""
    logging.disable(logging.NOTSET)
    files, other = three_segments(), three_segments()
    first, middle, _ = segments(files)
    files[middle] = other[middle]
    with quarantined(disk_of(files)) as queue:
        until(lambda: "queue jobs: damaged records are skipped, with 2 items" in caplog.text)
        drain(queue)
    caplog.clear()
    files = three_segments()
    at = files[first].index(b"2", fmt.HEADER_BYTES + fmt.FRAME_BYTES)
    files[first] = files[first][:at] + b"x" + files[first][at + 1 :]
    with quarantined(disk_of(files)) as queue:
        assert not caplog.records
        assert drain(queue) == [b"1", b"3", b"4", b"5", b"6"]
        until(
            lambda: "damaged records are skipped, with 1 items; what is left of them is kept aside in /q" in caplog.text
        )
        drain(queue)
    assert len(caplog.records) == 1


def test_a_segment_of_another_queue_among_ours_is_passed_over() -> None:
    files, other = three_segments(), three_segments()
    middle = segments(files)[1]
    files[middle] = other[middle]
    assert refused(files).path == f"/q/{middle}"
    disk = disk_of(files)
    with quarantined(disk) as queue:
        assert queue.stats().quarantined == 2
        assert drain(queue) == [b"1", b"2", b"5", b"6"]


# -- left over -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rest", [bytes(500), b"\1 what the disk had there" + bytes(500)], ids=["zeros", "something"])
def test_a_segment_that_was_begun_in_vain_goes_and_what_it_held_is_kept_aside(rest: bytes) -> None:
    """Making it failed, and removing it too; then another was made in its place."""
    files = three_segments()
    last = fmt.decode_header(files[segments(files)[-1]])
    assert last is not None
    number = last.number - 500
    vain = last._replace(number=number, marker=last.marker ^ 1)
    name = f"jobs.{number}.segment"
    disk = disk_of({**files, name: fmt.encode_header(vain) + rest})
    with opened(disk) as queue:
        assert [item.data for item in take_all(queue)] == [b"1", b"2", b"3", b"4", b"5", b"6"]
        assert queue.stats().quarantined == 0
    after = files_of(disk)
    assert name not in after
    kept = [data for other, data in after.items() if other.endswith(".quarantine")]
    assert kept == ([fmt.encode_header(vain) + rest] if rest.strip(b"\0") else [])


@pytest.mark.parametrize("mode", ["raise", "quarantine"])
def test_a_refused_opening_is_refused_again_in_the_same_words(mode: str) -> None:
    """It had put a file away by then, whose header made a claim."""
    files = three_segments()
    last = segments(files)[-1]
    header = fmt.decode_header(files[last])
    assert header is not None
    vain = header._replace(number=header.number - 500, marker=header.marker ^ 1, first_id=(fmt.LARGEST >> 1) + 2)
    files[f"jobs.{vain.number}.segment"] = fmt.encode_header(vain) + bytes(500)
    disk = disk_of(files)
    words = []
    for _ in range(2):
        with pytest.raises(CorruptJournal, match="said to be given out") as caught:
            opened(disk, on_corruption=mode)
        words.append(str(caught.value))
    assert words[0] == words[1]
    assert files_of(disk) == files


# -- a header that is gone -------------------------------------------------------------------------------------------


def test_the_header_of_the_first_segment_kept_is_rebuilt_from_the_one_behind_it() -> None:
    files = three_segments()
    first, second, _ = segments(files)
    del files[first]
    files[second] = without_header(files[second])
    assert refused(files).path == f"/q/{second}"
    with quarantined(disk_of(files)) as queue:
        reader = queue.reader(start="earliest")
        assert (reader.items, reader.bytes) == (4, 4)
        assert drain(reader) == [b"3", b"4", b"5", b"6"]
        assert (reader.items, reader.bytes, queue.stats().quarantined) == (0, 0, 0)


@pytest.mark.parametrize("gone", [1, 2])
def test_a_header_whose_neighbours_are_gone_is_not_guessed(gone: int) -> None:
    """How much was put before it cannot be known. Its items are counted as lost, and no id is used again."""
    files = three_segments()
    *_, last = segments(files)
    for name in segments(files)[2 - gone : 2]:
        del files[name]
    files[last] = without_header(files[last])
    assert refused(files).path == f"/q/{last}"
    disk = disk_of(files)
    with quarantined(disk) as queue:
        assert drain(queue) == [b"1", b"2"][: 2 * (2 - gone)]
        assert queue.stats().quarantined == 2 + 2 * gone
        assert queue.put(b"new") == 7
    assert files_of(disk)[last] == files[last]
    with quarantined(disk) as queue:
        assert drain(queue) == [b"new"]


def two_versions() -> tuple[Files, Files]:
    """A queue of items 1, 2, 3 and, in a second segment, 4; and a copy of it from before 3, in which another 3 was put,
    in a second segment, too.
    """
    disk = MemoryDisk()
    queue = opened(disk)
    queue.reader()
    queue.put(b"1")
    queue.put(b"2")
    copy = later(files_of(disk), 20, b"another 3")
    queue.put(b"3")
    queue.close()
    return later(files_of(disk), 10, b"4"), copy


def test_a_header_is_not_rebuilt_by_the_footer_of_an_older_copy() -> None:
    files, copy = two_versions()
    first, _ = segments(files)
    files[first] = without_header(copy[first])
    assert refused(files).path == f"/q/{first}"
    with quarantined(disk_of(files)) as queue:
        assert drain(queue) == [b"4"]
        assert queue.stats().quarantined == 3
        assert queue.put(b"new") == 5


# -- two histories of one queue --------------------------------------------------------------------------------------


def test_of_two_segments_that_begin_with_one_id_the_later_one_counts() -> None:
    begun = later({}, 0, b"1", b"2")
    one, other = later(begun, 10, b"3", b"4"), later(begun, 20, b"another 3", b"another 4")
    mixed = {**one, **other}
    assert len(segments(mixed)) == 3
    assert refused(mixed).path == f"/q/{segments(mixed)[2]}"
    disk = disk_of(mixed)
    with quarantined(disk) as queue:
        assert queue.stats().quarantined == 2
        reader = queue.reader(start="earliest")
        assert (reader.items, reader.bytes) == (4, 20)
        items = take_all(reader)
        assert [item.id for item in items] == [1, 2, 3, 4]
        assert [item.data for item in items] == [b"1", b"2", b"another 3", b"another 4"]
        reader.commit_many(items)
        assert (reader.items, reader.bytes) == (0, 0)


def test_of_two_segments_that_overlap_each_id_is_delivered_once() -> None:
    files, copy = two_versions()
    first, second = segments(copy)
    mixed = {**copy, first: files[first]}
    assert refused(mixed).path == f"/q/{second}"
    with quarantined(disk_of(mixed)) as queue:
        reader = queue.reader(start="earliest")
        assert (reader.items, reader.bytes) == (3, 11)
        assert [(item.id, item.data) for item in take_all(reader)] == [(1, b"1"), (2, b"2"), (3, b"another 3")]
        reader.commit_many([1, 2, 3])
        assert (reader.items, reader.bytes) == (0, 0)


# -- bytes cut out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("item_id", range(1, 7))
def test_a_record_that_was_cut_out_is_the_only_one_missed(item_id: int) -> None:
    put = {n: b"item %d" % n for n in range(1, 7)}
    files = later({}, 0, put[1], put[2], put[3])
    files = later(files, 1, put[4], put[5], put[6])
    name = segments(files)[item_id > 3]
    at = files[name].index(put[item_id])
    files[name] = files[name][: at - fmt.FRAME_BYTES] + files[name][at + len(put[item_id]) :]
    damage = refused(files)
    assert damage.path == f"/q/{name}"
    assert damage.item_id == (item_id if item_id > 3 else None), "in front of others it is the footer that is missed"
    with quarantined(disk_of(files)) as queue:
        items = take_all(queue)
        assert [item.data for item in items] == [put[item.id] for item in items]
        assert {1, 2, 3, 4, 5, 6} - {item.id for item in items} == {item_id}
        assert queue.stats().quarantined == 1


@pytest.mark.parametrize("closed", [True, False])
def test_a_frame_whose_id_is_not_of_its_segment_is_no_place_to_go_on_from(closed: bool) -> None:
    """All that is in between would be passed over."""
    files = later({}, 0, b"1", b"2", b"3")
    files = later(files, 1, b"4", b"5")
    first, _ = segments(files)
    data = files[first]
    at = fmt.HEADER_BYTES + fmt.FRAME_BYTES + 1  # behind the first one
    header = fmt.decode_header(data)
    assert header is not None
    marker = header.marker
    files[first] = data[:at] + fmt.encode_item(1000, b"2", START_MS, None, 0, marker) + data[at + fmt.FRAME_BYTES + 1 :]
    if closed:
        with opened(disk_of(files)) as queue:
            assert [item.data for item in queue.get_many(9)] == [b"1"]
            with pytest.raises(CorruptJournal) as caught:
                queue.get_many(9, timeout=0)
            assert caught.value.item_id == 2
    else:
        files[first] = files[first][: -fmt.FOOTER_BYTES] + bytes(fmt.FOOTER_BYTES)
        assert refused(files).path == f"/q/{first}"
    with quarantined(disk_of(files)) as queue:
        assert [item.data for item in take_all(queue)] == [b"1", b"3", b"4", b"5"]
        assert queue.stats().quarantined == 1
