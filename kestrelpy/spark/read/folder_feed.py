"""A streaming query on a folder: a named reader of the queue, beside the process that writes it.

Rules:
1. ``commit`` moves the reader's head, durably, to the last item that the sink has, and no further. So the writer keeps
   all items that a restart may need, and may retire the rest.
2. Only the process that plans the query opens the reader. Other objects of this class take no lock.
"""

from __future__ import annotations

import os
import time
from itertools import pairwise
from typing import NamedTuple

from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import file_names
from kestrelpy._journal import format as fmt
from kestrelpy._journal.purpose import refuse_jobs
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._journal.segment import Segment
from kestrelpy._reading.detached_source import DetachedSource
from kestrelpy._reading.reader import Reader
from kestrelpy._reading.registry import ReaderRegistry, Start
from kestrelpy.arrow.pieces import Piece
from kestrelpy.arrow.plan import counts_within, error_counts_of
from kestrelpy.arrow.wanted import Wanted
from kestrelpy.clock import SystemClock
from kestrelpy.config import ReaderConfig
from kestrelpy.errors import KestrelError, NoDefaultReader, QueueLocked
from kestrelpy.spark.read.feed import Loss
from kestrelpy.spark.read.part import SegmentPart
from kestrelpy.spark.read.plan import PART_BYTES, parts_of
from kestrelpy.spark.read.run_counter import RunCounter

SPLIT_BYTES = 2 << 20
"""A smaller part of a segment, in bytes, is not worth another task."""
LOCK_PATIENCE = 10.0
"""Seconds to wait for the reader's lock: the process of a query that has just ended may hold it a little longer."""


