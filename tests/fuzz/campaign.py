"""Damaged inputs by the hundred thousand: ``run(kind, seed, limit)`` judges so many, and returns what came of them.

Kinds, by what one input is:

- ``"segments"``: one damaged or forged segment, read by the library and by the naive reader, which must agree on every
  frame, on where they end, on the footer.
- ``"checkpoints"``: the same for a checkpoint file or mark: they must agree on the last whole state.
- ``"damaged"``: a whole queue with an accident, opened and drained; every sixteenth one thoroughly.
- ``"forged"``: a whole queue with a forgery, its checksums made right, the same.

Inputs are numbered: input n of a kind is the same whatever run makes it, so runs with other seeds share the work.
"""

from __future__ import annotations

import functools
import random
import time
from collections import Counter
from collections.abc import Callable

from kestrelpy._journal import format as fmt
from kestrelpy._journal.checkpoint import load_checkpoint
from kestrelpy._journal.segment import iterate_frames, read_footer
from kestrelpy.testing import MemoryDisk
from tests.fuzz import naive_reader
from tests.fuzz.damages import damage
from tests.fuzz.forgery import OF_A_SEGMENT, forge, forge_state
from tests.fuzz.judge import BrokenInvariant, judge, rearm, require, watched
from tests.fuzz.reference import Case, healthy, small

THOROUGH_EVERY = 16
DISTANCE = 100_000_000
"""Between the seeds of two runs: input n of run s is number ``s * DISTANCE + n``."""


BLOCK = 20_000
"""So many inputs in a row are made of the same queues."""


@functools.lru_cache(maxsize=2)
def cases(block: int) -> list[Case]:
    """Some healthy queues, and the small one more than once."""
    return [case for case in [*map(healthy, range(60 * block, 60 * block + 60)), *[small()] * 4] if case.files]


def run(kind: str, seed: int, limit: int, seconds: float | None = None) -> Counter[str]:
    """Judge ``limit`` inputs, or as many as fit into so many seconds of processor time; counts by outcome.

    Raises ``AssertionError`` with the number of the input, which ``repeat`` judges again.
    """
    counter: Counter[str] = Counter()
    end = None if seconds is None else time.process_time() + seconds
    with watched():
        for number in range(seed * DISTANCE, seed * DISTANCE + limit):
            rearm()
            counter["inputs"] += 1
            counter[repeat(kind, number)] += 1
            if end is not None and number % 64 == 0 and time.process_time() > end:
                break
    return counter


