"""The streaming read: a query is one named reader of a queue.

Rules:
1. An offset of Spark has an id and a queue: the query has read this queue up to this id.
2. An offset names only ids that are on disk. After a power cut, an id that was not on disk would go to a later item,
   and the query would skip that item, because Spark has noted its id as done.
3. ``commit`` moves the reader's head, durably, to the last item that the sink has, and no further. So the writer keeps
   all items that a restart may need, and may retire the rest.
4. Only the process that plans the query opens the reader, at the first call that needs it. Spark makes more of these
   objects, to plan and to run tasks with. They take no lock.
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
"""A smaller part of a segment, in bytes, is not worth another task."""
LOCK_PATIENCE = 10.0
"""Seconds to wait for the reader's lock: the process of a query that has just ended may hold it a little longer."""
Offset: TypeAlias = dict[str, Any]


class DataLoss(KestrelError):
    """A query needs the items ``first_id`` to ``last_id`` of ``queue``, and they are not there any more."""

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
        """The first offset of a query without a checkpoint: the reader's position.

        A new reader begins at ``startingPosition``. Without that option, the first named reader of a queue takes over
        the default reader's position.
        """
        return self._offset(self._open(None).head)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._max_items is not None:
            return ReadMaxRows(self._max_items)
        return ReadMaxBytes(self._max_bytes) if self._max_bytes is not None else ReadAllAvailable()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """The end of the next batch. All its items are on disk when this returns."""
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
        """Limit this run to the items that are there now."""
        self._open(None)
        self._target = self._source.visible_id

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """The tasks of a batch: at least two if the batch is large enough, and at least one for each large segment."""
        tail_id = self._go_on(start)
        start_id = self._position(start, tail_id)
        end_id = self._end(end, tail_id)
        if end_id <= start_id:
            return []
        return parts_of(self._folders, self._pieces(start_id + 1, end_id), PART_BYTES)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return chosen(read_in_worker(partition), self._columns)

    def commit(self, end: Offset) -> None:
        """Commit the reader up to ``end``, which the sink has: the writer may retire these items.

        A repeated call, or a call with an older offset, does nothing.
        """
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
        """The query's reader, opened at the first call. A new reader begins after ``start``, if that is given."""
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
                        "a reader belongs to one query; set the option reader to another name"
                    ) from None
                time.sleep(0.1)
        return self._reader

    def _go_on(self, start: Offset) -> int:
        """Look for new items, and make the reader keep all items after ``start``. Returns the last id that is there.

        A query that resumes from an older checkpoint of Spark's needs items before the reader's head.
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
        """True if the offset belongs to another queue than the one that is here now."""
        return bool(offset["queue"]) and offset["queue"] != self._offset(0)["queue"]

    # -- lost items --------------------------------------------------------------------------------------------------

    def _position(self, start: Offset, tail_id: int) -> int:
        """The id after which the query continues: ``start``, or a later id if items are lost and may be skipped.

        Raises ``DataLoss`` if items are lost and ``failOnDataLoss`` is true.
        """
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
        """The last id of a batch that was planned earlier, or the last id of it that is still there."""
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
        """The last id of a batch that begins at ``first_id``. Spark passes one limit; if both are set, both hold."""
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
                        True,  # ``through_id`` covers all items that were seen, so a missing footer is no damage
                        last,
                        Wanted(start_id, stop_id),
                        mine,
                        PART_BYTES if count > 1 else size,
                        is_kept=True,
                    )
                )
        return pieces


def _bytes_of(segment: Segment, first_id: int, last_id: int) -> int:
    """Estimate how many bytes of a segment these ids take; at least 1."""
    some = min(last_id, segment.last_id) + 1 - max(first_id, segment.first_id)
    return max((segment.records_end - fmt.HEADER_BYTES) * some // max(segment.items, 1), 1)


def starting_position(options: Mapping[str, str]) -> Start:
    """The option ``startingPosition``: ``earliest`` (the default), ``latest`` or an id. Raises ``ValueError``."""
    text = options.get("startingPosition", "earliest").lower()
    if text in ("earliest", "latest"):
        return "tail" if text == "latest" else text
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"option startingPosition must be earliest, latest or an item id, not {text!r}")
    return int(text)


class OpenedReader(NamedTuple):
    """A query's reader, its source, and the counter of the source's frames."""

    reader: Reader
    source: DetachedSource
    counter: RunCounter


def open_source(directory: str, queue: str, name: str, start: Start) -> OpenedReader:
    """Open a reader as ``open_reader`` does, and raise as it does. The checkpoint is on disk when this returns."""
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
        begin_id = _place_of(start, source.first_id, source.visible_id)
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


def _place_of(start: Start, first_id: int, last_id: int) -> int:
    """The first id that a new reader gets, by the same rule as in the core."""
    if start == "tail":
        return last_id + 1
    return first_id if start == "earliest" else max(first_id, min(int(start), last_id + 1))


def _nothing() -> None:
    """The registry's callback for producers: a reader outside the writer's process has no producers to notify."""
