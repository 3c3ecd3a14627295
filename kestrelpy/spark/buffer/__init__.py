"""Micro-batches of items that producers in the driver put, for a driver without a streaming query.

``driver_buffer`` is what users call. ``drain`` takes a batch from a reader, ``batch_plan`` remembers which items it
has, and ``rows`` makes a DataFrame of them.
"""
