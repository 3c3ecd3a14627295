"""The small files of an inbox: published batches, and the ledger of the batches that a queue has ingested.

Rules:
1. Records are appended to the ledger one by one, and synced. The first record that is not whole ends the file. The file
   is replaced when it has grown, or when it is not known to be whole and on disk (R3).
2. A file of a dead process may be in the page cache only. So the owner writes it again before relying on it.
3. The state in memory changes after the file has changed.
4. A copy of the queue that ends with some item has the ledger as of that item (``changed``): an intent no later than
   the first item of its batch, and "ingested" no earlier than the last one. That must be so after a restart, too. So
   what the copy has not reached stays in the file as single records, and is told again, one after another.
"""

from __future__ import annotations

from typing import Protocol

from kestrelpy import _logging
from kestrelpy._disk.interface import NO_REGULAR_FILE, Directory
from kestrelpy._journal import file_names
from kestrelpy._journal.checkpoint import REPLACE_BYTES, write_temporary
from kestrelpy.errors import UnsupportedFormat
from kestrelpy.inbox.format import (
    BATCH_MAGIC,
    LEDGER_MAGIC,
    STORE_VERSION,
    Intent,
    LedgerState,
    PublishedBatch,
    StoreMark,
    decode_batch_file,
    decode_ledger,
    encode_done,
    encode_intent,
    encode_ledger,
    encode_mark,
    encode_taken,
    file_version,
    ledger_records,
    needs_store_version,
    whole_record_behind,
)

MAX_FILE_BYTES = 32 << 20
"""No file of the inbox is larger than this, except a part."""


def read_file(folder: Directory, name: str) -> bytes | None:
    """The content of a file, ``None`` if it does not exist. A file that is too large is not read: the result is not
    valid in any format then. Raises ``OSError``.
    """
    try:
        file = folder.open(name)
    except FileNotFoundError:
        return None
    try:
        size = file.size()
        return file.read(0, size) if size <= MAX_FILE_BYTES else b"too large"
    finally:
        file.close()


def read_batch(folder: Directory, name: str) -> PublishedBatch | None:
    """Read a published batch; ``None`` if the file does not exist or is not valid.

    Raises ``UnsupportedFormat``, ``OSError``.
    """
    data = read_file(folder, name)
    if data is None:
        return None
    version = file_version(data, BATCH_MAGIC)
    if version is not None and version > STORE_VERSION:
        raise UnsupportedFormat(f"{folder.path}/{name}", version, STORE_VERSION)
    return decode_batch_file(data)


def read_ledger(folder: Directory, queue: str) -> tuple[LedgerState, int, bytes]:
    """Read the ledger: its state, where its last whole record ends, and its bytes. Raises ``UnsupportedFormat``."""
    name = file_names.ledger_name(queue)
    data = read_file(folder, name) or b""
    version = file_version(data, LEDGER_MAGIC)
    if version is not None and version > STORE_VERSION:
        raise UnsupportedFormat(f"{folder.path}/{name}", version, STORE_VERSION)
    return *decode_ledger(data), data


class Copied(Protocol):
    """What a ledger needs to know of the queue, and of a copy of it. Items are counted from the first one ever."""

    def items(self) -> int:
        """How many items were ever put."""

    def copied_items(self) -> int | None:
        """How many of them are in the copy; ``None`` if nobody copies the queue."""

    def note_ledger(self, state: LedgerState, from_items: int) -> None:
        """A copy with so many items or more has this state, and none with fewer. It is on disk, unless an earlier owner
        wrote it. ``state`` may change.
        """


