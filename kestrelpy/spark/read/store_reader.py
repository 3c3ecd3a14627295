"""A reader outside: a query's position in a store, which keeps there what a restart of the query may need.

Rules:
1. Each commit is a new object with the next number; the one with the highest number counts.
2. Each run of a query has a nonce. If the next number is taken by an object that is not this run's, byte for byte,
   another query goes on under this name: an error.
3. Whoever goes on takes the newest object from the store. Listings may lag, so the objects after it are asked for by
   their keys.
"""

from __future__ import annotations

import os
import time

from kestrelpy.errors import KestrelError, UnsupportedFormat
from kestrelpy.ship import outside_reader as codec
from kestrelpy.ship.errors import StoreDamaged, StoreUnavailable
from kestrelpy.ship.outside_reader import OutsideReader
from kestrelpy.ship.reading import PAUSES, ShippedQueue

_LISTINGS = 5
"""So often the objects are listed, if each time the newest one is gone when it is read."""


class StoreReader:
    """Reader ``name`` of a queue, as of the store. ``id``: up to this one it needs nothing; ``None`` if no object says
    so of the queue with ``queue_id``.
    """

    def __init__(self, shipped: ShippedQueue, name: str, queue_id: bytes) -> None:
        """Raises ``StoreUnavailable``, ``StoreDamaged``, ``UnsupportedFormat``."""
        self._shipped = shipped
        self._name = name
        self._queue_id = queue_id
        self._nonce = os.urandom(16)
        self._number, newest = self._newest()
        self.id = newest.id if newest is not None and newest.queue_id == queue_id else None

    def commit(self, last_id: int) -> None:
        """Move to ``last_id``. Raises ``KestrelError`` if another query has moved the reader, ``StoreUnavailable``."""
        number = self._number + 1
        data = codec.encode_outside(OutsideReader(self._queue_id, self._nonce, last_id))
        if not self._is_created(self._key(number), data):
            raise KestrelError(
                f"reader {self._name!r} of queue {self._shipped.queue!r} in {self._shipped.store.describe()} has been "
                "moved by another query: a reader belongs to one query; set the option reader to another name"
            )
        self._number, self.id = number, last_id

    def _key(self, number: int) -> str:
        return self._shipped.prefix + codec.outside_key(self._name, number)

    def _is_created(self, key: str, data: bytes) -> bool:
        """Create an object, or find that another one is there. An answer that is lost is no answer: ask again."""
        store, pauses = self._shipped.store, iter(PAUSES)
        while True:
            try:
                return store.create(key, data) or store.read(key) == data
            except StoreUnavailable:
                seconds = next(pauses, None)
                if seconds is None:
                    raise
            time.sleep(seconds)

    def _newest(self) -> tuple[int, OutsideReader | None]:
        """The newest object and its number; 0 if there is none."""
        for _ in range(_LISTINGS):
            number = self._listed()
            if not number and self._read(1) is None:
                return 0, None
            number = max(number, 1)
            newest = self._read(number)
            while newest is not None and (later := self._read(number + 1)) is not None:
                number, newest = number + 1, later
            if newest is not None:
                return number, newest
        raise StoreDamaged(self._key(number), 0, "it is listed, and is not there", 0)

    def _listed(self) -> int:
        prefix = self._shipped.prefix
        listing = self._shipped.store.list(f"{prefix}reader/{self._name}/")
        found = (codec.parse_outside_key(each.key.removeprefix(prefix)) for each in listing)
        return max((each[1] for each in found if each is not None), default=0)

    def _read(self, number: int) -> OutsideReader | None:
        """The object of that number; ``None`` if it is not there."""
        key = self._key(number)
        data = self._shipped.store.read(key)
        if data is None:
            return None
        version = codec.outside_version(data)
        if version is not None and version != codec.OUTSIDE_VERSION:
            raise UnsupportedFormat(key, version, codec.OUTSIDE_VERSION)
        found = codec.decode_outside(data)
        if found is None:
            raise StoreDamaged(key, 0, "it does not say how far the reader has come", 0)
        return found
