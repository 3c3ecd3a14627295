"""An explorer of crash states: seeded workloads, and a check of every state that they may end in.

Before changes that a workload makes to the disk, the disk is cloned as a kill would leave it; of each clone there are
the states that a power cut may leave, one with a checkpoint lost, one with durable data damaged, and those that a
second crash leaves in the middle of the recovery. Each is recovered and drained; what comes out is held against the
promises of docs/guarantees.md. Everything follows from one seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

from promise import BrokenPromise, Promise
from recovered import MODELS, Setting, abandon_all, check, check_damaged, damage_a_record, drain, lose_checkpoint
from workload import Style, Workload

from kestrelpy import KestrelError
from kestrelpy.testing import CrashingDisk, PowerModel
from kestrelpy.testing._choices import Corner, Leaning

SYNCS = ("always", 0.1, "never")
OFTEN = {"store": 0.1, "write": 0.3, "grow": 0.2}
"""Operations of which there are many: how likely a crash before one of them is looked at, and 0.6 for all others. What
a rare operation did shows before the one that follows, so that one counts as rare as well."""


class Explorer:
    """Runs workloads and checks crash states until ``limit`` of them are seen.

    ``points``: crashes looked at in one workload. ``samples``: power cuts tried of each of them. ``nested``: how likely
    a recovery is itself crashed. ``states`` counts the states by their kind.
    """

    def __init__(
        self,
        seed: int,
        limit: int,
        *,
        syncs: tuple[float | str, ...] = SYNCS,
        style: Style | None = None,
        points: int = 25,
        samples: int = 3,
        nested: float = 0.15,
        damage: float = 0.15,
    ) -> None:
        self.seed = seed
        self.limit = limit
        self.syncs = syncs
        self.style = style if style is not None else Style()
        self.points = points
        self.samples = samples
        self.nested = nested
        self.damage = damage
        self.counts: Counter[str] = Counter()

    @property
    def states(self) -> int:
        return self.counts.total()

    def run(self) -> None:
        """Raises ``BrokenPromise``."""
        seed = self.seed
        try:
            while self.states < self.limit:
                for sync in self.syncs:
                    if self.states < self.limit:
                        self.run_one(seed, sync)
                seed += 1
        finally:
            abandon_all()

    def run_one(self, seed: int, sync: float | str) -> None:
        """One workload and its crash points. Raises ``BrokenPromise``."""
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
        for at in sorted(choose.sample(range(len(points)), min(len(points), self.points))):
            disk, promise = points[at]
            try:
                self._look_at(workload.setting, disk, promise, choose)
            except BrokenPromise as broken:
                raise BrokenPromise(f"{where}, point {at}, {broken}") from broken

    def _look_at(self, setting: Setting, disk: CrashingDisk, promise: Promise, choose: random.Random) -> None:
        self._check("kill", setting, disk.after_kill(), promise, choose, power=False)
        for model, state in self._power_cuts(disk, choose):
            self._check(model.name, setting, state, promise, choose, power=True)
        if choose.random() < 0.15:
            self._lose_checkpoint(setting, disk.after_kill(), promise, choose)
        if choose.random() < self.damage and not promise.failed:
            self._damage(setting, disk.after_kill(), promise, choose)

    def _power_cuts(self, disk: CrashingDisk, choose: random.Random) -> Iterator[tuple[PowerModel, CrashingDisk]]:
        """Everything lost, and samples; each state once."""
        seen: set[int] = set()
        for at in range(self.samples + 1):
            model = choose.choice(MODELS)
            state = disk.after_power_cut(Leaning(choose) if at else Corner(last=False), model)
            digest = state.digest()
            if digest not in seen:
                seen.add(digest)
                yield model, state

    def _check(
        self,
        kind: str,
        setting: Setting,
        disk: CrashingDisk,
        promise: Promise,
        choose: random.Random,
        *,
        power: bool,
    ) -> None:
        self.counts[kind] += 1
        try:
            if choose.random() < self.nested:
                self._crash_the_recovery(setting, disk, promise, choose, power=power)
            check(setting, disk, promise, choose, power=power)
        except (BrokenPromise, KestrelError, OSError) as broken:
            raise BrokenPromise(f"{kind}: {broken}") from broken

    def _crash_the_recovery(
        self, setting: Setting, disk: CrashingDisk, promise: Promise, choose: random.Random, *, power: bool
    ) -> None:
        """(R20) Crash points of a recovery, and of the opening of the readers, of a disk that has crashed before."""
        recovering = disk.after_kill()
        points: list[CrashingDisk] = []
        recovering.before_operation = lambda: points.append(recovering.after_kill(choose))
        drain(setting, recovering, promise, power=power)
        for point in choose.sample(points, min(2, len(points))):
            cut = choose.random() < 0.6
            state = point.after_power_cut(Leaning(choose), choose.choice(MODELS)) if cut else point
            self.counts["in recovery"] += 1
            try:
                check(setting, state, promise, choose, power=power or cut)
            except BrokenPromise as broken:
                raise BrokenPromise(f"then in its recovery, {'power' if cut else 'kill'}: {broken}") from broken

    def _lose_checkpoint(self, setting: Setting, disk: CrashingDisk, promise: Promise, choose: random.Random) -> None:
        promise = promise.copy()
        for reader in promise.readers.values():
            reader.lose_checkpoint()
        lose_checkpoint(disk, choose)
        self._check("lost checkpoint", setting, disk, promise, choose, power=False)

    def _damage(self, setting: Setting, disk: CrashingDisk, promise: Promise, choose: random.Random) -> None:
        if damage_a_record(disk, choose):
            self.counts["damaged"] += 1
            try:
                check_damaged(setting, disk, promise)
            except (BrokenPromise, KestrelError, OSError) as broken:
                raise BrokenPromise(f"damaged: {broken!r}") from broken
