"""``python -m bench``: run the workloads, print tables and goals, write JSON.

``python -m bench goals FILE`` prints the goals of a run that was written before.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import __doc__ as how
from bench import goals, measure, report
from bench.workloads import ON_SPARK, WORKLOADS


def main(argv: Sequence[str] | None = None) -> int:
    """Run what ``argv`` asks for; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["goals"]:
        return goals.main(argv[1:])
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=how, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="the workloads and who takes part")
    parser.add_argument("--spark", action="store_true", help="the workloads on Spark instead; they need Java 17 or 21")
    parser.add_argument("--only", metavar="NAMES", help="these workloads, with commas in between")
    parser.add_argument("--json", metavar="FILE", help="write the results there too; - for standard output, no tables")
    parser.add_argument("--repeats", type=int, default=7, help="rounds that count (7)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of items (1.0); for a quick look")
    parser.add_argument("--dir", metavar="DIR", help="put the queues there (default: where temporary files go)")
    args = parser.parse_args(argv)
    there = ON_SPARK if args.spark else WORKLOADS
    names = args.only.split(",") if args.only else [workload.name for workload in there]
    chosen = [workload for workload in there if workload.name in names]
    if unknown := set(names) - {workload.name for workload in chosen}:
        parser.error(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(one.name for one in there)}")
    if args.repeats < 1 or args.scale <= 0:
        parser.error("--repeats and --scale must be above zero")
    if args.list:
        for workload in chosen:
            print(f"{workload.name:<15} {workload.text}")
            places = list(dict.fromkeys(contender.at for contender in workload.contenders if contender.at is not None))
            if places:
                print(f"{'':<15} {workload.axis}: {', '.join(f'{at:,}' for at in places)}")
            print(f"{'':<15} {', '.join(workload.names)}")
        return 0
    _run(chosen, args)
    return 0


def _run(chosen: list[measure.Workload], args: argparse.Namespace) -> None:
    results = []
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kestrelpy-bench-", dir=args.dir) as folder:
        scratch = Path(folder)
        for workload in chosen:
            result = measure.run(workload, repeats=args.repeats, scale=args.scale, scratch=scratch, say=_say)
            _say("")
            results.append(result)
            if args.json != "-":
                print(report.table(result), flush=True)
            facts = report.as_json(results, repeats=args.repeats, scale=args.scale, scratch=scratch)
            if args.json and args.json != "-":  # after each one: a long run that breaks off has not been for nothing
                Path(args.json).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if args.json == "-":
        print(json.dumps(facts, indent=1))
    else:
        print(goals.table(facts, all_of_them=False), end="")


def _say(text: str) -> None:
    """What is being done, on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _end(*_: object) -> None:
    """Ended from outside: servers are ended and folders removed on the way out."""
    sys.exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main())
