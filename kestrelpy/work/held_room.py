"""Deletes that found no room in the journal: each is one slot of a file whose room is held before the disk is full.

The file is the one that says that the journal is a work queue's, from byte 128 on, and all its slots are there, as
zeros, before a job is put that may need one:

    +-----+-------+---+----+-------+
    | crc | cause | 0 | id | after |    after: the last record of the journal by then
    +-----+-------+---+----+-------+
       4      1     3   8      8        the crc is of what follows it, begun with the queue's id

Rules:
1. A put has the room for the end of its job, or is refused. So there is a slot for each job that lives.
2. A slot says what a GONE says, after record ``after``. The journal is on disk up to that before the slot is written: a
   power cut that takes records away would have their ids given out again, and the slot would end another job.
3. What a slot says is written into the journal when there is room. After that, and once the journal is on disk, the
   slots are cleared; one that is still there by then says nothing new, and does no harm.

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
"""Before the first slot is the line for people."""
_SLOT = Struct("<IB3xQQ")
_CRC_BYTES = 4
_BLOCK = 4096
"""The file grows by so much at least; by an eighth of itself, if that is more."""
_MUCH_BYTES = 1 << 20
"""Below this nothing is given back."""


class Gone(NamedTuple):
    """A job that is gone since record ``after`` of the journal, and why."""

    job_id: int
    cause: int
    after: int


class HeldRoom:
    """The slots of one queue."""

    def __init__(self, queue: JobJournal) -> None:
        self._queue = queue
        self._slots = 0  # how many there are
        self.used = 0
        """So many were written, from the first on."""
        self._written = self._synced = 0  # counts of writes
        self._syncing = threading.Lock()
        self._failed: OSError | None = None  # of a sync: what was written may be nowhere but in the cache

    @property
    def free(self) -> int:
        return self._slots - self.used

    def load(self) -> list[Gone]:
        """What the slots say, in its order; they are held from here on."""
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
        """Have so many slots free, at least. Raises ``OSError``, with those that there are."""
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
        """Raises ``OSError``, with nothing said."""
        if self._failed is not None:
            raise OSError(*self._failed.args)
        if not self.free:
            raise OSError(errno.ENOSPC, "no room was held for this delete")
        with self._opened() as file:
            file.write(_BEGIN + self.used * _SLOT.size, self._encode(gone))
        self.used += 1
        self._written += 1

    def void(self, job_id: int) -> None:
        """The job lives: what was written was interrupted."""
        with self._opened() as file:
            for at in range(_BEGIN, min(_BEGIN + (self.used + 1) * _SLOT.size, file.size()), _SLOT.size):
                gone = self._decode(file.read(at, _SLOT.size))
                if gone is not None and gone.job_id == job_id:
                    file.write(at, bytes(_SLOT.size))

    def clear(self, jobs: int) -> None:
        """What the slots say is in the journal. Of a lot of room, as much is kept as for twice so many ``jobs``."""
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

    def sync(self) -> None:
        """All that was written is on disk when this returns. Without the queue's lock. Raises ``OSError``."""
        if self._written == self._synced and self._failed is None:
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
        """In a forked child: another thread may have been in a sync."""
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
