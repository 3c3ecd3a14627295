"""Parts of a queue's inbox that are made in memory and uploaded to its store.

Rules:
1. A part is in the store as a whole or not at all. Nobody sees its items before a batch names it (``publishing``).
2. A part has a random key, and is created once. If an answer is lost, it is created again: if it is there by then, it
   is ours, as nobody else has the key.
3. One part is in memory, and twice for the moment at which it is sent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kestrelpy._journal import format as fmt
from kestrelpy._journal.file_names import check_name
from kestrelpy.clock import Clock, SystemClock
from kestrelpy.errors import ItemTooLarge
from kestrelpy.inbox.format import BatchPart
from kestrelpy.inbox.parts import PartEncoder
from kestrelpy.ship.errors import StoreDamaged, StoreUnavailable
from kestrelpy.ship.in_objects import MOST_PART_BYTES, part_key
from kestrelpy.ship.log import Create, Pause, Read, Steps, carry_out
from kestrelpy.ship.opened import pause
from kestrelpy.ship.opening import open_store
from kestrelpy.ship.reading import PAUSES
from kestrelpy.ship.store import Store

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["PartUploader"]

_FRAME_OVERHEAD = fmt.FRAME_BYTES + 12
"""Of a frame, but for its items and their lengths."""
_SMALL_BYTES = 256 << 10
"""Items that are added together are split into groups of at most so many bytes."""


class PartUploader:
    """Makes items into parts and uploads these to ``store``, as ``open_store`` takes it, for ``queue`` there.

    Nobody sees the items until ``kestrelpy.ship.publish`` publishes the parts. Used as a context manager, an uploader
    deletes what it has uploaded if the block ends by an exception. An uploader is for one thread. Each part has at most
    64 MiB, and is sent when it is full, or by ``finish``.

    Raises ``InvalidName``, ``BadStoreURL``.
    """

    def __init__(
        self,
        store: str | Store | Any,
        queue: str,
        *,
        options: Mapping[str, Any] | None = None,
        part_bytes: int = MOST_PART_BYTES,
        clock: Clock | None = None,
    ) -> None:
        check_name(queue)
        self._store = open_store(store, options=options)
        self._prefix = f"{queue}/"
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._part_bytes = min(part_bytes, MOST_PART_BYTES)
        self._most = self._part_bytes - fmt.SEGMENT_OVERHEAD - _FRAME_OVERHEAD - 4
        self._parts: list[BatchPart] = []
        self._begin()

    def _begin(self) -> None:
        self._pieces: list[bytes] = []
        self._encoder = PartEncoder(self._most, self._clock, self._keep)
        self._room = self._part_bytes - fmt.SEGMENT_OVERHEAD

    def _keep(self, _offset: int, *pieces: bytes) -> None:
        self._pieces += pieces

    def add(self, items: Sequence[bytes], *, expires_ms: int | None = None) -> None:
        """Add items, which expire at ``expires_ms`` (milliseconds since 1970) if that is given.

        Raises ``ItemTooLarge``, ``TypeError`` or ``ValueError``, and ``StoreUnavailable``; then some of them may have
        been added. An item has less than 64 MiB; whether it is too large for the queue, its owner says.
        """
        for data in items:
            self._make_room(1, memoryview(data).nbytes)
            self._encoder.add([data], expires_ms=expires_ms)

    def add_packed(
        self, lengths: bytes, data: bytes | memoryview, count: int, *, expires_ms: int | None = None
    ) -> None:
        """Add ``count`` items that stand one after the other in ``data``, as ``kestrelpy.inbox.PartWriter`` does.

        ``expires_ms``: when they expire, in milliseconds since 1970. Together they have less than 64 MiB. Raises
        ``ValueError``, ``ItemTooLarge``, ``StoreUnavailable``.
        """
        self._make_room(count, len(data))
        self._encoder.add_packed(lengths, data, count, expires_ms=expires_ms)

    def _make_room(self, count: int, size: int) -> None:
        """Send what there is if these items would not fit, in the worst case of one frame for each megabyte."""
        need = size + 4 * count + _FRAME_OVERHEAD * (3 + 2 * size // _SMALL_BYTES)
        if count > 1 and need > self._most:
            raise ItemTooLarge(size, self._most)
        if need > self._room:
            self._send()
        self._room -= need

    def _send(self) -> None:
        made = self._encoder
        made.flush()
        if made.items:
            made.finish()
            part_id = os.urandom(16)
            data = b"".join(self._pieces)
            self._begin()
            carry_out(_upload(self._prefix + part_key(part_id), data), self._store, pause)
            self._parts.append(BatchPart(part_id, made.items, made.data_bytes, made.digest))

    def finish(self) -> tuple[BatchPart, ...]:
        """Send the rest. Returns all parts, in their order: they are in the store, and wait for ``publish``. They can
        be pickled. Raises ``StoreUnavailable``, ``StoreDamaged``.
        """
        self._send()
        return tuple(self._parts)

    def discard(self) -> None:
        """Delete what was uploaded. What that fails for is deleted by the queue's owner, a day later."""
        keys = [self._prefix + part_key(part.part_id) for part in self._parts]
        self._parts = []
        self._begin()
        with suppress(StoreUnavailable):
            self._store.delete(keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.discard()


def _upload(key: str, data: bytes) -> Steps[None]:
    """Create the object, with some repetitions. If it exists, its end is compared."""
    for seconds in (*PAUSES, None):
        try:
            if (yield Create(key, data)):
                return
            at = len(data) - fmt.FOOTER_BYTES
            end: bytes | None = yield Read(key, at, fmt.FOOTER_BYTES + 1)
        except StoreUnavailable:
            if seconds is None:
                raise
            yield Pause(seconds)
            continue
        if end != data[at:]:
            raise StoreDamaged(key, at, "it is not the part that was uploaded", 0)
        return
