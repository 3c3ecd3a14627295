"""An explorer of the crash states of a work queue: seeded programs of calls, a crash before any operation of the disk,
and what comes back held against every version that the model knows of each job.

The letters in the messages say which promise is broken: (a) no job is lost, and what was acknowledged of it stands; (b)
what is deleted stays deleted; (c) nothing is there that nobody put; (d) the buried keep their order; (e) ids are not
used again; (f) opening raises nothing, and opening again changes nothing; (g) a batch is whole or not there; (h) the
figures of the queue; (i) pauses; (j) a call that raised has changed nothing; (k) a delete needs no room.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kestrelpy import KestrelError
from kestrelpy.testing import CrashingDisk, ManualClock, PowerModel
from kestrelpy.testing._choices import Corner, Leaning
from kestrelpy.work import JobStats, WorkQueue
from tests.support.queues import Sync
from tests.work.model import ModelJob, Version
from tests.work.pair import CLOSE, START_MS, TUBES, Pair, abandon_all, open_queue, vanish

MODELS = (PowerModel.PREFIX, PowerModel.EXT4, PowerModel.ANY)
SYNCS: tuple[Sync, ...] = ("always", 0.1, "never")
OFTEN = {"store": 0.3, "write": 0.4, "grow": 0.3}
"""Operations of which there are many: how likely a crash before one of them is looked at, and 0.8 for all others."""
PRIORITIES = (0, 5, 1023, 1024, 65536, 2**32 - 1)
SIZES = (0, 30, 300, 900)


STEPS = {
    "put": 8, "put_many": 2, "put_all": 2, "reserve": 8, "reserve_many": 2, "reserve_job": 2, "delete": 7,
    "delete_many": 2,
    "release": 4, "bury": 3, "touch": 1, "kick": 2, "kick_job": 1, "move": 2, "clear": 0.5, "pause": 1,
    "advance": 3, "sync": 1.5, "checkpoint": 1.5, "close": 0.7, "kill": 1, "new_session": 1, "close_session": 1,
    "draw": 0.5, "wait": 0.5, "save_reserves": 1,
}  # fmt: skip
"""How often each step comes, next to the others."""
WRITING = {
    "put", "put_many", "put_all", "delete", "delete_many", "release", "bury", "kick", "kick_job", "move", "clear",
    "pause",
}  # fmt: skip
"""Steps that are on disk when they return, if syncs are to be always; and all before them."""


class BrokenPromise(AssertionError):
    """Something was lost, came twice, or is not what it was."""


@dataclass
class Bounds:
    """What a state may show: of each job the versions from ``first`` to ``last``; figures between those of two moments.

    ``power``: these are what is durable, and all that happened since.
    """

    first: dict[int, int]
    last: dict[int, int]
    totals: tuple[int, int]
    timeouts: tuple[int, int]
    pauses: list[dict[str, float]]
    put_before: int
    """The highest id of a job that must have been put."""
    power: bool
    batch: Sequence[int] = ()
    """Jobs of which there are all or none."""


@dataclass
class Marks:
    """A moment of a run."""

    versions: dict[int, int] = field(default_factory=dict)
    total_jobs: int = 0
    timeouts: int = 0
    pauses: dict[str, float] = field(default_factory=dict)


class Program:
    """Calls chosen by ``choose``, on a queue and its model. ``steps``: weights other than those of ``STEPS``."""

    def __init__(self, choose: random.Random, pair: Pair, steps: dict[str, float] | None = None) -> None:
        self.choose = choose
        self.pair = pair
        self.steps = {**STEPS, **(steps or {})}
        self.batch: Sequence[int] = ()
        self.pair.new_session()

    def step(self, among: Collection[str] = ()) -> str:
        names = [name for name in self.steps if not among or name in among]
        name = self.choose.choices(names, [self.steps[name] for name in names])[0]
        self.batch = ()
        if not self.pair.sessions:
            self.pair.new_session()
        getattr(self, name)()
        return name

    # -- choosing ----------------------------------------------------------------------------------------------------

    def job(self, *, reserved: bool | None = None) -> ModelJob | None:
        jobs = [j for j in self.pair.model.jobs.values() if reserved in (None, j.state == "reserved")]
        return self.choose.choice(jobs) if jobs else None

    def held(self) -> tuple[Any, Any, ModelJob] | None:
        job = self.job(reserved=True)
        if job is None:
            return None
        return *self.pair.sessions[self.holder_of(job)], job

    def holder_of(self, job: ModelJob) -> int:
        return next(at for at, (_, model) in enumerate(self.pair.sessions) if model is job.holder)

    def seconds(self, *bases: int) -> float:
        return self.pair.seconds(self.choose.choice(bases))

    def at(self) -> int:
        return self.choose.randrange(len(self.pair.sessions))

    # -- steps -------------------------------------------------------------------------------------------------------

    def put(self) -> None:
        choose, how = self.choose, dict[str, Any]()
        if choose.random() < 0.3:
            how["delay"] = self.seconds(0, 2, 30)
        if choose.random() < 0.2:
            how["key"] = choose.choice("kl")
        if choose.random() < 0.15:
            how["expires_in"] = self.seconds(1, 20)
        if self.pair.model.drawn and choose.random() < 0.5:
            how["job_id"] = min(self.pair.model.drawn)
        how |= {"tube": choose.choice(TUBES), "priority": choose.choice(PRIORITIES), "ttr": self.seconds(1, 5, 60)}
        self.pair.put(choose.choice(SIZES), **how)

    def put_many(self) -> None:
        sizes = self.choose.choices(SIZES, k=self.choose.randrange(1, 6))
        # One ttr for all of them: it is so long that no two of them ever end at the same moment.
        ids = self.pair.put_many(sizes, tube=self.choose.choice(TUBES), ttr=self.seconds(100_000))
        self.batch = ids or ()

    def put_all(self) -> None:
        """Of several tubes. No two of them ever end at the same moment."""
        jobs = [self.one_of_many() for _ in range(self.choose.randrange(1, 6))]
        for (_, how), job_id in zip(jobs, sorted(self.pair.model.drawn), strict=False):
            how["job_id"] = job_id
        self.batch = self.pair.put_all(jobs) or ()

    def one_of_many(self) -> tuple[int, dict[str, Any]]:
        choose, how = self.choose, dict[str, Any]()
        if choose.random() < 0.2:
            how["delay"] = self.seconds(0, 2, 30)
        if choose.random() < 0.1:
            how["key"] = choose.choice("kl")
        if choose.random() < 0.1:
            how["expires_in"] = self.seconds(1, 20)
        how |= {"tube": choose.choice(TUBES), "priority": choose.choice(PRIORITIES), "ttr": self.seconds(1, 5, 60)}
        return choose.choice(SIZES), how

    def draw(self) -> None:
        assert self.pair.queue.new_id() == self.pair.model.new_id()

    def new_session(self) -> None:
        if len(self.pair.sessions) < 4:
            self.pair.new_session(deadline_soon=self.choose.random() < 0.7)
            session, model = self.pair.sessions[-1]
            for tube in self.choose.sample(TUBES, 2):
                assert session.watch(tube) == self.pair.model.watch(model, tube)

    def close_session(self) -> None:
        self.pair.close_session(self.at())

    def reserve(self) -> None:
        self.pair.reserve(self.at())

    def reserve_many(self) -> None:
        self.pair.reserve(self.at(), self.choose.randrange(1, 5))

    def reserve_job(self) -> None:
        job = self.job()
        if job is not None:
            self.pair.reserve_job(self.at(), job.id)

    def wait(self) -> None:
        self.pair.wait(self.at(), self.choose.choice((None, self.seconds(1, 5))))

    def delete(self) -> None:
        held, pair = self.held(), self.pair
        if held is not None and self.choose.random() < 0.7:
            session, model, job = held
            pair.same(lambda: session.delete(job.id), lambda: pair.model.delete(job.id, model))
        elif (found := self.job()) is not None:
            pair.same(lambda: pair.queue.delete(found.id), lambda: pair.model.delete(found.id))

    def delete_many(self) -> None:
        self.pair.delete_many(self.at(), self.choose.randrange(1, 6))

    def release(self) -> None:
        if (job := self.job(reserved=True)) is not None:
            priority, size = self.choose.choice((None, *PRIORITIES)), self.choose.choice((None, None, *SIZES))
            delay = self.choose.choice((0, self.seconds(0, 2, 30)))
            self.pair.release(self.holder_of(job), job.id, priority, delay, size)

    def bury(self) -> None:
        if (job := self.job(reserved=True)) is not None:
            priority, size = self.choose.choice((None, *PRIORITIES)), self.choose.choice((None, None, *SIZES))
            self.pair.bury(self.holder_of(job), job.id, priority, size)

    def touch(self) -> None:
        if (held := self.held()) is not None:
            session, model, job = held
            self.pair.same(lambda: session.touch(job.id), lambda: self.pair.model.touch(model, job.id))

    def kick(self) -> None:
        count, tube, pair = self.choose.randrange(1, 5), self.choose.choice(TUBES), self.pair
        pair.same(lambda: pair.queue.kick(count, tube), lambda: pair.model.kick(count, tube))

    def kick_job(self) -> None:
        if (job := self.job()) is not None:
            pair = self.pair
            pair.same(lambda: pair.queue.kick_job(job.id), lambda: pair.model.kick_job(job.id))

    def move(self) -> None:
        if (job := self.job()) is not None:
            tube, pair = self.choose.choice(TUBES), self.pair
            pair.same(lambda: pair.queue.move(job.id, tube), lambda: pair.model.move(job.id, tube))

    def clear(self) -> None:
        tube, pair = self.choose.choice(TUBES), self.pair
        pair.same(lambda: pair.queue.clear(tube), lambda: pair.model.clear(tube))

    def pause(self) -> None:
        tube, pair = self.choose.choice(TUBES), self.pair
        seconds = self.choose.choice((0, self.seconds(1, 40)))
        pair.same(lambda: pair.queue.pause_tube(tube, seconds), lambda: pair.model.pause_tube(tube, seconds))

    def advance(self) -> None:
        self.pair.advance(self.choose.choice((1, 1, 2, 10)))

    def save_reserves(self) -> None:
        self.pair.same(self.pair.queue.save_reserves, self.pair.model.save_reserves)

    def sync(self) -> None:
        self.pair.queue.sync()

    def checkpoint(self) -> None:
        self.pair.queue.checkpoint()

    def close(self) -> None:
        self.pair.close(self.choose.choice((0, 3)))

    def kill(self) -> None:
        disk = self.pair.disk
        assert isinstance(disk, CrashingDisk)
        self.pair.kill(self.choose.choice((0, 3)), disk.after_kill())


class WorkExplorer:
    """Runs programs and looks at crash states until ``limit`` of them are seen.

    ``points``: crashes looked at in one program, at the most. ``samples``: power cuts tried at each. ``nested``: how
    likely a state's opening is itself crashed. ``steps``: other weights of single steps.
    """

    def __init__(
        self,
        seed: int,
        limit: int,
        *,
        length: int = 40,
        points: int = 40,
        samples: int = 2,
        nested: float = 0.08,
        syncs: tuple[Sync, ...] = SYNCS,
        steps: dict[str, float] | None = None,
    ) -> None:
        self.seed = seed
        self.limit = limit
        self.length = length
        self.points = points
        self.samples = samples
        self.nested = nested
        self.syncs = syncs
        self.steps = steps
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        """Raises ``BrokenPromise``."""
        with collecting_seldom():
            seed = self.seed
            while self.counts.total() < self.limit:
                try:
                    self._run_one(seed)
                except BrokenPromise as broken:
                    raise BrokenPromise(f"program {seed}: {broken}") from broken
                except (AssertionError, KestrelError, OSError, RuntimeError) as error:
                    raise BrokenPromise(f"program {seed}: the program itself: {error!r}") from error
                seed += 1

    def _run_one(self, seed: int) -> None:
        choose = random.Random(f"work {seed}")
        sync = choose.choice(self.syncs)
        options: dict[str, Any] = {
            "sync": sync,
            "segment_bytes": 4096,
            "max_job_bytes": 2000,
            "max_attempts": choose.choice((None, None, 2)),
        }
        pair = Pair(CrashingDisk(), **options)
        program = Program(choose, pair, self.steps)
        durable = Marks()
        chance = self.points / (self.length * 3)
        for at in range(self.length):
            before = marks(pair)
            states: list[CrashingDisk] = []
            with watched(pair, choose, chance, states):
                name = program.step()
            after = marks(pair)
            where = f"step {at}, {name}"
            for state in states:
                self._judge_all(pair, state, before, after, durable, program.batch, choose, where)
            if name == "advance" and sync == 0.1:
                durable = before
            elif name in ("sync", "checkpoint", "close") or (sync == "always" and name in WRITING and after != before):
                durable = after
        self._judge_all(pair, pair.disk.after_kill(), after, after, durable, (), choose, "the end")  # type: ignore[attr-defined]
        pair.vanish()

    def _judge_all(
        self,
        pair: Pair,
        state: CrashingDisk,
        before: Marks,
        after: Marks,
        durable: Marks,
        batch: Sequence[int],
        choose: random.Random,
        where: str,
    ) -> None:
        bounds = between(before, after, batch, power=False)
        self._judge("kill", state.after_kill(), pair, bounds, choose, where)
        bounds = between(durable, after, batch, power=True)
        for at in range(self.samples):
            model = choose.choice(MODELS)
            cut = state.after_power_cut(Leaning(choose) if at else Corner(last=False), model)
            self._judge(model.name, cut, pair, bounds, choose, where)

    def _judge(
        self, kind: str, disk: CrashingDisk, pair: Pair, bounds: Bounds, choose: random.Random, where: str
    ) -> None:
        self.counts[kind] += 1
        try:
            if choose.random() < self.nested:
                for point, power in crashes_of_an_opening(disk, pair, choose):
                    self.counts["in recovery"] += 1
                    if not power or bounds.power:
                        judge(point, pair, bounds, choose)
            judge(disk, pair, bounds, choose)
        except BrokenPromise as broken:
            raise BrokenPromise(f"{where}, {kind}: {broken}") from broken
        except (KestrelError, OSError, RuntimeError, AssertionError, LookupError) as error:
            raise BrokenPromise(f"{where}, {kind}: (f) raised {error!r}") from error


# -- the moments of a run --------------------------------------------------------------------------------------------


def marks(pair: Pair) -> Marks:
    model = pair.model
    pauses = {name: tube.paused_until for name, tube in model.tubes.items() if tube.paused_until}
    versions = {job_id: len(history) - 1 for job_id, history in model.history.items()}
    return Marks(versions, model.total_jobs, model.timeouts, pauses)


def between(first: Marks, last: Marks, batch: Sequence[int], *, power: bool) -> Bounds:
    return Bounds(
        first.versions,
        last.versions,
        (first.total_jobs, last.total_jobs),
        (first.timeouts, last.timeouts),
        [first.pauses, last.pauses],
        max(first.versions, default=0),
        power,
        batch,
    )


@contextmanager
def watched(pair: Pair, choose: random.Random, chance: float, states: list[CrashingDisk]) -> Iterator[None]:
    """Some of the moments before operations, as a kill would leave them; half of them with a part of the store under
    way.
    """
    disk = pair.disk
    assert isinstance(disk, CrashingDisk)

    def look() -> None:
        often = OFTEN.get(disk.next_operation[0], 0.8)
        if choose.random() < often * chance * 3:
            states.append(disk.after_kill(choose if choose.random() < 0.5 else None))

    disk.before_operation = look
    try:
        yield
    finally:
        disk.before_operation = None


def crashes_of_an_opening(disk: CrashingDisk, pair: Pair, choose: random.Random) -> list[tuple[CrashingDisk, bool]]:
    """A queue is opened on what was left, and its process dies in the middle of that, or its power is cut."""
    opening = disk.after_kill()
    points: list[CrashingDisk] = []
    opening.before_operation = lambda: points.append(opening.after_kill(choose))
    queue = reopened(opening, pair)
    opening.before_operation = None
    vanish(queue, opening)
    found: list[tuple[CrashingDisk, bool]] = []
    for point in choose.sample(points, min(3, len(points))):
        power = choose.random() < 0.5
        found.append((point.after_power_cut(Leaning(choose), choose.choice(MODELS)) if power else point, power))
    return found


def reopened(disk: CrashingDisk, pair: Pair) -> WorkQueue:
    clock = ManualClock(START_MS + round(pair.model.now * 1000))
    return open_queue(clock, disk, {**pair.options, "sync": "never"})


# -- the judge -------------------------------------------------------------------------------------------------------


def judge(disk: CrashingDisk, pair: Pair, bounds: Bounds, choose: random.Random) -> None:
    """Raises ``BrokenPromise``."""
    queue = reopened(disk, pair)
    found = jobs_of(queue)
    queue._check()
    orders = {job_id: check_job(pair, bounds, job_id, found.get(job_id)) for job_id in bounds.last}
    promised(not found.keys() - bounds.last.keys(), f"(c) jobs that nobody put: {found.keys() - bounds.last.keys()}")
    there = [job_id for job_id in bounds.batch if job_id in found]
    promised(len(there) in (0, len(bounds.batch)), f"(g) of batch {bounds.batch} there are {there}")
    check_figures(queue, pair, bounds, found)
    again = disk.after_kill()
    if choose.random() < 0.3:
        twice = reopened(again, pair)
        promised(seen(jobs_of(twice)) == seen(found), "(f) opened again, it is another queue")
        vanish(twice, again)
    go_on(queue, found, {job_id: order for job_id, order in orders.items() if order}, bounds)
    vanish(queue, disk)
    last = disk.after_kill()
    later = reopened(last, pair)
    promised(not later.stats().total_jobs < len(found), "(h) jobs are not counted")
    promised(later.stats().ready + later.stats().delayed == 0, "(b) what was deleted has come back")
    vanish(later, last)


def jobs_of(queue: WorkQueue) -> dict[int, JobStats]:
    listed = [stats for tube in queue.tubes() for stats in queue.jobs(tube)]
    found = {stats.id: stats for stats in listed}
    promised(len(found) == len(listed), "(c) a job is there twice")
    return found


def seen(jobs: dict[int, JobStats]) -> dict[int, tuple[Any, ...]]:
    return {job_id: (s.state, s.tube, s.priority, s.reserves, s.timeouts, s.kicks) for job_id, s in jobs.items()}


def check_job(pair: Pair, bounds: Bounds, job_id: int, stats: JobStats | None) -> int:
    """It is as one of its versions says. Returns which burying it was, or 0."""
    versions = pair.model.history[job_id][bounds.first.get(job_id, 0) : bounds.last[job_id] + 1]
    if stats is None:
        gone = None in versions or any(version is not None and expired(pair, job_id) for version in versions)
        promised(gone, f"(a) job {job_id} is lost: {versions}")
        return 0
    promised(not expired(pair, job_id), f"(a) job {job_id} has expired, and is there")
    promised(stats.state != "reserved", f"(a) job {job_id} is reserved by nobody")
    matching = [version for version in versions if version is not None and matches(version, stats, pair.model.now)]
    if not matching:
        letter = "b" if versions == [None] else "a"
        raise BrokenPromise(f"({letter}) job {job_id} is {stats}, not one of {versions} at {pair.model.now}")
    return matching[-1].burying


def expired(pair: Pair, job_id: int) -> bool:
    return pair.model.known[job_id].expires <= pair.model.now


def matches(version: Version, stats: JobStats, now: float) -> bool:
    state, due = version.state, version.due
    if state == "delayed" and due <= now:
        state, due = "ready", 0.0
    found_due = now + stats.time_left if stats.state == "delayed" else 0.0
    facts = (stats.state, stats.tube, stats.priority, stats.body)
    same = facts == (state, version.tube, version.priority, version.body)
    counts = (stats.timeouts, stats.releases, stats.buries, stats.kicks)
    same = same and counts == (version.timeouts, version.releases, version.buries, version.kicks)
    return same and abs(found_due - due) < CLOSE and abs(stats.delay - version.delay) < CLOSE


def check_figures(queue: WorkQueue, pair: Pair, bounds: Bounds, found: dict[int, JobStats]) -> None:
    stats = queue.stats()
    for name, (least, most) in {"total_jobs": bounds.totals, "timeouts": bounds.timeouts}.items():
        figure = getattr(stats, name)
        promised(least <= figure <= most, f"(h) {name} is {figure}, not from {least} to {most}")
    promised(stats.bytes == sum(each.body_bytes for each in found.values()), "(h) bytes")
    for job_id, each in found.items():
        known = pair.model.known[job_id]
        promised(queue.peek(job_id).body == each.body, f"(c) job {job_id} has another body")
        facts = (each.key, each.ttr, each.body_bytes)
        promised(facts == (known.key, known.ttr, len(each.body)), f"(c) job {job_id} has {facts}")
    highest = max((bounds.put_before, *found))
    new = queue.put(b"and on it goes")
    promised(new > highest, f"(e) id {new} is used again")
    queue.delete(new)
    if not bounds.power and bounds.pauses[0] == bounds.pauses[1]:
        for name, until in bounds.pauses[0].items():
            left = queue.stats_tube(name).pause_left if name in queue.tubes() else 0
            promised(abs(left - (until - pair.model.now)) < CLOSE, f"(i) {name} is paused for {left} seconds")


def go_on(queue: WorkQueue, found: dict[int, JobStats], orders: dict[int, int], bounds: Bounds) -> None:
    """Kick all that is buried, and delete everything."""
    for tube in queue.tubes():
        buried = []
        while queue.stats_tube(tube).buried:
            job_id = queue.peek_buried(tube).id
            buried.append(orders.get(job_id, 0))
            promised(queue.kick(1, tube) == 1, "(d) what is buried is not kicked")
            promised(queue.stats_job(job_id).state == "ready", "(d) another one was kicked")
        promised(buried == sorted(buried), f"(d) the buried are in the order {buried}")
    for job_id in found:
        queue.delete(job_id)


def promised(kept: bool, message: str) -> None:
    if not kept:
        raise BrokenPromise(message)


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Queues are made by the thousand here, and each is a cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        abandon_all()
        gc.collect()
        if enabled:
            gc.enable()
