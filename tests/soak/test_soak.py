"""The soak runs tasks, keeps a ledger, and notes what breaks; the page on guarantees has what the ledger has."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.kinds import KINDS, call
from tests.soak.ledger import LEDGER, PAGE, RUNS, Failure, Run, listing, load, page, save, table
from tests.support.paths import ROOT


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)


def soak(tmp_path: Path, kinds: str) -> tuple[int, list[Run]]:
    """A soak of hardly any time: the first tasks are begun at once, and come to their end."""
    script = (
        "import sys\n"
        "from tests.soak import kinds\n"
        f"kinds.KINDS = ({kinds},)\n"
        f"sys.argv = ['soak', '--hours', '0.0001', '--seed', '7', '--ledger', {str(tmp_path / 'ledger.json')!r}]\n"
        "from tests.soak.__main__ import main\n"
        "sys.exit(main())\n"
    )
    done = run([sys.executable, "-c", script])
    assert "Error" not in done.stderr.replace("ZeroDivisionError", ""), done.stderr
    return done.returncode, load(tmp_path / "ledger.json")


def test_what_was_seen_is_kept(tmp_path: Path) -> None:
    kind = "kinds.Kind('small cases', 10, lambda n: kinds.call('crash.small', 'run', 1, 0, 8))"
    status, [run] = soak(tmp_path, kind)
    assert status == 0
    assert run.counts["small cases"] > 50
    assert run.seed == 7
    assert not run.failures


def test_what_breaks_is_noted_and_fails_the_soak(tmp_path: Path) -> None:
    status, [run] = soak(tmp_path, "kinds.Kind('broken', 10, lambda n: [sys.executable, '-c', 'print(1 // 0)'])")
    assert status == 1
    assert run.counts == {"broken": 0}
    assert "ZeroDivisionError" in run.failures[0].said


def test_every_kind_names_a_harness_that_is_there() -> None:
    for kind in KINDS:
        module, function = kind.command(1)[3:5]
        assert callable(getattr(importlib.import_module(module), function))


def test_a_task_prints_what_it_counted() -> None:
    done = run(call("crash.small", "run", 1, 0, 8))
    assert done.returncode == 0, done.stderr
    assert sum(json.loads(done.stdout).values()) > 50


def test_a_run_replaces_what_was_known_of_it_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    first, second = Run(1, "monday", {}), Run(2, "monday", {})
    for run in (first, second, Run(1, "monday", {}, counts={"kills": 5})):
        save(path, run)
    assert [(run.seed, run.counts) for run in load(path)] == [(2, {}), (1, {"kills": 5})]


def test_a_failure_takes_the_bound_away() -> None:
    good = Run(1, "monday", {}, counts={"kills": 900, "cuts": 300})
    bad = Run(
        2, "tuesday", {}, counts={"kills": 100}, failures=[Failure("kills", "a command", "what it said", "mended")]
    )
    text = table([good, bad])
    assert "| kills | 1,000 | see the [ledger](ledger.md) |" in text
    assert "| cuts | 300 | 100 |" in text
    assert "kills: `a command`. mended" in listing([good, bad])


@pytest.mark.skipif(not LEDGER.exists(), reason="there is no ledger yet")
def test_the_page_has_what_the_ledger_has() -> None:
    runs = load(LEDGER)
    for path, what in ((PAGE, table(runs)), (RUNS, listing(runs))):
        text = path.read_text()
        assert page(text, what) == text, "python -m tests.soak.ledger writes it"
