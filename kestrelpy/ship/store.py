"""What shipping needs of a store of objects: five calls, and no more. A store of your own may have just these."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

__all__ = ["Listed", "Store"]


class Listed(NamedTuple):
    """An object in a listing. ``modified_ms`` is a date of the store's own clock."""

    key: str
    size_bytes: int
    modified_ms: int


Listing: TypeAlias = list[Listed]


@runtime_checkable
class Store(Protocol):
    """A store of objects that are created once and never replaced. Any number of threads may call it.

    A key is made of names separated by ``/``. Each call raises ``StoreUnavailable`` for whatever goes wrong; then the
    request may have been carried out or not, or may still be.
    """

    def create(self, key: str, data: bytes) -> bool:
        """Create an object, and return True when it is durable. Returns False, and changes nothing, if the key exists;
        the object that is there is durable then. Who lost an answer finds out by ``read`` whose it is.
        """

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        """Return up to ``length`` bytes (``None``: all) from offset ``start``: fewer only at the end of the object.
        Returns ``None`` if there is no such object.
        """

    def list(self, prefix: str) -> Listing:
        """Return the objects below ``prefix``, which is empty or ends in ``/``, sorted by key. What was just created or
        deleted may be missing or be there for a while.
        """

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. Those that do not exist are no error."""

    def describe(self) -> str:
        """Return a short text for errors and logs, without secrets."""
