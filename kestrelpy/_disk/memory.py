"""A disk in memory: ``MemoryDisk``, and the base to which ``CrashingDisk`` adds a history.

Rules:
1. Errors are the system's: the same class, the same errno, the path where the system gives one.
2. A handle belongs to one life of its disk. ``kill()`` ends it as the death of every process would: handles raise
   EBADF, locks are free, and what was written is there.
3. All that changes the disk calls ``_before`` first. Here that does nothing; ``CrashingDisk`` counts and records.

NOTE ON LOCKING: one ``_guard`` guards the names and locks of all these disks: they are cloned by the thousand. It is
held across ``_before``. The bytes of a file need no lock: threads that store into one file store apart from each other.
"""

from __future__ import annotations

import errno
import os
import posixpath
import threading
import weakref
from collections.abc import Iterable
from typing import Protocol

from kestrelpy._disk.interface import Buffer, Directory, FileStatus
from kestrelpy._process import reset_after_fork
from kestrelpy.errors import QueueLocked

_guard = threading.RLock()
_released = threading.Condition(_guard)  # a lock was released, or a disk was killed


def _reset_after_fork() -> None:
    """In a forked child: another thread of the parent may have held the guard, and will never release it here."""
    global _guard, _released
    _guard = threading.RLock()
    _released = threading.Condition(_guard)


reset_after_fork(_reset_after_fork)


def system_error(number: int, path: str) -> OSError:
    """The exception that the system's call would raise. ``OSError`` chooses the right subclass."""
    return OSError(number, os.strerror(number), path)


class Life:
    """The time between two kills of a disk."""

    __slots__ = ("alive",)

    def __init__(self) -> None:
        self.alive = True


_CLOSED = Life()
_CLOSED.alive = False


class Node(Protocol):
    """The content of a file, whatever its names and handles. ``order``: the operation's number, from ``_before``."""

    holder: weakref.ref[MemoryLock] | None
    failed_syncs: int  # as on Linux, each is reported once to every handle of the file, when that handle syncs next

    @property
    def size(self) -> int: ...

    def read(self, offset: int, size: int) -> bytes: ...

    def store(self, offset: int, data: bytes, order: int) -> None: ...

    def resize(self, size: int, order: int) -> None: ...

    def sync(self) -> None: ...

    def fail_sync(self) -> None: ...

    def forget(self) -> None: ...


class Folder:
    """The content of a folder."""

    __slots__ = ("mount", "names", "path")

    def __init__(self, path: str, mount: str) -> None:
        self.path = path
        self.mount = mount
        self.names: dict[str, Node] = {}

    def set(self, name: str, node: Node | None, order: int, *, moved: bool = False) -> None:
        """Let ``name`` mean ``node``, or nothing. ``moved``: the other half of this change is in another folder."""
        del order, moved
        if node is None:
            del self.names[name]
        else:
            self.names[name] = node

    def sync(self) -> None: ...

    def fail_sync(self) -> None: ...


class MemoryNode:
    """A file without a history: nothing to sync, nothing to lose."""

    __slots__ = ("data", "holder")
    failed_syncs = 0

    def __init__(self) -> None:
        self.data = bytearray()
        self.holder: weakref.ref[MemoryLock] | None = None

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self.data[offset : offset + size])

    def store(self, offset: int, data: bytes, order: int) -> None:
        del order
        if data and offset > len(self.data):
            self.data.extend(bytes(offset - len(self.data)))
        self.data[offset : offset + len(data)] = data

    def resize(self, size: int, order: int) -> None:
        del order
        if size < len(self.data):
            del self.data[size:]
        else:
            self.data.extend(bytes(size - len(self.data)))

    def sync(self) -> None: ...

    def fail_sync(self) -> None: ...

    def forget(self) -> None: ...


