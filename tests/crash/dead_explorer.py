"""An explorer of crash states of moves: before operations on the disk, what a kill or a power cut would leave is opened
by new owners of both queues, and held against what was promised; owners are crashed in that, too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import ClassVar

from kestrelpy.testing import CrashingDisk
from tests.crash.dead_world import DeadWorld, Habits, Known, judge, leave_readers, read_both
from tests.crash.world_explorer import WorldExplorer


class DeadExplorer(WorldExplorer[DeadWorld, Known]):
    """The worlds are those of ``habits``."""

    often: ClassVar = {"store": 0.1, "write": 0.5, "grow": 0.2}
    eagerness = 0.4
    raised = "(d)"

    def __init__(
        self,
        seed: int,
        limit: int,
        *,
        failing: float = 0.3,
        points: int = 25,
        nested: float = 0.25,
        samples: int = 2,
        habits: Habits | None = None,
    ) -> None:
        super().__init__(seed, limit, failing=failing, points=points, nested=nested, samples=samples)
        self.habits = habits if habits is not None else Habits()

    def make(self, seed: int, watch: Callable[[], None]) -> DeadWorld:
        return DeadWorld(seed, watch, self.habits, failing=self.failing)

    def judge(self, disk: CrashingDisk, world: DeadWorld, truth: Known, choose: random.Random, *, power: bool) -> None:
        judge(disk, world.sync, truth, world.name, power=power, choose=choose)

    def let_go(self) -> None:
        leave_readers()

    def dying_owners(self, disk: CrashingDisk, world: DeadWorld, choose: random.Random) -> list[CrashingDisk]:
        points: list[CrashingDisk] = []
        opening = disk.after_kill()
        every = choose.randrange(1, 8)
        step = 0

        def note() -> None:
            nonlocal step
            step += 1
            if step % every == 0:
                points.append(opening.after_kill(choose))

        opening.before_operation = note
        read_both(opening, world.sync, world.name, choose)
        opening.before_operation = None
        return choose.sample(points, min(4, len(points)))


def run(seed: int, limit: int) -> Counter[str]:
    """``limit`` states or a few more, from worlds that no other seed brings. Raises ``BrokenPromise``."""
    explorer = DeadExplorer(seed * 1_000_000, limit)
    explorer.run()
    return explorer.counts
