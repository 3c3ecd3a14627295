"""What the project is to reach, each goal a figure or the quotient of two of one run: ``python -m bench goals FILE``.

Costs are times: that we are three times as fast as a rival means that its time is three times ours. A goal is judged by
medians. It counts at the full scale alone; the table says where a run was smaller.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.report import short

OURS = "kestrelpy never"
ALWAYS = "kestrelpy always"
CONCURRENT = "kestrelpy Concurrent"
BATCHES = "kestrelpy batches"


class Figure(NamedTuple):
    """Where a figure stands in the results."""

    workload: str
    contender: str
    phase: str
    at: int | None = None


@dataclass(frozen=True)
class Goal:
    """``over``, divided by ``under`` if there is one, is to be at least or at most so much."""

    text: str
    over: Figure
    under: Figure | None = None
    at_least: float | None = None
    at_most: float | None = None

    def measured(self, figures: dict[Figure, float]) -> float | None:
        """The quotient, or nothing if it was not measured."""
        over = figures.get(self.over)
        if over is None or self.under is None:
            return over
        under = figures.get(self.under)
        return over / under if under else None

    def reached(self, value: float) -> bool:
        """Whether a value is good enough."""
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)

    @property
    def wanted(self) -> str:
        """The bound as text."""
        return f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"


def _faster(text: str, workload: str, phase: str, ours: str, rivals: dict[str, float]) -> Iterator[Goal]:
    """So many times as fast as each of these."""
    for rival, times in rivals.items():
        over, under = Figure(workload, rival, phase), Figure(workload, ours, phase)
        yield Goal(f"{text}: {rival}'s time over ours", over, under, at_least=times)


def _within(text: str, workload: str, phase: str, ours: str, times: float, floor: str = "floor") -> Goal:
    """So many times the floor's cost at most."""
    over, under = Figure(workload, ours, phase), Figure(workload, floor, phase)
    return Goal(f"{text}: ours over the floor's", over, under, at_most=times)


def _memory() -> Iterator[Goal]:
    rivals = {"queue.Queue": 3.0, "culsans": 3.0}
    yield from _faster("memory, filled then emptied", "memory", "both", CONCURRENT, rivals)
    yield from _faster("memory, put and get in turn", "memory", "cycle", CONCURRENT, rivals)
    for side in (1, 4):
        over, under = (Figure("memory-threads", name, "items/s", side) for name in (CONCURRENT, "queue.Queue"))
        yield Goal(f"memory, threads {side}/{side}: our items/s over queue.Queue's", over, under, at_least=1.5)
    over, under = (Figure("wake-up", name, "p50") for name in (CONCURRENT, "queue.Queue"))
    yield Goal("parked consumer, p50: ours over queue.Queue's", over, under, at_most=1.0)


def _durable() -> Iterator[Goal]:
    yield from _faster("put", "put", "put", OURS, {"queuelib": 1.2})
    yield _within("put", "put", "put", OURS, 1.5)
    rivals = {
        "queuelib": 1.3,
        "persist-queue sqlite": 20.0,
        "litequeue": 20.0,
        "diskcache Deque": 20.0,
        "sqlite3 NORMAL": 8.0,
        "rocksdict": 3.0,
        "lmdb": 3.0,
    }
    for text, workload, phase in (("put-take", "put-take", "both"), ("cycle", "cycle", "cycle")):
        yield from _faster(text, workload, phase, OURS, rivals)
        yield _within(text, workload, phase, OURS, 1.6)
    yield from _faster("put_many(1000)", "batch", "put", BATCHES, {"lmdb batches": 1.0, "sqlite3 batches": 2.5})
    yield from _faster("get_many, commit_many", "batch", "take", BATCHES, {"sqlite3 batches": 2.0})


def _synced() -> Iterator[Goal]:
    def at(name: str, threads: int) -> Figure:
        return Figure("sync", name, "put", threads)

    alone, many = at(ALWAYS, 1), at(ALWAYS, 64)
    yield Goal("always, 1 thread: sqlite3 FULL's time over ours", at("sqlite3 FULL", 1), alone, at_least=1.3)
    yield Goal("always, 64 threads: our one thread's time over theirs", alone, many, at_least=5.0)
    yield Goal("always, 64 threads: sqlite3 FULL's time over ours", at("sqlite3 FULL", 64), many, at_least=8.0)
    futures = at(f"{ALWAYS}, put_future", 1)
    yield Goal("put_future, 1 thread: put's time over its", alone, futures, at_least=20.0)


