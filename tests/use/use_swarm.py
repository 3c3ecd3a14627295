"""A swarm (Groce and others, "Swarm testing", ISSTA 2012): each seed leaves out a random half of everything, so that
rare pairs meet. ``lean`` names what a seed must have: for planted defects.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Collection, Mapping
from itertools import accumulate

OPTIONS = (
    *("always", "never", "small memory", "archive", "codec", "quarantine", "limits", "drop oldest", "block"),
    *("bytes limit", "expiry", "max_age", "hooks", "large batches", "odd options", "second queue", "tiny limits"),
    "archive is the folder",
)
DEAD = ("retry delay", "max deliveries", "dead letter", "lag skips")
ROOM = ("kept", "journal limit", "lag warns", "lag refuses")
FAULTS = ("EMFILE", "ENOSPC", "EIO", "EACCES", "sync", "flip", "delete", "full")


LEFT_OUT: frozenset[str] = frozenset()
"""What no seed does by itself, as it is known to find something that is not put right yet."""


class Swarm:
    """What one seed may do."""

    def __init__(
        self,
        rng: random.Random,
        weights: Mapping[str, float],
        nestable: Collection[str],
        lean: Collection[str] = (),
    ) -> None:
        share = 0.35 if lean else 0.5
        kept = {
            name: weight
            for name, weight in weights.items()
            if name[:4] != "job_"
            and name[:5] not in ("ship_", "dead_")
            and (name in ALWAYS or name in lean or (rng.random() < share and name not in LEFT_OUT))
        }
        self.options = {
            name for name in OPTIONS if name in lean or (rng.random() < share - 0.15 and name not in LEFT_OUT)
        }
        faults = rng.random() < (0.1 if lean else 0.4)
        self.faults = {name for name in FAULTS if name in lean or (faults and rng.random() < 0.4)}
        self.reentrant = rng.choice((0.0, 0.2, 0.5)) if "reentrant" not in lean else 0.6
        self.raising = rng.choice((0.0, 0.0, 0.1, 0.3)) if "raising" not in lean else 0.4
        self.severe: tuple[type[BaseException], ...] = rng.choice(((), (), (SystemExit, MemoryError)))
        if "severe" in lean:
            self.severe = (SystemExit, MemoryError)
        self.meanwhile = rng.choice((0.0, 0.05, 0.3)) if "meanwhile" not in lean else 0.7
        self.aim = "unlink" if "unlink" in lean else rng.choice(("", "", "", "unlink", "rename", "read", "names"))
        self.lean = frozenset(lean)
        kept = self._with_jobs(rng, weights, kept)
        kept = self._with_ship(rng, weights, kept)
        self.options |= {name for name in ROOM if name in lean or (not self.lean and rng.random() < 0.2)}
        kept = self._with_dead(rng, weights, kept)
        self.weights = {name: weight * (5 if name in lean else 1) for name, weight in kept.items()}
        self._names = list(self.weights)
        self._sums = list(accumulate(self.weights.values()))
        nested = [name for name in self._names if name in nestable]
        self._nested = nested
        self._nested_sums = list(accumulate(self.weights[name] for name in nested))

    def _with_jobs(self, rng: random.Random, weights: Mapping[str, float], kept: dict[str, float]) -> dict[str, float]:
        """Some seeds have a work queue too; those that lean to it have little else."""
        leaning = "jobs" in self.lean
        if not leaning and (self.lean or rng.random() >= 0.3):
            return kept
        if leaning:
            kept = {name: weight for name, weight in kept.items() if name in self.lean or name in WITH_JOBS}
        jobs = {name: 2 * weight for name, weight in weights.items() if name.startswith("job_")}
        drawn = {name: weight for name, weight in jobs.items() if name in self.lean or rng.random() < 0.7}
        return kept | drawn | {name: jobs[name] for name in ("job_open", "job_put", "job_reserve")}

    def _with_ship(self, rng: random.Random, weights: Mapping[str, float], kept: dict[str, float]) -> dict[str, float]:
        """Some seeds ship their queues. Drawn last, so that the others do what they do without."""
        leaning = "ship" in self.lean
        self.ships = leaning or (not self.lean and rng.random() < 0.3)
        if not self.ships:
            return kept
        drawn = {name: weight for name, weight in weights.items() if name.startswith("ship_")}
        drawn = {name: weight for name, weight in drawn.items() if name in self.lean or rng.random() < 0.8}
        return kept | drawn | {"ship_run": weights["ship_run"]}

    def _with_dead(self, rng: random.Random, weights: Mapping[str, float], kept: dict[str, float]) -> dict[str, float]:
        """Some seeds have readers that wait before they try again, give items up, or are moved forward."""
        some = not self.lean and rng.random() < 0.4
        self.options |= {name for name in DEAD if name in self.lean or (some and rng.random() < 0.5)}
        drawn = {name: weight for name, weight in weights.items() if name.startswith("dead_")}
        return kept | (drawn if self.options & {"retry delay", "dead letter"} else {})

    def draw(self, rng: random.Random) -> str:
        return self._names[bisect(self._sums, rng.random() * self._sums[-1])]

    def draw_nested(self, rng: random.Random) -> str | None:
        if not self._nested:
            return None
        return self._nested[bisect(self._nested_sums, rng.random() * self._nested_sums[-1])]


ALWAYS = frozenset({"open", "reader", "put", "get", "commit", "advance"})
"""Without these nothing happens."""
WITH_JOBS = frozenset({"open", "advance", "kill", "jump", "fault", "mend", "fill", "collector"})
"""What else a seed does that leans to work queues."""
