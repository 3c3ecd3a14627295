"""The figures of a work queue for those who watch it, taken without its lock: no put waits for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kestrelpy import QueueStats
    from kestrelpy.work.core import WorkCore

__all__ = ["TubeJobs", "WorkFigures"]


class TubeJobs(NamedTuple):
    """How many jobs of one tube are in each state."""

    name: str
    ready: int
    reserved: int
    delayed: int
    buried: int


class WorkFigures(NamedTuple):
    """The figures of a work queue, read without its lock while others change it: each is right, and two of them may be
    of two moments. What time alone has changed since the last call is not in them.

    ``usable``: false once the queue is closed, has failed, or belongs to the parent of this forked process; then the
    others are 0. ``puts``: jobs that were ever put, also before this opening. ``reservations`` and ``refused`` count
    since the queue was opened; ``reservations`` never has more than there were, and may have those that end at this
    moment a little later. ``timeouts``: reservations that ran out of time, ever. ``bytes``: of all bodies. ``waiting``:
    sessions that wait for a job. ``journal``: the journal below, ``None`` for a queue in memory.
    """

    usable: bool
    tubes: tuple[TubeJobs, ...] = ()
    puts: int = 0
    reservations: int = 0
    timeouts: int = 0
    refused: int = 0
    bytes: int = 0
    waiting: int = 0
    journal: QueueStats | None = None


def work_figures(core: WorkCore) -> WorkFigures:
    """``WorkQueue.figures``. Each list is copied in one step of the interpreter, as docs/locking.md has it."""
    if core.state is not None:
        return WorkFigures(usable=False)
    scheduler, log = core.scheduler, core.journal
    journal = None if log is None else log.queue.stats()
    tubes = list(scheduler.tubes.values())
    ended = scheduler.ended  # before those that are not over: one that ends in between is counted the next time
    return WorkFigures(
        usable=journal is None or journal.usable,
        tubes=tuple(
            TubeJobs(tube.name, len(tube.ready), tube.reserved, len(tube.delayed), len(tube.buried)) for tube in tubes
        ),
        puts=scheduler.total_jobs,
        reservations=ended + len(scheduler.reserved),
        timeouts=scheduler.timeouts,
        refused=scheduler.refused,
        bytes=scheduler.bytes,
        waiting=len({waiter.holder for tube in tubes for waiter in list(tube.waiting)}),
        journal=journal,
    )
