"""The use explorer: seeded steps of everything a user may do, against a model of what may come of it.

    python -m tests.use.use_explorer 17            one seed, and the shortest sequence if it fails
    python -m tests.use.use_explorer 1 --seeds 500 many of them
    python -m tests.use.use_explorer 17 --lean hooks reentrant

``run(seed)`` is one world (``use_world``) and its steps; each step is an operation (``use_operations``) and a number
out of which it draws everything. So a sequence can be played again with steps left out: that is how it is shrunk.
A watchdog turns a hang into a failure that says where everybody is.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import io
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Collection, Iterator
from unittest.mock import patch

from kestrelpy import _logging
from kestrelpy.inbox import watcher
from tests.use import (
    use_arrow,
    use_dying,
    use_ending,
    use_job_tasks,
    use_jobs,
    use_memory,
    use_metrics,
    use_opening,
    use_outside,
    use_reading,
    use_shipping,
    use_skips,
    use_tasks,
    use_trouble,
    use_writing,
)
from tests.use.use_courier import deterministic_shipping
from tests.use.use_coverage import SOMETIMES, Coverage
from tests.use.use_operations import OPERATIONS
from tests.use.use_swarm import Swarm
from tests.use.use_world import Hang, Process, World

assert watcher.InboxWatcher is not None  # it is imported when a queue is first opened, and must be there before
MODULES = (
    use_arrow,
    use_dying,
    use_ending,
    use_job_tasks,
    use_jobs,
    use_memory,
    use_opening,
    use_outside,
    use_reading,
    use_shipping,
    use_tasks,
    use_trouble,
    use_writing,
)
"""Where the operations are."""
STEPS = 120
PATIENCE = 4
"""Seconds without a step after which it hangs: of those that ``lived`` counts."""

Step = tuple[str, int]


class Failure(AssertionError):
    """What was found: ``seed``, the steps that lead there, and what happened in the end."""

    def __init__(self, seed: int, lean: Collection[str], steps: list[Step], cause: BaseException, trail: list[str]):
        self.seed = seed
        self.steps = steps
        self.cause = cause
        self.what = f"{type(cause).__name__}: {cause}"
        leaning = f" --lean {' '.join(sorted(lean))}" if lean else ""
        shown = "\n".join(f"    {line}" for line in trail)
        super().__init__(
            f"{self.what}\nafter {len(steps)} steps:\n{shown}\n"
            f"to see it again: python -m tests.use.use_explorer {seed}{leaning}"
        )


# -- the watchdog --------------------------------------------------------------------------------------------------


class Watchdog:
    """Raises ``Hang`` in the main thread if no step begins for ``PATIENCE`` seconds."""

    def __init__(self) -> None:
        self.steps = 0
        self._seen = -1
        self._since = 0.0

    def __enter__(self) -> Watchdog:
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:
            self._before = signal.signal(signal.SIGALRM, self._look)
            signal.setitimer(signal.ITIMER_REAL, 1, 1)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._before)

    def _look(self, *_: object) -> None:
        now = lived()
        if self.steps != self._seen:
            self._seen, self._since = self.steps, now
        elif now - self._since >= PATIENCE:
            self._since = now - PATIENCE + 2  # if what comes next hangs as well: not as long
            stacks = io.StringIO()
            for ident, frame in sys._current_frames().items():
                stacks.write(f"\nthread {ident}:\n" + "".join(traceback.format_stack(frame)[-14:]))
            raise Hang(f"nothing went on for {PATIENCE} seconds{stacks.getvalue()}")


def lived() -> float:
    """A time that goes on while this thread runs or sleeps, and not while it waits for a processor: on a busy machine
    a step that imports something may take ten seconds by the clock. Linux knows; elsewhere all time counts.
    """
    waited = 0
    with contextlib.suppress(OSError), open("/proc/thread-self/schedstat", "rb") as counts:
        waited = int(counts.read().split()[1])
    return time.monotonic() - waited / 1e9


# -- one world -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def quiet(seed: int) -> Iterator[None]:
    """Nothing is logged, the collector does not run by itself, and random bytes come out of the seed."""
    level = logging.root.manager.disable
    was_enabled, urandom = gc.isenabled(), os.urandom
    generator = random.Random(f"bytes {seed}")
    logging.disable(logging.CRITICAL)
    gc.disable()
    os.urandom = generator.randbytes
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            warnings.simplefilter("ignore", RuntimeWarning)  # a coroutine that was thrown away before it began
            with _without_threads(), deterministic_shipping(), patch.object(_logging, "warning", use_skips.log):
                yield
    finally:
        os.urandom = urandom
        logging.disable(level)
        if was_enabled:
            gc.enable()


class _AtOnce:
    """Stands in for a thread: its work is done by ``start``. A thread of its own would run when no seed says so."""

    def __init__(
        self, target: Callable[..., object], args: tuple[object, ...] = (), name: str = "", daemon: bool | None = None
    ) -> None:
        del name, daemon
        self._work: Callable[[], object] = lambda: target(*args)

    def start(self) -> None:
        self._work()


def _without_threads() -> contextlib.ExitStack:
    """The library makes threads by the name ``threading`` in the module at hand."""
    stand_in = types.SimpleNamespace(**{**vars(threading), "Thread": _AtOnce})
    patches = contextlib.ExitStack()
    for name, module in list(sys.modules.items()):
        if name.startswith("kestrelpy.") and getattr(module, "threading", None) is threading:
            patches.enter_context(patch.object(module, "threading", stand_in))
    return patches


class Run:
    """One world and the steps it has done."""

    def __init__(self, seed: int, lean: Collection[str], watchdog: Watchdog) -> None:
        rng = random.Random(f"swarm {seed}")
        weights = {name: operation.weight for name, operation in OPERATIONS.items()}
        nestable = [name for name, operation in OPERATIONS.items() if operation.nestable]
        self.coverage = Coverage()
        self.swarm = Swarm(rng, weights, nestable, lean)
        self.world = World(self.swarm, self.coverage)
        self.world.run_step = self.step
        self.world.trouble.aim = self.swarm.aim
        self.watchdog = watchdog

    def step(self, name: str, rng: random.Random, process: Process) -> None:
        """One operation, at the top or nested."""
        world = self.world
        self.watchdog.steps += 1
        if world.trail is not None:
            world.trail.append(f"{'  ' * world.depth}# {name} by {process}")
        outer, world.did, tags = world.did, False, (*world.tags, *self.swarm.options)
        world.stack.append(name)
        process.busy += 1
        try:
            OPERATIONS[name].function(world, rng, process)
        finally:
            world.stack.pop()
            process.busy -= 1
            if world.did:
                self.coverage.operations[name] += 1
                for tag in tags:
                    self.coverage.pairs[name, tag] += 1
            world.did = world.did or outer

    def somebody(self, rng: random.Random) -> Process:
        """A process; mostly one that has something open."""
        processes = self.world.processes
        busy = [process for process in processes if process.queues or process.readers or process.others]
        return rng.choice(busy if busy and rng.random() < 0.7 else processes)

    def top(self, name: str, number: int, *, check: bool = True) -> None:
        world = self.world
        rng = world.rng = random.Random(number)
        world.nested = world.depth = 0
        world.thrown.clear()
        if self.swarm.meanwhile and rng.random() < self.swarm.meanwhile:
            world.trouble.meanwhile_in = rng.randint(1, 3 if self.swarm.aim else 25)
        try:
            self.step(name, rng, self.somebody(rng))
        except BaseException as error:  # out of a callback that was run at once
            if not any(error is thrown for thrown in world.thrown):
                raise
        world.trouble.meanwhile_in = 0
        world.nested = world.depth = 0
        if check or self.swarm.ships:
            for model in world.models.values():
                use_outside.see_batches(world, model)
            world.graves.look()
            world.skips.look()
        if self.swarm.ships:
            world.ships.settle()
        if check:
            world.check(thoroughly=number % 4 == 0)
            if number % 4 == 1:
                use_metrics.check(world)


def play(
    seed: int,
    steps: list[Step],
    lean: Collection[str] = (),
    watchdog: Watchdog | None = None,
    *,
    in_words: bool = False,
) -> Coverage:
    """These steps in the world of ``seed``. Raises ``Failure``; ``in_words``: with what was called."""
    with contextlib.ExitStack() as rest:
        rest.enter_context(quiet(seed))
        dog = watchdog if watchdog is not None else rest.enter_context(Watchdog())
        run = Run(seed, lean, dog)
        run.world.trail = [] if in_words else None
        done: list[Step] = []
        try:
            for name, number in steps:
                done.append((name, number))
                run.top(name, number)
            use_ending.account(run.world)
        except (AssertionError, Hang, Exception) as error:
            cause: BaseException = run.world.failure or error
            if cause is not error and cause.__cause__ is None:
                cause.__cause__ = error
            raise Failure(seed, lean, done, cause, run.world.trail or [name for name, _ in done]) from cause
        finally:
            with contextlib.suppress(BaseException):
                for process in run.world.processes:
                    run.world.kill(process)
            with contextlib.suppress(BaseException):
                run.world.ships.end()
        run.coverage.seeds = 1
        return run.coverage


def draw(seed: int, count: int, lean: Collection[str] = ()) -> list[Step]:
    """The steps of a seed."""
    rng = random.Random(f"swarm {seed}")
    weights = {name: operation.weight for name, operation in OPERATIONS.items()}
    swarm = Swarm(rng, weights, (), lean)
    rng = random.Random(f"steps {seed}")
    begin: list[Step] = [("open", rng.getrandbits(40)), ("reader", rng.getrandbits(40))]
    return begin + [(swarm.draw(rng), rng.getrandbits(40)) for _ in range(count)]


def run(seed: int, steps: int = STEPS, lean: Collection[str] = (), watchdog: Watchdog | None = None) -> Coverage:
    """One seed. Raises ``Failure``, with the shortest sequence that was found."""
    drawn = draw(seed, steps, lean)
    try:
        return play(seed, drawn, lean, watchdog)
    except Failure as failure:
        raise shrink(failure, lean, watchdog) from failure.cause


def explore(first_seed: int, steps: int, lean: Collection[str] = ()) -> Coverage:
    """Seeds from ``first_seed`` on, until there are so many steps. Raises the first ``Failure`` that its seed shows
    twice; others are counted, as ``unrepeated``. Raises ``UseFailure`` if something is left of them.
    """
    coverage = Coverage()
    seed = first_seed
    with use_ending.nothing_is_left(), Watchdog() as watchdog:
        while coverage.steps < steps:
            try:
                coverage.add(run(seed, lean=lean, watchdog=watchdog))
            except Failure as failure:
                if isinstance(failure.cause, Hang):
                    raise
                coverage.add(_again(failure, lean, watchdog))
            seed += 1
            if seed % 20 == 0:
                gc.collect(1)
    return coverage


def _again(failure: Failure, lean: Collection[str], watchdog: Watchdog) -> Coverage:
    """The same seed once more. Raises ``failure`` if it fails again."""
    try:
        coverage = play(failure.seed, draw(failure.seed, STEPS, lean), lean, watchdog)
    except Failure:
        raise failure from failure.cause
    coverage.unrepeated += 1
    print(f"not seen again: {failure}")
    return coverage


def soak(number: int, steps: int) -> dict[str, int]:
    """A task of ``make soak``: seeds that nobody else has."""
    coverage = explore(10_000_000 + number * 10_000, steps)
    return {"steps": coverage.steps, "worlds": coverage.seeds, "states": len(SOMETIMES) - len(coverage.never())}


# -- shrinking -----------------------------------------------------------------------------------------------------


def shrink(failure: Failure, lean: Collection[str], watchdog: Watchdog | None, seconds: float = 20.0) -> Failure:
    """Leave out steps as long as it fails in the same way."""
    best, until = failure, time.monotonic() + seconds
    size = max(1, len(best.steps) // 2)
    while size and time.monotonic() < until and not isinstance(failure.cause, Hang):
        at, shorter = 0, False
        while at < len(best.steps) and time.monotonic() < until:
            tried = _attempt(best, best.steps[:at] + best.steps[at + size :], lean, watchdog)
            if tried is None:
                at += size
            else:
                best, shorter = tried, True
        if not shorter or size > 1:
            size = size // 2 if size > 1 else 0
    return _attempt(best, best.steps, lean, watchdog, in_words=True) or best


def _attempt(
    best: Failure, steps: list[Step], lean: Collection[str], watchdog: Watchdog | None, *, in_words: bool = False
) -> Failure | None:
    try:
        play(best.seed, steps, lean, watchdog, in_words=in_words)
    except Failure as failure:
        return failure if kind_of(failure) == kind_of(best) else None
    return None


def kind_of(failure: Failure) -> str:
    """What it is about, without the numbers."""
    return "".join(letter for letter in failure.what.split("\n")[0] if not letter.isdigit())[:60]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lean", nargs="*", default=())
    parser.add_argument("--go-on", action="store_true", help="do not stop at the first failure: one line for each kind")
    options = parser.parse_args()
    faulthandler.enable()
    coverage, kinds = Coverage(), dict[str, int]()
    begun = time.monotonic()
    for seed in range(options.seed, options.seed + options.seeds):
        try:
            coverage.add(run(seed, options.steps, options.lean))
        except Failure as failure:
            if not options.go_on:
                traceback.print_exception(failure.cause)
                print(failure)
                raise SystemExit(1) from None
            kind = kind_of(failure)
            kinds[kind] = kinds.get(kind, 0) + 1
            if kinds[kind] == 1:
                print(f"--- seed {seed}\n{failure}\n", flush=True)
    print(f"{coverage.steps:,} steps of {coverage.seeds} seeds in {time.monotonic() - begun:.1f} s")
    for kind, count in sorted(kinds.items(), key=lambda each: -each[1]):
        print(f"{count:6} {kind}")
    if kinds:
        raise SystemExit(1)
    for state, count in sorted(coverage.sometimes.items()):
        print(f"{count:8} {state}")


if __name__ == "__main__":
    main()
