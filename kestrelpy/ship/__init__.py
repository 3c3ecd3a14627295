"""A queue's journal in an object store: being built; docs/ship.md says what there is so far.

The store, and the bytes in it (docs/format.md):

    store.py          what a store must do, and no more
    opening.py        from a URL to a store
    folder_store.py   a store in a folder
    object_store.py   a store on S3 and its kind, through obstore
    checking.py       whether a store is good enough
    slots.py          the log in bytes, slot by slot
    manifest.py       what the slots add up to
    log.py            where the log ends, and how a slot is appended: without I/O
    identity.py       queue.json: whose log it is
    reading.py        a queue in a store, read and checked
    restoring.py      its files, made again
    remote.py         what is there of it
    remote_check.py   and whether it is whole
    remote_log.py     and its log, slot by slot, for people
    outside_reader.py how far a reader has come that reads the store, in bytes
    garbage.py        what may be deleted: without I/O

Items for a queue, from whoever does not own it:

    in_objects.py     the objects that they come in, in bytes
    part_upload.py    items become parts in the store
    publishing.py     and parts a batch

The owner of a queue:

    options.py        ``Ship`` and ``ShipStatus``
    ship_file.py      jobs.ship: where this queue is shipped
    detaching.py      and the end of that
    history.py        whether the queue here and the log are one history
    opened.py         opening the log
    owner.py          what is sent, and in which order: without I/O
    shipper.py        the thread that does it; uploads.py: those that it shares with other queues
    store_inbox.py    the thread that takes in what was published there; fetching.py: without I/O
    shipment.py       what an open queue has of all this; shipping.py: what its user has

A standby:

    standby.py        ``Standby``: it follows, and takes the queue over
    following.py      the log, slot by slot, and its owner's lease
    standby_folder.py the files, brought to where the log is
    rejoining.py      what an owner that was taken over had not shipped
    lease.py          how a lease is kept, and watched
    takeover.py       how a standby opens the queue
"""

from typing import TYPE_CHECKING

from kestrelpy.errors import RestoreIncomplete
from kestrelpy.ship.checking import CheckReport, CheckResult, check
from kestrelpy.ship.detaching import detach, shipped_to
from kestrelpy.ship.errors import (
    BadStoreURL,
    BatchRefused,
    Fenced,
    HistoryMismatch,
    NoSuchQueue,
    NotShipped,
    NotTakenIn,
    OwnerAlive,
    RestoreTargetExists,
    ShipError,
    ShippingRequired,
    StoreDamaged,
    StoreTooWeak,
    StoreUnavailable,
)
from kestrelpy.ship.following import StandbyStatus
from kestrelpy.ship.garbage import Collected
from kestrelpy.ship.opening import open_store
from kestrelpy.ship.options import Ship, ShipStatus
from kestrelpy.ship.part_upload import PartUploader
from kestrelpy.ship.publishing import publish
from kestrelpy.ship.rejoining import Orphan, orphans, rejoin
from kestrelpy.ship.remote import RemoteReport, RemoteStatus, queues, status, verify
from kestrelpy.ship.remote_log import RemoteSlot, drop_reader, read_log
from kestrelpy.ship.restoring import Restored, restore
from kestrelpy.ship.shipping import Shipping
from kestrelpy.ship.store import Listed, Store

if TYPE_CHECKING:
    from kestrelpy.ship.standby import Standby

__all__ = [
    "BadStoreURL",
    "BatchRefused",
    "CheckReport",
    "CheckResult",
    "Collected",
    "Fenced",
    "HistoryMismatch",
    "Listed",
    "NoSuchQueue",
    "NotShipped",
    "NotTakenIn",
    "Orphan",
    "OwnerAlive",
    "PartUploader",
    "RemoteReport",
    "RemoteSlot",
    "RemoteStatus",
    "RestoreIncomplete",
    "RestoreTargetExists",
    "Restored",
    "Ship",
    "ShipError",
    "ShipStatus",
    "Shipping",
    "ShippingRequired",
    "Standby",
    "StandbyStatus",
    "Store",
    "StoreDamaged",
    "StoreTooWeak",
    "StoreUnavailable",
    "check",
    "detach",
    "drop_reader",
    "open_store",
    "orphans",
    "publish",
    "queues",
    "read_log",
    "rejoin",
    "restore",
    "shipped_to",
    "status",
    "verify",
]

if not TYPE_CHECKING:  # as in ``kestrelpy``: type checkers see the import above

    def __getattr__(name: str) -> object:
        """Import on first use: a standby opens queues, and a queue must be able to import this package."""
        if name != "Standby":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from kestrelpy.ship.standby import Standby

        return globals().setdefault(name, Standby)

    def __dir__() -> list[str]:
        return sorted({*globals(), "Standby"})
