"""Transactions of puts, marks, claims, sweeps and administration that overlap, statement by statement.

A *scene* is an outbox on the engine of ``Steps``, some jobs, and a few actors; its name says what may go wrong. When
all actors have ended, the jobs that are left are run by the book, with a sweep now and then, and must all come to their
end, each when it may.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import sqlalchemy
from sqlalchemy.exc import IntegrityError, OperationalError

from kestrelpy.outbox import claims
from kestrelpy.outbox.errors import DuplicateJob, UnknownDependency
from kestrelpy.outbox.execution import Attempt, Outcome
from kestrelpy.outbox.outbox import Outbox
from kestrelpy.outbox.saving import save
from kestrelpy.outbox.sql import Claim
from kestrelpy.outbox.sweeping import Sweep, fail_lapsed
from kestrelpy.testing import ManualClock
from tests.outbox.faults.steps import Steps, current

LEASE = 30.0
ENDED = ("done", "dead", "cancelled")


class RolledBack(Exception):
    """The caller changes its mind."""


class Scene:
    """An outbox whose jobs are watched from their claim to their end."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.clock = ManualClock(1_000_000)
        self.counts: Counter[str] = Counter()
        self.choose = random.Random()
        self.outbox = Outbox(steps.engine, clock=self.clock, lease=LEASE, backoff=0.0)
        self.outbox.core.random = lambda: self.choose.random()
        self.outbox.add_consumer("kept", print)
        self.outbox.add_consumer("short", print, keep_done=0)
        self.outbox.create_tables()
        self._stretch_statements()
        self.running: dict[int, Attempt] = {}
        """Jobs that are claimed and whose end is not saved."""
        self.done: set[int] = set()
        """Jobs that were marked done, dead or cancelled, whatever became of them."""
        self.in_order: list[int] = []
        """Jobs that no put overlaps with, in lanes: by their ids they run."""
        self.lanes: dict[int, str | None] = {}

    def _stretch_statements(self) -> None:
        """What is one statement without a transaction gets one in most schedules. Statements that overlap see nothing
        of each other, and nor do these, until their commits, which are steps of their own.
        """
        database: Any = self.outbox.core.open_store().database  # type: ignore[attr-defined]
        run = database.run
        self.stretches = True

        def run_stretched(make: Any, kind: str = "write") -> Any:
            return run(make, "write" if kind == "single" and self.stretches else kind)

        database.run = run_stretched

    # -- between schedules -------------------------------------------------------------------------------------------

    def begin(self, seed: str) -> None:
        """A new schedule, without jobs."""
        self.choose = random.Random(seed)
        self.stretches = self.choose.random() < 0.7
        self.running.clear()
        self.done.clear()
        self.in_order.clear()
        self.lanes.clear()
        with self.steps.engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM kestrel_jobs")

    def forget_dead_rows(self) -> None:
        """PostgreSQL keeps deleted rows until a vacuum."""
        if self.steps.engine.dialect.name == "postgresql":
            with self.steps.engine.begin() as connection:
                connection.exec_driver_sql("TRUNCATE kestrel_jobs")

    def jobs(self) -> dict[int, Any]:
        """All that are committed, seen by somebody else."""
        return {job.id: job for job in self.outbox.jobs(limit=1000)}

    # -- what actors do ----------------------------------------------------------------------------------------------

    def put(self, queue: str, count: int = 1, **options: Any) -> list[int]:
        """Committed at once."""
        with self.outbox.begin() as connection:
            return [job.id for job in self.outbox.put_many(connection, queue, [None] * count, **options)]

    @contextlib.contextmanager
    def transaction(self, *, commits: bool) -> Iterator[sqlalchemy.Connection]:
        """Of a caller."""
        with contextlib.suppress(RolledBack), self.steps.engine.begin() as connection:
            yield connection
            if not commits:
                raise RolledBack

    def claim(self, count: int, status: str = "ready") -> list[Attempt]:
        """As a running outbox claims."""
        core, store = self.outbox.core, self.outbox.core.open_store()
        wanted = Claim(worker=core.worker, token=core.token(), lease_ms=round(LEASE * 1000), jobs=count)
        consumers = {each.queue: each for each in core.queues.all()}
        try:
            rows = store.perform(None, claims.claim, status, [(queue, count) for queue in consumers], wanted)
        except IntegrityError:
            self.counts["claims refused by the index of lanes"] += 1
            return []
        found = [Attempt(core, consumers[row[1]], row, wanted.token) for row in claims.claimed_among(rows)]
        assert len(found) <= count, f"claimed {len(found)} jobs, and not {count} at most"
        for attempt in found:
            self._note_claimed(attempt)
        lanes = claims.lanes_of(rows)
        if lanes:
            store.perform(None, claims.free_lanes, lanes)
        return found

    def _note_claimed(self, attempt: Attempt) -> None:
        assert attempt.id not in self.running, f"job {attempt.id} is claimed twice"
        lane, first = attempt.job().lane, attempt.job().depends_on
        assert first is None or first in self.done, f"job {attempt.id} is claimed before {first} is done"
        others = [other.id for other in self.running.values() if lane is not None and other.job().lane == lane]
        assert not others, f"jobs {attempt.id} and {others} of lane {lane} run at the same time"
        if attempt.id in self.in_order:
            before = [other for other in self.in_order if other < attempt.id and self.lanes[other] == lane]
            assert not set(before) - self.done, f"job {attempt.id} of {lane} is claimed before {before}"
        self.running[attempt.id] = attempt
        self.counts["claimed"] += 1

    def end(self, attempts: list[Attempt], status: str = "done") -> None:
        """Save what came of them, as the writer does it."""
        if attempts:
            actor, ids = current(), {attempt.id for attempt in attempts}
            for attempt in attempts:
                del self.running[attempt.id]  # from now on another one may have it
            if status in ENDED and actor is not None:
                actor.at_commit = lambda: self.done.update(ids)
            elif status in ENDED:
                self.done |= ids
            saved = save(self.outbox.core.open_store(), [Outcome(attempt, status) for attempt in attempts])
            assert saved == ids, "an outcome was refused"
            self.counts["marked"] += len(attempts)

    def sweep(self) -> None:
        fail_lapsed(self.outbox.core, self.outbox.core.open_store())
        Sweep(self.outbox.core.open_store()).all()

    # -- at the end --------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Run what is left until nothing can be claimed, also after a sweep."""
        before = None
        while left := self.left():
            found = self.claim(10) or self.claim(10, "error")
            if found:
                self.end(found)
            elif left == before:
                return
            else:
                before = left
                self.counts["sweeps at the end"] += 1
                self.sweep()

    def left(self) -> list[Any]:
        """The jobs that have not ended."""
        with self.steps.engine.connect() as connection:
            rows = connection.exec_driver_sql("SELECT id, status, held FROM kestrel_jobs ORDER BY id")
            return [tuple(row) for row in rows if row[1] not in ENDED]


