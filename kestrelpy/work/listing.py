"""Looking at the jobs of a tube in the order in which their turn comes, a page at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator

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


def job_with_key(core: WorkCore, tube: str, key: str) -> Job:
    """``WorkQueue.peek_key``."""
    with core.deliveries, core.lock, core.turn as now:
        job_id = core.scheduler.keys.get((tube, key))
        if job_id is None:
            raise JobNotFound(None, f"no job of {tube!r} has the key {key!r}")
        return Job(core, None, core.find_locked(job_id, now))


def first_jobs(core: WorkCore, tube: str, limit: int) -> list[Job]:
    """Of each priority that ready jobs of the tube have, the first one, not reserved; up to ``limit``."""
    with core.deliveries, core.lock, core.turn as now:
        return [Job(core, None, stored) for stored in core.scheduler.first_of_priorities(tube, limit, now)]


def jobs_of(core: WorkCore, tube: str, state: str | Collection[str] | None) -> Iterator[JobStats]:
    """``WorkQueue.jobs``."""
    states = STATES if state is None else (state,) if isinstance(state, str) else tuple(state)
    for each in states:
        if each not in STATES:
            raise ValueError(f"state must be one of {', '.join(STATES)}, not {each!r}")
    chosen = [STATES.index(each) for each in dict.fromkeys(states)]  # a state that is named twice is one
    return _jobs_in_state(core, tube, *chosen) if len(chosen) == 1 else _jobs_in_states(core, tube, chosen)


def _jobs_in_state(core: WorkCore, tube: str, state: int) -> Iterator[JobStats]:
    """The jobs of the tube in the state. Lazy: changes made meanwhile may be seen or not."""
    last: object = None
    while True:
        with core.deliveries, core.lock, core.turn as now:
            page = core.scheduler.page(tube, state, last, _PAGE)
            found = _stats_locked(core, tube, [stored for _, stored in page], now)
        yield from found
        if not page:
            return
        last = page[-1][0]


def _jobs_in_states(core: WorkCore, tube: str, states: Collection[int]) -> Iterator[JobStats]:
    """The jobs that are in one of the states at the first ``next``, each as it is when its turn here comes; those that
    have left these states are left out. One that goes from state to state among them is listed once: state by state, it
    could pass by unseen.
    """
    with core.deliveries, core.lock, core.turn:
        ids = core.scheduler.ids(tube, states)
    for first in range(0, len(ids), _PAGE):
        with core.deliveries, core.lock, core.turn as now:
            found = _stats_locked(core, tube, _still_in_locked(core, ids[first : first + _PAGE], states), now)
        yield from found


def _still_in_locked(core: WorkCore, ids: list[int], states: Collection[int]) -> list[StoredJob]:
    known = (core.scheduler.jobs.get(each) for each in ids)
    return [stored for stored in known if stored is not None and stored.state in states]


def _stats_locked(core: WorkCore, tube: str, page: list[StoredJob], now: float) -> list[JobStats]:
    alive = [stored for stored in page if not core.scheduler.expire(stored, now)]
    return [job_stats(stored, now) for stored in alive if stored.tube.name == tube]
