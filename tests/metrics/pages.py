"""What tests read of a page for Prometheus, and the programs of Prometheus that check one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kestrelpy.metrics import Collector

needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None or shutil.which("prometheus") is None,
    reason="Prometheus is missing: apt install prometheus",
)

Figures = dict[tuple[str, frozenset[tuple[str, str]]], float]


def page_of(*targets: Any, **options: Any) -> str:
    """The page of one collector."""
    registry = CollectorRegistry()
    registry.register(Collector(*targets, **options))
    return generate_latest(registry).decode()


def figures_on(page: str) -> Figures:
    """The samples of a page, by name and labels. None is there twice."""
    found: Figures = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, key
            found[key] = sample.value
    return found


def figure(figures: Figures, name: str, **labels: str) -> float:
    """One sample."""
    return figures[name, frozenset(labels.items())]


def about(figures: Figures, **labels: str) -> dict[str, float]:
    """The samples that have these labels, by name; those of a histogram's buckets are left out."""
    wanted = set(labels.items())
    return {name: value for (name, its), value in figures.items() if wanted <= its and not name.endswith("_bucket")}


def types_on(page: str) -> dict[str, str]:
    """The type of each metric, by its name."""
    lines = (line.split() for line in page.splitlines() if line.startswith("# TYPE"))
    return {name: kind for _, _, name, kind in lines}


def promtool(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """What promtool says."""
    command = ["promtool", *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=60)


def lines_of(text: str, names: Iterable[str]) -> list[str]:
    """The lines of a text that begin with one of these names."""
    return [line for line in text.splitlines() if line.startswith(tuple(names))]
