"""A test kit: the outbox of an application without threads, and without time passing.

Inside ``virtual(outbox)`` the very outbox of the application works on a fresh SQLite in memory. A test says what runs
when. A program:

>>> from sqlalchemy import text
>>> from kestrelpy.outbox import Outbox
>>> outbox = Outbox()  # the program calls outbox.bind(engine) when it starts; a test needs no other database
>>> sent = []

>>> @outbox.consumer("mail", max_retries=2)
... def send_mail(payload):
...     if payload["to"].endswith(".invalid"):
...         raise ConnectionError("no such host")
...     sent.append(payload["to"])

>>> def place_order(connection, number, customer):
...     connection.execute(text("INSERT INTO orders VALUES (:number)"), {"number": number})
...     outbox.put(connection, "mail", {"to": customer, "order": number}, key=f"order-{number}")

And its tests:

>>> from kestrelpy.outbox.testing import ANY, virtual
>>> def test_an_order_is_confirmed_once():
...     with virtual(outbox) as test:
...         with test.begin() as connection:
...             connection.execute(text("CREATE TABLE orders (number INTEGER PRIMARY KEY)"))
...             place_order(connection, 1, "ann@example.org")
...         test.assert_put("mail", {"to": "ann@example.org", "order": ANY}, key="order-1")
...         test.consume("mail")
...         assert sent == ["ann@example.org"]
...         assert test.run_due() == []

>>> def test_a_mail_that_can_not_be_sent_is_given_up():
...     with virtual(outbox) as test:
...         test.put("mail", {"to": "bob@nowhere.invalid"})
...         error = test.consume("mail", expect="error")
...         assert isinstance(error, ConnectionError)
...         assert [run.job.status for run in test.drain()] == ["error", "dead"]
...         assert test.clock.monotonic() == 15.0  # the second try came after 5 seconds, the third after 10 more

>>> test_an_order_is_confirmed_once()
>>> test_a_mail_that_can_not_be_sent_is_given_up()

With pytest, ``test = virtual_outbox(outbox)`` does the same: a fixture, which cleans up at the end of the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Container, Iterable, Sequence
from contextvars import Context, copy_context
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any
from unittest.mock import ANY

from kestrelpy._value import Value
from kestrelpy.outbox import admin, claims
from kestrelpy.outbox._checks import check_count, check_number
from kestrelpy.outbox.errors import JobNotFound, OutboxError
from kestrelpy.outbox.execution import Attempt, Outcome, call_hooks
from kestrelpy.outbox.flavours import WAS_DUE
from kestrelpy.outbox.job import FIELDS, QUEUE, Job
from kestrelpy.outbox.journal_store import JournalStore
from kestrelpy.outbox.journal_virtual import JournalVirtual
from kestrelpy.outbox.outbox import Outbox
from kestrelpy.outbox.saving import save
from kestrelpy.outbox.sql import Claim
from kestrelpy.outbox.store import DatabaseStore
from kestrelpy.outbox.sweeping import Sweep, fail_lapsed
from kestrelpy.outbox.transactions import arun_within, run_within
from kestrelpy.outbox.virtual_operations import NAMES, claim_again, next_later_ms, with_due_errors
from kestrelpy.testing import ManualClock
from kestrelpy.work import WorkQueue

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from kestrelpy.outbox.core import OutboxCore, Relaying
    from kestrelpy.outbox.store import JobStore

__all__ = ["ANY", "Run", "StillWaiting", "VirtualOutbox", "virtual"]

Queue = str | Callable[..., Any]
"""A name, or the function that consumes the queue."""

WORKER = "virtual"
RETRY_MS = 1000
"""Between two passes over the jobs of a queue in error: what ``start`` has by default."""
SHOWN = 20
"""How many jobs an error lists."""
LONGEST = 200
"""Characters of a payload, or of an error, in such a list."""
ALL = 1 << 62
NO_TOKEN = -1
"""No claim has it."""

_FIELDS = {*FIELDS, "is_new"}
"""What ``contains`` may be asked for, beside the payload."""


class StillWaiting(AssertionError):
    """The jobs of a queue wait for others; ``depends_on`` is the one that the first of them waits for."""

    def __init__(self, message: str, depends_on: Job) -> None:
        super().__init__(message)
        self.depends_on = depends_on


class Run(Value):
    """What came of a job that was run: ``job`` as it is afterwards, the ``value`` that the handler returned, and the
    ``exception`` that it raised, if any.
    """

    job: Job
    value: Any = None
    exception: BaseException | None = None


def virtual(outbox: Outbox, bind: Any = None, *, now_ms: int = 0) -> VirtualOutbox:
    """For ``with virtual(outbox) as test:``. Within the block ``outbox`` works on ``bind``, and nothing runs by itself.

    ``bind``: what ``Outbox`` takes, its tables are created if there are none; ``None``: a fresh SQLite in memory, or
    for an outbox on a ``WorkQueue`` a fresh work queue in memory; the class ``WorkQueue`` asks for that, too, for an
    outbox that the program binds later. ``now_ms``: where its clock stands at first, a ``ManualClock``, which decides
    what is due on PostgreSQL, too. The same calls give the same ids, times and order. ``start``, ``stop``, ``running``,
    ``run``, ``bind`` and ``close`` of the outbox do nothing. No thread is made; with an AsyncEngine, one that speaks
    with the database.

    SQLite in memory has a single connection: what is done on it without ``connection=`` while it is in a transaction
    becomes part of that transaction.

    After the block everything is as before, also the consumers: import the modules that register yours before it.
    Entering raises ``OutboxError`` for an outbox that is virtual, running or closed, and what ``Outbox`` raises.
    """
    return VirtualOutbox(outbox, bind, ManualClock(now_ms))


class VirtualOutbox:
    """The outbox of an application under the control of a test: ``virtual`` gives it. Not thread-safe.

    ``clock``: the ``ManualClock`` that decides what is due: ``test.clock.advance(60)``. A ``queue`` is a name, or the
    function that consumes it. What is called here raises ``OutboxError`` outside of the block.
    """

    def __init__(self, outbox: Outbox, bind: Any, clock: ManualClock) -> None:
        self.clock = clock
        self._outbox = outbox
        self._bind = bind
        self._inside: contextlib.ExitStack | None = None
        self._last: dict[str, Attempt] = {}  # by queue: what was run last
        self._loses_mark = False

    def __enter__(self) -> VirtualOutbox:
        if self._inside is not None:
            return self
        core = self._outbox.core
        if core.is_virtual:
            raise OutboxError(f"{self._outbox!r} is virtual already: leave the first virtual(outbox) before the second")
        if core.started_ms is not None:
            raise OutboxError(f"{self._outbox!r} is running: stop() it before virtual(outbox)")
        before = core.store
        is_journal = self._bind is WorkQueue or (self._bind is None and isinstance(before, JournalStore))
        with contextlib.ExitStack() as stack:
            stack.callback(core.switch(self.clock, _random(), WORKER))
            core.store = self._in_memory(before, stack) if is_journal else self._opened(stack)
            core.check_supported(core.store)
            self._outbox.create_tables()
            self._inside = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.close()

    def _in_memory(self, before: JobStore | None, stack: contextlib.ExitStack) -> JobStore:
        """Without a database: a work queue with the clock of the test, and the limit of the one before."""
        limit: dict[str, Any] = {"max_job_bytes": before.max_job_bytes} if isinstance(before, JournalStore) else {}
        queue = stack.enter_context(WorkQueue(None, clock=self.clock, **limit))
        store = JournalStore(self._core, queue)
        store.extend(JournalVirtual)
        stack.callback(store.close)
        return store

    def _opened(self, stack: contextlib.ExitStack) -> DatabaseStore:
        if isinstance(self._bind, WorkQueue):
            raise OutboxError("virtual(bind=): a WorkQueue has a clock of its own: pass the class, or leave bind away")
        compilers = self._core.compilers
        from kestrelpy.outbox.database import open_database
        from kestrelpy.outbox.virtual_database import VirtualDatabase, in_memory

        bind = self._bind
        if bind is None:
            bind = in_memory(self._core.schema)
            stack.callback(bind.dispose)
        database = VirtualDatabase(open_database(bind, compilers), compilers)
        stack.callback(database.close)
        stack.enter_context(database.watched())
        return DatabaseStore(compilers, database)

    def __repr__(self) -> str:
        return f"<VirtualOutbox of {self._outbox!r}{'' if self._inside is not None else ' (outside of its block)'}>"

    # -- putting -----------------------------------------------------------------------------------------------------

    def begin(self) -> AbstractContextManager[Any]:
        """``begin`` of the outbox: a transaction on the test's database, committed at the end of the block."""
        self._store()
        return self._outbox.begin()

    def put(self, queue: Queue, payload: Any = None, **options: Any) -> Job:
        """``put`` of the outbox, in a transaction of its own."""
        store = self._store()
        if not isinstance(store, DatabaseStore):
            return self._outbox.put(None, queue, payload, **options)
        context = copy_context()  # whose variables go with the job, also where another thread speaks with the database
        return store.database.transact(
            lambda connection: context.run(self._outbox.put, connection, queue, payload, **options)
        )

    # -- running one job ---------------------------------------------------------------------------------------------

    def consume(self, queue: Queue, expect: str = "done") -> Any:
        """Run the next due job of ``queue``, a first run before a retry, and assert its new status.

        Returns what the handler returned; for a status other than ``"done"``, the exception that it raised. Raises
        ``AssertionError`` for another status, and if no job is due: ``StillWaiting`` if all of them wait for others.
        """
        __tracebackhide__ = True
        _check_status(expect)
        return self._expected(self._run(self._take_due(queue)), expect)

    async def aconsume(self, queue: Queue, expect: str = "done") -> Any:
        """``consume`` on the running event loop, for ``async`` handlers."""
        __tracebackhide__ = True
        _check_status(expect)
        attempt = self._take_due(queue)
        if not attempt.consumer.is_async:
            return self._expected(self._run(attempt), expect)
        task = asyncio.get_running_loop().create_task(self._handle(attempt), context=Context())
        return self._expected(self._settle(attempt, await task), expect)

    def force_retry(self, queue: Queue) -> Any:
        """Run the job of ``queue`` that was run last once more, as if its mark had been lost: its handler must bear
        that. Asserts that it is done, and returns what the handler returned.
        """
        __tracebackhide__ = True
        name = self._consumed(queue)
        if name not in self._last:
            raise AssertionError(f"no job of queue {name!r} was run yet")
        last = self._last[name]
        wanted = self._claim_of_one()
        row = self._store().perform(None, claim_again, last.row, wanted)
        return self._expected(self._run(Attempt(self._core, last.consumer, row, wanted.token)), "done")

    def run_once(self, queue: Queue, status: str = "ready") -> Run | None:
        """Run the next due job of ``queue`` that is ``"ready"``, or in ``"error"``; ``None`` if there is none."""
        if status not in ("ready", "error"):
            raise ValueError(f"status must be 'ready' or 'error', not {status!r}")
        attempt = self._claim(status, [self._consumed(queue)])
        return None if attempt is None else self._run(attempt)

    def take(self, queue: Queue) -> Job | None:
        """Claim the next due job of ``queue``, whose process then dies: it stays running until its lease is over, and
        a sweep finds it. ``None`` if no job is due.
        """
        names = [self._consumed(queue)]
        attempt = self._claim("ready", names) or self._claim("error", names)
        return None if attempt is None else self._now(attempt, "running")

    def lose_mark(self) -> None:
        """Do not save the outcome of the next job that runs: ``consume(queue, expect="running")``.

        What a ``transactional`` handler wrote is lost with it.
        """
        self._loses_mark = True

    # -- running what is due -----------------------------------------------------------------------------------------

    def sweep(self) -> list[Job]:
        """Find leases that are over, and jobs that still wait for one that is done, as a running outbox does.

        Returns the jobs that it changed, as they are afterwards.
        """
        self._store()
        lapses = fail_lapsed(self._core, self._store())
        freed = Sweep(self._store()).all()
        for outcome in lapses:
            call_hooks(outcome)
        changed = [self._now(outcome.attempt, outcome.status) for outcome in lapses]
        return changed + [self._core.job(row) for row in freed]

    def run_due(self, queue: Queue | None = None) -> list[Run]:
        """Sweep, then run all that is due (of ``queue``), first runs first, also what the handlers put meanwhile.

        It is one pass: each job runs once, and of a queue with ``stop_at_failure`` no retry follows one that fails.
        """
        runs, _ = self._pass(self._names(queue))
        return runs

    def drain(self, queue: Queue | None = None, max_seconds: float | None = None) -> list[Run]:
        """``run_due`` until nothing is left to come, the clock advanced to each next due time.

        Leases of jobs that were taken end, too. ``max_seconds``: how long at most by the clock, for jobs that come for
        ever: if more is to come, the clock stands there. Retries held by ``stop_at_failure`` go on after a second.
        """
        most_ms = None if max_seconds is None else round(check_number("max_seconds", max_seconds) * 1000)
        names = self._names(queue)
        began_ms = self._core.now_ms()
        runs: list[Run] = []
        while True:
            found, held = self._pass(names)
            runs += found
            now_ms = self._core.now_ms()
            later_ms = self._store().perform(None, next_later_ms, names)
            times = [now_ms + RETRY_MS] * bool(held) + ([] if later_ms is None else [later_ms])
            next_ms = min(times, default=None)
            if next_ms is None:
                return runs
            if most_ms is not None and next_ms > began_ms + most_ms:
                self.clock.advance(max(began_ms + most_ms - now_ms, 0) / 1000)
                return runs
            self.clock.advance((next_ms - now_ms) / 1000)

    def relay(self, queue: str, directory: str | PathLike[str] | None = None) -> int:
        """Move all jobs of ``queue`` that are due, as its relay does it. Returns how many.

        ``directory``: a real folder, instead of the one that ``add_relay`` was given. Jobs whose items can't be made
        are in error, or dead. Nothing else here touches the jobs of a relay. Raises what the folder raises, and
        ``OutboxError`` if the queue has no relay.
        """
        name = self._name(queue)
        found = self._relay_of(name)
        if found is None:
            raise OutboxError(f"queue {name!r} has no relay")
        relay, count = found.twin(self._store(), directory), 0
        try:
            while True:
                moved = relay.step()
                count += moved
                if not moved and relay.idle_seconds is not None:
                    return count
        finally:
            relay.release()

    def _relay_of(self, name: str) -> Relaying | None:
        return next((each for each in self._core.relays if each.queue == name), None)

    # -- looking -----------------------------------------------------------------------------------------------------

    def jobs(self, queue: Queue | None = None, status: str | None = None) -> list[Job]:
        """All jobs, or those of ``queue``, or in ``status``, by id."""
        self._store()
        return self._outbox.jobs(None if queue is None else self._name(queue), status=status, limit=ALL)

    def contains(self, queue: Queue, payload: Any = ANY, **fields: Any) -> bool:
        """Whether ``queue`` has a job with this payload, and with these attributes of ``Job``.

        ``ANY`` is equal to everything, also within a payload.
        """
        return bool(self._matching(queue, payload, fields))

    def assert_put(self, queue: Queue, payload: Any = ANY, count: int | None = None, **fields: Any) -> None:
        """Assert that ``queue`` has such jobs (see ``contains``): exactly ``count``, or at least one."""
        __tracebackhide__ = True
        found = len(self._matching(queue, payload, fields))
        if (count is None and found) or (count is not None and found == check_count("count", count)):
            return
        wanted = [f"{name}={value!r}" for name, value in fields.items()]
        if payload is not ANY:
            wanted.insert(0, f"payload {payload!r}")
        name = self._name(queue)
        raise AssertionError(
            f"queue {name!r} has {found or 'no'} job{'s' * (found > 1)}{' with ' * bool(wanted)}{', '.join(wanted)}, "
            f"not {'one' if count is None else count}:\n{self._listed(self.jobs(queue) or self.jobs())}"
        )

    def _matching(self, queue: Queue, payload: Any, fields: dict[str, Any]) -> list[Job]:
        unknown = sorted(fields.keys() - _FIELDS)
        if unknown:
            raise TypeError(f"a job has no {unknown[0]!r}: give some of {', '.join(sorted(_FIELDS))}")
        wanted = {name: value.id if isinstance(value, Job) else value for name, value in fields.items()}
        return [
            job
            for job in self.jobs(queue)
            if all(getattr(job, name) == value for name, value in wanted.items()) and _has_payload(job, payload)
        ]

    # -- the same as a running outbox --------------------------------------------------------------------------------

    @property
    def _core(self) -> OutboxCore:
        return self._outbox.core

    def _store(self) -> JobStore:
        if self._inside is None:
            raise OutboxError(f"{self!r} works within its block: with virtual(outbox) as test")
        return self._core.open_store()

    def _name(self, queue: Queue) -> str:
        """Raises ``UnknownQueue``: a name with a slip of the pen has no jobs, and must not pass for that."""
        self._store()
        return self._core.queues.find(queue).queue

    def _consumed(self, queue: Queue) -> str:
        name = self._name(queue)
        if self._relay_of(name) is not None:
            raise OutboxError(f"queue {name!r} has a relay, and no handler: use test.relay({name!r})")
        if self._core.queues.find(name).handler is None:
            raise OutboxError(f"queue {name!r} is only declared in this process: nothing here runs its jobs")
        return name

    def _names(self, queue: Queue | None) -> list[str]:
        if queue is not None:
            return [self._consumed(queue)]
        self._store()
        return [each.queue for each in self._core.queues.consumed()]

    def _claim_of_one(self) -> Claim:
        core = self._core
        lease_ms = round(core.settings.lease * 1000)
        return Claim(worker=core.worker, token=core.token(), lease_ms=lease_ms, jobs=1)

    def _claim(self, status: str, names: Iterable[str]) -> Attempt | None:
        """Claim the most urgent job, as the feeder of a running outbox does it."""
        store = self._store()
        wanted_queues = [(name, 1) for name in names]
        while True:
            wanted = self._claim_of_one()
            rows = store.perform(None, claims.claim, status, wanted_queues, wanted)
            lanes = claims.lanes_of(rows)
            if lanes:
                store.perform(None, claims.free_lanes, lanes)
            for row in claims.claimed_among(rows):
                attempt = Attempt(self._core, self._core.queues.find(row[QUEUE]), row, wanted.token)
                attempt.is_retry = status == "error"
                return attempt
            if not lanes:
                return None

    def _take_due(self, queue: Queue) -> Attempt:
        __tracebackhide__ = True
        names = [self._consumed(queue)]
        attempt = self._claim("ready", names) or self._claim("error", names)
        if attempt is None:
            raise self._nothing_due(names[0])
        return attempt

    def _nothing_due(self, name: str) -> AssertionError:
        jobs = self.jobs(name)
        alive = [job for job in jobs if job.status in ("ready", "waiting", "running", "error")]
        listed = self._listed(jobs or self.jobs())
        if alive and all(job.status == "waiting" for job in alive):
            with contextlib.suppress(JobNotFound):
                other = self._outbox.get(alive[0].depends_on or 0)
                return StillWaiting(
                    f"the jobs of queue {name!r} wait, the first of them for {other!r}:\n{listed}", other
                )
        is_due = any(job.status in ("ready", "error") and job.due_ms <= self._core.now_ms() for job in alive)
        hint = ", or none can run: it is paused, or another one of the lane comes first" if is_due else ""
        return AssertionError(f"no job of queue {name!r} is due{hint}:\n{listed}")

    def _run(self, attempt: Attempt) -> Run:
        """Run a claimed job in this thread, and save what comes of it."""
        return self._settle(attempt, self._outcome(attempt))

    def _outcome(self, attempt: Attempt) -> Outcome:
        if not attempt.consumer.is_async:
            self._before(attempt)
            if attempt.consumer.options.transactional:
                return run_within(self._store(), attempt, self.clock.monotonic)
            return attempt.run(self.clock.monotonic)
        if _is_on_loop():
            save(self._store(), [Outcome(attempt, "back")])
            raise OutboxError(
                f"the handler of queue {attempt.consumer.queue!r} is async, and an event loop is running here: "
                "use await test.aconsume(queue), or await asyncio.to_thread(test.run_due)"
            )
        with asyncio.Runner() as runner:
            return runner.run(self._handle_on_own_loop(attempt), context=Context())

    async def _handle_on_own_loop(self, attempt: Attempt) -> Outcome:
        async with self._store().on_this_loop():
            return await self._handle(attempt)

    async def _handle(self, attempt: Attempt) -> Outcome:
        """Call an ``async`` handler, in a task whose context is empty. If that is cancelled, the job is given back."""
        task = asyncio.current_task()
        assert task is not None

        def is_cancelled() -> bool:
            return task.cancelling() > 0

        self._before(attempt)
        if attempt.consumer.options.transactional:
            outcome = await arun_within(self._store(), attempt, self.clock.monotonic, is_cancelled)
        else:
            outcome = await attempt.arun(self.clock.monotonic, is_cancelled)
        if is_cancelled():
            save(self._store(), [outcome])
            raise asyncio.CancelledError
        return outcome

    def _before(self, attempt: Attempt) -> None:
        self._last[attempt.consumer.queue] = attempt
        if self._loses_mark:
            self._loses_mark = False
            attempt.token = NO_TOKEN

    def _settle(self, attempt: Attempt, outcome: Outcome) -> Run:
        """Save an outcome, and call the hooks."""
        if isinstance(outcome.exception, KeyboardInterrupt):
            raise outcome.exception
        if attempt.id in save(self._store(), [outcome]):
            call_hooks(outcome)
        return Run(self._now(attempt, outcome.status), attempt.value, outcome.exception)

    def _now(self, attempt: Attempt, status: str) -> Job:
        """The job as it is; one that was deleted with its mark, as it would be."""
        try:
            return self._outbox.get(attempt.id)
        except JobNotFound:
            fields = dict(zip(NAMES, attempt.row, strict=False))
            fields.update(status=status, due_ms=attempt.row[WAS_DUE], finished_ms=self._core.now_ms())
            return self._core.job(tuple(fields.values()))

    def _expected(self, run: Run, expect: str) -> Any:
        __tracebackhide__ = True
        if run.job.status == expect:
            return run.value if expect == "done" else run.exception
        job = run.job
        raised = "" if run.exception is None else f"; its handler raised {run.exception!r}"
        raise AssertionError(
            f"job {job.id} of queue {job.queue!r} is {job.status!r} after its run, not {expect!r}{raised}:\n"
            f"{self._listed([job])}"
        ) from run.exception

    def _pass(self, names: Sequence[str]) -> tuple[list[Run], list[str]]:
        """A sweep, and one pass. Returns the runs, and the queues that have more to run at the next pass."""
        self.sweep()
        runs: list[Run] = []
        ran: set[int] = set()
        stopped: set[str] = set()
        aside: list[Outcome] = []  # they are due again, and stay claimed, so that others are found
        try:
            while True:
                attempt = self._claim("ready", names) or self._claim("error", _without(names, stopped))
                if attempt is None:
                    break
                if attempt.id in ran:
                    aside.append(Outcome(attempt, "back"))
                    continue
                ran.add(attempt.id)
                outcome = self._outcome(attempt)
                runs.append(self._settle(attempt, outcome))
                options = attempt.consumer.options
                if attempt.is_retry and options.stop_at_failure and outcome.status in ("error", "dead"):
                    stopped.add(attempt.consumer.queue)
        finally:
            save(self._store(), aside)
        held = self._store().perform(None, with_due_errors, sorted(stopped))
        return runs, sorted({*held, *(outcome.attempt.consumer.queue for outcome in aside)})

    def _listed(self, jobs: Sequence[Job]) -> str:
        """The jobs, for the text of an error."""
        lines = [_line_of(job, self._core.now_ms()) for job in jobs[:SHOWN]]
        if len(jobs) > SHOWN:
            lines.append(f"and {len(jobs) - SHOWN} more")
        return "\n".join(f"  {line}" for line in lines or ["there are no jobs"])


