"""The library against the naive reader, which knows ``docs/format.md`` alone: record by record on healthy queues and
on the golden files. (On damaged ones: ``test_damage.py``.)
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kestrelpy import JournaledQueue, QueueEmpty, Reader, scan, verify
from kestrelpy.testing import ManualClock
from tests.fuzz.naive_reader import read_queue
from tests.fuzz.reference import FOLDER, NAME, disk_of, healthy, let_die, open_queue, small
from tests.support.paths import TESTS

GOLDEN = TESTS / "golden"
CASES = sorted(path for path in GOLDEN.glob("v*/*") if path.is_dir())
QUEUES = 100
"""Random healthy queues for each of five tests."""


def drained(reader: Reader) -> list[tuple[int, bytes, int, int | None]]:
    found: list[tuple[int, bytes, int, int | None]] = []
    while True:
        try:
            item = reader.get_nowait()
        except QueueEmpty:
            return sorted(found)
        found.append((item.id, item.data, item.added_ms, item.expires_ms))


@pytest.mark.parametrize("part", range(5))
def test_healthy_queues(part: int) -> None:
    for seed in range(part * QUEUES, (part + 1) * QUEUES):
        case = healthy(seed)
        reading = read_queue(case.files, NAME)
        assert not reading.damage, f"seed {seed}"
        assert {key: record.data for key, record in reading.records.items()}.items() <= case.put.items(), f"seed {seed}"
        disk = disk_of(case.files)
        seen = [(each.id, each.data, each.added_ms, each.expires_ms) for each in scan(FOLDER, NAME, disk=disk)]
        naive = [(each.id, each.data, each.added_ms, each.expires_ms) for each in reading.records.values()]
        assert seen == sorted(naive), f"seed {seed}"
        report = verify(FOLDER, NAME, disk=disk)
        assert (report.ok, report.items) == (True, len(naive)), f"seed {seed}: {report.damage}"
        assert (report.torn_bytes > 0) >= bool(reading.torn), f"seed {seed}"
        queue = open_queue(disk)
        for name in reading.checkpoints or {"": None}:
            unread = [(each.id, each.data, each.added_ms, each.expires_ms) for each in reading.unread(name)]
            reader = queue.reader(name)
            state = reading.checkpoints.get(name)
            assert state is None or reader.head >= state.head, f"seed {seed}"
            assert drained(reader) == unread, f"seed {seed}, reader {name!r}"
        let_die(queue, disk)


def test_the_small_queue_has_everything_in_it() -> None:
    """What is flipped bit by bit elsewhere: a batch, an expiry, a closed and an open segment, spans, error counts."""
    case = small()
    assert 1500 <= sum(map(len, case.files.values())) <= 2500
    reading = read_queue(case.files, NAME)
    assert [segment.footer is not None for segment in reading.segments] == [True, False]
    assert any(len(frame.records) > 1 for segment in reading.segments for frame in segment.frames)
    assert any(record.expires_ms for record in reading.records.values())
    states = [state for state in reading.checkpoints.values() if state is not None]
    assert len(states) == 2
    assert any(state.done for state in states)
    assert any(state.error_counts for state in states)
    assert "jobs.mark" in case.files
    assert {key: record.data for key, record in reading.records.items()} == case.put
    assert reading.watermark < max(case.put)


@pytest.mark.parametrize("folder", CASES, ids=lambda path: path.relative_to(GOLDEN).as_posix())
def test_golden_files(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "q", ignore=shutil.ignore_patterns("expected.json"))
    files = {path.name: path.read_bytes() for path in (tmp_path / "q").iterdir()}
    reading = read_queue(files, "golden")
    assert not reading.damage
    assert bool(reading.torn) is (folder.name == "torn")
    naive = [(each.id, each.data, each.added_ms, each.expires_ms) for each in reading.records.values()]
    assert [(each.id, each.data, each.added_ms, each.expires_ms) for each in scan(tmp_path / "q", "golden")] == naive
    with JournaledQueue(tmp_path / "q", "golden", clock=ManualClock(1_700_000_060_000)) as queue:
        for name in reading.checkpoints or {"": None}:
            unread = [(each.id, each.data, each.added_ms, each.expires_ms) for each in reading.unread(name)]
            assert drained(queue.reader(name)) == unread
