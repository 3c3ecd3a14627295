"""A queue's journal in an object store: being built; docs/ship.md says what there is so far.

    store.py          what a store must do, and no more
    opening.py        from a URL to a store
    folder_store.py   a store in a folder
    object_store.py   a store on S3 and its kind, through obstore
    checking.py       whether a store is good enough
    slots.py          the log in bytes, slot by slot
    manifest.py       what the slots add up to
    log.py            where the log ends, and how a slot is appended: without I/O

The bytes are in docs/format.md.
"""

from kestrelpy.ship.checking import CheckReport, CheckResult, check
from kestrelpy.ship.errors import BadStoreURL, ShipError, StoreTooWeak, StoreUnavailable
from kestrelpy.ship.opening import open_store
from kestrelpy.ship.store import Listed, Store

__all__ = [
    "BadStoreURL",
    "CheckReport",
    "CheckResult",
    "Listed",
    "ShipError",
    "Store",
    "StoreTooWeak",
    "StoreUnavailable",
    "check",
    "open_store",
]
