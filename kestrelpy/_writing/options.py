"""Checks the options of a queue and of a put. A value out of range is refused before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from kestrelpy._checks import check_seconds, check_whole
from kestrelpy._disk.interface import Disk
from kestrelpy._journal import file_names
from kestrelpy._journal.format import SEGMENT_OVERHEAD
from kestrelpy._journal.journal import MAX_BATCH_BYTES
from kestrelpy.config import Codec, ReaderConfig, check_config
from kestrelpy.errors import BatchTooLarge, InvalidName, ItemTooLarge

_MIN_SEGMENT_BYTES = 4096
_LAST_MS = (1 << 63) - 1


def check_sync(
    sync: float | Literal["always", "never"], ship: object, *, journaled: bool, of_jobs: bool
) -> float | None:
    """Seconds between syncs: 0 for ``"always"``, ``None`` for ``"never"`` and for infinity. If puts are acknowledged by
    a store, nothing is shown before that, as with ``"always"``; a work queue waits by itself. Raises ``ValueError``.
    """
    if ship and not journaled:
        raise ValueError("a queue in memory is not shipped: journaled=False does not go with ship=")
    if sync not in ("always", "never") and (
        isinstance(sync, bool) or not isinstance(sync, int | float) or not sync >= 0
    ):
        raise ValueError(f"sync must be 'always', 'never' or seconds, not {sync!r}")
    if sync == "always" or (getattr(ship, "acks", "disk") == "shipped" and not of_jobs):
        return 0.0
    if sync == "never":
        return None
    return float(sync) if sync < math.inf else None


def check_sizes(segment_bytes: int, max_item_bytes: int | None) -> int:
    check_whole("segment_bytes", segment_bytes)
    if segment_bytes < _MIN_SEGMENT_BYTES or segment_bytes > MAX_BATCH_BYTES:
        raise ValueError(f"segment_bytes must be {_MIN_SEGMENT_BYTES:,} to {MAX_BATCH_BYTES:,}, not {segment_bytes!r}")
    largest = segment_bytes - SEGMENT_OVERHEAD
    if max_item_bytes is None:
        return largest
    check_whole("max_item_bytes", max_item_bytes)
    if not 0 < max_item_bytes <= largest:
        raise ValueError(f"max_item_bytes must be 1 to {largest:,} with these segments, not {max_item_bytes!r}")
    return max_item_bytes


def check_intervals(checkpoint_interval: float, inbox_interval: float | None) -> float:
    """The seconds between checkpoints. Raises ``ValueError`` and ``TypeError``, also for ``inbox_interval``."""
    if inbox_interval is not None:
        check_seconds("inbox_interval", inbox_interval, above_zero=True)
    return check_seconds("checkpoint_interval", checkpoint_interval, above_zero=True)


def check_corruption(on_corruption: str) -> bool:
    """Whether damaged records are skipped and kept aside. Raises ``ValueError``."""
    if on_corruption not in ("raise", "quarantine"):
        raise ValueError(f"on_corruption must be 'raise' or 'quarantine', not {on_corruption!r}")
    return on_corruption == "quarantine"


def check_configs(readers: Mapping[str, ReaderConfig], default: ReaderConfig | None) -> ReaderConfig:
    """Check all configurations; returns that of the default reader.

    Raises ``InvalidName``, and ``TypeError`` for a value that is not a ``ReaderConfig``.
    """
    if not isinstance(readers, Mapping):
        raise TypeError(f"readers must be a mapping of names to ReaderConfig, not {readers!r}")
    for name, config in readers.items():
        if name == "":
            raise InvalidName(name, "the configuration of the default reader is default_reader=")
        file_names.check_name(name)
        check_config(f"readers[{name!r}]", config)
    return check_config("default_reader", default if default is not None else ReaderConfig())


def encode_items(values: list[Any], codec: Codec | None, max_item_bytes: int) -> list[bytes]:
    """Encode the items of a put to bytes. Raises ``TypeError``, ``ItemTooLarge``, ``BatchTooLarge``."""
    items = values if codec is None else [codec.encode(value) for value in values]
    if set(map(type, items)) != {bytes}:
        items = [_as_bytes(data, codec) for data in items]
    sizes = list(map(len, items))
    if max(sizes) > max_item_bytes:
        raise ItemTooLarge(next(size for size in sizes if size > max_item_bytes), max_item_bytes)
    if len(items) > 1 and (size := sum(sizes) + 4 * len(items)) > MAX_BATCH_BYTES:
        raise BatchTooLarge(size, MAX_BATCH_BYTES)
    return items


def _as_bytes(data: Any, codec: Codec | None) -> bytes:
    if not isinstance(data, bytes | bytearray | memoryview):
        which = f"the value that {codec!r} encodes to" if codec is not None else "an item of a queue without a codec"
        hint = "" if codec is not None else ": for other values open the queue with codec= (see kestrelpy.codecs)"
        if type(data).__name__ == "LogRecord":
            hint += "; for log records, kestrelpy.logging has DurableHandler, and the codec RECORDS"
        raise TypeError(f"{which} must be bytes, bytearray or memoryview, not {type(data).__name__}{hint}")
    return bytes(data)


def expiry(added_ms: int, expires_in: float | None, expires_at_ms: int | None) -> int | None:
    if expires_in is None and expires_at_ms is None:
        return None
    if expires_in is not None:
        if expires_at_ms is not None:
            raise ValueError("an item expires expires_in seconds from now or at expires_at_ms, not both")
        try:
            is_good = 0 <= expires_in < _LAST_MS // 1000
        except TypeError:
            raise TypeError(f"expires_in must be seconds, not {expires_in!r}") from None
        if not is_good:
            raise ValueError(f"expires_in must be seconds from now and not negative, not {expires_in!r}")
        expires_at_ms = added_ms + int(expires_in * 1000)
    if not isinstance(expires_at_ms, int):
        raise TypeError(f"expires_at_ms must be an int, not {type(expires_at_ms).__name__}")
    if not 0 <= expires_at_ms <= _LAST_MS:
        raise ValueError(f"expires_at_ms must be milliseconds since 1970, not {expires_at_ms!r}")
    return expires_at_ms


def memory_disk() -> Disk:
    """A new disk in memory, for a queue with ``journaled=False``. No other queue uses it."""
    from kestrelpy._disk.memory import MemoryDisk  # imported here: few programs need it

    return MemoryDisk()
