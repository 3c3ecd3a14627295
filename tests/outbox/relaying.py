"""A relay between a database and a queue, each step of which a test may interrupt, and what must be true afterwards."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import sqlalchemy
from greenlet import greenlet

from kestrelpy import scan
from kestrelpy._journal.file_names import batches_among
from kestrelpy.inbox import PartWriter, pending, take_in
from kestrelpy.inbox.ledger import read_batch
from kestrelpy.outbox import Outbox, relay
from kestrelpy.outbox.relay import Relay
from kestrelpy.testing import CrashingDisk, ManualClock, MemoryDisk
from kestrelpy.testing._power import PowerModel
from tests.support.queues import START_MS

FOLDER = "/target"
LEASE = 30.0
TABLE = "kestrel_jobs"


class Killed(BaseException):
    """The process was killed here."""


class Points:
    """The places between two statements of a transaction, and before and after each call of the database and the inbox.

    ``then`` is called at each, with its name. After ``die`` each call of this process raises ``Killed``, so nothing has
    an effect that is done while the exception goes up.
    """

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.then: Callable[[str], object] = lambda _: None
        self.is_dead = False

    def hit(self, name: str) -> None:
        if self.is_dead:
            raise Killed
        self.seen.append(name)
        self.then(name)

    def die(self) -> None:
        self.is_dead = True
        raise Killed

    @contextlib.contextmanager
    def around(self, name: str) -> Iterator[None]:
        self.hit(f"before {name}")
        yield
        self.hit(f"after {name}")


class PointedStore:
    """A store of an outbox whose operations have points. ``within``: also inside of transactions."""

    def __init__(self, inner: Any, points: Points, *, within: bool) -> None:
        self._inner = inner
        self._points = points
        self._within = within

    def perform(self, connection: Any, operation: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        name = operation.__name__

        def pointed(sql: Any, *args: Any, **kw: Any) -> Any:
            made = operation(sql, *args, **kw)
            try:
                query = next(made)
                while True:
                    rows = yield query
                    self._points.hit(f"within {name}")
                    query = made.send(rows)
            except StopIteration as end:
                return end.value

        with self._points.around(name):
            return self._inner.perform(connection, pointed if self._within else operation, *args, **kw)


class World:
    """One table, one disk, and relays of one name between them. ``published``: each batch's number, and its items."""

    def __init__(self, engine: sqlalchemy.Engine, queue: str = "events", **options: Any) -> None:
        self.engine = engine
        if engine.dialect.name == "sqlite" and not sqlalchemy.event.contains(engine, "connect", _make_quick):
            sqlalchemy.event.listen(engine, "connect", _make_quick)
        self.queue = queue
        self.clock = ManualClock(START_MS)
        self.disk: Any = MemoryDisk()
        self.options: dict[str, Any] = {"batch": 3, "name": f"the relay of {queue}", **options}
        self.queue_options: dict[str, Any] = {}
        self.app = Outbox(engine, clock=self.clock, lease=LEASE)
        self.app.create_tables()
        self.app.queue(queue)
        self.put_ids: list[int] = []
        self.lanes: dict[str, list[int]] = {}
        """The numbers that were put into each lane."""
        self.published: list[tuple[int, int]] = []
        self.acting: Points | None = None
        """The process that calls the inbox now."""

    def relay(self, points: Points | None = None, *, within: bool = True, **options: Any) -> Relay:
        """A relay as another process would have it."""
        outbox = Outbox(self.engine, clock=self.clock, lease=LEASE)
        outbox.queue(self.queue, **self.queue_options)
        if points is not None:
            outbox.core.store = PointedStore(outbox.core.store, points, within=within)  # type: ignore[assignment]
        return Relay(outbox.core, self.queue, FOLDER, "log", disk=self.disk, **{**self.options, **options})

    def put(self, count: int, **options: Any) -> list[int]:
        """Put jobs, each with its number as payload."""
        with self.app.begin() as connection:
            first = len(self.put_ids)
            jobs = self.app.put_many(connection, self.queue, list(range(first, first + count)), **options)
        ids = [job.id for job in jobs]
        self.put_ids += ids
        if options.get("lane") is not None:
            self.lanes.setdefault(options["lane"], []).extend(range(first, first + count))
        return ids

    def moved(self) -> list[int]:
        """The numbers of the jobs that have arrived, in their order."""
        self._note_published()
        take_in(FOLDER, "log", disk=self.disk, clock=self.clock)
        if self.disk.directory(FOLDER, create=True).names() in ([], ["inbox"]):
            return []
        return [json.loads(record.data) for record in scan(FOLDER, "log", disk=self.disk)]

    def _note_published(self) -> None:
        """The batches that are about to be taken in, but for one that was noted before a crash of that."""
        inbox = self.disk.directory(f"{FOLDER}/inbox", create=True)
        for _, name in batches_among(inbox.names(), "log"):
            batch = read_batch(inbox, name)
            assert batch is not None
            assert batch.app_id.startswith(f"{self.options['name']}/")
            if (batch.version, batch.items) not in self.published:
                self.published.append((batch.version, batch.items))

    def statuses(self) -> Counter[str]:
        with self.engine.connect() as connection:
            text = sqlalchemy.text(f"SELECT status FROM {TABLE} WHERE queue = :queue")
            return Counter(connection.scalars(text, {"queue": self.queue}).all())

    def row(self) -> dict[str, Any]:
        """The relay's row."""
        with self.engine.connect() as connection:
            text = sqlalchemy.text(f"SELECT * FROM {TABLE}_relays WHERE name = :name")
            return dict(connection.execute(text, {"name": self.options["name"]}).mappings().one())

    def owner(self) -> str | None:
        """Who has the lease of the relay."""
        with self.engine.connect() as connection:
            text = sqlalchemy.text(f"SELECT owner FROM {TABLE}_relays WHERE name = :name")
            found: str | None = connection.scalar(text, {"name": self.options["name"]})
            return found

    def batches(self, moved: Sequence[int]) -> list[list[int]]:
        """What has arrived, cut into the batches that were published."""
        found, at = [], 0
        for _, count in self.published:
            found.append(list(moved[at : at + count]))
            at += count
        return found

    def check(self, left: Sequence[int] = (), *, late: int = 0) -> None:
        """Each job that was put has arrived once, but for the numbers ``left``; nothing is left of anything.

        ``late``: so many processes may have begun with their part file after another one had removed it, and have been
        killed then. The queue's owner removes such files.
        """
        moved = self.moved()
        wanted = [number for number in range(len(self.put_ids)) if number not in left]
        counts = Counter(moved)
        assert sorted(counts) == wanted, f"jobs are missing: {set(wanted) - counts.keys()}"
        assert len(moved) == len(wanted), f"jobs are there twice: {[each for each in counts if counts[each] > 1]}"
        assert sum(count for _, count in self.published) == len(moved)
        numbers = [number for number, _ in self.published]
        assert numbers == sorted(set(numbers)), "the numbers do not rise"
        for batch in self.batches(moved):
            assert batch == sorted(batch), "a batch is not in the order of ids"
        for lane in self.lanes.values():
            there = set(lane)
            assert [each for each in moved if each in there] == [each for each in lane if each not in left], "a lane"
        assert self.statuses().keys() <= {"done", "error", "dead"}, "jobs are left"
        assert len(self.parts()) <= late, "parts are left"
        assert pending(FOLDER, "log", disk=self.disk) == 0

    def parts(self) -> list[str]:
        return [name for name in self.disk.directory(f"{FOLDER}/inbox", create=True).names() if name.endswith(".part")]

    def drain(self, moving: Relay) -> int:
        """Step until nothing is left to do."""
        total = 0
        while moved := moving.step():
            total += moved
        return total


