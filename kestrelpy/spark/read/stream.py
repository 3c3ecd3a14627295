"""The streaming read: a query is one named reader of a queue.

Rules:
1. Offsets are ids: an offset says up to which id the query has come, and in which queue.
2. An offset names only ids that are on disk. A power cut would give others to later items, and what Spark has noted as
   done would then hide those.
3. ``commit`` moves the reader's head, durably, to what the sink has and no further. So the writer keeps what a restart
   may ask for; it may retire the rest.
4. Only the process that plans the query opens the reader, at the first call that needs it. Spark makes more of these
   objects, to plan and to run tasks with: they lock nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from kestrelpy import _logging
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import file_names
from kestrelpy._journal import format as fmt
from kestrelpy._journal.purpose import refuse_jobs
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._journal.segment import Segment
from kestrelpy._reading.detached_source import DetachedSource
from kestrelpy._reading.reader import Reader
from kestrelpy._reading.registry import ReaderRegistry, Start
from kestrelpy.clock import SystemClock
from kestrelpy.config import ReaderConfig
from kestrelpy.errors import KestrelError, NoDefaultReader, QueueLocked
from kestrelpy.spark.read.batch import chosen, columns_of, folders_of, queues_of
from kestrelpy.spark.read.part import Piece, read_in_worker
from kestrelpy.spark.read.plan import PART_BYTES, parts_of
from kestrelpy.spark.read.pushdown import Wanted, check_names, truth, whole_number
from kestrelpy.spark.read.run_counter import RunCounter

OPTIONS = (
    "path",
    "queue",
    "reader",
    "startingPosition",
    "maxItemsPerTrigger",
    "maxBytesPerTrigger",
    "failOnDataLoss",
)
SPLIT_BYTES = 2 << 20
"""A stretch of a segment that is smaller is not worth another task."""
LOCK_PATIENCE = 10.0
"""Seconds that the reader is waited for: the process of a query that has ended may have it for a moment."""
Offset: TypeAlias = dict[str, Any]


class DataLoss(KestrelError):
    """Items ``first_id`` to ``last_id`` of ``queue`` are needed by a query and are not there any more."""

    def __init__(self, queue: str, first_id: int, last_id: int, reason: str) -> None:
        super().__init__(f"items {first_id} to {last_id} of queue {queue!r} are lost to this query: {reason}")
        self.queue = queue
        self.first_id = first_id
        self.last_id = last_id


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One streaming query's source, as Spark sees it."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._columns = columns_of(schema)
        check_names(options, OPTIONS, "streaming from kestrel")
        self._folders = folders_of(options)
        for name in ("queue", "reader"):
            if not options.get(name):
                raise ValueError(f"streaming from kestrel needs the option {name}")
        (self._queue,) = queues_of(self._folders, options["queue"])
        self._name = file_names.check_name(options["reader"])
        self._start = starting_position(options)
        self._takes_over = "startingPosition" not in options
        self._max_items = whole_number(options, "maxItemsPerTrigger", least=1)
        self._max_bytes = whole_number(options, "maxBytesPerTrigger", least=1)
        self._fails = truth(options, "failOnDataLoss", default=True)
        self._target: int | None = None
        self._reader: Reader | None = None
        self._source: DetachedSource
        self._counter: RunCounter

    # -- what Spark asks for -----------------------------------------------------------------------------------------

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name, as those below
        """Of a query without a checkpoint: where the reader is, or where ``startingPosition`` says if it is new; the
        first named reader of a queue takes over the default reader's place if that option is not there.
        """
        return self._offset(self._open(None).head)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._max_items is not None:
            return ReadMaxRows(self._max_items)
        return ReadMaxBytes(self._max_bytes) if self._max_bytes is not None else ReadAllAvailable()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """How far the next batch goes: items that are on disk when this returns."""
        tail_id = self._go_on(start)
        start_id = self._position(start, tail_id)
        last_id = tail_id if self._target is None else min(tail_id, self._target)
        if last_id <= start_id:
            return start if start_id == start["id"] else self._offset(start_id)
        last_id = self._limited(start_id + 1, last_id, limit)
        self._source.make_durable(last_id)
        return self._offset(last_id)

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        return None if self._reader is None else self._offset(self._source.visible_id)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """What there is now is all that this run reads."""
        self._open(None)
        self._target = self._source.visible_id

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """At least two tasks for what is worth it, and one for each large segment."""
        tail_id = self._go_on(start)
        start_id = self._position(start, tail_id)
        end_id = self._end(end, tail_id)
        if end_id <= start_id:
            return []
        return parts_of(self._folders, self._pieces(start_id + 1, end_id), PART_BYTES)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return chosen(read_in_worker(partition), self._columns)

    def commit(self, end: Offset) -> None:
        """The sink has everything up to ``end``: the writer may retire it. Again or of an older offset: harmless."""
        reader = self._open(end)
        if not self._is_other(end):
            last_id = min(int(end["id"]), self._source.visible_id)
            if last_id > reader.head:
                reader.seek(last_id + 1)
            reader.checkpoint(durable=True)

    def stop(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    # -- the reader --------------------------------------------------------------------------------------------------

    def _open(self, start: Offset | None) -> Reader:
        """The query's reader, opened at the first call. A new one begins behind ``start``, if that is known."""
        if self._reader is not None:
            return self._reader
        place: Start = self._start if start is None else int(start["id"]) + 1
        until = time.monotonic() + LOCK_PATIENCE
        while True:
            try:
                opens = open_source if start is not None or self._takes_over else open_at
                self._reader, self._source, self._counter = opens(self._folders[0], self._queue, self._name, place)
                break
            except QueueLocked as locked:
                if time.monotonic() > until:
                    holder = "another owner" if locked.pid is None else f"process {locked.pid}"
                    raise KestrelError(
                        f"reader {self._name!r} of queue {self._queue!r} is owned by {holder}: "
                        "a reader belongs to one query, give each a name of its own"
                    ) from None
                time.sleep(0.1)
        return self._reader

    def _go_on(self, start: Offset) -> int:
        """Look how far the writer is, and keep what is behind ``start``: a query that goes on from an older checkpoint
        of Spark's needs more than the reader has kept for it. Returns the last id there is.
        """
        reader, start_id = self._open(start), int(start["id"])
        tail_id = self._source.visible_id
        if start_id < reader.head and not self._is_other(start) and start_id + 1 >= self._source.first_id:
            reader.seek(start_id + 1)
            reader.checkpoint(durable=True)
        return tail_id

    def _offset(self, last_id: int) -> Offset:
        queue_id = self._source.queue_id
        return {"id": last_id, "queue": queue_id.hex() if any(queue_id) else ""}

    def _is_other(self, offset: Offset) -> bool:
        """Whether the offset is of another queue than the one that is here."""
        return bool(offset["queue"]) and offset["queue"] != self._offset(0)["queue"]

    # -- what is lost ------------------------------------------------------------------------------------------------

    def _position(self, start: Offset, tail_id: int) -> int:
        """The id behind which the query goes on: ``start``, unless items are lost and that is to be passed over."""
        start_id = int(start["id"])
        if self._is_other(start):
            self._lose(1, start_id, "another queue of that name is in their place")
            return self._source.first_id - 1
        if start_id > tail_id:
            self._lose(tail_id + 1, start_id, f"the journal ends with item {tail_id}")
            return tail_id
        first_id = self._source.first_id
        segments = self._source.view.segments
        if segments and start_id < segments[0].header.previous_last_id:
            self._lose(start_id + 1, first_id - 1, f"the journal begins with item {first_id}")
            return first_id - 1
        for before, segment in pairwise(segments):
            previous_id = segment.header.previous_last_id
            if max(before.last_id, start_id) < previous_id:
                self._lose(max(before.last_id, start_id) + 1, previous_id, "the segment that they are in is not there")
        return start_id

    def _end(self, end: Offset, tail_id: int) -> int:
        """The last id of a batch that was planned before, as far as it is there."""
        end_id = int(end["id"])
        if self._is_other(end):
            self._lose(1, end_id, "another queue of that name is in their place")
            return 0
        if end_id > tail_id:
            self._lose(tail_id + 1, end_id, f"the journal ends with item {tail_id}")
        return min(end_id, tail_id)

    def _lose(self, first_id: int, last_id: int, reason: str) -> None:
        loss = DataLoss(self._queue, first_id, last_id, reason)
        if self._fails:
            raise loss
        _logging.warning("%s", loss)

    # -- how much, and in which parts --------------------------------------------------------------------------------

    def _limited(self, first_id: int, last_id: int, limit: ReadLimit) -> int:
        """Where a batch ends that begins at ``first_id``. Spark hands one limit on; with two, both hold."""
        if isinstance(limit, ReadAllAvailable):
            return last_id
        max_items = limit.max_rows if isinstance(limit, ReadMaxRows) else self._max_items
        max_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._max_bytes
        if max_items is not None:
            last_id = min(last_id, first_id + max_items - 1)
        return (
            last_id
            if max_bytes is None
            else self._counter.reach(self._source.view.segments, first_id, last_id, max_bytes)
        )

    def _pieces(self, first_id: int, last_id: int) -> list[Piece]:
        files = self._source.files
        counts: dict[int, int] = {}
        for state in files.load_all(files.directory.names()):
            if state.queue_id == self._source.queue_id:
                for item_id, count in state.error_counts:
                    counts[item_id] = max(count, counts.get(item_id, 0))
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
                mine = tuple(each for each in sorted(counts.items()) if start_id <= each[0] < stop_id)
                pieces.append(
                    Piece(
                        self._queue,
                        0,
                        segment.name,
                        segment.header,
                        segment.last_id if segment.closed else None,
                        True,  # what is there was seen: a footer that is missing is not missed
                        last,
                        Wanted(start_id, stop_id),
                        mine,
                        PART_BYTES if count > 1 else size,
                        is_kept=True,
                    )
                )
        return pieces


