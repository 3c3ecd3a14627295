"""The benchmarks: that they run, not how fast."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from bench import against, detached, measure, report, scale
from bench.__main__ import main
from bench.measure import Contender, Figures, LeftOut, Workload
from bench.workloads import WORKLOADS
from tests.support.budget import drawn
from tests.support.paths import ROOT

SCALE = 0.002
# Some contenders leave connections for the garbage collector; from Python 3.13 on it says so.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def test_the_workloads_are_described_where_they_are() -> None:
    from bench import workloads

    assert workloads.__doc__ is not None
    names = re.findall(r"^ *([a-z-]+)   +[\w1]", workloads.__doc__, re.MULTILINE)
    assert names == [workload.name for workload in WORKLOADS]


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "put,disk,readers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [lines[at].split()[0] for at in (0, 2, 5)] == ["put", "readers", "disk"]
    assert lines[3].split() == ["readers:", "1,", "4,", "16,", "64"]


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

    def no_room(_folder: Path, _scale: float) -> Figures:
        raise LeftOut("no room")

    contenders = (contender("a"), contender("b"), Contender("c", missing), Contender("d", no_room))
    result = measure.run(Workload("w", "text", "s", contenders), repeats=2, scale=1.0, scratch=tmp_path)
    assert calls == ["a", "b", "a", "b", "b", "a"]
    assert [(row.contender, row.phase, row.samples) for row in result.rows] == [
        ("a", "time", [3.0, 6.0]),
        ("b", "time", [4.0, 5.0]),
        ("a", "twice", [1.0, 2.0] * 2),
        ("b", "twice", [1.0, 2.0] * 2),
    ]
    assert result.left_out == {"c": "something is not installed", "d": "no room"}
    assert "left out: c, something is not installed" in report.table(result)


def _family(name: str, factor: float) -> tuple[Contender, ...]:
    return measure.along((1, 10), name, lambda at, _folder, _scale: {"put": at * factor, "take": 1.0})


def test_an_axis_is_a_family_of_contenders_compared_place_by_place(tmp_path: Path) -> None:
    workload = Workload("w", "text", "s", (*_family("a", 1.0), *_family("b", 3.0)), axis="threads")
    result = measure.run(workload, repeats=1, scale=1.0, scratch=tmp_path)
    assert [(row.contender, row.at, row.median, row.ratio(result.first(row))) for row in result.rows[:4]] == [
        ("a", 1, 1.0, 1.0),
        ("b", 1, 3.0, 3.0),
        ("a", 10, 10.0, 1.0),
        ("b", 10, 30.0, 3.0),
    ]
    assert "b          put, threads: 10" in report.table(result)
    facts = report.as_json([result], repeats=1, scale=1.0, scratch=tmp_path)["results"][0]
    assert (facts["axis"], facts["rows"][1]["at"], facts["rows"][1]["times"]) == ("threads", 1, 3.0)


def test_a_family_that_is_alone_is_compared_with_its_first_place(tmp_path: Path) -> None:
    workload = Workload("w", "text", "s", _family("a", 1.0), axis="threads")
    result = measure.run(workload, repeats=1, scale=1.0, scratch=tmp_path)
    assert [row.ratio(result.first(row)) for row in result.rows] == [1.0, 10.0, 1.0, 1.0]


def test_what_fails_in_a_thread_fails() -> None:
    assert measure.together([int, int]) >= 0
    with pytest.raises(ZeroDivisionError):
        measure.together([int, lambda: 1 // 0])


def test_percentiles() -> None:
    samples = [float(number) for number in range(100, 0, -1)]
    assert [measure.percentile(samples, share) for share in (0, 0.5, 0.99, 1)] == [1, 51, 100, 100]


@pytest.mark.parametrize("name", drawn([workload.name for workload in WORKLOADS], 5))
def test_every_workload_runs(name: str, tmp_path: Path) -> None:
    (workload,) = (one for one in WORKLOADS if one.name == name)
    if workload.name == "import":
        workload = replace(workload, contenders=workload.contenders[:2])  # each starts three interpreters
    result = measure.run(replace(workload, warm_up=False), repeats=1, scale=SCALE, scratch=tmp_path)
    for contender, reason in result.left_out.items():
        print(f"left out: {contender}, {reason}")
        assert not contender.startswith(("kestrelpy", "floor"))
    ran = {(row.contender, row.at) for row in result.rows}
    assert ran == {(one.name, one.at) for one in workload.contenders if one.name not in result.left_out}
    assert all(min(row.samples) >= 0 for row in result.rows if workload.name not in ("backlog", "import"))
    assert list(tmp_path.iterdir()) == []


def test_every_hot_path_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against, "COUNT", 1_000)
    figures = against.measure(list(against.PATHS), str(tmp_path))
    assert figures.keys() == against.PATHS.keys()
    assert all(0 < each < 10_000 for each in figures.values())
    assert list(tmp_path.iterdir()) == []


def test_a_backlog_that_has_no_room_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "REOPEN_BYTES", 10**18)
    (workload,) = (one for one in WORKLOADS if one.name == "reopen")
    result = measure.run(workload, repeats=1, scale=1.0, scratch=tmp_path)
    assert result.rows == []
    assert "it needs 1,500,000,000.0 GB of free disk" in result.left_out["kestrelpy"]


def test_a_far_end_that_does_not_start_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    with ExitStack() as stack, pytest.raises(RuntimeError, match="did not start"):
        detached._begin("nobody", tmp_path, stack)


def test_a_far_end_that_dies_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    with ExitStack() as stack:
        far = detached._begin("pipe", tmp_path, stack)
        far.part("first", 3, ahead=0)
        far.process.kill()
        far.process.wait()
        far.sent += 1
        with pytest.raises(RuntimeError, match="has died"):
            far.hear(0)


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


def test_a_run_ends_with_its_goals_and_writes_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    only = ["--only", "memory", "--repeats", "1", "--scale", "0.005", "--dir", str(tmp_path), "--json", str(path)]
    assert main(only) == 0
    out = capsys.readouterr().out
    assert "queue.Queue's time over ours" in out
    assert "at a scale of 0.005" in out
    assert "not measured" not in out
    assert main(["goals", str(path)]) == 0
    again = capsys.readouterr().out
    assert "queue.Queue's time over ours" in again
    assert "not measured" in again
    assert list(tmp_path.iterdir()) == [path]
