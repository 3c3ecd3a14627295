"""The disk: with ``_file``, the only module that touches the operating system's files.

``Disk``, ``Directory``, ``File`` and ``Buffer`` are what the rest of the library knows. ``RealDisk`` is the real
thing; the simulated ones are in ``kestrelpy.testing``. All of them raise ``OSError`` as the system does and nothing
else, except ``QueueLocked`` from a lock.

Rules:
1. What is created is 0600 (folders 0700), exclusive, and opened relative to its directory without following links
   (R1, R24).
2. Only regular files with one link are opened (R22).
3. A write that raises may have left part of itself: the caller undoes it (R12).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import weakref
from typing import Any, Protocol, cast

from kestrelpy._file import RealFile
from kestrelpy.errors import QueueLocked

_NETWORK = ("nfs", "cifs", "smb", "9p", "fuse", "ceph", "gluster", "afs", "lustre", "ocfs", "gfs", "beegfs", "virtiofs")


class Buffer(Protocol):
    """A file's bytes for storing: ``buffer[start:end] = data`` puts ``data`` there, whole, in the kernel."""

    def __setitem__(self, span: slice, data: bytes, /) -> None: ...


class File(Protocol):
    """One open file."""

    def read(self, offset: int, size: int) -> bytes:
        """Up to ``size`` bytes from ``offset``; fewer only at the end of the file."""

    def write(self, offset: int, *parts: bytes) -> None:
        """All of ``parts``, one behind the other, at ``offset``."""

    def size(self) -> int: ...

    def grow(self, size: int, *, fill: bool = True) -> Buffer:
        """Make the file ``size`` bytes with room for them on disk, the new ones zero; return its buffer.

        ``fill``: whether to make them quick to store to, which is in vain for what ``write`` is about to replace.
        Raises ``OSError`` (ENOSPC) with the file and the buffer in hand as they were.
        """

    def truncate(self, size: int) -> None: ...

    def sync(self) -> None:
        """Return when content and size are on disk, whichever way they were written. Its name is not its business."""

    def forget(self) -> None:
        """Drop the cached pages, so that the next read comes from the disk (rule R10)."""

    def close(self) -> None: ...


class Lock(Protocol):
    """A held lock."""

    def release(self) -> None: ...

    def abandon(self) -> None:
        """Let go of the descriptor without unlocking: in a forked child, where the lock is the parent's (R26)."""


class Directory(Protocol):
    """One folder; names are of files in it."""

    @property
    def path(self) -> str: ...

    def names(self) -> list[str]: ...

    def open(self, name: str, *, write: bool = False) -> File:
        """An existing regular file with one link; raises ``OSError`` for anything else."""

    def create(self, name: str) -> File:
        """A new, empty file; raises ``FileExistsError`` if the name is taken."""

    def rename(self, old: str, new: str) -> None:
        """Give ``old`` the name ``new``, replacing a file of that name."""

    def move(self, name: str, target: Directory, new: str) -> None:
        """As ``rename``, into another directory; raises ``OSError`` (EXDEV) if that is on another file system."""

    def unlink(self, name: str) -> None: ...

    def sync(self) -> None:
        """Return when the names in it are on disk."""

    def lock(self, name: str, *, wait: bool = False) -> Lock:
        """Lock the file ``name``, made if missing and never unlinked; raises ``QueueLocked`` if another holds it."""

    def close(self) -> None: ...


class Disk(Protocol):
    """Where directories come from."""

    def directory(self, path: str, *, create: bool = False) -> Directory: ...


# -- the real one ----------------------------------------------------------------------------------------------------


class _RealLock:
    """A ``flock`` through portalocker; the file holds the owner's process id for whoever is refused."""

    # A forked child closes its copies at once, also of what another thread waits for or has for a moment: they would
    # keep the lock as long as the child lives, whatever becomes of the parent (R26).
    copied: weakref.WeakSet[_RealLock] = weakref.WeakSet()  # noqa: RUF012 - one table for the process, by intent

    def __init__(self, file: Any) -> None:
        self._file = file
        self.copied.add(self)

    def release(self) -> None:
        """Unlocks as well as closes: a child that forked off meanwhile has a copy of the descriptor (R26)."""
        import portalocker

        if not self._file.closed:
            with contextlib.suppress(portalocker.LockException):
                portalocker.unlock(self._file)
            self.abandon()

    def abandon(self) -> None:
        self.copied.discard(self)
        self._file.close()


