"""What the files of a queue say, without opening the queue: its segments, and its readers by their last checkpoints.

Read-only and without a lock; it may be called beside a live writer.
"""

from __future__ import annotations

import os

from kestrelpy._disk.interface import Directory, Disk, StrPath
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import file_names
from kestrelpy._journal.catalog import SegmentCatalog
from kestrelpy._journal.checkpoint import load_checkpoint
from kestrelpy._journal.format import Checkpoint
from kestrelpy._journal.purpose import ITEMS, kind_of
from kestrelpy._journal.segment import (
    Objection,
    Segment,
    frames_of,
    identify,
    load_segment,
    open_segment,
    segments_in,
)
from kestrelpy._value import Value
from kestrelpy.errors import CorruptJournal
from kestrelpy.inbox.parts import inbox_counts

__all__ = ["QueueInspection", "SavedReader", "SegmentInfo", "inspect"]

_TRIES = 20  # a live writer may retire all listed segments, before the newest of them is opened


class SegmentInfo(Value):
    """One segment. ``file_bytes``: its apparent size. If it is not closed, ``items`` counts those in whole frames."""

    name: str
    number: int
    first_id: int
    last_id: int
    items: int
    data_bytes: int
    file_bytes: int
    closed: bool


class SavedReader(Value):
    """A reader as of its last checkpoint. ``items`` and ``bytes``: what was not done by then, open reads included.

    ``done``: spans of done ids above ``head``. ``error_counts``: an id, and how often its item was aborted.
    """

    name: str
    head: int
    items: int
    bytes: int
    done: tuple[tuple[int, int], ...]
    error_counts: tuple[tuple[int, int], ...]


class QueueInspection(Value):
    """A queue by its files. ``put_items``, ``put_bytes``: all that was ever put. ``file_bytes``: the files' apparent
    size. ``kind``: ``"queue"``, or ``"work queue"``, whose items are records of jobs. ``refused_batches``: published
    batches that the owner could not ingest, and keeps aside in the inbox; ``pending_batches``: those that it has not
    ingested yet, with items that no other figure counts.
    """

    name: str
    segments: tuple[SegmentInfo, ...]
    readers: tuple[SavedReader, ...]
    tail_id: int
    put_items: int
    put_bytes: int
    file_bytes: int
    kind: str = ITEMS
    refused_batches: int = 0
    pending_batches: int = 0


def inspect(directory: str | os.PathLike[str], queue: str, *, disk: Disk | None = None) -> QueueInspection:
    """What the files of ``queue`` in ``directory`` say now. If the queue is not there, all figures are 0.

    Raises ``CorruptJournal`` for a segment without its header or an open one that is damaged, ``UnsupportedFormat``,
    ``InvalidName``, ``OSError``.
    Cost: O(segments), and the frames of a segment that is not closed.
    """
    file_names.check_name(queue)
    disk = disk or RealDisk(allow_network=True)
    folder = disk.directory(os.fspath(directory))
    try:
        return _look_again(folder, queue, inbox_counts(os.fspath(directory), queue, disk))
    finally:
        folder.close()


def _look_again(folder: Directory, queue: str, inbox: tuple[int, int]) -> QueueInspection:
    for _ in range(_TRIES - 1):
        found = _look(folder, queue, inbox, is_last_try=False)
        if found is not None:
            return found
    found = _look(folder, queue, inbox, is_last_try=True)
    assert found is not None
    return found


