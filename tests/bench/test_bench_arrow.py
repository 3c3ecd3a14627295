"""The benchmark of Arrow runs, and reads what was put."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import arrow


def test_it_runs_and_says_what_is_reached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "x.json"
    assert arrow.main(["--scale", "0.001", "--repeats", "1", "--json", str(results), "--dir", str(tmp_path)]) == 0
    rows = [
        (result["workload"], row["contender"], row["phase"])
        for result in json.loads(results.read_text())["results"]
        for row in result["rows"]
    ]
    assert len(set(rows)) == len(rows) == 2 * 3 * 2 * len(arrow.USES)
    out = capsys.readouterr().out
    assert out.count("wanted") == len(arrow.GOALS)


def test_a_read_that_loses_rows_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(arrow.USES, "polars", lambda stream: arrow.to_polars(stream) - 1)
    with pytest.raises(AssertionError, match="polars has read 1999 of 2000"):
        arrow.main(["--scale", "0.001", "--repeats", "1", "--only", "one size", "--dir", str(tmp_path)])
