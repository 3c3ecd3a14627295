"""``Takeover``: how a standby opens the queue that it takes over."""

from __future__ import annotations

from typing import NamedTuple

from kestrelpy.ship.options import Ship


class Takeover(NamedTuple):
    """In place of a ``Ship``, as ``JournaledQueue(ship=)``. ``epoch``: the opening appends a FENCE only if the log's
    last epoch is still this one; else it raises ``Fenced``, with nothing written. The lease of that epoch is not asked:
    the standby has watched it, or was told to take the queue by force.
    """

    options: Ship
    epoch: int

    @property
    def acks(self) -> str:
        """As of a ``Ship``."""
        return self.options.acks
