"""The inbox of a queue, checked to the last byte, and repaired.

Rules:
1. A batch that can't be ingested is no damage of the queue: its owner keeps it aside as a whole (``.refused``), and so
   does a repair. Parts that no batch names are nobody's yet, and are not looked at.
2. A batch of which some items are in the journal, and whose rest is damaged, was never seen by a reader. A repair takes
   those items out of the journal again: all of a batch is there, or nothing.
3. A damaged ledger is kept aside. The records before the damage count.
"""

from __future__ import annotations

import contextlib
import errno

from kestrelpy._disk.interface import NO_REGULAR_FILE, Directory, Disk
from kestrelpy._journal import file_names
from kestrelpy._journal.checkpoint import replace_file
from kestrelpy._journal.salvage import Salvage
from kestrelpy.errors import CorruptJournal, UnsupportedFormat
from kestrelpy.inbox.format import LedgerState, PublishedBatch, encode_ledger, whole_record_behind
from kestrelpy.inbox.ledger import read_batch, read_file, read_ledger
from kestrelpy.inbox.parts import PartFile, open_inbox
from kestrelpy.inspection.repair_report import RepairLoss
from kestrelpy.inspection.strange_files import WHY_NOT_READ

_NO_FILE = (errno.ENOENT, *NO_REGULAR_FILE)


def why_damaged(folder: Directory, queue: str, batch: PublishedBatch) -> str | None:
    """Why a batch can't be ingested; ``None`` if all of it is intact. Raises ``OSError``."""
    for part in batch.parts:
        try:
            file = PartFile(folder, queue, part)
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            return f"part {file_names.part_name(queue, part.part_id)} is missing, or is no file"
        try:
            file.largest()
        except CorruptJournal as damage:
            return str(damage)
        finally:
            file.close()
    return None


class InboxCheck:
    """One look at the inbox of one queue. ``damage``: what is wrong with a file: its name, the offset, the reason."""

    def __init__(self, folder: Directory, queue: str) -> None:
        self._folder = folder
        self._queue = queue
        self.damage: list[tuple[str, int, str]] = []
        self.batches = 0
        self.parts = 0
        self.refusals: list[tuple[int, str]] = []
        """The published batches that can't be ingested: number and name."""
        self.ledger = LedgerState()
        self.is_ledger_damaged = False
        self.is_ledger_strange = False
        """What has the ledger's name is never read (``strange_files``)."""
        self.half: str | None = None
        """Why the batch that is being ingested, and of which some items are in the journal, can't be finished."""

    def run(self, put_items: int, queue_id: bytes) -> None:
        """Check everything. ``put_items``: how many items were ever put into the journal, which is of ``queue_id``.

        Raises ``UnsupportedFormat`` for a ledger of a newer version, ``OSError``.
        """
        self._check_ledger()
        names = self._folder.names()
        for number, name in file_names.batches_among(names, self._queue):
            try:
                batch = read_batch(self._folder, name)
            except UnsupportedFormat:  # it waits for an owner that knows it
                continue
            except OSError as error:
                if error.errno not in NO_REGULAR_FILE:
                    raise
                batch = None
            self.batches += 1
            if batch is None or batch.number != number:
                self._refuse(number, name, "this is not a published batch")
                continue
            self.parts += len(batch.parts)
            if self.ledger.knows(batch):
                continue  # it is ingested, and its parts may be gone
            reason = why_damaged(self._folder, self._queue, batch)
            if reason is not None and not self._is_over(batch, name):
                self._refuse(number, name, reason)
        self._check_intent(put_items, queue_id)

    def _is_over(self, batch: PublishedBatch, name: str) -> bool:
        """Whether an owner has ingested the batch since: then its parts are gone before it is."""
        if self.is_ledger_strange:
            return False
        ledger, _, _ = read_ledger(self._folder, self._queue)
        return ledger.knows(batch) or name not in self._folder.names()

    def _refuse(self, number: int, name: str, reason: str) -> None:
        self.refusals.append((number, name))
        self.damage.append((name, 0, reason))

    def _check_ledger(self) -> None:
        name = file_names.ledger_name(self._queue)
        try:
            self.ledger, end, data = read_ledger(self._folder, self._queue)
        except OSError as error:
            if error.errno not in NO_REGULAR_FILE:
                raise
            self.is_ledger_damaged = self.is_ledger_strange = True
            self.damage.append((name, 0, WHY_NOT_READ))
            return
        if data and (not end or whole_record_behind(data, end)):
            self.is_ledger_damaged = True
            self.damage.append((name, end, "this record of the ledger is not intact"))

    def _check_intent(self, put_items: int, queue_id: bytes) -> None:
        intent = self.ledger.intent
        there = put_items - intent.base_items if intent is not None and intent.queue_id == queue_id else 0
        if intent is None or not 0 < there < intent.items:
            return
        name = file_names.batch_name(self._queue, intent.number)
        try:
            batch = read_batch(self._folder, name)
        except UnsupportedFormat:
            return
        if batch is None or batch.batch_id != intent.batch_id:
            objection: str | None = "the published batch is missing"
        else:
            objection = why_damaged(self._folder, self._queue, batch)
        ledger, _, _ = read_ledger(self._folder, self._queue)
        if objection is not None and ledger.intent == intent:
            self.half = f"{there} of its {intent.items} items are ingested, but {objection}"
            self.damage.append((name, 0, self.half))


