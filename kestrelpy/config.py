"""Values: the configuration of a reader, what a put does at a limit, codecs, and the figures of queues and readers."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from kestrelpy._checks import check_seconds, check_whole
from kestrelpy._value import ReadOnlyDict, Value

if TYPE_CHECKING:
    from kestrelpy.item import Item

__all__ = ["Codec", "FullPolicy", "QueueStats", "ReaderConfig", "ReaderStats"]

DEFAULT_MEMORY_BYTES = 16 << 20
"""How much one reader may keep in memory by default."""


class FullPolicy(enum.Enum):
    """What a put does when a queue or a reader is at its limit.

    ``BLOCK`` waits for room, as ``queue.Queue`` does: up to the ``timeout`` of the put, which is 0 for a journaled
    queue unless the call says otherwise. ``REFUSE`` raises ``QueueFull`` at once. ``DROP_OLDEST`` accepts the item, and
    drops the oldest unread items until the limits are met.
    """

    BLOCK = "block"
    """Wait for room, as ``queue.Queue`` does."""
    REFUSE = "refuse"
    """Raise ``QueueFull`` at once."""
    DROP_OLDEST = "drop-oldest"
    """Accept, and drop the oldest unread items until the limits are met. The newest item is never dropped for its
    bytes. An open item is not dropped. An error while items are dropped fails no put: it is logged, and a later put
    drops them.
    """


class Codec(Protocol):
    """Turns values into the bytes of an item, and back."""

    def encode(self, value: Any, /) -> bytes:
        """The bytes of ``value``. What it raises is raised by the put, which has stored nothing then."""

    def decode(self, data: bytes, /) -> Any:
        """The value of these bytes, for ``Item.value``."""


class ReaderConfig(Value, kw_only=True):
    """The limits and hooks of one reader.

    ``max_items`` and ``max_bytes`` limit the items that are unread or open; at the limit, ``full_policy`` applies. With
    ``counts_open=False`` they limit the unread ones alone: then an open read makes room, and one that is aborted may
    exceed the limit. Otherwise ``max_items`` is never exceeded. ``max_bytes`` may be exceeded by one item, or by a
    batch that is put into an empty reader. An item expires at the earlier of its own expiry and ``added + max_age``
    seconds. ``memory_bytes`` bounds what the reader keeps in memory (data plus a fixed cost per item); the rest waits
    in the journal. A batch (``put_many``) is read as one: a reader in the middle of a batch keeps all that is left of
    it, whatever the bound. After ``max_idle`` seconds of emptiness, ``Reader.idle_expired`` is true.
    ``max_expire_sweep`` limits one ``discard_expired()`` call.

    Hooks run outside every lock. An error in a hook is logged and counted (``ReaderStats.hook_errors``), and no item is
    lost. ``on_expired(item)`` gets an expired item before it is dropped. ``on_abort(item) -> bool`` returns true if it
    took the item, which is then committed. An item is with one hook at a time, once, and counts until the hook has
    returned: a hook that puts the item again may find no room, and must not wait for it. ``on_expired`` does not call
    itself: other expired items that it meets are passed to it afterwards. If it raised for an item, it gets the item
    again from ``discard_expired()``, or from a put that finds no room. ``on_delivery(reader, seconds)`` gets the age of
    a delivered item, and ``on_timeout(reader, seconds)`` how long a get waited in vain; ``reader`` is the ``Reader``.

    Seconds may be infinite, which means never. Raises ``ValueError`` for a limit that is below zero or not a number,
    and ``TypeError`` for a limit that is no whole number, and for a ``full_policy`` that is no ``FullPolicy``.
    """

    max_items: int | None = None
    max_bytes: int | None = None
    max_age: float | None = None
    full_policy: FullPolicy = FullPolicy.REFUSE
    on_expired: Callable[[Item], object] | None = None
    on_abort: Callable[[Item], bool] | None = None
    max_expire_sweep: int | None = None
    max_idle: float | None = None
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    on_delivery: Callable[[Any, float], object] | None = None
    on_timeout: Callable[[Any, float], object] | None = None
    counts_open: bool = True

    def __post_init__(self) -> None:
        for name in ("max_items", "max_bytes", "max_expire_sweep", "memory_bytes"):
            value = getattr(self, name)
            if value is not None or name == "memory_bytes":
                check_whole(name, value)
        for name in ("max_age", "max_idle"):
            value = getattr(self, name)
            if value is not None:
                check_seconds(name, value)
        if not isinstance(self.full_policy, FullPolicy):
            raise TypeError(f"full_policy must be a FullPolicy, not {self.full_policy!r}")


class ReaderStats(Value, kw_only=True):
    """One reader's figures at one moment. Counters count since the reader was opened in this process.

    ``head``: every id up to it is done. ``items`` and ``bytes`` count the items that are not done: unread and open
    ones. ``open_items`` and ``open_bytes`` count the open ones alone. ``waiter_count``: consumers in line. ``age``:
    seconds since the next item was put, 0 if there is none. ``get_hits`` and ``get_misses``: gets that found an item,
    and that did not. ``opened``: reads. ``committed``: items that consumers committed; ``expired`` and ``discarded``
    items are counted apart. ``flushes``: calls of ``flush``. ``memory_items``, ``memory_bytes``: what the reader keeps
    in memory.
    """

    name: str
    head: int
    items: int
    bytes: int
    open_items: int
    open_bytes: int
    waiter_count: int
    age: float
    get_hits: int
    get_misses: int
    opened: int
    committed: int
    aborted: int
    expired: int
    discarded: int
    flushes: int
    hook_errors: int
    memory_bytes: int
    memory_items: int = 0


class QueueStats(Value, kw_only=True):
    """A journaled queue's figures at one moment. ``items`` and ``bytes`` are sums over the readers open here.

    ``journal_bytes``: size of the segments that are kept. ``segments``, ``archived_segments``: their numbers.
    ``put_count``, ``put_bytes``: items put, and their data. ``sync_count``: syncs of the journal. ``quarantined``: bad
    ranges that were skipped. ``rotations``: how many segments were closed. ``tail_id`` is the last id given out,
    ``durable_id`` the last one known to be on disk. ``oldest_segment`` and ``newest_segment`` are the numbers of the
    first and the last segment that is kept. Counters count since the queue was opened, except ``refused_batches``:
    published batches that were kept aside as ``.refused``, then or before.
    """

    items: int
    bytes: int
    journal_bytes: int
    segments: int
    archived_segments: int
    tail_id: int
    durable_id: int
    put_count: int
    put_bytes: int
    sync_count: int
    quarantined: int
    readers: Mapping[str, ReaderStats] = ReadOnlyDict()
    oldest_segment: int = 0
    newest_segment: int = 0
    refused_batches: int = 0
    rotations: int = 0


def check_config(what: str, config: ReaderConfig) -> ReaderConfig:
    if not isinstance(config, ReaderConfig):
        raise TypeError(f"{what} must be a ReaderConfig, not {config!r}")
    return config
