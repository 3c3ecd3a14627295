"""A thousand queues in one process: one thread for all of them, at most four descriptors each, little disk.

``make test`` opens 250 of them: a thousand take 20 s there.
"""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest

from kestrelpy import JournaledQueue
from tests.support.budget import ALL

COUNT = 1000 if ALL else 250
FOR_A_MOMENT = 4
"""Descriptors that the one thread has open while it saves something."""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def many_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * COUNT + 500
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"only {hard} descriptors are allowed here; this needs {wanted}")
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_a_thousand_queues_share_one_thread_and_use_four_descriptors_each(tmp_path: Path) -> None:
    before, threads = descriptors(), set(threading.enumerate())
    queues = [JournaledQueue(tmp_path, f"q{number}", sync=0.5) for number in range(COUNT)]
    try:
        for queue in queues:
            queue.put(b"one")
            queue.put(b"two")
            queue.get().commit()
        names = {thread.name for thread in set(threading.enumerate()) - threads}
        assert names <= {"kestrelpy-maintenance", "kestrelpy-sync"}
        assert descriptors() - before <= 4 * COUNT + FOR_A_MOMENT
    finally:
        for queue in queues:
            queue.close()
    assert descriptors() == before
    with JournaledQueue(tmp_path, f"q{COUNT // 2}") as queue:
        assert queue.get(timeout=0).data == b"two"


def test_three_small_items_take_little_disk(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "small", sync="always") as queue:
        for _ in range(3):
            queue.put(b"x" * 100)
        queue.get()
        queue.checkpoint()
        used = [os.stat(tmp_path / name) for name in os.listdir(tmp_path)]
        assert sum(about.st_size for about in used) <= 128 << 10
        assert sum(about.st_blocks * 512 for about in used) <= 128 << 10
