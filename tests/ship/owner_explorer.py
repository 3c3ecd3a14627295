"""Shipped queues on simulated disks and a simulated store, in worlds that a seed draws: no thread, no waiting.

A world has a store and two machines. On a machine a queue is put to, read, synced and closed; its shipping is carried
out request by request, with anything in between; it is killed, and its power is cut, between any two operations of its
disk. A machine may be lost, with its disk: then another one is restored from the store and goes on.

What must hold is in ``World.check``, and is checked after each of these steps, on the store as it is.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, ClassVar, Protocol
from unittest.mock import patch

from kestrelpy import JournaledQueue, KestrelError, QueueEmpty
from kestrelpy._journal.format import Checkpoint
from kestrelpy.ship import (
    Fenced,
    HistoryMismatch,
    NotShipped,
    OwnerAlive,
    Ship,
    StoreUnavailable,
    gatekeeper,
    lease,
    log,
    opened,
    reading,
    restore,
    shipper,
)
from kestrelpy.ship.log import SlotTaken
from kestrelpy.ship.owner import Expect, LogOwner, Upload, carry_upload
from kestrelpy.ship.shipper import Shipper
from kestrelpy.testing import CrashingDisk, ManualClock, PowerModel
from kestrelpy.testing.stores import Fault, Request, SimulatedStore
from tests.ship.in_store import items_of, log_of

QUEUE = "jobs"
FOLDER = "/queues"
FAULTS = (Fault.LOST_BEFORE, Fault.LOST_AFTER, Fault.TWICE, Fault.LATE)
MACHINES = 2
HISTORY_MS = 100_000


class Wrong(AssertionError):
    """What must never be."""


class Dead(BaseException):
    """The process has been killed: raised by its disk, so that it does nothing more."""


class Clock:
    """What shipping takes for the time that passes. ``while_waiting``: called in each of its pauses."""

    seconds = 0.0
    while_waiting: ClassVar[Callable[[], object]] = bool

    @staticmethod
    def monotonic() -> float:
        return Clock.seconds

    elapsed = monotonic


class Machine:
    """A disk, and the process on it, if there is one."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.disk = CrashingDisk()
        self.queue: JournaledQueue | None = None
        self.steps: Any = None
        self.answer: object = None
        self.has_files = False
        self.is_over = False
        """Another one has taken the queue over: this one may only be thrown away."""
        self.given: list[int] = []
        """The ids that the queue on this disk has given out, in this order."""
        self.futures: dict[int, Future[int]] = {}
        self.open_items: dict[int, Any] = {}
        self.acks = world.random.choice(("disk", "shipped"))
        self.interrupted = -1
        self.lease = world.draw_lease()

    # -- the process -------------------------------------------------------------------------------------------------

    def open(self, *, is_copy: bool = False) -> bool:
        """Open the queue here. What may be raised: that another owner has it, and that the store does not answer.
        ``is_copy``: the owner may have gone on since this was restored; then the result is False.
        """
        world = self.world
        options = Ship(
            world.store.client(self.name),
            acks=self.acks,  # type: ignore[arg-type]
            interval=0,
            chunk_bytes=64 << 10,
            close_timeout=3.0,
            manifest_interval=world.random.choice((0.5, 1e9)),
            lease=self.lease,
        )
        world.clock = ManualClock(1_700_000_000_000 + world.random.randrange(10**6))
        try:
            self.queue = JournaledQueue(
                FOLDER,
                QUEUE,
                segment_bytes=4096,
                sync=world.random.choice((0.1, "never")),
                inbox_interval=None,
                clock=world.clock,
                disk=self.disk,
                ship=options,
            )
        except StoreUnavailable:
            world.counts["openings given up"] += 1
        except OwnerAlive:
            if not is_copy:
                raise
            world.counts["owners alive"] += 1
            return False
        except (Fenced, HistoryMismatch):
            if not self.is_over and not is_copy:
                raise
            world.counts["copies refused" if is_copy else "openings refused"] += 1
            return False
        else:
            if self.is_over:
                raise Wrong(f"{self.name} has opened a queue that another one has taken over")
            self.has_files = True
            world.counts["openings"] += 1
            self._forget_lost()
        return True

    def _forget_lost(self) -> None:
        """What a power cut has lost here, and has never left this disk, was never there."""
        assert self.queue is not None
        self.world.in_log()
        journal, there = self.queue._journal, self.world.was_in_log
        for item_id in [each for each in self.given if each not in there]:
            if item_id > journal.tail_id or journal.is_gap(item_id):
                self.given.remove(item_id)
                self.world.done.discard(item_id)
                del self.world.given[item_id]

    @property
    def shipper(self) -> Shipper:
        assert self.queue is not None
        assert self.queue._shipment is not None
        return self.queue._shipment._shipper

    def put(self) -> None:
        assert self.queue is not None
        world = self.world
        many = world.random.random() < 0.2
        data = [world.new_data() for _ in range(world.random.choice((1, 3)) if many else 1)]
        future: Future[int] | None = None
        self.shipper._gatekeeper.look()  # its thread is in time
        try:
            if many and self.acks == "disk":
                ids = list(self.queue.put_many(data))
            elif self.acks == "disk":
                ids = [self.queue.put(data[0])]
            else:
                future = self.queue.put_future(data[0])
                ids = [self.queue._journal.tail_id]
        except Fenced:
            return
        except NotShipped:
            world.counts["puts refused"] += 1
            return
        if self.lease is not None and world.has_fence_after(self):
            raise Wrong(f"{self.name} has accepted a put, and another owner has the queue")
        for item_id, item in zip(ids, data, strict=False):
            if item_id in world.given:
                raise Wrong(f"id {item_id} was given out twice")
            world.given[item_id] = item
            self.given.append(item_id)
            if future is not None:
                self.futures[item_id] = future
        world.counts["puts"] += 1

    def read(self) -> None:
        """Get an item, or commit or abort one."""
        assert self.queue is not None
        world = self.world
        with contextlib.suppress(QueueEmpty, Fenced):
            if self.open_items and world.random.random() < 0.6:
                item_id = world.random.choice(list(self.open_items))
                item = self.open_items.pop(item_id)
                if world.random.random() < 0.8:
                    world.done.add(item_id)  # before: a kill may cut the commit short
                    self.queue.commit(item)
                else:
                    self.queue.abort(item)
                return
            item = self.queue.get(block=False)
            if world.given.get(item.id) != item.data:
                raise Wrong(f"item {item.id} is not what was put")
            if self.acks == "shipped" and item.id not in (world.in_log(), world.was_in_log)[1]:
                raise Wrong(f"item {item.id} was seen before it was in the log")
            self.open_items[item.id] = item

    def step(self, requests: int) -> None:
        """Carry out some requests of the shipping."""
        assert self.queue is not None
        ship = self.shipper
        for _ in range(requests):
            if ship._ended is not None:
                return
            try:
                if self.steps is None:
                    self.world.now += self.world.random.choice((0.0, 0.6, 1.1))
                    self.steps, self.answer = self._next_steps(ship._owner), None
                request: Any = log.resume(self.steps, self.answer)
            except StopIteration as end:
                self.steps = None
                self._note()
                if not end.value:
                    return
                continue
            except StoreUnavailable:  # a collection is given up
                self.steps = None
                continue
            except SlotTaken as taken:
                self.steps = None
                ship._be_fenced(taken)
                if not self.world.is_taken_from(self):
                    raise Wrong(f"{self.name} is fenced by nobody") from taken
                return
            self.world.pass_time()
            self.answer = answer_of(ship, request)
            self.world.pass_time()

    def _next_steps(self, owner: LogOwner) -> Any:
        if self.world.random.random() < 0.04:
            self.world.counts["collections"] += 1
            return owner.collect(self.world.now, HISTORY_MS, 0, {})
        return owner.step(self.world.now)

    def _note(self) -> None:
        self.shipper._note()
        self.world.clock.advance(0)

    def close(self) -> None:
        """Close the queue; its shipping ends on this thread. A step that is under way is given up."""
        assert self.queue is not None
        queue, self.queue = self.queue, None
        if self.steps is not None:
            self.steps.close()  # the thread would have ended it: its slot is in doubt, and is asked for again
            self.steps = None
            queue._shipment._shipper._is_lost = True  # type: ignore[union-attr]
        with contextlib.suppress(NotShipped, Fenced, StoreUnavailable):
            queue.close()
        self.forget()
        self.world.counts["closes"] += 1

    def forget(self) -> None:
        self.queue, self.steps, self.open_items = None, None, {}
        for item_id in [each for each, future in self.futures.items() if not future.done()]:
            del self.futures[item_id]

    def kill(self, *, power_cut: bool) -> None:
        """The process is gone. With a power cut, what was not synced may be gone, too."""
        world = self.world
        for item_id, future in self.futures.items():
            if future.done() and future.exception() is None:
                world.acknowledged.add(item_id)
        queue, old = self.queue, self.disk
        if power_cut:
            model = world.random.choice((PowerModel.PREFIX, PowerModel.ANY))
            self.disk = old.after_power_cut(world.random, model)
        else:
            self.disk = old.after_kill(world.random)
        self.forget()
        self.futures = {}
        world.counts["power cuts" if power_cut else "kills"] += 1
        if queue is not None:
            bury(queue, old)


