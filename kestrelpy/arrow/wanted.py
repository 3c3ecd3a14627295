"""Which items a read wants: a range of ids and a range of times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kestrelpy._journal import format as fmt
from kestrelpy.arrow.decode import Run

_LAST_MS = 1 << 62


class Wanted(NamedTuple):
    """The wanted ids and times of adding: from ``start`` up to ``stop``, exclusive. A set, if given, narrows them more.

    Times are in milliseconds since 1970.
    """

    start_id: int = 1
    stop_id: int = fmt.LARGEST + 1
    start_ms: int = 0
    stop_ms: int = _LAST_MS
    ids: frozenset[int] | None = None
    instants_ms: frozenset[int] | None = None

    def ids_from(self, start_id: int) -> Wanted:
        return self._replace(start_id=max(self.start_id, start_id))

    def ids_before(self, stop_id: int) -> Wanted:
        return self._replace(stop_id=min(self.stop_id, stop_id))

    def added_from(self, start_ms: int) -> Wanted:
        return self._replace(start_ms=max(self.start_ms, start_ms))

    def added_before(self, stop_ms: int) -> Wanted:
        return self._replace(stop_ms=min(self.stop_ms, stop_ms))

    def among_ids(self, ids: Iterable[int]) -> Wanted:
        chosen = frozenset(ids) if self.ids is None else self.ids & frozenset(ids)
        return self._replace(ids=chosen)

    def among_instants(self, instants_ms: Iterable[int]) -> Wanted:
        mine = self.instants_ms
        chosen = frozenset(instants_ms) if mine is None else mine & frozenset(instants_ms)
        return self._replace(instants_ms=chosen)

    @property
    def has_times(self) -> bool:
        """True if the time at which an item was added matters."""
        return self.start_ms > 0 or self.stop_ms < _LAST_MS or self.instants_ms is not None

    @property
    def is_nothing(self) -> bool:
        return (
            self.start_id >= self.stop_id
            or self.start_ms >= self.stop_ms
            or self.ids == frozenset()
            or self.instants_ms == frozenset()
        )

    def within(self, first_id: int, last_id: int, first_ms: int, last_ms: int) -> Wanted:
        """The narrowest ``Wanted`` for a segment that has only these ids and times, both ends included."""
        found = self.ids_from(first_id).ids_before(last_id + 1).added_from(first_ms).added_before(last_ms + 1)
        if found.ids is not None:
            ids = frozenset(each for each in found.ids if found.start_id <= each < found.stop_id)
            found = found._replace(ids=ids)
            if ids:
                found = found.ids_from(min(ids)).ids_before(max(ids) + 1)
        if found.instants_ms is not None:
            some = frozenset(each for each in found.instants_ms if found.start_ms <= each < found.stop_ms)
            found = found._replace(instants_ms=some)
            if some:
                found = found.added_from(min(some)).added_before(max(some) + 1)
        return found

    def rows(self, run: Run) -> slice | npt.NDArray[np.intp]:
        """The wanted rows of a run: a slice, or rising indices."""
        first = min(max(self.start_id - run.first_id, 0), len(run.starts))
        stop = max(min(self.stop_id - run.first_id, len(run.starts)), first)
        if self.ids is None and not self.has_times:
            return slice(first, stop)
        added = run.added_ms[first:stop]
        right = (added >= self.start_ms) & (added < self.stop_ms)
        if self.instants_ms is not None:
            right &= np.isin(added, np.array(sorted(self.instants_ms), np.int64))
        if self.ids is not None:
            ids = np.array(sorted(each for each in self.ids if each <= fmt.LARGEST), np.int64)
            right &= np.isin(np.arange(run.first_id + first, run.first_id + stop), ids)
        if right.all():
            return slice(first, stop)
        return np.flatnonzero(right) + first
