"""Plans a read from a store of ``kestrelpy.ship``: which objects it needs, and which task reads which.

Rules:
1. The driver alone lists, and looks for the end of the log. What looks like the end and is a hole is not taken for it.
2. A piece is a whole object: a closed segment, or a slot with bytes of the segment that is not closed. It says what the
   object is, so that a task can tell whether it has read that one.
3. An item has the same columns whether it comes from a slot or, later, from its segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kestrelpy._journal import format as fmt
from kestrelpy._journal.file_names import check_name
from kestrelpy.ship import remote
from kestrelpy.ship.manifest import LogState, TailSlot
from kestrelpy.ship.reading import ShippedQueue
from kestrelpy.spark.read.part import ReadPart
from kestrelpy.spark.read.plan import counts_within, error_counts_of, grouped
from kestrelpy.spark.read.pushdown import Wanted
from kestrelpy.spark.read.store_part import SealedPiece, SlotPiece, SlotSpan, StorePart, StorePiece
from kestrelpy.spark.stores import StorePlace


class ShippedQueues(NamedTuple):
    """The queues of a store: what of them is read."""

    place: StorePlace

    def queues(self, queue: str | None) -> list[str]:
        """The queue that is asked for, or all queues of the store. A store does not say which are work queues.

        Raises ``InvalidName``, ``LookupError``, ``StoreUnavailable``, ``BadStoreURL``.
        """
        if queue is not None:
            return [check_name(queue)]
        store = self.place.open()
        found = remote.queues(store)
        if not found:
            raise LookupError(f"there is no queue in the store {store.describe()}")
        return found

    def parts(self, queues: Iterable[str], wanted: Wanted, part_bytes: int) -> Sequence[ReadPart]:
        """A part for each object, or for a run of small ones. Raises ``NoSuchQueue``, ``StoreDamaged``,
        ``UnsupportedFormat``, ``StoreUnavailable``, ``BadStoreURL``.
        """
        store = self.place.open()
        pieces = [
            piece for queue in queues for piece in pieces_of_log(queue, ShippedQueue(store, queue).at_end(), wanted)
        ]
        return store_parts(self.place, pieces, part_bytes)


def store_parts(place: StorePlace, pieces: Iterable[StorePiece], part_bytes: int) -> list[StorePart]:
    """The parts of ``grouped``."""
    return [StorePart(place, run) for run in grouped(pieces, part_bytes)]


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