class IngestLedger:
    """The ledger of one queue, as its owner keeps it: which batches were ingested, and which one is being ingested.

    ``is_durable``: this process has written the file, so it is known to be on disk. ``is_unsure``: the last save raised
    an error, and may have been done all the same.
    """

    def __init__(self, folder: Directory, queue: str, now_ms: int, copied: Copied) -> None:
        self._folder = folder
        self._name = file_names.ledger_name(queue)
        self._copied = copied
        self._size = 0  # where the next record goes; 0: the next save replaces the file
        self._is_for_store = False  # the file is of the version that has records of a store
        self._least = 0
        self._base = LedgerState()
        self._later: list[tuple[int, bytes]] = []
        """The records after ``_base``, which the copy has not reached: each with the items from which on it counts."""
        self.is_durable = False
        self.is_unsure = False
        self.state = LedgerState()
        try:
            self.state, end, data = read_ledger(folder, queue)
            is_damaged = bool(data) and (not end or whole_record_behind(data, end))
        except OSError as error:
            if error.errno not in NO_REGULAR_FILE:
                raise
            is_damaged = True
            data = b""
        if is_damaged:
            aside = file_names.damaged_ledger_name(queue, now_ms)
            _logging.warning("%s/%s is damaged and kept as %s: batches are forgotten", folder.path, self._name, aside)
            folder.rename(self._name, aside)
        self._load(data)

    def _load(self, data: bytes) -> None:
        """Tell the copy which states it has to have, from which item on."""
        state, items = LedgerState(), self._copied.items()
        from_items = ends = 0
        for record in ledger_records(data, state):
            if state.intent is not None:  # this record, by which it begins
                batch = state.intent
                from_items, ends = batch.base_items + min(batch.items, 1), batch.base_items + batch.items
            else:
                from_items = min(max(from_items, ends), items)  # an earlier queue may have had more items
            self._later.append((min(from_items, items + 1), record))
        self._base = self._folded(self._later)
        self.state = self._base.copy()
        self._copied.note_ledger(self.state, 0)
        for from_items, record in self._later:
            self.state.apply(record)
            self._copied.note_ledger(self.state, from_items)

    def _folded(self, later: list[tuple[int, bytes]]) -> LedgerState:
        """The base with those records that the copy has reached; they are removed from ``later``."""
        base, items = self._base.copy(), self._copied.copied_items()
        while later and (items is None or later[0][0] <= items):
            base.apply(later.pop(0)[1])
        return base

    def begin(self, intent: Intent) -> None:
        """Record durably that this batch is being ingested. Raises ``OSError``."""
        if self.state.intent != intent:
            self._save(encode_intent(intent), intent.base_items + min(intent.items, 1))
        elif not self.is_durable:
            self._save(b"", 0)

    def finish(self, batch: PublishedBatch, now_ms: int) -> None:
        """Record durably that the whole batch was ingested. Raises ``OSError``."""
        done = batch.batch_id, batch.number, batch.app_id, batch.version
        intent = self.state.intent
        from_items = self._copied.items() if intent is None else intent.base_items + intent.items
        self._save(encode_taken(batch, now_ms) if batch.stored else encode_done(*done), from_items)

    def pass_over(self, stored: int, mark: StoreMark | None) -> None:
        """Record durably that nothing is left to do for the store's batch of that number: it was refused, as ``mark``
        says, or known before. No ingest is unfinished. Raises ``OSError``.
        """
        self._save(encode_mark(stored, mark), self._copied.items())

    def raise_taken(self, taken: int) -> None:
        """The log has a higher number than this file, which was damaged, or whose disk has lost it."""
        if taken > self.state.taken:
            _logging.warning("%s/%s is behind the store, which has batch %d", self._folder.path, self._name, taken)
            self._base.taken = self.state.taken = taken
            self.is_durable = False

    def give_up(self) -> None:
        """Remove the intent durably, as no item of its batch is in the journal. Raises ``OSError``."""
        self.is_durable = False
        if self._later:
            self._later.pop()  # an intent is the last record
        else:
            self._base.intent = None
        self.state.intent = None
        self._save(b"", 0)

    def make_durable(self) -> None:
        """Make the ledger durable if a dead process wrote it, which may have left it in the page cache only.

        Raises ``OSError``.
        """
        if not self.is_durable:
            self._save(b"", 0)

    def forget_cleared(self, numbers: set[int]) -> None:
        """Forget ingested batches whose files are gone durably. ``numbers``: those of the batches still published."""
        for state in (self.state, self._base):
            finished = state.finished
            state.finished = {key: number for key, number in finished.items() if number in numbers}

    def forget_marks(self, before_ms: int) -> None:
        """Forget the batches of a store that were taken before that time."""
        for state in (self.state, self._base):
            state.forget_marks(before_ms)

    def _save(self, record: bytes, from_items: int) -> None:
        """Append ``record``, if it is not empty, or replace the file by all there is. Then change the state. A copy of
        the queue has the new one from ``from_items`` on.

        After an interrupt between the two, ``is_unsure`` is true.
        """
        at, self._size = self._size, 0
        after = self.state.copy()
        later = [*self._later, (from_items, record)] if record else self._later.copy()
        if record:
            after.apply(record)
        is_for_store = needs_store_version(after, after.intent)
        is_of_version = self._is_for_store or not is_for_store
        if at and self.is_durable and is_of_version and at + len(record) <= max(REPLACE_BYTES, 4 * self._least):
            size = self._append(at, record)
            self._later = later
        else:
            base = self._folded(later)
            base.finished = {key: number for key, number in base.finished.items() if key in after.finished}
            data = encode_ledger(base, base.intent, from_store=is_for_store)
            size = self._replace(data + b"".join(each for _, each in later))
            self._is_for_store, self._base, self._later = is_for_store, base, later
        self.state = after
        self._size, self.is_durable, self.is_unsure = size, True, False
        self._copied.note_ledger(after, from_items or self._copied.items())

    def _replace(self, data: bytes) -> int:
        temporary = write_temporary(self._folder, self._name, data)
        self.is_unsure = True
        self._folder.rename(temporary, self._name)
        self._folder.sync()
        self._least = len(data)
        return len(data)

    def _append(self, at: int, record: bytes) -> int:
        was_unsure = self.is_unsure
        file = self._folder.open(self._name, write=True)
        try:
            self.is_unsure = True
            try:
                file.write(at, record)
            except OSError:  # the record is not whole, so it does not count
                self.is_unsure = was_unsure
                raise
            file.sync()
        finally:
            file.close()
        return at + len(record)
