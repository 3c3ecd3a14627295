"""kestrelpy and PySpark: queues as DataFrames and streams, and results back into queues.

``register(spark)`` makes the format ``"kestrel"`` known to a session; ``local_session()`` builds one that works out of
the box. Needs the extra ``[spark]`` and Java 17 or 21. docs/spark.md is the guide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kestrelpy.spark.session import JavaMissing, local_session, register

if TYPE_CHECKING:
    from kestrelpy.spark._part import FilesNotSeen
    from kestrelpy.spark.buffer import DriverBuffer, UndecodableItem
    from kestrelpy.spark.lake import LAKE_SCHEMA, LakeSummary, archive_to_parquet
    from kestrelpy.spark.report import LoadReport, NothingToReport, load_report

__all__ = [
    "LAKE_SCHEMA",
    "DriverBuffer",
    "FilesNotSeen",
    "JavaMissing",
    "LakeSummary",
    "LoadReport",
    "NothingToReport",
    "UndecodableItem",
    "archive_to_parquet",
    "load_report",
    "local_session",
    "register",
]

_LATER = {
    "DriverBuffer": "buffer",
    "FilesNotSeen": "_part",
    "LAKE_SCHEMA": "lake",
    "LakeSummary": "lake",
    "LoadReport": "report",
    "NothingToReport": "report",
    "UndecodableItem": "buffer",
    "archive_to_parquet": "lake",
    "load_report": "report",
}
"""What is imported when it is asked for: without pyarrow and PySpark, a session can say what is missing."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
