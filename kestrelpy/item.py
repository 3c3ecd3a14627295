"""The values that come from a queue: an ``Item`` is an open read, a ``Record`` is what a scan sees."""

from __future__ import annotations

from functools import partial
from operator import attrgetter, index
from types import MethodType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from kestrelpy._value import Value, set_field

__all__ = ["Item", "Record"]


class ItemOwner(Protocol):
    """What an item needs from the reader that delivered it."""

    def commit(self, item_or_id: Item | int) -> None: ...

    def abort(self, item_or_id: Item | int, *, counts: bool = True) -> None: ...

    def decode(self, data: bytes) -> Any: ...

    def is_open(self, item: Item) -> bool: ...

    def _check_done(self, item: Item) -> None: ...


class Item:
    """One item as one reader got it: an open read (an unacknowledged delivery) until it is committed or aborted.

    ``id`` (dense, from 1), ``data`` (bytes), ``added_ms`` and ``expires_ms`` (milliseconds since the Unix epoch, or
    ``None``), ``error_count`` (how often it was aborted). As a context manager it commits at the end of the block, or
    aborts if the block raises. It does nothing if the block already did either, or if a ``seek`` has ended the open
    read. If the reader can't be used any more and the item is not done, the end of the block raises the reason
    (``QueueClosed``, ``DurabilityUnknown``), unless the block itself raises something.
    """

    __slots__ = ("_owner", "added_ms", "data", "error_count", "expires_ms", "id")

    def __init__(
        self, id: int, data: bytes, added_ms: int, expires_ms: int | None, error_count: int, owner: ItemOwner
    ) -> None:
        self.id = id
        self.data = data
        self.added_ms = added_ms
        self.expires_ms = expires_ms
        self.error_count = error_count
        self._owner = owner

    @property
    def value(self) -> Any:
        """The data, decoded by the queue's codec; without a codec, the data itself. Decoded again at each access."""
        return self._owner.decode(self.data)

    def commit(self) -> None:
        """Acknowledge the item. Raises as ``Reader.commit``: ``UnknownItem`` if it is not open. Thread-safe."""
        self._owner.commit(self)

    def abort(self, *, counts: bool = True) -> None:
        """Give the item back, ahead of unread items. Raises as ``Reader.abort``: ``UnknownItem`` if it is not open.

        With ``counts=False`` as if it had not been got: for an item that no consumer has seen. Thread-safe.
        """
        self._owner.abort(self, counts=counts)

    if TYPE_CHECKING:

        def __enter__(self) -> Item: ...

    else:
        # This returns the item without a function of ours: an interrupt (Ctrl-C) could fall before its first line. Then
        # the block would not be entered, and nobody would have the item whose read is open.
        __enter__ = property(partial(MethodType, attrgetter("commit.__self__")))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owner.is_open(self):
            if kind is None:
                self._owner.commit(self)
            else:
                self._owner.abort(self)
        elif kind is None:
            self._owner._check_done(self)

    def __repr__(self) -> str:
        shown = self.data if len(self.data) <= 32 else self.data[:29] + b"..."
        return f"<Item {self.id}: {shown!r}, {len(self.data)} bytes, error_count={self.error_count}>"


new_item = object.__new__
"""``new_item(Item)`` and a store for each slot make an item in half the time that ``Item(...)`` takes."""


class Record(Value):
    """One item as it is stored in a segment.

    ``error_count`` is the highest count that any reader's checkpoint has for it. ``segment`` is the name of its file.
    """

    __slots__ = ("added_ms", "data", "error_count", "expires_ms", "id", "segment")
    id: int
    data: bytes
    added_ms: int
    expires_ms: int | None
    error_count: int
    segment: str

    def __init__(
        self, id: int, data: bytes, added_ms: int, expires_ms: int | None, error_count: int, segment: str
    ) -> None:
        set_field(self, "id", id)
        set_field(self, "data", data)
        set_field(self, "added_ms", added_ms)
        set_field(self, "expires_ms", expires_ms)
        set_field(self, "error_count", error_count)
        set_field(self, "segment", segment)


def id_of(item_or_id: Item | int) -> int:
    """The id of the item that is to be committed or aborted: from an ``Item``, or any whole number except a ``bool``.
    Raises ``TypeError`` for anything else.
    """
    if isinstance(item_or_id, Item):
        return item_or_id.id
    try:
        if isinstance(item_or_id, bool):
            raise TypeError
        return index(item_or_id)
    except TypeError:
        raise TypeError(f"expected an item or its id, not {type(item_or_id).__name__}") from None
