"""What a soak runs: every kind of test that goes on for as long as one likes, each in small tasks with seeds of their
own, and how many of each are to be published.

A task is a program: it prints its counters as one line of JSON, or what broke, and exits with 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class Kind:
    """``command(seed)``: the program of one task. ``counts``: which of its counters are cases of this kind; all, if it
    is empty. ``wanted``: how many of them a published ledger has.
    """

    name: str
    wanted: int
    command: Callable[[int], list[str]]
    counts: tuple[str, ...] = ()
    missing: Callable[[], str | None] = lambda: None
    """Why it cannot run here."""

    def count(self, counters: dict[str, int]) -> int:
        return sum(counters.get(name, 0) for name in self.counts) if self.counts else sum(counters.values())


def call(module: str, function: str, *arguments: object) -> list[str]:
    """The program that calls ``function`` of a harness, ``tests.MODULE``, and prints the counters that it returns.
    It is run in the project's folder.
    """
    return [sys.executable, "-m", "tests.soak.call", f"tests.{module}", function, *map(str, arguments)]


def damaged(kind: str, number: int) -> list[str]:
    return call("fuzz.campaign", "run", kind, number, 20_000)


def small_cases(number: int) -> list[str]:
    """Every sequence of four steps and of five, in parts, beginning somewhere among them."""
    part = number % (FOUR_STEPS + FIVE_STEPS)
    if part < FOUR_STEPS:
        return call("crash.small", "run", 4, part, FOUR_STEPS)
    return call("crash.small", "run", 5, part - FOUR_STEPS, FIVE_STEPS)


FOUR_STEPS, FIVE_STEPS = 100, 2_000
"""How many parts there are."""


def system(name: str, wanted: int, limit: int, counts: str) -> Kind:
    """A kind of tests/processes, so many cases a task."""

    def missing() -> str | None:
        from tests.processes.system_soaks import reason_not_available  # and not above: it looks at the whole machine

        return reason_not_available(name)

    return Kind(name, wanted, lambda n: call("processes.system_soaks", "soak", name, n, limit), (counts,), missing)


KINDS = (
    Kind("crash states of seeded workloads", 15_000_000, lambda n: call("crash.explorer", "run", n, 25_000)),
    Kind("crash states of small cases", 5_000_000, small_cases),
    Kind("crash states of inboxes", 1_000_000, lambda n: call("crash.inbox_explorer", "run", n, 10_000)),
    Kind("injected I/O faults", 500_000, lambda n: call("crash.injected", "run", n, 10_000)),
    *(
        Kind(
            f"damaged inputs: {kind}",
            wanted,
            partial(damaged, kind),
            ("inputs",),
        )
        for kind, wanted in (
            ("damaged", 1_500_000),
            ("forged", 750_000),
            ("segments", 3_250_000),
            ("checkpoints", 4_500_000),
        )
    ),
    Kind("interrupts", 60_000, lambda n: call("interrupts.interrupting", "run", n, "limit=20")),
    Kind("schedules", 60_000, lambda n: call("interleavings.schedules", "run", n, 500), ("schedules",)),
    Kind(
        "steps of use",
        20_000_000,
        lambda n: call("use.use_explorer", "soak", n, 200_000),
        ("steps",),
    ),
    Kind("schedules of use", 20_000, lambda n: call("use.use_scenes_threads", "run", n, 500), ("schedules",)),
    system("kills", 10_000, 200, "kills"),
    system("power cuts on ext4", 1_200, 100, "cuts"),
    system("power cuts on xfs", 800, 60, "cuts"),
    system("failing calls", 2_700, 100, "cases"),
    system("full files", 4_400, 400, "rooms"),
    system("full file systems", 1_000, 100, "rooms"),
    *(system(f"a full {kind}", 800, 20, "rounds") for kind in ("ext4", "xfs", "btrfs", "tmpfs")),
    system("forks", 500, 50, "forks"),
    system("races for a queue", 10_000, 500, "rounds"),
    system("races for a reader", 10_000, 500, "rounds"),
)
