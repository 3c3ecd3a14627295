"""``Page``: what one scrape has found, by metric."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

__all__ = ["Key", "MetricSource", "Page", "Spread", "Value"]

Key: TypeAlias = tuple[str, ...]
"""The labels of a sample: its folder (empty if it has none), and the values of the metric's labels. One tuple serves
all metrics with these labels: a page has tens of thousands of samples, and each object of them costs.
"""


class Spread(NamedTuple):
    """A histogram. ``buckets``: upper bounds, and how many values are at most that large; the last one is infinite.
    ``total``: the sum of all values.
    """

    buckets: tuple[tuple[str, int], ...]
    total: float

    @property
    def number(self) -> int:
        """How many values there are."""
        return self.buckets[-1][1]


Value: TypeAlias = float | Spread


class Page:
    """The samples of one scrape. Of two with the same labels, the first counts."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[Key, Value]] = {}

    def add(self, name: str, key: Key, value: Value) -> None:
        """Add a sample of the metric ``name``, unless there is one with these labels."""
        self._samples.setdefault(name, {}).setdefault(key, value)

    def samples(self, name: str) -> dict[Key, Value]:
        """The samples of one metric."""
        return self._samples.get(name, {})


class MetricSource(Protocol):
    """What samples come from: a queue, a folder, a server. ``directory``: its folder, by which its samples can be told
    from those of others; empty if it has none. ``name``: of the queue, empty for all that is no queue.
    """

    directory: str
    name: str

    def report(self, page: Page) -> None:
        """Add the samples of this moment. Raises nothing."""
