"""What the processes of the pipeline agree on: names, folders, what an item is, what is counted, what an alert is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kestrelpy.demo.corpus import Corpus

LINES, ALERTS, READER = "lines", "alerts", "spark"
WORD = "[A-Za-z_]+"
SIGNS = ("TODO", "FIXME", "XXX")
"""A line that has one of these is worth an alert."""

_WORD = re.compile(WORD)


@dataclass(frozen=True)
class PipelineRun:
    """One run, in one folder."""

    folder: str
    lines: int
    pace: float
    segment_bytes: int = 1 << 20
    max_items: int = 30_000

    @property
    def root(self) -> Path:
        return Path(self.folder)

    @property
    def queues(self) -> str:
        return f"{self.folder}/queues"

    @property
    def archive(self) -> str:
        return f"{self.folder}/archive"

    @property
    def words(self) -> str:
        return f"{self.folder}/words"

    def save(self) -> None:
        """Write it down for the other processes."""
        (self.root / "plan.json").write_text(json.dumps(self.__dict__), encoding="utf-8")

    @classmethod
    def load(cls, folder: str) -> PipelineRun:
        """What ``save`` wrote."""
        return cls(**json.loads((Path(folder) / "plan.json").read_text(encoding="utf-8")))


def items(corpus: Corpus, count: int) -> Iterator[dict[str, Any]]:
    """The first ``count`` lines as the items that are put, always the same ones: the ``n``-th has the id ``n``."""
    left = count
    for name, size in corpus.files:
        for number, line in enumerate((each for block in Corpus(((name, size),)).blocks() for each in block), 1):
            if not left:
                return
            left -= 1
            yield {"file": Path(name).name, "line": number, "text": line.decode("utf-8", "replace")}


def words_in(text: str) -> int:
    """As the query counts them."""
    return len(_WORD.findall(text))


def is_alert(text: str) -> bool:
    """As the query sees it."""
    return any(sign in text for sign in SIGNS)
