"""What users who read a queue as Arrow could meet, put back."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

from kestrelpy._disk.interface import Directory
from kestrelpy._journal import catalog
from kestrelpy._journal.catalog import NotRetired, SegmentCatalog
from kestrelpy.arrow import plan, reading
from kestrelpy.arrow.pieces import Piece, PieceReader
from kestrelpy.arrow.wanted import Wanted
from tests.use.planting import defect


@defect(
    "arrow rest",
    "A read as Arrow ends with the last closed segment, and the newest items are not there.",
    test="tests/arrow/test_arrow_read.py::test_what_arrow_reads_is_what_scan_reads",
)
def _closed_segments_alone() -> Iterator[None]:
    original = plan.pieces_of

    def planned(folders: list[Directory], queue: str, wanted: Wanted) -> list[Piece]:
        return [piece for piece in original(folders, queue, wanted) if piece.last_id is not None]

    with patch.object(reading, "pieces_of", planned):
        yield


@defect(
    "arrow retired",
    "A read as Arrow fails where a segment was retired since it was planned.",
    test="tests/arrow/test_arrow_read.py::test_segments_that_are_retired_meanwhile_have_no_rows",
)
def _nothing_is_ever_retired() -> Iterator[None]:
    from kestrelpy.arrow import pieces
    from kestrelpy.arrow.errors import FilesNotSeen

    def check(chain: object, piece: Piece, folders: tuple[str, ...]) -> None:
        raise FilesNotSeen(f"{folders[piece.folder]}/{piece.name}", "it is gone")

    with patch.object(pieces, "check_retired", check):
        yield


@defect(
    "arrow damage",
    "A read as Arrow ends at a record that is not intact as if that were all.",
    test="tests/arrow/test_arrow_read.py::test_damage_is_an_error_after_the_rows_before_it",
    unreachable="worlds that are damaged are not compared: the programs of tests/arrow/test_arrow_model.py are",
)
def _damage_is_an_end() -> Iterator[None]:
    with patch.object(PieceReader, "_check_end", lambda *_: None):
        yield


@defect(
    "arrow proof",
    "A read as Arrow, or on Spark, that goes on while its writer retires fails with CorruptJournal or FilesNotSeen: "
    "nothing is damaged, and what was read of the folder was of two moments.",
    test="tests/arrow/test_arrow_read.py::test_what_is_retired_while_the_proof_is_looked_for_is_no_damage",
)
def _the_checkpoints_of_before() -> Iterator[None]:
    original = SegmentCatalog.doubt

    def doubt(self: SegmentCatalog, number: int, queue_id: bytes) -> NotRetired | None:
        with patch.object(self, "_load", lambda: self.states):
            return original(self, number, queue_id)

    with patch.object(SegmentCatalog, "doubt", doubt), patch.object(catalog, "_TRIES", 1):
        yield
