"""Errors of the disk under a work queue: a program of calls is run once unharmed, and then again with one of its
operations failing, or all from there on.

A call that raised has changed nothing, unless it raised ``DurabilityUnknown``; no job is lost; and while there is no
room, deletes go on. The letters are those of ``crash.py``.
"""

from __future__ import annotations

import contextlib
import errno
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from kestrelpy import DurabilityUnknown, KestrelError, QueueDiskFull
from kestrelpy.testing import CrashingDisk, FailingDisk
from kestrelpy.testing._choices import Leaning
from tests.work.crash import MODELS, BrokenPromise, Marks, Program, between, collecting_seldom, judge, marks, promised
from tests.work.model import Refused
from tests.work.pair import Pair, no_room

ERRORS = (errno.EIO, errno.ENOSPC)
NO_ROOM = frozenset({"grow"})
"""Operations that need room."""
CALLS = {
    "put": 8.0, "put_many": 2.0, "reserve": 8.0, "reserve_job": 2.0, "delete": 6.0, "release": 5.0, "bury": 4.0,
    "touch": 1.0, "kick": 0.0, "clear": 0.0, "close": 0.0, "kill": 0.0, "close_session": 0.0, "wait": 0.0,
    "advance": 3.0, "draw": 0.0,
}  # fmt: skip


class Failed(Exception):
    """The queue has failed for good, as a sync did."""


class FaultyPair(Pair):
    """The queue is asked before the model: if the disk fails it, the model is not asked."""

    failing: FailingDisk
    errors = 0
    durable = Marks()
    """What was there when the disk last said that all of it is on disk."""

    def both(self, real: Callable[[], Any], model: Callable[[], Any]) -> tuple[Any, Any] | None:
        try:
            found = real()
        except DurabilityUnknown:
            with contextlib.suppress(Refused):
                model()  # it may have happened
            raise Failed from None
        except OSError as error:
            self.tell(error)
            return None
        except KestrelError as error:
            self.refuses(partial(raised, error), refusal_of(model))
            return None
        except ValueError as error:
            self.refuses(partial(raised, error), refusal_of(model))
            return None
        try:
            return found, model()
        except Refused as refused:
            raise BrokenPromise(f"it returned {found!r} and not {refused!r}") from None

    def tell(self, error: OSError) -> None:
        """Nothing has changed."""
        promised(self.failing.failures > 0 or isinstance(error, QueueDiskFull), f"(j) {error!r} without a fault")
        self.errors += 1
        try:
            self.check()
        except AssertionError as broken:
            raise BrokenPromise(f"(j) after {error!r}: {broken!r}") from broken

    def advance(self, seconds: float) -> None:
        """What a call of the clock raises would be logged by the thread that makes them otherwise."""
        until = self.clock.monotonic() + seconds
        while (left := until - self.clock.monotonic()) > 0:
            try:
                self.clock.advance(left)
            except OSError:
                promised(self.failing.failures > 0, "(j) an error without a fault")
        self.model.advance(seconds)

    def call(self, real: Callable[[], object], then: Callable[[], Marks | None] = lambda: None) -> None:
        """What changes nothing that a model knows; ``then`` says what it made durable."""
        try:
            real()
        except DurabilityUnknown:
            raise Failed from None
        except OSError as error:
            self.tell(error)
        else:
            self.durable = then() or self.durable


def raised(error: Exception) -> None:
    raise error


def refusal_of(model: Callable[[], Any]) -> Refused:
    try:
        model()
    except Refused as refused:
        return refused
    raise BrokenPromise("(j) refused without a reason")


class FaultyProgram(Program):
    """Syncs and checkpoints may raise as well."""

    pair: FaultyPair

    def sync(self) -> None:
        self.pair.call(self.pair.queue.sync, lambda: marks(self.pair))

    def checkpoint(self) -> None:
        self.pair.call(self.pair.queue.checkpoint, lambda: marks(self.pair))


