"""Sources of the choices of a simulation: all sequences of choices, corners, and samples that lean to one side.

A choice is a number below ``stop``. In all of ``kestrelpy.testing`` the first choice means *lost* and the last *kept*.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Protocol


class Choose(Protocol):
    """A source of choices. ``random.Random`` is one."""

    def randrange(self, stop: int, /) -> int:
        """A number from 0 to ``stop - 1``."""


class Odometer:
    """Goes through all sequences of choices. The number of choices may depend on the choices before."""

    def __init__(self) -> None:
        self._digits: list[int] = []
        self._counts: list[int] = []

    def randrange(self, stop: int, /) -> int:
        at = len(self._counts)
        self._counts.append(stop)
        if at == len(self._digits):
            self._digits.append(0)
        return self._digits[at]

    def advance(self) -> bool:
        """Go to the next sequence. Returns false if there is none."""
        digits = self._digits
        while digits and digits[-1] + 1 == self._counts[len(digits) - 1]:
            digits.pop()
        self._counts.clear()
        if digits:
            digits[-1] += 1
        return bool(digits)


class Corner:
    """Always the first choice, or always the last; at the position ``but_at`` the opposite."""

    def __init__(self, *, last: bool, but_at: int = -1) -> None:
        self._last = last
        self._but_at = but_at
        self.counts: list[int] = []

    def randrange(self, stop: int, /) -> int:
        last = self._last != (len(self.counts) == self._but_at)
        self.counts.append(stop)
        return stop - 1 if last else 0


class Leaning:
    """Random choices that lean to the first or to the last. Otherwise about half of all things would always be lost."""

    def __init__(self, source: random.Random) -> None:
        self._random = source.random
        self._first = source.random() * source.random()
        self._last = 1 - source.random() * source.random() * (1 - self._first)

    def randrange(self, stop: int, /) -> int:
        at = self._random()
        if at < self._first:
            return 0
        if at > self._last:
            return stop - 1
        return int(self._random() * stop)


def choosers(lost: Sequence[int], kept: Sequence[int], limit: int, source: random.Random) -> Iterator[Choose]:
    """Yield sources of choices: all lost, all kept, a single thing kept or lost, and samples.

    ``limit // 2`` sources at most are of single things. There are more samples than needed.
    """
    yield Corner(last=False)
    yield Corner(last=True)
    single = [Corner(last=False, but_at=at) for at in range(len(lost))]
    single += [Corner(last=True, but_at=at) for at in range(len(kept))]
    source.shuffle(single)
    yield from single[: limit // 2]
    for _ in range(4 * limit):
        yield Leaning(source)
