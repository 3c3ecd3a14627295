"""Reads queues into Spark: batch reads and streaming queries. The driver plans, executors read."""
