"""A store in a folder: of another disk, or of another host over a network file system.

An object is written to a temporary file, synced, and then linked to its name, which fails if the name is taken; then
the folder is synced. So an object is there as a whole or not at all, also after a power cut.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from kestrelpy._disk.interface import Directory, Disk
from kestrelpy._disk.real import RealDisk
from kestrelpy.ship.errors import StoreUnavailable
from kestrelpy.ship.store import Listed, Listing

_TEMPORARY = ".tmp"
_LEFTOVER_MS = 24 * 3600 * 1000
"""A temporary file that is older than the newest object of its folder by this much was left by a crash."""


class FolderStore:
    """A ``Store`` in a folder, which is made if it is missing. A key is a path below it.

    ``disk``: by default the file systems of this machine, also network ones. Whether links are atomic on one of these
    is what ``check`` finds out.
    """

    def __init__(self, path: str, *, disk: Disk | None = None) -> None:
        self._path = path.rstrip("/")
        self._disk = disk or RealDisk(allow_network=True, mapped=False)

    def __repr__(self) -> str:
        return f"FolderStore({self._path!r})"

    def describe(self) -> str:
        return f"file://{self._path}"

    def create(self, key: str, data: bytes) -> bool:
        try:
            with self._folder(key, create=True) as (folder, name):
                temporary = f".{name}.{os.urandom(8).hex()}{_TEMPORARY}"
                try:
                    self._write(folder, temporary, data)
                    created = _link(folder, temporary, name)
                finally:
                    with contextlib.suppress(FileNotFoundError):
                        folder.unlink(temporary)
                folder.sync()  # if another one has just created it as well: its name must be on disk when we say so
                return created
        except OSError as error:
            raise self._unavailable(key, error) from error

    def _write(self, folder: Directory, name: str, data: bytes) -> None:
        file = folder.create(name)
        try:
            file.write(0, data)
            file.sync()
        finally:
            file.close()

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        try:
            with self._folder(key) as (folder, name):
                folder.status(name)  # a folder is no object
                file = folder.open(name, linked=True)  # its temporary name is there for a moment, or since a crash
                try:
                    size = max(file.size() - start, 0)
                    return file.read(start, size if length is None else min(length, size))
                finally:
                    file.close()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError as error:
            raise self._unavailable(key, error) from error

    def list(self, prefix: str) -> Listing:
        try:
            return sorted(self._below(prefix))
        except OSError as error:
            raise self._unavailable(prefix, error) from error

    def _below(self, prefix: str) -> Iterator[Listed]:
        """One open folder at a time, however deep they are: whoever writes the store makes them."""
        waiting = [prefix]
        while waiting:
            below = waiting.pop()
            try:
                folder = self._disk.directory(f"{self._path}/{below}".rstrip("/"))
            except (FileNotFoundError, NotADirectoryError):
                continue
            try:
                for name in folder.names():
                    if name.startswith("."):
                        continue
                    try:
                        status = folder.status(name)
                    except IsADirectoryError:
                        waiting.append(f"{below}{name}/")
                    except FileNotFoundError:  # deleted meanwhile
                        pass
                    else:
                        if status is not None:
                            yield Listed(f"{below}{name}", *status)
            finally:
                folder.close()

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, and what crashes have left of creations in their folders."""
        swept: set[str] = set()
        for key in keys:
            parent = key.rpartition("/")[0]
            try:
                with self._folder(key) as (folder, name):
                    if parent not in swept:
                        swept.add(parent)
                        _sweep(folder)
                    folder.unlink(name)
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError as error:
                raise self._unavailable(key, error) from error

    @contextlib.contextmanager
    def _folder(self, key: str, *, create: bool = False) -> Iterator[tuple[Directory, str]]:
        """The open folder of an object, and the object's name there."""
        parent, _, name = key.rpartition("/")
        folder = self._disk.directory(f"{self._path}/{parent}".rstrip("/"), create=create)
        try:
            yield folder, name
        finally:
            folder.close()

    def _unavailable(self, key: str, error: OSError) -> StoreUnavailable:
        return StoreUnavailable(self.describe(), key, error.strerror or type(error).__name__)


def _link(folder: Directory, temporary: str, name: str) -> bool:
    try:
        folder.link(temporary, name)
    except FileExistsError:
        return False
    return True


def _sweep(folder: Directory) -> None:
    """Remove what was left a day ago, by the dates of the file system alone."""
    dates: dict[str, int] = {}
    for name in folder.names():
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            status = folder.status(name)
            if status is not None:
                dates[name] = status.modified_ms
    newest = max(dates.values(), default=0)
    for name, modified_ms in dates.items():
        if name.startswith(".") and name.endswith(_TEMPORARY) and modified_ms < newest - _LEFTOVER_MS:
            with contextlib.suppress(FileNotFoundError):
                folder.unlink(name)
