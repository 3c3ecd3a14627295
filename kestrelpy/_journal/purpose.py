"""What a queue's journal is for: items, or the jobs of a ``kestrelpy.work.WorkQueue``. A file shows it: ``NAME.work``.

Rules:
1. A journal with that file beside it belongs to a work queue. Only that the file is there counts, not its content: so
   it is never half written. What a work queue keeps in it is its own business (``kestrelpy.work``).
2. The file is on disk before a work queue writes anything else, and it is deleted last, except for the locks: at no
   time does the journal of a work queue look like that of another queue.
3. Code that opens, feeds or drains a queue looks for the file first, and refuses the wrong kind with ``WrongKind``.
   Code that only reads records may continue.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from kestrelpy._disk.interface import Directory, Disk, File
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal.checkpoint import replace_file
from kestrelpy._journal.file_names import work_name
from kestrelpy._journal.small_files import make_sign
from kestrelpy.errors import WrongKind

ITEMS, JOBS = "queue", "work queue"
_FOR_PEOPLE = b"The journal beside this file holds the jobs of a work queue: open it with kestrelpy.work.WorkQueue.\n"


def kind_of(names: Iterable[str], queue: str) -> str:
    """The kind of the queue, by the ``names`` in its folder: ``"queue"`` or ``"work queue"``."""
    return JOBS if work_name(queue) in names else ITEMS


def refuse_jobs(folder: Directory, queue: str, names: Iterable[str] | None = None) -> None:
    """Raise ``WrongKind`` if the queue is a work queue. ``names``: the files in the folder, if they are known."""
    if kind_of(folder.names() if names is None else names, queue) == JOBS:
        raise WrongKind(f"{folder.path}/{queue}", JOBS)


def refuse_jobs_in(directory: str | os.PathLike[str], queue: str, disk: Disk | None = None) -> None:
    """``refuse_jobs`` for a caller that has not opened the folder, which need not exist. Raises ``OSError``."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        folder = (disk or RealDisk(allow_network=True)).directory(os.fspath(directory))
        try:
            refuse_jobs(folder, queue)
        finally:
            folder.close()


def renew_mark(folder: Directory, queue: str) -> None:
    """Make the queue a work queue, or let it be one without what it has kept in the file. Durable when this returns.
    Raises ``OSError``.
    """
    replace_file(folder, work_name(queue), _FOR_PEOPLE)


def mark_as_jobs(folder: Directory, queue: str) -> None:
    """Make the queue a work queue; durable when this returns. Raises ``OSError``."""
    try:
        make_sign(folder, work_name(queue), _FOR_PEOPLE)
    except FileExistsError:  # perhaps its maker was killed before it could sync the folder
        folder.sync()


class Purpose:
    """The kind of one queue that is open here."""

    def __init__(self, folder: Directory, queue: str) -> None:
        self._folder = folder
        self._queue = queue

    def kind(self) -> str:
        """``"queue"`` or ``"work queue"``, by the files in the folder."""
        return kind_of(self._folder.names(), self._queue)

    def mark(self) -> None:
        """``mark_as_jobs``."""
        mark_as_jobs(self._folder, self._queue)

    def open_mark(self) -> File:
        """Open the file ``NAME.work``, for what the work queue keeps in it. Raises ``OSError``."""
        return self._folder.open(work_name(self._queue), write=True)
