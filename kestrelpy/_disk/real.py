"""The disk of the operating system. This module and ``file`` are the only ones that touch its files.

Rules:
1. A file is created with mode 0600 (a folder with 0700), exclusively, and relative to its directory, without following
   links (R1, R24).
2. Only regular files with one link are opened (R22).
3. A write that raises may have written a part: the caller undoes it (R12).
4. Nothing is mapped on a file system that copies on write: there, a store over existing data may find no room.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import sys
import threading
import weakref
from typing import Any, cast

from kestrelpy._disk.file import RealFile, sync_names
from kestrelpy._disk.interface import Directory, FileStatus, Lock, text_of
from kestrelpy._process import reset_after_fork
from kestrelpy.errors import QueueLocked

_NETWORK = ("nfs", "cifs", "smb", "9p", "fuse", "ceph", "gluster", "afs", "lustre", "ocfs", "gfs", "beegfs", "virtiofs")
_COPYING = frozenset({"btrfs", "bcachefs", "zfs", "nilfs2", "ubifs", "overlay"})
"""File systems on which a store needs new room even where there is data on disk: on a full one, a store into a mapping
would be a SIGBUS. The upper part of an overlay may be any file system: only an unknown one counts as ``overlay``.
"""
_EXCHANGE = 2
_GET_FLAGS, _SET_FLAGS, _NO_COPY = 0x80086601, 0x40086602, 0x00800000


class _LockFile(io.FileIO):
    """An open lock file. A collected one gives no ``ResourceWarning``: the queue or reader that held it gives one."""

    def __del__(self) -> None:
        self.close()


class _RealLock:
    """A ``flock`` through portalocker. The file holds the owner's process id, for the error of a process refused."""

    # A forked child closes its copies at once, also of locks that another thread waits for or holds for a moment: a
    # copy would keep the lock as long as the child lives, even after the parent is gone (R26).
    copied: weakref.WeakSet[_RealLock] = weakref.WeakSet()  # noqa: RUF012 - one table for the process, by intent

    def __init__(self, file: _LockFile, directory: RealDirectory, name: str) -> None:
        self._file = file
        self._directory = directory
        self._name = name
        self._releasing = threading.Lock()  # after the close, the descriptor may be another file's
        self.copied.add(self)

    def release(self) -> None:
        """Unlock, and not only close: a child that was forked meanwhile has a copy of the descriptor (R26). May be
        repeated, by any thread.
        """
        import portalocker

        with self._releasing:
            if not self._file.closed:
                with contextlib.suppress(portalocker.LockException):
                    portalocker.unlock(self._file)
                self.abandon()

    def abandon(self) -> None:
        self.copied.discard(self)
        self._file.close()

    def is_current(self) -> bool:
        with self._releasing:  # a lock that was released meanwhile was not taken away
            return self._file.closed or self._directory._is_at(self._file.fileno(), self._name)


def _leave_pid(descriptor: int) -> None:
    """Write the owner's process id into the lock file. A full disk prevents that; the queue opens all the same."""
    pid = b"%d\n" % os.getpid()
    with contextlib.suppress(OSError):
        os.pwrite(descriptor, pid, 0)  # before the truncate: to truncate first would free the block
        os.ftruncate(descriptor, len(pid))


class _Descriptor:
    """A directory's descriptor, shared by all queues of this process in that directory."""

    # guarded by _Descriptor.guard, which is reentrant: a ``scan`` that is thrown away closes its folders in a finaliser
    shared: dict[tuple[int, int], _Descriptor] = {}  # noqa: RUF012 - one table for the process, by intent
    guard = threading.RLock()

    def __init__(self, number: int, key: tuple[int, int]) -> None:
        self.number = number
        self.key = key
        self.users = 0
        self.named = ""  # the path under which it was synced into its parent, since it was opened here
        self._kind: str | None = None

    @property
    def kind(self) -> str:
        """The type of its file system, which does not change while the folder is open; empty if it is not known."""
        if self._kind is None:
            self._kind = _file_system(self.number)
        return self._kind

    @property
    def is_copying(self) -> bool:
        """Whether stores may need new room. True if the type is not known."""
        return self.kind in _COPYING or not self.kind

    def leave(self) -> None:
        """End the use by one user. The last one closes the descriptor."""
        with _Descriptor.guard:
            self.users -= 1
            if not self.users:
                if _Descriptor.shared.get(self.key) is self:
                    del _Descriptor.shared[self.key]
                os.close(self.number)

    @classmethod
    def is_named(cls, path: str) -> bool:
        """Whether a queue of this process has the folder open, under this path, and has synced it into its parent."""
        try:
            about = os.stat(path)
        except OSError:
            return False  # making or opening the folder will raise the reason
        with cls.guard:
            shared = cls.shared.get((about.st_dev, about.st_ino))
        return shared is not None and shared.named == path


