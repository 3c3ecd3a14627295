"""The pictures of the benchmarks: that they are drawn, small, and the same each time."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from bench import plots
from bench.outbox.__main__ import workloads as outbox
from bench.workloads import WORKLOADS

OUTBOX = outbox()
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def _row(contender: str, phase: str, median: float, at: int | None = None) -> dict[str, Any]:
    row = {"contender": contender, "phase": phase, "min": median * 0.9, "median": median, "max": median * 1.2}
    return row if at is None else row | {"at": at}


def _series(contender: str) -> list[dict[str, Any]]:
    samples = {"before": [1000.0, 999.0], "held": [900.0, 400.0, 200.0], "after": [1000.0]}
    return [{"samples": found, **_row(contender, f"{part}: jobs/s", 1.0)} for part, found in samples.items()]


def _facts() -> dict[str, Any]:
    machine = {"cores": 2, "processor": "a processor", "python": "CPython 3.11", "file_system": "ext4"}
    sized = [_row(name, "put", at / 10, at) for name in ("kestrelpy never", "queuelib") for at in (10, 100)]
    results = [
        {"workload": "put", "rows": [_row("kestrelpy never", "put", 1.0), _row("queuelib", "put", 1234.0)]},
        {"workload": "size", "axis": "bytes", "rows": [*sized, _row("floor", "put", 0.5, 10)]},
        {"workload": "readers", "axis": "readers", "rows": [_row("kestrelpy never", "put", 1.0, at) for at in (1, 16)]},
        {"workload": "held", "rows": [*_series("kestrelpy"), *_series("floor"), _row("floor", "seconds a slice", 5.0)]},
    ]
    return {"machine": machine, "settings": {"repeats": 7, "scale": 1.0}, "results": results}


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
# What a drawing library deprecates between its own parts is not for us to mend.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_pictures_are_small_and_the_same_each_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "results.json"
    source.write_text(json.dumps(_facts()), encoding="utf-8")
    assert plots.main([str(source), "--into", str(tmp_path / "one")]) == 0
    made = sorted((tmp_path / "one").iterdir())
    assert [path.name for path in made] == ["outbox-held-rate.png", "put.png", "readers.png", "size.png"]
    assert len(capsys.readouterr().out.splitlines()) == 4
    plots.draw(_facts(), tmp_path / "two")
    for path in made:
        data = path.read_bytes()
        assert data[:4] == b"\x89PNG"
        assert len(data) < 100_000
        assert (tmp_path / "two" / path.name).read_bytes() == data
        assert b"Matplotlib" not in data


def test_without_the_library_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise ImportError("no", name=name)

    monkeypatch.setattr(plots, "import_module", missing)
    source = tmp_path / "results.json"
    source.write_text(json.dumps(_facts()), encoding="utf-8")
    assert plots.main([str(source), "--into", str(tmp_path / "one")]) == 1
    assert "matplotlib is not installed" in capsys.readouterr().err


def test_a_picture_is_of_a_workload() -> None:
    axes = {workload.name: workload.axis for workload in (*OUTBOX, *WORKLOADS)}
    assert all(axes[picture.workload] == "" for picture in plots.BARS)
    assert all(axes[picture.workload] for picture in plots.LINES)
    files = [picture.file for picture in (*plots.BARS, *plots.LINES)]
    assert len(set(files)) == len(files)
