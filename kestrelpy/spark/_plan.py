"""Which segments a read needs, found out without opening a payload, and how they are shared out among tasks."""

from __future__ import annotations

from collections.abc import Iterable

from kestrelpy import _format as fmt
from kestrelpy._chain import Chain
from kestrelpy._disk import Directory
from kestrelpy._segment import Segment, load_segment
from kestrelpy.errors import CorruptJournal
from kestrelpy.folder import _Scan
from kestrelpy.spark._part import Part, Piece
from kestrelpy.spark._wanted import Wanted

PART_BYTES = 16 << 20
"""So many bytes of segments make a part, if there is a choice."""


class _Listed(Chain):
    """A chain that lists its folders when it is told to, and not for every segment."""

    def numbered(self) -> dict[int, list[tuple[Directory, str]]]:
        if not hasattr(self, "_listed"):
            self.look_again()
        return self._listed

    def look_again(self) -> None:
        self._listed = super().numbered()


def pieces_of(folders: list[Directory], queue: str, wanted: Wanted) -> list[Piece]:
    """The segments that may have ``wanted`` items of a queue, live and archived ones, in the order of ids.

    Raises as ``scan`` does: ``CorruptJournal`` where segments do not follow one another or are missing,
    ``UnsupportedFormat``, ``OSError``.
    """
    scan = _Scan(folders, queue, None, None, None, None)
    scan._chain = chain = _Listed(folders, queue)
    counts = sorted(scan._counts.items())
    pieces: list[Piece] = []
    before: Segment | None = None
    gone, broken = False, False  # whether the one before was retired meanwhile, or is not closed and not the last
    numbers = sorted(chain.numbered())
    for number in numbers:
        is_last = number == numbers[-1]
        opened = scan._open(number, last=is_last)
        if opened is None:
            chain.look_again()
            opened = scan._open(number, last=is_last)
        if opened is None:
            if number not in chain.numbered():
                before, gone = None, True
            continue
        file, path, name, header = opened
        try:
            segment = load_segment(file, name, header)
        finally:
            file.close()
        objection = None if broken else chain.objection(before, segment)
        if objection is not None:
            raise CorruptJournal(path, 48, objection)
        before, gone, broken = segment, False, not segment.closed and not is_last
        folder = next(at for at, each in enumerate(folders) if path == f"{each.path}/{name}")
        through_id = chain.watermark if is_last else 0
        piece = piece_of(queue, folder, segment, wanted, counts, is_last=is_last, through_id=through_id)
        if piece is not None:
            pieces.append(piece)
    if before is None or before.closed:
        last_id = before.last_id if before is not None else 0
        if last_id < chain.watermark and last_id + 1 < wanted.stop_id and not gone:
            name = before.name if before is not None else f"{queue}.*.segment"
            reason = f"items {last_id + 1} to {chain.watermark} are missing"
            raise CorruptJournal(f"{folders[0].path}/{name}", 0, reason, item_id=last_id + 1)
    return pieces


def piece_of(
    queue: str,
    folder: int,
    segment: Segment,
    wanted: Wanted,
    error_counts: Iterable[tuple[int, int]],
    *,
    is_last: bool,
    through_id: int,
) -> Piece | None:
    """What is wanted of a segment, ``None`` if it is nothing."""
    if segment.closed:
        last_id = segment.last_id
        wanted = wanted.within(segment.first_id, last_id, segment.min_added_ms, segment.max_added_ms)
        share = (min(wanted.stop_id, last_id + 1) - wanted.start_id) / max(segment.items, 1)
    else:
        last_id, share = None, 1.0
        wanted = wanted.within(segment.first_id, fmt.LARGEST, 0, fmt.ADDED_MASK)
    if wanted.is_nothing:
        return None
    mine = tuple(each for each in error_counts if wanted.start_id <= each[0] < wanted.stop_id)
    return Piece(
        queue,
        folder,
        segment.name,
        segment.header,
        last_id,
        is_last,
        through_id,
        wanted,
        mine,
        int(segment.size * share),
    )


def parts_of(folders: tuple[str, ...], pieces: list[Piece], part_bytes: int) -> list[Part]:
    """A part for each piece, or for a run of small ones together. At least one part, which may be empty."""
    runs: list[list[Piece]] = []
    size = part_bytes
    for piece in pieces:
        if size >= part_bytes or size + piece.data_bytes > part_bytes + part_bytes // 2:
            runs.append([])
            size = 0
        runs[-1].append(piece)
        size += piece.data_bytes
    return [Part(folders, tuple(run)) for run in runs] or [Part(folders, ())]
