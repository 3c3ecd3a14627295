"""The goals of the benchmarks: that the arithmetic is right, and that each figure they name is one that is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import goals
from bench.goals import GOALS, GOALS_ON_SPARK, Figure, Goal
from bench.workloads import ON_SPARK, WORKLOADS
from tests.support.paths import ROOT

RESULTS = sorted((ROOT / "bench" / "results").glob("*.json"))


def facts_of(figures: dict[Figure, float], scale: float = 1.0) -> dict[str, Any]:
    """Results that have these medians."""
    results = [
        {
            "workload": figure.workload,
            "rows": [
                {"contender": figure.contender, "phase": figure.phase, "median": median}
                | ({} if figure.at is None else {"at": figure.at})
            ],
        }
        for figure, median in figures.items()
    ]
    return {"settings": {"scale": scale}, "results": results}


A, B = Figure("w", "a", "put"), Figure("w", "b", "put", 4)


@pytest.mark.parametrize(
    ("goal", "value", "reached"),
    [
        (Goal("", A, B, at_least=3.0), 3.0, True),
        (Goal("", A, B, at_least=3.1), 3.0, False),
        (Goal("", B, A, at_most=0.34), 1 / 3, True),
        (Goal("", B, A, at_most=0.33), 1 / 3, False),
        (Goal("", A, at_most=6.0), 6.0, True),
        (Goal("", A, at_most=5.9), 6.0, False),
    ],
)
def test_a_goal_is_a_quotient_or_a_figure(goal: Goal, value: float, reached: bool) -> None:
    figures = goals.figures_of(facts_of({A: 6.0, B: 2.0}))
    assert goal.measured(figures) == pytest.approx(value)
    assert goal.reached(value) is reached


def test_what_was_not_measured_is_neither_reached_nor_short() -> None:
    assert Goal("", A, B, at_least=3.0).measured({A: 1.0}) is None
    assert Goal("", A, B, at_least=3.0).measured({B: 1.0}) is None
    assert Goal("", A, B, at_least=3.0).measured({A: 1.0, B: 0.0}) is None


def test_the_table() -> None:
    ours, theirs = Figure("put", goals.OURS, "put"), Figure("put", "queuelib", "put")
    facts = facts_of({ours: 1.0, theirs: 1.3, Figure("put", "floor", "put"): 0.5}, scale=0.1)
    short = goals.table(facts, all_of_them=False).splitlines()
    assert [line.split()[-1] for line in short[2:4]] == ["reached", "SHORT"]
    assert "1 of 2 reached" in short[4]
    assert "scale of 0.1" in short[5]
    assert len(goals.table(facts, all_of_them=True).splitlines()) == len(GOALS) + 4
    assert goals.table(facts_of({}), all_of_them=False) == ""
    on_spark = goals.table(facts_of({Figure("spark-sink", "kestrelpy", "sink"): 4.0}), all_of_them=True)
    assert len(on_spark.splitlines()) == len(GOALS_ON_SPARK) + 3


def test_every_figure_that_a_goal_names_has_a_contender() -> None:
    there = {(workload.name, one.name, one.at) for workload in (*WORKLOADS, *ON_SPARK) for one in workload.contenders}
    named = {figure for goal in (*GOALS, *GOALS_ON_SPARK) for figure in (goal.over, goal.under) if figure is not None}
    assert {(figure.workload, figure.contender, figure.at) for figure in named} <= there
    assert len({goal.text for goal in GOALS}) == len(GOALS)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: str(path.name))
def test_results_that_are_kept_can_be_read(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert goals.main([str(path)]) == 0
    assert "reached" in capsys.readouterr().out
    facts = json.loads(path.read_text("utf-8"))
    assert len(goals.figures_of(facts)) == sum(len(result["rows"]) for result in facts["results"])
