"""``python -m bench.outbox``: see the package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench import outbox, program
from bench.measure import Workload
from bench.outbox import crowded, draining, putting, waiting
from bench.outbox.goals import GOALS

MINUTES = 1.0


def workloads(minutes: float = MINUTES) -> tuple[Workload, ...]:
    """All of them, in the order of the description."""
    found = (*putting.WORKLOADS, *draining.WORKLOADS, *waiting.WORKLOADS, *crowded.workloads(minutes))
    order = ("put", "batch", "jobs", "sqlite", "relay", "latency", "claims", "idle", "held")
    return tuple(sorted(found, key=lambda workload: order.index(workload.name.removesuffix("-sqlite"))))


def main(argv: Sequence[str] | None = None) -> int:
    """Run what ``argv`` asks for; returns the exit status."""
    parser = argparse.ArgumentParser(add_help=False)
    text = f"how long the transaction of held stays open ({MINUTES:g})"
    parser.add_argument("--minutes", type=float, default=MINUTES, help=text)
    args, _ = parser.parse_known_args(argv)
    return program.run("outbox", outbox.__doc__, workloads(args.minutes), GOALS, argv, parents=[parser])


if __name__ == "__main__":
    sys.exit(main())
