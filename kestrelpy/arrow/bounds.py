"""The range of a read, as callers give it: ids, and times as aware datetimes or milliseconds.

A start is inclusive and an end is exclusive, as in ``scan`` and in Spark's options ``startId`` to ``endTime``.
"""

from __future__ import annotations

import operator
from datetime import UTC, datetime, timedelta
from typing import SupportsIndex, TypeAlias

from kestrelpy.arrow.wanted import Wanted

Instant: TypeAlias = datetime | int
"""An aware datetime, or milliseconds since the Unix epoch."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def wanted_of(start_id: int | None, end_id: int | None, start: Instant | None, end: Instant | None) -> Wanted:
    """The items of the range. ``None`` is no bound. Raises ``ValueError``, ``TypeError``."""
    wanted = Wanted()
    if start_id is not None:
        wanted = wanted.ids_from(_id("start_id", start_id))
    if end_id is not None:
        wanted = wanted.ids_before(_id("end_id", end_id))
    if start is not None:
        wanted = wanted.added_from(_milliseconds("start_time", start))
    return wanted if end is None else wanted.added_before(_milliseconds("end_time", end))


def _id(name: str, value: SupportsIndex) -> int:
    number = _whole(value)
    if number is None:
        raise TypeError(f"{name!r} must be an id, not {value!r}")
    if number < 0:
        raise ValueError(f"{name!r} must not be negative, not {number}")
    return number


def _milliseconds(name: str, value: Instant) -> int:
    """The first millisecond at or after ``value``: items are added at whole milliseconds."""
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise ValueError(f"{name!r} must have a time zone, such as datetime.UTC: {value!r} has none")
        return -(-((value - _EPOCH) // timedelta(microseconds=1)) // 1000)
    number = _whole(value)
    if number is None:
        raise TypeError(f"{name!r} must be a datetime or milliseconds since 1970, not {value!r}")
    return number


def _whole(value: SupportsIndex) -> int | None:
    """A whole number; ``None`` for anything else. ``True`` is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
