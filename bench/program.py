"""A benchmark that is a program of its own: its options, its rounds, its table and its goals."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import measure, report
from bench.goals import Goal, figures_of
from bench.measure import Workload
from bench.report import short

PREFIX = "kestrelpy-bench-"
"""How the folder of a run begins; what is in it is gone with it."""


def goals_text(goals: Sequence[Goal], facts: dict[str, Any]) -> str:
    """What of the goals was measured, and whether it is reached."""
    figures = figures_of(facts)
    lines = ["goals: quotients of medians of this run"]
    for goal in goals:
        value = goal.measured(figures)
        if value is not None:
            verdict = "reached" if goal.reached(value) else "SHORT"
            lines.append(f"  {goal.text}: {short(value)}, wanted {goal.wanted}: {verdict}")
    if facts["settings"]["scale"] != 1:
        lines.append("  not at full scale: this says that it runs, not how fast")
    return "\n".join(lines) + "\n"


def run(
    name: str,
    about: str | None,
    workloads: Sequence[Workload],
    goals: Sequence[Goal],
    argv: Sequence[str] | None,
    *,
    parents: Sequence[argparse.ArgumentParser] = (),
) -> int:
    """Run what ``argv`` asks for; returns the exit status. ``parents``: with options that the caller has used."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=parents,
    )
    names = [workload.name for workload in workloads]
    parser.add_argument("--only", metavar="NAMES", help=f"of {', '.join(names)}, with commas in between")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results there too")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count (5)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of jobs (1.0); for a quick look")
    parser.add_argument("--dir", metavar="DIR", help="put the queues there (default: where temporary files go)")
    args = parser.parse_args(argv)
    wanted = args.only.split(",") if args.only else names
    if unknown := set(wanted) - set(names):
        parser.error(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if args.repeats < 1 or args.scale <= 0:
        parser.error("--repeats and --scale must be above zero")
    results: list[measure.Result] = []
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=args.dir) as folder:
        scratch = Path(folder)
        for workload in workloads:
            if workload.name not in wanted:
                continue
            results.append(measure.run(workload, repeats=args.repeats, scale=args.scale, scratch=scratch))
            print(report.table(results[-1]), flush=True)
            facts = report.as_json(results, repeats=args.repeats, scale=args.scale, scratch=scratch)
            if args.json:  # after each one: a long run that breaks off has not been for nothing
                args.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(goals_text(goals, facts), end="")
    return 0
