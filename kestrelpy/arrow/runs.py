"""Reads a file of frames as runs, block by block."""

from __future__ import annotations

from collections.abc import Iterator

from kestrelpy._disk.interface import File
from kestrelpy._journal import format as fmt
from kestrelpy._journal.segment import Segment
from kestrelpy.arrow.decode import Run, decode

BLOCK_BYTES = 1 << 20


def runs(file: File, segment: Segment, due: int, offset: int, end: int) -> Iterator[tuple[int, Run]]:
    """Yield the runs of whole frames from ``offset`` on, each with its offset. Stop at the first other bytes."""
    want = BLOCK_BYTES
    while offset < end:
        data, at = memoryview(file.read(offset, min(want, end - offset))), 0
        while (run := decode(data[at:], segment.header.marker, due)).end:
            yield offset + at, run
            at, due = at + run.end, run.next_id
        claimed = fmt.FRAME_BYTES + int.from_bytes(data[at + 4 : at + 8], "little")
        if not at and not want < claimed <= end - offset:
            return
        offset, want = offset + at, max(BLOCK_BYTES, claimed)