def _reset_after_fork() -> None:
    """In a forked child: another thread of the parent may have held the guard, and will never release it here."""
    _Descriptor.guard = threading.RLock()
    _Descriptor.shared = {}
    for lock in list(_RealLock.copied):
        lock._releasing = threading.Lock()
        lock.abandon()


reset_after_fork(_reset_after_fork)


def _missing_calls() -> list[str]:
    """The calls that this system lacks and every queue on disk needs. (Windows lacks nearly all of them.)"""
    names = ("O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "pread", "pwrite", "ftruncate", "fsync")
    relative = (os.open, os.unlink, os.rename, os.stat)
    return [
        *(name for name in names if not hasattr(os, name)),
        *(f"{call.__name__} with dir_fd" for call in relative if call not in os.supports_dir_fd),
        *(() if os.listdir in os.supports_fd else ("listdir of a descriptor",)),
    ]


_MISSING_CALLS = _missing_calls()


class RealDirectory:
    """A folder of the operating system."""

    def __init__(self, path: str, *, mapped: bool = True) -> None:
        self._path = path
        self._mapped = mapped
        number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        about = os.fstat(number)
        key = (about.st_dev, about.st_ino)
        mine = _Descriptor(number, key)
        with _Descriptor.guard:
            shared = _Descriptor.shared.setdefault(key, mine)
            shared.users += 1  # no call in between: a finaliser never finds it without users
        if shared is not mine:
            os.close(number)
        self._shared: _Descriptor | None = shared
        self._left = weakref.finalize(self, shared.leave)  # if nobody closes it (R31)
        self._left.atexit = False

    @property
    def path(self) -> str:
        return self._path

    @property
    def _number(self) -> int:
        if self._shared is None:
            raise OSError(errno.EBADF, "this directory is closed", self._path)
        return self._shared.number

    def check_place(self) -> None:
        try:
            is_here = os.path.samestat(os.stat(self._path), os.fstat(self._number))
        except (FileNotFoundError, NotADirectoryError):
            is_here = False
        if not is_here:
            raise FileNotFoundError(errno.ENOENT, "this folder was renamed or removed while it was open", self._path)

    def check_local(self) -> None:
        """Raise ``OSError`` (ENOTSUP) for a folder on a network file system."""
        if self._shared is not None and _is_network(self._shared.kind):
            reason = f"{self._shared.kind} is a network file system: its locks and syncs promise less"
            raise OSError(errno.ENOTSUP, reason, self._path)

    def note_named(self) -> None:
        """Note that its name is on disk: another opening at the same time need not sync it again."""
        if self._shared is not None:
            self._shared.named = self._path

    def names(self) -> list[str]:
        """List through a descriptor of its own. A descriptor has one position in the listing: two threads that list
        through the same one, or a process and its forked child, each get a part of the names."""
        number = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._number)
        try:
            return os.listdir(number)
        finally:
            os.close(number)

    def open(self, name: str, *, write: bool = False, linked: bool = False) -> RealFile:
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        while True:
            descriptor = os.open(name, flags, dir_fd=self._number)
            about = os.fstat(descriptor)
            if stat.S_ISREG(about.st_mode) and (about.st_nlink == 1 or (linked and about.st_nlink)):
                return RealFile(descriptor, mapped=write and self._is_mapped())
            os.close(descriptor)
            if about.st_nlink:
                raise OSError(errno.EINVAL, "not a regular file with one link", os.path.join(self._path, name))
            # It was removed or replaced between our open and our look: open what is there now.

    def create(self, name: str) -> RealFile:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self._number)
        if self._shared is not None and self._shared.kind == "btrfs":
            _store_in_place(descriptor)
        return RealFile(descriptor, mapped=self._is_mapped())

    def _is_mapped(self) -> bool:
        return self._mapped and self._shared is not None and not self._shared.is_copying

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self._number, dst_dir_fd=self._number)

    def exchange(self, one: str, other: str) -> None:
        _exchange(self._number, one, other)

    def link(self, old: str, new: str) -> None:
        os.link(old, new, src_dir_fd=self._number, dst_dir_fd=self._number, follow_symlinks=False)

    def status(self, name: str) -> FileStatus | None:
        about = os.stat(name, dir_fd=self._number, follow_symlinks=False)
        if stat.S_ISDIR(about.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.path.join(self._path, name))
        return FileStatus(about.st_size, about.st_mtime_ns // 10**6) if stat.S_ISREG(about.st_mode) else None

    def move(self, name: str, target: Directory, new: str) -> None:
        other = cast(RealDirectory, target)
        os.rename(name, new, src_dir_fd=self._number, dst_dir_fd=other._number)

    def unlink(self, name: str) -> None:
        os.unlink(name, dir_fd=self._number)

    def sync(self) -> None:
        sync_names(self._number)

    def lock(self, name: str, *, wait: bool = False) -> Lock:
        import portalocker  # here and not above: importing kestrelpy for a memory queue must not pay for it

        flags = portalocker.LockFlags.EXCLUSIVE
        if not wait:
            flags |= portalocker.LockFlags.NON_BLOCKING
        while True:
            descriptor = os.open(
                name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600, dir_fd=self._number
            )
            file = _LockFile(descriptor, "r+b")
            lock = _RealLock(file, self, name)
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
        if shared is not None:
            self._left.detach()
            shared.leave()


class RealDisk:
    """The file systems of this machine. Network file systems are refused (R28) unless ``allow_network``.

    ``mapped=False`` stores by ``pwrite`` instead of through a mapping. That is always done where a store into a mapping
    may need room.
    """

    def __init__(self, *, allow_network: bool = False, mapped: bool = True) -> None:
        self._allow_network = allow_network
        self._mapped = mapped

    def directory(self, path: str, *, create: bool = False) -> RealDirectory:
        """Open a folder, after making it and its missing parents (each synced into its own parent, R2) if asked to."""
        if _MISSING_CALLS:
            reason = f"this system has no {', '.join(_MISSING_CALLS)}: queues on disk need it (Linux and macOS have it)"
            raise OSError(errno.ENOSYS, reason, path)
        path = os.path.abspath(text_of(path))  # bytes, too: a name is put together from it as text
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
        """Make a folder. One that is there is synced into its parent too: its maker may have been killed before."""
        parent = os.path.dirname(path)
        made = not os.path.isdir(path) and parent != path  # if no folder can be looked at, even the root looks missing
        if made:
            self._make(parent)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        try:
            _sync_path(parent)
        except OSError as error:
            # We made no folder in a parent that we may not read, or that cannot be synced.
            if made or error.errno not in (errno.EACCES, errno.EINVAL, errno.EROFS):
                raise


_renameat2: Any = None


def _exchange(number: int, one: str, other: str) -> None:
    """Call ``renameat2``, which Python does not have."""
    global _renameat2
    import ctypes  # here and not above: it takes longer than all of this package

    if _renameat2 is None:
        _renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", False)
    if not _renameat2:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _renameat2(number, os.fsencode(one), number, os.fsencode(other), ctypes.c_uint(_EXCHANGE)):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), one, None, other)


