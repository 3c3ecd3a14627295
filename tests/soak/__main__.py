"""A soak: what the suite does, for hours, at low priority, on every core; what was seen goes into a ledger.

    python -m tests.soak --hours 2 [--only WORD] [--seed N] [--ledger FILE]

The kind that is furthest from what a published ledger has comes next. A task that breaks a promise is noted with the
command that shows it again, and the soak goes on; it exits with 1 if there was one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.kinds import KINDS, Kind
from tests.soak.ledger import LEDGER, Failure, Run, machine, now, save

TASK_SECONDS = 900.0
"""A task that takes longer hangs."""
SAVE_EVERY = 60.0


@dataclass
class Progress:
    """One kind, so far."""

    kind: Kind
    tasks: int = 0
    under_way: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def cases(self) -> int:
        return self.kind.count(self.counters)

    @property
    def done(self) -> float:
        """The part of what is wanted; tasks under way count as much as those before them."""
        return self.cases * (1 + self.under_way / max(self.tasks, 1)) / self.kind.wanted if self.tasks else 0.0


class Soak:
    """Runs tasks, as many beside each other as there are cores."""

    def __init__(self, kinds: list[Kind], seed: int, ledger: Path) -> None:
        self.progress = [Progress(kind) for kind in kinds]
        self.ledger = ledger
        self.run = Run(seed=seed, began=now(), machine=machine())
        self.began = self.saved_at = time.monotonic()

    def go_on(self, seconds: float) -> None:
        """Run tasks for so long; those that have begun then come to their end."""
        cores = os.cpu_count() or 1
        with ThreadPoolExecutor(cores) as pool:
            under_way: dict[Future[None], Progress] = {}
            while under_way or time.monotonic() - self.began < seconds:
                while len(under_way) < cores and time.monotonic() - self.began < seconds:
                    chosen = min(self.progress, key=lambda each: (each.done, each.under_way))
                    number = self.run.seed + chosen.tasks + chosen.under_way
                    chosen.under_way += 1
                    under_way[pool.submit(self._task, chosen, number)] = chosen
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    del under_way[future]
                    future.result()
                if time.monotonic() - self.saved_at > SAVE_EVERY:
                    self.save()
        self.save()

    def _task(self, progress: Progress, number: int) -> None:
        command = progress.kind.command(number)
        began = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TASK_SECONDS, check=False)
            broken = done.stderr[-4000:] if done.returncode else ""
        except subprocess.TimeoutExpired:
            broken = f"not done after {TASK_SECONDS:.0f} s"
        if broken:
            shown = " ".join(Path(part).name if os.sep in part else part for part in command[1:])
            self.run.failures.append(Failure(progress.kind.name, shown, broken))
            print(f"BROKEN {progress.kind.name}: {shown}\n{broken}", file=sys.stderr, flush=True)
        else:
            progress.counters.update(json.loads(done.stdout.splitlines()[-1]))
        progress.seconds += time.monotonic() - began
        progress.tasks += 1
        progress.under_way -= 1

    def save(self) -> None:
        self.saved_at = time.monotonic()
        self.run.seconds = round(self.saved_at - self.began)
        self.run.counts = {each.kind.name: each.cases for each in self.progress if each.tasks}
        self.run.tasks = {each.kind.name: each.tasks for each in self.progress if each.tasks}
        save(self.ledger, self.run)
        for each in self.progress:
            print(f"{each.cases:>12,} of {each.kind.wanted:,}  {each.kind.name}, {each.seconds:.0f} s", flush=True)
        print(f"{len(self.run.failures):>12} failures, {self.run.seconds} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description="Run every harness for hours and keep a ledger.")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--only", action="append", help="a word of the kinds to run; all by default")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000 * 1_000)
    parser.add_argument("--ledger", type=Path, default=LEDGER)
    options = parser.parse_args()
    kinds: list[Kind] = []
    for kind in KINDS:
        if options.only and not any(word in kind.name for word in options.only):
            continue
        if missing := kind.missing():
            print(f"left out: {kind.name}: {missing}")
        else:
            kinds.append(kind)
    os.nice(19)
    print(f"seed {options.seed}", flush=True)
    soak = Soak(kinds, options.seed, options.ledger)
    soak.go_on(options.hours * 3600)
    return 1 if soak.run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
