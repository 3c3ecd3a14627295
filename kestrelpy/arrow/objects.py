"""Reads a shipped queue: whole objects of a store. It lists nothing and writes nothing.

Rules:
1. An object that is not there, or is not the one that was planned, is ``StoreDamaged``: a closed segment has the size
   and the crc of its SEAL, a slot has a header that says what the plan says. Nobody deletes what a plan of the last
   hours needs, so an absence is never "nothing to read".
2. What was damaged before it was shipped is as in a folder: the rows before the damage come first, and then
   ``CorruptJournal``.
3. A closed segment is read to its end even if only some of its items are wanted: its crc is known for the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from kestrelpy._journal import format as fmt
from kestrelpy._journal.file_names import segment_name
from kestrelpy.arrow.columns import COLUMNS, Columns
from kestrelpy.arrow.pieces import BLOCK_BYTES, FrameSpan, rows_of
from kestrelpy.arrow.wanted import Wanted
from kestrelpy.errors import CorruptJournal
from kestrelpy.ship.reading import ShippedQueue
from kestrelpy.ship.slots import SealedSegment, slot_key
from kestrelpy.ship.store import Store


class SealedPiece(NamedTuple):
    """A closed segment, and which of its items are wanted."""

    queue: str
    segment: SealedSegment
    wanted: Wanted
    error_counts: tuple[tuple[int, int], ...]

    @property
    def number(self) -> int:
        return self.segment.number

    @property
    def data_bytes(self) -> int:
        return self.segment.file_bytes


class SlotSpan(NamedTuple):
    """The bytes of a segment that a slot has: ``length`` from ``offset`` on, with the items ``first_id`` to
    ``last_id``.
    """

    slot: int
    offset: int
    length: int
    first_id: int
    last_id: int


class SlotPiece(NamedTuple):
    """A slot with items of a segment that was not closed when the read was planned. ``number``, ``marker``: of that
    segment.
    """

    queue: str
    queue_id: bytes
    number: int
    marker: int
    span: SlotSpan
    wanted: Wanted
    error_counts: tuple[tuple[int, int], ...]

    @property
    def data_bytes(self) -> int:
        return self.span.length


StorePiece: TypeAlias = SealedPiece | SlotPiece


def read_objects(
    store: Store,
    pieces: Iterable[StorePiece],
    *,
    block_bytes: int = BLOCK_BYTES,
    names: Sequence[str] = COLUMNS,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of ``pieces``, in their order, with the columns ``names``.

    Raises ``StoreDamaged``, ``StoreUnavailable``, ``CorruptJournal``, ``UnsupportedFormat``, and ``ValueError`` for an
    item that is too large for a cell (2 GiB).
    """
    for piece in pieces:
        shipped = ShippedQueue(store, piece.queue)
        columns = Columns(piece.queue, segment_name(piece.queue, piece.number), dict(piece.error_counts), names)
        if isinstance(piece, SealedPiece):
            yield from _rows_of_segment(shipped, piece, columns, block_bytes)
        else:
            yield from _rows_of_slot(shipped, piece, columns, block_bytes)


def _rows_of_segment(
    shipped: ShippedQueue, piece: SealedPiece, columns: Columns, block_bytes: int
) -> Iterator[pa.RecordBatch]:
    segment, footer = piece.segment, piece.segment.segment_footer()
    ahead = ReadAhead(shipped.segment_parts(segment))
    span = FrameSpan(segment.marker, footer.first_id, fmt.HEADER_BYTES, footer.records_end)
    due, offset = yield from rows_of(
        ahead.read, span, piece.wanted, columns, first_bytes=block_bytes, block_bytes=block_bytes
    )
    ahead.finish()
    _check_all(shipped, segment.key, piece.wanted, due, offset)


def _rows_of_slot(
    shipped: ShippedQueue, piece: SlotPiece, columns: Columns, block_bytes: int
) -> Iterator[pa.RecordBatch]:
    span, key = piece.span, slot_key(piece.span.slot)
    slot = shipped.slot(span.slot)
    if slot is None:
        raise shipped.damage(key, "it was there when this read was planned, and is gone")
    header, frames = slot.header, slot.frames
    found = SlotSpan(header.slot, header.offset, header.length, header.first_id, header.last_id)
    if (header.queue_id, header.number, header.marker, found) != (piece.queue_id, piece.number, piece.marker, span):
        raise shipped.damage(key, "it is not the slot that was there when this read was planned")
    begin = 0 if span.offset else fmt.HEADER_BYTES
    due, offset = yield from rows_of(
        lambda start, size: frames[start : start + size],
        FrameSpan(piece.marker, span.first_id, begin, len(frames)),
        piece.wanted,
        columns,
        first_bytes=len(frames),
        block_bytes=block_bytes,
    )
    _check_all(shipped, key, piece.wanted, due, offset)


def _check_all(shipped: ShippedQueue, key: str, wanted: Wanted, due: int, offset: int) -> None:
    """Raise if items are missing: ``due`` is the first one that is not there. The object is as it was shipped."""
    if due < wanted.stop_id:
        path = f"{shipped.store.describe()}/{shipped.prefix}{key}"
        raise CorruptJournal(path, offset, f"item {due} is not intact here", item_id=due)


class ReadAhead:
    """Bytes that come in parts, read from front to back, with rising offsets. It holds little more than one read."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts
        self._held = b""
        self._begin = 0

    def read(self, offset: int, size: int) -> bytes:
        """Up to ``size`` bytes from ``offset``; fewer only at the end."""
        dropped = min(offset - self._begin, len(self._held))
        held, length = [self._held[dropped:]], len(self._held) - dropped
        self._begin += dropped
        while self._begin + length < offset + size and (part := next(self._parts, None)) is not None:
            held.append(part)
            length += len(part)
        self._held = b"".join(held)
        at = offset - self._begin
        return self._held[at : at + size]

    def finish(self) -> None:
        """Take all that is left. Raises what the parts raise."""
        self._held = b""
        for _ in self._parts:
            pass
