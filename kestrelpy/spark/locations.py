"""Where files are and tasks run: folders of this machine as Spark names them, and how many tasks a session runs."""

from __future__ import annotations

import errno
import os
import platform
import re
from typing import TYPE_CHECKING

from kestrelpy.errors import KestrelError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
_SLOT_SETTINGS = ("spark.sql.leafNodeDefaultParallelism", "spark.default.parallelism")


class FilesNotSeen(KestrelError, FileNotFoundError):
    """What was planned to be read at ``path`` is not seen by the process that is to read it; ``reason`` says why that
    is not taken for "nothing to read".
    """

    def __init__(self, path: str, reason: str) -> None:
        message = (
            f"{platform.node() or 'this machine'} does not see what was planned to be read: {reason}. Every executor "
            'must see the same folder under this path (docs/spark.md, "On a cluster")'
        )
        super().__init__(errno.ENOENT, message, path)
        self.path = path
        self.reason = reason


def local_folder(place: str | os.PathLike[str]) -> str:
    """The absolute path of a folder of this machine: of a path, or of a ``file:`` URI, which Spark makes of paths
    (``file:/data``, ``file:///data``) and in which, as everywhere in Spark, ``%20`` is no space. A relative path is
    taken from where this process was started.

    Raises ``ValueError``, with a sentence, for any other scheme.
    """
    name = os.fspath(place)
    found = _SCHEME.fullmatch(name)
    if found is None:
        return os.path.abspath(name)
    scheme, rest = found.groups()
    if scheme.lower() != "file":
        raise ValueError(
            f"{name!r} is not a folder of this machine, and a queue is in one (a path, or file:/path). "
            "Of what is elsewhere, archive_to_parquet reads archives"
        )
    path = rest[2:] if rest.startswith("//") else rest
    if not path.startswith("/"):
        raise ValueError(f"{name!r} is no folder: after file: comes an absolute path, and no other machine's name")
    return os.path.abspath(path)


def slots(spark: SparkSession) -> int:
    """How many tasks the session runs at a time, about. Through Spark Connect there is no ``SparkContext`` to ask, and
    what is set is what is known.
    """
    try:
        return int(spark.sparkContext.defaultParallelism)
    except Exception:  # it is PySpark's own that says so
        for name in _SLOT_SETTINGS:
            configured = spark.conf.get(name, None)
            if configured is not None and configured.isdigit() and int(configured) > 0:
                return int(configured)
    return os.cpu_count() or 2
