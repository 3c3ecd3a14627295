"""Damaged inputs by the hundred thousand: 500,000 in every run, of four kinds that ``campaign.py`` tells apart."""

from __future__ import annotations

import contextlib
import random
import time
import tracemalloc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from kestrelpy import KestrelError, QueueEmpty
from kestrelpy._journal import follow, view
from kestrelpy._journal import format as fmt
from kestrelpy._journal.recovery import Recovery
from kestrelpy.testing import MemoryDisk
from tests.fuzz.campaign import run
from tests.fuzz.damages import DAMAGES, Files, flip_bits
from tests.fuzz.forgery import OF_A_SEGMENT
from tests.fuzz.judge import watched
from tests.fuzz.naive_reader import read_segment
from tests.fuzz.reference import Case, disk_of, files_of, let_die, open_queue, small
from tests.support.budget import SEED, Tally, share

RUNS = [
    *[("damaged", seed, 10_000) for seed in range(4)],
    *[("forged", seed, 10_000) for seed in range(2)],
    *[("segments", seed, 42_500) for seed in range(4)],
    *[("checkpoints", seed, 90_000) for seed in range(3)],
]  # fmt: skip


def test_the_runs_add_up() -> None:
    assert sum(limit for *_, limit in RUNS) == 500_000
    assert sum(limit for kind, _, limit in RUNS if kind in ("damaged", "forged")) >= 50_000


@pytest.mark.parametrize(("kind", "seed", "limit"), RUNS)
def test_damaged_inputs(kind: str, seed: int, limit: int, tally: Tally) -> None:
    limit = share(limit)
    counter = run(kind, SEED * 10 + seed, limit)
    print(f"{kind}, seed {seed}: {dict(counter)}")
    tally.add("damaged inputs", counter["inputs"])
    assert counter["inputs"] == limit
    bad = {"segments": "gap", "checkpoints": "no state"}.get(kind, "CorruptJournal")
    assert counter[bad] > limit / 10 or limit < 1000


# -- what it is worth ------------------------------------------------------------------------------------------------


def blind_search(data: bytes, offset: int, marker: int, first_id: int) -> None:
    """Nothing is ever found behind damage."""


def no_look_beyond(data: bytes, marker: int, first_id: int) -> tuple[int, int]:
    return 0, 0


