"""The batch read: segments of one queue, or of all queues of a folder or of a store, as a DataFrame.

Rules:
1. A read takes no lock and writes nothing. A writer may write, retire and archive meanwhile, and the folders may be on
   a network file system.
2. A query gets a prefix of the queue: every item that was there when the read was planned, and perhaps later items of
   the last segment. Spark plans once for each ``load()``.
3. The reader follows filters only if ``pushFilters`` is set. Spark (4.1 to 4.3) plans with the filters of one query,
   uses this plan for every other use of the same ``load()``, with other filters or without, and so shows too few rows.
4. A reader is pickled on its way to the executors. So it holds names of places, and nothing that is open.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from kestrelpy import _logging
from kestrelpy._disk.interface import Directory
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import file_names
from kestrelpy._journal.purpose import refuse_jobs_in
from kestrelpy.arrow.columns import SCHEMA
from kestrelpy.arrow.plan import pieces_of
from kestrelpy.arrow.wanted import Wanted
from kestrelpy.errors import WrongKind
from kestrelpy.inspection.summary import queue_names
from kestrelpy.ship.identity import IDENTITY_KEY
from kestrelpy.spark.locations import local_folder
from kestrelpy.spark.read.part import ReadPart, read_in_worker
from kestrelpy.spark.read.plan import PART_BYTES, parts_of
from kestrelpy.spark.read.pushdown import check_names, push, truth, wanted_by, whole_number
from kestrelpy.spark.read.store_plan import ShippedQueues
from kestrelpy.spark.stores import STORE_OPTIONS, store_of

RANGE_OPTIONS = ("path", "queue", "startId", "endId", "startTime", "endTime", "minPartitionBytes", "pushFilters")
OPTIONS = (*RANGE_OPTIONS, "archive")


class QueueFolders(NamedTuple):
    """A folder of queues, and perhaps an archive: what of it is read."""

    folders: tuple[str, ...]

    def queues(self, queue: str | None) -> list[str]:
        """Raises as ``queues_of``."""
        return queues_of(self.folders, queue)

    def parts(self, queues: Iterable[str], wanted: Wanted, part_bytes: int) -> Sequence[ReadPart]:
        """A part for each segment, or for a run of small ones. Raises as ``pieces_of``."""
        folders: list[Directory] = []
        try:
            folders += [RealDisk(allow_network=True).directory(path) for path in self.folders]
            pieces = [each for queue in queues for each in pieces_of(folders, queue, wanted)]
        finally:
            for folder in folders:
                folder.close()
        return parts_of(self.folders, pieces, part_bytes)


class BatchReader(DataSourceReader):
    """One batch read, as Spark plans it."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._columns = columns_of(schema)
        store = store_of(options)
        self._place: QueueFolders | ShippedQueues
        if store is None:
            check_names(options, OPTIONS, "reading kestrel")
            self._place = QueueFolders(folders_of(options))
        else:
            check_names(options, (*RANGE_OPTIONS, *STORE_OPTIONS), "reading kestrel from a store")
            self._place = ShippedQueues(store)
        self._wanted = wanted_by(options)
        self._part_bytes = whole_number(options, "minPartitionBytes", least=1) or PART_BYTES
        self._queues = self._place.queues(options.get("queue"))

    def partitions(self) -> Sequence[ReadPart]:
        """A part for each segment, or for a run of small ones. Raises as the ``parts`` of the place."""
        queues = [] if self._wanted.is_nothing else self._queues
        return self._place.parts(queues, self._wanted, self._part_bytes)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return chosen(read_in_worker(partition), self._columns)


class FilteringReader(BatchReader):
    """A ``BatchReader`` that follows filters, for a ``load()`` that is used with one condition only."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Accept ``=``, ``<``, ``<=``, ``>``, ``>=`` and ``IN`` on ``id``, ``added`` and ``queue``.

        The read applies the accepted filters exactly. Spark applies the others, which this returns.
        """
        self._wanted, conditions, rest = push(filters, self._wanted)
        self._queues = [queue for queue in self._queues if all(condition(queue) for condition in conditions)]
        return rest


def batch_reader(options: Mapping[str, str], schema: StructType) -> BatchReader:
    """The reader that the options ask for. Raises as the constructor of ``BatchReader``."""
    follows = truth(options, "pushFilters", default=False)
    return FilteringReader(options, schema) if follows else BatchReader(options, schema)


def columns_of(schema: StructType) -> list[str]:
    """The wanted columns: all, or those that ``schema()`` names. Raises ``ValueError`` for an unknown column."""
    there = SCHEMA.split(", ")
    wanted = [f"{field.name} {field.dataType.simpleString()}" for field in schema.fields]
    for column in wanted:
        if column not in there:
            raise ValueError(f"reading kestrel has the columns {SCHEMA}: schema() may name some of them, not {column}")
    return [field.name for field in schema.fields]


def chosen(batches: Iterator[pa.RecordBatch], columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Reduce batches that have all columns to ``columns``."""
    return (batch.select(columns) for batch in batches)


def folders_of(options: Mapping[str, str]) -> tuple[str, ...]:
    """The folder of queues, and the archive if the options name one. Raises ``ValueError``."""
    path = options.get("path")
    if not path:
        raise ValueError(
            "reading kestrel needs the folder of the queues: load(directory). "
            "(Spark 4.3 does not pass on the options of CREATE TABLE; use CREATE TEMPORARY VIEW)"
        )
    archive = options.get("archive")
    return tuple(local_folder(each) for each in (path, archive) if each)


def queues_of(folders: tuple[str, ...], queue: str | None) -> list[str]:
    """The queue that is asked for, or all queues in the folders except work queues. There is at least one queue.

    Raises ``FileNotFoundError``, ``LookupError``, ``InvalidName``, ``WrongKind``.
    """
    there: set[str] = set()
    for folder in folders:
        try:
            there.update(queue_names(folder, disk=RealDisk(allow_network=True)))
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(f"there is no folder {folder}") from None
    here = " or ".join(folders)
    if queue is None and not there:
        raise LookupError(
            f"{here} is neither a folder of queues (it has no file of one) nor a store (no */{IDENTITY_KEY})"
        )
    if queue is None:
        return sorted(name for name in there if not _is_left_out(folders, name))
    if file_names.check_name(queue) not in there:
        raise LookupError(
            f"there is no queue {queue!r} in {here}: neither its files, as in a folder of queues, "
            f"nor {queue}/{IDENTITY_KEY}, as in a store"
        )
    for folder in folders:
        refuse_jobs_in(folder, queue)
    return [queue]


def _is_left_out(folders: tuple[str, ...], queue: str) -> bool:
    """True for a work queue, which a read of all queues leaves out: its records are no items."""
    try:
        for folder in folders:
            refuse_jobs_in(folder, queue)
    except WrongKind as error:
        _logging.warning("left out: %s", error)
        return True
    return False
