"""What the tests of all parsers do: feed bytes, cut them anywhere, and look at every step."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any, Protocol


class CheckedParser(Protocol):
    """A parser with its invariants."""

    def feed(self, data: bytes) -> None: ...

    def next(self) -> tuple[Any, ...] | None: ...

    def _check(self) -> None: ...


def commands(parser: CheckedParser, *pieces: bytes) -> list[tuple[Any, ...]]:
    """All commands that come of these pieces."""
    found = []
    for piece in pieces:
        parser.feed(piece)
        parser._check()
        while (command := parser.next()) is not None:
            found.append(command)
            parser._check()
    parser._check()
    return found


def cut(data: bytes, rng: random.Random) -> list[bytes]:
    """The same bytes in small pieces."""
    pieces, at = [], 0
    while at < len(data):
        step = rng.randint(1, 5)
        pieces.append(data[at : at + step])
        at += step
    return pieces


def memory_of(parser: CheckedParser, data: bytes, step: int = 2) -> int:
    """How many bytes of memory these bytes take that are no command yet, if they arrive in small pieces."""
    tracemalloc.start()
    try:
        for at in range(0, len(data), step):
            parser.feed(data[at : at + step])
            assert parser.next() is None
        parser._check()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
