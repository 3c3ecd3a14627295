"""The lease of an owner, as its owner keeps it and as others see it: rule (S16) of docs/ship.md.

A lease is a property of an epoch, said in each of its slots. The owner appends a slot at least each ``lease / 4``; when
``2/3`` of it have passed since the owner last *began* a request that was decided for it, its puts are refused. Whoever
has seen the end of the log unchanged for a whole lease may append a FENCE. No clock is compared with another one: both
measure how long something takes, by clocks that go on while a machine is suspended.

Before the slot n that is seen at a time t, its creation was begun. So the owner's time runs out ``lease / 3`` before
that of anybody who watches, whatever the requests take.
"""

from __future__ import annotations

from collections.abc import Callable

from kestrelpy.clock import SystemClock
from kestrelpy.ship.manifest import LogState

BEATS = 4
"""So many slots an owner appends in the time of its lease, at least."""


class OwnLease:
    """How long this owner may accept puts. ``seconds``: of the lease. It is made before the FENCE is sent."""

    def __init__(self, seconds: float, elapsed: Callable[[], float] | None = None) -> None:
        self.seconds = seconds
        self._elapsed = elapsed or SystemClock.elapsed
        self._begun = self._renewed = self._elapsed()

    def begin(self) -> None:
        """A slot is about to be sent for the first time."""
        self._begun = self._elapsed()

    def renew(self) -> None:
        """The slot that was begun last is decided: it is ours. What counts is when it was begun."""
        self._renewed = self._begun

    @property
    def left(self) -> float:
        """Seconds for which puts are accepted yet."""
        return self._renewed + self.seconds * 2 / 3 - self._elapsed()

    @property
    def next_beat(self) -> float:
        """Seconds until a slot must be appended, if there is nothing to ship until then."""
        return self._renewed + self.seconds / BEATS - self._elapsed()


class LeaseWatch:
    """What somebody else has seen of the lease of a log's owner. ``see`` is called whenever he has read the log to its
    end.
    """

    def __init__(self, elapsed: Callable[[], float] | None = None) -> None:
        self._elapsed = elapsed or SystemClock.elapsed
        self._end = (-1, 0)
        self._since = self._elapsed()
        self._lease_ms = 0

    def see(self, state: LogState) -> None:
        """This was the end of the log a moment ago."""
        if (state.slot, state.crc) != self._end:
            self._end = (state.slot, state.crc)
            self._since = self._elapsed()
        self._lease_ms = state.header.lease_ms if state.header is not None else 0

    @property
    def unchanged(self) -> float:
        """Seconds since the end of the log was first seen as it is."""
        return self._elapsed() - self._since

    @property
    def left(self) -> float | None:
        """Seconds until the lease is over; ``None`` if there is no lease, which is never over."""
        if not self._lease_ms:
            return None
        return max(0.0, self._lease_ms / 1000 - self.unchanged)