def _bytes_of(segment: Segment, first_id: int, last_id: int) -> int:
    """About how many bytes of a segment these ids take; at least 1."""
    some = min(last_id, segment.last_id) + 1 - max(first_id, segment.first_id)
    return max((segment.records_end - fmt.HEADER_BYTES) * some // max(segment.items, 1), 1)


def starting_position(options: Mapping[str, str]) -> Start:
    """``earliest``, ``latest`` or an id; ``earliest`` if nothing is said. Raises ``ValueError``."""
    text = options.get("startingPosition", "earliest").lower()
    if text in ("earliest", "latest"):
        return "tail" if text == "latest" else text
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"option startingPosition must be earliest, latest or an item id, not {text!r}")
    return int(text)


class OpenedReader(NamedTuple):
    """A query's reader, the source that it reads from, and what counts frames there."""

    reader: Reader
    source: DetachedSource
    counter: RunCounter


def open_source(directory: str, queue: str, name: str, start: Start) -> OpenedReader:
    """As ``open_reader``. The reader's checkpoint is on disk when this returns. Raises as that."""
    folder = RealDisk().directory(directory)
    source: DetachedSource | None = None
    try:
        refuse_jobs(folder, queue)
        registry = ReaderRegistry(QueueFiles(folder, queue), {}, ReaderConfig(), _nothing)
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
    """As ``open_source``; but a place that is made begins at ``start`` also if it is the first named one.

    The first named reader takes the default reader's place over, unless somebody has that reader open: so it is open
    here meanwhile, and keeps its place and what it has not read, for who opens it next. Only where the new reader
    begins no further than the default one is, and so sees all of that, does it take the place over: items that are
    kept for nobody would fill the disk.
    """
    if _has_reader(directory, queue, name):
        return open_source(directory, queue, name, start)
    try:
        default, source, _ = open_source(directory, queue, "", "earliest")
    except (NoDefaultReader, QueueLocked):
        return open_source(directory, queue, name, start)
    try:
        begin_id = _place_of(start, source.first_id, source.visible_id)
        files = source.files
        others = [other for other in files.reader_names() if other and files.is_there(other, source.queue_id)]
        if others or begin_id > default.head + 1:
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


def _place_of(start: Start, first_id: int, last_id: int) -> int:
    """The id that a new reader begins with, as the core has it."""
    if start == "tail":
        return last_id + 1
    return first_id if start == "earliest" else max(first_id, min(int(start), last_id + 1))


def _nothing() -> None:
    """A reader from outside has no puts to consider."""
