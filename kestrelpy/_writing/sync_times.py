"""``SyncTimes``: how long the syncs of a queue's journal took, as a histogram."""

from __future__ import annotations

from bisect import bisect_left

from kestrelpy.config import SYNC_BOUNDS

__all__ = ["SyncTimes"]


class SyncTimes:
    """The histogram of one queue. ``figures``: the number of syncs in each bucket, and the seconds of all together.

    NOTE ON LOCKING: none of its own. One thread syncs at a time, and ``figures`` changes by one store: any thread may
    read it, and finds buckets and seconds that belong together.
    """

    __slots__ = ("figures",)

    def __init__(self) -> None:
        self.figures: tuple[tuple[int, ...], float] = ((0,) * (len(SYNC_BOUNDS) + 1), 0.0)

    def note(self, seconds: float) -> None:
        """A sync took so long. Called by the thread that has done it."""
        buckets, total = self.figures
        at = bisect_left(SYNC_BOUNDS, seconds)
        self.figures = ((*buckets[:at], buckets[at] + 1, *buckets[at + 1 :]), total + seconds)
