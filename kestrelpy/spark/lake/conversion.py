"""The archive lake: archived segments as Parquet, partitioned by queue and day.

Rules:
1. A segment's rows are in one file for each day. The names of these files follow from the segment's identity: queue,
   number, the queue's random id, the segment's random marker. A second conversion, even at the same time, replaces each
   file by a file with the same rows. So a segment's rows are there at most once, whatever was killed.
2. When all files of a segment are on disk, a note is written: ``_kestrel/notes/IDENTITY.json``, with counts and
   digests. A segment with a note is converted, and is not converted again. A segment without a note may have some of
   its files there.
3. A segment is deleted only after the files that its note names were read back and have the counts and digests of the
   note. These files were made from items whose checksums were right.
4. A damaged segment gets no note, and is never deleted.

The names of the files are the commit; the runs share no list of files. So no run has to wait for another run or to
clean up after it, and an object store needs no rename. The price is one file for each segment and day. Spark reads many
small files in one task.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pyarrow as pa

from kestrelpy._journal import file_names
from kestrelpy.arrow.errors import FilesNotSeen
from kestrelpy.errors import CorruptJournal, KestrelError, UnsupportedFormat
from kestrelpy.spark.lake.archived import Archived, queue_of, segments_of
from kestrelpy.spark.lake.parquet import DayFile, read_back, to_day_files
from kestrelpy.spark.lake.store import FileStore
from kestrelpy.spark.locations import slots

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["LAKE_SCHEMA", "LakeSummary", "archive_to_parquet"]

LAKE_SCHEMA = (
    "id bigint, added timestamp, expires timestamp, error_count int, data binary, segment string, "
    "queue string, day date"
)
"""The schema for ``spark.read.schema(LAKE_SCHEMA).parquet(target)``. Without it Spark guesses the types of ``queue``
and ``day``, and a queue called ``007`` becomes a number.
"""
NOTES = "_kestrel/notes"
BESIDE = "_kestrel/tmp"
_TASKS = 4
"""Tasks for each of the session's slots."""
_RESULT = (
    "name string, outcome string, items bigint, data_bytes bigint, file_bytes bigint, "
    "offset bigint, item_id bigint, reason string, note string"
)


@dataclass(frozen=True)
class LakeSummary:
    """What one run did. ``segments``, ``items``, ``data_bytes``: what it converted.

    ``file_bytes``: the size of the new Parquet files. ``known``: segments that were converted before. ``deleted``:
    segments that were verified and deleted, whether converted by this run or before. ``damaged``: the skipped segments,
    as errors that name file, offset and reason.
    """

    segments: int = 0
    items: int = 0
    data_bytes: int = 0
    file_bytes: int = 0
    known: int = 0
    deleted: int = 0
    damaged: tuple[KestrelError, ...] = ()


class _Found(NamedTuple):
    """The result for one segment. ``outcome``: ``converted``, ``known``, ``damaged``, ``unsupported``, ``gone``."""

    name: str
    outcome: str
    items: int = 0
    data_bytes: int = 0
    file_bytes: int = 0
    offset: int = 0
    item_id: int | None = None
    reason: str = ""
    note: str = ""


def archive_to_parquet(
    spark: SparkSession,
    archive_dir: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    delete: bool = False,
    on_corruption: Literal["raise", "skip"] = "raise",
    archive_filesystem: Any = None,
    target_filesystem: Any = None,
) -> LakeSummary:
    """Convert the new segments of an archive to Parquet files ``target/queue=QUEUE/day=YYYY-MM-DD/*.parquet``.

    When this returns, every closed segment that was in the archive at the start is in ``target``, on disk, with each of
    its rows once. The same holds if a run was killed at any point and a later run returned. Segments that were
    converted before are not read again. The columns are those of ``LAKE_SCHEMA``. ``day`` is the day of ``added``, UTC.
    ``error_count`` is 0, because an archive has no error counts. Runs may overlap.

    ``archive_dir`` and ``target`` are paths or URIs (``file://``, ``s3://``, ``gs://``, ``hdfs://``) that all executors
    can reach, or paths on a ``pyarrow.fs.FileSystem``: ``archive_filesystem``, ``target_filesystem``. ``delete``:
    delete segments from the archive, new and known ones, after their rows were read back from ``target`` and have the
    counts and digests with which they were written. If a segment's files do not have them, the segment is first
    converted again. ``on_corruption="skip"`` reports damaged segments in the summary. Otherwise this raises the first
    one, after it has converted all other segments.

    Raises ``WrongKind`` for a folder with a work queue, ``CorruptJournal``, ``UnsupportedFormat``, ``ValueError``,
    ``OSError``: ``FileNotFoundError`` if there is no such archive, ``FilesNotSeen`` if executors see another archive or
    lake than the driver (then nothing is deleted). A failure in a task is raised as Spark raises it. Cost: each new
    segment is read once, by one task, which has the segment's Parquet files in memory.
    """
    if on_corruption not in ("raise", "skip"):
        raise ValueError(f"on_corruption must be 'raise' or 'skip', not {on_corruption!r}")
    archive, lake = FileStore(archive_dir, archive_filesystem), FileStore(target, target_filesystem, beside=BESIDE)
    names = segments_of(archive.names(), archive.name)
    lake.tidy(time.time())
    job = _Job(archive, lake, frozenset(lake.names(NOTES)), delete)
    found = _run(spark, job, names)
    _check_seen(archive, lake, found)
    deleted = sum(archive.delete(each.name) for each in found if delete and each.outcome in ("converted", "known"))
    converted = [each for each in found if each.outcome == "converted"]
    summary = LakeSummary(
        segments=len(converted),
        items=sum(each.items for each in converted),
        data_bytes=sum(each.data_bytes for each in converted),
        file_bytes=sum(each.file_bytes for each in converted),
        known=sum(each.outcome == "known" for each in found),
        deleted=deleted,
        damaged=tuple(_error(archive, each) for each in found if each.outcome in ("damaged", "unsupported")),
    )
    if summary.damaged and on_corruption == "raise":
        error = summary.damaged[0]
        for other in summary.damaged[1:]:
            error.add_note(f"and {other}")
        raise error
    return summary