def _check_status(status: str) -> None:
    if status not in admin.STATUSES:
        raise ValueError(f"expect must be one of {', '.join(admin.STATUSES)}, not {status!r}")


def _has_payload(job: Job, payload: Any) -> bool:
    if payload is ANY:
        return True
    try:
        return bool(job.payload == payload)
    except Exception:  # of a codec, or a __eq__, of the user's
        return False


def _line_of(job: Job, now_ms: int) -> str:
    """A job, in a line."""
    told = [f"job {job.id} of {job.queue}: {job.status}"]
    if job.status in ("ready", "error", "running"):
        what = "lease over" if job.status == "running" else "due"
        told.append(f"{what} now" if job.due_ms <= now_ms else f"{what} in {(job.due_ms - now_ms) / 1000:g} s")
    if job.depends_on is not None:
        told.append(f"depends_on={job.depends_on}")
    told.append(f"tries={job.tries}")
    told += [f"{name}={getattr(job, name)!r}" for name in ("key", "group", "lane") if getattr(job, name) is not None]
    if job.priority:
        told.append(f"priority={job.priority}")
    try:
        payload = repr(job.payload)
    except Exception as error:
        payload = f"unreadable, {error!r}"
    told.append(f"payload {payload if len(payload) <= LONGEST else payload[:LONGEST] + '...'}")
    if job.error:
        told.append(job.error.strip().rpartition("\n")[2][:LONGEST])
    return ", ".join(told)


def _without(names: Sequence[str], others: Container[str]) -> list[str]:
    return [name for name in names if name not in others]


def _is_on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _random() -> Callable[[], float]:
    """A half, which is no jitter, and then the next numbers there are: each token is new, no millisecond is added."""
    numbers = itertools.count(1 << 52)
    return lambda: next(numbers) / (1 << 53)
