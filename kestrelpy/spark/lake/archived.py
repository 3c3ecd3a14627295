"""Reads one archived segment through pyarrow: all items of a closed segment, or ``CorruptJournal``.

Rules:
1. A segment is read only if its header and footer are whole, and only up to the end of its frames by the footer.
2. The segment must have the items from the footer's first id to its last id. Missing or other items are damage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from kestrelpy._journal import file_names
from kestrelpy._journal import format as fmt
from kestrelpy._journal.purpose import JOBS, kind_of
from kestrelpy.arrow.columns import Columns
from kestrelpy.arrow.decode import decode
from kestrelpy.errors import CorruptJournal, UnsupportedFormat, WrongKind

BLOCK_BYTES = 4 << 20
"""The size of one read."""


def queue_of(name: str) -> str | None:
    """The queue to which a segment in an archive belongs; ``None`` if the file is no segment, or not whole yet."""
    owner = file_names.parse_owner(name)
    if owner is None or owner[1] or file_names.is_new(name) or file_names.parse_segment(name, owner[0]) is None:
        return None
    return owner[0]


def segments_of(names: Iterable[str], where: str) -> list[str]:
    """The segments among a folder's ``names``.

    Raises ``WrongKind`` if a segment belongs to a work queue: its records are about live jobs, and are no items.
    """
    names = set(names)
    found = {name: queue for name in sorted(names) if (queue := queue_of(name)) is not None}
    for queue in set(found.values()):
        if kind_of(names, queue) == JOBS:
            raise WrongKind(f"{where}/{queue}", JOBS)
    return list(found)


class Archived:
    """The segment in ``file``, a pyarrow file called ``path`` in errors.

    Raises ``CorruptJournal``, ``UnsupportedFormat``, ``OSError``.
    """

    def __init__(self, file: Any, path: str, name: str) -> None:
        self._file = file
        self._path = path
        self._name = name
        self._size = file.size()
        head = file.read_at(min(fmt.HEADER_BYTES, self._size), 0)
        version = fmt.header_version(head)
        if version is not None and version > fmt.FORMAT_VERSION:
            raise UnsupportedFormat(path, version, fmt.FORMAT_VERSION)
        header = fmt.decode_header(head)
        queue = queue_of(name)
        if header is None or queue is None or header.number != file_names.parse_segment(name, queue):
            raise CorruptJournal(path, 0, "this segment has no valid header")
        self.queue = queue
        self.header = header
        at = self._size - fmt.FOOTER_BYTES
        footer = fmt.decode_footer(file.read_at(fmt.FOOTER_BYTES, at), header) if at >= fmt.HEADER_BYTES else None
        if footer is None or footer.records_end > at:
            raise CorruptJournal(path, max(at, 0), "the footer of this closed segment is not intact")
        self.footer = footer

    @property
    def identity(self) -> str:
        """A name that only this segment has. File names are used again after a queue was erased."""
        header = self.header
        return f"{self.queue}.{header.number:013d}.{header.queue_id.hex()}{header.marker:08x}"

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all items, in the order of ids, with the columns of the format.

        Raises ``CorruptJournal``, ``OSError``, and ``ValueError`` for an item that is too large for a cell (2 GiB).
        """
        columns = Columns(self.queue, self._name, {})
        offset, due, end, want = fmt.HEADER_BYTES, self.footer.first_id, self.footer.records_end, BLOCK_BYTES
        while offset < end:
            data = self._file.read_at(min(want, end - offset), offset)
            at = 0
            while (run := decode(memoryview(data)[at:], self.header.marker, due)).end:
                yield from columns.batches(run, memoryview(data)[at:], slice(0, len(run.starts)))
                at, due = at + run.end, run.next_id
            claimed = _claimed(data, at)
            if not at and not want < claimed <= end - offset:
                break
            offset += at
            want = max(BLOCK_BYTES, claimed)
        if due != self.footer.last_id + 1 or offset != end:
            raise CorruptJournal(self._path, offset, f"item {due} is not intact here", item_id=due)


def _claimed(data: bytes, offset: int) -> int:
    """The size that the frame at ``offset`` claims for itself, or 0 if ``data`` ends before its length field."""
    return fmt.FRAME_BYTES + int.from_bytes(data[offset + 4 : offset + 8], "little") if offset + 8 <= len(data) else 0
