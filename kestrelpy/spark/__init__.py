"""kestrelpy and PySpark: queues as DataFrames and streams, and results back into queues.

``register(spark)`` makes the format ``"kestrel"`` known to a session; ``local_session()`` builds one that works out of
the box. Needs the extra ``[spark]`` and Java 17 or 21. docs/spark.md is the guide.
"""

from __future__ import annotations

from kestrelpy.spark.session import JavaMissing, local_session, register

__all__ = ["JavaMissing", "local_session", "register"]