class MemoryFile:
    """A handle of a file."""

    __slots__ = ("_buffer", "_disk", "_failed_syncs", "_life", "_name", "_node", "_writable")

    def __init__(self, disk: MemoryDisk, node: Node, name: str, *, writable: bool) -> None:
        self._disk = disk
        self._node = node
        self._name = name
        self._writable = writable
        self._life = disk.life
        self._buffer: MemoryBuffer | None = None
        self._failed_syncs = node.failed_syncs

    def _check_open(self, *, refused: int = 0) -> None:
        """Raises EBADF for a dead handle, and ``refused``, if given, for a handle that may only read."""
        if not self._life.alive:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if refused and not self._writable:
            raise OSError(refused, os.strerror(refused))

    def read(self, offset: int, size: int) -> bytes:
        self._check_open()
        data = self._node.read(offset, size)
        self._disk.bytes_read += len(data)
        return data

    def write(self, offset: int, *parts: bytes) -> None:
        self._check_open(refused=errno.EBADF)
        data = b"".join(parts)
        self._node.store(offset, data, self._disk._before("write", self._name, self._node, offset, data))

    def size(self) -> int:
        self._check_open()
        return self._node.size

    def grow(self, size: int, *, fill: bool = True) -> Buffer:
        del fill
        self._check_open(refused=errno.EBADF)
        if size > self._node.size:
            self._node.resize(size, self._disk._before("grow", self._name))
        if self._buffer is None:
            self._buffer = MemoryBuffer(self)
        self._buffer.size = size
        return self._buffer

    def truncate(self, size: int) -> None:
        self._check_open(refused=errno.EINVAL)
        self._node.resize(size, self._disk._before("truncate", self._name))
        self._buffer = None

    def sync(self) -> None:
        self._check_open()
        self._disk._before("sync", self._name)
        self._node.sync()
        known, self._failed_syncs = self._failed_syncs, self._node.failed_syncs
        if known != self._failed_syncs:  # a sync of this file through another handle has failed
            raise system_error(errno.EIO, self._name)

    def fail_sync(self) -> None:
        """Leave what a failing sync leaves: pages marked clean that are not on disk. For ``FailingDisk``."""
        self._check_open()
        self._disk._before("sync", self._name)
        self._node.fail_sync()
        self._failed_syncs = self._node.failed_syncs

    def forget(self) -> None:
        self._check_open()
        self._node.forget()
        self._disk._changed()

    def close(self) -> None:
        self._life = _CLOSED
        self._buffer = None


class MemoryBuffer:
    """The buffer of a handle. As with a mapping, a handle has one; a truncate or a close makes it useless."""

    __slots__ = ("_file", "size")

    def __init__(self, file: MemoryFile) -> None:
        self._file = file
        self.size = 0

    def __setitem__(self, span: slice, data: bytes) -> None:
        file = self._file
        if file._buffer is not self:
            raise ValueError("mmap closed or invalid")
        file._check_open()
        start, stop, _ = span.indices(self.size)
        if stop - start != len(data):
            raise IndexError("mmap slice assignment is wrong size")
        order = file._disk._before("store", file._name, file._node, start, data)
        file._node.store(start, data, order)


class MemoryLock:
    """A held lock. It is free when released, or when nobody refers to it: a real one's file is closed then."""

    __slots__ = ("__weakref__", "_folder", "_name", "_node", "life")

    def __init__(self, node: Node, folder: Folder, name: str, life: Life) -> None:
        self._node = node
        self._folder = folder
        self._name = name
        self.life = life

    def release(self) -> None:
        with _guard:
            if self._node.holder is not None and self._node.holder() is self:
                self._node.holder = None
                _released.notify_all()

    def abandon(self) -> None:
        """Nothing to do: the memory of a forked child is its own, and so is the lock in it."""

    def is_current(self) -> bool:
        return self._folder.names.get(self._name) is self._node


