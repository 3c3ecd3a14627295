"""Checks of numbers in options: a number that would break something later is refused where it is given."""

from __future__ import annotations

import math
from operator import index


def check_whole(name: str, value: object, least: int | None = 0) -> int:
    """``value`` as an ``int``. Raises ``TypeError`` for anything but a whole number (a ``bool`` is none), and
    ``ValueError`` for a number below ``least``, if there is one.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = index(value)  # type: ignore[arg-type]  # that is what it says
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if least is not None and number < least:
        least_words = "not be negative" if least == 0 else f"be at least {least:,}"
        raise ValueError(f"{name} must {least_words}, not {value!r}")
    return number


def check_seconds(name: str, value: object, *, above_zero: bool = False) -> float:
    """``value`` as a ``float``, which may be infinite. Raises ``TypeError`` for anything but a number (a ``bool`` is
    none), and ``ValueError`` for NaN or a number that is too small.
    """
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        seconds = float(value)  # type: ignore[arg-type]  # that is what it says
    except OverflowError:
        seconds = math.inf
    except TypeError:
        raise TypeError(f"{name} must be seconds, not {value!r}") from None
    if not (seconds > 0 if above_zero else seconds >= 0):
        raise ValueError(f"{name} must {'be above 0' if above_zero else 'not be negative'}, not {value!r}")
    return seconds


def check_timeout(timeout: float | None) -> None:
    """Raise ``ValueError`` for a timeout below zero, ``TypeError`` for one that is no number."""
    if timeout is None:
        return
    try:
        is_good = timeout >= 0
    except TypeError:
        raise TypeError(f"timeout must be seconds, or None, not {timeout!r}") from None
    if not is_good:
        raise ValueError(f"'timeout' must be a non-negative number, not {timeout!r}")
