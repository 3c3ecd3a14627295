"""``ServerStatus``: what a kestrel server admits to at the moment, from ``up`` to ``quiescent``.

A stricter status is shown at once, so that clients can go elsewhere, and counts after a grace period. A looser one
counts at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kestrelpy import Clock
    from kestrelpy.clock import Timer

__all__ = ["ORDER", "ServerStatus"]

ORDER = ("up", "writeavoid", "readonly", "quiescent")
"""From the loosest to the strictest."""

_READ_ONLY = {"set", "delete", "flush", "flush_all", "flush_expired", "flush_all_expired"}
_FORBIDDEN = {
    "up": frozenset[str](),
    "writeavoid": frozenset[str](),  # forbids nothing: it is there for those that choose a server
    "readonly": frozenset(_READ_ONLY),
    "quiescent": frozenset(_READ_ONLY | {"get", "peek", "monitor"}),
}


class ServerStatus:
    """The status of one server. ``store`` keeps it for the next start; what that raises, ``set`` raises."""

    def __init__(self, clock: Clock, initial: str, grace_seconds: float, store: Callable[[str], None]) -> None:
        self._clock = clock
        self._grace_seconds = grace_seconds
        self._store = store
        self.shown = initial
        self.in_force = initial
        self._timer: Timer | None = None

    def _check(self) -> None:
        assert ORDER.index(self.in_force) <= ORDER.index(self.shown)
        assert (self._timer is None) == (self.in_force == self.shown)

    def allows(self, operation: str) -> bool:
        """Whether the operation (``set``, ``get``, ``flush_all`` ...) is allowed now."""
        return operation not in _FORBIDDEN[self.in_force]

    def set(self, name: str) -> bool:
        """Change the status. False for a name that is no status. Raises what ``store`` raises: nothing is changed then.

        During a grace period, the same status and a still stricter one have no effect.
        """
        if name not in ORDER:
            return False
        stricter = ORDER.index(name) > ORDER.index(self.shown)
        if self._timer is not None and (stricter or name == self.shown):
            return True
        self._store(name)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.shown = name
        if stricter and self._grace_seconds > 0:
            self._timer = self._clock.call_later(self._grace_seconds, self._come_into_force)
        else:
            self.in_force = name
        return True

    def _come_into_force(self) -> None:
        self._timer = None
        self.in_force = self.shown

    def close(self) -> None:
        """The server ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.in_force = self.shown
