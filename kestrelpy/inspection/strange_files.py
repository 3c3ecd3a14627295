"""Names of a queue's files under which there is nothing that a queue reads: a folder, a symbolic link, a pipe, or a
file that has a second name.

A hand has put it there, and what is behind a link may be intact: it is named, and no repair decides what becomes of it.
"""

from __future__ import annotations

from kestrelpy._disk.interface import NO_REGULAR_FILE, Directory
from kestrelpy._journal import file_names

WHY_NOT_READ = "this is not a regular file with one link, and is never read"


def strange_files(folder: Directory, queue: str) -> list[str]:
    """The names of these among the segments, the checkpoints and the other small files of a queue, in order. Raises
    ``OSError``, for example if a file may not be read.
    """
    names = folder.names()
    small = (file_names.mark_name(queue), file_names.work_name(queue), file_names.repair_name(queue))
    checkpoints = (file_names.checkpoint_name(queue, each) for each in file_names.readers_among(names, queue))
    wanted = {*small, *checkpoints, *(name for _, name in file_names.segments_among(names, queue))}
    return [name for name in sorted(wanted.intersection(names)) if not _is_read(folder, name)]


def _is_read(folder: Directory, name: str) -> bool:
    try:
        folder.open(name).close()
    except FileNotFoundError:  # removed, or renamed, at this moment
        return True
    except OSError as error:
        if error.errno not in NO_REGULAR_FILE:
            raise
        return False
    return True
