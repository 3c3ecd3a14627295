"""How much the long tests do, and what they have counted.

``make test`` does a twentieth of what docs/guarantees.md publishes for every commit, and of a test with many cases it
draws some; CI does a quarter, with all cases; ``make test-all`` does all of it. ``KESTRELPY_SHARE`` is the share: 0.05
if it is not set, 1 for all of it, 10 for ten times as much. ``KESTRELPY_SEED`` moves all seeds: another night, other
cases.
"""

from __future__ import annotations

import os
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeVar

import pytest

T = TypeVar("T")

SHARE = float(os.environ.get("KESTRELPY_SHARE", "0.05")) * (10 if os.environ.get("KESTRELPY_LONG") == "1" else 1)
SEED = int(os.environ.get("KESTRELPY_SEED", "1"))
ALL = SHARE >= 1
"""Whether this is ``make test-all``: nothing is left out for its time."""
LONG = SHARE >= 10
"""Whether what is sampled even there is exhausted."""

BRIEF_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
"""For a Java that lives for a minute and sees hundreds of rows: nothing is worth compiling well, or checking."""

SLOW_SPARK = [
    pytest.mark.slow_spark,
    pytest.mark.skipif(
        os.environ.get("KESTRELPY_LONG") != "1", reason="starts drivers or executors: make test-spark runs it"
    ),
]
"""The marks of a test that starts drivers or executors of its own, and takes the better part of a minute with that."""
takes_long = pytest.mark.skipif(SHARE < 0.25, reason="takes long: CI and make test-all run it")


def share(count: int) -> int:
    """So many of ``count`` as are wanted; at least one."""
    return max(1, round(count * SHARE))


def drawn(cases: Iterable[T], count: int) -> list[T]:
    """``count`` of the cases, drawn by the seed, in their order; all of them in ``make test-all``."""
    every = list(cases)
    if ALL or count >= len(every):
        return every
    return [every[at] for at in sorted(random.Random(SEED).sample(range(len(every)), count))]


def left_out(items: Iterable[pytest.Item], most: int) -> set[pytest.Item]:
    """Of each test with more than ``most`` cases: all but so many, drawn by the seed."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    return {
        item
        for name, every in cases.items()
        if len(every) > most
        for item in random.Random(f"{SEED} {name}").sample(every, len(every) - most)
    }


class Tally:
    """What one test has counted, to be shown with all others at the end."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, name: str, counts: int | Mapping[str, int]) -> None:
        self.counts[name] += counts if isinstance(counts, int) else sum(counts.values())