def bury(queue: JournaledQueue, disk: CrashingDisk) -> None:
    """Let go of a queue of a process that is dead, without a word of it."""

    def refuse() -> None:
        raise Dead

    disk.before_operation = refuse
    assert queue._shipment is not None
    queue._shipment.release()
    queue._ending.saves_nothing = True
    with contextlib.suppress(Dead, KestrelError, OSError):
        queue.close()


def is_done(state: Checkpoint, item_id: int) -> bool:
    return item_id <= state.head or any(first <= item_id <= last for first, last in state.done)


def answer_of(ship: Shipper, request: Any) -> object:
    """Carry out one request on this thread."""
    if isinstance(request, Expect):
        return None
    if isinstance(request, Upload):
        try:
            return carry_upload(request, ship._store)
        except StoreUnavailable as error:
            return error
    return log.ask(request, ship._store, lambda seconds: None)


class World:
    """A store, its machines, and what truly happened."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.fault_rate = self.random.choice((0.0, 0.05, 0.3))
        self.store = SimulatedStore()
        self.store.before_request = self._fault
        self.clock = ManualClock(1_700_000_000_000)
        self.now = 0.0
        self.given: dict[int, bytes] = {}
        self.acknowledged: set[int] = set()
        self.done: set[int] = set()
        self.in_doubt: set[int] = set()
        """Ids of puts that a kill has cut short: nobody knows them."""
        self.counts: Counter[str] = Counter()
        self.machines = [Machine(self, f"m{number}") for number in range(MACHINES)]
        self.current = self.machines[0]
        self._count = 0
        self._log: dict[int, bytes] = {}
        self.was_in_log: dict[int, bytes] = {}
        """All items that ever were: what all readers have passed may be deleted there."""
        self._at_request = -1

    def draw_lease(self) -> float | None:
        return None

    def pass_time(self) -> None:
        """A request is under way."""

    def has_fence_after(self, machine: Machine) -> bool:
        """Whether the log's last FENCE is not the one of this machine's queue."""
        header = log_of(self.store.objects, QUEUE).header
        return header is not None and header.nonce != machine.shipper.log.opening.nonce

    def new_data(self) -> bytes:
        self._count += 1
        return b"%d." % self._count * self.random.choice((1, 1, 20, 300))

    def _fault(self, request: Request) -> Fault:
        del request
        return self.random.choice(FAULTS) if self.random.random() < self.fault_rate else Fault.NONE

    def is_taken_from(self, machine: Machine) -> bool:
        return machine.is_over

    def in_log(self) -> dict[int, bytes]:
        """The items in the log, as the store has it."""
        if self.store.requests != self._at_request:
            self._log, self._at_request = items_of(self.store.objects, QUEUE), self.store.requests
            self.was_in_log |= self._log
        return self._log

    # -- what happens ------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        for _ in range(steps):
            machine = self.current if self.random.random() < 0.75 else self.random.choice(self.machines)
            self._at_request = -1
            with self._maybe_killed(machine):
                self._happen(machine)
            self.check()
        self.finish()

    @contextlib.contextmanager
    def _maybe_killed(self, machine: Machine) -> Iterator[None]:
        """Now and then, kill the process in the middle of what it does, before an operation of its disk."""
        left = self.random.randrange(30) if self.random.random() < 0.15 else -1
        disk, power_cut = machine.disk, self.random.random() < 0.5

        def count() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Dead

        disk.before_operation = count if left > 0 else None
        try:
            yield
        except Dead:
            disk.before_operation = None
            machine.kill(power_cut=power_cut)
        else:
            disk.before_operation = None

    def _happen(self, machine: Machine, *, may_move: bool = True) -> None:
        chance = self.random.random()
        if machine.queue is None:
            if machine is self.current or machine.has_files:
                machine.open()
        elif chance < 0.30:
            machine.put()
        elif chance < 0.65:
            machine.step(self.random.choice((1, 1, 2, 5, 20)))
        elif chance < 0.80:
            machine.read()
        elif chance < 0.84:
            with contextlib.suppress(Fenced):
                machine.queue.checkpoint(durable=self.random.random() < 0.5)
        elif chance < 0.88:
            with contextlib.suppress(Fenced):
                machine.queue.sync()
        elif chance < 0.92:
            self.clock.advance(self.random.choice((0.05, 1.0)))
            self.store.clock.advance(self.random.choice((1, 120)))
        elif chance < 0.945:
            machine.close()
        elif chance < 0.95:
            self.stranger()
        elif chance < 0.98:
            machine.kill(power_cut=self.random.random() < 0.5)
        elif may_move:
            self.move()

    def move(self) -> None:
        """Another machine takes the queue over, from the store. The old one may live on, or be lost."""
        if not log_of(self.store.objects, QUEUE).slot:
            return
        old = self.current
        new = next(each for each in self.machines if each is not old)
        new.kill(power_cut=False)
        new.disk, new.has_files, new.is_over, new.given = CrashingDisk(), False, False, []
        lost, delay = self.random.random() < 0.5, self.random.choice((0, 0, 5, 15))
        try:
            restore(self.store.client("restorer"), QUEUE, FOLDER, disk=new.disk, threads=1)
        except StoreUnavailable:
            return
        if lost:
            old.kill(power_cut=False)
            old.disk, old.has_files = CrashingDisk(), False
        self.counts["restores"] += 1
        for _ in range(0 if lost else delay):  # the owner goes on meanwhile, and then the copy is too old
            with self._maybe_killed(old):
                self._happen(old, may_move=False)
            self._at_request = -1
        new.acks = self.random.choice(("disk", "shipped"))
        new.has_files = True
        if not new.open(is_copy=True):
            new.disk, new.has_files = CrashingDisk(), False
            return
        if lost or new.queue is not None or self._is_newest(new):
            old.is_over = True
            self.current = new
        else:
            new.disk, new.has_files = CrashingDisk(), False

    def stranger(self) -> None:
        """Another queue of the same name comes to the store: it must not get the log."""
        if not log_of(self.store.objects, QUEUE).slot:
            return
        disk = CrashingDisk()
        with JournaledQueue(FOLDER, QUEUE, disk=disk, clock=ManualClock(1), inbox_interval=None) as queue:
            queue.put(b"of another queue")
        options = Ship(self.store.client("stranger"), interval=0, close_timeout=3.0)
        try:
            JournaledQueue(FOLDER, QUEUE, disk=disk, clock=ManualClock(1), inbox_interval=None, ship=options).close()
        except (HistoryMismatch, StoreUnavailable):
            self.counts["strangers refused"] += 1
        else:
            raise Wrong("another queue of the same name has got the log")

    def _is_newest(self, machine: Machine) -> bool:
        """Whether the log's last FENCE is that of a machine whose opening was given up."""
        state = log_of(self.store.objects, QUEUE)
        file = opened.read_ship_file(machine.disk.directory(FOLDER), QUEUE)
        return file is not None and state.header is not None and state.header.nonce in file.nonces

    def open_queues(self) -> Iterable[tuple[JournaledQueue, CrashingDisk]]:
        return ((each.queue, each.disk) for each in self.machines if each.queue is not None)

    # -- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        items = self.in_log()
        for item_id, data in items.items():
            if self.given.get(item_id) != data and item_id not in self.in_doubt:
                raise Wrong(f"item {item_id} in the log is not what was put")
        for machine in self.machines:
            shipped = [item_id in self.was_in_log for item_id in machine.given]
            if not shipped == sorted(shipped, reverse=True):
                raise Wrong(f"there is a hole in the log: {machine.given}, {shipped}")
            for item_id, future in machine.futures.items():
                if future.done() and future.exception() is None:
                    self.acknowledged.add(item_id)
        states = log_of(self.store.objects, QUEUE).checkpoints
        for item_id in (self.acknowledged | self.was_in_log.keys()) - items.keys():
            if (
                item_id not in self.was_in_log
                or not states
                or not all(is_done(each, item_id) for each in states.values())
            ):
                raise Wrong(f"item {item_id} was acknowledged or in the log, and is not there")
        for name, state in states.items():
            undone = [each for each in items if is_done(state, each) and each not in self.done]
            if undone:
                raise Wrong(f"by its state in the log, reader {name!r} has done {undone}, and it has not")
        self.counts["checks"] += 1

    def finish(self) -> None:
        """The store gets well. A restored queue has what is in the log, and its reader what it has not done."""
        self.store.before_request = lambda request: Fault.NONE
        self.store.clock.advance(10_000)
        for machine in self.machines:
            if machine.queue is not None:
                machine.kill(power_cut=False)
        self._at_request = -1
        self.check()
        state = log_of(self.store.objects, QUEUE)
        if not state.slot:
            return
        disk, items = CrashingDisk(), self.in_log()
        restore(self.store.client("last"), QUEUE, FOLDER, disk=disk)
        with JournaledQueue(FOLDER, QUEUE, disk=disk, clock=ManualClock(1), inbox_interval=None, ship=False) as queue:
            saved = state.checkpoints.get("")
            due = [each for each in sorted(items) if saved is None or not is_done(saved, each)]
            got = []
            with contextlib.suppress(QueueEmpty):
                while True:
                    item = queue.get(block=False)
                    got.append(item.id)
                    if item.data != items[item.id]:
                        raise Wrong(f"item {item.id} was restored as something else")
            if got != due:
                raise Wrong(f"the restored reader gets {got}, and is to get {due}")
        self.counts["restored at the end"] += 1


