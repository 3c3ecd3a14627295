"""What is lost with records that are not intact, and which jobs are in doubt by it: for ``on_corruption="quarantine"``.

Nothing in a damaged record can be believed, so this goes by what is around it: ids of jobs that no record mentions, and
jobs of which nothing was written since.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kestrelpy.work.records import CARRIED, PUT

if TYPE_CHECKING:
    from kestrelpy.work.scheduler import Scheduler

_MOST_SPANS = 100
"""So many are named in the log, and how many there are beside them."""


class Losses:
    """Of one opening, whose records are passed in the order of their ids."""

    def __init__(self, scheduler: Scheduler, path: str) -> None:
        self._scheduler = scheduler
        self._path = path
        self._lost: list[int] = []  # records
        self._missing: list[tuple[int, int]] = []  # first and last ids of jobs that may have been put by these
        self.missing_from = 0
        """The first id of a job that the lost records just before may have put; 0 if there are none."""

    def lose(self, at: int) -> None:
        """Record ``at`` is not intact."""
        self._lost.append(at)
        self.missing_from = self.missing_from or self._scheduler.last_id + 1

    def see(self, data: bytes) -> None:
        """The next record was taken in. If it is about a later job, those in between may have been put by lost ones."""
        first, last_id = self.missing_from, self._scheduler.last_id
        if last_id >= first:
            last_id -= data[0] in (PUT, CARRIED)  # this one is there
            if last_id >= first:
                self._missing.append((first, last_id))
            self.missing_from = 0

    def end(self) -> None:
        """All were read: let no id that may have been given out be given out again, and log what is in doubt."""
        if not self._lost:
            return
        scheduler = self._scheduler
        if self.missing_from:
            scheduler.last_id += len(self._lost)  # each of them may have put one
            self._missing.append((self.missing_from, scheduler.last_id))
        doubtful = sorted(job.id for job in scheduler.jobs.values() if max(job.at, job.state_at) < self._lost[-1])
        from logging import getLogger  # here and not above: mostly there is nothing to say

        getLogger("kestrelpy").warning(
            "%s: records %s are not intact and were passed over. Jobs that they put are lost: of jobs %s, those not "
            "deleted since. What was done last to jobs %s may be forgotten: one that was deleted may be back, others "
            "as they were before",
            self._path,
            _in_words(_spans_of(self._lost)),
            _in_words(self._missing),
            _in_words(_spans_of(doubtful)),
        )


def _spans_of(ids: Iterable[int]) -> list[tuple[int, int]]:
    """Rising ids as runs: the first and the last one of each."""
    spans: list[tuple[int, int]] = []
    for each in ids:
        if spans and each == spans[-1][1] + 1:
            spans[-1] = spans[-1][0], each
        else:
            spans.append((each, each))
    return spans


def _in_words(spans: list[tuple[int, int]]) -> str:
    """``1-3, 7``."""
    words = [f"{first}" if first == last else f"{first}-{last}" for first, last in spans[:_MOST_SPANS]]
    more = sum(last + 1 - first for first, last in spans[_MOST_SPANS:])
    return (", ".join(words) or "(none)") + (f" and {more:,} more" if more else "")
