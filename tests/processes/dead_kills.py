"""SIGKILL at any moment of who lets items die, of who owns their dead-letter queue, and of who puts letters back: each
item is in one of the two queues at the end, once.

A consumer fails each item that it gets, twice, and then the item is dead. It has the queue open, or reads it from
another process than the writer. A third process puts dead letters back, and they die again; at times a fourth one
has the dead-letter queue open. Whoever is killed is followed by another one.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from kestrelpy import (
    JournaledQueue,
    QueueEmpty,
    QueueLocked,
    Reader,
    ReaderConfig,
    dead_letters,
    open_reader,
    scan,
)
from kestrelpy.inbox import take_in
from tests.processes.inbox_kills import end, start
from tests.processes.programs import as_program, rounds

CONFIG = ReaderConfig(max_deliveries=2, retry_delay=0.001, dead_letter="dead")
MOST_UNREAD = 30
Work = dict[str, tuple[Callable[..., None], tuple[str, ...]]]
"""Programs by name, each with what it is given beside the folder."""


def open_jobs(folder: str) -> JournaledQueue:
    options: dict[str, Any] = {"sync": "never", "segment_bytes": 1 << 14, "inbox_interval": 0.002}
    return JournaledQueue(folder, "jobs", archive_dir=f"{folder}/archive", **options)


def put_one(queue: JournaledQueue) -> None:
    """An item that no other is like: one process puts, and ids rise."""
    queue.put(b"item %d %s" % (queue.stats().tail_id + 1, bytes(300)))


def fail_some(reader: Reader) -> None:
    with contextlib.suppress(QueueEmpty):
        for item in reader.get_many(5, timeout=0.002):
            item.abort(reason="it always fails")


def consumer(folder: str) -> None:
    """The owner of the queue puts, and lets items die."""
    with open_jobs(folder) as queue:
        reader = queue.reader("audit", start="earliest")
        reader.configure(CONFIG)
        while True:
            if reader.items < MOST_UNREAD:
                put_one(queue)
            fail_some(reader)


def writer(folder: str) -> None:
    """The owner of the queue puts."""
    with open_jobs(folder) as queue:
        while True:
            if queue.stats().tail_id < 20_000:
                put_one(queue)
            time.sleep(0.002)


def reader_elsewhere(folder: str) -> None:
    while True:
        with contextlib.suppress(FileNotFoundError, QueueLocked):
            reader = open_reader(folder, "jobs", "audit", config=CONFIG, create=True, start="earliest")
            while True:
                fail_some(reader)
        time.sleep(0.002)


def putter_back(folder: str, seed: str) -> None:
    choose = random.Random(seed)
    while True:
        with contextlib.suppress(QueueLocked), dead_letters(folder, "dead") as letters:
            for letter in letters:
                if choose.random() < 0.5:
                    letter.requeue()
        time.sleep(0.002)


def dead_owner(folder: str) -> None:
    while True:
        with contextlib.suppress(QueueLocked), JournaledQueue(folder, "dead", inbox_interval=0.002):
            time.sleep(0.02)
        time.sleep(0.01)


def check(folder: str, counts: Counter[str]) -> None:
    """Each item that was ever put is there once."""
    for _ in range(2):  # the first opening of each carries out what was begun
        there: Counter[bytes] = Counter()
        with open_jobs(folder) as queue:
            reader = queue.reader("audit", start="earliest")
            queue.take_in()
            with contextlib.suppress(QueueEmpty):
                while True:
                    there.update(item.data for item in reader.get_many(100, timeout=0))
        take_in(folder, "dead")
        with dead_letters(folder, "dead") as letters:
            for letter in letters:
                assert (letter.queue, letter.reader, letter.reason) == ("jobs", "audit", "it always fails"), letter
                there[letter.data] += 1
                counts["letters"] += 1
    put = Counter(record.data for record in scan(folder, "jobs", archive_dir=f"{folder}/archive"))
    assert there.keys() == put.keys(), f"lost: {len(put.keys() - there.keys())}"
    twice = [data[:20] for data, count in there.items() if count > 1]
    assert not twice, f"there twice: {twice}"
    counts["items"] += len(put)
    counts["put back"] += put.total() - len(put)


def main(what: str, seed: int, limit: int | None, seconds: float | None, _plant: object) -> Counter[str]:
    choose, counts, found = random.Random(seed), Counter[str](), Counter[str]()
    folder = tempfile.mkdtemp()
    work: Work = {
        "back": (putter_back, (f"{seed}",)),
        "owner": (dead_owner, ()),
    }
    if what == "owner":
        work["consumer"] = (consumer, ())
    else:
        work |= {"consumer": (reader_elsewhere, ()), "writer": (writer, ())}
    for _ in rounds(1, None, lambda: limit is None or is_enough(found, limit)):
        live(folder, work, choose, rounds(limit, seconds), counts)
        found.clear()
        check(folder, found)
    shutil.rmtree(folder)
    return counts + found


def is_enough(found: Counter[str], kills: int) -> bool:
    """Whether items have gone both ways: it may be that all are back when the last process is killed."""
    return found["items"] > kills // 10 and min(found["letters"], found["put back"]) > 0


def live(folder: str, work: Work, choose: random.Random, kills: Iterable[int], counts: Counter[str]) -> None:
    """Let them work, kill now one and now another, and all of them in the end."""
    running: dict[str, int] = {}
    for _ in kills:
        for name in work.keys() - running.keys():
            program, arguments = work[name]
            running[name] = start(program, folder, *arguments)
        time.sleep(choose.random() * 0.25)
        for name in list(running) if choose.random() < 0.2 else [choose.choice(["consumer", *sorted(running)])]:
            end(running.pop(name))
            counts["kills"] += 1
    for pid in running.values():
        end(pid)


if __name__ == "__main__":
    as_program(main)
