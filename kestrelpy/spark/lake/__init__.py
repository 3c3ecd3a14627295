"""Archived segments as Parquet, partitioned by queue and day.

``conversion`` does it, each segment once. ``archived`` reads a segment of an archive, ``parquet`` writes the files of a
day, and ``store`` is the file system that holds them.
"""
