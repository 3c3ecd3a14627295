"""Publishes what a reader moves to another queue of its folder: dead letters, and dead letters that go back.

Rules (docs/dead-letters.md):
1. A move is published under its own application id and its number. So it is published once, however often it is tried:
   by this process, by the next owner of the reader, after any kill.
2. Nobody else's application id is used, and one is used for all moves of one opening of a reader: the queue remembers
   the 10,000 that were used last.
3. ``max_item_bytes`` of the queue counts the data of a dead letter, and not its first line: what fits into the queue
   that it comes from fits there too, if the limits are alike. The sizes are checked before a move is published, and
   never again: the queue takes in what was published, whatever its limit is by then.
4. What is published is not in the queue before its owner takes it in. If the queue is not there yet, it is made.
"""

from __future__ import annotations

import contextlib
import os

from kestrelpy._disk.interface import Disk
from kestrelpy._journal import file_names
from kestrelpy._journal.item_limit import limit_of
from kestrelpy._journal.moves import Move
from kestrelpy.clock import Clock
from kestrelpy.errors import KestrelError, QueueFull, QueueLocked
from kestrelpy.inbox.parts import MAX_ITEM_BYTES, MovePartWriter, open_inbox
from kestrelpy.inbox.publishing import discard, last_version, publish, take_in
from kestrelpy.letter import MOST_HEAD_BYTES, content_bytes

MOST_WAITING = 256
"""So many published batches may wait for the next owner of a queue that nobody has open; then they are taken in."""
PATIENCE_MS = 2_000
"""The owner of a queue takes in what is published within so many milliseconds, or the queue has no room."""

LARGEST_BYTES = MAX_ITEM_BYTES - MOST_HEAD_BYTES


def new_stream() -> bytes:
    """16 random bytes, for the moves of one opening of a reader."""
    return os.urandom(16)


def largest_of(directory: str, queue: str, *, disk: Disk) -> int:
    """How large the data of an item may be that is moved to the queue, as far as that is known. Raises ``OSError``."""
    limit = limit_of(directory, queue, disk)
    return LARGEST_BYTES if limit is None else min(limit, LARGEST_BYTES)


def too_large(data: bytes, most: int) -> int:
    """The size of this data, if it may not be moved to a queue that takes ``most``; else 0. A dead letter that has died
    counts without its first line, too.
    """
    if len(data) <= most:
        return 0
    size = len(data) if len(data) > LARGEST_BYTES else content_bytes(data)
    return size if size > most else 0


def publish_move(directory: str, move: Move, items: list[bytes], *, disk: Disk, clock: Clock) -> None:
    """Publish these items, unless this move is published already. On disk when this returns. The caller has checked
    that none of them is too large.

    Raises ``QueueFull`` if the other queue has no room for dead letters; ``WrongKind``, ``UnsupportedFormat`` and other
    ``KestrelError``: then nothing is published; and ``OSError``.
    """
    target = move.target
    if not move.is_requeue:
        _check_room(directory, target, disk, clock)
    with MovePartWriter(directory, target, disk=disk, clock=clock) as writer:
        writer.add(items)
        part = writer.seal()
    try:
        publish(directory, target, [part], app_id=move.app_id, version=move.number, disk=disk, clock=clock)
    except (KestrelError, OSError):
        with contextlib.suppress(KestrelError, OSError):  # it stays if the batch is published all the same
            discard(directory, target, [part], disk=disk)
        raise
    if not _is_there(directory, target, disk):
        with contextlib.suppress(KestrelError, OSError):  # its next owner does it
            take_in(directory, target, disk=disk, clock=clock)


def was_published(directory: str, move: Move, *, disk: Disk) -> bool:
    """Whether the move was published. Raises ``OSError``, ``UnsupportedFormat``."""
    last = last_version(directory, move.target, move.app_id, disk=disk)
    return last is not None and last >= move.number


def _check_room(directory: str, queue: str, disk: Disk, clock: Clock) -> None:
    """Raise ``QueueFull`` if the owner of the queue does not take in what was published before: a limit of a reader
    keeps it out, or the owner does not look. If nobody has the queue open, its batches wait for the next owner; if they
    are many, they are taken in here.
    """
    try:
        folder = open_inbox(directory, disk, create=False)
    except FileNotFoundError:
        return
    try:
        waiting = file_names.batches_among(folder.names(), queue)
    finally:
        folder.close()
    is_late = bool(waiting) and waiting[0][0] + PATIENCE_MS < clock.time_ns() // 1_000_000
    try:
        if len(waiting) >= MOST_WAITING:
            take_in(directory, queue, disk=disk, clock=clock)
        elif is_late and _is_there(directory, queue, disk):
            _check_unowned(directory, queue, disk)
    except QueueLocked:
        text = f"queue {queue}: it has no room, or its owner does not look: {len(waiting)} batches wait in its inbox"
        raise QueueFull(text) from None


def _check_unowned(directory: str, queue: str, disk: Disk) -> None:
    """Raise ``QueueLocked`` if a process has the queue open."""
    folder = disk.directory(directory)
    try:
        folder.lock(file_names.lock_name(queue)).release()
    finally:
        folder.close()


def _is_there(directory: str, queue: str, disk: Disk) -> bool:
    """Whether the queue exists."""
    folder = disk.directory(directory)
    try:
        return bool(file_names.but_for_locks(folder.names(), queue))
    finally:
        folder.close()
