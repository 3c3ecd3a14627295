"""Repairs a scheduler after an exception from outside left something half done; and checks its invariants.

Every list of the scheduler is made again from the fields of the jobs, the sessions and the waiters. The repair costs
O(jobs log jobs), once, in the next call after a ``KeyboardInterrupt`` or the like in the middle of a call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sortedcontainers import SortedList

from kestrelpy.work.records import BURIED, DELAYED, READY, RESERVED
from kestrelpy.work.scheduler import MARGIN
from kestrelpy.work.stored import ID_BITS, URGENT, StoredJob, Tube

if TYPE_CHECKING:
    from kestrelpy.work.scheduler import Scheduler
    from kestrelpy.work.stored import JobWaiter, SessionState


def repair(scheduler: Scheduler, holders: Iterable[SessionState], now: float) -> None:
    """Make every list again. ``holders``: the open sessions."""
    holders = list(holders)
    held: dict[SessionState | None, list[StoredJob]] = {holder: [] for holder in holders}
    for job in scheduler.jobs.values():
        if job.state == RESERVED and job.holder in held:
            held[job.holder].append(job)
        elif job.state == RESERVED:
            job.state, job.holder = READY, None
    rebuild(scheduler)
    scheduler.leaving.clear()
    for holder in holders:
        holder.reset_held(held[holder])
        holder.wakes = None
        if holder.closed:  # it was interrupted: below, no tube counts it any more
            holder.watched, holder.left, holder.using = {}, {}, None
            scheduler.leaving.append(holder)
    _repair_line(scheduler, [waiter for holder in holders for waiter in holder.waiters], now)
    _repair_tubes(scheduler, holders)  # last: a tube may be there for the line alone
    scheduler.next_due = now


def rebuild(scheduler: Scheduler) -> None:
    """Make every list of jobs again, from the fields of the jobs."""
    jobs = scheduler.jobs.values()
    for tube in {*scheduler.tubes.values(), *(job.tube for job in jobs)}:
        scheduler.tubes[tube.name] = tube
        tube.ready, tube.delayed, tube.buried = SortedList(), SortedList(), SortedList()
        tube.reserved = tube.urgent = 0
    scheduler.delayed = SortedList(job.sort_key for job in jobs if job.state == DELAYED)
    scheduler.reserved = SortedList(job.sort_key for job in jobs if job.state == RESERVED)
    scheduler.expiring = SortedList(job.expires for job in jobs if job.expires is not None and job.state != RESERVED)
    scheduler.keys = {(job.tube.name, job.key): job.id for job in jobs if job.key is not None}
    scheduler.bytes = sum(len(job.body) for job in jobs)
    scheduler.paused = SortedList(
        (tube.paused_until, tube.name) for tube in scheduler.tubes.values() if tube.paused_until
    )
    _fill_tubes(scheduler)


def _fill_tubes(scheduler: Scheduler) -> None:
    """Put every job into the list of its tube. The lists are empty before."""
    places: tuple[dict[Tube, list[Any]], ...] = ({}, {}, {}, {})  # by state
    for job in scheduler.jobs.values():
        if job.state == READY:
            job.sort_key = job.priority << ID_BITS | job.id
        try:
            places[job.state][job.tube].append(job.sort_key)
        except KeyError:
            places[job.state][job.tube] = [job.sort_key]
    for tube, keys in places[READY].items():
        tube.ready.update(keys)
        tube.urgent = tube.ready.bisect_left(URGENT << ID_BITS)
    for tube, keys in places[DELAYED].items():
        tube.delayed.update(keys)
    for tube, keys in places[BURIED].items():
        tube.buried.update(keys)
    for tube, keys in places[RESERVED].items():
        tube.reserved = len(keys)
    scheduler.urgent = sum(tube.urgent for tube in scheduler.tubes.values())
    scheduler.buried = sum(len(tube.buried) for tube in scheduler.tubes.values())


def _repair_tubes(scheduler: Scheduler, holders: list[SessionState]) -> None:
    watching = Counter(name for holder in holders for name in holder.watched)
    using = Counter(holder.using for holder in holders)
    for tube in list(scheduler.tubes.values()):
        tube.watching, tube.using = watching[tube.name], using[tube]
        scheduler.forget_unneeded(tube)


def _repair_line(scheduler: Scheduler, waiters: list[JobWaiter], now: float) -> None:
    scheduler.waiting = SortedList()
    for tube in scheduler.tubes.values():
        tube.waiting.clear()
    for waiter in sorted(waiters, key=lambda waiter: waiter.number):
        waiter.wakes = None
        del waiter.holder.waiters[waiter]
        if waiter in scheduler.completions:
            continue
        while (job := scheduler.take(waiter.holder, now)) is None and scheduler.stopped_early:
            scheduler.stopped_early = False
        if job is None:
            scheduler.enter_line(waiter, waiter.until)
        else:
            scheduler.completions[waiter] = waiter.holder.handle(job)


def check(scheduler: Scheduler, holders: Iterable[SessionState]) -> None:
    """The invariants; for tests, with nobody else at work."""
    jobs = scheduler.jobs
    for tube in scheduler.tubes.values():
        tube._check(jobs)
        assert tube.is_needed or tube.name == "default" or scheduler.leaving
        assert list(tube.waiting) == sorted(tube.waiting, key=lambda waiter: waiter.number)
    assert all(scheduler.tubes[job.tube.name] is job.tube for job in jobs.values())
    assert list(scheduler.delayed) == sorted(job.sort_key for job in jobs.values() if job.state == DELAYED)
    assert list(scheduler.reserved) == sorted(job.sort_key for job in jobs.values() if job.state == RESERVED)
    assert scheduler.keys == {(job.tube.name, job.key): job.id for job in jobs.values() if job.key is not None}
    assert scheduler.bytes == sum(len(job.body) for job in jobs.values())
    assert scheduler.urgent == sum(tube.urgent for tube in scheduler.tubes.values())
    assert scheduler.buried == sum(len(tube.buried) for tube in scheduler.tubes.values())
    for holder in holders:
        assert set(holder.held) == {job.id for job in jobs.values() if job.holder is holder}
        assert all(job.state == RESERVED for job in holder.held.values())
        soonest = min(((job.due, job.id) for job in holder.held.values()), default=None)
        assert holder.soonest() == soonest
        if holder.waiters and holder.deadline_soon and soonest is not None:
            assert holder.wakes is not None
            assert holder.wakes[0] <= soonest[0] - MARGIN
        assert holder.wakes is None or (holder.waiters and holder.wakes in scheduler.waiting)
    assert all(job.holder is not None for job in jobs.values() if job.state == RESERVED)
    assert all(job_id <= scheduler.last_id for job_id in jobs)
    due = [each[0][0] for each in (scheduler.delayed, scheduler.reserved, scheduler.paused, scheduler.waiting) if each]
    assert scheduler.next_due <= min(due, default=float("inf"))