def _run(spark: SparkSession, job: _Job, names: list[str]) -> list[_Found]:
    if not names:
        return []
    slices = min(len(names), _TASKS * slots(spark))
    numbers = spark.range(0, len(names), 1, slices)
    work: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]] = partial(_work, job, names)
    rows = numbers.mapInArrow(work, _RESULT).collect()
    return sorted(_Found(*row) for row in rows)


def _check_seen(archive: FileStore, lake: FileStore, found: list[_Found]) -> None:
    """Raise ``FilesNotSeen`` if a task worked on another archive or lake than the driver sees.

    Then a segment that the task did not find was not deleted, or a file that the task wrote is not there.
    """
    notes, there = set(lake.names(NOTES)), set(archive.names())
    for each in found:
        if each.outcome == "converted" and each.note not in notes:
            raise FilesNotSeen(lake.path(each.note), "a task has written this, and it is not there for the driver")
        if each.outcome == "gone" and each.name in there:
            raise FilesNotSeen(archive.path(each.name), "a task has not found this, and it is there for the driver")
        if each.outcome == "gone" and not any(note.startswith(_known_as(each.name)) for note in notes):
            raise FilesNotSeen(archive.path(each.name), "it is gone from the archive, and the lake does not have it")


def _known_as(name: str) -> str:
    """The start of the name of a segment's note, as far as it follows from the name of the segment's file."""
    queue = queue_of(name)
    assert queue is not None
    return f"{NOTES}/{queue}.{file_names.parse_segment(name, queue):013d}."


def _work(job: _Job, names: list[str], numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """One task: convert the segments with these numbers, which are indices into ``names``."""
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            row = job.found(names[number])._asdict()
            yield pa.RecordBatch.from_pylist([row], schema=_RESULT_SCHEMA)


_RESULT_SCHEMA = pa.schema(
    [
        (name, pa.string() if kind == "string" else pa.int64())
        for name, kind in (each.split() for each in _RESULT.split(", "))
    ]
)


class _Job(NamedTuple):
    """What every task gets: the archive, the lake, the notes that exist, and whether it must verify."""

    archive: FileStore
    lake: FileStore
    notes: frozenset[str]
    verifies: bool

    def found(self, name: str) -> _Found:
        """Convert the segment in this file, unless it is converted already. Raises ``OSError``."""
        path = f"{self.archive.name}/{name}"
        try:
            with self.archive.open(name) as file:
                return self._found(Archived(file, path, name), name)
        except FileNotFoundError:
            return _Found(name, "gone")  # converted and deleted meanwhile, by another run
        except CorruptJournal as error:
            return _Found(name, "damaged", offset=error.offset, item_id=error.item_id, reason=error.reason)
        except UnsupportedFormat as error:
            return _Found(name, "unsupported", offset=error.version, item_id=error.supported)

    def _found(self, segment: Archived, name: str) -> _Found:
        note = f"{NOTES}/{segment.identity}.json"
        known = note in self.notes
        if known and (not self.verifies or self._is_there(segment, self._days(note))):
            return _Found(name, "known")
        days, file_bytes = self._convert(segment, note)
        if self.verifies and not self._is_there(segment, days):
            raise OSError(f"the Parquet data of {name} in {self.lake.name} does not read back as it was written")
        items, data_bytes = sum(each.items for each in days), sum(each.data_bytes for each in days)
        return _Found(name, "converted", items, data_bytes, file_bytes, note=note)

    def _convert(self, segment: Archived, note: str) -> tuple[list[DayFile], int]:
        days, files, file_bytes = [], [], 0
        for day, content in to_day_files(segment.batches()):
            file = _file_name(segment, day.day)
            self.lake.put(file, content)
            days.append(day)
            files.append(file)
            file_bytes += content.size
        self.lake.sync(files)
        summary = {"segment": segment.identity, "days": [day._asdict() for day in days]}
        self.lake.put(note, json.dumps(summary, indent=1).encode())
        self.lake.sync([note])
        return days, file_bytes

    def _days(self, note: str) -> list[DayFile] | None:
        """The contents of a note; ``None`` if the note is not whole."""
        try:
            return [DayFile(**day) for day in json.loads(self.lake.read(note))["days"]]
        except (ValueError, KeyError, TypeError):
            return None

    def _is_there(self, segment: Archived, days: list[DayFile] | None) -> bool:
        """True if ``days`` has all rows of the segment, and the lake has these rows."""
        footer = segment.footer
        said = (footer.items, footer.data_bytes)
        if days is None or said != (sum(day.items for day in days), sum(day.data_bytes for day in days)):
            return False
        for day in days:
            try:
                with self.lake.open(_file_name(segment, day.day)) as file:
                    if read_back(file, day.day) != day:
                        return False
            except (FileNotFoundError, pa.ArrowException):
                return False
        return True


def _file_name(segment: Archived, day: str) -> str:
    return f"queue={segment.queue}/day={day}/{segment.identity}.parquet"


def _error(archive: FileStore, found: _Found) -> KestrelError:
    path = f"{archive.name}/{found.name}"
    if found.outcome == "unsupported":
        return UnsupportedFormat(path, found.offset, found.item_id or 0)
    return CorruptJournal(path, found.offset, found.reason, item_id=found.item_id)
