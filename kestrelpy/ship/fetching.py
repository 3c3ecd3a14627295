"""Fetching what was published in a store into the inbox of the folder: without I/O on the store.

As in ``log``, each function is a generator of requests; files of the folder are written between two of them. A part is
read as a whole, checked to its last byte, and written under a name of our own: nobody outside names a file here.
"""

from __future__ import annotations

from kestrelpy import _logging
from kestrelpy._disk.interface import Directory
from kestrelpy._journal.file_names import part_name
from kestrelpy.errors import CorruptJournal
from kestrelpy.inbox.format import BatchPart, Intent, PublishedBatch
from kestrelpy.inbox.ingest import write_stored
from kestrelpy.inbox.parts import PartFile, new_part_id
from kestrelpy.ship import in_objects
from kestrelpy.ship.errors import StoreDamaged
from kestrelpy.ship.in_objects import MOST_PART_BYTES
from kestrelpy.ship.log import Steps


def read_batch(prefix: str, number: int) -> Steps[PublishedBatch | None]:
    """The store's batch of that number; ``None`` if it is not published. Raises ``StoreDamaged``,
    ``UnsupportedFormat`` and ``StoreUnavailable``.
    """
    look = in_objects.read_of_batch(prefix, number)
    data: bytes | None = yield look
    return None if data is None else in_objects.decode_batch(look.key, number, data)


def fetch_part(prefix: str, part: BatchPart, folder: Directory, queue: str, now_ms: int) -> Steps[BatchPart]:
    """Fetch a part. Returns it as it is named here; its content is on disk, and its name not yet.

    Raises ``StoreDamaged`` if it is missing or is not as the batch says, ``StoreUnavailable``, ``OSError``.
    """
    look = in_objects.read_of_part(prefix, part.part_id)
    data: bytes | None = yield look
    if data is None:
        raise StoreDamaged(look.key, 0, "a published batch names it, and it is not there", 0)
    if len(data) > MOST_PART_BYTES:
        raise StoreDamaged(look.key, MOST_PART_BYTES, f"it has more than {MOST_PART_BYTES:,} bytes", 0)
    here = part._replace(part_id=new_part_id(now_ms))
    name = part_name(queue, here.part_id)
    file = folder.create(name)
    try:
        file.write(0, data)
        file.sync()
    finally:
        file.close()
    del data
    try:
        written = PartFile(folder, queue, here)
        try:
            written.largest()
        finally:
            written.close()
    except CorruptJournal as damage:
        folder.unlink(name)
        raise StoreDamaged(look.key, damage.offset, damage.reason, 0) from damage
    return here


def fetch_unfinished(prefix: str, queue: str, intent: Intent, folder: Directory, now_ms: int) -> Steps[bool]:
    """Make the files of a batch of the store that another owner has begun to take in, as ``intent`` says, under its
    number here. Returns whether they are all there; if not, that is logged. Raises ``StoreUnavailable``, ``OSError``.
    """
    try:
        batch = yield from read_batch(prefix, intent.stored)
        if batch is None or batch.batch_id != intent.batch_id:
            key = prefix + in_objects.batch_key(intent.stored)
            raise StoreDamaged(key, 0, "it is not the batch that was being taken in", 0)
        parts: tuple[BatchPart, ...] = ()
        for part in batch.parts:
            here = yield from fetch_part(prefix, part, folder, queue, now_ms)
            parts = (*parts, here)
    except StoreDamaged as damage:
        _logging.warning("batch %d of queue %s can't be finished: %s", intent.stored, queue, damage)
        return False
    write_stored(folder, queue, batch._replace(number=intent.number, parts=parts, stored=intent.stored))
    return True
