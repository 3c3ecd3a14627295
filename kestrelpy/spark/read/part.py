"""Parts of a journal: what one Spark task reads. It takes no lock and writes nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from kestrelpy.arrow.pieces import Piece, PieceReader


class ReadPart(InputPartition):
    """What one task reads. It is pickled on its way to an executor."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the part, in the order of ids for each queue."""
        raise NotImplementedError


class SegmentPart(ReadPart):
    """Pieces, and the folders that they are in. The live folder comes first."""

    def __init__(self, folders: tuple[str, ...], pieces: tuple[Piece, ...]) -> None:
        self.folders = folders
        self.pieces = pieces

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Raises as ``PieceReader.batches``."""
        return PieceReader(self.folders, self.pieces).batches()


_frozen = False


def read_in_worker(part: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a part, in a Python worker process of Spark. Raises as the part's ``batches``.

    A worker collects garbage after every task. That takes 50 milliseconds for the imported modules, which are no
    garbage, and is twice the time that it takes to read a segment. So each process freezes these objects once.
    """
    global _frozen
    assert isinstance(part, ReadPart)
    if not _frozen:
        gc.collect()
        gc.freeze()
        _frozen = True
    return part.batches()
