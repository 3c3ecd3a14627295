"""An archive: a folder of closed segments that were consumed, of one queue or of several that had its name one after
another. Some may be gone for good, so no segment has to lead to the next.
"""

from __future__ import annotations

from kestrelpy._disk.interface import Directory
from kestrelpy._journal import file_names
from kestrelpy._journal import format as fmt
from kestrelpy._journal.salvage import Salvage
from kestrelpy._journal.segment import open_segment, read_footer

ARCHIVE = "archive"
"""The kind of such a folder, in reports."""


def is_archive(folder: Directory, names: list[str], queue: str) -> bool:
    """Whether a folder with these ``names`` is an archive of ``queue``: it has segments, of which the last one is
    closed, and nothing that an owner or a reader leaves there. Raises ``OSError``.
    """
    numbered = file_names.segments_among(names, queue)
    mine = file_names.but_for_locks(names, queue) - {name for _, name in numbered} - {file_names.repair_name(queue)}
    others = {name for name in mine if not name.endswith((".quarantine", ".tmp"))}
    if not numbered or others or file_names.lock_name(queue) in names:
        return False
    file = open_segment(folder, numbered[-1][1])
    try:
        header = fmt.decode_header(file.read(0, fmt.HEADER_BYTES))
        return header is not None and read_footer(file, header) is not None
    finally:
        file.close()


def look_at_archive(folder: Directory, queue: str, names: list[str]) -> list[Salvage]:
    """What is in an archive: one for each queue, the newest first. Raises ``UnsupportedFormat``, ``OSError``."""
    first = Salvage(folder, queue, (), is_archive=True)
    first.run(names)
    found = [first]
    for queue_id in sorted(first.other_ids):
        other = Salvage(folder, queue, (), is_archive=True, queue_id=queue_id)
        other.run(names)
        found.append(other)
    return found
