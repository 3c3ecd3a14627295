"""Pieces of a journal, and how their rows are read. It takes no lock and writes nothing.

Rules:
1. A piece identifies its segment by its header, not by its name alone. So a reader reads what was planned.
2. If a segment is missing from its folder, the reader looks for it in the archive. If it is not there either, it has no
   rows, but only if the folder proves that it was retired since the plan: the folder has a later segment of the same
   queue, and the positions of all readers are past the missing segment. Its absence alone proves nothing, because an
   executor of Spark may see another folder under this path, or none. Without that proof it raises ``FilesNotSeen``, or
   ``CorruptJournal`` if a reader needs the segment. It raises in any case if the segment was already in the archive,
   should be in the archive by now, or is kept by a query.
3. If a segment is damaged, the rows before the damage come first, and then ``CorruptJournal``. The rows of a segment
   that is not closed end after the last frame that its writer has written. ``scan`` does the same.
4. An item has the same columns whenever it is read: the column ``segment`` has the segment's lasting name.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, cast

import pyarrow as pa

from kestrelpy._disk.interface import Directory, Disk, File
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import format as fmt
from kestrelpy._journal.catalog import SegmentCatalog
from kestrelpy._journal.file_names import lasting_name
from kestrelpy._journal.segment import Segment, load_segment, open_segment, read_header, was_on_disk
from kestrelpy.arrow.columns import COLUMNS, Columns
from kestrelpy.arrow.decode import decode
from kestrelpy.arrow.errors import FilesNotSeen
from kestrelpy.arrow.seek import Counted, seek
from kestrelpy.arrow.wanted import Wanted
from kestrelpy.errors import CorruptJournal

BLOCK_BYTES = 4 << 20
"""The size of one read."""
FIRST_BYTES = 256 << 10
"""The size of the first read of a segment that is not closed: most of that segment may never have been written."""


class Piece(NamedTuple):
    """One segment of a part, or a range of its ids.

    ``last_id`` is ``None`` if the segment was not closed when the read was planned. ``is_last``: no segment followed
    this one. ``through_id``: the segment must have items up to this id. ``is_kept``: the reader of a query keeps the
    segment, so it cannot have been retired.
    """

    queue: str
    folder: int
    name: str
    header: fmt.SegmentHeader
    last_id: int | None
    is_last: bool
    through_id: int
    wanted: Wanted
    error_counts: tuple[tuple[int, int], ...]
    data_bytes: int
    is_kept: bool = False


class FrameSpan(NamedTuple):
    """Frames of a segment: the first one begins with item ``due`` at ``offset``, and they end at ``end`` or earlier."""

    marker: int
    due: int
    offset: int
    end: int


def rows_of(
    read: Callable[[int, int], bytes],
    frames: FrameSpan,
    wanted: Wanted,
    columns: Columns,
    *,
    first_bytes: int,
    block_bytes: int = BLOCK_BYTES,
) -> Generator[pa.RecordBatch, None, tuple[int, int]]:
    """Yield the wanted rows of the frames that ``read(offset, size)`` has, up to the first one that is not intact.

    Returns the id that is due next and the offset at which it is due. ``read`` is asked for rising offsets, for
    ``first_bytes`` at first, and for more than ``block_bytes`` only if a frame claims to have more.
    """
    marker, due, offset, end = frames
    want = first_bytes
    while offset < end and due < wanted.stop_id:
        data = read(offset, min(want, end - offset))
        at = 0
        while (run := decode(memoryview(data)[at:], marker, due)).end:
            yield from columns.batches(run, memoryview(data)[at:], wanted.rows(run))
            at, due = at + run.end, run.next_id
        claimed = _claimed(data, at)
        if not at and not want < claimed <= end - offset:
            break
        offset += at
        want = max(block_bytes, claimed)
    return due, offset


class PieceReader:
    """Reads the columns ``names`` of pieces, which are in ``folders``, the live folder first. ``bytes_read`` counts the
    bytes of segments.
    """

    def __init__(
        self,
        folders: tuple[str, ...],
        pieces: tuple[Piece, ...],
        *,
        disk: Disk | None = None,
        block_bytes: int = BLOCK_BYTES,
        names: Sequence[str] = COLUMNS,
    ) -> None:
        self._folders = folders
        self._pieces = pieces
        self._disk = disk or RealDisk(allow_network=True)  # a folder that is only read may be shared
        self._block_bytes = block_bytes
        self._names = names
        self.bytes_read = 0

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the pieces, in the order of ids for each queue.

        Raises ``CorruptJournal``, ``FilesNotSeen``, ``OSError``, ``UnsupportedFormat``, and ``ValueError`` for an item
        that is too large for a cell (2 GiB).
        """
        folders: list[Directory] = []
        try:
            folders.extend(self._folder(path) for path in self._folders)
            for piece in self._pieces:
                yield from self._batches_of(folders, piece)
        finally:
            for folder in folders:
                folder.close()

    def _folder(self, path: str) -> Directory:
        try:
            return self._disk.directory(path)
        except (FileNotFoundError, NotADirectoryError):
            raise FilesNotSeen(path, "there is no such folder") from None

    def _batches_of(self, folders: list[Directory], piece: Piece) -> Iterator[pa.RecordBatch]:
        found = _open(folders, piece)
        if found is None:
            return
        file, path = found
        counted = Counted(file)
        try:
            segment = load_segment(file, piece.name, piece.header)
            columns = Columns(piece.queue, lasting_name(piece.name), dict(piece.error_counts), self._names)
            yield from self._rows(counted, segment, path, piece, columns)
        finally:
            self.bytes_read += counted.bytes_read
            file.close()

    def _rows(
        self, counted: Counted, segment: Segment, path: str, piece: Piece, columns: Columns
    ) -> Iterator[pa.RecordBatch]:
        wanted = piece.wanted
        file_end = segment.records_end if segment.closed else counted.size()
        (due, offset), end = seek(counted, segment, wanted, file_end, piece.through_id)
        due, offset = yield from rows_of(
            counted.read,
            FrameSpan(segment.header.marker, due, offset, end),
            wanted,
            columns,
            first_bytes=self._block_bytes if segment.closed else FIRST_BYTES,
            block_bytes=self._block_bytes,
        )
        if due >= wanted.stop_id or (offset >= end and end < file_end):
            return
        self._check_end(counted, segment, path, piece, offset, due)

    def _check_end(self, counted: Counted, segment: Segment, path: str, piece: Piece, offset: int, due: int) -> None:
        """All frames before ``offset`` are intact, and item ``due`` is not there. Raise if it should be."""
        if segment.closed:
            if due != segment.last_id + 1 or offset != segment.records_end:
                raise CorruptJournal(path, offset, f"item {due} is not intact here", item_id=due)
            return
        if was_on_disk(cast("File", counted), segment, offset, due):
            raise CorruptJournal(path, offset, f"item {due} was on disk and is not intact here", item_id=due)
        if not piece.is_last:
            at, reason = fmt.footer_offset(segment.size), "the footer of this closed segment is not intact"
            raise CorruptJournal(path, at, reason)
        if due <= min(piece.through_id, piece.wanted.stop_id - 1):
            reason = f"items {due} to {piece.through_id} are missing, and were there when this read was planned"
            raise CorruptJournal(path, offset, reason, item_id=due)


