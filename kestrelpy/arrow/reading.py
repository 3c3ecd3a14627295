"""One read of a queue as Arrow record batches, without Spark.

Rules:
1. A read takes no lock and writes nothing. A writer may write, retire and archive meanwhile, and the folders may be on
   a network file system.
2. What is wrong with the arguments is said at once. No segment is opened before the first batch is asked for: then the
   read is planned, and it has a prefix of the queue, every item that was there by then, and perhaps later items of the
   last segment.
3. At any time, one block of one segment is in memory, and the batch that is made of it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from kestrelpy._disk.interface import Directory, Disk, StrPath
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import file_names
from kestrelpy._journal.purpose import JOBS, refuse_jobs
from kestrelpy.arrow.bounds import Instant, wanted_of
from kestrelpy.arrow.columns import COLUMNS, schema_of
from kestrelpy.arrow.pieces import PieceReader
from kestrelpy.arrow.plan import pieces_of
from kestrelpy.arrow.wanted import Wanted
from kestrelpy.errors import WrongKind

if TYPE_CHECKING:
    from kestrelpy.ship.store import Store

_MOST_NAMED = 5


class Chosen(NamedTuple):
    """What of a queue is read: which items, and which of their columns."""

    queue: str
    wanted: Wanted
    names: tuple[str, ...]


def open_read(
    directory: StrPath | Store,
    queue: str,
    *,
    archive: StrPath | None,
    start_id: int | None,
    end_id: int | None,
    start_time: Instant | None,
    end_time: Instant | None,
    columns: Sequence[str] | None,
    disk: Disk | None,
) -> pa.RecordBatchReader:
    """As ``kestrelpy.arrow.read``."""
    file_names.check_name(queue)
    chosen = Chosen(queue, wanted_of(start_id, end_id, start_time, end_time), names_of(columns))
    if isinstance(directory, str | os.PathLike) and "://" not in os.fspath(directory):
        folders = tuple(os.fspath(each) for each in (directory, archive) if each is not None)
        used = disk or RealDisk(allow_network=True)
        _require(used, folders, queue)
        batches = _from_folders(used, folders, chosen)
    else:
        if archive is not None:
            raise ValueError("'archive' goes with a folder of queues: a store has all segments that it keeps")
        batches = _from_store(directory, chosen)
    schema = schema_of(chosen.names)
    return pa.RecordBatchReader.from_batches(schema, _at_least_one(batches, schema))


def _at_least_one(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The batches, or one without rows: ``polars.from_arrow`` takes the schema from the first batch."""
    batch = None
    for batch in batches:
        yield batch
    if batch is None:
        yield pa.RecordBatch.from_pylist([], schema)


def names_of(columns: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the columns that are wanted: all, or ``columns``. Raises ``ValueError``, ``TypeError``."""
    if columns is None:
        return COLUMNS
    if isinstance(columns, str):
        raise TypeError(f"'columns' must be a sequence of names, such as [{columns!r}], not one name")
    names = tuple(columns)
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise ValueError(f"there is no column {', '.join(map(repr, unknown))}; the columns are {', '.join(COLUMNS)}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"'columns' must name each column once, and at least one, not {list(names)}")
    return names


def _require(disk: Disk, folders: tuple[str, ...], queue: str) -> None:
    """Raise unless one of the folders has files of the queue, and it is no work queue. Lists each folder once.

    Raises ``FileNotFoundError``, ``WrongKind``, ``RestoreIncomplete``, ``OSError``.
    """
    there: set[str] = set()
    for path in folders:
        try:
            folder = disk.directory(path)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(errno.ENOENT, "there is no such folder", path) from None
        try:
            names = folder.names()
            refuse_jobs(folder, queue, names)
            if path == folders[0]:
                file_names.refuse_unrestored(names, queue, folder.path)
        finally:
            folder.close()
        owners = (file_names.parse_owner(name) for name in names)
        there.update(owner[0] for owner in owners if owner is not None and not owner[1])
    if queue not in there:
        some = sorted(there)
        has = f"it has {', '.join(some[:_MOST_NAMED])}{' ...' if len(some) > _MOST_NAMED else ''}" if some else ""
        reason = f"there is no queue {queue!r}; {has or 'it has no queues'}"
        raise FileNotFoundError(errno.ENOENT, reason, " or ".join(folders))


def _from_folders(disk: Disk, folders: tuple[str, ...], chosen: Chosen) -> Iterator[pa.RecordBatch]:
    if chosen.wanted.is_nothing:
        return
    opened: list[Directory] = []
    try:
        opened.extend(disk.directory(path) for path in folders)
        pieces = pieces_of(opened, chosen.queue, chosen.wanted)
    finally:
        for folder in opened:
            folder.close()
    yield from PieceReader(folders, tuple(pieces), disk=disk, names=chosen.names).batches()


def _from_store(place: StrPath | Store, chosen: Chosen) -> Iterator[pa.RecordBatch]:
    """The store is opened at once; nothing is asked of it before the first batch. Raises ``BadStoreURL``."""
    from kestrelpy.ship.opening import open_store

    return _of_store(open_store(os.fspath(place) if isinstance(place, os.PathLike) else place), chosen)


def _of_store(store: Store, chosen: Chosen) -> Iterator[pa.RecordBatch]:
    from kestrelpy.arrow.object_plan import pieces_of_log
    from kestrelpy.arrow.objects import read_objects
    from kestrelpy.ship.reading import ShippedQueue

    if chosen.wanted.is_nothing:
        return
    shipped = ShippedQueue(store, chosen.queue)
    state = shipped.at_end()
    if shipped.of_jobs:
        raise WrongKind(f"{store.describe()}/{chosen.queue}", JOBS)
    yield from read_objects(store, pieces_of_log(chosen.queue, state, chosen.wanted), names=chosen.names)
