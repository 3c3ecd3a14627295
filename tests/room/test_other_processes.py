"""Readers that other processes have open, and processes that die: the lag of all of them is seen, and acted upon."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import JournaledQueue, LagPolicy, QueueFull, ReaderConfig, inspect
from kestrelpy._journal.format import LARGEST
from tests.room.rooms import ITEM, feed, lines
from tests.support.paths import ROOT

MOST = 64 << 10
PROGRAM = """
import json, sys, threading
from kestrelpy import LagPolicy, ReaderConfig, open_reader
folder, policy, limit = sys.argv[1:]
config = ReaderConfig(max_lag_bytes=int(limit) or None, lag_policy=LagPolicy(policy))
reader = open_reader(folder, "jobs", "audit", config=config, create=True, start="earliest")
print("open", flush=True)
for line in sys.stdin:
    if line.strip() == "stats":
        stats = reader.stats()
        print(json.dumps([stats.head, stats.skipped, stats.lagging]), flush=True)
    elif line.strip() == "read":
        print(json.dumps([item.id for item in reader.get_many(10**6, timeout=0)]), flush=True)
"""


class Other:
    """A process that has the reader ``audit`` open, and does what its standard input says."""

    def __init__(self, folder: Path, policy: LagPolicy, limit: int) -> None:
        command = [sys.executable, "-c", PROGRAM, str(folder), policy.value, str(limit)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
        self.process: subprocess.Popen[str] = subprocess.Popen(command, **pipes)
        assert self._line() == "open"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return str(self.process.stdout.readline().strip())

    def ask(self, what: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return json.loads(self._line())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def another(folder: Path, policy: LagPolicy = LagPolicy.WARN, limit: int = 0) -> Iterator[Other]:
    other = Other(folder, policy, limit)
    try:
        yield other
    finally:
        other.kill()


def until(what: Callable[[], bool]) -> None:
    """Wait until something is so, for half a minute at most."""
    bell = threading.Event()
    for _ in range(1500):
        if what():
            return
        bell.wait(0.02)
    raise AssertionError("it has not come to that")


def opened(folder: Path, policy: LagPolicy) -> JournaledQueue:
    config = ReaderConfig(max_lag_bytes=MOST, lag_policy=policy)
    options: dict[str, Any] = {"segment_bytes": 16 << 10, "checkpoint_interval": 0.05, "sync": "never"}
    return JournaledQueue(folder, "jobs", readers={"audit": config}, **options)


def head_of(folder: Path) -> int:
    return next(reader.head for reader in inspect(folder, "jobs").readers if reader.name == "audit")


def test_a_reader_is_moved_when_its_process_was_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path, LagPolicy.SKIP) as queue:
        with another(tmp_path) as other:
            queue.put_many([ITEM] * 10)
            for _ in range(30):
                queue.put_many([ITEM] * 10)
            until(lambda: any("only that process moves it" in line for line in lines(caplog)))
            assert head_of(tmp_path) == 0
            assert other.ask("read")[0] == 1
        until(lambda: head_of(tmp_path) > 0)
        head = head_of(tmp_path)
        assert (310 - head) * len(ITEM) <= MOST < (310 - head + 20) * len(ITEM)
        reader = queue.reader("audit")
        assert reader.stats().skipped == head
        assert reader.get(block=False).id == head + 1


def test_a_process_moves_its_own_reader(tmp_path: Path) -> None:
    with opened(tmp_path, LagPolicy.WARN) as queue, another(tmp_path, LagPolicy.SKIP, MOST) as other:
        for _ in range(30):
            queue.put_many([ITEM] * 10)
        until(lambda: bool(other.ask("stats")[1]))
        head, skipped, lagging = other.ask("stats")
        assert head == skipped == head_of(tmp_path)
        assert not lagging
        assert other.ask("read") == list(range(head + 1, 301))


def test_puts_are_refused_for_a_reader_of_another_process(tmp_path: Path) -> None:
    with opened(tmp_path, LagPolicy.REFUSE) as queue, another(tmp_path):
        until(lambda: queue._journal.growth.max_total < LARGEST)  # what others have made is seen at the next look
        with pytest.raises(QueueFull) as full:
            feed(queue, 300)
        assert full.value.reader == "jobs+audit"
        assert queue.stats().tail_id * len(ITEM) <= MOST + (32 << 10)
