"""``QueueStatus``: whether a queue can be used, and whether puts may take the fast path. Shared by all its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident

from kestrelpy._reading.registry import ReaderRegistry
from kestrelpy._writing.gate import Gate
from kestrelpy.errors import KestrelError, QueueClosed, copy_of


class QueueStatus:
    """The status of one queue. Each attribute changes by one store, and may be read without a lock.

    ``error``: why the queue cannot be used; ``None`` while it is open. ``is_reported``: a call of this queue has raised
    that error. ``fast``: puts may take the fast path, which needs only the journal and the window. ``is_unfinished``:
    a batch of the inbox is not completely ingested. ``gate``: why puts are refused now, if it is not a reader's doing.
    ``room_gate``: why puts are refused now for a reader that is too far behind. ``on_failed``: called when another
    owner has the queue, with no lock held. ``sync_armed``: a sync in the background is scheduled. ``sync_seconds``: the
    seconds between these syncs; 0 for ``sync="always"``, ``None`` for ``"never"``.
    """

    __slots__ = (
        "_has_codec",
        "_unheard",
        "error",
        "fast",
        "gate",
        "is_reported",
        "is_unfinished",
        "on_failed",
        "registry",
        "room_gate",
        "sync_armed",
        "sync_seconds",
    )

    registry: ReaderRegistry

    def __init__(self, sync_seconds: float | None, *, has_codec: bool) -> None:
        self.error: Exception | None = QueueClosed("this queue was never opened")
        self.is_reported = self.fast = self.is_unfinished = self.sync_armed = False
        self.gate: Gate | None = None
        self.room_gate: Gate | None = None
        self.on_failed: Callable[[KestrelError], object] = bool
        self.sync_seconds = sync_seconds
        self._has_codec = has_codec
        self._unheard: set[int] = set()  # threads that work for no caller just now

    def choose_path(self) -> None:
        """Decide whether puts may take the fast path."""
        self.fast = (
            self.error is None
            and not self._has_codec
            and self.sync_seconds != 0
            and not self.registry.limited
            and not self.is_unfinished
            and self.gate is None
            and self.room_gate is None
        )

    @contextmanager
    def while_open(self) -> Iterator[None]:
        """Raise ``QueueClosed`` in place of ``OSError`` if the queue, and so its folder, is closed during the block."""
        try:
            yield
        except OSError:
            self.check_usable()
            raise

    def check_usable(self) -> None:
        """Raise ``error`` if the queue cannot be used."""
        if self.error is not None:
            self.note_reported()
            raise copy_of(self.error)

    def note_reported(self) -> None:
        """This thread's caller gets the error with which the queue ends, or is about to end."""
        if get_ident() not in self._unheard:
            self.is_reported = True

    @contextmanager
    def unreported(self) -> Iterator[None]:
        """A context for work of this thread whose errors no caller gets: ``close`` still raises that the queue has
        failed, unless another call raises it.
        """
        thread = get_ident()
        if thread in self._unheard:
            yield
            return
        try:
            self._unheard.add(thread)
            yield
        finally:
            self._unheard.discard(thread)
