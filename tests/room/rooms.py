"""Queues of small segments on a disk in memory, with a clock that stands still, for the tests of this folder."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from kestrelpy import JournaledQueue, KestrelError, Reader, ReaderConfig, open_reader
from kestrelpy._journal.file_names import segments_among
from kestrelpy.testing import ManualClock, MemoryDisk

START_MS = 1_700_000_000_000
ITEM = b"x" * 1000
"""Three of these fill a segment."""
SEGMENT = 4096


class Rooms:
    """One folder, in which one queue is opened again and again."""

    def __init__(self) -> None:
        self.clock = ManualClock(START_MS)
        self.disk: Any = MemoryDisk()
        self._opened: list[JournaledQueue | Reader] = []

    def open(self, **options: Any) -> JournaledQueue:
        chosen: dict[str, Any] = {"segment_bytes": SEGMENT, "sync": "never", "clock": self.clock, "disk": self.disk}
        queue = JournaledQueue("/q", "jobs", **{**chosen, **options})
        self._opened.append(queue)
        return queue

    def elsewhere(self, config: ReaderConfig | None = None, name: str = "audit") -> Reader:
        """A reader of the queue as another process has it."""
        reader = open_reader(
            "/q", "jobs", name, config=config, create=True, start="earliest", clock=self.clock, disk=self.disk
        )
        self._opened.append(reader)
        return reader

    def close(self) -> None:
        """Close what a test that failed has left open."""
        for each in reversed(self._opened):
            with contextlib.suppress(KestrelError, OSError):
                each.close()

    def look(self) -> None:
        """Let the queue look once, and maintain itself."""
        self.clock.advance(1)

    def names(self, folder: str = "/q") -> list[str]:
        """The names of the segments in a folder, in order."""
        directory = self.disk.directory(folder, create=True)
        try:
            return [name for _, name in segments_among(directory.names(), "jobs")]
        finally:
            directory.close()


def feed(queue: JournaledQueue, count: int, *, each: float = 0, clock: ManualClock | None = None) -> None:
    """Put ``count`` items, and let ``each`` seconds pass after each."""
    for _ in range(count):
        queue.put(ITEM)
        if clock is not None:
            clock.advance(each)


def drain(reader: Reader | JournaledQueue, count: int) -> list[int]:
    """Get and commit ``count`` items; their ids."""
    ids = []
    for _ in range(count):
        item = reader.get(block=False)
        item.commit()
        ids.append(item.id)
    return ids


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged since the last call."""
    said = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return said
