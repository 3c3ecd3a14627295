"""Queues in PySpark: read and streamed as DataFrames, and written from DataFrames.

``register(spark)`` makes the format ``"kestrel"`` known to a session. ``local_session()`` builds a session that works
out of the box. This needs the extra ``[spark]`` and Java 17 or 21. docs/spark.md is the guide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kestrelpy.arrow.errors import FilesNotSeen
from kestrelpy.spark.session import JavaMissing, local_session, register

if TYPE_CHECKING:
    from kestrelpy.spark.buffer.driver_buffer import DriverBuffer
    from kestrelpy.spark.buffer.rows import UndecodableItem
    from kestrelpy.spark.lake.conversion import LAKE_SCHEMA, LakeSummary, archive_to_parquet
    from kestrelpy.spark.read.stream import DataLoss
    from kestrelpy.spark.report.load_report import LoadReport, NothingToReport, load_report
    from kestrelpy.spark.write.targets import SinkMistake

__all__ = [
    "LAKE_SCHEMA",
    "DataLoss",
    "DriverBuffer",
    "FilesNotSeen",
    "JavaMissing",
    "LakeSummary",
    "LoadReport",
    "NothingToReport",
    "SinkMistake",
    "UndecodableItem",
    "archive_to_parquet",
    "load_report",
    "local_session",
    "register",
]

_LATER = {
    "DataLoss": "read.stream",
    "DriverBuffer": "buffer.driver_buffer",
    "LAKE_SCHEMA": "lake.conversion",
    "LakeSummary": "lake.conversion",
    "LoadReport": "report.load_report",
    "NothingToReport": "report.load_report",
    "SinkMistake": "write.targets",
    "UndecodableItem": "buffer.rows",
    "archive_to_parquet": "lake.conversion",
    "load_report": "report.load_report",
}
"""Names that are imported at their first use. So this package can be imported without pyarrow and PySpark, and a
session can say what is missing.
"""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
