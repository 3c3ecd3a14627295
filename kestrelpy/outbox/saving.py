"""Saving what came of jobs: for a running outbox and for its test kit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kestrelpy.outbox import admin, claims
from kestrelpy.outbox._logging import log
from kestrelpy.outbox.claims import Finish
from kestrelpy.outbox.execution import Outcome

if TYPE_CHECKING:
    from kestrelpy.outbox.store import JobStore

__all__ = ["save"]


def save(store: JobStore, outcomes: Sequence[Outcome]) -> set[int]:
    """Save outcomes in one transaction, of as many jobs; and free the lanes that they have left in a second one.

    Returns the ids of those that were saved: the others' tokens were no longer good. What the transaction of a
    ``transactional`` handler has saved counts.
    """
    saved = _save(store, outcomes)
    try:
        _clear_up(store, outcomes)
    except Exception:  # the outcomes are saved: what is left is for the sweep, and for the pruning each minute
        log.exception("clearing up after %s jobs failed, and is done later", len(saved))
    return saved


def _save(store: JobStore, outcomes: Sequence[Outcome]) -> set[int]:
    what = Finish()
    saved = {outcome.attempt.id for outcome in outcomes if outcome.is_saved}
    for outcome in outcomes:
        attempt = outcome.attempt
        if outcome.is_saved:
            continue
        if outcome.status == "done":
            is_kept = attempt.consumer.options.keep_done != 0
            (what.done if is_kept else what.deleted).append((attempt.id, attempt.token))
        elif outcome.status == "back":
            what.returned.append((attempt.id, attempt.token, outcome.delay_ms))
        else:
            what.failed.append((attempt.id, attempt.token, outcome.status, outcome.delay_ms or 0, outcome.error))
    if len(saved) < len(outcomes):
        if what.done and not (what.deleted or what.failed or what.returned):
            ids, freed = store.perform(None, claims.mark_done, what.done)  # one statement
        else:
            ids, freed = store.perform(None, claims.finish, what)
        saved |= ids
        outcomes[-1].freed = [*outcomes[-1].freed, *freed]
    return saved


def _clear_up(store: JobStore, outcomes: Sequence[Outcome]) -> None:
    for queue in sorted({each.attempt.consumer.queue for each in outcomes if _is_not_kept(each)}):
        store.perform(None, admin.prune, queue, ["dead"], 0)  # not one that another job waits for
    lanes = sorted({outcome.lane for outcome in outcomes if outcome.lane is not None})
    if lanes:
        outcomes[-1].freed = [*outcomes[-1].freed, *store.perform(None, claims.free_lanes, lanes)]


def _is_not_kept(outcome: Outcome) -> bool:
    return outcome.status == "dead" and outcome.attempt.consumer.options.keep_dead == 0
