"""A queue as its files say: segments and the readers' last checkpoints. Read-only, lockless, beside a live writer.

The public interface does not say yet what the checkpoints of readers hold that are open nowhere or elsewhere; so this
module, alone of the command line, reads the files itself (by ``_disk``, ``_names`` and ``_format``). A function
``inspect(directory, queue)`` in the library would replace it whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kestrelpy import _format, _names, scan
from kestrelpy._disk import Directory, RealDisk
from kestrelpy.cli._common import CommandError
from kestrelpy.errors import CorruptJournal, NoDefaultReader, UnsupportedFormat
from kestrelpy.item import Record

_TRIES = 5  # a live writer may retire a file between the listing and the look


@dataclass(frozen=True, slots=True)
class Segment:
    """One journal file. ``items`` and what follows are known of a closed one without reading its records."""

    name: str
    number: int
    first_id: int
    last_id: int
    items: int
    data_bytes: int
    file_bytes: int
    closed: bool


@dataclass(frozen=True, slots=True)
class SavedReader:
    """A reader by its last checkpoint. ``items`` and ``bytes``: what was not done with by then, open reads included."""

    name: str
    head: int
    items: int
    bytes: int
    done: tuple[tuple[int, int], ...]
    error_counts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SavedQueue:
    """``put_items`` and ``put_bytes`` count from the queue's first day; ``file_bytes``: apparent size of its files."""

    name: str
    segments: tuple[Segment, ...]
    readers: tuple[SavedReader, ...]
    tail_id: int
    put_items: int
    put_bytes: int
    file_bytes: int


def look(directory: str, queue: str) -> SavedQueue:
    """What the files of a queue say now. Raises ``CorruptJournal`` or ``UnsupportedFormat`` for a bad one."""
    folder = RealDisk(allow_network=True).directory(directory)
    try:
        for attempt in range(_TRIES):
            try:
                return _look(folder, directory, queue)
            except FileNotFoundError:
                if attempt == _TRIES - 1:
                    raise
        raise AssertionError
    finally:
        folder.close()


def _look(folder: Directory, directory: str, queue: str) -> SavedQueue:
    names = [name for name in folder.names() if (owner := _names.parse_owner(name)) and owner[0] == queue]
    checkpoints = [
        _checkpoint(folder, name) for name in names if _names.parse_checkpoint(name, queue) is not None
    ]  # before the segments: what they name must then still be there or further on
    numbered = sorted((number, name) for name in names if (number := _names.parse_segment(name, queue)) is not None)
    segments, put_items, put_bytes = [], 0, 0
    for number, name in numbered:
        is_last = number == numbered[-1][0]
        found = _segment(folder, directory, queue, number, name, is_last=is_last)
        if found is None:
            continue
        segment, base_items, base_bytes = found
        segments.append(segment)
        put_items, put_bytes = base_items + segment.items, base_bytes + segment.data_bytes
    readers = [
        SavedReader(
            state.reader,
            state.head,
            max(0, put_items - state.released_items),
            max(0, put_bytes - state.released_bytes),
            state.done,
            state.error_counts,
        )
        for state in checkpoints
        if state is not None
    ]
    if not readers and (segments or checkpoints):  # nobody has saved a place yet: the default reader, at the beginning
        kept = sum(segment.items for segment in segments), sum(segment.data_bytes for segment in segments)
        readers = [SavedReader("", segments[0].first_id - 1 if segments else 0, *kept, (), ())]
    tail_id = max((segment.last_id for segment in segments), default=0)
    readers.sort(key=lambda reader: reader.name)
    size = sum(_size(folder, name) for name in names)
    return SavedQueue(queue, tuple(segments), tuple(readers), tail_id, put_items, put_bytes, size)


def _size(folder: Directory, name: str) -> int:
    file = folder.open(name)
    try:
        return file.size()
    finally:
        file.close()


def _checkpoint(folder: Directory, name: str) -> _format.Checkpoint | None:
    file = folder.open(name)
    try:
        data = file.read(0, file.size())
    finally:
        file.close()
    version = _format.checkpoint_version(data)
    if version is not None and version > _format.FORMAT_VERSION:
        raise UnsupportedFormat(f"{folder.path}/{name}", version, _format.FORMAT_VERSION)
    state, _ = _format.decode_checkpoints(data) if version is not None else (None, 0)
    return state


def _segment(
    folder: Directory, directory: str, queue: str, number: int, name: str, *, is_last: bool
) -> tuple[Segment, int, int] | None:
    """A segment with the items and bytes put before it; ``None`` for a last one that was never finished being made."""
    file = folder.open(name)
    try:
        start = file.read(0, _format.HEADER_BYTES)
        size = file.size()
        end = file.read(max(0, size - _format.FOOTER_BYTES), _format.FOOTER_BYTES)
    finally:
        file.close()
    header = _format.decode_header(start)
    if header is None:
        version = _format.header_version(start)
        if version is not None and version > _format.FORMAT_VERSION:
            raise UnsupportedFormat(f"{folder.path}/{name}", version, _format.FORMAT_VERSION)
        if is_last:
            return None
        raise CorruptJournal(f"{folder.path}/{name}", 0, "this is not the header of a segment")
    footer = _format.decode_footer(end, header)
    if footer is not None:
        last_id, items, data_bytes = footer.last_id, footer.items, footer.data_bytes
    else:
        last_id, items, data_bytes = header.first_id - 1, 0, 0
        for record in scan(directory, queue, start_id=header.first_id):
            if record.segment != name:
                break
            last_id, items, data_bytes = record.id, items + 1, data_bytes + len(record.data)
    segment = Segment(name, number, header.first_id, last_id, items, data_bytes, size, footer is not None)
    return segment, header.base_items, header.base_bytes


def unread(directory: str, queue: str, reader: str, *, now_ms: int) -> Iterator[Record]:
    """What a reader would get if it were opened now, in order; expired items are left out.

    Raises ``CommandError`` if there is no such reader, ``NoDefaultReader`` if it is the default one and has given way.
    """
    saved = look(directory, queue)
    state = next((one for one in saved.readers if one.name == reader), None)
    if state is None:
        others = tuple(one.name for one in saved.readers if one.name)
        if not reader and others:
            raise NoDefaultReader(queue, others)
        raise CommandError(
            f"queue {queue!r} has no reader {reader!r}" + (f"; it has {', '.join(others)}" if others else "")
        )
    return _not_done(scan(directory, queue, start_id=state.head + 1), state.done, now_ms)


def _not_done(records: Iterator[Record], done: tuple[tuple[int, int], ...], now_ms: int) -> Iterator[Record]:
    spans = list(reversed(done))
    for record in records:
        while spans and spans[-1][1] < record.id:
            spans.pop()
        is_done = bool(spans) and spans[-1][0] <= record.id
        is_expired = record.expires_ms is not None and record.expires_ms <= now_ms
        if not is_done and not is_expired:
            yield record
