"""The plugin for pytest, as pytest finds it where kestrelpy is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.paths import ROOT

TESTS = """
import sys

import pytest

from kestrelpy.outbox import Outbox, OutboxError

HEAVY = {"sqlalchemy", "tenacity", "unittest.mock", "kestrelpy.testing", "kestrelpy.outbox.testing"}
loaded = HEAVY & set(sys.modules)
outbox = Outbox()
outbox.add_consumer("mail", str.upper)


def test_nobody_pays_who_does_not_use_it(request):
    assert request.config.pluginmanager.hasplugin("kestrelpy-outbox")
    assert loaded == set()


def test_it_is_virtual_in_the_test(virtual_outbox):
    test = virtual_outbox(outbox, now_ms=5)
    assert test.put("mail", "ann").added_ms == 5
    assert test.consume("mail") == "ANN"
    with virtual_outbox(Outbox()) as other:
        assert other.jobs() == []
    other = virtual_outbox(Outbox(), "sqlite://")
    assert other.jobs() == []


def test_it_is_as_before(virtual_outbox):
    assert not outbox.core.is_virtual
    with pytest.raises(OutboxError, match="not bound"):
        outbox.jobs()


@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
def test_that_fails(virtual_outbox):
    virtual_outbox(outbox).put("mail", 1)
    raise ZeroDivisionError


test_it_is_as_before_after_a_failure = test_it_is_as_before
test_it_is_virtual_again = test_it_is_virtual_in_the_test


def test_that_shows_its_own_line(virtual_outbox):
    test = virtual_outbox(outbox)
    test.consume("mail")
"""


@pytest.fixture
def run_tests(tmp_path: Path) -> Callable[..., str]:
    """What pytest says, started by this program, with a kestrelpy that is installed as a wheel would be."""
    site = tmp_path / "site"
    about = site / "kestrelpy-9.dist-info"
    about.mkdir(parents=True)
    (site / "kestrelpy").symlink_to(ROOT / "kestrelpy")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = "".join(f"{name} = {value}\n" for name, value in project["entry-points"]["pytest11"].items())
    (about / "entry_points.txt").write_text(f"[pytest11]\n{points}")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kestrelpy\nVersion: 9\n")
    (about / "RECORD").write_text("kestrelpy/__init__.py,,\nkestrelpy-9.dist-info/METADATA,,\n")
    (tmp_path / "test_mails.py").write_text(TESTS)

    def run(program: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program, "-p", "no:cacheprovider", "-W", "error", "--color=no", "test_mails.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": ""},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.stdout + done.stderr

    return run


@pytest.mark.parametrize("before", ["", "import kestrelpy.queue\n"], ids=["", "imported-before"])
def test_the_fixture_is_there_cleans_up_and_costs_nothing(run_tests: Callable[..., str], before: str) -> None:
    said = run_tests(f"{before}import sys, pytest\nsys.exit(pytest.main(sys.argv[1:]))")
    assert "1 failed, 5 passed, 1 xfailed" in said, said
    assert "E       AssertionError: no job of queue 'mail' is due:\nE         there are no jobs" in said
    assert "test_mails.py:47: AssertionError" in said  # the line of the test, and none of the kit
    assert "outbox/testing.py" not in said
