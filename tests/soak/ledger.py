"""The ledger: what every soak has seen, one run after the other, and the pages that say so.

``python -m tests.soak.ledger`` writes the table into docs/guarantees.md, and the runs into docs/ledger.md; a test sees
to it that they are the ledger's.
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
    """A task that broke a promise: what ran, and the end of what it said."""

    kind: str
    command: str
    said: str
    outcome: str = ""
    """What came of it, written by hand: the fault, and where it was mended."""


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
    """What it runs on, and which state of the code."""

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
    """Add ``run``, or replace what was known of it before."""
    runs = [other for other in load(path) if (other.began, other.seed) != (run.began, run.seed)]
    text = json.dumps({"runs": [dataclasses.asdict(each) for each in (*runs, run)]}, indent=1)
    path.with_suffix(".tmp").write_text(text + "\n")
    path.with_suffix(".tmp").replace(path)


def table(runs: list[Run]) -> str:
    """What all runs have seen together, and what that says."""
    total: Counter[str] = Counter()
    for run in runs:
        total.update(run.counts)
    failures = sum(len(run.failures) for run in runs)
    hours = sum(run.seconds for run in runs) / 3600
    lines = ["| cases | seen | 95% sure that it happens in fewer than one in |", "|---|---|---|"]
    failed = Counter(failure.kind for run in runs for failure in run.failures)
    for name, count in total.items():
        bound = f"{count // 3:,}" if not failed[name] else "see the [ledger](ledger.md)"
        lines.append(f"| {name} | {count:,} | {bound} |")
    lines += [
        "",
        f"{len(runs)} runs, {hours:.1f} hours, {failures} failures. The [ledger](ledger.md) has each of them.",
    ]
    return "\n".join(lines)


def listing(runs: list[Run]) -> str:
    """Every run, and every failure in it with what came of it."""
    lines = []
    for run in runs:
        on = ", ".join(f"{name} {value}" for name, value in run.machine.items())
        lines.append(f"- {run.began}: {run.seconds / 3600:.1f} h, seed {run.seed}, {on}")
        lines += [f"    - {failure.kind}: `{failure.command}`. {failure.outcome}" for failure in run.failures]
    return "\n".join(lines)


def page(text: str, what: str) -> str:
    """The page with this of the ledger in it."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{what}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), table(load(LEDGER))))
    RUNS.write_text(page(RUNS.read_text(), listing(load(LEDGER))))