def check_inbox(directory: str, queue: str, disk: Disk, put_items: int, queue_id: bytes) -> InboxCheck | None:
    """Check the inbox beside a queue; ``None`` if there is none. Raises as ``InboxCheck.run``."""
    try:
        folder = open_inbox(directory, disk, create=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        check = InboxCheck(folder, queue)
        check.run(put_items, queue_id)
        return check
    finally:
        folder.close()


class InboxRepair:
    """The part of one repair that is about the inbox. ``salvage``: of the journal, which may lose a batch by this."""

    def __init__(self, directory: str, queue: str, disk: Disk, salvage: Salvage) -> None:
        self._directory = directory
        self._queue = queue
        self._disk = disk
        self._salvage = salvage
        self._folder: Directory | None = None
        self._check: InboxCheck | None = None
        self._gives_up = False
        self._aside = ""
        self.losses: tuple[RepairLoss, ...] = ()
        self.refused: tuple[str, ...] = ()

    def look(self) -> None:
        """Look at the inbox. Raises ``UnsupportedFormat``, ``OSError``."""
        try:
            self._folder = folder = open_inbox(self._directory, self._disk, create=False)
        except (FileNotFoundError, NotADirectoryError):
            return
        self._check = check = InboxCheck(folder, self._queue)
        check.run(self._salvage.items, self._salvage.queue_id)
        intent = check.ledger.intent
        if check.half is not None and intent is not None:
            self._gives_up = True
            self._salvage.drop_from(intent.first_id, check.half)
        names = folder.names()
        number = 1
        while file_names.damaged_ledger_name(self._queue, number) in names:
            number += 1
        self._aside = file_names.damaged_ledger_name(self._queue, number)
        kept = {name: file_names.refused_name(self._queue, number) for number, name in check.refusals}
        kept[file_names.ledger_name(self._queue)] = self._aside
        self.losses = tuple(
            RepairLoss(
                f"{folder.path}/{name}", offset, 0, reason, kept=f"{folder.path}/{kept[name]}" if name in kept else ""
            )
            for name, offset, reason in check.damage
        )
        self.refused = tuple(name for _, name in check.refusals)

    def write(self) -> None:
        """Keep aside what is damaged. Each step is whole. Raises ``QueueLocked`` if somebody publishes, ``OSError``."""
        folder, check = self._folder, self._check
        if folder is None or check is None or not (check.damage or self._gives_up):
            return
        lock = folder.lock(file_names.lock_name(self._queue))
        try:
            self._write_ledger(folder, check)
            for number, name in check.refusals:
                with contextlib.suppress(FileNotFoundError):
                    folder.rename(name, file_names.refused_name(self._queue, number))
            folder.sync()
        finally:
            lock.release()

    def _write_ledger(self, folder: Directory, check: InboxCheck) -> None:
        """A damaged ledger is copied before it is replaced. One that has an intent in vain is replaced too."""
        name = file_names.ledger_name(self._queue)
        if check.is_ledger_strange:
            folder.rename(name, self._aside)
        elif check.is_ledger_damaged:
            replace_file(folder, self._aside, read_file(folder, name) or b"")
        if check.is_ledger_damaged or self._gives_up:
            intent = None if self._gives_up else check.ledger.intent
            replace_file(folder, name, encode_ledger(check.ledger, intent))

    def close(self) -> None:
        """Close the folder. May be repeated."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()
