"""Checks of the arguments of a work queue, and their conversion to plain types, before anything is changed.

Callers pass many kinds of numbers: ``Decimal`` from DynamoDB, scalars from numpy, ``Fraction``. They are converted to
float (or int) here, outside the lock, because ``__float__`` may run a caller's code.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Literal, SupportsFloat

from kestrelpy.config import check_takes_count

PLAIN = frozenset((int, float))
"""The types of numbers that need no conversion. ``bool`` is not among them."""
MAX_PRIORITY = (1 << 32) - 1
MAX_SECONDS = 1 << 32
"""The longest delay, time to run, pause or life: 136 years."""
MAX_KEY_BYTES = 255


def _as_float(value: object) -> float | None:
    """``value`` as a float; ``None`` if it is not a number."""
    if isinstance(value, bool | str | bytes | bytearray):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def check_seconds(what: str, value: SupportsFloat) -> float:
    """A duration that may be 0. Raises ``ValueError``."""
    seconds = _as_float(value)
    if seconds is None or not 0 <= seconds <= MAX_SECONDS:
        raise ValueError(f"{what} must be from 0 to {MAX_SECONDS} seconds, not {value!r}")
    return seconds


def check_retry_delay(delay: float | Callable[[int], float]) -> float | Callable[[int], float]:
    """Seconds, or a function, whose results are checked when there are any. Raises ``ValueError``, ``TypeError``."""
    if not callable(delay):
        return check_seconds("retry_delay", delay)
    check_takes_count("retry_delay", delay)
    return delay


def check_span(what: str, value: SupportsFloat) -> float:
    """A duration above 0. Raises ``ValueError``."""
    seconds = _as_float(value)
    if seconds is None or not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"{what} must be above 0, and at most {MAX_SECONDS} seconds, not {value!r}")
    return seconds


def check_timeout(timeout: SupportsFloat | None) -> float | None:
    """How long to wait, in seconds; ``None``: for ever. Raises ``ValueError``."""
    if timeout is None:
        return None
    seconds = _as_float(timeout)
    if seconds is None or not seconds >= 0:
        raise ValueError(f"timeout must be seconds and not negative, or None, not {timeout!r}")
    return seconds


def check_priority(priority: int) -> int:
    """Raises ``ValueError``."""
    try:
        number = -1 if isinstance(priority, bool) else index(priority)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_PRIORITY:
        raise ValueError(f"priority must be an int from 0 to {MAX_PRIORITY}, not {priority!r}")
    return number


def check_key(key: str) -> str:
    """Raises ``ValueError``."""
    if not isinstance(key, str) or not 0 < len(key.encode()) <= MAX_KEY_BYTES:
        shown = f"one of {len(key.encode())}: {key[:20]!r}..." if isinstance(key, str) and key else repr(key)
        raise ValueError(f"key must be a str of 1 to {MAX_KEY_BYTES} bytes in UTF-8, not {shown}")
    return key


def check_limit(what: str, value: int | None) -> int | None:
    """An int of at least 1, or ``None`` for no limit. Raises ``ValueError``."""
    if value is None:
        return None
    try:
        number = 0 if isinstance(value, bool) else index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{what} must be an int of at least 1, or None, not {value!r}")
    return number


def check_job_bytes(max_job_bytes: int, largest: int | None) -> None:
    """``largest``: the most that the journal accepts; ``None`` if there is no journal. Raises ``ValueError``."""
    if isinstance(max_job_bytes, bool) or not isinstance(max_job_bytes, int) or max_job_bytes < 0:
        raise ValueError(f"max_job_bytes must be an int of at least 0, not {max_job_bytes!r}")
    if largest is not None and max_job_bytes > largest:
        raise ValueError(f"max_job_bytes must be at most {largest:,} for this journal, not {max_job_bytes!r}")


def check_sync(sync: float | Literal["always", "never"], ship: object, directory: str | None) -> bool:
    """Whether each call must sync. ``ship``: how the queue is shipped. Raises ``ValueError``."""
    if ship and directory is None:
        raise ValueError("a work queue in memory is not shipped: ship= needs a directory")
    if sync not in ("always", "never") and (
        isinstance(sync, bool) or not isinstance(sync, int | float) or not sync >= 0
    ):
        raise ValueError(f"sync must be 'always', 'never' or seconds, not {sync!r}")
    return sync in ("always", 0) or getattr(ship, "acks", "disk") == "shipped"


def check_interval(checkpoint_interval: float) -> float:
    """Raises ``ValueError``."""
    seconds = _as_float(checkpoint_interval)
    if seconds is None or not 0 < seconds < float("inf"):
        raise ValueError(f"checkpoint_interval must be above 0, not {checkpoint_interval!r}")
    return seconds


def check_on_corruption(on_corruption: str) -> bool:
    """Whether to skip records that are not intact. Raises ``ValueError``."""
    if on_corruption not in ("raise", "quarantine"):
        raise ValueError(f"on_corruption must be 'raise' or 'quarantine', not {on_corruption!r}")
    return on_corruption == "quarantine"
