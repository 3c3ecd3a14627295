"""``Runner``: a running outbox. It claims jobs, runs their handlers, and saves what comes of them.

    feeder    claims jobs, renews leases, sweeps, and all else that is due now and then
    workers   run ``def`` handlers, and hooks
    a loop    runs ``async`` handlers: the caller's (``astart``), or one on a thread of its own
    writer    saves the outcomes of all of them, as many as there are, in one transaction; there is no timer
    listener  wakes the feeder when somebody commits a job

Rules:
1. A job that is claimed is in ``_claimed`` until its outcome is saved or refused, and its lease is renewed until then.
2. Nothing that a database, a handler or a hook raises ends a thread.
3. Who stops first sets ``_stopping``; the feeder gives back what no worker has begun. After that only the writer works.

NOTE ON LOCKING: ``_lock`` guards ``_claimed`` and the counts by queue, and is held for a few statements at a time.
Queues between the threads are ``SimpleQueue``.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextvars import Context
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from kestrelpy.outbox import admin, claims, reports
from kestrelpy.outbox._checks import check_count, check_number
from kestrelpy.outbox._logging import log
from kestrelpy.outbox.database import LoopThread
from kestrelpy.outbox.execution import Attempt, Outcome, call_hooks
from kestrelpy.outbox.job import QUEUE
from kestrelpy.outbox.queues import check_name
from kestrelpy.outbox.saving import sweep
from kestrelpy.outbox.sql import MAX_CLAIM, Claim
from kestrelpy.outbox.transactions import arun_within, run_within
from kestrelpy.outbox.wakeup import Listener, listener_for
from kestrelpy.outbox.watch import ErrorWatch
from kestrelpy.outbox.writer import MAX_PAUSE, OutcomeWriter

if TYPE_CHECKING:
    from kestrelpy.outbox.core import OutboxCore
    from kestrelpy.outbox.queues import QueueConsumer
    from kestrelpy.outbox.store import JobStore

__all__ = ["Runner"]

ASYNC_AT_ONCE = 100
"""How many ``async`` handlers run at once in a process, unless their queues' ``concurrency`` says less."""
WINDOW = 0.05
"""Seconds: what was finished within them is claimed ahead."""
MAX_UNSAVED = 3000
MINUTE = 60.0


