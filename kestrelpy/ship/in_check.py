"""The check of a queue's inbox in its store, each byte: part of ``remote_check``.

Rules:
1. Of the batches that the log has not taken, none may be missing: the owner takes them in the order of their numbers.
2. Each batch that is there is whole, and so are the parts that it names: also of one that was taken, as a restore to an
   earlier moment takes it again. One that the owner has refused is over.
3. A part that no batch names is nobody's yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kestrelpy._disk.memory import MemoryDisk
from kestrelpy._journal.file_names import part_name
from kestrelpy.errors import CorruptJournal
from kestrelpy.inbox.format import BatchPart, PublishedBatch
from kestrelpy.inbox.parts import PartFile
from kestrelpy.ship import in_objects
from kestrelpy.ship.errors import StoreDamaged
from kestrelpy.ship.slots import ShippedLedger


class InboxObjects:
    """The inbox of one queue in a store. ``read`` reads an object by its key, below the queue."""

    def __init__(self, queue: str, prefix: str, read: Callable[[str], bytes | None]) -> None:
        self._queue = queue
        self._prefix = prefix
        self._read = read
        self.batches = self.parts = 0
        """How many were read."""

    def check(self, keys: Iterable[str], ledger: ShippedLedger | None) -> Iterator[StoreDamaged]:
        """Yield what is wrong. ``keys``: those that are there, below the queue. Raises ``UnsupportedFormat``."""
        numbers = sorted(number for key in keys if (number := in_objects.parse_batch_key(key)))
        taken = ledger.taken if ledger is not None else 0
        marks = ledger.state().marks if ledger is not None else {}
        due = taken + 1
        for number in numbers:
            if number in marks and marks[number].refused:
                continue
            if number > due:
                yield self._damage(in_objects.batch_key(due), "it is not there, and later ones are")
            due = max(due, number + 1)
            yield from self._check_batch(number)

    def _damage(self, key: str, reason: str, offset: int = 0) -> StoreDamaged:
        return StoreDamaged(self._prefix + key, offset, reason, 0)

    def _check_batch(self, number: int) -> Iterator[StoreDamaged]:
        key = in_objects.batch_key(number)
        data = self._read(key)
        if data is None:
            return  # the owner has taken it, and has deleted it since
        self.batches += 1
        try:
            batch: PublishedBatch = in_objects.decode_batch(self._prefix + key, number, data)
        except StoreDamaged as damage:
            yield damage
            return
        for part in batch.parts:
            reason = self._why_damaged(part)
            if reason is not None:
                yield reason

    def _why_damaged(self, part: BatchPart) -> StoreDamaged | None:
        key = in_objects.part_key(part.part_id)
        data = self._read(key)
        if data is None:
            return self._damage(key, "it is not there, and a batch names it")
        self.parts += 1
        if len(data) > in_objects.MOST_PART_BYTES:
            return self._damage(key, "no part is as large as this")
        folder = MemoryDisk().directory("/in", create=True)
        folder.create(part_name(self._queue, part.part_id)).write(0, data)
        file = PartFile(folder, self._queue, part)
        try:
            file.largest()
        except CorruptJournal as damage:
            return self._damage(key, damage.reason, damage.offset)
        finally:
            file.close()
        return None
