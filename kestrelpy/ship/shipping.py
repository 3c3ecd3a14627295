"""``Shipping``: what the user of a shipped queue may ask of its shipping: ``queue.shipping``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kestrelpy._checks import check_seconds, check_timeout
from kestrelpy.ship.garbage import Collected
from kestrelpy.ship.options import ShipStatus

__all__ = ["Shipping"]


class ShippingThread(Protocol):
    """What ships a queue: ``Shipper``."""

    def flush(self, timeout: float | None) -> int: ...

    def hand_over(self, timeout: float) -> None: ...

    def status(self) -> ShipStatus: ...

    def collect(self, timeout: float | None) -> Collected: ...


class Shipping:
    """The shipping of one open queue. Thread-safe."""

    def __init__(self, thread: ShippingThread, close: Callable[[], object]) -> None:
        self._thread = thread
        self._close = close

    def closed_by(self, close: Callable[[], object]) -> Shipping:
        """The same for a queue that has this one inside, and is closed by ``close``."""
        return Shipping(self._thread, close)

    def flush(self, timeout: float | None = None) -> int:
        """Return when everything put before is in the store, with the number of the last slot there.

        Waits up to ``timeout`` seconds (``None``: for ever). Raises ``NotShipped`` if that is not long enough,
        ``Fenced`` if another owner has the queue, ``QueueClosed``, ``DurabilityUnknown``, ``ForkedQueue``, and
        ``ShipError`` if shipping has failed.
        """
        check_timeout(timeout)
        return self._thread.flush(timeout)

    def hand_over(self, timeout: float = 30.0) -> None:
        """Close the queue, and let a standby take it over at once, before the lease is over.

        Everything that was put is in the store when this returns. Raises ``NotShipped`` if that takes longer than
        ``timeout`` seconds; then the queue is closed and is not handed over: open it again, or wait for the lease.
        Otherwise raises as ``close`` of the queue. If the queue is closed already, raises ``QueueClosed``, or
        ``Fenced`` or ``ForkedQueue`` where that is why.
        """
        self._thread.hand_over(check_seconds("timeout", timeout))
        self._close()

    def collect(self, timeout: float | None = None) -> Collected:
        """Delete from the store what is needed no more, now; it is done once an hour anyway. Returns what was deleted.

        Waits up to ``timeout`` seconds (``None``: for ever). Raises ``StoreUnavailable``, ``StoreDamaged`` or
        ``UnsupportedFormat`` if what it has to read there is damaged or of a newer version (then nothing is deleted),
        ``TimeoutError``, and what ``flush`` raises.
        """
        check_timeout(timeout)
        return self._thread.collect(timeout)

    def status(self) -> ShipStatus:
        """How shipping goes, at this moment. Asks the store nothing."""
        return self._thread.status()

    def __repr__(self) -> str:
        status = self.status()
        return f"<Shipping to {status.store}: {status.state} slot={status.slot} unshipped={status.unshipped_items}>"
