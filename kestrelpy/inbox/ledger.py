"""The small files of an inbox: published batches, and what the owner of a queue remembers of them.

Rules:
1. What is remembered is appended, record by record, and synced; the first record that is not whole ends the file. It
   is replaced when it has grown, or is not known to be whole and on disk (R3).
2. What a dead process has left may be in the page cache alone: nothing is done on its word before it is written anew.
3. What is in memory changes after the file did.
"""

from __future__ import annotations

import errno

from kestrelpy import _logging
from kestrelpy._disk.interface import Directory
from kestrelpy._journal import file_names
from kestrelpy._journal.checkpoint import REPLACE_BYTES, write_temporary
from kestrelpy._journal.format import FORMAT_VERSION
from kestrelpy.errors import UnsupportedFormat
from kestrelpy.inbox.format import (
    BATCH_MAGIC,
    MEMORY_MAGIC,
    Intent,
    LedgerState,
    PublishedBatch,
    decode_batch_file,
    decode_memory,
    encode_done,
    encode_intent,
    encode_memory,
    file_version,
    whole_record_behind,
)

FOREIGN = (errno.EINVAL, errno.ELOOP, errno.EISDIR, errno.ENXIO)
"""What is not a regular file with one link: never to be read."""
MAX_FILE_BYTES = 32 << 20
"""No file of the inbox but a part is larger."""


def read_file(folder: Directory, name: str) -> bytes | None:
    """All of a small file, of a larger one nothing; ``None`` if it is not there. Raises ``OSError``."""
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
    """A published batch; ``None`` if the file is not there, or is none. Raises ``UnsupportedFormat``, ``OSError``."""
    data = read_file(folder, name)
    if data is None:
        return None
    version = file_version(data, BATCH_MAGIC)
    if version is not None and version > FORMAT_VERSION:
        raise UnsupportedFormat(f"{folder.path}/{name}", version, FORMAT_VERSION)
    return decode_batch_file(data)


def read_memory(folder: Directory, queue: str) -> tuple[LedgerState, int, bytes]:
    """What the queue remembers, where its last whole record ends, and the file. Raises ``UnsupportedFormat``."""
    name = file_names.ledger_name(queue)
    data = read_file(folder, name) or b""
    version = file_version(data, MEMORY_MAGIC)
    if version is not None and version > FORMAT_VERSION:
        raise UnsupportedFormat(f"{folder.path}/{name}", version, FORMAT_VERSION)
    return *decode_memory(data), data


class IngestLedger:
    """What the owner of a queue remembers of its inbox, in a file: records appended, and the whole file replaced when
    it has grown, or is not known to be whole and on disk.

    ``is_unsure``: the last save has raised, and may have been done all the same.
    """

    def __init__(self, folder: Directory, queue: str, now_ms: int) -> None:
        self._folder = folder
        self._name = file_names.ledger_name(queue)
        self._size = 0  # where the next record goes; 0: the next save replaces the file
        self._least = 0
        self.is_durable = False
        self.is_unsure = False
        self.state = LedgerState()
        try:
            self.state, end, data = read_memory(folder, queue)
            is_damaged = bool(data) and (not end or whole_record_behind(data, end))
        except OSError as error:
            if error.errno not in FOREIGN:
                raise
            is_damaged = True
        if is_damaged:
            aside = file_names.damaged_memory_name(queue, now_ms)
            _logging.warning("%s/%s is damaged and kept as %s: some is forgotten", folder.path, self._name, aside)
            folder.rename(self._name, aside)

    def begin(self, intent: Intent) -> None:
        """Remember, on disk, that this batch is being taken in. Raises ``OSError``."""
        if self.state.intent != intent or not self.is_durable:
            self._save(encode_intent(intent), intent)

    def finish(self, batch: PublishedBatch) -> None:
        """Remember, on disk, that it was taken in, all of it. Raises ``OSError``."""
        self._save(encode_done(batch.batch_id, batch.number, batch.app_id, batch.version), None, batch)

    def give_up(self) -> None:
        """Nothing of the batch with the intent is there: it has none any more, on disk. Raises ``OSError``."""
        self.is_durable = False
        self._save(b"", None)

    def settle(self) -> None:
        """What is remembered may be in the page cache alone, as a dead process has left it: see to it that it is not.
        Raises ``OSError``.
        """
        if not self.is_durable:
            self._save(b"", self.state.intent)

    def forget_cleared(self, numbers: set[int]) -> None:
        """Batches that were taken in and are not among those published any more, on disk, come back never again."""
        finished = self.state.finished
        self.state.finished = {key: number for key, number in finished.items() if number in numbers}

    def _save(self, record: bytes, intent: Intent | None, done: PublishedBatch | None = None) -> None:
        """Add ``record``, or write all anew, with ``intent``, and ``record`` if that is another one. What is in memory
        follows; where an interrupt falls in between, it is unsure.
        """
        at, self._size = self._size, 0
        if at and self.is_durable and at + len(record) <= max(REPLACE_BYTES, 4 * self._least):
            size = self._append(at, record)
        else:
            data = encode_memory(self.state, intent)
            size = self._replace(data if intent is not None else data + record)
        if done is not None:
            self.state.note_done(done.batch_id, done.number, done.app_id, done.version)
        self.state.intent = intent
        self._size, self.is_durable, self.is_unsure = size, True, False

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
            except OSError:  # it is not all there
                self.is_unsure = was_unsure
                raise
            file.sync()
        finally:
            file.close()
        return at + len(record)
