"""When to raise an alarm: a series of looks at a system, reduced to "error" and "recovery".

Source: yoltq's error poller. A single bad look is no alarm and a single good one no recovery, so that an alarm does not
flap. An alarm is repeated while the errors last, so that it is not forgotten.
"""

from __future__ import annotations

from typing import Literal

from kestrelpy.outbox._checks import check_count, check_number

__all__ = ["ErrorWatch"]


class ErrorWatch:
    """Says when a system that is looked at regularly is in error, and when it has recovered.

    ``min_count``: so many looks in a row decide. ``repeat_after``: seconds until an alarm is raised again; infinity:
    never again. For one thread. Raises ``TypeError`` and ``ValueError``.

    >>> watch = ErrorWatch(min_count=2)
    >>> [watch.observe(now_ms, errors) for now_ms, errors in [(0, 3), (60_000, 2), (120_000, 0), (180_000, 0)]]
    [None, 'error', None, 'recovery']
    """

    __slots__ = ("_alarm_ms", "_bad", "_good", "_min_count", "_repeat_ms")

    def __init__(self, min_count: int = 3, repeat_after: float = 3600.0) -> None:
        self._min_count = check_count("min_count", min_count, 1)
        self._repeat_ms = check_number("repeat_after", repeat_after) * 1000
        self._bad = 0  # looks in a row, up to the last one
        self._good = 0
        self._alarm_ms: int | None = None  # when the last alarm was raised; None: all is well

    def observe(self, now_ms: int, errors: int) -> Literal["error", "recovery"] | None:
        """Take in a look that found ``errors`` errors (0: a good one), and say what it means.

        ``"error"``: the last ``min_count`` looks were bad, and no alarm is on; or an alarm is on, it was raised last
        more than ``repeat_after`` ago, and the last ``min_count`` looks were not all good. ``"recovery"``: an alarm is
        on, and the last ``min_count`` looks were good. Else ``None``. ``now_ms`` may jump. Raises ``TypeError`` and
        ``ValueError`` for anything but a number of errors.
        """
        if check_count("errors", errors):
            self._bad, self._good = self._bad + 1, 0
        else:
            self._bad, self._good = 0, self._good + 1
        if self._alarm_ms is None:
            if self._bad < self._min_count:
                return None
            self._alarm_ms = now_ms
            return "error"
        if self._good >= self._min_count:
            self._alarm_ms = None
            return "recovery"
        # A clock that is set back must not keep the next alarm away until it has caught up.
        self._alarm_ms = min(self._alarm_ms, now_ms)
        if now_ms - self._alarm_ms > self._repeat_ms:
            self._alarm_ms = now_ms
            return "error"
        return None

    def _check(self) -> None:
        """The invariants."""
        assert not (self._bad and self._good)
        assert self._alarm_ms is None or self._good < self._min_count
        assert self._alarm_ms is not None or self._bad < self._min_count
