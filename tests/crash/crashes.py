"""What one crash may leave: every state of it that is looked at is recovered and checked, and counted by its kind.

A state is one image of the disk after one end: a kill, a power cut by one of the models, one with a checkpoint lost or
damaged besides, and what a second end leaves: in the middle of the recovery, or after life went on for two more items.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kestrelpy import KestrelError
from kestrelpy.testing import CrashingDisk, PowerModel
from kestrelpy.testing._choices import Corner, Leaning
from tests.crash.core import glance
from tests.crash.promise import BrokenPromise, Promise
from tests.crash.recovered import (
    MODELS,
    Setting,
    check,
    check_damaged,
    check_hostile,
    check_looks,
    damage,
    drain,
    has_gap,
    lose_checkpoint,
)


class Image(NamedTuple):
    """What one end has left: the disk, what was promised before, and whether the power was cut.

    ``placed``: whether any reader's place is left. If none is, and a power cut then undoes some of the deletions of
    retired segments, nothing on the disk can tell what is missing from what was needed: that is refused, rightly.
    """

    setting: Setting
    disk: CrashingDisk
    promise: Promise
    power: bool
    placed: bool = True


@dataclass
class Crashes:
    """How to look at crashes, and what was seen.

    ``samples``: power cuts tried at each moment. ``every``: instead of samples, every state that each model allows,
    or so many of them if there are more. ``nested``, ``damage``, ``lost``, ``hostile``: how likely a recovery is itself
    crashed, a durable record or a checkpoint is damaged, and a disk that keeps no promise is tried. ``twice``: how
    likely what was recovered is recovered again before life goes on. ``within``: at how many places a recovery is
    crashed. ``whole``: how likely a state is looked at through a whole queue, which goes on then; otherwise the core
    alone recovers it. ``looks``: every so manieth state is looked at from outside before it is opened.
    """

    samples: int = 5
    every: int = 0
    nested: float = 0.15
    within: int = 4
    damage: float = 0.1
    lost: float = 0.1
    hostile: float = 0.1
    twice: float = 0.2
    whole: float = 0.25
    looks: int = 16
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def states(self) -> int:
        return self.counts.total()

    def look_at(self, setting: Setting, disk: CrashingDisk, promise: Promise, choose: random.Random) -> None:
        """Raises ``BrokenPromise``."""
        self._check("kill", Image(setting, disk.after_kill(), promise, power=False), choose)
        for model, state in self._every_cut(disk) if self.every else self._some_cuts(disk, choose):
            self._check(model.name, Image(setting, state, promise, power=True), choose)
        if choose.random() < self.lost:
            self._lose_checkpoint(setting, disk.after_kill(), promise, choose)
        if choose.random() < self.damage and not promise.failed:
            self._damage(setting, disk.after_kill(), promise, choose)
        if choose.random() < self.hostile:
            self.counts["HOSTILE"] += 1
            check_hostile(setting, disk.after_power_cut(Leaning(choose), PowerModel.HOSTILE), promise)

    def _some_cuts(self, disk: CrashingDisk, choose: random.Random) -> Iterator[tuple[PowerModel, CrashingDisk]]:
        """Everything lost, and samples; each state once."""
        seen: set[int] = set()
        for at in range(self.samples + 1):
            model = choose.choice(MODELS)
            state = disk.after_power_cut(Leaning(choose) if at else Corner(last=False), model)
            digest = state.digest()
            if digest not in seen:
                seen.add(digest)
                yield model, state

    def _every_cut(self, disk: CrashingDisk) -> Iterator[tuple[PowerModel, CrashingDisk]]:
        """All of them, up to the limit; each state once, whichever models allow it."""
        seen: set[int] = set()
        for model in MODELS:
            for state in disk.power_states(model, self.every):
                digest = state.digest()
                if digest not in seen:
                    seen.add(digest)
                    yield model, state

    def _check(self, kind: str, image: Image, choose: random.Random) -> None:
        try:
            if choose.random() < self.nested:
                self.counts[kind] += 1
                self._crash_the_recovery(image, choose)
            else:
                self._check_either(kind, image, choose)
        except (BrokenPromise, KestrelError, OSError) as broken:
            raise BrokenPromise(f"{kind}: {broken}") from broken

    def _check_either(self, kind: str, image: Image, choose: random.Random, *, least: int = 0) -> None:
        """Through a whole queue, or by the core alone."""
        setting, disk, promise, power, _ = image
        self.counts[kind] += 1
        if self.looks and self.states % self.looks == 0:
            check_looks(setting, disk)
        if choose.random() < self.whole:
            states = check(setting, disk, promise, choose, power=power, twice=self.twice, least=least)
            self.counts["after it went on"] += states - 1
            return
        found = glance(disk, promise, power=power, least=least)
        if choose.random() < self.twice:
            self.counts["recovered again"] += 1
            if (again := glance(disk, promise, power=power)) != found:
                raise BrokenPromise(f"(6) a second recovery gives {again}, not {found}")

    def _crash_the_recovery(self, image: Image, choose: random.Random, *, deeper: bool = True) -> None:
        """(R20) A recovery, and the opening of the readers, of a disk that has crashed before; and crashes in it."""
        setting, disk, promise, power, placed = image
        recovering = disk.after_kill()
        points: list[CrashingDisk] = []
        recovering.before_operation = lambda: points.append(recovering.after_kill(choose))
        tail_id = drain(setting, recovering, promise, power=power).tail_id
        recovering.before_operation = None
        for point in choose.sample(points, min(self.within, len(points))):
            cut = choose.random() < 0.6 and placed
            state = point.after_power_cut(Leaning(choose), choose.choice(MODELS)) if cut else point
            crashed = Image(setting, state, promise, power or cut, placed)
            try:
                if deeper and choose.random() < self.nested:  # and a crash in the recovery from that
                    self._crash_the_recovery(crashed, choose, deeper=False)
                least = tail_id if power or not cut else 0  # what was durable before, or is still seen
                self._check_either("in recovery", crashed, choose, least=least)
            except BrokenPromise as broken:
                raise BrokenPromise(f"then in its recovery, {'power' if cut else 'kill'}: {broken}") from broken

    def _lose_checkpoint(self, setting: Setting, disk: CrashingDisk, promise: Promise, choose: random.Random) -> None:
        promise = promise.copy()
        for reader in promise.readers.values():
            reader.lose_checkpoint()
        placed = lose_checkpoint(disk, choose)
        if not placed and has_gap(disk):  # nothing says that what is missing was retired: an opening is right to object
            return
        self._check("lost checkpoint", Image(setting, disk, promise, power=False, placed=placed), choose)

    def _damage(self, setting: Setting, disk: CrashingDisk, promise: Promise, choose: random.Random) -> None:
        if damage(disk, choose):
            self.counts["damaged"] += 1
            try:
                check_damaged(setting, disk, promise)
            except (BrokenPromise, KestrelError, OSError) as broken:
                raise BrokenPromise(f"damaged: {broken!r}") from broken
