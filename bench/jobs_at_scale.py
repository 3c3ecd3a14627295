"""The work queue with a million jobs, in-process: opening them, their memory, their falling due, and an old one.

``bench.beanstalk`` runs these. ``python -m bench.jobs_at_scale DIR`` opens the queue in DIR, in a process of
its own, and prints what that cost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kestrelpy.work import WorkQueue

if TYPE_CHECKING:
    from bench.measure import Figures

MILLION = 1_000_000
BATCH = 1000
BODY = b"x" * 100
DELAY = 12.0
"""Seconds, in which a million jobs are put; then they are due within the same one as a whole."""
YEAR = 365 * 86400.0


def live(folder: Path, scale: float) -> Figures:
    """Open a million live jobs in a fresh process."""
    with WorkQueue(folder, sync="never") as queue:
        for _ in range(_batches(scale)):
            queue.put_many([BODY] * BATCH)
    command = [sys.executable, "-m", "bench.jobs_at_scale", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=Path(__file__).parent.parent)
    figures: Figures = json.loads(done.stdout)
    return figures


def due(_folder: Path, scale: float) -> Figures:
    """A million jobs fall due while another thread's session puts, reserves and deletes."""
    waits = []
    with WorkQueue(None) as queue, queue.session() as session:
        began = time.monotonic()
        for _ in range(_batches(scale)):
            queue.put_many([BODY] * BATCH, tube="later", delay=DELAY)
        end = max(time.monotonic(), began + DELAY) + 10
        while time.monotonic() < end and queue.stats_tube("later").delayed:
            before = time.perf_counter()
            queue.put(BODY)
            between = time.perf_counter()
            session.reserve(0).delete()
            waits.append(max(between - before, time.perf_counter() - between))
            time.sleep(0.0005)
    return {"longest wait, ms": max(waits) * 1e3}


def old(folder: Path, scale: float) -> Figures:
    """A job that is delayed for a year, and a million that come and go: the most that the folder took on disk."""
    sizes = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            sizes.append(_on_disk(folder))

    looking = threading.Thread(target=look)
    with WorkQueue(folder, sync="never") as queue, queue.session() as session:
        queue.put(BODY, delay=YEAR)
        looking.start()
        try:
            for _ in range(_batches(scale) * BATCH):
                queue.put(BODY)
                session.reserve(0).delete()
        finally:
            over.set()
            looking.join()
    return {"most on disk, MiB": max(sizes) / 2**20}


def _batches(scale: float) -> int:
    return max(1, int(MILLION * scale) // BATCH)


def _on_disk(folder: Path) -> int:
    """What its files take; one that is retired meanwhile takes nothing."""
    size = 0
    for entry in os.scandir(folder):
        try:
            size += entry.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return size


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(folder: str) -> None:
    """Open the queue in ``folder`` and print what that cost."""
    before, began = _resident_bytes(), time.perf_counter()
    with WorkQueue(folder, sync="never") as queue:
        seconds = time.perf_counter() - began
        stats = queue.stats()
        beside = (_resident_bytes() - before - stats.bytes) / stats.ready
    print(json.dumps({"opening, s": seconds, "bytes a job beside its body": beside}))


if __name__ == "__main__":
    main(sys.argv[1])
