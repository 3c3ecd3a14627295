"""Publishers and owners of one queue on a simulated store, in worlds that a seed draws: no thread, no waiting.

A publisher uploads parts and publishes them, request by request. It is killed anywhere, sleeps for as long as it likes,
publishes the same batch a second time, or comes again with new parts for the same version. An owner takes batches in,
ships, collects garbage, is killed, loses its power, or is lost with its disk; then another one is restored from the
store and goes on. An owner that has lost the queue may live on for a while.

What must hold is in ``World.check`` and ``World.finish``: each batch is in the log once and whole, in its own order.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from kestrelpy import CorruptJournal, JournaledQueue
from kestrelpy.inbox.format import BatchPart, PublishedBatch
from kestrelpy.inbox.publishing import batch_id_of
from kestrelpy.ship import (
    Fenced,
    HistoryMismatch,
    NotShipped,
    PartUploader,
    Ship,
    ShipError,
    StoreUnavailable,
    log,
    publishing,
    restore,
)
from kestrelpy.ship.log import SlotTaken
from kestrelpy.ship.shipper import Shipper
from kestrelpy.ship.store_inbox import StoreInbox
from kestrelpy.testing import CrashingDisk, ManualClock, PowerModel
from kestrelpy.testing.stores import Fault, Request, SimulatedStore
from tests.ship import owner_explorer
from tests.ship.in_store import items_of, log_of
from tests.ship.owner_explorer import Dead, Wrong, answer_of, bury

QUEUE, FOLDER, PREFIX = "jobs", "/queues", "jobs/"
FAULTS = (Fault.LOST_BEFORE, Fault.LOST_AFTER, Fault.TWICE, Fault.LATE)
HISTORY_MS = 100_000
HALF_A_DAY_NS = 43_200_000_000_000


class Batch:
    """What one publisher wants to publish, once. ``attempts``: the items that it has come with, in each of its lives.
    ``is_published``: a publisher was told so.
    """

    def __init__(self, name: str, app_id: str, version: int) -> None:
        self.name = name
        self.app_id = app_id
        self.version = version
        self.attempts: list[list[bytes]] = []
        self.is_published = False


class Publisher:
    """A process that publishes. A stream (``app_id``) comes again with the same version until it is told that it is
    published; others are gone when they are killed.
    """

    def __init__(self, world: World, name: str, *, is_stream: bool) -> None:
        self.world = world
        self.name = name
        self.client = world.store.client(name)
        self.is_stream = is_stream
        self.batch: Batch | None = None
        self.parts: tuple[BatchPart, ...] = ()
        self.steps: Any = None
        self.answer: object = None
        self.count = self.uploaded_ns = 0

    def step(self) -> None:
        """Send one request, or begin. Who has parts that may be a day old does not publish them any more."""
        if self.steps is not None and self.world.store.clock.time_ns() - self.uploaded_ns > HALF_A_DAY_NS:
            self.die()
        try:
            if self.steps is None:
                self.begin()
                return
            request = log.resume(self.steps, self.answer)
        except StopIteration as end:
            self.steps = None
            self.end(end.value)
        except StoreUnavailable:
            self.world.counts["publishers given up"] += 1
            self.die()
        else:
            self.answer = log.ask(request, self.client, lambda seconds: None)

    def begin(self) -> None:
        """The next batch; or the one that was not published, with new parts; or the last one, once more."""
        is_young = self.world.store.clock.time_ns() - self.uploaded_ns < HALF_A_DAY_NS
        again = self.batch is not None and self.batch.is_published and is_young and self.world.random.random() < 0.3
        if self.batch is None or (self.batch.is_published and not again):
            self.count += 1
            app_id = self.name if self.is_stream else ""
            self.batch = Batch(f"{self.name}-{self.count}", app_id, self.count if self.is_stream else 0)
            self.world.batches.append(self.batch)
        if not again:
            self.upload(self.batch)
        self.world.counts["published again"] += again
        about = (self.batch.app_id, self.batch.version, self.parts)
        batch = PublishedBatch(batch_id_of(self.parts, *about[:2]), 1, *about)
        self.steps, self.answer = self.world.publish(batch), None

    def upload(self, batch: Batch) -> None:
        """New items for the batch, in some parts."""
        attempt = len(batch.attempts)
        items = [b"%s.%d.%d" % (batch.name.encode(), attempt, at) for at in range(self.world.random.choice((1, 3, 6)))]
        batch.attempts.append(items)
        self.parts, self.uploaded_ns = (), self.world.store.clock.time_ns()
        for at in range(0, len(items), 2):
            uploader = PartUploader(self.client, QUEUE, clock=self.world.clock)
            uploader.add([item + b"." * self.world.random.choice((0, 0, 900)) for item in items[at : at + 2]])
            self.parts += uploader.finish()

    def end(self, done: publishing.Publication) -> None:
        assert self.batch is not None
        self.batch.is_published = True
        self.world.counts["publications"] += 1
        self.world.counts["publications found there"] += not done.is_new

    def die(self) -> None:
        """A stream comes back; what another one wanted to publish may be published or not."""
        self.steps = None
        if self.batch is not None and not self.batch.is_published and not self.is_stream:
            self.batch = None
        self.world.counts["publishers killed"] += 1


class Owner:
    """A machine that has the queue, or has lost it. Its steps are those of a process that runs on its disk."""

    def __init__(self, world: World, number: int, disk: CrashingDisk) -> None:
        self.world = world
        self.name = f"owner {number}"
        self.disk = disk
        self.queue: JournaledQueue | None = None
        self.shipping: Any = None
        self.looking: Any = None
        self.answers: dict[str, object] = {}

    def clear(self) -> None:
        self.queue = self.shipping = self.looking = None
        self.answers.clear()

    def open(self) -> bool:
        """Returns False if another one has the queue."""
        world = self.world
        options = Ship(
            world.store.client(self.name),
            interval=0,
            chunk_bytes=64 << 10,
            close_timeout=3.0,
            history=24.0,  # the owner's clock stands still: batches are remembered for ever
            inbox_interval=None,
            manifest_interval=world.random.choice((0.5, 1e9)),
        )
        try:
            self.queue = JournaledQueue(
                FOLDER, QUEUE, segment_bytes=4096, sync=0.1, inbox_interval=None,
                clock=ManualClock(1_700_000_000_000), disk=self.disk, ship=options,
            )  # fmt: skip
        except StoreUnavailable:
            world.counts["openings given up"] += 1
        except (Fenced, HistoryMismatch):
            return False
        except CorruptJournal as error:
            raise Wrong(f"{self.name}: {error}") from error
        else:
            world.counts["openings"] += 1
        return True

    @property
    def shipper(self) -> Shipper:
        assert self.queue is not None
        assert self.queue._shipment is not None
        return self.queue._shipment._shipper

    @property
    def inbox(self) -> StoreInbox:
        assert self.shipper.inbox is not None
        return self.shipper.inbox

    def look(self) -> None:
        """One request of taking in."""
        if self.looking is None:
            assert self.queue is not None
            assert self.queue._inbox is not None
            self.looking, self.answers["look"] = self.world.look(self.inbox, self.queue._inbox), None
        try:
            request: Any = log.resume(self.looking, self.answers["look"])
        except StopIteration:
            self.looking = None
            self.world.counts["looks"] += 1
        except (StoreUnavailable, ShipError):
            self.looking = None
        else:
            self.answers["look"] = log.ask(request, self.inbox._log.store, lambda seconds: None)

    def ship(self, *, collects: bool = False) -> bool:
        """One request of shipping. Returns False if there is nothing to do."""
        ship = self.shipper
        if ship._ended is not None:
            return False
        try:
            if self.shipping is None:
                self.world.now += 0.6
                owner = ship._owner
                steps = owner.collect(self.world.now, HISTORY_MS, 0, {}) if collects else owner.step(self.world.now)
                self.shipping, self.answers["ship"] = steps, None
            request: Any = log.resume(self.shipping, self.answers["ship"])
        except StopIteration as end:
            self.shipping = None
            return bool(end.value)
        except StoreUnavailable:
            self.shipping = None
            return False
        except SlotTaken as taken:
            self.shipping = None
            ship._be_fenced(taken)
            return False
        self.answers["ship"] = answer_of(ship, request)
        return True

    def close(self) -> None:
        assert self.queue is not None
        queue = self.queue
        for steps in (self.shipping, self.looking):
            if steps is not None:
                steps.close()
                self.shipper._is_lost = True  # type: ignore[attr-defined]  # its slot is in doubt
        self.clear()
        with contextlib.suppress(NotShipped, Fenced, StoreUnavailable):
            queue.close()

    def kill(self) -> None:
        world, queue, old = self.world, self.queue, self.disk
        if world.random.random() < 0.5:
            self.disk = old.after_power_cut(world.random, world.random.choice((PowerModel.PREFIX, PowerModel.ANY)))
        else:
            self.disk = old.after_kill(world.random)
        self.clear()
        world.counts["owners killed"] += 1
        if queue is not None:
            bury(queue, old)


class World:
    """A store, publishers, the owner, and those who were owners. ``publish`` and ``look`` are what is tested."""

    publish = staticmethod(lambda batch: publishing.publish_steps(PREFIX, batch))
    look = staticmethod(lambda inbox, host: inbox.look(host))

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.fault_rate = 0.0
        self.store = SimulatedStore()
        self.store.late_seconds = self.random.choice((60.0, 3600.0))
        self.store.before_request = self._fault
        self.clock = ManualClock(1_700_000_000_000)
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self._at_request = -1
        self._items: dict[int, bytes] = {}
        self.batches: list[Batch] = []
        self.owner = Owner(self, 0, CrashingDisk())
        self.old: list[Owner] = []
        self.publishers = [Publisher(self, name, is_stream=name != "job") for name in ("stream", "other", "job")]
        assert self.owner.open()
        self.fault_rate = self.random.choice((0.0, 0.05, 0.2))

    def _fault(self, request: Request) -> Fault:
        del request
        return self.random.choice(FAULTS) if self.random.random() < self.fault_rate else Fault.NONE

    # -- what happens ------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        for _ in range(steps):
            chance = self.random.random()
            if chance < 0.35:
                publisher = self.random.choice(self.publishers)
                for _ in range(self.random.choice((1, 1, 3, 8))):
                    publisher.step()
                if self.random.random() < 0.05:
                    publisher.die()
            elif chance < 0.38:
                self.store.clock.advance(self.random.choice((1, 200, 4000)))
            elif chance < 0.43:
                self.move()
            elif chance < 0.48:
                with self._maybe_killed(self.owner):
                    self.quiet_time()
            else:
                owner = self.random.choice(self.old) if self.old and self.random.random() < 0.1 else self.owner
                with self._maybe_killed(owner):
                    self.own(owner)
            self.check()
        self.finish()

    def own(self, owner: Owner) -> None:
        """What an owner does."""
        if owner.queue is None:
            if owner is self.owner and not owner.open():
                raise Wrong(f"{owner.name} has the queue, and is refused")
            return
        chance, requests = self.random.random(), self.random.choice((1, 2, 5, 20))
        if chance < 0.45:
            for _ in range(requests):
                owner.look()
        elif chance < 0.85:
            for _ in range(requests):
                owner.ship(collects=self.random.random() < 0.03)
        elif chance < 0.93:
            with contextlib.suppress(Fenced):
                owner.queue.put(b"put")
        elif chance < 0.96:
            owner.close()
        else:
            owner.kill()

    def quiet_time(self) -> None:
        """The owner catches up, and garbage is collected, while publishers sleep in the middle of something."""
        owner = self.owner
        if owner.queue is None:
            return
        for _ in range(2):
            for _ in range(12):
                owner.look()
            for _ in range(12):
                owner.ship()
            self.store.clock.advance(200)
        for _ in range(40):
            if owner.shipping is not None or not self.random.randrange(3):
                owner.ship(collects=True)
        self.counts["quiet times"] += 1

    @contextlib.contextmanager
    def _maybe_killed(self, owner: Owner) -> Iterator[None]:
        """Now and then, kill the process in the middle of what it does, before an operation of its disk."""
        left = self.random.randrange(1, 40) if self.random.random() < 0.2 else 0
        disk = owner.disk

        def count() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Dead

        disk.before_operation = count if left else None
        try:
            yield
        except Dead:
            disk.before_operation = None
            owner.kill()
        else:
            disk.before_operation = None

    def move(self) -> None:
        """Another machine takes the queue over, from the store. The old one is lost, or lives on for a while."""
        old, disk = self.owner, CrashingDisk()
        new = Owner(self, len(self.old) + 1, disk)
        try:
            restore(self.store.client("restorer"), QUEUE, FOLDER, disk=disk, threads=1)
        except StoreUnavailable:
            return
        if not new.open() or new.queue is None:  # it may have a FENCE: then the old one finds out, and comes again
            if self._is_newest(new):
                self.old.append(old)
                self.owner = new
            return
        self.counts["takeovers"] += 1
        if self.random.random() < 0.5:
            old.kill()
        self.old.append(old)
        self.owner = new

    def _is_newest(self, owner: Owner) -> bool:
        """Whether the log's last FENCE is that of an opening that was given up."""
        from kestrelpy.ship.ship_file import read_ship_file

        state = log_of(self.store.objects, QUEUE)
        file = read_ship_file(owner.disk.directory(FOLDER), QUEUE)
        return file is not None and state.header is not None and state.header.nonce in file.nonces

    def open_queues(self) -> Iterable[tuple[JournaledQueue, CrashingDisk]]:
        return ((each.queue, each.disk) for each in [self.owner, *self.old] if each.queue is not None)

    # -- what must hold ----------------------------------------------------------------------------------------------

    def found(self) -> list[bytes]:
        """What is in the log of what was published, in its order, without the padding."""
        if self.store.requests != self._at_request:  # else it is what it was
            self._at_request, self._items = self.store.requests, items_of(self.store.objects, QUEUE)
        items = self._items
        return [items[item_id].rstrip(b".") for item_id in sorted(items) if items[item_id] != b"put"]

    def check(self) -> None:
        counted = Counter(self.found())
        twice = [item for item, count in counted.items() if count > 1]
        if twice:
            raise Wrong(f"in the log twice: {twice}")
        self.counts["checks"] += 1

    def finish(self) -> None:
        """The store gets well, the publishers end, and all that was published is taken in."""
        self.store.before_request = lambda request: Fault.NONE
        self.store.clock.advance(10_000)
        for publisher in self.publishers:
            while publisher.steps is not None:
                publisher.step()
        for owner in [self.owner, *self.old]:
            if owner.queue is not None:
                owner.kill()
        if not self.owner.open():
            raise Wrong("the owner has lost the queue")
        for _ in range(2):
            for _ in range(30 * len(self.batches) + 30):
                self.owner.look()
            while self.owner.ship() or self.owner.shipping is not None:
                pass
        self.check()
        self._check_whole(self.found())

    def _check_whole(self, found: list[bytes]) -> None:
        """Each batch is there as one of its attempts, whole and in order; one that was not published may be missing."""
        known = {item for batch in self.batches for items in batch.attempts for item in items}
        if set(found) - known:
            raise Wrong(f"nobody has published {set(found) - known}")
        for batch in self.batches:
            places = [[found.index(item) for item in items if item in found] for items in batch.attempts]
            there = [at for at, place in enumerate(places) if place]
            if len(there) > 1 or (not there and batch.is_published):
                raise Wrong(f"batch {batch.name} is there as its attempts {there}; published: {batch.is_published}")
            for at in there:
                first = places[at][0]
                if places[at] != list(range(first, first + len(batch.attempts[at]))):
                    raise Wrong(f"batch {batch.name} is not whole, or not in its order: {places[at]}")
            self.counts["batches in the log"] += len(there)


def explore(seed: int, count: int, *, steps: int = 150) -> Counter[str]:
    """Run ``count`` worlds; returns what happened in them. Raises ``Wrong``, with the seed in a note."""
    return owner_explorer.explore(seed, count, steps=steps, make=World)
