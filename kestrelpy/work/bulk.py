"""Changes of many jobs at once, in slices: other calls run between two slices.

NOTE ON LOCKING: what ends in ``_locked`` wants the queue's lock (W in docs/locking.md); the other functions take it, a
slice at a time.
"""

from __future__ import annotations

import itertools

from kestrelpy.work.core import WorkCore
from kestrelpy.work.errors import JobNotFound
from kestrelpy.work.records import BURIED, DELAYED
from kestrelpy.work.stored import StoredJob

_STEP = 500
"""How many jobs are kicked, cleared or saved in one go, with the lock held."""


def kick(core: WorkCore, n: int, tube: str) -> int:
    """``WorkQueue.kick``."""
    done = 0
    state: int | None = None
    while done < n:
        with core.deliveries, core.lock, core.turn as now:
            where = core.scheduler.tubes.get(tube)
            if where is None:
                break
            state = (BURIED if where.buried else DELAYED) if state is None else state
            keys = (where.buried if state == BURIED else where.delayed)[: min(_STEP, n - done)]
            done += kick_locked(core, [core.scheduler.jobs[key[1]] for key in keys], now)
        if len(keys) < _STEP or done >= n:
            break
        core.yield_lock()
    if done and core.always:
        core.sync()
    return done


def kick_job(core: WorkCore, job_id: int) -> None:
    """``WorkQueue.kick_job``."""
    with core.deliveries, core.lock, core.turn as now:
        stored = core.find_locked(job_id, now)
        if stored.state not in (BURIED, DELAYED):
            raise JobNotFound(job_id, "it is neither buried nor delayed")
        kick_locked(core, [stored], now)
    if core.always:
        core.sync()


def kick_locked(core: WorkCore, lives: list[StoredJob], now: float) -> int:
    """Make these jobs ready; returns how many had not expired."""
    lives = [stored for stored in lives if not core.scheduler.expire(stored, now)]
    core.write_states_locked(lives, [core.as_ready(stored, now)._replace(kicks=stored.kicks + 1) for stored in lives])
    for stored in lives:
        stored.kicks += 1
        core.scheduler.make_ready(stored, now)
    return len(lives)


def clear(core: WorkCore, tube: str) -> int:
    """``WorkQueue.clear``."""
    done = 0
    while True:
        with core.deliveries, core.lock, core.turn:
            where = core.scheduler.tubes.get(tube)
            lives = [] if where is None else core.scheduler.first_of(where, _STEP)
            _clear_locked(core, lives)
        done += len(lives)
        if len(lives) < _STEP:
            break
        core.yield_lock()
    if done and core.always:
        core.sync()
    return done


def _clear_locked(core: WorkCore, lives: list[StoredJob]) -> None:
    for stored in lives:
        core.delete_locked(stored)


def save_reserves(core: WorkCore) -> None:
    """``WorkQueue.save_reserves``."""
    unsaved = core.scheduler.unsaved
    left = len(unsaved)  # jobs that are reserved meanwhile are for the next call
    while True:
        with core.deliveries, core.lock, core.turn as now:
            some = list(itertools.islice(unsaved.values(), _STEP))
            core.write_states_locked(some, [core.state_of(stored, now) for stored in some])
        left -= _STEP
        if left <= 0:
            break
        core.yield_lock()
    if core.always:
        core.sync()
