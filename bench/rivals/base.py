"""What a rival is to the workloads."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar

ITEM = b"x" * 100
BATCH = 1000


class Rival:
    """A queue as the workloads see it.

    ``share``: which part of the items it does, because it is slow; ``least``: no fewer than that. It is opened in a
    folder that is empty, for ``count`` items of ``item_bytes``. ``take`` returns the item and has it out for good.
    """

    name: ClassVar[str]
    share: ClassVar[float] = 1.0
    least: ClassVar[int] = 1
    put: Callable[[Any], object]
    take: Callable[[], Any]

    def __init__(self, folder: Path, count: int, item_bytes: int = len(ITEM)) -> None:
        self.folder = folder
        self.count = count
        self.item_bytes = item_bytes
        self.open()

    def open(self) -> None:
        """Open it."""

    def fill(self, count: int, item: Any) -> None:
        """Put ``count`` items."""
        put = self.put
        for _ in repeat(None, count):
            put(item)

    def drain(self, count: int) -> None:
        """Take ``count`` items out for good."""
        take = self.take
        for _ in repeat(None, count):
            take()

    def cycle(self, count: int, item: Any) -> None:
        """Put one, take one out, ``count`` times."""
        put, take = self.put, self.take
        for _ in repeat(None, count):
            put(item)
            take()

    def stock(self, count: int, item: Any) -> None:
        """Put ``count`` items, in whatever way is quickest: nobody looks at the clock."""
        self.fill(count, item)

    def close(self) -> None:
        """Let go of everything."""
