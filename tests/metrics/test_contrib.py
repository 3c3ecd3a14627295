"""What ``contrib`` and docs/metrics.md say of the metrics is so, and Prometheus takes it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from kestrelpy.metrics.table import METRICS
from tests.metrics.pages import needs_prometheus, promtool
from tests.support.paths import ROOT

RULES = ROOT / "contrib/prometheus/kestrelpy.rules.yml"
CASES = ROOT / "contrib/prometheus/kestrelpy.rules.test.yml"
BOARD = ROOT / "contrib/grafana/kestrelpy.json"
PAGE = ROOT / "docs/metrics.md"
SAMPLES = {*METRICS, *(f"kestrel_sync_seconds_{part}" for part in ("bucket", "count", "sum"))}


def expressions(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def unknown(text: str) -> set[str]:
    """The names in a text that no metric has."""
    return set(re.findall(r"\bkestrel_[a-z_]+", text)) - SAMPLES


@needs_prometheus
def test_the_rules_are_rules() -> None:
    checked = promtool("check", "rules", str(RULES))
    assert (checked.returncode, checked.stderr) == (0, ""), checked.stderr


@needs_prometheus
def test_each_alert_fires_and_does_not_fire() -> None:
    checked = promtool("test", "rules", str(CASES))
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_each_alert_has_a_case_of_either_kind() -> None:
    alerts = re.findall(r"- alert: (\w+)", RULES.read_text())
    cases = CASES.read_text()
    assert len(alerts) == len(set(alerts)) >= 6
    for alert in alerts:
        assert re.search(rf"{{alertname: {alert}, eval_time: \w+, exp_alerts: \[\]}}", cases), alert
        assert re.search(rf"alertname: {alert}\n\s+eval_time: \w+\n\s+exp_alerts:\n\s+- exp_labels", cases), alert


@needs_prometheus
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("kestrel_up == 0", "kestrel_up == 1"),
        ("kestrel_oldest_item_age_seconds > 300", "kestrel_oldest_item_age_seconds > 299"),
        ("kestrel_lag_bytes > 1073741824", "kestrel_lag_bytes >= 1073741824"),
        ("increase(kestrel_refused_total[5m]) > 0", "kestrel_refused_total > 0"),
        ("rate(kestrel_sync_seconds_bucket[5m])) > 0.5", "rate(kestrel_sync_seconds_bucket[5m])) > 0.05"),
        ("min_over_time(kestrel_pending_batches[10m]) > 0", "kestrel_pending_batches > 0"),
        (" and delta(kestrel_pending_batches[10m]) >= 0", ""),
        ("increase(kestrel_checkpoint_failures_total[10m]) > 0", "increase(kestrel_refused_total[10m]) > 0"),
    ],
)
def test_a_wrong_rule_is_seen(right: str, wrong: str, tmp_path: Path) -> None:
    text = RULES.read_text()
    assert text.count(right) == 1
    (tmp_path / RULES.name).write_text(text.replace(right, wrong))
    shutil.copy(CASES, tmp_path)
    assert promtool("test", "rules", str(tmp_path / CASES.name)).returncode == 1


@needs_prometheus
def test_the_expressions_of_the_dashboard_are_queries(tmp_path: Path) -> None:
    queries = expressions(json.loads(BOARD.read_text()))
    assert len(queries) > 20
    lines = ["groups:", "- name: dashboard", "  rules:"]
    for query in queries:
        plain = query.replace("$__rate_interval", "5m").replace("$queue", ".*")
        assert "$" not in plain
        lines += [f"  - record: panel:of:dashboard\n    expr: {json.dumps(plain)}"]
    path = tmp_path / "dashboard.yml"
    path.write_text("\n".join(lines) + "\n")
    checked = promtool("check", "rules", "--lint=none", str(path))
    assert checked.returncode == 0, checked.stderr
    path.write_text(path.read_text().replace("rate(", "rat("))
    assert promtool("check", "rules", "--lint=none", str(path)).returncode != 0


def test_the_dashboard_is_whole() -> None:
    board = json.loads(BOARD.read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels), "none hides another"
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "queue"}
    shown = {name for query in expressions(board) for name in re.findall(r"kestrel_[a-z_]+", query)}
    kept_for_queries = {"kestrel_info", "kestrel_bytes", "kestrel_segments", "kestrel_sync_seconds"}
    assert SAMPLES - shown - kept_for_queries == {"kestrel_sync_seconds_count", "kestrel_sync_seconds_sum"}


@pytest.mark.parametrize("path", [RULES, CASES, BOARD, PAGE], ids=lambda path: path.name)
def test_no_name_is_wrong(path: Path) -> None:
    assert unknown(path.read_text()) == set()
    assert unknown("rate(kestrel_puts_total[5m])") == {"kestrel_puts_total"}


def test_the_page_lists_each_metric_with_its_labels() -> None:
    rows = re.findall(r"^\| `(kestrel_\w+)` \| ([^|]*) \| ([^|]*) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    listed = {name: tuple(re.findall(r"`(\w+)`", labels)) for name, labels, _, _ in rows}
    assert listed == {metric.name: metric.labels for metric in METRICS.values()}
    assert [name for name, *_ in rows] == list(METRICS)
    sources = {source for _, _, from_, _ in rows for source in from_.strip().split(", ")}
    assert sources == {"open", "files", "jobs", "server"}