PLANTED: dict[str, tuple[str, Callable[[], Any]]] = {
    "no checksum": ("damaged", lambda: mock.patch.multiple("kestrelpy._journal.segment", crc32=lambda *_: 0)),
    "no search behind damage": ("damaged", lambda: mock.patch.object(view.fmt, "find_frame", blind_search)),
    "no watermark behind damage": ("damaged", lambda: mock.patch.object(fmt, "look_beyond", no_look_beyond)),
    "the chain is not checked": ("damaged", lambda: mock.patch.object(Recovery, "_check_chain", return_value=None)),
    "the ends are not checked": ("damaged", lambda: mock.patch.object(Recovery, "_check_ends", return_value=None)),
    "a wait at a segment without a footer": (
        "damaged", lambda: mock.patch.object(follow, "_end_without_footer", return_value=None),
    ),
    "no bound to what is claimed": ("forged", lambda: mock.patch.object(Recovery, "_check_tail", return_value=None)),
    "no bound to lost ids": ("forged", lambda: mock.patch("kestrelpy._journal.recovery.MOST_LOST", 1 << 62)),
    "a batch of nothing": ("segments", lambda: mock.patch.object(fmt, "split_batch", return_value=[b""])),
    "spans that fall": ("checkpoints", lambda: mock.patch.object(fmt, "_spans_rise", return_value=True)),
    "a search that goes into payloads": (
        "segments", lambda: mock.patch.object(fmt, "find_frame", lambda data, at, *_: fmt.decode_frame(data, at, 1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_caught(fault: str) -> None:
    """With a check of the library taken out, a run no longer than one of those above finds it."""
    kind, plant = PLANTED[fault]
    run(kind, 0, 1)
    with plant(), pytest.raises(AssertionError, match="input"):
        run(kind, 0, 10_000)


@pytest.mark.parametrize("name", DAMAGES)
def test_every_damage_damages(name: str) -> None:
    """Each changes something, most of the time, and never what it was given."""
    case, other = Case(dict(small().files)), made(2)
    other.files["jobs.0000000000007.segment"] = b"another's"
    case.older = [dict(other.files)]
    before, changed = dict(case.files), 0
    for seed in range(100):
        files: Files = dict(case.files)
        DAMAGES[name](files, random.Random(seed), case, other)
        changed += files != before
    assert case.files == before
    assert changed >= 20


@pytest.mark.parametrize("name", OF_A_SEGMENT)
def test_every_forgery_keeps_its_checksums(name: str) -> None:
    """Half of the forged segments at the least are read as far as the forgery and are not the same as before."""
    case = made(1)
    segment = min(name for name in case.files if name.endswith(".segment"))
    number, good = int(segment.split(".")[1]), 0
    for seed in range(200):
        data = bytearray(case.files[segment])
        OF_A_SEGMENT[name](data, number, random.Random(seed))
        sealed = fmt.pack_crc(fmt.crc32(data[:92])) == data[92:96]
        good += sealed and bytes(data) != case.files[segment]
    assert good >= 100


def made(seed: int, items: int = 20, size: int = 100, **options: Any) -> Case:
    """A closed queue of one segment, with a batch in it."""
    case, disk, generator = Case({}), MemoryDisk(), random.Random(seed)
    queue = open_queue(disk, **options)
    for _ in range(items):
        data = generator.randbytes(size)
        case.put[queue.put(data)] = data
    queue.put_many([b"a", b"b"])
    queue.close()
    case.files = files_of(disk)
    return case


# -- time and memory -------------------------------------------------------------------------------------------------


def open_and_drain(files: Files, mode: str) -> int:
    """How many items come out; none is kept."""
    disk, count, queue = disk_of(files), 0, None
    try:
        queue = open_queue(disk, on_corruption=mode)
        reader = queue.reader()
        with contextlib.suppress(QueueEmpty):
            while True:
                count += len(reader.get_many(100, timeout=0))
    except (KestrelError, OSError):
        return count
    finally:
        if queue is not None:
            let_die(queue, disk)
        else:
            disk.kill()
    return count


@pytest.mark.parametrize("closed", [True, False])
def test_damage_after_damage_takes_time_in_proportion(closed: bool) -> None:
    """Every second frame of a megabyte is bad: the search behind each goes no further than the next good one."""
    case = made(1, items=4000, size=228, sync="always")
    (name,) = (name for name in case.files if name.endswith(".segment"))
    data = bytearray(case.files[name])
    frames = read_segment(int(name.split(".")[1]), bytes(data)).frames
    for frame in frames[1::2]:
        data[frame.offset + 40] ^= 1
    files = {**case.files, name: bytes(data) if closed else bytes(data[:-96])}
    before = time.process_time()
    with watched():
        assert open_and_drain(files, "quarantine") >= len(frames) // 2
    assert time.process_time() - before < len(data) / 1e6 * 4, "some 2,000 files kept aside, too"


@pytest.mark.parametrize("closed", [True, False])
def test_markers_everywhere_take_time_in_proportion(closed: bool) -> None:
    """A megabyte of frame headers, each of which claims all that is behind it."""
    case = made(1, items=10, segment_bytes=1 << 20)
    (name,) = (name for name in case.files if name.endswith(".segment"))
    segment = read_segment(int(name.split(".")[1]), case.files[name])
    assert segment.header is not None
    size = 1 << 20
    junk = b"".join(
        fmt.pack_crc(1) + fmt.pack_frame(size - at - 32, 99, 0, 0, segment.header.marker) for at in range(0, size, 32)
    )
    footer = fmt.SegmentFooter(1, 12, 12, 0, 1, 1, 96 + size)
    end = fmt.encode_footer(footer, segment.number, segment.header.marker) if closed else b""
    files = {**case.files, name: case.files[name][:96] + junk + end}
    before = time.process_time()
    with watched():
        for mode in ("raise", "quarantine"):
            open_and_drain(files, mode)
    assert time.process_time() - before < 4, "two openings and two drains of a megabyte"


def test_memory_is_bounded_by_the_file() -> None:
    """R21: lengths and counts that lie allocate no more than four times what is there."""
    case = made(1, items=400, size=2000)
    whole, fewest = sum(map(len, case.files.values())), 0
    for seed in range(60):
        generator, files = random.Random(seed), dict(case.files)
        name = min(files)
        data = bytearray(files[name])
        OF_A_SEGMENT[generator.choice(["forge_header", "forge_frame", "forge_batch", "forge_footer"])](
            data, int(name.split(".")[1]), generator
        )
        files[name] = bytes(data)
        disk_of(files)
        tracemalloc.start()
        try:
            open_and_drain(files, generator.choice(["raise", "quarantine"]))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 4 * whole + whole, f"seed {seed}: {peak:,} bytes for {whole:,}"  # a copy of it is the disk
        fewest += peak > 0
    assert fewest == 60


def test_a_flip_is_what_it_says() -> None:
    case = made(1)
    files = dict(case.files)
    flip_bits(files, random.Random(1), case, case)
    assert sum(bin(a ^ b).count("1") for name in files for a, b in zip(files[name], case.files[name], strict=True)) == 1
