"""``Losses``: which jobs may be lost or outdated because of damaged records: for ``on_corruption="quarantine"``.

Nothing in a damaged record can be trusted. So this looks at the records around it: job ids that no record mentions, and
jobs about which no later record says anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kestrelpy.work.records import CARRIED, PUT

if TYPE_CHECKING:
    from kestrelpy.work.scheduler import Scheduler

_MOST_SPANS = 100
"""The log names at most so many spans of ids, and counts the ids of the others."""


class Losses:
    """The losses of one opening. The caller passes all records in the order of their ids."""

    def __init__(self, scheduler: Scheduler, path: str) -> None:
        self._scheduler = scheduler
        self._path = path
        self._lost: list[int] = []  # ids of records
        self.missing: list[tuple[int, int]] = []
        """First and last ids of jobs that lost records may have put."""
        self.doubtful: list[tuple[int, int]] = []
        """Those of jobs whose last changes may be lost, once all records were read."""
        self.missing_from = 0
        """The first job id that the lost records just before may have put; 0 if no record was lost just before."""

    def lose(self, at: int) -> None:
        """Record ``at`` is not intact."""
        self._lost.append(at)
        self.missing_from = self.missing_from or self._scheduler.last_id + 1

    def see(self, data: bytes) -> None:
        """The next record was read. If it is about a later job, lost records may have put the jobs in between."""
        first, last_id = self.missing_from, self._scheduler.last_id
        if last_id >= first:
            last_id -= data[0] in (PUT, CARRIED)  # this job is there
            if last_id >= first:
                self.missing.append((first, last_id))
            self.missing_from = 0

    def end(self) -> None:
        """All records were read: set ``last_id`` past every id that may be given out already, find jobs in doubt."""
        if not self._lost:
            return
        scheduler = self._scheduler
        if self.missing_from:
            scheduler.last_id += len(self._lost)  # each lost record may have put a job
            self.missing.append((self.missing_from, scheduler.last_id))
            self.missing_from = 0
        self.doubtful = _spans_of(
            sorted(job.id for job in scheduler.jobs.values() if max(job.at, job.state_at) < self._lost[-1])
        )

    def log(self) -> None:
        """Log the jobs in doubt, after ``end``."""
        if not self._lost:
            return
        from logging import getLogger  # imported here: mostly there is nothing to log

        getLogger("kestrelpy").warning(
            "%s: records %s are not intact and were skipped. Jobs that they put are lost: any of jobs %s, except those "
            "deleted since. The last changes to jobs %s may be forgotten: a deleted job may be back, another may have "
            "its older state",
            self._path,
            _in_words(_spans_of(self._lost)),
            _in_words(self.missing),
            _in_words(self.doubtful),
        )


def _spans_of(ids: Iterable[int]) -> list[tuple[int, int]]:
    """Rising ids as spans without gaps: the first and the last id of each."""
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