def _sync_path(path: str) -> None:
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_names(number)
    finally:
        os.close(number)


def _is_network(kind: str) -> bool:
    return kind.startswith(_NETWORK)


def _store_in_place(descriptor: int) -> None:
    """Make btrfs store into the blocks that this new file has (chattr +C), so that reserved room can be used: then a
    store into a segment or a checkpoint that is on disk needs no new room. Frames and states have checksums of their
    own. Where this is not possible, a full disk may be found later than on other file systems.
    """
    import fcntl  # here and not above: it is for one file system

    with contextlib.suppress(OSError):
        flags = int.from_bytes(fcntl.ioctl(descriptor, _GET_FLAGS, bytes(8)), sys.byteorder)
        fcntl.ioctl(descriptor, _SET_FLAGS, (flags | _NO_COPY).to_bytes(8, sys.byteorder))


def _file_system(number: int) -> str:
    """The type of the file system of an open folder; empty if it can't be found out. For an overlay it is the type of
    the upper part, if that can be seen from here.

    It is looked up by the number of the mount: a folder on btrfs has another device than the table says.
    """
    kind, options = _mounted(number)
    upper = next((each[9:] for each in options.split(",") if each.startswith("upperdir=")), "")
    if kind != "overlay" or not upper:
        return kind
    try:
        other = os.open(upper, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return kind  # for example from inside a container
    try:
        return _mounted(other)[0]
    finally:
        os.close(other)


def _mounted(number: int) -> tuple[str, str]:
    """Type and options of the file system of an open folder."""
    device = os.fstat(number).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open(f"/proc/self/fdinfo/{number}", encoding="utf-8", errors="replace") as about:
            mount_id = next((line.split()[1] for line in about if line.startswith("mnt_id:")), "")
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
            lines = table.readlines()
    except OSError:
        return "", ""  # no such table on this system: nothing to go by
    found = ("", "")
    for line in lines:
        left, _, right = line.partition(" - ")
        about_it = left.split()
        if about_it[0] == mount_id or (not found[0] and about_it[2] == wanted):
            found = right.split()[0], right.split()[-1]
            if about_it[0] == mount_id:
                break
    return found


def memory_of_the_machine() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
