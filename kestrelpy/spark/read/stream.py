"""The streaming read: a query is one named reader of a queue.

Rules:
1. An offset of Spark has an id and a queue: the query has read this queue up to this id.
2. An offset names only ids that are on disk. After a power cut, an id that was not on disk would go to a later item,
   and the query would skip that item, because Spark has noted its id as done.
3. Only the process that plans the query opens the reader, at the first call that needs it. Spark makes more of these
   objects, to plan and to run tasks with. They take no lock.
4. Where the items come from is the business of a ``Feed``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

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
from kestrelpy._journal import file_names
from kestrelpy._reading.registry import Start
from kestrelpy.errors import KestrelError
from kestrelpy.spark.read.batch import chosen, columns_of, folders_of, queues_of
from kestrelpy.spark.read.feed import Feed
from kestrelpy.spark.read.folder_feed import FolderFeed
from kestrelpy.spark.read.part import read_in_worker
from kestrelpy.spark.read.pushdown import check_names, truth, whole_number
from kestrelpy.spark.read.store_feed import StoreFeed
from kestrelpy.spark.stores import STORE_OPTIONS, StorePlace, store_of

OPTIONS = (
    "path",
    "queue",
    "reader",
    "startingPosition",
    "maxItemsPerTrigger",
    "maxBytesPerTrigger",
    "failOnDataLoss",
)
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
        store = store_of(options)
        if store is None:
            check_names(options, OPTIONS, "streaming from kestrel")
        else:
            check_names(options, (*OPTIONS, *STORE_OPTIONS, "holdsRetention"), "streaming from a store")
        for name in ("queue", "reader"):
            if not options.get(name):
                raise ValueError(f"streaming from kestrel needs the option {name}")
        self._queue = options["queue"]
        self._max_items = whole_number(options, "maxItemsPerTrigger", least=1)
        self._max_bytes = whole_number(options, "maxBytesPerTrigger", least=1)
        self._fails = truth(options, "failOnDataLoss", default=True)
        self._target: int | None = None
        self._feed: Feed = _folder_feed(options) if store is None else _store_feed(store, options)

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
        self._feed.make_durable(last_id)
        return self._offset(last_id)

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        return self._offset(self._feed.last_id) if self._feed.is_open else None

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Limit this run to the items that are there now."""
        self._target = self._open(None).look()

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """The tasks of a batch."""
        tail_id = self._go_on(start)
        start_id = self._position(start, tail_id)
        end_id = self._end(end, tail_id)
        if end_id <= start_id:
            return []
        return self._feed.parts(start_id + 1, end_id)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return chosen(read_in_worker(partition), self._columns)

    def commit(self, end: Offset) -> None:
        """Commit the reader up to ``end``, which the sink has: these items need not be kept.

        A repeated call, or a call with an older offset, does nothing.
        """
        feed = self._open(end)
        if not self._is_other(end):
            feed.commit(min(int(end["id"]), feed.last_id))

    def stop(self) -> None:
        self._feed.close()

    def _open(self, start: Offset | None) -> Feed:
        self._feed.open(None if start is None else int(start["id"]))
        return self._feed

    def _go_on(self, start: Offset) -> int:
        """Look for new items, and make the reader keep all items after ``start``. Returns the last id that is there.

        A query that resumes from an older checkpoint of Spark's needs items before the reader's head.
        """
        feed, start_id = self._open(start), int(start["id"])
        tail_id = feed.look()
        if not self._is_other(start) and start_id + 1 >= feed.first_id:
            feed.keep_after(start_id)
        return tail_id

    def _offset(self, last_id: int) -> Offset:
        queue_id = self._feed.queue_id
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
            return self._feed.first_id - 1
        if start_id > tail_id:
            self._lose(tail_id + 1, start_id, f"the journal ends with item {tail_id}")
            return tail_id
        losses = self._feed.losses(start_id)
        for loss in losses:
            self._lose(*loss)
        return max(start_id, self._feed.first_id - 1) if losses else start_id

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

    def _limited(self, first_id: int, last_id: int, limit: ReadLimit) -> int:
        """The last id of a batch that begins at ``first_id``. Spark passes one limit; if both are set, both hold."""
        if isinstance(limit, ReadAllAvailable):
            return last_id
        max_items = limit.max_rows if isinstance(limit, ReadMaxRows) else self._max_items
        max_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._max_bytes
        if max_items is not None:
            last_id = self._nth(first_id, last_id, max_items)
        return last_id if max_bytes is None else self._feed.reach(first_id, last_id, max_bytes)

    def _nth(self, first_id: int, last_id: int, count: int) -> int:
        """The id of the last one of ``count`` items from ``first_id`` on, at most ``last_id``. Ids may have gaps: after
        a takeover from a store, they go on far above.
        """
        for first, last in self._feed.spans():
            first = max(first, first_id)
            if count <= last + 1 - first:
                return min(last_id, first + count - 1)
            count -= max(last + 1 - first, 0)
        return last_id


def _folder_feed(options: Mapping[str, str]) -> FolderFeed:
    folders = folders_of(options)
    (queue,) = queues_of(folders, options["queue"])
    name = file_names.check_name(options["reader"])
    return FolderFeed(folders, queue, name, starting_position(options), takes_over="startingPosition" not in options)


def _store_feed(place: StorePlace, options: Mapping[str, str]) -> StoreFeed:
    queue, name = file_names.check_name(options["queue"]), file_names.check_name(options["reader"])
    holds = truth(options, "holdsRetention", default=True)
    return StoreFeed(place, queue, name, starting_position(options), holds=holds)


def starting_position(options: Mapping[str, str]) -> Start:
    """The option ``startingPosition``: ``earliest`` (the default), ``latest`` or an id. Raises ``ValueError``."""
    text = options.get("startingPosition", "earliest").lower()
    if text in ("earliest", "latest"):
        return "tail" if text == "latest" else text
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"option startingPosition must be earliest, latest or an item id, not {text!r}")
    return int(text)
