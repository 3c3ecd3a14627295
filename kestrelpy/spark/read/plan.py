"""Plans which task reads which segments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from kestrelpy.arrow.pieces import Piece
from kestrelpy.spark.read.part import SegmentPart

PART_BYTES = 16 << 20
"""The size that a part should have, in bytes of segments."""


class Sized(Protocol):
    """A piece of a part, as far as its size matters."""

    @property
    def data_bytes(self) -> int: ...


S = TypeVar("S", bound=Sized)


def parts_of(folders: tuple[str, ...], pieces: list[Piece], part_bytes: int) -> list[SegmentPart]:
    """The parts of ``grouped``."""
    return [SegmentPart(folders, run) for run in grouped(pieces, part_bytes)]


def grouped(pieces: Iterable[S], part_bytes: int) -> list[tuple[S, ...]]:
    """Each large piece by itself, and runs of small pieces. At least one group, which may be empty."""
    runs: list[list[S]] = []
    size = part_bytes
    for piece in pieces:
        if size >= part_bytes or size + piece.data_bytes > part_bytes + part_bytes // 2:
            runs.append([])
            size = 0
        runs[-1].append(piece)
        size += piece.data_bytes
    return [tuple(run) for run in runs] or [()]
