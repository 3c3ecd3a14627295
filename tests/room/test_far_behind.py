"""A reader that is gigabytes behind when a policy is given to it: how long the opening takes that skips or refuses, and
how much memory and disk.

``KESTRELPY_SHARE=10`` has the reader 10 GB behind, ``make test-all`` 1 GB, and ``make test`` 100 MB. The opening is
done by a process of its own, which says how much memory it has needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import JournaledQueue, LagPolicy, ReaderConfig
from tests.support.budget import SHARE, Tally
from tests.support.paths import ROOT

MB = 10**6
BEHIND = min(10_000, max(100, round(1_000 * SHARE))) * MB
LAG, SEGMENT, ITEM = 64 * MB, 16 << 20, bytes(MB // 4)
MOST_MEMORY = 64 << 20
"""Of bytes that the opening may need beside the interpreter: a few segments, and no item of the 10 GB for long."""
SECONDS = 5.0
"""Within which the opening has looked at a reader, however far behind it is: by the headers of segments."""

OPENING = """
import json, logging, resource, sys, time
logging.disable(logging.CRITICAL)
from kestrelpy import JournaledQueue, QueueFull, ReaderConfig
folder, policy, lag, segment = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
JournaledQueue(folder + "/other", "warm").close()
before, began = peak(), time.perf_counter()
config = ReaderConfig(max_lag_bytes=lag, lag_policy=policy)
with JournaledQueue(folder + "/q", "jobs", readers={"audit": config}, sync="never", segment_bytes=segment) as queue:
    seconds, refused, skipped, head = time.perf_counter() - began, 0, 0, 0
    try:
        queue.put(bytes(1000))
    except QueueFull as full:
        refused = 1
        assert full.reader == "jobs+audit", full
    if policy == "skip":
        reader = queue.reader("audit")
        skipped, head, left = reader.stats().skipped, reader.head, reader.bytes
    else:
        left = queue.stats().put_bytes
    print(json.dumps({"seconds": seconds, "memory": peak() - before, "refused": refused, "skipped": skipped,
                      "head": head, "left": left}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for path in tmp_path.glob("q/*.segment"):  # pytest keeps folders for a while
        path.unlink()


def fall_behind(folder: Path) -> int:
    """A queue whose reader ``audit`` has had nothing. Returns how many items there are."""
    with JournaledQueue(folder / "q", "jobs", sync="never", segment_bytes=SEGMENT) as queue:
        queue.reader("audit", start="earliest").close()
        for _ in range(BEHIND // len(ITEM)):
            queue.put(ITEM)
        assert on_disk(folder) >= BEHIND
        return queue.stats().tail_id


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("q/*.segment"))


def opened(folder: Path, policy: LagPolicy) -> dict[str, Any]:
    """What the process says that has opened the queue with that policy."""
    argv = [sys.executable, "-c", OPENING, str(folder), policy.value, str(LAG), str(SEGMENT)]
    done = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True)
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def test_skip_moves_a_reader_that_is_far_behind(folder: Path, tally: Tally) -> None:
    items = fall_behind(folder)
    facts = opened(folder, LagPolicy.SKIP)
    assert facts["skipped"] == facts["head"]
    assert LAG - 2 * SEGMENT <= facts["left"] <= LAG
    assert facts["head"] + facts["left"] // len(ITEM) == items
    assert not facts["refused"]
    assert facts["seconds"] < SECONDS
    assert facts["memory"] < MOST_MEMORY
    assert on_disk(folder) <= LAG + 2 * SEGMENT, "what is skipped is retired"
    tally.add("bytes that a reader was behind, and skipped", BEHIND)


def test_refuse_stops_the_puts_at_once(folder: Path, tally: Tally) -> None:
    items = fall_behind(folder)
    size = on_disk(folder)
    facts = opened(folder, LagPolicy.REFUSE)
    assert facts["refused"]
    assert facts["seconds"] < SECONDS
    assert facts["memory"] < MOST_MEMORY
    assert on_disk(folder) <= size + SEGMENT
    config = ReaderConfig(max_lag_bytes=LAG, lag_policy=LagPolicy.REFUSE)
    with JournaledQueue(folder / "q", "jobs", readers={"audit": config}, segment_bytes=SEGMENT) as queue:
        reader = queue.reader("audit")
        assert (reader.head, reader.items) == (0, items)
        while reader.bytes > LAG // 2:
            taken = reader.get_many(100)
            assert [item.id for item in taken] == list(range(taken[0].id, taken[0].id + len(taken)))
            reader.commit_many(taken)
        queue.checkpoint(durable=True)
        assert queue.stats().put_count == 0
    assert not opened(folder, LagPolicy.REFUSE)["refused"]
    assert on_disk(folder) <= LAG + 2 * SEGMENT
    tally.add("bytes that a reader was behind, while puts were refused", BEHIND)


BLIND = """
from kestrelpy._reading.lag_watch import LagWatch
LagWatch.look = lambda self: None
"""


@pytest.mark.parametrize("policy", [LagPolicy.SKIP, LagPolicy.REFUSE])
def test_an_opening_that_does_not_look_is_seen(
    folder: Path, policy: LagPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    fall_behind(folder)
    monkeypatch.setattr(sys.modules[__name__], "OPENING", BLIND + OPENING)
    facts = opened(folder, policy)
    assert not facts["refused"]
    assert not facts["skipped"]
    assert facts["left"] > LAG or policy is LagPolicy.REFUSE
