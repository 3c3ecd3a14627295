"""Reads queues into Spark: batch reads and streaming queries. The driver plans, executors read.

``batch`` and ``stream`` are what Spark calls. ``plan`` finds the segments that are needed, ``pushdown`` what filters
and options ask for, ``seek`` the bytes of a segment that hold it, and ``run_counter`` counts frames for a stream. In an
executor, ``part`` reads a segment, ``decode`` turns its bytes into items, and ``columns`` into Arrow columns.
"""
