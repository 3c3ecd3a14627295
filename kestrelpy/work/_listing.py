"""Looking at a work queue: single jobs, lists of them, figures. Changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kestrelpy.work._records import BURIED, DELAYED, READY, RESERVED, STATES
from kestrelpy.work._settling import Settling
from kestrelpy.work.errors import JobNotFound, TubeNotFound
from kestrelpy.work.session import Job
from kestrelpy.work.stats import JobStats, TubeStats, WorkStats
from kestrelpy.work.stored import ID_MASK, StoredJob

if TYPE_CHECKING:
    from kestrelpy.work.stored import Tube

_PAGE = 250
"""How many jobs are listed in one go."""


class Listing(Settling):
    """The part of a work queue that looks."""

    _draining: bool
    _opened_at: float

    def _first_of_locked(self, tube: Tube, count: int) -> list[StoredJob]:
        """Some of its jobs that are not reserved: ready ones, then delayed, then buried."""
        keys = [key & ID_MASK for key in tube.ready[:count]]
        for places in (tube.delayed, tube.buried):
            keys += [place[1] for place in places[: count - len(keys)]]
        return [self._machine.jobs[key] for key in keys]

    # -- single jobs -------------------------------------------------------------------------------------------------

    def peek(self, job_id: int) -> Job:
        """The job as it is, not reserved. Raises ``JobNotFound``."""
        with self._news, self._lock, self._turn as now:
            return Job(self, None, self._live_locked(job_id, now))  # type: ignore[arg-type]

    def peek_ready(self, tube: str = "default") -> Job:
        """The most urgent job that is ready in the tube. Raises ``JobNotFound``."""
        return self._peek(tube, READY)

    def peek_delayed(self, tube: str = "default") -> Job:
        """The delayed job of the tube that is due first. Raises ``JobNotFound``."""
        return self._peek(tube, DELAYED)

    def peek_buried(self, tube: str = "default") -> Job:
        """The job of the tube that was buried first. Raises ``JobNotFound``."""
        return self._peek(tube, BURIED)

    def _peek(self, tube: str, state: int) -> Job:
        while True:
            with self._news, self._lock, self._turn as now:
                page = self._page_locked(tube, state, None, _PAGE)
                if not page:
                    raise JobNotFound(None, f"no job of {tube!r} is {STATES[state]}")
                live = next((live for _, live in page if not self._machine.expire(live, now)), None)
                if live is not None:
                    return Job(self, None, live)  # type: ignore[arg-type]
            self._breathe()  # all of these had expired, and nobody had come to drop them yet

    # -- lists -------------------------------------------------------------------------------------------------------

    def jobs(self, tube: str = "default", state: str | None = None) -> Iterator[JobStats]:
        """The jobs of a tube, of one state or of all, in the order in which their turn comes.

        Lazily, a page at a time: what changes meanwhile may be seen or not.
        """
        if state is not None and state not in STATES:
            raise ValueError(f"state must be one of {', '.join(STATES)}, not {state!r}")
        chosen = range(len(STATES)) if state is None else (STATES.index(state),)
        return itertools.chain.from_iterable(self._listed(tube, each) for each in chosen)

    def _listed(self, tube: str, state: int) -> Iterator[JobStats]:
        last: object = None
        while True:
            with self._news, self._lock, self._turn as now:
                page = self._page_locked(tube, state, last, _PAGE)
                found = self._all_stats_locked(tube, page, now)
            yield from found
            if not page:
                return
            last = page[-1][0]

    def _all_stats_locked(self, tube: str, page: list[tuple[object, StoredJob]], now: float) -> list[JobStats]:
        alive = [live for _, live in page if not self._machine.expire(live, now)]
        return [self._job_stats_locked(live, now) for live in alive if live.tube.name == tube]

    def _page_locked(self, name: str, state: int, last: object, count: int) -> list[tuple[object, StoredJob]]:
        """The next jobs behind ``last``, with their places; of reserved ones, those of other tubes too."""
        machine = self._machine
        tube = machine.tubes.get(name)
        if tube is None:
            return []
        places: Any = {READY: tube.ready, DELAYED: tube.delayed, BURIED: tube.buried, RESERVED: machine.reserved}[state]
        found = itertools.islice(places.irange(last, None, (False, True)), count)
        if state == READY:
            return [(key, machine.jobs[key & ID_MASK]) for key in found]
        return [(place, machine.jobs[place[1]]) for place in found]

    # -- figures -----------------------------------------------------------------------------------------------------

    def tubes(self) -> list[str]:
        """The tubes there are: ``default``, and others that have jobs, or are used, watched or paused; oldest first."""
        with self._news, self._lock, self._turn:
            return list(self._machine.tubes)

    def stats(self) -> WorkStats:
        """The queue's figures."""
        with self._news, self._lock, self._turn as now:
            machine, log = self._machine, self._journal
            on_disk = None if log is None else log.queue.stats()
            reserved, delayed, buried = len(machine.reserved), len(machine.delayed), machine.buried
            return WorkStats(
                urgent=machine.urgent,
                ready=len(machine.jobs) - reserved - delayed - buried,
                reserved=reserved,
                delayed=delayed,
                buried=buried,
                total_jobs=machine.total_jobs,
                timeouts=machine.timeouts,
                tubes=len(machine.tubes),
                sessions=len(self._sessions),
                waiting=sum(bool(session.waiters) for session in self._sessions),
                bytes=machine.bytes,
                last_id=machine.last_id,
                journal_bytes=0 if on_disk is None else on_disk.journal_bytes,
                segments=0 if on_disk is None else on_disk.segments,
                oldest_segment=0 if on_disk is None else on_disk.oldest_segment,
                newest_segment=0 if on_disk is None else on_disk.newest_segment,
                records_written=0 if log is None else log.appended,
                records_migrated=self._migrated,
                draining=self._draining,
                uptime=now - self._opened_at,
            )

    def stats_tube(self, tube: str) -> TubeStats:
        """The figures of a tube. Raises ``TubeNotFound``."""
        with self._news, self._lock, self._turn as now:
            found = self._machine.tubes.get(tube)
            if found is None:
                raise TubeNotFound(tube)
            return TubeStats(
                name=tube,
                urgent=found.urgent,
                ready=len(found.ready),
                reserved=found.reserved,
                delayed=len(found.delayed),
                buried=len(found.buried),
                total_jobs=found.total_jobs,
                using=found.using,
                watching=found.watching,
                waiting=len({waiter.holder for waiter in found.waiting}),
                deletes=found.deletes,
                pauses=found.pauses,
                pause=found.pause,
                pause_left=max(0.0, found.paused_until - now) if found.paused_until else 0.0,
            )

    def stats_job(self, job_id: int) -> JobStats:
        """The figures of a job. Raises ``JobNotFound``."""
        with self._news, self._lock, self._turn as now:
            return self._job_stats_locked(self._live_locked(job_id, now), now)

    def _job_stats_locked(self, live: StoredJob, now: float) -> JobStats:
        return JobStats(
            id=live.id,
            tube=live.tube.name,
            state=STATES[live.state],
            priority=live.priority,
            age=max(0.0, now - live.added),
            delay=live.delay,
            ttr=live.ttr,
            time_left=max(0.0, live.due - now) if live.state in (DELAYED, RESERVED) else 0.0,
            reserves=live.reserves,
            timeouts=live.timeouts,
            releases=live.releases,
            buries=live.buries,
            kicks=live.kicks,
            body_bytes=len(live.body),
            key=live.key,
        )
