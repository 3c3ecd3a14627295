"""The disk of the explorer: a ``MemoryDisk`` that each process sees in a life of its own.

Every operation is a moment at which two things may happen, as the seed decides: it fails (``arm``), or another process
does a whole step (``meanwhile``). A process that would have to wait for a lock within such a step gets ``EINTR``.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Collection

from kestrelpy._disk.interface import Buffer
from kestrelpy._disk.memory import Life, MemoryDirectory, MemoryDisk, MemoryFile, MemoryLock

BLOCK = 4096


class Trouble:
    """What is to go wrong with the disk, shared by all processes."""

    def __init__(self) -> None:
        self.error = 0
        self.kinds: Collection[str] = ()
        self.left = 0
        self.times = 0
        self.fired = self.ever_fired = 0
        """How often something has failed: as far as it is an excuse, and in all."""
        self.meanwhile: Callable[[], None] | None = None
        self.meanwhile_in = 0
        self.aim = ""
        """The kind of operations in which something happens meanwhile; all, if it is empty."""
        self.blocks: int | None = None
        """How many blocks the file system has; ``None``: enough."""
        self.refused_blocks = 0
        self.counts: Counter[str] = Counter()

    def arm(self, error: int, kinds: Collection[str], *, after: int, times: int) -> None:
        """Let the operations of these kinds fail with ``error``: ``times`` of them, from the one after ``after``."""
        self.error, self.kinds, self.left, self.times = error, kinds, after, times

    def disarm(self) -> None:
        self.error = self.times = 0


class UseFile(MemoryFile):
    """A handle whose operations are moments."""

    __slots__ = ()
    _disk: UseDisk

    def read(self, offset: int, size: int) -> bytes:
        self._disk.step("read", self._name)
        return super().read(offset, size)

    def write(self, offset: int, *parts: bytes) -> None:
        self._disk.step("write", self._name)
        self._disk.reserve(self._node.size, max(self._node.size, offset + sum(map(len, parts))))
        super().write(offset, *parts)

    def grow(self, size: int, *, fill: bool = True) -> Buffer:
        self._disk.step("grow", self._name)
        self._disk.reserve(self._node.size, max(size, self._node.size))
        return super().grow(size, fill=fill)

    def truncate(self, size: int) -> None:
        self._disk.step("truncate", self._name)
        super().truncate(size)

    def sync(self) -> None:
        try:
            self._disk.step("sync", self._name)
        except OSError:
            self.fail_sync()
            raise
        super().sync()


class UseDirectory(MemoryDirectory):
    """A folder whose operations are moments."""

    __slots__ = ()
    _disk: UseDisk

    def names(self) -> list[str]:
        self._disk.step("names", self.path)
        return super().names()

    def open(self, name: str, *, write: bool = False, linked: bool = False) -> MemoryFile:
        self._disk.step("open", name)
        file = super().open(name, write=write, linked=linked)
        return UseFile(self._disk, file._node, name, writable=write)

    def create(self, name: str) -> MemoryFile:
        self._disk.step("create", name)
        file = super().create(name)
        return UseFile(self._disk, file._node, name, writable=True)

    def rename(self, old: str, new: str) -> None:
        self._disk.step("rename", old)
        super().rename(old, new)

    def unlink(self, name: str) -> None:
        self._disk.step("unlink", name)
        super().unlink(name)

    def sync(self) -> None:
        self._disk.step("sync_directory", self.path)
        super().sync()

    def lock(self, name: str, *, wait: bool = False) -> MemoryLock:
        self._disk.step("lock", name)
        return super().lock(name, wait=wait)


class UseDisk(MemoryDisk):
    """What one process sees. ``MemoryDisk.kill`` ends that process alone."""

    def __init__(self, shared: UseDisk | None = None) -> None:
        super().__init__()
        self.trouble: Trouble = shared.trouble if shared is not None else Trouble()
        self.waited = 0
        if shared is not None:
            self.folders = shared.folders

    def step(self, kind: str, name: str) -> None:
        trouble = self.trouble
        trouble.counts[kind] += 1
        if trouble.meanwhile_in and trouble.aim in ("", kind):
            trouble.meanwhile_in -= 1
            if not trouble.meanwhile_in and trouble.meanwhile is not None:
                trouble.meanwhile()
        if trouble.times and kind in trouble.kinds:
            if trouble.left:
                trouble.left -= 1
            else:
                trouble.times -= 1
                trouble.fired += 1
                trouble.ever_fired += 1
                raise OSError(trouble.error, os.strerror(trouble.error), name)

    def reserve(self, before: int, after: int) -> None:
        """Raise ENOSPC if a file can't become so large."""
        trouble = self.trouble
        if trouble.blocks is None:
            return
        more = -(-after // BLOCK) + (-before // BLOCK)
        if more > 0 and self.used_blocks() + more > trouble.blocks:
            trouble.refused_blocks += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def used_blocks(self) -> int:
        nodes = {id(node): node for folder in self.folders.values() for node in folder.names.values()}
        return sum(-(-node.size // BLOCK) for node in nodes.values())

    def directory(self, path: str, *, create: bool = False) -> MemoryDirectory:
        self.step("directory", path)
        return UseDirectory(self, super().directory(path, create=create)._folder)

    def kill(self) -> None:
        self.life.alive = False
        self.life = Life()

    def _wait(self) -> None:
        """A step of another process stands in the middle of a call of the one that has the lock."""
        self.waited += 1
        raise OSError(errno.EINTR, os.strerror(errno.EINTR))
