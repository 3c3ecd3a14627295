"""The error of a read whose files are not where they were when it was planned."""

from __future__ import annotations

import errno
import platform

from kestrelpy.errors import KestrelError


class FilesNotSeen(KestrelError, FileNotFoundError):
    """This process must read ``path``, as planned, and does not see it.

    ``reason`` says why this does not count as "nothing to read".
    """

    def __init__(self, path: str, reason: str) -> None:
        message = (
            f"{platform.node() or 'this machine'} does not see what was planned to be read: {reason}. Every process "
            'that reads must see the same folder under this path (executors of Spark: docs/spark.md, "On a cluster")'
        )
        super().__init__(errno.ENOENT, message, path)
        self.path = path
        self.reason = reason
