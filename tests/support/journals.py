"""Journals of every kind for the tests of reading, and the rows that they must show."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from kestrelpy import JournaledQueue, Record, scan
from kestrelpy._journal.file_names import lasting_name
from kestrelpy.testing import ManualClock

ROW = tuple[Any, ...]
LAST_MS = 253_402_300_799_999
"""The end of the year 9999: a later expiry is shown as this."""


def fill(queue: JournaledQueue, rnd: random.Random, count: int, *, largest: int = 300) -> None:
    """Plain items, empty ones, some that expire, batches of both kinds."""
    for _ in range(count):
        kind = rnd.random()
        size = rnd.choice([0, rnd.randrange(40), rnd.randrange(1, largest)])
        if kind < 0.05:
            items = [rnd.randbytes(rnd.randrange(30)) for _ in range(rnd.randrange(1, 40))]
            queue.put_many(items, expires_in=rnd.choice([None, 60.0]))
        elif kind < 0.15:
            queue.put(rnd.randbytes(size), expires_in=rnd.randrange(1, 100))
        else:
            queue.put(rnd.randbytes(size))


def fill_over_time(queue: JournaledQueue, clock: ManualClock) -> None:
    """Six hundred puts, thirty each second of ``clock``: several segments of 16 KiB."""
    rnd = random.Random(3)
    for _ in range(20):
        fill(queue, rnd, 30)
        clock.advance(1)


def row_of(record: Record) -> ROW:
    """A record of ``scan`` as the row that Spark and Arrow show, instants in microseconds."""
    expires = None if record.expires_ms is None else min(record.expires_ms, LAST_MS) * 1000
    return (record.id, record.added_ms * 1000, expires, record.error_count, record.data, lasting_name(record.segment))


def scanned(folder: Path, queue: str = "jobs", **options: Any) -> list[ROW]:
    """What ``scan`` shows."""
    return [row_of(record) for record in scan(folder, queue, **options)]
