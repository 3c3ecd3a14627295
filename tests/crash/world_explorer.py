"""What explorers of worlds have in common: worlds that run on a disk that may crash, and how their crash states are
found and judged.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from kestrelpy import KestrelError
from kestrelpy.testing import CrashingDisk, FailingDisk
from kestrelpy.testing._choices import Corner, Leaning
from tests.crash.explorer import collecting_seldom
from tests.crash.promise import BrokenPromise
from tests.crash.recovered import MODELS

Truth = TypeVar("Truth", bound="Copied")
W = TypeVar("W", bound="CrashingWorld[Any]")


class Copied(Protocol):
    """What was promised so far."""

    def copy(self) -> Copied: ...


class CrashingWorld(Generic[Truth]):
    """One run, on a disk of its own. ``watch`` is called before each operation on the disk. ``truth``: what was
    promised so far.
    """

    truth: Truth

    def __init__(self, watch: Callable[[], None]) -> None:
        self.watch = watch
        self._use(CrashingDisk())

    def _use(self, disk: CrashingDisk) -> None:
        self.disk = disk
        self.failing = FailingDisk(disk)
        disk.before_operation = self.watch

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Nothing fails, and nobody watches."""
        was, self.failing._error = self.failing._error, 0
        watch, self.disk.before_operation = self.disk.before_operation, None
        try:
            yield
        finally:
            self.failing._error = was
            self.disk.before_operation = watch

    def run(self) -> None:
        raise NotImplementedError


class WorldExplorer(Generic[W, Truth]):
    """Runs worlds and judges crash states until ``limit`` of them are seen.

    ``failing``: how likely a disk fails. ``points``: crashes looked at in one world; ``samples``: power cuts at each.
    ``nested``: how likely the owners who find a state are crashed, too.
    """

    often: ClassVar[Mapping[str, float]]
    """How often a crash before an operation of this kind is looked at; 0.35 for others. ``eagerness`` scales them."""
    eagerness: ClassVar[float]
    raised: ClassVar[str]
    """The invariant that an error breaks."""

    def __init__(self, seed: int, limit: int, *, failing: float, points: int, nested: float, samples: int) -> None:
        self.seed = seed
        self.limit = limit
        self.failing = failing
        self.points = points
        self.nested = nested
        self.samples = samples
        self.counts: Counter[str] = Counter()

    def make(self, seed: int, watch: Callable[[], None]) -> W:
        raise NotImplementedError

    def judge(self, disk: CrashingDisk, world: W, truth: Truth, choose: random.Random, *, power: bool) -> None:
        """Open what was left, and hold it against what was promised."""
        raise NotImplementedError

    def dying_owners(self, disk: CrashingDisk, world: W, choose: random.Random) -> list[CrashingDisk]:
        """Owners open what was left, and die: what some of these deaths leave."""
        raise NotImplementedError

    def let_go(self) -> None:
        """Let go of what a broken promise has left open. Nothing, unless a subclass has such things."""

    def run(self) -> None:
        """Raises ``BrokenPromise``."""
        with collecting_seldom():
            try:
                self._run_all()
            finally:
                self.let_go()

    def _run_all(self) -> None:
        seed = self.seed
        while self.counts.total() < self.limit:
            try:
                self._run_one(seed)
            except BrokenPromise as broken:
                raise BrokenPromise(f"world {seed}: {broken}") from broken
            except (KestrelError, OSError) as error:
                raise BrokenPromise(f"world {seed}: {self.raised} raised {error!r}") from error
            seed += 1

    def _run_one(self, seed: int) -> None:
        choose = random.Random(~seed)
        left = self.points

        def watch() -> None:
            nonlocal left
            often = self.often.get(world.disk.next_operation[0], 0.35)
            if left and choose.random() < often * self.eagerness:
                left -= 1
                self._look_at(world, choose)

        world = self.make(seed, watch)
        world.run()
        world.disk.before_operation = None
        self._look_at(world, choose)

    def _look_at(self, world: W, choose: random.Random) -> None:
        failed, truth = world.failing.failures > 0, world.truth.copy()
        self._judge("kill", world.disk.after_kill(choose), world, truth, choose, power=failed)
        for at in range(self.samples):
            model = choose.choice(MODELS)
            state = world.disk.after_power_cut(Leaning(choose) if at else Corner(last=False), model)
            self._judge(model.name, state, world, truth, choose, power=True)

    def _judge(
        self,
        kind: str,
        disk: CrashingDisk,
        world: W,
        truth: Truth,
        choose: random.Random,
        *,
        power: bool,
        depth: int = 2,
    ) -> None:
        self.counts[kind] += 1
        try:
            if depth and choose.random() < self.nested:
                for point in self.dying_owners(disk, world, choose):
                    cut = choose.random() < 0.6
                    state = point.after_power_cut(Leaning(choose), choose.choice(MODELS)) if cut else point
                    self._judge("in an owner", state, world, truth, choose, power=power or cut, depth=depth - 1)
            else:
                self.judge(disk, world, truth, choose, power=power)
        except BrokenPromise as broken:
            raise BrokenPromise(f"{kind}: {broken}") from broken
        except (KestrelError, OSError) as error:
            raise BrokenPromise(f"{kind}: {self.raised} raised {error!r}") from error
