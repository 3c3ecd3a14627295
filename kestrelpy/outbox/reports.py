"""Reports."""

from typing import Any


class Looked:
    reasons: tuple[str, ...] = ()


def look(_core: Any) -> Looked:
    return Looked()
