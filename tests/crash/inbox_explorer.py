"""An explorer of crash states of the inbox: before operations on the disk, what a kill or a power cut would leave is
taken in by a new owner, and held against the ledger; owners are crashed in that, too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import ClassVar

from kestrelpy.testing import CrashingDisk, PowerModel
from tests.crash.explorer import collecting_seldom
from tests.crash.inbox_world import Habit, Ledger, World, judge, open_queue
from tests.crash.world_explorer import WorldExplorer


class InboxExplorer(WorldExplorer[World, Ledger]):
    """The worlds are those of ``style``."""

    often: ClassVar = {"store": 0.15, "write": 0.5, "grow": 0.2}
    eagerness = 0.5
    raised = "(f)"

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
        super().__init__(seed, limit, failing=failing, points=points, nested=nested, samples=samples)
        self.style = style if style is not None else Habit()

    def make(self, seed: int, watch: Callable[[], None]) -> World:
        return World(seed, watch, self.style, failing=self.failing)

    def judge(self, disk: CrashingDisk, world: World, truth: Ledger, choose: random.Random, *, power: bool) -> None:
        judge(disk, world.sync, truth, power=power, then=choose if choose.random() < 0.4 else None)

    def dying_owners(self, disk: CrashingDisk, world: World, choose: random.Random) -> list[CrashingDisk]:
        points: list[CrashingDisk] = []
        middle: list[CrashingDisk] = []  # those while a batch is on its way, of which there are few
        opening = disk.after_kill()

        def note() -> None:
            kind, _ = opening.next_operation
            (middle if kind in ("store", "write", "sync") else points).append(opening.after_kill(choose))

        opening.before_operation = note
        queue = open_queue(opening, world.sync)
        queue.take_in()
        queue.close()
        opening.before_operation = None
        return choose.sample(points, min(2, len(points))) + choose.sample(middle, min(3, len(middle)))


def exhaust(limit: int) -> Counter[str]:
    """Every crash of one case, and up to ``limit`` power cuts at each operation: an owner takes in a batch without an
    app_id; then one whose publisher has died before its name was on disk; then another one. Raises ``BrokenPromise``.
    """
    counts: Counter[str] = Counter()

    def watch() -> None:
        kill = world.disk.after_kill()
        judge(kill, world.sync, world.truth, power=False)
        counts["kill"] += 1
        for model in (PowerModel.EXT4, PowerModel.ANY):
            for state in world.disk.power_states(model, limit):
                judge(state, world.sync, world.truth, power=True)
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
