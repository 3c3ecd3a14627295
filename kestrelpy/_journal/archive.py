"""The archive: closed segments move there when no reader needs them any more (R6)."""

from __future__ import annotations

import contextlib
import errno

from kestrelpy._disk.interface import Directory
from kestrelpy._journal import format as fmt
from kestrelpy._journal.file_names import archived_name, segment_name
from kestrelpy._journal.segment import MARK_EVERY, read_header


def archive_segment(directory: Directory, name: str, archive: Directory, queue: str, header: fmt.SegmentHeader) -> bool:
    """Move a closed segment into the archive (R6). False if the archive had it already: then only its twin is removed.

    Never overwrites a file. If another file has the segment's name, the segment takes a name with the queue's id.
    """
    for target in (segment_name(queue, header.number), archived_name(queue, header.number, header.queue_id)):
        is_taken, there = _look(archive, target)
        if there == header:
            with contextlib.suppress(FileNotFoundError):
                directory.unlink(name)
            directory.sync()
            return False
        if not is_taken:
            break
    else:
        raise FileExistsError(errno.EEXIST, "another file has the name of this segment in the archive", target)
    try:
        directory.move(name, archive, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy(directory, name, archive, target)
        archive.rename(f"{target}.tmp", target)
        archive.sync()
        directory.unlink(name)
    archive.sync()
    directory.sync()
    return True


def _look(archive: Directory, name: str) -> tuple[bool, fmt.SegmentHeader | None]:
    """Whether the name is taken, and the header of the segment that has it.

    An archive may have any number of files, so it is listed only if the file cannot be opened.
    """
    try:
        file = archive.open(name)
    except FileNotFoundError:
        return False, None
    except OSError:
        return name in archive.names(), None
    try:
        return True, read_header(file, f"{archive.path}/{name}")
    finally:
        file.close()


def _copy(directory: Directory, name: str, target: Directory, new: str) -> None:
    temporary = f"{new}.tmp"
    with contextlib.suppress(FileNotFoundError):
        target.unlink(temporary)
    source = directory.open(name)
    try:
        copy = target.create(temporary)
        try:
            size = source.size()
            for offset in range(0, size, MARK_EVERY):
                copy.write(offset, source.read(offset, MARK_EVERY))
            copy.sync()
        finally:
            copy.close()
    finally:
        source.close()