class MemoryDirectory:
    """A handle of a folder."""

    __slots__ = ("_disk", "_folder", "_life")

    def __init__(self, disk: MemoryDisk, folder: Folder) -> None:
        self._disk = disk
        self._folder = folder
        self._life = disk.life

    @property
    def path(self) -> str:
        return self._folder.path

    def check_place(self) -> None:
        self._check_open()

    def _join(self, name: str) -> str:
        path = self._folder.path
        return f"/{name}" if path == "/" else f"{path}/{name}"

    def _check_open(self) -> None:
        if not self._life.alive:
            raise system_error(errno.EBADF, self._folder.path)

    def _find(self, name: str) -> Node:
        node = self._folder.names.get(name)
        if node is None:
            raise system_error(
                errno.EISDIR if self._join(name) in self._disk.folders else errno.ENOENT, self._join(name)
            )
        return node

    def names(self) -> list[str]:
        self._check_open()
        prefix = self._join("")
        with _guard:
            names, paths = list(self._folder.names), list(self._disk.folders)
        inner = [path[len(prefix) :] for path in paths if path.startswith(prefix)]
        return [*names, *(name for name in inner if name and "/" not in name)]

    def open(self, name: str, *, write: bool = False, linked: bool = False) -> MemoryFile:
        del linked  # a file that has a second name may be opened here all the same
        self._check_open()
        with _guard:
            node = self._folder.names.get(name)
            if node is None and not write and self._join(name) in self._disk.folders:
                raise OSError(errno.EINVAL, "not a regular file with one link", self._join(name))
            return MemoryFile(self._disk, node or self._find(name), name, writable=write)

    def create(self, name: str) -> MemoryFile:
        self._check_open()
        with _guard:
            return MemoryFile(self._disk, self._add(name), name, writable=True)

    def _add(self, name: str) -> Node:
        if name in self._folder.names or self._join(name) in self._disk.folders:
            raise system_error(errno.EEXIST, self._join(name))
        order = self._disk._before("create", name)
        node = self._disk._new_node()
        self._folder.set(name, node, order)
        return node

    def rename(self, old: str, new: str) -> None:
        self._move("rename", old, self, new)

    def move(self, name: str, target: Directory, new: str) -> None:
        self._move("move", name, target, new)

    def _move(self, kind: str, name: str, target: Directory, new: str) -> None:
        self._check_open()
        if not isinstance(target, MemoryDirectory) or target._disk is not self._disk:
            raise system_error(errno.EXDEV, self._join(name))
        target._check_open()
        here, there = self._folder, target._folder
        with _guard:
            node = self._find(name)
            if here.mount != there.mount:
                raise system_error(errno.EXDEV, self._join(name))
            if new not in there.names and target._join(new) in self._disk.folders:
                raise system_error(errno.EISDIR, self._join(name))
            order = self._disk._before(kind, name)
            if there.names.get(new) is node:
                return
            there.set(new, node, order, moved=here is not there)
            here.set(name, None, order, moved=here is not there)

    def exchange(self, one: str, other: str) -> None:
        self._check_open()
        with _guard:
            node, twin = self._find(one), self._find(other)
            order = self._disk._before("rename", one)
            self._folder.set(other, node, order)
            self._folder.set(one, twin, order)

    def link(self, old: str, new: str) -> None:
        self._check_open()
        with _guard:
            node = self._find(old)
            if new in self._folder.names or self._join(new) in self._disk.folders:
                raise system_error(errno.EEXIST, self._join(new))
            self._folder.set(new, node, self._disk._before("link", old))

    def status(self, name: str) -> FileStatus:
        self._check_open()
        with _guard:
            return FileStatus(self._find(name).size, 0)

    def unlink(self, name: str) -> None:
        self._check_open()
        with _guard:
            self._find(name)
            self._folder.set(name, None, self._disk._before("unlink", name))

    def sync(self) -> None:
        self._check_open()
        with _guard:
            self._disk._sync_folder(self._folder)

    def fail_sync(self) -> None:
        """Leave what a failing sync leaves: names of which a later sync reports nothing. For ``FailingDisk``."""
        self._check_open()
        with _guard:
            self._disk._before("sync_directory", self._folder.path)
            self._folder.fail_sync()

    def lock(self, name: str, *, wait: bool = False) -> MemoryLock:
        lock: MemoryLock | None = None
        try:
            with _guard:
                while True:
                    self._check_open()  # here, where no kill comes between it and the lock
                    node = self._folder.names.get(name) or self._add(name)
                    holder = None if node.holder is None else node.holder()
                    if holder is None or not holder.life.alive:
                        lock = MemoryLock(node, self._folder, name, self._life)
                        node.holder = weakref.ref(lock)
                        return lock
                    if not wait:
                        raise QueueLocked(self._join(name), os.getpid())
                    self._disk._wait()
        except BaseException:  # perhaps an interrupt: its traceback would keep the lock
            if lock is not None:
                lock.release()
            raise

    def close(self) -> None:
        self._life = _CLOSED


