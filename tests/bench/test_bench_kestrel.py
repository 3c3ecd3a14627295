"""The benchmark of the kestrel server runs, at a small size, with the servers that are installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import kestrel
from tests.support.budget import takes_long


@takes_long
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.json"
    only = "never,fan-out,backlog,queues"
    assert kestrel.main(["--only", only, "--repeats", "1", "--scale", "0.002", "--json", str(results)]) == 0
    said = capsys.readouterr().out
    assert "pipelined, open, close" in said
    assert "put with 16 fan-outs over put with none" in said
    rows = json.dumps(json.loads(results.read_text()))
    for name in (kestrel.KESTREL, kestrel.BEANSTALK):
        assert name in rows


def test_an_unknown_workload_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kestrel.main(["--only", "nothing"])
    assert "no workload nothing" in capsys.readouterr().err
