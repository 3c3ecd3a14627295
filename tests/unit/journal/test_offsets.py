"""Where errors say that damage is: each offset points at the bytes that are wrong, whoever says it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kestrelpy import CorruptJournal, JournaledQueue, arrow, open_reader, scan, verify
from kestrelpy._journal import format as fmt
from kestrelpy._journal.format import FOOTER_BYTES, FRAME_BYTES, HEADER_BYTES, HEADER_OFFSET
from kestrelpy._journal.recovery import MOST_LOST
from kestrelpy.inspection.summary import inspect
from kestrelpy.testing import ManualClock, MemoryDisk
from tests.support.paths import ROOT

Files = dict[str, bytes]
PAGE = ROOT / "docs" / "format.md"


def test_the_offsets_of_a_header_are_those_of_the_page() -> None:
    """The box has lines of offsets, each above a line of fields: ``version u16``, ``queue_id [16]``."""
    box = PAGE.read_text().split("The header, 96 bytes:\n")[1].split("\n- `crc`")[0].strip("\n").split("\n")
    said: dict[str, int] = {}
    end = 0
    for numbers, names in zip(box[::2], box[1::2], strict=True):
        fields = [name.split() for name in names.strip().strip("|").split("|")]
        for (name, size), at in zip(fields, map(int, numbers.split()), strict=True):
            assert at == end, f"{name} follows the field before it"
            said[name] = at
            end += int(size[1:]) // 8 if size.startswith("u") else int(size.strip("[]"))
    named = {"KSTRLSEG": "magic", "96": "header_bytes", "0": "zero"}
    offsets = {named.get(name, name): at for name, at in said.items() if name != "crc"}
    assert offsets == HEADER_OFFSET
    assert said["crc"] == HEADER_BYTES - 4
    assert end == HEADER_BYTES


def queue_on(files: Files) -> MemoryDisk:
    disk = MemoryDisk()
    folder = disk.directory("/q", create=True)
    for name, data in files.items():
        file = folder.create(name)
        file.write(0, data)
        file.sync()
    folder.sync()
    return disk


def files_of(disk: MemoryDisk) -> Files:
    folder, found = disk.directory("/q"), {}
    for name in folder.names():
        file = folder.open(name)
        found[name] = file.read(0, file.size())
        file.close()
    return found


def made() -> Files:
    """Three closed segments of a few items each, and a reader's place behind the first item."""
    disk = MemoryDisk()
    with JournaledQueue("/q", "jobs", segment_bytes=4096, disk=disk, clock=ManualClock()) as queue:
        reader = queue.reader("main")
        for at in range(9):
            queue.put(b"%d" % at * 1200)
        reader.get().commit()
        reader.checkpoint(durable=True)
    return files_of(disk)


FILES = made()
SEGMENTS = sorted(name for name in FILES if name.endswith(".segment"))
MIDDLE = SEGMENTS[1]


def reading(name: str, disk: MemoryDisk) -> Callable[[], object]:
    def read_elsewhere() -> None:
        reader = open_reader("/q", "jobs", "other", create=True, start="earliest", disk=disk)
        try:
            reader.get_many(100, timeout=0)
        finally:
            reader.close()

    return {
        "scan": lambda: list(scan("/q", "jobs", disk=disk)),
        "arrow": lambda: arrow.read("/q", "jobs", disk=disk).read_all(),
        "inspect": lambda: inspect("/q", "jobs", disk=disk),
        "open_reader": read_elsewhere,
        "open": lambda: JournaledQueue("/q", "jobs", disk=disk, clock=ManualClock()).close(),
    }[name]


def told(name: str, files: Files, of: int = 0) -> tuple[str, int] | None:
    """The file and the offset that a reading objects to, if it does; ``of``: which of all, where several are told."""
    disk = queue_on(files)
    if name == "verify":
        found = verify("/q", "jobs", disk=disk).damage
        return (found[of].path.removeprefix("/q/"), found[of].offset) if found else None
    try:
        reading(name, disk)()
    except CorruptJournal as damage:
        return damage.path.removeprefix("/q/"), damage.offset
    return None


def with_header(files: Files, name: str, **fields: Any) -> Files:
    """Another header in a segment, which is whole."""
    header = fmt.decode_header(files[name])
    assert header is not None
    changed = header._replace(**fields)
    return {**files, name: fmt.encode_header(changed) + files[name][HEADER_BYTES:]}


EVERYBODY = ("verify", "scan", "arrow", "inspect", "open_reader", "open")
WRONG: list[tuple[str, object, tuple[str, ...]]] = [
    ("queue_id", b"another queue's!", ("verify", "scan", "arrow", "open_reader", "open")),
    ("number", 7, EVERYBODY),
    ("previous_number", 7, ("verify", "scan", "arrow", "open")),
    ("previous_last_id", 2, ("verify", "scan", "arrow", "open")),
]


