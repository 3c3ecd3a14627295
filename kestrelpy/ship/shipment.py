"""``Shipment``: all that an open queue has of its shipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from kestrelpy._writing.export import Export
from kestrelpy.ship.opened import OpenLog
from kestrelpy.ship.shipper import Shipper
from kestrelpy.ship.shipping import Shipping
from kestrelpy.ship.store_inbox import StoreInbox

if TYPE_CHECKING:
    from kestrelpy._journal.queue_files import QueueFiles
    from kestrelpy._reading.local_source import LocalSource
    from kestrelpy._reading.registry import ReaderRegistry
    from kestrelpy._writing import open_journal
    from kestrelpy._writing.backpressure import Room
    from kestrelpy._writing.maintenance import Maintenance
    from kestrelpy._writing.status import QueueStatus
    from kestrelpy._writing.syncer import Syncer
    from kestrelpy.errors import KestrelError
    from kestrelpy.inbox.host import InboxHost


class Shipment:
    """The shipping of one open queue. It belongs to the queue: the thread that ships holds what it exports by a weak
    reference.
    """

    def __init__(
        self,
        log: open_journal.StoredLog,
        status: QueueStatus,
        syncer: Syncer,
        source: LocalSource,
        registry: ReaderRegistry,
        room: Room,
        files: QueueFiles,
        maintenance: Maintenance,
        *,
        holds_back: bool,
    ) -> None:
        self._export = Export(status, syncer, source, registry, room, files, maintenance, holds_back=holds_back)
        self._log = cast(OpenLog, log)
        self._shipper = Shipper(self._log, self._export)
        self._inbox: StoreInbox | None = None

    def shipping(self, close: Callable[[], object]) -> Shipping:
        """What its user may ask of it. ``close``: closes the queue."""
        return Shipping(self._shipper, close)

    def inbox_for(self, host: InboxHost) -> StoreInbox:
        """What takes in the batches of the store for that inbox, and ships its ledger. It begins with ``start``."""
        self._inbox = self._shipper.inbox = StoreInbox(self._log, self._shipper, host)
        return self._inbox

    def start(self) -> None:
        """Begin to ship. Raises ``RuntimeError`` if no thread can be started."""
        self._shipper.start()
        if self._inbox is not None:
            self._inbox.start()

    def close(self) -> None:
        """Ship what is left, and end. Raises ``NotShipped``, ``Fenced`` and ``DurabilityUnknown``."""
        try:
            self._stop_inbox()
        finally:
            self._shipper.close()

    def _stop_inbox(self) -> None:
        if self._inbox is not None:
            self._inbox.stop()
            self._inbox.join()

    def release(self) -> None:
        """End without another word. May be repeated."""
        if self._inbox is not None:
            self._inbox.stop()
        self._shipper.release()

    def abandon(self, error: KestrelError) -> None:
        """In a forked child: nothing of this is its own."""
        if self._inbox is not None:
            self._inbox.stop()
        self._shipper.abandon(error)
