"""Values: the configuration of a reader, what a put does at a limit, codecs, and the figures of queues and readers."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self, TypeVar

from kestrelpy._checks import check_seconds, check_whole
from kestrelpy._value import ReadOnlyDict, Value, set_field
from kestrelpy.item import Item, V

__all__ = ["Codec", "FullPolicy", "LagPolicy", "QueueStats", "ReaderConfig", "ReaderStats"]

DEFAULT_MEMORY_BYTES = 16 << 20
"""How much one reader may keep in memory by default."""
SYNC_BOUNDS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1.0, 5.0)
"""The bounds of ``QueueStats.sync_buckets``, in seconds: from a disk with a cache of its own to one that is stuck."""


P = TypeVar("P", bound="_Policy")


class _Policy(enum.Enum):
    """A choice that options take by its name, too: ``"block"``, ``"BLOCK"``, ``"drop_oldest"``."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        return cls.__members__.get(value.upper().replace("-", "_")) if isinstance(value, str) else None


class FullPolicy(_Policy):
    """What a put does when a queue or a reader is at its limit.

    ``BLOCK`` waits for room, as ``queue.Queue`` does, up to the ``timeout`` of the put. ``REFUSE`` raises ``QueueFull``
    at once. ``DROP_OLDEST`` accepts the item, and drops the oldest unread items until the limits are met. Options take
    the names too: ``full_policy="block"``.
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


class LagPolicy(_Policy):
    """What is done about a reader that is further behind than ``max_lag_bytes`` or ``max_lag_age`` allow.

    ``WARN`` logs it. ``SKIP`` moves the reader forward, past items that it does not get any more. ``REFUSE`` lets puts
    raise ``QueueFull``. Options take the names too: ``lag_policy="skip"``.
    """

    WARN = "warn"
    """Log that once, and once more when it is over."""
    SKIP = "skip"
    """Move the reader forward, durably, to the first segment from which on it is within its limits; the items before
    that are not delivered to it any more. They are counted, and the reader's next opening logs how many they are.
    """
    REFUSE = "refuse"
    """Puts raise ``QueueFull``, which names the reader. If its full policy is ``BLOCK``, they wait as for room."""


class Codec(Protocol[V]):
    """Turns values of type ``V`` into the bytes of an item, and back."""

    def encode(self, value: V, /) -> bytes:
        """The bytes of ``value``. What it raises is raised by the put, which has stored nothing then."""

    def decode(self, data: bytes, /) -> V:
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

    A reader lags once the journal has more than ``max_lag_bytes`` bytes of data after the reader's head, or its next
    item was put more than ``max_lag_age`` seconds ago; open reads count. ``lag_policy`` says what is done then: a
    ``LagPolicy``, or its name. The queue looks every ``checkpoint_interval``, at each reader by its own configuration:
    readers that are open here, and those that are not, by their checkpoints. Only the process that has a reader open
    moves it (``SKIP``); for a reader that another process has open, this queue logs and refuses, and that process
    skips if the ``config`` of its ``open_reader`` says so. A reader that nobody has open is moved by this queue.

    Hooks run outside every lock. An error in a hook is logged and counted (``ReaderStats.hook_errors``), and no item is
    lost. ``on_expired(item)`` gets an expired item before it is dropped. ``on_abort(item) -> bool`` returns true if it
    took the item, which is then committed. An item is with one hook at a time, once, and counts until the hook has
    returned: a hook that puts the item again may find no room, and must not wait for it. ``on_expired`` does not call
    itself: other expired items that it meets are passed to it afterwards. If it raised for an item, it gets the item
    again from ``discard_expired()``, or from a put that finds no room. ``on_delivery(reader, seconds)`` gets the age of
    a delivered item, and ``on_timeout(reader, seconds)`` how long a get waited in vain; ``reader`` is the ``Reader``.

    ``retry_delay``: seconds, or a function of the error count (1, 2, ...) that returns seconds: an aborted item is not
    delivered again before (a back-off). Other items are. The delay is kept in memory: after an opening the item is due
    at once. A function that raises, or returns no finite number of at least 0, is logged, and 0 is used.

    ``max_deliveries``: an abort that makes the ``error_count`` of an item reach it makes the item dead, unless
    ``on_abort`` takes the item. A dead item becomes a dead letter in the queue ``dead_letter`` of the same folder,
    exactly once (``kestrelpy.dead_letters``); without that name, it is dropped and logged. A redelivery after a crash
    is no failure and does not count, and an exception that is no ``Exception`` (Ctrl-C) makes no item dead.

    Seconds may be infinite, which means never, but for ``retry_delay``. Raises ``ValueError`` for a limit that is below
    zero or not a number, for ``max_items=0``, which no put could meet, and for the name of no policy; ``TypeError`` for
    a limit that is no whole number, and for a policy that is neither one nor a name. A
    ``dead_letter`` that is no name, or that of the reader's own queue, is refused by the queue.
    """

    max_items: int | None = None
    max_bytes: int | None = None
    max_age: float | None = None
    full_policy: FullPolicy | str = FullPolicy.REFUSE
    on_expired: Callable[[Item], object] | None = None
    on_abort: Callable[[Item], bool] | None = None
    max_expire_sweep: int | None = None
    max_idle: float | None = None
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    on_delivery: Callable[[Any, float], object] | None = None
    on_timeout: Callable[[Any, float], object] | None = None
    counts_open: bool = True
    max_lag_bytes: int | None = None
    max_lag_age: float | None = None
    lag_policy: LagPolicy | str = LagPolicy.WARN
    retry_delay: float | Callable[[int], float] = 0.0
    max_deliveries: int | None = None
    dead_letter: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_items", "max_bytes", "max_expire_sweep", "memory_bytes", "max_lag_bytes"):
            value = getattr(self, name)
            if value is not None or name == "memory_bytes":
                check_whole(name, value, 1 if name == "max_items" else 0)
        for name in ("max_age", "max_idle", "max_lag_age"):
            value = getattr(self, name)
            if value is not None:
                check_seconds(name, value)
        set_field(self, "full_policy", full_policy_of(self.full_policy))
        set_field(self, "lag_policy", _policy_of("lag_policy", LagPolicy, self.lag_policy))
        if callable(self.retry_delay):
            check_takes_count("retry_delay", self.retry_delay)
        else:
            check_delay("retry_delay", self.retry_delay)
        if self.max_deliveries is not None:
            check_whole("max_deliveries", self.max_deliveries, 1)
        if self.dead_letter is not None and not isinstance(self.dead_letter, str):
            raise TypeError(f"dead_letter must be the name of a queue, not {self.dead_letter!r}")


