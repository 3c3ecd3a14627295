"""Running contenders against each other, round by round, and what comes of it."""

from __future__ import annotations

import gc
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Figures = dict[str, float | list[float]]
"""What one contender measured in one round: a figure, or several, by what it is of."""


@dataclass(frozen=True)
class Contender:
    """A name and what it does in an empty folder, at a scale of 1 or below."""

    name: str
    measure: Callable[[Path, float], Figures]


@dataclass(frozen=True)
class Workload:
    """Something that is measured. ``max_repeats`` bounds the rounds of one that takes long."""

    name: str
    text: str
    unit: str
    contenders: tuple[Contender, ...]
    max_repeats: int = 1000
    warm_up: bool = True


@dataclass
class Row:
    """One contender's figures for one phase of a workload."""

    contender: str
    phase: str
    samples: list[float]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.samples)

    def ratio(self, first: Row | None) -> float | None:
        """This median over the first contender's."""
        return self.median / first.median if first is not None and first.median else None


@dataclass
class Result:
    """A workload's rows; ``left_out``: contenders that did not take part, and why."""

    workload: Workload
    rows: list[Row] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def first(self, phase: str) -> Row | None:
        """The row that the others of a phase are compared with."""
        name = self.workload.contenders[0].name
        return next((row for row in self.rows if (row.contender, row.phase) == (name, phase)), None)


def run(
    workload: Workload, *, repeats: int, scale: float, scratch: Path, say: Callable[[str], None] = lambda _: None
) -> Result:
    """Measure a workload: a warm-up round, then ``repeats`` rounds, the contenders in turn."""
    repeats = min(repeats, workload.max_repeats)
    warm_ups = 1 if workload.warm_up else 0
    samples: dict[tuple[str, str], list[float]] = {}
    result = Result(workload)
    for number in range(-warm_ups, repeats):
        for contender in _turned(workload.contenders, number):
            if contender.name in result.left_out:
                continue
            say(f"{workload.name}: round {number + 1} of {repeats}, {contender.name}")
            try:
                figures = _in_fresh_folder(contender, scale, scratch)
            except ImportError as error:
                result.left_out[contender.name] = f"{error.name or 'it'} is not installed"
                continue
            if number < 0:
                continue
            for phase, figure in figures.items():
                samples.setdefault((contender.name, phase), []).extend(figure if isinstance(figure, list) else [figure])
    order = [contender.name for contender in workload.contenders]
    phases = list(dict.fromkeys(phase for _, phase in samples))
    for name, phase in sorted(samples, key=lambda key: (phases.index(key[1]), order.index(key[0]))):
        result.rows.append(Row(name, phase, samples[name, phase]))
    return result


def _turned(contenders: Sequence[Contender], number: int) -> list[Contender]:
    turn = number % len(contenders)
    return [*contenders[turn:], *contenders[:turn]]


def _in_fresh_folder(contender: Contender, scale: float, scratch: Path) -> Figures:
    folder = Path(tempfile.mkdtemp(dir=scratch))
    gc.collect()
    try:
        return contender.measure(folder, scale)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
