"""Parts of a shipped queue: whole objects of a store, read by one Spark task, which opens the store by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from kestrelpy.arrow.objects import StorePiece, read_objects
from kestrelpy.spark.read.part import ReadPart
from kestrelpy.spark.stores import StorePlace


class StorePart(ReadPart):
    """Objects, and the store that they are in."""

    def __init__(self, place: StorePlace, pieces: tuple[StorePiece, ...]) -> None:
        self.place = place
        self.pieces = pieces

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Raises as ``read_objects``, and ``BadStoreURL``."""
        return read_objects(self.place.open(), self.pieces)
