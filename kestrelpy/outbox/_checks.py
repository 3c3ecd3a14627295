"""Checks of numbers in arguments: a number that would break something later is refused where it is given."""

from __future__ import annotations

import math
from operator import index


def check_count(name: str, value: object, least: int = 0) -> int:
    """``value`` as an ``int``. Raises ``TypeError`` for anything but a whole number (a ``bool`` is none), and
    ``ValueError`` for a number below ``least``.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = index(value)  # type: ignore[arg-type]  # that is what it says
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least:,}, not {value!r}")
    return number


def check_number(name: str, value: object, least: float = 0.0, most: float = math.inf) -> float:
    """``value`` as a ``float`` (of ``Decimal``, say). Raises ``TypeError`` for anything but a number (a ``bool`` is
    none), and ``ValueError`` for NaN, and for a number that is not from ``least`` to ``most``. ``most`` is infinite
    where infinity is allowed.
    """
    try:
        if isinstance(value, bool | str | bytes | bytearray):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]  # that is what it says
    except OverflowError:
        number = math.inf
    except TypeError:
        raise TypeError(f"{name} must be a number, not {value!r}") from None
    if not least <= number <= most:
        wanted = f"at least {least:,}" if math.isinf(most) else f"from {least:,} to {most:,}"
        raise ValueError(f"{name} must be {wanted}, not {value!r}")
    return number


def check_timeout(timeout: float | None) -> None:
    """Raises ``TypeError`` and ``ValueError`` for what is neither ``None`` nor a number of seconds."""
    if timeout is not None:
        check_number("timeout", timeout)
