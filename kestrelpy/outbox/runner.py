"""``Runner``: a running outbox. It claims jobs, runs their handlers, and saves what comes of them.

    feeder    claims jobs, renews leases, sweeps, and all else that is due now and then
    workers   run ``def`` handlers, and hooks
    a loop    runs ``async`` handlers: the caller's (``astart``), or one on a thread of its own
    writer    saves the outcomes of all of them, as many as there are, in one transaction; there is no timer
    listener  wakes the feeder, and the relays, when somebody commits a job
    relays    each moves the jobs of a queue on a thread of its own

Rules:
1. A job that is claimed is in ``_claimed`` until its outcome is saved or refused, and its lease is renewed until then.
2. Nothing that a database, a handler or a hook raises ends a thread.
3. Who stops first sets ``_stopping``; the feeder gives back what no worker has begun, and waits for what is running.

NOTE ON LOCKING: ``_lock`` guards the count of hooks, and who is the first to report an attempt. It is held for a few
statements at a time. Queues between the threads are ``SimpleQueue``.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from kestrelpy.outbox import claims
from kestrelpy.outbox._logging import brief, log
from kestrelpy.outbox.agenda import Agenda
from kestrelpy.outbox.claimed import ClaimedJobs
from kestrelpy.outbox.execution import Attempt, Outcome, call_hooks, unexpected
from kestrelpy.outbox.flavours import BYTES
from kestrelpy.outbox.job import QUEUE, running
from kestrelpy.outbox.loop_runs import LoopRuns
from kestrelpy.outbox.prefetch import Prefetch
from kestrelpy.outbox.relay_thread import RelayThreads
from kestrelpy.outbox.signals import wait_for
from kestrelpy.outbox.sql import MAX_BYTES, MAX_CLAIM, Claim
from kestrelpy.outbox.sweeping import fail_lapsed
from kestrelpy.outbox.transactions import arun_within, run_within
from kestrelpy.outbox.upkeep import Upkeep, log_slow, look_seconds
from kestrelpy.outbox.wakeup import Listener, listener_for
from kestrelpy.outbox.writer import OutcomeWriter, pause_after

if TYPE_CHECKING:
    from kestrelpy.outbox.core import OutboxCore
    from kestrelpy.outbox.queues import QueueConsumer
    from kestrelpy.outbox.store import JobStore

__all__ = ["Runner"]

ASYNC_AT_ONCE = 100
"""How many ``async`` handlers run at once in a process, unless their queues' ``concurrency`` says less."""
MAX_UNSAVED = 3000
MINUTE = 60.0
LOOK_AHEAD_SECONDS = 0.05
"""Between two questions when the next job is due: so late one may start that is due while others come all the time."""
LATE_SECONDS = 0.2
"""So late comes what can wait, while jobs come all the time."""
LAST_SECONDS = 0.8
"""How long a stop may go on after its timeout."""


