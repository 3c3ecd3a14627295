"""Looking at the jobs of a tube in the order in which their turn comes, a page at a time."""

from __future__ import annotations

from collections.abc import Iterator

from kestrelpy.work.core import WorkCore
from kestrelpy.work.errors import JobNotFound
from kestrelpy.work.job import Job
from kestrelpy.work.records import STATES
from kestrelpy.work.stats import JobStats, job_stats
from kestrelpy.work.stored import StoredJob

_PAGE = 250
"""How many jobs are listed in one go, with the lock held."""


def first_job(core: WorkCore, tube: str, state: int) -> Job:
    """The first job of the tube in the state, not reserved. Raises ``JobNotFound``."""
    while True:
        with core.deliveries, core.lock, core.turn as now:
            page = core.scheduler.page(tube, state, None, _PAGE)
            if not page:
                raise JobNotFound(None, f"no job of {tube!r} is {STATES[state]}")
            stored = next((stored for _, stored in page if not core.scheduler.expire(stored, now)), None)
            if stored is not None:
                return Job(core, None, stored)
        core.yield_lock()  # all jobs of this page had expired, and are dropped now: look again


def first_jobs(core: WorkCore, tube: str, limit: int) -> list[Job]:
    """Of each priority that ready jobs of the tube have, the first one, not reserved; up to ``limit``."""
    with core.deliveries, core.lock, core.turn as now:
        return [Job(core, None, stored) for stored in core.scheduler.first_of_priorities(tube, limit, now)]


def all_jobs(core: WorkCore, tube: str, state: int) -> Iterator[JobStats]:
    """The jobs of the tube in the state. Lazy: changes made meanwhile may be seen or not."""
    last: object = None
    while True:
        with core.deliveries, core.lock, core.turn as now:
            page = core.scheduler.page(tube, state, last, _PAGE)
            found = _stats_locked(core, tube, page, now)
        yield from found
        if not page:
            return
        last = page[-1][0]


def _stats_locked(core: WorkCore, tube: str, page: list[tuple[object, StoredJob]], now: float) -> list[JobStats]:
    alive = [stored for _, stored in page if not core.scheduler.expire(stored, now)]
    return [job_stats(stored, now) for stored in alive if stored.tube.name == tube]