class MemoryDisk:
    """A disk in memory, for tests: fast, private, gone with the object. Any number of threads may use it.

    Folders are made as on a real disk, by ``directory(path, create=True)``; at first there is only ``/``. ``mounts``
    are paths of folders that are file systems of their own: to move a file into or out of one raises EXDEV.
    """

    def __init__(self, *, mounts: Iterable[str] = ()) -> None:
        self.life = Life()
        self.bytes_read = 0  # from files, so far: for the tests of code that must read little
        self.folders: dict[str, Folder] = {}
        self._mounts = sorted({"/", *map(_absolute, mounts)}, key=len, reverse=True)
        self.folders["/"] = self._new_folder("/", 0)

    def directory(self, path: str, *, create: bool = False) -> MemoryDirectory:
        """Open a folder of this disk; with ``create``, make it if it is missing. Raises ``FileNotFoundError``."""
        path = _absolute(path)
        with _guard:
            if create:
                self._make(path)
            folder = self.folders.get(path)
            if folder is None:
                self._check_parents(path)
                raise system_error(errno.ENOTDIR if self._is_file(path) else errno.ENOENT, path)
            return MemoryDirectory(self, folder)

    def kill(self) -> None:
        """End every process that uses this disk: handles raise ``OSError`` (EBADF) from now on, locks are free."""
        with _guard:
            self.life.alive = False
            self.life = Life()
            _released.notify_all()

    def _make(self, path: str) -> None:
        """In the same steps as ``RealDisk``, so that there are the same moments to crash at."""
        if path not in self.folders:
            parent = posixpath.dirname(path)
            self._make(parent)
            self._check_parents(path)
            if self._is_file(path):
                raise system_error(errno.ENOTDIR, path)
            self.folders[path] = self._new_folder(path, self._before("mkdir", path))
        if path != "/":
            self._sync_folder(self.folders[posixpath.dirname(path)])

    def _is_file(self, path: str) -> bool:
        parent = self.folders.get(posixpath.dirname(path))
        return parent is not None and posixpath.basename(path) in parent.names

    def _check_parents(self, path: str) -> None:
        while path != "/":
            path = posixpath.dirname(path)
            if self._is_file(path):
                raise system_error(errno.ENOTDIR, path)

    def _mount_of(self, path: str) -> str:
        return next(mount for mount in self._mounts if mount in ("/", path) or path.startswith(mount + "/"))

    # -- what CrashingDisk overrides ---------------------------------------------------------------------------------

    def _before(self, kind: str, name: str, node: Node | None = None, offset: int = 0, data: bytes = b"") -> int:
        """Called before every change; ``data`` is about to be stored at ``offset`` of ``node``. Returns its number."""
        del kind, name, node, offset, data
        return 0

    def _changed(self) -> None:
        """Called after a change of the cache, which is no operation on the disk."""

    def _new_node(self) -> Node:
        return MemoryNode()

    def _new_folder(self, path: str, order: int) -> Folder:
        del order
        return Folder(path, self._mount_of(path))

    def _sync_folder(self, folder: Folder) -> None:
        self._before("sync_directory", folder.path)
        folder.sync()

    def _wait(self) -> None:
        """Wait until a lock is released."""
        _released.wait()


def _absolute(path: str) -> str:
    return "/" + posixpath.normpath(posixpath.join("/", path)).lstrip("/")
