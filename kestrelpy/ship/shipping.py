"""``Shipping``: what the user of a shipped queue may ask of its shipping: ``queue.shipping``."""

from __future__ import annotations

from typing import Protocol

from kestrelpy._checks import check_timeout
from kestrelpy.ship.garbage import Collected
from kestrelpy.ship.options import ShipStatus

__all__ = ["Shipping"]


class ShippingThread(Protocol):
    """What ships a queue: ``Shipper``."""

    def flush(self, timeout: float | None) -> int: ...

    def status(self) -> ShipStatus: ...

    def collect(self, timeout: float | None) -> Collected: ...


class Shipping:
    """The shipping of one open queue. Thread-safe."""

    def __init__(self, thread: ShippingThread) -> None:
        self._thread = thread

    def flush(self, timeout: float | None = None) -> int:
        """Return when everything put before is in the store, with the number of the last slot there.

        Waits up to ``timeout`` seconds (``None``: for ever). Raises ``NotShipped`` if that is not long enough,
        ``Fenced`` if another owner has the queue, ``QueueClosed``, ``DurabilityUnknown``, ``ForkedQueue``, and
        ``ShipError`` if shipping has failed.
        """
        check_timeout(timeout)
        return self._thread.flush(timeout)

    def collect(self, timeout: float | None = None) -> Collected:
        """Delete from the store what is needed no more, now; it is done once an hour anyway. Returns what was deleted.

        Waits up to ``timeout`` seconds (``None``: for ever). Raises ``StoreUnavailable``, ``TimeoutError``, and what
        ``flush`` raises.
        """
        check_timeout(timeout)
        return self._thread.collect(timeout)

    def status(self) -> ShipStatus:
        """How shipping goes, at this moment. Asks the store nothing."""
        return self._thread.status()

    def __repr__(self) -> str:
        status = self.status()
        return f"<Shipping to {status.store}: {status.state} slot={status.slot} unshipped={status.unshipped_items}>"
