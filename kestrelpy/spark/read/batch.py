"""The batch read: segments of one queue or of all queues of a folder as a DataFrame.

Rules:
1. A read takes no lock and writes nothing. A writer may write, retire and archive meanwhile, and the folders may be on
   a network file system.
2. A query gets a prefix of the queue: every item that was there when the read was planned, and perhaps later items of
   the last segment. Spark plans once for each ``load()``.
3. The reader follows filters only if ``pushFilters`` is set. Spark (4.1 to 4.3) plans with the filters of one query,
   uses this plan for every other use of the same ``load()``, with other filters or without, and so shows too few rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from kestrelpy import _logging
from kestrelpy._disk.interface import Directory
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import file_names
from kestrelpy._journal.purpose import refuse_jobs_in
from kestrelpy.errors import WrongKind
from kestrelpy.inspection.summary import queue_names
from kestrelpy.spark.locations import local_folder
from kestrelpy.spark.read.columns import SCHEMA
from kestrelpy.spark.read.part import SegmentPart, read_in_worker
from kestrelpy.spark.read.plan import PART_BYTES, parts_of, pieces_of
from kestrelpy.spark.read.pushdown import check_names, push, truth, wanted_by, whole_number

OPTIONS = ("path", "queue", "archive", "startId", "endId", "startTime", "endTime", "minPartitionBytes", "pushFilters")


class BatchReader(DataSourceReader):
    """One batch read, as Spark plans it."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._columns = columns_of(schema)
        check_names(options, OPTIONS, "reading kestrel")
        self._folders = folders_of(options)
        self._wanted = wanted_by(options)
        self._part_bytes = whole_number(options, "minPartitionBytes", least=1) or PART_BYTES
        self._queues = queues_of(self._folders, options.get("queue"))

    def partitions(self) -> list[SegmentPart]:
        """A part for each segment, or for a run of small ones. Raises as ``pieces_of``."""
        folders: list[Directory] = []
        try:
            folders += [RealDisk(allow_network=True).directory(path) for path in self._folders]
            nothing = self._wanted.is_nothing
            pieces = (
                [] if nothing else [each for queue in self._queues for each in pieces_of(folders, queue, self._wanted)]
            )
        finally:
            for folder in folders:
                folder.close()
        return parts_of(self._folders, pieces, self._part_bytes)

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
    """The queue that is asked for, or all queues in the folders except work queues.

    Raises ``FileNotFoundError``, ``LookupError``, ``InvalidName``, ``WrongKind``.
    """
    there: set[str] = set()
    for folder in folders:
        try:
            there.update(queue_names(folder, disk=RealDisk(allow_network=True)))
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(f"there is no folder {folder}") from None
    if queue is None:
        return sorted(name for name in there if not _is_left_out(folders, name))
    if file_names.check_name(queue) not in there:
        raise LookupError(f"there is no queue {queue!r} in {' or '.join(folders)}")
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
