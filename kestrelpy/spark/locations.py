"""Folders of this machine as Spark names them, and the number of tasks that a session runs."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
_SLOT_SETTINGS = ("spark.sql.leafNodeDefaultParallelism", "spark.default.parallelism")


def local_folder(place: str | os.PathLike[str]) -> str:
    """The absolute path of a folder of this machine, from a path or a ``file:`` URI.

    Spark turns paths into such URIs (``file:/data``, ``file:///data``). As everywhere in Spark, ``%20`` is not decoded.
    A relative path starts at the current directory of this process. Raises ``ValueError`` for any other scheme.
    """
    name = os.fspath(place)
    found = _SCHEME.fullmatch(name)
    if found is None:
        return os.path.abspath(name)
    scheme, rest = found.groups()
    if scheme.lower() != "file":
        raise ValueError(
            f"{name!r} is not a folder of this machine, and a queue is in one (a path, or file:/path), or in a store "
            "that can be read (s3://, gs://, az://, abfss://). archive_to_parquet reads archives in other places, too"
        )
    path = rest[2:] if rest.startswith("//") else rest
    if not path.startswith("/"):
        raise ValueError(f"{name!r} is no folder: after file: comes an absolute path, and no other machine's name")
    return os.path.abspath(path)


def slots(spark: SparkSession) -> int:
    """About how many tasks the session runs at a time.

    Spark Connect has no ``SparkContext`` to ask. Then the session's settings decide, or else the number of processors
    of this machine.
    """
    try:
        return int(spark.sparkContext.defaultParallelism)
    except Exception:  # PySpark raises an error of its own if there is no SparkContext
        for name in _SLOT_SETTINGS:
            configured = spark.conf.get(name, None)
            if configured is not None and configured.isdigit() and int(configured) > 0:
                return int(configured)
    return os.cpu_count() or 2