class Run:
    """One program, on a disk that fails as it is told."""

    def __init__(self, seed: int, length: int) -> None:
        self.choose = random.Random(f"faults {seed}")
        self.disk = CrashingDisk()
        self.failing = FailingDisk(self.disk, mapped=self.choose.random() < 0.7)
        options = {"sync": self.choose.choice(("always", 0.1, "never")), "segment_bytes": 4096, "max_job_bytes": 2000}
        self.pair = FaultyPair(self.disk, through=self.failing, **options)
        self.pair.failing = self.failing
        self.program = FaultyProgram(self.choose, self.pair, CALLS)
        self.length = length
        for _ in range(length // 2):
            self.program.step()
        self.first_operation = self.failing.operations

    def go_on(self) -> bool:
        """Returns whether the queue is still good."""
        for _ in range(self.length):
            try:
                self.program.step()
            except Failed:
                self.end(failed=True)
                return False
        self.end(failed=False)
        return True

    def end(self, *, failed: bool) -> None:
        """What it leaves is what was acknowledged; and while there is no room, everything can be deleted.

        After a sync that has failed, what was acknowledged since the last good one is in doubt, and is told so. What is
        deleted while there is no room stays so, also if the process dies before there is, or the power goes after a
        sync. Only timeouts may not be counted then.
        """
        pair = self.pair
        if not failed:
            pair.check()
            self.failing.disarm()
            failed = not self.is_good()
        if not failed:
            with self.no_room() if self.choose.random() < 0.5 else no_room(self.disk):
                self.fill()
                self.delete_all()
                pair.check()
                now = replace(marks(pair), timeouts=0)
                self.judge(now, power=False)
                pair.queue.sync()
                power = self.disk.after_power_cut(Leaning(self.choose), self.choose.choice(MODELS))
                self.judge(now, power=True, left=power)
            pair.advance(2)
        self.failing.disarm()
        left = self.disk.after_kill()
        with contextlib.suppress(OSError, KestrelError):
            pair.queue.close()
        self.judge(pair.durable if failed else marks(pair), power=failed, left=left)

    def is_good(self) -> bool:
        """What time has done while the disk failed is written; unless a sync failed in the background."""
        try:
            self.pair.advance(2)
            self.program.sync()
        except Failed:
            return False
        return True

    def judge(self, first: Marks, *, power: bool, left: CrashingDisk | None = None) -> None:
        bounds = between(first, marks(self.pair), (), power=power)
        judge(left or self.disk.after_kill(), self.pair, bounds, self.choose)

    @contextmanager
    def no_room(self) -> Iterator[None]:
        """None for a segment, but for the checkpoint."""
        self.failing.arm(errno.ENOSPC, sticky=True, kinds=NO_ROOM)
        yield
        self.failing.disarm()

    def fill(self) -> None:
        """Put, until there is no room, not even for a small one."""
        for size in (900, 0):
            errors = self.pair.errors
            for _ in range(30):
                self.pair.put(size, ttr=100_000)
                if self.pair.errors > errors:
                    break
            else:
                raise BrokenPromise("(k) there is always room")

    def delete_all(self) -> None:
        model = self.pair.model
        for job in [job for job in model.jobs.values() if self.choose.random() < 0.7]:
            holder = next((real for real, other in self.pair.sessions if other is job.holder), None)
            try:
                (holder or self.pair.queue).delete(job.id)
            except OSError as error:
                raise BrokenPromise(f"(k) {error!r}") from error
            model.delete(job.id, job.holder)


class WorkFaults:
    """Runs programs until ``limit`` faults are seen."""

    def __init__(self, seed: int, limit: int, *, length: int = 16, each: int = 12) -> None:
        self.seed = seed
        self.limit = limit
        self.length = length
        self.each = each
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        """Raises ``BrokenPromise``."""
        with collecting_seldom():
            seed = self.seed
            while self.counts.total() < self.limit:
                try:
                    self._run_one(seed)
                except (AssertionError, KestrelError, OSError, RuntimeError, LookupError) as broken:
                    raise BrokenPromise(f"program {seed}: {broken!r}") from broken
                seed += 1

    def _run_one(self, seed: int) -> None:
        unharmed = Run(seed, self.length)
        unharmed.go_on()
        operations = unharmed.failing.operations - unharmed.first_operation
        choose = random.Random(seed)
        for _ in range(self.each):
            at, error, sticky = choose.randrange(1, operations + 1), choose.choice(ERRORS), choose.random() < 0.5
            run = Run(seed, self.length)
            if error == errno.ENOSPC:
                run.failing.arm(error, at=choose.choice((1, 1, 2)), sticky=sticky, kinds=NO_ROOM)
            else:
                run.failing.arm(error, at=at, sticky=sticky)
            try:
                good = run.go_on()
            except AssertionError as broken:
                name = errno.errorcode[error]
                raise BrokenPromise(f"{name} at {at}, {'sticky' if sticky else 'once'}: {broken!r}") from broken
            if run.failing.failures:
                end = "failed for good" if not good else "told" if run.pair.errors else "quiet"
                self.counts[f"{errno.errorcode[error]}, {end}"] += 1
