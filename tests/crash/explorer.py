"""An explorer of crash states: seeded workloads, and a check of what crashes in the middle of them may leave.

Before changes that a workload makes to the disk, the disk is cloned; each clone is a crash to be looked at
(``crashes.py``), and what comes out is held against the promises of docs/guarantees.md. All follows from one seed.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from kestrelpy import KestrelError
from kestrelpy._journal import journal, segment
from kestrelpy.testing import CrashingDisk
from tests.crash.crashes import Crashes
from tests.crash.promise import BrokenPromise, Promise
from tests.crash.recovered import abandon_all
from tests.crash.workload import Style, Workload
from tests.support.queues import Sync

SYNCS: tuple[Sync, ...] = ("always", 0.1, "never")
OFTEN = {"store": 0.1, "write": 0.3, "grow": 0.2}
"""Operations of which there are many: how likely a crash before one of them is looked at, and 0.6 for all others. What
a rare operation did shows before the one that follows, so that one counts as rare as well."""


class Explorer:
    """Runs workloads and checks crash states until ``limit`` of them are seen.

    ``points``: crashes looked at in one workload; other options are those of ``Crashes``, which counts the states.
    """

    def __init__(
        self,
        seed: int,
        limit: int,
        *,
        syncs: tuple[Sync, ...] = SYNCS,
        style: Style | None = None,
        points: int = 25,
        **how: Any,
    ) -> None:
        self.seed = seed
        self.limit = limit
        self.syncs = syncs
        self.style = style if style is not None else Style()
        self.points = points
        self.crashes = Crashes(**how)

    @property
    def states(self) -> int:
        return self.crashes.states

    @property
    def counts(self) -> Counter[str]:
        return self.crashes.counts

    def run(self) -> None:
        """Raises ``BrokenPromise``."""
        seed = self.seed
        with collecting_seldom():
            while self.states < self.limit:
                for sync in self.syncs:
                    if self.states < self.limit:
                        self.run_one(seed, sync)
                seed += 1
                if seed % 20 == 0:
                    gc.collect()

    def run_one(self, seed: int, sync: Sync) -> None:
        """One workload and its crash points; in every second one items are large from a few hundred bytes on. Raises
        ``BrokenPromise``.
        """
        with large_items_from(500) if seed % 2 else nullcontext():
            self._run_one(seed, sync)

    def _run_one(self, seed: int, sync: Sync) -> None:
        choose = random.Random(f"{seed} {sync}")
        points: list[tuple[CrashingDisk, Promise]] = []
        rare = False

        def watch() -> None:
            nonlocal rare
            was_rare = rare
            chance = OFTEN.get(workload.disk.next_operation[0], 0.6)
            rare = chance == 0.6
            if choose.random() < (0.6 if was_rare else chance):
                # Half of the time a part of the store under way is there.
                part = choose if choose.random() < 0.5 else None
                points.append((workload.disk.after_kill(part), workload.snapshot()))

        workload = Workload(seed, sync, self.style, watch)
        where = f"seed {seed}, sync {sync!r}"
        try:
            workload.run()
        except (AssertionError, KestrelError, OSError) as error:
            raise BrokenPromise(f"{where}: the workload itself: {error!r}") from error
        workload.disk.before_operation = None
        for at in sorted(choose.sample(range(len(points)), min(len(points), self.points))):
            disk, promise = points[at]
            try:
                self.crashes.look_at(workload.setting, disk, promise, choose)
            except BrokenPromise as broken:
                raise BrokenPromise(f"{where}, point {at}, {broken}") from broken


@contextmanager
def large_items_from(size: int) -> Iterator[None]:
    """Items of so many bytes are written and read as large ones."""
    with (
        patch.object(journal, "LARGE_BYTES", size),
        patch.object(segment, "READ_BYTES", size),
        patch.object(segment, "PEEK_BYTES", size // 2),
    ):
        yield


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Queues are made by the thousand here, and each is a cycle: the collector runs when it is told to."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        abandon_all()
        gc.collect()
        if enabled:
            gc.enable()


def run(seed: int, limit: int) -> Counter[str]:
    """``limit`` states or a few more, from workloads that no other seed brings. Raises ``BrokenPromise``."""
    explorer = Explorer(seed * 1_000_000, limit)
    explorer.run()
    return explorer.counts