@pytest.mark.parametrize(("field", "value", "who"), WRONG, ids=[each[0] for each in WRONG])
def test_a_field_of_a_header(field: str, value: object, who: tuple[str, ...]) -> None:
    files = with_header(FILES, MIDDLE, **{field: value})
    for name in who:
        assert told(name, files) == (MIDDLE, HEADER_OFFSET[field]), name


def test_a_journal_that_begins_behind_its_reader() -> None:
    files = {name: data for name, data in FILES.items() if name != SEGMENTS[0]}
    for name in ("verify", "scan", "arrow", "open"):
        assert told(name, files) == (MIDDLE, HEADER_OFFSET["previous_last_id"]), name


@pytest.mark.parametrize("field", ["base_items", "base_bytes", "first_id"])
def test_a_claim_that_is_out_of_reach_in_a_header(field: str) -> None:
    files = with_header(FILES, SEGMENTS[-1], **{field: (1 << 61) + 5})
    for name in ("verify", "open"):
        assert told(name, files) == (SEGMENTS[-1], HEADER_OFFSET[field]), name


def test_a_claim_that_is_out_of_reach_in_a_checkpoint() -> None:
    name = "jobs.mark"
    mark, end = fmt.decode_checkpoints(FILES[name])
    assert mark is not None
    far = fmt.encode_checkpoint(mark._replace(head=mark.head + 2 * MOST_LOST))
    files = {**FILES, name: FILES[name][:end] + far}
    begins = end + 8
    for who in ("verify", "open"):
        assert told(who, files) == (name, begins + 16), who


def test_a_watermark_that_is_out_of_reach_in_a_place_that_was_inherited() -> None:
    """The file has the name of the reader that took the place over; the state in it says nothing of that yet."""
    name = "jobs+main.checkpoint"
    state, _ = fmt.decode_checkpoints(FILES[name])
    assert state is not None
    far = fmt.encode_checkpoint(state._replace(reader="", watermark=2 * MOST_LOST))
    files = {**FILES, name: fmt.checkpoint_prefix() + far}
    assert told("verify", files, of=1) == (name, 16 + 8 + 24), "the first one says what is missing"


@pytest.mark.parametrize("states", [1, 2, 3])
def test_a_checkpoint_of_another_queue(states: int) -> None:
    """The last state of the file is the one that counts."""
    name = "jobs+main.checkpoint"
    state, _ = fmt.decode_checkpoints(FILES[name])
    assert state is not None
    one = fmt.encode_checkpoint(state._replace(queue_id=b"another queue's!"))
    files = {**FILES, name: fmt.checkpoint_prefix() + one * states}
    found = told("verify", files)
    assert found == (name, 16 + len(one) * (states - 1) + 8)
    assert files[name][found[1] :].startswith(b"another queue's!")


def test_a_checkpoint_of_another_reader() -> None:
    name = "jobs+main.checkpoint"
    state, _ = fmt.decode_checkpoints(FILES[name])
    assert state is not None
    files = {**FILES, name: fmt.checkpoint_prefix() + fmt.encode_checkpoint(state._replace(reader="someone"))}
    found = told("verify", files)
    assert found is not None
    assert files[name][found[1] :].startswith(b"someone")


def structure_at(data: bytes, place: int) -> range:
    """The header, frame or footer that a byte belongs to."""
    if place < HEADER_BYTES:
        return range(HEADER_BYTES)
    at = HEADER_BYTES
    while True:
        end = at + FRAME_BYTES + int.from_bytes(data[at + 4 : at + 8], "little")
        if place < end:
            return range(at, end)
        at = end


@pytest.mark.parametrize("who", ["verify", "scan", "arrow", "open"])
def test_a_flipped_bit(who: str) -> None:
    """Of a closed segment in the middle. An opening does not read all of it, nor does it say what it has not read."""
    whole, seen = FILES[MIDDLE], 0
    footer = range(len(whole) - FOOTER_BYTES, len(whole))
    for place in (*range(0, HEADER_BYTES, 2), *range(HEADER_BYTES, len(whole), 37), *footer):
        data = bytearray(whole)
        data[place] ^= 1
        found = told(who, {**FILES, MIDDLE: bytes(data)})
        if found is not None:
            seen += 1
            assert found[0] == MIDDLE
            assert found[1] == structure_at(whole, place).start, (place, found)
        else:
            assert who == "open", place
    assert seen > 100


@pytest.mark.parametrize("who", ["verify", "scan", "arrow", "open"])
def test_an_end_that_is_cut_off(who: str) -> None:
    """Where the footer should be, of the middle one; where the frames end, of the last one."""
    cut = {**FILES, MIDDLE: FILES[MIDDLE][:-10]}
    assert told(who, cut) == (MIDDLE, len(cut[MIDDLE]) - FOOTER_BYTES)
    found = told(who, {name: data for name, data in FILES.items() if name != SEGMENTS[-1]})
    assert found == (MIDDLE, len(FILES[MIDDLE]) - FOOTER_BYTES), "behind the last frame that is there"