def _claimed(data: bytes, offset: int) -> int:
    """The size that the frame at ``offset`` claims for itself, or 0 if ``data`` ends before its length field."""
    return fmt.FRAME_BYTES + int.from_bytes(data[offset + 4 : offset + 8], "little") if offset + 8 <= len(data) else 0


def _open(folders: list[Directory], piece: Piece) -> tuple[File, str] | None:
    """Open a segment's file, wherever it is now. ``None`` if it is known to have been retired since the plan.

    Raises ``FilesNotSeen``, ``CorruptJournal``.
    """
    found = _open_at(folders[piece.folder], piece.name, piece.header)
    if found is not None:
        return found
    chain = SegmentCatalog(folders, piece.queue)
    for folder, name in chain.numbered().get(piece.header.number, []):
        found = _open_at(folder, name, piece.header)
        if found is not None:
            return found
    check_retired(chain, piece, tuple(folder.path for folder in folders))
    return None


def check_retired(chain: SegmentCatalog, piece: Piece, folders: tuple[str, ...]) -> None:
    """Raise, unless it is known that this segment was retired. It is in none of the folders."""
    path, doubt = f"{folders[piece.folder]}/{piece.name}", chain.doubt(piece.header.number, piece.header.queue_id)
    if doubt is not None and doubt.item_id is not None:
        raise CorruptJournal(path, 0, doubt.reason, item_id=doubt.item_id)
    if doubt is not None:
        raise FilesNotSeen(path, doubt.reason)
    if piece.is_kept:
        raise FilesNotSeen(path, "the reader of the query keeps this segment, and it is gone")
    if piece.folder:
        raise FilesNotSeen(path, "this segment was in the archive, and is gone")
    if len(folders) > 1:
        raise FilesNotSeen(path, f"this segment was retired, and is not in the archive {folders[1]}")


def _open_at(folder: Directory, name: str, header: fmt.SegmentHeader) -> tuple[File, str] | None:
    path = f"{folder.path}/{name}"
    try:
        file = open_segment(folder, name)
    except FileNotFoundError:
        return None
    try:
        if read_header(file, path) == header:
            return file, path
    except BaseException:
        file.close()
        raise
    file.close()
    return None
