"""Queues as Arrow record batches, for pandas, polars, duckdb and what else reads Arrow.

``read`` needs the extra ``[arrow]`` (pyarrow and numpy), and no Spark. docs/arrow.md is the guide.
"""

# ``plan`` finds the segments, ``bounds`` and ``wanted`` say which items, and ``seek`` finds the bytes of
# a segment that hold them. ``pieces`` reads segments, ``decode`` turns their bytes into items, and ``columns`` into
# Arrow columns. ``object_plan`` and ``objects`` do so for a queue in a store. ``kestrelpy.spark`` reads with them, too.

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kestrelpy.arrow.errors import FilesNotSeen

if TYPE_CHECKING:
    import pyarrow

    from kestrelpy._disk.interface import Disk, StrPath
    from kestrelpy.arrow.bounds import Instant
    from kestrelpy.ship.store import Store

__all__ = ["FilesNotSeen", "read"]


def read(
    directory: StrPath | Store,
    queue: str,
    *,
    archive: StrPath | None = None,
    start_id: int | None = None,
    end_id: int | None = None,
    start_time: Instant | None = None,
    end_time: Instant | None = None,
    columns: Sequence[str] | None = None,
    disk: Disk | None = None,
) -> pyarrow.RecordBatchReader:
    """The items in the live and archived segments of a queue, in the order of ids, as a stream of record batches.

    ``directory``: the folder of the queue, or the URL of a store that it is shipped to (``s3://bucket/prefix``,
    ``file:///folder`` and so on, as in ``kestrelpy.ship.open_store``), or a ``Store``. ``archive``: the folder of
    archived segments. ``start_id`` and ``start_time`` are inclusive, ``end_id`` and ``end_time`` exclusive. A time is
    when an item was put: an aware ``datetime``, or milliseconds since 1970. ``columns``: the columns that are wanted,
    in this order, of ``queue``, ``id``, ``added``, ``expires``, ``error_count``, ``data`` and ``segment``; all, if it
    is not given. Columns that are not wanted take no time. ``disk``: for tests, as in ``scan``.

    Takes no lock and writes nothing: a writer may be at work. The arguments are checked, and the folders listed, at
    once. Nothing is read before the first batch. Then the read is planned: it has every item that was there by then,
    whether it was read, has expired, or not, and perhaps later ones. What was published and is not ingested yet is not
    there. A segment that is retired meanwhile has no rows, but only if the folder proves that it was retired. A batch
    has at most 65,536 rows and about 16 MiB of data, unless one item has more: so memory is bounded, whatever the size
    of the queue. The checksum of each record is checked.

    Raises ``ImportError`` without the extra, ``InvalidName``, ``ValueError``, ``TypeError``, ``FileNotFoundError`` if
    there is no such folder or queue, ``WrongKind`` for a work queue, ``RestoreIncomplete``, ``BadStoreURL``,
    ``OSError``. The batches raise ``CorruptJournal`` (path and offset) after the rows before the damage,
    ``FilesNotSeen`` if a segment is gone and was not retired, ``UnsupportedFormat``, ``OSError``, ``ValueError`` for an
    item of 2 GiB, and for a store ``NoSuchQueue``, ``StoreUnavailable``, ``StoreDamaged``, ``WrongKind``.
    """
    try:
        from kestrelpy.arrow.reading import open_read
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("numpy", "pyarrow"):
            raise
        raise ImportError("this needs the extra [arrow]: pip install 'kestrelpy[arrow]'", name=error.name) from None
    return open_read(
        directory,
        queue,
        archive=archive,
        start_id=start_id,
        end_id=end_id,
        start_time=start_time,
        end_time=end_time,
        columns=columns,
        disk=disk,
    )
