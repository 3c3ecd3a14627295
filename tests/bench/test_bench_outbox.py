"""The benchmark of the outbox: that it runs, at a small size, with the peers that are installed."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from bench import measure, outbox, program
from bench.measure import LeftOut
from bench.outbox import crowded, servers, waiting
from bench.outbox.__main__ import main, workloads
from bench.outbox.consumer import Consumer
from bench.outbox.goals import GOALS
from bench.outbox.peers.base import Peer, number_of, payload
from bench.outbox.peers.floor import SqliteFloor
from bench.outbox.peers.ours import OnSqlite
from tests.support.budget import drawn

SCALE = 0.002
WITHOUT_SERVER = ("PostgreSQL is not installed", "PostgreSQL does not run as root")
# Some contenders leave connections for the garbage collector; from Python 3.13 on it says so.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def test_the_workloads_are_described_where_they_are() -> None:
    assert outbox.__doc__ is not None
    names = re.findall(r"^    ([a-z-]+)   +[\w1]", outbox.__doc__, re.MULTILINE)
    assert names == [workload.name for workload in workloads()]


@pytest.mark.parametrize("name", drawn([workload.name for workload in workloads()], 1))
def test_every_workload_runs(name: str) -> None:
    (workload,) = (one for one in workloads(1.0) if one.name == name)
    with tempfile.TemporaryDirectory(prefix=program.PREFIX) as folder:  # the server's user cannot pass to tmp_path
        scratch = Path(folder)
        result = measure.run(replace(workload, warm_up=False), repeats=1, scale=SCALE, scratch=scratch)
        assert list(scratch.iterdir()) == []
    for contender, reason in result.left_out.items():
        print(f"left out: {contender}, {reason}")
        assert not contender.startswith(("floor", "kestrelpy")) or reason.startswith(WITHOUT_SERVER)
    ran = {row.contender for row in result.rows}
    assert ran == {one.name for one in workload.contenders} - result.left_out.keys()


def test_it_is_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.json"
    only = ["--only", "batch-sqlite", "--minutes", "2", "--repeats", "1", "--scale", "0.01", "--json", str(results)]
    assert main(only) == 0
    said = capsys.readouterr().out
    assert "executemany" in said
    assert "not at full scale" in said
    assert json.loads(results.read_text())["results"][0]["workload"] == "batch-sqlite"
    assert "for 2 min" in workloads(2)[-1].text


def test_every_figure_that_a_goal_names_has_a_contender() -> None:
    there = {(workload.name, one.name) for workload in workloads() for one in workload.contenders}
    named = {figure for goal in GOALS for figure in (goal.over, goal.under) if figure is not None}
    assert {(figure.workload, figure.contender) for figure in named} <= there
    assert len({goal.text for goal in GOALS}) == len(GOALS)


def test_payloads_have_a_hundred_bytes_and_a_number() -> None:
    assert len(payload(7)) == len(payload(10**11)) == 100
    assert number_of(payload(123456)) == 123456


def test_a_consumer_says_what_it_has_run(tmp_path: Path) -> None:
    where = str(tmp_path / "jobs.db")
    with Consumer(SqliteFloor, where, fill=250, count=250) as consumer:
        consumer.start()
        ran = consumer.result()
    assert sorted(number for number, _ in ran.starts) == list(range(250))
    assert ran.first_ns < ran.marked_ns
    peer = SqliteFloor(where)
    assert peer.left() == 0
    peer.close()


def test_a_consumer_that_dies_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    with Consumer(SqliteFloor, str(tmp_path / "jobs.db")) as consumer:
        consumer._process.kill()
        consumer._process.wait()
        with pytest.raises((RuntimeError, BrokenPipeError)):
            consumer.start()


@pytest.mark.parametrize("kind", [SqliteFloor, OnSqlite])
def test_claims_take_what_is_ready_and_nothing_twice(kind: type[Peer], tmp_path: Path) -> None:
    one, two = (kind(str(tmp_path / "jobs.db")) for _ in range(2))
    one.create()
    for what in kind.crowds:
        if what != "ready":
            one.crowd(what, 1000)
    one.fill(range(120))
    one.crowd("ready", 30)
    assert [one.claim(), two.claim(), one.claim()] == [100, 50, 0]
    for peer in (one, two):
        peer.close()


def test_statements_in_a_log_are_counted() -> None:
    log = "LOG:  statement: BEGIN\nLOG:  execute <unnamed>: SELECT 1\nLOG:  execute a: SELECT 1\nLOG:  other\n"
    assert waiting.statements(log + "LOG:  statement: COMMIT\nLOG:  statement: BEGIN\n") == (5, 2)
    assert waiting.statements("") == (0, 0)
    long = "LOG:  execute a: WITH x AS (\n\tSELECT {})\n\tSELECT 2\n"
    assert waiting.statements(long.format(1) + long.format(2) + long.format(1)) == (3, 2)


def test_a_series_is_in_the_order_of_time() -> None:
    second = 10**9
    slices: list[tuple[str, int, int, float | None]] = [
        ("before", 0, second, 0.5),
        ("held", second, 2 * second, None),
        ("held", 2 * second, 4 * second, 1.5),
    ]
    puts = [(2, 0), (4, 2 * second)]  # 0 and 1 at once, 2 and 3 after two seconds
    starts = [(3, 3 * second), (0, second // 2), (1, second), (2, 2 * second)]
    assert crowded.series(slices, starts, puts) == {
        "before: jobs/s": [1.0],
        "held: jobs/s": [1.0, 1.0],
        "before: ms a claim": [0.5],
        "held: ms a claim": [1.5],
        "before: ms from commit to start, p50": [500.0],
        "held: ms from commit to start, p50": [1000.0, 500.0],
    }


def test_without_postgresql_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(servers, "DEBIAN", tmp_path)
    with pytest.raises(LeftOut, match="PostgreSQL is not installed"):
        servers.programs()


def test_without_redis_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LeftOut, match="redis-server is not installed"):
        servers.Redis(tmp_path, "always")
