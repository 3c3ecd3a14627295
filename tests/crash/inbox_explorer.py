"""An explorer of crash states of the inbox: before operations on the disk, what a kill or a power cut would leave is
taken in by a new owner, and held against the ledger; owners are crashed in that, too.
"""

from __future__ import annotations

import random
from collections import Counter

from kestrelpy import KestrelError
from kestrelpy.testing import CrashingDisk, PowerModel
from kestrelpy.testing._choices import Corner, Leaning
from tests.crash.explorer import collecting_seldom
from tests.crash.inbox_world import Habit, Ledger, World, judge, open_queue
from tests.crash.promise import BrokenPromise
from tests.crash.recovered import MODELS
from tests.support.queues import Sync

OFTEN = {"store": 0.15, "write": 0.5, "grow": 0.2}


class InboxExplorer:
    """Runs worlds and judges crash states until ``limit`` of them are seen.

    ``failing``: how likely a disk fails. ``points``: crashes looked at in one world; ``samples``: power cuts at each.
    ``nested``: how likely the owner who finds a state is crashed, too.
    """

    def __init__(
        self,
        seed: int,
        limit: int,
        *,
        failing: float = 0.3,
        points: int = 30,
        nested: float = 0.3,
        samples: int = 2,
        style: Habit | None = None,
    ) -> None:
        self.style = style if style is not None else Habit()
        self.seed = seed
        self.limit = limit
        self.failing = failing
        self.points = points
        self.nested = nested
        self.samples = samples
        self.counts: Counter[str] = Counter()

    @property
    def states(self) -> int:
        return self.counts.total()

    def run(self) -> None:
        """Raises ``BrokenPromise``."""
        with collecting_seldom():
            seed = self.seed
            while self.states < self.limit:
                try:
                    self._run_one(seed)
                except BrokenPromise as broken:
                    raise BrokenPromise(f"world {seed}: {broken}") from broken
                except (KestrelError, OSError) as error:
                    raise BrokenPromise(f"world {seed}: (f) raised {error!r}") from error
                seed += 1

    def _run_one(self, seed: int) -> None:
        choose = random.Random(~seed)
        left = self.points

        def watch() -> None:
            nonlocal left
            often = OFTEN.get(world.disk.next_operation[0], 0.35)
            if left and choose.random() < often * 0.5:
                left -= 1
                self._look_at(world, choose)

        world = World(seed, watch, self.style, failing=self.failing)
        world.run()
        world.disk.before_operation = None
        self._look_at(world, choose)

    def _look_at(self, world: World, choose: random.Random) -> None:
        failed, ledger = world.failing.failures > 0, world.ledger.copy()
        self._judge("kill", world.disk.after_kill(choose), world.sync, ledger, choose, power=failed)
        for at in range(self.samples):
            model = choose.choice(MODELS)
            state = world.disk.after_power_cut(Leaning(choose) if at else Corner(last=False), model)
            self._judge(model.name, state, world.sync, ledger, choose, power=True)

    def _judge(
        self,
        kind: str,
        disk: CrashingDisk,
        sync: Sync,
        ledger: Ledger,
        choose: random.Random,
        *,
        power: bool,
        depth: int = 2,
    ) -> None:
        self.counts[kind] += 1
        try:
            if depth and choose.random() < self.nested:
                self._crash_the_owner(disk, sync, ledger, choose, power=power, depth=depth)
            else:
                judge(disk, sync, ledger, power=power, then=choose if choose.random() < 0.4 else None)
        except BrokenPromise as broken:
            raise BrokenPromise(f"{kind}: {broken}") from broken

    def _crash_the_owner(
        self, disk: CrashingDisk, sync: Sync, ledger: Ledger, choose: random.Random, *, power: bool, depth: int
    ) -> None:
        """An owner opens what was left, and dies at every step of that."""
        points: list[CrashingDisk] = []
        middle: list[CrashingDisk] = []  # those while a batch is on its way, of which there are few
        opening = disk.after_kill()

        def note() -> None:
            kind, _ = opening.next_operation
            (middle if kind in ("store", "write", "sync") else points).append(opening.after_kill(choose))

        opening.before_operation = note
        queue = open_queue(opening, sync)
        queue.take_in()
        queue.close()
        opening.before_operation = None
        chosen = choose.sample(points, min(2, len(points))) + choose.sample(middle, min(3, len(middle)))
        for point in chosen:
            cut = choose.random() < 0.6
            state = point.after_power_cut(Leaning(choose), choose.choice(MODELS)) if cut else point
            self._judge("in an owner", state, sync, ledger, choose, power=power or cut, depth=depth - 1)


def exhaust(limit: int) -> Counter[str]:
    """Every crash of one case, and up to ``limit`` power cuts at each operation: an owner takes in a batch without an
    app_id; then one whose publisher has died before its name was on disk; then another one. Raises ``BrokenPromise``.
    """
    counts: Counter[str] = Counter()

    def watch() -> None:
        kill = world.disk.after_kill()
        judge(kill, world.sync, world.ledger, power=False)
        counts["kill"] += 1
        for model in (PowerModel.EXT4, PowerModel.ANY):
            for state in world.disk.power_states(model, limit):
                judge(state, world.sync, world.ledger, power=True)
                counts[model.name] += 1

    def is_named() -> bool:
        names = world.disk.folders["/data/inbox"].names
        return any(name.endswith(".batch") for name in names)

    with collecting_seldom():
        world = World(3, lambda: None, Habit(sizes=(2500,), apps=(None,), sync="never"))
        world.queue = open_queue(world.failing, world.sync)
        world._publish()
        world.watch = world.disk.before_operation = watch
        world._take_in()
        world.let_a_publisher_die(is_named)
        world._take_in()
        world._publish()
        world._take_in()
        world._close()
    return counts


def run(seed: int, limit: int) -> Counter[str]:
    """``limit`` states or a few more, from worlds that no other seed brings. Raises ``BrokenPromise``."""
    explorer = InboxExplorer(seed * 1_000_000, limit)
    explorer.run()
    return explorer.counts
