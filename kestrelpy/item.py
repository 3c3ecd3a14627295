"""The values that come from a queue: an ``Item`` is an open read, a ``Record`` is what a scan sees."""

from __future__ import annotations

from functools import partial
from operator import attrgetter, index
from types import MethodType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol

from kestrelpy._tasks import run_apart
from kestrelpy._value import Value, set_field
from kestrelpy.letter import DeadLetter, decode_letter

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # which type checkers know, installed or not: a default needs Python 3.13

    V = TypeVar("V", default=Any)
else:
    from typing import TypeVar

    V = TypeVar("V")

__all__ = ["Item", "Record"]


class ItemOwner(Protocol):
    """What an item needs from the reader that delivered it."""

    def commit(self, item_or_id: Item | int) -> None: ...

    def abort(
        self, item_or_id: Item | int, delay: float | None = None, reason: str | None = None, *, counts: bool = True
    ) -> None: ...

    def abort_for(self, item: Item, error: BaseException | None) -> None: ...

    def decode(self, data: bytes) -> Any: ...

    def is_open(self, item: Item) -> bool: ...

    @property
    def _may_bury(self) -> bool:
        """Whether an abort may move an item to another queue, which waits for the disk."""

    def _check_done(self, item: Item) -> None: ...


class Item(Generic[V]):
    """One item as one reader got it: an open read (an unacknowledged delivery) until it is committed or aborted.

    ``id`` (dense, from 1), ``data`` (bytes), ``added_ms`` and ``expires_ms`` (milliseconds since the Unix epoch, or
    ``None``), ``error_count`` (how often it was aborted). As a context manager, also of asyncio, it commits at the end
    of the block, or aborts if the block raises. It does nothing if the block already did either, or if a ``seek`` has
    ended the open read. If the reader can't be used any more and the item is not done, the end of the block raises the
    reason (``QueueClosed``, ``DurabilityUnknown``), unless the block itself raises something. ``async with`` does not
    block the event loop where an abort moves the item to a queue of dead letters. For type checkers, ``Item[V]`` has a
    ``value`` of type ``V``.
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
    def value(self) -> V:
        """The data, decoded by the queue's codec; without a codec, the data itself. Decoded again at each access."""
        decoded: V = self._owner.decode(self.data)
        return decoded

    def commit(self) -> None:
        """Acknowledge the item. Raises as ``Reader.commit``: ``UnknownItem`` if it is not open. Thread-safe."""
        self._owner.commit(self)

    def abort(self, delay: float | None = None, reason: str | None = None, *, counts: bool = True) -> None:
        """Give the item back, ahead of unread items, at once or in ``delay`` seconds (``None``: as the reader's
        ``retry_delay`` says). ``reason`` is kept if the item becomes a dead letter.

        With ``counts=False`` as if it had not been got: for an item that no consumer has seen. Raises as
        ``Reader.abort``: ``UnknownItem`` if it is not open. Thread-safe.
        """
        self._owner.abort(self, delay, reason, counts=counts)

    if TYPE_CHECKING:

        def __enter__(self) -> Item[V]: ...

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
                self._owner.abort_for(self, error)
        elif kind is None:
            self._owner._check_done(self)

    async def __aenter__(self) -> Item[V]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._owner._may_bury:  # a move to the queue of dead letters waits for the disk
            await run_apart(partial(self.__exit__, kind, error, trace))
        else:
            self.__exit__(kind, error, trace)

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

    @property
    def dead_letter(self) -> DeadLetter | None:
        """The dead letter that this item is, with its data and where it comes from; ``None`` if it is none."""
        return decode_letter(self.data, self.id)


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
