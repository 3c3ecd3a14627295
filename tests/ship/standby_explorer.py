"""Worlds as in ``owner_explorer``, in which standbys follow the owner, take it over, and are followed in their turn.

Each of three machines is an owner, or a standby, or the old owner who comes back and becomes a standby. Nobody is
restored: what a machine has, it has got by following. A standby may look seldom, so that garbage is collected below
its feet; it is killed, and its power is cut, between any two operations of its disk. What an old owner has set aside
must be all that it had not shipped, and must never come to the log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal
from unittest.mock import patch

from kestrelpy import JournaledQueue, QueueClosed, QueueEmpty, scan
from kestrelpy._process import forget
from kestrelpy.ship import (
    Fenced,
    HistoryMismatch,
    NoSuchQueue,
    Ship,
    Standby,
    StoreDamaged,
    StoreUnavailable,
    orphans,
    standby,
)
from kestrelpy.testing import ManualClock
from kestrelpy.testing.stores import Fault
from tests.ship import owner_explorer
from tests.ship.in_store import log_of
from tests.ship.owner_explorer import FOLDER, QUEUE, Machine, World, Wrong, is_done

MACHINES = 3
ACKS: tuple[Literal["disk", "shipped"], ...] = ("disk", "shipped")
OPEN_IT = "open it with ship="


class Interleaved(Standby):
    """A standby that lets others do something just before it opens the queue."""

    world: StandbyWorld
    machine: StandbyMachine

    def _open(self, following: Any, options: dict[str, Any]) -> JournaledQueue:
        self.world.meanwhile(self.machine)
        return super()._open(following, options)


class StandbyMachine(Machine):
    """``stands_by``: its files follow the log. ``standby``: the process that does it, if there is one."""

    world: StandbyWorld

    def __init__(self, world: StandbyWorld, name: str) -> None:
        super().__init__(world, name)
        self.standby: Interleaved | None = None
        self.stands_by = False
        self.lost_power = False
        self.known: set[str] = set()
        """The folders of what was set aside here, as far as they were checked."""

    def open(self, *, is_copy: bool = False) -> bool:
        try:
            return super().open(is_copy=is_copy)
        except (Fenced, HistoryMismatch):
            if not self.world.is_taken_from(self):
                raise
            self.world.counts["openings refused"] += 1
            return False

    # -- as a standby ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        made = Interleaved(FOLDER, QUEUE, self.world.store.client(self.name), disk=self.disk)
        made.world, made.machine = self.world, self
        made._its.follower._elapsed = self.world.store.clock.monotonic
        self.standby, self.has_files = made, True

    def look(self) -> bool:
        """Look at the log. Returns whether there was something."""
        assert self.standby is not None
        try:
            more = self.standby._its._look(surely=self.world.random.random() < 0.3)
        except (StoreUnavailable, NoSuchQueue):
            self.world.counts["looks not answered"] += 1
            return True
        except StoreDamaged:  # collected between two of its requests; at the end it must be well
            self.world.counts["looks overtaken"] += 1
            return True
        except HistoryMismatch as error:
            self.go_back(error)
            return False
        self.world.counts["looks"] += 1
        self.check_orphans()
        return more

    def go_back(self, error: HistoryMismatch) -> None:
        """It is the owner after all: what it has not shipped, it will ship."""
        if OPEN_IT not in str(error) or not self.world.is_newest(self):
            raise error
        self.world.counts["owners after all"] += 1
        self.leave()
        self.stands_by, self.is_over = False, False

    def take_over(self) -> None:
        assert self.standby is not None
        world = self.world
        world.clock = ManualClock(1_700_000_000_000 + world.random.randrange(10**6))
        acks = world.random.choice(ACKS)
        self.acks = acks
        ship = Ship(
            world.store.client(self.name), acks=acks, interval=0, chunk_bytes=64 << 10, close_timeout=3.0,
            manifest_interval=world.random.choice((0.5, 1e9)),
        )  # fmt: skip
        sync = world.random.choice((0.1, "never"))
        try:
            queue = self.standby.take_over(
                force=True, ship=ship, segment_bytes=4096, sync=sync, inbox_interval=None, clock=world.clock
            )
        except (StoreUnavailable, NoSuchQueue):
            world.counts["takeovers given up"] += 1
        except StoreDamaged:
            world.counts["looks overtaken"] += 1
        except Fenced:
            world.counts["takeovers lost"] += 1
        except HistoryMismatch as error:
            self.go_back(error)
        else:
            self.check_orphans()
            self.queue, self.standby, self.stands_by, self.is_over = queue, None, False, False
            self.given = []
            world.counts["takeovers"] += 1
            world.now_owner(self)

    def leave(self) -> None:
        """Close the standby."""
        assert self.standby is not None
        self.standby.close()
        self.standby = None

    def let_go(self) -> None:
        """The process of the standby is dead."""
        gone, self.standby = self.standby, None
        if gone is not None:
            gone._its.end(QueueClosed("it is dead"), "closed")
            forget(gone)

    def kill(self, *, power_cut: bool) -> None:
        self.let_go()
        self.lost_power |= power_cut
        super().kill(power_cut=power_cut)

    def check_orphans(self) -> None:
        """What was set aside here is what the queue here had not shipped."""
        self.world.in_log()
        for found in orphans(FOLDER, QUEUE, disk=self.disk):
            if found.path in self.known:
                continue
            self.known.add(found.path)
            world = self.world
            there = {
                record.id: record.data for record in scan(found.path, QUEUE, start_id=found.first_id, disk=self.disk)
            }
            due = [each for each in self.given if each not in world.was_in_log]
            kept = [each for each in due if each in there]
            if kept != (due[: len(kept)] if self.lost_power else due):
                raise Wrong(f"{due} was not shipped, and {sorted(there)} was set aside")
            if any(there[each] != world.given[each] for each in kept):
                raise Wrong("an item was set aside as something else")
            if there.keys() & world.was_in_log.keys():
                raise Wrong(f"{sorted(there)} was set aside, and some of it is in the log")
            world.set_aside |= there.keys()
            world.counts["items set aside"] += len(kept)
            self.given = []
        if not self.lost_power and any(each not in self.world.was_in_log for each in self.given):
            raise Wrong(f"of {self.given} some were not shipped, and nothing was set aside")
        self.given, self.lost_power = [], False


class StandbyWorld(World):
    """A store, its machines, and what truly happened."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.set_aside: set[int] = set()
        self.busy: set[str] = set()
        """Machines that are in the middle of a takeover."""
        self.machines: list[StandbyMachine] = [  # type: ignore[assignment]
            StandbyMachine(self, f"m{number}") for number in range(MACHINES)
        ]
        self.current = self.machines[0]

    # -- who has the log ---------------------------------------------------------------------------------------------

    def is_newest(self, machine: Machine) -> bool:
        """Whether the log's last FENCE is that of a machine."""
        try:
            return self._is_newest(machine)
        except FileNotFoundError:
            return False

    def is_taken_from(self, machine: Machine) -> bool:
        if not machine.is_over and any(self.is_newest(each) for each in self.machines if each is not machine):
            machine.is_over = True  # by a FENCE that was in doubt
        return machine.is_over

    def now_owner(self, machine: Machine) -> None:
        """This one has the log's last FENCE."""
        for each in self.machines:
            if each is not machine and each.has_files and not each.stands_by:
                each.is_over = True
        self.current = machine

    # -- what happens ------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        try:
            super().run(steps)
        finally:
            for machine in self.machines:
                machine.let_go()

    def _happen(self, machine: Machine, *, may_move: bool = True) -> None:
        assert isinstance(machine, StandbyMachine)
        if machine.stands_by:
            self._stand_by(machine)
        elif machine is not self.current and not machine.has_files:
            machine.stands_by = bool(log_of(self.store.objects, QUEUE).slot)
        elif machine.queue is None and machine.has_files and self.random.random() < (0.6 if machine.is_over else 0.05):
            machine.stands_by = True  # the old owner comes back; or this one stands by, although nobody took it over
        else:
            super()._happen(machine, may_move=False)

    def _stand_by(self, machine: StandbyMachine) -> None:
        if machine.standby is None:
            machine.begin()
        chance = self.random.random()
        if chance < 0.75:
            machine.look()
        elif chance < 0.85:
            self._take_over(machine)
        elif chance < 0.90:
            machine.kill(power_cut=self.random.random() < 0.5)
        elif chance < 0.93:
            machine.leave()
        else:
            self.clock.advance(1.0)
            self.store.clock.advance(self.random.choice((1, 120)))

    def _take_over(self, machine: StandbyMachine) -> None:
        machine.take_over()
        if machine.queue is None and self.is_newest(machine):
            self.now_owner(machine)

    def meanwhile(self, machine: StandbyMachine) -> None:
        """Just before a machine opens the queue that it takes over, others go on, and one may be quicker."""
        self.busy.add(machine.name)
        for _ in range(self.random.choice((0, 0, 1, 5))):
            others = [each for each in self.machines if each.name not in self.busy]
            other = self.random.choice(others or [machine])
            if other.queue is not None:
                super()._happen(other, may_move=False)
            elif others and other.standby is not None and self.random.random() < 0.3:
                self._take_over(other)
            self._at_request = -1
        self.busy.discard(machine.name)

    @contextlib.contextmanager
    def _maybe_killed(self, machine: Machine) -> Iterator[None]:
        with super()._maybe_killed(machine):
            yield
        self.busy.clear()
        if machine.queue is None and self.is_newest(machine):
            self.now_owner(machine)  # killed in the middle of its takeover

    # -- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        merged = self.set_aside & self.was_in_log.keys()
        if merged:
            raise Wrong(f"items {sorted(merged)} were set aside, and are in the log")

    def finish(self) -> None:
        """Every machine can follow to the end. It has what is in the log, and takes it over with that."""
        self.store.before_request = lambda request: Fault.NONE
        for machine in self.machines:
            if machine.standby is not None:
                machine.kill(power_cut=self.random.random() < 0.5)
        super().finish()
        if not log_of(self.store.objects, QUEUE).slot:
            return
        for machine in self.machines:
            if machine.stands_by or machine.is_over:
                self._follow_to_end(machine)

    def _follow_to_end(self, machine: StandbyMachine) -> None:
        self._at_request = -1
        items, state = self.in_log(), log_of(self.store.objects, QUEUE)
        machine.stands_by = True
        machine.begin()
        assert machine.standby is not None
        for _ in range(200):
            if not machine.look():
                break
        if machine.standby is None:
            return
        its = machine.standby._its
        if its.follower.slot != state.slot:
            raise Wrong(f"{machine.name} has come to slot {its.follower.slot}, and the log to {state.slot}")
        there = {record.id: record.data for record in scan(FOLDER, QUEUE, disk=machine.disk)}
        heads = [each.head for each in state.checkpoints.values()] or [0]
        due = {key: data for key, data in items.items() if key > min(heads)}
        if not (there.items() <= items.items() and due.keys() <= there.keys()):
            raise Wrong(f"{machine.name} has {sorted(there)}, and {sorted(items)} is in the log")
        machine.leave()
        disk = machine.disk.after_kill()
        with JournaledQueue(FOLDER, QUEUE, disk=disk, clock=ManualClock(1), inbox_interval=None, ship=False) as queue:
            saved, got = state.checkpoints.get(""), []
            with contextlib.suppress(QueueEmpty):
                while True:
                    got.append(queue.get(block=False).id)
        if got != [each for each in sorted(items) if saved is None or not is_done(saved, each)]:
            raise Wrong(f"the reader of {machine.name} gets {got}")
        self.counts["followed to the end"] += 1


@contextlib.contextmanager
def without_threads() -> Iterator[None]:
    with patch.object(standby._Following, "start", lambda self: None):
        yield


def explore(seed: int, count: int, *, steps: int = 80) -> Any:
    """As ``owner_explorer.explore``, of these worlds."""
    with without_threads():
        return owner_explorer.explore(seed, count, steps=steps, make=StandbyWorld)
