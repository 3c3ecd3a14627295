"""Running contenders against each other, round by round, and what comes of it."""

from __future__ import annotations

import gc
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

Figures = dict[str, float | list[float]]
"""What one contender measured in one round: a figure, or several, by what it is of."""


class LeftOut(Exception):
    """A contender cannot take part here; the text says why."""


@dataclass(frozen=True)
class Contender:
    """A name and what it does in an empty folder, at a scale of 1 or below. ``at``: where it stands on an axis."""

    name: str
    measure: Callable[[Path, float], Figures]
    at: int | None = None


@dataclass(frozen=True)
class Workload:
    """Something that is measured. ``max_repeats`` bounds the rounds of one that takes long.

    ``axis``: what the contenders' ``at`` counts; those of one name are then one family, measured at several places.
    """

    name: str
    text: str
    unit: str
    contenders: tuple[Contender, ...]
    max_repeats: int = 1000
    warm_up: bool = True
    axis: str = ""

    @property
    def names(self) -> list[str]:
        """The names of the contenders, each once."""
        return list(dict.fromkeys(contender.name for contender in self.contenders))


@dataclass
class Row:
    """One contender's figures for one phase of a workload."""

    contender: str
    phase: str
    samples: list[float]
    at: int | None = None

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

    def first(self, row: Row) -> Row | None:
        """What a row is compared with: the first contender, at the same place; one that is alone: its first place."""
        names = self.workload.names
        found = (other for other in self.rows if (other.contender, other.phase) == (names[0], row.phase))
        return next((other for other in found if len(names) == 1 or other.at == row.at), None)


def along(values: Sequence[int], name: str, measure: Callable[[int, Path, float], Figures]) -> tuple[Contender, ...]:
    """A family of contenders: the same thing at several places of an axis."""
    return tuple(Contender(name, partial(measure, value), value) for value in values)


def run(
    workload: Workload, *, repeats: int, scale: float, scratch: Path, say: Callable[[str], None] = lambda _: None
) -> Result:
    """Measure a workload: a warm-up round, then ``repeats`` rounds, the contenders in turn."""
    repeats = min(repeats, workload.max_repeats)
    warm_ups = 1 if workload.warm_up else 0
    samples: dict[tuple[str, str, int | None], list[float]] = {}
    result = Result(workload)
    for number in range(-warm_ups, repeats):
        for contender in _turned(workload.contenders, number):
            if contender.name in result.left_out:
                continue
            say(f"{workload.name}: round {number + 1} of {repeats}, {contender.name}")
            try:
                figures = _in_fresh_folder(contender, scale, scratch)
            except LeftOut as error:
                result.left_out[contender.name] = str(error)
                continue
            except ImportError as error:
                result.left_out[contender.name] = f"{error.name or 'it'} is not installed"
                continue
            if number < 0:
                continue
            for phase, figure in figures.items():
                found = samples.setdefault((contender.name, phase, contender.at), [])
                found.extend(figure if isinstance(figure, list) else [figure])
    phases = list(dict.fromkeys(phase for _, phase, _ in samples))
    for name, phase, at in sorted(
        samples, key=lambda key: (phases.index(key[1]), key[2] or 0, workload.names.index(key[0]))
    ):
        result.rows.append(Row(name, phase, samples[name, phase, at], at))
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


# -- what the workloads measure with ---------------------------------------------------------------------------------


def per_item(work: Callable[[], object], count: int) -> float:
    """Microseconds that each of ``count`` items takes."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) / count * 1e6


def together(works: Sequence[Callable[[], object]]) -> float:
    """Seconds from when all these start, each in a thread of its own, until the last has ended."""
    began = 0.0
    ends: list[float] = []
    errors: list[BaseException] = []

    def start() -> None:
        nonlocal began
        began = time.perf_counter()

    gate = threading.Barrier(len(works), action=start)

    def run_one(work: Callable[[], object]) -> None:
        try:
            gate.wait()
            work()
        except BaseException as error:
            errors.append(error)
        ends.append(time.perf_counter())

    threads = [threading.Thread(target=run_one, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return max(ends) - began


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample that this share of them do not exceed."""
    return sorted(samples)[min(len(samples) - 1, int(len(samples) * share))]