# -- the scenes ------------------------------------------------------------------------------------------------------


def marks(scene: Scene) -> None:
    """Puts of dependants overlap with the mark of the other job: none is left waiting, none runs too early."""
    choose, steps = scene.choose, scene.steps
    firsts = scene.put(choose.choice(("kept", "kept", "short")), 2)
    first_keys = scene.put("kept", 1, keys=["first"])
    claimed = scene.claim(choose.choice((2, 3, 3)))
    committed: list[int] = []

    def putter(commits: bool) -> Callable[[], None]:
        def work() -> None:
            made: list[int] = []
            with scene.transaction(commits=commits) as connection:
                for _ in range(choose.choice((1, 1, 2))):
                    first = choose.choice((*firsts, *first_keys, *made))
                    by: Any = ("kept", "first") if [first] == first_keys else first
                    with contextlib.suppress(UnknownDependency):  # it was done and deleted
                        made += _dependants(scene, connection, by)
            if commits:
                committed.extend(made)

        return work

    for number in range(choose.choice((1, 1, 2))):
        steps.add(f"put {number}", putter(choose.random() < 0.85))
    if choose.random() < 0.5:
        steps.add("mark", lambda: scene.end(claimed))
    else:
        for attempt in claimed:
            steps.add(f"mark {attempt.id}", partial(scene.end, [attempt]))
    other = choose.choice(("sweep", "claim", "retry", "cancel", "prune", "nothing"))
    if other == "sweep":
        steps.add("sweep", scene.sweep)
    elif other == "claim":
        steps.add("claim", lambda: scene.end(scene.claim(2)))
    elif other == "prune":
        steps.add("prune", scene.outbox.prune)
    elif other in ("retry", "cancel"):
        target = choose.choice((*firsts, *first_keys))
        steps.add(other, lambda: _by_hand(scene, other, target))
    _run(scene)
    scene.drain()
    for job in scene.jobs().values():
        if job.status == "cancelled":  # what depends on it waits, until it is run after all
            scene.outbox.retry(job.id)
    scene.drain()
    jobs = scene.jobs()
    assert jobs.keys() >= set(committed), "a committed job is gone"
    behind = [job for job in jobs.values() if job.status != "done"]
    assert not behind, f"left behind: {behind}"
    scene.counts["dependants"] += len(committed)


