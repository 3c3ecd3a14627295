"""Reads queues into Spark: batch reads and streaming queries. The driver plans, executors read.

``batch`` and ``stream`` are what Spark calls. ``kestrelpy.arrow`` finds the segments that are needed, and reads them.
``plan`` says which task reads which, ``pushdown`` what filters and options ask for, and ``run_counter`` counts frames
for a stream. In an executor, ``part`` is what a task reads.
"""
