"""``Sweep``: finds what others have left: leases that are over, and jobs and lanes that nobody has freed.

A pass goes over all that waits, in slices, each in transactions of its own: a million jobs that wait hold nothing up.
Where there is nothing to free, nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kestrelpy.outbox import claims
from kestrelpy.outbox.execution import Attempt, Outcome, lapse_of
from kestrelpy.outbox.job import QUEUE

if TYPE_CHECKING:
    from kestrelpy.outbox.core import OutboxCore
    from kestrelpy.outbox.sql import Rows
    from kestrelpy.outbox.store import JobStore

__all__ = ["Sweep", "fail_lapsed"]


def fail_lapsed(core: OutboxCore, store: JobStore) -> list[Outcome]:
    """Fail the jobs whose lease is over. Returns the outcomes that were saved, whose hooks are to be called. Of queues
    that are only declared here, the retries and the back-off are not known.
    """
    known = {each.queue: each for each in core.queues.consumed()}
    if not known:
        return []
    rows = store.perform(None, claims.lapsed, list(known))
    outcomes = [lapse_of(Attempt(core, known[row[QUEUE]], row[:-1], row[-1])) for row in rows]
    if not outcomes:
        return []
    failures = [(each.attempt.id, each.attempt.token, each.status, each.delay_ms or 0, each.error) for each in outcomes]
    saved = store.perform(None, claims.fail, failures, are_lapsed=True)
    return [each for each in outcomes if each.attempt.id in saved]


class Sweep:
    """Passes over what waits: dependants whose put overlapped with the mark of the other job, and lanes whose next job
    nobody has freed.
    """

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._pass: Iterator[Slice] | None = None

    def begin(self) -> None:
        """Begin a pass, unless one is on its way."""
        if self._pass is None:
            self._pass = _slices(self._store)

    def step(self) -> Slice | None:
        """The next slice; ``None``: the pass is over. An error of the database ends it, too."""
        going, self._pass = self._pass, None
        found = None if going is None else next(going, None)
        if found is not None:
            self._pass = going
        return found

    def all(self) -> Rows:
        """A pass to its end: the rows of the jobs that were freed, by id."""
        rows: list[Sequence[Any]] = []
        for found in _slices(self._store):
            rows += found.jobs
        return sorted(rows, key=lambda row: int(row[0]))


class Slice:
    """What was freed: rows of dependants, and the ``queues`` that have jobs ready now."""

    __slots__ = ("jobs", "queues")

    def __init__(self, jobs: Rows = (), queues: Sequence[str] = ()) -> None:
        self.jobs = jobs
        self.queues = {*queues, *(row[QUEUE] for row in jobs)}


def _slices(store: JobStore) -> Iterator[Slice]:
    after: int | None = 0
    while after is not None:
        ended, after = store.perform(None, claims.overlooked, after)
        yield Slice(jobs=store.perform(None, claims.free_overlooked, ended) if ended else ())
    lane: claims.Lane | None = ("", "")
    while lane is not None:
        held, lane = store.perform(None, claims.held_lanes, lane)
        yield Slice(queues=store.perform(None, claims.free_lanes, held) if held else ())
