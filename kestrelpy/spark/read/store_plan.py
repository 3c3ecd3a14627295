"""Plans a read from a store of ``kestrelpy.ship``: which objects it needs, and which task reads which.

Rules:
1. The driver alone lists, and looks for the end of the log. What looks like the end and is a hole is not taken for it.
2. What a piece is, and how it is read, is the same without Spark (``kestrelpy.arrow``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kestrelpy._journal.file_names import check_name
from kestrelpy.arrow.object_plan import pieces_of_log
from kestrelpy.arrow.objects import StorePiece
from kestrelpy.arrow.wanted import Wanted
from kestrelpy.ship import remote
from kestrelpy.ship.reading import ShippedQueue
from kestrelpy.spark.read.part import ReadPart
from kestrelpy.spark.read.plan import grouped
from kestrelpy.spark.read.store_part import StorePart
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