def _leave_pid(descriptor: int) -> None:
    """Say in the lock file whose it is; on a full disk it says nothing, which must not keep a queue from opening."""
    pid = b"%d\n" % os.getpid()
    with contextlib.suppress(OSError):
        os.pwrite(descriptor, pid, 0)  # before the truncate, which would give the block away
        os.ftruncate(descriptor, len(pid))


class _Descriptor:
    """A directory's descriptor, shared by all queues of a process that are in it."""

    # guarded by _Descriptor.guard
    shared: dict[tuple[int, int], _Descriptor] = {}  # noqa: RUF012 - one table for the process, by intent
    guard = threading.Lock()

    def __init__(self, number: int, key: tuple[int, int]) -> None:
        self.number = number
        self.key = key
        self.users = 0
        self.named = ""  # the path under which it has been synced into its parent since it is open here
        self.is_local = False  # known to be: a file system does not change under an open folder

    @classmethod
    def is_named(cls, path: str) -> bool:
        """Whether a queue of this process has the folder open, under this path, and has synced it into its parent."""
        try:
            about = os.stat(path)
        except OSError:
            return False  # whoever makes or opens it hears why
        with cls.guard:
            shared = cls.shared.get((about.st_dev, about.st_ino))
        return shared is not None and shared.named == path


def _reset_after_fork() -> None:
    """In a forked child: another thread of the parent may have held the guard, and will never release it here."""
    _Descriptor.guard = threading.Lock()
    _Descriptor.shared = {}
    for lock in list(_RealLock.copied):
        lock.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


