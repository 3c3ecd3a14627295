"""The archive: where closed segments go that no reader needs any more (R6)."""

from __future__ import annotations

import contextlib
import errno

from kestrelpy import _format as fmt
from kestrelpy._disk import Directory
from kestrelpy._names import archived_name, segment_name
from kestrelpy._segment import MARK_EVERY, read_header


def archive_segment(directory: Directory, name: str, archive: Directory, queue: str, header: fmt.SegmentHeader) -> bool:
    """Move a closed segment into the archive (R6); false if it was there already, and only its twin was removed.

    Never overwrites: a file of that name which is not this segment makes it take a name with the queue's id.
    """
    for target in (segment_name(queue, header.number), archived_name(queue, header.number, header.queue_id)):
        there = _header_of(archive, target)
        if there == header:
            with contextlib.suppress(FileNotFoundError):
                directory.unlink(name)
            directory.sync()
            return False
        if there is None and target not in archive.names():
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


def _header_of(directory: Directory, name: str) -> fmt.SegmentHeader | None:
    try:
        file = directory.open(name)
    except OSError:
        return None
    try:
        return read_header(file, name)
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
