"""How much the long tests do, and what they have counted.

``KESTRELPY_SHARE=0.05`` does a twentieth of it, for the one who is at work; ``KESTRELPY_LONG=1`` ten times as much.
``KESTRELPY_SEED`` moves all seeds: another night, other cases.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping

SHARE = float(os.environ.get("KESTRELPY_SHARE", "1")) * (10 if os.environ.get("KESTRELPY_LONG") == "1" else 1)
SEED = int(os.environ.get("KESTRELPY_SEED", "1"))


def share(count: int) -> int:
    """So many of ``count`` as are wanted; at least one."""
    return max(1, round(count * SHARE))


class Tally:
    """What one test has counted, to be shown with all others at the end."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, name: str, counts: int | Mapping[str, int]) -> None:
        self.counts[name] += counts if isinstance(counts, int) else sum(counts.values())