class ReaderStats(Value, kw_only=True):
    """One reader's figures at one moment. Counters count since the reader was opened in this process.

    ``head``: every id up to it is done. ``items`` and ``bytes`` count the items that are not done: unread and open
    ones. ``open_items`` and ``open_bytes`` count the open ones alone. ``waiter_count``: consumers in line. ``age``:
    seconds since the next item was put, 0 if there is none. ``get_hits`` and ``get_misses``: gets that found an item,
    and that did not. ``opened``: reads. ``committed``: items that consumers committed; ``expired`` and ``discarded``
    items are counted apart. ``flushes``: calls of ``flush``. ``memory_items``, ``memory_bytes``: what the reader keeps
    in memory. ``checkpoint_failures``: saves of its position that raised. ``lagging``: whether the reader was further
    behind than its configuration allows, when that was looked at last. ``skipped``: items that it was moved past by
    ``LagPolicy.SKIP``, since it was opened the time before this one. ``dead``: items that died, moved to
    ``dead_letter`` or dropped; ``dead_letter_failures``: how often a move could not be done, and was left for later.
    ``dead_too_large``: dead items that stay here, undelivered, as the queue ``dead_letter`` takes none as large.
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
    checkpoint_failures: int = 0
    lagging: bool = False
    skipped: int = 0
    dead: int = 0
    dead_letter_failures: int = 0
    dead_too_large: int = 0


class QueueStats(Value, kw_only=True):
    """A journaled queue's figures at one moment. ``items`` and ``bytes`` are sums over the readers open here.

    ``journal_bytes``: size of the segments that are there, with what the newest one has taken in advance.
    ``segments``, ``archived_segments``: their numbers.
    ``put_count``, ``put_bytes``: items put, and their data. ``sync_count``: syncs of the journal. ``quarantined``:
    items that were damaged or missing, and were skipped. ``rotations``: how many segments were closed. ``tail_id`` is
    the last id given out, ``durable_id`` the last one known to be on disk. ``oldest_segment`` and ``newest_segment``
    are the numbers of the first and the last segment that is kept. Counters count since the queue was opened, except
    ``refused_batches``: published batches that were kept aside as ``.refused``, then or before. ``waiting_producers``:
    puts in line for room. ``refused``: puts that raised ``QueueFull`` or ``QueueDiskFull``. ``usable``: false once the
    queue is closed, has failed, or belongs to the parent of this forked process. ``sync_buckets``: how many syncs took
    at most each of ``SYNC_BOUNDS`` seconds and more than the bound before, and last how many took longer;
    ``sync_seconds``: how long all of them took together. Syncs that close a segment are done by the put, and are not
    among them.
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
    waiting_producers: int = 0
    refused: int = 0
    usable: bool = True
    sync_buckets: tuple[int, ...] = ()
    sync_seconds: float = 0.0


def full_policy_of(value: FullPolicy | str) -> FullPolicy:
    """The policy itself, or that of this name. Raises ``TypeError`` and ``ValueError``."""
    return _policy_of("full_policy", FullPolicy, value)


def _policy_of(option: str, kind: type[P], value: P | str) -> P:
    if not isinstance(value, kind | str):
        raise TypeError(f"{option} must be a {kind.__name__}, not {value!r}")
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(repr(each.value) for each in kind)
        raise ValueError(f"{option} must be one of {names}, not {value!r}") from None


def check_delay(name: str, value: object) -> float:
    """``value`` as seconds: a finite number of at least 0. Raises ``TypeError``, ``ValueError``."""
    seconds = check_seconds(name, value)
    if seconds == math.inf:
        raise ValueError(f"{name} must be finite, not {value!r}")
    return seconds


def check_takes_count(name: str, function: Callable[[int], object]) -> None:
    """Raise ``TypeError`` for a function that can't be called with one number, or is a coroutine function."""
    from inspect import iscoroutinefunction, signature  # imported here: few programs give a function

    if iscoroutinefunction(function):
        raise TypeError(f"{name} must be a plain function, not the coroutine function {function!r}")
    try:
        signature(function).bind(1)
    except ValueError:  # one of C that does not say what it takes
        return
    except TypeError as error:
        raise TypeError(f"{name} is called with how often it has failed, and {function!r}: {error}") from None


def check_config(what: str, config: ReaderConfig) -> ReaderConfig:
    if not isinstance(config, ReaderConfig):
        raise TypeError(f"{what} must be a ReaderConfig, not {config!r}")
    return config


def check_codec(codec: Codec | None) -> Codec | None:
    if codec is not None and not (
        callable(getattr(codec, "encode", None)) and callable(getattr(codec, "decode", None))
    ):
        raise TypeError(f"codec must have encode() and decode(), and {codec!r} does not")
    return codec
