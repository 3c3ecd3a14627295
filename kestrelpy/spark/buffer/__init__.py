"""Micro-batches of what producers in the driver put, for a driver without a streaming query."""