def _look(folder: Directory, queue: str, inbox: tuple[int, int], *, is_last_try: bool) -> QueueInspection | None:
    """Look once. ``None`` if the writer has retired the newest listed segment: then the list says nothing of it now."""
    catalog = SegmentCatalog([folder], queue)  # before the listing: the segments listed go at least as far
    mine = file_names.of_queue(folder.names(), queue)
    names = [name for name in mine if (owner := file_names.parse_owner(name)) and owner[0] == queue]
    # Checkpoints before segments: the segments listed later reach at least as far as the checkpoints.
    states = {
        reader: state
        for name in names
        if (reader := file_names.parse_checkpoint(name, queue)) is not None
        and (state := load_checkpoint(folder, name)[0]) is not None
    }
    numbered = segments_in(folder, queue, names)
    segments, is_gone = _segments(folder, catalog, numbered)
    last_id = segments[-1].last_id if segments else 0
    if numbered and not (segments and segments[-1].number == numbered[-1][0]):
        if is_gone and not is_last_try:
            return None
        if catalog.watermark > last_id and not is_gone:
            path, reason = f"{folder.path}/{numbered[-1][1]}", "this segment has no valid header, and items are missing"
            raise CorruptJournal(path, 0, reason)
    put_items = segments[-1].header.base_items + segments[-1].items if segments else 0
    put_bytes = segments[-1].header.base_bytes + segments[-1].data_bytes if segments else 0
    return QueueInspection(
        name=queue,
        segments=tuple(_info(segment) for segment in segments),
        readers=tuple(sorted(_readers(states, segments, put_items, put_bytes), key=lambda reader: reader.name)),
        tail_id=max((segment.last_id for segment in segments), default=0),
        put_items=put_items,
        put_bytes=put_bytes,
        file_bytes=sum(_size(folder, name) for name in names),
        kind=kind_of(names, queue),
        refused_batches=inbox[1],
        pending_batches=inbox[0],
    )


def _segments(
    folder: Directory, catalog: SegmentCatalog, numbered: list[tuple[int, str]]
) -> tuple[list[Segment], bool]:
    """The segments, in order, and whether a listed one is gone: retired at this moment.

    They are opened from the newest to the oldest: the newest is the last to be retired.
    """
    segments: list[Segment] = []
    is_gone = False
    for number, name in reversed(numbered):
        try:
            segment = _segment(folder, catalog, number, name, last=name == numbered[-1][1])
        except FileNotFoundError:
            is_gone = True
            continue
        if segment is not None:
            segments.append(segment)
    return segments[::-1], is_gone


def _readers(
    states: dict[str, Checkpoint], segments: list[Segment], put_items: int, put_bytes: int
) -> list[SavedReader]:
    if not states and segments:  # there is no checkpoint yet: the default reader, at the beginning
        kept = sum(segment.items for segment in segments), sum(segment.data_bytes for segment in segments)
        return [SavedReader("", segments[0].first_id - 1, *kept, (), ())]
    return [
        SavedReader(
            reader,  # the file's: after a takeover the state still has the default reader's, until the next save
            state.head,
            max(0, put_items - state.released_items),
            max(0, put_bytes - state.released_bytes),
            state.done,
            state.error_counts,
        )
        for reader, state in states.items()
    ]


def _segment(folder: Directory, catalog: SegmentCatalog, number: int, name: str, *, last: bool) -> Segment | None:
    """A segment, with its items counted if it is not closed; ``None`` if it is being made, or never was one."""
    file = open_segment(folder, name)
    path = f"{folder.path}/{name}"
    try:
        header = identify(file, path, name, number, b"", lambda: catalog.header_after(number))
        if header is None:
            return None
        if isinstance(header, Objection):
            raise header.error(path)
        segment = load_segment(file, name, header)
        if not segment.closed:
            if not last and catalog.is_abandoned(file, segment):
                return None
            for offset, frame in frames_of(file, segment, path):
                segment.count(offset, frame)
        return segment
    finally:
        file.close()


def _info(segment: Segment) -> SegmentInfo:
    return SegmentInfo(
        segment.name,
        segment.number,
        segment.first_id,
        segment.last_id,
        segment.items,
        segment.data_bytes,
        segment.size,
        segment.closed,
    )


def _size(folder: Directory, name: str) -> int:
    """The size of a file; 0 if it is gone at this moment. A new segment may have been renamed: its size counts."""
    try:
        file = open_segment(folder, name)
    except FileNotFoundError:
        return 0
    try:
        return file.size()
    finally:
        file.close()


def queue_names(directory: StrPath, *, disk: Disk | None = None) -> list[str]:
    """The names of the queues in ``directory``, sorted. Raises ``OSError``. Cost: O(files)."""
    folder = (disk or RealDisk()).directory(os.fspath(directory))
    try:
        names = folder.names()
    finally:
        folder.close()
    return file_names.queues_among(names)
