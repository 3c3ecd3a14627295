"""Plans a read: which segments it needs, found without reading a payload."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from kestrelpy._disk.interface import Directory, File
from kestrelpy._journal import format as fmt
from kestrelpy._journal.catalog import missing_items
from kestrelpy._journal.segment import Segment
from kestrelpy.arrow.pieces import Piece
from kestrelpy.arrow.runs import runs
from kestrelpy.arrow.wanted import Wanted
from kestrelpy.inspection.scan import Scan

ErrorCounts: TypeAlias = tuple[tuple[int, int], ...]
"""Ids, rising, each with its error count."""


def pieces_of(folders: list[Directory], queue: str, wanted: Wanted) -> list[Piece]:
    """The live and archived segments of a queue that may have ``wanted`` items, in the order of ids.

    Raises as ``scan``: ``CorruptJournal`` if segments do not follow one another or are missing, ``UnsupportedFormat``,
    ``OSError``.
    """
    scan = Scan(folders, queue, None, None, None, None)
    catalog = scan.catalog
    counts = tuple(sorted(scan.error_counts.items()))
    pieces: list[Piece] = []
    before: Segment | None = None
    gone, broken = False, False  # the previous segment: retired meanwhile; neither closed nor last
    numbers = list(catalog.numbered())
    for number in numbers:
        is_last = number == numbers[-1]
        opened = scan.open(number, last=is_last)
        if opened is None:
            if number not in catalog.numbered():
                catalog.check_there()
                before, gone = None, True
            continue
        file, path, segment = opened
        try:
            through_id = _reach(file, segment, catalog.watermark) if is_last else 0
        finally:
            file.close()
        objection = None if broken else catalog.objection(before, segment)
        if objection is not None:
            raise objection.error(path)
        before, gone, broken = segment, False, not segment.closed and not is_last
        folder = next(at for at, each in enumerate(folders) if path == f"{each.path}/{segment.name}")
        piece = piece_of(queue, folder, segment, wanted, counts, is_last=is_last, through_id=through_id)
        if piece is not None:
            pieces.append(piece)
    if before is None or before.closed:
        last_id = before.last_id if before is not None else 0
        if last_id < catalog.watermark and last_id + 1 < wanted.stop_id and not gone:
            raise missing_items(folders[0].path, queue, before, catalog.watermark)
    return pieces


def _reach(file: File, segment: Segment, watermark: int) -> int:
    """The last id that the last segment has now. The task must find all items up to this id.

    Without this id, a task that sees an older copy of a segment that is not closed would not notice that items are
    missing.
    """
    if segment.closed:
        return segment.last_id
    due = segment.first_id
    for _, run in runs(file, segment, due, fmt.HEADER_BYTES, file.size()):
        due = run.next_id
    return max(due - 1, watermark)


def piece_of(
    queue: str,
    folder: int,
    segment: Segment,
    wanted: Wanted,
    error_counts: ErrorCounts,
    *,
    is_last: bool,
    through_id: int,
) -> Piece | None:
    """The wanted part of a segment; ``None`` if nothing of the segment is wanted."""
    if segment.closed:
        last_id = segment.last_id
        wanted = wanted.within(segment.first_id, last_id, segment.min_added_ms, segment.max_added_ms)
        share = (min(wanted.stop_id, last_id + 1) - wanted.start_id) / max(segment.items, 1)
    else:
        last_id, share = None, 1.0
        wanted = wanted.within(segment.first_id, fmt.LARGEST, 0, fmt.ADDED_MASK)
    if wanted.is_nothing:
        return None
    return Piece(
        queue,
        folder,
        segment.name,
        segment.header,
        last_id,
        is_last,
        through_id,
        wanted,
        counts_within(error_counts, wanted),
        int(segment.size * share),
    )


def error_counts_of(states: Iterable[fmt.Checkpoint]) -> ErrorCounts:
    """The highest error count that a reader has for each item that has one."""
    counts: dict[int, int] = {}
    for state in states:
        for item_id, count in state.error_counts:
            counts[item_id] = max(count, counts.get(item_id, 0))
    return tuple(sorted(counts.items()))


def counts_within(counts: ErrorCounts, wanted: Wanted) -> ErrorCounts:
    """Those of the wanted ids."""
    return tuple(each for each in counts if wanted.start_id <= each[0] < wanted.stop_id)