class EagerReaders(World):
    """A world in which all is read and committed at once, and little is shipped."""

    def _happen(self, machine: Machine, *, may_move: bool = True) -> None:
        if machine.queue is None or self.random.random() < 0.2:
            super()._happen(machine, may_move=may_move)
            return
        machine.put()
        machine.read()
        machine.read()
        with contextlib.suppress(Fenced):
            machine.queue.checkpoint(durable=True)


class LeasedOwners(World):
    """A world in which owners have a lease, and requests take their time. Who takes the queue over waits for that."""

    def draw_lease(self) -> float | None:
        return self.random.choice((6.0, 12.0, 12.0))

    def pass_time(self) -> None:
        Clock.seconds += self.random.choice((0.0, 0.0, 0.1, 1.0, 4.0))

    def move(self) -> None:
        """The old owner lives on meanwhile: at its pace, or slowly, so that it hears late of what was decided; or it is
        cut off.
        """
        old, pace = self.current, self.random.choice((0.0, 0.25, 0.9))

        def live_on() -> None:
            if old.queue is not None and self.random.random() < pace:
                Clock.while_waiting = bool
                with self._maybe_killed(old):
                    self._live(old, is_slow=pace < 0.5)
                Clock.while_waiting = live_on

        Clock.while_waiting = live_on
        try:
            super().move()
        finally:
            Clock.while_waiting = bool
        if old.queue is not None:
            with self._maybe_killed(old):
                old.put()  # at the first moment at which another one may have the queue

    def _happen(self, machine: Machine, *, may_move: bool = True) -> None:
        if may_move and self.random.random() < 0.04:
            self.move()
        else:
            super()._happen(machine, may_move=may_move)

    def _live(self, old: Machine, *, is_slow: bool) -> None:
        if not is_slow:
            self._happen(old, may_move=False)
        elif self.random.random() < 0.7:
            old.step(1)
        else:
            old.put()


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """While this lasts, shipping has no thread and no pause."""

    def pause(seconds: float) -> None:
        Clock.seconds += seconds
        Clock.while_waiting()

    def close(self: Shipper) -> None:
        self._is_closing, self._deadline = True, Clock.seconds + 3.0
        try:
            if not getattr(self, "_is_lost", False):
                self._ship()
        except SlotTaken as taken:
            self._be_fenced(taken)
        except shipper._GivenUp:
            return
        finally:
            self.release()

    with (
        patch.object(shipper, "SystemClock", Clock),
        patch.object(opened, "SystemClock", Clock),
        patch.object(gatekeeper, "SystemClock", Clock),
        patch.object(lease, "SystemClock", Clock),
        patch.object(opened, "pause", pause),
        patch.object(Shipper, "start", lambda self: None),
        patch.object(Shipper, "close", close),
        patch.object(Shipper, "_answer", answer_of),
        patch.object(Shipper, "_wait", lambda self, seconds: pause(seconds)),
        patch.object(reading, "PAUSES", (0.0, 0.0, 0.0)),
    ):
        yield


class Explored(Protocol):
    """A world with a store, and queues on disks: ``World`` here, and the one of the inbox."""

    counts: Counter[str]
    store: SimulatedStore

    def run(self, steps: int) -> None: ...

    def open_queues(self) -> Iterable[tuple[JournaledQueue, CrashingDisk]]: ...


def explore(seed: int, count: int, *, steps: int = 60, make: Callable[[int], Explored] = World) -> Counter[str]:
    """Run ``count`` worlds; returns what happened in them. Raises ``Wrong``, with the seed in a note."""
    counts: Counter[str] = Counter()
    with single_threaded():
        for number in range(count):
            world = make(seed + number)
            try:
                world.run(steps)
            except BaseException as error:
                error.add_note(f"seed {seed + number}")
                raise
            finally:
                for queue, disk in list(world.open_queues()):
                    bury(queue, disk)
            counts += world.counts
            counts["requests"] += world.store.requests
    return counts
