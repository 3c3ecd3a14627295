"""A disk in memory that has so many blocks and no more, for tests of what is full."""

from __future__ import annotations

import errno
import os

from kestrelpy._disk.interface import Buffer
from kestrelpy._disk.memory import MemoryDirectory, MemoryDisk, MemoryFile, Node

BLOCK = 4096


class SmallDisk(MemoryDisk):
    """Files take whole blocks. ``room``: how many blocks are free; what is removed or cut gives its blocks back."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.refused = 0
        """How often there was no room."""

    def directory(self, path: str, *, create: bool = False) -> SmallDirectory:
        found = super().directory(path, create=create)
        return SmallDirectory(self, found._folder)

    def fill(self) -> None:
        """Somebody else takes the rest."""
        self.room = 0

    def take(self, node: Node, size: int) -> None:
        """Room for a file that is to have so many bytes."""
        needed = blocks(size) - blocks(node.size)
        if needed > max(self.room, 0):
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= needed


class SmallDirectory(MemoryDirectory):
    """A folder of a small disk."""

    __slots__ = ()
    _disk: SmallDisk

    def open(self, name: str, *, write: bool = False, linked: bool = False) -> SmallFile:
        found = super().open(name, write=write, linked=linked)
        return SmallFile(self._disk, found._node, name, writable=write)

    def create(self, name: str) -> SmallFile:
        found = super().create(name)
        return SmallFile(self._disk, found._node, name, writable=True)

    def unlink(self, name: str) -> None:
        node = self._find(name)
        super().unlink(name)
        self._disk.room += blocks(node.size)

    def rename(self, old: str, new: str) -> None:
        replaced = self._folder.names.get(new)
        super().rename(old, new)
        if replaced is not None:
            self._disk.room += blocks(replaced.size)


class SmallFile(MemoryFile):
    """A file of a small disk."""

    __slots__ = ()
    _disk: SmallDisk

    def write(self, offset: int, *parts: bytes) -> None:
        self._disk.take(self._node, max(self._node.size, offset + sum(map(len, parts))))
        super().write(offset, *parts)

    def grow(self, size: int, *, fill: bool = True) -> Buffer:
        self._disk.take(self._node, max(self._node.size, size))
        return super().grow(size, fill=fill)

    def truncate(self, size: int) -> None:
        self._disk.take(self._node, size)
        super().truncate(size)


def blocks(size: int) -> int:
    return -(-size // BLOCK)
