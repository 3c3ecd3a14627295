"""Faults planted into the library from outside, for real processes: each is called before the process opens anything.

A harness that finds none of them would find nothing. What these ends can't show is not here: a missing sync of a
directory at a power cut (ext4 and XFS persist the name with the file; the simulated disk shows it), and a missing sync
at a kill, which needs none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import portalocker

from kestrelpy._disk import real as real_module
from kestrelpy._disk.real import RealDirectory, RealFile
from kestrelpy._journal.checkpoint import CheckpointFile
from kestrelpy.work.held_room import HeldRoom


def no_sync() -> None:
    """A sync of a file does nothing."""
    RealFile.sync = lambda self: None  # type: ignore[method-assign]


def no_sync_of_checkpoints() -> None:
    """A checkpoint that is to survive a power cut survives the process only."""
    save = CheckpointFile.save

    def save_only(self: CheckpointFile, state: Any, *, durable: bool) -> None:
        sync, RealFile.sync = RealFile.sync, lambda self: None  # type: ignore[method-assign]
        try:
            save(self, state, durable=False)
        finally:
            RealFile.sync = sync  # type: ignore[method-assign]
        self.durable = state

    CheckpointFile.save = save_only  # type: ignore[method-assign]


class _Late:
    """A buffer whose last store is not in the kernel until the next one."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._left: tuple[slice, bytes] | None = None

    def __setitem__(self, span: slice, data: bytes) -> None:
        if self._left is not None:
            self._inner[self._left[0]] = self._left[1]
        self._left = (span, data)


def stores_late() -> None:
    """A put is acknowledged while its bytes are in the process only."""
    grow = RealFile.grow

    def grow_late(self: RealFile, size: int, *, fill: bool = True) -> Any:
        inner = grow(self, size, fill=fill)
        return inner if self.size() == 0 else _Late(inner)

    RealFile.grow = grow_late  # type: ignore[method-assign]


def saves_nothing() -> None:
    """A checkpoint that need not be durable is not written at all."""
    save = CheckpointFile.save

    def save_some(self: CheckpointFile, state: Any, *, durable: bool) -> None:
        if durable:
            save(self, state, durable=True)

    CheckpointFile.save = save_some  # type: ignore[method-assign]


def forgives_syncs() -> None:
    """A sync that failed counts as done."""
    sync = RealFile.sync

    def sync_somehow(self: RealFile) -> None:
        with contextlib.suppress(OSError):
            sync(self)

    RealFile.sync = sync_somehow  # type: ignore[method-assign]


def writes_short() -> None:
    """A write that was cut short counts as done."""
    RealFile.write = lambda self, offset, *parts: os.pwritev(self._descriptor, parts, offset) and None  # type: ignore


def grows_sparse() -> None:
    """A segment is given its size and no blocks."""

    def grow(self: RealFile, size: int, *, fill: bool = True) -> Any:
        os.ftruncate(self._descriptor, size)
        return self._mapping(size)

    RealFile.grow = grow  # type: ignore[method-assign]


def locks_nothing() -> None:
    """A lock is had by whoever asks."""
    portalocker.lock = lambda file, flags: None


def compares_no_lock() -> None:
    """A lock counts even if its file has been removed or replaced meanwhile."""
    RealDirectory._is_at = lambda self, descriptor, name: True  # type: ignore[method-assign]


def keeps_locks_in_children() -> None:
    """A forked child keeps its copies of its parent's locks."""
    RealLock = real_module._RealLock  # noqa: N806 - a class
    RealLock.copied = set()  # type: ignore[assignment]
    RealLock.abandon = lambda self: None  # type: ignore[method-assign]


def unlocks_in_children() -> None:
    """A forked child unlocks what it only has copies of."""
    real_module._RealLock.abandon = lambda self: portalocker.unlock(self._file)  # type: ignore[method-assign]


def deletes_in_silence() -> None:
    """What the journal has no room for is written nowhere."""
    HeldRoom.write = lambda self, gone: None  # type: ignore[method-assign]


PLANTS: dict[str, Callable[[], object]] = {
    "no sync": no_sync,
    "no sync of checkpoints": no_sync_of_checkpoints,
    "stores late": stores_late,
    "saves nothing": saves_nothing,
    "forgives syncs": forgives_syncs,
    "writes short": writes_short,
    "grows sparse": grows_sparse,
    "locks nothing": locks_nothing,
    "compares no lock": compares_no_lock,
    "keeps locks in children": keeps_locks_in_children,
    "unlocks in children": unlocks_in_children,
    "deletes in silence": deletes_in_silence,
}