def _dependants(scene: Scene, connection: Any, depends_on: Any) -> list[int]:
    put = scene.outbox.put
    if scene.choose.random() < 0.2:
        return [job.id for job in scene.outbox.put_many(connection, "kept", [1, 2], depends_on=depends_on)]
    return [put(connection, "kept", depends_on=depends_on).id]


def _by_hand(scene: Scene, what: str, job_id: int) -> None:
    with contextlib.suppress(LookupError):
        getattr(scene.outbox, what)(job_id)


def lanes(scene: Scene) -> None:
    """Claims, ends and puts in two lanes: one job of a lane runs at a time, in order, and no lane is left behind."""
    choose, steps = scene.choose, scene.steps
    is_tight = choose.random() < 0.5  # one that is due soon, and one that may pass it until then
    for number in range(2 if is_tight else choose.choice((2, 4, 6))):
        lane = "left" if is_tight else choose.choice(("left", "left", "right"))
        delay = (10, 0)[number] if is_tight else choose.choice((0, 0, 0, 10))
        [made] = scene.put("kept", lane=lane, priority=choose.choice((0, 0, -1)), delay=delay)
        scene.lanes[made] = lane
        if not delay:  # until it is due, others may pass it
            scene.in_order.append(made)
    running = [] if is_tight else scene.claim(choose.choice((0, 1, 3)))

    def consume(first: list[Attempt], pauses: int | None) -> None:
        for attempt in first:
            scene.end([attempt], choose.choice(("done", "done", "error", "back", "dead")))
        if pauses is not None:
            _pass_time(scene, pauses)
        for _ in range(2):
            status = choose.choice(("ready", "ready", "ready", "error"))
            found = scene.claim(choose.choice((1, 2, 5)), status)
            _pause(choose.randrange(3))  # as long as a handler runs
            scene.end(found, choose.choice(("done", "done", "error")))

    for number in range(choose.choice((2, 2, 3))):
        mine, running = running[: 2 - number], running[2 - number :]
        pauses = choose.randrange(3) if is_tight and number == 1 else None
        steps.add(f"consume {number}", partial(consume, mine, pauses))
    other = choose.choice(("put", "put", "sweep", "cancel"))
    if other == "put":
        commits = choose.random() < 0.8
        steps.add("put", lambda: _put_in_lane(scene, choose.choice(("left", "right")), commits=commits))
    elif other == "cancel":
        target = choose.choice(list(scene.lanes))
        scene.in_order = [job_id for job_id in scene.in_order if job_id != target]
        steps.add(other, lambda: _by_hand(scene, other, target))
    else:
        steps.add(other, scene.sweep)
    if not is_tight:
        steps.add("time", partial(_pass_time, scene, choose.randrange(12)))
    _run(scene)
    assert not scene.running
    scene.drain()
    behind = [job for job in scene.jobs().values() if job.status not in ENDED]
    assert not behind, f"left behind: {behind}"


def _pass_time(scene: Scene, pauses: int) -> None:
    _pause(pauses)
    scene.clock.advance(10)


def _pause(count: int) -> None:
    actor = current()
    assert actor is not None
    for _ in range(count):
        actor.pause()


def _put_in_lane(scene: Scene, lane: str, *, commits: bool) -> None:
    with scene.transaction(commits=commits) as connection:
        scene.outbox.put(connection, "kept", lane=lane)


