"""SIGKILL of the one process that has an outbox on a work queue, at any moment, under load.

It puts batches of jobs of two queues, each in a transaction, some of which are rolled back; and it runs them. Some of
the jobs fail at first. Then it is killed, and another process goes on. A ledger outside of the work queue, a file for
each process, says what each of them began, committed and ran. When all is done:

1. of a batch that was committed each job has run to its end;
2. of a batch that was not known to be committed all jobs have, or none has begun;
3. of a batch that was rolled back no job has begun;
4. no job has begun again after its end in the same process, and none of those that failed was forgotten.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from kestrelpy.outbox import Outbox
from kestrelpy.work import WorkQueue
from tests.processes.programs import as_program, rounds

SYNCS: dict[str, Any] = {"always": "always", "never": "never", "seconds": 0.05}
PATIENCE = 60.0
RESTS = "rests"
"""Of a process: it puts nothing, and ends when there is nothing left."""


class Ledger:
    """Of one process. A line is one write: a kill leaves all of it or nothing."""

    def __init__(self, folder: Path, number: int) -> None:
        self._file = os.open(folder / f"{number:05}.ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def __call__(self, event: str, name: str) -> None:
        os.write(self._file, f"{event} {name}\n".encode())


class Process:
    """What lives until it is killed. Jobs are named ``BATCH/NUMBER``, a batch ``PROCESS.NUMBER``."""

    def __init__(self, folder: Path, number: int, sync: Any, seed: int) -> None:
        self.number = number
        self.note = Ledger(folder, number)
        self.choose = random.Random(f"{seed} {number}")
        self.queue = WorkQueue(folder / "work", sync=sync, segment_bytes=1 << 18, checkpoint_interval=0.05)
        self.outbox = Outbox(self.queue, backoff=0.01)
        for queue in ("mail", "bills"):
            self.outbox.add_consumer(queue, self.handle, stop_at_failure=False)

    def handle(self, name: str) -> None:
        self.note("begins", name)
        if hash_of(name) % 7 == 0 and self.choose.random() < 0.7:
            self.note("fails", name)
            raise ValueError("not this time")
        self.note("ran", name)

    def put_batches(self) -> None:
        """Until it is killed."""
        batch = 0
        pause = threading.Event()
        while not pause.wait(self.choose.random() * 0.004):
            batch += 1
            names = [f"{self.number}.{batch}/{at}" for at in range(self.choose.randrange(1, 30))]
            is_rolled_back = self.choose.random() < 0.15
            self.note("puts", f"{self.number}.{batch}/{len(names)}")
            try:
                with self.outbox.begin() as tx:
                    self.outbox.put_many(tx, "mail", names[::2])
                    for name in names[1::2]:
                        self.outbox.put(tx, "bills", name, key=name, delay=self.choose.choice((0, 0, 0.01)))
                    if is_rolled_back:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                self.note("rolled", f"{self.number}.{batch}/0")
            else:
                self.note("committed", f"{self.number}.{batch}/0")

    def live(self, what: str) -> None:
        self.outbox.start(threads=3, retry_interval=0.01)
        self.note("started", f"{self.number}.0/0")
        if what != RESTS:
            self.put_batches()
        deadline = time.monotonic() + PATIENCE
        while self.outbox.stats():
            assert time.monotonic() < deadline, self.outbox.stats()
            time.sleep(0.01)
        assert self.outbox.stop(timeout=10)
        self.outbox.close()
        self.queue.close()


def hash_of(name: str) -> int:
    return sum(map(ord, name))


def spawn(folder: Path, number: int, sync: Any, seed: int, what: str) -> int:
    child = os.fork()
    if child:
        return child
    try:
        Process(folder, number, sync, seed).live(what)
    except BaseException:
        (folder / "error").write_text(f"process {number}: {traceback.format_exc()}")
        os._exit(1)
    os._exit(0)


def wait_for(path: Path, word: str) -> None:
    deadline, error = time.monotonic() + PATIENCE, path.parent / "error"
    while not path.exists() or word not in path.read_text():
        assert not error.exists(), error.read_text()
        assert time.monotonic() < deadline, f"{path.name} has not {word}"
        time.sleep(0.002)


def main(what: str, seed: int, limit: int | None, seconds: float | None, plant: Any) -> Counter[str]:
    assert plant is None
    choose, counts = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        number = 0
        for number in rounds(limit, seconds):
            child = spawn(folder, number, SYNCS[what], seed, "")
            wait_for(folder / f"{number:05}.ledger", "started")
            time.sleep(choose.random() ** 2 * 0.4)
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), (folder / "error").read_text()
            counts["kills"] += 1
        _, status = os.waitpid(spawn(folder, number + 1, SYNCS[what], seed, RESTS), 0)
        assert status == 0, (folder / "error").read_text()
        judge(folder, counts)
    return counts


def judge(folder: Path, counts: Counter[str]) -> None:
    """Hold the ledger against the promises."""
    sizes: dict[str, int] = {}
    ends: dict[str, str] = {}
    began: dict[str, Counter[str]] = defaultdict(Counter)  # by batch
    ran: dict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted(folder.glob("*.ledger")):
        over: set[str] = set()  # in this process
        for event, name in (line.split() for line in path.read_text().splitlines()):
            batch, _, at = name.partition("/")
            if event == "puts":
                sizes[batch] = int(at)
            elif event in ("rolled", "committed"):
                ends[batch] = event
            elif event == "begins":
                assert name not in over, f"{name} begins again after its end"
                began[batch][at] += 1
                counts["begun"] += 1
            elif event == "ran":
                over.add(name)
                ran[batch][at] += 1
            elif event == "fails":
                counts["failures"] += 1
    for batch, size in sizes.items():
        whole = {str(at) for at in range(size)}
        end = ends.get(batch, "killed")
        counts[end] += 1
        if end == "rolled":
            assert not began[batch], f"batch {batch} was rolled back, and these jobs have begun: {began[batch]}"
        elif end == "committed" or began[batch]:
            assert ran[batch].keys() == whole, f"batch {batch}, {end}, of {size} jobs: {sorted(ran[batch])} have run"
            counts["jobs"] += size
            counts["of killed batches"] += size * (end == "killed")
    assert began.keys() <= sizes.keys(), "jobs that nobody put"
    counts["ran again"] = sum(times - 1 for batch in ran.values() for times in batch.values())


if __name__ == "__main__":
    as_program(main)
