"""Archives for the tests of the lake and of the report: segments that were put, read and archived, in a short time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

from kestrelpy import JournaledQueue, QueueEmpty
from kestrelpy.testing import ManualClock
from tests.support.queues import START_MS

DAY_MS = 86_400_000


class Row(NamedTuple):
    """One item that was archived."""

    queue: str
    id: int
    added_ms: int
    expires_ms: int | None
    data: bytes


def make_archive(folder: Path, queue: str = "jobs", *, items: int = 300, days: float = 2.5, seed: int = 1) -> list[Row]:
    """Put ``items`` items into ``queue`` over ``days`` days, read them all, and have their segments archived in
    ``folder / "archive"``; what they were.
    """
    draw = random.Random(seed)
    clock = ManualClock(START_MS)
    rows: list[Row] = []
    options: dict[str, Any] = {
        "segment_bytes": 4096,
        "archive_dir": folder / "archive",
        "clock": clock,
        "sync": "never",
    }
    options["inbox_interval"] = None  # days go by, and it would be looked at twice a second
    with JournaledQueue(folder / "queues", queue, **options) as journal:
        while len(rows) < items:
            now_ms = clock.time_ns() // 1_000_000
            expires_ms = now_ms + DAY_MS if draw.random() < 0.3 else None
            some = [draw.randbytes(draw.choice((0, 10, 100))) for _ in range(draw.choice((1, 1, 9)))]
            ids = journal.put_many(some, expires_at_ms=expires_ms)
            rows += [Row(queue, each, now_ms, expires_ms, data) for each, data in zip(ids, some, strict=True)]
            take(journal)
            clock.advance(days * len(some) * 86_400 / items)
    with JournaledQueue(folder / "queues", queue, **options) as journal:
        take(journal)
        journal.put(b"the segment that is begun lets go of the one before")
        take(journal)
        journal.checkpoint(durable=True)
    return rows


def take(journal: JournaledQueue) -> None:
    """Read and commit all there is."""
    try:
        while True:
            journal.commit_many(journal.get_many(1000, timeout=0))
    except QueueEmpty:
        return


def archived(folder: Path) -> list[Path]:
    """The segments in the archive, in order."""
    return sorted((folder / "archive").glob("*.segment"))
