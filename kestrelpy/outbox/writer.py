"""``OutcomeWriter``: saves what came of jobs, as many outcomes as there are in one transaction.

There is no timer: while one transaction is committed, the outcomes of the next one come together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from kestrelpy.outbox._logging import brief, log
from kestrelpy.outbox.errors import MissingPackage
from kestrelpy.outbox.execution import Outcome
from kestrelpy.outbox.saving import save
from kestrelpy.outbox.sql import MAX_CLAIM

try:
    from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_exponential
except ImportError:
    raise MissingPackage("tenacity", "outbox") from None

if TYPE_CHECKING:
    from kestrelpy.outbox.store import JobStore

__all__ = ["OutcomeWriter", "pause_after"]

MAX_PAUSE = 2.0
"""Seconds between tries while the database is away: it is found within 5 s of its return."""


def pause_after(failures: int) -> float:
    """Seconds to wait after so many failures in a row of what has to work again."""
    return min(0.01 * float(2 << min(failures, 10)), MAX_PAUSE)


class OutcomeWriter:
    """A thread that saves outcomes. ``on_finished`` is called with those of a transaction, and with the ids that were
    saved; the others were refused, or the database was away until their leases were over.
    """

    def __init__(
        self,
        store: JobStore,
        clock: Callable[[], float],
        on_finished: Callable[[Sequence[Outcome], set[int]], object],
    ) -> None:
        self._store = store
        self._clock = clock
        self._on_finished = on_finished
        self._outcomes: SimpleQueue[Outcome | None] = SimpleQueue()
        self._held: Outcome | None = None  # for the next transaction
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._write, name="kestrelpy-outbox-writer", daemon=True)
        self.put = self._outcomes.put

    def start(self) -> None:
        self._thread.start()

    def end(self, timeout: float | None) -> None:
        """Save what is there, and end the thread; wait for it. With a ``timeout`` the database is not waited for."""
        if timeout is not None:
            self._ending.set()
        self._outcomes.put(None)
        if self._thread.ident is not None:  # none, where a start has failed
            self._thread.join(timeout)

    def _write(self) -> None:
        is_ending = False
        while not is_ending:
            batch, is_ending = self._next()
            try:
                self._save(batch)
            except Exception:
                log.exception("%s outcomes are lost; their jobs run again when their leases are over", len(batch))
                self._on_finished(batch, set())

    def _next(self) -> tuple[list[Outcome], bool]:
        """All outcomes that are there, at least one; and whether they are the last."""
        batch: list[Outcome] = []
        ids = set()
        outcome = self._outcomes.get() if self._held is None else self._held
        self._held = None
        while outcome is not None:
            if outcome.attempt.id in ids:  # it has lapsed and was claimed again: each has its own answer
                self._held = outcome
                return batch, False
            ids.add(outcome.attempt.id)
            batch.append(outcome)
            if len(batch) == MAX_CLAIM:
                return batch, False
            try:
                outcome = self._outcomes.get_nowait()
            except Empty:
                return batch, False
        return batch, True

    def _save(self, batch: list[Outcome]) -> None:
        """Save outcomes, and try again while the database is away: until their leases are over."""
        if not batch:
            return
        tries = Retrying(
            wait=wait_exponential(multiplier=0.02, max=MAX_PAUSE),
            retry=retry_if_exception_type(Exception),
            stop=lambda state: self._is_over(state, batch),
            sleep=self._pause,
            before_sleep=self._tell,
            reraise=True,
        )
        saved = tries(save, self._store, batch)
        self._on_finished(batch, saved)

    def _is_over(self, _state: RetryCallState, batch: Sequence[Outcome]) -> bool:
        return self._ending.is_set() or self._clock() > max(outcome.attempt.until for outcome in batch)

    def _pause(self, seconds: float) -> None:
        self._ending.wait(seconds)

    def _tell(self, state: RetryCallState) -> None:
        if state.attempt_number == 1 and state.outcome is not None:
            log.warning("saving outcomes failed; trying again: %s", brief(state.outcome.exception()))
