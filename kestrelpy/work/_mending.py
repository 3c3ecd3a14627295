"""What an exception from outside may have left half done in a machine, made whole; and what must hold of one.

Every list of the machine is made again from what the jobs, the sessions and the waiters say of themselves. Costs
O(jobs log jobs), once, at the next call after a ``KeyboardInterrupt`` or the like struck in the middle of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sortedcontainers import SortedList

from kestrelpy.work._records import BURIED, DELAYED, READY, RESERVED
from kestrelpy.work.scheduler import MARGIN
from kestrelpy.work.stored import ID_BITS, URGENT, StoredJob, Tube

if TYPE_CHECKING:
    from kestrelpy.work.scheduler import Scheduler
    from kestrelpy.work.stored import JobWaiter, SessionState


def mend(machine: Scheduler, holders: Iterable[SessionState], now: float) -> None:
    """Make every list anew; ``holders``: the sessions that are open."""
    holders = list(holders)
    held: dict[SessionState | None, list[StoredJob]] = {holder: [] for holder in holders}
    for job in machine.jobs.values():
        if job.state == RESERVED and job.holder in held:
            held[job.holder].append(job)
        elif job.state == RESERVED:
            job.state, job.holder = READY, None
    rebuild(machine)
    for holder in holders:
        holder.take_stock(held[holder])
        holder.wakes = None
    _mend_tubes(machine, holders)
    _mend_line(machine, [waiter for holder in holders for waiter in holder.waiters], now)
    machine.leaving.clear()
    machine.next_due = now


def rebuild(machine: Scheduler) -> None:
    """Every list of jobs anew, from what they say of themselves."""
    jobs = machine.jobs.values()
    for tube in {*machine.tubes.values(), *(job.tube for job in jobs)}:
        machine.tubes[tube.name] = tube
        tube.ready, tube.delayed, tube.buried = SortedList(), SortedList(), SortedList()
        tube.reserved = tube.urgent = 0
    machine.delayed = SortedList(job.place for job in jobs if job.state == DELAYED)
    machine.reserved = SortedList(job.place for job in jobs if job.state == RESERVED)
    machine.expiring = SortedList(job.expires for job in jobs if job.expires is not None and job.state != RESERVED)
    machine.keys = {(job.tube.name, job.key): job.id for job in jobs if job.key is not None}
    machine.bytes = sum(len(job.body) for job in jobs)
    machine.paused = SortedList((tube.paused_until, tube.name) for tube in machine.tubes.values() if tube.paused_until)
    _fill_tubes(machine)


def _fill_tubes(machine: Scheduler) -> None:
    """Every job into the list of its tube; these are empty."""
    places: tuple[dict[Tube, list[Any]], ...] = ({}, {}, {}, {})  # by state
    for job in machine.jobs.values():
        if job.state == READY:
            job.place = job.priority << ID_BITS | job.id
        try:
            places[job.state][job.tube].append(job.place)
        except KeyError:
            places[job.state][job.tube] = [job.place]
    for tube, keys in places[READY].items():
        tube.ready.update(keys)
        tube.urgent = tube.ready.bisect_left(URGENT << ID_BITS)
    for tube, keys in places[DELAYED].items():
        tube.delayed.update(keys)
    for tube, keys in places[BURIED].items():
        tube.buried.update(keys)
    for tube, keys in places[RESERVED].items():
        tube.reserved = len(keys)
    machine.urgent = sum(tube.urgent for tube in machine.tubes.values())
    machine.buried = sum(len(tube.buried) for tube in machine.tubes.values())


def _mend_tubes(machine: Scheduler, holders: list[SessionState]) -> None:
    watching = Counter(name for holder in holders for name in holder.watched)
    using = Counter(holder.using for holder in holders)
    for tube in list(machine.tubes.values()):
        tube.watching, tube.using = watching[tube.name], using[tube]
        machine.forget_unneeded(tube)


def _mend_line(machine: Scheduler, waiters: list[JobWaiter], now: float) -> None:
    machine.waiting = SortedList()
    for tube in machine.tubes.values():
        tube.waiting.clear()
    for waiter in sorted(waiters, key=lambda waiter: waiter.number):
        waiter.wakes = None
        del waiter.holder.waiters[waiter]
        if waiter in machine.told:
            continue
        while (job := machine.take(waiter.holder, now)) is None and machine.is_behind:
            machine.is_behind = False
        if job is None:
            machine.enter_line(waiter, waiter.until)
        else:
            machine.told[waiter] = waiter.holder.handle(job)


def check(machine: Scheduler, holders: Iterable[SessionState]) -> None:
    """The invariants; for tests, with nobody else at work."""
    jobs = machine.jobs
    for tube in machine.tubes.values():
        tube._check(jobs)
        assert list(tube.waiting) == sorted(tube.waiting, key=lambda waiter: waiter.number)
    assert all(machine.tubes[job.tube.name] is job.tube for job in jobs.values())
    assert list(machine.delayed) == sorted(job.place for job in jobs.values() if job.state == DELAYED)
    assert list(machine.reserved) == sorted(job.place for job in jobs.values() if job.state == RESERVED)
    assert machine.keys == {(job.tube.name, job.key): job.id for job in jobs.values() if job.key is not None}
    assert machine.bytes == sum(len(job.body) for job in jobs.values())
    assert machine.urgent == sum(tube.urgent for tube in machine.tubes.values())
    assert machine.buried == sum(len(tube.buried) for tube in machine.tubes.values())
    for holder in holders:
        assert set(holder.held) == {job.id for job in jobs.values() if job.holder is holder}
        assert all(job.state == RESERVED for job in holder.held.values())
        soonest = min(((job.due, job.id) for job in holder.held.values()), default=None)
        assert holder.soonest() == soonest
        if holder.waiters and holder.deadline_soon and soonest is not None:
            assert holder.wakes is not None
            assert holder.wakes[0] <= soonest[0] - MARGIN
        assert holder.wakes is None or (holder.waiters and holder.wakes in machine.waiting)
    assert all(job.holder is not None for job in jobs.values() if job.state == RESERVED)
    assert all(job_id <= machine.last_id for job_id in jobs)
    due = [each[0][0] for each in (machine.delayed, machine.reserved, machine.paused, machine.waiting) if each]
    assert machine.next_due <= min(due, default=float("inf"))