def _make_quick(connection: Any, _: Any) -> None:
    """The machine of the database does not crash here."""
    connection.execute("PRAGMA synchronous = OFF")


def pointed_inbox(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the calls of the inbox have points of the process that acts."""

    def around(name: str) -> Any:
        return contextlib.nullcontext() if world.acting is None else world.acting.around(name)

    def wrap(name: str) -> Callable[..., Any]:
        inner = getattr(relay, name)

        def call(*args: Any, **kw: Any) -> Any:
            with around(name):
                return inner(*args, **kw)

        return call

    for name in ("publish", "discard", "last_version"):
        monkeypatch.setattr(relay, name, wrap(name))

    class PointedWriter(PartWriter):
        def __init__(self, *args: Any, **kw: Any) -> None:
            self.points = world.acting
            with around("PartWriter"):
                super().__init__(*args, **kw)

        def add(self, *args: Any, **kw: Any) -> None:
            with around("add"):
                super().add(*args, **kw)

        def seal(self) -> Any:
            with around("seal"):
                return super().seal()

        def discard(self) -> None:
            if self.points is None or not self.points.is_dead:
                super().discard()

    monkeypatch.setattr(relay, "PartWriter", PointedWriter)


def run_interrupted(world: World, at: int, how: str, **options: Any) -> bool:
    """Move all jobs, with an interruption at the ``at``-th point. ``how``: an ``error`` that is raised there, or a
    ``kill``, after which another process goes on. False if there are fewer points.
    """
    points = world.acting = Points()

    def interrupt(_: str) -> None:
        if len(points.seen) == at:
            if how == "kill":
                points.die()
            raise RuntimeError("the database or the disk is away")

    points.then = interrupt
    first = world.relay(points, **options)
    was_interrupted = False
    try:
        world.drain(first)
    except RuntimeError:
        was_interrupted = True
        world.drain(first)
    except Killed:
        was_interrupted = True
        world.acting = None
        take_over(world, **options)
    world.acting = None
    return was_interrupted


def take_over(world: World, **options: Any) -> None:
    """Another process goes on after one that was killed, once its lease is over."""
    second = world.relay(**options)
    has_lease = world.owner() is not None
    assert second.step() == 0 or not has_lease, "the lease of the killed one is not over"
    world.clock.advance(LEASE)
    world.drain(second)


def run_crashing(world: World, at: int, model: PowerModel | None, **options: Any) -> bool:
    """Move all jobs; the machine of the disk crashes before the ``at``-th operation that changes the disk, or the
    process is killed there (``model=None``), and another one goes on with what is there. False if there are fewer.
    """
    disk = world.disk = CrashingDisk()
    crashed: list[CrashingDisk] = []

    def crash() -> None:
        if disk.operations == at or crashed:
            if not crashed:
                chance = random.Random(at)
                crashed.append(disk.after_kill(chance) if model is None else disk.after_power_cut(chance, model))
            raise Killed

    disk.before_operation = crash
    with contextlib.suppress(Killed):
        world.drain(world.relay(**options))
    disk.before_operation = None
    if crashed:
        world.disk = crashed[0]
        take_over(world, **options)
    return bool(crashed)


class Actor:
    """A process with a relay, which stands still at each of its points until it is its turn."""

    def __init__(
        self, world: World, choose: random.Random, lets_be: Sequence[type[Exception]], options: dict[str, Any]
    ) -> None:
        self._lets_be = lets_be
        self.points = Points()
        self.points.then = lambda _: self._hub.switch()
        self._world = world
        self._hub = greenlet.getcurrent()
        self._choose = choose
        self._relay = world.relay(self.points, within=False, **options)
        self._own = greenlet(self._run)

    def _run(self) -> None:
        while True:
            with contextlib.suppress(*self._lets_be):
                self._relay.step()
            if self._choose.random() < 0.1:
                self._relay.release()
            self._hub.switch()

    def go_on(self) -> None:
        """To the next point."""
        self._world.acting = self.points
        self._own.switch()
        self._world.acting = None

    def kill(self) -> None:
        """Never go on."""
        self.points.is_dead = True
        self._own = greenlet(bool)


def run_schedule(
    world: World,
    seed: int,
    actions: int = 250,
    *,
    share_of_poison: float = 0.0,
    lets_be: Sequence[type[Exception]] = (),
) -> Counter[str]:
    """Two processes with a relay of one name, each halted at each point for as long as chance has it, some killed
    there, while jobs are put, the queue's owner takes in, and the time goes on or jumps past the lease.
    ``lets_be``: errors of a step after which the process goes on.
    """
    choose, counts = random.Random(seed), Counter[str]()

    def encode(job: Any) -> bytes:
        if choose.random() < share_of_poison:
            counts["poison"] += 1
            raise ValueError("not this time")
        return str(job.payload).encode()

    world.queue_options = {"max_retries": None, "backoff": 1.0}
    options = {"encode": encode} if share_of_poison else {}
    actors = [Actor(world, choose, lets_be, options) for _ in range(2)]
    for _ in range(actions):
        turn = choose.random()
        if turn < 0.8:
            for _ in range(choose.choice((1, 1, 1, 5, 15))):
                which = choose.randrange(2)
                actors[which].go_on()
        elif turn < 0.88:
            lane = choose.choice((None, "one", "two"))
            world.put(choose.randrange(1, 6), lane=lane, priority=choose.choice((0, 0, 5)))
        elif turn < 0.94:
            world.clock.advance(choose.choice((1.0, LEASE / 2, LEASE)))
        elif turn < 0.97:
            world.moved()
        else:
            which = choose.randrange(2)
            actors[which].kill()
            actors[which] = Actor(world, choose, lets_be, options)
            counts["kills"] += 1
    for actor in actors:
        actor.kill()
        counts["kills"] += 1
    last = world.relay()
    for _ in range(5):
        world.clock.advance(LEASE)
        world.drain(last)
    counts["batches"] += len(world.published)
    return counts
