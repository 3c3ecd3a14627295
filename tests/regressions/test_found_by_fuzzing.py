"""Faults of the library that the campaigns of this folder have found, each in its smallest form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kestrelpy import CorruptJournal, scan, verify
from kestrelpy._journal import format as fmt
from kestrelpy._journal.file_names import lasting_name, new_segment_name
from kestrelpy.inspection.summary import inspect
from kestrelpy.testing import MemoryDisk
from tests.fuzz.naive_reader import read_segment
from tests.fuzz.reference import FOLDER, NAME, SEGMENT_BYTES, disk_of, files_of, let_die, open_queue
from tests.support.queues import drain

Files = dict[str, bytes]


def made(items: Iterable[bytes], *, close: bool = True, **options: Any) -> Files:
    """The files of a queue into which these items were put one by one, with a sync before the last."""
    disk = MemoryDisk()
    queue = open_queue(disk, sync="never", segment_bytes=SEGMENT_BYTES, **options)
    queue.reader()
    items = list(items)
    for item in items[:-1]:
        queue.put(item)
    queue.sync()
    queue.put(items[-1])
    if close:
        queue.close()
    else:
        let_die(queue, disk)
    return files_of(disk)


def segments(files: Files) -> list[str]:
    return sorted(name for name in files if name.endswith(".segment"))


def offsets(files: Files, name: str) -> list[int]:
    return [frame.offset for frame in read_segment(int(name.split(".")[1]), files[name]).frames]


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def opened(files: Files, work: Callable[[Any], Any], mode: str = "raise") -> Any:
    disk = disk_of(files)
    queue = open_queue(disk, on_corruption=mode)
    try:
        return work(queue)
    finally:
        let_die(queue, disk)


def all_see_it(files: Files, *, opening: bool = True) -> None:
    """An opening and a scan raise, and ``verify`` reports."""
    disk = disk_of(files)
    with pytest.raises(CorruptJournal):
        list(scan(FOLDER, NAME, disk=disk))
    assert not verify(FOLDER, NAME, disk=disk).ok
    if opening:
        with pytest.raises(CorruptJournal):
            opened(files, drain)


def without_states(files: Files) -> Files:
    return {name: data for name, data in files.items() if name.endswith(".segment")}


def test_an_item_that_stands_behind_inserted_bytes_is_delivered() -> None:
    """The search behind damage began above the id that was due: with quarantine that item was lost though intact."""
    files = made([b"one", b"two", b"three"])
    (name,) = segments(files)
    at = offsets(files, name)[1]
    files[name] = files[name][:at] + b"inserted" + files[name][at:]
    del files["jobs.mark"]
    assert opened(files, drain, "quarantine") == [b"one", b"two"], "the third is behind the end that the footer says"


def test_a_copy_of_the_footer_does_not_end_the_search_behind_damage() -> None:
    files = made([b"a" * 200, b"two", b"three"])
    (name,) = segments(files)
    data, at = files[name], offsets(files, name)[0]
    files[name] = data[: at + 50] + data[-96:] + data[at + 146 :]
    assert opened(files, drain, "quarantine") == [b"two", b"three"]


@pytest.mark.parametrize("last", [b"ends in zeros\0\0\0", bytes(8)])
def test_a_last_item_that_ends_in_zeros_says_what_was_on_disk(last: bytes) -> None:
    """What is zero at the end of the file was cut off before the search: then its watermark was not seen, and an item
    that had been on disk and was damaged was taken for a torn tail.
    """
    files = without_states(made([b"one", b"two", last], close=False))
    (name,) = segments(files)
    files[name] = flipped(files[name], offsets(files, name)[1] + 33)
    all_see_it(files)
    assert opened(files, drain, "quarantine") == [b"one", last]


def test_damage_in_an_open_segment_is_seen_from_outside() -> None:
    """A scan ended there, and ``verify`` called it a torn tail, though the frames behind say that it was on disk."""
    files = without_states(made([b"one", b"two", b"three"], close=False))
    (name,) = segments(files)
    files[name] = flipped(files[name], offsets(files, name)[0] + 33)
    all_see_it(files)
    with pytest.raises(CorruptJournal):
        inspect(FOLDER, NAME, disk=disk_of(files))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_segment_that_is_missing_or_has_no_header_is_seen_by_a_scan(place: int) -> None:
    """A scan passed over it."""
    files = made(b"%d" % n * 1500 for n in range(6))
    assert len(segments(files)) == 3
    name = segments(files)[place]
    all_see_it({**files, name: flipped(files[name], 50)})
    all_see_it({other: data for other, data in files.items() if other != name})
    if place < 2:
        all_see_it({**files, name: flipped(files[name], len(files[name]) - 20)}, opening=False)


def test_a_segment_under_the_name_of_another_is_none_of_the_queue() -> None:
    """Another queue's file, put in the place of the newest segment, had its id taken for the queue's."""
    files, other = made(b"%d" % n * 1500 for n in range(6)), made([b"another's"])
    first, *_, last = segments(files)
    files[last] = other[segments(other)[0]]
    all_see_it(files)
    assert opened(files, drain, "quarantine") == [b"%d" % n * 1500 for n in range(4)]
    files[last] = files[first]
    all_see_it(files)
    with pytest.raises(CorruptJournal):
        inspect(FOLDER, NAME, disk=disk_of(files))


def test_a_segment_in_a_wrong_place_is_not_rebuilt_there() -> None:
    """With quarantine a header is rebuilt by the footer; where that is another segment's, ids came out of order."""
    files = made(b"%d" % n * 1500 for n in range(6))
    first, second, last = segments(files)
    files[first], files[last] = files[last], files[first]
    assert opened(files, drain, "quarantine") == [b"2" * 1500, b"3" * 1500]
    files = made(b"%d" % n * 1500 for n in range(6))
    files[second] = flipped(files[second], 50)
    assert opened(files, drain, "quarantine") == [b"%d" % n * 1500 for n in range(6)], "in its own place it is"


