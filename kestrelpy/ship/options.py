"""How a queue is shipped (``Ship``), and how that goes (``ShipStatus``)."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, Literal

from kestrelpy._checks import check_seconds, check_whole
from kestrelpy._value import Value
from kestrelpy.ship.opening import masked, open_store
from kestrelpy.ship.store import Store

__all__ = ["Ship", "ShipStatus"]

_LONGEST = 1e10
"""Seconds: longer than any store will last."""
LEAST_CHUNK, MOST_CHUNK = 64 << 10, 32 << 20
LEAST_LEASE, MOST_LEASE = 5.0, 1e6
"""Seconds. A shorter lease is over whenever a request has to be repeated."""


class Ship(Value):
    """How a queue is shipped: ``JournaledQueue(..., ship=Ship("s3://bucket/prefix", acks="shipped"))``.

    ``store``: as ``open_store`` takes it, with ``options`` and ``request_timeout``. ``acks``: when a put returns.
    ``"disk"``: as without shipping. ``"shipped"``: when its item is in the store. ``interval``: at most one object of
    new items so often, in seconds; 0: the next one as soon as one is there. By default 1, and 0.05 with ``"shipped"``.
    ``chunk_bytes``: so much that waits is sent earlier, and is sent at once at most (64 KiB to 32 MiB). ``uploads``:
    closed segments that are uploaded at once. ``when_behind``: what puts do while more than ``max_unshipped_bytes``
    wait, or for longer than ``max_unshipped_seconds``: ``"go_on"``, ``"refuse"`` (``QueueFull``), or ``"block"`` (wait,
    as for room). ``ack_timeout``: seconds that a put waits with ``"shipped"``; ``close_timeout``: seconds that
    ``close()`` waits for the store. ``history``: any moment of so many last seconds can be restored, by the store's
    dates. ``keep``: seconds that a segment stays in the store beyond that when nobody needs it, for batch reads;
    ``None``: for ever. ``inbox_interval``: seconds between looks for batches that were published in the store
    (``kestrelpy.ship.publish``); ``None``: never. ``manifest_interval``: seconds between manifests, from which a
    restore begins.
    ``on_missing``: what an opening does if the folder has no such queue, and the store has: ``"refuse"``
    (``HistoryMismatch``), or ``"restore"`` it first. ``lease``: seconds, at least 5, after which a ``Standby`` may take
    the queue over if this owner appends nothing; puts are refused (``NotShipped``) before. ``None``: nobody takes it
    over by himself. ``owner``: what this owner is called in the log; by default its
    host and process.

    Two with equal arguments are equal. It can be pickled if its store can: a URL can, a store object may not. Its
    ``repr`` shows no option. Raises ``ValueError`` and ``TypeError`` for a bad argument; a bad URL is found when the
    queue is opened.
    """

    store: str | Store | Any
    acks: Literal["disk", "shipped"] = "disk"
    interval: float | None = None
    chunk_bytes: int = 1 << 20
    uploads: int = 4
    when_behind: Literal["go_on", "refuse", "block"] = "go_on"
    max_unshipped_bytes: int = 256 << 20
    max_unshipped_seconds: float = 60.0
    ack_timeout: float = 30.0
    close_timeout: float = 30.0
    history: float = 86_400.0
    keep: float | None = 0.0
    inbox_interval: float | None = 1.0
    manifest_interval: float = 60.0
    on_missing: Literal["refuse", "restore"] = "refuse"
    lease: float | None = None
    owner: str | None = None
    options: Mapping[str, Any] | None = None
    request_timeout: float = 10.0

    def __post_init__(self) -> None:
        if self.acks not in ("disk", "shipped"):
            raise ValueError(f"acks must be 'disk' or 'shipped', not {self.acks!r}")
        if self.when_behind not in ("go_on", "refuse", "block"):
            raise ValueError(f"when_behind must be 'go_on', 'refuse' or 'block', not {self.when_behind!r}")
        if self.on_missing not in ("refuse", "restore"):
            raise ValueError(f"on_missing must be 'refuse' or 'restore', not {self.on_missing!r}")
        if self.interval is not None:
            check_seconds("interval", self.interval)
        if self.acks == "shipped" and self.interval is not None and self.interval > self.ack_timeout:
            raise ValueError(f"interval ({self.interval}) is longer than a put waits (ack_timeout, {self.ack_timeout})")
        for name in ("max_unshipped_seconds", "ack_timeout", "close_timeout"):
            check_seconds(name, getattr(self, name))
        if self.keep is not None:
            check_seconds("keep", self.keep)
        if self.lease is not None and not LEAST_LEASE <= check_seconds("lease", self.lease) <= MOST_LEASE:
            raise ValueError(f"lease must be {LEAST_LEASE:.0f} to {MOST_LEASE:,.0f} seconds, not {self.lease!r}")
        if self.inbox_interval is not None:
            check_seconds("inbox_interval", self.inbox_interval, above_zero=True)
        for name in ("manifest_interval", "request_timeout", "history"):
            check_seconds(name, getattr(self, name), above_zero=True)
        check_whole("uploads", self.uploads, 1)
        check_whole("max_unshipped_bytes", self.max_unshipped_bytes)
        if not LEAST_CHUNK <= check_whole("chunk_bytes", self.chunk_bytes) <= MOST_CHUNK:
            raise ValueError(f"chunk_bytes must be {LEAST_CHUNK:,} to {MOST_CHUNK:,}, not {self.chunk_bytes!r}")
        if self.owner is not None and not isinstance(self.owner, str):
            raise TypeError(f"owner must be a str, not {self.owner!r}")

    def __repr__(self) -> str:
        return f"Ship({self.shown!r}, acks={self.acks!r}, interval={self.seconds})"

    @property
    def seconds(self) -> float:
        """``interval``, or its default."""
        if self.interval is not None:
            return self.interval
        return 0.05 if self.acks == "shipped" else 1.0

    @property
    def lease_ms(self) -> int:
        """``lease``, in milliseconds; 0 for none."""
        return _milliseconds(self.lease or 0.0)

    @property
    def history_ms(self) -> int:
        """``history``, in milliseconds."""
        return _milliseconds(self.history)

    @property
    def keep_ms(self) -> int | None:
        """``keep``, in milliseconds; ``None``: for ever."""
        return None if self.keep is None or self.keep == inf else _milliseconds(self.keep)

    @property
    def shown(self) -> str:
        """What may be shown of the store: its URL, or the type of a store object."""
        return masked(self.store) if isinstance(self.store, str) else type(self.store).__name__

    def open(self) -> Store:
        """Open the store. Raises as ``open_store``."""
        return open_store(self.store, options=self.options, request_timeout=self.request_timeout)


def _milliseconds(seconds: float) -> int:
    return round(1000 * min(seconds, _LONGEST))


class ShipStatus(Value, kw_only=True):
    """How shipping goes, at one moment. Counters count since the queue was opened.

    ``state``: ``"shipping"``; ``"behind"``: more waits than ``when_behind`` allows; ``"away"``: the store does not
    answer, and is asked again; ``"fenced"``: another owner has the queue; ``"closed"``; ``"failed"``: shipping has
    stopped, and ``last_error`` says why. ``store``: without secrets. ``epoch``, ``slot``: of the log, as far as it is
    decided. ``shipped_id``: the last id in the log. ``unshipped_items``, ``unshipped_bytes``: put, and not in the log.
    ``unshipped_seconds``: for how long something has been waiting. ``shipped_bytes``: of all objects that were created;
    ``slots``, ``segments``: how many of these. ``requests``, ``failures``: of the store, and those without an answer.
    ``lease_left``: seconds for which puts are accepted yet if the store does not answer; ``None`` without a lease.
    ``taken_over``: whether the log's last owner was another one when this queue was opened.
    ``taken_batch``: the number of the last batch that was taken in from the store. ``refused_batches``: how many were
    refused in the last ``history``. ``inbox_error``: why the next one is not taken in now; empty if nothing is wrong.
    """

    state: str
    store: str
    epoch: int
    slot: int
    shipped_id: int
    unshipped_items: int
    unshipped_bytes: int
    unshipped_seconds: float
    shipped_bytes: int
    slots: int
    segments: int
    requests: int
    failures: int
    last_error: str
    lease_left: float | None
    taken_over: bool
    taken_batch: int = 0
    refused_batches: int = 0
    inbox_error: str = ""