def repeat(kind: str, number: int) -> str:
    """Judge input ``number`` of a kind; what came of it."""
    generator = random.Random(f"{kind} {number}")
    try:
        return JUDGES[kind](generator, cases(number // BLOCK), number % THOROUGH_EVERY == 0)
    except BrokenInvariant as broken:
        raise AssertionError(f"input {number} of {kind!r}: {broken}") from broken
    except Exception as error:
        raise AssertionError(f"input {number} of {kind!r}: {type(error).__name__} escaped: {error}") from error


def soak(seed: int, seconds: float) -> Counter[str]:
    """All kinds in turn for so many seconds of processor time; counts by kind and outcome. Seeds share no work."""
    counter: Counter[str] = Counter()
    end, done = time.process_time() + seconds, 0
    with watched():
        while time.process_time() < end:
            for kind in JUDGES:
                for number in range(seed * DISTANCE + done, seed * DISTANCE + done + 500):
                    rearm()
                    counter[f"{kind}: {repeat(kind, number)}"] += 1
                    counter["inputs"] += 1
            done += 500
    return counter


def one_of_damaged(generator: random.Random, queues: list[Case], thorough: bool) -> str:
    case, other = generator.choice(queues), generator.choice(queues)
    _, files = damage(case, other, generator)
    return judge(files, case, generator.choice(("raise", "quarantine")), thorough=thorough)


def one_of_forged(generator: random.Random, queues: list[Case], thorough: bool) -> str:
    case = generator.choice(queues)
    _, files = forge(case, generator)
    return judge(files, case, generator.choice(("raise", "quarantine")), forged=True, thorough=thorough)


def spoiled(name: str, case: Case, generator: random.Random) -> bytes:
    """One file after an accident or a forgery, or both."""
    data = case.files[name]
    choice = generator.random()
    if choice < 0.6:
        files = {name: data}
        _, files = damage(Case(files), case, generator)
        data = next(iter(files.values()), b"")
    if choice > 0.5:
        forged = bytearray(data)
        if name.endswith(".segment"):
            generator.choice(list(OF_A_SEGMENT.values()))(forged, int(name.split(".")[1]), generator)
        else:
            forge_state(forged, 0, generator)
        data = bytes(forged)
    return data


def named(case: Case, generator: random.Random, *, segment: bool) -> str | None:
    names = sorted(name for name in case.files if name.endswith(".segment") is segment)
    return generator.choice(names) if names else None


def disk_with(data: bytes) -> MemoryDisk:
    disk = MemoryDisk()
    disk.directory("/").create("x").write(0, data)
    return disk


def one_of_segments(generator: random.Random, queues: list[Case], thorough: bool) -> str:
    case = generator.choice(queues)
    name = named(case, generator, segment=True)
    return compare_segments(int(name.split(".")[1]), spoiled(name, case, generator)) if name else "no segment"


def compare_segments(number: int, data: bytes) -> str:
    """The library and the naive reader on the bytes of segment ``number``."""
    naive = naive_reader.read_segment(number, data)
    header = fmt.decode_header(data)
    require((header is None or header.number != number) == (naive.header is None), "the readers differ on the header")
    if header is None or naive.header is None:
        return "no header"
    file = disk_with(data).directory("/").open("x")
    footer = read_footer(file, header)
    require((footer is None) == (naive.footer is None), f"the readers differ on the footer: {footer}, {naive.footer}")
    end = len(data) if footer is None else footer.records_end
    due, fast = header.first_id, []
    for at, frame in iterate_frames(file, header.marker, fmt.HEADER_BYTES, end):
        if frame.footer is not None or frame.first_id != due:
            break
        entries = tuple(entry[0] for entry in frame.entries)
        fast.append((at, at + frame.size, frame.first_id, frame.watermark, entries, frame.entries[0][1:]))
        due = frame.last_id + 1
    stop = naive.gaps[0].offset if naive.gaps else len(data)
    slow = [
        (each.offset, each.end, each.first_id, each.watermark, tuple(record.data for record in each.records),
         (each.records[0].added_ms, each.records[0].expires_ms))
        for each in naive.frames if each.offset < stop
    ]  # fmt: skip
    require(fast == slow, f"the readers differ on the frames: {len(fast)} and {len(slow)}")
    if naive.gaps:
        gap = naive.gaps[0]
        most = fmt.LARGEST if naive.footer is None else naive.footer.last_id
        found = fmt.find_frame(data[gap.offset : end], 0, header.marker, gap.due, most)
        behind = next((each.offset for each in naive.frames if each.offset >= gap.offset), None)
        require(
            (found and found[0] + gap.offset) == behind, f"the readers differ on what is behind offset {gap.offset}"
        )
        return "gap"
    return "whole"


def one_of_checkpoints(generator: random.Random, queues: list[Case], thorough: bool) -> str:
    case = generator.choice(queues)
    name = named(case, generator, segment=False)
    return compare_checkpoints(spoiled(name, case, generator)) if name else "no checkpoint"


def compare_checkpoints(data: bytes) -> str:
    """The library and the naive reader on the bytes of a checkpoint file."""
    naive = naive_reader.read_checkpoint(data)
    version = fmt.checkpoint_version(data)
    if version is not None and version > fmt.MOVES_VERSION:
        require(naive is None, "the naive reader takes a newer version")
        return "newer version"
    fast, _ = load_checkpoint(disk_with(data).directory("/"), "x")
    require((fast is None) == (naive is None), f"the readers differ: {fast}, {naive}")
    if fast is None or naive is None:
        return "no state"
    fields = ("queue_id", "reader", "head", "watermark", "released_items", "released_bytes", "done", "error_counts")
    for field in fields:
        require(getattr(fast, field) == getattr(naive, field), f"the readers differ on {field}")
    return "state"


JUDGES: dict[str, Callable[[random.Random, list[Case], bool], str]] = {
    "segments": one_of_segments,
    "checkpoints": one_of_checkpoints,
    "damaged": one_of_damaged,
    "forged": one_of_forged,
}
