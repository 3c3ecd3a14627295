"""What the ledger of all actors says, and whether the database and the runs agree with it.

commits, rolls-back   before a transaction ends so           committed   after it
unknown               its commit has failed: the order says whether it took place
begins                a handler begins                        returns, raises   it ends; the mark comes after that
started, stopped      a consumer                              ended   a thread of it that should not
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


class Run(NamedTuple):
    """A run of a handler. ``end``: when it returned or raised; of one that was killed, when that was."""

    who: str
    begin: int
    end: int
    how: str


class Ledger:
    """The files of a folder, read when nobody writes any more. ``kills``: when which process was killed."""

    def __init__(self, folder: Path, kills: dict[str, int]) -> None:
        self.kills = kills
        self.counts: Counter[str] = Counter()
        self.orders: dict[str, str] = {}
        """The last that was noted about each order."""
        self.runs: defaultdict[str, list[Run]] = defaultdict(list)
        self.begins: list[int] = []
        self.ended_threads: list[str] = []
        for path in sorted(folder.glob("*.ledger")):
            self._read(path.stem, path.read_text().splitlines())
        for runs in self.runs.values():
            runs.sort(key=lambda run: run.begin)
        self.begins.sort()

    def _read(self, who: str, lines: Iterable[str]) -> None:
        open_runs: dict[str, int] = {}
        for line in lines:
            instant, event, name = line.split(" ", 2)
            self.counts[event] += 1
            if event == "begins":
                assert name not in open_runs, f"{who} runs {name} twice at the same time"
                open_runs[name] = int(instant)
                self.begins.append(int(instant))
            elif event in ("returns", "raises"):
                self.runs[name].append(Run(who, open_runs.pop(name), int(instant), event))
            elif event == "ended":
                self.ended_threads.append(f"{who}: {name}")
            elif event not in ("started", "stopped"):
                self.orders[name] = event
        for name, begin in open_runs.items():
            assert who in self.kills, f"{who}, which was not killed, has not ended {name}"
            self.runs[name].append(Run(who, begin, self.kills[who], "killed"))

    def check_orders(self, stored: set[str]) -> set[str]:
        """The orders in the database are those that were committed; none of the others. Returns what must have run:
        them, and the jobs that their handlers have put.
        """
        committed = {name for name, event in self.orders.items() if event == "committed"}
        rolled_back = {name for name, event in self.orders.items() if event == "rolls-back"}
        assert committed <= stored, f"committed and gone: {sorted(committed - stored)[:5]}"
        assert not stored & rolled_back, f"rolled back and there: {sorted(stored & rolled_back)[:5]}"
        expected = stored | {f"{name}:next" for name in stored if name.endswith("within-follows")}
        surprises = self.runs.keys() - expected
        assert not surprises, f"run, though never committed: {sorted(surprises)[:5]}"
        return expected

    def check_done(self, expected: set[str], done: Counter[str], effects: Counter[str]) -> None:
        """Each has one job, which is done and was run; what a transactional handler wrote is there once."""
        assert set(done) == expected, f"jobs too few or too many: {sorted(set(done) ^ expected)[:5]}"
        assert not [name for name, count in done.items() if count != 1], "an order with two jobs"
        never = [name for name in sorted(expected) if not any(run.how == "returns" for run in self.runs[name])]
        assert not never, f"done without having run: {never[:5]}"
        wanted = Counter(name for name in expected if ":within" in name and not name.endswith(":next"))
        wrong = {name: effects[name] for name in wanted | effects if effects[name] != wanted[name]}
        assert not wrong, f"effects that are not there exactly once: {dict(list(wrong.items())[:5])}"

    def check_runs(self, in_flight: Counter[str]) -> None:
        """A job runs again after a failure of its handler, or if it was in flight in a process that was killed."""
        for name, runs in self.runs.items():
            allowed = 1 + sum(run.how == "raises" for run in runs) + in_flight[name]
            assert len(runs) <= allowed, f"{name} was run {len(runs)} times, not at most {allowed}: {runs}"

    def check_reruns(self, stops: list[tuple[int, int]]) -> int:
        """A job runs again after a failure of its handler, or if the database was stopped meanwhile. Returns how often
        that was. ``stops``: when each was asked for, and when the server was gone.
        """
        explained = 0
        for name, one, next_one in self._pairs():
            if one.how != "raises":
                explained += 1
                between = any(one.begin <= gone and asked <= next_one.begin for asked, gone in stops)
                assert between, f"{name} was run twice, and the database was not stopped: {one}, {next_one}, {stops}"
        return explained

    def _pairs(self) -> Iterator[tuple[str, Run, Run]]:
        for name, runs in self.runs.items():
            for one, next_one in itertools.pairwise(runs):
                yield name, one, next_one

    def check_order(self, expected: set[str]) -> None:
        """Runs of a job do not overlap. Jobs of a lane run one at a time in the order of their puts; a dependant after
        the other job.
        """
        for pair in self._pairs():
            assert pair[1].end <= pair[2].begin, f"two runs overlap: {pair}"
        lanes: defaultdict[str, list[str]] = defaultdict(list)
        by_number = {name.partition(":")[0]: name for name in expected if not name.endswith(":next")}
        for name in expected:
            _, kind, *rest = name.split(":")
            if kind == "lane":
                lanes[rest[0]].append(name)
            elif kind == "after" and rest:
                self._check_pair(by_number[rest[0]], name)
                self.counts["dependants"] += 1
        for names in lanes.values():
            names.sort(key=lambda name: int(name.split(".")[1]))
            for one, next_one in itertools.pairwise(names):
                self._check_pair(one, next_one)
                self.counts["neighbours in lanes"] += 1

    def figures(self) -> dict[str, int]:
        """What there was."""
        return {
            "jobs": len(self.runs),
            "runs": sum(map(len, self.runs.values())),
            "failures": self.counts["raises"],
            "transactional": sum(":within" in name and not name.endswith(":next") for name in self.runs),
            "rolled back": sum(event == "rolls-back" for event in self.orders.values()),
            "unknown": sum(event == "unknown" for event in self.orders.values()),
            **{kind: self.counts[kind] for kind in ("dependants", "neighbours in lanes")},
        }

    def _check_pair(self, one: str, next_one: str) -> None:
        end, begin = self.runs[one][-1].end, self.runs[next_one][0].begin
        assert end <= begin, f"{next_one} began before {one} was done: {self.runs[one]}, {self.runs[next_one]}"
