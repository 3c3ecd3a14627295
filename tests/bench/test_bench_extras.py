"""The benchmark of the options runs, and sees an option that costs something."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import extras
from kestrelpy import JournaledQueue


def test_it_runs_and_names_every_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr(extras, "BLOCK", 50)
    monkeypatch.setattr(extras, "PAIRS", 2)
    results = tmp_path / "results.json"
    argv = ["--scale", "0.001", "--repeats", "1", "--json", str(results), "--dir", str(tmp_path)]
    assert extras.main(argv) == 0
    rows = [row for result in json.loads(results.read_text())["results"] for row in result["rows"]]
    assert {row["contender"] for row in rows} == set(extras.OPTIONS)
    assert len(rows) == 2 * len(extras.OPTIONS)
    assert capsys.readouterr().out.count("wanted") == len(extras.GOALS) == 2 * (len(extras.OPTIONS) - 1)


def test_an_option_that_costs_something_is_seen(tmp_path: Path) -> None:
    def twice(queue: JournaledQueue) -> Callable[[], object]:
        block = extras.put(queue)
        if not str(queue.directory).endswith("with"):
            return block
        return lambda: (block(), block())

    quotient = extras.against_plain("keep_for", twice)(tmp_path, 0.01)[extras.PHASE]
    assert isinstance(quotient, float)
    assert quotient > 1.3