class Runner:
    """Runs the jobs of an outbox in this process. Started once, stopped once."""

    def __init__(
        self,
        core: OutboxCore,
        store: JobStore,
        *,
        queues: frozenset[str] | None,
        threads: int,
        prefetch: int | None,
        poll_interval: float | None,
        retry_interval: float,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._core = core
        self._store = store
        self._own = store.beside()
        self._queues = queues
        self._prefetch = Prefetch(prefetch)
        self._poll_interval = poll_interval
        self._retry_interval = retry_interval
        self._clock = core.time.monotonic
        self._lock = threading.Lock()
        self._agenda = Agenda(self._clock)
        self._stopping = False
        self._deadline: float | None = None  # of the stop
        self._was_idle = False  # at the end of the stop
        self._ended = threading.Event()
        self._pause = threading.Event()  # is never set
        self._jobs: SimpleQueue[Attempt | Callable[[], object] | None] = SimpleQueue()
        self._writer = OutcomeWriter(self._own, self._clock, self._finish)
        self._claimed = ClaimedJobs()
        self._hooks = 0  # guarded by self._lock: how many outcomes wait for their hooks, or are in them
        self._busy: list[Attempt | None] = [None] * threads  # what each worker runs
        self._finished = [0] * threads  # how many jobs each worker has run
        self._loop = LoopRuns(loop, self._run_async, self._report, store.on_this_loop)
        self._more: set[str] = set()  # the queues of which there may be ready jobs; of the feeder
        self._retries_wait = False  # for room, or for others of their queue to end; of the feeder
        self._low = 0  # how many jobs are left for the workers when the feeder is woken
        self._retry_from: dict[str, float] = {}  # by queue: the end of the pause after a failure
        self._next_look_ahead = 0.0
        self._poll_seconds = 5.0
        self._failures = 0  # of the database, in a row
        self._upkeep = Upkeep(core, self._own, self._run_soon)
        self._relays = RelayThreads(core, self._own, queues)
        self.lost = 0  # outcomes that were refused
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"kestrelpy-outbox-{number}", daemon=True)
            for number in range(threads)
        ]
        self._feeder = threading.Thread(target=self._feed, name="kestrelpy-outbox-feeder", daemon=True)
        self._listener: Listener | None = None
        self._notifies = False
        self._begun = threading.Event()
        self._start_error: BaseException | None = None

    # -- from outside ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all threads. The feeder starts the others, and ends them, also if this call is interrupted."""
        database = getattr(self._own, "database", None)
        self._listener = None if database is None else listener_for(self._core, database, self.wake)
        is_told = self._store.watch(partial(self._agenda.plan_in, "ready")) or self._listener is not None
        self._poll_seconds = self._poll_interval or (5.0 if is_told else 1.0)
        now = self._clock()
        for what in ("poll", "ready", "retry", "renewal", "minute"):
            self._agenda.plan(what, now)
        self._notifies = database is not None and database.sql.channel is not None
        self._core.slow = self._slow
        self._feeder.start()
        self._begun.wait()
        if self._start_error is not None:
            raise self._start_error

    def wake(self) -> None:
        """There may be a job: look."""
        self._agenda.plan_now("ready")
        self._relays.wake()

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    @property
    def is_orphaned(self) -> bool:
        """Whether the event loop of its handlers was closed, and nobody has stopped it."""
        return self._loop.is_closed()

    def is_inside(self) -> bool:
        """Whether the caller is a handler or a hook of this outbox."""
        attempt = running.get()
        return isinstance(attempt, Attempt) and attempt.core is self._core

    def would_block_its_loop(self) -> bool:
        """Whether the caller runs on the event loop that the handlers need to end."""
        return self._loop.is_here()

    def begin_stop(self, timeout: float | None = None) -> None:
        """Claim no more, and have the feeder end everything. After ``timeout`` seconds it waits no longer for handlers;
        a later call may make that earlier.
        """
        if timeout is not None:
            deadline = self._clock() + timeout
            self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
        self._stopping = True
        self._relays.begin_stop()
        self._agenda.wake()

    def stop(self, timeout: float | None) -> bool:
        """Claim no more, and wait for the running handlers. After ``timeout`` seconds cancel those that are async, and
        give back the rest. True if nothing was left running. It may be called again, and by several threads.
        """
        self.begin_stop(timeout)
        if self._feeder.ident is None:  # an interrupted start, or one that was refused
            self.abandon()
            self._let_go()
            return True
        is_ended = wait_for(self._ended) if timeout is None else self._ended.wait(timeout + LAST_SECONDS)
        if is_ended:
            self._feeder.join()  # it does nothing more
        return is_ended and self._was_idle

    def check(self) -> None:
        """Raises ``OutboxError`` if there are no tables, or if threads can't share the database."""
        self._own.check()

    def _let_go(self) -> None:
        """Close its own connections."""
        if self._own is not self._store:
            self._own.close()

    def abandon(self) -> None:
        """In a forked child, which has none of the threads, or where none was started."""
        if self._listener is not None:
            self._listener.abandon()

    def _end(self) -> None:
        """The last that the feeder does: wait for the handlers, and end all other threads."""
        self._store.watch(None)
        if self._listener is not None:
            self._listener.stop(LAST_SECONDS / 2)
        self._relays.begin_stop()
        self._give_back_queued()
        is_idle = self._wait_until_idle()
        if not is_idle:
            self._give_up()
        self._writer.end(None if is_idle else LAST_SECONDS / 2)
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads if is_idle else ():
            if thread.ident is not None:
                thread.join()
        self._loop.end(LAST_SECONDS / 4)
        self._relays.end()
        self._let_go()
        if self._loop.given is not None:
            self._store.use_loop(None)
        self._was_idle = is_idle

    def _wait_until_idle(self) -> bool:
        """Wait until all that was claimed is saved, all hooks are called, and the relays' steps are over. False if that
        took too long.
        """
        while self._claimed or self._hooks or self._relays.are_running:
            if self._deadline is not None and self._clock() >= self._deadline:
                return False
            self._pause.wait(0.01)
        return True

    def _give_up(self) -> None:
        """Cancel what is async; give back what can't be."""
        self._loop.cancel(LAST_SECONDS / 3)
        for attempt in self._claimed:
            self._report(attempt, Outcome(attempt, "back"))

    def _slow(self) -> int:
        """How many handlers run for longer than ``slow_after``."""
        now = self._clock()
        return sum(
            now - attempt.started > attempt.consumer.options.slow_after
            for attempt in self._running()
            if attempt.started is not None
        )

    def _running(self) -> list[Attempt]:
        return [attempt for attempt in (*self._busy, *self._loop.attempts()) if attempt is not None]

    # -- the feeder --------------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        try:
            self._writer.start()
            for thread in self._threads:
                thread.start()
            if self._listener is not None:
                self._listener.start()
            self._relays.start_new(self._poll_seconds)
        except BaseException as error:  # there can be no more threads
            self._start_error, self._stopping = error, True
        self._begun.set()
        while not self._stopping:
            try:
                self._turn()
                if self._failures:
                    log.info("the database is back after %s failures", self._failures)
                self._failures = 0
            except BaseException as error:
                self._agenda.rest(self._failed(error))
            else:
                self._agenda.sleep()
        try:
            self._end()
        except BaseException:
            log.exception("the end of a stop failed")
        finally:
            self._ended.set()

    def _failed(self, error: BaseException) -> float:
        """The database failed: how long to wait. What was to be done in this turn is to be done then."""
        if not self._failures:
            log.warning("the database failed; trying again until it works: %s", brief(error))
        self._failures += 1
        pause = pause_after(self._failures)
        for what in ("renewal", "poll", "ready", "retry"):
            self._agenda.plan(what, self._clock() + pause)
        return pause

    def _turn(self) -> None:
        """Do what is due."""
        agenda, now = self._agenda, self._clock()
        self._relays.start_new(self._poll_seconds)
        if agenda.take("renewal", now):
            self._renew(now)
        if agenda.take("slow", now):
            self._look_at_running(now)
        consumers = self._consumers()
        self._take_what_may_be_there(consumers, now)
        if self._retries_wait:
            self._claim_retries(consumers, now)
        if self._more:
            self._claim_ready(consumers, now)
        self._poll(now - LATE_SECONDS if agenda.is_woken else now)  # a job that has come does not wait for what can
        if agenda.take("due", now) and consumers:
            self._look_ahead(consumers)

    def _take_what_may_be_there(self, consumers: Mapping[str, QueueConsumer], now: float) -> None:
        """See to it that claims look for what may be there, and later for what is due next."""
        is_retry, is_ready = self._agenda.take("retry", now), self._agenda.take("ready", now)
        if is_ready:
            self._more.update(consumers)
        self._more.intersection_update(consumers)
        self._retries_wait |= is_retry
        if is_ready or is_retry:
            self._agenda.plan("due", max(now, self._next_look_ahead))

    def _consumers(self) -> dict[str, QueueConsumer]:
        """What is consumed here now."""
        consumed = self._core.queues.consumed()
        return {each.queue: each for each in consumed if self._queues is None or each.queue in self._queues}

    def _room(self) -> tuple[int, int]:
        """How many jobs the workers, and the loop, can be given now. The workers get more when half of what was claimed
        ahead is begun: a claim of a few takes as long as one of many.
        """
        unsaved = len(self._claimed)
        loop_room = ASYNC_AT_ONCE - self._claimed.async_ones
        ahead = self._prefetch.jobs(self._clock(), sum(self._finished))
        self._low = ahead // 2
        free = sum(attempt is None for attempt in self._busy)
        spare = free - self._jobs.qsize()
        room = spare + ahead if -spare <= self._low else 0
        return max(0, min(room, MAX_UNSAVED - unsaved, MAX_CLAIM)), max(0, loop_room)

    def _claim_ready(self, consumers: Mapping[str, QueueConsumer], now: float) -> None:
        """Claim jobs for their first run, for the workers and for the loop."""
        for is_async, room in zip((False, True), self._room(), strict=True):
            wanted = []
            for queue in self._more:
                most = self._most(consumers[queue], room)
                if consumers[queue].is_async is is_async and most > 0:
                    wanted.append((queue, most))
            if wanted:
                self._claim_first_runs(consumers, wanted, room, now)

    def _claim_first_runs(
        self, consumers: Mapping[str, QueueConsumer], wanted: Sequence[tuple[str, int]], room: int, now: float
    ) -> None:
        rows, token = self._claim("ready", wanted, room)
        claimed = claims.claimed_among(rows)
        lanes = claims.lanes_of(rows)
        self._hand_out(consumers, claimed, token, now)  # first: whatever fails, they are known here
        if lanes:
            self._agenda.wake()
            self._own.perform(None, claims.free_lanes, lanes)
        found = Counter(row[QUEUE] for row in claimed)
        if not lanes and len(claimed) < min(room, MAX_CLAIM) and sum(row[BYTES] for row in claimed) < MAX_BYTES:
            self._more -= {queue for queue, most in wanted if found[queue] < most}

    def _most(self, consumer: QueueConsumer, room: int) -> int:
        """How many jobs of a queue can be claimed now."""
        if consumer.options.concurrency is None:
            return room
        return min(room, consumer.options.concurrency - self._claimed.of_queue(consumer.queue))

    def _claim(self, status: str, wanted: Sequence[tuple[str, int]], count: int) -> tuple[Any, int]:
        token = self._core.token()
        claim = Claim(
            worker=self._core.worker, token=token, lease_ms=round(self._core.settings.lease * 1000), jobs=count
        )
        return self._own.perform(None, claims.claim, status, wanted, claim), token

    def _claim_retries(self, consumers: Mapping[str, QueueConsumer], now: float) -> None:
        """Claim jobs in error that are due: one of each queue whose retries stop at a failure."""
        self._retries_wait = False
        for is_async, room in zip((False, True), self._room(), strict=True):
            wanted = []
            for queue, consumer in consumers.items():
                if consumer.is_async is not is_async:
                    continue
                if now < self._retry_from.get(queue, 0.0):
                    self._agenda.plan("retry", self._retry_from[queue])
                    continue
                if consumer.options.stop_at_failure and self._claimed.retries(queue):
                    continue
                most = self._most(consumer, room)
                if most > 0:
                    wanted.append((queue, 1 if consumer.options.stop_at_failure else most))
                else:
                    self._retries_wait = True  # for a job to end
            if not wanted:
                continue
            rows, token = self._claim("error", wanted, room)
            found = Counter(row[QUEUE] for row in rows)
            stopping = {queue for queue, _ in wanted if consumers[queue].options.stop_at_failure}
            if len(rows) >= room or any(found[queue] >= most for queue, most in wanted if queue not in stopping):
                self._retries_wait = True
            self._hand_out(consumers, rows, token, now, is_retry=True)

    def _hand_out(
        self,
        consumers: Mapping[str, QueueConsumer],
        rows: Sequence[Any],
        token: int,
        now: float,
        *,
        is_retry: bool = False,
    ) -> None:
        """Give claimed jobs to the workers and to the loop, in this order."""
        if not rows:
            return
        until = now + self._core.settings.lease
        current = self._consumers()  # a handler that was replaced before the put of a job does not get it
        attempts = []
        for row in rows:
            queue = row[QUEUE]
            attempt = Attempt(self._core, current.get(queue, consumers[queue]), row, token)
            attempt.until, attempt.is_retry = until, is_retry
            attempts.append(attempt)
        for_loop = [each for each in attempts if each.consumer.is_async and each.consumer.queue in current]
        self._claimed.add(attempts)
        for attempt in attempts:
            if attempt.consumer.queue not in current:
                self._report(attempt, Outcome(attempt, "back"))
            elif not attempt.consumer.is_async:
                self._jobs.put(attempt)
        if for_loop:
            self._give_to_loop(for_loop)
        self._agenda.plan("slow", now + look_seconds(attempts))

    def _give_to_loop(self, attempts: Sequence[Attempt]) -> None:
        try:
            self._loop.start(attempts)
        except RuntimeError:
            log.exception("the event loop of astart() was closed without astop(): the outbox stops")
            for attempt in attempts:
                self._report(attempt, Outcome(attempt, "back"))
            self.begin_stop()

    def _renew(self, now: float) -> None:
        """Renew the leases of all that is claimed, but not of what has hung."""
        lease = self._core.settings.lease
        self._agenda.plan("renewal", now + lease / 3)
        attempts = []
        for attempt in self._claimed:
            if self._has_hung(attempt, now):
                self._claimed.release_retry(attempt)
            else:
                attempts.append(attempt)
        if not attempts:
            return
        own = [(attempt.id, attempt.token) for attempt in attempts]
        renewed = self._own.perform(None, claims.renew, own, round(lease * 1000))
        for attempt in attempts:
            if attempt.id in renewed:
                attempt.until = now + lease
            else:
                attempt.is_lost = True

    def _has_hung(self, attempt: Attempt, now: float) -> bool:
        return attempt.started is not None and now - attempt.started > attempt.consumer.options.hung_after

    def _look_at_running(self, now: float) -> None:
        running = self._running()
        log_slow(running, now)
        if self._claimed:
            self._agenda.plan("slow", now + look_seconds(running))

    def _poll(self, now: float) -> None:
        """Look for what no hint was given for: lapsed leases, overlooked dependants, and all else, if due by then."""
        if self._agenda.take("poll", now):
            self._agenda.plan("poll", now + self._poll_seconds)
            for outcome in fail_lapsed(self._core, self._own):
                self._after(outcome)
            self._upkeep.begin_sweep()
            self._agenda.plan("sweep", now)
            self._agenda.plan("ready", now)
            self._agenda.plan("retry", now)
        if self._agenda.take("sweep", now):
            self._tell_of(self._upkeep.sweep_slice(self._agenda, self._clock))
        if self._agenda.take("minute", now):
            self._agenda.plan("minute", now + MINUTE)
            self._agenda.plan("prune", now)
            self._upkeep.begin_pruning()
            self._upkeep.look_at_health()
        if self._agenda.take("prune", now) and self._upkeep.prune_slice():
            self._agenda.plan("prune", now)

    def _tell_of(self, queues: Collection[str]) -> None:
        """Jobs of these became ready. Other processes may have their handlers: if telling them fails, they poll."""
        if not queues:
            return
        self.wake()
        if self._notifies:
            with contextlib.suppress(Exception):
                self._own.perform(None, claims.notify, min(queues))

    def _look_ahead(self, consumers: Mapping[str, QueueConsumer]) -> None:
        """Ask when the next job is due. In busy times that takes a twentieth of the time."""
        now = self._clock()
        time_ms, ready_ms, failed_ms = self._own.perform(None, claims.next_due_ms, list(consumers))
        self._next_look_ahead = self._clock() + max(LOOK_AHEAD_SECONDS, 20 * (self._clock() - now))
        for what, due_ms in (("ready", ready_ms), ("retry", failed_ms)):
            if due_ms is not None:
                self._agenda.plan(what, now + (due_ms - time_ms) / 1000)

    def _give_back_queued(self) -> None:
        """Give back what was claimed and not begun."""
        hooks = []
        with contextlib.suppress(Empty):
            while True:
                item = self._jobs.get_nowait()
                if isinstance(item, Attempt):
                    self._report(item, Outcome(item, "back"))
                else:
                    hooks.append(item)
        for item in hooks:
            self._jobs.put(item)

    # -- workers and the loop ----------------------------------------------------------------------------------------

    def _work(self, number: int) -> None:
        with self._store.apart():
            self._work_apart(number)

    def _work_apart(self, number: int) -> None:
        jobs, busy, finished = self._jobs, self._busy, self._finished
        where = threading.get_ident()
        while True:
            item = jobs.get()
            if item is None:
                return
            if not isinstance(item, Attempt):
                self._run_hook(item)
                continue
            busy[number] = item
            item.where = where
            self._report(item, self._outcome_of(item))
            finished[number] += 1
            busy[number] = None
            if (self._more or self._retries_wait) and jobs.qsize() <= self._low:
                self._agenda.wake()

    def _outcome_of(self, attempt: Attempt) -> Outcome | None:
        """Run a ``def`` handler. ``None`` if somebody else has the job."""
        if attempt.is_lost:
            return None
        if self._stopping:
            return Outcome(attempt, "back")
        try:
            if attempt.consumer.options.transactional:
                return run_within(self._store, attempt, self._clock)
            return attempt.run(self._clock)
        except BaseException as error:
            return unexpected(attempt, error)

    def _report(self, attempt: Attempt, outcome: Outcome | None) -> None:
        """Have an outcome saved. Of an attempt that was given back, what comes later is dropped."""
        if outcome is None:
            self._claimed.forget(attempt)
            self._agenda.wake()
            return
        with self._lock:
            is_first, attempt.is_reported = not attempt.is_reported, True
        if is_first:
            self._writer.put(outcome)
        if attempt.consumer.is_async:  # the workers themselves wake the feeder when they run out
            self._agenda.wake()

    def _run_hook(self, hook: Callable[[], object]) -> None:
        try:
            hook()
        except BaseException:
            log.exception("a hook failed")
        with self._lock:
            self._hooks -= 1

    async def _run_async(self, attempt: Attempt) -> Outcome | None:
        if attempt.is_lost:
            return None
        if self._stopping:
            return Outcome(attempt, "back")
        if attempt.consumer.options.transactional:
            outcome = await arun_within(self._store, attempt, self._clock, self._is_ending)
        else:
            outcome = await attempt.arun(self._clock, self._is_ending)
        if outcome.status == "back" and outcome.delay_ms is None and not self._stopping:
            log.warning("job %s of queue %r was cancelled, and comes again", attempt.id, attempt.consumer.queue)
            outcome.delay_ms = 1000
            self._store.use_loop(None)  # the loop is ending, most likely: what is begun on it now may never end
        return outcome

    def _is_ending(self) -> bool:
        """Whether a task that is cancelled is so by a stop, or by the end of its event loop."""
        task = asyncio.current_task()
        return self._stopping or (task is not None and task.cancelling() > 0)

    # -- what came of them -------------------------------------------------------------------------------------------

    def _finish(self, batch: Sequence[Outcome], saved: set[int]) -> None:
        """After outcomes were saved or refused: forget the jobs, call the hooks, wake the feeder."""
        for outcome in batch:
            if outcome.attempt.id in saved or outcome.is_saved:
                self._after(outcome)
            else:
                self.lost += 1
                log.warning(
                    "job %s of queue %r: its outcome %r came too late, its lease was over",
                    outcome.attempt.id,
                    outcome.attempt.consumer.queue,
                    outcome.status,
                )
            self._claimed.forget(outcome.attempt)
        freed = {queue for outcome in batch for queue in outcome.freed}
        self._tell_of(freed.union(each.attempt.consumer.queue for each in batch if each.is_given_back))
        self._agenda.wake()

    def _after(self, outcome: Outcome) -> None:
        """After an outcome was saved."""
        now = self._clock()
        attempt, agenda = outcome.attempt, self._agenda
        options, queue = attempt.consumer.options, attempt.consumer.queue
        if outcome.status in ("error", "dead"):
            if attempt.is_retry and options.stop_at_failure:
                self._retry_from[queue] = now + self._retry_interval
                agenda.plan("retry", self._retry_from[queue])
            if outcome.status == "error":
                due = now + (outcome.delay_ms or 0) / 1000
                agenda.plan("retry", max(due, self._retry_from.get(queue, 0.0)))
            if options.on_error is not None or options.on_dead is not None:
                self._run_soon(partial(call_hooks, outcome))
        elif attempt.is_retry:
            agenda.plan("retry", now)  # what is no failure goes on at once
        if outcome.status == "back" and outcome.delay_ms is not None:
            agenda.plan("retry" if attempt.is_retry else "ready", now + outcome.delay_ms / 1000)
        if outcome.status != "error" and outcome.lane is not None:
            agenda.plan("ready", now)

    def _run_soon(self, hook: Callable[[], object]) -> None:
        """Have a worker call a hook."""
        with self._lock:
            self._hooks += 1
        self._jobs.put(hook)
