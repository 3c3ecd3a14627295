"""``Shipment``: all that an open queue has of its shipping."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kestrelpy._writing.export import Export
from kestrelpy.ship.opened import OpenLog
from kestrelpy.ship.shipper import Shipper
from kestrelpy.ship.shipping import Shipping

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
    from kestrelpy.inbox.format import LedgerState


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
        self._shipper = Shipper(cast(OpenLog, log), self._export)
        self.shipping = Shipping(self._shipper)

    def note_ledger(self, state: LedgerState, from_id: int) -> None:
        """The inbox has another ledger: see ``LogOwner.note_ledger``."""
        self._shipper.note_ledger(state, from_id)

    def start(self) -> None:
        """Begin to ship. Raises ``RuntimeError`` if no thread can be started."""
        self._shipper.start()

    def close(self) -> None:
        """Ship what is left, and end. Raises ``NotShipped`` and ``Fenced``."""
        self._shipper.close()

    def release(self) -> None:
        """End without another word. May be repeated."""
        self._shipper.release()

    def abandon(self, error: KestrelError) -> None:
        """In a forked child: nothing of this is its own."""
        self._shipper.abandon(error)