class RealDirectory:
    """A folder of the operating system."""

    def __init__(self, path: str, *, mapped: bool = True) -> None:
        self._path = path
        self._mapped = mapped
        number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        about = os.fstat(number)
        key = (about.st_dev, about.st_ino)
        with _Descriptor.guard:
            shared = _Descriptor.shared.get(key)
            if shared is None:
                shared = _Descriptor.shared[key] = _Descriptor(number, key)
            else:
                os.close(number)
            shared.users += 1
        self._shared: _Descriptor | None = shared

    @property
    def path(self) -> str:
        return self._path

    @property
    def _number(self) -> int:
        if self._shared is None:
            raise OSError(errno.EBADF, "this directory is closed", self._path)
        return self._shared.number

    def check_local(self) -> None:
        """Raise ``OSError`` (ENOTSUP) for a folder on a network file system."""
        shared = self._shared
        if shared is None or shared.is_local:
            return
        if kind := _network_type(self._path):
            reason = f"{kind} is a network file system: its locks and syncs promise less"
            raise OSError(errno.ENOTSUP, reason, self._path)
        shared.is_local = True

    def note_named(self) -> None:
        """Its name is on disk: who opens it beside this does not see to that again."""
        if self._shared is not None:
            self._shared.named = self._path

    def names(self) -> list[str]:
        """Listed through a descriptor of its own: the place in a listing belongs to the descriptor, and two threads, or
        a process and its forked child, that list through one get a part of the names each."""
        number = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._number)
        try:
            return os.listdir(number)
        finally:
            os.close(number)

    def open(self, name: str, *, write: bool = False) -> RealFile:
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        while True:
            descriptor = os.open(name, flags, dir_fd=self._number)
            about = os.fstat(descriptor)
            if stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
                return RealFile(descriptor, mapped=self._mapped)
            os.close(descriptor)
            if about.st_nlink:
                raise OSError(errno.EINVAL, "not a regular file with one link", os.path.join(self._path, name))
            # It was removed or replaced between our open and our look: what is there now is meant.

    def create(self, name: str) -> RealFile:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return RealFile(os.open(name, flags, 0o600, dir_fd=self._number), mapped=self._mapped)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self._number, dst_dir_fd=self._number)

    def move(self, name: str, target: Directory, new: str) -> None:
        other = cast(RealDirectory, target)
        os.rename(name, new, src_dir_fd=self._number, dst_dir_fd=other._number)

    def unlink(self, name: str) -> None:
        os.unlink(name, dir_fd=self._number)

    def sync(self) -> None:
        os.fsync(self._number)

    def lock(self, name: str, *, wait: bool = False) -> Lock:
        import portalocker  # here and not above: importing kestrelpy for a memory queue must not pay for it

        flags = portalocker.LockFlags.EXCLUSIVE
        if not wait:
            flags |= portalocker.LockFlags.NON_BLOCKING
        while True:
            descriptor = os.open(
                name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600, dir_fd=self._number
            )
            file = os.fdopen(descriptor, "r+b", buffering=0)
            lock = _RealLock(file)
            try:
                about = os.fstat(descriptor)
                if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:  # 0 links: removed since, and tried again
                    raise OSError(errno.EINVAL, "not a regular file with one link", os.path.join(self._path, name))
                portalocker.lock(file, flags)
                if self._is_at(descriptor, name):
                    if not wait:
                        _leave_pid(descriptor)
                    return lock
            except portalocker.AlreadyLocked:
                with file:
                    holder = os.pread(descriptor, 20, 0).strip()
                path = os.path.join(self._path, name)
                raise QueueLocked(path, int(holder) if holder.isdigit() else None) from None
            except portalocker.LockException as error:
                lock.abandon()
                cause = error.__context__
                raise cause if isinstance(cause, OSError) else OSError(errno.ENOLCK, str(error)) from None
            except BaseException:
                lock.abandon()
                raise
            lock.abandon()  # somebody removed the file between our open and our lock: lock what is there now (R25)

    def _is_at(self, descriptor: int, name: str) -> bool:
        try:
            there = os.stat(name, dir_fd=self._number, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(descriptor))

    def close(self) -> None:
        shared, self._shared = self._shared, None
        if shared is None:
            return
        with _Descriptor.guard:
            shared.users -= 1
            if not shared.users:
                if _Descriptor.shared.get(shared.key) is shared:
                    del _Descriptor.shared[shared.key]
                os.close(shared.number)


class RealDisk:
    """The file systems of this machine. Network ones are refused (R28) unless ``allow_network``; ``mapped=False``
    stores by ``pwrite`` instead of through a mapping.
    """

    def __init__(self, *, allow_network: bool = False, mapped: bool = True) -> None:
        self._allow_network = allow_network
        self._mapped = mapped

    def directory(self, path: str, *, create: bool = False) -> RealDirectory:
        """Open a folder, after making it and its missing parents (each synced into its own parent, R2) if asked to."""
        path = os.path.abspath(path)
        makes = create and not _Descriptor.is_named(path)
        if makes:
            self._make(path)
        directory = RealDirectory(path, mapped=self._mapped)
        try:
            if makes:
                directory.note_named()
            if not self._allow_network:
                directory.check_local()
        except BaseException:
            directory.close()
            raise
        return directory

    def _make(self, path: str) -> None:
        """What is there already is synced into its parent too: whoever made it may have been killed before that."""
        parent = os.path.dirname(path)
        made = not os.path.isdir(path) and parent != path  # where nothing can be looked at, not even the root is there
        if made:
            self._make(parent)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        try:
            _sync_path(parent)
        except OSError as error:
            # A parent that we may not read, or that cannot be synced, is not one that we made a folder in.
            if made or error.errno not in (errno.EACCES, errno.EINVAL, errno.EROFS):
                raise


def _sync_path(path: str) -> None:
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _network_type(path: str) -> str | None:
    """The type of the file system that ``path`` is on, if it is one over a network."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
            lines = table.readlines()
    except OSError:
        return None  # no such table on this system: nothing to go by
    for line in lines:
        left, _, right = line.partition(" - ")
        if left.split()[2] == wanted:
            kind = right.split()[0]
            return kind if kind.startswith(_NETWORK) else None
    return None
