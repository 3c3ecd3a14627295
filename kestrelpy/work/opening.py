"""The options of ``WorkQueue``, for type checkers.

The type of the bodies is that of the queue's codec, and ``bytes`` without one. Two overloads of ``__init__`` say so,
and share these options. ``tests/unit/test_typing.py`` compares them with the arguments of ``__init__``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from kestrelpy import Clock
    from kestrelpy._disk.interface import Disk
    from kestrelpy.ship import Ship


class WorkOptions(TypedDict, total=False):
    """The options by keyword, but the codec."""

    max_job_bytes: int
    max_jobs: int | None
    max_bytes: int | None
    max_tubes: int | None
    max_attempts: int | None
    retry_delay: float | Callable[[int], float]
    sync: float | Literal["always", "never"]
    segment_bytes: int
    checkpoint_interval: float
    on_corruption: Literal["raise", "quarantine"]
    ship: str | Ship | Literal[False] | None
    group_commit: bool
    clock: Clock | None
    disk_clock: Clock | None
    disk: Disk | None
