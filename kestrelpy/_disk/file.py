"""One file of the operating system: ``RealFile``, which ``RealDirectory`` opens.

Rules:
1. ``grow`` reserves real blocks, so that a full disk is an error there and never a SIGBUS in a mapped store. On a file
   system where a store does not go to the blocks that are there (rule 4 of ``real``), nothing is mapped.
2. Reads use ``pread``, never a mapping: so a bad sector raises an exception.
3. Calls that Linux has and another system may not have (macOS: ``posix_fallocate``, ``fdatasync``, ``posix_fadvise``,
   ``mmap.resize``) are looked up where they are used. Without one there is another way, or only time is lost.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kestrelpy._disk.interface import Buffer

PAGES_BYTES = 64 << 10
"""A write of so many bytes or more is started to the disk at once, ..."""

HURRY_BYTES = 1 << 20
"""... so many bytes at a time: with fewer, the disk gets more requests; with more, the sync has more left to do."""

_ZEROS = bytes(128 << 10)
"""What new room is filled with, by one write after another. Linux keeps what one write brings in large pages (folios),
and a store into a mapped one makes all of it be written by the next sync. Measured on Linux 6.18, ext4: after 8 kB of
items a sync takes half of what it takes with writes of a megabyte (129 and 217 microseconds); a store takes the same,
and an item of ``put_many`` 0.194 microseconds instead of 0.173.
"""


class _PlainBuffer:
    """Stores by ``pwrite``, for file systems that refuse a mapping."""

    def __init__(self, file: RealFile) -> None:
        self._file = file

    def __setitem__(self, span: slice, data: bytes) -> None:
        self._file.write(span.start, data)


class RealFile:
    """A file of the operating system. Its mapping, if it has one, holds a second descriptor of it."""

    def __init__(self, descriptor: int, *, mapped: bool = True) -> None:
        self._descriptor = descriptor
        self._left = weakref.finalize(self, os.close, descriptor)
        """If nobody closes the file, nothing is saved (R31), but the descriptor is closed, and with it the room of a
        deleted file is freed. Not by ``__del__``: an interrupt that falls there is lost.
        """
        self._left.atexit = False
        self._mapped = mapped
        self._map: mmap.mmap | None = None
        self._hurried = 0  # the bytes up to here are on their way to the disk

    def read(self, offset: int, size: int) -> bytes:
        data = os.pread(self._descriptor, size, offset)
        if len(data) == size or not data:
            return data
        parts = [data]
        while data and (missing := size - sum(map(len, parts))):
            data = os.pread(self._descriptor, missing, offset + size - missing)
            parts.append(data)
        return b"".join(parts)

    def write(self, offset: int, *parts: bytes) -> None:
        self._write(offset, parts)
        size = sum(map(len, parts))
        if size >= PAGES_BYTES:
            self._hurry(offset + size)

    def _write(self, offset: int, parts: Sequence[bytes]) -> None:
        size = sum(map(len, parts))
        try:
            written = os.pwritev(self._descriptor, parts, offset)
        except AttributeError:
            written = 0
        if written < size:
            rest = memoryview(b"".join(parts))
            while written < size:
                written += os.pwrite(self._descriptor, rest[written:], offset + written)

    def _hurry(self, end: int) -> None:
        """Start writing what was written up to ``end`` to the disk, without waiting: a sync finds less to do.

        This advice does not drop pages that are not on disk: it has them written out. As always, the next sync gets
        their errors.
        """
        end -= end % mmap.PAGESIZE
        if end - self._hurried >= HURRY_BYTES:
            with contextlib.suppress(OSError, AttributeError):
                os.posix_fadvise(self._descriptor, self._hurried, end - self._hurried, os.POSIX_FADV_DONTNEED)
            self._hurried = end

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def grow(self, size: int, *, fill: bool = True) -> Buffer:
        """Zeros are written, and not only reserved: a page in the cache costs a store a third of what a page fault
        costs (measured: 0.09 against 0.19 microseconds for 132 bytes, all included)."""
        old = self.size()
        try:
            if not self._reserve(old, size) or fill:
                for start in range(old, size, len(_ZEROS)):
                    self._write(start, [_ZEROS[: size - start]])
            return self._mapping(size)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, old)
            raise

    def _reserve(self, old: int, size: int) -> bool:
        """Reserve blocks. False if this file system can't do it: then only the bytes that are written have room."""
        if not _can_reserve():
            return False
        try:
            os.posix_fallocate(self._descriptor, old, size - old)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            return False
        return True

    def _mapping(self, size: int) -> Buffer:
        if not self._mapped or not _can_reserve():  # without a reservation, a store into a mapping may find no room
            return _PlainBuffer(self)
        try:
            if self._map is None or not _resized(self._map, size):
                # The old mapping stays open while its user has it: an interrupt may keep the user from the new one.
                self._map = mmap.mmap(self._descriptor, size)
        except OSError as error:
            if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENFILE):
                raise
            self._mapped = False
            return _PlainBuffer(self)
        return self._map

    def truncate(self, size: int) -> None:
        if self._map is not None:  # a mapping must never reach past the end of its file
            self._map.close()
            self._map = None
        os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        if self._descriptor < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))  # as all other calls; fdatasync(-1) is a ValueError
        try:
            os.fdatasync(self._descriptor)
        except AttributeError:
            sync_whole(self._descriptor)

    def forget(self) -> None:
        """Where the system does not know this advice, the next read may use the cache (docs/guarantees.md)."""
        with contextlib.suppress(AttributeError):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._descriptor >= 0:
            self._left.detach()
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


def _can_reserve() -> bool:
    return hasattr(os, "posix_fallocate")


def _resized(mapping: mmap.mmap, size: int) -> bool:
    """Resize a mapping; false if this system can't."""
    try:
        mapping.resize(size)
    except (SystemError, AttributeError):  # without mremap: the one up to CPython 3.14, the other later
        return False
    return True


def sync_names(descriptor: int) -> None:
    """Return when the names in an open folder are on disk."""
    if hasattr(os, "fdatasync"):
        os.fsync(descriptor)
    else:
        sync_whole(descriptor)


def sync_whole(descriptor: int) -> None:
    """A sync for systems without ``fdatasync``. On macOS, ``fsync`` leaves data in the drive's own cache;
    ``F_FULLFSYNC`` does not, where the file system supports it.
    """
    import fcntl  # here and not above: few systems need it

    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        try:
            fcntl.fcntl(descriptor, full)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY):
                raise
    os.fsync(descriptor)
