"""The disk as protocols: files, folders and locks. Everything above the disk seam knows only these.

``RealDisk`` is the operating system's disk; simulated ones are in ``kestrelpy.testing``. All of them raise ``OSError``
as the system does and nothing else, except ``QueueLocked`` from a lock.
"""

from __future__ import annotations

import errno
import os
from typing import NamedTuple, Protocol, TypeAlias

StrPath: TypeAlias = str | os.PathLike[str]
"""A path, as callers may give it."""


def text_of(path: StrPath) -> str:
    """``path`` as text, which the names of files and folders below it are put together from. Bytes, too, are decoded:
    ``os.fsencode`` gives them, and their ``repr`` would name another folder. Raises ``TypeError``.
    """
    return os.fsdecode(path)


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a system that has no room."""
NO_REGULAR_FILE = (errno.EINVAL, errno.ELOOP, errno.EISDIR, errno.ENXIO)
"""Opening a file that is not a regular file with one link fails with one of these. Such a file is never read."""


class FileStatus(NamedTuple):
    """Size and date of a file. The date is 0 on a disk that keeps none."""

    size: int
    modified_ms: int


class Buffer(Protocol):
    """A file's bytes, for storing: ``buffer[start:end] = data`` stores ``data`` there, whole, in the kernel."""

    def __setitem__(self, span: slice, data: bytes, /) -> None: ...


class File(Protocol):
    """One open file."""

    def read(self, offset: int, size: int) -> bytes:
        """Up to ``size`` bytes from ``offset``; fewer only at the end of the file."""

    def write(self, offset: int, *parts: bytes) -> None:
        """Write all ``parts``, one after another, at ``offset``."""

    def size(self) -> int: ...

    def grow(self, size: int, *, fill: bool = True) -> Buffer:
        """Make the file ``size`` bytes long, with room on disk, and zeros in the new bytes; return its buffer.

        ``fill``: whether to make the new bytes quick to store to. That is useless if ``write`` is about to replace
        them. Raises ``OSError`` (ENOSPC), with the file and the present buffer as they were.
        """

    def truncate(self, size: int) -> None: ...

    def sync(self) -> None:
        """Return when content and size are on disk, however they were written. This does not cover the file's name."""

    def forget(self) -> None:
        """Drop the cached pages, so that the next read comes from the disk (rule R10)."""

    def close(self) -> None: ...


class Lock(Protocol):
    """A held lock."""

    def release(self) -> None: ...

    def abandon(self) -> None:
        """Close the descriptor without unlocking: in a forked child, where the lock is the parent's (R26)."""

    def is_current(self) -> bool:
        """Whether the locked file is still the one of that name: nobody has removed it."""


class Directory(Protocol):
    """One folder. A name is that of a file in it."""

    @property
    def path(self) -> str: ...

    def check_place(self) -> None:
        """Raise ``FileNotFoundError`` if this folder is not at its path any more."""

    def names(self) -> list[str]: ...

    def open(self, name: str, *, write: bool = False, linked: bool = False) -> File:
        """An existing regular file with one link (``linked``: or several); raises ``OSError`` for anything else."""

    def status(self, name: str) -> FileStatus | None:
        """Of a regular file. ``None`` for what is neither that nor a folder; raises ``IsADirectoryError`` for one."""

    def create(self, name: str) -> File:
        """A new, empty file; raises ``FileExistsError`` if the name is taken."""

    def rename(self, old: str, new: str) -> None:
        """Give ``old`` the name ``new``, replacing a file of that name."""

    def exchange(self, one: str, other: str) -> None:
        """Let two files exchange their names, at once. Raises ``OSError`` (ENOENT if one is not there; EINVAL, ENOSYS
        where it can't be done).
        """

    def link(self, old: str, new: str) -> None:
        """Give the file ``old`` a second name; raises ``FileExistsError`` if it is taken."""

    def move(self, name: str, target: Directory, new: str) -> None:
        """As ``rename``, into another directory; raises ``OSError`` (EXDEV) if that is on another file system."""

    def unlink(self, name: str) -> None: ...

    def sync(self) -> None:
        """Return when the names in it are on disk."""

    def lock(self, name: str, *, wait: bool = False) -> Lock:
        """Lock the file ``name``, which is made if missing, and stays. If another holds it, ``wait`` for it or raise
        ``QueueLocked``.
        """

    def close(self) -> None: ...


class Disk(Protocol):
    """The source of directories."""

    def directory(self, path: str, *, create: bool = False) -> Directory: ...
