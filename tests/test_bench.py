"""The benchmarks: that they run, not how fast."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import measure, report
from bench.__main__ import main
from bench.floor import make_floor
from bench.measure import Contender, Figures, Workload
from bench.workloads import WORKLOADS

ROOT = Path(__file__).parent.parent
# Some contenders leave connections for the garbage collector; from Python 3.13 on it says so.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
QUICK = [workload for workload in WORKLOADS if workload.name not in ("backlog", "reopen", "import")]


def test_the_workloads_are_described_where_they_are() -> None:
    from bench import workloads

    assert workloads.__doc__ is not None
    names = re.findall(r"^ *([a-z-]+)   +[\w1]", workloads.__doc__, re.MULTILINE)
    assert names == [workload.name for workload in WORKLOADS]


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "put,disk"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [lines[0].split()[0], lines[2].split()[0]] == ["put", "disk"]


def test_an_unknown_workload_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "nonsense"])
    assert "no workload nonsense" in capsys.readouterr().err


def test_rounds_take_turns_and_the_first_does_not_count(tmp_path: Path) -> None:
    calls: list[str] = []

    def contender(name: str) -> Contender:
        def work(folder: Path, _scale: float) -> Figures:
            assert list(folder.iterdir()) == []
            calls.append(name)
            return {"time": float(len(calls)), "twice": [1.0, 2.0]}

        return Contender(name, work)

    def missing(_folder: Path, _scale: float) -> Figures:
        raise ImportError("no", name="something")

    workload = Workload("w", "text", "s", (contender("a"), contender("b"), Contender("c", missing)))
    result = measure.run(workload, repeats=2, scale=1.0, scratch=tmp_path)
    assert calls == ["a", "b", "a", "b", "b", "a"]
    assert [(row.contender, row.phase, row.samples) for row in result.rows] == [
        ("a", "time", [3.0, 6.0]),
        ("b", "time", [4.0, 5.0]),
        ("a", "twice", [1.0, 2.0] * 2),
        ("b", "twice", [1.0, 2.0] * 2),
    ]
    assert result.left_out == {"c": "something is not installed"}
    assert "left out: c, something is not installed" in report.table(result)


@pytest.mark.parametrize("workload", QUICK, ids=[workload.name for workload in QUICK])
def test_every_workload_runs(workload: Workload, tmp_path: Path) -> None:
    result = measure.run(replace(workload, warm_up=False), repeats=1, scale=0.002, scratch=tmp_path)
    names = {row.contender for row in result.rows} | set(result.left_out)
    assert names == {contender.name for contender in workload.contenders}
    assert all(row.median >= 0 for row in result.rows)
    assert list(tmp_path.iterdir()) == []


def test_the_json_names_the_machine_but_not_the_host(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--only", "memory", "--repeats", "1", "--scale", "0.005", "--json", "-"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["machine"]["cores"] >= 1
    assert facts["machine"]["python"]
    row = facts["results"][0]["rows"][0]
    assert row["min"] <= row["median"] <= row["max"]
    assert str(ROOT) not in done.stdout


def test_the_floor_is_a_queue_of_sorts(tmp_path: Path) -> None:
    put, take, commit, close = make_floor(tmp_path / "floor", 1000)
    assert [put(b"a"), put(b"b")] == [1, 2]
    assert take()[:2] == (1, b"a")
    commit(1)
    assert take()[:2] == (2, b"b")
    close()
    assert (tmp_path / "floor").read_bytes()[32:33] == b"a"
