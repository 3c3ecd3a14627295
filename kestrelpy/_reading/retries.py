"""``Retries``: what becomes of an item that was aborted: it is due at once, or later, or it is dead.

Rules:
1. ``on_abort`` comes first: an item that the hook takes is done, and neither delayed nor dead.
2. An item whose ``error_count`` has reached ``max_deliveries`` is dead. Its end is in ``burial``, or it is dropped.
3. While a hook or a function of the user runs, the item is in the backlog's ``with_hook``, and no lock is held.

NOTE ON LOCKING: the backlog's lock (R in docs/locking.md).
"""

from __future__ import annotations

import math

from kestrelpy import _logging
from kestrelpy._journal.moves import cut_reason
from kestrelpy._reading.burial import Burial
from kestrelpy._reading.delays import Delays, delay_of
from kestrelpy._reading.dispatch import Dispatcher
from kestrelpy.config import ReaderConfig
from kestrelpy.item import Item

LOG_SECONDS = 60.0
"""Items that are dropped are logged once in so many seconds."""


def is_plain(config: ReaderConfig) -> bool:
    """Whether an aborted item is simply due again, so that ``Reader.abort`` needs nothing of this module."""
    return config.on_abort is None and config.max_deliveries is None and not config.retry_delay


class Retries:
    """The aborts of one reader that are not plain."""

    def __init__(self, dispatcher: Dispatcher, burial: Burial) -> None:
        self._dispatcher = dispatcher
        self._backlog = dispatcher.backlog
        self._clock = dispatcher.source.clock
        self._burial = burial
        self._delays = Delays(dispatcher)
        self.dropped = 0
        self._unlogged = 0
        self._logged_at = -math.inf

    def after_abort(self, item: Item, delay: float | None, reason: str, *, may_die: bool) -> None:
        """Decide about ``item``, which is in ``with_hook`` and has its new error count. With no lock held."""
        config = self._backlog.config
        if config.on_abort is not None and self._dispatcher.hooks.show_aborted(item):
            return
        if may_die and config.max_deliveries is not None and item.error_count >= config.max_deliveries:
            self._end(item, config, reason)
            return
        seconds = delay if delay is not None else delay_of(config, self._backlog.full_name, item.error_count)
        backlog = self._backlog
        due = self._delays.due_in(seconds)
        with backlog.lock:
            if backlog.with_hook.get(item.id) is item:  # else the reader was closed or moved meanwhile
                del backlog.with_hook[item.id]
                backlog.requeue(item.id, (item.data, item.added_ms, item.expires_ms), due)
                if due is not None:
                    self._delays.arm_locked()

    def _end(self, item: Item, config: ReaderConfig, reason: str) -> None:
        """The item is dead."""
        if config.dead_letter is None:
            self._dispatcher.hooks.release(item)
            self.dropped += 1
            self._log_dropped(item, reason)
            return
        backlog, reason = self._backlog, cut_reason(reason)
        with backlog.lock:
            if backlog.with_hook.get(item.id) is item:
                self._burial.add_locked(item, config.dead_letter, reason, self._clock.time_ns() // 1_000_000)

    def _log_dropped(self, item: Item, reason: str) -> None:
        now = self._clock.monotonic()
        self._unlogged += 1
        if now >= self._logged_at + LOG_SECONDS:
            others = f", and {self._unlogged - 1} before it" if self._unlogged > 1 else ""
            self._logged_at, self._unlogged = now, 0
            text = "reader %s: item %d has failed %d times and is dropped%s: %s"
            _logging.warning(text, self._backlog.full_name, item.id, item.error_count, others, reason or "no reason")
