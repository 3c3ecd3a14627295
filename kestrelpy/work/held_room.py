"""``HeldRoom``: deletes that found no room in the journal. Each is one slot of a file that has its room before the disk
is full.

The slots are in the file that marks the journal as a work queue's, from byte 128 on. A slot is there, as zeros, before
a job is put that may need it:

    +-----+-------+---+----+-------+
    | crc | cause | 0 | id | after |    after: the last record of the journal at that moment
    +-----+-------+---+----+-------+
       4      1     3   8      8        the crc is that of the bytes after it, begun with the queue's id

Rules:
1. A put gets room for the end of its job, or is refused. So there is a slot for each live job.
2. A slot says what a GONE record after record ``after`` would say. The journal is on disk up to record ``after`` before
   the slot is written. Otherwise a power cut could take records away, their ids would be given out again, and the slot
   would end another job.
3. When there is room again, GONE records say in the journal what the slots say. Once these are on disk, the slots are
   cleared. A slot that is left over by then says nothing new, and does no harm.

NOTE ON LOCKING: all but ``sync`` want the queue's lock.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterator
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from kestrelpy.work.records import LAST_CAUSE

if TYPE_CHECKING:
    from kestrelpy._disk.interface import File
    from kestrelpy.work.journal import JobJournal

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BEGIN = 128
"""Where the first slot begins; a line of text for people is before it."""
_SLOT = Struct("<IB3xQQ")
_CRC_BYTES = 4
_BLOCK = 4096
"""The file grows by at least so many bytes, or by an eighth of its size, if that is more."""
_MUCH_BYTES = 1 << 20
"""A file that is smaller than this is not cut."""


class Gone(NamedTuple):
    """A job that is gone after record ``after`` of the journal, and the cause."""

    job_id: int
    cause: int
    after: int


class HeldRoom:
    """The slots of one queue."""

    def __init__(self, queue: JobJournal) -> None:
        self._queue = queue
        self._slots = 0  # how many there are
        self.used = 0
        """How many slots were written; they are the first ones."""
        self._written = self._synced = 0  # counts of writes
        self._syncing = threading.Lock()
        self._failed: OSError | None = None  # of a sync: slots may be in the page cache alone

    @property
    def free(self) -> int:
        return self._slots - self.used

    def load(self) -> list[Gone]:
        """Read the slots, and hold their room from here on. Returns what they say, in the order of ``after``."""
        try:
            with self._opened() as file:
                size = file.size()
                data = file.read(_BEGIN, max(0, size - _BEGIN)).rstrip(b"\0")
        except FileNotFoundError:
            return []
        self._slots = max(0, size - _BEGIN) // _SLOT.size
        self.used = min(-(-len(data) // _SLOT.size), self._slots)
        whole = data.ljust(self.used * _SLOT.size, b"\0")
        slots = (self._decode(whole[at : at + _SLOT.size]) for at in range(0, len(whole), _SLOT.size))
        return sorted((gone for gone in slots if gone is not None), key=lambda gone: gone.after)

    def hold(self, count: int) -> None:
        """Have at least ``count`` free slots. Raises ``OSError``; the slots there are stay."""
        if self.free >= count:
            return
        needed = _BEGIN + (self.used + count) * _SLOT.size
        with self._opened(make=True) as file:
            size = file.size()
            wanted = max(needed, size + _BLOCK, size + size // 8)
            try:
                file.grow(-(-wanted // _BLOCK) * _BLOCK)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                file.grow(needed)
            finally:
                self._slots = max(0, file.size() - _BEGIN) // _SLOT.size

    def write(self, gone: Gone) -> None:
        """Write ``gone`` into the next free slot. Raises ``OSError``; then no slot says it."""
        if self._failed is not None:
            raise OSError(*self._failed.args)
        if not self.free:
            raise OSError(errno.ENOSPC, "no room was held for this delete")
        with self._opened() as file:
            file.write(_BEGIN + self.used * _SLOT.size, self._encode(gone))
        self.used += 1
        self._written += 1

    def void(self, job_id: int) -> None:
        """Clear the slot of a job that lives: the delete that wrote it was interrupted."""
        with self._opened() as file:
            self._clear_slots_of(job_id, file)

    def _clear_slots_of(self, job_id: int, file: File) -> None:
        for at in range(_BEGIN, min(_BEGIN + (self.used + 1) * _SLOT.size, file.size()), _SLOT.size):
            gone = self._decode(file.read(at, _SLOT.size))
            if gone is not None and gone.job_id == job_id:
                file.write(at, bytes(_SLOT.size))

    def clear(self, jobs: int) -> None:
        """Clear all slots: the journal has what they say. A large file is cut to room for twice as many ``jobs``."""
        keep = _BEGIN + 2 * jobs * _SLOT.size
        is_long = _BEGIN + self._slots * _SLOT.size > max(_MUCH_BYTES, 4 * keep)
        if not (self.used or is_long):
            return
        with self._opened() as file:
            if self.used:
                file.write(_BEGIN, bytes(self.used * _SLOT.size))
                self.used = 0
            if is_long:
                file.truncate(-(-keep // _BLOCK) * _BLOCK)
                self._slots = (file.size() - _BEGIN) // _SLOT.size

    @property
    def is_unsynced(self) -> bool:
        """Whether slots were written since the last sync, or that sync has failed."""
        return self._written != self._synced or self._failed is not None

    def sync(self) -> None:
        """All slots written so far are on disk when this returns. Without the queue's lock. Raises ``OSError``."""
        if not self.is_unsynced:
            return
        with self._syncing:
            if self._failed is not None:
                raise OSError(*self._failed.args)
            written = self._written
            if written == self._synced:
                return
            with self._opened() as file:
                try:
                    file.sync()
                except OSError as error:
                    self._failed = OSError(*error.args)
                    raise
            self._synced = written

    def abandon(self) -> None:
        """In a forked child: a new lock, as another thread may have held the old one in a sync."""
        self._syncing = threading.Lock()

    @contextlib.contextmanager
    def _opened(self, *, make: bool = False) -> Iterator[File]:
        file = self._queue.open_mark(make=make)
        try:
            yield file
        finally:
            file.close()

    def _encode(self, gone: Gone) -> bytes:
        rest = _SLOT.pack(0, gone.cause, gone.job_id, gone.after)[_CRC_BYTES:]
        return crc32(rest, crc32(self._queue.queue_id)).to_bytes(_CRC_BYTES, "little") + rest

    def _decode(self, data: bytes) -> Gone | None:
        """``None`` for a slot that says nothing."""
        if len(data) < _SLOT.size:
            return None
        crc, cause, job_id, after = _SLOT.unpack(data)
        if crc32(data[_CRC_BYTES:], crc32(self._queue.queue_id)) != crc or cause > LAST_CAUSE:
            return None
        return Gone(job_id, cause, after)