def keys(scene: Scene) -> None:
    """Puts with the same keys, and marks that delete: a transaction is never made unusable, a key is there once."""
    choose, steps = scene.choose, scene.steps
    queue = choose.choice(("kept", "short"))
    if choose.random() < 0.6:
        scene.put(queue, keys=["a"])
    claimed = scene.claim(1) if choose.random() < 0.7 else []
    written: dict[str, bool] = {}

    def put(tag: str, commits: bool) -> None:
        with scene.transaction(commits=commits) as connection:
            for number in range(choose.choice((1, 1, 2))):
                name = f"{tag}.{number}"
                try:
                    _put_with_keys(scene, connection, queue, name)
                    written[name] = commits
                except DuplicateJob:
                    written[name] = False
                connection.exec_driver_sql("SELECT count(*) FROM kestrel_jobs")

    for number in range(choose.choice((2, 2, 3))):
        steps.add(f"put {number}", partial(put, f"{number}", choose.random() < 0.8))
    if claimed:
        steps.add("mark", lambda: scene.end(claimed))
    steps.add("claim", lambda: scene.end(scene.claim(3)))
    try:
        _run(scene)
    except OperationalError as error:  # two puts of two keys each, crosswise
        if "deadlock" not in str(error) and "locked" not in str(error):
            raise
        scene.counts["deadlocks of callers"] += 1
    there = [(job.queue, job.key) for job in scene.jobs().values() if job.key is not None]
    assert len(set(there)) == len(there)
    refused = [job for job in scene.jobs().values() if job.payload in written and not written[job.payload]]
    assert not refused, f"written by a put that was refused, or rolled back: {refused}"
    scene.drain()
    assert not scene.left()


def _put_with_keys(scene: Scene, connection: Any, queue: str, name: str) -> None:
    choose, outbox = scene.choose, scene.outbox
    how = choose.choice(("raise", "return", "replace"))
    if choose.random() < 0.3:
        wanted = choose.sample(["a", "b", None], 3)
        made = outbox.put_many(connection, queue, [name] * 3, keys=wanted, if_exists=how)
        assert [job.key for job in made] == wanted
        assert [job.payload == name for job in made] == [job.is_new or how == "replace" for job in made]
    else:
        job = outbox.put(connection, queue, name, key=choose.choice(("a", "a", "b")), if_exists=how)
        assert job.is_new or how != "raise"


def leases(scene: Scene) -> None:
    """A lease is over, and the owner comes back: one outcome for each claim, the owner's or the sweep's."""
    choose, steps, core = scene.choose, scene.steps, scene.outbox.core
    scene.put(choose.choice(("kept", "short")), 3)
    owned = scene.claim(3)
    scene.running.clear()
    scene.clock.advance(LEASE + choose.choice((-1, 0, 1)))
    accepted: Counter[int] = Counter()

    def finish(status: str) -> None:
        renewed: set[int] = set()
        if choose.random() < 0.5:
            renewed = core.open_store().perform(None, claims.renew, [(each.id, each.token) for each in owned], 30_000)
        saved = save(core.open_store(), [Outcome(attempt, status) for attempt in owned])
        assert renewed <= saved, f"renewed and then refused: {renewed - saved}"
        accepted.update(saved)
        scene.done |= saved if status == "done" else set()

    def look() -> None:
        accepted.update(outcome.attempt.id for outcome in fail_lapsed(core, core.open_store()))

    def consume() -> None:
        for status in ("ready", "error"):
            found = scene.claim(2, status)
            early = {attempt.id for attempt in found} & scene.done
            assert not early, f"run again though their outcome was accepted: {early}"
            scene.end(found)

    steps.add("finish", lambda: finish(choose.choice(("done", "done", "error", "back"))))
    for number in range(2):
        steps.add(f"sweep {number}", look)
    steps.add("consume", consume)
    _run(scene)
    assert all(count == 1 for count in accepted.values()), f"outcomes accepted twice: {accepted}"
    scene.clock.advance(2 * LEASE)
    scene.drain()
    assert not scene.left()


def _run(scene: Scene) -> None:
    scene.steps.run(scene.choose)


SCENES: dict[str, Callable[[Scene], None]] = {"marks": marks, "lanes": lanes, "keys": keys, "leases": leases}


def run(url: str, name: str, seed: int, count: int) -> Counter[str]:
    """So many schedules of a scene. Raises ``AssertionError`` with the one that has failed."""
    steps = Steps(url)
    scene = Scene(steps)
    orders: set[tuple[str, ...]] = set()
    try:
        for number in range(count):
            scene.begin(f"{seed} {name} {number}")
            if number % 100 == 99:
                scene.forget_dead_rows()
            try:
                SCENES[name](scene)
            except Exception as error:
                raise AssertionError(f"{name}, seed {seed}, schedule {number}, {steps.taken}: {error!r}") from error
            orders.add(tuple(steps.taken))
    finally:
        steps.close()
    scene.counts["schedules"] += count
    scene.counts["different orders"] += len(orders)
    return scene.counts
