"""Gigabytes are put while a reader is away: each policy keeps the disk as it says, and nothing of it is silent.

The queue is on a real disk. Its clock is moved by hand, once for each 16 MB, so that what is looked at in between does
not depend on the machine. ``make test-all`` puts 10 GB, and ``make test`` 300 MB.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import JournaledQueue, LagPolicy, QueueFull, ReaderConfig
from kestrelpy.testing import ManualClock
from tests.room.rooms import START_MS, lines
from tests.support.budget import ALL, Tally

MB = 10**6
LAG, SEGMENT, BATCH = 64 * MB, 16 << 20, 16 * MB
ITEM = bytes(MB // 4)
TOTAL = 10_000 * MB if ALL else 300 * MB
MOST_KEPT = 1_000 * MB
"""``WARN`` lets the disk fill, so less is put there."""


class Away:
    """A queue whose reader ``audit`` is made, and away."""

    def __init__(self, folder: Path, policy: LagPolicy, **options: Any) -> None:
        self.clock = ManualClock(START_MS)
        config = ReaderConfig(max_lag_bytes=LAG, lag_policy=policy)
        self.folder = folder
        self.options: dict[str, Any] = {
            "readers": {"audit": config},
            "sync": "never",
            "segment_bytes": SEGMENT,
            "clock": self.clock,
        }
        self.queue = JournaledQueue(folder, "jobs", **{**self.options, **options})
        self.queue.reader("audit", start="earliest").close()
        self.most = 0

    def put(self, size: int) -> None:
        """Put so many bytes, and look each 16 MB. ``most``: the bytes that the journal has taken at most."""
        for _ in range(size // BATCH):
            for _ in range(BATCH // len(ITEM)):
                self.queue.put(ITEM)
            self.most = max(self.most, self.on_disk())
            self.clock.advance(1)

    def refused(self) -> QueueFull | None:
        """Put one item; why it was refused."""
        try:
            self.queue.put(ITEM)
        except QueueFull as full:
            return full
        return None

    def on_disk(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("*.segment"))

    def again(self) -> JournaledQueue:
        self.queue.close()
        self.queue = JournaledQueue(self.folder, "jobs", **self.options)
        return self.queue


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for path in tmp_path.glob("*.segment"):  # pytest keeps folders for a while
        path.unlink()


def test_warn_keeps_everything_and_says_so_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    away, size = Away(folder, LagPolicy.WARN), min(TOTAL, MOST_KEPT)
    away.put(size)
    assert away.on_disk() >= size // BATCH * BATCH
    assert lines(caplog) == ["reader jobs+audit is too far behind (max_lag_bytes=64,000,000)"]
    reader = away.queue.reader("audit")
    assert (reader.head, reader.bytes) == (0, size // BATCH * BATCH)
    assert reader.flush() == size // BATCH * BATCH // len(ITEM)
    away.clock.advance(2)
    assert lines(caplog) == ["reader jobs+audit is not too far behind any more"]
    assert away.on_disk() <= 2 * SEGMENT
    away.queue.close()


def test_skip_keeps_the_disk_free_and_counts_every_item(
    folder: Path, caplog: pytest.LogCaptureFixture, tally: Tally
) -> None:
    away = Away(folder, LagPolicy.SKIP)
    away.put(TOTAL)
    put_items = away.queue.stats().tail_id
    assert away.most <= LAG + BATCH + 2 * SEGMENT, "the lag, what is put between two looks, and the segments' ends"
    said = lines(caplog)
    assert said[0].startswith("reader jobs+audit was too far behind (max_lag_bytes=64,000,000): it was moved past ")
    assert len(said) <= 1 + put_items * len(ITEM) // BATCH // 60
    reader = away.again().reader("audit")
    skipped = reader.stats().skipped
    assert lines(caplog) == [
        f"reader jobs+audit was moved past {skipped:,} items since it was opened last, as it was too far behind: "
        "they are not delivered to it"
    ]
    ids = [item.id for item in reader.get_many(put_items)]
    assert ids == list(range(skipped + 1, put_items + 1))
    assert LAG - BATCH - 2 * SEGMENT <= len(ids) * len(ITEM) <= LAG
    tally.add("bytes put beside a reader that is away", put_items * len(ITEM))
    away.queue.close()


def test_refuse_stops_the_puts_until_the_reader_has_come_closer(folder: Path, tally: Tally) -> None:
    away = Away(folder, LagPolicy.REFUSE)
    size = refusals = 0
    while size < TOTAL:
        full = away.refused()
        size += len(ITEM) if full is None else 0
        if full is not None:
            assert full.reader == "jobs+audit"
            assert away.on_disk() <= LAG + (2 << 20) + 2 * SEGMENT
            refusals += 1
            with pytest.raises(QueueFull):
                away.queue.put_many([ITEM, ITEM])
            reader = away.queue.reader("audit")
            items = reader.get_many(100)
            assert [item.id for item in items] == list(range(items[0].id, items[0].id + 100))
            reader.commit_many(items)
            reader.close()
            away.clock.advance(1)
    assert refusals >= (size - LAG) // (100 * len(ITEM)) - 1
    tally.add("bytes put beside a reader that is away", size)
    away.queue.close()


def test_a_limit_of_the_journal_holds_whatever_the_reader_does(folder: Path) -> None:
    away = Away(folder, LagPolicy.WARN, max_journal_bytes=5 * SEGMENT, keep_bytes=1 << 40)
    refusals = size = 0
    while size < TOTAL:
        full = away.refused()
        size += len(ITEM) if full is None else 0
        if full is not None:
            assert full.reader is None
            assert away.on_disk() == away.queue.stats().journal_bytes <= 5 * SEGMENT
            refusals += 1
            reader = away.queue.reader("audit")
            reader.commit_many(reader.get_many(200))
            reader.close()
    assert refusals > 1
    away.queue.close()