def _sizes() -> Iterator[Goal]:
    one, sixteen = (Figure("readers", OURS, "put", readers) for readers in (1, 16))
    yield Goal("put with 16 readers over with one", sixteen, one, at_most=1.3)
    short, long = (Figure("behind", OURS, "cycle", waiting) for waiting in (10, 1_000_000))
    yield Goal("cycle after a backlog of 1,000,000 items over one of ten", long, short, at_most=1.15)
    for how, most in (("closed", 100), ("killed", 500)):
        yield Goal(f"ms to open 10 GB, {how}", Figure("reopen", "kestrelpy", f"ms, backlog, {how}"), at_most=most)
    for phase in ("write", "read"):
        over, under = (Figure("large", name, phase) for name in ("os.write, os.read", OURS))
        yield Goal(f"1 MB items, {phase}: a bare file's time over ours", over, under, at_least=0.8)
    for phase, at_most in {
        "s to open 1,000 and put one each": 1.0,
        "threads": 2.0,
        "KiB of disk, apparent, the largest": 128.0,
        "KiB of disk, real, the largest": 128.0,
    }.items():
        yield Goal(f"1,000 queues: {phase}", Figure("thousand", "kestrelpy", phase), at_most=at_most)
    never = Figure("thousand", "kestrelpy never", "s to open 1,000 and put one each")
    yield Goal(f"1,000 queues, never: {never.phase}", never, at_most=1.0)


def _elsewhere() -> Iterator[Goal]:
    for part in ("200/s", "2,000/s", "flat out, 64 ahead"):
        figure = Figure("detached", "kestrelpy", f"us p50, {part}")
        yield Goal(f"reader in another process: {figure.phase}", figure, at_most=1000.0)
    idle = Figure("detached", "kestrelpy", "ms of processor a second, idle")
    yield Goal(f"reader in another process: {idle.phase}", idle, at_most=10.0)
    figure = Figure("import", "kestrelpy", "ms over a bare interpreter")
    yield Goal(f"import: {figure.phase}", figure, at_most=30.0)


GOALS: tuple[Goal, ...] = (*_memory(), *_durable(), *_synced(), *_sizes(), *_elsewhere())


def _on_spark() -> Iterator[Goal]:
    read = Figure("spark-read", "kestrelpy", "warm")
    yield Goal("batch read: us an item", read, at_most=1 / 3)
    parquet = Figure("spark-read", "Parquet", "warm")
    yield Goal("batch read: Parquet's time over ours", parquet, read, at_least=0.5)
    local = Figure("spark-store", "the owner's folder", "read")
    for store in ("a folder as store", "SeaweedFS"):
        over = Figure("spark-store", store, "read")
        yield Goal(f"batch read from {store}: the time from the owner's folder over its", local, over, at_least=0.8)
    stream = Figure("spark-stream", "kestrelpy", "thousand items a second, after the first batch")
    yield Goal("stream into Parquet: thousand items a second", stream, at_least=300.0)
    yield Goal(
        "stream: seconds p50 from put to commit", Figure("spark-latency", "kestrelpy", "seconds p50"), at_most=2.0
    )
    by_store = Figure("spark-latency", "a folder as store", "seconds p50")
    yield Goal("stream from a store: seconds p50 from put to commit", by_store, at_most=2.5)
    yield Goal("sink: us an item", Figure("spark-sink", "kestrelpy", "sink"), at_most=5.0)
    yield Goal("driver buffer: us an item", Figure("spark-buffer", "kestrelpy", "buffer"), at_most=10.0)


GOALS_ON_SPARK: tuple[Goal, ...] = tuple(_on_spark())


def figures_of(facts: dict[str, Any]) -> dict[Figure, float]:
    """The medians of a run's results."""
    return {
        Figure(result["workload"], row["contender"], row["phase"], row.get("at")): row["median"]
        for result in facts["results"]
        for row in result["rows"]
    }


def table(facts: dict[str, Any], *, all_of_them: bool) -> str:
    """Goal, measured, wanted, and whether that is reached: for people. Empty if nothing of it was measured."""
    figures = figures_of(facts)
    on_spark = any(figure.workload.startswith("spark-") for figure in figures)
    rows = [("goal", "measured", "wanted", "")]
    verdicts = []
    for goal in GOALS_ON_SPARK if on_spark else GOALS:
        value = goal.measured(figures)
        if value is not None:
            verdicts.append(goal.reached(value))
            rows.append((goal.text, short(value), goal.wanted, "reached" if verdicts[-1] else "SHORT"))
        elif all_of_them:
            rows.append((goal.text, "-", goal.wanted, "not measured"))
    if len(rows) == 1:
        return ""
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["goals: quotients of medians of this run"]
    for text, measured, wanted, verdict in rows:
        line = f"  {text.ljust(widths[0])}  {measured.rjust(widths[1])}  {wanted.ljust(widths[2])}  {verdict}"
        lines.append(line.rstrip())
    lines.append(f"  {sum(verdicts)} of {len(verdicts)} reached")
    scale = facts["settings"]["scale"]
    if scale != 1:
        lines.append(f"  at a scale of {scale:g}: this says that it runs, not how fast")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """``python -m bench goals FILE``."""
    parser = argparse.ArgumentParser(
        prog="python -m bench goals", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="what --json has written")
    args = parser.parse_args(argv)
    print(table(json.loads(args.file.read_text("utf-8")), all_of_them=True), end="")
    return 0
