"""``put_many``: items of a process that does not own the queue, in one call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from kestrelpy._disk.interface import Disk, StrPath
from kestrelpy.clock import Clock
from kestrelpy.config import Codec, check_codec
from kestrelpy.inbox.parts import PartWriter
from kestrelpy.inbox.publishing import check_version, discard, publish

_AT_ONCE = 1000
"""How many items are encoded before they are written."""


def put_many(
    directory: StrPath,
    queue: str,
    items: Iterable[Any],
    *,
    codec: Codec[Any] | None = None,
    expires_ms: int | None = None,
    app_id: str | None = None,
    version: int = 0,
    disk: Disk | None = None,
    clock: Clock | None = None,
) -> bool:
    """Put items into a queue that another process has open, or nobody: all of them or none, in this order.

    This is a ``PartWriter`` and ``publish`` in one call. The items are bytes, or values for ``codec``, which is that of
    the queue. They expire at ``expires_ms`` (milliseconds since 1970), if that is given. When this returns, they are on
    disk. The owner of the queue takes them in within its ``inbox_interval`` (0.5 s), and readers get them then; if
    nobody has the queue open, the next owner does, or ``take_in``. Any number of processes and threads may call this at
    once. A call costs six syncs, so put many at a time.

    Returns True if they are new: with an ``app_id``, a ``version`` that is known already is not put again, so a call
    that was cut short may be repeated. Without one, it puts them twice then.

    Raises as ``PartWriter.add``, ``seal`` and ``publish`` do (``ItemTooLarge``, ``TypeError``, ``ValueError``,
    ``WrongKind``, ``InvalidName``, ``OSError``), and what the codec raises; then nothing was put, unless it was the
    ``OSError`` of a disk that failed at the end.
    """
    check_version(app_id, version)
    check_codec(codec)
    with PartWriter(directory, queue, disk=disk, clock=clock) as writer:
        for some in _encoded(items, codec):
            writer.add(some, expires_ms=expires_ms)
        part = writer.seal()
    try:
        return publish(directory, queue, [part], app_id=app_id, version=version, disk=disk, clock=clock)
    except BaseException:
        with contextlib.suppress(Exception):  # its owner removes it a day later
            discard(directory, queue, [part], disk=disk)
        raise


def _encoded(items: Iterable[Any], codec: Codec[Any] | None) -> Iterator[list[bytes]]:
    """The items as bytes, some at a time; the last list may be empty."""
    some: list[bytes] = []
    for each in items:
        some.append(each if codec is None else codec.encode(each))
        if len(some) == _AT_ONCE:
            yield some
            some = []
    yield some
