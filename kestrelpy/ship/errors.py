"""The errors of shipping. Their texts name stores and objects; no secret, and no value of an option."""

from __future__ import annotations

import errno

from kestrelpy.errors import KestrelError

__all__ = ["BadStoreURL", "ShipError", "StoreDamaged", "StoreTooWeak", "StoreUnavailable"]


class ShipError(KestrelError):
    """The base of the errors of ``kestrelpy.ship``."""


class BadStoreURL(ShipError, ValueError):
    """A store's URL, or one of the options beside it, cannot be used. ``url``: what of it may be shown."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url}: {reason}")
        self.url = url
        self.reason = reason


class StoreUnavailable(ShipError, OSError):
    """A request to a store failed, or was not answered in time. Whether it was carried out is not known.

    ``store``: as its ``describe()``. ``key``: of the object, or the prefix of a listing. ``reason``: the kind of error,
    with the server's status and code if there are any.
    """

    def __init__(self, store: str, key: str, reason: str) -> None:
        super().__init__(errno.EIO, reason, f"{store}: {key}")
        self.store = store
        self.key = key
        self.reason = reason


class StoreTooWeak(ShipError):
    """A store said of an object that was there that it had created it: nothing can be shipped to it in safety."""

    def __init__(self, store: str) -> None:
        super().__init__(f"{store} does not refuse to create an object that exists: a queue cannot be shipped there")
        self.store = store


class StoreDamaged(ShipError):
    """What is in a store is not what was put there: ``key``, ``offset`` in that object, ``reason``.

    ``last_good_slot``: up to this one the log is whole; 0 if that is not known.
    """

    def __init__(self, key: str, offset: int, reason: str, last_good_slot: int) -> None:
        super().__init__(f"{key}, offset {offset}: {reason}")
        self.key = key
        self.offset = offset
        self.reason = reason
        self.last_good_slot = last_good_slot
