"""Many processes want the same queue, or the same reader: there is one owner at a time.

``run_owners`` is the race for a queue, which is also erased now and then, with its lock file; ``run_readers`` that for
a reader, which is also dropped. A witness (a file that must not be there yet) shows that no two of them ever own it.
Owners close, or die.
"""

from __future__ import annotations

import os
import random
import select
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import portalocker

from kestrelpy import JournaledQueue, QueueLocked, open_reader
from tests.processes.fork_races import NAME, child_of
from tests.processes.programs import MOST_TIMES, as_program, rounds


class Witness:
    """A file that must not be there yet: two owners at a time would meet here."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        try:
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            raise AssertionError("there are two owners") from None

    def __exit__(self, *_: object) -> None:
        os.unlink(self._path)


Work = Callable[[random.Random, Callable[[bytes], object]], None]


def race(seed: int, work: Work, *, limit: int | None, seconds: float | None) -> Counter[str]:
    """Four processes do ``work`` again and again, ``limit`` times in all or so; those that die are replaced. Where few
    of them owned anything, as on a busy machine, until enough have, and one has died.
    """
    hear, tell = os.pipe()
    running: set[int] = set()
    counts: Counter[str] = Counter()
    started = 0
    try:
        for _ in rounds(None, seconds):
            if limit is not None and counts["rounds"] >= (limit if is_enough(counts, limit) else MOST_TIMES * limit):
                break
            while len(running) < 4:
                started += 1
                choose = random.Random(seed * 1000 + started)
                running.add(child_of(partial(_work_on, work, choose, lambda word: os.write(tell, word))))
            if select.select([hear], [], [], 0.05)[0]:  # all four may have died without a word
                for letter in os.read(hear, 1 << 12).decode():
                    counts[{"o": "owned", "r": "refused", "d": "died", ".": "rounds"}[letter]] += 1
            while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                running.discard(ended[0])
                assert ended[1] in (0, signal.SIGKILL), f"a process ended with status {ended[1]}"
    finally:
        statuses = stop(running)
        os.close(hear)
        os.close(tell)
    assert set(statuses) <= {0, signal.SIGKILL}, f"processes ended with status {statuses}"
    return counts


def is_enough(counts: Counter[str], limit: int) -> bool:
    """Whether so many rounds have shown something."""
    return counts["owned"] > limit // 50 and counts["refused"] > limit // 20 and counts["died"] > 0


def stop(running: Iterable[int]) -> list[int]:
    """Kill them all; but first none of them runs any more, or one would come into the place of another that is gone."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in running:
            os.kill(pid, number)
    return [os.waitpid(pid, 0)[1] for pid in running]


def _work_on(work: Callable[..., None], choose: random.Random, say: Callable[[bytes], object]) -> None:
    for _ in range(40):
        work(choose, say)
        say(b".")


def _die(say: Callable[[bytes], object]) -> None:
    say(b"d.")
    os.kill(os.getpid(), signal.SIGKILL)


def run_owners(seed: int, *, limit: int | None = None, seconds: float | None = None) -> Counter[str]:
    """Processes race to open one queue for writing; some erase it, with its lock file."""
    with tempfile.TemporaryDirectory() as folder:
        witness = Witness(os.path.join(folder, "owner"))

        def work(choose: random.Random, say: Callable[[bytes], object]) -> None:
            try:
                queue = JournaledQueue(os.path.join(folder, "queues"), NAME, sync="never")
            except QueueLocked:
                say(b"r")
                time.sleep(choose.random() * 0.004)
                return
            with witness:
                tail_id = queue.stats().tail_id
                assert queue.put(b"%d" % (tail_id + 1)) == tail_id + 1
                item = queue.get(timeout=0)
                assert item.data == b"%d" % item.id
                item.commit()
                say(b"o")
            end = choose.random()
            if end < 0.3:
                _die(say)
            elif end < 0.6:
                queue.erase()
            else:
                queue.close()

        lock = portalocker.lock
        portalocker.lock = partial(_lock_late, lock, random.Random(seed))
        try:
            return race(seed, work, limit=limit, seconds=seconds)
        finally:
            portalocker.lock = lock


def _lock_late(lock: Callable[..., object], choose: random.Random, *arguments: object) -> None:
    """As if the process had to wait for its turn between opening the lock's file and locking it."""
    time.sleep(choose.random() * 0.002)
    lock(*arguments)


def run_readers(seed: int, *, limit: int | None = None, seconds: float | None = None) -> Counter[str]:
    """Processes race for one reader, which whoever gets hold of the queue drops: with its lock file."""
    with tempfile.TemporaryDirectory() as folder:
        witness = Witness(os.path.join(folder, "owner"))
        queues = os.path.join(folder, "queues")
        with JournaledQueue(queues, NAME) as queue:
            queue.put_many([b"x"] * 5)
            queue.reader("kept")

        def work(choose: random.Random, say: Callable[[bytes], object]) -> None:
            try:
                if choose.random() < 0.4:
                    with JournaledQueue(queues, NAME, sync="never") as queue:
                        queue.drop_reader("wanted")
                    return
                reader = open_reader(queues, NAME, "wanted", create=True, start="earliest")
            except QueueLocked:
                say(b"r")
                time.sleep(choose.random() * 0.004)
                return
            with witness:
                ids = [item.id for item in reader.get_many(10, timeout=0)]
                assert ids == [1, 2, 3, 4, 5]
                say(b"o")
            if choose.random() < 0.2:
                _die(say)
            reader.close()

        return race(seed, work, limit=limit, seconds=seconds)


def main(
    what: str, seed: int, limit: int | None, seconds: float | None, plant: Callable[[], object] | None
) -> Counter[str]:
    """``owners`` or ``readers``, as a program of its own."""
    if plant is not None:
        plant()
    runs = {"owners": run_owners, "readers": run_readers}
    return runs[what](seed, limit=limit, seconds=seconds)


if __name__ == "__main__":
    as_program(main)
