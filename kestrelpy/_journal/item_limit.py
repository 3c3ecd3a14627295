"""The largest item that the owner of a queue accepts, made known to processes that hand in items from outside: by the
name of a file beside the queue, ``jobs.1000.limit``.

Rules:
1. Each owner makes the file when it opens the queue, before it looks into the inbox, and removes those of earlier
   owners. The name holds all the information, so the file is never half written. It is on disk with the next sync of
   the folder: after a power cut it may be gone, as if nobody had opened the queue yet.
2. Without the file the limit is not known: whoever opens the queue ingests what was handed in, or refuses it, which is
   counted. If there are two (an owner was killed between making one and removing the other), the smaller one counts.
3. A folder in which no file can be made does not keep a queue from opening.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from kestrelpy._disk.interface import Directory, Disk
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal.file_names import limit_name, limits_among


def write_limit(folder: Directory, queue: str, names: Iterable[str], max_item_bytes: int) -> None:
    """Make known that this owner accepts items of at most ``max_item_bytes``. ``names``: the files in the folder."""
    there = limits_among(names, queue)
    with contextlib.suppress(OSError):
        if max_item_bytes not in there:
            folder.create(limit_name(queue, max_item_bytes)).close()
        for other in there - {max_item_bytes}:
            folder.unlink(limit_name(queue, other))


def limit_of(directory: str | os.PathLike[str], queue: str, disk: Disk | None = None) -> int | None:
    """The largest item that the owner accepts, in bytes; ``None`` if nobody has opened the queue yet, or only a version
    that made no such file. Raises ``OSError``.
    """
    try:
        folder = (disk or RealDisk(allow_network=True)).directory(os.fspath(directory))
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return min(limits_among(folder.names(), queue), default=None)
    finally:
        folder.close()