def make_runner(
    core: OutboxCore,
    loop: asyncio.AbstractEventLoop | None,
    queues: Iterable[str] | None,
    threads: int,
    prefetch: int | None,
    poll_interval: float | None,
    retry_interval: float,
) -> Runner:
    """A runner with the arguments of ``Outbox.start``, checked. Raises ``TypeError``, ``ValueError``."""
    names = None if queues is None else frozenset(map(check_name, [queues] if isinstance(queues, str) else queues))
    return Runner(
        core,
        core.open_store(),
        queues=names,
        threads=check_count("threads", threads, 1),
        prefetch=None if prefetch is None else check_count("prefetch", prefetch),
        poll_interval=None if poll_interval is None else check_number("poll_interval", poll_interval, 0.001),
        retry_interval=check_number("retry_interval", retry_interval, 0.001),
        loop=loop,
    )


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
        self._queues = queues
        self._prefetch = prefetch
        self._poll_interval = poll_interval
        self._retry_interval = retry_interval
        self._clock = core.time.monotonic
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._giving_up = False  # the timeout of the stop is over
        self._jobs: SimpleQueue[Attempt | Outcome | None] = SimpleQueue()
        self._writer = OutcomeWriter(store, self._clock, self._finish)
        self._claimed: dict[int, Attempt] = {}  # guarded by self._lock
        self._by_queue: Counter[str] = Counter()  # guarded by self._lock: of those claimed, by queue
        self._retrying: Counter[str] = Counter()  # guarded by self._lock: of those claimed, the retries
        self._busy: list[Attempt | None] = [None] * threads  # what each worker runs
        self._finished = [0] * threads  # how many jobs each worker has run
        self._async: dict[Attempt, asyncio.Task[None]] = {}  # what runs on the loop; changed there only
        self._async_claimed = 0  # guarded by self._lock
        self._loop = loop
        self._loop_thread: LoopThread | None = None
        self._samples: deque[tuple[float, int]] = deque()
        self._has_more = True  # the last claim took all it wanted
        self._low = 0  # how many jobs are left for the workers when the feeder is woken
        self._retry_from: dict[str, float] = {}  # by queue: the end of the pause after a failure
        self._next_poll = self._next_renewal = self._next_retry = self._next_minute = self._next_look = 0.0
        self._next_due = float("inf")
        self._failures = 0  # of the database, in a row
        self._watch = ErrorWatch()
        self.lost = 0  # outcomes that were refused
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"kestrelpy-outbox-{number}", daemon=True)
            for number in range(threads)
        ]
        self._feeder = threading.Thread(target=self._feed, name="kestrelpy-outbox-feeder", daemon=True)
        self._listener: Listener | None = None

    # -- from outside ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all threads."""
        database = getattr(self._store, "database", None)
        self._listener = None if database is None else listener_for(self._core, database, self.wake)
        if self._poll_interval is None:
            self._poll_interval = 1.0 if self._listener is None else 5.0
        self._core.slow = self._slow
        self._writer.start()
        for thread in (*self._threads, self._feeder):
            thread.start()
        if self._listener is not None:
            self._listener.start()

    def wake(self) -> None:
        """There may be a job: look."""
        self._has_more = True
        self._wake.set()

    def begin_stop(self) -> None:
        """Claim no more."""
        self._stopping = True
        self._wake.set()

    def stop(self, timeout: float | None) -> bool:
        """Claim no more, and wait for the running handlers. After ``timeout`` seconds cancel those that are async, and
        give back the rest. True if nothing was left running.
        """
        self.begin_stop()
        if self._listener is not None:
            self._listener.stop()
        self._feeder.join()
        deadline = None if timeout is None else self._clock() + timeout
        is_done = self._wait_for_running(deadline)
        if not is_done:
            self._give_up()
        self._writer.end(None if is_done else 1.0)
        for _ in self._threads:
            self._jobs.put(None)
        if is_done:
            for thread in self._threads:
                thread.join()
        if self._loop_thread is not None:
            self._loop_thread.close()
        for relay in self._core.relays:
            relay.release()
        return is_done

    def _wait_for_running(self, deadline: float | None) -> bool:
        """Wait until no handler runs. False if that took too long."""
        while any(self._busy) or self._async or self._jobs.qsize():
            if deadline is not None and self._clock() >= deadline:
                return False
            self._wake.wait(0.01)
        return True

    def _give_up(self) -> None:
        """Cancel what is async; give back what can't be."""
        self._giving_up = True
        if self._loop is not None or self._loop_thread is not None:
            loop = self._loop_to_use()
            loop.call_soon_threadsafe(self._cancel)
            for _ in range(50):
                if not self._async:
                    break
                self._wake.wait(0.01)
        for attempt in [*self._busy, *self._async]:
            if attempt is not None:
                attempt.is_lost = True
                self._writer.put(Outcome(attempt, "back"))

    def _cancel(self) -> None:
        for task in self._async.values():
            task.cancel()

    def _slow(self) -> int:
        """How many handlers run for longer than ``slow_after``."""
        now = self._clock()
        return sum(
            now - attempt.started > attempt.consumer.options.slow_after
            for attempt in self._running()
            if attempt.started is not None
        )

    def _running(self) -> list[Attempt]:
        return [attempt for attempt in (*self._busy, *list(self._async)) if attempt is not None]

    # -- the feeder --------------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        while not self._stopping:
            try:
                pause = self._turn()
                if self._failures:
                    log.info("the database is back after %s failures", self._failures)
                self._failures = 0
            except BaseException as error:
                pause = self._failed(error)
            self._wake.wait(max(pause, 0.0))
            self._wake.clear()
        self._give_back_queued()

    def _failed(self, error: BaseException) -> float:
        """The database failed: how long to wait."""
        if not self._failures:
            log.warning("the database failed; trying again until it works: %s", error)
        self._failures += 1
        return float(min(0.02 * 2**self._failures, MAX_PAUSE))

    def _turn(self) -> float:
        """Do what is due. Returns the seconds until something is."""
        now = self._clock()
        if now >= self._next_renewal:
            self._renew(now)
        if now >= self._next_look:
            self._look_at_running(now)
        if now >= self._next_due:
            self._has_more, self._next_due = True, float("inf")
        if now >= self._next_retry:
            self._next_retry = float("inf")
            self._claim_retries(now)
        if self._has_more or now >= self._next_poll:
            self._claim_ready(now)
        if not self._wake.is_set() or now >= self._next_poll + 1.0:  # a job that has come does not wait for what can
            if now >= self._next_poll:
                self._poll(now)
            if now >= self._next_minute:
                self._each_minute(now)
        self._relay()
        next_one: float = min(self._next_renewal, self._next_poll, self._next_due, self._next_retry, self._next_look)
        return next_one - self._clock()

    def _consumers(self) -> list[QueueConsumer]:
        return [
            each
            for each in self._core.queues.all()
            if each.handler is not None and (self._queues is None or each.queue in self._queues)
        ]

    def _room(self) -> tuple[int, int]:
        """How many jobs the workers, and the loop, can be given now."""
        with self._lock:
            unsaved = len(self._claimed)
            loop_room = ASYNC_AT_ONCE - self._async_claimed
        ahead = self._ahead()
        self._low = ahead // 2
        free = sum(attempt is None for attempt in self._busy)
        room = free + ahead - self._jobs.qsize()
        return max(0, min(room, MAX_UNSAVED - unsaved, MAX_CLAIM)), max(0, loop_room)

    def _ahead(self) -> int:
        """How many jobs to claim ahead: as many as were finished in the last 50 ms."""
        if self._prefetch is not None:
            return self._prefetch
        now, total = self._clock(), sum(self._finished)
        self._samples.append((now, total))
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW:
            self._samples.popleft()
        first_time, first_total = self._samples[0]
        passed = max(now - first_time, WINDOW)
        return min(int((total - first_total) * WINDOW / passed), MAX_CLAIM)

    def _claim_ready(self, now: float) -> None:
        """Claim jobs for their first run, if there is room for a good part of them."""
        room, loop_room = self._room()
        wanted = []
        for consumer in self._consumers():
            most = loop_room if consumer.is_async else room
            if consumer.options.concurrency is not None:
                most = min(most, consumer.options.concurrency - self._by_queue[consumer.queue])
            if most > 0:
                wanted.append((consumer.queue, most))
        count = min(max((most for _, most in wanted), default=0) if len(wanted) == 1 else room + loop_room, MAX_CLAIM)
        if not wanted or count < 1:
            return
        rows, token = self._claim("ready", wanted, count)
        claimed = claims.claimed_among(rows)
        lanes = claims.lanes_of(rows)
        if lanes:
            self._store.perform(None, claims.free_lanes, lanes)
        found = Counter(row[QUEUE] for row in claimed)
        self._has_more = len(claimed) >= count or bool(lanes) or any(found[queue] >= most for queue, most in wanted)
        self._hand_out(claimed, token, now)
        if lanes:
            self._wake.set()

    def _claim(self, status: str, wanted: Sequence[tuple[str, int]], count: int) -> tuple[Any, int]:
        token = self._core.token()
        claim = Claim(
            worker=self._core.worker, token=token, lease_ms=round(self._core.settings.lease * 1000), jobs=count
        )
        return self._store.perform(None, claims.claim, status, wanted, claim), token

    def _claim_retries(self, now: float) -> None:
        """Claim jobs in error that are due: one of each queue whose retries stop at a failure."""
        room, loop_room = self._room()
        wanted = []
        for consumer in self._consumers():
            queue = consumer.queue
            if now < self._retry_from.get(queue, 0.0):
                self._next_retry = min(self._next_retry, self._retry_from[queue])
                continue
            most = loop_room if consumer.is_async else max(room, 1)
            if consumer.options.stop_at_failure:
                most = min(most, 1 - self._retrying[queue])
            if consumer.options.concurrency is not None:
                most = min(most, consumer.options.concurrency - self._by_queue[queue])
            if most > 0:
                wanted.append((queue, most))
        if not wanted:
            return
        rows, token = self._claim("error", wanted, min(sum(most for _, most in wanted), MAX_CLAIM))
        self._hand_out(rows, token, now, is_retry=True)

    def _hand_out(self, rows: Sequence[Any], token: int, now: float, *, is_retry: bool = False) -> None:
        """Give claimed jobs to the workers and to the loop."""
        if not rows:
            return
        known = {each.queue: each for each in self._core.queues.all()}
        until = now + self._core.settings.lease
        attempts = []
        for row in sorted(rows, key=lambda row: (row[6], row[20], row[0])):
            attempt = Attempt(self._core, known[row[QUEUE]], row, token)
            attempt.until, attempt.is_retry = until, is_retry
            attempts.append(attempt)
        for_loop = [attempt for attempt in attempts if attempt.consumer.is_async]
        with self._lock:
            for attempt in attempts:
                self._claimed[attempt.id] = attempt
                self._by_queue[attempt.consumer.queue] += 1
                if is_retry:
                    self._retrying[attempt.consumer.queue] += 1
            self._async_claimed += len(for_loop)
        for attempt in attempts:
            if not attempt.consumer.is_async:
                self._jobs.put(attempt)
        if for_loop:
            self._loop_to_use().call_soon_threadsafe(self._spawn, for_loop)

    def _loop_to_use(self) -> asyncio.AbstractEventLoop:
        if self._loop is not None:
            return self._loop
        if self._loop_thread is None:
            self._loop_thread = LoopThread("kestrelpy-outbox-loop")
        return self._loop_thread.loop

    def _renew(self, now: float) -> None:
        """Renew the leases of all that is claimed, but not of what has hung."""
        lease = self._core.settings.lease
        self._next_renewal = now + lease / 3
        with self._lock:
            attempts = [attempt for attempt in self._claimed.values() if not self._has_hung(attempt, now)]
        if not attempts:
            return
        own = [(attempt.id, attempt.token) for attempt in attempts]
        renewed = self._store.perform(None, claims.renew, own, round(lease * 1000))
        for attempt in attempts:
            if attempt.id in renewed:
                attempt.until = now + lease
            else:
                attempt.is_lost = True

    def _has_hung(self, attempt: Attempt, now: float) -> bool:
        return attempt.started is not None and now - attempt.started > attempt.consumer.options.hung_after

    def _look_at_running(self, now: float) -> None:
        """Log the handlers that are slow, each with its stack, once per ``slow_after``."""
        self._next_look = now + 1.0 if self._claimed else float("inf")
        for attempt in self._running():
            slow_after = attempt.consumer.options.slow_after
            if attempt.started is None or now - attempt.started <= slow_after * (attempt.warned + 1):
                continue
            attempt.warned += 1
            log.error(
                "job %s of queue %r runs for %.1f s already:\n%s",
                attempt.id,
                attempt.consumer.queue,
                now - attempt.started,
                _stack_of(attempt),
            )

    def _poll(self, now: float) -> None:
        """Look for what no hint was given for: lapsed leases, overlooked dependants, and what is due next."""
        assert self._poll_interval is not None
        self._next_poll = now + self._poll_interval
        lapses, _ = sweep(self._core)
        for outcome in lapses:
            self._after(outcome)
        names = [consumer.queue for consumer in self._consumers()]
        if not names:
            return
        time_ms, ready_ms, failed_ms = self._store.perform(None, claims.next_due_ms, names)
        if ready_ms is not None:
            self._next_due = now + max(0, ready_ms - time_ms) / 1000
        if failed_ms is not None:
            self._next_retry = min(self._next_retry, now + max(0, failed_ms - time_ms) / 1000)

    def _each_minute(self, now: float) -> None:
        """Delete what was kept long enough, and look at the health."""
        self._next_minute = now + MINUTE
        for queue, statuses, keep_ms in admin.prunable(self._core.queues.all()):
            while not self._stopping:
                if self._store.perform(None, admin.prune, queue, statuses, keep_ms) < admin.SLICE:
                    break
        health = reports.look(self._core)
        change = self._watch.observe(self._core.now_ms(), len(health.reasons))
        settings = self._core.settings
        if change == "error":
            _call(settings.on_system_error, "the outbox is unhealthy: %s", "; ".join(health.reasons))
        elif change == "recovery":
            _call(settings.on_system_recovery, "the outbox is healthy again%s", "")

    def _relay(self) -> None:
        for relay in self._core.relays:
            if relay.step():
                self._wake.set()

    def _give_back_queued(self) -> None:
        """Give back what was claimed and not begun."""
        while True:
            try:
                item = self._jobs.get_nowait()
            except Empty:
                return
            if isinstance(item, Attempt):
                self._writer.put(Outcome(item, "back"))
            elif item is not None:
                call_hooks(item)

    # -- workers and the loop ----------------------------------------------------------------------------------------

    def _work(self, number: int) -> None:
        jobs, busy, finished = self._jobs, self._busy, self._finished
        where = threading.get_ident()
        while True:
            item = jobs.get()
            if item is None:
                return
            if isinstance(item, Outcome):
                call_hooks(item)
                continue
            busy[number] = item
            item.where = where
            if not item.is_lost:
                outcome = Outcome(item, "back") if self._stopping else self._run_one(item)
                if not item.is_lost or outcome.is_saved:
                    self._writer.put(outcome)
                else:
                    self._forget(item)
            else:
                self._forget(item)
            finished[number] += 1
            busy[number] = None
            if self._has_more and jobs.qsize() <= self._low:
                self._wake.set()

    def _run_one(self, attempt: Attempt) -> Outcome:
        if attempt.consumer.options.transactional:
            return run_within(self._store, attempt, self._clock)
        return attempt.run(self._clock)

    def _spawn(self, attempts: Sequence[Attempt]) -> None:
        """Make a task for each, on the loop."""
        loop = asyncio.get_running_loop()
        for attempt in attempts:
            self._async[attempt] = task = loop.create_task(self._run_async(attempt), context=Context())
            attempt.where = task

    async def _run_async(self, attempt: Attempt) -> None:
        try:
            if attempt.is_lost or self._stopping:
                outcome = Outcome(attempt, "back")
            elif attempt.consumer.options.transactional:
                outcome = await arun_within(self._store, attempt, self._clock, self._is_giving_up)
            else:
                outcome = await attempt.arun(self._clock, self._is_giving_up)
        finally:
            self._async.pop(attempt, None)
            with self._lock:
                self._async_claimed -= 1
        self._writer.put(outcome)
        self._wake.set()

    def _is_giving_up(self) -> bool:
        return self._giving_up

    # -- what came of them -------------------------------------------------------------------------------------------

    def _finish(self, batch: Sequence[Outcome], saved: set[int]) -> None:
        """After outcomes were saved or refused: forget the jobs, call the hooks, wake the feeder."""
        for outcome in batch:
            self._forget(outcome.attempt)
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
        self._wake.set()

    def _forget(self, attempt: Attempt) -> None:
        with self._lock:
            if self._claimed.get(attempt.id) is attempt:
                del self._claimed[attempt.id]
                self._by_queue[attempt.consumer.queue] -= 1
                if attempt.is_retry:
                    self._retrying[attempt.consumer.queue] -= 1

    def _after(self, outcome: Outcome) -> None:
        """After an outcome was saved."""
        now = self._clock()
        attempt = outcome.attempt
        options, queue = attempt.consumer.options, attempt.consumer.queue
        if outcome.status in ("error", "dead"):
            if attempt.is_retry and options.stop_at_failure:
                self._retry_from[queue] = now + self._retry_interval
            due = now + (outcome.delay_ms or 0) / 1000 if outcome.status == "error" else now
            self._next_retry = min(self._next_retry, max(due, self._retry_from.get(queue, 0.0)))
            if options.on_error is not None or options.on_dead is not None:
                self._jobs.put(outcome)
        elif outcome.status == "back" and outcome.delay_ms is not None:
            self._next_due = min(self._next_due, now + outcome.delay_ms / 1000)
            self._next_retry = min(self._next_retry, now + outcome.delay_ms / 1000)
        elif attempt.is_retry:
            self._next_retry = now  # a success goes on at once
        if outcome.status != "error" and (outcome.lane is not None or options.concurrency is not None):
            self._has_more = True


def _stack_of(attempt: Attempt) -> str:
    if isinstance(attempt.where, asyncio.Task):
        frames = attempt.where.get_stack(limit=20)
        return "".join(traceback.format_list([f for frame in frames for f in traceback.extract_stack(frame, limit=1)]))
    frame = sys._current_frames().get(attempt.where)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


def _call(hook: Any, message: str, words: str) -> None:
    if hook is None:
        log.log(logging.ERROR if words else logging.INFO, message, words)
        return
    try:
        hook()
    except BaseException:
        log.exception("on_system_error or on_system_recovery failed")
