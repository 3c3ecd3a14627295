"""Striking an operation at its n-th place, and checking what is left.

``run(seed, ...)`` is what tests and long runs call; it returns how often each operation was struck.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable

from tests.interrupts.operations import OPERATIONS
from tests.interrupts.scenes import Broken
from tests.interrupts.strikes import Hanging, Interrupter, interrupter_at, watchdog

PATIENCE = 20.0
"""Seconds after which a check hangs. It takes a few milliseconds."""


def strike(name: str, at: int, seed: int) -> Interrupter:
    """Strike operation ``name`` at its place ``at``; 0, or one that it does not have: it runs undisturbed.

    Raises ``Broken`` with the place if anything does not hold.
    """
    choose = random.Random(f"{seed} {name} {at}")
    striker = interrupter_at(at)
    prepared = OPERATIONS[name](striker)
    try:
        with watchdog(PATIENCE):
            struck = striker.run(prepared.call)
            if prepared.afterwards is not None and (struck or prepared.always):
                prepared.afterwards()
            prepared.scene.check(choose)
    except (Exception, Hanging) as error:
        prepared.scene.vanish()
        kind = "" if isinstance(error, Broken) else f"{type(error).__name__}: "
        raise Broken(f"{name}, seed {seed}, place {at}, {striker.where or 'not struck'}: {kind}{error}") from error
    return striker


def run(
    seed: int, names: Iterable[str] | None = None, *, limit: int | None = None, seconds: float | None = None
) -> Counter[str]:
    """Strike each of ``names`` at every place, or at ``limit`` places drawn by ``seed``; ends early after ``seconds``.

    Returns the strikes by operation. Raises ``Broken``.
    """
    counts: Counter[str] = Counter()
    choose = random.Random(seed)
    deadline = None if seconds is None else time.monotonic() + seconds
    for name in list(names if names is not None else OPERATIONS):
        total = strike(name, 0, seed).places
        chosen = list(range(1, total + 1))
        if limit is not None and limit < total:
            chosen = sorted(choose.sample(chosen, limit))
        for at in chosen:
            counts[name] += bool(strike(name, at, seed).where)
            if deadline is not None and time.monotonic() > deadline:
                return counts
    return counts
