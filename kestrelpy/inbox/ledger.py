"""The small files of an inbox: published batches, and the ledger of the batches that a queue has ingested.

Rules:
1. Records are appended to the ledger one by one, and synced. The first record that is not whole ends the file. The file
   is replaced when it has grown, or when it is not known to be whole and on disk (R3).
2. A file of a dead process may be in the page cache only. So the owner writes it again before relying on it.
3. The state in memory changes after the file has changed.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from kestrelpy import _logging
from kestrelpy._disk.interface import Directory
from kestrelpy._journal import file_names
from kestrelpy._journal.checkpoint import REPLACE_BYTES, write_temporary
from kestrelpy._journal.format import FORMAT_VERSION
from kestrelpy.errors import UnsupportedFormat
from kestrelpy.inbox.format import (
    BATCH_MAGIC,
    LEDGER_MAGIC,
    Intent,
    LedgerState,
    PublishedBatch,
    decode_batch_file,
    decode_ledger,
    encode_done,
    encode_intent,
    encode_ledger,
    file_version,
    whole_record_behind,
)

FOREIGN = (errno.EINVAL, errno.ELOOP, errno.EISDIR, errno.ENXIO)
"""Opening a file that is not a regular file with one link fails with one of these. Such a file is never read."""
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
    if version is not None and version > FORMAT_VERSION:
        raise UnsupportedFormat(f"{folder.path}/{name}", version, FORMAT_VERSION)
    return decode_batch_file(data)


def read_ledger(folder: Directory, queue: str) -> tuple[LedgerState, int, bytes]:
    """Read the ledger: its state, where its last whole record ends, and its bytes. Raises ``UnsupportedFormat``."""
    name = file_names.ledger_name(queue)
    data = read_file(folder, name) or b""
    version = file_version(data, LEDGER_MAGIC)
    if version is not None and version > FORMAT_VERSION:
        raise UnsupportedFormat(f"{folder.path}/{name}", version, FORMAT_VERSION)
    return *decode_ledger(data), data


class IngestLedger:
    """The ledger of one queue, as its owner keeps it: which batches were ingested, and which one is being ingested.
    ``changed`` is called with the state when another one is on disk.

    ``is_durable``: this process has written the file, so it is known to be on disk. ``is_unsure``: the last save raised
    an error, and may have been done all the same.
    """

    def __init__(
        self, folder: Directory, queue: str, now_ms: int, changed: Callable[[LedgerState], object] = bool
    ) -> None:
        self._folder = folder
        self._name = file_names.ledger_name(queue)
        self._changed = changed
        self._size = 0  # where the next record goes; 0: the next save replaces the file
        self._least = 0
        self.is_durable = False
        self.is_unsure = False
        self.state = LedgerState()
        try:
            self.state, end, data = read_ledger(folder, queue)
            is_damaged = bool(data) and (not end or whole_record_behind(data, end))
        except OSError as error:
            if error.errno not in FOREIGN:
                raise
            is_damaged = True
        if is_damaged:
            aside = file_names.damaged_ledger_name(queue, now_ms)
            _logging.warning("%s/%s is damaged and kept as %s: batches are forgotten", folder.path, self._name, aside)
            folder.rename(self._name, aside)

    def begin(self, intent: Intent) -> None:
        """Record durably that this batch is being ingested. Raises ``OSError``."""
        if self.state.intent != intent or not self.is_durable:
            self._save(encode_intent(intent), intent)

    def finish(self, batch: PublishedBatch) -> None:
        """Record durably that the whole batch was ingested. Raises ``OSError``."""
        self._save(encode_done(batch.batch_id, batch.number, batch.app_id, batch.version), None, batch)

    def give_up(self) -> None:
        """Remove the intent durably, as no item of its batch is in the journal. Raises ``OSError``."""
        self.is_durable = False
        self._save(b"", None)

    def make_durable(self) -> None:
        """Make the ledger durable if a dead process wrote it, which may have left it in the page cache only.

        Raises ``OSError``.
        """
        if not self.is_durable:
            self._save(b"", self.state.intent)

    def forget_cleared(self, numbers: set[int]) -> None:
        """Forget ingested batches whose files are gone durably. ``numbers``: those of the batches still published."""
        finished = self.state.finished
        self.state.finished = {key: number for key, number in finished.items() if number in numbers}

    def _save(self, record: bytes, intent: Intent | None, done: PublishedBatch | None = None) -> None:
        """Append ``record``, or replace the file by the whole state, ``intent`` and ``record``. Then change the state.

        After an interrupt between the two, ``is_unsure`` is true.
        """
        at, self._size = self._size, 0
        if at and self.is_durable and at + len(record) <= max(REPLACE_BYTES, 4 * self._least):
            size = self._append(at, record)
        else:
            data = encode_ledger(self.state, intent)
            size = self._replace(data if intent is not None else data + record)
        if done is not None:
            self.state.note_done(done.batch_id, done.number, done.app_id, done.version)
        self.state.intent = intent
        self._size, self.is_durable, self.is_unsure = size, True, False
        self._changed(self.state)

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
