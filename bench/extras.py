"""What the options cost that a queue has beside its work: ``python -m bench.extras``.

Workloads:
    put       puts of 100 bytes; a reader is open, and reads nothing.
    cycle     put, get and commit of one item of 100 bytes.

Each contender is a queue with one option, and is measured against a plain queue beside it: by turns, in slices of half
a second, first the one and then the other, then the other way round. So what else the machine does hits both. A figure
is the quotient of the two times; ``plain`` is a plain queue against another one, and says how much noise is left.

No option is at its limit: what is measured is the cost of looking. ``Collector`` is scraped once a second, on a thread
of its own, while its queue works.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import program
from bench.goals import Figure, Goal
from bench.measure import Contender, Figures, Workload
from kestrelpy import JournaledQueue, LagPolicy, ReaderConfig

ITEM = bytes(100)
SLICE_SECONDS = 0.5
PAIRS = 4
BLOCK = 1000
"""Items between two looks at the clock."""
FAR = 1 << 40
AT_MOST = 1.02
PLAIN, SCRAPED = "plain", "Collector"
PHASE = "times plain"
Work = Callable[[JournaledQueue], Callable[[], object]]


def lagging(policy: LagPolicy) -> dict[str, Any]:
    return {"default_reader": ReaderConfig(max_lag_bytes=FAR, lag_policy=policy)}


OPTIONS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "keep_for": {"keep_for": 60.0},
    "keep_bytes": {"keep_bytes": 64 << 20},
    "max_journal_bytes": {"max_journal_bytes": FAR},
    "max_lag_bytes, WARN": lagging(LagPolicy.WARN),
    "max_lag_bytes, REFUSE": lagging(LagPolicy.REFUSE),
    "retry_delay": {"default_reader": ReaderConfig(retry_delay=1.0)},
    "dead_letter": {"default_reader": ReaderConfig(max_deliveries=3, dead_letter="dead")},
    SCRAPED: {},
}


def put(queue: JournaledQueue) -> Callable[[], object]:
    """A block of puts."""
    queue.reader()
    call = queue.put

    def block() -> None:
        for _ in range(BLOCK):
            call(ITEM)

    return block


def cycle(queue: JournaledQueue) -> Callable[[], object]:
    """A block of puts, each with a get and a commit."""
    reader = queue.reader()
    put_one, get, commit = queue.put, reader.get, reader.commit

    def block() -> None:
        for _ in range(BLOCK):
            put_one(ITEM)
            commit(get())

    return block


def timed(block: Callable[[], object], seconds: float) -> tuple[float, int]:
    """Run blocks for about so many seconds: how long they took, and how many they were."""
    count, began = 0, time.perf_counter()
    while True:
        block()
        count += 1
        took = time.perf_counter() - began
        if took >= seconds:
            return took, count


@contextlib.contextmanager
def scraping(scrape: Callable[[], object]) -> Iterator[None]:
    """One scrape on another thread, meanwhile."""
    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def scraper(queue: JournaledQueue) -> Callable[[], object]:
    from prometheus_client import CollectorRegistry, generate_latest

    from kestrelpy.metrics import Collector

    registry = CollectorRegistry()
    registry.register(Collector(queue))
    return lambda: generate_latest(registry)


def against_plain(name: str, work: Work) -> Callable[[Path, float], Figures]:
    """Measure a queue with that option, and a plain one beside it, by turns."""

    def measure(folder: Path, scale: float) -> Figures:
        seconds = max(0.01, SLICE_SECONDS * scale)
        with (
            JournaledQueue(folder / "with", "bench", **OPTIONS[name]) as queue,
            JournaledQueue(folder / "without", "bench") as plain,
        ):
            blocks = work(queue), work(plain)
            scrape = scraper(queue) if name == SCRAPED else None
            for block in blocks:
                timed(block, seconds / 5)  # the first segments, the first syncs
            took, count = [0.0, 0.0], [0, 0]
            for pair in range(PAIRS):
                for which in ((0, 1), (1, 0))[pair % 2]:
                    is_scraped = scrape is not None and which == 0 and pair % 2 == 0
                    with scraping(scrape) if is_scraped and scrape is not None else contextlib.nullcontext():
                        spent, done = timed(blocks[which], seconds)
                    took[which] += spent
                    count[which] += done
        return {PHASE: took[0] / count[0] / (took[1] / count[1])}

    return measure


def _each(work: Work) -> tuple[Contender, ...]:
    return tuple(Contender(name, against_plain(name, work)) for name in OPTIONS)


WORKLOADS = (
    Workload("put", "a put of 100 bytes, beside a plain queue", "times", _each(put)),
    Workload("cycle", "put, get and commit, beside a plain queue", "times", _each(cycle)),
)
GOALS = tuple(
    Goal(f"{workload.name}, {name}", Figure(workload.name, name, PHASE), at_most=AT_MOST)
    for workload in WORKLOADS
    for name in OPTIONS
    if name != PLAIN
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what ``argv`` asks for; returns the exit status."""
    return program.run("extras", __doc__, WORKLOADS, GOALS, argv)


if __name__ == "__main__":
    sys.exit(main())
