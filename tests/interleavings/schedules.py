"""Thousands of schedules of the scenes, from a seed: ``run(seed, limit)``; and one of them again: ``play(name, seed)``.

A failing schedule names its scene and its seed, and leads to the same end when it is played again (with the same
``PYTHONHASHSEED``, where sets of names matter).
"""

from __future__ import annotations

import gc
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable

from tests.interleavings import scenes_crash, scenes_dead, scenes_inbox, scenes_journal, scenes_memory, scenes_readers
from tests.interleavings.scene import Scene, close_quietly, leave_quietly
from tests.interleavings.scheduler import BrokenSchedule, Priorities, RandomWalk, Scheduler, Stopped, Strategy
from tests.interleavings.standins import installed

_CAN_TRACE_OPCODES = sys.version_info[:2] != (3, 12)
"""CPython 3.12 crashes if several threads do."""


def _of(how: Callable[[Scene, scenes_memory.Make], None], make: scenes_memory.Make) -> Callable[[Scene], None]:
    return lambda scene: how(scene, make)


SCENES: dict[str, Callable[[Scene], None]] = {
    **{name: _of(how, make) for name, (how, make) in scenes_memory.SCENES.items()},
    **{
        how.__name__: how
        for how in (
            *scenes_inbox.SCENES,
            *scenes_journal.SCENES,
            *scenes_readers.SCENES,
            *scenes_dead.SCENES,
            *scenes_crash.SCENES,
        )
    },
}


def play(name: str, seed: int) -> Counter[str]:
    """One schedule of one scene. Raises ``BrokenSchedule`` with its name and seed; returns what it did.

    ``digest`` tells one schedule from another.
    """
    rng = random.Random(f"{name} {seed}")
    strategy: Strategy = RandomWalk(rng)
    if rng.random() < 0.5:
        strategy = Priorities(rng, changes=rng.randrange(1, 6), points=rng.choice((60, 250, 1000)))
    scheduler = Scheduler(
        strategy,
        rng,
        gap=rng.choice((0, 0, 2, 5, 15)),
        opcodes=rng.random() < 0.1 and _CAN_TRACE_OPCODES,
        early=rng.choice((0.0, 0.0, 0.003, 0.03)),
    )
    scene = Scene(scheduler, rng)
    was_enabled, level = gc.isenabled(), logging.root.manager.disable
    gc.disable()  # a finaliser would run at a place that no seed decides
    logging.disable(logging.CRITICAL)
    tell = sys.unraisablehook
    sys.unraisablehook = lambda trouble: None if trouble.exc_type is Stopped else tell(trouble)
    try:
        with installed(scheduler):
            try:
                scheduler.run(lambda: SCENES[name](scene))
            finally:
                for queue in scene.opened:
                    close_quietly(queue)
                leave_quietly()
        if scene.afterwards is not None:
            scene.afterwards()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise BrokenSchedule(f"{type(error).__name__}: {error}\n[play({name!r}, {seed})]") from error
    finally:
        gc.collect(0)
        sys.unraisablehook = tell
        logging.disable(level)
        if was_enabled:
            gc.enable()
    return Counter(
        schedules=1,
        points=scheduler.points,
        switches=scheduler.switches,
        crashes=int(scheduler.stopped),
        digest=scheduler.digest,
        **scheduler.counts,
    )


def run(
    seed: int, limit: int | None = None, *, seconds: float | None = None, scenes: Iterable[str] | None = None
) -> Counter[str]:
    """Play ``limit`` schedules, or for so many seconds, going around the scenes; what they did, in all.

    Different seeds lead to different schedules: two processes can share the work.
    """
    names = list(SCENES if scenes is None else scenes)
    counts: Counter[str] = Counter()
    until = None if seconds is None else time.monotonic() + seconds
    number = 0
    while (limit is None or number < limit) and (until is None or time.monotonic() < until):
        name = names[number % len(names)]
        counts += play(name, seed * 1_000_000 + number // len(names))
        counts[f"of {name}"] += 1
        number += 1
    del counts["digest"]
    return counts
