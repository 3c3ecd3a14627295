"""``Delays``: when aborted items are due again, and the timer that then hands them out.

NOTE ON LOCKING: the backlog's lock (R in docs/locking.md) guards all of it; the timers' lock comes after it.
"""

from __future__ import annotations

import math
import weakref

from kestrelpy import _logging
from kestrelpy._reading.dispatch import Dispatcher
from kestrelpy.clock import Timer
from kestrelpy.config import ReaderConfig, check_delay


def delay_of(config: ReaderConfig, full_name: str, error_count: int) -> float:
    """Seconds until an item that has failed so often is due again. Called without a lock, as it may call the user's
    function. One that raises, or gives no finite number of at least 0, is logged, and counts as 0.
    """
    delay = config.retry_delay
    if not callable(delay):
        return delay
    try:
        return check_delay("the result of retry_delay", delay(error_count))
    except (Exception, SystemExit):
        _logging.exception("retry_delay of reader %s gave no delay; 0 is used", full_name)
        return 0.0


class Delays:
    """The timer of one reader's delayed items: one for all of them, set to the first that is due."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._backlog = dispatcher.backlog
        self._clock = dispatcher.source.clock
        self._timer: Timer | None = None
        self._armed_at = math.inf

    def due_in(self, seconds: float) -> float | None:
        """When an item is due that was aborted now; ``None``: at once."""
        return self._clock.monotonic() + seconds if seconds else None

    def arm_locked(self) -> None:
        """Set the timer to the next item that is due. If no thread can be started for it, each get looks by itself."""
        backlog = self._backlog
        due = backlog.requeued.next_due()
        if due is None or due >= self._armed_at:
            return
        mine = weakref.ref(self)  # a delay of hours must not keep a reader alive that nobody has

        def ripen(_lost: object = None) -> None:
            delays = mine()
            if delays is not None:
                delays._ripen(due)

        try:
            if self._timer is not None:
                self._timer.cancel()
            self._armed_at = due
            self._timer = self._clock.call_later(max(0.0, due - self._clock.monotonic()), ripen, on_lost=ripen)
            backlog.is_timed = True
        except RuntimeError:
            self._armed_at, backlog.is_timed = math.inf, False
        except BaseException:
            self._armed_at, backlog.is_timed = math.inf, False
            raise
        finally:
            backlog.update_fast_path()

    def _ripen(self, due: float) -> None:
        """The timer for ``due``: let the items go out, and hand them to the waiters in line."""
        backlog = self._backlog
        with backlog.lock:
            if backlog.broken is not None or self._armed_at != due:
                return
            self._armed_at, self._timer = math.inf, None
            backlog.requeued.ripen(max(due, self._clock.monotonic()))
            backlog.update_fast_path()
            self.arm_locked()
        self._dispatcher.hand_off()
