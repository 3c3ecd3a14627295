"""Archived segments as Parquet, partitioned by queue and day."""
