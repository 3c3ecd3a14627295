"""What a session watches, holds and waits for, as the machine sees it. No locks, clocks or files here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from sortedcontainers import SortedList

if TYPE_CHECKING:
    from kestrelpy.work._live import Live, Tube
    from kestrelpy.work._waiting import Waiter

_MANY = 64
"""From so many reservations on the first one to end is not searched for but looked up."""


class Holder:
    """What the machine knows of a session: what it watches, holds and waits for."""

    def __init__(self, number: int, *, deadline_soon: bool) -> None:
        self.number = number  # of its own among those who wait
        self.wakes: tuple[float, int, Holder] | None = None  # when those who wait are to hear of a deadline
        self.watched: dict[str, Tube] = {}
        self.held: dict[int, Live] = {}
        self.waiters: OrderedDict[Waiter, None] = OrderedDict()
        self.deadline_soon = deadline_soon
        self.using: Tube | None = None
        self._deadlines: SortedList[tuple[float, int]] | None = None  # of all held, if they are many

    def hold(self, job: Live) -> None:
        self.held[job.id] = job
        if self._deadlines is not None:
            self._deadlines.add(job.place)

    def let_go(self, job: Live) -> None:
        """No error for one that it does not hold; ``job.place`` must still be the reservation's."""
        if self.held.pop(job.id, None) is not None and self._deadlines is not None:
            self._deadlines.discard(job.place)
            if not self._deadlines:
                self._deadlines = None

    def soonest(self) -> tuple[float, int] | None:
        """The reservation that ends first: when, and the job's id."""
        if self._deadlines is None and len(self.held) > _MANY:
            self._deadlines = SortedList(job.place for job in self.held.values())
        if self._deadlines is not None:
            return self._deadlines[0]
        return min(((job.due, job.id) for job in self.held.values()), default=None)

    def handle(self, job: Live) -> object:
        """What whoever waited is told: the job that this session has reserved now."""
        raise NotImplementedError

    def take_stock(self, jobs: Iterable[Live]) -> None:
        """These are what it holds, whatever it seemed to."""
        self.held = {job.id: job for job in jobs}
        self._deadlines = None
