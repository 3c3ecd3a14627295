"""Plans a read from a store of ``kestrelpy.ship``: which objects it needs.

Rules:
1. A piece is a whole object: a closed segment, or a slot with bytes of the segment that is not closed. It says what the
   object is, so that a reader can tell whether it has read that one.
2. An item has the same columns whether it comes from a slot or, later, from its segment.
"""

from __future__ import annotations

from collections.abc import Iterator

from kestrelpy._journal import format as fmt
from kestrelpy.arrow.objects import SealedPiece, SlotPiece, SlotSpan, StorePiece
from kestrelpy.arrow.plan import counts_within, error_counts_of
from kestrelpy.arrow.wanted import Wanted
from kestrelpy.ship.manifest import LogState, TailSlot


def pieces_of_log(queue: str, state: LogState, wanted: Wanted) -> Iterator[StorePiece]:
    """The objects that may have ``wanted`` items, in the order of ids: closed segments, and slots with the rest."""
    counts = error_counts_of(state.checkpoints.values())
    for segment in state.segments:
        footer = segment.segment_footer()
        mine = wanted.within(footer.first_id, footer.last_id, footer.min_added_ms, footer.max_added_ms)
        if not mine.is_nothing:
            yield SealedPiece(queue, segment, mine, counts_within(counts, mine))
    at = state.header
    if at is None:
        return
    for span in tail_spans(state):
        mine = wanted.within(span.first_id, span.last_id, 0, fmt.ADDED_MASK)
        if not mine.is_nothing:
            yield SlotPiece(queue, at.queue_id, at.number, at.marker, span, mine, counts_within(counts, mine))


def tail_spans(state: LogState) -> list[SlotSpan]:
    """The slots with items of the segment that is not closed. Within one segment, ids have no gap."""
    place = state.place
    ends = [*state.tail[1:], TailSlot(0, place.offset, place.last_id + 1)]
    spans = (
        SlotSpan(slot.slot, slot.offset, after.offset - slot.offset, slot.first_id, after.first_id - 1)
        for slot, after in zip(state.tail, ends, strict=False)
    )
    return [span for span in spans if span.first_id <= span.last_id]
