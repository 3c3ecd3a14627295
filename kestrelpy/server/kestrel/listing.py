"""``ListedDisk``: a disk whose folders are listed once, while a server opens the queues in its folder.

Each opening of a queue lists the folder, to find its own files among those of all queues: for a thousand queues, that
would be thousands of listings of ten thousand names. The server owns all queues in the folder, so what it changes
itself is all that changes, but for readers in other processes: they come and go at any time, and an opening that does
not see one is one that was a little earlier.
"""

from __future__ import annotations

from kestrelpy._disk.interface import Directory, Disk, File, FileStatus, Lock

__all__ = ["ListedDisk"]


class ListedDisk:
    """A disk, and the names in its folders as they were listed first and changed since. ``stop``: it lists again."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.listings: dict[str, set[str]] | None = {}

    def stop(self) -> None:
        """From now on, each listing is a new one."""
        self.listings = None

    def directory(self, path: str, *, create: bool = False) -> Directory:
        return ListedDirectory(self, self._disk.directory(path, create=create))


class ListedDirectory:
    """One folder of a ``ListedDisk``."""

    def __init__(self, disk: ListedDisk, real: Directory) -> None:
        self._disk = disk
        self.real = real

    @property
    def path(self) -> str:
        return self.real.path

    def check_place(self) -> None:
        self.real.check_place()

    def _listing(self) -> set[str] | None:
        listings = self._disk.listings
        if listings is None:
            return None
        if self.path not in listings:
            listings[self.path] = set(self.real.names())
        return listings[self.path]

    def _changed(self, gone: str | None, new: str | None) -> None:
        listing = self._listing()
        if listing is not None:
            if gone is not None:
                listing.discard(gone)
            if new is not None:
                listing.add(new)

    def names(self) -> list[str]:
        listing = self._listing()
        return self.real.names() if listing is None else list(listing)

    def open(self, name: str, *, write: bool = False, linked: bool = False) -> File:
        return self.real.open(name, write=write, linked=linked)

    def status(self, name: str) -> FileStatus | None:
        return self.real.status(name)

    def create(self, name: str) -> File:
        self._changed(None, name)
        return self.real.create(name)

    def rename(self, old: str, new: str) -> None:
        self.real.rename(old, new)
        self._changed(old, new)

    def exchange(self, one: str, other: str) -> None:
        self.real.exchange(one, other)

    def link(self, old: str, new: str) -> None:
        self.real.link(old, new)
        self._changed(None, new)

    def move(self, name: str, target: Directory, new: str) -> None:
        self.real.move(name, target.real if isinstance(target, ListedDirectory) else target, new)
        self._changed(name, None)
        if isinstance(target, ListedDirectory):
            target._changed(None, new)

    def unlink(self, name: str) -> None:
        self.real.unlink(name)
        self._changed(name, None)

    def sync(self) -> None:
        self.real.sync()

    def lock(self, name: str, *, wait: bool = False) -> Lock:
        lock = self.real.lock(name, wait=wait)
        self._changed(None, name)
        return lock

    def close(self) -> None:
        self.real.close()
