"""The stores of a world: in memory or in a folder, for all processes, with what may go wrong with each request.

A request of a thread of shipping is under way until its thread is resumed (``use_courier``). A request of a call that
opens or restores is a moment at which another process may do a whole step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from kestrelpy._disk.memory import MemoryDisk
from kestrelpy.ship import StoreUnavailable
from kestrelpy.ship.folder_store import FolderStore
from kestrelpy.ship.store import Listing
from kestrelpy.testing import ManualClock
from kestrelpy.testing.stores import MemoryStore
from tests.use.use_courier import REQUEST, ShipClock, courier

if TYPE_CHECKING:
    from tests.use.use_ships import Ships

T = TypeVar("T")
WELL, AWAY, READ_ONLY, STUCK, RAISES, FLAKY = "well", "away", "read only", "stuck", "raising", "flaky"
LATER = 60
"""Seconds of the store's clock after which a request that was given up may still be carried out."""


class Unforeseen(Exception):
    """What a store must not raise."""


class WorldStore:
    """One of the stores. ``mode``: what is wrong with it. ``inner``: what is in it, whatever its clients see."""

    def __init__(self, ships: Ships, number: int, rng: random.Random) -> None:
        self._ships = ships
        self.number = number
        self.clock = ManualClock(1_700_000_000_000)
        self.is_folder = rng.random() < 0.3
        self.inner: MemoryStore | FolderStore = (
            FolderStore("/store", disk=MemoryDisk()) if self.is_folder else MemoryStore(clock=self.clock)
        )
        self.mode = WELL
        self.version = 0
        """Counts what has changed in it."""
        self.failures = 0
        self.slot_at: dict[str, float] = {}
        """When the last slot of a queue was created, by the clock of shipping."""

    def __repr__(self) -> str:
        return f"store {self.number}"

    def describe(self) -> str:
        return f"store {self.number} of a world"

    def create(self, key: str, data: bytes) -> bool:
        return self._send(key, lambda: self.create_now(key, data), changes=True)

    def create_now(self, key: str, data: bytes) -> bool:
        """As the store does it for a request that arrives."""
        self.version += 1
        name, _, rest = key.partition("/")
        created = self.inner.create(key, data)
        if created and rest.startswith("log/"):
            self.slot_at[name] = ShipClock.seconds
        return created

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        return self._send(key, lambda: self.inner.read(key, start, length))

    def list(self, prefix: str) -> Listing:
        return self._send(prefix, lambda: self.inner.list(prefix), changes=True)

    def delete(self, keys: Iterable[str]) -> None:
        every = list(keys)

        def delete_now() -> None:
            self.version += 1
            self.inner.delete(every)

        self._send(every[0] if every else "", delete_now, changes=True)

    def _send(self, key: str, carry_out: Callable[[], T], *, changes: bool = False) -> T:
        """``changes``: a store that may only be read refuses it."""
        ships = self._ships
        thread = courier().running
        if thread is not None:
            thread.on_its_way, thread.asks = carry_out if changes else None, self
            thread.give_back(REQUEST)
            thread.on_its_way = None
        else:
            ships.moment(self)
        if self.mode == RAISES and thread is not None:  # an opening raises what a store raises
            self.failures += 1
            ships.raised += 1
            raise Unforeseen(f"of {self}")
        if self.mode in (AWAY, STUCK, RAISES) or (self.mode == READ_ONLY and changes):
            raise self._unavailable(key, "no answer in time")
        dice = ships.world.rng.random() if self.mode == FLAKY else 1.0
        if dice < 0.1:
            raise self._unavailable(key, "no answer in time")
        if dice < 0.15 and changes:
            self.clock.call_later(LATER, carry_out)
            raise self._unavailable(key, "it is late")
        answer = carry_out()
        if dice < 0.25:
            raise self._unavailable(key, "the answer was lost")
        return carry_out() if dice < 0.3 else answer

    def _unavailable(self, key: str, reason: str) -> StoreUnavailable:
        self.failures += 1
        return StoreUnavailable(self.describe(), key, reason)
