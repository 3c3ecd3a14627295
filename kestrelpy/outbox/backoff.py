"""Back-off: how long a job that has failed waits for its next run."""

from __future__ import annotations

import sys
from collections.abc import Callable

from kestrelpy._value import Value, set_field
from kestrelpy.outbox._checks import check_count, check_number
from kestrelpy.outbox._logging import log

__all__ = ["Exponential", "exponential"]

MAX_SECONDS = 1 << 32
"""The longest pause, 136 years: what a function gives may be finite and yet no time that a database can store."""
_FINITE = sys.float_info.max
_MANY = 1 << 63
"""More steps than any factor needs to get from the smallest number to the largest."""


class Exponential(Value):
    """Pauses that grow by ``factor`` with each failure, from ``first`` to ``most`` seconds, as ``exponential`` makes
    them. Frozen, and callable: ``backoff(failures)`` is ``backoff.seconds(failures)``.

    ``jitter``: the share of a pause that chance may add or take. Jobs that failed together do not come back together.
    """

    first: float = 5.0
    factor: float = 2.0
    most: float = 900.0
    jitter: float = 0.1

    def __post_init__(self) -> None:
        set_field(self, "first", check_number("first", self.first, 0.0, MAX_SECONDS))
        set_field(self, "factor", check_number("factor", self.factor, 1.0, _FINITE))
        set_field(self, "most", check_number("most", self.most, 0.0, MAX_SECONDS))
        set_field(self, "jitter", check_number("jitter", self.jitter, 0.0, 1.0))
        if self.most < self.first:
            raise ValueError(f"most must be at least first, {self.first!r}, not {self.most!r}")

    def __call__(self, failures: int) -> float:
        """Seconds to wait after so many failures (1, 2, ...), without jitter."""
        return self.seconds(failures)

    def seconds(self, failures: int, unit: float = 0.5) -> float:
        """Seconds to wait after so many failures (1, 2, ...).

        ``unit``: a random number, at least 0 and below 1, which decides what jitter adds or takes; 0.5: nothing. Raises
        ``TypeError`` and ``ValueError``.
        """
        grown = min(check_count("failures", failures, 1) - 1, _MANY)
        if not 0 <= unit < 1:
            raise ValueError(f"unit must be at least 0 and below 1, not {unit!r}")
        try:
            pause = min(self.first * self.factor**grown, self.most)
        except OverflowError:
            pause = self.most if self.first else 0.0
        return pause * (1 + self.jitter * (2 * unit - 1))


def exponential(first: float = 5.0, factor: float = 2.0, most: float = 900.0, jitter: float = 0.1) -> Exponential:
    """A ``backoff`` for queues: ``first`` seconds after the first failure, ``factor`` times as long after each other
    one, and ``most`` seconds at last.

    Each pause is made longer or shorter by chance, by up to ``jitter`` times itself. ``factor`` is at least 1 and
    ``jitter`` from 0 to 1. Raises ``TypeError`` and ``ValueError``.
    """
    return Exponential(first, factor, most, jitter)


def seconds_of(
    backoff: float | Callable[[int], float], failures: int, unit: float, default: Exponential, *, queue: str = ""
) -> float:
    """Seconds to wait by the option ``backoff`` of ``queue``: at least 0, at most ``MAX_SECONDS``.

    An option that raises, or gives no finite number of at least 0, is logged, and ``default`` is used.
    """
    try:
        if isinstance(backoff, Exponential):
            seconds: object = backoff.seconds(failures, unit)
        else:
            seconds = backoff(failures) if callable(backoff) else backoff
        pause = check_number("what backoff gives", seconds, 0.0, _FINITE)
    except (Exception, SystemExit):
        pause = default.seconds(failures, unit)
        log.exception(
            "queue %r: backoff failed after failure %s of a job; %.1f s are taken instead", queue, failures, pause
        )
    return min(pause, MAX_SECONDS)
