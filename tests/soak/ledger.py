"""The ledger: the counts and failures of every soak, run by run, and the pages that show them.

``python -m tests.soak.ledger`` writes the table into docs/guarantees.md, and the runs into docs/ledger.md. A test
ensures that both pages agree with docs/ledger.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.paths import ROOT

LEDGER = ROOT / "docs" / "ledger.json"
PAGE = ROOT / "docs" / "guarantees.md"
RUNS = ROOT / "docs" / "ledger.md"
BEGIN, END = "<!-- the ledger -->", "<!-- its end -->"


@dataclass
class Failure:
    """A task that broke a promise: the command, and the end of its output."""

    kind: str
    command: str
    said: str
    outcome: str = ""
    """Written by hand: the fault, and where it was fixed."""


@dataclass
class Run:
    """One soak."""

    seed: int
    began: str
    machine: dict[str, str]
    seconds: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    tasks: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())


def machine() -> dict[str, str]:
    """The machine and interpreter that the soak runs on, and the commit of the code."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return {
        "commit": git("rev-parse", "--short=12", "HEAD") + (" and changes" if git("status", "--porcelain") else ""),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()}",
        "cores": str(os.cpu_count()),
    }


def load(path: Path) -> list[Run]:
    if not path.exists():
        return []
    runs = json.loads(path.read_text())["runs"]
    return [Run(**{**run, "failures": [Failure(**failure) for failure in run["failures"]]}) for run in runs]


def save(path: Path, run: Run) -> None:
    """Add ``run``, or replace its earlier entry: the one that began at the same time with the same seed."""
    runs = [other for other in load(path) if (other.began, other.seed) != (run.began, run.seed)]
    text = json.dumps({"runs": [dataclasses.asdict(each) for each in (*runs, run)]}, indent=1)
    path.with_suffix(".tmp").write_text(text + "\n")
    path.with_suffix(".tmp").replace(path)


def table(runs: list[Run]) -> str:
    """The total of each kind of case over all runs, and the bound that follows from it."""
    total: Counter[str] = Counter()
    for run in runs:
        total.update(run.counts)
    failures = sum(len(run.failures) for run in runs)
    hours = sum(run.seconds for run in runs) / 3600
    lines = ["| cases | seen | with 95% confidence, fewer fail than one in |", "|---|---|---|"]
    failed = Counter(failure.kind for run in runs for failure in run.failures)
    for name, count in total.items():
        bound = f"{count // 3:,}" if not failed[name] else "see the [ledger](ledger.md)"
        lines.append(f"| {name} | {count:,} | {bound} |")
    lines += [
        "",
        f"{len(runs)} runs, {hours:.1f} hours, {failures} failures. The [ledger](ledger.md) lists each failure.",
    ]
    return "\n".join(lines)


def listing(runs: list[Run]) -> str:
    """Every run, and every failure in it with its outcome."""
    lines = []
    for run in runs:
        on = ", ".join(f"{name} {value}" for name, value in run.machine.items())
        lines.append(f"- {run.began}: {run.seconds / 3600:.1f} h, seed {run.seed}, {on}")
        lines += [f"    - {failure.kind}: `{failure.command}`. {failure.outcome}" for failure in run.failures]
    return "\n".join(lines)


def page(text: str, what: str) -> str:
    """The page ``text`` with ``what`` between the two marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{what}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), table(load(LEDGER))))
    RUNS.write_text(page(RUNS.read_text(), listing(load(LEDGER))))
