"""Files that somebody made to deceive: the fields of headers, frames, batch tables, footers and checkpoints are set to
boundary values, and every checksum is made right again. Such a file may lie about what is in it, and no more.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable

from tests.fuzz.naive_reader import FOOTER, FRAME, HEADER, PREFIX, read_header, read_segment
from tests.fuzz.reference import Case

Files = dict[str, bytes]
LIMITS = [0, 1, 2, 3, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 48) - 1, 1 << 61, (1 << 62) - 1, 1 << 62]
LIMITS += [(1 << 63) - 1, 1 << 63, (1 << 64) - 1]

HEADER_FIELDS = {"version": (8, 2), "size": (10, 2), "marker": (12, 4), "queue_id": (16, 8), "reserved": (88, 4)}
HEADER_FIELDS |= {
    name: (32 + 8 * n, 8)
    for n, name in enumerate(
        ("number", "first_id", "base_items", "base_bytes", "previous_number", "previous_last_id", "previous_end")
    )
}
FRAME_FIELDS = {"length": (4, 4), "id": (8, 8), "added_ms": (16, 6), "kind": (22, 2), "lag": (24, 4), "marker": (28, 4)}
FOOTER_FIELDS = FRAME_FIELDS | {f"body {n}": (FRAME + 8 * n, 8) for n in range(8)}
STATE_FIELDS = {"length": (4, 4), "queue_id": (8, 8), "flags": (88, 2), "name": (90, 2), "spans": (92, 4)}
STATE_FIELDS |= {"counts": (96, 4)} | {f"number {n}": (24 + 8 * n, 8) for n in range(8)}


def value_for(old: int, size: int, generator: random.Random) -> int:
    """A boundary value, or the old one and a little more or less; cut to the field."""
    value = generator.choice(
        [*LIMITS, old + 1, old - 1, old + generator.randint(2, 99), old * 2, generator.getrandbits(64)]
    )
    return value & ((1 << 8 * size) - 1)


def set_field(data: bytearray, start: int, field: tuple[int, int], generator: random.Random) -> None:
    at, size = start + field[0], field[1]
    if at + size <= len(data):
        old = int.from_bytes(data[at : at + size], "little")
        data[at : at + size] = value_for(old, size, generator).to_bytes(size, "little")


def seal_header(data: bytearray) -> None:
    data[92:96] = struct.pack("<I", zlib.crc32(data[:92]))


def seal_frame(data: bytearray, start: int) -> None:
    """Over as much as the frame says it has, if that is there."""
    (length,) = struct.unpack_from("<I", data, start + 4)
    data[start : start + 4] = struct.pack("<I", zlib.crc32(data[start + 4 : start + FRAME + length]))


def forge_header(data: bytearray, number: int, generator: random.Random) -> None:
    if len(data) >= HEADER:
        for _ in range(generator.choice([1, 1, 2, 4])):
            set_field(data, 0, generator.choice(list(HEADER_FIELDS.values())), generator)
        seal_header(data)


def forge_frame(data: bytearray, number: int, generator: random.Random) -> None:
    frames = read_segment(number, bytes(data)).frames
    if frames:
        frame = generator.choice(frames)
        set_field(data, frame.offset, generator.choice(list(FRAME_FIELDS.values())), generator)
        if generator.random() < 0.3:  # and what the body begins with: an expiry, a count, lengths
            set_field(data, frame.offset, (FRAME + generator.choice([0, 4, 8, 12, 16]), 4), generator)
        seal_frame(data, frame.offset)


def forge_batch(data: bytearray, number: int, generator: random.Random) -> None:
    """The count and the lengths of a batch; of another frame, the beginning of its body."""
    frames = read_segment(number, bytes(data)).frames
    batches = [frame for frame in frames if len(frame.records) > 1] or frames
    if batches:
        frame = generator.choice(batches)
        skip = 8 if data[frame.offset + 22] & 1 else 0
        for _ in range(generator.choice([1, 2])):
            place = FRAME + skip + 4 * generator.randint(0, len(frame.records))
            set_field(data, frame.offset, (place, 4), generator)
        seal_frame(data, frame.offset)


def forge_footer(data: bytearray, number: int, generator: random.Random) -> None:
    if len(data) >= HEADER + FOOTER:
        for _ in range(generator.choice([1, 1, 2, 3])):
            set_field(data, len(data) - FOOTER, generator.choice(list(FOOTER_FIELDS.values())), generator)
        seal_frame(data, len(data) - FOOTER)


def forge_new_frames(data: bytearray, number: int, generator: random.Random) -> None:
    """Frames that nobody put: of any kind, with ids that go on, jump ahead or go back, with any watermark."""
    header = read_header(bytes(data))
    segment = read_segment(number, bytes(data))
    if header is None or segment.header is None:
        return
    at = segment.frames[-1].end if segment.frames else HEADER
    due = segment.frames[-1].last_id + 1 if segment.frames else header.first_id
    for _ in range(generator.randint(1, 4)):
        item_id = min(generator.choice([due, due, due + 1, due + 1000, 1, value_for(due, 8, generator)]), LIMITS[-1])
        kind = generator.choice([0, 0, 1, 2, 3, 8, value_for(0, 2, generator)])
        body = generator.randbytes(generator.choice([0, 4, 8, 12, 64]))
        if kind in (2, 3):
            count = generator.choice([0, 1, 3, 1 << 20, (1 << 32) - 1])
            body = bytes(8 * (kind & 1)) + struct.pack("<I", count) + bytes(4 * min(count, 100))
        lag = generator.choice([0, 1, item_id & 0xFFFFFFFF, (1 << 32) - 1])
        stamp = kind << 48 | generator.getrandbits(48)
        frame = bytearray(struct.pack("<IIQQII", 0, len(body), item_id, stamp, lag, header.marker) + body)
        seal_frame(frame, 0)
        data[at : at + len(frame)] = frame
        at, due = at + len(frame), min(item_id + 1, (1 << 64) - 1)


def forge_state(data: bytearray, number: int, generator: random.Random) -> None:
    """Fields of the last state of a checkpoint; spans and error counts that were not there."""
    at, starts = PREFIX, []
    while at + 100 <= len(data) and (length := int.from_bytes(data[at + 4 : at + 8], "little")):  # then zeros
        starts.append(at)
        at += 8 + length
    if not starts:
        return
    start = starts[-1]
    for _ in range(generator.choice([1, 1, 2, 4])):
        set_field(data, start, generator.choice(list(STATE_FIELDS.values())), generator)
    if generator.random() < 0.4:
        head = int.from_bytes(data[start + 24 : start + 32], "little")
        pairs = [value_for(head + n, 8, generator) for n in range(generator.randint(1, 6))]
        spans = sorted(pairs)[: len(pairs) // 2 * 2]
        counts = [(value_for(head, 8, generator), value_for(1, 4, generator)) for _ in range(generator.randint(0, 3))]
        name = bytes(data[start + 100 : start + 100 + int.from_bytes(data[start + 90 : start + 92], "little")])[:100]
        new = struct.pack("<HII", len(name), len(spans) // 2, len(counts)) + name
        new += b"".join(struct.pack("<Q", each) for each in spans)
        data[start + 90 :] = new + b"".join(struct.pack("<QI", *pair) for pair in counts)
        data[start + 4 : start + 8] = struct.pack("<I", len(data) - start - 8)
    length = int.from_bytes(data[start + 4 : start + 8], "little")
    crc = zlib.crc32(data[start + 8 : start + 8 + length], length)
    data[start : start + 4] = struct.pack("<I", crc)


Forger = Callable[[bytearray, int, random.Random], None]
OF_A_SEGMENT: dict[str, Forger] = {
    each.__name__: each for each in (forge_header, forge_frame, forge_batch, forge_footer, forge_new_frames)
}


def forge(case: Case, generator: random.Random) -> tuple[str, Files]:
    """One forgery, or two; what was forged, and the files after it."""
    files = dict(case.files)
    kinds = []
    for _ in range(1 if generator.random() < 0.7 else 2):
        name = generator.choice(sorted(files))
        data = bytearray(files[name])
        if name.endswith(".segment"):
            kind = generator.choice(list(OF_A_SEGMENT))
            OF_A_SEGMENT[kind](data, int(name.split(".")[1]), generator)
        else:
            kind = "forge_state"
            forge_state(data, 0, generator)
        kinds.append(kind)
        files[name] = bytes(data)
    return kinds[0] if len(kinds) == 1 else "two forgeries", files
