"""Micro-batches of items that producers in the driver put, for a driver without a streaming query."""
