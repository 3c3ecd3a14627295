"""Shared by all processes of the pipeline: names, folders, and what an item, a word and an alert is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kestrelpy.demo.corpus import Corpus

if TYPE_CHECKING:
    from kestrelpy.ship import Ship

LINES, ALERTS, READER = "lines", "alerts", "spark"
WORD = "[A-Za-z_]+"
SIGNS = ("TODO", "FIXME", "XXX")
"""A line that contains one of these is an alert."""

_WORD = re.compile(WORD)


@dataclass(frozen=True)
class PipelineRun:
    """One run, in one folder. ``store``: where the queues are shipped to, and where Spark reads and writes them; empty:
    Spark does so in the folder.
    """

    folder: str
    lines: int
    pace: float
    segment_bytes: int = 1 << 20
    max_items: int = 30_000
    store: str = ""

    @property
    def root(self) -> Path:
        return Path(self.folder)

    @property
    def queues(self) -> str:
        return f"{self.folder}/queues"

    @property
    def seen_by_spark(self) -> str:
        """Where Spark finds the queues."""
        return self.store or self.queues

    @property
    def ship(self) -> Ship | None:
        """How the queues are shipped."""
        if not self.store:
            return None

        from kestrelpy.ship import Ship  # a pipeline without a store does without it

        return Ship(self.store, interval=0.2, inbox_interval=0.2)

    @property
    def archive(self) -> str:
        return f"{self.folder}/archive"

    @property
    def words(self) -> str:
        return f"{self.folder}/words"

    def save(self) -> None:
        """Write the plan to a file, for the other processes."""
        (self.root / "plan.json").write_text(json.dumps(self.__dict__), encoding="utf-8")

    @classmethod
    def load(cls, folder: str) -> PipelineRun:
        """Read the plan that ``save`` wrote."""
        return cls(**json.loads((Path(folder) / "plan.json").read_text(encoding="utf-8")))


def items(corpus: Corpus, count: int) -> Iterator[dict[str, Any]]:
    """Yield the first ``count`` lines as items, always the same. Item ``n``, counted from 1, gets the id ``n``."""
    left = count
    for name, size in corpus.files:
        for number, line in enumerate((each for block in Corpus(((name, size),)).blocks() for each in block), 1):
            if not left:
                return
            left -= 1
            yield {"file": Path(name).name, "line": number, "text": line.decode("utf-8", "replace")}


def words_in(text: str) -> int:
    """The number of words in ``text``, counted as the query does."""
    return len(_WORD.findall(text))


def is_alert(text: str) -> bool:
    """True if ``text`` is an alert, by the same rule as in the query."""
    return any(sign in text for sign in SIGNS)
