"""A disk that wraps another disk, and fails on demand.

Rules:
1. Operations are counted from 1, in the order of their calls. Operations that cannot fail are not counted: closing, the
   size of an open file, the release of a lock, and a store into a mapping, whose room ``grow`` has reserved.
2. A failed operation leaves everything as it was, with two exceptions, as on a real disk. A write may have stored a
   part of its bytes. A sync has marked the dirty pages as clean; a ``CrashingDisk`` inside simulates that.

NOTE ON LOCKING: ``FailingDisk._lock`` guards the counters and is never held during an operation.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Collection
from typing import Protocol, runtime_checkable

from kestrelpy._disk.interface import Buffer, Directory, Disk, File, FileStatus, Lock

OPERATIONS = frozenset(
    {
        *("directory", "names", "open", "create", "rename", "link", "move", "unlink", "sync_directory", "lock"),
        *("read", "write", "store", "grow", "truncate", "sync", "forget"),
    }
)
"""The kinds of operations that are counted; ``store`` only with ``mapped=False``."""


@runtime_checkable
class _FailsSync(Protocol):
    """A file or a directory that can simulate a failed sync."""

    def fail_sync(self) -> None: ...


class FailingDisk:
    """Passes operations on to ``inner``, and makes single operations fail after ``arm()``.

    Count the operations in a run without a fault, and then repeat the run with each of them failing. With
    ``mapped=False``, stores into buffers count and fail too, as on a file system that refuses mappings.
    """

    def __init__(self, inner: Disk, *, mapped: bool = True) -> None:
        self.inner = inner
        self.mapped = mapped
        self.counts: Counter[str] = Counter()
        """The number of operations by kind, with failed ones."""
        self.failures = 0
        """The number of operations that were made to fail."""
        self._lock = threading.Lock()
        self._error = 0  # guarded by self._lock, as all below; 0: not armed
        self._left = 0
        self._sticky = False
        self._kinds: Collection[str] = OPERATIONS
        self._short_bytes = 0

    @property
    def operations(self) -> int:
        """The number of all operations so far."""
        return self.counts.total()

    def arm(
        self,
        error: int,
        *,
        at: int = 1,
        sticky: bool = False,
        kinds: Collection[str] = OPERATIONS,
        short_bytes: int = 0,
    ) -> None:
        """Make an operation fail with ``OSError(error)``: the ``at``-th from now on whose kind is in ``kinds``.

        ``sticky``: all later operations of these kinds fail too, until ``disarm()``. ``short_bytes``: a failing write
        first stores so many bytes; a negative number means all bytes but so many. Replaces an earlier ``arm()``. Raises
        ``ValueError`` for an unknown kind.
        """
        if at < 1 or not error:
            raise ValueError(f"'at' counts from 1 and 'error' is an errno, not {at} and {error}")
        if unknown := set(kinds) - OPERATIONS:
            raise ValueError(f"'kinds' has unknown operations: {', '.join(sorted(unknown))}")
        with self._lock:
            self._error = error
            self._left = at
            self._sticky = sticky
            self._kinds = frozenset(kinds)
            self._short_bytes = short_bytes

    def disarm(self) -> None:
        """Let every call succeed again."""
        with self._lock:
            self._error = 0

    @property
    def armed(self) -> bool:
        """True if a later operation will fail."""
        return self._error != 0

    def directory(self, path: str, *, create: bool = False) -> FailingDirectory:
        """Open a folder of the inner disk: its calls fail as this disk says."""
        self.attempt("directory", path)
        return FailingDirectory(self, self.inner.directory(path, create=create))

    def due(self, kind: str, path: str = "") -> OSError | None:
        """Count an operation. Returns the error with which it must fail, or ``None``."""
        with self._lock:
            self.counts[kind] += 1
            if not self._error or kind not in self._kinds:
                return None
            self._left -= 1
            if self._left > 0:
                return None
            error = self._error
            if not self._sticky:
                self._error = 0
            self.failures += 1
        return OSError(error, os.strerror(error), path) if path else OSError(error, os.strerror(error))

    def attempt(self, kind: str, path: str = "") -> None:
        """Count an operation that has no effect if it fails. Raises the error if it must fail."""
        error = self.due(kind, path)
        if error is not None:
            raise error

    def attempt_sync(self, kind: str, target: object, path: str = "") -> None:
        """As ``attempt``, for a sync of ``target``."""
        error = self.due(kind, path)
        if error is not None:
            if isinstance(target, _FailsSync):
                target.fail_sync()
            raise error

    def written_part(self, size: int) -> int:
        """The number of bytes that a failing write of ``size`` bytes stores. It is less than ``size``."""
        part = self._short_bytes if self._short_bytes >= 0 else size + self._short_bytes
        return max(0, min(part, size - 1))


class FailingFile:
    """A file of a ``FailingDisk``."""

    def __init__(self, disk: FailingDisk, inner: File) -> None:
        self._disk = disk
        self._inner = inner

    def read(self, offset: int, size: int) -> bytes:
        self._disk.attempt("read")
        return self._inner.read(offset, size)

    def write(self, offset: int, *parts: bytes) -> None:
        error = self._disk.due("write")
        if error is None:
            self._inner.write(offset, *parts)
            return
        data = b"".join(parts)
        if part := self._disk.written_part(len(data)):
            self._inner.write(offset, data[:part])
        raise error

    def size(self) -> int:
        return self._inner.size()

    def grow(self, size: int, *, fill: bool = True) -> Buffer:
        self._disk.attempt("grow")
        buffer = self._inner.grow(size, fill=fill)
        return buffer if self._disk.mapped else _FailingBuffer(self._disk, buffer)

    def truncate(self, size: int) -> None:
        self._disk.attempt("truncate")
        self._inner.truncate(size)

    def sync(self) -> None:
        self._disk.attempt_sync("sync", self._inner)
        self._inner.sync()

    def forget(self) -> None:
        self._disk.attempt("forget")
        self._inner.forget()

    def close(self) -> None:
        self._inner.close()


class _FailingBuffer:
    """A buffer that stores by writing."""

    def __init__(self, disk: FailingDisk, inner: Buffer) -> None:
        self._disk = disk
        self._inner = inner

    def __setitem__(self, span: slice, data: bytes) -> None:
        error = self._disk.due("store")
        if error is None:
            self._inner[span] = data
            return
        if part := self._disk.written_part(len(data)):
            self._inner[span.start : span.start + part] = data[:part]
        raise error


class FailingDirectory:
    """A folder of a ``FailingDisk``."""

    def __init__(self, disk: FailingDisk, inner: Directory) -> None:
        self._disk = disk
        self._inner = inner

    @property
    def path(self) -> str:
        return self._inner.path

    def check_place(self) -> None:
        self._inner.check_place()

    def _attempt(self, kind: str, name: str) -> None:
        self._disk.attempt(kind, f"{self.path}/{name}")

    def names(self) -> list[str]:
        self._disk.attempt("names", self.path)
        return self._inner.names()

    def open(self, name: str, *, write: bool = False, linked: bool = False) -> FailingFile:
        self._attempt("open", name)
        return FailingFile(self._disk, self._inner.open(name, write=write, linked=linked))

    def status(self, name: str) -> FileStatus | None:
        return self._inner.status(name)

    def create(self, name: str) -> FailingFile:
        self._attempt("create", name)
        return FailingFile(self._disk, self._inner.create(name))

    def rename(self, old: str, new: str) -> None:
        self._attempt("rename", old)
        self._inner.rename(old, new)

    def exchange(self, one: str, other: str) -> None:
        self._attempt("rename", one)
        self._inner.exchange(one, other)

    def link(self, old: str, new: str) -> None:
        self._attempt("link", old)
        self._inner.link(old, new)

    def move(self, name: str, target: Directory, new: str) -> None:
        self._attempt("move", name)
        self._inner.move(name, target._inner if isinstance(target, FailingDirectory) else target, new)

    def unlink(self, name: str) -> None:
        self._attempt("unlink", name)
        self._inner.unlink(name)

    def sync(self) -> None:
        self._disk.attempt_sync("sync_directory", self._inner, self.path)
        self._inner.sync()

    def lock(self, name: str, *, wait: bool = False) -> Lock:
        self._attempt("lock", name)
        return self._inner.lock(name, wait=wait)

    def close(self) -> None:
        self._inner.close()
