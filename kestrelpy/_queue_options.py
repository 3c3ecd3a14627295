"""The options of ``JournaledQueue``, for type checkers.

The type of a queue's values is that of its codec, and ``bytes`` without one. Two overloads of ``__init__`` say so, and
share these options. ``tests/unit/test_typing.py`` compares them with the arguments of ``__init__``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict

if TYPE_CHECKING:
    from kestrelpy._disk.interface import Disk
    from kestrelpy.clock import Clock
    from kestrelpy.config import ReaderConfig
    from kestrelpy.ship.options import Ship

StrPath: TypeAlias = "str | os.PathLike[str]"


class OpeningOptions(TypedDict, total=False):
    """The options by keyword, but the codec."""

    sync: float | Literal["always", "never"]
    segment_bytes: int
    max_item_bytes: int | None
    archive_dir: str | os.PathLike[str] | None
    checkpoint_interval: float
    readers: Mapping[str, ReaderConfig]
    default_reader: ReaderConfig | None
    journaled: bool
    on_corruption: Literal["raise", "quarantine"]
    inbox_interval: float | None
    ship: str | Ship | Literal[False] | None
    keep_for: float | None
    keep_bytes: int | None
    max_journal_bytes: int | None
    archive_keep_for: float | None
    archive_keep_bytes: int | None
    clock: Clock | None
    disk: Disk | None
