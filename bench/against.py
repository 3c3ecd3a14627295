"""The hot paths of this tree against those of another commit, in one run: ``python -m bench.against REVISION``.

Each round starts one process for each side, in turns, which measures every path in a fresh queue on the disk. What is
compared is the processor time of the process (for ``put-always`` too: the disk's time is the same for both, and noisy),
by the median of the rounds and by their minimum. A ratio above 1 means that this tree is slower. Two runs of one commit
against itself differ by some 2% in the median on a quiet machine, which is what a ratio can say at best.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
ITEM = b"x" * 100
COUNT = 100_000
BATCH = 1_000


def _put(folder: str) -> tuple[float, int]:
    from kestrelpy import JournaledQueue

    with JournaledQueue(folder, "q", sync="never") as queue:
        put = queue.put
        return _timed(lambda: [put(ITEM) for _ in range(COUNT)]), COUNT


def _put_take(folder: str) -> tuple[float, int]:
    from kestrelpy import JournaledQueue

    def take() -> None:
        for _ in range(COUNT):
            queue.commit(queue.get())

    with JournaledQueue(folder, "q", sync="never") as queue:
        queue.reader()
        for _ in range(COUNT):
            queue.put(ITEM)
        return _timed(take), COUNT


def _cycle(folder: str) -> tuple[float, int]:
    from kestrelpy import JournaledQueue

    def cycle() -> None:
        for _ in range(COUNT):
            queue.put(ITEM)
            queue.commit(queue.get())

    with JournaledQueue(folder, "q", sync="never") as queue:
        queue.reader()
        return _timed(cycle), COUNT


def _batches(folder: str) -> tuple[float, int]:
    from kestrelpy import JournaledQueue

    def batches() -> None:
        for _ in range(3 * COUNT // BATCH):
            queue.put_many(items)
            queue.commit_many(queue.get_many(BATCH))

    items = [ITEM] * BATCH
    with JournaledQueue(folder, "q", sync="never") as queue:
        queue.reader()
        return _timed(batches), 3 * COUNT


def _put_many(folder: str) -> tuple[float, int]:
    from kestrelpy import JournaledQueue

    items = [ITEM] * BATCH
    with JournaledQueue(folder, "q", sync="never") as queue:
        return _timed(lambda: [queue.put_many(items) for _ in range(5 * COUNT // BATCH)]), 5 * COUNT


def _get_many(folder: str) -> tuple[float, int]:
    from kestrelpy import JournaledQueue

    def take() -> None:
        for _ in range(3 * COUNT // BATCH):
            queue.commit_many(queue.get_many(BATCH))

    with JournaledQueue(folder, "q", sync="never") as queue:
        queue.reader()
        for _ in range(3 * COUNT):
            queue.put(ITEM)
        return _timed(take), 3 * COUNT


def _fan_out(folder: str) -> tuple[float, int]:
    """An item is put, and read and committed by four readers."""
    from kestrelpy import JournaledQueue

    def cycle() -> None:
        for _ in range(COUNT // 4):
            queue.put(ITEM)
            for reader in readers:
                reader.commit(reader.get())

    with JournaledQueue(folder, "q", sync="never") as queue:
        readers = [queue.reader(name) for name in ("a", "b", "c", "d")]
        return _timed(cycle), COUNT // 4


def _put_always(folder: str) -> tuple[float, int]:
    from kestrelpy import JournaledQueue

    with JournaledQueue(folder, "q", sync="always") as queue:
        put, count = queue.put, COUNT // 25
        return _timed(lambda: [put(ITEM) for _ in range(count)]), count


def _always_threads(folder: str) -> tuple[float, int]:
    """64 threads put with ``sync="always"``: they share the syncs."""
    from threading import Thread

    from kestrelpy import JournaledQueue

    def puts() -> None:
        for _ in range(count):
            queue.put(ITEM)

    def all_of_them() -> None:
        threads = [Thread(target=puts) for _ in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    count = COUNT // 400
    with JournaledQueue(folder, "q", sync="always") as queue:
        return _timed(all_of_them), 64 * count


def _memory(_folder: str) -> tuple[float, int]:
    from kestrelpy import ConcurrentBlockingQueue

    def cycle() -> None:
        for _ in range(5 * COUNT):
            queue.put(ITEM)
            queue.get()

    queue: ConcurrentBlockingQueue[bytes] = ConcurrentBlockingQueue()
    return _timed(cycle), 5 * COUNT


def _jobs(folder: str) -> tuple[float, int]:
    from kestrelpy.work import WorkQueue

    def jobs() -> None:
        for _ in range(count):
            queue.put(ITEM)
            session.reserve().delete()

    count = COUNT // 4
    with WorkQueue(folder, sync="never") as queue, queue.session() as session:
        return _timed(jobs), count


PATHS: dict[str, Callable[[str], tuple[float, int]]] = {
    "put": _put,
    "take": _put_take,
    "cycle": _cycle,
    "batches": _batches,
    "put-many": _put_many,
    "get-many": _get_many,
    "fan-out": _fan_out,
    "put-always": _put_always,
    "always-64": _always_threads,
    "memory": _memory,
    "jobs": _jobs,
}


def _timed(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def measure(names: list[str], scratch: str) -> dict[str, float]:
    """Microseconds of processor time an item, of the library that this process imports."""
    figures = {}
    for name in names:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            seconds, count = PATHS[name](folder)
            figures[name] = seconds / count * 1e6
    return figures


def compare(other: Path, names: list[str], rounds: int, scratch: str) -> dict[str, tuple[list[float], list[float]]]:
    """The figures of the other tree and of this one, by path; the first round does not count."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    for number in range(rounds + 1):
        sides = [(0, other), (1, ROOT)]
        for side, tree in sides if number % 2 else sides[::-1]:
            told = subprocess.run(
                [sys.executable, __file__, "--measure", scratch, "--only", ",".join(names)],
                env={**os.environ, "PYTHONPATH": str(tree)},
                check=True,
                capture_output=True,
                text=True,
            ).stdout
            for name, value in json.loads(told).items() if number else ():
                found[name][side].append(value)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.against", description="the hot paths against those of another commit")
    parser.add_argument("revision", nargs="?", default="HEAD~1")
    parser.add_argument("--only", default=",".join(PATHS), help="paths, separated by commas")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where the queues are made")
    parser.add_argument("--measure", metavar="DIR", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    names = asked.only.split(",")
    if asked.measure:
        print(json.dumps(measure(names, asked.measure)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(other), asked.revision], check=True)
        try:
            found = compare(other, names, asked.rounds, asked.dir)
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
    print(
        f"{'path':12} {asked.revision:>10} {'this':>8}   ratio of medians, of minima (microseconds of processor time)"
    )
    for name, (before, after) in found.items():
        medians = statistics.median(before), statistics.median(after)
        print(
            f"{name:12} {medians[0]:10.3f} {medians[1]:8.3f}   "
            f"{medians[1] / medians[0]:.3f}  {min(after) / min(before):.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
