"""``Gatekeeper``: whether the puts of a shipped queue may go on now.

Puts ask nobody: they read one flag. Where a lease or ``when_behind`` may set it, a thread of its own does: the shipping
thread may hang in a request, and the threads of timers in a user's callback. Else the shipping thread looks, slot by
slot.

NOTE ON LOCKING: none of its own: one thread decides, and the flag changes by one store. Opening the gate rings the line
of producers, and takes no lock either.
"""

from __future__ import annotations

import contextlib
import threading
import weakref

from kestrelpy._waiting.waiters import ThreadWaiter
from kestrelpy._writing.export import Export
from kestrelpy.clock import SystemClock
from kestrelpy.errors import QueueFull
from kestrelpy.ship.errors import NotShipped
from kestrelpy.ship.history import ID_JUMP, ID_STEP
from kestrelpy.ship.lease import OwnLease
from kestrelpy.ship.options import Ship
from kestrelpy.ship.owner import LogOwner

LOOK_SECONDS = 0.5
"""So often the thread looks, at least."""


class Gatekeeper:
    """Of one open queue. ``first_id``: the least id that its epoch gives out. ``is_behind``: more waits than
    ``when_behind`` allows.
    """

    def __init__(
        self,
        queue: str,
        options: Ship,
        owner: LogOwner,
        export: weakref.ref[Export],
        first_id: int,
        lease: OwnLease | None,
    ) -> None:
        self.is_behind = False
        self._queue = queue
        self._options = options
        self._owner = owner
        self._export = export
        self._first_id = first_id
        self._lease = lease
        self._whole_at = SystemClock.monotonic()
        self._is_over = self._has_thread = self._is_late = False
        self._bell = ThreadWaiter()

    def start(self) -> None:
        """Begin to look, on a thread, if one is needed. If it can't be started, and there is no lease, the shipping
        thread looks. Raises ``RuntimeError``.
        """
        if self._lease is None and self._options.when_behind == "go_on":
            return
        thread = threading.Thread(
            target=_keep, args=(weakref.ref(self), self._bell), name=f"kestrelpy-gate-{self._queue}", daemon=True
        )
        with contextlib.suppress(*() if self._lease is not None else (RuntimeError,)):
            thread.start()
            self._has_thread = True

    def end(self) -> None:
        """Look no more. The gate stays as it is. May be repeated."""
        self._is_over = True
        self._bell.give(None)

    def note_slot(self) -> None:
        """Something was shipped, or tried in vain."""
        if not self._has_thread:
            self.look()
        elif self._is_late or self.is_behind:
            self._bell.give(None)

    def unshipped(self, export: Export) -> tuple[int, int]:
        """The items that were put and are not in the log, and their bytes."""
        shipped = self._owner.shipped
        items, size = export.totals
        return max(0, items - shipped.total_items), max(0, size - shipped.total_bytes)

    def unshipped_seconds(self, items: int) -> float:
        """For how long something has been waiting. ``items``: that wait now."""
        return max(0.0, SystemClock.monotonic() - self._whole_at) if items else 0.0

    def look(self) -> None:
        """Open or close the gate."""
        export = self._export()
        if export is None or self._is_over:
            return
        options = self._options
        items, waiting = self.unshipped(export)
        if not items:
            self._whole_at = SystemClock.monotonic()
        queue, seconds = self._queue, self.unshipped_seconds(items)
        self.is_behind = waiting > options.max_unshipped_bytes or seconds > options.max_unshipped_seconds
        self._is_late = self._lease is not None and self._lease.left <= 0
        most = ID_JUMP // 2 if self._owner.shipped.last_id + 1 >= self._first_id else ID_STEP // 2
        if self._is_late:
            export.refuse(lambda: NotShipped.by_lease(export.last_id), waits=False)
        elif items > most:
            reason = f"queue {queue!r} has {items:,} items that are not in the store (S13)"
            export.refuse(lambda: QueueFull(reason), waits=False)
        elif self.is_behind and options.when_behind != "go_on":
            behind = f"queue {queue!r} is behind: {waiting:,} bytes are not in the store, for {seconds:.0f} s"
            export.refuse(lambda: QueueFull(behind), waits=options.when_behind == "block")
        else:
            export.accept()

    def pause(self) -> float:
        """Seconds until the next look."""
        left = self._lease.left if self._lease is not None else LOOK_SECONDS
        return min(LOOK_SECONDS, left) if left > 0 else LOOK_SECONDS


def _keep(keeper_of: weakref.ref[Gatekeeper], bell: ThreadWaiter) -> None:
    """Look until the queue is closed, or is gone."""
    while True:
        keeper = keeper_of()
        if keeper is None or keeper._is_over:
            return
        keeper.look()
        seconds = keeper.pause()
        del keeper
        bell.wait(seconds)
