"""Where a queue is shipped, and the end of that, without opening the queue: ``shipped_to`` and ``detach``."""

from __future__ import annotations

import os

from kestrelpy._disk.interface import Directory, Disk
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal.file_names import check_name, ship_name
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy.ship.ship_file import read_ship_file, remove_ship_file

__all__ = ["detach", "shipped_to"]


def shipped_to(directory: str | os.PathLike[str], queue: str, *, disk: Disk | None = None) -> str | None:
    """The URL that the queue in ``directory`` is shipped to; ``None`` if it is not shipped, or is not there.

    Read-only, takes no lock, and asks no store. Raises ``CorruptJournal`` if the file that says so is damaged,
    ``UnsupportedFormat``, ``InvalidName``, ``OSError``.
    """
    check_name(queue)
    folder = _folder(directory, disk)
    try:
        file = read_ship_file(folder, queue)
        return None if file is None else file.url
    finally:
        folder.close()


def detach(directory: str | os.PathLike[str], queue: str, *, disk: Disk | None = None) -> bool:
    """Let the queue in ``directory`` be shipped no more, as an opening with ``ship=False`` does. Nothing is opened but
    the folder, and no store is asked: it may be away. What is in the store stays.

    Returns whether the queue was shipped. When this returns, that it is not is on disk. Also helps where the file that
    says where it is shipped is damaged. Raises ``QueueLocked`` if the queue is open, ``RestoreIncomplete``,
    ``InvalidName``, ``OSError``.
    """
    check_name(queue)
    folder = _folder(directory, disk)
    try:
        name = ship_name(queue)
        if name not in folder.names():
            return False
        lock, names = QueueFiles(folder, queue).lock()
        try:
            if name not in names:
                return False
            remove_ship_file(folder, queue)
            return True
        finally:
            lock.release()
    finally:
        folder.close()


def _folder(directory: str | os.PathLike[str], disk: Disk | None) -> Directory:
    return (disk or RealDisk()).directory(os.fspath(directory))