def test_a_checkpoint_of_version_0_is_none() -> None:
    files = made([b"one"])
    files["jobs.mark"] = files["jobs.mark"][:8] + b"\0" + files["jobs.mark"][9:]
    assert not verify(FOLDER, NAME, disk=disk_of(files)).ok


def test_an_older_version_of_a_segment_does_not_reach_into_the_next() -> None:
    """It ends with what a crash tore off afterwards, under ids that were given out again since."""
    disk = MemoryDisk()
    queue = open_queue(disk, sync="never")
    queue.reader()
    for n in range(3):
        queue.put(b"%d" % n)
    queue.sync()
    queue.put(b"torn off")
    let_die(queue, disk)
    older = files_of(disk)
    (name,) = segments(older)
    torn = offsets(older, name)[3]
    disk = disk_of({**older, name: older[name][:torn] + bytes(len(older[name]) - torn)})
    queue = open_queue(disk)
    queue.put(b"put under its id")
    queue.close()
    files = {**files_of(disk), name: older[name]}
    assert opened(files, drain, "quarantine") == [b"0", b"1", b"2", b"put under its id"]


# -- claims that nothing can go on from ------------------------------------------------------------------------------


def with_state(files: Files, **fields: Any) -> Files:
    """The mark says something else, with its checksum."""
    state, _ = fmt.decode_checkpoints(files["jobs.mark"])
    assert state is not None
    return {**files, "jobs.mark": fmt.checkpoint_prefix() + fmt.encode_checkpoint(state._replace(**fields))}


def with_header(files: Files, **fields: Any) -> Files:
    name = segments(files)[-1]
    header = fmt.decode_header(files[name])
    assert header is not None
    return {**files, name: fmt.encode_header(header._replace(**fields)) + files[name][96:]}


@pytest.mark.parametrize("mode", ["raise", "quarantine"])
@pytest.mark.parametrize("head", [1 << 33, 1 << 61, fmt.LARGEST])
def test_a_claim_to_have_lost_more_ids_than_a_crash_can(head: int, mode: str) -> None:
    """A put ended in ``struct.error``: the distance to what is on disk did not fit its field."""
    with pytest.raises(CorruptJournal, match="said to be given out"):
        opened(with_state(made([b"one"]), head=head), lambda queue: queue.put(b"x"), mode)


@pytest.mark.parametrize("field", ["base_items", "base_bytes"])
def test_counts_that_the_next_segment_could_not_hold(field: str) -> None:
    """What was put then could not be read after the next opening."""
    with pytest.raises(CorruptJournal, match="said to be given out"):
        opened(with_header(made([b"one"]), **{field: fmt.LARGEST}), lambda queue: queue.put(b"x"))


def test_a_reader_whose_counts_are_forged_can_be_saved() -> None:
    """Its checkpoint ended in ``struct.error``: unread items came out above all items ever put."""
    files = with_header(made([b"one", b"two"], close=False), base_items=0, base_bytes=(1 << 61) - 1)
    assert opened(files, lambda queue: (drain(queue), queue.checkpoint(durable=True))[0]) == [b"one", b"two"]


@pytest.mark.parametrize("spare", [b"", bytes(500), b"KSTRLSEG", bytes(500) + b"\1\2\3"])
def test_what_is_no_segment_yet_goes_or_is_kept_aside(spare: bytes) -> None:
    files = {**made([b"one"]), "jobs.1700000009999.new.segment": spare}
    disk = disk_of(files)
    queue = open_queue(disk)
    assert drain(queue) == [b"one"]
    queue.close()
    kept = files_of(disk).get("jobs.1700000009999.0.quarantine", b"")
    assert kept.rstrip(b"\0") == (spare if spare[96:].strip(b"\0") else b"")


def test_a_last_segment_whose_first_sector_is_lost_is_damaged() -> None:
    """It was taken for what a crash had left of its making, and all that was in it went in silence."""
    files = made([b"one"], close=False)
    (name,) = segments(files)
    data = files[name]
    spoilt = bytes(512) + data[512:]
    all_see_it({lasting_name(name): spoilt})
    assert opened({new_segment_name("jobs", int(name.split(".")[1])): spoilt}, drain) == [], "none of it was on disk"


def test_a_checkpoint_of_another_queue_supersedes_no_default_reader() -> None:
    """An opening took it for a named reader's, deleted the default reader's place, and the next one was refused."""
    mine = fmt.Checkpoint(b"q" * 16, "", 0, 0, 0, 0)
    foreign = fmt.Checkpoint(b"x" * 16, "a", 21, 21, 21, 21)
    prefix = fmt.checkpoint_prefix()
    files = {
        "jobs+.checkpoint": prefix + fmt.encode_checkpoint(mine),
        "jobs+a.checkpoint": prefix + fmt.encode_checkpoint(foreign),
    }
    disk = disk_of(files)
    for _ in range(2):
        open_queue(disk).close()
        assert "jobs+.checkpoint" in files_of(disk)
