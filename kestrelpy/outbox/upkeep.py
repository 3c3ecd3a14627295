"""``Upkeep``: what a running outbox does now and then, and the log of handlers that are slow."""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from kestrelpy.outbox import admin, reports
from kestrelpy.outbox._logging import log
from kestrelpy.outbox.execution import Attempt
from kestrelpy.outbox.sweeping import Sweep
from kestrelpy.outbox.watch import ErrorWatch

if TYPE_CHECKING:
    from kestrelpy.outbox.agenda import Agenda
    from kestrelpy.outbox.core import OutboxCore
    from kestrelpy.outbox.store import JobStore

__all__ = ["Upkeep"]

SWEEP_PAUSE = 19
"""Times that a slice of the sweep took, until the next one."""


class Upkeep:
    """Called by the feeder. ``run``: has something called on another thread, as a hook may take long."""

    def __init__(self, core: OutboxCore, store: JobStore, run: Callable[[Callable[[], object]], object]) -> None:
        self._core = core
        self._store = store
        self._run = run
        self._watch = ErrorWatch()
        self._to_prune: deque[Any] = deque()
        self._sweep = Sweep(store)

    def begin_sweep(self) -> None:
        """Look for what others have not freed, unless that is on its way."""
        self._sweep.begin()

    def sweep_slice(self, agenda: Agenda, clock: Callable[[], float]) -> Collection[str]:
        """A slice of the sweep, and the next one is planned. It takes a twentieth of the time, however much waits.
        Returns the queues that have jobs ready now.
        """
        began = clock()
        found = self._sweep.step()
        if found is None:
            return ()
        agenda.plan("sweep", clock() + SWEEP_PAUSE * (clock() - began))
        return found.queues

    def begin_pruning(self) -> None:
        """Plan to delete what was kept long enough."""
        if not self._to_prune:
            self._to_prune = deque(admin.prunable(self._core.queues.all()))

    def prune_slice(self) -> bool:
        """Delete one slice. True if there may be more: leases must be renewed in between."""
        if self._to_prune:
            which = self._to_prune.popleft()
            if self._store.perform(None, admin.prune, *which) >= admin.SLICE:
                self._to_prune.append(which)
        return bool(self._to_prune)

    def look_at_health(self) -> None:
        """Raise an alarm, or end it."""
        health = reports.look(self._core, store=self._store)
        change = self._watch.observe(self._core.now_ms(), len(health.reasons))
        settings = self._core.settings
        if change == "error":
            log.log(logging.ERROR, "the outbox is unhealthy: %s", "; ".join(health.reasons))
            self._call(settings.on_system_error)
        elif change == "recovery":
            log.log(logging.INFO, "the outbox is healthy again")
            self._call(settings.on_system_recovery)

    def _call(self, hook: Callable[[], object] | None) -> None:
        if hook is not None:
            self._run(hook)


def log_slow(running: Iterable[Attempt], now: float) -> None:
    """Log the handlers that are slow, each with its stack, once per ``slow_after``."""
    for attempt in running:
        slow_after = attempt.consumer.options.slow_after
        if attempt.started is None or now - attempt.started <= slow_after * (attempt.warned + 1):
            continue
        attempt.warned += 1
        log.error(
            "job %s of queue %r runs for %.1f s already:\n%s",
            attempt.id,
            attempt.consumer.queue,
            now - attempt.started,
            _stack_of(attempt),
        )


def look_seconds(attempts: Iterable[Attempt]) -> float:
    """How soon to look whether one of these is slow."""
    return max(min((attempt.consumer.options.slow_after for attempt in attempts), default=1.0) / 2, 0.01)


def _stack_of(attempt: Attempt) -> str:
    if isinstance(attempt.where, asyncio.Task):
        frames = attempt.where.get_stack(limit=20)
        return "".join(traceback.format_list([f for frame in frames for f in traceback.extract_stack(frame, limit=1)]))
    frame = sys._current_frames().get(attempt.where)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""
