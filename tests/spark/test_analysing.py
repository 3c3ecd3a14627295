"""The commands ``lake`` and ``report``: what they do, and what they say where they cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import kestrelpy.spark
from kestrelpy.cli import main
from tests.spark.archives import archived, make_archive
from tests.spark.sessions import need_java, slow_spark, spark  # noqa: F401


class Shared:
    """The session of all tests: a command must not end it."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.stopped = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def session(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Shared:  # noqa: F811
    shared = Shared(spark)
    monkeypatch.setattr(kestrelpy.spark, "local_session", lambda **_: shared)
    return shared


def test_an_archive_becomes_a_lake(tmp_path: Path, session: Shared, capsys: pytest.CaptureFixture[str]) -> None:
    rows = make_archive(tmp_path, items=200)
    damaged = archived(tmp_path)[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    command = ["lake", str(tmp_path / "archive"), str(tmp_path / "lake"), "--delete"]
    assert main(command) == 1
    told = capsys.readouterr()
    where = f"{damaged}, offset {damaged.stat().st_size - 96}"
    assert told.err == f"kestrelpy lake: {where}: the footer of this closed segment is not intact\n"
    assert main([*command, "--skip-damaged"]) == 1
    told = capsys.readouterr()
    assert told.out == "0 segments converted: 0 items, 0 B of data, 0 B of Parquet; 0 known, 0 deleted\n"
    assert told.err.count("\n") == 1
    assert archived(tmp_path) == [damaged]
    found = pq.read_table(str(tmp_path / "lake"), columns=["id"]).num_rows
    assert 0 < found < len(rows)
    assert session.stopped


def test_what_a_task_raises_is_one_line(tmp_path: Path, session: Shared, capsys: pytest.CaptureFixture[str]) -> None:
    make_archive(tmp_path, items=60)
    damaged = archived(tmp_path)[0]
    damaged.write_bytes(damaged.read_bytes()[:200])
    assert main(["report", str(tmp_path / "archive"), str(tmp_path / "out")]) == 1
    told = capsys.readouterr()
    assert told.err == f"kestrelpy report: {damaged}, offset 104: the footer of this closed segment is not intact\n"
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty"), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == f"kestrelpy report: there are no items in {tmp_path}/empty\n"
    assert main(["report", str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 1
    told = capsys.readouterr()
    assert told.err.count("\n") == 1
    assert "nowhere" in told.err


@slow_spark
def test_a_process_of_its_own_says_one_line(tmp_path: Path) -> None:
    need_java()
    make_archive(tmp_path, items=60)
    damaged = archived(tmp_path)[0]
    damaged.write_bytes(damaged.read_bytes()[:200])
    command = [sys.executable, "-m", "kestrelpy", "report", str(tmp_path / "archive"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"kestrelpy report: {damaged}, offset 104: the footer of this closed segment is not intact\n"


@pytest.mark.parametrize("command", ["lake", "report"])
def test_without_the_extra_or_java(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert main([command, str(tmp_path), str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"kestrelpy {command}: Spark needs Java 17 or 21")
    assert told.count("\n") == 1
    monkeypatch.setitem(sys.modules, "pyspark.errors", None)
    assert main([command, str(tmp_path), str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err
        == f"kestrelpy {command}: this needs the extra [spark]: pip install 'kestrelpy[spark]'\n"
    )
