"""Small cases, exhausted: every sequence of a few steps, a crash before every operation of its last step and behind it,
and every state that each model of a power cut allows there.

What the steps before the last one may leave was seen in shorter sequences. Where a model allows more than ``EVERY``
states, the corners and samples of them are looked at (``CrashingDisk.power_states``).
"""

from __future__ import annotations

import gc
import itertools
import random
from collections import Counter
from collections.abc import Iterator

from kestrelpy import KestrelError
from kestrelpy.testing import CrashingDisk
from tests.crash.crashes import Crashes
from tests.crash.explorer import collecting_seldom
from tests.crash.promise import BrokenPromise, Promise
from tests.crash.recovered import read_all
from tests.crash.workload import Style, Workload
from tests.support.queues import Sync

EVERY = 40
PARTS = 8
"""Into how many parts the sequences of three steps are divided, for those who run them beside each other."""
SYNCS: tuple[Sync, ...] = ("always", "never")
STEPS = "pPmscCkrxz"
STYLE = Style(segment_bytes=(4096,), archive=0, other_mount=0, detached=0, failing=0, starts_with_default=0, expiring=0)
IDLE_AT_FIRST = "scCk"
"""Steps that do nothing before the first put."""


class Steps(Workload):
    """A workload of given steps, each one letter."""

    def take(self, steps: str) -> None:
        for step in steps:
            self._do(
                {
                    "p": lambda: self._store([b"%d" % self.promise.tail_id]),
                    "P": lambda: self._store([bytes([self.promise.tail_id % 251]) * 1700]),
                    "m": lambda: self._store([b"one", b"and two" * 100]),
                    "s": self._sync,
                    "c": self._commit_one,
                    "C": self._commit_all,
                    "k": self._checkpoint_all,
                    "r": self._reopen,
                    "x": lambda: self._end(power=False),
                    "z": lambda: self._end(power=True),
                }[step]
            )

    def _commit_one(self) -> None:
        """The newest item, by one reader: out of order, if there are others."""
        opened = self.open_reads["left"]
        opened += read_all(self.readers["left"])
        if opened:
            item = opened.pop()
            self.promise.readers["left"].commit({item.id})
            self.readers["left"].commit(item)

    def _commit_all(self) -> None:
        """Everything, by both readers, and durably: segments are retired."""
        for name, reader in self.readers.items():
            items = self.open_reads[name]
            items += read_all(reader)
            self.promise.readers[name].commit({item.id for item in items})
            reader.commit_many(items)
            self.open_reads[name] = []
        self._checkpoint_all(durable=True)

    def _checkpoint_all(self, durable: bool = False) -> None:
        self.queue.checkpoint(durable)
        for name in self.readers:
            self.promise.readers[name].save(durable=durable)

    def begin(self) -> None:
        self._plant_foreign_files()
        self._use(self.disk)
        self._open()


def sequences(length: int) -> Iterator[str]:
    """Every sequence of so many steps that is worth a look."""
    for steps in itertools.product(STEPS, repeat=length):
        if length == 1 or steps[0] not in IDLE_AT_FIRST:
            yield "".join(steps)


class Small:
    """Counts the states of every sequence that it is given."""

    def __init__(self, every: int = EVERY) -> None:
        self.crashes = Crashes(every=every, nested=0.05, damage=0.05, lost=0.05, hostile=0.05)

    def run_one(self, steps: str, sync: Sync) -> None:
        """Raises ``BrokenPromise``."""
        points: list[tuple[CrashingDisk, Promise]] = []
        watching = False

        def watch() -> None:
            if watching:
                points.append((workload.disk.after_kill(), workload.snapshot()))

        workload = Steps(0, sync, STYLE, watch)
        where = f"steps {steps!r}, sync {sync!r}"
        try:
            workload.begin()
            workload.take(steps[:-1])
            watching = True
            workload.take(steps[-1])
            watch()
        except (AssertionError, KestrelError, OSError) as error:
            raise BrokenPromise(f"{where}: the workload itself: {error!r}") from error
        workload.leave()
        choose = random.Random(where)
        for at, (disk, promise) in enumerate(points):
            try:
                self.crashes.look_at(workload.setting, disk, promise, choose)
            except BrokenPromise as broken:
                raise BrokenPromise(f"{where}, point {at}, {broken}") from broken


def run(length: int, part: int = 0, parts: int = 1, limit: int = 1 << 62) -> Counter[str]:
    """Every ``parts``-th sequence of ``length`` steps, in both sync modes, or as many as it takes for ``limit`` states.

    Raises ``BrokenPromise``.
    """
    small = Small()
    with collecting_seldom():
        for at, steps in enumerate(itertools.islice(sequences(length), part, None, parts)):
            for sync in SYNCS:
                small.run_one(steps, sync)
            if at % 50 == 0:
                gc.collect()
            if small.crashes.states >= limit:
                break
    return small.crashes.counts