class FolderFeed:
    """The ``Feed`` of reader ``name`` of a queue in the first of ``folders``. ``start``: where a new reader begins.
    ``takes_over``: if it is the first named one, it takes over the default reader's position instead.
    """

    def __init__(self, folders: tuple[str, ...], queue: str, name: str, start: Start, *, takes_over: bool) -> None:
        self._folders = folders
        self._queue = queue
        self._name = name
        self._start = start
        self._takes_over = takes_over
        self._reader: Reader | None = None
        self._source: DetachedSource
        self._counter: RunCounter

    @property
    def is_open(self) -> bool:
        return self._reader is not None

    @property
    def queue_id(self) -> bytes:
        return self._source.queue_id

    @property
    def first_id(self) -> int:
        return self._source.first_id

    @property
    def last_id(self) -> int:
        return self._source.visible_id

    @property
    def head(self) -> int:
        return self._opened().head

    def _opened(self) -> Reader:
        assert self._reader is not None
        return self._reader

    def open(self, start_id: int | None) -> None:
        if self._reader is not None:
            return
        place: Start = self._start if start_id is None else start_id + 1
        opens = open_source if start_id is not None or self._takes_over else open_at
        until = time.monotonic() + LOCK_PATIENCE
        while True:
            try:
                self._reader, self._source, self._counter = opens(self._folders[0], self._queue, self._name, place)
                break
            except QueueLocked as locked:
                if time.monotonic() > until:
                    holder = "another owner" if locked.pid is None else f"process {locked.pid}"
                    raise KestrelError(
                        f"reader {self._name!r} of queue {self._queue!r} is owned by {holder}: "
                        "a reader belongs to one query; set the option reader to another name"
                    ) from None
                time.sleep(0.1)

    def look(self) -> int:
        return self.last_id

    def spans(self) -> list[tuple[int, int]]:
        return [(segment.first_id, segment.last_id) for segment in self._source.view.segments]

    def losses(self, start_id: int) -> list[Loss]:
        first_id, segments = self._source.first_id, self._source.view.segments
        if segments and start_id < segments[0].header.previous_last_id:
            return [Loss(start_id + 1, first_id - 1, f"the journal begins with item {first_id}")]
        found = []
        for before, segment in pairwise(segments):
            previous_id, there = segment.header.previous_last_id, max(before.last_id, start_id)
            if there < previous_id:
                found.append(Loss(there + 1, previous_id, "the segment that they are in is not there"))
        return found

    def keep_after(self, start_id: int) -> None:
        reader = self._opened()
        if start_id < reader.head:
            reader.seek(start_id + 1)
            reader.checkpoint(durable=True)

    def make_durable(self, last_id: int) -> None:
        self._source.make_durable(last_id)

    def reach(self, first_id: int, last_id: int, max_bytes: int) -> int:
        return self._counter.reach(self._source.view.segments, first_id, last_id, max_bytes)

    def parts(self, first_id: int, last_id: int) -> list[SegmentPart]:
        """At least two tasks if the batch is large enough, and at least one for each large segment."""
        return parts_of(self._folders, self._pieces(first_id, last_id), PART_BYTES)

    def commit(self, last_id: int) -> None:
        reader = self._opened()
        if last_id > reader.head:
            reader.seek(last_id + 1)
        reader.checkpoint(durable=True)

    def close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _pieces(self, first_id: int, last_id: int) -> list[Piece]:
        files = self._source.files
        states = files.load_all(files.directory.names())
        counts = error_counts_of(each for each in states if each.queue_id == self._source.queue_id)
        segments = [
            each for each in self._source.view.segments if each.first_id <= last_id and each.last_id >= first_id
        ]
        sizes = [_bytes_of(each, first_id, last_id) for each in segments]
        share = max(SPLIT_BYTES, sum(sizes) // max(2, os.cpu_count() or 2))
        pieces: list[Piece] = []
        for segment, size in zip(segments, sizes, strict=True):
            first, last = max(first_id, segment.first_id), min(last_id, segment.last_id)
            count = -(-size // share)
            edges = [first + (last + 1 - first) * number // count for number in range(count)] + [last + 1]
            for start_id, stop_id in pairwise(edges):
                wanted = Wanted(start_id, stop_id)
                pieces.append(
                    Piece(
                        self._queue,
                        0,
                        segment.name,
                        segment.header,
                        segment.last_id if segment.closed else None,
                        True,  # ``through_id`` covers all items that were seen, so a missing footer is no damage
                        last,
                        wanted,
                        counts_within(counts, wanted),
                        PART_BYTES if count > 1 else size,
                        is_kept=True,
                    )
                )
        return pieces


def _bytes_of(segment: Segment, first_id: int, last_id: int) -> int:
    """Estimate how many bytes of a segment these ids take; at least 1."""
    some = min(last_id, segment.last_id) + 1 - max(first_id, segment.first_id)
    return max((segment.records_end - fmt.HEADER_BYTES) * some // max(segment.items, 1), 1)


class OpenedReader(NamedTuple):
    """A query's reader, its source, and the counter of the source's frames."""

    reader: Reader
    source: DetachedSource
    counter: RunCounter


def open_source(directory: str, queue: str, name: str, start: Start) -> OpenedReader:
    """Open a reader as ``open_reader`` does, and raise as it does. The checkpoint is on disk when this returns."""
    disk = RealDisk()
    folder = disk.directory(directory)
    source: DetachedSource | None = None
    try:
        refuse_jobs(folder, queue)
        registry = ReaderRegistry(QueueFiles(folder, queue, disk), {}, ReaderConfig(), _nothing)
        counter = RunCounter(folder)
        source = DetachedSource(folder, queue, SystemClock(), 0.05, registry, counter)
        registry.source = source
        return OpenedReader(registry.reader(name, start), source, counter)
    except BaseException:
        if source is None:
            folder.close()
        else:
            source.close()
        raise


def open_at(directory: str, queue: str, name: str, start: Start) -> OpenedReader:
    """As ``open_source``, but a new reader begins at ``start`` even if it is the first named reader of the queue.

    The first named reader takes over the default reader's position, unless the default reader is open. So this opens
    the default reader meanwhile. The default reader then keeps its position and its unread items for the next consumer.
    There is one exception: if ``start`` is not after the default reader's position, then the new reader sees all those
    items, and takes the position over. Otherwise items that nobody reads would be kept, and would fill the disk.
    """
    if _has_reader(directory, queue, name):
        return open_source(directory, queue, name, start)
    try:
        default, source, _ = open_source(directory, queue, "", "earliest")
    except (NoDefaultReader, QueueLocked):
        return open_source(directory, queue, name, start)
    try:
        begin_id = place_of(start, source.first_id, source.visible_id)
        if any(filter(None, source.files.readers(source.queue_id))) or begin_id > default.head + 1:
            return open_source(directory, queue, name, start)
    finally:
        default.close()
    opened = open_source(directory, queue, name, start)
    if opened.reader.head + 1 > begin_id:
        opened.reader.seek(begin_id)
        opened.reader.checkpoint(durable=True)
    return opened


def _has_reader(directory: str, queue: str, name: str) -> bool:
    folder = RealDisk().directory(directory)
    try:
        return name in file_names.readers_among(folder.names(), queue)
    finally:
        folder.close()


def place_of(start: Start, first_id: int, last_id: int) -> int:
    """The first id that a new reader gets, by the same rule as in the core."""
    if start == "tail":
        return last_id + 1
    return first_id if start == "earliest" else max(first_id, min(int(start), last_id + 1))


def _nothing() -> None:
    """The registry's callback for producers: a reader outside the writer's process has no producers to notify."""
