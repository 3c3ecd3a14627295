"""Damaged queues that are repaired, judged by what the undamaged files had.

1. The repair ends. A dry run says the same, and writes nothing.
2. After it, ``verify`` finds nothing, a second repair neither, and the queue opens with ``on_corruption="raise"``.
3. Every item whose frame was not hit is there, under its id; and no item is there that was not put.
4. An item that is gone is named as lost, unless it was torn off the end, where nothing said that it was on disk; or
   every reader was past it, and its whole segment is gone.
5. Every byte of a hit segment is in the files still: in a frame, or kept aside.
6. Every reader gets every item that is there and that it was not past; a new item gets a new id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from kestrelpy import JournaledQueue, QueueEmpty, RepairReport, UnsupportedFormat, repair, scan, verify
from kestrelpy._journal import file_names
from kestrelpy._journal import format as fmt
from kestrelpy.inspection.repair_plan import RepairPlan
from kestrelpy.testing import ManualClock, MemoryDisk
from tests.fuzz.reference import FOLDER, NAME, NOW_MS, Case, disk_of


class BrokenRepair(AssertionError):
    """A repair broke one of the rules above; the number is in the text."""


class Frame(NamedTuple):
    """Where an original file has a frame, and the ids of its items."""

    start: int
    end: int
    ids: range


def require(fact: object, text: str) -> None:
    if not fact:
        raise BrokenRepair(text)


def frames_of(data: bytes) -> list[Frame]:
    """The frames of an intact segment."""
    header = fmt.decode_header(data)
    assert header is not None
    found, at = [], fmt.HEADER_BYTES
    while (frame := fmt.decode_frame(data, at, header.marker)) is not None and frame.footer is None:
        found.append(Frame(at, at + frame.size, range(frame.first_id, frame.last_id + 1)))
        at += frame.size
    return found


def all_files(disk: MemoryDisk) -> dict[str, bytes]:
    folder = disk.directory(FOLDER)
    found = {}
    for name in folder.names():
        file = folder.open(name)
        found[name] = file.read(0, file.size())
    return found


def items_in(disk: MemoryDisk) -> dict[int, bytes]:
    return {record.id: record.data for record in scan(FOLDER, NAME, disk=disk)}


def repaired(disk: MemoryDisk) -> RepairReport:
    """Repair the queue, after a dry run (1)."""
    before = all_files(disk)
    said = repair(FOLDER, NAME, dry_run=True, disk=disk, clock=ManualClock(NOW_MS))
    require(all_files(disk) == before, "1: the dry run has written")
    done = repair(FOLDER, NAME, disk=disk, clock=ManualClock(NOW_MS))
    facts = ("losses", "lost_ids", "reset_readers", "refused_batches", "jobs", "kind")
    require(all(getattr(said, name) == getattr(done, name) for name in facts), f"1: {said} and {done}")
    return done


def whole_items(files: Mapping[str, bytes], damaged: Mapping[str, bytes]) -> set[int]:
    """The ids of the original items whose frames are the same in the damaged files."""
    whole: set[int] = set()
    for name, data in files.items():
        if not name.endswith(".segment"):
            continue
        there = damaged.get(name, b"")
        for frame in frames_of(data):
            if there[frame.start : frame.end] == data[frame.start : frame.end]:
                whole.update(frame.ids)
    return whole


def judge_repair(damaged: Mapping[str, bytes], case: Case, *, strict: bool) -> str:
    """Repair ``damaged`` files. ``strict``: one byte of a queue was hit that was closed: then just the items of that
    frame may be gone. Raises ``BrokenRepair``.
    """
    disk = disk_of(damaged)
    try:
        original = items_in(disk_of(case.files))
        report = repaired(disk)
    except UnsupportedFormat:
        require(not strict or damaged_version(damaged, case.files), "1: a version that is the same is not supported")
        return "newer"
    checked = verify(FOLDER, NAME, disk=disk)
    require(checked.ok, f"2: {checked.damage} after {report}")
    require(repair(FOLDER, NAME, disk=disk, clock=ManualClock(NOW_MS)).ok, "2: a second repair finds damage")
    there = items_in(disk)
    require(all(original.get(key, case.put.get(key)) == data for key, data in there.items()), "3: another item")
    lost = {each for first, last in report.lost_ids for each in range(first, min(last, max(original, default=0)) + 1)}
    whole = whole_items(case.files, damaged)
    if strict:
        gone = original.keys() - there.keys() - torn(case)
        require(not gone & whole, f"3: {gone & whole} are gone, and were not hit: {report}")
        require(not lost & whole, f"4: {lost & whole} are said to be lost, and were not hit")
        require(lost >= gone, f"4: {gone - lost} are gone, and nothing says so: {report}")
    require(not lost & there.keys(), f"4: {lost & there.keys()} are said to be lost, and are there")
    check_bytes(damaged, all_files(disk), case)
    goes_on(disk, there, max(lost, default=0))
    return "damaged" if not report.ok else "no damage"


def torn(case: Case) -> set[int]:
    """The ids that nothing in the files says to be on disk: the last ones of a segment that was not closed."""
    name = max(name for name in case.files if name.endswith(".segment"))
    data = case.files[name]
    header = fmt.decode_header(data)
    assert header is not None
    if fmt.decode_footer(data[-fmt.FOOTER_BYTES :], header) is not None:
        return set()
    frames = [fmt.decode_frame(data, frame.start, header.marker) for frame in frames_of(data)]
    durable_id = max([header.previous_last_id, *(frame.watermark for frame in frames if frame is not None)])
    for name, data in case.files.items():
        if name.endswith((".checkpoint", ".mark")):
            state = fmt.decode_checkpoints(data)[0]
            durable_id = max(durable_id, state.watermark if state is not None else 0)
    return {each for frame in frames if frame is not None for each in range(frame.first_id, frame.last_id + 1)} - set(
        range(durable_id + 1)
    )


def damaged_version(damaged: Mapping[str, bytes], files: Mapping[str, bytes]) -> bool:
    return any(damaged.get(name, data)[8:10] != data[8:10] for name, data in files.items())


def check_bytes(damaged: Mapping[str, bytes], after: Mapping[str, bytes], case: Case) -> None:
    """No byte of a segment is lost (5), whatever its bytes are: frames go on, and all between them is kept aside."""
    rest = b"".join(data for name, data in after.items() if name.endswith(".segment"))
    aside = [data for name, data in after.items() if name.endswith(".quarantine")]
    for name, data in damaged.items():
        if not name.endswith(".segment") or after.get(name, b"").startswith(data.rstrip(b"\0")):
            continue
        headers = [fmt.decode_header(data), fmt.decode_header(case.files.get(name, b""))]
        lost = [nowhere(data, header, header is headers[0], rest, aside) for header in headers if header is not None]
        require(not lost or "" in lost, f"5: {name}: {lost}")


def nowhere(data: bytes, header: fmt.SegmentHeader, has_header: bool, rest: bytes, aside: list[bytes]) -> str:
    """What of a segment is nowhere any more, if its frames are those of ``header``."""
    at = fmt.HEADER_BYTES if has_header else 0
    for start, frame in fmt.frames_in(data, 0, header.marker):
        body = data[start + fmt.FRAME_BYTES : start + frame.size]
        is_kept = any(data[start : start + frame.size] in each for each in aside)
        if frame.footer is None and body not in rest and not is_kept:
            return f"item {frame.first_id} is nowhere"
        if not is_aside(data[at:start], aside):
            return f"{start - at} bytes from {at} are nowhere"
        at = start + frame.size
    return "" if is_aside(data[at:], aside) else f"the bytes from {at} are nowhere"


def is_aside(data: bytes, aside: list[bytes]) -> bool:
    """Whether bytes between frames are in one of the files that were kept aside."""
    data = data.rstrip(b"\0")
    return not data or any(data in each for each in aside)


def goes_on(disk: MemoryDisk, there: Mapping[int, bytes], last_lost: int = 0) -> None:
    """The repaired queue is opened, drained and put to (2, 6)."""
    names = disk.directory(FOLDER).names()
    readers = sorted(file_names.readers_among(names, NAME)) or [""]
    heads = {}
    for reader_name in readers:
        data = all_files(disk).get(file_names.checkpoint_name(NAME, reader_name), b"")
        heads[reader_name] = fmt.decode_checkpoints(data)[0] if data else None
    with JournaledQueue(FOLDER, NAME, disk=disk, clock=ManualClock(NOW_MS + 1000), on_corruption="raise") as queue:
        for reader_name in readers:
            reader = queue.reader(reader_name)
            got = set()
            while True:
                try:
                    item = reader.get(timeout=0)
                except QueueEmpty:
                    break
                require(item.data == there.get(item.id), f"6: reader {reader_name!r} got another item {item.id}")
                got.add(item.id)
                item.commit()
            state = heads[reader_name]
            done = set()
            if state is not None:
                done = {key for key in there if key <= state.head or any(a <= key <= b for a, b in state.done)}
            require(got >= there.keys() - done, f"6: reader {reader_name!r} misses {there.keys() - done - got}")
            require(reader.items == 0, f"6: {reader.items} items are left to reader {reader_name!r}")
        queue.checkpoint(durable=True)
        new = queue.put(b"new")
        require(new > max([*there, last_lost]), f"6: id {new} is given out again")
        require(reader.get(timeout=0).data == b"new", "6: the new item is not delivered")
    require(verify(FOLDER, NAME, disk=disk).ok, "6: damaged after going on")


@contextmanager
def move_heads() -> Iterator[None]:
    """A planted fault: rule 6 is broken, as readers are moved over items."""
    real = RepairPlan.__init__

    def skipping(self: RepairPlan, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        self.first_id = self.last_id + 1

    with mock.patch.object(RepairPlan, "__init__", skipping):
        yield
